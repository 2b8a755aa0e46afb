/* test_guard_life.c: the guard and processes: many threads, fork, the end of a
 * process, and what the next one finds.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _XOPEN_SOURCE 700
#include "faults.h"
#include "rig.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 8, CALLS = 40 };

/* -- threads --------------------------------------------------------------- */

typedef struct caller {
    rig *r;
    pthread_t thread;
    int calls; /* that were launched */
    int late;
    int refused;
    int other; /* none may be */
} caller;

static atomic_int releases;
static atomic_int callers;

static void count_release(void *thing)
{
    free(thing);
    atomic_fetch_add(&releases, 1);
}

static void *make_calls(void *context)
{
    caller *me = context;
    rig_call *c = rig_new_call(me->r);
    for (int i = 0; i < CALLS; i++) {
        const fa_status status =
            i % 2 == 0 ? rig_forward(me->r, c) : rig_backward(me->r, c);
        if (status == FA_OK) {
            me->calls++;
        } else if (status == FA_ELATE) {
            void *thing = malloc(1);
            me->late++;
            fa_guard_keep(me->r->guard, c->counts.late, &thing, 1,
                          count_release);
        } else if (status == FA_EOPEN) {
            me->refused++;
        } else {
            me->other++;
        }
        rig_sleep_ms(1);
    }
    free(c);
    atomic_fetch_sub(&callers, 1);
    return NULL;
}

static uint64_t latency_calls(rig *r)
{
    uint64_t sum = 0;
    for (int i = 0; i < FA_VARIANT_COUNT; i++) {
        sum += rig_latency_calls(r, fa_variants[i].symbol);
    }
    return sum;
}

static void *unmark_again_and_again(void *context)
{
    fa_stations *all = context;
    while (atomic_load(&callers) != 0) {
        fa_stations_unmark(all);
    }
    return NULL;
}

/* As the watching thread does before it ends the process, while a device is
 * used for the first time; for TSan to see. */
static void stations_are_unmarked_while_one_is_made(test_run *run)
{
    char folder[SCRATCH_CHARS];
    fa_stations all = {.first = NULL};
    fa_station *station = NULL;
    fa_driver *driver = NULL;
    fa_error complaint, error;
    pthread_t thread;
    scratch_folder(run, folder);
    CHECK(run, fa_driver_open(FA_NULL, "", &driver, &error) == FA_OK);
    CHECK(run, fa_stations_open(&all, NULL, folder, &error) == FA_OK);
    atomic_store(&callers, 1);
    pthread_create(&thread, NULL, unmark_again_and_again, &all);
    rig_sleep_ms(5);
    CHECK(run, fa_stations_get(&all, driver, 0, true, 0, &station, &complaint,
                               &error) == FA_OK);
    CHECK(run, station->flight != NULL && complaint.text[0] == '\0');
    rig_sleep_ms(5);
    atomic_store(&callers, 0);
    pthread_join(thread, NULL);
    fa_stations_close(&all);
    fa_driver_close(driver);
}

/* Each call is counted once: as in time, as late, or as refused. */
static void guard_counts_each_call_of_many_threads_once(test_run *run)
{
    char text[64];
    for (int mode = FA_GUARD_ASYNC; mode <= FA_GUARD_SYNC; mode++) {
        caller all[THREADS] = {{NULL}};
        int sum[3] = {0};
        rig *r = rig_open(run, FA_HIP, (fa_guard_mode)mode, true);
        const int hidden = rig_hide_stderr(r);
        r->policy.floor_ns = 3000000;
        r->policy.cooldown_ns = 0; /* is tried again at once */
        fa_guard_set(r->guard, &r->policy);
        atomic_store(&releases, 0);
        atomic_store(&callers, THREADS);
        for (int i = 0; i < THREADS; i++) {
            all[i].r = r;
            pthread_create(&all[i].thread, NULL, make_calls, &all[i]);
        }
        while (atomic_load(&callers) != 0) {
            r->fake->hanging = rig_forward_kernel();
            rig_sleep_ms(10);
            r->fake->hanging = NULL;
            r->fake->hangs = false;
            rig_sleep_ms(10);
        }
        for (int i = 0; i < THREADS; i++) {
            pthread_join(all[i].thread, NULL);
            CHECK(run, all[i].other == 0);
            sum[0] += all[i].calls;
            sum[1] += all[i].late;
            sum[2] += all[i].refused;
        }
        CHECK(run, rig_waits_until_over(r));
        rig_show_stderr(r, hidden, text, sizeof text);
        const fa_guard_counts counts = rig_counts(r);
        const uint64_t late =
            mode == FA_GUARD_ASYNC ? counts.misses : (uint64_t)sum[1];
        const uint64_t begun = (uint64_t)(sum[0] + sum[1]);
        CHECK(run, sum[0] + sum[1] + sum[2] == THREADS * CALLS);
        CHECK(run, latency_calls(r) + late == begun);
        CHECK(run, counts.misses == late && counts.unwatched == 0);
        CHECK(run, counts.quarantined == 0 && releases == sum[1]);
        CHECK(run,
              rig_slots(r, RIG_FLYING) == 0 && rig_slots(r, RIG_LATE) == 0);
        CHECK(run, late > 0 && sum[0] > 0);
        rig_close(r);
    }
}

