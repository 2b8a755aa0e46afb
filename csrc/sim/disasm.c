/* disasm.c: isa_row -> text, in LLVM's spelling (llvm-objdump 22).
 *
 * Operand widths and modifiers follow from the types in the .def lists; the
 * rest is LLVM's conventions per format. Tested against llvm-objdump.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "isa.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct text {
    char *at;
    size_t left; /* including the final zero */
} text;

static void put(text *t, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    int n = vsnprintf(t->at, t->left, format, arguments);
    va_end(arguments);
    if (n > 0) {
        size_t step =
            (size_t)n < t->left ? (size_t)n : (t->left > 0 ? t->left - 1 : 0);
        t->at += step;
        t->left -= step;
    }
}

/* ---- operands ---------------------------------------------------------- */

static void put_range(text *t, const char *prefix, unsigned first,
                      unsigned count)
{
    if (count == 1) {
        put(t, "%s%u", prefix, first);
    } else {
        put(t, "%s[%u:%u]", prefix, first, first + count - 1);
    }
}

static void put_vgpr(text *t, unsigned first, unsigned count)
{
    put_range(t, "v", first, count);
}

static void put_sgpr(text *t, unsigned code, unsigned count)
{
    static const struct {
        uint8_t code;
        const char *name;
    } named[] = {
        {SRC_FLAT_SCRATCH, "flat_scratch"},
        {SRC_XNACK_MASK, "xnack_mask"},
        {SRC_VCC, "vcc"},
        {SRC_EXEC, "exec"},
    };

    if (code < SRC_FLAT_SCRATCH) {
        put_range(t, "s", code, count);
        return;
    }
    if (code == SRC_M0) {
        put(t, "m0");
        return;
    }
    if (code >= SRC_TTMP && code < SRC_M0) {
        put_range(t, "ttmp", code - SRC_TTMP, count);
        return;
    }
    for (size_t i = 0; i < sizeof named / sizeof named[0]; i++) {
        if (code == named[i].code || code == named[i].code + 1u) {
            put(t, "%s%s", named[i].name,
                count == 2              ? ""
                : code == named[i].code ? "_lo"
                                        : "_hi");
        }
    }
}

/* The inline floats: text, and bits as half, float and high word of a double
 * (0 where the low word has bits, too). */
static const struct {
    const char *text;
    uint16_t half;
    uint32_t single, high;
} inline_floats[9] = {
    {"0.5", 0x3800, 0x3f000000, 0x3fe00000},
    {"-0.5", 0xb800, 0xbf000000, 0xbfe00000},
    {"1.0", 0x3c00, 0x3f800000, 0x3ff00000},
    {"-1.0", 0xbc00, 0xbf800000, 0xbff00000},
    {"2.0", 0x4000, 0x40000000, 0x40000000},
    {"-2.0", 0xc000, 0xc0000000, 0xc0000000},
    {"4.0", 0x4400, 0x40800000, 0x40100000},
    {"-4.0", 0xc400, 0xc0800000, 0xc0100000},
    {"0.15915494", 0x3118, 0x3e22f983, 0},
};

/* A literal whose value has an inline code is marked, so that the text
 * assembles back to the same words. LLVM's rules differ by type. */
static void put_literal(text *t, const isa_row *row, unsigned type)
{
    uint32_t value = row->literal, low = value & 0xffff;
    bool half = type == T_u16 || type == T_i16 || type == T_f16;
    bool wide = type == T_u64 || type == T_i64; /* zeros above the literal */
    bool coded = value <= 64 || (!wide && value >= 0u - 16u);

    if (type == T_f64) { /* the high word; not marked */
        for (unsigned i = 0; i < 8; i++) {
            if (value == inline_floats[i].high) {
                put(t, "%s", inline_floats[i].text);
                return;
            }
        }
        put(t, value == 0 ? "0" : "0x%x", value);
        return;
    }
    if (type == T_f16) {
        coded = low <= 64 || low >= 0xfff0;
    }
    for (unsigned i = 0; i < 9; i++) {
        coded = coded ||
                (type == T_f16 ? low == inline_floats[i].half
                               : !wide && value == inline_floats[i].single);
    }
    put(t, coded ? "lit(0x%x)" : "0x%x", half && !coded ? low : value);
}

