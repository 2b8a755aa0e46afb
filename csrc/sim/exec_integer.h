/* exec_integer.h: integer helpers that the .def lists call, one lane each.
 * Static inline; shared by the scalar and the vector executor.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_EXEC_INTEGER_H
#define HIPSIM_EXEC_INTEGER_H

#include <stdbool.h>
#include <stdint.h>

static inline uint32_t count_bits(uint64_t x)
{
    x -= x >> 1 & UINT64_C(0x5555555555555555);
    x = (x & UINT64_C(0x3333333333333333)) +
        (x >> 2 & UINT64_C(0x3333333333333333));
    x = (x + (x >> 4)) & UINT64_C(0x0f0f0f0f0f0f0f0f);
    return (uint32_t)(x * UINT64_C(0x0101010101010101) >> 56);
}

/* Position of the lowest set bit, or -1. */
static inline uint32_t first_bit(uint64_t x)
{
    return x == 0 ? UINT32_MAX : (uint32_t)__builtin_ctzll(x);
}

/* Zeros above the highest set bit of a `width`-bit number, or -1. */
static inline uint32_t leading_zeros(uint64_t x, uint32_t width)
{
    return x == 0 ? UINT32_MAX : (uint32_t)__builtin_clzll(x) - (64u - width);
}

static inline uint64_t reverse_bits(uint64_t x)
{
    x = (x >> 1 & UINT64_C(0x5555555555555555)) |
        (x & UINT64_C(0x5555555555555555)) << 1;
    x = (x >> 2 & UINT64_C(0x3333333333333333)) |
        (x & UINT64_C(0x3333333333333333)) << 2;
    x = (x >> 4 & UINT64_C(0x0f0f0f0f0f0f0f0f)) |
        (x & UINT64_C(0x0f0f0f0f0f0f0f0f)) << 4;
    return __builtin_bswap64(x);
}

/* One bit per group of four lanes, at the group's lowest position. */
static inline uint64_t quads(uint64_t x)
{
    x |= x >> 1;
    x |= x >> 2;
    return x & UINT64_C(0x1111111111111111);
}

/* Packs bits 0, 4, 8, ... side by side. */
static inline uint64_t every_fourth(uint64_t x)
{
    uint64_t packed = 0;
    for (unsigned i = 0; i < 16; i++) {
        packed |= (x >> 4 * i & 1) << i;
    }
    return packed;
}

/* Each bit twice. */
static inline uint64_t replicate_bits(uint32_t x)
{
    uint64_t wide = 0;
    for (unsigned i = 0; i < 32; i++) {
        wide |= (uint64_t)(x >> i & 1) * 3u << 2 * i;
    }
    return wide;
}

/* `width` bits of x from `offset` on; x has `bits` bits. */
static inline uint64_t bit_field(uint64_t x, uint32_t offset, uint32_t width,
                                 uint32_t bits)
{
    uint64_t part = x >> offset;
    return width >= bits ? part : part & ((UINT64_C(1) << width) - 1u);
}

static inline uint64_t bit_field_signed(uint64_t x, uint32_t offset,
                                        uint32_t width, uint32_t bits)
{
    if (width == 0) {
        return 0;
    }
    uint32_t have = bits - offset;
    uint32_t taken = width < have ? width : have;
    uint32_t shift = 64u - taken;
    return (uint64_t)((int64_t)(x >> offset << shift) >> shift);
}

static inline int32_t sext24(int32_t x)
{
    return (int32_t)((uint32_t)x << 8) >> 8;
}

static inline int32_t clamp_i32(int32_t x, int32_t low, int32_t high)
{
    return x < low ? low : x > high ? high : x;
}

static inline int32_t clamp_i64(int64_t x)
{
    return x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : (int32_t)x;
}

static inline uint32_t add_overflows(uint64_t a, uint64_t b)
{
    return (uint32_t)(((a ^ (a + b)) & (b ^ (a + b))) >> 63);
}

static inline int32_t median_i32(int32_t a, int32_t b, int32_t c)
{
    int32_t low = a < b ? a : b;
    int32_t high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

static inline uint32_t median_u32(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t low = a < b ? a : b;
    uint32_t high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

static inline uint32_t distance(uint32_t a, uint32_t b)
{
    return a > b ? a - b : b - a;
}

/* Sum of byte distances; with `masked`, bytes of b that are zero drop out. */
static inline uint32_t sad_bytes(uint32_t a, uint32_t b, bool masked)
{
    uint32_t sum = 0;
    for (unsigned i = 0; i < 32; i += 8) {
        uint32_t reference = b >> i & 255;
        uint32_t part = distance(a >> i & 255, reference);
        sum += masked && reference == 0 ? 0 : part;
    }
    return sum;
}

/* Byte averages; the low bit of each byte of `round` rounds up. */
static inline uint32_t lerp_bytes(uint32_t a, uint32_t b, uint32_t round)
{
    uint32_t result = 0;
    for (unsigned i = 0; i < 32; i += 8) {
        uint32_t sum = (a >> i & 255) + (b >> i & 255) + (round >> i & 1);
        result |= (sum >> 1) << i;
    }
    return result;
}

/* v_perm_b32: selector bytes 0-3 pick from b, 4-7 from a, 8-11 a sign, 12
 * zero, above 0xff. */
static inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t select)
{
    uint32_t result = 0;
    for (unsigned i = 0; i < 32; i += 8) {
        uint32_t s = select >> i & 255;
        uint32_t word = (s & 4) != 0 ? a : b;
        uint32_t byte = word >> 8 * (s & 3) & 255;
        uint32_t source = (s & 2) != 0 ? a : b;
        uint32_t sign = source >> ((s & 1) != 0 ? 31 : 15) & 1;
        byte = s >= 8 ? 0u - sign : byte;
        byte = s == 12 ? 0 : byte;
        byte = s > 12 ? 255 : byte;
        result |= (byte & 255) << i;
    }
    return result;
}

static inline int32_t low_i16(uint32_t x)
{
    return (int32_t)(x << 16) >> 16;
}

static inline int32_t high_i16(uint32_t x)
{
    return (int32_t)x >> 16;
}

static inline int64_t dot_signed(uint32_t a, uint32_t b, unsigned bits)
{
    int64_t sum = 0;
    for (unsigned i = 0; i < 32; i += bits) {
        int32_t x = (int32_t)(a << (32 - bits - i)) >> (32 - bits);
        int32_t y = (int32_t)(b << (32 - bits - i)) >> (32 - bits);
        sum += x * y;
    }
    return sum;
}

static inline uint64_t dot_unsigned(uint32_t a, uint32_t b, unsigned bits)
{
    uint64_t sum = 0;
    for (unsigned i = 0; i < 32; i += bits) {
        uint32_t x = a << (32 - bits - i) >> (32 - bits);
        uint32_t y = b << (32 - bits - i) >> (32 - bits);
        sum += x * y;
    }
    return sum;
}

#endif
