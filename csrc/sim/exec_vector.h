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
#include "exec.h"
#include "exec_estimates.h"
#include "exec_float.h"
#include "exec_integer.h"
#include "exec_lanes.h"
#include "exec_media.h"
#include "exec_numerics.h"

#include <fenv.h>
#include <string.h>

/* One instruction in flight, all lanes. Rows of 64-bit operands are followed
 * by the row of the high halves. */
typedef struct valu {
    const lane *a, *b, *c;
    lane *d;
    lane *carry;
    bool clamp;
    bool ieee;
    unsigned round; /* MODE rounding for 16-bit results */
    unsigned dot2;  /* SIM_DOT2_* */
    uint64_t vcc;
} valu;

typedef void valu_meaning(const valu *x);

/* ---- the lists as functions over 64 lanes ------------------------------ */

/* How an operand of each type stands in its row (S source, R result). */
typedef uint32_t S_none, S_u32, S_u16, S_pk16, S_pkf16, S_raw, S_mask;
typedef int32_t S_i32, S_i16;
typedef float S_f32, S_f16, S_mix;
typedef uint64_t S_u64;
typedef int64_t S_i64;
typedef double S_f64;
typedef uint32_t R_none, R_u32, R_u16, R_pk16, R_mask;
typedef int32_t R_i32, R_i16;
typedef float R_f32, R_f16, R_pkf16, R_hi16;
typedef uint64_t R_u64;
typedef int64_t R_i64;
typedef double R_f64;

static inline uint64_t get_wide(const lane *row, unsigned l)
{
    return (uint64_t)row[SIM_LANES + l].u << 32 | row[l].u;
}

static inline void put_wide(lane *row, unsigned l, uint64_t value)
{
    row[l].u = (uint32_t)value;
    row[SIM_LANES + l].u = (uint32_t)(value >> 32);
}

#define GET_none(row, l) 0
#define GET_u32(row, l) (row)[l].u
#define GET_u16 GET_u32
#define GET_pk16 GET_u32
#define GET_pkf16 GET_u32
#define GET_raw GET_u32
#define GET_mask GET_u32
#define GET_i32(row, l) (row)[l].i
#define GET_i16 GET_i32
#define GET_f32(row, l) (row)[l].f
#define GET_f16 GET_f32
#define GET_mix GET_f32
#define GET_u64 get_wide
#define GET_i64(row, l) (int64_t)get_wide(row, l)
#define GET_f64(row, l) bits_double(get_wide(row, l))
#define PUT_none(row, l, v) (void)(v)
#define PUT_u32(row, l, v) (row)[l].u = (v)
#define PUT_u16 PUT_u32
#define PUT_pk16 PUT_u32
#define PUT_mask PUT_u32
#define PUT_i32(row, l, v) (row)[l].i = (v)
#define PUT_i16 PUT_i32
#define PUT_f32(row, l, v) (row)[l].f = (v)
#define PUT_f16 PUT_f32
#define PUT_pkf16 PUT_f32
#define PUT_hi16 PUT_f32
#define PUT_u64 put_wide
#define PUT_i64(row, l, v) put_wide(row, l, (uint64_t)(v))
#define PUT_f64(row, l, v) put_wide(row, l, double_bits(v))

#define MEANING(name, td, ta, tb, tc, ...)                  \
    static void name(const valu *x)                         \
    {                                                       \
        lane *restrict d = x->d;                            \
        const lane *a = x->a, *b = x->b, *c = x->c;         \
        const bool CLAMP = x->clamp, IEEE = x->ieee;        \
        const unsigned ROUND = x->round;                    \
        const uint64_t vcc = x->vcc;                        \
        (void)a;                                            \
        (void)b;                                            \
        (void)c;                                            \
        (void)d;                                            \
        (void)CLAMP;                                        \
        (void)IEEE;                                         \
        (void)ROUND;                                        \
        (void)vcc;                                          \
        for (unsigned LANE = 0; LANE < SIM_LANES; LANE++) { \
            const S_##ta A = GET_##ta(a, LANE);             \
            const S_##tb B = GET_##tb(b, LANE);             \
            const S_##tc C = GET_##tc(c, LANE);             \
            R_##td D;                                       \
            (void)A;                                        \
            (void)B;                                        \
            (void)C;                                        \
            __VA_ARGS__;                                    \
            PUT_##td(d, LANE, D);                           \
        }                                                   \
    }

