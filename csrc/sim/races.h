/* races.h: global memory that two workgroups of a launch touch (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_RACES_H
#define HIPSIM_RACES_H

#include "sim.h"

typedef struct sim_races sim_races;
typedef struct race_page race_page;

enum {
    RACE_NOBODY = 0,
    RACE_GROUPS = 0xfffe, /* codes 1..RACE_GROUPS; more groups share them */
    RACE_MANY = 0xffff
};

/* One launch's marks, shared by its threads. NULL: out of memory. */
sim_races *sim_races_create(void);
void sim_races_free(sim_races *races); /* accepts NULL */

/* The marks of a page of 4096 bytes; NULL if there is no memory for it, or
 * more pages than are kept: such a page is not checked. */
race_page *sim_races_page(sim_races *races, uint64_t number);

/* A workgroup accesses byte `offset` of a page. Returns the code of a group
 * that it races with, or RACE_NOBODY. */
uint16_t sim_races_mark(sim_races *races, race_page *page, uint32_t offset,
                        uint32_t kind, uint16_t code);

/* The workgroup has made an atomic access: from now on it may be ordered with
 * others that have. */
void sim_races_atomic(sim_races *races, uint16_t code);

/* A load that bypasses the caches (glc) reads the byte: a flag, if another
 * group wrote it, which orders the two. */
void sim_races_poll(sim_races *races, race_page *page, uint32_t offset,
                    uint16_t code);

#endif
