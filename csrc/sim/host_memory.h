/* host_memory.h: which host memory this process may access.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef SIM_HOST_MEMORY_H
#define SIM_HOST_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

/* Whether all of the range can be read, or written. True where the system does
 * not tell. */
bool sim_host_accessible(const void *pointer, size_t bytes, bool writes);

#endif
