/* problem.h: what forward and backward share about the problem: which keys a
 * row sees, how big the parts of LDS are, and how results are written.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_PROBLEM_H
#define FA_KERNELS_PROBLEM_H

#include "product.h"

/* -- visibility ------------------------------------------------------------ */

/* The last key that a row sees; rows past the end repeat the last one. */
static FA_DEVICE int fa_last_key(fa_args_in a, int row)
{
    return fa_min_int(fa_min_int(row, a->seqlen_q - 1) + a->diagonal,
                      a->seqlen_k - 1);
}

/* Key tiles that rows first .. first + rows - 1 need. */
static FA_DEVICE int fa_tiles(fa_args_in a, int first, int rows)
{
    int key = fa_last_key(a, first + rows - 1);

    return first < a->seqlen_q && key >= 0 ? key / FA_WALK + 1 : 0;
}

/* Key tiles that each of these rows sees to the end of the keys. */
static FA_DEVICE int fa_common_tiles(fa_args_in a, int first, int rows)
{
    int key = first + a->diagonal;

    return key < 0                  ? 0
           : key >= a->seqlen_k - 1 ? fa_tiles(a, first, rows)
                                    : (key + 1) / FA_WALK;
}

/* Scores of keys that a row does not see become -inf; rows owned, keys
 * walked. */
template <int KIND, int OWN>
static FA_DEVICE void fa_mask_keys(FA_NUMBER(KIND) s[OWN][FA_WALKED],
                                   fa_args_in a, int first, int key,
                                   uint32_t tid)
{
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int last = fa_last_key(a, first + fa_own_row(OWN, tid, i));
        int own = last - key - (int)(tid & 7);
#pragma unroll
        for (int j = 0; j < FA_WALKED; j++) {
            s[i][j] = 8 * j <= own ? s[i][j] : -FA_INFINITY;
        }
    }
}

/* |scale| * log2(e), in the numbers of the kernel. */
template <int KIND> static FA_DEVICE FA_NUMBER(KIND) fa_scale_log2(fa_args_in a)
{
    const double log2_e = 1.4426950408889634;

    return KIND == FA_F64 ? __builtin_fabs(a->scale) * log2_e
                          : (double)a->scale_log2;
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
    ((FA_LDS FA_NUMBER(KIND) *)area)[array * FA_WALK + (row & 7) * 8 +
                                     (row >> 3)] = x;
}

template <int KIND>
static FA_DEVICE void fa_get_walked(FA_NUMBER(KIND) x[FA_WALKED], fa_lds area,
                                    int array, uint32_t tid)
{
#pragma unroll
    for (int j = 0; j < FA_WALKED; j++) {
        x[j] = ((FA_LDS FA_NUMBER(KIND) *)area)[array * FA_WALK +
                                                (tid & 7) * 8 + j];
    }
}

/* -- LDS ------------------------------------------------------------------- */

/* The forward's cut below: fp32 needs its registers elsewhere. */
#define FA_MOST_SHARES(KIND) ((KIND) == FA_F32 ? 1 : 8)

/* How a step's columns are cut into stages that fit where the rows were, with
 * at most MOST shares each (fewer need fewer registers to fetch). */
template <int KIND, int DIM, int OWN, bool STAYS, int MOST = 8>
struct fa_stage_of {
    typedef fa_shape<KIND, DIM, OWN> shape;
    enum {
        ROOM = STAYS ? FA_WALK_BYTES : shape::OWN_BYTES + FA_WALK_BYTES,
        FITS = ROOM / FA_SHARE_BYTES(KIND, DIM),
        FIT = FITS < MOST ? (int)FITS : (int)MOST,
        SHARES = FIT >= FA_SHARES(KIND) ? FA_SHARES(KIND)
                 : FIT >= 4             ? 4
                 : FIT >= 2             ? 2
                                        : 1,
        STAGES = FA_SHARES(KIND) / SHARES,
        SLOTS = SHARES * FA_SHARE_SLOTS(KIND),
        COLUMNS = fa_columns<KIND, DIM, SLOTS>::FETCH,
        FETCH = COLUMNS > 2 ? COLUMNS : 2, /* 2: rows of a walked tile */
        BYTES = SHARES * FA_SHARE_BYTES(KIND, DIM),
        TILES = shape::OWN_BYTES + FA_WALK_BYTES,
        AREA_AT = !STAYS && BYTES > TILES ? BYTES : TILES,
        LDS_BYTES = AREA_AT + shape::SHARE_AREA
    };
};

/* -- results --------------------------------------------------------------- */

/* Where rows of one batch and head of a result go. */
typedef struct fa_output {
    fa_global_out base;
    int64_t row;
    int64_t channel;
    int channels;
    int stored;
    bool wide;
} fa_output;

