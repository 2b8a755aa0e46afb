/* check_spread.c: how undefined bits pass from registers to registers.
 *
 * An instruction without an undefined source, the usual case, only has to
 * mark its result as defined. Otherwise its sources are taken lane by lane, as
 * DPP, SDWA and op_sel choose them, through check_bits.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "check_bits.h"
#include "exec_lanes.h"

/* ---- operands of a lane ------------------------------------------------ */

static partial scalar_operand(const wave *w, const isa_row *row, unsigned code,
                              unsigned type)
{
    const check_wave *c = check_of(w);
    partial p = {exec_operand(w, row, code, type), 0};

    if (code < SRC_ZERO) {
        p.bad = c->scalar[code];
        if (isa_registers(type) == 2) {
            p.bad |= (uint64_t)c->scalar[code + 1] << 32;
        }
    } else if (code == SRC_SCC) {
        p.bad = c->scalar[OPERAND_SCC];
    } else if (code == SRC_VCCZ) {
        p.bad = (c->scalar[SRC_VCC] | c->scalar[SRC_VCC + 1]) != 0;
    }
    return p;
}

static partial select_part(partial p, unsigned shift, uint64_t mask)
{
    return (partial){p.value >> shift & mask, p.bad >> shift & mask};
}

/* Source i of lane l after DPP, SDWA and op_sel; modifiers of the sign do not
 * change which bits are undefined. */
static partial lane_operand(const wave *w, const isa_row *row, unsigned i,
                            unsigned l)
{
    const isa_info *info = &isa_ops[row->op];
    unsigned type = info->type[1 + i], code = row->src[i];
    partial p = {0, 0};

    if (type == T_none) {
        return p;
    }
    if (code >= SRC_VGPR) {
        unsigned reg = code - SRC_VGPR;
        if (row->ext == ISA_EXT_DPP && i == 0) {
            int from = exec_dpp_lane(row->dpp_ctrl, (int)l);
            if (from < 0 || (exec_mask(w) >> from & 1) == 0) {
                return p;
            }
            l = (unsigned)from;
        }
        check_wave *c = check_of(w);
        /* Four registers: their bits are only asked for any at all. */
        for (unsigned k = 0; k < isa_registers(type); k++) {
            unsigned shift = 32 * (k & 1);
            p.value |= (uint64_t)w->v[((size_t)reg + k) * SIM_LANES + l].u
                       << shift;
            p.bad |= (uint64_t)check_vector(c, reg + k)[l] << shift;
        }
    } else {
        p = scalar_operand(w, row, code, type);
    }
    if (type == T_mask) {
        return select_part(p, l, 1);
    }
    if (row->ext == ISA_EXT_SDWA && i < 2) {
        unsigned select = row->sel[1 + i];
        return select < 4   ? select_part(p, 8 * select, 0xff)
               : select < 6 ? select_part(p, select == 5 ? 16 : 0, 0xffff)
                            : p;
    }
    bool high = (row->op_sel >> i & 1) != 0;
    if (type == T_u16 || type == T_i16 || type == T_f16 ||
        (type == T_mix && (row->op_sel_hi >> i & 1) != 0)) {
        return select_part(p, high ? 16 : 0, 0xffff);
    }
    return p;
}

/* Undefined bits of a packed result: half by half. */
static uint64_t packed_bits(const wave *w, const isa_row *row, unsigned l)
{
    const isa_info *info = &isa_ops[row->op];
    uint64_t bad[2] = {0, 0};

    for (unsigned i = 0; i < 3; i++) {
        unsigned code = row->src[i];
        if (info->type[1 + i] == T_none || code >= SRC_ZERO) {
            if (info->type[1 + i] == T_none || code < SRC_VGPR) {
                continue;
            }
        }
        check_wave *c = check_of(w);
        uint32_t whole = code >= SRC_VGPR ? check_vector(c, code - SRC_VGPR)[l]
                                          : c->scalar[code];
        bad[0] |= whole >> ((row->op_sel >> i & 1) != 0 ? 16 : 0) & 0xffff;
        bad[1] |= whole >> ((row->op_sel_hi >> i & 1) != 0 ? 16 : 0) & 0xffff;
    }
    return (bad[0] != 0 ? 0xffffu : 0) | (bad[1] != 0 ? 0xffff0000u : 0);
}