/* The same with a second result, one bit per lane. */
#define MEANING_CO(name, td, ta, tb, tc, ...)               \
    static void name(const valu *x)                         \
    {                                                       \
        lane *restrict d = x->d;                            \
        lane *restrict carry = x->carry;                    \
        const lane *a = x->a, *b = x->b, *c = x->c;         \
        const bool CLAMP = x->clamp;                        \
        (void)c;                                            \
        (void)CLAMP;                                        \
        for (unsigned LANE = 0; LANE < SIM_LANES; LANE++) { \
            const S_##ta A = GET_##ta(a, LANE);             \
            const S_##tb B = GET_##tb(b, LANE);             \
            const S_##tc C = GET_##tc(c, LANE);             \
            R_##td D;                                       \
            uint32_t CARRY;                                 \
            (void)C;                                        \
            __VA_ARGS__;                                    \
            PUT_##td(d, LANE, D);                           \
            carry[LANE].u = CARRY;                          \
        }                                                   \
    }

#define VCC_BIT (vcc >> LANE & 1)

#define VOP1(op, name, d, a, ...) MEANING(name, d, a, none, none, __VA_ARGS__)
#define VOP1_SPECIAL(op, name, ...)
#include "vop1.def"
#define VOP2(op, name, d, a, b, c, ...) MEANING(name, d, a, b, c, __VA_ARGS__)
#define VOP2_CO(op, name, d, a, b, c, ...) \
    MEANING_CO(name, d, a, b, c, __VA_ARGS__)
#include "vop2.def"
#define VOPC(op, name, a, b, ...) MEANING(name, mask, a, b, none, __VA_ARGS__)
#include "vopc.def"
#define VOP3(op, name, d, a, b, c, ...) MEANING(name, d, a, b, c, __VA_ARGS__)
#define VOP3_CO(op, name, d, a, b, c, ...) \
    MEANING_CO(name, d, a, b, c, __VA_ARGS__)
