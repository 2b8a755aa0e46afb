/* check.c: is this problem ours?
 *
 * All checks of a call are made here and, of its features, in
 * check_features.c, before anything is launched or
 * written, and they look at numbers only: no tensor is read, no device asked.
 * Whether data lies where its device can reach it is left to whoever made
 * the pointers.
 *
 * B batch, H query heads, Hk key heads, Sq and Sk lengths, D head dim of q
 * and k, Dv of v.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/plan.h"

#include <math.h>

enum { MAX_GRID = 65535 }; /* workgroups in y (heads) and z (batch) */

static fa_status check_size(const char *name, const fa_tensor *t, int dim,
                            int64_t expected, const char *whose,
                            fa_error *error)
{
    return t->size[dim] == expected
               ? FA_OK
               : fa_fail(error, FA_EINVAL,
                         "%s: expected size %lld in dimension %d (%s, as in "
                         "%s), got %lld",
                         name, (long long)expected, dim, fa_axes[dim], whose,
                         (long long)t->size[dim]);
}

/* The widest bucket that the rows have for these. */
static int64_t largest_dim(fa_pass pass, fa_dtype dtype)
{
    int64_t largest = 0;
    for (size_t i = 0; i < FA_VARIANT_COUNT; i++) {
        const fa_variant *row = &fa_variants[i];
        if (row->pass == pass && (row->reads >> dtype & 1) != 0 &&
            row->dim > largest) {
            largest = row->dim;
        }
    }
    return largest;
}

/* The last element's byte offset must fit int64.  Small strides cannot get
 * there (2^30 rows * 2^28 * 8 bytes, four times), and skip the slow
 * divisions. */
