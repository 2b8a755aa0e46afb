/* plane.h: bias and mask of a tile of scores.
 *
 * They are read element by element, each lane what it needs, at 32-bit offsets
 * from the corner of the tile; rows and keys past the end read the last one.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_PLANE_H
#define FA_KERNELS_PLANE_H

#include "problem.h"

/* No bias takes more from a score than this, in natural logarithm, unless it is
 * -inf: where keys of a row are all "masked" by a huge number their weights are
 * equal, and LSE is still a number that fp32 and its residue can hold. */
#define FA_LOWEST_BIAS (-0x1p30f)

/* FA_EXACT32: beside one below this fp32 would keep nothing of a score.  What
 * is "masked" that way is to be what it is in programs of fp32. */
#define FA_HIDING_BIAS (-0x1p28f)

/* A tile of a (Sq, Sk) matrix. */
typedef struct fa_plane {
    fa_global_in base; /* of its corner */
    uint32_t own;      /* strides in bytes */
    uint32_t walked;
    int last_own; /* the last row that exists, from the corner */
    int last_walked;
} fa_plane;

template <int PASS>
static FA_DEVICE fa_plane fa_plane_of(fa_args_in a, int view, int bytes,
                                      uint32_t place, int first, int walked)
{
    enum { KV = PASS == FA_BACKWARD_KV };
    const FA_CONSTANT fa_view *from = fa_view_at(a, view);
    uint32_t at = fa_uniform(place);
    int64_t own = from->stride[KV ? 3 : 2];
    int64_t other = from->stride[KV ? 2 : 3];
    fa_plane x;

    x.base =
        (fa_global_in)from->data + ((int64_t)(at >> 16) * from->stride[0] +
                                    (int64_t)(at & 0xffff) * from->stride[1] +
                                    first * own + walked * other) *
                                       bytes;
    x.own = (uint32_t)own * (uint32_t)bytes;
    x.walked = (uint32_t)other * (uint32_t)bytes;
    x.last_own = (KV ? a->seqlen_k : a->seqlen_q) - 1 - first;
    x.last_walked = (KV ? a->seqlen_q : a->seqlen_k) - 1 - walked;
    return x;
}

/* row * stride; strides are below 2^24 and the product fits. */
static FA_DEVICE uint32_t fa_offset(int row, int last, uint32_t stride)
{
    return ((uint32_t)fa_min_int(row, last) & 0xff) * (stride & 0xffffff);
}

/* Where the elements of a lane lie, in bytes from the corner: those of owned
 * row i at own[i] + walked[j].  DENSE: walked rows are neighbours, and all
 * of either exist. */
template <int OWN> struct fa_offsets {
    uint32_t own[OWN];
    uint32_t walked[FA_WALKED];
};

template <int OWN, int BYTES, bool DENSE>
static FA_DEVICE fa_offsets<OWN> fa_offsets_of(const fa_plane *x, uint32_t tid)
{
    fa_offsets<OWN> y;

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        y.own[i] =
            DENSE ? (uint32_t)fa_own_row(OWN, tid, 0) * (x->own & 0xffffff) +
                        (tid & 7) * BYTES + 4 * i * x->own
                  : fa_offset(fa_own_row(OWN, tid, i), x->last_own, x->own);
    }
#pragma unroll
    for (int j = 0; j < FA_WALKED; j++) {
        y.walked[j] = DENSE ? (uint32_t)(8 * j * BYTES)
                            : fa_offset((int)(tid & 7) + 8 * j, x->last_walked,
                                        x->walked);
    }
    return y;
}

template <int OWN, int BYTES>
static FA_DEVICE bool fa_is_dense(const fa_plane *x)
{
    return x->walked == BYTES && x->last_walked >= FA_WALK - 1 &&
           x->last_own >= 32 * OWN - 1;
}

template <bool DENSE>
static FA_DEVICE fa_global_in fa_element_at(const fa_plane *x, uint32_t own,
                                            uint32_t walked)
{
    /* The constant of a dense tile becomes part of the instruction. */
    return DENSE ? x->base + own + walked : x->base + (own + walked);
}

/* One element of type STORED. */
template <int KIND, int STORED>
static FA_DEVICE FA_NUMBER(KIND) fa_bias_at(fa_global_in at)
{
    if constexpr (STORED == FA_F16) {
        return (FA_NUMBER(KIND))fa_half_to_float(
            *(const FA_GLOBAL uint16_t *)at);
    } else if constexpr (STORED == FA_F64) {
        return *(const FA_GLOBAL double *)at;
    } else if constexpr (STORED == FA_F32) {
        return *(const FA_GLOBAL float *)at;
    } else {
        return fa_bf16_to_float(*(const FA_GLOBAL uint16_t *)at);
    }
}

template <typename Number> static FA_DEVICE Number fa_bounded_bias(Number x)
{
    bool lower = x < (Number)FA_LOWEST_BIAS && x > (Number)-FA_INFINITY;
    return lower ? (Number)FA_LOWEST_BIAS : x;
}

/* Bounds the biases of a lane, if some of the wave's is to be, which is nearly
 * never.  Not by the highest of a row, beside which such a one would weigh
 * nothing: that key may be hidden by another feature.  As integers the bits of
 * negative numbers ascend with size, above all others. */
template <int OWN>
static FA_DEVICE void fa_bound_biases(float x[OWN][FA_WALKED])
{
    uint32_t lowest = 0;

#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            uint32_t one = fa_bits<uint32_t>(x[i][j]);
            lowest = one > lowest ? one : lowest;
        }
    }
    if (fa_any(lowest > fa_bits<uint32_t>(FA_LOWEST_BIAS))) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            fa_keep_order(); /* comparisons take two scalar registers each */
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                x[i][j] = fa_bounded_bias(x[i][j]);
            }
        }
    }
}