/* ---- vector instructions ----------------------------------------------- */

static bool row_is_clean(const wave *w, const isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];
    const check_wave *c = check_of(w);
    bool clean = true;

    for (unsigned i = 0; i < 3; i++) {
        unsigned code = row->src[i];
        unsigned n = isa_registers(info->type[1 + i]);
        if (info->type[1 + i] == T_none) {
            continue;
        }
        for (unsigned k = 0; k < n; k++) {
            clean =
                clean && (code >= SRC_VGPR  ? !check_any(c, code - SRC_VGPR + k)
                          : code < SRC_ZERO ? c->scalar[code + k] == 0
                                            : true);
        }
        clean = clean &&
                (code != SRC_VCCZ ||
                 (c->scalar[SRC_VCC] | c->scalar[SRC_VCC + 1]) == 0) &&
                (code != SRC_SCC || c->scalar[OPERAND_SCC] == 0);
    }
    if (row->op == ISA_v_div_fmas_f32 || row->op == ISA_v_div_fmas_f64) {
        clean = clean && (c->scalar[SRC_VCC] | c->scalar[SRC_VCC + 1]) == 0;
    }
    return clean;
}

/* x ^ x and x - x are zero whatever x is: compilers' way to say 0. */
static bool cancels(const isa_row *row)
{
    return row->src[0] == row->src[1] && row->ext == ISA_EXT_NONE &&
           (row->op == ISA_v_xor_b32 || row->op == ISA_v_sub_u32 ||
            row->op == ISA_v_subrev_u32 || row->op == ISA_v_sub_co_u32 ||
            row->op == ISA_v_subrev_co_u32);
}

/* Which bits of the destination register the result takes, and from where
 * they come: SDWA's and op_sel's placement. */
static void placement(const isa_row *row, unsigned *shift, uint32_t *field,
                      bool *keep)
{
    const isa_info *info = &isa_ops[row->op];
    unsigned type = info->type[0];

    *shift = 0;
    *field = UINT32_MAX;
    *keep = false;
    if (row->ext == ISA_EXT_SDWA && row->sel[0] < 6) {
        unsigned select = row->sel[0];
        *shift = select < 4 ? 8 * select : select == 5 ? 16 : 0;
        *field = select < 4 ? 0xff : 0xffff;
        *keep = row->dst_unused == 2;
    } else if (type == T_hi16 ||
               ((info->flags & ISA_SELECT) != 0 && type != T_u32)) {
        *shift = type == T_hi16 || (row->op_sel & 8) != 0 ? 16 : 0;
        *field = 0xffff;
        *keep = true;
    } else if (row->format == F_VOP3P && type == T_f16) {
        *field = 0xffff;
        *keep = true;
    }
}

/* Lanes that the instruction writes. */
static uint64_t written_lanes(const wave *w, const isa_row *row)
{
    uint64_t exec = exec_mask(w), write = exec;

    if (row->ext != ISA_EXT_DPP) {
        return exec;
    }
    for (unsigned l = 0; l < SIM_LANES; l++) {
        int from = exec_dpp_lane(row->dpp_ctrl, (int)l);
        bool valid = from >= 0 && (exec >> from & 1) != 0;
        bool enabled = (row->row_mask >> (l >> 4) & 1) != 0 &&
                       (row->bank_mask >> (l >> 2 & 3) & 1) != 0;
        if (!enabled || (!valid && !row->bound_zero)) {
            write &= ~(UINT64_C(1) << l);
        }
    }
    return write;
}

