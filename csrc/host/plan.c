/* plan.c: is this problem ours, and which kernel runs it?
 *
 * All checks of a call are made here, before anything is launched or
 * written, and they look at numbers only: no tensor is read, no device asked.
 * The choice is the first row of variants.def that fits.  Whether data lies
 * where its device can reach it is left to whoever made the pointers.
 *
 * B batch, H query heads, Hk key heads, Sq and Sk lengths, D head dim.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "fa.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

const fa_variant fa_variants[FA_VARIANT_COUNT] = {
#define FA_VARIANT(symbol, pass, dtype, dim, level, load, rows, keys, threads, \
                   lds_bytes)                                                  \
    {#symbol, pass, dtype, dim, level, load, rows, keys, threads, lds_bytes},
#include "kernels/variants.def"
#undef FA_VARIANT
};

enum {
    MAX_GRID = 65535,     /* workgroups in y (heads) and z (batch) */
    MAX_LENGTH = 1 << 30, /* lengths and their sums fit 32 bits */
    WIDE_ELEMENTS = 8,    /* fp16 in one 16-byte load */
    WIDE_BYTES = 16,
    WIDE_ROW_LIMIT = 1 << 24 /* 32-bit byte offsets inside a tile */
};

static const char *const axes[4] = {"batch", "head", "row", "head dim"};

const char *fa_dtype_name(fa_dtype dtype)
{
    static const char *const names[] = {"float16", "bfloat16", "float32",
                                        "float64"};
    assert((size_t)dtype < sizeof names / sizeof names[0]);
    return names[dtype];
}

const char *fa_pass_name(fa_pass pass)
{
    static const char *const names[] = {"forward"};
    assert((size_t)pass < sizeof names / sizeof names[0]);
    return names[pass];
}

const char *fa_level_name(fa_level level)
{
    static const char *const names[] = {"plain"};
    assert((size_t)level < sizeof names / sizeof names[0]);
    return names[level];
}

const char *fa_load_name(fa_load load)
{
    static const char *const names[] = {"wide", "narrow"};
    assert((size_t)load < sizeof names / sizeof names[0]);
    return names[load];
}

/* -- the output's layout --------------------------------------------------- */

static bool is_empty(const fa_tensor *t)
{
    return t->size[0] == 0 || t->size[1] == 0 || t->size[2] == 0 ||
           t->size[3] == 0;
}

/* PyTorch's order of dimensions: the longer stride lies outside, for equal
 * strides the larger size; a stride of 0 decides nothing.  Returns 1 if `a`
 * lies outside `b`, -1 for the reverse, 0 if it is not decided. */
static int compare_dims(const fa_tensor *t, int a, int b)
{
    if (t->stride[a] == 0 || t->stride[b] == 0) {
        return 0;
    }
    if (t->stride[a] != t->stride[b]) {
        return t->stride[a] > t->stride[b] ? 1 : -1;
    }
    return t->size[a] > t->size[b] ? 1 : 0;
}

/* Sizes of tensors that do not exist may overflow; fa_plan_make refuses them
 * later, but the product must be defined until then. */
static int64_t multiply(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a * (uint64_t)b);
}

/* Dense and without overlap, in any order of dimensions.  Dimensions of
 * size 1 do not count. */
static bool is_dense(const fa_tensor *t)
{
    int64_t expected = 1;
    bool placed[4] = {false};
    for (int step = 0; step < 4; step++) {
        int next = -1;
        for (int d = 0; d < 4; d++) {
            if (!placed[d] && t->size[d] != 1 && t->stride[d] == expected) {
                next = d;
            }
        }
        if (next < 0) {
            break;
        }
        placed[next] = true;
        expected = multiply(expected, t->size[next]);
    }
    for (int d = 0; d < 4; d++) {
        if (!placed[d] && t->size[d] != 1) {
            return false;
        }
    }
    return true;
}

