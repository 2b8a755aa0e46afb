/* test_code.c: which code object is taken, and what is said about bad ones.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "fake_runtime.h"
#include "faults.h"
#include "host/code.h"
#include "test.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct fixture {
    char folder[4096];
    void *library;
    fake_state *state;
    fa_driver *driver;
    fa_code_list codes;
    fa_error error;
    void *function;
    uint64_t hash;
} fixture;

/* A fresh folder for code objects, and a driver on a fake runtime. */
static void set_up(test_run *run, fixture *f, fa_backend backend)
{
    char path[4096];
    memset(f, 0, sizeof *f);
    snprintf(f->folder, sizeof f->folder, "%.4000s/codeXXXXXX", run->scratch);
    snprintf(path, sizeof path, "%s/%s", run->fakes,
             backend == FA_HIP ? "libamdhip64.so.6" : "libcuda.so.1");
    f->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (mkdtemp(f->folder) == NULL || f->library == NULL ||
        fa_driver_open(backend, "", &f->driver, &f->error) != FA_OK) {
        abort();
    }
    f->state = dlsym(f->library, "fake");
    memset(f->state, 0, sizeof *f->state);
    f->state->device_count = 2;
    f->state->arch_r0600 = "gfx906:sramecc+:xnack-";
}

static void tear_down(fixture *f)
{
    fa_code_clear(&f->codes);
    fa_driver_close(f->driver);
    dlclose(f->library);
}

static void write_bytes(const fixture *f, const char *name, const void *bytes,
                        size_t count)
{
    char path[8192];
    snprintf(path, sizeof path, "%s/%s", f->folder, name);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(bytes, 1, count, file) != count) {
        abort();
    }
    fclose(file);
}

static void write_code(const fixture *f, const char *name, uint16_t machine,
                       const char *text)
{
    unsigned char bytes[128] = {0x7f, 'E', 'L', 'F', 2};
    memcpy(bytes + 18, &machine, sizeof machine);
    memcpy(bytes + 64, text, strlen(text) + 1);
    write_bytes(f, name, bytes, 64 + strlen(text) + 1);
}

/* The first row that computes in `arith`. */
static const fa_variant *first_of(fa_dtype arith)
{
    const fa_variant *v = fa_variants;
    while (v->arith != arith) {
        v++;
    }
    return v;
}

static fa_status look_up(fixture *f, int device, const char *arch)
{
    return fa_code_function(&f->codes, f->driver, f->folder, device, arch,
                            first_of(FA_F16), &f->function, &f->hash,
                            &f->error);
}

static void check_fails(test_run *run, fixture *f, fa_status expected,
                        const char *message)
{
    CHECK(run, look_up(f, 0, NULL) == expected);
    CHECK(run, f->function == NULL);
    CHECK_TEXT(run, f->error.text, message);
}

static void features_behind_the_architecture_do_not_matter(test_run *run)
{
    fixture f;
    set_up(run, &f, FA_HIP);
    write_code(&f, "fa_gfx906_f16.co", 224, "ok");
    CHECK(run, look_up(&f, 0, NULL) == FA_OK);
    CHECK(run, look_up(&f, 1, "gfx906:xnack-") == FA_OK);
    CHECK(run, f.function != NULL);
    tear_down(&f);
}

static void a_code_object_is_loaded_once_per_device(test_run *run)
{
    fixture f;
    set_up(run, &f, FA_HIP);
    write_code(&f, "fa_gfx906_f16.co", 224, "ok");
    for (int i = 0; i < 10; i++) {
        CHECK(run, look_up(&f, i % 2, NULL) == FA_OK);
    }
    CHECK(run, f.state->loads == 2 && f.state->lookups == 2);
    fa_code_clear(&f.codes);
    CHECK(run, f.state->unloads == 2);
    tear_down(&f);
}

