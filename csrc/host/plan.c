/* plan.c: which kernels run a problem, in which order, with which workspace.
 *
 * A kernel is the first row of variants.def that fits.  What is legal was
 * decided by check.c before.
 *
 *   forward   float16, float32, float64   FORWARD
 *             bfloat16                    PREPARE q k v; FORWARD in fp16; the
 *                                         same in fp32 for what did not fit
 *   backward  float16                     PREPARE v dout; Q; PREPARE dout; KV
 *             float32                     PREPARE dout; Q; PREPARE dout; KV
 *             float64                     PREPARE dout; KV; Q
 *             small float32 (in fp64)     PREPARE dout; Q for sums;
 *                                         PREPARE dout; Q; KV
 *             bfloat16                    PREPARE q k v dout; Q in fp16, the
 *                                         same in fp32 for what did not fit;
 *                                         PREPARE dout; KV likewise
 *
 * where strict bfloat16 goes as float32 does, and so does float16 with few
 * channels (own_arith).  KV is left out if neither dk nor dv is wanted, Q if
 * neither dq nor row sums are.  BIAS follows if dbias is wanted, in fp32 or
 * fp64.
 *
 * dk, dbias and dsink need a better delta than the output gives.  Q then makes
 * row sums, and a second PREPARE corrects delta by them: before KV for dk, else
 * before BIAS.  Without all three, and in float64, KV goes first.  In fp64 the
 * rounding of a float32 output is the largest error by far, so that dq takes
 * the corrected delta, too.
 *
 * A problem with any of FA_HAS_* takes the rows of level FA_FULL, all others
 * those of FA_PLAIN where there are any.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/plan.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>

/* -- the choice ------------------------------------------------------------ */

uint32_t fa_keep_of(double dropout_p)
{
    const double keep = floor((1.0 - dropout_p) * FA_KEEP_ALL + 0.5);
    return keep < 1.0 ? 1 : (uint32_t)keep;
}

uint32_t fa_features_of(const fa_problem *p)
{
    const fa_features *f = &p->features;
    return (f->bias.data != NULL ? FA_HAS_BIAS : 0U) |
           (f->mask.data != NULL ? FA_HAS_MASK : 0U) |
           (f->alibi.data != NULL ? FA_HAS_ALIBI : 0U) |
           (f->sink.data != NULL ? FA_HAS_SINK : 0U) |
           (f->softcap > 0.0 ? FA_HAS_SOFTCAP : 0U) |
           (fa_keep_of(f->dropout_p) < FA_KEEP_ALL ? FA_HAS_DROPOUT : 0U) |
           (f->sink_keys > 0 && p->window_left >= 0 ? FA_HAS_SINK_KEYS : 0U) |
           (f->span_q.data != NULL ? FA_HAS_SPANS : 0U) |
           (f->blocks.data != NULL ? FA_HAS_BLOCKS : 0U);
}

/* The first row that fits. */
static const fa_variant *choose(const fa_problem *p, fa_pass pass,
                                uint32_t ariths)
{
    const int64_t dim =
        p->q.size[3] > p->v.size[3] ? p->q.size[3] : p->v.size[3];
    const fa_level level =
        pass != FA_PREPARE && fa_features_of(p) != 0 ? FA_FULL : FA_PLAIN;
    const fa_variant *found = NULL;
    for (size_t i = 0; i < FA_VARIANT_COUNT && found == NULL; i++) {
        const fa_variant *row = &fa_variants[i];
        if (row->pass == pass && row->dim >= dim && row->level >= level &&
            (row->reads >> p->q.dtype & 1) != 0 &&
            (ariths >> row->arith & 1) != 0) {
            found = row;
        }
    }
    /* The table serves all that the checks let through: test_plan.c. */
    assert(found != NULL);
    return found;
}

/* Multiply-adds of a pass, as if every row saw every key. */
static double products_of(const fa_problem *p, fa_pass pass)
{
    const double pairs = (double)p->q.size[0] * (double)p->q.size[1] *
                         (double)p->q.size[2] * (double)p->k.size[2];
    const double dim = (double)p->q.size[3];
    const double dim_v = (double)p->v.size[3];
    return pass == FA_FORWARD || pass == FA_BACKWARD_BIAS
               ? pairs * (dim + dim_v)
           : pass == FA_BACKWARD_KV ? pairs * (2.0 * dim + 2.0 * dim_v)
           : pass == FA_BACKWARD_Q  ? pairs * (2.0 * dim + dim_v)
                                    : 0.0;
}

