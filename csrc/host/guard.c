/* guard.c: the way of a call through the guard, and the guard itself.
 *
 * What a call meets, in order: the breakers of its kernels and its marks in the
 * flight file (ticket.c), its deadline (deadline.c), the launches, and then
 * either the watching thread (watch.c) or a wait of its own (pending.c).  What
 * outlives the call lies in its device's station (station.c).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/guard.h"
#include "host/deadline.h"
#include "host/watch.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

struct fa_guard {
    _Atomic fa_guard_mode mode;
    _Atomic double factor;
    _Atomic int64_t floor_ns;
    _Atomic int64_t cooldown_ns;
    _Atomic bool abort_on_hang;
    fa_guard_report *report;
    fa_stations stations;
    fa_watch watch;
    _Atomic uint64_t misses;
    _Atomic uint64_t captured;
    _Atomic uint64_t unwatched;
};

static const fa_watch_news watch_news;

/* -- the guard ------------------------------------------------------------- */

void fa_guard_set(fa_guard *g, const fa_policy *p)
{
    atomic_store(&g->factor, p->factor);
    atomic_store(&g->floor_ns, p->floor_ns);
    atomic_store(&g->cooldown_ns, p->cooldown_ns);
    atomic_store(&g->abort_on_hang, p->abort_on_hang);
    atomic_store(&g->mode, p->mode);
}

fa_status fa_guard_open(const fa_policy *p, fa_guard **out, fa_error *error)
{
    *out = NULL;
    fa_guard *g = calloc(1, sizeof *g);
    if (g == NULL) {
        return fa_fail(error, FA_ENOMEM, "guard: out of memory");
    }
    g->report = p->report;
    fa_watch_init(&g->watch, &watch_news, g);
    fa_guard_set(g, p);
    fa_status status =
        fa_stations_open(&g->stations, p->dir, p->dir_else, error);
    if (status != FA_OK) {
        fa_guard_close(g);
        return status;
    }
    *out = g;
    return FA_OK;
}

void fa_guard_close(fa_guard *g)
{
    if (g == NULL) {
        return;
    }
    fa_watch_stop(&g->watch);
    fa_watch_reap(&g->watch);
    fa_stations_close(&g->stations);
    free(g);
}

void fa_guard_stop(fa_guard *g)
{
    atomic_store(&g->mode, FA_GUARD_OFF);
    fa_watch_stop(&g->watch);
    fa_stations_retire(&g->stations);
}

void fa_guard_fork(fa_guard *g, fa_fork when)
{
    fa_stations_fork(&g->stations, when);
    fa_watch_fork(&g->watch, when);
}

static void report(const fa_guard *g, const char *text, bool fatal)
{
    if (g->report != NULL) {
        g->report(text, fatal);
    }
}

/* The station of a device, made when first asked for. */
static fa_status get_station(fa_guard *g, const fa_driver *driver,
                             int32_t device, fa_station **out, fa_error *error)
{
    fa_error complaint;
    /* Without a guard nothing is kept on disk, nor taken from there. */
    const bool on_disk = atomic_load(&g->mode) != FA_GUARD_OFF;
    fa_status status =
        fa_stations_get(&g->stations, driver, device, on_disk,
                        atomic_load(&g->cooldown_ns), out, &complaint, error);
    if (status == FA_OK && complaint.text[0] != '\0') {
        char text[FA_ERROR_CHARS + 64];
        (void)snprintf(text, sizeof text,
                       "state is not kept on disk as it should be: %s",
                       complaint.text);
        report(g, text, false);
    }
    return status;
}

/* -- the start of a call --------------------------------------------------- */

/* A graph runs later, and often: what is captured is not watched, and cannot be
 * a breaker's try. */
