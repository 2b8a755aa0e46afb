/* exec_float.h: number helpers that the .def lists call, one lane each.
 *
 * Everything here gives the same bits with and without the host's vector
 * and FMA instructions: plain IEEE operations in a written order (the build
 * passes -ffp-contract=off), fma only where the instruction fuses. Included
 * by the two compilations of exec_vector.h; static inline throughout.
 *
 * NaN results are made uniform afterwards (uniform_nan and
 * uniform_nan_double in exec_vector.h).
 *
 * Source: Vega ISA chapter 12; half conversion by the usual power-of-two
 * scaling. Estimates (exp2, log2, ...) are in exec_estimates.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_EXEC_FLOAT_H
#define HIPSIM_EXEC_FLOAT_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

static inline uint32_t float_bits(float x)
{
    union {
        float f;
        uint32_t u;
    } v = {.f = x};
    return v.u;
}

static inline float bits_float(uint32_t x)
{
    union {
        uint32_t u;
        float f;
    } v = {.u = x};
    return v.f;
}

static inline uint64_t double_bits(double x)
{
    union {
        double f;
        uint64_t u;
    } v = {.f = x};
    return v.u;
}

static inline double bits_double(uint64_t x)
{
    union {
        uint64_t u;
        double f;
    } v = {.u = x};
    return v.f;
}

/* Denormals to zero of the same sign. */
static inline float flush(float x)
{
    uint32_t u = float_bits(x);
    uint32_t keep = (u & 0x7f800000u) != 0 ? 0xffffffffu : 0x80000000u;
    return bits_float(u & keep);
}

/* ---- half precision ---------------------------------------------------- */

/* Exact; a signalling NaN stays one. */
static inline float half_to_float(uint32_t half)
{
    float scaled = bits_float((half & 0x7fffu) << 13) * 0x1p112f;
    uint32_t infinite = (half & 0x7fffu) >= 0x7c00u ? 0x7f800000u : 0;
    return bits_float(float_bits(scaled) | infinite | (half & 0x8000u) << 16);
}

/* Round to nearest even; NaN becomes quiet. */
static inline uint32_t half_nearest(float x)
{
    uint32_t u = float_bits(x) & 0x7fffffffu;
    uint32_t sign = float_bits(x) >> 16 & 0x8000u;
    uint32_t normal = (u - (112u << 23) + 0xfffu + (u >> 13 & 1)) >> 13;
    uint32_t denormal = float_bits(bits_float(u) + 0.5f) - 0x3f000000u;
    uint32_t half = u < (113u << 23) ? denormal : normal;
    half = u >= (143u << 23) ? 0x7c00u : half;
    half = u > 0x7f800000u ? 0x7e00u | (u >> 13 & 0x3ffu) : half;
    return half | sign;
}

static inline uint32_t half_toward_zero(float x)
{
    uint32_t u = float_bits(x) & 0x7fffffffu;
    uint32_t sign = float_bits(x) >> 16 & 0x8000u;
    uint32_t shift = 126u - (u >> 23);
    uint32_t denormal =
        shift > 24 ? 0 : ((u & 0x7fffffu) | 0x800000u) >> (shift & 31);
    uint32_t half = u < (113u << 23) ? denormal : (u - (112u << 23)) >> 13;
    half = u >= (143u << 23) ? 0x7bffu : half;
    half = u == 0x7f800000u ? 0x7c00u : half;
    half = u > 0x7f800000u ? 0x7e00u | (u >> 13 & 0x3ffu) : half;
    return half | sign;
}

/* MODE rounding: 0 nearest even, 1 up, 2 down, 3 toward zero. */
static inline uint32_t half_round(float x, unsigned mode)
{
    if (mode == 0) {
        return half_nearest(x);
    }
    uint32_t half = half_toward_zero(x);
    bool exact = half_to_float(half) == x || x != x;
    bool away = mode == 1 ? x > 0 : mode == 2 ? x < 0 : false;
    return exact || !away ? half : half + 1;
}

/* (A * B rounded to half) + C; the sum is rounded when it is written. */
static inline float mad_half(float a, float b, float c, unsigned mode)
{
    return half_to_float(half_round(a * b, mode)) + c;
}

/* A * B + C such that rounding to half afterwards rounds once: the float
 * result is rounded to odd. The product of two halves is exact in double. */
static inline float fma_half(float a, float b, float c)
{
    double product = (double)a * (double)b;
    double sum = product + (double)c;
    double part = sum - product;
    double error = (product - (sum - part)) + ((double)c - part);
    float result = (float)sum;
    double rest = (sum - (double)result) + error;
    uint32_t bits = float_bits(result);
    bool adjust =
        rest != 0 && (bits & 1) == 0 && fabsf(result) <= FLT_MAX && result != 0;
    bool outward = (rest > 0) == (result > 0);
    return adjust ? bits_float(outward ? bits + 1 : bits - 1) : result;
}

