/* test_store.c: breakers on disk: what is put is read, by whomever and whoever
 * writes at the same time; what is not trusted is left alone; what the system
 * refuses loses nothing.  Damage is left to test_store_damage.c, killed writers
 * to test_store_kills.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _XOPEN_SOURCE 700
#include "faults.h"
#include "host/store.h"
#include "scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char device[] = "gfx906 driver 6.3 runtime 5.7";
/* Of that device; the digits are its 64-bit FNV-1a, from another program. */
static const char file_name[] = "breakers-e45d3d8407def234.txt";
static const char bad_name[] = "breakers-e45d3d8407def234.txt.bad";

typedef struct fixture {
    char folder[SCRATCH_CHARS];
    fa_error error;
    size_t count;
    fa_store_entry entry[FA_STORE_MAX];
} fixture;

static void set_up(const test_run *run, fixture *f)
{
    memset(f, 0, sizeof *f);
    scratch_folder(run, f->folder);
}

static fa_store_entry entry_of(const char *kernel, uint32_t failures)
{
    fa_store_entry e = {.code_hash = UINT64_C(0xfedcba9876543210),
                        .failures = failures,
                        .opened = 1700000000,
                        .retry = 1700000060,
                        .cause = "late by 3 s"};
    snprintf(e.kernel, sizeof e.kernel, "%s", kernel);
    return e;
}

static fa_status put(fixture *f, const char *kernel, uint32_t failures)
{
    const fa_store_entry e = entry_of(kernel, failures);
    return fa_store_put(f->folder, device, &e, &f->error);
}

static fa_status get(fixture *f)
{
    return fa_store_read(f->folder, device, f->entry, FA_STORE_MAX, &f->count,
                         &f->error);
}

/* Failures of a kernel as read last; 0: no entry. */
static uint32_t failures_of(const fixture *f, const char *kernel)
{
    for (size_t i = 0; i < f->count; i++) {
        if (strcmp(f->entry[i].kernel, kernel) == 0) {
            return f->entry[i].failures;
        }
    }
    return 0;
}

/* -- what is put is read --------------------------------------------------- */

static void store_gives_back_what_was_put(test_run *run)
{
    fixture f;
    fa_store_entry e = {.code_hash = UINT64_MAX,
                        .failures = UINT32_MAX,
                        .opened = 0,
                        .retry = INT64_C(253402300799)};
    set_up(run, &f);
    memset(e.kernel, 'k', sizeof e.kernel - 1);
    memset(e.cause, 'c', sizeof e.cause - 1);
    CHECK(run, get(&f) == FA_OK && f.count == 0);
    CHECK(run, fa_store_put(f.folder, device, &e, &f.error) == FA_OK);
    CHECK(run, put(&f, "fwd", 3) == FA_OK);
    CHECK(run, get(&f) == FA_OK && f.count == 2);
    CHECK(run, memcmp(&f.entry[0], &e, sizeof e) == 0);
    e = entry_of("fwd", 3);
    CHECK(run, memcmp(&f.entry[1], &e, sizeof e) == 0);
    /* No more than there is room for. */
    CHECK(run, fa_store_read(f.folder, device, f.entry, 1, &f.count,
                             &f.error) == FA_OK);
    CHECK(run, f.count == 1);
}

static void store_makes_private_folders_and_files(test_run *run)
{
    fixture f;
    struct stat info;
    set_up(run, &f);
    const size_t length = strlen(f.folder);
    snprintf(f.folder + length, sizeof f.folder - length, "/a/b/");
    CHECK(run, get(&f) == FA_OK && f.count == 0);
    CHECK(run, put(&f, "fwd", 0) == FA_OK);
    CHECK(run, stat(f.folder, &info) != 0); /* neither of them needs it */
    CHECK(run, put(&f, "fwd", 1) == FA_OK);
    CHECK(run, get(&f) == FA_OK && f.count == 1);
    CHECK(run, stat(f.folder, &info) == 0 && (info.st_mode & 07777) == 0700);
    CHECK(run, stat(scratch_path(f.folder, ".."), &info) == 0 &&
                   (info.st_mode & 07777) == 0700);
    CHECK(run, stat(scratch_path(f.folder, file_name), &info) == 0 &&
                   (info.st_mode & 07777) == 0600);
}

