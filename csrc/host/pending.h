/* pending.h: a call that is on its way on a GPU.
 *
 * An event before its launches and one behind them tell when it started and
 * when it is over.  Events and stream belong to one driver's device and are
 * used again for later calls there; station.h keeps them.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_PENDING_H
#define FA_HOST_PENDING_H

#include "host/ticket.h"

struct fa_pending {
    fa_pending *next; /* in the list that has it */
    const fa_driver *driver;
    void *before;     /* event: the caller's earlier work is over */
    void *behind;     /* event: so are the launches */
    void *own_stream; /* of calls that are waited for; NULL: not made yet */
    fa_ticket ticket;
    bool started;
    bool missed;        /* its deadline */
    bool lost;          /* the device failed: nobody knows when it is over */
    bool abort_on_hang; /* as the policy was when it was launched */
    void **things;      /* kept until it is over (watch.h) */
    size_t thing_count;
    void (*release)(void *);
};

fa_pending *fa_pending_new(const fa_driver *driver); /* NULL: no memory */
void fa_pending_free(fa_pending *pending);

/* Makes the events that it lacks, and the stream if `sync`; false: the device
 * has none to give. */
bool fa_pending_prepare(fa_pending *pending, bool sync);

/* Asks the device, which is current.  *ns is, once it is over, how long it
 * took, and before that the time since the work before it was over; 0: it is
 * not yet.  A failure is the device's. */
fa_status fa_pending_ask(fa_pending *pending, bool *over, int64_t *ns,
                         fa_error *error);

/* Asks until it is over or past its deadline. */
fa_status fa_pending_wait(fa_pending *pending, bool *over, int64_t *ns,
                          fa_error *error);

#endif
