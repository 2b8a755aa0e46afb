/* profile_lds.c: how long the banks of the LDS serve one access.
 *
 * Data moves in groups of lanes, one after the other. A group costs the
 * largest number of different dwords that it wants from one bank; lanes that
 * share a dword share its transfer. Atomics do not share. A group without an
 * active lane still has its turn.
 *
 * The groups: dwords, two halves of the wave; 8 bytes, four times 16 lanes; 12
 * and 16 bytes, eight times 8 lanes, which for reads are two runs of four.
 * Reads of this form reproduce what was measured on an MI50 within 8 %; the
 * groups of wide writes are those of CDNA3.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "profile_model.h"

#include <string.h>

enum { MAX_BANKS = 32, MAX_WANTED = 2 * SIM_LANES };

static const uint64_t halves[] = {
    UINT64_C(0x00000000ffffffff),
    UINT64_C(0xffffffff00000000),
};
static const uint64_t quarters[] = {
    UINT64_C(0x000000000000ffff),
    UINT64_C(0x00000000ffff0000),
    UINT64_C(0x0000ffff00000000),
    UINT64_C(0xffff000000000000),
};
static const uint64_t eighths[] = {
    UINT64_C(0x00000000000000ff), UINT64_C(0x000000000000ff00),
    UINT64_C(0x0000000000ff0000), UINT64_C(0x00000000ff000000),
    UINT64_C(0x000000ff00000000), UINT64_C(0x0000ff0000000000),
    UINT64_C(0x00ff000000000000), UINT64_C(0xff00000000000000),
};
/* {0-3,20-23} {4-7,16-19} {8-11,28-31} {12-15,24-27} and the same + 32 */
static const uint64_t split_eighths[] = {
    UINT64_C(0x0000000000f0000f), UINT64_C(0x00000000000f00f0),
    UINT64_C(0x00000000f0000f00), UINT64_C(0x000000000f00f000),
    UINT64_C(0x00f0000f00000000), UINT64_C(0x000f00f000000000),
    UINT64_C(0xf0000f0000000000), UINT64_C(0x0f00f00000000000),
};

/* What one group of lanes has asked of the banks so far. */
typedef struct demand {
    uint8_t count[MAX_BANKS];
    uint32_t dword[MAX_BANKS][MAX_WANTED];
} demand;

static void want(demand *d, uint32_t banks, uint32_t dword, bool share)
{
    uint32_t bank = dword % banks;
    uint8_t n = d->count[bank];

    for (uint8_t i = 0; share && i < n; i++) {
        if (d->dword[bank][i] == dword) {
            return;
        }
    }
    if (n < MAX_WANTED) {
        d->dword[bank][n] = dword;
        d->count[bank] = (uint8_t)(n + 1);
    }
}

static uint32_t group_clocks(const watch_access *access, uint64_t lanes)
{
    bool atomic = access->kind == (SIM_READ | SIM_WRITE);
    uint32_t banks = COUNT(LDS_BANKS), most = 1;
    demand d;

    memset(d.count, 0, sizeof d.count);
    for (uint64_t left = lanes; left != 0; left &= left - 1) {
        uint32_t at = (uint32_t)access->at[__builtin_ctzll(left)];
        uint32_t last = (at + access->bytes - 1) / 4;
        for (uint32_t dword = at / 4; dword <= last; dword++) {
            want(&d, banks, dword, !atomic);
        }
    }
    for (uint32_t bank = 0; bank < banks; bank++) {
        most = d.count[bank] > most ? d.count[bank] : most;
    }
    return most;
}

uint32_t profile_lds_clocks(const watch_access *access, uint32_t *least)
{
    const uint64_t *groups = halves;
    uint32_t clocks = 0, count = 2;

    if (access->bytes > 8) {
        groups = access->kind == SIM_READ ? split_eighths : eighths;
        count = 8;
    } else if (access->bytes > 4) {
        groups = quarters;
        count = 4;
    }
    for (uint32_t i = 0; i < count; i++) {
        clocks += group_clocks(access, access->lanes & groups[i]);
    }
    *least = count;
    return clocks;
}
