"""soak(): many calls through the patched function, each compared with stock's answer.

The order of a call: its fault is set, it is asked, its fault is taken away, the
breakers are looked at, stock is asked, the journal gets a line if there is something
to say. What is said at the end is _soak_report's.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Callable

import torch

from . import _guard, _shim, _simulate
from ._errors import FlashAttnError
from ._soak_breakers import Breakers
from ._soak_check import Answer, Verdict, ask_ours, judge
from ._soak_faults import Entry, Injector, Strike, as_data, noter
from ._soak_journal import Journal, Line
from ._soak_report import Summary
from ._soak_telemetry import Telemetry
from ._soak_workload import CARD, GOOD, TINY, Case

_LONGEST_WAIT_S = 120.0  # for breakers to be tried again, at the end
_TRIES = 50


@dataclass(frozen=True)
class Options:
    """What to run, and for how long: whichever of calls and seconds is over first."""

    seed: int
    bad_share: float
    plan: tuple[Entry, ...]
    calls: int | None
    seconds: float | None
    batch: int
    device: str  # "sim", or as torch names one
    cooldown_s: float = 1.0  # of the breakers; 0: tried again by the next call

    def header(self) -> Line:
        """What has to be the same when a run is resumed."""
        return {
            "seed": self.seed,
            "bad_share": self.bad_share,
            "device": self.device,
            "cooldown_s": self.cooldown_s,
            "plan": as_data(list(self.plan)),
        }


class _Batch:
    """Sums over the calls since the last line of a batch."""

    def __init__(self, begin: int) -> None:
        self.begin, self.started = begin, time.monotonic()
        self.good = self.fused = self.bad = self.alike = self.struck = 0
        self.quiet = self.quiet_fused = 0
        self.error = 0.0
        self.reasons: Counter[str] = Counter()
        self.ms: list[float] = []

    def add(
        self, case: Case, ours: Answer, verdict: Verdict, struck: bool, ms: float
    ) -> None:
        fine = not verdict.wrong and not verdict.lost
        if case.kind == GOOD:
            self.good += 1
            self.fused += ours.fused
            self.quiet += not struck
            self.quiet_fused += not struck and ours.fused
            self.error = max(self.error, verdict.error if fine else 0.0)
        else:
            self.bad += 1
            self.alike += fine
        self.struck += struck
        self.reasons.update(ours.reasons or ["refused"])
        self.ms.append(ms)

    def line(self, end: int, breakers: int) -> Line:
        ms = sorted(self.ms)

        def quantile(share: float) -> float:
            return round(ms[min(int(share * len(ms)), len(ms) - 1)], 3)

        return {
            "batch": [self.begin, end],
            "t": time.time(),
            "seconds": time.monotonic() - self.started,
            "good": self.good,
            "fused": self.fused,
            "quiet": self.quiet,
            "quiet_fused": self.quiet_fused,
            "bad": self.bad,
            "alike": self.alike,
            "struck": self.struck,
            "open": breakers,
            "error": self.error,
            "reasons": dict(self.reasons),
            "ms": {
                "n": len(ms),
                "mean": sum(ms) / len(ms),
                "p50": quantile(0.5),
                "p99": quantile(0.99),
                "max": round(ms[-1], 3),
            },
        }


class _Run:
    """One process's part of a soak."""

    def __init__(
        self, options: Options, journal: Journal, telemetry: Telemetry | None
    ) -> None:
        self.options, self.journal, self.telemetry = options, journal, telemetry
        simulated = options.device == "sim"
        self.device = torch.device("cpu" if simulated else options.device)
        self.sizes = TINY if simulated else CARD
        self.injector = Injector(list(options.plan))
        self.summary = Summary()
        for line in journal.earlier():
            self.summary.add(line)
        self.breakers = Breakers()
        self.say({"start": self.summary.next, "t": time.time(), "open": self.names()})

    def names(self) -> list[str]:
        return [f"{device} {kernel}" for device, kernel in self.breakers.open]

    def say(self, line: Line) -> None:
        self.journal.write(line)
        self.summary.add(line)

    def case(self, index: int) -> Case:
        options = self.options
        return self.injector.case(options.seed, index, options.bad_share, self.sizes)

    def call(self, case: Case, strike: Strike | None) -> tuple[Answer, Verdict]:
        """One call, asked and judged; its line is written if it says something."""
        started = time.monotonic()
        if strike is not None:
            strike.arm()
        try:
            ours = ask_ours(case, self.device, noter(strike))
        finally:
            if strike is not None:
                strike.disarm()
        self.ms = 1000.0 * (time.monotonic() - started)
        struck = strike is not None and any(strike.fired.values())
        cause = strike.entry.name if strike is not None and struck else ""
        changes = self.breakers.look(case.index, cause)
        for line in changes:
            self.say(line)
        opened = any(line["breaker"] == "opened" for line in changes)
        verdict = judge(case, ours, self.device)
        complaint = strike.complaint(ours, opened) if strike is not None else ""
        spoilt = bool(verdict.wrong or verdict.lost or complaint)
        if strike is not None or case.kind != GOOD or spoilt:
            self.say(self._line(case, ours, verdict, strike, complaint))
        return ours, verdict

    def _line(
        self,
        case: Case,
        ours: Answer,
        verdict: Verdict,
        strike: Strike | None,
        complaint: str,
    ) -> Line:
        error = ours.error
        return {
            "call": case.index,
            "t": time.time(),
            "kind": case.kind,
            "dtype": case.dtype,
            "shapes": case.shape,
            "options": case.words(),
            "backward": case.dout is not None,
            "fault": strike.entry.name if strike is not None else "",
            "spec": strike.spec if strike is not None else "",
            "fired": strike.fired if strike is not None else {},
            "reasons": ours.reasons,
            "kernels": ours.kernels,
            "ms": round(self.ms, 3),
            "raised": type(error).__name__ if error is not None else "",
            "wrong": verdict.wrong,
            "lost": verdict.lost,
            # JSON has no infinity, which is that of a result not even alike.
            "error": verdict.error if math.isfinite(verdict.error) else None,
            "complaint": complaint,
            "text": verdict.text,
        }

    def run(self, progress: Callable[[int, float], None], stop: _Stop) -> None:
        """Calls until enough, a batch at a time."""
        options, index = self.options, self.summary.next
        left = None
        if options.seconds is not None:
            left = options.seconds - self.summary.seconds
        end = time.monotonic() + (left if left is not None else float("inf"))
        batch = _Batch(index)
        try:
            while (
                (options.calls is None or index < options.calls)
                and time.monotonic() < end
                and not stop.asked
            ):
                if self.telemetry is not None:
                    for line in self.telemetry.look(end):
                        self.say(line)
                self._next(index, batch)
                index += 1
                if index - batch.begin == options.batch:
                    self.say(batch.line(index, len(self.breakers.open)))
                    batch = _Batch(index)
                progress(index, self.summary.seconds)
        finally:
            self.injector.end()
            if index > batch.begin:
                self.say(batch.line(index, len(self.breakers.open)))

    def _next(self, index: int, batch: _Batch) -> None:
        self.injector.turn(index)
        case = self.case(index)
        strike = self.injector.strike(index, case)
        ours, verdict = self.call(case, strike)
        struck = strike is not None and any(strike.fired.values())
        batch.add(case, ours, verdict, struck, self.ms)

    def drain(self) -> None:
        """Let each breaker that is open be tried: by the call that opened it."""
        waited = 0.0
        for _ in range(_TRIES):
            ready = self.breakers.next()
            if ready is None:
                return
            index, wait = ready
            if waited + wait > _LONGEST_WAIT_S:
                return
            if wait > 0.0:
                time.sleep(wait)
                waited += wait
            self.call(self.case(index), None)


