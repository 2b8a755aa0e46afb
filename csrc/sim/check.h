/* check.h: check level 2, the sanitizer (internal).
 *
 * The executor makes every access complete at once and every register hold
 * something. Level 2 keeps beside it what a GPU would not do for the program:
 *
 *   check.c            one workgroup under check, reports
 *   check_undefined.c  bits that were never written, where they matter
 *   check_spread.c     how they pass from registers to registers
 *   check_bits.c       the same for one operation
 *   check_origin.c     where they come from, for the reports
 *   check_waits.c      results that no s_waitcnt has waited for
 *   check_hazards.c    wait states that the program must insert
 *   check_bytes.c      bytes of LDS and scratch that were never written
 *   check_lds.c        LDS: races between waves
 *   check_global.c     global memory: elements of tensors, races between
 *                      workgroups
 *
 * The first finding stops the launch as a fault, like an illegal address.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_CHECK_H
#define HIPSIM_CHECK_H

#include "exec.h"
#include "operands.h"

enum {
    CHECK_ROWS = 256, /* a kernel is a small part of the code that it is in */
    CHECK_TRAIL = 8,  /* instructions of a wave that a report lists */
    CHECK_PLACE = 96  /* characters of a place in the code */
};

/* Registers as a set of bits: scalar codes 0..127, SCC and vector ones. */
typedef struct check_set {
    uint64_t scalar[3], vector[SIM_VGPRS / 64];
} check_set;

/* A row with what the checks ask about it, made when it first runs. Most
 * instructions are none of their business, and `named` and the flags say so. */
typedef struct check_row {
    bool ready;
    bool dpp;
    bool hazards; /* check_hazards_sources() */
    bool special; /* check_hazards_special() */
    bool notes;   /* check_hazards_notes() */
    bool scalars; /* names a scalar register */
    operands uses;
    check_set named; /* all of these */
} check_row;

/* A load, store or LDS access that may not be complete. */
typedef struct check_pending {
    size_t pc;      /* row index */
    uint16_t first; /* registers that its result goes to, */
    uint8_t count;  /* none for a store */
    uint8_t slot;   /* LDS: its accesses among the wave's recent ones */
    uint8_t slots;
    bool vm, lgkm, flat;
} check_pending;

/* One LDS access of a wave, kept while it may still be under way. */
typedef struct check_lds_access {
    uint64_t lanes;
    uint32_t at[SIM_LANES];
    uint32_t bytes, kind;
} check_lds_access;

enum { CHECK_LDS_SLOTS = 64, CHECK_QUEUE = 160 };

/* Where a register's undefined bits come from. */
typedef enum check_source {
    SOURCE_REGISTER, /* `number`, never written */
    SOURCE_LDS,      /* read at `pc` from LDS offset `number` */
    SOURCE_SCRATCH,  /* read at `pc` from the lane's private byte `number` */
    SOURCE_MEMORY    /* read at `pc`, wider than the tensor's element */
} check_source;

typedef struct check_origin {
    uint32_t pc, number;
    check_source source;
} check_origin;

typedef struct check_wave {
    /* undefined bits of each register, as the registers themselves */
    uint32_t *vector;                 /* 64 per VGPR */
    uint64_t any[SIM_VGPRS / 64];     /* VGPRs with an undefined bit */
    uint32_t scalar[OPERAND_SCALARS]; /* SCC: 0 or 1 */
    check_origin vector_origin[SIM_VGPRS], scalar_origin[OPERAND_SCALARS];
    /* waits */
    check_pending queue[CHECK_QUEUE]; /* oldest first */
    unsigned queued;
    check_set vm, lds, flat, smem; /* results under way */
    check_set any_way;             /* the union of these */
    size_t smem_pc[OPERAND_SCALARS];
    check_lds_access recent[CHECK_LDS_SLOTS];
    unsigned next_slot;
    /* hazards: the wait state at which something was last done */
    uint32_t now;
    uint32_t valu_vector[SIM_VGPRS], valu_scalar[OPERAND_SCALARS];
    uint32_t valu_exec, salu_m0, setreg[64];
    uint32_t wide_store;
    uint16_t wide_first, wide_count;
    /* barriers */
    uint64_t initial; /* lanes that exist */
    uint64_t missed;  /* lanes that were off at a barrier */
    size_t missed_pc;
    /* reports */
    uint32_t trail[CHECK_TRAIL]; /* row indices, a ring */
    unsigned trail_next;
} check_wave;

/* Of each dword of LDS, who accessed its four bytes in this epoch: 0 nobody,
 * else wave + 1; see check_lds.c. */
typedef struct check_lds_word {
    uint32_t epoch;
    uint32_t writers, readers;
    uint32_t write_pc, read_pc;
} check_lds_word;

typedef struct sim_check {
    check_wave *wave;
    check_row **rows; /* of the code, CHECK_ROWS each; NULL: not needed yet */
    check_row spare;  /* where there was no memory for them */
    uint32_t *vector;
    /* LDS */
    uint8_t *lds_undefined; /* bits, byte by byte */
    check_lds_word *lds_word;
    uint32_t epoch;
    /* scratch, in the layout of the scratch itself */
    uint8_t *scratch_undefined;
    /* global memory */
    sim_region run[2];   /* elements that were read, and written, last */
    sim_region closed;   /* a region that nobody may write */
    uint32_t group_code; /* this workgroup among the races' marks */
    struct race_page *page[2];
    uint64_t page_number[2];
} sim_check;

