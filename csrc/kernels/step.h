/* step.h: how a workgroup takes in 64 walked rows.
 *
 * A step is a few phases, each of them a product from product.h with its
 * operands staged in LDS: fa_walk_rows for products over channels, chunk by
 * chunk, fa_walk_columns for sums over the rows, stage by stage.  While one
 * part is multiplied the next is on its way from memory: each phase ends by
 * fetching the first part of the phase that follows.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_STEP_H
#define FA_KERNELS_STEP_H

#include "philox.h"
#include "problem.h"

/* Where things lie in LDS.
 *
 *   owned tiles | walked tile     as rows
 *   columns                       over both, or over the walked tile alone if
 *                                 the owned rows stay
 *   share area                    see fa_add_share
 *
 * If a row is one chunk the owned rows stay in LDS; otherwise each chunk of
 * them is staged again in each step, which costs a few percent and makes one
 * scheme serve every head dim.
 *
 * OWN_TILES  owned tiles of a step, if they stay
 * MOST       shares of a column stage at most; fewer need fewer registers
 * LATE       streamed owned rows are fetched when they are needed, because
 *            there are no registers to fetch them early */
template <int KIND_, int DIM_, int OWN_, int OWN_TILES, int MOST, bool LATE_>
struct fa_layout {
    typedef fa_shape<KIND_, DIM_, OWN_> shape;
    typedef FA_NUMBER(KIND_) number;
    enum {
        KIND = KIND_,
        DIM = DIM_,
        OWN = OWN_,
        ROWS = shape::ROWS,
        STAYS = shape::CHUNKS == 1,
        LATE = LATE_,
        WALK_AT = shape::OWN_BYTES * (STAYS ? OWN_TILES : 1),
        COLUMNS_AT = STAYS ? WALK_AT : 0,
        TILES = WALK_AT + FA_WALK_BYTES,
        /* Fewer stages need fewer scalar registers. */
        MORE = FA_IS_DOUBLE(KIND) && DIM > 128,
        FITS = (TILES - COLUMNS_AT) / FA_SHARE_BYTES(KIND, DIM),
        FIT = FITS < MOST ? (int)FITS : (int)MOST,
        SHARES = FIT >= FA_SHARES(KIND) ? FA_SHARES(KIND)
        : FIT >= 4                      ? 4
        : FIT >= 2                      ? 2
        : MORE                          ? 2
                                        : 1, /* of a stage */
        STAGES = FA_SHARES(KIND) / SHARES,
        SLOTS = SHARES * FA_SHARE_SLOTS(KIND),
        COLUMNS = fa_columns<KIND, DIM, SLOTS>::FETCH,
        FETCH = COLUMNS > 2 ? COLUMNS : 2, /* 2: rows of a walked tile */
        COLUMNS_END = COLUMNS_AT + SHARES * FA_SHARE_BYTES(KIND, DIM),
        AREA_AT = TILES > COLUMNS_END ? TILES : COLUMNS_END,
        END = AREA_AT + shape::SHARE_AREA
    };
};

/* Rows of tensor `which` (FA_Q_AT and so on) from row `first` on. */
typedef struct fa_tile {
    int which;
    uint32_t place; /* batch << 16 | head of the tensor */
    int first;
    uint32_t flip; /* XORed into the signs */
} fa_tile;

static FA_DEVICE fa_tile fa_tile_of(int which, uint32_t place, int first,
                                    uint32_t flip)
{
    fa_tile x = {which, place, first, flip};
    return x;
}

/* What the phase that follows begins with. */
enum { FA_NOTHING, FA_ROWS_OF, FA_COLUMNS_OF };
typedef struct fa_next {
    int form;
    fa_tile walked;
    fa_tile own; /* FA_ROWS_OF, if owned rows are streamed */
} fa_next;

/* Field by field: clang 15 keeps copies of whole structures in memory. */
static FA_DEVICE void fa_set_next(fa_next *to, int form, const fa_tile *walked,
                                  const fa_tile *own)
{
    to->form = form;
    to->walked.which = walked->which;
    to->walked.place = walked->place;
    to->walked.first = walked->first;
    to->walked.flip = walked->flip;
    to->own.which = own->which;
    to->own.place = own->place;
    to->own.first = own->first;
    to->own.flip = own->flip;
}

