/* test_guard.c: one call after the other through the guard: in time, late, and
 * what its breakers say.  What fails: test_guard_failures.c; of processes:
 * test_guard_life.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "rig.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fa_backend gpus[] = {FA_HIP, FA_STANDIN};

enum { HANG_MS = 5 * RIG_DEADLINE_MS };

/* -- in time --------------------------------------------------------------- */

static void guard_async_watches_from_beside_the_caller(test_run *run)
{
    for (size_t i = 0; i < 2; i++) {
        rig *r = rig_open(run, gpus[i], FA_GUARD_ASYNC, true);
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        CHECK(run, r->fake->ops == 3);
        CHECK(run, rig_is_op(r, 0, FAKE_RECORD, &r->stream));
        CHECK(run, rig_is_op(r, 1, FAKE_LAUNCH, &r->stream));
        CHECK(run, rig_is_op(r, 2, FAKE_RECORD, &r->stream));
        CHECK(run, r->fake->op[0].event != r->fake->op[2].event);
        CHECK(run, rig_waits_until_over(r));
        CHECK(run, rig_latency_calls(r, rig_forward_kernel()) == 1);
        CHECK(run, r->fake->relaxed == 1); /* the thread, once */
        CHECK(run, rig_slots(r, RIG_FLYING) == 0);
        CHECK(run, r->fake->streams == 0 && r->fake->events == 2);
        /* The events are used again. */
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        CHECK(run, rig_waits_until_over(r));
        CHECK(run, r->fake->events == 2);
        CHECK(run, rig_counts(r).misses == 0 && rig_counts(r).unwatched == 0);
        rig_close(r);
    }
}

static void guard_sync_runs_on_a_stream_of_its_own(test_run *run)
{
    for (size_t i = 0; i < 2; i++) {
        rig *r = rig_open(run, gpus[i], FA_GUARD_SYNC, true);
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        CHECK(run, r->fake->ops == 5 && r->fake->streams == 1);
        const void *own = r->fake->op[1].stream;
        const fake_op *op = r->fake->op;
        CHECK(run, own != &r->stream && own != NULL);
        CHECK(run, rig_is_op(r, 0, FAKE_RECORD, &r->stream));
        CHECK(run,
              rig_is_op(r, 1, FAKE_WAIT, own) && op[1].event == op[0].event);
        CHECK(run, rig_is_op(r, 2, FAKE_LAUNCH, own));
        CHECK(run, rig_is_op(r, 3, FAKE_RECORD, own));
        CHECK(run, rig_is_op(r, 4, FAKE_WAIT, &r->stream) &&
                       op[4].event == op[3].event);
        CHECK(run, rig_latency_calls(r, rig_forward_kernel()) == 1);
        CHECK(run,
              rig_counts(r).outstanding == 0 && rig_slots(r, RIG_FLYING) == 0);
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        CHECK(run, r->fake->streams == 1 && r->fake->events == 2);
        rig_close(r);
    }
}

static void guard_off_leaves_calls_alone(test_run *run)
{
    rig *r = rig_open(run, FA_HIP, FA_GUARD_OFF, true);
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    CHECK(run, r->fake->ops == 1 && r->fake->events == 0);
    CHECK(run, scratch_count(r->folder, "") == 0);
    rig_close(r);
}

static void guard_counts_a_call_by_its_first_main_kernel(test_run *run)
{
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, false);
    CHECK(run, rig_backward(r, r->call) == FA_OK);
    CHECK(run, r->call->plan.count >= 3);
    CHECK(run, !fa_step_is_main(&r->call->plan.step[0]));
    CHECK(run, rig_latency_calls(r, rig_step(r, 0)) == 0);
    CHECK(run, rig_latency_calls(r, rig_step(r, 1)) == 1);
    CHECK(run, rig_latency_calls(r, rig_step(r, 2)) == 0);
    rig_close(r);
}

/* -- late ------------------------------------------------------------------ */

