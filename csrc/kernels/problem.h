/* problem.h: what forward and backward share about the problem: which keys a
 * row sees, where its tensors are, numbers that belong to rows.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_PROBLEM_H
#define FA_KERNELS_PROBLEM_H

#include "product.h"

/* -- visibility ------------------------------------------------------------ */

/* Rows (of the other side) that a row sees: from <= n <= to, or if to < from
 * none. */
typedef struct fa_sight {
    int from;
    int to;
} fa_sight;

/* The keys that a query sees, without sink keys before its window, or with
 * FA_BACKWARD_KV the queries that see a key; rows past the end repeat the last
 * one. */
template <int LEVEL, int PASS>
static FA_DEVICE fa_sight fa_sight_of(fa_args_in a, int row)
{
    fa_sight x;

    if (PASS == FA_BACKWARD_KV) {
        int r = fa_min_int(row, a->seqlen_k - 1);
        if (LEVEL == FA_FULL && a->span_k != nullptr) {
            const FA_GLOBAL fa_span_of_key *span =
                (const FA_GLOBAL fa_span_of_key *)a->span_k + r;
            x.from = fa_max_int(span->from, 0);
            x.to = fa_min_int(span->to, a->seqlen_q - 1);
            return x;
        }
        bool sink = LEVEL == FA_FULL && r < a->sink_keys;
        x.from = fa_max_int(r - a->diagonal, 0);
        x.to = sink ? a->seqlen_q - 1
                    : fa_min_int(r - a->first_diagonal, a->seqlen_q - 1);
        return x;
    }
    int r = fa_min_int(row, a->seqlen_q - 1);
    if (LEVEL == FA_FULL && a->span_q != nullptr) {
        const FA_GLOBAL fa_span_of_row *span =
            (const FA_GLOBAL fa_span_of_row *)a->span_q + r;
        x.from = fa_max_int(span->from, 0);
        x.to = fa_min_int(span->to, a->seqlen_k - 1);
        return x;
    }
    x.from = fa_max_int(r + a->first_diagonal, 0);
    x.to = fa_min_int(r + a->diagonal, a->seqlen_k - 1);
    return x;
}

/* x, the same in all lanes, in a scalar register also where it was loaded. */
template <int LEVEL> static FA_DEVICE int fa_one(int x)
{
    return LEVEL == FA_FULL ? (int)fa_uniform((uint32_t)x) : x;
}

/* Keys that queries see although they lie before their windows. */
template <int LEVEL, int PASS> static FA_DEVICE int fa_sink_keys(fa_args_in a)
{
    return LEVEL == FA_FULL && PASS != FA_BACKWARD_KV ? a->sink_keys : 0;
}

/* The walked tiles that rows first .. first + rows - 1 need: begin <= t < end,
 * and those of sink keys before. */
typedef struct fa_range {
    int begin;
    int end;
} fa_range;

template <int LEVEL, int PASS>
static FA_DEVICE fa_range fa_range_of(fa_args_in a, int first, int rows)
{
    int owned = PASS == FA_BACKWARD_KV ? a->seqlen_k : a->seqlen_q;
    int last = fa_min_int(first + rows, owned) - 1;
    int from = fa_sight_of<LEVEL, PASS>(a, first).from;
    int to = fa_sight_of<LEVEL, PASS>(a, last).to;
    fa_range r;

    if (PASS == FA_BACKWARD_KV && LEVEL == FA_FULL && first < a->sink_keys) {
        to = a->seqlen_q - 1; /* of the first, the last may see less */
    }
    from = fa_one<LEVEL>(from);
    to = fa_one<LEVEL>(to);
    r.begin = from / FA_WALK;
    r.end = first < owned && to >= 0 ? to / FA_WALK + 1 : 0;
    return r;
}

/* Whether these rows see all of the 64 walked ones from `at` on.  Asked in each
 * step, because to keep the bounds would take scalar registers that are
 * scarce. */
template <int LEVEL, int PASS>
static FA_DEVICE bool fa_all_seen(fa_args_in a, int first, int rows, int at)
{
    int to = fa_sight_of<LEVEL, PASS>(a, first).to;
    int from = fa_sight_of<LEVEL, PASS>(a, first + rows - 1).from;
    bool before = at >= from;

    if (LEVEL == FA_FULL && PASS == FA_BACKWARD_KV && a->sink_keys > first) {
        return false; /* between those of sink keys and others */
    }
    before |= at + FA_WALK <= fa_sink_keys<LEVEL, PASS>(a);
    return fa_one<LEVEL>(before && at + FA_WALK - 1 <= to) != 0;
}

