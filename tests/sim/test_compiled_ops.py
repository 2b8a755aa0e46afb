"""C expressions of every type as compilers translate them, against the host.

One list of expressions becomes kernels for gfx906 and, from the same text, a
shared library for the host; both get the same operands.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

import hipsim
from hipsim import Buffer

FULL = os.environ.get("FA_TEST") == "full"
COUNT = 256  # operands of each expression
FLAGS = ("-fwrapv", "-ffp-contract=off")

TYPES = """
typedef unsigned u32; typedef int i32; typedef unsigned long long u64;
typedef long long i64; typedef unsigned short u16; typedef short i16;
typedef unsigned char u8; typedef signed char i8; typedef float f32;
typedef double f64; typedef _Float16 f16;
#define VECTOR(type, n) type __attribute__((ext_vector_type(n)))
typedef VECTOR(f16, 2) f16x2; typedef VECTOR(i16, 2) i16x2;
typedef VECTOR(u16, 2) u16x2; typedef VECTOR(f32, 4) f32x4;
typedef VECTOR(u8, 4) u8x4; typedef VECTOR(u32, 3) u32x3;
#define BITS(type) (sizeof(type) * 8 - 1)
#define NOT_MINUS_1(y) ((y) + 1 == 0 ? 3 : (y) == 0 ? 7 : (y))
#define HELD(x, low, high) ((x) > (low) ? (x) < (high) ? (x) : (high) : (low))
"""

INTEGERS = {
    "sum": "x + y * z",
    "quotient": "x / NOT_MINUS_1(y)",
    "remainder": "x % NOT_MINUS_1(y)",
    "left": "x << (y & BITS(T))",
    "right": "x >> (y & BITS(T))",
    "select": "(x & y) | (~x & z)",
    "xor": "(x ^ y) + ~z",
    "median": "x < y ? (y < z ? y : x < z ? z : x) : x < z ? x : y < z ? z : y",
    "compare": "(x == y) + (x < z) * 2 + (y >= z) * 4 + (x != z) * 8",
    "distance": "x > y ? x - y : y - x",
    "high": "(T)(((__int128)x * y) >> 64) + (T)(((__int128)x * z) >> (BITS(T) + 1))",
    "bytes": "(u8)x * (u8)(y >> 8 % BITS(T)) + (i8)(z >> 3) + (u16)x + (i16)y",
    "count": "__builtin_popcountll((u64)x) + __builtin_clzll((u64)y | 1) * 3"
    " + __builtin_ctzll((u64)z | 1ull << 63) * 5 + __builtin_ffsll((i64)x) * 7"
    " + __builtin_parityll((u64)y)",
    "turn": "(T)__builtin_bswap64((u64)x) ^ (T)__builtin_bitreverse64((u64)y)"
    " ^ (T)__builtin_bitreverse32((u32)z) ^ (T)__builtin_bswap32((u32)x)",
    "overflow": "([](T a, T b) { T r; return (T)(__builtin_add_overflow(a, b, &r)"
    " + 2 * __builtin_sub_overflow(a, b, &r) + 4 * __builtin_mul_overflow(a, b, &r)"
    " + r); })(x, y)",
    "rotate": "(T)(((u64)x << 7) | ((u64)y >> 57)) + (T)(z << 3 | (z >> 5 & 7))",
    "float": "(T)(i32)HELD((f32)x * 0.5f, -100.0f, 100.0f) + (T)(i32)((f64)y / 1e18)",
    "switch": "([](T a, T b) -> T { switch ((u32)a & 15) { case 0: return b * 3;"
    " case 1: return b / 7; case 2: return b ^ 55; case 3: return b - a;"
    " case 4: return ~b; case 5: return b % 11; case 6: return a; case 7: return 9;"
    " case 11: return b & a; default: return 1; } })(x, y)",
    "wide": "(T)((unsigned __int128)((u64)x | (__int128)(u64)y << 64)"
    " / ((u64)z | 1)) + (T)((__int128)(u64)y * (i64)z % 1000003)",
}
SATURATING = {
    "saturate": "__builtin_elementwise_add_sat(x, y)"
    " ^ __builtin_elementwise_sub_sat(z, x)",
    "funnel": "__builtin_elementwise_fshl((U)x, (U)y, (U)z)"
    " ^ __builtin_elementwise_fshr((U)z, (U)x, (U)y)",
}
FLOATS = {
    "sum": "x + y * z",
    "quotient": "x / y",
    "reciprocal": "(T)1 / x",
    "root": "__builtin_elementwise_sqrt(x < 0 ? -x : x)",
    "fused": "__builtin_elementwise_fma(x, y, z)",
    "least": "__builtin_elementwise_min(x, y)",
    "most": "__builtin_elementwise_max(__builtin_elementwise_max(x, y), z)",
    "whole": "__builtin_elementwise_floor(x) + __builtin_elementwise_ceil(y)"
    " - __builtin_elementwise_trunc(z) + __builtin_elementwise_rint(x)",
    "round": "__builtin_elementwise_round(x) - __builtin_elementwise_roundeven(y)",
    "signs": "-__builtin_elementwise_copysign(x, y) - __builtin_elementwise_abs(z)",
    "kinds": "__builtin_isnan(x) + 2 * __builtin_isinf(y) + 4 * __builtin_isfinite(z)"
    " + 8 * __builtin_isnormal(x) + 16 * !!__builtin_signbit(y)",
    "compare": "(x < y) + 2 * (x <= z) + 4 * (y == z) + 8 * (x != z) + 16 * (x >= y)"
    " + 32 * __builtin_isunordered(x, y) + 64 * __builtin_islessgreater(x, z)",
    "clamp": "__builtin_elementwise_min(__builtin_elementwise_max(x * y, (T)0), (T)1)",
    "to_integers": "(T)(i32)HELD(x, (T)-30000, (T)30000) + (T)(u32)HELD(y, 0, (T)60000)"
    " + (T)(i64)HELD(z, (T)-65000, (T)65000) + (T)(u64)HELD(x, 0, (T)65000)"
    " + (T)(i16)HELD(y, (T)-30000, (T)30000) + (T)(u8)HELD(z, 0, (T)255)",
    "from_integers": "(T)__builtin_bit_cast(I, x) + (T)(U)__builtin_bit_cast(I, y)"
    " + (T)(u8)__builtin_bit_cast(I, z) + (T)(i16)__builtin_bit_cast(I, x)"
    " + (T)(x == x)",
    "convert": "(T)(f16)x + (T)(f32)y + (T)(f64)z",
    "scale": "x * (T)4 - y * (T)0.5 + z * (T)8",
    "steps": "([](T a, T b) { T r = a; for (int i = 0; i < 9; i++) {"
    " r = r < b ? r + a : r - b * (T)0.25; } return r; })(x, y)",
}
VECTORS = {
    "sum": "x + y * z",
    "least": "__builtin_elementwise_max(__builtin_elementwise_min(x, y), z)",
}
PAIRS = {"cross": "x * y.yx - z", "halves": "(T){x.y, y.x} + (T){z.x, z.x}"}
SHIFTS = {"shift": "(x >> (y & (T)15)) + (z << (x & (T)15))", "negate": "-x - y"}

NOT_IN_CLANG_15 = ("wide", "saturate", "funnel", "whole", "round", "signs", "root",
                   "fused")  # fmt: skip

SHORT = {"f16": "e", "f32": "f", "f64": "d"}


def expressions(family: str, old: bool) -> list[tuple[str, str, str]]:
    """(name, type, expression); clang 15 lacks some builtins."""
    if family == "integers":
        table = [(("u32", "i32", "u64", "i64", "u16", "i16", "u8", "i8"), INTEGERS),
                 (("u32", "i32", "u64", "i64", "u16", "i16"), SATURATING),
                 (("i16x2", "u16x2", "u8x4", "u32x3"), VECTORS),
                 (("i16x2", "u16x2"), PAIRS), (("i16x2", "u16x2"), SHIFTS)]  # fmt: skip
    else:
        table = [(("f16", "f32", "f64"), FLOATS), (("f16x2", "f32x4"), VECTORS),
                 (("f16x2",), PAIRS)]  # fmt: skip
    return [
        (f"{kind}_{name}", kind, text)
        for kinds, rows in table
        for kind in kinds
        for name, text in rows.items()
        if not (old and name in NOT_IN_CLANG_15)
    ]


def source(rows: list[tuple[str, str, str]], device: bool) -> str:
    text = [TYPES]
    for name, kind, expression in rows:
        unsigned, signed = f"u{kind[1:]}", f"i{kind[1:]}"
        head = (
            f"GLOBAL void {name}" if device else f'extern "C" void {name}'
        ) + f"({kind} *o, const {kind} *a, const {kind} *b, const {kind} *c)"
        more = "" if "x" in kind else f"typedef {unsigned} U; typedef {signed} I;"
        one = (
            f"typedef {kind} T; {more} T x = a[i], y = b[i], z = c[i];"
            f" o[i] = (T)({expression}); (void)y; (void)z;"
        )
        loop = (
            f"int i = index(); {one}"
            if device
            else f"for (int i = 0; i < {COUNT}; i++) {{ {one} }}"
        )
        text.append(f"{head} {{ {loop} }}")
    return "\n".join(text)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """host(rows) -> the same expressions as a library of this machine."""
    clang = next(
        (c for c in ("clang-22", "clang-21", "clang-20", "clang-19", "clang")
         if shutil.which(c)), None,
    )  # fmt: skip
    if clang is None:
        pytest.skip("no clang to build the host's side")
    built: dict[str, ctypes.CDLL] = {}

    def build(rows):
        text = source(rows, device=False)
        if text not in built:
            folder = tmp_path_factory.mktemp("host")
            code, library = folder / "host.cc", folder / "host.so"
            code.write_text(text)
            result = subprocess.run(
                [clang, "-x", "c++", "-O1", "-shared", "-fPIC", *FLAGS, "-w",
                 "-Xclang", "-ffloat16-excess-precision=none", code, "-o", library,
                 "-lm"],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert result.returncode == 0, result.stderr[:2000]
            built[text] = ctypes.CDLL(str(Path(library)))
        return built[text]

    return build


def size_of(kind: str) -> tuple[str, int]:
    """Scalar type and how many (three of a vector take the room of four)."""
    scalar, _, count = kind.partition("x")
    return scalar, {"": 1, "2": 2, "3": 4, "4": 4}[count]


def operands(rng: random.Random, kind: str) -> bytes:
    scalar, count = size_of(kind)
    bits = int(scalar[1:])
    special = [0, 1, 2, (1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1]
    mantissa = {16: 10, 32: 23, 64: 52}.get(bits, 0)
    if scalar[0] == "f":
        one = (1 << bits - 2) - (1 << mantissa)
        top = ((1 << bits - 1 - mantissa) - 1) << mantissa
        special += [one, one | 1 << bits - 1, top, top | 1 << bits - 1, top - 1]
        special += [1 << mantissa, (1 << mantissa) - 1, one + (1 << mantissa - 1)]
        special[3] = top | 1 << mantissa - 1
        special[5] = one + 1
    out = []
    for _ in range(COUNT * count):
        kind_of = rng.random()
        if kind_of < 0.3:
            value = rng.choice(special)
        elif scalar[0] == "f" and kind_of < 0.8:
            value = one + rng.randrange(-(1 << bits - 4), 1 << bits - 4)
            value ^= rng.getrandbits(1) << bits - 1
        else:
            value = rng.getrandbits(bits) >> rng.randrange(bits)
        if scalar[0] == "f" and value & ~(1 << bits - 1) > top:
            value |= 1 << mantissa - 1  # no signalling NaN
        out.append(value)
    return struct.pack(
        f"<{len(out)}{ {8: 'B', 16: 'H', 32: 'I', 64: 'Q'}[bits] }", *out
    )


CONFIGURATIONS = [(None, "-O0", 6), ("clang-15", "-O3", 4), (None, "-O3", 5)]
if FULL:
    CONFIGURATIONS += [(None, level, 4) for level in ("-O1", "-O2", "-Os")]
    CONFIGURATIONS += [("clang-15", level, 4) for level in ("-O0", "-O1", "-O2")]


@pytest.mark.parametrize("family", ["integers", "floats"])
@pytest.mark.parametrize("clang,level,abi", CONFIGURATIONS)
def test_expressions_give_what_the_host_gives(
    family, clang, level, abi, compile_hip, host
) -> None:
    rows = expressions(family, old=clang == "clang-15")
    reference = host(rows)
    image = compile_hip(
        source(rows, device=True), *FLAGS, "-w", level=level, abi=abi, clang=clang
    )
    wrong = []
    with hipsim.Module(image) as module:
        for name, kind, _ in rows:
            rng = random.Random(name)
            inputs = [operands(rng, kind) for _ in range(3)]
            got, want = (bytearray(len(inputs[0])) for _ in range(2))
            module.kernel(name).launch(
                (COUNT // 64, 1, 1), (64, 1, 1),
                [Buffer(got), *(Buffer(bytearray(x), "r") for x in inputs)],
            )  # fmt: skip
            arrays = [(ctypes.c_char * len(want)).from_buffer(want)]
            getattr(reference, name)(arrays[0], *inputs)
            del arrays
            wrong += differences(name, kind, got, want, inputs)
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])


def differences(name, kind, got, want, inputs) -> list[str]:
    """The first differing element; any NaN equals any other."""
    scalar, count = size_of(kind)
    size = int(scalar[1:]) // 8
    for at in range(0, len(want), size):
        if kind.endswith("x3") and at // size % count == 3:
            continue
        mine, theirs = bytes(got[at : at + size]), bytes(want[at : at + size])
        if mine == theirs:
            continue
        if scalar in SHORT:
            a, b = (struct.unpack("<" + SHORT[scalar], x)[0] for x in (mine, theirs))
            either_zero = a == b == 0 and name.endswith(("least", "most", "clamp"))
            if (a != a and b != b) or either_zero:
                continue
        parts = [x[at : at + size][::-1].hex() for x in inputs]
        return [f"{name}: {mine[::-1].hex()}, host {theirs[::-1].hex()}, of {parts}"]
    return []
