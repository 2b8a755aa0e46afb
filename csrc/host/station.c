/* station.c: see station.h.
 *
 * Stations are only ever added, at the end of a list that is read without a
 * lock; so are flight files.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/station.h"
#include "host/pending.h"

#include <stdlib.h>
#include <string.h>

enum { OF_GPUS, OF_ALL_ELSE };

fa_status fa_stations_open(fa_stations *all, const char *dir,
                           const char *dir_else, fa_error *error)
{
    const char *const dirs[FA_FOLDERS] = {dir, dir_else};
    (void)pthread_mutex_init(&all->lock, NULL); /* cannot fail on Linux */
    for (int i = 0; i < FA_FOLDERS; i++) {
        all->folder[i].dir = dirs[i] == NULL ? NULL : strdup(dirs[i]);
        if (dirs[i] != NULL && all->folder[i].dir == NULL) {
            return fa_fail(error, FA_ENOMEM, "guard: out of memory");
        }
    }
    return FA_OK;
}

static void close_station(fa_station *s)
{
    while (s->idle != NULL) {
        fa_pending *pending = s->idle;
        s->idle = pending->next;
        fa_pending_free(pending);
    }
    fa_breaker_clear(&s->breaker);
    free(s);
}

void fa_stations_close(fa_stations *all)
{
    fa_station *s = atomic_load(&all->first);
    while (s != NULL) {
        fa_station *const station = s;
        s = s->next;
        close_station(station);
    }
    for (int i = 0; i < FA_FOLDERS; i++) {
        fa_flight_close(atomic_load(&all->folder[i].flight));
        free(all->folder[i].dir);
    }
}

/* -- fork ------------------------------------------------------------------ */

static void lock_all(fa_stations *all)
{
    (void)pthread_mutex_lock(&all->lock);
    for (fa_station *s = atomic_load(&all->first); s != NULL; s = s->next) {
        (void)pthread_mutex_lock(&s->breaker.lock);
        (void)pthread_mutex_lock(&s->lock);
    }
}

static void unlock_all(fa_stations *all)
{
    for (fa_station *s = atomic_load(&all->first); s != NULL; s = s->next) {
        (void)pthread_mutex_unlock(&s->lock);
        (void)pthread_mutex_unlock(&s->breaker.lock);
    }
    (void)pthread_mutex_unlock(&all->lock);
}

static void forget_parents_calls(fa_stations *all)
{
    for (fa_station *s = atomic_load(&all->first); s != NULL; s = s->next) {
        s->idle = NULL; /* events of the parent's device */
        s->flight = NULL;
        /* What is tried is tried by the parent's calls. */
        for (ptrdiff_t row = 0; row < FA_VARIANT_COUNT; row++) {
            fa_breaker_return(&s->breaker, row);
        }
    }
    for (int i = 0; i < FA_FOLDERS; i++) {
        fa_flight_forked(atomic_exchange(&all->folder[i].flight, NULL));
    }
}

void fa_stations_fork(fa_stations *all, fa_fork when)
{
    if (when == FA_FORK_BEFORE) {
        lock_all(all);
        return;
    }
    unlock_all(all);
    if (when == FA_FORK_CHILD) {
        forget_parents_calls(all);
    }
}

/* -- adding one ------------------------------------------------------------ */

typedef struct judge {
    const char *dir;
    int64_t cooldown_ns;
} judge;

/* A process died with a kernel in flight: open for the next one. */
static void blame(void *context, const char *identity, const char *kernel,
                  uint64_t code_hash, const char *cause)
{
    const judge *j = context;
    fa_breaker_blame(j->dir, identity, kernel, code_hash, j->cooldown_ns,
                     cause);
}

/* The flight file of one of the two folders, after a look at those of the
 * dead.  With the lock.  Without one, nothing survives a crash, and *complaint
 * says why. */
static fa_flight *get_flight(fa_stations *all, int which, int64_t cooldown_ns,
                             fa_error *complaint)
{
    const char *dir = all->folder[which].dir;
    fa_flight *flight = atomic_load(&all->folder[which].flight);
    judge j = {dir, cooldown_ns};
    if (dir == NULL || flight != NULL) {
        return flight;
    }
    if (fa_flight_sweep(dir, blame, &j, complaint) == FA_OK &&
        fa_flight_open(dir, &flight, complaint) == FA_OK) {
        /* An abort is noted in one file: that of GPUs, if there is one. */
        if (which == OF_GPUS ||
            atomic_load(&all->folder[OF_GPUS].flight) == NULL) {
            (void)fa_flight_note_aborts(flight, complaint);
        }
        atomic_store_explicit(&all->folder[which].flight, flight,
                              memory_order_release);
    }
    return flight;
}

