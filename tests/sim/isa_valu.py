"""What is the same for all vector instructions: operands, modifiers, write-back.

A Form is one instruction as written, a Case that with its input rows; expect()
computes the case's outputs lane by lane with the functions of isa_model.py.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import isa_numbers as n
import isa_tools
from isa_ops import FLOATS, OPS, USUAL_MODE, Env, Op

LANES = 64
ALL = n.M64
SELECTS = {"BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8),
           "WORD_0": (0, 16), "WORD_1": (16, 16), "DWORD": (0, 32)}  # fmt: skip
# What the scalar registers hold before each case.
SCALARS = 0x3F9D70A4_C1234567  # s[24:25]
UNTOUCHED = 0x5A5A5A5A_A5A5A5A5  # s[22:23]


@dataclasses.dataclass
class Source:
    """A column of the row (A, B, C, D: 0 to 3) or a constant of 64 bits."""

    text: str
    column: int = -1
    value: int = 0


@dataclasses.dataclass
class Dpp:
    control: str
    rows: int = 15
    banks: int = 15
    bound: bool = False


@dataclasses.dataclass
class Form:
    """One instruction with its modifiers, a bit or entry per source."""

    name: str
    encoding: str  # e32, e64, sdwa, dpp, p
    sources: Sequence[Source]
    neg: Sequence[int] = (0, 0, 0)
    abs: Sequence[int] = (0, 0, 0)
    omod: int = 0
    clamp: bool = False
    op_sel: Sequence[int] = (0, 0, 0, 0)  # the last for D
    op_sel_hi: Sequence[int] = (1, 1, 1)
    neg_hi: Sequence[int] = (0, 0, 0)
    select: Sequence[str] = ()  # SDWA: D (none for compares) and the sources
    sext: Sequence[int] = (0, 0)
    unused: str = "UNUSED_PAD"
    dpp: Dpp | None = None
    to_scalar: bool = False  # the mask goes to s[22:23], not to VCC

    @property
    def op(self) -> Op:
        return OPS[self.name]


@dataclasses.dataclass
class Case:
    text: str
    form: Form
    rows: list[tuple[int, ...]]  # per lane A, B, C, D
    vcc: int = 0
    exec: int = ALL
    mode: int = USUAL_MODE


@dataclasses.dataclass
class Outcome:
    """Afterwards; scalar is s[22:23]."""

    d: list[int]
    vcc: int
    exec: int
    scalar: int


def width(kind: str) -> int:
    return {"pk": 32, "pkf": 32, "raw": 32, "mix": 32, "mask": 1}.get(kind) or int(
        kind[1:]
    )


# ---- operands --------------------------------------------------------------


def packed_source(form: Form, i: int, raw: int, kind: str) -> int:
    """Two halves as op_sel says; float ones take neg_lo and neg_hi."""
    low = raw >> 16 * form.op_sel[i] & 0xFFFF
    high = raw >> 16 * form.op_sel_hi[i] & 0xFFFF
    if kind == "pkf":
        low, high = low ^ form.neg[i] << 15, high ^ form.neg_hi[i] << 15
    return low | high << 16


def take(form: Form, i: int, raw: int, e: Env, half: int = 0) -> int:
    """Source i's bits as the instruction computes with them, i kinds signed."""
    op, kind = form.op, form.op.types[1 + i]
    if kind == "mask":
        return raw
    if form.encoding == "sdwa" and i < 2:
        shift, bits = SELECTS[form.select[-2 + i if len(op.types) > 2 else -1]]
        raw = raw >> shift & ((1 << bits) - 1)
        raw = n.sx(raw, bits) & n.M32 if form.sext[i] else raw
    if kind in ("pk", "pkf"):
        return packed_source(form, i, raw & n.M32, kind)
    if kind == "raw":
        return raw & n.M32
    neg, magnitude = form.neg[i], form.abs[i]
    bits = width(kind)
    if kind == "mix":
        kind = "f32"
        if form.op_sel_hi[i]:
            raw = widened_half(raw >> 16 * form.op_sel[i] & 0xFFFF)
    elif "packed" in op.flags:
        high = form.op_sel_hi[i] if half else form.op_sel[i]
        raw, neg = raw >> 16 * high, form.neg_hi[i] if half else neg
    elif bits == 16 and form.encoding != "sdwa":
        raw >>= 16 * form.op_sel[i]
    raw &= (1 << bits) - 1
    if kind in FLOATS or "signed" in op.flags:
        raw = raw & (1 << bits - 1) - 1 if magnitude else raw
        raw ^= neg << bits - 1
    if kind in FLOATS and not e.keeps(kind, False):
        raw = n.flush(raw, kind)
    return n.sx(raw, bits) if kind[0] == "i" else raw


