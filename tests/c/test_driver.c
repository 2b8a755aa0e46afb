/* test_driver.c: the four backends behind one shape, on fake runtimes.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "fake_runtime.h"
#include "host/driver.h"
#include "test.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
    void *library = test_load_fake(run, "libamdhip64.so.partial", &state);
    snprintf(path, sizeof path, "%s/libamdhip64.so.partial", run->fakes);
    check_open_fails(run, FA_HIP, "",
                     "libamdhip64: expected it to export hipMemsetD32Async");
    check_open_fails(run, FA_SIM, path,
                     "libhipsim: expected it to export hipsimModuleLoad");
    dlclose(library);
    library = test_load_fake(run, "libcuda.so.partial", &state);
    check_open_fails(run, FA_STANDIN, "",
                     "libcuda: expected it to export cuMemsetD32Async");
    dlclose(library);
    library = test_load_fake(run, "libamdhip64.so.eventless", &state);
    check_open_fails(run, FA_HIP, "",
                     "libamdhip64: expected it to export hipEventQuery");
    dlclose(library);
    library = test_load_fake(run, "libcuda.so.eventless", &state);
    check_open_fails(run, FA_STANDIN, "",
                     "libcuda: expected it to export cuEventQuery");
    dlclose(library);
}

static void the_loaded_copy_of_hip_is_found_and_no_second_one(test_run *run)
{
    fake_state *state = NULL;
    void *library = test_load_fake(run, "libamdhip64.so.6", &state);
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
    void *library = test_load_fake(run, "libamdhip64.so.6", &state);
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
    char long_name[100] = "gfx";
    memset(long_name + 3, '9', sizeof long_name - 4);
    state->arch_r0600 = state->arch_r0000 = long_name;
    CHECK(run, driver->arch(driver, 0, arch, &error) == FA_EDEVICE);
    state->arch_r0600 = NULL;
    state->arch_r0000 = NULL;
    CHECK(run, driver->arch(driver, 0, arch, &error) == FA_EDEVICE);
    CHECK_TEXT(run, error.text, "hipGetDeviceProperties");
    fa_driver_close(driver);
    dlclose(library);
}

static void errors_without_words_are_numbers(test_run *run)
{
    static const struct {
        fa_backend backend;
        const char *library;
        const char *call;
        const char *text;
    } cases[] = {{FA_HIP, "libamdhip64.so.6", "hipGetDeviceCount",
                  "hipGetDeviceCount: unknown error (999): no text"},
                 {FA_STANDIN, "libcuda.so.1", "cuCtxGetCurrent",
                  ": error 999: no text"}};
    for (size_t i = 0; i < 2; i++) {
        int count = 0;
        fake_state *state = NULL;
        void *library = test_load_fake(run, cases[i].library, &state);
        fa_driver *driver = open_driver(run, cases[i].backend, "");
        fa_scope scope;
        fa_error error;
        state->code = FAKE_UNKNOWN;
        state->failing_call = cases[i].call;
        CHECK(run,
              (cases[i].backend == FA_HIP
                   ? driver->device_count(driver, &count, &error)
                   : driver->enter(driver, 0, &scope, &error)) == FA_EDEVICE);
        CHECK_TEXT(run, error.text, cases[i].text);
        fa_driver_close(driver);
        dlclose(library);
    }
}

static void the_simulator_takes_so_many_tensors(test_run *run)
{
    char path[4096];
    fake_state *state = NULL;
    void *library = test_load_fake(run, "libfakesim.so", &state);
    snprintf(path, sizeof path, "%s/libfakesim.so", run->fakes);
    fa_driver *driver = open_driver(run, FA_SIM, path);
    const fa_launch launch = {.tensor_count = FA_MAX_ACCESSES + 1};
    fa_counts counts;
    fa_error error;
    CHECK(run, driver->launch(driver, &launch, &counts, &error) == FA_EINVAL);
    CHECK_TEXT(run, error.text, "tensors: expected at most ");
    fa_driver_close(driver);
    dlclose(library);
}

static void hip_restores_the_callers_device(test_run *run)
{
    fake_state *state = NULL;
    void *library = test_load_fake(run, "libamdhip64.so.6", &state);
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
    void *library = test_load_fake(run, "libcuda.so.1", &state);
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
    }
}

/* -- fills ----------------------------------------------------------------- */

static void check_fills(test_run *run, fa_backend backend, const char *library)
{
    static const struct {
        size_t bytes;
        uint64_t bits;
    } cases[] = {{2, 0x7e11},
                 {4, 0xff800000},
                 {8, UINT64_C(0xfff0000000000000)},
                 {8, UINT64_C(0x123456789abcdef0)},
                 {8, 0}};
    fa_driver *driver = open_driver(run, backend, library);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        unsigned char memory[8 * 8];
        fa_error error;
        int stream = 0;
        memset(memory, 0x55, sizeof memory);
        CHECK(run, driver->fill(driver, memory, cases[i].bits, cases[i].bytes,
                                7, &stream, &error) == FA_OK);
        for (size_t j = 0; j < 7; j++) {
            CHECK(run, memcmp(&memory[j * cases[i].bytes], &cases[i].bits,
                              cases[i].bytes) == 0);
        }
        CHECK(run, memory[7 * cases[i].bytes] == 0x55);
    }
    fa_driver_close(driver);
}

static void fills_store_elements_of_two_four_and_eight_bytes(test_run *run)
{
    char path[4096];
    fake_state *state = NULL;
    void *hip = test_load_fake(run, "libamdhip64.so.6", &state);
    void *cuda = test_load_fake(run, "libcuda.so.1", &state);
    void *sim = test_load_fake(run, "libfakesim.so", &state);
    snprintf(path, sizeof path, "%s/libfakesim.so", run->fakes);
    check_fills(run, FA_HIP, "");
    check_fills(run, FA_STANDIN, "");
    check_fills(run, FA_SIM, path);
    dlclose(sim);
    dlclose(cuda);
    dlclose(hip);
}

void test_driver(test_run *run)
{
    RUN(run, libraries_that_are_not_loaded_are_not_loaded);
    RUN(run, a_missing_simulator_is_named);
    RUN(run, an_incomplete_library_names_what_it_lacks);
    RUN(run, each_backend_names_the_very_function_that_is_missing);
    RUN(run, the_loaded_copy_of_hip_is_found_and_no_second_one);
    RUN(run, the_architecture_is_read_from_either_layout);
    RUN(run, errors_without_words_are_numbers);
    RUN(run, the_simulator_takes_so_many_tensors);
    RUN(run, hip_restores_the_callers_device);
    RUN(run, cuda_restores_the_callers_context);
    RUN(run, a_backend_outside_the_enum_is_refused_with_a_text);
    RUN(run, fills_store_elements_of_two_four_and_eight_bytes);
}
