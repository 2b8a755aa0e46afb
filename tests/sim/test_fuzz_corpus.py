"""The fuzz targets' kept inputs, run through the library as it is shipped.

A crash would end the process, so the inputs run in one of their own: the last
file that it names is the culprit. `make fuzz` looks for new ones.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import hipsim

ROOT = Path(__file__).resolve().parents[2]
FUZZ = ROOT / "tests" / "fuzz"


def build(target: str, folder: Path) -> Path:
    """The target with a main() instead of libFuzzer, on the built library."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C compiler {compiler}")
    library = hipsim.library_path()
    program = folder / target
    subprocess.run(
        [
            *(compiler, "-std=c11", "-O1", f"-I{ROOT / 'csrc'}", "-o", str(program)),
            *(str(FUZZ / f"{target}.c"), str(FUZZ / "replay.c"), str(library)),
            f"-Wl,-rpath,{library.parent}",
        ],
        check=True,
    )
    return program


@pytest.mark.parametrize("target", ["loader", "decoder"])
def test_no_kept_input_crashes_the_process(tmp_path, target):
    inputs = sorted(str(path) for path in (FUZZ / "corpus" / target).iterdir())
    assert len(inputs) >= 50
    result = subprocess.run(
        [build(target, tmp_path), *inputs],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    named = result.stdout.splitlines()
    assert result.returncode == 0, (named[-1:], result.stderr[-2000:])
    assert named == inputs
