/* gradient.h: from the products of the backward to P and dS.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_GRADIENT_H
#define FA_KERNELS_GRADIENT_H

#include "fit.h"
#include "score.h"
#include "store.h"

/* Which tensor takes which part. */
#define FA_A_AT(PASS) ((PASS) == FA_BACKWARD_KV ? FA_K_AT : FA_Q_AT)
#define FA_B_AT(PASS) ((PASS) == FA_BACKWARD_KV ? FA_V_AT : FA_DOUT_AT)
#define FA_X_AT(PASS) ((PASS) == FA_BACKWARD_KV ? FA_Q_AT : FA_K_AT)
#define FA_Y_AT(PASS) ((PASS) == FA_BACKWARD_KV ? FA_DOUT_AT : FA_V_AT)

/* -- numbers of rows ------------------------------------------------------- */

/* What the backward knows of query `row`, see args.h.  P is 0 where the row
 * does not exist, by its bias. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_row_number(fa_args_in a, uint32_t place, int row, int which)
{
    typedef FA_NUMBER(KIND) number;
    uint32_t at = fa_uniform(place);
    int64_t start =
        ((int64_t)(at >> 16) * a->heads + (at & 0xffff)) * a->seqlen_q;
    int64_t valid = fa_min_int(row, a->seqlen_q - 1);
    number x = ((const FA_GLOBAL number *)
                    a->rows)[(start + valid) * FA_ROW_NUMBERS + which];

    if (which == FA_BIAS) {
        x += (number)FA_P_LOG2(KIND);
    }
    return row < a->seqlen_q  ? x
           : which == FA_BIAS ? (number)-FA_INFINITY
                              : (number)0;
}

/* Arrays of numbers of the walked rows, see fa_put_walked: FA_SHIFT to
 * FA_DELTA of queries, and with FA_BF16 what undoes the scales of X and Y, as
 * two bf16. */
enum { FA_UNDO = FA_DELTA + 1 };

#define FA_WALKED_ARRAYS(KIND, PASS) \
    ((KIND) == FA_BF16 ? FA_UNDO + 1 : (PASS) == FA_BACKWARD_KV ? FA_UNDO : 0)

/* Thread t looks up number t / 64 of row first + t % 64. */
template <int KIND, int PASS>
static FA_DEVICE FA_NUMBER(KIND)
    fa_fetch_walked(fa_args_in a, uint32_t place, int first, uint32_t tid)
{
    int array = (int)(tid / FA_WALK);
    int row = first + (int)(tid & (FA_WALK - 1));

    if constexpr (KIND == FA_BF16) {
        if (array == FA_UNDO) {
            float x = fa_undo_scale<KIND>(a, FA_X_AT(PASS), place, row);
            float y = fa_undo_scale<KIND>(a, FA_Y_AT(PASS), place, row);
            return fa_bits<float>(fa_bits<uint32_t>(x) |
                                  fa_bits<uint32_t>(y) >> 16);
        }
    }
    if (PASS == FA_BACKWARD_KV && array < FA_UNDO) {
        return fa_row_number<KIND>(a, place, row, array);
    }
    return 0;
}

/* -- from products to weights ---------------------------------------------- */

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

/* Products of scaled rows become what they would be without the scales; the
 * walked ones' lie in the higher half of FA_UNDO, or in the lower. */
template <int OWN>
static FA_DEVICE void fa_undo_scales(float s[OWN][FA_WALKED], fa_lds undo,
                                     fa_lds area, bool higher, uint32_t tid)
{
    float walked[FA_WALKED];

    fa_get_walked<FA_BF16>(walked, area, FA_UNDO, tid);
#pragma unroll
    for (int j = 0; j < FA_WALKED; j++) {
        uint32_t both = fa_bits<uint32_t>(walked[j]);
        walked[j] = fa_bf16_to_float(higher ? both >> 16 : both);
    }
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

/* Of the queries that this lane owns; not used if keys are owned.  (FA_DS_SUM
 * is read where it is used, in due.h.) */
template <int KIND, int OWN> struct fa_own_numbers {
    FA_NUMBER(KIND) of[FA_DELTA + 1][OWN];
};

template <int PASS, int KIND, int OWN>
static FA_DEVICE void fa_own_numbers_of(fa_own_numbers<KIND, OWN> *own,
                                        fa_args_in a, uint32_t place, int first,
                                        uint32_t tid)
{
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = first + fa_own_row(OWN, tid, i);
#pragma unroll
        for (int n = 0; n <= FA_DELTA; n++) {
            own->of[n][i] = 0;
            if constexpr (PASS != FA_BACKWARD_KV) {
                own->of[n][i] = fa_row_number<KIND>(a, place, row, n);
            }
        }
    }
}

/* Takes from each product the shift or delta of its query. */
template <int KIND, int OWN, int PASS>
static FA_DEVICE void fa_take(FA_NUMBER(KIND) x[OWN][FA_WALKED], int which,
                              const fa_own_numbers<KIND, OWN> *own, fa_lds area,
                              uint32_t tid)
{
    FA_NUMBER(KIND) walked[FA_WALKED];

    if (PASS == FA_BACKWARD_KV) {
        fa_get_walked<KIND>(walked, area, which, tid);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            x[i][j] -= PASS == FA_BACKWARD_KV ? walked[j] : own->of[which][i];
        }
    }
}

/* S becomes P.  scale_log2: see fa_unit. */
template <int KIND, int OWN, int PASS>
static FA_DEVICE void fa_exponentials(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                      const fa_own_numbers<KIND, OWN> *own,
                                      fa_lds area, FA_NUMBER(KIND) scale_log2,
                                      uint32_t tid)
{
    FA_NUMBER(KIND) shift[FA_WALKED];
    FA_NUMBER(KIND) bias[FA_WALKED];

    if (PASS == FA_BACKWARD_KV) {
        fa_get_walked<KIND>(shift, area, FA_SHIFT, tid);
        fa_get_walked<KIND>(bias, area, FA_BIAS, tid);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            s[i][j] = fa_weight_less<KIND>(
                s[i][j],
                PASS == FA_BACKWARD_KV ? shift[j] : own->of[FA_SHIFT][i],
                scale_log2,
                PASS == FA_BACKWARD_KV ? bias[j] : own->of[FA_BIAS][i]);
        }
    }
}

#endif
