/* check.c: one workgroup under check level 2: what is asked before each
 * instruction, barriers, and reports.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include "lines.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- reports ----------------------------------------------------------- */

uint64_t check_offset(const wave *w, size_t pc)
{
    const sim_dispatch *dispatch = w->group->dispatch;

    return dispatch->code->address + 4 * (uint64_t)pc - dispatch->entry;
}

const char *check_place(const wave *w, size_t pc, char *text, size_t size)
{
    const sim_dispatch *dispatch = w->group->dispatch;
    uint64_t offset = check_offset(w, pc);
    char line[CHECK_PLACE / 2]; /* the rest is for the offset */
    bool known = sim_lines_place(dispatch->lines, dispatch->text_entry + offset,
                                 line, sizeof line);

    (void)snprintf(text, size, "pc 0x%llx%s%s%s", (unsigned long long)offset,
                   known ? " (" : "", line, known ? ")" : "");
    return text;
}

/* The one in execution is the last. */
void check_trail(const wave *w)
{
    sim_fault *fault = w->group->fault;
    const check_wave *c = check_of(w);
    const sim_code *code = w->group->dispatch->code;
    size_t used = strlen(fault->notes);
    char text[128];

    for (unsigned i = 0; i < CHECK_TRAIL; i++) {
        uint32_t pc = c->trail[(c->trail_next + i) % CHECK_TRAIL];
        if (pc == UINT32_MAX || used >= sizeof fault->notes) {
            continue;
        }
        (void)sim_disasm(code, 4 * (size_t)pc, text, sizeof text);
        int n =
            snprintf(fault->notes + used, sizeof fault->notes - used,
                     "\n  %s %6llx: %s", &code->row[pc] == w->row ? "->" : "  ",
                     (unsigned long long)check_offset(w, pc), text);
        used += n > 0 ? (size_t)n : 0;
    }
}

static void report(wave *w, sim_fault_kind kind, unsigned lane_index,
                   uint64_t address, uint32_t bytes, const char *format,
                   va_list args)
{
    char detail[sizeof w->group->fault->detail];

    (void)vsnprintf(detail, sizeof detail, format, args);
    exec_fault_at(w, kind, lane_index, address, bytes, detail);
}

bool check_report(wave *w, sim_fault_kind kind, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    report(w, kind, 0, 0, 0, format, args);
    va_end(args);
    return false;
}

bool check_report_at(wave *w, sim_fault_kind kind, unsigned lane_index,
                     uint64_t address, uint32_t bytes, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    report(w, kind, lane_index, address, bytes, format, args);
    va_end(args);
    return false;
}

/* ---- creation ---------------------------------------------------------- */

static size_t pages_of(const sim_group *g)
{
    return g->dispatch->code->count / CHECK_ROWS + 1;
}

bool check_create(sim_group *g)
{
    sim_check *check = calloc(1, sizeof *check);

    g->check = check;
    if (check == NULL) {
        return false;
    }
    size_t vgprs = g->waves[0].vgprs;
    check->wave = calloc(g->wave_count, sizeof check->wave[0]);
    check->rows = calloc(pages_of(g), sizeof check->rows[0]);
    check->vector = malloc((size_t)g->wave_count * vgprs * SIM_LANES *
                           sizeof check->vector[0]);
    if (check->wave == NULL || check->rows == NULL || check->vector == NULL ||
        !check_lds_create(g)) {
        return false; /* sim_group_free cleans up */
    }
    for (uint32_t i = 0; i < g->wave_count; i++) {
        check->wave[i].vector = check->vector + i * vgprs * SIM_LANES;
    }
    return true;
}

void check_free(sim_group *g)
{
    sim_check *check = g->check;

    if (check != NULL) {
        check_lds_free(check);
        free(check->wave);
        for (size_t i = 0; check->rows != NULL && i < pages_of(g); i++) {
            free(check->rows[i]);
        }
        free(check->rows);
        free(check->vector);
        free(check);
        g->check = NULL;
    }
}

void check_start(sim_group *g)
{
    sim_check *check = g->check;

    check_lds_start(g);
    check_global_start(g);
    for (uint32_t i = 0; i < g->active; i++) {
        wave *w = &g->waves[i];
        check_wave *c = &check->wave[i];
        check_undefined_start(w);
        check_waits_start(c);
        check_hazards_start(c);
        c->initial = exec_mask(w);
        c->missed = 0;
        memset(c->trail, 0xff, sizeof c->trail);
    }
}

/* ---- barriers ---------------------------------------------------------- */

/* All waves of a workgroup must wait at one and the same barrier. Waves that
 * have ended do not count. */
