/* profile_model.h: the parts of the profiler (internal to profile*.c).
 *
 *   profile.c         counts what the executor does, thread by thread
 *   profile_trace.c   the memory lines and events of one workgroup
 *   profile_lds.c     banks and phases of the LDS
 *   profile_cost.c    unit, clocks and flops of an instruction; occupancy
 *   profile_cache.c   tags of L1, scalar cache and L2, traffic to memory
 *   profile_cycles.c  schedule of the traced workgroups on one CU
 *   profile_spans.c   its timeline
 *   profile_bounds.c  named counters, bounds, the estimate
 *   profile_json.c    the text of a launch
 *   profile_store.c   the launches not yet taken
 *   profile_table.h, profile_counters.h   constants and names
 *
 * Counts are sums over all workgroups and so do not depend on the number of
 * threads. The caches see the workgroups in the order of their index, those
 * that a GPU would run at the same time interleaved; so they do not either.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_PROFILE_MODEL_H
#define HIPSIM_PROFILE_MODEL_H

#include "profile.h"
#include "text.h"

#include <pthread.h>

/* ---- constants and names ------------------------------------------------ */

typedef enum profile_constant_id {
#define CONSTANT(name, ...) PROFILE_##name,
#include "profile_table.h"
    PROFILE_CONSTANTS
} profile_constant_id;

typedef struct profile_constant {
    const char *name;
    double value;
    const char *unit, *grade, *source;
} profile_constant;

extern const profile_constant profile_table[PROFILE_CONSTANTS];

#define CONST(name) (profile_table[PROFILE_##name].value)
#define COUNT(name) ((uint32_t)profile_table[PROFILE_##name].value)

typedef enum profile_counter_id {
#define COUNTER(name, ...) COUNTER_##name,
#include "profile_counters.h"
    PROFILE_COUNTERS
} profile_counter_id;

enum { KIND_EXACT, KIND_MODEL, KIND_ESTIMATE };
enum { CARD_GFX906, CARD_LATER };

typedef struct profile_counter {
    const char *name;
    int kind, card;
    const char *meaning;
} profile_counter;

extern const profile_counter profile_counters[PROFILE_COUNTERS];

/* ---- instructions ------------------------------------------------------- */

typedef enum profile_unit {
    UNIT_VALU,
    UNIT_SALU,
    UNIT_SMEM,
    UNIT_VMEM,
    UNIT_LDS,
    UNIT_FLAT,     /* decides per lane: vector memory and LDS */
    UNIT_BRANCH,   /* relative branches */
    UNIT_MESSAGE,  /* s_sendmsg, s_endpgm */
    UNIT_INTERNAL, /* waits, barriers, nops: no unit */
    PROFILE_UNITS
} profile_unit;

extern const char *const profile_unit_names[PROFILE_UNITS];

typedef struct profile_cost {
    profile_unit unit;
    uint32_t clocks;    /* VALU: of the SIMD; SMEM: issue */
    uint32_t slow;      /* VALU: the same if conversions are slow */
    uint32_t flops;     /* per lane */
    bool reads, writes; /* memory */
} profile_cost;

profile_cost profile_cost_of(const isa_row *row);

typedef struct profile_occupancy {
    uint32_t vgprs, sgprs, lds_bytes; /* as allocated */
    uint32_t group_waves;             /* of a full workgroup */
    uint32_t groups_per_cu;
    uint32_t waves_per_simd;
    uint32_t resident; /* groups on a CU at a time in this grid */
    uint64_t groups;   /* of the grid */
    double busiest;    /* share of the groups on the CU with most of them */
} profile_occupancy;

profile_occupancy profile_occupancy_of(const sim_dispatch *dispatch);

/* ---- LDS ---------------------------------------------------------------- */

/* Clocks in which the banks serve one access; *least: without conflicts. */
uint32_t profile_lds_clocks(const watch_access *access, uint32_t *least);

/* ---- traces ------------------------------------------------------------- */

/* One instruction of a traced wave. */
typedef struct profile_event {
    uint32_t at;     /* dword in the code */
    uint32_t memory; /* memory instruction of the trace, or NO_MEMORY */
    uint16_t bank;   /* clocks: LDS banks */
    uint16_t ta;     /* address unit */
    uint8_t in, out; /* LDS ports */
    uint8_t taken;   /* a branch that was */
} profile_event;

#define NO_MEMORY UINT32_MAX

typedef struct profile_events {
    profile_event *event;
    size_t count, capacity;
} profile_events;

/* What the lines of a trace are for. */
typedef enum line_kind {
    LINE_READ,
    LINE_BYPASS, /* a read that may not use L1: glc */
    LINE_WRITE,  /* of whole lines */
    LINE_MASKED, /* of some bytes */
    LINE_ATOMIC,
    LINE_SCALAR_READ,
    LINE_SCALAR_WRITE
} line_kind;

