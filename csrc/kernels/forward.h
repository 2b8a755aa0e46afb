/* forward: attention over one tile of queries with an online softmax.
 *
 *   O[i] = sum_j softmax_j(scale * Q[i].K[j]) V[j],   j <= i + diagonal
 *
 * Shapes  Q (B, H, Sq, D)   K (B, Hk, Sk, D)   V (B, Hk, Sk, Dv)
 *         O (B, H, Sq, Dv)   LSE (B, H, Sq); D, Dv at most DIM, Hk divides H.
 * Types   by KIND, see number.h.  Scores S, row maximum m, row sum l and
 *         accumulator: fp32, or fp64.  With fp16 operands the weights P are
 *         fp16 times 2^12, rounded to nearest; l sums P unrounded, but O is
 *         over the sum of what P was rounded to: what all values have in
 *         common then stays as it is, which delta needs.
 * Units   base 2: scale_log2 = |scale| * log2(e), the sign of scale goes into
 *         Q.  m is in units of raw scores.  LSE is stored in natural log.
 * Grid    x = ceil(Sq / ROWS) from the last tile to the first, so that the
 *         longest causal tiles start first; y = H; z = B.
 * Lanes   256; product.h.
 * LDS     a chunk of Q, a chunk of K, and P of one share; V takes the place
 *         of both chunks, or of K's alone if Q has one chunk and stays.
 * Edges   Rows past Sq are zero and are not stored.  Keys past Sk or past the
 *         diagonal score -inf; a row without keys gives O = 0, LSE = -inf.
 *         A NaN or Inf in a key that a row cannot see does not reach it;
 *         other NaN and Inf come out where arithmetic puts them, except that
 *         with fp16 operands an Inf in V whose weight is below 2^-37 of the
 *         row's largest may give NaN (0 * Inf).
 * Order   keys ascend inside one workgroup, no atomics: repeats bit for bit.
 * Error   at most 2x PyTorch's math path in the same type, against fp64.  LSE
 *         within 1e-5 + 5e-7 * max(|LSE|, scale * max_j sum_d |q_d k_jd|);
 *         7e-7 where all products of a score are equal and their roundings
 *         add up.  Observed figures of both: docs/accuracy.md.
 * Source  online softmax, arXiv 1805.02867; FlashAttention-2,
 *         arXiv 2307.08691, algorithm 1.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_FORWARD_H
#define FA_KERNELS_FORWARD_H

#include "fit.h"
#include "score.h"
#include "softmax.h"
#include "step.h"
#include "store.h"
#include "tour.h"

/* Adds what fa_commit_columns kept out of LDS: every NaN and Inf in the V rows
 * of tiles that not all rows see, to the rows that see them.  Rare, so one key
 * at a time, at the end. */
template <int KIND, int DIM, int OWN, int LEVEL>
static FA_DEVICE void
fa_add_specials(fa_rows<KIND, DIM, OWN> *rows, fa_args_in a, uint32_t place,
                const fa_matrix *v, int first, uint32_t tid)
{
    typedef fa_shape<KIND, DIM, OWN> shape;
    typedef FA_NUMBER(KIND) number;
    fa_steps steps = fa_steps_of<KIND>(v);
    fa_tour tour;
    int t =
        fa_start_tour<LEVEL, FA_FORWARD>(a, &tour, place, first, shape::ROWS);

    int key = t * FA_WALK;

    /* One loop, because for each the compiler would move the sums about. */
#pragma unroll 1
    while (t < tour.range.end) {
        bool sees_all =
            fa_all_seen<LEVEL, FA_FORWARD>(a, first, shape::ROWS, t * FA_WALK);
        bool cleared = fa_may_hide<LEVEL>(a) || !sees_all;
        uint32_t seen = 0; /* bit i: by owned row i */
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int row = first + fa_own_row(OWN, tid, i);
            bool sees = cleared && fa_sees<KIND, LEVEL>(a, place, row, key);
            seen |= (uint32_t)sees << i;
            fa_keep_order();
        }
#pragma unroll
        for (int e = 0; e < shape::CHANNELS; e++) {
            fa_keep_order();
            /* Or the addresses of all channels are kept. */
            uint32_t lane = fa_opaque(tid);
            int channel = fa_channel(shape::GROUP, lane, e / shape::GROUP) +
                          e % shape::GROUP;
            number x = fa_load_element<KIND>(v, &steps, key, channel);
            x = x - x == 0 ? (number)0 : x;
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                /* Comparisons would take two scalar registers each. */
                uint32_t own = seen << (31 - i);
                rows->out[i][e] += fa_masked(x, (uint32_t)((int)own >> 31));
            }
        }
        key += cleared ? 1 : (int)FA_WALK;
        if (key % FA_WALK == 0 || key >= a->seqlen_k) {
            t = fa_tile_from<LEVEL>(a, &tour, place, first, t + 1);
            key = t * FA_WALK;
        }
    }
}

