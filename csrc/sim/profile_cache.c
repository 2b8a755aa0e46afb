/* profile_cache.c: tags of L1, scalar cache and L2, and traffic to memory.
 *
 * Rules: L1 and scalar cache start cold and keep nothing that is written: a
 * store or atomic goes to L2 and drops the line. L2 holds written bytes until
 * the line is evicted or the launch ends; a line written in part is read from
 * memory only when someone reads it. Replacement is least recently used
 * everywhere. Instruction fetches, TLBs and the traffic of other launches are
 * not modelled.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "profile_model.h"

#include <stdlib.h>

typedef struct cache_line {
    uint64_t line;  /* + 1; 0: empty */
    uint64_t dirty; /* written bytes, L2 only */
    uint32_t used;  /* when */
    bool whole;     /* all bytes are there, not only the written ones */
} cache_line;

typedef struct cache {
    uint32_t sets, ways, now;
    cache_line *slot;
} cache;

struct profile_caches {
    uint32_t cus, scalars;
    cache *l1;     /* one per CU */
    cache *scalar; /* one per three CUs */
    cache l2;
};

static bool cache_create(cache *c, uint32_t bytes, uint32_t ways)
{
    c->ways = ways;
    c->sets = bytes / LINE_BYTES / ways;
    c->slot = calloc((size_t)c->sets * ways, sizeof *c->slot);
    return c->slot != NULL;
}

profile_caches *profile_caches_create(void)
{
    profile_caches *caches = calloc(1, sizeof *caches);
    bool good = caches != NULL;

    if (good) {
        caches->cus = COUNT(CUS);
        caches->scalars =
            (caches->cus + COUNT(SCALAR_CUS) - 1) / COUNT(SCALAR_CUS);
        caches->l1 = calloc(caches->cus, sizeof *caches->l1);
        caches->scalar = calloc(caches->scalars, sizeof *caches->scalar);
        good = caches->l1 != NULL && caches->scalar != NULL &&
               cache_create(&caches->l2, COUNT(L2_BYTES), COUNT(L2_WAYS));
    }
    for (uint32_t i = 0; good && i < caches->cus; i++) {
        good = cache_create(&caches->l1[i], COUNT(L1_BYTES), COUNT(L1_WAYS));
    }
    for (uint32_t i = 0; good && i < caches->scalars; i++) {
        good = cache_create(&caches->scalar[i], COUNT(SCALAR_BYTES),
                            COUNT(SCALAR_WAYS));
    }
    if (!good) {
        profile_caches_free(caches);
        return NULL;
    }
    return caches;
}

void profile_caches_free(profile_caches *caches)
{
    if (caches == NULL) {
        return;
    }
    for (uint32_t i = 0; caches->l1 != NULL && i < caches->cus; i++) {
        free(caches->l1[i].slot);
    }
    for (uint32_t i = 0; caches->scalar != NULL && i < caches->scalars; i++) {
        free(caches->scalar[i].slot);
    }
    free(caches->l1);
    free(caches->scalar);
    free(caches->l2.slot);
    free(caches);
}

/* The slot of a line, or the one to replace; *found tells. */
static cache_line *look_up(cache *c, uint64_t line, bool *found)
{
    cache_line *set = &c->slot[(size_t)(line % c->sets) * c->ways];
    cache_line *oldest = set;

    c->now++;
    for (uint32_t i = 0; i < c->ways; i++) {
        if (set[i].line == line + 1) {
            set[i].used = c->now;
            *found = true;
            return &set[i];
        }
        if (set[i].line == 0
                ? oldest->line != 0
                : oldest->line != 0 && set[i].used < oldest->used) {
            oldest = &set[i];
        }
    }
    *found = false;
    return oldest;
}

static void drop(cache *c, uint64_t line)
{
    bool found;
    cache_line *slot = look_up(c, line, &found);

    if (found) {
        slot->line = 0;
    }
}

/* ---- L2 and memory ------------------------------------------------------ */

/* The memory interface of the next request: they take turns, since it is not
 * known which lines go where. */
static unsigned next_interface(const uint64_t requests[2])
{
    return requests[1] < requests[0];
}

/* Written bytes go out as 64 bytes, or as the halves that have any. */
static void write_back(uint64_t dirty, profile_traffic *t)
{
    if (dirty == UINT64_MAX) {
        unsigned ea = next_interface(t->ea_writes);
        t->ea_writes[ea]++;
        t->ea_writes64[ea]++;
        return;
    }
    for (; dirty != 0; dirty >>= 32) {
        t->ea_writes[next_interface(t->ea_writes)] += (uint32_t)dirty != 0;
    }
}

