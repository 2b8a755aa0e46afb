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

static void bfloats_convert_there_and_back(test_run *run)
{
    int wrong = 0;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const uint16_t bfloat = (uint16_t)bits;
        const bool is_nan = (bfloat & 0x7f80) == 0x7f80 && (bfloat & 0x7f) != 0;
        const double value = fa_bfloat_to_double(bfloat);
        wrong +=
            is_nan ? !isnan(value) : fa_bfloat_from_double(value) != bfloat;
    }
    CHECK(run, wrong == 0);
    CHECK(run, fa_bfloat_to_double(0x3f80) == 1.0);
    CHECK(run, fa_bfloat_to_double(0x0001) == 0x1p-133);
}

static void bfloats_round_to_the_nearest_even(test_run *run)
{
    CHECK(run, fa_bfloat_from_double(257.0) == 0x4380); /* 256 */
    CHECK(run, fa_bfloat_from_double(259.0) == 0x4382); /* 260 */
    CHECK(run, fa_bfloat_from_double(255.5) == 0x4380); /* next binade */
    /* Not first to float, which would make a tie of it. */
    CHECK(run, fa_bfloat_from_double(1.0 + 0x1p-8 + 0x1p-40) == 0x3f81);
    CHECK(run, fa_bfloat_from_double(0x1p-134) == 0x0000);
    CHECK(run, fa_bfloat_from_double(0x1.8p-133) == 0x0002);
    CHECK(run, fa_bfloat_from_double(0x1.fefp127) == 0x7f7f);
    CHECK(run, fa_bfloat_from_double(0x1.ffp127) == 0x7f80);
    CHECK(run, fa_bfloat_from_double(-1e300) == 0xff80);
    CHECK(run, isnan(fa_bfloat_to_double(fa_bfloat_from_double(NAN))));
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

/* -- gradients ------------------------------------------------------------- */

/* A problem in double precision with all that its backward needs. */
typedef struct steep {
    fa_problem p;
    fa_gradients g;
    double q[ROOM], k[ROOM], v[ROOM], dout[ROOM], dlse[ROOM];
    double dq[ROOM], dk[ROOM], dv[ROOM], dbias[ROOM], dsink[ROOM];
    double out[ROOM], lse[ROOM], scratch[ROOM];
    double bias[ROOM], sink[ROOM], alibi[ROOM]; /* for features */
    uint8_t mask[ROOM];
    fa_span_of_row spans[ROOM];
    int32_t blocks[ROOM];
    int64_t seed[2];
} steep;

static steep *make_steep(int64_t h, int64_t hk, int64_t sq, int64_t sk,
                         int64_t d, int64_t dv, int causal)
{
    steep *s = calloc(1, sizeof *s);
    uint64_t seed = 11;
    if (s == NULL) {
        abort();
    }
    s->p = test_problem(2, h, hk, sq, sk, d);
    test_head_dim_v(&s->p, dv);
    test_retype(&s->p, FA_F64);
    s->p.scale = -0.4;
    s->p.causal = causal;
    s->g = test_gradients(&s->p, FA_WANT_DQ | FA_WANT_DK | FA_WANT_DV);
    for (int i = 0; i < ROOM; i++) {
        s->q[i] = test_random(&seed);
        s->k[i] = test_random(&seed);
        s->v[i] = test_random(&seed);
        s->dout[i] = test_random(&seed);
        s->dlse[i] = test_random(&seed);
        s->bias[i] = test_random(&seed);
        s->sink[i] = test_random(&seed);
        s->alibi[i] = fabs(test_random(&seed));
        s->mask[i] = test_random(&seed) > -0.5;
    }
    s->p.q.data = s->q;
    s->p.k.data = s->k;
    s->p.v.data = s->v;
    s->g.dout.data = s->dout;
    s->g.dlse.data = s->dlse;
    return s;
}

/* sum(dout * out) + sum(dlse * lse), of the rows that see a key. */
static double loss(steep *s)
{
    const int64_t dim = s->p.v.size[3];
    const int64_t rows = s->p.q.size[0] * s->p.q.size[1] * s->p.q.size[2];
    double sum = 0.0;
    fa_reference_forward(&s->p, s->out, s->lse, s->scratch);
    for (int64_t row = 0; row < rows; row++) {
        if (isinf(s->lse[row])) {
            continue;
        }
        sum += s->dlse[row] * s->lse[row];
        for (int64_t d = 0; d < dim; d++) {
            sum += s->dout[row * dim + d] * s->out[row * dim + d];
        }
    }
    return sum;
}

/* The largest difference between a gradient and central differences. */
static double worst(steep *s, double *input, const double *gradient,
                    int64_t count)
{
    const double step = 1e-5;
    double most = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const double before = input[i];
        input[i] = before + step;
        const double above = loss(s);
        input[i] = before - step;
        const double below = loss(s);
        input[i] = before;
        most = fmax(most, fabs((above - below) / (2.0 * step) - gradient[i]));
    }
    return most;
}

