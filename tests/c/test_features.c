/* test_features.c: what features change of a plan and of what its steps are
 * told: levels, the pass of dbias, diagonals, lists, dropout.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/plan.h"
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    ALL = FA_WANT_DQ | FA_WANT_DK | FA_WANT_DV,
    EVERY = FA_HAS_BLOCKS * 2 - 1,
    LONGEST = 1 << 30
};

static void *const workspace = (void *)0x10000000;

/* -- levels ---------------------------------------------------------------- */

/* That all steps but FA_PREPARE have this level; returns how many. */
static int check_level(test_run *run, const fa_plan *plan, fa_level level)
{
    int count = 0;
    for (int i = 0; i < plan->count; i++) {
        const fa_variant *v = plan->step[i].variant;
        if (v->pass != FA_PREPARE) {
            CHECK(run, v->level == level);
            count++;
        }
    }
    return count;
}

static void check_levels(test_run *run, const fa_problem *p, fa_level level)
{
    const fa_gradients g = test_gradients(p, ALL);
    const fa_plan forward = test_plan_forward(run, p);
    const fa_plan backward = test_plan_backward(run, p, &g);
    CHECK(run, check_level(run, &forward, level) >= 1);
    CHECK(run, check_level(run, &backward, level) >= 2);
    CHECK(run, (forward.features != 0) == (level == FA_FULL));
    CHECK(run, backward.features == forward.features);
}

static void each_feature_takes_the_full_kernels(test_run *run)
{
    for (int dtype = FA_F16; dtype <= FA_F64; dtype++) {
        for (uint32_t bit = 1; bit <= FA_HAS_BLOCKS; bit *= 2) {
            fa_problem p = test_problem(1, 4, 2, 200, 300, 40);
            test_retype(&p, (fa_dtype)dtype);
            test_add_features(&p, bit);
            check_levels(run, &p, FA_FULL);
            CHECK(run, test_plan_forward(run, &p).features == bit);
        }
    }
}

/* What plain kernels know, and what says nothing. */
static void what_plain_kernels_serve_goes_to_them(test_run *run)
{
    fa_problem p = test_problem(1, 4, 2, 200, 300, 40);
    for (p.causal = 0; p.causal <= FA_CAUSAL_NONE_TOP_LEFT; p.causal++) {
        for (p.window_left = -1; p.window_left < 2; p.window_left++) {
            for (p.window_right = -1; p.window_right < 2; p.window_right++) {
                check_levels(run, &p, FA_PLAIN);
            }
        }
    }
    p = test_problem(1, 4, 2, 200, 300, 40);
    p.features.sink_keys = 4; /* nothing hides them */
    check_levels(run, &p, FA_PLAIN);
    p.window_right = 0;
    check_levels(run, &p, FA_PLAIN);
    p.window_left = LONGEST;
    check_levels(run, &p, FA_FULL);
    p = test_problem(1, 4, 2, 200, 300, 40);
    p.features.dropout_p = 0x1p-18; /* rounds to none */
    check_levels(run, &p, FA_PLAIN);
    p.features.dropout_p = 0.0;
    p.features.seed = (const int64_t *)0x1000;
    p.features.block_q = p.features.block_k = 128;
    check_levels(run, &p, FA_PLAIN);
}

static void the_reason_names_what_made_a_plan_full(test_run *run)
{
    fa_problem p = test_problem(1, 2, 2, 4, 4, 64);
    test_add_features(&p, FA_HAS_BIAS | FA_HAS_DROPOUT);
    fa_plan plan = test_plan_forward(run, &p);
    test_why(run, &plan, "full: bias, dropout; wide: every load is 16 bytes");
    p = test_problem(1, 2, 2, 4, 4, 77);
    test_add_features(&p, EVERY & ~(uint32_t)FA_HAS_SPANS);
    plan = test_plan_forward(run, &p);
    test_why(run, &plan,
             "full: bias, mask, alibi, sink, softcap, dropout, sink keys, "
             "blocks; narrow: head dim 77 is not a multiple of 8");
    p = test_problem(1, 2, 2, 4, 4, 64);
    test_add_features(&p, FA_HAS_SPANS);
    const fa_gradients g = test_gradients(&p, ALL);
    plan = test_plan_backward(run, &p, &g);
    test_why(run, &plan, "full: spans; wide: every load is 16 bytes");
}

/* -- the pass of dbias, and dsink ------------------------------------------ */

