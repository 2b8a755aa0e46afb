/* stage.h: brings tiles of matrices from global memory into LDS.
 *
 * A granule is 16 bytes of LDS: 8 fp16, 4 float or 2 double operands that
 * are neighbours in a row.  256 threads move granules.  Every access is in
 * two steps, fetch (global memory to registers, long before the data is
 * needed) and commit (registers to LDS):
 *
 * wide    The whole granule in one load: uniform 64-bit base of the tile plus
 *         a 32-bit lane offset.  Granules past the head dim repeat the first.
 * narrow  Element by element at 64-bit addresses, any stride and alignment,
 *         zero past the head dim.  All work happens in commit.
 *
 * Which one is a property of the tensor (fa_args.wide), so a uniform branch.
 *
 * Rows past the end of a matrix are never addressed and are zero in LDS.
 *
 * Two forms of a tile:
 *
 * rows     for products over the head dim.  A chunk of 128 bytes of each row,
 *          granule x of row r at x ^ (r & mask), so that reads of 4 (mask 3)
 *          or 8 (mask 7) neighbouring rows at one x hit different banks.
 * columns  for products over rows.  One slot per row, all its channels as
 *          8-byte doubles or 4-byte floats; with fp16 one slot per pair of
 *          rows (r, r + 8), both fp16 of a channel in one dword.  Reads are
 *          contiguous; the writes of fp16 meet a 2-way bank conflict.
 *
 * bf16 into fp16 (FA_BF16): x * 2^s is exact in fp16 for every x down to
 * 2^-28 of the largest, which s brings to 2^14..2^15.  Rows have a scale
 * each, found by FA_PREPARE; columns share one scale, because they are
 * summed over.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_STAGE_H
#define FA_KERNELS_STAGE_H

#include "number.h"

enum {
    FA_THREADS = 256,
    FA_WALK = 64,         /* rows of a step */
    FA_CHUNK_BYTES = 128, /* of a row, in the form for products over channels */
    FA_CHUNK_GRANULES = 8,
    FA_WALK_BYTES = FA_WALK * FA_CHUNK_BYTES,
    FA_OWN_MASK = 3, /* rows with different granule order */
    FA_WALK_MASK = 7
};

/* A (rows, channels) matrix of one batch and head. */
typedef struct fa_matrix {
    fa_args_in args;
    int view;      /* where in args its fa_view lies */
    uint32_t set;  /* its bit in args->wide */
    uint32_t wide; /* args->wide */
    fa_global_in base;
    int32_t row;                  /* stride in elements, if wide */
    const FA_GLOBAL float *scale; /* FA_BF16: of each row */
    int rows;
    int channels;
    int stored; /* fa_dtype of an element */
} fa_matrix;

static FA_DEVICE const FA_CONSTANT fa_view *fa_view_at(fa_args_in a, int view)
{
    return (const FA_CONSTANT fa_view *)((const FA_CONSTANT char *)a + view);
}

#define FA_VIEW(name) ((int)__builtin_offsetof(fa_args, name))

/* Tensors in the order of fa_args.scale_of and block_of. */
enum { FA_Q_AT = 0, FA_K_AT, FA_V_AT, FA_DOUT_AT };

/* q, k and v lie side by side in fa_args. */
static FA_DEVICE int fa_view_offset(int which)
{
    return which == FA_DOUT_AT ? FA_VIEW(dout) : which * (int)sizeof(fa_view);
}

/* `heads` is how many the tensor has; `which` is FA_Q_AT and so on. */
template <int KIND>
static FA_DEVICE fa_matrix fa_matrix_of(fa_args_in a, int which, int batch,
                                        int head, int heads, int rows,
                                        int channels)
{
    int view = fa_view_offset(which);
    uint32_t set = 1u << which;
    const FA_CONSTANT fa_view *from = fa_view_at(a, view);
    fa_matrix x;
    x.args = a;
    x.view = view;
    x.set = set;
    x.wide = a->wide;
    x.base =
        (fa_global_in)from->data +
        (batch * from->stride[0] + head * from->stride[1]) * FA_ELEMENT(KIND);
    x.row = (int32_t)from->stride[2];
    x.scale = KIND == FA_BF16 ? (const FA_GLOBAL float *)a->scale_of[which] +
                                    ((int64_t)batch * heads + head) * rows
                              : nullptr;
    x.rows = rows;
    x.channels = channels;
    x.stored = fa_stored_of<KIND>(a);
    return x;
}

static FA_DEVICE bool fa_is_wide(const fa_matrix *x)
{
    return (x->wide & x->set) != 0;
}

