/* backward: gradients over one tile of keys (dK, dV) or of queries (dQ).
 *
 *   P[i][j]  = 2^((Q[i].K[j] - shift[i]) * |scale| * log2(e) + bias[i])
 *              which is exp(scale * Q[i].K[j] - LSE[i]), see FA_SHIFT; 0 if i
 *              does not see j
 *   dP[i][j] = dO[i].V[j]     dS[i][j] = P[i][j] (dP[i][j] - delta[i])
 *   dV[j] = sum_i P[i][j] dO[i]     dK[j] = scale * sum_i dS[i][j] Q[i]
 *   dQ[i] = scale * sum_j dS[i][j] K[j]
 *
 * One piece of code for both: a workgroup owns rows of A and of B and walks
 * over rows of X and Y,
 *
 *   FA_BACKWARD_KV   A = K, B = V    X = Q, Y = dO   of each head of the group
 *   FA_BACKWARD_Q    A = Q, B = dO   X = K, Y = V
 *
 * and forms A X^T and B Y^T, then the sums over Y (dV) and X (dK or dQ).
 *
 * Shapes  forward.h; dO like O, gradients like their tensors.
 * Types   by KIND, see number.h; all sums fp32, or fp64.  With fp16 operands
 *         P is fp16 times 2^12, and dS fp16 times a power of two that follows
 *         from the norms of dO's and V's rows (|P (dP - delta)| is at most
 *         half their product, so it never overflows); see fa_lift.  What dS
 *         lack in their sum is made up for in dQ: due.h.
 * Units   base 2 as in forward.h, without a running maximum: PREPARE made
 *         shift and bias of the LSE.  dLSE is in delta.
 * Grid    FA_BACKWARD_KV: x = ceil(Sk / ROWS), y = Hk, z = B.
 *         FA_BACKWARD_Q: x = ceil(Sq / ROWS) from the last tile, y = H, z = B.
 * Needs   FA_PREPARE: rows, and for fp16 operands block_of V and dO.
 * Lanes   256; product.h.
 * LDS     chunks of A and B (or in turn, if they have several), a chunk of X
 *         or Y, shares of P or dS, numbers of 64 walked rows.
 * Edges   Rows past the end are zero and are not stored.  A query that sees
 *         no key has bias = -inf and no part in any sum.  A NaN or Inf in a
 *         key that a row cannot see does not reach dQ.
 * Order   walked rows ascend inside one workgroup, in dQ then every 16th tile
 *         once more and the heaviest keys, no atomics: repeats bit for bit.
 * Error   of each gradient at most 2x PyTorch's math path in the same type,
 *         against exact arithmetic; exceptions and observed figures:
 *         docs/accuracy.md.
 * Source  FlashAttention-2, arXiv 2307.08691, algorithm 2.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_BACKWARD_H
#define FA_KERNELS_BACKWARD_H

#include "tour.h"
#include "weigh.h"

/* Stores sums[i] * factor as rows of a gradient, or adds it to them.  Of the
 * LDS what is behind the owned rows is used, with a barrier if at all. */
template <int KIND, int DIM, int OWN, int LDS_BYTES>
static FA_DEVICE void
fa_store_gradient(fa_args_in a, int view, uint32_t set, uint32_t place,
                  int first, int rows, int channels,
                  const FA_NUMBER(KIND) sums[OWN][DIM / 8],
                  FA_NUMBER(KIND) factor, bool adds, fa_lds lds, uint32_t tid)
{
    uint32_t at = fa_uniform(place);
    fa_output to =
        fa_output_of(a, view, (a->wide & set) != 0, fa_stored_grad<KIND>(a),
                     (int)(at >> 16), (int)(at & 0xffff), channels);

    to.adds = adds;
    if (!to.wide) {
        fa_barrier(); /* what was in LDS is read */
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int row = first + fa_own_row(OWN, tid, i);
        FA_NUMBER(KIND) x[DIM / 8];
#pragma unroll
        for (int e = 0; e < DIM / 8; e++) {
            x[e] = sums[i][e] * factor;
        }
        if (!to.wide) {
            fa_store_narrow<KIND, DIM, LDS_BYTES>(&to, row, x, row < rows, lds,
                                                  tid);
        } else if (row < rows) {
            fa_store_wide<KIND, DIM>(&to, row, x, tid);
        }
    }
}

