/* code.h: code objects, found, loaded once and kept.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_CODE_H
#define FA_HOST_CODE_H

#include "host/driver.h"

#include <stdatomic.h>

typedef struct fa_code fa_code;

/* What is loaded, newest first.  Entries are only ever added, each complete,
 * by an atomic exchange of the head: a look-up takes no lock, and a fork at
 * any moment leaves the child a usable list. */
typedef struct fa_code_list {
    _Atomic(fa_code *) head;
} fa_code_list;

/* The kernel `variant` for `device`, loading code_dir's object for its
 * architecture and the variant's arithmetic on first use.  `arch` NULL asks the
 * driver.  The device must be current.  *hash is that of the object's bytes.
 * On failure *function is NULL. */
fa_status fa_code_function(fa_code_list *list, const fa_driver *driver,
                           const char *code_dir, int device, const char *arch,
                           const fa_variant *variant, void **function,
                           uint64_t *hash, fa_error *error);

/* Unloads everything; no other thread may use the list. */
void fa_code_clear(fa_code_list *list);

#endif