/* Whether x holds in any wave of the workgroup. */
static FA_DEVICE bool fa_any_wave(bool x, fa_lds lds, uint32_t tid)
{
    bool wave = fa_any(x);

    fa_barrier(); /* what was in LDS is read */
    if (tid % FA_WAVE == 0) {
        fa_lds_store1(lds + tid / FA_WAVE * 4, wave);
    }
    fa_barrier();
    return fa_any(fa_lds_load1(lds + tid % (FA_THREADS / FA_WAVE) * 4) != 0);
}

/* The logarithm of a row's sum of weights in base 2 is log2_sum - bias; lse is
 * what is stored of it, rounded and in natural logarithm.  What lse lacks. */
template <int KIND>
static FA_DEVICE float fa_lost(float lse, float sum, float log2_sum, float bias,
                               float most, float scale_log2)
{
    const float log2_e = 1.44269502f;
    const float ln2 = 0.693147181f;
    const float ln2_low = -1.904654299957768e-9f; /* what ln(2) has beyond */
    float log2_lse = log2_sum - bias;
    float of_sum = log2_lse + bias;
    /* The rounding of the difference, and of the hardware's logarithm. */
    float lost = (log2_sum - of_sum) + ((of_sum - log2_lse) - bias) +
                 fa_fma(sum, fa_exp2(-log2_sum), -1.0f) * log2_e;

    if (fa_abs(bias) > FA_BIG_BIAS(KIND)) {
        /* The weights were taken with the unrounded product. */
        lost -= fa_fma(-most, scale_log2, -bias) + FA_P_LOG2(KIND);
    }
    lost = lost * ln2 + fa_fma(log2_lse, ln2, -lse) + log2_lse * ln2_low;
    return fa_if_finite(lost);
}

