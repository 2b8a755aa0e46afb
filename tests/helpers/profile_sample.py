"""A profile written by hand, in round numbers that a test can recompute.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import copy
import struct
from pathlib import Path
from typing import Any

CLOCK_MHZ = 1000  # a cycle is a nanosecond


def launch(kernel: str, *, scale: float = 1, **changes: Any) -> dict[str, Any]:
    """One launch: bound by VALU for `scale` microseconds, estimated at twice that.

    64 000 * scale executed FLOPs; 1 KB read and 1 KB written.
    """
    middle = 2e-6 * scale
    seconds = {"low": middle / 2, "middle": middle, "high": 2 * middle}
    row = {
        "kernel": kernel,
        "grid": [4, 1, 1],
        "block": [256, 1, 1],
        "lds_bytes": 32768,
        "vgprs": 84,
        "sgprs": 40,
        "waves_per_simd": 2,
        "groups_per_cu": 2,
        "groups_total": 4,
        "groups_executed": 4,
        "groups_traced": 4,
        "incomplete": False,
        "counters": {
            "SQ_WAVES": 16,
            "SQ_INSTS_VALU": 1600 * scale,
            "SQ_LDS_BANK_CONFLICT": 30,
        },
        "flops": 64000 * scale,
        "derived": {"VALUBusy": 50.0, "FETCH_SIZE": 1.0, "WRITE_SIZE": 1.0},
        "estimated": [],
        "bounds": [
            {"unit": "VALU", "cycles": 1000 * scale, "seconds": 1e-6 * scale}
            | {"share": 0.5},
            {"unit": "LDS", "cycles": 400 * scale, "seconds": 4e-7 * scale}
            | {"share": 0.2},
        ],
        "estimate": {
            "cycles": {name: value * 1e9 for name, value in seconds.items()},
            "seconds": seconds,
            "error": 0.6,
            "overlap": 0.5,
        },
        "instructions": [
            {"offset": 0, "count": 16, "lds_conflict_cycles": 0}
            | {"stall_cycles": 0, "lanes": 64},
            {"offset": 8, "count": 32, "lds_conflict_cycles": 12}
            | {"stall_cycles": 700, "lanes": 64},
        ],
        "timeline": [
            {
                "simd": 0,
                "group": 0,
                "wave": 0,
                "events": [["valu", 0, 4], ["vmem", 4, 300], ["valu", 8, 12]],
            },
            {"simd": 1, "group": 0, "wave": 1, "events": [["lds", 2, 10]]},
        ],
    }
    return {**row, **changes}


def sample(*launches: dict[str, Any]) -> dict[str, Any]:
    """A profile of these launches; without any, of three of two kernels."""
    defaults = (
        launch("small"),
        launch("large", scale=100),
        launch("small", scale=3, grid=[12, 1, 1]),
    )
    device = {
        "name": "gfx906",
        "cus": 60,
        "clock_mhz": CLOCK_MHZ,
        "peak_dot2_tflops": 26.5,
        "hbm_gbs": 1000,
    }
    return copy.deepcopy(
        {
            "version": 1,
            "device": device,
            "constants": [],
            "launches": list(launches or defaults),
        }
    )


def png_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file; fails if it is none."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height
