/* target_amd.h: target.h for AMD GPUs, by clang's builtins.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_TARGET_AMD_H
#define FA_KERNELS_TARGET_AMD_H

#define FA_DEVICE inline __attribute__((device, always_inline))
#define FA_KERNEL(threads, waves_per_simd)                     \
    extern "C" __attribute__((                                 \
        global, amdgpu_flat_work_group_size(threads, threads), \
        amdgpu_waves_per_eu(waves_per_simd, waves_per_simd))) void
#define FA_GLOBAL __attribute__((address_space(1)))
#define FA_LDS __attribute__((address_space(3)))
#define FA_CONSTANT __attribute__((address_space(4)))
#if defined(__GFX9__)
#define FA_WAVE 64
#else
#define FA_WAVE 32
#endif
/* Targets without v_dot2_f32_f16. */
#if defined(__gfx900__) || defined(__gfx902__) || defined(__gfx904__) ||  \
    defined(__gfx909__) || defined(__gfx90c__) || defined(__gfx1010__) || \
    defined(__gfx1013__) || defined(__gfx1250__) || defined(__gfx1251__)
#define FA_NO_DOT2 1
#else
#define FA_NO_DOT2 0
#endif

typedef uint32_t u32x2 __attribute__((ext_vector_type(2)));
typedef uint32_t u32x4 __attribute__((ext_vector_type(4)));
typedef _Float16 fa_half2 __attribute__((ext_vector_type(2)));
typedef __INT16_TYPE__ fa_short2 __attribute__((ext_vector_type(2)));

#define FA_LDS_ARRAY(name, bytes)                                           \
    static __attribute__((shared, aligned(16))) char name##_storage[bytes]; \
    FA_LDS char *const name = (FA_LDS char *)name##_storage

typedef const FA_CONSTANT fa_args *fa_args_in;

/* The kernel's argument where the hardware has it. */
template <typename Args>
static FA_DEVICE const FA_CONSTANT Args *fa_arguments(const Args *)
{
    return (const FA_CONSTANT Args *)__builtin_amdgcn_kernarg_segment_ptr();
}

/* The same, but the compiler does not know: what is read through it is read
 * again, where it is needed, instead of being kept in scalar registers. */
template <typename Args>
static FA_DEVICE const FA_CONSTANT Args *fa_again(const FA_CONSTANT Args *a)
{
    asm volatile("" : "+s"(a));
    return a;
}

static FA_DEVICE uint32_t fa_thread(void)
{
    return __builtin_amdgcn_workitem_id_x();
}

static FA_DEVICE uint32_t fa_group_x(void)
{
    return __builtin_amdgcn_workgroup_id_x();
}

static FA_DEVICE uint32_t fa_group_y(void)
{
    return __builtin_amdgcn_workgroup_id_y();
}

static FA_DEVICE uint32_t fa_group_z(void)
{
    return __builtin_amdgcn_workgroup_id_z();
}

/* The value of the first lane, in a scalar register. */
static FA_DEVICE uint32_t fa_uniform(uint32_t x)
{
    return (uint32_t)__builtin_amdgcn_readfirstlane((int)x);
}

/* x, but the compiler no longer knows where it came from.  Addresses built
 * from it are computed where they are used instead of being kept in registers
 * over the whole loop, which costs spills. */
template <typename Value> static FA_DEVICE Value fa_opaque(Value x)
{
    asm volatile("" : "+v"(x));
    return x;
}

/* A constant that is made where it is used: 64 bits take two scalar registers
 * each if they are kept. */
static FA_DEVICE double fa_fixed(double x)
{
    asm volatile("" : "+s"(x));
    return x;
}

static FA_DEVICE float fa_fixed(float x)
{
    return x; /* a literal */
}

/* The same, and not before *y is known: else the constants of many polynomials
 * in a row are all made first. */
static FA_DEVICE double fa_fixed_behind(double x, double *y)
{
    asm volatile("" : "+s"(x), "+v"(*y));
    return x;
}

static FA_DEVICE float fa_fixed_behind(float x, float *)
{
    return x;
}

/* Every thread of the workgroup, with its LDS accesses before it done.  On
 * gfx906 the compiler also waits for every global load here, so loads are
 * issued after a barrier, never just before one. */
static FA_DEVICE void fa_barrier(void)
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

/* The same for one wave.  The hardware runs a wave's LDS accesses in order,
 * so this only holds the compiler back. */
static FA_DEVICE void fa_wave_sync(void)
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

/* The compiler moves no instruction across.  Where it would otherwise start so
 * many LDS reads early that their results do not fit the registers. */
static FA_DEVICE void fa_keep_order(void)
{
    __builtin_amdgcn_sched_barrier(0);
}