/* O, LSE, and what rounding takes from them if wanted. */
template <int KIND, int DIM, int OWN, int LDS_BYTES, int LEVEL>
static FA_DEVICE void
fa_store_rows(fa_args_in a, const fa_rows<KIND, DIM, OWN> *rows, int first,
              uint32_t place, const FA_NUMBER(KIND) scale_log2[OWN],
              float v_scale, fa_lds lds, uint32_t tid)
{
    typedef fa_shape<KIND, DIM, OWN> shape;
    typedef FA_NUMBER(KIND) number;
    typedef FA_OUTER(KIND) outer;
    const number ln2 = (number)0.6931471805599453;
    int head = (int)(fa_uniform(place) & 0xffff);
    int batch = (int)(fa_uniform(place) >> 16);
    int64_t start = ((int64_t)batch * a->heads + head) * a->seqlen_q;
    FA_GLOBAL outer *lse = (FA_GLOBAL outer *)a->lse + start;
    bool wide = (a->wide & FA_SET_OUT) != 0;
    int parts = a->out_lo.data == nullptr ? 1 : 2;
    number share[OWN];

    if (!wide) {
        fa_barrier(); /* fa_store_narrow uses all of the LDS */
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        number packed;
        number sum = fa_both_sums<KIND>(rows->sum[i], &packed, tid);
        if constexpr (FA_KEEPS_RESTS(KIND, DIM)) {
            sum += fa_if_finite(fa_sum8(rows->rest_of_sum[i]));
            packed = sum;
        }
        number bias = fa_bias<KIND>(rows->most[i], scale_log2[i]);
        int row = first + fa_own_row(OWN, tid, i);
        bool empty = sum == 0; /* not for NaN, which must come out */

        share[i] = empty ? (number)0 : (number)1 / packed;
        if (LEVEL == FA_FULL) {
            share[i] *= (number)a->keep_scale;
        }
        if ((tid & 7) == 0 && row < a->seqlen_q) {
            number log2_sum = fa_log2(sum);
            number x = empty ? (number)-FA_INFINITY : (log2_sum - bias) * ln2;
            lse[row] = (FA_OUTER(KIND))x;
            if constexpr (KIND == FA_EXACT32) {
                if (a->lse_lo != nullptr) {
                    float lost = (float)(x - (number)(float)x);
                    ((FA_GLOBAL float *)a->lse_lo)[start + row] =
                        fa_if_finite(lost);
                }
            } else if constexpr (KIND != FA_F64) {
                if (a->lse_lo != nullptr) {
                    ((FA_GLOBAL float *)a->lse_lo)[start + row] = fa_lost<KIND>(
                        x, sum, log2_sum, bias, rows->most[i], scale_log2[i]);
                }
            }
        }
    }
    /* The same code for both, because it is long. */
#pragma unroll 1
    for (int part = 0; part < parts; part++) {
        number lift = fa_stored_of<KIND>(a) == FA_F16 ? FA_LOW_SCALE : 1.0f;
        fa_output out =
            fa_output_of(a, part == 0 ? FA_VIEW(out) : FA_VIEW(out_lo), wide,
                         fa_stored_of<KIND>(a), batch, head, a->head_dim_v);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int row = first + fa_own_row(OWN, tid, i);
            number own = fa_opaque(share[i]); /* or both parts are kept */
            number x[shape::CHANNELS];
#pragma unroll
            for (int e = 0; e < shape::CHANNELS; e++) {
                x[e] = rows->out[i][e];
                if constexpr (FA_KEEPS_RESTS(KIND, DIM)) {
                    x[e] += fa_if_finite(rows->rest[i][e]);
                }
                x[e] *= own;
                if constexpr (KIND == FA_BF16) {
                    x[e] *= fa_inverse_power(v_scale);
                }
                x[e] -=
                    part == 0 ? (number)0 : fa_rounded<KIND>(out.stored, x[e]);
                x[e] *= part == 0 ? (number)1 : lift;
            }
            if (!out.wide) {
                fa_store_narrow<KIND, DIM, LDS_BYTES>(
                    &out, row, x, row < a->seqlen_q, lds, tid);
            } else if (row < a->seqlen_q) {
                fa_store_wide<KIND, DIM>(&out, row, x, tid);
            }
        }
    }
}

/* fp32 needs its registers for other things than long stages. */
template <int KIND, int DIM, int OWN>
struct fa_forward_layout : fa_layout<KIND, DIM, OWN, 1, KIND == FA_F32 ? 1 : 8,
                                     DIM / 8 * sizeof(FA_NUMBER(KIND)) >= 96> {
};

/* FA_BF16: scores of scaled keys become what they would be without; own: what
 * else of each row. */
template <int KIND, int OWN>
static FA_DEVICE void fa_undo_keys(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                   const FA_NUMBER(KIND) own[OWN], fa_lds area,
                                   uint32_t tid)
{
    FA_NUMBER(KIND) undo[FA_WALKED];

    fa_get_walked<KIND>(undo, area, 0, tid);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            s[i][j] = s[i][j] * undo[j] * own[i];
        }
    }
}

