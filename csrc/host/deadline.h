/* deadline.h: how long a call may take.
 *
 * An estimate from what its kernels multiply, of a card that is doing badly,
 * times the policy's factor.  What happens to a call that takes longer is left
 * to guard.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_DEADLINE_H
#define FA_HOST_DEADLINE_H

#include "fa.h"

int64_t fa_now_ns(void); /* CLOCK_MONOTONIC */

/* `factor` times the estimate for all steps of the plan, but not less than
 * `floor_ns`. */
int64_t fa_deadline_ns(const fa_plan *plan, double factor, int64_t floor_ns);

/* The same as wave instructions of a workgroup, where those are counted. */
uint64_t fa_deadline_instructions(int64_t ns);

#endif
