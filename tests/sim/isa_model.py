"""An independent model of the vector instructions, one lane at a time.

Each entry of OPS gives an instruction's operand types, where it is encoded and
a function from operand bits to result bits, written from the manual's text on
top of isa_numbers.py; it shares nothing with csrc/sim. Modifiers, flushing of
denormals and write-back, which are the same for all, are in isa_valu.py.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import isa_numbers as n
from isa_numbers import M32, saturate, sx
from isa_ops import FLOATS, OPS, Env, clamped, ints, limits, op

# ---- float arithmetic ------------------------------------------------------


def mad(kind: str, legacy: bool = False) -> Callable[..., int]:
    """Two roundings; in f32 denormals are flushed at each step."""

    def call(e: Env, a: int, b: int, c: int) -> int:
        cut = n.flush if kind == "f32" else lambda x: x
        a, b, c = cut(a), cut(b), cut(c)
        mode = e.round(kind)
        zero = legacy and 0 in (a & 0x7FFFFFFF, b & 0x7FFFFFFF)
        product = 0 if zero else n.multiply(kind, mode, a, b)
        if any(n.is_nan(x, kind) for x in (a, b, c)) and not zero:
            return n.first_nan(kind, (a, b, c))
        return cut(n.add(kind, mode, cut(product), c))

    return call


def legacy_product(e: Env, a: int, b: int) -> int:
    if 0 in (a & 0x7FFFFFFF, b & 0x7FFFFFFF):
        return 0
    return n.multiply("f32", e.round("f32"), a, b)


def extreme(kind: str, largest: bool) -> Callable[..., int]:
    """min or max of two or three; a NaN result is the first NaN, quiet."""

    def call(e: Env, *x: int) -> int:
        result = x[0]
        for y in x[1:]:
            result = n.minimum(kind, e.ieee, result, y, largest)
        return n.first_nan(kind, x) if n.is_nan(result, kind) else result

    return call


def median(kind: str) -> Callable[..., int]:
    def call(e: Env, a: int, b: int, c: int) -> int:
        if any(n.is_nan(x, kind) for x in (a, b, c)):
            return extreme(kind, False)(e, a, b, c)
        top = extreme(kind, True)(e, a, b, c)
        value = n.to_float(top, kind)
        if value == n.to_float(a, kind):
            return n.minimum(kind, e.ieee, b, c, True)
        if value == n.to_float(b, kind):
            return n.minimum(kind, e.ieee, a, c, True)
        return n.minimum(kind, e.ieee, a, b, True)

    return call


def fraction_part(kind: str) -> Callable[..., int]:
    """x - floor(x), kept below one."""

    def call(e: Env, a: int) -> int:
        x = n.to_float(a, kind)
        if not math.isfinite(x):
            return n.first_nan(kind, [a])
        part = Fraction(x) - math.floor(Fraction(x))
        if part == 0:
            return n.sign_bit(kind) if e.round(kind) == 2 else 0
        return min(n.round_fraction(part, kind, e.round(kind)), n.ONE[kind] - 1)

    return call


def estimated(function: str, kind: str) -> Callable[..., int]:
    """Rounded to nearest whatever MODE says; f32 denormals flushed."""

    def call(e: Env, a: int) -> int:
        if kind != "f32":
            return n.estimate(function, a, kind)
        return n.flush(n.estimate(function, n.flush(a), kind))

    return call


def exponent(bits: int, kind: str) -> int:
    _, _, width, mantissa, _ = n.FORMATS[kind]
    return bits >> mantissa & ((1 << (width - 1 - mantissa)) - 1)


def div_scale(kind: str) -> Callable[..., tuple[int, int]]:
    """Scales a denominator b or numerator c, whichever a is."""
    by, near, tiny = (64, 96, 23) if kind == "f32" else (128, 768, 53)
    least = Fraction(2) ** (1 - n.FORMATS[kind][4])

    def small(top: float, bottom: float) -> bool:
        """Whether the quotient is a denormal (or zero)."""
        if top != top or bottom != bottom or math.isinf(top):
            return False
        return math.isinf(bottom) or abs(Fraction(top) / Fraction(bottom)) < least

    def call(e: Env, a: int, b: int, c: int) -> tuple[int, int]:
        d, x = n.to_float(b, kind), n.to_float(c, kind)
        power, post = 0, 0
        if d == 0 or x == 0:
            return n.first_nan(kind, (a, b, c)), 0
        if exponent(c, kind) - exponent(b, kind) >= near:
            power, post = by if a == b else 0, 1
        elif exponent(b, kind) == 0:
            power = by
        elif small(1.0, d) and small(x, d):
            power, post = -by if a == b else 0, 1
        elif small(1.0, d):
            power = -by
        elif small(x, d):
            power, post = by if a == c else 0, 1
        elif exponent(c, kind) <= tiny:
            power = by
        result = n.scale(a, kind, power, e.round(kind))
        return (n.first_nan(kind, (a, b, c)) if n.is_nan(a, kind) else result), post

    return call


def div_fmas(kind: str) -> Callable[..., int]:
    """Fused, and under VCC scaled back with one rounding."""
    by = 64 if kind == "f32" else 128

    def call(e: Env, a: int, b: int, c: int) -> int:
        mode = e.round(kind)
        x, y, z = (n.to_float(v, kind) for v in (a, b, c))
        result = n.fused(kind, mode, a, b, c)
        if not e.vcc or not math.isfinite(n.to_float(result, kind)):
            return result
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if exact == 0:
            return result
        up = abs(z) >= 2 if kind == "f64" else exponent(c, kind) > 127
        return n.round_fraction(exact * Fraction(2) ** (by if up else -by), kind, mode)

    return call


def div_fixup(kind: str) -> Callable[..., int]:
    """The special quotients of c / b; a is the estimate."""

    def call(e: Env, a: int, b: int, c: int) -> int:
        sign = (b ^ c) & n.sign_bit(kind)
        if n.is_nan(b, kind) or n.is_nan(c, kind):
            return n.first_nan(kind, (a, b, c))
        x, y = n.to_float(c, kind), n.to_float(b, kind)
        if (x == 0 and y == 0) or (math.isinf(x) and math.isinf(y)):
            return n.first_nan(kind, (a, b, c))
        if y == 0 or math.isinf(x):
            return sign | n.infinity(kind, False)
        if x == 0 or math.isinf(y):
            return sign
        if n.is_nan(a, kind):  # of numbers: an overflow
            return sign | n.infinity(kind, False)
        return a & (n.sign_bit(kind) - 1) | sign

    return call


for K in FLOATS:
    W = "3" if K == "f64" else "2"
    two, three = f"{K} {K} {K}", f"{K} {K} {K} {K}"
    op(f"v_add_{K}", two, W, lambda e, a, b, k=K: n.add(k, e.round(k), a, b))
    op(f"v_mul_{K}", two, W, lambda e, a, b, k=K: n.multiply(k, e.round(k), a, b))
    op(f"v_min_{K}", two, W, extreme(K, False))
    op(f"v_max_{K}", two, W, extreme(K, True))
    half = "half" if K == "f16" else ""
    op(f"v_fma_{K}", three, "3",
       lambda e, a, b, c, k=K: n.fused(k, e.round(k), a, b, c), half)  # fmt: skip
    op(f"v_div_fixup_{K}", three, "3", div_fixup(K), half)
    if K != "f64":
        op(f"v_sub_{K}", two, "2",
           lambda e, a, b, k=K: n.subtract(k, e.round(k), a, b))  # fmt: skip
        op(f"v_subrev_{K}", two, "2",
           lambda e, a, b, k=K: n.add(k, e.round(k), n.negate(k, a), b))  # fmt: skip
        op(f"v_min3_{K}", three, "3", extreme(K, False), half)
        op(f"v_max3_{K}", three, "3", extreme(K, True), half)
        op(f"v_med3_{K}", three, "3", median(K), half)
        op(f"v_mad_{K}", three, "3", mad(K), half)
        op(f"v_mac_{K}", three, "2", mad(K), "accumulate")
        op(f"v_madak_{K}", three, "2", mad(K), "k32")
        op(f"v_madmk_{K}", three, "2",
           lambda e, a, b, c, k=K: mad(k)(e, a, c, b), "k32")  # fmt: skip
    else:
        op(f"v_div_scale_{K}", three, "3", div_scale(K), "carry scaled")
        op(f"v_div_fmas_{K}", three, "3", div_fmas(K))
    op(f"v_fract_{K}", f"{K} {K}", "1", fraction_part(K))
    for NAME, RULE in (("trunc", math.trunc), ("ceil", math.ceil),
                       ("floor", math.floor), ("rndne", round)):  # fmt: skip
        ints(f"v_{NAME}_{K}", f"{K} {K}", "1", lambda a, k=K, r=RULE: n.whole(a, k, r))
    EXPONENT = "i16" if K == "f16" else "i32"
    ints(f"v_frexp_exp_{EXPONENT}_{K}", f"{EXPONENT} {K}", "1",
         lambda a, k=K: n.frexp_exponent(a, k))  # fmt: skip
    ints(f"v_frexp_mant_{K}", f"{K} {K}", "1", lambda a, k=K: n.frexp_mantissa(a, k))
    for NAME in ("rcp", "rsq", "sqrt", "exp", "log", "sin", "cos"):
        if K != "f64" or NAME in ("rcp", "rsq", "sqrt"):
            op(f"v_{NAME}_{K}", f"{K} {K}", "1", estimated(NAME, K))
op("v_rcp_iflag_f32", "f32 f32", "1", estimated("rcp", "f32"))
op("v_exp_legacy_f32", "f32 f32", "1", estimated("exp", "f32"))
op("v_log_legacy_f32", "f32 f32", "1", estimated("log", "f32"))
op("v_div_scale_f32", "f32 f32 f32 f32", "3", div_scale("f32"), "carry scaled")
op("v_div_fmas_f32", "f32 f32 f32 f32", "3", div_fmas("f32"))
op("v_mul_legacy_f32", "f32 f32 f32", "2", legacy_product)
op("v_mad_legacy_f32", "f32 f32 f32 f32", "3", mad("f32", True))
op("v_mad_legacy_f16", "f16 f16 f16 f16", "3", mad("f16"))
op("v_fma_legacy_f16", "f16 f16 f16 f16", "3",
   lambda e, a, b, c: n.fused("f16", e.round("f16"), a, b, c))  # fmt: skip
op("v_div_fixup_legacy_f16", "f16 f16 f16 f16", "3", div_fixup("f16"))
op("v_fmac_f32", "f32 f32 f32 f32", "2",
   lambda e, a, b, c: n.fused("f32", e.round("f32"), a, b, c),
   "accumulate")  # fmt: skip
for K, POWER, W in (("f16", "i16", "2"), ("f32", "i32", "3"), ("f64", "i32", "3")):
    op(f"v_ldexp_{K}", f"{K} {K} {POWER}", W,
       lambda e, a, b, k=K: n.scale(a, k, b, e.round(k)))  # fmt: skip

# ---- conversions -----------------------------------------------------------


def converts(target: str, source: str) -> None:
    name = f"v_cvt_{target}_{source}"
    types = f"{target} {source}"
    if source[0] != "f":
        op(name, types, "1", lambda e, a: n.round_to(target, float(a), e.round(target)))
    elif target[0] != "f":
        low, high = limits(target)
        ints(name, types, "1", lambda a: n.to_int(a, source, low, high))
    else:
        op(name, types, "1", lambda e, a: n.convert(a, source, target, e.round(target)))


for PAIR in ("f16 f32", "f32 f16", "f32 f64", "f64 f32", "f32 i32", "f32 u32",
             "f64 i32", "f64 u32", "f16 i16", "f16 u16", "i32 f32", "u32 f32",
             "i32 f64", "u32 f64", "i16 f16", "u16 f16"):  # fmt: skip
    converts(*PAIR.split())
for BYTE in range(4):
    ints(f"v_cvt_f32_ubyte{BYTE}", "f32 u32", "1",
         lambda a, i=BYTE: n.round_to("f32", float(a >> 8 * i & 255)))  # fmt: skip
ints("v_cvt_off_f32_i4", "f32 u32", "1", lambda a: n.round_to("f32", sx(a, 4) / 16))


def floor_int(bits: int) -> int:
    return n.to_int(n.whole(bits, "f32", math.floor), "f32", -(2**31), 2**31 - 1)


ints("v_cvt_flr_i32_f32", "i32 f32", "1", floor_int)
op("v_cvt_rpi_i32_f32", "i32 f32", "1",
   lambda e, a: floor_int(n.add("f32", e.round("f32"), a, 0x3F000000)))  # fmt: skip


def normalized(bits: int, kind: str, target: str) -> int:
    """Times the target's largest value, to nearest, within +- that."""
    most = limits(target)[1]
    x = n.to_float(bits, kind)
    if x != x:
        return 0
    x = min(max(x, -1.0 if target[0] == "i" else 0.0), 1.0)
    return round(Fraction(x) * most) & 0xFFFF


