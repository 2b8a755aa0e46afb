/* check_hazards.c: wait states that the hardware does not insert by itself.
 *
 * Every instruction counts as one wait state, s_nop N as N + 1. Compilers put
 * s_nop where a rule needs them; inline assembly is where the rules bite.
 *
 * Source: Vega ISA 4.5; LLVM's hazard recognizer for gfx9.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"

#include <string.h>

/* Wait states needed between the two instructions of a rule. */
enum {
    DPP_AFTER_VECTOR = 2,  /* VALU writes VGPR, DPP reads it */
    DPP_AFTER_EXEC = 5,    /* VALU writes EXEC, any DPP */
    VMEM_AFTER_SCALAR = 5, /* VALU writes SGPR, VMEM reads it */
    LANE_AFTER_SCALAR = 4, /* VALU writes SGPR, lane select reads it */
    FMAS_AFTER_VCC = 4,    /* VALU writes VCC, v_div_fmas */
    VCCZ_AFTER_VALU = 5, /* VALU writes VCC or EXEC, VALU reads its zero bit */
    M0_AFTER_SALU = 1,   /* SALU writes M0; see reads_m0 */
    HWREG_AFTER_SETREG = 2,
    DATA_AFTER_STORE = 1 /* store of over 64 bits, VALU overwrites the data */
};

/* So long ago that no rule asks for it. */
enum { LONG_AGO = 64 };

void check_hazards_start(check_wave *c)
{
    c->now = LONG_AGO;
    memset(c->valu_vector, 0, sizeof c->valu_vector);
    memset(c->valu_scalar, 0, sizeof c->valu_scalar);
    memset(c->setreg, 0, sizeof c->setreg);
    c->valu_exec = 0;
    c->salu_m0 = 0;
    c->wide_store = 0;
    c->wide_count = 0;
}

/* True if fewer than `need` wait states lie between then and now. */
static bool too_soon(const check_wave *c, uint32_t then, uint32_t need)
{
    return c->now - then <= need;
}

static bool found(wave *w, uint32_t then, uint32_t need, const char *rule)
{
    return check_report(w, SIM_FAULT_HAZARD,
                        "%s: needs %u wait states in between, has %u", rule,
                        need, check_of(w)->now - then - 1);
}

static bool is_vmem(const isa_row *row)
{
    return row->issue == ISSUE_FLAT || row->issue == ISSUE_MUBUF;
}

bool check_hazards_sources(const isa_row *row, const check_row *facts)
{
    bool asks = facts->dpp || is_vmem(row);

    for (unsigned i = 0; i < facts->uses.count; i++) {
        asks = asks || facts->uses.of[i].role == ROLE_LANE;
    }
    return asks;
}

static bool check_sources(wave *w, const isa_row *row, const check_row *facts)
{
    const check_wave *c = check_of(w);
    bool vmem = is_vmem(row);

    for (unsigned i = 0; i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        if (use->role == ROLE_RESULT) {
            continue;
        }
        for (unsigned r = use->first; r < (unsigned)use->first + use->count;
             r++) {
            if (r >= SRC_VGPR) {
                uint32_t then = c->valu_vector[r - SRC_VGPR];
                if (facts->dpp && use->first == row->src[0] &&
                    too_soon(c, then, DPP_AFTER_VECTOR)) {
                    return found(w, then, DPP_AFTER_VECTOR,
                                 "DPP reads a VGPR that VALU has written");
                }
                continue;
            }
            uint32_t then = c->valu_scalar[r];
            if (vmem && too_soon(c, then, VMEM_AFTER_SCALAR)) {
                return found(w, then, VMEM_AFTER_SCALAR,
                             "vector memory reads an SGPR that VALU has "
                             "written");
            }
            if (use->role == ROLE_LANE &&
                too_soon(c, then, LANE_AFTER_SCALAR)) {
                return found(w, then, LANE_AFTER_SCALAR,
                             "lane select that VALU has written");
            }
        }
    }
    return true;
}

/* When the zero bit that it reads was last written; 0: it reads none. */
static uint32_t zero_bit_written(const check_wave *c, const isa_row *row)
{
    uint32_t then = 0;

    for (unsigned i = 0; i < 3 && row->issue == ISSUE_VALU; i++) {
        if (isa_ops[row->op].type[1 + i] == T_none) {
            continue;
        }
        if (row->src[i] == SRC_VCCZ) {
            then = c->valu_scalar[SRC_VCC];
        } else if (row->src[i] == SRC_EXECZ) {
            then = c->valu_exec;
        }
    }
    return then;
}

/* Instructions for which M0 must have settled. */
static bool reads_m0(const isa_row *row)
{
    switch (row->op) {
    case ISA_s_sendmsg:
    case ISA_s_ttracedata:
    case ISA_s_movrels_b32:
    case ISA_s_movrels_b64:
    case ISA_s_movreld_b32:
    case ISA_s_movreld_b64:
        return true;
    default:
        return row->lds || row->gds;
    }
}

/* VCCZ or EXECZ as a vector operand: bits that follow with a delay. */
static bool reads_zero_bit(const isa_row *row)
{
    bool reads = false;

    for (unsigned i = 0; i < 3 && row->issue == ISSUE_VALU; i++) {
        reads =
            reads || (isa_ops[row->op].type[1 + i] != T_none &&
                      (row->src[i] == SRC_VCCZ || row->src[i] == SRC_EXECZ));
    }
    return reads;
}

