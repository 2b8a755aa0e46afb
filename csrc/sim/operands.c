/* operands.c: which registers an instruction reads and writes, from the
 * types and statements of the .def lists.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "operands.h"

#include <string.h>

/* Statements of the scalar lists, searched for the wave's own registers. */
static const char *const statements[ISA_COUNT] = {
#define SOP2(opcode, name, d, a, b, ...) [ISA_##name] = #__VA_ARGS__,
#include "sop2.def"
#define SOP1(opcode, name, d, a, ...) [ISA_##name] = #__VA_ARGS__,
#include "sop1.def"
#define SOPK(opcode, name, d, use, ...) [ISA_##name] = #__VA_ARGS__,
#include "sopk.def"
#define SOPC(opcode, name, a, b, ...) [ISA_##name] = #__VA_ARGS__,
#include "sopc.def"
#define SOPP(opcode, name, style, ...) [ISA_##name] = #__VA_ARGS__,
#include "sopp.def"
};

static void add(operands *out, unsigned first, unsigned count,
                operand_role role)
{
    if (out->count < OPERAND_MAX) {
        out->of[out->count++] =
            (operand){(uint16_t)first, (uint8_t)count, (uint8_t)role};
    }
}

/* A source code: a register, or one of the values made of registers. */
static void add_source(operands *out, unsigned code, unsigned count,
                       operand_role role)
{
    if (code >= SRC_VGPR || code < SRC_ZERO) {
        add(out, code, count, role);
    } else if (code == SRC_VCCZ) {
        add(out, SRC_VCC, 2, role);
    } else if (code == SRC_SCC) {
        add(out, OPERAND_SCC, 1, role);
    }
}

static bool is_assignment(const char *after)
{
    return after[0] == ' ' && after[1] == '=' && after[2] == ' ';
}

/* True if the statement uses the value that `name` had before. */
static bool reads(const char *text, const char *name)
{
    const char *at = strstr(text, name);

    return at != NULL && !is_assignment(at + strlen(name));
}

static bool assigns(const char *text, const char *name)
{
    const char *at = strstr(text, name);

    while (at != NULL && !is_assignment(at + strlen(name))) {
        at = strstr(at + 1, name);
    }
    return at != NULL;
}

static void scalar_operands(const isa_row *row, operands *out)
{
    const isa_info *info = &isa_ops[row->op];
    const char *text = statements[row->op];
    bool reads_old = false;

    if (text == NULL) {
        return;
    }
    switch (info->format) {
    case F_SOPK:
        reads_old = info->access != K_W || strstr(text, "D +") != NULL ||
                    strstr(text, "D *") != NULL || strstr(text, ": D") != NULL;
        break;
    case F_SOP1:
        reads_old = strstr(text, "D &=") != NULL ||
                    strstr(text, "D |=") != NULL || strstr(text, ": D") != NULL;
        break;
    default:
        break;
    }
    for (unsigned i = 0; i < 2 && info->format != F_SOPK; i++) {
        if (info->type[1 + i] != T_none) {
            add_source(out, row->src[i], isa_registers(info->type[1 + i]),
                       ROLE_SOURCE);
        }
    }
    if (reads_old && info->type[0] != T_none) {
        add(out, row->dst, isa_registers(info->type[0]), ROLE_SOURCE);
    }
    if (reads(text, "SCC")) {
        add(out, OPERAND_SCC, 1, ROLE_SOURCE);
    }
    if (reads(text, "VCC")) {
        add(out, SRC_VCC, 2, ROLE_SOURCE);
    }
    if (strstr(text, "w->s[SRC_M0]") != NULL ||
        strstr(text, "_relative(") != NULL) {
        add(out, SRC_M0, 1, ROLE_SOURCE);
    }
    bool writes =
        info->format == F_SOPK ? info->access == K_W : info->type[0] != T_none;
    if (writes && info->format != F_SOPC) {
        add(out, row->dst, isa_registers(info->type[0]), ROLE_RESULT);
    }
    if (assigns(text, "SCC")) {
        add(out, OPERAND_SCC, 1, ROLE_RESULT);
    }
    if (assigns(text, "EXEC")) {
        add(out, SRC_EXEC, 2, ROLE_RESULT);
    }
}

