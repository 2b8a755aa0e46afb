/* faults.h: lets a call of the system fail, or something happen just before it.
 *
 * The linker sends the calls of FAULTY in the Makefile through faults.c.  Of
 * the calling thread, only while one is set.
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_FAULTS_H
#define FA_FAULTS_H

#include <stdbool.h>

/* The `nth` call from now on (1: the next) of `call`, or of any (NULL), fails
 * with `error` in errno.  "memory": of those that ask for memory or a thread.
 * 0: none does. */
void fault_set(const char *call, int nth, int error);
/* Instead of failing, it first calls `before`. */
void fault_set_before(const char *call, int nth, void (*before)(void *),
                      void *context);
/* Whether it came to that; none is set afterwards. */
bool fault_happened(void);

#endif
