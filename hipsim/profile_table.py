"""A profile as text: one block per kernel, bounds first, estimates after them.

An estimate is never printed without its error bar, and the headline says that
all of it is simulated.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .profile_file import Launch, Profile, is_empty
from .profile_summary import PERCENT, TRAFFIC, Summary, Times, summarise

# Counters in the table, in this order; the profile itself has them all.
MAIN_COUNTERS = (
    *("SQ_WAVES", "SQ_INSTS_VALU", "SQ_INSTS_SALU", "SQ_INSTS_LDS"),
    *("SQ_INSTS_VMEM_RD", "SQ_INSTS_VMEM_WR", "SQ_LDS_BANK_CONFLICT"),
    *("SQ_WAIT_INST_LDS", "TCC_HIT", "TCC_MISS"),
)
_ESTIMATED = "~"  # in front of a counter
_WAVE = "WAVE: a wave issues one instruction at a time, and there are too few waves"
_FOLD = 88  # columns
_ROUNDING = 1e-9  # of sums


# ---- words -------------------------------------------------------------------


def simulated_text(profile: Profile) -> str:
    """The headline: what the figures are, and what they are not."""
    if is_empty(profile):
        return "Nothing was simulated."
    device = profile["device"]
    name = device["name"].replace(" (simulated)", "")
    return (
        f"Simulated {name}, {device['cus']} compute units at "
        f"{device['clock_mhz']:.0f} MHz: no figure here was measured on a card."
    )


def error_text(error: float) -> str:
    """An error bar in words, for example "error bar +-60 %"."""
    return f"error bar +-{100 * error:.0f} %"


def duration_text(seconds: float) -> str:
    """Seconds with three digits and a unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e9)} ns"


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def estimate_text(times: Times, error: float) -> str:
    """The estimate of one call, with its range and its error bar; a range that ends
    at the bound instead of the bar says so."""
    low, middle, high = (
        duration_text(value / times.calls)
        for value in (times.low, times.middle, times.high)
    )
    clipped = times.low > times.middle / (1 + error) * (1 + _ROUNDING)
    bar = f"error bar +{100 * error:.0f} %, low end: bound"
    return f"{middle}, {low} to {high} ({bar if clipped else error_text(error)})"


def table(profile: Profile) -> str:
    """The report: a row per kernel, then bounds, launch and counters of each."""
    lines = [simulated_text(profile)]
    summaries = summarise(profile)
    if not summaries:
        return lines[0] + "\n"
    lines += [
        "Bounds: the time one unit alone needs, with its share of the longest bound.",
        "No estimate is below a bound. Times and counters are means of one call.",
        "",
        *_rows(summaries),
    ]
    for summary in summaries:
        lines += ["", *_details(summary)]
    if any("WAVE" in (*summary.bounds,)[:1] for summary in summaries):
        lines += ["", _WAVE]
    if any(f" {_ESTIMATED}" in line for line in lines):
        error = max(summary.error for summary in summaries)
        lines += ["", f"{_ESTIMATED} follows from the estimate, {error_text(error)}"]
    return "\n".join(lines) + "\n"


def _rows(summaries: Sequence[Summary]) -> list[str]:
    width = max([6, *(len(summary.kernel) for summary in summaries)])
    rows = [
        f"{'kernel':{width}} {'calls':>6}  {'bound by':<22} {'at least':>8}  estimate"
    ]
    for summary in summaries:
        times = summary.total
        bounds = [f"{u} {100 * summary.share(u):.0f} %" for u in summary.bounds]
        rows.append(
            f"{summary.kernel:{width}} {times.calls:>6}  "
            f"{', '.join(bounds[:2]) or summary.unit:<22} "
            f"{duration_text(times.bound / times.calls):>8}  "
            f"{estimate_text(times, summary.error)}"
        )
    return rows


def _details(summary: Summary) -> Iterable[str]:
    calls, total = summary.kept.calls, summary.total.calls
    title = summary.kernel
    if calls < total:
        title += f", the last {calls} of {total} calls"
    if calls > 1:
        title += f", per call, averaged over {calls} calls"
    yield title
    bounds = [
        f"{unit} {duration_text(seconds / calls)} ({100 * summary.share(unit):.0f} %)"
        for unit, seconds in summary.bounds.items()
        if seconds
    ]
    yield from _fold("bounds", bounds)
    yield from _fold("launch", _shape(summary.launches))
    counters = [
        _mark(name, summary) + _mean(summary.counters[name], calls)
        for name in MAIN_COUNTERS
        if name in summary.counters
    ]
    yield from _fold("counters", counters)
    derived = [
        _mark(name, summary) + _derived(name, value)
        for name, value in summary.derived.items()
    ]
    yield from _fold("derived", derived)


def _shape(launches: list[Launch]) -> list[str]:
    """Sizes that all launches share, with the range of those that differ."""
    if not launches:
        return []
    parts = []
    for what in ("grid", "block"):
        shapes = {tuple(launch[what]) for launch in launches}
        text = ",".join(map(str, shapes.pop())) if len(shapes) == 1 else "varies"
        parts.append(f"{what} {text}")
    for key, words in (
        ("lds_bytes", "LDS bytes"),
        ("vgprs", "VGPRs"),
        ("waves_per_simd", "waves per SIMD"),
        ("groups_per_cu", "workgroups per CU"),
    ):
        values = [launch[key] for launch in launches if key in launch]
        if values:
            parts.append(f"{words} {_range(values)}")
    sums = [
        sum(launch.get(f"groups_{what}", 0) for launch in launches)
        for what in ("traced", "executed", "total")
    ]
    traced, ran, groups = (_mean(value, len(launches)) for value in sums)
    parts.append(f"traced {traced} of {groups} workgroups")
    if 0 < sums[1] < sums[2]:
        parts.append(f"executed {ran} of them (which the counters cover)")
    if any(launch.get("incomplete") for launch in launches):
        parts.append("counters incomplete (the host's memory ran out)")
    return parts


def _range(values: list[Any]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _mean(value: float, calls: int) -> str:
    """The mean of counts; a digit after the point says that it is no count itself."""
    return f"{value / calls:,.{0 if value % calls == 0 else 1}f}"


def _mark(name: str, summary: Summary) -> str:
    return f"{name} {_ESTIMATED * (name in summary.estimated)}"


def _derived(name: str, value: float) -> str:
    if name in TRAFFIC:
        return f"{_digits(value)} KB"
    return f"{value:.0f} %" if name in PERCENT else _digits(value)


def _fold(title: str, parts: Sequence[str]) -> Iterable[str]:
    """ "  title     part, part, ...", folded at a column."""
    line = f"  {title:<9}"
    for index, part in enumerate(parts):
        piece = part + ("," if index + 1 < len(parts) else "")
        if len(line) + 1 + len(piece) > _FOLD:
            yield line
            line = " " * 11
        line += " " + piece
    if parts:
        yield line
