/* target.h: the few things that differ between GPUs, under one set of names.
 *
 * The kernels include this file and args.h and nothing else: no header of
 * ROCm, CUDA or C++.  AMD targets are reached through clang's builtins,
 * NVIDIA through PTX and what nvcc always provides.  What a kernel computes
 * is not decided here.
 *
 * Waves   FA_WAVE lanes: 64 on gfx9, 32 elsewhere.  Kernels keep every
 *         exchange inside 8 neighbouring lanes, so both widths are right.
 * LDS     AMD: a static array, already in the code object; launch with 0
 *         dynamic bytes.  NVIDIA: dynamic shared memory; launch with the
 *         variant's lds_bytes, and above 48 KiB first raise the function's
 *         attribute MAX_DYNAMIC_SHARED_SIZE_BYTES to it.
 * Source  builtins: LLVM's BuiltinsAMDGPU.def; DPP controls: "Vega 7nm"
 *         shader ISA, section 6.5.7; PTX ISA 8.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_TARGET_H
#define FA_KERNELS_TARGET_H

#include "args.h"

typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT64_TYPE__ uint64_t;

#if !defined(__CUDACC__)
/* ---- AMD --------------------------------------------------------------- */

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

#else
/* ---- NVIDIA ---------------------------------------------------------- */

#define FA_DEVICE inline __device__ __attribute__((always_inline))
#define FA_KERNEL(threads, waves_per_simd) \
    extern "C" __global__ void __launch_bounds__(threads, 1)
#define FA_GLOBAL
#define FA_LDS
#define FA_CONSTANT
#define FA_WAVE 32

typedef uint2 u32x2;
typedef uint4 u32x4;

extern __shared__ uint4 fa_dynamic_lds[];
#define FA_LDS_ARRAY(name, bytes) char *const name = (char *)fa_dynamic_lds

typedef const fa_args *fa_args_in;

template <typename Args>
static FA_DEVICE const FA_CONSTANT Args *fa_arguments(const Args *a)
{
    return a;
}

template <typename Args> static FA_DEVICE const Args *fa_again(const Args *a)
{
    return a;
}

static FA_DEVICE uint32_t fa_thread(void)
{
    return threadIdx.x;
}
static FA_DEVICE uint32_t fa_group_x(void)
{
    return blockIdx.x;
}
static FA_DEVICE uint32_t fa_group_y(void)
{
    return blockIdx.y;
}
static FA_DEVICE uint32_t fa_group_z(void)
{
    return blockIdx.z;
}

static FA_DEVICE uint32_t fa_uniform(uint32_t x)
{
    return __shfl_sync(0xffffffffu, x, 0);
}

static FA_DEVICE uint32_t fa_opaque(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}

static FA_DEVICE float fa_opaque(float x)
{
    asm volatile("" : "+f"(x));
    return x;
}

static FA_DEVICE double fa_opaque(double x)
{
    asm volatile("" : "+d"(x));
    return x;
}

static FA_DEVICE double fa_fixed(double x)
{
    return x;
}

static FA_DEVICE float fa_fixed(float x)
{
    return x;
}

static FA_DEVICE double fa_fixed_behind(double x, double *)
{
    return x;
}

static FA_DEVICE float fa_fixed_behind(float x, float *)
{
    return x;
}

static FA_DEVICE void fa_barrier(void)
{
    __syncthreads();
}
static FA_DEVICE void fa_wave_sync(void)
{
    __syncwarp();
}

static FA_DEVICE void fa_keep_order(void)
{
}

static FA_DEVICE bool fa_any(bool x)
{
    return __any_sync(0xffffffffu, x);
}

static FA_DEVICE float fa_max(float a, float b)
{
    return fmaxf(a, b);
}

static FA_DEVICE double fa_max(double a, double b)
{
    return fmax(a, b);
}

static FA_DEVICE float fa_fma(float a, float b, float c)
{
    return fmaf(a, b, c);
}

static FA_DEVICE double fa_fma(double a, double b, double c)
{
    return fma(a, b, c);
}

static FA_DEVICE double fa_round(double x)
{
    return rint(x);
}

static FA_DEVICE float fa_round(float x)
{
    return rintf(x);
}

static FA_DEVICE float fa_reciprocal(float x)
{
    return 1.0f / x;
}

static FA_DEVICE double fa_ldexp(double x, int n)
{
    return ldexp(x, n);
}

template <int STEP> static FA_DEVICE float fa_swap8(float x)
{
    return __shfl_xor_sync(0xffffffffu, x, 1 << STEP);
}

static FA_DEVICE float fa_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static FA_DEVICE float fa_log2(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static FA_DEVICE float fa_half_to_float(uint32_t bits)
{
    float y;
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo; }"
        : "=f"(y)
        : "r"(bits));
    return y;
}

