"""Memory instructions at their edges: overlaps, bounds, bad addresses.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import re

import isa_numbers as m
import isa_tools
import pytest
from vector_runner import ALL, LANES, Case, run_cases

import hipsim

LOW = m.M32


def test_a_register_field_without_meaning_may_hold_anything() -> None:
    # global_store_byte v[2:3], v1 with result v255, global_load_ubyte v1, v[2:3]
    # with data v255. (LDS instructions with such fields do not decode.)
    image = isa_tools.assemble(
        """    s_load_dwordx2 s[0:1], s[4:5], 0x0
    v_add_u32 v1, 5, v0
    s_waitcnt lgkmcnt(0)
    v_add_co_u32 v2, vcc, s0, v0
    v_mov_b32 v3, s1
    v_addc_co_u32 v3, vcc, 0, v3, vcc
    .long 0xdc608000, 0xff7f0102
    s_waitcnt vmcnt(0)
    .long 0xdc408000, 0x017fff02
    s_waitcnt vmcnt(0)
    v_add_u32 v1, 1, v1
    global_store_byte v0, v1, s[0:1]
    s_endpgm""",
        pointers=1,
        vgprs=4,
        lds=64,
    )
    out = bytearray(LANES)
    with hipsim.Module(image) as module:
        module.kernel("kernel").launch((1, 1, 1), (64, 1, 1), [hipsim.Buffer(out)])
    assert list(out) == [lane + 6 for lane in range(LANES)]


def test_compare_swap_may_return_into_its_own_data() -> None:
    rows = [(n, n + 1, n if n % 2 else 99, 0) for n in range(LANES)]
    text = ("global_store_dword v[4:5], v12, off\n    v_mov_b32 v14, v10\n"
            "    v_mov_b32 v15, v8\n"
            "    global_atomic_cmpswap v14, v[4:5], v[14:15], off glc\n"
            "    global_load_dword v15, v[4:5], off")  # fmt: skip
    (got,) = run_cases([Case(text, rows)])
    for n, d in enumerate(got.d):
        old, new = (n, n + 1) if n % 2 else (99, 99)
        assert d == old | new << 32


def test_buffer_loads_past_the_records_read_zero() -> None:
    rows = [(n * 3 + 1, 0, 0, n << 8 | 7) for n in range(LANES)]
    describe = ("s_mov_b32 s24, s10\n    s_mov_b32 s25, s11\n"
                "    s_movk_i32 s26, 0x208\n"
                "    s_mov_b32 s27, 0x27000\n    ")  # fmt: skip
    cases = [
        Case("v_mov_b32 v14, v8\n    v_mov_b32 v15, v8", rows),
        Case(describe + "buffer_load_dwordx2 v[14:15], v6, s[24:27], 0 offen", rows),
        Case(describe + "s_mov_b32 s23, 4\n    buffer_load_dwordx2 v[14:15], v6,"
             " s[24:27], s23 offen", rows),
        Case(describe + "s_or_b32 s25, s25, 0x100000\n    s_mov_b32 s26, 8\n"
             "    buffer_load_dword v14, v0, s[24:27], 0 idxen", rows),
    ]  # fmt: skip
    got = run_cases(cases)
    for n, row in enumerate(rows):
        value = row[0]
        assert got[1].d[n] == (value | value << 32 if 16 * n + 8 <= 0x208 else 0)
        if 16 * n + 12 <= 0x208:  # second dword and what follows D
            assert got[2].d[n] & LOW == value
        elif 16 * n + 8 > 0x208:
            assert got[2].d[n] == 0
        assert got[3].d[n] & LOW == (value if n < 8 else 0)


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("global_atomic_add v[4:5], v8, off offset:2", "align"),
        ("ds_add_u32 v0, v8 offset:1", "align"),
        ("v_mov_b32 v18, 0x400\n    ds_write_b32 v18, v8", "ds_write_b32 v18, v8"),
        ("global_store_dword v[2:3], v8, off", "global_store_dword v[2:3], v8, off"),
        ("buffer_store_dword v8, off, s[0:3], 0 offset:64", "buffer_store_dword"),
    ],
)
def test_bad_addresses_stop_the_launch(text: str, report: str) -> None:
    case = Case(text, [(0, 0, 0, 0)] * LANES, exec=ALL)
    with pytest.raises(hipsim.HipError, match=f"(?i){re.escape(report)}"):
        run_cases([case], lds=1024, private=16)