template <int KIND, int OWN, int STORED, bool DENSE>
static FA_DEVICE void fa_add_stored(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                    const FA_NUMBER(KIND) per_unit[OWN],
                                    const fa_plane *x, uint32_t tid)
{
    enum {
        BYTES = STORED == FA_F64 ? 8
        : STORED == FA_F32       ? 4
                                 : 2,
        BOUNDED = STORED != FA_F16, /* -65504 is not much */
        AT_ONCE = BOUNDED && DENSE && FA_IS_HALF(KIND)
    };
    fa_offsets<OWN> at = fa_offsets_of<OWN, BYTES, DENSE>(x, tid);

    if constexpr (AT_ONCE) {
        float got[OWN][FA_WALKED];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                got[i][j] = fa_bias_at<KIND, STORED>(
                    fa_element_at<DENSE>(x, at.own[i], at.walked[j]));
            }
        }
        fa_bound_biases<OWN>(got);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                s[i][j] = fa_fma(got[i][j], per_unit[i], s[i][j]);
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (FA_IS_DOUBLE(KIND)) {
            fa_keep_order(); /* comparisons take two scalar registers each */
        }
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            FA_NUMBER(KIND)
            one = fa_bias_at<KIND, STORED>(
                fa_element_at<DENSE>(x, at.own[i], at.walked[j]));
            one = BOUNDED ? fa_bounded_bias(one) : one;
            s[i][j] = fa_fma(one, per_unit[i], s[i][j]);
            if constexpr (KIND == FA_EXACT32) {
                bool hides = one < (FA_NUMBER(KIND))FA_HIDING_BIAS;
                s[i][j] = hides ? (double)(float)s[i][j] : s[i][j];
            }
        }
    }
}

template <int KIND, int OWN, int PASS, int STORED>
static FA_DEVICE void fa_add_bias_of(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                     const FA_NUMBER(KIND) per_unit[OWN],
                                     fa_args_in a, uint32_t place, int first,
                                     int walked, uint32_t tid)
{
    enum { BYTES = STORED == FA_F64 ? 8 : STORED == FA_F32 ? 4 : 2 };
    fa_plane x =
        fa_plane_of<PASS>(a, FA_VIEW(bias), BYTES, place, first, walked);

    bool dense = false;

    if constexpr (PASS == FA_FORWARD && FA_IS_HALF(KIND)) {
        dense = fa_is_dense<OWN, BYTES>(&x);
        if (fa_uniform(fa_opaque((uint32_t)dense)) != 0) {
            fa_add_stored<KIND, OWN, STORED, true>(s, per_unit, &x, tid);
        }
    }
    if (!dense) {
        fa_add_stored<KIND, OWN, STORED, false>(s, per_unit, &x, tid);
    }
}

template <int KIND, int OWN, int PASS>
static FA_DEVICE void fa_add_bias(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                  const FA_NUMBER(KIND) per_unit[OWN],
                                  fa_args_in a, uint32_t place, int first,
                                  int walked, uint32_t tid)
{
    enum { HALVES = FA_ELEMENT(KIND) == 2 }; /* in memory */

    /* No `else`: see fa_mask. */
    if constexpr (KIND == FA_F64) {
        fa_add_bias_of<KIND, OWN, PASS, FA_F64>(s, per_unit, a, place, first,
                                                walked, tid);
    } else if (!HALVES || a->stored_bias == FA_F32) {
        fa_add_bias_of<KIND, OWN, PASS, FA_F32>(s, per_unit, a, place, first,
                                                walked, tid);
    }
    if constexpr (HALVES) {
        int stored = fa_again(a)->stored_bias;
        if (KIND != FA_F16 && stored == FA_BF16) {
            fa_add_bias_of<KIND, OWN, PASS, FA_BF16>(s, per_unit, a, place,
                                                     first, walked, tid);
        }
        if (KIND != FA_BF16 && fa_again(a)->stored_bias == FA_F16) {
            fa_add_bias_of<KIND, OWN, PASS, FA_F16>(s, per_unit, a, place,
                                                    first, walked, tid);
        }
    }
}

template <int KIND, int OWN, bool DENSE>
static FA_DEVICE void fa_mask_plane(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                    const fa_plane *x, uint32_t tid)
{
    fa_offsets<OWN> at = fa_offsets_of<OWN, 1, DENSE>(x, tid);
    uint32_t seen[OWN][FA_WALKED];

#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            seen[i][j] = *(const FA_GLOBAL uint8_t *)fa_element_at<DENSE>(
                x, at.own[i], at.walked[j]);
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        fa_keep_order(); /* comparisons take two scalar registers each */
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            s[i][j] =
                seen[i][j] != 0 ? s[i][j] : (FA_NUMBER(KIND)) - FA_INFINITY;
        }
    }
}

template <int KIND, int OWN, int PASS>
static FA_DEVICE void fa_mask(FA_NUMBER(KIND) s[OWN][FA_WALKED], fa_args_in a,
                              uint32_t place, int first, int walked,
                              uint32_t tid)
{
    fa_plane x = fa_plane_of<PASS>(a, FA_VIEW(mask), 1, place, first, walked);

    bool dense = false;

    if constexpr (PASS == FA_FORWARD && FA_IS_HALF(KIND)) {
        /* Two branches change scores in place; of one with `else` the compiler
         * makes a join to which each end moves them all. */
        dense = fa_is_dense<OWN, 1>(&x);
        if (fa_uniform(fa_opaque((uint32_t)dense)) != 0) {
            fa_mask_plane<KIND, OWN, true>(s, &x, tid);
        }
    }
    if (!dense) {
        fa_mask_plane<KIND, OWN, false>(s, &x, tid);
    }
}

#endif
