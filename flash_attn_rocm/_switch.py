"""Who calls disable() without a person: a floor of TFLOPS, a watched file, a signal.

Each has a daemon thread of its own that looks from time to time, so that a call of
attention pays nothing. A forked child has no such threads: it keeps the state in
which it was forked, until it asks for them itself.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Union

from . import _arguments, _guard, _status
from ._config import logger

PathLike = Union[str, "os.PathLike[str]"]
Classes = Iterable[Mapping[str, Any]]  # status()["latency"]

_PERIOD_S = 1.0  # between two looks at a file
_WINDOW_S = 120.0  # over which a rate is taken, as in monitoring/alerts.yml
_LOOKS = 20  # at the rates, in the time that a floor allows
_POSITIVE = ("a positive number", lambda x: 0.0 < x < math.inf)
_NO_GPU = ("sim", "null")  # devices whose time says nothing about a card


class Watch:
    """Something that is looked at until close(), or the end of a with-block."""

    def __init__(self, name: str, period: float, look: Callable[[], None]) -> None:
        self._look, self._period = look, period
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"flash_attn_rocm {name}", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._period):
            try:
                self._look()
            except Exception:  # the next look may succeed; a switch must not die
                logger.exception("%s", self._thread.name)

    def close(self) -> None:
        """Look no more; what was switched stays. Repeatable."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --------------------------------------------------------------------------
# A floor of TFLOPS


class Floor:
    """The alert FlashAttnRocmSlow of monitoring/alerts.yml, without a Prometheus.

    A device is low if it made less than `tflops` per second of kernel time over the
    last two minutes; idle ones are not low. look() tells which were low at every look
    of `seconds`.
    """

    def __init__(self, tflops: float, seconds: float, simulated: bool = False) -> None:
        self._floor, self._seconds = tflops * 1e12, seconds
        self._skipped = () if simulated else _NO_GPU
        # time, seconds and FLOPs of the looks in the window, by device
        self._looks: dict[str, deque[tuple[float, float, float]]] = {}
        self._low_since: dict[str, float] = {}

    def look(self, latency: Classes, now: float) -> list[str]:
        """The devices, each with its rate in words, that were low for long enough.

        Their time then starts anew.
        """
        found = []
        for device, (seconds, flops) in self._sums(latency).items():
            rate = self._rate(device, now, seconds, flops)
            if rate is None or rate >= self._floor:
                self._low_since.pop(device, None)
            elif now - self._low_since.setdefault(device, now) >= self._seconds:
                del self._low_since[device]
                found.append(f"{device} at {rate / 1e12:.3g} TFLOPS")
        return found

    def _sums(self, latency: Classes) -> dict[str, tuple[float, float]]:
        sums: dict[str, tuple[float, float]] = {}
        for each in latency:
            device = each["device"]
            if device.split(":")[0] not in self._skipped:
                seconds, flops = sums.get(device, (0.0, 0.0))
                sums[device] = (seconds + each["seconds"], flops + each["flops"])
        return sums

    def _rate(
        self, device: str, now: float, seconds: float, flops: float
    ) -> float | None:
        """FLOPs per second since the window's first look; None without a call."""
        looks = self._looks.setdefault(device, deque())
        if looks and seconds < looks[-1][1]:
            looks.clear()  # somebody reset the counters
        looks.append((now, seconds, flops))
        while len(looks) > 2 and now - looks[1][0] >= _WINDOW_S:
            looks.popleft()
        spent = seconds - looks[0][1]
        return (flops - looks[0][2]) / spent if spent > 0 else None


