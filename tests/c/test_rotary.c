/* test_rotary.c: rotary positions: what is refused, the plan, what the kernel
 * is told, and the launch on fake runtimes.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "fake_runtime.h"
#include "host/plan.h"
#include "test.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Addresses that nobody reads. */
enum {
    AT_Q = 0x10000,
    AT_K = 0x20000,
    AT_COS = 0x30000,
    AT_SIN = 0x40000,
    AT_OUT_Q = 0x50000,
    AT_OUT_K = 0x60000
};

static void *address(uintptr_t at)
{
    return (void *)at; /* NOLINT */
}

/* Contiguous float16 with float tables that all of the batch shares. */
static fa_rotary problem(int64_t batch, int64_t seqlen, int64_t heads,
                         int64_t heads_k, int64_t dim, int64_t columns)
{
    fa_rotary p = {.inverse = false};
    test_contiguous(&p.q, batch, seqlen, heads, dim);
    test_contiguous(&p.k, batch, seqlen, heads_k, dim);
    test_contiguous(&p.cos, 1, seqlen, 1, columns);
    p.cos.dtype = FA_F32;
    p.sin = p.cos;
    p.q.data = address(AT_Q);
    p.k.data = address(AT_K);
    p.cos.data = address(AT_COS);
    p.sin.data = address(AT_SIN);
    fa_tensor_like(&p.q, dim, &p.out_q);
    fa_tensor_like(&p.k, dim, &p.out_k);
    p.out_q.data = address(AT_OUT_Q);
    p.out_k.data = address(AT_OUT_K);
    return p;
}

static fa_rotary usual(void)
{
    return problem(2, 130, 6, 2, 64, 16);
}

static fa_plan plan_of(test_run *run, const fa_rotary *p)
{
    fa_plan plan;
    fa_error error = {"(no error)"};
    if (!CHECK(run, fa_plan_rotary(p, &plan, &error) == FA_OK)) {
        CHECK_TEXT(run, error.text, "(no error)");
    }
    return plan;
}

static void check_refused(test_run *run, const fa_rotary *p, fa_status expected,
                          const char *message)
{
    fa_plan plan;
    fa_error error = {"(accepted)"};
    CHECK(run, fa_plan_rotary(p, &plan, &error) == expected);
    CHECK(run, plan.count == 0);
    CHECK_TEXT(run, error.text, message);
}

/* -- refusals -------------------------------------------------------------- */

static void rotary_sizes_beyond_the_limits_are_refused(test_run *run)
{
    fa_rotary p = problem(65535, 1, 1, 1, 256, 128);
    (void)plan_of(run, &p);
    p = problem(65536, 1, 1, 1, 64, 32);
    check_refused(run, &p, FA_EUNSUPPORTED,
                  "q: expected a size of 0..65535 in dimension 0 (batch), got "
                  "65536");
    p = problem(1, 1, 65535, 65535, 8, 4);
    (void)plan_of(run, &p);
    p = problem(1, 1, 1, 65536, 8, 4);
    check_refused(run, &p, FA_EUNSUPPORTED,
                  "k: expected a size of 0..65535 in dimension 2 (head), got "
                  "65536");
    p = problem(1, 1, 1, 1, 257, 4);
    check_refused(run, &p, FA_EUNSUPPORTED,
                  "q: expected a size of 1..256 in dimension 3 (head dim), got "
                  "257");
    p = problem(1, 1, 1, 1, 0, 0);
    check_refused(run, &p, FA_EUNSUPPORTED, "(head dim), got 0");
    p = problem(1, (1 << 30) + 1, 1, 1, 8, 4);
    check_refused(run, &p, FA_EUNSUPPORTED,
                  "in dimension 1 (seqlen), got 1073741825");
    p = problem(1, 1 << 30, 1, 1, 8, 4);
    check_refused(run, &p, FA_EUNSUPPORTED,
                  "q: expected a seqlen of at most 1073741760 for fa_rotary, "
                  "got 1073741824");
    p = problem(1, (1 << 30) - 64, 1, 1, 8, 4);
    (void)plan_of(run, &p);
    p = usual();
    p.k.size[1] = -1;
    check_refused(run, &p, FA_EINVAL, "(seqlen), got -1");
}

