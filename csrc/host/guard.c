/* guard.c: devices, deadlines, and the way of a call through the guard.
 *
 * What a call meets, in order: the breakers of its kernels (breaker.c), its
 * marks in the flight file (flight.c), the launches, and then either the
 * watching thread (watch.c) or a wait of its own.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "host/flight.h"
#include "host/watch.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct fa_station {
    _Atomic(fa_station *) next;
    fa_guard *guard;
    const fa_driver *driver;
    int32_t device;
    fa_breaker breaker;
    fa_flight *flight; /* NULL: nothing is kept on disk */
    int flight_device;
    pthread_mutex_t lock; /* of `idle` */
    fa_late *idle;        /* to be used again */
    fa_latency latency[FA_VARIANT_COUNT];
};

struct fa_guard {
    _Atomic fa_guard_mode mode;
    _Atomic double factor;
    _Atomic int64_t floor_ns;
    _Atomic int64_t cooldown_ns;
    _Atomic bool abort_on_hang;
    char *dir[2];         /* of GPUs; of all else; NULL: nowhere */
    fa_flight *flight[2]; /* likewise; opened with the first station */
    pthread_mutex_t lock; /* of adding a station */
    _Atomic(fa_station *) first;
    fa_watch watch;
    _Atomic uint64_t misses;
    _Atomic uint64_t captured;
    _Atomic uint64_t unwatched;
};

static fa_watch_over when_over;
static fa_watch_missed when_missed;
static fa_watch_lost when_lost;

/* -- the guard -------------------------------------------------------------- */

void fa_guard_set(fa_guard *g, const fa_policy *p)
{
    atomic_store(&g->factor, p->factor);
    atomic_store(&g->floor_ns, p->floor_ns);
    atomic_store(&g->cooldown_ns, p->cooldown_ns);
    atomic_store(&g->abort_on_hang, p->abort_on_hang);
    atomic_store(&g->mode, p->mode);
}

fa_status fa_guard_open(const fa_policy *p, fa_guard **out, fa_error *error)
{
    const char *const dirs[] = {p->dir, p->dir_else};
    *out = NULL;
    fa_guard *g = calloc(1, sizeof *g);
    if (g == NULL) {
        return fa_fail(error, FA_ENOMEM, "guard: out of memory");
    }
    (void)pthread_mutex_init(&g->lock, NULL); /* cannot fail on Linux */
    fa_watch_init(&g->watch, g);
    g->watch.over = when_over;
    g->watch.missed = when_missed;
    g->watch.lost = when_lost;
    fa_guard_set(g, p);
    for (int i = 0; i < 2; i++) {
        g->dir[i] = dirs[i] == NULL ? NULL : strdup(dirs[i]);
        if (dirs[i] != NULL && g->dir[i] == NULL) {
            fa_guard_close(g);
            return fa_fail(error, FA_ENOMEM, "guard: out of memory");
        }
    }
    *out = g;
    return FA_OK;
}

static void free_late(fa_late *late)
{
    const fa_driver *driver = late->ticket.driver;
    if (late->before != NULL) {
        driver->events.event_free(driver, late->before);
    }
    if (late->behind != NULL) {
        driver->events.event_free(driver, late->behind);
    }
    if (late->own_stream != NULL) {
        driver->events.stream_free(driver, late->own_stream);
    }
    free(late);
}

void fa_guard_close(fa_guard *g)
{
    if (g == NULL) {
        return;
    }
    fa_watch_stop(&g->watch);
    fa_watch_reap(&g->watch);
    fa_station *s = atomic_load(&g->first);
    while (s != NULL) {
        fa_station *const station = s;
        s = s->next;
        while (station->idle != NULL) {
            fa_late *late = station->idle;
            station->idle = late->next;
            free_late(late);
        }
        fa_breaker_clear(&station->breaker);
        free(station);
    }
    for (int i = 0; i < 2; i++) {
        fa_flight_close(g->flight[i]);
        free(g->dir[i]);
    }
    free(g);
}

void fa_guard_stop(fa_guard *g)
{
    atomic_store(&g->mode, FA_GUARD_OFF);
    fa_watch_stop(&g->watch);
    (void)pthread_mutex_lock(&g->lock);
    for (int i = 0; i < 2; i++) {
        fa_flight_retire(g->flight[i]);
    }
    (void)pthread_mutex_unlock(&g->lock);
}

