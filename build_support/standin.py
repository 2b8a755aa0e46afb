"""Compiles the same kernels for NVIDIA cards, to check them where there is no
AMD card: fa_sm_<n>_<unit>.cubin, loaded through libcuda.

Never part of an installation; `make standin` runs it.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from .compilers import run
from .products import (
    KERNELS,
    BuildError,
    Entry,
    GateError,
    build_targets,
    current,
    product_path,
    sha256,
    source_hash,
    units,
    variants,
    write_atomically,
)

ARCHS = ("sm_80", "sm_90")
FLAGS = ("-x", "cu", "-O3", "-std=c++17", "-fmad=false", "--cubin", "-Xptxas", "-v")


def find_nvcc(environ: Mapping[str, str]) -> Path:
    """nvcc, from CUDA_HOME or PATH.

    Raises:
        BuildError: there is none.
    """
    folders = environ.get("PATH", "")
    if environ.get("CUDA_HOME"):
        folders = os.path.join(environ["CUDA_HOME"], "bin") + os.pathsep + folders
    found = shutil.which("nvcc", path=folders)
    if found is None:
        raise BuildError(
            "no nvcc: the stand-in needs CUDA's compiler on PATH or in "
            "CUDA_HOME/bin; nothing else does"
        )
    return Path(found)


def _kernels(log: str) -> list[dict[str, object]]:
    """Registers and spilled bytes of each kernel, from ptxas -v."""
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers",
        log,
        re.DOTALL,
    )
    return [
        {"name": name, "registers": int(used), "spill_bytes": int(out) + int(back)}
        for name, out, back, used in sorted(found)
    ]


def _build_one(
    arch: str, unit: str, nvcc: Path, version: str, out: Path, sources: Path
) -> tuple[Entry, str]:
    target = f"{arch}_{unit}"
    options = [*FLAGS, f"-arch={arch}"]
    key = source_hash(sources, options, version)
    entry = current(out, target, key)
    if entry is not None:
        return entry, "unchanged"
    source = sources / f"fa_{unit}.hip"
    with tempfile.TemporaryDirectory(prefix="fa-standin-") as folder:
        made = Path(folder, "fa.cubin")
        done = run([str(nvcc), *options, "-o", str(made), str(source)])
        if done.returncode != 0:
            raise GateError(f"{target}: {source} does not compile\n{done.stderr}")
        image = made.read_bytes()
    write_atomically(product_path(out, target), image)
    return {
        "arch": arch,
        "compiler": version,
        "source_hash": key,
        "object_hash": sha256(image),
        "kernels": _kernels(done.stdout + done.stderr),
    }, "built"


def build_standin(
    out: Path,
    report: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
    sources: Path = KERNELS,
) -> dict[str, Entry]:
    """Brings out/fa_sm_<n>_<unit>.cubin up to date; returns the manifest's entries.

    Raises:
        GateError: the kernels do not compile.
        BuildError: there is no nvcc.
    """
    nvcc = find_nvcc(environ)
    version = run([str(nvcc), "--version"]).stdout.strip().splitlines()
    line = f"nvcc {version[-1]}" if version else "nvcc"
    targets = {
        f"{arch}_{unit}": (arch, unit)
        for arch in ARCHS
        for unit in units(variants(sources))
    }
    return build_targets(
        out,
        sources,
        targets,
        lambda target: _build_one(*targets[target], nvcc, line, out, sources),
        report,
    )


def table(made: Mapping[str, Entry]) -> str:
    """Registers and spills of every kernel, one line each."""
    lines = [f"{'target':8}{'kernel':32}{'registers':>9}{'spilled bytes':>15}"]
    for entry in made.values():
        lines += [
            f"{entry['arch']:8}{k['name']:32}{k['registers']:9}{k['spill_bytes']:15}"
            for k in entry["kernels"]
        ]
    return "\n".join(lines)
