"""Mutation score of the instruction lists: does the oracle notice a wrong row?

Builds one library that holds every mutant of csrc/sim/*.def (isa_mutants.py),
chosen at run time by a number, and runs for each mutant the kernels of the
row's instructions (tests/sim). A mutant that no kernel notices has survived,
unless the compiler makes the same code of it, which proves it equivalent, or
isa_equivalents.py gives a reason.

`make mutate-isa` prints the score and writes build/mutation_isa.json: rows and
mutants, how many of each were noticed, and the equivalent ones with reasons.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import ctypes
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "sim")]

# ruff: noqa: E402
import isa_equivalents
import isa_units
from isa_lists import LISTS
from isa_mutants import Mutant, all_mutants, list_text
from oracle import Oracle

import hipsim
from hipsim import _native

SOURCES = ROOT / "csrc" / "sim"
COMPILE = (
    "-std=c11",
    "-w",
    "-Werror=implicit-function-declaration",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fPIC",
)
HEADER = """extern int hipsim_mutant;
extern unsigned char hipsim_lost[];
"""
CHOOSER = """
#include "isa.h"
#include <string.h>

int hipsim_mutant;
unsigned char hipsim_lost[ISA_COUNT];
static isa_info original[ISA_COUNT];

/* Puts mutant `number` into force, 0 for none. */
__attribute__((visibility("default"))) void hipsim_set_mutant(int number)
{{
    if (original[1].name == 0) {{
        memcpy(original, isa_ops, sizeof original);
    }}
    memcpy(isa_ops, original, sizeof original);
    memset(hipsim_lost, 0, sizeof hipsim_lost);
    hipsim_mutant = number;
    switch (number) {{
{cases}
    default:
        break;
    }}
}}
"""
FIND = """
unsigned isa_find(unsigned format, unsigned opcode)
{
    unsigned op = isa_find_listed(format, opcode);

    return hipsim_lost[op] ? ISA_UNKNOWN : op;
}
"""

# ---- the library -----------------------------------------------------------


def replace_once(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise SystemExit(f"{old!r}: expected once in the sources")
    return text.replace(old, new)


def chooser(mutants: Sequence[Mutant]) -> str:
    """The function that puts a mutant into force."""
    cases = []
    for number, mutant in enumerate(mutants, 1):
        if mutant.patches:
            lines = [f"isa_ops[ISA_{op}].{member} = {value};"
                     for op, member, value in mutant.patches]  # fmt: skip
        elif not mutant.statement:
            lines = [f"hipsim_lost[ISA_{op}] = 1;" for op in mutant.row.instructions()]
        else:
            continue
        cases.append(f"    case {number}: {' '.join(lines)} break;")
    return CHOOSER.format(cases="\n".join(cases))


def build(folder: Path, mutants: Sequence[Mutant], compiler: str, level: str) -> Path:
    """Generates and compiles the sources; returns the library's path."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SOURCES, folder)
    numbered = list(enumerate(mutants, 1))
    for name in LISTS:
        own = [(i, m) for i, m in numbered if m.row.list == name]
        (folder / f"{name}.def").write_text(list_text(name, own))
    (folder / "mutants.h").write_text(HEADER)
    (folder / "mutants.c").write_text(chooser(mutants))
    header = (folder / "isa.h").read_text()
    table = "extern const isa_info isa_ops[ISA_COUNT];"
    (folder / "isa.h").write_text(
        replace_once(header, table, table.replace("const ", ""))
    )
    lists = (folder / "isa_lists.c").read_text()
    lists = replace_once(lists, "const isa_info isa_ops[", "isa_info isa_ops[")
    lists = replace_once(lists, "unsigned isa_find(unsigned format",
                         "static unsigned isa_find_listed(unsigned format")  # fmt: skip
    (folder / "isa_lists.c").write_text(lists + FIND)

    # The portable vector ALU is enough: the tests hold both to the same bits.
    host = (folder / "exec_avx2.c").read_text()
    host = replace_once(host, "#if defined(__x86_64__)", "#if 0")
    (folder / "exec_avx2.c").write_text(host)

    def compile_one(source: Path) -> None:
        command = [compiler, *COMPILE, level, "-include", "mutants.h", "-c"]
        subprocess.run([*command, source.name, "-o", source.with_suffix(".o").name],
                       cwd=folder, check=True)  # fmt: skip

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sorted(folder.glob("*.c"))))
    library = folder / "libhipsim.so"
    objects = [path.name for path in sorted(folder.glob("*.o"))]
    subprocess.run([compiler, "-shared", *objects, "-o", library.name,
                    "-Wl,-Bsymbolic", "-lm", "-lpthread"],
                   cwd=folder, check=True)  # fmt: skip
    return library


# ---- running ---------------------------------------------------------------


