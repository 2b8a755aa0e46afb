/* pending.c: see pending.h.  SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/pending.h"
#include "host/deadline.h"

#include <stdlib.h>
#include <time.h>

fa_pending *fa_pending_new(const fa_driver *driver)
{
    fa_pending *p = calloc(1, sizeof *p);
    if (p != NULL) {
        p->driver = driver;
    }
    return p;
}

void fa_pending_free(fa_pending *p)
{
    const fa_events *events = &p->driver->events;
    if (p->before != NULL) {
        events->event_free(p->driver, p->before);
    }
    if (p->behind != NULL) {
        events->event_free(p->driver, p->behind);
    }
    if (p->own_stream != NULL) {
        events->stream_free(p->driver, p->own_stream);
    }
    free(p);
}

bool fa_pending_prepare(fa_pending *p, bool sync)
{
    fa_error ignored;
    const fa_driver *driver = p->driver;
    const fa_events *events = &driver->events;
    p->started = false;
    p->missed = false;
    p->lost = false;
    return (p->before != NULL ||
            events->event_new(driver, &p->before, &ignored) == FA_OK) &&
           (p->behind != NULL ||
            events->event_new(driver, &p->behind, &ignored) == FA_OK) &&
           (!sync || p->own_stream != NULL ||
            events->stream_new(driver, &p->own_stream, &ignored) == FA_OK);
}

fa_status fa_pending_ask(fa_pending *p, bool *over, int64_t *ns,
                         fa_error *error)
{
    fa_status status = FA_OK;
    const fa_driver *driver = p->driver;
    const fa_events *events = &driver->events;
    *over = false;
    if (!p->started) {
        /* The clock starts when the work before it is over. */
        status = events->event_done(driver, p->before, &p->started, error);
        p->ticket.start_ns = fa_now_ns();
    }
    if (status == FA_OK && p->started) {
        status = events->event_done(driver, p->behind, over, error);
    }
    *ns = p->started ? fa_now_ns() - p->ticket.start_ns : 0;
    if (status == FA_OK && *over) {
        /* The device's own clock: who asks is late by a pause. */
        status = events->elapsed(driver, p->before, p->behind, ns, error);
    }
    return status;
}

/* Less and less often: most kernels end within microseconds, and one that does
 * not may take seconds. */
static void pause_after(int64_t waited_ns)
{
    const int64_t at_once = 50000;
    const int64_t longest = 500000;
    if (waited_ns > at_once) {
        const int64_t ns = waited_ns / 16;
        const struct timespec pause = {.tv_nsec =
                                           (long)(ns < longest ? ns : longest)};
        (void)nanosleep(&pause, NULL);
    }
}

fa_status fa_pending_wait(fa_pending *p, bool *over, int64_t *ns,
                          fa_error *error)
{
    const int64_t first_ns = fa_now_ns();
    fa_status status = fa_pending_ask(p, over, ns, error);
    while (status == FA_OK && !*over && *ns <= p->ticket.deadline_ns) {
        pause_after(fa_now_ns() - first_ns);
        status = fa_pending_ask(p, over, ns, error);
    }
    return status;
}
