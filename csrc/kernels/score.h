/* score.h: from products of queries and keys to the scores that softmax sees,
 * in the kernels of FA_FULL.
 *
 *   x = |scale| q.k         (the sign of scale is in q)
 *   x = c tanh(x / c)       softcap
 *   x -= slope * |distance| ALiBi
 *   x += bias
 *   x = -inf                where the mask is 0
 *
 * all in the units of FA_SHIFT.  What the mask hides cannot reach a row, NaN or
 * not; a bias of -inf is added, as PyTorch does, so that a NaN score stays one.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_SCORE_H
#define FA_KERNELS_SCORE_H

#include "philox.h"
#include "plane.h"

/* Whether a pass for dQ that is to make row sums (fa_args.row_sums) makes those
 * alone: softcap's slope has no part in it then.  It forms dS K all the same,
 * whose operands are on their way when dS is known. */
#define FA_SUMS_ROWS(KIND, PASS) \
    ((KIND) == FA_EXACT32 && (PASS) == FA_BACKWARD_Q)

/* -- softcap --------------------------------------------------------------- */

/* A capped score, and its derivative by what it was. */
template <typename Number> struct fa_capped {
    Number score;
    Number slope;
};

/* tanh for fp32 and fp64, where an error of 1e-7 c would count: from
 * 2^y - 1 = 2^n (2^f - 1) + (2^n - 1), y = 2 |x| log2(e). */
template <typename Number> static FA_DEVICE fa_capped<Number> fa_tanh(Number y)
{
    const double c[11] = {
        0x1.62e42fefa39efp-1,  0x1.ebfbdff82c5adp-3,  0x1.c6b08d7049fd1p-5,
        0x1.3b2ab6fb9f413p-7,  0x1.5d87fe78cf26dp-10, 0x1.43091310bf6b0p-13,
        0x1.ffcbfba7b89b6p-17, 0x1.62bfc3c1c8a7cp-20, 0x1.b526788b3b73dp-24,
        0x1.e620fb765be15p-28, 0x1.e7aa0f6005d3cp-32};
    enum { TERMS = sizeof(Number) == 8 ? 11 : 7 };
    const Number most = 60;
    Number size = fa_abs(y);
    Number bounded = size > most ? most : size; /* NaN stays */
    Number n = fa_round(bounded);
    Number f = bounded - n;
    Number sum = (Number)c[TERMS - 1];

#pragma unroll
    for (int i = TERMS - 2; i >= 0; i--) {
        Number next = fa_fixed_behind((Number)c[i], &sum);
        sum = fa_fma(sum, f, next);
    }
    Number power = fa_exp2(n);
    Number less_one = fa_fma(power, sum * f, power - 1);
    Number inverse = (Number)1 / (less_one + 2);
    /* Above 1/2 what is subtracted has the smaller error. */
    Number t = less_one > 2 ? fa_fma((Number)-2, inverse, (Number)1)
                            : less_one * inverse;
    fa_capped<Number> made;

    made.score = y < 0 ? -t : t;
    made.slope = 4 * inverse * (1 - inverse);
    return made;
}

template <int KIND>
static FA_DEVICE fa_capped<FA_NUMBER(KIND)>
fa_cap(FA_NUMBER(KIND) x, FA_NUMBER(KIND) factor, FA_NUMBER(KIND) cap)
{
    fa_capped<FA_NUMBER(KIND)> made;

    if constexpr (FA_IS_HALF(KIND)) {
        float inverse = fa_reciprocal(1.0f + fa_exp2(x * factor));
        made.score = fa_fma(-2.0f * cap, inverse, cap);
        made.slope = 4.0f * inverse * (1.0f - inverse);
    } else {
        made = fa_tanh<FA_NUMBER(KIND)>(x * factor);
        made.score *= cap;
    }
    return made;
}

/* -- distances ------------------------------------------------------------- */

/* The key at distance 0 from a query. */
static FA_DEVICE int fa_own_key(fa_args_in a, int query)
{
    int r = fa_min_int(query, a->seqlen_q - 1);
    return r + (a->span_q != nullptr
                    ? ((const FA_GLOBAL fa_span_of_row *)a->span_q)[r].diagonal
                    : a->alibi_diagonal);
}

template <int KIND, int OWN, int PASS>
static FA_DEVICE void fa_add_alibi(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                   const FA_NUMBER(KIND) per_unit[OWN],
                                   fa_args_in a, uint32_t place, int first,
                                   int walked, uint32_t tid)
{
    typedef FA_NUMBER(KIND) number;
    typedef FA_OUTER(KIND) outer;
    enum { KV = PASS == FA_BACKWARD_KV };
    uint32_t at = fa_uniform(place);
    const FA_GLOBAL outer *slopes = (const FA_GLOBAL outer *)a->alibi;
    number slope = slopes[(int64_t)(at >> 16) * a->alibi_batch + (at & 0xffff)];
    number walks[FA_WALKED];

#pragma unroll
    for (int j = 0; j < FA_WALKED; j++) {
        int row = (int)(tid & 7) + 8 * j;
        walks[j] = (number)(KV ? fa_own_key(a, walked + row) - walked : row);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = first + fa_own_row(OWN, tid, i);
        number own = (number)((KV ? row : fa_own_key(a, row)) - walked);
        number less = -slope * per_unit[i];
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            s[i][j] = fa_fma(fa_abs(own - walks[j]), less, s[i][j]);
        }
    }
}

