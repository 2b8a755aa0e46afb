/* store_text.h: the text of a file of breakers.
 *
 *   flash_attn_rocm breakers 1
 *   device IDENTITY
 *   kernel SYMBOL CODE_HASH FAILURES OPENED RETRY CAUSE     (any number)
 *   checksum FNV-1a of all before
 *
 * Hashes have 16 hexadecimal digits, other numbers are decimal.  Nothing in it
 * is a path or code; each field is bounded, and looked at when it is read,
 * since a checksum is no proof of who wrote it.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_STORE_TEXT_H
#define FA_HOST_STORE_TEXT_H

#include "host/store.h"

enum { FA_STORE_BYTES = 128 * 1024 }; /* more than FA_STORE_MAX longest lines */

typedef struct fa_store_file {
    char identity[FA_IDENTITY_CHARS];
    size_t count;
    fa_store_entry entry[FA_STORE_MAX];
    size_t bytes; /* of the text; FA_STORE_BYTES: too long */
    char text[FA_STORE_BYTES];
} fa_store_file;

/* Whether the arguments of a call may be written; FA_EINVAL names the first
 * that may not. */
fa_status fa_store_check_identity(const char *identity, fa_error *error);
fa_status fa_store_check_entry(const fa_store_entry *entry, fa_error *error);

/* The text of identity and entries, and the reverse.  FA_EINVAL says what is
 * wrong with the text, as "name: expected ..."; there are then no entries. */
void fa_store_format(fa_store_file *file);
fa_status fa_store_parse(fa_store_file *file, const char *name,
                         fa_error *error);

#endif