#define VOP3_SPECIAL(op, name, ...)
#include "vop3.def"
#define VOP3P(op, name, d, a, b, c, ...) MEANING(name, d, a, b, c, __VA_ARGS__)
#ifdef EXEC_AVX2
#define VOP3P_HOST(op, name, ...)
#else
#define VOP3P_HOST(op, name, d, a, b, c, ...) \
    MEANING(name##_default, d, a, b, c, __VA_ARGS__)
#endif
#include "vop3p.def"

#ifdef EXEC_AVX2
/* dot2_float for 64 lanes with the host's half conversion. */
static inline __m256 flush_vector(__m256 x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 normal = _mm256_cmp_ps(_mm256_andnot_ps(sign, x),
                                  _mm256_set1_ps(FLT_MIN), _CMP_NLT_UQ);
    return _mm256_and_ps(x, _mm256_or_ps(normal, sign));
}

static inline __m256 half_products(const lane *a, const lane *b)
{
    __m128i x = _mm_load_si128((const __m128i *)(const void *)a);
    __m128i y = _mm_load_si128((const __m128i *)(const void *)b);
    return _mm256_mul_ps(_mm256_cvtph_ps(x), _mm256_cvtph_ps(y));
}

static void v_dot2_f32_f16_default(const valu *x)
{
    for (unsigned l = 0; l < SIM_LANES; l += 8) {
        __m256 first = half_products(x->a + l, x->b + l);
        __m256 second = half_products(x->a + l + 4, x->b + l + 4);
        __m256 even = _mm256_permute2f128_ps(first, second, 0x20);
        __m256 odd = _mm256_permute2f128_ps(first, second, 0x31);
        __m256 low = _mm256_shuffle_ps(even, odd, 0x88);
        __m256 high = _mm256_shuffle_ps(even, odd, 0xdd);
        __m256 sum = flush_vector(_mm256_load_ps(&x->c[l].f));
        sum = flush_vector(_mm256_add_ps(sum, low));
        sum = flush_vector(_mm256_add_ps(sum, high));
        _mm256_store_ps(&x->d[l].f, sum);
    }
}
#endif

static void v_dot2_f32_f16(const valu *x)
{
    if (x->dot2 == SIM_DOT2_LOHI) {
        v_dot2_f32_f16_default(x);
    } else {
        dot2_by_setting(x->a, x->b, x->c, x->dot2, x->d);
    }
}

static valu_meaning *const meanings[ISA_COUNT] = {
#define ROW(op, name, ...) [ISA_##name] = name,
#define VOP1 ROW
#define VOP1_SPECIAL(op, name, ...)
#include "vop1.def"
#define VOP2 ROW
#include "vop2.def"
#define VOPC ROW
#include "vopc.def"
#define VOP3 ROW
#define VOP3_SPECIAL(op, name, ...)
#include "vop3.def"
#define VOP3P ROW
#include "vop3p.def"
};

/* ---- operands ---------------------------------------------------------- */

typedef struct valu_buffers {
    _Alignas(64) lane source[3][2 * SIM_LANES];
    _Alignas(64) lane result[2 * SIM_LANES];
    _Alignas(64) lane high[SIM_LANES];
    _Alignas(64) lane carry[SIM_LANES];
} valu_buffers;

static void fill(lane *row, uint32_t value)
{
    for (unsigned l = 0; l < SIM_LANES; l++) {
        row[l].u = value;
    }
}

/* One bit of `mask` per lane, as 0 or 1. */
static void spread(lane *row, uint64_t mask)
{
    uint32_t low = (uint32_t)mask, high = (uint32_t)(mask >> 32);
    for (unsigned l = 0; l < 32; l++) {
        row[l].u = low >> l & 1;
    }
    for (unsigned l = 0; l < 32; l++) {
        row[32 + l].u = high >> l & 1;
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

/* The source as it stands: the register's row, or a row of one value. */
static const lane *raw_source(const wave *w, const isa_row *row, unsigned i,
                              unsigned type, lane *buffer)
{
    unsigned code = row->src[i];

    if (code >= SRC_VGPR) {
        return w->v + (size_t)(code - SRC_VGPR) * SIM_LANES;
    }
    uint64_t value = exec_operand(w, row, code, type);
    if (type == T_mask) {
        spread(buffer, value);
    } else {
        fill(buffer, (uint32_t)value);
        if (isa_registers(type) == 2) {
            fill(buffer + SIM_LANES, (uint32_t)(value >> 32));
        }
    }
    return buffer;
}

/* Moves lanes as the DPP word says and takes lanes without a result out of
 * *write. A source lane that EXEC disables counts as invalid. */
static void apply_dpp(const wave *w, const isa_row *row, const lane *from,
                      lane *to, uint64_t *write)
{
    uint64_t exec = exec_mask(w);

    for (int l = 0; l < SIM_LANES; l++) {
        int source = exec_dpp_lane(row->dpp_ctrl, l);
        bool valid = source >= 0 && (exec >> source & 1) != 0;
        bool enabled = (row->row_mask >> (l >> 4) & 1) != 0 &&
                       (row->bank_mask >> (l >> 2 & 3) & 1) != 0;
        to[l].u = valid ? from[source].u : 0;
        if (!enabled || (!valid && !row->bound_zero)) {
            *write &= ~(UINT64_C(1) << l);
        }
    }
}

/* Byte or word of each lane, SDWA. */
static void apply_select(unsigned select, bool sign, const lane *from, lane *to)
{
    unsigned bits = select < 4 ? 8u : select < 6 ? 16u : 32u;
    unsigned shift = select < 4 ? 8 * select : select == 5 ? 16u : 0;

    for (unsigned l = 0; l < SIM_LANES; l++) {
        uint32_t top = from[l].u >> shift << (32 - bits);
        to[l].u =
            sign ? (uint32_t)((int32_t)top >> (32 - bits)) : top >> (32 - bits);
    }
}

/* 16-bit values to the form the .def lists work on. */
static void widen(unsigned type, unsigned shift, const lane *from, lane *to)
{
    if (type == T_f16) {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            to[l].f = half_to_float(from[l].u >> shift & 0xffff);
        }
    } else if (type == T_i16) {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            to[l].i = (int32_t)(from[l].u >> shift << 16) >> 16;
        }
    } else {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            to[l].u = from[l].u >> shift & 0xffff;
        }
    }
}

/* Sign modifiers, on the register that holds the sign. */
static void apply_sign(unsigned type, bool absolute, bool negate,
                       const lane *from, lane *to)
{
    uint32_t sign = type == T_u16 ? 0x8000u : 0x80000000u; /* v_pack */
    uint32_t keep = absolute ? ~sign : 0xffffffffu;
    uint32_t flip = negate ? sign : 0;
    for (unsigned l = 0; l < SIM_LANES; l++) {
        to[l].u = (from[l].u & keep) ^ flip;
    }
}

