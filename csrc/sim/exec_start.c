/* exec_start.c: the registers with which a wave begins, as the packet processor
 * sets them; all else is poison.
 *
 * Source: LLVM's AMDGPU usage guide; Vega ISA chapter 3.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "exec.h"

#include <string.h>

/* kernel_code_properties: which user SGPRs the kernel asks for, in order. */
enum {
    PROPERTY_PRIVATE_BUFFER = 1,
    PROPERTY_DISPATCH_PTR = 2,
    PROPERTY_QUEUE_PTR = 4,
    PROPERTY_KERNARG_PTR = 8,
    PROPERTY_DISPATCH_ID = 16,
    PROPERTY_FLAT_SCRATCH = 32,
    PROPERTY_PRIVATE_SIZE = 64
};

void exec_poison(void *memory, size_t bytes)
{
    static const uint32_t word = EXEC_POISON;
    uint8_t *to = memory;

    for (; bytes >= sizeof word; bytes -= sizeof word, to += sizeof word) {
        memcpy(to, &word, sizeof word);
    }
    memcpy(to, &word, bytes);
}

/* User SGPRs in the order of the property bits, then the system ones. */
static void initial_sgprs(wave *w)
{
    const sim_group *g = w->group;
    const sim_dispatch *dispatch = g->dispatch;
    unsigned properties = dispatch->descriptor.properties;
    uint32_t rsrc2 = dispatch->descriptor.rsrc2;
    uint64_t scratch = (uint64_t)(uintptr_t)g->scratch;
    unsigned next = 0;

    if (properties & PROPERTY_PRIVATE_BUFFER) {
        /* swizzle; index stride 64, element 4 bytes, add thread id */
        set_pair(w, 0, scratch | UINT64_C(1) << 63);
        w->s[2] = UINT32_MAX;
        w->s[3] = 3u << 21 | 1u << 19 | 1u << 23;
        next = 4;
    }
    if (properties & PROPERTY_DISPATCH_PTR) {
        set_pair(w, next, dispatch->packet);
        next += 2;
    }
    if (properties & PROPERTY_QUEUE_PTR) {
        next += 2;
    }
    if (properties & PROPERTY_KERNARG_PTR) {
        set_pair(w, next, dispatch->kernarg);
        next += 2;
    }
    if (properties & PROPERTY_DISPATCH_ID) {
        set_pair(w, next, 0);
        next += 2;
    }
    if (properties & PROPERTY_FLAT_SCRATCH) {
        set_pair(w, next, scratch);
        next += 2;
    }
    if (properties & PROPERTY_PRIVATE_SIZE) {
        w->s[next] = dispatch->descriptor.private_bytes;
        next += 1;
    }
    next = rsrc2 >> 1 & 31;
    for (unsigned i = 0; i < 3; i++) {
        if (rsrc2 >> (7 + i) & 1) {
            w->s[next++] = g->id[i];
        }
    }
    if (rsrc2 >> 10 & 1) {
        w->s[next++] = g->active;
    }
    if (rsrc2 & 1) {
        w->s[next] = (uint32_t)(w->index * g->scratch_wave);
    }
}

/* Ids and EXEC of wave w in a workgroup of size[0] x size[1] x size[2]. */
static void initial_lanes(wave *w, const uint32_t size[3])
{
    uint32_t dims = w->group->dispatch->descriptor.rsrc2 >> 11 & 3;
    uint64_t items = (uint64_t)size[0] * size[1] * size[2];
    uint64_t exec = 0;

    for (uint32_t l = 0; l < SIM_LANES; l++) {
        uint64_t item = (uint64_t)w->index * SIM_LANES + l;
        if (item >= items) {
            break;
        }
        exec |= UINT64_C(1) << l;
        w->v[l].u = (uint32_t)(item % size[0]);
        if (dims >= 1 && w->vgprs > 1) {
            w->v[SIM_LANES + l].u = (uint32_t)(item / size[0] % size[1]);
        }
        if (dims >= 2 && w->vgprs > 2) {
            w->v[2 * SIM_LANES + l].u = (uint32_t)(item / size[0] / size[1]);
        }
    }
    set_pair(w, SRC_EXEC, exec);
}

void exec_start_wave(wave *w, const uint32_t size[3])
{
    const sim_dispatch *dispatch = w->group->dispatch;

    exec_poison(w->s, sizeof w->s);
    exec_poison(w->v, (size_t)w->vgprs * SIM_LANES * sizeof(lane));
    w->scc = 0;
    w->mode = (dispatch->descriptor.rsrc1 >> 12 & 0xff) |
              (dispatch->descriptor.rsrc1 >> 21 & 1) << MODE_DX10_CLAMP |
              (dispatch->descriptor.rsrc1 >> 23 & 1) << MODE_IEEE;
    w->state = WAVE_RUNNING;
    w->row = NULL;
    w->pc = (size_t)((dispatch->entry - dispatch->code->address) / 4);
    initial_sgprs(w);
    initial_lanes(w, size);
}
