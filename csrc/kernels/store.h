/* store.h: how results leave registers.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_STORE_H
#define FA_KERNELS_STORE_H

#include "product.h"

/* Where rows of one batch and head of a result go. */
typedef struct fa_output {
    fa_global_out base;
    int64_t row;
    int64_t channel;
    int channels;
    int stored;
    bool wide;
    bool adds; /* to what lies there, which is of the kernel's own type */
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
    x.adds = false;
    return x;
}

/* x as it reads back when it was stored. */
template <int KIND>
static FA_DEVICE FA_NUMBER(KIND) fa_rounded(int stored, FA_NUMBER(KIND) x)
{
    if constexpr (KIND == FA_F64) {
        return x;
    }
    return stored == FA_F32
               ? (FA_NUMBER(KIND))(float)x
               : fa_unpack_as(stored, fa_pack_as(stored, (float)x, 0.0f));
}

/* One element, rounded to what is stored. */
template <int KIND>
static FA_DEVICE void fa_store_element(fa_global_out at, int stored,
                                       FA_NUMBER(KIND) x)
{
    if constexpr (KIND == FA_F64) {
        *(FA_GLOBAL double *)at = x;
    } else if (stored == FA_F32) {
        *(FA_GLOBAL float *)at = (float)x;
    } else {
        *(FA_GLOBAL uint16_t *)at =
            (uint16_t)fa_pack_as(stored, (float)x, 0.0f);
    }
}

/* This lane's channels of one row, 16 bytes of numbers (8 of halves) at a
 * time. */
template <int KIND, int DIM>
static FA_DEVICE void fa_store_wide(const fa_output *to, int row,
                                    const FA_NUMBER(KIND) x[DIM / 8],
                                    uint32_t tid)
{
    enum { GROUP = FA_IS_DOUBLE(KIND) ? 2 : 4 };
    int bytes = fa_bytes_of(to->stored);
    fa_global_out at =
        to->base + row * to->row * bytes + fa_channel(GROUP, tid, 0) * bytes;

#pragma unroll
    for (int u = 0; u < DIM / 8 / GROUP; u++) {
        FA_NUMBER(KIND) part[GROUP];

        if (fa_channel(GROUP, tid, u) >= to->channels) {
            continue;
        }
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            part[e] = x[u * GROUP + e];
        }
        if (to->adds) {
#pragma unroll
            for (int e = 0; e < GROUP; e++) {
                part[e] += ((FA_GLOBAL FA_OUTER(KIND) *)at)[8 * GROUP * u + e];
            }
        }
        if (KIND == FA_F64 || to->stored == FA_F32) {
#pragma unroll
            for (int e = 0; e < GROUP; e++) {
                ((FA_GLOBAL FA_OUTER(KIND) *)at)[8 * GROUP * u + e] =
                    (FA_OUTER(KIND))part[e];
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
 * one by one is longer than the rest of the kernel.  Nobody else uses this LDS.
 */
template <int KIND, int DIM, int LDS_BYTES>
static FA_DEVICE void fa_store_narrow(const fa_output *to, int row,
                                      const FA_NUMBER(KIND) x[DIM / 8],
                                      bool valid, fa_lds lds, uint32_t tid)
{
    enum {
        GROUP = FA_IS_DOUBLE(KIND) ? 2 : 4,
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
            FA_NUMBER(KIND) y = ((FA_LDS FA_NUMBER(KIND) *)own)[e];
            if (to->adds) {
                y += *(FA_GLOBAL FA_OUTER(KIND) *)one;
            }
            fa_store_element<KIND>(one, to->stored, y);
        }
    }
}

#endif
