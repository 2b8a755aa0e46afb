/* disasm.c: isa_row -> text, in LLVM's spelling (llvm-objdump 22).
 *
 * Operand widths and modifiers follow from the types in the .def lists; the
 * rest is LLVM's conventions per format. Here are the operands and the scalar
 * formats; disasm_vector.c and disasm_memory.c have the others. Tested against
 * llvm-objdump.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "disasm.h"

#include <stdarg.h>
#include <stdio.h>

void disasm_put(text *t, const char *format, ...)
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
        disasm_put(t, "%s%u", prefix, first);
    } else {
        disasm_put(t, "%s[%u:%u]", prefix, first, first + count - 1);
    }
}

void disasm_vgpr(text *t, unsigned first, unsigned count)
{
    put_range(t, "v", first, count);
}

void disasm_sgpr(text *t, unsigned code, unsigned count)
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
        disasm_put(t, "m0");
        return;
    }
    if (code >= SRC_TTMP && code < SRC_M0) {
        put_range(t, "ttmp", code - SRC_TTMP, count);
        return;
    }
    for (size_t i = 0; i < sizeof named / sizeof named[0]; i++) {
        if (code == named[i].code || code == named[i].code + 1u) {
            disasm_put(t, "%s%s", named[i].name,
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
                disasm_put(t, "%s", inline_floats[i].text);
                return;
            }
        }
        disasm_put(t, value == 0 ? "0" : "0x%x", value);
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
    disasm_put(t, coded ? "lit(0x%x)" : "0x%x", half && !coded ? low : value);
}

void disasm_source(text *t, const isa_row *row, unsigned code, unsigned type)
{
    static const char *const others[] = {
        "src_shared_base", "src_shared_limit", "src_private_base",
        "src_private_limit", "src_pops_exiting_wave_id"};
    unsigned registers = isa_registers(type);

    if (code >= SRC_VGPR) {
        disasm_vgpr(t, code - SRC_VGPR, registers);
    } else if (code < SRC_ZERO) {
        disasm_sgpr(t, code, registers);
    } else if (code < SRC_MINUS_1) {
        disasm_put(t, "%u", code - SRC_ZERO);
    } else if (code <= SRC_MINUS_16) {
        disasm_put(t, "-%u", code - SRC_MINUS_1 + 1);
    } else if (code >= SRC_SHARED_BASE && code <= SRC_POPS) {
        disasm_put(t, "%s", others[code - SRC_SHARED_BASE]);
    } else if (code >= SRC_HALF && code <= SRC_INV_2PI &&
               (type == T_u16 || type == T_i16) && row->format != F_VOP3P) {
        disasm_put(t, "0x%x", inline_floats[code - SRC_HALF].half);
    } else if (code >= SRC_HALF && code < SRC_INV_2PI) {
        disasm_put(t, "%s", inline_floats[code - SRC_HALF].text);
    } else {
        switch (code) {
        case SRC_INV_2PI:
            disasm_put(t,
                       registers == 2 ? "0.15915494309189532" : "0.15915494");
            break;
        case SRC_VCCZ:
            disasm_put(t, "src_vccz");
            break;
        case SRC_EXECZ:
            disasm_put(t, "src_execz");
            break;
        case SRC_SCC:
            disasm_put(t, "src_scc");
            break;
        case SRC_LDS_DIRECT:
            disasm_put(t, "src_lds_direct");
            break;
        default:
            put_literal(t, row, type);
            break;
        }
    }
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
        disasm_put(t, "hwreg(HW_REG_%s", names[id]);
    } else {
        disasm_put(t, "hwreg(%u", id);
    }
    if (offset != 0 || size != 32) {
        disasm_put(t, ", %u, %u", offset, size);
    }
    disasm_put(t, ")");
}

/* A number that has no code, spelled as if it had one. */
static void put_constant(text *t, uint32_t value)
{
    if (value <= 64 || value >= 0u - 16u) {
        disasm_put(t, "%d", (int)value);
        return;
    }
    for (unsigned i = 0; i < 9; i++) {
        if (value == inline_floats[i].single) {
            disasm_put(t, "%s", inline_floats[i].text);
            return;
        }
    }
    disasm_put(t, "0x%x", value);
}