/* ---- min, max, median, class ------------------------------------------ */

static inline bool signalling(float x)
{
    uint32_t u = float_bits(x);
    return (u & 0x7fffffffu) > 0x7f800000u && (u & 0x400000u) == 0;
}

static inline float quiet(float x)
{
    return bits_float(float_bits(x) | 0x400000u);
}

/* The number if one operand is NaN; -0 < +0. With IEEE a signalling NaN
 * wins and becomes quiet. */
static inline float min_float(float a, float b, bool ieee)
{
    bool first = a < b || (a == b && float_bits(a) >> 31 != 0) || b != b;
    float low = first ? a : b;
    low = ieee && signalling(b) ? quiet(b) : low;
    return ieee && signalling(a) ? quiet(a) : low;
}

static inline float max_float(float a, float b, bool ieee)
{
    bool first = a > b || (a == b && float_bits(a) >> 31 == 0) || b != b;
    float high = first ? a : b;
    high = ieee && signalling(b) ? quiet(b) : high;
    return ieee && signalling(a) ? quiet(a) : high;
}

static inline float median_float(float a, float b, float c, bool ieee)
{
    if (a != a || b != b || c != c) {
        return min_float(min_float(a, b, ieee), c, ieee);
    }
    float high = max_float(max_float(a, b, ieee), c, ieee);
    if (high == a) {
        return max_float(b, c, ieee);
    }
    return high == b ? max_float(a, c, ieee) : max_float(a, b, ieee);
}

static inline bool signalling_double(double x)
{
    return x != x && (double_bits(x) >> 51 & 1) == 0;
}

static inline double min_double(double a, double b, bool ieee)
{
    bool first = a < b || (a == b && double_bits(a) >> 63 != 0) || b != b;
    double low = first ? a : b;
    low = ieee && signalling_double(b) ? b : low;
    return ieee && signalling_double(a) ? a : low;
}

static inline double max_double(double a, double b, bool ieee)
{
    bool first = a > b || (a == b && double_bits(a) >> 63 == 0) || b != b;
    double high = first ? a : b;
    high = ieee && signalling_double(b) ? b : high;
    return ieee && signalling_double(a) ? a : high;
}

/* Bits of v_cmp_class: sNaN, qNaN, -inf, -normal, -denormal, -0, +0,
 * +denormal, +normal, +inf. */
static inline bool class_bit(bool nan, bool quiet, bool negative, bool inf,
                             bool zero, bool denormal, uint32_t mask)
{
    unsigned bit = nan        ? (quiet ? 1u : 0u)
                   : inf      ? (negative ? 2u : 9u)
                   : zero     ? (negative ? 5u : 6u)
                   : denormal ? (negative ? 4u : 7u)
                              : (negative ? 3u : 8u);
    return mask >> bit & 1;
}

static inline bool class_double(double x, uint32_t mask)
{
    return class_bit(x != x, !signalling_double(x), double_bits(x) >> 63 != 0,
                     fabs(x) > DBL_MAX, x == 0, fabs(x) < DBL_MIN, mask);
}

static inline bool class_float(float x, uint32_t mask)
{
    return class_bit(x != x, !signalling(x), float_bits(x) >> 31 != 0,
                     fabsf(x) > FLT_MAX, x == 0, fabsf(x) < FLT_MIN, mask);
}

/* x was widened from half, exactly. */
static inline bool class_half(float x, uint32_t mask)
{
    return class_bit(x != x, !signalling(x), float_bits(x) >> 31 != 0,
                     fabsf(x) > FLT_MAX, x == 0, fabsf(x) < 0x1p-14f, mask);
}

/* ---- arithmetic -------------------------------------------------------- */

static inline float fma_float(float a, float b, float c)
{
    return fmaf(a, b, c);
}

/* a + b, with the NaN of the vector ALU; for atomics. */
static inline float add_uniform(float a, float b)
{
    float sum = a + b;
    float nan = a != a ? quiet(a) : b != b ? quiet(b) : bits_float(0x7fc00000u);

    return sum != sum ? nan : sum;
}

/* Zero times anything is zero. */
static inline float mul_legacy(float a, float b)
{
    return a == 0 || b == 0 ? 0.0f : a * b;
}

/* v_dot2_f32_f16 as it is by default: float accumulation, low product first,
 * each sum rounded, float denormals flushed. Products of halves are exact in
 * float. (Order and rounding on gfx906 are not confirmed; exec_numerics.h has
 * the other candidates.) */
