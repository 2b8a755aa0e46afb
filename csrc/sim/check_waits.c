/* check_waits.c: results that no s_waitcnt has waited for.
 *
 * Loads, stores, atomics and LDS accesses go into a queue and count in vmcnt,
 * lgkmcnt or, flat ones, in both. A wait for n completes all but the last n of
 * those that return in order: vector memory among itself, LDS among itself.
 * Scalar loads share lgkmcnt but return in any order, so only a wait for zero
 * completes them; a flat access may go either way, so it needs both counters
 * at zero. A counter is finite: an instruction that would overflow it waits
 * for the oldest. Until an access is complete nothing may read or overwrite
 * the registers its result goes to.
 *
 * Source: Vega ISA 4.4; LLVM for flat accesses.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"

#include <string.h>

/* ---- sets of registers ------------------------------------------------- */

static uint64_t bits(unsigned first, unsigned count)
{
    return (count >= 64 ? UINT64_MAX : (UINT64_C(1) << count) - 1) << first;
}

static void set_add(check_set *set, unsigned first, unsigned count)
{
    uint64_t *word = set->scalar;

    if (first >= SRC_VGPR) {
        first -= SRC_VGPR;
        word = set->vector;
    }
    word[first / 64] |= bits(first % 64, count);
    if (first % 64 + count > 64) {
        word[first / 64 + 1] |= bits(0, first % 64 + count - 64);
    }
}

static bool set_meets(const check_set *set, unsigned first, unsigned count)
{
    const uint64_t *word = set->scalar;

    if (first >= SRC_VGPR) {
        first -= SRC_VGPR;
        word = set->vector;
    }
    return (word[first / 64] & bits(first % 64, count)) != 0 ||
           (first % 64 + count > 64 &&
            (word[first / 64 + 1] & bits(0, first % 64 + count - 64)) != 0);
}

static bool sets_meet(const check_set *a, const check_set *b)
{
    uint64_t both = 0;

    for (unsigned i = 0; i < 3; i++) {
        both |= a->scalar[i] & b->scalar[i];
    }
    for (unsigned i = 0; i < SIM_VGPRS / 64; i++) {
        both |= a->vector[i] & b->vector[i];
    }
    return both != 0;
}

void check_name_registers(check_row *facts)
{
    memset(&facts->named, 0, sizeof facts->named);
    facts->scalars = false;
    for (unsigned i = 0; i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        set_add(&facts->named, use->first, use->count);
        facts->scalars = facts->scalars || use->first < SRC_VGPR;
    }
}

/* ---- the queue --------------------------------------------------------- */

void check_waits_start(check_wave *c)
{
    c->queued = 0;
    memset(&c->vm, 0, sizeof c->vm);
    memset(&c->lds, 0, sizeof c->lds);
    memset(&c->flat, 0, sizeof c->flat);
    memset(&c->smem, 0, sizeof c->smem);
    memset(&c->any_way, 0, sizeof c->any_way);
}

static void unite(check_wave *c)
{
    /* Scalar registers are under way in smem alone. */
    memcpy(c->any_way.scalar, c->smem.scalar, sizeof c->any_way.scalar);
    for (unsigned i = 0; i < SIM_VGPRS / 64; i++) {
        c->any_way.vector[i] =
            c->vm.vector[i] | c->lds.vector[i] | c->flat.vector[i];
    }
}

static void rebuild(check_wave *c)
{
    memset(&c->vm, 0, sizeof c->vm);
    memset(&c->lds, 0, sizeof c->lds);
    memset(&c->flat, 0, sizeof c->flat);
    for (unsigned i = 0; i < c->queued; i++) {
        const check_pending *p = &c->queue[i];
        if (p->count != 0) {
            set_add(p->flat ? &c->flat
                    : p->vm ? &c->vm
                            : &c->lds,
                    p->first, p->count);
        }
    }
    unite(c);
}

bool check_wait(check_wave *c, unsigned vm, unsigned lgkm)
{
    unsigned vm_later = 0, lds_later = 0, kept = 0;
    bool changed = false, effect = false;

    for (unsigned i = c->queued; i-- > 0;) {
        check_pending *p = &c->queue[i];
        if (p->flat) {
            p->vm = p->vm && vm != 0;
            p->lgkm = p->lgkm && lgkm != 0;
        } else if (p->vm) {
            p->vm = vm_later++ < vm;
        } else {
            p->lgkm = lds_later++ < lgkm;
        }
        bool complete = !(p->vm || p->lgkm);
        changed = changed || complete;
        effect = effect || (complete && p->count != 0);
    }
    for (unsigned i = 0; i < 3 && lgkm == 0; i++) {
        effect = effect || c->smem.scalar[i] != 0;
        c->smem.scalar[i] = 0;
    }
    if (!changed) {
        unite(c);
        return effect;
    }
    for (unsigned i = 0; i < c->queued; i++) {
        if (c->queue[i].vm || c->queue[i].lgkm) {
            c->queue[kept++] = c->queue[i];
        }
    }
    c->queued = kept;
    rebuild(c);
    return effect;
}

static void push(check_wave *c, check_pending entry)
{
    /* One slot of each counter must be free. */
    (void)check_wait(c, entry.vm ? ISA_VM_MAX - 1 : ISA_VM_MAX,
                     entry.lgkm ? ISA_LGKM_MAX - 1 : ISA_LGKM_MAX);
    if (c->queued == CHECK_QUEUE) {
        /* Only flat accesses can pile up so far; the hardware's counters
         * have long stopped the wave. */
        memmove(c->queue, c->queue + 1, (CHECK_QUEUE - 1) * sizeof entry);
        c->queued--;
        rebuild(c);
    }
    c->queue[c->queued++] = entry;
    if (entry.count != 0) {
        set_add(entry.flat ? &c->flat
                : entry.vm ? &c->vm
                           : &c->lds,
                entry.first, entry.count);
        set_add(&c->any_way, entry.first, entry.count);
    }
}

