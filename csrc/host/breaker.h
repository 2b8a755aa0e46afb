/* breaker.h: which kernels of one device may be launched.
 *
 *             a launch failed, or missed its deadline
 *   closed ----------------------------------------------> open
 *     ^                                                  /      ^
 *     |                     the cool-down is over, and  /        \ it failed
 *     |  it was in time     a call asks for the kernel /          \ as well
 *     +---------------------- half open: that call tries it -------+
 *
 * While a kernel is open or half open, all other calls that need it are refused
 * and so answered by the stock function.  The cool-down doubles with each
 * failure in a row.  What is not closed is kept on disk (store.h), so that a
 * process which is started again after an abort does not run into the same
 * kernel.
 *
 * Asking for a closed kernel is one atomic load; everything else takes a lock.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_BREAKER_H
#define FA_HOST_BREAKER_H

#include "host/store.h"

#include <pthread.h>
#include <stdatomic.h>

typedef enum fa_breaker_state {
    FA_BREAKER_UNKNOWN, /* not asked for yet: what is on disk decides */
    FA_BREAKER_CLOSED,
    FA_BREAKER_OPEN,
    FA_BREAKER_HALF_OPEN /* one call is trying the kernel */
} fa_breaker_state;

typedef struct fa_breaker {
    char identity[FA_IDENTITY_CHARS]; /* of the device, as store.h has it */
    const char *dir;                  /* NULL: nothing is kept on disk */
    _Atomic uint32_t state[FA_VARIANT_COUNT]; /* fa_breaker_state */
    pthread_mutex_t lock;                     /* of all that follows */
    uint64_t hash[FA_VARIANT_COUNT];          /* of the code; 0: not asked */
    fa_store_entry entry[FA_VARIANT_COUNT];   /* of what is not closed */
    fa_store_entry stored[FA_STORE_MAX];      /* as read at the start */
    size_t stored_count;
    char complaint[FA_ERROR_CHARS]; /* why the disk is not used, or "" */
} fa_breaker;

/* `dir` is borrowed.  A folder that cannot be used leaves the breaker in memory
 * alone, with a complaint. */
void fa_breaker_init(fa_breaker *breaker, const char *identity,
                     const char *dir);
void fa_breaker_clear(fa_breaker *breaker);

/* Whether row `row` of fa_variants, of code with this hash, may be launched
 * now; if not, the reason.  *probe: this call is the one that tries it, and
 * must come back with one of the next three. */
fa_status fa_breaker_ask(fa_breaker *breaker, ptrdiff_t row, uint64_t code_hash,
                         bool *probe, fa_error *error);
/* It ran: closed again. */
void fa_breaker_settle(fa_breaker *breaker, ptrdiff_t row);
/* It was not tried after all: open as before. */
void fa_breaker_return(fa_breaker *breaker, ptrdiff_t row);
/* It failed: open, whatever it was, for at least `cooldown_ns`. */
void fa_breaker_trip(fa_breaker *breaker, ptrdiff_t row, int64_t cooldown_ns,
                     const char *cause);
/* The same for this process alone: nothing goes to disk. */
void fa_breaker_rest(fa_breaker *breaker, ptrdiff_t row, int64_t cooldown_ns,
                     const char *cause);
/* The same for a process that is no more: on disk, for those that start now.
 * A disk that fails costs the record. */
void fa_breaker_blame(const char *dir, const char *identity, const char *kernel,
                      uint64_t code_hash, int64_t cooldown_ns,
                      const char *cause);
/* Closes the row with this symbol, or all (NULL), also on disk. */
void fa_breaker_reset(fa_breaker *breaker, const char *kernel);

/* Copies the complaint, which may be "". */
void fa_breaker_complaint(fa_breaker *breaker, char text[FA_ERROR_CHARS]);

/* Copies what is not closed, at most `capacity`; *half_open is a set of places
 * in `entries`.  Returns the number. */
size_t fa_breaker_list(fa_breaker *breaker, fa_store_entry *entries,
                       bool *half_open, size_t capacity);

#endif
