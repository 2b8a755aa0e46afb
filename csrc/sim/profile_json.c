/* profile_json.c: profiled launches as JSON text.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "profile_model.h"

#include <stdio.h>

/* ---- pieces ------------------------------------------------------------- */

/* The host program's locale may print a decimal comma. */
static void put_number(sim_text *out, double value)
{
    char text[40];

    (void)snprintf(text, sizeof text, "%.15g", value);
    for (char *c = text; *c != '\0'; c++) {
        *c = *c == ',' ? '.' : *c;
    }
    sim_text_add(out, text);
}

static void put_key(sim_text *out, const char *key)
{
    sim_text_string(out, key);
    sim_text_add(out, ":");
}

void profile_put_member(sim_text *out, const char *key, double value,
                        const char *after)
{
    put_key(out, key);
    put_number(out, value);
    sim_text_add(out, after);
}

void profile_put_string(sim_text *out, const char *key, const char *value,
                        const char *after)
{
    put_key(out, key);
    sim_text_string(out, value);
    sim_text_add(out, after);
}

double profile_seconds(double clocks)
{
    return clocks / (CONST(CLOCK_MHZ) * 1e6);
}

/* ---- one launch --------------------------------------------------------- */

void profile_put_counters(sim_text *out, const double counter[PROFILE_COUNTERS])
{
    put_key(out, "counters");
    for (unsigned i = 0; i < PROFILE_COUNTERS; i++) {
        sim_text_add(out, i == 0 ? "{" : ",");
        profile_put_member(out, profile_counters[i].name, counter[i], "");
    }
    sim_text_add(out, "}");
}

/* Names of the counters of one kind or of one set of cards. */
static void put_names(sim_text *out, const char *key, int kind, int card)
{
    bool first = true;

    put_key(out, key);
    sim_text_add(out, "[");
    for (unsigned i = 0; i < PROFILE_COUNTERS; i++) {
        const profile_counter *counter = &profile_counters[i];
        if (counter->kind == kind || counter->card == card) {
            sim_text_add(out, first ? "" : ",");
            sim_text_string(out, counter->name);
            first = false;
        }
    }
    sim_text_add(out, "],");
}

static void put_derived(sim_text *out, const profile_result *result)
{
    put_key(out, "derived");
    for (unsigned i = 0; i < PROFILE_DERIVED; i++) {
        sim_text_add(out, i == 0 ? "{" : ",");
        profile_put_member(out, profile_derived_names[i], result->derived[i],
                           "");
    }
    sim_text_add(out, "}");
}

static void put_bounds(sim_text *out, const profile_result *result)
{
    unsigned order[PROFILE_BOUNDS];

    for (unsigned i = 0; i < PROFILE_BOUNDS; i++) {
        unsigned k = i;
        for (; k > 0 && result->bound[order[k - 1]] < result->bound[i]; k--) {
            order[k] = order[k - 1];
        }
        order[k] = i;
    }
    double most = result->bound[order[0]];
    put_key(out, "bounds");
    for (unsigned i = 0; i < PROFILE_BOUNDS; i++) {
        double clocks = result->bound[order[i]];
        sim_text_add(out, i == 0 ? "[{" : ",{");
        profile_put_string(out, "unit", profile_bound_names[order[i]], ",");
        profile_put_member(out, "cycles", clocks, ",");
        profile_put_member(out, "seconds", profile_seconds(clocks), ",");
        profile_put_member(out, "share", most > 0 ? clocks / most : 0, "}");
    }
    sim_text_add(out, "]");
}

static void put_estimate(sim_text *out, const profile_result *r)
{
    put_key(out, "estimate");
    sim_text_add(out, "{");
    put_key(out, "cycles");
    sim_text_add(out, "{");
    profile_put_member(out, "low", r->low, ",");
    profile_put_member(out, "middle", r->middle, ",");
    profile_put_member(out, "high", r->high, "},");
    put_key(out, "seconds");
    sim_text_add(out, "{");
    profile_put_member(out, "low", profile_seconds(r->low), ",");
    profile_put_member(out, "middle", profile_seconds(r->middle), ",");
    profile_put_member(out, "high", profile_seconds(r->high), "},");
    profile_put_member(out, "error", CONST(ERROR), ",");
    profile_put_member(out, "overlap", CONST(OVERLAP), ",");
    profile_put_member(out, "lds_cycles", r->lds_serial, ",");
    profile_put_member(out, "valu_cycles_slow_conversions", r->valu_slow, "}");
}

static void put_instructions(sim_text *out, const profile_launch *launch,
                             const profile_schedule *schedule)
{
    const sim_dispatch *dispatch = launch->dispatch;
    int64_t entry = (int64_t)(dispatch->entry - dispatch->code->address);
    bool first = true;

    put_key(out, "instructions");
    sim_text_add(out, "[");
    for (size_t i = launch->low; i < launch->high; i++) {
        const profile_row *row = &launch->row[i];
        if (row->count == 0) {
            continue;
        }
        sim_text_format(out,
                        "%s{\"offset\":%lld,\"count\":%llu,"
                        "\"lds_conflict_cycles\":%llu,",
                        first ? "" : ",", (long long)(4 * (int64_t)i - entry),
                        (unsigned long long)row->count,
                        (unsigned long long)row->conflict);
        if (schedule->stall != NULL) {
            sim_text_format(out, "\"stall_cycles\":%llu,\"traced\":%llu,",
                            (unsigned long long)schedule->stall[i],
                            (unsigned long long)schedule->executed[i]);
        } else {
            sim_text_add(out, "\"stall_cycles\":0,\"traced\":0,");
        }
        profile_put_member(out, "lanes",
                           (double)row->lanes / (double)row->count, "}");
        first = false;
    }
    sim_text_add(out, "]");
}

