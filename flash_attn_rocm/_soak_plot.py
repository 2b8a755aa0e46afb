"""A soak over time, as a picture: shares, latency, breakers, faults and heat.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._errors import FlashAttnError
from ._soak_report import Summary

_SIZE_INCHES = (10.0, 8.0)
_FEW = 10  # points that are drawn as points


def draw(path: Path, summary: Summary) -> None:
    """Write the picture; its suffix says what kind.

    Raises:
        FlashAttnError: there is no matplotlib, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FlashAttnError(
            "--plot needs matplotlib, which is not installed (pip install matplotlib)"
        ) from error
    points = summary.points
    rows = 4 if summary.heat else 3
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(rows, 1)
    at = [point["at"] for point in points]
    mark = "o-" if len(at) <= _FEW else "-"

    def share(name: str, of: str) -> list[float]:
        return [100.0 * p[name] / p[of] if p[of] else float("nan") for p in points]

    axes[0].plot(at, share("fused", "good"), mark, label="good calls, fused")
    axes[0].plot(at, share("alike", "bad"), ".", label="bad calls, like stock")
    axes[0].set(ylabel="%", ylim=(-3, 103), title=f"{summary.calls} calls")
    axes[0].legend(loc="lower right")
    for name in ("p50", "p99"):
        axes[1].plot(at, [point[name] for point in points], mark, label=name)
    axes[1].set(ylabel="ms a call", yscale="log")
    axes[1].legend(loc="upper right")
    axes[2].plot(at, [point["open"] for point in points], mark, label="open breakers")
    axes[2].bar(
        at,
        [point["struck"] for point in points],
        width=max(at, default=1) / max(len(at), 1),
        alpha=0.4,
        color="C3",
        label="calls struck by a fault",
    )
    axes[2].set(ylabel="in a batch", xlabel="calls")
    axes[2].legend(loc="upper right")
    if summary.heat:
        begin = summary.heat[0][0]
        hours = [(t - begin) / 3600.0 for t, _ in summary.heat]
        axes[3].plot(hours, [value for _, value in summary.heat], mark)
        axes[3].set(ylabel="hottest sensor, C", xlabel="hours")
    for axis in axes:
        axis.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise FlashAttnError(f"{path}: {error}") from error
