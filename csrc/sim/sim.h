/* sim.h: the seam between the parts of the simulator (internal).
 *
 *   object.c   file bytes -> sim_object: segments, kernels, metadata
 *   decode.c   instruction words -> sim_code: one decoded row per dword
 *   disasm*.c  decoded row -> text
 *   exec*.c    one workgroup: waves, registers, LDS, scratch, barriers
 *   memory.c   which addresses a launch may touch
 *   launch.c   a grid: workgroups over threads, first fault wins
 *   runtime.c  the HIP module API on top (hipsim.h)
 *
 * Device memory is host memory: a device address is a host address.
 * Nothing here knows attention, Python or HIP headers.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_SIM_H
#define HIPSIM_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SIM_LANES = 64, SIM_VGPRS = 256, SIM_SGPRS = 102 };

/* ---- memory: what a launch may touch ---------------------------------- */

enum { SIM_READ = 1u, SIM_WRITE = 2u };

typedef struct sim_region {
    uint64_t begin, end; /* [begin, end) host addresses */
    uint32_t access;     /* SIM_READ | SIM_WRITE */
} sim_region;

/* Sorted by begin, disjoint; overlapping inputs are merged by memory.c. */
typedef struct sim_memory {
    const sim_region *region;
    size_t count;
} sim_memory;

/* The region that holds all of [address, address + bytes) with `access`,
 * or NULL. Binary search; the executor remembers the last hit. */
const sim_region *sim_memory_find(const sim_memory *memory, uint64_t address,
                                  uint64_t bytes, uint32_t access);

/* ---- faults ------------------------------------------------------------ */

typedef enum sim_fault_kind {
    SIM_FAULT_NONE,
    SIM_FAULT_OPCODE,    /* not an instruction we know */
    SIM_FAULT_ADDRESS,   /* outside every region, or not writable */
    SIM_FAULT_LDS,       /* beyond the workgroup's LDS */
    SIM_FAULT_SCRATCH,   /* beyond the lane's private segment */
    SIM_FAULT_ALIGNMENT, /* scalar load or atomic */
    SIM_FAULT_PC,        /* fetch outside the code */
    SIM_FAULT_REGISTER,  /* beyond the kernel's allocation */
    SIM_FAULT_BUDGET,    /* instruction budget used up */
    SIM_FAULT_TRAP,      /* s_trap */
    /* check level 2 */
    SIM_FAULT_UNDEFINED, /* a value that was never written matters */
    SIM_FAULT_WAIT,      /* result used before a wait */
    SIM_FAULT_HAZARD,    /* wait states missing */
    SIM_FAULT_RACE_LDS,  /* two waves, no barrier in between */
    SIM_FAULT_RACE,      /* two workgroups */
    SIM_FAULT_BARRIER,   /* waves or lanes miss each other */
    SIM_FAULT_ELEMENT    /* between the elements of a tensor */
} sim_fault_kind;

typedef struct sim_fault {
    sim_fault_kind kind;
    uint32_t group[3];     /* workgroup id */
    uint32_t wave;         /* wave within the workgroup */
    uint32_t lane;         /* first lane concerned, 0 if none */
    uint64_t pc;           /* byte offset from the kernel's entry */
    uint64_t address;      /* global address, LDS or scratch offset */
    uint32_t bytes;        /* size of the access */
    char instruction[128]; /* disassembly */
    char detail[320];      /* one short clause, may be empty */
    char notes[2048];      /* more lines, each after a newline */
} sim_fault;

/* ---- code -------------------------------------------------------------- */

typedef struct sim_code sim_code; /* decoded text; immutable, shared */

/* Decodes `bytes` of text that live at host address `address` (and stay
 * there, executable text is also data for s_load). Words that do not decode
 * become rows that fault when executed. NULL: out of memory. */
sim_code *sim_code_create(uint64_t address, size_t bytes);
void sim_code_free(sim_code *code); /* accepts NULL */

/* Text of the instruction at `offset` bytes into the code, in LLVM 22's
 * spelling without encoding comments. Returns its size in bytes (4, 8 or
 * more with a literal), or 0 if it does not decode (text then ".long 0x..."). */
unsigned sim_disasm(const sim_code *code, size_t offset, char *text,
                    size_t text_size);

/* ---- one dispatch ------------------------------------------------------- */

/* Fields of the 64-byte kernel descriptor that the executor needs. */
typedef struct sim_descriptor {
    uint32_t lds_bytes;     /* static group segment */
    uint32_t private_bytes; /* per lane */
    uint32_t kernarg_bytes;
    int64_t entry_offset; /* from the descriptor to the first word */
    uint32_t rsrc1, rsrc2, rsrc3;
    uint16_t properties; /* kernel_code_properties */
} sim_descriptor;

typedef struct sim_dispatch {
    const char *kernel; /* name, for reports */
    const sim_code *code;
    uint64_t entry;      /* address of the first instruction */
    uint64_t code_bytes; /* of the kernel, from there on */
    sim_descriptor descriptor;
    uint32_t groups[3]; /* grid in workgroups */
    uint32_t block[3];  /* workgroup in work-items */
    uint32_t grid[3];   /* grid in work-items (for partial groups) */
    uint32_t lds_bytes; /* static + dynamic */
    uint64_t kernarg;   /* address of the kernarg segment */
    uint64_t packet;    /* address of the 64-byte dispatch packet */
    const sim_memory *memory;
    const struct sim_tensor_list *tensors; /* their elements, for check 2 */
    struct sim_races *races;               /* shared by all threads, check 2 */
    int check;                             /* 0 to 2 */
    uint64_t budget; /* wave instructions per workgroup, 0 = none */
    bool timed;      /* the budget is the launch's own deadline */
    int cpu;         /* 0 portable code, 1 best for this host */
    uint64_t sample; /* workgroups to run, spread over the grid; 0: all */
    uint64_t seed;   /* 0: waves take turns; else the order is random */
    int64_t skip;  /* instruction to leave out, bytes from the entry, -1 none */
    int64_t probe; /* s_waitcnt that must find nothing to wait for, -1 none */
    unsigned dot2; /* SIM_DOT2_* of options.h */
    bool adversarial_ulp;           /* estimates are off by up to one ulp */
    struct profile_launch *profile; /* counts and times it, or NULL */
    const struct sim_injection *injection; /* faults.h; NULL: none */
    const struct sim_lines *lines;         /* lines.h; NULL: none */
    uint64_t text_entry;                   /* the entry's offset in the text */
} sim_dispatch;

typedef struct sim_stats {
    uint64_t wave_instructions;
    uint64_t waves;
    uint64_t workgroups;
    uint64_t misaligned; /* vector or LDS accesses, check >= 1 */
} sim_stats;

/* Everything a worker thread needs to run workgroups one after another:
 * register files, LDS, scratch. Reused, never shared between threads. */
typedef struct sim_group sim_group;

sim_group *sim_group_create(const sim_dispatch *dispatch); /* NULL: memory */
void sim_group_free(sim_group *group);                     /* accepts NULL */

/* How many workgroups of the grid run. */
uint64_t sim_groups_to_run(const sim_dispatch *dispatch);

/* Runs workgroup number `order` of these to its end and adds to *stats. False
 * on a fault, which is then described in *fault. */
bool sim_group_run(sim_group *group, const sim_dispatch *dispatch,
                   uint64_t order, sim_stats *stats, sim_fault *fault);

#endif
