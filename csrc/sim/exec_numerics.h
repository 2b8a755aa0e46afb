/* exec_numerics.h: what no document says about the float unit, as settings
 * (internal): the inside of v_dot2_f32_f16, and estimates that are off by an
 * ulp. Kernels must keep their bounds under every setting, since the card's
 * choice is not known. Included by exec_meanings.h only; default settings
 * do not come here.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_EXEC_NUMERICS_H
#define HIPSIM_EXEC_NUMERICS_H

#include "exec.h"
#include "exec_float.h"
#include "options.h"

#include <fenv.h>

/* ---- v_dot2_f32_f16 ---------------------------------------------------- */

/* One lane's two products, exact, and its addend. */
typedef struct dot2_terms {
    float low, high, c;
} dot2_terms;

static inline float dot2_half(uint32_t half, unsigned setting)
{
    bool denormal = (half & 0x7c00u) == 0;

    return half_to_float(denormal && (setting & SIM_DOT2_FLUSH16) != 0
                             ? half & 0x8000u
                             : half & 0xffffu);
}

static inline float dot2_result(float x, unsigned setting)
{
    return (setting & SIM_DOT2_KEEP32) != 0 ? x : flush(x);
}

static inline dot2_terms dot2_split(uint32_t a, uint32_t b, float c,
                                    unsigned setting)
{
    return (dot2_terms){
        .low = dot2_half(a, setting) * dot2_half(b, setting),
        .high = dot2_half(a >> 16, setting) * dot2_half(b >> 16, setting),
        .c = dot2_result(c, setting),
    };
}

static inline float dot2_sequential(dot2_terms t, unsigned setting)
{
    bool low_first = (setting & SIM_DOT2_ORDER) == SIM_DOT2_LOHI;
    float first = low_first ? t.low : t.high;
    float second = low_first ? t.high : t.low;

    return dot2_result(dot2_result(t.c + first, setting) + second, setting);
}

/* x + y as a rounded sum and its error, exact if the host rounds to nearest. */
static inline double two_sum(double x, double y, double *error)
{
    double sum = x + y, part = sum - x;

    *error = (x - (sum - part)) + (y - part);
    return sum;
}

/* The exact sum of the three, rounded to odd: rounding that to float later
 * rounds once. Wants a host that rounds to nearest, and finite terms. */
static inline double dot2_odd(dot2_terms t)
{
    double small, middle, least;
    double sum = two_sum((double)t.low, (double)t.high, &small);

    sum = two_sum(sum, (double)t.c, &middle);
    middle = two_sum(middle, small, &least);
    sum = two_sum(sum, middle, &middle);
    double rest = middle != 0 ? middle : least;
    uint64_t bits = double_bits(sum);
    if (rest != 0 && (bits & 1) == 0) {
        bits = (rest > 0) == (sum > 0) ? bits + 1 : bits - 1;
    }
    return bits_double(bits);
}

/* All lanes, under a setting other than the default. The host rounds as MODE
 * says, before and after. */
static void dot2_by_setting(const lane *a, const lane *b, const lane *c,
                            unsigned setting, lane *d)
{
    double odd[SIM_LANES] = {0};
    bool fused = (setting & SIM_DOT2_ORDER) == SIM_DOT2_FUSED;
    int round = fegetround();

    if (fused) {
        (void)fesetround(FE_TONEAREST);
        for (unsigned l = 0; l < SIM_LANES; l++) {
            odd[l] = dot2_odd(dot2_split(a[l].u, b[l].u, c[l].f, setting));
        }
        (void)fesetround(round);
    }
    for (unsigned l = 0; l < SIM_LANES; l++) {
        dot2_terms t = dot2_split(a[l].u, b[l].u, c[l].f, setting);
        /* Zero, infinities and NaN need no rounding, but the right sign. */
        bool plain = odd[l] == 0 || !(fabsf(t.low) <= FLT_MAX) ||
                     !(fabsf(t.high) <= FLT_MAX) || !(fabsf(t.c) <= FLT_MAX);
        if (!fused) {
            d[l].f = dot2_sequential(t, setting);
        } else if (plain) {
            d[l].f = (float)((double)t.low + (double)t.high + (double)t.c);
        } else {
            d[l].f = dot2_result((float)odd[l], setting);
        }
    }
}