def pair(low: int, high: int) -> int:
    return low & 0xFFFF | (high & 0xFFFF) << 16


for T in ("i16", "u16"):
    ints(f"v_cvt_norm_{T}_f16", f"{T} f16", "1",
         lambda a, t=T: normalized(a, "f16", t))  # fmt: skip
    for K in ("f16", "f32"):
        ints(f"v_cvt_pknorm_{T}_{K}", f"u32 {K} {K}", "3",
             lambda a, b, t=T, k=K: pair(normalized(a, k, t), normalized(b, k, t)),
             "half" if K == "f16" else "")  # fmt: skip


def toward_zero(e: Env, *x: int) -> int:
    """Two halves, cut; clamp holds them within 0 and 1, a NaN gives 0."""

    def clamp(bits: int) -> int:
        number = n.to_float(bits, "f32")
        return 0 if not number > 0 else min(bits, n.ONE["f32"])

    values = [clamp(v) if e.clamp else v for v in x]
    return pair(*(n.convert(v, "f32", "f16", 3) for v in values))


op("v_cvt_pkrtz_f16_f32", "u32 f32 f32", "3", toward_zero, "clamped")
ints("v_cvt_pk_u16_u32", "u32 u32 u32", "3", lambda a, b: pair(*(
     min(x, 65535) for x in (a, b))))  # fmt: skip