void fa_guard_fork(fa_guard *g, fa_fork when)
{
    if (when == FA_FORK_BEFORE) {
        (void)pthread_mutex_lock(&g->lock);
        (void)pthread_mutex_lock(&g->watch.lock);
    }
    for (fa_station *s = atomic_load(&g->first); s != NULL; s = s->next) {
        if (when == FA_FORK_BEFORE) {
            (void)pthread_mutex_lock(&s->breaker.lock);
            (void)pthread_mutex_lock(&s->lock);
            continue;
        }
        (void)pthread_mutex_unlock(&s->lock);
        (void)pthread_mutex_unlock(&s->breaker.lock);
        if (when == FA_FORK_CHILD) {
            s->idle = NULL; /* events of the parent's device */
            s->flight = NULL;
            /* What is tried is tried by the parent's calls. */
            for (ptrdiff_t row = 0; row < FA_VARIANT_COUNT; row++) {
                fa_breaker_return(&s->breaker, row);
            }
        }
    }
    if (when != FA_FORK_BEFORE) {
        (void)pthread_mutex_unlock(&g->watch.lock);
        (void)pthread_mutex_unlock(&g->lock);
    }
    if (when == FA_FORK_CHILD) {
        fa_watch_forked(&g->watch);
        for (int i = 0; i < 2; i++) {
            fa_flight_forked(g->flight[i]);
            g->flight[i] = NULL;
        }
    }
}

/* -- devices ---------------------------------------------------------------- */

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
 * dead.  With the guard's lock.  Without one, nothing survives a crash, and
 * *complaint says why. */
static fa_flight *get_flight(fa_guard *g, int which, fa_error *complaint)
{
    judge j = {g->dir[which], atomic_load(&g->cooldown_ns)};
    complaint->text[0] = '\0';
    if (g->dir[which] == NULL || g->flight[which] != NULL) {
        return g->flight[which];
    }
    if (fa_flight_sweep(g->dir[which], blame, &j, complaint) == FA_OK &&
        fa_flight_open(g->dir[which], &g->flight[which], complaint) == FA_OK) {
        complaint->text[0] = '\0'; /* of a name that was taken */
        /* An abort is noted in one file: that of GPUs, if there is one. */
        if (which == 0 || g->flight[0] == NULL) {
            (void)fa_flight_note_aborts(g->flight[which], complaint);
        }
    }
    return g->flight[which];
}

static fa_station *find_station(fa_guard *g, const fa_driver *driver,
                                int32_t device)
{
    fa_station *s = atomic_load(&g->first);
    while (s != NULL && (s->driver != driver || s->device != device)) {
        s = s->next;
    }
    return s;
}

static fa_status make_station(fa_guard *g, const fa_driver *driver,
                              int32_t device, fa_station **out, fa_error *error)
{
    fa_error complaint;
    char identity[FA_IDENTITY_CHARS];
    const int which =
        driver->events.event_new != NULL && driver->backend != FA_NULL ? 0 : 1;
    fa_status status = driver->identify(driver, device, identity, error);
    if (status != FA_OK) {
        return status;
    }
    fa_station *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return fa_fail(error, FA_ENOMEM, "guard: out of memory");
    }
    s->guard = g;
    s->driver = driver;
    s->device = device;
    (void)pthread_mutex_init(&s->lock, NULL);
    /* Without a guard nothing is kept on disk, nor taken from there. */
    const bool off = atomic_load(&g->mode) == FA_GUARD_OFF;
    complaint.text[0] = '\0';
    s->flight = off ? NULL : get_flight(g, which, &complaint);
    fa_breaker_init(&s->breaker, identity, off ? NULL : g->dir[which]);
    if (s->flight != NULL) {
        s->flight_device = fa_flight_device(s->flight, identity);
    }
    if (complaint.text[0] != '\0' && s->breaker.complaint[0] == '\0') {
        memcpy(s->breaker.complaint, complaint.text, sizeof complaint.text);
    }
    if (s->breaker.complaint[0] != '\0') {
        (void)fprintf(stderr,
                      "flash_attn_rocm: state is not kept on disk as it should "
                      "be: %s\n",
                      s->breaker.complaint);
    }
    *out = s;
    return FA_OK;
}

