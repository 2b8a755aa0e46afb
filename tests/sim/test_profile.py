"""Counters and caches of profiled launches, on kernels counted by hand.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import ctypes

import pytest
from profile_tools import PAGE, aligned, profile

import hipsim

LINE = 64
POINTERS = """
    s_load_dwordx4 s[8:11], s[4:5], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
"""


pytestmark = pytest.mark.usefixtures("profiling")


def counters(*args, **options) -> dict[str, int]:
    return profile(*args, **options)["counters"]


# ---- instruction counts ------------------------------------------------------


def test_each_kind_of_instruction_is_counted_once_per_wave():
    """Two workgroups of two waves, a loop of three turns."""
    seen = counters(
        POINTERS  # SMEM, VALU, -
        + """
        s_mov_b32 s12, 0
        v_mov_b32 v2, 0
        v_mov_b32 v3, 0
    loop:
        ds_write_b32 v1, v2
        s_add_u32 s12, s12, 1
        s_cmp_lt_u32 s12, 3
        s_cbranch_scc1 loop
        s_waitcnt lgkmcnt(0)
        s_barrier
        ds_read_b32 v2, v1
        global_load_dword v4, v1, s[8:9]
        global_store_dword v1, v4, s[10:11]
        global_atomic_add v1, v2, s[10:11]
        s_nop 0
        s_sendmsg sendmsg(MSG_INTERRUPT)
        s_waitcnt vmcnt(0)
        s_endpgm
        """,
        [aligned(1024), aligned(1024)],
        groups=2,
        block=128,
        lds=512,
        vgprs=8,
    )
    per_wave = {
        "SQ_WAVES": 1,
        "SQ_INSTS_SMEM": 1,
        "SQ_INSTS_VALU": 3,
        "SQ_INSTS_SALU": 1 + 3 * 2,
        "SQ_INSTS_LDS": 3 + 1,
        "SQ_INSTS_VMEM_RD": 1,
        "SQ_INSTS_VMEM_WR": 2,
        "SQ_INSTS_FLAT": 0,
        "SQ_INSTS_FLAT_LDS_ONLY": 0,
        "SQ_INSTS_GDS": 0,
        "SQ_INSTS_BRANCH": 3,
        "SQ_INSTS_SENDMSG": 2,
        "SQ_ACTIVE_INST_VALU": 3,
        "SQ_INST_CYCLES_SALU": 7,
        "SQ_THREAD_CYCLES_VALU": 3 * 64,
        "TA_FLAT_READ_WAVEFRONTS": 1,
        "TA_FLAT_WRITE_WAVEFRONTS": 2,
    }
    assert {k: seen[k] for k in per_wave} == {k: 4 * v for k, v in per_wave.items()}


FLAT = (
    POINTERS
    + """
    s_mov_b64 s[12:13], src_shared_base
    v_mov_b32 v2, v1
    v_mov_b32 v3, s13
    s_mov_b64 exec, {mask}
    v_mov_b32 v3, s9
    v_add_co_u32 v2, vcc, s8, v1
    s_mov_b64 exec, -1
    flat_load_dword v4, v[2:3]
    flat_store_dword v[2:3], v4
    s_waitcnt vmcnt(0) lgkmcnt(0)
    s_endpgm
    """
)


@pytest.mark.parametrize("mask", [0, 0xFF])
def test_flat_instructions_count_where_their_lanes_go(mask):
    """Lanes in `mask` go to global memory, the others to the LDS."""
    only = int(mask == 0)
    text = FLAT.format(mask=mask)
    seen = counters(text, [aligned(PAGE), aligned(PAGE)], lds=256, vgprs=8)

    assert seen["SQ_INSTS_FLAT"] == 2
    assert seen["SQ_INSTS_FLAT_LDS_ONLY"] == 2 * only
    assert seen["SQ_INSTS_LDS"] == 2 * only
    assert seen["SQ_INSTS_VMEM_RD"] == seen["SQ_INSTS_VMEM_WR"] == 1 - only
    assert seen["TA_FLAT_READ_WAVEFRONTS"] == 1 - only


@pytest.mark.parametrize("lanes", [0, 1, 17, 32, 64])
def test_thread_cycles_are_those_of_active_lanes(lanes):
    mask = (1 << lanes) - 1
    launch = profile(
        f"""
        s_mov_b32 exec_lo, {mask & 0xFFFFFFFF:#x}
        s_mov_b32 exec_hi, {mask >> 32:#x}
        v_mov_b32 v1, 0
        v_exp_f32 v1, v1
        s_endpgm
        """,
        vgprs=4,
    )
    seen = launch["counters"]

    assert seen["SQ_ACTIVE_INST_VALU"] == 1 + 4
    assert seen["SQ_THREAD_CYCLES_VALU"] == (1 + 4) * lanes
    assert launch["derived"]["VALUUtilization"] == pytest.approx(100 * lanes / 64)
    assert [row["lanes"] for row in launch["instructions"][2:]] == [lanes] * 3


@pytest.mark.parametrize(
    ("text", "clocks"),
    [
        ("v_add_f32 v1, v1, v1", 4),
        ("v_fma_f32 v1, v1, v1, v1", 4),
        ("v_dot2_f32_f16 v1, v1, v1, v1", 4),
        ("v_pk_fma_f16 v1, v1, v1, v1", 4),
        ("v_perm_b32 v1, v1, v1, v1", 4),
        ("v_cmp_lt_f32 vcc, v1, v2", 4),
        ("v_mov_b32_dpp v1, v2 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", 4),
        ("v_mul_u32_u24 v1, v1, v2", 4),
        ("v_cvt_f32_f16 v1, v1", 4),
        ("v_exp_f32 v1, v1", 16),
        ("v_exp_f16 v1, v1", 16),
        ("v_log_f32 v1, v1", 16),
        ("v_rcp_iflag_f32 v1, v1", 16),
        ("v_rsq_f32 v1, v1", 16),
        ("v_sqrt_f32 v1, v1", 16),
        ("v_sin_f32 v1, v1", 16),
        ("v_mul_lo_u32 v1, v1, v2", 16),
        ("v_mul_hi_i32 v1, v1, v2", 16),
        ("v_mad_u64_u32 v[2:3], vcc, v1, v2, v[2:3]", 16),
        ("v_div_scale_f32 v1, vcc, v1, v2, v1", 16),
        ("v_div_fixup_f32 v1, v1, v2, v1", 16),
        ("v_add_f64 v[2:3], v[2:3], v[2:3]", 8),
        ("v_fma_f64 v[2:3], v[2:3], v[2:3], v[2:3]", 8),
        ("v_cmp_lt_f64 vcc, v[2:3], v[4:5]", 8),
        ("v_rcp_f64 v[2:3], v[2:3]", 32),
        ("v_lshlrev_b64 v[2:3], v1, v[2:3]", 8),
    ],
)
def test_vector_instructions_cost_what_the_table_says(text, clocks):
    """SQ_ACTIVE_INST_VALU counts quad-cycles."""
    seen = counters(f"{text}\n s_endpgm", vgprs=8)

    assert seen["SQ_ACTIVE_INST_VALU"] == clocks / 4


def test_flops_are_those_of_active_lanes():
    launch = profile(
        """
        s_mov_b32 exec_hi, 0
        v_dot2_f32_f16 v1, v1, v1, v1
        v_pk_fma_f16 v1, v1, v1, v1
        v_fma_f32 v1, v1, v1, v1
        v_add_f32 v1, v1, v1
        v_max_f32 v1, v1, v1
        v_add_u32 v1, v1, v1
        s_endpgm
        """,
        vgprs=4,
    )
    assert launch["flops"] == 32 * (4 + 4 + 2 + 1)


def test_instructions_units_and_rows_add_up():
    launch = profile(
        """
        v_mov_b32 v3, 0
        s_mov_b32 s7, 5
    top:
        v_exp_f32 v1, v1
        ds_write_b32 v3, v2
        s_sub_u32 s7, s7, 1
        s_cmp_lg_u32 s7, 0
        s_cbranch_scc1 top
        s_barrier
        s_endpgm
        """,
        groups=3,
        block=128,
        lds=64,
        vgprs=4,
    )
    total = 3 * 2 * (2 + 5 * 5 + 2)

    assert launch["wave_instructions"] == total
    assert sum(launch["units"].values()) == total
    assert sum(row["count"] for row in launch["instructions"]) == total


# ---- caches --------------------------------------------------------------------


def load(extra: str = "", offset: int = 0) -> str:
    return f"global_load_dword v2, v1, s[8:9] offset:{offset} {extra}\n"


def test_a_line_is_read_from_l2_once_per_compute_unit():
    body = POINTERS + 4 * load() + "s_waitcnt vmcnt(0)\n s_endpgm"
    seen = counters(body, [aligned(PAGE), aligned(64)], vgprs=4)

    assert seen["TCP_TOTAL_CACHE_ACCESSES"] == 4 * 4
    assert seen["TCP_TCC_READ_REQ"] == 4


def test_loads_with_glc_go_past_l1():
    body = POINTERS + load() + 3 * load("glc") + "s_endpgm"
    seen = counters(body, [aligned(PAGE), aligned(64)], vgprs=4)

    assert seen["TCP_TCC_READ_REQ"] == 4 * 4


@pytest.mark.parametrize(("lines", "again"), [(256, 0), (256 + 64, 256 + 64)])
def test_l1_holds_16_kilobytes(lines, again):
    """Read twice: a set of four ways keeps four lines, of five in turn none."""
    step = f"global_load_dword v2, v1, s[8:9]\n v_add_u32 v1, {64 * LINE}, v1\n"
    body = f"""
        {POINTERS}
        s_mov_b32 s12, 0
    again:
        v_lshlrev_b32 v1, 6, v0
        {lines // 64 * step}
        s_add_u32 s12, s12, 1
        s_cmp_lt_u32 s12, 2
        s_cbranch_scc1 again
        s_endpgm
    """
    seen = counters(body, [aligned(lines * LINE), aligned(64)], vgprs=4)

    assert seen["TCP_TCC_READ_REQ"] == lines + again


def test_compute_units_share_l2():
    """Sixty-one workgroups read one line each: the same one, on sixty units."""
    body = POINTERS + "v_mov_b32 v1, 0\n" + load() + "s_endpgm"
    seen = counters(body, [aligned(PAGE), aligned(64)], groups=61, vgprs=4)

    assert seen["TCP_TOTAL_CACHE_ACCESSES"] == 61
    assert seen["TCP_TCC_READ_REQ"] == 60
    # Beside it the kernel arguments: one line per 20 scalar caches.
    assert (seen["SQC_DCACHE_HITS"], seen["SQC_DCACHE_MISSES"]) == (41, 20)
    assert (seen["TCC_HIT"], seen["TCC_MISS"]) == (59 + 19, 1 + 1)


COPY = (
    POINTERS
    + """
    s_lshl_b32 s6, s6, 12
    v_lshlrev_b32 v1, 4, v0
    v_add_u32 v1, s6, v1
    global_load_dwordx4 v[4:7], v1, s[8:9]
    s_waitcnt vmcnt(0)
    global_store_dwordx4 v1, v[4:7], s[10:11]
    s_endpgm
    """
)


@pytest.mark.parametrize("groups", [1, 7, 300])
def test_a_copy_moves_its_bytes_once_each_way(groups):
    """FETCH_SIZE and WRITE_SIZE are in KB; the arguments are one line more."""
    size = 4096 * groups
    launch = profile(
        COPY, [aligned(size), aligned(size)], groups=groups, block=256, vgprs=8
    )
    derived, seen = launch["derived"], launch["counters"]

    assert derived["FETCH_SIZE"] * 1024 == size + LINE
    assert derived["WRITE_SIZE"] * 1024 == size
    assert launch["hbm_bytes"] == 2 * size + LINE
    assert seen["TCC_EA_WRREQ"] + seen["TCC_EA1_WRREQ"] == size / LINE
    assert seen["TCC_EA_WRREQ_64B"] + seen["TCC_EA1_WRREQ_64B"] == size / LINE


def test_buffers_that_begin_inside_a_line_take_one_line_more():
    """So host buffers that are not aligned make identical launches differ."""
    fetched = []
    for shift in (0, 16):
        memory = bytearray(3 * PAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PAGE
        source = hipsim.Buffer(memory, "r", offset=start + shift, size=PAGE)
        launch = profile(COPY, [source, aligned(PAGE)], block=256, vgprs=8)
        fetched.append(launch["derived"]["FETCH_SIZE"] * 1024)
    assert fetched == [PAGE + LINE, PAGE + 2 * LINE]


@pytest.mark.parametrize(
    ("stride", "requests", "fetched"), [(4, 4, 0), (8, 16, 0), (64, 64, 0)]
)
def test_partly_written_lines_leave_as_halves(stride, requests, fetched):
    """A dword per lane, `stride` bytes apart. Nothing is read to fill a line."""
    body = (
        POINTERS
        + f"v_mul_u32_u24 v1, {stride}, v0\n"
        + "global_store_dword v1, v0, s[8:9]\n s_endpgm"
    )
    launch = profile(body, [aligned(PAGE), aligned(64)], vgprs=4)
    seen = launch["counters"]

    assert seen["TCC_EA_WRREQ"] + seen["TCC_EA1_WRREQ"] == requests
    assert launch["derived"]["WRITE_SIZE"] * 1024 == (
        4 * LINE if stride == 4 else 32 * requests
    )
    assert launch["derived"]["FETCH_SIZE"] * 1024 == LINE + fetched


def test_private_memory_goes_through_the_caches_dword_by_dword():
    """Two dwords of every lane of four waves, each dword four lines."""
    launch = profile(
        """
        buffer_store_dwordx2 v[1:2], off, s[0:3], s7
        s_waitcnt vmcnt(0)
        buffer_load_dwordx2 v[1:2], off, s[0:3], s7
        buffer_load_dwordx2 v[1:2], off, s[0:3], s7
        s_endpgm
        """,
        groups=2,
        block=128,
        private=8,
        vgprs=4,
    )
    seen = launch["counters"]

    assert seen["TCP_TOTAL_CACHE_ACCESSES"] == 3 * 4 * 2 * 4
    assert seen["TCP_TCC_WRITE_REQ"] == seen["TCP_TCC_READ_REQ"] == 4 * 2 * 4
    assert (seen["TCC_HIT"], seen["TCC_MISS"]) == (32, 32)
    assert launch["derived"]["FETCH_SIZE"] == 0
    assert launch["derived"]["WRITE_SIZE"] * 1024 == 4 * 64 * 8


@pytest.mark.parametrize(
    ("text", "clocks"),
    [
        ("global_load_dword v2, v1, s[8:9]", 4),
        ("global_load_ubyte v2, v0, s[8:9]", 4),
        ("global_load_dword v2, v3, s[8:9]", 16),
        ("global_load_dwordx2 v[2:3], v3, s[8:9]", 16),
        ("global_load_dwordx4 v[4:7], v3, s[8:9]", 16),
        ("global_load_dword v2, v1, s[8:9] offset:1", 32),
        ("global_store_dword v1, v2, s[8:9]", 16),
        ("global_atomic_add v1, v2, s[8:9]", 16),
        ("global_atomic_add_x2 v3, v[4:5], s[8:9]", 32),
    ],
)
def test_the_address_unit_is_fast_for_linear_dwords_alone(text, clocks):
    body = POINTERS + f"v_lshlrev_b32 v3, 4, v0\n {text}\n s_endpgm"

    assert counters(body, [aligned(PAGE), aligned(64)], vgprs=8)["TA_TA_BUSY"] == clocks
