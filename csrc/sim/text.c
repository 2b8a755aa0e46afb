/* text.c: a growing string.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "text.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void add_bytes(sim_text *to, const char *piece, size_t length)
{
    if (to->failed) {
        return;
    }
    if (to->capacity - to->length <= length) {
        size_t capacity = 2 * to->capacity + length + 256;
        char *grown = realloc(to->text, capacity);
        if (grown == NULL) {
            to->failed = true;
            return;
        }
        to->text = grown;
        to->capacity = capacity;
    }
    memcpy(to->text + to->length, piece, length);
    to->length += length;
    to->text[to->length] = '\0';
}

void sim_text_add(sim_text *to, const char *piece)
{
    add_bytes(to, piece, strlen(piece));
}

void sim_text_format(sim_text *to, const char *format, ...)
{
    char piece[512];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(piece, sizeof piece, format, args);
    va_end(args);
    sim_text_add(to, piece);
}

void sim_text_string(sim_text *to, const char *text)
{
    add_bytes(to, "\"", 1);
    for (; *text != '\0'; text++) {
        unsigned char byte = (unsigned char)*text;
        if (byte == '"' || byte == '\\') {
            add_bytes(to, "\\", 1);
        }
        if (byte < 0x20 || byte >= 0x7f) {
            sim_text_format(to, "\\u%04x", byte);
        } else {
            add_bytes(to, text, 1);
        }
    }
    add_bytes(to, "\"", 1);
}

void sim_text_hash(sim_text *to, const void *bytes, size_t count)
{
    const unsigned char *byte = bytes;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < count; i++) {
        hash = (hash ^ byte[i]) * UINT64_C(0x100000001b3);
    }
    sim_text_format(to, "\"%016" PRIx64 "\"", hash);
}