/* The station of a device, made when first asked for. */
static fa_status get_station(fa_guard *g, const fa_driver *driver,
                             int32_t device, fa_station **out, fa_error *error)
{
    fa_status status = FA_OK;
    *out = find_station(g, driver, device);
    if (*out != NULL) {
        return FA_OK;
    }
    (void)pthread_mutex_lock(&g->lock);
    *out = find_station(g, driver, device);
    if (*out == NULL) {
        status = make_station(g, driver, device, out, error);
        if (status == FA_OK) {
            _Atomic(fa_station *) *end = &g->first;
            for (fa_station *s = atomic_load(end); s != NULL;
                 s = atomic_load(end)) {
                end = &s->next;
            }
            atomic_store(end, *out);
        }
    }
    (void)pthread_mutex_unlock(&g->lock);
    return status;
}

void fa_station_take_back(fa_late *late)
{
    fa_station *s = late->ticket.station;
    (void)pthread_mutex_lock(&s->lock);
    late->next = s->idle;
    s->idle = late;
    (void)pthread_mutex_unlock(&s->lock);
}

/* -- deadlines -------------------------------------------------------------- */

/* What a card of 60 compute units at 1.7 GHz does when it is doing badly: a
 * quarter of its peak, in multiply-adds per nanosecond. */
static double rate_of(fa_dtype arith)
{
    return arith == FA_F64 ? 800.0 : arith == FA_F32 ? 1600.0 : 3200.0;
}

static double estimate_ns(const fa_plan *plan)
{
    const double units = 60.0;
    const double step_ns = 20000.0; /* a launch, and passes without products */
    double sum = 0.0;
    for (int i = 0; i < plan->count; i++) {
        const fa_step *step = &plan->step[i];
        const double groups =
            (double)step->grid[0] * step->grid[1] * step->grid[2];
        const double busy = groups < units ? groups / units : 1.0;
        sum +=
            step_ns + step->products / (rate_of(step->variant->arith) * busy);
    }
    return sum;
}

/* A compute unit issues at most one wave instruction per cycle, at 1.725 GHz:
 * four SIMDs, each in one of four cycles. */
static const double wave_instructions_per_ns = 1.725;

static void set_deadline(const fa_guard *g, const fa_plan *plan, fa_ticket *t)
{
    const double most_ns = 1e18; /* thirty years; what follows fits its types */
    const double floor_ns = (double)atomic_load(&g->floor_ns);
    double ns = estimate_ns(plan) * atomic_load(&g->factor);
    ns = ns < floor_ns ? floor_ns : ns;
    ns = ns < most_ns ? ns : most_ns;
    t->deadline_ns = (int64_t)ns;
    t->wave_instructions = 1 + (uint64_t)(ns * wave_instructions_per_ns);
}

/* -- the start of a call ---------------------------------------------------- */

static void fill_ticket(const fa_plan *plan, const uint64_t *code_hash,
                        const fa_problem *p, fa_ticket *t)
{
    t->count = plan->count;
    for (int i = 0; i < plan->count; i++) {
        const fa_step *step = &plan->step[i];
        t->row[i] = step->variant - fa_variants;
        t->code_hash[i] = code_hash[i];
        t->slot[i] = -1;
        if (plan->count == 1 || fa_step_is_main(step)) {
            t->mains |= 1U << i;
            t->flops += 2.0 * step->products;
        }
    }
    if (p != NULL) {
        const int64_t shape[] = {p->q.size[0], p->q.size[1], p->k.size[1],
                                 p->q.size[2], p->k.size[2], p->q.size[3],
                                 p->v.size[3]};
        memcpy(t->shape, shape, sizeof shape);
    }
}

/* What a probe needs to hear that was not tried, or that ran. */
static void end_probes(fa_ticket *t, void (*how)(fa_breaker *, ptrdiff_t))
{
    for (int i = 0; i < t->count && t->probing != 0; i++) {
        if ((t->probing >> i & 1) != 0) {
            how(&t->station->breaker, t->row[i]);
        }
    }
    t->probing = 0;
}

static fa_status ask_breakers(fa_ticket *t, fa_error *error)
{
    fa_status status = FA_OK;
    for (int i = 0; i < t->count && status == FA_OK; i++) {
        bool probe = false;
        status = fa_breaker_ask(&t->station->breaker, t->row[i],
                                t->code_hash[i], &probe, error);
        t->probing |= probe ? 1U << i : 0;
    }
    if (status != FA_OK) {
        end_probes(t, fa_breaker_return);
    }
    return status;
}

