/* exec_memory.c: FLAT, GLOBAL and SCRATCH; of MUBUF, which is in exec_buffer.c,
 * the part that concerns one lane.
 *
 * A lane's access goes to global memory, the LDS or its own scratch; flat
 * instructions decide per lane by address window. Global accesses must lie
 * in the launch's memory; the usual case is one check for the range that all
 * active lanes span. Global atomics are atomic on the host, because other
 * workgroups run at the same time.
 *
 * Scratch is interleaved by dword: byte b of lane l's private memory lies at
 * (b / 4) * 256 + l * 4 + b % 4 from the wave's base, which the kernel finds
 * in its scratch descriptor or in FLAT_SCRATCH.
 *
 * Source: Vega ISA chapters 8, 9 and 12.14, 12.15; LLVM's AMDGPU usage guide
 * for scratch and the address windows.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "exec_memory.h"
#include "exec_atomic.h"

/* ---- registers <-> memory ---------------------------------------------- */

static void load_lane(wave *w, const isa_row *row, const isa_info *info,
                      unsigned l, const place *p)
{
    uint32_t word[4] = {0};
    uint32_t *d = reg(w, row->dst, l);

    fetch(p, word, info->bytes);
    switch (info->access) {
    case M_LOAD:
        for (unsigned k = 0; k < info->bytes / 4u; k++) {
            d[k * SIM_LANES] = word[k];
        }
        break;
    case M_LOAD_I8:
        *d = (uint32_t)(int8_t)word[0];
        break;
    case M_LOAD_I16:
        *d = (uint32_t)(int16_t)word[0];
        break;
    case M_LOAD_U8_LO:
    case M_LOAD_16_LO:
        *d = (*d & 0xffff0000u) | word[0];
        break;
    case M_LOAD_I8_LO:
        *d = (*d & 0xffff0000u) | (uint16_t)(int8_t)word[0];
        break;
    case M_LOAD_U8_HI:
    case M_LOAD_16_HI:
        *d = (*d & 0xffffu) | word[0] << 16;
        break;
    case M_LOAD_I8_HI:
        *d = (*d & 0xffffu) | (uint32_t)(uint16_t)(int8_t)word[0] << 16;
        break;
    default: /* M_LOAD_U8, M_LOAD_U16 */
        *d = word[0];
        break;
    }
}

static void store_lane(wave *w, const isa_row *row, const isa_info *info,
                       unsigned l, const place *p)
{
    uint32_t word[4] = {0};
    const uint32_t *data = reg(w, row->data, l);

    for (unsigned k = 0; k < (info->bytes + 3u) / 4u; k++) {
        word[k] = data[k * SIM_LANES];
    }
    if (info->access == M_STORE_8_HI || info->access == M_STORE_16_HI) {
        word[0] >>= 16;
    }
    deposit(p, word, info->bytes);
}

static uint64_t combine(unsigned op, uint64_t m, uint64_t a, uint64_t b)
{
    switch (op) {
#define VMEM(...)
#define VMEM_ATOMIC(opcode, name, type, sources, ...) \
    case ISA_flat_##name:                             \
    case ISA_global_##name:                           \
    case ISA_buffer_##name:                           \
        COMBINE(type, __VA_ARGS__)
#include "vmem.def"
    default:
        return m;
    }
}

/* Compare-exchange until no other thread was in between. One function for each
 * width, since the host's atomics take the width from the type. */
