/* ops_rotary.c: flash_attn_rocm::rotary as torch's dispatcher calls it.  See
 * ops.c, which registers it.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "python/ops.h"
#include "python/torch_args.h"

/* The arguments' places on the stack, and the results'. */
enum {
    ROTARY_Q,
    ROTARY_K,
    ROTARY_COS,
    ROTARY_SIN,
    ROTARY_TENSORS,
    ROTARY_INTERLEAVED = ROTARY_TENSORS,
    ROTARY_INVERSE
};
enum { ROTARY_OUT_Q, ROTARY_OUT_K, ROTARY_RESULTS };

static fa_status parse_input(const char *name, uint64_t word, fa_tensor *to,
                             fa_torch_device *on, fa_error *error)
{
    int32_t code = 0;
    const fa_status status = fa_torch_parse_shape(
        name, fa_torch_as_tensor(word), 4, "batch, seqlen, heads, head dim", to,
        &code, on, error);
    return status == FA_OK ? fa_torch_parse_dtype(name, code, &to->dtype, error)
                           : status;
}

/* (seqlen, columns), or a batch of them. */
static fa_status parse_table(const char *name, uint64_t word, fa_tensor *to,
                             fa_torch_device *on, fa_error *error)
{
    const fa_torch_tensor from = fa_torch_as_tensor(word);
    fa_tensor given = {.size = {1, 1, 1, 1}};
    int32_t code = 0;
    int64_t dim = 0;
    const bool batched = fa_torch.get_dim(from, &dim) == 0 && dim == 3;
    fa_status status = fa_torch_parse_shape(name, from, batched ? 3 : 2,
                                            batched ? "batch, seqlen, columns"
                                                    : "seqlen, columns",
                                            &given, &code, on, error);
    if (status != FA_OK) {
        return status;
    }
    const int rows = batched ? 1 : 0;
    *to =
        (fa_tensor){.data = given.data,
                    .size = {batched ? given.size[0] : 1, given.size[rows], 1,
                             given.size[rows + 1]},
                    .stride = {batched ? given.stride[0] : 0,
                               given.stride[rows], 0, given.stride[rows + 1]}};
    return fa_torch_parse_dtype(name, code, &to->dtype, error);
}

static fa_status parse(const uint64_t *stack, fa_rotary *p, fa_torch_device *on,
                       fa_error *error)
{
    fa_torch_device other;
    fa_status status = FA_OK;
    if ((status = parse_input("q", stack[ROTARY_Q], &p->q, on, error)) !=
            FA_OK ||
        (status = parse_input("k", stack[ROTARY_K], &p->k, &other, error)) !=
            FA_OK ||
        (status = fa_torch_check_device("k", on, &other, error)) != FA_OK ||
        (status = parse_table("cos", stack[ROTARY_COS], &p->cos, &other,
                              error)) != FA_OK ||
        (status = fa_torch_check_device("cos", on, &other, error)) != FA_OK ||
        (status = parse_table("sin", stack[ROTARY_SIN], &p->sin, &other,
                              error)) != FA_OK) {
        return status;
    }
    p->interleaved = fa_torch_as_bool(stack[ROTARY_INTERLEAVED]);
    p->inverse = fa_torch_as_bool(stack[ROTARY_INVERSE]);
    fa_tensor_like(&p->q, p->q.size[3], &p->out_q);
    fa_tensor_like(&p->k, p->k.size[3], &p->out_k);
    return fa_torch_check_device("sin", on, &other, error);
}

static fa_status rotary(const uint64_t *stack,
                        fa_torch_tensor results[ROTARY_RESULTS],
                        fa_counts *counts, fa_error *error)
{
    fa_rotary p = {.inverse = false};
    fa_plan plan;
    fa_target target;
    fa_runtime *runtime = NULL;
    fa_torch_device on;
    char arch[FA_STATE_ARCH_CHARS];
    fa_status status = FA_OK;

    if ((status = parse(stack, &p, &on, error)) != FA_OK ||
        (status = fa_plan_rotary(&p, &plan, error)) != FA_OK ||
        (status = fa_torch_choose_target(&on, &runtime, &target, arch,
                                         error)) != FA_OK ||
        (status = fa_torch_new_like("out_q", &on, &p.out_q,
                                    &results[ROTARY_OUT_Q], error)) != FA_OK ||
        (status = fa_torch_new_like("out_k", &on, &p.out_k,
                                    &results[ROTARY_OUT_K], error)) != FA_OK ||
        (status = fa_run_rotary(runtime, &target, &p, &plan, counts, error)) !=
            FA_OK) {
        return status;
    }
    fa_torch_record(&on, &target, &plan, counts);
    return FA_OK;
}

void fa_op_rotary(uint64_t *stack, uint64_t inputs, uint64_t outputs)
{
    fa_torch_tensor results[ROTARY_RESULTS] = {NULL};
    fa_counts counts = {.late = NULL};
    fa_error error;
    (void)inputs;
    (void)outputs;
    const fa_status status = rotary(stack, results, &counts, &error);
    fa_torch_return(stack, ROTARY_TENSORS, results, ROTARY_RESULTS, NULL,
                    status, &counts, &error);
}