/* A fa_late with its events, and a stream of its own if `sync`; NULL if the
 * device has none to give. */
static fa_late *take_late(fa_ticket *t, bool sync)
{
    fa_error error;
    fa_station *s = t->station;
    const fa_driver *driver = t->driver;
    const fa_events *events = &driver->events;
    (void)pthread_mutex_lock(&s->lock);
    fa_late *late = s->idle;
    if (late != NULL) {
        s->idle = late->next;
    }
    (void)pthread_mutex_unlock(&s->lock);
    if (late == NULL) {
        late = calloc(1, sizeof *late);
        if (late == NULL) {
            return NULL;
        }
    }
    late->ticket.driver = driver;
    late->started = false;
    late->missed = false;
    late->lost = false;
    if ((late->before == NULL &&
         events->event_new(driver, &late->before, &error) != FA_OK) ||
        (late->behind == NULL &&
         events->event_new(driver, &late->behind, &error) != FA_OK) ||
        (sync && late->own_stream == NULL &&
         events->stream_new(driver, &late->own_stream, &error) != FA_OK)) {
        free_late(late);
        return NULL;
    }
    return late;
}

/* Marks the place before the launches, and in sync mode leads over to the
 * stream of our own.  What fails here leaves the call unwatched. */
static void start_watching(fa_guard *g, fa_ticket *t, bool sync)
{
    fa_error error;
    const fa_driver *driver = t->driver;
    const fa_events *events = &driver->events;
    fa_late *late = take_late(t, sync);
    if (late == NULL ||
        events->event_record(driver, late->before, t->caller_stream, &error) !=
            FA_OK ||
        (sync && events->stream_wait(driver, late->own_stream, late->before,
                                     &error) != FA_OK)) {
        if (late != NULL) {
            free_late(late);
        }
        atomic_fetch_add(&g->unwatched, 1);
        return;
    }
    t->watched = late;
    t->sync = sync;
    t->stream = sync ? late->own_stream : t->caller_stream;
}

fa_status fa_guard_begin(const fa_target *target, const fa_driver *driver,
                         const fa_plan *plan, const uint64_t *code_hash,
                         const fa_problem *problem, fa_ticket *t,
                         fa_error *error)
{
    fa_guard *g = target->guard;
    const fa_guard_mode mode = g == NULL ? FA_GUARD_OFF : atomic_load(&g->mode);
    *t = (fa_ticket){.caller_stream = target->stream,
                     .stream = target->stream,
                     .once = target->once};
    if (g == NULL) {
        return FA_OK;
    }
    fa_watch_reap(&g->watch);
    t->guard = g;
    t->off = mode == FA_GUARD_OFF;
    t->driver = driver;
    t->device = target->device;
    fill_ticket(plan, code_hash, problem, t);
    fa_status status =
        get_station(g, driver, target->device, &t->station, error);
    if (status == FA_OK) {
        status = ask_breakers(t, error);
    } else if (t->off) { /* nothing that anybody has asked for */
        t->guard = NULL;
        return FA_OK;
    }
    if (status != FA_OK || t->off) {
        return status;
    }
    set_deadline(g, plan, t);
    const bool has_events = driver->events.event_new != NULL;
    if (has_events && driver->events.is_capturing(driver, target->stream)) {
        atomic_fetch_add(&g->captured, 1);
        for (int i = 0; i < t->count; i++) {
            if ((t->probing >> i & 1) != 0) {
                end_probes(t, fa_breaker_return);
                return fa_fail(error, FA_EOPEN,
                               "%s: breaker open, and inside a graph capture "
                               "it cannot be tried",
                               fa_variants[t->row[i]].symbol);
            }
        }
        t->guard = NULL; /* a graph runs later, and often */
        return FA_OK;
    }
    if (has_events) {
        const int before =
            driver->events.set_capture_mode(driver, FA_CAPTURE_RELAXED);
        start_watching(g, t, mode == FA_GUARD_SYNC);
        (void)driver->events.set_capture_mode(driver, before);
    }
    for (int i = 0; i < t->count && t->station->flight != NULL; i++) {
        t->slot[i] =
            fa_flight_mark(t->station->flight, t->station->flight_device,
                           fa_variants[t->row[i]].symbol, t->code_hash[i]);
    }
    t->start_ns = fa_now_ns();
    return FA_OK;
}

