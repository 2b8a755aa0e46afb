/* races.h: global memory that two workgroups of a launch touch (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_RACES_H
#define HIPSIM_RACES_H

#include "sim.h"

typedef struct sim_races sim_races;
typedef struct race_page race_page;

/* Codes of workgroups: 1 to RACE_GROUPS. */
#define RACE_NOBODY UINT32_C(0)
#define RACE_MANY UINT32_MAX
#define RACE_GROUPS (UINT32_MAX - 1)

/* One launch's marks, shared by its threads. NULL: out of memory. */
sim_races *sim_races_create(void);
void sim_races_free(sim_races *races); /* accepts NULL */

/* The marks of a page of 4096 bytes; NULL if there is no memory for it, or
 * more pages than are kept: such a page is not checked. */
race_page *sim_races_page(sim_races *races, uint64_t number);

/* A workgroup accesses byte `offset` of a page. Returns the code of a group
 * that it races with, or RACE_NOBODY. */
uint32_t sim_races_mark(sim_races *races, race_page *page, uint32_t offset,
                        uint32_t kind, uint32_t code);

/* The workgroup has made an atomic access: from now on it may be ordered with
 * others that have. */
void sim_races_atomic(sim_races *races, uint32_t code);

/* A load that bypasses the caches (glc) reads the byte: a flag, if another
 * group wrote it, which orders the two. */
void sim_races_poll(sim_races *races, race_page *page, uint32_t offset,
                    uint32_t code);

#endif
