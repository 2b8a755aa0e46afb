/* stage.h: brings tiles of Q, K and V from global memory into LDS.
 *
 * A granule is 16 bytes, 8 fp16 channels of one row.  The 256 threads take
 * granules in order, so neighbouring lanes read neighbouring addresses.
 * Two ways in, chosen at compile time (LOAD in variants.def):
 *
 * wide    One 16-byte load per granule: uniform 64-bit base of the tile plus
 *         a 32-bit lane offset.  K and V are loaded into registers long
 *         before they are written to LDS (fetch, then commit).  Granules past
 *         the head dim repeat the first one; the kernel never reads them.
 * narrow  2-byte loads at 64-bit addresses, any stride and alignment, zero
 *         past the head dim.  All work happens in commit.
 *
 * Edges   Rows are clamped to the last valid one, so no address outside the
 *         tensor is formed.  V rows past the end are written as zero, because
 *         P is zero there and 0 * Inf is not.
 * LDS     Q, K: row-major, granule x of row r at x ^ (r & mask), so that
 *         the reads of 4 (Q) or 8 (K) neighbouring rows at one x fall into
 *         different banks.  V: one row of DIM dwords for each pair of keys
 *         (k, k + 8), the fp16 of both in one dword; see fa_pair_key.  Its
 *         reads are contiguous, its writes meet a 2-way bank conflict.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_STAGE_H
#define FA_KERNELS_STAGE_H

#include "target.h"

enum {
    FA_THREADS = 256,
    FA_ROWS = 128,  /* query rows of a workgroup */
    FA_KEYS = 64,   /* keys of a step */
    FA_GRANULE = 8, /* channels */
    FA_Q_MASK = 3,  /* rows with different granule order */
    FA_K_MASK = 7
};

/* Granules of a K or V tile that one thread moves. */
#define FA_FETCH(DIM) (FA_KEYS * (DIM) / FA_GRANULE / FA_THREADS)

/* A (rows, head_dim) matrix of one batch and head. */
typedef struct fa_matrix {
    fa_global_in base;
    int64_t stride; /* elements */
    int rows;
    int head_dim;
} fa_matrix;

static FA_DEVICE fa_matrix fa_matrix_of(const void *base,
                                        const int64_t stride[3], int batch,
                                        int head, int rows, int head_dim)
{
    fa_matrix x;
    x.base = (fa_global_in)base + (batch * stride[0] + head * stride[1]) * 2;
    x.stride = stride[2];
    x.rows = rows;
    x.head_dim = head_dim;
    return x;
}

/* The lower key of pair number p = 0..31 of a V tile; the other is 8 above.
 * 16 pairs make a half of 32 keys.  Pairs 2c and 2c + 1 of a half hold the
 * keys c, c + 8, c + 16, c + 24, which are the ones lane c has scores of. */
static FA_DEVICE int fa_pair_key(int p)
{
    return (p >> 4) * 32 + (p & 1) * 16 + ((p & 15) >> 1);
}

/* wide: granule `granule` of row first + row, first uniform. */
static FA_DEVICE u32x4 fa_load_wide(const fa_matrix *x, int first, int row,
                                    int granule)
{
    fa_global_in tile = x->base + first * x->stride * 2;
    uint32_t stride = (uint32_t)x->stride & 0xffffff;
    uint32_t r = (uint32_t)fa_min_int(row, x->rows - 1 - first) & 0xff;
    uint32_t from = granule * FA_GRANULE < x->head_dim ? granule : 0;
    return *(const FA_GLOBAL u32x4 *)(tile + (r * stride * 2 + from * 16));
}

/* narrow: the same, with zeros past the head dim. */
static FA_DEVICE u32x4 fa_load_narrow(const fa_matrix *x, int first, int row,
                                      int granule)
{
    int64_t r = fa_min_int(first + row, x->rows - 1);
    int channel = granule * FA_GRANULE;
    int valid = x->head_dim - channel;
    int start = fa_min_int(channel, x->head_dim - 1);
    const FA_GLOBAL uint16_t *p =
        (const FA_GLOBAL uint16_t *)x->base + r * x->stride + start;
    uint32_t half[FA_GRANULE];
    u32x4 y;

#pragma unroll
    for (int e = 0; e < FA_GRANULE; e++) {
        uint32_t at = (uint32_t)fa_min_int(e, x->head_dim - 1 - start);
        half[e] = p[at];
        half[e] = e < valid ? half[e] : 0;
    }
    y.x = half[0] | half[1] << 16;
    y.y = half[2] | half[3] << 16;
    y.z = half[4] | half[5] << 16;
    y.w = half[6] | half[7] << 16;
    return y;
}

