/* profile.c: counts what the executor does, thread by thread.
 *
 * A thread counts executions, lanes and branches per row of the code; names
 * and costs are worked out once at the launch's end. Memory instructions also
 * leave traces: profile_trace.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "profile_model.h"

#include <stdlib.h>
#include <string.h>

enum {
    EVENT_BUDGET = 4 << 20,  /* of all traced workgroups of a launch */
    WINDOW_BYTES = 256 << 20 /* of traces that wait for earlier ones */
};

/* ---- launches ----------------------------------------------------------- */

static void launch_free(profile_launch *launch)
{
    for (size_t i = 0; i < launch->used; i++) {
        profile_trace_free(launch->window[i]);
    }
    for (size_t i = 0; i < launch->samples; i++) {
        profile_trace_free(launch->sampled[i]);
    }
    free(launch->window);
    free(launch->sampled);
    free(launch->row);
    profile_caches_free(launch->caches);
    (void)pthread_mutex_destroy(&launch->lock);
    free(launch);
}

profile_launch *profile_begin(const sim_dispatch *dispatch, uint64_t sampled)
{
    profile_launch *launch = calloc(1, sizeof *launch);

    if (launch == NULL) {
        return NULL;
    }
    (void)pthread_mutex_init(&launch->lock, NULL);
    launch->dispatch = dispatch;
    launch->occupancy = profile_occupancy_of(dispatch);
    launch->row = calloc(dispatch->code->count + 1, sizeof *launch->row);
    launch->caches = profile_caches_create();
    launch->low = SIZE_MAX;
    if (sampled > 0) {
        /* An odd stride does not keep meeting the same place of a grid whose
         * sides are even. */
        uint64_t groups = sim_groups_to_run(dispatch);
        uint64_t traced = sampled < groups ? sampled : groups;
        launch->stride = ((groups + sampled - 1) / sampled) | 1;
        launch->limit =
            (size_t)(EVENT_BUDGET / traced / launch->occupancy.group_waves) + 1;
    }
    if (launch->row == NULL || launch->caches == NULL) {
        launch_free(launch);
        return NULL;
    }
    return launch;
}

void profile_finish(profile_launch *launch, bool complete)
{
    profile_schedule schedule;
    profile_result result;

    if (launch == NULL) {
        return;
    }
    if (complete) {
        profile_drain(launch);
        profile_caches_flush(launch->caches, &launch->traffic);
        if (!profile_schedule_run(launch, &schedule)) {
            launch->incomplete = true;
        }
        profile_evaluate(launch, &schedule, &result);
        profile_keep(launch, &schedule, &result);
        profile_schedule_free(&schedule);
    }
    launch_free(launch);
}

/* ---- traces in the order of their workgroups ---------------------------- */

/* Runs the first `count` entries of the window through the caches. */
static void run_batch(profile_launch *launch, size_t count)
{
    profile_caches_run(launch->caches, launch->window, count, &launch->traffic);
    for (size_t i = 0; i < count; i++) {
        profile_trace *trace = launch->window[i];
        if (trace == NULL) {
            continue;
        }
        launch->bytes -= profile_trace_bytes(trace);
        if (trace->sampled && launch->samples < launch->sample_capacity) {
            launch->sampled[launch->samples++] = trace;
        } else {
            profile_trace_free(trace);
        }
    }
    memmove(launch->window, launch->window + count,
            (launch->used - count) * sizeof launch->window[0]);
    launch->used -= count;
    launch->base += count;
}

/* Makes room for entry `at` of the window, and for one more sample. */
static bool reserve(profile_launch *launch, size_t at, bool sample)
{
    if (at >= launch->capacity) {
        size_t capacity = 2 * at + 64;
        profile_trace **grown =
            realloc(launch->window, capacity * sizeof(profile_trace *));
        if (grown == NULL) {
            return false;
        }
        launch->window = grown;
        launch->capacity = capacity;
    }
    if (sample) {
        profile_trace **grown =
            realloc(launch->sampled,
                    (launch->sample_capacity + 1) * sizeof(profile_trace *));
        if (grown == NULL) {
            return false;
        }
        launch->sampled = grown;
        launch->sample_capacity++;
    }
    return true;
}

/* Entries of the next batch: what the GPU would run at a time. */
static size_t batch_size(const profile_launch *launch)
{
    size_t places = (size_t)launch->occupancy.groups_per_cu * COUNT(CUS);
    uint64_t left = launch->occupancy.groups - launch->base;

    return left < places ? (size_t)left : places;
}