static void dbias_is_the_last_step_in_the_widest_arithmetic(test_run *run)
{
    for (int dtype = FA_F16; dtype <= FA_F64; dtype++) {
        for (uint32_t wanted = 0; wanted <= ALL; wanted++) {
            fa_problem p = test_problem(2, 4, 2, 200, 300, 40);
            test_retype(&p, (fa_dtype)dtype);
            test_add_bias(&p, dtype == FA_F64 ? FA_F64 : FA_F32);
            const fa_gradients g = test_gradients(&p, wanted | FA_WANT_DBIAS);
            const fa_plan plan = test_plan_backward(run, &p, &g);
            const fa_step *last = &plan.step[plan.count - 1];
            const fa_dtype arith = dtype == FA_F64 ? FA_F64 : FA_F32;
            int found = 0;
            for (int i = 0; i < plan.count; i++) {
                found += plan.step[i].variant->pass == FA_BACKWARD_BIAS;
            }
            CHECK(run, found == 1 && plan.step[0].prepare != 0);
            CHECK(run, last->variant->pass == FA_BACKWARD_BIAS);
            CHECK(run, last->variant->arith == arith);
            CHECK(run, last->only_unfit == 0 && fa_step_is_main(last));
            if (wanted == 0 && dtype == FA_F64) { /* others correct delta */
                CHECK(run, plan.count == 2);
                CHECK(run, plan.step[0].prepare == FA_SET_DOUT);
                CHECK(run, plan.workspace.block_of[3] == FA_NOWHERE);
            }
        }
    }
}

static void a_backward_of_bfloat16_with_dbias_has_the_most_steps(test_run *run)
{
    char symbols[FA_SYMBOLS_CHARS];
    if (!test_fast_bf16(run)) {
        return;
    }
    fa_problem p = test_problem(2, 4, 2, 200, 300, 40);
    test_retype(&p, FA_BF16);
    test_add_bias(&p, FA_F32);
    const fa_gradients g = test_gradients(&p, ALL | FA_WANT_DBIAS);
    const fa_plan plan = test_plan_backward(run, &p, &g);
    CHECK(run, plan.count == FA_MAX_STEPS);
    fa_plan_symbols(&plan, symbols);
    CHECK_TEXT(run, symbols, plan.step[FA_MAX_STEPS - 1].variant->symbol);
}

static void the_grid_of_dbias_covers_the_bias_alone(test_run *run)
{
    static const int64_t lengths[] = {1, 64, 65, 129, 1000};
    for (int i = 0; i < 5 * 5 * 16; i++) {
        const int64_t queries = lengths[i / 16 % 5];
        const int64_t keys = lengths[i / 80];
        fa_problem p = test_problem(3, 8, 2, queries, keys, 64);
        test_add_bias(&p, FA_F16);
        for (int d = 0; d < 4; d++) {
            p.features.bias.size[d] =
                (i >> d & 1) != 0 ? 1 : p.features.bias.size[d];
        }
        const int64_t *size = p.features.bias.size;
        const fa_gradients g = test_gradients(&p, FA_WANT_DBIAS);
        const fa_plan plan = test_plan_backward(run, &p, &g);
        const fa_step *step = &plan.step[plan.count - 1];
        const int64_t rows = step->variant->rows;
        const int64_t tiles =
            (size[2] + rows - 1) / rows * ((size[3] + 63) / 64);
        CHECK(run, step->grid[0] == (uint32_t)tiles);
        CHECK(run, step->grid[1] == (uint32_t)size[1]);
        CHECK(run, step->grid[2] == (uint32_t)size[0]);
    }
}

static void a_bias_of_too_many_tiles_is_refused(test_run *run)
{
    fa_problem p = test_problem(1, 1, 1, 1 << 20, 1 << 20, 64);
    fa_plan plan;
    fa_error error = {"(accepted)"};
    test_add_bias(&p, FA_F32);
    const fa_gradients g = test_gradients(&p, FA_WANT_DBIAS);
    CHECK(run, fa_plan_backward(&p, &g, &plan, &error) == FA_EUNSUPPORTED);
    CHECK_TEXT(run, error.text, "bias: expected at most 16777215 tiles for ");
}

