/* exec.c: one workgroup from its first to its last instruction.
 *
 * Runs each wave to its next barrier or its end in turn, and reports faults. In
 * which state they begin is in exec_start.c; what instructions do is in
 * exec_scalar.c, exec_vector.h, exec_memory.c, exec_buffer.c and exec_lds.c.
 * Accesses are complete when their instruction is, so waits need no work.
 *
 * Source: Vega ISA chapters 3 and 4.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#define _POSIX_C_SOURCE 200809L
#include "exec.h"
#include "faults.h"

#include <fenv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Instructions after which the next wave has its turn. */
enum { SLICE = 10000 };

/* ---- memory checks and faults ------------------------------------------ */

bool exec_allowed(sim_group *g, uint64_t address, uint64_t bytes,
                  uint32_t access)
{
    sim_region *seen = &g->seen[access == SIM_WRITE];

    if (address >= seen->begin && bytes <= seen->end - seen->begin &&
        address - seen->begin <= seen->end - seen->begin - bytes) {
        return true;
    }
    const sim_region *found =
        sim_memory_find(g->dispatch->memory, address, bytes, access);
    if (found == NULL) {
        return false;
    }
    *seen = *found;
    return true;
}

void exec_fault_at(wave *w, sim_fault_kind kind, unsigned lane_index,
                   uint64_t address, uint32_t bytes, const char *detail)
{
    sim_group *g = w->group;
    const sim_code *code = g->dispatch->code;
    sim_fault *fault = g->fault;

    w->state = WAVE_FAULT;
    if (fault->kind != SIM_FAULT_NONE) {
        return;
    }
    size_t offset = 4 * (w->row != NULL ? (size_t)(w->row - code->row) : w->pc);
    fault->kind = kind;
    memcpy(fault->group, g->id, sizeof fault->group);
    fault->wave = w->index;
    fault->lane = lane_index;
    fault->pc = code->address + offset - g->dispatch->entry;
    fault->address = address;
    fault->bytes = bytes;
    if (offset / 4 < code->count) {
        (void)sim_disasm(code, offset, fault->instruction,
                         sizeof fault->instruction);
    }
    (void)snprintf(fault->detail, sizeof fault->detail, "%s", detail);
    if (g->watched) {
        watch_fault(w);
    }
}

void exec_fault(wave *w, sim_fault_kind kind, const char *detail)
{
    exec_fault_at(w, kind, 0, 0, 0, detail);
}

/* ---- creation ---------------------------------------------------------- */

static uint32_t allocated_vgprs(const sim_descriptor *descriptor)
{
    return 4 * ((descriptor->rsrc1 & 63) + 1);
}

static size_t round_up(size_t bytes, size_t granule)
{
    return (bytes + granule - 1) / granule * granule;
}

sim_group *sim_group_create(const sim_dispatch *dispatch)
{
    sim_group *g = calloc(1, sizeof *g);

    if (g == NULL) {
        return NULL;
    }
    size_t items =
        (size_t)dispatch->block[0] * dispatch->block[1] * dispatch->block[2];
    size_t vgprs = allocated_vgprs(&dispatch->descriptor);

    g->dispatch = dispatch;
    g->valu = dispatch->cpu != 0 && exec_avx2_available() ? exec_valu_avx2
                                                          : exec_valu_portable;
    g->wave_count = (uint32_t)((items + SIM_LANES - 1) / SIM_LANES);
    g->lds_bytes = dispatch->lds_bytes;
    g->scratch_wave =
        (uint64_t)round_up(dispatch->descriptor.private_bytes, 4) * SIM_LANES;
    g->waves = calloc(g->wave_count, sizeof *g->waves);
    g->registers =
        aligned_alloc(64, g->wave_count * vgprs * SIM_LANES * sizeof(lane));
    g->lds = aligned_alloc(64, round_up((size_t)g->lds_bytes + 1, 64));
    g->scratch = aligned_alloc(
        256, round_up((size_t)g->scratch_wave * g->wave_count + 1, 256));
    if (g->waves == NULL || g->registers == NULL || g->lds == NULL ||
        g->scratch == NULL) {
        goto fail;
    }
    for (uint32_t i = 0; i < g->wave_count; i++) {
        g->waves[i].v = g->registers + i * vgprs * SIM_LANES;
        g->waves[i].vgprs = (uint32_t)vgprs;
        g->waves[i].index = i;
        g->waves[i].group = g;
    }
    if (!watch_create(g)) {
        goto fail;
    }
    return g;

fail:
    sim_group_free(g);
    return NULL;
}

void sim_group_free(sim_group *group)
{
    if (group == NULL) {
        return;
    }
    watch_free(group);
    free(group->waves);
    free(group->registers);
    free(group->lds);
    free(group->scratch);
    free(group);
}

/* ---- execution --------------------------------------------------------- */

