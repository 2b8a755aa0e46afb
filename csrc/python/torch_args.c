/* torch_args.c: the dispatcher's words, read and written.  See torch_args.h.
 *
 * Shapes and values are checked by the plan; here it is what a fa_tensor
 * cannot hold: devices, numbers of dimensions, torch's other types.  (This
 * file needs -fexceptions: fa_torch_return throws.)
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/torch_args.h"
#include "python/guard.h"
#include "python/outcome.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

fa_torch_abi fa_torch;
static int32_t dtype_codes[4]; /* torch's number of each fa_dtype */
static int32_t cpu_code;
static int32_t cuda_code;

bool fa_torch_open(void)
{
    if (!fa_torch_abi_open(&fa_torch)) {
        return false;
    }
    dtype_codes[FA_F16] = fa_torch.dtype_float16();
    dtype_codes[FA_BF16] = fa_torch.dtype_bfloat16();
    dtype_codes[FA_F32] = fa_torch.dtype_float32();
    dtype_codes[FA_F64] = fa_torch.dtype_float64();
    cpu_code = fa_torch.device_type_cpu();
    cuda_code = fa_torch.device_type_cuda();
    return true;
}

/* -- words ----------------------------------------------------------------- */

double fa_torch_as_double(uint64_t word)
{
    double value = 0.0;
    memcpy(&value, &word, sizeof value);
    return value;
}

int64_t fa_torch_as_int(uint64_t word)
{
    int64_t value = 0;
    memcpy(&value, &word, sizeof value);
    return value;
}

bool fa_torch_as_bool(uint64_t word)
{
    return (word & 0xff) != 0;
}

fa_torch_tensor fa_torch_as_tensor(uint64_t word)
{
    return (fa_torch_tensor)(uintptr_t)word;
}

uint64_t fa_torch_as_word(fa_torch_tensor tensor)
{
    return (uint64_t)(uintptr_t)tensor;
}

void fa_torch_release(fa_torch_tensor tensor)
{
    if (tensor != NULL) {
        (void)fa_torch.delete_tensor(tensor);
    }
}

/* -- tensors that come in -------------------------------------------------- */

static void device_name(const fa_torch_device *d, char text[32])
{
    if (d->type == cpu_code) {
        snprintf(text, 32, "cpu");
    } else if (d->type == cuda_code) {
        snprintf(text, 32, "cuda:%d", (int)d->index);
    } else {
        snprintf(text, 32, "device type %d", (int)d->type);
    }
}

fa_status fa_torch_check_device(const char *name,
                                const fa_torch_device *expected,
                                const fa_torch_device *got, fa_error *error)
{
    char expected_name[32];
    char got_name[32];
    if (got->type == expected->type && got->index == expected->index) {
        return FA_OK;
    }
    device_name(expected, expected_name);
    device_name(got, got_name);
    return fa_fail(error, FA_EINVAL, "%s: expected device %s (as q), got %s",
                   name, expected_name, got_name);
}

fa_status fa_torch_parse_dtype(const char *name, int32_t code, fa_dtype *dtype,
                               fa_error *error)
{
    for (int i = 0; i < 4; i++) {
        if (dtype_codes[i] == code) {
            *dtype = (fa_dtype)i;
            return FA_OK;
        }
    }
    return fa_fail(error, FA_EUNSUPPORTED,
                   "%s: expected dtype float16, bfloat16, float32 or float64, "
                   "got torch's dtype number %d",
                   name, (int)code);
}

static fa_status not_strided(const char *name, fa_error *error)
{
    return fa_fail(error, FA_EINVAL,
                   "%s: expected a strided tensor, got something else "
                   "(%.300s)",
                   name, fa_torch_abi_reason(&fa_torch));
}

fa_status fa_torch_parse_shape(const char *name, fa_torch_tensor from, int dims,
                               const char *axes, fa_tensor *to, int32_t *code,
                               fa_torch_device *on, fa_error *error)
{
    const size_t bytes = (size_t)dims * sizeof to->size[0];
    int64_t dim = 0;
    int64_t *sizes = NULL;
    int64_t *strides = NULL;
    /* The data pointer first: it fails for None, which the dispatcher lets
     * through as an undefined tensor. */
    if (fa_torch.get_data(from, &to->data) || fa_torch.get_dim(from, &dim) ||
        fa_torch.get_sizes(from, &sizes) ||
        fa_torch.get_strides(from, &strides) ||
        fa_torch.get_dtype(from, code) ||
        fa_torch.get_device_type(from, &on->type) ||
        fa_torch.get_device_index(from, &on->index)) {
        return not_strided(name, error);
    }
    if (dim != dims) {
        return fa_fail(error, FA_EINVAL,
                       "%s: expected %d dimension%s (%s), got %lld", name, dims,
                       dims == 1 ? "" : "s", axes, (long long)dim);
    }
    memcpy(to->size, sizes, bytes);
    memcpy(to->stride, strides, bytes);
    return FA_OK;
}