/* Whether x holds in any active lane of the wave; the same in every lane. */
static FA_DEVICE bool fa_any(bool x)
{
    enum { NOT_EQUAL = 33 }; /* of LLVM's integer predicates */
    return __builtin_amdgcn_uicmp((uint32_t)x, 0u, NOT_EQUAL) != 0;
}

/* The larger; if one is NaN, the other. */
static FA_DEVICE float fa_max(float a, float b)
{
    return __builtin_fmaxf(a, b);
}

static FA_DEVICE double fa_max(double a, double b)
{
    return __builtin_fmax(a, b);
}

static FA_DEVICE float fa_fma(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}

static FA_DEVICE double fa_fma(double a, double b, double c)
{
    return __builtin_fma(a, b, c);
}

static FA_DEVICE double fa_round(double x)
{
    return __builtin_rint(x);
}

static FA_DEVICE float fa_round(float x)
{
    return __builtin_rintf(x);
}

/* 1 / x, 1 ulp. */
static FA_DEVICE float fa_reciprocal(float x)
{
    return __builtin_amdgcn_rcpf(x);
}

/* x * 2^n, right also where the result is denormal or overflows. */
static FA_DEVICE double fa_ldexp(double x, int n)
{
    return __builtin_amdgcn_ldexp(x, n);
}

/* x of another lane among 8 neighbours; steps 0, 1, 2 in turn combine all 8.
 * Step 2 mirrors the 8 lanes, which is as good as lane ^ 4 once the lanes of
 * a quad agree. */
template <int STEP> static FA_DEVICE float fa_swap8(float x)
{
    enum { QUAD_XOR_1 = 0xb1, QUAD_XOR_2 = 0x4e, ROW_HALF_MIRROR = 0x141 };
    return __builtin_bit_cast(
        float, __builtin_amdgcn_update_dpp(0, __builtin_bit_cast(int, x),
                                           STEP == 0   ? QUAD_XOR_1
                                           : STEP == 1 ? QUAD_XOR_2
                                                       : ROW_HALF_MIRROR,
                                           0xf, 0xf, true));
}

/* This and fa_log2 are single instructions, 1 ulp. */
static FA_DEVICE float fa_exp2(float x)
{
#if __has_builtin(__builtin_amdgcn_exp2f)
    return __builtin_amdgcn_exp2f(x);
#else
    float y;
    asm("v_exp_f32 %0, %1" : "=v"(y) : "v"(x));
    return y;
#endif
}

static FA_DEVICE float fa_log2(float x)
{
#if __has_builtin(__builtin_amdgcn_logf)
    return __builtin_amdgcn_logf(x);
#else
    float y;
    asm("v_log_f32 %0, %1" : "=v"(y) : "v"(x));
    return y;
#endif
}

/* a.low * b.low + a.high * b.high + c for pairs of fp16, c in fp32. */
static FA_DEVICE float fa_dot2(uint32_t a, uint32_t b, float c)
{
    fa_half2 x = __builtin_bit_cast(fa_half2, a);
    fa_half2 y = __builtin_bit_cast(fa_half2, b);
#if FA_NO_DOT2
    c = __builtin_fmaf((float)x.x, (float)y.x, c);
    return __builtin_fmaf((float)x.y, (float)y.y, c);
#else
    return __builtin_amdgcn_fdot2(x, y, c, false);
#endif
}

/* The lower fp16. */
static FA_DEVICE float fa_half_to_float(uint32_t x)
{
    return (float)__builtin_bit_cast(fa_half2, x).x;
}

/* Two floats as a pair of fp16, each rounded to nearest even. */
static FA_DEVICE uint32_t fa_pack_halves(float low, float high)
{
    fa_half2 pair = {(_Float16)low, (_Float16)high};
    return __builtin_bit_cast(uint32_t, pair);
}

/* The same for floats that fp16 holds exactly: one instruction. */
static FA_DEVICE uint32_t fa_pack_exact(float low, float high)
{
    return __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_pkrtz(low, high));
}

/* {a.low, b.low} and {a.high, b.high}. */
static FA_DEVICE uint32_t fa_low_halves(uint32_t a, uint32_t b)
{
    return __builtin_amdgcn_perm(b, a, 0x05040100);
}

static FA_DEVICE uint32_t fa_high_halves(uint32_t a, uint32_t b)
{
    return __builtin_amdgcn_perm(b, a, 0x07060302);
}

/* Of two signed 16-bit numbers each: all ones where a < b, else zeros. */
static FA_DEVICE uint32_t fa_below_pair(uint32_t a, uint32_t b)
{
    fa_short2 difference = __builtin_elementwise_sub_sat(
        __builtin_bit_cast(fa_short2, a), __builtin_bit_cast(fa_short2, b));
    return __builtin_bit_cast(uint32_t, difference >> (fa_short2)15);
}

#endif
