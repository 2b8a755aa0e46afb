/* due.h: what the dS of a query lack in their sum, given to its keys.
 *
 * The dS of a query sum to its dLSE (FA_DS_SUM), and cancel in dQ for what its
 * keys have in common.  As they come, rounded to fp16 and with a delta of
 * rounded numbers, they do not.  So what their sum lacks is added to dQ in the
 * end: each of the 8 lanes of a row knows the heaviest of its keys, and these
 * 8 share it by their weights.  A key of no weight gets nothing: it may be of
 * any size.  Rounding of weights and delta is spread over all keys; that of a
 * heavy key is made up for at that key, and the rest where the row looks.
 *
 * Softcap multiplies each dS by a slope of its own behind delta.  What is due
 * to delta is then multiplied by the mean slope.  A sink leaves the keys less
 * weight; where that is little, rounding of FA_DS_SUM would be most of what is
 * given, so it is only in proportion.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_DUE_H
#define FA_KERNELS_DUE_H

#include "columns.h"
#include "gradient.h"

/* Whether the pass does so.  fp64 has no lse_lo that would tell whether these
 * are all the keys of the row. */
#define FA_EVENS_OUT(KIND, PASS) ((KIND) != FA_F64 && (PASS) == FA_BACKWARD_Q)

/* What a lane knows of its rows. */
template <int OWN> struct fa_due {
    float sum[OWN];     /* of dS as they are used; with softcap, what rounding
                       * made of them */
    float exact[OWN];   /* before softcap's slope and rounding */
    float weight[OWN];  /* of P */
    float slope[OWN];   /* of P times softcap's slope */
    uint32_t best[OWN]; /* the largest P, in its lowest 3 bits which of 8 */
    int at[OWN];        /* the walked tile of that */
};

template <int OWN> static FA_DEVICE void fa_clear_due(fa_due<OWN> *due)
{
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        due->sum[i] = 0.0f;
        due->exact[i] = 0.0f;
        due->weight[i] = 0.0f;
        due->slope[i] = 0.0f;
        due->best[i] = 0;
        due->at[i] = 0;
    }
}

/* In pairs, so that few roundings follow one another. */
static FA_DEVICE float fa_sum_walked(const float x[FA_WALKED])
{
    static_assert(FA_WALKED == 8, "the pairs below");
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/* Row i's weights of the tile at `walked`. */
template <int OWN>
static FA_DEVICE void fa_note_best(fa_due<OWN> *due, int i,
                                   const float p[FA_WALKED], int walked)
{
    uint32_t top = 0;

#pragma unroll
    for (int j = 0; j < FA_WALKED; j++) {
        uint32_t one = (fa_bits<uint32_t>(p[j]) & ~7u) | (uint32_t)j;
        top = one > top ? one : top;
    }
    due->at[i] = top > due->best[i] ? walked : due->at[i];
    due->best[i] = top > due->best[i] ? top : due->best[i];
}

/* Four channels of a key, as numbers. */
template <int KIND, bool WIDE>
static FA_DEVICE void fa_load_four(float to[4], const fa_matrix *k,
                                   const fa_steps *steps, int key, int channel)
{
    if constexpr (WIDE) {
        int64_t from = channel < k->channels ? channel : 0;
        fa_global_in at =
            k->base + ((int64_t)key * k->row + from) * FA_ELEMENT(KIND);
        if constexpr (KIND == FA_F32) {
            u32x4 x = *(const FA_GLOBAL u32x4 *)at;
            to[0] = fa_bits<float>(x.x);
            to[1] = fa_bits<float>(x.y);
            to[2] = fa_bits<float>(x.z);
            to[3] = fa_bits<float>(x.w);
        } else {
            u32x2 x = *(const FA_GLOBAL u32x2 *)at;
            to[0] = fa_unpack_as(k->stored, x.x);
            to[1] = fa_unpack_as(k->stored, x.x >> 16);
            to[2] = fa_unpack_as(k->stored, x.y);
            to[3] = fa_unpack_as(k->stored, x.y >> 16);
        }
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            to[e] = fa_load_element<KIND>(k, steps, key, channel + e);
        }
    }
}

