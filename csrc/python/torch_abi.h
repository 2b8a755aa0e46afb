/* torch_abi.h: libtorch's stable C functions, as far as the op needs them.
 *
 * Own declarations, because libtorch's headers are C++ and because nothing
 * of torch is needed to build: the functions are looked up in the copy that
 * the process has loaded.  Errors are ints, 0 is success.  Who owns what:
 * a fa_torch_tensor is a counted reference that its owner deletes once.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_PYTHON_TORCH_ABI_H
#define FA_PYTHON_TORCH_ABI_H

#include <stdbool.h>
#include <stdint.h>

typedef struct AtenTensorOpaque *fa_torch_tensor;
typedef struct TorchLibraryOpaque *fa_torch_library;

/* A kernel finds its arguments in `stack`, left to right, 64 bits each, owns
 * the tensors among them, and leaves its results there from index 0 on. */
typedef void (*fa_torch_kernel)(uint64_t *stack, uint64_t inputs,
                                uint64_t outputs);

typedef struct fa_torch_abi {
    uint64_t (*abi_version)(void); /* major, minor, patch, tag: a byte each */

    int32_t (*library_init_fragment)(const char *name, const char *file,
                                     uint32_t line, fa_torch_library *);
    int32_t (*library_init_impl)(const char *name, const char *key,
                                 const char *file, uint32_t line,
                                 fa_torch_library *);
    int32_t (*library_def)(fa_torch_library, const char *schema);
    int32_t (*library_impl)(fa_torch_library, const char *name,
                            fa_torch_kernel);
    int32_t (*library_impl_versioned)(fa_torch_library, const char *name,
                                      fa_torch_kernel,
                                      uint64_t build_version); /* 2.10 */
    int32_t (*library_delete)(fa_torch_library);

    int32_t (*get_data)(fa_torch_tensor, void **data);
    int32_t (*get_dim)(fa_torch_tensor, int64_t *dim);
    int32_t (*get_numel)(fa_torch_tensor, int64_t *numel);
    int32_t (*get_sizes)(fa_torch_tensor, int64_t **sizes);     /* borrowed */
    int32_t (*get_strides)(fa_torch_tensor, int64_t **strides); /* borrowed */
    int32_t (*get_dtype)(fa_torch_tensor, int32_t *dtype);
    int32_t (*get_device_type)(fa_torch_tensor, int32_t *type);
    int32_t (*get_device_index)(fa_torch_tensor, int32_t *index);
    int32_t (*empty_strided)(int64_t dim, const int64_t *sizes,
                             const int64_t *strides, int32_t dtype,
                             int32_t device_type, int32_t device_index,
                             fa_torch_tensor *); /* new reference */
    int32_t (*delete_tensor)(fa_torch_tensor);

    /* Throws RuntimeError(message) as a C++ exception if !condition. */
    void (*check)(bool condition, const char *function, const char *file,
                  uint32_t line, const char *message);
    const char *(*last_error)(void); /* 2.13 */

    int32_t (*dtype_float16)(void);
    int32_t (*dtype_bfloat16)(void);
    int32_t (*dtype_float32)(void);
    int32_t (*dtype_float64)(void);
    int32_t (*dtype_bool)(void);
    int32_t (*dtype_int32)(void);
    int32_t (*dtype_int64)(void);
    int32_t (*device_type_cpu)(void);
    int32_t (*device_type_cuda)(void);

    /* In the GPU library; NULL in a CPU build of torch. */
    int32_t (*current_cuda_stream)(int32_t device_index, void **stream);

    void *library; /* counted handles; gpu_library is NULL in a CPU build */
    void *gpu_library;
} fa_torch_abi;

/* Fills *abi from the loaded libtorch, which stays loaded until
 * fa_torch_abi_close.  False if there is none, or one older than 2.8, whose
 * functions of the same names were not settled; there is nothing to close
 * then. */
bool fa_torch_abi_open(fa_torch_abi *abi);
/* Gives the libraries back and clears *abi.  A zero *abi is accepted. */
void fa_torch_abi_close(fa_torch_abi *abi);

/* Why the last call failed, for a message; torch before 2.13 has printed the
 * reason to stderr and does not tell.  Borrowed, short-lived. */
const char *fa_torch_abi_reason(const fa_torch_abi *abi);

#endif
