/* profile_store.c: profiled launches until hipsimTakeProfile takes them.
 *
 * State: launches not yet taken, under the lock of the library's tables. The
 * last KEEP_LAUNCHES are kept as text; per kernel name there is a sum over
 * all, up to KEEP_KERNELS names.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "profile_model.h"
#include "report.h"
#include "table.h"

#include <stdlib.h>
#include <string.h>

enum { KEEP_LAUNCHES = 64, KEEP_KERNELS = 256 };

typedef struct kept {
    struct kept *next;
    char *text;
} kept;

/* All launches of one kernel since the last take. */
typedef struct kernel_sum {
    struct kernel_sum *next;
    char *kernel;
    uint64_t launches;
    double counter[PROFILE_COUNTERS];
    double low, middle, high, bound; /* clocks */
} kernel_sum;

typedef struct profile_store {
    kept *first, *last;
    size_t count;
    uint64_t dropped; /* launches whose text had to go */
    kernel_sum *kernels;
    size_t names;
} profile_store;

static profile_store store;

static void kept_free(kept *one)
{
    free(one->text);
    free(one);
}

static void store_free(profile_store *s)
{
    while (s->first != NULL) {
        kept *one = s->first;
        s->first = one->next;
        kept_free(one);
    }
    while (s->kernels != NULL) {
        kernel_sum *one = s->kernels;
        s->kernels = one->next;
        free(one->kernel);
        free(one);
    }
}

/* The sum of a kernel, made if need be; NULL if there is no room. */
static kernel_sum *find_sum(profile_store *s, const char *kernel)
{
    kernel_sum **at = &s->kernels;

    for (; *at != NULL; at = &(*at)->next) {
        if (strcmp((*at)->kernel, kernel) == 0) {
            return *at;
        }
    }
    if (s->names == KEEP_KERNELS) {
        return NULL;
    }
    kernel_sum *made = calloc(1, sizeof *made);
    if (made != NULL && (made->kernel = strdup(kernel)) == NULL) {
        free(made);
        made = NULL;
    }
    if (made != NULL) {
        *at = made;
        s->names++;
    }
    return made;
}

static void add_sum(kernel_sum *sum, const profile_result *result)
{
    double longest = 0;

    if (sum == NULL) {
        return;
    }
    for (unsigned i = 0; i < PROFILE_COUNTERS; i++) {
        sum->counter[i] += result->counter[i];
    }
    for (unsigned i = 0; i < PROFILE_BOUNDS; i++) {
        longest = result->bound[i] > longest ? result->bound[i] : longest;
    }
    sum->launches++;
    sum->low += result->low;
    sum->middle += result->middle;
    sum->high += result->high;
    sum->bound += longest;
}

void profile_keep(const profile_launch *launch,
                  const profile_schedule *schedule,
                  const profile_result *result)
{
    kept *one = calloc(1, sizeof *one), *old = NULL;
    sim_text out = {0};

    profile_put_launch(&out, launch, schedule, result);
    if (one != NULL) {
        one->text = out.text;
    } else {
        free(out.text);
    }
    sim_table_lock();
    add_sum(find_sum(&store, launch->dispatch->kernel), result);
    if (one == NULL || out.failed) {
        store.dropped++;
        old = one;
    } else {
        if (store.count == KEEP_LAUNCHES) {
            old = store.first;
            store.first = old->next;
            store.dropped++;
        } else {
            store.count++;
        }
        if (store.first == NULL) {
            store.first = one;
        } else {
            store.last->next = one;
        }
        store.last = one;
    }
    sim_table_unlock();
    if (old != NULL) {
        kept_free(old);
    }
}

static void put_sums(sim_text *out, const profile_store *s)
{
    sim_text_add(out, "\"kernels\":[");
    for (const kernel_sum *k = s->kernels; k != NULL; k = k->next) {
        sim_text_add(out, "{");
        profile_put_string(out, "kernel", k->kernel, ",");
        profile_put_member(out, "launches", (double)k->launches, ",");
        sim_text_add(out, "\"seconds\":{");
        profile_put_member(out, "bound", profile_seconds(k->bound), ",");
        profile_put_member(out, "low", profile_seconds(k->low), ",");
        profile_put_member(out, "middle", profile_seconds(k->middle), ",");
        profile_put_member(out, "high", profile_seconds(k->high), "},");
        profile_put_member(out, "error", CONST(ERROR), ",");
        profile_put_counters(out, k->counter);
        sim_text_add(out, k->next != NULL ? "}," : "}");
    }
    sim_text_add(out, "],");
}

static void put_profile(sim_text *out, const profile_store *s)
{
    sim_text_add(out, "{\"version\":1,");
    profile_put_device(out);
    profile_put_member(out, "launches_dropped", (double)s->dropped, ",");
    put_sums(out, s);
    sim_text_add(out, "\"launches\":[");
    for (const kept *one = s->first; one != NULL; one = one->next) {
        sim_text_add(out, one->text);
        sim_text_add(out, one->next != NULL ? "," : "");
    }
    sim_text_add(out, "]}");
}

HIPSIM_API hipError_t hipsimTakeProfile(char **json)
{
    profile_store taken = {0};
    sim_text out = {0};

    sim_report_clear();
    if (json == NULL) {
        return sim_fail(hipErrorInvalidValue, "profile: json is NULL");
    }
    *json = NULL;
    sim_table_lock();
    put_profile(&out, &store);
    if (!out.failed) {
        taken = store;
        store = (profile_store){0};
    }
    sim_table_unlock();
    if (out.failed) {
        free(out.text);
        return sim_fail(hipErrorOutOfMemory,
                        "profile: no memory for text of %zu bytes and more; "
                        "the launches are kept",
                        out.length);
    }
    store_free(&taken);
    *json = out.text;
    return hipSuccess;
}
