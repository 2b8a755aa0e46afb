"""The journal of a soak: JSON lines, from which it goes on and is reported.

The first line says what is run; then a line for each batch of calls, and before it
one for each call in it that was struck, bad, wrong or lost, and for what else
happened. What a killed process wrote after its last batch is cut off and run again.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ._errors import FlashAttnError

VERSION = 1
Line = dict[str, Any]


class Journal:
    """Open for writing; one process at a time."""

    def __init__(self, path: Path, header: Line, resume: bool) -> None:
        """Begin a journal, or with `resume` go on with it if it is there.

        Raises:
            FlashAttnError: it cannot be written, is there without `resume`, is in
                use, is damaged, or is of another run.
        """
        self.path = path
        self._end = 0  # of what was there and is kept, in bytes
        header = json.loads(json.dumps({"soak": VERSION, **header}))
        try:
            self._file: IO[str] = open(path, "a+", encoding="utf-8")
        except OSError as error:
            raise FlashAttnError(f"{path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin(header, resume)
        except BlockingIOError as error:
            self.close()
            raise FlashAttnError(f"{path}: in use by another soak") from error
        except (OSError, UnicodeDecodeError) as error:
            self.close()
            raise FlashAttnError(f"{path}: {error}") from error
        except BaseException:
            self.close()
            raise

    def _begin(self, header: Line, resume: bool) -> None:
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise FlashAttnError(f"{self.path}: expected a regular file")
        self._file.seek(0)
        if self._file.readline() == "":
            self.write(header)
            return
        if not resume:
            raise FlashAttnError(
                f"{self.path}: there is a journal already; go on with it by --resume, "
                "or name another file"
            )
        there = None
        for line, kept in _scan(self.path):
            there = line if there is None else there
            self._end = kept
        if there is None:  # killed in the middle of its first line, or not ours
            if not json.dumps(header).startswith(self.path.read_text("utf-8")):
                raise FlashAttnError(f"{self.path}: expected a journal of a soak")
            self._file.truncate(0)
            self.write(header)
            return
        for name, value in header.items():
            if there.get(name) != value:
                raise FlashAttnError(
                    f"{self.path}: a run with another {name}: "
                    f"expected {json.dumps(value)[:200]}, "
                    f"got {json.dumps(there.get(name))[:200]}"
                )
        self._file.truncate(self._end)

    def earlier(self) -> Iterator[Line]:
        """What was there when it was opened, without the header."""
        if self._end:
            with open(self.path, "rb") as file:
                file.readline()
                while file.tell() < self._end:
                    yield json.loads(file.readline())

    def write(self, line: Line) -> None:
        """One line, in the file when this returns.

        Raises:
            FlashAttnError: the disk is full, or gone.
        """
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise FlashAttnError(f"{self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        # What could not be written is tried again here, and has been told already.
        with suppress(OSError):
            self._file.close()


def _scan(path: Path) -> Iterator[tuple[Line, int]]:
    """Each whole line, and where what is kept of the file ends so far."""
    at = end = number = 0
    flaw = ""
    with open(path, "rb") as file:
        for row in file:
            if flaw:
                raise FlashAttnError(f"{path}: line {number}: {flaw}")
            number, at = number + 1, at + len(row)
            line, flaw = _parse(row)
            if flaw:  # the last one may be: it was killed while writing
                continue
            if number == 1 and line.get("soak") != VERSION:
                raise FlashAttnError(f"{path}: expected a journal of version {VERSION}")
            if number == 1 or "batch" in line or "end" in line:
                end = at
            yield line, end


def _parse(row: bytes) -> tuple[Line, str]:
    """A line, or what is wrong with it."""
    try:
        line = json.loads(row)
    except ValueError as error:
        return {}, str(error)
    if not isinstance(line, dict) or not row.endswith(b"\n"):
        return {}, "expected an object"
    return line, ""
