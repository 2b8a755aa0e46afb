"""The settings for what no document says: dot2, ulp; and the host's float modes.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import ctypes
import math
import platform
import random
from fractions import Fraction

import isa_numbers as m
import isa_tools
import pytest
from vector_runner import (
    SPECIAL,
    Case,
    check,
    half_rows,
    program,
    random_rows,
    run_cases,
)

import hipsim

LOW = m.M32
ORDERS = {"lohi": 0, "hilo": 1, "fused": 2}
KEEP32, FLUSH16 = 4, 8
SETTINGS = [
    (order, bits) for order in ORDERS for bits in (0, KEEP32, FLUSH16, KEEP32 | FLUSH16)
]


def add(mode: int, x: int, y: int) -> int:
    return m.add("f32", mode, x, y)


def model(order: str, bits: int, mode: int, a: int, b: int, c: int) -> int:
    """v_dot2_f32_f16 under one setting, with exact fractions."""

    def out(x: int) -> int:
        return x if bits & KEEP32 else m.flush(x)

    def half(x: int) -> int:
        return x & 0x8000 if bits & FLUSH16 and not x & 0x7C00 else x

    products = []
    for x, y in ((half(a >> s & 0xFFFF), half(b >> s & 0xFFFF)) for s in (0, 16)):
        nan = m.is_nan(x, "f16") or m.is_nan(y, "f16")
        exact = m.to_float(x, "f16") * m.to_float(y, "f16")
        products.append(m.QUIET["f32"] if nan else m.round_to("f32", exact))
    terms = [out(c), *(products if order != "hilo" else products[::-1])]
    values = [m.to_float(t, "f32") for t in terms]
    finite = all(math.isfinite(v) for v in values)
    if order == "fused" and finite and any(values):
        exact = sum(map(Fraction, values))
        if exact:
            return out(m.round_fraction(exact, "f32", mode))
    total = terms[0]
    for term in terms[1:]:
        total = add(mode, total, term)
        total = total if order == "fused" else out(total)
    if order == "fused" and finite and any(values):
        return 0x80000000 if mode == 2 else 0  # x - x
    return m.first_nan("f32", [c]) if m.is_nan(total, "f32") else total


def dot2_rows(rng: random.Random) -> list[tuple[int, ...]]:
    """Operands where the order, one rounding or a denormal decides."""
    rows = []
    for n, (a, b, c, d) in enumerate(half_rows(rng)):
        kind = n % 5
        if kind == 0:  # the low product and the addend nearly cancel
            x, y = a & 0x83FF | 0x5000, b & 0x83FF | 0x3C00
            product = m.to_float(x, "f16") * m.to_float(y, "f16")
            a, b = a & 0xFFFF0000 | x, b & 0xFFFF0000 | y
            c = m.round_to("f32", -product) ^ rng.getrandbits(2)
            a = a & 0x83FFFFFF | rng.choice((0, 0x20000000))
        elif kind == 1:  # half denormals
            a, b = a & 0x83FF83FF, b & 0xC3FFC3FF | 0x40004000
            c = rng.choice((0, 1, 0x80000001, 0x33000000, 0x007FFFFF))
        elif kind == 2:  # three terms of one size
            a, b = (x & 0x83FF83FF | 0x3C003C00 for x in (a, b))
            c = m.round_to("f32", rng.uniform(-4, 4))
        elif kind == 3:
            c = rng.choice((0, 0x80000000, 1, 0x807FFFFF, 0x7FA00000, 0x7F800000))
        else:
            c = rng.choice(SPECIAL["f32"]) if n % 2 else c
        rows.append((a, b, c, d))
    return rows


@pytest.mark.parametrize(("order", "bits"), SETTINGS)
def test_dot2_has_every_setting(order: str, bits: int, option) -> None:
    rng = random.Random(f"{order}{bits}")
    option("dot2", ORDERS[order] | bits)
    for mode in range(4):
        rows = [dot2_rows(rng) for _ in range(3)]
        cases = [Case("v_dot2_f32_f16 v14, v8, v10, v12", r) for r in rows]
        wants = [
            [
                d & ~LOW | model(order, bits, mode, a & LOW, b & LOW, c & LOW)
                for a, b, c, d in r
            ]
            for r in rows
        ]
        check(cases, wants, round32=mode)


def test_the_dot2_settings_differ_from_each_other() -> None:
    rows = [r for seed in range(8) for r in dot2_rows(random.Random(seed))]
    columns = {
        setting: tuple(model(*setting, 0, a, b, c & LOW) for a, b, c, _ in rows)
        for setting in SETTINGS
    }
    assert len(set(columns.values())) == len(SETTINGS)


ESTIMATES = [
    *(f"v_{n}_{k}" for n in ("rcp", "rsq", "sqrt") for k in ("f16", "f32", "f64")),
    *(f"v_{n}_{k}" for n in ("exp", "log", "sin", "cos") for k in ("f16", "f32")),
    *("v_rcp_iflag_f32", "v_exp_legacy_f32", "v_log_legacy_f32"),
]


def estimate_rows(kind: str) -> list[tuple[int, ...]]:
    rng = random.Random(kind)
    rows = random_rows(rng, [kind])
    special = SPECIAL[kind]
    return [
        (special[n] if n < len(special) else a, b, c, d)
        for n, (a, b, c, d) in enumerate(rows)
    ]


def results(option, adversarial: int, suffix: str = "_e32") -> dict[str, list[int]]:
    """D of every estimate on the same rows."""
    option("ulp", adversarial)
    cases = []
    for name in ESTIMATES:
        kind = name[-3:]
        d, a = ("v[14:15]", "v[8:9]") if kind == "f64" else ("v14", "v8")
        cases.append(Case(f"{name}{suffix} {d}, {a}", estimate_rows(kind)))
    return {name: got.d for name, got in zip(ESTIMATES, run_cases(cases))}


def test_adversarial_estimates_are_off_by_at_most_one_ulp(option) -> None:
    exact, off = results(option, 0), results(option, 1)
    for name in ESTIMATES:
        kind = name[-3:]
        mask = (1 << m.FORMATS[kind][2]) - 1
        steps = set()
        for row, x, y in zip(estimate_rows(kind), exact[name], off[name]):
            x, y = x & mask, y & mask
            fixed = m.is_nan(x, kind) or math.isinf(m.to_float(x, kind))
            fixed = fixed or m.to_float(x, kind) == 0
            if "exp" in name and m.to_float(row[0] & mask, kind) == 0:
                fixed = True
            if fixed:
                assert x == y, f"{name}({row[0]:#x})"
            assert abs(x - y) <= 1, f"{name}({row[0]:#x})"
            if name[2:5] in ("sin", "cos") and not m.is_nan(y, kind):
                assert abs(m.to_float(y, kind)) <= 1
            steps.add(y - x)
        assert steps == {-1, 0, 1}, name


def test_adversarial_estimates_depend_on_instruction_and_operand_only(option) -> None:
    once, again = results(option, 1), results(option, 1, "_e64")
    assert once == again
    # Another lane, another order: the same bits for the same operand.
    rows = estimate_rows("f32")
    straight, turned = run_cases(
        [Case("v_exp_f32 v14, v8", r) for r in (rows, rows[::-1])]
    )
    low = [d & LOW for d in straight.d]
    assert low == [d & LOW for d in turned.d][::-1]
    assert low == [d & LOW for d in once["v_exp_f32"]]
    assert once["v_exp_f32"] != once["v_exp_legacy_f32"]


def test_modifiers_act_on_adversarial_estimates(option) -> None:
    off = results(option, 1)["v_sqrt_f32"]
    rows = estimate_rows("f32")
    (got,) = run_cases([Case("v_sqrt_f32_e64 v14, v8 clamp", rows)])
    for before, after in zip(off, got.d):
        x = m.to_float(before & LOW, "f32")
        want = m.round_to("f32", min(x, 1.0) if x > 0 else 0.0)
        assert after & LOW == want


def test_the_hosts_float_modes_neither_matter_nor_change() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of the rounding modes are x86's")
    torch = pytest.importorskip("torch")
    libm = ctypes.CDLL("libm.so.6")
    rng = random.Random(6)
    texts = [f"v_{n}_f32 v14, v8, v10" for n in ("add", "mul", "min")]
    texts += ["v_fma_f32 v14, v8, v10, v12", "v_cvt_f16_f32 v14, v8"]
    texts += [f"v_{n}_f32 v14, v8" for n in ("exp", "log", "sin", "sqrt", "rcp")]
    texts += ["v_dot2_f32_f16 v14, v8, v10, v12", "v_pk_fma_f16 v14, v8, v10, v12"]
    texts += ["v_fma_f64 v[14:15], v[8:9], v[10:11], v[12:13]"]
    cases = []
    for text in texts:
        rows = random_rows(rng, ["f64" if "f64" in text else "f32"] * 3)
        tiny = [tuple(x & ~0x7F000000 for x in row) for row in rows]
        cases += [Case(text, rows), Case(text, tiny), Case(text, half_rows(rng))]
    body, source = program(cases)
    outputs = []
    with hipsim.Module(isa_tools.assemble(body)) as module:
        kernel = module.kernel("kernel")
        # Up, down and toward zero are 0x800, 0x400 and 0xc00 on x86.
        for round_to, flush_denormals in ((0, 0), (0x800, 0), (0x400, 1), (0xC00, 1)):
            data, target = bytearray(source), bytearray(1024 * len(cases))
            buffers = [hipsim.Buffer(data, "r"), hipsim.Buffer(target, "rw")]
            torch.set_flush_denormal(bool(flush_denormals))
            libm.fesetround(round_to)
            try:
                kernel.launch((1, 1, 1), (64, 1, 1), buffers)
                kept = libm.fegetround()
            finally:
                libm.fesetround(0)
                torch.set_flush_denormal(False)
            assert kept == round_to
            outputs.append(bytes(target))
    assert all(out == outputs[0] for out in outputs)
