/* fa.hip: every kernel of variants.def.
 *
 * Compiled once per architecture, by clang for AMD and by nvcc (as CUDA) for
 * the stand-in.  What a kernel does: forward.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "forward.h"

/* Two workgroups of 256 threads share a compute unit, 2 waves on each SIMD,
 * if the LDS holds both. */
#define FA_WAVES_PER_SIMD(lds_bytes) ((lds_bytes) <= 32768 ? 2 : 1)

#define FA_VARIANT(symbol, pass, dtype, dim, level, load, rows, keys, threads, \
                   lds_bytes)                                                  \
    FA_KERNEL(threads, FA_WAVES_PER_SIMD(lds_bytes)) symbol(fa_args args)      \
    {                                                                          \
        static_assert((pass) == FA_FORWARD && (dtype) == FA_F16 &&             \
                          (level) == FA_PLAIN,                                 \
                      #symbol ": only this kernel exists");                    \
        static_assert((rows) == FA_ROWS && (keys) == FA_KEYS &&                \
                          (threads) == FA_THREADS,                             \
                      #symbol ": tile sizes of forward.h");                    \
        static_assert((lds_bytes) == FA_LDS_BYTES(dim),                        \
                      #symbol ": LDS bytes of forward.h");                     \
        FA_LDS_ARRAY(lds, lds_bytes);                                          \
        fa_forward<dim, load>(&args, lds);                                     \
    }
#include "variants.def"
#undef FA_VARIANT
