/* test_args.c: what each step of a plan is told, and which memory it names.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/plan.h"
#include "test.h"

#include <math.h>
#include <string.h>

enum { ALL = FA_WANT_DQ | FA_WANT_DK | FA_WANT_DV };

/* A call whose tensors lie at addresses that tell them apart; nothing is
 * read there. */
typedef struct fixture {
    fa_problem p;
    fa_gradients g;
    fa_plan plan;
    fa_call call;
} fixture;

static void *const workspace = (void *)0x10000000;

static void *address(int i)
{
    return (void *)(uintptr_t)(0x1000 * (i + 1));
}

enum {
    AT_Q,
    AT_K,
    AT_V,
    AT_DOUT,
    AT_OUT,
    AT_DQ,
    AT_DK,
    AT_DV,
    AT_LSE,
    AT_RESIDUE,
    AT_DLSE = AT_RESIDUE + 32 /* the residue has up to 104 KiB */
};

/* 2 * 4 * 65 query rows: a multiple of 4 floats. */
enum { LSE_LO_BYTES = 520 * 4 };

static void set_up(fixture *f, fa_dtype dtype, uint32_t wanted)
{
    f->p = test_problem(2, 4, 2, 65, 129, 40);
    test_head_dim_v(&f->p, 24);
    test_retype(&f->p, dtype);
    f->p.q.data = address(AT_Q);
    f->p.k.data = address(AT_K);
    f->p.v.data = address(AT_V);
    f->p.out.data = address(AT_OUT);
    f->p.lse = address(AT_LSE);
    f->p.out_lo = address(AT_RESIDUE);
    f->p.scale = -0.25;
    f->p.causal = FA_CAUSAL_BOTTOM_RIGHT;
    f->p.fp32 = FA_FP32_FAST;
    f->g = test_gradients(&f->p, wanted);
    f->g.dout.data = address(AT_DOUT);
    f->g.dq.data = address(AT_DQ);
    f->g.dk.data = address(AT_DK);
    f->g.dv.data = address(AT_DV);
    f->g.dlse.data = address(AT_DLSE);
}

static void plan_forward(test_run *run, fixture *f)
{
    fa_error error;
    CHECK(run, fa_plan_forward(&f->p, &f->plan, &error) == FA_OK);
}

static void plan_backward(test_run *run, fixture *f)
{
    fa_error error;
    CHECK(run, fa_plan_backward(&f->p, &f->g, &f->plan, &error) == FA_OK);
}

static const fa_args *fill(fixture *f, int step)
{
    memset(&f->call, 0x5a, sizeof f->call); /* what is not filled shows */
    fa_call_fill(&f->p, f->plan.backward ? &f->g : NULL, &f->plan,
                 &f->plan.step[step], workspace, &f->call);
    return &f->call.args;
}

/* The access to the memory at `data`, 0 if the call does not name it. */
static uint32_t access_to(const fa_call *call, const void *data)
{
    for (size_t i = 0; i < call->access_count; i++) {
        if (call->access[i].tensor->data == data) {
            return call->access[i].access;
        }
    }
    return 0;
}

static void *lse_lo_of(const fixture *f)
{
    return f->p.out_lo;
}

static void *out_lo_of(const fixture *f)
{
    return (char *)f->p.out_lo + LSE_LO_BYTES;
}

static void *in_workspace(size_t at)
{
    return at == FA_NOWHERE ? NULL : (char *)workspace + at;
}

/* That exactly these tensors are named and have views, and what is done to
 * them; arrays are looked at by the caller, who gives their number. */
static void check_tensors(test_run *run, const fixture *f, uint32_t reads,
                          uint32_t writes, size_t others)
{
    const fa_args *args = &f->call.args;
    const fa_view *const views[8] = {&args->q,    &args->k,   &args->v,
                                     &args->dout, &args->out, &args->dq,
                                     &args->dk,   &args->dv};
    size_t count = others;
    for (int i = 0; i < 8; i++) {
        const uint32_t expected = ((reads >> i & 1) != 0 ? FA_READ : 0) |
                                  ((writes >> i & 1) != 0 ? FA_WRITE : 0);
        CHECK(run, access_to(&f->call, address(i)) == expected);
        CHECK(run, views[i]->data == (expected == 0 ? NULL : address(i)));
        count += expected != 0;
    }
    CHECK(run, f->call.access_count == count);
    CHECK(run, (args->wide & ~(reads | writes)) == 0);
}

