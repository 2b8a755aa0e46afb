"""What a soak comes to: sums over its journal, and the promises they keep or break.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ._soak_journal import Line

_SHOWN = 20  # findings in the report; the journal has all
_POINTS = 4000  # of the plot, however long the soak; even
_COUNTED = ("good", "fused", "bad", "alike", "struck")


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two points of the plot as one."""
    sums = {name: one[name] + other[name] for name in _COUNTED}
    most = {name: max(one[name], other[name]) for name in ("open", "p50", "p99")}
    return {"at": other["at"], **sums, **most}


@dataclass
class _Fault:
    """Sums of one kind."""

    armed: int = 0  # calls that it was set for
    struck: int = 0  # calls that it happened in
    answered: int = 0  # of those, as docs/degradation.md defines
    wrong: int = 0  # of the armed ones
    answers: Counter[str] = field(default_factory=Counter)
    opened: int = 0
    closed: int = 0


class Summary:
    """The sums, fed line by line: while running, and again when resumed."""

    def __init__(self) -> None:
        self.calls = self.good = self.fused = self.bad = self.alike = 0
        self.quiet = self.quiet_fused = 0  # good calls that were not struck
        self.wrong = self.lost = 0
        self.next = 0  # the first call that no batch has
        self.gaps = 0
        self.seconds = 0.0
        self.largest = 0.0
        self.reasons: Counter[str] = Counter()
        self.faults: dict[str, _Fault] = {}
        self.findings: list[Line] = []  # the first of them
        self.found = 0
        self.unprovoked = self.starts = self.pauses = self.forgotten = 0
        self.open: dict[str, str] = {}  # breaker -> the kind that opened it
        self.cooling_s = 0.0
        self.hottest: float | None = None
        self.errors: Counter[str] = Counter()
        self._earlier: Counter[str] = Counter()  # those of earlier processes
        self.log: list[str] = []
        self.points: list[dict[str, Any]] = []  # of the plot
        self.answers = 0
        self.answering_ms = self.slowest_ms = 0.0
        self.heat: list[tuple[float, float]] = []

    def add(self, line: Line) -> None:
        for word, take in (
            ("batch", self._batch),
            ("call", self._call),
            ("start", self._start),
            ("telemetry", self._telemetry),
            ("cooling", self._cooling),
        ):
            if word in line and "breaker" not in line:
                take(line)
                return
        if "breaker" in line:
            self._breaker(line)

    def _batch(self, line: Line) -> None:
        begin, end = line["batch"]
        self.gaps += max(begin - self.next, 0)
        self.next = end
        self.calls += end - begin
        for name in ("good", "fused", "bad", "alike", "quiet", "quiet_fused"):
            setattr(self, name, getattr(self, name) + line[name])
        self.seconds += line["seconds"]
        self.largest = max(self.largest, line["error"])
        self.reasons.update(line["reasons"])
        ms = line["ms"]
        self.answers += ms["n"]
        self.answering_ms += ms["mean"] * ms["n"]
        self.slowest_ms = max(self.slowest_ms, ms["max"])
        self.points.append(
            {
                "at": end,
                **{name: line[name] for name in _COUNTED},
                "open": line["open"],
                "p50": ms["p50"],
                "p99": ms["p99"],
            }
        )
        if len(self.points) == _POINTS:
            pairs = zip(self.points[::2], self.points[1::2])
            self.points = [_joined(*pair) for pair in pairs]

    def _call(self, line: Line) -> None:
        wrong = bool(line["wrong"])
        self.wrong += wrong
        self.lost += line["lost"]
        if line["fault"]:
            fault = self._fault(line["fault"])
            fault.armed += 1
            fault.wrong += wrong
            if any(line["fired"].values()):
                fault.struck += 1
                fault.answered += not (line["complaint"] or wrong or line["lost"])
                fault.answers["+".join(line["reasons"]) or "raised"] += 1
        if wrong or line["lost"] or line["complaint"]:
            self._find(line)

    def _find(self, line: Line) -> None:
        self.found += 1
        if len(self.findings) < _SHOWN:
            self.findings.append(line)

    def _fault(self, kind: str) -> _Fault:
        return self.faults.setdefault(kind, _Fault())

    def _breaker(self, line: Line) -> None:
        key = f"{line['device']} {line['kernel']}"
        if line["breaker"] == "opened":
            if line["fault"]:
                self._fault(line["fault"]).opened += key not in self.open
            elif key not in self.open:  # a try that failed is no new opening
                self.unprovoked += 1
                self._find(line)
            self.open.setdefault(key, line["fault"])
        elif key in self.open:
            fault = self.open.pop(key)
            if fault:
                self._fault(fault).closed += 1

    def _start(self, line: Line) -> None:
        self.starts += 1
        self._earlier = self.errors
        # Breakers that are kept nowhere end with their process.
        for key in [key for key in self.open if key not in line["open"]]:
            fault = self.open.pop(key)
            self.forgotten += 1
            if fault:
                self._fault(fault).closed += 1

    def _telemetry(self, line: Line) -> None:
        if line["hottest"] is not None:
            self.hottest = max(line["hottest"], self.hottest or -math.inf)
            self.heat.append((line["t"], line["hottest"]))
        self.errors = self._earlier + Counter(line["errors"])
        self.log += line["log"]

    def _cooling(self, line: Line) -> None:
        self.pauses += 1
        self.cooling_s += line["cooling"]

    # ----------------------------------------------------------------------

    def promises(self, share: float, kinds: set[str]) -> dict[str, tuple[bool, str]]:
        """What was promised -> whether it held, and the figures.

        Args:
            share: of good calls that are to run fused.
            kinds: of the faults that the plan has for the calls that ran.
        """
        fused = self.fused / self.good if self.good else 1.0
        struck = sum(fault.struck for fault in self.faults.values())
        answered = sum(fault.answered for fault in self.faults.values())
        opened = sum(fault.opened for fault in self.faults.values())
        closed = sum(fault.closed for fault in self.faults.values())
        idle = sorted(k for k in kinds if not self._fault(k).struck)
        return {
            "no wrong result delivered": (
                self.wrong == 0,
                f"{self.wrong} of {self.calls}",
            ),
            "no call lost": (
                self.lost == 0 and self.gaps == 0,
                f"{self.lost} raised, {self.gaps} missing in the journal",
            ),
            "bad input answered like stock": (
                self.alike == self.bad,
                f"{self.alike} of {self.bad}",
            ),
            "each fault answered as defined": (
                struck == answered,
                f"{answered} of {struck}",
            ),
            "each kind of fault happened": (
                not idle,
                "never: " + ", ".join(idle) if idle else f"{len(kinds)} kinds",
            ),
            "good calls run fused": (
                fused >= share,
                f"{fused:.2%} of {self.good}, at least {share:.0%}",
            ),
            "breakers close after the fault": (
                not self.open,
                f"{closed} of {opened}"
                + (f", still open: {', '.join(self.open)}" if self.open else ""),
            ),
            "no breaker opens without a fault": (
                self.unprovoked == 0,
                f"{self.unprovoked}",
            ),
            "no error of the card": (
                not self.errors and not self.log,
                f"{sum(self.errors.values())} counted, {len(self.log)} in the log",
            ),
        }

    def as_data(self, share: float, kinds: set[str]) -> dict[str, Any]:
        """The report, for JSON."""
        promises = self.promises(share, kinds)
        return {
            "held": all(held for held, _ in promises.values()),
            "promises": {
                name: {"held": held, "figures": figures}
                for name, (held, figures) in promises.items()
            },
            "calls": self.calls,
            "good": self.good,
            "fused": self.fused,
            "fused_share": self.fused / self.good if self.good else None,
            "fused_share_without_fault": (
                self.quiet_fused / self.quiet if self.quiet else None
            ),
            "stock_share": 1.0 - self.fused / self.good if self.good else None,
            "bad": self.bad,
            "bad_answered_like_stock": self.alike,
            "wrong": self.wrong,
            "lost": self.lost,
            "largest_error": self.largest,
            "reasons": dict(self.reasons.most_common()),
            "faults": {
                kind: {**vars(fault), "answers": dict(fault.answers)}
                for kind, fault in self.faults.items()
            },
            "open": sorted(self.open),
            "starts": self.starts,
            "breakers_that_ended_with_a_process": self.forgotten,
            "seconds": self.seconds,
            "ms_mean": self.answering_ms / self.answers if self.answers else None,
            "ms_largest": self.slowest_ms if self.answers else None,
            "hottest": self.hottest,
            "pauses": self.pauses,
            "cooling_s": self.cooling_s,
            "card_errors": dict(self.errors),
            "kernel_log": self.log[:_SHOWN],
            "findings": self.findings,
            "findings_left_out": self.found - len(self.findings),
        }


