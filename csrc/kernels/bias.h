/* bias: the gradient of an additive bias.
 *
 *   dBias[b][h][i][j] = dS[b][h][i][j]   of backward.h, before softcap's slope
 *
 * summed over the dimensions in which the result is of size 1 (dbias has
 * stride 0 there).  A workgroup owns one tile of the result and takes in what
 * belongs to it, batch by batch, head by head, tile by tile.
 *
 * Shapes  dBias (B or 1, H or 1, Sq or 1, Sk or 1).
 * Types   sums fp32, or fp64; stored as the bias is.
 * Grid    x = row tiles * key tiles, one of those that are summed over;
 *         y = H or 1; z = B or 1.
 * Needs   FA_PREPARE, as backward.h.
 * Order   always the same, no atomics: repeats bit for bit.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_BIAS_H
#define FA_KERNELS_BIAS_H

#include "backward.h"

/* Where a workgroup begins in one dimension, and what it has to go through. */
typedef struct fa_part {
    int from;
    int to;
} fa_part;

static FA_DEVICE fa_part fa_part_of(bool summed, int all, int own)
{
    fa_part x;
    x.from = summed ? 0 : own;
    x.to = summed ? all : own + 1;
    return x;
}

static FA_DEVICE int fa_tiles_of(int length, int tile)
{
    return (length + tile - 1) / tile;
}

/* dS of one tile, added to `sum`. */
template <int KIND, int DIM, int OWN>
static FA_DEVICE void
fa_add_tile(FA_NUMBER(KIND) sum[OWN][FA_WALKED], fa_args_in a, fa_lds lds,
            const fa_own_numbers<KIND, OWN> *own, uint32_t place, int first,
            int walked, uint32_t *thread)
{
    enum { PASS = FA_BACKWARD_BIAS };
    typedef fa_backward_layout<KIND, DIM, OWN, PASS> L;
    typedef FA_NUMBER(KIND) number;
    fa_walk<KIND, DIM, OWN, PASS> walk;
    fa_staged<L> staged;
    fa_next next;
    number s[OWN][FA_WALKED];
    number dp[OWN][FA_WALKED];
    uint32_t tid = *thread;
    uint32_t at = fa_uniform(place);
    uint32_t key_place =
        fa_place<L, FA_FULL>(at >> 16, (at & 0xffff) / (uint32_t)a->group);
    fa_tile tile_a = fa_tile_of(FA_Q_AT, place, first, fa_flip<KIND>(a));
    fa_tile tile_b = fa_tile_of(FA_DOUT_AT, place, first, 0);
    fa_tile x = fa_tile_of(FA_K_AT, key_place, walked, 0);
    fa_tile y = fa_tile_of(FA_V_AT, key_place, walked, 0);
    uint32_t kept = 0;

    walk.own = *own;
    walk.scale_log2 = fa_unit<KIND, FA_FULL>(a);
    fa_barrier(); /* what was in LDS is read */
    fa_set_next(&next, FA_ROWS_OF, &x, &tile_a);
    fa_fetch_next<L>(&staged, a, &next, tid);
    if (L::STAYS) {
        fa_settle<L>(lds, &staged, a, &tile_a, tid);
        fa_settle<L>(lds + L::B_AT, &staged, a, &tile_b, tid);
    }
    fa_clear_products<OWN>(s);
    fa_clear_products<OWN>(dp);
    fa_set_next(&next, FA_ROWS_OF, &y, &tile_b);
    fa_walk_rows<L, false>(s, a, a->head_dim, lds, lds, &tile_a, &x, 0, 0, 0,
                           &staged, &next, true, &tid);
    fa_set_next(&next, FA_NOTHING, &y, &tile_b);
    fa_walk_rows<L, false>(dp, a, a->head_dim_v, lds + L::B_AT, lds, &tile_b,
                           &y, 0, 0, 0, &staged, &next, true, &tid);
    a = fa_again(a);
    if (a->seed != nullptr) {
        kept = fa_own_kept<OWN>(a, place, first, walked, tid);
    }
    bool masked = !fa_all_seen<FA_FULL, PASS>(a, first, L::ROWS, walked);
    uint32_t seen = fa_add_features(&walk, s, dp, dp, a, lds, place, first,
                                    walked, masked, kept, tid);
    fa_exponentials<KIND, OWN, PASS>(s, own, lds, walk.scale_log2, tid);
    fa_forget_unseen<KIND, OWN, PASS>(s, dp, dp, a, seen);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            sum[i][j] = fa_fma(s[i][j], dp[i][j], sum[i][j]);
        }
    }
    *thread = tid;
}

/* One element of dbias. */
template <int KIND>
static FA_DEVICE void fa_store_bias(fa_args_in a, int batch, int head, int row,
                                    int key, FA_NUMBER(KIND) x)
{
    const FA_CONSTANT fa_view *to = &a->dbias;
    int stored = KIND == FA_F64 || KIND == FA_F32 ? (int)KIND : a->stored_bias;
    fa_global_out at = (fa_global_out)to->data +
                       (batch * to->stride[0] + head * to->stride[1] +
                        row * to->stride[2] + key * to->stride[3]) *
                           fa_bytes_of(stored);

    if constexpr (KIND == FA_F64) {
        *(FA_GLOBAL double *)at = x;
    } else if (stored == FA_F32) {
        *(FA_GLOBAL float *)at = (float)x;
    } else {
        *(FA_GLOBAL uint16_t *)at =
            (uint16_t)fa_pack_as(stored, (float)x, 0.0f);
    }
}