static void guard_async_late_opens_and_says_so_once(test_run *run)
{
    char text[1024];
    fa_store_entry entry = {.failures = 0};
    rig *r = rig_open(run, FA_HIP, FA_GUARD_ASYNC, true);
    const int hidden = rig_hide_stderr(r);
    r->policy.floor_ns = 300000000; /* to look at the file before it is late */
    fa_guard_set(r->guard, &r->policy);
    r->fake->hanging = rig_forward_kernel();
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    CHECK(run, rig_slots(r, RIG_FLYING) == 1);
    CHECK(run, rig_waits_for_misses(r, 1));
    CHECK(run, rig_slots(r, RIG_LATE) == 1 && rig_slots(r, RIG_FLYING) == 0);
    rig_sleep_ms(10); /* a second look or two */
    rig_show_stderr(r, hidden, text, sizeof text);
    CHECK(run, strncmp(text, "flash_attn_rocm: fa_fwd_f16_d64_plain on hip:0 ",
                       47) == 0);
    CHECK_TEXT(run, text, "missed its deadline of 300 ms: not over after ");
    CHECK_TEXT(run, text,
               "(batch 1, heads 2 and 1, lengths 4 and 4, head "
               "dims 64 and 64)\n");
    CHECK(run, strchr(text, '\n') == text + strlen(text) - 1);
    CHECK(run, rig_state(r, rig_forward_kernel(), &entry) == FA_BREAKER_OPEN);
    CHECK(run, entry.failures == 1);
    CHECK(run, rig_counts(r).misses == 1 && rig_counts(r).outstanding == 1);
    const int launches = r->fake->launches;
    CHECK(run, rig_forward(r, r->call) == FA_EOPEN);
    CHECK_TEXT(run, r->call->error.text, "breaker open after 1 failure: ");
    CHECK(run, r->fake->launches == launches);
    r->fake->hanging = NULL;
    r->fake->hangs = false;
    CHECK(run, rig_waits_until_over(r));
    CHECK(run, rig_state(r, rig_forward_kernel(), &entry) == FA_BREAKER_OPEN);
    CHECK(run, entry.failures == 1 && rig_counts(r).misses == 1);
    CHECK(run, rig_latency_calls(r, rig_forward_kernel()) == 0);
    CHECK(run, rig_slots(r, RIG_LATE) == 0);
    rig_close(r);
}

static atomic_int reports[2]; /* fatal ones are the second */

static void count_report(const char *text, bool fatal)
{
    const char *end = strrchr(text, ')');
    if (strncmp(text, "fa_fwd_f16_d64_plain on hip:0 missed its deadline",
                49) == 0 &&
        end != NULL && end[1] == '\0') {
        atomic_fetch_add(&reports[fatal], 1);
    }
}

/* Whether the process ends is up to who is told, and there may be nobody. */
static void guard_tells_who_opened_it_and_nobody_else(test_run *run)
{
    char text[256];
    fa_guard_report *const reporters[] = {count_report, count_report, NULL};
    for (int i = 0; i < 3; i++) {
        rig *r = rig_open(run, FA_HIP, FA_GUARD_ASYNC, true);
        atomic_store(&reports[0], 0);
        atomic_store(&reports[1], 0);
        r->policy.abort_on_hang = i > 0;
        r->policy.report = reporters[i];
        rig_again(r);
        const int hidden = rig_hide_stderr(r);
        r->fake->hanging = rig_forward_kernel();
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        CHECK(run, rig_waits_for_misses(r, 1));
        r->fake->hanging = NULL;
        r->fake->hangs = false;
        CHECK(run, rig_waits_until_over(r));
        rig_show_stderr(r, hidden, text, sizeof text);
        CHECK(run, text[0] == '\0');
        CHECK(run, atomic_load(&reports[0]) == (i == 0));
        CHECK(run, atomic_load(&reports[1]) == (i == 1));
        rig_close(r);
    }
}

static atomic_int released[2];

static void release(void *thing)
{
    atomic_fetch_add((atomic_int *)thing, 1);
}