static fa_status parse(const char *name, fa_torch_tensor from, int dims,
                       const char *axes, fa_tensor *to, fa_torch_device *on,
                       fa_error *error)
{
    int32_t code = 0;
    const fa_status status =
        fa_torch_parse_shape(name, from, dims, axes, to, &code, on, error);
    return status == FA_OK ? fa_torch_parse_dtype(name, code, &to->dtype, error)
                           : status;
}

fa_status fa_torch_parse_tensor(const char *name, fa_torch_tensor from,
                                fa_tensor *to, fa_torch_device *on,
                                fa_error *error)
{
    return parse(name, from, 4, "batch, heads, seqlen, head dim", to, on,
                 error);
}

fa_status fa_torch_parse_rows(const char *name, fa_torch_tensor from,
                              fa_tensor *to, fa_torch_device *on,
                              fa_error *error)
{
    to->size[3] = 1;
    to->stride[3] = 1;
    return parse(name, from, 3, "batch, heads, seqlen", to, on, error);
}

fa_status fa_torch_parse_flat(const char *name, fa_torch_tensor from,
                              fa_tensor *to, fa_torch_device *on,
                              fa_error *error)
{
    return parse(name, from, 1, "elements", to, on, error);
}

fa_status fa_torch_is_absent(const char *name, fa_torch_tensor from,
                             bool *absent, fa_error *error)
{
    int64_t numel = 0;
    if (fa_torch.get_numel(from, &numel)) {
        return not_strided(name, error);
    }
    *absent = numel == 0;
    return FA_OK;
}

fa_status fa_torch_parse_qkv(const uint64_t *stack, fa_problem *problem,
                             fa_torch_device *on, fa_error *error)
{
    static const char *const names[] = {"q", "k", "v"};
    fa_tensor *const tensors[] = {&problem->q, &problem->k, &problem->v};
    for (int i = 0; i < 3; i++) {
        fa_torch_device other;
        fa_status status = fa_torch_parse_tensor(
            names[i], fa_torch_as_tensor(stack[i]), tensors[i], &other, error);
        if (i == 0) {
            *on = other;
        }
        if (status == FA_OK) {
            status = fa_torch_check_device(names[i], on, &other, error);
        }
        if (status != FA_OK) {
            return status;
        }
    }
    return FA_OK;
}

/* -- tensors that go out --------------------------------------------------- */

static fa_status allocate(const char *name, const fa_torch_device *on,
                          int64_t dim, const int64_t *sizes,
                          const int64_t *strides, fa_dtype dtype,
                          fa_torch_tensor *tensor, void **data, fa_error *error)
{
    if (fa_torch.empty_strided(dim, sizes, strides, dtype_codes[dtype],
                               on->type, on->index, tensor)) {
        *tensor = NULL;
        return fa_fail(error, FA_ENOMEM,
                       "%s: expected memory for it, got none (%.600s)", name,
                       fa_torch_abi_reason(&fa_torch));
    }
    if (data != NULL && fa_torch.get_data(*tensor, data)) {
        return fa_fail(error, FA_EDEVICE,
                       "%s: expected its address, got none (%.600s)", name,
                       fa_torch_abi_reason(&fa_torch));
    }
    return FA_OK;
}

fa_status fa_torch_new_like(const char *name, const fa_torch_device *on,
                            fa_tensor *like, fa_torch_tensor *tensor,
                            fa_error *error)
{
    return allocate(name, on, 4, like->size, like->stride, like->dtype, tensor,
                    &like->data, error);
}

