"""A disassembly with a profile's counts beside each instruction.

Takes the text of hipsimDisassemble as it is: a line "kernel:" and then lines
"  1a4:  v_add_f32 ...", with offsets from the kernel's first byte in hexadecimal.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from .files import FileError
from .profile_file import Launch, Profile
from .profile_table import error_text, simulated_text

_SUMS = ("count", "lds_conflict_cycles", "stall_cycles")
_TITLES = ("count", "lanes", "conflicts", "stall")
_WIDTHS = (11, 6, 10, 8)

Sums = dict[int, Counter[str]]


def annotate(
    text: str, profile: Profile, source: Path, hashes: Mapping[str, str] | None = None
) -> str:
    """`text` with executions, active lanes, LDS conflicts and stalls per line.

    Executions by a wave and LDS conflict cycles are sums over the profile's
    launches of each kernel; lanes and stall cycles are means of one execution (-:
    none was traced). A dot marks an instruction that none of the launches executed.
    `hashes` are the code_hash of the kernels of `text`, as object_info() has them.

    Raises:
        FileError: no kernel of `text` was launched, or the profile belongs to
            another build of the object; the message names `source`.
    """
    launched: dict[str, list[Launch]] = {}
    for launch in profile["launches"]:
        launched.setdefault(launch["kernel"], []).append(launch)
    kernels = _split(text)
    if not launched.keys() & kernels.keys():
        raise FileError(
            f"{source}: no launch of {', '.join(kernels)} (launched: "
            f"{', '.join(launched) or 'nothing'})"
        )
    for name, code_hash in (hashes or {}).items():
        for launch in launched.get(name, []) if name in kernels else []:
            if launch.get("code_hash", code_hash) != code_hash:
                raise FileError(
                    f"{source}: {name} has other code in this object: the profile "
                    "is of another build"
                )
    out = [simulated_text(profile)]
    for name, lines in kernels.items():
        launches = launched.get(name, [])
        out += ["", f"{name}:", *_heading(launches), *_body(lines, launches, source)]
    return "\n".join(out) + "\n"


def _split(text: str) -> dict[str, list[str]]:
    """Kernel -> the lines of its instructions."""
    kernels: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith(" "):
            kernels[next(reversed(kernels))].append(line)
        else:
            kernels[line.rstrip(":")] = []
    return kernels


def _body(lines: list[str], launches: list[Launch], source: Path) -> list[str]:
    sums = _sum(launches)
    offsets = [int(line.split(":", 1)[0], 16) for line in lines]
    out = [_cells(sums.pop(at, None)) + line for at, line in zip(offsets, lines)]
    elsewhere = 0
    for offset, row in sums.items():
        if 0 <= offset <= offsets[-1]:
            raise FileError(
                f"{source}: executed offset 0x{offset:x}, where this object has no "
                "instruction: the profile is of another build"
            )
        elsewhere += row["count"]
    if elsewhere:
        out.append(f"; and {elsewhere} executions in functions outside the kernel")
    return out


def _sum(launches: list[Launch]) -> Sums:
    sums: Sums = {}
    for launch in launches:
        for instruction in launch["instructions"]:
            row = sums.setdefault(instruction["offset"], Counter())
            for field in _SUMS:
                row[field] += instruction[field]
            # Stalls are known of the traced executions only.
            row["traced"] += instruction.get("traced", instruction["count"])
            row["lanes"] += instruction.get("lanes", 0) * instruction["count"]
    return sums


def _heading(launches: list[Launch]) -> list[str]:
    if not launches:
        return ["; not launched in this profile"]
    calls = "1 launch" if len(launches) == 1 else f"{len(launches)} launches"
    error = max(launch["estimate"]["error"] for launch in launches)
    return [
        f"; {calls}: executions by a wave, mean of active lanes, LDS conflict cycles,",
        f"; mean stall cycles of a traced execution (estimated, {error_text(error)})",
        _row(_TITLES) + "  offset  instruction",
    ]


def _cells(row: Counter[str] | None) -> str:
    if row is None or not row["count"]:
        return _row((".", "", "", ""))
    traced = row["traced"]
    stall = f"{row['stall_cycles'] / traced:.1f}" if traced else "-"
    counts = f"{row['count']}", f"{row['lanes'] / row['count']:.0f}"
    return _row((*counts, f"{row['lds_conflict_cycles']}", stall))


def _row(cells: tuple[str, ...]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS))
