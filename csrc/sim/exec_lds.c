/* exec_lds.c: the DS instructions: local data share, and the lane exchanges
 * that go through its crossbar.
 *
 * Addresses of all lanes are formed and checked before any lane moves data.
 * An access beyond the workgroup's LDS is a fault here; the hardware would
 * read zero.
 *
 * Source: Vega ISA chapter 11 and 12.13.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "exec.h"
#include "exec_atomic.h"
#include "exec_lanes.h"

#include <string.h>

#define FOR_ACTIVE(l, mask)                                            \
    for (uint64_t left_ = (mask); left_ != 0; left_ &= left_ - 1)      \
        for (unsigned l = (unsigned)__builtin_ctzll(left_), once_ = 1; \
             once_ != 0; once_ = 0)

/* Forms each lane's address, base + offset; the sum wraps at 32 bits, and
 * compilers count on that (a base of -4 with an offset of 252). True if every
 * active lane's access is inside the LDS. */
static bool find_lanes(wave *w, uint64_t exec, const lane *base,
                       uint32_t offset, uint32_t bytes, uint32_t at[SIM_LANES])
{
    uint32_t highest = 0, low = 0;

    for (unsigned l = 0; l < SIM_LANES; l++) {
        at[l] = base[l].u + offset;
    }
    FOR_ACTIVE (l, exec) {
        highest = at[l] > highest ? at[l] : highest;
        low |= at[l];
    }
    if (exec != 0 && (uint64_t)highest + bytes > w->group->lds_bytes) {
        FOR_ACTIVE (l, exec) {
            if ((uint64_t)at[l] + bytes > w->group->lds_bytes) {
                exec_fault_at(w, SIM_FAULT_LDS, l, at[l], bytes, "");
                break;
            }
        }
        return false;
    }
    if (w->group->dispatch->check >= 1) {
        uint32_t natural = bytes == 12 ? 16 : bytes;
        w->group->misaligned += (low & (natural - 1)) != 0;
    }
    return true;
}

/* Tells the watchers of one access; false if the wave was stopped. */
static bool watch_lanes(wave *w, const isa_row *row, uint64_t exec,
                        const uint32_t at[SIM_LANES], unsigned reg)
{
    const isa_info *info = &isa_ops[row->op];
    watch_access access = {
        .lanes = exec,
        .bytes = info->bytes,
        .kind = isa_is_atomic(info)  ? SIM_READ | SIM_WRITE
                : isa_is_store(info) ? SIM_WRITE
                                     : SIM_READ,
        .space = SPACE_LDS,
        .reg = reg,
    };

    for (unsigned l = 0; l < SIM_LANES; l++) {
        access.at[l] = at[l];
    }
    return watch_access_lanes(w, row, &access);
}

/* `dwords` registers from `reg` on. */
static void load_rows(wave *w, uint64_t exec, const uint32_t at[SIM_LANES],
                      unsigned reg, unsigned dwords)
{
    const uint8_t *lds = w->group->lds;

    for (unsigned k = 0; k < dwords; k++) {
        lane *to = w->v + (size_t)(reg + k) * SIM_LANES;
        if (exec == UINT64_MAX) {
            for (unsigned l = 0; l < SIM_LANES; l++) {
                memcpy(&to[l], lds + at[l] + 4 * k, 4);
            }
        } else {
            FOR_ACTIVE (l, exec) {
                memcpy(&to[l], lds + at[l] + 4 * k, 4);
            }
        }
    }
}

static void store_rows(wave *w, uint64_t exec, const uint32_t at[SIM_LANES],
                       unsigned reg, unsigned dwords)
{
    uint8_t *lds = w->group->lds;

    for (unsigned k = 0; k < dwords; k++) {
        const lane *from = w->v + (size_t)(reg + k) * SIM_LANES;
        FOR_ACTIVE (l, exec) {
            memcpy(lds + at[l] + 4 * k, &from[l], 4);
        }
    }
}

/* Both exchanges of one lane before those of the next. The results, which may
 * overwrite the data registers, are written last. */
static void exchange_two(wave *w, const isa_row *row, uint64_t exec,
                         uint32_t at[2][SIM_LANES], unsigned dwords)
{
    const unsigned data[2] = {row->data, row->data2};
    uint32_t old[4][SIM_LANES] = {{0}};

    FOR_ACTIVE (l, exec) {
        for (unsigned k = 0; k < 2 * dwords; k++) {
            uint8_t *word = w->group->lds + at[k / dwords][l] + k % dwords * 4;
            unsigned reg = data[k / dwords] + k % dwords;
            memcpy(&old[k][l], word, 4);
            memcpy(word, &w->v[(size_t)reg * SIM_LANES + l], 4);
        }
    }
    FOR_ACTIVE (l, exec) {
        for (unsigned k = 0; k < 2 * dwords; k++) {
            w->v[(size_t)(row->dst + k) * SIM_LANES + l].u = old[k][l];
        }
    }
}

