/* fake_torch.c: a libtorch_cpu that only has the names.
 *
 * With FAKE_INCOMPLETE two of them are missing.  None is called but
 * aoti_torch_abi_version, which returns what the test sets.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT uint64_t fake_version;
EXPORT const char *fake_reason;

EXPORT uint64_t aoti_torch_abi_version(void);
uint64_t aoti_torch_abi_version(void)
{
    return fake_version;
}

EXPORT const char *torch_exception_get_what_without_backtrace(void);
const char *torch_exception_get_what_without_backtrace(void)
{
    return fake_reason;
}

#define STUB(name)          \
    EXPORT void name(void); \
    void name(void)         \
    {                       \
    }

STUB(aoti_torch_library_init_fragment)
STUB(aoti_torch_library_init_impl)
STUB(aoti_torch_library_def)
STUB(aoti_torch_library_impl)
STUB(aoti_torch_delete_library_object)
STUB(aoti_torch_get_data_ptr)
STUB(aoti_torch_get_dim)
STUB(aoti_torch_get_numel)
STUB(aoti_torch_get_sizes)
STUB(aoti_torch_get_strides)
STUB(aoti_torch_get_dtype)
STUB(aoti_torch_get_device_type)
STUB(aoti_torch_get_device_index)
STUB(aoti_torch_empty_strided)
STUB(aoti_torch_delete_tensor_object)
STUB(aoti_torch_check)
STUB(aoti_torch_dtype_float16)
STUB(aoti_torch_dtype_bfloat16)
STUB(aoti_torch_dtype_float32)
STUB(aoti_torch_dtype_float64)
STUB(aoti_torch_dtype_bool)
STUB(aoti_torch_dtype_int32)
STUB(aoti_torch_dtype_int64)
STUB(aoti_torch_device_type_cpu)
#ifndef FAKE_INCOMPLETE
STUB(aoti_torch_device_type_cuda)
#endif
/* A GPU build has it in another library, which is this file's other copy. */
#ifndef FAKE_INCOMPLETE
STUB(aoti_torch_get_current_cuda_stream)
#endif
