/* disasm_vector.c: vector instructions as text: suffix, sources with their
 * modifiers, DPP, SDWA and packed operands.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "disasm.h"

/* Source i of a vector instruction with its sign modifiers. */
static void put_vector_source(text *t, const isa_row *row, unsigned i)
{
    unsigned type = isa_ops[row->op].type[1 + i];
    bool packed = row->format == F_VOP3P;
    bool sign = isa_takes_sign(row, i) && (!packed || type == T_mix);
    bool negate = sign && (row->neg >> i & 1) != 0;
    bool absolute = sign && ((packed ? row->neg_hi : row->abs) >> i & 1) != 0;
    bool extend = row->ext == ISA_EXT_SDWA && (row->sext >> i & 1) != 0;
    bool constant =
        row->src[i] >= SRC_ZERO && row->src[i] < SRC_VGPR &&
        !(row->src[i] >= SRC_SHARED_BASE && row->src[i] <= SRC_POPS) &&
        !(row->src[i] >= SRC_VCCZ && row->src[i] <= SRC_LDS_DIRECT);
    bool call = negate && !absolute && constant;

    if (i == 2 && isa_has_constant(row->op)) {
        disasm_put(t, "0x%x", row->literal); /* no operand that has codes */
        return;
    }
    if ((i == 1 && row->op == ISA_v_ldexp_f16) ||
        row->op == ISA_v_pack_b32_f16) {
        type = T_f16; /* so LLVM spells them */
    }
    disasm_put(t, "%s", call ? "neg(" : negate ? "-" : "");
    disasm_put(t, "%s%s", absolute ? "|" : "", extend ? "sext(" : "");
    disasm_source(t, row, row->src[i], type);
    disasm_put(t, "%s%s%s", extend ? ")" : "", absolute ? "|" : "",
               call ? ")" : "");
}

static const char *suffix(const isa_row *row, const isa_info *info)
{
    if (row->ext != ISA_EXT_NONE) {
        return row->ext == ISA_EXT_SDWA ? "_sdwa" : "_dpp";
    }
    if (isa_has_constant(row->op) || row->op == ISA_v_readfirstlane_b32 ||
        row->op == ISA_v_swap_b32) {
        return "";
    }
    if (row->op == ISA_v_nop || row->op == ISA_v_clrexcp) {
        return row->format == F_VOP3 ? "_e64" : "";
    }
    if (row->format == F_VOP3 && info->format != F_VOP3) {
        return "_e64";
    }
    return row->format == F_VOP3 || row->format == F_VOP3P ? "" : "_e32";
}

static void put_list(text *t, const char *name, unsigned bits, unsigned count)
{
    disasm_put(t, " %s:[", name);
    for (unsigned i = 0; i < count; i++) {
        disasm_put(t, "%s%u", i == 0 ? "" : ",", bits >> i & 1);
    }
    disasm_put(t, "]");
}

static unsigned source_count(const isa_info *info)
{
    unsigned n = 0;

    while (n < 3 && info->type[1 + n] != T_none) {
        n++;
    }
    return n;
}

static void put_vop3p_modifiers(text *t, const isa_row *row,
                                const isa_info *info)
{
    unsigned n = source_count(info), all = (1u << n) - 1u;
    bool mix = info->type[1] == T_mix;
    bool signs = info->type[0] == T_pkf16 || info->type[1] == T_pkf16;

    if (info->type[1] == T_raw) {
        disasm_put(t, "%s", row->clamp ? " clamp" : "");
        return;
    }
    if ((row->op_sel & all) != 0) {
        put_list(t, "op_sel", row->op_sel, n);
    }
    if ((row->op_sel_hi & all) != (mix ? 0 : all)) {
        put_list(t, "op_sel_hi", row->op_sel_hi, n);
    }
    if (signs && (row->neg & all) != 0) {
        put_list(t, "neg_lo", row->neg, n);
    }
    if (signs && (row->neg_hi & all) != 0) {
        put_list(t, "neg_hi", row->neg_hi, n);
    }
    disasm_put(t, "%s", row->clamp ? " clamp" : "");
}

