/* test_reference.c: the reference itself, against facts that need no second
 * implementation.  SPDX-License-Identifier: BSD-3-Clause */
#include "host/reference.h"
#include "test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROOM = 4096 };

typedef struct fixture {
    fa_problem p;
    uint16_t q[ROOM], k[ROOM], v[ROOM];
    double out[ROOM], lse[ROOM], scores[ROOM];
} fixture;

/* Random data for a small problem; the caller frees it. */
static fixture *make(int64_t b, int64_t h, int64_t hk, int64_t sq, int64_t sk,
                     int64_t d)
{
    fixture *f = calloc(1, sizeof *f);
    uint64_t seed = 7;
    if (f == NULL) {
        abort();
    }
    f->p = test_problem(b, h, hk, sq, sk, d);
    f->p.scale = 0.4;
    for (int i = 0; i < ROOM; i++) {
        f->q[i] = fa_half_from_double(test_random(&seed));
        f->k[i] = fa_half_from_double(test_random(&seed));
        f->v[i] = fa_half_from_double(test_random(&seed));
    }
    f->p.q.data = f->q;
    f->p.k.data = f->k;
    f->p.v.data = f->v;
    return f;
}

static void halves_convert_there_and_back(test_run *run)
{
    int wrong = 0;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const uint16_t half = (uint16_t)bits;
        const bool is_nan = (half & 0x7c00) == 0x7c00 && (half & 0x3ff) != 0;
        const double value = fa_half_to_double(half);
        wrong += is_nan ? !isnan(value) : fa_half_from_double(value) != half;
    }
    CHECK(run, wrong == 0);
    CHECK(run, fa_half_to_double(0x3c00) == 1.0);
    CHECK(run, fa_half_to_double(0x7bff) == 65504.0);
    CHECK(run, fa_half_to_double(0x0001) == 0x1p-24);
}

static void halves_round_to_the_nearest_even(test_run *run)
{
    CHECK(run, fa_half_from_double(2049.0) == 0x6800); /* 2048 */
    CHECK(run, fa_half_from_double(2051.0) == 0x6802); /* 2052 */
    CHECK(run, fa_half_from_double(2047.5) == 0x6800); /* next binade */
    CHECK(run, fa_half_from_double(0x1p-25) == 0x0000);
    CHECK(run, fa_half_from_double(0x1.8p-24) == 0x0002);
    CHECK(run, fa_half_from_double(65519.9) == 0x7bff);
    CHECK(run, fa_half_from_double(65520.0) == 0x7c00);
    CHECK(run, fa_half_from_double(-0.0) == 0x8000);
}

static void values_of_one_give_one(test_run *run)
{
    fixture *f = make(2, 2, 1, 5, 7, 4);
    for (int i = 0; i < ROOM; i++) {
        f->v[i] = 0x3c00;
    }
    fa_reference_forward(&f->p, f->out, f->lse, f->scores);
    for (int i = 0; i < 2 * 2 * 5 * 4; i++) {
        CHECK(run, fabs(f->out[i] - 1.0) < 1e-14);
    }
    free(f);
}

static void a_single_key_is_returned_as_it_is(test_run *run)
{
    fixture *f = make(1, 1, 1, 3, 1, 4);
    fa_reference_forward(&f->p, f->out, f->lse, f->scores);
    for (int i = 0; i < 3; i++) {
        double score = 0.0;
        for (int d = 0; d < 4; d++) {
            score +=
                fa_half_to_double(f->q[i * 4 + d]) * fa_half_to_double(f->k[d]);
            CHECK(run, f->out[i * 4 + d] == fa_half_to_double(f->v[d]));
        }
        CHECK(run, fabs(f->lse[i] - 0.4 * score) < 1e-14);
    }
    free(f);
}

static void rows_that_see_no_key_give_zero_and_minus_infinity(test_run *run)
{
    fixture *f = make(1, 1, 1, 5, 3, 4);
    f->p.causal = FA_CAUSAL_BOTTOM_RIGHT;
    fa_reference_forward(&f->p, f->out, f->lse, f->scores);
    for (int i = 0; i < 2; i++) {
        CHECK(run, f->lse[i] == -(double)INFINITY);
        for (int d = 0; d < 4; d++) {
            CHECK(run, f->out[i * 4 + d] == 0.0);
        }
    }
    CHECK(run, isfinite(f->lse[2]));
    free(f);
}

/* Row i of a causal problem is the same row of a problem with fewer keys. */
static void causal_rows_equal_problems_with_fewer_keys(test_run *run)
{
    for (int causal = FA_CAUSAL_TOP_LEFT; causal <= FA_CAUSAL_BOTTOM_RIGHT;
         causal++) {
        fixture *f = make(1, 1, 1, 4, 6, 4);
        fixture *g = make(1, 1, 1, 4, 6, 4);
        f->p.causal = causal;
        fa_reference_forward(&f->p, f->out, f->lse, f->scores);
        for (int i = 0; i < 4; i++) {
            const int keys = causal == FA_CAUSAL_TOP_LEFT ? i + 1 : i + 3;
            g->p.k.size[2] = g->p.v.size[2] = keys;
            fa_reference_forward(&g->p, g->out, g->lse, g->scores);
            CHECK(run, g->lse[i] == f->lse[i]);
            CHECK(run, memcmp(&g->out[i * 4], &f->out[i * 4],
                              4 * sizeof(double)) == 0);
        }
        free(g);
        free(f);
    }
}

static void grouped_heads_equal_repeated_heads(test_run *run)
{
    fixture *f = make(1, 4, 2, 3, 5, 4);
    fixture *g = make(1, 4, 4, 3, 5, 4);
    for (int h = 0; h < 4; h++) {
        memcpy(&g->k[h * 20], &f->k[h / 2 * 20], 20 * sizeof f->k[0]);
        memcpy(&g->v[h * 20], &f->v[h / 2 * 20], 20 * sizeof f->v[0]);
    }
    fa_reference_forward(&f->p, f->out, f->lse, f->scores);
    fa_reference_forward(&g->p, g->out, g->lse, g->scores);
    CHECK(run, memcmp(f->out, g->out, 48 * sizeof(double)) == 0);
    CHECK(run, memcmp(f->lse, g->lse, 12 * sizeof(double)) == 0);
    free(g);
    free(f);
}

static void huge_scores_do_not_overflow(test_run *run)
{
    fixture *f = make(1, 1, 1, 2, 3, 4);
    f->p.scale = 1e6;
    fa_reference_forward(&f->p, f->out, f->lse, f->scores);
    for (int i = 0; i < 8; i++) {
        CHECK(run, isfinite(f->out[i]));
    }
    CHECK(run, isfinite(f->lse[0]) && fabs(f->lse[0]) > 1e4);
    free(f);
}

void test_reference(test_run *run)
{
    RUN(run, halves_convert_there_and_back);
    RUN(run, halves_round_to_the_nearest_even);
    RUN(run, values_of_one_give_one);
    RUN(run, a_single_key_is_returned_as_it_is);
    RUN(run, rows_that_see_no_key_give_zero_and_minus_infinity);
    RUN(run, causal_rows_equal_problems_with_fewer_keys);
    RUN(run, grouped_heads_equal_repeated_heads);
    RUN(run, huge_scores_do_not_overflow);
}
