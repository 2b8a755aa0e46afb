"""Fits OVERLAP of csrc/sim/profile_table.h on the two measured points there are.

The cost model says that a launch bound by arithmetic takes VALU + a x LDS clocks, where
a is the part of the LDS work that other waves do not hide.  Nobody has measured a on
gfx906.  What is known is how fast llama.cpp's tile kernel runs on an MI50 for head
dimensions 64 and 128, and what that kernel consists of once compiled.  This script
finds the a that fits both best (least squares of the logarithm of the time) and prints
how far each point is off then.

Caveats: the measured models ran the variant of the kernel that packs the query heads
of a group, the counts are those without; clock and power during the runs are unknown.
One constant cannot meet both points: alone, they ask for 0.47 and 0.92.

    python scripts/fit_overlap.py [csrc/sim/profile_table.h]

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "csrc/sim/profile_table.h"
WAVES = 4  # of a workgroup, one per SIMD
LANES = 64


@dataclasses.dataclass(frozen=True)
class Point:
    """The tile kernel at one head dimension: per wave and step of 16 rows x 64 keys.

    Counts are of the code that clang 15 makes for gfx906; reads by the bytes
    that a lane gets.
    """

    head_dim: int
    valu: int  # vector ALU instructions, those below included
    transcendental: int
    dots: int  # v_dot2_f32_f16 and v_pk_fma_f16
    reads16: int
    reads8: int
    writes16: int
    exchanges: int  # ds_bpermute_b32
    tflops: tuple[float, ...]  # measured on MI50, converted from tokens/s

    @property
    def measured(self) -> float:
        """The geometric mean of what was measured."""
        return math.exp(sum(map(math.log, self.tflops)) / len(self.tflops))


POINTS = (
    Point(64, 1716, 24, 1024, 144, 32, 6, 40, (10.9,)),
    Point(128, 2785, 24, 2048, 224 + 32, 0, 10, 40, (10.5, 11.3)),
)


def read_table(path: Path = TABLE) -> dict[str, float]:
    """{name: value} of profile_table.h."""
    rows = re.findall(r"^CONSTANT\((\w+), ([0-9.]+),", path.read_text(), re.MULTILINE)
    return {name: float(value) for name, value in rows}


def valu_clocks(point: Point, table: dict[str, float]) -> float:
    """Clocks that the vector ALU of one SIMD is busy with one wave's step."""
    extra = table["VALU_QUARTER"] - table["VALU_FULL"]
    return table["VALU_FULL"] * point.valu + extra * point.transcendental


def lds_clocks(point: Point, table: dict[str, float]) -> float:
    """Clocks of the LDS for the same step of all four waves: the longest unit of
    each instruction, here always a port, and there is a port per pair of SIMDs."""
    address, port = table["LDS_ADDRESS"], table["LDS_PORT"]
    per_wave = (
        point.reads16 * 16 * LANES / port
        + point.reads8 * 8 * LANES / port
        + point.writes16 * (address + 16 * LANES / port)
        + point.exchanges * (address + 4 * LANES / port)
    )
    return WAVES * per_wave / table["LDS_PAIRS"]


def tflops(point: Point, overlap: float, table: dict[str, float]) -> float:
    """The rate of the whole GPU if every compute unit does this step."""
    clocks = valu_clocks(point, table) + overlap * lds_clocks(point, table)
    flops = WAVES * point.dots * LANES * 4
    return flops / clocks * table["CUS"] * table["CLOCK_MHZ"] * 1e6 / 1e12


def fit(table: dict[str, float]) -> float:
    """The overlap constant with the least sum of squares, to three digits."""

    def error(overlap: float) -> float:
        return sum(
            math.log(tflops(p, overlap, table) / p.measured) ** 2 for p in POINTS
        )

    return min((k / 1000 for k in range(2001)), key=error)


def main() -> None:
    """Prints the constant and what it makes of the measured points."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, nargs="?", default=TABLE)
    table = read_table(parser.parse_args().table)
    overlap = fit(table)
    print(f"OVERLAP {overlap:.3f} (the table says {table['OVERLAP']:.3f})")
    for point in POINTS:
        rate = tflops(point, overlap, table)
        alone = (
            WAVES * point.dots * LANES * 4 * table["CUS"] * table["CLOCK_MHZ"] / 1e6
        ) / point.measured - valu_clocks(point, table)
        print(
            f"head dimension {point.head_dim}: VALU {valu_clocks(point, table):.0f}, "
            f"LDS {lds_clocks(point, table):.0f} clocks, model {rate:.1f} TFLOPS, "
            f"measured {'-'.join(map(str, point.tflops))} "
            f"({rate / point.measured - 1:+.0%}), "
            f"this point alone {alone / lds_clocks(point, table):.2f}"
        )


if __name__ == "__main__":
    main()
