/* forward: attention over one tile of queries with an online softmax.
 *
 *   O[i] = sum_j softmax_j(scale * Q[i].K[j]) V[j],   j <= i + diagonal
 *
 * Shapes  Q, O (B, H, Sq, D)   K, V (B, Hk, Sk, D)   LSE (B, H, Sq); D at most
 *         DIM, Hk divides H, strides in elements, last dimension contiguous.
 * Types   Q K V O: fp16.  Scores S, row maximum m, row sum l, accumulator:
 *         float.  P: fp16 times 2^12, rounded to nearest; l sums P unrounded.
 * Units   base 2: scale_log2 = |scale| * log2(e), the sign of scale goes into
 *         Q.  m is in units of raw scores.  LSE is stored in natural log.
 * Grid    x = ceil(Sq / 128) from the last tile to the first, so that the
 *         longest causal tiles start first; y = H; z = B.
 * Lanes   256.  Each 32 lanes own 16 rows: lane group g = lane / 8 mod 4 has
 *         rows g, g + 4, g + 8, g + 12; lane c = lane mod 8 has keys c + 8j of
 *         a step in S, and channels 4c + 32u + (0..3) in O.  Rows never leave
 *         their 8 lanes, so wave32 and wave64 run the same code.
 * LDS     Q 256 * DIM bytes, one K or V tile 128 * DIM (they take turns), P of
 *         32 keys 8 KiB: 32 KiB at 64, two workgroups per compute unit.
 * Edges   Rows past Sq repeat the last one and are not stored.  Keys past Sk
 *         or past the diagonal score -inf; a row without keys gives O = 0 and
 *         LSE = -inf.  A NaN or Inf in a key that a row cannot see does not
 *         reach it; other NaN and Inf come out where arithmetic puts them,
 *         except that an Inf in V whose weight is below 2^-37 of the row's
 *         largest may give NaN (0 * Inf).  Price: 22 VALU instructions for
 *         each 2 granules of V in tiles that some row sees in part.
 * Order   keys ascend inside one workgroup, no atomics: repeats bit for bit.
 * Error   at most 2x PyTorch's math path in fp16, against fp64.  LSE within
 *         1e-5 + 5e-7 * max(|LSE|, scale * max_j sum_d |q_d k_jd|); 7e-7 where
 *         all products of a score are equal and their roundings add up.
 *         Observed figures of both: docs/accuracy.md.
 * Source  online softmax, arXiv 1805.02867; FlashAttention-2,
 *         arXiv 2307.08691, algorithm 1.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_FORWARD_H
#define FA_KERNELS_FORWARD_H

#include "stage.h"

/* What one lane holds of its rows and keys. */
enum {
    FA_LANE_ROWS = 4,
    FA_LANE_KEYS = 8,
    FA_LANE_PAIRS = FA_LANE_KEYS / 2,
    FA_HALF_KEYS = 32, /* keys whose P fits the P area */
    FA_P_BYTES = FA_ROWS * FA_HALF_KEYS * 2,
    FA_P_STRIDE = FA_THREADS * 8, /* bytes from P of one i to the next */
    FA_WAVE_ROWS = FA_WAVE / 8 * FA_LANE_ROWS
};

#define FA_Q_BYTES(DIM) (FA_ROWS * (DIM) * 2)
#define FA_KV_BYTES(DIM) (FA_KEYS * (DIM) * 2)
#define FA_LDS_BYTES(DIM) (FA_Q_BYTES(DIM) + FA_KV_BYTES(DIM) + FA_P_BYTES)
#define FA_CHANNELS(DIM) ((DIM) / 8) /* of O in one lane */

/* P is at most 2^12: far from fp16's largest value, and its smallest normal
 * number is then 2^-26 of the row's largest weight. */
#define FA_P_LOG2 12.0f

/* Below every score of finite fp16 vectors (128 * 65504^2 = 5.5e11), and
 * finite, so that a row that has seen no key needs no special case. */
#define FA_NO_MAX (-1e12f)

/* From here on the rounding of the exponent bias, 12 - m * scale_log2, would
 * move P by more than fp16 can tell, in the end out of its range; the maximum
 * is then subtracted from the scores first. */
#define FA_BIG_BIAS 1024.0f

static FA_DEVICE int fa_row_of(uint32_t tid, int i)
{
    return (int)((tid >> 5) * 16 + ((tid >> 3) & 3)) + 4 * i;
}

/* The last key that a row sees; rows past the end repeat the last one. */
static FA_DEVICE int fa_last_key(const fa_args *a, int row)
{
    return fa_min_int(fa_min_int(row, a->seqlen_q - 1) + a->diagonal,
                      a->seqlen_k - 1);
}