def text_of(report: dict[str, Any]) -> str:
    """The report, to read."""
    lines = [
        f"{report['calls']} calls in {report['seconds']:.0f} s, "
        f"{report['bad']} of them bad; {report['starts']} start(s)",
    ]
    for name, promise in report["promises"].items():
        word = "held  " if promise["held"] else "BROKEN"
        lines.append(f"  {word} {name}: {promise['figures']}")
    if report["faults"]:
        head = ("fault", "armed", "struck", "answered", "wrong", "opened", "closed")
        lines += ["", f"  {head[0]:<10}" + "".join(f"{h:>9}" for h in head[1:])]
        for kind, fault in report["faults"].items():
            cells = "".join(f"{fault[name]:>9}" for name in head[1:])
            answers = ", ".join(f"{n} {a}" for a, n in fault["answers"].items())
            lines.append(f"  {kind:<10}{cells}  {answers}")
    reasons = ", ".join(f"{count} {name}" for name, count in report["reasons"].items())
    lines += ["", f"  passes answered by: {reasons}"]
    if report["fused_share_without_fault"] is not None:
        share = report["fused_share_without_fault"]
        lines.append(f"  fused, of good calls that were not struck: {share:.2%}")
    lines.append(f"  largest error: {report['largest_error']:.2f} of what is allowed")
    if report["hottest"] is not None:
        lines.append(
            f"  hottest {report['hottest']:.0f} C; "
            f"{report['pauses']} pauses, {report['cooling_s']:.0f} s"
        )
    for finding in report["findings"]:
        where = f"call {finding.get('call')}"
        what = finding.get("complaint") or finding.get("text") or finding.get("cause")
        names = ", ".join(finding.get("wrong", ()))
        lines.append(f"  {where}: {names + ': ' if names else ''}{what}")
    if report["findings_left_out"]:
        lines.append(f"  and {report['findings_left_out']} more in the journal")
    return "\n".join(lines) + "\n"
