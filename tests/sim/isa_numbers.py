"""Numbers of the instruction model: bits, exact fractions, roundings.

Written from the manual's text with Python integers, fractions, decimals and
struct; it shares nothing with csrc/sim. Floats are bits plus the name of their
format; modes of rounding are MODE's: 0 nearest even, 1 up, 2 down, 3 toward zero.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import decimal
import math
import struct
from collections.abc import Callable, Sequence
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
ONE = {"f16": 0x3C00, "f32": 0x3F800000, "f64": 0x3FF0000000000000}


# ---- bits and numbers ------------------------------------------------------


def sx(x: int, bits: int) -> int:
    """x's low bits as a signed number."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def saturate(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def sign_bit(kind: str) -> int:
    return 1 << (FORMATS[kind][2] - 1)


def to_float(bits: int, kind: str) -> float:
    """The number with these bits (a Python float holds all three kinds)."""
    code, integer, *_ = FORMATS[kind]
    return struct.unpack("<" + code, struct.pack("<" + integer, bits))[0]


def infinity(kind: str, negative: bool) -> int:
    _, _, width, mantissa, _ = FORMATS[kind]
    return negative << (width - 1) | ((1 << (width - 1 - mantissa)) - 1) << mantissa


def is_nan(bits: int, kind: str) -> bool:
    return bits & (sign_bit(kind) - 1) > infinity(kind, False)


def is_signalling(bits: int, kind: str) -> bool:
    return is_nan(bits, kind) and not bits >> (FORMATS[kind][3] - 1) & 1


def is_denormal(bits: int, kind: str) -> bool:
    """A denormal number; zero is none."""
    return 0 < bits & (sign_bit(kind) - 1) < 1 << FORMATS[kind][3]


def flush(bits: int, kind: str = "f32") -> int:
    """Denormals to zero of the same sign."""
    return bits & sign_bit(kind) if is_denormal(bits, kind) else bits


def quiet(bits: int, kind: str) -> int:
    return bits | 1 << (FORMATS[kind][3] - 1)


def first_nan(kind: str, sources: Sequence[int]) -> int:
    """The first NaN made quiet, else the default one."""
    for bits in sources:
        if is_nan(bits, kind):
            return quiet(bits, kind)
    return QUIET[kind]


# ---- rounding --------------------------------------------------------------


def round_fraction(x: Fraction, kind: str, mode: int = 0) -> int:
    """Bits of x rounded once."""
    _, _, width, mantissa, bias = FORMATS[kind]
    negative = x < 0
    top, bottom = abs(x.numerator), x.denominator
    if top == 0:
        return 0
    exponent = top.bit_length() - bottom.bit_length()
    if top << max(-exponent, 0) < bottom << max(exponent, 0):
        exponent -= 1
    exponent = max(exponent, 1 - bias)
    shift = mantissa - exponent
    whole, rest = divmod(top << max(shift, 0), bottom << max(-shift, 0))
    rest *= 2
    unit = bottom << max(-shift, 0)
    if mode == 0:
        whole += rest > unit or (rest == unit and whole & 1)
    elif (mode == 1 and not negative) or (mode == 2 and negative):
        whole += rest > 0
    if whole >> (mantissa + 1):
        whole, exponent = whole >> 1, exponent + 1
    if exponent > bias:
        grows = mode == 0 or (mode == 1 and not negative) or (mode == 2 and negative)
        most = infinity(kind, False)
        return negative << (width - 1) | (most if grows else most - 1)
    field = exponent + bias - 1 if whole >> mantissa else 0
    return negative << (width - 1) | ((field << mantissa) + whole)


def round_to(kind: str, x: float, mode: int = 0) -> int:
    """A float64 in the target format."""
    if x != x:
        return QUIET[kind]
    if math.isinf(x):
        return infinity(kind, x < 0)
    if x == 0:
        return (math.copysign(1.0, x) < 0) << (FORMATS[kind][2] - 1)
    return round_fraction(Fraction(x), kind, mode)


def convert(bits: int, source: str, target: str, mode: int = 0) -> int:
    """Float to float; a NaN keeps sign and leading payload, and is quiet."""
    if is_nan(bits, source):
        shift = FORMATS[target][3] - FORMATS[source][3]
        mantissa = bits & ((1 << FORMATS[source][3]) - 1)
        payload = mantissa << shift if shift > 0 else mantissa >> -shift
        sign = bits >> (FORMATS[source][2] - 1)
        return quiet(infinity(target, bool(sign)) | payload, target)
    return round_to(target, to_float(bits, source), mode)


def to_int(bits: int, kind: str, low: int, high: int) -> int:
    """Toward zero, kept within the range; NaN is zero."""
    if is_nan(bits, kind):
        return 0
    x = to_float(bits, kind)
    if math.isinf(x):
        return high if x > 0 else low
    return saturate(math.trunc(x), low, high)


