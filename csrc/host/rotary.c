/* rotary.c: rotary positions, from a problem to the one launch that serves it:
 * what is legal, the plan, and what the kernel is told.
 *
 * Tensors keep torch's order of dimensions, (B, S, H, D), unlike those of
 * attention.  B batch, S tokens, H heads of q, Hk of k, D head dim, R channels
 * that are turned.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/plan.h"

enum { MAX_GRID = 65535, GRANULE_BYTES = 16 };

static const char *const axes[4] = {"batch", "seqlen", "head", "head dim"};

/* -- is it ours? ----------------------------------------------------------- */

/* The widest row that reads `dtype`, or NULL. */
static const fa_variant *choose(fa_dtype dtype)
{
    const fa_variant *widest = NULL;
    for (size_t i = 0; i < FA_VARIANT_COUNT; i++) {
        const fa_variant *row = &fa_variants[i];
        if (row->pass == FA_ROTARY && (row->reads >> dtype & 1) != 0 &&
            (widest == NULL || row->dim > widest->dim)) {
            widest = row;
        }
    }
    return widest;
}

static fa_status check_size(const char *name, const fa_tensor *t, int dim,
                            int64_t expected, const char *whose,
                            fa_error *error)
{
    return t->size[dim] == expected
               ? FA_OK
               : fa_fail(error, FA_EINVAL,
                         "%s: expected size %lld in dimension %d (%s, as in "
                         "%s), got %lld",
                         name, (long long)expected, dim, axes[dim], whose,
                         (long long)t->size[dim]);
}

static fa_status check_tensor(const char *name, const fa_tensor *t,
                              fa_error *error)
{
    const fa_variant *row = choose(t->dtype);
    const int64_t least[4] = {0, 0, 0, 1};
    const int64_t limit[4] = {MAX_GRID, FA_LENGTH_MAX, MAX_GRID,
                              row == NULL ? 0 : row->dim};
    for (int d = 0; d < 4; d++) {
        if (t->size[d] < least[d] || t->size[d] > limit[d]) {
            return fa_fail(error, t->size[d] < 0 ? FA_EINVAL : FA_EUNSUPPORTED,
                           "%s: expected a size of %lld..%lld in dimension %d "
                           "(%s), got %lld",
                           name, (long long)least[d], (long long)limit[d], d,
                           axes[d], (long long)t->size[d]);
        }
    }
    /* The strides of an empty tensor mean nothing. */
    return fa_tensor_is_empty(t) ? FA_OK : fa_check_strides(name, t, error);
}

static fa_status check_output(const char *name, const fa_tensor *t,
                              const char *whose, const fa_tensor *of,
                              fa_error *error)
{
    fa_status status = fa_check_dtype(name, t, of->dtype, whose, error);
    for (int d = 0; d < 4 && status == FA_OK; d++) {
        status = check_size(name, t, d, of->size[d], whose, error);
    }
    if (status == FA_OK && !fa_tensor_is_empty(t)) {
        status = fa_check_strides(name, t, error);
    }
    return status == FA_OK ? fa_check_overlap(name, t, error) : status;
}

static fa_status check_cos(const fa_rotary *p, fa_error *error)
{
    const fa_tensor *cos = &p->cos;
    const fa_dtype wider = fa_dtype_of_sums(p->q.dtype);
    if (cos->dtype != p->q.dtype && cos->dtype != wider) {
        return fa_fail(error, FA_EINVAL, "cos: expected dtype %s%s%s, got %s",
                       fa_dtype_name(p->q.dtype),
                       wider == p->q.dtype ? "" : " or ",
                       wider == p->q.dtype ? "" : fa_dtype_name(wider),
                       fa_dtype_name(cos->dtype));
    }
    if (cos->size[0] != 1 && cos->size[0] != p->q.size[0]) {
        return fa_fail(error, FA_EINVAL,
                       "cos: expected batch size 1 or %lld (as in q), got %lld",
                       (long long)p->q.size[0], (long long)cos->size[0]);
    }
    if (cos->size[1] != p->q.size[1]) {
        return fa_fail(error, FA_EINVAL,
                       "cos: expected %lld rows (the seqlen of q), got %lld",
                       (long long)p->q.size[1], (long long)cos->size[1]);
    }
    if (cos->size[2] != 1) {
        return fa_fail(error, FA_EINVAL, "cos: expected 1 head, got %lld",
                       (long long)cos->size[2]);
    }
    if (cos->size[3] < 0 || cos->size[3] > p->q.size[3] / 2) {
        return fa_fail(error, FA_EINVAL,
                       "cos: expected at most %lld columns (one for two "
                       "channels of the head dim %lld of q), got %lld",
                       (long long)p->q.size[3] / 2, (long long)p->q.size[3],
                       (long long)cos->size[3]);
    }
    return fa_tensor_is_empty(cos) ? FA_OK
                                   : fa_check_strides("cos", cos, error);
}