static void each_arithmetic_has_a_file_that_is_loaded_when_needed(test_run *run)
{
    static const struct {
        fa_dtype arith;
        const char *name;
    } units[] = {{FA_F16, "fa_gfx906_f16.co"},
                 {FA_F32, "fa_gfx906_f32.co"},
                 {FA_F64, "fa_gfx906_f64.co"}};
    uint64_t hash = 0;
    fixture f;
    set_up(run, &f, FA_HIP);
    for (int i = 0; i < 3; i++) {
        const fa_variant *v = first_of(units[i].arith);
        CHECK(run,
              fa_code_function(&f.codes, f.driver, f.folder, 0, NULL, v,
                               &f.function, &f.hash, &f.error) == FA_ECODE);
        CHECK_TEXT(run, f.error.text, units[i].name);
        write_code(&f, units[i].name, 224, "ok");
        CHECK(run, fa_code_function(&f.codes, f.driver, f.folder, 0, NULL, v,
                                    &f.function, &f.hash, &f.error) == FA_OK);
        CHECK(run, f.state->loads == i + 1);
        /* An ELF header and "ok", whoever wrote it. */
        CHECK(run, f.hash != 0 && (i == 0 || f.hash == hash));
        hash = f.hash;
    }
    CHECK(run, look_up(&f, 0, NULL) == FA_OK && f.state->loads == 3);
    tear_down(&f);
}

static void the_preparing_kernels_lie_with_their_own_arithmetic(test_run *run)
{
    for (int i = 0; i < FA_VARIANT_COUNT; i++) {
        const fa_variant *v = &fa_variants[i];
        if (v->pass == FA_PREPARE) {
            const bool in_double =
                v->reads == FA_READS_F64 || v->reads == FA_READS_F32;
            CHECK(run, v->arith == (in_double ? FA_F64 : FA_F32));
        }
    }
}

static void a_missing_file_names_path_and_variable(test_run *run)
{
    fixture f;
    char expected[8192];
    set_up(run, &f, FA_HIP);
    snprintf(expected, sizeof expected,
             "%s/fa_gfx906_f16.co: expected a code object for gfx906, got: No "
             "such file or directory; build it with FA_ARCHS=gfx906",
             f.folder);
    check_fails(run, &f, FA_ECODE, expected);
    /* Nothing is remembered of a failure. */
    write_code(&f, "fa_gfx906_f16.co", 224, "ok");
    CHECK(run, look_up(&f, 0, NULL) == FA_OK);
    tear_down(&f);
}

static void
corrupt_files_are_refused_before_the_runtime_sees_them(test_run *run)
{
    fixture f;
    unsigned char cut[64] = {0x7f, 'E', 'L', 'F', 2};
    const uint16_t machine = 224;
    const uint64_t section_table = 5000;
    set_up(run, &f, FA_HIP);
    write_bytes(&f, "fa_gfx906_f16.co", "", 0);
    check_fails(run, &f, FA_ECODE,
                "fa_gfx906_f16.co: expected a code object "
                "(64-bit ELF), got 0 bytes");
    write_bytes(&f, "fa_gfx906_f16.co", "#!/bin/sh\n", 10);
    check_fails(run, &f, FA_ECODE,
                "got 10 bytes of something else; the file is corrupt");
    write_bytes(&f, "fa_gfx906_f16.co", cut, 10); /* the start of a header */
    check_fails(run, &f, FA_ECODE, "got 10 bytes of something else");
    memcpy(cut + 18, &machine, sizeof machine);
    memcpy(cut + 40, &section_table, sizeof section_table);
    write_bytes(&f, "fa_gfx906_f16.co", cut, sizeof cut);
    check_fails(run, &f, FA_ECODE,
                "fa_gfx906_f16.co: expected at least 5000 bytes, got 64; the "
                "file is corrupt");
    /* A table that starts inside the file and ends outside. */
    cut[40] = 60;
    cut[41] = 0;
    cut[58] = 64; /* bytes of an entry */
    cut[60] = 3;  /* entries */
    write_bytes(&f, "fa_gfx906_f16.co", cut, sizeof cut);
    check_fails(run, &f, FA_ECODE,
                "fa_gfx906_f16.co: expected at least 252 bytes, got 64");
    write_code(&f, "fa_gfx906_f16.co", 62, "ok");
    check_fails(run, &f, FA_ECODE,
                "expected a code object for ELF machine "
                "224, got machine 62");
    CHECK(run, f.state->loads == 0);
    tear_down(&f);
}

