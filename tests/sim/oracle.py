"""Runs many small kernels against the outputs that a model expects.

A Unit is the kernel that tests one instruction: its body, an input buffer and
the expected contents of an output buffer. All units of an Oracle are kernels of
one code object.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import isa_tools

import hipsim


@dataclasses.dataclass
class Unit:
    """s[4:5] points to the addresses of source (read only) and target.

    names: the instructions that this unit tests, as the lists spell them.
    labels: (offset in target, what was run), for messages, ascending.
    fault: the report if the kernel must be stopped; target then does not count.
    """

    names: Sequence[str]
    body: str
    source: bytes
    target: bytes  # before
    expected: bytes  # after
    labels: Sequence[tuple[int, str]] = ()
    settings: dict[str, int] = dataclasses.field(default_factory=dict)
    fault: str = ""
    threads: int = 64

    def label(self, offset: int) -> str:
        found = [text for start, text in self.labels if start <= offset]
        return found[-1] if found else self.body


class Oracle:
    """Units, assembled; a context manager that unloads them."""

    def __init__(self, units: Sequence[Unit], image: bytes | None = None) -> None:
        self.units = units
        self.image = image or isa_tools.link(source(units))
        self.module = hipsim.Module(self.image)
        self.kernels = [self.module.kernel(f"k{i}") for i in range(len(units))]

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self.module.close()

    def run(self, i: int) -> str:
        """Runs a unit once; empty, or what is wrong."""
        unit = self.units[i]
        target = bytearray(unit.target)
        buffers = [
            hipsim.Buffer(bytearray(unit.source or b"\0"), "r"),
            hipsim.Buffer(target, "rw"),
        ]
        try:
            self.kernels[i].launch((1, 1, 1), (unit.threads, 1, 1), buffers)
        except hipsim.HipError as error:
            wanted = unit.fault and unit.fault.lower() in error.report.lower()
            return "" if wanted else error.report
        if unit.fault:
            return f"{unit.body}: expected the report {unit.fault!r}, got none"
        return difference(unit, target)

    def failures(self) -> list[str]:
        """Complaints of all units under both vector engines."""
        before = hipsim.get_option("cpu")
        found = []
        try:
            for cpu in (0, 1):
                hipsim.set_option("cpu", cpu)
                for i in range(len(self.units)):
                    text = self.run(i)
                    found += [f"cpu {cpu}: {text}"] if text else []
        finally:
            hipsim.set_option("cpu", before)
        return found


def source(units: Sequence[Unit]) -> str:
    """Assembly of the units' kernels k0, k1, ..."""
    bodies = {
        f"k{i}": (f"{unit.body}\n    s_endpgm", unit.settings)
        for i, unit in enumerate(units)
    }
    return isa_tools.kernels_source(bodies)


def difference(unit: Unit, target: bytearray) -> str:
    """The first wrong dword, and how many there are."""
    if target == unit.expected:
        return ""
    words = [
        (at, unit.expected[at : at + 4], bytes(target[at : at + 4]))
        for at in range(0, len(target), 4)
        if target[at : at + 4] != unit.expected[at : at + 4]
    ]
    at, want, got = words[0]
    return (
        f"{unit.label(at)}: offset {at:#x} expected {want[::-1].hex()}, "
        f"got {got[::-1].hex()}; {len(words)} dwords differ"
    )
