"""What a soak breaks on purpose: a plan, read from JSON, and its calls struck.

docs/soak.md describes the plan. Faults are the simulator's (csrc/sim/hipsim.h); they
are set for one call and taken away after it, so that each line of the journal says
what happened in that call.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

from . import _guard, _soak_workload, _verify
from ._errors import FlashAttnError
from ._reason import Reason
from ._soak_check import Answer

# What a fault may be answered by, in the pass that it struck; docs/degradation.md.
_ANSWERS = {
    "launch": ("failed",),
    "memory": ("failed",),
    "endless": ("late",),
    "slow": ("late", "fused"),  # by its factor
    "lds-flip": ("verify", "fused", "nonfinite"),  # fused: nothing that counts was hit
    "alloc": ("failed",),
}
_TRIPS = ("failed", "late", "verify")
_PASSES = ("forward", "backward", "both")
_REASONS = tuple(str(reason) for reason in Reason)
# So slow that no kernel ends in time, and so little that each does.
_TOO_SLOW = "slow:every=1,factor=1000000000"
_SLOW = "slow:every=1,factor=2"
_LAUNCHES = 4  # of a forward and a backward
# The default plan: calls for each kind, one in so many of them struck, of a row in
# which each fourth is.
_SECTION = 800
_STRUCK = 60
_EVERY = 4
_SHORT = 300  # too short to have each kind twice
_SHORTEST = 40
# Plans.
_LARGEST = 1 << 20  # bytes of a file
_MOST = (1 << 63) - 1  # of a call's number
_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class Entry:
    """One line of a plan."""

    kind: str  # "launch", or as the simulator takes it: "launch:every=1"
    calls: tuple[int, int]  # from, to (exclusive)
    every: int = 1  # each so manieth of them
    repeat: int = 0  # the same again after so many calls; 0: once
    passes: str = "both"
    guard: str = ""  # the guard's mode meanwhile; "": as it is
    verify: int = 0  # one call in so many is verified meanwhile
    expect: tuple[str, ...] = ()  # reasons; (): what the kind is answered by

    @property
    def name(self) -> str:
        """The kind alone."""
        return self.kind.split(":")[0]

    def holds(self, index: int) -> bool:
        """Whether call `index` is in the time of this fault."""
        at = index % self.repeat if self.repeat else index
        return self.calls[0] <= at < self.calls[1]

    def strikes(self, index: int) -> bool:
        at = index % self.repeat if self.repeat else index
        return self.holds(index) and (at - self.calls[0]) % self.every == 0

    def spec(self, index: int, backward: bool) -> str:
        """For the simulator: another launch of each call."""
        if ":" in self.kind:
            return self.kind
        if self.name == "alloc":
            return "alloc:every=1"
        launches = _LAUNCHES if backward and self.passes == "both" else 1
        if self.passes == "backward":
            launches = _LAUNCHES - 1
        begin = index % self.repeat if self.repeat else index
        number = (begin - self.calls[0]) // self.every  # the first strikes for certain
        spec = f"{self.kind}:nth={1 + number % launches}"
        return spec + f",bits=64,seed={index}" * (self.name == "lds-flip")


# --------------------------------------------------------------------------
# Plans


def default_plan(calls: int | None) -> list[Entry]:
    """Each kind in turn, then all healthy again, in both modes of the guard."""
    kinds = [
        ("launch", 0),
        ("memory", 0),
        ("endless", 0),
        (_TOO_SLOW, 0),
        (_SLOW, 0),
        ("lds-flip", 1),
        ("alloc", 0),
    ]
    turns = 2 * len(kinds)
    section = _SECTION
    if calls is not None and calls < turns * section:
        turns = turns if calls >= turns * _SHORT else len(kinds)
        section = max(calls // turns, _SHORTEST)
    plan = []
    for turn in range(turns):
        kind, verify = kinds[turn % len(kinds)]
        begin = section * turn + section // 4
        strikes = max(section // _STRUCK, 2)
        plan.append(
            Entry(
                kind=kind,
                calls=(begin, begin + _EVERY * strikes),
                every=_EVERY,
                repeat=section * turns,
                # The number of kinds is odd: each meets both.
                guard=("async", "sync")[turn % 2],
                verify=verify,
                expect={_TOO_SLOW: ("late",), _SLOW: ("fused",)}.get(kind, ()),
            )
        )
    return plan


def read_plan(path: Path) -> list[Entry]:
    """A plan from a file.

    Raises:
        FlashAttnError: it cannot be read, or says something else than a plan.
    """
    try:
        if not path.is_file():  # opening a pipe would wait for who writes it
            path.stat()  # raises if absent
            raise FlashAttnError(f"{path}: expected a regular file")
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise FlashAttnError(f"{path}: {error.strerror or error}") from error
    if len(data) > _LARGEST:
        raise FlashAttnError(f"{path}: expected at most {_LARGEST} bytes")
    try:
        rows = json.loads(data, object_pairs_hook=_object, parse_constant=_no_number)
    except ValueError as error:
        raise FlashAttnError(f"{path}: expected JSON, got {error}") from error
    except RecursionError as error:
        raise FlashAttnError(f"{path}: expected JSON, nested less deep") from error
    if not isinstance(rows, list):
        raise FlashAttnError(f"{path}: expected a list of faults")
    return [_entry(f"{path}: fault {number}", row) for number, row in enumerate(rows)]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a key that comes twice json keeps the last and says nothing."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {_short(key)} twice in an object")
        made[key] = value
    return made


def _no_number(text: str) -> float:
    raise ValueError(f"{text}, which is no number of JSON")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _is_count(value: Any, least: int, most: int = _MOST) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and least <= value <= most


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(fits(each) for each in value)


def _is_range(value: Any) -> bool:
    counts = _is_list(value, lambda call: _is_count(call, 0))
    return counts and len(value) == 2 and value[0] < value[1]


def _is_kind(value: Any) -> bool:
    """Of one fault; what is behind the colon is the simulator's to read."""
    plain = isinstance(value, str) and value.isascii() and value.isprintable()
    short = plain and len(value) <= _SHOWN and ";" not in value
    return short and value.split(":")[0] in _ANSWERS