/* Scores become weights: p, and the sums of rows. */
template <int KIND, int DIM, int OWN, int LEVEL>
static FA_DEVICE void
fa_take_scores(fa_rows<KIND, DIM, OWN> *rows, FA_NUMBER(KIND) s[OWN][FA_WALKED],
               fa_weights<KIND> p[OWN], const FA_NUMBER(KIND) scale_log2[OWN],
               const FA_NUMBER(KIND) per_unit[OWN], fa_args_in a,
               uint32_t place, int first, int wave_first, int key, uint32_t tid)
{
    enum { WAVE_ROWS = fa_shape<KIND, DIM, OWN>::WAVE_ROWS };

    a = fa_again(a);
    if constexpr (LEVEL == FA_FULL) {
        fa_make_scores<KIND, OWN, FA_FORWARD>(s, s, scale_log2, per_unit, a,
                                              place, first, key, tid);
        a = fa_again(a);
    }
    if (!fa_all_seen<LEVEL, FA_FORWARD>(a, wave_first, WAVE_ROWS, key)) {
        fa_hide<KIND, OWN, LEVEL, FA_FORWARD, false>(
            s, s, (FA_NUMBER(KIND)) - FA_INFINITY, a, first, key, tid);
    }
    fa_softmax(rows, s, p, scale_log2, tid);
    if constexpr (LEVEL == FA_FULL) {
        a = fa_again(a);
        if (a->seed != nullptr) {
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                fa_drop_weights<KIND>(&p[i], a, place,
                                      first + fa_own_row(OWN, tid, i),
                                      key + (int)(tid & 7));
                fa_keep_order(); /* or all calls are made at once */
            }
        }
    }
}

