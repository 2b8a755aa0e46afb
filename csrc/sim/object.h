/* object.h: a loaded AMD code object (internal).
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_OBJECT_H
#define HIPSIM_OBJECT_H

#include "hipsim.h"
#include "lines.h"
#include "sim.h"

/* Limits that no real object comes near; they bound what a corrupt one can
 * ask for. */
enum {
    SIM_MAX_KERNELS = 4096,
    SIM_MAX_SYMBOLS = 1 << 16,
    SIM_MAX_KERNARG = 1 << 20, /* bytes */
    SIM_MAX_IMAGE = 1 << 30,   /* bytes, .bss included */
    SIM_MAX_SEGMENTS = 64
};

/* EF_AMDGPU_MACH, low byte of e_flags: gfx906, and what runs on every gfx9
 * graphics card. */
enum { SIM_ARCH_GFX906 = 0x2f, SIM_ARCH_GFX9_GENERIC = 0x51 };

static inline bool sim_arch_runs(uint32_t flags)
{
    return (flags & 0xff) == SIM_ARCH_GFX906 ||
           (flags & 0xff) == SIM_ARCH_GFX9_GENERIC;
}

typedef struct sim_arg {
    char *name;            /* "" if the compiler wrote none */
    char *kind;            /* "by_value", "global_buffer", "hidden_..." */
    uint32_t offset, size; /* bytes within the kernarg segment */
    bool hidden;           /* filled by the runtime, not by the caller */
} sim_arg;

typedef struct sim_kernel {
    char *name;
    uint64_t descriptor_at; /* offsets into the image */
    uint64_t entry;
    uint64_t code_bytes; /* from the entry on */
    sim_descriptor descriptor;
    uint32_t kernarg_bytes; /* the larger of descriptor and metadata */
    /* From the metadata note; the rest is 0 if it is absent. */
    bool has_metadata;
    uint32_t vgprs, agprs, sgprs, vgpr_spills, sgpr_spills;
    uint32_t max_threads; /* per workgroup, 0 = not stated */
    uint32_t wave_size;
    sim_arg *arg;
    size_t arg_count;
} sim_kernel;

typedef struct sim_object {
    uint8_t *image; /* segments at their offsets, page aligned */
    size_t image_bytes;
    sim_region segment[SIM_MAX_SEGMENTS]; /* host addresses */
    size_t segment_count;
    uint64_t text, text_bytes; /* the executable segment, offset into image */
    uint32_t flags;            /* e_flags */
    unsigned version;          /* code object version, 4 to 6 */
    char target[128];          /* "amdgcn-amd-amdhsa--gfx906:sramecc+:xnack-" */
    sim_kernel *kernel;        /* in the order of the symbol table */
    size_t kernel_count;
    sim_lines *lines; /* NULL if it was built without -g */
} sim_object;

/* Loads an ELF code object, or the best entry of an offload bundle. With
 * `runnable` only code for gfx906, with any features, is accepted, otherwise
 * every AMDGPU architecture. `bytes` may be freed after.
 * On failure *out is NULL and the report says why. */
hipError_t sim_object_load(const void *bytes, size_t size, bool runnable,
                           sim_object **out);
void sim_object_free(sim_object *object); /* accepts NULL */

const sim_kernel *sim_object_find(const sim_object *object, const char *name);

/* "gfx906" for the low byte of e_flags, "unknown" for a new one. */
const char *sim_arch_name(uint32_t flags);

/* The size of an image whose size the caller was not told, from its own
 * headers. 0 if it has none or memory ends before they do. */
size_t sim_image_size(const void *image);

/* bundle.c: narrows *bytes and *size to one code object if they are an
 * offload bundle; leaves them alone otherwise. */
hipError_t sim_bundle_choose(const uint8_t **bytes, size_t *size,
                             bool runnable);

/* metadata.c: fills the kernels, and object->target, from the AMDGPU note. */
hipError_t sim_metadata_read(sim_object *object, const uint8_t *note,
                             size_t bytes);

/* True if [offset, offset + bytes) lies within `size`; never overflows. */
static inline bool sim_within(uint64_t offset, uint64_t bytes, uint64_t size)
{
    return offset <= size && bytes <= size - offset;
}

#endif
