/* layout.c: how outputs lie in memory: as PyTorch would lay them out, and the
 * residue in an array of its own.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/plan.h"

const char *const fa_axes[4] = {"batch", "head", "row", "head dim"};

bool fa_tensor_is_empty(const fa_tensor *t)
{
    return t->size[0] == 0 || t->size[1] == 0 || t->size[2] == 0 ||
           t->size[3] == 0;
}

/* PyTorch's order of dimensions: the longer stride lies outside, for equal
 * strides the larger size; a stride of 0 decides nothing.  Returns 1 if `a`
 * lies outside `b`, -1 for the reverse, 0 if it is not decided. */
static int compare_dims(const int64_t size[4], const int64_t stride[4], int a,
                        int b)
{
    if (stride[a] == 0 || stride[b] == 0) {
        return 0;
    }
    if (stride[a] != stride[b]) {
        return stride[a] > stride[b] ? 1 : -1;
    }
    return size[a] > size[b] ? 1 : 0;
}

/* Sizes of tensors that do not exist may overflow; a plan refuses them later,
 * but the product must be defined until then. */
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

/* Dense strides for the sizes of *out, its dimensions in the order of `like`;
 * of the innermost ones, `fixed` keep their places from the head dim on. */
static void lay_out_like(const fa_tensor *like, int fixed, fa_tensor *out)
{
    /* Insertion sort, innermost first.  A comparison that decides nothing
     * is skipped over, as in PyTorch, so the result is PyTorch's too. */
    int order[4] = {3, 2, 1, 0};
    for (int i = fixed + 1; i < 4; i++) {
        int moving = i;
        for (int at = i - 1; at >= fixed; at--) {
            const int decided =
                compare_dims(out->size, like->stride, order[at], order[moving]);
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
        if (out->size[order[i]] > 1) {
            stride = multiply(stride, out->size[order[i]]);
        }
    }
}

void fa_tensor_like(const fa_tensor *like, int64_t head_dim, fa_tensor *out)
{
    const bool same = head_dim == like->size[3];
    *out = *like;
    out->data = NULL;
    out->size[3] = head_dim;
    if (same && !fa_tensor_is_empty(like) && is_dense(like)) {
        return;
    }
    if (same || like->stride[3] != 1) {
        lay_out_like(like, 0, out);
    }
    /* Not where rows overlap and PyTorch would put a shorter one inside. */
    if (like->stride[3] == 1 && !(same && out->stride[3] == 1)) {
        lay_out_like(like, 1, out);
    }
}

void fa_gradients_like(const fa_problem *p, bool in_float, fa_gradients *g)
{
    fa_tensor_like(&p->q, p->q.size[3], &g->dq);
    fa_tensor_like(&p->k, p->k.size[3], &g->dk);
    fa_tensor_like(&p->v, p->v.size[3], &g->dv);
    if (in_float && fa_dtype_is_half(p->q.dtype)) {
        g->dq.dtype = g->dk.dtype = g->dv.dtype = FA_F32;
    }
    const fa_tensor *bias = &p->features.bias;
    g->dbias = fa_tensor_of_rows(NULL, bias->dtype, bias, bias->size[2],
                                 bias->size[3]);
    g->dsink = fa_tensor_of_rows(NULL, fa_dtype_of_sums(p->q.dtype), &p->q,
                                 p->q.size[2], 1);
}

fa_tensor fa_tensor_of_rows(void *data, fa_dtype dtype, const fa_tensor *like,
                            int64_t rows, int64_t width)
{
    const int64_t heads = like->size[1];
    const int64_t head = multiply(rows, width);
    return (fa_tensor){.data = data,
                       .dtype = dtype,
                       .size = {like->size[0], heads, rows, width},
                       .stride = {multiply(heads, head), head, width, 1}};
}

/* -- the residue ----------------------------------------------------------- */

static int64_t query_rows(const fa_problem *p)
{
    return p->q.size[0] * p->q.size[1] * p->q.size[2];
}

/* Where the second part begins, in floats. */
static int64_t out_lo_at(const fa_problem *p)
{
    return (query_rows(p) + 3) / 4 * 4;
}

int64_t fa_residue_floats(const fa_problem *p)
{
    const int64_t elements = query_rows(p) * p->v.size[3];
    return p->q.dtype == FA_F64           ? 0
           : fa_dtype_is_half(p->q.dtype) ? out_lo_at(p) + (elements + 1) / 2
                                          : query_rows(p);
}

void fa_residue_parts(const fa_problem *p, fa_tensor *lse_lo, fa_tensor *out_lo)
{
    float *const residue = p->q.dtype == FA_F64 ? NULL : p->out_lo;
    const bool second = residue != NULL && fa_dtype_is_half(p->q.dtype);
    const int64_t rows = p->q.size[2];
    *lse_lo = fa_tensor_of_rows(residue, FA_F32, &p->q, rows, 1);
    *out_lo = fa_tensor_of_rows(second ? residue + out_lo_at(p) : NULL,
                                p->q.dtype, &p->q, rows, p->v.size[3]);
}