ints("v_cvt_pk_i16_i32", "u32 i32 i32", "3", lambda a, b: pair(*(
     saturate(x, -32768, 32767) for x in (a, b))))  # fmt: skip
ints("v_sat_pk_u8_i16", "u16 u32", "1", lambda a: (
     saturate(sx(a, 16), 0, 255) | saturate(sx(a >> 16, 16), 0, 255) << 8))  # fmt: skip
ints("v_pack_b32_f16", "u32 u16 u16", "3", pair, "half signed")

# ---- integers --------------------------------------------------------------

ints("v_mov_b32", "u32 u32", "1", lambda a: a)
ints("v_not_b32", "u32 u32", "1", lambda a: ~a)
ints("v_bfrev_b32", "u32 u32", "1", lambda a: n.reverse(a, 32))
ints("v_ffbh_u32", "u32 u32", "1", lambda a: n.leading(a, 32))
ints("v_ffbl_b32", "u32 u32", "1", n.trailing)
ints("v_ffbh_i32", "u32 u32", "1", n.leading_signed)
for NAME, F in (("and", lambda a, b: a & b), ("or", lambda a, b: a | b),
                ("xor", lambda a, b: a ^ b),
                ("xnor", lambda a, b: ~(a ^ b))):  # fmt: skip
    ints(f"v_{NAME}_b32", "u32 u32 u32", "2", F)
