"""The checks of `doctor`: a table of small functions.

Each looks at the facts and returns what it found, with advice where something is to be
done. What was reported of ROCm releases is a table too, with its sources. Nothing here
was measured on an AMD card.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable

from ._doctor_facts import Facts
from ._version import TORCH_MIN_TEXT

LEVELS = ("ok", "note", "warn", "bad")
_HOT = 10.0  # degrees below the limit


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    name: str
    level: str  # of LEVELS; from "warn" on something is to be done
    text: str  # one line
    advice: str = ""


Check = Callable[[Facts], Iterator[Finding]]


def numbers(version: str | None) -> tuple[int, ...]:
    """(6, 4, 1) of "6.4.1-83" or "6.4.43482"; () of what is no version."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version or "")
    return tuple(int(part or 0) for part in match.groups()) if match else ()


@dataclass(frozen=True)
class Release:
    """What was reported of ROCm releases, from `first` to before `end`."""

    first: tuple[int, ...]
    end: tuple[int, ...]
    arch: str
    level: str
    text: str
    advice: str
    source: str


RELEASES = (
    Release(
        (5, 1),
        (5, 2),
        "gfx906",
        "warn",
        "queue preemption time-outs and resets were reported of Radeon VII",
        "use another release; 5.7 and 6.3 are in use on such cards",
        "ROCm/legacy-rocm-build #1744",
    ),
    Release(
        (5, 4),
        (5, 6),
        "gfx906",
        "warn",
        "NaN and black images in half precision were reported with torch 2.0",
        "use another release; 5.7 and 6.3 are in use on such cards",
        "pytorch/pytorch #103973",
    ),
    Release(
        (5, 6),
        (5, 7),
        "gfx906",
        "warn",
        "known to be slow: a kernel full of LDS reads and barriers took 1.5 times as "
        "long on a Radeon VII, and was as before in 5.7.0",
        "use 5.7 or later",
        "gpuowl #268",
    ),
    Release(
        (6, 0),
        (6, 1),
        "gfx900",
        "warn",
        "a freeze at 100 % load that was new in this release was reported of MI25",
        "use another release",
        "ROCm/legacy-rocm-build #2715",
    ),
    Release(
        (6, 2),
        (99,),
        "gfx906",
        "note",
        "its compiler was reported to give wrong code for one complex kernel (6.1.3 "
        "did not)",
        "our kernels come from another compiler and are held to known answers by the "
        "self-test; of other extensions that you build, compare results",
        "ROCm/llvm-project #151",
    ),
)


# ---- torch and ROCm ----------------------------------------------------------


def _torch(facts: Facts) -> Iterator[Finding]:
    built = f"ROCm {facts.hip}" if facts.hip else f"CUDA {facts.cuda}"
    kind = built if facts.hip or facts.cuda else "CPU"
    if facts.unavailable and "no extension" in facts.unavailable:
        advice = "build or install this package, and leave folders of bare sources"
        yield Finding("extension", "bad", facts.unavailable, advice)
    elif facts.unavailable:
        advice = f"install {TORCH_MIN_TEXT}, then this package again"
        yield Finding("torch", "bad", facts.unavailable, advice)
    elif facts.hip:
        yield Finding("torch", "ok", f"torch {facts.torch}, built for {kind}")
    else:
        yield Finding(
            "torch",
            "bad" if facts.cards else "note",
            f"torch {facts.torch}, built for {kind}: no AMD GPU can be used, only the "
            "simulator",
            "for an AMD GPU install torch's build for ROCm",
        )


def _release(facts: Facts) -> Iterator[Finding]:
    version = facts.hip or facts.rocm
    archs = {arch for _, arch in facts.devices} | set(facts.cards)
    if not version:
        yield Finding("rocm", "note", "no ROCm was found")
        return
    installed = f", /opt/rocm has {facts.rocm}" if facts.rocm else ""
    yield Finding("rocm", "ok", f"ROCm {version}{installed}")
    for known in RELEASES:
        if known.arch in archs and known.first <= numbers(version) < known.end:
            text = f"ROCm {version} on {known.arch}: {known.text} ({known.source})"
            yield Finding("rocm release", known.level, text, known.advice)