template <int KIND, int DIM, int OWN, int LEVEL>
static FA_DEVICE void fa_forward(fa_args_in a, fa_lds lds)
{
    typedef fa_forward_layout<KIND, DIM, OWN> L;
    typedef typename L::number number;
    enum { ROWS = L::ROWS, WAVE_ROWS = L::shape::WAVE_ROWS };

    uint32_t tid = fa_thread();
    int last_tile = (a->seqlen_q - 1) / ROWS;
    int first = (last_tile - (int)fa_group_x()) * ROWS;
    int wave_first = first + (int)fa_uniform(tid / FA_WAVE) * WAVE_ROWS;
    fa_range wave = fa_range_of<LEVEL, FA_FORWARD>(a, wave_first, WAVE_ROWS);
    bool special = false;
    uint32_t place = fa_place<L, LEVEL>(fa_group_z(), fa_group_y());
    uint32_t key_place =
        fa_place<L, LEVEL>(fa_group_z(), fa_group_y() / (uint32_t)a->group);
    fa_rows<KIND, DIM, OWN> rows;
    fa_staged<L> staged;
    fa_tour tour;
    fa_fit fit;
    float v_scale = 1.0f;
    number scale_log2[OWN];
    number per_unit[OWN];
    number undo_row[OWN]; /* FA_BF16, FA_FULL */

    if (fa_left_to_other<KIND, FA_FORWARD>(a, first, place, &fit,
                                           lds + L::AREA_AT, tid)) {
        return;
    }
    if constexpr (KIND == FA_BF16) {
        v_scale = fit.scale[FA_V_AT];
    }
    /* 0 * -inf is NaN, and scale may be 0. */
    number uniform =
        fa_scalar(fa_max(fa_unit<KIND, LEVEL>(a), (number)0x1p-126));
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = first + fa_own_row(OWN, tid, i);
        scale_log2[i] = uniform;
        undo_row[i] = 1;
        per_unit[i] = LEVEL == FA_FULL ? (number)a->per_unit : (number)0;
        if constexpr (KIND == FA_BF16) {
            float undo_own = fa_undo_scale<KIND>(a, FA_Q_AT, place, row);
            if (LEVEL == FA_FULL) { /* to whose scores something is added */
                undo_row[i] = undo_own;
            } else {
                scale_log2[i] = fa_max(uniform * undo_own, 0x1p-126f);
            }
        }
    }
    fa_start_rows<KIND, DIM, OWN, LEVEL>(&rows, per_unit, a, place, tid);
    int t = fa_start_tour<LEVEL, FA_FORWARD>(a, &tour, place, first, ROWS);
    if (t < tour.range.end) {
        fa_tile q = fa_tile_of(FA_Q_AT, place, first, fa_flip<KIND>(a));
        fa_tile k = fa_tile_of(FA_K_AT, key_place, t * FA_WALK, 0);
        fa_next next;
        fa_set_next(&next, FA_ROWS_OF, &k, &q);
        fa_fetch_next<L>(&staged, a, &next, tid);
        if (L::STAYS) {
            fa_settle<L>(lds, &staged, a, &q, tid);
        }
    }
    while (t < tour.range.end) {
        int key = t * FA_WALK;
        number s[OWN][FA_WALKED];
        fa_weights<KIND> p[OWN];

        a = fa_again(a);
        if (FA_IS_DOUBLE(KIND)) { /* no scalar registers to keep it */
            wave = fa_range_of<LEVEL, FA_FORWARD>(a, wave_first, WAVE_ROWS);
        }
        bool active = fa_is_active(&wave, tour.sink_tiles, t);
        fa_tile q = fa_tile_of(FA_Q_AT, place, first, fa_flip<KIND>(a));
        fa_tile k = fa_tile_of(FA_K_AT, key_place, key, 0);
        fa_tile v = fa_tile_of(FA_V_AT, key_place, key, 0);
        fa_next next;
        float undo = 1.0f; /* of a key */
        if (KIND == FA_BF16) {
            undo = fa_undo_scale<KIND>(a, FA_K_AT, key_place,
                                       key + (int)(tid & (FA_WALK - 1)));
        }
        fa_clear_products<OWN>(s);
        fa_set_next(&next, FA_COLUMNS_OF, &v, &q);
        fa_walk_rows<L, false>(s, a, a->head_dim, lds, lds, &q, &k, undo,
                               KIND == FA_BF16 ? 1 : 0, 0, &staged, &next,
                               active, &tid);
        if (active) {
            if (KIND == FA_BF16) {
                fa_undo_keys<KIND, OWN>(s, undo_row, lds + L::AREA_AT, tid);
            }
            fa_take_scores<KIND, DIM, OWN, LEVEL>(&rows, s, p, scale_log2,
                                                  per_unit, a, place, first,
                                                  wave_first, key, tid);
        }
        a = fa_again(a);
        bool clear = fa_may_hide<LEVEL>(a) ||
                     !fa_all_seen<LEVEL, FA_FORWARD>(a, first, ROWS, key);
        t = fa_tile_from<LEVEL>(a, &tour, place, first, t + 1);
        bool is_last = t >= tour.range.end;
        k.first = is_last ? 0 : t * FA_WALK;
        fa_set_next(&next, is_last ? FA_NOTHING : FA_ROWS_OF, &k, &q);
        special |= fa_walk_columns<L, KIND == FA_F32>(
            rows.out, FA_KEEPS_RESTS(KIND, DIM) ? rows.rest : nullptr, p, a,
            lds, &v, v_scale, clear, &staged, &next, active, &tid);
    }
    a = fa_again(a);
    if (fa_any_wave(special, lds + L::AREA_AT, tid)) {
        fa_matrix v = fa_matrix_at<KIND>(a, FA_V_AT, key_place);
        fa_add_specials<KIND, DIM, OWN, LEVEL>(&rows, a, place, &v, first, tid);
    }
    fa_store_rows<KIND, DIM, OWN, L::END, LEVEL>(
        fa_again(a), &rows, first, place, scale_log2, v_scale, lds, tid);
}

#endif
