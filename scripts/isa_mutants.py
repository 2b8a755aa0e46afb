"""Mutants of the instruction lists: what could be wrong in a row, one at a time.

A statement mutant changes the C statement of a row, a table mutant what the row
says beside it (types, flags, kind and bytes of an access), an opcode mutant makes
the decoder lose the row's opcode. Only text is made here; mutate_isa.py builds a
library of it and runs the tests.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from isa_lists import LISTS, Row, read

TOKEN = re.compile(
    r"[A-Za-z_]\w*|0x[0-9a-fA-F]+u?|\d+\.\d*f?|\d+u?"
    r"|<<|>>|<=|>=|==|!=|&&|\|\||->|[-+|&^]=|\S|\s+"
)
OPERATORS = {
    "+": ["-"], "-": ["+"], "*": ["+"], "/": ["*"], "&": ["|"], "|": ["&"],
    "^": ["|"], "<<": [">>"], ">>": ["<<"], "<": ["<=", ">"], "<=": ["<"],
    ">": [">=", "<"], ">=": [">"], "==": ["!="], "!=": ["=="], "&&": ["||"],
    "||": ["&&"], "~": [""], "!": [""], "&=": ["|="], "|=": ["&="], "+=": ["-="],
}  # fmt: skip
WORDS = {
    "CLAMP": ["0", "1"], "IEEE": ["!IEEE"], "ROUND": ["0"], "VCC_BIT": ["0", "1"],
    "SCC": [], "UINT32_MAX": ["(UINT32_MAX - 1)"], "flush": [""], "sext24": [""],
    "min_float": ["max_float"], "max_float": ["min_float"],
    "min_double": ["max_double"], "max_double": ["min_double"],
    "half_toward_zero": ["half_nearest"], "snorm16": ["unorm16"],
    "unorm16": ["snorm16"], "dot_signed": ["dot_unsigned"],
    "dot_unsigned": ["dot_signed"], "low_i16": ["high_i16"], "high_i16": ["low_i16"],
    "bit_field": ["bit_field_signed"], "bit_field_signed": ["bit_field"],
    "floor_float": ["ceil_float"], "ceil_float": ["trunc_float"],
    "trunc_float": ["floor_float"], "nearest_float": ["floor_float"],
    "floor_double": ["ceil_double"], "ceil_double": ["trunc_double"],
    "trunc_double": ["floor_double"], "nearest_double": ["floor_double"],
    "sin_turns": ["cos_turns"], "cos_turns": ["sin_turns"],
    "exp2_float": ["sqrtf"], "log2_float": ["sqrtf"], "sqrtf": ["rsq_float"],
    "rsq_float": ["sqrtf"], "rsq_double": ["sqrt"], "sqrt": ["rsq_double"],
    "clamp_i64": ["(int32_t)"], "count_bits": ["first_bit"],
    "leading_zeros": [], "fma_half": ["fma_float"], "mul_legacy": ["add_uniform"],
    "fract_half": ["fract_float"], "fract_float": ["floor_float"],
    "cube_s": ["cube_t"], "cube_t": ["cube_s"], "cube_face": ["cube_major"],
    "cube_major": ["cube_s"], "clamp_unit": [""],
    "div_fmas_float": ["fma_float"], "div_fmas_double": ["fma"],
}  # fmt: skip
CASTS = {"uint64_t": "uint32_t", "int64_t": "int32_t", "int8_t": "uint8_t",
         "int16_t": "uint16_t"}  # fmt: skip
# Another reading of an operand: signedness, or the other width.
READINGS = {"u32": "(int32_t){0}", "i32": "(uint32_t){0}", "u16": "(int16_t){0}",
            "i16": "({0} & 0xffff)", "u64": "(int64_t){0}",
            "i64": "(uint64_t){0}"}  # fmt: skip
TYPES = {"f32": ["u32", "f16"], "f16": ["f32", "u16"], "u16": ["i16", "u32"],
         "i16": ["u16"], "f64": ["u64"], "pk16": ["u32"], "pkf16": ["pk16"],
         "mix": ["f32"], "raw": ["pk16"], "u32": ["f32", "u16"],
         "i32": ["f32"]}  # fmt: skip
KINDS = {
    "M_LOAD": ["M_STORE"], "M_STORE": ["M_LOAD"],
    "M_LOAD_I8": ["M_LOAD_U8"], "M_LOAD_U8": ["M_LOAD_I8"],
    "M_LOAD_I16": ["M_LOAD_U16"], "M_LOAD_U16": ["M_LOAD_I16"],
    "M_LOAD_I8_LO": ["M_LOAD_I8_HI", "M_LOAD_U8_LO"],
    "M_LOAD_U8_LO": ["M_LOAD_U8_HI", "M_LOAD_I8_LO"],
    "M_LOAD_16_LO": ["M_LOAD_16_HI", "M_LOAD_I8_LO"],
    "M_LOAD_I8_HI": ["M_LOAD_I8_LO", "M_LOAD_U8_HI"],
    "M_LOAD_U8_HI": ["M_LOAD_U8_LO", "M_LOAD_I8_HI"],
    "M_LOAD_16_HI": ["M_LOAD_16_LO", "M_LOAD_U16"],
    "M_STORE_8": ["M_STORE_8_HI"], "M_STORE_16": ["M_STORE_16_HI"],
    "M_STORE_8_HI": ["M_STORE_8"], "M_STORE_16_HI": ["M_STORE_16"],
    "M_BUFFER_LOAD": ["M_LOAD"], "M_READ2": ["M_READ2ST64", "M_WRITE2"],
    "M_READ2ST64": ["M_READ2"], "M_WRITE2": ["M_WRITE2ST64"],
    "M_WRITE2ST64": ["M_WRITE2"], "M_SWIZZLE": ["M_BPERMUTE"],
    "M_PERMUTE": ["M_BPERMUTE"], "M_BPERMUTE": ["M_PERMUTE"],
    "M_XCHG2": ["M_XCHG2ST64", "M_READ2"], "M_XCHG2ST64": ["M_XCHG2"],
    "M_APPEND": ["M_CONSUME"], "M_CONSUME": ["M_APPEND"],
    "M_CACHE": ["M_TIME"], "M_TIME": ["M_CACHE"], "M_NOP": ["M_PERMUTE"],
}  # fmt: skip
FLAGS = {"_CO": ("carry", "ISA_CARRY"), "_SEL": ("op_sel", "ISA_SELECT")}


@dataclasses.dataclass
class Mutant:
    """One change of one row.

    statement: the changed C statement, or empty.
    patches: (instruction, member of isa_info, C expression), or empty.
    An opcode mutant has neither.
    """

    row: Row
    what: str
    statement: str = ""
    patches: tuple[tuple[str, str, str], ...] = ()

    @property
    def opcode(self) -> bool:
        return not self.statement and not self.patches

    @property
    def name(self) -> str:
        return f"{self.row.instructions()[0]}: {self.what}"


# ---- statements ------------------------------------------------------------


def tokens(text: str) -> list[str]:
    return TOKEN.findall(text)


def is_binary(parts: list[str], i: int) -> bool:
    """Whether the operator at i has something to its left."""
    left = [part for part in parts[:i] if not part.isspace()]
    return bool(left) and (left[-1][-1].isalnum() or left[-1] in (")", "_"))


def next_number(text: str) -> str:
    """The literal one higher."""
    suffix = text[-1] if text[-1] in "uf" and not text.startswith("0x") else ""
    suffix = "u" if text.startswith("0x") and text.endswith("u") else suffix
    body = text[: len(text) - len(suffix)]
    if "." in body:
        return f"{float(body) + 1}{suffix}"
    return f"{int(body, 0) + 1}{suffix}"


def changed_tokens(parts: list[str]) -> Iterator[tuple[str, int, str]]:
    """(what, position, replacement) of single tokens."""
    for i, part in enumerate(parts):
        if part in OPERATORS and (part in "~!" or is_binary(parts, i)):
            for other in OPERATORS[part]:
                yield f"{part} is {other or 'dropped'}", i, other
        elif part[0].isdigit():
            yield f"{part} is one more", i, next_number(part)
        elif part in WORDS:
            for other in WORDS[part]:
                yield f"{part} is {other or 'dropped'}", i, other
        elif part in CASTS and i and parts[i - 1] == "(" and parts[i + 1] == ")":
            yield f"{part} is {CASTS[part]}", i, CASTS[part]


def swapped(text: str, a: str, b: str) -> str:
    names = {a: b, b: a}
    return re.sub(rf"\b({a}|{b})\b", lambda word: names[word[0]], text)


def statements(row: Row) -> Iterator[tuple[str, str]]:
    """(what, statement) of the row's statement mutants."""
    text = row.cells["meaning"]
    parts = tokens(text)
    for what, i, other in changed_tokens(parts):
        place = sum(p == parts[i] for p in parts[:i])
        where = f" ({place + 1})" if parts.count(parts[i]) > 1 else ""
        yield what + where, "".join([*parts[:i], other, *parts[i + 1 :]])
    types = {c: row.cells.get(c, row.cells.get("type", "none")) for c in "ABCDM"}
    used = [x for x in "MABC" if re.search(rf"\b{x}\b", text) and types[x] != "none"]
    for a, b in zip(used, used[1:]):
        if types[a] == types[b]:
            yield f"{a} and {b} swapped", swapped(text, a, b)
    for x in used:
        if reading := READINGS.get(types[x]):
            other = re.sub(rf"\b{x}\b", f"({reading.format(x)})", text)
            yield f"{x} read with the other sign", other
    if re.search(r"\bD = ", text):
        kind = "mask" if row.list == "vopc" else types["D"]
        kind = row.cells.get("type", kind)
        change = {"f": "D = -D", "m": "D = !D"}.get(kind[0], "D = D + 1")
        yield "result off", f"{text}; {change}"
    elif row.list == "sopp":
        yield from control_statements(row)
    if "jump(w, A)" in text:
        yield "target off", text.replace("jump(w, A)", "jump(w, A + 4)")
    if "; SCC = " in text:
        yield "SCC left alone", text[: text.rindex("; SCC = ")]