/* The sum over the workgroup's rows, of the key that thread t < 64 has. */
template <int KIND, int OWN>
static FA_DEVICE FA_NUMBER(KIND)
    fa_sum_rows(const FA_NUMBER(KIND) sum[OWN][FA_WALKED], fa_lds lds,
                uint32_t tid)
{
    typedef FA_NUMBER(KIND) number;
    enum { GROUPS = FA_THREADS / 8 };
    FA_LDS number *all = (FA_LDS number *)lds;
    number x = 0;

    fa_barrier(); /* what was in LDS is read */
#pragma unroll
    for (int j = 0; j < FA_WALKED; j++) {
        number own = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            own += sum[i][j];
        }
        all[(tid >> 3) * FA_WALK + (tid & 7) + 8 * j] = own;
    }
    fa_barrier();
#pragma unroll 1
    for (int n = 0; n < GROUPS; n++) {
        x += all[n * FA_WALK + (int)(tid & (FA_WALK - 1))];
    }
    return x;
}

/* Makes each of a row's sums that of all its keys. */
template <int KIND, int OWN>
static FA_DEVICE void fa_sum_keys(FA_NUMBER(KIND) sum[OWN][FA_WALKED])
{
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        FA_NUMBER(KIND) all = 0;
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            all += sum[i][j];
        }
        all = fa_sum8(all);
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            sum[i][j] = all;
        }
    }
}

/* A workgroup's tile of sums, from row and key on. */
template <int KIND, int OWN>
static FA_DEVICE void
fa_store_tile(fa_args_in a, FA_NUMBER(KIND) sum[OWN][FA_WALKED], int first,
              int walked, fa_lds lds, uint32_t tid)
{
    bool all_rows = a->dbias.stride[2] == 0;
    bool all_keys = a->dbias.stride[3] == 0;
    int batch = (int)fa_group_z();
    int head = (int)fa_group_y();
    int c = (int)(tid & 7);

    if (all_keys) {
        fa_sum_keys<KIND, OWN>(sum);
    }
    if (all_rows) {
        FA_NUMBER(KIND) x = fa_sum_rows<KIND, OWN>(sum, lds, tid);
        int key = walked + (int)tid;
        if (tid < FA_WALK && key < a->seqlen_k && (tid == 0 || !all_keys)) {
            fa_store_bias<KIND>(a, batch, head, 0, all_keys ? 0 : key, x);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = first + fa_own_row(OWN, tid, i);
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            int key = walked + c + 8 * j;
            bool mine = all_keys ? c + 8 * j == 0 : key < a->seqlen_k;
            if (row < a->seqlen_q && mine) {
                fa_store_bias<KIND>(a, batch, head, row, all_keys ? 0 : key,
                                    sum[i][j]);
            }
        }
    }
}

template <int KIND, int DIM, int OWN>
static FA_DEVICE void fa_bias_gradient(fa_args_in a, fa_lds lds)
{
    enum { PASS = FA_BACKWARD_BIAS };
    typedef fa_backward_layout<KIND, DIM, OWN, PASS> L;
    typedef FA_NUMBER(KIND) number;
    uint32_t tid = fa_thread();
    bool all_keys = a->dbias.stride[3] == 0;
    int key_tiles = fa_tiles_of(a->seqlen_k, FA_WALK);
    int columns = all_keys ? 1 : key_tiles; /* of the grid */
    int row_tile = (int)fa_group_x() / columns;
    int key_tile = (int)fa_group_x() % columns;
    fa_part batches =
        fa_part_of(a->dbias.stride[0] == 0, a->batches, (int)fa_group_z());
    fa_part heads =
        fa_part_of(a->dbias.stride[1] == 0, a->heads, (int)fa_group_y());
    fa_part rows = fa_part_of(a->dbias.stride[2] == 0,
                              fa_tiles_of(a->seqlen_q, L::ROWS), row_tile);
    number sum[OWN][FA_WALKED];

    fa_clear_products<OWN>(sum);
#pragma unroll 1
    for (int batch = batches.from; batch < batches.to; batch++) {
#pragma unroll 1
        for (int head = heads.from; head < heads.to; head++) {
#pragma unroll 1
            for (int row = rows.from; row < rows.to; row++) {
                int first = row * L::ROWS;
                uint32_t place =
                    fa_place<L, FA_FULL>((uint32_t)batch, (uint32_t)head);
                fa_own_numbers<KIND, OWN> own;
                fa_tour tour;

                a = fa_again(a);
                fa_own_numbers_of<PASS>(&own, a, place, first, tid);
                int t = fa_start_tour<FA_FULL, PASS>(a, &tour, place, first,
                                                     L::ROWS);
                if (!all_keys) {
                    t = fa_tile_from<FA_FULL>(a, &tour, place, first, key_tile);
                }
#pragma unroll 1
                while (t < tour.range.end && (all_keys || t == key_tile)) {
                    fa_add_tile<KIND, DIM, OWN>(sum, a, lds, &own, place, first,
                                                t * FA_WALK, &tid);
                    t = fa_tile_from<FA_FULL>(a, &tour, place, first, t + 1);
                }
            }
        }
    }
    fa_store_tile<KIND, OWN>(fa_again(a), sum, row_tile * L::ROWS,
                             key_tile * FA_WALK, lds, tid);
}

#endif
