/* breaker.c: closed, open, half open.  See breaker.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/breaker.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { COOLDOWN_MAX_S = 3600, DOUBLINGS_MAX = 20 };
static const int64_t ns_per_s = 1000000000;

/* Wall-clock time, which the next process has too. */
static int64_t now_s(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec;
}

void fa_breaker_init(fa_breaker *b, const char *identity, const char *dir)
{
    fa_error error;
    memset(b, 0, sizeof *b);
    (void)snprintf(b->identity, sizeof b->identity, "%s", identity);
    b->dir = dir;
    (void)pthread_mutex_init(&b->lock, NULL); /* cannot fail on Linux */
    if (dir == NULL) {
        return;
    }
    const fa_status status = fa_store_read(
        dir, b->identity, b->stored, FA_STORE_MAX, &b->stored_count, &error);
    if (status != FA_OK) {
        b->stored_count = 0;
        memcpy(b->complaint, error.text, sizeof b->complaint);
        /* A bad file was set aside and the next is good; the rest stays. */
        b->dir = status == FA_EINVAL ? dir : NULL;
    }
}

void fa_breaker_clear(fa_breaker *b)
{
    (void)pthread_mutex_destroy(&b->lock);
}

/* Writes a row to disk.  A disk that fails costs the record, not the call. */
static void keep(fa_breaker *b, ptrdiff_t row)
{
    fa_error error;
    if (b->dir != NULL &&
        fa_store_put(b->dir, b->identity, &b->entry[row], &error) != FA_OK) {
        memcpy(b->complaint, error.text, sizeof b->complaint);
    }
}

static void set(fa_breaker *b, ptrdiff_t row, fa_breaker_state state)
{
    atomic_store_explicit(&b->state[row], (uint32_t)state,
                          memory_order_release);
}

/* Whether an entry is of this kernel; a hash that is not known rules out none. */
static bool is_of(const fa_store_entry *e, const char *kernel,
                  uint64_t code_hash)
{
    return (e->code_hash == code_hash || e->code_hash == 0 || code_hash == 0) &&
           strcmp(e->kernel, kernel) == 0;
}

/* What the disk said of a row when the process started. */
static void look_up(fa_breaker *b, ptrdiff_t row, uint64_t code_hash)
{
    fa_breaker_state state = FA_BREAKER_CLOSED;
    for (size_t i = 0; i < b->stored_count; i++) {
        if (is_of(&b->stored[i], fa_variants[row].symbol, code_hash)) {
            b->entry[row] = b->stored[i];
            state = FA_BREAKER_OPEN;
        }
    }
    set(b, row, state);
}

fa_status fa_breaker_ask(fa_breaker *b, ptrdiff_t row, uint64_t code_hash,
                         bool *probe, fa_error *error)
{
    fa_status status = FA_OK;
    assert(row >= 0 && row < FA_VARIANT_COUNT);
    *probe = false;
    if (atomic_load_explicit(&b->state[row], memory_order_acquire) ==
        FA_BREAKER_CLOSED) {
        return FA_OK;
    }
    (void)pthread_mutex_lock(&b->lock);
    if (b->state[row] == FA_BREAKER_UNKNOWN) {
        look_up(b, row, code_hash);
    }
    b->hash[row] = code_hash;
    const fa_store_entry *e = &b->entry[row];
    const int64_t now = now_s();
    /* Before it was opened: somebody set the clock back. */
    if (b->state[row] == FA_BREAKER_OPEN &&
        (now >= e->retry || now < e->opened)) {
        set(b, row, FA_BREAKER_HALF_OPEN);
        *probe = true;
    } else if (b->state[row] != FA_BREAKER_CLOSED) {
        status = fa_fail(
            error, FA_EOPEN, "%s: breaker %s after %u failure%s: %s",
            fa_variants[row].symbol,
            b->state[row] == FA_BREAKER_OPEN ? "open" : "half open",
            (unsigned)e->failures, e->failures == 1 ? "" : "s", e->cause);
    }
    (void)pthread_mutex_unlock(&b->lock);
    return status;
}

/* Closes a row; with the lock. */
static void close_row(fa_breaker *b, ptrdiff_t row)
{
    fa_store_entry *e = &b->entry[row];
    if (e->failures != 0) {
        e->failures = 0;
        keep(b, row);
    }
    set(b, row, FA_BREAKER_CLOSED);
}

void fa_breaker_settle(fa_breaker *b, ptrdiff_t row)
{
    (void)pthread_mutex_lock(&b->lock);
    if (b->state[row] == FA_BREAKER_HALF_OPEN) {
        close_row(b, row);
    }
    (void)pthread_mutex_unlock(&b->lock);
}

void fa_breaker_return(fa_breaker *b, ptrdiff_t row)
{
    (void)pthread_mutex_lock(&b->lock);
    if (b->state[row] == FA_BREAKER_HALF_OPEN) {
        set(b, row, FA_BREAKER_OPEN);
    }
    (void)pthread_mutex_unlock(&b->lock);
}