static void what_the_runtime_refuses_is_explained(test_run *run)
{
    fixture f;
    set_up(run, &f, FA_HIP);
    write_code(&f, "fa_gfx906_f16.co", 224, "foreign");
    check_fails(run, &f, FA_ECODE,
                "fa_gfx906_f16.co: built for another "
                "architecture: hipModuleLoadData: "
                "hipErrorNoBinaryForGpu (209)");
    write_code(&f, "fa_gfx906_f16.co", 224, "bad");
    check_fails(run, &f, FA_ECODE,
                "fa_gfx906_f16.co: not a usable code object");
    write_code(&f, "fa_gfx906_f16.co", 224, "incomplete");
    char expected[256];
    snprintf(expected, sizeof expected,
             "fa_gfx906_f16.co: expected kernel %s in it, got none",
             first_of(FA_F16)->symbol);
    check_fails(run, &f, FA_ECODE, expected);
    tear_down(&f);
}

static void a_cubin_without_the_kernel_is_explained(test_run *run)
{
    fixture f;
    set_up(run, &f, FA_STANDIN);
    f.state->cc_major = 8;
    write_code(&f, "fa_sm_80_f16.cubin", 190, "incomplete");
    check_fails(run, &f, FA_ECODE,
                " in it, got none (error 500); it was built "
                "from another version of the sources");
    tear_down(&f);
}

/* A pipe has no end to measure, and a disk may fail. */
static void a_file_that_cannot_be_read_is_explained(test_run *run)
{
    char path[8192];
    char name[64];
    int ends[2];
    fixture f;
    set_up(run, &f, FA_HIP);
    snprintf(path, sizeof path, "%s/fa_gfx906_f16.co", f.folder);
    if (pipe(ends) != 0) {
        abort();
    }
    snprintf(name, sizeof name, "/proc/self/fd/%d", ends[0]);
    CHECK(run, symlink(name, path) == 0);
    check_fails(run, &f, FA_ECODE, "fa_gfx906_f16.co: expected a file, got: ");
    close(ends[0]);
    close(ends[1]);
    unlink(path);
    write_code(&f, "fa_gfx906_f16.co", 224, "ok");
    fault_set("fread", 1, EIO);
    check_fails(run, &f, FA_ECODE, "expected 67 readable bytes, got fewer");
    CHECK(run, fault_happened());
    CHECK(run, look_up(&f, 0, NULL) == FA_OK);
    tear_down(&f);
}

static void names_that_are_too_long_are_refused(test_run *run)
{
    static char folder[5000];
    char arch[100];
    fixture f;
    set_up(run, &f, FA_HIP);
    write_code(&f, "fa_gfx906_f16.co", 224, "ok");
    memset(arch, 'x', sizeof arch - 1);
    memcpy(arch, "gfx906:", 7);
    arch[sizeof arch - 1] = '\0';
    CHECK(run, look_up(&f, 0, arch) == FA_EINVAL);
    CHECK_TEXT(run, f.error.text, "arch: expected a name below 64 characters");
    memset(folder, 'x', sizeof folder - 1);
    CHECK(run, fa_code_function(&f.codes, f.driver, folder, 0, NULL,
                                first_of(FA_F16), &f.function, &f.hash,
                                &f.error) == FA_EINVAL);
    CHECK_TEXT(run, f.error.text, "code_dir: expected a path below 4096 char");
    tear_down(&f);
}

static void devices_that_do_not_exist_are_refused(test_run *run)
{
    fixture f;
    set_up(run, &f, FA_HIP);
    write_code(&f, "fa_gfx906_f16.co", 224, "ok");
    CHECK(run, look_up(&f, 2, NULL) == FA_EDEVICE);
    CHECK_TEXT(run, f.error.text,
               "device: expected an index below the "
               "number of devices (2), got 2");
    f.state->device_count = 0;
    check_fails(run, &f, FA_EDEVICE, "the number of devices (0), got 0");
    tear_down(&f);
}

