/* store.h: breakers on disk, so that a process which starts after an abort
 * does not run into the same kernel again.
 *
 * One file for each identity of a device (one line of printable ASCII: device,
 * driver and runtime version), in a folder that files.h must trust: if it does
 * not, FA_EUNSUPPORTED, and nothing is read or written.  What the system
 * refuses (no space, read-only) is FA_EDEVICE.  Any thread, any process.
 * When a breaker opens and closes is left to the callers.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_STORE_H
#define FA_HOST_STORE_H

#include "fa.h"

enum {
    FA_IDENTITY_CHARS = 256,
    FA_KERNEL_CHARS = 128,
    FA_CAUSE_CHARS = 192,
    FA_STORE_MAX = 256 /* entries of an identity */
};

typedef struct fa_store_entry {
    char kernel[FA_KERNEL_CHARS]; /* the kernel's symbol */
    uint64_t code_hash; /* of the code object it is in; an entry of another
                         * hash is stale.  0: of whatever code, since it was
                         * opened by hand before that was known */
    uint32_t failures;  /* in a row */
    int64_t opened;     /* unix seconds */
    int64_t retry;      /* unix seconds, not before `opened`; may be tried again
                         * from then on */
    char cause[FA_CAUSE_CHARS]; /* one line; what is not printable ASCII is
                                 * written as a space or '?' */
} fa_store_entry;

/* Whether `length` characters are an identity, or a kernel's symbol, that fits
 * with its end: printable ASCII, and no space in a symbol. */
bool fa_store_is_identity(const char *text, size_t length);
bool fa_store_is_kernel(const char *text, size_t length);

/* 64-bit FNV-1a. */
uint64_t fa_store_hash(const void *data, size_t bytes);

/* The entries of `identity`, `capacity` at most; *count is how many were
 * copied.  No file: none, FA_OK.  A file that cannot be read as such is set
 * aside (renamed to *.bad, the newest kept) and counts as none, with FA_EINVAL
 * and the reason, so that the caller can warn once. */
fa_status fa_store_read(const char *dir, const char *identity,
                        fa_store_entry *entries, size_t capacity, size_t *count,
                        fa_error *error);

/* Replaces or adds the entry of its kernel (failures 0: removes it); others
 * stay.  Makes the folder (0700, parents too) if need be.  A file that cannot
 * be read as such is set aside; FA_EINVAL is for arguments alone. */
fa_status fa_store_put(const char *dir, const char *identity,
                       const fa_store_entry *entry, fa_error *error);

/* All identities of a folder, for the command.  *unreadable counts files that
 * are malformed, not trusted or refused by the system; they stay. */
typedef void fa_store_visit(void *context, const char *identity,
                            const fa_store_entry *entry);
fa_status fa_store_list(const char *dir, fa_store_visit *visit, void *context,
                        size_t *unreadable, fa_error *error);

/* Removes the entries of `kernel`, or all (NULL); sets aside bad files, and
 * folders, pipes and links under their names.  Goes on behind a file that
 * fails; the status is then that of the first. */
fa_status fa_store_reset(const char *dir, const char *kernel, size_t *removed,
                         fa_error *error);

#endif
