"""An independent model of vector instructions, one lane at a time.

Written from the manual's text with Python integers, exact fractions and
struct; it shares nothing with csrc/sim. Estimates (exp, log, ...) are in
float64 and compared with a tolerance by the test.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
# format: (struct code of the float, of the integer, bits, mantissa bits, bias)
FORMATS = {
    "f16": ("e", "H", 16, 10, 15),
    "f32": ("f", "I", 32, 23, 127),
    "f64": ("d", "Q", 64, 52, 1023),
}
QUIET = {"f16": 0x7E00, "f32": 0x7FC00000, "f64": 0x7FF8000000000000}


def to_float(bits: int, kind: str) -> float:
    """The number with these bits (a Python float holds all three kinds)."""
    code, integer, *_ = FORMATS[kind]
    return struct.unpack("<" + code, struct.pack("<" + integer, bits))[0]


def is_nan(bits: int, kind: str) -> bool:
    _, _, width, mantissa, _ = FORMATS[kind]
    magnitude = bits & ((1 << (width - 1)) - 1)
    return magnitude > ((1 << (width - 1 - mantissa)) - 1) << mantissa


def is_signalling(bits: int, kind: str) -> bool:
    return is_nan(bits, kind) and not bits >> (FORMATS[kind][3] - 1) & 1


def infinity(kind: str, negative: bool) -> int:
    _, _, width, mantissa, _ = FORMATS[kind]
    return negative << (width - 1) | ((1 << (width - 1 - mantissa)) - 1) << mantissa


def round_fraction(x: Fraction, kind: str, mode: int = 0) -> int:
    """Bits of x rounded once: 0 nearest even, 1 up, 2 down, 3 toward zero."""
    _, _, width, mantissa, bias = FORMATS[kind]
    sign = x < 0
    magnitude = abs(x)
    if magnitude == 0:
        return 0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    exponent = max(exponent, 1 - bias)
    scaled = magnitude / Fraction(2) ** (exponent - mantissa)
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    if mode == 0:
        whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1)
    elif (mode == 1 and not sign) or (mode == 2 and sign):
        whole += rest > 0
    if whole >> (mantissa + 1):
        whole, exponent = whole >> 1, exponent + 1
    if exponent > bias:
        grows = mode == 0 or (mode == 1 and not sign) or (mode == 2 and sign)
        top = infinity(kind, False)
        return sign << (width - 1) | (top if grows else top - 1)
    field = exponent + bias - 1 if whole >> mantissa else 0
    return sign << (width - 1) | ((field << mantissa) + whole)


def arithmetic(
    kind: str, exact: Callable[..., Any], sources: list[int], mode: int = 0
) -> int:
    """A float operation by fractions; specials through Python floats."""
    values = [to_float(s, kind) for s in sources]
    for bits in sources:
        if is_nan(bits, kind):
            return bits | 1 << (FORMATS[kind][3] - 1)
    if all(math.isfinite(v) for v in values):
        result = exact(*[Fraction(v) for v in values])
        if result != 0:
            return round_fraction(result, kind, mode)
    try:
        result = exact(*values)
    except OverflowError:
        result = math.nan
    if result != result:
        return QUIET[kind]
    if math.isinf(result):
        return infinity(kind, result < 0)
    negative = math.copysign(1.0, result) < 0
    if mode == 2 and exact is not product:
        # Rounding down, x + -x and +0 + -0 are -0.
        parts = (
            [*values[:2]] if len(values) == 2 else [values[0] * values[1], values[2]]
        )
        negative = not all(math.copysign(1.0, v) > 0 for v in parts)
    return negative << (FORMATS[kind][2] - 1)


def divide(a: int, b: int, kind: str) -> int:
    """a / b rounded once; which NaN a NaN is, is left open."""
    x, y = to_float(a, kind), to_float(b, kind)
    sign = (a ^ b) & 1 << (FORMATS[kind][2] - 1)
    if x != x or y != y or (x == y == 0) or (math.isinf(x) and math.isinf(y)):
        return QUIET[kind]
    if y == 0 or math.isinf(x):
        return sign | infinity(kind, False)
    if x == 0 or math.isinf(y):
        return sign
    return round_fraction(Fraction(x) / Fraction(y), kind) | sign


def minimum(kind: str, a: int, b: int, largest: bool) -> int:
    for bits in (a, b):
        if is_signalling(bits, kind):
            return min_nan(kind, [a, b])
    if is_nan(a, kind) and is_nan(b, kind):
        return a
    if is_nan(a, kind):
        return b
    if is_nan(b, kind):
        return a

    def order(bits: int) -> tuple[float, int]:
        return to_float(bits, kind), -(bits >> (FORMATS[kind][2] - 1))

    first = order(a) > order(b) if largest else order(a) < order(b)
    return a if first else b


def min_nan(kind: str, sources: list[int]) -> int:
    """The first NaN, quiet."""
    for bits in sources:
        if is_nan(bits, kind):
            return bits | 1 << (FORMATS[kind][3] - 1)
    return QUIET[kind]


def extreme3(kind: str, largest: bool, *x: int) -> int:
    result = minimum(kind, minimum(kind, x[0], x[1], largest), x[2], largest)
    return min_nan(kind, list(x)) if is_nan(result, kind) else result


def sx(x: int, bits: int) -> int:
    """x's low bits as a signed number."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def saturate(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def bytes_of(x: int) -> list[int]:
    return [x >> i & 255 for i in (0, 8, 16, 24)]


