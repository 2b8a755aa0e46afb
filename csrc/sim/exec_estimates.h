/* exec_estimates.h: exp2, log2, rsq, sin and cos, which the hardware only
 * estimates, one lane each.
 *
 * By series in double, good to about 1e-16, so that rounding to float is right
 * but for about one argument in ten million; plain IEEE operations in a
 * written order, so the bits are the same on every host. Static inline;
 * included by the two compilations of exec_vector.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_EXEC_ESTIMATES_H
#define HIPSIM_EXEC_ESTIMATES_H

#include "exec_float.h"

static inline float exp2_float(float a)
{
    double x = a < -200.0f ? -200.0 : a > 200.0f ? 200.0 : (double)a;
    double shifted = x + 0x1.8p52;
    double whole = shifted - 0x1.8p52;
    double y = (x - whole) * 0x1.62e42fefa39efp-1;
    double p = 1.0 / 6227020800.0;
    p = p * y + 1.0 / 479001600.0;
    p = p * y + 1.0 / 39916800.0;
    p = p * y + 1.0 / 3628800.0;
    p = p * y + 1.0 / 362880.0;
    p = p * y + 1.0 / 40320.0;
    p = p * y + 1.0 / 5040.0;
    p = p * y + 1.0 / 720.0;
    p = p * y + 1.0 / 120.0;
    p = p * y + 1.0 / 24.0;
    p = p * y + 1.0 / 6.0;
    p = p * y + 0.5;
    p = p * y + 1.0;
    p = p * y + 1.0;
    uint64_t power = (double_bits(shifted) + 1023u) << 52;
    return a != a ? a : (float)(p * bits_double(power));
}

static inline float log2_float(float a)
{
    uint32_t u = float_bits(a);
    uint32_t above = (u & 0x7fffffu) > 0x3504f3u ? 1u : 0u;
    int32_t exponent = (int32_t)(u >> 23) - 127 + (int32_t)above;
    double m = (double)bits_float((u & 0x7fffffu) | (127u - above) << 23);
    double s = (m - 1.0) / (m + 1.0);
    double z = s * s;
    double p = 1.0 / 21.0;
    p = p * z + 1.0 / 19.0;
    p = p * z + 1.0 / 17.0;
    p = p * z + 1.0 / 15.0;
    p = p * z + 1.0 / 13.0;
    p = p * z + 1.0 / 11.0;
    p = p * z + 1.0 / 9.0;
    p = p * z + 1.0 / 7.0;
    p = p * z + 1.0 / 5.0;
    p = p * z + 1.0 / 3.0;
    p = p * z + 1.0;
    float r = (float)((double)exponent + s * p * 0x1.71547652b82fep+1);
    r = a == 0 ? -HUGE_VALF : r;
    r = a < 0 ? bits_float(0x7fc00000u) : r;
    return a != a || a > FLT_MAX ? a : r;
}

static inline float rsq_float(float a)
{
    return (float)(1.0 / sqrt((double)a));
}

/* 1 / sqrt(a), rounded once: a Newton step with the exact square. */
static inline double rsq_double(double a)
{
    int exponent;

    if (!(a > 0) || a > DBL_MAX) {
        return 1.0 / sqrt(a);
    }
    double m = frexp(a, &exponent);
    if (exponent % 2 != 0) {
        m *= 2;
        exponent--;
    }
    double y = 1.0 / sqrt(m);
    double square = y * y, rest = fma(y, y, -square);
    double error = fma(-m, square, 1.0) - m * rest;
    return ldexp(fma(y * 0.5, error, y), -exponent / 2);
}

/* sin and cos of so many turns, at most an eighth, by series. */
static inline double sine_series(double turns)
{
    double x = turns * 0x1.921fb54442d18p+2, z = x * x;
    double p = -1.0 / 1307674368000.0;
    p = p * z + 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    return x + x * z * p;
}

static inline double cosine_series(double turns)
{
    double x = turns * 0x1.921fb54442d18p+2, z = x * x;
    double p = 1.0 / 20922789888000.0;
    p = p * z - 1.0 / 87178291200.0;
    p = p * z + 1.0 / 479001600.0;
    p = p * z - 1.0 / 3628800.0;
    p = p * z + 1.0 / 40320.0;
    p = p * z - 1.0 / 720.0;
    p = p * z + 1.0 / 24.0;
    p = p * z - 0.5;
    return 1.0 + z * p;
}

/* The argument counts whole turns. What is left after quarter turns is exact,
 * so that sin and cos are zero and one where they should be. */
static inline float wave_turns(float a, bool cosine)
{
    double turn = (double)a - nearest_double((double)a);
    double quarters = nearest_double(turn * 4.0);
    double rest = turn - quarters * 0.25;
    int quadrant = a - a == 0 ? ((int)quarters + (cosine ? 1 : 0)) & 3 : 0;
    double x = (quadrant & 1) != 0 ? cosine_series(rest) : sine_series(rest);

    x = (quadrant & 2) != 0 ? -x : x;
    return a == 0 && !cosine ? a : x == 0 ? 0.0f : (float)x;
}

static inline float sin_turns(float a)
{
    return wave_turns(a, false);
}

static inline float cos_turns(float a)
{
    return wave_turns(a, true);
}

#endif
