"""The launches of a profile, added up by kernel.

The simulator keeps the last launches in full and a sum over all of each kernel.
Totals come from the sums; what only a full launch has (bounds by unit, derived
counters, operations) is of the launches that were kept.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .profile_file import Launch, Profile

PERCENT = frozenset(
    (
        *("VALUBusy", "VALUUtilization", "SALUBusy", "LDSBankConflict"),
        *("ALUStalledByLDS", "L2CacheHit"),
    )
)
# Those that divide by the clocks of the launch, which are an estimate.
TIMED = frozenset(("VALUBusy", "SALUBusy", "LDSBankConflict", "ALUStalledByLDS"))
TRAFFIC = ("FETCH_SIZE", "WRITE_SIZE")  # in kilobytes


@dataclass
class Times:
    """Seconds of several calls: what they need at least, and the estimate."""

    calls: int = 0
    bound: float = 0.0
    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0

    def add(self, calls: int, bound: float, seconds: Mapping[str, float]) -> None:
        """Adds calls that together take these seconds."""
        self.calls += calls
        self.bound += bound
        self.low += seconds["low"]
        self.middle += seconds["middle"]
        self.high += seconds["high"]


@dataclass
class Summary:
    """One kernel. Sums, unless it says means."""

    kernel: str
    error: float = 0.0  # relative error of the estimates, the largest
    total: Times = field(default_factory=Times)  # every launch
    kept: Times = field(default_factory=Times)  # those with details
    launches: list[Launch] = field(default_factory=list)  # the same
    bounds: dict[str, float] = field(default_factory=dict)  # seconds, most first
    counters: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0  # floating point operations of lanes, for the whole grids
    moved: float = 0.0  # bytes from and to memory, for the whole grids
    derived: dict[str, float] = field(default_factory=dict)  # means
    estimated: set[str] = field(default_factory=set)  # names that follow from times

    @property
    def unit(self) -> str:
        """The unit that bounds the kernel, "unknown" if no launch was kept."""
        return next(iter(self.bounds), "unknown")

    def share(self, unit: str) -> float:
        """How long a unit is busy, in parts of the one that bounds the kernel."""
        most = max(self.bounds.values(), default=0.0)
        return self.bounds[unit] / most if most else 0.0


def summarise(profile: Profile) -> list[Summary]:
    """One Summary per kernel, the one that takes longest first."""
    kernels: dict[str, Summary] = {}

    def find(name: str) -> Summary:
        return kernels.setdefault(name, Summary(name))

    for launch in profile["launches"]:
        _add_launch(find(launch["kernel"]), launch)
    for row in profile.get("kernels", []):
        seconds = row["seconds"]
        summary = find(row["kernel"])
        summary.total.add(row["launches"], seconds["bound"], seconds)
        summary.error = max(summary.error, row["error"])
    for summary in kernels.values():
        _finish(summary)
    return sorted(kernels.values(), key=lambda s: (-s.total.middle, s.kernel))


def _add_launch(summary: Summary, launch: Launch) -> None:
    bounds = {bound["unit"]: bound["seconds"] for bound in launch["bounds"]}
    estimate = launch["estimate"]
    summary.kept.add(1, max(bounds.values(), default=0.0), estimate["seconds"])
    summary.launches.append(launch)
    summary.error = max(summary.error, estimate["error"])
    # Times are of the whole grid, counts of the workgroups that ran.
    groups = launch.get("groups_total", 1)
    scale = groups / (launch.get("groups_executed") or groups)
    summary.flops += scale * launch.get("flops", 0)
    kilobytes = sum(launch["derived"].get(name, 0.0) for name in TRAFFIC)
    summary.moved += scale * 1024 * kilobytes
    summary.estimated |= set(launch["estimated"])
    _add(summary.bounds, bounds)
    _add(summary.counters, launch["counters"])


def _add(sums: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0) + value


def _finish(summary: Summary) -> None:
    if not summary.total.calls:  # a profile without sums
        summary.total = summary.kept
    summary.estimated |= TIMED
    summary.bounds = dict(sorted(summary.bounds.items(), key=lambda b: -b[1]))
    names = dict.fromkeys(
        name for launch in summary.launches for name in launch["derived"]
    )
    summary.derived = {name: _mean(name, summary.launches) for name in names}


def _mean(name: str, launches: Iterable[Launch]) -> float:
    """Percentages weigh by time, as one long run would show them."""
    pairs: list[tuple[Any, Any]] = [
        (
            launch["derived"][name],
            launch["estimate"]["seconds"]["middle"] if name in PERCENT else 1.0,
        )
        for launch in launches
        if name in launch["derived"]
    ]
    weight = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / weight if weight else 0.0
