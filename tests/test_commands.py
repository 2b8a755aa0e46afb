"""The ``flash-attn-rocm`` command: scripts run as Python runs them, exit codes.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import ROOT, needs_simulator
from helpers.commands import command
from helpers.profile_sample import launch, sample

import flash_attn_rocm as fa
from flash_attn_rocm import _profile, _simulate
from flash_attn_rocm._commands import leftover, main

ATTENTION = """
import sys
import torch
import torch.nn.functional as F
q = torch.randn(1, 1, 70, 64, dtype=torch.float16)
out = F.scaled_dot_product_attention(q, q, q)
"""


class FakeSimulator:
    """hipsim, with one launch for each set_option("profile", 1)."""

    def __init__(self):
        self.waiting = []

    def get_option(self, name):
        return 0

    def set_option(self, name, value):
        self.waiting += [launch("kernel")] * value

    def take_profile(self):
        taken, self.waiting = self.waiting, []
        return {**sample(), "launches": taken}


@pytest.fixture
def profile(tmp_path, capsys, monkeypatch):
    """profile(source, *words, options=()) -> (code, stdout, stderr)."""
    simulator = FakeSimulator()
    monkeypatch.setattr(_profile, "_simulator", lambda: simulator)
    monkeypatch.setattr(_simulate, "missing_for", lambda arch: None)

    def call(source, *words, options=()):
        script = tmp_path / "script.py"
        script.write_text(source)
        return command(main, capsys, "profile", *options, script, *words)

    return call


def shell(*words, cwd=ROOT, **environ):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# ---- usage -------------------------------------------------------------------


def test_module_is_the_command():
    done = shell("-m", "flash_attn_rocm", "--version")
    assert (done.returncode, done.stdout) == (0, f"flash-attn-rocm {fa.__version__}\n")
    assert shell("-m", "flash_attn_rocm").returncode == 2


def test_help_names_every_command_and_option(capsys):
    code, out, _ = command(main, capsys, "--help")
    assert code == 0
    assert all(name in out for name in ("profile", "doctor", "run", "breaker"))
    code, out, _ = command(main, capsys, "profile", "--help")
    assert code == 0
    for option in ("--json", "--trace", "--plot", "--arch", "--no-patch", "script.py"):
        assert option in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["profile"], "script.py"),
        (["profile", "--nonsense", "x.py"], "--nonsense"),
        (["profile", "none.py"], "none.py: No such file"),
        (["profile", "."], "."),
        (["profile", "--arch", "gfx1100", "x.py"], "gfx1100"),
        (["profile", "--json", "none/p.json", "x.py"], "existing folder"),
        (["profile", "--trace", "none/p.json", "x.py"], "existing folder"),
        (["profile", "--plot", "none/p.png", "x.py"], "existing folder"),
        (["profile", "--plot", "p.xyz", "x.py"], "--plot p.xyz: expected a suffix"),
        (["profile", "--json", ".", "x.py"], "expected a file to write"),
        (["profile", "--trace", "", "x.py"], "expected a file to write"),
    ],
    ids=str,
)
def test_bad_usage_gives_one_line_and_exit_code_2(
    capsys, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("raise AssertionError('the script was run')")
    code, out, err = command(main, capsys, *words)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


def test_a_plot_without_matplotlib_is_refused_before_the_run(profile, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = profile("print('ran')", options=["--plot", "p.png"])
    assert (code, out) == (2, "")
    assert "matplotlib, which is not installed" in err and err.count("\n") == 1


# ---- the script's world ------------------------------------------------------

WORLD = """
import json, sys
from dataclasses import dataclass
import neighbour
@dataclass
class Seen:
    "Pickle and dataclasses look for this class in sys.modules['__main__']."
    x: int
