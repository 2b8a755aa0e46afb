/* decode.h: what the two halves of the decoder share (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_DECODE_H
#define HIPSIM_DECODE_H

#include "isa.h"

static inline uint32_t field(uint32_t word, unsigned low, unsigned bits)
{
    return word >> low & ((1u << bits) - 1u);
}

static inline void need_vgprs(isa_row *row, unsigned first, unsigned count)
{
    if (first + count > row->vgpr_end) {
        row->vgpr_end = (uint16_t)(first + count);
    }
}

/* A scalar register, or an aligned run of them within one class. */
bool decode_scalar_exists(unsigned code, unsigned registers);

/* A source code that an operand of this many registers may have. */
bool decode_source_fits(unsigned code, unsigned registers);

/* Scalar memory, LDS, FLAT (with GLOBAL and SCRATCH) and buffers. */
void decode_smem(const uint32_t *word, size_t left, isa_row *row);
void decode_ds(const uint32_t *word, size_t left, isa_row *row);
void decode_flat(const uint32_t *word, size_t left, isa_row *row);
void decode_mubuf(const uint32_t *word, size_t left, isa_row *row);

#endif
