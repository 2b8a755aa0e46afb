"""``flash-attn-rocm run``: exit codes, restarts, signals, the terminal.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from helpers.commands import command

from flash_attn_rocm._commands import main, run


@pytest.fixture
def supervise(capsys, tmp_path, monkeypatch):
    """supervise(shell script, *options) -> (code, log lines); runs in tmp_path."""
    monkeypatch.chdir(tmp_path)

    def call(script, *options, backoff=0.01):
        words = ("run", "--backoff", backoff, *options, "--", "sh", "-c")
        code, out, err = command(main, capsys, *words, f"ulimit -c 0; {script}")
        assert out == ""
        return code, err.splitlines()

    return call


# ---- exit codes --------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 7, 134])
def test_an_exit_code_is_passed_on_and_nothing_is_restarted(supervise, tmp_path, code):
    assert supervise(f"echo ran >> log; exit {code}") == (code, [])
    assert (tmp_path / "log").read_text() == "ran\n"


@pytest.mark.parametrize("name", ["KILL", "TERM", "INT", "HUP", "QUIT"])
def test_a_process_that_was_ended_is_not_restarted(supervise, tmp_path, name):
    number = getattr(signal, f"SIG{name}")
    assert supervise(f"echo ran >> log; kill -{name} $$") == (128 + number, [])
    assert (tmp_path / "log").read_text() == "ran\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["no-such-command"], 127, "no-such-command: not found"),
        (["./none"], 127, "./none: not found"),
        (["./plain"], 126, "./plain: Permission denied"),
        (["."], 126, ".: Permission denied"),
    ],
)
def test_what_cannot_be_started_gives_one_line_and_the_shells_code(
    capsys, tmp_path, monkeypatch, words, code, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("exit 0\n")
    got, out, err = command(main, capsys, "run", "--", *words)
    assert (got, out, err) == (code, "", f"flash-attn-rocm run: {message}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a command after --"),
        (["--"], "expected a command after --"),
        (["--restarts", "-1", "--", "true"], "--restarts"),
        (["--restarts", "many", "--", "true"], "--restarts"),
        (["--restarts", "1.5", "--", "true"], "--restarts"),
        (["--backoff", "-1", "--", "true"], "--backoff"),
        (["--backoff", "nan", "--", "true"], "--backoff"),
        (["--backoff", "inf", "--", "true"], "--backoff"),
        (["--nonsense", "--", "true"], "--nonsense"),
    ],
    ids=str,
)
def test_bad_usage_gives_one_line_and_exit_code_2(capsys, words, message):
    code, out, err = command(main, capsys, "run", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_the_commands_own_options_and_dashes_are_left_alone(capsys, tmp_path):
    script = 'printf "%s\\n" "$@" > "$0"'
    words = ("run", "--", "sh", "-c", script, tmp_path / "log", "--json", "--", "-h")
    assert command(main, capsys, *words)[0] == 0
    assert (tmp_path / "log").read_text().split() == ["--json", "--", "-h"]


def test_a_closed_pipe_ends_the_command_as_from_a_shell(supervise):
    """Python ignores SIGPIPE, and what is ignored at a start stays so."""
    assert supervise("kill -PIPE $$")[0] == 128 + signal.SIGPIPE


# ---- restarts ----------------------------------------------------------------

STATE = "echo $FLASH_ATTN_ROCM_RESTARTS ${FLASH_ATTN_ROCM_DEVICE-unset} >> log"


@pytest.mark.parametrize("name", ["ABRT", "SEGV", "BUS"])
def test_after_a_fault_it_restarts_a_bounded_number_of_times(
    supervise, tmp_path, monkeypatch, name
):
    monkeypatch.delenv("FLASH_ATTN_ROCM_DEVICE", raising=False)
    code, log = supervise(f"{STATE}; kill -{name} $$")
    assert code == 128 + getattr(signal, f"SIG{name}")
    seen = (tmp_path / "log").read_text().splitlines()
    assert seen == ["0 unset", "1 unset", "2 unset", "3 off"]
    assert len(log) == 3
    for number, (line, pause) in enumerate(zip(log, ("0.01", "0.02", "0.04")), 1):
        assert line.startswith(f"flash-attn-rocm run: sh died of SIG{name} after ")
        assert f"restart {number} of 3 in {pause} s" in line
        assert ("FLASH_ATTN_ROCM_DEVICE=off" in line) == (number == 3)


def test_the_only_restart_is_the_last_and_runs_stock(supervise, tmp_path):
    code, log = supervise(
        f"{STATE}; test -e again || {{ >again; kill -ABRT $$; }}", "--restarts", 1
    )
    assert (code, len(log)) == (0, 1)
    assert (tmp_path / "log").read_text().endswith("1 off\n")


def test_no_restarts_means_none(supervise, tmp_path):
    assert supervise(f"{STATE}; kill -ABRT $$", "--restarts", 0) == (134, [])
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_pauses_grow_to_a_minute_and_no_further(supervise, monkeypatch):
    monkeypatch.setattr(run._Signals, "wait", waited := _Waits())
    supervise("kill -ABRT $$", "--restarts", 4, backoff=20)
    assert waited.pauses == [20, 40, 60, 60]


class _Waits:
    """_Signals.wait that returns at once from a pause."""

    def __init__(self):
        self.pauses = []

    def __call__(self, seconds):
        if seconds is not None:
            self.pauses.append(seconds)
        return []


def test_what_a_dead_command_left_running_is_ended_before_the_restart(
    supervise, tmp_path
):
    first = "sleep 100 & echo $! > pid; kill -ABRT $$"
    then = "kill -0 $(cat pid) 2> error && exit 9; exit 0"
    assert supervise(f"if [ -e pid ]; then {then}; else {first}; fi")[0] == 0
    assert (tmp_path / "error").read_text() != ""


# ---- signals -----------------------------------------------------------------

# The module alone needs neither torch nor the package, whose import takes seconds.
ALONE = """
import argparse, importlib.util, os, sys
spec = importlib.util.spec_from_file_location("run_command", sys.argv.pop(1))
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
def main(words):
    parser = argparse.ArgumentParser()
    module.add(parser)
    options = parser.parse_args(words[1:])
    return options.run(options)