/* True if the line came from memory. `written`: bytes it stores, 0 none. */
static bool l2_access(cache *c, uint64_t line, bool reads, uint64_t written,
                      profile_traffic *t)
{
    bool found, fetch;
    cache_line *slot = look_up(c, line, &found);

    if (!found) {
        if (slot->line != 0) {
            write_back(slot->dirty, t);
        }
        *slot = (cache_line){.line = line + 1, .used = c->now};
    }
    fetch = reads && !slot->whole && slot->dirty != UINT64_MAX;
    if (fetch) {
        slot->whole = true;
        t->ea_reads[next_interface(t->ea_reads)]++;
    }
    slot->dirty |= written;
    t->l2_hits += found && !fetch;
    t->l2_misses += !found || fetch;
    return fetch;
}

void profile_caches_flush(profile_caches *caches, profile_traffic *traffic)
{
    cache *c = &caches->l2;

    for (size_t i = 0; i < (size_t)c->sets * c->ways; i++) {
        if (c->slot[i].line != 0) {
            write_back(c->slot[i].dirty, traffic);
            c->slot[i].dirty = 0;
        }
    }
}

/* ---- one workgroup's lines ---------------------------------------------- */

/* A reader of a trace. */
typedef struct cursor {
    profile_trace *trace;
    size_t at;
    uint32_t memory; /* instructions read */
} cursor;

/* True if a first-level cache has the line; loads it if not. */
static bool first_level(cache *c, uint64_t line)
{
    bool found;
    cache_line *slot = look_up(c, line, &found);

    *slot = (cache_line){.line = line + 1, .used = c->now};
    return found;
}

static void one_line(profile_caches *caches, uint32_t cu, uint64_t line,
                     line_kind kind, uint64_t mask, profile_traffic *t,
                     profile_reach *reach)
{
    cache *l1 = &caches->l1[cu];
    cache *scalar = &caches->scalar[cu / COUNT(SCALAR_CUS)];
    bool vector = kind != LINE_SCALAR_READ && kind != LINE_SCALAR_WRITE;
    bool reads = kind == LINE_READ || kind == LINE_BYPASS ||
                 kind == LINE_ATOMIC || kind == LINE_SCALAR_READ;

    t->l1_accesses += vector;
    reach->lines++;
    if (kind == LINE_READ) {
        if (first_level(l1, line)) {
            return;
        }
        t->l1_reads++;
    } else if (kind == LINE_SCALAR_READ) {
        if (first_level(scalar, line)) {
            t->scalar_hits++;
            return;
        }
        t->scalar_misses++;
    } else {
        drop(vector ? l1 : scalar, line);
        t->l1_reads += kind == LINE_BYPASS;
        t->l1_atomics += kind == LINE_ATOMIC;
        t->l1_writes += kind == LINE_WRITE || kind == LINE_MASKED;
    }
    reach->l2++;
    reach->hbm += l2_access(&caches->l2, line, reads, mask, t);
}

/* Runs the lines of one instruction; false at the end of the trace. */
static bool step(profile_caches *caches, cursor *c, profile_traffic *t)
{
    profile_trace *trace = c->trace;
    uint32_t cu;
    profile_reach reach = {0};
    bool any = false;

    if (trace == NULL || c->at >= trace->words) {
        return false;
    }
    cu = (uint32_t)(trace->index % caches->cus);
    while (c->at < trace->words) {
        line_run run = profile_run_unpack(trace->word[c->at]);
        if (run.first && any) {
            break;
        }
        any = true;
        c->at++;
        uint64_t mask = run.kind == LINE_WRITE ? UINT64_MAX : 0;
        if (profile_line_has_mask(run.kind)) {
            mask = trace->word[c->at++];
        }
        for (uint32_t i = 0; i < run.count; i++) {
            one_line(caches, cu, run.line + i, run.kind, mask, t, &reach);
        }
    }
    if (trace->reach != NULL) {
        trace->reach[c->memory] = reach;
    }
    c->memory++;
    return true;
}

void profile_caches_run(profile_caches *caches, profile_trace **trace,
                        size_t count, profile_traffic *traffic)
{
    cursor *cursors = calloc(count, sizeof *cursors);
    bool more = true;

    for (size_t i = 0; i < count; i++) {
        if (trace[i] != NULL && trace[i]->sampled) {
            trace[i]->reach =
                calloc(trace[i]->memory + (size_t)1, sizeof(profile_reach));
        }
    }
    if (cursors == NULL) { /* no turns then: one after the other */
        for (size_t i = 0; i < count; i++) {
            cursor one = {.trace = trace[i]};
            while (step(caches, &one, traffic)) {
            }
        }
        return;
    }
    for (size_t i = 0; i < count; i++) {
        cursors[i].trace = trace[i];
    }
    while (more) {
        more = false;
        for (size_t i = 0; i < count; i++) {
            more |= step(caches, &cursors[i], traffic);
        }
    }
    free(cursors);
}
