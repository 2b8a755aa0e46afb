"""Which instruction is tested by which kernel: the tables of the model together.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from collections.abc import Callable

import isa_cases
import isa_control
import isa_memory
import isa_ops
import isa_rare
import isa_scalar
from oracle import Unit

LANE_ACCESS = ["v_nop", "v_clrexcp", "v_readfirstlane_b32", "v_readlane_b32",
               "v_writelane_b32", "v_swap_b32"]  # fmt: skip
# Family: (instruction, what makes its unit), ...
BUILDERS: dict[str, list[tuple[str, Callable[[str], Unit]]]] = {
    **{family: [(name, isa_cases.unit) for name, op in isa_ops.OPS.items()
                if op.where == where]
       for family, where in (("vop1", "1"), ("vop2", "2"), ("vopc", "C"),
                             ("vop3", "3"), ("vop3p", "P"))},
    "lane": [(name, isa_cases.unit) for name in LANE_ACCESS],
    "scalar": [(name, isa_scalar.alu_unit)
               for name in (*isa_scalar.OPS, *isa_scalar.CONSTANT)],
    "control": isa_control.BUILDERS,
    "memory": [(name, isa_memory.unit) for name in isa_memory.NAMES],
    "rare": isa_rare.BUILDERS,
}  # fmt: skip
