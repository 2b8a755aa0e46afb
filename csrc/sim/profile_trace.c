/* profile_trace.c: what one workgroup leaves for the cache and cycle models.
 *
 * Every workgroup leaves the cache lines that its memory instructions touch,
 * as runs; a sampled one also leaves its waves' instructions. While a memory
 * instruction executes it is "open": its accesses add up, and closing it puts
 * them into totals and trace.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "profile_model.h"

#include <stdlib.h>

/* ---- traces ------------------------------------------------------------- */

profile_trace *profile_trace_create(uint64_t index, uint32_t waves,
                                    bool sampled, size_t limit)
{
    profile_trace *trace = calloc(1, sizeof *trace);

    if (trace == NULL) {
        return NULL;
    }
    trace->index = index;
    trace->waves = waves;
    trace->limit = limit;
    trace->sampled = sampled;
    if (sampled) {
        trace->wave = calloc(waves, sizeof *trace->wave);
        if (trace->wave == NULL) {
            free(trace);
            return NULL;
        }
    }
    return trace;
}

void profile_trace_free(profile_trace *trace)
{
    if (trace == NULL) {
        return;
    }
    for (uint32_t i = 0; trace->wave != NULL && i < trace->waves; i++) {
        free(trace->wave[i].event);
    }
    free(trace->wave);
    free(trace->word);
    free(trace->reach);
    free(trace);
}

size_t profile_trace_bytes(const profile_trace *trace)
{
    return sizeof *trace + trace->capacity * sizeof *trace->word;
}

bool profile_trace_word(profile_trace *trace, uint64_t word)
{
    if (trace->words == trace->capacity) {
        size_t capacity = 2 * trace->capacity + 256;
        uint64_t *grown = realloc(trace->word, capacity * sizeof *grown);
        if (grown == NULL) {
            return false;
        }
        trace->word = grown;
        trace->capacity = capacity;
    }
    trace->word[trace->words++] = word;
    return true;
}

bool profile_trace_event(profile_trace *trace, uint32_t which, size_t at)
{
    profile_events *events = &trace->wave[which];

    if (events->count == trace->limit) {
        trace->truncated = true;
        return true;
    }
    if (events->count == events->capacity) {
        size_t capacity = 2 * events->capacity + 256;
        profile_event *grown = realloc(events->event, capacity * sizeof *grown);
        if (grown == NULL) {
            return false;
        }
        events->event = grown;
        events->capacity = capacity;
    }
    events->event[events->count++] =
        (profile_event){.at = (uint32_t)at, .memory = NO_MEMORY};
    return true;
}

/* line (53 bits), count - 1 (6), kind (4), first (1) */
uint64_t profile_run_pack(line_run run)
{
    return run.line << 11 | (uint64_t)(run.count - 1) << 5 |
           (uint64_t)run.kind << 1 | (uint64_t)run.first;
}

line_run profile_run_unpack(uint64_t word)
{
    return (line_run){
        .line = word >> 11,
        .count = (uint32_t)(word >> 5 & 63) + 1,
        .kind = (line_kind)(word >> 1 & 15),
        .first = (word & 1) != 0,
    };
}

/* ---- the open instruction ----------------------------------------------- */

/* Bytes [begin, end) of a line as a mask. */
static uint64_t byte_mask(uint32_t begin, uint32_t end)
{
    uint64_t below = end == LINE_BYTES ? UINT64_MAX : (UINT64_C(1) << end) - 1;

    return below & ~((UINT64_C(1) << begin) - 1);
}

static void add_line(profile_op *op, uint64_t line, uint64_t mask)
{
    for (uint32_t i = op->lines; i > 0; i--) {
        if (op->line[i - 1] == line) {
            op->mask[i - 1] |= mask;
            return;
        }
    }
    if (op->lines < OP_LINES) {
        op->line[op->lines] = line;
        op->mask[op->lines++] = mask;
    }
}

/* Addresses are not checked yet; what a trace cannot hold is no address. */
void profile_op_range(sim_profile *p, uint64_t address, uint32_t bytes)
{
    address &= (UINT64_C(1) << 57) - 1;
    uint64_t end = address + bytes;

    while (address < end) {
        uint64_t next = (address | (LINE_BYTES - 1)) + 1;
        uint64_t stop = next < end ? next : end;
        uint32_t begin = (uint32_t)(address % LINE_BYTES);
        add_line(&p->op, address >> LINE_SHIFT,
                 byte_mask(begin, begin + (uint32_t)(stop - address)));
        address = stop;
    }
}

