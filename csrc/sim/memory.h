/* memory.h: building the table of regions that one launch may touch.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_MEMORY_H
#define HIPSIM_MEMORY_H

#include "sim.h"

/* Regions in any order, overlaps allowed; zero-initialised is empty. */
typedef struct sim_region_list {
    sim_region *region;
    size_t count, capacity;
} sim_region_list;

/* False: out of memory, or the range wraps. bytes 0 adds nothing. */
bool sim_regions_add(sim_region_list *list, uint64_t begin, uint64_t bytes,
                     uint32_t access);

/* Sorts, splits where access differs, joins neighbours of equal access.
 * False: out of memory. */
bool sim_regions_merge(sim_region_list *list);

void sim_regions_free(sim_region_list *list);

#endif