/* Two accesses in one instruction. Both loads use the addresses from before
 * the first, which may overwrite the address register. */
static void two(wave *w, const isa_row *row, const isa_info *info,
                uint64_t exec, const lane *base)
{
    bool load = info->access == M_READ2 || info->access == M_READ2ST64;
    bool swap = info->access == M_XCHG2 || info->access == M_XCHG2ST64;
    bool far = info->access == M_READ2ST64 || info->access == M_WRITE2ST64 ||
               info->access == M_XCHG2ST64;
    uint32_t unit = info->bytes * (far ? 64u : 1u);
    uint32_t first = ((uint32_t)row->offset & 255) * unit;
    uint32_t second = ((uint32_t)row->offset >> 8) * unit;
    unsigned dwords = info->bytes / 4;
    uint32_t at[2][SIM_LANES];

    if (!find_lanes(w, exec, base, first, info->bytes, at[0]) ||
        !find_lanes(w, exec, base, second, info->bytes, at[1])) {
        return;
    }
    if (w->group->watched &&
        (!watch_lanes(w, row, exec, at[0], load ? row->dst : row->data) ||
         !watch_lanes(w, row, exec, at[1],
                      load ? row->dst + dwords : row->data2))) {
        return;
    }
    if (swap) {
        exchange_two(w, row, exec, at, dwords);
    } else if (load) {
        load_rows(w, exec, at[0], row->dst, dwords);
        load_rows(w, exec, at[1], row->dst + dwords, dwords);
    } else {
        store_rows(w, exec, at[0], row->data, dwords);
        store_rows(w, exec, at[1], row->data2, dwords);
    }
}

/* One byte or half per lane. */
static void narrow(wave *w, const isa_row *row, const isa_info *info,
                   uint64_t exec, const uint32_t from[SIM_LANES])
{
    lane *d = w->v + (size_t)row->dst * SIM_LANES;
    const lane *data = w->v + (size_t)row->data * SIM_LANES;
    bool store = isa_is_store(info);

    FOR_ACTIVE (l, exec) {
        uint8_t *at = w->group->lds + from[l];
        uint16_t half = 0;
        memcpy(&half, at, info->bytes);
        /* The other of the two fields may name a register beyond the end. */
        uint32_t low = store ? data[l].u : 0, high = low >> 16;
        uint32_t old = store ? 0 : d[l].u;
        switch (info->access) {
        case M_LOAD_U8:
        case M_LOAD_U16:
            d[l].u = half;
            break;
        case M_LOAD_I8:
            d[l].i = (int8_t)half;
            break;
        case M_LOAD_I16:
            d[l].i = (int16_t)half;
            break;
        case M_LOAD_U8_LO:
        case M_LOAD_16_LO:
            d[l].u = (old & 0xffff0000u) | half;
            break;
        case M_LOAD_I8_LO:
            d[l].u = (old & 0xffff0000u) | (uint16_t)(int8_t)half;
            break;
        case M_LOAD_U8_HI:
        case M_LOAD_16_HI:
            d[l].u = (old & 0xffffu) | (uint32_t)half << 16;
            break;
        case M_LOAD_I8_HI:
            d[l].u = (old & 0xffffu) | (uint32_t)(uint16_t)(int8_t)half << 16;
            break;
        case M_STORE_8_HI:
        case M_STORE_16_HI:
            memcpy(at, &high, info->bytes);
            break;
        default: /* M_STORE_8, M_STORE_16 */
            memcpy(at, &low, info->bytes);
            break;
        }
    }
}

/* ---- atomics ----------------------------------------------------------- */

static uint64_t combine(unsigned op, uint64_t m, uint64_t a, uint64_t b)
{
    switch (op) {
#define DS(...)
#define DS_ATOMIC(opcode, name, rtn, type, sources, ...) \
    case ISA_ds_##name:                                  \
    case ISA_ds_##rtn:                                   \
        COMBINE(type, __VA_ARGS__)
#define DS_ATOMIC_RTN(opcode, name, type, sources, ...) \
    case ISA_ds_##name:                                 \
        COMBINE(type, __VA_ARGS__)
#include "ds.def"
    default:
        return m;
    }
}

static uint64_t data_value(const wave *w, unsigned reg, unsigned l,
                           unsigned bytes)
{
    uint64_t low = w->v[(size_t)reg * SIM_LANES + l].u;

    return bytes == 4
               ? low
               : low | (uint64_t)w->v[(size_t)(reg + 1) * SIM_LANES + l].u
                           << 32;
}

