"""The example of one's own kernel, run as its README says.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from conftest import find_clang
from helpers import ROOT
from helpers.commands import command

import hipsim
from hipsim.cli import main

EXAMPLE = ROOT / "examples" / "race"


def readme_command(name: str) -> list[str]:
    """The words of the README's command that starts with name."""
    text = (EXAMPLE / "README.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"^{name} .*$", text, re.MULTILINE)
    return line.split()


def run(folder: Path, capsys, *options: str):
    clang = find_clang()
    if clang is None:
        pytest.skip("no clang with the AMDGPU target (set FA_CLANG)")
    for name in ("reverse.hip", "A.json"):
        shutil.copy(EXAMPLE / name, folder)
    words = [clang, *readme_command("clang")[1:], *options]
    subprocess.run(words, cwd=folder, check=True)
    (folder / "in.bin").write_bytes(struct.pack("<512f", *range(512)))
    (folder / "out.bin").write_bytes(bytes(2048))
    return command(main, capsys, *readme_command("hipsim")[1:])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = hipsim.get_option("check")
    yield tmp_path
    hipsim.set_option("check", before)


def test_the_race_example_is_found_with_its_source_line(folder, capsys):
    code, out, err = run(folder, capsys)
    assert (code, out) == (1, "")
    assert "reverse: race in LDS" in err and "at reverse.hip:" in err


def test_the_mended_example_has_no_finding_and_reverses(folder, capsys):
    code, out, err = run(folder, capsys, "-DMENDED")
    assert (code, err) == (0, "")
    assert out.endswith("check level 2: no finding\n")
    got = struct.unpack("<512f", (folder / "result" / "out.bin").read_bytes())
    tiles = [range(first + 127, first - 1, -1) for first in range(0, 512, 128)]
    assert list(got) == [n for tile in tiles for n in tile]