static void a_forward_names_inputs_outputs_and_lse(test_run *run)
{
    fixture f;
    set_up(&f, FA_F16, 0);
    plan_forward(run, &f);
    const fa_args *args = fill(&f, 0);
    const uint32_t inputs = FA_SET_Q | FA_SET_K | FA_SET_V;
    check_tensors(run, &f, inputs, FA_SET_OUT, 3);
    CHECK(run, args->lse == f.p.lse && args->lse_lo == lse_lo_of(&f));
    CHECK(run, args->out_lo.data == out_lo_of(&f));
    CHECK(run, args->out_lo.stride[0] == 4 * 65 * 24);
    CHECK(run, args->out_lo.stride[1] == 65 * 24);
    CHECK(run, args->out_lo.stride[2] == 24 && args->out_lo.stride[3] == 1);
    CHECK(run, access_to(&f.call, f.p.lse) == FA_WRITE);
    CHECK(run, access_to(&f.call, lse_lo_of(&f)) == FA_WRITE);
    CHECK(run, access_to(&f.call, out_lo_of(&f)) == FA_WRITE);
    CHECK(run, args->rows == NULL && args->dlse.data == NULL);
    CHECK(run, args->wide == (inputs | FA_SET_OUT));
    for (int i = 0; i < FA_PREPARED; i++) {
        CHECK(run, args->scale_of[i] == NULL && args->block_of[i] == NULL);
    }
    CHECK(run, args->prepare == 0 && args->only_unfit == 0);
    f.p.out_lo = NULL;
    args = fill(&f, 0);
    CHECK(run, args->lse_lo == NULL && args->out_lo.data == NULL);
    CHECK(run, args->out_lo.stride[2] == 0 && f.call.access_count == 5);
}

static void numbers_reach_the_kernel(test_run *run)
{
    fixture f;
    set_up(&f, FA_BF16, ALL);
    plan_forward(run, &f);
    const fa_args *args = fill(&f, 0);
    CHECK(run, args->scale == -0.25);
    CHECK(run, fabs((double)args->scale_log2 - 0.36067376) < 1e-8);
    CHECK(run, args->seqlen_q == 65 && args->seqlen_k == 129);
    CHECK(run, args->head_dim == 40 && args->head_dim_v == 24);
    CHECK(run, args->batches == 2 && args->heads == 4 && args->group == 2);
    CHECK(run, args->diagonal == 64);
    CHECK(run, args->stored == FA_BF16 && args->stored_grad == FA_BF16);
    f.g.dq.dtype = f.g.dk.dtype = f.g.dv.dtype = FA_F32;
    plan_backward(run, &f);
    args = fill(&f, 1);
    CHECK(run, args->stored == FA_BF16 && args->stored_grad == FA_F32);
    f.p.causal = FA_CAUSAL_TOP_LEFT;
    CHECK(run, fill(&f, 1)->diagonal == 0);
    f.p.causal = FA_CAUSAL_NONE;
    CHECK(run, fill(&f, 1)->diagonal == 129);
}

static void strides_of_dimensions_of_size_one_become_zero(test_run *run)
{
    fixture f;
    set_up(&f, FA_F16, ALL);
    f.p = test_problem(1, 2, 2, 4, 1, 64);
    f.p.q.stride[0] = INT64_MAX;
    f.p.k.stride[2] = -3;
    f.p.v.stride[3] = 5;
    f.p.v.stride[1] = 1000;
    plan_forward(run, &f);
    const fa_args *args = fill(&f, 0);
    CHECK(run, args->q.stride[0] == 0 && args->q.stride[1] == 4 * 64);
    CHECK(run, args->q.stride[2] == 64 && args->q.stride[3] == 1);
    CHECK(run, args->k.stride[2] == 0);
    CHECK(run, args->v.stride[3] == 5 && args->v.stride[1] == 1000);
}