/* True if the word after the run's is the mask of the bytes written. */
static inline bool profile_line_has_mask(line_kind kind)
{
    return kind == LINE_MASKED || kind == LINE_ATOMIC ||
           kind == LINE_SCALAR_WRITE;
}

/* A run of lines in one word: line, count - 1, kind, first of instruction. */
typedef struct line_run {
    uint64_t line;
    uint32_t count;
    line_kind kind;
    bool first;
} line_run;

enum { LINE_BYTES = 64, LINE_SHIFT = 6, RUN_LINES = 64 };

uint64_t profile_run_pack(line_run run);
line_run profile_run_unpack(uint64_t word);

/* How many lines of one memory instruction came from where. */
typedef struct profile_reach {
    uint16_t lines, l2, hbm; /* all; those sent to L2; those from memory */
} profile_reach;

typedef struct profile_trace {
    uint64_t index; /* of the workgroup */
    uint64_t *word;
    size_t words, capacity;
    uint32_t memory; /* memory instructions so far */
    bool sampled;    /* has events and, after the caches, reach */
    bool truncated;
    uint32_t waves;
    size_t limit; /* events per wave */
    profile_events *wave;
    profile_reach *reach;
} profile_trace;

profile_trace *profile_trace_create(uint64_t index, uint32_t waves,
                                    bool sampled, size_t limit);
void profile_trace_free(profile_trace *trace); /* accepts NULL */
size_t profile_trace_bytes(const profile_trace *trace);

/* Each returns false if memory ran out. */
bool profile_trace_word(profile_trace *trace, uint64_t word);
bool profile_trace_event(profile_trace *trace, uint32_t which, size_t at);

/* ---- counting ----------------------------------------------------------- */

typedef struct profile_row {
    uint64_t count;    /* executions by a wave */
    uint64_t lanes;    /* active lanes, summed */
    uint64_t taken;    /* branches taken */
    uint64_t conflict; /* LDS conflict clocks */
} profile_row;

typedef struct profile_totals {
    uint64_t groups, waves;
    uint64_t largest; /* instructions of the longest workgroup */
    uint64_t lds_bank, lds_in, lds_out; /* clocks; ports of all pairs */
    uint64_t lds_serial; /* half clocks: the unit that is longest */
    uint64_t lds_conflict;
    uint64_t ta;
    uint64_t flat, flat_lds_only;
    uint64_t flat_lds_reads, flat_lds_writes;
} profile_totals;

/* The memory instruction in execution: its accesses are still being told. */
enum { OP_LINES = 512 };
typedef struct profile_op {
    bool open;
    const isa_row *row;
    uint32_t wave;
    size_t event; /* of the wave's events, or SIZE_MAX */
    uint32_t bank, in, out, conflict, ta;
    bool lds, other; /* lanes went there */
    line_kind kind;
    uint32_t lines;
    uint64_t line[OP_LINES], mask[OP_LINES];
} profile_op;

typedef struct profile_wave {
    size_t last, expected; /* rows: executed last, next if no branch */
} profile_wave;

/* One thread's part. */
struct sim_profile {
    struct profile_launch *launch;
    const isa_row *rows;
    profile_row *row; /* one per row of the code */
    size_t low, high; /* rows in use: [low, high) */
    profile_wave *wave;
    profile_totals totals;
    profile_trace *trace; /* of the running workgroup; NULL: no memory */
    profile_op op;
};
typedef struct sim_profile sim_profile;

/* Adds the lines that an access touches to the open instruction. */
void profile_op_access(sim_profile *p, wave *w, const watch_access *access);
void profile_op_range(sim_profile *p, uint64_t address, uint32_t bytes);
/* Ends the open instruction: totals, trace. */
void profile_op_close(sim_profile *p);

/* ---- caches ------------------------------------------------------------- */

typedef struct profile_traffic {
    uint64_t l1_accesses, l1_reads, l1_writes, l1_atomics; /* lines; to L2 */
    uint64_t scalar_hits, scalar_misses;
    uint64_t l2_hits, l2_misses;
    uint64_t ea_reads[2], ea_writes[2], ea_writes64[2];
} profile_traffic;

typedef struct profile_caches profile_caches;

profile_caches *profile_caches_create(void);
void profile_caches_free(profile_caches *caches); /* accepts NULL */

/* Runs the traces' lines through the caches, taking turns instruction by
 * instruction; trace i is on CU index % CUs. NULL entries are skipped. */
void profile_caches_run(profile_caches *caches, profile_trace **trace,
                        size_t count, profile_traffic *traffic);
