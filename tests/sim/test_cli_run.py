"""``hipsim run``: arguments, files, reports.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_tools import float_bytes, make_folder, npy
from helpers.commands import command

import hipsim
from hipsim.arguments import ArgumentList
from hipsim.cli import main


@pytest.fixture
def folder(compile_hip, tmp_path) -> Path:
    return make_folder(compile_hip, tmp_path)


@pytest.fixture
def run(folder, capsys, monkeypatch):
    """run(kernel, arguments, *options) -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(folder.parent)  # paths are relative to the JSON file
    before = {name: hipsim.get_option(name) for name in ("check", "seed")}

    def call(kernel, arguments, *options, grid="1,1,1", block="64,1,1"):
        path = folder / "args.json"
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        path.write_text(text)
        words = ["run", folder / "k.co", kernel, "--grid", grid, "--block", block]
        words += ["--args", path, "--out", folder / "out", *options]
        return command(main, capsys, *words)

    yield call
    for name, value in before.items():
        hipsim.set_option(name, value)


def scale_arguments(**changes):
    out = {"buffer": "o.npy", "access": "w", **changes}
    return [out, {"buffer": "a.npy", "access": "r"}, {"f32": 0.5}, {"i32": 4}]


def test_run_writes_buffers_with_their_own_header(run, folder):
    before = (folder / "o.npy").read_bytes()
    code, out, err = run("scale", scale_arguments())
    assert (code, err) == (0, "")
    written = (folder / "out" / "o.npy").read_bytes()
    assert written == before[:-16] + float_bytes(0.5, 1, 1.5, 2)
    assert (folder / "o.npy").read_bytes() == before
    assert sorted(p.name for p in (folder / "out").iterdir()) == ["o.npy"]
    assert re.search(r"^scale: \d+ wave instructions, 1 wave, 1 workgroup$", out, re.M)


def test_run_fills_pointers_inside_a_struct(run, folder):
    job = {
        "struct": bytes(16).hex() + struct.pack("<q", 4).hex(),
        "pointers": [
            {"offset": 0, "buffer": "o.npy", "access": "w"},
            {"offset": 8, "buffer": "a.npy", "access": "r"},
        ],
    }
    code, _, err = run("move", [job], block="1,1,1")
    assert (code, err) == (0, "")
    written = (folder / "out" / "o.npy").read_bytes()
    assert written.endswith(float_bytes(2, 3, 4, 5))


def test_run_treats_a_file_named_twice_as_one_buffer(run, folder):
    (folder / "sub").mkdir()
    both = [
        {"buffer": "a.npy", "access": "w"},
        {"buffer": "sub/../a.npy", "access": "r"},
        {"f32": 2},
        {"bytes": "04000000"},
    ]
    code, _, err = run("scale", both)
    assert (code, err) == (0, "")
    assert (folder / "out" / "a.npy").read_bytes().endswith(float_bytes(2, 4, 6, 8))


def test_run_writes_a_link_under_its_own_name(run, folder):
    (folder / "link.npy").symlink_to("a.npy")
    both = scale_arguments(buffer="link.npy", access="rw")
    code, _, err = run("scale", both)
    assert (code, err) == (0, "")
    written = [p.name for p in (folder / "out").iterdir()]
    assert written == ["link.npy"]  # and still one buffer with its target
    data = (folder / "out" / "link.npy").read_bytes()
    assert data.endswith(float_bytes(0.5, 1, 1.5, 2))


def test_run_takes_raw_files_and_wide_numbers(run, folder):
    (folder / "raw.bin").write_bytes(bytes(8))
    out = {"buffer": "raw.bin", "access": "rw"}
    code, _, err = run("add", [out, {"i64": -(2**40)}, {"i32": -3}], block="1,1,1")
    assert (code, err) == (0, "")
    written = (folder / "out" / "raw.bin").read_bytes()
    assert struct.unpack("<q", written) == (-(2**40) - 3,)


def test_run_reports_a_fault_with_exit_code_1_and_writes_nothing(run, folder):
    (folder / "o.npy").write_bytes(npy(bytes(12), "'<f4'", "(3,)"))
    code, out, err = run("scale", scale_arguments(), "--check", "1")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "scale: illegal address at pc" in err and "lane 3" in err
    assert not (folder / "out").exists()


