/* columns.h: tiles for products over rows, in the form "columns" of stage.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_COLUMNS_H
#define FA_KERNELS_COLUMNS_H

#include "stage.h"

/* What one lane hands to its neighbours at once is 8 bytes, a share: 4 fp16
 * (2 slots), 2 floats (2 slots) or 1 double (1 slot) of each of its rows. */
#define FA_SHARE_SLOTS(KIND) (FA_IS_DOUBLE(KIND) ? 8 : 16) /* of 8 lanes */
#define FA_SLOT_ROWS(KIND) (FA_IS_HALF(KIND) ? 2 : 1)
#define FA_SHARES(KIND) (FA_WALK / (FA_SHARE_SLOTS(KIND) * FA_SLOT_ROWS(KIND)))
#define FA_SLOT_BYTES(KIND, DIM) ((DIM) * (FA_IS_DOUBLE(KIND) ? 8 : 4))
#define FA_SHARE_BYTES(KIND, DIM) \
    (FA_SHARE_SLOTS(KIND) * FA_SLOT_BYTES(KIND, DIM))

/* The (lower) row of a slot: lane c has rows c + 8j of a step, so of share s
 * it has, for fp16, slots 2c and 2c + 1: rows 32s + c and + 8, 32s + 16 + c
 * and + 8. */
template <int KIND> static FA_DEVICE int fa_slot_row(int slot)
{
    int share = slot / FA_SHARE_SLOTS(KIND);
    int in = slot % FA_SHARE_SLOTS(KIND);

    return FA_IS_DOUBLE(KIND)  ? slot
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
    if constexpr (!FA_IS_DOUBLE(KIND)) {
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
    if constexpr (FA_ELEMENT(KIND) == 4) {
        return valid ? *(const FA_GLOBAL float *)p : 0.0f;
    }
    return valid ? fa_unpack_as(x->stored, *(const FA_GLOBAL uint16_t *)p)
                 : 0.0f;
}

#endif
