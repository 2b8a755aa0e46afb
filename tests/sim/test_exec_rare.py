"""Instructions that compilers emit for a builtin or a rare construct only, against
an independent model.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
import random
import struct
from fractions import Fraction

import isa_numbers as m
import isa_tools
import pytest
from vector_runner import LANES, Case, random_exec, random_rows, run_cases

import hipsim

LOW, M64 = m.M32, m.M64


def check(cases: list[Case], expected: list[list[int]], **settings: int) -> None:
    for case, want, got in zip(cases, expected, run_cases(cases, **settings)):
        for n in range(LANES):
            model = want[n] if case.exec >> n & 1 else case.rows[n][3]
            assert got.d[n] == model, (
                f"{case.text}\nlane {n}: expected {model:#x}, got {got.d[n]:#x}, from "
                + " ".join(f"{x:#x}" for x in case.rows[n])
            )


def low(value: int, before: int) -> int:
    """v[14:15] after a result of 32 bits."""
    return before & ~LOW | value & LOW


# ---- media --------------------------------------------------------------------


def sad(window: int, reference: int, masked: bool) -> int:
    pairs = [(window >> s & 255, reference >> s & 255) for s in (0, 8, 16, 24)]
    return sum(abs(x - y) for x, y in pairs if not masked or y != 0)


def byte_rows(rng: random.Random) -> list[tuple[int, int, int, int]]:
    rows = random_rows(rng, ["u64", "u32", "u64"])
    holes = [0xFF00FF00, 0x00FFFFFF, 0xFFFFFF, 0, LOW]
    return [(a, b & rng.choice((LOW, *holes)), c, d) for a, b, c, d in rows]


def test_quad_sads_slide_over_the_bytes_and_keep_16_bits() -> None:
    rng = random.Random(1)
    cases, expected = [], []
    for name, masked in (("v_qsad_pk_u16_u8", False), ("v_mqsad_pk_u16_u8", True)):
        rows = byte_rows(rng)
        text = f"{name} v[14:15], v[8:9], v10, v[12:13]"
        cases.append(Case(text, rows, exec=random_exec(rng)))
        expected.append([
            sum(
                (sad(a >> 8 * i, b, masked) + (c >> 16 * i) & 0xFFFF) << 16 * i
                for i in range(4)
            )
            for a, b, c, _ in rows
        ])  # fmt: skip
    check(cases, expected)


@pytest.mark.parametrize("half", [0, 1])
def test_the_wide_masked_sad_has_four_sums(half: int) -> None:
    rng = random.Random(2)
    rows = byte_rows(rng)
    setup = (
        "v_mov_b32 v20, v12\n    v_mov_b32 v21, v13\n    v_mov_b32 v22, v8\n"
        "    v_mov_b32 v23, v10\n    "
    )
    text = (
        setup
        + "v_mqsad_u32_u8 v[20:23], v[8:9], v10, v[20:23]\n"
        + (f"    v_mov_b32 v14, v{20 + 2 * half}\n    v_mov_b32 v15, v{21 + 2 * half}")
    )
    want = []
    for a, b, c, _ in rows:
        start = [c & LOW, c >> 32, a & LOW, b & LOW]
        sums = [s + sad(a >> 8 * i, b, True) & LOW for i, s in enumerate(start)]
        want.append(sums[2 * half] | sums[2 * half + 1] << 32)
    check([Case(text, rows, exec=random_exec(rng))], [want])


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_a_byte_is_packed_with_the_rounding_of_the_mode(mode: int) -> None:
    rng = random.Random(3)
    rows = random_rows(rng, ["f32", "u32", "u32"])
    halves = [0.5, 1.5, 2.5, 254.5, 255.5, -0.5, 255.0, 256.0, 0.25, 100.75]
    for n, x in enumerate(halves):
        rows[n] = (struct.unpack("<I", struct.pack("<f", x))[0], *rows[n][1:])
    rules = [round, math.ceil, math.floor, math.trunc]
    want = []
    for a, b, c, d in rows:
        number, shift = m.to_float(a & LOW, "f32"), 8 * (b & 3)
        if number != number:
            byte = 0
        elif math.isinf(number):
            byte = 255 if number > 0 else 0
        else:
            byte = min(max(rules[mode](Fraction(number)), 0), 255)
        want.append(low(c & ~(255 << shift) | byte << shift, d))
    check([Case("v_cvt_pk_u8_f32 v14, v8, v10, v12", rows)], [want], round32=mode)


def test_cube_maps_choose_face_coordinates_and_axis() -> None:
    rng = random.Random(4)
    values = [0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -3.0]

    def model(x: float, y: float, z: float) -> tuple[float, float, float, float]:
        if abs(z) >= max(abs(x), abs(y)):
            return (5, -x, -y, 2 * z) if z < 0 else (4, x, -y, 2 * z)
        if abs(y) >= abs(x):
            return (3, x, -z, 2 * y) if y < 0 else (2, x, z, 2 * y)
        return (1, z, -y, 2 * x) if x < 0 else (0, -z, -y, 2 * x)

    def bits(x: float) -> int:
        return struct.unpack("<I", struct.pack("<f", x))[0]

    cases, expected = [], []
    for which, name in enumerate(("id", "sc", "tc", "ma")):
        rows, want = [], []
        for _ in range(LANES):
            x, y, z = (rng.choice(values) for _ in range(3))
            d = rng.getrandbits(64)
            rows.append((bits(x), bits(y), bits(z), d))
            want.append(low(bits(model(x, y, z)[which]), d))
        cases.append(Case(f"v_cube{name}_f32 v14, v8, v10, v12", rows))
        expected.append(want)
    check(cases, expected)


def test_pack_takes_halves_with_their_signs_as_they_are() -> None:
    rng = random.Random(5)
    rows = random_rows(rng, ["f16", "f16"])
    text = "v_pack_b32_f16 v14, -v8, |v10| op_sel:[1,0,0]"
    want = [
        low((a >> 16 & 0xFFFF) ^ 0x8000 | (b & 0x7FFF) << 16, d) for a, b, _, d in rows
    ]
    check([Case(text, rows, exec=random_exec(rng))], [want], denorm64=0)


def test_a_packed_conversion_is_clamped_before_it_rounds() -> None:
    rows = random_rows(random.Random(6), ["f32", "f32"])

    def half(bits: int) -> int:
        number = m.to_float(bits & LOW, "f32")
        held = 0.0 if not number > 0 else min(number, 1.0)
        single = struct.unpack("<I", struct.pack("<f", held))[0]
        return m.convert(single, "f32", "f16", 3)

    want = [low(half(a) | half(b) << 16, d) for a, b, _, d in rows]
    check([Case("v_cvt_pkrtz_f16_f32 v14, v8, v10 clamp", rows)], [want])


def test_dpp_moves_a_source_of_a_result_with_two_registers() -> None:
    rng = random.Random(7)
    rows = random_rows(rng, ["u32"])
    text = "v_cvt_f64_u32_dpp v[14:15], v8 row_shr:1 row_mask:0xf bank_mask:0xd"
    want = []
    for n, row in enumerate(rows):
        value = rows[n - 1][0] & LOW
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        written = n % 16 > 0 and n // 4 % 4 != 1
        want.append(bits if written else row[3])
    check([Case(text, rows)], [want])


# ---- angles -------------------------------------------------------------------


def test_trig_preop_cuts_53_bits_out_of_two_over_pi() -> None:
    rng = random.Random(8)
    table = m.two_over_pi(1201)
    assert table >> 1201 - 20 == int(2 / math.pi * 2**20)

    def model(a: int, segment: int) -> int:
        exponent = a >> 52 & 0x7FF
        shift = (segment & 31) * 53 + max(exponent - 1077, 0)
        # 53 bits from `shift` behind the point on; zeros after 1201 bits.
        part = (
            (table << 4000 >> 4000 + 1201 - 53 - shift)
            if shift < 1148
            else (table << shift - 1148)
        )
        part &= (1 << 53) - 1
        scale = -53 - shift + (128 if exponent >= 1968 else 0)
        return m.round_fraction(Fraction(part) * Fraction(2) ** scale, "f64")

    rows = []
    for n in range(4 * LANES):
        exponent = rng.choice((n * 8, rng.randrange(2048), 1077 + n % 64, 1967, 1968))
        a = rng.getrandbits(1) << 63 | exponent << 52 | rng.getrandbits(52)
        b = rng.choice((0, 1, 2, rng.randrange(24), rng.getrandbits(32)))
        rows.append((a, rng.getrandbits(32) << 32 | b, 0, rng.getrandbits(64)))
    parts = [rows[i : i + LANES] for i in range(0, len(rows), LANES)]
    text = "v_trig_preop_f64 v[14:15], v[8:9], v10"
    check(
        [Case(text, part) for part in parts],
        [[model(a, b) for a, b, _, _ in part] for part in parts],
    )


def test_the_segments_of_trig_preop_add_up_to_two_over_pi() -> None:
    text = "v_trig_preop_f64 v[14:15], 1.0, v10"
    rows = [(0, n % 4, 0, 0) for n in range(LANES)]
    (got,) = run_cases([Case(text, rows)])
    total = sum(
        Fraction(struct.unpack("<d", struct.pack("<Q", got.d[n]))[0]) for n in range(4)
    )
    exact = Fraction(m.two_over_pi(400), 1 << 400)
    assert 0 <= exact - total < Fraction(1, 1 << 212)


# ---- registers relative to M0 -------------------------------------------------


def test_scalar_registers_are_reached_relative_to_m0() -> None:
    body = "    s_load_dwordx2 s[2:3], s[4:5], 0x0\n"
    body += "".join(f"    s_mov_b32 s{i}, {100 + i}\n" for i in range(20, 40))
    body += """
    s_mov_b32 m0, 3
    s_movrels_b32 s40, s21
    s_movreld_b32 s30, 7
    s_mov_b32 m0, 6
    s_movrels_b64 s[42:43], s[22:23]
    s_movreld_b64 s[20:21], s[30:31]
    s_mov_b32 m0, 0
    s_movreld_b32 s39, s40
    s_waitcnt lgkmcnt(0)
    v_mov_b32 v1, 0
