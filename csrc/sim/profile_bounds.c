/* profile_bounds.c: named counters, what bounds a launch, one estimate.
 *
 * A bound is how long one unit is busy at least, on the compute unit that has
 * most workgroups, if every other unit were infinitely fast. The estimate is
 * the longest of them, where vector ALU and LDS count as VALU + a x LDS: a is
 * fitted on the only two measured points there are (scripts/fit_overlap.py).
 * No launch takes less than its schedule. The estimate is a range, never a number: models like this one are off by 29 to
 * 60 % without a card.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "profile_model.h"

#include <string.h>

const char *const profile_bound_names[PROFILE_BOUNDS] = {
    "VALU", "SALU", "LDS", "TA", "L1", "L2", "HBM", "WAVE",
};

const char *const profile_derived_names[PROFILE_DERIVED] = {
    "VALUBusy",        "VALUUtilization", "SALUBusy",   "LDSBankConflict",
    "ALUStalledByLDS", "FETCH_SIZE",      "WRITE_SIZE", "L2CacheHit",
};

/* Sums over the rows of the code. */
typedef struct sums {
    uint64_t valu_clocks, valu_slow, thread_clocks;
    uint64_t reads[PROFILE_UNITS], writes[PROFILE_UNITS];
    uint64_t flat_reads, flat_writes; /* all of the FLAT encoding */
    uint64_t smem_clocks, taken, gds, messages;
} sums;

static double larger(double a, double b)
{
    return a > b ? a : b;
}

static sums add_rows(const profile_launch *launch, profile_result *r)
{
    const isa_row *rows = launch->dispatch->code->row;
    sums s = {0};

    for (size_t i = launch->low; i < launch->high; i++) {
        const profile_row *counts = &launch->row[i];
        if (counts->count == 0) {
            continue;
        }
        profile_cost cost = profile_cost_of(&rows[i]);
        r->units[cost.unit] += counts->count;
        r->instructions += counts->count;
        s.taken += counts->taken;
        if (cost.unit == UNIT_VALU) {
            s.valu_clocks += counts->count * cost.clocks;
            s.valu_slow += counts->count * cost.slow;
            s.thread_clocks += counts->lanes * cost.clocks;
            r->flops += (double)counts->lanes * cost.flops;
        } else if (cost.unit == UNIT_SMEM) {
            s.smem_clocks += counts->count * cost.clocks;
        }
        s.reads[cost.unit] += cost.reads ? counts->count : 0;
        s.writes[cost.unit] += cost.writes ? counts->count : 0;
        if (rows[i].issue == ISSUE_FLAT) {
            s.flat_reads += cost.reads ? counts->count : 0;
            s.flat_writes += cost.writes ? counts->count : 0;
        }
        s.gds += rows[i].gds && cost.unit == UNIT_LDS ? counts->count : 0;
        s.messages += rows[i].op == ISA_s_endpgm ? counts->count : 0;
    }
    return s;
}

/* ---- counters ----------------------------------------------------------- */

#define SET(name, value) (r->counter[COUNTER_##name] = (double)(value))
#define GET(name) (r->counter[COUNTER_##name])

static void count_instructions(const profile_launch *launch, const sums *s,
                               profile_result *r)
{
    const profile_totals *t = &launch->totals;

    SET(SQ_WAVES, t->waves);
    SET(SQ_INSTS_VALU, r->units[UNIT_VALU]);
    SET(SQ_INSTS_SALU, r->units[UNIT_SALU]);
    SET(SQ_INSTS_SMEM, r->units[UNIT_SMEM]);
    SET(SQ_INSTS_VMEM_RD,
        s->reads[UNIT_VMEM] + s->reads[UNIT_FLAT] - t->flat_lds_reads);
    SET(SQ_INSTS_VMEM_WR,
        s->writes[UNIT_VMEM] + s->writes[UNIT_FLAT] - t->flat_lds_writes);
    SET(SQ_INSTS_FLAT, t->flat);
    SET(SQ_INSTS_FLAT_LDS_ONLY, t->flat_lds_only);
    SET(SQ_INSTS_LDS, r->units[UNIT_LDS] - s->gds + t->flat_lds_only);
    SET(SQ_INSTS_GDS, s->gds);
    SET(SQ_INSTS_BRANCH, r->units[UNIT_BRANCH]);
    SET(SQ_INSTS_SENDMSG, r->units[UNIT_MESSAGE] + s->messages);
    SET(TA_FLAT_READ_WAVEFRONTS, s->flat_reads - t->flat_lds_reads);
    SET(TA_FLAT_WRITE_WAVEFRONTS, s->flat_writes - t->flat_lds_writes);
}

