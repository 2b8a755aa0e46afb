/* check_lds.c: LDS under check: races between the waves of a workgroup.
 *
 * A barrier ends an epoch. Within one, two waves must not touch the same byte
 * if one of them writes it, whichever order the simulator ran them in.
 * An access that no wait has completed when its wave reaches the barrier is
 * still under way afterwards, so it counts in the next epoch too. Atomics may
 * meet each other. A store that finds its value there already is no race with
 * an access before it: the other wave cannot tell.
 *
 * Each byte has a mark for its writer and one for its reader: 0 nobody, wave
 * + 1, MANY for several readers; ATOMIC is added for an atomic's write.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MANY = 0x7f, ATOMIC = 0x80 };

/* ---- creation ---------------------------------------------------------- */

bool check_lds_create(sim_group *g)
{
    sim_check *check = g->check;
    size_t words = (size_t)g->lds_bytes / 4 + 4;
    size_t scratch = (size_t)g->scratch_wave * g->wave_count + 1;

    check->lds_undefined = malloc(4 * words);
    check->lds_word = calloc(words, sizeof check->lds_word[0]);
    check->scratch_undefined = malloc(scratch);
    return check->lds_undefined != NULL && check->lds_word != NULL &&
           check->scratch_undefined != NULL;
}

void check_lds_free(sim_check *check)
{
    free(check->lds_undefined);
    free(check->lds_word);
    free(check->scratch_undefined);
}

void check_lds_start(sim_group *g)
{
    sim_check *check = g->check;

    memset(check->lds_undefined, 0xff, g->lds_bytes);
    memset(check->scratch_undefined, 0xff,
           (size_t)g->scratch_wave * g->wave_count);
    check->epoch++; /* marks of the last workgroup no longer count */
}

/* ---- races ------------------------------------------------------------- */

typedef struct race {
    uint32_t other; /* wave */
    uint32_t pc;
    bool other_wrote;
} race;

/* Marks `count` bytes at `at` for a wave; true if another one is in the way.
 * `kind` as in watch_access. */
static bool mark_bytes(sim_check *check, uint32_t wave_index, uint32_t at,
                       uint32_t count, uint32_t kind, size_t pc, race *found)
{
    uint8_t own = (uint8_t)(wave_index + 1);
    bool atomic = kind == (SIM_READ | SIM_WRITE);
    uint8_t as_writer = (uint8_t)(own | (atomic ? ATOMIC : 0));

    for (uint32_t b = at; b < at + count; b++) {
        check_lds_word *word = &check->lds_word[b / 4];
        unsigned shift = b % 4 * 8;
        if (word->epoch != check->epoch) {
            *word = (check_lds_word){.epoch = check->epoch};
        }
        uint8_t writer = (uint8_t)(word->writers >> shift);
        uint8_t reader = (uint8_t)(word->readers >> shift);
        bool both_atomic = atomic && (writer & ATOMIC) != 0;
        if (writer != 0 && (writer & MANY) != own && !both_atomic) {
            *found = (race){(writer & MANY) - 1u, word->write_pc, true};
            return true;
        }
        if ((kind & SIM_WRITE) != 0) {
            if (reader != 0 && reader != own) {
                *found = (race){reader - 1u, word->read_pc, false};
                return true;
            }
            uint8_t mark = both_atomic && (writer & MANY) != own ? ATOMIC | MANY
                                                                 : as_writer;
            word->writers = (word->writers & ~(0xffu << shift)) | (uint32_t)mark
                                                                      << shift;
            word->write_pc = (uint32_t)pc;
        } else {
            uint8_t mark = reader == 0 || reader == own ? own : MANY;
            word->readers = (word->readers & ~(0xffu << shift)) | (uint32_t)mark
                                                                      << shift;
            word->read_pc = (uint32_t)pc;
        }
    }
    return false;
}

/* Marks a dword in one step if its four bytes have been accessed alike and
 * nobody is in the way; false: byte by byte. `own` is the wave's mark four
 * times. */