static inline float dot2_float(uint32_t a, uint32_t b, float c)
{
    float low = half_to_float(a & 0xffff) * half_to_float(b & 0xffff);
    float high = half_to_float(a >> 16) * half_to_float(b >> 16);
    return flush(flush(flush(c) + low) + high);
}

/* The host may expand these such that a zero's sign depends on its rounding
 * mode; it is always the operand's. */
static inline float floor_float(float x)
{
    return copysignf(floorf(x), x);
}
static inline float ceil_float(float x)
{
    return copysignf(ceilf(x), x);
}
static inline float trunc_float(float x)
{
    return copysignf(truncf(x), x);
}
static inline double floor_double(double x)
{
    return copysign(floor(x), x);
}
static inline double ceil_double(double x)
{
    return copysign(ceil(x), x);
}
static inline double trunc_double(double x)
{
    return copysign(trunc(x), x);
}

/* To nearest even, whatever the host's rounding mode. */
static inline double nearest_double(double x)
{
    double down = floor(x);
    double rest = x - down;
    bool odd = fmod(down, 2.0) != 0;
    double near = rest > 0.5 || (rest == 0.5 && odd) ? down + 1.0 : down;
    return fabs(x) < 0x1p52 ? copysign(near, x) : x;
}

static inline float nearest_float(float x)
{
    float down = floorf(x);
    float rest = x - down;
    float half = down * 0.5f;
    bool odd = floorf(half) != half;
    float near = rest > 0.5f || (rest == 0.5f && odd) ? down + 1.0f : down;
    return fabsf(x) < 0x1p23f ? copysignf(near, x) : x;
}

/* x - floor(x), kept below one. */
static inline float fract_float(float x)
{
    float rest = x - floorf(x);
    return rest >= 1.0f ? 0x1.fffffep-1f : rest;
}

static inline float fract_half(float x)
{
    float rest = x - floorf(x);
    return rest > 0x1.ffcp-1f ? 0x1.ffcp-1f : rest;
}

static inline double fract_double(double x)
{
    double rest = x - floor(x);
    return rest >= 1.0 ? 0x1.fffffffffffffp-1 : rest;
}

static inline float scale_float(float x, int32_t power)
{
    int32_t p = power < -300 ? -300 : power > 300 ? 300 : power;
    return (float)((double)x * bits_double((uint64_t)(p + 1023) << 52));
}

static inline float scale_half(float x, int32_t power)
{
    return scale_float(x, power);
}

/* frexp's parts, with the mantissa in [0.5, 1). */
static inline int32_t exponent_double(double x)
{
    int exponent = 0;
    if (x != 0 && fabs(x) <= DBL_MAX) {
        (void)frexp(x, &exponent);
    }
    return exponent;
}

static inline double mantissa_double(double x)
{
    int exponent = 0;
    return x != 0 && fabs(x) <= DBL_MAX ? frexp(x, &exponent) : x;
}

/* ---- conversion to integers: toward zero, clamped, NaN to zero --------- */

static inline int32_t i32_from_float(float x)
{
    bool inside = x > -2147483648.0f && x < 2147483648.0f;
    int32_t value = (int32_t)(inside ? x : 0.0f);
    value = x >= 2147483648.0f ? INT32_MAX : value;
    return x <= -2147483648.0f ? INT32_MIN : value;
}

static inline uint32_t u32_from_float(float x)
{
    bool high = x >= 2147483648.0f;
    float part = high ? x - 2147483648.0f : x;
    bool inside = part > 0.0f && part < 2147483648.0f;
    uint32_t value = (uint32_t)(int32_t)(inside ? part : 0.0f);
    value = high ? value + 0x80000000u : value;
    return x >= 4294967296.0f ? UINT32_MAX : value;
}

static inline int32_t i32_from_double(double x)
{
    return x != x               ? 0
           : x >= 2147483647.0  ? INT32_MAX
           : x <= -2147483648.0 ? INT32_MIN
                                : (int32_t)x;
}

static inline uint32_t u32_from_double(double x)
{
    return !(x > 0) ? 0 : x >= 4294967295.0 ? UINT32_MAX : (uint32_t)x;
}

/* Rounded once: the product is exact in double. */
static inline int32_t snorm16(float x)
{
    double scaled = (double)x * 32767.0;
    scaled = scaled > 32767.0 ? 32767.0 : scaled;
    scaled = scaled < -32767.0 ? -32767.0 : scaled;
    return i32_from_double(nearest_double(scaled));
}

static inline uint32_t unorm16(float x)
{
    double scaled = (double)x * 65535.0;
    scaled = scaled > 65535.0 ? 65535.0 : scaled;
    return u32_from_double(nearest_double(scaled));
}

#endif
