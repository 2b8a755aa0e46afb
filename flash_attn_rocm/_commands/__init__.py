"""The ``flash-attn-rocm`` command; one module per subcommand, and files.py for them.

A subcommand's module has HELP, DESCRIPTION, perhaps EPILOG, and the function
``add(parser)``, which adds its options with ``set_defaults(run=...)``; run takes the
parsed options and returns the exit code: 0 ok, 1 found something, 2 usage or file (one
line on stderr); those of profile and run are the script's and the command's.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, Callable, NoReturn

from .._errors import FlashAttnError
from .._version import __version__
from . import breaker, doctor, profile, run, soak

NAME = "flash-attn-rocm"
_MODULES = (profile, doctor, run, breaker, soak)
_OF_WRITING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EPIPE, errno.EIO, errno.EBADF),
)


class _Parser(argparse.ArgumentParser):
    """argparse, with errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own forgets what could not be written.
        (file or sys.stderr).write(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=NAME, description="Exact attention for AMD GPUs under PyTorch: tools."
    )
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in _MODULES:
        added = commands.add_parser(
            module.__name__.rpartition(".")[2],
            help=module.HELP,
            description=module.DESCRIPTION,
            epilog=getattr(module, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add(added)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        code = _command(arguments)
    except (SystemExit, OSError, ValueError) as error:
        if _is_lost(error):
            return 2
        raise
    return 2 if _is_lost(None) else code


def _command(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        # Python has none where its descriptor is closed, and prints to nowhere.
        if sys.stdout is None and options.command != "run":
            raise FlashAttnError("stdout: expected one to print to, it is closed")
        return command(options)
    except FlashAttnError as error:
        _say(str(error))
        return 2


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # then the exit code has to do
        print(f"{NAME}: {text}", file=sys.stderr or io.StringIO())


def _is_lost(error: BaseException | None) -> bool:
    """Whether what was printed cannot be written; says why in one line.

    Of a closed pipe nothing is said, as of `| head`: who closed it has seen enough.

    Args:
        error: what ended the command, perhaps a print.
    """
    failure: BaseException | None = None
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as at_last:  # ValueError: a script closed it
        failure = at_last
    if failure is None and _is_of_print(error):  # unbuffered, nothing is left to flush
        failure = error
    if failure is None:
        return False
    if not isinstance(failure, BrokenPipeError):
        _say(f"stdout: {getattr(failure, 'strerror', None) or failure}")
    # Python flushes it again at its own end, and would say so.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _is_of_print(error: BaseException | None) -> bool:
    if isinstance(error, OSError):
        return error.filename is None and error.errno in _OF_WRITING
    return isinstance(error, UnicodeEncodeError)
