"""What `doctor` looks at: the machine, the driver and torch, read once.

Reads files and environment and asks torch; starts nothing on a device. Whether what it
finds is well: _doctor.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

import torch

from . import _ops
from ._config import code_objects, config, simulator_path

# Variables of others that change what a device is or does.
WATCHED = (
    "HSA_OVERRIDE_GFX_VERSION",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ROCM_ARCH",
    "HSA_ENABLE_SDMA",
    "HIP_LAUNCH_BLOCKING",
    "AMD_SERIALIZE_KERNEL",
    "AMD_LOG_LEVEL",
    "NCCL_P2P_DISABLE",
)
# What the kernel driver writes of a hang, a fault or a reset.
_KERNEL_LOG = re.compile(
    r"amdgpu.*(fence wait loop timeout|page fault|GPU reset|ring \S+ timeout)"
    r"|Queue preemption time ?out",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Sensor:
    """A temperature of a card, in degrees Celsius."""

    name: str
    now: float
    limit: float | None  # where the card saves itself


@dataclass(frozen=True)
class Facts:
    """What was found; every test of `doctor` is a function of this."""

    torch: str = ""
    hip: str | None = None  # of the torch build
    cuda: str | None = None
    ops: str | None = None  # "c", "python" or None
    unavailable: str | None = None
    rocm: str | None = None  # as installed in /opt/rocm
    driver: str | None = None  # the kernel module's version
    cards: tuple[str, ...] = ()  # architectures, as the driver sees them
    kfd: bool | None = None  # may /dev/kfd be opened; None: there is none
    devices: tuple[tuple[str, str], ...] = ()  # (name, architecture), as torch sees
    blas: bool | None = None  # rocBLAS has gfx906 kernels; None: not found
    amdhip: tuple[str, ...] = ()  # libraries
    compilers: tuple[str, ...] = ()
    code: Mapping[str, list[str]] = field(default_factory=dict)
    simulator: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    sensors: tuple[Sensor, ...] = ()
    kernel_log: tuple[str, ...] | None = None  # lines; None: may not be read


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _first(paths: list[str]) -> str | None:
    return next((text for text in map(_text, paths) if text), None)


def arch_of(version: int) -> str:
    """gfx_target_version of the driver as a name: 90006 is gfx906."""
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}"


def _cards(root: str) -> tuple[str, ...]:
    found = []
    for path in sorted(glob(f"{root}/sys/class/kfd/kfd/topology/nodes/*/properties")):
        match = re.search(
            r"^gfx_target_version (\d+)$", _text(path) or "", re.MULTILINE
        )
        if match and int(match[1]):  # 0 is a CPU
            found.append(arch_of(int(match[1])))
    return tuple(found)


def _degrees(path: str) -> float | None:
    text = _text(path) or ""
    return int(text) / 1000 if re.fullmatch(r"-?\d+", text) else None


def _sensors(root: str) -> tuple[Sensor, ...]:
    found = []
    for path in sorted(glob(f"{root}/sys/class/hwmon/hwmon*/temp*_input")):
        stem = path.removesuffix("_input")
        now = _degrees(path)
        if _text(os.path.join(os.path.dirname(path), "name")) == "amdgpu" and now:
            label = _text(f"{stem}_label") or os.path.basename(stem)
            found.append(Sensor(label, now, _degrees(f"{stem}_crit")))
    return tuple(found)


def _kernel_log() -> tuple[str, ...] | None:
    program = shutil.which("dmesg")
    if program is None:
        return None
    try:
        done = subprocess.run([program], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    return tuple(line.strip() for line in lines if _KERNEL_LOG.search(line))


def _compilers(path: str, rocm: str) -> tuple[str, ...]:
    """Clangs by which the kernels could be built; whether one can, the build finds."""
    folders = [f"{rocm}/llvm/bin", *path.split(os.pathsep)]
    found: dict[str, None] = {}
    for folder in dict.fromkeys(map(os.path.realpath, filter(os.path.isdir, folders))):
        for name in sorted(os.listdir(folder)):
            whole = os.path.join(folder, name)
            if re.fullmatch(r"clang(-\d+)?|hipcc", name) and os.access(whole, os.X_OK):
                found[whole] = None
    return tuple(found)


def _devices() -> tuple[tuple[str, str], ...]:
    if torch.version.hip is None:
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append((facts.name, facts.gcnArchName.split(":")[0]))
    return tuple(found)


def _may_open(path: str) -> bool | None:
    return os.access(path, os.R_OK | os.W_OK) if os.path.exists(path) else None


def gather(environ: Mapping[str, str] | None = None, root: str = "") -> Facts:
    """The facts of this machine.

    Args:
        environ: os.environ by default.
        root: before /sys, /dev and /opt.
    """
    environ = os.environ if environ is None else environ
    library = os.path.join(os.path.dirname(torch.__file__), "lib")
    rocm = environ.get("ROCM_PATH", f"{root}/opt/rocm")
    folders = [f"{library}/rocblas/library", f"{rocm}/lib/rocblas/library"]
    blas = [folder for folder in folders if os.path.isdir(folder)]
    return Facts(
        torch=str(torch.__version__),
        hip=torch.version.hip,
        cuda=torch.version.cuda,
        ops=_ops.source,
        unavailable=_ops.unavailable,
        rocm=_first([f"{rocm}/.info/version", *sorted(glob(f"{rocm}/.info/version*"))]),
        driver=_first([f"{root}/sys/module/amdgpu/version"]),
        cards=_cards(root),
        kfd=_may_open(f"{root}/dev/kfd"),
        devices=_devices(),
        blas=bool(glob(f"{blas[0]}/*gfx906*")) if blas else None,
        amdhip=tuple(
            sorted(glob(f"{library}/libamdhip64*") + glob(f"{rocm}/lib/libamdhip64*"))
        ),
        compilers=_compilers(environ.get("PATH", ""), rocm),
        code=code_objects(config.code_dir),
        simulator=os.path.isfile(simulator_path()),
        environ={
            name: value
            for name, value in sorted(environ.items())
            if name in WATCHED or name.startswith("FLASH_ATTN_ROCM_")
        },
        sensors=_sensors(root),
        kernel_log=_kernel_log(),
    )
