/* exec_scalar.c: the scalar ALU, program control and scalar memory.
 *
 * Meanings come from sop1.def, sop2.def, sopk.def, sopc.def and sopp.def;
 * here are the operands, the hardware registers and the loads.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "exec.h"
#include "exec_integer.h"

#include <string.h>

/* ---- operands ---------------------------------------------------------- */

/* Inline constants 240..248 as half, float and double. */
static uint64_t float_constant(unsigned code, unsigned type)
{
    static const uint16_t half[9] = {0x3800, 0xb800, 0x3c00, 0xbc00, 0x4000,
                                     0xc000, 0x4400, 0xc400, 0x3118};
    static const uint32_t single[9] = {0x3f000000, 0xbf000000, 0x3f800000,
                                       0xbf800000, 0x40000000, 0xc0000000,
                                       0x40800000, 0xc0800000, 0x3e22f983};
    static const uint64_t wide[9] = {
        UINT64_C(0x3fe0000000000000), UINT64_C(0xbfe0000000000000),
        UINT64_C(0x3ff0000000000000), UINT64_C(0xbff0000000000000),
        UINT64_C(0x4000000000000000), UINT64_C(0xc000000000000000),
        UINT64_C(0x4010000000000000), UINT64_C(0xc010000000000000),
        UINT64_C(0x3fc45f306dc9c882)};
    unsigned i = code - SRC_HALF;

    switch (type) {
    case T_u16:
    case T_i16:
    case T_f16:
    case T_pk16:
    case T_pkf16:
        return half[i];
    case T_u64:
    case T_i64:
    case T_f64:
        return wide[i];
    default:
        return single[i];
    }
}

uint64_t exec_operand(const wave *w, const isa_row *row, unsigned code,
                      unsigned type)
{
    bool wide = isa_registers(type) == 2;

    if (code < SRC_ZERO) {
        return wide ? pair(w, code) : w->s[code];
    }
    if (code <= SRC_MINUS_16) {
        int64_t value = code < SRC_MINUS_1 ? (int64_t)code - SRC_ZERO
                                           : (int64_t)SRC_MINUS_1 - 1 - code;
        return (uint64_t)value;
    }
    if (code >= SRC_HALF && code <= SRC_INV_2PI) {
        return float_constant(code, type);
    }
    switch (code) {
    case SRC_SHARED_BASE:
        return APERTURE_SHARED;
    case SRC_SHARED_LIMIT:
        return APERTURE_SHARED + UINT32_MAX;
    case SRC_PRIVATE_BASE:
        return APERTURE_PRIVATE;
    case SRC_PRIVATE_LIMIT:
        return APERTURE_PRIVATE + UINT32_MAX;
    case SRC_VCCZ:
        return pair(w, SRC_VCC) == 0;
    case SRC_EXECZ:
        return exec_mask(w) == 0;
    case SRC_SCC:
        return w->scc;
    case SRC_LITERAL:
        return type == T_f64   ? (uint64_t)row->literal << 32
               : type == T_i64 ? (uint64_t)(int64_t)(int32_t)row->literal
                               : row->literal;
    default:
        return 0;
    }
}

/* ---- program counter and hardware registers ---------------------------- */

static uint64_t next_address(const wave *w)
{
    return w->group->dispatch->code->address + 4 * (uint64_t)w->pc;
}

static void jump(wave *w, uint64_t address)
{
    uint64_t offset = address - w->group->dispatch->code->address;

    if (offset % 4 != 0 || offset / 4 >= w->group->dispatch->code->count) {
        exec_fault_at(w, SIM_FAULT_PC, 0, address, 4, "jump out of the code");
        return;
    }
    w->pc = (size_t)(offset / 4);
}

static void branch(wave *w, int32_t dwords)
{
    w->pc = (size_t)((int64_t)w->pc + dwords);
}

/* hwreg operand: id [5:0], offset [10:6], size - 1 [15:11]. */
enum {
    HWREG_MODE = 1,
    HWREG_STATUS,
    HWREG_TRAPSTS,
    HWREG_HW_ID,
    HWREG_GPR_ALLOC,
    HWREG_LDS_ALLOC,
    HWREG_SH_MEM_BASES = 15
};

