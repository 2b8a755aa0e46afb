/* exec_meanings.h: the statements of the vector lists as functions over the 64
 * lanes of an instruction; a part of exec_vector.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "exec.h"
#include "exec_division.h"
#include "exec_float.h"
#include "exec_integer.h"
#include "exec_media.h"
#include "exec_numerics.h"

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
