/* problem.h: what forward and backward share about the problem: which keys a
 * row sees, where its tensors are, numbers that belong to rows.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_PROBLEM_H
#define FA_KERNELS_PROBLEM_H

#include "product.h"

/* -- visibility ------------------------------------------------------------ */

/* The last key that a row sees; rows past the end repeat the last one. */
static FA_DEVICE int fa_last_key(fa_args_in a, int row)
{
    return fa_min_int(fa_min_int(row, a->seqlen_q - 1) + a->diagonal,
                      a->seqlen_k - 1);
}

/* Key tiles that rows first .. first + rows - 1 need. */
static FA_DEVICE int fa_tiles(fa_args_in a, int first, int rows)
{
    int key = fa_last_key(a, first + rows - 1);

    return first < a->seqlen_q && key >= 0 ? key / FA_WALK + 1 : 0;
}

/* Key tiles that each of these rows sees to the end of the keys. */
static FA_DEVICE int fa_common_tiles(fa_args_in a, int first, int rows)
{
    int key = first + a->diagonal;

    return key < 0                  ? 0
           : key >= a->seqlen_k - 1 ? fa_tiles(a, first, rows)
                                    : (key + 1) / FA_WALK;
}

/* Scores of keys that a row does not see become -inf; rows owned, keys
 * walked. */
template <int KIND, int OWN>
static FA_DEVICE void fa_mask_keys(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                   fa_args_in a, int first, int key,
                                   uint32_t tid)
{
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int last = fa_last_key(a, first + fa_own_row(OWN, tid, i));
        int own = last - key - (int)(tid & 7);
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            s[i][j] = 8 * j <= own ? s[i][j] : -FA_INFINITY;
        }
    }
}

/* |scale| * log2(e), in the numbers of the kernel. */
template <int KIND> static FA_DEVICE FA_NUMBER(KIND) fa_scale_log2(fa_args_in a)
{
    const double log2_e = 1.4426950408889634;

    return KIND == FA_F64 ? __builtin_fabs(a->scale) * log2_e
                          : (double)a->scale_log2;
}

/* Sign bits of Q that a negative scale flips. */
template <int KIND> static FA_DEVICE uint32_t fa_flip(fa_args_in a)
{
    bool negative = (fa_bits<u32x2>(a->scale).y & 0x80000000) != 0;

    return !negative ? 0 : FA_IS_HALF(KIND) ? 0x80008000 : 0x80000000;
}

/* Tensor `which` (FA_Q_AT and so on) of one batch and head; `place` is
 * batch << 16 | head of that tensor. */
template <int KIND>
static FA_DEVICE fa_matrix fa_matrix_at(fa_args_in a, int which, uint32_t place)
{
    uint32_t at = fa_uniform(place);
    bool query = which == FA_Q_AT || which == FA_DOUT_AT;

    return fa_matrix_of<KIND>(
        a, which, (int)(at >> 16), (int)(at & 0xffff),
        query ? a->heads : a->heads_k, query ? a->seqlen_q : a->seqlen_k,
        which == FA_Q_AT || which == FA_K_AT ? a->head_dim : a->head_dim_v);
}

/* The power of two that undoes a row's scale; 1 without scales. */
template <int KIND>
static FA_DEVICE float fa_undo_scale(fa_args_in a, int which, uint32_t place,
                                     int row)
{
    if constexpr (KIND == FA_BF16) {
        fa_matrix x = fa_matrix_at<KIND>(a, which, place);
        return fa_inverse_power(fa_row_scale_of<KIND>(&x, row));
    }
    return 1.0f;
}

/* Numbers of the 64 walked rows, in arrays one after the other; the 8 of one
 * lane are neighbours.  They lie where shares will: all waves have read them
 * when the first share is written, because columns are staged in between. */
template <int KIND>
static FA_DEVICE void fa_put_walked(fa_lds area, int array, FA_NUMBER(KIND) x,
                                    uint32_t tid)
{
    uint32_t row = tid & (FA_WALK - 1);
    ((FA_LDS FA_NUMBER(
        KIND) *)area)[array * FA_WALK + (row & 7) * 8 + (row >> 3)] = x;
}

template <int KIND>
static FA_DEVICE void fa_get_walked(FA_NUMBER(KIND) x[FA_WALKED], fa_lds area,
                                    int array, uint32_t tid)
{
#pragma unroll
    for (int j = 0; j < FA_WALKED; j++) {
        x[j] = ((
            FA_LDS FA_NUMBER(KIND) *)area)[array * FA_WALK + (tid & 7) * 8 + j];
    }
}

#endif
