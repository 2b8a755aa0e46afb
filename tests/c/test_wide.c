/* test_wide.c: which tensors are accessed 16 bytes at a time, and what is said
 * of the others.  SPDX-License-Identifier: BSD-3-Clause */
#include "test.h"

#include <string.h>

enum { ALL = FA_WANT_DQ | FA_WANT_DK | FA_WANT_DV };

static void wide_tensors_are_said_to_be_wide(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 4, 4, 64);
    fa_plan plan = test_plan_forward(run, &p);
    test_why(run, &plan, "wide: every load is 16 bytes");
    const fa_gradients g = test_gradients(&p, ALL);
    plan = test_plan_backward(run, &p, &g);
    test_why(run, &plan, "wide: every load is 16 bytes");
}

static void narrow_tensors_are_named_with_what_is_to_blame(test_run *run)
{
    const fa_problem good = test_problem(2, 2, 2, 4, 4, 64);
    fa_problem p = good;
    p.k.data = (void *)24;
    fa_plan plan = test_plan_forward(run, &p);
    test_why(run, &plan, "narrow: k base is not 16-byte aligned");
    p = good;
    p.q.stride[2] = 77;
    plan = test_plan_forward(run, &p);
    test_why(run, &plan, "narrow: q row stride 77 is not a multiple of 8");
    p = good;
    p.v.stride[1] = 257;
    p.out.stride[0] = 515;
    plan = test_plan_forward(run, &p);
    test_why(run, &plan,
             "narrow: v head stride 257 is not a multiple of 8; out batch "
             "stride 515 is not a multiple of 8");
    p = good;
    p.q.data = p.v.data = (void *)2;
    p.k.stride[3] = 2;
    plan = test_plan_forward(run, &p);
    test_why(run, &plan,
             "narrow: q, v base is not 16-byte aligned; k head dim stride 2 "
             "is not 1");
    p = good;
    p.k.stride[2] = 1 << 23;
    plan = test_plan_forward(run, &p);
    test_why(run, &plan, "narrow: k row stride 8388608 is not below 2^23");
    p.k.stride[2] = (1 << 23) - 8;
    plan = test_plan_forward(run, &p);
    test_why(run, &plan, "wide: every load is 16 bytes");
}

static void a_head_dim_that_fits_no_granule_is_named(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 4, 4, 77);
    fa_plan plan = test_plan_forward(run, &p);
    test_why(run, &plan, "narrow: head dim 77 is not a multiple of 8");
    fa_gradients g = test_gradients(&p, ALL);
    plan = test_plan_backward(run, &p, &g);
    test_why(run, &plan, "narrow: head dim 77 is not a multiple of 8");
    g = test_gradients(&p, FA_WANT_DK);
    plan = test_plan_backward(run, &p, &g);
    test_why(run, &plan, "narrow: head dim 77 is not a multiple of 8");
    test_head_dim_v(&p, 64);
    plan = test_plan_forward(run, &p);
    test_why(run, &plan, "narrow: q, k head dim 77 is not a multiple of 8");
}

/* 16 bytes are fewer elements of the longer types, of gradients too. */
static void granules_follow_the_type(test_run *run)
{
    static const struct {
        fa_dtype dtype;
        int64_t stride;
        int64_t dim;
        const char *row;
        const char *head_dim;
    } cases[] = {
        {FA_BF16, 84, 12, "narrow: q row stride 84 is not a multiple of 8",
         "narrow: head dim 12 is not a multiple of 8"},
        {FA_F32, 82, 10, "narrow: q row stride 82 is not a multiple of 4",
         "narrow: head dim 10 is not a multiple of 4"},
        {FA_F64, 81, 9, "narrow: q row stride 81 is not a multiple of 2",
         "narrow: head dim 9 is not a multiple of 2"},
    };
    for (int i = 0; i < 3; i++) {
        fa_problem p = test_problem(2, 2, 2, 4, 4, 64);
        test_retype(&p, cases[i].dtype);
        p.q.stride[2] = cases[i].stride;
        fa_plan plan = test_plan_forward(run, &p);
        test_why(run, &plan, cases[i].row);
        p = test_problem(2, 2, 2, 4, 4, cases[i].dim);
        test_retype(&p, cases[i].dtype);
        plan = test_plan_forward(run, &p);
        test_why(run, &plan, cases[i].head_dim);
    }
    /* float32 gradients of float16: 4 elements, the inputs 8. */
    fa_problem p = test_problem(2, 2, 2, 4, 4, 12);
    fa_gradients g = test_gradients(&p, ALL);
    g.dq.dtype = g.dk.dtype = g.dv.dtype = FA_F32;
    fa_plan plan = test_plan_backward(run, &p, &g);
    test_why(run, &plan,
             "narrow: q, k, v, dout, out head dim 12 is not a multiple of 8");
}

static void long_rows_are_judged_by_their_bytes(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 4, 4, 64);
    test_retype(&p, FA_F32);
    p.k.stride[2] = 1 << 22;
    fa_plan plan = test_plan_forward(run, &p);
    test_why(run, &plan, "narrow: k row stride 4194304 is not below 2^22");
    test_retype(&p, FA_F64);
    p.k.stride[2] = (1 << 21) + 2;
    plan = test_plan_forward(run, &p);
    test_why(run, &plan, "narrow: k row stride 2097154 is not below 2^21");
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
    fa_plan plan = test_plan_forward(run, &p);
    test_why(run, &plan, "wide: every load is 16 bytes");
    p = test_problem(2, 2, 2, 4, 4, 1);
    p.q.stride[3] = -99;
    plan = test_plan_forward(run, &p);
    test_why(run, &plan, "narrow: head dim 1 is not a multiple of 8");
}

static void reasons_of_all_tensors_fit_the_text(test_run *run)
{
    fa_problem p = test_problem(2, 2, 2, 4, 4, 64);
    fa_gradients g = test_gradients(&p, ALL);
    fa_tensor *const all[] = {&p.q,    &p.k,  &p.v,  &p.out,
                              &g.dout, &g.dq, &g.dk, &g.dv};
    char text[FA_WHY_CHARS];
    for (int i = 0; i < 8; i++) {
        all[i]->stride[2] = INT64_C(100000000000000001) + i;
        all[i]->stride[1] = 64;
        all[i]->stride[0] = 4000000000000000000 + i;
        all[i]->size[0] = 1;
    }
    const fa_plan plan = test_plan_backward(run, &p, &g);
    fa_plan_why(&plan, text);
    CHECK(run, strlen(text) < FA_WHY_CHARS - 1);
    CHECK_TEXT(run, text, "; dv row stride 100000000000000008 is not");
}

void test_wide(test_run *run)
{
    RUN(run, wide_tensors_are_said_to_be_wide);
    RUN(run, narrow_tensors_are_named_with_what_is_to_blame);
    RUN(run, a_head_dim_that_fits_no_granule_is_named);
    RUN(run, granules_follow_the_type);
    RUN(run, long_rows_are_judged_by_their_bytes);
    RUN(run, strides_of_dimensions_of_size_one_mean_nothing);
    RUN(run, reasons_of_all_tensors_fit_the_text);
}