def _blas(facts: Facts) -> Iterator[Finding]:
    archs = {arch for _, arch in facts.devices} | set(facts.cards)
    if "gfx906" not in archs or facts.blas or numbers(facts.hip) < (6, 4):
        return
    seen = "has none" if facts.blas is False else "was not found"
    yield Finding(
        "rocblas",
        "bad" if facts.blas is False else "warn",
        f"ROCm {facts.hip}: official builds from 6.4 on have no rocBLAS kernels for "
        f"gfx906, and torch fails at its first matrix product; rocBLAS here {seen} "
        "(ROCm/legacy-rocm-build #4625)",
        "use torch for ROCm 6.3 or earlier, a community build for gfx906, or copy the "
        "gfx906 files of a distribution's rocBLAS",
    )


def _hip_library(facts: Facts) -> Iterator[Finding]:
    if facts.hip and not facts.amdhip:
        yield Finding(
            "hip library",
            "warn",
            "libamdhip64 was found neither beside torch nor in /opt/rocm",
            "set ROCM_PATH if ROCm is elsewhere",
        )


# ---- devices -----------------------------------------------------------------


def _driver(facts: Facts) -> Iterator[Finding]:
    if not facts.cards and facts.kfd is None:
        yield Finding("driver", "note", "the amdgpu driver shows no compute device")
        return
    version = facts.driver or "of the kernel"
    yield Finding(
        "driver", "ok", f"amdgpu {version}; cards: {', '.join(facts.cards) or 'none'}"
    )
    if facts.kfd is False:
        yield Finding(
            "driver access",
            "bad",
            "/dev/kfd may not be opened",
            "add the user to the groups render and video; in a container pass "
            "--device /dev/kfd --device /dev/dri --group-add render",
        )
    elif facts.cards and facts.hip and not facts.devices:
        yield Finding(
            "driver access",
            "bad",
            "the driver shows cards, torch none",
            "look at HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and whether this "
            "torch was built for the card",
        )


def _devices(facts: Facts) -> Iterator[Finding]:
    for index, (name, arch) in enumerate(facts.devices):
        what = f"device {index}: {name}, {arch}"
        if arch in facts.code:
            yield Finding("device", "ok", f"{what}, has code objects")
        else:
            there = ", ".join(facts.code) or "none"
            yield Finding(
                "device",
                "bad",
                f"{what}: no code object (there: {there}); stock SDPA answers",
                f"install again with FA_ARCHS={arch}",
            )
    if not facts.devices:
        return
    if facts.environ.get("FLASH_ATTN_ROCM_UNTESTED") == "1":
        yield Finding(
            "untested",
            "warn",
            "FLASH_ATTN_ROCM_UNTESTED=1 runs kernels without their self-test, and no "
            "kernel of this package has run on an AMD card yet",
            "unset it: the self-test at first use takes a minute, once",
        )
    elif facts.environ.get("FLASH_ATTN_ROCM_SELFTEST") == "0":
        yield Finding(
            "untested",
            "warn",
            "FLASH_ATTN_ROCM_SELFTEST=0: no kernel runs on an AMD GPU untested",
            "unset it: the self-test at first use takes a minute, once",
        )
    else:
        yield Finding(
            "untested",
            "note",
            "no kernel of this package has run on an AMD card yet; the self-test at "
            "first use decides what does",
        )


def _code(facts: Facts) -> Iterator[Finding]:
    if facts.code:
        found = ", ".join(f"{arch} ({len(n)} files)" for arch, n in facts.code.items())
        yield Finding("code objects", "ok", found)
    else:
        yield Finding(
            "code objects",
            "bad",
            "there are none, so nothing runs fused",
            "install again without FA_ARCHS=none, with a clang (see compilers)",
        )
    if not facts.simulator:
        yield Finding("simulator", "note", "libhipsim is not installed")


