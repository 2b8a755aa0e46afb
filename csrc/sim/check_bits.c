/* check_bits.c: which bits of a result are undefined, operation by operation.
 *
 * Bitwise instructions, shifts, selections and byte permutations are followed
 * bit by bit, with the values of the defined bits (0 & x is defined); sums
 * and products are undefined from the lowest undefined bit upwards; of
 * everything else one undefined bit makes the whole result undefined. That is
 * what compilers rely on when they pack, mask and shift values of which a part
 * was never written.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#include "check_bits.h"
#include "exec_integer.h"

static uint64_t all_bits(unsigned type)
{
    switch (type) {
    case T_f16:
    case T_u16:
    case T_i16:
    case T_hi16:
        return 0xffff;
    default:
        return isa_registers(type) == 2 ? UINT64_MAX : UINT32_MAX;
    }
}

/* All bits from the lowest undefined one upwards: carries. */
static uint64_t carried(uint64_t bad)
{
    return bad | (0 - bad);
}

uint64_t check_and_bits(partial a, partial b)
{
    return (a.bad | b.bad) & (a.value | a.bad) & (b.value | b.bad);
}

uint64_t check_or_bits(partial a, partial b)
{
    return (a.bad | b.bad) & (~a.value | a.bad) & (~b.value | b.bad);
}

static uint64_t arithmetic_shift(uint64_t bad, unsigned by, unsigned width)
{
    uint64_t sign = bad >> (width - 1) & 1;
    uint64_t fill = sign != 0 && by != 0 ? UINT64_MAX << (width - by) : 0;

    return bad >> by | fill;
}

/* Undefined bits of v_perm_b32: bytes of B, then of A, by four selectors. */
static uint64_t permuted(uint64_t a, uint64_t b, uint32_t select)
{
    uint64_t both = a << 32 | (b & UINT32_MAX), result = 0;

    for (unsigned i = 0; i < 4; i++) {
        unsigned from = select >> 8 * i & 0xff;
        uint64_t byte = 0;
        if (from < 8) {
            byte = both >> 8 * from & 0xff;
        } else if (from < 12) { /* sign of bytes 1, 3, 5, 7 */
            byte = (both >> (16 * (from - 8) + 15) & 1) != 0 ? 0xff : 0;
        }
        result |= byte << 8 * i;
    }
    return result;
}

