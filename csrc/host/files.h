/* files.h: files that outlive a process, in a folder that only its user writes.
 *
 * What is read here decides which kernels run, so nothing is followed, read or
 * written that somebody else could have put there: folder and files must
 * belong to the user of the process, be closed to writing by others and be no
 * symbolic link: else FA_EUNSUPPORTED.  What the system refuses (no space,
 * read-only, no descriptors) is FA_EDEVICE, with its reason.  Only the folder
 * itself is looked at, not its parents: once open it is addressed by its
 * descriptor, and cannot be exchanged.
 * What the files say is left to store.c and flight.c.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_HOST_FILES_H
#define FA_HOST_FILES_H

#include "fa.h"

/* Opens `dir`; `make`: creates it and its parents, mode 0700.  *folder is -1 on
 * failure, and with FA_OK where there is none and it was not to be made. */
fa_status fa_folder_open(const char *dir, bool make, int *folder,
                         fa_error *error);

/* Waits for the lock file `name`, which excludes other processes and other
 * threads.  fa_folder_unlock() accepts -1, which *lock is on failure. */
fa_status fa_folder_lock(int folder, const char *name, int wait_ms, int *lock,
                         fa_error *error);
void fa_folder_unlock(int lock);

/* Calls `visit` for each name in it that starts with `prefix`; `dir` is what an
 * error calls it. */
typedef void fa_folder_visit(void *context, const char *name);
fa_status fa_folder_list(int folder, const char *dir, const char *prefix,
                         fa_folder_visit *visit, void *context,
                         fa_error *error);

/* open(2) with `flags`; files are created with mode 0600.  *file is -1 on
 * failure, and with FA_OK where there is no such file. */
fa_status fa_file_open(int folder, const char *name, int flags, int *file,
                       fa_error *error);

/* Reads up to `capacity` bytes from the start. */
fa_status fa_file_read(int file, const char *name, void *data, size_t capacity,
                       size_t *bytes, fa_error *error);

/* These need the lock.  The first leaves the old file or the new one, whole,
 * whenever the process or the machine stops; also removes what a killed
 * process left of its own attempt.  The second renames to NAME.bad. */
fa_status fa_file_replace(int folder, const char *name, const void *data,
                          size_t bytes, fa_error *error);
fa_status fa_file_set_aside(int folder, const char *name, fa_error *error);
fa_status fa_file_remove(int folder, const char *name, fa_error *error);

/* "name: expected WHAT, got: " and the system's reason, as FA_EDEVICE. */
fa_status fa_file_fail(fa_error *error, const char *name, const char *what);

#endif