static fa_status check_sin(const fa_rotary *p, fa_error *error)
{
    const fa_tensor *sin = &p->sin;
    fa_status status = fa_check_dtype("sin", sin, p->cos.dtype, "cos", error);
    for (int d = 0; d < 4 && status == FA_OK; d++) {
        if (sin->size[d] != p->cos.size[d]) {
            status = fa_fail(error, FA_EINVAL,
                             "sin: expected %lld %s (as cos), got %lld",
                             (long long)p->cos.size[d],
                             d == 0   ? "batches"
                             : d == 1 ? "rows"
                             : d == 2 ? "heads"
                                      : "columns",
                             (long long)sin->size[d]);
        }
    }
    return status != FA_OK || fa_tensor_is_empty(sin)
               ? status
               : fa_check_strides("sin", sin, error);
}

static fa_status check(const fa_rotary *p, fa_error *error)
{
    fa_status status = FA_OK;
    if ((status = fa_check_dtype("k", &p->k, p->q.dtype, "q", error)) !=
            FA_OK ||
        (status = check_tensor("q", &p->q, error)) != FA_OK ||
        (status = check_tensor("k", &p->k, error)) != FA_OK ||
        (status = check_size("k", &p->k, 0, p->q.size[0], "q", error)) !=
            FA_OK ||
        (status = check_size("k", &p->k, 1, p->q.size[1], "q", error)) !=
            FA_OK ||
        (status = check_size("k", &p->k, 3, p->q.size[3], "q", error)) !=
            FA_OK ||
        (status = check_cos(p, error)) != FA_OK ||
        (status = check_sin(p, error)) != FA_OK ||
        (status = fa_check_elements("q", &p->q, p->q.size[3], "out_q",
                                    error)) != FA_OK ||
        (status = fa_check_elements("k", &p->k, p->k.size[3], "out_k",
                                    error)) != FA_OK ||
        (status = check_output("out_q", &p->out_q, "q", &p->q, error)) !=
            FA_OK) {
        return status;
    }
    return check_output("out_k", &p->out_k, "k", &p->k, error);
}

/* -- 16 bytes at a time ---------------------------------------------------- */

/* The same in attention's order, for what is known of that. */
static fa_narrow why_narrow(const fa_tensor *t)
{
    fa_tensor swapped = *t;
    swapped.size[1] = t->size[2];
    swapped.size[2] = t->size[1];
    swapped.stride[1] = t->stride[2];
    swapped.stride[2] = t->stride[1];
    const fa_narrow why = fa_why_narrow(&swapped);
    /* Offsets are of 64 bits here. */
    return why.cause == FA_CAUSE_ROW ? (fa_narrow){.cause = FA_CAUSE_WIDE}
                                     : why;
}

/* Of q or k: a granule must also be turned whole. */
static fa_narrow why_narrow_input(const fa_rotary *p, const fa_tensor *t)
{
    const int32_t granule = GRANULE_BYTES / (int32_t)fa_dtype_bytes(t->dtype);
    const int32_t unit = p->interleaved ? granule : 2 * granule;
    const int64_t turned = 2 * p->cos.size[3];
    const fa_narrow why = why_narrow(t);
    return why.cause == FA_CAUSE_WIDE && turned % unit != 0
               ? (fa_narrow){.cause = FA_CAUSE_ROTARY,
                             .limit = unit,
                             .value = turned}
               : why;
}

/* Rows of a table are read in whole granules only as far as they reach. */
static fa_narrow why_narrow_table(const fa_tensor *t)
{
    const int64_t granule = GRANULE_BYTES / (int64_t)fa_dtype_bytes(t->dtype);
    fa_tensor longer = *t;
    longer.size[3] = (t->size[3] + granule - 1) / granule * granule;
    return why_narrow(&longer);
}

static bool is_wide(fa_narrow why)
{
    return why.cause == FA_CAUSE_WIDE;
}

