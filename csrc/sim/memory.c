/* memory.c: which addresses a launch may touch.
 *
 * A launch collects the code object's segments, its kernarg segment, the
 * hipMalloc'ed blocks and its tensors, merges them once and never changes
 * the table again, so every thread reads it without a lock. Nothing here
 * reads or writes the memory itself: a region may be lazily committed.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "memory.h"

#include <stdlib.h>

bool sim_regions_add(sim_region_list *list, uint64_t begin, uint64_t bytes,
                     uint32_t access)
{
    if (bytes == 0) {
        return true;
    }
    if (begin > UINT64_MAX - bytes) {
        return false;
    }
    if (list->count == list->capacity) {
        size_t capacity = list->capacity != 0 ? 2 * list->capacity : 16;
        sim_region *grown =
            realloc(list->region, capacity * sizeof list->region[0]);
        if (grown == NULL) {
            return false;
        }
        list->region = grown;
        list->capacity = capacity;
    }
    list->region[list->count++] = (sim_region){begin, begin + bytes, access};
    return true;
}

void sim_regions_free(sim_region_list *list)
{
    free(list->region);
    *list = (sim_region_list){0};
}

/* One end of an input region: from `at` on, `step` more readers, writers. */
typedef struct edge {
    uint64_t at;
    int64_t step;
    uint32_t access;
} edge;

static int compare_edges(const void *left, const void *right)
{
    const edge *a = left, *b = right;

    return (a->at > b->at) - (a->at < b->at);
}

bool sim_regions_merge(sim_region_list *list)
{
    size_t edges = 2 * list->count;
    int64_t readers = 0, writers = 0;
    edge *sorted;
    sim_region *out;
    size_t count = 0;

    if (edges == 0) {
        return true;
    }
    sorted = malloc(edges * sizeof *sorted);
    out = malloc(edges * sizeof *out); /* at most one region per edge */
    if (sorted == NULL || out == NULL) {
        free(sorted);
        free(out);
        return false;
    }
    for (size_t i = 0; i < list->count; i++) {
        const sim_region *r = &list->region[i];
        sorted[2 * i] = (edge){r->begin, +1, r->access};
        sorted[2 * i + 1] = (edge){r->end, -1, r->access};
    }
    qsort(sorted, edges, sizeof *sorted, compare_edges);
    for (size_t i = 0; i < edges;) {
        uint64_t at = sorted[i].at;
        for (; i < edges && sorted[i].at == at; i++) {
            readers += sorted[i].access & SIM_READ ? sorted[i].step : 0;
            writers += sorted[i].access & SIM_WRITE ? sorted[i].step : 0;
        }
        uint32_t access =
            (readers > 0 ? SIM_READ : 0u) | (writers > 0 ? SIM_WRITE : 0u);
        if (i == edges || access == 0) {
            continue;
        }
        uint64_t end = sorted[i].at;
        if (count > 0 && out[count - 1].end == at &&
            out[count - 1].access == access) {
            out[count - 1].end = end;
        } else {
            out[count++] = (sim_region){at, end, access};
        }
    }
    free(sorted);
    free(list->region);
    *list = (sim_region_list){out, count, edges};
    return true;
}

const sim_region *sim_memory_find(const sim_memory *memory, uint64_t address,
                                  uint64_t bytes, uint32_t access)
{
    size_t low = 0, high = memory->count;

    if (address > UINT64_MAX - bytes) {
        return NULL;
    }
    while (low < high) { /* the first region that ends after address */
        size_t middle = low + (high - low) / 2;
        if (memory->region[middle].end > address) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    /* An access may cross from one region into the next if they abut: two
     * tensors of one storage, of which only one may be written. */
    uint64_t reached = address;
    for (size_t i = low; i < memory->count; i++) {
        const sim_region *r = &memory->region[i];
        if (r->begin > reached || (r->access & access) != access) {
            return NULL;
        }
        reached = r->end;
        if (reached - address >= bytes) {
            return &memory->region[low];
        }
    }
    return NULL;
}
