/* fault_list.h: the failures that a test asks for, as data (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_FAULT_LIST_H
#define HIPSIM_FAULT_LIST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_FAULTS = 16, MAX_BITS = 64 };

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

#define BIT(word) (1u << (word))

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

/* "launch", "slow", ... */
const char *fault_kind_name(fault_kind kind);

/* Reads a list as hipsim.h describes it. False: malformed, *error says what was
 * expected and *out is empty. */
bool fault_list_parse(const char *spec, fault_list *out, char *error,
                      size_t size);
void fault_list_free(fault_list *list);

#endif