@pytest.mark.parametrize("level", ["0", "1", "2"])
@pytest.mark.parametrize("order", ["xy", "yx"])
def test_an_element_past_a_buffers_end_is_in_no_other_buffer(run, folder, level, order):
    for name in "xy":
        (folder / f"{name}.bin").write_bytes(bytes(4096))  # exactly a page
    arguments = [
        {"buffer": f"{order[0]}.bin", "access": "w"},
        {"buffer": f"{order[1]}.bin", "access": "r"},
    ]
    code, out, err = run("shift", arguments, "--check", level, block="1024,1,1")
    assert (code, out) == (1, "")
    assert "shift: illegal address at pc" in err
    assert f"lane 63, address {order[1]}.bin + 0x1000 (argument 1), 4 bytes" in err


def test_reports_name_every_argument_of_a_buffer_and_places_before_it(run, folder):
    both = {"buffer": "a.npy", "access": "rw"}
    code, _, err = run("shift", [both, both])
    assert code == 1 and "address a.npy + 0x10 (argument 0, argument 1)" in err
    before = ArgumentList(folder / "args.json")
    near = before.values[0].address - 4
    assert before.locate(f"x: address {near:#x}, 4 bytes, pc 0x10") == (
        "x: address a.npy - 0x4 (argument 0, argument 1), 4 bytes, pc 0x10"
    )
    assert before.locate("address 0x10") == "address 0x10 (near no buffer)"


def test_reports_name_the_pointer_inside_a_struct(run, folder):
    pointers = [
        {"offset": 0, "buffer": "o.npy", "access": "w"},
        {"offset": 8, "buffer": "a.npy", "access": "r"},
    ]
    job = {"struct": bytes(16).hex() + struct.pack("<q", 5).hex(), "pointers": pointers}
    code, _, err = run("move", [job], block="1,1,1")
    assert code == 1
    assert "address a.npy + 0x10 (argument 0, pointer at byte 8), 4 bytes" in err


def test_run_counts_misaligned_accesses_at_level_1(run, folder):
    arguments = scale_arguments()[:2]
    for level, words in (("0", "1 workgroup\n"), ("1", ", 1 misaligned access\n")):
        code, out, _ = run("odd", arguments, "--check", level, block="1,1,1")
        assert code == 0 and out.endswith(words)
    written = (folder / "out" / "o.npy").read_bytes()
    assert written[-16:-12] == float_bytes(1, 2)[1:5]


def test_run_takes_every_check_level_and_any_seed(run):
    for options in (("0", "0"), ("1", "1"), ("2", str(2**63 - 1))):
        words = zip(("--check", "--seed"), options)
        code, _, err = run(
            "scale", scale_arguments(), *(w for pair in words for w in pair)
        )
        assert (code, err) == (0, "")
        got = [str(hipsim.get_option(name)) for name in ("check", "seed")]
        assert got == list(options)


def test_run_writes_a_profile_and_prints_bounds_first(run, folder):
    path = folder / "p.json"
    code, out, err = run("scale", scale_arguments(), "--profile", path)
    assert (code, err) == (0, "")
    assert hipsim.get_option("profile") == 0
    (launch,) = json.loads(path.read_text())["launches"]
    assert launch["kernel"] == "scale" and launch["counters"]["SQ_WAVES"] == 1
    assert launch["grid"] == [1, 1, 1] and launch["block"] == [64, 1, 1]
    headline = out.index("Simulated")
    assert out.index(f"wrote {path}") < headline
    assert headline < out.index("bound by") < out.index("error bar")


def test_a_faulting_run_leaves_no_profile(run, folder):
    (folder / "o.npy").write_bytes(npy(bytes(12), "'<f4'", "(3,)"))
    options = ("--profile", folder / "p.json", "--check", "1")
    code, out, _ = run("scale", scale_arguments(), *options)
    assert (code, out) == (1, "")
    assert not (folder / "p.json").exists()
    assert hipsim.get_option("profile") == 0


