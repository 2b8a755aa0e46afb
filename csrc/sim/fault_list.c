/* fault_list.c: reads the list of failures that a test asks for. hipsim.h has
 * the grammar.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "fault_list.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SPEC = 4096 };

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

const char *fault_kind_name(fault_kind kind)
{
    return kinds[kind].name;
}

void fault_list_free(fault_list *old)
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
        if ((f->given & BIT(i)) != 0) {
            return complain(error, size, "%s: expected %s once, got it twice",
                            kinds[f->kind].name, words[i].name);
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

bool fault_list_parse(const char *spec, fault_list *out, char *error,
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
            fault_list_free(out);
            return false;
        }
        at = end + 1;
    }
    return true;
}