"""


def alone(code, *words):
    """stdout and stderr of the code, in a process of its own."""
    command = [sys.executable, "-c", ALONE + code, run.__file__, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


# A thread sends what the first argument lists, each when the command has written so
# many lines. A signal that is not passed on ends this process.
SIGNALLED = """
import json, pathlib, signal, threading, time
steps, options, script = map(json.loads, sys.argv[1:4])
os.chdir(sys.argv[4])
log = pathlib.Path("log")
log.touch()
def send():
    for count, number in steps:
        while len(log.read_text().splitlines()) < count:
            time.sleep(0.01)
        os.kill(os.getpid(), number)
if "ignored" in options:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
threading.Thread(target=send, daemon=True).start()
start = time.monotonic()
code = main(["run", *options.get("words", []), "--", "sh", "-c", script])
print(json.dumps([code, log.read_text().split("\\n")[:-1], time.monotonic() - start]))
"""


@pytest.fixture
def signalled(tmp_path):
    """signalled(steps, script) -> (code, what the script wrote, seconds, stderr)."""

    def call(steps, script, **options):
        words = [json.dumps(x) for x in (steps, options, f"ulimit -c 0; {script}")]
        out, error = alone(SIGNALLED, *words, tmp_path)
        return (*json.loads(out), error)

    return call


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT", "USR1"])
def test_a_signal_reaches_the_commands_whole_group(signalled, name):
    loop = "while :; do sleep 0.05; done"
    inner = f"trap 'echo inner >> log; exit' {name}; echo up >> log; {loop}"
    script = f"trap 'echo outer >> log; exit 5' {name}; sh -c \"{inner}\"; :"
    code, log, _, _ = signalled([(1, getattr(signal, f"SIG{name}"))], script)
    assert (code, log) == (5, ["up", "inner", "outer"])


def test_a_second_interrupt_reaches_it_too(signalled):
    script = (
        "trap 'echo caught >> log; trap - INT' INT; echo up >> log; "
        "while :; do sleep 0.05; done"
    )
    steps = [(1, signal.SIGINT), (2, signal.SIGINT)]
    code, log, _, _ = signalled(steps, script)
    assert (code, log) == (130, ["up", "caught"])


def test_what_aborts_when_asked_to_end_is_not_restarted(signalled):
    script = "trap 'kill -ABRT $$' TERM; echo up >> log; while :; do sleep 0.05; done"
    code, log, _, error = signalled([(1, signal.SIGTERM)], script)
    assert (code, log) == (134, ["up"]) and "restart" not in error


def test_a_signal_ends_the_pause_before_a_restart(signalled):
    words = ["--backoff", "50"]
    script = "echo up >> log; kill -ABRT $$"
    code, log, seconds, _ = signalled([(1, signal.SIGTERM)], script, words=words)
    assert (code, log) in ((143, ["up"]), (134, ["up"]))  # before or in the pause
    assert seconds < 20


def test_what_was_ignored_at_the_start_stays_so(signalled):
    """As with nohup."""
    script = "kill -HUP $$; echo up >> log; sleep 0.3; echo lived >> log"
    code, log, _, _ = signalled([(1, signal.SIGHUP)], script, ignored=True)
    assert (code, log) == (0, ["up", "lived"])


# ---- the terminal ------------------------------------------------------------

TERMINAL = """
import pty, select, signal, time
signal.alarm(30)
pid, terminal = pty.fork()
if pid == 0:
    code = main(["run", "--restarts", "0", "--", "sh", "-c", sys.argv[1]])
    assert os.tcgetpgrp(0) == os.getpgrp(), "the terminal was not taken back"
    print("supervisor", code, flush=True)
    os._exit(0)