static void store_replaces_and_removes_one_entry_alone(test_run *run)
{
    fixture f;
    set_up(run, &f);
    CHECK(run, put(&f, "a", 1) == FA_OK && put(&f, "b", 2) == FA_OK);
    CHECK(run, put(&f, "c", 3) == FA_OK && put(&f, "b", 7) == FA_OK);
    CHECK(run, get(&f) == FA_OK && f.count == 3);
    CHECK(run, failures_of(&f, "a") == 1 && failures_of(&f, "b") == 7);
    CHECK(run, put(&f, "a", 0) == FA_OK && put(&f, "absent", 0) == FA_OK);
    CHECK(run, get(&f) == FA_OK && f.count == 2);
    CHECK(run, failures_of(&f, "b") == 7 && failures_of(&f, "c") == 3);
    CHECK(run, put(&f, "b", 0) == FA_OK && put(&f, "c", 0) == FA_OK);
    CHECK(run, get(&f) == FA_OK && f.count == 0);
    CHECK(run, scratch_count(f.folder, ".txt") == 0);
}

static void store_keeps_devices_apart(test_run *run)
{
    fixture f;
    const fa_store_entry e = entry_of("fwd", 2);
    set_up(run, &f);
    CHECK(run, put(&f, "fwd", 1) == FA_OK);
    CHECK(run, fa_store_put(f.folder, "another", &e, &f.error) == FA_OK);
    CHECK(run, get(&f) == FA_OK && failures_of(&f, "fwd") == 1);
    CHECK(run, fa_store_read(f.folder, "another", f.entry, FA_STORE_MAX,
                             &f.count, &f.error) == FA_OK);
    CHECK(run, f.count == 1 && failures_of(&f, "fwd") == 2);
}

static void store_text_is_as_documented(test_run *run)
{
    fixture f;
    char text[1024];
    set_up(run, &f);
    CHECK(run, put(&f, "fwd", 3) == FA_OK);
    scratch_read(f.folder, file_name, text, sizeof text);
    CHECK_TEXT(run, text,
               "flash_attn_rocm breakers 1\n"
               "device gfx906 driver 6.3 runtime 5.7\n"
               "kernel fwd fedcba9876543210 3 1700000000 1700000060 late by "
               "3 s\nchecksum 5cf6bae0ba4b068e\n");
}

static void store_writes_causes_as_one_printable_line(test_run *run)
{
    fixture f;
    fa_store_entry e = entry_of("fwd", 1);
    set_up(run, &f);
    snprintf(e.cause, sizeof e.cause, "a\nb\x1b[0m\x7f\xc3\xa9");
    CHECK(run, fa_store_put(f.folder, device, &e, &f.error) == FA_OK);
    CHECK(run, get(&f) == FA_OK && f.count == 1);
    CHECK(run, strcmp(f.entry[0].cause, "a b [0m ??") == 0);
    memset(e.cause, 'x', sizeof e.cause); /* no end */
    CHECK(run, fa_store_put(f.folder, device, &e, &f.error) == FA_OK);
    CHECK(run, get(&f) == FA_OK && f.count == 1);
    CHECK(run, strlen(f.entry[0].cause) == FA_CAUSE_CHARS - 1);
}

static void store_refuses_arguments_by_name(test_run *run)
{
    static const struct {
        const char *identity, *kernel;
        int64_t opened, retry;
        const char *message;
    } cases[] = {
        {"", "k", 1, 2, "identity: expected a line"},
        {"a\nb", "k", 1, 2, "identity: expected a line"},
        {"caf\xc3\xa9", "k", 1, 2, "identity: expected a line"},
        {"d", "", 1, 2, "kernel: expected a word"},
        {"d", "a b", 1, 2, "kernel: expected a word"},
        {"d", "a\nb", 1, 2, "kernel: expected a word"},
        {"d", "k", 2, 1, "retry: expected unix seconds from opened on, got 1"},
        {"d", "k", -1, 1, "opened -1"},
        {"d", "k", 1, INT64_C(253402300800), "retry: expected"},
    };
    fixture f;
    char lengthy[5000];
    set_up(run, &f);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fa_store_entry e = entry_of(cases[i].kernel, 1);
        e.opened = cases[i].opened;
        e.retry = cases[i].retry;
        CHECK(run, fa_store_put(f.folder, cases[i].identity, &e, &f.error) ==
                       FA_EINVAL);
        CHECK_TEXT(run, f.error.text, cases[i].message);
    }
    fa_store_entry e = entry_of("k", 1);
    memset(lengthy, 'x', sizeof lengthy);
    lengthy[sizeof lengthy - 1] = '\0';
    CHECK(run, fa_store_put(lengthy, "d", &e, &f.error) == FA_EINVAL);
    CHECK_TEXT(run, f.error.text, "dir: expected a path of 1 to 4095 bytes");
    CHECK(run, fa_store_put("", "d", &e, &f.error) == FA_EINVAL);
    lengthy[FA_IDENTITY_CHARS] = '\0';
    CHECK(run, fa_store_put(f.folder, lengthy, &e, &f.error) == FA_EINVAL);
    CHECK(run, fa_store_read(f.folder, lengthy, f.entry, 1, &f.count,
                             &f.error) == FA_EINVAL);
    memset(e.kernel, 'x', sizeof e.kernel); /* no end */
    CHECK(run, fa_store_put(f.folder, "d", &e, &f.error) == FA_EINVAL);
    CHECK(run, scratch_count(f.folder, "") == 0);
}