static bool mark_dword(check_lds_word *word, uint32_t epoch, uint32_t own,
                       bool writes, uint32_t pc)
{
    const uint32_t each = 0x01010101u;

    if (word->epoch != epoch) {
        *word = (check_lds_word){.epoch = epoch};
    }
    if (word->writers != 0 && word->writers != own) {
        return false;
    }
    if (word->readers == 0 || word->readers == own) {
        if (writes) {
            word->writers = own;
            word->write_pc = pc;
            return true;
        }
        word->readers = own;
    } else if (writes || word->readers != (word->readers & 0xff) * each) {
        return false;
    } else {
        word->readers = MANY * each;
    }
    word->read_pc = pc;
    return true;
}

static bool mark_lane(sim_check *check, uint32_t wave_index, uint32_t at,
                      uint32_t bytes, uint32_t kind, size_t pc, race *found)
{
    uint32_t own = (wave_index + 1) * 0x01010101u;
    bool writes = kind == SIM_WRITE;

    if (((at | bytes) & 3) != 0 || kind == (SIM_READ | SIM_WRITE)) {
        return mark_bytes(check, wave_index, at, bytes, kind, pc, found);
    }
    for (uint32_t k = 0; k < bytes; k += 4) {
        if (!mark_dword(&check->lds_word[(at + k) / 4], check->epoch, own,
                        writes, (uint32_t)pc) &&
            mark_bytes(check, wave_index, at + k, 4, kind, pc, found)) {
            return true;
        }
    }
    return false;
}

void check_lds_map(const wave *w, uint32_t address)
{
    const sim_check *check = w->group->check;
    sim_fault *fault = w->group->fault;
    uint32_t first = address / 4 > 2 ? address / 4 - 2 : 0;
    if (fault->kind != SIM_FAULT_NONE) {
        return; /* another wave's report */
    }
    (void)snprintf(fault->notes, sizeof fault->notes,
                   "\n  since the last barrier:");
    size_t used = strlen(fault->notes);
    for (uint32_t i = first; i < first + 6 && i < w->group->lds_bytes / 4 &&
                             used < sizeof fault->notes;
         i++) {
        const check_lds_word *word = &check->lds_word[i];
        bool now = word->epoch == check->epoch;
        char who[2][24] = {"nobody", "nobody"};
        uint32_t value,
            marks[2] = {now ? word->writers : 0, now ? word->readers : 0};
        memcpy(&value, w->group->lds + 4 * (size_t)i, 4);
        for (unsigned k = 0; k < 2; k++) {
            unsigned mark = marks[k] >> address % 4 * 8 & MANY;
            if (mark == MANY) {
                (void)snprintf(who[k], sizeof who[k], "several waves");
            } else if (mark != 0) {
                (void)snprintf(who[k], sizeof who[k], "wave %u", mark - 1);
            }
        }
        int n = snprintf(fault->notes + used, sizeof fault->notes - used,
                         "\n  %s LDS 0x%04x 0x%08x written by %s, read by %s",
                         i == address / 4 ? "=>" : "  ", 4 * i, value, who[0],
                         who[1]);
        used += n > 0 ? (size_t)n : 0;
    }
}

static bool report_race(wave *w, unsigned l, uint32_t at, uint32_t bytes,
                        const race *found)
{
    char place[CHECK_PLACE], who[24];

    check_lds_map(w, at);
    (void)check_place(w, found->pc, place, sizeof place);
    if (found->other == MANY - 1) {
        (void)snprintf(who, sizeof who, "several waves");
    } else {
        (void)snprintf(who, sizeof who, "wave %u", found->other);
    }
    return check_report_at(w, SIM_FAULT_RACE_LDS, l, at, bytes,
                           "%s %s it at %s; no barrier that both have waited "
                           "for orders the two",
                           who, found->other_wrote ? "wrote" : "read", place);
}

/* Lanes of a load without those that read what the lane before, or the one
 * eight before, reads too: usual where lanes share rows and columns of a tile,
 * and marking it again would change nothing. */
static uint64_t unlike_neighbours(const watch_access *access, uint64_t lanes)
{
    uint64_t unlike = lanes;

    for (uint64_t left = lanes; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        bool beside = l >= 1 && access->at[l] == access->at[l - 1] &&
                      (lanes >> (l - 1) & 1) != 0;
        bool behind = l >= 8 && access->at[l] == access->at[l - 8] &&
                      (lanes >> (l - 8) & 1) != 0;
        unlike &= ~((uint64_t)(beside || behind) << l);
    }
    return unlike;
}