void fa_tensor_like(const fa_tensor *q, fa_tensor *out)
{
    *out = *q;
    out->data = NULL;
    if (!is_empty(q) && is_dense(q)) {
        return;
    }
    /* Insertion sort, innermost first.  A comparison that decides nothing
     * is skipped over, as in PyTorch, so the result is PyTorch's too. */
    int order[4] = {3, 2, 1, 0};
    for (int i = 2; i < 4; i++) {
        int moving = i;
        for (int at = i - 1; at >= 1; at--) {
            const int decided = compare_dims(q, order[at], order[moving]);
            if (decided < 0) {
                break;
            }
            if (decided > 0) {
                int swap = order[at];
                order[at] = order[moving];
                order[moving] = swap;
                moving = at;
            }
        }
    }
    int64_t stride = 1;
    for (int i = 0; i < 4; i++) {
        out->stride[order[i]] = stride;
        if (q->size[order[i]] > 1) {
            stride = multiply(stride, q->size[order[i]]);
        }
    }
}

/* -- checks ---------------------------------------------------------------- */

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

/* The widest bucket that the rows have for these. */
static int64_t largest_dim(fa_pass pass, fa_dtype dtype)
{
    int64_t largest = 0;
    for (size_t i = 0; i < FA_VARIANT_COUNT; i++) {
        const fa_variant *row = &fa_variants[i];
        if (row->pass == pass && row->dtype == dtype && row->dim > largest) {
            largest = row->dim;
        }
    }
    return largest;
}

/* What holds for each tensor alone. */
static fa_status check_tensor(const char *name, const fa_tensor *t,
                              fa_error *error)
{
    const int64_t limit[4] = {MAX_GRID, MAX_GRID, MAX_LENGTH,
                              largest_dim(FA_FORWARD, t->dtype)};
    for (int d = 0; d < 4; d++) {
        if (t->size[d] < 0 || t->size[d] > limit[d]) {
            return fa_fail(error, t->size[d] < 0 ? FA_EINVAL : FA_EUNSUPPORTED,
                           "%s: expected a size of 0..%lld in dimension %d "
                           "(%s), got %lld",
                           name, (long long)limit[d], d, axes[d],
                           (long long)t->size[d]);
        }
    }
    if (is_empty(t)) {
        return FA_OK; /* its strides mean nothing */
    }
    if (t->size[3] != 1 && t->stride[3] != 1) {
        return fa_fail(error, FA_EUNSUPPORTED,
                       "%s: expected a contiguous last dimension, got "
                       "stride %lld",
                       name, (long long)t->stride[3]);
    }
    /* The last element's byte offset must fit int64.  Small strides cannot
     * get there (2^30 rows * 2^28 * 8 bytes, three times), and skip the
     * slow divisions. */
    int64_t room = INT64_MAX / 8;
    for (int d = 0; d < 3; d++) {
        int64_t steps = t->size[d] - 1;
        if (steps == 0) {
            continue;
        }
        if (t->stride[d] < 0) {
            return fa_fail(error, FA_EINVAL,
                           "%s: expected strides of at least 0, got %lld in "
                           "dimension %d",
                           name, (long long)t->stride[d], d);
        }
        if (t->stride[d] >= (INT64_C(1) << 28) && t->stride[d] > room / steps) {
            return fa_fail(error, FA_EINVAL,
                           "%s: expected byte offsets below 2^63, got stride "
                           "%lld for %lld elements in dimension %d",
                           name, (long long)t->stride[d], (long long)t->size[d],
                           d);
        }
        room -= steps * t->stride[d];
    }
    return FA_OK;
}

static fa_status check_dtypes(const fa_problem *p, fa_error *error)
{
    const struct {
        const char *name;
        const fa_tensor *tensor;
    } others[] = {{"k", &p->k}, {"v", &p->v}, {"out", &p->out}};
    if (p->q.dtype != FA_F16) {
        return fa_fail(error, FA_EUNSUPPORTED,
                       "q: not supported yet, expected dtype float16, got %s",
                       fa_dtype_name(p->q.dtype));
    }
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        if (others[i].tensor->dtype != p->q.dtype) {
            return fa_fail(error, FA_EINVAL,
                           "%s: expected dtype %s (as q), got %s",
                           others[i].name, fa_dtype_name(p->q.dtype),
                           fa_dtype_name(others[i].tensor->dtype));
        }
    }
    return FA_OK;
}

/* Two elements of out must never share memory: taken from the innermost
 * dimension outwards, each stride reaches past all that lies inside. */
