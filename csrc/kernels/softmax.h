/* softmax.h: the online softmax: what a workgroup knows of its rows, and how
 * 64 more scores of each go into it.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_SOFTMAX_H
#define FA_KERNELS_SOFTMAX_H

#include "product.h"

/* From here on the rounding of the exponent bias, P_LOG2 - m * scale_log2,
 * would move P by more than fp16 can tell, in the end out of its range; the
 * maximum is then subtracted from the scores first.  For fp32 it always is. */
#define FA_BIG_BIAS(KIND) ((KIND) == FA_F32 ? -1.0f : 1024.0f)

/* A row's largest score before it has seen a key: below every score that fp32
 * can hold, and finite, so that differences to it are never NaN. */
#define FA_NO_MAX (-0x1.fffffep127f)
#define FA_NONE (-0x1.fffffcp127f) /* between it and the rest */

/* What is added to scale_log2 * score before the exponential. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_bias(FA_NUMBER(KIND) most, FA_NUMBER(KIND) scale_log2)
{
    typedef FA_NUMBER(KIND) number;
    number bias = fa_fma(-most, scale_log2, (number)FA_P_LOG2(KIND));

    return most < fa_fixed((number)FA_NONE) ? (number)0 : bias;
}

/* In fp32 the roundings of thousands of keys are most of what delta lacks, and
 * so dQ.  256 channels leave no registers for that. */
#define FA_KEEPS_RESTS(KIND, DIM) ((KIND) == FA_F32 && (DIM) < 256)

/* What a lane knows of its rows: largest score so far, its part of the sum of
 * weights, and of the sum of values. */
template <int KIND, int DIM, int OWN> struct fa_rows {
    FA_NUMBER(KIND) most[OWN];
    FA_NUMBER(KIND) sum[OWN]; /* see fa_sums_of */
    FA_NUMBER(KIND) out[OWN][fa_shape<KIND, DIM, OWN>::CHANNELS];
    /* FA_KEEPS_RESTS: what rounding took from both. */
    FA_NUMBER(KIND) rest_of_sum[OWN];
    FA_NUMBER(KIND) rest[OWN][fa_shape<KIND, DIM, OWN>::CHANNELS];
};

/* A sink is a key that came first: its score, and its weight in one lane's part
 * of each sum. */
template <int KIND, int DIM, int OWN, int LEVEL>
static FA_DEVICE void fa_start_rows(fa_rows<KIND, DIM, OWN> *rows,
                                    const FA_NUMBER(KIND) per_unit[OWN],
                                    fa_args_in a, uint32_t place, uint32_t tid)
{
    typedef FA_NUMBER(KIND) number;
    typedef FA_OUTER(KIND) outer;
    bool with_sink = LEVEL == FA_FULL && a->sink != nullptr;
    bool mine = (tid & (FA_IS_HALF(KIND) ? 3 : 7)) == 0; /* see fa_sums_of */
    const FA_GLOBAL outer *sinks = (const FA_GLOBAL outer *)a->sink;
    number sink =
        with_sink ? (number)sinks[fa_uniform(place) & 0xffff] : (number)0;

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        number score = sink * per_unit[i];
        /* Not for -inf, but for NaN. */
        bool counts = with_sink && !(score <= (number)FA_NONE);
        number most = counts ? score : (number)FA_NO_MAX;
        number sum = counts && mine
                         ? (number)(FA_IS_HALF(KIND) ? FA_P_SCALE : 1.0f)
                         : (number)0;
        rows->most[i] = most;
        rows->sum[i] = sum;
        rows->rest_of_sum[i] = 0;
#pragma unroll
        for (int e = 0; e < fa_shape<KIND, DIM, OWN>::CHANNELS; e++) {
            rows->out[i][e] = 0;
            rows->rest[i][e] = 0;
        }
    }
}

