/* launch.c: a grid of workgroups over threads.
 *
 * Threads live for one launch: none outlives it, so a fork between launches
 * copies no half-dead pool. Workgroups are handed out in ascending order.
 * After a fault no later workgroup starts but every earlier one runs to its
 * end, so the lowest faulting workgroup is reported, whatever the number of
 * threads. Waves and instructions are left to exec*.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* sched_getaffinity */
#include "launch.h"
#include "faults.h"
#include "options.h"
#include "profile.h"
#include "races.h"
#include "report.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KERNARG_ALIGN = 64 };

/* Wave instructions per workgroup after which a checked kernel counts as
 * endless, if no budget is set: half a minute. */
#define CHECK_BUDGET UINT64_C(100000000)

/* Private bytes of a work-item. From code object v5 on compilers state only
 * what they know; where recursion, calls through pointers or variable arrays
 * add to it, bit 11 of the properties asks the runtime for a stack. */
uint32_t sim_launch_private(const sim_kernel *kernel)
{
    uint32_t known = kernel->descriptor.private_bytes;
    bool dynamic = (kernel->descriptor.properties >> 11 & 1) != 0;

    return dynamic && known <= SIM_MAX_PRIVATE - SIM_STACK ? known + SIM_STACK
                                                           : known;
}

hipError_t sim_launch_check(const sim_launch *launch)
{
    const sim_kernel *kernel = launch->kernel;
    const uint32_t *groups = launch->groups, *block = launch->block;
    uint64_t threads = 1;
    uint64_t lds =
        (uint64_t)kernel->descriptor.lds_bytes + launch->dynamic_lds_bytes;
    uint32_t limit =
        kernel->max_threads != 0 && kernel->max_threads < SIM_MAX_BLOCK
            ? kernel->max_threads
            : SIM_MAX_BLOCK;

    for (unsigned d = 0; d < 3; d++) {
        if (groups[d] == 0 || block[d] == 0 ||
            (uint64_t)groups[d] * block[d] > UINT32_MAX) {
            return sim_fail(hipErrorInvalidValue,
                            "%s: grid (%u,%u,%u) of workgroups (%u,%u,%u): "
                            "expected no zero and less than 2^32 work-items "
                            "per dimension",
                            kernel->name, groups[0], groups[1], groups[2],
                            block[0], block[1], block[2]);
        }
        threads *= block[d] <= SIM_MAX_BLOCK ? block[d] : SIM_MAX_BLOCK + 1;
    }
    if (threads > limit) {
        return sim_fail(hipErrorInvalidValue,
                        "%s: workgroup (%u,%u,%u): expected at most %u "
                        "work-items",
                        kernel->name, block[0], block[1], block[2], limit);
    }
    if ((uint64_t)groups[0] * groups[1] > UINT64_MAX / 4 / groups[2]) {
        return sim_fail(hipErrorInvalidValue,
                        "%s: grid (%u,%u,%u): too many workgroups",
                        kernel->name, groups[0], groups[1], groups[2]);
    }
    if (kernel->descriptor.private_bytes > SIM_MAX_PRIVATE) {
        return sim_fail(hipErrorInvalidValue,
                        "%s: %u bytes of private memory per work-item, "
                        "expected at most %d",
                        kernel->name, kernel->descriptor.private_bytes,
                        SIM_MAX_PRIVATE);
    }
    if (lds > SIM_MAX_LDS) {
        return sim_fail(hipErrorInvalidValue,
                        "%s: %u bytes of static and %u of dynamic LDS: "
                        "expected at most %d together",
                        kernel->name, kernel->descriptor.lds_bytes,
                        launch->dynamic_lds_bytes, SIM_MAX_LDS);
    }
    return hipSuccess;
}

/* ---- the report of a fault --------------------------------------------- */

