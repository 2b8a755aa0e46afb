/* torch_abi.c: looks up libtorch's stable C functions.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/torch_abi.h"

#include "fa.h"

#include <dlfcn.h>

#define REQUIRED(member, name) {offsetof(fa_torch_abi, member), name, true}
#define OPTIONAL(member, name) {offsetof(fa_torch_abi, member), name, false}

static const fa_symbol symbols[] = {
    REQUIRED(abi_version, "aoti_torch_abi_version"),
    REQUIRED(library_init_fragment, "aoti_torch_library_init_fragment"),
    REQUIRED(library_init_impl, "aoti_torch_library_init_impl"),
    REQUIRED(library_def, "aoti_torch_library_def"),
    REQUIRED(library_impl, "aoti_torch_library_impl"),
    OPTIONAL(library_impl_versioned, "torch_library_impl"),
    REQUIRED(library_delete, "aoti_torch_delete_library_object"),
    REQUIRED(get_data, "aoti_torch_get_data_ptr"),
    REQUIRED(get_dim, "aoti_torch_get_dim"),
    REQUIRED(get_numel, "aoti_torch_get_numel"),
    REQUIRED(get_sizes, "aoti_torch_get_sizes"),
    REQUIRED(get_strides, "aoti_torch_get_strides"),
    REQUIRED(get_dtype, "aoti_torch_get_dtype"),
    REQUIRED(get_device_type, "aoti_torch_get_device_type"),
    REQUIRED(get_device_index, "aoti_torch_get_device_index"),
    REQUIRED(empty_strided, "aoti_torch_empty_strided"),
    REQUIRED(delete_tensor, "aoti_torch_delete_tensor_object"),
    REQUIRED(check, "aoti_torch_check"),
    OPTIONAL(last_error, "torch_exception_get_what_without_backtrace"),
    REQUIRED(dtype_float16, "aoti_torch_dtype_float16"),
    REQUIRED(dtype_bfloat16, "aoti_torch_dtype_bfloat16"),
    REQUIRED(dtype_float32, "aoti_torch_dtype_float32"),
    REQUIRED(dtype_float64, "aoti_torch_dtype_float64"),
    REQUIRED(dtype_bool, "aoti_torch_dtype_bool"),
    REQUIRED(dtype_int32, "aoti_torch_dtype_int32"),
    REQUIRED(dtype_int64, "aoti_torch_dtype_int64"),
    REQUIRED(device_type_cpu, "aoti_torch_device_type_cpu"),
    REQUIRED(device_type_cuda, "aoti_torch_device_type_cuda"),
};

static const fa_symbol gpu_symbols[] = {
    REQUIRED(current_cuda_stream, "aoti_torch_get_current_cuda_stream"),
};

/* The stream function: a GPU build has it in a library of its own, under the
 * same name for ROCm. */
static void fill_gpu(fa_torch_abi *abi)
{
    static const char *const libraries[] = {"libtorch_cuda.so",
                                            "libtorch_hip.so"};
    for (size_t i = 0; i < 2 && abi->gpu_library == NULL; i++) {
        void *gpu = fa_library_find(libraries[i]);
        if (gpu == NULL) {
            continue;
        }
        if (fa_library_fill(gpu, gpu_symbols, 1, abi) == NULL) {
            abi->gpu_library = gpu;
        } else {
            dlclose(gpu);
        }
    }
}

bool fa_torch_abi_open(fa_torch_abi *abi)
{
    const uint64_t oldest = (UINT64_C(2) << 56) | (UINT64_C(8) << 48);

    *abi = (fa_torch_abi){0};
    abi->library = fa_library_find("libtorch_cpu.so");
    if (abi->library == NULL) {
        return false;
    }
    if (fa_library_fill(abi->library, symbols,
                        sizeof symbols / sizeof symbols[0], abi) != NULL ||
        abi->abi_version() < oldest) {
        fa_torch_abi_close(abi);
        return false;
    }
    fill_gpu(abi);
    return true;
}

void fa_torch_abi_close(fa_torch_abi *abi)
{
    if (abi->gpu_library != NULL) {
        dlclose(abi->gpu_library);
    }
    if (abi->library != NULL) {
        dlclose(abi->library);
    }
    *abi = (fa_torch_abi){0};
}

const char *fa_torch_abi_reason(const fa_torch_abi *abi)
{
    const char *reason = abi->last_error == NULL ? NULL : abi->last_error();
    return reason != NULL && reason[0] != '\0' ? reason
                                               : "torch gave no reason";
}