def control_statements(row: Row) -> Iterator[tuple[str, str]]:
    """Of rows that write no register."""
    text = row.cells["meaning"]
    if text != "(void)IMM":
        yield "no effect", "(void)IMM"
    yield "SCC changes too", f"{text}; w->scc ^= 1"
    if "WAVE_ENDED" not in text:
        yield "ends the wave", "w->state = WAVE_ENDED"
    if "branch(w, IMM)" in text:
        yield "target off", text.replace("branch(w, IMM)", "branch(w, IMM + 1)")


# ---- tables ----------------------------------------------------------------


def tables(row: Row) -> Iterator[tuple[str, str, str]]:
    """(what, member, C expression) of the row's table mutants."""
    if row.list.startswith("vop") and not row.macro.endswith("SPECIAL"):
        for i, column in enumerate("DABC"):
            kind = row.cells.get(column, "none")
            for other in TYPES.get(kind, []) if column != "D" else result_types(kind):
                yield f"{column} is {other}, not {kind}", f"type[{i}]", f"T_{other}"
    for suffix, (what, flag) in FLAGS.items():
        if row.macro.endswith(suffix):
            yield f"no {what}", "flags", "0"
        elif suffix == "_SEL" and row.macro == "VOP3" and "16" in row.cells["D"]:
            yield f"has {what}", "flags", flag
    for other in KINDS.get(row.cells.get("kind", ""), []):
        yield f"{row.cells['kind']} is {other}", "access", other
    size = int(row.cells.get("bytes", "0")) or 4 * int(row.cells.get("dwords", "0"))
    if size:
        other = size // 2 if size >= 8 or size == 2 else 2 * size
        yield f"{other} bytes, not {size}", "bytes", str(other)
    if "sources" in row.cells:
        bytes_ = 4 if "32" in row.cells["type"] else 8
        yield f"{12 - bytes_} bytes, not {bytes_}", "bytes", str(12 - bytes_)