static const struct {
    const char *text;
    const char *place; /* what fault.address is, NULL if nothing */
} fault_words[] = {
    [SIM_FAULT_NONE] = {"no fault", NULL},
    [SIM_FAULT_OPCODE] = {"unsupported instruction", NULL},
    [SIM_FAULT_ADDRESS] = {"illegal address", "address"},
    [SIM_FAULT_LDS] = {"LDS access out of range", "LDS offset"},
    [SIM_FAULT_SCRATCH] = {"scratch access out of range", "scratch offset"},
    [SIM_FAULT_ALIGNMENT] = {"misaligned access", "address"},
    [SIM_FAULT_PC] = {"jump outside the code", NULL},
    [SIM_FAULT_REGISTER] = {"illegal register", NULL},
    [SIM_FAULT_BUDGET] = {"instruction budget used up", NULL},
    [SIM_FAULT_TRAP] = {"trap", NULL},
    [SIM_FAULT_UNDEFINED] = {"undefined value", NULL},
    [SIM_FAULT_WAIT] = {"missing s_waitcnt", NULL},
    [SIM_FAULT_HAZARD] = {"missing wait states", NULL},
    [SIM_FAULT_RACE_LDS] = {"race in LDS", "LDS offset"},
    [SIM_FAULT_RACE] = {"race between workgroups", "address"},
    [SIM_FAULT_BARRIER] = {"barrier divergence", NULL},
    [SIM_FAULT_ELEMENT] = {"access outside a tensor's elements", "address"},
};

/* One clause about where an illegal address lies. */
static void describe_address(const sim_memory *memory, const sim_fault *fault,
                             char *text, size_t size)
{
    const sim_region *before = NULL, *holds = NULL;

    for (size_t i = 0; i < memory->count; i++) {
        const sim_region *r = &memory->region[i];
        if (r->begin <= fault->address && fault->address < r->end) {
            holds = r;
        } else if (r->end <= fault->address) {
            before = r;
        }
    }
    if (holds != NULL && fault->bytes <= holds->end - fault->address) {
        (void)snprintf(text, size,
                       "in an allocation that this launch may only %s",
                       holds->access == SIM_READ ? "read" : "write");
    } else if (holds != NULL) {
        (void)snprintf(text, size,
                       "reaches past the end of a %llu-byte allocation",
                       (unsigned long long)(holds->end - holds->begin));
    } else if (before != NULL && fault->address - before->end < 4096) {
        (void)snprintf(text, size,
                       "not in any allocation of this launch, "
                       "%llu bytes past the end of one of %llu",
                       (unsigned long long)(fault->address - before->end),
                       (unsigned long long)(before->end - before->begin));
    } else {
        (void)snprintf(text, size, "not in any allocation of this launch");
    }
}

hipError_t sim_launch_fault(const sim_dispatch *dispatch,
                            const sim_fault *fault)
{
    char place[192] = "", where[192] = "", source[192];
    hipError_t code = dispatch->timed && fault->kind == SIM_FAULT_BUDGET
                          ? hipErrorLaunchTimeOut
                          : hipErrorLaunchFailure;

    if (fault_words[fault->kind].place != NULL) {
        (void)snprintf(place, sizeof place, ", lane %u, %s 0x%llx, %u bytes",
                       fault->lane, fault_words[fault->kind].place,
                       (unsigned long long)fault->address, fault->bytes);
    }
    if (fault->kind == SIM_FAULT_ADDRESS) {
        code = hipErrorIllegalAddress;
        describe_address(dispatch->memory, fault, where, sizeof where);
    }
    bool known =
        sim_lines_place(dispatch->lines, dispatch->text_entry + fault->pc,
                        source, sizeof source);
    return sim_fail(
        code,
        "%s: %s at pc 0x%llx (%s)%s%s, workgroup (%u,%u,%u), wave "
        "%u%s%s%s%s%s%s",
        dispatch->kernel, fault_words[fault->kind].text,
        (unsigned long long)fault->pc, fault->instruction, known ? " at " : "",
        source, fault->group[0], fault->group[1], fault->group[2], fault->wave,
        place, where[0] != '\0' ? ", " : "", where,
        fault->detail[0] != '\0' ? ", " : "", fault->detail, fault->notes);
}

/* ---- threads ------------------------------------------------------------ */

typedef struct grid_run {
    const sim_dispatch *dispatch;
    uint64_t total;        /* workgroups */
    _Atomic uint64_t next; /* the next one to hand out */
    _Atomic uint64_t stop; /* none from this index on starts */
    pthread_mutex_t lock;  /* guards all below */
    uint64_t done;         /* workgroups run to their end */
    sim_stats stats;
    sim_fault fault; /* of workgroup `stop`, if stop < total */
} grid_run;

