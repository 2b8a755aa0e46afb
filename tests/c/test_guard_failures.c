/* test_guard_failures.c: the guard where a launch, a device or an event fails,
 * and inside a graph capture.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fa_backend gpus[] = {FA_HIP, FA_STANDIN};

/* -- failures -------------------------------------------------------------- */

static void guard_blames_the_kernel_that_failed_alone(test_run *run)
{
    for (int sync = 0; sync < 2; sync++) {
        for (int step = 0; step < 4; step++) {
            rig *r = rig_open(run, FA_HIP,
                              sync ? FA_GUARD_SYNC : FA_GUARD_ASYNC, true);
            r->fake->failing_call = "hipModuleLaunchKernel";
            r->fake->failing_after = step;
            r->fake->code = 719;
            CHECK(run, rig_backward(r, r->call) == FA_EDEVICE);
            CHECK(run, r->fake->launches == step + 1);
            for (int i = 0; i < r->call->plan.count; i++) {
                fa_store_entry entry = {.failures = 0};
                const char *kernel = rig_step(r, i);
                const bool failed = strcmp(kernel, rig_step(r, step)) == 0;
                CHECK(run, rig_state(r, kernel, &entry) ==
                               (failed ? FA_BREAKER_OPEN : FA_BREAKER_CLOSED));
                CHECK(run, !failed || strncmp(entry.cause,
                                              "launch failed: ", 15) == 0);
            }
            CHECK(run, rig_slots(r, RIG_FLYING) == 0);
            CHECK(run, rig_counts(r).outstanding == 0);
            CHECK(run, rig_counts(r).misses == 0);
            rig_close(r);
        }
    }
}

/* What was launched before may still run when the caller frees its memory. */
static void guard_sync_failure_orders_the_callers_stream(test_run *run)
{
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, false);
    r->fake->failing_call = "hipModuleLaunchKernel";
    r->fake->failing_after = 1;
    r->fake->code = 719;
    CHECK(run, rig_backward(r, r->call) == FA_EDEVICE);
    const fake_op *op = r->fake->op;
    CHECK(run, r->fake->ops == 6);
    CHECK(run,
          rig_is_op(r, 3, FAKE_LAUNCH, op[1].stream)); /* the one that fails */
    CHECK(run, rig_is_op(r, 4, FAKE_RECORD, op[1].stream));
    CHECK(run,
          rig_is_op(r, 5, FAKE_WAIT, &r->stream) && op[5].event == op[4].event);
    rig_close(r);
}

static void guard_once_is_never_answered_otherwise(test_run *run)
{
    static const fa_guard_mode modes[] = {FA_GUARD_OFF, FA_GUARD_ASYNC,
                                          FA_GUARD_SYNC};
    for (size_t i = 0; i < 3; i++) {
        rig *r = rig_open(run, FA_HIP, modes[i], false);
        r->call->target.once = true;
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        r->fake->failing_call = "hipModuleLaunchKernel";
        r->fake->code = 719;
        CHECK(run, rig_forward(r, r->call) == FA_EONCE);
        CHECK_TEXT(run, r->call->error.text, "hipErrorLaunchFailure");
        rig_close(r);
    }
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, false);
    r->call->target.once = true;
    r->fake->hanging = rig_forward_kernel();
    CHECK(run, rig_forward(r, r->call) == FA_EONCE);
    CHECK(run, r->call->counts.late != NULL);
    fa_guard_keep(r->guard, r->call->counts.late, NULL, 0, NULL);
    /* Not begun: may well be answered otherwise. */
    CHECK(run, rig_forward(r, r->call) == FA_EOPEN);
    rig_close(r);
}

/* The device fails under a query, or cannot be entered. */
static void guard_async_device_that_fails_opens(test_run *run)
{
    static const char *const calls[] = {"hipEventQuery", "hipGetDevice"};
    for (size_t i = 0; i < 2; i++) {
        fa_store_entry entry = {.failures = 0};
        rig *r = rig_open(run, FA_HIP, FA_GUARD_ASYNC, true);
        r->fake->hangs = true;
        r->fake->code = 719;
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        r->fake->failing_call = calls[i];
        CHECK(run, rig_waits_until_over(r));
        CHECK(run,
              rig_state(r, rig_forward_kernel(), &entry) == FA_BREAKER_OPEN);
        CHECK_TEXT(run, entry.cause, "the device failed while it ran: ");
        CHECK(run, rig_counts(r).misses == 0 && rig_slots(r, RIG_FLYING) == 0);
        CHECK(run, rig_latency_calls(r, rig_forward_kernel()) == 0);
        rig_close(r);
    }
}