bool check_barrier(sim_group *g)
{
    const wave *first = NULL;

    for (uint32_t i = 0; i < g->active; i++) {
        wave *w = &g->waves[i];
        if (w->state != WAVE_BARRIER) {
            continue;
        }
        if (first != NULL && w->row != first->row) {
            char place[CHECK_PLACE];
            return check_report(
                w, SIM_FAULT_BARRIER, "wave %u waits at another one, %s",
                first->index,
                check_place(first, check_pc(first), place, sizeof place));
        }
        first = first == NULL ? w : first;
    }
    check_lds_epoch(g);
    return true;
}

/* Lanes that a barrier has left out must not go on afterwards: threads of a
 * workgroup reach a barrier together or not at all. */
static bool missed_barrier(wave *w, uint64_t lanes)
{
    const check_wave *c = check_of(w);
    uint64_t back = lanes & c->missed;
    char place[CHECK_PLACE];

    return back == 0 ||
           check_report(w, SIM_FAULT_BARRIER,
                        "lane %u goes on without the barrier at %s, which it "
                        "was switched off at",
                        (unsigned)__builtin_ctzll(back),
                        check_place(w, c->missed_pc, place, sizeof place));
}

/* ---- one instruction --------------------------------------------------- */

/* What the checks want to know of the operands. */
static void ask(const isa_row *row, check_row *facts)
{
    check_name_registers(facts);
    facts->hazards = check_hazards_sources(row, facts);
    facts->special = check_hazards_special(row, facts);
    facts->notes = check_hazards_notes(row, facts);
}

static const check_row *facts_of(wave *w, const isa_row *row)
{
    sim_check *check = w->group->check;
    size_t pc = check_pc(w);
    check_row **page = &check->rows[pc / CHECK_ROWS];

    if (*page == NULL) {
        *page = calloc(CHECK_ROWS, sizeof **page);
    }
    check_row *facts =
        *page == NULL ? &check->spare : &(*page)[pc % CHECK_ROWS];
    if (!facts->ready) {
        facts->ready = *page != NULL;
        facts->dpp = row->ext == ISA_EXT_DPP;
        isa_operands(row, &facts->uses);
        ask(row, facts);
    }
    return facts;
}

bool check_issue(wave *w, const isa_row *row)
{
    check_wave *c = check_of(w);
    const check_row *facts = facts_of(w, row);
    check_row moved;

    c->trail[c->trail_next++ % CHECK_TRAIL] = (uint32_t)check_pc(w);
    if (row->issue == ISSUE_FAULT) {
        return true; /* the executor says it better */
    }
    if (row->issue == ISSUE_VALU && (w->mode >> MODE_GPR_IDX & 1) != 0) {
        isa_row indexed = *row;
        uint32_t end = exec_indexed(w, &indexed);
        if (end > w->vgprs) {
            return true;
        }
        moved = *facts;
        isa_operands(&indexed, &moved.uses);
        ask(&indexed, &moved);
        return check_waits(w, &indexed, &moved) &&
               check_hazards(w, &indexed, &moved) &&
               check_undefined(w, &indexed, &moved);
    }
    if (row->op == ISA_s_barrier) {
        c->missed |= c->initial & ~exec_mask(w);
        c->missed_pc = check_pc(w);
    }
    return check_waits(w, row, facts) && check_hazards(w, row, facts) &&
           check_undefined(w, row, facts);
}

bool check_silent(const wave *w, const isa_row *row, const watch_access *access,
                  unsigned lane_index, const void *memory)
{
    const isa_info *info = &isa_ops[row->op];
    uint32_t word[4] = {0};

    if (access->kind != SIM_WRITE || row->lds) {
        return false;
    }
    for (unsigned k = 0; k < (access->bytes + 3) / 4; k++) {
        word[k] = w->v[(size_t)(access->reg + k) * SIM_LANES + lane_index].u;
    }
    if (info->access == M_STORE_8_HI || info->access == M_STORE_16_HI) {
        word[0] >>= 16;
    }
    return memcmp(word, memory, access->bytes) == 0;
}

bool check_access(wave *w, const isa_row *row, const watch_access *access)
{
    /* Scratch is exempt: whole waves spill and reload registers. */
    if (access->space != SPACE_SCRATCH && !missed_barrier(w, access->lanes)) {
        return false;
    }
    switch (access->space) {
    case SPACE_LDS:
        return check_lds(w, row, access);
    case SPACE_SCRATCH:
        return check_scratch(w, row, access);
    default:
        return check_global(w, row, access);
    }
}