static uint64_t atomic32(unsigned op, uint8_t *at, uint64_t a, uint64_t b)
{
    uint32_t *word = (uint32_t *)(void *)at;
    uint32_t old = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    uint32_t new;

    do {
        new = (uint32_t)combine(op, old, a, b);
    } while (!__atomic_compare_exchange_n(word, &old, new, false,
                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}

static uint64_t atomic64(unsigned op, uint8_t *at, uint64_t a, uint64_t b)
{
    uint64_t *word = (uint64_t *)(void *)at;
    uint64_t old = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    uint64_t new;

    do {
        new = combine(op, old, a, b);
    } while (!__atomic_compare_exchange_n(word, &old, new, false,
                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}

static void atomic_lane(wave *w, const isa_row *row, const isa_info *info,
                        unsigned l, const place *p)
{
    unsigned dwords = info->bytes / 4u;
    uint64_t value[2] = {0, 0}, old = 0;

    for (unsigned k = 0; k < ((info->flags & ISA_TWO_DATA) != 0 ? 2u : 1u);
         k++) {
        value[k] = *reg(w, row->data + k * dwords, l);
        if (dwords == 2) {
            value[k] |= (uint64_t)*reg(w, row->data + 2 * k + 1, l) << 32;
        }
    }
    if (p->kind == PLACE_SCRATCH) { /* nobody else sees it */
        fetch(p, &old, info->bytes);
        uint64_t new = combine(row->op, old, value[0], value[1]);
        deposit(p, &new, info->bytes);
    } else if (p->kind == PLACE_LINEAR) {
        if ((uintptr_t)p->at % info->bytes != 0) {
            exec_fault_at(w, SIM_FAULT_ALIGNMENT, l, (uintptr_t)p->at,
                          info->bytes, "");
            return;
        }
        old = dwords == 2 ? atomic64(row->op, p->at, value[0], value[1])
                          : atomic32(row->op, p->at, value[0], value[1]);
    }
    if (row->glc) {
        *reg(w, row->dst, l) = (uint32_t)old;
        if (dwords == 2) {
            *reg(w, row->dst + 1u, l) = (uint32_t)(old >> 32);
        }
    }
}

/* Where a load with the lds bit puts lane l's dword: at M0[15:0], plus the
 * instruction's offset, which counts on both sides. */
static uint32_t lds_target(const wave *w, const isa_row *row, unsigned l)
{
    return (w->s[SRC_M0] & 0xffff) + (uint32_t)row->offset + 4 * l;
}

static void load_to_lds(wave *w, const isa_row *row, const isa_info *info,
                        unsigned l, const place *p)
{
    uint32_t at = lds_target(w, row, l), word = 0;

    fetch(p, &word, info->bytes);
    word = info->access == M_LOAD_I8    ? (uint32_t)(int8_t)word
           : info->access == M_LOAD_I16 ? (uint32_t)(int16_t)word
                                        : word;
    if ((uint64_t)at + 4 > w->group->lds_bytes) {
        exec_fault_at(w, SIM_FAULT_LDS, l, at, 4, "target of the load");
        return;
    }
    memcpy(w->group->lds + at, &word, 4);
}

/* Tells the watchers of those targets. */
bool exec_watch_lds_targets(wave *w, const isa_row *row, uint64_t lanes)
{
    watch_access access = {
        .lanes = lanes, .bytes = 4, .kind = SIM_WRITE, .space = SPACE_LDS};

    for (unsigned l = 0; l < SIM_LANES; l++) {
        access.at[l] = lds_target(w, row, l);
    }
    return !row->lds || watch_access_lanes(w, row, &access);
}

void exec_access_lane(wave *w, const isa_row *row, const isa_info *info,
                      unsigned l, const place *p)
{
    if (info->access == M_ATOMIC) {
        atomic_lane(w, row, info, l, p);
    } else if (isa_is_store(info)) {
        store_lane(w, row, info, l, p);
    } else if (row->lds) {
        load_to_lds(w, row, info, l, p);
    } else {
        load_lane(w, row, info, l, p);
    }
}

/* ---- places ------------------------------------------------------------ */

uint32_t exec_access_bits(const isa_info *info)
{
    return info->access == M_ATOMIC ? SIM_READ | SIM_WRITE
           : isa_is_store(info)     ? SIM_WRITE
                                    : SIM_READ;
}

bool exec_global_place(wave *w, const isa_info *info, unsigned l,
                       uint64_t address, uint32_t bytes, place *p)
{
    uint32_t need = exec_access_bits(info);

    if (((need & SIM_READ) != 0 &&
         !exec_allowed(w->group, address, bytes, SIM_READ)) ||
        ((need & SIM_WRITE) != 0 &&
         !exec_allowed(w->group, address, bytes, SIM_WRITE))) {
        exec_fault_at(w, SIM_FAULT_ADDRESS, l, address, bytes,
                      isa_is_store(info) ? "write" : "");
        return false;
    }
    p->kind = PLACE_LINEAR;
    p->at = (uint8_t *)(uintptr_t)address;
    return true;
}

static bool lds_place(wave *w, const isa_info *info, unsigned l,
                      uint32_t offset, place *p)
{
    if ((uint64_t)offset + info->bytes > w->group->lds_bytes) {
        exec_fault_at(w, SIM_FAULT_LDS, l, offset, info->bytes, "");
        return false;
    }
    p->kind = PLACE_LINEAR;
    p->at = w->group->lds + offset;
    return true;
}

/* The lane's private byte that `offset` means when the kernel holds `base`
 * as the wave's scratch address. */
uint64_t exec_private_byte(const wave *w, uint64_t base, uint32_t offset)
{
    const sim_group *g = w->group;
    uint64_t own = (uint64_t)(uintptr_t)g->scratch + w->index * g->scratch_wave;

    return (base - own) / SIM_LANES + offset;
}

/* `base` is what the kernel holds as the wave's scratch address. */
bool exec_scratch_place(wave *w, const isa_info *info, unsigned l,
                        uint64_t base, uint32_t offset, place *p)
{
    const sim_group *g = w->group;
    uint64_t own = (uint64_t)(uintptr_t)g->scratch + w->index * g->scratch_wave;
    uint64_t first = base - own + (uint64_t)(offset / 4) * 256;
    uint64_t last = base - own + ((uint64_t)offset + info->bytes - 1) / 4 * 256;

    if (base < own || first >= g->scratch_wave || last >= g->scratch_wave) {
        exec_fault_at(w, SIM_FAULT_SCRATCH, l, offset, info->bytes, "");
        return false;
    }
    p->kind = PLACE_SCRATCH;
    p->at = (uint8_t *)(uintptr_t)(base + 4 * l);
    p->offset = offset;
    return true;
}

/* ---- FLAT, GLOBAL, SCRATCH --------------------------------------------- */

/* All lanes to plain memory within one region: no further checks. */
static bool one_region(wave *w, const isa_info *info, uint64_t exec,
                       const uint64_t *address)
{
    uint64_t low = UINT64_MAX, high = 0;
    uint32_t need = exec_access_bits(info);

    for (uint64_t left = exec; left != 0; left &= left - 1) {
        uint64_t a = address[__builtin_ctzll(left)];
        low = a < low ? a : low;
        high = a > high ? a : high;
    }
    uint64_t span = high - low + info->bytes;
    return low <= high && high + info->bytes > high &&
           ((need & SIM_READ) == 0 ||
            exec_allowed(w->group, low, span, SIM_READ)) &&
           ((need & SIM_WRITE) == 0 ||
            exec_allowed(w->group, low, span, SIM_WRITE));
}

static void count_misaligned(wave *w, const isa_info *info, uint64_t exec,
                             const uint64_t *address)
{
    uint64_t natural = info->bytes < 4 ? info->bytes : 4, low = 0;

    if (w->group->dispatch->check < 1) {
        return;
    }
    for (uint64_t left = exec; left != 0; left &= left - 1) {
        low |= address[__builtin_ctzll(left)];
    }
    w->group->misaligned += (low & (natural - 1)) != 0;
}

static void lane_addresses(wave *w, const isa_row *row, uint64_t *address)
{
    uint64_t offset = (uint64_t)(int64_t)row->offset;
    const lane *low = w->v + (size_t)row->addr * SIM_LANES;

    if (row->format == F_SCRATCH) {
        uint64_t base = row->base == 0x7f ? 0 : w->s[row->base];
        for (unsigned l = 0; l < SIM_LANES; l++) {
            address[l] = offset + base + (row->base == 0x7f ? low[l].u : 0);
        }
    } else if (row->base != 0x7f) {
        uint64_t base = pair(w, row->base) + offset;
        for (unsigned l = 0; l < SIM_LANES; l++) {
            address[l] = base + low[l].u;
        }
    } else {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            address[l] =
                ((uint64_t)low[SIM_LANES + l].u << 32 | low[l].u) + offset;
        }
    }
}

/* Tells the watchers where the lanes go, one access per space. */
static bool watch_flat(wave *w, const isa_row *row, const isa_info *info,
                       uint64_t exec, const uint64_t *address)
{
    uint64_t lanes[3] = {0};
    watch_access access = {
        .bytes = info->bytes,
        .kind = exec_access_bits(info),
        .reg = isa_is_store(info) || info->access == M_ATOMIC ? row->data
                                                              : row->dst,
    };

    for (uint64_t left = exec; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        uint64_t window = address[l] >> 32 << 32;
        bool flat = row->format == F_FLAT;
        watch_space space =
            row->format == F_SCRATCH || (flat && window == APERTURE_PRIVATE)
                ? SPACE_SCRATCH
            : flat && window == APERTURE_SHARED ? SPACE_LDS
                                                : SPACE_GLOBAL;
        lanes[space] |= UINT64_C(1) << l;
        access.at[l] = space == SPACE_GLOBAL ? address[l]
                       : space == SPACE_LDS
                           ? (uint32_t)address[l]
                           : exec_private_byte(w, pair(w, SRC_FLAT_SCRATCH),
                                               (uint32_t)address[l]);
    }
    for (unsigned space = 0; space < 3; space++) {
        access.space = (watch_space)space;
        access.lanes = lanes[space];
        if (lanes[space] != 0 && !watch_access_lanes(w, row, &access)) {
            return false;
        }
    }
    return true;
}

void exec_flat(wave *w, const isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];
    uint64_t exec = exec_mask(w);
    uint64_t address[SIM_LANES];
    bool fast;

    if (exec == 0) {
        return;
    }
    lane_addresses(w, row, address);
    count_misaligned(w, info, exec, address);
    if (w->group->watched && (!watch_flat(w, row, info, exec, address) ||
                              !exec_watch_lds_targets(w, row, exec))) {
        return;
    }
    fast = row->format != F_SCRATCH && one_region(w, info, exec, address);
    for (uint64_t left = exec; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        uint64_t a = address[l];
        place p = {.at = (uint8_t *)(uintptr_t)a, .kind = PLACE_LINEAR};
        bool found = true;

        if (!fast) {
            uint64_t window = a >> 32 << 32;
            if (row->format == F_SCRATCH ||
                (row->format == F_FLAT && window == APERTURE_PRIVATE)) {
                found = exec_scratch_place(
                    w, info, l, pair(w, SRC_FLAT_SCRATCH), (uint32_t)a, &p);
            } else if (row->format == F_FLAT && window == APERTURE_SHARED) {
                found = lds_place(w, info, l, (uint32_t)a, &p);
            } else {
                found = exec_global_place(w, info, l, a, info->bytes, &p);
            }
        }
        if (!found) {
            return;
        }
        exec_access_lane(w, row, info, l, &p);
    }
}
