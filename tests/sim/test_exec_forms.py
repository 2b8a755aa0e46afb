"""Sequences of vector instructions: indexed registers, division, conversions.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import random

import isa_numbers as m
from vector_runner import LANES, Case, random_exec, random_rows, run_cases

LOW = 0xFFFFFFFF


INDEXED = [  # text, then D from the index and the words v8 to v15
    ("s_set_gpr_idx_on s20, gpr_idx(SRC0)\n    v_mov_b32 v14, v8",
     lambda i, v: [v[i], v[7]]),
    ("s_set_gpr_idx_on s20, gpr_idx(SRC1)\n    v_sub_u32 v14, v8, v8",
     lambda i, v: [v[0] - v[i], v[7]]),
    ("s_set_gpr_idx_on s20, gpr_idx(SRC0,SRC2)\n    v_add3_u32 v14, v8, v9, v8",
     lambda i, v: [2 * v[i] + v[1], v[7]]),
    ("s_set_gpr_idx_on s20, gpr_idx(SRC0)\n    v_sub_u32 v14, s20, v8",
     lambda i, v: [i - v[0], v[7]]),
    ("s_set_gpr_idx_on s20, gpr_idx(SRC1)\n    v_lshlrev_b64 v[14:15], 0, v[8:9]",
     lambda i, v: [v[i], v[i + 1]]),
    ("s_set_gpr_idx_on s20, gpr_idx(DST)\n    v_mov_b32 v10, v8",
     lambda i, v: [v[0] if i == 4 else v[6], v[0] if i == 5 else v[7]]),
    ("s_set_gpr_idx_on 1, gpr_idx(DST)\n    s_set_gpr_idx_idx s20\n"
     "    s_set_gpr_idx_mode gpr_idx(SRC0)\n    v_mov_b32 v14, v8",
     lambda i, v: [v[i], v[7]]),
    ("s_set_gpr_idx_on s20, gpr_idx(SRC0)\n    s_set_gpr_idx_off\n"
     "    v_mov_b32 v14, v8",
     lambda i, v: [v[0], v[7]]),
]  # fmt: skip


def test_an_index_moves_the_chosen_vector_registers() -> None:
    rng = random.Random(22)
    cases, expected = [], []
    for index in range(7):
        for text, model in INDEXED:
            mask = random_exec(rng)
            rows = [tuple(rng.getrandbits(64) for _ in range(4)) for _ in range(LANES)]
            words = [[x >> s & LOW for x in row for s in (0, 32)] for row in rows]
            text = f"{text}\n    s_set_gpr_idx_off"
            cases.append(Case(text, rows, vcc=index, exec=mask))
            expected.append(
                [
                    model(index, v) if mask >> n & 1 else v[6:]
                    for n, v in enumerate(words)
                ]
            )
    for case, want, got in zip(cases, expected, run_cases(cases)):
        for lane, ((low, high), d) in enumerate(zip(want, got.d)):
            assert d == low & LOW | high << 32, f"{case.text}: lane {lane}"


DIVIDE = """v_div_scale_f32 v20, s[22:23], v10, v10, v8
    v_div_scale_f32 v21, vcc, v8, v10, v8
    v_rcp_f32 v22, v20
    v_fma_f32 v23, -v20, v22, 1.0
    v_fma_f32 v22, v23, v22, v22
    v_mul_f32 v23, v21, v22
    v_fma_f32 v24, -v20, v23, v21
    v_fma_f32 v23, v24, v22, v23
    v_fma_f32 v24, -v20, v23, v21
    v_div_fmas_f32 v24, v24, v22, v23
    v_div_fixup_f32 v14, v24, v10, v8"""


def test_division_sequence_is_rounded_once_over_the_whole_range() -> None:
    rng = random.Random(21)
    cases = []
    for _ in range(20):
        rows = [(rng.getrandbits(32), rng.getrandbits(32), 0, 0) for _ in range(LANES)]
        cases.append(Case(DIVIDE, rows))
    rows = random_rows(rng, ["f32", "f32"])
    cases.append(Case(DIVIDE, [(a & LOW, b & LOW, 0, 0) for a, b, _, _ in rows]))
    for case, got in zip(cases, run_cases(cases)):
        for (a, b, _, _), d in zip(case.rows, got.d):
            want = m.divide(a, b, "f32")
            if m.is_nan(want, "f32"):
                assert m.is_nan(d & LOW, "f32"), f"{a:#x} / {b:#x}: {d:#x}"
            else:
                assert d == want, f"{a:#x} / {b:#x}: expected {want:#x}, got {d:#x}"


def test_float16_values_survive_the_round_trip() -> None:
    values = [v for v in range(1 << 16)]
    cases = []
    for start in range(0, 1 << 16, 1 << 13):
        part = values[start : start + (1 << 13) : 127][:LANES]
        part += [0] * (LANES - len(part))
        rows = [(v, 0, 0, 0) for v in part]
        cases.append(
            Case("v_cvt_f32_f16_e32 v14, v8\n    v_cvt_f16_f32_e32 v14, v14", rows)
        )
    for case, got in zip(cases, run_cases(cases)):
        for (v, *_), d in zip(case.rows, got.d):
            want = v | 0x200 if m.is_signalling(v, "f16") else v
            assert d == want, f"{v:#x} -> {d:#x}"