bool check_hazards_special(const isa_row *row, const check_row *facts)
{
    switch (row->op) {
    case ISA_v_div_fmas_f32:
    case ISA_v_div_fmas_f64:
    case ISA_s_getreg_b32:
    case ISA_s_setreg_b32:
    case ISA_s_setreg_imm32_b32:
        return true;
    default:
        return facts->dpp || reads_m0(row) || reads_zero_bit(row);
    }
}

static bool check_special(wave *w, const isa_row *row, const check_row *facts)
{
    const check_wave *c = check_of(w);
    uint32_t zero = zero_bit_written(c, row);

    if (facts->dpp && too_soon(c, c->valu_exec, DPP_AFTER_EXEC)) {
        return found(w, c->valu_exec, DPP_AFTER_EXEC,
                     "DPP after VALU has written EXEC");
    }
    if ((row->op == ISA_v_div_fmas_f32 || row->op == ISA_v_div_fmas_f64) &&
        too_soon(c, c->valu_scalar[SRC_VCC], FMAS_AFTER_VCC)) {
        return found(w, c->valu_scalar[SRC_VCC], FMAS_AFTER_VCC,
                     "v_div_fmas after VALU has written VCC");
    }
    if (zero != 0 && too_soon(c, zero, VCCZ_AFTER_VALU)) {
        return found(w, zero, VCCZ_AFTER_VALU,
                     "vccz or execz after VALU has written the mask");
    }
    if (reads_m0(row) && too_soon(c, c->salu_m0, M0_AFTER_SALU)) {
        return found(w, c->salu_m0, M0_AFTER_SALU,
                     "reads M0 after SALU has written it");
    }
    if (row->op == ISA_s_getreg_b32 || row->op == ISA_s_setreg_b32 ||
        row->op == ISA_s_setreg_imm32_b32) {
        uint32_t then = c->setreg[row->offset & 63];
        if (too_soon(c, then, HWREG_AFTER_SETREG)) {
            return found(w, then, HWREG_AFTER_SETREG,
                         "hardware register after s_setreg");
        }
    }
    return true;
}

static bool check_store_data(wave *w, const check_row *facts)
{
    const check_wave *c = check_of(w);

    for (unsigned i = 0; i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        if (use->role == ROLE_RESULT &&
            use->first < c->wide_first + c->wide_count &&
            c->wide_first < use->first + use->count) {
            return found(w, c->wide_store, DATA_AFTER_STORE,
                         "VALU overwrites the data of a store");
        }
    }
    return true;
}

/* A store of which the data must stay for a while, and whose operand it is. */
static bool is_wide_store(const isa_row *row, const operand *use)
{
    return use->role == ROLE_DATA && isa_ops[row->op].bytes > 8 &&
           (row->issue == ISSUE_FLAT ||
            (row->issue == ISSUE_MUBUF && row->soffset >= SRC_ZERO));
}

bool check_hazards_notes(const isa_row *row, const check_row *facts)
{
    bool notes =
        row->op == ISA_s_setreg_b32 || row->op == ISA_s_setreg_imm32_b32;

    for (unsigned i = 0; i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        notes = notes || is_wide_store(row, use) ||
                (row->issue == ISSUE_SCALAR && use->role == ROLE_RESULT &&
                 use->first <= SRC_M0 && SRC_M0 < use->first + use->count);
    }
    return notes;
}

static void note_results(check_wave *c, const isa_row *row,
                         const check_row *facts)
{
    for (unsigned i = 0; i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        if (is_wide_store(row, use)) {
            c->wide_store = c->now;
            c->wide_first = use->first;
            c->wide_count = use->count;
        }
        if (use->role != ROLE_RESULT) {
            continue;
        }
        for (unsigned r = use->first; r < (unsigned)use->first + use->count;
             r++) {
            if (row->issue == ISSUE_SCALAR) {
                c->salu_m0 = r == SRC_M0 ? c->now : c->salu_m0;
            } else if (row->issue != ISSUE_VALU) {
                continue;
            } else if (r >= SRC_VGPR) {
                c->valu_vector[r - SRC_VGPR] = c->now;
            } else {
                c->valu_scalar[r] = c->now;
                c->valu_exec =
                    r == SRC_EXEC || r == SRC_EXEC + 1 ? c->now : c->valu_exec;
            }
        }
    }
    if (row->op == ISA_s_setreg_b32 || row->op == ISA_s_setreg_imm32_b32) {
        c->setreg[row->offset & 63] = c->now;
    }
}

bool check_hazards(wave *w, const isa_row *row, const check_row *facts)
{
    check_wave *c = check_of(w);

    c->now++;
    if ((facts->hazards && !check_sources(w, row, facts)) ||
        (facts->special && !check_special(w, row, facts)) ||
        (row->issue == ISSUE_VALU && c->wide_count != 0 &&
         too_soon(c, c->wide_store, DATA_AFTER_STORE) &&
         !check_store_data(w, facts))) {
        return false;
    }
    if (row->issue == ISSUE_VALU || facts->notes) {
        note_results(c, row, facts);
    }
    if (row->op == ISA_s_nop) {
        c->now += (uint32_t)row->offset & 15;
    }
    return true;
}