/* S = Q K^T for 4 rows and 8 keys, over the granules that the head dim has.
 * One granule at a time: unrolling further makes the compiler hoist all LDS
 * reads and spill.  A row is a power of two bytes, so XOR with the granule's
 * offset undoes the granule order that stage.h describes. */
template <int DIM>
static FA_DEVICE void fa_scores(float s[FA_LANE_ROWS][FA_LANE_KEYS], fa_lds q,
                                fa_lds k, int granules, uint32_t tid)
{
    enum { ROW = DIM * 2 };
    uint32_t g = (tid >> 3) & 3;
    uint32_t c = tid & 7;
    uint32_t q_base = fa_row_of(tid, 0) * ROW + (g << 4);
    uint32_t k_base = c * ROW + (c << 4);

#pragma unroll
    for (int i = 0; i < FA_LANE_ROWS; i++) {
#pragma unroll
        for (int j = 0; j < FA_LANE_KEYS; j++) {
            s[i][j] = 0.0f;
        }
    }
#pragma unroll 1
    for (int x = 0; x < granules * 16; x += 16) {
#pragma unroll
        for (int half = 0; half < 16; half += 8) {
            u32x2 qx[FA_LANE_ROWS];
            u32x2 kx[FA_LANE_KEYS];
#pragma unroll
            for (int i = 0; i < FA_LANE_ROWS; i++) {
                qx[i] = fa_lds_load2(q + (q_base ^ (x + half)) + 4 * i * ROW);
            }
#pragma unroll
            for (int j = 0; j < FA_LANE_KEYS; j++) {
                kx[j] = fa_lds_load2(k + (k_base ^ (x + half)) + 8 * j * ROW);
            }
#pragma unroll
            for (int i = 0; i < FA_LANE_ROWS; i++) {
#pragma unroll
                for (int j = 0; j < FA_LANE_KEYS; j++) {
                    s[i][j] = fa_dot2(qx[i].x, kx[j].x, s[i][j]);
                    s[i][j] = fa_dot2(qx[i].y, kx[j].y, s[i][j]);
                }
            }
        }
    }
}

/* Scores of keys that a row does not see become -inf. */
static FA_DEVICE void fa_mask(float s[FA_LANE_ROWS][FA_LANE_KEYS],
                              const fa_args *a, int first, int key,
                              uint32_t tid)
{
#pragma unroll
    for (int i = 0; i < FA_LANE_ROWS; i++) {
        int last = fa_last_key(a, first + fa_row_of(tid, i));
        int own = last - key - (int)(tid & 7);
#pragma unroll
        for (int j = 0; j < FA_LANE_KEYS; j++) {
            s[i][j] = 8 * j <= own ? s[i][j] : -FA_INFINITY;
        }
    }
}

/* Takes this lane's 8 of a row's next 64 scores, for each of its rows, into
 * m, l and o, and leaves their weights in p: p[i][n] is the pair of keys c + 16n and c + 16n + 8. */