fa_status fa_check_strides(const char *name, const fa_tensor *t,
                           fa_error *error)
{
    int64_t room = INT64_MAX / 8;
    for (int d = 0; d < 4; d++) {
        const int64_t steps = t->size[d] - 1;
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

/* What holds for each tensor alone. */
static fa_status check_tensor(const char *name, const fa_tensor *t,
                              int64_t widest, fa_error *error)
{
    const int64_t limit[4] = {MAX_GRID, MAX_GRID, FA_LENGTH_MAX, widest};
    for (int d = 0; d < 4; d++) {
        if (t->size[d] < 0 || t->size[d] > limit[d]) {
            return fa_fail(error, t->size[d] < 0 ? FA_EINVAL : FA_EUNSUPPORTED,
                           "%s: expected a size of 0..%lld in dimension %d "
                           "(%s), got %lld",
                           name, (long long)limit[d], d, fa_axes[d],
                           (long long)t->size[d]);
        }
    }
    /* The strides of an empty tensor mean nothing. */
    return fa_tensor_is_empty(t) ? FA_OK : fa_check_strides(name, t, error);
}

fa_status fa_check_dtype(const char *name, const fa_tensor *t,
                         fa_dtype expected, const char *whose, fa_error *error)
{
    return t->dtype == expected
               ? FA_OK
               : fa_fail(error, FA_EINVAL,
                         "%s: expected dtype %s (as %s), got %s", name,
                         fa_dtype_name(expected), whose,
                         fa_dtype_name(t->dtype));
}

/* A tensor whose four sizes are decided: batch, heads and rows by `rows`, the
 * head dim by `dims`. */
static fa_status check_like(const char *name, const fa_tensor *t,
                            const fa_tensor *rows, const char *rows_name,
                            const fa_tensor *dims, const char *dims_name,
                            fa_error *error)
{
    fa_status status = FA_OK;
    for (int d = 0; d < 4 && status == FA_OK; d++) {
        status = check_size(name, t, d, (d < 3 ? rows : dims)->size[d],
                            d < 3 ? rows_name : dims_name, error);
    }
    return status;
}

/* Two elements of an output must never share memory: taken from the innermost
 * dimension outwards, each stride reaches past all that lies inside. */
fa_status fa_check_overlap(const char *name, const fa_tensor *t,
                           fa_error *error)
{
    for (int d = 0; d < 4 && !fa_tensor_is_empty(t); d++) {
        int64_t inside = 1;
        for (int e = 0; e < 4; e++) {
            if (e != d && t->size[e] != 1 &&
                (t->stride[e] < t->stride[d] ||
                 (t->stride[e] == t->stride[d] && e > d))) {
                inside += (t->size[e] - 1) * t->stride[e];
            }
        }
        if (t->size[d] != 1 && t->stride[d] < inside) {
            return fa_fail(error, FA_EINVAL,
                           "%s: expected elements that do not overlap, got "
                           "stride %lld in dimension %d, which spans %lld",
                           name, (long long)t->stride[d], d, (long long)inside);
        }
    }
    return FA_OK;
}

/* An input may be an expanded view, so its own existence proves nothing for
 * an output of its sizes.  Exact enough in floating point, and cannot
 * overflow. */
fa_status fa_check_elements(const char *name, const fa_tensor *rows,
                            int64_t head_dim, const char *output,
                            fa_error *error)
{
    const double count = (double)rows->size[0] * (double)rows->size[1] *
                         (double)rows->size[2] * (double)head_dim;
    return count < 0x1p59 ? FA_OK
                          : fa_fail(error, FA_EINVAL,
                                    "%s: expected fewer than 2^59 elements "
                                    "in %s, got %g",
                                    name, output, count);
}

static fa_status check_head_dim(const char *name, const fa_tensor *t,
                                int64_t widest, fa_error *error)
{
    return t->size[3] != 0
               ? FA_OK
               : fa_fail(error, FA_EUNSUPPORTED,
                         "%s: expected a head dim of 1..%lld, got 0", name,
                         (long long)widest);
}

static fa_status check_inputs(const fa_problem *p, int64_t widest,
                              fa_error *error)
{
    fa_status status = FA_OK;
    if ((status = fa_check_dtype("k", &p->k, p->q.dtype, "q", error)) !=
            FA_OK ||
        (status = fa_check_dtype("v", &p->v, p->q.dtype, "q", error)) !=
            FA_OK ||
        (status = check_tensor("q", &p->q, widest, error)) != FA_OK ||
        (status = check_tensor("k", &p->k, widest, error)) != FA_OK ||
        (status = check_tensor("v", &p->v, widest, error)) != FA_OK ||
        (status = check_size("k", &p->k, 0, p->q.size[0], "q", error)) !=
            FA_OK ||
        (status = check_size("k", &p->k, 3, p->q.size[3], "q", error)) !=
            FA_OK ||
        (status = check_size("v", &p->v, 0, p->q.size[0], "q", error)) !=
            FA_OK ||
        (status = check_size("v", &p->v, 1, p->k.size[1], "k", error)) !=
            FA_OK ||
        (status = check_size("v", &p->v, 2, p->k.size[2], "k", error)) !=
            FA_OK ||
        (status = check_head_dim("q", &p->q, widest, error)) != FA_OK ||
        (status = check_head_dim("v", &p->v, widest, error)) != FA_OK) {
        return status;
    }
    const int64_t heads = p->q.size[1];
    const int64_t key_heads = p->k.size[1];
    if (key_heads == 0 ? heads != 0 : heads % key_heads != 0) {
        return fa_fail(error, FA_EINVAL,
                       "k: expected a number of heads that divides the %lld "
                       "of q, got %lld",
                       (long long)heads, (long long)key_heads);
    }
    status = fa_check_elements("q", &p->q, p->v.size[3], "out", error);
    /* The workspace has a number for each row. */
    return status == FA_OK ? fa_check_elements("k", &p->k, 1, "a column", error)
                           : status;
}

static fa_status check_scalars(const fa_problem *p, fa_error *error)
{
    /* Kernels hold scale * log2(e) in single precision. */
    if (!(fabs(p->scale) < 0x1p127)) {
        return fa_fail(error, FA_EINVAL,
                       "scale: expected a finite number below 2^127, got %g",
                       p->scale);
    }
    if (p->causal < FA_CAUSAL_NONE || p->causal > FA_CAUSAL_NONE_TOP_LEFT) {
        return fa_fail(error, FA_EINVAL,
                       "causal: expected 0 (none), 1 (top-left), 2 "
                       "(bottom-right) or 3 (none, from the top left), got %d",
                       p->causal);
    }
    return FA_OK;
}

fa_status fa_check_residue(const fa_problem *p, fa_error *error)
{
    return (uintptr_t)p->out_lo % 16 == 0
               ? FA_OK
               : fa_fail(error, FA_EINVAL,
                         "out_lo: expected an address aligned to 16 bytes, "
                         "got %p",
                         p->out_lo);
}

/* All that forward and backward have in common. */
static fa_status check_problem(const fa_problem *p, int64_t widest,
                               bool backward, fa_error *error)
{
    fa_status status = FA_OK;
    if ((status = check_inputs(p, widest, error)) != FA_OK ||
        (status = fa_check_dtype("out", &p->out, p->q.dtype, "q", error)) !=
            FA_OK ||
        (status = check_tensor("out", &p->out, widest, error)) != FA_OK ||
        (status = check_like("out", &p->out, &p->q, "q", &p->v, "v", error)) !=
            FA_OK) {
        return status;
    }
    if ((status = check_scalars(p, error)) != FA_OK ||
        (status = fa_check_features(p, backward, error)) != FA_OK) {
        return status;
    }
    return fa_check_residue(p, error);
}

fa_status fa_check_forward(const fa_problem *p, fa_error *error)
{
    fa_status status =
        check_problem(p, largest_dim(FA_FORWARD, p->q.dtype), false, error);
    return status == FA_OK ? fa_check_overlap("out", &p->out, error) : status;
}

/* One gradient, of an input called like it without its first letter. */
static fa_status check_gradient(const char *name, const fa_tensor *t,
                                const fa_tensor *of, int64_t widest,
                                fa_error *error)
{
    fa_status status = FA_OK;
    const bool is_half = fa_dtype_is_half(of->dtype);
    if (t->dtype != of->dtype && !(is_half && t->dtype == FA_F32)) {
        return fa_fail(error, FA_EINVAL,
                       "%s: expected dtype %s%s (as %s), got %s", name,
                       fa_dtype_name(of->dtype), is_half ? " or float32" : "",
                       name + 1, fa_dtype_name(t->dtype));
    }
    if ((status = fa_check_elements(name + 1, of, of->size[3], name, error)) !=
            FA_OK ||
        (status = check_tensor(name, t, widest, error)) != FA_OK ||
        (status = check_like(name, t, of, name + 1, of, name + 1, error)) !=
            FA_OK) {
        return status;
    }
    return fa_check_overlap(name, t, error);
}

static fa_status check_gradients(const fa_problem *p, const fa_gradients *g,
                                 int64_t widest, fa_error *error)
{
    const struct {
        const char *name;
        const fa_tensor *tensor;
        const fa_tensor *of;
        uint32_t bit;
    } all[] = {{"dq", &g->dq, &p->q, FA_WANT_DQ},
               {"dk", &g->dk, &p->k, FA_WANT_DK},
               {"dv", &g->dv, &p->v, FA_WANT_DV}};
    const char *first = NULL;
    fa_dtype dtype = p->q.dtype;
    if (g->wanted >= 2 * FA_WANT_DSINK) {
        return fa_fail(error, FA_EINVAL,
                       "wanted: expected a set of 1 (dq), 2 (dk), 4 (dv), 8 "
                       "(dbias) and 16 (dsink), got %lld",
                       (long long)g->wanted);
    }
    for (int i = 0; i < 3; i++) {
        if ((g->wanted & all[i].bit) == 0) {
            continue;
        }
        fa_status status = check_gradient(all[i].name, all[i].tensor, all[i].of,
                                          widest, error);
        if (status == FA_OK && first != NULL) {
            status =
                fa_check_dtype(all[i].name, all[i].tensor, dtype, first, error);
        }
        if (status != FA_OK) {
            return status;
        }
        first = all[i].name;
        dtype = all[i].tensor->dtype;
    }
    return fa_check_feature_gradients(p, g, error);
}

fa_status fa_check_backward(const fa_problem *p, const fa_gradients *g,
                            fa_error *error)
{
    const int64_t widest = largest_dim(FA_BACKWARD_Q, p->q.dtype);
    const fa_dtype sums = fa_dtype_of_sums(p->q.dtype);
    fa_tensor rows = p->q; /* of lse and dlse */
    fa_status status = FA_OK;
    rows.size[3] = 1;
    if ((status = check_problem(p, widest, true, error)) != FA_OK ||
        (status = fa_check_dtype("dout", &g->dout, p->q.dtype, "q", error)) !=
            FA_OK ||
        (status = check_tensor("dout", &g->dout, widest, error)) != FA_OK ||
        (status = check_like("dout", &g->dout, &p->q, "q", &p->v, "v",
                             error)) != FA_OK) {
        return status;
    }
    if (g->dlse.data != NULL &&
        ((status = fa_check_dtype("dlse", &g->dlse, sums, "lse", error)) !=
             FA_OK ||
         (status = check_tensor("dlse", &g->dlse, 1, error)) != FA_OK ||
         (status = check_like("dlse", &g->dlse, &rows, "q", &rows, "q",
                              error)) != FA_OK)) {
        return status;
    }
    return check_gradients(p, g, widest, error);
}
