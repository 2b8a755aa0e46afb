/* test_plan.c: what is accepted, what is refused and with which words, and
 * which kernel is chosen.  SPDX-License-Identifier: BSD-3-Clause */
#include "test.h"

#include <math.h>
#include <string.h>

/* The plan of a problem that must be legal. */
static fa_plan plan_of(test_run *run, const fa_problem *p)
{
    fa_plan plan;
    fa_error error = {""};
    if (!CHECK(run, fa_plan_make(p, &plan, &error) == FA_OK)) {
        CHECK_TEXT(run, error.text, "(no error)");
    }
    return plan;
}

static void check_choice(test_run *run, const fa_problem *p, const char *symbol,
                         const char *why)
{
    char text[FA_WHY_CHARS];
    fa_plan plan = plan_of(run, p);
    CHECK_TEXT(run, plan.variant == NULL ? "" : plan.variant->symbol, symbol);
    if (plan.variant != NULL && symbol[0] != '\0') {
        CHECK(run, strcmp(plan.variant->symbol, symbol) == 0);
    }
    CHECK(run, (plan.variant == NULL) == (symbol[0] == '\0'));
    fa_plan_why(&plan, text);
    CHECK_TEXT(run, text, why);
}

static void check_refused(test_run *run, const fa_problem *p,
                          const char *message)
{
    fa_plan plan;
    fa_error error = {"(accepted)"};
    CHECK(run, fa_plan_make(p, &plan, &error) != FA_OK);
    CHECK(run, plan.variant == NULL);
    CHECK_TEXT(run, error.text, message);
}

/* -- the choice ------------------------------------------------------------ */

static void every_row_of_the_table_is_chosen_for_its_own_head_dim(test_run *run)
{
    for (int i = 0; i < FA_VARIANT_COUNT; i++) {
        const fa_variant *v = &fa_variants[i];
        fa_problem p = test_problem(2, 4, 2, 200, 100, v->dim);
        if (v->load == FA_LOAD_NARROW) {
            p.q.data = (void *)2;
        }
        check_choice(run, &p, v->symbol, fa_load_name(v->load));
    }
}

static void the_smallest_bucket_that_holds_the_head_dim_is_chosen(test_run *run)
{
    fa_problem p = test_problem(1, 1, 1, 8, 8, 8);
    check_choice(run, &p, "fa_fwd_f16_d64_plain", "wide");
    p = test_problem(1, 1, 1, 8, 8, 72);
    check_choice(run, &p, "fa_fwd_f16_d128_plain", "wide");
    p = test_problem(1, 1, 1, 8, 8, 1);
    check_choice(run, &p, "fa_fwd_f16_d64_plain_narrow",
                 "narrow: head dim 1 is not a multiple of 8");
    p = test_problem(1, 1, 1, 8, 8, 127);
    check_choice(run, &p, "fa_fwd_f16_d128_plain_narrow",
                 "narrow: head dim 127 is not a multiple of 8");
}

static void the_grid_covers_every_row_head_and_batch(test_run *run)
{
    static const struct {
        int64_t rows;
        uint32_t x;
    } cases[] = {{1, 1}, {127, 1}, {128, 1}, {129, 2}, {1 << 30, 1 << 23}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_problem p = test_problem(3, 8, 2, cases[i].rows, 5, 64);
        fa_plan plan = plan_of(run, &p);
        CHECK(run, plan.grid[0] == cases[i].x);
        CHECK(run, plan.grid[1] == 8 && plan.grid[2] == 3);
    }
}

static void narrow_plans_say_which_tensor_and_stride_is_to_blame(test_run *run)
{
    const char *narrow = "fa_fwd_f16_d64_plain_narrow";
    fa_problem p = test_problem(2, 2, 2, 4, 4, 64);
    p.k.data = (void *)24;
    check_choice(run, &p, narrow, "narrow: k base is not 16-byte aligned");
    p = test_problem(2, 2, 2, 4, 4, 64);
    p.q.stride[2] = 77;
    check_choice(run, &p, narrow,
                 "narrow: q row stride 77 is not a multiple of 8");
    p = test_problem(2, 2, 2, 4, 4, 64);
    p.v.stride[1] = 257;
    check_choice(run, &p, narrow,
                 "narrow: v head stride 257 is not a multiple of 8");
    p = test_problem(2, 2, 2, 4, 4, 64);
    p.out.stride[0] = 515;
    check_choice(run, &p, narrow,
                 "narrow: out batch stride 515 is not a multiple of 8");
    p = test_problem(2, 2, 2, 4, 4, 64);
    p.k.stride[2] = 1 << 24;
    check_choice(run, &p, narrow,
                 "narrow: k row stride 16777216 is not below 2^24");
    p.k.stride[2] = (1 << 24) - 8;
    check_choice(run, &p, "fa_fwd_f16_d64_plain", "wide");
}