def widened_half(half: int) -> int:
    """As float; a signalling NaN stays one until the sum."""
    wide = n.convert(half, "f16", "f32")
    return wide & ~0x400000 if n.is_signalling(half, "f16") else wide


# ---- results ---------------------------------------------------------------


def finish(form: Form, result: int, e: Env) -> int:
    """omod, clamp and flushing of a float result."""
    kind = form.op.types[0]
    if kind not in FLOATS:
        return result
    heeded = not e.ieee and not e.keeps(kind, True)
    if form.omod and heeded:
        result = n.scale(result, kind, (0, 1, 2, -1)[form.omod])
    if form.clamp:
        x = n.to_float(result, kind)
        if x != x:
            result = 0 if e.mode >> 8 & 1 else result
        elif x <= 0:
            result = 0
        elif x > 1:
            result = n.ONE[kind]
    return result if e.keeps(kind, True) else n.flush(result, kind)


def place(form: Form, result: int, old: int) -> int:
    """The 64 bits of D's two registers, of which `old` is what they held."""
    op = form.op
    bits = width(op.types[0])
    result &= (1 << bits) - 1
    if bits == 64:
        return result
    above = old & ~n.M32
    if form.encoding == "sdwa":
        shift, bits = SELECTS[form.select[0]]
        result &= (1 << bits) - 1
        field = (1 << bits) - 1 << shift
        rest = 0
        if form.unused == "UNUSED_PRESERVE":
            rest = old & n.M32 & ~field
        elif form.unused == "UNUSED_SEXT" and result >> bits - 1:
            rest = n.M32 << shift + bits & n.M32
        return above | result << shift | rest
    if bits == 16 and {"half", "low", "high"} & op.flags:
        high = "high" in op.flags or form.op_sel[len(op.types) - 1]
        high = high if "low" not in op.flags else 0
        other = old & (0xFFFF if high else 0xFFFF0000)
        return above | other | result << (16 if high else 0)
    return above | result


# ---- lanes -----------------------------------------------------------------


def dpp_lane(control: str, lane: int) -> int | None:
    """Which lane a DPP control reads, in the manual's words."""
    name, _, number = control.partition(":")
    row, at = lane // 16 * 16, lane % 16
    if name == "quad_perm":
        return lane // 4 * 4 + int(number[1:-1].split(",")[lane % 4])
    count = int(number) if number else 0
    if name == "row_shl":
        return lane + count if at + count < 16 else None
    if name == "row_shr":
        return lane - count if at >= count else None
    if name == "row_ror":
        return row + (at - count) % 16
    if name == "wave_shl":
        return lane + 1 if lane < 63 else None
    if name == "wave_shr":
        return lane - 1 if lane > 0 else None
    if name == "wave_rol":
        return (lane + 1) % 64
    if name == "wave_ror":
        return (lane - 1) % 64
    if name == "row_mirror":
        return row + 15 - at
    if name == "row_half_mirror":
        return lane // 8 * 8 + 7 - lane % 8
    if name == "row_bcast" and count == 15:
        return row - 1 if row else None
    return 31 if lane >= 32 else None


def raw_sources(case: Case, lane: int) -> list[int] | None:
    """The sources' registers of a lane; None if DPP keeps it from writing."""
    form = case.form
    raw = [
        case.rows[lane][s.column] if s.column >= 0 else s.value for s in form.sources
    ]
    if form.dpp is not None:
        other = dpp_lane(form.dpp.control, lane)
        enabled = form.dpp.rows >> lane // 16 & 1 and form.dpp.banks >> lane // 4 % 4
        valid = other is not None and case.exec >> other & 1
        if not enabled or not enabled & 1 or not (valid or form.dpp.bound):
            return None
        column = form.sources[0].column
        raw[0] = case.rows[other][column] if other is not None and valid else 0
    return raw