static void count_clocks(const profile_launch *launch, const sums *s,
                         profile_result *r)
{
    const profile_totals *t = &launch->totals;

    SET(SQ_ACTIVE_INST_VALU, s->valu_clocks / 4);
    SET(SQ_INST_CYCLES_SALU, r->units[UNIT_SALU] * COUNT(ISSUE) / 4);
    SET(SQ_THREAD_CYCLES_VALU, s->thread_clocks / 4);
    SET(SQ_LDS_BANK_CONFLICT, t->lds_conflict);
    SET(SQ_LDS_IDX_ACTIVE, t->lds_bank);
    SET(TA_TA_BUSY, t->ta);
}

static void count_traffic(const profile_traffic *t, profile_result *r)
{
    SET(TCP_TOTAL_CACHE_ACCESSES, t->l1_accesses);
    SET(TCP_TCC_READ_REQ, t->l1_reads);
    SET(TCP_TCC_WRITE_REQ, t->l1_writes);
    SET(TCP_TCC_ATOMIC_REQ, t->l1_atomics);
    SET(SQC_DCACHE_HITS, t->scalar_hits);
    SET(SQC_DCACHE_MISSES, t->scalar_misses);
    SET(TCC_HIT, t->l2_hits);
    SET(TCC_MISS, t->l2_misses);
    SET(TCC_EA_RDREQ, t->ea_reads[0]);
    SET(TCC_EA_WRREQ, t->ea_writes[0]);
    SET(TCC_EA_WRREQ_64B, t->ea_writes64[0]);
    SET(TCC_EA1_RDREQ, t->ea_reads[1]);
    SET(TCC_EA1_WRREQ, t->ea_writes[1]);
    SET(TCC_EA1_WRREQ_64B, t->ea_writes64[1]);
}

/* ---- bounds and the estimate -------------------------------------------- */

/* What the workgroups that ran are multiplied with for the whole grid. */
static double whole_grid(const profile_launch *launch)
{
    return (double)launch->occupancy.groups / (double)launch->totals.groups;
}

/* The part of the whole grid's work that the busiest compute unit has: most
 * workgroups, if they are alike, or the one that is longest. */
static double busiest_share(const profile_launch *launch,
                            const profile_result *r)
{
    double all = (double)r->instructions * whole_grid(launch);

    return larger(launch->occupancy.busiest,
                  (double)launch->totals.largest / all);
}

static void find_bounds(const profile_launch *launch, const sums *s,
                        profile_result *r)
{
    const profile_occupancy *o = &launch->occupancy;
    const profile_totals *t = &launch->totals;
    double scale = whole_grid(launch), share = busiest_share(launch, r) * scale;
    double ports = CONST(LDS_PAIRS);
    double waves = (double)o->resident * o->group_waves;
    double simds = waves < CONST(SIMDS) ? waves : CONST(SIMDS);
    double pairs = simds > 1 ? ports : 1;
    double requests = GET(TCP_TCC_READ_REQ) + GET(TCP_TCC_WRITE_REQ) +
                      GET(TCP_TCC_ATOMIC_REQ) + GET(SQC_DCACHE_MISSES);
    double bytes_per_clock = CONST(HBM_GBS) * 1e3 / CONST(CLOCK_MHZ);
    double lds = (double)t->lds_bank;

    lds = larger(lds, larger((double)t->lds_in, (double)t->lds_out) / pairs);
    r->bound[BOUND_VALU] = (double)s->valu_clocks * share / simds;
    r->valu_slow = (double)s->valu_slow * share / simds;
    r->bound[BOUND_SALU] =
        ((double)r->units[UNIT_SALU] + (double)s->smem_clocks / CONST(ISSUE)) *
        share;
    r->bound[BOUND_LDS] = lds * share;
    r->lds_serial = larger((double)t->lds_serial / pairs, lds) * share;
    r->bound[BOUND_TA] = (double)t->ta * share;
    r->bound[BOUND_L1] =
        GET(TCP_TOTAL_CACHE_ACCESSES) * CONST(L1_LINE_CLOCKS) * share;
    r->bound[BOUND_L2] = scale * requests / CONST(L2_CHANNELS);
    r->bound[BOUND_HBM] = scale * r->hbm_bytes / bytes_per_clock;
    r->bound[BOUND_WAVE] =
        ((double)r->instructions * CONST(ISSUE) +
         (double)s->taken * (CONST(BRANCH_TAKEN) - CONST(ISSUE))) *
        share / waves;
}

