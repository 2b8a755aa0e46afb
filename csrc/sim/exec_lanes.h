/* exec_lanes.h: which lane another lane reads (internal).
 *
 * Source: Vega ISA 12.13 and 13.3.9.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_EXEC_LANES_H
#define HIPSIM_EXEC_LANES_H

#include "sim.h"

/* The lane that lane l reads under a DPP control, or -1. */
static inline int exec_dpp_lane(unsigned ctrl, int l)
{
    int row = l & ~15, in_row = l & 15, n = (int)(ctrl & 15);

    if (ctrl <= 0xff) {
        return (l & ~3) + (int)(ctrl >> 2 * (l & 3) & 3);
    }
    switch (ctrl & 0x1f0) {
    case 0x100: /* row_shl */
        return in_row + n < 16 ? l + n : -1;
    case 0x110: /* row_shr */
        return in_row - n >= 0 ? l - n : -1;
    case 0x120: /* row_ror */
        return row + ((in_row - n) & 15);
    default:
        break;
    }
    switch (ctrl) {
    case 0x130: /* wave_shl */
        return l + 1 < SIM_LANES ? l + 1 : -1;
    case 0x134: /* wave_rol */
        return (l + 1) & 63;
    case 0x138: /* wave_shr */
        return l - 1;
    case 0x13c: /* wave_ror */
        return (l - 1) & 63;
    case 0x140: /* row_mirror */
        return row + 15 - in_row;
    case 0x141: /* row_half_mirror */
        return l ^ 7;
    case 0x142: /* row_bcast:15 */
        return row > 0 ? row - 1 : -1;
    default: /* row_bcast:31 */
        return l >= 32 ? 31 : -1;
    }
}

/* The lane that lane l reads under ds_swizzle's offset. */
static inline unsigned exec_swizzle_lane(unsigned offset, unsigned l)
{
    if (offset & 0x8000) {
        return (l & ~3u) + (offset >> 2 * (l & 3) & 3);
    }
    unsigned in_half =
        (((l & 31) & (offset & 31)) | (offset >> 5 & 31)) ^ (offset >> 10 & 31);
    return (l & 32) + in_half;
}

#endif