/* -- fork ------------------------------------------------------------------ */

/* In the child of a fork: nothing in flight, and it can guard. */
static int guard_anew(void *context)
{
    rig *r = context;
    const int failed = r->run->checks_failed;
    fa_guard_fork(r->guard, FA_FORK_CHILD);
    CHECK(r->run, rig_counts(r).outstanding == 0);
    CHECK(r->run, rig_counts(r).quarantined == 0);
    /* The try was the parent's, which the child will not hear of. */
    CHECK(r->run, rig_state(r, rig_forward_kernel(), NULL) == FA_BREAKER_OPEN);
    r->fake->hangs = false;
    CHECK(r->run, rig_forward(r, r->call) == FA_OK);
    CHECK(r->run, rig_waits_until_over(r));
    CHECK(r->run, r->fake->events == 6); /* its own, none of the parent's */
    CHECK(r->run,
          rig_state(r, rig_forward_kernel(), NULL) == FA_BREAKER_CLOSED);
    return r->run->checks_failed - failed;
}

static void guard_starts_clean_in_a_forked_child(test_run *run)
{
    rig *r = rig_open(run, FA_HIP, FA_GUARD_ASYNC, true);
    r->policy.cooldown_ns = 0;
    fa_guard_set(r->guard, &r->policy);
    r->fake->hangs = true; /* so that two are on their way */
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    r->fake->hangs = false;
    CHECK(run, rig_waits_until_over(r) && r->fake->events == 4);
    CHECK(run, fa_guard_trip(r->guard, FA_HIP, 0, rig_forward_kernel(), "x", -1,
                             &r->error) == FA_OK);
    r->fake->hangs = true;
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    fa_guard_fork(r->guard, FA_FORK_BEFORE);
    const int child = scratch_start(guard_anew, r);
    fa_guard_fork(r->guard, FA_FORK_PARENT);
    CHECK(run, scratch_wait(child) == 0);
    /* Here all is as it was. */
    CHECK(run, rig_counts(r).outstanding == 1 && rig_slots(r, RIG_FLYING) == 1);
    CHECK(run,
          rig_state(r, rig_forward_kernel(), NULL) == FA_BREAKER_HALF_OPEN);
    r->fake->hangs = false;
    CHECK(run, rig_waits_until_over(r) && rig_slots(r, RIG_FLYING) == 0);
    CHECK(run, rig_state(r, rig_forward_kernel(), NULL) == FA_BREAKER_CLOSED);
    CHECK(run, rig_latency_calls(r, rig_forward_kernel()) == 3);
    rig_close(r);
}

/* -- the end --------------------------------------------------------------- */

typedef enum ending {
    BY_ABORT,
    BY_KILL,
    BY_TERM,
    BY_EXIT,
    BY_STOP_AND_ABORT
} ending;

typedef struct life {
    rig *r;
    ending how;
} life;

static int end_in_flight(void *context)
{
    life *l = context;
    l->r->fake->hangs = true; /* the work before, too: not late */
    if (rig_forward(l->r, l->r->call) != FA_OK) {
        return 1;
    }
    switch (l->how) {
    case BY_ABORT:
        abort();
    case BY_KILL:
        return raise(SIGKILL);
    case BY_TERM:
        return raise(SIGTERM);
    case BY_EXIT:
        return 0;
    case BY_STOP_AND_ABORT:
        fa_guard_stop(l->r->guard);
        abort();
    }
    return 1;
}