static uint32_t read_hwreg(wave *w, uint32_t what)
{
    uint32_t value = 0;

    switch (what & 63) {
    case HWREG_MODE:
        value = w->mode;
        break;
    case HWREG_STATUS:
        value = w->scc | (exec_mask(w) == 0 ? 1u << 9 : 0) |
                (pair(w, SRC_VCC) == 0 ? 1u << 10 : 0) | 1u << 16;
        break;
    case HWREG_TRAPSTS:
        break;
    case HWREG_HW_ID: /* wave [3:0], SIMD [5:4] */
        value = w->index / 4 % 16 | w->index % 4 << 4;
        break;
    case HWREG_GPR_ALLOC:
        value = w->vgprs / 4 - 1;
        break;
    case HWREG_LDS_ALLOC:
        value = (w->group->lds_bytes + 511) / 512 << 12;
        break;
    case HWREG_SH_MEM_BASES: /* private [15:0], shared [31:16] */
        value = (uint32_t)(APERTURE_PRIVATE >> 48) |
                (uint32_t)(APERTURE_SHARED >> 48) << 16;
        break;
    default:
        exec_fault(w, SIM_FAULT_OPCODE, "hardware register not simulated");
        break;
    }
    return (uint32_t)bit_field(value, what >> 6 & 31, (what >> 11 & 31) + 1,
                               32);
}

static void write_hwreg(wave *w, uint32_t what, uint32_t value)
{
    uint32_t offset = what >> 6 & 31, width = (what >> 11 & 31) + 1;
    uint32_t mask = (width == 32 ? UINT32_MAX : (1u << width) - 1u) << offset;

    if ((what & 63) == HWREG_TRAPSTS && (value & mask >> offset) == 0) {
        return; /* no exception flag is ever set, so none has to be cleared */
    }
    if ((what & 63) != HWREG_MODE) {
        exec_fault(w, SIM_FAULT_OPCODE, "hardware register not simulated");
        return;
    }
    w->mode = (w->mode & ~mask) | (value << offset & mask);
}

/* VGPR indexing: M0[7:0] index, M0[15:12] which of source 0, 1, 2 and
 * destination it is added to. */
static void set_gpr_index(wave *w, uint32_t index, uint32_t which)
{
    w->mode |= 1u << MODE_GPR_IDX;
    w->s[SRC_M0] = (w->s[SRC_M0] & ~0xf0ffu) | (index & 0xff) | which << 12;
}

/* s_movrel: M0 is added to the number of the source or of the destination,
 * which stays among the registers of its wave. */
static unsigned relative(wave *w, unsigned code, unsigned count)
{
    uint64_t at = (uint64_t)code + w->s[SRC_M0];

    if (code >= SIM_SGPRS || at + count > SIM_SGPRS || at % count != 0) {
        exec_fault(w, SIM_FAULT_REGISTER, "no such SGPR: M0 goes too far");
        return code;
    }
    return (unsigned)at;
}

static uint64_t read_relative(wave *w, unsigned code, unsigned count)
{
    unsigned at = relative(w, code, count);

    return count == 2 ? pair(w, at) : w->s[at];
}

static void write_relative(wave *w, unsigned code, uint64_t value,
                           unsigned count)
{
    unsigned at = relative(w, code, count);

    if (w->state == WAVE_RUNNING) {
        w->s[at] = (uint32_t)value;
        if (count == 2) {
            w->s[at + 1] = (uint32_t)(value >> 32);
        }
    }
}

/* ---- the lists --------------------------------------------------------- */

typedef uint32_t V_u32, V_none;
typedef int32_t V_i32;
typedef uint64_t V_u64;
typedef int64_t V_i64;

#define OLD_none 0
#define OLD_u32 w->s[row->dst]
#define OLD_i32 (int32_t)w->s[row->dst]
#define OLD_u64 pair(w, row->dst)
#define OLD_i64 (int64_t)pair(w, row->dst)
#define STORE_none (void)D
#define STORE_u32 w->s[row->dst] = D
#define STORE_i32 w->s[row->dst] = (uint32_t)D
#define STORE_u64 set_pair(w, row->dst, D)
#define STORE_i64 set_pair(w, row->dst, (uint64_t)D)

#define SOURCE(i, t) (V_##t) exec_operand(w, row, row->src[i], T_##t)
#define SCC scc
#define PC next_address(w)
#define VCC pair(w, SRC_VCC)
#define LITERAL row->literal
#define IMM row->offset

/* EXEC is written before D: a destination EXEC wins. */
#define WRITE_BACK(td)               \
    w->scc = (uint32_t)(SCC) != 0;   \
    if (EXEC != exec) {              \
        set_pair(w, SRC_EXEC, EXEC); \
    }                                \
    STORE_##td;                      \
    break;

void exec_scalar(wave *w, const isa_row *row)
{
    const uint64_t exec = exec_mask(w);
    uint64_t EXEC = exec;
    uint32_t scc = w->scc;

    switch (row->op) {
#define SOP2(opcode, name, td, ta, tb, ...) \
    case ISA_##name: {                      \
        const V_##ta A = SOURCE(0, ta);     \
        const V_##tb B = SOURCE(1, tb);     \
        V_##td D;                           \
        __VA_ARGS__;                        \
        WRITE_BACK(td)                      \
    }
#include "sop2.def"
#define SOP1(opcode, name, td, ta, ...) \
    case ISA_##name: {                  \
        const V_##ta A = SOURCE(0, ta); \
        V_##td D = OLD_##td;            \
        (void)A;                        \
        __VA_ARGS__;                    \
        WRITE_BACK(td)                  \
    }
