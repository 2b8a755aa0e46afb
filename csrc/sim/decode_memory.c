/* decode_memory.c: instruction words of the memory formats -> isa_row.
 *
 * Source: Vega ISA chapter 13.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "decode.h"

void decode_smem(const uint32_t *word, size_t left, isa_row *row)
{
    row->issue = ISSUE_SMEM;
    row->format = F_SMEM;
    if (left < 2) {
        return;
    }
    row->dwords = 2;
    row->op = (uint16_t)isa_find(F_SMEM, field(word[0], 18, 8));
    row->base = (uint8_t)(field(word[0], 0, 6) * 2);
    row->dst = (uint8_t)field(word[0], 6, 7);
    row->soffset_en = (uint8_t)field(word[0], 14, 1);
    row->glc = (uint8_t)field(word[0], 16, 1);
    row->imm = (uint8_t)field(word[0], 17, 1);
    row->offset = (int32_t)(word[1] << 11) >> 11;
    row->soffset = (uint8_t)(row->soffset_en ? word[1] >> 25 : word[1] & 0x7f);

    const isa_info *info = &isa_ops[row->op];
    unsigned registers = info->access == M_TIME ? 2u : info->bytes / 4u;
    bool addressed = info->access != M_CACHE && info->access != M_TIME;
    bool buffer = info->access == M_BUFFER_LOAD;
    if ((registers > 0 && !decode_scalar_exists(row->dst, registers)) ||
        (addressed && (row->soffset_en || !row->imm) &&
         !decode_scalar_exists(row->soffset, 1)) ||
        (addressed && !decode_scalar_exists(row->base, buffer ? 4 : 2)) ||
        (registers > 0 && (row->dst == SRC_M0 || row->dst >= SRC_EXEC)) ||
        (!addressed && (row->imm || row->glc || row->soffset_en)) ||
        (info->access == M_CACHE && (word[0] & 0x3ffff) != 0)) {
        row->op = ISA_UNKNOWN;
    }
}

void decode_ds(const uint32_t *word, size_t left, isa_row *row)
{
    row->issue = ISSUE_DS;
    row->format = F_DS;
    if (left < 2) {
        return;
    }
    row->dwords = 2;
    row->op = (uint16_t)isa_find(F_DS, field(word[0], 17, 8));
    row->offset = (int32_t)field(word[0], 0, 16);
    row->gds = (uint8_t)field(word[0], 16, 1);
    row->addr = (uint8_t)field(word[1], 0, 8);
    row->data = (uint8_t)field(word[1], 8, 8);
    row->data2 = (uint8_t)field(word[1], 16, 8);
    row->dst = (uint8_t)field(word[1], 24, 8);

    const isa_ds_use use = isa_ds_fields(&isa_ops[row->op]);
    bool lanes = isa_ops[row->op].access == M_PERMUTE ||
                 isa_ops[row->op].access == M_BPERMUTE;
    if (field(word[0], 25, 1) != 0 || (lanes && row->gds) ||
        (use.addr == 0 && row->addr != 0) ||
        (use.data == 0 && row->data != 0) ||
        (use.data2 == 0 && row->data2 != 0) ||
        (use.dst == 0 && row->dst != 0)) {
        row->op = ISA_UNKNOWN;
    }
    need_vgprs(row, row->addr, use.addr);
    need_vgprs(row, row->data, use.data);
    need_vgprs(row, row->data2, use.data2);
    need_vgprs(row, row->dst, use.dst);
}

/* Loads that may write to LDS instead of a register. */
static bool loads_to_lds(unsigned op)
{
    const isa_info *info = &isa_ops[op];

    return (info->access == M_LOAD && info->bytes == 4) ||
           (info->access >= M_LOAD_I8 && info->access <= M_LOAD_U16);
}