static void put_source(text *t, const isa_row *row, unsigned code,
                       unsigned type)
{
    static const char *const others[] = {
        "src_shared_base", "src_shared_limit", "src_private_base",
        "src_private_limit", "src_pops_exiting_wave_id"};
    unsigned registers = isa_registers(type);

    if (code >= SRC_VGPR) {
        put_vgpr(t, code - SRC_VGPR, registers);
    } else if (code < SRC_ZERO) {
        put_sgpr(t, code, registers);
    } else if (code < SRC_MINUS_1) {
        put(t, "%u", code - SRC_ZERO);
    } else if (code <= SRC_MINUS_16) {
        put(t, "-%u", code - SRC_MINUS_1 + 1);
    } else if (code >= SRC_SHARED_BASE && code <= SRC_POPS) {
        put(t, "%s", others[code - SRC_SHARED_BASE]);
    } else if (code >= SRC_HALF && code <= SRC_INV_2PI &&
               (type == T_u16 || type == T_i16) && row->format != F_VOP3P) {
        put(t, "0x%x", inline_floats[code - SRC_HALF].half);
    } else if (code >= SRC_HALF && code < SRC_INV_2PI) {
        put(t, "%s", inline_floats[code - SRC_HALF].text);
    } else {
        switch (code) {
        case SRC_INV_2PI:
            put(t, registers == 2 ? "0.15915494309189532" : "0.15915494");
            break;
        case SRC_VCCZ:
            put(t, "src_vccz");
            break;
        case SRC_EXECZ:
            put(t, "src_execz");
            break;
        case SRC_SCC:
            put(t, "src_scc");
            break;
        case SRC_LDS_DIRECT:
            put(t, "src_lds_direct");
            break;
        default:
            put_literal(t, row, type);
            break;
        }
    }
}

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
        put(t, "0x%x", row->literal); /* no operand that has codes */
        return;
    }
    if ((i == 1 && row->op == ISA_v_ldexp_f16) ||
        row->op == ISA_v_pack_b32_f16) {
        type = T_f16; /* so LLVM spells them */
    }
    put(t, "%s", call ? "neg(" : negate ? "-" : "");
    put(t, "%s%s", absolute ? "|" : "", extend ? "sext(" : "");
    put_source(t, row, row->src[i], type);
    put(t, "%s%s%s", extend ? ")" : "", absolute ? "|" : "", call ? ")" : "");
}

/* ---- scalar formats ---------------------------------------------------- */

static void put_hwreg(text *t, unsigned what)
{
    static const char *const names[20] = {
        [1] = "MODE",    [2] = "STATUS",        [3] = "TRAPSTS",
        [4] = "HW_ID",   [5] = "GPR_ALLOC",     [6] = "LDS_ALLOC",
        [7] = "IB_STS",  [15] = "SH_MEM_BASES", [16] = "TBA_LO",
        [17] = "TBA_HI", [18] = "TMA_LO",       [19] = "TMA_HI"};
    unsigned id = what & 63, offset = what >> 6 & 31;
    unsigned size = (what >> 11 & 31) + 1;

    if (id < 20 && names[id] != NULL) {
        put(t, "hwreg(HW_REG_%s", names[id]);
    } else {
        put(t, "hwreg(%u", id);
    }
    if (offset != 0 || size != 32) {
        put(t, ", %u, %u", offset, size);
    }
    put(t, ")");
}

