/* watch.c: the watching thread.  See watch.h.
 *
 * It asks the events of all calls on their way every two milliseconds, and
 * sleeps while there are none.  A caller pays for adding its call: one lock.
 * Memory that was kept is released by calling threads, never by this one: that
 * may run code of PyTorch's, and Python's end does not wait for this thread.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/watch.h"

#include <signal.h>
#include <stdlib.h>
#include <time.h>

static const int64_t poll_ns = 2000000;
static const int64_t ns_per_s = 1000000000;

int64_t fa_now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * ns_per_s + (int64_t)now.tv_nsec;
}

static void make_locks(fa_watch *w)
{
    pthread_condattr_t monotonic;
    (void)pthread_mutex_init(&w->lock, NULL); /* neither fails on Linux */
    (void)pthread_condattr_init(&monotonic);
    (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&w->changed, &monotonic);
    (void)pthread_condattr_destroy(&monotonic);
}

void fa_watch_init(fa_watch *w, fa_guard *guard)
{
    w->guard = guard;
    make_locks(w);
}

/* -- the thread ------------------------------------------------------------- */

/* Whether the call is over, one way or another. */
static bool look(fa_watch *w, fa_late *late)
{
    fa_error error;
    fa_scope scope;
    bool over = false;
    fa_ticket *t = &late->ticket;
    const fa_driver *driver = t->driver;
    const fa_events *events = &driver->events;
    if (driver->enter(driver, t->device, &scope, &error) != FA_OK) {
        late->lost = true;
        w->lost(w->guard, late, error.text);
        return true;
    }
    fa_status status = FA_OK;
    if (!late->started) {
        /* The clock starts when the work before it is over. */
        status =
            events->event_done(driver, late->before, &late->started, &error);
        t->start_ns = fa_now_ns();
    }
    if (status == FA_OK && late->started) {
        status = events->event_done(driver, late->behind, &over, &error);
    }
    int64_t ns = fa_now_ns() - t->start_ns;
    if (status == FA_OK && over) {
        /* The device's own clock: this one looks every two milliseconds. */
        status =
            events->elapsed(driver, late->before, late->behind, &ns, &error);
    }
    driver->leave(driver, &scope);
    if (status != FA_OK) {
        late->lost = true;
        w->lost(w->guard, late, error.text);
        return true;
    }
    if (over) {
        w->over(w->guard, late, ns);
    } else if (late->started && ns > t->deadline_ns && !late->missed) {
        late->missed = true;
        w->missed(w->guard, late, ns);
    }
    return over;
}

static void finish(fa_watch *w, fa_late *late)
{
    atomic_fetch_sub(&w->outstanding, 1);
    if (late->thing_count == 0) {
        fa_station_take_back(late);
        return;
    }
    if (late->lost) { /* nobody knows that it is over: its memory stays */
        return;
    }
    (void)pthread_mutex_lock(&w->lock);
    late->next = w->done;
    w->done = late;
    (void)pthread_mutex_unlock(&w->lock);
    atomic_store(&w->have_done, true);
}

/* Looks at all calls of the list; returns those that are not over, in the same
 * order. */
static fa_late *look_at_all(fa_watch *w, fa_late *list)
{
    fa_late *rest = NULL;
    fa_late **end = &rest;
    while (list != NULL) {
        fa_late *late = list;
        list = list->next;
        if (look(w, late)) {
            finish(w, late);
        } else {
            late->next = NULL;
            *end = late;
            end = &late->next;
        }
    }
    return rest;
}

static void sleep_a_little(fa_watch *w)
{
    const int64_t until = fa_now_ns() + poll_ns;
    const struct timespec when = {.tv_sec = (time_t)(until / ns_per_s),
                                  .tv_nsec = (long)(until % ns_per_s)};
    if (!w->stop) {
        (void)pthread_cond_timedwait(&w->changed, &w->lock, &when);
    }
}

static void *watch_calls(void *argument)
{
    fa_watch *w = argument;
    const fa_driver *relaxed = NULL; /* told to leave captures alone */
    fa_late *mine = NULL;
    (void)pthread_mutex_lock(&w->lock);
    while (!w->stop) {
        while (mine == NULL && w->incoming == NULL && !w->stop) {
            w->idle = true;
            (void)pthread_cond_wait(&w->changed, &w->lock);
            w->idle = false;
        }
        while (w->incoming != NULL) {
            fa_late *late = w->incoming;
            w->incoming = late->next;
            late->next = mine;
            mine = late;
        }
        (void)pthread_mutex_unlock(&w->lock);
        if (mine != NULL && mine->ticket.driver != relaxed) {
            relaxed = mine->ticket.driver;
            (void)relaxed->events.set_capture_mode(relaxed, FA_CAPTURE_RELAXED);
        }
        mine = look_at_all(w, mine);
        (void)pthread_mutex_lock(&w->lock);
        sleep_a_little(w);
    }
    (void)pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Starts it without signals, which belong to the program's own threads. */
static bool start(fa_watch *w)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    w->stop = false;
    w->running = pthread_create(&w->thread, NULL, watch_calls, w) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return w->running;
}

void fa_watch_stop(fa_watch *w)
{
    (void)pthread_mutex_lock(&w->lock);
    const bool running = w->running;
    w->closed = true;
    w->stop = true;
    w->running = false;
    (void)pthread_cond_signal(&w->changed);
    (void)pthread_mutex_unlock(&w->lock);
    if (running) {
        (void)pthread_join(w->thread, NULL);
    }
}

void fa_watch_forked(fa_watch *w)
{
    make_locks(w);
    w->running = false;
    w->closed = false;
    w->idle = false;
    w->incoming = NULL;
    w->done = NULL;
    atomic_store(&w->outstanding, 0);
    atomic_store(&w->quarantined, 0);
    atomic_store(&w->have_done, false);
}

/* -- callers' side ---------------------------------------------------------- */

static bool add(fa_watch *w, fa_late *late, bool anyway)
{
    (void)pthread_mutex_lock(&w->lock);
    const bool running = !w->closed && (w->running || start(w));
    if (running || anyway) {
        atomic_fetch_add(&w->outstanding, 1);
        late->next = w->incoming;
        w->incoming = late;
        if (w->idle) {
            (void)pthread_cond_signal(&w->changed);
        }
    }
    (void)pthread_mutex_unlock(&w->lock);
    return running;
}

bool fa_watch_add(fa_watch *w, fa_late *late)
{
    return add(w, late, false);
}

void fa_watch_leave(fa_watch *w, fa_late *late)
{
    (void)add(w, late, true);
}

void fa_watch_reap(fa_watch *w)
{
    if (!atomic_load_explicit(&w->have_done, memory_order_relaxed)) {
        return;
    }
    (void)pthread_mutex_lock(&w->lock);
    fa_late *done = w->done;
    w->done = NULL;
    atomic_store(&w->have_done, false);
    (void)pthread_mutex_unlock(&w->lock);
    while (done != NULL) {
        fa_late *late = done;
        done = done->next;
        for (size_t i = 0; i < late->thing_count; i++) {
            late->release(late->things[i]);
        }
        free(late->things);
        late->things = NULL;
        late->thing_count = 0;
        atomic_fetch_sub(&w->quarantined, 1);
        fa_station_take_back(late);
    }
}