/* -- all of it ------------------------------------------------------------- */

/* s becomes what softmax sees.  unit: what makes base 2 of scores, per_unit
 * what a score of 1 is in their units, of each owned row.  In the passes for
 * dQ, dK and dV `turned` is multiplied by softcap's derivative.  `place` is of
 * the queries. */
template <int KIND, int OWN, int PASS>
static FA_DEVICE void fa_make_scores(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                     FA_NUMBER(KIND) turned[OWN][FA_WALKED],
                                     const FA_NUMBER(KIND) unit[OWN],
                                     const FA_NUMBER(KIND) per_unit[OWN],
                                     fa_args_in a, uint32_t place, int first,
                                     int walked, uint32_t tid)
{
    typedef FA_NUMBER(KIND) number;

    if (a->in_log2 != 0) {
        number factor = fa_scalar(fa_scale_log2<KIND>(a));
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                s[i][j] *= factor;
            }
        }
        fa_keep_order(); /* see fa_walk_rows: the ends are not to be joined */
    }
    if (a->softcap != 0) {
        number cap = fa_scalar((number)a->softcap);
        number inverse = fa_scalar((number)a->softcap_inverse);
        bool turns = !FA_SUMS_ROWS(KIND, PASS) || a->row_sums == 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            number own = unit[i] * inverse;
            number own_cap = cap * per_unit[i];
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                if (!FA_IS_HALF(KIND)) {
                    fa_keep_order(); /* long: one at a time */
                }
                fa_capped<number> one = fa_cap<KIND>(s[i][j], own, own_cap);
                s[i][j] = one.score;
                if (PASS == FA_BACKWARD_KV || PASS == FA_BACKWARD_Q) {
                    turned[i][j] *= turns ? one.slope : (number)1;
                }
            }
        }
        fa_keep_order();
    }
    /* tid anew: features are not to share what they make of it. */
    a = fa_again(a);
    tid = fa_opaque(tid);
    if (a->alibi != nullptr) {
        fa_add_alibi<KIND, OWN, PASS>(s, per_unit, a, place, first, walked,
                                      tid);
    }
    tid = fa_opaque(tid);
    if (a->bias.data != nullptr) {
        fa_add_bias<KIND, OWN, PASS>(s, per_unit, a, place, first, walked, tid);
    }
    a = fa_again(a);
    tid = fa_opaque(tid);
    if (a->mask.data != nullptr) {
        fa_mask<KIND, OWN, PASS>(s, a, place, first, walked, tid);
    }
}

/* Whether some key of a tile may be hidden by more than bounds. */
template <int LEVEL> static FA_DEVICE bool fa_may_hide(fa_args_in a)
{
    return LEVEL == FA_FULL &&
           (a->mask.data != nullptr || a->bias.data != nullptr);
}

/* Whether the bias of a row and key is -inf. */
template <int KIND>
static FA_DEVICE bool fa_is_excluded(fa_args_in a, uint32_t place, int row,
                                     int key)
{
    int stored = KIND == FA_F64 || KIND == FA_F32 ? (int)KIND : a->stored_bias;
    fa_plane x = fa_plane_of<FA_FORWARD>(a, FA_VIEW(bias), fa_bytes_of(stored),
                                         place, 0, 0);
    fa_global_in at = x.base + ((int64_t)row * x.own + (int64_t)key * x.walked);

    if (KIND == FA_F64) {
        return *(const FA_GLOBAL double *)at == -FA_INFINITY;
    }
    return stored == FA_F32
               ? *(const FA_GLOBAL float *)at == -FA_INFINITY
               : fa_unpack_as(stored, *(const FA_GLOBAL uint16_t *)at) ==
                     -FA_INFINITY;
}

/* Whether `row` sees `key`, for the rare case that asks for single ones. */
template <int KIND, int LEVEL>
static FA_DEVICE bool fa_sees(fa_args_in a, uint32_t place, int row, int key)
{
    fa_sight sight = fa_sight_of<LEVEL, FA_FORWARD>(a, row);
    bool seen =
        (key >= sight.from || key < fa_sink_keys<LEVEL, FA_FORWARD>(a)) &&
        key <= sight.to;

    if constexpr (LEVEL == FA_FULL) {
        int r = fa_min_int(row, a->seqlen_q - 1);
        if (a->mask.data != nullptr) {
            fa_plane x =
                fa_plane_of<FA_FORWARD>(a, FA_VIEW(mask), 1, place, 0, 0);
            seen = seen &&
                   *(const FA_GLOBAL uint8_t *)(x.base + (int64_t)r * x.own +
                                                (int64_t)key * x.walked) != 0;
        }
        if (a->bias.data != nullptr) {
            seen = seen && !fa_is_excluded<KIND>(a, place, r, key);
        }
    }
    return seen;
}

#endif