def perm(a: int, b: int, select: int) -> int:
    data = bytes_of(b) + bytes_of(a)
    out = 0
    for i, s in enumerate(bytes_of(select)):
        if s < 8:
            byte = data[s]
        elif s < 12:
            byte = 255 if data[(1, 3, 5, 7)[s - 8]] & 0x80 else 0
        else:
            byte = 0 if s == 12 else 255
        out |= byte << 8 * i
    return out


def to_int(bits: int, kind: str, low: int, high: int) -> int:
    if is_nan(bits, kind):
        return 0
    x = to_float(bits, kind)
    if math.isinf(x):
        return high if x > 0 else low
    return saturate(math.trunc(x), low, high)


def whole(bits: int, kind: str, rule: Callable[[Fraction], int]) -> int:
    """Rounding to an integral float; the sign of zero follows the source."""
    if is_nan(bits, kind):
        return bits | 1 << (FORMATS[kind][3] - 1)
    x = to_float(bits, kind)
    if math.isinf(x):
        return bits
    out = round_fraction(Fraction(rule(Fraction(x))), kind)
    return out | (bits & 1 << (FORMATS[kind][2] - 1) if out == 0 else 0)


def classify(bits: int, kind: str, mask: int) -> int:
    _, _, width, _, bias = FORMATS[kind]
    negative = bits >> (width - 1)
    x = to_float(bits, kind)
    if is_nan(bits, kind):
        bit = 0 if is_signalling(bits, kind) else 1
    elif math.isinf(x):
        bit = 2 if negative else 9
    elif x == 0:
        bit = 5 if negative else 6
    elif abs(x) < 2.0 ** (1 - bias):
        bit = 4 if negative else 7
    else:
        bit = 3 if negative else 8
    return mask >> bit & 1


def median(*x: int) -> int:
    return sorted(x)[1]


def round_to(kind: str, x: float) -> int:
    """A float64 result in the target format."""
    if x != x:
        return QUIET[kind]
    if math.isinf(x):
        return infinity(kind, x < 0)
    if x == 0:
        return (math.copysign(1.0, x) < 0) << (FORMATS[kind][2] - 1)
    return round_fraction(Fraction(x), kind)


def convert(bits: int, source: str, target: str, mode: int = 0) -> int:
    if is_nan(bits, source):
        shift = FORMATS[target][3] - FORMATS[source][3]
        mantissa = bits & ((1 << FORMATS[source][3]) - 1)
        payload = mantissa << shift if shift > 0 else mantissa >> -shift
        sign = bits >> (FORMATS[source][2] - 1)
        return infinity(target, bool(sign)) | payload | 1 << (FORMATS[target][3] - 1)
    x = to_float(bits, source)
    if mode and math.isfinite(x) and x != 0:
        return round_fraction(Fraction(x), target, mode)
    return round_to(target, x)


