/* deadline.c: see deadline.h.  SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/deadline.h"

#include <time.h>

int64_t fa_now_ns(void)
{
    const int64_t ns_per_s = 1000000000;
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * ns_per_s + (int64_t)now.tv_nsec;
}

/* What a card of 60 compute units at 1.7 GHz does when it is doing badly: a
 * quarter of its peak, in multiply-adds per nanosecond.  (Of the Radeon VII,
 * whose fp64 is half as fast, half of that.) */
static double rate_of(fa_dtype arith)
{
    return arith == FA_F64 ? 800.0 : arith == FA_F32 ? 1600.0 : 3200.0;
}

static double estimate_ns(const fa_plan *plan)
{
    const double units = 60.0;
    const double step_ns = 20000.0; /* a launch, and passes without products */
    double sum = 0.0;
    for (int i = 0; i < plan->count; i++) {
        const fa_step *step = &plan->step[i];
        const double groups =
            (double)step->grid[0] * step->grid[1] * step->grid[2];
        const double busy = groups < units ? groups / units : 1.0;
        sum +=
            step_ns + step->products / (rate_of(step->variant->arith) * busy);
    }
    return sum;
}

int64_t fa_deadline_ns(const fa_plan *plan, double factor, int64_t floor_ns)
{
    const double most_ns = 1e18; /* thirty years; what follows fits its types */
    const double least_ns = (double)floor_ns;
    double ns = estimate_ns(plan) * factor;
    ns = ns < least_ns ? least_ns : ns;
    return (int64_t)(ns < most_ns ? ns : most_ns);
}

uint64_t fa_deadline_instructions(int64_t ns)
{
    /* A compute unit issues at most one wave instruction per cycle, at
     * 1.725 GHz: four SIMDs, each in one of four cycles. */
    const double per_ns = 1.725;
    return 1 + (uint64_t)((double)ns * per_ns);
}
