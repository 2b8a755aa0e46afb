/* profile.h: counters and a cost model of profiled launches (internal).
 *
 * The seam to launch.c and watch.c. Per launch: profile_begin, then per thread
 * profile_create, per workgroup profile_start, its instructions, profile_end,
 * then profile_free, and at last profile_finish. How it works inside is in
 * profile_model.h.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_PROFILE_H
#define HIPSIM_PROFILE_H

#include "exec.h"

/* What all threads of a launch share; NULL: out of memory. At most `sampled`
 * workgroups, evenly spaced, are also traced for the schedule. `dispatch`
 * stays valid until profile_finish. */
struct profile_launch *profile_begin(const sim_dispatch *dispatch,
                                     uint64_t sampled);

/* Keeps the result for hipsimTakeProfile, or drops it if the launch did not
 * complete. Accepts NULL. */
void profile_finish(struct profile_launch *launch, bool complete);

/* group->profile, for group->dispatch->profile. False: out of memory. */
bool profile_create(sim_group *group);
void profile_free(sim_group *group); /* accepts NULL in group->profile */

void profile_start(sim_group *group);
void profile_end(sim_group *group, bool complete);
void profile_issue(wave *w, const isa_row *row);
void profile_access(wave *w, const isa_row *row, const watch_access *access);
void profile_scalar(wave *w, uint64_t address, uint32_t bytes);

#endif