template <int LEVEL, int KIND, int DIM, int OWN, int PASS>
static FA_DEVICE void
fa_store_sums(fa_args_in a, const fa_walk<KIND, DIM, OWN, PASS> *walk,
              uint32_t place, int first, bool adds, fa_lds lds, uint32_t tid)
{
    typedef fa_backward_layout<KIND, DIM, OWN, PASS> L;
    enum {
        KV = PASS == FA_BACKWARD_KV,
        LDS_BYTES = (int)L::LDS_BYTES - (int)L::WALK_AT
    };
    fa_lds area = lds + L::WALK_AT;
    FA_NUMBER(KIND) first_factor = (FA_NUMBER(KIND))a->scale;
    FA_NUMBER(KIND) second_factor = 1;

    if constexpr (FA_IS_HALF(KIND)) {
        const float weight = 1.0f / FA_P_SCALE;
        first_factor = first_factor * weight * fa_inverse_power(walk->lift) *
                       fa_inverse_power(walk->x_scale);
        second_factor = weight * fa_inverse_power(walk->y_scale);
    }
    if (KV && LEVEL == FA_FULL) {
        second_factor *= (FA_NUMBER(KIND))a->keep_scale;
    }
    if (FA_EVENS_OUT(KIND, PASS)) {
        first_factor *= (FA_NUMBER(KIND))(1.0f / FA_EVEN_SCALE(KIND));
    }
    if (walk->with_second) {
        fa_store_gradient<KIND, DIM, OWN, LDS_BYTES>(
            a, FA_VIEW(dv), FA_SET_DV, place, first, a->seqlen_k, a->head_dim_v,
            walk->second_sum, second_factor, adds, area, tid);
    }
    bool stores = KV || a->dq.data != nullptr; /* else for row_sums alone */
    if (walk->with_first && stores) {
        fa_store_gradient<KIND, DIM, OWN, LDS_BYTES>(
            a, KV ? FA_VIEW(dk) : FA_VIEW(dq), KV ? FA_SET_DK : FA_SET_DQ,
            place, first, KV ? a->seqlen_k : a->seqlen_q, a->head_dim,
            walk->first_sum, first_factor, adds, area, tid);
    }
}

/* Whether NaN and Inf of a walked tile are kept out of LDS, because what
 * some row does not see must not reach it.  Of queries that is done for
 * packed ones, where rows of other sequences, or of none, share a tile. */
template <int LEVEL, int PASS>
static FA_DEVICE bool fa_is_cleared(fa_args_in a, int first, int rows, int at)
{
    bool wanted =
        PASS != FA_BACKWARD_KV || (LEVEL == FA_FULL && a->span_k != nullptr);

    return wanted && (fa_may_hide<LEVEL>(a) ||
                      !fa_all_seen<LEVEL, PASS>(a, first, rows, at));
}

/* The place of the queries of a step, batch << 16 | head. */
template <int PASS>
static FA_DEVICE uint32_t fa_query_place(uint32_t own, uint32_t walked)
{
    return PASS == FA_BACKWARD_KV ? walked : own;
}

/* The tile behind t: of the next head that shares the keys if this one has no
 * more, and behind the last one those of the evenings; FA_NO_TILE, or one that
 * is not below range.end, at the end.  heads: still to walk over.  place: of
 * the walked rows.  start: the first tile. */
