/* test_refusals.c: what is refused and with which words, what just passes,
 * and how outputs and the residue are laid out.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "test.h"

#include <math.h>
#include <string.h>

static void check_accepted(test_run *run, const fa_problem *p)
{
    fa_plan plan;
    fa_error error = {"(no error)"};
    if (!CHECK(run, fa_plan_forward(p, &plan, &error) == FA_OK)) {
        CHECK_TEXT(run, error.text, "(no error)");
    }
}

static void check_refused(test_run *run, const fa_problem *p,
                          const char *message)
{
    fa_plan plan;
    fa_error error = {"(accepted)"};
    CHECK(run, fa_plan_forward(p, &plan, &error) != FA_OK);
    CHECK(run, plan.count == 0);
    CHECK_TEXT(run, error.text, message);
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

/* -- limits ---------------------------------------------------------------- */

static void sizes_up_to_the_limits_are_accepted(test_run *run)
{
    fa_problem p = test_problem(65535, 1, 1, 1, 1, 128);
    check_accepted(run, &p);
    p = test_problem(1, 65535, 1, 1, 1, 128);
    check_accepted(run, &p);
    p = test_problem(1, 1, 1, 1 << 30, 1 << 30, 128);
    check_accepted(run, &p);
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
    p = test_problem(1, 1, 1, 1, 1, 257);
    check_refused(run, &p,
                  "q: expected a size of 0..256 in dimension 3 "
                  "(head dim), got 257");
    p = test_problem(1, 1, 1, 1, 1, 0);
    check_refused(run, &p, "q: expected a head dim of 1..256, got 0");
    p = test_problem(1, 1, 1, 1, 1, 64);
    test_head_dim_v(&p, 0);
    check_refused(run, &p, "v: expected a head dim of 1..256, got 0");
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
    check_accepted(run, &p);
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
    fa_tensor_like(&p.q, p.v.size[3], &p.out);
    check_refused(run, &p, "q: expected fewer than 2^59 elements in out");
    /* Exactly 2^59 is not fewer, the next smaller number of rows is. */
    p.q.size[0] = p.k.size[0] = p.v.size[0] = 1 << 14;
    p.q.size[1] = 1 << 15;
    p.q.size[2] = 1 << 24;
    p.q.size[3] = p.k.size[3] = p.v.size[3] = 64;
    fa_tensor_like(&p.q, p.v.size[3], &p.out);
    check_refused(run, &p, "q: expected fewer than 2^59 elements in out");
    p.q.size[2]--;
    fa_tensor_like(&p.q, p.v.size[3], &p.out);
    check_accepted(run, &p);
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
    p = test_problem(2, 4, 2, 8, 8, 64);
    test_head_dim_v(&p, 32);
    check_accepted(run, &p);
    p.out.size[3] = 64;
    check_refused(run, &p,
                  "out: expected size 32 in dimension 3 (head dim, as in "
                  "v), got 64");
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

static void negative_strides_are_refused(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 8, 8, 64);
    p.v.stride[1] = -64;
    check_refused(run, &p,
                  "v: expected strides of at least 0, got -64 in "
                  "dimension 1");
    p = test_problem(2, 2, 2, 8, 8, 64);
    p.k.stride[3] = -1;
    check_refused(run, &p, "got -1 in dimension 3");
}

/* Rows may lie anywhere, also elements of a row, and inputs may repeat. */
static void any_strides_of_inputs_are_accepted(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 8, 8, 64);
    p.k.stride[3] = 2;
    p.v.stride[3] = 100;
    p.v.stride[2] = 1;
    check_accepted(run, &p);
    p = test_problem(2, 2, 2, 8, 8, 64);
    memset(p.q.stride, 0, sizeof p.q.stride);
    check_accepted(run, &p);
    /* Columns that are rows of the memory: legal for an output, too. */
    p = test_problem(2, 2, 2, 8, 8, 64);
    p.out.stride[3] = 8;
    p.out.stride[2] = 1;
    check_accepted(run, &p);
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
    check_accepted(run, &p);
    /* Spread rows into one another. */
    p = test_problem(2, 2, 2, 8, 8, 64);
    p.out.stride[3] = 2;
    check_refused(run, &p,
                  "out: expected elements that do not overlap, got stride "
                  "1024 in dimension 0, which spans 1087");
}