bool fa_is_exact32(const fa_problem *p)
{
    const double small = 0x1p22;
    return p->q.dtype == FA_F32 &&
           (p->fp32 == FA_FP32_EXACT ||
            (p->fp32 == FA_FP32_AUTO && products_of(p, FA_FORWARD) <= small));
}

fa_dtype fa_dtype_of_rows(const fa_problem *p)
{
    return fa_is_exact32(p) ? FA_F64 : fa_dtype_of_sums(p->q.dtype);
}

static int64_t tiles_of(int64_t length, int32_t rows)
{
    return (length + rows - 1) / rows;
}

/* The tiles of dbias: of its rows, times of its keys. */
static int64_t bias_tiles(const fa_tensor *bias, const fa_variant *row)
{
    return tiles_of(bias->size[2], row->rows) *
           tiles_of(bias->size[3], row->steps);
}

/* Adds the launch of a row from `ariths`.  The grid, in workgroups:
 * FA_FORWARD and FA_BACKWARD_Q  tiles of queries, H, B
 * FA_BACKWARD_KV                tiles of keys, Hk, B
 * FA_BACKWARD_BIAS              tiles of dbias, those of keys running faster;
 *                               heads and batch of the bias
 * FA_PREPARE                    blocks of the longer side for each of the
 *                               FA_PREPARED tensors, H, B */
static fa_status add_step(const fa_problem *p, fa_plan *plan, fa_pass pass,
                          uint32_t ariths, fa_step step, fa_error *error)
{
    const int64_t queries = p->q.size[2];
    const int64_t keys = p->k.size[2];
    const int64_t longer = queries > keys ? queries : keys;
    const bool of_bias = pass == FA_BACKWARD_BIAS;
    const fa_tensor *of = of_bias                  ? &p->features.bias
                          : pass == FA_BACKWARD_KV ? &p->k
                                                   : &p->q;
    const fa_variant *row = choose(p, pass, ariths);
    const int64_t length = pass == FA_PREPARE       ? longer
                           : pass == FA_BACKWARD_KV ? keys
                                                    : queries;
    int64_t groups =
        of_bias ? bias_tiles(of, row) : tiles_of(length, row->rows);
    if (pass == FA_PREPARE) {
        assert(row->rows == FA_BLOCK_ROWS);
        groups *= FA_PREPARED;
    }
    /* HIP counts a grid in work items, in 32 bits. */
    if (groups * row->threads > UINT32_MAX && of_bias) {
        return fa_fail(error, FA_EUNSUPPORTED,
                       "bias: expected at most %lld tiles for %s, got %lld",
                       (long long)UINT32_MAX / row->threads, row->symbol,
                       (long long)groups);
    }
    if (groups * row->threads > UINT32_MAX) {
        return fa_fail(error, FA_EUNSUPPORTED,
                       "%s: expected at most %lld rows for %s, got %lld",
                       length == queries ? "q" : "k",
                       (long long)UINT32_MAX / row->threads * row->rows /
                           (pass == FA_PREPARE ? FA_PREPARED : 1),
                       row->symbol, (long long)length);
    }
    step.variant = row;
    step.products = products_of(p, pass);
    step.grid[0] = (uint32_t)groups;
    step.grid[1] = (uint32_t)of->size[1];
    step.grid[2] = (uint32_t)of->size[0];
    assert(plan->count < FA_MAX_STEPS);
    plan->step[plan->count++] = step;
    return FA_OK;
}

/* -- the workspace --------------------------------------------------------- */

/* An allocator takes int64. */
static const size_t workspace_limit = (size_t)1 << 62;

/* Room for `count` elements at the end; returns where.  What exceeds the limit
 * stays there. */
static size_t reserve(fa_workspace *w, int64_t count, size_t bytes)
{
    const size_t at = w->bytes;
    const size_t most = (workspace_limit - at) / bytes / 16 * 16;
    w->bytes = (size_t)count < most
                   ? at + ((size_t)count * bytes + 15) / 16 * 16
                   : workspace_limit;
    return at;
}

/* Places the numbers of queries if wanted, and the arrays of the tensors in
 * these sets (FA_SET_*). */