/* Denormals of this type's own format to zero. */
static void flush_row(unsigned type, lane *row)
{
    if (type == T_f64) {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            if ((row[SIM_LANES + l].u & 0x7ff00000u) == 0) {
                row[l].u = 0;
                row[SIM_LANES + l].u &= 0x80000000u;
            }
        }
        return;
    }
    uint32_t least = type == T_f32 || type == T_mix ? 1u << 23 : 113u << 23;
    for (unsigned l = 0; l < SIM_LANES; l++) {
        bool denormal = (row[l].u & 0x7fffffffu) < least;
        row[l].u &= denormal ? 0x80000000u : 0xffffffffu;
    }
}

/* MODE's two denormal bits for a type: 1 inputs, 2 outputs are kept. */
static unsigned denormals(const wave *w, unsigned type)
{
    unsigned at =
        type == T_f32 || type == T_mix ? MODE_DENORM_F32 : MODE_DENORM_F16_F64;
    return w->mode >> at & 3;
}

/* Source i with everything done to it that the encoding asks for. `half`
 * is 1 for the high halves of a packed instruction. */
static const lane *source(const wave *w, const isa_row *row, unsigned i,
                          unsigned half, lane *buffer, uint64_t *write)
{
    const isa_info *info = &isa_ops[row->op];
    unsigned type = info->type[1 + i];
    bool packed = row->format == F_VOP3P;
    bool mixed_half = type == T_mix && (row->op_sel_hi >> i & 1) != 0;
    bool negate = row->neg >> i & 1, absolute = row->abs >> i & 1;

    if (type == T_none) {
        return buffer;
    }
    /* Packed integers take 32-bit constants, mixed halves 16-bit ones. */
    unsigned constant = mixed_half ? (unsigned)T_f16
                        : packed && !isa_is_float(type) && type != T_mask
                            ? (unsigned)T_u32
                            : type;
    const lane *from = raw_source(w, row, i, constant, buffer);
    if (type == T_mask) {
        return from;
    }
    if (row->ext == ISA_EXT_DPP && i == 0) {
        apply_dpp(w, row, from, buffer, write);
        from = buffer;
    }
    if (row->ext == ISA_EXT_SDWA && i < 2) {
        apply_select(row->sel[1 + i], row->sext >> i & 1, from, buffer);
        from = buffer;
    }
    if (type == T_pk16 || type == T_pkf16) {
        unsigned low = (row->op_sel >> i & 1) != 0 ? 16 : 0;
        unsigned high = (row->op_sel_hi >> i & 1) != 0 ? 16 : 0;
        uint32_t flip = type == T_pk16
                            ? 0
                            : (negate ? 0x8000u : 0) |
                                  (row->neg_hi >> i & 1 ? 0x80000000u : 0);
        for (unsigned l = 0; l < SIM_LANES; l++) {
            uint32_t v = from[l].u;
            buffer[l].u = ((v >> low & 0xffff) | v >> high << 16) ^ flip;
        }
        return buffer;
    }
    if (packed && type == T_mix) {
        absolute = row->neg_hi >> i & 1;
    }
    if (type == T_u16 || type == T_i16 || type == T_f16 || mixed_half) {
        unsigned selects =
            packed && !mixed_half && half ? row->op_sel_hi : row->op_sel;
        if (packed && half) {
            negate = row->neg_hi >> i & 1;
        }
        widen(mixed_half ? (unsigned)T_f16 : type,
              (selects >> i & 1) != 0 ? 16 : 0, from, buffer);
        from = buffer;
    }
    bool wide = isa_registers(type) == 2;
    if (isa_takes_sign(row, i) && (absolute || negate)) {
        if (wide) {
            apply_sign(type, absolute, negate, from + SIM_LANES,
                       buffer + SIM_LANES);
            if (from != buffer) {
                memcpy(buffer, from, SIM_LANES * sizeof *buffer);
            }
        } else {
            apply_sign(type, absolute, negate, from, buffer);
        }
        from = buffer;
    }
    if (isa_is_float(type) && (denormals(w, type) & 1) == 0) {
        if (from != buffer) {
            memcpy(buffer, from,
                   (wide ? 2u : 1u) * (size_t)SIM_LANES * sizeof *buffer);
        }
        flush_row(type, buffer);
        from = buffer;
    }
    return from;
}

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

/* ---- one instruction --------------------------------------------------- */

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