/* The plan may be older than the memory. */
static void wideness_is_asked_of_the_memory_at_the_launch(test_run *run)
{
    fixture f;
    set_up(&f, FA_F16, 0);
    f.p.out.data = f.p.out_lo = NULL;
    plan_forward(run, &f);
    CHECK(run, f.plan.narrow[4].cause == FA_CAUSE_WIDE);
    f.p.out.data = address(AT_OUT);
    CHECK(run, (fill(&f, 0)->wide & FA_SET_OUT) != 0);
    f.p.out.data = (char *)address(AT_OUT) + 8;
    CHECK(run, (fill(&f, 0)->wide & FA_SET_OUT) == 0);
    f.p.k.stride[2] = 41;
    CHECK(run, fill(&f, 0)->wide == (FA_SET_Q | FA_SET_V));
}

static void preparing_reads_its_tensors_and_writes_arrays(test_run *run)
{
    fixture f;
    set_up(&f, FA_F16, ALL);
    plan_backward(run, &f);
    const fa_args *args = fill(&f, 0);
    const fa_workspace *w = &f.plan.workspace;
    /* lse lse_lo out_lo dlse rows, and the blocks of v and dout. */
    check_tensors(run, &f, FA_SET_V | FA_SET_DOUT | FA_SET_OUT, 0, 7);
    CHECK(run, args->prepare == (FA_SET_V | FA_SET_DOUT));
    CHECK(run, args->prepare_blocks == 3);
    CHECK(run, args->lse == f.p.lse && args->lse_lo == lse_lo_of(&f));
    CHECK(run, args->out_lo.data == out_lo_of(&f));
    CHECK(run, access_to(&f.call, f.p.lse) == FA_READ);
    CHECK(run, access_to(&f.call, lse_lo_of(&f)) == FA_READ);
    CHECK(run, access_to(&f.call, out_lo_of(&f)) == FA_READ);
    CHECK(run, access_to(&f.call, f.g.dlse.data) == FA_READ);
    CHECK(run, args->dlse.data == f.g.dlse.data);
    CHECK(run, args->dlse.stride[0] == 4 * 65 && args->dlse.stride[2] == 1);
    CHECK(run, args->rows == in_workspace(w->rows));
    CHECK(run, access_to(&f.call, args->rows) == FA_WRITE);
    for (int i = 0; i < FA_PREPARED; i++) {
        CHECK(run, args->scale_of[i] == NULL);
        CHECK(run, (void *)args->block_of[i] == in_workspace(w->block_of[i]));
        CHECK(run, (args->block_of[i] != NULL) == (i == 2 || i == 3));
        CHECK(run, args->block_of[i] == NULL ||
                       access_to(&f.call, args->block_of[i]) == FA_WRITE);
    }
    f.g.dlse.data = NULL;
    f.p.out_lo = NULL;
    args = fill(&f, 0);
    CHECK(run, args->dlse.data == NULL && args->out_lo.data == NULL);
    CHECK(run, args->lse_lo == NULL && f.call.access_count == 3 + 4);
}

static void float32_keeps_what_rounding_took_from_lse_alone(test_run *run)
{
    fixture f;
    set_up(&f, FA_F32, ALL);
    plan_forward(run, &f);
    const fa_args *args = fill(&f, 0);
    CHECK(run, args->lse_lo == lse_lo_of(&f) && args->out_lo.data == NULL);
    CHECK(run, access_to(&f.call, lse_lo_of(&f)) == FA_WRITE);
    plan_backward(run, &f);
    args = fill(&f, 0);
    CHECK(run, args->lse_lo == lse_lo_of(&f) && args->out_lo.data == NULL);
    CHECK(run, access_to(&f.call, lse_lo_of(&f)) == FA_READ);
}

