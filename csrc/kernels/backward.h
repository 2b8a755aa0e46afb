/* backward: gradients over one tile of keys (dK, dV) or of queries (dQ).
 *
 *   P[i][j]  = exp(scale * Q[i].K[j] - LSE[i])        0 if i does not see j
 *   dP[i][j] = dO[i].V[j]     dS[i][j] = P[i][j] (dP[i][j] - delta[i])
 *   dV[j] = sum_i P[i][j] dO[i]     dK[j] = scale * sum_i dS[i][j] Q[i]
 *   dQ[i] = scale * sum_j dS[i][j] K[j]
 *
 * One piece of code for both: a workgroup owns rows of A and of B and walks
 * over rows of X and Y,
 *
 *   FA_BACKWARD_KV   A = K, B = V    X = Q, Y = dO   of each head of the group
 *   FA_BACKWARD_Q    A = Q, B = dO   X = K, Y = V
 *
 * and forms A X^T and B Y^T, then the sums over Y (dV) and X (dK or dQ).
 *
 * Shapes  forward.h; dO like O, gradients like their tensors.
 * Types   by KIND, see number.h; all sums fp32, or fp64.  With fp16 operands
 *         P is fp16 times 2^12, and dS fp16 times a power of two that follows
 *         from the norms of dO's and V's rows (|P (dP - delta)| is at most
 *         half their product, so it never overflows).
 * Grid    FA_BACKWARD_KV: x = ceil(Sk / ROWS), y = Hk, z = B.
 *         FA_BACKWARD_Q: x = ceil(Sq / ROWS) from the last tile, y = H, z = B.
 * Needs   FA_PREPARE: delta, and for fp16 operands block_of V and dO.
 * LDS     chunks of A and B (or in turn, if they have several), a chunk of X
 *         or Y, shares of P or dS, LSE and delta of 64 queries.
 * Edges   Rows past the end are zero and are not stored.  A query that sees
 *         no key has LSE = -inf and no part in any sum.  A NaN or Inf in a
 *         key that a row cannot see does not reach dQ.
 * Order   walked rows ascend inside one workgroup, no atomics: repeats bit for
 *         bit.
 * Source  FlashAttention-2, arXiv 2307.08691, algorithm 2.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_BACKWARD_H
#define FA_KERNELS_BACKWARD_H

#include "problem.h"
#include "fit.h"

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
static FA_DEVICE FA_NUMBER(KIND) fa_row_bias(fa_args_in a, uint32_t place,
                                             int row)
{
    typedef FA_NUMBER(KIND) number;
    number lse = fa_query_number<number>(a, a->lse, place, row);
    number bias = fa_fma(-lse, (number)1.4426950408889634,
                         (number)FA_WEIGHT_LOG2(KIND));

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
static FA_DEVICE FA_NUMBER(KIND) fa_row_delta(fa_args_in a, uint32_t place,
                                              int row)
{
    typedef FA_NUMBER(KIND) number;
    number delta = fa_query_number<number>(a, a->delta, place, row);

    return row < a->seqlen_q ? delta : (number)0;
}

/* Arrays of numbers of the walked rows, see fa_put_walked. */
enum { FA_BIAS_OF, FA_DELTA_OF, FA_UNDO_X, FA_UNDO_Y, FA_BIAS_LOW_OF = 2 };

#define FA_WALKED_ARRAYS(KIND) \
    ((KIND) == FA_BF16 ? 4 : (KIND) == FA_F32 ? 3 : 2)

/* Thread t looks up number t / 64 of row first + t % 64. */
template <int KIND, int PASS>
static FA_DEVICE FA_NUMBER(KIND) fa_fetch_walked(fa_args_in a, uint32_t place,
                                                 int first, uint32_t tid)
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

/* S becomes P.  Where LSE is so large that its own rounding may take P far
 * above 1, P is held below what fp16 can store. */
