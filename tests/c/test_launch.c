/* test_launch.c: whole calls on fake runtimes: which kernels are launched, in
 * which order, on which device and stream, and what a failure leaves.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "fake_runtime.h"
#include "test.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ELEMENTS = 4096, ALL = FA_WANT_DQ | FA_WANT_DK | FA_WANT_DV };

static void *load_fake(test_run *run, const char *name, fake_state **state)
{
    void *library = test_load_fake(run, name, state);
    (*state)->arch_r0600 = "gfx906:sramecc+:xnack-";
    return library;
}

/* Writes a code object of the kind the fake runtime understands. */
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

static void write_all_code(test_run *run)
{
    write_code(run, "fa_gfx906_f16.co", 224);
    write_code(run, "fa_gfx906_f32.co", 224);
    write_code(run, "fa_gfx906_f64.co", 224);
}

typedef struct call {
    fa_runtime *runtime;
    fa_problem p;
    fa_gradients g;
    fa_plan plan;
    fa_target target;
    fa_counts counts;
    fa_error error;
    _Alignas(16) char memory[5][ELEMENTS * 2]; /* out out_lo dq dk dv */
    _Alignas(16) char lse[ELEMENTS];
    _Alignas(16) char workspace[ELEMENTS * 4];
} call;

/* Anything there may be replaced before call_forward. */
static call *make_call(test_run *run, fa_backend backend, const char *sim)
{
    call *c = calloc(1, sizeof *c);
    if (c == NULL ||
        fa_runtime_open(run->scratch, sim, &c->runtime, &c->error) != FA_OK) {
        abort();
    }
    c->p = test_problem(2, 2, 1, 4, 4, 64);
    c->p.out.data = c->memory[0];
    c->p.lse = c->lse;
    c->target = (fa_target){.backend = backend};
    return c;
}

/* One on the fake simulator, with code objects. */
static call *make_sim_call(test_run *run)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/libfakesim.so", run->fakes);
    call *c = make_call(run, FA_SIM, path);
    write_all_code(run);
    c->target.arch = "gfx906";
    return c;
}

static fa_status call_forward(call *c)
{
    fa_status status = fa_plan_forward(&c->p, &c->plan, &c->error);
    return status != FA_OK ? status
                           : fa_forward(c->runtime, &c->target, &c->p, &c->plan,
                                        c->workspace, &c->counts, &c->error);
}

static fa_status call_backward(call *c, uint32_t wanted)
{
    c->g = test_gradients(&c->p, wanted);
    c->g.dout.data = c->memory[0];
    c->g.dq.data = c->memory[2];
    c->g.dk.data = c->memory[3];
    c->g.dv.data = c->memory[4];
    fa_status status = fa_plan_backward(&c->p, &c->g, &c->plan, &c->error);
    return status != FA_OK
               ? status
               : fa_backward(c->runtime, &c->target, &c->p, &c->g, &c->plan,
                             c->workspace, &c->counts, &c->error);
}

static void free_call(call *c)
{
    fa_runtime_close(c->runtime);
    free(c);
}

/* -- one launch ------------------------------------------------------------ */

static void hip_launches_with_grid_stream_and_arguments(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libamdhip64.so.6", &state);
    call *c = make_call(run, FA_HIP, "");
    int stream = 0;
    write_all_code(run);
    c->target.device = 1;
    c->target.stream = &stream;
    CHECK(run, call_forward(c) == FA_OK);
    CHECK_TEXT(run, c->error.text, "");
    const fake_launch *l = &state->launch[0];
    const fa_variant *v = c->plan.step[0].variant;
    CHECK(run, state->launches == 1 && state->device_at_launch == 1);
    CHECK(run, state->device == 0);
    CHECK(run, state->errors_cleared == 1);
    CHECK(run, state->stream == &stream);
    CHECK(run, strcmp(l->symbol, v->symbol) == 0);
    CHECK(run, l->grid[0] == 1 && l->grid[1] == 2 && l->grid[2] == 2);
    CHECK(run, l->threads == v->threads && l->lds_bytes == 0);
    CHECK(run, c->counts.workgroups == 4);
    CHECK(run, l->args.out.data == c->memory[0] && l->args.lse == c->lse);
    CHECK(run, l->args.seqlen_q == 4 && l->args.group == 2);
    /* The unit of its arithmetic and no other. */
    CHECK(run, state->loads == 1 && state->lookups == 1);
    free_call(c);
    CHECK(run, state->unloads == 1);
    dlclose(library);
}