def test_run_without_arguments(folder, capsys):
    words = ("run", folder / "k.co", "idle", "--grid", "3,1,1", "--block", "64,1,1")
    code, out, err = command(main, capsys, *words)
    assert (code, err) == (0, "")
    assert "3 workgroups" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (scale_arguments()[:3], "scale: expected 4 arguments, got 3"),
        ([*scale_arguments()[:3], {"i64": 4}], "argument 3"),
        (scale_arguments(access="x"), "argument 0: access"),
        (scale_arguments(buffer="none.npy"), "none.npy: No such file"),
        (scale_arguments(extra=1), "argument 0: expected buffer and access"),
        ([*scale_arguments()[:3], {"i32": 2**32}], "argument 3: i32"),
        ([*scale_arguments()[:3], {"i32": 4.0}], "argument 3: i32"),
        ([*scale_arguments()[:3], {"i32": True}], "argument 3: i32"),
        ([{"f32": "1"}], "argument 0: f32"),
        ([{"f32": 1e39}], "argument 0: f32: expected a number of 32 bits, got 1e+39"),
        ([{"f32": 10**400}], "argument 0: f32: expected a number of 32 bits, got 1000"),
        ([{"bytes": "0g"}], "argument 0: bytes: expected bytes in hexadecimal"),
        ([{"bytes": 5}], "argument 0: bytes: expected bytes in hexadecimal, got 5"),
        ([{"struct": [1]}], "argument 0: struct: expected bytes in hexadecimal"),
        ([{"struct": "00", "pointers": 5}], "pointers: expected a list, got 5"),
        (scale_arguments(buffer=5), "argument 0: buffer: expected a file name, got 5"),
        (scale_arguments(buffer="a\0b"), "argument 0: buffer: expected a file name"),
        (scale_arguments(access=["r"]), "access: expected r, w or rw, got ['r']"),
        ([{"struct": "00", "pointers": [{"offset": 0}]}], "argument 0"),
        ([{}], "argument 0"),
        ([5], "argument 0"),
        ({}, "expected a list"),
        ("[", "not JSON"),
        ("[" * 100000, "not JSON"),
    ],
    ids=str,
)
def test_run_refuses_bad_arguments_in_one_line(run, folder, arguments, words):
    code, out, err = run("scale", arguments)
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1
    assert not (folder / "out").exists()


def test_run_refuses_a_pointer_outside_its_struct(run):
    pointer = {"offset": 20, "buffer": "o.npy", "access": "w"}
    code, _, err = run("move", [{"struct": "00" * 24, "pointers": [pointer]}])
    assert code == 2 and "pointer at byte 20" in err


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (npy(bytes(16), "'<f4'", "(2, 2)", fortran="True"), "Fortran order"),
        (npy(bytes(16), "'|O'", "(2,)"), "dtype"),
        (npy(bytes(16), "[('a', '<f4')]", "(4,)"), "dtype"),
        (npy(bytes(16), "'>f4'", "(4,)"), "little-endian"),
        (npy(bytes(12), "'<f4'", "(2, 2)"), "expected"),
        (npy(bytes(20), "'<f4'", "(2, 2)"), "expected"),
        (npy(bytes(16), "'<f4'", "(99999999999, 99999999999)"), "expected"),
        (npy(bytes(16), "'<f4'", "(-2, -2)"), "malformed"),
        (npy(bytes(16), "'<f4'", "4"), "malformed"),
        (npy(bytes(16), "__import__('os')", "(4,)"), "malformed"),
        (npy(bytes(16), "'<f4'", "(4,)", 4), "version 1 to 3"),
        (npy(bytes(16), "'<f4'", "(4,)")[:40], "truncated"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "truncated"),
        (b"", "not an .npy file"),
    ],
)
def test_run_refuses_bad_npy_files(run, folder, data, words):
    (folder / "o.npy").write_bytes(data)
    code, out, err = run("scale", scale_arguments())
    assert (code, out) == (2, "")
    assert "o.npy" in err and words in err and err.count("\n") == 1


def test_run_reads_every_npy_version_and_dtype(run, folder):
    for version in (1, 2, 3):
        for dtype, shape in (("'<f4'", "(4,)"), ("'|u1'", "(16,)"), ("'<V2'", "(8,)")):
            (folder / "o.npy").write_bytes(npy(bytes(16), dtype, shape, version))
            assert run("scale", scale_arguments())[0] == 0