static void need_data(isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];
    unsigned registers = (info->bytes + 3u) / 4u;
    bool store = info->access == M_STORE ||
                 (info->access >= M_STORE_8 && info->access <= M_STORE_16_HI);

    if (info->access == M_ATOMIC) {
        bool two = (info->flags & ISA_TWO_DATA) != 0;
        need_vgprs(row, row->data, two ? 2 * registers : registers);
        if (row->glc) {
            need_vgprs(row, row->dst, registers);
        }
    } else if (!row->lds) {
        need_vgprs(row, store ? row->data : row->dst, registers);
    }
}

void decode_flat(const uint32_t *word, size_t left, isa_row *row)
{
    static const uint8_t formats[4] = {F_FLAT, F_SCRATCH, F_GLOBAL, F_NONE};
    unsigned segment = field(word[0], 14, 2);

    row->issue = ISSUE_FLAT;
    row->format = formats[segment];
    if (left < 2 || segment == 3) {
        return;
    }
    row->dwords = 2;
    row->op = (uint16_t)isa_find(row->format, field(word[0], 18, 7));
    row->offset = segment == 0 ? (int32_t)field(word[0], 0, 12)
                               : (int32_t)(word[0] << 19) >> 19;
    row->lds = (uint8_t)field(word[0], 13, 1);
    row->glc = (uint8_t)field(word[0], 16, 1);
    row->slc = (uint8_t)field(word[0], 17, 1);
    row->addr = (uint8_t)field(word[1], 0, 8);
    row->data = (uint8_t)field(word[1], 8, 8);
    row->base = (uint8_t)(segment == 0 ? 0x7f : field(word[1], 16, 7));
    row->dst = (uint8_t)field(word[1], 24, 8);
    /* Bit 55 names accumulation registers, which gfx906 lacks. */
    if ((row->lds && (segment != 2 || !loads_to_lds(row->op))) ||
        field(word[1], 23, 1) != 0 ||
        (segment == 0 &&
         (field(word[0], 12, 1) != 0 || field(word[1], 16, 7) != 0)) ||
        (row->base != 0x7f &&
         (!decode_scalar_exists(row->base, segment == 2 ? 2 : 1) ||
          (segment == 2 && row->base == SRC_EXEC)))) {
        row->op = ISA_UNKNOWN;
    }
    need_data(row);
    if (segment == 1) {
        if (row->base == 0x7f) {
            need_vgprs(row, row->addr, 1);
        }
    } else {
        need_vgprs(row, row->addr, row->base == 0x7f ? 2 : 1);
    }
}

void decode_mubuf(const uint32_t *word, size_t left, isa_row *row)
{
    row->issue = ISSUE_MUBUF;
    row->format = F_MUBUF;
    if (left < 2) {
        return;
    }
    row->dwords = 2;
    row->op = (uint16_t)isa_find(F_MUBUF, field(word[0], 18, 7));
    row->offset = (int32_t)field(word[0], 0, 12);
    row->offen = (uint8_t)field(word[0], 12, 1);
    row->idxen = (uint8_t)field(word[0], 13, 1);
    row->glc = (uint8_t)field(word[0], 14, 1);
    row->lds = (uint8_t)field(word[0], 16, 1);
    row->slc = (uint8_t)field(word[0], 17, 1);
    row->addr = (uint8_t)field(word[1], 0, 8);
    row->data = row->dst = (uint8_t)field(word[1], 8, 8);
    row->base = (uint8_t)(field(word[1], 16, 5) * 4);
    row->tfe = (uint8_t)field(word[1], 23, 1);
    row->soffset = (uint8_t)field(word[1], 24, 8);
    if (isa_ops[row->op].access == M_CACHE) {
        if ((word[0] & 0x3ffff) != 0 || word[1] != 0) {
            row->op = ISA_UNKNOWN;
        }
        return;
    }
    if ((row->lds && !loads_to_lds(row->op)) || row->tfe ||
        !decode_scalar_exists(row->base, 4) ||
        !decode_source_fits(row->soffset, 1) ||
        row->soffset >= SRC_LDS_DIRECT) {
        row->op = ISA_UNKNOWN;
    }
    need_data(row);
    if (row->offen || row->idxen) {
        need_vgprs(row, row->addr, row->offen && row->idxen ? 2 : 1);
    }
}
