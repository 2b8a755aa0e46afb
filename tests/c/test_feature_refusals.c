/* test_feature_refusals.c: which features are refused and with which words, and
 * what just passes.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "test.h"

#include <math.h>
#include <string.h>

enum { ALL = FA_WANT_DQ | FA_WANT_DK | FA_WANT_DV };

static void check_accepted(test_run *run, const fa_problem *p)
{
    const fa_gradients g = test_gradients(p, ALL);
    test_plan_forward(run, p);
    test_plan_backward(run, p, &g);
}

static void check_refused_backward(test_run *run, const fa_problem *p,
                                   const fa_gradients *g, const char *message)
{
    fa_plan plan;
    fa_error error = {"(accepted)"};
    CHECK(run, fa_plan_backward(p, g, &plan, &error) != FA_OK);
    CHECK(run, plan.count == 0);
    CHECK_TEXT(run, error.text, message);
}

/* By both passes, with the same words. */
static void check_refused(test_run *run, const fa_problem *p,
                          const char *message)
{
    const fa_gradients g = test_gradients(p, ALL);
    fa_plan plan;
    fa_error error = {"(accepted)"};
    CHECK(run, fa_plan_forward(p, &plan, &error) != FA_OK);
    CHECK(run, plan.count == 0);
    CHECK_TEXT(run, error.text, message);
    check_refused_backward(run, p, &g, message);
}

static fa_problem with(uint32_t features)
{
    fa_problem p = test_problem(1, 4, 2, 300, 600, 64);
    test_add_features(&p, features);
    return p;
}

/* -- bias and mask --------------------------------------------------------- */

static void sizes_of_a_bias_are_one_or_full(test_run *run)
{
    for (int d = 0; d < 4; d++) {
        fa_problem p = test_problem(2, 4, 2, 8, 6, 64);
        test_add_features(&p, FA_HAS_BIAS | FA_HAS_MASK);
        p.features.bias.size[d] = 1;
        check_accepted(run, &p);
        p.features.mask.size[d] = 1;
        check_accepted(run, &p);
    }
    fa_problem p = test_problem(2, 4, 2, 8, 6, 64);
    test_add_features(&p, FA_HAS_BIAS | FA_HAS_MASK);
    p.features.bias.size[3] = 5;
    check_refused(run, &p,
                  "bias: expected size 1 or 6 in dimension 3 (key), got 5");
    p.features.bias.size[3] = 6;
    p.features.mask.size[1] = 2; /* that of k */
    check_refused(run, &p,
                  "mask: expected size 1 or 4 in dimension 1 (head), got 2");
    p.features.mask.size[1] = 4;
    p.features.mask.size[2] = 0;
    check_refused(run, &p,
                  "mask: expected size 1 or 8 in dimension 2 (row), got 0");
}

static void a_bias_has_the_type_of_q_or_is_float(test_run *run)
{
    static const bool accepted[4][4] = {{true, false, true, false},
                                        {false, true, true, false},
                                        {false, false, true, false},
                                        {false, false, false, true}};
    for (int n = 0; n < 16; n++) {
        fa_problem p = test_problem(2, 4, 2, 8, 6, 64);
        test_retype(&p, (fa_dtype)(n / 4));
        test_add_bias(&p, (fa_dtype)(n % 4));
        if (accepted[n / 4][n % 4]) {
            check_accepted(run, &p);
        } else {
            check_refused(run, &p, "bias: expected dtype ");
        }
    }
    fa_problem p = test_problem(2, 4, 2, 8, 6, 64);
    test_add_bias(&p, FA_BF16);
    check_refused(run, &p,
                  "bias: expected dtype float16 or float32 (as q), got "
                  "bfloat16");
    test_retype(&p, FA_F64);
    p.features.bias.dtype = FA_F32;
    check_refused(run, &p, "bias: expected dtype float64 (as q), got float32");
}

/* Of rows and keys in bytes, because kernels hold offsets of 32 bits. */
static void long_strides_of_a_bias_are_refused(test_run *run)
{
    fa_problem p = with(FA_HAS_BIAS | FA_HAS_MASK);
    p.features.bias.stride[1] = INT64_C(1) << 40;
    p.features.bias.stride[2] = (1 << 22) - 1;
    p.features.mask.stride[3] = (1 << 24) - 1;
    check_accepted(run, &p);
    p.features.bias.stride[2]++;
    check_refused(run, &p,
                  "bias: expected a stride below 2^24 bytes in dimension 2 "
                  "(row), got 4194304 elements of 4");
    p = with(FA_HAS_BIAS | FA_HAS_MASK);
    p.features.mask.stride[3] = 1 << 24;
    check_refused(run, &p,
                  "mask: expected a stride below 2^24 bytes in dimension 3 "
                  "(key), got 16777216 elements of 1");
    p.features.mask.size[3] = 1; /* whose stride means nothing */
    check_accepted(run, &p);
    p.features.bias.stride[1] = -1;
    check_refused(
        run, &p, "bias: expected strides of at least 0, got -1 in dimension 1");
    p.features.bias.stride[1] = INT64_MAX / 8;
    check_refused(run, &p, "bias: expected byte offsets below 2^63");
}

