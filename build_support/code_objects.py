"""Compiles the kernels into code objects: one per AMD architecture and unit.

    python -m build_support.code_objects --archs gfx906 --out DIR

prints what each kernel needs. Exit code 0: all good; 1: a gfx906 kernel is
not fit to ship, or does not compile; 2: wrong arguments, no compiler.

A gfx906 kernel is fit to ship if nothing is spilled to memory, its LDS fits
the compute unit and its workgroup size is in the object. Other architectures
are reported only.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import standin
from .compilers import Clang, find_clang, usable_archs, wanted_archs
from .products import (
    KERNELS,
    BuildError,
    Entry,
    GateError,
    Variant,
    build_targets,
    current,
    product_path,
    sha256,
    source_hash,
    units,
    variants,
    write_atomically,
)

__all__ = ["BuildError", "GateError", "build_code_objects", "gate", "main"]

GATED = "gfx906"
LDS_LIMIT = 65536  # bytes, of a workgroup and of a gfx9 compute unit

# Vector registers of a lane and their allocation step, for 64-wide waves.
# Source: facts of the LLVM AMDGPU target; others are not computed.
_VGPR_FILE = {
    "gfx900": (256, 4),
    "gfx906": (256, 4),
    "gfx908": (256, 4),
    "gfx90a": (512, 8),
    "gfx942": (512, 8),
}
_MOST_WAVES = {"gfx900": 10, "gfx906": 10, "gfx908": 10, "gfx90a": 8, "gfx942": 8}


def waves_per_simd(arch: str, kernel: Mapping[str, int]) -> int | None:
    """Waves that share a SIMD when nothing else runs; None if not known.

    The smaller of what registers and LDS allow. A compute unit has 4 SIMDs;
    LDS is given out in steps of 512 bytes.
    """
    if arch not in _VGPR_FILE:
        return None
    size, step = _VGPR_FILE[arch]
    per_wave = max(1, -(-kernel["vgprs"] // step)) * step
    by_registers = min(_MOST_WAVES[arch], size // per_wave)
    lds = -(-kernel["lds_bytes"] // 512) * 512
    group_waves = -(-kernel["max_threads"] // 64)
    groups = by_registers * 4 // group_waves
    if lds > 0:
        groups = min(groups, LDS_LIMIT // lds)
    return groups * group_waves // 4


def load_simulator(library: Path) -> ctypes.CDLL:
    """The built libhipsim.so, whose loader reads code objects."""
    try:
        hipsim = ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(
            f"{library} cannot be loaded ({error}); it is built by "
            "'make build' or 'python setup.py build_ext --inplace'"
        ) from None
    hipsim.hipsimLastReport.restype = ctypes.c_char_p
    hipsim.hipsimFree.argtypes = [ctypes.c_void_p]
    hipsim.hipsimObjectInfo.argtypes = [
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    return hipsim


def object_kernels(image: bytes, hipsim: ctypes.CDLL) -> list[dict[str, Any]]:
    """The kernels of a code object.

    Args:
        image: the code object.
        hipsim: what load_simulator() gives.
    """
    text = ctypes.c_void_p()
    if hipsim.hipsimObjectInfo(image, len(image), ctypes.byref(text)) != 0:
        report = hipsim.hipsimLastReport().decode(errors="replace")
        raise BuildError(f"the simulator cannot read the code object: {report}")
    try:
        info = json.loads(ctypes.string_at(text.value or 0))
    finally:
        hipsim.hipsimFree(text)
    kernels: list[dict[str, Any]] = info["kernels"]
    return sorted(kernels, key=lambda kernel: str(kernel["name"]))


def gate(kernels: list[dict[str, Any]], rows: list[Variant]) -> list[str]:
    """Why these kernels cannot ship, one sentence each; empty if they can."""
    faults = []
    built = {kernel["name"]: kernel for kernel in kernels}
    for row in rows:
        kernel = built.get(row.symbol)
        if kernel is None:
            faults.append(f"{row.symbol}: not in the object")
            continue
        for key, what in (
            ("vgpr_spills", "spilled vector registers"),
            ("sgpr_spills", "spilled scalar registers"),
            ("private_bytes", "bytes of scratch memory"),
        ):
            # Kernels with features know more of a call than scalar registers hold:
            # the rest may lie in lanes of a vector register, never in memory.
            if kernel[key] > 0 and (row.plain or key != "sgpr_spills"):
                faults.append(f"{row.symbol}: {kernel[key]} {what}, expected 0")
        if kernel["lds_bytes"] != row.lds_bytes or row.lds_bytes > LDS_LIMIT:
            faults.append(
                f"{row.symbol}: {kernel['lds_bytes']} bytes of LDS, expected "
                f"{row.lds_bytes} and at most {LDS_LIMIT}"
            )
        if kernel["max_threads"] != row.threads:
            faults.append(
                f"{row.symbol}: bounded to {kernel['max_threads']} threads, "
                f"expected {row.threads}"
            )
    return faults


def _build_one(
    arch: str,
    unit: str,
    clang: Clang,
    out: Path,
    library: Path,
    sources: Path,
    others: Sequence[Path],
) -> tuple[Entry, str]:
    """The manifest entry of one target, and what was done for it."""
    target = f"{arch}_{unit}"
    source = sources / f"fa_{unit}.hip"
    # the hash must not depend on where the tree lies
    options = clang.command(arch, Path(source.name), Path("out"))[1:]
    key = source_hash(sources, options, clang.version)
    entry = current(out, target, key)
    if entry is not None:
        return entry, "unchanged"
    for folder in others:
        entry = current(folder, target, key)
        if entry is not None:
            image = product_path(folder, target).read_bytes()
            write_atomically(product_path(out, target), image)
            return entry, "copied"
    hipsim = load_simulator(library)  # before a minute of compiling: is it there?
    with tempfile.TemporaryDirectory(prefix="fa-kernels-") as folder:
        made = Path(folder, "fa.co")
        done = clang.make(arch, source, made)
        if done.returncode != 0:
            raise GateError(f"{arch}: {source} does not compile\n{done.stderr}")
        image = made.read_bytes()
    kernels = object_kernels(image, hipsim)
    for kernel in kernels:
        kernel.pop("args", None)
        kernel["waves_per_simd"] = waves_per_simd(arch, kernel)
    if arch == GATED:
        rows = [row for row in variants(sources) if row.unit == unit]
        faults = gate(kernels, rows)
        if faults:
            text = "\n".join(faults)
            raise GateError(f"{arch}: not fit to ship ({clang.version})\n{text}")
    write_atomically(product_path(out, target), image)
    return {
        "arch": arch,
        "compiler": clang.version,
        "source_hash": key,
        "object_hash": sha256(image),
        "kernels": kernels,
    }, "built"


def build_code_objects(
    out: Path,
    library: Path,
    report: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
    sources: Path = KERNELS,
    others: Sequence[Path] = (),
) -> dict[str, Entry]:
    """Brings out/fa_<arch>_<unit>.co and out/manifest.json up to date.

    Every target is a process of the compiler's own, as many at once as there
    are cores.

    Args:
        out: the folder, made if needed.
        library: the built libhipsim.so, which reads the objects.
        report: gets one line for each thing worth saying.
        environ: FA_ARCHS, PYTORCH_ROCM_ARCH, FA_CLANG, ROCM_PATH, PATH.
        sources: the folder with fa_<unit>.hip and variants.def.
        others: folders like `out`, whose objects are copied if they were made by the
            same compiler from the same sources.

    Returns:
        The manifest's entries of the wanted architectures, by target:
        "gfx906_f16".

    Raises:
        GateError: a kernel does not compile or is not fit to ship.
        BuildError: no compiler, or a bad name.
    """
    archs, may_skip = wanted_archs(environ)
    if archs:
        clang = find_clang(environ)
        archs = usable_archs(clang, archs, may_skip, report)
    targets = {
        f"{arch}_{unit}": (arch, unit)
        for arch in archs
        for unit in units(variants(sources))
    }
    return build_targets(
        out,
        sources,
        targets,
        lambda target: _build_one(
            *targets[target], clang, out, library, sources, others
        ),
        report,
    )


_COLUMNS = (
    ("arch", None),
    ("kernel", "name"),
    ("VGPR", "vgprs"),
    ("SGPR", "sgprs"),
    ("LDS", "lds_bytes"),
    ("spills", None),
    ("scratch", "private_bytes"),
    ("waves/SIMD", "waves_per_simd"),
    ("code bytes", "code_bytes"),
)


def table(made: Mapping[str, Entry]) -> str:
    """What every kernel needs, one line each."""
    rows = [[title for title, _ in _COLUMNS]]
    for entry in made.values():
        for kernel in entry["kernels"]:
            spills = kernel["vgpr_spills"] + kernel["sgpr_spills"]
            cells = {"arch": entry["arch"], "spills": spills}
            row = [cells[t] if key is None else kernel[key] for t, key in _COLUMNS]
            rows.append(["-" if cell is None else str(cell) for cell in row])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        left = [row[i].ljust(widths[i]) for i in range(2)]
        right = [row[i].rjust(widths[i]) for i in range(2, len(row))]
        lines.append("  ".join(left + right))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    root = KERNELS.parent.parent
    parser = argparse.ArgumentParser(
        prog="python -m build_support.code_objects",
        description="Compile the kernels and print what each of them needs.",
        epilog="Exit code: 0 good, 1 a kernel is not fit to ship, 2 usage or "
        "no compiler.",
    )
    parser.add_argument("--archs", help="like FA_ARCHS: gfx906;gfx1100, all, none")
    parser.add_argument(
        "--out",
        type=Path,
        default=root / "flash_attn_rocm" / "_code",
        help="folder of the code objects (default: %(default)s)",
    )
    parser.add_argument(
        "--library",
        type=Path,
        default=root / "hipsim" / "libhipsim.so",
        help="the built simulator, which reads the objects (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="JSON, not a table")
    parser.add_argument(
        "--standin", action="store_true", help="for NVIDIA cards instead, by nvcc"
    )
    options = parser.parse_args(argv)
    environ = dict(os.environ)
    if options.archs is not None:
        environ["FA_ARCHS"] = options.archs

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    try:
        if options.standin:
            made = standin.build_standin(options.out, say, environ)
        else:
            made = build_code_objects(options.out, options.library, say, environ)
    except BuildError as error:
        say(f"error: {error}")
        return 1 if isinstance(error, GateError) else 2
    if options.json:
        print(json.dumps(made, indent=1, sort_keys=True))
    elif made:
        print(standin.table(made) if options.standin else table(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
