/* ticket.h: one call through the guard, and what it leaves in its device's
 * books: breakers, marks in the flight file, latency.
 *
 * A ticket is filled, asks the breakers and is marked; it then ends in exactly
 * one of the ways below, but for a missed deadline, which an end follows.
 * When it is over, and whether that was too late, is for others to find out.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_TICKET_H
#define FA_HOST_TICKET_H

#include "host/station.h"

typedef struct fa_ticket {
    struct fa_guard *guard; /* NULL: not guarded */
    fa_station *station;
    const fa_driver *driver;
    int32_t device;
    fa_pending *pending; /* NULL: nobody looks when it is over */
    bool sync;           /* waited for */
    bool off;            /* neither waited for, watched nor marked */
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

/* What the plan says; `problem` is NULL for a rotary call. */
void fa_ticket_fill(fa_ticket *ticket, const fa_plan *plan,
                    const uint64_t *code_hash, const fa_problem *problem);
/* Asks the breakers of all steps.  FA_EOPEN: one refused, and the ticket has
 * ended. */
fa_status fa_ticket_ask(fa_ticket *ticket, fa_error *error);
/* Marks all steps as in flight. */
void fa_ticket_mark(fa_ticket *ticket);

/* It ran to its end in `ns`. */
void fa_ticket_ran(fa_ticket *ticket, int64_t ns);
/* The same, of one that nobody timed. */
void fa_ticket_settle(fa_ticket *ticket);
/* It was not launched, or nobody will know whether it ran. */
void fa_ticket_withdraw(fa_ticket *ticket);
/* These of its steps failed (a set of bits). */
void fa_ticket_fail(fa_ticket *ticket, uint32_t steps, int64_t cooldown_ns,
                    const char *cause);

/* It is not over after `ns`: opens its main steps' breakers.  They stay in
 * flight until the end.  `cause` says so in one line. */
void fa_ticket_miss(fa_ticket *ticket, int64_t ns, int64_t cooldown_ns,
                    char cause[FA_CAUSE_CHARS]);

/* The kernel that stands for it in messages. */
const char *fa_ticket_kernel(const fa_ticket *ticket);

#endif
