/* fit.h: how large the numbers of this workgroup can get, and whether bf16
 * fits fp16, from what FA_PREPARE found out about blocks of 64 rows.
 *
 * bf16 fits if every row spans at most 28 binades from its largest element to
 * its smallest (so that a power of two makes it exact in fp16, whether or not
 * dot2 flushes denormals), the elements of tensors that are summed over, or
 * that bound dS, do so together, and the largest of each tensor is between
 * 2^-40 and 2^50, so that products of scales stay in range.  A workgroup whose
 * data do not fit leaves; the kernel that computes in fp32 is launched behind,
 * asks the same question and runs for those alone.  Both must see it for the
 * same rows, so owned rows are looked at 128 at a time.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_FIT_H
#define FA_KERNELS_FIT_H

#include "problem.h"

enum {
    FA_FIT_BINADES = 28,
    FA_FIT_ROWS = 128,
    FA_FIT_LEAST = 127 - 40, /* biased exponents */
    FA_FIT_MOST = 127 + 50
};

/* The largest x of all threads.  `lds` is 128 bytes that nobody uses. */
static FA_DEVICE float fa_group_max(float x, fa_lds lds, uint32_t tid)
{
    x = fa_max8(x);
    fa_barrier();
    if ((tid & 7) == 0) {
        fa_lds_store1(lds + (tid >> 3) * 4, fa_bits<uint32_t>(x));
    }
    fa_barrier();
#pragma unroll
    for (int n = 0; n < 4; n++) {
        x = fa_max(x,
                   fa_bits<float>(fa_lds_load1(lds + ((tid & 7) * 4 + n) * 4)));
    }
    return fa_max8(x);
}

/* Consecutive blocks of one tensor. */
typedef struct fa_span {
    const FA_GLOBAL fa_block *from;
    int count;
} fa_span;

/* The blocks of the `heads` heads of tensor `which` from `head` on; if own is
 * not negative, of one head those of rows own .. own + rows - 1. */
static FA_DEVICE fa_span fa_span_of(fa_args_in a, int which, int batch,
                                    int head, int heads, int own, int rows)
{
    bool query = which == FA_Q_AT || which == FA_DOUT_AT;
    int length = query ? a->seqlen_q : a->seqlen_k;
    int blocks = (length + FA_BLOCK_ROWS - 1) / FA_BLOCK_ROWS;
    int64_t start =
        ((int64_t)batch * (query ? a->heads : a->heads_k) + head) * blocks;
    fa_span x;

    x.from = (const FA_GLOBAL fa_block *)a->block_of[which] + start;
    x.count = heads * blocks;
    if (own >= 0) {
        int at = own / FA_BLOCK_ROWS;
        x.from += at;
        x.count = fa_min_int(rows / FA_BLOCK_ROWS, blocks - at);
    }
    return x;
}

/* A workgroup's blocks of `which`: tensors of the pass's owned side by rows,
 * those that it walks over as a whole, of each head of the group; V always as
 * a whole, because delta is made of all of it. */
template <int PASS>
static FA_DEVICE fa_span fa_span_at(fa_args_in a, int which, uint32_t own_place,
                                    int first, int rows)
{
    uint32_t at = fa_uniform(own_place);
    int batch = (int)(at >> 16);
    int head = (int)(at & 0xffff);
    bool query = which == FA_Q_AT || which == FA_DOUT_AT;

    if (PASS == FA_BACKWARD_KV) {
        return query ? fa_span_of(a, which, batch, head * a->group, a->group,
                                  -1, 0)
                     : fa_span_of(a, which, batch, head, 1,
                                  which == FA_V_AT ? -1 : first, rows);
    }
    return query ? fa_span_of(a, which, batch, head, 1, first, rows)
                 : fa_span_of(a, which, batch, head / a->group, 1, -1, 0);
}

/* -- dS -------------------------------------------------------------------- */

/* The largest norm, squared, of the rows in the blocks. */
static FA_DEVICE float fa_largest_norm(const fa_span *blocks, fa_lds lds,
                                       uint32_t tid)
{
    float most = 0.0f;

    for (int n = (int)tid; n < blocks->count; n += FA_THREADS) {
        most = fa_max(most, blocks->from[n].norm);
    }
    return fa_group_max(most, lds, tid);
}

/* m with sqrt(x) < 2^m; at least -50, at most 65. */
static FA_DEVICE int fa_root_exponent(float x)
{
    int exponent = (int)(fa_bits<uint32_t>(x) >> 23); /* x < 2^(exponent-126) */

    return fa_max_int((exponent - 125) >> 1, -50);
}

