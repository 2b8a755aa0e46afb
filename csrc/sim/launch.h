/* launch.h: one kernel over one grid (internal).
 *
 *   kernarg.c  the kernarg segment and the dispatch packet
 *   launch.c   workgroups over threads, the first fault, its report
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_LAUNCH_H
#define HIPSIM_LAUNCH_H

#include "memory.h"
#include "object.h"

enum {
    SIM_MAX_BLOCK = 1024,         /* work-items per workgroup */
    SIM_MAX_LDS = 64 * 1024,      /* bytes per workgroup */
    SIM_MAX_PRIVATE = 128 * 1024, /* bytes per lane: 8 MiB per wave */
    SIM_STACK = 16 * 1024,        /* bytes per lane, if the kernel asks */
    SIM_PACKET_BYTES = 64
};

typedef struct sim_launch {
    const sim_object *object;
    const sim_kernel *kernel;
    const sim_code *code;
    uint32_t groups[3]; /* grid in workgroups */
    uint32_t block[3];  /* workgroup in work-items */
    uint32_t dynamic_lds_bytes;
    uint64_t deadline; /* wave instructions per workgroup, 0 none */
    const struct sim_tensor_list *tensors; /* NULL: none are known */
    void **params;      /* one pointer per explicit argument, or */
    const void *packed; /* the explicit arguments at their offsets */
    size_t packed_bytes;
} sim_launch;

/* Bytes of private memory per work-item: the descriptor's, and a stack. */
uint32_t sim_launch_private(const sim_kernel *kernel);

/* Checks grid, workgroup and LDS against the device and the kernel. */
hipError_t sim_launch_check(const sim_launch *launch);

/* Fills `segment` (kernel->kernarg_bytes, zeroed by the caller) with the
 * explicit arguments and the hidden ones that the kernel asks for. */
hipError_t sim_kernarg_fill(const sim_launch *launch, uint8_t *segment);

/* The 64-byte kernel dispatch packet, which v4 code reads. */
void sim_packet_fill(const sim_launch *launch, uint64_t kernarg,
                     uint8_t packet[SIM_PACKET_BYTES]);

/* Runs the grid to its end. `memory` holds what the caller allows; the
 * object, kernarg segment and packet are added here. *stats is set. */
hipError_t sim_launch_run(const sim_launch *launch, sim_region_list *memory,
                          sim_stats *stats);

/* Turns a fault into the report and the matching error code. */
hipError_t sim_launch_fault(const sim_dispatch *dispatch,
                            const sim_fault *fault);

#endif
