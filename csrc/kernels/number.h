/* number.h: the kinds of numbers that a kernel computes with.
 *
 * A kernel is built for one KIND:
 *
 * FA_F16         operands are pairs of fp16, products and sums fp32 (dot2)
 * FA_BF16        the same; bf16 is brought into fp16's range by a power of
 *                two when it is staged, which is exact (stage.h)
 * FA_EXACT16     fp16 or bf16, as fa_args.stored says, is expanded to fp32 when
 *                it is staged
 * FA_F32         operands, products and sums fp32
 * FA_F64         the same in fp64
 * FA_EXACT32     fp32 is expanded to fp64 when it is staged
 *
 * and everything that differs between them is here.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_NUMBER_H
#define FA_KERNELS_NUMBER_H

#include "target.h"

/* The others are fa_dtypes. */
enum { FA_EXACT16 = FA_F64 + 1, FA_EXACT32 };

/* What sums are kept in. */
template <int KIND> struct fa_number {
    typedef float type;
};
template <> struct fa_number<FA_F64> {
    typedef double type;
};
template <> struct fa_number<FA_EXACT32> {
    typedef double type;
};
#define FA_NUMBER(KIND) typename fa_number<KIND>::type

/* Whether that is double. */
#define FA_IS_DOUBLE(KIND) ((KIND) == FA_F64 || (KIND) == FA_EXACT32)

/* What the program around sees of them: lse, its gradient, slopes, sinks. */
template <int KIND> struct fa_outer {
    typedef float type;
};
template <> struct fa_outer<FA_F64> {
    typedef double type;
};
#define FA_OUTER(KIND) typename fa_outer<KIND>::type

/* Whether operands are pairs of fp16. */
#define FA_IS_HALF(KIND) ((KIND) == FA_F16 || (KIND) == FA_BF16)

/* Bytes of an operand in LDS, and operands in 16 bytes, a granule. */
#define FA_OPERAND(KIND) (FA_IS_HALF(KIND) ? 2 : FA_IS_DOUBLE(KIND) ? 8 : 4)
#define FA_GRANULE(KIND) (16 / FA_OPERAND(KIND))

/* The fa_dtype of q, k, v, out and dout in memory. */
template <int KIND> static FA_DEVICE int fa_stored_of(fa_args_in a)
{
    return KIND == FA_EXACT16   ? a->stored
           : KIND == FA_EXACT32 ? (int)FA_F32
                                : KIND;
}

/* The bytes of an element of that type. */
#define FA_ELEMENT(KIND) \
    ((KIND) == FA_F64 ? 8 : (KIND) == FA_F32 || (KIND) == FA_EXACT32 ? 4 : 2)

/* The same for an fa_dtype that is known only at run time. */
static FA_DEVICE int fa_bytes_of(int stored)
{
    return stored == FA_F64 ? 8 : stored == FA_F32 ? 4 : 2;
}

/* The type of dq, dk and dv: that of q, or fp32. */
template <int KIND> static FA_DEVICE int fa_stored_grad(fa_args_in a)
{
    return KIND != FA_F64 && a->stored_grad == FA_F32 ? (int)FA_F32
                                                      : fa_stored_of<KIND>(a);
}

/* 0 for NaN and Inf. */
template <typename Number> static FA_DEVICE Number fa_if_finite(Number x)
{
    return x - x == 0 ? x : (Number)0;
}

/* Eight bytes of each operand, so 4 fp16, 2 floats or 1 double:
 * c + sum of products. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_multiply(u32x2 a, u32x2 b, FA_NUMBER(KIND) c)
{
    if constexpr (FA_IS_HALF(KIND)) {
        c = fa_dot2(a.x, b.x, c);
        return fa_dot2(a.y, b.y, c);
    }
    if constexpr (!FA_IS_DOUBLE(KIND)) {
        c = fa_fma(fa_bits<float>(a.x), fa_bits<float>(b.x), c);
        return fa_fma(fa_bits<float>(a.y), fa_bits<float>(b.y), c);
    }
    return fa_fma(fa_bits<double>(a), fa_bits<double>(b), (double)c);
}

/* -- exponentials ---------------------------------------------------------- */

/* 2^x for x <= 1023, within 1 ulp: n + f = x, |f| <= 1/2, and a polynomial
 * for 2^f whose relative error before rounding is 3.1e-18 (Remez exchange in
 * 50-digit arithmetic).  2^0 is 1 exactly, 2^-inf 0, 2^NaN NaN. */