template <int KIND, int OWN, int PASS>
static FA_DEVICE void fa_exponentials(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                      const FA_NUMBER(KIND) * bias,
                                      const FA_NUMBER(KIND) * bias_low,
                                      FA_NUMBER(KIND) scale_log2)
{
    typedef FA_NUMBER(KIND) number;
    enum { BIASES = PASS == FA_BACKWARD_KV ? FA_WALKED : OWN };
    const number limit = (number)FA_WEIGHT_LOG2(KIND) + 1;
    number big = 0;

#pragma unroll
    for (int n = 0; n < BIASES; n++) {
        big = fa_max(big, fa_abs(bias[n]));
    }
    bool capped = fa_any(big > (number)1e5 && big < FA_INFINITY);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            int n = PASS == FA_BACKWARD_KV ? j : i;
            s[i][j] = fa_fma(s[i][j], scale_log2, bias[n]);
            if constexpr (KIND == FA_F32) {
                s[i][j] += bias_low[n];
            }
        }
    }
    if (capped) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                s[i][j] = s[i][j] > limit ? limit : s[i][j];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            s[i][j] = fa_exp2(s[i][j]);
        }
    }
}

/* -- the kernel ------------------------------------------------------------ */

template <int KIND, int DIM, int OWN> struct fa_backward_shape {
    typedef fa_shape<KIND, DIM, OWN> shape;
    enum { STAYS = shape::CHUNKS == 1 };
    typedef fa_stage_of<KIND, DIM, OWN, STAYS, (STAYS ? 8 : 1)> stage;
    enum {
        /* A and B are fetched when they are needed: registers are short. */
        LATE = !STAYS,
        WALK_AT = shape::OWN_BYTES * (STAYS ? 2 : 1),
        COLUMNS_AT = STAYS ? WALK_AT : 0,
        TILES = WALK_AT + FA_WALK_BYTES,
        COLUMNS_END = COLUMNS_AT + stage::BYTES,
        AREA_AT = TILES > COLUMNS_END ? TILES : COLUMNS_END,
        UNDO_AT = AREA_AT + shape::SHARE_AREA,
        LDS_BYTES = UNDO_AT + (KIND == FA_BF16 ? shape::ROWS * 2 * 4 : 0)
    };
};

/* The walked tiles of one head: begin <= t < end for the workgroup; a wave
 * needs those with wave_begin <= t < wave_end and can do without a mask in
 * those with full_begin <= t < full_end. */
typedef struct fa_range {
    int begin;
    int end;
    int wave_begin;
    int wave_end;
    int full_begin;
    int full_end;
} fa_range;

template <int PASS>
static FA_DEVICE fa_range fa_range_of(fa_args_in a, int first, int rows,
                                      int wave_first, int wave_rows)
{
    fa_range r;

    if (PASS == FA_BACKWARD_KV) {
        int end = (a->seqlen_q + FA_WALK - 1) / FA_WALK;
        r.begin = fa_max_int(first - a->diagonal, 0) / FA_WALK;
        r.end = end;
        r.wave_begin = fa_max_int(wave_first - a->diagonal, 0) / FA_WALK;
        r.wave_end = wave_first < a->seqlen_k ? end : 0;
        r.full_begin = (fa_max_int(wave_first + wave_rows - 1 - a->diagonal, 0) +
                        FA_WALK - 1) / FA_WALK;
        r.full_end = a->seqlen_q / FA_WALK;
    } else {
        r.begin = 0;
        r.end = fa_tiles(a, first, rows);
        r.wave_begin = 0;
        r.wave_end = fa_tiles(a, wave_first, wave_rows);
        r.full_begin = 0;
        r.full_end = fa_max_int(fa_last_key(a, wave_first) + 1, 0) / FA_WALK;
    }
    return r;
}

/* Stores sums[i] * factor as rows of a gradient. */
template <int KIND, int DIM, int OWN, int LDS_BYTES>
static FA_DEVICE void fa_store_gradient(
    fa_args_in a, int view, uint32_t set, uint32_t place, int first, int rows,
    int channels, const FA_NUMBER(KIND) sums[OWN][DIM / 8],
    FA_NUMBER(KIND) factor, fa_lds lds, uint32_t tid)
{
    uint32_t at = fa_uniform(place);
    fa_output to = fa_output_of(a, view, (a->wide & set) != 0,
                                fa_stored_grad<KIND>(a), (int)(at >> 16),
                                (int)(at & 0xffff), channels);

    if (!to.wide) {
        fa_barrier(); /* fa_store_narrow uses all of the LDS */
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = first + fa_own_row(OWN, tid, i);
        FA_NUMBER(KIND) x[DIM / 8];
#pragma unroll
        for (int e = 0; e < DIM / 8; e++) {
            x[e] = sums[i][e] * factor;
        }
        if (!to.wide) {
            fa_store_narrow<KIND, DIM, LDS_BYTES>(&to, row, x, row < rows, lds,
                                                  tid);
        } else if (row < rows) {
            fa_store_wide<KIND, DIM>(&to, row, x, tid);
        }
    }
}

