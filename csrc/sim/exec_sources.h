/* exec_sources.h: the sources of a vector instruction as rows of 64 values,
 * after DPP, SDWA, op_sel, widening, sign modifiers and flushing; a part of
 * exec_vector.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "exec.h"
#include "exec_float.h"
#include "exec_lanes.h"

#include <string.h>

static void fill(lane *row, uint32_t value)
{
    for (unsigned l = 0; l < SIM_LANES; l++) {
        row[l].u = value;
    }
}

/* One bit of `mask` per lane, as 0 or 1. */
static void spread(lane *row, uint64_t mask)
{
    uint32_t low = (uint32_t)mask, high = (uint32_t)(mask >> 32);
    for (unsigned l = 0; l < 32; l++) {
        row[l].u = low >> l & 1;
    }
    for (unsigned l = 0; l < 32; l++) {
        row[32 + l].u = high >> l & 1;
    }
}

/* The source as it stands: the register's row, or a row of one value. */
static const lane *raw_source(const wave *w, const isa_row *row, unsigned i,
                              unsigned type, lane *buffer)
{
    unsigned code = row->src[i];

    if (code >= SRC_VGPR) {
        return w->v + (size_t)(code - SRC_VGPR) * SIM_LANES;
    }
    uint64_t value = exec_operand(w, row, code, type);
    if (type == T_mask) {
        spread(buffer, value);
    } else {
        fill(buffer, (uint32_t)value);
        if (isa_registers(type) == 2) {
            fill(buffer + SIM_LANES, (uint32_t)(value >> 32));
        }
    }
    return buffer;
}

/* Moves lanes as the DPP word says and takes lanes without a result out of
 * *write. A source lane that EXEC disables counts as invalid. */
static void apply_dpp(const wave *w, const isa_row *row, const lane *from,
                      lane *to, uint64_t *write)
{
    uint64_t exec = exec_mask(w);

    for (int l = 0; l < SIM_LANES; l++) {
        int source = exec_dpp_lane(row->dpp_ctrl, l);
        bool valid = source >= 0 && (exec >> source & 1) != 0;
        bool enabled = (row->row_mask >> (l >> 4) & 1) != 0 &&
                       (row->bank_mask >> (l >> 2 & 3) & 1) != 0;
        to[l].u = valid ? from[source].u : 0;
        if (!enabled || (!valid && !row->bound_zero)) {
            *write &= ~(UINT64_C(1) << l);
        }
    }
}

/* Byte or word of each lane, SDWA. */
static void apply_select(unsigned select, bool sign, const lane *from, lane *to)
{
    unsigned bits = select < 4 ? 8u : select < 6 ? 16u : 32u;
    unsigned shift = select < 4 ? 8 * select : select == 5 ? 16u : 0;

    for (unsigned l = 0; l < SIM_LANES; l++) {
        uint32_t top = from[l].u >> shift << (32 - bits);
        to[l].u =
            sign ? (uint32_t)((int32_t)top >> (32 - bits)) : top >> (32 - bits);
    }
}

/* 16-bit values to the form the .def lists work on. */
static void widen(unsigned type, unsigned shift, const lane *from, lane *to)
{
    if (type == T_f16) {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            to[l].f = half_to_float(from[l].u >> shift & 0xffff);
        }
    } else if (type == T_i16) {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            to[l].i = (int32_t)(from[l].u >> shift << 16) >> 16;
        }
    } else {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            to[l].u = from[l].u >> shift & 0xffff;
        }
    }
}

/* Sign modifiers, on the register that holds the sign. */
static void apply_sign(unsigned type, bool absolute, bool negate,
                       const lane *from, lane *to)
{
    uint32_t sign = type == T_u16 ? 0x8000u : 0x80000000u; /* v_pack */
    uint32_t keep = absolute ? ~sign : 0xffffffffu;
    uint32_t flip = negate ? sign : 0;
    for (unsigned l = 0; l < SIM_LANES; l++) {
        to[l].u = (from[l].u & keep) ^ flip;
    }
}