/* The element bytes that a call names for the memory at `data`; 0: none. */
static int32_t bytes_at(const fa_call *call, const void *data, uint32_t access)
{
    for (size_t i = 0; i < call->access_count; i++) {
        if (data != NULL && call->access[i].tensor->data == data) {
            return call->access[i].access == access
                       ? call->access[i].element_bytes
                       : -1;
        }
    }
    return 0;
}

static int64_t elements_at(const fa_call *call, const void *data)
{
    int64_t count = 0;
    for (size_t i = 0; i < call->access_count; i++) {
        const fa_tensor *t = call->access[i].tensor;
        if (t->data == data) {
            count = t->size[0] * t->size[1] * t->size[2] * t->size[3];
        }
    }
    return count;
}

/* Which steps make row sums, and which read them. */
static void check_row_sums(test_run *run, const fa_plan *plan)
{
    int made = 0;
    int read = 0;
    for (int i = 0; i < plan->count; i++) {
        const fa_step *step = &plan->step[i];
        const fa_pass pass = step->variant->pass;
        CHECK(run, step->row_sums == (pass == FA_BACKWARD_Q ||
                                      (pass == FA_PREPARE && i > 0)));
        CHECK(run, read == 0 || pass != FA_BACKWARD_Q);
        CHECK(run, read == 1 || pass != FA_BACKWARD_BIAS);
        made += pass == FA_BACKWARD_Q;
        read += pass == FA_PREPARE && i > 0;
    }
    CHECK(run, made >= 1 && read == 1);
}

static void delta_is_corrected_for_what_is_stored_in_fp32(test_run *run)
{
    for (int i = 0; i < 4 * 4 * 2 * 2; i++) {
        const fa_dtype dtype = (fa_dtype)(i % 4);
        const uint32_t learned =
            (uint32_t)(i / 4) % 4 * FA_WANT_DBIAS; /* and dsink */
        const uint32_t wanted =
            learned | ((i / 16) % 2 != 0 ? ALL : FA_WANT_DV);
        const bool of_keys = (wanted & FA_WANT_DK) != 0;
        fa_problem p = test_problem(2, 4, 2, 200, 300, 40);
        test_retype(&p, dtype);
        test_add_features(&p, FA_HAS_SINK);
        test_add_bias(&p, dtype);
        p.features.softcap = (i / 32) % 2 != 0 ? 2.0 : 0.0;
        const fa_gradients g = test_gradients(&p, wanted);
        const fa_plan plan = test_plan_backward(run, &p, &g);
        if (dtype != FA_F64 && (learned != 0 || of_keys)) {
            check_row_sums(run, &plan);
            continue;
        }
        for (int k = 0; k < plan.count; k++) {
            CHECK(run, !plan.step[k].row_sums);
        }
    }
}

static void row_sums_go_from_one_pass_to_the_next(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 200, 300, 40);
    p.lse = (void *)0xb000;
    test_add_features(&p, FA_HAS_SINK | FA_HAS_SOFTCAP);
    fa_gradients g = test_gradients(&p, FA_WANT_DQ | FA_WANT_DSINK);
    g.dsink.data = (void *)0x9000;
    const fa_plan plan = test_plan_backward(run, &p, &g);
    fa_call call;
    if (!CHECK(run, plan.count == 3)) {
        return;
    }
    fa_call_fill(&p, &g, &plan, &plan.step[0], workspace, &call);
    const void *rows = call.args.rows;
    CHECK(run, call.args.row_sums == 0 && call.args.dsink == g.dsink.data);
    fa_call_fill(&p, &g, &plan, &plan.step[1], workspace, &call);
    CHECK(run, call.args.row_sums == 1 && call.args.rows == rows);
    CHECK(run, bytes_at(&call, rows, FA_READ | FA_WRITE) == 4);
    CHECK(run, elements_at(&call, rows) == (int64_t)1600 * FA_ROW_NUMBERS);
    fa_call_fill(&p, &g, &plan, &plan.step[2], workspace, &call);
    CHECK(run, call.args.row_sums == 1 && call.args.rows == rows);
    CHECK(run, call.args.dsink == g.dsink.data);
    CHECK(run, call.args.prepare == FA_SET_DOUT);
    CHECK(run, bytes_at(&call, rows, FA_READ | FA_WRITE) == 4);
    CHECK(run, call.args.out.data == NULL && call.args.dout.data == NULL);
}