static void guard_blames_what_an_abort_left_in_flight(test_run *run)
{
    for (int how = BY_ABORT; how <= BY_STOP_AND_ABORT; how++) {
        fa_store_entry entry = {.failures = 0};
        rig *r = rig_open(run, FA_HIP, FA_GUARD_ASYNC, true);
        life l = {r, (ending)how};
        const int status = scratch_child(end_in_flight, &l);
        CHECK(run, WIFSIGNALED(status) == (how != BY_EXIT));
        CHECK(run,
              rig_forward(r, r->call) == (how == BY_ABORT ? FA_EOPEN : FA_OK));
        if (how == BY_ABORT) {
            CHECK(run, rig_state(r, rig_forward_kernel(), &entry) ==
                           FA_BREAKER_OPEN);
            CHECK(run, entry.failures == 1);
            CHECK(run, entry.retry - entry.opened == 61);
            CHECK_TEXT(run, entry.cause, "in flight when its process aborted");
        }
        CHECK(run, rig_backward(r, r->call) == FA_OK);
        rig_close(r);
    }
}

static void abort_now(void)
{
    abort();
}

static int abort_in_a_launch(void *context)
{
    rig *r = context;
    r->fake->at_launch = abort_now;
    return rig_forward(r, r->call);
}

static void guard_blames_what_aborted_in_the_simulator(test_run *run)
{
    rig *r = rig_open(run, FA_SIM, FA_GUARD_ASYNC, true);
    r->policy.dir = NULL; /* of GPUs; the simulator has its own */
    rig_again(r);
    const int status = scratch_child(abort_in_a_launch, r);
    CHECK(run, WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(run, rig_forward(r, r->call) == FA_EOPEN);
    CHECK_TEXT(run, r->call->error.text, "in flight when its process aborted");
    rig_close(r);
}

/* Forward hangs, backward waits behind it. */
static int hang_and_abort(void *context)
{
    rig *r = context;
    const int hidden = rig_hide_stderr(r);
    r->policy.abort_on_hang = true;
    fa_guard_set(r->guard, &r->policy);
    r->fake->hanging = rig_forward_kernel();
    (void)hidden;
    if (rig_forward(r, r->call) != FA_OK || rig_backward(r, r->call) != FA_OK) {
        return 1;
    }
    rig_sleep_ms(20000);
    return 2;
}

static void guard_ends_a_hung_process_and_blames_the_culprit(test_run *run)
{
    char text[1024] = "";
    rig *r = rig_open(run, FA_HIP, FA_GUARD_ASYNC, true);
    const int status = scratch_child(hang_and_abort, r);
    CHECK(run, WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    scratch_read(r->folder, "stderr", text, sizeof text);
    CHECK_TEXT(run, text, "missed its deadline of 20 ms");
    CHECK_TEXT(run, text, "; ending the process\n");
    CHECK(run, rig_forward(r, r->call) == FA_EOPEN);
    CHECK_TEXT(run, r->call->error.text, "missed its deadline of 20 ms");
    CHECK(run, rig_backward(r, r->call) == FA_OK);
    rig_close(r);
}

static void guard_stops_guarding_when_told(test_run *run)
{
    rig *r = rig_open(run, FA_HIP, FA_GUARD_ASYNC, true);
    CHECK(run, rig_forward(r, r->call) == FA_OK && rig_waits_until_over(r));
    CHECK(run, scratch_count(r->folder, "flight-") == 1);
    fa_guard_stop(r->guard);
    CHECK(run, scratch_count(r->folder, "flight-") == 0);
    const int records = r->fake->records;
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    CHECK(run, r->fake->records == records);
    fa_guard_stop(r->guard); /* twice does no harm */
    rig_close(r);
    fa_guard_close(NULL);
}

/* -- what is kept ---------------------------------------------------------- */

static void guard_next_on_the_folder_knows_what_was_open(test_run *run)
{
    static const unsigned char other[68] = {0x7f, 'E', 'L', 'F', 2};
    unsigned char bytes[68];
    fa_store_entry entry = {.failures = 0};
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, true);
    r->fake->hanging = rig_forward_kernel();
    CHECK(run, rig_forward(r, r->call) == FA_ELATE);
    fa_guard_keep(r->guard, r->call->counts.late, NULL, 0, NULL);
    rig_again(r);
    CHECK(run, rig_forward(r, r->call) == FA_EOPEN);
    CHECK(run, rig_state(r, rig_forward_kernel(), &entry) == FA_BREAKER_OPEN);
    CHECK(run, entry.failures == 1);
    CHECK_TEXT(run, entry.cause, "missed its deadline");
    CHECK(run, rig_backward(r, r->call) == FA_OK);
    /* Another build of the kernels is not to blame. */
    memcpy(bytes, other, sizeof bytes);
    memcpy(bytes + 18, &(uint16_t){224}, 2);
    memcpy(bytes + 64, "new", 4);
    scratch_write(run->scratch, "fa_gfx906_f16.co", bytes, sizeof bytes);
    rig_again(r);
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    rig_close(r);
}

static void complaint_of(rig *r, char text[FA_ERROR_CHARS])
{
    fa_station *station = fa_guard_station(r->guard, 0);
    text[0] = '\0';
    if (station != NULL) {
        fa_breaker_complaint(&station->breaker, text);
    }
    CHECK(r->run, fa_guard_station(r->guard, 1) == NULL);
}

/* Of two at a time on one folder each has its file; what one finds, the other
 * hears of when it starts anew. */
static void guard_shares_its_folder(test_run *run)
{
    char text[FA_ERROR_CHARS];
    fa_guard *other = NULL;
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, true);
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    CHECK(run, fa_guard_open(&r->policy, &other, &r->error) == FA_OK);
    r->call->target.guard = other;
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    CHECK(run, scratch_count(r->folder, "flight-") == 2);
    rig *const second = &(rig){.run = run, .guard = other};
    complaint_of(second, text); /* that the first name was taken is none */
    CHECK(run, text[0] == '\0');
    CHECK(run, fa_guard_trip(other, FA_HIP, 0, rig_forward_kernel(), "x", -1,
                             &r->error) == FA_OK);
    fa_guard_close(other);
    r->call->target.guard = r->guard;
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    rig_again(r);
    CHECK(run, rig_forward(r, r->call) == FA_EOPEN);
    fa_guard_reset(r->guard, NULL);
    rig_again(r);
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    rig_close(r);
}