static void store_refuses_more_kernels_than_it_holds(test_run *run)
{
    fixture f;
    char kernel[32];
    set_up(run, &f);
    for (int i = 0; i < FA_STORE_MAX; i++) {
        snprintf(kernel, sizeof kernel, "kernel_%d", i);
        CHECK(run, put(&f, kernel, 1) == FA_OK);
    }
    CHECK(run, put(&f, "one_more", 1) == FA_EINVAL);
    CHECK_TEXT(run, f.error.text, "kernel: expected at most 256");
    CHECK(run, put(&f, "kernel_9", 5) == FA_OK);
    CHECK(run, get(&f) == FA_OK && f.count == FA_STORE_MAX);
    CHECK(run, failures_of(&f, "kernel_9") == 5);
}

/* -- list and reset -------------------------------------------------------- */

typedef struct seen {
    int count;
    char last[FA_IDENTITY_CHARS];
    uint32_t failures; /* the sum */
} seen;

static void see(void *context, const char *identity,
                const fa_store_entry *entry)
{
    seen *s = context;
    s->count++;
    s->failures += entry->failures;
    snprintf(s->last, sizeof s->last, "%s", identity);
}

static void store_lists_all_devices(test_run *run)
{
    fixture f;
    seen s = {0};
    size_t unreadable = 9;
    const fa_store_entry e = entry_of("fwd", 30);
    set_up(run, &f);
    const char *absent = scratch_path(f.folder, "absent");
    CHECK(run, fa_store_list(absent, see, &s, &unreadable, &f.error) == FA_OK);
    CHECK(run, s.count == 0 && unreadable == 0);
    CHECK(run, put(&f, "a", 1) == FA_OK && put(&f, "b", 2) == FA_OK);
    CHECK(run,
          fa_store_list(f.folder, see, &s, &unreadable, &f.error) == FA_OK);
    CHECK(run, s.count == 2 && s.failures == 3 && unreadable == 0);
    CHECK(run, strcmp(s.last, device) == 0);
    CHECK(run, fa_store_put(f.folder, "another", &e, &f.error) == FA_OK);
    scratch_write(f.folder, "breakers-0000000000000000.txt", "bad", 3);
    scratch_write(f.folder, "breakers-note.txt", "not ours", 8);
    s = (seen){0};
    CHECK(run,
          fa_store_list(f.folder, see, &s, &unreadable, &f.error) == FA_OK);
    CHECK(run, s.count == 3 && s.failures == 33 && unreadable == 1);
    CHECK(run, scratch_count(f.folder, ".bad") == 0); /* it only looks */
}

static void store_reset_removes_a_kernel_or_all_and_repairs(test_run *run)
{
    fixture f;
    size_t removed = 9;
    const fa_store_entry e = entry_of("a", 1);
    set_up(run, &f);
    const char *absent = scratch_path(f.folder, "absent");
    CHECK(run, fa_store_reset(absent, NULL, &removed, &f.error) == FA_OK);
    CHECK(run, removed == 0);
    CHECK(run, put(&f, "a", 1) == FA_OK && put(&f, "b", 2) == FA_OK);
    CHECK(run, fa_store_put(f.folder, "another", &e, &f.error) == FA_OK);
    scratch_write(f.folder, "breakers-0000000000000000.txt", "bad", 3);
    scratch_write(f.folder, "breakers-note.txt", "not ours", 8);
    CHECK(run, fa_store_reset(f.folder, "a", &removed, &f.error) == FA_OK);
    CHECK(run, removed == 2);
    CHECK(run, scratch_count(f.folder, ".bad") == 1);
    CHECK(run, get(&f) == FA_OK && f.count == 1);
    CHECK(run, failures_of(&f, "b") == 2);
    CHECK(run, fa_store_reset(f.folder, "a", &removed, &f.error) == FA_OK);
    CHECK(run, removed == 0);
    CHECK(run, put(&f, "c", 2) == FA_OK);
    CHECK(run, fa_store_reset(f.folder, NULL, &removed, &f.error) == FA_OK);
    CHECK(run, removed == 2 && get(&f) == FA_OK && f.count == 0);
    CHECK(run, scratch_count(f.folder, "note") == 1);
}

