/* watch.h: the thread that looks when pending calls are over, and the memory
 * that is kept for them until then.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_WATCH_H
#define FA_HOST_WATCH_H

#include "host/pending.h"

/* What became of a call that was watched.  On the watching thread. */
typedef struct fa_watch_news {
    /* It is over; it may have been late. */
    void (*over)(void *context, fa_pending *pending, int64_t ns);
    /* It is late; once. */
    void (*missed)(void *context, fa_pending *pending, int64_t ns);
    /* The device failed under it. */
    void (*lost)(void *context, fa_pending *pending, const char *why);
} fa_watch_news;

typedef struct fa_watch {
    const fa_watch_news *news;
    void *context;
    pthread_mutex_t lock; /* of all that follows */
    pthread_cond_t changed;
    pthread_t thread;
    bool running;
    bool idle; /* the thread waits for calls */
    bool stop;
    bool closed; /* no call is added any more */
    fa_pending *incoming;
    fa_pending *done; /* over, but with things to release */
    _Atomic uint64_t outstanding;
    _Atomic uint64_t quarantined;
    _Atomic bool have_done;
} fa_watch;

/* `watch` is zeroed. */
void fa_watch_init(fa_watch *watch, const fa_watch_news *news, void *context);
/* Ends the thread; what it watched is given up, and not released. */
void fa_watch_stop(fa_watch *watch);
/* Around fork(): the child has no thread, and watches nothing. */
void fa_watch_fork(fa_watch *watch, fa_fork when);

/* Hands a call over; starts the thread if need be.  False: no thread could be
 * started, and the call is still the caller's. */
bool fa_watch_add(fa_watch *watch, fa_pending *pending);
/* Hands over one that must not be lost, and keeps `things` until it is over;
 * then `release` gets each, in fa_watch_reap.  Without a thread it waits for
 * the next call's. */
void fa_watch_keep(fa_watch *watch, fa_pending *pending, void *const *things,
                   size_t count, void (*release)(void *));
/* Releases what belongs to calls that are over. */
void fa_watch_reap(fa_watch *watch);

#endif
