"""LDS, global, buffer and scratch access, and atomics, lane by lane.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import isa_model as m
import isa_tools
import pytest
from vector_runner import ALL, LANES, Case, random_exec, random_rows, run_cases

import hipsim

LOW = m.M32
AT = "v_lshlrev_b32 v18, 4, v0\n    "  # each lane owns 16 bytes of LDS


def check(cases: list[Case], expected: list[list[int]], **settings: int) -> None:
    for case, want, got in zip(cases, expected, run_cases(cases, **settings)):
        for n in range(LANES):
            model = want[n] if case.exec >> n & 1 else case.rows[n][3]
            assert got.d[n] == model, (
                f"{case.text}\nlane {n}: expected {model:#x}, got {got.d[n]:#x}"
            )


# Loads of a part of 0x..CBA9 bytes: name: (byte offset, function old D -> D)
def part(shift: int, bits: int, signed: bool, place: str) -> Callable[[int, int], int]:
    def load(memory: int, old: int) -> int:
        value = memory >> shift & ((1 << bits) - 1)
        value = m.sx(value, bits) if signed else value
        if place == "low":
            return old & ~0xFFFF | value & 0xFFFF
        if place == "high":
            return old & ~0xFFFF0000 | (value & 0xFFFF) << 16
        return old & ~LOW | value & LOW

    return load


def small_loads() -> list[tuple[str, int, Callable[[int, int], int]]]:
    """(suffix of the LDS form, byte offset, model) and global names below."""
    rows = []
    for offset in (0, 1, 3, 5):
        s = 8 * offset
        rows += [
            ("u8", offset, part(s, 8, False, "")), ("i8", offset, part(s, 8, True, "")),
            ("u16", offset, part(s, 16, False, "")),
            ("i16", offset, part(s, 16, True, "")),
            ("u8_d16", offset, part(s, 8, False, "low")),
            ("i8_d16", offset, part(s, 8, True, "low")),
            ("u16_d16", offset, part(s, 16, False, "low")),
            ("u8_d16_hi", offset, part(s, 8, False, "high")),
            ("i8_d16_hi", offset, part(s, 8, True, "high")),
            ("u16_d16_hi", offset, part(s, 16, False, "high")),
        ]  # fmt: skip
    return rows


GLOBAL_NAMES = {"u8": "ubyte", "i8": "sbyte", "u16": "ushort", "i16": "sshort",
                "u8_d16": "ubyte_d16", "i8_d16": "sbyte_d16", "u16_d16": "short_d16",
                "u8_d16_hi": "ubyte_d16_hi", "i8_d16_hi": "sbyte_d16_hi",
                "u16_d16_hi": "short_d16_hi"}  # fmt: skip


@pytest.mark.parametrize("where", ["ds", "global", "flat", "scratch"])
def test_narrow_loads_extend_or_keep_the_other_half(where: str) -> None:
    rng = random.Random(1)
    cases, expected = [], []
    setup = "s_add_u32 s0, s0, s7\n    s_addc_u32 s1, s1, 0\n    "
    for name, offset, load in small_loads():
        wide = GLOBAL_NAMES[name]
        text = {
            "ds": f"{AT}ds_write_b64 v18, v[8:9]\n    ds_read_{name} v14, v18",
            "global": "global_store_dwordx2 v[4:5], v[8:9], off\n"
            f"    global_load_{wide} v14, v[4:5], off",
            "flat": "flat_store_dwordx2 v[4:5], v[8:9]\n"
            f"    flat_load_{wide} v14, v[4:5]",
            "scratch": f"{setup}buffer_store_dwordx2 v[8:9], off, s[0:3], 0 offset:4\n"
            f"    buffer_load_{wide} v14, off, s[0:3], 0",
        }[where]
        setup = ""
        at = offset + 4 if where == "scratch" else offset
        text += f" offset:{at}" if at else ""
        case = Case(text, random_rows(rng, ["u64"]), exec=random_exec(rng))
        cases.append(case)
        expected.append([load(row[0], row[3]) for row in case.rows])
    check(cases, expected, lds=1024, private=16)


def test_a_register_field_without_meaning_may_hold_anything() -> None:
    # global_store_byte v[2:3], v1 with result v255, global_load_ubyte v1, v[2:3]
    # with data v255. (LDS instructions with such fields do not decode.)
    image = isa_tools.assemble(
        """    s_load_dwordx2 s[0:1], s[4:5], 0x0
    v_add_u32 v1, 5, v0
    s_waitcnt lgkmcnt(0)
    v_add_co_u32 v2, vcc, s0, v0
    v_mov_b32 v3, s1
    v_addc_co_u32 v3, vcc, 0, v3, vcc
    .long 0xdc608000, 0xff7f0102
    s_waitcnt vmcnt(0)
    .long 0xdc408000, 0x017fff02
    s_waitcnt vmcnt(0)
    v_add_u32 v1, 1, v1
    global_store_byte v0, v1, s[0:1]
    s_endpgm""",
        pointers=1,
        vgprs=4,
        lds=64,
    )
    out = bytearray(LANES)
    with hipsim.Module(image) as module:
        module.kernel("kernel").launch((1, 1, 1), (64, 1, 1), [hipsim.Buffer(out)])
    assert list(out) == [lane + 6 for lane in range(LANES)]


@pytest.mark.parametrize("where", ["ds", "global"])
def test_narrow_stores_leave_neighbours_alone(where: str) -> None:
    rng = random.Random(2)
    cases, expected = [], []
    for name, bits, source in (("b8", 8, 0), ("b16", 16, 0), ("b8_d16_hi", 8, 16),
                               ("b16_d16_hi", 16, 16)):  # fmt: skip
        for offset in (0, 1, 3):
            wide = name.replace("b8", "byte").replace("b16", "short")
            text = (
                f"{AT}ds_write_b64 v18, v[8:9]\n    ds_write_{name} v18, v10"
                f" offset:{offset}\n    ds_read_b64 v[14:15], v18"
                if where == "ds" else
                "global_store_dwordx2 v[4:5], v[8:9], off\n    global_store_"
                f"{wide} v[4:5], v10, off offset:{offset}\n"
                "    global_load_dwordx2 v[14:15], v[4:5], off"
            )  # fmt: skip
            case = Case(text, random_rows(rng, ["u64", "u32"]))
            field = (1 << bits) - 1
            cases.append(case)
            expected.append([
                a & ~(field << 8 * offset) | (b >> source & field) << 8 * offset
                for a, b, _, _ in case.rows])  # fmt: skip
    check(cases, expected, lds=1024)


def test_paired_and_wide_lds_accesses_find_their_words() -> None:
    rng = random.Random(3)
    rows = random_rows(rng, ["u64", "u64"])
    write = f"{AT}ds_write2_b64 v18, v[8:9], v[10:11] offset1:1\n    "
    cases = [
        Case(write + "ds_read2_b32 v[14:15], v18 offset0:3", rows),
        Case(write + "ds_read2_b32 v[14:15], v18 offset0:1 offset1:2", rows),
        Case(write + "ds_read_b128 v[20:23], v18\n    v_mov_b32 v14, v22\n"
             "    v_mov_b32 v15, v21", rows),
        Case(write + "ds_read_b96 v[20:22], v18 offset:4\n    v_mov_b32 v14, v20\n"
             "    v_mov_b32 v15, v22", rows),
        Case("v_lshlrev_b32 v18, 2, v0\n    ds_write2st64_b32 v18, v8, v9 offset1:1\n"
             "    ds_read2st64_b32 v[14:15], v18 offset0:1", rows),
        Case("v_lshlrev_b32 v14, 4, v0\n    ds_write_b64 v14, v[8:9]\n"
             "    ds_read2_b32 v[14:15], v14 offset1:1", rows),
    ]  # fmt: skip

    def words(row: tuple[int, ...]) -> list[int]:
        return [row[0] & LOW, row[0] >> 32, row[1] & LOW, row[1] >> 32]

    picks = [(3, 0), (1, 2), (2, 1), (1, 3), (1, 0), (0, 1)]
    expected = [[words(r)[i] | words(r)[j] << 32 for r in rows] for i, j in picks]
    check(cases, expected, lds=1024)


ATOMICS: dict[str, tuple[str, Callable[[int, int, int], int]]] = {
    "add": ("u", lambda x, a, b: x + a), "sub": ("u", lambda x, a, b: x - a),
    "inc": ("u", lambda x, a, b: 0 if x >= a else x + 1),
    "dec": ("u", lambda x, a, b: a if x == 0 or x > a else x - 1),
    "min": ("i", lambda x, a, b: min(x, a)), "max": ("i", lambda x, a, b: max(x, a)),
    "umin": ("u", lambda x, a, b: min(x, a)), "umax": ("u", lambda x, a, b: max(x, a)),
    "and": ("b", lambda x, a, b: x & a), "or": ("b", lambda x, a, b: x | a),
    "xor": ("b", lambda x, a, b: x ^ a), "swap": ("b", lambda x, a, b: a),
    "cmpswap": ("b", lambda x, a, b: a if x == b else x),
    "rsub": ("u", lambda x, a, b: a - x),
    "mskor": ("b", lambda x, a, b: x & ~a | b),
}  # fmt: skip


def atomic_rows(rng: random.Random, bits: int) -> list[tuple[int, int, int, int]]:
    rows = random_rows(rng, [f"u{bits}"] * 3)
    return [(a, c if n % 3 == 0 else b, a if n % 5 == 0 else c, d)
            for n, (a, b, c, d) in enumerate(rows)]  # fmt: skip


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("where", ["ds", "global", "flat", "buffer"])
def test_atomics_return_the_old_and_leave_the_new(where: str, bits: int) -> None:
    rng = random.Random(4)
    cases, expected = [], []
    for name, (kind, function) in ATOMICS.items():
        if where != "ds" and name in ("rsub", "mskor"):
            continue
        pair = (lambda n: f"v{n}") if bits == 32 else (lambda n: f"v[{n}:{n + 1}]")
        if where == "ds":
            base = {"umin": "min", "umax": "max", "swap": "wrxchg", "cmpswap": "cmpst"}
            verb = f"ds_{base.get(name, name)}_rtn_{kind}{bits}"
            data = pair(8)
            if name == "cmpswap":
                data = f"{pair(10)}, {pair(8)}"
            elif name == "mskor":
                data = f"{pair(8)}, {pair(10)}"
            write = f"{AT}ds_write_b{bits} v18, {pair(12)}\n    "
            act = f"{verb} {pair(14)}, v18, {data}"
            read = f"\n    ds_read_b{bits} {pair(14)}, v18"
        else:
            base = {"min": "smin", "max": "smax"}
            x2 = "_x2" if bits == 64 else ""
            size = "x2" if bits == 64 else ""
            verb = f"{where}_atomic_{base.get(name, name)}{x2}"
            move = (
                "v_mov_b32 v20, v8\n    v_mov_b32 v21, v10\n    "
                if bits == 32
                else "".join(f"v_mov_b32 v{20 + i}, v{8 + i}\n    " for i in range(4))
            )
            data = pair(20)
            if name == "cmpswap":
                data = "v[20:21]" if bits == 32 else "v[20:23]"
            off = "" if where == "flat" else ", off"
            write = move + f"flat_store_dword{size} v[4:5], {pair(12)}\n    "
            read = f"\n    flat_load_dword{size} {pair(14)}, v[4:5]"
            act = f"{verb} {pair(14)}, v[4:5], {data}{off} glc"
            if where == "buffer":
                # The lane's offset from the start of the results.
                write = ("s_mov_b32 s24, s10\n    s_mov_b32 s25, s11\n    "
                         "s_mov_b32 s26, -1\n    s_mov_b32 s27, 0x27000\n    "
                         "v_sub_u32 v19, v4, s10\n    ") + write  # fmt: skip
                keep = 24 if name == "cmpswap" else 20
                registers = (2 if name == "cmpswap" else 1) * bits // 32
                span = (
                    f"v{keep}"
                    if registers == 1
                    else f"v[{keep}:{keep + registers - 1}]"
                )
                copy = "".join(
                    f"v_mov_b32 v{24 + i}, v{20 + i}\n    " for i in range(4)
                )
                write += copy if keep == 24 else ""
                act = (f"{verb} {span}, v19, s[24:27], 0 offen glc\n    "
                       + "".join(f"v_mov_b32 v{14 + i}, v{keep + i}\n    "
                                 for i in range(bits // 32)))  # fmt: skip
        for after in ("", read):
            rows = atomic_rows(rng, bits)
            cases.append(Case(write + act + after, rows))
            want = []
            mask = (1 << bits) - 1
            for a, b, c, d in rows:
                view = [v & mask for v in (c, a, b)]
                if kind == "i":
                    view = [m.sx(v, bits) for v in view]
                value = (function(*view) if after else view[0]) & mask
                want.append(value if bits == 64 else d & ~LOW | value)
            expected.append(want)
    check(cases, expected, lds=1024)


def test_float_atomics_of_the_lds() -> None:
    rng = random.Random(5)
    rows = random_rows(rng, ["f32", "f32", "f32"])
    text = (
        f"{AT}ds_write_b32 v18, v12\n    ds_add_f32 v18, v8\n    ds_read_b32 v14, v18"
    )
    (got,) = run_cases([Case(text, rows)], lds=1024)
    for (a, _, c, _), d in zip(rows, got.d):
        want = m.arithmetic("f32", lambda x, y: x + y, [c & LOW, a & LOW])
        both = m.is_nan(want, "f32") and m.is_nan(d & LOW, "f32")
        assert d & LOW == want or both


def test_compare_swap_may_return_into_its_own_data() -> None:
    rows = [(n, n + 1, n if n % 2 else 99, 0) for n in range(LANES)]
    text = ("global_store_dword v[4:5], v12, off\n    v_mov_b32 v14, v10\n"
            "    v_mov_b32 v15, v8\n"
            "    global_atomic_cmpswap v14, v[4:5], v[14:15], off glc\n"
            "    global_load_dword v15, v[4:5], off")  # fmt: skip
    (got,) = run_cases([Case(text, rows)])
    for n, d in enumerate(got.d):
        old, new = (n, n + 1) if n % 2 else (99, 99)
        assert d == old | new << 32


def test_lanes_exchange_through_permute_and_swizzle() -> None:
    rng = random.Random(6)
    rows = random_rows(rng, ["u32", "u32"])
    mask = rng.getrandbits(64) | 1
    cases = [
        Case("ds_bpermute_b32 v14, v10, v8", rows, exec=mask),
        Case("v_xor_b32 v18, 5, v0\n    v_lshlrev_b32 v18, 2, v18\n"
             "    ds_permute_b32 v14, v18, v8", rows, exec=mask),
        Case('ds_swizzle_b32 v14, v8 offset:swizzle(SWAP,4)', rows),
        Case("ds_swizzle_b32 v14, v8 offset:swizzle(QUAD_PERM,1,0,3,3)", rows),
        Case("ds_swizzle_b32 v14, v8 offset:swizzle(BROADCAST,8,3)", rows),
    ]  # fmt: skip
    picks = [
        lambda n: rows[n][1] // 4 % 64, lambda n: n ^ 5, lambda n: n ^ 4,
        lambda n: n // 4 * 4 + (1, 0, 3, 3)[n % 4], lambda n: n // 8 * 8 + 3,
    ]  # fmt: skip
    expected = []
    for case, pick in zip(cases, picks):
        want = []
        for n in range(LANES):
            other = pick(n)
            value = rows[other][0] & LOW if case.exec >> other & 1 else 0
            want.append(rows[n][3] & ~LOW | value)
        expected.append(want)
    check(cases, expected)


def test_buffer_loads_past_the_records_read_zero() -> None:
    rows = [(n * 3 + 1, 0, 0, n << 8 | 7) for n in range(LANES)]
    describe = ("s_mov_b32 s24, s10\n    s_mov_b32 s25, s11\n"
                "    s_movk_i32 s26, 0x208\n"
                "    s_mov_b32 s27, 0x27000\n    ")  # fmt: skip
    cases = [
        Case("v_mov_b32 v14, v8\n    v_mov_b32 v15, v8", rows),
        Case(describe + "buffer_load_dwordx2 v[14:15], v6, s[24:27], 0 offen", rows),
        Case(describe + "s_mov_b32 s23, 4\n    buffer_load_dwordx2 v[14:15], v6,"
             " s[24:27], s23 offen", rows),
        Case(describe + "s_or_b32 s25, s25, 0x100000\n    s_mov_b32 s26, 8\n"
             "    buffer_load_dword v14, v0, s[24:27], 0 idxen", rows),
    ]  # fmt: skip
    got = run_cases(cases)
    for n, row in enumerate(rows):
        value = row[0]
        assert got[1].d[n] == (value | value << 32 if 16 * n + 8 <= 0x208 else 0)
        if 16 * n + 12 <= 0x208:  # second dword and what follows D
            assert got[2].d[n] & LOW == value
        elif 16 * n + 8 > 0x208:
            assert got[2].d[n] == 0
        assert got[3].d[n] & LOW == (value if n < 8 else 0)


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("global_atomic_add v[4:5], v8, off offset:2", "align"),
        ("ds_add_u32 v0, v8 offset:1", "align"),
        ("v_mov_b32 v18, 0x400\n    ds_write_b32 v18, v8", "ds_write_b32 v18, v8"),
        ("global_store_dword v[2:3], v8, off", "global_store_dword v[2:3], v8, off"),
        ("buffer_store_dword v8, off, s[0:3], 0 offset:64", "buffer_store_dword"),
    ],
)
def test_bad_addresses_stop_the_launch(text: str, report: str) -> None:
    case = Case(text, [(0, 0, 0, 0)] * LANES, exec=ALL)
    with pytest.raises(hipsim.HipError, match=f"(?i){re.escape(report)}"):
        run_cases([case], lds=1024, private=16)