static fa_status lay_out(const fa_problem *p, bool numbers, uint32_t scales,
                         uint32_t blocks, fa_workspace *w, fa_error *error)
{
    const int64_t queries = p->q.size[0] * p->q.size[1] * p->q.size[2];
    const fa_tensor *const rows_of[FA_PREPARED] = {&p->q, &p->k, &p->v, &p->q};
    const size_t number_bytes = fa_dtype_bytes(fa_dtype_of_rows(p));
    w->bytes = 0;
    w->rows = FA_NOWHERE;
    if (numbers) {
        w->rows = reserve(w, queries * FA_ROW_NUMBERS, number_bytes);
    }
    for (int i = 0; i < FA_PREPARED; i++) {
        const int64_t *size = rows_of[i]->size;
        const int64_t heads = size[0] * size[1];
        const int64_t count = (size[2] + FA_BLOCK_ROWS - 1) / FA_BLOCK_ROWS;
        w->scale_of[i] = FA_NOWHERE;
        w->block_of[i] = FA_NOWHERE;
        if ((scales >> i & 1) != 0) {
            w->scale_of[i] = reserve(w, heads * size[2], sizeof(float));
        }
        if ((blocks >> i & 1) != 0) {
            w->block_of[i] = reserve(w, heads * count, sizeof(fa_block));
        }
    }
    return w->bytes < workspace_limit
               ? FA_OK
               : fa_fail(error, FA_EUNSUPPORTED,
                         "q: expected a workspace below 2^62 bytes, got more");
}

/* -- the plans ------------------------------------------------------------- */

static void note_narrow(const fa_problem *p, const fa_gradients *g,
                        fa_plan *plan)
{
    const fa_tensor *list[FA_TENSORS];
    fa_list_tensors(p, g, list);
    for (int i = 0; i < FA_TENSORS; i++) {
        if (list[i] != NULL) {
            plan->tensors |= 1U << i;
            plan->narrow[i] = fa_why_narrow(list[i]);
        }
    }
}

/* Whether bfloat16 goes through fp16: there are rows for all that is asked. */
static bool is_fast(const fa_problem *p, bool kv, bool q, bool forward)
{
    return p->q.dtype == FA_BF16 && !p->strict_bf16 &&
           (!forward || choose(p, FA_FORWARD, FA_READS_F16) != NULL) &&
           (!kv || choose(p, FA_BACKWARD_KV, FA_READS_F16) != NULL) &&
           (!q || choose(p, FA_BACKWARD_Q, FA_READS_F16) != NULL);
}

/* The arithmetic of a problem's own kernels.  With so few channels single
 * keys make up dq, and the roundings of fp16 no longer average out; and
 * products are the least part of the work. */
static uint32_t own_arith(const fa_problem *p)
{
    const int64_t few_channels = 8;
    const fa_dtype dtype = p->q.dtype;
    return fa_is_exact32(p) ? FA_READS_F64
           : dtype == FA_BF16 ||
                   (dtype == FA_F16 && p->q.size[3] < few_channels)
               ? FA_READS_F32
               : 1U << dtype;
}

/* That of what goes over rows or makes dbias: no narrower than float. */
static uint32_t wide_arith(const fa_problem *p)
{
    return 1U << fa_dtype_of_rows(p);
}

fa_status fa_plan_forward(const fa_problem *p, fa_plan *plan, fa_error *error)
{
    const uint32_t prepared = FA_SET_Q | FA_SET_K | FA_SET_V;
    fa_plan made = {0};
    fa_status status = fa_check_forward(p, error);
    *plan = (fa_plan){0};
    if (status != FA_OK) {
        return status;
    }
    /* A sink is a key, too: lse is its score then, which no fill can write, so
     * that kernels run, over no keys. */
    if (fa_tensor_is_empty(&p->q) ||
        (p->k.size[2] == 0 && p->features.sink.data == NULL)) {
        plan->work = fa_tensor_is_empty(&p->q) ? FA_WORK_NONE : FA_WORK_NO_KEYS;
        return FA_OK;
    }
    made.features = fa_features_of(p);
    const bool fast = is_fast(p, false, false, true);
    const fa_step usual = {0};
    const fa_step prepare = {.prepare = prepared};
    const fa_step unfit = {.only_unfit = 1};
    status = lay_out(p, false, fast ? prepared : 0, fast ? prepared : 0,
                     &made.workspace, error);
    if (fast && status == FA_OK) {
        status = add_step(p, &made, FA_PREPARE, wide_arith(p), prepare, error);
    }
    if (fast && status == FA_OK) {
        status = add_step(p, &made, FA_FORWARD, FA_READS_F16, usual, error);
    }
    if (status == FA_OK) {
        status = add_step(p, &made, FA_FORWARD, own_arith(p),
                          fast ? unfit : usual, error);
    }
    if (status == FA_OK) {
        note_narrow(p, NULL, &made);
        *plan = made;
    }
    return status;
}

