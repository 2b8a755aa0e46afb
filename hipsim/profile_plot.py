"""A profile as a picture: the roofline with its kernels, and what bounds each.

Needs matplotlib, and only here. The points are computed apart from the drawing.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import FileError
from .profile_file import Profile
from .profile_summary import Summary, summarise
from .profile_table import duration_text, error_text, simulated_text

_HOLLOW: dict[str, Any] = {"fillstyle": "none", "linestyle": "none"}
_TRIANGLE = "\N{WHITE LEFT-POINTING TRIANGLE}"
_MISSING = "a plot needs matplotlib, which is not installed (pip install matplotlib)"


@dataclass(frozen=True)
class Roof:
    """The two ceilings in TFLOPS and the slope in TB/s, of the simulated card."""

    dot2: float
    fp32: float
    hbm: float

    def at(self, intensity: float) -> float:
        """The highest TFLOPS at an intensity in FLOPs per byte."""
        return min(self.dot2, self.hbm * intensity)


@dataclass(frozen=True)
class Point:
    """One kernel in the roofline; TFLOPS are of executed operations."""

    kernel: str
    intensity: float  # FLOPs per byte of FETCH_SIZE + WRITE_SIZE
    low: float  # TFLOPS by the estimate: slowest,
    middle: float
    high: float  # fastest
    bound: float  # TFLOPS if nothing but the bounding unit took time
    unit: str
    error: float


def roof(profile: Profile) -> Roof:
    """The ceilings: v_dot2 does two multiply-adds where v_fma does one."""
    device = profile["device"]
    dot2 = float(device["peak_dot2_tflops"])
    return Roof(dot2, dot2 / 2, device["hbm_gbs"] / 1e3)


def roofline_points(profile: Profile) -> list[Point]:
    """A point per kernel that has operations and memory traffic to speak of."""
    points = []
    for summary in summarise(profile):
        flops, moved, times = summary.flops, summary.moved, summary.kept
        if flops and moved and times.low and times.bound:
            points.append(
                Point(
                    kernel=summary.kernel,
                    intensity=flops / moved,
                    low=flops / times.high / 1e12,
                    middle=flops / times.middle / 1e12,
                    high=flops / times.low / 1e12,
                    bound=flops / times.bound / 1e12,
                    unit=summary.unit,
                    error=summary.error,
                )
            )
    return points


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure of its own: no window, and no backend is switched.

    Raises:
        FileError: matplotlib is missing; the message says how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FileError(_MISSING) from error
    return Figure(figsize=(width, height), layout="constrained")


def plot(profile: Profile, path: Path) -> None:
    """Draws the picture to path, in the format that its suffix names.

    Raises:
        FileError: no matplotlib, nothing was simulated, or the file cannot be
            written.
    """
    summaries = summarise(profile)
    if not summaries:
        raise FileError("plot: nothing was simulated, so there is nothing to draw")
    rows = sum(len(summary.bounds) + 2 for summary in summaries)
    figure = new_figure(13, max(4.8, 1.4 + 0.2 * rows))
    left, right = figure.subplots(1, 2)
    _draw_roofline(left, profile)
    _draw_bounds(right, summaries)
    bar = error_text(max(summary.error for summary in summaries))
    bar = bar.replace("+-", "\N{PLUS-MINUS SIGN}")
    figure.suptitle(f"{simulated_text(profile)}\nEstimates: {bar}", fontsize=10)
    # below, where it hides no point
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:  # a suffix that matplotlib does not know
        raise FileError(f"{path}: {error}") from error


def _draw_roofline(axis: Any, profile: Profile) -> None:
    top, points = roof(profile), roofline_points(profile)
    ridge = top.dot2 / top.hbm
    ends = [ridge / 30, ridge * 10, *(p.intensity for p in points)]
    left, right = min(ends) / 2, max(ends) * 2
    axis.loglog(
        [left, ridge, right],
        [top.at(left), top.dot2, top.dot2],
        color="black",
        linewidth=1,
        label=f"dot2 peak {top.dot2:.1f} TFLOPS, HBM {top.hbm:.2f} TB/s",
    )
    axis.loglog(
        [top.fp32 / top.hbm, right],
        [top.fp32, top.fp32],
        color="gray",
        linestyle="--",
        linewidth=1,
        label=f"fp32 peak {top.fp32:.1f} TFLOPS",
    )
    for index, point in enumerate(points):
        axis.errorbar(
            point.intensity,
            point.middle,
            yerr=[[point.middle - point.low], [point.high - point.middle]],
            fmt="o",
            color=f"C{index}",
            capsize=4,
            label=f"{point.kernel} (bound by {point.unit})",
        )
        # The fast end of the bar is often the bound itself: the triangle, drawn as
        # text so that it can, stands beside the bar and points at its place.
        axis.update_datalim([(point.intensity, point.bound)])
        axis.annotate(
            _TRIANGLE,
            (point.intensity, point.bound),
            xytext=(6, 0),
            textcoords="offset points",
            color=f"C{index}",
            va="center",
        )
    if points:
        axis.plot([], [], "<", color="black", label="at its bound", **_HOLLOW)
    else:
        axis.text(0.1, 0.1, "no floating point work", transform=axis.transAxes)
    axis.set(
        title="roofline",
        xlabel="executed FLOPs per byte of FETCH_SIZE + WRITE_SIZE",
        ylabel="TFLOPS of executed FLOPs",
    )
    axis.spines[["top", "right"]].set_visible(False)


def _draw_bounds(axis: Any, summaries: list[Summary]) -> None:
    """A group of bars per kernel; the unit that bounds it is the red one."""
    place, ticks, names = 0.0, [], []
    for summary in summaries:
        times = summary.total
        least = duration_text(times.bound / times.calls)
        title = f"{summary.kernel}: at least {least} a call"
        axis.annotate(
            title,
            (0, place - 0.2),
            xytext=(4, 0),  # clear of the axis
            textcoords="offset points",
            fontsize=8,
            va="center",
        )
        for unit in summary.bounds:
            place -= 1
            color = "tab:red" if unit == summary.unit else "lightgray"
            axis.barh(place, 100 * summary.share(unit), color=color)
            ticks.append(place)
            names.append(unit)
        place -= 1.7
    axis.set_yticks(ticks, names, fontsize=7)
    axis.set_ylim(place + 1, 0.5)  # the first caption, too
    axis.set(
        title="bounds: what each unit alone needs",
        xlabel="% of the time of the unit that bounds the kernel (red)",
    )
    axis.spines[["top", "right"]].set_visible(False)