/* Adds to each row the key of lane n of its 8, times that lane's share. */
template <int KIND, int DIM, int OWN, bool WIDE>
static FA_DEVICE void fa_add_keys(float sum[OWN][DIM / 8], const fa_matrix *k,
                                  const fa_steps *steps, fa_lds area,
                                  uint32_t tid)
{
    enum { STRIDE = FA_THREADS * 8 };

#pragma unroll 1
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            u32x2 one =
                fa_lds_load2(area + (tid & ~7u) * 8 + n * 8 + i * STRIDE);
            float share = fa_bits<float>(one.y);
#pragma unroll
            for (int u = 0; u < DIM / 32; u++) {
                float x[4];
                fa_load_four<KIND, WIDE>(x, k, steps, (int)one.x,
                                         fa_channel(4, tid, u));
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    /* 0 * Inf would be NaN */
                    float own = share != 0.0f ? x[e] : 0.0f;
                    sum[i][u * 4 + e] = fa_fma(share, own, sum[i][u * 4 + e]);
                }
            }
        }
    }
}

/* fa_args.row_sums of this lane's row i.  whole: what a sum of 1 is. */
template <int KIND, int LEVEL, int OWN>
static FA_DEVICE void fa_store_row_sum(fa_args_in a, const fa_due<OWN> *due,
                                       int i, uint32_t place, int row,
                                       float whole, uint32_t tid)
{
    uint32_t at = fa_uniform(place);
    int64_t start =
        ((int64_t)(at >> 16) * a->heads + (at & 0xffff)) * a->seqlen_q;
    float sum = fa_sum8(LEVEL == FA_FULL ? due->exact[i] : due->sum[i]);

    if ((tid & 7) == 0 && row < a->seqlen_q) {
        ((FA_GLOBAL float *)
             a->rows)[(start + row) * FA_ROW_NUMBERS + FA_DS_SUM] = sum / whole;
    }
}

/* Whether the pass can: what is rounded to fp16 is known apart with features
 * alone. */
#define FA_SUMS_ROWS(KIND, LEVEL) ((KIND) == FA_F32 || (LEVEL) == FA_FULL)

/* sum: of dQ, in the units of `due` times k's numbers times k_scale.
 * whole: what a sum of 1 is in these units, a power of two.  place, first: of
 * the queries.  `area`: where shares lie. */
template <int KIND, int LEVEL, int DIM, int OWN>
static FA_DEVICE void
fa_give_due(float sum[OWN][DIM / 8], const fa_due<OWN> *due, fa_args_in a,
            uint32_t place, int first, float whole, float k_scale,
            uint32_t key_place, fa_lds area, uint32_t tid)
{
    const float least = FA_IS_HALF(KIND) ? 0.25f * FA_P_SCALE : 0.25f;
    fa_matrix k = fa_matrix_at<KIND>(a, FA_K_AT, key_place);
    float lacks[OWN];

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = first + fa_own_row(OWN, tid, i);
        lacks[i] = fa_row_number<FA_F32>(a, place, row, FA_DS_SUM) * whole;
    }
    /* What was in LDS is read, also where there was no step; and so are the
     * numbers of the last row, which others look at, too. */
    fa_barrier();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = first + fa_own_row(OWN, tid, i);
        float keys = LEVEL == FA_FULL ? fa_sum8(due->weight[i]) : 1.0f;
        if (LEVEL == FA_FULL && a->softcap != 0) {
            lacks[i] -= fa_sum8(due->exact[i]);
            lacks[i] *= fa_sum8(due->slope[i]) / keys;
        }
        lacks[i] -= fa_sum8(due->sum[i]);
        if (LEVEL == FA_FULL && keys < least) {
            lacks[i] *= keys / least;
        }
        float weight = fa_bits<float>(due->best[i] & ~7u);
        float all = fa_sum8(weight);
        /* NaN: it is not known, or the row is NaN anyway */
        bool some = weight > 0.0f && lacks[i] == lacks[i];
        float share = some ? lacks[i] * k_scale * (weight / all) : 0.0f;
        int key = due->at[i] + (int)(tid & 7) + 8 * (int)(due->best[i] & 7);
        fa_lds_store2(area + tid * 8 + i * (FA_THREADS * 8),
                      (uint32_t)(some ? key : 0), fa_bits<uint32_t>(share));
        if constexpr (FA_SUMS_ROWS(KIND, LEVEL)) {
            if (a->row_sums != 0) {
                fa_store_row_sum<KIND, LEVEL>(a, due, i, place, row, whole,
                                              tid);
            }
        }
    }
    fa_wave_sync();
    fa_steps steps = fa_steps_of<KIND>(&k);
    if (fa_is_wide(&k)) {
        fa_add_keys<KIND, DIM, OWN, true>(sum, &k, &steps, area, tid);
    } else {
        fa_add_keys<KIND, DIM, OWN, false>(sum, &k, &steps, area, tid);
    }
}

#endif
