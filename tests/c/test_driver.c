/* test_driver.c: the four backends behind one shape, on fake runtimes.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "fake_runtime.h"
#include "host/driver.h"
#include "test.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Loads a copy of the fake runtime, as PyTorch would the real one. */
static void *load_fake(test_run *run, const char *name, fake_state **state)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", run->fakes, name);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!CHECK(run, library != NULL)) {
        abort(); /* the tests were not built as their Makefile does */
    }
    *state = dlsym(library, "fake");
    memset(*state, 0, sizeof **state);
    (*state)->device_count = 2;
    return library;
}

static fa_driver *open_driver(test_run *run, fa_backend backend,
                              const char *library)
{
    fa_driver *driver = NULL;
    fa_error error = {""};
    if (!CHECK(run,
               fa_driver_open(backend, library, &driver, &error) == FA_OK)) {
        CHECK_TEXT(run, error.text, "(no error)");
        abort();
    }
    return driver;
}

static void check_open_fails(test_run *run, fa_backend backend,
                             const char *library, const char *message)
{
    fa_driver *driver = NULL;
    fa_error error = {""};
    CHECK(run,
          fa_driver_open(backend, library, &driver, &error) == FA_ELIBRARY);
    CHECK(run, driver == NULL);
    CHECK_TEXT(run, error.text, message);
}

static void libraries_that_are_not_loaded_are_not_loaded(test_run *run)
{
    check_open_fails(run, FA_HIP, "",
                     "libamdhip64: expected the library to be loaded "
                     "already, as a ROCm build of PyTorch does");
    check_open_fails(run, FA_STANDIN, "",
                     "libcuda.so: expected the library to be loaded already");
}

static void a_missing_simulator_is_named(test_run *run)
{
    check_open_fails(run, FA_SIM, "/nowhere/libhipsim.so",
                     "sim_library: cannot load /nowhere/libhipsim.so: ");
}

static void an_incomplete_library_names_what_it_lacks(test_run *run)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/libincomplete.so", run->fakes);
    check_open_fails(run, FA_SIM, path,
                     "libhipsim: expected it to export hipGetDeviceCount");
}

static void each_backend_names_the_very_function_that_is_missing(test_run *run)
{
    char path[4096];
    fake_state *state = NULL;
    void *library = load_fake(run, "libamdhip64.so.partial", &state);
    snprintf(path, sizeof path, "%s/libamdhip64.so.partial", run->fakes);
    check_open_fails(run, FA_HIP, "",
                     "libamdhip64: expected it to export hipMemsetD32Async");
    check_open_fails(run, FA_SIM, path,
                     "libhipsim: expected it to export hipsimModuleLoad");
    dlclose(library);
}

static void the_loaded_copy_of_hip_is_found_and_no_second_one(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libamdhip64.so.6", &state);
    fa_driver *driver = open_driver(run, FA_HIP, "");
    CHECK(run, dlsym(driver->library, "fake") == state);
    fa_driver_close(driver);
    dlclose(library);
}

/* -- devices --------------------------------------------------------------- */

static void check_arch(test_run *run, fa_driver *driver, const char *expected)
{
    char arch[FA_ARCH_CHARS] = "";
    fa_error error = {""};
    CHECK(run, driver->arch(driver, 0, arch, &error) == FA_OK);
    CHECK(run, strcmp(arch, expected) == 0);
}

static void the_architecture_is_read_from_either_layout(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libamdhip64.so.6", &state);
    fa_driver *driver = open_driver(run, FA_HIP, "");
    char arch[FA_ARCH_CHARS];
    fa_error error;
    state->arch_r0600 = "gfx906:sramecc+:xnack-";
    check_arch(run, driver, "gfx906");
    state->arch_r0600 = NULL;
    state->arch_r0000 = "gfx90a:sramecc+:xnack-";
    check_arch(run, driver, "gfx90a");
    state->arch_r0600 = "Vega 20"; /* another layout than we know */
    state->arch_r0000 = "";
    CHECK(run, driver->arch(driver, 0, arch, &error) == FA_EDEVICE);
    CHECK_TEXT(run, error.text,
               "device: expected an architecture name that "
               "starts with gfx");
    state->arch_r0600 = NULL;
    state->arch_r0000 = NULL;
    CHECK(run, driver->arch(driver, 0, arch, &error) == FA_EDEVICE);
    CHECK_TEXT(run, error.text, "hipGetDeviceProperties");
    fa_driver_close(driver);
    dlclose(library);
}