static void guard_sync_late_keeps_memory_until_it_is_over(test_run *run)
{
    void *things[] = {&released[0], &released[1]};
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, true);
    rig_call *c = r->call;
    released[0] = released[1] = 0;
    r->fake->hanging = rig_forward_kernel();
    CHECK(run, rig_forward(r, c) == FA_ELATE);
    CHECK_TEXT(run, c->error.text, "fa_fwd_f16_d64_plain: missed its deadline");
    CHECK(run, c->counts.late != NULL);
    CHECK(run, r->fake->waits == 1); /* the caller's stream is free */
    CHECK(run, rig_counts(r).misses == 1 && rig_slots(r, RIG_LATE) == 1);
    CHECK(run, rig_state(r, rig_forward_kernel(), NULL) == FA_BREAKER_OPEN);
    fa_guard_keep(r->guard, c->counts.late, things, 2, release);
    CHECK(run, rig_counts(r).quarantined == 1);
    rig_sleep_ms(HANG_MS);
    fa_guard_reap(r->guard);
    CHECK(run, released[0] == 0 && released[1] == 0);
    r->fake->hanging = NULL;
    r->fake->hangs = false;
    for (int i = 0; i < 5000 && rig_counts(r).outstanding != 0; i++) {
        rig_sleep_ms(1);
    }
    rig_sleep_ms(10);
    CHECK(run, released[0] == 0); /* never on the watching thread */
    fa_guard_reap(r->guard);
    fa_guard_reap(r->guard);
    CHECK(run, released[0] == 1 && released[1] == 1);
    CHECK(run, rig_counts(r).quarantined == 0 && rig_slots(r, RIG_LATE) == 0);
    CHECK(run, rig_counts(r).misses == 1);
    CHECK(run, rig_latency_calls(r, rig_forward_kernel()) == 0);
    fa_guard_reset(r->guard, NULL);
    CHECK(run, rig_forward(r, c) == FA_OK && c->counts.late == NULL);
    CHECK(run, r->fake->streams == 1); /* used again */
    rig_close(r);
}

static void guard_late_without_things_is_watched_all_the_same(test_run *run)
{
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, true);
    r->fake->hanging = rig_forward_kernel();
    CHECK(run, rig_forward(r, r->call) == FA_ELATE);
    fa_guard_keep(r->guard, NULL, NULL, 0, NULL);
    fa_guard_keep(r->guard, r->call->counts.late, NULL, 0, NULL);
    CHECK(run, rig_counts(r).quarantined == 0);
    CHECK(run, rig_counts(r).outstanding == 1);
    r->fake->hangs = false;
    CHECK(run, rig_waits_until_over(r) && rig_slots(r, RIG_LATE) == 0);
    rig_close(r);
}

static void *end_the_hang(void *context)
{
    rig *r = context;
    rig_sleep_ms(HANG_MS);
    r->fake->hangs = false;
    return NULL;
}

/* What is queued before the call hangs longer than a deadline. */
static void guard_deadline_counts_from_the_work_before(test_run *run)
{
    pthread_t thread;
    for (int sync = 0; sync < 2; sync++) {
        rig *r =
            rig_open(run, FA_HIP, sync ? FA_GUARD_SYNC : FA_GUARD_ASYNC, false);
        r->fake->hangs = true;
        pthread_create(&thread, NULL, end_the_hang, r);
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        pthread_join(thread, NULL);
        CHECK(run, rig_waits_until_over(r));
        CHECK(run, rig_counts(r).misses == 0);
        CHECK(run, rig_latency_calls(r, rig_forward_kernel()) == 1);
        CHECK(run,
              rig_state(r, rig_forward_kernel(), NULL) == FA_BREAKER_CLOSED);
        rig_close(r);
    }
}

static void guard_late_blames_main_kernels_alone(test_run *run)
{
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, false);
    r->fake->hanging = "fa_bwd_q_f16_d64_plain";
    CHECK(run, rig_backward(r, r->call) == FA_ELATE);
    CHECK(run, r->fake->hangs);
    fa_guard_keep(r->guard, r->call->counts.late, NULL, 0, NULL);
    for (int i = 0; i < r->call->plan.count; i++) {
        const bool is_main = fa_step_is_main(&r->call->plan.step[i]);
        CHECK(run, rig_state(r, rig_step(r, i), NULL) ==
                       (is_main ? FA_BREAKER_OPEN : FA_BREAKER_CLOSED));
    }
    rig_close(r);
}

