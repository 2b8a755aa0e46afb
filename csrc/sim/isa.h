/* isa.h: the gfx906 instruction set as data (internal).
 *
 * One .def list per encoding format holds opcode, name, operand types and
 * meaning of every instruction we know; this header expands them into
 * isa_op, isa_lists.c into tables, exec*.c into code.
 *
 *   list        one row                                    encoding
 *   sop2.def    SOP2(opcode, name, D, A, B, meaning)       10 op7 d7 b8 a8
 *   sop1.def    SOP1(opcode, name, D, A, meaning)          101111101 d7 op8 a8
 *   sopk.def    SOPK(opcode, name, D, use, meaning)        1011 op5 d7 imm16
 *   sopc.def    SOPC(opcode, name, A, B, meaning)          101111110 op7 b8 a8
 *   sopp.def    SOPP(opcode, name, style, meaning)         101111111 op7 imm16
 *   smem.def    SMEM(opcode, name, kind, dwords)           110000 op8 ...
 *   vop2.def    VOP2(opcode, name, D, A, B, C, meaning)    0 op6 d8 b8 a9
 *   vop1.def    VOP1(opcode, name, D, A, meaning)          0111111 d8 op8 a9
 *   vopc.def    VOPC(opcode, name, A, B, meaning)          0111110 op8 b8 a9
 *   vop3.def    VOP3(opcode, name, D, A, B, C, meaning)    110100 op10 ...
 *   vop3p.def   VOP3P(opcode, name, D, A, B, C, meaning)   110100111 op7 ...
 *   ds.def      DS(opcode, name, kind, ...)                110110 ...
 *   vmem.def    FLAT, GLOBAL, SCRATCH 110111; MUBUF 111000: same opcodes
 *
 * Source: "Vega" 7nm instruction set architecture, chapter 13; opcode
 * numbers checked against LLVM 22.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef HIPSIM_ISA_H
#define HIPSIM_ISA_H

#include "sim.h"

/* clang-format off */
/* Operand types. They set the number of registers, the value of an inline
 * constant, and which float mode and modifiers apply. */
typedef enum isa_type {
    T_none,
    T_u32, T_i32, T_f32,   /* one register */
    T_u16, T_i16, T_f16,   /* low (or selected) half of one register */
    T_u64, T_i64, T_f64,   /* two registers, low first */
    T_u128,                /* four */
    T_pk16, T_pkf16,       /* two halves, op_sel per half */
    T_mix,                 /* f32, or the selected f16 half: fma_mix */
    T_raw,                 /* one register, packed data without op_sel */
    T_mask,                /* one bit per lane, an SGPR pair */
    T_hi16                 /* destination: high half only */
} isa_type;

typedef enum isa_format {
    F_NONE, F_SOP1, F_SOP2, F_SOPK, F_SOPC, F_SOPP, F_SMEM,
    F_VOP1, F_VOP2, F_VOPC, F_VOP3, F_VOP3P, F_DS,
    F_FLAT, F_GLOBAL, F_SCRATCH, F_MUBUF
} isa_format;

/* What a memory instruction does (smem.def, ds.def, vmem.def). */
typedef enum isa_access {
    M_NONE, M_LOAD, M_STORE, M_ATOMIC, M_CACHE, M_TIME,
    M_LOAD_I8, M_LOAD_U8, M_LOAD_I16, M_LOAD_U16,
    M_LOAD_I8_LO, M_LOAD_U8_LO, M_LOAD_16_LO,  /* d16: low half only */
    M_LOAD_I8_HI, M_LOAD_U8_HI, M_LOAD_16_HI,  /* d16: high half only */
    M_STORE_8, M_STORE_16, M_STORE_8_HI, M_STORE_16_HI,
    M_BUFFER_LOAD,                             /* s_buffer_load */
    M_READ2, M_READ2ST64, M_WRITE2, M_WRITE2ST64,
    M_XCHG2, M_XCHG2ST64,                      /* two exchanges */
    M_APPEND, M_CONSUME,                       /* a counter of lanes */
    M_SWIZZLE, M_PERMUTE, M_BPERMUTE, M_NOP
} isa_access;
/* clang-format on */