/* What the passes need of a query is in its numbers. */
static void passes_read_nothing_of_the_forward(test_run *run)
{
    for (int dtype = FA_F16; dtype <= FA_F64; dtype++) {
        fixture f;
        set_up(&f, (fa_dtype)dtype, ALL);
        plan_backward(run, &f);
        for (int step = 1; step < f.plan.count; step++) {
            const fa_args *args = fill(&f, step);
            if (f.plan.step[step].prepare != 0) {
                continue; /* which corrects what the first one made */
            }
            CHECK(run, args->lse == NULL && args->lse_lo == NULL);
            CHECK(run, args->out_lo.data == NULL && args->out.data == NULL);
            CHECK(run, args->dlse.data == NULL);
            CHECK(run, access_to(&f.call, f.p.lse) == 0);
            CHECK(run, access_to(&f.call, lse_lo_of(&f)) == 0);
            CHECK(run, access_to(&f.call, out_lo_of(&f)) == 0);
            CHECK(run, args->rows == in_workspace(f.plan.workspace.rows));
            CHECK(run, access_to(&f.call, args->rows) ==
                           (f.plan.step[step].row_sums ? FA_READ | FA_WRITE
                                                       : FA_READ));
        }
    }
}

static void preparing_float32_makes_the_numbers_of_queries_alone(test_run *run)
{
    static const fa_dtype types[] = {FA_F32, FA_F64};
    for (int i = 0; i < 2; i++) {
        fixture f;
        set_up(&f, types[i], ALL);
        f.p.out_lo = NULL;
        plan_backward(run, &f);
        const fa_args *args = fill(&f, 0);
        check_tensors(run, &f, FA_SET_DOUT | FA_SET_OUT, 0, 3);
        CHECK(run, args->prepare == FA_SET_DOUT);
        CHECK(run, args->block_of[3] == NULL && args->scale_of[3] == NULL);
        CHECK(run, args->lse == f.p.lse && args->rows == workspace);
    }
}

/* The steps of a plan must agree on where things are, so this is checked for
 * what the first writes and the others read. */
static void check_arrays(test_run *run, const fixture *f, uint32_t access,
                         uint32_t blocks, uint32_t scales)
{
    const fa_args *args = &f->call.args;
    const fa_workspace *w = &f->plan.workspace;
    for (int i = 0; i < FA_PREPARED; i++) {
        const void *block = args->block_of[i];
        const void *scale = args->scale_of[i];
        CHECK(run,
              block == ((blocks >> i & 1) != 0 ? in_workspace(w->block_of[i])
                                               : NULL));
        CHECK(run,
              scale == ((scales >> i & 1) != 0 ? in_workspace(w->scale_of[i])
                                               : NULL));
        CHECK(run, block == NULL || access_to(&f->call, block) == access);
        CHECK(run, scale == NULL || access_to(&f->call, scale) == access);
    }
}

static void steps_of_a_bfloat16_forward_share_arrays(test_run *run)
{
    if (!test_fast_bf16(run)) {
        return;
    }
    const uint32_t inputs = FA_SET_Q | FA_SET_K | FA_SET_V;
    fixture f;
    set_up(&f, FA_BF16, 0);
    plan_forward(run, &f);
    const fa_args *args = fill(&f, 0);
    check_tensors(run, &f, inputs, 0, 6);
    check_arrays(run, &f, FA_WRITE, inputs, inputs);
    CHECK(run, args->rows == NULL && args->prepare == inputs);
    CHECK(run, args->lse == NULL && args->lse_lo == NULL);
    args = fill(&f, 1);
    check_tensors(run, &f, inputs, FA_SET_OUT, 3 + 6);
    check_arrays(run, &f, FA_READ, inputs, inputs);
    CHECK(run, args->only_unfit == 0 && args->prepare == 0);
    args = fill(&f, 2);
    check_tensors(run, &f, inputs, FA_SET_OUT, 3 + 3);
    check_arrays(run, &f, FA_READ, inputs, 0);
    CHECK(run, args->only_unfit == 1);
}