static void enqueue(wave *w, const isa_row *row, const check_row *facts)
{
    check_wave *c = check_of(w);
    check_pending entry = {.pc = check_pc(w)};

    for (unsigned i = 0; i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        if (use->role == ROLE_RESULT) {
            entry.first = use->first;
            entry.count = use->count;
        }
    }
    switch (row->issue) {
    case ISSUE_DS:
        if (isa_ops[row->op].access == M_NOP) {
            return;
        }
        entry.lgkm = true;
        break;
    case ISSUE_FLAT:
        entry.flat = row->format == F_FLAT;
        entry.vm = true;
        entry.lgkm = entry.flat;
        break;
    case ISSUE_MUBUF:
        if (isa_ops[row->op].access == M_CACHE) {
            return;
        }
        entry.vm = true;
        break;
    default: /* SMEM: no order, so a set is enough */
        if (entry.count != 0) {
            set_add(&c->smem, entry.first, entry.count);
            set_add(&c->any_way, entry.first, entry.count);
            for (unsigned i = 0; i < entry.count; i++) {
                c->smem_pc[entry.first + i] = entry.pc;
            }
        }
        return;
    }
    push(c, entry);
}

void check_waits_lds(check_wave *c, const watch_access *access)
{
    if (c->queued == 0) {
        return; /* swallowed by push(): cannot happen for an LDS access */
    }
    check_pending *p = &c->queue[c->queued - 1];
    unsigned at = p->slots == 0 ? c->next_slot : p->slot + p->slots;
    check_lds_access *slot = &c->recent[at % CHECK_LDS_SLOTS];

    if (p->slots == 0) {
        p->slot = (uint8_t)(at % CHECK_LDS_SLOTS);
    }
    p->slots++;
    c->next_slot = (at + 1) % CHECK_LDS_SLOTS;
    slot->lanes = access->lanes;
    slot->bytes = access->bytes;
    slot->kind = access->kind;
    for (unsigned l = 0; l < SIM_LANES; l++) {
        slot->at[l] = (uint32_t)access->at[l];
    }
}

void check_waits_each_lds(wave *w,
                          void (*mark)(wave *w, const check_lds_access *access,
                                       size_t pc))
{
    check_wave *c = check_of(w);

    for (unsigned i = 0; i < c->queued; i++) {
        const check_pending *p = &c->queue[i];
        for (unsigned k = 0; k < p->slots; k++) {
            mark(w, &c->recent[(p->slot + k) % CHECK_LDS_SLOTS], p->pc);
        }
    }
}

/* ---- uses -------------------------------------------------------------- */

/* Where the result of `use` is being loaded, for the report. */
static size_t loader(const check_wave *c, const operand *use)
{
    for (unsigned i = c->queued; i-- > 0;) {
        const check_pending *p = &c->queue[i];
        if (p->count != 0 && p->first < use->first + use->count &&
            use->first < p->first + p->count) {
            return p->pc;
        }
    }
    for (unsigned r = use->first;
         r < OPERAND_SCALARS && r < use->first + (unsigned)use->count; r++) {
        if (set_meets(&c->smem, r, 1)) {
            return c->smem_pc[r];
        }
    }
    return 0;
}

/* The sets in which `use` must not be. Results that return in the order of
 * the instructions may follow each other into one register. */
static bool meets(const check_wave *c, const isa_row *row, const operand *use)
{
    bool result = use->role == ROLE_RESULT;
    bool vm = row->issue == ISSUE_MUBUF ||
              (row->issue == ISSUE_FLAT && row->format != F_FLAT);
    bool lds = row->issue == ISSUE_DS;

    if (use->first < SRC_VGPR) {
        return set_meets(&c->smem, use->first, use->count);
    }
    return (!(result && vm) && set_meets(&c->vm, use->first, use->count)) ||
           (!(result && lds) && set_meets(&c->lds, use->first, use->count)) ||
           set_meets(&c->flat, use->first, use->count);
}

bool check_waits(wave *w, const isa_row *row, const check_row *facts)
{
    check_wave *c = check_of(w);

    if (row->op == ISA_s_waitcnt) {
        isa_wait wait = isa_wait_counts(row);
        bool effect =
            check_wait(c, wait.vm == ISA_VM_MAX ? UINT32_MAX : wait.vm,
                       wait.lgkm == ISA_LGKM_MAX ? UINT32_MAX : wait.lgkm);
        return !effect ||
               check_offset(w, check_pc(w)) !=
                   (uint64_t)w->group->dispatch->probe ||
               check_report(w, SIM_FAULT_WAIT, "has something to wait for");
    }
    bool may_meet = sets_meet(&c->any_way, &facts->named);
    for (unsigned i = 0; may_meet && i < facts->uses.count; i++) {
        const operand *use = &facts->uses.of[i];
        if (meets(c, row, use)) {
            bool vector = use->first >= SRC_VGPR;
            unsigned first = use->first - (vector ? (unsigned)SRC_VGPR : 0u);
            char place[CHECK_PLACE];
            return check_report(
                w, SIM_FAULT_WAIT,
                "%s %c[%u:%u], which the access at %s may not have returned",
                use->role == ROLE_RESULT ? "overwrites" : "reads",
                vector ? 'v' : 's', first, first + use->count - 1u,
                check_place(w, loader(c, use), place, sizeof place));
        }
    }
    if (row->issue == ISSUE_DS || row->issue == ISSUE_FLAT ||
        row->issue == ISSUE_MUBUF || row->issue == ISSUE_SMEM) {
        enqueue(w, row, facts);
    }
    return true;
}
