/* isa_lists.c: the .def lists as tables.
 *
 * isa_ops: what each list says about an instruction. isa_find: opcode ->
 * instruction per format; an opcode given twice is a compiler warning.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "isa.h"

const isa_info isa_ops[ISA_COUNT] = {
#define INFO(fmt, op, name_, d, a, b, c, flag, acc, size) \
    {.name = name_,                                       \
     .opcode = (op),                                      \
     .format = (fmt),                                     \
     .type = {T_##d, T_##a, T_##b, T_##c},                \
     .flags = (flag),                                     \
     .access = (acc),                                     \
     .bytes = (size),                                     \
     .meaning = ""},
#define VECTOR(fmt, op, name_, d, a, b, c, flag, text) \
    {.name = name_,                                    \
     .opcode = (op),                                   \
     .format = (fmt),                                  \
     .type = {T_##d, T_##a, T_##b, T_##c},             \
     .flags = (flag),                                  \
     .meaning = text},
    INFO(F_NONE, 0, "", none, none, none, none, 0, 0, 0)
#define SOP2(op, name, d, a, b, ...) \
    INFO(F_SOP2, op, #name, d, a, b, none, 0, 0, 0)
#include "sop2.def"
#define SOP1(op, name, d, a, ...) \
    INFO(F_SOP1, op, #name, d, a, none, none, 0, 0, 0)
#include "sop1.def"
#define SOPK(op, name, d, use, ...) \
    INFO(F_SOPK, op, #name, d, none, none, none, 0, K_##use, 0)
#include "sopk.def"
#define SOPC(op, name, a, b, ...) \
    INFO(F_SOPC, op, #name, none, a, b, none, 0, 0, 0)
#include "sopc.def"
#define SOPP(op, name, style, ...) \
    INFO(F_SOPP, op, #name, none, none, none, none, 0, P_##style, 0)
#include "sopp.def"
#define SMEM(op, name, kind, dwords) \
    INFO(F_SMEM, op, #name, none, none, none, none, 0, kind, 4 * (dwords))
#include "smem.def"
#define VOP1(op, name, d, a, ...) \
    VECTOR(F_VOP1, op, #name, d, a, none, none, 0, #__VA_ARGS__)
#define VOP1_SPECIAL(op, name, d, a, ...) \
    VECTOR(F_VOP1, op, #name, d, a, none, none, ISA_SPECIAL, #__VA_ARGS__)
#include "vop1.def"
#define VOP2(op, name, d, a, b, c, ...) \
    VECTOR(F_VOP2, op, #name, d, a, b, c, 0, #__VA_ARGS__)
#define VOP2_CO(op, name, d, a, b, c, ...) \
    VECTOR(F_VOP2, op, #name, d, a, b, c, ISA_CARRY, #__VA_ARGS__)
#include "vop2.def"
#define VOPC(op, name, a, b, ...) \
    VECTOR(F_VOPC, op, #name, mask, a, b, none, 0, #__VA_ARGS__)
#include "vopc.def"
#define VOP3(op, name, d, a, b, c, ...) \
    VECTOR(F_VOP3, op, #name, d, a, b, c, 0, #__VA_ARGS__)
#define VOP3_CO(op, name, d, a, b, c, ...) \
    VECTOR(F_VOP3, op, #name, d, a, b, c, ISA_CARRY, #__VA_ARGS__)
#define VOP3_SEL(op, name, d, a, b, c, ...) \
    VECTOR(F_VOP3, op, #name, d, a, b, c, ISA_SELECT, #__VA_ARGS__)
#define VOP3_SPECIAL(op, name, d, a, b, c, ...) \
    VECTOR(F_VOP3, op, #name, d, a, b, c, ISA_SPECIAL, #__VA_ARGS__)
#include "vop3.def"
#define VOP3P(op, name, d, a, b, c, ...) \
    VECTOR(F_VOP3P, op, #name, d, a, b, c, 0, #__VA_ARGS__)
#include "vop3p.def"
#define DS(op, name, kind, size) \
    INFO(F_DS, op, "ds_" #name, none, none, none, none, 0, kind, size)
#define ATOMIC_BYTES(type) (#type[1] == '3' ? 4 : 8) /* u32, u64, ... */
#define DS_ATOMIC(op, name, rtn, type, sources, ...)                      \
    INFO(F_DS, op, "ds_" #name, none, none, none, none,                   \
         (sources) == 2 ? ISA_TWO_DATA : 0, M_ATOMIC, ATOMIC_BYTES(type)) \
    INFO(F_DS, (op) + 0x20, "ds_" #rtn, none, none, none, none,           \
         ISA_RETURN | ((sources) == 2 ? ISA_TWO_DATA : 0), M_ATOMIC,      \
         ATOMIC_BYTES(type))