/* ---- estimates --------------------------------------------------------- */

typedef enum estimate_kind {
    ESTIMATE_NONE,
    ESTIMATE_ANY,
    ESTIMATE_EXP, /* of zero is one, exactly */
    ESTIMATE_SINE /* stays within one */
} estimate_kind;

static estimate_kind estimate_of(unsigned op)
{
    switch (op) {
    case ISA_v_exp_f32:
    case ISA_v_exp_legacy_f32:
    case ISA_v_exp_f16:
        return ESTIMATE_EXP;
    case ISA_v_sin_f32:
    case ISA_v_cos_f32:
    case ISA_v_sin_f16:
    case ISA_v_cos_f16:
        return ESTIMATE_SINE;
    case ISA_v_log_f32:
    case ISA_v_log_legacy_f32:
    case ISA_v_log_f16:
    case ISA_v_rcp_f32:
    case ISA_v_rcp_iflag_f32:
    case ISA_v_rcp_f16:
    case ISA_v_rcp_f64:
    case ISA_v_rsq_f32:
    case ISA_v_rsq_f16:
    case ISA_v_rsq_f64:
    case ISA_v_sqrt_f32:
    case ISA_v_sqrt_f16:
    case ISA_v_sqrt_f64:
        return ESTIMATE_ANY;
    default:
        return ESTIMATE_NONE;
    }
}

/* -1, 0 or 1 from an opcode and the bits of its operand. */
static inline int estimate_step(unsigned opcode, uint64_t operand)
{
    uint64_t x = operand ^ (uint64_t)opcode << 32;

    for (int i = 0; i < 3; i++) {
        x = (x + opcode) * UINT64_C(0x9e3779b97f4a7c15);
        x ^= x >> 32;
    }
    return (int)(x % 3) - 1;
}

/* A number's magnitude one step away, or as it was if that would be beyond
 * [least, most]. Zero, infinities and NaN are beyond already. */
static inline uint64_t estimate_moved(uint64_t magnitude, int step,
                                      uint64_t least, uint64_t most)
{
    uint64_t moved = magnitude + (uint64_t)(int64_t)step;
    bool number = magnitude >= least && magnitude <= most;

    return number && moved >= least && moved <= most ? moved : magnitude;
}

/* Puts a row of estimates off by up to one ulp, before the output modifiers.
 * Half results stand as floats. (Estimates are rounded to nearest, whatever
 * MODE says.) */
static void estimate_perturb(const isa_info *info, estimate_kind kind,
                             const lane *a, lane *d)
{
    for (unsigned l = 0; l < SIM_LANES; l++) {
        uint64_t operand = a[l].u;
        if (info->type[1] == T_f64) {
            operand |= (uint64_t)a[SIM_LANES + l].u << 32;
        }
        int step = estimate_step(info->opcode, operand);
        if (kind == ESTIMATE_EXP && d[l].f == 1.0f && flush(a[l].f) == 0) {
            continue;
        }
        if (info->type[0] == T_f64) {
            uint64_t bits = (uint64_t)d[SIM_LANES + l].u << 32 | d[l].u;
            uint64_t sign = bits & UINT64_C(1) << 63;
            bits = sign | estimate_moved(bits ^ sign, step, 1,
                                         UINT64_C(0x7fefffffffffffff));
            d[l].u = (uint32_t)bits;
            d[SIM_LANES + l].u = (uint32_t)(bits >> 32);
        } else if (info->type[0] == T_f16) {
            uint32_t bits = half_nearest(d[l].f), sign = bits & 0x8000u;
            uint64_t most = kind == ESTIMATE_SINE ? 0x3c00 : 0x7bff;
            if (d[l].f == d[l].f) {
                d[l].f = half_to_float(sign | (uint32_t)estimate_moved(
                                                  bits ^ sign, step, 1, most));
            }
        } else {
            uint32_t sign = d[l].u & 0x80000000u;
            uint64_t most = kind == ESTIMATE_SINE ? 0x3f800000 : 0x7f7fffff;
            d[l].u = sign | (uint32_t)estimate_moved(d[l].u ^ sign, step,
                                                     0x00800000, most);
        }
    }
}

#endif