static void preparing_adds_up_as_the_passes_do(test_run *run)
{
    static const struct {
        fa_dtype dtype;
        fa_fp32 fp32;
        int64_t dim;
        uint32_t features;
        uint32_t granules;
    } cases[] = {{FA_F32, FA_FP32_FAST, 32, 0, 4},
                 {FA_F32, FA_FP32_FAST, 32, FA_HAS_SOFTCAP, 8},
                 {FA_F32, FA_FP32_FAST, 33, 0, 8},
                 {FA_F32, FA_FP32_EXACT, 32, 0, 0},
                 {FA_F64, FA_FP32_AUTO, 32, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fa_problem p = test_problem(1, 1, 1, 40, 40, cases[i].dim);
        test_retype(&p, cases[i].dtype);
        test_add_features(&p, cases[i].features);
        p.fp32 = cases[i].fp32;
        p.lse = (void *)0xb000;
        const fa_gradients g = test_gradients(&p, FA_WANT_DQ);
        const fa_plan plan = test_plan_backward(run, &p, &g);
        fa_call call;
        fa_call_fill(&p, &g, &plan, &plan.step[0], workspace, &call);
        CHECK(run, call.args.apart == cases[i].granules);
    }
}

static void row_sums_without_dq_are_made_where_it_would_be(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 200, 300, 40);
    p.lse = (void *)0xb000;
    test_add_features(&p, FA_HAS_SINK);
    const fa_gradients g = test_gradients(&p, FA_WANT_DSINK);
    const fa_plan plan = test_plan_backward(run, &p, &g);
    fa_call call;
    if (!CHECK(run, plan.count == 3 && plan.step[1].row_sums)) {
        return;
    }
    CHECK(run, plan.step[1].variant->pass == FA_BACKWARD_Q);
    fa_call_fill(&p, &g, &plan, &plan.step[1], workspace, &call);
    CHECK(run, call.args.dq.data == NULL && call.args.dbias.data == NULL);
    CHECK(run, call.args.row_sums == 1);
    CHECK(run, bytes_at(&call, call.args.rows, FA_READ | FA_WRITE) == 4);
}

static void dsink_alone_needs_no_gradient_pass_but_for_row_sums(test_run *run)
{
    for (int dtype = FA_F16; dtype <= FA_F64; dtype++) {
        char symbols[FA_SYMBOLS_CHARS];
        fa_call call;
        fa_problem p = test_problem(2, 4, 2, 200, 300, 40);
        test_retype(&p, (fa_dtype)dtype);
        test_add_features(&p, FA_HAS_SINK);
        fa_gradients g = test_gradients(&p, FA_WANT_DSINK);
        g.dsink.data = (void *)0x9000;
        const fa_plan plan = test_plan_backward(run, &p, &g);
        const bool corrected = p.q.dtype != FA_F64; /* see above */
        CHECK(run, plan.count == 1 || corrected);
        CHECK(run, (plan.step[0].prepare & FA_SET_DOUT) != 0);
        fa_call_fill(&p, &g, &plan, &plan.step[0], workspace, &call);
        CHECK(run, call.args.sink == p.features.sink.data);
        CHECK(run, call.args.dsink == g.dsink.data);
        CHECK(run, call.args.per_unit == 1.0 / p.scale);
        fa_plan_symbols(&plan, symbols);
        CHECK_TEXT(run, symbols, plan.step[corrected].variant->symbol);
    }
}

/* -- diagonals ------------------------------------------------------------- */

static fa_args forward_args(test_run *run, const fa_problem *p)
{
    fa_call call;
    const fa_plan plan = test_plan_forward(run, p);
    memset(&call, 0x5a, sizeof call); /* what is not filled shows */
    fa_call_fill(p, NULL, &plan, &plan.step[0], workspace, &call);
    return call.args;
}

/* Whether row i sees key j, as the problem says it; all in 64 bits. */
static bool sees(const fa_problem *p, int64_t i, int64_t j)
{
    const bool top_left =
        p->causal == FA_CAUSAL_TOP_LEFT || p->causal == FA_CAUSAL_NONE_TOP_LEFT;
    const int64_t own = i + (top_left ? 0 : p->k.size[2] - p->q.size[2]);
    const bool causal =
        p->causal == FA_CAUSAL_TOP_LEFT || p->causal == FA_CAUSAL_BOTTOM_RIGHT;
    return (!causal || j <= own) &&
           (p->window_left < 0 || j >= own || own - j <= p->window_left) &&
           (p->window_right < 0 || j <= own || j - own <= p->window_right);
}

