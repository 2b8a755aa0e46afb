/* store_text.c: writing and reading the text of store_text.h.  Where it lies
 * is left to store.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host/store_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char title[] = "flash_attn_rocm breakers 1";

enum { HASH_DIGITS = 16 };

/* The last second of the year 9999: what is later is no time. */
static const int64_t latest = INT64_C(253402300799);

static const uint64_t fnv_start = UINT64_C(0xcbf29ce484222325);

uint64_t fa_store_hash(const void *data, size_t bytes)
{
    const char *text = data;
    uint64_t hash = fnv_start;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static bool all_between(const char *text, size_t length, char low, char high)
{
    for (size_t i = 0; i < length; i++) {
        if (text[i] < low || text[i] > high) {
            return false;
        }
    }
    return true;
}

/* -- what may be written --------------------------------------------------- */

bool fa_store_is_identity(const char *text, size_t length)
{
    return length > 0 && length < FA_IDENTITY_CHARS &&
           all_between(text, length, ' ', '~');
}

bool fa_store_is_kernel(const char *text, size_t length)
{
    return length > 0 && length < FA_KERNEL_CHARS &&
           all_between(text, length, '!', '~');
}

static bool is_cause(const char *text, size_t length)
{
    return length < FA_CAUSE_CHARS && all_between(text, length, ' ', '~');
}

static bool are_times(int64_t opened, int64_t retry)
{
    return opened >= 0 && opened <= retry && retry <= latest;
}

fa_status fa_store_check_identity(const char *identity, fa_error *error)
{
    const size_t length = strlen(identity);
    if (!fa_store_is_identity(identity, length)) {
        return fa_fail(error, FA_EINVAL,
                       "identity: expected a line of 1 to %d printable "
                       "characters, got %zu",
                       FA_IDENTITY_CHARS - 1, length);
    }
    return FA_OK;
}

fa_status fa_store_check_entry(const fa_store_entry *entry, fa_error *error)
{
    const char *end = memchr(entry->kernel, '\0', sizeof entry->kernel);
    if (end == NULL ||
        !fa_store_is_kernel(entry->kernel, (size_t)(end - entry->kernel))) {
        return fa_fail(error, FA_EINVAL,
                       "kernel: expected a word of 1 to %d printable "
                       "characters, got something else",
                       FA_KERNEL_CHARS - 1);
    }
    if (entry->failures != 0 && !are_times(entry->opened, entry->retry)) {
        return fa_fail(error, FA_EINVAL,
                       "retry: expected unix seconds from opened on, got "
                       "%" PRId64 " and opened %" PRId64,
                       entry->retry, entry->opened);
    }
    return FA_OK;
}

/* -- writing --------------------------------------------------------------- */

static size_t put_entry(char *to, size_t room, const fa_store_entry *e)
{
    char cause[FA_CAUSE_CHARS];
    snprintf(cause, sizeof cause, "%.*s", FA_CAUSE_CHARS - 1, e->cause);
    for (char *at = cause; *at != '\0'; at++) {
        const unsigned char byte = (unsigned char)*at;
        *at = byte < ' ' || byte == 0x7f ? ' ' : byte > '~' ? '?' : *at;
    }
    return (size_t)snprintf(
        to, room,
        "kernel %s %016" PRIx64 " %" PRIu32 " %" PRId64 " %" PRId64 " %s\n",
        e->kernel, e->code_hash, e->failures, e->opened, e->retry, cause);
}

void fa_store_format(fa_store_file *file)
{
    char *text = file->text;
    size_t n = (size_t)snprintf(text, sizeof file->text, "%s\ndevice %s\n",
                                title, file->identity);
    for (size_t i = 0; i < file->count; i++) {
        n += put_entry(text + n, sizeof file->text - n, &file->entry[i]);
    }
    n += (size_t)snprintf(text + n, sizeof file->text - n,
                          "checksum %016" PRIx64 "\n", fa_store_hash(text, n));
    file->bytes = n;
}

/* -- reading --------------------------------------------------------------- */

typedef struct span {
    const char *at;
    size_t length;
} span;

/* Takes from `rest` what lies before the next `stop`, and that. */
static bool take(span *rest, char stop, span *part)
{
    const char *end = memchr(rest->at, stop, rest->length);
    if (end == NULL) {
        return false;
    }
    part->at = rest->at;
    part->length = (size_t)(end - rest->at);
    rest->at = end + 1;
    rest->length -= part->length + 1;
    return true;
}

static bool take_text(span *rest, const char *text)
{
    const size_t length = strlen(text);
    if (rest->length < length || memcmp(rest->at, text, length) != 0) {
        return false;
    }
    rest->at += length;
    rest->length -= length;
    return true;
}

static bool to_hash(span word, uint64_t *value)
{
    static const char digits[] = "0123456789abcdef";
    *value = 0;
    for (size_t i = 0; i < word.length; i++) {
        const char *digit = memchr(digits, word.at[i], HASH_DIGITS);
        if (digit == NULL) {
            return false;
        }
        *value = *value << 4 | (uint64_t)(digit - digits);
    }
    return word.length == HASH_DIGITS;
}

static bool to_number(span word, int64_t *value)
{
    enum { MOST_DIGITS = 18 }; /* below 2^63 */
    *value = 0;
    if (word.length == 0 || word.length > MOST_DIGITS) {
        return false;
    }
    for (size_t i = 0; i < word.length; i++) {
        if (word.at[i] < '0' || word.at[i] > '9') {
            return false;
        }
        *value = *value * 10 + (word.at[i] - '0');
    }
    return true;
}

/* Of a line behind "kernel ". */
static bool parse_entry(span line, fa_store_entry *e)
{
    span kernel, hash, failures, opened, retry;
    int64_t count = 0;
    *e = (fa_store_entry){0};
    if (!take(&line, ' ', &kernel) || !take(&line, ' ', &hash) ||
        !take(&line, ' ', &failures) || !take(&line, ' ', &opened) ||
        !take(&line, ' ', &retry) ||
        !fa_store_is_kernel(kernel.at, kernel.length) ||
        !to_hash(hash, &e->code_hash) || !to_number(failures, &count) ||
        count < 1 || count > UINT32_MAX || !to_number(opened, &e->opened) ||
        !to_number(retry, &e->retry) || !are_times(e->opened, e->retry) ||
        !is_cause(line.at, line.length)) {
        return false;
    }
    memcpy(e->kernel, kernel.at, kernel.length);
    memcpy(e->cause, line.at, line.length);
    e->failures = (uint32_t)count;
    return true;
}

static bool is_known(const fa_store_file *file, const char *kernel)
{
    for (size_t i = 0; i < file->count; i++) {
        if (strcmp(file->entry[i].kernel, kernel) == 0) {
            return true;
        }
    }
    return false;
}

/* What is wrong with the text, or NULL.  Lines up to the one that is wrong are
 * in *file. */
static const char *parse(fa_store_file *file)
{
    static const size_t seal_bytes = sizeof "checksum " + HASH_DIGITS;
    span rest = {file->text, file->bytes};
    span line;
    uint64_t hash = 0;
    if (file->bytes == FA_STORE_BYTES) {
        return "less of it";
    }
    if (!take(&rest, '\n', &line) || line.length != strlen(title) ||
        memcmp(line.at, title, line.length) != 0) {
        return "another first line";
    }
    if (rest.length < seal_bytes) {
        return "a checksum at its end";
    }
    const size_t body = file->bytes - seal_bytes;
    span seal = {file->text + body, seal_bytes};
    if (!take_text(&seal, "checksum ") || !take(&seal, '\n', &line) ||
        !to_hash(line, &hash)) {
        return "a checksum at its end";
    }
    if (hash != fa_store_hash(file->text, body)) {
        return "another checksum";
    }
    rest.length -= seal_bytes;
    if (!take_text(&rest, "device ") || !take(&rest, '\n', &line) ||
        !fa_store_is_identity(line.at, line.length)) {
        return "a device in its second line";
    }
    memcpy(file->identity, line.at, line.length);
    while (rest.length != 0) {
        fa_store_entry *e = &file->entry[file->count];
        if (file->count == FA_STORE_MAX) {
            return "fewer kernels";
        }
        if (!take_text(&rest, "kernel ") || !take(&rest, '\n', &line) ||
            !parse_entry(line, e) || is_known(file, e->kernel)) {
            return "a kernel, its numbers and cause in each line";
        }
        file->count++;
    }
    return NULL;
}

fa_status fa_store_parse(fa_store_file *file, const char *name, fa_error *error)
{
    file->count = 0;
    memset(file->identity, 0, sizeof file->identity);
    const char *expected = parse(file);
    if (expected != NULL) {
        file->count = 0;
        return fa_fail(error, FA_EINVAL,
                       "%s: expected %s, got %zu bytes that are damaged or of "
                       "another version",
                       name, expected, file->bytes);
    }
    return FA_OK;
}
