/* table.h: the lock round the library's tables (internal).
 *
 * Modules, allocations, streams and events are process-wide lists under one
 * lock, which is never held while a kernel runs. It is taken across fork, so
 * a child finds the lists whole whatever its siblings were doing.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_TABLE_H
#define HIPSIM_TABLE_H

#include "hipsim.h"
#include "memory.h"

void sim_table_lock(void);
void sim_table_unlock(void);

/* heap.c: adds every hipMalloc'ed block, readable and writable. The caller
 * holds the lock. False: out of memory. */
bool sim_heap_regions(sim_region_list *list);

/* stream.c: is this a stream that a call may name? Takes the lock. Reports
 * hipErrorInvalidHandle otherwise. */
hipError_t sim_stream_check(hipStream_t stream);

#endif