facts = dict(
    argv=sys.argv, path=sys.path, name=__name__, file=__file__, doc=__doc__,
    spec=__spec__, package=__package__, cached=__cached__, value=neighbour.VALUE,
    loader=type(__loader__).__name__, main=sys.modules["__main__"].Seen is Seen,
    names=sorted(set(globals()) - {"__annotations__"}),  # not in every Python
)
print(json.dumps(facts))
"""


def test_a_script_sees_what_python_would_show_it(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "neighbour.py").write_text("VALUE = 5\n")
    (tmp_path / "inner" / "world.py").write_text(WORLD)
    words = ["inner/world.py", "--json", "x", "-h"]
    plain = shell(*words, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    ours = shell("-m", "flash_attn_rocm", "profile", *words, cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    assert json.loads(ours.stdout.splitlines()[0]) == json.loads(plain.stdout)
    assert not (tmp_path / "x").exists(), "the script's options were taken for ours"


def test_the_process_is_as_before_after_the_script(profile):
    before = sys.argv, sys.path, sys.modules["__main__"]
    profile("import sys\nsys.argv.append('x')\nsys.path.append('y')", "a")
    after = sys.argv, sys.path, sys.modules["__main__"]
    assert all(a is b for a, b in zip(before, after))
    assert "y" not in sys.path and not fa.status()["patched"]


# ---- the report --------------------------------------------------------------


def test_the_report_follows_the_scripts_output(profile):
    code, out, err = profile("print('from the script')")
    assert (code, err) == (0, "")
    assert out.startswith("from the script\n\nSimulated gfx906")
    assert "kernel" in out and "error bar" in out


def test_files_are_written_after_the_run(profile, tmp_path):
    pytest.importorskip("matplotlib", reason="no matplotlib")
    files = {name: tmp_path / f"file.{name}" for name in ("json", "trace", "png")}
    options = ["--json", files["json"], "--trace", files["trace"]]
    code, out, _ = profile("", options=[*options, "--plot", files["png"]])
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("wrote")] == [
        f"wrote {path}" for path in files.values()
    ]
    (row,) = json.loads(files["json"].read_text())["launches"]
    assert row["kernel"] == "kernel"
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit(0)", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('said why')", 1, "said why\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("x = (", 1, "SyntaxError"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
    ],
)
def test_the_exit_code_is_the_scripts_and_the_report_comes_anyway(
    profile, source, code, words
):
    got, out, err = profile(source)
    assert got == code
    assert words in err and "_commands" not in err
    assert "error bar" in out


def test_a_traceback_begins_in_the_script(profile, tmp_path):
    _, _, err = profile("def f():\n    1 / 0\nf()\n")
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    script = tmp_path / "script.py"
    assert lines[1] == f'  File "{script}", line 3, in <module>'


def test_threads_that_a_script_leaves_running_are_waited_for(profile):
    source = "import threading\nthreading.Timer(0.2, print, ['late']).start()"
    _, out, _ = profile(source)
    assert out.startswith("late\n\nSimulated")


def test_a_scripts_pool_of_threads_does_its_work_and_ends(profile):
    source = """
        from concurrent.futures import ThreadPoolExecutor
        from threading import Timer
        import time
        pool = ThreadPoolExecutor(1)
        pool.submit(time.sleep, 0.2)
        pool.submit(print, "late")
        rescue = Timer(20, pool.shutdown)
        rescue.daemon = True
        rescue.start()
    """
    began = time.monotonic()
    _, out, err = profile(textwrap.dedent(source))
    assert time.monotonic() - began < 10
    assert out.startswith("late\n\nSimulated") and err == ""


def test_threads_that_a_script_did_not_start_are_not_waited_for(profile):
    ended = threading.Event()
    others = ThreadPoolExecutor(1)
    waiting = others.submit(ended.wait, 20)
    rescue = threading.Timer(10, others.shutdown)
    rescue.start()
    try:
        profile("")
        assert waiting.running()
        ended.set()
        assert others.submit(int, "5").result() == 5, "the pool was shut"
    finally:
        rescue.cancel()
        ended.set()
        others.shutdown()


def test_a_thread_that_is_waited_for_long_is_named(profile, monkeypatch):
    monkeypatch.setattr(leftover, "_PATIENCE_S", 0.1)
    source = """
        from threading import Timer
        for name, seconds in (("long", 0.6), ("other", 0.6), ("short", 0.0)):
            timer = Timer(seconds, int)
            timer.name = name
            timer.start()
    """
    _, out, err = profile(textwrap.dedent(source))
    lines = err.splitlines()
    assert [line.split(";")[0].split()[-1] for line in lines] == ["long", "other"]
    assert all("Ctrl-C ends the wait" in line for line in lines)
    assert "error bar" in out


def test_ctrl_c_ends_the_wait_and_the_report_comes(profile):
    source = """
        import _thread
        from threading import Event, Thread
        ended = Event()
        Thread(target=ended.wait, args=(20,)).start()
        def interrupt():
            Event().wait(0.3)  # by when the script itself has ended
            _thread.interrupt_main()
            Event().wait(0.3)
            ended.set()
        Thread(target=interrupt, daemon=True).start()
    """
    began = time.monotonic()
    code, out, err = profile(textwrap.dedent(source))
    assert time.monotonic() - began < 10
    assert code == 130 and err.endswith("KeyboardInterrupt\n") and "error bar" in out


# ---- with the simulator ------------------------------------------------------


@needs_simulator
def test_a_scripts_attention_is_simulated_and_profiled(tmp_path):
    (tmp_path / "script.py").write_text(ATTENTION + "sys.exit(3)\n")
    command = ("-m", "flash_attn_rocm", "profile", "--json", "p.json", "script.py")
    done = shell(*command, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    (row,) = json.loads((tmp_path / "p.json").read_text())["launches"]
    assert row["kernel"] == "fa_fwd_f16_d64_plain"
    assert "fa_fwd_f16_d64_plain" in done.stdout and "error bar" in done.stdout


@needs_simulator
def test_no_patch_leaves_the_function_stock(tmp_path):
    (tmp_path / "script.py").write_text(ATTENTION)
    command = ("-m", "flash_attn_rocm", "profile", "--no-patch", "script.py")
    done = shell(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Nothing was simulated." in done.stdout
    assert "patch() was not in force" in done.stdout
