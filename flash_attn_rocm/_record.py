"""What ran: the calling thread's last call and the process's counters.

Kept by the extension, where the op itself writes them (so they are right under
torch.compile too). Without the extension nothing can run fused, and the
fallbacks are kept here.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Callable

from torch import Tensor

from . import _ops
from ._config import logger
from ._features import Features
from ._guard import last_failure
from ._reason import Reason
from ._visits import Geometry, without_tables

Record = tuple[str, str, str, str, int, int]


class _Recorder:
    """The extension's recording functions, for a process without it."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._fallbacks: Counter[str] = Counter()

    def record_fallback(self, reason: str) -> None:
        self._local.record = ("sdpa", "", reason, "", 0, 0)
        with self._lock:
            self._fallbacks[reason] += 1

    def last_call(self) -> Record | None:
        return getattr(self._local, "record", None)

    def counters(self) -> dict[str, Any]:
        with self._lock:
            fallback = dict(self._fallbacks)
        return {"fused": {}, "fallback": fallback, "wave_instructions": 0}

    def reset_counters(self) -> None:
        with self._lock:
            self._fallbacks.clear()


_recorder: Any = _ops.ext if hasattr(_ops.ext, "record_fallback") else _Recorder()

record_fallback: Callable[[str], None] = _recorder.record_fallback
last_record: Callable[[], Record | None] = _recorder.last_call
counters: Callable[[], dict[str, Any]] = _recorder.counters
reset_counters: Callable[[], None] = _recorder.reset_counters


class _Latest(threading.local):
    """What the thread's last call looked like, if it came by one of our functions."""

    call: tuple[Any, ...] | None = None


_latest = _Latest()


def keep_geometry(q: Tensor, k: Tensor, features: Features) -> None:
    """Remember the call that was just recorded, with q and k in the ops' layout."""
    _latest.call = (last_record(), q.shape, k.shape, *without_tables(features))


def forget_geometry() -> None:
    """The thread's last call is another one, of which nothing is known."""
    _latest.call = None


def last_geometry() -> Geometry | None:
    """That of the thread's last call; None where it is not known."""
    # Compiled calls, and calls of the op itself, leave only a record.
    call = _latest.call
    known = call is not None and call[0] == last_record()
    return Geometry(*call[1:]) if call is not None and known else None


def reason_of_failure(error: BaseException) -> Reason:
    """Why a fused call that raised on this thread was not served; to be asked once."""
    reason = getattr(error, "reason", None)
    return reason if isinstance(reason, Reason) else last_failure()[1]


_TRIED = (Reason.FAILED, Reason.LATE, Reason.BREAKER, Reason.VERIFY)
# Details have numbers in them; the log is not to grow with every call for ever.
_NOTED_MAX = 256
_noted: set[str] = set()


def note(reason: Reason, detail: str = "") -> None:
    """Record a fallback; one log line for each new reason."""
    code: str = reason._value_
    record_fallback(code)
    line = f"{code}: {detail}" if detail and len(_noted) < _NOTED_MAX else code
    if line not in _noted:
        _noted.add(line)
        if reason in _TRIED:
            logger.warning("a fused call failed, stock SDPA answered it: %s", detail)
        else:
            from ._status import _why  # which imports this module

            why = _why(reason)
            logger.info("stock SDPA answers calls with reason %r: %s", code, why)