static void a_refused_launch_names_kernel_call_and_error(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libamdhip64.so.6", &state);
    call *c = make_call(run, FA_HIP, "");
    write_all_code(run);
    state->failing_call = "hipModuleLaunchKernel";
    state->code = 719;
    c->target.device = 1;
    CHECK(run, call_forward(c) == FA_EDEVICE);
    CHECK_TEXT(run, c->error.text, c->plan.step[0].variant->symbol);
    CHECK_TEXT(run, c->error.text,
               ": hipModuleLaunchKernel: "
               "hipErrorLaunchFailure (719): unspecified launch failure");
    CHECK(run, state->device == 0); /* restored also on failure */
    free_call(c);
    dlclose(library);
}

static void cuda_launches_with_dynamic_lds(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libcuda.so.1", &state);
    call *c = make_call(run, FA_STANDIN, "");
    write_code(run, "fa_sm_80_f16.cubin", 190);
    state->cc_major = 8;
    state->cc_minor = 6;
    state->device = -1;
    CHECK(run, call_forward(c) == FA_OK);
    const uint32_t lds_bytes = c->plan.step[0].variant->lds_bytes;
    CHECK(run, state->launches == 1 && state->device_at_launch == 0);
    CHECK(run, state->device == -1);
    CHECK(run, state->launch[0].lds_bytes == lds_bytes);
    CHECK(run, state->allowed_lds == (int)lds_bytes);
    free_call(c);
    dlclose(library);
}

static void the_simulator_is_told_every_tensor(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libfakesim.so", &state);
    call *c = make_sim_call(run);
    CHECK(run, call_forward(c) == FA_OK);
    const fake_launch *l = &state->launch[0];
    const uint32_t access[5] = {1, 1, 1, 2, 2};
    CHECK(run, l->tensor_count == 5);
    CHECK(run, memcmp(l->tensor_access, access, sizeof access) == 0);
    CHECK(run, l->tensor_stride0[0] == 512 && l->tensor_stride0[1] == 256 &&
                   l->tensor_stride0[4] == 8);
    CHECK(run, l->tensor_data[3] == c->memory[0]);
    CHECK(run,
          c->counts.wave_instructions == 1000 && c->counts.workgroups == 3);
    free_call(c);
    dlclose(library);
}

/* A mask has one byte for a key, whatever the others are. */
static void the_simulator_is_told_the_bytes_of_an_element(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libfakesim.so", &state);
    call *c = make_sim_call(run);
    test_add_features(&c->p, FA_HAS_MASK | FA_HAS_DROPOUT);
    CHECK(run, call_forward(c) == FA_OK);
    const fake_launch *l = &state->launch[0];
    const int32_t bytes[7] = {2, 2, 2, 2, 4, 1, 8};
    CHECK(run, l->tensor_count == 7);
    CHECK(run, memcmp(l->tensor_bytes, bytes, sizeof bytes) == 0);
    CHECK(run, l->tensor_data[5] == c->p.features.mask.data);
    CHECK(run, l->tensor_data[6] == c->p.features.seed);
    free_call(c);
    dlclose(library);
}