def expect(case: Case) -> Outcome:
    """What the case leaves behind."""
    form, op = case.form, case.form.op
    out = Outcome([row[3] for row in case.rows], case.vcc, case.exec, UNTOUCHED)
    mask = 0
    for lane in range(LANES):
        if not case.exec >> lane & 1:
            continue
        raw = raw_sources(case, lane)
        bit = case.vcc >> lane & 1
        e = Env(case.mode, lane, bit, form.clamp)
        if raw is None:
            continue
        if op.types[-1] == "mask":
            raw = [*raw[:2], bit]
        elif "accumulate" in op.flags:
            raw = [*raw[:2], case.rows[lane][3]]
        halves = 2 if "packed" in op.flags else 1
        results = []
        for half in range(halves):
            x = [take(form, i, r, e, half) for i, r in enumerate(raw)]
            results.append(op.function(e, *x))
        result = results[0]
        if "carry" in op.flags:
            result, carry = result
            mask |= carry << lane
        if op.types[0] == "mask":
            mask |= int(result) << lane
            continue
        if halves == 2:
            low, high = (finish(form, r, e) & 0xFFFF for r in results)
            out.d[lane] = case.rows[lane][3] & ~n.M32 | low | high << 16
        else:
            out.d[lane] = place(form, finish(form, result, e), case.rows[lane][3])
    if "carry" in op.flags or op.types[0] == "mask":
        if form.to_scalar:
            out.scalar = mask
        else:
            out.vcc = mask
        if form.name.startswith("v_cmpx"):
            out.exec = mask
    return out


# ---- kernels ---------------------------------------------------------------

PROLOGUE = """
    s_load_dwordx4 s[8:11], s[4:5], 0x0
    v_lshlrev_b32 v1, 5, v0
    s_waitcnt lgkmcnt(0)
""" + isa_tools.lane_pointers("v1", "v1")
BEFORE = """
    global_load_dwordx4 v[8:11], v[2:3], off
    global_load_dwordx4 v[12:15], v[2:3], off offset:16
    s_waitcnt vmcnt(0)
    s_mov_b32 vcc_lo, {vcc_low:#x}
    s_mov_b32 vcc_hi, {vcc_high:#x}
    s_mov_b64 s[20:21], vcc
    s_mov_b32 s22, 0xa5a5a5a5
    s_mov_b32 s23, 0x5a5a5a5a
    s_mov_b32 s24, 0xc1234567
    s_mov_b32 s25, 0x3f9d70a4
    s_mov_b32 exec_lo, {exec_low:#x}
    s_mov_b32 exec_hi, {exec_high:#x}
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 10), {mode:#x}
    {text}
"""
AFTER = """
    s_mov_b64 s[28:29], exec
    s_mov_b64 exec, -1
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 10), 0x3f0
    v_mov_b32 v16, vcc_lo
    v_mov_b32 v17, vcc_hi
    v_mov_b32 v18, s28
    v_mov_b32 v19, s29
    v_mov_b32 v20, s22
    v_mov_b32 v21, s23
    global_store_dwordx4 v[4:5], v[14:17], off
    global_store_dwordx4 v[4:5], v[18:21], off offset:16
    v_add_co_u32 v2, vcc, 0x800, v2
    v_addc_co_u32 v3, vcc, 0, v3, vcc
    v_add_co_u32 v4, vcc, 0x800, v4
    v_addc_co_u32 v5, vcc, 0, v5, vcc
"""
BYTES = 32 * LANES  # of one case, both in the source and in the target


def body(cases: Sequence[Case]) -> str:
    """A kernel that runs the cases."""
    parts = [PROLOGUE]
    for case in cases:
        masks = {
            "vcc_low": case.vcc & n.M32, "vcc_high": case.vcc >> 32,
            "exec_low": case.exec & n.M32, "exec_high": case.exec >> 32,
        }  # fmt: skip
        parts.append(BEFORE.format(text=case.text, mode=case.mode, **masks) + AFTER)
    return "".join(parts)


def pack_rows(cases: Sequence[Case]) -> bytes:
    return b"".join(struct.pack("<4Q", *row) for case in cases for row in case.rows)


def pack(outcome: Outcome) -> bytes:
    """What the kernel stores of an outcome."""
    rest = (outcome.vcc, outcome.exec, outcome.scalar)
    return b"".join(struct.pack("<4Q", d, *rest) for d in outcome.d)
