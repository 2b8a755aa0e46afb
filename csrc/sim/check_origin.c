/* check_origin.c: where undefined bits come from, for the reports.
 *
 * Each register remembers one origin. A result takes that of the first source
 * that has undefined bits, so a report can name the read that brought them in
 * and not only the instruction where they matter.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <stdio.h>

static check_origin *origin_of(check_wave *c, unsigned code)
{
    return code >= SRC_VGPR ? &c->vector_origin[code - SRC_VGPR]
                            : &c->scalar_origin[code];
}

void check_origin_start(check_wave *c)
{
    for (unsigned r = 0; r < OPERAND_SCALARS; r++) {
        c->scalar_origin[r] = (check_origin){.number = r};
    }
    for (unsigned r = 0; r < SIM_VGPRS; r++) {
        c->vector_origin[r] = (check_origin){.number = SRC_VGPR + r};
    }
}

void check_origin_set(wave *w, unsigned code, check_source source,
                      uint64_t number)
{
    *origin_of(check_of(w), code) =
        (check_origin){(uint32_t)check_pc(w), (uint32_t)number, source};
}

bool check_origin_take(check_wave *c, const check_row *facts,
                       check_origin *origin)
{
    for (unsigned i = 0; i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        for (unsigned r = use->first;
             use->role != ROLE_RESULT && r < (unsigned)use->first + use->count;
             r++) {
            if (check_bad(c, r)) {
                *origin = *origin_of(c, r);
                return true;
            }
        }
    }
    return false;
}

void check_origin_give(check_wave *c, const check_row *facts,
                       const check_origin *origin)
{
    for (unsigned i = 0; i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        for (unsigned r = use->first;
             use->role == ROLE_RESULT && r < (unsigned)use->first + use->count;
             r++) {
            *origin_of(c, r) = *origin;
        }
    }
}

/* "v3 of lane 0", "s7", "VCC". */
static void name_register(unsigned code, unsigned l, char *text, size_t size)
{
    if (code >= SRC_VGPR) {
        (void)snprintf(text, size, "v%u of lane %u", code - SRC_VGPR, l);
    } else if (code == OPERAND_SCC || code == SRC_VCC || code == SRC_EXEC ||
               code == SRC_M0) {
        (void)snprintf(text, size, "%s",
                       code == OPERAND_SCC ? "SCC"
                       : code == SRC_VCC   ? "VCC"
                       : code == SRC_M0    ? "M0"
                                           : "EXEC");
    } else {
        (void)snprintf(text, size, "s%u", code);
    }
}

/* "made of LDS 0x40 as read at pc 0x90, never written by then" */
static void describe(const wave *w, unsigned code, char *text, size_t size)
{
    const check_origin *from = origin_of(check_of(w), code);
    bool vector = from->number >= SRC_VGPR;
    char place[CHECK_PLACE];

    switch (from->source) {
    case SOURCE_LDS:
        (void)snprintf(text, size,
                       "made of LDS 0x%x as read at %s, never written by then "
                       "(is a barrier missing?)",
                       from->number,
                       check_place(w, from->pc, place, sizeof place));
        break;
    case SOURCE_SCRATCH:
        (void)snprintf(text, size,
                       "made of private byte %u as read at %s, never written "
                       "by then",
                       from->number,
                       check_place(w, from->pc, place, sizeof place));
        break;
    case SOURCE_MEMORY:
        (void)snprintf(text, size,
                       "read at %s beyond a tensor's element, never written",
                       check_place(w, from->pc, place, sizeof place));
        break;
    default:
        if (from->number == code) {
            (void)snprintf(text, size, "never written");
        } else {
            (void)snprintf(text, size, "made of %c%u, which was never written",
                           vector ? 'v' : 's',
                           from->number - (vector ? (unsigned)SRC_VGPR : 0u));
        }
        break;
    }
}

bool check_report_undefined(wave *w, unsigned code, unsigned lane_index,
                            const char *what)
{
    const check_origin *from = origin_of(check_of(w), code);
    char name[32], origin[192];

    name_register(code, lane_index, name, sizeof name);
    describe(w, code, origin, sizeof origin);
    if (from->source == SOURCE_LDS) {
        check_lds_map(w, from->number);
    }
    return check_report_at(w, SIM_FAULT_UNDEFINED, lane_index, 0, 0,
                           "%s, %s, %s", name, origin, what);
}
