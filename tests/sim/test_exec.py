"""Vector instructions against an independent model, bit for bit.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import isa_model
import pytest
from vector_runner import LANES, Case, random_exec, random_rows, run_cases

TABLE = isa_model.table()
REGISTERS = {"D": 14, "A": 8, "B": 10, "C": 12}
WIDTH = {"16": 16, "32": 32, "64": 64}


def width(kind: str) -> int:
    return WIDTH[kind[-2:]]


def register(name: str, kind: str) -> str:
    n = REGISTERS[name]
    return f"v[{n}:{n + 1}]" if width(kind) == 64 else f"v{n}"


def take(
    value: int,
    kind: str,
    *,
    high: bool = False,
    neg: bool = False,
    absolute: bool = False,
) -> int:
    """The operand as the model's functions want it."""
    bits = value >> (16 if high else 0) & ((1 << width(kind)) - 1)
    if absolute:
        bits &= (1 << (width(kind) - 1)) - 1
    if neg:
        bits ^= 1 << (width(kind) - 1)
    return isa_model.sx(bits, width(kind)) if kind[0] == "i" else bits


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


def whole_register(value: int, kind: str, before: int) -> int:
    """v[14:15] after a result of this type; 16-bit results clear the top."""
    if width(kind) == 64:
        return value & isa_model.M64
    return before & ~isa_model.M32 | value & ((1 << width(kind)) - 1)


@pytest.mark.parametrize("where", ["1", "2", "3"])
def test_each_instruction_equals_the_model(where: str) -> None:
    rng = random.Random(2024)
    cases, expected = [], []
    for name, (types, encoding, function) in TABLE.items():
        if encoding != where:
            continue
        d, *kinds = types.split()
        names = [register(n, k) for n, k in zip("ABC", kinds)]
        suffix = "" if where == "3" else "_e32"
        rows = random_rows(rng, kinds)
        text = f"{name}{suffix} {register('D', d)}, {', '.join(names)}"
        cases.append(Case(text, rows, exec=random_exec(rng)))
        want = []
        for row in rows:
            result = function(*[take(v, k) for v, k in zip(row, kinds)])
            kept = whole_register(result, d, row[3])
            if name in isa_model.HALVES:
                kept |= row[3] & 0xFFFF0000
            want.append(kept)
        expected.append(want)
    check(cases, expected)


def modified_cases(
    rng: random.Random, count: int
) -> tuple[list[Case], list[list[int]]]:
    """VOP3 forms with random signs, clamp and op_sel."""
    cases, expected = [], []
    names = [n for n, row in TABLE.items() if row[0].split()[0][0] == "f"]
    for _ in range(count):
        name = rng.choice(names)
        types, where, function = TABLE[name]
        d, *kinds = types.split()
        halves = name in isa_model.HALVES
        signs = [
            (rng.random() < 0.4, rng.random() < 0.3) if k[0] == "f" else (False, False)
            for k in kinds
        ]
        selects = [halves and rng.random() < 0.5 for _ in kinds]
        clamp, top = rng.random() < 0.4, halves and rng.random() < 0.5
        sources = []
        for n, k, (neg, absolute) in zip("ABC", kinds, signs):
            text = register(n, k)
            text = f"|{text}|" if absolute else text
            sources.append(f"-{text}" if neg else text)
        text = f"{name}{'' if where == '3' else '_e64'} {register('D', d)}, "
        text += ", ".join(sources)
        if any(selects) or top:
            text += f" op_sel:[{','.join(str(int(x)) for x in (*selects, top))}]"
        text += " clamp" if clamp else ""
        rows = random_rows(rng, kinds)
        want = []
        for row in rows:
            operands = [
                take(v, k, high=h, neg=neg, absolute=absolute)
                for v, k, h, (neg, absolute) in zip(row, kinds, selects, signs)
            ]
            result = function(*operands)
            if clamp:
                number = isa_model.to_float(result, d)
                if number != number or number <= 0:
                    result = 0
                elif number > 1:
                    result = isa_model.round_to(d, 1.0)
            kept = whole_register(result, d, row[3])
            if halves and top:
                kept = row[3] & ~0xFFFF0000 | (result & 0xFFFF) << 16
            elif halves:
                kept |= row[3] & 0xFFFF0000
            want.append(kept)
        cases.append(Case(text, rows, exec=random_exec(rng)))
        expected.append(want)
    return cases, expected


