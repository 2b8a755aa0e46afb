"""Runs many single vector instructions in one kernel and returns the bits.

Each case has its own input rows (A, B, C, old D; two dwords per lane), mask
in VCC and EXEC. Results are D, two dwords, and VCC afterwards.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Sequence

import isa_tools

import hipsim

LANES = 64
ALL = (1 << 64) - 1

PROLOGUE = """
    s_load_dwordx4 s[8:11], s[4:5], 0x0
    v_lshlrev_b32 v1, 5, v0
    v_lshlrev_b32 v6, 4, v0
    s_waitcnt lgkmcnt(0)
""" + isa_tools.lane_pointers("v1", "v6")
CASE = """
    global_load_dwordx4 v[8:11], v[2:3], off
    global_load_dwordx4 v[12:15], v[2:3], off offset:16
    s_waitcnt vmcnt(0)
    s_mov_b32 vcc_lo, {vcc_low:#x}
    s_mov_b32 vcc_hi, {vcc_high:#x}
    s_mov_b64 s[20:21], vcc
    s_mov_b32 exec_lo, {exec_low:#x}
    s_mov_b32 exec_hi, {exec_high:#x}
    {text}
    s_mov_b64 exec, -1
    v_mov_b32 v16, vcc_lo
    v_mov_b32 v17, vcc_hi
    global_store_dwordx4 v[4:5], v[14:17], off
    v_add_co_u32 v2, vcc, 0x800, v2
    v_addc_co_u32 v3, vcc, 0, v3, vcc
    v_add_co_u32 v4, vcc, 0x400, v4
    v_addc_co_u32 v5, vcc, 0, v5, vcc
"""


@dataclasses.dataclass
class Case:
    """One instruction: D is v14 (v[14:15]), A v8, B v10, C v12."""

    text: str
    rows: list[tuple[int, ...]]  # per lane: A, B, C, D as 64-bit numbers
    vcc: int = 0
    exec: int = ALL


@dataclasses.dataclass
class Outcome:
    d: list[int]  # 64-bit per lane
    vcc: int


def program(cases: Sequence[Case]) -> tuple[str, bytes]:
    """Assembly of a kernel that runs the cases, and its input rows."""
    text = PROLOGUE + "".join(
        CASE.format(
            text=case.text,
            vcc_low=case.vcc & 0xFFFFFFFF,
            vcc_high=case.vcc >> 32,
            exec_low=case.exec & 0xFFFFFFFF,
            exec_high=case.exec >> 32,
        )
        for case in cases
    )
    rows = (struct.pack("<4Q", *row) for case in cases for row in case.rows)
    return text + "    s_endpgm\n", b"".join(rows)


def run_cases(cases: Sequence[Case], **settings: int) -> list[Outcome]:
    """Executes all cases with both vector engines, which must agree."""
    text, rows = program(cases)
    image = isa_tools.assemble(text, **settings)
    source = bytearray(rows)
    results = []
    for cpu in (0, 1):
        before = hipsim.get_option("cpu")
        hipsim.set_option("cpu", cpu)
        target = bytearray(1024 * len(cases))
        try:
            with hipsim.Module(image) as module:
                module.kernel("kernel").launch(
                    (1, 1, 1),
                    (64, 1, 1),
                    [hipsim.Buffer(source, "r"), hipsim.Buffer(target, "rw")],
                )
        finally:
            hipsim.set_option("cpu", before)
        results.append(bytes(target))
    differ = [
        case.text
        for i, case in enumerate(cases)
        if results[0][1024 * i : 1024 * i + 1024]
        != results[1][1024 * i : 1024 * i + 1024]
    ]
    assert not differ, f"portable and vector code differ: {differ}"
    outcomes = []
    for i in range(len(cases)):
        words = struct.unpack_from("<256I", results[0], 1024 * i)
        outcomes.append(
            Outcome(
                [words[4 * n] | words[4 * n + 1] << 32 for n in range(LANES)],
                words[2] | words[3] << 32,
            )
        )
    return outcomes


SPECIAL = {
    "f16": (0, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E01, 0x7D00, 0x0001,
            0x83FF, 0x0400, 0x7BFF, 0x3800, 0x3801, 0x5140, 0x63FF),
    "f32": (0, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000,
            0x7FC00001, 0x7FA00000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF,
            0x3F000000, 0x40200000, 0x4F000000, 0x4F800000, 0xCF000000, 0x33800000,
            0x477FF000, 0xC3020000, 0x38800000, 0x387FC000, 0x33000001),
    "f64": (0, 1 << 63, 0x3FF0000000000000, 0xBFF0000000000000, 0x7FF0000000000000,
            0xFFF0000000000000, 0x7FF8000000000001, 0x7FF4000000000000, 1,
            0x800FFFFFFFFFFFFF, 0x0010000000000000, 0x7FEFFFFFFFFFFFFF,
            0x3FE0000000000000, 0x41E0000000000000, 0x41EFFFFFFFE00000),
    "int": (0, 1, 2, 0x10000, 15, 16, 31, 32, 63, 127, 128, 255, 0x7FFF, 0x8000, 0xFFFF,
            0x7FFFFF, 0x800000, 0xFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF,
            0x0C0B0A09, 0x07060504, 0x8000000000000000, 0x7FFFFFFFFFFFFFFF),
}  # fmt: skip


def random_value(rng: random.Random, kind: str) -> int:
    """Bits worth testing for an operand of this type, 64 of them."""
    high = rng.getrandbits(64) & ~0xFFFFFFFF
    if rng.random() < 0.35:
        value = rng.choice(SPECIAL[kind if kind in SPECIAL else "int"])
    elif kind == "f32" and rng.random() < 0.6:
        value = 0x3F800000 + rng.randrange(-(1 << 26), 1 << 26)
        value ^= rng.getrandbits(1) << 31
    elif kind == "f64" and rng.random() < 0.7:
        value = 0x3FF0000000000000 + rng.randrange(-(1 << 57), 1 << 57)
        value ^= rng.getrandbits(1) << 63
    elif kind not in SPECIAL and rng.random() < 0.3:
        value = rng.randrange(70)
    else:
        value = rng.getrandbits(64)
    if kind in ("f64", "u64", "i64"):
        return value
    if kind in ("f16", "u16", "i16"):
        return high | rng.getrandbits(16) << 16 | value & 0xFFFF
    return high | value & 0xFFFFFFFF


def random_rows(
    rng: random.Random, kinds: Sequence[str]
) -> list[tuple[int, int, int, int]]:
    """Input rows for sources of these types; the old D is random."""
    rows = []
    for _ in range(LANES):
        a, b, c = [random_value(rng, k) for k in (*kinds, "u32", "u32", "u32")[:3]]
        rows.append((a, b, c, rng.getrandbits(64)))
    return rows


def half_rows(rng: random.Random) -> list[tuple[int, ...]]:
    """Both halves of each source are interesting half floats."""

    def one() -> int:
        low, high = [random_value(rng, "f16") & 0xFFFF for _ in range(2)]
        return low | high << 16

    return [(one(), one(), one(), rng.getrandbits(64)) for _ in range(LANES)]


def random_exec(rng: random.Random) -> int:
    """Mostly full, sometimes one lane, else random."""
    return rng.choice((ALL, ALL, ALL, 1 << rng.randrange(64), rng.getrandbits(64)))


def check(
    cases: Sequence[Case], expected: Sequence[list[int]], **settings: int
) -> None:
    """Runs the cases and names the first differing lane of each."""
    wrong = []
    for case, want, got in zip(cases, expected, run_cases(cases, **settings)):
        for n in range(LANES):
            before = case.rows[n][3]
            model = want[n] if case.exec >> n & 1 else before
            if got.d[n] != model:
                wrong.append(
                    f"{case.text}: lane {n}, expected {model:#x}, got {got.d[n]:#x}"
                    " for A B C D = " + " ".join(f"{x:#x}" for x in case.rows[n])
                )
                break
    assert not wrong, "\n".join(wrong)
