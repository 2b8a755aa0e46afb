/* profile_cycles.c: schedule of the traced workgroups on one compute unit.
 *
 * Each wave issues its traced instructions in order. A SIMD has its turn every
 * four clocks and may then issue one instruction per wave and one per kind,
 * oldest wave first. Units keep the clock until which they are busy; a memory
 * instruction is complete once its unit has served it and its latency is over,
 * and s_waitcnt waits for that. Memory behind L1 is shared: a compute unit
 * gets its part of what L2 and HBM deliver.
 *
 * Traced workgroups are repeated until the last round of slots is full, so
 * that the clocks per workgroup are not those of a half empty compute unit.
 *
 * This is a simulated schedule, not a measurement: latencies are placeholders
 * and instruction fetch costs nothing. It shows where waves wait, and is the
 * estimate where latency is what counts. Where units are busy, the fit of
 * profile_bounds.c is longer: here LDS work hides behind other waves as well as
 * the queues allow, while the fit says how much of it hides on a real card.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "profile_model.h"
#include "profile_spans.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_SIMDS = 8, MAX_SLOTS = 16 };

/* Outstanding operations of one counter, oldest first; they return in order. */
typedef struct pending {
    uint64_t done[ISA_VM_MAX + 1];
    uint32_t first, count;
    uint64_t last;
} pending;

typedef struct cu_wave {
    const profile_trace *trace;
    const profile_event *event;
    size_t next, count;
    uint32_t index, simd, slot;
    uint64_t ready; /* may issue from here on; waits make it later */
    uint64_t since; /* could have issued but for waits and busy units */
    bool barrier;
    uint64_t arrived;
    pending vm, lgkm;
    profile_span span;
} cu_wave;

typedef struct simd {
    cu_wave *wave[MAX_SLOTS]; /* oldest first */
    uint32_t waves;
    uint64_t valu_free, next;
} simd;

typedef struct cu {
    const profile_launch *launch;
    profile_schedule *out;
    const isa_row *rows;
    profile_cost *cost; /* of rows [launch->low, launch->high) */
    simd simd[MAX_SIMDS];
    uint32_t simds;
    uint64_t in_free[MAX_SIMDS], out_free[MAX_SIMDS]; /* per pair */
    uint64_t bank_free, ta_free, l1_free;
    double l2_free, hbm_free, l2_line, hbm_line; /* clocks per line */
    cu_wave *waves;                              /* slots * group_waves */
    uint32_t slots, group_waves;
    uint32_t *alive; /* per slot: waves not ended */
    size_t placed;   /* workgroups */
    size_t wanted;   /* the samples, and fillers for whole rounds of slots */
    uint64_t end;
} cu;

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* ---- counters of outstanding operations --------------------------------- */

static void retire(pending *p, uint64_t now)
{
    while (p->count > 0 && p->done[p->first] <= now) {
        p->first = (p->first + 1) % (ISA_VM_MAX + 1);
        p->count--;
    }
}

static void push(pending *p, uint64_t done)
{
    p->last = later(p->last, done);
    p->done[(p->first + p->count) % (ISA_VM_MAX + 1)] = p->last;
    p->count++;
}

/* The clock at which no more than `left` are outstanding. */
static uint64_t down_to(const pending *p, uint32_t left)
{
    return p->count <= left
               ? 0
               : p->done[(p->first + p->count - left - 1) % (ISA_VM_MAX + 1)];
}

/* ---- memory ------------------------------------------------------------- */

/* What lies behind the first-level caches; returns when the lines are here. */
static uint64_t far_memory(cu *c, const profile_reach *reach, uint64_t start)
{
    uint64_t done = start;

    if (reach->l2 > 0) {
        c->l2_free = (c->l2_free > (double)start ? c->l2_free : (double)start) +
                     reach->l2 * c->l2_line;
        done = later((uint64_t)c->l2_free, start + COUNT(L2_LATENCY));
    }
    if (reach->hbm > 0) {
        c->hbm_free =
            (c->hbm_free > (double)start ? c->hbm_free : (double)start) +
            reach->hbm * c->hbm_line;
        done = later(done,
                     later((uint64_t)c->hbm_free, start + COUNT(HBM_LATENCY)));
    }
    return done;
}

static profile_reach reach_of(const cu_wave *w, const profile_event *e)
{
    static const profile_reach nothing;

    return w->trace->reach != NULL && e->memory != NO_MEMORY
               ? w->trace->reach[e->memory]
               : nothing;
}

static uint64_t vector_memory(cu *c, const cu_wave *w, const profile_event *e,
                              uint64_t now)
{
    profile_reach reach = reach_of(w, e);
    uint64_t start = later(now, c->ta_free);
    uint64_t done = now + COUNT(ISSUE);

    if (e->ta == 0) {
        return done; /* no lane took part */
    }
    c->ta_free = start + e->ta;
    c->l1_free = later(start, c->l1_free) + reach.lines * COUNT(L1_LINE_CLOCKS);
    done = later(later(c->ta_free, c->l1_free), start + COUNT(L1_LATENCY));
    return later(done, far_memory(c, &reach, start));
}