static void gradients_equal_finite_differences(test_run *run)
{
    static const int64_t shapes[][6] = {
        /* h, hk, sq, sk, d, dv */
        {1, 1, 3, 5, 4, 4},
        {4, 2, 4, 3, 3, 5},
        {2, 1, 5, 3, 2, 1},
    };
    for (int i = 0; i < 9; i++) {
        const int64_t *n = shapes[i % 3];
        steep *s = make_steep(n[0], n[1], n[2], n[3], n[4], n[5], i / 3);
        const int64_t queries = 2 * n[0] * n[2];
        const int64_t keys = 2 * n[1] * n[3];
        fa_reference_backward(&s->p, &s->g, s->dq, s->dk, s->dv, s->dbias,
                              s->dsink, s->scratch);
        /* Seen: at most 2e-10. */
        CHECK(run, worst(s, s->q, s->dq, queries * n[4]) < 1e-8);
        CHECK(run, worst(s, s->k, s->dk, keys * n[4]) < 1e-8);
        CHECK(run, worst(s, s->v, s->dv, keys * n[5]) < 1e-8);
        free(s);
    }
}

static void rows_that_see_no_key_have_no_gradient(test_run *run)
{
    steep *s = make_steep(1, 1, 5, 3, 4, 4, FA_CAUSAL_BOTTOM_RIGHT);
    s->g.dlse.data = NULL;
    fa_reference_backward(&s->p, &s->g, s->dq, s->dk, s->dv, s->dbias, s->dsink,
                          s->scratch);
    for (int i = 0; i < 2 * 4; i++) { /* the first two rows */
        CHECK(run, s->dq[i] == 0.0);
    }
    CHECK(run, s->dq[2 * 4] == 0.0); /* one key: its weight is 1 */
    CHECK(run, s->dv[0] != 0.0 && s->dk[0] != 0.0);
    free(s);
}

static void no_gradient_of_lse_is_a_gradient_of_zero(test_run *run)
{
    steep *s = make_steep(2, 1, 3, 4, 4, 4, FA_CAUSAL_NONE);
    double first[2 * 2 * 3 * 4];
    memset(s->dlse, 0, sizeof s->dlse);
    fa_reference_backward(&s->p, &s->g, s->dq, s->dk, s->dv, s->dbias, s->dsink,
                          s->scratch);
    memcpy(first, s->dq, sizeof first);
    s->g.dlse.data = NULL;
    fa_reference_backward(&s->p, &s->g, s->dq, s->dk, s->dv, s->dbias, s->dsink,
                          s->scratch);
    CHECK(run, memcmp(first, s->dq, sizeof first) == 0);
    free(s);
}

/* -- features -------------------------------------------------------------- */

/* FA_HAS_* of data that lies in *s; spans and blocks are the test's. */
static void add_features(steep *s, uint32_t features)
{
    fa_features *f = &s->p.features;
    test_add_features(&s->p, features);
    f->bias.data = f->bias.data == NULL ? NULL : s->bias;
    f->mask.data = f->mask.data == NULL ? NULL : s->mask;
    f->alibi.data = f->alibi.data == NULL ? NULL : s->alibi;
    f->sink.data = f->sink.data == NULL ? NULL : s->sink;
    f->span_q.data = f->span_q.data == NULL ? NULL : s->spans;
    f->blocks.data = f->blocks.data == NULL ? NULL : s->blocks;
    f->softcap = f->softcap > 0.0 ? 1.5 : 0.0; /* scores are about 1 */
    f->seed = s->seed;
    s->seed[0] = 12345;
}

