"""Files of the output folder: the manifest, content hashes, atomic writes.

A target is an architecture and a unit, the kernels of one arithmetic: gfx906_f16
is made from fa_f16.hip. manifest.json says for each target what its file was made
from and what is in it, so that an unchanged kernel is not built again and a stale
file never stays beside new ones.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
KERNELS = Path(__file__).resolve().parent.parent / "csrc" / "kernels"

Entry = dict[str, Any]


class BuildError(Exception):
    """What stops the build; the message is for the person who runs it."""


class GateError(BuildError):
    """A kernel was built but is not fit to be shipped."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """What the build checks of one row of variants.def."""

    symbol: str
    unit: str  # "f16": in fa_f16.hip and fa_<arch>_f16.co
    threads: int
    lds_bytes: int
    plain: bool = True  # not one with features


def variants(sources: Path) -> list[Variant]:
    """The rows of variants.def."""
    text = (sources / "variants.def").read_text(encoding="utf-8")
    rows = [row.split(",") for row in re.findall(r"^FA_VARIANT\((.*)\)", text, re.M)]
    return [
        Variant(
            row[0].strip(),
            row[2].strip().replace("FA_", "").lower(),
            int(row[8]),
            int(row[9]),
            row[5].strip() == "FA_PLAIN",
        )
        for row in rows
    ]


def units(rows: Iterable[Variant]) -> list[str]:
    """The units of these rows, each once, in their order."""
    return list(dict.fromkeys(row.unit for row in rows))


def source_hash(sources: Path, command: list[str], compiler: str) -> str:
    """One hash over all that a product depends on.

    Args:
        sources: the folder of the kernels; every file in it counts, of other
            units too, because any may include any.
        command: the compiler's options, free of paths.
        compiler: its version line.
    """
    digest = hashlib.sha256(json.dumps([command, compiler]).encode())
    for path in sorted(sources.iterdir()):
        if path.is_file():
            digest.update(f"\0{path.name}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file so that nobody ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def product_path(out: Path, target: str) -> Path:
    """Where the file of a target lies."""
    ending = "cubin" if target.startswith("sm_") else "co"
    return out / f"fa_{target}.{ending}"


def read_manifest(out: Path) -> dict[str, Entry]:
    """The manifest; empty if there is none or it is damaged."""
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def current(out: Path, target: str, key: str) -> Entry | None:
    """The manifest's entry if the target's file is the one described there and
    was made from what `key` stands for."""
    entry = read_manifest(out).get(target, {})
    try:
        data = product_path(out, target).read_bytes()
    except OSError:
        return None
    same = entry.get("source_hash") == key and entry.get("object_hash") == sha256(data)
    return entry if same else None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def record(out: Path, sources: Path, made: dict[str, Entry]) -> None:
    """Adds entries to the manifest, and drops products of older sources."""
    text = source_hash(sources, [], "")
    manifest = read_manifest(out)
    for target, entry in made.items():
        manifest[target] = {**entry, "sources": text}
    for target in [t for t, entry in manifest.items() if entry.get("sources") != text]:
        product_path(out, target).unlink(missing_ok=True)
        del manifest[target]
    data = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_atomically(out / MANIFEST, data.encode())


def build_targets(
    out: Path,
    sources: Path,
    targets: Iterable[str],
    build_one: Callable[[str], tuple[Entry, str]],
    report: Callable[[str], None],
) -> dict[str, Entry]:
    """Builds every target, on all cores, and records them in the manifest.

    build_one(target) gives the manifest's entry and what was done, in a word.
    """
    made: dict[str, Entry] = {}
    targets = list(targets)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for target, (entry, state) in zip(targets, pool.map(build_one, targets)):
            made[target] = entry
            name = product_path(out, target).name
            report(f"{name} {state}: {entry['compiler']}")
    record(out, sources, made)
    return made
