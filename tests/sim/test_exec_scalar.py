"""Scalar instructions against an independent model; program control.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import isa_model as m
import isa_tools
import pytest

import hipsim

LOW, FULL = m.M32, m.M64
BLOCK = """
    s_load_dwordx4 s[12:15], s[8:9], {offset:#x}
    s_load_dwordx2 s[16:17], s[8:9], {offset:#x}+16
    s_waitcnt lgkmcnt(0)
    s_mov_b64 exec, s[12:13]
    s_cmp_eq_u32 {scc}, 1
    {text}
    s_cselect_b32 s18, 1, 0
    s_mov_b64 s[20:21], exec
    s_mov_b64 exec, 1
    v_mov_b32 v2, s16
    v_mov_b32 v3, s17
    v_mov_b32 v4, s18
    global_store_dwordx3 v1, v[2:4], s[10:11]
    v_mov_b32 v2, s20
    v_mov_b32 v3, s21
    global_store_dwordx2 v1, v[2:3], s[10:11] offset:16
    v_add_u32 v1, 32, v1
"""
START = """
    s_load_dwordx4 s[8:11], s[4:5], 0x0
    v_mov_b32 v1, 0
    s_waitcnt lgkmcnt(0)
"""


def run(texts: list[tuple[str, int]], inputs: list[tuple[int, int, int]]) -> list[Any]:
    """(D, SCC, EXEC) of each; s[12:13] A and EXEC, s[14:15] B, s[16:17] D."""
    body = START + "".join(
        BLOCK.format(offset=24 * i, text=text, scc=scc)
        for i, (text, scc) in enumerate(texts)
    )
    source = bytearray(b"".join(struct.pack("<3Q", *row) for row in inputs))
    target = bytearray(32 * len(texts))
    with hipsim.Module(isa_tools.assemble(body + "    s_endpgm")) as module:
        module.kernel("kernel").launch(
            (1, 1, 1), (64, 1, 1),
            [hipsim.Buffer(source, "r"), hipsim.Buffer(target, "w")],
        )  # fmt: skip
    return [struct.unpack_from("<QI4xQ", target, 32 * i) for i in range(len(texts))]


def s32(x: int) -> int:
    return m.sx(x, 32)


def s64(x: int) -> int:
    return m.sx(x, 64)


def bfe(a: int, b: int, bits: int, signed: bool) -> int:
    offset, width = b & (bits - 1), min(b >> 16 & 127, bits)
    part = a >> offset & ((1 << width) - 1)
    if signed and width:
        part = m.sx(part, min(width, bits - offset))
    return part


Rule = Callable[[int, int, int, int], tuple[int, int]]


def nonzero(function: Callable[[int, int], int], bits: int) -> Rule:
    """SCC = result != 0."""

    def rule(a: int, b: int, d: int, scc: int) -> tuple[int, int]:
        result = function(a, b) & ((1 << bits) - 1)
        return result, int(result != 0)

    return rule


def keep(function: Callable[[int, int], int]) -> Rule:
    """SCC untouched."""
    return lambda a, b, d, scc: (function(a, b), scc)


def overflow(x: int) -> int:
    return int(not -(2**31) <= x < 2**31)


# name: (widths of D, A, B in bits, function of unsigned A, B, old D, SCC)
TWO: dict[str, tuple[tuple[int, int, int], Rule]] = {
    "s_add_u32": ((32, 32, 32), lambda a, b, d, s: (a + b, a + b >> 32)),
    "s_sub_u32": ((32, 32, 32), lambda a, b, d, s: (a - b, int(b > a))),
    "s_add_i32": ((32, 32, 32), lambda a, b, d, s: (a + b, overflow(s32(a) + s32(b)))),
    "s_sub_i32": ((32, 32, 32), lambda a, b, d, s: (a - b, overflow(s32(a) - s32(b)))),
    "s_addc_u32": ((32, 32, 32), lambda a, b, d, s: (a + b + s, a + b + s >> 32)),
    "s_subb_u32": ((32, 32, 32), lambda a, b, d, s: (a - b - s, int(b + s > a))),
    "s_min_i32": (
        (32,) * 3,
        lambda a, b, d, s: (min(s32(a), s32(b)), int(s32(a) < s32(b))),
    ),
    "s_max_u32": ((32,) * 3, lambda a, b, d, s: (max(a, b), int(a > b))),
    "s_cselect_b64": ((64,) * 3, lambda a, b, d, s: (a if s else b, s)),
    "s_and_b32": ((32,) * 3, nonzero(lambda a, b: a & b, 32)),
    "s_or_b64": ((64,) * 3, nonzero(lambda a, b: a | b, 64)),
    "s_xor_b64": ((64,) * 3, nonzero(lambda a, b: a ^ b, 64)),
    "s_andn2_b64": ((64,) * 3, nonzero(lambda a, b: a & ~b, 64)),
    "s_orn2_b32": ((32,) * 3, nonzero(lambda a, b: a | ~b, 32)),
    "s_nand_b64": ((64,) * 3, nonzero(lambda a, b: ~(a & b), 64)),
    "s_nor_b32": ((32,) * 3, nonzero(lambda a, b: ~(a | b), 32)),
    "s_xnor_b64": ((64,) * 3, nonzero(lambda a, b: ~(a ^ b), 64)),
    "s_lshl_b32": ((32,) * 3, nonzero(lambda a, b: a << (b & 31), 32)),
    "s_lshl_b64": ((64, 64, 32), nonzero(lambda a, b: a << (b & 63), 64)),
    "s_lshr_b64": ((64, 64, 32), nonzero(lambda a, b: a >> (b & 63), 64)),
    "s_ashr_i32": ((32,) * 3, nonzero(lambda a, b: s32(a) >> (b & 31), 32)),
    "s_ashr_i64": ((64, 64, 32), nonzero(lambda a, b: s64(a) >> (b & 63), 64)),
    "s_bfm_b32": ((32,) * 3, keep(lambda a, b: ((1 << (a & 31)) - 1) << (b & 31))),
    "s_bfm_b64": ((64, 32, 32), keep(lambda a, b: ((1 << (a & 63)) - 1) << (b & 63))),
    "s_mul_i32": ((32,) * 3, keep(lambda a, b: a * b)),
    "s_mul_hi_u32": ((32,) * 3, keep(lambda a, b: a * b >> 32)),
    "s_mul_hi_i32": ((32,) * 3, keep(lambda a, b: s32(a) * s32(b) >> 32)),
    "s_bfe_u32": ((32,) * 3, nonzero(lambda a, b: bfe(a, b, 32, False), 32)),
    "s_bfe_i32": ((32,) * 3, nonzero(lambda a, b: bfe(a, b, 32, True), 32)),
    "s_bfe_u64": ((64, 64, 32), nonzero(lambda a, b: bfe(a, b, 64, False), 64)),
    "s_bfe_i64": ((64, 64, 32), nonzero(lambda a, b: bfe(a, b, 64, True), 64)),
    "s_lshl3_add_u32": (
        (32,) * 3,
        lambda a, b, d, s: ((a << 3) + b, int((a << 3) + b > LOW)),
    ),
    "s_pack_lh_b32_b16": ((32,) * 3, keep(lambda a, b: a & 0xFFFF | b & 0xFFFF0000)),
    "s_absdiff_i32": (
        (32,) * 3,
        lambda a, b, d, s: (abs(s32(s32(a) - s32(b))), int(a != b)),
    ),
}
ONE: dict[str, tuple[tuple[int, int], Rule]] = {
    "s_mov_b64": ((64, 64), keep(lambda a, b: a)),
    "s_cmov_b32": ((32, 32), lambda a, b, d, s: (a if s else d, s)),
    "s_not_b64": ((64, 64), nonzero(lambda a, b: ~a, 64)),
    "s_wqm_b64": (
        (64, 64),
        nonzero(
            lambda a, b: sum(15 << 4 * i for i in range(16) if a >> 4 * i & 15), 64
        ),
    ),
    "s_quadmask_b64": (
        (64, 64),
        nonzero(lambda a, b: sum(1 << i for i in range(16) if a >> 4 * i & 15), 64),
    ),
    "s_brev_b64": ((64, 64), keep(lambda a, b: m.reverse(a, 64))),
    "s_bcnt1_i32_b64": ((32, 64), nonzero(lambda a, b: bin(a).count("1"), 32)),
    "s_bcnt0_i32_b32": ((32, 32), nonzero(lambda a, b: 32 - bin(a).count("1"), 32)),
    "s_ff0_i32_b64": ((32, 64), keep(lambda a, b: m.trailing(~a & FULL))),
    "s_ff1_i32_b32": ((32, 32), keep(lambda a, b: m.trailing(a))),
    "s_flbit_i32_b64": ((32, 64), keep(lambda a, b: m.leading(a, 64))),
    "s_flbit_i32": ((32, 32), keep(lambda a, b: m.leading_signed(a))),
    "s_sext_i32_i8": ((32, 32), keep(lambda a, b: m.sx(a, 8))),
    "s_sext_i32_i16": ((32, 32), keep(lambda a, b: m.sx(a, 16))),
    "s_bitset0_b64": ((64, 32), lambda a, b, d, s: (d & ~(1 << (a & 63)), s)),
    "s_bitset1_b32": ((32, 32), lambda a, b, d, s: (d | 1 << (a & 31), s)),
    "s_abs_i32": ((32, 32), nonzero(lambda a, b: abs(s32(a)), 32)),
    "s_bitreplicate_b64_b32": (
        (64, 32),
        keep(lambda a, b: sum(3 << 2 * i for i in range(32) if a >> i & 1)),
    ),
}
SAVES: dict[str, Callable[[int, int], int]] = {
    "s_and_saveexec_b64": lambda a, e: a & e,
    "s_or_saveexec_b64": lambda a, e: a | e,
    "s_xor_saveexec_b64": lambda a, e: a ^ e,
    "s_andn2_saveexec_b64": lambda a, e: a & ~e,
    "s_andn1_saveexec_b64": lambda a, e: ~a & e,
    "s_nor_saveexec_b64": lambda a, e: ~(a | e),
}


def names(register: int, bits: int) -> str:
    return f"s[{register}:{register + 1}]" if bits == 64 else f"s{register}"


def values(rng: random.Random, bits: int = 64) -> int:
    return rng.choice((
        rng.getrandbits(64), rng.randrange(70), FULL - rng.randrange(70),
        1 << rng.randrange(64), rng.getrandbits(7) << 16 | rng.getrandbits(6),
    ))  # fmt: skip


def test_scalar_arithmetic_sets_result_and_scc() -> None:
    rng = random.Random(1)
    texts, inputs, wants = [], [], []
    for _ in range(4):
        for name, (widths, rule) in [*TWO.items(), *ONE.items()]:
            a, b, d = (values(rng) for _ in range(3))
            scc = rng.getrandbits(1)
            operands = [names(12, widths[1])]
            if len(widths) == 3:
                operands.append(names(14, widths[2]))
            texts.append((f"{name} {names(16, widths[0])}, {', '.join(operands)}", scc))
            inputs.append((a, b, d))
            cut = [
                x & ((1 << w) - 1)
                for x, w in zip((a, b, d), (widths[1], widths[-1], widths[0]))
            ]
            result, scc_out = rule(*cut, scc)
            mask = (1 << widths[0]) - 1
            wants.append((d & ~mask | result & mask, scc_out))
    for (text, _), want, row, got in zip(texts, wants, inputs, run(texts, inputs)):
        assert got[:2] == want, f"{text}: {got[0]:#x} {got[1]} for {row}"


def test_saveexec_keeps_the_old_mask_and_sets_the_new() -> None:
    rng = random.Random(2)
    texts, inputs = [], []
    for name in SAVES:
        for _ in range(4):
            texts.append((f"{name} s[16:17], s[14:15]", 0))
            inputs.append((rng.getrandbits(64), rng.getrandbits(64), 0))
    for (text, _), (a, b, _), got in zip(texts, inputs, run(texts, inputs)):
        new = SAVES[text.split()[0]](b, a) & FULL
        assert got == (a, int(new != 0), new), text


def test_scalar_compares_and_bit_tests() -> None:
    rng = random.Random(3)
    relations = {"eq": lambda a, b: a == b, "lg": lambda a, b: a != b,
                 "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
                 "lt": lambda a, b: a < b, "le": lambda a, b: a <= b}  # fmt: skip
    texts, inputs, wants = [], [], []
    for kind, view in (("i32", s32), ("u32", lambda x: x & LOW), ("u64", int)):
        for name, relation in relations.items():
            if kind == "u64" and name not in ("eq", "lg"):
                continue
            bits = int(kind[1:])
            for same in (False, True):
                a = values(rng)
                b = a if same else values(rng)
                text = f"s_cmp_{name}_{kind} {names(12, bits)}, {names(14, bits)}"
                texts.append((text, 0))
                inputs.append((a, b, 0))
                wants.append(int(relation(view(a), view(b))))
    for bit in (0, 1):
        a, b = values(rng), values(rng)
        texts.append((f"s_bitcmp{bit}_b64 s[12:13], s14", 0))
        inputs.append((a, b, 0))
        wants.append(int(a >> (b & 63) & 1 == bit))
    texts.append(("s_cmpk_lt_i32 s12, 0xfff0", 0))
    inputs.append(((-17) & LOW, 0, 0))
    wants.append(1)
    texts.append(("s_cmpk_gt_u32 s12, 0xfff0", 0))
    inputs.append((0xFFF1, 0, 0))
    wants.append(1)
    for (text, _), want, row, got in zip(texts, wants, inputs, run(texts, inputs)):
        assert got[1] == want, f"{text} for {row}"


def test_control_flow_calls_and_mode() -> None:
    loop = """s_mov_b32 s16, 0
1:  s_add_u32 s16, s16, 3
    s_cmp_lt_u32 s16, 30
    s_cbranch_scc1 1b
    s_getpc_b64 s[24:25]
    s_add_u32 s24, s24, 24
    s_addc_u32 s25, s25, 0
    s_swappc_b64 s[26:27], s[24:25]
    s_branch 2f
    s_nop 0
    s_nop 0
    s_addk_i32 s16, 0x70
    s_setpc_b64 s[26:27]
2:"""
    mode = """s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 5
    s_getreg_b32 s16, hwreg(HW_REG_MODE, 0, 8)
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0"""
    got = run([(loop, 0), (mode, 0)], [(1, 0, 0), (1, 0, 0)])
    assert got[0][0] & LOW == 30 + 0x70
    assert got[1][0] & LOW == 0xF5


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
        pytest.raises(hipsim.HipError, match=f"(?i){__import__('re').escape(report)}"),
    ):
        module.kernel("kernel").launch(
            (1, 1, 1), (64, 1, 1), [hipsim.Buffer(bytearray(64))]
        )
