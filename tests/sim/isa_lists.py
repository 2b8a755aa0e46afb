"""The simulator's instruction lists, csrc/sim/*.def, read row by row.

The lists are C macros; the few that are defined inside a list are expanded
here, so that each row that comes out stands for one opcode (an LDS atomic: for
two, with and without result).

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "csrc" / "sim"
LISTS = ("sop2", "sop1", "sopk", "sopc", "sopp", "smem", "vop1", "vop2", "vopc",
         "vop3", "vop3p", "ds", "vmem")  # fmt: skip

# What the other files define before they include a list, and its columns; the
# last one takes all that is left.
COLUMNS = {
    "SOP2": "opcode name D A B meaning",
    "SOP1": "opcode name D A meaning",
    "SOPK": "opcode name D use meaning",
    "SOPC": "opcode name A B meaning",
    "SOPP": "opcode name style meaning",
    "SMEM": "opcode name kind dwords",
    "VOP1": "opcode name D A meaning",
    "VOP2": "opcode name D A B C meaning",
    "VOPC": "opcode name A B meaning",
    "VOP3": "opcode name D A B C meaning",
    "VOP3P": "opcode name D A B C meaning",
    "DS": "opcode name kind bytes",
    "DS_ATOMIC": "opcode name rtn type sources meaning",
    "DS_ATOMIC_RTN": "opcode name type sources meaning",
    "VMEM": "opcode name kind bytes",
    "VMEM_ATOMIC": "opcode name type sources meaning",
    "MUBUF": "opcode name kind",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: the macro as written, its columns by name."""

    list: str
    macro: str
    cells: dict[str, str]

    @property
    def name(self) -> str:
        return self.cells["name"]

    @property
    def opcode(self) -> int:
        return sum(int(part, 0) for part in self.cells["opcode"].split("+"))

    def instructions(self) -> list[str]:
        """The names of the instructions that the row stands for."""
        if self.macro == "DS_ATOMIC":
            return [f"ds_{self.name}", f"ds_{self.cells['rtn']}"]
        if self.macro in ("DS", "DS_ATOMIC_RTN"):
            return [f"ds_{self.name}"]
        if self.macro == "VMEM":
            units = ("flat", "global", "scratch", "buffer")
            return [f"{unit}_{self.name}" for unit in units]
        if self.macro == "VMEM_ATOMIC":
            return [f"{unit}_{self.name}" for unit in ("flat", "global", "buffer")]
        return [self.name]

    def text(self, **changed: str) -> str:
        """The row as a macro call, some columns replaced."""
        return f"{self.macro}({', '.join({**self.cells, **changed}.values())})"


def columns(macro: str) -> list[str]:
    """Names of a row macro's columns (VOP2_CO has those of VOP2)."""
    while macro not in COLUMNS:
        macro = macro.rsplit("_", 1)[0]
    return COLUMNS[macro].split()


def split(text: str) -> list[str]:
    """The arguments of a macro call, at commas outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [" ".join(part.split()) for part in parts]


def calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """(macro, arguments) of each call in the text."""
    at = 0
    while match := re.compile(r"\b([A-Z][A-Z0-9_]*)\(").search(text, at):
        depth, at = 1, match.end()
        while depth:
            depth += (text[at] == "(") - (text[at] == ")")
            at += 1
        yield match[1], split(text[match.end() : at - 1])


@dataclasses.dataclass(frozen=True)
class List:
    """A list: what stands before its rows, its rows, what stands after."""

    head: str
    rows: list[Row]
    tail: str


def read(name: str, folder: Path = FOLDER) -> List:
    """The list in folder/name.def, macros of its own expanded."""
    text = (folder / f"{name}.def").read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S).replace("\\\n", " ")
    own: dict[str, tuple[list[str], str]] = {}
    lines: dict[str, list[str]] = {"head": [], "tail": []}
    body = []
    for line in text.splitlines():
        define = re.match(r"#define (\w+)\(([^)]*)\) ?(.*)", line)
        if define and define[3]:
            own[define[1]] = (split(define[2]), define[3])
        elif line.startswith("#undef"):
            if line.split()[1] not in own:
                lines["tail"].append(line)
        elif line.startswith("#"):
            lines["head"].append(line)
        else:
            body.append(line)

    def expand(text: str) -> Iterator[Row]:
        for macro, arguments in calls(text):
            if macro in own:
                parameters, inner = own[macro]
                values = dict(zip(parameters, arguments))
                if parameters[-1] == "...":
                    rest = ", ".join(arguments[len(parameters) - 1 :])
                    values["__VA_ARGS__"] = rest
                pattern = "|".join(map(re.escape, values))
                inner = re.sub(
                    rf"\b({pattern})\b", lambda word, v=values: v[word[0]], inner
                )
                yield from expand(re.sub(r"\s*##\s*", "", inner))
            else:
                names = columns(macro)
                most = len(names) - 1
                cells = [*arguments[:most], ", ".join(arguments[most:])]
                yield Row(name, macro, dict(zip(names, cells)))

    rows = list(expand("\n".join(body)))
    return List("\n".join(lines["head"]), rows, "\n".join(lines["tail"]))


def all_rows() -> list[Row]:
    return [row for name in LISTS for row in read(name).rows]
