/* weigh.h: a step of the backward, from its two products to P and dS; see
 * backward.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_WEIGH_H
#define FA_KERNELS_WEIGH_H

#include "due.h"
#include "step.h"

/* dQ has one set of sums, so registers to fetch owned rows early. */
#define FA_BACKWARD_BASE(KIND, DIM, OWN, PASS)               \
    fa_layout<KIND, DIM, OWN, 2,                             \
              fa_shape<KIND, DIM, OWN>::CHUNKS == 1 ? 8 : 1, \
              !(FA_IS_HALF(KIND) && (PASS) == FA_BACKWARD_Q && (DIM) <= 128)>

template <int KIND, int DIM, int OWN, int PASS>
struct fa_backward_layout : FA_BACKWARD_BASE(KIND, DIM, OWN, PASS) {
    typedef FA_BACKWARD_BASE(KIND, DIM, OWN, PASS) base;
    enum {
        B_AT = base::STAYS ? (int)base::shape::OWN_BYTES : 0,
        KEPT_AT = base::AREA_AT + /* behind the numbers of walked rows */
            FA_WALKED_ARRAYS(KIND, PASS) * FA_WALK *
                (int)sizeof(FA_NUMBER(KIND)),
        UNDO_AT = base::END, /* FA_BF16: what undoes the scales of A and B */
        LDS_BYTES = UNDO_AT + (KIND == FA_BF16 ? base::ROWS * 2 * 4 : 0)
    };
};

/* Whether delta is taken from dP before its products are summed, which costs
 * no instruction; but products of scaled rows, or dropout, come first, and in
 * fp32, where row sums correct delta (fa_correct_row), dP must have the same
 * roundings before and after. */
#define FA_TAKES_EARLY(KIND, LEVEL) \
    ((LEVEL) == FA_PLAIN && (KIND) != FA_BF16 && (KIND) != FA_F32)

/* Long sums of fp32 would collect the roundings of thousands of rows.  So 64
 * are summed apart (fa_walk_columns); keys have two sets of sums and no
 * registers for a third, and put away into the gradient what an epoch of tiles
 * gave. */
#define FA_SUMS_APART(KIND, PASS) ((KIND) == FA_F32 && (PASS) != FA_BACKWARD_KV)
#define FA_PUTS_AWAY(KIND, PASS) ((KIND) == FA_F32 && (PASS) == FA_BACKWARD_KV)
enum { FA_EPOCH = 16 }; /* tiles */

/* What a workgroup knows of itself while it walks. */
template <int KIND, int DIM, int OWN, int PASS> struct fa_walk {
    FA_NUMBER(KIND) first_sum[OWN][DIM / 8];  /* dK, or dQ: of dS and X */
    FA_NUMBER(KIND) second_sum[OWN][DIM / 8]; /* dV: of P and Y */
    fa_own_numbers<KIND, OWN> own;
    fa_due<OWN> due;              /* FA_EVENS_OUT */
    FA_NUMBER(KIND) row_sum[OWN]; /* FA_SUMS_ROWS: of dS */
    FA_NUMBER(KIND) scale_log2;
    float lift;    /* see fa_lift */
    float x_scale; /* FA_BF16: of columns of X, and of Y */
    float y_scale;
    bool with_first;
    bool with_second;
};

/* FA_FULL: the products of one step become scores and dP - delta; `turned` is
 * multiplied by softcap's slope.  kept: of dropout, a bit i * 8 + j for each
 * score; returns the same for those that are seen.  `place` is of the
 * queries. */
