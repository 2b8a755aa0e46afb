/* exec_vector.h: the vector ALU. Included once by exec_portable.c and once,
 * with the host's vector instructions allowed, by exec_avx2.c; each defines
 * EXEC_VALU as the name of its entry point.
 *
 * One instruction, in four steps that are the same for all of a format:
 *   operands  a row of 64 values per source: the register itself if nothing
 *             has to be done to it, else a copy after DPP, SDWA, op_sel,
 *             widening of 16-bit values, abs, neg and denormal flushing
 *   meaning   the statement of the .def list, for 64 lanes, into a temporary
 *   finish    NaN, output modifiers, rounding to 16 bits
 *   write     lanes enabled by EXEC (and by DPP)
 *
 * NaN results: the first NaN among the float sources, made quiet, else
 * 0x7fc00000. The host may pick another payload or sign, so that is set
 * here, for all hosts alike.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "exec_estimates.h"
#include "exec_meanings.h"
#include "exec_sources.h"

#include <fenv.h>
#include <string.h>

/* ---- finish ------------------------------------------------------------ */

static bool any_nan(const lane *row)
{
    uint32_t found = 0;
    for (unsigned l = 0; l < SIM_LANES; l++) {
        found |= (row[l].u & 0x7fffffffu) > 0x7f800000u ? 1u : 0u;
    }
    return found != 0;
}

static void uniform_nan(const isa_info *info, const valu *x)
{
    const lane *sources[3] = {x->a, x->b, x->c};

    for (unsigned l = 0; l < SIM_LANES; l++) {
        if (x->d[l].f == x->d[l].f) {
            continue;
        }
        uint32_t nan = 0x7fc00000u;
        for (int i = 2; i >= 0; i--) {
            unsigned type = info->type[1 + i];
            if (isa_is_float(type) && type != T_pkf16 && type != T_f64 &&
                sources[i][l].f != sources[i][l].f) {
                nan = sources[i][l].u | 0x400000u;
            } else if (type == T_f64) {
                uint64_t s = get_wide(sources[i], l);
                nan = (uint32_t)(s >> 32 & 0x80000000u) |
                      (uint32_t)(s >> 29 & 0x7fffffu) | 0x7fc00000u;
            }
        }
        x->d[l].u = nan;
    }
}

static void uniform_nan_double(const isa_info *info, const valu *x)
{
    const lane *sources[3] = {x->a, x->b, x->c};

    for (unsigned l = 0; l < SIM_LANES; l++) {
        double d = GET_f64(x->d, l);
        if (d == d) {
            continue;
        }
        uint64_t nan = UINT64_C(0x7ff8000000000000);
        for (int i = 2; i >= 0; i--) {
            if (info->type[1 + i] == T_f64) {
                double s = GET_f64(sources[i], l);
                nan = s != s ? double_bits(s) | UINT64_C(1) << 51 : nan;
            } else if (info->type[1 + i] == T_f32) {
                float s = sources[i][l].f;
                nan = s != s ? double_bits((double)s) | UINT64_C(1) << 51 : nan;
            }
        }
        put_wide(x->d, l, nan);
    }
}

/* omod works only where the hardware heeds it: no IEEE mode, no denormal
 * results. Clamp sends NaN to 0 under DX10_CLAMP. */
static void finish_float(const wave *w, const isa_row *row, unsigned type,
                         const valu *x)
{
    static const float factors[4] = {1.0f, 2.0f, 4.0f, 0.5f};
    bool keep = (denormals(w, type) & 2) != 0;
    float factor = keep || x->ieee ? 1.0f : factors[row->omod];
    bool dx10 = w->mode >> MODE_DX10_CLAMP & 1;

    for (unsigned l = 0; l < SIM_LANES; l++) {
        if (type == T_f64) {
            double v = GET_f64(x->d, l) * (double)factor;
            if (row->clamp) {
                v = v != v ? (dx10 ? 0.0 : v) : v <= 0 ? 0.0 : v > 1 ? 1.0 : v;
            }
            put_wide(x->d, l, double_bits(v));
        } else {
            float v = x->d[l].f * factor;
            if (row->clamp) {
                v = v != v   ? (dx10 ? 0.0f : v)
                    : v <= 0 ? 0.0f
                    : v > 1  ? 1.0f
                             : v;
            }
            x->d[l].f = v;
        }
    }
    if (!keep) {
        flush_row(type, x->d);
    }
}

/* 16-bit results: rounded or cut to the low half. */
static void narrow(unsigned type, unsigned round, lane *row)
{
    if (type == T_f16 || type == T_hi16 || type == T_pkf16) {
        if (round == 0) {
            for (unsigned l = 0; l < SIM_LANES; l++) {
                row[l].u = half_nearest(row[l].f);
            }
        } else {
            for (unsigned l = 0; l < SIM_LANES; l++) {
                row[l].u = half_round(row[l].f, round);
            }
        }
    } else {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            row[l].u &= 0xffff;
        }
    }
}