/* A power of two that takes P * 2^12 * (dP - delta) close to fp16's range and
 * never out of it.  With M the product of the largest norms of dO's and V's
 * rows, |P (dP - delta)| is at most M / 2, and 2 M where LSE is so large that
 * its rounding leaves a row's P without their sum of 1. */
template <int PASS>
static FA_DEVICE float fa_lift(fa_args_in a, int first, int rows,
                               uint32_t own_place, fa_lds lds, uint32_t tid)
{
    /* A workgroup of 32 rows looks at its block of 64. */
    int all = fa_max_int(rows, FA_BLOCK_ROWS);
    fa_span v = fa_span_at<PASS>(a, FA_V_AT, own_place, first, all);
    fa_span dout = fa_span_at<PASS>(a, FA_DOUT_AT, own_place, first, all);
    /* dS * 2^(14 - m) is at most 2^13, or 2^15; P brings 2^12. */
    int m = fa_root_exponent(fa_largest_norm(&v, lds, tid)) +
            fa_root_exponent(fa_largest_norm(&dout, lds, tid));

    return fa_power_of_2((int)fa_uniform((uint32_t)fa_min_int(2 - m, 100)));
}

/* -- bf16 in fp16 ---------------------------------------------------------- */

/* Exponents of all the elements in some blocks, as floats. */
typedef struct fa_reach {
    float most;  /* biased; 0 if all are 0 */
    float least; /* 255 - the smallest */
    bool wide;   /* some row spans too many binades */
} fa_reach;

static FA_DEVICE fa_reach fa_reach_of(fa_span blocks, fa_lds lds, uint32_t tid)
{
    fa_reach x = {0.0f, 0.0f, false};
    float wide = 0.0f;

    for (int n = (int)tid; n < blocks.count; n += FA_THREADS) {
        uint32_t one = blocks.from[n].exponents;
        x.most = fa_max(x.most, (float)(one & 255));
        x.least = fa_max(x.least, (float)(one >> 8 & 255));
        wide = fa_max(wide, (float)(one >> 16 & 1));
    }
    x.most = fa_group_max(x.most, lds, tid);
    x.least = fa_group_max(x.least, lds, tid);
    x.wide = fa_group_max(wide, lds, tid) > 0.0f;
    return x;
}

typedef struct fa_fit {
    bool fits;
    float scale[FA_PREPARED]; /* of the tensors that are summed over */
} fa_fit;

template <int PASS>
static FA_DEVICE fa_fit fa_fit_of(fa_args_in a, int first, uint32_t own_place,
                                  fa_lds lds, uint32_t tid)
{
    enum { TENSORS = PASS == FA_FORWARD ? 3 : 4 };
    int own = first / FA_FIT_ROWS * FA_FIT_ROWS;
    fa_fit fit;

    fit.fits = true;
#pragma unroll
    for (int which = 0; which < TENSORS; which++) {
        /* As one: what is summed over, and what bounds dS. */
        bool as_one = which == FA_V_AT || which == FA_DOUT_AT ||
                      (PASS == FA_BACKWARD_KV && which == FA_Q_AT) ||
                      (PASS == FA_BACKWARD_Q && which == FA_K_AT);
        fa_reach x = fa_reach_of(
            fa_span_at<PASS>(a, which, own_place, own, FA_FIT_ROWS), lds, tid);
        bool in_range =
            x.most == 0.0f || (x.most >= FA_FIT_LEAST && x.most <= FA_FIT_MOST);
        bool narrow =
            as_one ? x.most + x.least - 255.0f <= FA_FIT_BINADES : !x.wide;
        fit.fits = fit.fits && in_range && narrow;
        fit.scale[which] = fa_power_of_2(
            (int)fa_uniform((uint32_t)fa_min_int(141 - (int)x.most, 126)));
    }
    return fit;
}

/* Whether this workgroup has nothing to do: what it would compute is computed
 * by the other of the two kernels for bf16. */
template <int KIND, int PASS>
static FA_DEVICE bool fa_left_to_other(fa_args_in a, int first,
                                       uint32_t own_place, fa_fit *fit,
                                       fa_lds lds, uint32_t tid)
{
    if constexpr (KIND == FA_BF16) {
        *fit = fa_fit_of<PASS>(a, first, own_place, lds, tid);
        return !fit->fits;
    }
    if constexpr (KIND == FA_EXACT16) {
        if (a->only_unfit != 0) {
            return fa_fit_of<PASS>(a, first, own_place, lds, tid).fits;
        }
    }
    return false;
}

#endif
