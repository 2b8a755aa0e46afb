/* decode.c: instruction words -> isa_row.
 *
 * The fields of the scalar and vector formats are taken apart here, those of
 * the memory formats in decode_memory.c; isa_find (isa_lists.c)
 * gives opcode -> instruction. What an instruction does is left to exec*.c,
 * its text to disasm.c.
 * Anything unknown leaves op == ISA_UNKNOWN and faults when executed, and so
 * do set bits in fields that mean nothing: which are such is LLVM 22's view.
 *
 * Source: Vega ISA chapter 13.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "decode.h"

#include <stdlib.h>
#include <string.h>

/* The one message a compute kernel may send. */
enum { MESSAGE_INTERRUPT = 1 };

/* ---- operands ---------------------------------------------------------- */

static bool source_exists(unsigned code)
{
    return code <= 107 || (code >= SRC_TTMP && code <= SRC_M0) ||
           code == SRC_EXEC || code == SRC_EXEC + 1 ||
           (code >= SRC_ZERO && code <= SRC_MINUS_16) ||
           (code >= SRC_SHARED_BASE && code <= SRC_PRIVATE_LIMIT) ||
           (code >= SRC_HALF && code <= SRC_INV_2PI) ||
           (code >= SRC_VCCZ && code <= SRC_SCC) || code >= SRC_LDS_DIRECT;
}

/* A scalar register, or an aligned run of them within one class. */
bool decode_scalar_exists(unsigned code, unsigned registers)
{
    unsigned align = registers < 4 ? registers : 4;

    if (registers > 1 && code % align != 0) {
        return false;
    }
    if (code < SRC_FLAT_SCRATCH) {
        return code + registers <= SIM_SGPRS;
    }
    if (code < SRC_TTMP || code >= SRC_EXEC) {
        return registers <= 2 && code < SRC_ZERO;
    }
    return code < SRC_M0 ? code + registers <= SRC_M0
                         : code == SRC_M0 && registers == 1;
}

/* A source code that an operand of this many registers may have. */
bool decode_source_fits(unsigned code, unsigned registers)
{
    return code < SRC_ZERO ? decode_scalar_exists(code, registers)
                           : source_exists(code);
}

/* A literal constant follows if a source names it. */
static void take_literal(const uint32_t *word, size_t left, isa_row *row)
{
    for (int i = 0; i < 3; i++) {
        if (row->src[i] == SRC_LITERAL) {
            if (left < 2) {
                row->op = ISA_UNKNOWN;
                return;
            }
            row->literal = word[1];
            row->dwords = 2;
        }
    }
}

static void decode_scalar(const uint32_t *word, size_t left, isa_row *row)
{
    uint32_t w = word[0];

    row->issue = ISSUE_SCALAR;
    row->dst = (uint8_t)field(w, 16, 7);
    row->offset = (int16_t)(w & 0xffff);
    switch (w >> 23) {
    case 0x17d:
        row->format = F_SOP1;
        row->op = (uint16_t)isa_find(F_SOP1, field(w, 8, 8));
        row->src[0] = (uint16_t)field(w, 0, 8);
        break;
    case 0x17e:
        row->format = F_SOPC;
        row->op = (uint16_t)isa_find(F_SOPC, field(w, 16, 7));
        row->src[0] = (uint16_t)field(w, 0, 8);
        row->src[1] = (uint16_t)field(w, 8, 8);
        break;
    case 0x17f:
        row->format = F_SOPP;
        row->op = (uint16_t)isa_find(F_SOPP, field(w, 16, 7));
        if ((row->op == ISA_s_sendmsg && row->offset != MESSAGE_INTERRUPT) ||
            (isa_ops[row->op].access == P_NOTHING && row->offset != 0)) {
            row->op = ISA_UNKNOWN;
        }
        return;
    default:
        if (w >> 28 == 0xb) {
            row->format = F_SOPK;
            row->op = (uint16_t)isa_find(F_SOPK, field(w, 23, 5));
            if (row->op == ISA_s_setreg_imm32_b32) {
                row->src[0] = SRC_LITERAL;
            }
        } else {
            row->format = F_SOP2;
            row->op = (uint16_t)isa_find(F_SOP2, field(w, 23, 7));
            row->src[0] = (uint16_t)field(w, 0, 8);
            row->src[1] = (uint16_t)field(w, 8, 8);
        }
        break;
    }
    const isa_info *info = &isa_ops[row->op];
    for (int i = 0; i < 2; i++) {
        if (info->type[1 + i] == T_none && row->format != F_SOPK) {
            row->src[i] = 0; /* s_getpc: an unused field, no literal */
        }
    }
    if (row->op == ISA_s_set_gpr_idx_on) {
        row->src[1] = SRC_ZERO; /* not an operand: a mask, in offset */
    }
    take_literal(word, left, row);
    info = &isa_ops[row->op];
    if ((row->op == ISA_s_setpc_b64 || row->op == ISA_s_movrels_b32 ||
         row->op == ISA_s_movrels_b64) &&
        row->src[0] >= SRC_ZERO) {
        row->op = ISA_UNKNOWN;
    }
    for (int i = 0; i < 2; i++) {
        unsigned type = info->type[1 + i];
        if (type != T_none && row->src[i] != SRC_LITERAL &&
            (!decode_source_fits(row->src[i], isa_registers(type)) ||
             row->src[i] == SRC_LDS_DIRECT)) {
            row->op = ISA_UNKNOWN;
        }
    }
    if (info->type[0] != T_none &&
        !decode_scalar_exists(row->dst, isa_registers(info->type[0]))) {
        row->op = ISA_UNKNOWN;
    }
}

