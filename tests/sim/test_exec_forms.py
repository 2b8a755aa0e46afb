"""Packed, mixed and dot instructions, SDWA, DPP, lane access, float modes.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
import random
import struct

import isa_model as m
import pytest
from test_exec import TABLE, check, register, take, whole_register
from vector_runner import ALL, LANES, SPECIAL, Case, random_exec, random_rows, run_cases

LOW = 0xFFFFFFFF


def halves(value: int) -> tuple[int, int]:
    return value & 0xFFFF, value >> 16 & 0xFFFF


def half_rows(rng: random.Random) -> list[tuple[int, int, int, int]]:
    """Both halves of each register are interesting half floats."""

    def one() -> int:
        low, high = [
            rng.choice(SPECIAL["f16"]) if rng.random() < 0.3 else rng.getrandbits(16)
            for _ in range(2)
        ]
        return low | high << 16

    return [(one(), one(), one(), rng.getrandbits(64)) for _ in range(LANES)]


PACKED = {
    "v_pk_add_f16": ("f16", 2, "v_add_f16"), "v_pk_mul_f16": ("f16", 2, "v_mul_f16"),
    "v_pk_min_f16": ("f16", 2, "v_min_f16"), "v_pk_max_f16": ("f16", 2, "v_max_f16"),
    "v_pk_fma_f16": ("f16", 3, "v_fma_f16"), "v_pk_add_u16": ("u16", 2, "v_add_u16"),
    "v_pk_sub_u16": ("u16", 2, "v_sub_u16"), "v_pk_add_i16": ("i16", 2, "v_add_i16"),
    "v_pk_sub_i16": ("i16", 2, "v_sub_i16"), "v_pk_max_i16": ("i16", 2, "v_max_i16"),
    "v_pk_min_i16": ("i16", 2, "v_min_i16"), "v_pk_max_u16": ("u16", 2, "v_max_u16"),
    "v_pk_min_u16": ("u16", 2, "v_min_u16"), "v_pk_mad_i16": ("i16", 3, "v_mad_i16"),
    "v_pk_mad_u16": ("u16", 3, "v_mad_u16"),
    "v_pk_mul_lo_u16": ("u16", 2, "v_mul_lo_u16"),
    "v_pk_lshlrev_b16": ("u16", 2, "v_lshlrev_b16"),
    "v_pk_lshrrev_b16": ("u16", 2, "v_lshrrev_b16"),
}  # fmt: skip


@pytest.mark.parametrize("plain", [True, False])
def test_packed_instructions_do_each_half_as_op_sel_says(plain: bool) -> None:
    rng = random.Random(5)
    cases, expected = [], []
    for name, (kind, count, base) in PACKED.items():
        function = TABLE[base][2]
        low = [0 if plain else rng.getrandbits(1) for _ in range(count)]
        high = [1 if plain else rng.getrandbits(1) for _ in range(count)]
        signs = kind == "f16" and not plain
        neg = [
            [rng.getrandbits(1) if signs else 0 for _ in range(count)] for _ in range(2)
        ]
        text = f"{name} v14, " + ", ".join(("v8", "v10", "v12")[:count])
        if not plain:
            text += f" op_sel:{low} op_sel_hi:{high}".replace(" ", "").replace(
                "op_sel", " op_sel"
            )
            if signs:
                text += f" neg_lo:{neg[0]}".replace(", ", ",")
                text += f" neg_hi:{neg[1]}".replace(", ", ",")
        rows = half_rows(rng)
        want = []
        for row in rows:
            parts = []
            for half, select in enumerate((low, high)):
                operands = [
                    take(v, kind, high=bool(s), neg=bool(neg[half][i]))
                    for i, (v, s) in enumerate(zip(row, select))
                ]
                parts.append(function(*operands) & 0xFFFF)
            want.append(row[3] & ~LOW | parts[0] | parts[1] << 16)
        cases.append(Case(text, rows, exec=random_exec(rng)))
        expected.append(want)
    check(cases, expected)


def flush(bits: int) -> int:
    return bits & 0x80000000 if not bits & 0x7F800000 else bits


def dot2(a: int, b: int, c: int) -> int:
    """Low product first, each sum rounded, denormals flushed."""
    total = flush(c)
    for x, y in zip(halves(a), halves(b)):
        if any(m.is_nan(h, "f16") for h in (x, y)):
            product = 0x7FC00000
        else:
            product = m.round_to("f32", m.to_float(x, "f16") * m.to_float(y, "f16"))
        total = flush(m.arithmetic("f32", lambda p, q: p + q, [total, product]))
    if m.is_nan(total, "f32"):
        return m.min_nan("f32", [c])
    return total


def test_dot2_f32_f16_sums_low_then_high_in_float() -> None:
    rng = random.Random(8)
    rows = half_rows(rng)
    rows = [
        (a, b, random.Random(n).choice((c, c, 1, 0x807FFFFF, 0x7FA00000)), d)
        for n, (a, b, c, d) in enumerate(rows)
    ]
    cases, expected = [], []
    for text, change in (
        ("", lambda a, b, c: (a, b, c)),
        (
            " op_sel:[1,0,0] op_sel_hi:[0,1,0]",
            lambda a, b, c: (a >> 16 | a << 16 & LOW, b, c),
        ),
        (
            " neg_lo:[1,0,0] neg_hi:[0,1,0]",
            lambda a, b, c: (a ^ 0x8000, b ^ 0x80000000, c),
        ),
        (" neg_lo:[0,0,1]", lambda a, b, c: (a, b, c ^ 0x80000000)),
    ):
        cases.append(Case(f"v_dot2_f32_f16 v14, v8, v10, v12{text}", rows))
        expected.append(
            [d & ~LOW | dot2(*change(a & LOW, b & LOW, c & LOW)) for a, b, c, d in rows]
        )
    check(cases, expected)


def integer_dot(a: int, b: int, c: int, bits: int, signed: bool) -> int:
    def part(x: int, i: int) -> int:
        x = x >> i & ((1 << bits) - 1)
        return m.sx(x, bits) if signed else x

    return sum(part(a, i) * part(b, i) for i in range(0, 32, bits)) + (
        m.sx(c, 32) if signed else c & LOW
    )


def test_integer_dots_accumulate_and_saturate_under_clamp() -> None:
    rng = random.Random(9)
    cases, expected = [], []
    for name, bits, signed in (
        ("v_dot2_i32_i16", 16, True), ("v_dot2_u32_u16", 16, False),
        ("v_dot4_i32_i8", 8, True), ("v_dot4_u32_u8", 8, False),
        ("v_dot8_i32_i4", 4, True), ("v_dot8_u32_u4", 4, False),
    ):  # fmt: skip
        for clamp in ("", " clamp"):
            rows = random_rows(rng, ["u32", "u32", "u32"])
            want = []
            for a, b, c, d in rows:
                total = integer_dot(a & LOW, b & LOW, c & LOW, bits, signed)
                if clamp:
                    low, high = (-(2**31), 2**31 - 1) if signed else (0, LOW)
                    total = m.saturate(total, low, high)
                want.append(d & ~LOW | total & LOW)
            cases.append(Case(f"{name} v14, v8, v10, v12{clamp}", rows))
            expected.append(want)
    check(cases, expected)


def test_fma_mix_takes_floats_and_halves() -> None:
    rng = random.Random(10)
    cases, expected = [], []
    for _ in range(24):
        name = rng.choice(("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"))
        select, half = ([rng.getrandbits(1) for _ in range(3)] for _ in range(2))
        neg, absolute = ([rng.getrandbits(1) for _ in range(3)] for _ in range(2))
        text = f"{name} v14, " + ", ".join(
            "-" * n + "|" * b + r + "|" * b
            for n, b, r in zip(neg, absolute, ("v8", "v10", "v12"))
        )
        text += f" op_sel:{select} op_sel_hi:{half}".replace(", ", ",")
        rows = [
            r if n % 2 else s
            for n, (r, s) in enumerate(
                zip(half_rows(rng), random_rows(rng, ["f32", "f32", "f32"]))
            )
        ]
        want = []
        for row in rows:
            operands = []
            for v, s, h, n, b in zip(row, select, half, neg, absolute):
                if h:
                    x = v >> 16 * s & 0xFFFF
                    quiet = m.convert(x, "f16", "f32")
                    # A signalling half stays one until the sum.
                    x = quiet & ~0x400000 if m.is_signalling(x, "f16") else quiet
                else:
                    x = v & LOW
                x = x & 0x7FFFFFFF if b else x
                operands.append(x ^ 0x80000000 * n)
            result = m.arithmetic("f32", m.fused, operands)
            keep = row[3]
            if name == "v_fma_mix_f32":
                want.append(keep & ~LOW | result)
                continue
            half_bits = m.convert(result, "f32", "f16")
            if name == "v_fma_mixlo_f16":
                want.append(keep & ~0xFFFF | half_bits)
            else:
                want.append(keep & ~0xFFFF0000 | half_bits << 16)
        cases.append(Case(text, rows, exec=random_exec(rng)))
        expected.append(want)
    check(cases, expected)


SELECTS = {"BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8),
           "WORD_0": (0, 16), "WORD_1": (16, 16), "DWORD": (0, 32)}  # fmt: skip


def test_sdwa_picks_extends_and_places_parts() -> None:
    rng = random.Random(13)
    names = [
        n
        for n, (types, where, _) in TABLE.items()
        if where in "12"
        and "64" not in types
        and "legacy" not in n
        and (n != "v_mov_b32")
    ]
    cases, expected = [], []
    for _ in range(120):
        name = rng.choice(names)
        types, _, function = TABLE[name]
        d, *kinds = types.split()
        picks = [rng.choice(list(SELECTS)) for _ in kinds]
        place, unused = (
            rng.choice(list(SELECTS)),
            rng.choice(("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")),
        )
        extend = [k[0] != "f" and rng.random() < 0.5 for k in kinds]
        operands = [f"sext({r})" if e else r for r, e in zip(("v8", "v10"), extend)]
        text = f"{name}_sdwa v14, {', '.join(operands)}"
        text += f" dst_sel:{place} dst_unused:{unused}"
        for i, pick in enumerate(picks):
            text += f" src{i}_sel:{pick}"
        rows = random_rows(rng, kinds)
        want = []
        for row in rows:
            values = []
            for v, k, pick, e in zip(row, kinds, picks, extend):
                shift, bits = SELECTS[pick]
                part = v >> shift & ((1 << bits) - 1)
                part = m.sx(part, bits) if e else part
                values.append(take(part, k))
            shift, bits = SELECTS[place]
            result = whole_register(function(*values), d, 0) & LOW
            field = (1 << bits) - 1
            result &= field
            if unused == "UNUSED_PRESERVE":
                rest = row[3] & LOW & ~(field << shift)
            elif unused == "UNUSED_SEXT" and result >> (bits - 1):
                rest = LOW << (shift + bits) & LOW
            else:
                rest = 0
            want.append(row[3] & ~LOW | result << shift | rest)
        cases.append(Case(text, rows, exec=random_exec(rng)))
        expected.append(want)
    check(cases, expected)


def dpp_source(control: str, lane: int) -> int | None:
    """Which lane a control reads, in the manual's words."""
    name, _, number = control.partition(":")
    row, place = lane // 16 * 16, lane % 16
    if name == "quad_perm":
        return lane // 4 * 4 + int(number[1:-1].split(",")[lane % 4])
    n = int(number) if number else 0
    if name == "row_shl":
        return lane + n if place + n < 16 else None
    if name == "row_shr":
        return lane - n if place >= n else None
    if name == "row_ror":
        return row + (place - n) % 16
    if name == "wave_shl":
        return lane + 1 if lane < 63 else None
    if name == "wave_shr":
        return lane - 1 if lane > 0 else None
    if name == "wave_rol":
        return (lane + 1) % 64
    if name == "wave_ror":
        return (lane - 1) % 64
    if name == "row_mirror":
        return row + 15 - place
    if name == "row_half_mirror":
        return lane // 8 * 8 + 7 - lane % 8
    if name == "row_bcast" and n == 15:
        return row - 1 if row else None
    return 31 if lane >= 32 else None


