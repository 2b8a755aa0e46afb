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
#include "host/deadline.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const int64_t poll_ns = 2000000;
static const int64_t ns_per_s = 1000000000;

static void make_locks(fa_watch *w)
{
    pthread_condattr_t monotonic;
    (void)pthread_mutex_init(&w->lock, NULL); /* neither fails on Linux */
    (void)pthread_condattr_init(&monotonic);
    (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&w->changed, &monotonic);
    (void)pthread_condattr_destroy(&monotonic);
}

void fa_watch_init(fa_watch *w, const fa_watch_news *news, void *context)
{
    w->news = news;
    w->context = context;
    make_locks(w);
}

/* -- the thread ------------------------------------------------------------ */

/* Asks the call's device, which need not be this thread's. */
static fa_status ask(fa_pending *p, bool *over, int64_t *ns, fa_error *error)
{
    fa_scope scope;
    const fa_driver *driver = p->driver;
    fa_status status = driver->enter(driver, p->ticket.device, &scope, error);
    if (status != FA_OK) {
        return status;
    }
    status = fa_pending_ask(p, over, ns, error);
    driver->leave(driver, &scope);
    return status;
}

/* Whether the call is over, one way or another. */
static bool look(fa_watch *w, fa_pending *p)
{
    fa_error error;
    bool over = false;
    int64_t ns = 0;
    if (ask(p, &over, &ns, &error) != FA_OK) {
        p->lost = true;
        w->news->lost(w->context, p, error.text);
        return true;
    }
    if (over) {
        w->news->over(w->context, p, ns);
    } else if (ns > p->ticket.deadline_ns && !p->missed) {
        p->missed = true;
        w->news->missed(w->context, p, ns);
    }
    return over;
}

static void finish(fa_watch *w, fa_pending *p)
{
    atomic_fetch_sub(&w->outstanding, 1);
    if (p->thing_count == 0) {
        fa_station_take_back(p->ticket.station, p);
        return;
    }
    if (p->lost) { /* nobody knows that it is over: its memory stays */
        return;
    }
    (void)pthread_mutex_lock(&w->lock);
    p->next = w->done;
    w->done = p;
    (void)pthread_mutex_unlock(&w->lock);
    atomic_store(&w->have_done, true);
}

/* Looks at all calls of the list; returns those that are not over, in the same
 * order. */
static fa_pending *look_at_all(fa_watch *w, fa_pending *list)
{
    fa_pending *rest = NULL;
    fa_pending **end = &rest;
    while (list != NULL) {
        fa_pending *p = list;
        list = list->next;
        if (look(w, p)) {
            finish(w, p);
        } else {
            p->next = NULL;
            *end = p;
            end = &p->next;
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
    fa_pending *mine = NULL;
    (void)pthread_mutex_lock(&w->lock);
    while (!w->stop) {
        while (mine == NULL && w->incoming == NULL && !w->stop) {
            w->idle = true;
            (void)pthread_cond_wait(&w->changed, &w->lock);
            w->idle = false;
        }
        while (w->incoming != NULL) {
            fa_pending *p = w->incoming;
            w->incoming = p->next;
            p->next = mine;
            mine = p;
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

void fa_watch_fork(fa_watch *w, fa_fork when)
{
    if (when == FA_FORK_BEFORE) {
        (void)pthread_mutex_lock(&w->lock);
        return;
    }
    (void)pthread_mutex_unlock(&w->lock);
    if (when == FA_FORK_PARENT) {
        return;
    }
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

/* -- callers' side --------------------------------------------------------- */

static bool add(fa_watch *w, fa_pending *p, bool anyway)
{
    (void)pthread_mutex_lock(&w->lock);
    const bool running = !w->closed && (w->running || start(w));
    if (running || anyway) {
        atomic_fetch_add(&w->outstanding, 1);
        p->next = w->incoming;
        w->incoming = p;
        if (w->idle) {
            (void)pthread_cond_signal(&w->changed);
        }
    }
    (void)pthread_mutex_unlock(&w->lock);
    return running;
}

bool fa_watch_add(fa_watch *w, fa_pending *p)
{
    return add(w, p, false);
}

void fa_watch_keep(fa_watch *w, fa_pending *p, void *const *things,
                   size_t count, void (*release)(void *))
{
    /* Without memory for the list its things stay for good. */
    p->things = count == 0 ? NULL : malloc(count * sizeof *things);
    if (p->things != NULL) {
        memcpy(p->things, things, count * sizeof *things);
        p->thing_count = count;
        p->release = release;
    }
    if (count != 0) {
        atomic_fetch_add(&w->quarantined, 1);
    }
    (void)add(w, p, true);
}

void fa_watch_reap(fa_watch *w)
{
    if (!atomic_load_explicit(&w->have_done, memory_order_relaxed)) {
        return;
    }
    (void)pthread_mutex_lock(&w->lock);
    fa_pending *done = w->done;
    w->done = NULL;
    atomic_store(&w->have_done, false);
    (void)pthread_mutex_unlock(&w->lock);
    while (done != NULL) {
        fa_pending *p = done;
        done = done->next;
        for (size_t i = 0; i < p->thing_count; i++) {
            p->release(p->things[i]);
        }
        free(p->things);
        p->things = NULL;
        p->thing_count = 0;
        atomic_fetch_sub(&w->quarantined, 1);
        fa_station_take_back(p->ticket.station, p);
    }
}
