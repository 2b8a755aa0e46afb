/* ops.c: flash_attn_rocm::fwd as torch's dispatcher calls it.
 *
 * The dispatcher hands over a stack of 64-bit words and no GIL.  The kernel
 * takes the tensors, checks, allocates the outputs, launches, and leaves the
 * outputs on the stack; all tensors it was given are released on every path,
 * and only then, with nothing left to lose, an error is thrown through
 * aoti_torch_check.  (This file needs -fexceptions for that.)
 *
 * Shapes and values are checked by fa_plan_make; here it is dtypes, devices
 * and the arguments that nothing serves yet.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/ops.h"
#include "python/state.h"
#include "python/torch_abi.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

static const char schema[] =
    "fwd(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor mask, "
    "Tensor alibi, Tensor sink, Tensor seed, Tensor blocks, float scale, "
    "float softcap, float dropout_p, int causal, int window_left, "
    "int window_right, bool needs_grad) -> "
    "(Tensor out, Tensor lse, Tensor out_lo)";

/* The arguments' places on the stack. */
enum {
    ARG_Q,
    ARG_K,
    ARG_V,
    ARG_BIAS,
    ARG_MASK,
    ARG_ALIBI,
    ARG_SINK,
    ARG_SEED,
    ARG_BLOCKS,
    TENSOR_ARGS,
    ARG_SCALE = TENSOR_ARGS,
    ARG_SOFTCAP,
    ARG_DROPOUT_P,
    ARG_CAUSAL,
    ARG_WINDOW_LEFT,
    ARG_WINDOW_RIGHT,
    ARG_NEEDS_GRAD
};
enum { RESULT_OUT, RESULT_LSE, RESULT_OUT_LO, RESULTS };

static const char *const tensor_names[TENSOR_ARGS] = {
    "q", "k", "v", "bias", "mask", "alibi", "sink", "seed", "blocks"};

/* Process-global like the dispatcher's own tables: kernels get no pointer of
 * ours.  Written once, under the GIL, before the first kernel can run. */
static fa_torch_abi torch;
static bool registered_ops;
static int32_t dtype_codes[4]; /* torch's number of each fa_dtype */
static int32_t cpu_code;
static int32_t cuda_code;

typedef struct device {
    int32_t type;
    int32_t index;
} device;

/* -- reading the arguments ------------------------------------------------- */

static double as_double(uint64_t word)
{
    double value = 0.0;
    memcpy(&value, &word, sizeof value);
    return value;
}

static int64_t as_int(uint64_t word)
{
    int64_t value = 0;
    memcpy(&value, &word, sizeof value);
    return value;
}

static fa_torch_tensor as_tensor(uint64_t word)
{
    return (fa_torch_tensor)(uintptr_t)word;
}

static void device_name(const device *d, char text[32])
{
    if (d->type == cpu_code) {
        snprintf(text, 32, "cpu");
    } else if (d->type == cuda_code) {
        snprintf(text, 32, "cuda:%d", (int)d->index);
    } else {
        snprintf(text, 32, "device type %d", (int)d->type);
    }
}

static fa_status parse_dtype(const char *name, int32_t code, fa_dtype *dtype,
                             fa_error *error)
{
    for (int i = 0; i < 4; i++) {
        if (dtype_codes[i] == code) {
            *dtype = (fa_dtype)i;
            return FA_OK;
        }
    }
    return fa_fail(error, FA_EUNSUPPORTED,
                   "%s: expected dtype float16, got torch's dtype number %d",
                   name, (int)code);
}

