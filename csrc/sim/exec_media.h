/* exec_media.h: helpers of the vector rows for media, cube maps and the exact
 * reduction of angles, one lane each.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_EXEC_MEDIA_H
#define HIPSIM_EXEC_MEDIA_H

#include "exec_float.h"
#include "exec_integer.h"

/* Four sums of byte distances: bytes 0-3, 1-4, 2-5, 3-6 of `a` against `b`,
 * each added to 16 bits of `c`, whose carry is lost. */
static inline uint64_t quad_sad(uint64_t a, uint32_t b, uint64_t c, bool masked)
{
    uint64_t result = 0;
    for (unsigned i = 0; i < 4; i++) {
        uint64_t sum = sad_bytes((uint32_t)(a >> 8 * i), b, masked);
        result |= ((sum + (c >> 16 * i)) & 0xffff) << 16 * i;
    }
    return result;
}

/* Replaces byte `which` (mod 4) of `rest` by x, rounded as MODE says and held
 * within 0 and 255; NaN gives 0. */
static inline uint32_t pack_byte(float x, uint32_t which, uint32_t rest)
{
    float whole = nearbyintf(x);
    uint32_t byte = whole >= 255.0f ? 255u : whole > 0 ? (uint32_t)whole : 0u;
    uint32_t shift = 8 * (which & 3);

    return (rest & ~(255u << shift)) | byte << shift;
}

/* The clamp of a float that an integer instruction packs; NaN gives 0. */
static inline float clamp_unit(float x)
{
    return x >= 1.0f ? 1.0f : x > 0 ? x : 0.0f;
}

/* The axis of the face that (x, y, z) points at: z wins ties, then y. */
static inline unsigned cube_axis(float x, float y, float z)
{
    float ax = fabsf(x), ay = fabsf(y), az = fabsf(z);

    return az >= ax && az >= ay ? 2u : ay >= ax ? 1u : 0u;
}

static inline float cube_face(float x, float y, float z)
{
    const float along[3] = {x, y, z};
    unsigned axis = cube_axis(x, y, z);

    return (float)(2 * axis + (along[axis] < 0 ? 1u : 0u));
}

static inline float cube_major(float x, float y, float z)
{
    const float along[3] = {x, y, z};

    return along[cube_axis(x, y, z)] * 2.0f;
}

static inline float cube_s(float x, float y, float z)
{
    unsigned axis = cube_axis(x, y, z);

    return axis == 2 ? (z < 0 ? -x : x) : axis == 1 ? x : x < 0 ? z : -z;
}

static inline float cube_t(float x, float y, float z)
{
    return cube_axis(x, y, z) == 1 ? (y < 0 ? -z : z) : -y;
}

/* v_trig_preop: 53 bits of 2 / pi from a place that the exponent of x and the
 * segment choose, as a double of that weight. The table has the first 1201
 * bits behind the point. */
static inline double trig_preop(double x, uint32_t segment)
{
    static const uint64_t two_over_pi[20] = {
        UINT64_C(0xa2f9836e4e441529), UINT64_C(0xfc2757d1f534ddc0),
        UINT64_C(0xdb6295993c439041), UINT64_C(0xfe5163abdebbc561),
        UINT64_C(0xb7246e3a424dd2e0), UINT64_C(0x06492eea09d1921c),
        UINT64_C(0xfe1deb1cb129a73e), UINT64_C(0xe88235f52ebb4484),
        UINT64_C(0xe99c7026b45f7e41), UINT64_C(0x3991d639835339f4),
        UINT64_C(0x9c845f8bbdf9283b), UINT64_C(0x1ff897ffde05980f),
        UINT64_C(0xef2f118b5a0a6d1f), UINT64_C(0x6d367ecf27cb09b7),
        UINT64_C(0x4f463f669e5fea2d), UINT64_C(0x7527bac7ebe5f17b),
        UINT64_C(0x3d0739f78a5292ea), UINT64_C(0x6bfb5fb11f8d5d08),
        UINT64_C(0x56033046fc7b0000), 0};
    uint32_t exponent = (uint32_t)(double_bits(x) >> 52 & 0x7ff);
    uint32_t shift =
        (segment & 31) * 53 + (exponent > 1077 ? exponent - 1077 : 0);
    uint32_t word = shift / 64, bit = shift % 64;

    if (word >= 19) {
        return 0.0;
    }
    uint64_t top = two_over_pi[word] << bit;
    top |= bit == 0 ? 0 : two_over_pi[word + 1] >> (64 - bit);
    top >>= 11;
    int scale = -53 - (int)shift + (exponent >= 1968 ? 128 : 0);
    if (scale < -1074) { /* cut, whatever MODE says */
        top = scale > -1074 - 64 ? top >> (-1074 - scale) : 0;
        scale = -1074;
    }
    return scalbn((double)top, scale);
}

#endif
