/* disasm.h: what the three files of the disassembler share (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_DISASM_H
#define HIPSIM_DISASM_H

#include "isa.h"

typedef struct text {
    char *at;
    size_t left; /* including the final zero */
} text;

/* Appends text, cut off where there is no room left. */
void disasm_put(text *t, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* `count` registers from `first` on; a scalar one by its code. */
void disasm_vgpr(text *t, unsigned first, unsigned count);
void disasm_sgpr(text *t, unsigned code, unsigned count);

/* A source code as an operand of this type. */
void disasm_source(text *t, const isa_row *row, unsigned code, unsigned type);

/* What follows the name, per format; of vector instructions with the suffix. */
void disasm_vector(text *t, const isa_row *row, const isa_info *info);
void disasm_smem(text *t, const isa_row *row, const isa_info *info);
void disasm_ds(text *t, const isa_row *row, const isa_info *info);
void disasm_flat(text *t, const isa_row *row, const isa_info *info);
void disasm_mubuf(text *t, const isa_row *row, const isa_info *info);

#endif
