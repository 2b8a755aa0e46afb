/* latency.c: a histogram with logarithmic buckets.  See latency.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/latency.h"

#include <math.h>

static const double first_edge_ns = 1000.0;

static int bucket_of(int64_t ns)
{
    const double ratio = (double)ns / first_edge_ns;
    if (ratio <= 1.0) {
        return 0;
    }
    const int at = (int)ceil(log2(ratio) * FA_LATENCY_PER_DOUBLING);
    return at < FA_LATENCY_BUCKETS ? at : FA_LATENCY_BUCKETS - 1;
}

void fa_latency_add(fa_latency *l, int64_t ns, double flops)
{
    const memory_order relaxed = memory_order_relaxed;
    atomic_fetch_add_explicit(&l->calls, 1, relaxed);
    atomic_fetch_add_explicit(&l->ns, (uint64_t)ns, relaxed);
    atomic_fetch_add_explicit(&l->kiloflops, (uint64_t)(flops / 1000.0),
                              relaxed);
    atomic_fetch_add_explicit(&l->bucket[bucket_of(ns)], 1, relaxed);
}

double fa_latency_quantile(const fa_latency *l, double share)
{
    uint64_t all = 0;
    uint64_t below = 0;
    for (int i = 0; i < FA_LATENCY_BUCKETS; i++) {
        all += l->bucket[i];
    }
    for (int i = 0; i < FA_LATENCY_BUCKETS && all != 0; i++) {
        below += l->bucket[i];
        if ((double)below >= share * (double)all) {
            return first_edge_ns * exp2((double)i / FA_LATENCY_PER_DOUBLING);
        }
    }
    return 0.0;
}