static void rotary_inputs_that_do_not_fit_are_refused(test_run *run)
{
    static const char *const messages[4] = {
        "k: expected size 2 in dimension 0 (batch, as in q), got 9",
        "k: expected size 130 in dimension 1 (seqlen, as in q), got 9", NULL,
        "k: expected size 64 in dimension 3 (head dim, as in q), got 9"};
    fa_rotary p = usual();
    for (int d = 0; d < 4; d++) {
        p = usual();
        p.k.size[d] = p.out_k.size[d] = 9;
        if (messages[d] != NULL) {
            check_refused(run, &p, FA_EINVAL, messages[d]);
        }
    }
    p = usual();
    p.k.dtype = FA_BF16;
    check_refused(run, &p, FA_EINVAL,
                  "k: expected dtype float16 (as q), got bfloat16");
    p = usual();
    p.q.stride[1] = INT64_MAX / 8;
    check_refused(run, &p, FA_EINVAL, "q: expected byte offsets below 2^63");
}

static void rotary_tables_that_do_not_fit_are_refused(test_run *run)
{
    fa_rotary p = usual();
    p.cos.dtype = FA_BF16;
    check_refused(run, &p, FA_EINVAL,
                  "cos: expected dtype float16 or float32, got bfloat16");
    p = usual();
    p.q.dtype = p.k.dtype = p.out_q.dtype = p.out_k.dtype = FA_F64;
    check_refused(run, &p, FA_EINVAL,
                  "cos: expected dtype float64, got float32");
    p = usual();
    p.cos.size[0] = 3;
    check_refused(run, &p, FA_EINVAL,
                  "cos: expected batch size 1 or 2 (as in q), got 3");
    p = usual();
    p.cos.size[1] = 129;
    check_refused(run, &p, FA_EINVAL,
                  "cos: expected 130 rows (the seqlen of q), got 129");
    p = usual();
    p.cos.size[2] = 6;
    check_refused(run, &p, FA_EINVAL, "cos: expected 1 head, got 6");
    p = usual();
    p.cos.size[3] = p.sin.size[3] = 33;
    check_refused(run, &p, FA_EINVAL,
                  "cos: expected at most 32 columns (one for two channels of "
                  "the head dim 64 of q), got 33");
    p = problem(1, 3, 1, 1, 7, 3);
    (void)plan_of(run, &p);
    p = problem(1, 3, 1, 1, 7, 4); /* the last channel has no partner */
    check_refused(run, &p, FA_EINVAL, "cos: expected at most 3 columns");
    p = usual();
    p.sin.dtype = FA_F16;
    check_refused(run, &p, FA_EINVAL,
                  "sin: expected dtype float32 (as cos), got float16");
    p = usual();
    p.sin.size[0] = 2;
    check_refused(run, &p, FA_EINVAL,
                  "sin: expected 1 batches (as cos), got 2");
    p = usual();
    p.sin.size[3] = 15;
    check_refused(run, &p, FA_EINVAL,
                  "sin: expected 16 columns (as cos), got 15");
    p = usual();
    p.sin.stride[1] = -16;
    check_refused(run, &p, FA_EINVAL, "sin: expected strides of at least 0");
}

static void rotary_outputs_that_do_not_fit_are_refused(test_run *run)
{
    fa_rotary p = usual();
    p.out_q.dtype = FA_F32;
    check_refused(run, &p, FA_EINVAL,
                  "out_q: expected dtype float16 (as q), got float32");
    p = usual();
    p.out_k.size[2] = 6;
    check_refused(run, &p, FA_EINVAL,
                  "out_k: expected size 2 in dimension 2 (head, as in k), got "
                  "6");
    p = usual();
    p.out_k.stride[2] = 0;
    check_refused(run, &p, FA_EINVAL,
                  "out_k: expected elements that do not overlap");
    p = problem(65535, 1 << 20, 65535, 1, 256, 128);
    memset(p.q.stride, 0, sizeof p.q.stride);
    memset(p.k.stride, 0, sizeof p.k.stride);
    check_refused(run, &p, FA_EINVAL,
                  "q: expected fewer than 2^59 elements in out_q");
}

/* -- the plan -------------------------------------------------------------- */