/* Takes workgroups until there is none left. */
static void *run_groups(void *argument)
{
    grid_run *run = argument;
    const sim_dispatch *dispatch = run->dispatch;
    sim_group *group = sim_group_create(dispatch);
    sim_stats stats = {0};
    uint64_t done = 0;

    if (group == NULL) {
        return NULL; /* another thread may have more luck */
    }
    for (;;) {
        uint64_t index = atomic_fetch_add(&run->next, 1);
        if (index >= run->total || index >= atomic_load(&run->stop)) {
            break;
        }
        sim_fault fault = {0};
        if (sim_group_run(group, dispatch, index, &stats, &fault)) {
            done++;
            continue;
        }
        (void)pthread_mutex_lock(&run->lock);
        if (index < atomic_load(&run->stop)) {
            atomic_store(&run->stop, index);
            run->fault = fault;
        }
        (void)pthread_mutex_unlock(&run->lock);
    }
    (void)pthread_mutex_lock(&run->lock);
    run->done += done;
    run->stats.wave_instructions += stats.wave_instructions;
    run->stats.waves += stats.waves;
    run->stats.workgroups += stats.workgroups;
    run->stats.misaligned += stats.misaligned;
    (void)pthread_mutex_unlock(&run->lock);
    sim_group_free(group);
    return NULL;
}

/* Threads for `total` workgroups, the caller included. */
static uint64_t thread_count(uint64_t total)
{
    uint64_t threads = (uint64_t)sim_option_get(SIM_OPTION_THREADS);
    cpu_set_t cores;

    if (threads == 0) {
        threads = 1;
        if (sched_getaffinity(0, sizeof cores, &cores) == 0) {
            threads = (uint64_t)CPU_COUNT(&cores);
        }
    }
    return threads < total ? threads : total;
}

