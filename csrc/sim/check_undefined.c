/* check_undefined.c: values that were never written, where they matter.
 *
 * Registers, LDS and scratch begin undefined. Copying and computing with
 * undefined bits is legal (compilers do both), so they only spread, as
 * check_spread.c and check_bits.c say. Where an undefined bit decides what the
 * program does or leaves behind, it is a finding: in an address, in a branch or
 * EXEC, in what is stored to global memory or handed to an atomic.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"

#include <string.h>

void check_refresh(check_wave *c, unsigned reg)
{
    const uint32_t *row = check_vector(c, reg);
    uint32_t all = 0;
    uint64_t bit = UINT64_C(1) << reg % 64;

    for (unsigned l = 0; l < SIM_LANES; l++) {
        all |= row[l];
    }
    c->any[reg / 64] = (c->any[reg / 64] & ~bit) | (all != 0 ? bit : 0);
}

/* Which registers the packet processor has written: of the scalar ones those
 * that exec.c has set, of the vector ones the work-item ids. */
void check_undefined_start(wave *w)
{
    check_wave *c = check_of(w);
    uint32_t dims = w->group->dispatch->descriptor.rsrc2 >> 11 & 3;
    uint64_t exec = exec_mask(w);

    memset(c->vector, 0xff, (size_t)w->vgprs * SIM_LANES * sizeof(uint32_t));
    memset(c->any, 0xff, sizeof c->any);
    for (unsigned r = 0; r <= dims && r < w->vgprs; r++) {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            check_vector(c, r)[l] = (exec >> l & 1) != 0 ? 0 : UINT32_MAX;
        }
        check_refresh(c, r);
    }
    for (unsigned r = 0; r < OPERAND_SCC; r++) {
        c->scalar[r] = w->s[r] == EXEC_POISON ? UINT32_MAX : 0;
    }
    c->scalar[OPERAND_SCC] = 1;
    check_origin_start(c);
}

/* ---- findings ---------------------------------------------------------- */

/* The first active lane with an undefined bit among `mask`, or 64. */
static unsigned undefined_lane(check_wave *c, unsigned reg, uint64_t exec,
                               uint32_t mask)
{
    const uint32_t *row = check_vector(c, reg);

    for (uint64_t left = exec; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        if ((row[l] & mask) != 0) {
            return l;
        }
    }
    return SIM_LANES;
}

static bool defined_addresses(wave *w, const check_row *facts, uint64_t exec)
{
    check_wave *c = check_of(w);

    for (unsigned i = 0; i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        if (use->role != ROLE_ADDRESS) {
            continue;
        }
        for (unsigned r = use->first; r < (unsigned)use->first + use->count;
             r++) {
            if (r < SRC_VGPR) {
                if (c->scalar[r] != 0) {
                    return check_report_undefined(w, r, 0,
                                                  "is part of an address");
                }
            } else if (check_any(c, r - SRC_VGPR)) {
                unsigned l = undefined_lane(c, r - SRC_VGPR, exec, UINT32_MAX);
                if (l < SIM_LANES) {
                    return check_report_undefined(w, r, l,
                                                  "is part of an address");
                }
            }
        }
    }
    return true;
}

/* Of the last dword of the data only some bits may be stored. */
static uint32_t stored_bits(const isa_info *info)
{
    switch (info->access) {
    case M_STORE_8:
        return 0xff;
    case M_STORE_16:
        return 0xffff;
    case M_STORE_8_HI:
        return 0xff0000;
    case M_STORE_16_HI:
        return 0xffff0000;
    default:
        return UINT32_MAX;
    }
}

bool check_defined_data(wave *w, const isa_row *row, unsigned reg,
                        unsigned count, uint64_t lanes)
{
    const isa_info *info = &isa_ops[row->op];
    check_wave *c = check_of(w);

    for (unsigned r = reg; r < reg + count; r++) {
        if (check_any(c, r)) {
            unsigned l = undefined_lane(c, r, lanes, stored_bits(info));
            if (l < SIM_LANES) {
                return check_report_undefined(w, SRC_VGPR + r, l,
                                              info->access == M_ATOMIC
                                                  ? "goes into an atomic"
                                                  : "is stored");
            }
        }
    }
    return true;
}