static void a_rotary_plan_is_one_launch_over_tokens_and_heads(test_run *run)
{
    for (int dtype = FA_F16; dtype <= FA_F64; dtype++) {
        fa_rotary p = usual();
        char symbols[FA_SYMBOLS_CHARS];
        p.q.dtype = p.k.dtype = p.out_q.dtype = p.out_k.dtype = (fa_dtype)dtype;
        p.cos.dtype = p.sin.dtype = dtype == FA_F64 ? FA_F64 : FA_F32;
        const fa_plan plan = plan_of(run, &p);
        const fa_step *step = &plan.step[0];
        CHECK(run, plan.work == FA_WORK_STEPS && plan.count == 1);
        CHECK(run, step->variant->pass == FA_ROTARY);
        CHECK(run, step->variant->rows == FA_ROTARY_TOKENS);
        CHECK(run, (step->variant->reads >> dtype & 1) != 0);
        CHECK(run, step->variant->arith == (dtype == FA_F64 ? FA_F64 : FA_F32));
        CHECK(run, step->grid[0] == 3);     /* 130 tokens */
        CHECK(run, step->grid[1] == 2 + 1); /* 6 heads of q, 2 of k */
        CHECK(run, step->grid[2] == 2);
        CHECK(run, plan.workspace.bytes == 0 && fa_step_is_main(step));
        fa_plan_symbols(&plan, symbols);
        CHECK(run, strcmp(symbols, step->variant->symbol) == 0);
    }
}

static void without_elements_nothing_is_turned(test_run *run)
{
    for (int d = 0; d < 3; d++) {
        fa_rotary p = usual();
        p.q.size[d] = p.k.size[d] = p.out_q.size[d] = p.out_k.size[d] = 0;
        p.cos.size[1] = p.sin.size[1] = p.q.size[1];
        const fa_plan plan = plan_of(run, &p);
        CHECK(run, plan.work == FA_WORK_NONE && plan.count == 0);
    }
    fa_rotary p = usual();
    p.q.size[2] = p.out_q.size[2] = 0;
    const fa_plan plan = plan_of(run, &p);
    CHECK(run, plan.work == FA_WORK_STEPS && plan.step[0].grid[1] == 1);
}

static void narrow_rotary_tensors_are_named(test_run *run)
{
    fa_rotary p = usual();
    fa_plan plan = plan_of(run, &p);
    test_why(run, &plan, "wide: 16 bytes of q and k at a time");
    p.q.data = address(AT_Q + 2);
    p.k.stride[1] = 129;
    p.cos.stride[1] = 18;
    plan = plan_of(run, &p);
    test_why(run, &plan,
             "narrow: q base is not 16-byte aligned; k row stride 129 is not "
             "a multiple of 8; cos row stride 18 is not a multiple of 4");
    p = problem(1, 3, 2, 1, 64, 12);
    plan = plan_of(run, &p);
    test_why(run, &plan, "narrow: q, k rotary dim 24 is not a multiple of 16");
    p.interleaved = true;
    plan = plan_of(run, &p);
    test_why(run, &plan, "wide: 16 bytes of q and k at a time");
    /* Offsets of rows have 64 bits here. */
    p = usual();
    p.q.stride[1] = INT64_C(1) << 31;
    plan = plan_of(run, &p);
    test_why(run, &plan, "wide: 16 bytes of q and k at a time");
    /* Two channels of a row of 8 bytes: as much as is read. */
    p = problem(1, 1, 2, 1, 8, 2);
    p.interleaved = true;
    plan = plan_of(run, &p);
    test_why(run, &plan, "narrow: q, k rotary dim 4 is not a multiple of 8");
}

/* -- the argument ---------------------------------------------------------- */

static uint32_t access_to(const fa_rotary_call *call, uintptr_t at)
{
    for (size_t i = 0; i < call->access_count; i++) {
        if (call->access[i].tensor->data == address(at)) {
            return call->access[i].access;
        }
    }
    return 0;
}