/* Writes back what L2 holds. */
void profile_caches_flush(profile_caches *caches, profile_traffic *traffic);

/* ---- one launch --------------------------------------------------------- */

typedef struct profile_launch {
    const sim_dispatch *dispatch;
    profile_occupancy occupancy;
    uint64_t stride;      /* workgroups whose index it divides are traced */
    size_t limit;         /* events per traced wave */
    pthread_mutex_t lock; /* guards all below */
    bool incomplete;      /* memory ran out: counts lack something */
    profile_row *row;
    size_t low, high;
    profile_totals totals;
    profile_caches *caches;
    profile_traffic traffic;
    profile_trace **window; /* traces from index `base` on, not yet run */
    uint64_t base;
    size_t used, capacity; /* entries of the window */
    size_t bytes;          /* of the traces in it */
    profile_trace **sampled;
    size_t samples, sample_capacity;
} profile_launch;

/* Hands a finished workgroup's trace over; runs the caches when all of a
 * batch are there. Takes the lock. */
void profile_submit(profile_launch *launch, profile_trace *trace);
/* Runs what is left, whatever is missing. */
void profile_drain(profile_launch *launch);

/* ---- schedule ----------------------------------------------------------- */

typedef struct profile_span {
    uint64_t group;
    uint32_t wave, simd;
    uint8_t what; /* profile_unit, or SPAN_WAIT, SPAN_BARRIER */
    bool
        filler; /* of a workgroup that fills a slot: neither counted nor kept */
    uint64_t begin, end;
} profile_span;

enum { SPAN_WAIT = PROFILE_UNITS, SPAN_BARRIER };
enum { SPAN_LIMIT = 4000 };

typedef struct profile_schedule {
    uint64_t cycles;       /* of one CU, all that was replayed */
    uint64_t instructions; /* traced */
    uint64_t replayed;     /* the same and those that fill the last round */
    uint64_t groups, truncated;
    uint64_t lds_wait;  /* clocks that waves waited to issue to the LDS */
    uint64_t *stall;    /* per row: clocks waited before it issued */
    uint64_t *executed; /* per row: times in the traces */
    profile_span *span;
    size_t spans;
    uint64_t spans_until; /* the timeline is complete up to this clock */
} profile_schedule;

/* False: out of memory; the schedule is then empty. */
bool profile_schedule_run(const profile_launch *launch,
                          profile_schedule *schedule);
void profile_schedule_free(profile_schedule *schedule);

/* ---- results ------------------------------------------------------------ */

/* clang-format off */
typedef enum profile_bound_id {
    BOUND_VALU, BOUND_SALU, BOUND_LDS, BOUND_TA, BOUND_L1, BOUND_L2,
    BOUND_HBM, BOUND_WAVE, PROFILE_BOUNDS
} profile_bound_id;

typedef enum profile_derived_id {
    DERIVED_VALUBusy, DERIVED_VALUUtilization, DERIVED_SALUBusy,
    DERIVED_LDSBankConflict, DERIVED_ALUStalledByLDS, DERIVED_FETCH_SIZE,
    DERIVED_WRITE_SIZE, DERIVED_L2CacheHit, PROFILE_DERIVED
} profile_derived_id;
/* clang-format on */

typedef struct profile_result {
    double counter[PROFILE_COUNTERS];
    double derived[PROFILE_DERIVED];
    double bound[PROFILE_BOUNDS]; /* clocks of the launch */
    double valu_slow;             /* clocks with slow conversions */
    double lds_serial;            /* clocks, ports and banks not overlapped */
    double low, middle, high;     /* clocks */
    double schedule;              /* clocks; 0 without traces */
    double flops, hbm_bytes;
    uint64_t instructions;
    uint64_t units[PROFILE_UNITS];
} profile_result;

extern const char *const profile_bound_names[PROFILE_BOUNDS];
extern const char *const profile_derived_names[PROFILE_DERIVED];

void profile_evaluate(const profile_launch *launch,
                      const profile_schedule *schedule, profile_result *result);

/* Keeps the launch until it is taken. */
void profile_keep(const profile_launch *launch,
                  const profile_schedule *schedule,
                  const profile_result *result);

/* ---- text --------------------------------------------------------------- */

double profile_seconds(double clocks);

/* "key":value and then `after`. */
void profile_put_member(sim_text *out, const char *key, double value,
                        const char *after);
void profile_put_string(sim_text *out, const char *key, const char *value,
                        const char *after);
void profile_put_counters(sim_text *out,
                          const double counter[PROFILE_COUNTERS]);
void profile_put_device(sim_text *out); /* and the constants */
void profile_put_launch(sim_text *out, const profile_launch *launch,
                        const profile_schedule *schedule,
                        const profile_result *result);

#endif
