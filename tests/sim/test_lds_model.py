"""The LDS model: banks, phases and ports against published figures.

The figures are ratios measured on an MI50 (gpu_shm_microbench, in units of 1/32 of the
16-way row for dwords) and the counter values that AMD publishes for its LDS examples.
An independent model in plain Python checks random addresses.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import random
import struct

import pytest
from profile_tools import aligned, bounds, profile

LANES = 64
BANKS = 32
ALL = (1 << 64) - 1

# Loads one LDS address per lane into v1, then does `text`.
BODY = """
    s_load_dwordx2 s[8:9], s[4:5], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v1, v1, s[8:9]
    s_waitcnt vmcnt(0)
    s_mov_b32 exec_lo, {low:#x}
    s_mov_b32 exec_hi, {high:#x}
    {text}
    s_waitcnt lgkmcnt(0)
    s_endpgm
"""

# (bytes per lane, lanes that share a bank) -> measured, in units of one clock
MI50 = {
    (4, 1): 2.14,
    (4, 2): 4.03,
    (4, 4): 8.03,
    (4, 8): 16.03,
    (4, 16): 32.00,
    (8, 1): 4.11,
    (8, 2): 7.68,
    (8, 4): 15.39,
    (8, 8): 30.92,
    (8, 16): 61.59,
    (16, 1): 8.22,
    (16, 2): 15.33,
    (16, 4): 30.65,
    (16, 8): 30.67,
    (16, 16): 30.64,
}
READ = {4: "ds_read_b32 v2, v1", 8: "ds_read_b64 v[2:3], v1"}
READ |= {12: "ds_read_b96 v[2:4], v1", 16: "ds_read_b128 v[2:5], v1"}
WRITE = {4: "ds_write_b32 v1, v2", 8: "ds_write_b64 v1, v[2:3]"}
WRITE |= {12: "ds_write_b96 v1, v[2:4]", 16: "ds_write_b128 v1, v[2:5]"}


@pytest.fixture(autouse=True)
def profiling(option):
    option("profile", 1)
    option("threads", 1)
    option("check", 0)


def lds(text: str, address: list[int], exec_mask: int = ALL) -> dict[str, int]:
    """Cycles and conflicts of one instruction with these LDS addresses in v1."""
    body = BODY.format(text=text, low=exec_mask & 0xFFFFFFFF, high=exec_mask >> 32)
    table = aligned(4 * LANES, "r", struct.pack(f"{LANES}I", *address))
    launch = profile(body, [table], lds=65536, vgprs=16)
    counters = launch["counters"]
    return {
        "cycles": counters["SQ_LDS_IDX_ACTIVE"],
        "conflicts": counters["SQ_LDS_BANK_CONFLICT"],
        "bound": bounds(launch)["LDS"],
    }


def lanes_on_one_bank(width: int, ways: int) -> list[int]:
    """Runs of `ways` lanes on the same banks, the next run on the next ones."""
    row = BANKS * 4
    slots = row // width
    return [
        (lane % ways) * row + (lane // ways % slots) * width + (lane // 32) * 0x8000
        for lane in range(LANES)
    ]


@pytest.mark.parametrize(("width", "ways"), MI50)
def test_reads_take_the_time_measured_on_an_mi50(width, ways):
    """15 rows of the published table, within 8 %."""
    cycles = lds(READ[width], lanes_on_one_bank(width, ways))["cycles"]

    assert cycles == pytest.approx(MI50[width, ways], rel=0.08)


@pytest.mark.parametrize("lanes", [1, 2, 3, 5, 16, 32])
def test_conflicts_are_counted_as_amd_publishes_them(lanes):
    """One dword read by a wave: 2 cycles, none a conflict; two lanes on one bank: 3
    and 1; linear from there. A conflict is a cycle beyond the least."""
    address = [4 * lane for lane in range(LANES)]
    for lane in range(1, lanes):
        address[lane] = 4 * BANKS * lane
    seen = lds(READ[4], address)

    assert (seen["cycles"], seen["conflicts"]) == (2 + lanes - 1, lanes - 1)


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("sharers", [2, 8, 64])
def test_lanes_with_one_address_share_it_but_save_nothing(width, sharers):
    """Measured: multicast takes as long as distinct addresses."""
    spread = lds(READ[width], [width * lane for lane in range(LANES)])
    shared = lds(READ[width], [width * (lane // sharers) for lane in range(LANES)])

    assert shared["cycles"] == spread["cycles"]
    assert shared["conflicts"] == spread["conflicts"] == 0


@pytest.mark.parametrize(
    ("text", "stride", "clocks"),
    [
        ("ds_write_b32 v1, v2", 4, 8),
        ("ds_write_b64 v1, v[2:3]", 8, 12),
        ("ds_write_b128 v1, v[2:5]", 16, 20),
        ("ds_write2_b32 v1, v2, v3 offset1:64", 4, 12),
        ("ds_write2_b64 v1, v[2:3], v[4:5] offset1:64", 8, 20),
        ("ds_read_b32 v2, v1", 4, 4),
        ("ds_read_b64 v[2:3], v1", 8, 8),
        ("ds_read_b128 v[2:5], v1", 16, 16),
        ("ds_read2_b32 v[2:3], v1 offset1:64", 4, 8),
        ("ds_read2_b64 v[2:5], v1 offset1:64", 8, 16),
        ("ds_add_u32 v1, v2", 4, 8),
        ("ds_add_u64 v1, v[2:3]", 8, 12),
        ("ds_bpermute_b32 v2, v1, v3", 4, 8),
        ("ds_swizzle_b32 v2, v3 offset:swizzle(BROADCAST,2,0)", 4, 4),
        ("ds_nop", 4, 0),
    ],
)
def test_a_pair_of_simds_has_one_port_each_way(text, stride, clocks):
    """Addresses and written data share one port, 64 bytes a clock; results return on
    the other: a dword store 8 clocks, 16 bytes 20."""
    assert lds(text, [stride * lane for lane in range(LANES)])["bound"] == clocks


# ---- the same from an independent model ------------------------------------


def lane_groups(width: int, write: bool) -> list[list[int]]:
    if width == 4:
        return [list(range(32)), list(range(32, 64))]
    if width == 8:
        return [list(range(i, i + 16)) for i in range(0, 64, 16)]
    if write:
        return [list(range(i, i + 8)) for i in range(0, 64, 8)]
    half = [[0, 20], [4, 16], [8, 28], [12, 24]]
    return [
        [base + first + i for first in pair for i in range(4)]
        for base in (0, 32)
        for pair in half
    ]


def expected(address: list[int], width: int, write: bool, exec_mask: int) -> int:
    total = 0
    for group in lane_groups(width, write):
        wanted: dict[int, set[int]] = {}
        for lane in group:
            for byte in range(address[lane], address[lane] + width):
                if exec_mask >> lane & 1:
                    wanted.setdefault(byte // 4 % BANKS, set()).add(byte // 4)
        total += max([1, *map(len, wanted.values())])
    return total


@pytest.mark.parametrize("width", READ)
@pytest.mark.parametrize("write", [False, True])
def test_random_addresses_cost_what_the_phase_rule_says(width, write):
    """A group costs the most distinct dwords in a bank; also unaligned, also with
    lanes switched off."""
    rng = random.Random(width + write)
    for trial in range(6):
        exec_mask = ALL if trial % 2 == 0 else rng.getrandbits(64)
        step = 1 if trial > 3 else width
        address = [rng.randrange(0, 65536 - 32, step) for _ in range(LANES)]
        seen = lds((WRITE if write else READ)[width], address, exec_mask)
        groups = lane_groups(width, write)

        assert seen["cycles"] == expected(address, width, write, exec_mask)
        assert seen["conflicts"] == seen["cycles"] - len(groups)


def test_atomics_on_one_dword_take_turns():
    assert lds("ds_add_u32 v1, v2", [0] * LANES)["cycles"] == LANES


def test_two_element_reads_are_two_passes():
    address = [8 * lane for lane in range(LANES)]

    assert lds("ds_read2_b64 v[2:5], v1 offset1:64", address)["cycles"] == 4 + 4
    assert lds("ds_read2_b32 v[2:3], v1 offset1:1", address)["cycles"] == 4 + 4
