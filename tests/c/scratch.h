/* scratch.h: what the tests of files share: folders, files and children.
 *
 * Helpers abort where the system fails them.
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_SCRATCH_H
#define FA_SCRATCH_H

#include "test.h"

enum { SCRATCH_CHARS = 4096 };

/* A new empty folder of mode 0700. */
void scratch_folder(const test_run *run, char path[SCRATCH_CHARS]);
/* "folder/name", in a buffer of this thread that the next call but three
 * reuses. */
const char *scratch_path(const char *folder, const char *name);
void scratch_write(const char *folder, const char *name, const void *bytes,
                   size_t count);
/* Its text, ended by '\0'; returns the bytes, -1 if there is none. */
long scratch_read(const char *folder, const char *name, char *text,
                  size_t capacity);
/* How many names in it contain `part`. */
int scratch_count(const char *folder, const char *part);
/* Open descriptors of this process. */
int scratch_descriptors(void);

/* Runs `body` in a child, without a core file, and gives what waitpid() says;
 * what body returns is its exit code. */
int scratch_child(int (*body)(void *), void *context);
/* The same, started only; the child is killed if the parent ends. */
int scratch_start(int (*body)(void *), void *context);
int scratch_wait(int child);
/* Makes the folder another user's and becomes that one, if we are root; there
 * is no way back, so only in a child. */
void scratch_drop_root(const char *folder);

#endif
