"""The ``flash-attn-rocm`` command; one module per subcommand.

A subcommand's module has the function ``add(commands)``, which adds its parser
with ``set_defaults(run=...)``; run takes the parsed options and returns the exit
code: 0 ok, 1 found something, 2 usage or file (one line on stderr); those of profile
and run are the script's and the command's.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Callable, NoReturn

from .._errors import FlashAttnError
from .._version import __version__
from . import breaker, doctor, profile, run, soak

NAME = "flash-attn-rocm"
_MODULES = (profile, doctor, run, breaker, soak)


class _Parser(argparse.ArgumentParser):
    """argparse, with errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=NAME, description="Exact attention for AMD GPUs under PyTorch: tools."
    )
    parser.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in _MODULES:
        module.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except FlashAttnError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as of `| head`; nothing more can be said there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