static fa_status begin_captured(fa_guard *g, fa_ticket *t, fa_error *error)
{
    atomic_fetch_add(&g->captured, 1);
    for (int i = 0; i < t->count; i++) {
        if ((t->probing >> i & 1) != 0) {
            fa_ticket_withdraw(t);
            return fa_fail(error, FA_EOPEN,
                           "%s: breaker open, and inside a graph capture "
                           "it cannot be tried",
                           fa_variants[t->row[i]].symbol);
        }
    }
    t->guard = NULL;
    return FA_OK;
}

/* Marks the place before the launches, and in sync mode leads over to the
 * stream of our own.  What fails here leaves the call unwatched. */
static void start_watching(fa_guard *g, fa_ticket *t, bool sync)
{
    fa_error ignored;
    const fa_driver *driver = t->driver;
    const fa_events *events = &driver->events;
    const int mode = events->set_capture_mode(driver, FA_CAPTURE_RELAXED);
    fa_pending *pending = fa_station_take(t->station, sync);
    if (pending != NULL &&
        (events->event_record(driver, pending->before, t->caller_stream,
                              &ignored) != FA_OK ||
         (sync && events->stream_wait(driver, pending->own_stream,
                                      pending->before, &ignored) != FA_OK))) {
        fa_pending_free(pending);
        pending = NULL;
    }
    (void)events->set_capture_mode(driver, mode);
    if (pending == NULL) {
        atomic_fetch_add(&g->unwatched, 1);
        return;
    }
    t->pending = pending;
    t->sync = sync;
    t->stream = sync ? pending->own_stream : t->caller_stream;
}

fa_status fa_guard_begin(const fa_target *target, const fa_driver *driver,
                         const fa_plan *plan, const uint64_t *code_hash,
                         const fa_problem *problem, fa_ticket *t,
                         fa_error *error)
{
    fa_guard *g = target->guard;
    *t = (fa_ticket){.guard = g,
                     .driver = driver,
                     .device = target->device,
                     .caller_stream = target->stream,
                     .stream = target->stream,
                     .once = target->once};
    if (g == NULL) {
        return FA_OK;
    }
    fa_watch_reap(&g->watch);
    const fa_guard_mode mode = atomic_load(&g->mode);
    t->off = mode == FA_GUARD_OFF;
    fa_ticket_fill(t, plan, code_hash, problem);
    fa_status status =
        get_station(g, driver, target->device, &t->station, error);
    if (status != FA_OK && t->off) { /* nothing that anybody has asked for */
        t->guard = NULL;
        return FA_OK;
    }
    if (status == FA_OK) {
        status = fa_ticket_ask(t, error);
    }
    if (status != FA_OK || t->off) {
        return status;
    }
    t->deadline_ns = fa_deadline_ns(plan, atomic_load(&g->factor),
                                    atomic_load(&g->floor_ns));
    t->wave_instructions = fa_deadline_instructions(t->deadline_ns);
    if (driver->events.event_new != NULL) {
        if (driver->events.is_capturing(driver, target->stream)) {
            return begin_captured(g, t, error);
        }
        start_watching(g, t, mode == FA_GUARD_SYNC);
    }
    fa_ticket_mark(t);
    t->start_ns = fa_now_ns();
    return FA_OK;
}

/* -- the end of a call that is watched: on the watching thread ------------- */

static void when_over(void *context, fa_pending *pending, int64_t ns)
{
    (void)context;
    if (pending->missed) {
        fa_ticket_withdraw(&pending->ticket);
    } else {
        fa_ticket_ran(&pending->ticket, ns);
    }
}

static void miss(fa_guard *g, fa_ticket *t, int64_t ns,
                 char cause[FA_CAUSE_CHARS])
{
    atomic_fetch_add(&g->misses, 1);
    fa_ticket_miss(t, ns, atomic_load(&g->cooldown_ns), cause);
}