static void steps_of_a_bfloat16_backward_share_arrays(test_run *run)
{
    if (!test_fast_bf16(run)) {
        return;
    }
    const uint32_t inputs = FA_SET_Q | FA_SET_K | FA_SET_V | FA_SET_DOUT;
    const uint32_t kv = FA_SET_DK | FA_SET_DV;
    fixture f;
    set_up(&f, FA_BF16, ALL);
    plan_backward(run, &f);
    fill(&f, 0);
    check_tensors(run, &f, inputs | FA_SET_OUT, 0, 5 + 8);
    check_arrays(run, &f, FA_WRITE, inputs, inputs);
    for (int step = 1; step < 6; step++) {
        const bool fast = step == 1 || step == 4;
        const fa_args *args = fill(&f, step);
        if (step == 3) { /* corrects delta: no tensor, no array */
            check_tensors(run, &f, 0, 0, 5);
            check_arrays(run, &f, FA_READ, 0, 0);
            continue;
        }
        check_tensors(run, &f, inputs, step < 3 ? FA_SET_DQ : kv,
                      1 + 4 + (fast ? 4 : 0));
        check_arrays(run, &f, FA_READ, inputs, fast ? inputs : 0);
        CHECK(run, args->only_unfit == (fast ? 0 : 1));
    }
}

static void passes_of_a_float16_backward_read_norms_of_v_and_dout(test_run *run)
{
    const uint32_t inputs = FA_SET_Q | FA_SET_K | FA_SET_V | FA_SET_DOUT;
    fixture f;
    set_up(&f, FA_F16, ALL);
    plan_backward(run, &f);
    fill(&f, 3);
    check_tensors(run, &f, inputs, FA_SET_DK | FA_SET_DV, 1 + 2);
    check_arrays(run, &f, FA_READ, FA_SET_V | FA_SET_DOUT, 0);
    fill(&f, 1);
    check_tensors(run, &f, inputs, FA_SET_DQ, 1 + 2);
    check_arrays(run, &f, FA_READ, FA_SET_V | FA_SET_DOUT, 0);
}

static void gradients_that_are_not_wanted_have_no_address(test_run *run)
{
    const uint32_t inputs = FA_SET_Q | FA_SET_K | FA_SET_V | FA_SET_DOUT;
    fixture f;
    set_up(&f, FA_F32, FA_WANT_DV);
    plan_backward(run, &f);
    fill(&f, 1);
    /* float: long sums are put away there. */
    check_tensors(run, &f, inputs | FA_SET_DV, FA_SET_DV, 1);
    set_up(&f, FA_F32, FA_WANT_DK);
    plan_backward(run, &f);
    fill(&f, 1); /* of the pass of dq the row sums alone */
    check_tensors(run, &f, inputs, 0, 1);
    fill(&f, 3);
    check_tensors(run, &f, inputs | FA_SET_DK, FA_SET_DK, 1);
}

/* The type of the numbers of queries that a call names. */
static fa_dtype rows_dtype(test_run *run, const fa_call *call)
{
    for (size_t i = 0; i < call->access_count; i++) {
        if (call->access[i].tensor->data == call->args.rows) {
            return call->access[i].tensor->dtype;
        }
    }
    CHECK(run, false);
    return FA_F16;
}

static void float32_in_float64_makes_sums_without_dq_first(test_run *run)
{
    const uint32_t inputs = FA_SET_Q | FA_SET_K | FA_SET_V | FA_SET_DOUT;
    /* dk and dv are not read: double needs not put sums away. */
    static const uint32_t writes[] = {0, 0, 0, FA_SET_DQ,
                                      FA_SET_DK | FA_SET_DV};
    fixture f;
    set_up(&f, FA_F32, ALL);
    f.p.fp32 = FA_FP32_EXACT;
    plan_backward(run, &f);
    if (!CHECK(run, f.plan.count == 5)) {
        return;
    }
    for (int step = 0; step < 5; step++) {
        const fa_args *args = fill(&f, step);
        const uint32_t reads = step == 0   ? FA_SET_DOUT | FA_SET_OUT
                               : step == 2 ? 0
                                           : inputs;
        const bool prepares = step == 0 || step == 2; /* lse lse_lo dlse */
        check_tensors(run, &f, reads, writes[step], prepares ? 1 + 3 : 1);
        CHECK(run, args->row_sums == (step == 1 || step == 2));
        CHECK(run, args->stored == FA_F32 && args->stored_grad == FA_F32);
        CHECK(run, rows_dtype(run, &f.call) == FA_F64);
        CHECK(run, access_to(&f.call, args->rows) == (step == 0 ? FA_WRITE
                                                      : args->row_sums == 1
                                                          ? FA_READ | FA_WRITE
                                                          : FA_READ));
    }
    f.p.fp32 = FA_FP32_FAST;
    plan_backward(run, &f);
    fill(&f, 1);
    check_tensors(run, &f, inputs, FA_SET_DQ, 1);
    CHECK(run, rows_dtype(run, &f.call) == FA_F32);
}

