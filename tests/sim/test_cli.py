"""The ``hipsim`` command: info, disasm, exit codes.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from cli_tools import SOURCE, make_folder
from helpers.commands import command
from helpers.profile_sample import launch, sample

import hipsim
from hipsim.cli import main

INSTRUCTION = {"offset": 3, "count": 1, "lds_conflict_cycles": 0}
INSTRUCTION |= {"stall_cycles": 0, "lanes": 64}


@pytest.fixture
def folder(compile_hip, tmp_path) -> Path:
    return make_folder(compile_hip, tmp_path)


def test_info_prints_a_table_or_json(folder, capsys):
    code, out, _ = command(main, capsys, "info", folder / "k.co")
    assert code == 0
    assert "amdgcn-amd-amdhsa--gfx906:sramecc+:xnack-, code object v5, 7 kernels" in out
    code, text, _ = command(main, capsys, "info", folder / "k.co", "--json")
    facts = json.loads(text)
    assert code == 0 and facts == hipsim.object_info(folder / "k.co")
    for kernel in facts["kernels"]:
        row = next(r for r in out.splitlines() if r.split()[0] == kernel["name"])
        assert row.split()[1] == str(kernel["vgprs"])
        assert str(kernel["code_bytes"]) in row.split()


def test_info_names_every_entry_of_a_bundle(folder, capsys):
    image = (folder / "k.co").read_bytes()
    names = ["host-x86_64-unknown-linux--", "hipv4-amdgcn-amd-amdhsa--gfx1100"]
    names.append("hipv4-amdgcn-amd-amdhsa--gfx906")
    sizes = [0, 0, len(image)]
    table = b"".join(
        struct.pack("<QQQ", 4096, size, len(name)) + name.encode()
        for name, size in zip(names, sizes)
    )
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", 3) + table
    (folder / "bundle.hipfb").write_bytes(head.ljust(4096, b"\0") + image)
    code, out, err = command(main, capsys, "info", folder / "bundle.hipfb")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "gfx906" in lines[0]
    assert lines[1] == f"chosen from a bundle of 3: {', '.join(names)}"
    _, text, _ = command(main, capsys, "info", folder / "bundle.hipfb", "--json")
    assert json.loads(text)["bundle"] == names


def test_disasm_prints_and_counts_instructions(compile_hip, folder, capsys):
    code, out, _ = command(main, capsys, "disasm", folder / "k.co", "--kernel", "scale")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "scale:" and lines[1].startswith("     0:  s_")
    mnemonics = [line.split()[1] for line in lines[1:]]
    assembly = compile_hip(SOURCE, "-S").decode()
    body = assembly[assembly.index("\nscale:") : assembly.index(".section")]
    assert mnemonics == re.findall(r"^\t([sv]_\w+|global_\w+)", body, re.M)
    assert "v_mul_f32_e32" in mnemonics
    words = ["disasm", "--kernel", "scale"]
    code, out, _ = command(main, capsys, *words, folder / "k.co", "--mnemonics")
    counts = {m: int(n) for n, m in (line.split() for line in out.splitlines())}
    assert code == 0
    assert counts == {m: mnemonics.count(m) for m in mnemonics}
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    # --counts without a profile
    assert command(main, capsys, *words, folder / "k.co", "--counts") == (0, out, "")
    assert command(main, capsys, *words, "--counts", folder / "k.co") == (0, out, "")
    code, out, _ = command(main, capsys, "disasm", folder / "k.co")
    names = [line[:-1] for line in out.splitlines() if line[0] != " "]
    assert sorted(names) == ["add", "forever", "idle", "move", "odd", "scale", "shift"]


def offsets(capsys, folder, kernel):
    _, out, _ = command(main, capsys, "disasm", folder / "k.co", "--kernel", kernel)
    return [int(line.split(":")[0], 16) for line in out.splitlines()[1:]]


def test_disasm_counts_stand_beside_their_instructions(folder, capsys):
    at = offsets(capsys, folder, "scale")
    first = {**INSTRUCTION, "offset": at[0], "count": 5, "stall_cycles": 1}
    third = {**INSTRUCTION, "offset": at[2], "count": 7, "lds_conflict_cycles": 9}
    third |= {"stall_cycles": 20, "traced": 4, "lanes": 32}
    two = [launch("scale", instructions=rows) for rows in ([first, third], [third])]
    path = folder / "p.json"
    path.write_text(json.dumps(sample(*two, launch("elsewhere"))))
    code, out, err = command(main, capsys, "disasm", folder / "k.co", "--counts", path)
    assert (code, err) == (0, "")
    assert out.startswith("Simulated gfx906")
    listing = out[out.index("\nscale:\n") + 1 :].split("\n\n")[0].splitlines()
    assert "2 launches" in listing[1] and "error bar +-60 %" in listing[2]
    _, plain, _ = command(main, capsys, "disasm", folder / "k.co", "--kernel", "scale")
    rows = list(zip(listing[4:], plain.splitlines()[1:]))
    assert len(rows) == len(at) and all(row.endswith(line) for row, line in rows)
    cells = [row[: -len(line)].split() for row, line in rows]
    assert cells[0] == ["5", "64", "0", "0.2"]
    assert cells[2] == ["14", "32", "18", "5.0"]
    assert all(cell == ["."] for cell in cells[1:2] + cells[3:])
    idle = out[out.index("\nidle:\n") :].split("\n\n")[0]
    assert "not launched in this profile" in idle


def test_disasm_counts_tell_of_code_outside_the_kernel(folder, capsys):
    called = [{**INSTRUCTION, "offset": at, "count": 21} for at in (-64, 2**20)]
    untraced = {**INSTRUCTION, "offset": 0, "traced": 0}
    path = folder / "p.json"
    path.write_text(
        json.dumps(sample(launch("idle", instructions=[*called, untraced])))
    )
    words = ("disasm", folder / "k.co", "--kernel", "idle", "--counts", path)
    code, out, err = command(main, capsys, *words)
    assert (code, err) == (0, "")
    assert out.endswith("; and 42 executions in functions outside the kernel\n")
    (first,) = [line for line in out.splitlines() if " 0:  s_endpgm" in line]
    assert first.split()[:4] == ["1", "64", "0", "-"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "not a profile"),
        (json.dumps({**sample(), "version": 2}), "version: expected 1, got 2"),
        (json.dumps(sample(launch("other"))), "(launched: other)"),
        (
            json.dumps(sample(launch("scale", instructions=[INSTRUCTION]))),
            "offset 0x3, where this object has no instruction",
        ),
    ],
    ids=["absent", "json", "list", "version", "kernel", "build"],
)
def test_disasm_refuses_an_unfit_profile_in_one_line(folder, capsys, text, words):
    path = folder / "p.json"
    if text is not None:
        path.write_text(text)
    code, out, err = command(main, capsys, "disasm", folder / "k.co", "--counts", path)
    assert (code, out) == (2, "")
    assert "p.json: " in err and words in err and err.count("\n") == 1


def test_disasm_needs_an_object(capsys):
    for words in ((), ("--counts",), ("--mnemonics",)):
        code, out, err = command(main, capsys, "disasm", *words)
        assert (code, out) == (2, "")
        assert "expected OBJ" in err and err.count("\n") == 1


def test_disasm_counts_without_the_object_says_so(tmp_path, capsys):
    (tmp_path / "p.json").write_text(json.dumps(sample()))
    words = ("disasm", "--counts", tmp_path / "p.json")
    code, out, err = command(main, capsys, *words)
    assert (code, out) == (2, "")
    assert "expected OBJ, a code object, besides --counts" in err


def test_disasm_is_for_gfx906_alone(compile_hip, folder, capsys):
    (folder / "other.co").write_bytes(compile_hip(SOURCE, arch="gfx1100"))
    code, _, err = command(main, capsys, "disasm", folder / "other.co")
    assert code == 2 and "gfx1100" in err and err.count("\n") == 1
    assert command(main, capsys, "info", folder / "other.co")[0] == 0


@pytest.mark.parametrize("word", ["info", "disasm"])
def test_unusable_files_are_refused_in_one_line(folder, capsys, word):
    for name, words in (("none.co", "No such file"), (".", "directory"), ("a.npy", "")):
        code, out, err = command(main, capsys, word, folder / name)
        assert (code, out) == (2, "")
        assert words in err and err.count("\n") == 1


def test_module_is_a_command_with_exit_codes(folder):
    root = Path(hipsim.__file__).resolve().parents[1]

    def call(*words):
        return subprocess.run(
            [sys.executable, "-m", "hipsim", *map(str, words)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
            check=False,
        )

    assert call("info", folder / "k.co").returncode == 0
    assert call("info", folder / "a.npy").returncode == 2
    assert call().returncode == 2
    assert "run" in call("--help").stdout


def test_package_needs_only_the_standard_library(folder):
    root = Path(hipsim.__file__).resolve().parents[1]
    script = f"""
import sys
sys.path.insert(0, {str(root)!r})
import hipsim, hipsim.cli
hipsim.object_info({str(folder / "k.co")!r})
foreign = [m for m in sys.modules if m.split(".")[0] in ("torch", "numpy")]
sys.exit(f"imported {{foreign}}" if foreign else 0)
"""
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)
