/* check_bytes.c: LDS and scratch under check: bytes that were never written,
 * as they go from registers into memory and back.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"

#include <string.h>

/* Bit 7 or 15 decides the sign extension. */
static uint32_t sign_extended(uint32_t bad, unsigned width)
{
    return (bad >> (width - 1) & 1) != 0 ? bad | UINT32_MAX << width : bad;
}

/* What a load of these undefined bits leaves in the register. */
static uint32_t loaded(const isa_info *info, uint32_t old, uint32_t bad)
{
    switch (info->access) {
    case M_LOAD_I8:
        return sign_extended(bad & 0xff, 8);
    case M_LOAD_I16:
        return sign_extended(bad & 0xffff, 16);
    case M_LOAD_U8:
    case M_LOAD_U16:
        return bad;
    case M_LOAD_U8_LO:
    case M_LOAD_16_LO:
        return (old & 0xffff0000u) | bad;
    case M_LOAD_I8_LO:
        return (old & 0xffff0000u) | (sign_extended(bad & 0xff, 8) & 0xffff);
    case M_LOAD_U8_HI:
    case M_LOAD_16_HI:
        return (old & 0xffffu) | bad << 16;
    case M_LOAD_I8_HI:
        return (old & 0xffffu) | sign_extended(bad & 0xff, 8) << 16;
    default:
        return bad;
    }
}

/* Where the shadow of byte i of a lane's access lies. */
static uint8_t *shadow(wave *w, const watch_access *access, unsigned l,
                       uint32_t i)
{
    sim_check *check = w->group->check;
    uint64_t byte = access->at[l] + i;

    if (access->space == SPACE_LDS) {
        return check->lds_undefined + byte;
    }
    return check->scratch_undefined + w->index * w->group->scratch_wave +
           byte / 4 * 256 + 4 * l + byte % 4;
}

/* Copies of the usual sizes are an instruction each. */
static void copy(void *to, const void *from, uint32_t bytes)
{
    switch (bytes) {
    case 4:
        memcpy(to, from, 4);
        break;
    case 8:
        memcpy(to, from, 8);
        break;
    case 16:
        memcpy(to, from, 16);
        break;
    default:
        memcpy(to, from, bytes);
    }
}

static void take_shadow(wave *w, const watch_access *access, unsigned l,
                        uint32_t word[4])
{
    uint8_t bytes[16] = {0};

    if (access->space == SPACE_LDS) {
        copy(bytes, shadow(w, access, l, 0), access->bytes);
    } else {
        for (uint32_t i = 0; i < access->bytes; i++) {
            bytes[i] = *shadow(w, access, l, i);
        }
    }
    memcpy(word, bytes, sizeof bytes);
}

/* Whether the lanes' bytes of LDS are all defined. */
static bool lds_defined(wave *w, const watch_access *access, uint64_t lanes)
{
    uint32_t any = 0;

    if (access->space != SPACE_LDS) {
        return false;
    }
    for (uint64_t left = lanes; left != 0; left &= left - 1) {
        uint32_t word[4];
        take_shadow(w, access, (unsigned)__builtin_ctzll(left), word);
        any |= word[0] | word[1] | word[2] | word[3];
    }
    return any == 0;
}

/* Whether none of the registers has an undefined bit. */
static bool clean_registers(const check_wave *c, unsigned first, unsigned count)
{
    bool clean = true;

    for (unsigned k = 0; k < count; k++) {
        clean = clean && !check_any(c, first + k);
    }
    return clean;
}

static void load_undefined(wave *w, const isa_row *row,
                           const watch_access *access, uint64_t lanes,
                           uint64_t unlike)
{
    const isa_info *info = &isa_ops[row->op];
    check_wave *c = check_of(w);
    unsigned n = (access->bytes + 3) / 4, reg = access->reg;

    if (row->lds) {
        return; /* the result goes to the LDS, which is an access of its own */
    }
    if (access->kind == (SIM_READ | SIM_WRITE)) {
        reg = row->dst;
        if (info->access == M_APPEND || info->access == M_CONSUME) {
            lanes = exec_mask(w); /* one accesses, all get the value */
        } else if (info->access == M_XCHG2 || info->access == M_XCHG2ST64) {
            n *= 2; /* both results: atomics meet defined bytes alone */
        } else if (info->format == F_DS ? (info->flags & ISA_RETURN) == 0
                                        : row->glc == 0) {
            return;
        }
    }
    if (clean_registers(c, reg, n) && lds_defined(w, access, unlike)) {
        return; /* usual, and all stays as it is */
    }
    for (uint64_t left = lanes; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        uint32_t word[4];
        take_shadow(w, access, l, word);
        for (unsigned k = 0; k < n; k++) {
            uint32_t *to = &check_vector(c, reg + k)[l];
            *to = loaded(info, *to, word[k]);
            if (word[k] != 0) {
                check_origin_set(w, SRC_VGPR + reg + k,
                                 access->space == SPACE_LDS ? SOURCE_LDS
                                                            : SOURCE_SCRATCH,
                                 access->at[l] + 4 * k);
            }
        }
    }
    for (unsigned k = 0; k < n; k++) {
        check_refresh(c, reg + k);
    }
}

static void store_undefined(wave *w, const isa_row *row,
                            const watch_access *access, uint64_t lanes)
{
    const isa_info *info = &isa_ops[row->op];
    check_wave *c = check_of(w);
    bool high = info->access == M_STORE_8_HI || info->access == M_STORE_16_HI;
    unsigned n = (access->bytes + 3) / 4;
    /* What a load with the lds bit stores comes from memory. */
    bool clean = row->lds || clean_registers(c, access->reg, n);

    for (uint64_t left = lanes; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        uint32_t word[4] = {0};
        for (unsigned k = 0; k < n && !clean; k++) {
            word[k] = check_vector(c, access->reg + k)[l];
        }
        word[0] >>= high ? 16 : 0;
        if (access->space == SPACE_LDS) {
            copy(shadow(w, access, l, 0), word, access->bytes);
            continue;
        }
        for (uint32_t i = 0; i < access->bytes; i++) {
            *shadow(w, access, l, i) = (uint8_t)(word[i / 4] >> i % 4 * 8);
        }
    }
}

/* An atomic reads and writes: its data and what it meets must be defined. */
static bool atomic_undefined(wave *w, const isa_row *row,
                             const watch_access *access, uint64_t lanes)
{
    const isa_info *info = &isa_ops[row->op];
    unsigned n = (access->bytes + 3) / 4;
    bool two = (info->flags & ISA_TWO_DATA) != 0;
    bool consecutive = two && info->format != F_DS;

    if (!check_defined_data(w, row, row->data, consecutive ? 2 * n : n,
                            lanes) ||
        (two && !consecutive &&
         !check_defined_data(w, row, row->data2, n, lanes))) {
        return false;
    }
    for (uint64_t left = lanes; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        uint32_t word[4];
        take_shadow(w, access, l, word);
        if ((word[0] | word[1]) != 0) {
            return check_report_at(w, SIM_FAULT_UNDEFINED, l, access->at[l],
                                   access->bytes,
                                   "LDS that was never written meets an "
                                   "atomic");
        }
    }
    return true;
}

bool check_bytes(wave *w, const isa_row *row, const watch_access *access,
                 uint64_t lanes, uint64_t unlike)
{
    if (access->kind == (SIM_READ | SIM_WRITE) &&
        !atomic_undefined(w, row, access, lanes)) {
        return false;
    }
    if (access->kind == SIM_WRITE) {
        store_undefined(w, row, access, lanes);
    } else {
        load_undefined(w, row, access, lanes, unlike);
    }
    return true;
}
