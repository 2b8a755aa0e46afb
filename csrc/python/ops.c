/* ops.c: flash_attn_rocm::fwd and ::bwd as torch's dispatcher calls them.
 *
 * The dispatcher hands over a stack of 64-bit words and no GIL.  A kernel
 * takes the tensors, checks, allocates the outputs, launches, and leaves the
 * outputs on the stack; all tensors it was given are released on every path,
 * and only then, with nothing left to lose, an error is thrown through
 * aoti_torch_check.  (This file needs -fexceptions for that.)
 *
 * How words become tensors is left to torch_args.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/ops.h"
#include "python/torch_args.h"

#include <stdio.h>

static const char fwd_schema[] =
    "fwd(Tensor q, Tensor k, Tensor v, " FA_OPTIONS_SCHEMA
    ", bool needs_grad) -> (Tensor out, Tensor lse, Tensor out_lo)";

static const char bwd_schema[] =
    "bwd(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor lse, Tensor out_lo, " FA_OPTIONS_SCHEMA
    ", int wanted, bool grads_fp32) -> (Tensor dq, Tensor dk, Tensor dv, "
    "Tensor dbias, Tensor dsink)";

static bool registered_ops;

/* -- the forward ----------------------------------------------------------- */

/* The arguments' places on the stack, and the results'. */
enum {
    FWD_Q,
    FWD_OPTIONS = 3,
    FWD_TENSORS = FWD_OPTIONS + FA_OPTION_SCALE,
    FWD_NEEDS_GRAD = FWD_OPTIONS + FA_OPTIONS
};
enum { FWD_OUT, FWD_LSE, FWD_OUT_LO, FWD_RESULTS };

static fa_status allocate_outputs(fa_problem *p, bool needs_grad,
                                  const fa_torch_device *on,
                                  fa_torch_tensor results[FWD_RESULTS],
                                  fa_error *error)
{
    const fa_dtype sums = fa_dtype_of_sums(p->q.dtype);
    const int64_t floats = needs_grad ? fa_residue_floats(p) : 0;
    fa_status status =
        fa_torch_new_like("out", on, &p->out, &results[FWD_OUT], error);
    if (status == FA_OK) {
        status = fa_torch_new_rows("lse", on, p->q.size, sums,
                                   &results[FWD_LSE], &p->lse, error);
    }
    if (status == FA_OK) {
        status = fa_torch_new_flat("out_lo", on, floats, sums,
                                   &results[FWD_OUT_LO], &p->out_lo, error);
    }
    return status;
}

static fa_status forward(const uint64_t *stack,
                         fa_torch_tensor results[FWD_RESULTS],
                         fa_torch_tensor *scratch, fa_counts *counts,
                         fa_error *error)
{
    fa_problem p = {.out_lo = NULL};
    fa_plan plan;
    fa_target target;
    fa_runtime *runtime = NULL;
    fa_torch_device on;
    char arch[FA_STATE_ARCH_CHARS];
    void *workspace = NULL;
    fa_status status = FA_OK;

    if ((status = fa_torch_parse_qkv(stack + FWD_Q, &p, &on, error)) != FA_OK ||
        (status = fa_torch_parse_options(stack + FWD_OPTIONS, &on, &p,
                                         error)) != FA_OK) {
        return status;
    }
    fa_tensor_like(&p.q, p.v.size[3], &p.out);
    if ((status = fa_plan_forward(&p, &plan, error)) != FA_OK ||
        (status = fa_torch_choose_target(&on, &runtime, &target, arch,
                                         error)) != FA_OK ||
        (status = allocate_outputs(&p, fa_torch_as_bool(stack[FWD_NEEDS_GRAD]),
                                   &on, results, error)) != FA_OK ||
        (status = fa_torch_new_workspace(&on, plan.workspace.bytes, scratch,
                                         &workspace, error)) != FA_OK ||
        (status = fa_forward(runtime, &target, &p, &plan, workspace, counts,
                             error)) != FA_OK) {
        return status;
    }
    fa_torch_record(&on, &target, &plan, counts);
    return FA_OK;
}