static void hip_restores_the_callers_device(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libamdhip64.so.6", &state);
    fa_driver *driver = open_driver(run, FA_HIP, "");
    fa_scope scope;
    fa_error error;
    CHECK(run, driver->enter(driver, 1, &scope, &error) == FA_OK);
    CHECK(run, state->device == 1);
    driver->leave(driver, &scope);
    CHECK(run, state->device == 0);
    state->failing_call = "hipSetDevice";
    state->code = 101;
    CHECK(run, driver->enter(driver, 1, &scope, &error) == FA_EDEVICE);
    CHECK_TEXT(run, error.text, "device: hipSetDevice: ");
    fa_driver_close(driver);
    dlclose(library);
}

static void cuda_restores_the_callers_context(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libcuda.so.1", &state);
    fa_driver *driver = open_driver(run, FA_STANDIN, "");
    fa_scope scope;
    fa_error error;
    CHECK(run, driver->enter(driver, 0, &scope, &error) == FA_OK);
    CHECK(run, state->retained == 0); /* it was current */
    driver->leave(driver, &scope);
    for (int before = -1; before <= 0; before++) {
        state->device = before;
        CHECK(run, driver->enter(driver, 1, &scope, &error) == FA_OK);
        CHECK(run, state->device == 1 && state->retained == 1);
        driver->leave(driver, &scope);
        CHECK(run, state->device == before && state->retained == 0);
    }
    CHECK(run, driver->enter(driver, 5, &scope, &error) == FA_EDEVICE);
    CHECK_TEXT(run, error.text, "device: cuDeviceGet: error 101");
    state->failing_call = "cuCtxSetCurrent";
    state->code = 700;
    CHECK(run, driver->enter(driver, 1, &scope, &error) == FA_EDEVICE);
    CHECK_TEXT(run, error.text, "error 700: an illegal memory access");
    CHECK(run, state->retained == 0);
    fa_driver_close(driver);
    dlclose(library);
}

/* -- through fa_forward ---------------------------------------------------- */

enum { ELEMENTS = 4096 };

/* Writes a code object of the kind the fake runtime understands. */
static void write_code(test_run *run, const char *name, uint16_t machine,
                       const char *text)
{
    char path[4096];
    unsigned char header[64] = {0x7f, 'E', 'L', 'F', 2};
    memcpy(header + 18, &machine, sizeof machine);
    snprintf(path, sizeof path, "%s/%s", run->scratch, name);
    FILE *file = fopen(path, "wb");
    if (!CHECK(run, file != NULL)) {
        abort();
    }
    fwrite(header, 1, sizeof header, file);
    fwrite(text, 1, strlen(text) + 1, file);
    fclose(file);
}

typedef struct call {
    fa_runtime *runtime;
    fa_problem p;
    fa_target target;
    fa_counts counts;
    fa_error error;
    _Alignas(16) uint16_t out[ELEMENTS];
    float lse[ELEMENTS];
} call;

static call *make_call(test_run *run, fa_backend backend, const char *sim)
{
    call *c = calloc(1, sizeof *c);
    if (c == NULL ||
        fa_runtime_open(run->scratch, sim, &c->runtime, &c->error) != FA_OK) {
        abort();
    }
    c->p = test_problem(2, 2, 1, 4, 4, 64);
    c->p.out.data = c->out;
    c->p.lse = c->lse;
    c->target = (fa_target){.backend = backend};
    return c;
}

