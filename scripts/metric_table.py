"""The table of metrics in docs/monitoring.md, made from what serves them.

    python scripts/metric_table.py [--write]

prints the table, or renews it between its markers.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKERS = ("<!-- metric table: scripts/metric_table.py -->", "<!-- end -->")


def table() -> str:
    """The table as Markdown."""
    sys.path.insert(0, str(ROOT))
    from flash_attn_rocm._metrics import PREFIX, ROWS, series

    lines = ["| metric | kind | labels | what it says |", "|---|---|---|---|"]
    for row in ROWS:
        name = series(row).removeprefix(PREFIX)
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{name}` | {row.kind} | {labels} | {row.text} |")
    return "\n".join(lines)


def renewed(text: str) -> str:
    """The document's text with the table as it should be."""
    begin, end = MARKERS
    head, rest = text.split(begin)
    return f"{head}{begin}\n{table()}\n{end}{rest.split(end, 1)[1]}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/monitoring.md")
    document = ROOT / "docs" / "monitoring.md"
    if parser.parse_args().write:
        text = document.read_text(encoding="utf-8")
        document.write_text(renewed(text), encoding="utf-8")
    else:
        print(table())


if __name__ == "__main__":
    main()