/* The caller works too; if the system gives no more threads, alone. */
static void run_on_threads(grid_run *run)
{
    uint64_t helpers = thread_count(run->total) - 1, started = 0;
    pthread_t *thread = NULL;
    sigset_t all, before;

    if (helpers > 0) {
        thread = malloc((size_t)helpers * sizeof *thread);
    }
    if (thread != NULL) {
        /* Signals belong to the caller's threads, not to ours. */
        (void)sigfillset(&all);
        (void)pthread_sigmask(SIG_SETMASK, &all, &before);
        while (started < helpers &&
               pthread_create(&thread[started], NULL, run_groups, run) == 0) {
            started++;
        }
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    (void)run_groups(run);
    for (uint64_t i = 0; i < started; i++) {
        (void)pthread_join(thread[i], NULL);
    }
    free(thread);
}

static hipError_t run_grid(const sim_dispatch *dispatch, sim_stats *stats)
{
    grid_run run = {
        .dispatch = dispatch,
        .total = sim_groups_to_run(dispatch),
        .stop = UINT64_MAX,
        .lock = PTHREAD_MUTEX_INITIALIZER,
    };

    run_on_threads(&run);
    *stats = run.stats;
    (void)pthread_mutex_destroy(&run.lock);
    if (atomic_load(&run.stop) < run.total) {
        return sim_launch_fault(dispatch, &run.fault);
    }
    if (run.done != run.total) {
        return sim_fail(hipErrorOutOfMemory,
                        "%s: no memory for the registers of a workgroup",
                        dispatch->kernel);
    }
    return hipSuccess;
}

/* The smallest of what the option, the checks and the launch allow. */
static void set_budget(sim_dispatch *dispatch, uint64_t deadline)
{
    if (dispatch->check >= 2 && dispatch->budget == 0) {
        dispatch->budget = CHECK_BUDGET;
        dispatch->timed = deadline != 0;
    }
    if (deadline != 0 &&
        (dispatch->budget == 0 || deadline < dispatch->budget)) {
        dispatch->budget = deadline;
        dispatch->timed = true;
    }
}

hipError_t sim_launch_run(const sim_launch *launch, sim_region_list *memory,
                          sim_stats *stats)
{
    const sim_kernel *kernel = launch->kernel;
    /* Compilers widen scalar loads of arguments up to their alignment, so
     * the segment ends, readable, at the next multiple of 64 bytes. */
    size_t kernarg_bytes = ((size_t)kernel->kernarg_bytes + KERNARG_ALIGN) /
                           KERNARG_ALIGN * KERNARG_ALIGN;
    uint8_t *block =
        aligned_alloc(KERNARG_ALIGN, SIM_PACKET_BYTES + kernarg_bytes);
    hipError_t status = hipSuccess;
    sim_races *races = NULL;
    sim_memory table;
    sim_injection injection;

    *stats = (sim_stats){0};
    if (block == NULL) {
        return sim_fail(hipErrorOutOfMemory, "%s: no memory for arguments",
                        kernel->name);
    }
    memset(block, 0, SIM_PACKET_BYTES + kernarg_bytes);
    uint64_t packet = (uint64_t)(uintptr_t)block;
    uint64_t kernarg = packet + SIM_PACKET_BYTES;
    status = sim_kernarg_fill(launch, block + SIM_PACKET_BYTES);
    if (status != hipSuccess) {
        goto done;
    }
    sim_packet_fill(launch, kernarg, block);

    bool added = sim_regions_add(memory, packet,
                                 SIM_PACKET_BYTES + kernarg_bytes, SIM_READ);
    for (size_t i = 0; i < launch->object->segment_count; i++) {
        const sim_region *s = &launch->object->segment[i];
        added = added &&
                sim_regions_add(memory, s->begin, s->end - s->begin, s->access);
    }
    if (!added || !sim_regions_merge(memory)) {
        status = sim_fail(hipErrorOutOfMemory,
                          "%s: no memory for the table of allocations",
                          kernel->name);
        goto done;
    }
    table = (sim_memory){memory->region, memory->count};
    const int64_t only = sim_option_get(SIM_OPTION_MUTATED);
    const bool mutated = only == 0 || (uint64_t)only == kernel->code_bytes;
    sim_dispatch dispatch = {
        .kernel = kernel->name,
        .code = launch->code,
        .entry = (uint64_t)(uintptr_t)launch->object->image + kernel->entry,
        .code_bytes = kernel->code_bytes,
        .descriptor = kernel->descriptor,
        .lds_bytes = kernel->descriptor.lds_bytes + launch->dynamic_lds_bytes,
        .kernarg = kernarg,
        .packet = packet,
        .lines = launch->object->lines,
        .text_entry = kernel->entry - launch->object->text,
        .memory = &table,
        .check = (int)sim_option_get(SIM_OPTION_CHECK),
        .cpu = (int)sim_option_get(SIM_OPTION_CPU),
        .budget = (uint64_t)sim_option_get(SIM_OPTION_BUDGET),
        .sample = (uint64_t)sim_option_get(SIM_OPTION_SAMPLE),
        .seed = (uint64_t)sim_option_get(SIM_OPTION_SEED),
        .skip = mutated ? sim_option_get(SIM_OPTION_SKIP) : -1,
        .probe = mutated ? sim_option_get(SIM_OPTION_PROBE) : -1,
        .dot2 = (unsigned)sim_option_get(SIM_OPTION_DOT2),
        .adversarial_ulp = sim_option_get(SIM_OPTION_ULP) != 0,
    };
    dispatch.descriptor.private_bytes = sim_launch_private(kernel);
    dispatch.tensors = launch->tensors;
    if (dispatch.check >= 2) {
        dispatch.races = races = sim_races_create();
        if (races == NULL) {
            status = sim_fail(hipErrorOutOfMemory, "%s: no memory for checks",
                              kernel->name);
            goto done;
        }
    }
    set_budget(&dispatch, launch->deadline);
    for (unsigned d = 0; d < 3; d++) {
        dispatch.groups[d] = launch->groups[d];
        dispatch.block[d] = launch->block[d];
        dispatch.grid[d] = launch->groups[d] * launch->block[d];
    }
    uint64_t groups =
        (uint64_t)dispatch.groups[0] * dispatch.groups[1] * dispatch.groups[2];
    if (sim_faults_launch(kernel->name, groups, &injection)) {
        dispatch.injection = &injection;
        dispatch.budget = sim_faults_budget(&injection, dispatch.budget);
    }
    if (sim_option_get(SIM_OPTION_PROFILE) != 0) {
        dispatch.profile = profile_begin(
            &dispatch, (uint64_t)sim_option_get(SIM_OPTION_TRACED));
        if (dispatch.profile == NULL) {
            status = sim_fail(hipErrorOutOfMemory, "%s: no memory to profile",
                              kernel->name);
            goto done;
        }
    }
    status = injection.fail
                 ? sim_fail(hipErrorLaunchFailure,
                            "%s: launch failed by injection", kernel->name)
                 : run_grid(&dispatch, stats);
    stats->wave_instructions =
        sim_faults_cost(&injection, stats->wave_instructions);
    profile_finish(dispatch.profile, status == hipSuccess);

done:
    sim_races_free(races);
    free(block);
    return status;
}
