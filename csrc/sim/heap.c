/* heap.c: hipMalloc and friends; device memory is host memory.
 *
 * Each block is its own lazily committed mapping with a red zone before and
 * after, which no launch may touch. At check level 1 the zones carry a
 * pattern that hipFree verifies, which finds host code that writes past a
 * block. Copies may name any host address that can be accessed, but a range
 * that begins in a block must end in it. The addresses of the blocks freed
 * last stay reserved, without memory, so that nothing else can come to lie
 * there and a use after hipFree is found.
 *
 * State: the blocks and those freed last, under the table lock.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "device.h"
#include "faults.h"
#include "host_memory.h"
#include "options.h"
#include "report.h"
#include "table.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { RED_ZONE = 4096, PAGE = 4096, PATTERN = 0xa5, KEPT = 64 };

typedef struct block {
    struct block *next;
    uint8_t *mapping; /* RED_ZONE, data, filling, RED_ZONE */
    size_t mapping_bytes, bytes;
    bool patterned;
} block;

static block *blocks;
static uint64_t total_bytes;
static block *freed[KEPT]; /* a ring */
static unsigned next_freed;

static uint8_t *block_data(const block *b)
{
    return b->mapping + RED_ZONE;
}

bool sim_heap_regions(sim_region_list *list)
{
    for (const block *b = blocks; b != NULL; b = b->next) {
        if (!sim_regions_add(list, (uint64_t)(uintptr_t)block_data(b), b->bytes,
                             SIM_READ | SIM_WRITE)) {
            return false;
        }
    }
    return true;
}

static void fill_red_zones(block *b)
{
    size_t tail = RED_ZONE + b->bytes;

    memset(b->mapping, PATTERN, RED_ZONE);
    memset(b->mapping + tail, PATTERN, b->mapping_bytes - tail);
    b->patterned = true;
}

/* The offset from the block's first byte of the first damaged byte of its
 * red zones, or 0 if they are whole (byte 0 belongs to the block). */
static int64_t find_damage(const block *b)
{
    size_t tail = RED_ZONE + b->bytes;

    for (size_t i = 0; i < RED_ZONE; i++) {
        if (b->mapping[i] != PATTERN) {
            return (int64_t)i - RED_ZONE;
        }
    }
    for (size_t i = tail; i < b->mapping_bytes; i++) {
        if (b->mapping[i] != PATTERN) {
            return (int64_t)i - RED_ZONE;
        }
    }
    return 0;
}

