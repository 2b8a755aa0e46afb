"""Fixtures of the simulator's tests: kernels compiled on the spot.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hipsim

CLANGS = [
    "clang-22",
    "clang-21",
    "clang-20",
    "clang-19",
    "clang-18",
    "clang-15",
    "clang",
]

# What HIP's headers would define, in builtins of any clang >= 15.
PRELUDE = """
#define GLOBAL extern "C" __attribute__((global))
#define DEVICE __attribute__((device))
#define SHARED __attribute__((shared))
DEVICE inline int lane() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE inline int group() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE inline int index()
{
    return group() * __builtin_amdgcn_workgroup_size_x() + lane();
}
DEVICE inline void barrier()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
"""
OPTIONS = (
    *("check", "threads", "cpu", "budget", "sample", "seed"),
    *("dot2", "ulp", "profile", "profile_groups", "skip", "probe", "mutated"),
)


@functools.cache
def find_clang() -> str | None:
    """The first clang with the AMDGPU target; FA_CLANG overrides."""
    for name in [os.environ.get("FA_CLANG", ""), *CLANGS]:
        path = shutil.which(name) if name else None
        if path is None:
            continue
        targets = subprocess.run(
            [path, "--print-targets"], capture_output=True, text=True, check=False
        )
        if "amdgcn" in targets.stdout:
            return path
    return None


class Compiler:
    """Compiles HIP source to code objects; equal requests compile once."""

    def __init__(self, clang: str, folder: Path) -> None:
        self.clang = clang
        self.folder = folder
        self._done: dict[tuple[str, ...], bytes] = {}

    def __call__(
        self,
        source: str,
        *options: str,
        abi: int = 5,
        level: str = "-O3",
        arch: str = "gfx906:sramecc+:xnack-",
        clang: str | None = None,
    ) -> bytes:
        """The code object (or assembly with -S) of PRELUDE + source."""
        if clang is not None and shutil.which(clang) is None:
            pytest.skip(f"no {clang}")
        command = [
            clang or self.clang,
            *("-x", "hip", "-nogpulib", "-nogpuinc", "--cuda-device-only"),
            *("--no-gpu-bundle-output", f"--offload-arch={arch}", level),
            *(f"-mcode-object-version={abi}", *options),
        ]
        key = (source, *command)
        if key not in self._done:
            source_file = self.folder / f"{len(self._done)}.hip"
            target_file = source_file.with_suffix(".co")
            source_file.write_text(PRELUDE + source)
            result = subprocess.run(
                [*command, "-o", target_file, source_file],
                capture_output=True,
                text=True,
                check=False,
            )
            if result.returncode != 0:
                lacking = ("unsupported", "invalid", "clang-offload-bundler")
                if any(word in result.stderr for word in lacking):
                    pytest.skip(f"{command[0]}: {result.stderr.strip()[:300]}")
                pytest.fail(result.stderr)
            self._done[key] = target_file.read_bytes()
        return self._done[key]


@pytest.fixture(scope="session")
def compile_hip(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """compile_hip(source, *options, abi=, level=, arch=, clang=) -> bytes."""
    clang = find_clang()
    if clang is None:
        pytest.skip("no clang with the AMDGPU target (set FA_CLANG)")
    return Compiler(clang, tmp_path_factory.mktemp("hip"))


@pytest.fixture
def option():
    """option(name, value): sets a library option until the test ends."""
    before = {n: hipsim.get_option(n) for n in OPTIONS}
    yield hipsim.set_option
    for name, value in before.items():
        hipsim.set_option(name, value)


@pytest.fixture
def profiling(option):
    """Launches are profiled, on one thread; none is left over from before."""
    option("profile", 1)
    option("threads", 1)
    option("check", 0)
    hipsim.take_profile()


@pytest.fixture
def run_script():
    """run_script(script, *arguments, **environment): a Python of its own."""
    root = Path(hipsim.__file__).resolve().parents[1]

    def call(script: str, *arguments: object, timeout: int = 60, **environment: str):
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root), **environment},
            timeout=timeout,
            check=False,
        )

    return call
