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

/* The text that `out` has collected, or NULL if memory ran out. */
static char *finish_text(FILE *out, char **text)
{
    bool bad = ferror(out) != 0;

    if (fclose(out) != 0 || bad) {
        free(*text);
        *text = NULL;
    }
    return *text;
}

void profile_keep(const profile_launch *launch,
                  const profile_schedule *schedule,
                  const profile_result *result)
{
    kept *one = calloc(1, sizeof *one), *old = NULL;
    size_t bytes = 0;
    FILE *out = one != NULL ? open_memstream(&one->text, &bytes) : NULL;

    if (out != NULL) {
        profile_put_launch(out, launch, schedule, result);
        (void)finish_text(out, &one->text);
    }
    sim_table_lock();
    add_sum(find_sum(&store, launch->dispatch->kernel), result);
    if (out == NULL || one->text == NULL) {
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

static void put_sums(FILE *out, const profile_store *s)
{
    (void)fputs("\"kernels\":[", out);
    for (const kernel_sum *k = s->kernels; k != NULL; k = k->next) {
        (void)fputc('{', out);
        profile_put_string(out, "kernel", k->kernel, ",");
        profile_put_member(out, "launches", (double)k->launches, ",");
        (void)fputs("\"seconds\":{", out);
        profile_put_member(out, "bound", profile_seconds(k->bound), ",");
        profile_put_member(out, "low", profile_seconds(k->low), ",");
        profile_put_member(out, "middle", profile_seconds(k->middle), ",");
        profile_put_member(out, "high", profile_seconds(k->high), "},");
        profile_put_counters(out, k->counter);
        (void)fputs(k->next != NULL ? "}," : "}", out);
    }
    (void)fputs("],", out);
}

HIPSIM_API hipError_t hipsimTakeProfile(char **json)
{
    profile_store taken;
    char *text = NULL;
    size_t bytes = 0;

    sim_report_clear();
    if (json == NULL) {
        return sim_fail(hipErrorInvalidValue, "profile: json is NULL");
    }
    *json = NULL;
    FILE *out = open_memstream(&text, &bytes);
    if (out == NULL) {
        return sim_fail(hipErrorOutOfMemory, "profile: no memory");
    }
    sim_table_lock();
    taken = store;
    store = (profile_store){0};
    sim_table_unlock();
    (void)fputs("{\"version\":1,", out);
    profile_put_device(out);
    profile_put_member(out, "launches_dropped", (double)taken.dropped, ",");
    put_sums(out, &taken);
    (void)fputs("\"launches\":[", out);
    for (const kept *one = taken.first; one != NULL; one = one->next) {
        (void)fputs(one->text, out);
        (void)fputs(one->next != NULL ? "," : "", out);
    }
    (void)fputs("]}", out);
    store_free(&taken);
    *json = finish_text(out, &text);
    return *json != NULL ? hipSuccess
                         : sim_fail(hipErrorOutOfMemory, "profile: no memory");
}
