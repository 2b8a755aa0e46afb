"""The table that isa_model.py and isa_rare.py fill: vector instructions with their
operand types and a function from operand bits to result bits.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from isa_numbers import saturate

FLOATS = ("f16", "f32", "f64")
# MODE at the start of a kernel: denormals kept, DX10_CLAMP, IEEE.
USUAL_MODE = 0x3F0


@dataclasses.dataclass(frozen=True)
class Env:
    """What a lane sees beside its operands."""

    mode: int = USUAL_MODE
    lane: int = 0
    vcc: int = 0  # this lane's bit
    clamp: bool = False

    def round(self, kind: str) -> int:
        return self.mode >> (0 if kind == "f32" else 2) & 3

    @property
    def ieee(self) -> bool:
        return bool(self.mode >> 9 & 1)

    def keeps(self, kind: str, output: bool) -> bool:
        """Whether denormals of this format survive."""
        return bool(self.mode >> (4 if kind == "f32" else 6) >> output & 1)


@dataclasses.dataclass(frozen=True)
class Op:
    """types: D and the sources; u, i or f with bits, mask, pk (two halves), mix
    (f32 or a half). where: 1, 2, C: that encoding, with a VOP3 form; 3; P."""

    types: tuple[str, ...]
    where: str
    function: Callable[..., Any]
    flags: frozenset[str]  # carry, half (op_sel), packed, k32 (only e32)


OPS: dict[str, Op] = {}


def op(
    name: str, types: str, where: str, function: Callable[..., Any], flags: str = ""
) -> None:
    """One entry; the function takes the environment and the sources."""
    OPS[name] = Op(tuple(types.split()), where, function, frozenset(flags.split()))


def ints(
    name: str, types: str, where: str, function: Callable[..., int], flags: str = ""
) -> None:
    """The same for a function of the sources only."""
    op(name, types, where, lambda e, *x: function(*x), flags)


def limits(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "i" else (
        0, (1 << bits) - 1)  # fmt: skip


def clamped(
    name: str, types: str, where: str, function: Callable[..., int], flags: str = ""
) -> None:
    """An exact result that wraps, or saturates under clamp."""
    low, high = limits(types.split()[0])

    def call(e: Env, *x: int) -> int:
        return saturate(function(*x), low, high) if e.clamp else function(*x)

    op(name, types, where, call, f"{flags} clamped")