static void a_fault_in_the_simulator_carries_its_report(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libfakesim.so", &state);
    call *c = make_sim_call(run);
    state->report = "pc 0x1230 global_load_dwordx4, lane 3, address 0x10";
    state->failing_call = "hipsimLaunch";
    state->code = 719;
    CHECK(run, call_forward(c) == FA_EDEVICE);
    CHECK_TEXT(run, c->error.text,
               ": hipsimLaunch: hipErrorLaunchFailure (719): pc 0x1230 "
               "global_load_dwordx4, lane 3");
    c->target.device = 1;
    CHECK(run, call_forward(c) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "device: expected 0 for the simulator");
    c->target.arch = NULL;
    CHECK(run, fa_runtime_load(c->runtime, &c->target, UINT32_MAX, &c->error) ==
                   FA_EINVAL);
    CHECK(run, call_forward(c) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "arch: expected a name such as gfx906");
    free_call(c);
    dlclose(library);
}

static void the_null_backend_needs_nothing_and_runs_nothing(test_run *run)
{
    call *c = make_call(run, FA_NULL, "/nowhere");
    c->memory[0][0] = 0x12;
    CHECK(run, call_forward(c) == FA_OK);
    CHECK(run, c->counts.workgroups == 4);
    CHECK(run, c->memory[0][0] == 0x12);
    CHECK(run, call_backward(c, ALL) == FA_OK);
    free_call(c);
}

static void an_unknown_backend_is_refused(test_run *run)
{
    call *c = make_call(run, (fa_backend)77, "");
    CHECK(run, call_forward(c) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "backend: expected 0..3, got 77");
    free_call(c);
}

/* -- several launches ------------------------------------------------------ */

static void check_order(test_run *run, const fake_state *state, const call *c)
{
    uint64_t groups = 0;
    CHECK(run, state->launches == c->plan.count);
    for (int i = 0; i < c->plan.count; i++) {
        const fa_step *step = &c->plan.step[i];
        const fake_launch *l = &state->launch[i];
        CHECK(run, strcmp(l->symbol, step->variant->symbol) == 0);
        for (int d = 0; d < 3; d++) {
            CHECK(run, l->grid[d] == step->grid[d]);
        }
        CHECK(run, l->stream == c->target.stream);
        CHECK(run, l->args.only_unfit == step->only_unfit);
        CHECK(run, l->args.prepare == step->prepare);
        groups += (uint64_t)step->grid[0] * step->grid[1] * step->grid[2];
    }
    CHECK(run, c->counts.workgroups == groups);
}

static void steps_are_launched_in_order_on_one_stream(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libamdhip64.so.6", &state);
    call *c = make_call(run, FA_HIP, "");
    int stream = 0;
    write_all_code(run);
    c->target.stream = &stream;
    for (int dtype = FA_F16; dtype <= FA_F64; dtype++) {
        test_retype(&c->p, (fa_dtype)dtype);
        state->launches = 0;
        CHECK(run, call_forward(c) == FA_OK);
        check_order(run, state, c);
        for (uint32_t wanted = 1; wanted <= ALL; wanted++) {
            state->launches = 0;
            CHECK(run, call_backward(c, wanted) == FA_OK);
            check_order(run, state, c);
        }
    }
    CHECK(run, state->loads == 3); /* each unit once */
    free_call(c);
    dlclose(library);
}

static void counts_of_the_simulator_are_summed(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libfakesim.so", &state);
    call *c = make_sim_call(run);
    test_retype(&c->p, FA_BF16);
    CHECK(run, call_backward(c, ALL) == FA_OK);
    CHECK(run, state->launches >= 3 && state->launches == c->plan.count);
    CHECK(run, c->counts.wave_instructions == 1000 * (uint64_t)c->plan.count);
    CHECK(run, c->counts.workgroups == 3 * (uint64_t)c->plan.count);
    free_call(c);
    dlclose(library);
}

/* That of bfloat16's FA_BACKWARD_KV with spans, a bias, a mask, slopes and
 * dropout. */