seen = b""
def until(word):
    global seen
    end = time.monotonic() + 15
    while word not in seen:
        assert select.select([terminal], [], [], end - time.monotonic())[0], seen
        seen += os.read(terminal, 1024)
    seen = seen.split(word, 1)[1]
"""


def test_the_command_reads_the_terminal_and_gets_its_interrupts_once():
    script = (
        "trap 'count=$((count + 1)); echo caught $count' INT; read x; echo up; "
        "read y; read z; echo read $z; exit 6"
    )
    steps = """
os.write(terminal, b"go\\n")  # read by what has the terminal
until(b"up")
os.write(terminal, b"\\x03")
until(b"caught 1")
os.write(terminal, b"first\\nsecond\\nthird\\n")
until(b"read ")
until(b"supervisor 6")
assert b"caught" not in seen
"""
    alone(TERMINAL + steps, script)


def test_the_command_has_the_terminal_without_asking_for_it():
    script = f"""exec {sys.executable} -S -c '
import os, time
while os.tcgetpgrp(0) != os.getpgrp(): time.sleep(0.01)
print("foreground", flush=True)
'"""
    alone(TERMINAL + 'until(b"foreground")\nuntil(b"supervisor 0")', script)


def test_stopping_the_command_stops_the_job_and_both_go_on():
    script = "read x; echo up; read x; echo read $x"
    steps = """
os.write(terminal, b"go\\n")  # read by what has the terminal
until(b"up")
os.write(terminal, b"\\x1a")
_, status = os.waitpid(pid, os.WUNTRACED)
assert os.WIFSTOPPED(status)
os.killpg(pid, signal.SIGCONT)
os.write(terminal, b"words\\n")
until(b"read words")
until(b"supervisor 0")
"""
    alone(TERMINAL + steps, script)
