"""Sets up what `make demo` and `make test` need; standard library only.

In this order: system packages (C compiler, Python headers, a clang with the
AMDGPU target), the virtual environment, torch, the pinned test requirements,
Debian's prometheus where apt has it (without it some tests skip).
What is there already is kept, so a second run changes nothing.  System packages
are installed only as root or with password-less sudo, and only by apt-get;
otherwise the exact command to type is printed and the exit code is 1.

torch is never downloaded with gigabytes of CUDA: an installed torch is reused,
else the CPU build is asked for by its exact local version, which no CUDA wheel
answers to, first from the package sources that pip is configured for and then
from TORCH_INDEX_URL.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
TORCH_MINIMUM = (2, 4)
TORCH_INDEX_URL = "https://download.pytorch.org/whl/cpu"
PYTHON_MINIMUM = (3, 10)  # of the test tools; the package itself runs on 3.9
CLANG_VERSIONS = range(22, 14, -1)  # newest first
MONITORS = ("prometheus", "promtool")


class Stop(Exception):
    """Set-up cannot go on; the text says what to do."""


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def output_of(*command: str) -> str | None:
    """What a command prints; None if it fails or does not exist."""
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError:
        return None
    return result.stdout if result.returncode == 0 else None


def works(*command: str) -> bool:
    return output_of(*command) is not None


# System packages


def missing_packages() -> dict[str, list[str]]:
    """What the machine lacks -> Debian packages that bring it."""
    lacks: dict[str, list[str]] = {}
    if shutil.which(os.environ.get("CC", "cc")) is None:
        lacks["a C compiler"] = ["gcc", "libc6-dev"]
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        lacks["a C++ compiler (torch.compile runs it)"] = ["g++"]
    series = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacks["the Python headers"] = [f"{series}-dev"]
    if importlib.util.find_spec("ensurepip") is None:
        lacks["Python's venv module"] = [f"{series}-venv"]
    if not kernels_can_be_built():
        lacks["clang >= 15 with the AMDGPU target"] = []  # named after apt's update
    return lacks


def kernels_can_be_built() -> bool:
    """Whether the kernel build finds a compiler, or needs none (FA_ARCHS=none)."""
    sys.path.insert(0, str(ROOT))
    from build_support.compilers import find_clang, wanted_archs
    from build_support.products import BuildError

    try:
        archs, _ = wanted_archs(os.environ)
        return not archs or bool(find_clang(os.environ))
    except BuildError:
        return False


def newest_clang() -> list[str]:
    """Names of the newest clang, linker and tools that apt offers.

    The tools (llvm-mc, llvm-objdump, clang-offload-bundler) are what tests compare
    the simulator with.
    """
    for version in CLANG_VERSIONS:
        tools = ("clang", "clang-tools", "lld", "llvm")
        names = [f"{tool}-{version}" for tool in tools]
        policy = output_of("apt-cache", "policy", *names) or ""
        if len(re.findall(r"Candidate: \d", policy)) == len(names):
            return names
    raise Stop(
        "no clang of version 15 to 22 in this system's package lists (are they "
        "fresh? apt-get update); install one with the AMDGPU target, or ROCm's, and "
        "name it: FA_CLANG=/path/to/clang"
    )


def as_root() -> list[str] | None:
    """What to put in front of a command for root; None if that is not allowed."""
    if os.geteuid() == 0:
        return []
    return ["sudo", "-n"] if works("sudo", "-n", "true") else None


def install_packages() -> None:
    lacks = missing_packages()
    if not lacks:
        return
    say("missing: " + ", ".join(lacks))
    for tool, command in (
        ("dnf", "sudo dnf install gcc python3-devel clang lld llvm"),
        ("pacman", "sudo pacman -S gcc python clang lld llvm"),
        ("zypper", "sudo zypper install gcc python3-devel clang lld llvm"),
    ):
        if shutil.which(tool) and shutil.which("apt-get") is None:
            raise Stop(f"install it and run this again:\n    {command}")
    if shutil.which("apt-get") is None:
        raise Stop("install it with this system's package manager and run this again")
    sudo = as_root()
    environment = ["env", "DEBIAN_FRONTEND=noninteractive"]
    if sudo is not None:
        say("apt-get update")
        subprocess.run([*sudo, "apt-get", "update", "-qq"], check=False)
    packages = [name for names in lacks.values() for name in names]
    if not all(lacks.values()):
        packages += newest_clang()
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if sudo is None:
        typed = "sudo apt-get update && sudo " + " ".join(command)
        raise Stop(f"type this and run it again:\n    {typed}")
    say(" ".join(command))
    if subprocess.run([*sudo, *environment, *command], check=False).returncode != 0:
        raise Stop("apt-get failed; its own message is above")
    left = missing_packages()
    if left:
        raise Stop(f"still missing after the installation: {', '.join(left)}")


# Virtual environment and torch


def torch_of(python: str) -> tuple[str, str] | None:
    """Version and folder of the torch that `python` imports, if new enough."""
    program = "import torch; print(torch.__version__); print(torch.__path__[0])"
    lines = (output_of(python, "-c", program) or "").split()
    if len(lines) != 2:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", lines[0])
    if not numbers or tuple(map(int, numbers.groups())) < TORCH_MINIMUM:
        say(f"torch {lines[0]} of {python} is too old and is left alone")
        return None
    return lines[0], lines[1]


def make_environment(folder: Path) -> str:
    """Creates the environment around an installed torch, or without one."""
    python = str(folder / "bin" / "python")
    if works(python, "-m", "pip", "--version"):
        return python
    installed = torch_of(sys.executable)
    options = ["--clear"]
    if installed:
        say(f"torch {installed[0]} of {sys.executable} is reused")
        options.append("--system-site-packages")
    say(f"virtual environment in {folder}")
    result = subprocess.run(
        [sys.executable, "-m", "venv", *options, str(folder)], check=False
    )
    if result.returncode != 0:
        raise Stop("python3 -m venv failed; its own message is above")
    if installed and torch_of(python) is None:
        # sys.executable is itself of a virtual environment, which venv skips
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = (output_of(python, "-c", program) or "").strip()
        link = Path(site, "reused_torch.pth")
        link.write_text(str(Path(installed[1]).parent) + "\n", encoding="utf-8")
    return python


def pip_install(python: str, *arguments: str) -> bool:
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    return subprocess.run([*command, *arguments], check=False).returncode == 0


def install_torch(python: str) -> None:
    found = torch_of(python)
    if found:
        say(f"torch {found[0]}")
        return
    cpu_build = f"torch=={TORCH}+cpu"
    chosen = os.environ.get("TORCH_INDEX_URL")
    if not chosen:
        # An exact local version: a CUDA wheel cannot be taken for it.
        say(f"{cpu_build} from the configured package sources, if they have it")
        if pip_install(python, "--only-binary=torch", cpu_build):
            return
    index = chosen or TORCH_INDEX_URL
    wanted = f"torch=={TORCH}" if chosen else cpu_build
    say(f"{wanted} from {index}")
    patience = ["--timeout", "15", "--retries", "1"]
    if not pip_install(
        python, *patience, "--only-binary=torch", "--no-deps", "-i", index, wanted
    ):
        raise Stop(
            f"{wanted} cannot be had from {index}. One of these helps:\n"
            f"    make TORCH_INDEX_URL=URL ...      another index of CPU builds\n"
            f"    make PYTHON=/path/to/python3 ...  a Python that has torch >= 2.4\n"
            f"    {python} -m pip install torch=={TORCH}\n"
            "                                      may be gigabytes of CUDA"
        )
    if not pip_install(python, wanted):  # torch is there: this brings what it needs
        raise Stop("what torch depends on cannot be installed; see above")


# What some tests use and none needs


def unpack_package(name: str, folder: Path) -> bool:
    """Unpacks a Debian package into a folder; installs nothing, needs no root."""
    commands = (["apt-get", "download", "-qq", name], ["sh", "-c", "dpkg -x *.deb ."])
    try:
        for command in commands:
            subprocess.run(command, cwd=folder, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def add_monitors(python: str) -> None:
    """Puts prometheus and promtool beside `python` if apt has them.

    Not by installing the package: that would start a server on this machine.
    """
    beside = Path(python).parent
    path = os.pathsep.join([str(beside), os.environ.get("PATH", "")])
    if all(shutil.which(name, path=path) for name in MONITORS):
        return
    with tempfile.TemporaryDirectory() as folder:
        there = unpack_package(MONITORS[0], Path(folder))
        sudo = None if there else as_root()
        if sudo is not None and works(*sudo, "apt-get", "update", "-qq"):
            there = unpack_package(MONITORS[0], Path(folder))
        if not there:
            say(
                "apt has no prometheus here: tests of monitoring/ that run it will skip"
            )
            return
        say(f"prometheus, unpacked into {beside}")
        for name in MONITORS:
            shutil.copy(Path(folder, "usr", "bin", name), beside / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    options = parser.parse_args()
    try:
        if sys.version_info < PYTHON_MINIMUM:
            raise Stop(
                "tests and demo need Python 3.10 or newer, this is "
                f"{sys.version.split()[0]}; name another one: make PYTHON=python3.12"
            )
        install_packages()
        python = make_environment(options.venv)
        install_torch(python)
        say("test requirements (requirements-dev.txt)")
        if not pip_install(python, "-r", str(ROOT / "requirements-dev.txt")):
            raise Stop("the test requirements cannot be installed; see above")
        add_monitors(python)
    except Stop as reason:
        sys.exit(f"set-up: {reason}")


if __name__ == "__main__":
    main()