static void put_sdwa(text *t, const isa_row *row, const isa_info *info)
{
    static const char *const selects[8] = {"BYTE_0", "BYTE_1", "BYTE_2",
                                           "BYTE_3", "WORD_0", "WORD_1",
                                           "DWORD",  "?"};
    static const char *const unused[4] = {"PAD", "SEXT", "PRESERVE", "?"};

    if (row->format != F_VOPC) {
        disasm_put(t, " dst_sel:%s dst_unused:UNUSED_%s", selects[row->sel[0]],
                   unused[row->dst_unused]);
    }
    disasm_put(t, " src0_sel:%s", selects[row->sel[1]]);
    if (info->type[2] != T_none) {
        disasm_put(t, " src1_sel:%s", selects[row->sel[2]]);
    }
}

static void put_dpp(text *t, const isa_row *row)
{
    static const char *const rows[3] = {"shl", "shr", "ror"};
    unsigned ctrl = row->dpp_ctrl;

    if (ctrl <= 0xff) {
        disasm_put(t, " quad_perm:[%u,%u,%u,%u]", ctrl & 3, ctrl >> 2 & 3,
                   ctrl >> 4 & 3, ctrl >> 6 & 3);
    } else if (ctrl < 0x130) {
        disasm_put(t, " row_%s:%u", rows[(ctrl >> 4) - 0x10], ctrl & 15);
    } else {
        disasm_put(t, " %s",
                   ctrl == 0x130   ? "wave_shl:1"
                   : ctrl == 0x134 ? "wave_rol:1"
                   : ctrl == 0x138 ? "wave_shr:1"
                   : ctrl == 0x13c ? "wave_ror:1"
                   : ctrl == 0x140 ? "row_mirror"
                   : ctrl == 0x141 ? "row_half_mirror"
                   : ctrl == 0x142 ? "row_bcast:15"
                                   : "row_bcast:31");
    }
    disasm_put(t, " row_mask:0x%x bank_mask:0x%x%s", row->row_mask,
               row->bank_mask, row->bound_zero ? " bound_ctrl:1" : "");
}

static void put_vector_modifiers(text *t, const isa_row *row,
                                 const isa_info *info)
{
    static const char *const factors[4] = {"", " mul:2", " mul:4", " div:2"};

    if (row->format == F_VOP3P) {
        put_vop3p_modifiers(t, row, info);
        return;
    }
    if (row->format == F_VOP3 && (info->flags & ISA_SELECT) != 0 &&
        row->op_sel != 0) {
        unsigned n = source_count(info);
        put_list(t, "op_sel",
                 (row->op_sel & ((1u << n) - 1u)) |
                     (unsigned)(row->op_sel >> 3 & 1) << n,
                 n + 1);
    }
    disasm_put(t, "%s%s", row->clamp ? " clamp" : "", factors[row->omod]);
    if (row->ext == ISA_EXT_SDWA) {
        put_sdwa(t, row, info);
    } else if (row->ext == ISA_EXT_DPP) {
        put_dpp(t, row);
    }
}

void disasm_vector(text *t, const isa_row *row, const isa_info *info)
{
    bool old = info->format == F_VOP2 && info->type[3] != T_none &&
               info->type[3] != T_mask && row->src[2] != SRC_LITERAL;

    disasm_put(t, "%s", suffix(row, info));
    if (row->op == ISA_v_nop || row->op == ISA_v_clrexcp) {
        return;
    }
    disasm_put(t, " ");
    if (row->op == ISA_v_readlane_b32 || row->op == ISA_v_readfirstlane_b32) {
        disasm_sgpr(t, row->sdst, 1);
    } else if (info->type[0] == T_mask) {
        disasm_sgpr(t, row->sdst, 2);
    } else {
        disasm_vgpr(t, row->dst, isa_registers(info->type[0]));
    }
    if ((info->flags & ISA_CARRY) != 0) {
        disasm_put(t, ", ");
        disasm_sgpr(t, row->sdst, 2);
    }
    bool middle = row->op == ISA_v_madmk_f32 || row->op == ISA_v_madmk_f16;
    for (unsigned i = 0; i < 3; i++) {
        unsigned which = middle && i > 0 ? 3 - i : i;
        if (info->type[1 + which] != T_none && !(old && which == 2)) {
            disasm_put(t, ", ");
            put_vector_source(t, row, which);
        }
    }
    put_vector_modifiers(t, row, info);
}