/* Every instruction, by its name in the manual. */
typedef enum isa_op {
    ISA_UNKNOWN,
#define SOP2(opcode, name, ...) ISA_##name,
#include "sop2.def"
#define SOP1(opcode, name, ...) ISA_##name,
#include "sop1.def"
#define SOPK(opcode, name, ...) ISA_##name,
#include "sopk.def"
#define SOPC(opcode, name, ...) ISA_##name,
#include "sopc.def"
#define SOPP(opcode, name, ...) ISA_##name,
#include "sopp.def"
#define SMEM(opcode, name, ...) ISA_##name,
#include "smem.def"
#define VOP1(opcode, name, ...) ISA_##name,
#include "vop1.def"
#define VOP2(opcode, name, ...) ISA_##name,
#include "vop2.def"
#define VOPC(opcode, name, ...) ISA_##name,
#include "vopc.def"
#define VOP3(opcode, name, ...) ISA_##name,
#include "vop3.def"
#define VOP3P(opcode, name, ...) ISA_##name,
#include "vop3p.def"
#define DS(opcode, name, ...) ISA_ds_##name,
#define DS_ATOMIC(opcode, name, rtn_name, ...) ISA_ds_##name, ISA_ds_##rtn_name,
#define DS_ATOMIC_RTN(opcode, name, ...) ISA_ds_##name,
#include "ds.def"
#define VMEM_NAMES(name) \
    ISA_flat_##name, ISA_global_##name, ISA_scratch_##name, ISA_buffer_##name,
#define VMEM(opcode, name, ...) VMEM_NAMES(name)
#define VMEM_ATOMIC(opcode, name, ...) VMEM_NAMES(name)
#define MUBUF(opcode, name, ...) ISA_##name,
#include "vmem.def"
#undef VMEM_NAMES
    ISA_COUNT
} isa_op;

/* What the lists say about one instruction. */
typedef struct isa_info {
    const char *name;
    uint16_t opcode;
    uint8_t format;      /* isa_format of the list it stands in */
    uint8_t type[4];     /* isa_type of D, A, B, C */
    uint8_t flags;       /* ISA_CARRY | ... */
    uint8_t access;      /* isa_access; SOPK, SOPP: isa_operand_style */
    uint8_t bytes;       /* memory: bytes of one element */
    const char *meaning; /* vector instructions: the statement */
} isa_info;

enum {
    ISA_CARRY = 1,    /* has a mask destination beside D */
    ISA_SELECT = 2,   /* op_sel on 16-bit operands, D's other half kept */
    ISA_SPECIAL = 4,  /* exec_vector.h has its own code for it */
    ISA_RETURN = 8,   /* LDS atomic with a result */
    ISA_TWO_DATA = 16 /* atomic with two data operands: compare, swap */
};

/* clang-format off */
/* How the one operand of SOPK and SOPP is meant. */
typedef enum isa_operand_style {
    K_W, K_R, K_X,
    P_NOTHING, P_VALUE, P_OPTION, P_TARGET, P_WAIT, P_MESSAGE, P_INDEX
} isa_operand_style;
/* clang-format on */

extern const isa_info isa_ops[ISA_COUNT];

/* clang-format off */
/* Source operand codes (9 bits) beyond the scalar registers. */
enum {
    SRC_FLAT_SCRATCH = 102, SRC_XNACK_MASK = 104, SRC_VCC = 106,
    SRC_TTMP = 108, SRC_M0 = 124, SRC_EXEC = 126,
    SRC_ZERO = 128, SRC_MINUS_1 = 193, SRC_MINUS_16 = 208,
    SRC_SHARED_BASE = 235, SRC_SHARED_LIMIT, SRC_PRIVATE_BASE,
    SRC_PRIVATE_LIMIT, SRC_POPS,
    SRC_HALF = 240, SRC_INV_2PI = 248, SRC_SDWA = 249, SRC_DPP = 250,
    SRC_VCCZ = 251, SRC_EXECZ = 252, SRC_SCC = 253, SRC_LDS_DIRECT = 254,
    SRC_LITERAL = 255, SRC_VGPR = 256
};
/* clang-format on */

/* How exec.c issues a row. */
typedef enum isa_issue {
    ISSUE_FAULT,  /* does not decode */
    ISSUE_SCALAR, /* SOP1 SOP2 SOPK SOPC and SOPP */
    ISSUE_SMEM,
    ISSUE_VALU,
    ISSUE_DS,
    ISSUE_FLAT,
    ISSUE_MUBUF
} isa_issue;

enum { ISA_EXT_NONE, ISA_EXT_SDWA, ISA_EXT_DPP };

/* One decoded instruction. sim_code holds one row per dword of text, so
 * that a jump into the middle of an instruction decodes as hardware would. */