/* -- the end of a call ------------------------------------------------------ */

static void clear_slots(fa_ticket *t)
{
    for (int i = 0; i < t->count; i++) {
        if (t->slot[i] >= 0 && t->station->flight != NULL) {
            fa_flight_clear(t->station->flight, t->slot[i]);
        }
        t->slot[i] = -1;
    }
}

/* Opens the breakers of these steps. */
static void trip(fa_ticket *t, uint32_t steps, const char *cause)
{
    const int64_t cooldown_ns = atomic_load(&t->guard->cooldown_ns);
    for (int i = 0; i < t->count; i++) {
        if ((steps >> i & 1) != 0) {
            fa_breaker_trip(&t->station->breaker, t->row[i], cooldown_ns,
                            cause);
            t->probing &= ~(1U << i);
        }
    }
    end_probes(t, fa_breaker_return);
}

static void count_call(fa_ticket *t, int64_t ns)
{
    for (int i = 0; i < t->count; i++) {
        if ((t->mains >> i & 1) != 0) {
            fa_latency_add(&t->station->latency[t->row[i]], ns, t->flops);
            break;
        }
    }
    end_probes(t, fa_breaker_settle);
    clear_slots(t);
}

static const char *first_main(const fa_ticket *t)
{
    int i = 0;
    while (i + 1 < t->count && (t->mains >> i & 1) == 0) {
        i++;
    }
    return fa_variants[t->row[i]].symbol;
}

static void note_miss(fa_ticket *t, int64_t ns, char *text, size_t chars)
{
    const double ms = 1e6;
    const int64_t *n = t->shape;
    (void)snprintf(text, chars,
                   "missed its deadline of %.0f ms: not over after %.0f ms "
                   "(batch %lld, heads %lld and %lld, lengths %lld and %lld, "
                   "head dims %lld and %lld)",
                   (double)t->deadline_ns / ms, (double)ns / ms,
                   (long long)n[0], (long long)n[1], (long long)n[2],
                   (long long)n[3], (long long)n[4], (long long)n[5],
                   (long long)n[6]);
    atomic_fetch_add(&t->guard->misses, 1);
    trip(t, t->mains, text);
    for (int i = 0; i < t->count; i++) {
        if (t->slot[i] >= 0 && t->station->flight != NULL) {
            fa_flight_late(t->station->flight, t->slot[i]);
        }
    }
}

/* On the watching thread. */

static void when_over(fa_guard *g, fa_late *late, int64_t ns)
{
    (void)g;
    if (!late->missed) {
        count_call(&late->ticket, ns);
    }
    clear_slots(&late->ticket);
}

static void when_missed(fa_guard *g, fa_late *late, int64_t ns)
{
    char text[FA_CAUSE_CHARS];
    fa_ticket *t = &late->ticket;
    note_miss(t, ns, text, sizeof text);
    (void)fprintf(stderr, "flash_attn_rocm: %s on %s:%d %s%s\n", first_main(t),
                  fa_backend_name(t->driver->backend), (int)t->device, text,
                  late->abort_on_hang ? "; ending the process" : "");
    if (late->abort_on_hang) {
        /* The culprit is known and on disk; what queued behind it is not to
         * blame.  Other threads may be marking, so the files stay mapped. */
        for (int i = 0; i < 2; i++) {
            for (int k = 0; k < FA_FLIGHT_SLOTS && g->flight[i] != NULL; k++) {
                fa_flight_clear(g->flight[i], k);
            }
        }
        abort();
    }
}

static const char device_failed[] = "the device failed while it ran";

static void when_lost(fa_guard *g, fa_late *late, const char *why)
{
    char text[FA_CAUSE_CHARS];
    (void)g;
    (void)snprintf(text, sizeof text, "%s: %.120s", device_failed, why);
    if (!late->missed) { /* one failure, not two */
        trip(&late->ticket, late->ticket.mains, text);
    }
    clear_slots(&late->ticket);
}

/* One of these steps failed.  What was launched may still run on a stream of
 * ours, and the caller frees its memory in the order of its own. */