static void fwd_kernel(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
    fa_torch_tensor results[FWD_RESULTS] = {NULL};
    fa_torch_tensor scratch = NULL;
    fa_counts counts = {.late = NULL};
    fa_error error;
    (void)inputs;
    (void)outputs;
    fa_status status = forward(stack, results, &scratch, &counts, &error);
    fa_torch_return(stack, FWD_TENSORS, results, FWD_RESULTS, scratch, status,
                    &counts, &error);
}

/* -- the backward ---------------------------------------------------------- */

enum {
    BWD_DOUT,
    BWD_DLSE,
    BWD_Q,
    BWD_OUT = BWD_Q + 3,
    BWD_LSE,
    BWD_OUT_LO,
    BWD_OPTIONS,
    BWD_TENSORS = BWD_OPTIONS + FA_OPTION_SCALE,
    BWD_WANTED = BWD_OPTIONS + FA_OPTIONS,
    BWD_GRADS_FP32
};
enum { BWD_DQ, BWD_DK, BWD_DV, BWD_DBIAS, BWD_DSINK, BWD_RESULTS };

/* lse is no fa_tensor of the problem, so what it must be is checked here. */
static fa_status parse_lse(fa_torch_tensor from, fa_problem *p,
                           const fa_torch_device *on, fa_error *error)
{
    static const char *const axes[] = {"batch", "head", "row"};
    const fa_dtype dtype = fa_dtype_of_sums(p->q.dtype);
    fa_torch_device other;
    fa_tensor lse;
    int64_t expected = 1;
    fa_status status = fa_torch_parse_rows("lse", from, &lse, &other, error);
    if (status == FA_OK) {
        status = fa_torch_check_device("lse", on, &other, error);
    }
    if (status != FA_OK) {
        return status;
    }
    if (lse.dtype != dtype) {
        return fa_fail(error, FA_EINVAL, "lse: expected dtype %s, got %s",
                       fa_dtype_name(dtype), fa_dtype_name(lse.dtype));
    }
    for (int d = 0; d < 3; d++) {
        if (lse.size[d] != p->q.size[d]) {
            return fa_fail(error, FA_EINVAL,
                           "lse: expected size %lld in dimension %d (%s, as "
                           "in q), got %lld",
                           (long long)p->q.size[d], d, axes[d],
                           (long long)lse.size[d]);
        }
    }
    const bool is_empty =
        lse.size[0] == 0 || lse.size[1] == 0 || lse.size[2] == 0;
    for (int d = 2; d >= 0 && !is_empty; d--) {
        if (lse.size[d] != 1 && lse.stride[d] != expected) {
            return fa_fail(error, FA_EINVAL,
                           "lse: expected a contiguous tensor, got stride "
                           "%lld in dimension %d",
                           (long long)lse.stride[d], d);
        }
        expected *= lse.size[d];
    }
    p->lse = lse.data;
    return FA_OK;
}

/* Needs sizes that the plan has accepted.  Without elements it is absent. */
static fa_status parse_out_lo(fa_torch_tensor from, fa_problem *p,
                              const fa_torch_device *on, fa_error *error)
{
    const int64_t floats = fa_residue_floats(p);
    fa_torch_device other;
    fa_tensor out_lo;
    bool absent = false;
    fa_status status = fa_torch_is_absent("out_lo", from, &absent, error);
    if (status != FA_OK || absent) {
        return status;
    }
    if (p->q.dtype == FA_F64) {
        return fa_fail(error, FA_EINVAL,
                       "out_lo: expected a tensor without elements for "
                       "float64, got one with elements");
    }
    if ((status = fa_torch_parse_flat("out_lo", from, &out_lo, &other,
                                      error)) != FA_OK ||
        (status = fa_torch_check_device("out_lo", on, &other, error)) !=
            FA_OK) {
        return status;
    }
    if (out_lo.dtype != FA_F32) {
        return fa_fail(error, FA_EINVAL,
                       "out_lo: expected dtype float32, got %s",
                       fa_dtype_name(out_lo.dtype));
    }
    if (out_lo.size[0] != floats) {
        return fa_fail(error, FA_EINVAL,
                       "out_lo: expected %lld elements, got %lld",
                       (long long)floats, (long long)out_lo.size[0]);
    }
    if (floats != 1 && out_lo.stride[0] != 1) {
        return fa_fail(error, FA_EINVAL,
                       "out_lo: expected a contiguous tensor, got stride %lld",
                       (long long)out_lo.stride[0]);
    }
    p->out_lo = out_lo.data;
    return FA_OK;
}