/* Any order of dimensions, and repeated ones. */
static void strides_of_a_bias_may_be_zero(test_run *run)
{
    fa_problem p = with(FA_HAS_BIAS | FA_HAS_MASK);
    memset(p.features.bias.stride, 0, sizeof p.features.bias.stride);
    p.features.mask.stride[2] = 1;
    p.features.mask.stride[3] = 300;
    check_accepted(run, &p);
}

/* -- slopes and sink ------------------------------------------------------- */

static void slopes_are_refused_by_name(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 8, 6, 64);
    test_add_features(&p, FA_HAS_ALIBI);
    check_accepted(run, &p);
    p.features.alibi.size[0] = 3;
    check_refused(run, &p, "alibi: expected size 2 in dimension 0, got 3");
    p.features.alibi.size[0] = 1;
    check_accepted(run, &p);
    p.features.alibi.size[1] = 2;
    check_refused(run, &p, "alibi: expected size 4 in dimension 1, got 2");
    p.features.alibi.size[1] = 4;
    p.features.alibi.stride[1] = 2;
    check_refused(run, &p,
                  "alibi: expected a contiguous tensor, got stride 2 in "
                  "dimension 1");
    p.features.alibi.stride[1] = 1;
    p.features.alibi.dtype = FA_F16;
    check_refused(run, &p,
                  "alibi: expected dtype float32 (as lse), got float16");
}

static void a_sink_is_refused_by_name(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 8, 6, 64);
    test_add_features(&p, FA_HAS_SINK);
    check_accepted(run, &p);
    p.features.sink.size[0] = 2;
    check_refused(run, &p, "sink: expected size 4 in dimension 0, got 2");
    p.features.sink.size[0] = 4;
    p.features.sink.stride[0] = 0;
    check_refused(run, &p, "sink: expected a contiguous tensor, got stride 0");
    p = test_problem(2, 4, 2, 8, 6, 64);
    test_add_features(&p, FA_HAS_SINK);
    test_retype(&p, FA_F64);
    check_refused(run, &p,
                  "sink: expected dtype float64 (as lse), got float32");
}

/* -- numbers --------------------------------------------------------------- */

static void numbers_out_of_range_are_refused(test_run *run)
{
    static const double caps[] = {-1.0, 1e40, 1e-40, NAN, INFINITY};
    static const double drops[] = {-0.1, 1.0, NAN, 2.0};
    fa_problem p = with(FA_HAS_DROPOUT);
    for (size_t i = 0; i < sizeof caps / sizeof caps[0]; i++) {
        p.features.softcap = caps[i];
        check_refused(run, &p,
                      "softcap: expected 0 (none) or 2^-120..2^120, got ");
    }
    p.features.softcap = 0x1p120;
    check_accepted(run, &p);
    p.features.softcap = 0x1p-120;
    check_accepted(run, &p);
    for (size_t i = 0; i < sizeof drops / sizeof drops[0]; i++) {
        p.features.dropout_p = drops[i];
        check_refused(run, &p,
                      "dropout_p: expected at least 0 and below 1, got ");
    }
    p.features.dropout_p = nextafter(1.0, 0.0);
    check_accepted(run, &p);
    p.features.seed = NULL;
    check_refused(run, &p, "seed: expected 2 elements for dropout_p 1, got");
    p.features.dropout_p = 0x1p-18; /* drops nothing */
    check_accepted(run, &p);
}

static void windows_and_sink_keys_out_of_range_are_refused(test_run *run)
{
    fa_problem p = test_problem(1, 4, 2, 300, 600, 64);
    p.window_left = -2;
    check_refused(run, &p,
                  "window_left: expected -1 (open) or a number of keys, got "
                  "-2");
    p.window_left = INT64_MAX;
    p.window_right = INT64_MIN;
    check_refused(run, &p,
                  "window_right: expected -1 (open) or a number of keys, got "
                  "-9223372036854775808");
    p.window_right = INT64_MAX;
    p.features.sink_keys = 1 << 30;
    check_accepted(run, &p);
    p.features.sink_keys++;
    check_refused(run, &p, "sink_keys: expected 0..1073741824, got 1073741825");
    p.features.sink_keys = -1;
    check_refused(run, &p, "sink_keys: expected 0..1073741824, got -1");
}