def test_vop3_modifiers_act_on_the_sources_and_the_result() -> None:
    check(*modified_cases(random.Random(7), 120))


RELATIONS = {
    "f": lambda a, b, u: False, "lt": lambda a, b, u: a < b,
    "eq": lambda a, b, u: a == b, "le": lambda a, b, u: a <= b,
    "gt": lambda a, b, u: a > b, "lg": lambda a, b, u: not u and a != b,
    "ge": lambda a, b, u: a >= b, "o": lambda a, b, u: not u,
    "u": lambda a, b, u: u, "nge": lambda a, b, u: not a >= b,
    "nlg": lambda a, b, u: u or a == b, "ngt": lambda a, b, u: not a > b,
    "nle": lambda a, b, u: not a <= b, "neq": lambda a, b, u: not a == b,
    "nlt": lambda a, b, u: not a < b, "tru": lambda a, b, u: True,
    "ne": lambda a, b, u: a != b, "t": lambda a, b, u: True,
}  # fmt: skip
FLOAT_RELATIONS = ("f lt eq le gt lg ge o u nge nlg ngt nle neq nlt tru").split()
INTEGER_RELATIONS = "f lt eq le gt ne ge t".split()


@pytest.mark.parametrize("kind", ["f16", "f32", "f64", "i16", "u16", "i32", "u32",
                                  "i64", "u64"])  # fmt: skip
def test_compares_set_a_bit_per_active_lane(kind: str) -> None:
    rng = random.Random(kind)
    cases, masks = [], []
    for name in FLOAT_RELATIONS if kind[0] == "f" else INTEGER_RELATIONS:
        rows = random_rows(rng, [kind, kind])
        rows = [
            (a, a if n % 5 == 0 else b, c, d) for n, (a, b, c, d) in enumerate(rows)
        ]
        for x in ("cmp", "cmpx"):
            exec_mask = random_exec(rng)
            read = (
                ""
                if x == "cmp"
                else "\n    s_mov_b64 s[22:23], exec"
                "\n    s_mov_b64 exec, -1"
                "\n    v_mov_b32 v14, s22\n    v_mov_b32 v15, s23"
            )
            text = (
                f"v_{x}_{name}_{kind}_e32 vcc, {register('A', kind)}, "
                f"{register('B', kind)}{read}"
            )
            mask = 0
            for n, row in enumerate(rows):
                a, b = take(row[0], kind), take(row[1], kind)
                nan = False
                if kind[0] == "f":
                    a, b = isa_model.to_float(a, kind), isa_model.to_float(b, kind)
                    nan = a != a or b != b
                mask |= bool(RELATIONS[name](a, b, nan)) << n
            cases.append(Case(text, rows, exec=exec_mask))
            masks.append(mask & exec_mask)
    for case, mask, got in zip(cases, masks, run_cases(cases)):
        assert got.vcc == mask, f"{case.text}: {got.vcc:#x}, expected {mask:#x}"
        if "cmpx" in case.text:
            assert got.d == [mask] * LANES, case.text


@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_compare_class_knows_the_ten_kinds_of_number(kind: str) -> None:
    rng = random.Random(3)
    rows = random_rows(rng, [kind, "u32"])
    rows = [
        (a, 1 << n % 10 if n < 40 else b, c, d) for n, (a, b, c, d) in enumerate(rows)
    ]
    text = f"v_cmp_class_{kind}_e32 vcc, {register('A', kind)}, v10"
    (got,) = run_cases([Case(text, rows)])
    for n, row in enumerate(rows):
        want = isa_model.classify(take(row[0], kind), kind, row[1] & 0x3FF)
        assert got.vcc >> n & 1 == want, f"lane {n}: {row[0]:#x} {row[1]:#x}"


