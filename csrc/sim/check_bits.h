/* check_bits.h: values of which some bits are undefined (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_CHECK_BITS_H
#define HIPSIM_CHECK_BITS_H

#include "isa.h"

/* A value and which of its bits are undefined. */
typedef struct partial {
    uint64_t value, bad;
} partial;

static inline partial check_inverse(partial a)
{
    return (partial){~a.value, a.bad};
}

/* Undefined bits of a & b and of a | b. */
uint64_t check_and_bits(partial a, partial b);
uint64_t check_or_bits(partial a, partial b);

/* Undefined bits of the result of `op` for one lane, or of a scalar one; of
 * four registers, those that each of them has. */
uint64_t check_result_bits(unsigned op, partial a, partial b, partial c);

#endif