static void diagonals_say_what_masks_and_windows_say(test_run *run)
{
    static const int64_t lengths[] = {1, 2, 5, 7};
    static const int64_t windows[] = {
        -1, 0, 1, 2, 4, 6, 7, 11, LONGEST, INT64_C(1) << 31, INT64_MAX};
    enum { WINDOWS = sizeof windows / sizeof windows[0] };
    for (int n = 0; n < 4 * 4 * 4 * WINDOWS * WINDOWS; n++) {
        fa_problem p =
            test_problem(1, 1, 1, lengths[n / 4 % 4], lengths[n / 16 % 4], 8);
        p.causal = n % 4;
        p.window_left = windows[n / 64 % WINDOWS];
        p.window_right = windows[n / 64 / WINDOWS];
        const fa_args args = forward_args(run, &p);
        CHECK(run, args.first_diagonal >= -args.seqlen_q);
        CHECK(run, args.diagonal <= args.seqlen_k);
        for (int i = 0; i < args.seqlen_q; i++) {
            for (int j = 0; j < args.seqlen_k; j++) {
                const bool seen =
                    i + args.first_diagonal <= j && j <= i + args.diagonal;
                if (!CHECK(run, seen == sees(&p, i, j))) {
                    printf("case %d, row %d, key %d\n", n, i, j);
                }
            }
        }
    }
}

static void open_windows_have_the_diagonals_of_no_window(test_run *run)
{
    fa_problem p = test_problem(1, 1, 1, 65, 129, 8);
    fa_args args = forward_args(run, &p);
    CHECK(run, args.first_diagonal == -65 && args.diagonal == 129);
    CHECK(run, args.alibi_diagonal == 64);
    p.causal = FA_CAUSAL_NONE_TOP_LEFT;
    args = forward_args(run, &p);
    CHECK(run, args.first_diagonal == -65 && args.diagonal == 129);
    CHECK(run, args.alibi_diagonal == 0);
    p.window_left = 3;
    p.window_right = 2;
    args = forward_args(run, &p);
    CHECK(run, args.first_diagonal == -3 && args.diagonal == 2);
    p.causal = FA_CAUSAL_TOP_LEFT; /* allows none behind a row's own */
    CHECK(run, forward_args(run, &p).diagonal == 0);
    p.causal = FA_CAUSAL_NONE;
    args = forward_args(run, &p);
    CHECK(run, args.first_diagonal == 61 && args.diagonal == 66);
}

static void the_longest_sequences_have_diagonals_of_32_bits(test_run *run)
{
    static const int64_t windows[] = {-1, 0, LONGEST, INT64_MAX};
    for (int n = 0; n < 2 * 4 * 4 * 4; n++) {
        const bool more_keys = n % 2 == 1;
        fa_problem p = test_problem(1, 1, 1, more_keys ? 1 : LONGEST,
                                    more_keys ? LONGEST : 1, 8);
        p.causal = n / 2 % 4;
        p.window_left = windows[n / 8 % 4];
        p.window_right = windows[n / 32];
        const fa_args args = forward_args(run, &p);
        const int64_t rows[] = {0, p.q.size[2] / 2, p.q.size[2] - 1};
        const int64_t keys[] = {0, p.k.size[2] / 2, p.k.size[2] - 1};
        CHECK(run, args.first_diagonal >= -args.seqlen_q);
        CHECK(run, args.diagonal <= args.seqlen_k);
        for (int at = 0; at < 9; at++) {
            const int64_t i = rows[at / 3];
            const int64_t j = keys[at % 3];
            CHECK(run, (i + args.first_diagonal <= j &&
                        j <= i + args.diagonal) == sees(&p, i, j));
        }
    }
}

static void sink_keys_count_beside_a_left_window_alone(test_run *run)
{
    fa_problem p = test_problem(1, 1, 1, 65, 129, 8);
    p.features.sink_keys = 4;
    CHECK(run, forward_args(run, &p).sink_keys == 0);
    p.window_left = 0;
    CHECK(run, forward_args(run, &p).sink_keys == 4);
    p.features.sink_keys = LONGEST;
    CHECK(run, forward_args(run, &p).sink_keys == LONGEST);
}

/* -- numbers --------------------------------------------------------------- */