class _Stop:
    """Ctrl-C and SIGTERM end the soak after the call that runs."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:  # asked twice: at once
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


@contextmanager
def _in_force(options: Options) -> Iterator[None]:
    """Patched, on the device, with a cool-down short enough to see its end."""
    with ExitStack() as stack:
        if options.device == "sim":
            stack.enter_context(_simulate.simulate())
        stack.enter_context(_shim.patched())
        before = _guard.guard_status()
        _guard.configure(cooldown_s=options.cooldown_s)
        stack.callback(_guard.configure, cooldown_s=before["cooldown_s"])
        yield


def soak(
    options: Options,
    journal: Path,
    *,
    resume: bool = False,
    telemetry: Telemetry | None = None,
    progress: Callable[[int, float], None] = lambda index, seconds: None,
) -> tuple[Summary, bool]:
    """Run, and return the sums over all of the journal, and whether it was stopped.

    Closes `telemetry`, however it ends.

    Raises:
        FlashAttnError: the journal, see Journal; the plan, see Injector; or the
            device is not there.
    """
    simulated = options.device == "sim"
    with ExitStack() as stack:
        if telemetry is not None:
            stack.callback(telemetry.close)
        if options.plan and not simulated:
            raise FlashAttnError(
                "faults are injected in the simulator alone, got device "
                f"{options.device}"
            )
        if not simulated and not torch.cuda.is_available():
            raise FlashAttnError(f"device {options.device}: torch finds no GPU")
        stack.enter_context(_in_force(options))
        if simulated:
            Injector(list(options.plan)).check()
        book = Journal(journal, options.header(), resume)
        stack.callback(book.close)
        run = _Run(options, book, telemetry)
        with _Stop() as stop:
            run.run(progress, stop)
        if not stop.asked:
            run.drain()
        run.say({"end": run.summary.next, "t": time.time()})
        return run.summary, stop.asked


def kinds_of(options: Options, calls: int) -> set[str]:
    """Faults that the plan has for the calls before number `calls`."""
    return {
        entry.name
        for entry in options.plan
        if any(entry.strikes(index) for index in range(min(calls, _end(entry))))
    }


def _end(entry: Entry) -> int:
    return entry.repeat or entry.calls[1]