op("v_cndmask_b32", "u32 u32 u32 mask", "2", lambda e, a, b, c: b if c else a, "signed")
ints("v_mul_i32_i24", "i32 i32 i32", "2", lambda a, b: sx(a, 24) * sx(b, 24))
ints("v_mul_hi_i32_i24", "i32 i32 i32", "2", lambda a, b: sx(a, 24) * sx(b, 24) >> 32)
LOW24 = 0xFFFFFF
ints("v_mul_u32_u24", "u32 u32 u32", "2", lambda a, b: (a & LOW24) * (b & LOW24))
ints("v_mul_hi_u32_u24", "u32 u32 u32", "2",
     lambda a, b: (a & LOW24) * (b & LOW24) >> 32)  # fmt: skip
clamped("v_mad_i32_i24", "i32 i32 i32 i32", "3",
        lambda a, b, c: sx(a, 24) * sx(b, 24) + c)  # fmt: skip
clamped("v_mad_u32_u24", "u32 u32 u32 u32", "3",
        lambda a, b, c: (a & LOW24) * (b & LOW24) + c)  # fmt: skip
for T in ("i16", "u16", "i32", "u32"):
    W, half = ("3", "half") if T[1:] == "16" else ("3", "")
    ints(f"v_min_{T}", f"{T} {T} {T}", "2", min)
    ints(f"v_max_{T}", f"{T} {T} {T}", "2", max)
    ints(f"v_min3_{T}", f"{T} {T} {T} {T}", "3", min, half)
    ints(f"v_max3_{T}", f"{T} {T} {T} {T}", "3", max, half)
    ints(f"v_med3_{T}", f"{T} {T} {T} {T}", "3", lambda *x: sorted(x)[1], half)
