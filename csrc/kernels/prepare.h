/* prepare: what the other passes need to know of whole rows, in one look at
 * the tensors that args->prepare names.
 *
 *   delta[i] = sum_d dO[i][d] (O[i][d] + O_lo[i][d]) - dLSE[i]
 *   block_of[x] = largest norm and range of exponents of 64 rows of x
 *   scale_of[x] = the power of two that brings a bf16 row into fp16's range
 *
 * Shapes  as in args.h.  x of q, k, v, dout.
 * Types   Number is float, or double for fp64 tensors, which need delta only.
 * Grid    x = 4 * prepare_blocks, tensor after tensor; y = H; z = B.
 *         Workgroups without rows leave at once.
 * Lanes   8 lanes share a row, 32 rows at a time; lane c has channels c + 8n,
 *         so any stride will do.
 * Order   fixed, no atomics: repeats bit for bit.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_PREPARE_H
#define FA_KERNELS_PREPARE_H

#include "fit.h"

/* An element of any type. */
template <typename Number>
static FA_DEVICE Number fa_any_element(fa_global_in row, int64_t channel,
                                       int stored)
{
    fa_global_in at = row + channel * fa_bytes_of(stored);

    if constexpr (sizeof(Number) == 8) {
        return *(const FA_GLOBAL double *)at;
    } else {
        return stored == FA_F32
                   ? *(const FA_GLOBAL float *)at
                   : fa_unpack_as(stored, *(const FA_GLOBAL uint16_t *)at);
    }
}

/* What a lane, then a row, then a block knows. */
typedef struct fa_extent {
    float norm;
    int largest;  /* biased exponent of a finite element, as bf16 has it */
    int smallest; /* 255 - the smallest of one that is not 0 */
} fa_extent;

static FA_DEVICE void fa_extend(fa_extent *e, float x)
{
    uint32_t bits = fa_bits<uint32_t>(x);
    int exponent = (int)(bits >> 23 & 255);
    bool finite = exponent != 255;

    e->norm = fa_fma(x, x, e->norm);
    e->largest = finite ? fa_max_int(e->largest, exponent) : e->largest;
    e->smallest = finite && (bits & 0x7fffffff) != 0
                      ? fa_max_int(e->smallest, 255 - exponent)
                      : e->smallest;
}

/* Over the 8 lanes of a row.  Exponents are exact as floats. */
static FA_DEVICE void fa_share_extent(fa_extent *e)
{
    e->norm = fa_sum8(e->norm);
    e->largest = (int)fa_max8((float)e->largest);
    e->smallest = (int)fa_max8((float)e->smallest);
}

/* 2^14..2^15 for the largest element of a row. */
static FA_DEVICE float fa_row_scale(int largest)
{
    return fa_power_of_2(fa_min_int(127 + 14 - largest, 126));
}

template <typename Number>
static FA_DEVICE void fa_prepare(fa_args_in a, fa_lds lds)
{
    enum { IS_DOUBLE = sizeof(Number) == 8 };
    uint32_t tid = fa_thread();
    int which = (int)(fa_group_x() / a->prepare_blocks);
    int block = (int)(fa_group_x() % a->prepare_blocks);
    int head = (int)fa_group_y();
    int batch = (int)fa_group_z();
    bool is_query = which == FA_Q_AT || which == FA_DOUT_AT;
    int heads = is_query ? a->heads : a->heads_k;
    int rows = is_query ? a->seqlen_q : a->seqlen_k;
    int channels = which == FA_Q_AT || which == FA_K_AT ? a->head_dim : a->head_dim_v;
    int stored = IS_DOUBLE ? (int)FA_F64 : a->stored;

    if ((a->prepare >> which & 1) == 0 || head >= heads ||
        block * FA_BLOCK_ROWS >= rows) {
        return;
    }
    /* (clang 22 takes a chain of conditions for four pointers wrong here.) */
    const FA_CONSTANT fa_view *view = fa_view_at(a, fa_view_offset(which));
    int bytes = fa_bytes_of(stored);
    fa_global_in base =
        (fa_global_in)view->data +
        (batch * view->stride[0] + head * view->stride[1]) * bytes;
    int64_t start = ((int64_t)batch * heads + head) * rows;
    fa_extent whole = {0.0f, 0, 0};
    bool wide = false;

    for (int n = 0; n < FA_BLOCK_ROWS; n += 32) {
        int row = block * FA_BLOCK_ROWS + n + (int)(tid >> 3);
        bool valid = row < rows;
        int64_t r = fa_min_int(row, rows - 1);
        fa_global_in from = base + r * view->stride[2] * bytes;
        fa_extent one = {0.0f, 0, 0};
        Number delta = 0;

        for (int d = (int)(tid & 7); d < channels; d += 8) {
            Number x = fa_any_element<Number>(from, d * view->stride[3], stored);
            if (!IS_DOUBLE) {
                fa_extend(&one, (float)x);
            }
            if (which == FA_DOUT_AT) {
                int64_t at = batch * a->out.stride[0] +
                             head * a->out.stride[1] + r * a->out.stride[2] +
                             d * a->out.stride[3];
                Number o = fa_any_element<Number>((fa_global_in)a->out.data, at,
                                                  stored);
                if (a->out_lo != nullptr && bytes == 2) {
                    o += fa_any_element<Number>((fa_global_in)a->out_lo, at,
                                                stored);
                }
                delta = fa_fma(x, o, delta);
            }
        }
        fa_share_extent(&one);
        delta = fa_sum8(delta);
        if (which == FA_DOUT_AT && valid && (tid & 7) == 0) {
            if (a->dlse.data != nullptr) {
                delta -= ((const FA_GLOBAL Number *)
                              a->dlse.data)[batch * a->dlse.stride[0] +
                                            head * a->dlse.stride[1] +
                                            r * a->dlse.stride[2]];
            }
            ((FA_GLOBAL Number *)a->delta)[start + r] = delta;
        }
        if (valid && a->scale_of[which] != nullptr && (tid & 7) == 0) {
            ((FA_GLOBAL float *)a->scale_of[which])[start + r] =
                fa_row_scale(one.largest);
        }
        /* Rows with NaN or Inf bound nobody: they are not finite anyway. */
        bool counts = valid && one.norm < FA_INFINITY;
        whole.norm = counts ? fa_max(whole.norm, one.norm) : whole.norm;
        wide |= valid && one.largest - (255 - one.smallest) > FA_FIT_BINADES;
        whole.largest = valid ? fa_max_int(whole.largest, one.largest)
                              : whole.largest;
        whole.smallest = valid ? fa_max_int(whole.smallest, one.smallest)
                               : whole.smallest;
    }
    if (IS_DOUBLE || a->block_of[which] == nullptr) {
        return;
    }
    whole.norm = fa_group_max(whole.norm, lds, tid);
    whole.largest = (int)fa_group_max((float)whole.largest, lds, tid);
    whole.smallest = (int)fa_group_max((float)whole.smallest, lds, tid);
    float wide_row = fa_group_max(wide ? 1.0f : 0.0f, lds, tid);
    if (tid == 0) {
        int64_t blocks = (rows + FA_BLOCK_ROWS - 1) / FA_BLOCK_ROWS;
        FA_GLOBAL fa_block *to =
            (FA_GLOBAL fa_block *)a->block_of[which] +
            ((int64_t)batch * heads + head) * blocks + block;
        to->norm = whole.norm;
        to->exponents = (uint32_t)whole.largest |
                        (uint32_t)whole.smallest << 8 |
                        (wide_row > 0.0f ? 1u << 16 : 0);
    }
}

#endif
