/* watch.c: hands what a watched run does to the checks and to the profile.
 *
 * The checks come first: what they stop is not counted.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "profile.h"

bool watch_create(sim_group *group)
{
    const sim_dispatch *dispatch = group->dispatch;
    bool good = (dispatch->check < 2 || check_create(group)) &&
                (dispatch->profile == NULL || profile_create(group));

    group->watched =
        group->check != NULL || group->profile != NULL || dispatch->skip >= 0;
    return good;
}

void watch_free(sim_group *group)
{
    check_free(group);
    profile_free(group);
}

void watch_start(sim_group *group)
{
    if (group->check != NULL) {
        check_start(group);
    }
    if (group->profile != NULL) {
        profile_start(group);
    }
}

void watch_end(sim_group *group, bool complete)
{
    if (group->profile != NULL) {
        profile_end(group, complete);
    }
}

bool watch_barrier(sim_group *group)
{
    return group->check == NULL || check_barrier(group);
}

void watch_fault(const wave *w)
{
    if (w->group->check != NULL) {
        check_trail(w);
    }
}

bool watch_issue(wave *w, const isa_row *row)
{
    if (w->group->check != NULL && !check_issue(w, row)) {
        return false;
    }
    if (w->group->profile != NULL) {
        profile_issue(w, row);
    }
    return true;
}

bool watch_access_lanes(wave *w, const isa_row *row, const watch_access *access)
{
    if (w->group->check != NULL && !check_access(w, row, access)) {
        return false;
    }
    if (w->group->profile != NULL) {
        profile_access(w, row, access);
    }
    return true;
}

bool watch_access_scalar(wave *w, uint64_t address, uint32_t bytes,
                         uint32_t kind)
{
    if (w->group->check != NULL && !check_scalar(w, address, bytes, kind)) {
        return false;
    }
    if (w->group->profile != NULL) {
        profile_scalar(w, address, bytes);
    }
    return true;
}