static void guard_late_in_the_simulator_in_both_modes(test_run *run)
{
    for (int sync = 0; sync < 2; sync++) {
        rig *r =
            rig_open(run, FA_SIM, sync ? FA_GUARD_SYNC : FA_GUARD_ASYNC, true);
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        CHECK(run, rig_latency_calls(r, rig_forward_kernel()) == 1);
        CHECK(run, r->fake->deadline == 1 + RIG_DEADLINE_MS * 1725000);
        r->fake->deadline_cost = r->fake->deadline + 1;
        CHECK(run, rig_forward(r, r->call) == FA_ELATE);
        CHECK(run, r->call->counts.late == NULL);
        CHECK(run, rig_counts(r).misses == 1 && rig_slots(r, RIG_FLYING) == 0);
        CHECK(run, rig_state(r, rig_forward_kernel(), NULL) == FA_BREAKER_OPEN);
        CHECK(run, rig_forward(r, r->call) == FA_EOPEN);
        rig_close(r);
    }
}

/* -- breakers -------------------------------------------------------------- */

static void guard_one_call_tries_a_kernel(test_run *run)
{
    rig *r = rig_open(run, FA_HIP, FA_GUARD_ASYNC, false);
    CHECK(run, rig_forward(r, r->call) == FA_OK && rig_waits_until_over(r));
    rig_trip(r, rig_forward_kernel(), 0);
    r->fake->hangs = true; /* and so does the work before: not late */
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    CHECK(run,
          rig_state(r, rig_forward_kernel(), NULL) == FA_BREAKER_HALF_OPEN);
    CHECK(run, rig_forward(r, r->call) == FA_EOPEN);
    CHECK_TEXT(run, r->call->error.text, "breaker half open after 1 failure");
    r->fake->hangs = false;
    CHECK(run, rig_waits_until_over(r));
    CHECK(run, rig_state(r, rig_forward_kernel(), NULL) == FA_BREAKER_CLOSED);
    rig_close(r);
}

/* FA_PREPARE corrects delta, too, before the last step. */
static void guard_a_kernel_that_runs_twice_has_one_breaker(test_run *run)
{
    fa_store_entry entry = {.failures = 0};
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, false);
    test_add_features(&r->call->p, FA_HAS_SINK);
    CHECK(run, rig_backward(r, r->call) == FA_OK);
    const char *twice = rig_step(r, 0);
    CHECK(run, strcmp(rig_step(r, r->call->plan.count - 2), twice) == 0);
    rig_trip(r, twice, 0);
    CHECK(run, rig_backward(r, r->call) == FA_OK);
    CHECK(run, rig_state(r, twice, NULL) == FA_BREAKER_CLOSED);
    r->fake->code = 719;
    r->fake->failing_call = "hipModuleLaunchKernel";
    r->fake->failing_after = r->call->plan.count - 2;
    CHECK(run, rig_backward(r, r->call) == FA_EDEVICE);
    CHECK(run, rig_state(r, twice, &entry) == FA_BREAKER_OPEN);
    CHECK(run, entry.failures == 1);
    rig_close(r);
}

static void guard_try_is_given_back_if_another_kernel_is_open(test_run *run)
{
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, false);
    CHECK(run, rig_backward(r, r->call) == FA_OK);
    const int launches = r->fake->launches;
    rig_trip(r, rig_step(r, 1), 0);
    rig_trip(r, rig_step(r, 2), INT64_C(60000000000));
    for (int i = 0; i < 2; i++) {
        CHECK(run, rig_backward(r, r->call) == FA_EOPEN);
        CHECK_TEXT(run, r->call->error.text, rig_step(r, 2));
        CHECK(run, rig_state(r, rig_step(r, 1), NULL) == FA_BREAKER_OPEN);
    }
    CHECK(run, r->fake->launches == launches);
    fa_guard_reset(r->guard, rig_step(r, 2));
    /* A launch that fails before its turn gives it back, too. */
    r->fake->code = 719;
    r->fake->failing_call = "hipModuleLaunchKernel";
    CHECK(run, rig_backward(r, r->call) == FA_EDEVICE);
    CHECK(run, rig_state(r, rig_step(r, 1), NULL) == FA_BREAKER_OPEN);
    fa_guard_reset(r->guard, rig_step(r, 0));
    CHECK(run, rig_backward(r, r->call) == FA_OK);
    CHECK(run, rig_state(r, rig_step(r, 1), NULL) == FA_BREAKER_CLOSED);
    rig_close(r);
}