#include "sop1.def"
#define SOPK(opcode, name, td, use, ...) \
    case ISA_##name: {                   \
        V_##td D = OLD_##td;             \
        __VA_ARGS__;                     \
        WRITE_##use(td)                  \
    }
#define WRITE_W(td) WRITE_BACK(td)
#define WRITE_R(td)      \
    w->scc = (SCC) != 0; \
    break;
#define WRITE_X(td) \
    (void)D;        \
    break;
#include "sopk.def"
#define SOPC(opcode, name, ta, tb, ...) \
    case ISA_##name: {                  \
        const V_##ta A = SOURCE(0, ta); \
        const V_##tb B = SOURCE(1, tb); \
        __VA_ARGS__;                    \
        w->scc = (uint32_t)(SCC) != 0;  \
        break;                          \
    }
#include "sopc.def"
#define SOPP(opcode, name, style, ...) \
    case ISA_##name: {                 \
        __VA_ARGS__;                   \
        break;                         \
    }
#include "sopp.def"
    default:
        exec_fault(w, SIM_FAULT_OPCODE, "");
        break;
    }
}

/* ---- scalar memory ----------------------------------------------------- */

/* Compilers widen a scalar load to its natural alignment: the rest cannot lie
 * in another page, and its value is not used. So of such a load only a part
 * has to be the launch's memory; the rest reads as undefined. */
static bool load_part(wave *w, unsigned dst, uint64_t address, uint32_t bytes)
{
    uint8_t *to = (uint8_t *)&w->s[dst];
    uint8_t value[16];
    bool any = false;

    if (!exec_widened(address, bytes)) {
        return false;
    }
    for (uint32_t i = 0; i < bytes; i++) {
        bool inside = exec_allowed(w->group, address + i, 1, SIM_READ);
        value[i] = inside ? *(const uint8_t *)(uintptr_t)(address + i)
                          : (uint8_t)(EXEC_POISON & 0xff);
        any = any || inside;
    }
    if (any) {
        memcpy(to, value, bytes);
    }
    return any;
}

void exec_smem(wave *w, const isa_row *row)
{
    const isa_info *info = &isa_ops[row->op];
    uint32_t bytes = info->bytes;

    if (info->access == M_CACHE) {
        return;
    }
    if (info->access == M_TIME) {
        /* A clock that only counts work: four cycles per instruction. */
        set_pair(w, row->dst, w->group->executed * 4);
        return;
    }
    uint64_t offset = row->imm ? (uint64_t)(int64_t)row->offset : 0;
    if (row->soffset_en || !row->imm) {
        offset += w->s[row->soffset];
    }
    uint64_t base = pair(w, row->base);
    bool buffer = info->access == M_BUFFER_LOAD;
    if (buffer) {
        base &= UINT64_C(0xffffffffffff);
    }
    uint64_t address = (base & ~UINT64_C(3)) + (offset & ~UINT64_C(3));
    if (((base | offset) & 3) != 0) {
        exec_fault_at(w, SIM_FAULT_ALIGNMENT, 0, base + offset, bytes, "");
        return;
    }
    if (buffer) {
        /* Dwords beyond the descriptor's records read zero. */
        uint64_t stride = w->s[row->base + 1] >> 16 & 0x3fff;
        uint64_t limit = w->s[row->base + 2] * (stride == 0 ? 1 : stride);
        uint64_t inside = offset >= limit ? 0 : (limit - offset) / 4 * 4;
        uint32_t take = inside < bytes ? (uint32_t)inside : bytes;
        if (take > 0 && !exec_allowed(w->group, address, take, SIM_READ)) {
            exec_fault_at(w, SIM_FAULT_ADDRESS, 0, address, take, "");
            return;
        }
        if (take > 0 && w->group->watched &&
            !watch_access_scalar(w, address, take, SIM_READ)) {
            return;
        }
        memset(&w->s[row->dst], 0, bytes);
        memcpy(&w->s[row->dst], (const void *)(uintptr_t)address, take);
        return;
    }
    bool store = info->access == M_STORE;
    if (w->group->watched &&
        !watch_access_scalar(w, address, bytes, store ? SIM_WRITE : SIM_READ)) {
        return;
    }
    if (!exec_allowed(w->group, address, bytes, store ? SIM_WRITE : SIM_READ)) {
        if (store || !load_part(w, row->dst, address, bytes)) {
            exec_fault_at(w, SIM_FAULT_ADDRESS, 0, address, bytes, "");
        }
    } else if (store) {
        memcpy((void *)(uintptr_t)address, &w->s[row->dst], bytes);
    } else {
        memcpy(&w->s[row->dst], (const void *)(uintptr_t)address, bytes);
    }
}
