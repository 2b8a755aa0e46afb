"""Which cases test a vector instruction: encodings, modifiers, modes, operands.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import random

import isa_numbers as n
import isa_valu as v
from isa_ops import FLOATS, OPS, USUAL_MODE, Op
from isa_valu import Case, Dpp, Form, Source
from oracle import Unit
from vector_runner import random_exec, random_value

CONTROLS = ["quad_perm:[1,0,3,2]", "quad_perm:[3,3,0,1]", "row_shl:1", "row_shl:15",
            "row_shr:4", "row_ror:7", "wave_shl:1", "wave_shr:1", "wave_rol:1",
            "wave_ror:1", "row_mirror", "row_half_mirror", "row_bcast:15",
            "row_bcast:31"]  # fmt: skip
NO_SDWA = {"v_mac_f32", "v_mac_f16", "v_fmac_f32"}
# Inline constants: text, then bits as f16, f32 and f64.
INLINE = (("0.5", 0x3800, 0x3F000000, 0x3FE << 52),
          ("-4.0", 0xC400, 0xC0800000, 0xC01 << 52),
          ("0.15915494309189532", 0x3118, 0x3E22F983, 0x3FC45F306DC9C882))  # fmt: skip


# ---- rows ------------------------------------------------------------------


def half_pair(rng: random.Random) -> int:
    return random_value(rng, "f16") & 0xFFFF | (random_value(rng, "f16") & 0xFFFF) << 16


def one_value(rng: random.Random, kind: str, lane: int) -> int:
    if kind in ("pk", "pkf", "raw") or (kind == "mix" and lane % 2):
        return half_pair(rng) if rng.random() < 0.7 else random_value(rng, "u32")
    return random_value(rng, "f32" if kind == "mix" else kind)


def moderate(rng: random.Random, kind: str) -> int:
    """A float near one, an integer that a half can hold, or bits as usual."""
    if kind in ("u16", "i16"):
        return rng.randrange(2048)
    if kind not in FLOATS:
        return random_value(rng, kind)
    spread = {"f16": 1 << 11, "f32": 1 << 25, "f64": 1 << 54}[kind]
    bits = n.ONE[kind] + rng.randrange(-spread, spread)
    return bits ^ n.sign_bit(kind) * rng.getrandbits(1)


def tiny(rng: random.Random, kind: str, column: int) -> int:
    """A float such that products and sums of three are about the least normal."""
    if kind not in FLOATS:
        return random_value(rng, kind)
    mantissa, bias = n.FORMATS[kind][3:]
    middle = bias // 2 if column < 2 and rng.random() < 0.7 else 2
    exponent = max(0, middle + rng.randrange(-2, 4))
    return rng.getrandbits(1) * n.sign_bit(kind) | exponent << mantissa | (
        rng.getrandbits(mantissa))  # fmt: skip


# Triples where a rounding or a limit decides, by the operands' type.
HARD = {
    # Rounded to float first, the sum would be a tie.
    "f16": [(0x3C01, 0x0FFE, 0x3C01), (0xBC01, 0x0FFE, 0xBC01)],
    "u16": [(256, 256, 0), (1, 0x9000, 5), (0x9000, 1, 5), (0xFFFF, 1, 0)],
    "i16": [(0x8000, 0x8000, 0x7FFF), (0x7FFF, 0x7FFF, 0x8000)],
    "f32": [(0, 0x80000000, 0xBF800000), (0x80000000, 0, 0x3F800000)],
    "raw": [(0x7F7F7F7F, 0x7F7F7F7F, 0x7FFFFFF0), (0x77777777, 0x99999999, 0x80000010),
            (0x80808080, 0x7F7F7F7F, 0x80000010), (n.M32, n.M32, 0xFFFFFFF0)],
}  # fmt: skip


def make_rows(op: Op, rng: random.Random, how: str = "") -> list[tuple[int, ...]]:
    """Input rows; how: wild (any bits), moderate or tiny floats."""
    hard = HARD.get(op.types[1], [])
    kinds = [k for k in op.types[1:] if k != "mask"]
    if "packed" in op.flags:
        kinds = ["pk"] * len(kinds)
    rows = []
    for lane in range(v.LANES):
        if how == "moderate":
            x = [moderate(rng, k) for k in kinds]
        elif how == "tiny":
            x = [tiny(rng, k, i) for i, k in enumerate(op.types[1 : 1 + len(kinds)])]
            if lane % 4 == 3 and len(x) > 1 and op.types[1] in FLOATS:
                # A denormal times a large number.
                mantissa = n.FORMATS[op.types[1]][3]
                large = n.infinity(op.types[1], False) - 1 - rng.getrandbits(mantissa)
                x[:2] = [rng.getrandbits(mantissa), large][:: 1 if lane & 4 else -1]
        elif how == "wild":
            x = [rng.getrandbits(64) for _ in kinds]
        else:
            x = [one_value(rng, k, lane) for k in kinds]
        x += [rng.getrandbits(64) for _ in range(3 - len(x))]
        if len(kinds) > 1 and how not in ("moderate", "tiny"):
            # Equal operands, complements, negatives, small differences.
            x[1] = {1: x[0], 2: x[0] ^ n.M64, 3: x[0] + 1 & n.M64,
                    6: -x[0] & n.M64}.get(lane % 9, x[1])  # fmt: skip
            if len(kinds) > 2:
                x[2] = {4: x[0], 5: x[1]}.get(lane % 9, x[2])
            if hard and lane % 9 == 7:
                high = 16 if {"packed", "half"} & op.flags else 64
                x = [y | y << high & n.M64 for y in hard[lane // 9 % len(hard)]]
        if "scaled" in op.flags:
            x[0] = x[1 + lane % 2]
        d = one_value(rng, op.types[0], lane) if "accumulate" in op.flags else 0
        d = d if d and how != "wild" else rng.getrandbits(64)
        if how in ("moderate", "tiny") and "accumulate" in op.flags:
            kind = op.types[0]
            d = moderate(rng, kind) if how == "moderate" else tiny(rng, kind, 2)
        rows.append((*x, d))
    return rows


# ---- text ------------------------------------------------------------------


def register(column: int, kind: str) -> str:
    at = 8 + 2 * column
    return f"v[{at}:{at + 1}]" if v.width(kind) == 64 else f"v{at}"


def columns(op: Op) -> list[Source]:
    """A, B and C from their usual registers, as far as they are written."""
    kinds = op.types[1:]
    if "accumulate" in op.flags or kinds[-1] == "mask":
        kinds = kinds[:2]
    return [Source(register(i, k), i) for i, k in enumerate(kinds)]


def bits(values: object) -> str:
    return str([int(x) for x in values]).replace(" ", "")  # type: ignore[attr-defined]


def spell(form: Form) -> str:
    """The instruction in LLVM's spelling."""
    op, name = form.op, form.name
    suffix = form.encoding if op.where in "12C" else ""
    if "k32" in op.flags:
        suffix = ""
    mask = "s[22:23]" if form.to_scalar else "vcc"
    places = [] if op.types[0] == "mask" else [register(3, op.types[0])]
    if op.types[0] == "mask" or "carry" in op.flags:
        places.append(mask)
    sources = []
    for i, source in enumerate(form.sources):
        text = source.text
        if "mix" in op.types or op.where != "P":
            text = f"|{text}|" if form.abs[i] else text
            text = f"-{text}" if form.neg[i] else text
        if form.encoding == "sdwa" and form.sext[i]:
            text = f"sext({text})"
        sources.append(text)
    if "k32" in op.flags and "madmk" in name:
        sources = [sources[0], sources[2], sources[1]]
    if op.types[-1] == "mask":
        sources.append("s[20:21]" if form.encoding == "e64" else "vcc")
    text = f"{name}{'_' if suffix else ''}{suffix} {', '.join(places + sources)}"
    count = len(op.types) - 1
    if form.encoding == "sdwa":
        text += " clamp" if form.clamp else ""
        names = ("src0_sel", "src1_sel")
        picks = list(form.select)
        if op.types[0] != "mask":
            text += f" dst_sel:{picks.pop(0)} dst_unused:{form.unused}"
        text += "".join(f" {k}:{p}" for k, p in zip(names, picks))
    if form.dpp is not None:
        text += (f" {form.dpp.control} row_mask:{form.dpp.rows:#x} "
                 f"bank_mask:{form.dpp.banks:#x}")  # fmt: skip
        text += " bound_ctrl:0" if form.dpp.bound else ""
    if op.where == "P" and "raw" not in op.types:
        text += f" op_sel:{bits(form.op_sel[:count])}"
        text += f" op_sel_hi:{bits(form.op_sel_hi[:count])}"
        if "mix" not in op.types and any((*form.neg, *form.neg_hi)):
            text += f" neg_lo:{bits(form.neg[:count])}"
            text += f" neg_hi:{bits(form.neg_hi[:count])}"
    elif any(form.op_sel):
        text += f" op_sel:{bits(form.op_sel[: count + 1])}"
    text += " clamp" if form.clamp and form.encoding != "sdwa" else ""
    return text + ("", " mul:2", " mul:4", " div:2")[form.omod]