static uint64_t scalar_memory(cu *c, const cu_wave *w, const profile_event *e,
                              uint32_t issue, uint64_t now)
{
    profile_reach reach = reach_of(w, e);

    return later(now + issue + COUNT(SCALAR_LATENCY),
                 far_memory(c, &reach, now + issue));
}

static uint64_t local_memory(cu *c, const cu_wave *w, const profile_event *e,
                             uint64_t now)
{
    uint32_t pair = w->simd / 2;
    uint64_t start = later(now, c->in_free[pair]), banks;

    c->in_free[pair] = start + e->in;
    banks = later(start, c->bank_free);
    c->bank_free = banks + e->bank;
    c->out_free[pair] = later(banks, c->out_free[pair]) + e->out;
    /* Conflicts come before the latency, not at the same time. */
    return later(later(c->in_free[pair], c->bank_free) + COUNT(LDS_LATENCY),
                 c->out_free[pair]);
}

/* ---- issue -------------------------------------------------------------- */

/* The clock from which the instruction could issue; `now` or before: now. */
static uint64_t blocked_until(const cu *c, cu_wave *w, const isa_row *row,
                              profile_unit unit, uint64_t now)
{
    uint64_t until = 0, queued;
    bool local = unit == UNIT_LDS || unit == UNIT_FLAT;
    bool vector = unit == UNIT_VMEM || unit == UNIT_FLAT;

    retire(&w->vm, now);
    retire(&w->lgkm, now);
    if (unit == UNIT_VALU) {
        until = c->simd[w->simd].valu_free;
    }
    if (local) {
        uint32_t pair = w->simd / 2;
        queued =
            later(c->bank_free, later(c->in_free[pair], c->out_free[pair]));
        until = queued > COUNT(LDS_QUEUE) ? queued - COUNT(LDS_QUEUE) : 0;
    }
    if (vector) {
        queued = c->ta_free;
        queued = queued > COUNT(TA_QUEUE) ? queued - COUNT(TA_QUEUE) : 0;
        until = later(until, later(queued, down_to(&w->vm, ISA_VM_MAX - 1)));
    }
    if (local || unit == UNIT_SMEM) {
        until = later(until, down_to(&w->lgkm, ISA_LGKM_MAX - 1));
    }
    if (row->op == ISA_s_waitcnt) {
        isa_wait wait = isa_wait_counts(row);
        if (wait.vm < ISA_VM_MAX) {
            until = later(until, down_to(&w->vm, wait.vm));
        }
        if (wait.lgkm < ISA_LGKM_MAX) {
            until = later(until, down_to(&w->lgkm, wait.lgkm));
        }
    }
    return until;
}

/* Clocks until the wave may issue again after an instruction of no unit. */
static uint32_t internal_clocks(const isa_row *row)
{
    uint32_t value = (uint32_t)row->offset & 0xffff;

    switch (row->op) {
    case ISA_s_nop:
        return COUNT(ISSUE) * ((value & 15) + 1);
    case ISA_s_sleep:
        return COUNT(ISSUE) + COUNT(SLEEP) * (value & 127);
    default:
        return COUNT(ISSUE);
    }
}

/* Puts the instruction on its unit; returns when the wave may go on. */
static uint64_t start_unit(cu *c, cu_wave *w, const profile_event *e,
                           const isa_row *row, const profile_cost *cost,
                           uint64_t now)
{
    bool counts = isa_ops[row->op].access != M_CACHE;

    switch (cost->unit) {
    case UNIT_VALU:
        c->simd[w->simd].valu_free = now + cost->clocks;
        break;
    case UNIT_SMEM:
        if (counts) {
            push(&w->lgkm, scalar_memory(c, w, e, cost->clocks, now));
        }
        break;
    case UNIT_LDS:
        push(&w->lgkm, local_memory(c, w, e, now));
        break;
    case UNIT_VMEM:
        if (counts) {
            push(&w->vm, vector_memory(c, w, e, now));
        }
        break;
    case UNIT_FLAT:
        push(&w->vm, vector_memory(c, w, e, now));
        push(&w->lgkm, e->in > 0 ? local_memory(c, w, e, now) : w->vm.last);
        break;
    case UNIT_BRANCH:
        return now + (e->taken ? COUNT(BRANCH_TAKEN) : COUNT(ISSUE));
    case UNIT_INTERNAL:
        return now + internal_clocks(row);
    default:
        break;
    }
    if (e->taken) { /* s_setpc, s_call */
        return now + COUNT(BRANCH_TAKEN);
    }
    return now + COUNT(ISSUE);
}