def frexp_exponent(bits: int, kind: str) -> int:
    x = to_float(bits, kind)
    return math.frexp(x)[1] if math.isfinite(x) else 0


def frexp_mantissa(bits: int, kind: str) -> int:
    if is_nan(bits, kind):
        return min_nan(kind, [bits])
    x = to_float(bits, kind)
    return round_to(kind, math.frexp(x)[0]) if math.isfinite(x) else bits


def leading(x: int, width: int) -> int:
    return M32 if x == 0 else width - x.bit_length()


def leading_signed(x: int) -> int:
    return leading((x ^ M32) if x >> 31 else x, 32)


def trailing(x: int) -> int:
    return M32 if x == 0 else (x & -x).bit_length() - 1


def reverse(x: int, width: int) -> int:
    return int(f"{x:0{width}b}"[::-1], 2)


def field_signed(a: int, offset: int, width: int) -> int:
    width = min(width, 32 - offset)
    return sx(a >> offset, width) & M32 if width else 0


def ldexp(bits: int, kind: str, power: int) -> int:
    if is_nan(bits, kind):
        return min_nan(kind, [bits])
    x = to_float(bits, kind)
    if math.isinf(x) or x == 0:
        return bits
    return round_fraction(
        Fraction(x) * Fraction(2) ** saturate(power, -5000, 5000), kind
    )


def product(a: Any, b: Any) -> Any:
    return a * b


