"""The guard from Python: its policy, what it knows, and the switch to turn all off.

The work is csrc/host's: deadlines, breakers, their state on disk. docs/degradation.md
says what is detected and what the caller sees.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import atexit
import hashlib
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from . import _arguments, _ops
from ._config import code_objects, config, logger
from ._errors import FlashAttnError
from ._reason import Reason


class Switch:
    """Whether fused kernels may answer; torch.compile guards on `off`."""

    def __init__(self) -> None:
        self.off = False
        self.why = ""


switch = Switch()

_FAILURES = {"breaker": Reason.BREAKER, "late": Reason.LATE}
_NAMES = ("device", "kernel", "state", "failures", "retry_in_s", "cause")
_LATENCY = ("device", "kernel", "calls", "seconds", "flops", "p50_s", "p99_s")
_COUNTS = ("misses", "captured", "unwatched", "outstanding", "quarantined")


@dataclass(frozen=True)
class _Policy:
    """What configure() is called with."""

    mode: str
    deadline_factor: float
    deadline_floor_ms: float
    cooldown_s: float
    on_hang: str


class _State:
    """The policy in force: one for the process, as the guard is."""

    def __init__(self) -> None:
        self.policy = _Policy(
            config.guard,
            config.deadline_factor,
            config.deadline_floor_ms,
            config.cooldown_s,
            config.on_hang,
        )


_state = _State()


def state_dir(simulated: bool) -> str | None:
    """Where breakers of GPUs, or of the simulator, outlive the process."""
    if not simulated:
        return config.cache_dir or None
    # The simulator's failures are made up: never in a user's own cache.
    return os.path.join(config.cache_dir, "sim") if config.cache_dir_given else None


def configure(
    mode: str | None = None,
    *,
    deadline_factor: float | None = None,
    deadline_floor_ms: float | None = None,
    cooldown_s: float | None = None,
    on_hang: str | None = None,
) -> None:
    """Change the guard's policy while the program runs; None keeps what is in force.

    Args:
        mode: "off", "async" or "sync".
        deadline_factor: a call may take so many times its estimate,
        deadline_floor_ms: but always at least this, in milliseconds.
        cooldown_s: how long a breaker that opened once stays open, in seconds; twice
            as long after each further failure in a row, up to an hour.
        on_hang: "report", or "abort": end the process when an asynchronous call
            misses its deadline, so that a supervisor starts it again.

    Raises:
        FlashAttnError: an argument is something else.
    """
    wanted: dict[str, Any] = {}
    if mode is not None:
        wanted["mode"] = _arguments.word("mode", mode, ("off", "async", "sync"))
    if on_hang is not None:
        wanted["on_hang"] = _arguments.word("on_hang", on_hang, ("report", "abort"))
    if deadline_factor is not None:
        wanted["deadline_factor"] = _arguments.number(
            "deadline_factor", deadline_factor, "a number above 0", lambda x: x > 0
        )
    for name, value in (
        ("deadline_floor_ms", deadline_floor_ms),
        ("cooldown_s", cooldown_s),
    ):
        if value is not None:
            wanted[name] = _arguments.number(
                name, value, "a number of at least 0", lambda x: x >= 0
            )
    policy = replace(_state.policy, **wanted)
    _put_in_force(policy)
    _state.policy = policy


def _put_in_force(policy: _Policy) -> None:
    if _ops.ext is None:
        return
    try:
        _ops.ext.guard(
            policy.mode,
            policy.deadline_factor,
            policy.deadline_floor_ms,
            policy.cooldown_s,
            policy.on_hang == "abort",
            state_dir(simulated=False),
            state_dir(simulated=True),
        )
    except (TypeError, ValueError) as error:
        raise FlashAttnError(str(error)) from None


def last_failure() -> tuple[str, Reason]:
    """Why the op that just raised on this thread was not served: C's word, and ours.

    To be asked once: it is forgotten.
    """
    word: str = _ops.ext.last_failure()
    return word, _FAILURES.get(word, Reason.FAILED)


def disable(reason: str = "") -> None:
    """Let the stock function answer every call from now on, until enable().

    The switch to roll back without a restart. Calls of attention(), flash_attn_func()
    and the like, which have no stock function, are refused with FlashAttnError. A
    backward whose forward ran before still runs fused. Compiled graphs are compiled
    again at their next call.

    Args:
        reason: for the log and status().

    Raises:
        FlashAttnError: reason is no str.
    """
    _arguments.text("reason", reason)
    if not switch.off:
        logger.warning("disabled%s", f": {reason}" if reason else "")
    switch.off, switch.why = True, reason


def enable() -> None:
    """Undo disable()."""
    if switch.off:
        logger.warning("enabled again")
    switch.off, switch.why = False, ""


def guard_status() -> dict[str, Any]:
    """status()["guard"]."""
    known = {} if _ops.ext is None else _ops.ext.guard_counts()
    return {
        **asdict(_state.policy),
        **{name: known.get(name, 0) for name in _COUNTS},
        "state_dir": state_dir(simulated=config.device == "sim"),
        "complaints": [] if _ops.ext is None else _ops.ext.complaints(),
    }


def breaker_list() -> list[dict[str, Any]]:
    """status()["breakers"]: the kernels that are not closed, by device."""
    rows = [] if _ops.ext is None else _ops.ext.breakers()
    return [
        dict(
            zip(
                _NAMES,
                (row[0], row[1], "half_open" if row[2] else "open", *row[3:]),
            )
        )
        for row in rows
    ]


def latency_list() -> list[dict[str, Any]]:
    """status()["latency"]: by device and kernel."""
    rows = [] if _ops.ext is None else _ops.ext.latency()
    return [dict(zip(_LATENCY, row)) for row in rows]


def trip(device: str, kernel: str, cause: str, cooldown_s: float | None = None) -> None:
    """Open the breaker of a kernel on a device such as "sim" or "hip:0".

    Args:
        cooldown_s: rests at least so long; None: as configure() says.

    Raises:
        FlashAttnError: no such kernel, or no call on that device yet.
    """
    try:
        _ops.ext.breaker_trip(device, kernel, cause, cooldown_s)
    except (TypeError, ValueError) as error:
        raise FlashAttnError(str(error)) from None


def reset(kernel: str | None = None) -> None:
    """Close the breaker of a kernel, or all, on every device and on disk.

    Also those of kernels that did not pass their self-test.

    Raises:
        FlashAttnError: kernel is no symbol, or a file of state cannot be changed.
    """
    if kernel is not None:
        _arguments.symbol("kernel", kernel)
    if _ops.ext is not None:
        _ops.ext.breaker_reset(kernel)


# A kernel that failed its self-test is not tried again in this process.
_FOR_GOOD_S = 10.0 * 365 * 24 * 3600


def selftest_passed(index: int) -> bool:
    """Run or recall the self-test of GPU `index`, and open the breakers it calls for.

    Returns:
        Whether anything is left to run: False where it did not come to an end, or no
        family of kernels passed.
    """
    from . import _selftest  # imports torch.nn.attention and more, for real GPUs alone

    device = f"hip:{index}"
    _ops.ext.guard_device(1, index, None)
    identity = dict(_ops.ext.identities())[device]
    logger.info(
        "self-test of %s (%s), once for this driver and build", device, identity
    )
    verdicts = _selftest.ensure(
        identity,
        _hash_of_code(),
        state_dir(simulated=False),
        lambda: _selftest.verdicts(str(index)),
    )
    bad = [verdict for verdict in verdicts if verdict.verdict != "passed"]
    for verdict in bad:
        logger.warning(
            "self-test of %s on %s: %s %s",
            *(verdict.family, device, verdict.verdict, verdict.detail),
        )
        for kernel in verdict.kernels:
            cause = f"self-test: {verdict.verdict} {verdict.detail}"
            trip(device, kernel, cause, _FOR_GOOD_S)
    return len(bad) < len(verdicts)


def _hash_of_code() -> str:
    """One for the code objects, whose bytes it stands for."""
    digest = hashlib.sha256()
    for names in code_objects(config.code_dir).values():
        for name in names:
            with open(os.path.join(config.code_dir, name), "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()


def _start() -> None:
    _put_in_force(_state.policy)
    if _ops.ext is not None:
        # The watching thread asks the device; it must not outlive the interpreter.
        atexit.register(_ops.ext.guard_stop)


_start()
