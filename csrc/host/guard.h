/* guard.h: launches under a deadline, and what follows if they miss it.
 *
 * No GPU runtime reports a kernel that never ends, so what can be known is
 * watched from outside.  A call is guarded in one of three modes:
 *
 *   off    launched and forgotten; not if its breaker is open
 *   async  launched on the caller's stream; a thread looks when it is over, and
 *          opens the breakers of its kernels if that is too late
 *   sync   launched on a stream of our own, and waited for; too late is
 *          FA_ELATE, with which the caller answers the call by other means
 *
 * The simulator runs a launch to its end at once, so there the deadline is a
 * number of instructions, and too late is FA_ELATE in both modes.
 *
 * A fa_guard serves one process: all devices, all threads.  Of a forked child,
 * what its parent had in flight is none of its business.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_GUARD_H
#define FA_HOST_GUARD_H

#include "host/ticket.h"

typedef struct fa_guard fa_guard;

typedef enum fa_guard_mode {
    FA_GUARD_OFF,
    FA_GUARD_ASYNC,
    FA_GUARD_SYNC
} fa_guard_mode;

/* Tells whoever runs the process of a call that was watched and is late, or why
 * state is not kept on disk, in one line.  `fatal`: a queue hangs for good, and
 * the policy wants the process to end; what the next one must know is on disk.
 * On any thread, and not under a lock. */
typedef void fa_guard_report(const char *text, bool fatal);

typedef struct fa_policy {
    fa_guard_mode mode;
    double factor;           /* the deadline: so many times the estimate, */
    int64_t floor_ns;        /* but not sooner than this */
    int64_t cooldown_ns;     /* of a breaker that opened once */
    bool abort_on_hang;      /* async: a missed deadline is fatal */
    const char *dir;         /* where state of GPUs is kept; NULL: nowhere */
    const char *dir_else;    /* of the simulator and the null backend */
    fa_guard_report *report; /* NULL: nobody is told */
} fa_policy;

fa_status fa_guard_open(const fa_policy *policy, fa_guard **guard,
                        fa_error *error);
/* Ends the watching thread and gives up what is still in flight.  Accepts NULL;
 * no call may be in progress.  Drivers in use must still be open. */
void fa_guard_close(fa_guard *guard);
/* Ends the thread alone, before the process does; nothing is guarded from now
 * on, and what is in flight is no crash. */
void fa_guard_stop(fa_guard *guard);
/* Changes all but folders and report; calls in flight keep what they started
 * with. */
void fa_guard_set(fa_guard *guard, const fa_policy *policy);
/* Around fork(): the child starts without calls in flight. */
void fa_guard_fork(fa_guard *guard, fa_fork when);

/* -- one call -------------------------------------------------------------- */

/* Asks the breakers of the plan's kernels, and prepares for the launch on
 * `target`, whose device is current.  On failure (FA_EOPEN: a breaker refused)
 * launch nothing and do not call end().  `target->guard` NULL guards
 * nothing. */
fa_status fa_guard_begin(const fa_target *target, const fa_driver *driver,
                         const fa_plan *plan, const uint64_t *code_hash,
                         const fa_problem *problem, fa_ticket *ticket,
                         fa_error *error);
/* What became of it: `status` of step `step`, or of all; a failure of -1 is
 * that of no kernel.
 * Returns the status of the call.  On failure counts->late, if not NULL,
 * holds the call that still runs, and fa_guard_keep must be told what memory
 * it may use.  A call that must not be repeated (target->once) and was begun
 * ends with FA_EONCE instead of anything that would be answered otherwise. */
fa_status fa_guard_end(fa_ticket *ticket, fa_status status, int step,
                       fa_counts *counts, fa_error *error);

/* Keeps `things` until the kernel is known to be over; then `release` gets
 * each, on the thread of a later call or of fa_guard_reap.  Takes `late`. */
void fa_guard_keep(fa_guard *guard, fa_pending *late, void *const *things,
                   size_t count, void (*release)(void *));
void fa_guard_reap(fa_guard *guard);

/* -- to look at ------------------------------------------------------------ */

typedef struct fa_guard_counts {
    uint64_t misses;      /* calls past their deadline */
    uint64_t captured;    /* calls inside a graph capture, not watched */
    uint64_t unwatched;   /* calls that could not be, for want of an event */
    uint64_t outstanding; /* on their way */
    uint64_t quarantined; /* calls whose memory is kept */
} fa_guard_counts;

void fa_guard_count(fa_guard *guard, fa_guard_counts *counts);

/* Devices that were asked for, in an order that stays; NULL behind the end.
 * For its driver's backend, device, breaker and latency; lives as long as the
 * guard. */
fa_station *fa_guard_station(fa_guard *guard, size_t index);

/* Makes a device known before its first call; it is current. */
fa_status fa_guard_know(fa_guard *guard, const fa_driver *driver,
                        int32_t device, fa_error *error);
/* Opens the breaker of a kernel, on every device known that `backend` and
 * `device` name, for a reason of the caller's; in this process alone and for
 * at least `cooldown_ns`, or, if that is negative, as after a failure.
 * FA_EINVAL: no such. */
fa_status fa_guard_trip(fa_guard *guard, fa_backend backend, int32_t device,
                        const char *kernel, const char *cause,
                        int64_t cooldown_ns, fa_error *error);
/* Closes it, or all (NULL), on all devices and on disk. */
void fa_guard_reset(fa_guard *guard, const char *kernel);

#endif
