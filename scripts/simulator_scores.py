"""Writes the mutation scores into docs/simulator.md, between its markers.

Reads what `make mutate` and `make mutate-isa` left in build/.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

from mutate import KNOWN, REGIMES, SEEDS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "simulator.md"
BEGIN = "<!-- begin: scripts/simulator_scores.py -->"
END = "<!-- end -->"


def kernel_table(results: dict[str, Any]) -> list[str]:
    """Sites of the shipped kernels by what became of leaving them out."""
    lines = [
        f"Each in {len(REGIMES)} regimes, barriers in {SEEDS} orders of the waves.",
        "",
        f"| compiler | kernel | sites | {' | '.join(KNOWN)} | unexplained |",
        "|---" * (4 + len(KNOWN)) + "|",
    ]
    total: collections.Counter[str] = collections.Counter()
    for compiler, kernels in results.items():
        for kernel, sites in kernels.items():
            count = collections.Counter(site["outcome"] for site in sites)
            known = [count[word] for word in KNOWN]
            row = [compiler, f"`{kernel}`", len(sites), *known, len(sites) - sum(known)]
            lines.append("| " + " | ".join(map(str, row)) + " |")
            total += count
    known = [total[word] for word in KNOWN]
    every = sum(total.values())
    lines.append(
        f"| all | | {every} | {' | '.join(map(str, known))} | {every - sum(known)} |"
    )
    kinds = collections.Counter(
        site["detail"]
        for kernels in results.values()
        for sites in kernels.values()
        for site in sites
        if site["outcome"] == "reported"
    )
    reports = ", ".join(f"{kind} {n}" for kind, n in kinds.most_common())
    return [*lines, "", f"Reported as: {reports}."]


def isa_lines(score: dict[str, Any]) -> list[str]:
    """Rows of the instruction lists that a test notices to be wrong."""
    equivalent = len(score["equivalent"])
    return [
        f"Rows of the instruction lists that are noticed when changed: "
        f"{score['rows_killed']} of {score['rows']}. Changes noticed: "
        f"{score['mutants_killed']} of {score['mutants'] - equivalent} that change a "
        f"result ({equivalent} more change none)."
    ]


def main() -> int:
    """Exit code 0, or 1 if a score has not been measured."""
    inputs = [ROOT / "build" / name for name in ("mutation.json", "mutation_isa.json")]
    missing = [path.name for path in inputs if not path.exists()]
    if missing:
        print(f"missing: {', '.join(missing)}: run make mutate", file=sys.stderr)
        return 1
    kernels, isa = (json.loads(path.read_text()) for path in inputs)
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest[rest.index(END) :]
    table = "\n".join([*isa_lines(isa), "", *kernel_table(kernels)])
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
