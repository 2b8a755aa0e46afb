"""ctypes view of libhipsim.so: prototypes, errors, options.

Leaves kernels and buffers to ``module.py``. Nothing is loaded on import.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import ctypes
import functools
import operator
from pathlib import Path
from typing import ClassVar

MAX_DIMS = 6
ACCESS = {"r": 1, "w": 2, "rw": 3}


class Tensor(ctypes.Structure):
    """``hipsim_tensor`` of hipsim.h."""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("element_bytes", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("size", ctypes.c_int64 * MAX_DIMS),
        ("stride", ctypes.c_int64 * MAX_DIMS),
        ("access", ctypes.c_uint32),
    ]


class NativeStats(ctypes.Structure):
    """``hipsim_stats`` of hipsim.h."""

    _fields_: ClassVar = [
        ("wave_instructions", ctypes.c_uint64),
        ("waves", ctypes.c_uint64),
        ("workgroups", ctypes.c_uint64),
        ("misaligned", ctypes.c_uint64),
    ]


class HipError(RuntimeError):
    """A failed call.

    Attributes:
        code: the ``hipError_t`` number, for example 700.
        name: its name, for example ``"hipErrorIllegalAddress"``.
        report: one line that says what was wrong.
    """

    def __init__(self, code: int, name: str, report: str) -> None:
        super().__init__(f"{name}: {report}")
        self.code = code
        self.name = name
        self.report = report


def library_path() -> Path:
    """The path of libhipsim.so, beside this package (it may not be built)."""
    return Path(__file__).resolve().parent / "libhipsim.so"


_ERROR_CALLS = {
    "hipModuleUnload": [ctypes.c_void_p],
    "hipModuleGetFunction": [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_void_p,
        ctypes.c_char_p,
    ],
    "hipsimModuleLoad": [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_char_p,
        ctypes.c_size_t,
    ],
    "hipsimLaunch": [
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.c_uint32,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(Tensor),
        ctypes.c_size_t,
        ctypes.POINTER(NativeStats),
    ],
    "hipsimSetOption": [ctypes.c_char_p, ctypes.c_int64],
    "hipsimGetOption": [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64)],
    "hipsimSetFault": [ctypes.c_char_p],
    "hipsimFaultsFired": [ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64)],
    "hipsimTakeProfile": [ctypes.POINTER(ctypes.c_void_p)],
    "hipsimObjectInfo": [
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    ],
    "hipsimDisassemble": [
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
    ],
    "hipsimDisassembleLines": [
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
    ],
}


@functools.cache
def load() -> ctypes.CDLL:
    """Opens the library (once) and declares its functions.

    Raises:
        OSError: the library is not built; the message names its path.
    """
    library = ctypes.CDLL(str(library_path()))
    for name, arguments in _ERROR_CALLS.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
    library.hipsimLastReport.argtypes = []
    library.hipsimLastReport.restype = ctypes.c_char_p
    library.hipGetErrorName.argtypes = [ctypes.c_int]
    library.hipGetErrorName.restype = ctypes.c_char_p
    library.hipsimFree.argtypes = [ctypes.c_void_p]
    library.hipsimFree.restype = None
    return library


def check(code: int) -> None:
    """Raises HipError with the calling thread's report if code is not 0."""
    if code != 0:
        library = load()
        report = library.hipsimLastReport().decode(errors="replace")
        raise HipError(code, library.hipGetErrorName(code).decode(), report)


def take_text(text: ctypes.c_void_p) -> str:
    """Copies and releases a string that the library allocated."""
    try:
        return ctypes.string_at(text).decode(errors="replace")
    finally:
        load().hipsimFree(text)


def set_option(name: str, value: int) -> None:
    """Sets an option of hipsim.h ("check", "threads", ...) for the whole process.

    Raises:
        HipError: no such option, or not a value that it takes.
    """
    value = operator.index(value)
    if not -(2**63) <= value < 2**63:  # ctypes would cut it off
        report = f"option {name}: expected a number of 64 bits, got {value}"
        raise HipError(1, "hipErrorInvalidValue", report)
    check(load().hipsimSetOption(name.encode(), value))


def get_option(name: str) -> int:
    """The current value of an option."""
    value = ctypes.c_int64()
    check(load().hipsimGetOption(name.encode(), ctypes.byref(value)))
    return value.value


FAULT_KINDS = ("launch", "slow", "endless", "memory", "lds-flip", "alloc")


def set_fault(spec: str | None) -> None:
    """Makes launches or allocations fail; hipsim.h describes the list.

    Args:
        spec: for example "launch:nth=3;alloc:nth=1"; None or "" clears it.

    Raises:
        HipError: malformed; the report says what was expected.
    """
    check(load().hipsimSetFault(None if spec is None else spec.encode()))


def faults_fired() -> dict[str, int]:
    """How often each kind of fault has happened since set_fault()."""
    counts = {}
    for kind in FAULT_KINDS:
        count = ctypes.c_uint64()
        check(load().hipsimFaultsFired(kind.encode(), ctypes.byref(count)))
        counts[kind] = count.value
    return counts
