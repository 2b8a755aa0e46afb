"""Runs small kernels under the profiler, for the tests of its models.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import isa_tools

import hipsim

PAGE = 4096


def aligned(size: int, access: str = "rw", data: bytes = b"") -> hipsim.Buffer:
    """A buffer that starts at a page, as device memory does."""
    memory = bytearray(size + PAGE)
    offset = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PAGE
    memory[offset : offset + len(data)] = data
    return hipsim.Buffer(memory, access, offset=offset, size=size)


@functools.cache
def _assemble(body: str, pointers: int, settings: tuple[tuple[str, int], ...]) -> bytes:
    return isa_tools.assemble(body, pointers, **dict(settings))


def profile(
    body: str,
    buffers: Sequence[hipsim.Buffer] = (),
    *,
    groups: int = 1,
    block: int = 64,
    launches: int = 1,
    **settings: int,
) -> dict[str, Any]:
    """The profile of the kernel's last launch; the "profile" option must be on.

    In `body` s[4:5] points to the addresses of `buffers`, s6 is the workgroup's
    index, v0 the work-item.
    """
    image = _assemble(body, len(buffers), tuple(sorted(settings.items())))
    hipsim.take_profile()
    with hipsim.Module(image) as module:
        kernel = module.kernel("kernel")
        for _ in range(launches):
            kernel.launch((groups, 1, 1), (block, 1, 1), buffers)
    taken: dict[str, Any] = hipsim.take_profile()["launches"][-1]
    return taken


def bounds(launch: dict[str, Any]) -> dict[str, float]:
    """{unit: clocks}"""
    return {row["unit"]: row["cycles"] for row in launch["bounds"]}