static void guard_keeps_nothing_in_a_folder_of_others(test_run *run)
{
    char text[FA_ERROR_CHARS];
    rig *r = rig_open(run, FA_HIP, FA_GUARD_SYNC, true);
    CHECK(run, chmod(r->folder, 0777) == 0);
    CHECK(run, rig_forward(r, r->call) == FA_OK);
    complaint_of(r, text);
    CHECK_TEXT(run, text, r->folder);
    CHECK(run, fa_guard_trip(r->guard, FA_HIP, 0, rig_forward_kernel(), "x", -1,
                             &r->error) == FA_OK);
    CHECK(run, rig_forward(r, r->call) == FA_EOPEN);
    CHECK(run, scratch_count(r->folder, "") == 0);
    rig_close(r);
}

/* Whatever call of the system fails when a device is first used: the call runs
 * and is guarded, with a complaint. */
static void guard_runs_whatever_the_disk_does(test_run *run)
{
    char text[FA_ERROR_CHARS];
    bool happened = true;
    rig *one = rig_open(run, FA_NULL, FA_GUARD_SYNC, true);
    const int shown = rig_hide_stderr(one);
    fault_set("mmap", 1, ENODEV);
    CHECK(run, rig_forward(one, one->call) == FA_OK && fault_happened());
    rig_show_stderr(one, shown, text, sizeof text);
    complaint_of(one, text);
    CHECK_TEXT(run, text, "expected to map it, got: ");
    rig_close(one);
    for (int nth = 1; happened; nth++) {
        rig *r = rig_open(run, FA_NULL, FA_GUARD_SYNC, true);
        /* So that only the guard's own calls are counted. */
        r->call->target.guard = NULL;
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        r->call->target.guard = r->guard;
        const int hidden = rig_hide_stderr(r);
        fault_set(NULL, nth, EIO);
        const fa_status status = rig_forward(r, r->call);
        happened = fault_happened();
        if (status == FA_ENOMEM) { /* of the station itself */
            CHECK(run, happened);
            CHECK(run, rig_forward(r, r->call) == FA_OK);
        } else {
            CHECK(run, status == FA_OK);
        }
        rig_show_stderr(r, hidden, text, sizeof text);
        complaint_of(r, text);
        CHECK(run, rig_forward(r, r->call) == FA_OK);
        CHECK(run, rig_latency_calls(r, rig_forward_kernel()) >= 1);
        rig_close(r);
    }
}

void test_guard_life(test_run *run)
{
    RUN(run, stations_are_unmarked_while_one_is_made);
    RUN(run, guard_counts_each_call_of_many_threads_once);
    RUN(run, guard_starts_clean_in_a_forked_child);
    RUN(run, guard_blames_what_an_abort_left_in_flight);
    RUN(run, guard_blames_what_aborted_in_the_simulator);
    RUN(run, guard_ends_a_hung_process_and_blames_the_culprit);
    RUN(run, guard_stops_guarding_when_told);
    RUN(run, guard_next_on_the_folder_knows_what_was_open);
    RUN(run, guard_shares_its_folder);
    RUN(run, guard_keeps_nothing_in_a_folder_of_others);
    RUN(run, guard_runs_whatever_the_disk_does);
}