static void of_float32_in_float64_lse_stays_float(test_run *run)
{
    fixture f;
    set_up(&f, FA_F32, 0);
    f.p.fp32 = FA_FP32_EXACT;
    plan_forward(run, &f);
    fill(&f, 0);
    check_tensors(run, &f, FA_SET_Q | FA_SET_K | FA_SET_V, FA_SET_OUT, 2);
    for (size_t i = 0; i < f.call.access_count; i++) {
        CHECK(run, f.call.access[i].tensor->dtype == FA_F32);
        CHECK(run, f.call.access[i].element_bytes == 4);
    }
}

/* What the simulator is told of arrays: their whole extent, no more. */
static void arrays_are_named_with_their_extent(test_run *run)
{
    if (!test_fast_bf16(run)) {
        return;
    }
    fixture f;
    set_up(&f, FA_BF16, ALL);
    plan_backward(run, &f);
    fill(&f, 0);
    for (size_t i = 0; i < f.call.access_count; i++) {
        const fa_tensor *t = f.call.access[i].tensor;
        const int64_t rows = t->size[2];
        if (t->data == f.call.args.block_of[1]) {
            CHECK(run, t->size[1] == 2 && rows == 3 && t->size[3] == 2);
            CHECK(run, t->stride[0] == 12 && t->stride[2] == 2);
        } else if (t->data == f.call.args.scale_of[3]) {
            CHECK(run, t->size[1] == 4 && rows == 65 && t->size[3] == 1);
            CHECK(run, t->stride[1] == 65 && t->dtype == FA_F32);
        } else if (t->data == f.call.args.rows) {
            CHECK(run, t->size[1] == 4 && rows == 65 && t->dtype == FA_F32);
            CHECK(run, t->size[3] == FA_ROW_NUMBERS);
            CHECK(run, t->stride[2] == FA_ROW_NUMBERS);
        } else if (t->data == lse_lo_of(&f)) {
            CHECK(run, t->size[1] == 4 && rows == 65 && t->size[3] == 1);
            CHECK(run, t->dtype == FA_F32 && t->stride[1] == 65);
        } else if (t->data == out_lo_of(&f)) {
            CHECK(run, t->size[1] == 4 && rows == 65 && t->size[3] == 24);
            CHECK(run, t->dtype == FA_BF16 && t->stride[1] == 65 * 24);
        }
    }
    set_up(&f, FA_F64, ALL);
    plan_backward(run, &f);
    fill(&f, 1);
    for (size_t i = 0; i < f.call.access_count; i++) {
        CHECK(run, f.call.access[i].tensor->dtype == FA_F64);
    }
}

void test_args(test_run *run)
{
    RUN(run, a_forward_names_inputs_outputs_and_lse);
    RUN(run, numbers_reach_the_kernel);
    RUN(run, strides_of_dimensions_of_size_one_become_zero);
    RUN(run, wideness_is_asked_of_the_memory_at_the_launch);
    RUN(run, preparing_reads_its_tensors_and_writes_arrays);
    RUN(run, float32_keeps_what_rounding_took_from_lse_alone);
    RUN(run, passes_read_nothing_of_the_forward);
    RUN(run, preparing_float32_makes_the_numbers_of_queries_alone);
    RUN(run, steps_of_a_bfloat16_forward_share_arrays);
    RUN(run, steps_of_a_bfloat16_backward_share_arrays);
    RUN(run, passes_of_a_float16_backward_read_norms_of_v_and_dout);
    RUN(run, gradients_that_are_not_wanted_have_no_address);
    RUN(run, float32_in_float64_makes_sums_without_dq_first);
    RUN(run, of_float32_in_float64_lse_stays_float);
    RUN(run, arrays_are_named_with_their_extent);
}
