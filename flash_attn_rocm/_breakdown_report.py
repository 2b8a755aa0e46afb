"""What breakdown() measured: times by layer and part, as data, text and a picture.

A part's time in one forward is one sample. Quantiles are of samples (nearest rank), so
the P99 of fewer than a hundred is their largest.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Union

from . import _arguments
from ._errors import FlashAttnError
from ._version import __version__

PathLike = Union[str, "os.PathLike[str]"]
Spans = Mapping[str, "list[tuple[Any, Any]]"]  # of a part, from mark to mark

WHOLE, ATTENTION, OUTPUT, OTHER = "whole", "attention", "output", "other"
PARTS = ("q", "k", "v", "kv", "qkv", ATTENTION, OUTPUT, OTHER)
_OFFENDERS = 5
_WAITING = 256  # forwards on a GPU, before those that are over are taken off the list
_COLORS = {
    **dict(zip(("q", "k", "v"), ("tab:blue", "tab:cyan", "tab:purple"))),
    **dict.fromkeys(("kv", "qkv"), "tab:blue"),
    **{ATTENTION: "tab:red", OUTPUT: "tab:green", OTHER: "lightgray"},
}


class Layer:
    """An attention layer: who it is, and the seconds of its parts."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.samples: dict[str, list[float]] = {}
        self.answered: Counter[str] = Counter()  # calls of SDPA, by who answered
        self.between = False  # attention is what lies between the projections
        self.fast_path = False  # outside of the block torch might take it