def _compilers(facts: Facts) -> Iterator[Finding]:
    if facts.compilers:
        yield Finding("compilers", "ok", ", ".join(facts.compilers))
    else:
        yield Finding(
            "compilers",
            "note",
            "no clang was found; it is needed to build kernels, not to run them",
            "clang 15 or later with its lld; FA_CLANG names one",
        )


# ---- settings ----------------------------------------------------------------


def _override(facts: Facts) -> Iterator[Finding]:
    value = facts.environ.get("HSA_OVERRIDE_GFX_VERSION")
    if value is None:
        return
    mixed = len(set(facts.cards)) > 1
    text = f"HSA_OVERRIDE_GFX_VERSION={value}: a card passes for another"
    if mixed:
        text += f", here of several kinds ({', '.join(facts.cards)})"
    yield Finding(
        "override",
        "bad" if mixed else "warn",
        text,
        "unset it: gfx906 needs none, and on hosts of several kinds it leads to "
        '"invalid device function"',
    )


def _visible(facts: Facts) -> Iterator[Finding]:
    hip, cuda = (
        facts.environ.get(f"{kind}_VISIBLE_DEVICES") for kind in ("HIP", "CUDA")
    )
    if facts.hip and None not in (hip, cuda) and hip != cuda:
        yield Finding(
            "visible devices",
            "warn",
            f"HIP_VISIBLE_DEVICES={hip} but CUDA_VISIBLE_DEVICES={cuda}; ROCm reads "
            "both",
            "set one of them",
        )


def _debugging(facts: Facts) -> Iterator[Finding]:
    names = ("HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL", "AMD_LOG_LEVEL")
    found = [n for n in names if facts.environ.get(n, "0") not in ("", "0")]
    if found:
        yield Finding(
            "debugging", "warn", f"{', '.join(found)}: every launch waits", "unset"
        )


def _switched_off(facts: Facts) -> Iterator[Finding]:
    if facts.environ.get("FLASH_ATTN_ROCM_DEVICE", "").strip().lower() == "off":
        restarts = facts.environ.get("FLASH_ATTN_ROCM_RESTARTS", "0")
        yield Finding(
            "device",
            "warn",
            "FLASH_ATTN_ROCM_DEVICE=off: stock SDPA answers every call"
            + (f", after {restarts} restarts" if restarts != "0" else ""),
            "unset it; look at `flash-attn-rocm breaker list` first",
        )


def _environment(facts: Facts) -> Iterator[Finding]:
    if facts.environ:
        words = " ".join(f"{name}={value}" for name, value in facts.environ.items())
        yield Finding("environment", "note", words)


# ---- the card's health -------------------------------------------------------


def _heat(facts: Facts) -> Iterator[Finding]:
    for sensor in facts.sensors:
        limit = "" if sensor.limit is None else f", limit {sensor.limit:.0f}"
        hot = sensor.limit is not None and sensor.now > sensor.limit - _HOT
        yield Finding(
            "heat",
            "warn" if hot else "ok",
            f"{sensor.name} {sensor.now:.0f} degrees{limit}",
            "see --symptom heat" if hot else "",
        )


def _kernel_log(facts: Facts) -> Iterator[Finding]:
    if facts.kernel_log:
        yield Finding(
            "kernel log",
            "warn",
            f"{len(facts.kernel_log)} faults or resets, the last: "
            f"{facts.kernel_log[-1][:160]}",
            "see --symptom hang",
        )
    elif facts.kernel_log is None and facts.cards:
        yield Finding("kernel log", "note", "may not be read", "look at `sudo dmesg`")


CHECKS: tuple[Check, ...] = (
    _torch,
    _release,
    _blas,
    _hip_library,
    _driver,
    _devices,
    _code,
    _compilers,
    _override,
    _visible,
    _debugging,
    _switched_off,
    _environment,
    _heat,
    _kernel_log,
)


def examine(facts: Facts) -> list[Finding]:
    """What all checks found, in their order."""
    return [finding for check in CHECKS for finding in check(facts)]


def healthy(findings: list[Finding]) -> bool:
    """Whether nothing is to be done."""
    return all(finding.level in ("ok", "note") for finding in findings)