def whole(bits: int, kind: str, rule: Callable[[Fraction], int]) -> int:
    """Rounding to an integral float; the sign of zero follows the source."""
    if is_nan(bits, kind):
        return quiet(bits, kind)
    x = to_float(bits, kind)
    if math.isinf(x):
        return bits
    out = round_fraction(Fraction(rule(Fraction(x))), kind)
    return out | (bits & sign_bit(kind) if out == 0 else 0)


# ---- arithmetic ------------------------------------------------------------


def special(kind: str, x: float) -> int:
    """A zero, an infinity or a NaN."""
    return round_to(kind, x)


def add(kind: str, mode: int, a: int, b: int) -> int:
    """a + b rounded once."""
    if is_nan(a, kind) or is_nan(b, kind):
        return first_nan(kind, (a, b))
    x, y = to_float(a, kind), to_float(b, kind)
    if math.isinf(x) or math.isinf(y):
        return special(kind, x + y)
    total = Fraction(x) + Fraction(y)
    if total:
        return round_fraction(total, kind, mode)
    if a == b:  # zeros of one sign
        return a
    return sign_bit(kind) if mode == 2 else 0


def multiply(kind: str, mode: int, a: int, b: int) -> int:
    if is_nan(a, kind) or is_nan(b, kind):
        return first_nan(kind, (a, b))
    x, y = to_float(a, kind), to_float(b, kind)
    if math.isinf(x) or math.isinf(y):
        return special(kind, x * y)
    return (
        round_fraction(Fraction(x) * Fraction(y), kind, mode)
        or (a ^ b) & sign_bit(kind)
        if x and y
        else (a ^ b) & sign_bit(kind)
    )


def fused(kind: str, mode: int, a: int, b: int, c: int) -> int:
    """a * b + c rounded once."""
    if any(is_nan(v, kind) for v in (a, b, c)):
        return first_nan(kind, (a, b, c))
    x, y, z = (to_float(v, kind) for v in (a, b, c))
    if math.isinf(x) or math.isinf(y):
        return special(kind, x * y + z)
    if math.isinf(z):
        return c
    total = Fraction(x) * Fraction(y) + Fraction(z)
    if total:
        return round_fraction(total, kind, mode)
    if z == 0 and (a ^ b ^ c) & sign_bit(kind) == 0:
        return c
    return sign_bit(kind) if mode == 2 else 0


def negate(kind: str, a: int) -> int:
    return a if is_nan(a, kind) else a ^ sign_bit(kind)


def subtract(kind: str, mode: int, a: int, b: int) -> int:
    return add(kind, mode, a, negate(kind, b))


def minimum(kind: str, ieee: bool, a: int, b: int, largest: bool) -> int:
    """The number if one is NaN; -0 < +0; with IEEE a signalling NaN wins."""
    if ieee and (is_signalling(a, kind) or is_signalling(b, kind)):
        return quiet(a if is_signalling(a, kind) else b, kind)
    if is_nan(b, kind):
        return a
    if is_nan(a, kind):
        return b

    def order(bits: int) -> tuple[float, int]:
        return to_float(bits, kind), -(bits >> (FORMATS[kind][2] - 1))

    first = order(a) > order(b) if largest else order(a) < order(b)
    return a if first else b


def scale(bits: int, kind: str, power: int, mode: int = 0) -> int:
    """bits times two to the power, rounded once."""
    x = to_float(bits, kind)
    if x != x or math.isinf(x) or x == 0:
        return first_nan(kind, [bits]) if x != x else bits
    factor = Fraction(2) ** saturate(power, -5000, 5000)
    result = round_fraction(Fraction(x) * factor, kind, mode)
    return result | bits & sign_bit(kind)


def divide(a: int, b: int, kind: str) -> int:
    """a / b rounded once; which NaN a NaN is, is left open."""
    x, y = to_float(a, kind), to_float(b, kind)
    sign = (a ^ b) & sign_bit(kind)
    if x != x or y != y or (x == y == 0) or (math.isinf(x) and math.isinf(y)):
        return QUIET[kind]
    if y == 0 or math.isinf(x):
        return sign | infinity(kind, False)
    if x == 0 or math.isinf(y):
        return sign
    return round_fraction(Fraction(x) / Fraction(y), kind) | sign


def classify(bits: int, kind: str, mask: int) -> int:
    """v_cmp_class: which of the ten kinds of number the mask names."""
    negative = bits >> (FORMATS[kind][2] - 1)
    x = to_float(bits, kind)
    if is_nan(bits, kind):
        bit = 0 if is_signalling(bits, kind) else 1
    elif math.isinf(x):
        bit = 2 if negative else 9
    elif x == 0:
        bit = 5 if negative else 6
    elif is_denormal(bits, kind):
        bit = 4 if negative else 7
    else:
        bit = 3 if negative else 8
    return mask >> bit & 1


def frexp_exponent(bits: int, kind: str) -> int:
    x = to_float(bits, kind)
    return math.frexp(x)[1] if math.isfinite(x) else 0


