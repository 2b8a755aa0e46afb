/* philox.h: which weights dropout keeps.
 *
 * Philox4x32-10 with the 64-bit seed as key.  The 128 bits of counter
 *
 *   ((k >> 6) * 8 + (k & 7), q, b * H + h, offset)
 *
 * are eight halves of 16 bits, of which number (k >> 3) & 7 belongs to key k of
 * query q: it is kept if its half, as a signed number, is below
 * fa_args.keep - 32768.  The rule knows no tiles, so every kernel drops the
 * same; and the eight keys of a query that one lane has in a step, c + 8j, take
 * their bits from one call.
 *
 * Source  Salmon and others, "Parallel random numbers: as easy as 1, 2, 3",
 *         SC 2011.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_PHILOX_H
#define FA_KERNELS_PHILOX_H

#include "product.h"

static FA_DEVICE u32x4 fa_philox(u32x4 counter, u32x2 key)
{
#pragma unroll 1
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xd2511f53u * counter.x;
        uint64_t b = (uint64_t)0xcd9e8d57u * counter.z;
        u32x4 next;
        next.x = (uint32_t)(b >> 32) ^ counter.y ^ key.x;
        next.y = (uint32_t)b;
        next.z = (uint32_t)(a >> 32) ^ counter.w ^ key.y;
        next.w = (uint32_t)a;
        counter = next;
        key.x += 0x9e3779b9u;
        key.y += 0xbb67ae85u;
    }
    return counter;
}

/* The halves of the keys key + 8j of a query; `place` is batch << 16 | head. */
static FA_DEVICE u32x4 fa_halves_of(fa_args_in a, uint32_t place, int query,
                                    int key)
{
    const FA_GLOBAL u32x2 *seed = (const FA_GLOBAL u32x2 *)a->seed;
    uint32_t at = fa_uniform(place);
    u32x2 value = seed[0];
    u32x4 counter;
    u32x2 words;

    words.x = fa_uniform(value.x);
    words.y = fa_uniform(value.y);
    counter.x = (uint32_t)(key >> 6) * 8 + (uint32_t)(key & 7);
    counter.y = (uint32_t)query;
    counter.z = (at >> 16) * (uint32_t)a->heads + (at & 0xffff);
    counter.w = fa_uniform(seed[1].x);
    return fa_philox(counter, words);
}

/* Of two halves: all ones where it is kept. */
static FA_DEVICE uint32_t fa_keep_pair(uint32_t halves, uint32_t keep)
{
    uint32_t limit = (keep - 0x8000u) & 0xffff;
    return fa_below_pair(halves, limit | limit << 16);
}

/* Bit j: whether key + 8j is kept. */
static FA_DEVICE uint32_t fa_kept_bits(fa_args_in a, uint32_t place, int query,
                                       int key)
{
    u32x4 halves = fa_halves_of(a, place, query, key);
    uint32_t word[4] = {halves.x, halves.y, halves.z, halves.w};
    uint32_t bits = 0;

#pragma unroll
    for (int n = 0; n < 4; n++) {
        uint32_t pair = fa_keep_pair(word[n], a->keep);
        bits |= (pair & 1) << 2 * n | (pair >> 31) << (2 * n + 1);
    }
    return bits;
}

/* -- keys owned, queries walked -------------------------------------------- */

/* Then the keys of a lane share no call, so each call is made by one thread and
 * its bits go through LDS: one byte for each query and group of keys that are 8
 * apart, the groups of a query together. */
template <int OWN> struct fa_kept_shape {
    enum {
        GROUPS = OWN < 2 ? 8 : 4 * OWN, /* of the owned keys */
        BYTES = GROUPS / 4,             /* that a thread makes */
        ALL = GROUPS * FA_WALK
    };
};

/* The bytes of this thread: of query walked + tid % 64 groups tid / 64 + 4n. */
template <int OWN>
static FA_DEVICE uint32_t fa_make_kept(fa_args_in a, uint32_t place, int first,
                                       int walked, uint32_t tid)
{
    int query = walked + (int)(tid & (FA_WALK - 1));
    uint32_t bytes = 0;

#pragma unroll
    for (int n = 0; n < fa_kept_shape<OWN>::BYTES; n++) {
        int group = (int)(tid / FA_WALK) + 4 * n;
        int key = (first & ~63) + (group >> 3) * 64 + (group & 7);
        bytes |= fa_kept_bits(a, place, query, key) << 8 * n;
        fa_keep_order(); /* or all calls are made at once */
    }
    return bytes;
}

template <int OWN>
static FA_DEVICE void fa_put_kept(fa_lds area, uint32_t bytes, uint32_t tid)
{
    typedef fa_kept_shape<OWN> shape;
    FA_LDS uint8_t *to = (FA_LDS uint8_t *)area +
                         (tid & (FA_WALK - 1)) * shape::GROUPS + tid / FA_WALK;

#pragma unroll
    for (int n = 0; n < shape::BYTES; n++) {
        to[4 * n] = (uint8_t)(bytes >> 8 * n);
    }
}

/* Bit i * 8 + j: whether the lane's owned key i is kept for walked query j. */
template <int OWN>
static FA_DEVICE uint32_t fa_get_kept(fa_lds area, int first, uint32_t tid)
{
    typedef fa_kept_shape<OWN> shape;
    uint32_t bits = 0;

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int key = (first & 63) + fa_own_row(OWN, tid, i);
        uint32_t group = (uint32_t)(key >> 6) * 8 + (uint32_t)(key & 7);
        uint32_t bit = (uint32_t)(key >> 3) & 7;
        const FA_LDS uint8_t *from =
            (const FA_LDS uint8_t *)area + (tid & 7) * shape::GROUPS + group;
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            uint32_t byte = from[8 * j * shape::GROUPS];
            bits |= (byte >> bit & 1) << (i * 8 + j);
        }
    }
    return bits;
}

/* -- queries owned --------------------------------------------------------- */

template <int OWN>
static FA_DEVICE uint32_t fa_own_kept(fa_args_in a, uint32_t place, int first,
                                      int walked, uint32_t tid)
{
    uint32_t bits = 0;

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        bits |= fa_kept_bits(a, place, first + fa_own_row(OWN, tid, i),
                             walked + (int)(tid & 7))
                << 8 * i;
        fa_keep_order();
    }
    return bits;
}

/* Takes away what is not kept of the weights of one row. */
template <int KIND>
static FA_DEVICE void fa_drop_weights(fa_weights<KIND> *p, fa_args_in a,
                                      uint32_t place, int query, int key)
{
    u32x4 halves = fa_halves_of(a, place, query, key);
    uint32_t word[4] = {halves.x, halves.y, halves.z, halves.w};

#pragma unroll
    for (int n = 0; n < 4; n++) {
        uint32_t pair = fa_keep_pair(word[n], a->keep);
        if constexpr (FA_IS_HALF(KIND)) {
            p->of[n] &= pair;
        } else {
            p->of[2 * n] = (pair & 1) != 0 ? p->of[2 * n] : 0;
            p->of[2 * n + 1] = pair >> 31 != 0 ? p->of[2 * n + 1] : 0;
        }
    }
}

/* Zeros where a bit i * 8 + j is not set. */
template <int OWN, typename Number>
static FA_DEVICE void fa_drop(Number x[OWN][FA_WALKED], uint32_t kept)
{
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            x[i][j] = (kept >> (i * 8 + j) & 1) != 0 ? x[i][j] : (Number)0;
        }
    }
}

#endif
