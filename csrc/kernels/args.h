/* args.h: the one argument of every kernel, passed by value, and the words
 * that the rows of variants.def are written in.  FA_ROTARY, which is no
 * attention, has a struct of its own.
 *
 * Shared by the kernels (any target), the host layer and the C tests, so it
 * includes nothing but <stdint.h> types and is valid C11, HIP and CUDA.
 * B batch, H query heads, Hk key heads, Sq and Sk lengths, D head dim of q
 * and k, Dv head dim of v.  Sizes fit 32 bits (the plan refuses lengths above
 * 2^30).  A pass reads and writes the fields named for it and no others.
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

typedef enum fa_pass {
    FA_FORWARD,     /* q k v -> out, lse and, if not NULL, lse_lo and out_lo */
    FA_PREPARE,     /* what the other passes need to know of whole rows */
    FA_BACKWARD_KV, /* dk and dv, each if not NULL; in fp32 it reads them too */
    FA_BACKWARD_Q,  /* dq if not NULL; row sums if wanted */
    FA_BACKWARD_BIAS, /* dbias, summed over the dimensions where bias is of size
                       * 1; in fp32 or fp64 arithmetic */
    FA_ROTARY         /* q and k with rotated channels; has fa_rotary_args */
} fa_pass;

/* What a row of variants.def can do.  FA_FULL does what FA_PLAIN does and costs
 * more registers. */
typedef enum fa_level {
    FA_PLAIN, /* any lengths, causal, windows */
    FA_FULL /* and bias, mask, ALiBi, softcap, sinks, dropout, spans, blocks */
} fa_level;

/* The types a row of variants.def reads, as a set. */
enum {
    FA_READS_F16 = 1 << FA_F16,
    FA_READS_BF16 = 1 << FA_BF16,
    FA_READS_F32 = 1 << FA_F32,
    FA_READS_F64 = 1 << FA_F64
};

/* Element (b, h, i, d) lies at data + b * stride[0] + ... + d * stride[3],
 * strides in elements.  A dimension of size 1 has stride 0. */
typedef struct fa_view {
    void *data;
    int64_t stride[4];
} fa_view;

/* Sets of tensors, for `wide` and `prepare`. */
enum {
    FA_SET_Q = 1 << 0,
    FA_SET_K = 1 << 1,
    FA_SET_V = 1 << 2,
    FA_SET_DOUT = 1 << 3,
    FA_SET_OUT = 1 << 4, /* and out_lo, whose base is aligned */
    FA_SET_DQ = 1 << 5,
    FA_SET_DK = 1 << 6,
    FA_SET_DV = 1 << 7
};

enum {
    FA_BLOCK_ROWS = 64, /* rows that one fa_block describes */
    FA_PREPARED = 4     /* tensors that FA_PREPARE looks at: q k v dout */
};

/* Numbers of a query.  With s the score that softmax sees in units of q.k, and
 * c = |scale| * log2(e), its weight is P = 2^((s - shift) * c + bias), and
 * dS = P * (dP - delta).  With fa_args.in_log2, where such units would be too
 * large, s is times log2(e) and c = 1. */
enum {
    FA_SHIFT,
    FA_BIAS,
    FA_DELTA,  /* rowsum(dout * (out + out_lo)) - dlse, see row_sums */
    FA_DS_SUM, /* what the dS of the query add up to, which is dlse, and with a
                * sink less the sink's; NaN where lse may be of more keys than
                * these: without lse_lo; FA_BACKWARD_Q overwrites it if
                * row_sums */
    FA_ROW_NUMBERS
};

/* What rounding takes from an fp16 is at most 16, and most of it would lie
 * below the smallest fp16 where the number itself is small. */
#define FA_LOW_SCALE 0x1p11f

/* What FA_PREPARE finds out about 64 rows of one head of a tensor. */
typedef struct fa_block {
    float norm;         /* the largest sum of squares of a row */
    uint32_t exponents; /* of the elements that are finite and not 0: the
                         * largest biased exponent, 255 - the smallest << 8;
                         * 1 << 16 if some row spans more than fp16 can hold */
} fa_block;

/* Row i sees keys j with from <= j <= to, key j the rows i from its own pair.
 * Both bounds never decrease from one row (or key) to the next, also where one
 * sees nothing (to = from - 1). */
typedef struct fa_span_of_row {
    int32_t from;
    int32_t to;
    int32_t diagonal; /* the key at distance 0 is i + diagonal (ALiBi) */
    int32_t unused;   /* 0 */
} fa_span_of_row;

typedef struct fa_span_of_key {
    int32_t from;
    int32_t to;
} fa_span_of_key;

