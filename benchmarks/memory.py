"""How much memory attention takes as sequences get longer, forward and backward.

The largest sum of bytes that torch's allocator has handed out at one time while
scaled_dot_product_attention and its backward run, beyond q, k, v and the output's
gradient (examples/attention_memory.py).  It is the accounting of the very code that
runs: shim, autograd, ops, workspace.  Only the kernels are left out, by a driver that
launches nothing; they allocate nothing, and in the simulator 65536 rows would take
days.  The math path is measured as far as memory allows and computed beyond, from its
two longest measured lengths.

    python benchmarks/memory.py            print the table
    python benchmarks/memory.py --write    and put it into docs/memory.md

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import ROOT, machine, options_of, write_between, write_json
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_rocm
from flash_attn_rocm import _ops

sys.path.insert(0, str(ROOT / "examples"))

from attention_memory import attention_bytes

PAGE = ROOT / "docs" / "memory.md"
LENGTHS = [2048 << n for n in range(6)]  # to 65536
HEADS, HEAD_DIM = 2, 64
MATH_LONGEST = 8192
SLACK = 4096  # bytes: rounding of the workspace's parts, and what is empty
ROW_NUMBERS = 4  # what the backward needs to know of a query


class Series(NamedTuple):
    """One column of the table."""

    name: str
    dtype: torch.dtype = torch.float16
    heads_k: int = HEADS


FUSED = [
    Series("fp16"),
    Series("fp16, heads share K, V", heads_k=1),
    Series("bf16", torch.bfloat16),
    Series("fp32", torch.float32),
]
MATH = Series("math fp16")


@contextmanager
def fused() -> Iterator[None]:
    """Attention is ours, as on the simulated gfx906, and nothing is launched."""
    with flash_attn_rocm.patched(), flash_attn_rocm.simulate("gfx906"):
        _ops.configure("null")
        try:
            yield
        finally:
            _ops.configure(_ops.config.device)


def measure(
    series: Series, length: int, heads: int = HEADS, backward: bool = True
) -> int:
    """Peak bytes of a series at a length, in the context's attention."""
    heads_k = series.heads_k if series.heads_k != heads else None
    shape = (1, heads, length, HEAD_DIM)
    peak: int = attention_bytes(shape, series.dtype, "cpu", heads_k, backward)
    return peak


def fused_calls() -> int:
    """Main kernels that were launched since the process began."""
    counts: dict[str, int] = flash_attn_rocm.status()["counters"]["fused"]
    return sum(counts.values())


def measure_fused(
    series: Series, length: int, heads: int = HEADS, backward: bool = True
) -> int:
    """measure() of the fused code; fails if the calls did not go through it."""
    before = fused_calls()
    with fused():
        peak = measure(series, length, heads, backward)
        call = flash_attn_rocm.last_call()
    # To warm up and to measure: forward, dK and dV, dQ.
    count, expected = fused_calls() - before, 2 * (3 if backward else 1)
    if call is None or call.backend != "null" or count != expected:
        raise SystemExit(f"{count} of {expected} passes were fused: {call}")
    return peak


def row_bytes(series: Series, heads: int, backward: bool) -> float:
    """What is kept of the rows of all heads at one position, beside tensors."""
    double = series.dtype is torch.float64
    queries, keys = heads, series.heads_k
    numbers = 1 + (ROW_NUMBERS if backward else 0)  # the log-sum-exp, the workspace's
    size = queries * numbers * (8 if double else 4)
    if not double:
        size += queries * 4  # what rounding took from the log-sum-exp
    # How far rows reach: 8 bytes for 64 of them, of bfloat16 a scale for each, too.
    block, scale = 8 / 64, 4
    if series.dtype is torch.float16 and backward:
        size_of_ranges = (queries + keys) * block  # of dout and v
    elif series.dtype is torch.bfloat16:
        tensors = (2 if backward else 1) * queries + 2 * keys
        size_of_ranges = tensors * (block + scale)
    else:
        size_of_ranges = 0.0
    return size + size_of_ranges


def allowed(
    series: Series, length: int, heads: int = HEADS, backward: bool = True
) -> int:
    """Bytes of what has to be there: results, what is saved, gradients, workspace."""
    size = torch.empty((), dtype=series.dtype).element_size()
    tensors = (2 if size == 2 else 1) * heads  # out, and what rounding took from it
    if backward:
        tensors += heads + 2 * series.heads_k
    rows = row_bytes(series, heads, backward)
    return int(length * (tensors * HEAD_DIM * size + rows)) + SLACK