/* The kinds of which a turn issues one each, as bits; none for the rest. */
static uint32_t kind_bits(profile_unit unit)
{
    static const uint32_t bits[PROFILE_UNITS] = {
        [UNIT_VALU] = 1,    [UNIT_SALU] = 2,     [UNIT_SMEM] = 2,
        [UNIT_VMEM] = 4,    [UNIT_LDS] = 8,      [UNIT_FLAT] = 12,
        [UNIT_BRANCH] = 16, [UNIT_MESSAGE] = 32,
    };

    return bits[unit];
}

static void count_stall(cu *c, const cu_wave *w, uint32_t at, uint64_t stall)
{
    c->out->stall[at] += w->span.filler ? 0 : stall;
}

static void count_issue(cu *c, const cu_wave *w, uint32_t at, bool lds,
                        uint64_t stall)
{
    c->out->replayed++;
    if (!w->span.filler) {
        c->out->executed[at]++;
        c->out->instructions++;
        c->out->lds_wait += lds ? stall : 0;
    }
    count_stall(c, w, at, stall);
}

/* Tries to issue the wave's next instruction. */
static void try_issue(cu *c, cu_wave *w, uint32_t *taken, uint64_t now)
{
    const profile_event *e = &w->event[w->next];
    const isa_row *row = &c->rows[e->at];
    const profile_cost *cost = &c->cost[e->at - c->launch->low];
    uint64_t until = blocked_until(c, w, row, cost->unit, now);

    if (until > now || (*taken & kind_bits(cost->unit)) != 0) {
        w->ready = until > now ? until : now + COUNT(ISSUE);
        return;
    }
    *taken |= kind_bits(cost->unit);
    uint64_t stall = now - w->since;
    count_issue(c, w, e->at, cost->unit == UNIT_LDS, stall);
    if (row->op == ISA_s_waitcnt && stall > 0) {
        profile_span_add(c->out, &w->span, SPAN_WAIT, w->since, now);
    }
    w->ready = w->since = start_unit(c, w, e, row, cost, now);
    profile_span_add(c->out, &w->span, (uint8_t)cost->unit, now,
                     cost->unit == UNIT_VALU ? now + cost->clocks : w->ready);
    w->next++;
    if (row->op == ISA_s_barrier) {
        w->barrier = true;
        w->arrived = now;
    }
}

/* ---- workgroups --------------------------------------------------------- */

/* The first clock from `when` on at which a SIMD has its turn. */
static uint64_t turn_from(uint64_t when, uint32_t index)
{
    uint64_t period = COUNT(ISSUE), phase = index % period;

    return when <= phase
               ? phase
               : (when - phase + period - 1) / period * period + phase;
}

static void wake(cu *c, const cu_wave *w)
{
    simd *s = &c->simd[w->simd];
    uint64_t turn = turn_from(w->ready, w->simd);

    s->next = turn < s->next ? turn : s->next;
}

/* The SIMD with fewest waves. */
static uint32_t emptiest(const cu *c)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < c->simds; i++) {
        best = c->simd[i].waves < c->simd[best].waves ? i : best;
    }
    return best;
}

/* Puts the next traced workgroup into a free slot, if there is one. */
static void place(cu *c, uint32_t slot, uint64_t now)
{
    if (c->placed == c->wanted) {
        return;
    }
    size_t samples = c->launch->samples;
    const profile_trace *trace = c->launch->sampled[c->placed % samples];
    bool filler = c->placed++ >= samples;
    if (!filler) {
        c->out->groups++;
        c->out->truncated += trace->truncated;
    }
    c->alive[slot] = trace->waves;
    for (uint32_t i = 0; i < trace->waves; i++) {
        cu_wave *w = &c->waves[slot * c->group_waves + i];
        uint32_t index = emptiest(c);
        simd *s = &c->simd[index];
        *w = (cu_wave){
            .trace = trace,
            .event = trace->wave[i].event,
            .count = trace->wave[i].count,
            .index = i,
            .simd = index,
            .slot = slot,
            .ready = now,
            .since = now,
            .span = {.group = trace->index,
                     .wave = i,
                     .simd = index,
                     .filler = filler},
        };
        if (s->waves < MAX_SLOTS) {
            s->wave[s->waves++] = w;
        }
        wake(c, w);
    }
}

/* Lets the waves of a slot go on if all that have not ended are there. */
static void release(cu *c, uint32_t slot, uint64_t now)
{
    uint32_t there = 0;
    cu_wave *first = &c->waves[slot * c->group_waves];

    for (uint32_t i = 0; i < c->group_waves; i++) {
        there += first[i].barrier;
    }
    if (there == 0 || there < c->alive[slot]) {
        return;
    }
    for (uint32_t i = 0; i < c->group_waves; i++) {
        cu_wave *w = &first[i];
        if (w->barrier) {
            w->barrier = false;
            w->ready = w->since = now + COUNT(BARRIER);
            count_stall(c, w, w->event[w->next - 1].at, w->ready - w->arrived);
            profile_span_add(c->out, &w->span, SPAN_BARRIER, w->arrived,
                             w->ready);
            wake(c, w);
        }
    }
}