template <int KIND, int DIM, int OWN, int PASS>
static FA_DEVICE uint32_t fa_add_features(
    const fa_walk<KIND, DIM, OWN, PASS> *walk,
    FA_NUMBER(KIND) s[OWN][FA_WALKED], FA_NUMBER(KIND) dp[OWN][FA_WALKED],
    FA_NUMBER(KIND) turned[OWN][FA_WALKED], fa_args_in a, fa_lds area,
    uint32_t place, int first, int walked, bool masked, uint32_t kept,
    uint32_t tid)
{
    typedef FA_NUMBER(KIND) number;
    number unit[OWN];
    number per_unit[OWN];

    if (a->seed != nullptr) {
        fa_drop<OWN>(dp, kept);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                dp[i][j] *= (number)a->keep_scale;
            }
        }
    }
    fa_take<KIND, OWN, PASS>(dp, FA_DELTA, &walk->own, area, tid);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        unit[i] = walk->scale_log2;
        per_unit[i] = (number)a->per_unit;
    }
    fa_make_scores<KIND, OWN, PASS>(s, turned, unit, per_unit, a, place, first,
                                    walked, tid);
    a = fa_again(a);
    tid = fa_opaque(tid);
    if (masked) {
        fa_hide<KIND, OWN, FA_FULL, PASS, false>(s, dp, (number)-FA_INFINITY, a,
                                                 first, walked, tid);
    }
    uint32_t seen = 0xffffffffu;
    if (masked || fa_may_hide<FA_FULL>(a)) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            fa_keep_order(); /* comparisons take two scalar registers each */
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                bool hidden = s[i][j] == (number)-FA_INFINITY;
                seen &= hidden ? ~(1u << (i * 8 + j)) : 0xffffffffu;
            }
        }
    }
    return seen;
}

/* FA_FULL: P, dP and `turned` (fa_make_scores) of what is not seen become 0,
 * whatever they are: a row of NaN must not reach keys that do not see it, nor
 * the other way round.  Packed rows: nor through the sums over rows, from which
 * NaN and Inf are kept out; they come back in P. */
template <int KIND, int OWN, int PASS>
static FA_DEVICE void fa_forget_unseen(FA_NUMBER(KIND) p[OWN][FA_WALKED],
                                       FA_NUMBER(KIND) dp[OWN][FA_WALKED],
                                       FA_NUMBER(KIND) turned[OWN][FA_WALKED],
                                       fa_args_in a, uint32_t seen)
{
    if (fa_any(seen != 0xffffffffu)) {
        fa_drop<OWN>(p, seen);
        fa_drop<OWN>(dp, seen);
        fa_drop<OWN>(turned, seen);
    }
    if (PASS == FA_BACKWARD_KV && a->span_k != nullptr) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                p[i][j] += dp[i][j] - dp[i][j];
            }
        }
    }
}

/* FA_EVENS_OUT: dS of row i, whose sums go to `due`; in the step behind the
 * last one what is added to dS.  slope: softcap's. */
template <int KIND, int OWN, int LEVEL>
static FA_DEVICE fa_weights<KIND>
fa_weigh_row(fa_due<OWN> *due, int i, float dp[FA_WALKED],
             const float p[FA_WALKED], const float slope[FA_WALKED],
             fa_args_in a, float lift, int walked, bool evening)
{
    bool turns = LEVEL == FA_FULL && a->softcap != 0;
    fa_weights<KIND> ds;

#pragma unroll
    for (int j = 0; j < FA_WALKED; j++) {
        dp[j] *= p[j];
        if constexpr (FA_IS_HALF(KIND)) {
            dp[j] *= evening ? 1.0f : lift;
        }
    }
    if (evening) {
        fa_set_weights<KIND>(&ds, dp);
        return ds;
    }
    float exact = fa_sum_walked(dp);
    if (LEVEL == FA_FULL || FA_IS_HALF(KIND)) {
        due->exact[i] += exact;
    }
    if (LEVEL == FA_FULL) {
        due->weight[i] += fa_sum_walked(p);
    }
    if (turns) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            dp[j] *= slope[j];
            due->slope[i] = fa_fma(p[j], slope[j], due->slope[i]);
        }
        exact = fa_sum_walked(dp);
    }
    fa_set_weights<KIND>(&ds, dp);
    due->sum[i] = FA_IS_HALF(KIND) ? fa_add_weights<KIND>(due->sum[i], &ds)
                                   : due->sum[i] + exact;
    due->sum[i] -= turns ? exact : 0.0f;
    fa_note_best(due, i, p, walked);
    return ds;
}

