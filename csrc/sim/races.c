/* races.c: global memory that two workgroups of a launch touch.
 *
 * Workgroups run in any order and at the same time, so one must not touch a
 * byte that another one writes. Every byte of writable memory has two marks:
 * its writer, and its reader or MANY. Atomics do not race, and order those
 * who use them: between two workgroups that have both made an atomic access
 * (or passed a flag through a load that bypasses the caches) nothing is
 * reported. That is lenient, because the marks do not say what came before
 * the atomic; a kernel without atomics is checked to the full.
 *
 * Threads mark at the same time; a mark is one 64-bit word that is exchanged.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "races.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { PAGES = 1 << 16, PAGE_BYTES = 4096, ORDERED = 1 << 16 };

struct race_page {
    _Atomic uint64_t mark[PAGE_BYTES]; /* writer, reader << 32 */
};

struct sim_races {
    _Atomic uint64_t number[PAGES]; /* page number + 1, 0 free */
    _Atomic(race_page *) page[PAGES];
    _Atomic uint8_t ordered[ORDERED]; /* groups that use atomics, by hash */
};

sim_races *sim_races_create(void)
{
    return calloc(1, sizeof(sim_races));
}

void sim_races_free(sim_races *races)
{
    for (unsigned i = 0; races != NULL && i < PAGES; i++) {
        if (atomic_load_explicit(&races->number[i], memory_order_relaxed) !=
            0) {
            free(atomic_load(&races->page[i]));
        }
    }
    free(races);
}

/* The page of a slot whose number is set. Who comes first brings it, whichever
 * thread took the slot, so that nobody waits and no access goes unmarked. */
static race_page *page_of(sim_races *races, unsigned slot)
{
    race_page *page = atomic_load(&races->page[slot]);

    if (page != NULL) {
        return page;
    }
    race_page *fresh = calloc(1, sizeof *fresh);
    if (fresh != NULL &&
        atomic_compare_exchange_strong(&races->page[slot], &page, fresh)) {
        return fresh;
    }
    free(fresh);
    return page;
}

race_page *sim_races_page(sim_races *races, uint64_t number)
{
    unsigned slot =
        (unsigned)(number * UINT64_C(0x9e3779b97f4a7c15) >> 48) % PAGES;

    for (unsigned tries = 0; tries < 64; tries++) {
        uint64_t seen = 0;
        if (atomic_compare_exchange_strong(&races->number[slot], &seen,
                                           number + 1) ||
            seen == number + 1) {
            return page_of(races, slot);
        }
        slot = (slot + 1) % PAGES;
    }
    return NULL;
}

static bool both_ordered(sim_races *races, uint32_t code, uint32_t other)
{
    return atomic_load(&races->ordered[code % ORDERED]) != 0 &&
           (other == RACE_MANY ||
            atomic_load(&races->ordered[other % ORDERED]) != 0);
}

uint32_t sim_races_mark(sim_races *races, race_page *page, uint32_t offset,
                        uint32_t kind, uint32_t code)
{
    _Atomic uint64_t *mark = &page->mark[offset];
    uint64_t old = atomic_load_explicit(mark, memory_order_relaxed), new;

    do {
        uint32_t writer = (uint32_t)old, reader = (uint32_t)(old >> 32);
        if (writer != RACE_NOBODY && writer != code &&
            !both_ordered(races, code, writer)) {
            return writer;
        }
        if (kind == SIM_WRITE) {
            if (reader != RACE_NOBODY && reader != code &&
                !both_ordered(races, code, reader)) {
                return reader;
            }
            new = (uint64_t)reader << 32 | code;
        } else {
            uint32_t by =
                reader == RACE_NOBODY || reader == code ? code : RACE_MANY;
            new = (uint64_t)by << 32 | writer;
        }
    } while (new != old && !atomic_compare_exchange_weak(mark, &old, new));
    return RACE_NOBODY;
}

void sim_races_atomic(sim_races *races, uint32_t code)
{
    atomic_store(&races->ordered[code % ORDERED], 1);
}

void sim_races_poll(sim_races *races, race_page *page, uint32_t offset,
                    uint32_t code)
{
    uint32_t writer = (uint32_t)atomic_load(&page->mark[offset]);

    if (writer != RACE_NOBODY && writer != code) {
        atomic_store(&races->ordered[code % ORDERED], 1);
        atomic_store(&races->ordered[writer % ORDERED], 1);
    }
}