/* On the way from memory to LDS. */
template <typename L> struct fa_staged {
    fa_fetched<L::OWN> own;
    fa_fetched<L::FETCH> walked;
};

/* The matrix of a tile.  Where owned rows are streamed scalar registers are
 * scarce, so it is made anew from the kernel's argument each time. */
template <typename L>
static FA_DEVICE fa_matrix fa_matrix_for(fa_args_in a, const fa_tile *tile)
{
    return fa_matrix_at<L::KIND>(L::STAYS ? a : fa_again(a), tile->which,
                                 tile->place);
}

/* Batch and head as a fa_tile has them; in a vector register where scalar ones
 * are scarce. */
template <typename L, int LEVEL>
static FA_DEVICE uint32_t fa_place(uint32_t batch, uint32_t head)
{
    uint32_t place = batch << 16 | head;

    return L::STAYS && LEVEL == FA_PLAIN ? place : fa_opaque(place);
}

/* The number of chunks of a row of `channels`. */
template <typename L> static FA_DEVICE int fa_chunks(int channels)
{
    return L::STAYS ? 1 : (channels + L::shape::CHUNK - 1) / L::shape::CHUNK;
}

template <typename L>
static FA_DEVICE void fa_fetch_next(fa_staged<L> *staged, fa_args_in a,
                                    const fa_next *next, uint32_t tid)
{
    enum { KIND = L::KIND };

    if (next->form == FA_ROWS_OF) {
        if (!L::STAYS && !L::LATE) {
            fa_matrix own = fa_matrix_for<L>(a, &next->own);
            fa_fetch_rows<KIND, L::ROWS>(&staged->own, &own, next->own.first, 0,
                                         tid);
        }
        fa_matrix walked = fa_matrix_for<L>(a, &next->walked);
        fa_fetch_rows<KIND, FA_WALK>(&staged->walked, &walked,
                                     next->walked.first, 0, tid);
        if (!L::STAYS) {
            fa_keep_order(); /* see fa_walk_rows */
        }
    } else if (next->form == FA_COLUMNS_OF) {
        fa_matrix walked = fa_matrix_for<L>(a, &next->walked);
        fa_fetch_columns<KIND, L::DIM, L::SLOTS>(&staged->walked, &walked,
                                                 next->walked.first, 0, tid);
    }
}

/* Owned rows that stay, into LDS. */
template <typename L>
static FA_DEVICE void fa_settle(fa_lds to, fa_staged<L> *staged, fa_args_in a,
                                const fa_tile *own, uint32_t tid)
{
    fa_matrix x = fa_matrix_for<L>(a, own);

    fa_fetch_rows<L::KIND, L::ROWS>(&staged->own, &x, own->first, 0, tid);
    fa_commit_rows<L::KIND, L::ROWS, FA_OWN_MASK>(
        to, &staged->own, &x, own->first, 0, own->flip, tid);
}

/* S += own . walked, `channels` of each.  The first chunk is in `staged`.
 * active: this wave needs the product.  number: what thread t puts into array
 * t / 64 of the walked rows' numbers, for `arrays` of them.  kept: dropout's
 * bits, if KEPT, see fa_make_kept. */