static void mixed_dtypes_are_refused_by_name(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 8, 8, 64);
    p.v.dtype = FA_F32;
    check_refused(run, &p, "v: expected dtype float16 (as q), got float32");
    p = test_problem(2, 2, 2, 8, 8, 64);
    p.q.dtype = FA_BF16;
    check_refused(run, &p, "k: expected dtype bfloat16 (as q), got float16");
    p = test_problem(2, 2, 2, 8, 8, 64);
    p.out.dtype = FA_F64;
    check_refused(run, &p, "out: expected dtype float16 (as q), got float64");
}

static void gradients_are_refused_by_name(test_run *run)
{
    const fa_problem p = test_problem(2, 4, 2, 8, 6, 64);
    const fa_gradients good = test_gradients(&p, 7);
    fa_gradients g = good;
    g.dout.dtype = FA_F32;
    check_refused_backward(run, &p, &g,
                           "dout: expected dtype float16 (as q), got float32");
    g = good;
    g.dout.size[2] = 9;
    check_refused_backward(run, &p, &g,
                           "dout: expected size 8 in dimension 2 (row, as in "
                           "q), got 9");
    g = good;
    g.dout.size[3] = 32;
    check_refused_backward(run, &p, &g,
                           "dout: expected size 64 in dimension 3 (head dim, "
                           "as in v), got 32");
    g = good;
    g.dout.stride[2] = -1;
    check_refused_backward(run, &p, &g,
                           "dout: expected strides of at least 0, got -1");
    g = good;
    g.dk.size[1] = 4;
    check_refused_backward(run, &p, &g,
                           "dk: expected size 2 in dimension 1 (head, as in "
                           "k), got 4");
    g = good;
    g.dv.stride[2] = 0;
    check_refused_backward(run, &p, &g,
                           "dv: expected elements that do not overlap, got "
                           "stride 0 in dimension 2");
    g = good;
    g.wanted = 32;
    check_refused_backward(run, &p, &g,
                           "wanted: expected a set of 1 (dq), 2 (dk), 4 (dv), "
                           "8 (dbias) and 16 (dsink), got 32");
    g = good;
    g.wanted = FA_WANT_DQ; /* the others are not looked at */
    g.dk.size[1] = -4;
    g.dv.dtype = FA_F64;
    fa_plan plan;
    fa_error error = {""};
    CHECK(run, fa_plan_backward(&p, &g, &plan, &error) == FA_OK);
}

static void types_of_gradients_are_that_of_q_or_float32(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 8, 6, 64);
    fa_gradients g = test_gradients(&p, 7);
    fa_plan plan;
    fa_error error = {""};
    g.dq.dtype = g.dk.dtype = g.dv.dtype = FA_F32;
    CHECK(run, fa_plan_backward(&p, &g, &plan, &error) == FA_OK);
    g.dv.dtype = FA_F16;
    check_refused_backward(run, &p, &g,
                           "dv: expected dtype float32 (as dk), got float16");
    g.dq.dtype = FA_BF16;
    check_refused_backward(run, &p, &g,
                           "dq: expected dtype float16 or float32 (as q), got "
                           "bfloat16");
    test_retype(&p, FA_F64);
    g = test_gradients(&p, 7);
    g.dq.dtype = FA_F32;
    check_refused_backward(run, &p, &g,
                           "dq: expected dtype float64 (as q), got float32");
}

static void a_gradient_of_lse_must_fit_lse(test_run *run)
{
    fa_problem p = test_problem(2, 4, 2, 8, 6, 64);
    fa_gradients g = test_gradients(&p, 7);
    g.dlse.size[2] = 7; /* without data nothing of it is looked at */
    fa_plan plan;
    fa_error error = {""};
    CHECK(run, fa_plan_backward(&p, &g, &plan, &error) == FA_OK);
    g.dlse.data = &plan;
    check_refused_backward(run, &p, &g,
                           "dlse: expected size 8 in dimension 2 (row, as in "
                           "q), got 7");
    test_retype(&p, FA_F64);
    g = test_gradients(&p, 7);
    g.dlse.data = &plan;
    g.dlse.dtype = FA_F32;
    check_refused_backward(run, &p, &g,
                           "dlse: expected dtype float64 (as lse), got "
                           "float32");
}