"""
    wanted = [40, 33, 30, 42, 43, 26, 27, 20, 39]
    for i, number in enumerate(wanted):
        body += f"    v_mov_b32 v2, s{number}\n"
        body += f"    global_store_dword v1, v2, s[2:3] offset:{4 * i}\n"
    out = bytearray(4 * len(wanted))
    image = isa_tools.assemble(body + "    s_endpgm", pointers=1)
    with hipsim.Module(image) as module:
        module.kernel("kernel").launch((1, 1, 1), (64, 1, 1), [hipsim.Buffer(out)])
    assert struct.unpack("<9I", out) == (124, 7, 130, 128, 129, 130, 131, 120, 124)


# ---- memory -------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "far"), [(32, 0), (32, 1), (64, 0), (64, 1)])
def test_two_exchanges_in_one_instruction_take_the_old_values(
    bits: int, far: int
) -> None:
    rng = random.Random(10 * bits + far)
    size = bits // 8
    stride = size if far else 2 * size  # no lane meets another's words
    name = f"ds_wrxchg2{'st64' if far else ''}_rtn_b{bits}"
    second = 64 * size if far else size
    data = ["v8", "v10"] if bits == 32 else ["v[8:9]", "v[10:11]"]
    olds = ["v12", "v14"] if bits == 32 else ["v[12:13]", "v[14:15]"]
    count = 2 * bits // 32
    base = f"v_lshlrev_b32 v18, {stride.bit_length() - 1}, v0\n    "
    at = f"v_add_u32 v19, {second}, v18\n    "
    common = (
        base
        + at
        + "".join(f"ds_write_b{bits} v{18 + i}, {olds[i]}\n    " for i in range(2))
        + f"{name} v[20:{19 + count}], v18, {data[0]}, {data[1]} offset1:1\n    "
        + "s_waitcnt lgkmcnt(0)\n    "
    )
    reads = (
        "".join(
            f"ds_read_b{bits} v[{24 + i * 2}:{25 + i * 2}], v{18 + i}\n    "
            if bits == 64
            else f"ds_read_b32 v{24 + i * 2}, v{18 + i}\n    "
            for i in range(2)
        )
        + "s_waitcnt lgkmcnt(0)\n    "
    )
    # What comes back, then what lies in memory: low words of both elements.
    step = bits // 32
    returned = f"v_mov_b32 v14, v20\n    v_mov_b32 v15, v{20 + step}"
    stored = "v_mov_b32 v14, v24\n    v_mov_b32 v15, v26"
    rows = random_rows(rng, ["u64", "u64", "u64"])
    want_returned = [(c & LOW) | (d & LOW) << 32 for _, _, c, d in rows]
    want_stored = [(a & LOW) | (b & LOW) << 32 for a, b, _, _ in rows]
    check(
        [Case(common + returned, rows), Case(common + reads + stored, rows)],
        [want_returned, want_stored],
        lds=4096,
    )


def test_append_and_consume_count_the_active_lanes() -> None:
    rng = random.Random(11)
    mask = rng.getrandbits(64) | 1
    active = mask.bit_count()
    rows = random_rows(rng, ["u32", "u32"])
    text = """s_mov_b64 s[22:23], exec
    s_mov_b64 exec, 1
    v_mov_b32 v18, 20
    v_mov_b32 v19, 1000
    ds_write_b32 v18, v19
    s_mov_b64 exec, s[22:23]
    s_mov_b32 m0, 0x7fff0010
    ds_append v14 offset:4
    ds_append v14 offset:4
    ds_consume v15 offset:4
    s_waitcnt lgkmcnt(0)"""
    want = [1000 + active | 1000 + 2 * active << 32] * LANES
    check([Case(text, rows, exec=mask)], [want], lds=64)


@pytest.mark.parametrize("name", ["dword", "ubyte", "sbyte", "ushort", "sshort"])
@pytest.mark.parametrize("where", ["global", "buffer"])
def test_loads_to_lds_put_a_dword_per_lane_at_m0(where: str, name: str) -> None:
    rng = random.Random(12)
    mask = rng.getrandbits(64)
    rows = random_rows(rng, ["u32", "u32"])
    load = f"global_load_{name} v[4:5], off offset:4 lds"
    if where == "buffer":
        load = (
            "v_subrev_u32 v19, s10, v4\n    s_mov_b32 s12, s10\n"
            "    s_mov_b32 s13, s11\n    s_mov_b32 s14, -1\n"
            "    s_mov_b32 s15, 0x27000\n"
            f"    buffer_load_{name} v19, s[12:15], 0 offen offset:4 lds"
        )
    text = f"""v_lshlrev_b32 v18, 2, v0
    v_mov_b32 v20, 0x55
    ds_write_b32 v18, v20 offset:36
    global_store_dword v[4:5], v8, off offset:4
    s_mov_b32 m0, 0xffff0020
    {load}
    s_waitcnt vmcnt(0)
    ds_read_b32 v14, v18 offset:36
    s_waitcnt lgkmcnt(0)"""
    bits = {"d": 32, "u": 16, "s": 16}[name[0]] if "byte" not in name else 8
    want = []
    for a, _, _, d in rows:
        value = a & ((1 << bits) - 1)
        want.append(low(m.sx(value, bits) if name[0] == "s" else value, d))
    check([Case(text, rows, exec=mask)], [want], lds=512)


def test_a_load_to_lds_beyond_the_segment_stops() -> None:
    image = isa_tools.assemble(
        """    s_load_dwordx2 s[0:1], s[4:5], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_mov_b32 m0, 4
    s_waitcnt lgkmcnt(0)
    global_load_dword v1, s[0:1] lds
    s_endpgm""",
        pointers=1, lds=256,
    )  # fmt: skip
    with (
        hipsim.Module(image) as module,
        pytest.raises(hipsim.HipError, match=r"LDS.*lds.*lane 63"),
    ):
        module.kernel("kernel").launch(
            (1, 1, 1), (64, 1, 1), [hipsim.Buffer(bytearray(256))]
        )


def check_flat(text: str, rows: list[tuple[int, ...]], want: list[int]) -> None:
    # s[2:3] hold the base that a kernel with flat-scratch initialisation gets:
    # here the scratch descriptor's.
    setup = "s_mov_b32 s2, s0\n    s_and_b32 s3, s1, 0xffff\n    "
    check([Case(setup + text, rows)], [want], lds=512, private=32)


@pytest.mark.parametrize("wide", [False, True])
def test_flat_atomics_reach_lds_and_private_memory(wide: bool) -> None:
    """Even lanes add to their own LDS word, odd ones to their private memory."""
    rng = random.Random(13)
    rows = random_rows(rng, ["u64", "u64"])
    x2, two = ("_x2", "dwordx2") if wide else ("", "dword")
    data, old, result = ("v[8:9]", "v[10:11]", "v[14:15]") if wide else (
        "v8", "v10", "v14",
    )  # fmt: skip
    text = f"""s_add_u32 flat_scratch_lo, s2, s7
    s_addc_u32 flat_scratch_hi, s3, 0
    s_mov_b64 s[22:23], exec
    v_lshlrev_b32 v18, 3, v0
    s_mov_b64 s[24:25], src_shared_base
    s_mov_b64 s[26:27], src_private_base
    v_and_b32 v20, 1, v0
    v_cmp_eq_u32 s[28:29], 1, v20
    v_mov_b32 v21, s25
    v_mov_b32 v22, s27
    v_cndmask_b32 v19, v21, v22, s[28:29]
    v_mov_b32 v23, 8
    v_cndmask_b32 v18, v18, v23, s[28:29]
    flat_store_{two} v[18:19], {old}
    flat_atomic_add{x2} {result}, v[18:19], {data} glc
    flat_atomic_sub{x2} v[24:25], v[18:19], {data} glc
    flat_atomic_add{x2} v[18:19], {data}
    flat_load_{two} {data}, v[18:19]
    s_waitcnt vmcnt(0) lgkmcnt(0)"""
    text = text.replace("v[24:25]", "v[24:25]" if wide else "v24")
    keep = M64 if wide else LOW
    more = "\n    v_mov_b32 v14, v8" + ("\n    v_mov_b32 v15, v9" if wide else "")
    want_old = [b & keep | d & ~keep for _, b, _, d in rows]
    want_new = [(a + b) & keep | d & ~keep for a, b, _, d in rows]
    for ending, want in (("", want_old), (more, want_new)):
        check_flat(text + ending, rows, want)
