/* test_store_kills.c: writers that are killed at any instant lose nothing that
 * was written before, and leave nothing that stays.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "host/store.h"
#include "scratch.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

enum { KILLS = 1000, KERNELS = 4 };

static const char device[] = "gfx906 driver 6.3 runtime 5.7";

/* In memory that parent and child share. */
typedef struct progress {
    const char *folder;
    _Atomic uint32_t done[KERNELS]; /* the last put that returned */
    _Atomic uint32_t next;          /* number of a put */
    atomic_bool wrong;              /* one failed */
} progress;

static void name_kernel(int index, char name[FA_KERNEL_CHARS])
{
    snprintf(name, FA_KERNEL_CHARS, "kernel_%d", index);
}

static int write_without_end(void *context)
{
    progress *p = context;
    fa_error error;
    for (;;) {
        const uint32_t number = atomic_fetch_add(&p->next, 1);
        fa_store_entry e = {.failures = number, .opened = 1, .retry = 2};
        name_kernel((int)(number % KERNELS), e.kernel);
        if (fa_store_put(p->folder, device, &e, &error) != FA_OK) {
            atomic_store(&p->wrong, true);
            return 1;
        }
        atomic_store(&p->done[number % KERNELS], number);
    }
}

/* How many entries are older than the last put of them that returned. */
static int lost(const progress *p, const fa_store_entry *entries, size_t count)
{
    int missing = 0;
    for (int k = 0; k < KERNELS; k++) {
        char name[FA_KERNEL_CHARS];
        uint32_t failures = 0;
        name_kernel(k, name);
        for (size_t i = 0; i < count; i++) {
            if (strcmp(entries[i].kernel, name) == 0) {
                failures = entries[i].failures;
            }
        }
        missing += failures < atomic_load(&p->done[k]);
    }
    return missing;
}

static void store_is_whole_after_writers_were_killed_at_any_time(test_run *run)
{
    char folder[SCRATCH_CHARS];
    fa_store_entry entries[KERNELS];
    fa_error error;
    size_t count = 0;
    uint64_t state = 7;
    int in_the_middle = 0;
    progress *p = mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        abort();
    }
    scratch_folder(run, folder);
    p->folder = folder;
    atomic_store(&p->next, 1);
    for (int i = 0; i < KILLS; i++) {
        struct timespec pause = {0};
        state = state * UINT64_C(6364136223846793005) + 1;
        pause.tv_nsec = (long)((state >> 33) % 3000000); /* 0 to 3 ms */
        int child = scratch_start(write_without_end, p);
        nanosleep(&pause, NULL);
        kill(child, SIGKILL);
        scratch_wait(child);
        in_the_middle += scratch_count(folder, ".tmp") == 1;
        CHECK(run, fa_store_read(folder, device, entries, KERNELS, &count,
                                 &error) == FA_OK);
        CHECK(run, lost(p, entries, count) == 0);
    }
    CHECK(run, !atomic_load(&p->wrong));
    CHECK(run, scratch_count(folder, ".bad") == 0);
    /* The kills came while files were written, and writers did write. */
    CHECK(run, in_the_middle > KILLS / 50);
    CHECK(run, atomic_load(&p->next) > KILLS / 4);
    munmap(p, sizeof *p);
}

static void store_writers_clean_up_behind_killed_ones(test_run *run)
{
    char folder[SCRATCH_CHARS];
    fa_error error;
    const fa_store_entry e = {.kernel = "k", .failures = 1};
    scratch_folder(run, folder);
    scratch_write(folder, "replacement.tmp", "half a fi", 9);
    CHECK(run, fa_store_put(folder, device, &e, &error) == FA_OK);
    CHECK(run, scratch_count(folder, ".tmp") == 0);
    CHECK(run, scratch_count(folder, "") == 2); /* and the lock */
}

void test_store_kills(test_run *run)
{
    RUN(run, store_is_whole_after_writers_were_killed_at_any_time);
    RUN(run, store_writers_clean_up_behind_killed_ones);
}