static void write_vector(wave *w, const isa_row *row, bool clean)
{
    const isa_info *info = &isa_ops[row->op];
    check_wave *c = check_of(w);
    unsigned n = isa_registers(info->type[0]), shift;
    bool packed = info->type[0] == T_pk16 || info->type[0] == T_pkf16;
    uint64_t write = written_lanes(w, row), carry = 0;
    uint64_t result[SIM_LANES] = {0};
    uint32_t field;
    bool keep, marked = false;

    for (unsigned k = 0; k < n; k++) {
        marked = marked || check_any(c, row->dst + k);
    }
    if (clean && !marked && (info->flags & ISA_CARRY) == 0) {
        return;
    }
    placement(row, &shift, &field, &keep);
    for (unsigned l = 0; l < SIM_LANES && !clean; l++) {
        if (packed) {
            result[l] = packed_bits(w, row, l);
            continue;
        }
        partial a = lane_operand(w, row, 0, l);
        partial b = lane_operand(w, row, 1, l);
        partial d = lane_operand(w, row, 2, l);
        if (row->op == ISA_v_div_fmas_f32 || row->op == ISA_v_div_fmas_f64) {
            partial vcc = scalar_operand(w, row, SRC_VCC, T_mask);
            d.bad |= vcc.bad >> l & 1;
        }
        result[l] = check_result_bits(row->op, a, b, d);
        carry |= (uint64_t)((a.bad | b.bad | d.bad) != 0) << l;
    }
    for (unsigned k = 0; k < n; k++) {
        uint32_t *to = check_vector(c, row->dst + k);
        for (unsigned l = 0; l < SIM_LANES; l++) {
            if ((write >> l & 1) != 0) {
                uint32_t bad = (uint32_t)(result[l] >> 32 * (k & 1)) & field;
                to[l] = (keep ? to[l] & ~(field << shift) : 0) | bad << shift;
            }
        }
        check_refresh(c, row->dst + k);
    }
    if ((info->flags & ISA_CARRY) != 0) {
        carry &= exec_mask(w);
        c->scalar[row->sdst] = (uint32_t)carry;
        c->scalar[row->sdst + 1] = (uint32_t)(carry >> 32);
    }
}

static void write_mask(wave *w, const isa_row *row, bool clean)
{
    check_wave *c = check_of(w);
    uint64_t bad = 0;

    for (uint64_t left = clean ? 0 : exec_mask(w); left != 0;
         left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        uint64_t any =
            lane_operand(w, row, 0, l).bad | lane_operand(w, row, 1, l).bad;
        bad |= (uint64_t)(any != 0) << l;
    }
    c->scalar[row->sdst] = (uint32_t)bad;
    c->scalar[row->sdst + 1] = (uint32_t)(bad >> 32);
    if (isa_compares_exec(&isa_ops[row->op])) {
        c->scalar[SRC_EXEC] = (uint32_t)bad;
        c->scalar[SRC_EXEC + 1] = (uint32_t)(bad >> 32);
    }
}

static void move_lane(wave *w, const isa_row *row)
{
    check_wave *c = check_of(w);
    uint64_t exec = exec_mask(w);
    partial select = {0, 0};

    if (row->op != ISA_v_readfirstlane_b32) {
        select = scalar_operand(w, row, row->src[1], T_u32);
    }
    if (row->op == ISA_v_writelane_b32) {
        uint32_t bad = (uint32_t)scalar_operand(w, row, row->src[0], T_u32).bad;
        check_vector(c, row->dst)[select.value & 63] =
            select.bad != 0 ? UINT32_MAX : bad;
        check_refresh(c, row->dst);
        return;
    }
    unsigned from = exec == 0 ? 0 : (unsigned)__builtin_ctzll(exec);
    if (row->op == ISA_v_readlane_b32) {
        from = select.value & 63;
    }
    partial p =
        row->src[0] >= SRC_VGPR
            ? (partial){0, check_vector(c, row->src[0] - SRC_VGPR)[from]}
            : scalar_operand(w, row, row->src[0], T_u32);
    c->scalar[row->sdst] = select.bad != 0 ? UINT32_MAX : (uint32_t)p.bad;
}

static void swap_registers(wave *w, const isa_row *row)
{
    check_wave *c = check_of(w);
    uint32_t *a = check_vector(c, row->dst);
    uint32_t *b = check_vector(c, row->src[0] - SRC_VGPR);

    for (uint64_t left = exec_mask(w); left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        uint32_t keep = a[l];
        a[l] = b[l];
        b[l] = keep;
    }
    check_refresh(c, row->dst);
    check_refresh(c, row->src[0] - SRC_VGPR);
}