class BreakdownReport:
    """Where the attention layers of a model spent their time; also readable inside
    the block.

    Attributes:
        model: the name of the model's class.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._layers: list[Layer] = []
        self._waiting: deque[tuple[Layer, Spans]] = deque()
        self._lock = threading.RLock()
        self._clocks: set[str] = set()
        self._captured = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; waits for a GPU.

        Returns:
            A dictionary: version, model, clocks ("perf_counter", "events"), captured
            (forwards inside a graph capture, not timed), layers and offenders. A
            layer: layer, kind, calls, attention ("sdpa" or "between projections"),
            answered (calls of SDPA by who answered), fast_path, and parts. A part:
            part, calls, seconds (the sum), share (of all layers' seconds), p50_s,
            p99_s. The part "whole" is the layer itself, "other" what its parts leave.
            An offender is a part with its layer's name, the most seconds first.
        """
        self._settle()
        with self._lock:
            total = sum(sum(layer.samples.get(WHOLE, ())) for layer in self._layers)
            layers = [_layer_as_data(layer, total) for layer in self._layers]
        parts = [
            {"layer": layer["layer"], **part}
            for layer in layers
            for part in layer["parts"]
            if part["part"] != WHOLE
        ]
        parts.sort(key=lambda part: -part["seconds"])
        return {
            "version": __version__,
            "model": self.model,
            "clocks": sorted(self._clocks),
            "captured": self._captured,
            "layers": layers,
            "offenders": parts[:_OFFENDERS],
        }

    def json(self) -> str:
        """to_dict() as JSON text."""
        return json.dumps(self.to_dict())

    def table(self) -> str:
        """The report for people: each layer's parts, then the top offenders."""
        return "\n".join(_table(self.to_dict())) + "\n"

    def save(self, path: PathLike) -> None:
        """Writes json() to a file.

        Raises:
            FlashAttnError: path is none, or the file cannot be written.
        """
        from hipsim.files import FileError
        from hipsim.profile_file import write_json

        target = _arguments.path("path", path)
        try:
            write_json(self.to_dict(), Path(target))
        except FileError as error:
            raise FlashAttnError(str(error)) from None

    def plot(self, path: PathLike) -> None:
        """Draws the time of each layer by part, and beside it P50 and P99.

        Args:
            path: a file whose suffix matplotlib knows, for example ".png".

        Raises:
            FlashAttnError: matplotlib is missing, no layer ran, or the file cannot be
                written.
        """
        from hipsim.files import FileError
        from hipsim.profile_plot import new_figure

        target, data = _arguments.path("path", path), self.to_dict()
        layers = [layer for layer in data["layers"] if layer["calls"]]
        if not layers:
            raise FlashAttnError(f"plot: {self.table().strip()}")
        try:
            figure = new_figure(12, max(3.0, 1.6 + 0.35 * len(layers)))
        except FileError as error:
            raise FlashAttnError(str(error)) from None
        left, right = figure.subplots(1, 2, sharey=True)
        _draw_times(left, layers)
        _draw_quantiles(right, layers)
        figure.suptitle(_headline(data), fontsize=10)
        handles = dict(zip(*reversed(left.get_legend_handles_labels())))
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=len(handles),
            frameon=False,
        )
        try:
            figure.savefig(target, dpi=120)
        except (OSError, ValueError) as error:  # or a suffix that is not known
            raise FlashAttnError(f"{target}: {error}") from None

    # ---- what breakdown() hands over -----------------------------------------

    def _add_layer(self, name: str, kind: str) -> Layer:
        layer = Layer(name, kind)
        self._layers.append(layer)
        return layer

    def _add(self, layer: Layer, spans: Spans) -> None:
        """Takes one forward, whose last mark is the end of the whole."""
        with self._lock:
            self._waiting.append((layer, spans))
            if isinstance(spans[WHOLE][0][1], float):
                self._settle()
            elif len(self._waiting) > _WAITING:
                while self._waiting and self._last_is_over():
                    self._take(*self._waiting.popleft())

    def _last_is_over(self) -> bool:
        """Whether the oldest forward that waits has ended."""
        end = self._waiting[0][1][WHOLE][0][1]
        return end is None or isinstance(end, float) or bool(end.query())

    def _settle(self) -> None:
        """Waits for what was handed over, and takes it."""
        with self._lock:
            while self._waiting:
                self._take(*self._waiting.popleft())

    def _take(self, layer: Layer, spans: Spans) -> None:
        if any(mark is None for span in spans.values() for ab in span for mark in ab):
            self._captured += 1
            return
        for part, marks in spans.items():
            seconds = sum(self._seconds(start, end) for start, end in marks)
            layer.samples.setdefault(part, []).append(seconds)

    def _seconds(self, start: Any, end: Any) -> float:
        if isinstance(start, float):
            self._clocks.add("perf_counter")
            return float(end - start)
        self._clocks.add("events")
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def quantile(samples: Iterable[float], q: float) -> float:
    """The nearest-rank quantile, a sample itself."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def _layer_as_data(layer: Layer, total: float) -> dict[str, Any]:
    samples = dict(layer.samples)
    whole = samples.get(WHOLE, [])
    # Parts that not every forward has (a cached k, say) have no "other" by sample.
    inner = [times for part, times in samples.items() if part != WHOLE]
    if whole and all(len(times) == len(whole) for times in inner):
        rest = (w - sum(times) for w, *times in zip(whole, *inner))
        samples[OTHER] = [max(0.0, seconds) for seconds in rest]
    parts = [
        {
            "part": part,
            "calls": len(samples[part]),
            "seconds": sum(samples[part]),
            "share": sum(samples[part]) / total if total else 0.0,
            "p50_s": quantile(samples[part], 0.5),
            "p99_s": quantile(samples[part], 0.99),
        }
        for part in (WHOLE, *PARTS)
        if samples.get(part)
    ]
    return {
        "layer": layer.name,
        "kind": layer.kind,
        "calls": len(whole),
        "attention": "between projections" if layer.between else "sdpa",
        "answered": dict(layer.answered),
        "fast_path": layer.fast_path,
        "parts": parts,
    }


# --------------------------------------------------------------------------
# Words


def _headline(data: dict[str, Any]) -> str:
    ran = [layer for layer in data["layers"] if layer["calls"]]
    calls = sum(layer["calls"] for layer in ran)
    clocks = {"perf_counter": "the clock on the wall", "events": "the GPU's events"}
    by = " and ".join(clocks[clock] for clock in data["clocks"])
    text = f"Attention of {data['model']}: {len(ran)} of {len(data['layers'])} layers"
    return f"{text} ran, {calls} forwards" + (f", by {by}" if by else "")


def _table(data: dict[str, Any]) -> Iterable[str]:
    from hipsim.profile_table import duration_text

    yield _headline(data)
    layers = [layer for layer in data["layers"] if layer["calls"]]
    if layers:
        width = max(5, *(len(layer["layer"]) for layer in layers))
        yield ""
        yield (
            f"{'layer':{width}}  {'part':<9} {'calls':>6} {'P50':>9} {'P99':>9} "
            f"{'total':>9} {'share':>7}"
        )
        for layer in layers:
            for part in layer["parts"]:
                name = layer["layer"] if part["part"] == WHOLE else ""
                times = (part["p50_s"], part["p99_s"], part["seconds"])
                words = " ".join(f"{duration_text(t):>9}" for t in times)
                yield (
                    f"{name:{width}}  {part['part']:<9} {part['calls']:>6} {words} "
                    f"{100 * part['share']:>5.1f} %"
                )
        yield ""
        yield "Top offenders:"
        for place, part in enumerate(data["offenders"], 1):
            yield (
                f"  {place}. {part['part']} of {part['layer']}: "
                f"{100 * part['share']:.1f} %, P50 {duration_text(part['p50_s'])}, "
                f"P99 {duration_text(part['p99_s'])}"
            )
    notes = list(_notes(data))
    if notes:
        yield ""
        yield from notes


def _notes(data: dict[str, Any]) -> Iterable[str]:
    layers = data["layers"]
    answered: Counter[str] = Counter()
    for layer in layers:
        answered.update(layer["answered"])
    if answered:
        who = ", ".join(f"{name} {count}" for name, count in sorted(answered.items()))
        yield f"Calls of SDPA, by who answered: {who}."
    if "sim" in answered:
        yield "Calls in the simulator took the simulator's time, not a GPU's."
    for what, chosen in (
        (
            "Attention is what lies between the projections, as SDPA was not called",
            [layer for layer in layers if layer["attention"] != "sdpa"],
        ),
        (
            "Outside of this block, torch's inference fast path may serve it instead",
            [layer for layer in layers if layer["fast_path"] and layer["calls"]],
        ),
        ("Did not run", [layer for layer in layers if not layer["calls"]]),
    ):
        if chosen:
            names = [layer["layer"] for layer in chosen]
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            yield f"{what}: {', '.join(names[:4])}{more}."
    if data["captured"]:
        yield f"Inside a graph capture, and not timed: {data['captured']} forwards."


# --------------------------------------------------------------------------
# Pictures


def _draw_times(axis: Any, layers: list[dict[str, Any]]) -> None:
    """A bar for each layer, cut into its parts."""
    for place, layer in enumerate(layers):
        left = 0.0
        for part in layer["parts"]:
            if part["part"] != WHOLE:
                width = 1e3 * part["seconds"] / layer["calls"]
                color = _COLORS[part["part"]]
                axis.barh(place, width, left=left, color=color, label=part["part"])
                left += width
    axis.set_yticks(range(len(layers)), [layer["layer"] for layer in layers])
    axis.set(title="mean forward, by part", xlabel="ms")
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def _draw_quantiles(axis: Any, layers: list[dict[str, Any]]) -> None:
    """From P50, a dot, to P99, the end of the line; parts of a layer beneath."""
    for place, layer in enumerate(layers):
        parts = [part for part in layer["parts"] if part["part"] not in (WHOLE, OTHER)]
        for row, part in enumerate(parts):
            y = place + 0.7 * ((row + 0.5) / len(parts) - 0.5)
            middle, high = 1e3 * part["p50_s"], 1e3 * part["p99_s"]
            color = _COLORS[part["part"]]
            axis.plot([middle, high], [y, y], color=color, linewidth=2)
            axis.plot([middle], [y], "o", color=color, markersize=4)
    axis.set_xscale("log")
    axis.set(title="P50 (dot) to P99 (end of the line)", xlabel="ms")
    axis.spines[["top", "right"]].set_visible(False)