static void write_row(lane *to, const lane *from, uint64_t mask)
{
    if (mask == UINT64_MAX) {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            to[l] = from[l];
        }
        return;
    }
    uint32_t low = (uint32_t)mask, high = (uint32_t)(mask >> 32);
    for (unsigned l = 0; l < 32; l++) {
        uint32_t take = 0u - (low >> l & 1);
        to[l].u = (from[l].u & take) | (to[l].u & ~take);
    }
    for (unsigned l = 0; l < 32; l++) {
        uint32_t take = 0u - (high >> l & 1);
        to[32 + l].u = (from[32 + l].u & take) | (to[32 + l].u & ~take);
    }
}

/* Puts a 16- or 8-bit result where SDWA or op_sel wants it in the old
 * register contents. */
static void place(const isa_row *row, unsigned type, const lane *old,
                  lane *result)
{
    unsigned shift = 0, bits = 32;
    unsigned unused = 2; /* preserve */

    if (row->ext == ISA_EXT_SDWA) {
        unsigned select = row->sel[0];
        bits = select < 4 ? 8u : select < 6 ? 16u : 32u;
        shift = select < 4 ? 8 * select : select == 5 ? 16u : 0;
        unused = row->dst_unused;
    } else if (type == T_hi16 || (isa_ops[row->op].flags & ISA_SELECT) != 0) {
        if (type == T_u32) {
            return;
        }
        bits = 16;
        shift = type == T_hi16 || (row->op_sel & 8) != 0 ? 16 : 0;
    } else if (row->format == F_VOP3P && type == T_f16) {
        bits = 16; /* mixlo */
    }
    if (bits == 32) {
        return;
    }
    uint32_t field = (1u << bits) - 1u;
    for (unsigned l = 0; l < SIM_LANES; l++) {
        uint32_t value = result[l].u & field;
        uint32_t rest = 0;
        if (unused == 2) {
            rest = old[l].u & ~(field << shift);
        } else if (unused == 1 && (value >> (bits - 1)) != 0) {
            rest = shift + bits < 32 ? ~0u << (shift + bits) : 0;
        }
        result[l].u = value << shift | rest;
    }
}

static uint64_t gather_bits(const lane *row)
{
    uint64_t mask = 0;
#ifdef EXEC_AVX2
    for (unsigned l = 0; l < SIM_LANES; l += 8) {
        const void *at = row + l;
        __m256i part = _mm256_load_si256((const __m256i *)at);
        __m256 top = _mm256_castsi256_ps(_mm256_slli_epi32(part, 31));
        mask |= (uint64_t)(unsigned)_mm256_movemask_ps(top) << l;
    }
#else
    for (unsigned l = 0; l < SIM_LANES; l++) {
        mask |= (uint64_t)(row[l].u & 1) << l;
    }
#endif
    return mask;
}

/* ---- one instruction --------------------------------------------------- */

typedef struct valu_buffers {
    _Alignas(64) lane source[3][2 * SIM_LANES];
    _Alignas(64) lane result[2 * SIM_LANES];
    _Alignas(64) lane high[SIM_LANES];
    _Alignas(64) lane carry[SIM_LANES];
} valu_buffers;

/* Four masked sums of byte distances, 32 bits each, added to C. */
static void quad_sad_wide(wave *w, const isa_row *row, uint64_t exec)
{
    valu_buffers buffers;
    const lane *a = raw_source(w, row, 0, T_u64, buffers.source[0]);
    const lane *b = raw_source(w, row, 1, T_u32, buffers.source[1]);
    const lane *c = w->v + (size_t)(row->src[2] - SRC_VGPR) * SIM_LANES;
    lane result[4][SIM_LANES];

    for (unsigned i = 0; i < 4; i++) {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            uint32_t bytes = (uint32_t)(get_wide(a, l) >> 8 * i);
            result[i][l].u =
                c[i * SIM_LANES + l].u + sad_bytes(bytes, b[l].u, true);
        }
    }
    for (unsigned i = 0; i < 4; i++) {
        write_row(w->v + (size_t)(row->dst + i) * SIM_LANES, result[i], exec);
    }
}