/* Strides of a matrix that is not wide, in bytes. */
typedef struct fa_steps {
    int64_t row;
    int64_t channel;
} fa_steps;

template <int KIND> static FA_DEVICE fa_steps fa_steps_of(const fa_matrix *x)
{
    const FA_CONSTANT fa_view *from = fa_view_at(fa_again(x->args), x->view);
    fa_steps y;
    y.row = from->stride[2] * FA_ELEMENT(KIND);
    y.channel = from->stride[3] * FA_ELEMENT(KIND);
    return y;
}

/* -- one granule ----------------------------------------------------------- */

/* wide: granule `granule` of row first + row, first uniform, as stored: 16
 * bytes, or 8 where elements are expanded. */
template <int KIND>
static FA_DEVICE u32x4 fa_load_wide(const fa_matrix *x, int first, int row,
                                    int granule)
{
    enum { BYTES = FA_GRANULE(KIND) * FA_ELEMENT(KIND) };
    fa_global_in tile = x->base + (int64_t)first * x->row * FA_ELEMENT(KIND);
    uint32_t stride = ((uint32_t)x->row & 0xffffff) * FA_ELEMENT(KIND);
    uint32_t r = (uint32_t)fa_min_int(row, x->rows - 1 - first) & 0xff;
    uint32_t from = granule * FA_GRANULE(KIND) < x->channels ? granule : 0;
    fa_global_in at = tile + (r * stride + from * BYTES);

    if constexpr (BYTES == 8) {
        u32x2 half = *(const FA_GLOBAL u32x2 *)at;
        u32x4 y;
        y.x = half.x;
        y.y = half.y;
        y.z = 0;
        y.w = 0;
        return y;
    } else {
        return *(const FA_GLOBAL u32x4 *)at;
    }
}

/* A mask in a vector register: comparisons would take two scalar registers
 * each, and a granule needs up to 16 of them. */
static FA_DEVICE uint32_t fa_all_ones_if_below(int a, int b)
{
    return (uint32_t)((int)fa_opaque((uint32_t)(a - b)) >> 31);
}

/* narrow: the same bytes, with zeros past the head dim. */
template <int KIND>
static FA_DEVICE u32x4 fa_load_narrow(const fa_matrix *x, const fa_steps *steps,
                                      int first, int row, int granule)
{
    int64_t r = fa_min_int(first + row, x->rows - 1);
    int channel = granule * FA_GRANULE(KIND);
    int valid = x->channels - channel; /* of the granule's elements */
    int64_t start = fa_min_int(channel, x->channels - 1);
    fa_global_in at = x->base + r * steps->row + start * steps->channel;
    uint32_t got[4] = {0, 0, 0, 0};
    u32x4 y;

#pragma unroll
    for (int e = 0; e < FA_GRANULE(KIND); e++) {
        uint32_t keep = fa_all_ones_if_below(e, valid);
        int64_t further = fa_all_ones_if_below(e + 1, valid);
        if constexpr (KIND == FA_F64) {
            u32x2 both = *(const FA_GLOBAL u32x2 *)at;
            got[2 * e] = both.x & keep;
            got[2 * e + 1] = both.y & keep;
        } else if constexpr (FA_ELEMENT(KIND) == 4) {
            uint32_t one = *(const FA_GLOBAL uint32_t *)at;
            got[e] = one & keep;
        } else {
            uint32_t one = *(const FA_GLOBAL uint16_t *)at;
            got[e / 2] |= (one & keep) << (e % 2 * 16);
        }
        at += steps->channel & (int64_t)(int32_t)further;
    }
    y.x = got[0];
    y.y = got[1];
    y.z = got[2];
    y.w = got[3];
    return y;
}

/* Two bf16 times a power of two, as a pair of fp16. */
static FA_DEVICE uint32_t fa_scale_pair(uint32_t x, float scale)
{
    return fa_pack_exact(fa_bf16_to_float(x) * scale,
                         fa_bits<float>(x & 0xffff0000) * scale);
}

