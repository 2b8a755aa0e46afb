"""hipsim: runs gfx906 code objects on the CPU, instruction by instruction.

The work is done by libhipsim.so (``csrc/sim``); this package loads it with
ctypes. It needs nothing but the standard library.

    with hipsim.Module("saxpy.co") as module:
        out = bytearray(4 * 64)
        stats = module.kernel("fill").launch(
            (1, 1, 1), (64, 1, 1), [hipsim.Buffer(out, "w")]
        )

SPDX-License-Identifier: BSD-3-Clause
"""

from ._native import (
    HipError,
    faults_fired,
    get_option,
    library_path,
    load,
    set_fault,
    set_option,
)
from .module import (
    Buffer,
    Kernel,
    Module,
    Stats,
    Struct,
    disassemble,
    object_info,
    take_profile,
)

__all__ = [
    "Buffer",
    "HipError",
    "Kernel",
    "Module",
    "Stats",
    "Struct",
    "disassemble",
    "faults_fired",
    "get_option",
    "library_path",
    "load",
    "object_info",
    "set_fault",
    "set_option",
    "take_profile",
]