static fa_status check_out(const fa_problem *p, fa_error *error)
{
    const fa_tensor *out = &p->out;
    fa_status status = check_tensor("out", out, error);
    if (status != FA_OK) {
        return status;
    }
    for (int d = 0; d < 4; d++) {
        status = check_size("out", out, d, p->q.size[d], "q", error);
        if (status != FA_OK) {
            return status;
        }
    }
    for (int d = 0; d < 3 && !is_empty(out); d++) {
        int64_t inside = out->size[3];
        for (int e = 0; e < 3; e++) {
            if (e != d && out->size[e] != 1 &&
                (out->stride[e] < out->stride[d] ||
                 (out->stride[e] == out->stride[d] && e > d))) {
                inside += (out->size[e] - 1) * out->stride[e];
            }
        }
        if (out->size[d] != 1 && out->stride[d] < inside) {
            return fa_fail(error, FA_EINVAL,
                           "out: expected elements that do not overlap, got "
                           "stride %lld in dimension %d, which spans %lld",
                           (long long)out->stride[d], d, (long long)inside);
        }
    }
    return FA_OK;
}

static fa_status check_shapes(const fa_problem *p, fa_error *error)
{
    fa_status status = FA_OK;
    if ((status = check_tensor("q", &p->q, error)) != FA_OK ||
        (status = check_tensor("k", &p->k, error)) != FA_OK ||
        (status = check_tensor("v", &p->v, error)) != FA_OK ||
        (status = check_size("k", &p->k, 0, p->q.size[0], "q", error)) !=
            FA_OK ||
        (status = check_size("k", &p->k, 3, p->q.size[3], "q", error)) !=
            FA_OK) {
        return status;
    }
    for (int d = 0; d < 4; d++) {
        const char *whose = d == 0 || d == 3 ? "q" : "k";
        const fa_tensor *like = d == 0 || d == 3 ? &p->q : &p->k;
        status = check_size("v", &p->v, d, like->size[d], whose, error);
        if (status != FA_OK) {
            return status;
        }
    }
    if (p->q.size[3] == 0) {
        return fa_fail(error, FA_EUNSUPPORTED,
                       "q: expected a head dim of 1..%lld, got 0",
                       (long long)largest_dim(FA_FORWARD, p->q.dtype));
    }
    const int64_t heads = p->q.size[1];
    const int64_t key_heads = p->k.size[1];
    if (key_heads == 0 ? heads != 0 : heads % key_heads != 0) {
        return fa_fail(error, FA_EINVAL,
                       "k: expected a number of heads that divides the %lld "
                       "of q, got %lld",
                       (long long)heads, (long long)key_heads);
    }
    /* Exact enough in floating point, and cannot overflow.  q may be an
     * expanded view, so its own existence proves nothing for out. */
    const double rows =
        (double)p->q.size[0] * (double)heads * (double)p->q.size[2];
    if (rows * (double)p->q.size[3] >= 0x1p59) {
        return fa_fail(error, FA_EINVAL,
                       "q: expected fewer than 2^59 elements in out, got %g",
                       rows * (double)p->q.size[3]);
    }
    return FA_OK;
}

static fa_status check_scalars(const fa_problem *p, fa_error *error)
{
    /* The kernel holds scale * log2(e) in single precision. */
    if (!(fabs(p->scale) < 0x1p127)) {
        return fa_fail(error, FA_EINVAL,
                       "scale: expected a finite number below 2^127, got %g",
                       p->scale);
    }
    if (p->causal < FA_CAUSAL_NONE || p->causal > FA_CAUSAL_BOTTOM_RIGHT) {
        return fa_fail(error, FA_EINVAL,
                       "causal: expected 0 (none), 1 (top-left) or 2 "
                       "(bottom-right), got %d",
                       p->causal);
    }
    return FA_OK;
}

/* -- the choice ------------------------------------------------------------ */

/* Can every load and store of `t` be 16 bytes?  If not, says why. */
static bool is_wide(const char *name, const fa_tensor *t, fa_plan *plan)
{
    plan->tensor = name;
    if ((uintptr_t)t->data % WIDE_BYTES != 0) {
        plan->cause = FA_CAUSE_BASE;
        return false;
    }
    for (int d = 0; d < 3; d++) {
        if (t->size[d] == 1) {
            continue;
        }
        plan->axis = axes[d];
        plan->value = t->stride[d];
        if (t->stride[d] % WIDE_ELEMENTS != 0) {
            plan->cause = FA_CAUSE_STRIDE;
            return false;
        }
        if (d == 2 && t->stride[d] >= WIDE_ROW_LIMIT) {
            plan->cause = FA_CAUSE_ROW;
            return false;
        }
    }
    return true;
}