static void the_longest_list_of_tensors_fits(test_run *run)
{
    char path[4096];
    fake_state *state = NULL;
    if (!test_fast_bf16(run)) {
        return;
    }
    void *library = load_fake(run, "libfakesim.so", &state);
    snprintf(path, sizeof path, "%s/libfakesim.so", run->fakes);
    call *c = make_call(run, FA_SIM, path);
    write_all_code(run);
    c->target.arch = "gfx906";
    c->p = test_problem(1, 2, 1, 4, 4, 64);
    test_retype(&c->p, FA_BF16);
    c->p.lse = c->lse;
    test_add_features(&c->p, FA_HAS_BIAS | FA_HAS_MASK | FA_HAS_ALIBI |
                                 FA_HAS_DROPOUT | FA_HAS_SPANS);
    CHECK(run, call_backward(c, ALL) == FA_OK);
    CHECK_TEXT(run, c->error.text, "");
    CHECK(run, c->plan.step[4].variant->pass == FA_BACKWARD_KV);
    CHECK(run, state->launch[4].tensor_count == FAKE_TENSORS);
    free_call(c);
    dlclose(library);
}

/* A plan that cannot be run to its end is not begun. */
static void nothing_is_launched_if_a_later_kernel_is_missing(test_run *run)
{
    char path[4096];
    fake_state *state = NULL;
    void *library = load_fake(run, "libamdhip64.so.6", &state);
    call *c = make_call(run, FA_HIP, "");
    write_all_code(run);
    snprintf(path, sizeof path, "%s/fa_gfx906_f16.co", run->scratch);
    remove(path);
    CHECK(run, call_backward(c, ALL) == FA_ECODE); /* prepares in f32 */
    CHECK_TEXT(run, c->error.text, "fa_gfx906_f16.co: expected a code object");
    CHECK(run, state->launches == 0);
    free_call(c);
    dlclose(library);
}

static void a_failure_ends_the_call(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libfakesim.so", &state);
    call *c = make_sim_call(run);
    state->failing_call = "hipsimLaunch";
    state->code = 719;
    CHECK(run, call_backward(c, ALL) == FA_EDEVICE);
    CHECK_TEXT(run, c->error.text, c->plan.step[0].variant->symbol);
    CHECK(run, state->launches == 1);
    free_call(c);
    dlclose(library);
}