def result_types(kind: str) -> list[str]:
    return {"f32": ["u32"], "f16": ["f32"], "u16": ["u32"], "i16": ["u32"],
            "f64": ["u64"], "hi16": ["f16"]}.get(kind, [])  # fmt: skip


def flag_patches(row: Row) -> Iterator[tuple[str, tuple[tuple[str, str, str], ...]]]:
    """Atomics: the flags of each instruction are its own."""
    names = row.instructions()
    if "sources" not in row.cells:
        return
    two = "ISA_TWO_DATA" if row.cells["sources"] == "2" else "0"
    other = "0" if two != "0" else "ISA_TWO_DATA"
    returns = [("rtn" in n or "wrxchg" in n) and row.list == "ds" for n in names]
    if two != "0":
        yield (
            "one data operand",
            tuple(
                (n, "flags", f"{other} | {'ISA_RETURN' if r else '0'}")
                for n, r in zip(names, returns)
            ),
        )
    if row.list == "ds":
        yield (
            "result of the other form",
            tuple(
                (n, "flags", f"{two} | {'0' if r else 'ISA_RETURN'}")
                for n, r in zip(names, returns)
            ),
        )


# ---- all -------------------------------------------------------------------


def mutants_of(row: Row) -> list[Mutant]:
    found = [Mutant(row, "opcode lost")]
    if "meaning" in row.cells and not row.macro.endswith("SPECIAL"):
        seen = {row.cells["meaning"]}
        for what, text in statements(row):
            if text not in seen:
                seen.add(text)
                found.append(Mutant(row, what, text))
    for what, member, value in tables(row):
        patches = tuple((name, member, value) for name in row.instructions())
        found.append(Mutant(row, what, patches=patches))
    for what, patches in flag_patches(row):
        found.append(Mutant(row, what, patches=patches))
    return found


def all_mutants() -> list[Mutant]:
    """Of every row; a mutant's number is its place in the list plus one."""
    return [m for name in LISTS for row in read(name).rows for m in mutants_of(row)]


def list_text(name: str, numbered: list[tuple[int, Mutant]]) -> str:
    """The list with all its statement mutants, chosen by hipsim_mutant."""
    source = read(name)
    changed: dict[str, list[str]] = {m.row.name: [] for _, m in numbered}
    for number, mutant in numbered:
        if mutant.statement:
            changed[mutant.row.name].append(
                f"if (hipsim_mutant == {number}) {{ {mutant.statement}; }}"
            )
    rows = []
    for row in source.rows:
        if changes := changed.get(row.name):
            meaning = " else ".join([*changes, f"{{ {row.cells['meaning']}; }}"])
            rows.append(row.text(meaning=meaning))
        else:
            rows.append(row.text())
    return "\n".join([source.head, *rows, source.tail, ""])