/* A number that has no code, spelled as if it had one. */
static void put_constant(text *t, uint32_t value)
{
    if (value <= 64 || value >= 0u - 16u) {
        put(t, "%d", (int)value);
        return;
    }
    for (unsigned i = 0; i < 9; i++) {
        if (value == inline_floats[i].single) {
            put(t, "%s", inline_floats[i].text);
            return;
        }
    }
    put(t, "0x%x", value);
}

static void put_sopk(text *t, const isa_row *row, const isa_info *info)
{
    unsigned imm = (unsigned)row->offset & 0xffff;

    switch (row->op) {
    case ISA_s_setreg_b32:
        put(t, " ");
        put_hwreg(t, imm);
        put(t, ", ");
        put_sgpr(t, row->dst, 1);
        return;
    case ISA_s_setreg_imm32_b32:
        put(t, " ");
        put_hwreg(t, imm);
        put(t, ", ");
        put_constant(t, row->literal);
        return;
    default:
        break;
    }
    put(t, " ");
    put_sgpr(t, row->dst, isa_registers(info->type[0]));
    put(t, ", ");
    if (row->op == ISA_s_getreg_b32) {
        put_hwreg(t, imm);
    } else if (row->op == ISA_s_call_b64) {
        put(t, "%u", imm);
    } else {
        put(t, "0x%x", imm);
    }
}

static void put_wait(text *t, const isa_row *row)
{
    isa_wait wait = isa_wait_counts(row);
    bool vm = wait.vm != ISA_VM_MAX, exp = wait.exp != ISA_EXP_MAX;
    bool lgkm = wait.lgkm != ISA_LGKM_MAX, none = !vm && !exp && !lgkm;

    if (vm || none) {
        put(t, " vmcnt(%u)", wait.vm);
    }
    if (exp || none) {
        put(t, " expcnt(%u)", wait.exp);
    }
    if (lgkm || none) {
        put(t, " lgkmcnt(%u)", wait.lgkm);
    }
}

/* Which registers an index is added to. */
static void put_gpr_idx(text *t, unsigned imm)
{
    static const char *const name[4] = {"SRC0", "SRC1", "SRC2", "DST"};
    const char *comma = "";

    if (imm > 15) {
        put(t, "0x%x", imm);
        return;
    }
    put(t, "gpr_idx(");
    for (unsigned i = 0; i < 4; i++) {
        if ((imm >> i & 1) != 0) {
            put(t, "%s%s", comma, name[i]);
            comma = ",";
        }
    }
    put(t, ")");
}

static void put_sopp(text *t, const isa_row *row, const isa_info *info)
{
    unsigned imm = (unsigned)row->offset & 0xffff;

    switch (info->access) {
    case P_VALUE:
        put(t, imm <= 64 ? " %u" : " 0x%x", imm);
        break;
    case P_INDEX:
        put(t, " ");
        put_gpr_idx(t, imm);
        break;
    case P_TARGET:
        put(t, " %u", imm);
        break;
    case P_OPTION:
        if (imm != 0) {
            put(t, " %u", imm);
        }
        break;
    case P_WAIT:
        put_wait(t, row);
        break;
    case P_MESSAGE:
        put(t, " sendmsg(MSG_INTERRUPT)");
        break;
    default:
        break;
    }
}

static void put_scalar(text *t, const isa_row *row, const isa_info *info)
{
    const char *comma = " ";

    if (row->format == F_SOPK) {
        put_sopk(t, row, info);
        return;
    }
    if (row->format == F_SOPP) {
        put_sopp(t, row, info);
        return;
    }
    if (info->type[0] != T_none) {
        put(t, " ");
        put_sgpr(t, row->dst, isa_registers(info->type[0]));
        comma = ", ";
    }
    for (unsigned i = 0; i < 2; i++) {
        if (info->type[1 + i] != T_none) {
            put(t, "%s", comma);
            if (i == 1 && row->op == ISA_s_set_gpr_idx_on) {
                put_gpr_idx(t, (unsigned)row->offset >> 8 & 255);
                continue;
            }
            put_source(t, row, row->src[i], info->type[1 + i]);
            comma = ", ";
        }
    }
}