/* P and dS of one step, from its two products; or what is added to dS. */
template <int KIND, int DIM, int OWN, int PASS, int LEVEL>
static FA_DEVICE void
fa_weigh(fa_walk<KIND, DIM, OWN, PASS> *walk, FA_NUMBER(KIND) s[OWN][FA_WALKED],
         FA_NUMBER(KIND) dp[OWN][FA_WALKED], fa_weights<KIND> p[OWN],
         fa_weights<KIND> ds[OWN], fa_args_in a, fa_lds lds, uint32_t place,
         int first, int walked, bool masked, const fa_evenings *evenings,
         uint32_t tid)
{
    typedef fa_backward_layout<KIND, DIM, OWN, PASS> L;
    enum { EVENS_OUT = FA_EVENS_OUT(KIND, PASS) };
    bool evening = evenings->left > 0;
    fa_lds area = lds + L::AREA_AT;
    FA_NUMBER(KIND) slope[OWN][FA_WALKED]; /* EVENS_OUT: of softcap */
    uint32_t kept = 0;
    uint32_t seen = 0;

    if constexpr (KIND == FA_BF16) {
        fa_lds undo = lds + L::UNDO_AT;
        fa_undo_scales<OWN>(s, undo, area, true, tid);
        fa_undo_scales<OWN>(dp, undo + L::ROWS * 4, area, false, tid);
    }
    if (LEVEL == FA_PLAIN && !FA_TAKES_EARLY(KIND, LEVEL)) {
        fa_take<KIND, OWN, PASS>(dp, FA_DELTA, &walk->own, area, tid);
    }
    if constexpr (LEVEL == FA_FULL) {
        if (a->seed != nullptr) {
            kept = PASS == FA_BACKWARD_KV
                       ? fa_get_kept<OWN>(lds + L::KEPT_AT, first, tid)
                       : fa_own_kept<OWN>(a, place, first, walked, tid);
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                slope[i][j] = 1;
            }
        }
        seen =
            fa_add_features(walk, s, dp, EVENS_OUT ? slope : dp, a, area, place,
                            first, walked, masked, kept, fa_opaque(tid));
        a = fa_again(a);
        tid = fa_opaque(tid);
    }
    fa_exponentials<KIND, OWN, PASS>(s, &walk->own, area, walk->scale_log2,
                                     tid);
    if constexpr (LEVEL == FA_FULL) {
        fa_forget_unseen<KIND, OWN, PASS>(s, dp, EVENS_OUT ? slope : dp, a,
                                          seen);
    } else if (masked) {
        a = fa_again(a);
        fa_hide<KIND, OWN, LEVEL, PASS, true>(s, dp, 0, a, first, walked, tid);
    }
    if constexpr (EVENS_OUT) {
        if (fa_is_first(evenings)) {
            fa_share_lack<KIND, LEVEL, DIM, OWN>(
                walk->first_sum, &walk->due, a, place, first,
                FA_WHOLE(KIND, walk->lift), evenings->left, tid);
        }
        if (evening) {
            fa_even_out<KIND, OWN>(&walk->due, a, s, dp);
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if constexpr (EVENS_OUT) {
            ds[i] = fa_weigh_row<KIND, OWN, LEVEL>(&walk->due, i, dp[i], s[i],
                                                   slope[i], a, walk->lift,
                                                   walked, evening);
        } else {
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                dp[i][j] *= s[i][j];
                if constexpr (FA_IS_HALF(KIND)) {
                    dp[i][j] *= walk->lift;
                }
            }
            if constexpr (FA_SUMS_ROWS(KIND, PASS)) {
                walk->row_sum[i] += fa_sum_walked(dp[i]);
            }
            fa_set_weights<KIND>(&ds[i], dp[i]);
        }
    }
    if constexpr (LEVEL == FA_FULL && PASS == FA_BACKWARD_KV) {
        if (a->seed != nullptr) {
            fa_drop<OWN>(s, kept);
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        fa_set_weights<KIND>(&p[i], s[i]);
    }
}

#endif