static const char *span_name(unsigned what)
{
    return what == SPAN_WAIT      ? "wait"
           : what == SPAN_BARRIER ? "barrier"
                                  : profile_unit_names[what];
}

/* Spans come sorted by workgroup and wave. */
static void put_timeline(sim_text *out, const profile_schedule *schedule)
{
    const profile_span *before = NULL;

    put_key(out, "timeline");
    sim_text_add(out, "[");
    for (size_t i = 0; i < schedule->spans; i++) {
        const profile_span *s = &schedule->span[i];
        bool same = before != NULL && before->group == s->group &&
                    before->wave == s->wave;
        if (!same) {
            sim_text_format(out,
                            "%s{\"simd\":%u,\"group\":%llu,\"wave\":%u,"
                            "\"events\":[",
                            before != NULL ? "]}," : "", s->simd,
                            (unsigned long long)s->group, s->wave);
        }
        sim_text_format(out, "%s[\"%s\",%llu,%llu]", same ? "," : "",
                        span_name(s->what), (unsigned long long)s->begin,
                        (unsigned long long)s->end);
        before = s;
    }
    sim_text_add(out, before != NULL ? "]}]" : "]");
}

static void put_shape(sim_text *out, const profile_launch *launch)
{
    const sim_dispatch *d = launch->dispatch;
    const profile_occupancy *o = &launch->occupancy;

    profile_put_string(out, "kernel", d->kernel, ",");
    put_key(out, "code_hash");
    sim_text_hash(out, (const void *)(uintptr_t)d->entry,
                  (size_t)d->code_bytes);
    sim_text_add(out, ",");
    sim_text_format(out,
                    "\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],"
                    "\"lds_bytes\":%u,\"vgprs\":%u,\"sgprs\":%u,"
                    "\"waves_per_simd\":%u,\"groups_per_cu\":%u,"
                    "\"groups_total\":%llu,\"groups_executed\":%llu,",
                    d->groups[0], d->groups[1], d->groups[2], d->block[0],
                    d->block[1], d->block[2], d->lds_bytes, o->vgprs, o->sgprs,
                    o->waves_per_simd, o->groups_per_cu,
                    (unsigned long long)o->groups,
                    (unsigned long long)launch->totals.groups);
}

static void put_schedule(sim_text *out, const profile_launch *launch,
                         const profile_schedule *schedule,
                         const profile_result *result)
{
    sim_text_format(out,
                    "\"groups_traced\":%llu,\"groups_traced_in_part\":%llu,"
                    "\"instructions_traced\":%llu,\"incomplete\":%s,",
                    (unsigned long long)schedule->groups,
                    (unsigned long long)schedule->truncated,
                    (unsigned long long)schedule->instructions,
                    launch->incomplete ? "true" : "false");
    put_key(out, "schedule");
    sim_text_add(out, "{");
    profile_put_member(out, "cu_cycles", (double)schedule->cycles, ",");
    profile_put_member(out, "cycles", result->schedule, ",");
    profile_put_member(out, "timeline_until", (double)schedule->spans_until,
                       "},");
}

void profile_put_device(sim_text *out)
{
    sim_text_add(out, "\"device\":{\"name\":\"gfx906 (simulated)\",");
    profile_put_member(out, "cus", CONST(CUS), ",");
    profile_put_member(out, "simds_per_cu", CONST(SIMDS), ",");
    profile_put_member(out, "clock_mhz", CONST(CLOCK_MHZ), ",");
    profile_put_member(out, "peak_dot2_tflops", CONST(PEAK_DOT2), ",");
    profile_put_member(out, "hbm_gbs", CONST(HBM_GBS), ",");
    profile_put_member(out, "hbm_reached_gbs", CONST(HBM_REACHED), "},");
    put_key(out, "constants");
    for (unsigned i = 0; i < PROFILE_CONSTANTS; i++) {
        const profile_constant *c = &profile_table[i];
        sim_text_add(out, i == 0 ? "[{" : ",{");
        profile_put_string(out, "name", c->name, ",");
        profile_put_member(out, "value", c->value, ",");
        profile_put_string(out, "unit", c->unit, ",");
        profile_put_string(out, "source", c->source, ",");
        profile_put_string(out, "grade", c->grade, "}");
    }
    sim_text_add(out, "],");
}

void profile_put_launch(sim_text *out, const profile_launch *launch,
                        const profile_schedule *schedule,
                        const profile_result *result)
{
    sim_text_add(out, "{");
    put_shape(out, launch);
    put_schedule(out, launch, schedule, result);
    profile_put_member(out, "wave_instructions", (double)result->instructions,
                       ",");
    profile_put_member(out, "flops", result->flops, ",");
    profile_put_member(out, "hbm_bytes", result->hbm_bytes, ",");
    put_key(out, "units");
    for (unsigned i = 0; i < PROFILE_UNITS; i++) {
        sim_text_add(out, i == 0 ? "{" : ",");
        profile_put_member(out, profile_unit_names[i], (double)result->units[i],
                           "");
    }
    sim_text_add(out, "},");
    profile_put_counters(out, result->counter);
    sim_text_add(out, ",");
    put_names(out, "estimated", KIND_ESTIMATE, -1);
    put_names(out, "modelled", KIND_MODEL, -1);
    put_names(out, "not_on_gfx906", -1, CARD_LATER);
    put_derived(out, result);
    sim_text_add(out, ",");
    put_bounds(out, result);
    sim_text_add(out, ",");
    put_estimate(out, result);
    sim_text_add(out, ",");
    put_instructions(out, launch, schedule);
    sim_text_add(out, ",");
    put_timeline(out, schedule);
    sim_text_add(out, "}");
}