static void loading_takes_the_units_of_a_type(test_run *run)
{
    static const struct {
        uint32_t dtypes;
        int loads;
    } cases[] = {{FA_READS_F16, 2},
                 {FA_READS_F32, 2}, /* small problems: fp64 */
                 {FA_READS_F64, 1},
                 {UINT32_MAX, 3},
                 {0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fake_state *state = NULL;
        void *library = load_fake(run, "libamdhip64.so.6", &state);
        call *c = make_call(run, FA_HIP, "");
        write_all_code(run);
        CHECK(run, fa_runtime_load(c->runtime, &c->target, cases[i].dtypes,
                                   &c->error) == FA_OK);
        CHECK(run, state->loads == cases[i].loads && state->launches == 0);
        free_call(c);
        dlclose(library);
    }
}

/* -- memory ---------------------------------------------------------------- */

static void memory_that_is_missing_is_named(test_run *run)
{
    call *c = make_call(run, FA_NULL, "");
    CHECK(run, call_backward(c, ALL) == FA_OK);
    CHECK(run, fa_backward(c->runtime, &c->target, &c->p, &c->g, &c->plan, NULL,
                           &c->counts, &c->error) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "workspace: expected ");
    CHECK(run,
          fa_backward(c->runtime, &c->target, &c->p, &c->g, &c->plan,
                      c->workspace + 8, &c->counts, &c->error) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, " bytes, aligned to 16, got them at ");
    /* The plan is older than this memory. */
    c->p.out_lo = c->memory[1] + 4;
    CHECK(run, fa_backward(c->runtime, &c->target, &c->p, &c->g, &c->plan,
                           c->workspace, &c->counts, &c->error) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "out_lo: expected an address aligned to 16");
    c->p.out_lo = NULL;
    c->p.out.data = NULL;
    CHECK(run, call_forward(c) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "out: expected its address, got none");
    c->p.out.data = c->memory[0];
    c->p.lse = NULL;
    CHECK(run, call_forward(c) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "lse: expected its address");
    CHECK(run, call_backward(c, ALL) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "lse: expected its address");
    c->p.lse = c->lse;
    c->g.dk.data = NULL;
    CHECK(run, fa_backward(c->runtime, &c->target, &c->p, &c->g, &c->plan,
                           c->workspace, &c->counts, &c->error) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "dk: expected its address, got none");
    free_call(c);
}

/* -- without keys, without output ------------------------------------------ */

static void check_filled(test_run *run, fa_backend backend, const char *sim,
                         fa_dtype dtype)
{
    static const char zeros[ELEMENTS * 2];
    call *c = make_call(run, backend, sim);
    const size_t rows = 2 * 2 * 4;
    const size_t bytes = rows * 64 * fa_dtype_bytes(dtype);
    c->p = test_problem(2, 2, 1, 4, 0, 64);
    test_retype(&c->p, dtype);
    memset(c->memory, 0x55, sizeof c->memory);
    memset(c->lse, 0x55, sizeof c->lse);
    c->p.out.data = c->memory[0];
    c->p.out_lo = c->memory[1];
    c->p.lse = c->lse;
    c->target.arch = "gfx906";
    CHECK(run, call_forward(c) == FA_OK);
    const size_t filled[] = {bytes, dtype == FA_F64   ? 0
                                    : dtype == FA_F32 ? rows * 4
                                                      : rows * 4 + bytes};
    for (int i = 0; i < 2; i++) { /* out and out_lo */
        CHECK(run, memcmp(c->memory[i], zeros, filled[i]) == 0);
        CHECK(run, filled[i] == sizeof c->memory[i] ||
                       c->memory[i][filled[i]] == 0x55);
    }
    for (size_t i = 0; i < rows; i++) {
        double as_double = 0.0;
        float as_float = 0.0F;
        memcpy(&as_double, c->lse + i * sizeof as_double, sizeof as_double);
        memcpy(&as_float, c->lse + i * sizeof as_float, sizeof as_float);
        CHECK(run, dtype == FA_F64 ? as_double == -(double)INFINITY
                                   : as_float == -INFINITY);
    }
    CHECK(run, c->lse[rows * (dtype == FA_F64 ? 8 : 4)] == 0x55);
    /* Padded rows are not ours to write. */
    c->p.out.stride[2] = 72;
    c->p.out.stride[1] = 4 * 72;
    c->p.out.stride[0] = 8 * 72;
    CHECK(run, call_forward(c) == FA_EUNSUPPORTED);
    CHECK_TEXT(run, c->error.text,
               "out: expected a dense tensor where k has no rows");
    free_call(c);
}

static void check_zeroed(test_run *run, fa_backend backend, const char *sim)
{
    static const char zeros[ELEMENTS * 2];
    call *c = make_call(run, backend, sim);
    const size_t bytes = (size_t)2 * 4 * 64 * 2; /* of dk and dv */
    c->p = test_problem(2, 2, 1, 0, 4, 64);
    c->p.lse = NULL;
    memset(c->memory, 0x55, sizeof c->memory);
    c->target.arch = "gfx906";
    CHECK(run, call_backward(c, ALL) == FA_OK);
    CHECK(run, c->memory[2][0] == 0x55); /* dq has no elements */
    for (int i = 3; i < 5; i++) {
        CHECK(run, memcmp(c->memory[i], zeros, bytes) == 0);
        CHECK(run, c->memory[i][bytes] == 0x55);
    }
    memset(c->memory, 0x55, sizeof c->memory);
    CHECK(run, call_backward(c, FA_WANT_DV) == FA_OK);
    CHECK(run, c->memory[3][0] == 0x55 && c->memory[4][0] == 0);
    c->p = test_problem(2, 2, 1, 4, 0, 64);
    CHECK(run, call_backward(c, ALL) == FA_OK);
    CHECK(run, memcmp(c->memory[2], zeros, 2 * bytes) == 0);
    free_call(c);
}

/* Without queries or keys: bias is broadcast there, so dbias has elements. */
static void a_bias_that_no_score_has_gets_zero(test_run *run)
{
    static const char zeros[ELEMENTS];
    fake_state *state = NULL;
    void *library = load_fake(run, "libfakesim.so", &state);
    call *c = make_sim_call(run);
    for (int without_keys = 0; without_keys < 2; without_keys++) {
        c->p = without_keys ? test_problem(2, 2, 1, 4, 0, 64)
                            : test_problem(2, 2, 1, 0, 4, 64);
        test_add_bias(&c->p, FA_F32);
        fa_tensor *bias = &c->p.features.bias;
        bias->size[without_keys ? 3 : 2] = 1;
        c->g = test_gradients(&c->p, FA_WANT_DBIAS);
        c->g.dbias.data = c->memory[2];
        memset(c->memory, 0x55, sizeof c->memory);
        CHECK(run,
              fa_plan_backward(&c->p, &c->g, &c->plan, &c->error) == FA_OK);
        CHECK(run, c->plan.work == FA_WORK_NO_KEYS && c->plan.count == 0);
        CHECK(run, fa_backward(c->runtime, &c->target, &c->p, &c->g, &c->plan,
                               NULL, &c->counts, &c->error) == FA_OK);
        CHECK(run, memcmp(c->memory[2], zeros, 2 * 2 * 4 * 4) == 0);
        CHECK(run, c->memory[2][2 * 2 * 4 * 4] == 0x55);
    }
    CHECK(run, state->launches == 0);
    free_call(c);
    dlclose(library);
}

/* lse is the score of the sink then, and dsink is dlse: no constants. */
static void without_keys_kernels_find_what_a_sink_does(test_run *run)
{
    static const char zeros[ELEMENTS];
    fake_state *state = NULL;
    void *library = load_fake(run, "libfakesim.so", &state);
    call *c = make_sim_call(run);
    c->p = test_problem(2, 2, 1, 4, 0, 64);
    c->p.out.data = c->memory[0];
    c->p.lse = c->lse;
    test_add_features(&c->p, FA_HAS_SINK);
    CHECK(run, call_forward(c) == FA_OK);
    CHECK(run, state->launches == 1);
    CHECK(run, state->launch[0].args.seqlen_k == 0);
    CHECK(run, state->launch[0].args.sink == c->p.features.sink.data);
    c->g = test_gradients(&c->p, FA_WANT_DQ | FA_WANT_DSINK);
    c->g.dout.data = c->memory[0];
    c->g.dq.data = c->memory[2];
    c->g.dsink.data = c->memory[3];
    memset(c->memory[2], 0x55, sizeof c->memory[2]);
    state->launches = 0;
    CHECK(run, fa_plan_backward(&c->p, &c->g, &c->plan, &c->error) == FA_OK);
    CHECK(run, c->plan.work == FA_WORK_NO_KEYS && c->plan.count == 1);
    CHECK(run, fa_backward(c->runtime, &c->target, &c->p, &c->g, &c->plan,
                           c->workspace, &c->counts, &c->error) == FA_OK);
    CHECK(run, memcmp(c->memory[2], zeros, (size_t)2 * 2 * 4 * 64 * 2) == 0);
    CHECK(run, state->launches == 1);
    CHECK(run, state->launch[0].args.prepare == FA_SET_DOUT);
    CHECK(run, state->launch[0].args.dsink == c->g.dsink.data);
    test_why(run, &c->plan, "empty: the gradients are 0 but for that of sink");
    c->g.dsink.data = NULL;
    CHECK(run, fa_backward(c->runtime, &c->target, &c->p, &c->g, &c->plan,
                           c->workspace, &c->counts, &c->error) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "dsink: expected its address, got none");
    free_call(c);
    dlclose(library);
}

static void without_keys_or_queries_memory_is_filled(test_run *run)
{
    char path[4096];
    fake_state *state = NULL;
    void *hip = load_fake(run, "libamdhip64.so.6", &state);
    void *cuda = load_fake(run, "libcuda.so.1", &state);
    void *sim = load_fake(run, "libfakesim.so", &state);
    snprintf(path, sizeof path, "%s/libfakesim.so", run->fakes);
    for (int dtype = FA_F16; dtype <= FA_F64; dtype++) {
        check_filled(run, FA_HIP, "", (fa_dtype)dtype);
        check_filled(run, FA_STANDIN, "", (fa_dtype)dtype);
        check_filled(run, FA_SIM, path, (fa_dtype)dtype);
    }
    check_zeroed(run, FA_HIP, "");
    check_zeroed(run, FA_STANDIN, "");
    check_zeroed(run, FA_SIM, path);
    CHECK(run, state->launches == 0);
    dlclose(sim);
    dlclose(cuda);
    dlclose(hip);
}

/* The fakes' kernels write nothing, so all else stays as it was. */
static void gaps_of_the_residue_are_cleared(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libamdhip64.so.6", &state);
    call *c = make_call(run, FA_HIP, "");
    write_all_code(run);
    c->p = test_problem(1, 1, 1, 3, 4, 7);
    memset(c->memory, 0x55, sizeof c->memory);
    c->p.out.data = c->memory[0];
    c->p.out_lo = c->memory[1];
    c->p.lse = c->lse;
    CHECK(run, call_forward(c) == FA_OK && state->launches == 1);
    /* 3 floats and one to fill up; 21 elements of 2 bytes and one. */
    for (size_t i = 0; i < sizeof c->memory[1]; i++) {
        const bool gap = (i >= 12 && i < 16) || (i >= 58 && i < 60);
        CHECK(run, c->memory[1][i] == (gap ? 0 : 0x55));
    }
    c->p.out_lo = NULL;
    CHECK(run, call_forward(c) == FA_OK);
    free_call(c);
    dlclose(library);
}

static void an_empty_output_opens_no_library(test_run *run)
{
    call *c = make_call(run, FA_SIM, "/nowhere");
    c->p.q.size[2] = c->p.out.size[2] = 0;
    CHECK(run, call_forward(c) == FA_OK);
    CHECK(run, call_backward(c, FA_WANT_DQ) == FA_OK);
    CHECK(run, call_backward(c, 0) == FA_OK);
    free_call(c);
}

void test_launch(test_run *run)
{
    RUN(run, hip_launches_with_grid_stream_and_arguments);
    RUN(run, a_refused_launch_names_kernel_call_and_error);
    RUN(run, cuda_launches_with_dynamic_lds);
    RUN(run, the_simulator_is_told_every_tensor);
    RUN(run, the_simulator_is_told_the_bytes_of_an_element);
    RUN(run, a_fault_in_the_simulator_carries_its_report);
    RUN(run, the_null_backend_needs_nothing_and_runs_nothing);
    RUN(run, an_unknown_backend_is_refused);
    RUN(run, steps_are_launched_in_order_on_one_stream);
    RUN(run, counts_of_the_simulator_are_summed);
    RUN(run, the_longest_list_of_tensors_fits);
    RUN(run, nothing_is_launched_if_a_later_kernel_is_missing);
    RUN(run, a_failure_ends_the_call);
    RUN(run, loading_takes_the_units_of_a_type);
    RUN(run, memory_that_is_missing_is_named);
    RUN(run, without_keys_or_queries_memory_is_filled);
    RUN(run, a_bias_that_no_score_has_gets_zero);
    RUN(run, without_keys_kernels_find_what_a_sink_does);
    RUN(run, gaps_of_the_residue_are_cleared);
    RUN(run, an_empty_output_opens_no_library);
}