CONTROLS = ["quad_perm:[1,0,3,2]", "quad_perm:[3,3,0,1]", "row_shl:1", "row_shl:15",
            "row_shr:4", "row_ror:7", "wave_shl:1", "wave_shr:1", "wave_rol:1",
            "wave_ror:1", "row_mirror", "row_half_mirror", "row_bcast:15",
            "row_bcast:31"]  # fmt: skip


@pytest.mark.parametrize("in_place", [True, False])
def test_dpp_reads_all_lanes_before_it_writes_any(in_place: bool) -> None:
    rng = random.Random(14)
    cases, expected = [], []
    for control in CONTROLS:
        for bound in ("", " bound_ctrl:0"):
            rows_on, banks_on = rng.choice(((15, 15), (10, 15), (15, 5)))
            source = "v14" if in_place else "v8"
            text = (
                f"v_add_u32_dpp v14, {source}, v10 {control} "
                f"row_mask:{rows_on:#x} bank_mask:{banks_on:#x}{bound}"
            )
            case = Case(text, random_rows(rng, ["u32", "u32"]), exec=random_exec(rng))
            want = []
            for n, row in enumerate(case.rows):
                other = dpp_source(control, n)
                valid = other is not None and case.exec >> other & 1
                enabled = rows_on >> n // 16 & 1 and banks_on >> n // 4 % 4 & 1
                if not enabled or (not valid and not bound):
                    want.append(row[3])
                    continue
                moved = case.rows[other][3 if in_place else 0] & LOW if valid else 0
                want.append(row[3] & ~LOW | moved + row[1] & LOW)
            cases.append(case)
            expected.append(want)
    check(cases, expected)