template <int DIM>
static FA_DEVICE void fa_softmax(float s[FA_LANE_ROWS][FA_LANE_KEYS],
                                 uint32_t p[FA_LANE_ROWS][FA_LANE_PAIRS],
                                 float m[FA_LANE_ROWS], float l[FA_LANE_ROWS],
                                 float o[FA_LANE_ROWS][FA_CHANNELS(DIM)],
                                 float scale_log2)
{
    float top[FA_LANE_ROWS];
    float bias[FA_LANE_ROWS];
    float big = 0.0f;
    bool moved = false;

#pragma unroll
    for (int i = 0; i < FA_LANE_ROWS; i++) {
        top[i] = s[i][0];
#pragma unroll
        for (int j = 1; j < FA_LANE_KEYS; j++) {
            top[i] = fa_max(top[i], s[i][j]);
        }
        top[i] = fa_max(m[i], fa_max8(top[i]));
        moved |= top[i] > m[i];
        bias[i] = fa_fma(-top[i], scale_log2, FA_P_LOG2);
        big = fa_max(big, __builtin_fabsf(bias[i]));
    }
    if (fa_any(moved)) {
#pragma unroll
        for (int i = 0; i < FA_LANE_ROWS; i++) {
            float old = fa_fma(-m[i], scale_log2, FA_P_LOG2);
            float shrink = fa_exp2(bias[i] - old);
            m[i] = top[i];
            l[i] *= shrink;
#pragma unroll
            for (int e = 0; e < FA_CHANNELS(DIM); e++) {
                o[i][e] *= shrink;
            }
        }
    }
    if (fa_any(big > FA_BIG_BIAS)) {
#pragma unroll
        for (int i = 0; i < FA_LANE_ROWS; i++) {
            /* Row by row: a result must not depend on its neighbours. */
            bool own = __builtin_fabsf(bias[i]) > FA_BIG_BIAS;
            float less = own ? top[i] : 0.0f;
            bias[i] = own ? FA_P_LOG2 : bias[i];
#pragma unroll
            for (int j = 0; j < FA_LANE_KEYS; j++) {
                s[i][j] -= less;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < FA_LANE_ROWS; i++) {
#pragma unroll
        for (int j = 0; j < FA_LANE_KEYS; j++) {
            s[i][j] = fa_exp2(fa_fma(s[i][j], scale_log2, bias[i]));
            l[i] += s[i][j];
        }
#pragma unroll
        for (int n = 0; n < FA_LANE_PAIRS; n++) {
            p[i][n] = fa_pack_halves(s[i][2 * n], s[i][2 * n + 1]);
        }
    }
}

/* Hands P of one half (32 keys) to the lanes of the row: each lane writes its
 * 4 keys of a row as one 8-byte unit, fa_values reads the units of all 8 lanes
 * in turn.  Units lie in the order of the threads, which is free of bank
 * conflicts both ways. */
static FA_DEVICE void
fa_share_weights(fa_lds area, const uint32_t p[FA_LANE_ROWS][FA_LANE_PAIRS],
                 int half, uint32_t tid)
{
    fa_wave_sync(); /* the units of the last half are read */
#pragma unroll
    for (int i = 0; i < FA_LANE_ROWS; i++) {
        fa_lds_store2(area + tid * 8 + i * FA_P_STRIDE, p[i][2 * half],
                      p[i][2 * half + 1]);
    }
    fa_wave_sync();
}

/* O += P V.  Unit number `unit` comes from lane c = unit of the row and has
 * its weights for V's pairs 2 * unit (x) and 2 * unit + 1 (y) of the half.
 * In bytes, P steps by 8 from unit to unit, by 64 from one group of 8 lanes
 * to the next and by FA_P_STRIDE from i to i + 1; V by ROW from pair to pair,
 * so by 2 * ROW from unit to unit, by 16 (4 channels of a pair) from lane to
 * lane and by 128 from u to u + 1. */
template <int DIM>
static FA_DEVICE void fa_values(float o[FA_LANE_ROWS][FA_CHANNELS(DIM)],
                                const uint32_t p[FA_LANE_ROWS][FA_LANE_PAIRS],
                                fa_lds v, fa_lds area, uint32_t tid)
{
    enum { ROW = DIM * 4 };

#pragma unroll
    for (int half = 0; half < FA_KEYS / FA_HALF_KEYS; half++) {
        fa_share_weights(area, p, half, tid);
#pragma unroll 1
        for (int unit = 0; unit < 8; unit++) {
            fa_lds from = v + (tid & 7) * 16 + (unit + 8 * half) * 2 * ROW;
            u32x2 px[FA_LANE_ROWS];
#pragma unroll
            for (int i = 0; i < FA_LANE_ROWS; i++) {
                px[i] = fa_lds_load2(area + (tid >> 3) * 64 + unit * 8 +
                                     i * FA_P_STRIDE);
            }
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
#pragma unroll
                for (int u = 0; u < DIM / 32; u++) {
                    u32x4 x = fa_lds_load4(from + pair * ROW + u * 128);
                    uint32_t vx[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int e = 0; e < 16; e++) {
                        float *to = &o[e / 4][4 * u + e % 4];
                        *to = fa_dot2(pair ? px[e / 4].y : px[e / 4].x,
                                      vx[e % 4], *to);
                    }
                }
            }
        }
    }
}

/* Adds what fa_commit_values kept out of LDS: every NaN and Inf in the V rows
 * from key `from` on, to the rows that see them.  Rare, so one key at a time,
 * at the end. */
template <int DIM>
static FA_DEVICE void fa_add_specials(float o[FA_LANE_ROWS][FA_CHANNELS(DIM)],
                                      const fa_args *a, const fa_matrix *v,
                                      int first, int from, uint32_t tid)
{
    int end = fa_last_key(a, first + FA_ROWS - 1) + 1;

#pragma unroll 1
    for (int key = from; key < end; key++) {
#pragma unroll
        for (int e = 0; e < FA_CHANNELS(DIM); e++) {
            int channel = 4 * (int)(tid & 7) + e / 4 * 32 + e % 4;
            uint32_t x = fa_load_half(v, key, channel);
            bool special = (x & 0x7c00) == 0x7c00;
#pragma unroll
            for (int i = 0; i < FA_LANE_ROWS; i++) {
                int row = first + fa_row_of(tid, i);
                bool seen = key <= fa_last_key(a, row);
                o[i][e] += special && seen ? fa_half_to_float(x) : 0.0f;
            }
        }
    }
}

/* This lane's channels of one row of O, rounded to fp16. */
template <int DIM, int LOAD>
static FA_DEVICE void fa_store_channels(FA_GLOBAL uint16_t *out,
                                        const float o[FA_CHANNELS(DIM)],
                                        float share, int head_dim, uint32_t tid)
{
#pragma unroll
    for (int u = 0; u < DIM / 32; u++) {
        int channel = 4 * (int)(tid & 7) + 32 * u;
        u32x2 x;

        x.x = fa_pack_halves(o[4 * u] * share, o[4 * u + 1] * share);
        x.y = fa_pack_halves(o[4 * u + 2] * share, o[4 * u + 3] * share);
        if (LOAD == FA_LOAD_WIDE) {
            if (channel < head_dim) {
                *(FA_GLOBAL u32x2 *)(out + channel) = x;
            }
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                uint32_t pair = e < 2 ? x.x : x.y;
                if (channel + e < head_dim) {
                    out[channel + e] = (uint16_t)(pair >> (e % 2 * 16));
                }
            }
        }
    }
}

