/* kernarg.c: what the runtime and the packet processor write before a wave
 * starts: the kernarg segment and the dispatch packet.
 *
 * Explicit arguments go to the offsets that the metadata states. Hidden
 * ones are filled by kind: the metadata lists exactly those that the code
 * reads, whatever the code object version.
 * Source: LLVM, User Guide for AMDGPU Backend, "Kernel Argument Metadata";
 * HSA runtime specification, kernel dispatch packet.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "launch.h"
#include "report.h"

#include <string.h>

/* The value of a hidden argument; pointers to services that do not exist
 * here (printf, hostcall, heap) are 0, so that their use is an address
 * fault. Remainders are 0: HIP grids are whole workgroups. */
static uint64_t hidden_value(const sim_launch *launch, const char *kind)
{
    static const char axes[] = "xyz";
    size_t length = strlen(kind);
    const char *axis = strchr(axes, kind[length - 1]); /* kind is not "" */

    if (axis != NULL) {
        size_t d = (size_t)(axis - axes) % 3;
        if (strncmp(kind, "hidden_block_count_", 19) == 0) {
            return launch->groups[d];
        }
        if (strncmp(kind, "hidden_group_size_", 18) == 0) {
            return launch->block[d];
        }
    }
    if (strcmp(kind, "hidden_grid_dims") == 0) {
        for (unsigned dims = 3; dims > 1; dims--) {
            if (launch->groups[dims - 1] > 1 || launch->block[dims - 1] > 1) {
                return dims;
            }
        }
        return 1;
    }
    if (strcmp(kind, "hidden_dynamic_lds_size") == 0) {
        return launch->dynamic_lds_bytes;
    }
    return 0;
}

static hipError_t copy_explicit(const sim_launch *launch, const sim_arg *arg,
                                size_t index, uint8_t *segment)
{
    const sim_kernel *kernel = launch->kernel;
    const void *from = NULL;

    if (launch->params != NULL) {
        from = launch->params[index];
    } else if (launch->packed != NULL) {
        if (!sim_within(arg->offset, arg->size, launch->packed_bytes)) {
            return sim_fail(hipErrorInvalidValue,
                            "%s: argument %zu (%s) ends at byte %u, the "
                            "given buffer has %zu",
                            kernel->name, index, arg->name,
                            arg->offset + arg->size, launch->packed_bytes);
        }
        from = (const uint8_t *)launch->packed + arg->offset;
    }
    if (from == NULL) {
        return sim_fail(hipErrorInvalidValue,
                        "%s: argument %zu (%s, %u bytes) is missing",
                        kernel->name, index, arg->name, arg->size);
    }
    memcpy(segment + arg->offset, from, arg->size);
    return hipSuccess;
}

hipError_t sim_kernarg_fill(const sim_launch *launch, uint8_t *segment)
{
    const sim_kernel *kernel = launch->kernel;
    size_t given = 0;

    if (!kernel->has_metadata && kernel->kernarg_bytes != 0) {
        return sim_fail(hipErrorInvalidValue,
                        "%s: the code object says nothing about this "
                        "kernel's arguments (no metadata note)",
                        kernel->name);
    }
    for (size_t i = 0; i < kernel->arg_count; i++) {
        const sim_arg *arg = &kernel->arg[i];
        if (!arg->hidden) {
            hipError_t status = copy_explicit(launch, arg, given++, segment);
            if (status != hipSuccess) {
                return status;
            }
            continue;
        }
        uint64_t value = hidden_value(launch, arg->kind);
        size_t bytes = arg->size < sizeof value ? arg->size : sizeof value;
        memcpy(segment + arg->offset, &value, bytes);
    }
    return hipSuccess;
}

void sim_packet_fill(const sim_launch *launch, uint64_t kernarg,
                     uint8_t packet[SIM_PACKET_BYTES])
{
    const sim_kernel *kernel = launch->kernel;
    uint64_t descriptor =
        (uint64_t)(uintptr_t)launch->object->image + kernel->descriptor_at;
    uint32_t lds = kernel->descriptor.lds_bytes + launch->dynamic_lds_bytes;
    uint32_t private_bytes = sim_launch_private(kernel);
    uint16_t type = 2;  /* kernel dispatch */
    uint16_t setup = 3; /* dimensions */

    memset(packet, 0, SIM_PACKET_BYTES);
    memcpy(packet, &type, 2);
    memcpy(packet + 2, &setup, 2);
    for (unsigned d = 0; d < 3; d++) {
        uint16_t block = (uint16_t)launch->block[d];
        uint32_t grid = launch->groups[d] * launch->block[d];
        memcpy(packet + 4 + 2 * d, &block, 2);
        memcpy(packet + 12 + 4 * d, &grid, 4);
    }
    memcpy(packet + 24, &private_bytes, 4);
    memcpy(packet + 28, &lds, 4);
    memcpy(packet + 32, &descriptor, 8);
    memcpy(packet + 40, &kernarg, 8);
}
