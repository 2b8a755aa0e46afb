"""Finds a clang that can compile the kernels, and decides for which targets.

Leaves compiling the kernels to code_objects.py.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from .products import BuildError

OLDEST_CLANG = 15
DEFAULT_ARCH = "gfx906"

# Every architecture that a release serves, what `all` means.
ARCHS = (
    "gfx900",
    "gfx906",
    "gfx908",
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1010",
    "gfx1030",
    "gfx1100",
    "gfx1150",
    "gfx1151",
    "gfx1200",
    "gfx1201",
)

# Code objects of version 4 load on ROCm 5.4 and later. No contraction: a fused
# multiply-add is written where one is meant, so that compilers agree.
FLAGS = (
    "-x",
    "hip",
    "--cuda-device-only",
    "--no-gpu-bundle-output",
    "-nogpuinc",
    "-nogpulib",
    "-O3",
    "-mcode-object-version=4",
    "-std=c++17",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
)

_TRIAL = 'extern "C" __attribute__((global)) void trial(int *p) { *p = 1; }\n'
_ADVICE = (
    f"install clang {OLDEST_CLANG} or newer with its lld "
    "(Debian, Ubuntu: apt-get install clang-15 lld-15), name one in FA_CLANG, "
    "or set FA_ARCHS=none to install without kernels"
)


@dataclasses.dataclass(frozen=True)
class Clang:
    """A compiler that was seen to compile and link a kernel."""

    path: Path
    version: str  # the first line of --version

    def command(self, arch: str, source: Path, output: Path) -> list[str]:
        """The command that makes one code object."""
        target = f"--offload-arch={arch}"
        return [str(self.path), *FLAGS, target, str(source), "-o", str(output)]

    def make(
        self, arch: str, source: Path, output: Path
    ) -> subprocess.CompletedProcess[str]:
        """Makes one code object, in a folder that the caller removes.

        clang leaves empty folders behind where it keeps temporary files: so there.
        """
        environ = {**os.environ, "TMPDIR": str(output.parent)}
        return run(self.command(arch, source, output), environ)

    def knows(self, arch: str) -> bool:
        """Whether this compiler has the architecture."""
        return _try_arch(self.path, arch) == ""


def run(
    command: list[str], environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a tool to its end with its output captured; never raises for it."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=environ,
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _try_arch(path: Path, arch: str) -> str:
    """Empty if a one-line kernel compiles and links, else the first complaint."""
    with tempfile.TemporaryDirectory(prefix="fa-trial-") as folder:
        source = Path(folder, "trial.hip")
        source.write_text(_TRIAL, encoding="utf-8")
        clang = Clang(path, "")
        done = clang.make(arch, source, Path(folder, "trial.co"))
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return next((line for line in lines if "error" in line), "it failed")


def _refusal(path: Path) -> tuple[str, str]:
    """Its version, and why it will not do (empty for a good compiler)."""
    done = run([str(path), "--version"])
    version = done.stdout.splitlines()[0].strip() if done.stdout else ""
    match = re.search(r"clang version (\d+)", version)
    if done.returncode != 0 or match is None:
        return version, "it is not clang"
    if int(match[1]) < OLDEST_CLANG:
        return version, f"it is clang {match[1]}, older than {OLDEST_CLANG}"
    targets = run([str(path), "-print-targets"]).stdout
    if not re.search(r"^\s*amdgcn\b", targets, re.MULTILINE):
        return version, "it was built without the AMDGPU target"
    complaint = _try_arch(path, DEFAULT_ARCH)
    if complaint:
        return version, (
            f"it cannot make a kernel: {complaint} "
            f"(an lld of the same version is needed: lld-{match[1]})"
        )
    return version, ""


def _candidates(environ: Mapping[str, str], opt: Path) -> Iterator[Path]:
    """Clangs worth trying, best first: ROCm's own, then the system's."""
    roots = sorted(opt.glob("rocm*"), key=_numbers, reverse=True)
    if environ.get("ROCM_PATH"):
        roots.insert(0, Path(environ["ROCM_PATH"]))
    for root in roots:
        yield root / "llvm" / "bin" / "clang"
    folders = [Path(p) for p in environ.get("PATH", "").split(os.pathsep) if p]
    for folder in folders:
        yield folder / "clang"
    numbered = [
        path
        for folder in folders
        for path in folder.glob("clang-[0-9]*")
        if re.fullmatch(r"clang-\d+", path.name)
    ]
    yield from sorted(numbered, key=_numbers, reverse=True)


def _numbers(path: Path) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", path.name)]


def find_clang(environ: Mapping[str, str], opt: Path = Path("/opt")) -> Clang:
    """The compiler for the kernels.

    Args:
        environ: FA_CLANG, ROCM_PATH and PATH are looked at.
        opt: where ROCm installs itself.

    Raises:
        BuildError: FA_CLANG will not do, or there is none; one sentence that
            says what to install.
    """
    named = environ.get("FA_CLANG", "").strip()
    if named:
        found = shutil.which(named, path=environ.get("PATH", ""))
        if found is None:
            raise BuildError(f"FA_CLANG={named}: no such program; {_ADVICE}")
        version, why = _refusal(Path(found))
        if why:
            raise BuildError(f"FA_CLANG={named}: {why}; {_ADVICE}")
        return Clang(Path(found), version)
    refused = []
    for path in _candidates(environ, opt):
        if not os.access(path, os.X_OK):
            continue
        version, why = _refusal(path)
        if not why:
            return Clang(path, version)
        refused.append(f"{path}: {why}")
    seen = "; ".join(refused) if refused else "none was found"
    raise BuildError(f"no compiler for the kernels ({seen}): {_ADVICE}")


def wanted_archs(environ: Mapping[str, str]) -> tuple[list[str], bool]:
    """Architectures to build, and whether a missing one may be skipped.

    FA_ARCHS over PYTORCH_ROCM_ARCH over gfx906; separators are semicolon,
    comma and space; `:sramecc+` and the like are dropped, because one plain
    object serves every setting.

    Raises:
        BuildError: a name that is none.
    """
    for name in ("FA_ARCHS", "PYTORCH_ROCM_ARCH"):
        words = re.split(r"[;,\s]+", environ.get(name, "").strip())
        words = [word.split(":")[0] for word in words if word]
        if words:
            break
    else:
        return [DEFAULT_ARCH], False
    if words == ["none"]:
        return [], False
    if words == ["all"]:
        return list(ARCHS), True
    for word in words:
        if not re.fullmatch(r"gfx[0-9a-f]{3,4}", word):
            raise BuildError(
                f"{name}={environ[name]}: '{word}' is no architecture; expected "
                "names like gfx906, or all, or none"
            )
    return list(dict.fromkeys(words)), False


def usable_archs(
    clang: Clang, archs: list[str], may_skip: bool, report: Callable[[str], None]
) -> list[str]:
    """The architectures that the compiler has.

    Raises:
        BuildError: one is missing and was asked for by name.
    """
    usable = []
    for arch in archs:
        if clang.knows(arch):
            usable.append(arch)
        elif may_skip:
            report(f"{arch} skipped: {clang.version} does not know it")
        else:
            raise BuildError(
                f"{arch}: {clang.version} ({clang.path}) does not know it; use a "
                "newer compiler (FA_CLANG) or leave it out of FA_ARCHS"
            )
    return usable
