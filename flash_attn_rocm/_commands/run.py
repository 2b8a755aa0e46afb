"""``flash-attn-rocm run -- cmd``: a command that is started again after a device fault.

A fault, a hang that the guard ends, and a crash in a kernel's launch all end a process
by SIGABRT, SIGSEGV or SIGBUS; nothing else is started again. The last restart runs
without our kernels, so that the service goes on whatever they do.

The command gets a process group and, where there is one, the terminal, as from a
shell: Ctrl-C and Ctrl-Z reach it without us. Signals that are sent to us are passed on.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import signal
import sys
import time
from typing import Any

RESTARTED = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
# By which somebody wants it to end; after one of them nothing is started again.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_LONGEST_PAUSE_S = 60.0
_GRACE_S = 5.0  # of what a dead command left running
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as in a shell

HELP = "start a command again after a device fault"
DESCRIPTION = "Runs a command and starts it again when a device fault ends it."
EPILOG = """\
The exit code is the command's, or 128 + the signal that ended it. Put this directly
before the program: a shell, or a launcher of several ranks, hides how its child died.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's options."""
    parser.add_argument(
        "--restarts",
        type=_count,
        default=3,
        metavar="N",
        help="at most; the last one with FLASH_ATTN_ROCM_DEVICE=off (%(default)s)",
    )
    parser.add_argument(
        "--backoff",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="pause before the first, which doubles up to 60 s (%(default)s)",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- cmd ...")
    parser.set_defaults(run=_run, usage_error=parser.error)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        number = float(text)
        if 0 <= number < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"expected 0 seconds or more, got {text!r}")


def _say(text: str) -> None:
    # Whoever read stderr may be gone; the command is to be kept up all the same.
    with contextlib.suppress(OSError, ValueError):
        print(f"flash-attn-rocm run: {text}", file=sys.stderr, flush=True)


def _run(options: argparse.Namespace) -> int:
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        options.usage_error("expected a command after --")
    with _Signals() as signals:
        return _supervise(words, options.restarts, options.backoff, signals)


def _supervise(
    words: list[str], restarts: int, backoff_s: float, signals: _Signals
) -> int:
    environ = dict(os.environ)
    for count in range(restarts + 1):
        environ["FLASH_ATTN_ROCM_RESTARTS"] = str(count)
        start = time.monotonic()
        try:
            child = _Child(words, environ)
        except (OSError, ValueError) as error:  # ValueError: an empty word
            missing = isinstance(error, (FileNotFoundError, ValueError))
            why = "not found" if missing else getattr(error, "strerror", error)
            _say(f"{words[0]}: {why}")
            return _NOT_FOUND if missing else _NOT_EXECUTABLE
        code = child.wait(signals)
        if -code not in RESTARTED or signals.ending or count == restarts:
            break
        child.end_what_is_left()
        pause_s = min(backoff_s * 2.0 ** min(count, 30), _LONGEST_PAUSE_S)
        how = ""
        if count + 1 == restarts:
            environ["FLASH_ATTN_ROCM_DEVICE"] = "off"
            how = ", without fused kernels (FLASH_ATTN_ROCM_DEVICE=off)"
        _say(
            f"{words[0]} died of {signal.Signals(-code).name} after "
            f"{time.monotonic() - start:.1f} s; restart {count + 1} of {restarts} in "
            f"{pause_s:g} s{how}"
        )
        signals.wait(pause_s)
        if signals.ending:
            return 128 + signals.ending
    return code if code >= 0 else 128 - code


class _Signals:
    """Signals that came to this process, while the block runs.

    Those that were ignored before (nohup) stay ignored, here and in the command.
    """

    def __init__(self) -> None:
        self.ending = 0  # the first that asks for the end
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        self._out, into = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(into, False)
        self._into = into
        self._wakeup = signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        for number in (*_PASSED_ON, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._out)
        os.close(self._into)

    def wait(self, seconds: float | None) -> list[int]:
        """Those that came, to be passed on; waits for one that matters."""
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if until is None else max(until - time.monotonic(), 0.0)
            if not select.select([self._out], [], [], left)[0]:
                return []
            came = list(os.read(self._out, 4096))
            self.ending = self.ending or next((n for n in came if n in _ENDING), 0)
            if until is None or self.ending:
                return [number for number in came if number in _PASSED_ON]


class _Child:
    """The command, in a process group of its own that has the terminal."""

    def __init__(self, words: list[str], environ: dict[str, str]) -> None:
        # What Python ignores and a program expects to end it.
        defaults = [signal.SIGPIPE, signal.SIGXFSZ]
        self._pid = os.posix_spawnp(
            words[0], words, environ, setpgroup=0, setsigdef=defaults
        )
        self._terminal = _open_terminal()
        self._go_on()

    def _go_on(self) -> None:
        """Gives it the terminal, if that is ours."""
        if self._terminal is None:
            return
        if _has_terminal(self._terminal, os.getpgrp()):
            _give_terminal(self._terminal, self._pid)
        self._send(signal.SIGCONT)  # it may have been stopped for reading too early

    def _take_terminal(self) -> None:
        if self._terminal is not None and _has_terminal(self._terminal, self._pid):
            _give_terminal(self._terminal, os.getpgrp())

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def wait(self, signals: _Signals) -> int:
        """Passes signals on until it ends; its exit code, negative for a signal."""
        try:
            while True:
                pid, status = os.waitpid(self._pid, os.WNOHANG | os.WUNTRACED)
                if pid == 0:
                    for number in signals.wait(None):
                        self._send(number)
                elif os.WIFSTOPPED(status):
                    self._stopped(os.WSTOPSIG(status))
                elif os.WIFSIGNALED(status):
                    return -os.WTERMSIG(status)
                else:
                    return os.WEXITSTATUS(status)
        finally:
            self._take_terminal()
            if self._terminal is not None:
                os.close(self._terminal)

    def _stopped(self, number: int) -> None:
        """Stops with it, as a job of the shell, and goes on with it."""
        if self._terminal is None:
            return
        wants_terminal = number in (signal.SIGTTIN, signal.SIGTTOU)
        if not (wants_terminal and _has_terminal(self._terminal, os.getpgrp())):
            self._take_terminal()
            os.kill(0, signal.SIGSTOP)
        self._go_on()

    def end_what_is_left(self) -> None:
        """Ends other processes of its group: they may hold the device's memory."""
        until = time.monotonic() + _GRACE_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGTERM)
            while time.monotonic() < until:
                time.sleep(0.05)
                with contextlib.suppress(ChildProcessError):  # ours if we are init
                    os.waitpid(-self._pid, os.WNOHANG)
                os.killpg(self._pid, 0)
            os.killpg(self._pid, signal.SIGKILL)


def _open_terminal() -> int | None:
    with contextlib.suppress(OSError):
        return os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    return None


def _has_terminal(terminal: int, group: int) -> bool:
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(terminal) == group
    return False


def _give_terminal(terminal: int, group: int) -> None:
    # A process of the background that changes this is stopped otherwise.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    with contextlib.suppress(OSError):
        os.tcsetpgrp(terminal, group)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
