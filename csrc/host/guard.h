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

#include "host/breaker.h"
#include "host/driver.h"
#include "host/latency.h"

typedef struct fa_guard fa_guard;

typedef enum fa_guard_mode {
    FA_GUARD_OFF,
    FA_GUARD_ASYNC,
    FA_GUARD_SYNC
} fa_guard_mode;

typedef struct fa_policy {
    fa_guard_mode mode;
    double factor;        /* the deadline: so many times the estimate, */
    int64_t floor_ns;     /* but not sooner than this */
    int64_t cooldown_ns;  /* of a breaker that opened once */
    bool abort_on_hang;   /* async: end the process at a missed deadline */
    const char *dir;      /* where state of GPUs is kept; NULL: nowhere */
    const char *dir_else; /* of the simulator and the null backend */
} fa_policy;

fa_status fa_guard_open(const fa_policy *policy, fa_guard **guard,
                        fa_error *error);
/* Ends the watching thread and gives up what is still in flight.  Accepts NULL;
 * no call may be in progress.  Drivers in use must still be open. */
void fa_guard_close(fa_guard *guard);
/* Ends the thread alone, before the process does; nothing is guarded from now
 * on, and what is in flight is no crash. */
void fa_guard_stop(fa_guard *guard);
/* Changes all but the folders; calls in flight keep what they started with. */
void fa_guard_set(fa_guard *guard, const fa_policy *policy);
/* Around fork(), so that the child finds no lock held and no table half
 * written; it starts without calls in flight. */
typedef enum fa_fork { FA_FORK_BEFORE, FA_FORK_PARENT, FA_FORK_CHILD } fa_fork;
void fa_guard_fork(fa_guard *guard, fa_fork when);

/* -- one call --------------------------------------------------------------- */

typedef struct fa_station fa_station; /* what the guard knows of one device */
typedef struct fa_late fa_late; /* a call that did not come back in time */

/* What begin() hands to end(). */
typedef struct fa_ticket {
    fa_guard *guard; /* NULL: not guarded */
    fa_station *station;
    const fa_driver *driver;
    int32_t device;
    fa_late *watched; /* NULL: nobody looks when it is over */
    bool sync;        /* waited for */
    bool off;         /* neither waited for, watched nor marked */
    bool once;
    int count; /* of steps; the following are theirs */
    ptrdiff_t row[FA_MAX_STEPS];
    uint64_t code_hash[FA_MAX_STEPS];
    int slot[FA_MAX_STEPS]; /* in the flight file, or -1 */
    uint32_t mains;         /* those that calls are reported by */
    uint32_t probing;       /* those that are the try of a breaker */
    int64_t shape[7];       /* B H Hk Sq Sk D Dv; zeros of a rotary call */
    double flops;           /* of the main steps */
    int64_t start_ns;
    int64_t deadline_ns;        /* from the start */
    uint64_t wave_instructions; /* the same, of a workgroup; 0: no limit */
    void *caller_stream;
    void *stream; /* launch on this */
} fa_ticket;

/* Asks the breakers of the plan's kernels, and prepares for the launch on
 * `target`, whose device is current.  FA_EOPEN: a breaker refused, launch
 * nothing and do not call end().  `target->guard` NULL guards nothing. */
fa_status fa_guard_begin(const fa_target *target, const fa_driver *driver,
                         const fa_plan *plan, const uint64_t *code_hash,
                         const fa_problem *problem, fa_ticket *ticket,
                         fa_error *error);
/* What became of it: `status` of step `step`, or of all; a failure of -1 is that
 * of no kernel.
 * Returns the status of the call.  On failure counts->late, if not NULL,
 * holds the kernel that still runs, and fa_guard_keep must be told what memory
 * it may use.  A call that must not be repeated (target->once) and was begun
 * ends with FA_EONCE instead of anything that would be answered otherwise. */
fa_status fa_guard_end(fa_ticket *ticket, fa_status status, int step,
                       fa_counts *counts, fa_error *error);

/* Keeps `things` until the kernel is known to be over; then `release` gets
 * each, on the thread of a later call or of fa_guard_reap.  Takes `late`. */
void fa_guard_keep(fa_guard *guard, fa_late *late, void *const *things,
                   size_t count, void (*release)(void *));
void fa_guard_reap(fa_guard *guard);

/* -- to look at -------------------------------------------------------------- */

typedef struct fa_guard_counts {
    uint64_t misses;      /* calls past their deadline */
    uint64_t captured;    /* calls inside a graph capture, not watched */
    uint64_t unwatched;   /* calls that could not be, for want of an event */
    uint64_t outstanding; /* on their way */
    uint64_t quarantined; /* calls whose memory is kept */
} fa_guard_counts;

void fa_guard_count(fa_guard *guard, fa_guard_counts *counts);

/* Devices that were asked for, in an order that stays; false behind the end.
 * The pointers live as long as the guard. */
bool fa_guard_station(fa_guard *guard, size_t index, fa_backend *backend,
                      int32_t *device, fa_breaker **breaker,
                      const fa_latency **latency);

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