static void sdwa(uint32_t word, isa_row *row)
{
    row->ext = ISA_EXT_SDWA;
    row->src[0] =
        (uint16_t)(field(word, 0, 8) | (field(word, 23, 1) ? 0 : SRC_VGPR));
    if (isa_ops[row->op].type[2] != T_none) {
        row->src[1] = (uint16_t)((row->src[1] & 0xff) |
                                 (field(word, 31, 1) ? 0 : SRC_VGPR));
    }
    if (row->format == F_VOPC) {
        row->sdst = (uint8_t)(field(word, 15, 1) ? field(word, 8, 7) : SRC_VCC);
        row->sel[0] = 6;
        if (!decode_scalar_exists(row->sdst, 2)) {
            row->op = ISA_UNKNOWN;
        }
    } else {
        row->sel[0] = (uint8_t)field(word, 8, 3);
        row->dst_unused = (uint8_t)field(word, 11, 2);
        row->clamp = (uint8_t)field(word, 13, 1);
        row->omod = (uint8_t)field(word, 14, 2);
    }
    row->sel[1] = (uint8_t)field(word, 16, 3);
    row->sel[2] = (uint8_t)field(word, 24, 3);
    row->sext = (uint8_t)(field(word, 19, 1) | field(word, 27, 1) << 1);
    row->neg = (uint8_t)(field(word, 20, 1) | field(word, 28, 1) << 1);
    row->abs = (uint8_t)(field(word, 21, 1) | field(word, 29, 1) << 1);
    if (row->sel[0] > 6 || row->sel[1] > 6 || row->sel[2] > 6 ||
        row->dst_unused > 2 || (row->format == F_VOP1 && word >> 24 != 0)) {
        row->op = ISA_UNKNOWN;
    }
}

static void dpp(uint32_t word, isa_row *row)
{
    unsigned ctrl = field(word, 8, 9);

    row->ext = ISA_EXT_DPP;
    row->src[0] = (uint16_t)(SRC_VGPR + field(word, 0, 8));
    row->dpp_ctrl = (uint16_t)ctrl;
    row->bound_zero = (uint8_t)field(word, 19, 1);
    row->neg = (uint8_t)(field(word, 20, 1) | field(word, 22, 1) << 1);
    row->abs = (uint8_t)(field(word, 21, 1) | field(word, 23, 1) << 1);
    row->bank_mask = (uint8_t)field(word, 24, 4);
    row->row_mask = (uint8_t)field(word, 28, 4);
    bool shift = ctrl >= 0x101 && ctrl <= 0x12f && (ctrl & 15) != 0;
    bool wave = ctrl == 0x130 || ctrl == 0x134 || ctrl == 0x138 ||
                ctrl == 0x13c || (ctrl >= 0x140 && ctrl <= 0x143);
    if (ctrl > 0xff && !shift && !wave) {
        row->op = ISA_UNKNOWN;
    }
}

