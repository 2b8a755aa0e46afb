/* disasm_memory.c: SMEM, DS, FLAT (with GLOBAL and SCRATCH) and MUBUF as text.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "disasm.h"

void disasm_smem(text *t, const isa_row *row, const isa_info *info)
{
    if (info->access == M_CACHE) {
        return;
    }
    disasm_put(t, " ");
    disasm_sgpr(t, row->dst, info->access == M_TIME ? 2 : info->bytes / 4u);
    if (info->access == M_TIME) {
        return;
    }
    disasm_put(t, ", ");
    disasm_sgpr(t, row->base, info->access == M_BUFFER_LOAD ? 4 : 2);
    disasm_put(t, ", ");
    if (row->soffset_en || !row->imm) {
        disasm_sgpr(t, row->soffset, 1);
        if (row->imm) {
            disasm_put(t, " offset:");
        }
    }
    if (row->imm) {
        disasm_put(t, "%s0x%x", row->offset < 0 ? "-" : "",
                   row->offset < 0 ? 0u - (unsigned)row->offset
                                   : (unsigned)row->offset);
    }
    disasm_put(t, "%s", row->glc ? " glc" : "");
}

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
    disasm_put(t, " offset:");
    if (imm >= 0xe000) {
        disasm_put(t, "swizzle(FFT,%u)", imm & 31);
    } else if (imm >= 0xc000) {
        disasm_put(t, "swizzle(ROTATE,%u,%u)", imm >> 10 & 1, imm >> 5 & 31);
    } else if ((imm & 0xff00) == 0x8000) {
        disasm_put(t, "swizzle(QUAD_PERM,%u,%u,%u,%u)", imm & 3, imm >> 2 & 3,
                   imm >> 4 & 3, imm >> 6 & 3);
    } else if (imm & 0x8000) {
        disasm_put(t, "%u", imm);
    } else if (and == 31 && or == 0 && bit_alone(xor)) {
        disasm_put(t, "swizzle(SWAP,%u)", xor);
    } else if (and == 31 && or == 0 && xor > 0 && bit_alone(xor + 1)) {
        disasm_put(t, "swizzle(REVERSE,%u)", xor + 1);
    } else if (group > 1 && bit_alone(group) && or < group && xor == 0) {
        disasm_put(t, "swizzle(BROADCAST,%u,%u)", group, or);
    } else {
        unsigned zero = or ^ xor, one = (and | or) ^ xor;
        disasm_put(t, "swizzle(BITMASK_PERM,\"");
        for (int bit = 4; bit >= 0; bit--) {
            unsigned z = zero >> bit & 1, o = one >> bit & 1;
            disasm_put(t, "%c", z == o ? (z ? '1' : '0') : (z ? 'i' : 'p'));
        }
        disasm_put(t, "\")");
    }
}

void disasm_ds(text *t, const isa_row *row, const isa_info *info)
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
            disasm_put(t, "%s", comma);
            disasm_vgpr(t, fields[i].first, fields[i].count);
            comma = ", ";
        }
    }
    if (info->access == M_SWIZZLE) {
        put_swizzle(t, imm);
    } else if (info->access >= M_READ2 && info->access <= M_XCHG2ST64) {
        if (imm & 255) {
            disasm_put(t, " offset0:%u", imm & 255);
        }
        if (imm >> 8) {
            disasm_put(t, " offset1:%u", imm >> 8);
        }
    } else if (imm != 0) {
        disasm_put(t, " offset:%u", imm);
    }
    disasm_put(t, "%s", row->gds ? " gds" : "");
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
        disasm_put(t, "off");
    } else {
        disasm_vgpr(t, row->addr,
                    row->base == 0x7f && row->format != F_SCRATCH ? 2 : 1);
    }
}

void disasm_flat(text *t, const isa_row *row, const isa_info *info)
{
    bool atomic = info->access == M_ATOMIC;
    bool result = atomic ? row->glc != 0 : !isa_is_store(info);

    disasm_put(t, " ");
    if (result && !row->lds) {
        disasm_vgpr(t, row->dst, (info->bytes + 3u) / 4u);
        disasm_put(t, ", ");
    }
    put_flat_address(t, row);
    if (atomic || isa_is_store(info)) {
        disasm_put(t, ", ");
        disasm_vgpr(t, row->data, data_registers(info));
    }
    if (row->format != F_FLAT) {
        disasm_put(t, ", ");
        if (row->base == 0x7f) {
            disasm_put(t, "off");
        } else {
            disasm_sgpr(t, row->base, row->format == F_GLOBAL ? 2 : 1);
        }
    }
    if (row->offset != 0) {
        disasm_put(t, " offset:%d", row->offset);
    }
    disasm_put(t, "%s%s%s", row->glc ? " glc" : "", row->slc ? " slc" : "",
               row->lds ? " lds" : "");
}

void disasm_mubuf(text *t, const isa_row *row, const isa_info *info)
{
    if (info->access == M_CACHE) {
        return;
    }
    disasm_put(t, " ");
    if (!row->lds) {
        disasm_vgpr(t, row->data, data_registers(info));
        disasm_put(t, ", ");
    }
    if (row->offen || row->idxen) {
        disasm_vgpr(t, row->addr, row->offen && row->idxen ? 2 : 1);
    } else {
        disasm_put(t, "off");
    }
    disasm_put(t, ", ");
    disasm_sgpr(t, row->base, 4);
    disasm_put(t, ", ");
    disasm_source(t, row, row->soffset, T_u32);
    disasm_put(t, "%s%s", row->idxen ? " idxen" : "",
               row->offen ? " offen" : "");
    if (row->offset != 0) {
        disasm_put(t, " offset:%d", row->offset);
    }
    disasm_put(t, "%s%s%s", row->glc ? " glc" : "", row->slc ? " slc" : "",
               row->lds ? " lds" : "");
}