/* FA_FULL: which blocks of keys a block of rows needs, or the reverse for
 * FA_BACKWARD_KV: lists of 1 + `width` numbers, a count and so many indices,
 * (B, H, blocks) of them.  Sizes of blocks are multiples of 128. */
typedef struct fa_blocks {
    const int32_t *list; /* NULL: all */
    int64_t batch;       /* strides in numbers; 0: the same for all */
    int64_t head;
    int32_t width;
    int32_t own;    /* rows (or keys) of a block of what the pass owns */
    int32_t walked; /* of the other side */
    int32_t unused; /* 0 */
} fa_blocks;

typedef struct fa_args {
    fa_view q;      /* (B, H, Sq, D) */
    fa_view k;      /* (B, Hk, Sk, D) */
    fa_view v;      /* (B, Hk, Sk, Dv) */
    fa_view out;    /* (B, H, Sq, Dv) */
    fa_view dout;   /* (B, H, Sq, Dv) */
    fa_view dq;     /* (B, H, Sq, D); data NULL: not wanted */
    fa_view dk;     /* (B, Hk, Sk, D); data NULL: not wanted */
    fa_view dv;     /* (B, Hk, Sk, Dv); data NULL: not wanted */
    fa_view dlse;   /* (B, H, Sq, 1); data NULL: zero */
    fa_view out_lo; /* (B, H, Sq, Dv), of 16-bit types: what rounding took from
                     * out, of fp16 times FA_LOW_SCALE; data NULL: not wanted,
                     * or not known */
    fa_view bias;   /* (B, H, Sq, Sk), broadcast by strides of 0; added to the
                     * scaled score; data NULL: none */
    fa_view mask;   /* (B, H, Sq, Sk) bytes, likewise; 0: not seen */
    fa_view dbias;  /* as bias, of size 1 where that is broadcast;
                    * FA_BACKWARD_BIAS */
    fa_blocks blocks;
    const fa_span_of_row
        *span_q; /* (Sq), instead of the diagonals; NULL: none */
    const fa_span_of_key *span_k; /* (Sk), likewise */
    const void *alibi; /* slopes (H) or (B, H), type of lse; NULL: none */
    const void *sink;  /* (H), type of lse: the score of one more key whose
                        * value is 0; NULL: none */
    void *dsink;       /* (B, H, Sq), type of lse: its gradient from each query;
                        * FA_PREPARE; NULL: not wanted */
    const int64_t *seed; /* of dropout: seed and offset, see philox.h; NULL: no
                          * dropout */
    void *lse;           /* (B, H, Sq) contiguous, natural logarithm; float, or
                     * double where q is */
    float *lse_lo; /* (B, H, Sq) contiguous: what rounding took from lse, unless
                     * that is double; NULL: not wanted, or not known */
    void *rows;    /* (B, H, Sq, FA_ROW_NUMBERS) contiguous, in the numbers of
                    * the kernels: what the backward needs to know of each
                    * query */
    float *scale_of[FA_PREPARED];    /* (B, heads, rows): the power of two that
                                      * brings a bf16 row into fp16's range */
    fa_block *block_of[FA_PREPARED]; /* (B, heads, ceil(rows / 64)) */
    double scale;                    /* softmax scale, any sign */
    double per_unit;        /* what 1 is in those units: 1 / |scale|, or
                                      * log2(e) */
    double softcap;         /* scores become c tanh(s / c); 0: none */
    double softcap_inverse; /* 2 / softcap */
    double keep_scale;      /* 65536 / keep; 1 without dropout */
    float scale_log2;       /* |scale| * log2(e) */
    int32_t seqlen_q;       /* Sq >= 1 */
    int32_t seqlen_k;       /* Sk >= 1 */
    int32_t head_dim;       /* D, at most the variant's bucket */
    int32_t head_dim_v;     /* Dv, likewise */
    int32_t batches;        /* B; FA_BACKWARD_BIAS */
    int32_t heads;          /* H */
    int32_t heads_k;        /* Hk */
    int32_t group;          /* H / Hk: query heads that share one key head */
    int32_t diagonal;       /* row i sees key j if j <= i + diagonal;
                         * 0 top-left causal, Sk - Sq bottom-right,
                         * Sk no mask */
    int32_t first_diagonal; /* and i + first_diagonal <= j, or j < sink_keys;
                             * -Sq: all */
    int32_t sink_keys;      /* FA_FULL; 0 with span_q */
    int32_t alibi_diagonal; /* the key at distance 0 from row i is i + this */
    int32_t alibi_batch;    /* stride of alibi: H or 0 */
    int32_t stored_bias; /* fa_dtype of bias and dbias: that of q, or float */
    uint32_t keep;       /* dropout: a weight is kept with keep / 65536 */
    int32_t keep_log2;   /* 2^this is at least keep_scale */
    uint32_t in_log2;    /* 1: scores are in base 2, see FA_SHIFT */
    int32_t stored;      /* fa_dtype of q k v out out_lo dout */
    int32_t stored_grad; /* fa_dtype of dq dk dv */
    uint32_t wide;       /* FA_SET_*: every 16-byte granule of the tensor's rows
                         * can be accessed at once: last stride 1, base and
                         * all strides multiples of 16 bytes, head dim a whole
                         * number of granules, row stride below 2^24 bytes */
    uint32_t prepare;    /* FA_SET_Q .. _DOUT: what FA_PREPARE looks at; dout
                         * also makes the numbers of its rows */
    uint32_t prepare_blocks; /* of grid.x for each of those tensors */
    uint32_t only_unfit; /* 1: a workgroup runs only if its data does not fit
                          * fp16 (fit.h), 0: always */
    uint32_t row_sums;   /* 1: FA_BACKWARD_Q puts what the dS of a query add up
                        * to, before softcap's slope and rounding, in place of
                        * FA_DS_SUM, and the FA_PREPARE behind it makes of that
                        * the delta of these dP, for what comes after it; in
                        * FA_EXACT32 dq.data is NULL then */
    uint32_t apart; /* FA_PREPARE: of so many granules the passes behind it sum
                     * products apart (fa_multiply_chunk); 0: of all */
} fa_args;