/* Between s_set_gpr_idx_on and _off M0 is added to register numbers. */
uint32_t exec_indexed(const wave *w, isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];
    uint32_t index = w->s[SRC_M0] & 0xff, which = w->s[SRC_M0] >> 12 & 15;
    uint32_t end = row->vgpr_end;

    for (unsigned i = 0; i < 3; i++) {
        if ((which >> i & 1) != 0 && row->src[i] >= SRC_VGPR) {
            uint32_t last = row->src[i] - SRC_VGPR + index +
                            isa_registers(info->type[1 + i]);
            row->src[i] = (uint16_t)(row->src[i] + index);
            end = last > end ? last : end;
        }
    }
    if ((which & 8) != 0 && info->type[0] != T_mask) {
        uint32_t last = row->dst + index + isa_registers(info->type[0]);
        row->dst = (uint8_t)(row->dst + index);
        end = last > end ? last : end;
    }
    return end;
}

static void valu_indexed(wave *w, const isa_row *row)
{
    isa_row moved = *row;

    if (exec_indexed(w, &moved) > w->vgprs) {
        exec_fault(w, SIM_FAULT_REGISTER, "indexed VGPR beyond the allocation");
    } else if (row->op == ISA_v_readlane_b32 ||
               row->op == ISA_v_writelane_b32 ||
               row->op == ISA_v_readfirstlane_b32 ||
               row->op == ISA_v_swap_b32) {
        exec_fault(w, SIM_FAULT_OPCODE, "not simulated with a VGPR index");
    } else {
        w->group->valu(w, &moved);
    }
}

/* An endless loop; perhaps for something that comes after a barrier. */
static void budget_fault(wave *w)
{
    char detail[128];
    uint32_t waiting = 0;

    for (uint32_t i = 0; i < w->group->active; i++) {
        waiting += w->group->waves[i].state == WAVE_BARRIER;
    }
    int n = snprintf(
        detail, sizeof detail, "%llu wave instructions of one workgroup (%s)",
        (unsigned long long)w->group->executed,
        w->group->dispatch->timed ? "the launch's deadline" : "HIPSIM_BUDGET");
    if (waiting > 0) {
        (void)snprintf(detail + n, sizeof detail - (size_t)n,
                       ", %u of %u waves wait at a barrier", waiting,
                       w->group->active);
    }
    exec_fault(w, SIM_FAULT_BUDGET, detail);
}

/* Runs one wave until it waits, ends, faults or has had its slice. Two
 * functions are made of this one, since most runs are not watched. */
static inline void run_slice(wave *w, uint32_t slice, const bool watched)
{
    sim_group *g = w->group;
    const sim_code *code = g->dispatch->code;
    valu_issue *valu = g->valu;
    uint64_t budget = g->dispatch->budget;

    const uint64_t left_out = g->dispatch->entry + (uint64_t)g->dispatch->skip;

    if (budget == 0) {
        budget = UINT64_MAX;
    }
    for (uint32_t n = 0; n < slice && w->state == WAVE_RUNNING; n++) {
        if (w->pc >= code->count) {
            w->row = NULL;
            exec_fault_at(w, SIM_FAULT_PC, 0, code->address + 4 * w->pc, 4, "");
            return;
        }
        const isa_row *row = &code->row[w->pc];
        w->row = row;
        w->pc += row->dwords;
        if (row->vgpr_end > w->vgprs) {
            exec_fault(w, SIM_FAULT_REGISTER, "VGPR beyond the allocation");
            return;
        }
        if (g->executed == budget) {
            budget_fault(w);
            return;
        }
        if (watched) {
            if (code->address + 4 * (uint64_t)(row - code->row) == left_out) {
                continue;
            }
            if (!watch_issue(w, row)) {
                return;
            }
        }
        g->executed++;
        switch (row->issue) {
        case ISSUE_VALU:
            if ((w->mode >> MODE_GPR_IDX & 1) != 0) {
                valu_indexed(w, row);
            } else {
                valu(w, row);
            }
            break;
        case ISSUE_SCALAR:
            exec_scalar(w, row);
            break;
        case ISSUE_DS:
            exec_lds(w, row);
            break;
        case ISSUE_FLAT:
            exec_flat(w, row);
            break;
        case ISSUE_MUBUF:
            exec_mubuf(w, row);
            break;
        case ISSUE_SMEM:
            exec_smem(w, row);
            break;
        default:
            exec_fault(w, SIM_FAULT_OPCODE,
                       isa_unknown(code->word[row - code->row]));
            break;
        }
    }
}

static void run_wave(wave *w, uint32_t slice)
{
    run_slice(w, slice, false);
}

static void run_watched(wave *w, uint32_t slice)
{
    run_slice(w, slice, true);
}

/* The wave to run now, or NULL if none can, and for how many instructions: in
 * turn and for long, so that a wave may spin until another one has stored a
 * flag; or with a seed any one, for 1 to 2^k instructions, k from 0 to 11. */