static void dropout_keeps_a_number_of_65536(test_run *run)
{
    static const struct {
        double p;
        uint32_t keep;
        int32_t keep_log2;
    } cases[] = {{0.0, 65536, 0},  {0x1p-18, 65536, 0}, {0x1p-16, 65535, 1},
                 {0.25, 49152, 1}, {0.5, 32768, 1},     {0.500001, 32768, 1},
                 {0.6, 26214, 2},  {0.75, 16384, 2},    {0.9, 6554, 4},
                 {0.99999, 1, 16}, {0.9999999, 1, 16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = test_problem(1, 1, 1, 8, 8, 8);
        p.features.dropout_p = cases[i].p;
        p.features.seed = (const int64_t *)0x7000;
        const fa_args args = forward_args(run, &p);
        const bool drops = cases[i].keep != 65536;
        CHECK(run, args.keep == cases[i].keep);
        CHECK(run, args.keep_log2 == cases[i].keep_log2);
        CHECK(run, args.keep_scale == 65536.0 / cases[i].keep);
        CHECK(run, ldexp(1.0, args.keep_log2) >= args.keep_scale);
        CHECK(run, (args.seed != NULL) == drops);
    }
}

static void softcap_comes_with_twice_its_reciprocal(test_run *run)
{
    fa_problem p = test_problem(1, 1, 1, 8, 8, 8);
    fa_args args = forward_args(run, &p);
    CHECK(run, args.softcap == 0.0 && args.softcap_inverse == 0.0);
    p.features.softcap = 50.0;
    args = forward_args(run, &p);
    CHECK(run, args.softcap == 50.0 && args.softcap_inverse == 2.0 / 50.0);
}

static void what_softcap_multiplies_scores_with_is_a_finite_float(test_run *run)
{
    static const double scales[] = {0.0,     1.0,    127.0,    128.0,
                                    0x1p64,  0x1p90, 0x1p126,  -0x1p126,
                                    0x1p-60, 1e-30,  0x1p-120, 0x1.fffp126};
    static const double caps[] = {0x1p-120, 0x1p-64, 1.0, 0x1p120};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        for (size_t c = 0; c < sizeof caps / sizeof caps[0]; c++) {
            for (int d = FA_F16; d <= FA_F64; d++) {
                fa_problem p = test_problem(1, 1, 1, 8, 8, 8);
                test_retype(&p, (fa_dtype)d);
                p.scale = scales[i];
                p.features.softcap = caps[c];
                const fa_args args = forward_args(run, &p);
                const double exact = 2.0 / caps[c];
                const float unit = args.in_log2 != 0 ? 1.0F : args.scale_log2;
                const float factor = unit * (float)args.softcap_inverse;
                const bool fits = (double)unit * exact < 0x1p127;
                CHECK(run, d == FA_F64 || isfinite(factor));
                CHECK(run, args.softcap_inverse <= exact);
                CHECK(run, args.softcap_inverse == exact ||
                               (d != FA_F64 && !fits && factor > 0x1p126F));
            }
        }
    }
}

/* -- memory ---------------------------------------------------------------- */

static void a_broadcast_bias_has_strides_of_zero(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 65, 129, 40);
    test_add_features(&p, FA_HAS_BIAS | FA_HAS_MASK);
    p.features.bias.size[0] = p.features.bias.size[2] = 1;
    p.features.mask.size[1] = 1;
    fa_args args = forward_args(run, &p);
    CHECK(run, args.bias.data == p.features.bias.data);
    CHECK(run, args.bias.stride[0] == 0 && args.bias.stride[2] == 0);
    CHECK(run, args.bias.stride[1] == 65 * 129 && args.bias.stride[3] == 1);
    CHECK(run, args.stored_bias == FA_F32);
    CHECK(run, args.mask.data == p.features.mask.data);
    CHECK(run, args.mask.stride[1] == 0 && args.mask.stride[2] == 129);
    p.features.bias.dtype = FA_F16;
    CHECK(run, forward_args(run, &p).stored_bias == FA_F16);
}

static void slopes_of_one_batch_serve_all(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 65, 129, 40);
    test_add_features(&p, FA_HAS_ALIBI);
    CHECK(run, forward_args(run, &p).alibi_batch == 4);
    p.features.alibi.size[0] = 1;
    const fa_args args = forward_args(run, &p);
    CHECK(run, args.alibi_batch == 0);
    CHECK(run, args.alibi == p.features.alibi.data);
}