def frexp_mantissa(bits: int, kind: str) -> int:
    if is_nan(bits, kind):
        return quiet(bits, kind)
    x = to_float(bits, kind)
    return round_to(kind, math.frexp(x)[0]) if math.isfinite(x) else bits


# ---- estimates, from forty decimal digits ----------------------------------

CONTEXT = decimal.Context(prec=60, Emin=-99999, Emax=99999)
PI = decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494")


def series(x: decimal.Decimal, first: int) -> decimal.Decimal:
    """sin (first 1) or cos (first 0) of a small angle."""
    term = x if first else decimal.Decimal(1)
    total = decimal.Decimal(0)
    n = first
    while abs(term) > decimal.Decimal("1e-50"):
        total += term
        term = -term * x * x / ((n + 1) * (n + 2))
        n += 2
    return total


def turns(x: Fraction, first: int) -> decimal.Decimal:
    """sin or cos of x whole turns."""
    quarter = math.floor(x * 4 + Fraction(1, 2))
    rest = x - Fraction(quarter, 4)
    angle = 2 * PI * decimal.Decimal(rest.numerator) / decimal.Decimal(rest.denominator)
    which = (quarter + (0 if first else 1)) % 4
    value = series(angle, 1 - which % 2)
    return -value if which >= 2 else value


def estimate(function: str, bits: int, kind: str) -> int:
    """exp (of 2), log (to 2), rcp, rsq, sqrt, sin or cos, rounded to nearest."""
    x = to_float(bits, kind)
    if is_nan(bits, kind):
        return quiet(bits, kind)
    poles: dict[str, dict[float, float]] = {
        "exp": {math.inf: math.inf, -math.inf: 0.0},
        "log": {0.0: -math.inf, math.inf: math.inf},
        "rcp": {math.inf: 0.0, -math.inf: -0.0, 0.0: math.copysign(math.inf, x)},
        "rsq": {math.inf: 0.0, 0.0: math.copysign(math.inf, x)},
        "sqrt": {math.inf: math.inf, 0.0: x},
        "sin": {math.inf: math.nan, -math.inf: math.nan, 0.0: x},
        "cos": {math.inf: math.nan, -math.inf: math.nan},
    }
    if x in poles[function]:
        return special(kind, poles[function][x])
    if x < 0 and function in ("log", "rsq", "sqrt"):
        return QUIET[kind]
    if function == "exp" and abs(x) > 3000:
        return infinity(kind, False) if x > 0 else 0
    with decimal.localcontext(CONTEXT):
        number = decimal.Decimal(x)
        value: Any
        if function == "exp":
            value = decimal.Decimal(2) ** number
        elif function == "log":
            value = number.ln() / decimal.Decimal(2).ln()
        elif function in ("sin", "cos"):
            value = turns(Fraction(x), 1 if function == "sin" else 0)
        else:
            value = number.sqrt() if function != "rcp" else number
            value = value if function == "sqrt" else 1 / value
    if function == "rcp":
        return round_fraction(1 / Fraction(x), kind)
    return round_fraction(Fraction(value), kind)


# ---- integers --------------------------------------------------------------


def leading(x: int, width: int) -> int:
    """Zeros above the highest set bit, or -1."""
    return M32 if x == 0 else width - x.bit_length()


def leading_signed(x: int, width: int = 32) -> int:
    """Copies of the sign bit at the top, or -1 if there is nothing else."""
    return leading(x ^ ((1 << width) - 1) if x >> (width - 1) else x, width)


def trailing(x: int) -> int:
    return M32 if x == 0 else (x & -x).bit_length() - 1


def reverse(x: int, width: int) -> int:
    return int(f"{x:0{width}b}"[::-1], 2)


def count(x: int) -> int:
    return bin(x).count("1")


def bytes_of(x: int) -> list[int]:
    return [x >> i & 255 for i in (0, 8, 16, 24)]


def field(a: int, offset: int, width: int, bits: int, signed: bool) -> int:
    """`width` bits of a from `offset` on; a has `bits` bits."""
    width = min(width, bits - offset)
    if width <= 0:
        return 0
    return sx(a >> offset, width) if signed else a >> offset & ((1 << width) - 1)


def permute(a: int, b: int, select: int) -> int:
    """v_perm_b32: selector 0-3 bytes of b, 4-7 of a, 8-11 signs of the odd
    bytes' words, 12 zero, above 0xff."""
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


def two_over_pi(bits: int) -> int:
    """floor(2 / pi * 2 ** bits), by the mean of Gauss and Legendre."""
    one = 1 << (bits + 64)
    a, b, t, power = one, math.isqrt(one * one // 2), one // 4, 1
    for _ in range(12):
        mean = (a + b) // 2
        b = math.isqrt(a * b)
        t -= power * (a - mean) ** 2 // one
        a, power = mean, 2 * power
    pi = (a + b) ** 2 // (4 * t)
    return 2 * one * (1 << bits) // pi
