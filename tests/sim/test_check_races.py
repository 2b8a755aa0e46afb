"""Check level 2: races in LDS and between workgroups, barriers, elements.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from check_tools import BEGIN, findings

import hipsim

BARRIER = "s_waitcnt lgkmcnt(0)\ns_barrier\n"
# v3 the own dword of LDS, v4 that of the same lane in the next of two waves
NEIGHBOUR = "v_mov_b32 v3, v2\nv_xor_b32 v4, 0x100, v2\n"
WAVE = "v_readfirstlane_b32 s20, v0\ns_cmp_eq_u32 s20, 0\n"

LDS_RACES = {
    "read of what another wave writes": (
        "ds_write_b32 v3, v0\ns_waitcnt lgkmcnt(0)\nds_read_b32 v5, v4",
        "ds_write_b32 v3, v0\n" + BARRIER + "ds_read_b32 v5, v4",
    ),
    "write after a read": (
        "ds_write_b32 v3, v0\n" + BARRIER + "ds_read_b32 v5, v4\n"
        "s_waitcnt lgkmcnt(0)\nv_add_u32 v5, v0, 1\nds_write_b32 v3, v5",
        "ds_write_b32 v3, v0\n" + BARRIER + "ds_read_b32 v5, v4\n" + BARRIER
        + "v_add_u32 v5, v0, 1\nds_write_b32 v3, v5",
    ),
    "no wait before the barrier": (
        "ds_write_b32 v3, v0\ns_barrier\nds_read_b32 v5, v4",
        "ds_write_b32 v3, v0\n" + BARRIER + "ds_read_b32 v5, v4",
    ),
    "a read still under way after the barrier": (
        "ds_write_b32 v3, v0\n" + BARRIER + "ds_read_b32 v5, v4\ns_barrier\n"
        "v_add_u32 v6, v0, 1\nds_write_b32 v3, v6",
        "ds_write_b32 v3, v0\n" + BARRIER + "ds_read_b32 v5, v4\n" + BARRIER
        + "v_add_u32 v6, v0, 1\nds_write_b32 v3, v6",
    ),
    "an incomplete wait before the barrier": (
        "ds_write_b32 v3, v0\nds_write_b32 v3, v0 offset:1024\n"
        "s_waitcnt lgkmcnt(1)\ns_barrier\nds_read_b32 v5, v4 offset:1024",
        "ds_write_b32 v3, v0\nds_write_b32 v3, v0 offset:1024\n"
        "s_waitcnt lgkmcnt(1)\ns_barrier\nds_read_b32 v5, v4",
    ),
    "two waves write one dword": (
        "v_and_b32 v5, 0xff, v2\nds_write_b32 v5, v0",
        "ds_write_b32 v3, v0",
    ),
    "different values, one byte": (
        "v_lshrrev_b32 v5, 6, v0\nv_mov_b32 v6, 0\nds_write_b8 v6, v5",
        "v_lshrrev_b32 v5, 6, v0\nds_write_b8 v5, v0",
    ),
    "store by everybody of different or equal values": (
        "v_mov_b32 v6, 0\nds_write_b32 v6, v0",
        "v_mov_b32 v6, 0\nv_mov_b32 v5, 9\nds_write_b32 v6, v5",
    ),
    "plain read beside another wave's atomic": (
        "v_mov_b32 v6, 0\nv_mov_b32 v5, 1\n" + WAVE + "s_cbranch_scc0 .Lother\n"
        "ds_write_b32 v6, v6\n.Lother:\n" + BARRIER + "ds_add_u32 v6, v5\n"
        "ds_read_b32 v7, v6",
        "v_mov_b32 v6, 0\nv_mov_b32 v5, 1\n" + WAVE + "s_cbranch_scc0 .Lother\n"
        "ds_write_b32 v6, v6\n.Lother:\n" + BARRIER + "ds_add_u32 v6, v5\n" + BARRIER
        + "ds_read_b32 v7, v6",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LDS_RACES)
def test_two_waves_without_a_barrier_are_reported(name):
    report = findings(NEIGHBOUR + LDS_RACES[name][0], waves=2, lds=4096)
    assert "race in LDS" in report, report


@pytest.mark.parametrize("name", LDS_RACES)
def test_two_waves_with_a_barrier_are_not_reported(name):
    assert findings(NEIGHBOUR + LDS_RACES[name][1], waves=2, lds=4096) == ""


@pytest.mark.parametrize("seed", range(5))
def test_a_race_is_reported_in_every_order_of_the_waves(seed):
    before = hipsim.get_option("seed")
    hipsim.set_option("seed", seed)
    try:
        body = NEIGHBOUR + LDS_RACES["write after a read"][0]
        assert "race in LDS" in findings(body, waves=2, lds=4096)
    finally:
        hipsim.set_option("seed", before)


def test_report_of_a_race_shows_the_lds_around_it():
    body = NEIGHBOUR + LDS_RACES["read of what another wave writes"][0]
    report = findings(body, waves=2, lds=4096)
    assert "wave 1, lane 0" in report and "wave 0 read it at pc 0x" in report
    assert "=> LDS 0x0100" in report and "written by nobody, read by wave 0" in report


def test_one_wave_needs_no_barrier():
    body = "ds_write_b32 v2, v0\nds_read_b32 v5, v2 offset:4\nds_write_b32 v2, v0"
    assert findings(body, lds=4096) == ""


# v3 the byte offset of this workgroup's own 256 bytes
GROUP = "s_lshl_b32 s20, s6, 8\nv_add_u32 v3, s20, v2\nv_add_u32 v5, 1, v0\n"
GLOBAL_RACES = {
    "writes of one dword": (
        "v_add_u32 v5, s6, v0\ns_nop 4\nglobal_store_dword v2, v5, s[10:11]",
        "global_store_dword v3, v5, s[10:11]",
    ),
    "read of what another writes": (
        "global_store_dword v3, v5, s[10:11]\nglobal_load_dword v6, v2, s[10:11]",
        "global_store_dword v3, v5, s[10:11]\nglobal_load_dword v6, v3, s[10:11]",
    ),
    "write of what another reads": (
        "global_load_dword v6, v2, s[10:11]\nglobal_store_dword v3, v5, s[10:11]",
        "global_load_dword v6, v2, s[8:9]\nglobal_store_dword v3, v5, s[10:11]",
    ),
    "scalar load of it": (
        "global_store_dword v3, v5, s[10:11]\ns_load_dword s22, s[10:11], 0x0",
        "global_store_dword v3, v5, s[10:11]\ns_load_dword s22, s[8:9], 0x0",
    ),
    "atomics do not race": (
        "v_add_u32 v5, s6, v5\nglobal_store_dword v2, v5, s[10:11]\n"
        "global_atomic_add v2, v5, s[8:9]",
        "global_atomic_add v2, v5, s[10:11]",
    ),
    "halves of one dword": (
        "v_mov_b32 v7, 0\nv_mov_b32 v8, s6\nglobal_store_short v7, v8, s[10:11]",
        "v_mov_b32 v8, s6\nv_lshlrev_b32 v7, 1, v8\n"
        "global_store_short v7, v8, s[10:11]",
    ),
    "equal values": (
        "v_mov_b32 v5, s6\nglobal_store_dword v2, v5, s[10:11]",
        "v_mov_b32 v5, 7\nglobal_store_dword v2, v5, s[10:11]",
    ),
    "data handed over by an atomic": (
        "global_store_dword v3, v5, s[10:11]\ns_waitcnt vmcnt(0)\n"
        "global_load_dword v7, v2, s[10:11]",
        # Who draws the last of four tickets reads what the others have stored.
        "global_store_dword v3, v5, s[10:11]\ns_waitcnt vmcnt(0)\n"
        "s_mov_b64 exec, 1\nv_mov_b32 v8, 0\nv_mov_b32 v9, 1\n"
        "global_atomic_add v6, v8, v9, s[8:9] glc\ns_waitcnt vmcnt(0)\n"
        "v_readfirstlane_b32 s21, v6\ns_cmp_eq_u32 s21, 0x3020103\n"
        "s_cbranch_scc0 .Lend\ns_mov_b64 exec, -1\n"
        "global_load_dword v7, v2, s[10:11]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", GLOBAL_RACES)
def test_two_workgroups_that_touch_one_byte_are_reported(name, threads, option):
    option("threads", threads)
    report = findings(GROUP + GLOBAL_RACES[name][0], groups=4)
    assert "race between workgroups" in report, report


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", GLOBAL_RACES)
def test_workgroups_with_their_own_bytes_are_not_reported(name, threads, option):
    option("threads", threads)
    assert findings(GROUP + GLOBAL_RACES[name][1], groups=4) == ""


def test_no_two_workgroups_of_a_large_grid_are_taken_for_one():
    body = (
        "v_mov_b32 v7, 0\nv_mov_b32 v5, s6\ns_cmp_eq_u32 s6, 0\n"
        "s_cbranch_scc1 .Lwrite\ns_cmp_eq_u32 s6, 0xfffe\ns_cbranch_scc0 .Lend\n"
        ".Lwrite:\nglobal_store_dword v7, v5, s[10:11]\n"
    )
    buffers = [hipsim.Buffer(bytearray(b"\xff" * 64), "rw") for _ in range(2)]
    report = findings(body, groups=65536, buffers=buffers)
    assert "race between workgroups" in report


def test_a_store_of_what_is_there_counts_in_no_order():
    body = (
        "v_mov_b32 v7, 0\ns_cmp_eq_u32 s6, {}\ns_cbranch_scc1 .Lread\n"
        "global_store_dword v7, v7, s[10:11]\ns_endpgm\n"
        ".Lread:\nglobal_load_dword v6, v7, s[10:11]\n"
    )
    for reader in (0, 1):
        buffers = [hipsim.Buffer(bytearray(64), "rw") for _ in range(2)]
        assert findings(body.format(reader), groups=2, buffers=buffers) == ""


# ---- barriers --------------------------------------------------------------

BARRIERS = {
    "two barriers": (
        WAVE + "s_cbranch_scc1 .Lfirst\ns_barrier\ns_branch .Ljoin\n"
        ".Lfirst:\ns_nop 0\ns_barrier\n.Ljoin:\n",
        WAVE + "s_cbranch_scc1 .Lfirst\ns_nop 0\ns_branch .Ljoin\n"
        ".Lfirst:\ns_nop 0\n.Ljoin:\ns_barrier\n",
    ),
    "lanes switched off": (
        "s_mov_b64 exec, 0xff\ns_barrier\ns_mov_b64 exec, -1\nds_write_b32 v2, v0",
        "s_mov_b64 exec, 0xff\ns_barrier\nds_write_b32 v2, v0",
    ),
}


@pytest.mark.parametrize("name", BARRIERS)
def test_waves_or_lanes_that_miss_a_barrier_are_reported(name):
    report = findings(BARRIERS[name][0], waves=2, lds=4096)
    assert "barrier divergence" in report, report


@pytest.mark.parametrize("name", BARRIERS)
def test_a_barrier_for_all_is_not_reported(name):
    assert findings(BARRIERS[name][1], waves=2, lds=4096) == ""


def test_a_wave_that_ends_early_is_not_missed_at_the_barrier():
    body = WAVE + "s_cbranch_scc1 .Lend0\ns_barrier\n.Lend0:\n"
    assert findings(body, waves=3) == ""


def test_a_wave_that_waits_for_one_behind_the_barrier_is_an_endless_loop(option):
    option("budget", 20000)
    body = (
        "v_mov_b32 v6, 0\nv_mov_b32 v7, 0\n" + WAVE + "s_cbranch_scc1 .Lspin\n"
        "s_barrier\nv_mov_b32 v7, 1\nglobal_store_dword v6, v7, s[10:11]\ns_endpgm\n"
        ".Lspin:\nglobal_load_dword v8, v6, s[8:9] glc\ns_waitcnt vmcnt(0)\n"
        "v_readfirstlane_b32 s21, v8\ns_cmp_eq_u32 s21, 99\ns_cbranch_scc0 .Lspin\n"
    )
    report = findings(body, waves=2)
    assert "instruction budget used up" in report
    assert "1 of 2 waves wait at a barrier" in report


# ---- elements of tensors ---------------------------------------------------


class View(hipsim.Buffer):
    """Rows of `width` dwords, `pitch` dwords apart, of a wider array."""

    def __init__(self, rows: int, width: int, pitch: int) -> None:
        self.array = np.zeros(rows * pitch + 64, np.int32)
        super().__init__(self.array.view(np.uint8), "rw")
        self.shape = (rows, width, pitch)

    def tensor(self):
        tensor = super().tensor()
        rows, width, pitch = self.shape
        tensor.element_bytes, tensor.ndim = 4, 2
        tensor.size = (ctypes.c_int64 * 6)(rows, width)
        tensor.stride = (ctypes.c_int64 * 6)(pitch, 1)
        return tensor


ROWS = (
    "v_lshrrev_b32 v3, 3, v0\nv_and_b32 v4, 7, v0\nv_mul_u32_u24 v3, {pitch}, v3\n"
    + ("v_add_lshl_u32 v3, v3, v4, 2\n")
)
ELEMENTS = {
    "store": ("global_store_dword v3, v0, s[10:11]", 8),
    "load": ("global_load_dword v5, v3, s[10:11]", 8),
    "wide load": ("v_lshlrev_b32 v3, 6, v0\nv_min_u32 v3, 448, v3\n"
                  "global_load_dwordx4 v[4:7], v3, s[10:11] offset:16", 8),
    "scalar load": ("s_load_dword s20, s[10:11], 0x1c", 8),
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTS)
def test_an_access_between_the_elements_of_a_view_is_reported(name):
    body, width = ELEMENTS[name]
    views = [View(9, width - 1, 16) for _ in range(2)]
    report = findings(ROWS.format(pitch=16) + body, buffers=views)
    assert "access outside a tensor's elements" in report, report


@pytest.mark.parametrize("name", ELEMENTS)
def test_an_access_to_the_elements_of_a_view_is_not_reported(name):
    body, width = ELEMENTS[name]
    views = [View(8, width, 16) for _ in range(2)]
    assert findings(ROWS.format(pitch=16) + body, buffers=views) == ""


def test_the_gap_of_one_view_may_be_the_element_of_another():
    array = np.zeros(8 * 16 + 64, np.int32)

    class Half(View):
        def __init__(self, first: int) -> None:
            hipsim.Buffer.__init__(self, array.view(np.uint8), "rw", offset=4 * first)
            self.shape = (8, 8, 16)

    body = ROWS.format(pitch=16).replace("7, v0", "15, v0").replace("3, v0", "4, v0")
    body += "global_store_dword v3, v0, s[8:9]"
    assert findings(body, buffers=[Half(0), Half(8)]) == ""
    assert "tensor's elements" in findings(body, buffers=[Half(0), Half(0)])


def test_any_fault_shows_the_last_instructions():
    body = "v_mov_b32 v3, 0x20000\nds_read_b32 v4, v3"
    first, *trail = findings(body, lds=4096).splitlines()
    assert "LDS access out of range" in first
    assert [line.split(": ")[1] for line in trail[-2:]] == [
        "v_mov_b32_e32 v3, 0x20000",
        "ds_read_b32 v4, v3",
    ]


def test_begin_is_clean():
    assert BEGIN and findings("") == ""