static FA_DEVICE double fa_exp2(double x)
{
    const double c[12] = {
        0x1.0000000000000p+0,  0x1.62e42fefa39efp-1,  0x1.ebfbdff82c5adp-3,
        0x1.c6b08d7049fd1p-5,  0x1.3b2ab6fb9f413p-7,  0x1.5d87fe78cf26dp-10,
        0x1.43091310bf6b0p-13, 0x1.ffcbfba7b89b6p-17, 0x1.62bfc3c1c8a7cp-20,
        0x1.b526788b3b73dp-24, 0x1.e620fb765be15p-28, 0x1.e7aa0f6005d3cp-32};
    /* -inf - rint(-inf) would be NaN; below this the result is 0 anyway.
     * Not fa_max, which would lose a NaN. */
    const double low = fa_fixed(-1100.0);
    double bounded = x < low ? low : x;
    double n = fa_round(bounded);
    double f = bounded - n;
    double y = c[11];

#pragma unroll
    for (int i = 10; i >= 0; i--) {
        double next = fa_fixed_behind(c[i], &y);
        y = fa_fma(y, f, next);
    }
    return fa_ldexp(y, (int)n);
}

/* 2^(product + c + rest): what rounding takes from the exponent counts, because
 * at 8 it is three bits of the result.  c is small, or product is zero. */
static FA_DEVICE float fa_exp2_of_sum(float product, float c, float rest)
{
    const float ln2 = 0.693147181f;
    float x = product + c;
    float lost = (c - (x - product)) + rest;
    float y = fa_exp2(x);

    lost = fa_abs(lost) < 1.0f ? lost : 0.0f; /* of infinities: NaN */
    return fa_fma(y, lost * ln2, y);
}

/* 2^(a * b + c). */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_weight(FA_NUMBER(KIND) a, FA_NUMBER(KIND) b, FA_NUMBER(KIND) c)
{
    if constexpr (KIND == FA_F32) {
        float product = a * b;
        return fa_exp2_of_sum(product, c, fa_fma(a, b, -product));
    } else {
        return fa_exp2(fa_fma(a, b, c));
    }
}

/* 2^((a - less) * b + c), |a| <= |less| or the difference far below 0: in fp32
 * the difference to an LSE of thousands of keys loses as many bits. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND)
    fa_weight_less(FA_NUMBER(KIND) a, FA_NUMBER(KIND) less, FA_NUMBER(KIND) b,
                   FA_NUMBER(KIND) c)
{
    FA_NUMBER(KIND) left = a - less;

    if constexpr (KIND == FA_F32) {
        float product = left * b;
        float rest = fa_fma(left, b, -product);
        float dropped = a - (left + less);
        return fa_exp2_of_sum(product, c, fa_fma(dropped, b, rest));
    } else {
        return fa_exp2(fa_fma(left, b, c));
    }
}

/* log2(x) for 2^-100 < x < 2^100: the hardware's value, corrected by the
 * first terms of log2(1 + t). */
static FA_DEVICE double fa_log2(double x)
{
    const double log2_e = 1.4426950408889634;
    double y = (double)fa_log2((float)x);
    double t = fa_fma(x, fa_exp2(-y), -1.0);

    return fa_fma(fa_fma(fa_fma(t, 1.0 / 3, -0.5), t * t, t), log2_e, y);
}

/* 2^n as a float, for -126 <= n <= 127. */
static FA_DEVICE float fa_power_of_2(int n)
{
    return fa_bits<float>((uint32_t)(n + 127) << 23);
}

/* 1 / x for such a power of two. */
static FA_DEVICE float fa_inverse_power(float x)
{
    return fa_bits<float>((254u << 23) - fa_bits<uint32_t>(x));
}

/* -- 16 bits --------------------------------------------------------------- */

static FA_DEVICE float fa_bf16_to_float(uint32_t x)
{
    return fa_bits<float>(x << 16);
}

/* Rounded to nearest even; NaN stays NaN. */
static FA_DEVICE uint32_t fa_bf16_of(float x)
{
    uint32_t bits = fa_bits<uint32_t>(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return x == x ? rounded : (bits >> 16 | 0x40);
}

/* Two floats as they are stored in 16-bit elements. */
static FA_DEVICE uint32_t fa_pack_as(int stored, float low, float high)
{
    return stored == FA_BF16 ? fa_bf16_of(low) | fa_bf16_of(high) << 16
                             : fa_pack_halves(low, high);
}

/* The lower 16-bit element as a float. */
static FA_DEVICE float fa_unpack_as(int stored, uint32_t x)
{
    return stored == FA_BF16 ? fa_bf16_to_float(x)
                             : fa_half_to_float(x & 0xffff);
}

#endif