static void guard_trips_by_hand_what_is_known(test_run *run)
{
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, false);
    fa_error *error = &r->error;
    const char *kernel = rig_forward_kernel();
    CHECK(run, fa_guard_trip(r->guard, FA_HIP, 0, kernel, "", -1, error) ==
                   FA_EINVAL); /* no device yet */
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    CHECK(run, fa_guard_trip(r->guard, FA_HIP, 0, "nothing", "", -1, error) ==
                   FA_EINVAL);
    CHECK_TEXT(run, error->text,
               "kernel: expected one that hip:0 has been "
               "asked for, got nothing");
    CHECK(run, fa_guard_trip(r->guard, FA_HIP, 1, kernel, "", -1, error) ==
                   FA_EINVAL);
    CHECK(run, fa_guard_trip(r->guard, FA_SIM, 0, kernel, "", -1, error) ==
                   FA_EINVAL);
    CHECK(run,
          fa_guard_trip(r->guard, FA_HIP, 0, kernel, "", -1, error) == FA_OK);
    CHECK(run, rig_forward(r, r->call) == FA_EOPEN);
    /* Another device is another matter. */
    r->call->target.device = 1;
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    r->call->target.device = 0;
    fa_guard_reset(r->guard, kernel);
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    rig_close(r);
}

/* -- deadlines ------------------------------------------------------------- */

/* In instructions of the simulator. */
static double deadline(rig *r, int64_t rows, fa_dtype dtype, double factor)
{
    fa_policy policy = r->policy;
    policy.factor = factor;
    policy.floor_ns = 0;
    fa_guard_set(r->guard, &policy);
    r->call->p = test_problem(1, 2, 1, rows, rows, 64);
    test_retype(&r->call->p, dtype);
    r->call->p.out.data = r->call->memory[0];
    r->call->p.lse = r->call->lse;
    CHECK(r->run, rig_forward(r, r->call) == FA_OK);
    return (double)r->fake->deadline;
}

static void guard_deadline_grows_with_the_work(test_run *run)
{
    rig *r = rig_open(run, FA_SIM, FA_GUARD_ASYNC, false);
    const double small = deadline(r, 4, FA_F16, 50.0);
    const double large = deadline(r, 16384, FA_F16, 50.0);
    const double larger = deadline(r, 32768, FA_F16, 50.0);
    const double at_once = 20000 * 50 * 1.725; /* of a launch */
    CHECK(run, small > at_once && small < 1.1 * at_once);
    CHECK(run, large > 10 * small);
    CHECK(run, larger > 3.5 * large && larger < 4.0 * large);
    const double exact = deadline(r, 16384, FA_F32, 50.0);
    CHECK(run, exact > 1.8 * large && exact < 2.0 * large);
    const double twice = deadline(r, 16384, FA_F16, 100.0);
    CHECK(run, twice > 1.999 * large && twice < 2.001 * large);
    /* Finite, whatever the factor. */
    const double longest = deadline(r, 16384, FA_F16, 1e300);
    CHECK(run, longest > 1.72e18 && longest < 1.73e18);
    rig_close(r);
}

void test_guard(test_run *run)
{
    RUN(run, guard_async_watches_from_beside_the_caller);
    RUN(run, guard_sync_runs_on_a_stream_of_its_own);
    RUN(run, guard_off_leaves_calls_alone);
    RUN(run, guard_counts_a_call_by_its_first_main_kernel);
    RUN(run, guard_async_late_opens_and_says_so_once);
    RUN(run, guard_tells_who_opened_it_and_nobody_else);
    RUN(run, guard_sync_late_keeps_memory_until_it_is_over);
    RUN(run, guard_late_without_things_is_watched_all_the_same);
    RUN(run, guard_deadline_counts_from_the_work_before);
    RUN(run, guard_late_blames_main_kernels_alone);
    RUN(run, guard_late_in_the_simulator_in_both_modes);
    RUN(run, guard_one_call_tries_a_kernel);
    RUN(run, guard_a_kernel_that_runs_twice_has_one_breaker);
    RUN(run, guard_try_is_given_back_if_another_kernel_is_open);
    RUN(run, guard_trips_by_hand_what_is_known);
    RUN(run, guard_deadline_grows_with_the_work);
}