static void strides_of_dimensions_of_size_one_mean_nothing(test_run *run)
{
    fa_problem p = test_problem(1, 1, 1, 1, 1, 64);
    fa_tensor *const all[] = {&p.q, &p.k, &p.v, &p.out};
    for (int i = 0; i < 4; i++) {
        all[i]->stride[0] = INT64_MAX;
        all[i]->stride[1] = -77;
        all[i]->stride[2] = 3;
    }
    check_choice(run, &p, "fa_fwd_f16_d64_plain", "wide");
    p = test_problem(2, 2, 2, 4, 4, 1);
    p.q.stride[3] = 99;
    check_choice(run, &p, "fa_fwd_f16_d64_plain_narrow", "head dim 1");
}

static void empty_problems_need_no_kernel(test_run *run)
{
    fa_problem p = test_problem(0, 2, 2, 4, 4, 64);
    check_choice(run, &p, "", "empty: out has no elements");
    p = test_problem(2, 2, 2, 0, 4, 64);
    check_choice(run, &p, "", "empty: out has no elements");
    p = test_problem(2, 0, 0, 4, 4, 64);
    check_choice(run, &p, "", "empty: out has no elements");
    p = test_problem(2, 0, 2, 4, 4, 64);
    check_choice(run, &p, "", "empty: out has no elements");
    p = test_problem(2, 2, 1, 4, 0, 64);
    check_choice(run, &p, "", "empty: no keys");
    p = test_problem(2, 2, 1, 0, 0, 64);
    check_choice(run, &p, "", "empty: out has no elements");
}

/* -- limits ---------------------------------------------------------------- */

static void sizes_up_to_the_limits_are_accepted(test_run *run)
{
    fa_problem p = test_problem(65535, 1, 1, 1, 1, 128);
    plan_of(run, &p);
    p = test_problem(1, 65535, 1, 1, 1, 128);
    plan_of(run, &p);
    p = test_problem(1, 1, 1, 1 << 30, 1 << 30, 128);
    plan_of(run, &p);
}

static void sizes_beyond_the_limits_are_refused(test_run *run)
{
    fa_problem p = test_problem(65536, 1, 1, 1, 1, 64);
    check_refused(run, &p,
                  "q: expected a size of 0..65535 in dimension 0 "
                  "(batch), got 65536");
    p = test_problem(1, 65536, 1, 1, 1, 64);
    check_refused(run, &p, "in dimension 1 (head), got 65536");
    p = test_problem(1, 1, 1, 1, (1 << 30) + 1, 64);
    check_refused(run, &p,
                  "k: expected a size of 0..1073741824 in "
                  "dimension 2 (row), got 1073741825");
    p = test_problem(1, 1, 1, 1, 1, 129);
    check_refused(run, &p,
                  "q: expected a size of 0..128 in dimension 3 "
                  "(head dim), got 129");
    p = test_problem(1, 1, 1, 1, 1, 0);
    check_refused(run, &p, "q: expected a head dim of 1..128, got 0");
    p = test_problem(1, 1, 1, 1, 1, 64);
    p.v.size[2] = -3;
    check_refused(run, &p,
                  "v: expected a size of 0..1073741824 in "
                  "dimension 2 (row), got -3");
}

static void offsets_beyond_two_gigabytes_are_accepted(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 4, 4, 64);
    p.q.stride[0] = INT64_C(1) << 31;
    p.k.stride[1] = INT64_C(1) << 33;
    p.v.stride[2] = (INT64_C(1) << 31) - 8;
    check_choice(run, &p, "fa_fwd_f16_d64_plain_narrow",
                 "narrow: v row stride 2147483640 is not below 2^24");
}

static void offsets_beyond_int64_are_refused(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 4, 4, 64);
    p.q.stride[0] = INT64_MAX;
    check_refused(run, &p,
                  "q: expected byte offsets below 2^63, got stride "
                  "9223372036854775807 for 2 elements in "
                  "dimension 0");
    p = test_problem(2, 2, 2, 4, 4, 64);
    p.k.stride[2] = INT64_MAX / 8 / 3 + 1;
    check_refused(run, &p, "k: expected byte offsets below 2^63");
    /* Each fits, their sum does not. */
    p = test_problem(2, 2, 2, 4, 4, 64);
    p.v.stride[0] = INT64_MAX / 8 - 8;
    p.v.stride[1] = INT64_C(1) << 40;
    check_refused(run, &p, "v: expected byte offsets below 2^63");
}