static void put_sopk(text *t, const isa_row *row, const isa_info *info)
{
    unsigned imm = (unsigned)row->offset & 0xffff;

    switch (row->op) {
    case ISA_s_setreg_b32:
        disasm_put(t, " ");
        put_hwreg(t, imm);
        disasm_put(t, ", ");
        disasm_sgpr(t, row->dst, 1);
        return;
    case ISA_s_setreg_imm32_b32:
        disasm_put(t, " ");
        put_hwreg(t, imm);
        disasm_put(t, ", ");
        put_constant(t, row->literal);
        return;
    default:
        break;
    }
    disasm_put(t, " ");
    disasm_sgpr(t, row->dst, isa_registers(info->type[0]));
    disasm_put(t, ", ");
    if (row->op == ISA_s_getreg_b32) {
        put_hwreg(t, imm);
    } else if (row->op == ISA_s_call_b64) {
        disasm_put(t, "%u", imm);
    } else {
        disasm_put(t, "0x%x", imm);
    }
}

static void put_wait(text *t, const isa_row *row)
{
    isa_wait wait = isa_wait_counts(row);
    bool vm = wait.vm != ISA_VM_MAX, exp = wait.exp != ISA_EXP_MAX;
    bool lgkm = wait.lgkm != ISA_LGKM_MAX, none = !vm && !exp && !lgkm;

    if (vm || none) {
        disasm_put(t, " vmcnt(%u)", wait.vm);
    }
    if (exp || none) {
        disasm_put(t, " expcnt(%u)", wait.exp);
    }
    if (lgkm || none) {
        disasm_put(t, " lgkmcnt(%u)", wait.lgkm);
    }
}

/* Which registers an index is added to. */
static void put_gpr_idx(text *t, unsigned imm)
{
    static const char *const name[4] = {"SRC0", "SRC1", "SRC2", "DST"};
    const char *comma = "";

    if (imm > 15) {
        disasm_put(t, "0x%x", imm);
        return;
    }
    disasm_put(t, "gpr_idx(");
    for (unsigned i = 0; i < 4; i++) {
        if ((imm >> i & 1) != 0) {
            disasm_put(t, "%s%s", comma, name[i]);
            comma = ",";
        }
    }
    disasm_put(t, ")");
}

static void put_sopp(text *t, const isa_row *row, const isa_info *info)
{
    unsigned imm = (unsigned)row->offset & 0xffff;

    switch (info->access) {
    case P_VALUE:
        disasm_put(t, imm <= 64 ? " %u" : " 0x%x", imm);
        break;
    case P_INDEX:
        disasm_put(t, " ");
        put_gpr_idx(t, imm);
        break;
    case P_TARGET:
        disasm_put(t, " %u", imm);
        break;
    case P_OPTION:
        if (imm != 0) {
            disasm_put(t, " %u", imm);
        }
        break;
    case P_WAIT:
        put_wait(t, row);
        break;
    case P_MESSAGE:
        disasm_put(t, " sendmsg(MSG_INTERRUPT)");
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
        disasm_put(t, " ");
        disasm_sgpr(t, row->dst, isa_registers(info->type[0]));
        comma = ", ";
    }
    for (unsigned i = 0; i < 2; i++) {
        if (info->type[1 + i] != T_none) {
            disasm_put(t, "%s", comma);
            if (i == 1 && row->op == ISA_s_set_gpr_idx_on) {
                put_gpr_idx(t, (unsigned)row->offset >> 8 & 255);
                continue;
            }
            disasm_source(t, row, row->src[i], info->type[1 + i]);
            comma = ", ";
        }
    }
}

unsigned sim_disasm(const sim_code *code, size_t offset, char *out,
                    size_t out_size)
{
    text t = {out, out_size};

    if (offset % 4 != 0 || offset / 4 >= code->count) {
        disasm_put(&t, "%s", "");
        return 0;
    }
    const isa_row *row = &code->row[offset / 4];
    const isa_info *info = &isa_ops[row->op];
    if (row->op == ISA_UNKNOWN) {
        disasm_put(&t, ".long 0x%08x", (unsigned)code->word[offset / 4]);
        return 0;
    }
    disasm_put(&t, "%s", info->name);
    switch (row->issue) {
    case ISSUE_VALU:
        disasm_vector(&t, row, info);
        break;
    case ISSUE_SMEM:
        disasm_smem(&t, row, info);
        break;
    case ISSUE_DS:
        disasm_ds(&t, row, info);
        break;
    case ISSUE_FLAT:
        disasm_flat(&t, row, info);
        break;
    case ISSUE_MUBUF:
        disasm_mubuf(&t, row, info);
        break;
    default:
        put_scalar(&t, row, info);
        break;
    }
    return 4u * row->dwords;
}