template <int LOAD>
static FA_DEVICE u32x4 fa_load_granule(const fa_matrix *x, int first, int row,
                                       int granule)
{
    return LOAD == FA_LOAD_WIDE ? fa_load_wide(x, first, row, granule)
                                : fa_load_narrow(x, first, row, granule);
}

template <int DIM>
static FA_DEVICE void fa_store_row(fa_lds tile, int mask, int row, int granule,
                                   u32x4 x)
{
    fa_lds_store4(tile + row * (DIM * 2) + ((granule ^ (row & mask)) << 4), x);
}

template <int DIM>
static FA_DEVICE void fa_store_pair(fa_lds tile, int p, int granule, u32x4 a,
                                    u32x4 b)
{
    fa_lds at = tile + p * (DIM * 4) + granule * 32;
    u32x4 low, high;

    low.x = fa_low_halves(a.x, b.x);
    low.y = fa_high_halves(a.x, b.x);
    low.z = fa_low_halves(a.y, b.y);
    low.w = fa_high_halves(a.y, b.y);
    high.x = fa_low_halves(a.z, b.z);
    high.y = fa_high_halves(a.z, b.z);
    high.z = fa_low_halves(a.w, b.w);
    high.w = fa_high_halves(a.w, b.w);
    fa_lds_store4(at, low);
    fa_lds_store4(at + 16, high);
}

/* The Q tile, `flip` XORed into each pair. */
template <int DIM, int LOAD>
static FA_DEVICE void fa_stage_queries(fa_lds tile, const fa_matrix *q,
                                       int first, uint32_t flip, uint32_t tid)
{
    enum { GRANULES = DIM / FA_GRANULE, PASS = FA_THREADS / GRANULES };
    int granule = (int)(tid % GRANULES);

    static_assert(FA_ROWS / PASS % 2 == 0, "no remainder after unrolling");
#pragma unroll 2
    for (int n = 0; n < FA_ROWS / PASS; n++) {
        int row = (int)(tid / GRANULES) + n * PASS;
        u32x4 x = fa_load_granule<LOAD>(q, first, row, granule);
        x.x ^= flip;
        x.y ^= flip;
        x.z ^= flip;
        x.w ^= flip;
        fa_store_row<DIM>(tile, FA_Q_MASK, row, granule, x);
    }
}

template <int DIM, int LOAD>
static FA_DEVICE void fa_fetch_keys(u32x4 got[FA_FETCH(DIM)],
                                    const fa_matrix *k, int first, uint32_t tid)
{
    enum { GRANULES = DIM / FA_GRANULE, PASS = FA_THREADS / GRANULES };

    if (LOAD == FA_LOAD_WIDE) {
#pragma unroll
        for (int n = 0; n < FA_FETCH(DIM); n++) {
            got[n] = fa_load_wide(k, first, tid / GRANULES + n * PASS,
                                  tid % GRANULES);
        }
    }
}

template <int DIM, int LOAD>
static FA_DEVICE void
fa_commit_keys(fa_lds tile, const u32x4 got[FA_FETCH(DIM)], const fa_matrix *k,
               int first, uint32_t tid)
{
    enum { GRANULES = DIM / FA_GRANULE, PASS = FA_THREADS / GRANULES };
    int granule = (int)(tid % GRANULES);

    if (LOAD == FA_LOAD_WIDE) {
#pragma unroll
        for (int n = 0; n < FA_FETCH(DIM); n++) {
            fa_store_row<DIM>(tile, FA_K_MASK, tid / GRANULES + n * PASS,
                              granule, got[n]);
        }
    } else {
#pragma unroll 1
        for (int row = (int)(tid / GRANULES); row < FA_KEYS; row += PASS) {
            fa_store_row<DIM>(tile, FA_K_MASK, row, granule,
                              fa_load_narrow(k, first, row, granule));
        }
    }
}