uint64_t check_result_bits(unsigned op, partial a, partial b, partial c)
{
    const isa_info *info = &isa_ops[op];
    uint64_t every = all_bits(info->type[0]);
    uint64_t any = (a.bad | b.bad | c.bad) != 0 ? every : 0;
    partial both;

    switch (op) {
    case ISA_v_mov_b32:
    case ISA_v_not_b32:
    case ISA_s_mov_b32:
    case ISA_s_mov_b64:
    case ISA_s_not_b32:
    case ISA_s_not_b64:
        return a.bad;
    case ISA_v_bfrev_b32:
    case ISA_s_brev_b32:
        return reverse_bits(a.bad) >> 32;
    case ISA_s_brev_b64:
        return reverse_bits(a.bad);
    case ISA_v_and_b32:
    case ISA_s_and_b32:
    case ISA_s_and_b64:
    case ISA_s_nand_b32:
    case ISA_s_nand_b64:
        return check_and_bits(a, b);
    case ISA_v_or_b32:
    case ISA_s_or_b32:
    case ISA_s_or_b64:
    case ISA_s_nor_b32:
    case ISA_s_nor_b64:
        return check_or_bits(a, b);
    case ISA_s_andn2_b32:
    case ISA_s_andn2_b64:
        return check_and_bits(a, check_inverse(b));
    case ISA_s_orn2_b32:
    case ISA_s_orn2_b64:
        return check_or_bits(a, check_inverse(b));
    case ISA_v_xor_b32:
    case ISA_v_xnor_b32:
    case ISA_s_xor_b32:
    case ISA_s_xor_b64:
    case ISA_s_xnor_b32:
    case ISA_s_xnor_b64:
        return a.bad | b.bad;
    case ISA_v_and_or_b32:
        both = (partial){a.value & b.value, check_and_bits(a, b)};
        return check_or_bits(both, c);
    case ISA_v_or3_b32:
        both = (partial){a.value | b.value, check_or_bits(a, b)};
        return check_or_bits(both, c);
    case ISA_v_lshl_or_b32:
        both = (partial){a.value << (b.value & 31), a.bad << (b.value & 31)};
        return b.bad != 0 ? every : check_or_bits(both, c) & every;
    case ISA_v_bfi_b32:
        return a.bad | (a.value & b.bad) | (~a.value & c.bad & every);
    case ISA_v_bfe_u32:
    case ISA_v_bfe_i32:
        if ((b.bad | c.bad) != 0) {
            return every;
        }
        return (op == ISA_v_bfe_u32
                    ? bit_field(a.bad, b.value & 31, c.value & 31, 32)
                    : bit_field_signed(a.bad, b.value & 31, c.value & 31, 32)) &
               every;
    case ISA_s_bfe_u32:
        return b.bad != 0
                   ? every
                   : bit_field(a.bad, b.value & 31, b.value >> 16 & 127, 32);
    case ISA_s_bfe_i32:
        return b.bad != 0 ? every
                          : bit_field_signed(a.bad, b.value & 31,
                                             b.value >> 16 & 127, 32) &
                                every;
    case ISA_s_bfe_i64:
        return b.bad != 0 ? every
                          : bit_field_signed(a.bad, b.value & 63,
                                             b.value >> 16 & 127, 64);
    case ISA_s_sext_i32_i8:
        return bit_field_signed(a.bad, 0, 8, 32) & every;
    case ISA_s_sext_i32_i16:
        return bit_field_signed(a.bad, 0, 16, 32) & every;
    case ISA_s_bfe_u64:
        return b.bad != 0
                   ? every
                   : bit_field(a.bad, b.value & 63, b.value >> 16 & 127, 64);
    case ISA_v_lshlrev_b32:
    case ISA_v_lshlrev_b64:
        return a.bad != 0
                   ? every
                   : b.bad << (a.value & (every > UINT32_MAX ? 63 : 31)) &
                         every;
    case ISA_v_lshlrev_b16:
        return a.bad != 0 ? every : b.bad << (a.value & 15) & every;
    case ISA_v_lshrrev_b32:
    case ISA_v_lshrrev_b64:
        return a.bad != 0 ? every
                          : b.bad >> (a.value & (every > UINT32_MAX ? 63 : 31));
    case ISA_v_lshrrev_b16:
        return a.bad != 0 ? every : b.bad >> (a.value & 15);
    case ISA_v_ashrrev_i32:
        return a.bad != 0 ? every
                          : arithmetic_shift(b.bad, a.value & 31, 32) & every;
    case ISA_v_ashrrev_i64:
        return a.bad != 0 ? every : arithmetic_shift(b.bad, a.value & 63, 64);
    case ISA_s_lshl_b32:
    case ISA_s_lshl_b64:
        return b.bad != 0
                   ? every
                   : a.bad << (b.value & (every > UINT32_MAX ? 63 : 31)) &
                         every;
    case ISA_s_lshr_b32:
    case ISA_s_lshr_b64:
        return b.bad != 0 ? every
                          : a.bad >> (b.value & (every > UINT32_MAX ? 63 : 31));
    case ISA_s_ashr_i32:
        return b.bad != 0 ? every
                          : arithmetic_shift(a.bad, b.value & 31, 32) & every;
    case ISA_s_ashr_i64:
        return b.bad != 0 ? every : arithmetic_shift(a.bad, b.value & 63, 64);
    case ISA_s_lshl1_add_u32:
    case ISA_s_lshl2_add_u32:
    case ISA_s_lshl3_add_u32:
    case ISA_s_lshl4_add_u32:
        return carried(a.bad << (op - ISA_s_lshl1_add_u32 + 1) | b.bad) & every;
    case ISA_v_add_lshl_u32:
        return c.bad != 0 ? every
                          : carried(a.bad | b.bad) << (c.value & 31) & every;
    case ISA_v_alignbit_b32:
        return c.bad != 0 ? every
                          : (a.bad << 32 | b.bad) >> (c.value & 31) & every;
    case ISA_v_alignbyte_b32:
        return c.bad != 0 ? every
                          : (a.bad << 32 | b.bad) >> 8 * (c.value & 3) & every;
    case ISA_v_perm_b32:
        return c.bad != 0 ? every : permuted(a.bad, b.bad, (uint32_t)c.value);
    case ISA_v_cndmask_b32:
        return c.bad != 0 ? a.bad | b.bad | ((a.value ^ b.value) & every)
               : (c.value & 1) != 0 ? b.bad
                                    : a.bad;
    case ISA_v_pack_b32_f16:
    case ISA_s_pack_ll_b32_b16:
        return (a.bad & 0xffff) | (b.bad & 0xffff) << 16;
    case ISA_s_pack_lh_b32_b16:
        return (a.bad & 0xffff) | (b.bad & 0xffff0000);
    case ISA_s_pack_hh_b32_b16:
        return a.bad >> 16 | (b.bad & 0xffff0000);
    case ISA_v_cvt_pkrtz_f16_f32:
        return (a.bad != 0 ? 0xffffu : 0) | (b.bad != 0 ? 0xffff0000u : 0);
    case ISA_v_cvt_f32_ubyte0:
    case ISA_v_cvt_f32_ubyte1:
    case ISA_v_cvt_f32_ubyte2:
    case ISA_v_cvt_f32_ubyte3:
        return (a.bad >> 8 * (op - ISA_v_cvt_f32_ubyte0) & 0xff) != 0 ? every
                                                                      : 0;
    case ISA_v_lshl_add_u32:
        return b.bad != 0 ? every
                          : carried(a.bad << (b.value & 31) | c.bad) & every;
    case ISA_v_mad_u32_u24:
    case ISA_v_mad_i32_i24:
        return carried(((a.bad | b.bad) & 0xffffff) | c.bad) & every;
    case ISA_v_mul_u32_u24:
    case ISA_v_mul_i32_i24:
        return carried((a.bad | b.bad) & 0xffffff) & every;
    case ISA_v_add_u32:
    case ISA_v_sub_u32:
    case ISA_v_subrev_u32:
    case ISA_v_add_co_u32:
    case ISA_v_sub_co_u32:
    case ISA_v_subrev_co_u32:
    case ISA_v_add3_u32:
    case ISA_v_xad_u32:
    case ISA_v_mul_lo_u32:
    case ISA_v_mad_u64_u32:
    case ISA_v_add_u16:
    case ISA_v_sub_u16:
    case ISA_s_add_u32:
    case ISA_s_sub_u32:
    case ISA_s_add_i32:
    case ISA_s_sub_i32:
    case ISA_s_mul_i32:
        return carried(a.bad | b.bad | c.bad) & every;
    default:
        return any;
    }
}
