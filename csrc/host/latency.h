/* latency.h: how long the calls of each class took.
 *
 * A class is a kernel: the first main one of a call's plan.  Counting is a few
 * relaxed additions; reading while others count gives a moment's mixture.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_LATENCY_H
#define FA_HOST_LATENCY_H

#include "fa.h"

#include <stdatomic.h>

/* Four buckets for each doubling, from 1 microsecond to more than an hour. */
enum { FA_LATENCY_PER_DOUBLING = 4, FA_LATENCY_BUCKETS = 128 };

typedef struct fa_latency {
    _Atomic uint64_t calls;
    _Atomic uint64_t ns;
    _Atomic uint64_t kiloflops; /* sums of flops beyond 2^53 stay whole */
    _Atomic uint32_t bucket[FA_LATENCY_BUCKETS];
} fa_latency;

void fa_latency_add(fa_latency *latency, int64_t ns, double flops);

/* The time that this share (0 to 1) of the calls did not exceed, in ns: the
 * upper edge of its bucket, so at most 19 % too much.  0 without calls. */
double fa_latency_quantile(const fa_latency *latency, double share);

#endif