/* The first one. */
static const fa_step *step_of(const fa_plan *plan, fa_pass pass)
{
    for (int i = 0; i < plan->count; i++) {
        if (plan->step[i].variant->pass == pass) {
            return &plan->step[i];
        }
    }
    return NULL;
}

/* Each pass gets what it reads and nothing else. */
static void check_pass(test_run *run, fa_problem *p, fa_pass pass)
{
    const fa_features *f = &p->features;
    const bool makes_weights = pass != FA_PREPARE;
    const bool of_keys = pass == FA_BACKWARD_KV;
    const bool reads_sink = pass == FA_PREPARE || pass == FA_FORWARD;
    const bool spans = f->span_q.data != NULL;
    fa_call call;
    fa_gradients g = test_gradients(
        p, ALL | FA_WANT_DBIAS | (f->sink.data != NULL ? FA_WANT_DSINK : 0));
    g.dbias.data = (void *)0x9000;
    g.dsink.data = (void *)0xa000;
    const bool forward = pass == FA_FORWARD;
    const fa_plan plan =
        forward ? test_plan_forward(run, p) : test_plan_backward(run, p, &g);
    memset(&call, 0x5a, sizeof call);
    fa_call_fill(p, forward ? NULL : &g, &plan, step_of(&plan, pass), workspace,
                 &call);
    const fa_args *a = &call.args;
    const fa_tensor *lists = of_keys ? &f->blocks_t : &f->blocks;

    CHECK(run, a->bias.data == (makes_weights ? f->bias.data : NULL));
    CHECK(run, bytes_at(&call, a->bias.data, FA_READ) == 4 * makes_weights);
    CHECK(run, a->mask.data == (makes_weights ? f->mask.data : NULL));
    CHECK(run, bytes_at(&call, a->mask.data, FA_READ) == makes_weights);
    CHECK(run, a->alibi == (makes_weights ? f->alibi.data : NULL));
    CHECK(run, bytes_at(&call, a->alibi, FA_READ) == 4 * makes_weights);
    CHECK(run, a->seed == (makes_weights ? f->seed : NULL));
    CHECK(run, bytes_at(&call, a->seed, FA_READ) == 8 * makes_weights);
    CHECK(run, elements_at(&call, f->seed) == 2 * makes_weights);
    CHECK(run, a->sink == (reads_sink ? f->sink.data : NULL));
    CHECK(run, bytes_at(&call, a->sink, FA_READ) == 4 * reads_sink);
    CHECK(run, a->dsink == (pass == FA_PREPARE ? g.dsink.data : NULL));
    CHECK(run, bytes_at(&call, a->dsink, FA_WRITE) == 4 * (pass == FA_PREPARE));
    CHECK(run,
          a->dbias.data == (pass == FA_BACKWARD_BIAS ? g.dbias.data : NULL));
    CHECK(run, bytes_at(&call, a->dbias.data, FA_WRITE) ==
                   4 * (pass == FA_BACKWARD_BIAS));
    CHECK(run, (a->span_q != NULL) == (makes_weights && spans));
    CHECK(run,
          bytes_at(&call, a->span_q, FA_READ) == 4 * (makes_weights && spans));
    CHECK(run, (a->span_k != NULL) == (of_keys && spans));
    CHECK(run, bytes_at(&call, a->span_k, FA_READ) == 4 * (of_keys && spans));
    CHECK(run, a->blocks.list == (makes_weights ? lists->data : NULL));
    CHECK(run, bytes_at(&call, a->blocks.list, FA_READ) ==
                   4 * (makes_weights && !spans));
    if (makes_weights && !spans) {
        CHECK(run, a->blocks.own == (of_keys ? f->block_k : f->block_q));
        CHECK(run, a->blocks.walked == (of_keys ? f->block_q : f->block_k));
        CHECK(run, a->blocks.width == lists->size[3] - 1);
        CHECK(run, elements_at(&call, lists->data) ==
                       lists->size[0] * lists->size[1] * lists->size[2] *
                           lists->size[3]);
    }
    CHECK(run, a->in_log2 == 0 && a->per_unit == 1.0 / p->scale);
}

