/* operands.h: which registers an instruction reads and writes (internal).
 *
 * Scalar registers have their 7-bit codes, SCC the number after M0, EXEC and
 * the rest; vector registers stand above them as in source codes.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_OPERANDS_H
#define HIPSIM_OPERANDS_H

#include "isa.h"

enum { OPERAND_SCC = 128, OPERAND_SCALARS = 129, OPERAND_MAX = 10 };

typedef enum operand_role {
    ROLE_SOURCE,  /* a value that is computed with or tested */
    ROLE_ADDRESS, /* decides which memory is accessed */
    ROLE_DATA,    /* goes to memory */
    ROLE_LANE,    /* lane select of readlane and writelane */
    ROLE_RESULT   /* written */
} operand_role;

/* `count` registers from `first` on; VGPR n is SRC_VGPR + n. */
typedef struct operand {
    uint16_t first;
    uint8_t count;
    uint8_t role; /* operand_role */
} operand;

typedef struct operands {
    unsigned count;
    operand of[OPERAND_MAX];
} operands;

/* True for a scalar instruction that sets SCC if its result is not zero. */
bool isa_scc_is_nonzero(unsigned op);

/* EXEC as the mask of active lanes is not listed. */
void isa_operands(const isa_row *row, operands *out);

#endif