# ---- forms -----------------------------------------------------------------


def usual(name: str) -> Form:
    op = OPS[name]
    encoding = {"3": "e64", "P": "p"}.get(op.where, "e32")
    scalar = op.where == "3" and "carry" in op.flags
    hi = (0, 0, 0) if "mix" in op.types else (1, 1, 1)
    return Form(name, encoding, columns(op), op_sel_hi=hi, to_scalar=scalar)


def is_float(op: Op) -> bool:
    return any(k in FLOATS or k in ("mix", "pkf") for k in op.types)


def signs(op: Op, rng: random.Random, share: float = 0.5) -> list[int]:
    """A random bit for each source that has a sign modifier."""
    able = [k in FLOATS or k == "mix" or "signed" in op.flags for k in op.types[1:]]
    able = [a and "scaled" not in op.flags for a in able][: len(columns(op))]
    return [int(a and rng.random() < share) for a in (*able, 0, 0, 0)][:3]


def clampable(op: Op) -> bool:
    return op.types[0] in FLOATS or "clamped" in op.flags


def wide_form(name: str, rng: random.Random, clamp: bool = False) -> Form:
    """VOP3 with every modifier that the instruction has, at random."""
    op, form = OPS[name], usual(name)
    form.encoding = "e64"
    form.to_scalar = op.types[0] == "mask" or "carry" in op.flags
    form.neg, form.abs = signs(op, rng), signs(op, rng, 0.3)
    form.clamp = clampable(op) and clamp
    if "half" in op.flags:
        count = len(op.types) - 1
        picks = [int(k[1:] == "16" and rng.random() < 0.5) for k in op.types[1:]]
        last = int(op.types[0][1:] == "16" and rng.random() < 0.5)
        form.op_sel = [*picks, last, 0][: max(count + 1, 4)]
    return form