static wave *next_wave(sim_group *g, uint32_t *slice)
{
    uint32_t running = 0, skip = 0;

    *slice = SLICE;
    if (g->dispatch->seed != 0) {
        for (uint32_t i = 0; i < g->active; i++) {
            running += g->waves[i].state == WAVE_RUNNING;
        }
        if (running == 0) {
            return NULL;
        }
        uint64_t random = exec_random(&g->random);
        skip = (uint32_t)(random >> 32) % running;
        *slice =
            1 + ((uint32_t)random & ((1u << (random >> 20 & 0xfff) % 12) - 1u));
        g->turn = g->active - 1;
    }
    for (uint32_t i = 0; i < g->active; i++) {
        g->turn = g->turn + 1 < g->active ? g->turn + 1 : 0;
        if (g->waves[g->turn].state == WAVE_RUNNING && skip-- == 0) {
            return &g->waves[g->turn];
        }
    }
    return NULL;
}

/* Lets the waves at the barrier go on; false if none is there. Waves that
 * have ended no longer count at a barrier, as on the hardware. */
static bool release_barrier(sim_group *g)
{
    bool waiting = false;

    for (uint32_t i = 0; i < g->active; i++) {
        waiting |= g->waves[i].state == WAVE_BARRIER;
    }
    if (!waiting || (g->watched && !watch_barrier(g))) {
        return waiting;
    }
    for (uint32_t i = 0; i < g->active; i++) {
        if (g->waves[i].state == WAVE_BARRIER) {
            g->waves[i].state = WAVE_RUNNING;
        }
    }
    return true;
}

/* Runs all waves to the workgroup's end. */
static bool run_waves(sim_group *g)
{
    uint32_t slice;

    for (;;) {
        wave *w = next_wave(g, &slice);
        if (w != NULL) {
            if (g->dispatch->injection != NULL) {
                sim_faults_run(w, slice, g->watched ? run_watched : run_wave);
            } else {
                (g->watched ? run_watched : run_wave)(w, slice);
            }
            if (w->state == WAVE_FAULT) {
                return false;
            }
        } else if (!release_barrier(g)) {
            return g->dispatch->injection == NULL || sim_faults_end(g);
        } else if (g->fault->kind != SIM_FAULT_NONE) {
            return false;
        }
    }
}

uint64_t sim_groups_to_run(const sim_dispatch *dispatch)
{
    uint64_t all = (uint64_t)dispatch->groups[0] * dispatch->groups[1] *
                   dispatch->groups[2];

    return dispatch->sample != 0 && dispatch->sample < all ? dispatch->sample
                                                           : all;
}

/* The ids of the workgroup that runs as number `order`. A sample takes one of
 * each stretch of the grid, not always the first: a grid's sides are often
 * even, and equal steps would meet the same tile of every head. */
static void find_group(const sim_dispatch *dispatch, uint64_t order,
                       uint32_t id[3])
{
    const uint32_t *groups = dispatch->groups;
    uint64_t all = (uint64_t)groups[0] * groups[1] * groups[2];
    uint64_t run = sim_groups_to_run(dispatch);
    uint64_t stretch = all / run;
    uint64_t index = order * stretch + order * (all % run) / run +
                     (order * UINT64_C(0x9e3779b97f4a7c15) >> 33) % stretch;

    id[0] = (uint32_t)(index % groups[0]);
    id[1] = (uint32_t)(index / groups[0] % groups[1]);
    id[2] = (uint32_t)(index / groups[0] / groups[1]);
}

bool sim_group_run(sim_group *group, const sim_dispatch *dispatch,
                   uint64_t order, sim_stats *stats, sim_fault *fault)
{
    uint32_t size[3], id[3];

    memset(fault, 0, sizeof *fault);
    find_group(dispatch, order, id);
    group->order = order;
    for (int i = 0; i < 3; i++) {
        uint64_t first = (uint64_t)id[i] * dispatch->block[i];
        uint64_t left = dispatch->grid[i] > first ? dispatch->grid[i] - first
                                                  : dispatch->block[i];
        size[i] =
            left < dispatch->block[i] ? (uint32_t)left : dispatch->block[i];
        group->id[i] = id[i];
    }
    group->dispatch = dispatch;
    group->fault = fault;
    group->executed = 0;
    group->misaligned = 0;
    group->accesses = 0;
    group->flipped = false;
    memset(group->seen, 0, sizeof group->seen);
    group->random =
        dispatch->seed ^ exec_group_index(group) * UINT64_C(0xd1342543de82ef95);
    group->active =
        (uint32_t)(((uint64_t)size[0] * size[1] * size[2] + SIM_LANES - 1) /
                   SIM_LANES);
    exec_poison(group->lds, group->lds_bytes);
    exec_poison(group->scratch,
                (size_t)(group->scratch_wave * group->wave_count));
    for (uint32_t i = 0; i < group->active; i++) {
        exec_start_wave(&group->waves[i], size);
    }
    group->turn = group->active - 1;
    if (group->watched) {
        watch_start(group);
    }
    /* The waves' float modes are their own: whatever the caller's thread has
     * set (rounding, flushing of denormals) is put aside. */
    fenv_t host;
    (void)fegetenv(&host);
    (void)fesetenv(FE_DFL_ENV);
    bool done = run_waves(group);
    (void)fesetenv(&host);

    if (group->watched) {
        watch_end(group, done);
    }
    stats->wave_instructions += group->executed;
    stats->waves += group->active;
    stats->workgroups++;
    stats->misaligned += group->misaligned;
    return done;
}