void profile_submit(profile_launch *launch, profile_trace *trace)
{
    (void)pthread_mutex_lock(&launch->lock);
    size_t at = (size_t)(trace->index - launch->base);
    if (!reserve(launch, at, trace->sampled)) {
        launch->incomplete = true;
        profile_trace_free(trace);
        (void)pthread_mutex_unlock(&launch->lock);
        return;
    }
    while (launch->used <= at) {
        launch->window[launch->used++] = NULL;
    }
    launch->window[at] = trace;
    launch->bytes += profile_trace_bytes(trace);
    for (;;) {
        size_t batch = batch_size(launch), there = 0;
        while (there < batch && there < launch->used &&
               launch->window[there] != NULL) {
            there++;
        }
        if (there > 0 && (there == batch || launch->bytes > WINDOW_BYTES)) {
            run_batch(launch, there);
        } else {
            break;
        }
    }
    (void)pthread_mutex_unlock(&launch->lock);
}

void profile_drain(profile_launch *launch)
{
    while (launch->used > 0) {
        size_t batch = batch_size(launch);
        run_batch(launch, batch < launch->used ? batch : launch->used);
    }
}

/* ---- threads ------------------------------------------------------------ */

bool profile_create(sim_group *group)
{
    const sim_dispatch *dispatch = group->dispatch;
    sim_profile *p = calloc(1, sizeof *p);

    if (p == NULL) {
        return false;
    }
    p->launch = dispatch->profile;
    p->rows = dispatch->code->row;
    p->row = calloc(dispatch->code->count + 1, sizeof *p->row);
    p->wave = calloc(group->wave_count, sizeof *p->wave);
    p->low = SIZE_MAX;
    group->profile = p;
    if (p->row == NULL || p->wave == NULL) {
        profile_free(group);
        return false;
    }
    return true;
}

static void add_totals(profile_totals *to, const profile_totals *from)
{
    to->groups += from->groups;
    to->waves += from->waves;
    to->largest = from->largest > to->largest ? from->largest : to->largest;
    to->lds_bank += from->lds_bank;
    to->lds_in += from->lds_in;
    to->lds_out += from->lds_out;
    to->lds_serial += from->lds_serial;
    to->lds_conflict += from->lds_conflict;
    to->ta += from->ta;
    to->flat += from->flat;
    to->flat_lds_only += from->flat_lds_only;
    to->flat_lds_reads += from->flat_lds_reads;
    to->flat_lds_writes += from->flat_lds_writes;
}

void profile_free(sim_group *group)
{
    sim_profile *p = group->profile;

    if (p == NULL) {
        return;
    }
    profile_launch *launch = p->launch;
    (void)pthread_mutex_lock(&launch->lock);
    for (size_t i = p->low; i < p->high; i++) {
        launch->row[i].count += p->row[i].count;
        launch->row[i].lanes += p->row[i].lanes;
        launch->row[i].taken += p->row[i].taken;
        launch->row[i].conflict += p->row[i].conflict;
    }
    launch->low = p->low < launch->low ? p->low : launch->low;
    launch->high = p->high > launch->high ? p->high : launch->high;
    add_totals(&launch->totals, &p->totals);
    (void)pthread_mutex_unlock(&launch->lock);
    profile_trace_free(p->trace);
    free(p->row);
    free(p->wave);
    free(p);
    group->profile = NULL;
}

/* ---- what the executor tells -------------------------------------------- */

void profile_start(sim_group *group)
{
    sim_profile *p = group->profile;
    uint64_t index = group->order;
    uint64_t stride = p->launch->stride;

    for (uint32_t i = 0; i < group->active; i++) {
        p->wave[i] = (profile_wave){.expected = group->waves[i].pc};
    }
    p->op.open = false;
    p->totals.groups++;
    p->totals.waves += group->active;
    p->trace = profile_trace_create(index, group->active,
                                    stride > 0 && index % stride == 0,
                                    p->launch->limit);
}

static void memory_ran_out(profile_launch *launch)
{
    (void)pthread_mutex_lock(&launch->lock);
    launch->incomplete = true;
    (void)pthread_mutex_unlock(&launch->lock);
}

void profile_end(sim_group *group, bool complete)
{
    sim_profile *p = group->profile;

    if (p->op.open) {
        profile_op_close(p);
    }
    if (group->executed > p->totals.largest) {
        p->totals.largest = group->executed;
    }
    if (p->trace == NULL) {
        memory_ran_out(p->launch);
    } else if (complete) {
        profile_submit(p->launch, p->trace);
    } else {
        profile_trace_free(p->trace);
    }
    p->trace = NULL;
}

