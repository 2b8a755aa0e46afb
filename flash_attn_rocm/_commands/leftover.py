"""The threads that a script leaves running, waited for as python does at its end.

Only those: a process that runs more than the script, as that of a test does, may have
others, which need not end.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

_PATIENCE_S = 5.0  # after so long a thread that is waited for is named
_LOOK_S = 0.1  # between looks at which threads there are


class Leftover:
    """The threads that started after this was made, but for daemons."""

    def __init__(self) -> None:
        self._before = {threading.current_thread()}
        others = self._running()
        self._before.update(others)
        self._pools_before = _pools() if others else []  # slow, and seldom needed

    def wait(self) -> None:
        """Until they ended; names those that take long, as they may never end."""
        # A pool's threads end with the process, which for the script is now; until
        # then they wait for more work. The compiler of torch keeps such a pool.
        for pool in _pools() if self._running() else ():
            if not any(pool is other for other in self._pools_before):
                pool.shutdown(wait=False)  # what it was given is still done
        began = time.monotonic()
        named: set[threading.Thread] = set()
        while threads := self._running():
            threads[0].join(_LOOK_S)
            if time.monotonic() - began < _PATIENCE_S:
                continue
            for thread in threads:
                if thread.is_alive() and thread not in named:
                    named.add(thread)
                    _say(thread.name)

    def _running(self) -> list[threading.Thread]:
        """Asked for again and again, since a thread may start others."""
        alive = [thread for thread in threading.enumerate() if not thread.daemon]
        return [thread for thread in alive if thread not in self._before]


def _pools() -> list[ThreadPoolExecutor]:
    """All there are; by type(), as the __class__ of a proxy may do anything."""
    objects = gc.get_objects()
    return [o for o in objects if issubclass(type(o), ThreadPoolExecutor)]


def _say(name: str) -> None:
    sys.stdout.flush()
    text = f"waiting for the script's thread {name}; Ctrl-C ends the wait"
    print(f"flash-attn-rocm: {text}", file=sys.stderr, flush=True)