typedef struct isa_row {
    uint16_t op;    /* isa_op; ISA_UNKNOWN faults */
    uint8_t format; /* encoding met, may differ from the list's */
    uint8_t dwords;
    uint8_t issue;    /* isa_issue */
    uint8_t ext;      /* ISA_EXT_* */
    uint8_t plain;    /* VALU: no modifier of any kind */
    uint8_t dst;      /* VGPR or SGPR number */
    uint8_t sdst;     /* VOP3b, VOPC, SDWA: mask destination */
    uint8_t neg, abs; /* bit per source */
    uint8_t op_sel, op_sel_hi, neg_hi;
    uint8_t omod; /* 0, 1 *2, 2 *4, 3 /2 */
    uint8_t clamp;
    uint8_t sext;       /* SDWA: bit per source */
    uint8_t sel[3];     /* SDWA: destination, source 0, source 1 */
    uint8_t dst_unused; /* SDWA: 0 pad, 1 sign, 2 preserve */
    uint8_t row_mask, bank_mask, bound_zero; /* DPP */
    uint16_t dpp_ctrl;
    uint16_t src[3];                 /* source codes */
    uint16_t vgpr_end;               /* one past the highest VGPR named */
    uint8_t addr, data, data2, base; /* memory operands, register numbers */
    uint8_t glc, slc, gds, lds, offen, idxen, tfe;
    uint8_t soffset, soffset_en, imm;
    int32_t offset; /* memory offset, or simm16 */
    uint32_t literal;
} isa_row;

struct sim_code {
    uint64_t address;
    size_t count; /* dwords */
    const uint32_t *word;
    isa_row row[];
};

static inline bool isa_is_float(unsigned type)
{
    return type == T_f16 || type == T_f32 || type == T_f64 || type == T_mix ||
           type == T_hi16 || type == T_pkf16;
}

/* True if source i may be negated (and, but for packed halves, made
 * absolute). */
static inline bool isa_takes_sign(const isa_row *row, unsigned i)
{
    unsigned type = isa_ops[row->op].type[1 + i];

    return isa_is_float(type) ||
           (row->op == ISA_v_pack_b32_f16 && type == T_u16) ||
           (row->op == ISA_v_cndmask_b32 && type == T_u32);
}

/* The instruction with this opcode in a format, or ISA_UNKNOWN. */
unsigned isa_find(unsigned format, unsigned opcode);

/* How many VGPRs each register field of a DS instruction names; 0: unused. */
typedef struct isa_ds_use {
    uint8_t addr, data, data2, dst;
} isa_ds_use;

isa_ds_use isa_ds_fields(const isa_info *info);

/* Decodes the instruction that starts at word[0]; `left` dwords follow in
 * the text, this one included. */
void isa_decode(const uint32_t *word, size_t left, isa_row *row);

/* Why a word that does not decode cannot run, as one clause. */
const char *isa_unknown(uint32_t word);

/* madmk, madak: a VOP2 whose third source is always a literal, so it has no
 * VOP3, SDWA or DPP form. */
static inline bool isa_has_constant(unsigned op)
{
    return op == ISA_v_madmk_f32 || op == ISA_v_madak_f32 ||
           op == ISA_v_madmk_f16 || op == ISA_v_madak_f16;
}

/* What an s_waitcnt names if it does not wait for a counter. */
enum { ISA_VM_MAX = 63, ISA_EXP_MAX = 7, ISA_LGKM_MAX = 15 };

typedef struct isa_wait {
    unsigned vm, exp, lgkm;
} isa_wait;

static inline isa_wait isa_wait_counts(const isa_row *row)
{
    unsigned imm = (unsigned)row->offset;

    return (isa_wait){.vm = (imm & 15) | (imm >> 14 & 3) << 4,
                      .exp = imm >> 4 & 7,
                      .lgkm = imm >> 8 & 15};
}

/* True for v_cmpx, whose mask goes to EXEC as well. */
static inline bool isa_compares_exec(const isa_info *info)
{
    return info->type[0] == T_mask && info->name[5] == 'x';
}

/* True for stores to LDS and vector memory, atomics excluded. */
static inline bool isa_is_store(const isa_info *info)
{
    return info->access == M_STORE ||
           (info->access >= M_STORE_8 && info->access <= M_STORE_16_HI) ||
           info->access == M_WRITE2 || info->access == M_WRITE2ST64;
}

/* True for what reads and writes memory in one step. */
static inline bool isa_is_atomic(const isa_info *info)
{
    return info->access == M_ATOMIC ||
           (info->access >= M_XCHG2 && info->access <= M_CONSUME);
}

/* Registers an operand of this type takes. */
static inline unsigned isa_registers(unsigned type)
{
    return type == T_u64 || type == T_i64 || type == T_f64 || type == T_mask
               ? 2u
           : type == T_u128 ? 4u
                            : 1u;
}

#endif
