/* watch.c: hands what a watched run does to its watchers.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "exec.h"

bool watch_create(sim_group *group)
{
    group->watched = group->dispatch->skip >= 0;
    return true;
}

void watch_free(sim_group *group)
{
    (void)group;
}

void watch_start(sim_group *group)
{
    (void)group;
}

void watch_end(sim_group *group, bool complete)
{
    (void)group;
    (void)complete;
}

bool watch_barrier(sim_group *group)
{
    (void)group;
    return true;
}

bool watch_issue(wave *w, const isa_row *row)
{
    (void)w;
    (void)row;
    return true;
}

bool watch_access_lanes(wave *w, const isa_row *row, const watch_access *access)
{
    (void)w;
    (void)row;
    (void)access;
    return true;
}

bool watch_access_scalar(wave *w, const isa_row *row, uint64_t address,
                         uint32_t bytes, uint32_t kind)
{
    (void)w;
    (void)row;
    (void)address;
    (void)bytes;
    (void)kind;
    return true;
}