static void philox_gives_the_published_words(test_run *run)
{
    static const struct {
        uint32_t counter[4], key[2], words[4];
    } cases[] = {
        {{0, 0, 0, 0},
         {0, 0},
         {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t words[4];
        fa_reference_philox(cases[i].counter, cases[i].key, words);
        CHECK(run, memcmp(words, cases[i].words, sizeof words) == 0);
    }
}

static void gradients_of_features_equal_finite_differences(test_run *run)
{
    static const uint32_t cases[] = {
        FA_HAS_BIAS,
        FA_HAS_BIAS | FA_HAS_SINK | FA_HAS_SOFTCAP,
        FA_HAS_BIAS | FA_HAS_MASK | FA_HAS_ALIBI | FA_HAS_SINK | FA_HAS_DROPOUT,
        FA_HAS_SINK | FA_HAS_SINK_KEYS | FA_HAS_DROPOUT,
    };
    for (size_t n = 0; n < 4 * (sizeof cases / sizeof cases[0]); n++) {
        steep *s = make_steep(4, 2, 4, 5, 3, 5, FA_CAUSAL_NONE_TOP_LEFT);
        add_features(s, cases[n / 4]);
        fa_features *f = &s->p.features;
        s->p.window_left = (cases[n / 4] & FA_HAS_SINK_KEYS) != 0 ? 1 : -1;
        f->sink_keys = f->sink_keys > 0 ? 1 : 0;
        f->bias.size[n % 4] = 1; /* what it is summed over */
        fa_reference_backward(&s->p, &s->g, s->dq, s->dk, s->dv,
                              f->bias.data == NULL ? NULL : s->dbias, s->dsink,
                              s->scratch);
        /* Seen: at most 4e-10. */
        CHECK(run, worst(s, s->q, s->dq, 2 * 4 * 4 * 3) < 1e-8);
        CHECK(run, worst(s, s->k, s->dk, 2 * 2 * 5 * 3) < 1e-8);
        CHECK(run, worst(s, s->v, s->dv, 2 * 2 * 5 * 5) < 1e-8);
        if (f->bias.data != NULL) {
            fa_tensor dense = f->bias;
            fa_gradients_like(&s->p, false, &s->g);
            memcpy(f->bias.stride, s->g.dbias.stride, sizeof dense.stride);
            fa_reference_backward(&s->p, &s->g, s->dq, s->dk, s->dv, s->dbias,
                                  s->dsink, s->scratch);
            CHECK(run, worst(s, s->bias, s->dbias,
                             dense.size[0] * dense.size[1] * dense.size[2] *
                                 dense.size[3]) < 1e-8);
        }
        for (int h = 0; h < 4 && f->sink.data != NULL; h++) {
            double of_head = 0.0; /* a sink is that of all rows of its head */
            for (int i = 0; i < 4; i++) {
                of_head += s->dsink[h * 4 + i] + s->dsink[16 + h * 4 + i];
            }
            CHECK(run, worst(s, &s->sink[h], &of_head, 1) < 1e-8);
        }
        free(s);
    }
}

/* Each way to say the same. */
static void windows_spans_blocks_and_masks_agree(test_run *run)
{
    for (int causal = 0; causal <= FA_CAUSAL_NONE_TOP_LEFT; causal++) {
        steep *s = make_steep(2, 1, 5, 7, 4, 4, causal);
        steep *t = make_steep(2, 1, 5, 7, 4, 4, FA_CAUSAL_NONE);
        s->p.window_left = 1;
        s->p.window_right = 1;
        const bool top_left =
            causal == FA_CAUSAL_TOP_LEFT || causal == FA_CAUSAL_NONE_TOP_LEFT;
        const bool masked =
            causal == FA_CAUSAL_TOP_LEFT || causal == FA_CAUSAL_BOTTOM_RIGHT;
        add_features(t, FA_HAS_SPANS | FA_HAS_MASK);
        memset(t->mask, 1, sizeof t->mask);
        for (int i = 0; i < 5; i++) {
            const int own = i + (top_left ? 0 : 2);
            t->spans[i] =
                (fa_span_of_row){.from = own - 1, .to = masked ? own : own + 1};
        }
        fa_reference_forward(&s->p, s->out, s->lse, s->scratch);
        fa_reference_forward(&t->p, t->out, t->lse, t->scratch);
        CHECK(run, memcmp(s->out, t->out, sizeof s->out) == 0);
        CHECK(run, memcmp(s->lse, t->lse, sizeof s->lse) == 0);
        /* And the mask alone. */
        for (int row = 0; row < 2 * 2 * 5; row++) {
            for (int j = 0; j < 7; j++) {
                const fa_span_of_row *span = &t->spans[row % 5];
                t->mask[row * 7 + j] = span->from <= j && j <= span->to;
            }
        }
        t->p.features.span_q.data = NULL;
        fa_reference_forward(&t->p, t->out, t->lse, t->scratch);
        CHECK(run, memcmp(s->out, t->out, sizeof s->out) == 0);
        free(t);
        free(s);
    }
}

static void rows_see_the_blocks_of_their_list(test_run *run)
{
    steep *s = make_steep(1, 1, 3, 300, 1, 1, FA_CAUSAL_NONE);
    steep *t = make_steep(1, 1, 3, 300, 1, 1, FA_CAUSAL_NONE);
    add_features(s, FA_HAS_BLOCKS); /* of 256 keys */
    s->blocks[0] = s->blocks[3] = 1;
    s->blocks[1] = s->blocks[4] = 1; /* the second of two */
    s->p.features.blocks.size[0] = 1;
    add_features(t, FA_HAS_MASK);
    for (int i = 0; i < ROOM; i++) {
        t->mask[i] = i % 300 >= 256;
    }
    fa_reference_forward(&s->p, s->out, s->lse, s->scratch);
    fa_reference_forward(&t->p, t->out, t->lse, t->scratch);
    CHECK(run, memcmp(s->out, t->out, sizeof s->out) == 0);
    CHECK(run, memcmp(s->lse, t->lse, sizeof s->lse) == 0);
    free(t);
    free(s);
}

/* p is what is dropped, the rest grows by as much, lse knows nothing of it. */
static void dropout_keeps_the_mean_and_lse(test_run *run)
{
    steep *s = make_steep(1, 1, 2, 2000, 1, 1, FA_CAUSAL_NONE);
    steep *t = make_steep(1, 1, 2, 2000, 1, 1, FA_CAUSAL_NONE);
    memset(s->q, 0, sizeof s->q); /* all weights are equal */
    memset(t->q, 0, sizeof t->q);
    for (int i = 0; i < ROOM; i++) {
        s->v[i] = 1.0;
    }
    add_features(s, FA_HAS_DROPOUT);
    fa_reference_forward(&s->p, s->out, s->lse, s->scratch);
    fa_reference_forward(&t->p, t->out, t->lse, t->scratch);
    CHECK(run, memcmp(s->lse, t->lse, sizeof s->lse) == 0);
    double mean = 0.0;
    for (int i = 0; i < 4; i++) {
        mean += s->out[i] / 4;
        CHECK(run, i == 0 || s->out[i] != s->out[0]);
    }
    /* Of 8000 weights: a standard deviation is 0.0065. */
    CHECK(run, fabs(mean - 1.0) < 0.03);
    s->seed[1] = 1;
    fa_reference_forward(&s->p, t->out, t->lse, s->scratch);
    CHECK(run, t->out[0] != s->out[0]);
    free(t);
    free(s);
}

static void a_sink_is_a_key_of_value_zero(test_run *run)
{
    steep *s = make_steep(2, 1, 3, 4, 2, 2, FA_CAUSAL_NONE);
    fa_reference_forward(&s->p, s->out, s->lse, s->scratch);
    const double lse = s->lse[4];
    const double out = s->out[4 * 2];
    add_features(s, FA_HAS_SINK);
    fa_reference_forward(&s->p, s->out, s->lse, s->scratch);
    const double all = exp(lse) + exp(s->sink[1]); /* row 4 is of head 1 */
    CHECK(run, fabs(s->lse[4] - log(all)) < 1e-14);
    CHECK(run, fabs(s->out[4 * 2] - out * exp(lse) / all) < 1e-14);
    free(s);
}

/* The same numbers in every type that can hold them. */
static void elements_of_every_type_are_read_and_rounded(test_run *run)
{
    void *memory = calloc(64, sizeof(double));
    if (memory == NULL) {
        abort();
    }
    for (int dtype = FA_F16; dtype <= FA_F64; dtype++) {
        fa_tensor t = {.data = memory,
                       .dtype = (fa_dtype)dtype,
                       .size = {2, 2, 3, 2},
                       .stride = {24, 12, 4, 2}};
        memset(memory, 0, 64 * sizeof(double));
        fa_element_set(&t, 1, 1, 2, 1, -2.5);
        fa_element_set(&t, 0, 1, 2, 1, 1.0 + 0x1p-30);
        CHECK(run, fa_element_get(&t, 1, 1, 2, 1) == -2.5);
        CHECK(run, fa_element_get(&t, 0, 1, 2, 1) ==
                       (dtype == FA_F64 ? 1.0 + 0x1p-30 : 1.0));
        CHECK(run, fa_element_get(&t, 0, 0, 0, 0) == 0.0);
    }
    free(memory);
}

void test_reference(test_run *run)
{
    RUN(run, halves_convert_there_and_back);
    RUN(run, halves_round_to_the_nearest_even);
    RUN(run, bfloats_convert_there_and_back);
    RUN(run, bfloats_round_to_the_nearest_even);
    RUN(run, elements_of_every_type_are_read_and_rounded);
    RUN(run, values_of_one_give_one);
    RUN(run, a_single_key_is_returned_as_it_is);
    RUN(run, rows_that_see_no_key_give_zero_and_minus_infinity);
    RUN(run, causal_rows_equal_problems_with_fewer_keys);
    RUN(run, grouped_heads_equal_repeated_heads);
    RUN(run, huge_scores_do_not_overflow);
    RUN(run, gradients_equal_finite_differences);
    RUN(run, rows_that_see_no_key_have_no_gradient);
    RUN(run, no_gradient_of_lse_is_a_gradient_of_zero);
    RUN(run, philox_gives_the_published_words);
    RUN(run, gradients_of_features_equal_finite_differences);
    RUN(run, windows_spans_blocks_and_masks_agree);
    RUN(run, rows_see_the_blocks_of_their_list);
    RUN(run, dropout_keeps_the_mean_and_lse);
    RUN(run, a_sink_is_a_key_of_value_zero);
}