def packed_form(name: str, rng: random.Random, clamp: bool) -> Form:
    op, form = OPS[name], usual(name)
    count = len(op.types) - 1
    kinds = ["pk"] * count if "packed" in op.flags else op.types[1:]
    able = [k in ("pk", "pkf", "mix") for k in kinds] + [False] * 3
    form.op_sel = [int(a and rng.random() < 0.5) for a in able[:3]] + [0]
    high = [int(rng.random() < 0.5) if a else 1 - int("mix" in op.types) for a in able]
    form.op_sel_hi = high[:3]
    if "mix" in op.types:
        form.neg, form.abs = signs(op, rng), signs(op, rng, 0.3)
    elif op.types[1] in ("f16", "pkf"):
        form.neg = [int(i < count and rng.random() < 0.5) for i in range(3)]
        form.neg_hi = [int(a and rng.random() < 0.5) for a in able[:3]]
        form.neg_hi = [h if i < count else 0 for i, h in enumerate(form.neg_hi)]
    form.clamp = clampable(op) and clamp
    return form


def sdwa_form(name: str, rng: random.Random) -> Form:
    op, form = OPS[name], usual(name)
    form.encoding = "sdwa"
    count = len(form.sources)
    picks = list(v.SELECTS)
    form.select = [rng.choice(picks) for _ in range(count + (op.types[0] != "mask"))]
    form.unused = rng.choice(("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"))
    if "signed" not in op.flags:
        form.neg, form.abs = signs(op, rng, 0.4), signs(op, rng, 0.3)
        whole = [k not in FLOATS for k in op.types[1 : 1 + count]]
        form.sext = [int(w and rng.random() < 0.5) for w in (*whole, False)][:2]
    if op.types[0] == "mask":
        form.to_scalar = rng.random() < 0.5
    form.clamp = clampable(op) and rng.random() < 0.3
    return form