static void each_pass_is_told_the_features_that_it_reads(test_run *run)
{
    static const struct kind {
        fa_dtype dtype;
        fa_fp32 fp32;
    } kinds[] = {{FA_F16, FA_FP32_AUTO},
                 {FA_BF16, FA_FP32_AUTO},
                 {FA_F32, FA_FP32_FAST},
                 {FA_F32, FA_FP32_EXACT}};
    for (int pass = FA_FORWARD; pass <= FA_BACKWARD_BIAS; pass++) {
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
            fa_problem p = test_problem(2, 4, 2, 300, 600, 40);
            test_retype(&p, kinds[i].dtype);
            p.fp32 = kinds[i].fp32;
            p.lse = (void *)0xb000;
            test_add_features(&p, EVERY & ~(uint32_t)FA_HAS_SPANS);
            check_pass(run, &p, (fa_pass)pass);
            p = test_problem(1, 4, 2, 300, 600, 40);
            test_retype(&p, kinds[i].dtype);
            p.fp32 = kinds[i].fp32;
            p.lse = (void *)0xb000;
            test_add_features(
                &p, EVERY & ~(uint32_t)(FA_HAS_BLOCKS | FA_HAS_SINK_KEYS));
            check_pass(run, &p, (fa_pass)pass);
        }
    }
}

static void lists_of_blocks_have_strides_of_what_they_repeat(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 300, 600, 40);
    test_add_features(&p, FA_HAS_BLOCKS); /* 3 blocks of 1 + 3 */
    fa_tensor *blocks = &p.features.blocks;
    fa_args args = forward_args(run, &p);
    CHECK(run, args.blocks.head == 12 && args.blocks.batch == 48);
    CHECK(run, args.blocks.width == 3);
    blocks->size[1] = 1;
    blocks->stride[0] = 12;
    args = forward_args(run, &p);
    CHECK(run, args.blocks.head == 0 && args.blocks.batch == 12);
    blocks->size[0] = 1;
    args = forward_args(run, &p);
    CHECK(run, args.blocks.head == 0 && args.blocks.batch == 0);
}

/* Without features a call names what it always has. */
static void absent_features_leave_no_trace(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 65, 129, 40);
    const fa_args args = forward_args(run, &p);
    const fa_view none = {0};
    CHECK(run, memcmp(&args.bias, &none, sizeof none) == 0);
    CHECK(run, memcmp(&args.mask, &none, sizeof none) == 0);
    CHECK(run, args.alibi == NULL && args.sink == NULL && args.seed == NULL);
    CHECK(run, args.span_q == NULL && args.span_k == NULL);
    CHECK(run, args.blocks.list == NULL && args.dsink == NULL);
    CHECK(run, args.keep == 65536 && args.keep_scale == 1.0);
    CHECK(run, args.keep_log2 == 0 && args.sink_keys == 0);
    CHECK(run, args.in_log2 == 0 && args.per_unit == 0.0);
}

void test_features(test_run *run)
{
    RUN(run, each_feature_takes_the_full_kernels);
    RUN(run, what_plain_kernels_serve_goes_to_them);
    RUN(run, the_reason_names_what_made_a_plan_full);
    RUN(run, dbias_is_the_last_step_in_the_widest_arithmetic);
    RUN(run, a_backward_of_bfloat16_with_dbias_has_the_most_steps);
    RUN(run, the_grid_of_dbias_covers_the_bias_alone);
    RUN(run, a_bias_of_too_many_tiles_is_refused);
    RUN(run, dsink_alone_needs_no_gradient_pass_but_for_row_sums);
    RUN(run, delta_is_corrected_for_what_is_stored_in_fp32);
    RUN(run, row_sums_go_from_one_pass_to_the_next);
    RUN(run, preparing_adds_up_as_the_passes_do);
    RUN(run, row_sums_without_dq_are_made_where_it_would_be);
    RUN(run, diagonals_say_what_masks_and_windows_say);
    RUN(run, open_windows_have_the_diagonals_of_no_window);
    RUN(run, the_longest_sequences_have_diagonals_of_32_bits);
    RUN(run, sink_keys_count_beside_a_left_window_alone);
    RUN(run, dropout_keeps_a_number_of_65536);
    RUN(run, softcap_comes_with_twice_its_reciprocal);
    RUN(run, what_softcap_multiplies_scores_with_is_a_finite_float);
    RUN(run, a_broadcast_bias_has_strides_of_zero);
    RUN(run, slopes_of_one_batch_serve_all);
    RUN(run, each_pass_is_told_the_features_that_it_reads);
    RUN(run, lists_of_blocks_have_strides_of_what_they_repeat);
    RUN(run, absent_features_leave_no_trace);
}