static fa_status parse_dlse(fa_torch_tensor from, fa_gradients *g,
                            const fa_torch_device *on, fa_error *error)
{
    fa_torch_device other;
    bool absent = false;
    fa_status status = fa_torch_is_absent("dlse", from, &absent, error);
    g->dlse.data = NULL;
    if (status != FA_OK || absent) {
        return status;
    }
    status = fa_torch_parse_rows("dlse", from, &g->dlse, &other, error);
    return status == FA_OK ? fa_torch_check_device("dlse", on, &other, error)
                           : status;
}

static fa_status parse_backward(const uint64_t *stack, fa_problem *p,
                                fa_gradients *g, fa_torch_device *on,
                                fa_error *error)
{
    const fa_torch_tensor dout = fa_torch_as_tensor(stack[BWD_DOUT]);
    const fa_torch_tensor out = fa_torch_as_tensor(stack[BWD_OUT]);
    const int64_t wanted = fa_torch_as_int(stack[BWD_WANTED]);
    const bool grads_fp32 = fa_torch_as_bool(stack[BWD_GRADS_FP32]);
    fa_torch_device other;
    fa_status status = FA_OK;

    if ((status = fa_torch_parse_qkv(stack + BWD_Q, p, on, error)) != FA_OK ||
        (status = fa_torch_parse_options(stack + BWD_OPTIONS, on, p, error)) !=
            FA_OK ||
        (status = fa_torch_parse_tensor("out", out, &p->out, &other, error)) !=
            FA_OK ||
        (status = fa_torch_check_device("out", on, &other, error)) != FA_OK ||
        (status = fa_torch_parse_tensor("dout", dout, &g->dout, &other,
                                        error)) != FA_OK ||
        (status = fa_torch_check_device("dout", on, &other, error)) != FA_OK ||
        (status = parse_lse(fa_torch_as_tensor(stack[BWD_LSE]), p, on,
                            error)) != FA_OK ||
        (status = parse_dlse(fa_torch_as_tensor(stack[BWD_DLSE]), g, on,
                             error)) != FA_OK) {
        return status;
    }
    /* One that does not fit must not turn into something legal. */
    g->wanted =
        wanted < 0 || wanted > UINT32_MAX ? UINT32_MAX : (uint32_t)wanted;
    fa_gradients_like(p, grads_fp32, g);
    return FA_OK;
}

/* A result that is not wanted has no elements; of dbias, which may then have no
 * bias, in the type of sums. */
static fa_status allocate_gradients(const fa_problem *p, fa_gradients *g,
                                    const fa_torch_device *on,
                                    fa_torch_tensor results[BWD_RESULTS],
                                    fa_error *error)
{
    static const char *const names[] = {"dq", "dk", "dv", "dbias", "dsink"};
    const fa_dtype sums = fa_dtype_of_sums(p->q.dtype);
    fa_tensor *const tensors[] = {&g->dq, &g->dk, &g->dv, &g->dbias};
    fa_status status = FA_OK;
    for (int i = BWD_DQ; i <= BWD_DBIAS && status == FA_OK; i++) {
        const fa_dtype absent = i == BWD_DBIAS ? sums : tensors[i]->dtype;
        status = (g->wanted >> i & 1) != 0
                     ? fa_torch_new_like(names[i], on, tensors[i], &results[i],
                                         error)
                     : fa_torch_new_flat(names[i], on, 0, absent, &results[i],
                                         NULL, error);
    }
    if (status != FA_OK) {
        return status;
    }
    return (g->wanted & FA_WANT_DSINK) != 0
               ? fa_torch_new_rows(names[BWD_DSINK], on, p->q.size, sums,
                                   &results[BWD_DSINK], &g->dsink.data, error)
               : fa_torch_new_flat(names[BWD_DSINK], on, 0, sums,
                                   &results[BWD_DSINK], NULL, error);
}