def dpp_form(name: str, rng: random.Random, in_place: bool) -> Form:
    op, form = OPS[name], usual(name)
    form.encoding = "dpp"
    if in_place:
        form.sources = [Source("v14", 3), *form.sources[1:]]
    rows, banks = rng.choice(((15, 15), (10, 15), (15, 5)))
    form.dpp = Dpp(rng.choice(CONTROLS), rows, banks, rng.random() < 0.5)
    if "signed" not in op.flags:
        form.neg, form.abs = signs(op, rng, 0.3), signs(op, rng, 0.3)
    return form


def constant(kind: str, rng: random.Random, most: int) -> Source:
    """An inline constant, a scalar register or a literal for this operand."""
    bits_ = v.width(kind)
    which = rng.randrange(most if bits_ < 64 else min(most, 3))
    if which == 2:
        pair = bits_ == 64
        return Source("s[24:25]" if pair else "s24", value=v.SCALARS if pair else
                      v.SCALARS & n.M32)  # fmt: skip
    if which == 0:
        number = rng.choice((0, 1, 37, 64, -1, -16))
        return Source(str(number), value=number & n.M64)
    if which == 1:
        text, half, single, double = rng.choice(INLINE[: 3 if kind[0] == "f" else 2])
        value = {16: half, 32: single, 64: double}[bits_]
        return Source(text, value=value)
    number = rng.getrandbits(bits_) | 1 << bits_ - 2 | 0x81
    number &= ~0x80000000 if bits_ == 32 else 0x7FFF
    return Source(f"{number:#x}", value=number)


def operand_form(name: str, rng: random.Random) -> Form:
    """One source is a scalar or a constant."""
    op, form = OPS[name], usual(name)
    sources = list(form.sources)
    kinds = list(op.types[1:])
    # One read of scalar registers is allowed, and VCC may be it.
    takes_vcc = kinds[-1] == "mask" or "fmas" in name
    most = 2 if takes_vcc else 4 if op.where in "12C" else 3
    at = 0 if op.where in "12C" else rng.randrange(len(sources))
    sources[at] = constant(kinds[at], rng, most)
    form.sources = sources
    return form


# ---- cases -----------------------------------------------------------------

ROUND = tuple(mode | mode << 2 | USUAL_MODE for mode in (1, 2, 3))
MIXED_ROUND = USUAL_MODE | 1 | 2 << 2
DENORM = tuple(d << 4 | d << 6 | 0x300 for d in (0, 1, 2))


def modes(op: Op) -> list[int]:
    """Values of MODE worth a case of their own."""
    if op.types[0] == "mask" or not is_float(op):
        # MODE must not touch integers; floats lose their denormals.
        return [*DENORM] if is_float(op) else [DENORM[0]] * 2
    return [*ROUND, MIXED_ROUND, *DENORM, 0x30 | 0x300, 0xC0 | 0x300, 0x0F0, 0x1F0]


def cases_of(name: str) -> list[Case]:
    """The cases of a vector instruction; the same ones at each call."""
    op, rng = OPS[name], random.Random(name)
    forms: list[tuple[Form, str, int]] = []

    def add(form: Form, how: str = "", mode: int = USUAL_MODE) -> None:
        forms.append((form, how, mode))

    narrow = all(v.width(k) < 64 for k in op.types)
    for how in ("", "", "wild", *(("tiny",) if is_float(op) else ())):
        add(usual(name), how)
    for mode in modes(op):
        add(usual(name), rng.choice(("", "tiny", "moderate")), mode)
    if "k32" in op.flags:
        forms += [(usual(name), "tiny", mode) for mode in (USUAL_MODE, DENORM[0]) * 4]
        forms = [
            (literal_form(name, i), how, mode) for i, (_, how, mode) in enumerate(forms)
        ]
    elif op.where == "P":
        for i in range(4):
            add(packed_form(name, rng, i % 2 == 0))
        for i in range(2):
            mode = 0x0F0 if is_float(op) else USUAL_MODE
            add(packed_form(name, rng, i == 0), "", mode)
    else:
        for i in range(4):
            add(wide_form(name, rng, i % 2 == 0))
        add(operand_form(name, rng))
        add(operand_form(name, rng))
        if op.types[0] in FLOATS:
            add(wide_form(name, rng, True), "", 0x0F0)
            for omod in (1, 2, 3) if "half" not in op.flags else ():
                form = wide_form(name, rng, omod == 2)
                form.omod = omod
                add(form, "moderate", 0x100)
    if op.where in "12C" and narrow and "k32" not in op.flags:
        if name not in NO_SDWA:
            for _ in range(3):
                add(sdwa_form(name, rng))
        if op.where != "C":
            add(dpp_form(name, rng, True))
            add(dpp_form(name, rng, False))
    cases = []
    for form, how, mode in forms:
        rows = make_rows(op, rng, how)
        vcc = rng.getrandbits(64)
        mask = random_exec(rng) if len(cases) % 3 == 2 else v.ALL
        cases.append(Case(spell(form), form, rows, vcc, mask, mode))
    return cases