/* From the stored bytes to operands. */
template <int KIND>
static FA_DEVICE u32x4 fa_convert(int stored, u32x4 got, float scale)
{
    if constexpr (KIND == FA_BF16) {
        got.x = fa_scale_pair(got.x, scale);
        got.y = fa_scale_pair(got.y, scale);
        got.z = fa_scale_pair(got.z, scale);
        got.w = fa_scale_pair(got.w, scale);
    } else if constexpr (KIND == FA_EXACT16) {
        u32x4 y;
        y.x = fa_bits<uint32_t>(fa_unpack_as(stored, got.x));
        y.y = fa_bits<uint32_t>(fa_unpack_as(stored, got.x >> 16));
        y.z = fa_bits<uint32_t>(fa_unpack_as(stored, got.y));
        y.w = fa_bits<uint32_t>(fa_unpack_as(stored, got.y >> 16));
        return y;
    } else if constexpr (KIND == FA_EXACT32) {
        /* Here, not where it was loaded, from where on it would take twice the
         * registers. */
        u32x2 low = fa_bits<u32x2>((double)fa_bits<float>(fa_opaque(got.x)));
        u32x2 high = fa_bits<u32x2>((double)fa_bits<float>(fa_opaque(got.y)));
        u32x4 y;
        y.x = low.x;
        y.y = low.y;
        y.z = high.x;
        y.w = high.y;
        return y;
    }
    return got;
}

static FA_DEVICE u32x4 fa_zero_unless(bool keep, u32x4 x)
{
    x.x = keep ? x.x : 0;
    x.y = keep ? x.y : 0;
    x.z = keep ? x.z : 0;
    x.w = keep ? x.w : 0;
    return x;
}

/* -- rows ------------------------------------------------------------------ */

/* What a thread holds of a tile between fetch and commit. */
template <int N> struct fa_fetched {
    u32x4 granule[N];
    float scale[N]; /* FA_BF16: of its row */
};

template <int KIND>
static FA_DEVICE float fa_row_scale_of(const fa_matrix *x, int row)
{
    if constexpr (KIND == FA_BF16) {
        return x->scale[fa_min_int(row, x->rows - 1)];
    }
    return 1.0f;
}

/* Thread t moves granule t % 8 of rows t / 8 + 32 n. */
template <int KIND, int ROWS, int N>
static FA_DEVICE void fa_fetch_rows(fa_fetched<N> *got, const fa_matrix *x,
                                    int first, int chunk, uint32_t tid)
{
    int granule = (int)(tid & 7) + chunk * FA_CHUNK_GRANULES;

    static_assert(N >= ROWS / 32, "room for all rows");
#pragma unroll
    for (int n = 0; n < ROWS / 32; n++) {
        got->scale[n] =
            fa_row_scale_of<KIND>(x, first + (int)(tid >> 3) + 32 * n);
    }

    if (fa_is_wide(x)) {
#pragma unroll
        for (int n = 0; n < ROWS / 32; n++) {
            got->granule[n] =
                fa_load_wide<KIND>(x, first, (int)(tid >> 3) + 32 * n, granule);
        }
    }
}

/* One granule into its place.  `flip` is XORed into the signs. */
template <int KIND, int MASK>
static FA_DEVICE void fa_store_row(fa_lds tile, const fa_matrix *x, int first,
                                   int row, u32x4 got, float scale,
                                   uint32_t flip, uint32_t tid)
{
    got = fa_convert<KIND>(x->stored, got, scale);
    got = fa_zero_unless(first + row < x->rows, got);
    got.x ^= FA_IS_DOUBLE(KIND) ? 0 : flip;
    got.y ^= flip;
    got.z ^= FA_IS_DOUBLE(KIND) ? 0 : flip;
    got.w ^= flip;
    fa_lds_store4(
        tile + row * FA_CHUNK_BYTES + (((tid & 7) ^ (row & MASK)) << 4), got);
}

template <int KIND, int ROWS, int MASK, int N>
static FA_DEVICE void fa_commit_rows(fa_lds tile, const fa_fetched<N> *got,
                                     const fa_matrix *x, int first, int chunk,
                                     uint32_t flip, uint32_t tid)
{
    int granule = (int)(tid & 7) + chunk * FA_CHUNK_GRANULES;

    if (fa_is_wide(x)) {
#pragma unroll
        for (int n = 0; n < ROWS / 32; n++) {
            fa_store_row<KIND, MASK>(tile, x, first, (int)(tid >> 3) + 32 * n,
                                     got->granule[n], got->scale[n], flip, tid);
        }
    } else {
        fa_steps steps = fa_steps_of<KIND>(x);
#pragma unroll 1
        for (int row = (int)(tid >> 3); row < ROWS; row += 32) {
            u32x4 one = fa_load_narrow<KIND>(x, &steps, first, row, granule);
            fa_store_row<KIND, MASK>(tile, x, first, row, one,
                                     fa_row_scale_of<KIND>(x, first + row),
                                     flip, tid);
        }
    }
}

#endif
