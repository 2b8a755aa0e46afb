"""Code objects, kernels and launches, over ctypes.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

from . import _native

Image = Union[bytes, str, "os.PathLike[str]"]


def _read_image(image: Image) -> bytes:
    return image if isinstance(image, bytes) else Path(image).read_bytes()


def object_info(image: Image) -> dict[str, Any]:
    """What is in a code object or offload bundle, of any AMDGPU architecture.

    Args:
        image: the file's bytes, or its path.

    Returns:
        target, arch, flags, abi (code object version) and kernels, a list of
        name, vgprs, sgprs, lds_bytes, private_bytes, spills, code_bytes,
        code_hash, kernarg_bytes, max_threads, wave_size and args.

    Raises:
        HipError: not a code object; the report says why.
    """
    data = _read_image(image)
    text = ctypes.c_void_p()
    library = _native.load()
    _native.check(library.hipsimObjectInfo(data, len(data), ctypes.byref(text)))
    facts: dict[str, Any] = json.loads(_native.take_text(text))
    return facts


def disassemble(image: Image, kernel: str | None = None, *, lines: bool = False) -> str:
    """The instructions of one gfx906 kernel, or of all, one per line.

    Args:
        image: the file's bytes, or its path.
        kernel: its name; default all.
        lines: add "; file.hip:12" where the source line changes, if the object
            was built with -g.
    """
    data = _read_image(image)
    text = ctypes.c_void_p()
    name = None if kernel is None else kernel.encode()
    library = _native.load()
    call = library.hipsimDisassembleLines if lines else library.hipsimDisassemble
    code = call(data, len(data), name, ctypes.byref(text))
    _native.check(code)
    return _native.take_text(text)


def take_profile() -> dict[str, Any]:
    """What launches under the option "profile" counted since the last call.

    Returns:
        the keys that hipsim.h lists at hipsimTakeProfile: device, constants,
        launches and others. Figures are simulated.
    """
    text = ctypes.c_void_p()
    _native.check(_native.load().hipsimTakeProfile(ctypes.byref(text)))
    taken: dict[str, Any] = json.loads(_native.take_text(text))
    return taken


class Buffer:
    """Memory that a kernel argument points to, used in place.

    Args:
        data: a writable object with the buffer protocol (bytearray, mmap,
            ctypes array). It is neither copied nor touched here.
        access: "r", "w" or "rw".
        offset: the first byte that the kernel may touch.
        size: how many bytes it may touch; default all from offset on.
    """

    def __init__(
        self, data: Any, access: str = "rw", *, offset: int = 0, size: int | None = None
    ) -> None:
        if not isinstance(access, str) or access not in _native.ACCESS:
            raise ValueError(f"access: expected r, w or rw, got {access!r}")
        view = memoryview(data)
        rest = view.nbytes - offset
        if offset < 0 or rest < 0 or (size is not None and not 0 <= size <= rest):
            raise ValueError(f"buffer: {offset=} {size=} in {view.nbytes} bytes")
        self.size = rest if size is None else size
        self.access = access
        # Keeps `data` alive and pinned; an empty view has no address.
        self._pin = ctypes.c_char.from_buffer(data) if view.nbytes else None
        self.address = 0
        if self._pin is not None:
            self.address = ctypes.addressof(self._pin) + offset

    def tensor(self) -> _native.Tensor:
        """The library's description of the bytes that may be touched."""
        sizes = (ctypes.c_int64 * _native.MAX_DIMS)(self.size)
        strides = (ctypes.c_int64 * _native.MAX_DIMS)(1)
        access = _native.ACCESS[self.access]
        return _native.Tensor(self.address, 1, 1, sizes, strides, access)


@dataclasses.dataclass(frozen=True)
class Struct:
    """A by-value argument, with addresses of buffers stored inside it."""

    data: bytes
    pointers: Sequence[tuple[int, Buffer]] = ()

    def pack(self) -> bytes:
        """The bytes to pass, pointers filled in."""
        packed = bytearray(self.data)
        for offset, buffer in self.pointers:
            if not 0 <= offset <= len(packed) - 8:
                raise ValueError(
                    f"pointer at byte {offset} of a struct of {len(packed)} bytes"
                )
            packed[offset : offset + 8] = buffer.address.to_bytes(8, "little")
        return bytes(packed)