static fa_status end_failed(fa_ticket *t, fa_status status, uint32_t steps,
                            const char *what, fa_error *error)
{
    fa_error ignored;
    fa_late *late = t->watched;
    const fa_driver *driver = t->driver;
    if (status == FA_EDEVICE || status == FA_ELATE) {
        char cause[FA_CAUSE_CHARS];
        (void)snprintf(cause, sizeof cause, "%s: %.160s",
                       status == FA_ELATE ? "missed its deadline" : what,
                       error->text);
        atomic_fetch_add(&t->guard->misses, status == FA_ELATE ? 1 : 0);
        trip(t, steps, cause);
    } else {
        end_probes(t, fa_breaker_return);
    }
    clear_slots(t);
    if (late != NULL) {
        if (t->sync &&
            driver->events.event_record(driver, late->behind, t->stream,
                                        &ignored) == FA_OK) {
            (void)driver->events.stream_wait(driver, t->caller_stream,
                                             late->behind, &ignored);
        }
        late->ticket = *t;
        fa_station_take_back(late);
    }
    return status;
}

/* Less and less often: most kernels end within microseconds, and one that does
 * not may take seconds. */
static void pause_after(int64_t waited_ns)
{
    const int64_t at_once = 50000;
    const int64_t longest = 500000;
    if (waited_ns > at_once) {
        const int64_t ns = waited_ns / 16;
        const struct timespec pause = {.tv_nsec =
                                           (long)(ns < longest ? ns : longest)};
        (void)nanosleep(&pause, NULL);
    }
}

/* Waits for a call on our own stream. */
static fa_status wait_for(fa_late *late, fa_counts *counts, fa_error *error)
{
    char text[FA_CAUSE_CHARS];
    bool over = false;
    fa_status status = FA_OK;
    fa_ticket *t = &late->ticket;
    const fa_driver *driver = t->driver;
    const fa_events *events = &driver->events;
    const int mode = events->set_capture_mode(driver, FA_CAPTURE_RELAXED);
    const int64_t first_ns = fa_now_ns();
    int64_t ns = 0;
    while (status == FA_OK && !over && ns <= t->deadline_ns) {
        if (!late->started) {
            status =
                events->event_done(driver, late->before, &late->started, error);
            t->start_ns = fa_now_ns();
        }
        if (status == FA_OK && late->started) {
            status = events->event_done(driver, late->behind, &over, error);
            ns = fa_now_ns() - t->start_ns;
        }
        if (!over) {
            pause_after(fa_now_ns() - first_ns);
        }
    }
    if (status == FA_OK && over) {
        status =
            events->elapsed(driver, late->before, late->behind, &ns, error);
    }
    if (status == FA_OK && over) {
        status =
            events->stream_wait(driver, t->caller_stream, late->behind, error);
    }
    (void)events->set_capture_mode(driver, mode);
    if (status != FA_OK) {
        return end_failed(t, status, t->mains, device_failed, error);
    }
    if (over) {
        count_call(t, ns);
        fa_station_take_back(late);
        return FA_OK;
    }
    late->missed = true;
    note_miss(t, ns, text, sizeof text);
    counts->late = late;
    return fa_fail(error, FA_ELATE, "%s: %s", first_main(t), text);
}

/* Nobody will know when it is over, nor whether it ran. */
static void end_unwatched(fa_ticket *t)
{
    end_probes(t, fa_breaker_return);
    clear_slots(t);
}

static fa_status end_watched(fa_ticket *t, fa_counts *counts, fa_error *error)
{
    fa_error ignored;
    fa_guard *g = t->guard;
    fa_late *late = t->watched;
    const fa_driver *driver = t->driver;
    late->ticket = *t;
    late->ticket.watched = late;
    late->abort_on_hang = atomic_load(&g->abort_on_hang) && !t->sync;
    if (driver->events.event_record(driver, late->behind, t->stream,
                                    t->sync ? error : &ignored) != FA_OK) {
        if (t->sync) { /* nothing can be waited for */
            return end_failed(t, FA_EDEVICE, t->mains, device_failed, error);
        }
    } else if (t->sync) {
        return wait_for(late, counts, error);
    } else if (fa_watch_add(&g->watch, late)) {
        return FA_OK;
    }
    atomic_fetch_add(&g->unwatched, 1);
    end_unwatched(t);
    fa_station_take_back(late);
    return FA_OK;
}

