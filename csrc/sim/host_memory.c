/* host_memory.c: asks the system before a copy touches a pointer from outside.
 *
 * Source: proc(5), /proc/pid/maps, whose lines are in order of address.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "host_memory.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

bool sim_host_accessible(const void *pointer, size_t bytes, bool writes)
{
    uint64_t at = (uint64_t)(uintptr_t)pointer, end = at + bytes;
    bool whole_line = true;
    char line[256];
    FILE *maps = fopen("/proc/self/maps", "r");

    if (maps == NULL) {
        return true;
    }
    while (at < end && fgets(line, sizeof line, maps) != NULL) {
        uint64_t low, high;
        char mode[5];
        bool begins = whole_line; /* the rest of a long path is skipped */
        whole_line = strchr(line, '\n') != NULL;
        if (!begins || sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &low, &high,
                              mode) != 3) {
            continue;
        }
        if (low > at) {
            break;
        }
        if (high > at) {
            if (mode[writes ? 1 : 0] == '-') {
                break;
            }
            at = high;
        }
    }
    (void)fclose(maps);
    return at >= end;
}