/* -- spans ----------------------------------------------------------------- */

static void spans_are_refused_by_name(test_run *run)
{
    fa_problem p = with(FA_HAS_SPANS);
    check_accepted(run, &p);
    p.features.span_q.size[0] = 299;
    check_refused(run, &p, "span_q: expected size 300 in dimension 0, got 299");
    p = with(FA_HAS_SPANS);
    p.features.span_q.size[1] = 2;
    check_refused(run, &p, "span_q: expected size 4 in dimension 1, got 2");
    p = with(FA_HAS_SPANS);
    p.features.span_k.stride[0] = 3;
    check_refused(run, &p,
                  "span_k: expected a contiguous tensor, got stride 3 in "
                  "dimension 0");
    p = with(FA_HAS_SPANS);
    p.features.span_q.data = NULL;
    check_refused(run, &p, "span_q: expected one beside span_k, got none");
    p = test_problem(2, 4, 2, 300, 600, 64);
    test_add_features(&p, FA_HAS_SPANS);
    check_refused(run, &p,
                  "span_q: expected a q of batch size 1 beside it, got 2");
}

static void what_spans_say_must_not_be_said_twice(test_run *run)
{
    fa_problem p = with(FA_HAS_SPANS);
    p.causal = FA_CAUSAL_NONE_TOP_LEFT;
    check_refused(run, &p, "causal: expected 0 beside span_q, got 3");
    p = with(FA_HAS_SPANS);
    p.window_left = 4;
    check_refused(run, &p, "window_left: expected -1 beside span_q, got 4");
    p = with(FA_HAS_SPANS);
    p.window_right = 0;
    check_refused(run, &p, "window_right: expected -1 beside span_q, got 0");
    p = with(FA_HAS_SPANS);
    p.features.sink_keys = 1;
    check_refused(run, &p, "sink_keys: expected 0 beside span_q, got 1");
    p = with(FA_HAS_SPANS | FA_HAS_BLOCKS);
    check_refused(run, &p, "blocks: expected none beside span_q, got some");
    p = with(FA_HAS_SPANS | FA_HAS_BIAS | FA_HAS_MASK | FA_HAS_ALIBI |
             FA_HAS_SINK | FA_HAS_SOFTCAP | FA_HAS_DROPOUT);
    check_accepted(run, &p);
}

static void a_backward_needs_both_spans_and_both_lists(test_run *run)
{
    fa_problem p = with(FA_HAS_SPANS);
    p.features.span_k.data = NULL;
    const fa_gradients g = test_gradients(&p, ALL);
    test_plan_forward(run, &p);
    check_refused_backward(run, &p, &g,
                           "span_k: expected one beside span_q, got none");
    p = with(FA_HAS_BLOCKS);
    p.features.blocks_t.data = NULL;
    test_plan_forward(run, &p);
    check_refused_backward(run, &p, &g,
                           "blocks_t: expected one beside blocks, got none");
}

/* -- blocks ---------------------------------------------------------------- */

static void lists_of_blocks_are_refused_by_name(test_run *run)
{
    static const int64_t bad[] = {0, -128, 64, 129, (INT64_C(1) << 31)};
    fa_problem p = with(FA_HAS_BLOCKS);
    check_accepted(run, &p);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        p = with(FA_HAS_BLOCKS);
        p.features.block_q = bad[i];
        check_refused(run, &p,
                      "block_q: expected a multiple of 128 up to 2^30, got ");
        p = with(FA_HAS_BLOCKS);
        p.features.block_k = bad[i];
        check_refused(run, &p,
                      "block_k: expected a multiple of 128 up to 2^30, got ");
    }
    p = with(FA_HAS_BLOCKS);
    p.features.blocks.size[2] = 2;
    check_refused(run, &p, "blocks: expected size 3 in dimension 2, got 2");
    p = with(FA_HAS_BLOCKS);
    p.features.blocks.size[1] = 2;
    check_refused(run, &p, "blocks: expected size 4 in dimension 1, got 2");
    p = with(FA_HAS_BLOCKS);
    p.features.blocks_t.size[2] = 2;
    check_refused(run, &p, "blocks_t: expected size 3 in dimension 2, got 2");
    p = with(FA_HAS_BLOCKS);
    p.features.blocks.size[3] = 0;
    check_refused(run, &p,
                  "blocks: expected a size of 1..1073741824 in dimension 3, "
                  "got 0");
    p = with(FA_HAS_BLOCKS);
    p.features.blocks.stride[2] = 8;
    check_refused(run, &p,
                  "blocks: expected a contiguous tensor, got stride 8 in "
                  "dimension 2");
    p = with(FA_HAS_BLOCKS);
    p.features.blocks.data = NULL;
    check_refused(run, &p, "blocks: expected one beside blocks_t, got none");
}

