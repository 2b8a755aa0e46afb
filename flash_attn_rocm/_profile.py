"""profile(): where the time of simulated launches goes.

What is counted and estimated is the simulator's; tables, traces and plots are made
by the hipsim package. Here is who gets which launch, and why there may be none.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Union

from . import _arguments, _record, _shim, _simulate
from ._config import simulator_path
from ._errors import FlashAttnError
from ._reason import Reason
from ._status import _why

PathLike = Union[str, "os.PathLike[str]"]
_KINDS = ("fused", "fallback")  # calls by kernel, calls by reason


class Profile:
    """What was simulated inside one profile() block; also readable inside it.

    Without a simulated launch table() says why, to_dict() and json() have no
    launches, and the three that write files raise FlashAttnError.
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, Any]] = []
        self._before = _record.counters()
        self._calls: dict[str, dict[str, int]] | None = None  # None: still open
        self._patched = _shim.is_patched()
        self._simulating = _simulate.current_arch() is not None

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain data.

        Returns:
            A dictionary: version, device, constants (name, value, unit, source,
            grade), launches (counters, bounds and estimate of each) and calls (by
            kernel and by reason of the fallback). Without a simulated launch
            there is no device and no constant.
        """
        from hipsim.profile_file import join

        with _state.lock:
            _collect()
            joined = join(self._parts)
        return {**joined, "calls": self._made()}

    def json(self) -> str:
        """to_dict() as JSON text."""
        return json.dumps(self.to_dict())

    def table(self) -> str:
        """The report for people: what bounds each kernel, then the estimates.

        If nothing was simulated, why not.
        """
        from hipsim.profile_table import table

        data = self.to_dict()
        lines = _unsimulated(data, self._patched, self._simulating)
        return table(data) + "".join(line + "\n" for line in lines)

    def save(self, path: PathLike) -> None:
        """Writes json() to a file, which `hipsim disasm --counts` reads too.

        Raises:
            FlashAttnError: nothing was simulated, or the file cannot be written.
        """
        self._write(path, self._simulated("save"))

    def trace(self, path: PathLike) -> None:
        """Writes the waves' timelines for Perfetto or chrome://tracing.

        A process is a SIMD of one compute unit, a thread a wave, a slice the use
        of one unit. Times are the cycle model's estimates, one launch after the
        other.

        Raises:
            FlashAttnError: nothing was simulated, or the file cannot be written.
        """
        from hipsim.profile_trace import trace

        self._write(path, trace(self._simulated("trace")))

    def plot(self, path: PathLike) -> None:
        """Draws the roofline, and beside it what bounds each kernel.

        Args:
            path: a file whose suffix matplotlib knows, for example ".png".

        Raises:
            FlashAttnError: matplotlib is missing, nothing was simulated, or the
                file cannot be written.
        """
        from hipsim.files import FileError
        from hipsim.profile_plot import plot

        data = self._simulated("plot")
        try:
            plot(data, Path(_arguments.path("path", path)))
        except FileError as error:
            raise FlashAttnError(str(error)) from None

    def _simulated(self, what: str) -> dict[str, Any]:
        """to_dict(), or FlashAttnError that says why it is empty."""
        from hipsim.profile_file import is_empty

        data = self.to_dict()
        if is_empty(data):
            raise FlashAttnError(f"{what}: {self.table().strip()}")
        return data

    @staticmethod
    def _write(path: PathLike, data: dict[str, Any]) -> None:
        from hipsim.files import FileError
        from hipsim.profile_file import write_json

        try:
            write_json(data, Path(_arguments.path("path", path)))
        except FileError as error:
            raise FlashAttnError(str(error)) from None

    def _made(self) -> dict[str, dict[str, int]]:
        """The process's attention calls since the block was entered."""
        if self._calls is not None:
            return self._calls
        now = _record.counters()
        made: dict[str, dict[str, int]] = {}
        for kind in _KINDS:
            before = self._before[kind]
            counts = {k: n - before.get(k, 0) for k, n in now[kind].items()}
            made[kind] = {k: n for k, n in counts.items() if n > 0}
        return made

    def _close(self) -> None:
        self._patched = self._patched or _shim.is_patched()
        simulating = _simulate.current_arch() is not None
        self._simulating = self._simulating or simulating
        self._calls = self._made()


# --------------------------------------------------------------------------
# Who gets which launch


class _State:
    """The blocks that are open, of all threads; `lock` guards the rest."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.blocks: list[Profile] = []
        self.before = 0  # the simulator's option in front of the first block


_state = _State()


def _simulator() -> Any:
    """The hipsim package, or None where no simulator is installed."""
    if not os.path.isfile(simulator_path()):
        return None
    import hipsim

    return hipsim


def _collect() -> None:
    """Hands the launches that ended since the last time to every open block."""
    simulator = _simulator()
    if simulator is None or not _state.blocks:
        return
    from hipsim.profile_file import is_empty

    part = simulator.take_profile()
    if not is_empty(part):
        for block in _state.blocks:
            block._parts.append(part)


@contextmanager
def profile() -> Iterator[Profile]:
    """Count and time the simulated launches inside a with-block.

    Returns:
        The Profile as the block's value: table(), json(), save(), trace(), plot().

    Notes:
        The simulator is one for the process, so launches of all threads are
        counted. Blocks may nest and overlap, also between threads: a launch
        belongs to each block that is open when it ends. Profiling slows the
        simulator down; its state from before comes back with the last block's
        end. Launches on real devices are not seen.
    """
    simulator = _simulator()
    mine = Profile()
    with _state.lock:
        if simulator is not None and not _state.blocks:
            _state.before = simulator.get_option("profile")
            simulator.take_profile()  # what HIPSIM_PROFILE=1 left is not ours
            simulator.set_option("profile", 1)
        _collect()
        _state.blocks.append(mine)
    try:
        yield mine
    finally:
        with _state.lock:
            _collect()
            mine._close()
            _state.blocks.remove(mine)
            if simulator is not None and not _state.blocks:
                simulator.set_option("profile", _state.before)


# --------------------------------------------------------------------------
# Why there may be nothing


def _unsimulated(data: dict[str, Any], patched: bool, simulating: bool) -> list[str]:
    """Calls that left no launch in the profile, and why."""
    from hipsim.profile_file import is_empty

    calls = data["calls"]
    lines = [
        f"stock SDPA answered {_times(count)}: {_why(Reason(code))} ({code})"
        for code, count in calls["fallback"].items()
    ]
    if not is_empty(data):
        return ["", *lines] if lines else []
    for kernel, count in calls["fused"].items():
        lines.append(f"{kernel} ran {_times(count)}, but not in the simulator")
    if not lines:
        lines.append("no attention call was made through this package")
        if not patched:
            lines.append("patch() was not in force")
        if not simulating:
            lines.append("simulate() was not in force")
    if _simulator() is None:
        missing = simulator_path() or "the hipsim package"
        lines.append(f"there is no simulator here: expected {missing}, missing")
    return lines


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