/* Granules of fp32 whose products a kernel of a head dim sums apart and then
 * adds, so that the roundings of long sums do not add up. */
#define FA_APART_GRANULES(DIM) ((DIM) > 32 ? 8 : 4)

/* -- rotary positions ------------------------------------------------------ */

enum {
    FA_ROTARY_TOKENS = 64, /* that a workgroup turns, */
    FA_ROTARY_HEADS = 4    /* of so many heads */
};

/* What can be accessed 16 bytes at a time.  Of q and k, each with its
 * output: as fa_args.wide, and a granule is turned whole or not at all. */
enum {
    FA_ROTARY_WIDE_Q = 1 << 0,
    FA_ROTARY_WIDE_K = 1 << 1,
    FA_ROTARY_WIDE_TABLES = 1 << 2 /* last stride 1, base and the other strides
                                    * multiples of 16 bytes */
};

/* S tokens, H and Hk heads, R channels of D that are turned.  Dimensions in
 * this order, unlike in fa_args. */
typedef struct fa_rotary_args {
    fa_view in[2];  /* q (B, S, H, D) and k (B, S, Hk, D) */
    fa_view out[2]; /* like them */
    fa_view cos; /* (B, S, 1, R / 2); stride[0] is 0 if all batches share it */
    fa_view sin;
    int32_t seqlen;       /* S >= 1 */
    int32_t heads;        /* H */
    int32_t heads_k;      /* Hk */
    int32_t head_dim;     /* D */
    int32_t rotary_dim;   /* R, even, at most D */
    int32_t stored;       /* fa_dtype of q, k and the outputs */
    int32_t stored_table; /* of cos and sin: the same, or float for 16 bits */
    uint32_t wide;        /* FA_ROTARY_WIDE_* */
    uint32_t interleaved; /* pairs (2p, 2p + 1), not (p, p + R / 2) */
    uint32_t inverse;     /* 1: by the negative angle */
} fa_rotary_args;

#if !defined(__HIP__) && !defined(__CUDACC__)
static_assert(sizeof(fa_view) == 40, "fa_view is part of the kernel ABI");
static_assert(sizeof(fa_block) == 8, "fa_block is part of the kernel ABI");
static_assert(sizeof(fa_span_of_row) == 16, "part of the kernel ABI");
static_assert(sizeof(fa_span_of_key) == 8, "part of the kernel ABI");
static_assert(sizeof(fa_blocks) == 40, "fa_blocks is part of the kernel ABI");
static_assert(sizeof(fa_args) == 840, "fa_args is part of the kernel ABI");
static_assert(offsetof(fa_args, lse) == 608, "fa_args layout");
static_assert(offsetof(fa_args, scale_of) == 632, "fa_args layout");
static_assert(offsetof(fa_args, scale) == 696, "fa_args layout");
static_assert(offsetof(fa_args, row_sums) == 832, "fa_args layout");
static_assert(sizeof(fa_rotary_args) == 280, "part of the kernel ABI");
static_assert(offsetof(fa_rotary_args, cos) == 160, "fa_rotary_args layout");
static_assert(offsetof(fa_rotary_args, seqlen) == 240, "fa_rotary_args layout");
static_assert(offsetof(fa_rotary_args, inverse) == 276,
              "fa_rotary_args layout");
#endif

#endif