static void an_output_that_cannot_exist_is_refused(test_run *run)
{
    /* q is a view that repeats one row, so q itself is small. */
    fa_problem p = test_problem(1, 1, 1, 1, 1, 128);
    p.q.size[0] = p.k.size[0] = p.v.size[0] = 65535;
    p.q.size[1] = 65535;
    p.q.size[2] = 1 << 30;
    memset(p.q.stride, 0, 3 * sizeof p.q.stride[0]);
    fa_tensor_like(&p.q, &p.out);
    check_refused(run, &p, "q: expected fewer than 2^59 elements in out");
    /* Exactly 2^59 is not fewer, the next smaller number of rows is. */
    p.q.size[0] = p.k.size[0] = p.v.size[0] = 1 << 14;
    p.q.size[1] = 1 << 15;
    p.q.size[2] = 1 << 24;
    p.q.size[3] = p.k.size[3] = p.v.size[3] = 64;
    fa_tensor_like(&p.q, &p.out);
    check_refused(run, &p, "q: expected fewer than 2^59 elements in out");
    p.q.size[2]--;
    fa_tensor_like(&p.q, &p.out);
    plan_of(run, &p);
}

/* -- refusals by name ------------------------------------------------------ */

static void shapes_that_do_not_match_are_refused_by_name(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 8, 8, 64);
    p.k.size[0] = 3;
    check_refused(run, &p,
                  "k: expected size 2 in dimension 0 (batch, as in "
                  "q), got 3");
    p = test_problem(2, 4, 2, 8, 8, 64);
    p.v.size[0] = 1;
    check_refused(run, &p,
                  "v: expected size 2 in dimension 0 (batch, as in "
                  "q), got 1");
    p = test_problem(2, 4, 2, 8, 8, 64);
    p.k.size[3] = 32;
    check_refused(run, &p,
                  "k: expected size 64 in dimension 3 (head dim, as "
                  "in q), got 32");
    p = test_problem(2, 4, 2, 8, 8, 64);
    p.v.size[3] = 32;
    check_refused(run, &p, "v: expected size 64 in dimension 3");
    p = test_problem(2, 4, 2, 8, 8, 64);
    p.v.size[1] = 4;
    check_refused(run, &p,
                  "v: expected size 2 in dimension 1 (head, as in "
                  "k), got 4");
    p = test_problem(2, 4, 2, 8, 8, 64);
    p.v.size[2] = 9;
    check_refused(run, &p,
                  "v: expected size 8 in dimension 2 (row, as in "
                  "k), got 9");
    p = test_problem(2, 4, 2, 8, 8, 64);
    p.out.size[2] = 9;
    check_refused(run, &p,
                  "out: expected size 8 in dimension 2 (row, as in "
                  "q), got 9");
}

static void heads_that_do_not_divide_are_refused(test_run *run)
{
    fa_problem p = test_problem(1, 6, 4, 8, 8, 64);
    check_refused(run, &p,
                  "k: expected a number of heads that divides the 6 "
                  "of q, got 4");
    p = test_problem(1, 2, 4, 8, 8, 64);
    check_refused(run, &p, "that divides the 2 of q, got 4");
    p = test_problem(1, 2, 0, 8, 8, 64);
    check_refused(run, &p, "that divides the 2 of q, got 0");
}

static void strides_that_no_kernel_reads_are_refused(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 8, 8, 64);
    p.k.stride[3] = 2;
    check_refused(run, &p,
                  "k: expected a contiguous last dimension, got "
                  "stride 2");
    p = test_problem(2, 2, 2, 8, 8, 64);
    p.v.stride[1] = -64;
    check_refused(run, &p,
                  "v: expected strides of at least 0, got -64 in "
                  "dimension 1");
}

static void an_output_that_overlaps_itself_is_refused(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 8, 8, 64);
    p.out.stride[2] = 63;
    check_refused(run, &p,
                  "out: expected elements that do not overlap, got "
                  "stride 63 in dimension 2, which spans 64");
    p = test_problem(2, 2, 2, 8, 8, 64);
    p.out.stride[0] = 0;
    check_refused(run, &p, "out: expected elements that do not overlap");
    p = test_problem(2, 2, 2, 8, 8, 64);
    p.out.stride[0] = p.out.stride[1];
    check_refused(run, &p, "out: expected elements that do not overlap");
    /* Interleaved heads, padded rows: legal. */
    p = test_problem(2, 2, 2, 8, 8, 64);
    p.out.stride[1] = 64;
    p.out.stride[2] = 2 * 64 + 8;
    p.out.stride[0] = 8 * p.out.stride[2];
    check_choice(run, &p, "fa_fwd_f16_d64_plain", "wide");
}

