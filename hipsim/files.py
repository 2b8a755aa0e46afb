"""Buffers of ``hipsim run``: files in, the same files out.

A ``.npy`` file is split into its header, which is kept byte for byte, and its
data; any other file is all data. The data lies in memory of its own, page
aligned, so that a kernel sees the alignment a device allocation would have, and
between two gaps, so that what reaches past its end does not reach another buffer.
Source: the NPY format, NumPy Enhancement Proposal 1.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import ast
import math
import mmap
import os
import re
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 1 << 16
GAP = 1 << 16  # bytes on each side of the data that no kernel may touch
_TYPE = re.compile(r"[<=|]?([biufcSUV])(\d+)")


class FileError(ValueError):
    """A file that cannot be used; the message is one line."""


def _read_npy_header(file: BinaryIO, name: str) -> tuple[bytes, int]:
    """The header's bytes, and how many bytes of data must follow."""
    start = file.read(8)
    if len(start) < 8 or start[:6] != _MAGIC or start[6] not in (1, 2, 3):
        raise FileError(f"{name}: not an .npy file of version 1 to 3")
    length_bytes = file.read(2 if start[6] == 1 else 4)
    length = int.from_bytes(length_bytes, "little")
    text = file.read(min(length, _MAX_HEADER))
    if length > _MAX_HEADER or len(text) != length:
        raise FileError(f"{name}: .npy header truncated or over {_MAX_HEADER} bytes")
    try:
        facts = ast.literal_eval(text.decode("utf-8" if start[6] == 3 else "latin1"))
        descr, shape = facts["descr"], facts["shape"]
        fortran = facts["fortran_order"]
        good = all(isinstance(n, int) and n >= 0 for n in shape)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        good = False
    if not good:
        raise FileError(f"{name}: .npy header is malformed")
    match = _TYPE.fullmatch(descr) if isinstance(descr, str) else None
    if match is None:
        raise FileError(
            f"{name}: dtype {descr!r}, expected plain numbers (no objects, no "
            "records, little-endian)"
        )
    if fortran:
        raise FileError(f"{name}: Fortran order, expected C order")
    item = int(match[2]) * (4 if match[1] == "U" else 1)
    return start + length_bytes + text, math.prod(shape) * item


class FileBuffer:
    """One file's header and data.

    Attributes:
        path: where it was read from.
        header: bytes in front of the data, b"" if the file is not .npy.
        memory: gap, data, gap.
        size: bytes of data, which begin at byte GAP of memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = b""
        try:
            if not path.is_file():  # opening a pipe would wait for a writer
                path.stat()  # raises if absent
                raise FileError(f"{path}: not a regular file")
            with path.open("rb") as file:
                total = os.fstat(file.fileno()).st_size
                self.size = total
                if path.suffix == ".npy":
                    self.header, self.size = _read_npy_header(file, path.name)
                if len(self.header) + self.size != total:
                    raise FileError(
                        f"{path.name}: {total} bytes, expected "
                        f"{len(self.header) + self.size} from its header"
                    )
                self.memory = mmap.mmap(-1, self.size + 2 * GAP)
                with memoryview(self.memory) as whole, self._data(whole) as part:
                    if file.readinto(part) != self.size:
                        raise FileError(f"{path.name}: truncated while reading")
        except OSError as error:
            raise FileError(f"{path}: {error.strerror or error}") from error

    def _data(self, whole: memoryview) -> memoryview:
        return whole[GAP : GAP + self.size]

    def write(self, directory: Path) -> Path:
        """Writes header and data to the file's name in directory."""
        target = directory / self.path.name
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                file.write(self.header)
                with memoryview(self.memory) as whole, self._data(whole) as part:
                    file.write(part)
        except OSError as error:
            raise FileError(f"{target}: {error.strerror or error}") from error
        return target