CARRIES = {
    "v_add_co_u32": lambda a, b, c: a + b,
    "v_sub_co_u32": lambda a, b, c: a - b,
    "v_subrev_co_u32": lambda a, b, c: b - a,
    "v_addc_co_u32": lambda a, b, c: a + b + c,
    "v_subb_co_u32": lambda a, b, c: a - b - c,
    "v_subbrev_co_u32": lambda a, b, c: b - a - c,
}


def test_carries_go_in_and_out_of_masks() -> None:
    rng = random.Random(11)
    cases = []
    for name in CARRIES:
        takes = ", vcc" if len(name.split("_")[1]) not in (3, 6) else ""
        for suffix in ("_e32", "_e64"):
            text = f"{name}{suffix} v14, vcc, v8, v10{takes}"
            rows = random_rows(rng, ["u32", "u32"])
            # Equal operands and all ones: where the carry in decides.
            rows[::4] = [(a, a, c, d) for a, _, c, d in rows[::4]]
            rows[1::4] = [(a, ~a & 0xFFFFFFFF, c, d) for a, _, c, d in rows[1::4]]
            cases.append(Case(text, rows, rng.getrandbits(64), random_exec(rng)))
    for case, got in zip(cases, run_cases(cases)):
        function = CARRIES[case.text.split()[0][:-4]]
        for n, (a, b, _, d) in enumerate(case.rows):
            result = function(a & 0xFFFFFFFF, b & 0xFFFFFFFF, case.vcc >> n & 1)
            active = case.exec >> n & 1
            want = d & ~0xFFFFFFFF | result & 0xFFFFFFFF if active else d
            assert got.d[n] == want, f"{case.text}, lane {n}"
            assert got.vcc >> n & 1 == (active and not 0 <= result < 2**32), case.text


def test_cndmask_and_wide_multiply_add() -> None:
    rng = random.Random(12)
    select = Case(
        "v_cndmask_b32_e32 v14, v8, v10, vcc",
        random_rows(rng, ["u32", "u32"]),
        rng.getrandbits(64),
    )
    signed = Case(
        "v_cndmask_b32_e64 v14, -v8, |v10|, s[20:21]",
        random_rows(rng, ["u32", "u32"]),
        rng.getrandbits(64),
    )
    unsigned = Case(
        "v_mad_u64_u32 v[14:15], vcc, v8, v10, v[12:13]",
        random_rows(rng, ["u32", "u32", "u64"]),
    )
    integer = Case(
        "v_mad_i64_i32 v[14:15], vcc, v8, v10, v[12:13]",
        random_rows(rng, ["i32", "i32", "i64"]),
    )
    cases = [select, signed, unsigned, integer]
    results = run_cases(cases)
    for n in range(LANES):
        a, b, _, d = select.rows[n]
        chosen = b if select.vcc >> n & 1 else a
        assert results[0].d[n] == d & ~0xFFFFFFFF | chosen & 0xFFFFFFFF
        a, b, _, d = signed.rows[n]
        chosen = b & 0x7FFFFFFF if signed.vcc >> n & 1 else a & 0xFFFFFFFF ^ 0x80000000
        assert results[1].d[n] == d & ~0xFFFFFFFF | chosen
        a, b, c, _ = unsigned.rows[n]
        total = (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF) + c
        assert results[2].d[n] == total & isa_model.M64
        assert results[2].vcc >> n & 1 == total >> 64
        a, b, c, _ = integer.rows[n]
        total = isa_model.sx(a, 32) * isa_model.sx(b, 32) + c
        assert results[3].d[n] == total & isa_model.M64