static fa_status parse_tensor(const char *name, fa_torch_tensor from,
                              fa_tensor *to, device *on, fa_error *error)
{
    int64_t dim = 0;
    int64_t *sizes = NULL;
    int64_t *strides = NULL;
    int32_t dtype = 0;
    /* The data pointer first: it fails for None, which the dispatcher lets
     * through as an undefined tensor. */
    if (torch.get_data(from, &to->data) || torch.get_dim(from, &dim) ||
        torch.get_sizes(from, &sizes) || torch.get_strides(from, &strides) ||
        torch.get_dtype(from, &dtype) ||
        torch.get_device_type(from, &on->type) ||
        torch.get_device_index(from, &on->index)) {
        return fa_fail(error, FA_EINVAL,
                       "%s: expected a strided tensor, got something else "
                       "(%.300s)",
                       name, fa_torch_abi_reason(&torch));
    }
    if (dim != 4) {
        return fa_fail(error, FA_EINVAL,
                       "%s: expected 4 dimensions (batch, heads, seqlen, "
                       "head dim), got %lld",
                       name, (long long)dim);
    }
    memcpy(to->size, sizes, sizeof to->size);
    memcpy(to->stride, strides, sizeof to->stride);
    return parse_dtype(name, dtype, &to->dtype, error);
}

static fa_status parse_qkv(const uint64_t *stack, fa_problem *problem,
                           device *on, fa_error *error)
{
    fa_tensor *const tensors[] = {&problem->q, &problem->k, &problem->v};
    for (int i = 0; i < 3; i++) {
        device other;
        fa_status status =
            parse_tensor(tensor_names[i], as_tensor(stack[i]), tensors[i],
                         i == 0 ? on : &other, error);
        if (status != FA_OK) {
            return status;
        }
        if (i > 0 && (other.type != on->type || other.index != on->index)) {
            char expected[32];
            char got[32];
            device_name(on, expected);
            device_name(&other, got);
            return fa_fail(error, FA_EINVAL,
                           "%s: expected device %s (as q), got %s",
                           tensor_names[i], expected, got);
        }
    }
    return FA_OK;
}

/* The schema is complete from the start, the kernels are not. */
static fa_status refuse_unsupported(const uint64_t *stack, fa_error *error)
{
    static const struct {
        int at;
        const char *name;
        double expected;
    } floats[] = {{ARG_SOFTCAP, "softcap", 0.0},
                  {ARG_DROPOUT_P, "dropout_p", 0.0}};
    static const struct {
        int at;
        const char *name;
    } windows[] = {{ARG_WINDOW_LEFT, "window_left"},
                   {ARG_WINDOW_RIGHT, "window_right"}};
    for (int i = ARG_BIAS; i <= ARG_BLOCKS; i++) {
        int64_t numel = 0;
        if (torch.get_numel(as_tensor(stack[i]), &numel) || numel != 0) {
            return fa_fail(error, FA_EUNSUPPORTED,
                           "%s: not supported yet, expected a tensor "
                           "without elements, got %lld elements",
                           tensor_names[i], (long long)numel);
        }
    }
    for (int i = 0; i < 2; i++) {
        const double value = as_double(stack[floats[i].at]);
        if (!(value >= 0.0 && value <= 0.0)) {
            char number[32];
            snprintf(number, sizeof number, "%.15g", value);
            /* As Python writes a float, so that the text can be searched. */
            const bool whole = strpbrk(number, ".en") == NULL;
            return fa_fail(error, FA_EUNSUPPORTED,
                           "%s: not supported yet, expected 0.0, got %s%s",
                           floats[i].name, number, whole ? ".0" : "");
        }
    }
    for (int i = 0; i < 2; i++) {
        const int64_t value = as_int(stack[windows[i].at]);
        if (value != -1) {
            return fa_fail(error, FA_EUNSUPPORTED,
                           "%s: not supported yet, expected -1 (open), got "
                           "%lld",
                           windows[i].name, (long long)value);
        }
    }
    if ((stack[ARG_NEEDS_GRAD] & 0xff) != 0) {
        return fa_fail(error, FA_EUNSUPPORTED,
                       "needs_grad: the backward is not available yet, "
                       "expected False, got True");
    }
    return FA_OK;
}