static fa_status forward(call *c)
{
    fa_plan plan;
    fa_status status = fa_plan_make(&c->p, &plan, &c->error);
    return status != FA_OK ? status
                           : fa_forward(c->runtime, &c->target, &c->p, &plan,
                                        &c->counts, &c->error);
}

static void free_call(call *c)
{
    fa_runtime_close(c->runtime);
    free(c);
}

static void hip_launches_with_grid_stream_and_arguments(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libamdhip64.so.6", &state);
    call *c = make_call(run, FA_HIP, "");
    fa_args args;
    int stream = 0;
    write_code(run, "fa_gfx906.co", 224, "ok");
    state->arch_r0600 = "gfx906:sramecc+:xnack-";
    c->target.device = 1;
    c->target.stream = &stream;
    c->p.scale = -0.5;
    c->p.causal = FA_CAUSAL_BOTTOM_RIGHT;
    c->p.k.size[2] = c->p.v.size[2] = 3;
    c->p.q.size[0] = c->p.k.size[0] = c->p.v.size[0] = c->p.out.size[0] = 1;
    c->p.q.stride[0] = INT64_MAX; /* size 1: must not reach the kernel */
    CHECK(run, forward(c) == FA_OK);
    CHECK_TEXT(run, c->error.text, "");
    CHECK(run, state->launches == 1 && state->device_at_launch == 1);
    CHECK(run, state->device == 0);
    CHECK(run, state->errors_cleared == 1);
    CHECK(run, state->stream == &stream);
    CHECK(run,
          state->grid[0] == 1 && state->grid[1] == 2 && state->grid[2] == 1);
    CHECK(run, state->threads == 256 && state->lds_bytes == 0);
    CHECK(run, c->counts.workgroups == 2);
    memcpy(&args, state->args, sizeof args);
    CHECK(run, args.out == c->out && args.lse == c->lse);
    CHECK(run, args.q_stride[0] == 0 && args.q_stride[2] == 64);
    CHECK(run, args.seqlen_q == 4 && args.seqlen_k == 3);
    CHECK(run, args.head_dim == 64 && args.heads == 2 && args.group == 2);
    CHECK(run, args.diagonal == -1);
    CHECK(run, args.q_flip == 0x80008000);
    CHECK(run, fabs((double)args.scale_log2 - 0.72134752) < 1e-7);
    free_call(c);
    CHECK(run, state->unloads == 1);
    dlclose(library);
}

static void the_diagonal_says_which_keys_a_row_sees(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libamdhip64.so.6", &state);
    call *c = make_call(run, FA_HIP, "");
    const int expected[3] = {6, 0, 2};
    write_code(run, "fa_gfx906.co", 224, "ok");
    state->arch_r0600 = "gfx906";
    c->p.k.size[2] = c->p.v.size[2] = 6;
    for (c->p.causal = 0; c->p.causal < 3; c->p.causal++) {
        fa_args args;
        CHECK(run, forward(c) == FA_OK);
        memcpy(&args, state->args, sizeof args);
        CHECK(run, args.diagonal == expected[c->p.causal]);
        CHECK(run, args.q_flip == 0);
    }
    free_call(c);
    dlclose(library);
}