/* The formula knows no latency, the schedule does; both grow with the grid. */
static void make_estimate(profile_result *r)
{
    double longest = 0, spread = 1 + CONST(ERROR);
    double lds = CONST(OVERLAP) * r->lds_serial;
    double reached = CONST(HBM_GBS) / CONST(HBM_REACHED);

    for (unsigned i = 0; i < PROFILE_BOUNDS; i++) {
        longest = larger(longest, r->bound[i]);
    }
    r->middle = larger(longest, r->bound[BOUND_VALU] + lds);
    r->middle = larger(r->middle, r->bound[BOUND_HBM] * reached);
    r->middle = larger(r->middle, r->schedule);
    r->low = larger(longest, r->middle / spread);
    r->high = larger(r->middle, r->valu_slow + lds) * spread;
}

static double percent(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}

static void derive(profile_result *r)
{
    double cus = CONST(CUS), simds = cus * CONST(SIMDS);
    double active = GET(GRBM_GUI_ACTIVE);
    double kilo = 1024;

    r->derived[DERIVED_VALUBusy] =
        percent(4 * GET(SQ_ACTIVE_INST_VALU), simds * active);
    r->derived[DERIVED_VALUUtilization] =
        percent(GET(SQ_THREAD_CYCLES_VALU),
                GET(SQ_ACTIVE_INST_VALU) * (double)SIM_LANES);
    r->derived[DERIVED_SALUBusy] =
        percent(4 * GET(SQ_INST_CYCLES_SALU), simds * active);
    r->derived[DERIVED_LDSBankConflict] =
        percent(GET(SQ_LDS_BANK_CONFLICT), active * cus);
    r->derived[DERIVED_ALUStalledByLDS] =
        percent(4 * GET(SQ_WAIT_INST_LDS), GET(SQ_WAVES) * active);
    r->derived[DERIVED_FETCH_SIZE] =
        (64 * (GET(TCC_EA_RDREQ) + GET(TCC_EA1_RDREQ)) -
         32 * (GET(TCC_EA_RDREQ_32B) + GET(TCC_EA1_RDREQ_32B))) /
        kilo;
    r->derived[DERIVED_WRITE_SIZE] =
        (32 * (GET(TCC_EA_WRREQ) + GET(TCC_EA1_WRREQ)) +
         32 * (GET(TCC_EA_WRREQ_64B) + GET(TCC_EA1_WRREQ_64B))) /
        kilo;
    r->derived[DERIVED_L2CacheHit] =
        percent(GET(TCC_HIT), GET(TCC_HIT) + GET(TCC_MISS));
    r->hbm_bytes = kilo * (r->derived[DERIVED_FETCH_SIZE] +
                           r->derived[DERIVED_WRITE_SIZE]);
}

void profile_evaluate(const profile_launch *launch,
                      const profile_schedule *schedule, profile_result *r)
{
    memset(r, 0, sizeof *r);
    sums s = add_rows(launch, r);

    count_instructions(launch, &s, r);
    count_clocks(launch, &s, r);
    count_traffic(&launch->traffic, r);
    derive(r); /* the bytes, before there is a time */
    find_bounds(launch, &s, r);
    if (schedule->instructions > 0) {
        /* By instructions, since workgroups may differ in size. */
        double scale = (double)r->instructions / (double)schedule->instructions;
        double all = (double)r->instructions * whole_grid(launch);
        r->schedule = (double)schedule->cycles * all /
                      (double)schedule->replayed * busiest_share(launch, r);
        SET(SQ_WAIT_INST_LDS, (double)schedule->lds_wait * scale / 4);
    }
    make_estimate(r);
    SET(GRBM_COUNT, r->middle);
    SET(GRBM_GUI_ACTIVE, r->middle);
    derive(r);
}
