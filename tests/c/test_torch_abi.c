/* test_torch_abi.c: which torch is taken for the C registration.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "python/torch_abi.h"
#include "test.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *load_fake(test_run *run, const char *name, uint64_t version)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", run->fakes, name);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!CHECK(run, library != NULL)) {
        abort(); /* the tests were not built as their Makefile does */
    }
    uint64_t *place = dlsym(library, "fake_version");
    *place = version << 48; /* major and minor are the two highest bytes */
    return library;
}

/* fa_torch_abi_fill keeps its handle, as torch is never unloaded; take it
 * back, so that the next test finds its own library. */
static void unload(void *library, bool filled)
{
    dlclose(library);
    if (filled) {
        dlclose(library);
    }
}

static void without_torch_there_is_no_table(test_run *run)
{
    fa_torch_abi abi;
    CHECK(run, !fa_torch_abi_fill(&abi));
}

static void an_incomplete_torch_is_not_taken(test_run *run)
{
    fa_torch_abi abi;
    void *library = load_fake(run, "libtorch_cpu.so.incomplete", 0x020d);
    CHECK(run, !fa_torch_abi_fill(&abi));
    unload(library, true);
}

static void torch_before_2_8_is_not_taken(test_run *run)
{
    fa_torch_abi abi;
    void *library = load_fake(run, "libtorch_cpu.so", 0x0207);
    CHECK(run, !fa_torch_abi_fill(&abi));
    unload(library, true);
}

static void torch_2_8_without_newer_functions_is_taken(test_run *run)
{
    fa_torch_abi abi;
    void *library = load_fake(run, "libtorch_cpu.so", 0x0208);
    CHECK(run, fa_torch_abi_fill(&abi));
    CHECK(run, abi.check != NULL && abi.device_type_cuda != NULL);
    CHECK(run, abi.library_impl_versioned == NULL);
    /* A CPU build: the stream function is looked for in the GPU library. */
    CHECK(run, abi.current_cuda_stream == NULL);
    const char **reason = dlsym(library, "fake_reason");
    CHECK_TEXT(run, fa_torch_abi_reason(&abi), "torch gave no reason");
    *reason = "out of memory";
    CHECK_TEXT(run, fa_torch_abi_reason(&abi), "out of memory");
    *reason = "";
    CHECK_TEXT(run, fa_torch_abi_reason(&abi), "torch gave no reason");
    abi.last_error = NULL;
    CHECK_TEXT(run, fa_torch_abi_reason(&abi), "torch gave no reason");
    unload(library, true);
}

static void the_stream_function_comes_from_the_gpu_library(test_run *run)
{
    fa_torch_abi abi;
    void *library = load_fake(run, "libtorch_cpu.so", 0x020d);
    void *gpu = load_fake(run, "libtorch_hip.so", 0);
    void *address = dlsym(gpu, "aoti_torch_get_current_cuda_stream");
    CHECK(run, fa_torch_abi_fill(&abi));
    CHECK(run, memcmp(&abi.current_cuda_stream, &address, sizeof address) == 0);
    unload(gpu, true);
    unload(library, true);
}

void test_torch_abi(test_run *run)
{
    RUN(run, without_torch_there_is_no_table);
    RUN(run, an_incomplete_torch_is_not_taken);
    RUN(run, torch_before_2_8_is_not_taken);
    RUN(run, torch_2_8_without_newer_functions_is_taken);
    RUN(run, the_stream_function_comes_from_the_gpu_library);
}