static void store_reset_goes_on_behind_a_file_that_fails(test_run *run)
{
    fixture f;
    size_t removed = 0;
    set_up(run, &f);
    CHECK(run, put(&f, "a", 1) == FA_OK);
    scratch_write(f.folder, "breakers-0000000000000000.txt", "bad", 3);
    scratch_write(f.folder, "breakers-ffffffffffffffff.txt", "bad", 3);
    for (const char *name = "0f"; *name != '\0'; name++) {
        char path[] = "breakers-xxxxxxxxxxxxxxxx.txt";
        memset(path + 9, *name, 16);
        chmod(scratch_path(f.folder, path), 0666);
    }
    CHECK(run, fa_store_reset(f.folder, NULL, &removed, &f.error) ==
                   FA_EUNSUPPORTED);
    CHECK_TEXT(run, f.error.text, "expected that others may not write it");
    CHECK(run, removed == 1 && get(&f) == FA_OK && f.count == 0);
}

/* -- writers at the same time ---------------------------------------------- */

enum { WRITERS = 8, KERNELS = 6 };

typedef struct writer {
    const char *folder;
    int number;
    bool good;
} writer;

static int write_some(void *context)
{
    writer *w = context;
    fa_error error;
    w->good = true;
    for (int i = 0; i < KERNELS; i++) {
        char kernel[32];
        snprintf(kernel, sizeof kernel, "kernel_%d_%d", w->number, i);
        const fa_store_entry e = entry_of(kernel, 1);
        w->good = w->good && fa_store_put(w->folder, device, &e, &error) == 0;
    }
    return w->good ? 0 : 1;
}

static void *write_in_thread(void *context)
{
    write_some(context);
    return NULL;
}

static void store_merges_processes_that_write_at_once(test_run *run)
{
    fixture f;
    int child[2];
    writer w[2];
    set_up(run, &f);
    for (int i = 0; i < 2; i++) {
        w[i] = (writer){.folder = f.folder, .number = i};
        child[i] = scratch_start(write_some, &w[i]);
    }
    for (int i = 0; i < 2; i++) {
        CHECK(run, scratch_wait(child[i]) == 0);
    }
    CHECK(run, get(&f) == FA_OK && f.count == 2 * KERNELS);
}

static void store_merges_threads_that_write_at_once(test_run *run)
{
    fixture f;
    pthread_t thread[WRITERS];
    writer w[WRITERS];
    set_up(run, &f);
    for (int i = 0; i < WRITERS; i++) {
        w[i] = (writer){.folder = f.folder, .number = i};
        if (pthread_create(&thread[i], NULL, write_in_thread, &w[i]) != 0) {
            abort();
        }
    }
    for (int i = 0; i < WRITERS; i++) {
        pthread_join(thread[i], NULL);
        CHECK(run, w[i].good);
    }
    CHECK(run, get(&f) == FA_OK && f.count == WRITERS * KERNELS);
}

static void store_waits_for_its_lock_with_a_bound(test_run *run)
{
    fixture f;
    struct timespec begin, end;
    set_up(run, &f);
    CHECK(run, put(&f, "fwd", 1) == FA_OK);
    int lock = open(scratch_path(f.folder, "breakers.lock"), O_RDWR);
    CHECK(run, flock(lock, LOCK_EX) == 0);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    CHECK(run, put(&f, "fwd", 2) == FA_EDEVICE);
    clock_gettime(CLOCK_MONOTONIC, &end);
    CHECK_TEXT(run, f.error.text, "breakers.lock: expected to get this lock");
    CHECK(run, end.tv_sec - begin.tv_sec >= 1);
    CHECK(run, end.tv_sec - begin.tv_sec <= 30);
    /* Readers do not wait. */
    CHECK(run, get(&f) == FA_OK && failures_of(&f, "fwd") == 1);
    close(lock);
    CHECK(run, put(&f, "fwd", 2) == FA_OK);
}

static int wait_to_be_killed(void *context)
{
    (void)context;
    while (pause() != 0) {
    }
    return 0;
}

static void fork_a_child(void *context)
{
    *(int *)context = scratch_start(wait_to_be_killed, NULL);
}