static uint32_t wide_of(const fa_rotary *p)
{
    return (is_wide(why_narrow_input(p, &p->q)) &&
                    is_wide(why_narrow(&p->out_q))
                ? FA_ROTARY_WIDE_Q
                : 0U) |
           (is_wide(why_narrow_input(p, &p->k)) &&
                    is_wide(why_narrow(&p->out_k))
                ? FA_ROTARY_WIDE_K
                : 0U) |
           (is_wide(why_narrow_table(&p->cos)) &&
                    is_wide(why_narrow_table(&p->sin))
                ? FA_ROTARY_WIDE_TABLES
                : 0U);
}

/* -- the plan -------------------------------------------------------------- */

static int64_t tiles_of(int64_t length, int64_t tile)
{
    return (length + tile - 1) / tile;
}

fa_status fa_plan_rotary(const fa_rotary *p, fa_plan *plan, fa_error *error)
{
    fa_plan made = {0};
    fa_status status = check(p, error);
    *plan = (fa_plan){0};
    if (status != FA_OK) {
        return status;
    }
    if (fa_tensor_is_empty(&p->q) && fa_tensor_is_empty(&p->k)) {
        plan->work = FA_WORK_NONE;
        return FA_OK;
    }
    const fa_variant *row = choose(p->q.dtype);
    const int64_t groups = tiles_of(p->q.size[1], row->rows);
    if (groups * row->threads > UINT32_MAX) { /* as HIP counts a grid */
        return fa_fail(error, FA_EUNSUPPORTED,
                       "q: expected a seqlen of at most %lld for %s, got %lld",
                       (long long)UINT32_MAX / row->threads * row->rows,
                       row->symbol, (long long)p->q.size[1]);
    }
    const fa_tensor *const tensors[] = {&p->q, &p->k, &p->cos, &p->sin};
    for (int i = 0; i < 4; i++) {
        if (!fa_tensor_is_empty(tensors[i])) {
            made.tensors |= 1U << i;
            made.narrow[i] = i < 2 ? why_narrow_input(p, tensors[i])
                                   : why_narrow_table(tensors[i]);
        }
    }
    made.count = 1;
    made.step[0] =
        (fa_step){.variant = row,
                  .grid = {(uint32_t)groups,
                           (uint32_t)(tiles_of(p->q.size[2], FA_ROTARY_HEADS) +
                                      tiles_of(p->k.size[2], FA_ROTARY_HEADS)),
                           (uint32_t)p->q.size[0]}};
    *plan = made;
    return FA_OK;
}

/* -- the launch ------------------------------------------------------------ */

static fa_view view_of(const fa_tensor *t)
{
    fa_view view = {.data = t->data};
    for (int d = 0; d < 4; d++) {
        view.stride[d] = t->size[d] == 1 ? 0 : t->stride[d];
    }
    return view;
}

static void add_access(fa_rotary_call *call, const fa_tensor *t,
                       uint32_t access)
{
    if (!fa_tensor_is_empty(t)) {
        call->access[call->access_count++] =
            (fa_access){t, access, (int32_t)fa_dtype_bytes(t->dtype)};
    }
}

void fa_rotary_call_fill(const fa_rotary *p, fa_rotary_call *call)
{
    call->args = (fa_rotary_args){
        .in = {view_of(&p->q), view_of(&p->k)},
        .out = {view_of(&p->out_q), view_of(&p->out_k)},
        .cos = view_of(&p->cos),
        .sin = view_of(&p->sin),
        .seqlen = (int32_t)p->q.size[1],
        .heads = (int32_t)p->q.size[2],
        .heads_k = (int32_t)p->k.size[2],
        .head_dim = (int32_t)p->q.size[3],
        .rotary_dim = (int32_t)(2 * p->cos.size[3]),
        .stored = (int32_t)p->q.dtype,
        .stored_table = (int32_t)p->cos.dtype,
        .wide = wide_of(p), /* anew: the plan may be older than the memory */
        .interleaved = p->interleaved ? 1 : 0,
        .inverse = p->inverse ? 1 : 0,
    };
    call->access_count = 0;
    add_access(call, &p->q, FA_READ);
    add_access(call, &p->k, FA_READ);
    add_access(call, &p->cos, FA_READ);
    add_access(call, &p->sin, FA_READ);
    add_access(call, &p->out_q, FA_WRITE);
    add_access(call, &p->out_k, FA_WRITE);
}