static void when_missed(void *context, fa_pending *pending, int64_t ns)
{
    char cause[FA_CAUSE_CHARS];
    char text[FA_CAUSE_CHARS + FA_KERNEL_CHARS + 64];
    fa_guard *g = context;
    fa_ticket *t = &pending->ticket;
    miss(g, t, ns, cause);
    (void)snprintf(text, sizeof text, "%s on %s:%d %s", fa_ticket_kernel(t),
                   fa_backend_name(t->driver->backend), (int)t->device, cause);
    if (pending->abort_on_hang) {
        /* The culprit is known and on disk; what queued behind it is not to
         * blame.  Other threads may be marking, so the files stay mapped. */
        fa_stations_unmark(&g->stations);
    }
    report(g, text, pending->abort_on_hang);
}

static const char device_failed[] = "the device failed while it ran";

static void when_lost(void *context, fa_pending *pending, const char *why)
{
    char cause[FA_CAUSE_CHARS];
    fa_guard *g = context;
    fa_ticket *t = &pending->ticket;
    if (pending->missed) { /* one failure, not two */
        fa_ticket_withdraw(t);
        return;
    }
    (void)snprintf(cause, sizeof cause, "%s: %.120s", device_failed, why);
    fa_ticket_fail(t, t->mains, atomic_load(&g->cooldown_ns), cause);
}

static const fa_watch_news watch_news = {
    .over = when_over, .missed = when_missed, .lost = when_lost};

/* -- the end of a call: on its own thread ---------------------------------- */

/* What was launched may still run on a stream of ours, and the caller frees its
 * memory in the order of its own. */
static void leave_stream(fa_ticket *t)
{
    fa_error ignored;
    const fa_driver *driver = t->driver;
    fa_pending *pending = t->pending;
    if (t->sync && driver->events.event_record(driver, pending->behind,
                                               t->stream, &ignored) == FA_OK) {
        (void)driver->events.stream_wait(driver, t->caller_stream,
                                         pending->behind, &ignored);
    }
    fa_station_take_back(t->station, pending);
}

/* These of its steps failed. */
static fa_status end_failed(fa_ticket *t, fa_status status, uint32_t steps,
                            const char *what, const fa_error *error)
{
    fa_guard *g = t->guard;
    if (status == FA_EDEVICE || status == FA_ELATE) {
        char cause[FA_CAUSE_CHARS];
        (void)snprintf(cause, sizeof cause, "%s: %.160s",
                       status == FA_ELATE ? "missed its deadline" : what,
                       error->text);
        atomic_fetch_add(&g->misses, status == FA_ELATE ? 1 : 0);
        fa_ticket_fail(t, steps, atomic_load(&g->cooldown_ns), cause);
    } else {
        fa_ticket_withdraw(t);
    }
    if (t->pending != NULL) {
        leave_stream(t);
    }
    return status;
}

/* Waits for a call on our own stream, and lets the caller's follow it. */
static fa_status wait_for(fa_guard *g, fa_pending *pending, fa_counts *counts,
                          fa_error *error)
{
    char cause[FA_CAUSE_CHARS];
    bool over = false;
    int64_t ns = 0;
    fa_ticket *t = &pending->ticket;
    const fa_driver *driver = t->driver;
    const fa_events *events = &driver->events;
    const int mode = events->set_capture_mode(driver, FA_CAPTURE_RELAXED);
    fa_status status = fa_pending_wait(pending, &over, &ns, error);
    if (status == FA_OK && over) {
        status = events->stream_wait(driver, t->caller_stream, pending->behind,
                                     error);
    }
    (void)events->set_capture_mode(driver, mode);
    if (status != FA_OK) {
        return end_failed(t, status, t->mains, device_failed, error);
    }
    if (over) {
        fa_ticket_ran(t, ns);
        fa_station_take_back(t->station, pending);
        return FA_OK;
    }
    pending->missed = true;
    miss(g, t, ns, cause);
    counts->late = pending;
    return fa_fail(error, FA_ELATE, "%s: %s", fa_ticket_kernel(t), cause);
}