static fa_load choose_load(const fa_problem *p, fa_plan *plan)
{
    plan->value = p->q.size[3];
    if (p->q.size[3] % WIDE_ELEMENTS != 0) {
        plan->cause = FA_CAUSE_DIM;
        return FA_LOAD_NARROW;
    }
    if (!is_wide("q", &p->q, plan) || !is_wide("k", &p->k, plan) ||
        !is_wide("v", &p->v, plan) || !is_wide("out", &p->out, plan)) {
        return FA_LOAD_NARROW;
    }
    plan->cause = FA_CAUSE_WIDE;
    return FA_LOAD_WIDE;
}

fa_status fa_plan_make(const fa_problem *p, fa_plan *plan, fa_error *error)
{
    fa_status status = FA_OK;
    *plan = (fa_plan){0};
    if ((status = check_dtypes(p, error)) != FA_OK ||
        (status = check_shapes(p, error)) != FA_OK ||
        (status = check_out(p, error)) != FA_OK ||
        (status = check_scalars(p, error)) != FA_OK) {
        return status;
    }
    if (is_empty(&p->q)) {
        plan->cause = FA_CAUSE_NO_OUTPUT;
        return FA_OK;
    }
    if (p->k.size[2] == 0) {
        plan->cause = FA_CAUSE_NO_KEYS;
        return FA_OK;
    }
    const fa_load load = choose_load(p, plan);
    for (size_t i = 0; i < FA_VARIANT_COUNT; i++) {
        const fa_variant *row = &fa_variants[i];
        if (row->pass == FA_FORWARD && row->dtype == p->q.dtype &&
            row->dim >= p->q.size[3] && row->level == FA_PLAIN &&
            row->load == load) {
            plan->variant = row;
            plan->grid[0] =
                (uint32_t)((p->q.size[2] + row->rows - 1) / row->rows);
            plan->grid[1] = (uint32_t)p->q.size[1];
            plan->grid[2] = (uint32_t)p->q.size[0];
            return FA_OK;
        }
    }
    *plan = (fa_plan){0};
    return fa_fail(error, FA_EUNSUPPORTED,
                   "q: expected a problem that a kernel serves, got none for "
                   "%s, head dim %lld, %s loads",
                   fa_dtype_name(p->q.dtype), (long long)p->q.size[3],
                   fa_load_name(load));
}

void fa_plan_why(const fa_plan *plan, char text[FA_WHY_CHARS])
{
    const char *load =
        plan->variant == NULL ? "" : fa_load_name(plan->variant->load);
    const char *tensor = plan->tensor == NULL ? "" : plan->tensor;
    const char *axis = plan->axis == NULL ? "" : plan->axis;
    const long long value = plan->value;
    switch (plan->cause) {
    case FA_CAUSE_WIDE:
        snprintf(text, FA_WHY_CHARS, "%s: every load is 16 bytes", load);
        break;
    case FA_CAUSE_DIM:
        snprintf(text, FA_WHY_CHARS,
                 "%s: head dim %lld is not a multiple of "
                 "8",
                 load, value);
        break;
    case FA_CAUSE_BASE:
        snprintf(text, FA_WHY_CHARS, "%s: %s base is not 16-byte aligned", load,
                 tensor);
        break;
    case FA_CAUSE_STRIDE:
        snprintf(text, FA_WHY_CHARS,
                 "%s: %s %s stride %lld is not a multiple of 8", load, tensor,
                 axis, value);
        break;
    case FA_CAUSE_ROW:
        snprintf(text, FA_WHY_CHARS, "%s: %s %s stride %lld is not below 2^24",
                 load, tensor, axis, value);
        break;
    case FA_CAUSE_NO_OUTPUT:
        snprintf(text, FA_WHY_CHARS, "empty: out has no elements");
        break;
    case FA_CAUSE_NO_KEYS:
        snprintf(text, FA_WHY_CHARS,
                 "empty: no keys, so out is 0 and lse "
                 "-inf");
        break;
    }
}
