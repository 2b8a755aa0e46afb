/* target_nvidia.h: target.h for NVIDIA GPUs, by PTX and what nvcc always
 * provides.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_TARGET_NVIDIA_H
#define FA_KERNELS_TARGET_NVIDIA_H

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