/* Its descriptor of the lock file stays open as long as it lives. */
static void store_lock_is_not_kept_by_a_child_forked_under_it(test_run *run)
{
    fixture f;
    int child = -1;
    set_up(run, &f);
    fault_set_before("renameat", 1, fork_a_child, &child);
    CHECK(run, put(&f, "fwd", 1) == FA_OK && fault_happened());
    CHECK(run, put(&f, "fwd", 2) == FA_OK);
    kill(child, SIGKILL);
    scratch_wait(child);
}

/* -- what is not trusted --------------------------------------------------- */

/* That no function reads or changes anything, and each says why. */
static void check_untrusted(test_run *run, fixture *f, const char *message)
{
    size_t number = 0;
    seen s = {0};
    const int names = scratch_count(f->folder, "");
    CHECK(run, get(f) == FA_EUNSUPPORTED && f->count == 0);
    CHECK_TEXT(run, f->error.text, message);
    CHECK(run, put(f, "fwd", 9) == FA_EUNSUPPORTED);
    CHECK_TEXT(run, f->error.text, message);
    CHECK(run, put(f, "fwd", 0) == FA_EUNSUPPORTED);
    CHECK(run, fa_store_reset(f->folder, NULL, &number, &f->error) ==
                   FA_EUNSUPPORTED);
    CHECK_TEXT(run, f->error.text, message);
    fa_status status = fa_store_list(f->folder, see, &s, &number, &f->error);
    CHECK(run, (status == FA_EUNSUPPORTED) != (number == 1));
    CHECK(run, s.count == 0);
    CHECK(run, scratch_count(f->folder, "") == names);
}

/* What is no file is not used, and `fa_store_reset` puts it aside as it is. */
static void check_put_aside(test_run *run, fixture *f, const char *message)
{
    size_t number = 0;
    struct stat before, after;
    CHECK(run, get(f) == FA_EUNSUPPORTED && f->count == 0);
    CHECK_TEXT(run, f->error.text, message);
    CHECK(run, put(f, "fwd", 9) == FA_EUNSUPPORTED);
    CHECK_TEXT(run, f->error.text, message);
    CHECK(run, lstat(scratch_path(f->folder, file_name), &before) == 0);
    CHECK(run, fa_store_reset(f->folder, NULL, &number, &f->error) == FA_OK);
    CHECK(run, number == 0 && get(f) == FA_OK && f->count == 0);
    CHECK(run, lstat(scratch_path(f->folder, bad_name), &after) == 0);
    CHECK(run, after.st_ino == before.st_ino);
    CHECK(run, lstat(scratch_path(f->folder, file_name), &before) != 0);
}

static void check_unchanged(test_run *run, fixture *f)
{
    CHECK(run, get(f) == FA_OK && f->count == 1);
    CHECK(run, failures_of(f, "fwd") == 1);
}

static void
store_leaves_folders_and_files_alone_that_others_write(test_run *run)
{
    static const mode_t modes[] = {0020, 0002, 0022};
    fixture f;
    set_up(run, &f);
    CHECK(run, put(&f, "fwd", 1) == FA_OK);
    for (int i = 0; i < 3; i++) {
        chmod(f.folder, 0700 | modes[i]);
        check_untrusted(run, &f, "expected that others may not write it, got");
        chmod(f.folder, 0755); /* reading is no matter */
        const char *file = scratch_path(f.folder, file_name);
        chmod(file, 0600 | modes[i]);
        check_untrusted(run, &f, "expected that others may not write it, got");
        chmod(file, 0644);
        check_unchanged(run, &f);
    }
    chmod(scratch_path(f.folder, "breakers.lock"), 0666);
    CHECK(run, put(&f, "fwd", 9) == FA_EUNSUPPORTED);
    CHECK_TEXT(run, f.error.text, "breakers.lock: expected that others");
    check_unchanged(run, &f);
}