def failures(name: str, peaks: dict[int, int], limits: dict[int, int]) -> list[str]:
    """What is not linear in the length, or larger than it has to be."""
    found = []
    for length, peak in peaks.items():
        if peak > limits[length]:
            found.append(
                f"{name}: {peak} bytes at {length} rows, expected at most "
                f"{limits[length]}"
            )
        half = peaks.get(length // 2)
        if half is not None and peak > 2 * half + SLACK:
            found.append(
                f"{name}: {peak / half:.2f} times the memory at {length} rows of "
                f"that at {length // 2}, expected at most twice"
            )
    return found


def check(
    series: Series, lengths: list[int], heads: int = HEADS
) -> tuple[dict[int, int], list[str]]:
    """Peaks of forward and backward together, and what failures() says of both.

    What a forward has for a while is hidden behind the backward's results.
    """
    found, peaks = [], {}
    for backward in (False, True):
        peaks = {n: measure_fused(series, n, heads, backward) for n in lengths}
        limits = {n: allowed(series, n, heads, backward) for n in lengths}
        name = series.name if backward else f"{series.name}, forward"
        found += failures(name, peaks, limits)
    return peaks, found


def free_bytes() -> int:
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def measure_math(longest: int) -> dict[int, int]:
    """The math path at as many lengths as fit into half of what is free."""
    peaks: dict[int, int] = {}
    with sdpa_kernel(SDPBackend.MATH):
        for length in LENGTHS:
            expected = 4 * peaks.get(length // 2, 0)
            if length <= longest and expected < free_bytes() / 2:
                peaks[length] = measure(MATH, length)
    return peaks


def quadratic(peaks: dict[int, int], length: int) -> int:
    """a N^2 + b N through the two longest lengths of `peaks`."""
    (m, at_m), (n, at_n) = sorted(peaks.items())[-2:]
    square = (at_n / n - at_m / m) / (n - m)
    return round(square * length**2 + (at_n / n - square * n) * length)


def mib(size: int) -> str:
    value = size / 2**20
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def table(series: dict[str, dict[int, int]], math_path: dict[int, int]) -> str:
    names = [*series, "math path, fp16", "math / fused"]
    lines = [
        "| N | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    computed = False
    for length in next(iter(series.values())):
        math_bytes = math_path.get(length)
        mark = ""
        if math_bytes is None:
            math_bytes, mark, computed = quadratic(math_path, length), "*", True
        fused_bytes = series[FUSED[0].name][length]
        cells = [mib(peaks[length]) for peaks in series.values()]
        cells += [mib(math_bytes) + mark, f"{math_bytes / fused_bytes:,.0f}{mark}"]
        lines.append(f"| {length} | " + " | ".join(cells) + " |")
    lines.append("")
    lines.append(
        f"MiB beyond q, k, v and the output's gradient; causal, B = 1, H = {HEADS}, "
        f"D = {HEAD_DIM}, torch {machine()['torch']}."
    )
    if computed:
        lines.append("\\* computed: a N^2 + b N through the two longest measured.")
    return "\n".join(lines)


def main() -> int:
    parser = options_of(__doc__, PAGE)
    parser.add_argument(
        "--math",
        type=int,
        default=MATH_LONGEST,
        help=f"longest length at which the math path runs, default {MATH_LONGEST}",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    series, bad = {}, []
    for column in FUSED:
        series[column.name], found = check(column, LENGTHS)
        bad += found
    # Two lengths are needed to go on from.
    math_path = measure_math(max(options.math, LENGTHS[1]))
    text = table(series, math_path)
    print(text)
    if options.write:
        write_between(PAGE, Path(__file__).name, text)
    rows: list[dict[str, Any]] = [
        {"series": name, "length": n, "bytes": peak, "measured": True}
        for name, peaks in {**series, MATH.name: math_path}.items()
        for n, peak in peaks.items()
    ]
    rows += [
        {
            "series": MATH.name,
            "length": n,
            "bytes": quadratic(math_path, n),
            "measured": False,
        }
        for n in LENGTHS
        if n not in math_path
    ]
    write_json(options.json, {"memory": rows})
    for failure in bad:
        print(failure)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
