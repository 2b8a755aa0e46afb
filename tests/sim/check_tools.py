"""Runs small assembly kernels at check level 2.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from collections.abc import Sequence

import isa_tools

import hipsim

# v2 = byte offset of the work-item's dword, s[8:9] and s[10:11] two buffers.
BEGIN = """
    s_load_dwordx4 s[8:11], s[4:5], 0x0
    v_lshlrev_b32 v2, 2, v0
    s_waitcnt lgkmcnt(0)
"""


def findings(
    body: str,
    *,
    waves: int = 1,
    groups: int = 1,
    buffers: Sequence[hipsim.Buffer] | None = None,
    begin: str = BEGIN,
    **settings: int,
) -> str:
    """The report of level 2 about a kernel with this body, "" if it is clean.

    The two buffers have room for a dword of every work-item; s6 is the
    workgroup's number.
    """
    image = isa_tools.assemble(begin + body + "\n.Lend:\n    s_endpgm\n", **settings)
    size = 4 * 64 * waves * groups + 64
    given = buffers or [hipsim.Buffer(bytearray(range(256)) * (size // 256 + 1), "rw")
                        for _ in range(2)]  # fmt: skip
    before = hipsim.get_option("check")
    hipsim.set_option("check", 2)
    try:
        with hipsim.Module(image) as module:
            module.kernel("kernel").launch((groups, 1, 1), (64 * waves, 1, 1), given)
    except hipsim.HipError as error:
        return error.report
    finally:
        hipsim.set_option("check", before)
    return ""