static void store_follows_no_symbolic_link(test_run *run)
{
    fixture f, real;
    size_t number = 0;
    set_up(run, &f);
    set_up(run, &real);
    CHECK(run, put(&real, "fwd", 1) == FA_OK);
    CHECK(run, put(&f, "fwd", 1) == FA_OK);
    /* A file that is a link, to a good one and to none. */
    unlink(scratch_path(f.folder, file_name));
    CHECK(run, symlink(scratch_path(real.folder, file_name),
                       scratch_path(f.folder, file_name)) == 0);
    check_put_aside(run, &f, "expected a file, got a symbolic link");
    check_unchanged(run, &real);
    CHECK(run, symlink("/absent", scratch_path(f.folder, file_name)) == 0);
    check_put_aside(run, &f, "expected a file, got a symbolic link");
    /* The lock. */
    unlink(scratch_path(f.folder, "breakers.lock"));
    const char *target = scratch_path(real.folder, "made");
    CHECK(run, symlink(target, scratch_path(f.folder, "breakers.lock")) == 0);
    CHECK(run, put(&f, "fwd", 1) == FA_EUNSUPPORTED);
    CHECK(run,
          fa_store_reset(f.folder, NULL, &number, &f.error) == FA_EUNSUPPORTED);
    CHECK(run, scratch_count(real.folder, "made") == 0);
    unlink(scratch_path(f.folder, "breakers.lock"));
    /* The temporary file: the link goes, its target stays. */
    const char *temporary = scratch_path(f.folder, "replacement.tmp");
    CHECK(run, symlink(scratch_path(real.folder, file_name), temporary) == 0);
    CHECK(run, put(&f, "other", 1) == FA_OK);
    check_unchanged(run, &real);
    /* The folder, also with slashes behind it. */
    const size_t length = strlen(f.folder);
    snprintf(f.folder + length, sizeof f.folder - length, "/link");
    CHECK(run, symlink(real.folder, f.folder) == 0);
    check_untrusted(run, &f, "expected a folder, got a file or symbolic link");
    strcat(f.folder, "//");
    check_untrusted(run, &f, "expected a folder, got a file or symbolic link");
    check_unchanged(run, &real);
}

static void store_reads_nothing_but_files(test_run *run)
{
    fixture f;
    set_up(run, &f);
    CHECK(run, put(&f, "fwd", 0) == FA_OK); /* the lock file */
    CHECK(run, mkdir(scratch_path(f.folder, file_name), 0700) == 0);
    scratch_write(f.folder, bad_name, "", 0); /* an earlier one */
    check_put_aside(run, &f, "expected a file, got something else");
    CHECK(run, rmdir(scratch_path(f.folder, bad_name)) == 0);
    CHECK(run, mkfifo(scratch_path(f.folder, file_name), 0600) == 0);
    check_put_aside(run, &f, "expected a file, got something else");
    scratch_write(f.folder, "file", "", 0);
    const size_t length = strlen(f.folder);
    snprintf(f.folder + length, sizeof f.folder - length, "/file");
    check_untrusted(run, &f, "expected a folder, got a file");
    strcat(f.folder, "/below");
    check_untrusted(run, &f, "expected a folder, got a file");
}

static void store_leaves_alone_what_another_user_owns(test_run *run)
{
    fixture f;
    set_up(run, &f);
    if (geteuid() != 0) {
        test_skip(run, "only root can give files away:",
                  "store_leaves_alone_what_another_user_owns");
        return;
    }
    CHECK(run, put(&f, "fwd", 1) == FA_OK);
    CHECK(run, chown(f.folder, 65534, 0) == 0);
    check_untrusted(run, &f, "expected user 0 as its owner, got user 65534");
    CHECK(run, chown(f.folder, 0, 0) == 0);
    CHECK(run, chown(scratch_path(f.folder, file_name), 65534, 0) == 0);
    check_untrusted(run, &f, "expected user 0 as its owner, got user 65534");
    CHECK(run, chown(scratch_path(f.folder, file_name), 0, 0) == 0);
    check_unchanged(run, &f);
}

/* -- what the system refuses ----------------------------------------------- */

typedef struct operation {
    const char *name;
    fa_status (*run)(fixture *f);
    bool bad;         /* starts from a damaged file */
    uint32_t a, b, c; /* failures of three kernels afterwards */
} operation;

static fa_status put_new(fixture *f)
{
    return put(f, "c", 3);
}

static fa_status put_again(fixture *f)
{
    return put(f, "a", 7);
}

static fa_status remove_one(fixture *f)
{
    return put(f, "a", 0);
}

static fa_status reset_all(fixture *f)
{
    size_t removed = 0;
    return fa_store_reset(f->folder, NULL, &removed, &f->error);
}

static fa_status reset_one(fixture *f)
{
    size_t removed = 0;
    return fa_store_reset(f->folder, "b", &removed, &f->error);
}

static fa_status list_all(fixture *f)
{
    seen s = {0};
    size_t unreadable = 0;
    fa_status status =
        fa_store_list(f->folder, see, &s, &unreadable, &f->error);
    if (status == FA_OK && s.count != 2 && unreadable != 1) {
        return fa_fail(&f->error, FA_EDEVICE, "neither listed nor counted");
    }
    return status;
}