bool check_create(sim_group *g); /* false: out of memory */
void check_free(sim_group *g);
void check_start(sim_group *g);
bool check_barrier(sim_group *g);
void check_trail(const wave *w); /* adds the wave's last instructions */
bool check_issue(wave *w, const isa_row *row);
bool check_access(wave *w, const isa_row *row, const watch_access *access);
bool check_scalar(wave *w, uint64_t address, uint32_t bytes, uint32_t kind);

/* ---- between the check_*.c --------------------------------------------- */

static inline check_wave *check_of(const wave *w)
{
    return &w->group->check->wave[w->index];
}

/* Row index of the instruction in execution. */
static inline size_t check_pc(const wave *w)
{
    return (size_t)(w->row - w->group->dispatch->code->row);
}

/* Distance of a row from the kernel's entry in bytes, for reports. */
uint64_t check_offset(const wave *w, size_t pc);

/* "pc 0x1c (file.hip:12)" of a row. */
const char *check_place(const wave *w, size_t pc, char *text, size_t size);

/* Origins: at the start of a wave; what a load has brought in; the one of an
 * instruction's first undefined source (false: it has none), which its results
 * then get. */
void check_origin_start(check_wave *c);
void check_origin_set(wave *w, unsigned code, check_source source,
                      uint64_t number);
bool check_origin_take(check_wave *c, const check_row *facts,
                       check_origin *origin);
void check_origin_give(check_wave *c, const check_row *facts,
                       const check_origin *origin);
/* Register `code`, as in `operand`, has undefined bits that matter; false. */
bool check_report_undefined(wave *w, unsigned code, unsigned lane_index,
                            const char *what);

/* Adds to the report who has been at the dwords of LDS around `address`. */
void check_lds_map(const wave *w, uint32_t address);

/* Records a finding; always false. */
bool check_report(wave *w, sim_fault_kind kind, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The same with the place of a lane's access. */
bool check_report_at(wave *w, sim_fault_kind kind, unsigned lane_index,
                     uint64_t address, uint32_t bytes, const char *format, ...)
    __attribute__((format(printf, 6, 7)));

/* True for a store that leaves the lane's bytes at `memory` as they are: no
 * other wave can tell whether it has happened. */
bool check_silent(const wave *w, const isa_row *row, const watch_access *access,
                  unsigned lane_index, const void *memory);

/* Undefined bits of VGPR `reg`, lane by lane. */
static inline uint32_t *check_vector(check_wave *c, unsigned reg)
{
    return c->vector + (size_t)reg * SIM_LANES;
}

static inline bool check_any(const check_wave *c, unsigned reg)
{
    return (c->any[reg / 64] >> reg % 64 & 1) != 0;
}

/* Whether a register, by its code in `operand`, has an undefined bit. */
static inline bool check_bad(const check_wave *c, unsigned code)
{
    return code < SRC_VGPR ? c->scalar[code] != 0
                           : check_any(c, code - SRC_VGPR);
}

/* Looks again whether a VGPR has an undefined bit. */
void check_refresh(check_wave *c, unsigned reg);

void check_undefined_start(wave *w);
/* Sources that must be defined where they are used. */
bool check_undefined(wave *w, const isa_row *row, const check_row *facts);
/* False if an active lane would store or hand on an undefined bit. */
bool check_defined_data(wave *w, const isa_row *row, unsigned reg,
                        unsigned count, uint64_t lanes);
/* Results, from the sources' undefined bits; loads are done by access. */
void check_propagate(wave *w, const isa_row *row);
void check_propagate_scalar(wave *w, const isa_row *row,
                            const check_row *facts);
void check_exchange(wave *w, const isa_row *row);

void check_waits_start(check_wave *c);
/* facts->named and scalars. */
void check_name_registers(check_row *facts);
bool check_waits(wave *w, const isa_row *row, const check_row *facts);
/* Completes what the wait instruction or a full counter completes; true if
 * that is anything but stores to global memory. */
bool check_wait(check_wave *c, unsigned vm, unsigned lgkm);
/* Remembers an LDS access of the instruction in execution. */
void check_waits_lds(check_wave *c, const watch_access *access);
/* Calls `mark` for each LDS access that may not be complete. */
void check_waits_each_lds(wave *w,
                          void (*mark)(wave *w, const check_lds_access *access,
                                       size_t pc));

void check_hazards_start(check_wave *c);
/* Whether a rule asks who wrote the sources; about anything else; and whether
 * one asks later what was done, of other instructions than VALU ones. */
bool check_hazards_sources(const isa_row *row, const check_row *facts);
bool check_hazards_special(const isa_row *row, const check_row *facts);
bool check_hazards_notes(const isa_row *row, const check_row *facts);
bool check_hazards(wave *w, const isa_row *row, const check_row *facts);

/* What an access of LDS or scratch does to the undefined bits of `lanes`;
 * among them `unlike` access all bytes that they access. */
bool check_bytes(wave *w, const isa_row *row, const watch_access *access,
                 uint64_t lanes, uint64_t unlike);

bool check_lds_create(sim_group *g);
void check_lds_free(sim_check *check);
void check_lds_start(sim_group *g);
bool check_lds(wave *w, const isa_row *row, const watch_access *access);
bool check_scratch(wave *w, const isa_row *row, const watch_access *access);
void check_lds_epoch(sim_group *g);

bool check_global(wave *w, const isa_row *row, const watch_access *access);
void check_global_start(sim_group *g);

#endif
