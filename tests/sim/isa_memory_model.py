"""What LDS, flat, global, scratch and buffer instructions do to one lane.

Written from the manual's text on bytes; shares nothing with csrc/sim.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence

import isa_numbers as n
from isa_numbers import M32


@dataclasses.dataclass(frozen=True)
class Move:
    """A load or store of `bytes` bytes; part: where in the register(s)."""

    bytes: int
    store: bool = False
    signed: bool = False
    part: str = "all"  # all, or low or high: half of a register


@dataclasses.dataclass(frozen=True)
class Atomic:
    """New contents from old ones and data; floats as bits."""

    bits: int
    function: Callable[[int, int, int], int]
    kind: str = "u"  # how the numbers are read: u, i, f
    data: int = 1
    returns: bool = False


MOVES = {
    "ubyte": Move(1), "sbyte": Move(1, signed=True), "ushort": Move(2),
    "sshort": Move(2, signed=True), "dword": Move(4), "dwordx2": Move(8),
    "dwordx3": Move(12), "dwordx4": Move(16),
    "ubyte_d16": Move(1, part="low"), "ubyte_d16_hi": Move(1, part="high"),
    "sbyte_d16": Move(1, signed=True, part="low"),
    "sbyte_d16_hi": Move(1, signed=True, part="high"),
    "short_d16": Move(2, part="low"), "short_d16_hi": Move(2, part="high"),
}  # fmt: skip
STORES = {
    "byte": Move(1, True), "byte_d16_hi": Move(1, True, part="high"),
    "short": Move(2, True), "short_d16_hi": Move(2, True, part="high"),
    "dword": Move(4, True), "dwordx2": Move(8, True), "dwordx3": Move(12, True),
    "dwordx4": Move(16, True),
}  # fmt: skip
LDS_MOVES = {
    "read_b32": Move(4), "read_b64": Move(8), "read_b96": Move(12),
    "read_b128": Move(16), "read_i8": Move(1, signed=True), "read_u8": Move(1),
    "read_i16": Move(2, signed=True), "read_u16": Move(2),
    "read_u8_d16": Move(1, part="low"), "read_u8_d16_hi": Move(1, part="high"),
    "read_i8_d16": Move(1, signed=True, part="low"),
    "read_i8_d16_hi": Move(1, signed=True, part="high"),
    "read_u16_d16": Move(2, part="low"), "read_u16_d16_hi": Move(2, part="high"),
    "write_b8": Move(1, True), "write_b16": Move(2, True), "write_b32": Move(4, True),
    "write_b64": Move(8, True), "write_b96": Move(12, True),
    "write_b128": Move(16, True), "write_b8_d16_hi": Move(1, True, part="high"),
    "write_b16_d16_hi": Move(2, True, part="high"),
}  # fmt: skip


def float_pick(bits: int, largest: bool) -> Callable[[int, int, int], int]:
    kind = f"f{bits}"

    def call(m: int, a: int, b: int) -> int:
        x, y = n.to_float(m, kind), n.to_float(a, kind)
        return a if (y > x if largest else y < x) else m

    return call


def float_equal(bits: int) -> Callable[[int, int, int], int]:
    kind = f"f{bits}"
    return lambda m, a, b: b if n.to_float(m, kind) == n.to_float(a, kind) else m


COMBINE: dict[str, tuple[str, Callable[[int, int, int], int]]] = {
    "add": ("u", lambda m, a, b: m + a), "sub": ("u", lambda m, a, b: m - a),
    "rsub": ("u", lambda m, a, b: a - m),
    "inc": ("u", lambda m, a, b: 0 if m >= a else m + 1),
    "dec": ("u", lambda m, a, b: a if m == 0 or m > a else m - 1),
    "smin": ("i", lambda m, a, b: min(m, a)), "smax": ("i", lambda m, a, b: max(m, a)),
    "umin": ("u", lambda m, a, b: min(m, a)), "umax": ("u", lambda m, a, b: max(m, a)),
    "and": ("u", lambda m, a, b: m & a), "or": ("u", lambda m, a, b: m | a),
    "xor": ("u", lambda m, a, b: m ^ a), "swap": ("u", lambda m, a, b: a),
    # The compare value is the second operand here, the first in the LDS.
    "cmpswap": ("u", lambda m, a, b: a if m == b else m),
    "mskor": ("u", lambda m, a, b: m & ~a | b),
    "cmpst": ("u", lambda m, a, b: b if m == a else m),
}  # fmt: skip
TWO_DATA = {"cmpswap", "mskor", "cmpst"}


def lds_atomics() -> dict[str, Atomic]:
    """By the name without ds_, with and without result."""
    table: dict[str, Atomic] = {}
    for bits in (32, 64):
        plain = [("add", "u", "add"), ("sub", "u", "sub"), ("rsub", "u", "rsub"),
                 ("inc", "u", "inc"), ("dec", "u", "dec"), ("min", "i", "smin"),
                 ("max", "i", "smax"), ("min", "u", "umin"), ("max", "u", "umax"),
                 ("and", "b", "and"), ("or", "b", "or"), ("xor", "b", "xor"),
                 ("mskor", "b", "mskor"), ("cmpst", "b", "cmpst")]  # fmt: skip
        rows = [(verb, letter, *COMBINE[rule], 1 + (rule in TWO_DATA))
                for verb, letter, rule in plain]  # fmt: skip
        rows += [("cmpst", "f", "f", float_equal(bits), 2),
                 ("min", "f", "f", float_pick(bits, False), 1),
                 ("max", "f", "f", float_pick(bits, True), 1)]  # fmt: skip
        if bits == 32:
            rows.append(("add", "f", "f", lambda m, a, b: n.add("f32", 0, m, a), 1))
        for verb, letter, kind, function, data in rows:
            for rtn in ("", "_rtn"):
                table[f"{verb}{rtn}_{letter}{bits}"] = Atomic(
                    bits, function, kind, data, bool(rtn)
                )
        table[f"wrxchg_rtn_b{bits}"] = Atomic(bits, lambda m, a, b: a, returns=True)
    return table


LDS_ATOMICS = lds_atomics()
ATOMICS = {
    name + x2: Atomic(bits, COMBINE[name][1], COMBINE[name][0],
                      1 + (name in TWO_DATA))
    for x2, bits in (("", 32), ("_x2", 64))
    for name in ("swap", "cmpswap", "add", "sub", "smin", "umin", "smax", "umax",
                 "and", "or", "xor", "inc", "dec")
}  # fmt: skip
PAIRED = {  # bytes of an element, unit of the offsets in elements
    f"{verb}{st64}_b{bits}": (verb == "write2", bits // 8, 64 if st64 else 1)
    for verb in ("read2", "write2") for st64 in ("", "st64") for bits in (32, 64)
}  # fmt: skip


@dataclasses.dataclass
class Lane:
    """A lane's memory, its data operands v[8:11], v[12:15] and D, v[32:35]."""

    memory: bytearray
    data: list[int]  # 8 dwords
    d: list[int]  # 4 dwords


