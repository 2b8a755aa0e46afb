/* check_global.c: global memory under check: undefined data, elements of
 * tensors, races between workgroups.
 *
 * Only memory that the launch may write can be raced for, so reading the
 * inputs costs nothing here.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include "races.h"
#include "tensors.h"

#include <string.h>
#include <time.h>

enum {
    PAGE_SHIFT = 12,
    PAGE_MASK = 4095,
    SILENT_TRIES = 500,
    SILENT_WAIT_NS = 100000
};

void check_global_start(sim_group *g)
{
    g->check->group_code = (uint32_t)(exec_group_index(g) % RACE_GROUPS + 1);
    memset(g->check->run, 0, sizeof g->check->run);
    memset(&g->check->closed, 0, sizeof g->check->closed);
    memset(g->check->page, 0, sizeof g->check->page);
}

/* ---- elements ---------------------------------------------------------- */

static bool report_gap(wave *w, unsigned l, uint64_t address, uint32_t bytes,
                       uint32_t kind)
{
    return check_report_at(w, SIM_FAULT_ELEMENT, l, address, bytes,
                           "not wholly part of an element of a tensor that "
                           "may be %s",
                           (kind & SIM_WRITE) != 0 ? "written" : "read");
}

static bool is_within(const sim_region *region, uint64_t address,
                      uint32_t bytes)
{
    return address >= region->begin && address < region->end &&
           bytes <= region->end - address;
}

/* Neighbouring lanes mostly access the same run of elements. */
static bool elements_only(wave *w, unsigned l, uint64_t address, uint32_t bytes,
                          uint32_t kind)
{
    const sim_tensor_list *tensors = w->group->dispatch->tensors;
    sim_region *last = &w->group->check->run[(kind & SIM_WRITE) != 0];

    if (tensors == NULL ||
        (last->access == kind && is_within(last, address, bytes))) {
        return true;
    }
    uint64_t run = sim_tensors_run(tensors, address, kind);
    if (run >= bytes) {
        *last = (sim_region){address, address + run, kind};
        return true;
    }
    return sim_tensors_find(tensors, address, bytes, kind) !=
               SIM_ELEMENTS_GAP ||
           report_gap(w, l, address, bytes, kind);
}

/* ---- races ------------------------------------------------------------- */

static race_page *page_at(sim_group *g, uint64_t address, unsigned way)
{
    sim_check *check = g->check;
    uint64_t number = address >> PAGE_SHIFT;

    if (check->page[way] == NULL || check->page_number[way] != number) {
        check->page[way] = sim_races_page(g->dispatch->races, number);
        check->page_number[way] = number;
    }
    return check->page[way];
}

/* The code of a group that the access races with, or RACE_NOBODY. */
static uint32_t mark(sim_group *g, uint64_t address, uint32_t bytes,
                     uint32_t kind, bool poll)
{
    sim_races *races = g->dispatch->races;
    uint32_t code = g->check->group_code;
    unsigned way = kind == SIM_WRITE;

    for (uint64_t at = address; at < address + bytes; at++) {
        race_page *page = page_at(g, at, way);
        if (page == NULL) {
            return RACE_NOBODY;
        }
        if (poll) {
            sim_races_poll(races, page, at & PAGE_MASK, code);
            continue;
        }
        uint32_t other =
            sim_races_mark(races, page, at & PAGE_MASK, kind, code);
        if (other != RACE_NOBODY) {
            return other;
        }
    }
    return RACE_NOBODY;
}

static bool report_race(wave *w, unsigned l, uint64_t address, uint32_t bytes,
                        uint32_t other)
{
    if (other == RACE_MANY) {
        return check_report_at(w, SIM_FAULT_RACE, l, address, bytes,
                               "several other workgroups read it");
    }
    return check_report_at(w, SIM_FAULT_RACE, l, address, bytes,
                           "workgroup %u of the grid touches it, too, and "
                           "their order is not defined",
                           other - 1u);
}

/* Whether somebody may write there; if not, nothing can race. */
static bool may_be_written(sim_group *g, uint64_t address, uint32_t bytes)
{
    sim_region *closed = &g->check->closed;

    if (is_within(closed, address, bytes)) {
        return false;
    }
    if (exec_allowed(g, address, bytes, SIM_WRITE)) {
        return true;
    }
    const sim_region *found =
        sim_memory_find(g->dispatch->memory, address, bytes, SIM_READ);
    if (found != NULL && found->access == SIM_READ) {
        *closed = *found;
    }
    return false;
}

static bool lane_races(wave *w, const isa_row *row, const watch_access *access,
                       unsigned l)
{
    sim_group *g = w->group;
    uint64_t address = access->at[l];
    bool poll = access->kind == SIM_READ && row->glc;

    if (!may_be_written(g, address, access->bytes)) {
        return true; /* or the executor will say so */
    }
    if (check_silent(w, row, access, l, (const void *)(uintptr_t)address)) {
        return true;
    }
    uint32_t other = mark(g, address, access->bytes, access->kind, poll);
    if (other == RACE_NOBODY) {
        return true;
    }
    /* The other workgroup may be about to store the same value: its thread has
     * set the mark and perhaps lost its core since. */
    const struct timespec pause = {.tv_nsec = SILENT_WAIT_NS};
    for (int tries = 0; access->kind == SIM_WRITE && tries < SILENT_TRIES;
         tries++) {
        if (check_silent(w, row, access, l, (const void *)(uintptr_t)address)) {
            return true;
        }
        (void)nanosleep(&pause, NULL);
    }
    return report_race(w, l, address, access->bytes, other);
}

