/* exec_division.h: the steps of a division, one lane each: v_div_scale,
 * v_div_fmas and v_div_fixup, before, between and after Newton steps.
 *
 * Source: Vega ISA chapter 12; where it is silent, what gives right quotients.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_EXEC_DIVISION_H
#define HIPSIM_EXEC_DIVISION_H

#include "exec_float.h"

static inline unsigned exponent_bits(float x)
{
    return float_bits(x) >> 23 & 255;
}

static inline unsigned exponent_bits_double(double x)
{
    return (unsigned)(double_bits(x) >> 52 & 2047);
}

/* v_div_scale: x is the denominator or the numerator, to be scaled so that
 * the Newton steps neither overflow nor lose bits; *post says that
 * v_div_fmas must scale back. Where 1/d and n/d are both denormal the
 * denominator is scaled down (fitted to right quotients, not confirmed). */
static inline float div_scale_float(float x, float d, float n, uint32_t *post)
{
    int difference = (int)exponent_bits(n) - (int)exponent_bits(d);
    bool tiny_inverse = fabs(1.0 / (double)d) < (double)FLT_MIN;
    bool tiny_quotient = fabs((double)n / (double)d) < (double)FLT_MIN;

    *post = 0;
    if (n == 0 || d == 0) {
        return bits_float(0x7fc00000u);
    }
    if (difference >= 96) {
        *post = 1;
        return x == d ? x * 0x1p64f : x;
    }
    if (exponent_bits(d) == 0) {
        return x * 0x1p64f;
    }
    if (tiny_inverse && tiny_quotient) {
        *post = 1;
        return x == d ? x * 0x1p-64f : x;
    }
    if (tiny_inverse) {
        return x * 0x1p-64f;
    }
    if (tiny_quotient) {
        *post = 1;
        return x == n ? x * 0x1p64f : x;
    }
    return exponent_bits(n) <= 23 ? x * 0x1p64f : x;
}

static inline double div_scale_double(double x, double d, double n,
                                      uint32_t *post)
{
    int difference =
        (int)exponent_bits_double(n) - (int)exponent_bits_double(d);
    bool tiny_inverse = fabs(1.0 / d) < DBL_MIN;
    bool tiny_quotient = fabs(n / d) < DBL_MIN;

    *post = 0;
    if (n == 0 || d == 0) {
        return bits_double(UINT64_C(0x7ff8000000000000));
    }
    if (difference >= 768) {
        *post = 1;
        return x == d ? x * 0x1p128 : x;
    }
    if (exponent_bits_double(d) == 0) {
        return x * 0x1p128;
    }
    if (tiny_inverse && tiny_quotient) {
        *post = 1;
        return x == d ? x * 0x1p-128 : x;
    }
    if (tiny_inverse) {
        return x * 0x1p-128;
    }
    if (tiny_quotient) {
        *post = 1;
        return x == n ? x * 0x1p128 : x;
    }
    return exponent_bits_double(n) <= 53 ? x * 0x1p128 : x;
}

/* v_div_fmas with VCC: the scaled a * b + c, rounded once. Only where the
 * scaled sum is denormal is that more than a product: if the first rounding
 * left half a unit of the last place, its error decides. (Quotients that are
 * denormal would else be rounded twice; OpenCL demands them right.) */
static inline float div_fmas_float(float a, float b, float c)
{
    const float half = 0x1p-86f; /* unscaled half of the smallest float */
    float sum = fma_float(a, b, c);
    float scaled = sum * 0x1p-64f;

    if (exponent_bits(c) > 127) {
        return sum * 0x1p64f;
    }
    if (fabsf(sum - scaled * 0x1p64f) == half) {
        double error = (double)a * b + ((double)c - sum);
        scaled = error > 0   ? (sum + half) * 0x1p-64f
                 : error < 0 ? (sum - half) * 0x1p-64f
                             : scaled;
    }
    return scaled;
}

static inline double div_fmas_double(double a, double b, double c)
{
    const double half = 0x1p-947;
    double sum = fma(a, b, c);
    double scaled = sum * 0x1p-128;

    if (fabs(c) >= 2.0) {
        return sum * 0x1p128;
    }
    if (fabs(sum - scaled * 0x1p128) == half) {
        double error = fma(a, b, c - sum);
        scaled = error > 0   ? (sum + half) * 0x1p-128
                 : error < 0 ? (sum - half) * 0x1p-128
                             : scaled;
    }
    return scaled;
}

/* v_div_fixup: the special quotients; q is the estimate of n / d. A NaN
 * estimate of finite operands can only be an overflow. */
static inline double fixup_double(double q, double d, double n)
{
    bool negative = (double_bits(d) ^ double_bits(n)) >> 63 != 0;
    double sign = negative ? -1.0 : 1.0;

    if (n != n || d != d) {
        return n != n ? n : d;
    }
    if ((n == 0 && d == 0) || (fabs(n) > DBL_MAX && fabs(d) > DBL_MAX)) {
        return bits_double(UINT64_C(0xfff8000000000000));
    }
    if (d == 0 || fabs(n) > DBL_MAX) {
        return sign * HUGE_VAL;
    }
    if (n == 0 || fabs(d) > DBL_MAX) {
        return sign * 0.0;
    }
    return q != q ? sign * HUGE_VAL : copysign(q, sign);
}

static inline float fixup_float(float q, float d, float n)
{
    return n != n   ? n
           : d != d ? d
                    : (float)fixup_double((double)q, (double)d, (double)n);
}

static inline float fixup_half(float q, float d, float n)
{
    return fixup_float(q, d, n);
}

#endif
