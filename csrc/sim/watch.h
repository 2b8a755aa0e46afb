/* watch.h: what a watched run tells about each instruction (internal).
 *
 * At check level 0 without a profile nobody watches, and the executor only
 * asks one flag per memory instruction. Otherwise the hooks of this header
 * pass each instruction, before it takes effect, and each memory access, once
 * its addresses are known, to check.h (level 2) and profile.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_WATCH_H
#define HIPSIM_WATCH_H

#include "isa.h"

struct wave;

typedef enum watch_space { SPACE_GLOBAL, SPACE_LDS, SPACE_SCRATCH } watch_space;

/* One access of the memory instruction in execution. An instruction makes
 * several if it moves two elements (ds_read2) or if its lanes go to more than
 * one space (flat). Addresses are not checked yet: they may be invalid. */
typedef struct watch_access {
    uint64_t lanes;         /* which lanes take part */
    uint64_t at[SIM_LANES]; /* address, LDS offset or private byte */
    uint32_t bytes;         /* per lane */
    uint32_t kind;          /* SIM_READ, SIM_WRITE, both: atomic */
    watch_space space;
    unsigned reg; /* first VGPR of the data, read or written */
} watch_access;

/* Allocates what the dispatch asks for, into group->check and ->profile.
 * False: out of memory. */
bool watch_create(sim_group *group);
void watch_free(sim_group *group);

/* A workgroup begins (its waves have their initial state) and has ended. */
void watch_start(sim_group *group);
void watch_end(sim_group *group, bool complete);

/* No wave can run: those at the barrier are about to go on. False if a check
 * has recorded a fault instead. */
bool watch_barrier(sim_group *group);

/* A fault of this wave has been recorded and may be given notes. */
void watch_fault(const struct wave *w);

/* Each returns false if a check has stopped the wave. */
bool watch_issue(struct wave *w, const isa_row *row);
bool watch_access_lanes(struct wave *w, const isa_row *row,
                        const watch_access *access);
/* Scalar memory: one range of bytes. */
bool watch_access_scalar(struct wave *w, uint64_t address, uint32_t bytes,
                         uint32_t kind);

#endif