void check_propagate(wave *w, const isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];

    switch (row->op) {
    case ISA_v_readfirstlane_b32:
    case ISA_v_readlane_b32:
    case ISA_v_writelane_b32:
        move_lane(w, row);
        return;
    case ISA_v_swap_b32:
        swap_registers(w, row);
        return;
    default:
        break;
    }
    bool clean = cancels(row) || row_is_clean(w, row);
    if (info->type[0] == T_mask) {
        write_mask(w, row, clean);
    } else if (info->type[0] != T_none) {
        write_vector(w, row, clean);
    }
}

/* ---- scalar instructions ----------------------------------------------- */

/* Bits of the result that are surely set, where that is easily said. */
static uint64_t surely_set(unsigned op, partial a, partial b, uint64_t bad)
{
    uint64_t value = 0;

    switch (op) {
    case ISA_s_and_b32:
    case ISA_s_and_b64:
        value = a.value & b.value;
        break;
    case ISA_s_or_b32:
    case ISA_s_or_b64:
        value = a.value | b.value;
        break;
    case ISA_s_andn2_b32:
    case ISA_s_andn2_b64:
        value = a.value & ~b.value;
        break;
    case ISA_s_lshr_b32:
    case ISA_s_lshr_b64:
        value = a.value >> (b.value & (op == ISA_s_lshr_b32 ? 31 : 63));
        break;
    default:
        break;
    }
    return value & ~bad;
}

/* Whether SCC is undefined, of an instruction with an undefined source. */
static bool scc_undefined(unsigned op, partial a, partial b, uint64_t bad)
{
    uint64_t differ = (a.value ^ b.value) & ~(a.bad | b.bad);

    switch (op) {
    case ISA_s_bitcmp0_b32:
    case ISA_s_bitcmp1_b32:
        return b.bad != 0 || (a.bad >> (b.value & 31) & 1) != 0;
    case ISA_s_bitcmp0_b64:
    case ISA_s_bitcmp1_b64:
        return b.bad != 0 || (a.bad >> (b.value & 63) & 1) != 0;
    case ISA_s_cmp_eq_u32:
    case ISA_s_cmp_lg_u32:
    case ISA_s_cmp_eq_i32:
    case ISA_s_cmp_lg_i32:
        return (differ & UINT32_MAX) == 0;
    case ISA_s_cmp_eq_u64:
    case ISA_s_cmp_lg_u64:
        return differ == 0;
    default:
        return !isa_scc_is_nonzero(op) ||
               (bad != 0 && surely_set(op, a, b, bad) == 0);
    }
}

static void set_scalar(check_wave *c, unsigned reg, unsigned count,
                       uint64_t bad)
{
    c->scalar[reg] = (uint32_t)bad;
    if (count == 2) {
        c->scalar[reg + 1] = (uint32_t)(bad >> 32);
    }
}

/* EXEC = A op EXEC, D = EXEC as it was. */
static bool saves_exec(wave *w, const isa_row *row, partial a)
{
    check_wave *c = check_of(w);
    partial exec = {exec_mask(w), 0};
    uint64_t bad;

    switch (row->op) {
    case ISA_s_and_saveexec_b64:
    case ISA_s_nand_saveexec_b64:
        bad = check_and_bits(a, exec);
        break;
    case ISA_s_or_saveexec_b64:
    case ISA_s_nor_saveexec_b64:
        bad = check_or_bits(a, exec);
        break;
    case ISA_s_xor_saveexec_b64:
    case ISA_s_xnor_saveexec_b64:
        bad = a.bad;
        break;
    case ISA_s_andn1_saveexec_b64:
    case ISA_s_andn1_wrexec_b64:
        bad = check_and_bits(check_inverse(a), exec);
        break;
    case ISA_s_andn2_saveexec_b64:
    case ISA_s_andn2_wrexec_b64:
        bad = check_and_bits(a, check_inverse(exec));
        break;
    case ISA_s_orn1_saveexec_b64:
        bad = check_or_bits(check_inverse(a), exec);
        break;
    case ISA_s_orn2_saveexec_b64:
        bad = check_or_bits(a, check_inverse(exec));
        break;
    default:
        return false;
    }
    set_scalar(c, row->dst, 2, 0);
    set_scalar(c, SRC_EXEC, 2, bad);
    c->scalar[OPERAND_SCC] = bad != 0;
    return true;
}