static fa_status backward(const uint64_t *stack,
                          fa_torch_tensor results[BWD_RESULTS],
                          fa_torch_tensor *scratch, fa_counts *counts,
                          fa_error *error)
{
    fa_problem p = {.out_lo = NULL};
    fa_gradients g;
    fa_plan plan;
    fa_target target;
    fa_runtime *runtime = NULL;
    fa_torch_device on;
    char arch[FA_STATE_ARCH_CHARS];
    void *workspace = NULL;
    fa_status status = FA_OK;

    if ((status = parse_backward(stack, &p, &g, &on, error)) != FA_OK ||
        (status = fa_plan_backward(&p, &g, &plan, error)) != FA_OK ||
        (status = parse_out_lo(fa_torch_as_tensor(stack[BWD_OUT_LO]), &p, &on,
                               error)) != FA_OK ||
        (status = fa_torch_choose_target(&on, &runtime, &target, arch,
                                         error)) != FA_OK ||
        (status = allocate_gradients(&p, &g, &on, results, error)) != FA_OK ||
        (status = fa_torch_new_workspace(&on, plan.workspace.bytes, scratch,
                                         &workspace, error)) != FA_OK ||
        (status = fa_backward(runtime, &target, &p, &g, &plan, workspace,
                              counts, error)) != FA_OK) {
        return status;
    }
    fa_torch_record(&on, &target, &plan, counts);
    return FA_OK;
}

static void bwd_kernel(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
    fa_torch_tensor results[BWD_RESULTS] = {NULL};
    fa_torch_tensor scratch = NULL;
    fa_counts counts = {.late = NULL};
    fa_error error;
    (void)inputs;
    (void)outputs;
    fa_status status = backward(stack, results, &scratch, &counts, &error);
    fa_torch_return(stack, BWD_TENSORS, results, BWD_RESULTS, scratch, status,
                    &counts, &error);
}

/* -- registration ---------------------------------------------------------- */

static fa_status refused(const char *what, fa_error *error)
{
    return fa_fail(error, FA_ELIBRARY, "%s: torch refused: %.900s", what,
                   fa_torch_abi_reason(&fa_torch));
}

static int32_t implement(fa_torch_library library, const char *name,
                         fa_torch_kernel kernel)
{
    /* The version that decides how the stack is decoded: since 2.10 it has
     * a number of its own, and ours is that of 2.10. */
    const uint64_t build_version = (UINT64_C(2) << 56) | (UINT64_C(10) << 48);
    return fa_torch.library_impl_versioned == NULL
               ? fa_torch.library_impl(library, name, kernel)
               : fa_torch.library_impl_versioned(library, name, kernel,
                                                 build_version);
}

fa_status fa_ops_register(bool *registered, fa_error *error)
{
    static const char *const keys[] = {"CUDA", "CPU"};
    fa_torch_library libraries[3] = {NULL};
    fa_status status = FA_OK;

    *registered = registered_ops;
    if (registered_ops || !fa_torch_open()) {
        return FA_OK;
    }
    if (fa_torch.library_init_fragment("flash_attn_rocm", "ops.c", __LINE__,
                                       &libraries[2]) ||
        fa_torch.library_def(libraries[2], fwd_schema) ||
        fa_torch.library_def(libraries[2], bwd_schema) ||
        fa_torch.library_def(libraries[2], FA_ROTARY_SCHEMA)) {
        status = refused("flash_attn_rocm::fwd, bwd, rotary", error);
        goto fail;
    }
    for (int i = 0; i < 2; i++) {
        if (fa_torch.library_init_impl("flash_attn_rocm", keys[i], "ops.c",
                                       __LINE__, &libraries[i]) ||
            implement(libraries[i], "fwd", fwd_kernel) ||
            implement(libraries[i], "bwd", bwd_kernel) ||
            implement(libraries[i], "rotary", fa_op_rotary)) {
            status = refused(keys[i], error);
            goto fail;
        }
    }
    /* The libraries hold the registrations and live as long as the process,
     * as does fa_torch: torch asserts if a kernel disappears under a call. */
    registered_ops = true;
    *registered = true;
    return FA_OK;

fail:
    for (int i = 0; i < 3; i++) {
        if (libraries[i] != NULL) {
            (void)fa_torch.library_delete(libraries[i]);
        }
    }
    fa_torch_abi_close(&fa_torch);
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
