"""Cases of LDS, flat, global, scratch and buffer instructions.

Each lane owns 32 bytes of the memory under test. A case fills them, runs one
instruction and stores them with the result registers; the model does the same
with bytes (isa_memory_model.py).

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable

import isa_numbers as n
import isa_tools
from isa_memory_model import (
    ATOMICS,
    LDS_ATOMICS,
    LDS_MOVES,
    MOVES,
    PAIRED,
    STORES,
    Atomic,
    Lane,
    Move,
    atomic,
    move,
    words,
)
from isa_numbers import M32, M64
from oracle import Unit
from vector_runner import random_exec, random_value

LANES, OWN = 64, 32

# ---- kernels ---------------------------------------------------------------

# v[4:5] this lane's 64 bytes of the target, v[2:3] of the source, v6 and v7 the
# same as offsets; s[8:9] source, s[10:11] target.
PROLOGUE = """
    s_load_dwordx4 s[8:11], s[4:5], 0x0
    v_lshlrev_b32 v6, 6, v0
    v_lshlrev_b32 v7, 5, v0
    s_waitcnt lgkmcnt(0)
""" + isa_tools.lane_pointers("v6", "v6")
FILL = """
    global_load_dwordx4 v[20:23], v[2:3], off
    global_load_dwordx4 v[24:27], v[2:3], off offset:16
    global_load_dwordx4 v[8:11], v[2:3], off offset:32
    global_load_dwordx4 v[12:15], v[2:3], off offset:48
    v_mov_b32 v32, 0x01234567
    v_mov_b32 v33, 0x89abcdef
    v_mov_b32 v34, 0x0f1e2d3c
    v_mov_b32 v35, 0x4b5a6978
    s_waitcnt vmcnt(0)
"""
D_BEFORE = [0x01234567, 0x89ABCDEF, 0x0F1E2D3C, 0x4B5A6978]
NEXT = """
    global_store_dwordx4 v[4:5], v[32:35], off offset:32
    v_add_co_u32 v2, vcc, 0x1000, v2
    v_addc_co_u32 v3, vcc, 0, v3, vcc
    v_add_co_u32 v4, vcc, 0x1000, v4
    v_addc_co_u32 v5, vcc, 0, v5, vcc
    s_add_u32 s10, s10, 0x1000
    s_addc_u32 s11, s11, 0
