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

/* Gives the test's own handle back; the library must be gone then, so nobody
 * else holds one. */
static void unload(test_run *run, void *library, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", run->fakes, name);
    dlclose(library);
    CHECK(run, dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) == NULL);
}

static void without_torch_there_is_no_table(test_run *run)
{
    fa_torch_abi abi;
    CHECK(run, !fa_torch_abi_open(&abi));
}

static void an_incomplete_torch_is_not_taken(test_run *run)
{
    fa_torch_abi abi;
    void *library = load_fake(run, "libtorch_cpu.so.incomplete", 0x020d);
    CHECK(run, !fa_torch_abi_open(&abi));
    CHECK(run, abi.library == NULL);
    unload(run, library, "libtorch_cpu.so.incomplete");
}

static void torch_before_2_8_is_not_taken(test_run *run)
{
    fa_torch_abi abi;
    void *library = load_fake(run, "libtorch_cpu.so", 0x0207);
    CHECK(run, !fa_torch_abi_open(&abi));
    unload(run, library, "libtorch_cpu.so");
}

static void torch_2_8_without_newer_functions_is_taken(test_run *run)
{
    fa_torch_abi abi;
    void *library = load_fake(run, "libtorch_cpu.so", 0x0208);
    CHECK(run, fa_torch_abi_open(&abi));
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
    fa_torch_abi_close(&abi);
    CHECK(run, abi.check == NULL);
    unload(run, library, "libtorch_cpu.so");
}

static void the_stream_function_comes_from_the_gpu_library(test_run *run)
{
    fa_torch_abi abi;
    void *library = load_fake(run, "libtorch_cpu.so", 0x020d);
    void *gpu = load_fake(run, "libtorch_hip.so", 0);
    void *address = dlsym(gpu, "aoti_torch_get_current_cuda_stream");
    CHECK(run, fa_torch_abi_open(&abi));
    CHECK(run, memcmp(&abi.current_cuda_stream, &address, sizeof address) == 0);
    fa_torch_abi_close(&abi);
    unload(run, gpu, "libtorch_hip.so");
    unload(run, library, "libtorch_cpu.so");
}

static void a_gpu_library_without_the_stream_function_is_let_go(test_run *run)
{
    fa_torch_abi abi;
    void *library = load_fake(run, "libtorch_cpu.so", 0x020d);
    void *gpu = load_fake(run, "libtorch_cuda.so.incomplete", 0);
    CHECK(run, fa_torch_abi_open(&abi));
    CHECK(run, abi.current_cuda_stream == NULL && abi.gpu_library == NULL);
    unload(run, gpu, "libtorch_cuda.so.incomplete");
    fa_torch_abi_close(&abi);
    unload(run, library, "libtorch_cpu.so");
}

void test_torch_abi(test_run *run)
{
    RUN(run, without_torch_there_is_no_table);
    RUN(run, an_incomplete_torch_is_not_taken);
    RUN(run, torch_before_2_8_is_not_taken);
    RUN(run, torch_2_8_without_newer_functions_is_taken);
    RUN(run, the_stream_function_comes_from_the_gpu_library);
    RUN(run, a_gpu_library_without_the_stream_function_is_let_go);
}