for B, MASK in ((16, 15), (32, 31), (64, 63)):
    W = "3" if B == 64 else "2"
    SHIFT = "u32" if B == 64 else f"u{B}"
    ints(f"v_lshlrev_b{B}", f"u{B} {SHIFT} u{B}", W, lambda a, b, m=MASK: b << (a & m))
    ints(f"v_lshrrev_b{B}", f"u{B} {SHIFT} u{B}", W, lambda a, b, m=MASK: b >> (a & m))
    ints(f"v_ashrrev_i{B}", f"i{B} {SHIFT} i{B}", W, lambda a, b, m=MASK: b >> (a & m))
for T in ("u16", "u32"):
    clamped(f"v_add_{T}", f"{T} {T} {T}", "2", lambda a, b: a + b)
    clamped(f"v_sub_{T}", f"{T} {T} {T}", "2", lambda a, b: a - b)
    clamped(f"v_subrev_{T}", f"{T} {T} {T}", "2", lambda a, b: b - a)
for T in ("i16", "i32"):
    half = "half" if T == "i16" else ""
    clamped(f"v_add_{T}", f"{T} {T} {T}", "3", lambda a, b: a + b, half)
    clamped(f"v_sub_{T}", f"{T} {T} {T}", "3", lambda a, b: a - b, half)
ints("v_mul_lo_u16", "u16 u16 u16", "2", lambda a, b: a * b)
for T in ("u16", "i16"):
    ints(f"v_mad_legacy_{T}", f"{T} {T} {T} {T}", "3", lambda a, b, c: a * b + c)
    clamped(f"v_mad_{T}", f"{T} {T} {T} {T}", "3", lambda a, b, c: a * b + c, "half")
ints("v_mad_u32_u16", "u32 u16 u16 u32", "3", lambda a, b, c: a * b + c, "half")
ints("v_mad_i32_i16", "i32 i16 i16 i32", "3", lambda a, b, c: a * b + c, "half")