/* Instructions that are not one statement per lane. */
static void special(wave *w, const isa_row *row)
{
    uint64_t exec = exec_mask(w);
    lane *d = w->v + (size_t)row->dst * SIM_LANES;

    switch (row->op) {
    case ISA_v_readfirstlane_b32:
    case ISA_v_readlane_b32: {
        unsigned from = exec == 0 ? 0 : (unsigned)__builtin_ctzll(exec);
        if (row->op == ISA_v_readlane_b32) {
            from = exec_operand(w, row, row->src[1], T_u32) & 63;
        }
        w->s[row->sdst] =
            row->src[0] >= SRC_VGPR
                ? w->v[(size_t)(row->src[0] - SRC_VGPR) * SIM_LANES + from].u
                : (uint32_t)exec_operand(w, row, row->src[0], T_u32);
        break;
    }
    case ISA_v_writelane_b32:
        d[exec_operand(w, row, row->src[1], T_u32) & 63].u =
            (uint32_t)exec_operand(w, row, row->src[0], T_u32);
        break;
    case ISA_v_swap_b32: {
        lane *a = w->v + (size_t)(row->src[0] - SRC_VGPR) * SIM_LANES;
        for (unsigned l = 0; l < SIM_LANES; l++) {
            if (exec >> l & 1) {
                lane keep = d[l];
                d[l] = a[l];
                a[l] = keep;
            }
        }
        break;
    }
    case ISA_v_mqsad_u32_u8:
        quad_sad_wide(w, row, exec);
        break;
    default: /* v_nop, v_clrexcp */
        break;
    }
}

/* Evaluates the meaning into x->d and finishes it, for one half. */
static void evaluate(wave *w, const isa_row *row, const isa_info *info, valu *x,
                     bool plain)
{
    static const int rounding[4] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD,
                                    FE_TOWARDZERO};
    unsigned type = info->type[0];
    unsigned round = 0;

    if ((w->mode & 15) != 0 &&
        (isa_is_float(type) || isa_is_float(info->type[1])) &&
        estimate_of(row->op) == ESTIMATE_NONE) {
        bool single =
            type == T_f32 || (type == T_u32 && info->type[1] == T_f32);
        unsigned at = single ? MODE_ROUND_F32 : MODE_ROUND_F16_F64;
        round = w->mode >> at & 3;
        x->round = w->mode >> MODE_ROUND_F16_F64 & 3;
        fesetround(rounding[round]);
    }
    meanings[row->op](x);
    if (round != 0) {
        fesetround(FE_TONEAREST);
    }
    if (w->group->dispatch->adversarial_ulp &&
        estimate_of(row->op) != ESTIMATE_NONE) {
        estimate_perturb(info, estimate_of(row->op), x->a, x->d);
    }
    if (type == T_f64) {
        uniform_nan_double(info, x);
    } else if (isa_is_float(type) && any_nan(x->d)) {
        uniform_nan(info, x);
    }
    if (!plain && isa_is_float(type)) {
        finish_float(w, row, type, x);
    }
    if (type == T_f16 || type == T_hi16 || type == T_pkf16 || type == T_u16 ||
        type == T_i16 || type == T_pk16) {
        narrow(type, x->round, x->d);
    }
}

void EXEC_VALU(wave *w, const isa_row *row)
{
    valu_buffers buffers;
    const isa_info *info = &isa_ops[row->op];
    uint64_t exec = exec_mask(w);
    uint64_t write = exec;
    unsigned type = info->type[0];
    bool plain = row->plain && (w->mode & 0xff) == 0xf0;
    lane *d = w->v + (size_t)row->dst * SIM_LANES;
    valu x = {.d = buffers.result,
              .carry = buffers.carry,
              .clamp = row->clamp,
              .ieee = w->mode >> MODE_IEEE & 1,
              .dot2 = w->group->dispatch->dot2,
              .vcc = pair(w, SRC_VCC)};

    if ((info->flags & ISA_SPECIAL) != 0) {
        special(w, row);
        return;
    }
    const lane **sources[3] = {&x.a, &x.b, &x.c};
    for (unsigned i = 0; i < 3; i++) {
        *sources[i] = buffers.source[i];
        if (info->type[1 + i] != T_none) {
            *sources[i] = plain
                              ? raw_source(w, row, i, info->type[1 + i],
                                           buffers.source[i])
                              : source(w, row, i, 0, buffers.source[i], &write);
        }
    }
    evaluate(w, row, info, &x, plain);

    if (type == T_mask) {
        uint64_t mask = gather_bits(x.d) & exec;
        set_pair(w, row->sdst, mask);
        if (isa_compares_exec(info)) {
            set_pair(w, SRC_EXEC, mask);
        }
        return;
    }
    if ((type == T_pk16 || type == T_pkf16)) {
        for (unsigned i = 0; i < 3; i++) {
            *sources[i] = source(w, row, i, 1, buffers.source[i], &write);
        }
        x.d = buffers.high;
        evaluate(w, row, info, &x, plain);
        for (unsigned l = 0; l < SIM_LANES; l++) {
            buffers.result[l].u |= buffers.high[l].u << 16;
        }
    }
    if (!plain) {
        place(row, type, d, buffers.result);
    }
    write_row(d, buffers.result, write);
    if (isa_registers(type) == 2) {
        write_row(d + SIM_LANES, buffers.result + SIM_LANES, write);
    }
    if ((info->flags & ISA_CARRY) != 0) {
        set_pair(w, row->sdst, gather_bits(buffers.carry) & write);
    }
}
