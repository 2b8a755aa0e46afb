"""``flash-attn-rocm`` where what it prints cannot be written.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers import ROOT, needs_simulator

SCRIPTS = {
    "short": "print('from the script')\n",
    "long": "for _ in range(9000): print('from the script')\n",
    "closes": "import sys\nsys.stdout.close()\n",
}
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # a print fails at once, and leaves nothing
COMMANDS = {
    "version": ["--version"],
    "help": ["--help"],
    "doctor": ["doctor", "--no-selftest"],
    "doctor json": ["doctor", "--no-selftest", "--json"],
    "list": ["breaker", "list"],
    "list json": ["breaker", "list", "--json"],
    "reset": ["breaker", "reset"],
}
SOAK = ["soak", "--calls", "2", "--faults", "none", "--journal", "journal"]


def start(words, folder, stdout, **options):
    """The command in a process, in `folder`; its exit code and stderr."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)}
    env.pop("FLASH_ATTN_ROCM_CACHE_DIR", None)
    env.pop("PYTHONUNBUFFERED", None)
    env.update(options.pop("more", {}))
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn_rocm", *words],
        **{"env": env, "cwd": folder, "stdout": stdout, "timeout": 120, **options},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def on_full_disk(words, folder, **options):
    with open("/dev/full", "w") as full:
        return start(words, folder, full, **options)


def on_closed_pipe(words, folder):
    out, into = os.pipe()
    os.close(out)
    try:
        return start(words, folder, into)
    finally:
        os.close(into)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_line_and_exit_code_2(tmp_path, name):
    assert on_full_disk(COMMANDS[name], tmp_path) == (
        *(2,),
        "flash-attn-rocm: stdout: No space left on device\n",
    )


@pytest.mark.parametrize("name", ["version", "list"])
def test_without_a_buffer_it_is_the_same(tmp_path, name):
    assert on_full_disk(COMMANDS[name], tmp_path, more=UNBUFFERED) == (
        *(2,),
        "flash-attn-rocm: stdout: No space left on device\n",
    )


@pytest.mark.parametrize("name", ["help", "doctor", "list json"])
def test_a_closed_pipe_is_quiet(tmp_path, name):
    assert on_closed_pipe(COMMANDS[name], tmp_path) == (2, "")


@needs_simulator
def test_a_soak_on_a_full_disk_keeps_its_files(tmp_path):
    assert on_full_disk([*SOAK, "--report", "report"], tmp_path) == (
        *(2,),
        "flash-attn-rocm: stdout: No space left on device\n",
    )
    assert (tmp_path / "journal").stat().st_size and (tmp_path / "report").exists()


@needs_simulator
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("short", "flash-attn-rocm: stdout: No space left on device\n"),
        ("closes", "flash-attn-rocm: stdout: I/O operation on closed file.\n"),
    ],
)
def test_a_profile_on_a_full_disk_is_one_line(tmp_path, script, said):
    (tmp_path / "script.py").write_text(SCRIPTS[script])
    assert on_full_disk(["profile", "script.py"], tmp_path) == (2, said)


@needs_simulator
def test_what_a_profiled_script_says_of_a_full_disk_is_its_own(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPTS["long"])
    code, err = on_full_disk(["profile", "script.py"], tmp_path)
    *its_own, ours = err.splitlines()
    assert code == 2 and ours == "flash-attn-rocm: stdout: No space left on device"
    assert its_own[0] == "Traceback (most recent call last):"
    assert "script.py" in its_own[1] and its_own[-1].startswith("OSError: ")


@needs_simulator
def test_a_profile_into_a_closed_pipe_is_quiet(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPTS["short"])
    assert on_closed_pipe(["profile", "script.py"], tmp_path) == (2, "")


def test_a_supervised_command_judges_its_output_itself(tmp_path):
    words = ["run", "--", "sh", "-c", "echo word 2> why || exit 7"]
    assert on_full_disk(words, tmp_path) == (7, "")
    assert (tmp_path / "why").read_text() != ""


def closed():
    os.close(1)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            ["breaker", "list"],
            (2, "flash-attn-rocm: stdout: expected one to print to, it is closed\n"),
        ),
        (["run", "--", "sh", "-c", "exit 5"], (5, "")),
    ],
    ids=["list", "run"],
)
def test_without_a_stdout_only_a_supervised_command_runs(tmp_path, words, answer):
    assert start(words, tmp_path, None, preexec_fn=closed) == answer


def test_a_name_that_the_terminal_has_no_letters_for_is_one_line(tmp_path):
    words = ["breaker", "list", "--dir", str(tmp_path / "gr\xfcn")]
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    code, err = start(words, tmp_path, subprocess.DEVNULL, more=ascii_only)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("flash-attn-rocm: stdout: 'ascii' codec can't encode")