/* Puts `instead` where a row does not see, and with BOTH 0 into y; rows owned,
 * others walked. */
template <int KIND, int OWN, int LEVEL, int PASS, bool BOTH>
static FA_DEVICE void fa_hide(FA_NUMBER(KIND) x[OWN][FA_WALKED],
                              FA_NUMBER(KIND) y[OWN][FA_WALKED],
                              FA_NUMBER(KIND) instead, fa_args_in a, int first,
                              int walked, uint32_t tid)
{
    int c = walked + (int)(tid & 7);
    int sinks = fa_sink_keys<LEVEL, PASS>(a) - c;

#pragma unroll
    for (int i = 0; i < OWN; i++) {
        fa_sight sight =
            fa_sight_of<LEVEL, PASS>(a, first + fa_own_row(OWN, tid, i));
        int from = sight.from - c;
        int to = sight.to - c;
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            bool seen = (8 * j >= from || 8 * j < sinks) && 8 * j <= to;
            x[i][j] = seen ? x[i][j] : instead;
            if (BOTH) {
                y[i][j] = seen ? y[i][j] : (FA_NUMBER(KIND))0;
            }
        }
    }
}

/* |scale| * log2(e), in the numbers of the kernel. */
template <int KIND> static FA_DEVICE FA_NUMBER(KIND) fa_scale_log2(fa_args_in a)
{
    const double log2_e = 1.4426950408889634;

    return FA_IS_DOUBLE(KIND) ? __builtin_fabs(a->scale) * log2_e
                              : (double)a->scale_log2;
}

/* What a score is multiplied by to be in base 2, see FA_SHIFT. */
template <int KIND, int LEVEL>
static FA_DEVICE FA_NUMBER(KIND) fa_unit(fa_args_in a)
{
    return LEVEL == FA_FULL && a->in_log2 != 0 ? (FA_NUMBER(KIND))1
                                               : fa_scale_log2<KIND>(a);
}

/* Sign bits of Q that a negative scale flips. */
template <int KIND> static FA_DEVICE uint32_t fa_flip(fa_args_in a)
{
    bool negative = (fa_bits<u32x2>(a->scale).y & 0x80000000) != 0;

    return !negative ? 0 : FA_IS_HALF(KIND) ? 0x80008000 : 0x80000000;
}

/* Tensor `which` (FA_Q_AT and so on) of one batch and head; `place` is
 * batch << 16 | head of that tensor. */
template <int KIND>
static FA_DEVICE fa_matrix fa_matrix_at(fa_args_in a, int which, uint32_t place)
{
    uint32_t at = fa_uniform(place);
    bool query = which == FA_Q_AT || which == FA_DOUT_AT;

    return fa_matrix_of<KIND>(
        a, which, (int)(at >> 16), (int)(at & 0xffff),
        query ? a->heads : a->heads_k, query ? a->seqlen_q : a->seqlen_k,
        which == FA_Q_AT || which == FA_K_AT ? a->head_dim : a->head_dim_v);
}

/* The power of two that undoes a row's scale; 1 without scales. */
template <int KIND>
static FA_DEVICE float fa_undo_scale(fa_args_in a, int which, uint32_t place,
                                     int row)
{
    if constexpr (KIND == FA_BF16) {
        fa_matrix x = fa_matrix_at<KIND>(a, which, place);
        return fa_inverse_power(fa_row_scale_of<KIND>(&x, row));
    }
    return 1.0f;
}

/* Numbers of the 64 walked rows, in arrays one after the other; the 8 of one
 * lane are neighbours.  They lie where shares will: all waves have read them
 * when the first share is written, because columns are staged in between. */
template <int KIND>
static FA_DEVICE void fa_put_walked(fa_lds area, int array, FA_NUMBER(KIND) x,
                                    uint32_t tid)
{
    uint32_t row = tid & (FA_WALK - 1);
    ((FA_LDS FA_NUMBER(
        KIND) *)area)[array * FA_WALK + (row & 7) * 8 + (row >> 3)] = x;
}

template <int KIND>
static FA_DEVICE void fa_get_walked(FA_NUMBER(KIND) x[FA_WALKED], fa_lds area,
                                    int array, uint32_t tid)
{
#pragma unroll
    for (int j = 0; j < FA_WALKED; j++) {
        x[j] = ((
            FA_LDS FA_NUMBER(KIND) *)area)[array * FA_WALK + (tid & 7) * 8 + j];
    }
}

#endif