/* Whether dQ takes the corrected delta. */
static bool corrects_queries(const fa_problem *p, const fa_gradients *g)
{
    return fa_is_exact32(p) && (g->wanted & FA_WANT_DQ) != 0;
}

/* Whether dK does. */
static bool corrects_keys(const fa_problem *p, const fa_gradients *g)
{
    return p->q.dtype != FA_F64 && (g->wanted & FA_WANT_DK) != 0;
}

/* Whether that happens between the passes. */
static bool corrects_passes(const fa_problem *p, const fa_gradients *g)
{
    return corrects_queries(p, g) || corrects_keys(p, g);
}

/* Whether delta is corrected: without it most of the error of these gradients
 * would be that of delta. */
static bool corrects_delta(const fa_problem *p, const fa_gradients *g)
{
    const bool wide = (g->wanted & (FA_WANT_DBIAS | FA_WANT_DSINK)) != 0;
    return p->q.dtype != FA_F64 && (wide || corrects_passes(p, g));
}

/* For row sums also if dq is not wanted, so that no gradient depends on what
 * else is. */
static bool has_q(const fa_problem *p, const fa_gradients *g)
{
    return (g->wanted & FA_WANT_DQ) != 0 || corrects_delta(p, g);
}

static fa_status add_correction(const fa_problem *p, fa_plan *plan,
                                fa_error *error)
{
    const fa_step correct = {.prepare = FA_SET_DOUT, .row_sums = true};
    return add_step(p, plan, FA_PREPARE, wide_arith(p), correct, error);
}

/* A pass; if bfloat16 goes through fp16, the same in fp32 for what did not fit
 * behind it. */
static fa_status add_pass(const fa_problem *p, fa_plan *plan, fa_pass pass,
                          bool fast, fa_step step, fa_error *error)
{
    fa_status status = FA_OK;
    if (fast) {
        status = add_step(p, plan, pass, FA_READS_F16, step, error);
    }
    step.only_unfit = fast;
    return status == FA_OK ? add_step(p, plan, pass, own_arith(p), step, error)
                           : status;
}

/* KV and Q, as far as they are needed; for a corrected delta Q first. */
static fa_status add_passes(const fa_problem *p, const fa_gradients *g,
                            fa_plan *plan, bool fast, fa_error *error)
{
    const bool again = corrects_queries(p, g);
    const bool corrects = corrects_passes(p, g);
    const bool kv = (g->wanted & (FA_WANT_DK | FA_WANT_DV)) != 0;
    const fa_step usual = {0};
    const fa_step q = {.row_sums = corrects_delta(p, g), .dq_follows = again};
    fa_status status = FA_OK;
    if (kv && !corrects) {
        status = add_pass(p, plan, FA_BACKWARD_KV, fast, usual, error);
    }
    if (status == FA_OK && has_q(p, g)) {
        status = add_pass(p, plan, FA_BACKWARD_Q, fast, q, error);
    }
    if (status == FA_OK && corrects) {
        status = add_correction(p, plan, error);
    }
    if (status == FA_OK && again) {
        status = add_pass(p, plan, FA_BACKWARD_Q, fast, usual, error);
    }
    if (status == FA_OK && kv && corrects) {
        status = add_pass(p, plan, FA_BACKWARD_KV, fast, usual, error);
    }
    return status;
}

/* What corrects delta if that is still needed, and BIAS if it is wanted. */
static fa_status add_bias_passes(const fa_problem *p, const fa_gradients *g,
                                 fa_plan *plan, fa_error *error)
{
    const fa_step usual = {0};
    fa_status status = FA_OK;
    if (corrects_delta(p, g) && !corrects_passes(p, g)) {
        status = add_correction(p, plan, error);
    }
    if ((g->wanted & FA_WANT_DBIAS) != 0 && status == FA_OK) {
        status =
            add_step(p, plan, FA_BACKWARD_BIAS, wide_arith(p), usual, error);
    }
    return status;
}

