/* station.h: what the guard keeps of each device, and in its two folders.
 *
 * A station is made when its device is first asked for and lives as long as the
 * guard: the breakers and latencies of its kernels, its number in the flight
 * file, and pending calls to be used again.  GPUs and all else (the simulator,
 * the null backend) have a folder and a flight file each.
 * What happens to a call is left to ticket.c and guard.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_STATION_H
#define FA_HOST_STATION_H

#include "host/breaker.h"
#include "host/driver.h"
#include "host/flight.h"
#include "host/latency.h"

typedef struct fa_pending fa_pending; /* pending.h */

typedef struct fa_station fa_station;
struct fa_station {
    _Atomic(fa_station *) next;
    const fa_driver *driver;
    int32_t device;
    fa_breaker breaker;
    fa_latency latency[FA_VARIANT_COUNT];
    fa_flight *flight; /* borrowed; NULL: nothing is kept on disk */
    int flight_device;
    pthread_mutex_t lock; /* of `idle` */
    fa_pending *idle;     /* to be used again */
};

enum { FA_FOLDERS = 2 };

typedef struct fa_stations {
    pthread_mutex_t lock; /* of adding one, and a flight file with the first */
    _Atomic(fa_station *) first;
    struct {
        char *dir;                   /* NULL: nowhere */
        _Atomic(fa_flight *) flight; /* NULL: none yet */
    } folder[FA_FOLDERS];            /* of GPUs; of all else */
} fa_stations;

/* `stations` is zeroed.  The folders are copied; NULL: nothing is kept. */
fa_status fa_stations_open(fa_stations *stations, const char *dir,
                           const char *dir_else, fa_error *error);
/* Accepts what open() left half done.  No call may be in progress. */
void fa_stations_close(fa_stations *stations);

/* Around fork(), so that the child finds no lock held and no table half
 * written.  What is in flight is the parent's. */
typedef enum fa_fork { FA_FORK_BEFORE, FA_FORK_PARENT, FA_FORK_CHILD } fa_fork;
void fa_stations_fork(fa_stations *stations, fa_fork when);

/* The station of a device, made if there is none yet, which must then be
 * current.  `on_disk`: state is kept and taken from there; kernels that a dead
 * process had in flight are opened for `cooldown_ns`.  *complaint says why that
 * did not work, once; else it is "". */
fa_status fa_stations_get(fa_stations *stations, const fa_driver *driver,
                          int32_t device, bool on_disk, int64_t cooldown_ns,
                          fa_station **station, fa_error *complaint,
                          fa_error *error);

/* From now on nothing in flight is a crash: the files go, while other threads
 * may still mark. */
void fa_stations_retire(fa_stations *stations);
/* Takes back all marks, before a process ends whose culprit is known. */
void fa_stations_unmark(fa_stations *stations);

/* See fa_guard_trip: true if there was such a kernel. */
bool fa_stations_trip(fa_stations *stations, fa_backend backend, int32_t device,
                      const char *kernel, const char *cause,
                      int64_t cooldown_ns, bool in_memory);
/* See fa_guard_reset. */
void fa_stations_reset(fa_stations *stations, const char *kernel);

/* A pending call with its events, and a stream of its own if `sync`; NULL if
 * the device has none to give. */
fa_pending *fa_station_take(fa_station *station, bool sync);
/* Takes one back: it is over, was never launched, or is asked no more. */
void fa_station_take_back(fa_station *station, fa_pending *pending);

#endif