static void parse_scalars(const uint64_t *stack, fa_problem *problem)
{
    const int64_t causal = as_int(stack[ARG_CAUSAL]);
    problem->scale = as_double(stack[ARG_SCALE]);
    /* Clamped, not cut: beyond int it must not turn into something legal. */
    problem->causal = causal < INT_MIN   ? INT_MIN
                      : causal > INT_MAX ? INT_MAX
                                         : (int)causal;
}

/* -- outputs --------------------------------------------------------------- */

static fa_status allocate(const char *name, const device *on, int64_t dim,
                          const int64_t *sizes, const int64_t *strides,
                          fa_dtype dtype, fa_torch_tensor *tensor,
                          fa_error *error)
{
    if (torch.empty_strided(dim, sizes, strides, dtype_codes[dtype], on->type,
                            on->index, tensor)) {
        *tensor = NULL;
        return fa_fail(error, FA_ENOMEM,
                       "%s: expected memory for it, got none (%.600s)", name,
                       fa_torch_abi_reason(&torch));
    }
    return FA_OK;
}

static fa_status allocate_results(fa_problem *problem, const device *on,
                                  fa_torch_tensor results[RESULTS],
                                  fa_error *error)
{
    static const int64_t none = 0;
    static const int64_t one = 1;
    const int64_t *q = problem->q.size;
    const int64_t heads = q[1] > 1 ? q[1] : 1; /* as torch's contiguous */
    const int64_t rows = q[2] > 1 ? q[2] : 1;
    const int64_t lse_stride[3] = {heads * rows, rows, 1};
    void *lse = NULL;
    fa_status status =
        allocate("out", on, 4, problem->out.size, problem->out.stride,
                 problem->out.dtype, &results[RESULT_OUT], error);
    if (status == FA_OK) {
        status = allocate("lse", on, 3, q, lse_stride, FA_F32,
                          &results[RESULT_LSE], error);
    }
    if (status == FA_OK) {
        status = allocate("out_lo", on, 1, &none, &one, FA_F16,
                          &results[RESULT_OUT_LO], error);
    }
    if (status == FA_OK &&
        (torch.get_data(results[RESULT_OUT], &problem->out.data) ||
         torch.get_data(results[RESULT_LSE], &lse))) {
        status = fa_fail(error, FA_EDEVICE,
                         "out: expected its address, got none (%.600s)",
                         fa_torch_abi_reason(&torch));
    }
    problem->lse = lse;
    return status;
}

/* -- the kernel ------------------------------------------------------------ */

/* Where the call goes.  `arch` is room for the simulated architecture. */
static fa_status choose_target(const device *on, fa_runtime **runtime,
                               fa_target *target,
                               char arch[FA_STATE_ARCH_CHARS], fa_error *error)
{
    const bool is_cuda = on->type == cuda_code;
    *target = (fa_target){.device = is_cuda ? on->index : 0};
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
        if (torch.current_cuda_stream == NULL ||
            torch.current_cuda_stream(on->index, &target->stream)) {
            return fa_fail(error, FA_EDEVICE,
                           "q: expected a current stream on device %d, got "
                           "none from torch (%.300s)",
                           (int)on->index, fa_torch_abi_reason(&torch));
        }
        return FA_OK;
    default:
        return FA_OK;
    }
}

static fa_status forward(const uint64_t *stack,
                         fa_torch_tensor results[RESULTS], fa_error *error)
{
    fa_problem problem;
    fa_plan plan;
    fa_target target;
    fa_counts counts;
    fa_runtime *runtime = NULL;
    device on;
    char arch[FA_STATE_ARCH_CHARS];
    fa_status status = FA_OK;

    parse_scalars(stack, &problem);
    if ((status = refuse_unsupported(stack, error)) != FA_OK ||
        (status = parse_qkv(stack, &problem, &on, error)) != FA_OK) {
        return status;
    }
    fa_tensor_like(&problem.q, &problem.out);
    if ((status = fa_plan_make(&problem, &plan, error)) != FA_OK ||
        (status = choose_target(&on, &runtime, &target, arch, error)) !=
            FA_OK ||
        (status = allocate_results(&problem, &on, results, error)) != FA_OK ||
        (status = fa_forward(runtime, &target, &problem, &plan, &counts,
                             error)) != FA_OK) {
        return status;
    }
    fa_state_record(target.backend, on.type == cuda_code ? on.index : -1, &plan,
                    &counts);
    return FA_OK;
}

