/* fit.h: how large the numbers of this workgroup can get, from what
 * FA_PREPARE found out about blocks of 64 rows.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_FIT_H
#define FA_KERNELS_FIT_H

#include "problem.h"

/* The largest x of all threads.  `lds` is 128 bytes that nobody uses. */
static FA_DEVICE float fa_group_max(float x, fa_lds lds, uint32_t tid)
{
    x = fa_max8(x);
    fa_barrier();
    if ((tid & 7) == 0) {
        fa_lds_store1(lds + (tid >> 3) * 4, fa_bits<uint32_t>(x));
    }
    fa_barrier();
#pragma unroll
    for (int n = 0; n < 4; n++) {
        x = fa_max(x, fa_bits<float>(
                          fa_lds_load1(lds + ((tid & 7) * 4 + n) * 4)));
    }
    return fa_max8(x);
}

/* The largest norm, squared, of the rows in `count` blocks. */
static FA_DEVICE float fa_largest_norm(const fa_block *blocks, int count,
                                       fa_lds lds, uint32_t tid)
{
    const FA_GLOBAL fa_block *from = (const FA_GLOBAL fa_block *)blocks;
    float most = 0.0f;

    for (int n = (int)tid; n < count; n += FA_THREADS) {
        most = fa_max(most, from[n].norm);
    }
    return fa_group_max(most, lds, tid);
}

/* m with sqrt(x) < 2^m, for x as a float's bits; at least -50, at most 65. */
static FA_DEVICE int fa_root_exponent(float x)
{
    int exponent = (int)(fa_bits<uint32_t>(x) >> 23); /* x < 2^(exponent-126) */

    return fa_max_int((exponent - 125) >> 1, -50);
}

/* A power of two that takes P * 2^12 * (dP - delta) close to fp16's range and
 * never out of it: |P (dP - delta)| <= M / 2 with M the product of the
 * largest norms of dO's and V's rows. */
template <int PASS>
static FA_DEVICE float fa_lift(fa_args_in a, int first, int rows,
                               uint32_t own_place, fa_lds lds, uint32_t tid)
{
    enum { V = 2, DOUT = 3, OWN_BLOCKS = 2 };
    uint32_t at = fa_uniform(own_place);
    int batch = (int)(at >> 16);
    int head = (int)(at & 0xffff);
    int q_blocks = (a->seqlen_q + FA_BLOCK_ROWS - 1) / FA_BLOCK_ROWS;
    int k_blocks = (a->seqlen_k + FA_BLOCK_ROWS - 1) / FA_BLOCK_ROWS;
    int group = a->group;
    bool kv = PASS == FA_BACKWARD_KV;
    int key_head = kv ? head : head / group;
    int query_head = kv ? head * group : head;
    int64_t v_from = ((int64_t)batch * (a->heads / group) + key_head) * k_blocks;
    int64_t dout_from = ((int64_t)batch * a->heads + query_head) * q_blocks;
    int v_count = k_blocks;
    int dout_count = kv ? group * q_blocks : q_blocks;
    int own = first / FA_BLOCK_ROWS;
    int own_count = (first % FA_BLOCK_ROWS + rows + FA_BLOCK_ROWS - 1) /
                    FA_BLOCK_ROWS;

    if (kv) {
        v_from += own;
        v_count = fa_min_int(own_count, k_blocks - own);
    } else {
        dout_from += own;
        dout_count = fa_min_int(own_count, q_blocks - own);
    }
    float v = fa_largest_norm(a->block_of[V] + v_from, v_count, lds, tid);
    float dout = fa_largest_norm(a->block_of[DOUT] + dout_from, dout_count, lds,
                                 tid);
    /* dS * 2^(16 - m) is at most 2^15; P brings 2^12. */
    int m = fa_root_exponent(v) + fa_root_exponent(dout);
    return fa_power_of_2(fa_min_int(4 - m, 100));
}

#endif
