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

#if defined(__CUDACC__)
#include "target_nvidia.h"
#else
#include "target_amd.h"
#endif

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