static void put_smem(text *t, const isa_row *row, const isa_info *info)
{
    if (info->access == M_CACHE) {
        return;
    }
    put(t, " ");
    put_sgpr(t, row->dst, info->access == M_TIME ? 2 : info->bytes / 4u);
    if (info->access == M_TIME) {
        return;
    }
    put(t, ", ");
    put_sgpr(t, row->base, info->access == M_BUFFER_LOAD ? 4 : 2);
    put(t, ", ");
    if (row->soffset_en || !row->imm) {
        put_sgpr(t, row->soffset, 1);
        if (row->imm) {
            put(t, " offset:");
        }
    }
    if (row->imm) {
        put(t, "%s0x%x", row->offset < 0 ? "-" : "",
            row->offset < 0 ? 0u - (unsigned)row->offset
                            : (unsigned)row->offset);
    }
    put(t, "%s", row->glc ? " glc" : "");
}

/* ---- vector formats ---------------------------------------------------- */

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
    put(t, " %s:[", name);
    for (unsigned i = 0; i < count; i++) {
        put(t, "%s%u", i == 0 ? "" : ",", bits >> i & 1);
    }
    put(t, "]");
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
        put(t, "%s", row->clamp ? " clamp" : "");
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
    put(t, "%s", row->clamp ? " clamp" : "");
}

static void put_sdwa(text *t, const isa_row *row, const isa_info *info)
{
    static const char *const selects[8] = {"BYTE_0", "BYTE_1", "BYTE_2",
                                           "BYTE_3", "WORD_0", "WORD_1",
                                           "DWORD",  "?"};
    static const char *const unused[4] = {"PAD", "SEXT", "PRESERVE", "?"};

    if (row->format != F_VOPC) {
        put(t, " dst_sel:%s dst_unused:UNUSED_%s", selects[row->sel[0]],
            unused[row->dst_unused]);
    }
    put(t, " src0_sel:%s", selects[row->sel[1]]);
    if (info->type[2] != T_none) {
        put(t, " src1_sel:%s", selects[row->sel[2]]);
    }
}

static void put_dpp(text *t, const isa_row *row)
{
    static const char *const rows[3] = {"shl", "shr", "ror"};
    unsigned ctrl = row->dpp_ctrl;

    if (ctrl <= 0xff) {
        put(t, " quad_perm:[%u,%u,%u,%u]", ctrl & 3, ctrl >> 2 & 3,
            ctrl >> 4 & 3, ctrl >> 6 & 3);
    } else if (ctrl < 0x130) {
        put(t, " row_%s:%u", rows[(ctrl >> 4) - 0x10], ctrl & 15);
    } else {
        put(t, " %s",
            ctrl == 0x130   ? "wave_shl:1"
            : ctrl == 0x134 ? "wave_rol:1"
            : ctrl == 0x138 ? "wave_shr:1"
            : ctrl == 0x13c ? "wave_ror:1"
            : ctrl == 0x140 ? "row_mirror"
            : ctrl == 0x141 ? "row_half_mirror"
            : ctrl == 0x142 ? "row_bcast:15"
                            : "row_bcast:31");
    }
    put(t, " row_mask:0x%x bank_mask:0x%x%s", row->row_mask, row->bank_mask,
        row->bound_zero ? " bound_ctrl:1" : "");
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
    put(t, "%s%s", row->clamp ? " clamp" : "", factors[row->omod]);
    if (row->ext == ISA_EXT_SDWA) {
        put_sdwa(t, row, info);
    } else if (row->ext == ISA_EXT_DPP) {
        put_dpp(t, row);
    }
}