/* Waits for it, or hands it to the watching thread. */
static fa_status end_pending(fa_ticket *t, fa_counts *counts, fa_error *error)
{
    fa_guard *g = t->guard;
    fa_pending *pending = t->pending;
    const fa_driver *driver = t->driver;
    pending->ticket = *t;
    pending->abort_on_hang = atomic_load(&g->abort_on_hang) && !t->sync;
    const bool recorded =
        driver->events.event_record(driver, pending->behind, t->stream,
                                    error) == FA_OK;
    if (t->sync) {
        return recorded
                   ? wait_for(g, pending, counts, error)
                   : end_failed(t, FA_EDEVICE, t->mains, device_failed, error);
    }
    if (recorded && fa_watch_add(&g->watch, pending)) {
        return FA_OK;
    }
    atomic_fetch_add(&g->unwatched, 1);
    fa_ticket_withdraw(t);
    fa_station_take_back(t->station, pending);
    return FA_OK;
}

static fa_status end_guarded(fa_ticket *t, fa_status status, int step,
                             fa_counts *counts, fa_error *error)
{
    if (t->off) {
        if (status == FA_OK) {
            fa_ticket_settle(t);
        } else {
            fa_ticket_withdraw(t);
        }
        return status;
    }
    if (status != FA_OK) {
        assert(step < t->count);
        return end_failed(t, status, step < 0 ? 0 : 1U << step, "launch failed",
                          error);
    }
    if (t->pending != NULL) {
        return end_pending(t, counts, error);
    }
    if (t->driver->events.event_new != NULL) {
        fa_ticket_withdraw(t); /* nobody will know when it is over */
    } else {
        fa_ticket_ran(t, fa_now_ns() - t->start_ns);
    }
    return FA_OK;
}

fa_status fa_guard_end(fa_ticket *t, fa_status status, int step,
                       fa_counts *counts, fa_error *error)
{
    counts->late = NULL;
    if (t->guard != NULL) {
        status = end_guarded(t, status, step, counts, error);
    }
    return status != FA_OK && t->once ? FA_EONCE : status;
}

/* -- what is kept ---------------------------------------------------------- */

void fa_guard_keep(fa_guard *g, fa_pending *late, void *const *things,
                   size_t count, void (*release)(void *))
{
    if (late != NULL) {
        fa_watch_keep(&g->watch, late, things, count, release);
    }
}

void fa_guard_reap(fa_guard *g)
{
    fa_watch_reap(&g->watch);
}

/* -- to look at, and by hand ----------------------------------------------- */

void fa_guard_count(fa_guard *g, fa_guard_counts *counts)
{
    *counts = (fa_guard_counts){
        .misses = atomic_load(&g->misses),
        .captured = atomic_load(&g->captured),
        .unwatched = atomic_load(&g->unwatched),
        .outstanding = atomic_load(&g->watch.outstanding),
        .quarantined = atomic_load(&g->watch.quarantined),
    };
}

fa_station *fa_guard_station(fa_guard *g, size_t index)
{
    fa_station *s = atomic_load(&g->stations.first);
    for (size_t i = 0; i < index && s != NULL; i++) {
        s = s->next;
    }
    return s;
}

fa_status fa_guard_know(fa_guard *g, const fa_driver *driver, int32_t device,
                        fa_error *error)
{
    fa_station *ignored = NULL;
    return get_station(g, driver, device, &ignored, error);
}

fa_status fa_guard_trip(fa_guard *g, fa_backend backend, int32_t device,
                        const char *kernel, const char *cause,
                        int64_t cooldown_ns, fa_error *error)
{
    const bool as_usual = cooldown_ns < 0;
    return fa_stations_trip(
               &g->stations, backend, device, kernel, cause,
               as_usual ? atomic_load(&g->cooldown_ns) : cooldown_ns, !as_usual)
               ? FA_OK
               : fa_fail(error, FA_EINVAL,
                         "kernel: expected one that %s:%d has been asked "
                         "for, got %.100s",
                         fa_backend_name(backend), (int)device, kernel);
}

void fa_guard_reset(fa_guard *g, const char *kernel)
{
    fa_stations_reset(&g->stations, kernel);
}