static const operation operations[] = {
    {"put new", put_new, false, 1, 2, 3},
    {"put again", put_again, false, 7, 2, 0},
    {"remove", remove_one, false, 0, 2, 0},
    {"reset", reset_all, false, 0, 0, 0},
    {"reset one", reset_one, false, 1, 0, 0},
    {"list", list_all, false, 1, 2, 0},
    {"read", get, false, 1, 2, 0},
    {"read bad", get, true, 0, 0, 0},
    {"put bad", put_new, true, 0, 0, 3},
    {"reset bad", reset_all, true, 0, 0, 0},
};

static bool are(const fixture *f, uint32_t a, uint32_t b, uint32_t c)
{
    return failures_of(f, "a") == a && failures_of(f, "b") == b &&
           failures_of(f, "c") == c;
}

/* The nth call of the system fails: the operation did its work all the same,
 * or says so and what was there is there, or what it should have become. */
static bool run_with_fault(test_run *run, const operation *o, int nth,
                           int error)
{
    fixture f;
    set_up(run, &f);
    CHECK(run, put(&f, "a", 1) == FA_OK && put(&f, "b", 2) == FA_OK);
    if (o->bad) {
        scratch_write(f.folder, file_name, "bad", 3);
    }
    const int open_before = scratch_descriptors();
    snprintf(f.error.text, sizeof f.error.text, "untouched");
    fault_set(NULL, nth, error);
    fa_status status = o->run(&f);
    const bool happened = fault_happened();
    const bool said = strcmp(f.error.text, "untouched") != 0;
    bool good = scratch_descriptors() == open_before;
    good = good && scratch_count(f.folder, ".tmp") == 0;
    good = good && said == (status != FA_OK);
    if (!happened) {
        const bool told = o->run == get && o->bad;
        good = good && status == (told ? FA_EINVAL : FA_OK);
    }
    const bool failed = status != FA_OK;
    status = get(&f);
    const bool old = !o->bad && are(&f, 1, 2, 0);
    const bool none = o->bad && f.count == 0;
    good = good && (status == FA_OK || (o->bad && status == FA_EINVAL));
    good = good && (are(&f, o->a, o->b, o->c) || (failed && (old || none)));
    good = good && put(&f, "later", 1) == FA_OK;
    good = good && get(&f) == FA_OK && failures_of(&f, "later") == 1;
    if (!good) {
        printf("%s, call %d: %s\n", o->name, nth, f.error.text);
    }
    CHECK(run, good);
    return happened;
}

static void store_survives_each_call_of_the_system_that_fails(test_run *run)
{
    const int count = (int)(sizeof operations / sizeof *operations);
    for (int i = 0; i < count; i++) {
        int nth = 1;
        while (run_with_fault(run, &operations[i], nth, ENOSPC)) {
            nth++;
        }
        CHECK(run, nth > 5); /* the calls are counted at all */
    }
}

static void store_says_what_the_system_refused(test_run *run)
{
    static const struct {
        const char *call;
        int nth;
        const char *message;
    } cases[] = {
        {"calloc", 1, "breakers: out of memory"},
        {"open", 1, "to open this folder, got: No space"},
        {"fstat", 1, "to see its owner and mode, got: No space"},
        {"flock", 1, "breakers.lock: expected to get this lock, got: No space"},
        {"openat", 2, ".txt: expected to open it, got: No space"},
        {"pread", 1, ".txt: expected to read it, got: No space"},
        {"openat", 3, "replacement.tmp: expected to open it, got: No space"},
        {"write", 1, "replacement.tmp: expected to write it, got: No space"},
        {"fsync", 1, "replacement.tmp: expected to bring it to the disk"},
        {"renameat", 1, ".txt: expected to replace it, got: No space"},
        {"fsync", 2, ".txt: expected to bring its folder to the disk"},
    };
    fixture f;
    set_up(run, &f);
    CHECK(run, put(&f, "fwd", 1) == FA_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fault_set(cases[i].call, cases[i].nth, ENOSPC);
        CHECK(run, put(&f, "fwd", 2) != FA_OK);
        CHECK(run, fault_happened());
        CHECK_TEXT(run, f.error.text, cases[i].message);
    }
    const size_t length = strlen(f.folder);
    snprintf(f.folder + length, sizeof f.folder - length, "/a/b");
    fault_set("mkdir", 1, EROFS);
    CHECK(run, put(&f, "fwd", 2) == FA_EDEVICE && fault_happened());
    CHECK_TEXT(run, f.error.text, "to make this folder, got: Read-only");
}

/* Runs in a child, whose limits and user are its own. */
static int put_beyond_the_file_size(void *context)
{
    fixture *f = context;
    const struct rlimit limit = {100, 100};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    return put(f, "fwd", 2) == FA_EDEVICE &&
                   strstr(f->error.text, "File too large") != NULL
               ? 0
               : 1;
}

