/* text.h: a growing string (internal).
 *
 * Memory that runs out is remembered: `failed` stays set, later pieces are
 * ignored, and the text is not to be used. Begins as {0}; the owner frees
 * `text`.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_TEXT_H
#define HIPSIM_TEXT_H

#include <stdbool.h>
#include <stddef.h>

typedef struct sim_text {
    char *text; /* NULL until something was added */
    size_t length, capacity;
    bool failed;
} sim_text;

void sim_text_add(sim_text *to, const char *piece);

/* For pieces that are short whatever the input says: 511 bytes at most. */
void sim_text_format(sim_text *to, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* A JSON string; bytes that are not printable ASCII become escapes. */
void sim_text_string(sim_text *to, const char *text);

/* A JSON string of 16 hexadecimal digits, by which a program tells code from
 * other code (FNV-1a; no protection against a forger). */
void sim_text_hash(sim_text *to, const void *bytes, size_t count);

#endif