template <int DIM, int LOAD>
static FA_DEVICE void fa_fetch_values(u32x4 got[FA_FETCH(DIM)],
                                      const fa_matrix *v, int first,
                                      uint32_t tid)
{
    enum { GRANULES = DIM / FA_GRANULE, PASS = FA_THREADS / GRANULES };

    if (LOAD == FA_LOAD_WIDE) {
#pragma unroll
        for (int n = 0; n < FA_FETCH(DIM) / 2; n++) {
            int key = fa_pair_key(tid / GRANULES + n * PASS);
            got[2 * n] = fa_load_wide(v, first, key, tid % GRANULES);
            got[2 * n + 1] = fa_load_wide(v, first, key + 8, tid % GRANULES);
        }
    }
}

/* Marks NaN and Inf (exponent 31) in the sign's place of each fp16: adding
 * one to the exponent carries into it. */
static FA_DEVICE uint32_t fa_mark_specials(uint32_t x)
{
    return ((x & 0x7c007c00) + 0x04000400) & 0x80008000;
}

static FA_DEVICE uint32_t fa_clear_specials(uint32_t x)
{
    uint32_t mark = fa_mark_specials(x);

    return x & ~((mark << 1) - (mark >> 15));
}

/* Clears NaN and Inf in a and b; whether this wave had any. */
static FA_DEVICE bool fa_take_specials(u32x4 *a, u32x4 *b)
{
    uint32_t marks = fa_mark_specials(a->x) | fa_mark_specials(a->y) |
                     fa_mark_specials(a->z) | fa_mark_specials(a->w) |
                     fa_mark_specials(b->x) | fa_mark_specials(b->y) |
                     fa_mark_specials(b->z) | fa_mark_specials(b->w);

    if (!fa_any(marks != 0)) {
        return false;
    }
    a->x = fa_clear_specials(a->x);
    a->y = fa_clear_specials(a->y);
    a->z = fa_clear_specials(a->z);
    a->w = fa_clear_specials(a->w);
    b->x = fa_clear_specials(b->x);
    b->y = fa_clear_specials(b->y);
    b->z = fa_clear_specials(b->z);
    b->w = fa_clear_specials(b->w);
    return true;
}

static FA_DEVICE u32x4 fa_zero_unless(bool keep, u32x4 x)
{
    x.x = keep ? x.x : 0;
    x.y = keep ? x.y : 0;
    x.z = keep ? x.z : 0;
    x.w = keep ? x.w : 0;
    return x;
}

/* clear: some row does not see every key of the tile.  Its weight is 0 there,
 * but 0 * Inf is NaN, so NaN and Inf stay out of LDS; returns whether this
 * wave found any.  (fa_add_specials brings them in.) */
template <int DIM, int LOAD>
static FA_DEVICE bool fa_commit_values(fa_lds tile, u32x4 got[FA_FETCH(DIM)],
                                       const fa_matrix *v, int first,
                                       bool clear, uint32_t tid)
{
    enum { GRANULES = DIM / FA_GRANULE, PASS = FA_THREADS / GRANULES };
    int granule = (int)(tid % GRANULES);
    int left = v->rows - first;
    bool found = false;

    if (LOAD == FA_LOAD_WIDE) {
        if (left < FA_KEYS) {
#pragma unroll
            for (int n = 0; n < FA_FETCH(DIM); n++) {
                int key = fa_pair_key(tid / GRANULES + n / 2 * PASS);
                got[n] = fa_zero_unless(key + n % 2 * 8 < left, got[n]);
            }
        }
#pragma unroll
        for (int n = 0; n < FA_FETCH(DIM); n += 2) {
            if (clear) {
                found |= fa_take_specials(&got[n], &got[n + 1]);
            }
            fa_store_pair<DIM>(tile, tid / GRANULES + n / 2 * PASS, granule,
                               got[n], got[n + 1]);
        }
    } else {
#pragma unroll 1
        for (int p = (int)(tid / GRANULES); p < FA_KEYS / 2; p += PASS) {
            int key = fa_pair_key(p);
            u32x4 a = fa_load_narrow(v, first, key, granule);
            u32x4 b = fa_load_narrow(v, first, key + 8, granule);
            a = fa_zero_unless(key < left, a);
            b = fa_zero_unless(key + 8 < left, b);
            if (clear) {
                found |= fa_take_specials(&a, &b);
            }
            fa_store_pair<DIM>(tile, p, granule, a, b);
        }
    }
    return found;
}

/* One element, 0 past the head dim. */
static FA_DEVICE uint32_t fa_load_half(const fa_matrix *x, int row, int channel)
{
    const FA_GLOBAL uint16_t *p =
        (const FA_GLOBAL uint16_t *)x->base + row * x->stride;

    return channel < x->head_dim ? p[channel] : 0;
}

#endif