/* A lane's part of the sum of weights.  With fp16 operands there is also the
 * sum of what they were rounded to: of 8 lanes the lower 4 keep the one and the
 * upper 4 the other, each for two lanes, because there is one register for
 * both. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_sums_of(FA_NUMBER(KIND) sum, const fa_weights<KIND> *p, uint32_t tid)
{
    if constexpr (FA_IS_HALF(KIND)) {
        float packed = fa_add_weights<KIND>(0.0f, p);
        bool upper = (tid & 4) != 0;
        float others = upper ? sum : packed;
        return (upper ? packed : sum) + fa_swap8<2>(others);
    }
    return sum;
}

/* Over the 8 lanes of a row. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_both_sums(FA_NUMBER(KIND) x, FA_NUMBER(KIND) * packed, uint32_t tid)
{
    if constexpr (FA_IS_HALF(KIND)) {
        bool upper = (tid & 4) != 0;
        x += fa_swap8<0>(x);
        x += fa_swap8<1>(x);
        float other = fa_swap8<2>(x);
        *packed = upper ? x : other;
        return upper ? other : x;
    }
    *packed = fa_sum8(x);
    return *packed;
}

/* Takes this lane's 8 of a row's next 64 scores, for each of its rows, into
 * the rows' state, and makes their weights. */
template <int KIND, int DIM, int OWN>
static FA_DEVICE void
fa_softmax(fa_rows<KIND, DIM, OWN> *rows, FA_NUMBER(KIND) s[OWN][FA_WALKED],
           fa_weights<KIND> p[OWN], const FA_NUMBER(KIND) scale_log2[OWN],
           uint32_t tid)
{
    typedef FA_NUMBER(KIND) number;
    const number at_top = (number)FA_P_LOG2(KIND);
    number top[OWN];
    number bias[OWN];
    number big = 0;
    bool moved = false;

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        top[i] = s[i][0];
#pragma unroll
        for (int j = 1; j < FA_WALKED; j++) {
            top[i] = fa_max(top[i], s[i][j]);
        }
        top[i] = fa_max(rows->most[i], fa_max8(top[i]));
        moved |= top[i] > rows->most[i];
        bias[i] = fa_bias<KIND>(top[i], scale_log2[i]);
        big = fa_max(big, fa_abs(bias[i]));
    }
    if (fa_any(moved)) {
        /* By the biases as they were rounded, so that old and new weights
         * agree; but those are of no use once they are huge. */
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            number old = rows->most[i];
            number step = fa_abs(bias[i]) > fa_fixed((number)FA_BIG_BIAS(KIND))
                              ? (old - top[i]) * scale_log2[i]
                              : bias[i] - fa_bias<KIND>(old, scale_log2[i]);
            number shrink =
                old < fa_fixed((number)FA_NONE) ? (number)0 : fa_exp2(step);
            rows->most[i] = top[i];
            rows->sum[i] *= shrink;
#pragma unroll
            for (int e = 0; e < fa_shape<KIND, DIM, OWN>::CHANNELS; e++) {
                rows->out[i][e] *= shrink;
            }
            if constexpr (FA_KEEPS_RESTS(KIND, DIM)) {
                rows->rest_of_sum[i] *= shrink;
#pragma unroll
                for (int e = 0; e < fa_shape<KIND, DIM, OWN>::CHANNELS; e++) {
                    rows->rest[i][e] *= shrink;
                }
            }
        }
    }
    if (KIND == FA_F32 || fa_any(big > fa_fixed((number)FA_BIG_BIAS(KIND)))) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            /* Row by row: a result must not depend on its neighbours. */
            bool own = KIND == FA_F32 ||
                       fa_abs(bias[i]) > fa_fixed((number)FA_BIG_BIAS(KIND));
            number less = own ? top[i] : (number)0;
            bias[i] = own ? at_top : bias[i];
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                s[i][j] -= less;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        number sum = 0;
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            s[i][j] = fa_weight<KIND>(s[i][j], scale_log2[i], bias[i]);
            sum += s[i][j];
        }
        fa_set_weights<KIND>(&p[i], s[i]);
        if constexpr (FA_KEEPS_RESTS(KIND, DIM)) {
            fa_add_exactly(&rows->sum[i], &rows->rest_of_sum[i], sum);
        } else {
            rows->sum[i] += fa_sums_of<KIND>(sum, &p[i], tid);
        }
    }
}

#endif