/* Branches, jumps, and what decides which lanes are active. */
static bool defined_control(wave *w, const isa_row *row)
{
    const check_wave *c = check_of(w);
    uint64_t vcc = (uint64_t)c->scalar[SRC_VCC + 1] << 32 | c->scalar[SRC_VCC];

    switch (row->op) {
    case ISA_s_cbranch_scc0:
    case ISA_s_cbranch_scc1:
        return c->scalar[OPERAND_SCC] == 0 ||
               check_report_undefined(w, OPERAND_SCC, 0, "decides a branch");
    case ISA_s_cbranch_vccz:
    case ISA_s_cbranch_vccnz:
        /* One defined bit that is set decides. */
        return vcc == 0 || (pair(w, SRC_VCC) & ~vcc) != 0 ||
               check_report_undefined(
                   w, c->scalar[SRC_VCC] != 0 ? SRC_VCC : SRC_VCC + 1, 0,
                   "as half of VCC, decides a branch");
    case ISA_s_setpc_b64:
    case ISA_s_swappc_b64:
        return (c->scalar[row->src[0] % OPERAND_SCC] |
                c->scalar[(row->src[0] + 1) % OPERAND_SCC]) == 0 ||
               check_report_undefined(w, row->src[0], 0, "is a jump's target");
    default:
        return true;
    }
}

/* EXEC after the instruction, whose undefined bits are already known. */
static bool defined_exec(wave *w)
{
    check_wave *c = check_of(w);
    uint64_t bad =
        ((uint64_t)c->scalar[SRC_EXEC + 1] << 32 | c->scalar[SRC_EXEC]);

    if (bad == 0) {
        return true;
    }
    c->scalar[SRC_EXEC] = c->scalar[SRC_EXEC + 1] = 0;
    return check_report_undefined(w, SRC_EXEC, 0,
                                  "decides which lanes are active");
}

/* True if a register that the instruction names has an undefined bit. */
static bool concerned(const check_wave *c, const check_row *facts)
{
    uint64_t bad = 0;

    for (unsigned i = 0; i < SIM_VGPRS / 64; i++) {
        bad |= c->any[i] & facts->named.vector[i];
    }
    for (unsigned i = 0; facts->scalars && i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        for (unsigned r = use->first;
             use->first < SRC_VGPR && r < (unsigned)use->first + use->count;
             r++) {
            bad |= c->scalar[r];
        }
    }
    return bad != 0;
}

bool check_undefined(wave *w, const isa_row *row, const check_row *facts)
{
    check_wave *c = check_of(w);
    check_origin origin;

    if (!concerned(c, facts)) {
        return true;
    }
    bool spreads = check_origin_take(c, facts, &origin);
    switch (row->issue) {
    case ISSUE_VALU:
        check_propagate(w, row);
        break;
    case ISSUE_SCALAR:
        if (!defined_control(w, row)) {
            return false;
        }
        check_propagate_scalar(w, row, facts);
        break;
    case ISSUE_SMEM:
        if (!defined_addresses(w, facts, UINT64_MAX)) {
            return false;
        }
        for (unsigned i = 0; i < facts->uses.count; i++) {
            const operand *use = &facts->uses.of[i];
            for (unsigned r = use->first; r < (unsigned)use->first + use->count;
                 r++) {
                if (use->role == ROLE_DATA && c->scalar[r] != 0) {
                    return check_report_undefined(w, r, 0, "is stored");
                }
                if (use->role == ROLE_RESULT) {
                    c->scalar[r] = 0;
                }
            }
        }
        return true;
    default:
        if (!defined_addresses(w, facts, exec_mask(w))) {
            return false;
        }
        check_exchange(w, row);
        break;
    }
    if (spreads) {
        check_origin_give(c, facts, &origin);
    }
    return defined_exec(w);
}