/* Which of the kernels it was cannot be known. */
static void guard_sync_device_that_fails_opens_the_main_kernels(test_run *run)
{
    static const char *const calls[] = {"hipEventQuery", "hipEventQuery",
                                        "hipEventRecord", "hipStreamWaitEvent"};
    static const int after[] = {0, 1, 1, 1};
    for (size_t i = 0; i < 4; i++) {
        rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, true);
        r->fake->code = 719;
        r->fake->failing_after = after[i];
        r->fake->failing_call = calls[i];
        CHECK(run, rig_backward(r, r->call) == FA_EDEVICE);
        CHECK_TEXT(run, r->call->error.text, ": error 719");
        for (int k = 0; k < r->call->plan.count; k++) {
            const bool is_main = fa_step_is_main(&r->call->plan.step[k]);
            CHECK(run, rig_state(r, rig_step(r, k), NULL) ==
                           (is_main ? FA_BREAKER_OPEN : FA_BREAKER_CLOSED));
        }
        CHECK(run,
              r->call->counts.late == NULL && rig_slots(r, RIG_FLYING) == 0);
        rig_close(r);
    }
}

static void guard_counts_a_lost_call_that_was_late_once(test_run *run)
{
    char text[1024];
    fa_store_entry entry = {.failures = 0};
    rig *r = rig_open(run, FA_HIP, FA_GUARD_ASYNC, false);
    const int hidden = rig_hide_stderr(r);
    r->fake->hanging = rig_forward_kernel();
    r->fake->code = 719;
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    CHECK(run, rig_waits_for_misses(r, 1));
    rig_show_stderr(r, hidden, text, sizeof text);
    r->fake->failing_call = "hipEventQuery";
    CHECK(run, rig_waits_until_over(r));
    CHECK(run, rig_state(r, rig_forward_kernel(), &entry) == FA_BREAKER_OPEN);
    CHECK(run, entry.failures == 1);
    rig_close(r);
}

/* -- not watched ----------------------------------------------------------- */