/* With the lock. */
static fa_status make(fa_stations *all, const fa_driver *driver, int32_t device,
                      bool on_disk, int64_t cooldown_ns, fa_station **out,
                      fa_error *complaint, fa_error *error)
{
    char identity[FA_IDENTITY_CHARS];
    const bool is_gpu =
        driver->events.event_new != NULL && driver->backend != FA_NULL;
    const int which = is_gpu ? OF_GPUS : OF_ALL_ELSE;
    fa_status status = driver->identify(driver, device, identity, error);
    if (status != FA_OK) {
        return status;
    }
    fa_station *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return fa_fail(error, FA_ENOMEM, "guard: out of memory");
    }
    s->driver = driver;
    s->device = device;
    (void)pthread_mutex_init(&s->lock, NULL);
    /* First the flight file: its sweep may open breakers on disk. */
    if (on_disk) {
        s->flight = get_flight(all, which, cooldown_ns, complaint);
    }
    fa_breaker_init(&s->breaker, identity,
                    on_disk ? all->folder[which].dir : NULL);
    if (s->flight != NULL) {
        s->flight_device = fa_flight_device(s->flight, identity);
    }
    /* Of two complaints the breakers' own counts. */
    if (s->breaker.complaint[0] == '\0') {
        memcpy(s->breaker.complaint, complaint->text, sizeof complaint->text);
    } else {
        memcpy(complaint->text, s->breaker.complaint, sizeof complaint->text);
    }
    *out = s;
    return FA_OK;
}

static fa_station *find(fa_stations *all, const fa_driver *driver,
                        int32_t device)
{
    fa_station *s = atomic_load(&all->first);
    while (s != NULL && (s->driver != driver || s->device != device)) {
        s = s->next;
    }
    return s;
}

static void append(fa_stations *all, fa_station *station)
{
    _Atomic(fa_station *) *end = &all->first;
    for (fa_station *s = atomic_load(end); s != NULL; s = atomic_load(end)) {
        end = &s->next;
    }
    atomic_store(end, station);
}

fa_status fa_stations_get(fa_stations *all, const fa_driver *driver,
                          int32_t device, bool on_disk, int64_t cooldown_ns,
                          fa_station **out, fa_error *complaint,
                          fa_error *error)
{
    fa_status status = FA_OK;
    complaint->text[0] = '\0';
    *out = find(all, driver, device);
    if (*out != NULL) {
        return FA_OK;
    }
    (void)pthread_mutex_lock(&all->lock);
    *out = find(all, driver, device);
    if (*out == NULL) {
        status = make(all, driver, device, on_disk, cooldown_ns, out, complaint,
                      error);
        if (status == FA_OK) {
            append(all, *out);
        }
    }
    (void)pthread_mutex_unlock(&all->lock);
    return status;
}

/* -- all of them ----------------------------------------------------------- */

void fa_stations_retire(fa_stations *all)
{
    (void)pthread_mutex_lock(&all->lock);
    for (int i = 0; i < FA_FOLDERS; i++) {
        fa_flight_retire(atomic_load(&all->folder[i].flight));
    }
    (void)pthread_mutex_unlock(&all->lock);
}

void fa_stations_unmark(fa_stations *all)
{
    for (int i = 0; i < FA_FOLDERS; i++) {
        fa_flight *flight =
            atomic_load_explicit(&all->folder[i].flight, memory_order_acquire);
        for (int slot = 0; slot < FA_FLIGHT_SLOTS && flight != NULL; slot++) {
            fa_flight_clear(flight, slot);
        }
    }
}

bool fa_stations_trip(fa_stations *all, fa_backend backend, int32_t device,
                      const char *kernel, const char *cause,
                      int64_t cooldown_ns, bool in_memory)
{
    bool found = false;
    for (fa_station *s = atomic_load(&all->first); s != NULL; s = s->next) {
        if (s->driver->backend != backend || s->device != device) {
            continue;
        }
        for (ptrdiff_t row = 0; row < FA_VARIANT_COUNT; row++) {
            if (strcmp(fa_variants[row].symbol, kernel) != 0) {
                continue;
            }
            found = true;
            if (in_memory) {
                fa_breaker_rest(&s->breaker, row, cooldown_ns, cause);
            } else {
                fa_breaker_trip(&s->breaker, row, cooldown_ns, cause);
            }
        }
    }
    return found;
}

void fa_stations_reset(fa_stations *all, const char *kernel)
{
    fa_error ignored; /* what the disk refuses, its next user complains of */
    size_t removed = 0;
    for (fa_station *s = atomic_load(&all->first); s != NULL; s = s->next) {
        fa_breaker_reset(&s->breaker, kernel);
    }
    /* Also what devices left there that nobody has asked for yet. */
    for (int i = 0; i < FA_FOLDERS; i++) {
        if (all->folder[i].dir != NULL) {
            (void)fa_store_reset(all->folder[i].dir, kernel, &removed,
                                 &ignored);
        }
    }
}

/* -- pending calls --------------------------------------------------------- */

fa_pending *fa_station_take(fa_station *s, bool sync)
{
    (void)pthread_mutex_lock(&s->lock);
    fa_pending *pending = s->idle;
    if (pending != NULL) {
        s->idle = pending->next;
    }
    (void)pthread_mutex_unlock(&s->lock);
    if (pending == NULL) {
        pending = fa_pending_new(s->driver);
    }
    if (pending != NULL && !fa_pending_prepare(pending, sync)) {
        fa_pending_free(pending);
        return NULL;
    }
    return pending;
}

void fa_station_take_back(fa_station *s, fa_pending *pending)
{
    (void)pthread_mutex_lock(&s->lock);
    pending->next = s->idle;
    s->idle = pending;
    (void)pthread_mutex_unlock(&s->lock);
}