/* A gradient is as large as its input says, which may be an expanded view. */
static void a_gradient_that_cannot_exist_is_refused(test_run *run)
{
    fa_problem p = test_problem(1, 1, 1, 1, 1, 256);
    p.q.size[0] = p.k.size[0] = p.v.size[0] = p.out.size[0] = 65535;
    p.q.size[1] = p.k.size[1] = p.v.size[1] = p.out.size[1] = 65535;
    p.k.size[2] = p.v.size[2] = 1 << 26;
    memset(p.k.stride, 0, sizeof p.k.stride);
    memset(p.v.stride, 0, sizeof p.v.stride);
    memset(p.q.stride, 0, sizeof p.q.stride);
    fa_tensor_like(&p.q, 256, &p.out);
    check_accepted(run, &p);
    fa_gradients g = test_gradients(&p, FA_WANT_DK);
    check_refused_backward(run, &p, &g,
                           "k: expected fewer than 2^59 elements in dk");
    p.k.size[2] = p.v.size[2] = 1 << 30;
    check_refused(run, &p, "k: expected fewer than 2^59 elements in a column");
}

static void grids_beyond_32_bits_of_work_items_are_refused(test_run *run)
{
    fa_problem p = test_problem(1, 1, 1, 1 << 28, 1, 32);
    fa_gradients g = test_gradients(&p, FA_WANT_DQ);
    check_accepted(run, &p);
    check_refused_backward(run, &p, &g,
                           "q: expected at most 268435440 rows for "
                           "fa_prepare, got 268435456");
    p = test_problem(1, 1, 1, 1, 1 << 28, 32);
    g = test_gradients(&p, FA_WANT_DQ);
    check_refused_backward(run, &p, &g, "k: expected at most 268435440 rows");
}

static void a_residue_that_is_not_aligned_is_refused(test_run *run)
{
    for (int dtype = FA_F16; dtype <= FA_F64; dtype++) {
        fa_problem p = test_problem(2, 2, 2, 8, 8, 64);
        test_retype(&p, (fa_dtype)dtype);
        const fa_gradients g = test_gradients(&p, 7);
        p.out_lo = (void *)0x1008;
        check_refused(run, &p,
                      "out_lo: expected an address aligned to 16 bytes, got "
                      "0x1008");
        check_refused_backward(run, &p, &g, "out_lo: expected an address");
        p.out_lo = (void *)0x1010;
        check_accepted(run, &p);
    }
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
    check_accepted(run, &p);
    p.scale = 0.0;
    check_accepted(run, &p);
    p.causal = 4;
    check_refused(run, &p,
                  "causal: expected 0 (none), 1 (top-left), 2 (bottom-right) "
                  "or 3 (none, from the top left), got 4");
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
    fa_tensor_like(&q, size[3], &out);
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
    /* Not a dense one's own order: the head dim outside the rows. */
    check_like(run, size, (int64_t[4]){240, 80, 2, 16},
               (int64_t[4]){120, 40, 1, 5});
    /* Every second element of a row: still innermost. */
    check_like(run, size, (int64_t[4]){240, 80, 16, 2},
               (int64_t[4]){120, 40, 8, 1});
}

/* With another head dim even a dense q gives its order alone. */
static void outputs_of_another_head_dim_keep_the_order_of_q(test_run *run)
{
    fa_tensor q = {
        .dtype = FA_BF16, .size = {2, 3, 5, 8}, .stride = {120, 8, 24, 1}};
    fa_tensor out;
    fa_tensor_like(&q, 12, &out);
    const int64_t rows_first[4] = {180, 12, 36, 1};
    CHECK(run, out.size[3] == 12 && out.size[2] == 5 && out.dtype == FA_BF16);
    CHECK(run, memcmp(out.stride, rows_first, sizeof rows_first) == 0);
    /* Head dim outside the rows. */
    const int64_t transposed[4] = {120, 40, 1, 5};
    memcpy(q.stride, transposed, sizeof transposed);
    fa_tensor_like(&q, 12, &out);
    const int64_t expected[4] = {180, 60, 1, 5};
    CHECK(run, memcmp(out.stride, expected, sizeof expected) == 0);
}

/* -- the residue ----------------------------------------------------------- */