template <int KIND, int PASS, int LEVEL>
static FA_DEVICE int fa_coming(fa_args_in a, fa_tour *tour,
                               fa_evenings *evenings, int *heads,
                               uint32_t *place, uint32_t own_place, int first,
                               int rows, int t, int start)
{
    enum { KV = PASS == FA_BACKWARD_KV };
    bool evening = evenings->left > 0;
    int coming =
        fa_tile_from<LEVEL>(a, tour, fa_query_place<PASS>(own_place, *place),
                            first, t + (evening ? (int)FA_EVEN_EVERY : 1));

    if (KV && LEVEL == FA_PLAIN && coming >= tour->range.end) {
        *heads -= 1;
        *place += 1;
        coming = *heads > 0 ? tour->range.begin : (int)FA_NO_TILE;
    }
    while (KV && LEVEL == FA_FULL && coming >= tour->range.end && *heads > 1) {
        *heads -= 1;
        *place += 1;
        coming = fa_start_tour<LEVEL, PASS>(a, tour, *place, first, rows);
    }
    if (FA_EVENS_OUT(KIND, PASS)) {
        evenings->days += evening ? 0 : 1;
        evenings->left -= evening ? 1 : 0;
        if (evening && evenings->left == 0) {
            return FA_NO_TILE;
        }
        if (!evening && coming >= tour->range.end) {
            evenings->left = fa_evenings_of(evenings->days);
            tour->entry = 0;
            coming = fa_tile_from<LEVEL>(a, tour, own_place, first,
                                         start + fa_first_evening(evenings));
        }
    }
    return coming;
}