# What each key has to be, and how to tell.
_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "kind": (f"one of {', '.join(_ANSWERS)}, perhaps with :SPEC behind it", _is_kind),
    "calls": ("[from, to], whole numbers, the first below the second", _is_range),
    "every": ("a whole number of at least 1", lambda value: _is_count(value, 1)),
    "repeat": ("a whole number of at least 0", lambda value: _is_count(value, 0)),
    "passes": (f"one of {', '.join(_PASSES)}", lambda value: value in _PASSES),
    "guard": ("async or sync", lambda value: value in ("", "async", "sync")),
    "verify": ("a whole number of at least 0", lambda value: _is_count(value, 0)),
    "expect": (
        "a list of reasons as last_call() has them, such as failed, late or fused",
        lambda value: _is_list(value, lambda each: each in _REASONS),
    ),
}
_NEEDED = ("kind", "calls")


def _entry(where: str, row: Any) -> Entry:
    def refuse(key: str, expected: str, got: Any) -> FlashAttnError:
        return FlashAttnError(f"{where}: {key}: expected {expected}, got {_short(got)}")

    if not isinstance(row, dict):
        raise FlashAttnError(f"{where}: expected an object, got {_short(row)}")
    for key in row:
        if key not in _KEYS:
            raise FlashAttnError(f"{where}: {_short(key)}: expected {', '.join(_KEYS)}")
    for key, (expected, fits) in _KEYS.items():
        if key not in row and key in _NEEDED:
            raise FlashAttnError(f"{where}: {key}: expected {expected}, got none")
        if key in row and not fits(row[key]):
            raise refuse(key, expected, row[key])
    repeat, (begin, end) = row.get("repeat", 0), row["calls"]
    if repeat and repeat < end:
        raise refuse("repeat", f"0, or at least the end of calls, {end}", repeat)
    return Entry(
        **{**row, "calls": (begin, end), "expect": tuple(row.get("expect", []))}
    )


