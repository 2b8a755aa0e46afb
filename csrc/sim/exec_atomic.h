/* exec_atomic.h: helpers to turn the atomic rows of ds.def and vmem.def
 * into a function from old memory contents and data to new contents.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_EXEC_ATOMIC_H
#define HIPSIM_EXEC_ATOMIC_H

#include "exec_float.h"

typedef uint32_t W_u32, W_b32;
typedef int32_t W_i32;
typedef float W_f32;
typedef uint64_t W_u64, W_b64;
typedef int64_t W_i64;
typedef double W_f64;

#define FROM_u32(x) (uint32_t)(x)
#define FROM_b32 FROM_u32
#define FROM_i32(x) (int32_t)(uint32_t)(x)
#define FROM_f32(x) bits_float((uint32_t)(x))
#define FROM_u64(x) (x)
#define FROM_b64 FROM_u64
#define FROM_i64(x) (int64_t)(x)
#define FROM_f64 bits_double
#define TO_u32(x) (x)
#define TO_b32 TO_u32
#define TO_i32(x) (uint32_t)(x)
#define TO_f32 float_bits
#define TO_u64(x) (x)
#define TO_b64 TO_u64
#define TO_i64(x) (uint64_t)(x)
#define TO_f64 double_bits

/* Body of one case: m old contents, a and b data, as 64-bit patterns. */
#define COMBINE(type, ...)                 \
    {                                      \
        const W_##type M = FROM_##type(m); \
        const W_##type A = FROM_##type(a); \
        const W_##type B = FROM_##type(b); \
        W_##type D;                        \
        (void)M;                           \
        (void)B;                           \
        __VA_ARGS__;                       \
        return TO_##type(D);               \
    }

#endif