def test_run_refuses_two_outputs_of_one_name(run, folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "o.npy").write_bytes((folder / "o.npy").read_bytes())
    arguments = scale_arguments()
    arguments[1] = {"buffer": "sub/o.npy", "access": "rw"}
    code, _, err = run("scale", arguments)
    assert code == 2 and "two written buffers" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--check", "3"], "expected 0, 1 or 2"),
        (["--seed", "-1"], "expected a number from 0"),
        (["--seed", str(2**63)], "expected a number from 0"),
        (["--profile", "none/p.json"], "expected an existing folder"),
        (["--profile", "."], "expected a file to write"),
        (["--profile", ""], "expected a file to write"),
        (["--grid", "1,1"], "expected X,Y,Z"),
        (["--grid", "1,1,-1"], "expected X,Y,Z"),
        (["--block", "a,1,1"], "expected X,Y,Z"),
        (["--lds", "-4"], "expected a number of bytes"),
        (["--lds", "65537"], "65537 of dynamic LDS"),
        (["--grid", "0,1,1"], "grid (0,1,1)"),
        (["--block", "2000,1,1"], "at most 1024"),
        (["--block", f"{2**32},1,1"], "block: expected"),
        (["--nonsense"], "--nonsense"),
    ],
    ids=str,
)
def test_run_refuses_bad_options_in_one_line(run, options, words):
    code, out, err = run("scale", scale_arguments(), *options)
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_run_takes_one_number_for_a_line_of_workgroups(run):
    code, out, _ = run("scale", scale_arguments(), "--grid", "2", "--block", "128")
    assert code == 0 and ", 4 waves, 2 workgroups\n" in out


def test_run_says_that_level_2_found_nothing(run):
    for level, said in (("0", False), ("1", False), ("2", True)):
        code, out, _ = run("scale", scale_arguments(), "--check", level)
        assert code == 0 and out.endswith("check level 2: no finding\n") == said


def test_run_warns_that_a_sample_is_incomplete(run, option):
    for sample, grid, warns in ((1, "4", True), (0, "4", False), (1, "1", False)):
        option("sample", sample)
        code, _, err = run("scale", scale_arguments(), "--grid", grid)
        assert code == 0
        assert err == warns * (
            "hipsim: HIPSIM_SAMPLE=1: only 1 of 4 workgroups ran, results are "
            "incomplete\n"
        )


def test_run_ignores_the_profile_variable_and_says_so(run, option):
    option("profile", 1)
    code, _, err = run("scale", scale_arguments())
    assert (code, err) == (0, "hipsim: HIPSIM_PROFILE is ignored, use --profile FILE\n")
    assert hipsim.get_option("profile") == 1
    assert hipsim.take_profile()["launches"] == []


def test_run_needs_a_folder_for_written_buffers(folder, capsys):
    (folder / "args.json").write_text(json.dumps(scale_arguments()))
    shape = ("--grid", "1,1,1", "--block", "64,1,1", "--args", folder / "args.json")
    code, _, err = command(main, capsys, "run", folder / "k.co", "scale", *shape)
    assert code == 2 and "--out" in err and "o.npy" in err
    taken = folder / "a.npy"  # a file where the folder should be
    code, _, err = command(
        main, capsys, "run", folder / "k.co", "scale", *shape, "--out", taken
    )
    assert code == 2 and "a.npy" in err and err.count("\n") == 1


def test_run_refuses_an_unknown_kernel(run):
    code, _, err = run("scales", scale_arguments())
    assert code == 2 and "scales" in err


# ---- in a process of its own -------------------------------------------------


def start(folder, *words: object) -> subprocess.Popen[str]:
    """The command in a process of its own that Ctrl-C reaches."""
    script = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from hipsim.cli import main
sys.exit(main(sys.argv[1:]))
"""
    root = Path(hipsim.__file__).resolve().parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root), "HIPSIM_THREADS": "2"},
    )


RUN = ("--block", "64,1,1", "--args", "args.json", "--out", "out")


@pytest.mark.parametrize("name", ["pipe.npy", "pipe.bin"])
def test_run_refuses_a_pipe_at_once(folder, name):
    os.mkfifo(folder / name)
    arguments = scale_arguments()
    arguments[1]["buffer"] = name
    (folder / "args.json").write_text(json.dumps(arguments))
    with start(folder, "run", "k.co", "scale", "--grid", "1,1,1", *RUN) as process:
        try:
            _, err = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode == 2
    assert f"{name}: not a regular file" in err and err.count("\n") == 1


def test_ctrl_c_ends_an_endless_kernel(folder):
    argument = {"buffer": "o.npy", "access": "w"}
    (folder / "args.json").write_text(json.dumps([argument]))
    with start(folder, "run", "k.co", "forever", "--grid", "2,1,1", *RUN) as process:
        try:
            tasks = Path(f"/proc/{process.pid}/task")
            give_up = time.monotonic() + 10
            while len(list(tasks.iterdir())) < 2:  # the launch starts a thread
                assert process.poll() is None and time.monotonic() < give_up
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            process.wait(timeout=10)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert not (folder / "out").exists()