def watch_floor(
    tflops: float,
    seconds: float = 300.0,
    on_low: Callable[[str], object] | None = None,
    *,
    simulated: bool = False,
) -> Watch:
    """Go to stock SDPA if attention on a GPU is slower than a floor for too long.

    Args:
        tflops: the floor, in 1e12 FLOPs per second of kernel time. The rate is that
            of the last two minutes; a device without calls is not slow.
        seconds: for how long it must be below before anything happens.
        on_low: what to call then, with a sentence that names device, rate and
            floor. Default: disable(), which lasts until enable().
        simulated: look at the simulator's own time, too.

    Returns:
        An object with close(), which ends the watch.

    Raises:
        FlashAttnError: tflops or seconds is no positive number, on_low no function,
            or simulated no bool.
    """
    tflops = _arguments.number("tflops", tflops, *_POSITIVE)
    seconds = _arguments.number("seconds", seconds, *_POSITIVE)
    _arguments.truth("simulated", simulated)
    act = _guard.disable if on_low is None else _arguments.function("on_low", on_low)
    ask = _status.status
    floor = Floor(tflops, seconds, simulated)

    def look() -> None:
        for which in floor.look(ask(wait=False)["latency"], time.monotonic()):
            act(f"{which} for {seconds:g} s, below the floor of {tflops:g}")

    return Watch("floor", min(seconds / _LOOKS, 15.0), look)


# --------------------------------------------------------------------------
# A file


def disable_file(path: PathLike) -> Watch:
    """Let calls go to stock SDPA while a file exists; looked at once a second.

    Args:
        path: of anything that may appear and go; it is never opened.

    Returns:
        An object with close(), which ends the watch and leaves the state as it is.

    Raises:
        FlashAttnError: path is none that a file may have.

    Notes:
        An enable() while the file exists lasts a second. When the file goes, enable()
        is called unless another disable() is in force: by hand, by a signal, by the
        floor. A file that is there already is seen before this returns.
    """
    watched, guard = _arguments.path("path", path), _guard
    reason = f"the file {watched} exists"

    def look() -> None:
        if os.path.lexists(watched):
            if not guard.switch.off:
                guard.disable(reason)
        elif guard.switch.off and guard.switch.why == reason:
            guard.enable()

    look()
    return Watch("file", _PERIOD_S, look)


# --------------------------------------------------------------------------
# A signal

# A program that goes on behind its handler of one would fault again, for ever.
_FAULTS = (
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE),
    *(signal.SIGILL, signal.SIGABRT),
)


def disable_signal(signum: int = signal.SIGUSR1) -> None:
    """Let a signal call disable(): `kill -USR1 PID`. enable() undoes it.

    Args:
        signum: SIGUSR1 or another one that a handler may be set for, but for those of
            a fault: SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT.

    Raises:
        FlashAttnError: this is not the main thread, or no handler may be set for
            signum.

    Notes:
        A handler that was there before is called, too. Python runs handlers in the
        main thread between two of its instructions: a main thread that hangs in a
        call into C sees none, where disable_file() still works.
    """
    if isinstance(signum, int) and (isinstance(signum, bool) or signum in _FAULTS):
        raise _arguments.refused("signum", "a signal that is no fault's", signum)
    off = _guard.disable
    # The handler may interrupt this very thread inside disable() or logging, with
    # their locks held. A SimpleQueue is the one that a handler may put into.
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()

    def serve() -> None:
        while True:
            name = signal.strsignal(arrived.get())
            try:
                off(f"signal: {name}")
            except Exception:  # the next signal may succeed
                logger.exception("disable_signal: %s", name)

    def handler(number: int, frame: Any) -> None:
        arrived.put(number)
        if callable(before):
            before(number, frame)

    try:
        before = signal.getsignal(signum)
        signal.signal(signum, handler)
    except (ValueError, OSError, TypeError, OverflowError) as error:
        expected = f"a signal, and the main thread ({error})"
        raise _arguments.refused("signum", expected, signum) from None
    try:
        threading.Thread(
            target=serve, name="flash_attn_rocm signal", daemon=True
        ).start()
    except RuntimeError:  # no thread is left; a handler alone would do nothing
        signal.signal(signum, signal.SIG_DFL if before is None else before)
        raise
