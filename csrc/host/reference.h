/* reference.h: attention and its gradients as the formulas say, for tests.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_REFERENCE_H
#define FA_HOST_REFERENCE_H

#include "fa.h"

/* out (B, H, Sq, Dv) and lse (B, H, Sq), both contiguous, from a problem whose
 * q, k, v and features lie in host memory; its own out and lse are not used.
 * `scores` is room for Sk numbers.  Any types, sizes and strides. */
void fa_reference_forward(const fa_problem *problem, double *out, double *lse,
                          double *scores);

/* dq, dk, dv, and dbias and dsink if not NULL, contiguous, whatever is wanted;
 * of `gradients` only dout and dlse are read, of the problem neither out nor
 * lse.  `scratch` is room for 2 Sk numbers. */
void fa_reference_backward(const fa_problem *problem,
                           const fa_gradients *gradients, double *dq,
                           double *dk, double *dv, double *dbias, double *dsink,
                           double *scratch);

/* The bits of dropout: four words from a counter and a key. */
void fa_reference_philox(const uint32_t counter[4], const uint32_t key[2],
                         uint32_t out[4]);

/* An element in host memory, of any type.  Storing rounds to the nearest. */
double fa_element_get(const fa_tensor *t, int64_t b, int64_t h, int64_t i,
                      int64_t d);
void fa_element_set(const fa_tensor *t, int64_t b, int64_t h, int64_t i,
                    int64_t d, double value);

/* The value of a float16, exact. */
double fa_half_to_double(uint16_t half);
/* The nearest float16, ties to even; beyond the range infinity. */
uint16_t fa_half_from_double(double value);
/* The same for bfloat16. */
double fa_bfloat_to_double(uint16_t bfloat);
uint16_t fa_bfloat_from_double(double value);

#endif
