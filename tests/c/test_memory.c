/* test_memory.c: out of memory at any allocation from the first to the last of
 * a program: a clean error or an unwatched call, and nothing leaked.
 *
 * Under AddressSanitizer leaks of the host layer are failures of the run.
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "faults.h"
#include "rig.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALLOCATIONS_AT_LEAST = 12 };

static int kept;

static void let_go(void *thing)
{
    (void)thing;
    kept--;
}

/* What a call may end in, here. */
static bool is_clean(fa_status status, const fa_error *error)
{
    return status == FA_OK || (status == FA_ENOMEM &&
                               strstr(error->text, "out of memory") != NULL);
}

/* A program's life: open all, forward and backward, a call that is late, and
 * close all. */
static void live(test_run *run, rig *r, fa_guard_mode first)
{
    fa_error error = {""};
    rig_call *c = r->call;
    fa_status status = FA_ENOMEM;
    void *thing = &kept;
    for (int i = 0; i < 2 && status != FA_OK; i++) {
        status = fa_runtime_open(run->scratch, "", &r->runtime, &error);
        CHECK(run, is_clean(status, &error));
        CHECK(run, (status == FA_OK) == (r->runtime != NULL));
    }
    status = FA_ENOMEM;
    for (int i = 0; i < 2 && status != FA_OK; i++) {
        status = fa_guard_open(&r->policy, &r->guard, &error);
        CHECK(run, is_clean(status, &error));
        CHECK(run, (status == FA_OK) == (r->guard != NULL));
    }
    c->target.guard = r->guard;
    for (int mode = first; mode <= FA_GUARD_SYNC; mode++) {
        rig_set_mode(r, (fa_guard_mode)mode);
        for (int i = 0; i < 2; i++) {
            status = rig_forward(r, c);
            CHECK(run, is_clean(status, &c->error));
            status = rig_backward(r, c);
            CHECK(run, is_clean(status, &c->error));
        }
    }
    r->fake->hanging = rig_forward_kernel();
    status = rig_forward(r, c);
    r->fake->hanging = NULL;
    if (status == FA_ELATE) { /* else it was not watched */
        kept++;
        fa_guard_keep(r->guard, c->counts.late, &thing, 1, let_go);
    } else {
        CHECK(run, is_clean(status, &c->error));
    }
    r->fake->hangs = false;
    status = rig_backward(r, c); /* starts the thread, if none could be */
    CHECK(run, is_clean(status, &c->error) || status == FA_EOPEN);
    rig_set_mode(r, FA_GUARD_ASYNC);
    CHECK(run, rig_backward(r, c) == FA_OK);
}

static void check_lives(test_run *run, fa_guard_mode first)
{
    bool happened = true;
    int nth = 0;
    while (happened) {
        rig *r = rig_open(run, FA_HIP, FA_GUARD_ASYNC, true);
        char text[64];
        const int hidden = rig_hide_stderr(r);
        const int descriptors = scratch_descriptors();
        fa_guard_close(r->guard);
        fa_runtime_close(r->runtime);
        r->guard = NULL;
        r->runtime = NULL;
        kept = 0;
        fault_set("memory", ++nth, ENOMEM);
        live(run, r, first);
        happened = fault_happened();
        CHECK(run, rig_waits_until_over(r));
        /* Without memory for the list it stays for good, and is counted. */
        CHECK(run, kept == (int)rig_counts(r).quarantined);
        CHECK(run, kept == 0 || happened);
        fa_guard_close(r->guard);
        r->guard = NULL;
        CHECK(run, scratch_descriptors() == descriptors);
        rig_show_stderr(r, hidden, text, sizeof text);
        CHECK(run, scratch_count(r->folder, "flight-") == 0);
        CHECK(run, r->fake->events == 0 && r->fake->streams == 0);
        CHECK(run, r->fake->loads > r->fake->unloads);
        fa_runtime_close(r->runtime);
        CHECK(run, r->fake->loads == r->fake->unloads);
        dlclose(r->library);
        free(r->call);
        free(r);
    }
    CHECK(run, nth > ALLOCATIONS_AT_LEAST);
}

static void memory_may_run_out_anywhere(test_run *run)
{
    check_lives(run, FA_GUARD_ASYNC);
    check_lives(run, FA_GUARD_SYNC); /* the late call starts the thread */
}

void test_memory(test_run *run)
{
    RUN(run, memory_may_run_out_anywhere);
}
