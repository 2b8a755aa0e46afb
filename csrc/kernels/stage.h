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
 * bytes, or 8 where 16 bits become fp32. */
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
        } else if constexpr (KIND == FA_F32) {
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
    got.x ^= KIND == FA_F64 ? 0 : flip;
    got.y ^= flip;
    got.z ^= KIND == FA_F64 ? 0 : flip;
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

/* -- columns --------------------------------------------------------------- */

/* What one lane hands to its neighbours at once is 8 bytes, a share: 4 fp16
 * (2 slots), 2 floats (2 slots) or 1 double (1 slot) of each of its rows. */
#define FA_SHARE_SLOTS(KIND) ((KIND) == FA_F64 ? 8 : 16) /* of 8 lanes */
#define FA_SLOT_ROWS(KIND) (FA_IS_HALF(KIND) ? 2 : 1)
#define FA_SHARES(KIND) (FA_WALK / (FA_SHARE_SLOTS(KIND) * FA_SLOT_ROWS(KIND)))
#define FA_SLOT_BYTES(KIND, DIM) ((DIM) * ((KIND) == FA_F64 ? 8 : 4))
#define FA_SHARE_BYTES(KIND, DIM) \
    (FA_SHARE_SLOTS(KIND) * FA_SLOT_BYTES(KIND, DIM))

/* The (lower) row of a slot: lane c has rows c + 8j of a step, so of share s
 * it has, for fp16, slots 2c and 2c + 1: rows 32s + c and + 8, 32s + 16 + c
 * and + 8. */
template <int KIND> static FA_DEVICE int fa_slot_row(int slot)
{
    int share = slot / FA_SHARE_SLOTS(KIND);
    int in = slot % FA_SHARE_SLOTS(KIND);

    return KIND == FA_F64      ? slot
           : !FA_IS_HALF(KIND) ? share * 16 + (in & 1) * 8 + (in >> 1)
                               : share * 32 + (in & 1) * 16 + (in >> 1);
}

/* Threads of a column stage: granule t % GRANULES (a power of two; those
 * past DIM idle) of slots t / GRANULES + n * PASS. */
template <int KIND, int DIM, int SLOTS> struct fa_columns {
    enum {
        PADDED = DIM <= 32 ? 32
        : DIM <= 64        ? 64
        : DIM <= 128       ? 128
                           : 256,
        GRANULES = PADDED / FA_GRANULE(KIND),
        PASS = FA_THREADS / GRANULES,
        MOVES = SLOTS <= PASS ? 1 : SLOTS / PASS,
        FETCH = MOVES * FA_SLOT_ROWS(KIND)
    };
};

template <int KIND, int DIM, int SLOTS, int N>
static FA_DEVICE void fa_fetch_columns(fa_fetched<N> *got, const fa_matrix *x,
                                       int first, int slot, uint32_t tid)
{
    typedef fa_columns<KIND, DIM, SLOTS> shape;
    int granule = (int)(tid % shape::GRANULES);

    if (fa_is_wide(x)) {
#pragma unroll
        for (int n = 0; n < shape::FETCH; n++) {
            int at = (int)(tid / shape::GRANULES) +
                     n / FA_SLOT_ROWS(KIND) * shape::PASS;
            int row = fa_slot_row<KIND>(slot + at) + n % FA_SLOT_ROWS(KIND) * 8;
            got->granule[n] = fa_load_wide<KIND>(x, first, row, granule);
        }
    }
}

/* Whether there is a NaN or Inf among fp16 operands: times 0 they are NaN, and
 * all else is 0. */
static FA_DEVICE bool fa_has_specials(u32x4 a, u32x4 b)
{
    float sum = fa_dot2(a.x, 0, 0.0f);

    sum = fa_dot2(a.y, 0, sum);
    sum = fa_dot2(a.z, 0, sum);
    sum = fa_dot2(a.w, 0, sum);
    sum = fa_dot2(b.x, 0, sum);
    sum = fa_dot2(b.y, 0, sum);
    sum = fa_dot2(b.z, 0, sum);
    sum = fa_dot2(b.w, 0, sum);
    return sum != 0;
}

/* Without NaN and Inf (exponent 31): adding one to the exponent carries into
 * the sign's place. */
static FA_DEVICE uint32_t fa_clear_halves(uint32_t x)
{
    uint32_t mark = ((x & 0x7c007c00) + 0x04000400) & 0x80008000;

    return x & ~((mark << 1) - (mark >> 15));
}

/* x without NaN and Inf; `found` remembers whether there were any, which with
 * fp16 operands is known. */
template <int KIND>
static FA_DEVICE u32x4 fa_clear_specials(u32x4 x, bool *found)
{
    if constexpr (FA_IS_HALF(KIND)) {
        x.x = fa_clear_halves(x.x);
        x.y = fa_clear_halves(x.y);
        x.z = fa_clear_halves(x.z);
        x.w = fa_clear_halves(x.w);
        return x;
    }
    if constexpr (KIND != FA_F64) {
        const uint32_t all = 0x7f800000;
        *found |= (x.x & all) == all || (x.y & all) == all ||
                  (x.z & all) == all || (x.w & all) == all;
        x.x = (x.x & all) == all ? 0 : x.x;
        x.y = (x.y & all) == all ? 0 : x.y;
        x.z = (x.z & all) == all ? 0 : x.z;
        x.w = (x.w & all) == all ? 0 : x.w;
        return x;
    }
    const uint32_t all = 0x7ff00000; /* in the upper half of a double */
    bool first = (x.y & all) == all;
    bool second = (x.w & all) == all;
    *found |= first || second;
    x.x = first ? 0 : x.x;
    x.y = first ? 0 : x.y;
    x.z = second ? 0 : x.z;
    x.w = second ? 0 : x.w;
    return x;
}

/* One slot's granule: 16 bytes, or for fp16 the pairs of two rows, 32. */
template <int KIND, int DIM>
static FA_DEVICE void fa_store_slot(fa_lds tile, int slot, int granule, u32x4 a,
                                    u32x4 b)
{
    fa_lds at = tile + slot * FA_SLOT_BYTES(KIND, DIM);

    if constexpr (FA_IS_HALF(KIND)) {
        u32x4 low, high;
        low.x = fa_low_halves(a.x, b.x);
        low.y = fa_high_halves(a.x, b.x);
        low.z = fa_low_halves(a.y, b.y);
        low.w = fa_high_halves(a.y, b.y);
        high.x = fa_low_halves(a.z, b.z);
        high.y = fa_high_halves(a.z, b.z);
        high.z = fa_low_halves(a.w, b.w);
        high.w = fa_high_halves(a.w, b.w);
        fa_lds_store4(at + granule * 32, low);
        fa_lds_store4(at + granule * 32 + 16, high);
    } else {
        fa_lds_store4(at + granule * 16, a);
    }
}

/* The two rows of slot `slot + at` (one if operands are not fp16) into LDS. */
template <int KIND, int DIM, int SLOTS>
static FA_DEVICE void fa_put_slot(fa_lds tile, const fa_matrix *x, int first,
                                  int slot, int at, int granule, u32x4 a,
                                  u32x4 b, float scale, bool clear, bool *found)
{
    int row = first + fa_slot_row<KIND>(slot + at);

    a = fa_convert<KIND>(x->stored, a, scale);
    a = fa_zero_unless(row < x->rows, a);
    if constexpr (FA_IS_HALF(KIND)) {
        b = fa_convert<KIND>(x->stored, b, scale);
        b = fa_zero_unless(row + 8 < x->rows, b);
    }
    if (clear) {
        if constexpr (FA_IS_HALF(KIND)) {
            bool some = fa_has_specials(a, b);
            if (fa_any(some)) { /* nearly never */
                *found |= some;
                a = fa_clear_specials<KIND>(a, found);
                b = fa_clear_specials<KIND>(b, found);
            }
        } else {
            a = fa_clear_specials<KIND>(a, found);
        }
    }
    if (at < SLOTS && granule * FA_GRANULE(KIND) < DIM) {
        fa_store_slot<KIND, DIM>(tile, at, granule, a, b);
    }
}

/* scale: FA_BF16, of all columns.
 * clear: NaN and Inf stay out of LDS (where a weight may be 0, because 0 *
 * Inf is NaN); returns whether this lane met any. */
template <int KIND, int DIM, int SLOTS, int N>
static FA_DEVICE bool fa_commit_columns(fa_lds tile, const fa_fetched<N> *got,
                                        const fa_matrix *x, int first, int slot,
                                        float scale, bool clear, uint32_t tid)
{
    typedef fa_columns<KIND, DIM, SLOTS> shape;
    enum { ROWS = FA_SLOT_ROWS(KIND) };
    int granule = (int)(tid % shape::GRANULES);
    bool found = false;

    if (fa_is_wide(x)) {
#pragma unroll
        for (int n = 0; n < shape::MOVES; n++) {
            int at = (int)(tid / shape::GRANULES) + n * shape::PASS;
            fa_put_slot<KIND, DIM, SLOTS>(
                tile, x, first, slot, at, granule, got->granule[n * ROWS],
                got->granule[n * ROWS + ROWS - 1], scale, clear, &found);
        }
    } else {
        fa_steps steps = fa_steps_of<KIND>(x);
#pragma unroll 1
        for (int n = 0; n < shape::MOVES; n++) {
            int at = (int)(tid / shape::GRANULES) + n * shape::PASS;
            int row = fa_slot_row<KIND>(slot + at);
            u32x4 a = fa_load_narrow<KIND>(x, &steps, first, row, granule);
            u32x4 b = a;
            if (ROWS == 2) {
                b = fa_load_narrow<KIND>(x, &steps, first, row + 8, granule);
            }
            fa_put_slot<KIND, DIM, SLOTS>(tile, x, first, slot, at, granule, a,
                                          b, scale, clear, &found);
        }
    }
    return found;
}

/* One element as it is stored, as a number; 0 past the channels. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_load_element(const fa_matrix *x, const fa_steps *steps, int row,
                    int channel)
{
    fa_global_in p = x->base + row * steps->row +
                     fa_min_int(channel, x->channels - 1) * steps->channel;
    bool valid = channel < x->channels;

    if constexpr (KIND == FA_F64) {
        return valid ? *(const FA_GLOBAL double *)p : 0.0;
    }
    if constexpr (KIND == FA_F32) {
        return valid ? *(const FA_GLOBAL float *)p : 0.0f;
    }
    return valid ? fa_unpack_as(x->stored, *(const FA_GLOBAL uint16_t *)p)
                 : 0.0f;
}

#endif