/* What there is to do if a sum is empty, or FA_WORK_STEPS. */
static fa_work backward_work(const fa_problem *p, const fa_gradients *g)
{
    const bool queries = (g->wanted & (FA_WANT_DQ | FA_WANT_DSINK)) != 0 &&
                         !fa_tensor_is_empty(&p->q);
    const bool keys = (g->wanted & (FA_WANT_DK | FA_WANT_DV)) != 0 &&
                      !fa_tensor_is_empty(&p->k);
    const bool bias = (g->wanted & FA_WANT_DBIAS) != 0 &&
                      !fa_tensor_is_empty(&p->features.bias);
    return !queries && !keys && !bias ? FA_WORK_NONE
           : fa_tensor_is_empty(&p->q) || fa_tensor_is_empty(&p->k)
               ? FA_WORK_NO_KEYS
               : FA_WORK_STEPS;
}

/* Without keys the sink alone has a gradient, which FA_PREPARE finds. */
static fa_status plan_without_keys(const fa_problem *p, const fa_gradients *g,
                                   fa_plan *plan, fa_error *error)
{
    const fa_step prepare = {.prepare = FA_SET_DOUT};
    if ((g->wanted & FA_WANT_DSINK) == 0 || fa_tensor_is_empty(&p->q)) {
        return FA_OK;
    }
    fa_status status = lay_out(p, true, 0, 0, &plan->workspace, error);
    return status == FA_OK
               ? add_step(p, plan, FA_PREPARE, wide_arith(p), prepare, error)
               : status;
}

static fa_status plan_steps(const fa_problem *p, const fa_gradients *g,
                            fa_plan *plan, fa_error *error)
{
    const bool kv = (g->wanted & (FA_WANT_DK | FA_WANT_DV)) != 0;
    const bool q = has_q(p, g);
    const bool fast = (kv || q) && is_fast(p, kv, q, false);
    /* dS into fp16 */
    const bool packs = fast || ((kv || q) && own_arith(p) == FA_READS_F16);
    const uint32_t all = FA_SET_Q | FA_SET_K | FA_SET_V | FA_SET_DOUT;
    const uint32_t prepared = fast    ? all
                              : packs ? FA_SET_V | FA_SET_DOUT
                                      : FA_SET_DOUT;
    const fa_step prepare = {.prepare = prepared};
    fa_status status = lay_out(p, true, fast ? all : 0, packs ? prepared : 0,
                               &plan->workspace, error);
    if (status == FA_OK) {
        status = add_step(p, plan, FA_PREPARE, wide_arith(p), prepare, error);
    }
    if (status == FA_OK && (kv || q)) {
        status = add_passes(p, g, plan, fast, error);
    }
    if (status == FA_OK) {
        status = add_bias_passes(p, g, plan, error);
    }
    if (status == FA_OK) {
        note_narrow(p, g, plan);
    }
    return status;
}

fa_status fa_plan_backward(const fa_problem *p, const fa_gradients *g,
                           fa_plan *plan, fa_error *error)
{
    fa_plan made = {.backward = true};
    fa_status status = fa_check_backward(p, g, error);
    *plan = (fa_plan){0};
    if (status != FA_OK) {
        return status;
    }
    made.work = backward_work(p, g);
    made.features = fa_features_of(p);
    if (made.work != FA_WORK_NONE) {
        status = made.work == FA_WORK_STEPS
                     ? plan_steps(p, g, &made, error)
                     : plan_without_keys(p, g, &made, error);
    }
    if (status == FA_OK) {
        *plan = made;
    }
    return status;
}

bool fa_step_is_main(const fa_step *step)
{
    return step->variant->pass != FA_PREPARE && step->only_unfit == 0 &&
           !step->dq_follows;
}

void fa_plan_symbols(const fa_plan *plan, char text[FA_SYMBOLS_CHARS])
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < plan->count; i++) {
        const bool alone = plan->count == 1; /* dsink, which FA_PREPARE makes */
        const fa_variant *own = plan->step[i].variant;
        if ((alone || fa_step_is_main(&plan->step[i])) &&
            used < FA_SYMBOLS_CHARS) {
            used += (size_t)snprintf(text + used, FA_SYMBOLS_CHARS - used,
                                     "%s%s", used == 0 ? "" : "+", own->symbol);
        }
    }
}
