/* exec_memory.h: what exec_memory.c and exec_buffer.c share (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_EXEC_MEMORY_H
#define HIPSIM_EXEC_MEMORY_H

#include "exec.h"

#include <string.h>

/* Where one lane's access goes. */
typedef enum place_kind { PLACE_NONE, PLACE_LINEAR, PLACE_SCRATCH } place_kind;

typedef struct place {
    uint8_t *at;     /* linear: the byte; scratch: the lane's byte 0 */
    uint32_t offset; /* scratch: byte in the lane's private memory */
    place_kind kind;
} place;

static inline uint8_t *scratch_byte(const place *p, uint32_t i)
{
    uint32_t offset = p->offset + i;
    return p->at + (size_t)(offset / 4) * 256 + offset % 4;
}

static inline void fetch(const place *p, void *to, uint32_t bytes)
{
    uint8_t *out = to;

    if (p->kind == PLACE_NONE) {
        memset(to, 0, bytes);
    } else if (p->kind == PLACE_LINEAR) {
        memcpy(to, p->at, bytes);
    } else {
        for (uint32_t i = 0; i < bytes; i++) {
            out[i] = *scratch_byte(p, i);
        }
    }
}

static inline void deposit(const place *p, const void *from, uint32_t bytes)
{
    const uint8_t *in = from;

    if (p->kind == PLACE_LINEAR) {
        memcpy(p->at, from, bytes);
    } else if (p->kind == PLACE_SCRATCH) {
        for (uint32_t i = 0; i < bytes; i++) {
            *scratch_byte(p, i) = in[i];
        }
    }
}

/* A lane of a VGPR. */
static inline uint32_t *reg(wave *w, unsigned number, unsigned l)
{
    return &w->v[(size_t)number * SIM_LANES + l].u;
}

/* Moves one lane's data; a fault stops the wave. */
void exec_access_lane(wave *w, const isa_row *row, const isa_info *info,
                      unsigned l, const place *p);

/* SIM_READ, SIM_WRITE or, for atomics, both. */
uint32_t exec_access_bits(const isa_info *info);

/* Where an access of lane l to global memory, or to its scratch, goes. `base`
 * is what the kernel holds as the wave's scratch address. False: a fault. */
bool exec_global_place(wave *w, const isa_info *info, unsigned l,
                       uint64_t address, uint32_t bytes, place *p);
bool exec_scratch_place(wave *w, const isa_info *info, unsigned l,
                        uint64_t base, uint32_t offset, place *p);

/* The lane's private byte that `offset` means. */
uint64_t exec_private_byte(const wave *w, uint64_t base, uint32_t offset);

/* Tells the watchers where a load with the lds bit puts its data. */
bool exec_watch_lds_targets(wave *w, const isa_row *row, uint64_t lanes);

#endif