def test_lane_access_ignores_exec_where_the_manual_says_so() -> None:
    rng = random.Random(15)
    mask = 1 << 40 | 1 << 50
    rows = random_rows(rng, ["u32", "u32"])
    move = "\n    s_mov_b64 exec, -1\n    v_mov_b32 v14, s22"
    cases = [
        Case(f"v_readfirstlane_b32 s22, v8{move}", rows, exec=mask),
        Case(f"v_readfirstlane_b32 s22, v8{move}", rows, exec=0),
        Case(f"v_readlane_b32 s22, v8, 7{move}", rows, exec=mask),
        Case(
            "s_movk_i32 s23, 0xa5\n    v_writelane_b32 v14, s23, s23", rows, exec=mask
        ),
        Case("v_mbcnt_lo_u32_b32 v14, v8, v10", rows),
        Case("v_mbcnt_hi_u32_b32 v14, v8, v10", rows),
        Case("v_swap_b32 v14, v8\n    v_mov_b32 v15, v8", rows, exec=mask),
    ]
    got = run_cases(cases)
    for n, (a, b, _, d) in enumerate(rows):
        top = d & ~LOW
        assert got[0].d[n] == top | rows[40][0] & LOW
        assert got[1].d[n] == top | rows[0][0] & LOW
        assert got[2].d[n] == top | rows[7][0] & LOW
        assert got[3].d[n] == (top | 0xA5 if n == 37 else d)
        below = (1 << n) - 1
        low = bin(a & LOW & below).count("1") + (b & LOW)
        high = bin(a & LOW & below >> 32).count("1") + (b & LOW)
        assert got[4].d[n] == top | low & LOW
        assert got[5].d[n] == top | high & LOW
        swapped = d << 32 & m.M64 | a & LOW
        assert got[6].d[n] == (swapped if mask >> n & 1 else d)


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


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_rounding_follows_the_mode_register(mode: int) -> None:
    rng = random.Random(16 + mode)
    cases, expected = [], []
    for name, kind, exact, count in (
        ("v_add_f32_e32", "f32", lambda a, b: a + b, 2),
        ("v_mul_f32_e32", "f32", m.product, 2),
        ("v_fma_f32", "f32", m.fused, 3),
        ("v_add_f16_e32", "f16", lambda a, b: a + b, 2),
        ("v_mul_f16_e32", "f16", m.product, 2),
        ("v_add_f64", "f64", lambda a, b: a + b, 2),
    ):
        rows = random_rows(rng, [kind] * 3)
        sources = ", ".join(register(n, kind) for n in "ABC"[:count])
        cases.append(Case(f"{name} {register('D', kind)}, {sources}", rows))
        expected.append([
            whole_register(
                m.arithmetic(kind, exact, [take(v, kind) for v in row[:count]], mode),
                kind, row[3])
            for row in rows])  # fmt: skip
    rows = random_rows(rng, ["f32"])
    cases.append(Case("v_cvt_f16_f32_e32 v14, v8", rows))
    expected.append(
        [r[3] & ~LOW | m.convert(r[0] & LOW, "f32", "f16", mode) for r in rows]
    )
    check(cases, expected, round32=mode, round64=mode)