static void a_refused_launch_names_kernel_call_and_error(test_run *run)
{
    fake_state *state = NULL;
    void *library = load_fake(run, "libamdhip64.so.6", &state);
    call *c = make_call(run, FA_HIP, "");
    write_code(run, "fa_gfx906.co", 224, "ok");
    state->arch_r0600 = "gfx906";
    state->failing_call = "hipModuleLaunchKernel";
    state->code = 719;
    c->target.device = 1;
    CHECK(run, forward(c) == FA_EDEVICE);
    CHECK_TEXT(run, c->error.text,
               "fa_fwd_f16_d64_plain: hipModuleLaunchKernel: "
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
    write_code(run, "fa_sm_80.cubin", 190, "ok");
    state->cc_major = 8;
    state->cc_minor = 6;
    state->device = -1;
    CHECK(run, forward(c) == FA_OK);
    CHECK(run, state->launches == 1 && state->device_at_launch == 0);
    CHECK(run, state->device == -1);
    CHECK(run, state->lds_bytes == fa_variants[0].lds_bytes);
    CHECK(run, state->allowed_lds == (int)fa_variants[0].lds_bytes);
    free_call(c);
    dlclose(library);
}

static void the_simulator_is_told_every_tensor(test_run *run)
{
    char path[4096];
    fake_state *state = NULL;
    void *library = load_fake(run, "libfakesim.so", &state);
    snprintf(path, sizeof path, "%s/libfakesim.so", run->fakes);
    call *c = make_call(run, FA_SIM, path);
    write_code(run, "fa_gfx906.co", 224, "ok");
    c->target.arch = "gfx906";
    CHECK(run, forward(c) == FA_OK);
    CHECK(run, state->tensor_count == 5);
    CHECK(run, state->tensor_access[0] == 1 && state->tensor_access[1] == 1 &&
                   state->tensor_access[2] == 1 &&
                   state->tensor_access[3] == 2 &&
                   state->tensor_access[4] == 2);
    CHECK(run, state->tensor_stride0[0] == 512 &&
                   state->tensor_stride0[1] == 256 &&
                   state->tensor_stride0[4] == 8);
    CHECK(run,
          c->counts.wave_instructions == 1000 && c->counts.workgroups == 3);
    free_call(c);
    dlclose(library);
}

static void a_fault_in_the_simulator_carries_its_report(test_run *run)
{
    char path[4096];
    fake_state *state = NULL;
    void *library = load_fake(run, "libfakesim.so", &state);
    snprintf(path, sizeof path, "%s/libfakesim.so", run->fakes);
    call *c = make_call(run, FA_SIM, path);
    write_code(run, "fa_gfx906.co", 224, "ok");
    c->target.arch = "gfx906";
    state->report = "pc 0x1230 global_load_dwordx4, lane 3, address 0x10";
    state->failing_call = "hipsimLaunch";
    state->code = 719;
    CHECK(run, forward(c) == FA_EDEVICE);
    CHECK_TEXT(run, c->error.text,
               "fa_fwd_f16_d64_plain: hipsimLaunch: "
               "hipErrorLaunchFailure (719): pc 0x1230 "
               "global_load_dwordx4, lane 3");
    c->target.device = 1;
    CHECK(run, forward(c) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "device: expected 0 for the simulator");
    c->target.arch = NULL;
    CHECK(run, forward(c) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "arch: expected a name such as gfx906");
    free_call(c);
    dlclose(library);
}

static void the_null_backend_needs_nothing_and_runs_nothing(test_run *run)
{
    call *c = make_call(run, FA_NULL, "/nowhere");
    c->out[0] = 0x1234;
    CHECK(run, forward(c) == FA_OK);
    CHECK(run, c->counts.workgroups == 4);
    CHECK(run, c->out[0] == 0x1234);
    free_call(c);
}

static void a_backend_outside_the_enum_is_refused_with_a_text(test_run *run)
{
    static const int bad[] = {FA_BACKEND_COUNT, 77, -1};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        fa_driver *driver = NULL;
        fa_error error = {""};
        char got[64];
        snprintf(got, sizeof got, "backend: expected 0..3, got %d", bad[i]);
        CHECK(run, fa_driver_open((fa_backend)bad[i], "", &driver, &error) ==
                       FA_EINVAL);
        CHECK(run, driver == NULL);
        CHECK_TEXT(run, error.text, got);
        call *c = make_call(run, (fa_backend)bad[i], "");
        CHECK(run, forward(c) == FA_EINVAL);
        CHECK_TEXT(run, c->error.text, got);
        free_call(c);
    }
}

/* -- without keys, without output ------------------------------------------ */