static void atomic(wave *w, const isa_row *row, const isa_info *info,
                   uint64_t exec, const uint32_t from[SIM_LANES])
{
    FOR_ACTIVE (l, exec) {
        uint8_t *at = w->group->lds + from[l];
        uint64_t b = 0, old = 0;

        if (from[l] % info->bytes != 0) {
            exec_fault_at(w, SIM_FAULT_ALIGNMENT, l, from[l], info->bytes, "");
            return;
        }
        uint64_t a = data_value(w, row->data, l, info->bytes);
        if ((info->flags & ISA_TWO_DATA) != 0) {
            b = data_value(w, row->data2, l, info->bytes);
        }
        memcpy(&old, at, info->bytes);
        uint64_t new = combine(row->op, old, a, b);
        memcpy(at, &new, info->bytes);
        if ((info->flags & ISA_RETURN) != 0) {
            w->v[(size_t)row->dst * SIM_LANES + l].u = (uint32_t)old;
            if (info->bytes == 8) {
                w->v[(size_t)(row->dst + 1) * SIM_LANES + l].u =
                    (uint32_t)(old >> 32);
            }
        }
    }
}

/* ---- lane exchange ----------------------------------------------------- */

static void exchange(wave *w, const isa_row *row, const isa_info *info,
                     uint64_t exec, const lane *address)
{
    unsigned offset = (unsigned)row->offset;
    const lane *data = w->v + (size_t)row->data * SIM_LANES;
    lane *d = w->v + (size_t)row->dst * SIM_LANES;
    uint32_t result[SIM_LANES] = {0};

    if (info->access == M_SWIZZLE && offset >= 0xc000) {
        exec_fault(w, SIM_FAULT_OPCODE, "swizzle mode not simulated");
        return;
    }
    FOR_ACTIVE (l, exec) {
        unsigned other = (address[l].u + offset) / 4 % SIM_LANES;
        switch (info->access) {
        case M_PERMUTE:
            result[other] = data[l].u;
            break;
        case M_BPERMUTE:
            result[l] = exec >> other & 1 ? data[other].u : 0;
            break;
        default:
            other = exec_swizzle_lane(offset, l);
            result[l] = exec >> other & 1 ? address[other].u : 0;
            break;
        }
    }
    FOR_ACTIVE (l, exec) {
        d[l].u = result[l];
    }
}

/* Adds the number of active lanes to a counter at M0[15:0], or takes it away;
 * all lanes get the old value. One access, by the first active lane. */
static void count_lanes(wave *w, const isa_row *row, const isa_info *info,
                        uint64_t exec)
{
    uint64_t first = exec & (0 - exec);
    uint32_t active = (uint32_t)__builtin_popcountll(exec);
    lane base[SIM_LANES];
    uint32_t at[SIM_LANES], old = 0;

    for (unsigned l = 0; l < SIM_LANES; l++) {
        base[l].u = w->s[SRC_M0] & 0xffff;
    }
    if (exec == 0 ||
        !find_lanes(w, first, base, (uint32_t)row->offset, info->bytes, at)) {
        return;
    }
    if (w->group->watched && !watch_lanes(w, row, first, at, row->dst)) {
        return;
    }
    uint8_t *word = w->group->lds + at[0];
    memcpy(&old, word, 4);
    uint32_t new = info->access == M_APPEND ? old + active : old - active;
    memcpy(word, &new, 4);
    FOR_ACTIVE (l, exec) {
        w->v[(size_t)row->dst * SIM_LANES + l].u = old;
    }
}

void exec_lds(wave *w, const isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];
    uint64_t exec = exec_mask(w);
    const lane *base = w->v + (size_t)row->addr * SIM_LANES;
    uint32_t at[SIM_LANES];

    if (row->gds) {
        exec_fault(w, SIM_FAULT_OPCODE, "global data share not simulated");
        return;
    }
    switch (info->access) {
    case M_NOP:
        return;
    case M_SWIZZLE:
    case M_PERMUTE:
    case M_BPERMUTE:
        exchange(w, row, info, exec, base);
        return;
    case M_READ2:
    case M_READ2ST64:
    case M_WRITE2:
    case M_WRITE2ST64:
    case M_XCHG2:
    case M_XCHG2ST64:
        two(w, row, info, exec, base);
        return;
    case M_APPEND:
    case M_CONSUME:
        count_lanes(w, row, info, exec);
        return;
    default:
        break;
    }
    if (!find_lanes(w, exec, base, (uint32_t)row->offset, info->bytes, at)) {
        return;
    }
    bool loads = info->access != M_ATOMIC && !isa_is_store(info);
    if (w->group->watched &&
        !watch_lanes(w, row, exec, at, loads ? row->dst : row->data)) {
        return;
    }
    switch (info->access) {
    case M_LOAD:
        load_rows(w, exec, at, row->dst, info->bytes / 4);
        break;
    case M_STORE:
        store_rows(w, exec, at, row->data, info->bytes / 4);
        break;
    case M_ATOMIC:
        atomic(w, row, info, exec, at);
        break;
    default:
        narrow(w, row, info, exec, at);
        break;
    }
}