static void put_vector(text *t, const isa_row *row, const isa_info *info)
{
    bool old = info->format == F_VOP2 && info->type[3] != T_none &&
               info->type[3] != T_mask && row->src[2] != SRC_LITERAL;

    if (row->op == ISA_v_nop || row->op == ISA_v_clrexcp) {
        return;
    }
    put(t, " ");
    if (row->op == ISA_v_readlane_b32 || row->op == ISA_v_readfirstlane_b32) {
        put_sgpr(t, row->sdst, 1);
    } else if (info->type[0] == T_mask) {
        put_sgpr(t, row->sdst, 2);
    } else {
        put_vgpr(t, row->dst, isa_registers(info->type[0]));
    }
    if ((info->flags & ISA_CARRY) != 0) {
        put(t, ", ");
        put_sgpr(t, row->sdst, 2);
    }
    bool middle = row->op == ISA_v_madmk_f32 || row->op == ISA_v_madmk_f16;
    for (unsigned i = 0; i < 3; i++) {
        unsigned which = middle && i > 0 ? 3 - i : i;
        if (info->type[1 + which] != T_none && !(old && which == 2)) {
            put(t, ", ");
            put_vector_source(t, row, which);
        }
    }
    put_vector_modifiers(t, row, info);
}

/* ---- memory formats ---------------------------------------------------- */

static bool bit_alone(unsigned x)
{
    return x != 0 && (x & (x - 1)) == 0;
}

static void put_swizzle(text *t, unsigned imm)
{
    unsigned and = imm & 31, or = imm >> 5 & 31, xor = imm >> 10 & 31;
    unsigned group = 32 - and;

    if (imm == 0) {
        return;
    }
    put(t, " offset:");
    if (imm >= 0xe000) {
        put(t, "swizzle(FFT,%u)", imm & 31);
    } else if (imm >= 0xc000) {
        put(t, "swizzle(ROTATE,%u,%u)", imm >> 10 & 1, imm >> 5 & 31);
    } else if ((imm & 0xff00) == 0x8000) {
        put(t, "swizzle(QUAD_PERM,%u,%u,%u,%u)", imm & 3, imm >> 2 & 3,
            imm >> 4 & 3, imm >> 6 & 3);
    } else if (imm & 0x8000) {
        put(t, "%u", imm);
    } else if (and == 31 && or == 0 && bit_alone(xor)) {
        put(t, "swizzle(SWAP,%u)", xor);
    } else if (and == 31 && or == 0 && xor > 0 && bit_alone(xor + 1)) {
        put(t, "swizzle(REVERSE,%u)", xor + 1);
    } else if (group > 1 && bit_alone(group) && or < group && xor == 0) {
        put(t, "swizzle(BROADCAST,%u,%u)", group, or);
    } else {
        unsigned zero = or ^ xor, one = (and | or) ^ xor;
        put(t, "swizzle(BITMASK_PERM,\"");
        for (int bit = 4; bit >= 0; bit--) {
            unsigned z = zero >> bit & 1, o = one >> bit & 1;
            put(t, "%c", z == o ? (z ? '1' : '0') : (z ? 'i' : 'p'));
        }
        put(t, "\")");
    }
}

static void put_ds(text *t, const isa_row *row, const isa_info *info)
{
    const isa_ds_use use = isa_ds_fields(info);
    const struct {
        unsigned first, count;
    } fields[4] = {{row->dst, use.dst},
                   {row->addr, use.addr},
                   {row->data, use.data},
                   {row->data2, use.data2}};
    unsigned imm = (unsigned)row->offset;
    const char *comma = " ";

    if (info->access == M_NOP) {
        return;
    }
    for (unsigned i = 0; i < 4; i++) {
        if (fields[i].count > 0) {
            put(t, "%s", comma);
            put_vgpr(t, fields[i].first, fields[i].count);
            comma = ", ";
        }
    }
    if (info->access == M_SWIZZLE) {
        put_swizzle(t, imm);
    } else if (info->access >= M_READ2 && info->access <= M_XCHG2ST64) {
        if (imm & 255) {
            put(t, " offset0:%u", imm & 255);
        }
        if (imm >> 8) {
            put(t, " offset1:%u", imm >> 8);
        }
    } else if (imm != 0) {
        put(t, " offset:%u", imm);
    }
    put(t, "%s", row->gds ? " gds" : "");
}