"""
SIZE = 64 * LANES


def masked(text: str, mask: int) -> str:
    return (f"    s_mov_b32 exec_lo, {mask & M32:#x}\n"
            f"    s_mov_b32 exec_hi, {mask >> 32:#x}\n    {text}\n"
            "    s_waitcnt vmcnt(0) lgkmcnt(0)\n    s_mov_b64 exec, -1\n")  # fmt: skip


# Where a case's memory is: how it is filled from v[20:27] and read back.
SPACES = {
    "ds": ("    ds_write_b128 v7, v[20:23]\n    ds_write_b128 v7, v[24:27] offset:16\n",
           "    ds_read_b128 v[20:23], v7\n    ds_read_b128 v[24:27], v7 offset:16\n"),
    "private": (
        "".join(f"    buffer_store_dword v{20 + i}, off, s[0:3], 0 offset:{4 * i}\n"
                for i in range(8)),
        "".join(f"    buffer_load_dword v{20 + i}, off, s[0:3], 0 offset:{4 * i}\n"
                for i in range(8))),
    "global": ("    global_store_dwordx4 v[4:5], v[20:23], off\n"
               "    global_store_dwordx4 v[4:5], v[24:27], off offset:16\n", ""),
}  # fmt: skip
KEEP = ("    s_waitcnt vmcnt(0) lgkmcnt(0)\n"
        "    global_store_dwordx4 v[4:5], v[20:23], off\n"
        "    global_store_dwordx4 v[4:5], v[24:27], off offset:16\n")  # fmt: skip


@dataclasses.dataclass
class Case:
    """text runs in `space`; model changes one lane, given its number."""

    text: str
    model: Callable[[Lane, int], None]
    space: str = "global"
    exec: int = M64
    kind: str = "u32"  # of the numbers in memory and data


def make_lanes(rng: random.Random, kind: str) -> list[Lane]:
    """Random contents; data often equal to or next to what is in memory."""
    wide = kind[1:] == "64"
    lanes = []
    for number in range(LANES):
        values = [random_value(rng, kind) for _ in range(12)]
        mask = M64 if wide else M32
        if wide:
            memory, data = values[:4], values[4:8]
        else:
            memory, data = values[:8], (values * 2)[4:12]
        pick = number % 6
        if pick < 4:
            first = memory[(number // 6) % (2 if wide else 4)]
            data[0] = {1: first, 2: first + 1, 3: first - 1}.get(pick, data[0])
        if pick == 4:
            data[1] = memory[(number // 6) % 2]
            if wide:
                data[2] = data[1]
        if number % 16 == 5:
            memory[:2] = [0, 0]
        if kind[0] == "f" and number % 8 == 7:  # zeros of both signs
            memory = [n.sign_bit(kind) * (number // 8 % 2)] * len(memory)
            data[0] = n.sign_bit(kind) * (1 - number // 8 % 2)
        code = "Q" if wide else "I"
        packed = [struct.pack(f"<{len(x)}{code}", *(y & mask for y in x))
                  for x in (memory, data)]  # fmt: skip
        lanes.append(Lane(bytearray(packed[0]), list(struct.unpack("<8I", packed[1])),
                          list(D_BEFORE)))  # fmt: skip
    return lanes


def make_unit(name: str, cases: list[Case], **settings: int) -> Unit:
    rng = random.Random(name)
    body, source, expected, labels = [PROLOGUE], b"", b"", []
    if settings.get("private"):
        # The wave's scratch: s8 with flat_scratch_init in s[6:7], else s7.
        body[0] = ("    s_add_u32 flat_scratch_lo, s6, s9\n"
                   "    s_addc_u32 flat_scratch_hi, s7, 0\n"
                   "    s_add_u32 s0, s0, s9\n    s_addc_u32 s1, s1, 0\n"
                   + PROLOGUE)  # fmt: skip
    for case in cases:
        fill, read = SPACES[case.space]
        body += [FILL, fill, masked(case.text, case.exec)]
        body += [read, KEEP if read else "", NEXT]
        labels.append((len(expected), case.text))
        for number, lane in enumerate(make_lanes(rng, case.kind)):
            source += bytes(lane.memory) + words(lane.data, 0, 8)
            if case.exec >> number & 1:
                case.model(lane, number)
            expected += bytes(lane.memory) + words(lane.d, 0, 4) + bytes(16)
    return Unit([name], "".join(body), source, bytes(len(expected)), expected, labels,
                settings)  # fmt: skip


def span(first: int, bytes_: int) -> str:
    count = max(bytes_, 4) // 4
    return f"v{first}" if count == 1 else f"v[{first}:{first + count - 1}]"


# ---- LDS -------------------------------------------------------------------


def lds_move_cases(name: str) -> list[Case]:
    op, rng = LDS_MOVES[name], random.Random(name)
    cases = []
    for offset in (0, OWN - op.bytes, *((1, 3) if op.bytes < 4 else (4, 8))):
        data = span(8 if op.store else 32, op.bytes)
        operands = f"v7, {data}" if op.store else f"{data}, v7"
        text = f"ds_{name} {operands} offset:{offset}"
        # The last lane's last byte is the last of the LDS.
        mask = M64 if offset == OWN - op.bytes else random_exec(rng)
        cases.append(Case(text, lambda lane, i, at=offset: move(op, lane, at), "ds",
                          mask))  # fmt: skip
    # The sum of address and offset wraps at 32 bits.
    operands = operands.replace("v7", "v18")
    text = f"v_sub_u32 v18, v7, v30\n    ds_{name} {operands} offset:4096"
    cases.append(Case("v_mov_b32 v30, 0x1000\n    " + text,
                      lambda lane, i: move(op, lane, 0), "ds"))  # fmt: skip
    return cases


def lds_atomic_cases(name: str) -> list[Case]:
    op, rng = LDS_ATOMICS[name], random.Random(name)
    size = op.bits // 8
    cases = []
    for turn in range(6):
        offset = (0, size, 0, 2 * size, 0, size)[turn]
        second = f", {span(10 if op.bits == 64 else 9, size)}" if op.data == 2 else ""
        data = f"{span(8, size)}{second}"
        text = f"ds_{name} {span(32, size) + ', ' if op.returns else ''}v7, {data}"
        model = lambda lane, i, at=offset: atomic(  # noqa: E731
            op, lane, at, op.bits // 32, op.returns)  # fmt: skip
        kind = f"{'f' if op.kind == 'f' else 'u'}{op.bits}"
        cases.append(Case(f"{text} offset:{offset}", model, "ds", random_exec(rng),
                          kind))  # fmt: skip
    return cases


def lds_paired_unit(name: str) -> Unit:
    """Two elements of the lane's own memory; with st64, one far away."""
    store, size, unit = PAIRED[name]
    rng = random.Random(name)
    # Lane l owns bytes 32 l, and for st64 the element at 64 * size * 4 + 32 l.
    picks = ((0, 1), (1, 0), (3, 2)) if unit == 1 else ((0, 0), (0, 0), (0, 0))
    cases = []
    for first, second in picks:
        regs = f"v[32:{31 + 2 * size // 4}]"
        a, b = span(8, size), span(12, size)
        text = f"ds_{name} v7, {a}, {b}" if store else f"ds_{name} {regs}, v7"

        def model(lane: Lane, i: int, first: int = first, second: int = second) -> None:
            data = words(lane.data, 0, 8)
            if store:
                lane.memory[first * size : first * size + size] = data[:size]
                lane.memory[second * size : second * size + size] = data[16 : 16 + size]
                return
            both = b"".join(
                bytes(lane.memory[k * size : k * size + size]) for k in (first, second)
            )
            lane.d[: len(both) // 4] = struct.unpack(f"<{len(both) // 4}I", both)

        cases.append(Case(f"{text} offset0:{first} offset1:{second}", model, "ds",
                          random_exec(rng)))  # fmt: skip
    if unit == 64:
        cases += far_cases(name, store, size)
    if not store:
        # The result may overwrite the address register.
        regs = f"v[32:{31 + 2 * size // 4}]"
        text = f"v_mov_b32 v32, v7\n    ds_{name} {regs}, v32 offset0:0 offset1:0"
        count = size // 4

        def over(lane: Lane, i: int) -> None:
            lane.d[: 2 * count] = struct.unpack(f"<{count}I", lane.memory[:size]) * 2

        cases.append(Case(text, over, "ds"))
    return make_unit(name, cases, lds=8192)


def far_cases(name: str, store: bool, size: int) -> list[Case]:
    """Offsets in units of 64 elements, seen through plain instructions."""
    at = 64 * size * (2048 // (64 * size)) * 2  # 4096: past all lanes' own bytes
    units = at // (64 * size)
    read = span(12, size)
    bits = 8 * size
    if store:
        # Both data operands go far and are read back as D.
        text = (f"ds_{name} v7, {span(8, size)}, {span(12, size)} "
                f"offset0:{units} offset1:0\n    s_waitcnt lgkmcnt(0)\n"
                f"    ds_read_b{bits} {span(32, size)}, v7 offset:{at}")  # fmt: skip

        def model(lane: Lane, i: int) -> None:
            lane.d[: size // 4] = lane.data[: size // 4]
            lane.memory[:size] = words(lane.data, 4, size // 4)

        swapped = text.replace(f"offset0:{units} offset1:0",
                               f"offset0:0 offset1:{units}")  # fmt: skip

        def other(lane: Lane, i: int) -> None:
            lane.d[: size // 4] = lane.data[4 : 4 + size // 4]
            lane.memory[:size] = words(lane.data, 0, size // 4)

        return [Case(text, model, "ds"), Case(swapped, other, "ds")]
    text = (f"ds_write_b{bits} v7, {read} offset:{at}\n    s_waitcnt lgkmcnt(0)\n"
            f"    ds_{name} v[32:{31 + 2 * size // 4}], v7 "
            f"offset0:{units} offset1:0")  # fmt: skip

    def load(lane: Lane, i: int) -> None:
        near = struct.unpack(f"<{size // 4}I", lane.memory[:size])
        lane.d[: size // 2] = [*lane.data[4 : 4 + size // 4], *near]

    return [Case(text, load, "ds")]


def number_only(lane: Lane, i: int) -> None:
    lane.d[0] = i


def exchange_unit(name: str) -> Unit:
    """ds_swizzle, ds_permute, ds_bpermute and ds_nop."""
    rng = random.Random(name)
    cases: list[Case] = []

    def exchange(text: str, pick: Callable[[int], int], mask: int, push: bool) -> None:
        """D of lane i is v8 of lane pick(i), zero if that is off. As the lanes
        come one by one, v8 is the lane's number times a constant."""
        setup = "v_mul_u32_u24 v8, 0x10203, v0\n    "
        off = 0

        def model(lane: Lane, i: int) -> None:
            other = pick(i)
            if push:
                sources = [j for j in range(64) if pick(j) == i and mask >> j & 1]
                lane.d[0] = sources[-1] * 0x10203 if sources else off
            else:
                lane.d[0] = other * 0x10203 if mask >> other & 1 else off

        cases.append(Case(setup + text, model, exec=mask))

    for mask in (M64, rng.getrandbits(64), rng.getrandbits(64)):
        if name == "swizzle_b32":
            for text, pick in (
                ("swizzle(SWAP,4)", lambda i: i ^ 4),
                ("swizzle(QUAD_PERM,1,0,3,3)", lambda i: i & ~3 | (1, 0, 3, 3)[i % 4]),
                ("swizzle(BROADCAST,8,3)", lambda i: i & ~7 | 3),
                ("swizzle(REVERSE,16)", lambda i: i ^ 15),
                ('swizzle(BITMASK_PERM, "01pip")',
                 lambda i: i & 32 | (i & 31 & 7 | 8) ^ 2),
            ):  # fmt: skip
                exchange(f"ds_{name} v32, v8 offset:{text}", pick, mask, False)
        elif name == "bpermute_b32":
            text = f"v_mul_u32_u24 v18, 20, v0\n    ds_{name} v32, v18, v8"
            exchange(text, lambda i: i * 5 % 64, mask, False)
            exchange(text + " offset:8", lambda i: (i * 5 + 2) % 64, mask, False)
        elif name == "permute_b32":
            text = f"v_mul_u32_u24 v18, 20, v0\n    ds_{name} v32, v18, v8"
            exchange(text, lambda i: i * 5 % 64, mask, True)
            exchange(text + " offset:4", lambda i: (i * 5 + 1) % 64, mask, True)
            half = f"v_lshlrev_b32 v18, 1, v0\n    ds_{name} v32, v18, v8"
            exchange(half, lambda i: i // 2, mask, True)
        else:
            text = "ds_nop\n    v_mov_b32 v32, v0"
            cases.append(Case(text, number_only, exec=mask))
    return make_unit(name, cases, lds=2048)


def lds_unit(name: str) -> Unit:
    if name in LDS_MOVES:
        return make_unit(name, lds_move_cases(name), lds=2048)
    if name in LDS_ATOMICS:
        return make_unit(name, lds_atomic_cases(name), lds=2048)
    return lds_paired_unit(name) if name in PAIRED else exchange_unit(name)


# ---- flat, global, scratch, buffer -----------------------------------------

DESCRIBE = """s_mov_b32 s24, s10
    s_and_b32 s25, s11, 0xffff
    s_mov_b32 s26, {records}
    s_mov_b32 s27, 0x27000
    """


@dataclasses.dataclass(frozen=True)
class Place:
    """A way to address the lane's memory: setup, operands, offset, space."""

    setup: str
    address: str
    offset: int = 0
    space: str = "global"
    limit: int = 1 << 32  # buffer: bytes from s[10:11]
    stride: int = 0  # buffer: limit is then a number of records


def places(unit: str, size: int) -> list[Place]:
    if unit == "global":
        return [Place("", "v[4:5], off"), Place("", "v[4:5], off", OWN - size),
                Place("v_add_co_u32 v18, vcc, 0x200, v4\n    "
                      "v_addc_co_u32 v19, vcc, 0, v5, vcc\n    ",
                      "v[18:19], off", -0x200),
                Place("", "v6, s[10:11]"), Place("", "v6, s[10:11]", size)]  # fmt: skip
    if unit == "flat":
        window = ("s_mov_b64 s[28:29], src_{0}_base\n    v_mov_b32 v19, s29\n"
                  "    v_mov_b32 v18, {1}\n    ")  # fmt: skip
        return [Place("", "v[4:5]"), Place("", "v[4:5]", size),
                Place(window.format("shared", "v7"), "v[18:19]", OWN - size, "ds"),
                Place(window.format("private", "0"), "v[18:19]", size,
                      "private")]  # fmt: skip
    if unit == "scratch":
        return [Place("v_mov_b32 v18, 0\n    ", "v18, off", size, "private"),
                Place(f"v_mov_b32 v18, {size}\n    ", "v18, off", 0, "private"),
                Place("s_mov_b32 s28, 0\n    ", "off, s28", size,
                      "private")]  # fmt: skip
    usual = DESCRIBE.format(records=-1)
    strided = (DESCRIBE.format(records=40)
               + "s_or_b32 s25, s25, 0x400000\n    ")  # fmt: skip
    return [
        Place(usual, "v6, s[24:27], 0 offen"),
        Place(usual + f"s_movk_i32 s28, {size}\n    ", "v6, s[24:27], s28 offen"),
        Place(usual, "v6, s[24:27], 0 offen", size),
        Place(DESCRIBE.format(records=0x804), "v6, s[24:27], 0 offen", 0,
              limit=0x804),
        Place(strided, "v0, s[24:27], 0 idxen", size, limit=40, stride=64),
        Place(strided + "v_mov_b32 v18, v0\n    v_mov_b32 v19, 0\n    ",
              "v[18:19], s[24:27], 0 idxen offen", size, limit=40, stride=64),
        Place("v_mov_b32 v18, 0\n    ", "v18, s[0:3], 0 offen", size, "private"),
        Place("", "off, s[0:3], 0", 4, "private"),
    ]  # fmt: skip


def inside(place: Place, number: int, size: int) -> int:
    """How many bytes of the lane's access are within the buffer."""
    if place.stride:
        return size if number < place.limit else 0
    unit = min(size, 4)
    room = place.limit - (64 * number + place.offset)
    return max(0, min(size, room // unit * unit))


def vmem_cases(unit: str, name: str) -> list[Case]:
    """name: load_ubyte, store_dword, atomic_add_x2, ..."""
    verb, _, rest = name.partition("_")
    rng = random.Random(unit + name)
    cases = []
    op: Move | Atomic
    op = {"load": MOVES, "store": STORES, "atomic": ATOMICS}[verb][rest]  # type: ignore
    size = op.bytes if isinstance(op, Move) else op.bits // 8
    for place in places(unit, size):
        for returns in (True, False) if isinstance(op, Atomic) else (False,):
            cases.append(vmem_case(unit, name, op, size, place, returns, rng))
    if unit == "buffer" and isinstance(op, Move) and op.part == "all":
        cases += direct_cases(name, op)
    return cases


def direct_cases(name: str, op: Move) -> list[Case]:
    """buffer_load with the lds bit: to M0 + offset + 4 times the lane."""
    if op.store or op.bytes > 4:
        return []
    text = (f"{DESCRIBE.format(records=-1)}s_mov_b32 m0, 0x50100\n"
            f"    buffer_{name} v6, s[24:27], 0 offen offset:4 lds\n"
            "    v_lshlrev_b32 v18, 2, v0\n    s_waitcnt vmcnt(0)\n"
            "    ds_read_b32 v32, v18 offset:260")  # fmt: skip
    return [Case(text, lambda lane, i: move(op, lane, 4))]


def vmem_case(
    unit: str, name: str, op: Move | Atomic, size: int, place: Place,
    returns: bool, rng: random.Random,
) -> Case:  # fmt: skip
    """One instruction at one place."""
    setup, address = place.setup, place.address
    at = max(place.offset, 0)
    if "s28 offen" in address or f"v18, {size}\n" in setup:
        at = size
    at = 0 if place.offset == -0x200 else at
    base, _, tail = address.partition(", ")
    data_register = 8
    if isinstance(op, Atomic):
        wide = size * op.data
        data = span(8, wide)
        if unit == "buffer":
            setup += "".join(f"v_mov_b32 v{32 + i}, v{8 + i}\n    "
                             for i in range(wide // 4))  # fmt: skip
            data, data_register = span(32, wide), 32
        if unit == "buffer":
            operands = f"{data}, {address}"
        else:
            operands = f"{span(32, size)}, " if returns else ""
            operands += f"{base}, {data}" + (f", {tail}" if tail else "")
    elif unit == "buffer":
        operands = f"{span(8 if op.store else 32, size)}, {address}"
    elif op.store:
        operands = f"{base}, {span(8, size)}" + (f", {tail}" if tail else "")
    else:
        operands = f"{span(32, size)}, {address}"
    text = f"{setup}{unit}_{name} {operands}"
    text += f" offset:{place.offset}" if place.offset else ""
    text += " glc" if returns else ""

    def model(lane: Lane, number: int) -> None:
        valid = inside(place, number, size) if place.limit < 1 << 32 else size
        if isinstance(op, Move):
            move(op, lane, at, valid)
            return
        if data_register == 32:
            lane.d[: size * op.data // 4] = lane.data[: size * op.data // 4]
        if valid == size:
            atomic(op, lane, at, size // 4, returns)
        elif returns:
            lane.d[: size // 4] = [0] * (size // 4)

    kind = f"u{op.bits}" if isinstance(op, Atomic) else "u32"
    mask = M64 if place.space == "ds" else random_exec(rng)
    return Case(text, model, place.space, mask, kind)


def vmem_unit(name: str) -> Unit:
    """name with its unit: global_load_dword."""
    unit, _, rest = name.partition("_")
    settings = {"lds": 2048, "private": 64, "flat_scratch": 1}
    return make_unit(name, vmem_cases(unit, rest), **settings)


EXCHANGES = ("swizzle_b32", "permute_b32", "bpermute_b32", "nop")
NAMES = [f"ds_{x}" for x in (*LDS_MOVES, *LDS_ATOMICS, *PAIRED, *EXCHANGES)]
for UNIT in ("flat", "global", "scratch", "buffer"):
    NAMES += [f"{UNIT}_load_{x}" for x in MOVES]
    NAMES += [f"{UNIT}_store_{x}" for x in STORES]
    NAMES += [f"{UNIT}_atomic_{x}" for x in ATOMICS if UNIT != "scratch"]


def unit(name: str) -> Unit:
    """The kernel that tests this instruction."""
    if not name.startswith("ds_"):
        return vmem_unit(name)
    return dataclasses.replace(lds_unit(name[3:]), names=[name])