/* ---- accesses ---------------------------------------------------------- */

static void loads_are_defined(wave *w, const isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];
    check_wave *c = check_of(w);
    uint64_t exec = exec_mask(w);

    if ((info->access == M_ATOMIC && row->glc == 0) || row->lds) {
        return; /* no register gets a result */
    }
    for (unsigned k = 0; k < (info->bytes + 3u) / 4u; k++) {
        unsigned reg = row->dst + k;
        uint32_t *to = check_vector(c, reg);
        if (!check_any(c, reg)) {
            continue;
        }
        for (uint64_t left = exec; left != 0; left &= left - 1) {
            unsigned l = (unsigned)__builtin_ctzll(left);
            bool high =
                info->access >= M_LOAD_I8_HI && info->access <= M_LOAD_16_HI;
            bool low =
                info->access >= M_LOAD_I8_LO && info->access <= M_LOAD_16_LO;
            to[l] = high ? to[l] & 0xffff : low ? to[l] & 0xffff0000u : 0;
        }
        check_refresh(c, reg);
    }
}

static bool data_is_defined(wave *w, const isa_row *row,
                            const watch_access *access)
{
    const isa_info *info = &isa_ops[row->op];
    unsigned n = (access->bytes + 3) / 4;
    bool two = (info->flags & ISA_TWO_DATA) != 0;

    return check_defined_data(w, row, row->data, two ? 2 * n : n,
                              access->lanes);
}

static bool allowed(sim_group *g, uint64_t address, uint32_t bytes,
                    uint32_t kind)
{
    return ((kind & SIM_READ) == 0 ||
            exec_allowed(g, address, bytes, SIM_READ)) &&
           ((kind & SIM_WRITE) == 0 ||
            exec_allowed(g, address, bytes, SIM_WRITE));
}

bool check_global(wave *w, const isa_row *row, const watch_access *access)
{
    sim_group *g = w->group;
    bool atomic = access->kind == (SIM_READ | SIM_WRITE);
    bool races = g->dispatch->races != NULL;

    for (uint64_t left = access->lanes; left != 0; left &= left - 1) {
        uint64_t at = access->at[__builtin_ctzll(left)];
        if (!allowed(g, at, access->bytes, access->kind)) {
            return true; /* the executor says it better */
        }
    }
    if ((access->kind & SIM_WRITE) != 0 && !data_is_defined(w, row, access)) {
        return false;
    }
    if ((access->kind & SIM_READ) != 0) {
        loads_are_defined(w, row);
    }
    if (atomic && races) {
        sim_races_atomic(g->dispatch->races, g->check->group_code);
    }
    for (uint64_t left = access->lanes; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        if (!elements_only(w, l, access->at[l], access->bytes, access->kind) ||
            (races && !atomic && !lane_races(w, row, access, l))) {
            return false;
        }
    }
    return true;
}

/* The race of a scalar access, if it has one. */
static bool scalar_race(wave *w, uint64_t address, uint32_t bytes,
                        uint32_t kind)
{
    sim_group *g = w->group;

    if (g->dispatch->races == NULL ||
        !exec_allowed(g, address, bytes, SIM_WRITE)) {
        return true;
    }
    uint32_t other = mark(g, address, bytes, kind, false);
    return other == RACE_NOBODY || report_race(w, 0, address, bytes, other);
}

/* A load that a compiler has widened: bytes that are no element of anything
 * are undefined, and only if there is no other is that a finding. */
static bool widened_load(wave *w, uint64_t address, uint32_t bytes)
{
    const sim_tensor_list *tensors = w->group->dispatch->tensors;
    check_wave *c = check_of(w);
    bool any = false, some_allowed = false;

    for (uint32_t i = 0; i < bytes; i++) {
        unsigned reg = w->row->dst + i / 4;
        bool inside = exec_allowed(w->group, address + i, 1, SIM_READ);
        some_allowed = some_allowed || inside;
        if (inside && (tensors == NULL ||
                       sim_tensors_find(tensors, address + i, 1, SIM_READ) !=
                           SIM_ELEMENTS_GAP)) {
            any = true;
            if (!scalar_race(w, address + i, 1, SIM_READ)) {
                return false;
            }
        } else {
            c->scalar[reg] |= 0xffu << i % 4 * 8;
            check_origin_set(w, reg, SOURCE_MEMORY, 0);
        }
    }
    return any || !some_allowed || report_gap(w, 0, address, bytes, SIM_READ);
}

bool check_scalar(wave *w, uint64_t address, uint32_t bytes, uint32_t kind)
{
    sim_group *g = w->group;
    const sim_tensor_list *tensors = g->dispatch->tensors;
    bool whole = allowed(g, address, bytes, kind);

    if (kind == SIM_READ && exec_widened(address, bytes) &&
        (!whole ||
         (tensors != NULL && sim_tensors_find(tensors, address, bytes, kind) ==
                                 SIM_ELEMENTS_GAP))) {
        return widened_load(w, address, bytes);
    }
    return !whole || (elements_only(w, 0, address, bytes, kind) &&
                      scalar_race(w, address, bytes, kind));
}