template <int DIM, int LOAD>
static FA_DEVICE void
fa_store_rows(const fa_args *a, int first, int head, int batch, uint32_t tid,
              const float m[FA_LANE_ROWS], const float l[FA_LANE_ROWS],
              const float o[FA_LANE_ROWS][FA_CHANNELS(DIM)], float scale_log2)
{
    const float ln2 = 0.693147180559945f;
    int64_t rows = ((int64_t)batch * a->heads + head) * a->seqlen_q;
    FA_GLOBAL float *lse = (FA_GLOBAL float *)a->lse + rows;
    FA_GLOBAL uint16_t *out = (FA_GLOBAL uint16_t *)a->out +
                              batch * a->out_stride[0] +
                              head * a->out_stride[1];
    float sum[FA_LANE_ROWS];

#pragma unroll
    for (int i = 0; i < FA_LANE_ROWS; i++) {
        sum[i] = fa_sum8(l[i]);
    }
#pragma unroll
    for (int i = 0; i < FA_LANE_ROWS; i++) {
        int row = first + fa_row_of(tid, i);
        bool empty = sum[i] == 0.0f; /* not for NaN, which must come out */
        float bias = fa_fma(-m[i], scale_log2, FA_P_LOG2);
        float share = empty ? 0.0f : fa_rcp(sum[i]);

        if (row >= a->seqlen_q) {
            continue;
        }
        if ((tid & 7) == 0) {
            lse[row] = empty ? -FA_INFINITY : (fa_log2(sum[i]) - bias) * ln2;
        }
        fa_store_channels<DIM, LOAD>(out + row * a->out_stride[2], o[i], share,
                                     a->head_dim, tid);
    }
}

/* Key tiles that rows first .. first + rows - 1 need. */
static FA_DEVICE int fa_tiles(const fa_args *a, int first, int rows)
{
    int key = fa_last_key(a, first + rows - 1);

    return first < a->seqlen_q && key >= 0 ? key / FA_KEYS + 1 : 0;
}

/* Key tiles that every row of the workgroup sees to the end of the keys. */
static FA_DEVICE int fa_common_tiles(const fa_args *a, int first)
{
    int key = first + a->diagonal;

    return key < 0                  ? 0
           : key >= a->seqlen_k - 1 ? fa_tiles(a, first, FA_ROWS)
                                    : (key + 1) / FA_KEYS;
}

/* Whether x holds in any wave of the workgroup. Nobody has used the LDS at
 * `lds` since the last barrier. */
static FA_DEVICE bool fa_any_wave(bool x, fa_lds lds, uint32_t tid)
{
    if (tid % FA_WAVE == 0) {
        fa_lds_store1(lds + tid / FA_WAVE * 4, x);
    }
    fa_barrier();
    return fa_any(fa_lds_load1(lds + tid % (FA_THREADS / FA_WAVE) * 4) != 0);
}

