/* reference.h: attention as the formula says it, for tests.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_REFERENCE_H
#define FA_HOST_REFERENCE_H

#include "fa.h"

/* out (B, H, Sq, D) and lse (B, H, Sq), both contiguous, from a problem whose
 * float16 q, k, v lie in host memory; its own out and lse are not used.
 * `scores` is room for Sk numbers.  Any sizes and strides. */
void fa_reference_forward(const fa_problem *problem, double *out, double *lse,
                          double *scores);

/* The value of a float16, exact. */
double fa_half_to_double(uint16_t half);
/* The nearest float16, ties to even; beyond the range infinity. */
uint16_t fa_half_from_double(double value);

#endif