static int put_without_descriptors(void *context)
{
    fixture *f = context;
    bool good = true;
    for (rlim_t spare = 0; spare < 3; spare++) {
        const rlim_t used = (rlim_t)dup(0);
        const struct rlimit limit = {used + spare, 100 + used};
        close((int)used);
        setrlimit(RLIMIT_NOFILE, &limit);
        good = good && put(f, "fwd", 2) == FA_EDEVICE &&
               strstr(f->error.text, "Too many open files") != NULL;
    }
    return good ? 0 : 1;
}

static int put_into_a_read_only_folder(void *context)
{
    fixture *f = context;
    scratch_drop_root(f->folder);
    bool good = put(f, "fwd", 1) == FA_OK && chmod(f->folder, 0500) == 0;
    good = good && put(f, "fwd", 2) == FA_EDEVICE &&
           strstr(f->error.text, "Permission denied") != NULL;
    good = good && get(f) == FA_OK && failures_of(f, "fwd") == 1;
    /* A bad file stays where it is. */
    scratch_write(f->folder, file_name, "bad", 3);
    good = good && get(f) == FA_EINVAL && f->count == 0;
    good = good && scratch_count(f->folder, ".bad") == 0;
    return good ? 0 : 1;
}

static void store_reports_limits_of_size_and_descriptors(test_run *run)
{
    fixture f;
    set_up(run, &f);
    CHECK(run, put(&f, "fwd", 1) == FA_OK);
    CHECK(run, scratch_child(put_beyond_the_file_size, &f) == 0);
    CHECK(run, scratch_child(put_without_descriptors, &f) == 0);
    CHECK(run, scratch_count(f.folder, ".tmp") == 0);
    check_unchanged(run, &f);
}

static void store_reports_a_read_only_folder(test_run *run)
{
    fixture f;
    set_up(run, &f);
    if (geteuid() == 0) {
        /* Another user must get to it. */
        snprintf(f.folder, sizeof f.folder, "%s/storeXXXXXX", P_tmpdir);
        if (mkdtemp(f.folder) == NULL) {
            abort();
        }
    }
    CHECK(run, scratch_child(put_into_a_read_only_folder, &f) == 0);
    if (geteuid() == 0) {
        unlink(scratch_path(f.folder, file_name));
        unlink(scratch_path(f.folder, "breakers.lock"));
        rmdir(f.folder);
    }
}

static void store_cannot_replace_a_folder_in_its_way(test_run *run)
{
    fixture f;
    set_up(run, &f);
    CHECK(run, put(&f, "fwd", 1) == FA_OK);
    CHECK(run, mkdir(scratch_path(f.folder, "replacement.tmp"), 0700) == 0);
    CHECK(run, put(&f, "fwd", 2) == FA_EDEVICE);
    CHECK_TEXT(run, f.error.text, "replacement.tmp: expected to open it");
    check_unchanged(run, &f);
}

void test_store(test_run *run)
{
    RUN(run, store_gives_back_what_was_put);
    RUN(run, store_makes_private_folders_and_files);
    RUN(run, store_replaces_and_removes_one_entry_alone);
    RUN(run, store_keeps_devices_apart);
    RUN(run, store_text_is_as_documented);
    RUN(run, store_writes_causes_as_one_printable_line);
    RUN(run, store_refuses_arguments_by_name);
    RUN(run, store_refuses_more_kernels_than_it_holds);
    RUN(run, store_lists_all_devices);
    RUN(run, store_reset_removes_a_kernel_or_all_and_repairs);
    RUN(run, store_reset_goes_on_behind_a_file_that_fails);
    RUN(run, store_merges_processes_that_write_at_once);
    RUN(run, store_merges_threads_that_write_at_once);
    RUN(run, store_waits_for_its_lock_with_a_bound);
    RUN(run, store_lock_is_not_kept_by_a_child_forked_under_it);
    RUN(run, store_leaves_folders_and_files_alone_that_others_write);
    RUN(run, store_follows_no_symbolic_link);
    RUN(run, store_reads_nothing_but_files);
    RUN(run, store_leaves_alone_what_another_user_owns);
    RUN(run, store_survives_each_call_of_the_system_that_fails);
    RUN(run, store_says_what_the_system_refused);
    RUN(run, store_reports_limits_of_size_and_descriptors);
    RUN(run, store_reports_a_read_only_folder);
    RUN(run, store_cannot_replace_a_folder_in_its_way);
}