static bool lds_races(wave *w, const isa_row *row, const watch_access *access,
                      uint64_t lanes)
{
    sim_check *check = w->group->check;
    size_t pc = check_pc(w);
    race found;

    for (uint64_t left = lanes; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        uint32_t at = (uint32_t)access->at[l];
        if (!check_silent(w, row, access, l, w->group->lds + at) &&
            mark_lane(check, w->index, at, access->bytes, access->kind, pc,
                      &found)) {
            return report_race(w, l, at, access->bytes, &found);
        }
    }
    return true;
}

/* After a barrier: an access that is still under way. */
static void mark_again(wave *w, const check_lds_access *access, size_t pc)
{
    race found;

    for (uint64_t left = access->lanes; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        if (mark_lane(w->group->check, w->index, access->at[l], access->bytes,
                      access->kind, pc, &found)) {
            w->row = &w->group->dispatch->code->row[pc];
            (void)report_race(w, l, access->at[l], access->bytes, &found);
            return;
        }
    }
}

void check_lds_epoch(sim_group *g)
{
    g->check->epoch++;
    for (uint32_t i = 0; i < g->active; i++) {
        check_waits_each_lds(&g->waves[i], mark_again);
    }
}

/* ---- accesses ---------------------------------------------------------- */

/* Lanes that stay within `limit` bytes; the executor reports the others. */
static uint64_t lanes_within(const watch_access *access, uint64_t limit)
{
    uint64_t beyond = 0, all = 0;

    if (access->bytes > limit) {
        return 0;
    }
    for (unsigned l = 0; access->lanes == UINT64_MAX && l < SIM_LANES; l++) {
        all |= access->at[l];
    }
    if (access->lanes == UINT64_MAX && all <= limit - access->bytes) {
        return access->lanes;
    }
    for (uint64_t left = access->lanes; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        beyond |= (uint64_t)(access->at[l] > limit - access->bytes) << l;
    }
    return access->lanes & ~beyond;
}

/* Bytes that a load to LDS has not delivered yet, which only vmcnt tells. */
static bool lds_load_pending(wave *w, const watch_access *access)
{
    const check_wave *c = check_of(w);

    for (unsigned i = 0; i + 1 < c->queued; i++) {
        const check_pending *p = &c->queue[i];
        for (unsigned k = 0; p->vm && !p->flat && k < p->slots; k++) {
            const check_lds_access *load =
                &c->recent[(p->slot + k) % CHECK_LDS_SLOTS];
            for (unsigned a = 0; a < SIM_LANES * SIM_LANES; a++) {
                unsigned l = a / SIM_LANES, other = a % SIM_LANES;
                if ((access->lanes >> l & 1) != 0 &&
                    (load->lanes >> other & 1) != 0 &&
                    access->at[l] < (uint64_t)load->at[other] + load->bytes &&
                    load->at[other] < access->at[l] + access->bytes) {
                    char place[CHECK_PLACE];
                    (void)check_report_at(
                        w, SIM_FAULT_WAIT, l, access->at[l], access->bytes,
                        "LDS 0x%x, which the load to LDS at %s may not have "
                        "delivered",
                        (unsigned)access->at[l],
                        check_place(w, p->pc, place, sizeof place));
                    return true;
                }
            }
        }
    }
    return false;
}

bool check_lds(wave *w, const isa_row *row, const watch_access *access)
{
    uint64_t lanes = lanes_within(access, w->group->lds_bytes);
    uint64_t unlike =
        access->kind == SIM_READ ? unlike_neighbours(access, lanes) : lanes;

    check_waits_lds(check_of(w), access);
    return (row->lds || !lds_load_pending(w, access)) &&
           check_bytes(w, row, access, lanes, unlike) &&
           lds_races(w, row, access, unlike);
}

bool check_scratch(wave *w, const isa_row *row, const watch_access *access)
{
    uint64_t lanes = lanes_within(access, w->group->scratch_wave / SIM_LANES);

    return check_bytes(w, row, access, lanes, lanes);
}
