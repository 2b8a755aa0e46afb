/* faults.c: failures that a test asks for, from HIPSIM_FAULT or by call.
 *
 * Parses the list, counts launches and allocations against it, and does to a
 * running workgroup what was asked: at an exact instruction, so that a run can
 * be repeated. hipsim.h describes the kinds.
 *
 * State: the list with its counts, under the table lock, and how often each
 * kind has fired. The environment is read once, by whichever call comes first.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "faults.h"
#include "report.h"
#include "table.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FAULTS = 16, MAX_SPEC = 4096, MAX_BITS = 64 };

typedef enum fault_kind {
    KIND_LAUNCH,
    KIND_SLOW,
    KIND_ENDLESS,
    KIND_MEMORY,
    KIND_FLIP,
    KIND_ALLOC,
    KINDS
} fault_kind;

/* The words of the grammar that take a number. */
typedef enum fault_word {
    WORD_NTH,
    WORD_EVERY,
    WORD_FACTOR,
    WORD_AFTER,
    WORD_GROUP,
    WORD_ACCESS,
    WORD_SEED,
    WORD_BITS,
    WORD_AT,
    WORD_WITHIN,
    WORDS
} fault_word;

static const struct {
    const char *name;
    uint64_t lowest, highest, initial;
} words[WORDS] = {
    [WORD_NTH] = {"nth", 1, UINT64_MAX, 1},
    [WORD_EVERY] = {"every", 1, UINT64_MAX, 0},
    [WORD_FACTOR] = {"factor", 1, UINT64_MAX, 10},
    [WORD_AFTER] = {"after", 0, UINT64_MAX, 0},
    [WORD_GROUP] = {"group", 0, UINT64_MAX, 0},
    [WORD_ACCESS] = {"access", 1, UINT64_MAX, 1},
    [WORD_SEED] = {"seed", 0, UINT64_MAX, 0},
    [WORD_BITS] = {"bits", 1, MAX_BITS, 1},
    [WORD_AT] = {"at", 0, UINT64_MAX, 0},
    [WORD_WITHIN] = {"within", 1, UINT64_MAX, 1024},
};

#define BIT(word) (1u << (word))
#define COUNTED (BIT(WORD_NTH) | BIT(WORD_EVERY))

static const struct {
    const char *name;
    unsigned takes; /* BIT(WORD_*) */
    const char *expected;
} kinds[KINDS] = {
    [KIND_LAUNCH] = {"launch", COUNTED, "nth, every, kernel"},
    [KIND_SLOW] = {"slow", COUNTED | BIT(WORD_FACTOR),
                   "factor, nth, every, kernel"},
    [KIND_ENDLESS] = {"endless", COUNTED | BIT(WORD_AFTER),
                      "after, nth, every, kernel"},
    [KIND_MEMORY] = {"memory", COUNTED | BIT(WORD_GROUP) | BIT(WORD_ACCESS),
                     "group, access, nth, every, kernel"},
    [KIND_FLIP] = {"lds-flip",
                   COUNTED | BIT(WORD_SEED) | BIT(WORD_BITS) | BIT(WORD_GROUP) |
                       BIT(WORD_AT) | BIT(WORD_WITHIN),
                   "seed, bits, group, at, within, nth, every, kernel"},
    [KIND_ALLOC] = {"alloc", COUNTED, "nth, every"},
};

typedef struct fault {
    fault_kind kind;
    unsigned given; /* BIT(WORD_*) that the list states */
    uint64_t value[WORDS];
    char *kernel;  /* only launches of this one count, NULL: all */
    uint64_t seen; /* launches or allocations counted so far */
} fault;

typedef struct fault_list {
    fault fault[MAX_FAULTS];
    size_t count;
} fault_list;

static fault_list list;
static _Atomic bool armed; /* the list is not empty */
static _Atomic uint64_t fired[KINDS];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* ---- the list as text --------------------------------------------------- */

static void free_list(fault_list *old)
{
    for (size_t i = 0; i < old->count; i++) {
        free(old->fault[i].kernel);
    }
    old->count = 0;
}