/* LDS port clocks that do not depend on addresses: those are sent first, and
 * lane exchanges send and return one dword per lane. */
static void open_lds(profile_op *op, const isa_info *info)
{
    uint32_t dword = SIM_LANES * 4 / COUNT(LDS_PORT);

    switch (info->access) {
    case M_NOP:
        return;
    case M_SWIZZLE:
        op->in = dword;
        break;
    case M_PERMUTE:
    case M_BPERMUTE:
        op->in = COUNT(LDS_ADDRESS) + dword;
        break;
    default:
        op->in = COUNT(LDS_ADDRESS);
        return;
    }
    op->out = dword;
    op->bank = SIM_LANES / COUNT(LDS_BANKS);
}

static void open_op(sim_profile *p, const wave *w, const isa_row *row,
                    size_t event)
{
    const isa_info *info = &isa_ops[row->op];
    profile_op *op = &p->op;
    bool store = isa_is_store(info);

    op->open = true;
    op->row = row;
    op->wave = w->index;
    op->event = event;
    op->bank = op->in = op->out = op->conflict = op->ta = 0;
    op->lds = op->other = false;
    op->lines = 0;
    if (row->issue == ISSUE_SMEM) {
        op->kind = store ? LINE_SCALAR_WRITE : LINE_SCALAR_READ;
    } else {
        op->kind = info->access == M_ATOMIC ? LINE_ATOMIC
                   : store                  ? LINE_WRITE
                   : row->glc               ? LINE_BYPASS
                                            : LINE_READ;
    }
    if (row->issue == ISSUE_DS) {
        open_lds(op, info);
    }
}

void profile_issue(wave *w, const isa_row *row)
{
    sim_profile *p = w->group->profile;
    profile_wave *pw = &p->wave[w->index];
    size_t at = (size_t)(row - p->rows), event = SIZE_MAX;
    profile_row *counts = &p->row[at];

    if (p->op.open) {
        profile_op_close(p);
    }
    p->low = at < p->low ? at : p->low;
    p->high = at >= p->high ? at + 1 : p->high;
    counts->count++;
    counts->lanes += (uint64_t)__builtin_popcountll(exec_mask(w));
    bool taken = at != pw->expected;
    if (taken) {
        p->row[pw->last].taken++;
    }
    pw->last = at;
    pw->expected = w->pc;
    if (p->trace != NULL && p->trace->sampled) {
        profile_events *events = &p->trace->wave[w->index];
        size_t before = events->count;
        if (taken && before > 0 && before < p->trace->limit) {
            events->event[before - 1].taken = 1;
        }
        if (!profile_trace_event(p->trace, w->index, at)) {
            profile_trace_free(p->trace);
            p->trace = NULL;
        } else if (events->count > before) {
            event = before;
        }
    }
    if (row->issue >= ISSUE_SMEM && row->issue != ISSUE_VALU) {
        open_op(p, w, row, event);
    }
}

/* LDS clocks of one access of a DS or flat instruction. */
static void lds_access(sim_profile *p, const isa_row *row,
                       const watch_access *access)
{
    const isa_info *info = &isa_ops[row->op];
    profile_op *op = &p->op;
    uint32_t port = COUNT(LDS_PORT), least;
    uint32_t dwords = (access->bytes + 3) / 4;
    uint32_t data = SIM_LANES * 4 * dwords / port;
    uint32_t clocks = profile_lds_clocks(access, &least);

    op->lds = true;
    op->bank += clocks;
    op->conflict += clocks - least;
    p->row[row - p->rows].conflict += clocks - least;
    if (row->issue != ISSUE_DS) {
        op->in += COUNT(LDS_ADDRESS);
    }
    if ((access->kind & SIM_WRITE) != 0) {
        op->in += (info->flags & ISA_TWO_DATA) != 0 ? 2 * data : data;
    }
    if (access->kind == SIM_READ || (info->flags & ISA_RETURN) != 0 ||
        (info->access == M_ATOMIC && row->glc != 0)) {
        op->out += data;
    }
}

void profile_access(wave *w, const isa_row *row, const watch_access *access)
{
    sim_profile *p = w->group->profile;

    if (access->space == SPACE_LDS) {
        lds_access(p, row, access);
    } else if (access->lanes != 0) {
        profile_op_access(p, w, access);
    }
}

void profile_scalar(wave *w, uint64_t address, uint32_t bytes)
{
    profile_op_range(w->group->profile, address, bytes);
}
