"""Random instruction words of every encoding format of gfx906.

A format is a list of fields. Half of the words are tame (registers aligned,
modifiers mostly zero), so that most are instructions; in the others any field
may hold anything. Opcodes come from the whole field, more often from the part
that is in use.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

NAMED = (102, 104, 106, 112, 124, 126)  # flat_scratch ... vcc, ttmp, m0, exec
CONSTANTS = (*range(128, 209), *range(235, 239), *range(240, 249), 251, 252, 253)
# 0.5 -0.5 1 -1 2 -2 4 -4 and 1 / (2 pi)
HALVES = (0x3800, 0xB800, 0x3C00, 0xBC00, 0x4000, 0xC000, 0x4400, 0xC400, 0x3118)
SINGLES = (0x3F000000, 0xBF000000, 0x3F800000, 0xBF800000, 0x40000000, 0xC0000000,
           0x40800000, 0xC0800000, 0x3E22F983)  # fmt: skip
HIGH_DOUBLES = (0x3FE00000, 0xBFE00000, 0x3FF00000, 0xBFF00000, 0x40000000,
                0xC0000000, 0x40100000, 0xC0100000, 0x3FC45F30)  # fmt: skip
SDWA, DPP, LITERAL = 249, 250, 255


def scalar(rng: random.Random) -> int:
    return rng.choice(NAMED) if rng.random() < 0.15 else 4 * rng.randrange(24)


def odd_scalar(rng: random.Random) -> int:
    return rng.randrange(102) if rng.random() < 0.5 else scalar(rng)


def constant_or_scalar(rng: random.Random) -> int:
    kind = rng.random()
    return (
        rng.choice(CONSTANTS) if kind < 0.35 else LITERAL if kind < 0.5 else scalar(rng)
    )


def source(rng: random.Random) -> int:
    if rng.random() < 0.6:
        return 256 + rng.randrange(240)
    return rng.choice(CONSTANTS) if rng.random() < 0.5 else scalar(rng)


def extended(rng: random.Random) -> int:
    """As in VOP1, VOP2, VOPC: SDWA, DPP or a literal may follow."""
    return rng.choice((SDWA, DPP, LITERAL)) if rng.random() < 0.5 else source(rng)


def vgpr(rng: random.Random) -> int:
    return rng.randrange(240)


def mostly_zero(rng: random.Random) -> int:
    return rng.getrandbits(32) if rng.random() < 0.2 else 0


def rarely(rng: random.Random) -> int:
    return rng.getrandbits(32) if rng.random() < 0.06 else 0


def anything(rng: random.Random) -> int:
    return rng.getrandbits(32)


def literal(rng: random.Random) -> int:
    """Half of them have an inline constant, in some type: its spelling differs."""
    if rng.random() < 0.5:
        return rng.getrandbits(32)
    value = rng.choice((*range(-20, 70), *HALVES, *SINGLES, *HIGH_DOUBLES))
    value ^= rng.getrandbits(16) << 16 if rng.random() < 0.2 else 0
    return value & 0xFFFFFFFF


def address_base(rng: random.Random) -> int:
    """SADDR of FLAT: none, or an SGPR pair."""
    return 127 if rng.random() < 0.6 else 2 * rng.randrange(50)


@dataclasses.dataclass(frozen=True)
class Field:
    low: int
    width: int
    tame: Callable[[random.Random], int]


@dataclasses.dataclass(frozen=True)
class Format:
    base: int
    opcode: Field
    used: Sequence[int]  # opcodes that a tame word has
    fields: Sequence[Field]
    # Fields that other formats take over for these values of the opcode.
    taken: Sequence[int] = ()
    extends: bool = False  # SDWA may follow
    # Fields without a literal: LLVM 22 can crash on one there.
    no_literal: Sequence[int] = ()

    def word(self, rng: random.Random) -> tuple[int, int]:
        """Two dwords; the second may be no part of the instruction."""
        wild = rng.random() < 0.35
        opcodes = range(1 << self.opcode.width)
        opcode = rng.choice(opcodes if wild or rng.random() < 0.1 else self.used)
        while opcode in self.taken:
            opcode = rng.choice(opcodes)
        bits = self.base | opcode << self.opcode.low
        loose = rng.randrange(1, 5) if wild else 0
        for field in self.fields:
            free = loose and rng.randrange(4) < loose
            value = rng.getrandbits(32) if free else field.tame(rng)
            value &= (1 << field.width) - 1
            value -= value == LITERAL and field.low in self.no_literal
            bits |= value << field.low
        if self.extends and bits & 0x1FF == SDWA:
            bits = without_seven(bits)
        elif self.extends and bits & 0x1FF == LITERAL:
            bits = bits & 0xFFFFFFFF | literal(rng) << 32
        return bits & 0xFFFFFFFF, bits >> 32


def without_seven(bits: int) -> int:
    """SDWA selects of 7, and 3 for the unused bits, mean nothing: LLVM 22's
    printer aborts on them. The test of the reserved selects has them."""
    for at, width in ((40, 3), (43, 2), (48, 3), (56, 3)):
        ones = (1 << width) - 1
        if bits >> at & ones == ones:
            bits ^= 1 << at
    return bits


SDWA_OR_DPP = (
    Field(32, 8, vgpr),
    Field(40, 9, anything),
    *(Field(49, 3, mostly_zero), Field(52, 4, mostly_zero)),
    *(Field(56, 3, anything), Field(59, 5, mostly_zero)),
)


def vop3_fields(*middle: Field) -> tuple[Field, ...]:
    return (
        *middle,
        *(Field(at, 9, source) for at in (32, 41)),
        Field(50, 9, lambda rng: source(rng) if rng.random() < 0.7 else 0),
        Field(59, 2, rarely),
        Field(61, 3, rarely),
    )


VOP3 = vop3_fields(Field(0, 8, vgpr), Field(8, 3, rarely), Field(11, 4, rarely),
                   Field(15, 1, rarely))  # fmt: skip
VOP3B = vop3_fields(Field(0, 8, vgpr), Field(8, 7, scalar),
                    Field(15, 1, mostly_zero))  # fmt: skip
VOP3C = vop3_fields(Field(0, 8, scalar), Field(8, 3, rarely), Field(11, 4, rarely),
                    Field(15, 1, rarely))  # fmt: skip
VOP3_CODES = (0, 32, 41, 50)  # VDST may be an SGPR
VMEM_DATA = (Field(32, 8, vgpr), Field(40, 8, vgpr))


def ds(*used: int) -> Format:
    """DS with registers in these fields; others mean something if they are 0."""
    return Format(
        0xD8000000, Field(17, 8, anything), range(0x100),
        (Field(0, 8, mostly_zero), Field(8, 8, mostly_zero), Field(16, 1, mostly_zero),
         Field(25, 1, rarely),
         *(Field(at, 8, vgpr if at in used else rarely) for at in (32, 40, 48, 56))),
    )  # fmt: skip


def flat(segment: int) -> Format:
    return Format(
        0xDC000000 | segment << 14, Field(18, 7, anything),
        (*range(0x10, 0x26), *range(0x40, 0x4D), *range(0x60, 0x6D)),
        (Field(0, 12, anything), Field(12, 1, anything if segment else mostly_zero),
         Field(13, 1, mostly_zero), *(Field(at, 1, anything) for at in (16, 17)),
         Field(25, 1, mostly_zero), *VMEM_DATA,
         Field(48, 7, address_base if segment else mostly_zero),
         Field(55, 1, mostly_zero), Field(56, 8, vgpr)),
    )  # fmt: skip


FORMATS: dict[str, Format] = {
    "SOP2": Format(
        0x80000000, Field(23, 7, anything), range(0x36),
        (Field(16, 7, scalar), Field(8, 8, constant_or_scalar),
         Field(0, 8, constant_or_scalar), Field(32, 32, literal)),
        range(0x60, 0x80),
    ),
    "SOPK": Format(
        0xB0000000, Field(23, 5, anything), range(0x16),
        (Field(16, 7, scalar), Field(0, 16, anything), Field(32, 32, literal)),
        range(0x1D, 0x20),
    ),
    "SOP1": Format(
        0xBE800000, Field(8, 8, anything), range(0x38),
        (Field(16, 7, scalar), Field(0, 8, constant_or_scalar),
         Field(32, 32, literal)),
    ),
    "SOPC": Format(
        0xBF000000, Field(16, 7, anything), range(0x14),
        (Field(8, 8, constant_or_scalar), Field(0, 8, constant_or_scalar),
         Field(32, 32, literal)),
    ),
    "SOPP": Format(
        0xBF800000, Field(16, 7, anything), range(0x1F),
        (Field(0, 4, mostly_zero), Field(4, 12, mostly_zero),
         Field(32, 32, anything)),
    ),
    "SMEM": Format(
        0xC0000000, Field(18, 8, anything),
        (*range(0x2A), *range(0x40, 0x4D), *range(0x60, 0x6D), *range(0x80, 0x8D),
         *range(0xA0, 0xAD)),
        (Field(0, 6, lambda rng: scalar(rng) // 2), Field(6, 7, scalar),
         Field(13, 1, rarely), Field(14, 1, rarely), Field(15, 1, rarely),
         Field(16, 1, mostly_zero), Field(17, 1, lambda rng: rng.random() < 0.6),
         Field(32, 21, lambda rng: rng.choice((odd_scalar(rng), anything(rng)))),
         Field(53, 4, rarely),
         Field(57, 7, lambda rng: odd_scalar(rng) * (rng.random() < 0.2))),
    ),
    "VOP1": Format(
        0x7E000000, Field(9, 8, anything), range(0x54),
        (Field(17, 8, vgpr), Field(0, 9, extended), *SDWA_OR_DPP), extends=True,
    ),
    "VOP2": Format(
        0, Field(25, 6, anything), range(0x3E),
        (Field(17, 8, vgpr), Field(9, 8, vgpr), Field(0, 9, extended), *SDWA_OR_DPP),
        (0x3E, 0x3F), True,
    ),
    "VOPC": Format(
        0x7C000000, Field(17, 8, anything), range(0x100),
        (Field(9, 8, vgpr), Field(0, 9, extended), *SDWA_OR_DPP), extends=True,
    ),
    "VOP3": Format(
        0xD0000000, Field(16, 10, anything),
        (*range(0x100, 0x208), *range(0x274, 0x2A1)), VOP3, range(0x380, 0x400),
        no_literal=VOP3_CODES,
    ),
    "VOP3B": Format(
        0xD0000000, Field(16, 10, anything),
        (*range(0x119, 0x11F), 0x1E0, 0x1E1, 0x1E8, 0x1E9), VOP3B, range(0x380, 0x400),
        no_literal=VOP3_CODES,
    ),
    "VOP3C": Format(
        0xD0000000, Field(16, 10, anything), (*range(0x100), 0x142, 0x289), VOP3C,
        range(0x380, 0x400), no_literal=VOP3_CODES,
    ),
    "VOP3P": Format(
        0xD3800000, Field(16, 7, anything),
        (*range(0x13), *range(0x20, 0x2C)),
        (*vop3_fields(Field(0, 8, vgpr), Field(8, 3, rarely), Field(11, 3, mostly_zero),
                      Field(14, 1, lambda rng: rng.random() < 0.8),
                      Field(15, 1, mostly_zero))[:-2],
         Field(59, 2, lambda rng: 3 if rng.random() < 0.7 else rng.getrandbits(2)),
         Field(61, 3, rarely)),
        no_literal=VOP3_CODES,
    ),
    "DS_READ": ds(32, 56), "DS_WRITE": ds(32, 40), "DS_WRITE2": ds(32, 40, 48),
    "DS_RTN": ds(32, 40, 56), "DS_RTN2": ds(32, 40, 48, 56), "DS_COUNT": ds(56),
    "DS_ONE": ds(32),
    "FLAT": flat(0), "SCRATCH": flat(1), "GLOBAL": flat(2), "SEGMENT3": flat(3),
    "MUBUF": Format(
        0xE0000000, Field(18, 7, anything),
        (*range(0x28), 0x3D, 0x3E, 0x3F, *range(0x40, 0x4D), *range(0x60, 0x6D)),
        (Field(0, 12, anything), *(Field(at, 1, anything) for at in (12, 13, 14)),
         Field(15, 1, mostly_zero), Field(16, 1, mostly_zero), Field(17, 1, anything),
         Field(25, 1, mostly_zero), *VMEM_DATA,
         Field(48, 5, lambda rng: rng.randrange(26)), Field(53, 3, mostly_zero),
         Field(56, 8, lambda rng: rng.choice((odd_scalar(rng), 128, 193, 124)))),
        no_literal=(56,),
    ),
    "MTBUF": Format(
        0xE8000000, Field(15, 4, anything), range(16),
        (Field(0, 12, anything), *(Field(at, 1, anything) for at in (12, 13, 14)),
         Field(19, 7, anything), *VMEM_DATA,
         Field(48, 5, lambda rng: rng.randrange(26)), Field(53, 3, mostly_zero),
         Field(56, 8, lambda rng: rng.choice((odd_scalar(rng), 128, 193, 124)))),
        no_literal=(56,),
    ),
    # Pictures, interpolation and export: no compute kernel has them.
    "MIMG": Format(
        0xF0000000, Field(18, 7, anything), range(0x70),
        (Field(0, 18, anything), Field(25, 1, anything), Field(32, 32, anything)),
    ),
    "VINTRP": Format(
        0xD4000000, Field(16, 2, anything), range(3),
        (Field(0, 16, anything), Field(18, 8, anything), Field(32, 32, anything)),
    ),
    "EXP": Format(
        0xC4000000, Field(0, 4, anything), range(16),
        (Field(4, 22, anything), Field(32, 32, anything)),
    ),
    # What no format above covers: reserved prefixes 0x32, 0x33, 0x39 ...
    "RESERVED": Format(
        0xC8000000, Field(26, 4, anything), (2, 3, 9, 11, 13, 14, 15),
        (Field(0, 26, anything), Field(32, 32, anything)),
        (0, 4, 5, 6, 7, 8, 10, 12),
    ),
}  # fmt: skip