static FA_DEVICE fa_output fa_output_of(fa_args_in a, int at, bool wide,
                                        int stored, int batch, int head,
                                        int channels)
{
    const FA_CONSTANT fa_view *view = fa_view_at(a, at);
    fa_output x;
    x.base = (fa_global_out)view->data +
             (batch * view->stride[0] + head * view->stride[1]) *
                 fa_bytes_of(stored);
    x.row = view->stride[2];
    x.channel = view->stride[3];
    x.channels = channels;
    x.stored = stored;
    x.wide = wide;
    return x;
}

/* x as it reads back when it was stored. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND) fa_rounded(int stored, FA_NUMBER(KIND) x)
{
    if constexpr (KIND == FA_F64) {
        return x;
    }
    return stored == FA_F32 ? x : fa_unpack_as(stored, fa_pack_as(stored, (float)x, 0.0f));
}

/* One element, rounded to what is stored. */
template <int KIND>
static FA_DEVICE void fa_store_element(fa_global_out at, int stored,
                                       FA_NUMBER(KIND) x)
{
    if constexpr (KIND == FA_F64) {
        *(FA_GLOBAL double *)at = x;
    } else if (stored == FA_F32) {
        *(FA_GLOBAL float *)at = x;
    } else {
        *(FA_GLOBAL uint16_t *)at = (uint16_t)fa_pack_as(stored, x, 0.0f);
    }
}

/* This lane's channels of one row, 16 bytes of numbers (8 of halves) at a
 * time. */
template <int KIND, int DIM>
static FA_DEVICE void fa_store_wide(const fa_output *to, int row,
                                    const FA_NUMBER(KIND) x[DIM / 8],
                                    uint32_t tid)
{
    enum { GROUP = KIND == FA_F64 ? 2 : 4 };
    int bytes = fa_bytes_of(to->stored);
    fa_global_out at = to->base + row * to->row * bytes +
                       fa_channel(GROUP, tid, 0) * bytes;

#pragma unroll
    for (int u = 0; u < DIM / 8 / GROUP; u++) {
        const FA_NUMBER(KIND) *part = &x[u * GROUP];

        if (fa_channel(GROUP, tid, u) >= to->channels) {
            continue;
        }
        if (KIND == FA_F64 || to->stored == FA_F32) {
#pragma unroll
            for (int e = 0; e < GROUP; e++) {
                ((FA_GLOBAL FA_NUMBER(KIND) *)at)[8 * GROUP * u + e] = part[e];
            }
        } else {
            u32x2 y;
            y.x = fa_pack_as(to->stored, (float)part[0], (float)part[1]);
            y.y = fa_pack_as(to->stored, (float)part[GROUP - 2],
                             (float)part[GROUP - 1]);
            ((FA_GLOBAL u32x2 *)at)[8 * u] = y;
        }
    }
}

/* The same for any stride and alignment: 8 lanes bring their row to LDS and
 * store it element by element in a loop, because code that stores registers
 * one by one is longer than the rest of the kernel.  Nobody else uses the LDS.
 */
template <int KIND, int DIM, int LDS_BYTES>
static FA_DEVICE void fa_store_narrow(const fa_output *to, int row,
                                      const FA_NUMBER(KIND) x[DIM / 8],
                                      bool valid, fa_lds lds, uint32_t tid)
{
    enum {
        GROUP = KIND == FA_F64 ? 2 : 4,
        GROUPS = DIM / 8 / GROUP,
        FIT = LDS_BYTES / (FA_THREADS * 16), /* groups of every lane */
        ONCE = FIT < GROUPS ? FIT : GROUPS,
        SPAN = ONCE * 8 * GROUP /* channels */
    };
    int bytes = fa_bytes_of(to->stored);
    int64_t step = to->channel * bytes;
    fa_global_out at = to->base + row * to->row * bytes;
    fa_lds own = lds + (tid >> 3) * (ONCE * 128);

#pragma unroll
    for (int u0 = 0; u0 < GROUPS; u0 += ONCE) {
        fa_wave_sync();
#pragma unroll
        for (int u = u0; u < u0 + ONCE && u < GROUPS; u++) {
            u32x4 part;
            __builtin_memcpy(&part, &x[u * GROUP], 16);
            fa_lds_store4(own + (u - u0) * 128 + (tid & 7) * 16, part);
        }
        fa_wave_sync();
        int left = valid ? to->channels - u0 * 8 * GROUP : 0;
#pragma unroll 1
        for (int e = (int)(tid & 7); e < fa_min_int(left, SPAN); e += 8) {
            fa_global_out one = at + (u0 * 8 * GROUP + e) * step;
            fa_store_element<KIND>(one, to->stored,
                                   ((FA_LDS FA_NUMBER(KIND) *)own)[e]);
        }
    }
}

#endif