fa_status fa_guard_end(fa_ticket *t, fa_status status, int step,
                       fa_counts *counts, fa_error *error)
{
    counts->late = NULL;
    if (t->guard != NULL && t->off) {
        end_probes(t, status == FA_OK ? fa_breaker_settle : fa_breaker_return);
    } else if (t->guard != NULL && status != FA_OK) {
        assert(step < t->count);
        status = end_failed(t, status, step < 0 ? 0 : 1U << step,
                            "launch failed", error);
    } else if (t->guard != NULL && t->watched != NULL) {
        status = end_watched(t, counts, error);
    } else if (t->guard != NULL && t->driver->events.event_new != NULL) {
        end_unwatched(t);
    } else if (t->guard != NULL) {
        count_call(t, fa_now_ns() - t->start_ns);
    }
    return status != FA_OK && t->once ? FA_EONCE : status;
}

/* -- what is kept ----------------------------------------------------------- */

void fa_guard_keep(fa_guard *g, fa_late *late, void *const *things,
                   size_t count, void (*release)(void *))
{
    if (late == NULL) {
        return;
    }
    /* Without memory for the list its things stay for good. */
    late->things = count == 0 ? NULL : malloc(count * sizeof *things);
    if (late->things != NULL) {
        memcpy(late->things, things, count * sizeof *things);
        late->thing_count = count;
        late->release = release;
    }
    if (count != 0) {
        atomic_fetch_add(&g->watch.quarantined, 1);
    }
    fa_watch_leave(&g->watch, late);
}

void fa_guard_reap(fa_guard *g)
{
    fa_watch_reap(&g->watch);
}

/* -- to look at ------------------------------------------------------------- */

void fa_guard_count(fa_guard *g, fa_guard_counts *counts)
{
    *counts = (fa_guard_counts){
        .misses = atomic_load(&g->misses),
        .captured = atomic_load(&g->captured),
        .unwatched = atomic_load(&g->unwatched),
        .outstanding = atomic_load(&g->watch.outstanding),
        .quarantined = atomic_load(&g->watch.quarantined),
    };
}

bool fa_guard_station(fa_guard *g, size_t index, fa_backend *backend,
                      int32_t *device, fa_breaker **breaker,
                      const fa_latency **latency)
{
    fa_station *s = atomic_load(&g->first);
    for (size_t i = 0; i < index && s != NULL; i++) {
        s = s->next;
    }
    if (s == NULL) {
        return false;
    }
    *backend = s->driver->backend;
    *device = s->device;
    *breaker = &s->breaker;
    *latency = s->latency;
    return true;
}

fa_status fa_guard_know(fa_guard *g, const fa_driver *driver, int32_t device,
                        fa_error *error)
{
    fa_station *ignored = NULL;
    return get_station(g, driver, device, &ignored, error);
}

fa_status fa_guard_trip(fa_guard *g, fa_backend backend, int32_t device,
                        const char *kernel, const char *cause,
                        int64_t cooldown_ns, fa_error *error)
{
    bool found = false;
    const int64_t usual_ns = atomic_load(&g->cooldown_ns);
    for (fa_station *s = atomic_load(&g->first); s != NULL; s = s->next) {
        if (s->driver->backend != backend || s->device != device) {
            continue;
        }
        for (ptrdiff_t row = 0; row < FA_VARIANT_COUNT; row++) {
            if (strcmp(fa_variants[row].symbol, kernel) != 0) {
                continue;
            }
            found = true;
            if (cooldown_ns < 0) {
                fa_breaker_trip(&s->breaker, row, usual_ns, cause);
            } else {
                fa_breaker_rest(&s->breaker, row, cooldown_ns, cause);
            }
        }
    }
    return found ? FA_OK
                 : fa_fail(error, FA_EINVAL,
                           "kernel: expected one that %s:%d has been asked "
                           "for, got %.100s",
                           fa_backend_name(backend), (int)device, kernel);
}

void fa_guard_reset(fa_guard *g, const char *kernel)
{
    fa_error ignored; /* what the disk refuses, its next user complains of */
    size_t removed = 0;
    for (fa_station *s = atomic_load(&g->first); s != NULL; s = s->next) {
        fa_breaker_reset(&s->breaker, kernel);
    }
    /* Also what devices left there that nobody has asked for yet. */
    for (int i = 0; i < 2; i++) {
        if (g->dir[i] != NULL) {
            (void)fa_store_reset(g->dir[i], kernel, &removed, &ignored);
        }
    }
}