def carrying(name: str, function: Callable[..., int], takes: bool) -> None:
    """D and a carry per lane; saturates under clamp."""

    def call(e: Env, a: int, b: int, c: int = 0) -> tuple[int, int]:
        total = function(a, b, c)
        result = saturate(total, 0, M32) if e.clamp else total
        return result, int(not 0 <= total <= M32)

    types = "u32 u32 u32" + (" mask" if takes else "")
    op(name, types, "2", call, "carry clamped")


carrying("v_add_co_u32", lambda a, b, c: a + b, False)
carrying("v_sub_co_u32", lambda a, b, c: a - b, False)
carrying("v_subrev_co_u32", lambda a, b, c: b - a, False)
carrying("v_addc_co_u32", lambda a, b, c: a + b + c, True)
carrying("v_subb_co_u32", lambda a, b, c: a - b - c, True)
carrying("v_subbrev_co_u32", lambda a, b, c: b - a - c, True)


def wide_mad(low: int, high: int) -> Callable[..., tuple[int, int]]:
    def call(e: Env, a: int, b: int, c: int) -> tuple[int, int]:
        total = a * b + c
        return total, int(not low <= total <= high)

    return call


op("v_mad_u64_u32", "u64 u32 u32 u64", "3", wide_mad(0, n.M64), "carry")
op("v_mad_i64_i32", "i64 i32 i32 i64", "3", wide_mad(-(2**63), 2**63 - 1), "carry")
THREE = {
    "v_bfe_u32": lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1),
    "v_bfe_i32": lambda a, b, c: n.field(a, b & 31, c & 31, 32, True),
    "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_perm_b32": n.permute,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b & M32) << (c & 31),
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_sad_u32": lambda a, b, c: c + abs(a - b),
    "v_sad_u16": lambda a, b, c: c + sum(
        abs((a >> s & 0xFFFF) - (b >> s & 0xFFFF)) for s in (0, 16)),
    "v_sad_u8": lambda a, b, c: c + byte_distance(a, b),
    "v_sad_hi_u8": lambda a, b, c: c + (byte_distance(a, b) << 16),
    "v_msad_u8": lambda a, b, c: c + byte_distance(a, b, True),
    "v_lerp_u8": lambda a, b, c: sum(
        (x + y + (z & 1) >> 1) << 8 * i for i, (x, y, z) in
        enumerate(zip(n.bytes_of(a), n.bytes_of(b), n.bytes_of(c)))),
}  # fmt: skip
TWO = {
    "v_mul_lo_u32": ("u32", lambda a, b: a * b),
    "v_mul_hi_u32": ("u32", lambda a, b: a * b >> 32),
    "v_mul_hi_i32": ("i32", lambda a, b: a * b >> 32),
    "v_bcnt_u32_b32": ("u32", lambda a, b: n.count(a) + b),
    "v_bfm_b32": ("u32", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
}


def byte_distance(a: int, b: int, masked: bool = False) -> int:
    """Sum over the bytes; with `masked` without those where b is zero."""
    return sum(
        abs(x - y) for x, y in zip(n.bytes_of(a), n.bytes_of(b)) if y or not masked
    )


for NAME, FUNCTION in THREE.items():
    ints(NAME, "u32 u32 u32 u32", "3", FUNCTION)
for NAME, (T, F) in TWO.items():
    ints(NAME, f"{T} {T} {T}", "3", F)
for NAME, SHIFT in (("lo", 0), ("hi", 32)):
    op(f"v_mbcnt_{NAME}_u32_b32", "u32 u32 u32", "3",
       lambda e, a, b, s=SHIFT:
       n.count(a & ((1 << e.lane) - 1) >> s & M32) + b)  # fmt: skip

# ---- packed and mixed ------------------------------------------------------

for BASE in ("mad_i16 mul_lo_u16 add_i16 sub_i16 lshlrev_b16 lshrrev_b16 ashrrev_i16 "
             "max_i16 min_i16 mad_u16 add_u16 sub_u16 max_u16 min_u16 fma_f16 add_f16 "
             "mul_f16 min_f16 max_f16").split():  # fmt: skip
    single = OPS[f"v_{BASE}"]
    FLAGS = " ".join(single.flags | {"packed"})
    op(f"v_pk_{BASE}", " ".join(single.types), "P", single.function, FLAGS)


def mixed(e: Env, a: int, b: int, c: int) -> int:
    return n.fused("f32", e.round("f32"), a, b, c)


def mixed_half(e: Env, a: int, b: int, c: int) -> int:
    """Rounded to float and again to half, each as MODE says for it."""
    return n.convert(
        n.fused("f32", e.round("f16"), a, b, c), "f32", "f16", e.round("f16")
    )


op("v_fma_mix_f32", "f32 mix mix mix", "P", mixed)
op("v_fma_mixlo_f16", "f16 mix mix mix", "P", mixed_half, "low")
op("v_fma_mixhi_f16", "f16 mix mix mix", "P", mixed_half, "high")


def dot2(e: Env, a: int, b: int, c: int) -> int:
    """Low product first, each sum rounded, denormals flushed."""
    total = n.flush(c)
    if n.is_nan(c, "f32"):
        return n.quiet(c, "f32")
    for shift in (0, 16):
        x, y = a >> shift & 0xFFFF, b >> shift & 0xFFFF
        if n.is_nan(x, "f16") or n.is_nan(y, "f16"):
            return n.QUIET["f32"]
        product = n.multiply("f32", 0, *(n.convert(v, "f16", "f32") for v in (x, y)))
        total = n.flush(n.add("f32", e.round("f32"), total, product))
    return n.QUIET["f32"] if n.is_nan(total, "f32") else total


op("v_dot2_f32_f16", "f32 pkf pkf f32", "P", dot2)


def integer_dot(bits: int, signed: bool) -> Callable[..., int]:
    def call(a: int, b: int, c: int) -> int:
        parts = [
            (n.field(a, i, bits, 32, signed), n.field(b, i, bits, 32, signed))
            for i in range(0, 32, bits)
        ]
        return sum(x * y for x, y in parts) + c

    return call


for COUNT, BITS in ((2, 16), (4, 8), (8, 4)):
    for S in ("i", "u"):
        PACKED = "pk" if BITS == 16 else "raw"
        clamped(f"v_dot{COUNT}_{S}32_{S}{BITS}", f"{S}32 {PACKED} {PACKED} {S}32", "P",
                integer_dot(BITS, S == "i"))  # fmt: skip

# ---- compares --------------------------------------------------------------

FLOAT_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "f": lambda a, b: False, "lt": lambda a, b: a < b, "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "lg": lambda a, b: a < b or a > b, "ge": lambda a, b: a >= b,
    "o": lambda a, b: a == a and b == b, "u": lambda a, b: a != a or b != b,
    "nge": lambda a, b: not a >= b, "nlg": lambda a, b: not (a < b or a > b),
    "ngt": lambda a, b: not a > b, "nle": lambda a, b: not a <= b,
    "neq": lambda a, b: not a == b, "nlt": lambda a, b: not a < b,
    "tru": lambda a, b: True,
}  # fmt: skip
INTEGER_RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "f": lambda a, b: False, "lt": lambda a, b: a < b, "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b, "t": lambda a, b: True,
}  # fmt: skip
for X in ("cmp", "cmpx"):
    for K in FLOATS:
        for NAME, R in FLOAT_RELATIONS.items():
            op(f"v_{X}_{NAME}_{K}", f"mask {K} {K}", "C", lambda e, a, b, k=K, r=R:
               r(n.to_float(a, k), n.to_float(b, k)))  # fmt: skip
        ints(f"v_{X}_class_{K}", f"mask {K} u32", "C",
             lambda a, b, k=K: n.classify(a, k, b))  # fmt: skip
    for T in ("i16", "u16", "i32", "u32", "i64", "u64"):
        for NAME, R in INTEGER_RELATIONS.items():
            ints(f"v_{X}_{NAME}_{T}", f"mask {T} {T}", "C", R)
