"""The argument list of ``hipsim run``: JSON -> kernel arguments.

A list in the order of the kernel's arguments, each an object:

    {"buffer": "a.npy", "access": "r"}     pointer to the file's data
    {"i32": 5} {"i64": 5} {"f32": 0.5}     a number
    {"bytes": "00ff"}                      a value, in hexadecimal
    {"struct": "00..", "pointers": [{"offset": 0, "buffer": "a.npy",
                                     "access": "rw"}]}

Paths are relative to the JSON file. A file named twice is one buffer.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from .files import GAP, FileBuffer, FileError
from .module import Argument, Buffer, Struct

_NUMBERS = {"i32": "<I", "i64": "<Q", "f32": "<f"}
_ADDRESS = re.compile(r"\baddress (0x[0-9a-f]+)")


class ArgumentList:
    """The arguments and the files behind them.

    Attributes:
        values: one per kernel argument.
        written: the files that the kernel may write, in order of appearance.
    """

    def __init__(self, path: Path | None) -> None:
        self.values: list[Argument] = []
        self.written: list[FileBuffer] = []
        self._files: dict[Path, FileBuffer] = {}
        self._uses: list[tuple[FileBuffer, Buffer, str]] = []  # and where it is named
        if path is None:
            return
        self._folder = path.parent
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise FileError(f"{path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path}: not JSON: {error}") from error
        if not isinstance(entries, list):
            raise FileError(f"{path}: expected a list of arguments")
        for index, entry in enumerate(entries):
            try:
                self.values.append(self._parse(entry, f"argument {index}"))
            except FileError:
                raise
            except ValueError as error:
                raise FileError(f"argument {index}: {error}") from error

    def locate(self, report: str) -> str:
        """The report with places in files instead of host addresses."""
        return _ADDRESS.sub(lambda m: f"address {self._place(m[1])}", report)

    def _place(self, address: str) -> str:
        """ "x.npy + 0x10 (argument 0)", or the address if no buffer is near."""
        at = int(address, 16)
        near = [
            (max(buffer.address - at, at - buffer.address - buffer.size, 0), file)
            for file, buffer, _ in self._uses
        ]
        distance, file = min(near, key=lambda n: n[0], default=(GAP, None))
        if file is None or distance >= GAP:
            return f"{address} (near no buffer)"
        uses = [(buffer, name) for f, buffer, name in self._uses if f is file]
        offset = at - uses[0][0].address
        names = ", ".join(name for _, name in uses)
        sign = "+" if offset >= 0 else "-"
        return f"{file.path.name} {sign} {abs(offset):#x} ({names})"

    def _parse(self, entry: Any, name: str) -> Argument:
        if not isinstance(entry, dict):
            raise ValueError(f"expected an object, got {entry!r}")
        keys = set(entry)
        if keys == {"buffer", "access"}:
            return self._buffer(entry, name)
        if keys == {"bytes"}:
            return _hexadecimal(*entry.items())
        if "struct" in keys and keys <= {"struct", "pointers"}:
            return self._struct(entry, name)
        if len(keys) == 1 and keys <= set(_NUMBERS):
            return _pack_number(*entry.items())
        raise ValueError(
            "expected buffer and access, i32, i64, f32, bytes, or struct and "
            f"pointers, got {', '.join(sorted(keys)) or 'nothing'}"
        )

    def _struct(self, entry: dict[str, Any], name: str) -> Struct:
        data = _hexadecimal(("struct", entry["struct"]))
        listed = entry.get("pointers", [])
        if not isinstance(listed, list):
            raise ValueError(f"pointers: expected a list, got {listed!r}")
        pointers = []
        for pointer in listed:
            if not isinstance(pointer, dict) or set(pointer) != {
                "offset",
                "buffer",
                "access",
            }:
                raise ValueError(f"expected offset, buffer, access, got {pointer!r}")
            offset = pointer["offset"]
            if type(offset) is not int:
                raise ValueError(f"offset: expected a number of bytes, got {offset!r}")
            if not 0 <= offset <= len(data) - 8:
                raise ValueError(
                    f"pointer at byte {offset} of a struct of {len(data)} bytes"
                )
            place = f"{name}, pointer at byte {offset}"
            pointers.append((offset, self._buffer(pointer, place)))
        return Struct(data, pointers)

    def _buffer(self, entry: dict[str, Any], name: str) -> Buffer:
        given = entry["buffer"]
        if not isinstance(given, str) or "\0" in given:
            raise ValueError(f"buffer: expected a file name, got {given!r}")
        path = self._folder / given
        target = path.resolve()  # a link keeps its name, but not its own buffer
        if target not in self._files:
            self._files[target] = FileBuffer(path)
        file = self._files[target]
        buffer = Buffer(file.memory, entry["access"], offset=GAP, size=file.size)
        self._uses.append((file, buffer, name))
        if "w" in buffer.access and file not in self.written:
            for other in self.written:
                if other.path.name == file.path.name:
                    raise FileError(
                        f"{file.path.name}: two written buffers of this name, which "
                        "would be one file in the output folder"
                    )
            self.written.append(file)
        return buffer


def _hexadecimal(item: tuple[str, Any]) -> bytes:
    key, value = item
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{key}: expected bytes in hexadecimal, got {value!r:.80}"
        ) from None


def _pack_number(item: tuple[str, Any]) -> bytes:
    kind, value = item
    if kind == "f32":
        if type(value) not in (int, float):
            raise ValueError(f"f32: expected a number, got {value!r}")
        try:
            return struct.pack("<f", value)
        except (OverflowError, struct.error):
            text = f"{value!s:.40}"
            raise ValueError(f"f32: expected a number of 32 bits, got {text}") from None
    bits = int(kind[1:])
    if type(value) is not int or not -(2 ** (bits - 1)) <= value < 2**bits:
        raise ValueError(f"{kind}: expected an integer of {bits} bits, got {value!r}")
    return struct.pack(_NUMBERS[kind], value % 2**bits)
