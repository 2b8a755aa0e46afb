/* flight.h: what this process has in flight, in a small file that outlives it.
 *
 * A hung kernel never returns and a fault aborts the process, so what ran last
 * is known only to a file.  Each process has one, mapped into its memory, and
 * holds a POSIX lock on it for its life (a forked child does not hold it); to
 * mark a launch takes an atomic exchange and stores, no system call.  The next
 * process that starts blames the launches that were in flight when their owner
 * aborted, or that it had found late.  What blame leads to is left to the
 * callers; which folders and files are trusted, and the statuses, are those of
 * files.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_FLIGHT_H
#define FA_HOST_FLIGHT_H

#include "host/store.h"

typedef struct fa_flight fa_flight;
enum { FA_FLIGHT_SLOTS = 256, FA_FLIGHT_DEVICES = 32 };

/* Makes the folder if need be.  On failure *flight is NULL. */
fa_status fa_flight_open(const char *dir, fa_flight **flight, fa_error *error);
/* Orderly end: the file goes.  Accepts NULL. */
void fa_flight_close(fa_flight *flight);
/* Orderly end, while other threads may still mark: the file goes, the memory
 * stays until fa_flight_close.  Accepts NULL. */
void fa_flight_retire(fa_flight *flight);
/* In the child of a fork: forgets it without touching the parent's file.  Marks
 * before this call would be the parent's.  Accepts NULL. */
void fa_flight_forked(fa_flight *flight);

/* The number of a device in this file, by its identity as store.h has it; -1:
 * there are too many, and its launches are not covered.  One thread at a
 * time. */
int fa_flight_device(fa_flight *flight, const char *identity);

/* Takes a free slot for a launch of `kernel` (its first 127 bytes) on a device;
 * -1: none is free, or the device is -1, and the launch is not covered.  Any
 * thread. */
int fa_flight_mark(fa_flight *flight, int device, const char *kernel,
                   uint64_t code_hash);
/* It is over.  Accepts the slot -1. */
void fa_flight_clear(fa_flight *flight, int slot);
/* It missed its deadline: blamed if the process ends before it is over.
 * Accepts -1. */
void fa_flight_late(fa_flight *flight, int slot);

/* From now on SIGABRT, whoever sends it, notes in the file what is in flight,
 * and then does what it did before: the earlier handler is set again and the
 * signal raised anew.  In a forked child it notes nothing.  Process-wide: of
 * several flights the last one counts; not from several threads at once. */
fa_status fa_flight_note_aborts(fa_flight *flight, fa_error *error);

/* Calls `blame` for launches of dead owners that an abort had noted or that
 * were late, and removes those files; also malformed ones.  A live owner's
 * stay, one's own and those that are not trusted.  Of several processes at once
 * one does it and the others wait.  A process that was killed (SIGKILL,
 * SIGTERM, SIGINT, out of memory) or exits is not blamed.  `blame` may use the
 * store. */
typedef void fa_flight_blame(void *context, const char *identity,
                             const char *kernel, uint64_t code_hash,
                             const char *cause);
fa_status fa_flight_sweep(const char *dir, fa_flight_blame *blame,
                          void *context, fa_error *error);

#endif