static FA_DEVICE float fa_dot2(uint32_t a, uint32_t b, float c)
{
    c = fmaf(fa_half_to_float(a), fa_half_to_float(b), c);
    return fmaf(fa_half_to_float(a >> 16), fa_half_to_float(b >> 16), c);
}

static FA_DEVICE uint32_t fa_pack_halves(float low, float high)
{
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

static FA_DEVICE uint32_t fa_pack_exact(float low, float high)
{
    return fa_pack_halves(low, high);
}

static FA_DEVICE uint32_t fa_low_halves(uint32_t a, uint32_t b)
{
    return __byte_perm(a, b, 0x5410);
}

static FA_DEVICE uint32_t fa_high_halves(uint32_t a, uint32_t b)
{
    return __byte_perm(a, b, 0x7632);
}

static FA_DEVICE uint32_t fa_below_pair(uint32_t a, uint32_t b)
{
    uint32_t low = (int)(a << 16) < (int)(b << 16) ? 0xffff : 0;
    uint32_t high = (int)a >> 16 < (int)b >> 16 ? 0xffff0000 : 0;
    return low | high;
}

#endif
/* ---- both -------------------------------------------------------------- */

typedef FA_LDS char *fa_lds;
typedef const FA_GLOBAL char *fa_global_in;
typedef FA_GLOBAL char *fa_global_out;

#define FA_INFINITY __builtin_huge_valf()

static FA_DEVICE int fa_min_int(int a, int b)
{
    return a < b ? a : b;
}

static FA_DEVICE float fa_abs(float x)
{
    return __builtin_fabsf(x);
}

static FA_DEVICE double fa_abs(double x)
{
    return __builtin_fabs(x);
}

static FA_DEVICE int fa_max_int(int a, int b)
{
    return a > b ? a : b;
}

/* The same bits as another type. */
template <typename To, typename From> static FA_DEVICE To fa_bits(From x)
{
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To y;
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
}

/* x, or 0 without a bit of it: `mask` is all ones or zeros. */
static FA_DEVICE float fa_masked(float x, uint32_t mask)
{
    return fa_bits<float>(fa_bits<uint32_t>(x) & mask);
}

static FA_DEVICE double fa_masked(double x, uint32_t mask)
{
    u32x2 half = fa_bits<u32x2>(x);
    half.x &= mask;
    half.y &= mask;
    return fa_bits<double>(half);
}

/* The value of the first lane, in a scalar register. */
static FA_DEVICE float fa_scalar(float x)
{
    return fa_bits<float>(fa_uniform(fa_bits<uint32_t>(x)));
}

static FA_DEVICE double fa_scalar(double x)
{
    return x; /* fp64 is short of scalar registers */
}

template <int STEP> static FA_DEVICE double fa_swap8(double x)
{
    u32x2 half = fa_bits<u32x2>(x);
    half.x = fa_bits<uint32_t>(fa_swap8<STEP>(fa_bits<float>(half.x)));
    half.y = fa_bits<uint32_t>(fa_swap8<STEP>(fa_bits<float>(half.y)));
    return fa_bits<double>(half);
}

/* Over 8 neighbouring lanes; every lane gets the result. */
template <typename Number> static FA_DEVICE Number fa_max8(Number x)
{
    x = fa_max(x, fa_swap8<0>(x));
    x = fa_max(x, fa_swap8<1>(x));
    return fa_max(x, fa_swap8<2>(x));
}

template <typename Number> static FA_DEVICE Number fa_sum8(Number x)
{
    x += fa_swap8<0>(x);
    x += fa_swap8<1>(x);
    return x + fa_swap8<2>(x);
}

static FA_DEVICE uint32_t fa_lds_load1(fa_lds p)
{
    return *(const FA_LDS uint32_t *)p;
}

static FA_DEVICE u32x2 fa_lds_load2(fa_lds p)
{
    return *(const FA_LDS u32x2 *)p;
}

static FA_DEVICE u32x4 fa_lds_load4(fa_lds p)
{
    return *(const FA_LDS u32x4 *)p;
}

static FA_DEVICE void fa_lds_store1(fa_lds p, uint32_t x)
{
    *(FA_LDS uint32_t *)p = x;
}

static FA_DEVICE void fa_lds_store2(fa_lds p, uint32_t x, uint32_t y)
{
    u32x2 pair;
    pair.x = x;
    pair.y = y;
    *(FA_LDS u32x2 *)p = pair;
}

static FA_DEVICE void fa_lds_store4(fa_lds p, u32x4 x)
{
    *(FA_LDS u32x4 *)p = x;
}

#endif
