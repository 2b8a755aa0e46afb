/* ticket.c: see ticket.h.  SPDX-License-Identifier: BSD-3-Clause */
#include "host/ticket.h"

#include <stdio.h>
#include <string.h>

static bool has(uint32_t steps, int step)
{
    return (steps >> step & 1) != 0;
}

/* The first step of the same kernel, since a plan may run one twice and there
 * is one breaker for both. */
static int first_alike(const fa_ticket *t, int step)
{
    int i = 0;
    while (t->row[i] != t->row[step]) {
        i++;
    }
    return i;
}

/* -- the start ------------------------------------------------------------- */

void fa_ticket_fill(fa_ticket *t, const fa_plan *plan,
                    const uint64_t *code_hash, const fa_problem *p)
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

fa_status fa_ticket_ask(fa_ticket *t, fa_error *error)
{
    fa_status status = FA_OK;
    for (int i = 0; i < t->count && status == FA_OK; i++) {
        bool probe = false;
        if (first_alike(t, i) != i) {
            continue;
        }
        status = fa_breaker_ask(&t->station->breaker, t->row[i],
                                t->code_hash[i], &probe, error);
        t->probing |= probe ? 1U << i : 0;
    }
    if (status != FA_OK) {
        fa_ticket_withdraw(t);
    }
    return status;
}

void fa_ticket_mark(fa_ticket *t)
{
    const fa_station *s = t->station;
    for (int i = 0; i < t->count && s->flight != NULL; i++) {
        t->slot[i] =
            fa_flight_mark(s->flight, s->flight_device,
                           fa_variants[t->row[i]].symbol, t->code_hash[i]);
    }
}

/* -- the end --------------------------------------------------------------- */

/* What the breakers need to hear of those steps that were their try. */
static void end_probes(fa_ticket *t, void (*how)(fa_breaker *, ptrdiff_t))
{
    for (int i = 0; i < t->count && t->probing != 0; i++) {
        if (has(t->probing, i)) {
            how(&t->station->breaker, t->row[i]);
        }
    }
    t->probing = 0;
}

static void clear_marks(fa_ticket *t)
{
    for (int i = 0; i < t->count; i++) {
        if (t->station->flight != NULL) { /* it is in a forked child */
            fa_flight_clear(t->station->flight, t->slot[i]);
        }
        t->slot[i] = -1;
    }
}

static void trip(fa_ticket *t, uint32_t steps, int64_t cooldown_ns,
                 const char *cause)
{
    uint32_t first = 0;
    for (int i = 0; i < t->count; i++) {
        first |= has(steps, i) ? 1U << first_alike(t, i) : 0;
    }
    for (int i = 0; i < t->count; i++) {
        if (has(first, i)) {
            fa_breaker_trip(&t->station->breaker, t->row[i], cooldown_ns,
                            cause);
            t->probing &= ~(1U << i);
        }
    }
    end_probes(t, fa_breaker_return);
}

/* The step whose kernel its calls are counted under. */
static int first_main(const fa_ticket *t)
{
    int i = 0;
    while (i + 1 < t->count && !has(t->mains, i)) {
        i++;
    }
    return i;
}

void fa_ticket_ran(fa_ticket *t, int64_t ns)
{
    const int step = first_main(t);
    if (has(t->mains, step)) {
        fa_latency_add(&t->station->latency[t->row[step]], ns, t->flops);
    }
    fa_ticket_settle(t);
}

void fa_ticket_settle(fa_ticket *t)
{
    end_probes(t, fa_breaker_settle);
    clear_marks(t);
}

void fa_ticket_withdraw(fa_ticket *t)
{
    end_probes(t, fa_breaker_return);
    clear_marks(t);
}

void fa_ticket_fail(fa_ticket *t, uint32_t steps, int64_t cooldown_ns,
                    const char *cause)
{
    trip(t, steps, cooldown_ns, cause);
    clear_marks(t);
}

void fa_ticket_miss(fa_ticket *t, int64_t ns, int64_t cooldown_ns,
                    char cause[FA_CAUSE_CHARS])
{
    const double ms = 1e6;
    const int64_t *n = t->shape;
    (void)snprintf(cause, FA_CAUSE_CHARS,
                   "missed its deadline of %.0f ms: not over after %.0f ms "
                   "(batch %lld, heads %lld and %lld, lengths %lld and %lld, "
                   "head dims %lld and %lld)",
                   (double)t->deadline_ns / ms, (double)ns / ms,
                   (long long)n[0], (long long)n[1], (long long)n[2],
                   (long long)n[3], (long long)n[4], (long long)n[5],
                   (long long)n[6]);
    trip(t, t->mains, cooldown_ns, cause);
    for (int i = 0; i < t->count && t->station->flight != NULL; i++) {
        fa_flight_late(t->station->flight, t->slot[i]);
    }
}

const char *fa_ticket_kernel(const fa_ticket *t)
{
    return fa_variants[t->row[first_main(t)]].symbol;
}