static void the_residue_of_16_bit_types_has_two_parts(test_run *run)
{
    static _Alignas(16) char memory[1];
    fa_problem p = test_problem(1, 3, 1, 5, 4, 8);
    fa_tensor lse_lo;
    fa_tensor out_lo;
    test_head_dim_v(&p, 7);
    p.out_lo = memory;
    for (int dtype = FA_F16; dtype <= FA_BF16; dtype++) {
        test_retype(&p, (fa_dtype)dtype);
        /* 15 rows, filled up to 16; 105 elements, two to a float. */
        CHECK(run, fa_residue_floats(&p) == 16 + 53);
        fa_residue_parts(&p, &lse_lo, &out_lo);
        CHECK(run, lse_lo.data == memory && lse_lo.dtype == FA_F32);
        CHECK(run, lse_lo.stride[0] == 15 && lse_lo.stride[1] == 5);
        CHECK(run, lse_lo.stride[2] == 1 && lse_lo.size[3] == 1);
        CHECK(run, (char *)out_lo.data == memory + 64);
        CHECK(run, out_lo.dtype == p.q.dtype && out_lo.size[3] == 7);
        CHECK(run, out_lo.size[1] == 3 && out_lo.size[2] == 5);
        CHECK(run, out_lo.stride[0] == 105 && out_lo.stride[1] == 35);
        CHECK(run, out_lo.stride[2] == 7 && out_lo.stride[3] == 1);
    }
    p.q.size[2] = 8; /* 24 rows: nothing to fill up */
    CHECK(run, fa_residue_floats(&p) == 24 + 84);
    p.q.size[2] = 0;
    CHECK(run, fa_residue_floats(&p) == 0);
    p.out_lo = NULL;
    fa_residue_parts(&p, &lse_lo, &out_lo);
    CHECK(run, lse_lo.data == NULL && out_lo.data == NULL);
}

static void the_residue_of_float32_is_that_of_lse(test_run *run)
{
    static _Alignas(16) char memory[1];
    fa_problem p = test_problem(1, 3, 1, 5, 4, 8);
    fa_tensor lse_lo;
    fa_tensor out_lo;
    p.out_lo = memory;
    test_retype(&p, FA_F32);
    CHECK(run, fa_residue_floats(&p) == 15);
    fa_residue_parts(&p, &lse_lo, &out_lo);
    CHECK(run, lse_lo.data == memory && out_lo.data == NULL);
    test_retype(&p, FA_F64);
    CHECK(run, fa_residue_floats(&p) == 0);
    fa_residue_parts(&p, &lse_lo, &out_lo);
    CHECK(run, lse_lo.data == NULL && out_lo.data == NULL);
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

void test_refusals(test_run *run)
{
    RUN(run, sizes_up_to_the_limits_are_accepted);
    RUN(run, sizes_beyond_the_limits_are_refused);
    RUN(run, offsets_beyond_two_gigabytes_are_accepted);
    RUN(run, offsets_beyond_int64_are_refused);
    RUN(run, an_output_that_cannot_exist_is_refused);
    RUN(run, shapes_that_do_not_match_are_refused_by_name);
    RUN(run, heads_that_do_not_divide_are_refused);
    RUN(run, negative_strides_are_refused);
    RUN(run, any_strides_of_inputs_are_accepted);
    RUN(run, an_output_that_overlaps_itself_is_refused);
    RUN(run, mixed_dtypes_are_refused_by_name);
    RUN(run, gradients_are_refused_by_name);
    RUN(run, types_of_gradients_are_that_of_q_or_float32);
    RUN(run, a_gradient_of_lse_must_fit_lse);
    RUN(run, a_gradient_that_cannot_exist_is_refused);
    RUN(run, grids_beyond_32_bits_of_work_items_are_refused);
    RUN(run, a_residue_that_is_not_aligned_is_refused);
    RUN(run, scalars_out_of_range_are_refused);
    RUN(run, outputs_are_dense_in_the_order_of_q);
    RUN(run, outputs_of_another_head_dim_keep_the_order_of_q);
    RUN(run, the_residue_of_16_bit_types_has_two_parts);
    RUN(run, the_residue_of_float32_is_that_of_lse);
    RUN(run, long_messages_are_cut_and_stay_terminated);
}