/* mac: the third source is the old destination. */
static bool accumulates(const isa_info *info)
{
    return info->format == F_VOP2 && info->type[3] != T_none &&
           info->type[3] != T_mask;
}

/* SDWA and DPP exist for one-register operands only (the result of DPP may
 * have two), and not for the rows that take a literal or have code of their
 * own. */
static bool extendable(const isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];

    if ((info->flags & ISA_SPECIAL) != 0 || isa_has_constant(row->op)) {
        return false;
    }
    if (row->ext == ISA_EXT_DPP && row->format == F_VOPC) {
        return false;
    }
    if (row->ext == ISA_EXT_SDWA && accumulates(info)) {
        return false; /* mac: gone since gfx9 */
    }
    for (int i = row->ext == ISA_EXT_DPP ? 1 : 0; i < 3; i++) {
        if (info->type[i] != T_mask && isa_registers(info->type[i]) != 1) {
            return false;
        }
    }
    return true;
}

static void decode_vop(const uint32_t *word, size_t left, isa_row *row)
{
    uint32_t w = word[0];
    unsigned opcode = field(w, 25, 6);

    row->dst = (uint8_t)field(w, 17, 8);
    row->sdst = SRC_VCC;
    row->src[0] = (uint16_t)field(w, 0, 9);
    row->src[1] = (uint16_t)(SRC_VGPR + field(w, 9, 8));
    if (opcode == 0x3f) {
        row->format = F_VOP1;
        row->op = (uint16_t)isa_find(F_VOP1, field(w, 9, 8));
        row->src[1] = 0;
    } else if (opcode == 0x3e) {
        row->format = F_VOPC;
        row->op = (uint16_t)isa_find(F_VOPC, field(w, 17, 8));
        row->dst = 0;
    } else {
        row->format = F_VOP2;
        row->op = (uint16_t)isa_find(F_VOP2, opcode);
        row->src[2] = isa_ops[row->op].type[3] == T_mask
                          ? (uint16_t)SRC_VCC
                          : (uint16_t)(SRC_VGPR + row->dst);
    }
    if (isa_has_constant(row->op)) {
        row->src[2] = SRC_LITERAL;
    }
    if (row->op == ISA_v_swap_b32) {
        need_vgprs(row, row->dst, 1);
        if (row->src[0] < SRC_VGPR) {
            row->op = ISA_UNKNOWN;
        }
    }
    if ((row->op == ISA_v_nop || row->op == ISA_v_clrexcp) &&
        (w & 0x1fe01ff) != 0) {
        row->op = ISA_UNKNOWN;
    }
    if (row->src[0] == SRC_SDWA || row->src[0] == SRC_DPP) {
        if (left < 2) {
            row->op = ISA_UNKNOWN;
            return;
        }
        row->dwords = 2;
        if (row->src[0] == SRC_SDWA) {
            sdwa(word[1], row);
        } else {
            dpp(word[1], row);
        }
        if (!extendable(row)) {
            row->op = ISA_UNKNOWN;
        }
    } else {
        take_literal(word, left, row);
    }
}