static void dtypes_are_refused_by_name(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 8, 8, 64);
    p.q.dtype = FA_BF16;
    check_refused(run, &p,
                  "q: not supported yet, expected dtype float16, "
                  "got bfloat16");
    p = test_problem(2, 2, 2, 8, 8, 64);
    p.v.dtype = FA_F32;
    check_refused(run, &p, "v: expected dtype float16 (as q), got float32");
}

static void scalars_out_of_range_are_refused(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 8, 8, 64);
    const double bad[] = {NAN, INFINITY, -INFINITY, 1e300, -0x1p127};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        p.scale = bad[i];
        check_refused(run, &p,
                      "scale: expected a finite number below "
                      "2^127, got ");
    }
    p.scale = -3.5;
    plan_of(run, &p);
    p.scale = 0.0;
    plan_of(run, &p);
    p.causal = 3;
    check_refused(run, &p,
                  "causal: expected 0 (none), 1 (top-left) or 2 "
                  "(bottom-right), got 3");
    p.causal = -1;
    check_refused(run, &p, "got -1");
}

/* -- the output's layout --------------------------------------------------- */

static void check_like(test_run *run, const int64_t size[4],
                       const int64_t stride[4], const int64_t expected[4])
{
    fa_tensor q = {.dtype = FA_F16};
    fa_tensor out;
    memcpy(q.size, size, sizeof q.size);
    memcpy(q.stride, stride, sizeof q.stride);
    fa_tensor_like(&q, &out);
    CHECK(run, memcmp(out.size, size, sizeof out.size) == 0);
    CHECK(run, memcmp(out.stride, expected, sizeof out.stride) == 0);
    CHECK(run, out.data == NULL);
}

static void outputs_are_dense_in_the_order_of_q(test_run *run)
{
    const int64_t size[4] = {2, 3, 5, 8};
    /* Transposed (B, S, H, D): dense, kept. */
    check_like(run, size, (int64_t[4]){120, 8, 24, 1},
               (int64_t[4]){120, 8, 24, 1});
    /* A slice of a packed qkv: same order, closed up. */
    check_like(run, size, (int64_t[4]){360, 8, 72, 1},
               (int64_t[4]){120, 8, 24, 1});
    /* Batch innermost of the three. */
    check_like(run, size, (int64_t[4]){8, 100, 300, 1},
               (int64_t[4]){8, 16, 48, 1});
    /* Expanded heads decide nothing and stay where they are. */
    check_like(run, size, (int64_t[4]){40, 0, 8, 1},
               (int64_t[4]){120, 40, 8, 1});
    /* Rows that overlap: the head dim stays innermost. */
    check_like(run, size, (int64_t[4]){500, 50, 1, 1},
               (int64_t[4]){120, 40, 8, 1});
}

static void long_messages_are_cut_and_stay_terminated(test_run *run)
{
    fa_error error;
    char name[3000];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    CHECK(run, fa_fail(&error, FA_EINVAL, "%s", name) == FA_EINVAL);
    CHECK(run, strlen(error.text) == sizeof error.text - 1);
}

void test_plan(test_run *run)
{
    RUN(run, every_row_of_the_table_is_chosen_for_its_own_head_dim);
    RUN(run, the_smallest_bucket_that_holds_the_head_dim_is_chosen);
    RUN(run, the_grid_covers_every_row_head_and_batch);
    RUN(run, narrow_plans_say_which_tensor_and_stride_is_to_blame);
    RUN(run, strides_of_dimensions_of_size_one_mean_nothing);
    RUN(run, empty_problems_need_no_kernel);
    RUN(run, sizes_up_to_the_limits_are_accepted);
    RUN(run, sizes_beyond_the_limits_are_refused);
    RUN(run, offsets_beyond_two_gigabytes_are_accepted);
    RUN(run, offsets_beyond_int64_are_refused);
    RUN(run, an_output_that_cannot_exist_is_refused);
    RUN(run, shapes_that_do_not_match_are_refused_by_name);
    RUN(run, heads_that_do_not_divide_are_refused);
    RUN(run, strides_that_no_kernel_reads_are_refused);
    RUN(run, an_output_that_overlaps_itself_is_refused);
    RUN(run, dtypes_are_refused_by_name);
    RUN(run, scalars_out_of_range_are_refused);
    RUN(run, outputs_are_dense_in_the_order_of_q);
    RUN(run, long_messages_are_cut_and_stay_terminated);
}
