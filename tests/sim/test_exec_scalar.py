"""What the executor cannot do stops the launch with a report.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import re

import isa_tools
import pytest

import hipsim


@pytest.mark.parametrize(
    ("body", "report"),
    [
        ("s_trap 2", "trap"),
        ("s_trap 1", "trap"),
        ("s_set_gpr_idx_on 250, gpr_idx(SRC0)\n v_mov_b32 v0, v6", "VGPR beyond"),
        ("s_set_gpr_idx_on 250, gpr_idx(DST)\n v_mov_b32 v6, v0", "VGPR beyond"),
        ("s_set_gpr_idx_on 1, gpr_idx(SRC0)\n v_readlane_b32 s0, v6, s1",
         "not simulated"),
        ("s_cbranch_join s1", "instruction"),
        ("s_mov_b32 m0, 98\n s_movrels_b32 s0, s4", "M0 goes too far"),
        ("1: s_branch 1b", "budget"),
        ("s_mov_b32 s0, 0\n s_mov_b32 s1, 0\n s_setpc_b64 s[0:1]", "jump"),
        ("s_load_dword s0, s[4:5], 0x1", "align"),
        ("s_movk_i32 s0, 16\n s_mov_b32 s1, 0\n s_load_dword s2, s[0:1], 0x0",
         "s_load_dword s2, s[0:1], 0x0"),
        ("v_mov_b32 v2, 16\n v_mov_b32 v3, 0\n global_load_dword v1, v[2:3], off",
         "global_load_dword v1, v[2:3], off"),
        ("v_mov_b32 v2, 16\n ds_read_b32 v1, v2", "LDS"),
        ("s_getreg_b32 s0, hwreg(HW_REG_TBA_LO)", "hardware register"),
    ],
)  # fmt: skip
def test_what_cannot_run_stops_with_a_report(body: str, report: str, option) -> None:
    option("budget", 10000)
    image = isa_tools.assemble(f"    {body}\n    s_endpgm", pointers=1)
    with (
        hipsim.Module(image) as module,
        pytest.raises(hipsim.HipError, match=f"(?i){re.escape(report)}"),
    ):
        module.kernel("kernel").launch(
            (1, 1, 1), (64, 1, 1), [hipsim.Buffer(bytearray(64))]
        )
