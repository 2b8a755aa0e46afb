/* watch.h: calls that are on their way on a GPU, and the thread that looks when
 * they are over.
 *
 * A fa_late is one such call: its ticket, an event before and one behind its
 * launches, and, if its memory must outlive it, that.  It is used again for
 * later calls on the same device.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_WATCH_H
#define FA_HOST_WATCH_H

#include "host/guard.h"

#include <pthread.h>

struct fa_late {
    fa_late *next;
    fa_ticket ticket;
    void *before;     /* event: the caller's earlier work is over */
    void *behind;     /* event: so are the launches */
    void *own_stream; /* of calls that are waited for; NULL: not made yet */
    bool started;
    bool missed;
    bool lost; /* the device failed: nobody knows when it is over */
    bool abort_on_hang;
    void **things; /* kept until it is over */
    size_t thing_count;
    void (*release)(void *);
};

/* What became of a call that was watched.  On the watching thread. */
typedef void fa_watch_over(fa_guard *guard, fa_late *late, int64_t ns);
typedef void fa_watch_missed(fa_guard *guard, fa_late *late, int64_t ns);
typedef void fa_watch_lost(fa_guard *guard, fa_late *late, const char *why);

typedef struct fa_watch {
    fa_guard *guard;
    fa_watch_over *over;     /* it is over; it may have been late */
    fa_watch_missed *missed; /* it is late; once */
    fa_watch_lost *lost;     /* the device failed under it */
    pthread_mutex_t lock;    /* of all that follows */
    pthread_cond_t changed;
    pthread_t thread;
    bool running;
    bool idle; /* the thread waits for calls */
    bool stop;
    bool closed; /* no call is added any more */
    fa_late *incoming;
    fa_late *done; /* over, but with things to release */
    _Atomic uint64_t outstanding;
    _Atomic uint64_t quarantined;
    _Atomic bool have_done;
} fa_watch;

int64_t fa_now_ns(void); /* CLOCK_MONOTONIC */

void fa_watch_init(fa_watch *watch, fa_guard *guard);
/* Ends the thread; what it watched is given up, and not released. */
void fa_watch_stop(fa_watch *watch);
void fa_watch_forked(fa_watch *watch);

/* Hands a call over; starts the thread if need be.  False: no thread could be
 * started, and the call is still the caller's. */
bool fa_watch_add(fa_watch *watch, fa_late *late);
/* The same for one that must not be lost: without a thread it waits for the next
 * call's. */
void fa_watch_leave(fa_watch *watch, fa_late *late);
/* Releases what belongs to calls that are over. */
void fa_watch_reap(fa_watch *watch);

/* Gives a call that is over, or was never launched, back to its station. */
void fa_station_take_back(fa_late *late);

#endif