static void architecture_names_cannot_lead_elsewhere(test_run *run)
{
    fixture f;
    set_up(run, &f, FA_HIP);
    CHECK(run, look_up(&f, 0, "../gfx906") == FA_EINVAL);
    CHECK_TEXT(run, f.error.text,
               "arch: expected a name such as gfx906, got "
               "\"../gfx906\"");
    CHECK(run, look_up(&f, 0, ":xnack-") == FA_EINVAL);
    tear_down(&f);
}

static void the_standin_takes_the_highest_cubin_of_its_major(test_run *run)
{
    fixture f;
    set_up(run, &f, FA_STANDIN);
    f.state->cc_major = 8;
    f.state->cc_minor = 9;
    check_fails(run, &f, FA_ECODE,
                "fa_sm_89_f16.cubin: expected a code object "
                "for sm_89");
    write_code(&f, "fa_sm_90_f16.cubin", 190, "ok");
    check_fails(run, &f, FA_ECODE, "fa_sm_89_f16.cubin: expected");
    write_code(&f, "fa_sm_80_f16.cubin", 190, "foreign");
    check_fails(run, &f, FA_ECODE, "fa_sm_80_f16.cubin: built for another");
    write_code(&f, "fa_sm_86_f16.cubin", 190, "ok");
    CHECK(run, look_up(&f, 0, NULL) == FA_OK);
    tear_down(&f);
}

/* -- threads and fork ------------------------------------------------------ */

static void *look_up_in_thread(void *argument)
{
    fixture *f = argument;
    fa_error error;
    void *function = NULL;
    uint64_t hash = 0;
    fa_status status =
        fa_code_function(&f->codes, f->driver, f->folder, 0, NULL,
                         first_of(FA_F16), &function, &hash, &error);
    return status == FA_OK ? function : NULL;
}

static void threads_that_load_at_once_share_one_module(test_run *run)
{
    enum { THREADS = 8 };
    for (int round = 0; round < 5; round++) {
        fixture f;
        pthread_t threads[THREADS];
        set_up(run, &f, FA_HIP);
        write_code(&f, "fa_gfx906_f16.co", 224, "ok");
        f.state->slow = true;
        for (int i = 0; i < THREADS; i++) {
            if (pthread_create(&threads[i], NULL, look_up_in_thread, &f)) {
                abort();
            }
        }
        for (int i = 0; i < THREADS; i++) {
            void *function = NULL;
            pthread_join(threads[i], &function);
            CHECK(run, function != NULL);
        }
        CHECK(run, f.state->loads - f.state->unloads == 1);
        tear_down(&f);
    }
}

static void a_forked_child_can_look_up_and_load(test_run *run)
{
    fixture f;
    set_up(run, &f, FA_HIP);
    write_code(&f, "fa_gfx906_f16.co", 224, "ok");
    CHECK(run, look_up(&f, 0, NULL) == FA_OK);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        /* One is loaded already, the other is not. */
        bool good =
            look_up(&f, 0, NULL) == FA_OK && look_up(&f, 1, NULL) == FA_OK;
        _exit(good ? 0 : 1);
    }
    int status = -1;
    CHECK(run, child > 0 && waitpid(child, &status, 0) == child);
    CHECK(run, WIFEXITED(status) && WEXITSTATUS(status) == 0);
    tear_down(&f);
}

void test_code(test_run *run)
{
    RUN(run, features_behind_the_architecture_do_not_matter);
    RUN(run, a_code_object_is_loaded_once_per_device);
    RUN(run, each_arithmetic_has_a_file_that_is_loaded_when_needed);
    RUN(run, the_preparing_kernels_lie_with_their_own_arithmetic);
    RUN(run, a_missing_file_names_path_and_variable);
    RUN(run, corrupt_files_are_refused_before_the_runtime_sees_them);
    RUN(run, what_the_runtime_refuses_is_explained);
    RUN(run, a_cubin_without_the_kernel_is_explained);
    RUN(run, a_file_that_cannot_be_read_is_explained);
    RUN(run, names_that_are_too_long_are_refused);
    RUN(run, devices_that_do_not_exist_are_refused);
    RUN(run, architecture_names_cannot_lead_elsewhere);
    RUN(run, the_standin_takes_the_highest_cubin_of_its_major);
    RUN(run, threads_that_load_at_once_share_one_module);
    RUN(run, a_forked_child_can_look_up_and_load);
}