static bool complain(char *error, size_t size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Always false, for the parsers to return. */
static bool complain(char *error, size_t size, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(error, size, format, args);
    va_end(args);
    return false;
}

static bool same(const char *name, const char *text, size_t length)
{
    return strlen(name) == length && memcmp(name, text, length) == 0;
}

static bool parse_number(const char *text, size_t length, uint64_t *value)
{
    *value = 0;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9' ||
            __builtin_mul_overflow(*value, 10, value) ||
            __builtin_add_overflow(*value, (uint64_t)(text[i] - '0'), value)) {
            return false;
        }
    }
    return length != 0;
}

/* One "word=value" of `length` characters. */
static bool parse_word(fault *f, const char *text, size_t length, char *error,
                       size_t size)
{
    const char *equals = memchr(text, '=', length);
    size_t name = equals != NULL ? (size_t)(equals - text) : length;
    const char *value = text + name + 1;
    size_t rest = name < length ? length - name - 1 : 0;

    if (same("kernel", text, name) && f->kind != KIND_ALLOC && rest != 0 &&
        f->kernel == NULL) {
        f->kernel = strndup(value, rest);
        return f->kernel != NULL || complain(error, size, "no memory");
    }
    for (unsigned i = 0; i < WORDS; i++) {
        if (!same(words[i].name, text, name) ||
            (kinds[f->kind].takes & BIT(i)) == 0) {
            continue;
        }
        f->given |= BIT(i);
        if (!parse_number(value, rest, &f->value[i]) ||
            f->value[i] < words[i].lowest || f->value[i] > words[i].highest) {
            return complain(error, size,
                            "%s: expected %s=NUMBER from %llu to %llu, got "
                            "'%.*s'",
                            kinds[f->kind].name, words[i].name,
                            (unsigned long long)words[i].lowest,
                            (unsigned long long)words[i].highest,
                            (int)(length < 80 ? length : 80), text);
        }
        return true;
    }
    return complain(error, size, "%s: expected WORD=VALUE of %s, got '%.*s'",
                    kinds[f->kind].name, kinds[f->kind].expected,
                    (int)(length < 80 ? length : 80), text);
}

/* One "kind:word=value,word=value" of `length` characters. */
static bool parse_fault(fault *f, const char *text, size_t length, char *error,
                        size_t size)
{
    const char *colon = memchr(text, ':', length);
    size_t name = colon != NULL ? (size_t)(colon - text) : length;
    unsigned kind = 0;

    while (kind < KINDS && !same(kinds[kind].name, text, name)) {
        kind++;
    }
    if (kind == KINDS) {
        return complain(error, size,
                        "expected launch, slow, endless, memory, lds-flip or "
                        "alloc, got '%.*s'",
                        (int)(name < 80 ? name : 80), text);
    }
    f->kind = (fault_kind)kind;
    for (unsigned i = 0; i < WORDS; i++) {
        f->value[i] = words[i].initial;
    }
    for (size_t at = name + 1; at <= length;) {
        const char *comma = memchr(text + at, ',', length - at);
        size_t end = comma != NULL ? (size_t)(comma - text) : length;
        if (!parse_word(f, text + at, end - at, error, size)) {
            return false;
        }
        at = end + 1;
    }
    return true;
}

/* False: malformed, *error says what was expected and *out is empty. */
static bool parse_list(const char *spec, fault_list *out, char *error,
                       size_t size)
{
    size_t length = spec != NULL ? strnlen(spec, MAX_SPEC) : 0;

    *out = (fault_list){.count = 0};
    if (length == MAX_SPEC) {
        return complain(error, size, "expected less than %d characters",
                        MAX_SPEC);
    }
    for (size_t at = 0; length != 0 && at <= length;) {
        const char *stop = memchr(spec + at, ';', length - at);
        size_t end = stop != NULL ? (size_t)(stop - spec) : length;
        bool good =
            out->count < MAX_FAULTS ||
            complain(error, size, "expected at most %d faults", MAX_FAULTS);
        /* Counted first, so that free_list finds what a failure leaves. */
        if (!good || !parse_fault(&out->fault[out->count++], spec + at,
                                  end - at, error, size)) {
            free_list(out);
            return false;
        }
        at = end + 1;
    }
    return true;
}

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
    free_list(&old);
}

static void read_environment(void)
{
    const char *spec = getenv("HIPSIM_FAULT");
    fault_list fresh;
    char error[256];

    if (parse_list(spec, &fresh, error, sizeof error)) {
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
    if (!parse_list(spec, &fresh, error, sizeof error)) {
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
        if (kind == NULL || strcmp(kinds[i].name, kind) == 0) {
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