static void the_rotary_kernel_is_told_all_that_it_needs(test_run *run)
{
    fa_rotary p = usual();
    fa_rotary_call call;
    memset(&call, 0x5a, sizeof call);
    p.inverse = true;
    fa_rotary_call_fill(&p, &call);
    const fa_rotary_args *a = &call.args;
    CHECK(run, a->in[0].data == p.q.data && a->in[1].data == p.k.data);
    CHECK(run, a->out[0].data == p.out_q.data);
    CHECK(run, a->out[1].data == p.out_k.data);
    CHECK(run, a->cos.data == p.cos.data && a->sin.data == p.sin.data);
    for (int d = 0; d < 4; d++) {
        CHECK(run, a->in[0].stride[d] == p.q.stride[d]);
        CHECK(run, a->out[1].stride[d] == p.out_k.stride[d]);
    }
    CHECK(run, a->cos.stride[0] == 0 && a->cos.stride[1] == 16);
    CHECK(run, a->cos.stride[2] == 0 && a->cos.stride[3] == 1);
    CHECK(run, a->seqlen == 130 && a->heads == 6 && a->heads_k == 2);
    CHECK(run, a->head_dim == 64 && a->rotary_dim == 32);
    CHECK(run, a->stored == FA_F16 && a->stored_table == FA_F32);
    CHECK(run, a->inverse == 1 && a->interleaved == 0);
    CHECK(run, a->wide == (FA_ROTARY_WIDE_Q | FA_ROTARY_WIDE_K |
                           FA_ROTARY_WIDE_TABLES));
    CHECK(run, call.access_count == 6);
    CHECK(run, access_to(&call, AT_Q) == FA_READ);
    CHECK(run, access_to(&call, AT_K) == FA_READ);
    CHECK(run, access_to(&call, AT_COS) == FA_READ);
    CHECK(run, access_to(&call, AT_SIN) == FA_READ);
    CHECK(run, access_to(&call, AT_OUT_Q) == FA_WRITE);
    CHECK(run, access_to(&call, AT_OUT_K) == FA_WRITE);
}

static void each_rotary_tensor_is_wide_by_itself(test_run *run)
{
    const uint32_t all =
        FA_ROTARY_WIDE_Q | FA_ROTARY_WIDE_K | FA_ROTARY_WIDE_TABLES;
    fa_rotary_call call;
    for (int i = 0; i < 6; i++) {
        static const uint32_t lost[] = {
            FA_ROTARY_WIDE_Q,      FA_ROTARY_WIDE_K, FA_ROTARY_WIDE_TABLES,
            FA_ROTARY_WIDE_TABLES, FA_ROTARY_WIDE_Q, FA_ROTARY_WIDE_K};
        fa_rotary p = usual();
        fa_tensor *const tensors[] = {&p.q,   &p.k,     &p.cos,
                                      &p.sin, &p.out_q, &p.out_k};
        tensors[i]->data = (char *)tensors[i]->data + 4;
        fa_rotary_call_fill(&p, &call);
        CHECK(run, call.args.wide == (all & ~lost[i]));
    }
    fa_rotary p = usual();
    p.k.size[2] = p.out_k.size[2] = 0;
    p.cos.size[3] = p.sin.size[3] = 0;
    fa_rotary_call_fill(&p, &call);
    CHECK(run, call.access_count == 2); /* what is empty is not touched */
}

/* -- the launch ------------------------------------------------------------ */

static void write_code(test_run *run, const char *name, uint16_t machine)
{
    char path[4096];
    unsigned char bytes[67] = {0x7f, 'E', 'L', 'F', 2};
    memcpy(bytes + 18, &machine, sizeof machine);
    memcpy(bytes + 64, "ok", 3);
    snprintf(path, sizeof path, "%s/%s", run->scratch, name);
    FILE *file = fopen(path, "wb");
    if (!CHECK(run, file != NULL)) {
        abort();
    }
    fwrite(bytes, 1, sizeof bytes, file);
    fclose(file);
}

/* Runs the usual problem; returns the status. */
static fa_status launch(test_run *run, fa_backend backend, const char *sim,
                        const fa_rotary *p, fa_counts *counts, fa_error *error)
{
    fa_runtime *runtime = NULL;
    const fa_target target = {.backend = backend,
                              .arch = backend == FA_SIM ? "gfx906" : NULL};
    const fa_plan plan = plan_of(run, p);
    if (fa_runtime_open(run->scratch, sim, &runtime, error) != FA_OK) {
        abort();
    }
    const fa_status status =
        fa_run_rotary(runtime, &target, p, &plan, counts, error);
    fa_runtime_close(runtime);
    return status;
}

static void check_launch(test_run *run, const fake_state *state,
                         const fa_rotary *p)
{
    const fake_launch *l = &state->launch[0];
    fa_rotary_call call;
    fa_rotary_call_fill(p, &call);
    CHECK(run, state->launches == 1 && state->loads == 1);
    CHECK(run, strcmp(l->symbol, "fa_rotary") == 0);
    CHECK(run, l->grid[0] == 3 && l->grid[1] == 3 && l->grid[2] == 2);
    CHECK(run, l->threads == 256 && l->lds_bytes == 0);
    CHECK(run, memcmp(&l->rotary, &call.args, sizeof call.args) == 0);
}

