"""A wrong row of the instruction lists does not go unnoticed.

The quick suite builds and runs a seeded sample of the mutants, FA_TEST=full all of
them, as `make mutate-isa` does.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import isa_tools
import pytest

ROOT = Path(__file__).resolve().parents[2]
FULL = os.environ.get("FA_TEST") == "full"


def run(folder: Path, *options: str) -> dict:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("no C compiler")
    isa_tools.tool("llvm-mc")
    score = folder / "score.json"
    command = [sys.executable, ROOT / "scripts" / "mutate_isa.py", *options]
    done = subprocess.run(
        [*command, "--json", score, "--folder", folder / "mutants"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(score.read_text())


def test_a_sample_of_the_mutants_is_noticed(tmp_path: Path) -> None:
    result = run(tmp_path, "--sample", "40")
    assert result["mutants"] == 40 and not result["survivors"]
    assert result["mutants_killed"] + len(result["equivalent"]) == 40
    assert result["mutants_killed"] >= 25


@pytest.mark.skipif(not FULL, reason="all mutants: FA_TEST=full or make mutate-isa")
def test_every_row_and_every_mutant_is_noticed(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result["rows_killed"] == result["rows"] > 700
    assert not result["survivors"]