static void guard_without_events_the_call_runs_unwatched(test_run *run)
{
    static const struct {
        const char *call;
        int after;
        bool sync;
    } cases[] = {
        {"hipEventCreateWithFlags", 0, false},
        {"hipEventCreateWithFlags", 1, false},
        {"hipEventRecord", 0, false},
        {"hipEventRecord", 1, false},
        {"hipEventCreateWithFlags", 1, true},
        {"hipStreamCreateWithFlags", 0, true},
        {"hipEventRecord", 0, true},
        {"hipStreamWaitEvent", 0, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        rig *r = rig_open(run, FA_HIP,
                          cases[i].sync ? FA_GUARD_SYNC : FA_GUARD_ASYNC, true);
        r->fake->code = 2;
        r->fake->failing_after = cases[i].after;
        r->fake->failing_call = cases[i].call;
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        CHECK(run, r->fake->failing_call == NULL && r->fake->launches == 1);
        CHECK(run, r->fake->launch[0].stream == &r->stream);
        CHECK(run, rig_counts(r).unwatched == 1);
        CHECK(run,
              rig_counts(r).outstanding == 0 && rig_slots(r, RIG_FLYING) == 0);
        /* Nobody knows how long it took. */
        CHECK(run, rig_latency_calls(r, rig_forward_kernel()) == 0);
        rig_close(r);
    }
}

/* Nobody knows that it ran. */
static void guard_unwatched_call_settles_no_breaker(test_run *run)
{
    rig *r = rig_open(run, FA_HIP, FA_GUARD_ASYNC, false);
    CHECK(run, rig_forward(r, r->call) == FA_OK && rig_waits_until_over(r));
    for (int after = 0; after < 2; after++) {
        rig_trip(r, rig_forward_kernel(), 0);
        r->fake->code = 2;
        r->fake->failing_after = after;
        r->fake->failing_call = "hipEventRecord";
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        CHECK(run, rig_state(r, rig_forward_kernel(), NULL) == FA_BREAKER_OPEN);
    }
    CHECK(run, rig_counts(r).unwatched == 2);
    CHECK(run, rig_forward(r, r->call) == FA_OK && rig_waits_until_over(r));
    CHECK(run, rig_state(r, rig_forward_kernel(), NULL) == FA_BREAKER_CLOSED);
    rig_close(r);
}

static void guard_capture_is_left_alone(test_run *run)
{
    for (size_t i = 0; i < 2; i++) {
        for (int mode = FA_GUARD_ASYNC; mode <= FA_GUARD_SYNC; mode++) {
            rig *r = rig_open(run, gpus[i], (fa_guard_mode)mode, true);
            r->fake->capturing = true;
            CHECK(run, rig_forward(r, r->call) == FA_OK);
            CHECK(run, r->fake->ops == 1 && r->fake->events == 0);
            CHECK(run, rig_is_op(r, 0, FAKE_LAUNCH, &r->stream));
            CHECK(run, rig_counts(r).captured == 1);
            CHECK(run, rig_counts(r).unwatched == 0);
            CHECK(run, rig_slots(r, RIG_FLYING) == 0);
            /* What a capture forbids is not the kernel's fault. */
            r->fake->code = 900;
            r->fake->failing_call =
                i == 0 ? "hipModuleLaunchKernel" : "cuLaunchKernel";
            CHECK(run, rig_forward(r, r->call) == FA_EDEVICE);
            CHECK(run, rig_state(r, rig_forward_kernel(), NULL) ==
                           FA_BREAKER_CLOSED);
            rig_trip(r, rig_forward_kernel(), 0);
            CHECK(run, rig_forward(r, r->call) == FA_EOPEN);
            CHECK_TEXT(run, r->call->error.text, "inside a graph capture");
            CHECK(run,
                  rig_state(r, rig_forward_kernel(), NULL) == FA_BREAKER_OPEN);
            r->fake->capturing = false;
            CHECK(run, rig_forward(r, r->call) == FA_OK);
            CHECK(run, rig_waits_until_over(r));
            CHECK(run, rig_state(r, rig_forward_kernel(), NULL) ==
                           FA_BREAKER_CLOSED);
            rig_close(r);
        }
    }
}

/* What cannot be asked counts as a capture. */
static void guard_doubtful_capture_is_left_alone(test_run *run)
{
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, false);
    r->fake->code = 906;
    r->fake->failing_call = "hipStreamIsCapturing";
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    CHECK(run, rig_counts(r).captured == 1 && r->fake->ops == 1);
    rig_close(r);
}

static void guard_names_what_a_device_does_not_tell(test_run *run)
{
    static const char *const calls[] = {
        "hipDeviceGetPCIBusId", "hipDriverGetVersion", "hipRuntimeGetVersion"};
    for (size_t i = 0; i < 3; i++) {
        rig *r = rig_open(run, FA_HIP, FA_GUARD_ASYNC, false);
        r->fake->code = 101;
        r->fake->failing_call = calls[i];
        CHECK(run, rig_forward(r, r->call) == FA_EDEVICE);
        CHECK_TEXT(run, r->call->error.text, "device: ");
        CHECK(run, r->fake->launches == 0);
        CHECK(run, rig_forward(r, r->call) == FA_OK); /* not remembered */
        rig_close(r);
    }
}

void test_guard_failures(test_run *run)
{
    RUN(run, guard_blames_the_kernel_that_failed_alone);
    RUN(run, guard_sync_failure_orders_the_callers_stream);
    RUN(run, guard_once_is_never_answered_otherwise);
    RUN(run, guard_async_device_that_fails_opens);
    RUN(run, guard_sync_device_that_fails_opens_the_main_kernels);
    RUN(run, guard_counts_a_lost_call_that_was_late_once);
    RUN(run, guard_without_events_the_call_runs_unwatched);
    RUN(run, guard_unwatched_call_settles_no_breaker);
    RUN(run, guard_capture_is_left_alone);
    RUN(run, guard_doubtful_capture_is_left_alone);
    RUN(run, guard_names_what_a_device_does_not_tell);
}