/* -- gradients ------------------------------------------------------------- */

static void gradients_of_absent_features_are_refused(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 8, 6, 64);
    fa_gradients g = test_gradients(&p, FA_WANT_DBIAS);
    check_refused_backward(run, &p, &g,
                           "wanted: expected no 8 (dbias) without bias, got 8");
    g = test_gradients(&p, FA_WANT_DSINK | FA_WANT_DQ);
    check_refused_backward(
        run, &p, &g, "wanted: expected no 16 (dsink) without sink, got 17");
}

static void gradients_of_features_are_refused_by_name(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 8, 6, 64);
    test_add_features(&p, FA_HAS_BIAS | FA_HAS_SINK);
    const fa_gradients good = test_gradients(&p, FA_WANT_DBIAS | FA_WANT_DSINK);
    fa_gradients g = good;
    test_plan_backward(run, &p, &g);
    g.dbias.dtype = FA_F16;
    check_refused_backward(
        run, &p, &g, "dbias: expected dtype float32 (as bias), got float16");
    g = good;
    g.dbias.size[1] = 1;
    check_refused_backward(run, &p, &g,
                           "dbias: expected size 4 in dimension 1 (head, as in "
                           "bias), got 1");
    g = good;
    g.dbias.stride[0] = 0;
    check_refused_backward(run, &p, &g,
                           "dbias: expected elements that do not overlap, got "
                           "stride 0 in dimension 0");
    g = good;
    g.dbias.stride[2] = 1 << 22;
    check_refused_backward(run, &p, &g,
                           "dbias: expected a stride below 2^24 bytes");
    g = good;
    g.dsink.dtype = FA_F64;
    check_refused_backward(
        run, &p, &g, "dsink: expected dtype float32 (as lse), got float64");
    g = good;
    g.dsink.size[2] = 7;
    check_refused_backward(run, &p, &g,
                           "dsink: expected size 8 in dimension 2, got 7");
    g = good;
    g.dsink.stride[1] = 9;
    check_refused_backward(run, &p, &g,
                           "dsink: expected a contiguous tensor, got stride 9 "
                           "in dimension 1");
    g = good;
    g.wanted = FA_WANT_DQ; /* the others are not looked at */
    g.dbias.dtype = FA_F64;
    g.dsink.size[0] = -1;
    test_plan_backward(run, &p, &g);
}

/* An expanded bias is small, its gradient is not. */
static void a_dbias_that_cannot_exist_is_refused(test_run *run)
{
    fa_problem p = test_problem(1, 65535, 1, 1 << 20, 1 << 24, 8);
    test_add_bias(&p, FA_F16);
    memset(p.features.bias.stride, 0, sizeof p.features.bias.stride);
    const fa_gradients g = test_gradients(&p, FA_WANT_DBIAS);
    check_refused_backward(run, &p, &g,
                           "bias: expected fewer than 2^59 elements in dbias");
}

void test_feature_refusals(test_run *run)
{
    RUN(run, sizes_of_a_bias_are_one_or_full);
    RUN(run, a_bias_has_the_type_of_q_or_is_float);
    RUN(run, long_strides_of_a_bias_are_refused);
    RUN(run, strides_of_a_bias_may_be_zero);
    RUN(run, slopes_are_refused_by_name);
    RUN(run, a_sink_is_refused_by_name);
    RUN(run, numbers_out_of_range_are_refused);
    RUN(run, windows_and_sink_keys_out_of_range_are_refused);
    RUN(run, spans_are_refused_by_name);
    RUN(run, what_spans_say_must_not_be_said_twice);
    RUN(run, a_backward_needs_both_spans_and_both_lists);
    RUN(run, lists_of_blocks_are_refused_by_name);
    RUN(run, gradients_of_absent_features_are_refused);
    RUN(run, gradients_of_features_are_refused_by_name);
    RUN(run, a_dbias_that_cannot_exist_is_refused);
}