static void end_wave(cu *c, simd *s, uint32_t at, uint64_t now)
{
    cu_wave *w = s->wave[at];
    uint32_t slot = w->slot;

    profile_span_end(c->out, &w->span);
    c->end = later(c->end, later(now, later(w->vm.last, w->lgkm.last)));
    s->waves--;
    memmove(&s->wave[at], &s->wave[at + 1],
            (s->waves - at) * sizeof s->wave[0]);
    if (--c->alive[slot] == 0) {
        place(c, slot, now);
    } else {
        release(c, slot, now);
    }
}

/* One turn of a SIMD. */
static void turn(cu *c, uint32_t index, uint64_t now)
{
    simd *s = &c->simd[index];
    uint32_t taken = 0;

    s->next = UINT64_MAX;
    for (uint32_t i = 0; i < s->waves;) {
        cu_wave *w = s->wave[i];
        if (!w->barrier && w->ready <= now) {
            if (w->next == w->count) {
                end_wave(c, s, i, now);
                continue;
            }
            try_issue(c, w, &taken, now);
            if (w->barrier) {
                release(c, w->slot, now);
            }
        }
        if (!w->barrier) {
            w->ready = later(w->ready, now + 1);
            wake(c, w);
        }
        i++;
    }
}

static void run(cu *c)
{
    for (;;) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < c->simds; i++) {
            best = c->simd[i].next < c->simd[best].next ? i : best;
        }
        uint64_t now = c->simd[best].next;
        if (now == UINT64_MAX) {
            return;
        }
        turn(c, best, now);
    }
}

/* ---- set-up ------------------------------------------------------------- */

static bool set_up(cu *c)
{
    const profile_launch *launch = c->launch;
    const profile_occupancy *o = &launch->occupancy;
    size_t rows = launch->dispatch->code->count;
    double used =
        (double)o->groups < CONST(CUS) ? (double)o->groups : CONST(CUS);
    double clocks_per_ns = CONST(CLOCK_MHZ) / 1e3;

    c->rows = launch->dispatch->code->row;
    c->simds = COUNT(SIMDS);
    c->slots = o->resident;
    c->wanted = (launch->samples + c->slots - 1) / c->slots * c->slots;
    c->group_waves = o->group_waves;
    /* A lone compute unit is limited by its own port to L2. */
    c->l2_line = used / CONST(L2_CHANNELS);
    c->hbm_line =
        (double)LINE_BYTES * clocks_per_ns * used / CONST(HBM_REACHED);
    if (c->l2_line < CONST(L1_LINE_CLOCKS)) {
        c->l2_line = CONST(L1_LINE_CLOCKS);
    }
    c->cost = calloc(launch->high - launch->low + 1, sizeof *c->cost);
    c->waves = calloc((size_t)c->slots * c->group_waves, sizeof *c->waves);
    c->alive = calloc(c->slots, sizeof *c->alive);
    c->out->stall = calloc(rows + 1, sizeof *c->out->stall);
    c->out->executed = calloc(rows + 1, sizeof *c->out->executed);
    c->out->span = calloc(SPAN_LIMIT, sizeof *c->out->span);
    return c->cost != NULL && c->waves != NULL && c->alive != NULL &&
           c->out->stall != NULL && c->out->executed != NULL &&
           c->out->span != NULL;
}

bool profile_schedule_run(const profile_launch *launch,
                          profile_schedule *schedule)
{
    cu c = {.launch = launch, .out = schedule};

    memset(schedule, 0, sizeof *schedule);
    if (launch->samples == 0) {
        return true;
    }
    bool good = set_up(&c);
    if (good) {
        for (size_t i = launch->low; i < launch->high; i++) {
            c.cost[i - launch->low] = profile_cost_of(&c.rows[i]);
        }
        for (uint32_t i = 0; i < c.simds; i++) {
            c.simd[i].next = UINT64_MAX;
        }
        for (uint32_t i = 0; i < c.slots; i++) {
            place(&c, i, 0);
        }
        run(&c);
        schedule->cycles = c.end;
        profile_spans_sort(schedule);
    }
    free(c.cost);
    free(c.waves);
    free(c.alive);
    if (!good) {
        profile_schedule_free(schedule);
    }
    return good;
}

void profile_schedule_free(profile_schedule *schedule)
{
    free(schedule->stall);
    free(schedule->executed);
    free(schedule->span);
    memset(schedule, 0, sizeof *schedule);
}
