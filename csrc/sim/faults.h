/* faults.h: failures that a test asks for (internal).
 *
 * hipsim.h describes the kinds and their words. A launch asks once what is to
 * happen to it; a workgroup that something happens in is run by sim_faults_run
 * instead of by the executor's own loop, so all others cost nothing.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_FAULTS_H
#define HIPSIM_FAULTS_H

#include "exec.h"

/* Wave instructions per workgroup of an endless kernel without a budget. */
#define SIM_ENDLESS_BUDGET UINT64_C(1000000000)

/* What happens to one launch; all zero: nothing. */
typedef struct sim_injection {
    bool fail;       /* the launch is refused */
    uint64_t factor; /* each instruction counts as so many, 0 = as one */
    bool endless;
    uint64_t endless_after; /* instructions that a workgroup still runs */
    bool memory;
    uint64_t memory_group, memory_access; /* counted from 0 and from 1 */
    uint32_t flip_bits;                   /* 0: no bit flips */
    uint64_t flip_group, flip_at, flip_seed;
} sim_injection;

/* Counts a launch of `kernel` in `groups` workgroups and says what happens to
 * it. False: nothing, *injection is all zero. */
bool sim_faults_launch(const char *kernel, uint64_t groups,
                       sim_injection *injection);

/* Counts an allocation; true if it is to fail. */
bool sim_faults_alloc(void);

/* Runs `slice` instructions of w by run(), with what is injected in between. */
void sim_faults_run(wave *w, uint32_t slice, void (*run)(wave *, uint32_t));

/* All waves have ended; false if the workgroup must not end, as *fault says. */
bool sim_faults_end(sim_group *group);

/* instructions * factor, at most UINT64_MAX. */
uint64_t sim_faults_cost(const sim_injection *injection, uint64_t instructions);

/* What is left of the budget, in instructions at this launch's price. */
uint64_t sim_faults_budget(const sim_injection *injection, uint64_t budget);

#endif
