/* due.h: what the dS of a query lack in their sum, given to its keys.
 *
 * The dS of a query sum to its dLSE (FA_DS_SUM), and cancel in dQ for what its
 * keys have in common.  As they come, rounded to fp16 and with a delta of
 * rounded numbers, they do not.  What their sum lacks belongs to all keys by
 * their weights, so it is shared by many: in evening steps behind the last one
 * it is added to the dS of one tile in 16.  A row that looks elsewhere must not
 * give those tiles' keys more than their weights are worth; it gives the rest
 * to the heaviest key of each of its 8 lanes.  A key of no weight gets nothing:
 * it may be of any size.
 *
 * With softcap a wrong delta changes each dS by its own slope, so it is no
 * common part: the heaviest keys alone get their parts of it, times the mean
 * slope.  A sink leaves the keys less weight; below a quarter, what is given is
 * mostly the rounding of FA_DS_SUM, so it shrinks in proportion.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_DUE_H
#define FA_KERNELS_DUE_H

#include "columns.h"
#include "gradient.h"

/* Whether the pass does so.  In fp64 there is too little to make up for. */
#define FA_EVENS_OUT(KIND, PASS) \
    (!FA_IS_DOUBLE(KIND) && (PASS) == FA_BACKWARD_Q)

/* Tiles to an evening step: 64 keys stand for so many, and what they do not
 * have in common with the others is an error that must not grow with their
 * number. */
enum { FA_EVEN_EVERY = 16 };

/* What is given is small, so sums and shares in fp16 are times this. */
#define FA_EVEN_SCALE(KIND) (FA_IS_HALF(KIND) ? 0x1p10f : 1.0f)

/* What a sum of 1 is in the units of dS, a power of two.  lift: see fa_lift. */
#define FA_WHOLE(KIND, lift) (FA_IS_HALF(KIND) ? (lift) * FA_P_SCALE : 1.0f)

/* Where a workgroup is: steps that it took by day, and evenings that are left,
 * this one included. */
typedef struct fa_evenings {
    int days;
    int left;
} fa_evenings;

/* As many as there are tiles from the first evening's on, 16 apart. */
static FA_DEVICE int fa_evenings_of(int days)
{
    return fa_max_int((days + FA_EVEN_EVERY / 2) / FA_EVEN_EVERY, 1);
}

/* How far from the first tile the first evening is: in the middle of 16 or of
 * all, because the first keys may be like no others, and in a window only the
 * first rows see them; but not at the last two tiles, the diagonal's. */
static FA_DEVICE int fa_first_evening(const fa_evenings *x)
{
    return fa_max_int(fa_min_int(x->days, FA_EVEN_EVERY) - 2, 0) / 2;
}

static FA_DEVICE bool fa_is_first(const fa_evenings *x)
{
    return x->left > 0 && x->left == fa_evenings_of(x->days);
}

/* What a lane knows of its rows. */
template <int OWN> struct fa_due {
    float sum[OWN];     /* of dS as they are used; with softcap, only what
                         * rounding added to them; from the first evening on,
                         * what the heaviest keys are given */
    float exact[OWN];   /* before softcap's slope and rounding */
    float weight[OWN];  /* of P; from the first evening on, what the keys of
                         * each evening's tile are given */
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
template <typename Number>
static FA_DEVICE Number fa_sum_walked(const Number x[FA_WALKED])
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

/* What row i lacks: for all keys, and for the heaviest alone. */
typedef struct fa_lack {
    float all;
    float heaviest;
} fa_lack;

template <int KIND, int LEVEL, int OWN>
static FA_DEVICE fa_lack fa_lack_of(fa_args_in a, const fa_due<OWN> *due, int i,
                                    uint32_t place, int row, float whole)
{
    float sum = fa_row_number<FA_F32>(a, place, row, FA_DS_SUM) * whole;
    bool known = sum == sum;
    fa_lack x = {sum - fa_sum8(due->sum[i]), 0.0f};

    if constexpr (LEVEL == FA_FULL) {
        const float least = FA_IS_HALF(KIND) ? 0.25f * FA_P_SCALE : 0.25f;
        float keys = fa_sum8(due->weight[i]);
        if (a->softcap != 0) {
            float heavy = fa_sum8(fa_bits<float>(due->best[i] & ~7u));
            float slope = fa_sum8(due->slope[i]) / keys;
            x.heaviest =
                (sum - fa_sum8(due->exact[i])) * slope * (heavy / keys);
            x.all = -fa_sum8(due->sum[i]);
        }
        if (keys < least) {
            x.all *= keys / least;
            x.heaviest *= keys / least;
        }
    }
    /* or the row is NaN anyway */
    x.all = known && x.all == x.all ? x.all : 0.0f;
    x.heaviest = known && x.heaviest == x.heaviest ? x.heaviest : 0.0f;
    return x;
}

/* The first evening of `evenings`: what rows lack is shared out.  place, first:
 * of the queries. */
template <int KIND, int LEVEL, int DIM, int OWN>
static FA_DEVICE void fa_share_lack(float dq[OWN][DIM / 8], fa_due<OWN> *due,
                                    fa_args_in a, uint32_t place, int first,
                                    float whole, int evenings, uint32_t tid)
{
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = first + fa_own_row(OWN, tid, i);
        fa_lack lack = fa_lack_of<KIND, LEVEL>(a, due, i, place, row, whole);
        if (LEVEL == FA_PLAIN && !FA_IS_HALF(KIND)) {
            due->exact[i] = due->sum[i];
        }
        due->sum[i] = lack.heaviest * FA_EVEN_SCALE(KIND);
        due->weight[i] = lack.all * FA_EVEN_SCALE(KIND) / (float)evenings;
        if constexpr (FA_IS_HALF(KIND)) {
#pragma unroll
            for (int e = 0; e < DIM / 8; e++) {
                dq[i][e] *= FA_EVEN_SCALE(KIND);
            }
        }
    }
}

