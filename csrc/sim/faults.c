/* faults.c: failures that a test asks for, from HIPSIM_FAULT or by call.
 *
 * Counts launches and allocations against the list, and does to a running
 * workgroup what was asked: at an exact instruction, so that a run can be
 * repeated. hipsim.h describes the kinds, fault_list.c reads the list.
 *
 * State: the list with its counts, under the table lock, and how often each
 * kind has fired. The environment is read once, by whichever call comes first.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "faults.h"
#include "fault_list.h"
#include "report.h"
#include "table.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fault_list list;
static _Atomic bool armed; /* the list is not empty */
static _Atomic uint64_t fired[KINDS];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* ---- setting and asking ------------------------------------------------- */

static void install(const fault_list *fresh)
{
    sim_table_lock();
    fault_list old = list;
    list = *fresh;
    for (unsigned i = 0; i < KINDS; i++) {
        atomic_store(&fired[i], 0);
    }
    atomic_store(&armed, list.count != 0);
    sim_table_unlock();
    fault_list_free(&old);
}

static void read_environment(void)
{
    const char *spec = getenv("HIPSIM_FAULT");
    fault_list fresh;
    char error[256];

    if (fault_list_parse(spec, &fresh, error, sizeof error)) {
        install(&fresh);
    } else {
        (void)fprintf(stderr, "hipsim: HIPSIM_FAULT: %s; no fault is set\n",
                      error);
    }
}

static bool is_armed(void)
{
    (void)pthread_once(&once, read_environment);
    return atomic_load(&armed);
}

HIPSIM_API hipError_t hipsimSetFault(const char *spec)
{
    fault_list fresh;
    char error[256];

    sim_report_clear();
    (void)is_armed(); /* the environment first, then the call */
    if (!fault_list_parse(spec, &fresh, error, sizeof error)) {
        return sim_fail(hipErrorInvalidValue, "fault: %s", error);
    }
    install(&fresh);
    return hipSuccess;
}

HIPSIM_API hipError_t hipsimFaultsFired(const char *kind, uint64_t *count)
{
    bool known = kind == NULL;

    sim_report_clear();
    (void)is_armed();
    if (count == NULL) {
        return sim_fail(hipErrorInvalidValue, "faults fired: count is NULL");
    }
    *count = 0;
    for (unsigned i = 0; i < KINDS; i++) {
        if (kind == NULL || strcmp(fault_kind_name((fault_kind)i), kind) == 0) {
            *count += atomic_load(&fired[i]);
            known = true;
        }
    }
    return known ? hipSuccess
                 : sim_fail(hipErrorInvalidValue,
                            "faults fired: expected launch, slow, endless, "
                            "memory, lds-flip or alloc, got '%s'",
                            kind);
}

/* ---- launches and allocations ------------------------------------------- */

/* Counts one event; true if the fault strikes it. */
static bool strikes(fault *f)
{
    uint64_t nth = f->value[WORD_NTH], every = f->value[WORD_EVERY];

    f->seen++;
    return f->seen == nth ||
           (every != 0 && f->seen > nth && (f->seen - nth) % every == 0);
}

/* What the seed chooses: workgroup and instruction unless they are given, and
 * the state from which the bits will be drawn. Each launch draws afresh. */
static void plan_flip(const fault *f, uint64_t groups, sim_injection *injection)
{
    uint64_t state = f->value[WORD_SEED] + (f->seen << 32);
    uint64_t group = exec_random(&state) % groups;
    uint64_t at = exec_random(&state) % f->value[WORD_WITHIN];

    injection->flip_bits = (uint32_t)f->value[WORD_BITS];
    injection->flip_group =
        (f->given & BIT(WORD_GROUP)) != 0 ? f->value[WORD_GROUP] : group;
    injection->flip_at =
        (f->given & BIT(WORD_AT)) != 0 ? f->value[WORD_AT] : at;
    injection->flip_seed = state;
}

bool sim_faults_launch(const char *kernel, uint64_t groups,
                       sim_injection *injection)
{
    bool any = false;

    *injection = (sim_injection){.fail = false};
    if (!is_armed()) {
        return false;
    }
    sim_table_lock();
    for (size_t i = 0; i < list.count; i++) {
        fault *f = &list.fault[i];
        if (f->kind == KIND_ALLOC ||
            (f->kernel != NULL && strcmp(f->kernel, kernel) != 0) ||
            !strikes(f)) {
            continue;
        }
        any = true;
        switch (f->kind) {
        case KIND_SLOW:
            injection->factor = f->value[WORD_FACTOR];
            break;
        case KIND_ENDLESS:
            injection->endless = true;
            injection->endless_after = f->value[WORD_AFTER];
            break;
        case KIND_MEMORY:
            injection->memory = true;
            injection->memory_group = f->value[WORD_GROUP];
            injection->memory_access = f->value[WORD_ACCESS];
            break;
        case KIND_FLIP:
            plan_flip(f, groups, injection);
            break;
        default:
            injection->fail = true;
            break;
        }
    }
    if (injection->fail) { /* nothing else can happen to it */
        *injection = (sim_injection){.fail = true};
        atomic_fetch_add(&fired[KIND_LAUNCH], 1);
    } else { /* the others count when they happen */
        atomic_fetch_add(&fired[KIND_SLOW], injection->factor != 0);
        atomic_fetch_add(&fired[KIND_ENDLESS], injection->endless);
    }
    sim_table_unlock();
    return any;
}