def load(library: Path) -> ctypes.CDLL:
    """Makes hipsim use this library."""
    _native.library_path = lambda: library
    _native.load.cache_clear()
    loaded = _native.load()
    loaded.hipsim_set_mutant.argtypes = [ctypes.c_int]
    loaded.hipsim_set_mutant.restype = None
    hipsim.set_option("cpu", 0)
    hipsim.set_option("threads", 1)
    hipsim.set_option("budget", 1_000_000)
    return loaded


class Runner:
    """The kernels of all instructions, by instruction."""

    def __init__(self, library: ctypes.CDLL, wanted: set[str]) -> None:
        self.library = library
        self.oracles: list[Oracle] = []
        self.places: dict[str, list[tuple[Oracle, int]]] = collections.defaultdict(list)
        self.set(0)
        for builders in isa_units.BUILDERS.values():
            units = [make(name) for name, make in builders if name in wanted]
            if not units:
                continue
            oracle = Oracle(units)
            self.oracles.append(oracle)
            for i, unit in enumerate(units):
                for name in unit.names:
                    self.places[name].append((oracle, i))
                if text := oracle.run(i):
                    raise SystemExit(f"fails without a mutant: {text}")

    def set(self, number: int) -> None:
        self.library.hipsim_set_mutant(number)

    def kills(self, number: int, mutant: Mutant) -> bool:
        """Whether some kernel of the row's instructions notices."""
        for name in mutant.row.instructions():
            for oracle, i in self.places[name]:
                self.set(number)
                noticed = bool(oracle.run(i)) or (
                    not mutant.statement and self.kills_reloaded(oracle, i)
                )
                self.set(0)
                if noticed:
                    return True
        return False

    def kills_reloaded(self, oracle: Oracle, i: int) -> bool:
        """Decoding happens on loading, so the object is loaded again."""
        with Oracle(oracle.units, oracle.image) as fresh:
            return bool(fresh.run(i))


# ---- the score -------------------------------------------------------------


def score(
    mutants: Sequence[Mutant], folder: Path, compiler: str, level: str
) -> dict[str, Any]:
    """Builds, runs and sorts out the mutants."""
    numbered = list(enumerate(mutants, 1))
    library = load(build(folder, mutants, compiler, level))
    runner = Runner(library, {n for m in mutants for n in m.row.instructions()})
    alive = [m for number, m in numbered if not runner.kills(number, m)]
    equivalent, survivors = [], []
    for mutant, same in zip(alive, isa_equivalents.proved(alive, folder, compiler)):
        why = "the compiler makes the same code" if same else (
            isa_equivalents.reason(mutant))  # fmt: skip
        if why:
            equivalent.append({"mutant": mutant.name, "reason": why})
        else:
            survivors.append({"mutant": mutant.name, "statement": mutant.statement})
    dead = {id(m) for m in mutants} - {id(m) for m in alive}
    rows: dict[tuple[str, str], list[Mutant]] = collections.defaultdict(list)
    for mutant in mutants:
        rows[mutant.row.list, mutant.row.name].append(mutant)
    # A lost opcode alone says little, unless it is all that can go wrong.
    killed = {
        row
        for row, own in rows.items()
        if any(id(m) in dead for m in [m for m in own if not m.opcode] or own)
    }
    return {
        "rows": len(rows),
        "rows_killed": len(killed),
        "mutants": len(mutants),
        "mutants_killed": len(dead),
        "equivalent": equivalent,
        "survivors": survivors,
        "rows_alive": sorted(name for _, name in set(rows) - killed),
    }


def report(result: dict[str, Any]) -> str:
    """A few lines for people."""
    reasons = collections.Counter(e["reason"] for e in result["equivalent"])
    possible = result["mutants"] - len(result["equivalent"])
    lines = [
        f"rows      {result['rows_killed']} of {result['rows']} noticed",
        f"mutants   {result['mutants_killed']} of {possible} noticed, "
        f"{len(result['equivalent'])} more change no result:",
        *(f"  {count:5} {reason}" for reason, count in reasons.most_common()),
    ]
    lines += [f"SURVIVED  {s['mutant']}  {s['statement']}" for s in result["survivors"]]
    lines += [f"NO ROW    {name}" for name in result["rows_alive"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sample", type=int, help="only so many mutants, seeded")
    parser.add_argument("--seed", type=int, default=906)
    parser.add_argument("--only", default="", help="mutants whose name contains it")
    parser.add_argument("--json", type=Path, help="where the score goes")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    options = parser.parse_args()
    start = time.perf_counter()
    mutants = [m for m in all_mutants() if options.only in m.name]
    if options.sample is not None:
        count = min(options.sample, len(mutants))
        mutants = random.Random(options.seed).sample(mutants, count)
    compiler = os.environ.get("CC", "cc")
    # The whole takes longer to run than to compile, a sample does not.
    level = "-O1" if len(mutants) > 500 else "-O0"
    result = score(mutants, options.folder, compiler, level)
    print(report(result))
    print(f"{time.perf_counter() - start:.0f} s")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    complete = options.sample is None and not options.only
    return int(bool(result["survivors"]) or (complete and bool(result["rows_alive"])))


if __name__ == "__main__":
    sys.exit(main())