template <int KIND, int DIM, int OWN, int PASS>
static FA_DEVICE void fa_backward(fa_args_in a, fa_lds lds)
{
    typedef fa_shape<KIND, DIM, OWN> shape;
    typedef fa_backward_shape<KIND, DIM, OWN> layout;
    typedef typename layout::stage stage;
    typedef FA_NUMBER(KIND) number;
    enum { KV = PASS == FA_BACKWARD_KV, STAYS = layout::STAYS };

    fa_lds own_a = lds;
    fa_lds own_b = lds + (STAYS ? (int)shape::OWN_BYTES : 0);
    fa_lds walk = lds + layout::WALK_AT;
    fa_lds columns = lds + layout::COLUMNS_AT;
    fa_lds area = lds + layout::AREA_AT;
    fa_lds undo = lds + layout::UNDO_AT;
    uint32_t tid = fa_thread();
    int first = shape::ROWS *
                (KV ? (int)fa_group_x()
                    : (a->seqlen_q - 1) / shape::ROWS - (int)fa_group_x());
    int wave_first = first + (int)fa_uniform(tid / FA_WAVE) * shape::WAVE_ROWS;
    fa_range range = fa_range_of<PASS>(a, first, shape::ROWS, wave_first,
                                       shape::WAVE_ROWS);
    /* In vector registers, because scalar ones are scarce. */
    uint32_t own_place = fa_opaque(fa_group_z() << 16 | fa_group_y());
    uint32_t walk_place =
        fa_opaque(fa_group_z() << 16 |
                  (KV ? fa_group_y() * a->group : fa_group_y() / a->group));
    int heads = KV ? a->group : 1;
    bool with_first = !KV || a->dk.data != nullptr;  /* needs dS */
    bool with_second = KV && a->dv.data != nullptr; /* needs P */
    number scale_log2 = fa_scale_log2<KIND>(a);
    uint32_t flip = fa_flip<KIND>(a);
    float lift = 1.0f; /* what dS is multiplied by to fill fp16's range */
    number first_sum[OWN][shape::CHANNELS];  /* dK, or dQ */
    number second_sum[OWN][shape::CHANNELS]; /* dV */
    number own_bias[OWN];
    number own_bias_low[OWN];
    number own_delta[OWN];
    fa_fetched<OWN> got_own;
    fa_fetched<stage::FETCH> got;
    fa_fit fit;

    float x_scale = 1.0f;
    float y_scale = 1.0f;
    if (fa_left_to_other<KIND, PASS>(a, first, own_place, &fit, area, tid)) {
        return;
    }
    if constexpr (FA_IS_HALF(KIND)) {
        lift = fa_lift<PASS>(a, first, shape::ROWS, own_place, area, tid);
    }
    if constexpr (KIND == FA_BF16) {
        x_scale = fit.scale[FA_X_AT(PASS)];
        y_scale = fit.scale[FA_Y_AT(PASS)];
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = first + fa_own_row(OWN, tid, i);
        own_bias[i] = KV ? (number)0 : fa_row_bias<KIND>(a, own_place, row);
        own_bias_low[i] = 0;
        if constexpr (!KV && KIND == FA_F32) {
            own_bias_low[i] = fa_row_bias_low(a, own_place, row);
        }
        own_delta[i] = KV ? (number)0 : fa_row_delta<KIND>(a, own_place, row);
#pragma unroll
        for (int e = 0; e < shape::CHANNELS; e++) {
            first_sum[i][e] = 0;
            second_sum[i][e] = 0;
        }
    }
    if constexpr (KIND == FA_BF16) {
        /* In LDS, because registers are scarce.  Read after a barrier. */
        fa_keep_undo<KIND, OWN>(a, FA_A_AT(PASS), own_place, first, undo, tid);
        fa_keep_undo<KIND, OWN>(a, FA_B_AT(PASS), own_place, first,
                                undo + shape::ROWS * 4, tid);
    }
    if (range.begin < range.end) {
        fa_matrix x = fa_matrix_at<KIND>(a, FA_X_AT(PASS), walk_place);
        fa_fetch_rows<KIND, FA_WALK>(&got, &x, range.begin * FA_WALK, 0, tid);
        if (STAYS) {
            fa_matrix own = fa_matrix_at<KIND>(a, FA_A_AT(PASS), own_place);
            fa_fetch_rows<KIND, shape::ROWS>(&got_own, &own, first, 0, tid);
            fa_commit_rows<KIND, shape::ROWS, FA_OWN_MASK>(
                own_a, &got_own, &own, first, 0, KV ? 0 : flip, tid);
            own = fa_matrix_at<KIND>(a, FA_B_AT(PASS), own_place);
            fa_fetch_rows<KIND, shape::ROWS>(&got_own, &own, first, 0, tid);
            fa_commit_rows<KIND, shape::ROWS, FA_OWN_MASK>(
                own_b, &got_own, &own, first, 0, 0, tid);
        }
    }
    for (int t = range.begin; t < range.end;) {
        int at = t * FA_WALK;
        bool active = t >= range.wave_begin && t < range.wave_end;
        number s[OWN][FA_WALKED];
        number dp[OWN][FA_WALKED];
        number bias[KV ? (int)FA_WALKED : (int)OWN];
        number bias_low[KV ? (int)FA_WALKED : (int)OWN];
        fa_weights<KIND> p[OWN];
        fa_weights<KIND> ds[OWN];

        a = fa_again(a);
        fa_clear_products<OWN>(s);
        /* S = A X^T */
        int granules =
            (a->head_dim + FA_GRANULE(KIND) - 1) / FA_GRANULE(KIND);
        int chunks = STAYS ? 1
                           : (granules + FA_CHUNK_GRANULES - 1) /
                                 FA_CHUNK_GRANULES;
        number walked = 0;
        if (KV || KIND == FA_BF16) {
            walked = fa_fetch_walked<KIND, PASS>(a, walk_place, at, tid);
        }
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
            fa_barrier(); /* the tiles are read */
            tid = fa_opaque(tid);
            if (!STAYS) {
                fa_matrix own = fa_matrix_at<KIND>(fa_again(a), FA_A_AT(PASS), own_place);
                fa_fetch_rows<KIND, shape::ROWS>(&got_own, &own, first, chunk,
                                                 tid);
                fa_commit_rows<KIND, shape::ROWS, FA_OWN_MASK>(
                    own_a, &got_own, &own, first, chunk, KV ? 0 : flip, tid);
            }
            fa_matrix x = fa_matrix_at<KIND>(fa_again(a), FA_X_AT(PASS), walk_place);
            fa_commit_rows<KIND, FA_WALK, FA_WALK_MASK>(
                walk, &got, &x, at, chunk, KV ? flip : 0, tid);
            if ((KV || KIND == FA_BF16) && chunk == 0 &&
                tid < FA_WALKED_ARRAYS(KIND) * FA_WALK) {
                fa_put_walked<KIND>(area, (int)(tid / FA_WALK), walked, tid);
            }
            fa_barrier(); /* A and X are in LDS */
            tid = fa_opaque(tid);
            if (chunk + 1 < chunks) {
                fa_fetch_rows<KIND, FA_WALK>(&got, &x, at, chunk + 1, tid);
            } else if (with_first) {
                fa_matrix y = fa_matrix_at<KIND>(fa_again(a), FA_Y_AT(PASS), walk_place);
                fa_fetch_rows<KIND, FA_WALK>(&got, &y, at, 0, tid);
            } else {
                fa_matrix y = fa_matrix_at<KIND>(fa_again(a), FA_Y_AT(PASS), walk_place);
                fa_fetch_columns<KIND, DIM, stage::SLOTS>(&got, &y, at, 0, tid);
            }
            if (active) {
                fa_multiply_chunk<KIND, DIM, OWN>(
                    s, own_a, walk,
                    fa_min_int(granules - chunk * FA_CHUNK_GRANULES,
                               FA_CHUNK_GRANULES),
                    tid);
            }
        }
        /* dP - delta = B Y^T - delta.  Of scaled rows delta is taken later. */
        number delta[FA_WALKED];
        if (KV) {
            fa_get_walked<KIND>(delta, area, FA_DELTA_OF, tid);
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                dp[i][j] = KIND == FA_BF16 ? (number)0
                           : KV            ? -delta[j]
                                           : -own_delta[i];
            }
        }
        if (with_first) {
            granules = (a->head_dim_v + FA_GRANULE(KIND) - 1) / FA_GRANULE(KIND);
            chunks = STAYS ? 1
                           : (granules + FA_CHUNK_GRANULES - 1) /
                                 FA_CHUNK_GRANULES;
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; chunk++) {
                fa_barrier(); /* the tiles are read */
                tid = fa_opaque(tid);
                if (!STAYS) {
                    fa_matrix own =
                        fa_matrix_at<KIND>(fa_again(a), FA_B_AT(PASS), own_place);
                    fa_fetch_rows<KIND, shape::ROWS>(&got_own, &own, first,
                                                     chunk, tid);
                    fa_commit_rows<KIND, shape::ROWS, FA_OWN_MASK>(
                        own_b, &got_own, &own, first, chunk, 0, tid);
                }
                fa_matrix y = fa_matrix_at<KIND>(fa_again(a), FA_Y_AT(PASS), walk_place);
                fa_commit_rows<KIND, FA_WALK, FA_WALK_MASK>(walk, &got, &y, at,
                                                            chunk, 0, tid);
                fa_barrier(); /* B and Y are in LDS */
                tid = fa_opaque(tid);
                if (chunk + 1 < chunks) {
                    fa_fetch_rows<KIND, FA_WALK>(&got, &y, at, chunk + 1, tid);
                } else if (with_second) {
                    fa_fetch_columns<KIND, DIM, stage::SLOTS>(&got, &y, at, 0,
                                                              tid);
                } else {
                    fa_matrix x =
                        fa_matrix_at<KIND>(fa_again(a), FA_X_AT(PASS), walk_place);
                    fa_fetch_columns<KIND, DIM, stage::SLOTS>(&got, &x, at, 0,
                                                              tid);
                }
                if (active) {
                    fa_multiply_chunk<KIND, DIM, OWN>(
                        dp, own_b, walk,
                        fa_min_int(granules - chunk * FA_CHUNK_GRANULES,
                                   FA_CHUNK_GRANULES),
                        tid);
                }
            }
        }
        /* Also in waves that do not use it: under a branch the compiler keeps
         * products and weights in registers of their own. */
        if (KV) {
            fa_get_walked<KIND>(bias, area, FA_BIAS_OF, tid);
            if constexpr (KIND == FA_F32) {
                fa_get_walked<KIND>(bias_low, area, FA_BIAS_LOW_OF, tid);
            }
        } else {
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                bias[i] = own_bias[i];
                bias_low[i] = own_bias_low[i];
            }
        }
        if constexpr (KIND == FA_BF16) {
            fa_undo_scales<OWN>(s, undo, area, FA_UNDO_X, tid);
            fa_undo_scales<OWN>(dp, undo + shape::ROWS * 4, area, FA_UNDO_Y,
                                tid);
#pragma unroll
            for (int i = 0; i < OWN; i++) {
#pragma unroll
                for (int j = 0; j < FA_WALKED; j++) {
                    dp[i][j] -= KV ? delta[j] : own_delta[i];
                }
            }
        }
        fa_exponentials<KIND, OWN, PASS>(s, bias, bias_low, scale_log2);
        if (t < range.full_begin || t >= range.full_end) {
            fa_mask_products<KIND, OWN, PASS>(s, dp, fa_again(a), first, at,
                                              tid);
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int j = 0; j < FA_WALKED; j++) {
                dp[i][j] *= s[i][j];
                if constexpr (FA_IS_HALF(KIND)) {
                    dp[i][j] *= lift;
                }
            }
            fa_set_weights<KIND>(&p[i], s[i]);
            fa_set_weights<KIND>(&ds[i], dp[i]);
        }
        int next = t + 1;
        uint32_t next_place = walk_place;
        if (KV && next == range.end) {
            heads -= 1;
            next = heads > 0 ? range.begin : range.end;
            next_place = walk_place + 1;
        }
        /* dV += P^T dO */
        if (with_second) {
#pragma unroll
            for (int n = 0; n < stage::STAGES; n++) {
                fa_barrier(); /* the tiles are read */
                tid = fa_opaque(tid);
                fa_matrix y = fa_matrix_at<KIND>(fa_again(a), FA_Y_AT(PASS), walk_place);
                fa_commit_columns<KIND, DIM, stage::SLOTS>(
                    columns, &got, &y, at, n * stage::SLOTS, y_scale, false,
                    tid);
                fa_barrier(); /* dO is in LDS */
                tid = fa_opaque(tid);
                if (n + 1 < stage::STAGES) {
                    fa_fetch_columns<KIND, DIM, stage::SLOTS>(
                        &got, &y, at, (n + 1) * stage::SLOTS, tid);
                } else if (with_first) {
                    fa_matrix x =
                        fa_matrix_at<KIND>(fa_again(a), FA_X_AT(PASS), walk_place);
                    fa_fetch_columns<KIND, DIM, stage::SLOTS>(&got, &x, at, 0,
                                                              tid);
                } else if (next < range.end) {
                    fa_matrix x =
                        fa_matrix_at<KIND>(fa_again(a), FA_X_AT(PASS), next_place);
                    fa_fetch_rows<KIND, FA_WALK>(&got, &x, next * FA_WALK, 0,
                                                 tid);
                }
                if (active) {
#pragma unroll
                    for (int m = 0; m < stage::SHARES; m++) {
                        fa_add_share<KIND, DIM, OWN>(
                            second_sum, p, n * stage::SHARES + m,
                            columns + m * FA_SHARE_BYTES(KIND, DIM), area, tid);
                    }
                }
            }
        }
        /* dK += dS^T Q, or dQ += dS K */
        if (with_first) {
#pragma unroll
            for (int n = 0; n < stage::STAGES; n++) {
                fa_barrier(); /* the tiles are read */
                tid = fa_opaque(tid);
                fa_matrix x = fa_matrix_at<KIND>(fa_again(a), FA_X_AT(PASS), walk_place);
                /* A key that some row does not see must not reach it. */
                bool clear =
                    !KV && t >= fa_common_tiles(a, first, shape::ROWS);
                fa_commit_columns<KIND, DIM, stage::SLOTS>(
                    columns, &got, &x, at, n * stage::SLOTS, x_scale, clear,
                    tid);
                fa_barrier(); /* Q, or K, is in LDS */
                tid = fa_opaque(tid);
                if (n + 1 < stage::STAGES) {
                    fa_fetch_columns<KIND, DIM, stage::SLOTS>(
                        &got, &x, at, (n + 1) * stage::SLOTS, tid);
                } else if (next < range.end) {
                    x = fa_matrix_at<KIND>(fa_again(a), FA_X_AT(PASS), next_place);
                    fa_fetch_rows<KIND, FA_WALK>(&got, &x, next * FA_WALK, 0,
                                                 tid);
                }
                if (active) {
#pragma unroll
                    for (int m = 0; m < stage::SHARES; m++) {
                        fa_add_share<KIND, DIM, OWN>(
                            first_sum, ds, n * stage::SHARES + m,
                            columns + m * FA_SHARE_BYTES(KIND, DIM), area, tid);
                    }
                }
            }
        }
        t = next;
        walk_place = next_place;
    }
    a = fa_again(a);
    number first_factor = (number)a->scale;
    number second_factor = 1;
    if constexpr (FA_IS_HALF(KIND)) {
        const float weight = 0x1p-12f;
        first_factor = first_factor * weight * fa_inverse_power(lift) *
                       fa_inverse_power(x_scale);
        second_factor = weight * fa_inverse_power(y_scale);
    }
    if (with_second) {
        fa_store_gradient<KIND, DIM, OWN, layout::LDS_BYTES>(
            a, FA_VIEW(dv), FA_SET_DV, own_place, first, a->seqlen_k,
            a->head_dim_v, second_sum, second_factor, lds, tid);
    }
    if (with_first) {
        fa_store_gradient<KIND, DIM, OWN, layout::LDS_BYTES>(
            a, KV ? FA_VIEW(dk) : FA_VIEW(dq), KV ? FA_SET_DK : FA_SET_DQ,
            own_place, first, KV ? a->seqlen_k : a->seqlen_q, a->head_dim,
            first_sum, first_factor, lds, tid);
    }
}

#endif