void check_propagate_scalar(wave *w, const isa_row *row, const check_row *facts)
{
    const isa_info *info = &isa_ops[row->op];
    check_wave *c = check_of(w);
    const partial none = {0, 0};
    partial a = none, b = none;
    uint64_t bad = 0;
    bool any = false, uses_scc = false;

    if (info->format != F_SOPK && info->type[1] != T_none) {
        a = scalar_operand(w, row, row->src[0], info->type[1]);
    }
    if (info->format != F_SOPK && info->type[2] != T_none) {
        b = scalar_operand(w, row, row->src[1], info->type[2]);
    }
    for (unsigned i = 0; i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        for (unsigned r = use->first;
             use->role != ROLE_RESULT && r < (unsigned)use->first + use->count;
             r++) {
            any = any || c->scalar[r] != 0;
            uses_scc = uses_scc || r == OPERAND_SCC;
        }
    }
    if (saves_exec(w, row, a)) {
        return;
    }
    bool choice = c->scalar[OPERAND_SCC] == 0;
    uint64_t old = c->scalar[row->dst % OPERAND_SCALARS];
    switch (row->op) {
    case ISA_s_cselect_b32:
    case ISA_s_cselect_b64:
        bad = !choice       ? a.bad | b.bad | (a.value ^ b.value)
              : w->scc != 0 ? a.bad
                            : b.bad;
        break;
    case ISA_s_cmov_b32:
    case ISA_s_cmov_b64:
    case ISA_s_cmovk_i32:
        old |= isa_registers(info->type[0]) == 2
                   ? (uint64_t)c->scalar[row->dst + 1] << 32
                   : 0;
        bad = !choice ? UINT64_MAX : w->scc != 0 ? a.bad : old;
        break;
    case ISA_s_bitset0_b32:
    case ISA_s_bitset1_b32:
        bad = a.bad != 0 ? UINT64_MAX : old & ~(UINT64_C(1) << (a.value & 31));
        break;
    case ISA_s_sub_u32:
    case ISA_s_sub_i32:
    case ISA_s_xor_b32:
    case ISA_s_xor_b64:
        if (row->src[0] == row->src[1]) { /* zero, whatever it was */
            any = false;
            break;
        }
        bad = check_result_bits(row->op, a, b, none);
        break;
    default:
        bad = info->format == F_SOPK || uses_scc
                  ? (any ? UINT64_MAX : 0)
                  : check_result_bits(row->op, a, b, none);
        if (info->format == F_SOP1 && any && a.bad == 0) {
            bad = UINT64_MAX; /* the old destination */
        }
        break;
    }
    bool scc = any && scc_undefined(row->op, a, b, bad);
    for (unsigned i = 0; i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        if (use->role != ROLE_RESULT) {
            continue;
        }
        if (use->first == OPERAND_SCC) {
            c->scalar[OPERAND_SCC] = scc;
        } else {
            set_scalar(c, use->first, use->count, bad);
        }
    }
}

/* ---- lane exchange through the LDS crossbar ---------------------------- */

void check_exchange(wave *w, const isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];
    check_wave *c = check_of(w);
    uint64_t exec = exec_mask(w);
    uint32_t result[SIM_LANES] = {0};

    if (row->issue != ISSUE_DS ||
        (info->access != M_SWIZZLE && info->access != M_PERMUTE &&
         info->access != M_BPERMUTE)) {
        return;
    }
    const lane *address = w->v + (size_t)row->addr * SIM_LANES;
    const uint32_t *from =
        check_vector(c, info->access == M_SWIZZLE ? row->addr : row->data);
    for (uint64_t left = exec; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        unsigned other = (address[l].u + (unsigned)row->offset) / 4 % SIM_LANES;
        if (info->access == M_PERMUTE) {
            result[other] = from[l];
            continue;
        }
        if (info->access == M_SWIZZLE) {
            other = exec_swizzle_lane((unsigned)row->offset, l);
        }
        result[l] = (exec >> other & 1) != 0 ? from[other] : 0;
    }
    for (uint64_t left = exec; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        check_vector(c, row->dst)[l] = result[l];
    }
    check_refresh(c, row->dst);
}
