"""Check level 2: results used before a wait, and wait states.

Each rule has a kernel that breaks it and one that just keeps it.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import pytest
from check_tools import findings

LOAD = "global_load_dword v3, v2, s[8:9]\n"
STORE = "global_store_dword v2, v3, s[10:11]\n"
LDS = "v_mov_b32 v4, v2\nds_write_b32 v2, v4\ns_waitcnt lgkmcnt(0)\n"


def loads(count: int, first: int = 10) -> str:
    return "".join(
        f"global_load_dword v{first + i}, v2, s[8:9]\n" for i in range(count)
    )


def lds_reads(count: int, first: int = 10) -> str:
    return "".join(f"ds_read_b32 v{first + i}, v2\n" for i in range(count))


# name: (body that is reported, body that is not)
WAITS = {
    "global load": (
        LOAD + "v_mov_b32 v5, v3",
        LOAD + "s_waitcnt vmcnt(0)\nv_mov_b32 v5, v3",
    ),
    "store of a load": (LOAD + STORE, LOAD + "s_waitcnt vmcnt(0)\n" + STORE),
    "the wait of the other counter": (
        LOAD + "s_waitcnt lgkmcnt(0)\nv_mov_b32 v5, v3",
        LOAD + "s_waitcnt vmcnt(0) lgkmcnt(0)\nv_mov_b32 v5, v3",
    ),
    "overwriting": (
        LOAD + "v_mov_b32 v3, 0",
        LOAD + "s_waitcnt vmcnt(0)\nv_mov_b32 v3, 0",
    ),
    "second of two loads": (
        loads(2) + "s_waitcnt vmcnt(1)\nv_mov_b32 v5, v11",
        loads(2) + "s_waitcnt vmcnt(1)\nv_mov_b32 v5, v10",
    ),
    "stores count in vmcnt": (
        LOAD + "global_store_dword v2, v0, s[10:11]\ns_waitcnt vmcnt(2)\n"
        "v_mov_b32 v5, v3",
        LOAD + "global_store_dword v2, v0, s[10:11]\ns_waitcnt vmcnt(1)\n"
        "v_mov_b32 v5, v3",
    ),
    "returned in order into one register": (
        LDS + "global_load_dword v3, v2, s[8:9]\nds_read_b32 v3, v2",
        loads(1) + loads(1) + "s_waitcnt vmcnt(0)\nv_mov_b32 v5, v10",
    ),
    "LDS read": (
        LDS + "ds_read_b32 v3, v2\nv_mov_b32 v5, v3",
        LDS + "ds_read_b32 v3, v2\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v5, v3",
    ),
    "LDS reads return in order": (
        LDS + lds_reads(3) + "s_waitcnt lgkmcnt(1)\nv_mov_b32 v5, v12",
        LDS + lds_reads(3) + "s_waitcnt lgkmcnt(1)\nv_mov_b32 v5, v11",
    ),
    "scalar loads return in any order": (
        "s_load_dword s20, s[8:9], 0x0\ns_load_dword s21, s[8:9], 0x4\n"
        "s_waitcnt lgkmcnt(1)\ns_mov_b32 s22, s20",
        "s_load_dword s20, s[8:9], 0x0\ns_load_dword s21, s[8:9], 0x4\n"
        "s_waitcnt lgkmcnt(0)\ns_mov_b32 s22, s20",
    ),
    "LDS beside a scalar load": (
        LDS + "ds_read_b32 v3, v2\ns_load_dword s20, s[8:9], 0x0\n"
        "s_waitcnt lgkmcnt(1)\nv_mov_b32 v5, v3",
        LDS + "ds_read_b32 v3, v2\nds_read_b32 v4, v2\n"
        "s_load_dword s20, s[8:9], 0x0\ns_waitcnt lgkmcnt(1)\nv_mov_b32 v5, v3",
    ),
    "flat counts in both": (
        "v_mov_b32 v6, s8\nv_mov_b32 v7, s9\nflat_load_dword v3, v[6:7]\n"
        "s_waitcnt vmcnt(0)\nv_mov_b32 v5, v3",
        "v_mov_b32 v6, s8\nv_mov_b32 v7, s9\nflat_load_dword v3, v[6:7]\n"
        "s_waitcnt vmcnt(0)\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v5, v3",
    ),
    "a full lgkmcnt completes the oldest": (
        LDS + lds_reads(15) + "v_mov_b32 v5, v10",
        LDS + lds_reads(16) + "v_mov_b32 v5, v10",
    ),
    "all ones is no wait": (
        LDS + lds_reads(15) + "s_waitcnt lgkmcnt(15)\nv_mov_b32 v5, v10",
        LDS + lds_reads(15) + "s_waitcnt lgkmcnt(14)\nv_mov_b32 v5, v10",
    ),
    "a full vmcnt completes the oldest": (
        loads(63) + "v_mov_b32 v5, v10",
        loads(64) + "v_mov_b32 v5, v10",
    ),
    "returning atomic": (
        "v_mov_b32 v4, 1\nglobal_atomic_add v3, v2, v4, s[8:9] glc\nv_mov_b32 v5, v3",
        "v_mov_b32 v4, 1\nglobal_atomic_add v3, v2, v4, s[8:9] glc\n"
        "s_waitcnt vmcnt(0)\nv_mov_b32 v5, v3",
    ),
    "bpermute": (
        "ds_bpermute_b32 v3, v2, v0\nv_mov_b32 v5, v3",
        "ds_bpermute_b32 v3, v2, v0\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v5, v3",
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_result_used_before_its_wait_is_reported(name):
    report = findings(WAITS[name][0], lds=4096)
    assert "missing s_waitcnt" in report, report


@pytest.mark.parametrize("name", WAITS)
def test_a_result_used_after_its_wait_is_not_reported(name):
    assert findings(WAITS[name][1], lds=4096) == ""


def states(first: str, needed: int, second: str) -> tuple[str, str]:
    """The pair with one wait state too few, and with just enough."""
    nops = [f"s_nop {n - 1}\n" if n > 0 else "" for n in (needed - 1, needed)]
    return first + nops[0] + second, first + nops[1] + second


BUFFER = "s_mov_b32 s12, s8\ns_mov_b32 s13, s9\ns_mov_b32 s14, -1\n" + (
    "s_mov_b32 s15, 0x20000\n"
)
HAZARDS = {
    "DPP reads what VALU wrote": states(
        "v_mov_b32 v3, v2\n", 2, "v_mov_b32_dpp v4, v3 row_shr:1 row_mask:0xf"
    ),
    "DPP after VALU wrote EXEC": states(
        "v_mov_b32 v3, v2\ns_nop 4\nv_cmpx_ge_u32 vcc, v0, v0\n", 5,
        "v_mov_b32_dpp v4, v3 row_shr:1 row_mask:0xf",
    ),
    "vector memory reads an SGPR that VALU wrote": states(
        BUFFER + "v_readfirstlane_b32 s21, v0\n", 5,
        "buffer_load_dword v3, v2, s[12:15], s21 offen",
    ),
    "lane select that VALU wrote": states(
        "v_readfirstlane_b32 s20, v0\n", 4, "v_readlane_b32 s21, v2, s20"
    ),
    "v_writelane's lane select": states(
        "v_mov_b32 v4, 0\nv_readfirstlane_b32 s20, v0\n", 4,
        "v_writelane_b32 v4, 7, s20",
    ),
    "v_div_fmas reads VCC that VALU wrote": states(
        "v_cmp_eq_u32 vcc, v0, v2\n", 4, "v_div_fmas_f32 v3, v2, v2, v2"
    ),
    "s_sendmsg reads M0": states(
        "s_mov_b32 m0, 0\n", 1, "s_sendmsg sendmsg(MSG_INTERRUPT)"
    ),
    "a load to LDS reads M0": states(
        BUFFER + "s_mov_b32 m0, 0\n", 1, "buffer_load_dword v2, s[12:15], 0 offen lds"
    ),
    "s_movrels reads M0": states("s_mov_b32 m0, 0\n", 1, "s_movrels_b32 s20, s8"),
    "s_getreg after s_setreg": states(
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 0\n", 2,
        "s_getreg_b32 s20, hwreg(HW_REG_MODE)",
    ),
    "VALU overwrites the data of a wide store": states(
        "v_mov_b32 v4, 0\nv_mov_b32 v5, 0\nv_mov_b32 v6, 0\nv_mov_b32 v7, 0\n"
        "v_mov_b32 v8, 0\nglobal_store_dwordx4 v8, v[4:7], s[8:9]\n", 1,
        "v_mov_b32 v5, 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HAZARDS)
def test_one_wait_state_too_few_is_reported(name):
    report = findings(HAZARDS[name][0], lds=4096)
    assert "missing wait states" in report, report


@pytest.mark.parametrize("name", HAZARDS)
def test_just_enough_wait_states_are_not_reported(name):
    assert findings(HAZARDS[name][1], lds=4096) == ""


@pytest.mark.parametrize("count", [1, 8, 15])
def test_s_nop_counts_with_four_bits(count):
    move = "v_mov_b32_dpp v4, v3 row_shr:1 row_mask:0xf"
    assert findings(f"v_mov_b32 v3, v2\ns_nop {count}\n{move}") == ""


def test_lds_that_a_load_to_lds_has_not_delivered_is_reported():
    load = (
        BUFFER
        + "s_mov_b32 m0, 0\ns_nop 0\n"
        + ("buffer_load_dword v2, s[12:15], 0 offen lds\n")
    )
    read = "ds_read_b32 v5, v2"
    assert "may not have delivered" in findings(load + read, lds=4096)
    assert findings(load + "s_waitcnt vmcnt(0)\n" + read, lds=4096) == ""


def test_another_register_needs_no_wait_state():
    assert (
        findings(
            "v_mov_b32 v3, v2\ns_nop 1\nv_mov_b32 v5, v2\n"
            "v_mov_b32_dpp v4, v3 row_shr:1 row_mask:0xf"
        )
        == ""
    )


def test_report_names_register_loader_and_last_instructions():
    report = findings(LOAD + "v_add_u32 v4, v0, v0\nv_mov_b32 v5, v3")
    first, *trail = report.splitlines()
    assert "reads v[3:3], which the access at pc 0x10 may not have returned" in first
    assert "v_mov_b32_e32 v5, v3" in first
    assert [line.strip().split(": ")[1] for line in trail[-3:]] == [
        "global_load_dword v3, v2, s[8:9]",
        "v_add_u32_e32 v4, v0, v0",
        "v_mov_b32_e32 v5, v3",
    ]
    assert trail[-1].strip().startswith("->")