HIPSIM_API hipError_t hipMalloc(void **pointer, size_t bytes)
{
    sim_report_clear();
    if (pointer == NULL) {
        return sim_fail(hipErrorInvalidValue, "hipMalloc: pointer is NULL");
    }
    *pointer = NULL;
    if (bytes == 0) {
        return hipSuccess;
    }
    if (sim_faults_alloc()) {
        return sim_fail(hipErrorOutOfMemory,
                        "hipMalloc: %zu bytes refused by injection", bytes);
    }
    block *b = malloc(sizeof *b);
    if (b == NULL || bytes > SIM_DEVICE_MEMORY) {
        free(b);
        return sim_fail(hipErrorOutOfMemory,
                        "hipMalloc: %zu bytes, the device has %llu", bytes,
                        (unsigned long long)SIM_DEVICE_MEMORY);
    }
    *b = (block){.bytes = bytes};
    b->mapping_bytes = 2 * RED_ZONE + (bytes + PAGE - 1) / PAGE * PAGE;
    b->mapping = mmap(NULL, b->mapping_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (b->mapping == MAP_FAILED) {
        free(b);
        return sim_fail(hipErrorOutOfMemory,
                        "hipMalloc: the host gives no %zu bytes", bytes);
    }
    if (sim_option_get(SIM_OPTION_CHECK) >= 1) {
        fill_red_zones(b);
    }
    sim_table_lock();
    bool fits = bytes <= SIM_DEVICE_MEMORY - total_bytes;
    uint64_t used = total_bytes;
    if (fits) {
        total_bytes += bytes;
        b->next = blocks;
        blocks = b;
    }
    sim_table_unlock();
    if (!fits) {
        (void)munmap(b->mapping, b->mapping_bytes);
        free(b);
        return sim_fail(hipErrorOutOfMemory,
                        "hipMalloc: %zu bytes, the device has %llu of which "
                        "%llu are in use",
                        bytes, (unsigned long long)SIM_DEVICE_MEMORY,
                        (unsigned long long)used);
    }
    *pointer = block_data(b);
    return hipSuccess;
}

/* Gives the block's memory back and keeps its addresses for a while. */
static void retire(block *b)
{
    if (mmap(b->mapping, b->mapping_bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0) == MAP_FAILED) {
        (void)munmap(b->mapping, b->mapping_bytes);
        free(b);
        return;
    }
    sim_table_lock();
    block *oldest = freed[next_freed];
    freed[next_freed] = b;
    next_freed = (next_freed + 1) % KEPT;
    sim_table_unlock();
    if (oldest != NULL) {
        (void)munmap(oldest->mapping, oldest->mapping_bytes);
        free(oldest);
    }
}

HIPSIM_API hipError_t hipFree(void *pointer)
{
    block *found = NULL;

    sim_report_clear();
    if (pointer == NULL) {
        return hipSuccess;
    }
    sim_table_lock();
    for (block **link = &blocks; *link != NULL; link = &(*link)->next) {
        if (block_data(*link) == pointer) {
            found = *link;
            *link = found->next;
            total_bytes -= found->bytes;
            break;
        }
    }
    sim_table_unlock();
    if (found == NULL) {
        return sim_fail(hipErrorInvalidValue,
                        "hipFree: %p is not the start of an allocation",
                        pointer);
    }
    int64_t damage = found->patterned ? find_damage(found) : 0;
    size_t bytes = found->bytes;
    retire(found);
    if (damage != 0) {
        return sim_fail(hipErrorIllegalAddress,
                        "hipFree: the host wrote to byte %lld of a block of "
                        "%zu bytes",
                        (long long)damage, bytes);
    }
    return hipSuccess;
}

static bool overlaps(const block *b, uint64_t at, size_t bytes)
{
    uint64_t low = (uint64_t)(uintptr_t)b->mapping;

    return at < low + b->mapping_bytes && at + bytes > low;
}

/* Refuses a range that touches a block (or its red zones) and is not all inside
 * it, one of a block that was freed, and host memory that is not there. */
static hipError_t check_range(const char *call, const char *name,
                              const void *pointer, size_t bytes, bool writes)
{
    uint64_t at = (uint64_t)(uintptr_t)pointer;
    hipError_t status = hipSuccess;
    bool inside = false;

    if (pointer == NULL || at > UINT64_MAX - bytes) {
        return sim_fail(hipErrorInvalidValue, "%s: %s is %p, %zu bytes", call,
                        name, pointer, bytes);
    }
    sim_table_lock();
    for (const block *b = blocks; b != NULL && !inside; b = b->next) {
        uint64_t begin = (uint64_t)(uintptr_t)block_data(b);
        if (!overlaps(b, at, bytes)) {
            continue;
        }
        inside = true;
        if (at < begin || at + bytes > begin + b->bytes) {
            status = sim_fail(hipErrorInvalidValue,
                              "%s: %s: bytes %lld to %lld of a block of %zu",
                              call, name, (long long)(at - begin),
                              (long long)(at + bytes - begin), b->bytes);
        }
    }
    for (unsigned i = 0; i < KEPT && !inside; i++) {
        if (freed[i] != NULL && overlaps(freed[i], at, bytes)) {
            inside = true;
            status = sim_fail(hipErrorInvalidValue,
                              "%s: %s: in a block of %zu bytes that was freed",
                              call, name, freed[i]->bytes);
        }
    }
    sim_table_unlock();
    if (!inside && !sim_host_accessible(pointer, bytes, writes)) {
        status =
            sim_fail(hipErrorInvalidValue,
                     "%s: %s: %p, %zu bytes: neither in a block nor host "
                     "memory that can be %s",
                     call, name, pointer, bytes, writes ? "written" : "read");
    }
    return status;
}

static hipError_t copy(const char *call, void *to, const void *from,
                       size_t bytes, int kind)
{
    if (kind < 0 || kind > 4) {
        return sim_fail(hipErrorInvalidValue, "%s: kind %d, expected 0 to 4",
                        call, kind);
    }
    if (bytes == 0) {
        return hipSuccess;
    }
    hipError_t status = check_range(call, "destination", to, bytes, true);
    if (status == hipSuccess) {
        status = check_range(call, "source", from, bytes, false);
    }
    if (status == hipSuccess) {
        memmove(to, from, bytes);
    }
    return status;
}

HIPSIM_API hipError_t hipMemcpy(void *to, const void *from, size_t bytes,
                                int kind)
{
    sim_report_clear();
    return copy("hipMemcpy", to, from, bytes, kind);
}

HIPSIM_API hipError_t hipMemcpyAsync(void *to, const void *from, size_t bytes,
                                     int kind, hipStream_t stream)
{
    sim_report_clear();
    hipError_t status = sim_stream_check(stream);
    if (status == hipSuccess) {
        status = copy("hipMemcpyAsync", to, from, bytes, kind);
    }
    return status;
}

static hipError_t fill(const char *call, void *to, int value, size_t bytes)
{
    if (bytes == 0) {
        return hipSuccess;
    }
    hipError_t status = check_range(call, "destination", to, bytes, true);
    if (status == hipSuccess) {
        memset(to, value, bytes);
    }
    return status;
}

HIPSIM_API hipError_t hipMemset(void *to, int value, size_t bytes)
{
    sim_report_clear();
    return fill("hipMemset", to, value, bytes);
}

HIPSIM_API hipError_t hipMemsetAsync(void *to, int value, size_t bytes,
                                     hipStream_t stream)
{
    sim_report_clear();
    hipError_t status = sim_stream_check(stream);
    if (status == hipSuccess) {
        status = fill("hipMemsetAsync", to, value, bytes);
    }
    return status;
}
