"""Models and units of instructions for builtins and rare constructs: media, cube
maps, angles, registers relative to M0, paired exchanges and lane counters.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction

import isa_control
import isa_numbers as n
from isa_model import byte_distance
from isa_numbers import M32, M64
from isa_ops import Env, op
from oracle import Unit

# ---- vector ----------------------------------------------------------------


def quad(masked: bool) -> Callable[..., int]:
    return lambda e, a, b, c: sum(
        (byte_distance(a >> 8 * i & M32, b, masked) + (c >> 16 * i) & 0xFFFF) << 16 * i
        for i in range(4)
    )


op("v_qsad_pk_u16_u8", "u64 u64 u32 u64", "3", quad(False))
op("v_mqsad_pk_u16_u8", "u64 u64 u32 u64", "3", quad(True))


def pack_byte(e: Env, a: int, b: int, c: int) -> int:
    rule = (round, math.ceil, math.floor, math.trunc)[e.round("f32")]
    number, shift = n.to_float(a, "f32"), 8 * (b & 3)
    if math.isfinite(number):
        byte = min(max(rule(Fraction(number)), 0), 255)
    else:
        byte = 255 if number > 0 else 0
    return c & ~(255 << shift) | byte << shift


op("v_cvt_pk_u8_f32", "u32 f32 u32 u32", "3", pack_byte)


def cube(which: str) -> Callable[..., int]:
    def call(e: Env, *bits: int) -> int:
        x, y, z = (n.to_float(b, "f32") for b in bits)
        flip = lambda i: n.negate("f32", bits[i])  # noqa: E731
        if abs(z) >= abs(x) and abs(z) >= abs(y):
            axis, s, t = 2, flip(0) if z < 0 else bits[0], flip(1)
        elif abs(y) >= abs(x):
            axis, s, t = 1, bits[0], flip(2) if y < 0 else bits[2]
        else:
            axis, s, t = 0, bits[2] if x < 0 else flip(2), flip(1)
        major = n.multiply("f32", e.round("f32"), bits[axis], 0x40000000)
        face = n.round_to("f32", 2.0 * axis + ((x, y, z)[axis] < 0))
        got = {"id": face, "sc": s, "tc": t, "ma": major}[which]
        return n.first_nan("f32", bits) if n.is_nan(got, "f32") else got

    return call


for WHICH in ("id", "sc", "tc", "ma"):
    op(f"v_cube{WHICH}_f32", "f32 f32 f32 f32", "3", cube(WHICH))


TABLE = n.two_over_pi(1201)


def trig_preop(e: Env, a: int, b: int) -> int:
    exponent = a >> 52 & 0x7FF
    shift = (b & 31) * 53 + max(exponent - 1077, 0)
    part = (TABLE << shift >> 1148) & (1 << 53) - 1
    scale = -53 - shift + (128 if exponent >= 1968 else 0)
    # Cut, whatever MODE says.
    return n.round_fraction(Fraction(part) * Fraction(2) ** scale, "f64", 3)


op("v_trig_preop_f64", "f64 f64 u32", "3", trig_preop)

# ---- units of their own ----------------------------------------------------

# Each lane's eight dwords of the source in v[8:15]; v[16:19] go to the target.
BODY = """
    s_load_dwordx4 s[8:11], s[4:5], 0x0
    v_lshlrev_b32 v1, 5, v0
    v_lshlrev_b32 v2, 4, v0
    v_mov_b32 v16, 0
    v_mov_b32 v17, 0
    v_mov_b32 v18, 0
    v_mov_b32 v19, 0
    s_waitcnt lgkmcnt(0)
    global_load_dwordx4 v[8:11], v1, s[8:9]
    global_load_dwordx4 v[12:15], v1, s[8:9] offset:16
    s_waitcnt vmcnt(0)
    {text}
    s_waitcnt lgkmcnt(0)
    s_mov_b64 exec, -1
    global_store_dwordx4 v2, v[16:19], s[10:11]"""


def lane_unit(
    name: str,
    text: str,
    model: Callable[[int, list[int]], list[int]],
    mask: int = M64,
    **settings: int,
) -> Unit:
    """model(lane, its dwords) gives v[16:19] of an active lane."""
    rng = random.Random(name)
    rows = [[rng.getrandbits(32) & rng.choice((M32, M32, 0xFF00FF)) for _ in range(8)]
            for _ in range(64)]  # fmt: skip
    want = [model(i, row) if mask >> i & 1 else [0] * 4 for i, row in enumerate(rows)]
    return Unit(
        [name], BODY.format(text=text),
        b"".join(struct.pack("<8I", *row) for row in rows), bytes(1024),
        b"".join(struct.pack("<4I", *row) for row in want), settings=settings,
    )  # fmt: skip


def sad_unit(name: str) -> Unit:
    """The sums overwrite the third operand."""
    moves = "".join(f"v_mov_b32 v{16 + i}, v{11 + i}\n    " for i in range(4))
    masked = "s_mov_b32 exec_lo, 0x12345679\n    "
    return lane_unit(
        name, f"{moves}{masked}{name} v[16:19], v[8:9], v10, v[16:19]",
        lambda i, v: [
            v[3 + k] + (byte_distance((v[0] | v[1] << 32) >> 8 * k & M32, v[2], True)
                        if (0xFFFFFFFF12345679 >> i & 1) else 0) & M32
            for k in range(4)
        ],
    )  # fmt: skip


def exchange_unit(name: str) -> Unit:
    """Old values of both places, or with odd names what is in them afterwards."""
    size = 8 if name.endswith("64") else 4
    far = "st64" in name
    base = f"v_mul_u32_u24 v3, {size if far else 3 * size}, v0\n    "
    second = 64 * size if far else 2 * size
    offset = "offset1:1" if far else "offset1:2"
    if size == 4:
        text = (
            f"{base}v_add_u32 v4, {second}, v3\n    ds_write_b32 v3, v12\n    "
            f"ds_write_b32 v4, v13\n    {name} v[16:17], v3, v8, v9 {offset}\n    "
            "ds_read_b32 v18, v3\n    ds_read_b32 v19, v4"
        )
        return lane_unit(name, text, lambda i, v: [v[4], v[5], v[0], v[1]], lds=2048)
    text = (
        f"{base}v_add_u32 v4, {second}, v3\n    ds_write_b64 v3, v[12:13]\n    "
        "ds_write_b64 v4, v[14:15]\n"
        f"    {name} v[20:23], v3, v[8:9], v[10:11] {offset}\n"
        "    ds_read_b64 v[24:25], v3\n    ds_read_b64 v[26:27], v4\n"
        "    s_waitcnt lgkmcnt(0)\n    v_xor_b32 v16, v20, v24\n"
        "    v_xor_b32 v17, v21, v25\n    v_sub_u32 v18, v22, v26\n"
        "    v_sub_u32 v19, v23, v27"
    )
    return lane_unit(
        name, text,
        lambda i, v: [v[4] ^ v[0], v[5] ^ v[1], v[6] - v[2] & M32, v[7] - v[3] & M32],
        lds=4096,
    )  # fmt: skip


def count_unit(name: str) -> Unit:
    """The counter is the last dword of the LDS."""
    mask = 0xF00D_0000_8421_0F01
    step = mask.bit_count() * (1 if name == "ds_append" else -1)
    text = f"""v_mov_b32 v3, 40
    v_mov_b32 v4, 1000
    ds_write_b32 v3, v4
    s_mov_b32 m0, 0x1230020
    s_mov_b32 exec_lo, {mask & M32:#x}
    s_mov_b32 exec_hi, {mask >> 32:#x}
    {name} v16 offset:8
    {name} v17 offset:8
    ds_read_b32 v18, v3"""
    return lane_unit(
        name, text, lambda i, v: [1000, 1000 + step, 1000 + 2 * step, 0], mask, lds=44
    )


def relative_unit(name: str) -> Unit:
    """s[30:41] hold 130 to 141; M0 is 4."""
    fill = "".join(f"s_mov_b32 s{i}, {100 + i}\n    " for i in range(30, 42))
    wide = name.endswith("64")
    if "movrels" in name:
        use = f"{name} s[20:21], s[32:33]" if wide else f"{name} s20, s33"
        read = (20, 21, 32, 33) if wide else (20, 33, 37, 36)
        want = [136, 137, 132, 133] if wide else [137, 133, 137, 136]
    else:
        use = f"{name} s[34:35], s[40:41]" if wide else f"{name} s34, s41"
        read = (34, 35, 38, 39) if wide else (34, 38, 37, 39)
        want = [134, 135, 140, 141] if wide else [134, 141, 137, 139]
    moves = "".join(f"\n    v_mov_b32 v{16 + i}, s{r}" for i, r in enumerate(read))
    return lane_unit(name, f"{fill}s_mov_b32 m0, 4\n    {use}{moves}",
                     lambda i, v: want)  # fmt: skip


isa_control.NO_EFFECT["s_wakeup"] = ""
EXCHANGES = [
    f"ds_wrxchg2{far}_rtn_b{bits}" for far in ("", "st64") for bits in (32, 64)
]
BUILDERS: list[tuple[str, Callable[[str], Unit]]] = [
    ("v_mqsad_u32_u8", sad_unit),
    *((name, exchange_unit) for name in EXCHANGES),
    *((name, count_unit) for name in ("ds_append", "ds_consume")),
    *((f"s_movrel{way}_b{bits}", relative_unit) for way in "sd" for bits in (32, 64)),
    ("s_wakeup",
     lambda x: isa_control.make_unit(x, isa_control.quiet_cases(x))),
]  # fmt: skip
