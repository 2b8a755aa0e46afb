/* gradient.h: from the products of the backward to P and dS.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_GRADIENT_H
#define FA_KERNELS_GRADIENT_H

#include "fit.h"
#include "store.h"

/* P is at most 1, so at most 2^12 as a weight. */
#define FA_WEIGHT_LOG2(KIND) (FA_IS_HALF(KIND) ? 12.0f : 0.0f)

/* Which tensor takes which part. */
#define FA_A_AT(PASS) ((PASS) == FA_BACKWARD_KV ? FA_K_AT : FA_Q_AT)
#define FA_B_AT(PASS) ((PASS) == FA_BACKWARD_KV ? FA_V_AT : FA_DOUT_AT)
#define FA_X_AT(PASS) ((PASS) == FA_BACKWARD_KV ? FA_Q_AT : FA_K_AT)
#define FA_Y_AT(PASS) ((PASS) == FA_BACKWARD_KV ? FA_DOUT_AT : FA_V_AT)

/* -- LSE and delta --------------------------------------------------------- */

/* Number `row` of a (B, H, Sq) array. */
template <typename Number>
static FA_DEVICE Number fa_query_number(fa_args_in a, const void *array,
                                        uint32_t place, int row)
{
    uint32_t at = fa_uniform(place);
    int64_t start =
        ((int64_t)(at >> 16) * a->heads + (at & 0xffff)) * a->seqlen_q;

    return ((const FA_GLOBAL Number *)
                array)[start + fa_min_int(row, a->seqlen_q - 1)];
}

/* What is added to scale_log2 * score of query `row`: -inf where the row does
 * not exist or sees nothing, so that its P is 0. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_row_bias(fa_args_in a, uint32_t place, int row)
{
    typedef FA_NUMBER(KIND) number;
    number lse = fa_query_number<number>(a, a->lse, place, row);
    number bias =
        fa_fma(-lse, (number)1.4426950408889634, (number)FA_WEIGHT_LOG2(KIND));

    return row >= a->seqlen_q || lse == -FA_INFINITY ? (number)-FA_INFINITY
                                                     : bias;
}

/* fp32: what the rounding of LSE and of the product above took from it.  At a
 * LSE of 100 they would cost P five bits. */
static FA_DEVICE float fa_row_bias_low(fa_args_in a, uint32_t place, int row)
{
    const float log2_e = 1.44269502e+0f;
    const float log2_e_low = 1.92596299e-8f;
    float lse = fa_query_number<float>(a, a->lse, place, row);
    float low = a->out_lo == nullptr
                    ? 0.0f
                    : fa_query_number<float>(a, a->out_lo, place, row);
    float bias = -lse * log2_e;
    float lost = fa_fma(-lse, log2_e, -bias) - lse * log2_e_low - low * log2_e;

    return fa_abs(lost) < 1.0f ? lost : 0.0f; /* not for Inf */
}

/* delta of query `row`; 0 past the end. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_row_delta(fa_args_in a, uint32_t place, int row)
{
    typedef FA_NUMBER(KIND) number;
    number delta = fa_query_number<number>(a, a->delta, place, row);

    return row < a->seqlen_q ? delta : (number)0;
}

/* Arrays of numbers of the walked rows, see fa_put_walked. */
enum { FA_BIAS_OF, FA_DELTA_OF, FA_UNDO_X, FA_UNDO_Y, FA_BIAS_LOW_OF = 2 };

#define FA_WALKED_ARRAYS(KIND, PASS) \
    ((KIND) == FA_BF16          ? 4  \
     : (PASS) != FA_BACKWARD_KV ? 0  \
     : (KIND) == FA_F32         ? 3  \
                                : 2)

/* Thread t looks up number t / 64 of row first + t % 64. */
template <int KIND, int PASS>
static FA_DEVICE FA_NUMBER(KIND)
    fa_fetch_walked(fa_args_in a, uint32_t place, int first, uint32_t tid)
{
    int array = (int)(tid / FA_WALK);
    int row = first + (int)(tid & (FA_WALK - 1));
    FA_NUMBER(KIND) x = 0;

    if (PASS == FA_BACKWARD_KV && array == FA_BIAS_OF) {
        x = fa_row_bias<KIND>(a, place, row);
    } else if (PASS == FA_BACKWARD_KV && array == FA_DELTA_OF) {
        x = fa_row_delta<KIND>(a, place, row);
    } else if (PASS == FA_BACKWARD_KV && KIND == FA_F32 &&
               array == FA_BIAS_LOW_OF) {
        x = fa_row_bias_low(a, place, row);
    } else if (KIND == FA_BF16 && array == FA_UNDO_X) {
        x = fa_undo_scale<KIND>(a, FA_X_AT(PASS), place, row);
    } else if (KIND == FA_BF16 && array == FA_UNDO_Y) {
        x = fa_undo_scale<KIND>(a, FA_Y_AT(PASS), place, row);
    }
    return x;
}

/* -- from products to weights ---------------------------------------------- */

/* What this lane's owned row i sees: its walked rows c + 8j with
 * from <= 8j <= to. */
template <int PASS>
static FA_DEVICE void fa_visible(fa_args_in a, int own, int walked,
                                 uint32_t tid, int *from, int *to)
{
    int c = walked + (int)(tid & 7);

    if (PASS == FA_BACKWARD_KV) { /* own: a key; walked: queries */
        *from = own - a->diagonal - c;
        *to = a->seqlen_q - 1 - c;
    } else {
        *from = 0;
        *to = fa_last_key(a, own) - c;
    }
}

