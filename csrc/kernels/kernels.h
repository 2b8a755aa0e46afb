/* kernels.h: the kernels of one unit, made from the rows of variants.def.
 *
 * A unit is a code object of its own (fa_f16.hip, fa_f32.hip, fa_f64.hip), so
 * that units compile side by side and a process loads what it uses.  The
 * including file says which rows it takes, by their arithmetic: FA_ROW_FA_F16
 * and so on is FA_MAKE_KERNEL or nothing.
 *
 * Compiled by clang for AMD and by nvcc (as CUDA) for the stand-in.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_KERNELS_H
#define FA_KERNELS_KERNELS_H

#include "backward.h"
#include "bias.h"
#include "forward.h"
#include "prepare.h"
#include "rotary.h"

/* How numbers are kept, from two columns of a row. */
#define FA_KIND(arith, reads)                                      \
    ((arith) == FA_F64                                             \
         ? (reads) == FA_READS_F32 ? (int)FA_EXACT32 : (int)FA_F64 \
     : (arith) == FA_F16                                           \
         ? (reads) == FA_READS_BF16 ? (int)FA_BF16 : (int)FA_F16   \
     : (reads) == FA_READS_F32 ? (int)FA_F32                       \
                               : (int)FA_EXACT16)

/* A kernel of one pass: its LDS, and how many waves share a SIMD (two
 * workgroups of 256 threads share a compute unit if LDS holds both and the
 * compiler keeps to 128 registers). */
template <int PASS, int KIND, int DIM, int OWN, int LEVEL> struct fa_kernel {
    typedef fa_args args;
    enum {
        LDS_BYTES = fa_backward_layout<KIND, DIM, OWN, PASS>::LDS_BYTES,
        WAVES = 1
    };
    static FA_DEVICE void run(fa_args_in a, fa_lds lds)
    {
        fa_backward<KIND, DIM, OWN, PASS, LEVEL>(a, lds);
    }
};

template <int KIND, int DIM, int OWN, int LEVEL>
struct fa_kernel<FA_FORWARD, KIND, DIM, OWN, LEVEL> {
    typedef fa_args args;
    typedef fa_forward_layout<KIND, DIM, OWN> layout;
    enum {
        LDS_BYTES = layout::END,
        WAVES = layout::STAYS && KIND == FA_F16 && LEVEL == FA_PLAIN ? 2 : 1
    };
    static FA_DEVICE void run(fa_args_in a, fa_lds lds)
    {
        fa_forward<KIND, DIM, OWN, LEVEL>(a, lds);
    }
};

template <int KIND, int DIM, int OWN, int LEVEL>
struct fa_kernel<FA_BACKWARD_BIAS, KIND, DIM, OWN, LEVEL> {
    typedef fa_args args;
    enum {
        LDS_BYTES =
            fa_backward_layout<KIND, DIM, OWN, FA_BACKWARD_BIAS>::LDS_BYTES,
        WAVES = 1
    };
    static FA_DEVICE void run(fa_args_in a, fa_lds lds)
    {
        fa_bias_gradient<KIND, DIM, OWN>(a, lds);
    }
};

template <int KIND, int DIM, int OWN, int LEVEL>
struct fa_kernel<FA_PREPARE, KIND, DIM, OWN, LEVEL> {
    typedef fa_args args;
    enum { LDS_BYTES = FA_IS_DOUBLE(KIND) ? 0 : 128, WAVES = 2 };
    static FA_DEVICE void run(fa_args_in a, fa_lds lds)
    {
        fa_prepare<FA_IS_DOUBLE(KIND) ? KIND : (int)FA_F32>(a, lds);
    }
};

template <int KIND, int DIM, int OWN, int LEVEL>
struct fa_kernel<FA_ROTARY, KIND, DIM, OWN, LEVEL> {
    typedef fa_rotary_args args;
    enum { LDS_BYTES = 0, WAVES = 4 };
    static FA_DEVICE void run(fa_rotary_in a, fa_lds)
    {
        static_assert(OWN * 32 == FA_ROTARY_TOKENS, "tokens of a tile");
        fa_rotary<KIND == FA_F64 ? (int)FA_F64 : (int)FA_F32>(a);
    }
};

#define FA_MAKE_KERNEL(symbol, pass, kind, dim, level, rows, steps, threads,  \
                       lds_bytes)                                             \
    FA_KERNEL(threads,                                                        \
              (fa_kernel<pass, kind, dim, (rows) / 32, level>::WAVES))        \
    symbol(fa_kernel<pass, kind, dim, (rows) / 32, level>::args args)         \
    {                                                                         \
        typedef fa_kernel<pass, kind, dim, (rows) / 32, level> kernel;        \
        static_assert((steps) == FA_WALK && (threads) == FA_THREADS,          \
                      #symbol ": tile sizes of stage.h");                     \
        static_assert((int)(lds_bytes) == (int)kernel::LDS_BYTES,             \
                      #symbol ": LDS bytes");                                 \
        FA_LDS_ARRAY(lds, (lds_bytes) > 0 ? (lds_bytes) : 4); /* or unused */ \
        kernel::run(fa_arguments(&args), lds);                                \
    }

#define FA_VARIANT(symbol, pass, arith, reads, dim, level, rows, steps,     \
                   threads, lds_bytes)                                      \
    FA_ROW_##arith(symbol, pass, (FA_KIND(arith, reads)), dim, level, rows, \
                   steps, threads, lds_bytes)
#include "variants.def"
#undef FA_VARIANT

#endif
