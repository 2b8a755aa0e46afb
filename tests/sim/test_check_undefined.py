"""Check level 2: values that were never written, where they matter.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import pytest
from check_tools import findings

OUT = "global_store_dword v2, {}, s[10:11]\n"

# The encoding has a field for a result register nevertheless, here v0.
TO_LDS = (
    "s_mov_b32 s12, s8\ns_mov_b32 s13, s9\ns_mov_b32 s14, 256\n"
    "s_mov_b32 s15, 0x20000\ns_mov_b32 m0, 0\nv_mov_b32 v0, v9\n"
    "buffer_load_dword v2, s[12:15], 0 offen lds\ns_waitcnt vmcnt(0)\n"
)

# s20 of which only the low half is defined; it is 0
HALF = "v_lshl_or_b32 v3, v9, 16, v0\nv_readfirstlane_b32 s20, v3\n"

REPORTED = {
    "sign of half an SGPR": HALF + "s_ashr_i32 s21, s20, 16\nv_mov_b32 v4, s21\n"
    + OUT.format("v4"),
    "undefined bit of an SGPR decides": HALF + "s_bitcmp1_b32 s20, 20\n"
    "s_cbranch_scc1 .Lend",
    "stored VGPR": OUT.format("v9"),
    "VGPR in a global address": "global_load_dword v3, v9, s[8:9]",
    "SGPR in a global address": "global_load_dword v3, v2, s[40:41]",
    "SGPR in a scalar address": "s_load_dword s20, s[40:41], 0x0",
    "LDS address": "ds_read_b32 v3, v9",
    "atomic data": "global_atomic_add v2, v9, s[8:9]",
    "compare value of an atomic": "v_mov_b32 v8, 0\n"
    "global_atomic_cmpswap v2, v[8:9], s[8:9]",
    "atomic on fresh LDS": "v_mov_b32 v4, 1\nds_add_u32 v2, v4",
    "branch on SCC": "s_cmp_eq_u32 s40, 0\ns_cbranch_scc1 .Lend",
    "branch on VCC": "v_cmp_eq_u32 vcc, 0, v9\ns_cbranch_vccz .Lend",
    "EXEC": "v_cmp_eq_u32 vcc, 0, v9\ns_and_saveexec_b64 s[20:21], vcc",
    "EXEC by v_cmpx": "v_cmpx_eq_u32 vcc, 0, v9",
    "jump": "s_setpc_b64 s[40:41]",
    "through a sum": "v_add_u32 v3, v0, v9\n" + OUT.format("v3"),
    "through a float operation": "v_mul_f32 v3, v0, v9\n" + OUT.format("v3"),
    "through an SGPR": "v_readfirstlane_b32 s20, v9\nv_mov_b32 v3, s20\n"
    + OUT.format("v3"),
    "through DPP": "v_mov_b32_dpp v3, v9 row_mirror row_mask:0xf\n" + OUT.format("v3"),
    "through a lane exchange": "ds_bpermute_b32 v3, v2, v9\ns_waitcnt lgkmcnt(0)\n"
    + OUT.format("v3"),
    "through LDS": "ds_write_b32 v2, v9\ns_waitcnt lgkmcnt(0)\nds_read_b32 v3, v2\n"
    "s_waitcnt lgkmcnt(0)\n" + OUT.format("v3"),
    "fresh LDS": "ds_read_b32 v3, v2\ns_waitcnt lgkmcnt(0)\n" + OUT.format("v3"),
    "through scratch": "buffer_store_dword v9, off, s[0:3], 0\n"
    "buffer_load_dword v3, off, s[0:3], 0\ns_waitcnt vmcnt(0)\n" + OUT.format("v3"),
    "half of a packed sum": "v_mov_b32 v3, 0\nv_pk_add_f16 v4, v3, v9 op_sel_hi:[1,0]\n"
    + OUT.format("v4"),
    "one lane": "v_mov_b32 v3, 0\nv_writelane_b32 v3, s40, 5\n" + OUT.format("v3"),
    "the other half of a d16 load": "ds_write_b32 v2, v0\ns_waitcnt lgkmcnt(0)\n"
    "ds_read_u16_d16 v3, v2\ns_waitcnt lgkmcnt(0)\n" + OUT.format("v3"),
    "sign of an undefined byte": "v_mov_b32 v3, 0\nv_lshlrev_b32 v4, 7, v9\n"
    "v_bfe_i32 v5, v4, 0, 8\n" + OUT.format("v5"),
    "half selected by condition": "v_mov_b32 v3, 0\nv_cmp_lt_u32 vcc, 7, v0\n"
    "v_cndmask_b32 v4, v9, v3, vcc\n" + OUT.format("v4"),
    "a register beside a load to LDS": TO_LDS + OUT.format("v0"),
    "data of a store that ends within the buffer": "s_mov_b32 s12, s8\n"
    "s_mov_b32 s13, s9\ns_mov_b32 s14, 8\ns_mov_b32 s15, 0x20000\nv_mov_b32 v4, 0\n"
    "buffer_store_dwordx4 v[4:7], v2, s[12:15], 0 offen",
    "last of four registers": "v_mov_b32 v7, 0\nv_mov_b32 v6, 0\nv_mov_b32 v3, 0\n"
    "v_mov_b32 v4, 0\nv_mov_b32 v5, 0\nv_mov_b32 v12, 0\n"
    "v_mqsad_u32_u8 v[20:23], v[4:5], v12, v[6:9]\n" + OUT.format("v20"),
    "lanes that another EXEC left out": "s_mov_b64 exec, 0xff\nv_mov_b32 v3, 0\n"
    "s_mov_b64 exec, -1\n" + OUT.format("v3"),
}  # fmt: skip

CLEAN = {
    "copied and never used": "v_mov_b32 v3, v9\nv_add_u32 v4, v3, v9",
    "masked away": "v_and_b32 v3, 0xff, v9\nv_lshrrev_b32 v3, 8, v3\n"
    + OUT.format("v3"),
    "ored with ones": "v_or_b32 v3, -1, v9\n" + OUT.format("v3"),
    "shifted out": "v_lshl_or_b32 v3, v9, 16, v0\nv_lshlrev_b32 v3, 16, v3\n"
    + OUT.format("v3"),
    "cleared by xor": "v_xor_b32 v9, v9, v9\n" + OUT.format("v9"),
    "difference of itself": "v_sub_u32 v9, v9, v9\n" + OUT.format("v9"),
    "the stored byte is defined": "v_lshlrev_b32 v3, 8, v9\n"
    "v_and_or_b32 v3, v0, 63, v3\n"
    "global_store_byte v2, v3, s[10:11]",
    "the stored half is defined": "s_mov_b32 s20, 0x05040100\n"
    "v_perm_b32 v3, v0, v9, s20\n"
    "global_store_short_d16_hi v2, v3, s[10:11]",
    "not selected": "v_cmp_le_u32 vcc, 0, v0\nv_mov_b32 v3, 0\n"
    "v_cndmask_b32 v4, v9, v3, vcc\n" + OUT.format("v4"),
    "inactive lanes": "s_mov_b64 exec, 0xff\nv_mov_b32 v3, 0\n" + OUT.format("v3"),
    "byte taken out by SDWA": "v_mov_b32 v3, 7\nv_mov_b32_sdwa v3, v9 dst_sel:BYTE_1 "
    "dst_unused:UNUSED_PRESERVE src0_sel:BYTE_0\nv_mov_b32_sdwa v4, v3 dst_sel:DWORD "
    "dst_unused:UNUSED_PAD src0_sel:BYTE_0\n" + OUT.format("v4"),
    "packed half by half": "v_mov_b32 v3, 0\ns_mov_b32 s20, 0x07060100\n"
    "v_perm_b32 v4, v9, v3, s20\n"
    "v_pk_add_f16 v5, v4, v3 op_sel_hi:[0,0]\n" + OUT.format("v5"),
    "spilled and reloaded": "buffer_store_dword v9, off, s[0:3], 0\n"
    "buffer_store_dword v0, off, s[0:3], 0 offset:4\n"
    "buffer_load_dword v3, off, s[0:3], 0 offset:4\ns_waitcnt vmcnt(0)\n"
    + OUT.format("v3"),
    "a set bit of VCC decides": "v_cmp_eq_u32 vcc, 0, v9\ns_mov_b32 vcc_hi, 1\n"
    "s_cbranch_vccz .Lend",
    "EXEC and inactive": "v_cmp_eq_u32 vcc, 0, v9\ns_mov_b64 s[20:21], 0\n"
    "s_and_b64 vcc, vcc, s[20:21]\ns_and_saveexec_b64 s[22:23], vcc",
    "a byte of LDS beside": "ds_write_b8 v2, v0\ns_waitcnt lgkmcnt(0)\n"
    "ds_read_u8 v3, v2\n"
    "s_waitcnt lgkmcnt(0)\n" + OUT.format("v3"),
    "rounded conversion": "v_cvt_f16_f32 v3, v0\nv_cvt_f16_f32 v4, v0\n"
    "v_pack_b32_f16 v5, v3, v4\n" + OUT.format("v5"),
    "half of an SGPR, extended": HALF + "s_sext_i32_i16 s21, s20\nv_mov_b32 v4, s21\n"
    + OUT.format("v4"),
    "bit of half an SGPR decides": HALF + "s_bitcmp1_b32 s20, 3\ns_cbranch_scc1 .Lend",
    "field of half an SGPR decides": HALF + "s_bfe_u32 s21, s20, 0x50003\n"
    "s_cbranch_scc1 .Lend",
    "signed field of half an SGPR": HALF + "s_bfe_i32 s21, s20, 0x50003\n"
    "v_mov_b32 v4, s21\n" + OUT.format("v4"),
    "half an SGPR, shifted and added": HALF + "s_lshl2_add_u32 s21, s20, 1\n"
    "s_and_b32 s21, s21, 0xff\nv_mov_b32 v4, s21\n" + OUT.format("v4"),
    "defined bits differ": HALF + "s_cmp_eq_u32 s20, 9\ns_cbranch_scc1 .Lend",
    "lane exchange within": "ds_bpermute_b32 v3, v2, v0\ns_waitcnt lgkmcnt(0)\n"
    + OUT.format("v3"),
    "results in four registers, two of which were defined": "v_mov_b32 v4, 0\n"
    "v_mov_b32 v5, 0\nv_mov_b32 v6, 0\nv_mov_b32 v7, 0\nv_mov_b32 v3, 0\n"
    "v_mov_b32 v20, 0\nv_mov_b32 v21, 0\n"
    "v_mqsad_u32_u8 v[20:23], v[4:5], v3, v[4:7]\n" + OUT.format("v23"),
    "two exchanges of one register": "v_mov_b32 v4, 0\n"
    "v_mov_b32 v5, 0\nds_write2_b32 v2, v4, v5 offset1:64\n"
    "ds_wrxchg2_rtn_b32 v[6:7], v2, v4, v4 offset1:64\ns_waitcnt lgkmcnt(0)\n"
    + OUT.format("v7"),
    "loaded straight to LDS": TO_LDS + "ds_read_b32 v3, v2\n"
    "s_waitcnt lgkmcnt(0)\n" + OUT.format("v3"),
    "buffer load beyond the end reads zero": "s_mov_b32 s12, s8\ns_mov_b32 s13, s9\n"
    "s_mov_b32 s14, 0\ns_mov_b32 s15, 0x20000\n"
    "buffer_load_dword v3, v2, s[12:15], 0 offen\n"
    "s_waitcnt vmcnt(0)\n" + OUT.format("v3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REPORTED)
def test_what_was_never_written_is_reported_where_it_matters(name):
    report = findings(REPORTED[name], lds=4096, private=16)
    assert "never written" in report, report


@pytest.mark.parametrize("name", CLEAN)
def test_undefined_bits_that_do_not_matter_are_not_reported(name):
    assert findings(CLEAN[name], lds=4096, private=16) == ""


def test_report_names_register_and_lane():
    body = "v_mov_b32 v3, 0\nv_writelane_b32 v3, s40, 5\n" + OUT.format("v3")
    report = findings(body)
    assert (
        "undefined value" in report
        and "v3 of lane 5, made of s40, which was never written" in report
    )