/* P of what a row does not see becomes 0, and so does dP: 0 * NaN is not. */
template <int KIND, int OWN, int PASS>
static FA_DEVICE void fa_mask_products(FA_NUMBER(KIND) p[OWN][FA_WALKED],
                                       FA_NUMBER(KIND) dp[OWN][FA_WALKED],
                                       fa_args_in a, int first, int walked,
                                       uint32_t tid)
{
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int from;
        int to;
        fa_visible<PASS>(a, first + fa_own_row(OWN, tid, i), walked, tid, &from,
                         &to);
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            bool seen = 8 * j >= from && 8 * j <= to;
            p[i][j] = seen ? p[i][j] : (FA_NUMBER(KIND))0;
            dp[i][j] = seen ? dp[i][j] : (FA_NUMBER(KIND))0;
        }
    }
}

/* FA_BF16: what undoes the scales of the owned rows of tensor `which`. */
template <int KIND, int OWN>
static FA_DEVICE void fa_keep_undo(fa_args_in a, int which, uint32_t place,
                                   int first, fa_lds undo, uint32_t tid)
{
    if (tid < 32 * OWN) {
        float x = fa_undo_scale<KIND>(a, which, place, first + (int)tid);
        fa_lds_store1(undo + tid * 4, fa_bits<uint32_t>(x));
    }
}

/* Products of scaled rows become what they would be without the scales. */
template <int OWN>
static FA_DEVICE void fa_undo_scales(float s[OWN][FA_WALKED], fa_lds undo,
                                     fa_lds area, int array, uint32_t tid)
{
    float walked[FA_WALKED];

    fa_get_walked<FA_BF16>(walked, area, array, tid);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = fa_own_row(OWN, tid, i);
        float own = fa_bits<float>(fa_lds_load1(undo + row * 4));
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            s[i][j] *= own * walked[j];
        }
    }
}

/* Of the queries that this lane owns; not used if keys are owned. */
template <int KIND, int OWN> struct fa_own_numbers {
    FA_NUMBER(KIND) bias[OWN];
    FA_NUMBER(KIND) bias_low[OWN];
    FA_NUMBER(KIND) delta[OWN];
};

template <int PASS, int KIND, int OWN>
static FA_DEVICE void fa_own_numbers_of(fa_own_numbers<KIND, OWN> *own,
                                        fa_args_in a, uint32_t place, int first,
                                        uint32_t tid)
{
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = first + fa_own_row(OWN, tid, i);

        own->bias[i] = 0;
        own->bias_low[i] = 0;
        own->delta[i] = 0;
        if constexpr (PASS == FA_BACKWARD_Q) {
            own->bias[i] = fa_row_bias<KIND>(a, place, row);
            own->delta[i] = fa_row_delta<KIND>(a, place, row);
            if constexpr (KIND == FA_F32) {
                own->bias_low[i] = fa_row_bias_low(a, place, row);
            }
        }
    }
}

template <int KIND, int OWN, int PASS>
static FA_DEVICE void fa_take_delta(FA_NUMBER(KIND) dp[OWN][FA_WALKED],
                                    const fa_own_numbers<KIND, OWN> *own,
                                    fa_lds area, uint32_t tid)
{
    FA_NUMBER(KIND) walked[FA_WALKED];

    if (PASS == FA_BACKWARD_KV) {
        fa_get_walked<KIND>(walked, area, FA_DELTA_OF, tid);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            dp[i][j] -= PASS == FA_BACKWARD_KV ? walked[j] : own->delta[i];
        }
    }
}

/* S becomes P.  Where LSE is so large that its own rounding takes P above 1, P
 * is held there, or dS would leave fp16's range. */
template <int KIND, int OWN, int PASS>
static FA_DEVICE void fa_exponentials(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                      const fa_own_numbers<KIND, OWN> *own,
                                      fa_lds area, FA_NUMBER(KIND) scale_log2,
                                      uint32_t tid)
{
    typedef FA_NUMBER(KIND) number;
    enum {
        KV = PASS == FA_BACKWARD_KV,
        BIASES = KV ? (int)FA_WALKED : (int)OWN
    };
    number bias[BIASES];
    number low[BIASES];
    number big = 0;

    if constexpr (KV) {
        fa_get_walked<KIND>(bias, area, FA_BIAS_OF, tid);
        if constexpr (KIND == FA_F32) {
            fa_get_walked<KIND>(low, area, FA_BIAS_LOW_OF, tid);
        } else {
#pragma unroll
            for (int n = 0; n < BIASES; n++) {
                low[n] = 0;
            }
        }
    }
#pragma unroll
    for (int n = 0; n < BIASES; n++) {
        bias[n] = KV ? bias[n] : own->bias[n % OWN];
        low[n] = KV ? low[n] : own->bias_low[n % OWN];
        number size = fa_abs(bias[n]);
        big = size < FA_INFINITY ? fa_max(big, size) : big;
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            int n = KV ? j : i;
            s[i][j] = fa_weight<KIND>(s[i][j], scale_log2, bias[n], low[n]);
        }
    }
    if constexpr (KIND != FA_F64) {
        const float limit = FA_IS_HALF(KIND) ? 0x1p12f : 1.0f;
        if (fa_any(big > 1e5f)) {
#pragma unroll
            for (int i = 0; i < OWN; i++) {
#pragma unroll
                for (int j = 0; j < FA_WALKED; j++) {
                    s[i][j] = s[i][j] > limit ? limit : s[i][j];
                }
            }
        }
    }
}

#endif