static void vector_operands(const isa_row *row, operands *out)
{
    const isa_info *info = &isa_ops[row->op];
    bool lane_access =
        row->op == ISA_v_readlane_b32 || row->op == ISA_v_writelane_b32;

    for (unsigned i = 0; i < 3; i++) {
        unsigned type = info->type[1 + i];
        /* v_readlane's second source and v_writelane's say which lane. */
        bool selects = lane_access && i == 1;
        if (type != T_none && !(lane_access && i == 2)) {
            add_source(out, row->src[i], isa_registers(type),
                       selects ? ROLE_LANE : ROLE_SOURCE);
        }
    }
    if (row->op == ISA_v_div_fmas_f32 || row->op == ISA_v_div_fmas_f64) {
        add(out, SRC_VCC, 2, ROLE_SOURCE);
    }
    if (row->op == ISA_v_swap_b32) {
        add(out, SRC_VGPR + row->dst, 1, ROLE_SOURCE);
        add(out, row->src[0], 1, ROLE_RESULT);
    }
    if (row->op == ISA_v_readlane_b32 || row->op == ISA_v_readfirstlane_b32) {
        add(out, row->sdst, 1, ROLE_RESULT);
    } else if (info->type[0] == T_mask) {
        add(out, row->sdst, 2, ROLE_RESULT);
        if (isa_compares_exec(info)) {
            add(out, SRC_EXEC, 2, ROLE_RESULT);
        }
    } else if (info->type[0] != T_none) {
        add(out, SRC_VGPR + row->dst, isa_registers(info->type[0]),
            ROLE_RESULT);
    }
    if ((info->flags & ISA_CARRY) != 0) {
        add(out, row->sdst, 2, ROLE_RESULT);
    }
}

static void smem_operands(const isa_row *row, operands *out)
{
    const isa_info *info = &isa_ops[row->op];

    if (info->access == M_CACHE) {
        return;
    }
    if (info->access != M_TIME) {
        add(out, row->base, info->access == M_BUFFER_LOAD ? 4 : 2,
            ROLE_ADDRESS);
        if (row->soffset_en || !row->imm) {
            add_source(out, row->soffset, 1, ROLE_ADDRESS);
        }
    }
    add(out, row->dst, info->bytes / 4u,
        info->access == M_STORE ? ROLE_DATA : ROLE_RESULT);
}

/* Registers of one element in memory. */
static unsigned element(const isa_info *info)
{
    return (info->bytes + 3u) / 4u;
}

static void lds_operands(const isa_row *row, operands *out)
{
    const isa_info *info = &isa_ops[row->op];
    const isa_ds_use use = isa_ds_fields(info);
    bool lanes = info->access == M_PERMUTE || info->access == M_BPERMUTE;

    if (use.addr > 0) {
        add(out, SRC_VGPR + row->addr, use.addr,
            info->access == M_SWIZZLE ? ROLE_SOURCE : ROLE_ADDRESS);
    } else if (use.dst > 0) { /* ds_append, ds_consume */
        add(out, SRC_M0, 1, ROLE_ADDRESS);
    }
    if (use.data > 0) {
        add(out, SRC_VGPR + row->data, use.data,
            lanes ? ROLE_SOURCE : ROLE_DATA);
    }
    if (use.data2 > 0) {
        add(out, SRC_VGPR + row->data2, use.data2, ROLE_DATA);
    }
    if (use.dst > 0) {
        add(out, SRC_VGPR + row->dst, use.dst, ROLE_RESULT);
    }
}

static void vmem_operands(const isa_row *row, operands *out)
{
    const isa_info *info = &isa_ops[row->op];
    unsigned n = element(info);
    bool atomic = info->access == M_ATOMIC, store = isa_is_store(info);

    if (info->access == M_CACHE) {
        return;
    }
    if (row->issue == ISSUE_MUBUF) {
        add(out, row->base, 4, ROLE_ADDRESS);
        add_source(out, row->soffset, 1, ROLE_ADDRESS);
        if (row->offen || row->idxen) {
            add(out, SRC_VGPR + row->addr, row->offen && row->idxen ? 2 : 1,
                ROLE_ADDRESS);
        }
    } else {
        bool scalar = row->base != 0x7f;
        bool scratch = row->format == F_SCRATCH;
        if (scalar) {
            add(out, row->base, scratch ? 1 : 2, ROLE_ADDRESS);
        }
        if (!(scratch && scalar)) {
            add(out, SRC_VGPR + row->addr, scratch || scalar ? 1 : 2,
                ROLE_ADDRESS);
        }
        if (scratch) {
            add(out, SRC_FLAT_SCRATCH, 2, ROLE_ADDRESS);
        }
    }
    if (store || atomic) {
        bool two = (info->flags & ISA_TWO_DATA) != 0;
        add(out, SRC_VGPR + row->data, two ? 2 * n : n, ROLE_DATA);
    }
    if (row->lds) {
        add(out, SRC_M0, 1, ROLE_ADDRESS);
    } else if (atomic ? row->glc != 0 : !store) {
        add(out, SRC_VGPR + row->dst, n, ROLE_RESULT);
    }
}

void isa_operands(const isa_row *row, operands *out)
{
    out->count = 0;
    switch (row->issue) {
    case ISSUE_SCALAR:
        scalar_operands(row, out);
        break;
    case ISSUE_SMEM:
        smem_operands(row, out);
        break;
    case ISSUE_VALU:
        vector_operands(row, out);
        break;
    case ISSUE_DS:
        lds_operands(row, out);
        break;
    case ISSUE_FLAT:
    case ISSUE_MUBUF:
        vmem_operands(row, out);
        break;
    default:
        break;
    }
}

bool isa_scc_is_nonzero(unsigned op)
{
    return statements[op] != NULL &&
           strstr(statements[op], "SCC = D != 0") != NULL;
}