static int64_t cooldown_s(int64_t first_ns, uint32_t failures)
{
    const uint32_t doublings =
        failures - 1 < DOUBLINGS_MAX ? failures - 1 : DOUBLINGS_MAX;
    const int64_t first = (first_ns + ns_per_s - 1) / ns_per_s;
    const int64_t most = first > COOLDOWN_MAX_S ? first : COOLDOWN_MAX_S;
    int64_t seconds = first;
    for (uint32_t i = 0; i < doublings && seconds < most; i++) {
        seconds *= 2;
    }
    seconds = seconds < most ? seconds : most;
    /* It began within a second, not at its start. */
    return seconds == 0 ? 0 : seconds + 1;
}

/* One failure more. */
static void fail(fa_store_entry *e, const char *kernel, uint64_t code_hash,
                 int64_t cooldown_ns, const char *cause)
{
    e->failures += e->failures < UINT32_MAX ? 1 : 0;
    e->code_hash = code_hash;
    e->opened = now_s();
    e->retry = e->opened + cooldown_s(cooldown_ns, e->failures);
    (void)snprintf(e->kernel, sizeof e->kernel, "%s", kernel);
    (void)snprintf(e->cause, sizeof e->cause, "%s", cause);
}

void fa_breaker_blame(const char *dir, const char *identity, const char *kernel,
                      uint64_t code_hash, int64_t cooldown_ns,
                      const char *cause)
{
    fa_store_entry entries[FA_STORE_MAX];
    fa_store_entry blamed = {.failures = 0};
    fa_error ignored;
    size_t count = 0;
    (void)fa_store_read(dir, identity, entries, FA_STORE_MAX, &count, &ignored);
    for (size_t i = 0; i < count; i++) {
        if (is_of(&entries[i], kernel, code_hash)) {
            blamed = entries[i];
        }
    }
    fail(&blamed, kernel, code_hash, cooldown_ns, cause);
    (void)fa_store_put(dir, identity, &blamed, &ignored);
}

/* One failure more, with the lock. */
static void open_row(fa_breaker *b, ptrdiff_t row, int64_t cooldown_ns,
                     const char *cause)
{
    assert(row >= 0 && row < FA_VARIANT_COUNT);
    if (b->state[row] == FA_BREAKER_UNKNOWN) { /* by hand */
        look_up(b, row, b->hash[row]);
    }
    fail(&b->entry[row], fa_variants[row].symbol, b->hash[row], cooldown_ns,
         cause);
    set(b, row, FA_BREAKER_OPEN);
}

void fa_breaker_rest(fa_breaker *b, ptrdiff_t row, int64_t cooldown_ns,
                     const char *cause)
{
    (void)pthread_mutex_lock(&b->lock);
    open_row(b, row, cooldown_ns, cause);
    (void)pthread_mutex_unlock(&b->lock);
}

void fa_breaker_trip(fa_breaker *b, ptrdiff_t row, int64_t cooldown_ns,
                     const char *cause)
{
    (void)pthread_mutex_lock(&b->lock);
    open_row(b, row, cooldown_ns, cause);
    keep(b, row);
    (void)pthread_mutex_unlock(&b->lock);
}

void fa_breaker_reset(fa_breaker *b, const char *kernel)
{
    size_t removed = 0;
    fa_error error;
    (void)pthread_mutex_lock(&b->lock);
    for (ptrdiff_t row = 0; row < FA_VARIANT_COUNT; row++) {
        if ((kernel == NULL || strcmp(kernel, fa_variants[row].symbol) == 0) &&
            b->state[row] != FA_BREAKER_UNKNOWN) {
            b->entry[row] = (fa_store_entry){.failures = 0};
            /* The first call still has to tell the hash of the code. */
            set(b, row,
                b->hash[row] == 0 ? FA_BREAKER_UNKNOWN : FA_BREAKER_CLOSED);
        }
    }
    for (size_t i = 0; i < b->stored_count; i++) { /* of the unknown ones */
        if (kernel == NULL || strcmp(kernel, b->stored[i].kernel) == 0) {
            b->stored[i].kernel[0] = '\0';
        }
    }
    if (b->dir != NULL &&
        fa_store_reset(b->dir, kernel, &removed, &error) != FA_OK) {
        memcpy(b->complaint, error.text, sizeof b->complaint);
    }
    (void)pthread_mutex_unlock(&b->lock);
}

void fa_breaker_complaint(fa_breaker *b, char text[FA_ERROR_CHARS])
{
    (void)pthread_mutex_lock(&b->lock);
    memcpy(text, b->complaint, FA_ERROR_CHARS);
    (void)pthread_mutex_unlock(&b->lock);
}

size_t fa_breaker_list(fa_breaker *b, fa_store_entry *entries, bool *half_open,
                       size_t capacity)
{
    size_t count = 0;
    (void)pthread_mutex_lock(&b->lock);
    for (ptrdiff_t row = 0; row < FA_VARIANT_COUNT && count < capacity; row++) {
        if (b->state[row] == FA_BREAKER_OPEN ||
            b->state[row] == FA_BREAKER_HALF_OPEN) {
            entries[count] = b->entry[row];
            half_open[count++] = b->state[row] == FA_BREAKER_HALF_OPEN;
        }
    }
    (void)pthread_mutex_unlock(&b->lock);
    return count;
}