static void release(fa_torch_tensor tensor)
{
    if (tensor != NULL) {
        (void)torch.delete_tensor(tensor);
    }
}

static void fwd_kernel(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
    fa_torch_tensor results[RESULTS] = {NULL};
    fa_error error;
    (void)inputs;
    (void)outputs;
    fa_status status = forward(stack, results, &error);
    for (int i = 0; i < TENSOR_ARGS; i++) {
        release(as_tensor(stack[i]));
    }
    if (status == FA_OK) {
        for (int i = 0; i < RESULTS; i++) {
            stack[i] = (uint64_t)(uintptr_t)results[i];
        }
        return;
    }
    for (int i = 0; i < RESULTS; i++) {
        release(results[i]);
    }
    torch.check(false, __func__, "ops.c", __LINE__, error.text);
}

/* -- registration ---------------------------------------------------------- */

static fa_status refused(const char *what, fa_error *error)
{
    return fa_fail(error, FA_ELIBRARY, "%s: torch refused: %.900s", what,
                   fa_torch_abi_reason(&torch));
}

static int32_t implement(fa_torch_library library)
{
    /* The version that decides how the stack is decoded: since 2.10 it has
     * a number of its own, and ours is that of 2.10. */
    const uint64_t build_version = (UINT64_C(2) << 56) | (UINT64_C(10) << 48);
    return torch.library_impl_versioned == NULL
               ? torch.library_impl(library, "fwd", fwd_kernel)
               : torch.library_impl_versioned(library, "fwd", fwd_kernel,
                                              build_version);
}

fa_status fa_ops_register(bool *registered, fa_error *error)
{
    static const char *const keys[] = {"CUDA", "CPU"};
    fa_torch_library libraries[3] = {NULL};
    fa_status status = FA_OK;

    *registered = registered_ops;
    if (registered_ops || !fa_torch_abi_open(&torch)) {
        return FA_OK;
    }
    dtype_codes[FA_F16] = torch.dtype_float16();
    dtype_codes[FA_BF16] = torch.dtype_bfloat16();
    dtype_codes[FA_F32] = torch.dtype_float32();
    dtype_codes[FA_F64] = torch.dtype_float64();
    cpu_code = torch.device_type_cpu();
    cuda_code = torch.device_type_cuda();

    if (torch.library_init_fragment("flash_attn_rocm", "ops.c", __LINE__,
                                    &libraries[2]) ||
        torch.library_def(libraries[2], schema)) {
        status = refused("flash_attn_rocm::fwd", error);
        goto fail;
    }
    for (int i = 0; i < 2; i++) {
        if (torch.library_init_impl("flash_attn_rocm", keys[i], "ops.c",
                                    __LINE__, &libraries[i]) ||
            implement(libraries[i])) {
            status = refused(keys[i], error);
            goto fail;
        }
    }
    /* The libraries hold the registrations and live as long as the process,
     * as does `torch`: torch asserts if a kernel disappears under a call. */
    registered_ops = true;
    *registered = true;
    return FA_OK;

fail:
    for (int i = 0; i < 3; i++) {
        if (libraries[i] != NULL) {
            (void)torch.library_delete(libraries[i]);
        }
    }
    fa_torch_abi_close(&torch);
    return status;
}

bool fa_ops_have_torch_abi(void)
{
    fa_torch_abi probe;
    if (registered_ops) {
        return true;
    }
    const bool found = fa_torch_abi_open(&probe);
    fa_torch_abi_close(&probe);
    return found;
}