template <typename L, bool KEPT>
static FA_DEVICE void
fa_walk_rows(typename L::number s[L::OWN][FA_WALKED], fa_args_in a,
             int channels, fa_lds own_rows, fa_lds lds, const fa_tile *own,
             const fa_tile *walked, typename L::number number, int arrays,
             uint32_t kept, fa_staged<L> *staged, const fa_next *next,
             bool active, uint32_t *thread)
{
    enum { KIND = L::KIND, ROWS = L::ROWS };
    fa_lds walk = lds + L::WALK_AT;
    int granules = (channels + FA_GRANULE(KIND) - 1) / FA_GRANULE(KIND);
    int chunks = fa_chunks<L>(channels);

#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        fa_barrier(); /* what was in LDS is read */
        uint32_t tid = fa_opaque(*thread);
        if (!L::STAYS) {
            fa_matrix x = fa_matrix_for<L>(a, own);
            if (L::LATE) {
                fa_fetch_rows<KIND, ROWS>(&staged->own, &x, own->first, chunk,
                                          tid);
            }
            fa_commit_rows<KIND, ROWS, FA_OWN_MASK>(
                own_rows, &staged->own, &x, own->first, chunk, own->flip, tid);
        }
        fa_matrix x = fa_matrix_for<L>(a, walked);
        fa_commit_rows<KIND, FA_WALK, FA_WALK_MASK>(
            walk, &staged->walked, &x, walked->first, chunk, walked->flip, tid);
        if (arrays > 0 && chunk == 0 && (int)tid < arrays * FA_WALK) {
            fa_put_walked<KIND>(lds + L::AREA_AT, (int)(tid / FA_WALK), number,
                                tid);
        }
        if constexpr (KEPT) {
            if (chunk == 0) {
                fa_put_kept<L::OWN>(lds + L::KEPT_AT, kept, tid);
            }
        }
        fa_barrier(); /* both are in LDS */
        tid = fa_opaque(tid);
        if (chunk + 1 < chunks) {
            if (!L::LATE) {
                fa_matrix y = fa_matrix_for<L>(a, own);
                fa_fetch_rows<KIND, ROWS>(&staged->own, &y, own->first,
                                          chunk + 1, tid);
            }
            fa_fetch_rows<KIND, FA_WALK>(&staged->walked, &x, walked->first,
                                         chunk + 1, tid);
            /* Or clang 15 joins the ends of the branches, and to do so moves
             * what was fetched from registers to memory. */
            fa_keep_order();
        } else {
            fa_fetch_next<L>(staged, a, next, tid);
        }
        if (active) {
            fa_multiply_chunk<KIND, L::DIM, L::OWN>(
                s, own_rows, walk,
                fa_min_int(granules - chunk * FA_CHUNK_GRANULES,
                           FA_CHUNK_GRANULES),
                tid);
        }
        *thread = tid;
    }
}

/* sum += weights * rows.  The first stage is in `staged`.  scale: FA_BF16, of
 * the columns.  clear: see fa_commit_columns; returns what it does.  APART:
 * these rows are summed before they are added, because the roundings of
 * thousands of rows add up.  rest, with APART: NULL, or what rounding took from
 * sum. */
template <typename L, bool APART>
static FA_DEVICE bool
fa_walk_columns(typename L::number sum[L::OWN][L::shape::CHANNELS],
                typename L::number (*rest)[L::shape::CHANNELS],
                const fa_weights<L::KIND> weights[L::OWN], fa_args_in a,
                fa_lds lds, const fa_tile *walked, float scale, bool clear,
                fa_staged<L> *staged, const fa_next *next, bool active,
                uint32_t *thread)
{
    enum { KIND = L::KIND, DIM = L::DIM };
    fa_lds columns = lds + L::COLUMNS_AT;
    typename L::number tile[L::OWN][L::shape::CHANNELS];
    bool found = false;

    if (APART) {
        fa_clear_sums<KIND, DIM, L::OWN>(tile);
    }
#pragma unroll
    for (int n = 0; n < L::STAGES; n++) {
        fa_barrier(); /* what was in LDS is read */
        uint32_t tid = fa_opaque(*thread);
        fa_matrix x = fa_matrix_for<L>(a, walked);
        found |= fa_commit_columns<KIND, DIM, L::SLOTS>(
            columns, &staged->walked, &x, walked->first, n * L::SLOTS, scale,
            clear, tid);
        fa_barrier(); /* the columns are in LDS */
        tid = fa_opaque(tid);
        if (n + 1 < L::STAGES) {
            fa_fetch_columns<KIND, DIM, L::SLOTS>(
                &staged->walked, &x, walked->first, (n + 1) * L::SLOTS, tid);
        } else {
            fa_fetch_next<L>(staged, a, next, tid);
        }
        if (active) {
#pragma unroll
            for (int m = 0; m < L::SHARES; m++) {
                fa_add_share<KIND, DIM, L::OWN>(
                    APART ? tile : sum, weights, n * L::SHARES + m,
                    columns + m * FA_SHARE_BYTES(KIND, DIM), lds + L::AREA_AT,
                    tid);
            }
        }
        *thread = tid;
    }
    if (APART) {
        fa_add_sums<KIND, DIM, L::OWN>(sum, rest, tile);
    }
    return found;
}

#endif