static void decode_vop3(const uint32_t *word, size_t left, isa_row *row)
{
    uint32_t w = word[0];
    bool packed = w >> 23 == 0x1a7;
    unsigned opcode = field(w, 16, 10);

    row->format = packed ? F_VOP3P : F_VOP3;
    if (left < 2) {
        return;
    }
    row->dwords = 2;
    if (packed) {
        row->op = (uint16_t)isa_find(F_VOP3P, opcode & 127);
    } else if (opcode < 0x100) {
        row->op = (uint16_t)isa_find(F_VOPC, opcode);
    } else if (opcode < 0x140) {
        row->op = (uint16_t)isa_find(F_VOP2, opcode - 0x100);
    } else if (opcode < 0x1c0) {
        row->op = (uint16_t)isa_find(F_VOP1, opcode - 0x140);
    } else {
        row->op = (uint16_t)isa_find(F_VOP3, opcode);
    }
    if (isa_has_constant(row->op) || row->op == ISA_v_swap_b32 ||
        row->op == ISA_v_readfirstlane_b32) {
        row->op = ISA_UNKNOWN; /* no VOP3 form */
    }
    if ((row->op == ISA_v_nop || row->op == ISA_v_clrexcp) &&
        ((w & 0xffff) != 0 || word[1] != 0)) {
        row->op = ISA_UNKNOWN;
    }
    const isa_info *info = &isa_ops[row->op];

    row->dst = (uint8_t)field(w, 0, 8);
    row->src[0] = (uint16_t)field(word[1], 0, 9);
    row->src[1] = (uint16_t)field(word[1], 9, 9);
    row->src[2] = (uint16_t)field(word[1], 18, 9);
    row->neg = (uint8_t)field(word[1], 29, 3);
    row->clamp = (uint8_t)field(w, 15, 1);
    if (packed) {
        row->neg_hi = (uint8_t)field(w, 8, 3);
        row->op_sel = (uint8_t)field(w, 11, 3);
        row->op_sel_hi =
            (uint8_t)(field(word[1], 27, 2) | field(w, 14, 1) << 2);
    } else {
        row->omod = (uint8_t)field(word[1], 27, 2);
        if ((info->flags & ISA_CARRY) != 0) {
            row->sdst = (uint8_t)field(w, 8, 7);
            if (!decode_scalar_exists(row->sdst, 2)) {
                row->op = ISA_UNKNOWN;
            }
        } else {
            row->abs = (uint8_t)field(w, 8, 3);
            row->op_sel = (uint8_t)field(w, 11, 4);
        }
    }
    if (info->format == F_VOPC || row->op == ISA_v_readlane_b32) {
        row->sdst = row->dst;
        row->dst = 0;
        if (!decode_scalar_exists(row->sdst, info->format == F_VOPC ? 2 : 1)) {
            row->op = ISA_UNKNOWN;
        }
    }
    if (info->type[3] == T_none) {
        row->src[2] = 0;
    } else if (accumulates(info)) {
        row->src[2] = (uint16_t)(SRC_VGPR + row->dst);
    }
    for (int i = 0; i < 3; i++) {
        unsigned code = row->src[i];
        if (info->type[1 + i] != T_none &&
            (code == SRC_LITERAL ||
             (info->type[1 + i] == T_mask && !decode_scalar_exists(code, 2)))) {
            row->op = ISA_UNKNOWN;
        }
    }
    if ((row->op == ISA_v_mqsad_u32_u8 && row->src[2] < SRC_VGPR) ||
        (row->op == ISA_v_readlane_b32 && row->src[0] < SRC_VGPR) ||
        ((row->op == ISA_v_readlane_b32 || row->op == ISA_v_writelane_b32) &&
         row->src[1] >= SRC_VGPR) ||
        (row->op == ISA_v_writelane_b32 && row->src[0] >= SRC_VGPR)) {
        row->op = ISA_UNKNOWN;
    }
}

static bool compares_floats(const isa_info *info)
{
    return info->format == F_VOPC && isa_is_float(info->type[1]) &&
           isa_is_float(info->type[2]);
}

/* The bits of op_sel that choose something: one per 16-bit source, 8 the
 * half of the destination. */
static unsigned selectable(const isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];
    unsigned bits = 0;

    for (unsigned i = 0; i < 3; i++) {
        bits |= info->type[1 + i] == T_none ? 0 : 1u << i;
    }
    if (row->format == F_VOP3P) {
        return info->type[1] == T_raw ? 0 : bits;
    }
    return (info->flags & ISA_SELECT) != 0 ? bits | 8 : 0;
}

/* False if a modifier is set that the instruction has no use for: the
 * hardware's answer is not documented, so such a row must not run. */
static bool modifiers_fit(const isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];
    bool packed = row->format == F_VOP3P;
    unsigned signs = row->neg | row->abs | row->neg_hi;
    unsigned extends = row->sext;

    for (unsigned i = 0; i < 3; i++) {
        if (isa_takes_sign(row, i) && !(i == 2 && accumulates(info))) {
            signs &= ~(1u << i);
        } else if (info->type[1 + i] != T_none) {
            extends &= ~(1u << i);
        }
    }
    bool to_float = isa_is_float(info->type[0]);
    return signs == 0 && extends == 0 &&
           (row->omod == 0 || (to_float && !packed)) &&
           (row->clamp == 0 || to_float || compares_floats(info) ||
            strstr(info->meaning, "CLAMP") != NULL) &&
           (row->op_sel & ~selectable(row)) == 0;
}