#define DS_ATOMIC_RTN(op, name, type, sources, ...)                  \
    INFO(F_DS, op, "ds_" #name, none, none, none, none,              \
         ISA_RETURN | ((sources) == 2 ? ISA_TWO_DATA : 0), M_ATOMIC, \
         ATOMIC_BYTES(type))
#include "ds.def"
#define VMEM_INFO(fmt, op, name, kind, flag, size) \
    INFO(fmt, op, name, none, none, none, none, flag, kind, size)
#define VMEM(op, name, kind, size)                            \
    VMEM_INFO(F_FLAT, op, "flat_" #name, kind, 0, size)       \
    VMEM_INFO(F_GLOBAL, op, "global_" #name, kind, 0, size)   \
    VMEM_INFO(F_SCRATCH, op, "scratch_" #name, kind, 0, size) \
    VMEM_INFO(F_MUBUF, op, "buffer_" #name, kind, 0, size)
#define VMEM_ATOMIC_INFO(fmt, op, name, type, sources)                    \
    VMEM_INFO(fmt, op, name, M_ATOMIC, (sources) == 2 ? ISA_TWO_DATA : 0, \
              ATOMIC_BYTES(type))
#define VMEM_ATOMIC(op, name, type, sources, ...)                  \
    VMEM_ATOMIC_INFO(F_FLAT, op, "flat_" #name, type, sources)     \
    VMEM_ATOMIC_INFO(F_GLOBAL, op, "global_" #name, type, sources) \
    VMEM_ATOMIC_INFO(F_NONE, op, "scratch_" #name, type, sources)  \
    VMEM_ATOMIC_INFO(F_MUBUF, op, "buffer_" #name, type, sources)
#define MUBUF(op, name, kind) VMEM_INFO(F_MUBUF, op, #name, kind, 0, 0)
#include "vmem.def"
};

#define ENTRY(op, name, ...) [op] = ISA_##name,

static const uint16_t sop2_table[128] = {
#define SOP2 ENTRY
#include "sop2.def"
};
static const uint16_t sop1_table[256] = {
#define SOP1 ENTRY
#include "sop1.def"
};
static const uint16_t sopk_table[32] = {
#define SOPK ENTRY
#include "sopk.def"
};
static const uint16_t sopc_table[128] = {
#define SOPC ENTRY
#include "sopc.def"
};
static const uint16_t sopp_table[128] = {
#define SOPP ENTRY
#include "sopp.def"
};
static const uint16_t smem_table[256] = {
#define SMEM ENTRY
#include "smem.def"
};
static const uint16_t vop1_table[256] = {
#define VOP1 ENTRY
#include "vop1.def"
};
static const uint16_t vop2_table[64] = {
#define VOP2 ENTRY
#include "vop2.def"
};
static const uint16_t vopc_table[256] = {
#define VOPC ENTRY
#include "vopc.def"
};
static const uint16_t vop3_table[1024] = {
#define VOP3 ENTRY
#include "vop3.def"
};
static const uint16_t vop3p_table[128] = {
#define VOP3P ENTRY
#include "vop3p.def"
};
static const uint16_t ds_table[256] = {
#define DS(op, name, ...) [op] = ISA_ds_##name,
#define DS_ATOMIC(op, name, rtn, ...) \
    [op] = ISA_ds_##name, [(op) + 0x20] = ISA_ds_##rtn,
#define DS_ATOMIC_RTN DS
#include "ds.def"
};
static const uint16_t flat_table[128] = {
#define VMEM(op, name, ...) [op] = ISA_flat_##name,
#define VMEM_ATOMIC VMEM
#include "vmem.def"
};
static const uint16_t global_table[128] = {
#define VMEM(op, name, ...) [op] = ISA_global_##name,
#define VMEM_ATOMIC VMEM
#include "vmem.def"
};
static const uint16_t scratch_table[128] = {
#define VMEM(op, name, ...) [op] = ISA_scratch_##name,
#define VMEM_ATOMIC(op, name, ...)
#include "vmem.def"
};
static const uint16_t mubuf_table[128] = {
#define VMEM(op, name, ...) [op] = ISA_buffer_##name,
#define VMEM_ATOMIC VMEM
#define MUBUF(op, name, kind) [op] = ISA_##name,
#include "vmem.def"
};

unsigned isa_find(unsigned format, unsigned opcode)
{
    static const struct {
        const uint16_t *op;
        unsigned count;
    } tables[] = {
        [F_NONE] = {NULL, 0},
#define TABLE(format_, name) [format_] = {name, sizeof name / sizeof name[0]}
        TABLE(F_SOP1, sop1_table),
        TABLE(F_SOP2, sop2_table),
        TABLE(F_SOPK, sopk_table),
        TABLE(F_SOPC, sopc_table),
        TABLE(F_SOPP, sopp_table),
        TABLE(F_SMEM, smem_table),
        TABLE(F_VOP1, vop1_table),
        TABLE(F_VOP2, vop2_table),
        TABLE(F_VOPC, vopc_table),
        TABLE(F_VOP3, vop3_table),
        TABLE(F_VOP3P, vop3p_table),
        TABLE(F_DS, ds_table),
        TABLE(F_FLAT, flat_table),
        TABLE(F_GLOBAL, global_table),
        TABLE(F_SCRATCH, scratch_table),
        TABLE(F_MUBUF, mubuf_table),
    };

    return opcode < tables[format].count ? tables[format].op[opcode]
                                         : ISA_UNKNOWN;
}

isa_ds_use isa_ds_fields(const isa_info *info)
{
    uint8_t one = (uint8_t)((info->bytes + 3) / 4), both = (uint8_t)(2 * one);
    bool two = (info->flags & ISA_TWO_DATA) != 0;
    bool returns = (info->flags & ISA_RETURN) != 0;

    switch (info->access) {
    case M_NOP:
        return (isa_ds_use){0};
    case M_READ2:
    case M_READ2ST64:
        return (isa_ds_use){.addr = 1, .dst = both};
    case M_XCHG2:
    case M_XCHG2ST64:
        return (isa_ds_use){.addr = 1, .data = one, .data2 = one, .dst = both};
    case M_APPEND:
    case M_CONSUME:
        return (isa_ds_use){.dst = one};
    case M_WRITE2:
    case M_WRITE2ST64:
        return (isa_ds_use){.addr = 1, .data = one, .data2 = one};
    case M_PERMUTE:
    case M_BPERMUTE:
        return (isa_ds_use){.addr = 1, .data = one, .dst = one};
    case M_ATOMIC:
        return (isa_ds_use){.addr = 1,
                            .data = one,
                            .data2 = two ? one : 0,
                            .dst = returns ? one : 0};
    default:
        return isa_is_store(info) ? (isa_ds_use){.addr = 1, .data = one}
                                  : (isa_ds_use){.addr = 1, .dst = one};
    }
}