fa_status fa_torch_new_rows(const char *name, const fa_torch_device *on,
                            const int64_t size[3], fa_dtype dtype,
                            fa_torch_tensor *tensor, void **data,
                            fa_error *error)
{
    const int64_t heads = size[1] > 1 ? size[1] : 1; /* as torch's contiguous */
    const int64_t rows = size[2] > 1 ? size[2] : 1;
    const int64_t stride[3] = {heads * rows, rows, 1};
    return allocate(name, on, 3, size, stride, dtype, tensor, data, error);
}

fa_status fa_torch_new_flat(const char *name, const fa_torch_device *on,
                            int64_t count, fa_dtype dtype,
                            fa_torch_tensor *tensor, void **data,
                            fa_error *error)
{
    static const int64_t one = 1;
    return allocate(name, on, 1, &count, &one, dtype, tensor,
                    count == 0 ? NULL : data, error);
}

fa_status fa_torch_new_workspace(const fa_torch_device *on, size_t bytes,
                                 fa_torch_tensor *tensor, void **data,
                                 fa_error *error)
{
    const int64_t count = (int64_t)(bytes / sizeof(float)); /* 16s of bytes */
    *tensor = NULL;
    *data = NULL;
    return bytes == 0 ? FA_OK
                      : fa_torch_new_flat("workspace", on, count, FA_F32,
                                          tensor, data, error);
}

/* -- the call -------------------------------------------------------------- */

fa_status fa_torch_choose_target(const fa_torch_device *on,
                                 fa_runtime **runtime, fa_target *target,
                                 char arch[FA_STATE_ARCH_CHARS],
                                 fa_error *error)
{
    const bool is_cuda = on->type == cuda_code;
    *target = (fa_target){.device = is_cuda ? on->index : 0,
                          .guard = fa_state_guard()};
    fa_status status =
        fa_state_backend(is_cuda, runtime, &target->backend, error);
    if (status != FA_OK) {
        return status;
    }
    switch (target->backend) {
    case FA_SIM:
        target->arch = arch;
        return fa_state_ask_arch(arch, error);
    case FA_HIP:
    case FA_STANDIN:
        /* The device is made current by the driver around the launch. */
        if (fa_torch.current_cuda_stream == NULL ||
            fa_torch.current_cuda_stream(on->index, &target->stream)) {
            return fa_fail(error, FA_EDEVICE,
                           "q: expected a current stream on device %d, got "
                           "none from torch (%.300s)",
                           (int)on->index, fa_torch_abi_reason(&fa_torch));
        }
        return FA_OK;
    default:
        return FA_OK;
    }
}

void fa_torch_record(const fa_torch_device *on, const fa_target *target,
                     const fa_plan *plan, const fa_counts *counts)
{
    fa_state_record(target->backend, on->type == cuda_code ? on->index : -1,
                    plan, counts);
}

static void release_thing(void *tensor)
{
    fa_torch_release(tensor);
}

/* Nothing is released before the kernel that may still use it is over. */
static void keep_all(const uint64_t *stack, int inputs,
                     const fa_torch_tensor *results, int outputs,
                     fa_torch_tensor scratch, fa_pending *late)
{
    void *things[FA_TORCH_TENSORS];
    size_t count = 0;
    assert(inputs + outputs + 1 <= FA_TORCH_TENSORS);
    for (int i = 0; i < inputs; i++) {
        things[count++] = fa_torch_as_tensor(stack[i]);
    }
    for (int i = 0; i < outputs; i++) {
        things[count++] = results[i];
    }
    things[count++] = scratch;
    fa_guard_keep(fa_state_guard(), late, things, count, release_thing);
}

void fa_torch_return(uint64_t *stack, int inputs, fa_torch_tensor *results,
                     int outputs, fa_torch_tensor scratch, fa_status status,
                     const fa_counts *counts, const fa_error *error)
{
    fa_outcome_set(status);
    if (status != FA_OK && counts->late != NULL) {
        keep_all(stack, inputs, results, outputs, scratch, counts->late);
        fa_torch.check(false, __func__, "ops.c", __LINE__, error->text);
        return;
    }
    fa_torch_release(scratch);
    for (int i = 0; i < inputs; i++) {
        fa_torch_release(fa_torch_as_tensor(stack[i]));
    }
    for (int i = 0; i < outputs; i++) {
        if (status == FA_OK) {
            stack[i] = fa_torch_as_word(results[i]);
        } else {
            fa_torch_release(results[i]);
        }
    }
    if (status != FA_OK) {
        fa_torch.check(false, __func__, "ops.c", __LINE__, error->text);
    }
}
