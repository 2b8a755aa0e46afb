/* exec_avx2.c: the vector ALU compiled for hosts with AVX2, FMA and F16C,
 * chosen at run time by exec_avx2_available(). On other architectures it
 * stands for the portable one.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "exec.h"

#if defined(__x86_64__)

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>
#include <fenv.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define EXEC_AVX2
#define EXEC_VALU exec_valu_avx2
#include "exec_vector.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

bool exec_avx2_available(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

#else

void exec_valu_avx2(wave *w, const isa_row *row)
{
    exec_valu_portable(w, row);
}

bool exec_avx2_available(void)
{
    return false;
}

#endif