def fused(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


Row = tuple[str, str, Callable[..., int]]


def table() -> dict[str, Row]:
    """name: (types of D and the sources, where it is encoded, function).

    The function takes the sources' bits, integers signed for i types, and
    gives D's bits (any integer, cut to the width). Encodings: "2" VOP2 with
    a VOP3 form, "1" VOP1 with one, "3" VOP3 only.
    """
    t: dict[str, Row] = {}

    def add(name: str, types: str, where: str, function: Callable[..., int]) -> None:
        t[name] = (types, where, function)

    for kind in ("f32", "f16"):
        for name, op in (
            ("add", lambda a, b: a + b),
            ("sub", lambda a, b: a - b),
            ("subrev", lambda a, b: b - a),
            ("mul", lambda a, b: a * b),
        ):
            add(
                f"v_{name}_{kind}",
                f"{kind} {kind} {kind}",
                "2",
                lambda a, b, k=kind, o=op: arithmetic(k, o, [a, b]),
            )
        add(
            f"v_fma_{kind}",
            f"{kind} {kind} {kind} {kind}",
            "3",
            lambda a, b, c, k=kind: arithmetic(k, fused, [a, b, c]),
        )
    add(
        "v_add_f64",
        "f64 f64 f64",
        "3",
        lambda a, b: arithmetic("f64", lambda x, y: x + y, [a, b]),
    )
    add(
        "v_mul_f64",
        "f64 f64 f64",
        "3",
        lambda a, b: arithmetic("f64", lambda x, y: x * y, [a, b]),
    )
    add(
        "v_fma_f64",
        "f64 f64 f64 f64",
        "3",
        lambda a, b, c: arithmetic("f64", fused, [a, b, c]),
    )
    for kind, where in (("f32", "2"), ("f16", "2"), ("f64", "3")):
        for name, largest in (("min", False), ("max", True)):
            add(
                f"v_{name}_{kind}",
                f"{kind} {kind} {kind}",
                where,
                lambda a, b, k=kind, g=largest: minimum(k, a, b, g),
            )
    for kind in ("f32", "f16"):
        for name, largest in (("min3", False), ("max3", True)):
            add(
                f"v_{name}_{kind}",
                f"{kind} {kind} {kind} {kind}",
                "3",
                lambda a, b, c, k=kind, g=largest: extreme3(k, g, a, b, c),
            )
    two = {
        "v_mul_i32_i24": ("i32 i32 i32", lambda a, b: sx(a, 24) * sx(b, 24)),
        "v_mul_hi_i32_i24": ("i32 i32 i32", lambda a, b: sx(a, 24) * sx(b, 24) >> 32),
        "v_mul_u32_u24": ("u32 u32 u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
        "v_mul_hi_u32_u24": (
            "u32 u32 u32",
            lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
        ),
        "v_min_i32": ("i32 i32 i32", min),
        "v_max_i32": ("i32 i32 i32", max),
        "v_min_u32": ("u32 u32 u32", min),
        "v_max_u32": ("u32 u32 u32", max),
        "v_lshrrev_b32": ("u32 u32 u32", lambda a, b: b >> (a & 31)),
        "v_ashrrev_i32": ("i32 u32 i32", lambda a, b: b >> (a & 31)),
        "v_lshlrev_b32": ("u32 u32 u32", lambda a, b: b << (a & 31)),
        "v_and_b32": ("u32 u32 u32", lambda a, b: a & b),
        "v_or_b32": ("u32 u32 u32", lambda a, b: a | b),
        "v_xor_b32": ("u32 u32 u32", lambda a, b: a ^ b),
        "v_xnor_b32": ("u32 u32 u32", lambda a, b: ~(a ^ b)),
        "v_add_u32": ("u32 u32 u32", lambda a, b: a + b),
        "v_sub_u32": ("u32 u32 u32", lambda a, b: a - b),
        "v_subrev_u32": ("u32 u32 u32", lambda a, b: b - a),
        "v_add_u16": ("u16 u16 u16", lambda a, b: a + b),
        "v_sub_u16": ("u16 u16 u16", lambda a, b: a - b),
        "v_subrev_u16": ("u16 u16 u16", lambda a, b: b - a),
        "v_mul_lo_u16": ("u16 u16 u16", lambda a, b: a * b),
        "v_lshlrev_b16": ("u16 u16 u16", lambda a, b: b << (a & 15)),
        "v_lshrrev_b16": ("u16 u16 u16", lambda a, b: b >> (a & 15)),
        "v_ashrrev_i16": ("i16 u16 i16", lambda a, b: b >> (a & 15)),
        "v_max_u16": ("u16 u16 u16", max),
        "v_max_i16": ("i16 i16 i16", max),
        "v_min_u16": ("u16 u16 u16", min),
        "v_min_i16": ("i16 i16 i16", min),
    }
    for name, (types, function) in two.items():
        add(name, types, "2", function)
    add("v_ldexp_f16", "f16 f16 i16", "2", lambda a, b: ldexp(a, "f16", b))
    add(
        "v_mul_legacy_f32",
        "f32 f32 f32",
        "2",
        lambda a, b: 0
        if 0 in (a & 0x7FFFFFFF, b & 0x7FFFFFFF)
        else arithmetic("f32", lambda x, y: x * y, [a, b]),
    )
    one = {
        "v_mov_b32": ("u32 u32", lambda a: a),
        "v_not_b32": ("u32 u32", lambda a: ~a),
        "v_bfrev_b32": ("u32 u32", lambda a: reverse(a, 32)),
        "v_ffbh_u32": ("u32 u32", lambda a: leading(a, 32)),
        "v_ffbl_b32": ("u32 u32", trailing),
        "v_ffbh_i32": ("u32 u32", leading_signed),
        "v_cvt_i32_f64": ("i32 f64", lambda a: to_int(a, "f64", -(2**31), 2**31 - 1)),
        "v_cvt_u32_f64": ("u32 f64", lambda a: to_int(a, "f64", 0, M32)),
        "v_cvt_f64_i32": ("f64 i32", lambda a: round_to("f64", float(a))),
        "v_cvt_f64_u32": ("f64 u32", lambda a: round_to("f64", float(a))),
        "v_cvt_f32_i32": ("f32 i32", lambda a: round_to("f32", float(a))),
        "v_cvt_f32_u32": ("f32 u32", lambda a: round_to("f32", float(a))),
        "v_cvt_u32_f32": ("u32 f32", lambda a: to_int(a, "f32", 0, M32)),
        "v_cvt_i32_f32": ("i32 f32", lambda a: to_int(a, "f32", -(2**31), 2**31 - 1)),
        "v_cvt_f16_f32": ("f16 f32", lambda a: convert(a, "f32", "f16")),
        "v_cvt_f32_f16": ("f32 f16", lambda a: convert(a, "f16", "f32")),
        "v_cvt_f32_f64": ("f32 f64", lambda a: convert(a, "f64", "f32")),
        "v_cvt_f64_f32": ("f64 f32", lambda a: convert(a, "f32", "f64")),
        "v_cvt_f16_u16": ("f16 u16", lambda a: round_to("f16", float(a))),
        "v_cvt_f16_i16": ("f16 i16", lambda a: round_to("f16", float(a))),
        "v_cvt_u16_f16": ("u16 f16", lambda a: to_int(a, "f16", 0, 65535)),
        "v_cvt_i16_f16": ("i16 f16", lambda a: to_int(a, "f16", -32768, 32767)),
        "v_cvt_flr_i32_f32": (
            "i32 f32",
            lambda a: to_int(whole(a, "f32", math.floor), "f32", -(2**31), 2**31 - 1),
        ),
        "v_cvt_off_f32_i4": ("f32 u32", lambda a: round_to("f32", sx(a, 4) / 16)),
    }
    for i in range(4):
        one[f"v_cvt_f32_ubyte{i}"] = (
            "f32 u32",
            lambda a, i=i: round_to("f32", float(a >> 8 * i & 255)),
        )
    for kind in ("f16", "f32", "f64"):
        for name, rule in (
            ("trunc", math.trunc),
            ("ceil", math.ceil),
            ("floor", math.floor),
            ("rndne", round),
        ):
            one[f"v_{name}_{kind}"] = (
                f"{kind} {kind}",
                lambda a, k=kind, r=rule: whole(a, k, r),
            )
        exponent = "i16" if kind == "f16" else "i32"
        one[f"v_frexp_exp_{exponent}_{kind}"] = (
            f"{exponent} {kind}",
            lambda a, k=kind: frexp_exponent(a, k),
        )
        one[f"v_frexp_mant_{kind}"] = (
            f"{kind} {kind}",
            lambda a, k=kind: frexp_mantissa(a, k),
        )
    for name, (types, function) in one.items():
        add(name, types, "1", function)
    three = {
        "v_mad_i32_i24": ("i32 i32 i32 i32", lambda a, b, c: sx(a, 24) * sx(b, 24) + c),
        "v_mad_u32_u24": (
            "u32 u32 u32 u32",
            lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
        ),
        "v_bfe_u32": (
            "u32 u32 u32 u32",
            lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1),
        ),
        "v_bfe_i32": (
            "i32 u32 u32 u32",
            lambda a, b, c: field_signed(a, b & 31, c & 31),
        ),
        "v_bfi_b32": ("u32 u32 u32 u32", lambda a, b, c: (a & b) | (~a & c)),
        "v_alignbit_b32": (
            "u32 u32 u32 u32",
            lambda a, b, c: (a << 32 | b) >> (c & 31),
        ),
        "v_alignbyte_b32": (
            "u32 u32 u32 u32",
            lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
        ),
        "v_min3_i32": ("i32 i32 i32 i32", min),
        "v_max3_i32": ("i32 i32 i32 i32", max),
        "v_med3_i32": ("i32 i32 i32 i32", median),
        "v_min3_u32": ("u32 u32 u32 u32", min),
        "v_max3_u32": ("u32 u32 u32 u32", max),
        "v_med3_u32": ("u32 u32 u32 u32", median),
        "v_min3_i16": ("i16 i16 i16 i16", min),
        "v_max3_u16": ("u16 u16 u16 u16", max),
        "v_med3_i16": ("i16 i16 i16 i16", median),
        "v_sad_u8": (
            "u32 u32 u32 u32",
            lambda a, b, c: c
            + sum(abs(x - y) for x, y in zip(bytes_of(a), bytes_of(b))),
        ),
        "v_msad_u8": (
            "u32 u32 u32 u32",
            lambda a, b, c: c
            + sum(abs(x - y) for x, y in zip(bytes_of(a), bytes_of(b)) if y),
        ),
        "v_sad_u16": (
            "u32 u32 u32 u32",
            lambda a, b, c: c
            + abs((a & 0xFFFF) - (b & 0xFFFF))
            + abs((a >> 16) - (b >> 16)),
        ),
        "v_sad_u32": ("u32 u32 u32 u32", lambda a, b, c: c + abs(a - b)),
        "v_lerp_u8": (
            "u32 u32 u32 u32",
            lambda a, b, c: sum(
                (x + y + (z & 1) >> 1) << 8 * i
                for i, (x, y, z) in enumerate(
                    zip(bytes_of(a), bytes_of(b), bytes_of(c))
                )
            ),
        ),
        "v_perm_b32": ("u32 u32 u32 u32", perm),
        "v_mad_u32_u16": ("u32 u16 u16 u32", lambda a, b, c: a * b + c),
        "v_mad_i32_i16": ("i32 i16 i16 i32", lambda a, b, c: a * b + c),
        "v_mad_u16": ("u16 u16 u16 u16", lambda a, b, c: a * b + c),
        "v_mad_i16": ("i16 i16 i16 i16", lambda a, b, c: a * b + c),
        "v_mad_legacy_u16": ("u16 u16 u16 u16", lambda a, b, c: a * b + c),
        "v_xad_u32": ("u32 u32 u32 u32", lambda a, b, c: (a ^ b) + c),
        "v_lshl_add_u32": ("u32 u32 u32 u32", lambda a, b, c: (a << (b & 31)) + c),
        "v_add_lshl_u32": (
            "u32 u32 u32 u32",
            lambda a, b, c: (a + b & M32) << (c & 31),
        ),
        "v_add3_u32": ("u32 u32 u32 u32", lambda a, b, c: a + b + c),
        "v_lshl_or_b32": ("u32 u32 u32 u32", lambda a, b, c: (a << (b & 31)) | c),
        "v_and_or_b32": ("u32 u32 u32 u32", lambda a, b, c: (a & b) | c),
        "v_or3_b32": ("u32 u32 u32 u32", lambda a, b, c: a | b | c),
        "v_mul_lo_u32": ("u32 u32 u32", lambda a, b: a * b),
        "v_mul_hi_u32": ("u32 u32 u32", lambda a, b: a * b >> 32),
        "v_mul_hi_i32": ("i32 i32 i32", lambda a, b: a * b >> 32),
        "v_bcnt_u32_b32": ("u32 u32 u32", lambda a, b: bin(a).count("1") + b),
        "v_lshlrev_b64": ("u64 u32 u64", lambda a, b: b << (a & 63)),
        "v_lshrrev_b64": ("u64 u32 u64", lambda a, b: b >> (a & 63)),
        "v_ashrrev_i64": ("i64 u32 i64", lambda a, b: b >> (a & 63)),
        "v_bfm_b32": ("u32 u32 u32", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
        "v_cvt_pk_u16_u32": (
            "u32 u32 u32",
            lambda a, b: min(a, 65535) | min(b, 65535) << 16,
        ),
        "v_cvt_pk_i16_i32": (
            "u32 i32 i32",
            lambda a, b: (saturate(a, -32768, 32767) & 0xFFFF)
            | (saturate(b, -32768, 32767) & 0xFFFF) << 16,
        ),
        "v_cvt_pkrtz_f16_f32": (
            "u32 f32 f32",
            lambda a, b: (
                convert(a, "f32", "f16", 3) | convert(b, "f32", "f16", 3) << 16
            ),
        ),
        "v_add_i32": ("i32 i32 i32", lambda a, b: a + b),
        "v_sub_i32": ("i32 i32 i32", lambda a, b: a - b),
        "v_add_i16": ("i16 i16 i16", lambda a, b: a + b),
        "v_sub_i16": ("i16 i16 i16", lambda a, b: a - b),
        "v_pack_b32_f16": ("u32 u16 u16", lambda a, b: a | b << 16),
        "v_ldexp_f32": ("f32 f32 i32", lambda a, b: ldexp(a, "f32", b)),
        "v_ldexp_f64": ("f64 f64 i32", lambda a, b: ldexp(a, "f64", b)),
    }
    for name, (types, function) in three.items():
        add(name, types, "3", function)
    return t


# Instructions whose op_sel leaves the other half of D alone.
HALVES = {
    "v_fma_f16", "v_min3_f16", "v_max3_f16", "v_min3_i16", "v_max3_u16",
    "v_med3_i16", "v_mad_u16", "v_mad_i16", "v_add_i16", "v_sub_i16",
}  # fmt: skip
