/* exec.h: the state of one workgroup, shared by exec*.c (internal).
 *
 *   exec.c          creation, wave scheduling, faults
 *   exec_start.c    initial state
 *   exec_scalar.c   SALU and scalar memory
 *   exec_vector.h   VALU; compiled by exec_portable.c and exec_avx2.c
 *   exec_memory.c   FLAT, GLOBAL, SCRATCH
 *   exec_buffer.c   MUBUF
 *   exec_lds.c      DS
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_EXEC_H
#define HIPSIM_EXEC_H

#include "isa.h"
#include "watch.h"

typedef union lane {
    uint32_t u;
    int32_t i;
    float f;
} lane;

typedef enum wave_state {
    WAVE_RUNNING,
    WAVE_BARRIER,
    WAVE_ENDED,
    WAVE_FAULT
} wave_state;

/* One wave. s[] is indexed by the 7-bit register code, so VCC, M0 and EXEC
 * stand in it too. VGPR n is v[64 n .. 64 n + 63]. */
typedef struct wave {
    uint32_t s[144];
    uint32_t scc;
    uint32_t mode;
    wave_state state;
    size_t pc;          /* row to execute next */
    const isa_row *row; /* row in execution */
    lane *v;
    uint32_t vgprs; /* registers allocated */
    uint32_t index; /* wave within the workgroup */
    sim_group *group;
} wave;

typedef void valu_issue(wave *w, const isa_row *row);

struct sim_group {
    const sim_dispatch *dispatch;
    valu_issue *valu;
    wave *waves;
    uint32_t wave_count; /* waves of a full workgroup */
    uint32_t active;     /* waves of the running workgroup */
    uint32_t id[3];
    uint64_t order; /* among the workgroups that run */
    lane *registers;
    uint8_t *lds;
    uint32_t lds_bytes;
    uint8_t *scratch;      /* private_bytes * 64 per wave, swizzled */
    uint64_t scratch_wave; /* bytes of one wave's scratch */
    sim_region seen[2];    /* last region hit: reads, writes */
    uint64_t executed;
    uint64_t misaligned;
    uint32_t turn;   /* wave that ran last */
    uint64_t random; /* state of the random order, if there is one */
    bool watched;    /* by one of these two, NULL otherwise */
    struct sim_check *check;
    struct sim_profile *profile;
    uint64_t accesses; /* counted for an injected memory fault */
    bool flipped;      /* the injected bit flip has happened */
    sim_fault *fault;
};

/* What undefined registers and memory hold: a signalling NaN as float, two
 * small negative halves, no valid address. */
#define EXEC_POISON 0x7fa5a5a5u

/* Bits of MODE. */
enum {
    MODE_ROUND_F32 = 0,
    MODE_ROUND_F16_F64 = 2,
    MODE_DENORM_F32 = 4,
    MODE_DENORM_F16_F64 = 6,
    MODE_DX10_CLAMP = 8,
    MODE_IEEE = 9,
    MODE_GPR_IDX = 27
};

/* Address windows that flat accesses map to LDS and to scratch. */
#define APERTURE_SHARED (UINT64_C(1) << 48)
#define APERTURE_PRIVATE (UINT64_C(2) << 48)

static inline uint64_t pair(const wave *w, unsigned reg)
{
    return (uint64_t)w->s[reg + 1] << 32 | w->s[reg];
}

static inline void set_pair(wave *w, unsigned reg, uint64_t value)
{
    w->s[reg] = (uint32_t)value;
    w->s[reg + 1] = (uint32_t)(value >> 32);
}

static inline uint64_t exec_mask(const wave *w)
{
    return pair(w, SRC_EXEC);
}

/* The workgroup's number in the grid, x fastest. */
static inline uint64_t exec_group_index(const sim_group *g)
{
    const uint32_t *groups = g->dispatch->groups;

    return ((uint64_t)g->id[2] * groups[1] + g->id[1]) * groups[0] + g->id[0];
}

/* The next of the random numbers that follow from *state: splitmix64. */
static inline uint64_t exec_random(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);

    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* Value of a source code that is not a VGPR, for an operand of this type. */
uint64_t exec_operand(const wave *w, const isa_row *row, unsigned code,
                      unsigned type);

/* Fills memory with EXEC_POISON. */
void exec_poison(void *memory, size_t bytes);

/* Sets a wave to its beginning, in a workgroup of `size` work-items. */
void exec_start_wave(wave *w, const uint32_t size[3]);

/* Records the fault of the instruction in execution and stops the wave;
 * later faults of the same run are ignored. */
void exec_fault(wave *w, sim_fault_kind kind, const char *detail);
void exec_fault_at(wave *w, sim_fault_kind kind, unsigned lane_index,
                   uint64_t address, uint32_t bytes, const char *detail);

/* True if [address, address + bytes) may be accessed. */
bool exec_allowed(sim_group *g, uint64_t address, uint64_t bytes,
                  uint32_t access);

/* True for a scalar load that may be wider than what the program asked for. */
static inline bool exec_widened(uint64_t address, uint32_t bytes)
{
    return bytes != 0 && bytes <= 16 && address % bytes == 0;
}

/* Makes a vector row name the registers that M0 moves it to; returns one past
 * the highest of them. */
uint32_t exec_indexed(const wave *w, isa_row *row);

void exec_scalar(wave *w, const isa_row *row);
void exec_smem(wave *w, const isa_row *row);
void exec_lds(wave *w, const isa_row *row);
void exec_flat(wave *w, const isa_row *row);
void exec_mubuf(wave *w, const isa_row *row);
valu_issue exec_valu_portable;
valu_issue exec_valu_avx2;
bool exec_avx2_available(void);

#endif