Argument = Union[Buffer, Struct, bytes]


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a launch executed."""

    wave_instructions: int
    waves: int
    workgroups: int
    misaligned: int


def _dimensions(what: str, values: Sequence[int]) -> ctypes.Array[ctypes.c_uint32]:
    if len(values) != 3 or not all(0 <= n < 2**32 for n in values):
        raise ValueError(f"{what}: expected three numbers, got {tuple(values)}")
    return (ctypes.c_uint32 * 3)(*values)


class Kernel:
    """One kernel of a loaded module; made by Module.kernel().

    Attributes:
        facts: what the code object says of this kernel; see object_info().
    """

    def __init__(self, handle: ctypes.c_void_p, facts: dict[str, Any]) -> None:
        self._handle = handle
        self.facts = facts

    def pack(self, arguments: Sequence[Argument]) -> list[bytes]:
        """Each argument's bytes, checked against the kernel's own list.

        Raises:
            ValueError: count or size differs; the message names the argument.
        """
        expected = [
            arg for arg in self.facts["args"] if not arg["kind"].startswith("hidden_")
        ]
        name = self.facts["name"]
        if len(arguments) != len(expected):
            raise ValueError(
                f"{name}: expected {len(expected)} arguments, got {len(arguments)}"
            )
        packed = []
        for index, (value, arg) in enumerate(zip(arguments, expected)):
            if isinstance(value, Buffer):
                data = value.address.to_bytes(8, "little")
            else:
                data = value.pack() if isinstance(value, Struct) else bytes(value)
            if len(data) != arg["size"]:
                label = f" ({arg['name']})" if arg["name"] else ""
                raise ValueError(
                    f"{name}: argument {index}{label}: expected {arg['size']} "
                    f"bytes ({arg['kind']}), got {len(data)}"
                )
            packed.append(data)
        return packed

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Argument],
        *,
        lds: int = 0,
        buffers: Sequence[Buffer] = (),
    ) -> Stats:
        """Runs the kernel to its end.

        Args:
            grid: workgroups per dimension, three numbers.
            block: work-items per workgroup, three numbers.
            arguments: one value per explicit kernel argument.
            lds: dynamic LDS in bytes.
            buffers: memory that may be touched besides that of `arguments`.

        Returns:
            what was executed.

        Raises:
            HipError: refused, or the kernel faulted; the report says where.
            ValueError: arguments do not fit the kernel.
        """
        if not 0 <= lds < 2**32:  # ctypes would cut it off
            raise ValueError(f"lds: expected a number of bytes below 2**32, got {lds}")
        packed = [ctypes.create_string_buffer(p, len(p)) for p in self.pack(arguments)]
        params = (ctypes.c_void_p * max(1, len(packed)))(
            *[ctypes.addressof(p) for p in packed]
        )
        reachable = list(buffers)
        for value in arguments:
            if isinstance(value, Buffer):
                reachable.append(value)
            elif isinstance(value, Struct):
                reachable.extend(buffer for _, buffer in value.pointers)
        tensors = (_native.Tensor * max(1, len(reachable)))(
            *[buffer.tensor() for buffer in reachable]
        )
        stats = _native.NativeStats()
        code = _native.load().hipsimLaunch(
            self._handle,
            _dimensions("grid", grid),
            _dimensions("block", block),
            lds,
            params,
            tensors,
            len(reachable),
            ctypes.byref(stats),
        )
        _native.check(code)
        return Stats(
            stats.wave_instructions, stats.waves, stats.workgroups, stats.misaligned
        )


class Module:
    """A loaded gfx906 code object; a context manager that unloads it.

    Args:
        image: the file's bytes, or its path.

    Raises:
        HipError: not a code object that the simulated gfx906 can run.
    """

    def __init__(self, image: Image) -> None:
        data = _read_image(image)
        self._handle: ctypes.c_void_p | None = None
        handle = ctypes.c_void_p()
        library = _native.load()
        code = library.hipsimModuleLoad(ctypes.byref(handle), data, len(data))
        _native.check(code)
        self._handle = handle
        self._facts = {k["name"]: k for k in object_info(data)["kernels"]}

    def kernel(self, name: str) -> Kernel:
        """The kernel called name; HipError (hipErrorNotFound) if absent."""
        handle = ctypes.c_void_p()
        code = _native.load().hipModuleGetFunction(
            ctypes.byref(handle), self._handle, name.encode()
        )
        _native.check(code)
        return Kernel(handle, self._facts[name])

    def close(self) -> None:
        """Unloads the module; its kernels must not be launched again."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            _native.check(_native.load().hipModuleUnload(handle))

    def __enter__(self) -> Module:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