static void rotary_is_launched_on_all_four_backends(test_run *run)
{
    static const struct {
        fa_backend backend;
        const char *library;
    } rows[] = {{FA_HIP, "libamdhip64.so.6"},
                {FA_STANDIN, "libcuda.so.1"},
                {FA_SIM, "libfakesim.so"}};
    const fa_rotary p = usual();
    fa_counts counts;
    fa_error error = {"(no error)"};
    char sim[4096];
    write_code(run, "fa_gfx906_f32.co", 224);
    write_code(run, "fa_sm_80_f32.cubin", 190);
    snprintf(sim, sizeof sim, "%s/libfakesim.so", run->fakes);
    for (int i = 0; i < 3; i++) {
        fake_state *state = NULL;
        void *library = test_load_fake(run, rows[i].library, &state);
        state->arch_r0600 = "gfx906:sramecc+:xnack-";
        state->cc_major = 8;
        CHECK(run,
              launch(run, rows[i].backend, sim, &p, &counts, &error) == FA_OK);
        CHECK_TEXT(run, error.text, "(no error)");
        CHECK(run, counts.workgroups == (rows[i].backend == FA_SIM ? 3 : 18));
        check_launch(run, state, &p);
        if (rows[i].backend == FA_SIM) {
            CHECK(run, state->launch[0].tensor_count == 6);
            CHECK(run, state->launch[0].tensor_bytes[2] == 4);
            CHECK(run, state->launch[0].tensor_data[0] == p.q.data);
        }
        dlclose(library);
    }
    CHECK(run, launch(run, FA_NULL, sim, &p, &counts, &error) == FA_OK);
}

static void a_rotary_launch_that_fails_says_why(test_run *run)
{
    fake_state *state = NULL;
    void *library = test_load_fake(run, "libamdhip64.so.6", &state);
    fa_rotary p = usual();
    fa_counts counts;
    fa_error error;
    state->arch_r0600 = "gfx906";
    write_code(run, "fa_gfx906_f32.co", 224);
    state->failing_call = "hipModuleLaunchKernel";
    state->code = 719;
    CHECK(run, launch(run, FA_HIP, "", &p, &counts, &error) == FA_EDEVICE);
    CHECK_TEXT(run, error.text, "fa_rotary: hipModuleLaunchKernel");
    p.out_q.data = NULL;
    CHECK(run, launch(run, FA_HIP, "", &p, &counts, &error) == FA_EINVAL);
    CHECK_TEXT(run, error.text, "out_q: expected its address, got none");
    p.out_q.data = address(AT_OUT_Q);
    state->arch_r0600 = "gfx9999"; /* of which there is no code */
    CHECK(run, launch(run, FA_HIP, "", &p, &counts, &error) == FA_ECODE);
    CHECK_TEXT(run, error.text, "fa_gfx9999_f32.co: expected a code object");
    state->arch_r0600 = "gfx906";
    p.out_k.data = NULL;
    CHECK(run, launch(run, FA_HIP, "", &p, &counts, &error) == FA_EINVAL);
    CHECK_TEXT(run, error.text, "out_k: expected its address, got none");
    p.out_k.size[2] = p.k.size[2] = 0; /* which then needs none */
    CHECK(run, launch(run, FA_HIP, "", &p, &counts, &error) == FA_OK);
    p.out_q.size[2] = p.q.size[2] = 0;
    CHECK(run, launch(run, FA_HIP, "", &p, &counts, &error) == FA_OK);
    CHECK(run, state->launches == 2);
    dlclose(library);
}

void test_rotary(test_run *run)
{
    RUN(run, rotary_sizes_beyond_the_limits_are_refused);
    RUN(run, rotary_inputs_that_do_not_fit_are_refused);
    RUN(run, rotary_tables_that_do_not_fit_are_refused);
    RUN(run, rotary_outputs_that_do_not_fit_are_refused);
    RUN(run, a_rotary_plan_is_one_launch_over_tokens_and_heads);
    RUN(run, without_elements_nothing_is_turned);
    RUN(run, narrow_rotary_tensors_are_named);
    RUN(run, the_rotary_kernel_is_told_all_that_it_needs);
    RUN(run, each_rotary_tensor_is_wide_by_itself);
    RUN(run, rotary_is_launched_on_all_four_backends);
    RUN(run, a_rotary_launch_that_fails_says_why);
}
