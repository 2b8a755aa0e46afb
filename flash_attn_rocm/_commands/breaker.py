"""``flash-attn-rocm breaker list|reset``: kernels that were taken out of use.

The cache folder has them for real devices, its subfolder "sim" for the simulator. The
files are the extension's to read and write; this prints.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import datetime, timezone
from typing import Any, NamedTuple

from .. import _arguments, _ops, _selftest_store
from .._config import config
from .._errors import FlashAttnError

HELP = "kernels that were taken out of use after a failure"
DESCRIPTION = "Lists or closes the circuit breakers that are kept on disk."


class Entry(NamedTuple):
    """A breaker that is not closed, as the extension lists it."""

    device: str  # one line: device, driver and runtime version
    kernel: str
    code_hash: int  # of the code object that it is in
    failures: int  # in a row
    opened: int  # unix seconds
    retry: int  # and when it may be tried again
    cause: str

    @property
    def state(self) -> str:
        """As status() calls it."""
        return "open" if time.time() < self.retry else "half_open"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's options."""
    actions = parser.add_subparsers(dest="action", metavar="list|reset", required=True)
    lists = actions.add_parser("list", help="what is open; exit code 1 if something is")
    lists.add_argument("--json", action="store_true", help="as JSON")
    lists.set_defaults(run=_list)
    resets = actions.add_parser(
        "reset", help="close them, repair damaged files, forget self-tests"
    )
    resets.add_argument("kernel", nargs="?", metavar="KERNEL", help="only this one")
    resets.set_defaults(run=_reset)
    for action in (lists, resets):
        action.add_argument(
            "--dir", default=config.cache_dir, help="the cache folder (%(default)s)"
        )


def _folders(folder: str) -> list[str]:
    if not folder:
        raise FlashAttnError("--dir: expected a folder, got none")
    return [folder, os.path.join(folder, "sim")]


def _extension() -> Any:
    if _ops.ext is None:
        raise FlashAttnError(_ops.unavailable or "the extension is missing")
    return _ops.ext


def _refused(folder: str, error: Exception) -> FlashAttnError:
    """With the folder, where the error names a file in it alone."""
    text = str(error)
    return FlashAttnError(text if folder in text else f"{folder}: {text}")


def entries(folder: str) -> tuple[list[tuple[str, Entry]], int]:
    """The breakers that are not closed, each with its folder; and how many files
    cannot be read.

    Raises:
        FlashAttnError: a file or folder is not to be trusted.
    """
    extension, found, unreadable = _extension(), [], 0
    for each in _folders(folder):
        try:
            rows, bad = extension.store_list(each)
        except (extension.Error, OSError) as error:
            raise _refused(each, error) from error
        found += [(each, Entry(*row)) for row in rows]
        unreadable += bad
    return found, unreadable


def _when(seconds: int) -> str:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def _list(options: argparse.Namespace) -> int:
    found, unreadable = entries(options.dir)
    if options.json:
        rows = [
            {"folder": folder, "state": entry.state, **entry._asdict()}
            for folder, entry in found
        ]
        answer = {"breakers": rows, "unreadable_files": unreadable}
        print(json.dumps(answer, indent=1))
    elif not found and not unreadable:
        print(f"{options.dir}: no breaker is open")
    for _, entry in [] if options.json else found:
        times = "time" if entry.failures == 1 else "times in a row"
        print(
            f"{entry.kernel}: {entry.state} on {entry.device}, failed {entry.failures} "
            f"{times}, last {_when(entry.opened)}, tried again from "
            f"{_when(entry.retry)} on: {entry.cause}"
        )
    if unreadable:
        text = f"{options.dir}: {unreadable} damaged files; `breaker reset` repairs"
        print(f"flash-attn-rocm breaker: {text}", file=sys.stderr)
        return 2
    return 1 if found else 0


def _reset(options: argparse.Namespace) -> int:
    extension, removed = _extension(), 0
    kernel = options.kernel
    if kernel is not None:
        _arguments.symbol("KERNEL", kernel)
    refused: list[FlashAttnError] = []
    for folder in _folders(options.dir):
        try:
            removed += extension.store_reset(folder, kernel)
            if kernel is None:
                _selftest_store.forget(folder)
        except (extension.Error, OSError) as error:
            refused.append(_refused(folder, error))
    if refused:  # the others are done
        raise refused[0]
    print(f"{options.dir}: closed {removed}")
    return 0