static unsigned data_registers(const isa_info *info)
{
    unsigned registers = (info->bytes + 3u) / 4u;

    return info->access == M_ATOMIC && (info->flags & ISA_TWO_DATA) != 0
               ? 2 * registers
               : registers;
}

static void put_flat_address(text *t, const isa_row *row)
{
    if (row->format == F_SCRATCH && row->base != 0x7f) {
        put(t, "off");
    } else {
        put_vgpr(t, row->addr,
                 row->base == 0x7f && row->format != F_SCRATCH ? 2 : 1);
    }
}

static void put_flat(text *t, const isa_row *row, const isa_info *info)
{
    bool atomic = info->access == M_ATOMIC;
    bool result = atomic ? row->glc != 0 : !isa_is_store(info);

    put(t, " ");
    if (result && !row->lds) {
        put_vgpr(t, row->dst, (info->bytes + 3u) / 4u);
        put(t, ", ");
    }
    put_flat_address(t, row);
    if (atomic || isa_is_store(info)) {
        put(t, ", ");
        put_vgpr(t, row->data, data_registers(info));
    }
    if (row->format != F_FLAT) {
        put(t, ", ");
        if (row->base == 0x7f) {
            put(t, "off");
        } else {
            put_sgpr(t, row->base, row->format == F_GLOBAL ? 2 : 1);
        }
    }
    if (row->offset != 0) {
        put(t, " offset:%d", row->offset);
    }
    put(t, "%s%s%s", row->glc ? " glc" : "", row->slc ? " slc" : "",
        row->lds ? " lds" : "");
}

static void put_mubuf(text *t, const isa_row *row, const isa_info *info)
{
    if (info->access == M_CACHE) {
        return;
    }
    put(t, " ");
    if (!row->lds) {
        put_vgpr(t, row->data, data_registers(info));
        put(t, ", ");
    }
    if (row->offen || row->idxen) {
        put_vgpr(t, row->addr, row->offen && row->idxen ? 2 : 1);
    } else {
        put(t, "off");
    }
    put(t, ", ");
    put_sgpr(t, row->base, 4);
    put(t, ", ");
    put_source(t, row, row->soffset, T_u32);
    put(t, "%s%s", row->idxen ? " idxen" : "", row->offen ? " offen" : "");
    if (row->offset != 0) {
        put(t, " offset:%d", row->offset);
    }
    put(t, "%s%s%s", row->glc ? " glc" : "", row->slc ? " slc" : "",
        row->lds ? " lds" : "");
}

unsigned sim_disasm(const sim_code *code, size_t offset, char *out,
                    size_t out_size)
{
    text t = {out, out_size};

    if (offset % 4 != 0 || offset / 4 >= code->count) {
        put(&t, "%s", "");
        return 0;
    }
    const isa_row *row = &code->row[offset / 4];
    const isa_info *info = &isa_ops[row->op];
    if (row->op == ISA_UNKNOWN) {
        put(&t, ".long 0x%08x", (unsigned)code->word[offset / 4]);
        return 0;
    }
    put(&t, "%s", info->name);
    switch (row->issue) {
    case ISSUE_VALU:
        put(&t, "%s", suffix(row, info));
        put_vector(&t, row, info);
        break;
    case ISSUE_SMEM:
        put_smem(&t, row, info);
        break;
    case ISSUE_DS:
        put_ds(&t, row, info);
        break;
    case ISSUE_FLAT:
        put_flat(&t, row, info);
        break;
    case ISSUE_MUBUF:
        put_mubuf(&t, row, info);
        break;
    default:
        put_scalar(&t, row, info);
        break;
    }
    return 4u * row->dwords;
}
