/* args.h: the one argument of every kernel, passed by value, and the words
 * that the rows of variants.def are written in.
 *
 * Shared by the kernels (any target), the host layer and the C tests, so it
 * includes nothing but <stdint.h> types and is valid C11, HIP and CUDA.
 * Strides are in elements, in the order batch, head, row; the last dimension
 * is contiguous.  Sizes fit 32 bits (the plan refuses lengths above 2^30).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_ARGS_H
#define FA_KERNELS_ARGS_H

#if !defined(__HIP__) && !defined(__CUDACC__)
#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#else
typedef __INT32_TYPE__ int32_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __INT64_TYPE__ int64_t;
#endif

typedef enum fa_dtype { FA_F16 = 0, FA_BF16, FA_F32, FA_F64 } fa_dtype;
typedef enum fa_pass { FA_FORWARD } fa_pass;
typedef enum fa_level { FA_PLAIN } fa_level;
typedef enum fa_load { FA_LOAD_WIDE, FA_LOAD_NARROW } fa_load;

typedef struct fa_args {
    const void *q;       /* (B, H, Sq, D) */
    const void *k;       /* (B, Hk, Sk, D) */
    const void *v;       /* (B, Hk, Sk, D) */
    void *out;           /* (B, H, Sq, D) */
    float *lse;          /* (B, H, Sq) contiguous, natural logarithm */
    int64_t q_stride[3]; /* batch, head, row */
    int64_t k_stride[3];
    int64_t v_stride[3];
    int64_t out_stride[3];
    int32_t seqlen_q; /* Sq >= 1 */
    int32_t seqlen_k; /* Sk >= 1 */
    int32_t head_dim; /* D, at most the variant's bucket */
    int32_t heads;    /* H */
    int32_t group;    /* H / Hk: query heads that share one key head */
    int32_t diagonal; /* row i sees key j if j <= i + diagonal;
                       * 0 top-left causal, Sk - Sq bottom-right,
                       * Sk no mask */
    float scale_log2; /* |softmax scale| * log2(e) */
    uint32_t q_flip;  /* sign bits flipped in each staged pair of Q:
                       * 0x80008000 for a negative scale, else 0 */
} fa_args;

#if !defined(__HIP__) && !defined(__CUDACC__)
static_assert(sizeof(fa_args) == 168, "fa_args is part of the kernel ABI");
static_assert(offsetof(fa_args, q_stride) == 40, "fa_args layout");
static_assert(offsetof(fa_args, seqlen_q) == 136, "fa_args layout");
static_assert(offsetof(fa_args, q_flip) == 164, "fa_args layout");
#endif

#endif
