/* watch.c: hands what a watched run does to the checks.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"

bool watch_create(sim_group *group)
{
    bool good = true;

    if (group->dispatch->check >= 2) {
        good = check_create(group);
    }
    group->watched = group->check != NULL || group->profile != NULL ||
                     group->dispatch->skip >= 0;
    return good;
}

void watch_free(sim_group *group)
{
    check_free(group);
}

void watch_start(sim_group *group)
{
    if (group->check != NULL) {
        check_start(group);
    }
}

void watch_end(sim_group *group, bool complete)
{
    (void)group;
    (void)complete;
}

bool watch_barrier(sim_group *group)
{
    return group->check == NULL || check_barrier(group);
}

bool watch_issue(wave *w, const isa_row *row)
{
    return w->group->check == NULL || check_issue(w, row);
}

bool watch_access_lanes(wave *w, const isa_row *row, const watch_access *access)
{
    return w->group->check == NULL || check_access(w, row, access);
}

bool watch_access_scalar(wave *w, const isa_row *row, uint64_t address,
                         uint32_t bytes, uint32_t kind)
{
    return w->group->check == NULL ||
           check_scalar(w, row, address, bytes, kind);
}