bool sim_faults_alloc(void)
{
    bool fail = false;

    if (!is_armed()) {
        return false;
    }
    sim_table_lock();
    for (size_t i = 0; i < list.count; i++) {
        if (list.fault[i].kind == KIND_ALLOC && strikes(&list.fault[i])) {
            fail = true;
        }
    }
    sim_table_unlock();
    if (fail) {
        atomic_fetch_add(&fired[KIND_ALLOC], 1);
    }
    return fail;
}

uint64_t sim_faults_cost(const sim_injection *injection, uint64_t instructions)
{
    uint64_t cost;

    if (injection->factor == 0) {
        return instructions;
    }
    return __builtin_mul_overflow(instructions, injection->factor, &cost)
               ? UINT64_MAX
               : cost;
}

uint64_t sim_faults_budget(const sim_injection *injection, uint64_t budget)
{
    if (budget == 0 && injection->endless) {
        budget = SIM_ENDLESS_BUDGET;
    }
    if (budget == 0 || injection->factor == 0) {
        return budget;
    }
    budget /= injection->factor;
    return budget != 0 ? budget : 1; /* 0 would mean none */
}

/* ---- in a running workgroup --------------------------------------------- */

/* The rest of the budget passes without an instruction taking effect. */
static void hang(wave *w)
{
    w->group->executed = w->group->dispatch->budget;
    w->row = NULL; /* the report names the next instruction */
    exec_fault(w, SIM_FAULT_BUDGET, "endless by injection");
}

/* Flips so many different bits of the workgroup's LDS. */
static void flip(sim_group *g, const sim_injection *injection)
{
    uint64_t bits = (uint64_t)g->lds_bytes * 8, done[MAX_BITS];
    uint64_t state = injection->flip_seed;
    uint32_t count = 0;

    g->flipped = true;
    while (count < injection->flip_bits && count < bits) {
        uint64_t bit = exec_random(&state) % bits;
        bool again = false;
        for (uint32_t i = 0; i < count; i++) {
            again |= done[i] == bit;
        }
        if (!again) {
            g->lds[bit / 8] ^= (uint8_t)(1u << bit % 8);
            done[count++] = bit;
        }
    }
    if (count != 0) {
        atomic_fetch_add(&fired[KIND_FLIP], 1);
    }
}

/* Runs one instruction. If it accesses memory and its turn has come it finds
 * an empty table of regions, and fails if a lane reaches for one. */
static void run_blind(wave *w, const sim_injection *injection,
                      void (*run)(wave *, uint32_t))
{
    static const sim_memory nothing;
    sim_group *g = w->group;
    const sim_dispatch *dispatch = g->dispatch;
    sim_dispatch blind = *dispatch;
    const sim_code *code = dispatch->code;
    unsigned issue =
        w->pc < code->count ? code->row[w->pc].issue : (unsigned)ISSUE_FAULT;

    if ((issue != ISSUE_FLAT && issue != ISSUE_MUBUF) ||
        ++g->accesses < injection->memory_access) {
        run(w, 1);
        return;
    }
    blind.memory = &nothing;
    g->dispatch = &blind;
    memset(g->seen, 0, sizeof g->seen);
    run(w, 1);
    memset(g->seen, 0, sizeof g->seen);
    g->dispatch = dispatch;
    if (g->fault->kind == SIM_FAULT_ADDRESS) {
        (void)snprintf(g->fault->detail, sizeof g->fault->detail,
                       "by injection");
        atomic_fetch_add(&fired[KIND_MEMORY], 1);
    }
}

void sim_faults_run(wave *w, uint32_t slice, void (*run)(wave *, uint32_t))
{
    sim_group *g = w->group;
    const sim_injection *injection = g->dispatch->injection;
    uint64_t index = exec_group_index(g);
    bool memory = injection->memory && injection->memory_group == index;
    bool flips = injection->flip_bits != 0 && injection->flip_group == index;

    while (slice != 0 && w->state == WAVE_RUNNING) {
        uint64_t part = slice, at = injection->endless_after;
        if (injection->endless && g->executed >= at) {
            hang(w);
            return;
        }
        if (injection->endless && at - g->executed < part) {
            part = at - g->executed;
        }
        at = injection->flip_at;
        if (flips && !g->flipped && g->executed >= at) {
            flip(g, injection);
        }
        if (flips && !g->flipped && at - g->executed < part) {
            part = at - g->executed;
        }
        if (memory) {
            part = 1;
            run_blind(w, injection, run);
        } else {
            run(w, (uint32_t)part);
        }
        slice -= (uint32_t)part;
    }
}

bool sim_faults_end(sim_group *group)
{
    if (group->dispatch->injection->endless) {
        hang(&group->waves[group->turn]);
        return false;
    }
    return true;
}