def test_denormals_are_flushed_when_the_mode_says_so() -> None:
    rng = random.Random(20)
    tiny = [
        (rng.getrandbits(23) | rng.getrandbits(1) << 31, 0x3F800000, 0, 0)
        for _ in range(LANES)
    ]
    cases = [
        Case("v_mul_f32_e32 v14, v8, v10", tiny),
        Case("v_fma_f32 v14, v8, v10, v12", tiny),
        Case("v_mov_b32_e32 v14, v8", tiny),
    ]
    kept, flushed = run_cases(cases), run_cases(cases, denorm32=0)
    for n, row in enumerate(tiny):
        assert kept[0].d[n] == row[0]
        assert flushed[0].d[n] == row[0] & 0x80000000
        assert flushed[1].d[n] == 0
        assert flushed[2].d[n] == row[0]


def ulps(got: int, exact: float) -> float:
    """Distance of float bits from a float64 value, in units of its last place."""
    unit = 2.0 ** max(math.frexp(exact)[1] - 24, -149)
    return abs(m.to_float(got, "f32") - exact) / unit


ESTIMATES = {
    "v_exp_f32": lambda x: 2.0**x,
    "v_log_f32": lambda x: math.log2(x) if x > 0 else -math.inf if x == 0 else math.nan,
    "v_rcp_f32": lambda x: 1 / x if x else math.copysign(math.inf, x),
    "v_rsq_f32": lambda x: 1 / math.sqrt(x) if x > 0 else
    math.copysign(math.inf, x) if x == 0 else math.nan,
    "v_sqrt_f32": lambda x: math.sqrt(x) if x >= 0 else math.nan,
}  # fmt: skip


@pytest.mark.parametrize("name", list(ESTIMATES))
def test_estimates_are_rounded_from_the_exact_value(name: str) -> None:
    rng = random.Random(name)
    rows = [r for _ in range(4) for r in random_rows(rng, ["f32"])]
    cases = [Case(f"{name}_e32 v14, v8", rows[64 * i : 64 * i + 64]) for i in range(4)]
    outcomes = [d & LOW for o in run_cases(cases) for d in o.d]
    for row, got in zip(rows, outcomes):
        bits = flush(row[0] & LOW)
        x = m.to_float(bits, "f32")
        if x != x:
            assert got == m.min_nan("f32", [bits])
            continue
        try:
            exact = ESTIMATES[name](x)
        except OverflowError:
            exact = math.inf
        if exact != exact or math.isinf(exact) or abs(exact) >= 2.0**128:
            want = m.round_to("f32", exact)
            assert got == want, f"{name}({x})"
        elif abs(exact) < 2.0**-126:
            assert got & 0x7FFFFFFF == 0, f"{name}({x})"
        else:
            assert ulps(got, exact) <= 0.5000001, f"{name}({x!r})"


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
    assert struct.calcsize("e") == 2 and ALL
