"""Profiles as plain data: what take_profile() returns and --profile writes.

One dictionary of version 1: device, constants (each with its source and grade)
and launches, in the order in which they ended. Here are the checks for profiles
that come from a file, and joining; tables, traces, plots and listings are made by
the other profile_ modules.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .files import FileError

VERSION = 1

Profile = dict[str, Any]
Launch = dict[str, Any]

# What every reader of a launch may rely on.
_LAUNCH = {
    "kernel": str,
    "grid": list,
    "block": list,
    "counters": dict,
    "derived": dict,
    "estimated": list,
    "bounds": list,
    "estimate": dict,
    "instructions": list,
    "timeline": list,
}
_NUMBERS = (int, float)
_BOUND = {"unit": str, "cycles": _NUMBERS, "seconds": _NUMBERS, "share": _NUMBERS}
_INSTRUCTION = dict.fromkeys(
    ("offset", "count", "lds_conflict_cycles", "stall_cycles"), int
)
# These may be missing; none but the offset, of a function before the kernel, is
# ever negative.
_INSTRUCTION_OPTIONAL = {"traced": int, "lanes": _NUMBERS}
_KERNEL = {"kernel": str, "launches": int, "seconds": dict, "error": _NUMBERS}
_RANGE = dict.fromkeys(("low", "middle", "high"), _NUMBERS)
_DEVICE = {
    "name": str,
    "cus": int,
    "clock_mhz": _NUMBERS,
    "peak_dot2_tflops": _NUMBERS,
    "hbm_gbs": _NUMBERS,
}


def is_empty(profile: Profile) -> bool:
    """True if nothing was simulated: no launch was kept, and none was dropped."""
    return not profile["launches"] and not profile.get("kernels")


def join(profiles: Iterable[Profile]) -> Profile:
    """One profile with the launches of all; device and constants of the last."""
    joined: Profile = {"version": VERSION, "launches": []}
    dropped = 0
    sums: dict[str, Any] = {}
    for profile in profiles:
        launches = joined["launches"] + profile["launches"]
        joined = {**profile, "launches": launches}
        dropped += profile.get("launches_dropped", 0)
        for row in profile.get("kernels", []):
            before = sums.get(row["kernel"])
            sums[row["kernel"]] = row if before is None else _add(before, row)
    if sums:
        joined.update(launches_dropped=dropped, kernels=list(sums.values()))
    return joined


def _add(a: Any, b: Any) -> Any:
    """Equal objects with their numbers added up, but for the larger "error"; other
    values are a's."""
    if isinstance(a, dict):
        return {
            key: max(value, b[key]) if key == "error" else _add(value, b[key])
            for key, value in a.items()
        }
    return a + b if isinstance(a, _NUMBERS) else a


def write_json(data: Any, path: Path) -> None:
    """Writes data as JSON; FileError names a path that cannot be written."""
    try:
        path.write_text(json.dumps(data) + "\n", encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error


def read_profile(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        FileError: no such file, or not a profile of this version; one line.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {error}") from error
    try:
        _check(data)
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    profile: Profile = data
    return profile


def _check(data: Any) -> None:
    if not isinstance(data, dict) or "launches" not in data:
        raise FileError("not a profile: expected an object with launches")
    if data.get("version") != VERSION:
        raise FileError(
            f"profile version: expected {VERSION}, got {data.get('version')!r}"
        )
    _fields("profile", {"kernels": [], **data}, {"launches": list, "kernels": list})
    if not is_empty(data):
        _fields("profile", data, {"device": dict})
        _fields("device", data["device"], _DEVICE)
    for row in data.get("kernels", []):
        _fields("kernels", row, _KERNEL)
        _fields("kernels: seconds", row["seconds"], {**_RANGE, "bound": _NUMBERS})
    for index, launch in enumerate(data["launches"]):
        where = f"launch {index}"
        _fields(where, launch, _LAUNCH)
        optional = {"flops": _NUMBERS, "code_hash": str}
        _fields(where, launch, {k: v for k, v in optional.items() if k in launch})
        for bound in launch["bounds"]:
            _fields(f"{where}: bound", bound, _BOUND)
        for instruction in launch["instructions"]:
            _instruction(f"{where}: instruction", instruction)
        for name in ("counters", "derived"):
            numbers = dict.fromkeys(launch[name], _NUMBERS)
            _fields(f"{where}: {name}", launch[name], numbers)
        estimate = launch["estimate"]
        _fields(f"{where}: estimate", estimate, {"seconds": dict, "error": _NUMBERS})
        _fields(f"{where}: estimate: seconds", estimate["seconds"], _RANGE)


def _instruction(where: str, data: Any) -> None:
    _fields(where, data, _INSTRUCTION)
    there = {k: v for k, v in _INSTRUCTION_OPTIONAL.items() if k in data}
    _fields(where, data, there)
    for key in {**_INSTRUCTION, **there}:
        if key != "offset" and not 0 <= data[key] < math.inf:  # nor not a number
            raise FileError(f"{where}: {key}: unexpected value {data[key]!r:.40}")


def _fields(where: str, data: Any, expected: dict[str, Any]) -> None:
    """Each expected key is there and has its type."""
    if not isinstance(data, dict):
        raise FileError(f"{where}: expected an object, got {data!r:.40}")
    for key, kind in expected.items():
        if key not in data:
            raise FileError(f"{where}: {key} is missing")
        value = data[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FileError(f"{where}: {key}: unexpected value {value!r:.40}")