def words(data: Sequence[int], first: int, count: int) -> bytes:
    return struct.pack(f"<{count}I", *data[first : first + count])


def move(op: Move, lane: Lane, at: int, valid: int = 99) -> None:
    """One lane; bytes from `valid` on are outside: read zero, not written."""
    if op.store:
        low = lane.data[0] >> (16 if op.part == "high" else 0)
        data = words([low & M32, *lane.data[1:]], 0, 4)[: min(op.bytes, valid)]
        lane.memory[at : at + len(data)] = data
        return
    data = lane.memory[at : at + min(op.bytes, valid)]
    data = bytes(data).ljust(op.bytes, b"\0")
    if op.bytes >= 4:
        lane.d[: op.bytes // 4] = struct.unpack(f"<{op.bytes // 4}I", data)
        return
    value = int.from_bytes(data, "little", signed=op.signed)
    if op.part == "all":
        lane.d[0] = value & M32
    elif op.part == "low":
        lane.d[0] = lane.d[0] & 0xFFFF0000 | value & 0xFFFF
    else:
        lane.d[0] = lane.d[0] & 0xFFFF | (value & 0xFFFF) << 16


def atomic(op: Atomic, lane: Lane, at: int, second: int, returns: bool) -> None:
    """second: the dword where the second data operand starts."""
    size = op.bits // 8
    old = int.from_bytes(lane.memory[at : at + size], "little")
    data = words(lane.data, 0, 8)
    a = int.from_bytes(data[:size], "little")
    b = int.from_bytes(data[4 * second : 4 * second + size], "little")
    view = [n.sx(x, op.bits) if op.kind == "i" else x for x in (old, a, b)]
    new = op.function(*view) & (1 << op.bits) - 1
    lane.memory[at : at + size] = new.to_bytes(size, "little")
    if returns:
        lane.d[: size // 4] = struct.unpack(
            f"<{size // 4}I", old.to_bytes(size, "little")
        )
