"""What a card says of itself while it soaks: heat, clocks, errors.

Read from sysfs of the amdgpu driver (hwmon, pp_dpm_*, AER and RAS counters), or where
that has nothing, from amd-smi or rocm-smi; and the kernel's log where it may be read.
Nothing is set: too hot means that the soak pauses.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

_AMD = "0x1002"
_COOLER = 5.0  # degrees below the limit before it goes on
_LONGEST_PAUSE_S = 60.0
_TOOLS = (
    ("amd-smi", "metric", "--json"),
    ("rocm-smi", "--showtemp", "--showclocks", "--json"),
)
_TOOL_S = 20.0
_CURRENT_CLOCK = re.compile(r"(\d+)\s*mhz\s*\*", re.IGNORECASE)
_KERNEL_ERROR = re.compile(
    rb"amdgpu.*(ring \S+ timeout|gpu reset|page fault|gpu fault|hang|fatal|ras)",
    re.IGNORECASE,
)

Sample = dict[str, Any]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # a sensor that sleeps gives EAGAIN or EINVAL
        return ""


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class Sysfs:
    """Cards of the amdgpu driver under a sysfs folder."""

    def __init__(self, root: Path) -> None:
        found = sorted((root / "class" / "drm").glob("card*/device"))
        self.cards = [
            folder
            for folder in found
            if re.fullmatch(r"card\d+", folder.parent.name)
            and _text(folder / "vendor") == _AMD
        ]

    def sample(self) -> Sample:
        """Of all cards, the hottest sensor and the sum of each error counter."""
        temperatures: dict[str, float] = {}
        clocks: dict[str, float] = {}
        errors: dict[str, int] = {}
        for card in self.cards:
            for name, value in self._temperatures(card):
                temperatures[name] = max(value, temperatures.get(name, value))
            for name in ("sclk", "mclk"):
                current = _CURRENT_CLOCK.search(_text(card / f"pp_dpm_{name}"))
                if current is not None:
                    mhz = float(current.group(1))
                    clocks[name] = min(mhz, clocks.get(name, mhz))
            for name, count in self._errors(card):
                errors[name] = errors.get(name, 0) + count
        return {"temperature": temperatures, "mhz": clocks, "errors": errors}

    @staticmethod
    def _temperatures(card: Path) -> Iterator[tuple[str, float]]:
        for path in sorted(card.glob("hwmon/hwmon*/temp*_input")):
            value = _number(_text(path))
            if value is not None:
                label = _text(path.with_name(path.name.replace("_input", "_label")))
                yield label or path.name[: -len("_input")], value / 1000.0

    @staticmethod
    def _errors(card: Path) -> Iterator[tuple[str, int]]:
        for kind in ("fatal", "nonfatal", "correctable"):
            total = re.search(r"TOTAL_ERR_\w+ (\d+)", _text(card / f"aer_dev_{kind}"))
            if total is not None:
                yield f"aer_{kind}", int(total.group(1))
        for path in sorted(card.glob("ras/*_err_count")):
            block = path.name[: -len("_err_count")]
            for name, count in re.findall(r"(ue|ce): (\d+)", _text(path)):
                yield f"ras_{block}_{name}", int(count)


class Tool:
    """amd-smi or rocm-smi, whichever is there; its JSON differs by release."""

    def __init__(self) -> None:
        found = [words for words in _TOOLS if shutil.which(words[0])]
        self.words = found[0] if found else None

    def sample(self) -> Sample:
        said = _json_of(self.words) if self.words is not None else None
        sample: Sample = {"temperature": {}, "mhz": {}, "errors": {}}
        for path, value in _leaves(said, ""):
            name = path.lower()
            number = re.search(r"-?\d+(\.\d+)?", str(value))
            if number is None or "limit" in name or "max" in name:
                continue
            if "temp" in name and "unit" not in name:
                sample["temperature"][path] = float(number.group())
            elif re.search(r"[sm]clk clock speed|(gfx|mem)_\d+\.clk\.value", name):
                sample["mhz"][path] = float(number.group())
            elif re.search(r"ecc.*uncorrectable", name):
                sample["errors"][path] = int(float(number.group()))
        return sample


def _json_of(words: tuple[str, ...]) -> Any:
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=_TOOL_S, check=False, text=True
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _leaves(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What lies in nested JSON, with the keys that lead there."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from _leaves(value, f"{path}.{number}" if path else str(number))
    elif data is not None and not isinstance(data, bool):
        yield path, data


class KernelLog:
    """Lines of the kernel's log from now on that tell of a GPU in trouble."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:  # only root may read it in most places
            self.close()

    def new(self) -> list[str]:
        lines = []
        while self._file is not None:
            try:
                row = os.read(self._file, 8192)  # one record of the log
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were lost, the next can be read
                continue
            except OSError:  # no log after all
                self.close()
                break
            if not row:
                break
            lines += [
                line.decode(errors="replace")[:300]
                for line in row.splitlines()
                if _KERNEL_ERROR.search(line)
            ]
        return lines

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None


class Telemetry:
    """Asked every so often; says when to pause."""

    def __init__(
        self,
        root: Path,
        limit: float,
        every_s: float,
        *,
        log: KernelLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        sysfs = Sysfs(root)
        self._source: Sysfs | Tool = sysfs if sysfs.cards else Tool()
        self._log = log if log is not None else KernelLog()
        self._limit, self._every_s = limit, every_s
        self._clock, self._sleep = clock, sleep
        self._due = clock()
        self._first: dict[str, int] | None = None

    def look(self, end: float) -> list[Sample]:
        """Lines for the journal: a sample if it is due, and the pauses it took.

        Args:
            end: of the clock, when a pause has to be over.
        """
        if self._clock() < self._due:
            return []
        sample = self._sample()
        lines, pause = [sample], 1.0
        hottest = sample["hottest"]
        if hottest is not None and hottest >= self._limit:
            began = self._clock()
            while (
                hottest is not None
                and hottest > self._limit - _COOLER
                and self._clock() < end
            ):
                self._sleep(min(pause, max(end - self._clock(), 0.0)))
                pause = min(2.0 * pause, _LONGEST_PAUSE_S)
                sample = self._sample()
                hottest = sample["hottest"]
                lines.append(sample)
            lines.append({"cooling": self._clock() - began, "limit": self._limit})
        self._due = self._clock() + self._every_s
        return lines

    def _sample(self) -> Sample:
        sample = self._source.sample()
        errors = sample.pop("errors")
        if self._first is None:
            self._first = dict(errors)
        # Since the soak began: what was counted before is no finding of it.
        since = {n: c - self._first.get(n, 0) for n, c in errors.items()}
        return {
            "telemetry": sample,
            "t": time.time(),
            "hottest": max(sample["temperature"].values(), default=None),
            "errors": {name: count for name, count in since.items() if count},
            "log": self._log.new(),
        }

    def close(self) -> None:
        self._log.close()