/* In place of dP: what makes of P each key's part of what its row lacks. */
template <int KIND, int OWN>
static FA_DEVICE void fa_even_out(fa_due<OWN> *due, fa_args_in a,
                                  float p[OWN][FA_WALKED],
                                  float dp[OWN][FA_WALKED])
{
    /* A tile's usual part. */
    float usual = (FA_IS_HALF(KIND) ? FA_P_SCALE : 1.0f) * (float)FA_WALK /
                  (float)(a->seqlen_k + FA_WALK - 1);

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        float weight = fa_sum8(fa_sum_walked(p[i]));
        float each = due->weight[i] / fa_max(weight, usual);
        due->sum[i] += weight < usual ? each * (usual - weight) : 0.0f;
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            dp[i][j] = each;
        }
    }
}

/* fa_args.row_sums.  (Rows past the end read the last row's numbers but use
 * none of them, so that no barrier is needed.) */
template <int OWN, typename Number>
static FA_DEVICE void fa_store_row_sums(fa_args_in a, const Number sums[OWN],
                                        uint32_t place, int first, float whole,
                                        uint32_t tid)
{
    uint32_t at = fa_uniform(place);
    int64_t start =
        ((int64_t)(at >> 16) * a->heads + (at & 0xffff)) * a->seqlen_q;

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = first + fa_own_row(OWN, tid, i);
        Number sum = fa_sum8(sums[i]) / (Number)whole;
        if ((tid & 7) == 0 && row < a->seqlen_q) {
            ((FA_GLOBAL Number *)
                 a->rows)[(start + row) * FA_ROW_NUMBERS + FA_DS_SUM] = sum;
        }
    }
}

/* What fa_even_out left, to dq, which is in its units times those of k.
 * `area`: where shares lie. */
template <int KIND, int DIM, int OWN>
static FA_DEVICE void
fa_give_rest(float dq[OWN][DIM / 8], const fa_due<OWN> *due, fa_args_in a,
             float k_scale, uint32_t key_place, fa_lds area, uint32_t tid)
{
    fa_matrix k = fa_matrix_at<KIND>(a, FA_K_AT, key_place);
    bool any = false;

    fa_wave_sync(); /* the last share is read */
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        float weight = fa_bits<float>(due->best[i] & ~7u);
        float all = fa_sum8(weight);
        bool some = weight > 0.0f && due->sum[i] != 0.0f;
        float share = some ? due->sum[i] * k_scale * (weight / all) : 0.0f;
        int key = due->at[i] + (int)(tid & 7) + 8 * (int)(due->best[i] & 7);
        fa_lds_store2(area + tid * 8 + i * (FA_THREADS * 8),
                      (uint32_t)(some ? key : 0), fa_bits<uint32_t>(share));
        any |= some;
    }
    fa_wave_sync();
    if (!fa_any(any)) {
        return;
    }
    fa_steps steps = fa_steps_of<KIND>(&k);
    if (fa_is_wide(&k)) {
        fa_add_keys<KIND, DIM, OWN, true>(dq, &k, &steps, area, tid);
    } else {
        fa_add_keys<KIND, DIM, OWN, false>(dq, &k, &steps, area, tid);
    }
}

#endif