def literal_form(name: str, number: int) -> Form:
    """v_madmk and v_madak: the third source is a literal."""
    form = usual(name)
    values = {"f32": (0x3F9D70A4, 0x80012345, 0x20000001, 0x00900001),
              "f16": (0x3C71, 0x8123, 0x1C01, 0x0481)}[form.op.types[0]]  # fmt: skip
    value = values[number // 2 % 4] ^ (number & 1) << 4
    form.sources = [*form.sources[:2], Source(f"{value:#x}", value=value)]
    return form


def lane_cases(name: str) -> list[tuple[Case, v.Outcome]]:
    """Instructions that are not one function per lane, with their outcomes."""
    rng = random.Random(name)
    form = usual("v_mov_b32")
    found = []
    masks = (1 << 40 | 1 << 50, 0, v.ALL, v.ALL, rng.getrandbits(64))
    move = "\n    v_mov_b32 v15, v8"
    for mask in masks:
        rows = make_rows(form.op, rng)
        a = [row[0] & n.M32 for row in rows]
        old = [row[3] for row in rows]
        out = v.Outcome(list(old), rng.getrandbits(64), mask, v.UNTOUCHED)
        text = name
        if name == "v_readfirstlane_b32":
            text += " s22, v8"
            first = (mask & -mask).bit_length() - 1 if mask else 0
            out.scalar = v.UNTOUCHED & ~n.M32 | a[first]
        elif name == "v_readlane_b32":
            lane = rng.randrange(64)
            text = f"s_movk_i32 s26, {lane + 64}\n    {name} s22, v8, s26"
            out.scalar = v.UNTOUCHED & ~n.M32 | a[lane]
        elif name == "v_writelane_b32":
            lane = rng.randrange(64)
            text = f"s_mov_b32 m0, {lane + 128}\n    {name} v14, s24, m0"
            out.d[lane] = old[lane] & ~n.M32 | v.SCALARS & n.M32
        elif name == "v_swap_b32":
            text += f" v14, v8{move}"
            for lane in (i for i in range(v.LANES) if mask >> i & 1):
                out.d[lane] = a[lane] | (old[lane] & n.M32) << 32
        elif name not in ("v_nop", "v_clrexcp"):
            raise KeyError(name)
        found.append((Case(text, form, rows, out.vcc, mask), out))
    if name == "v_readlane_b32":
        case, out = found[-1]
        out = v.Outcome(out.d, out.vcc, out.exec, v.UNTOUCHED & ~n.M32 | a[9])
        text = f"{name} s22, v8, 9"
        found.append((Case(text, form, case.rows, out.vcc, case.exec), out))
    return found


def unit(name: str) -> Unit:
    """The kernel that tests this instruction; KeyError if there is no model."""
    if name in OPS:
        found = [(case, v.expect(case)) for case in cases_of(name)]
    else:
        found = lane_cases(name)
    cases = [case for case, _ in found]
    expected = b"".join(v.pack(outcome) for _, outcome in found)
    labels = [(v.BYTES * i, case.text) for i, case in enumerate(cases)]
    return Unit([name], v.body(cases), v.pack_rows(cases), bytes(len(expected)),
                expected, labels)  # fmt: skip