def as_data(plan: list[Entry]) -> list[dict[str, Any]]:
    """The plan as JSON has it, for the journal."""
    rows: list[dict[str, Any]] = json.loads(json.dumps([asdict(e) for e in plan]))
    return rows


# --------------------------------------------------------------------------
# Striking


class Injector:
    """Sets the plan's faults call by call."""

    def __init__(self, plan: list[Entry]) -> None:
        self.plan = plan
        self._held: Entry | None = None
        self._mode = _guard.guard_status()["mode"]
        self._every = _verify.verify_status()["every"]

    def check(self) -> None:
        """Let the simulator look at each fault.

        Raises:
            FlashAttnError: it knows no such.
        """
        import hipsim

        for number, entry in enumerate(self.plan):
            try:
                hipsim.set_fault(entry.spec(0, True))
            except hipsim.HipError as error:
                raise FlashAttnError(f"plan: fault {number}: kind: {error}") from error
            finally:
                hipsim.set_fault(None)

    def case(
        self, seed: int, index: int, bad_share: float, sizes: _soak_workload.Sizes
    ) -> _soak_workload.Case:
        """The call, or where memory is to run out, one that asks for too much.

        The fused path allocates by torch alone, so the simulator's own allocations
        are none of a call's.
        """
        if any(e.name == "alloc" and e.strikes(index) for e in self.plan):
            return _soak_workload.make_too_large(seed, index, sizes)
        return _soak_workload.make(seed, index, bad_share, sizes)

    def turn(self, index: int) -> None:
        """Modes of the guard and of verifying, as the plan has them for a call."""
        held = next((entry for entry in self.plan if entry.holds(index)), None)
        if held is self._held:
            return
        self._held = held
        mode = held.guard if held is not None and held.guard else self._mode
        every = held.verify if held is not None and held.verify else self._every
        _guard.configure(mode)
        _verify.set_every(every)

    def end(self) -> None:
        """As it was before."""
        _guard.configure(self._mode)
        _verify.set_every(self._every)

    def strike(self, index: int, case: _soak_workload.Case) -> Strike | None:
        """The fault of this call, if the plan has one."""
        for entry in self.plan:
            if entry.strikes(index):
                return Strike(entry, entry.spec(index, case.dout is not None))
        return None


class Strike:
    """A fault of one call, and what came of it."""

    def __init__(self, entry: Entry, spec: str) -> None:
        self.entry, self.spec = entry, spec
        self.fired: dict[str, int] = {}  # by pass
        self._before = 0

    def arm(self) -> None:
        if self.entry.passes != "backward":
            self._set(self.spec)

    def note(self, what: str) -> None:
        """A pass is over: what the simulator did in it."""
        import hipsim

        fired = hipsim.faults_fired()[self.entry.name]
        if self.entry.name == "alloc":  # torch's allocator refused the output
            fired += what == "error"
        self.fired[what] = fired - self._before
        self._before = fired
        if what == "forward" and self.entry.passes != "both":
            self._set(self.spec if self.entry.passes == "backward" else None)

    def disarm(self) -> None:
        self._set(None)

    def _set(self, spec: str | None) -> None:
        import hipsim

        hipsim.set_fault(spec)
        self._before = 0

    def complaint(self, ours: Answer, opened: bool) -> str:
        """What is not as defined; "" if all is, or if nothing was struck."""
        expected = self.entry.expect or _ANSWERS[self.entry.name]
        for what, reason in zip(self.fired, ours.reasons):
            if not self.fired[what]:
                continue
            if reason not in expected:
                return f"{what}: expected {' or '.join(expected)}, got {reason}"
            # A backward that ran fused may have tried the kernel, and closed it.
            closed = what == "forward" and ours.reasons[-1] == "fused"
            tripped = reason in _TRIPS and self.entry.name != "alloc"
            if tripped and not opened and not closed:
                return f"{what}: expected an open breaker"
        return ""


def noter(strike: Strike | None) -> Callable[[str], None]:
    return (lambda what: None) if strike is None else strike.note