/* Which VGPRs a vector row names, and whether it has no modifier at all. */
static void finish_valu(isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];

    row->issue = ISSUE_VALU;
    if (row->op == ISA_v_readfirstlane_b32) {
        row->sdst = row->dst;
        row->dst = 0;
        if (!decode_scalar_exists(row->sdst, 1) || row->sdst == SRC_M0 ||
            row->src[0] < SRC_VGPR) {
            row->op = ISA_UNKNOWN;
        }
    } else if (info->type[0] != T_mask && info->type[0] != T_none &&
               row->op != ISA_v_readlane_b32) {
        need_vgprs(row, row->dst, isa_registers(info->type[0]));
    }
    for (int i = 0; i < 3; i++) {
        unsigned type = info->type[1 + i];
        if (type == T_none) {
            continue;
        }
        if (row->src[i] >= SRC_VGPR) {
            need_vgprs(row, row->src[i] - SRC_VGPR, isa_registers(type));
        } else if (!decode_source_fits(row->src[i], isa_registers(type)) ||
                   row->src[i] == SRC_LDS_DIRECT) {
            row->op = ISA_UNKNOWN;
        }
    }
    if (!modifiers_fit(row)) {
        row->op = ISA_UNKNOWN;
    }
    bool halves = false;
    for (int i = 0; i < 4; i++) {
        unsigned type = info->type[i];
        halves = halves || type == T_u16 || type == T_i16 || type == T_f16 ||
                 type == T_mix || type == T_hi16 || type == T_pk16 ||
                 (type == T_pkf16 && row->format != F_VOP3P);
    }
    bool natural = info->type[1] != T_pkf16 || (row->op_sel_hi & 3) == 3;
    row->plain = !halves && natural && row->ext == ISA_EXT_NONE &&
                 row->neg == 0 && row->abs == 0 && row->neg_hi == 0 &&
                 row->op_sel == 0 && row->omod == 0 && row->clamp == 0;
}

const char *isa_unknown(uint32_t word)
{
    switch (word >> 26) {
    case 0x31:
        return "exports are not simulated";
    case 0x35:
        return "interpolation is not simulated";
    case 0x3a:
        return "formatted buffers (MTBUF) are not simulated";
    case 0x3c:
        return "images (MIMG) are not simulated";
    case 0x30:
        return "this scalar memory instruction is not simulated, or none";
    case 0x36:
        return "this DS instruction is not simulated, or none";
    case 0x37:
        return "this FLAT instruction is not simulated, or none";
    case 0x38:
        return "this buffer instruction is not simulated, or none";
    default:
        return "not an instruction that is simulated";
    }
}

void isa_decode(const uint32_t *word, size_t left, isa_row *row)
{
    uint32_t w = word[0];

    memset(row, 0, sizeof *row);
    row->dwords = 1;
    if (w >> 31 == 0) {
        decode_vop(word, left, row);
        finish_valu(row);
    } else if (w >> 30 == 2) {
        decode_scalar(word, left, row);
    } else {
        switch (w >> 26) {
        case 0x30:
            decode_smem(word, left, row);
            break;
        case 0x34:
            decode_vop3(word, left, row);
            finish_valu(row);
            break;
        case 0x36:
            decode_ds(word, left, row);
            break;
        case 0x37:
            decode_flat(word, left, row);
            break;
        case 0x38:
            decode_mubuf(word, left, row);
            break;
        default:
            break;
        }
    }
    if (row->vgpr_end > SIM_VGPRS) {
        row->op = ISA_UNKNOWN;
    }
    if (row->op == ISA_UNKNOWN) {
        row->issue = ISSUE_FAULT;
    }
}

sim_code *sim_code_create(uint64_t address, size_t bytes)
{
    size_t count = bytes / sizeof(uint32_t);
    sim_code *code = calloc(1, sizeof *code + count * sizeof code->row[0]);

    if (code == NULL) {
        return NULL;
    }
    code->address = address;
    code->count = count;
    code->word = (const uint32_t *)(uintptr_t)address;
    for (size_t i = 0; i < count; i++) {
        isa_decode(code->word + i, count - i, &code->row[i]);
    }
    return code;
}

void sim_code_free(sim_code *code)
{
    free(code);
}