/* Denormals of this type's own format to zero. */
static void flush_row(unsigned type, lane *row)
{
    if (type == T_f64) {
        for (unsigned l = 0; l < SIM_LANES; l++) {
            if ((row[SIM_LANES + l].u & 0x7ff00000u) == 0) {
                row[l].u = 0;
                row[SIM_LANES + l].u &= 0x80000000u;
            }
        }
        return;
    }
    uint32_t least = type == T_f32 || type == T_mix ? 1u << 23 : 113u << 23;
    for (unsigned l = 0; l < SIM_LANES; l++) {
        bool denormal = (row[l].u & 0x7fffffffu) < least;
        row[l].u &= denormal ? 0x80000000u : 0xffffffffu;
    }
}

/* MODE's two denormal bits for a type: 1 inputs, 2 outputs are kept. */
static unsigned denormals(const wave *w, unsigned type)
{
    unsigned at =
        type == T_f32 || type == T_mix ? MODE_DENORM_F32 : MODE_DENORM_F16_F64;
    return w->mode >> at & 3;
}

/* Source i with everything done to it that the encoding asks for. `half`
 * is 1 for the high halves of a packed instruction. */
static const lane *source(const wave *w, const isa_row *row, unsigned i,
                          unsigned half, lane *buffer, uint64_t *write)
{
    const isa_info *info = &isa_ops[row->op];
    unsigned type = info->type[1 + i];
    bool packed = row->format == F_VOP3P;
    bool mixed_half = type == T_mix && (row->op_sel_hi >> i & 1) != 0;
    bool negate = row->neg >> i & 1, absolute = row->abs >> i & 1;

    if (type == T_none) {
        return buffer;
    }
    /* Packed integers take 32-bit constants, mixed halves 16-bit ones. */
    unsigned constant = mixed_half ? (unsigned)T_f16
                        : packed && !isa_is_float(type) && type != T_mask
                            ? (unsigned)T_u32
                            : type;
    const lane *from = raw_source(w, row, i, constant, buffer);
    if (type == T_mask) {
        return from;
    }
    if (row->ext == ISA_EXT_DPP && i == 0) {
        apply_dpp(w, row, from, buffer, write);
        from = buffer;
    }
    if (row->ext == ISA_EXT_SDWA && i < 2) {
        apply_select(row->sel[1 + i], row->sext >> i & 1, from, buffer);
        from = buffer;
    }
    if (type == T_pk16 || type == T_pkf16) {
        unsigned low = (row->op_sel >> i & 1) != 0 ? 16 : 0;
        unsigned high = (row->op_sel_hi >> i & 1) != 0 ? 16 : 0;
        uint32_t flip = type == T_pk16
                            ? 0
                            : (negate ? 0x8000u : 0) |
                                  (row->neg_hi >> i & 1 ? 0x80000000u : 0);
        for (unsigned l = 0; l < SIM_LANES; l++) {
            uint32_t v = from[l].u;
            buffer[l].u = ((v >> low & 0xffff) | v >> high << 16) ^ flip;
        }
        return buffer;
    }
    if (packed && type == T_mix) {
        absolute = row->neg_hi >> i & 1;
    }
    if (type == T_u16 || type == T_i16 || type == T_f16 || mixed_half) {
        unsigned selects =
            packed && !mixed_half && half ? row->op_sel_hi : row->op_sel;
        if (packed && half) {
            negate = row->neg_hi >> i & 1;
        }
        widen(mixed_half ? (unsigned)T_f16 : type,
              (selects >> i & 1) != 0 ? 16 : 0, from, buffer);
        from = buffer;
    }
    bool wide = isa_registers(type) == 2;
    if (isa_takes_sign(row, i) && (absolute || negate)) {
        if (wide) {
            apply_sign(type, absolute, negate, from + SIM_LANES,
                       buffer + SIM_LANES);
            if (from != buffer) {
                memcpy(buffer, from, SIM_LANES * sizeof *buffer);
            }
        } else {
            apply_sign(type, absolute, negate, from, buffer);
        }
        from = buffer;
    }
    if (isa_is_float(type) && (denormals(w, type) & 1) == 0) {
        if (from != buffer) {
            memcpy(buffer, from,
                   (wide ? 2u : 1u) * (size_t)SIM_LANES * sizeof *buffer);
        }
        flush_row(type, buffer);
        from = buffer;
    }
    return from;
}