static void check_filled(test_run *run, fa_backend backend, const char *sim)
{
    call *c = make_call(run, backend, sim);
    const int rows = 2 * 2 * 4;
    int wrong = 0;
    c->p.k.size[2] = c->p.v.size[2] = 0;
    memset(c->out, 0x55, sizeof c->out);
    memset(c->lse, 0x55, sizeof c->lse);
    c->target.arch = "gfx906";
    CHECK(run, forward(c) == FA_OK);
    for (int i = 0; i < rows * 64; i++) {
        wrong += c->out[i] != 0;
    }
    for (int i = 0; i < rows; i++) {
        wrong += !(c->lse[i] == -INFINITY);
    }
    CHECK(run, wrong == 0);
    CHECK(run, c->out[rows * 64] == 0x5555);
    CHECK(run, c->lse[rows] > 0.0F); /* 0x55555555 is a positive number */
    /* Padded rows are not ours to write. */
    c->p.out.stride[2] = 72;
    c->p.out.stride[1] = 4 * 72;
    c->p.out.stride[0] = 8 * 72;
    CHECK(run, forward(c) == FA_EUNSUPPORTED);
    CHECK_TEXT(run, c->error.text,
               "out: expected a dense tensor where k has "
               "no rows");
    free_call(c);
}

static void without_keys_out_is_zero_and_lse_minus_infinity(test_run *run)
{
    char path[4096];
    fake_state *state = NULL;
    void *hip = load_fake(run, "libamdhip64.so.6", &state);
    void *cuda = load_fake(run, "libcuda.so.1", &state);
    void *sim = load_fake(run, "libfakesim.so", &state);
    snprintf(path, sizeof path, "%s/libfakesim.so", run->fakes);
    check_filled(run, FA_HIP, "");
    check_filled(run, FA_STANDIN, "");
    check_filled(run, FA_SIM, path);
    CHECK(run, state->launches == 0);
    dlclose(sim);
    dlclose(cuda);
    dlclose(hip);
}

static void an_empty_output_opens_no_library(test_run *run)
{
    call *c = make_call(run, FA_SIM, "/nowhere");
    c->p.q.size[2] = c->p.out.size[2] = 0;
    CHECK(run, forward(c) == FA_OK);
    free_call(c);
}

static void a_misaligned_output_behind_a_wide_plan_is_refused(test_run *run)
{
    call *c = make_call(run, FA_NULL, "");
    fa_plan plan;
    c->p.out.data = NULL; /* planned before it was allocated */
    CHECK(run, fa_plan_make(&c->p, &plan, &c->error) == FA_OK);
    c->p.out.data = (char *)c->out + 8 + (uintptr_t)c->out % 16;
    CHECK(run, fa_forward(c->runtime, &c->target, &c->p, &plan, &c->counts,
                          &c->error) == FA_EINVAL);
    CHECK_TEXT(run, c->error.text, "out: expected a base aligned to 16");
    free_call(c);
}

void test_driver(test_run *run)
{
    RUN(run, libraries_that_are_not_loaded_are_not_loaded);
    RUN(run, a_missing_simulator_is_named);
    RUN(run, an_incomplete_library_names_what_it_lacks);
    RUN(run, each_backend_names_the_very_function_that_is_missing);
    RUN(run, the_loaded_copy_of_hip_is_found_and_no_second_one);
    RUN(run, the_architecture_is_read_from_either_layout);
    RUN(run, hip_restores_the_callers_device);
    RUN(run, cuda_restores_the_callers_context);
    RUN(run, hip_launches_with_grid_stream_and_arguments);
    RUN(run, the_diagonal_says_which_keys_a_row_sees);
    RUN(run, a_refused_launch_names_kernel_call_and_error);
    RUN(run, cuda_launches_with_dynamic_lds);
    RUN(run, the_simulator_is_told_every_tensor);
    RUN(run, a_fault_in_the_simulator_carries_its_report);
    RUN(run, the_null_backend_needs_nothing_and_runs_nothing);
    RUN(run, without_keys_out_is_zero_and_lse_minus_infinity);
    RUN(run, a_backend_outside_the_enum_is_refused_with_a_text);
    RUN(run, an_empty_output_opens_no_library);
    RUN(run, a_misaligned_output_behind_a_wide_plan_is_refused);
}