/* Clocks of the address unit for one access. */
static uint32_t address_clocks(const isa_info *info, const watch_access *a)
{
    uint64_t unit = a->bytes < 4 ? a->bytes : 4, low = 0;
    uint64_t first = a->at[__builtin_ctzll(a->lanes)];
    uint64_t start = first - (uint64_t)__builtin_ctzll(a->lanes) * a->bytes;
    bool linear = true, uniform = true;

    if (info->access == M_ATOMIC) {
        return a->bytes > 4 ? COUNT(TA_ATOMIC64) : COUNT(TA_ATOMIC);
    }
    for (uint64_t left = a->lanes; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        linear = linear && a->at[l] == start + (uint64_t)l * a->bytes;
        uniform = uniform && a->at[l] == first;
        low |= a->at[l];
    }
    if (isa_is_store(info)) {
        return COUNT(TA_STORE);
    }
    if (low % unit != 0 || (a->bytes == 12 && !linear && !uniform)) {
        return COUNT(TA_ODD);
    }
    return a->bytes <= 4 && (linear || uniform) ? COUNT(TA_LINEAR)
                                                : COUNT(TA_OTHER);
}

/* Private memory has a place of its own per resident workgroup; the numbers
 * are invented, above all host addresses, so that they do not depend on which
 * thread ran the workgroup. */
static uint64_t private_address(const sim_profile *p, const wave *w,
                                uint64_t byte, unsigned l)
{
    const sim_group *g = w->group;
    const profile_occupancy *o = &p->launch->occupancy;
    uint64_t places = (uint64_t)o->groups_per_cu * COUNT(CUS);
    uint64_t place = (p->trace != NULL ? p->trace->index : 0) % places;
    uint64_t start = (place * g->wave_count + w->index) * g->scratch_wave +
                     (UINT64_C(1) << 56);

    return start + byte / 4 * 256 + 4 * (uint64_t)l + byte % 4;
}

void profile_op_access(sim_profile *p, wave *w, const watch_access *access)
{
    profile_op *op = &p->op;

    op->other = true;
    op->ta += address_clocks(&isa_ops[op->row->op], access);
    for (uint64_t left = access->lanes; left != 0; left &= left - 1) {
        unsigned l = (unsigned)__builtin_ctzll(left);
        if (access->space == SPACE_GLOBAL) {
            profile_op_range(p, access->at[l], access->bytes);
            continue;
        }
        for (uint64_t b = access->at[l]; b < access->at[l] + access->bytes;) {
            uint32_t dword_left = 4 - (uint32_t)(b % 4);
            uint64_t rest = access->at[l] + access->bytes - b;
            uint32_t n = rest < dword_left ? (uint32_t)rest : dword_left;
            profile_op_range(p, private_address(p, w, b, l), n);
            b += n;
        }
    }
}

/* Appends the instruction's lines as runs. */
static bool put_lines(profile_trace *trace, const profile_op *op)
{
    for (uint32_t i = 0; i < op->lines;) {
        bool partial = op->kind == LINE_WRITE && op->mask[i] != UINT64_MAX;
        bool masked = partial || profile_line_has_mask(op->kind);
        line_run run = {.line = op->line[i],
                        .count = 1,
                        .kind = partial ? LINE_MASKED : op->kind,
                        .first = i == 0};
        while (
            !masked && i + run.count < op->lines && run.count < RUN_LINES &&
            op->line[i + run.count] == run.line + run.count &&
            (op->kind != LINE_WRITE || op->mask[i + run.count] == UINT64_MAX)) {
            run.count++;
        }
        if (!profile_trace_word(trace, profile_run_pack(run)) ||
            (masked && !profile_trace_word(trace, op->mask[i]))) {
            return false;
        }
        i += run.count;
    }
    return true;
}

static uint8_t port_clocks(uint32_t clocks)
{
    return clocks < UINT8_MAX ? (uint8_t)clocks : UINT8_MAX;
}

static uint16_t unit_clocks(uint32_t clocks)
{
    return clocks < UINT16_MAX ? (uint16_t)clocks : UINT16_MAX;
}

static void close_trace(sim_profile *p)
{
    profile_op *op = &p->op;
    profile_trace *trace = p->trace;
    uint32_t memory = NO_MEMORY;

    if (trace == NULL) {
        return;
    }
    if (op->lines > 0) {
        memory = trace->memory++;
        if (!put_lines(trace, op)) {
            profile_trace_free(trace);
            p->trace = NULL;
            return;
        }
    }
    if (op->event != SIZE_MAX) {
        profile_event *event = &trace->wave[op->wave].event[op->event];
        event->memory = memory;
        event->bank = unit_clocks(op->bank);
        event->ta = unit_clocks(op->ta);
        event->in = port_clocks(op->in);
        event->out = port_clocks(op->out);
    }
}

void profile_op_close(sim_profile *p)
{
    profile_op *op = &p->op;
    profile_totals *t = &p->totals;
    bool reads = profile_cost_of(op->row).reads;
    uint32_t longest = 2 * op->bank;

    op->open = false;
    longest = op->in > longest ? op->in : longest;
    longest = op->out > longest ? op->out : longest;
    t->lds_bank += op->bank;
    t->lds_in += op->in;
    t->lds_out += op->out;
    t->lds_serial += longest;
    t->lds_conflict += op->conflict;
    t->ta += op->ta;
    if (op->row->issue == ISSUE_FLAT && op->row->format == F_FLAT) {
        t->flat++;
        if (op->lds && !op->other) {
            t->flat_lds_only++;
            t->flat_lds_reads += reads;
            t->flat_lds_writes += !reads;
        }
    }
    close_trace(p);
}