template <int KIND, int DIM, int OWN, int PASS, int LEVEL>
static FA_DEVICE void fa_backward(fa_args_in a, fa_lds lds)
{
    typedef fa_backward_layout<KIND, DIM, OWN, PASS> L;
    typedef FA_NUMBER(KIND) number;
    enum {
        KV = PASS == FA_BACKWARD_KV,
        APART = FA_SUMS_APART(KIND, PASS),
        ROWS = L::ROWS,
        WAVE_ROWS = L::shape::WAVE_ROWS
    };

    const fa_args_in args = a;
    uint32_t tid = fa_thread();
    int first = ROWS * (KV ? (int)fa_group_x()
                           : (a->seqlen_q - 1) / ROWS - (int)fa_group_x());
    int wave_first = first + (int)fa_uniform(tid / FA_WAVE) * WAVE_ROWS;
    uint32_t own_place = fa_place<L, LEVEL>(fa_group_z(), fa_group_y());
    uint32_t walk_place = fa_place<L, LEVEL>(
        fa_group_z(), KV ? fa_group_y() * (uint32_t)a->group
                         : fa_group_y() / (uint32_t)a->group);
    int heads = KV ? a->group : 1; /* still to walk over */
    fa_walk<KIND, DIM, OWN, PASS> walk;
    fa_staged<L> staged;
    fa_tour tour;
    fa_fit fit;

    if (fa_left_to_other<KIND, PASS>(a, first, own_place, &fit,
                                     lds + L::AREA_AT, tid)) {
        return;
    }
    walk.with_first = !KV || a->dk.data != nullptr;
    walk.with_second = KV && a->dv.data != nullptr;
    walk.scale_log2 = fa_unit<KIND, LEVEL>(a);
    walk.lift = 1.0f;
    walk.x_scale = 1.0f;
    walk.y_scale = 1.0f;
    if constexpr (FA_IS_HALF(KIND)) {
        walk.lift =
            fa_lift<PASS>(a, first, ROWS, own_place, lds + L::AREA_AT, tid);
        if (LEVEL == FA_FULL) {
            walk.lift *= fa_power_of_2(-a->keep_log2);
        }
    }
    if constexpr (KIND == FA_BF16) {
        walk.x_scale = fit.scale[FA_X_AT(PASS)];
        walk.y_scale = fit.scale[FA_Y_AT(PASS)];
        fa_keep_undo<KIND, OWN>(a, FA_A_AT(PASS), own_place, first,
                                lds + L::UNDO_AT, tid);
        fa_keep_undo<KIND, OWN>(a, FA_B_AT(PASS), own_place, first,
                                lds + L::UNDO_AT + ROWS * 4, tid);
    }
    fa_own_numbers_of<PASS>(&walk.own, a, own_place, first, tid);
    fa_clear_sums<KIND, DIM, OWN>(walk.first_sum);
    fa_clear_sums<KIND, DIM, OWN>(walk.second_sum);
    fa_clear_due(&walk.due);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        walk.row_sum[i] = 0;
    }
    uint32_t flip = fa_flip<KIND>(a);
    fa_tile tile_a = fa_tile_of(FA_A_AT(PASS), own_place, first, KV ? 0 : flip);
    fa_tile tile_b = fa_tile_of(FA_B_AT(PASS), own_place, first, 0);
    int t = fa_start_tour<LEVEL, PASS>(
        a, &tour, fa_query_place<PASS>(own_place, walk_place), first, ROWS);
    /* Lists of blocks may have no tile for this head. */
    while (KV && LEVEL == FA_FULL && t >= tour.range.end && heads > 1) {
        heads -= 1;
        walk_place += 1;
        t = fa_start_tour<LEVEL, PASS>(a, &tour, walk_place, first, ROWS);
    }
    int start = t; /* FA_EVENS_OUT */
    if (t < tour.range.end) {
        fa_tile x = fa_tile_of(FA_X_AT(PASS), walk_place, t * FA_WALK, 0);
        fa_next next;
        fa_set_next(&next, FA_ROWS_OF, &x, &tile_a);
        fa_fetch_next<L>(&staged, a, &next, tid);
        if (L::STAYS) {
            fa_settle<L>(lds, &staged, a, &tile_a, tid);
            fa_settle<L>(lds + L::B_AT, &staged, a, &tile_b, tid);
        }
    }
    fa_evenings evenings = {0, 0}; /* FA_EVENS_OUT */
    bool adds = false;             /* FA_PUTS_AWAY: not the first epoch */
    do {
        int left = FA_EPOCH;
        while (t < tour.range.end && left > 0) {
            left -= FA_PUTS_AWAY(KIND, PASS) ? 1 : 0;
            a = fa_again(args);
            int at = t * FA_WALK;
            fa_range wave = fa_range_of<LEVEL, PASS>(a, wave_first, WAVE_ROWS);
            bool active = fa_is_active(&wave, tour.sink_tiles, t);
            uint32_t query_place = fa_query_place<PASS>(own_place, walk_place);
            number s[OWN][FA_WALKED];
            number dp[OWN][FA_WALKED];
            fa_weights<KIND> p[OWN];
            fa_weights<KIND> ds[OWN];
            uint32_t kept = 0;
            bool evening = evenings.left > 0;

            a = fa_again(a);
            fa_tile x =
                fa_tile_of(FA_X_AT(PASS), walk_place, at, KV ? flip : 0);
            fa_tile y = fa_tile_of(FA_Y_AT(PASS), walk_place, at, 0);
            number walked = fa_fetch_walked<KIND, PASS>(a, walk_place, at, tid);
            if (LEVEL == FA_FULL && KV && a->seed != nullptr) {
                kept = fa_make_kept<OWN>(a, walk_place, first, at, tid);
            }
            fa_next next;

            /* S = A X^T, dP - delta = B Y^T - delta */
            fa_clear_products<OWN>(s);
            fa_set_next(
                &next, walk.with_first && !evening ? FA_ROWS_OF : FA_COLUMNS_OF,
                evening ? &x : &y, &tile_b);
            fa_walk_rows<L, LEVEL == FA_FULL && KV>(
                s, a, a->head_dim, lds, lds, &tile_a, &x, walked,
                FA_WALKED_ARRAYS(KIND, PASS), kept, &staged, &next, active,
                &tid);
            fa_clear_products<OWN>(dp);
            if (FA_TAKES_EARLY(KIND, LEVEL)) {
                fa_take<KIND, OWN, PASS>(dp, FA_DELTA, &walk.own,
                                         lds + L::AREA_AT, tid);
            }
            if (walk.with_first && !evening) {
                fa_set_next(&next, FA_COLUMNS_OF, walk.with_second ? &y : &x,
                            &tile_b);
                fa_walk_rows<L, false>(dp, a, a->head_dim_v, lds + L::B_AT, lds,
                                       &tile_b, &y, walked, 0, 0, &staged,
                                       &next, active, &tid);
            }
            /* Also in waves that do not use it: under a branch the compiler
             * keeps products and weights in registers of their own. */
            a = fa_again(a);
            bool masked =
                !fa_all_seen<LEVEL, PASS>(a, wave_first, WAVE_ROWS, at);
            fa_weigh<KIND, DIM, OWN, PASS, LEVEL>(&walk, s, dp, p, ds, a, lds,
                                                  query_place, first, at,
                                                  masked, &evenings, tid);

            a = fa_again(a);
            uint32_t coming_place = walk_place;
            int coming = fa_coming<KIND, PASS, LEVEL>(
                a, &tour, &evenings, &heads, &coming_place, own_place, first,
                ROWS, t, start);
            bool is_last = coming >= tour.range.end;
            int form = is_last ? FA_NOTHING : FA_ROWS_OF;
            fa_tile after = fa_tile_of(FA_X_AT(PASS), coming_place,
                                       is_last ? 0 : coming * FA_WALK, 0);
            if (walk.with_second) { /* dV += P^T dO */
                if (walk.with_first) {
                    fa_set_next(&next, FA_COLUMNS_OF, &x, &tile_a);
                } else {
                    fa_set_next(&next, form, &after, &tile_a);
                }
                a = fa_again(a);
                bool clear = LEVEL == FA_FULL &&
                             fa_is_cleared<LEVEL, PASS>(a, first, ROWS, at);
                fa_walk_columns<L, APART>(walk.second_sum, nullptr, p, a, lds,
                                          &y, walk.y_scale, clear, &staged,
                                          &next, active, &tid);
            }
            if (walk.with_first) { /* dK += dS^T Q, or dQ += dS K */
                a = fa_again(a);
                bool clear = fa_is_cleared<LEVEL, PASS>(a, first, ROWS, at);
                fa_set_next(&next, form, &after, &tile_a);
                fa_walk_columns<L, APART>(walk.first_sum, nullptr, ds, a, lds,
                                          &x, walk.x_scale, clear, &staged,
                                          &next, active, &tid);
            }
            t = coming;
            walk_place = coming_place;
        }
        /* Not `a` of the last step, which the compiler puts into vector
         * registers. */
        if constexpr (FA_EVENS_OUT(KIND, PASS)) {
            a = fa_again(args);
            if (start < tour.range.end) {
                fa_give_rest<KIND, DIM>(walk.first_sum, &walk.due, a,
                                        walk.x_scale, walk_place,
                                        lds + L::AREA_AT, tid);
            }
            if (a->row_sums != 0) {
                fa_store_row_sums<OWN>(a, walk.due.exact, own_place, first,
                                       FA_WHOLE(KIND, walk.lift), tid);
            }
        }
        if constexpr (FA_SUMS_ROWS(KIND, PASS)) {
            a = fa_again(args);
            if (a->row_sums != 0) {
                fa_store_row_sums<OWN>(a, walk.row_sum, own_place, first, 1.0f,
                                       tid);
            }
        }
        fa_store_sums<LEVEL>(fa_again(args), &walk, own_place, first, adds, lds,
                             tid);
        if (FA_PUTS_AWAY(KIND, PASS)) {
            fa_clear_sums<KIND, DIM, OWN>(walk.first_sum);
            fa_clear_sums<KIND, DIM, OWN>(walk.second_sum);
            adds = true;
        }
    } while (FA_PUTS_AWAY(KIND, PASS) && t < tour.range.end);
}

#endif