/* Rows that have seen no key. */
template <int DIM>
static FA_DEVICE void fa_start_rows(float m[FA_LANE_ROWS],
                                    float l[FA_LANE_ROWS],
                                    float o[FA_LANE_ROWS][FA_CHANNELS(DIM)])
{
#pragma unroll
    for (int i = 0; i < FA_LANE_ROWS; i++) {
        m[i] = FA_NO_MAX;
        l[i] = 0.0f;
#pragma unroll
        for (int e = 0; e < FA_CHANNELS(DIM); e++) {
            o[i][e] = 0.0f;
        }
    }
}

template <int DIM, int LOAD>
static FA_DEVICE void fa_forward(const fa_args *a, fa_lds lds)
{
    static_assert(FA_THREADS == FA_ROWS / FA_LANE_ROWS * 8, "8 lanes a row");
    static_assert(FA_KEYS == FA_LANE_KEYS * 8, "8 lanes share the keys");
    static_assert(FA_FETCH(DIM) % 2 == 0, "V is fetched in pairs");

    fa_lds q_tile = lds;
    fa_lds kv_tile = lds + FA_Q_BYTES(DIM);
    fa_lds p_area = kv_tile + FA_KV_BYTES(DIM);
    uint32_t tid = fa_thread();
    int head = fa_group_y();
    int batch = fa_group_z();
    int last_tile = (a->seqlen_q - 1) / FA_ROWS;
    int first = (last_tile - (int)fa_group_x()) * FA_ROWS;
    int wave_first = first + (int)fa_uniform(tid / FA_WAVE) * FA_WAVE_ROWS;
    int tiles = fa_tiles(a, first, FA_ROWS);
    int wave_tiles = fa_tiles(a, wave_first, FA_WAVE_ROWS);
    int granules = (a->head_dim + FA_GRANULE - 1) / FA_GRANULE;
    int common_tiles = fa_common_tiles(a, first);
    bool special = false;
    /* 0 * -inf is NaN, and scale may be 0. */
    float scale_log2 = fa_max(a->scale_log2, 0x1p-126f);
    fa_matrix q =
        fa_matrix_of(a->q, a->q_stride, batch, head, a->seqlen_q, a->head_dim);
    fa_matrix k = fa_matrix_of(a->k, a->k_stride, batch, head / a->group,
                               a->seqlen_k, a->head_dim);
    fa_matrix v = fa_matrix_of(a->v, a->v_stride, batch, head / a->group,
                               a->seqlen_k, a->head_dim);
    float m[FA_LANE_ROWS];
    float l[FA_LANE_ROWS];
    float o[FA_LANE_ROWS][FA_CHANNELS(DIM)];
    u32x4 got[FA_FETCH(DIM)];

    fa_start_rows<DIM>(m, l, o);
    if (tiles > 0) {
        fa_fetch_keys<DIM, LOAD>(got, &k, 0, tid);
        fa_stage_queries<DIM, LOAD>(q_tile, &q, first, a->q_flip, tid);
        fa_commit_keys<DIM, LOAD>(kv_tile, got, &k, 0, tid);
    }
    for (int t = 0; t < tiles; t++) {
        int key = t * FA_KEYS;
        uint32_t p[FA_LANE_ROWS][FA_LANE_PAIRS];

        fa_barrier(); /* K is in LDS */
        tid = fa_opaque(tid);
        fa_fetch_values<DIM, LOAD>(got, &v, key, tid);
        if (t < wave_tiles) {
            float s[FA_LANE_ROWS][FA_LANE_KEYS];
            fa_scores<DIM>(s, q_tile, kv_tile, granules, tid);
            if (key + FA_KEYS - 1 > fa_last_key(a, wave_first)) {
                fa_mask(s, a, first, key, tid);
            }
            fa_softmax<DIM>(s, p, m, l, o, scale_log2);
        }
        fa_barrier(); /* K is read */
        tid = fa_opaque(tid);
        special |= fa_commit_values<DIM, LOAD>(kv_tile, got, &v, key,
                                               t >= common_tiles, tid);
        fa_barrier(); /* V is in LDS */
        if (t + 1 < tiles) {
            fa_fetch_keys<DIM, LOAD>(got, &k, key + FA_KEYS, tid);
        }
        if (t < wave_tiles) {
            fa_values<DIM>(o, p, kv_tile, p_area, tid);
        }
        if (t + 1 < tiles) {
            fa_barrier(); /* V is read */
            fa_commit_keys<DIM, LOAD>(kv_tile, got, &k, key + FA_KEYS, tid);
        }
    }
    if (common_tiles < tiles && fa_any_wave(special, q_tile, tid)) {
        fa_add_specials<DIM>(o, a, &v, first, common_tiles * FA_KEYS, tid);
    }
    fa_store_rows<DIM, LOAD>(a, first, head, batch, tid, m, l, o, scale_log2);
}

#endif
