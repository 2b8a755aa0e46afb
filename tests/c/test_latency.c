/* test_latency.c: the histogram against an exact computation.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/latency.h"
#include "test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SAMPLES = 5000 };

static int compare(const void *left, const void *right)
{
    const int64_t a = *(const int64_t *)left;
    const int64_t b = *(const int64_t *)right;
    return a < b ? -1 : a > b;
}

static double quantile_of_one(int64_t ns)
{
    fa_latency l;
    memset(&l, 0, sizeof l);
    fa_latency_add(&l, ns, 0.0);
    return fa_latency_quantile(&l, 0.5);
}

/* Never too little, and at most a quarter of a doubling too much. */
static void latency_quantiles_are_those_of_a_sorted_list(test_run *run)
{
    static const double shares[] = {0.001, 0.1, 0.25, 0.5, 0.9, 0.99, 1.0};
    static int64_t ns[SAMPLES];
    fa_latency l;
    uint64_t state = 7;
    uint64_t sum = 0;
    memset(&l, 0, sizeof l);
    for (int i = 0; i < SAMPLES; i++) { /* 2 us to 4 s, mostly */
        ns[i] = (int64_t)exp(15.0 + 2.0 * test_random(&state));
        sum += (uint64_t)ns[i];
        fa_latency_add(&l, ns[i], 2500.0);
    }
    qsort(ns, SAMPLES, sizeof ns[0], compare);
    CHECK(run, ns[0] > 1000);
    for (size_t i = 0; i < sizeof shares / sizeof shares[0]; i++) {
        const double exact = (double)ns[(int)ceil(shares[i] * SAMPLES) - 1];
        const double got = fa_latency_quantile(&l, shares[i]);
        CHECK(run, got >= exact * (1.0 - 1e-12));
        CHECK(run, got <= exact * exp2(0.25) * (1.0 + 1e-12));
    }
    CHECK(run, l.calls == SAMPLES && l.ns == sum);
    CHECK(run, l.kiloflops == 2 * SAMPLES); /* whole thousands of each call */
}

static void latency_beyond_its_edges_is_at_the_edge(test_run *run)
{
    fa_latency none;
    memset(&none, 0, sizeof none);
    CHECK(run, fa_latency_quantile(&none, 0.5) == 0.0);
    CHECK(run, quantile_of_one(0) == 1000.0);
    CHECK(run, quantile_of_one(1000) == 1000.0);
    CHECK(run, quantile_of_one(1001) > 1000.0);
    CHECK(run, quantile_of_one(2000) == 2000.0);
    const double last = quantile_of_one(INT64_MAX);
    CHECK(run, last > 3600e9);
    CHECK(run, quantile_of_one(INT64_C(3600000000000)) <= last);
}

void test_latency(test_run *run)
{
    RUN(run, latency_quantiles_are_those_of_a_sorted_list);
    RUN(run, latency_beyond_its_edges_is_at_the_edge);
}
