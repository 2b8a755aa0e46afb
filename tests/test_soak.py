"""soak: what it promises it holds, it goes on after a kill, and it sees what is wrong.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import needs_simulator
from helpers.commands import command
from helpers.kernels import FULL

from flash_attn_rocm import (
    _soak,
    _soak_check,
    _soak_faults,
    _soak_journal,
    _soak_workload,
)
from flash_attn_rocm._commands import main
from flash_attn_rocm._soak_report import Summary

pytestmark = needs_simulator

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SECONDS = int(os.environ.get("FA_SOAK_SECONDS", 180 if FULL else 30))


def start(folder, *words):
    """The command in a process of its own, at check level 0 like a user's."""
    return subprocess.Popen(
        [sys.executable, "-m", "flash_attn_rocm", "soak"]
        + [str(word) for word in ("--journal", folder / "journal", *words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HIPSIM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(journal):
    return [json.loads(line) for line in journal.read_text().splitlines()]


def write_plan(path, entries):
    path.write_text(json.dumps(entries))
    return path


# --------------------------------------------------------------------------
# The promises


def test_under_each_fault_in_turn_every_promise_holds(tmp_path):
    rows = _soak_faults.as_data(_soak_faults.default_plan(20 * SECONDS))
    plan = write_plan(tmp_path / "plan.json", rows)
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    words = ("--minutes", SECONDS / 60, "--faults", plan, "--seed", 5)
    # Without a rest: how many calls pass in one is the machine's affair.
    words += ("--cooldown", 0, "--bad-input", 0.02, "--report", report, "--plot", plot)
    out, err = start(tmp_path, *words).communicate(timeout=SECONDS + 300)
    assert report.exists(), err
    data = json.loads(report.read_text())
    broken = {n: p["figures"] for n, p in data["promises"].items() if not p["held"]}
    assert data["held"] and not broken, out
    assert data["wrong"] == data["lost"] == 0
    assert data["fused_share"] >= 0.9
    assert set(data["faults"]) == {e.name for e in _soak_faults.default_plan(None)}
    for kind, fault in data["faults"].items():
        assert fault["struck"] == fault["answered"] > 0, kind
        assert fault["opened"] == fault["closed"], kind
    assert data["bad"] == data["bad_answered_like_stock"] > 0
    assert plot.stat().st_size > 10_000


def test_flips_in_a_backward_are_not_delivered_in_dk_or_dv(tmp_path):
    entry = {"kind": "lds-flip", "calls": [0, 400], "verify": 1, "passes": "backward"}
    plan = write_plan(tmp_path / "plan.json", [entry])
    words = ("--calls", 400, "--faults", plan, "--bad-input", 0, "--fused-share", 0)
    report = tmp_path / "report.json"
    start(tmp_path, *words, "--report", report).communicate(timeout=300)
    assert json.loads(report.read_text())["wrong"] == 0


def test_a_promise_that_is_broken_is_exit_code_1(tmp_path):
    entry = {"kind": "launch", "calls": [0, 20], "every": 4, "expect": ["fused"]}
    plan = write_plan(tmp_path / "plan.json", [entry])
    words = ("--calls", 20, "--faults", plan, "--bad-input", 0, "--fused-share", 0)
    process = start(tmp_path, *words)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1, out
    assert "BROKEN each fault answered as defined" in out
    assert "expected fused, got failed" in out


# --------------------------------------------------------------------------
# Killed and resumed


def test_a_soak_that_is_killed_again_and_again_loses_no_call(tmp_path):
    plan = write_plan(
        tmp_path / "plan.json", _soak_faults.as_data(_soak_faults.default_plan(600))
    )
    words = ("--calls", 600, "--faults", plan, "--batch", 10, "--bad-input", 0.1)
    words += ("--resume", "--fused-share", 0, "--seed", 9)
    choice, kills = random.Random(0), 0
    journal, report = tmp_path / "journal", tmp_path / "report.json"
    for _ in range(3):
        process = start(tmp_path, *words)
        before = journal.stat().st_size if journal.exists() else 0
        while process.poll() is None and (
            not journal.exists() or journal.stat().st_size <= before + 2000
        ):
            time.sleep(0.01)
        time.sleep(choice.uniform(0.0, 0.4))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
    process = start(tmp_path, *words, "--report", report)
    out, err = process.communicate(timeout=300)
    assert kills >= 2 and process.returncode == 0, out + err
    data = json.loads(report.read_text())
    assert data["calls"] == 600 and data["lost"] == data["wrong"] == 0
    assert data["starts"] == kills + 1
    lines = lines_of(journal)
    ranges = [line["batch"] for line in lines if "batch" in line]
    assert [begin for begin, _ in ranges] == [0] + [end for _, end in ranges[:-1]]
    bad = [line["call"] for line in lines if line.get("kind", "good") != "good"]
    injector = _soak_faults.Injector(_soak_faults.read_plan(plan))
    expected = [
        index
        for index in range(600)
        if injector.case(9, index, 0.1, _soak_workload.TINY).kind != "good"
    ]
    assert bad == expected  # each once, in order


def test_ctrl_c_ends_with_a_report_and_can_be_resumed(tmp_path):
    words = ("--calls", 10_000, "--faults", "none", "--batch", 1000)
    process = start(tmp_path, *words)
    journal = tmp_path / "journal"
    while not journal.exists() or len(journal.read_text().splitlines()) < 3:
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "--resume" in out, out + err
    begin, end = next(line["batch"] for line in lines_of(journal) if "batch" in line)
    assert begin == 0 and 0 < end < 1000


@pytest.fixture
def soak(tmp_path, capsys):
    """The command in this process: (exit code, output, errors)."""

    def run(*words):
        return command(main, capsys, "soak", "--journal", tmp_path / "journal", *words)

    return run


FEW = ("--calls", 4, "--faults", "none", "--bad-input", 0)


def test_a_line_that_was_cut_off_is_run_again(soak, tmp_path):
    assert soak(*FEW, "--batch", 2)[0] == 0
    journal = tmp_path / "journal"
    text = journal.read_text()
    at = text.rindex('{"batch"')
    journal.write_text(text[: at + 20])
    assert soak(*FEW, "--batch", 2, "--resume")[0] == 0
    ranges = [line["batch"] for line in lines_of(journal) if "batch" in line]
    assert ranges == [[0, 2], [2, 4]]


def refused(outcome):
    """Exit code 2 and one line that says why."""
    code, out, err = outcome
    assert code == 2 and out == "" and err.count("\n") == 1, outcome
    return err


def test_a_journal_is_not_overwritten(soak):
    assert soak(*FEW)[0] == 0
    assert "--resume" in refused(soak(*FEW))


def test_a_journal_of_another_run_is_refused(soak):
    assert soak(*FEW)[0] == 0
    assert "another seed: expected 8" in refused(soak(*FEW, "--resume", "--seed", 8))


@pytest.mark.parametrize("damage", ["not json", "[1]"])
def test_a_damaged_journal_is_refused_by_its_line(soak, tmp_path, damage):
    assert soak(*FEW)[0] == 0
    journal = tmp_path / "journal"
    rows = journal.read_text().splitlines()
    journal.write_text("\n".join([rows[0], damage, *rows[1:]]) + "\n")
    assert "line 2" in refused(soak(*FEW, "--resume"))


@pytest.mark.parametrize(
    "text", ["my notes", "my notes\n", '{"a": 1}\n', "\xff", '{"soak": 2}\n']
)
def test_a_file_that_is_no_journal_is_refused_and_stays(soak, tmp_path, text):
    journal = tmp_path / "journal"
    journal.write_bytes(text.encode("latin-1"))
    assert "journal" in refused(soak(*FEW, "--resume"))
    assert journal.read_bytes() == text.encode("latin-1")


def test_a_journal_of_another_run_keeps_its_last_lines(soak, tmp_path):
    assert soak(*FEW)[0] == 0
    journal = tmp_path / "journal"
    with open(journal, "a") as file:
        file.write('{"call"')
    before = journal.read_bytes()
    refused(soak(*FEW, "--resume", "--seed", 8))
    assert journal.read_bytes() == before


def test_a_header_that_was_cut_off_is_written_again(soak, tmp_path):
    (tmp_path / "journal").write_text('{"soak": 1, "se')
    assert soak(*FEW, "--resume")[0] == 0


def test_a_device_is_no_journal(capsys):
    words = ("--journal", "/dev/full", *FEW)
    assert "regular file" in refused(command(main, capsys, "soak", *words))


def test_a_full_disk_ends_the_soak_with_one_line(soak, monkeypatch):
    def begin(self, header, resume):
        self._file = open("/dev/full", "w")
        self.write(header)

    monkeypatch.setattr(_soak_journal.Journal, "_begin", begin)
    assert "No space left" in refused(soak(*FEW))


def test_a_result_of_another_kind_is_told_in_json_that_all_can_read(
    soak, tmp_path, monkeypatch
):
    """It is infinitely wrong, and JSON has no infinity."""
    monkeypatch.setattr(_soak_check, "_error_of", lambda *_: math.inf)
    assert soak(*FEW, "--report", tmp_path / "report")[0] == 1
    for name in ("journal", "report"):
        text = (tmp_path / name).read_text("utf-8")
        assert "Infinity" not in text and '"error": null' in text


def test_two_soaks_do_not_share_a_journal(soak, tmp_path):
    import fcntl

    with open(tmp_path / "journal", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "in use by another soak" in refused(soak(*FEW))


# --------------------------------------------------------------------------
# Usage


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--faults", "none"), "--hours, --minutes or --calls"),
        (("--calls", 0), "--calls"),
        (("--hours", "nan"), "--hours"),
        (("--calls", 1, "--cooldown", -1), "--cooldown"),
        (("--calls", 1, "--bad-input", 2), "--bad-input"),
        (("--calls", 1, "--report", "no/such/folder"), "existing folder"),
        (("--calls", 1, "--sysfs", "no/such"), "--sysfs"),
        (("--calls", 1, "--faults", "no/such"), "No such file"),
        (("--calls", 1, "--device", "cuda", "--faults", "none"), "finds no GPU"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_one_line_and_exit_code_2(soak, words, expected):
    assert expected in refused(soak(*words))


GOOD_ENTRY = {"kind": "launch", "calls": [0, 10]}


def _with(text):
    return f'[{{"kind": "launch", {text}}}]'


def _make_huge(path):
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("{", "expected JSON"),
        ({}, "expected a list"),
        ([1], "expected an object"),
        ([{**GOOD_ENTRY, "evry": 1}], 'fault 0: "evry": expected kind, calls, every,'),
        ([{"calls": [0, 10]}], "fault 0: kind: expected one of launch"),
        ([{"kind": "launch"}], "fault 0: calls: expected [from, to]"),
        ([{**GOOD_ENTRY, "kind": "fire"}], "kind: expected one of launch"),
        ([{**GOOD_ENTRY, "kind": ["launch"]}], "kind: expected one of launch"),
        ([{**GOOD_ENTRY, "kind": "launch:\0"}], "kind: expected one of launch"),
        ([{**GOOD_ENTRY, "kind": "launch:\ud800"}], "kind: expected one of launch"),
        ([{**GOOD_ENTRY, "kind": "launch:nth=1\n"}], "kind: expected one of launch"),
        ([{**GOOD_ENTRY, "kind": "launch:" + "x" * 9999}], "kind: expected one of"),
        ([{**GOOD_ENTRY, "kind": "launch;alloc"}], "kind: expected one of launch"),
        ([{**GOOD_ENTRY, "kind": "launch:nth=1;alloc:nth=1"}], "kind: expected one of"),
        ([GOOD_ENTRY, {**GOOD_ENTRY, "kind": None}], "fault 1: kind: expected one of"),
        ([{**GOOD_ENTRY, "calls": [5, 5]}], "[from, to]"),
        ([{**GOOD_ENTRY, "calls": [-1, 5]}], "[from, to]"),
        ([{**GOOD_ENTRY, "calls": 5}], "calls: expected [from, to]"),
        ([{**GOOD_ENTRY, "calls": "05"}], "calls: expected [from, to]"),
        ([{**GOOD_ENTRY, "calls": [0, 1.5]}], "calls: expected [from, to]"),
        ([{**GOOD_ENTRY, "calls": [0, True]}], "calls: expected [from, to]"),
        ([{**GOOD_ENTRY, "calls": [0, 1, 2]}], "calls: expected [from, to]"),
        ([{**GOOD_ENTRY, "calls": [0, 10**30]}], "calls: expected [from, to]"),
        ([{**GOOD_ENTRY, "every": 0}], "every: expected a whole number of at least 1"),
        ([{**GOOD_ENTRY, "every": True}], "every: expected a whole number of at"),
        ([{**GOOD_ENTRY, "every": "2"}], "every: expected a whole number of at"),
        ([{**GOOD_ENTRY, "every": None}], "every: expected a whole number of at"),
        ([{**GOOD_ENTRY, "every": 10**30}], "every: expected a whole number of at"),
        ([{**GOOD_ENTRY, "repeat": 5}], "repeat: expected 0, or at least the end of"),
        ([{**GOOD_ENTRY, "repeat": -1}], "repeat: expected a whole number of at"),
        ([{**GOOD_ENTRY, "verify": 1.0}], "verify: expected a whole number of at"),
        ([{**GOOD_ENTRY, "passes": "none"}], "passes: expected one of forward"),
        ([{**GOOD_ENTRY, "passes": ["forward"]}], "passes: expected one of forward"),
        ([{**GOOD_ENTRY, "passes": {}}], "passes: expected one of forward"),
        ([{**GOOD_ENTRY, "guard": "off"}], "guard: expected async or sync"),
        ([{**GOOD_ENTRY, "guard": None}], "guard: expected async or sync"),
        ([{**GOOD_ENTRY, "expect": "late"}], "expect: expected a list of reasons"),
        ([{**GOOD_ENTRY, "expect": {"late": 1}}], "expect: expected a list of reasons"),
        ([{**GOOD_ENTRY, "expect": ["latte"]}], "expect: expected a list of reasons"),
        ([{**GOOD_ENTRY, "expect": ["late", [1]]}], "expect: expected a list of"),
        ([{**GOOD_ENTRY, "expect": ["", "late"]}], "expect: expected a list of"),
        ([{**GOOD_ENTRY, "kind": "launch:nth=x"}], "kind: hipErrorInvalidValue: fault"),
        ("[" * 100_000, "expected JSON, nested less deep"),
        ('{"a":' * 100_000, "expected JSON, nested less deep"),
        (_with('"calls": NaN'), "expected JSON, got NaN, which is no number of JSON"),
        (_with('"calls": [0, Infinity]'), "got Infinity, which is no number of JSON"),
        (_with('"every": -Infinity'), "got -Infinity, which is no number of JSON"),
        (_with('"calls": [0, 1], "calls": [0, 2]'), 'the key "calls" twice in'),
        (_with('"calls": [0, ' + "9" * 5000 + "]"), "expected"),
        (_with('"calls": [0, 1e999]'), "fault 0: calls: expected"),
        (_with('"calls": [0, 9], "x": "' + "y" * 9999 + '"'), '"x": expected kind'),
        ("[" + " " * (1 << 20) + "]", "expected at most 1048576 bytes"),
        ("", "expected JSON"),
    ],
)
def test_a_malformed_plan_is_refused(soak, tmp_path, plan, expected):
    path = tmp_path / "plan.json"
    path.write_text(plan if isinstance(plan, str) else json.dumps(plan))
    said = refused(soak("--calls", 1, "--faults", path))
    assert expected in said and len(said) < 500


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (os.mkfifo, "expected a regular file"),
        (os.mkdir, "expected a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "expected a regular file"),
        (lambda path: path.symlink_to("none"), "No such file"),
        (lambda path: path.write_bytes(b"\xff\xfe\xff"), "expected JSON"),
        (_make_huge, "at most 1048576"),
    ],
    ids=["pipe", "folder", "device", "nowhere", "no text", "huge"],
)
def test_what_is_no_file_of_a_plan_is_refused(soak, tmp_path, make, expected):
    path = tmp_path / "plan"
    make(path)
    assert expected in refused(soak("--calls", 1, "--faults", path))


# --------------------------------------------------------------------------
# What is called, and how it is judged


def test_a_call_is_the_same_whenever_it_is_made():
    for index in range(60):
        one, other = (
            _soak_workload.make(3, index, 0.5, _soak_workload.TINY) for _ in range(2)
        )
        assert (one.kind, one.words()) == (other.kind, other.words())
        for name in ("q", "k", "v", "dout"):
            mine, theirs = getattr(one, name), getattr(other, name)
            if not isinstance(mine, torch.Tensor):
                assert mine == theirs
                continue
            assert mine.stride() == theirs.stride()
            assert mine.dtype == theirs.dtype
            if mine.numel() < 2**20:
                assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_a_share_of_calls_is_bad_and_each_kind_is_among_them():
    kinds = [
        _soak_workload.make(1, index, 0.25, _soak_workload.TINY).kind
        for index in range(2000)
    ]
    assert 0.2 < sum(kind != "good" for kind in kinds) / len(kinds) < 0.3
    assert set(kinds) == {"good", *_soak_workload.BAD}


def good_case(dtype, backward=True):
    """The first good call of a dtype with a backward."""
    for index in range(1000):
        case = _soak_workload.make(2, index, 0.0, _soak_workload.TINY)
        several = case.k.size(2) > 1 and case.q.size(2) > 1  # or dq and dk are 0
        if case.dtype == dtype and (case.dout is not None) == backward and several:
            return case
    raise AssertionError


def answer_by_math(case):
    answer = _soak_check.ask_math(case, CPU)
    answer.reasons = ["fused"] * (1 + (case.dout is not None))
    return answer


@pytest.mark.parametrize("dtype", list(_soak_workload.DTYPES))
@pytest.mark.parametrize("name", _soak_check.NAMES)
@pytest.mark.parametrize("spoil", ["factor", "nan", "inf", "dtype", "shape"])
def test_a_wrong_result_is_seen(dtype, name, spoil):
    case = good_case(dtype)
    answer = answer_by_math(case)
    assert _soak_check.judge(case, answer, CPU).wrong == []
    at = _soak_check.NAMES.index(name)
    got = answer.results[at].clone()
    if spoil == "factor":
        got = got * 1.1
    elif spoil == "dtype":
        got = got.to(torch.float32 if dtype != "fp32" else torch.float64)
    elif spoil == "shape":
        got = got[:, :, :, :-1]
    else:
        got[0, 0, 0, 0] = float(spoil)
    answer.results[at] = got
    assert _soak_check.judge(case, answer, CPU).wrong == [name]


def test_what_stock_answered_has_to_be_its_own_to_the_bit():
    case = good_case("fp32", backward=False)
    answer = _soak_check.ask_stock(case, CPU)
    answer.reasons = ["breaker"]
    assert _soak_check.judge(case, answer, CPU).wrong == []
    answer.results[0] = answer.results[0] * (1 + 2**-23)
    assert _soak_check.judge(case, answer, CPU).wrong == ["out"]


def test_a_call_that_raises_where_stock_answers_is_lost():
    case = good_case("fp32")
    answer = _soak_check.Answer(error=RuntimeError("no"))
    verdict = _soak_check.judge(case, answer, CPU)
    assert verdict.lost and "RuntimeError: no" in verdict.text


def test_another_error_than_stocks_is_wrong():
    case = good_case("fp32", backward=False)
    case.q = case.q[..., :-1]
    right = _soak_check.Answer(error=RuntimeError("sizes"))
    assert _soak_check.judge(case, right, CPU).wrong == []
    other = _soak_check.Answer(error=ValueError("sizes"))
    assert _soak_check.judge(case, other, CPU).wrong == ["error"]
    served = answer_by_math(good_case("fp32", backward=False))
    assert _soak_check.judge(case, served, CPU).wrong == ["error"]


# --------------------------------------------------------------------------
# Sums


def opened(kernel, fault, call=0):
    return {
        "breaker": "opened",
        "call": call,
        "device": "sim",
        "kernel": kernel,
        "failures": 1,
        "fault": fault,
        "cause": "",
    }


def closed(kernel):
    return {"breaker": "closed", "call": 9, "device": "sim", "kernel": kernel}


def held(summary):
    promises = summary.promises(0.9, set())
    return {name for name, (kept, _) in promises.items() if not kept}


def test_a_breaker_that_stays_open_breaks_a_promise():
    summary = Summary()
    summary.add(opened("a", "launch"))
    assert held(summary) == {"breakers close after the fault"}
    summary.add(closed("a"))
    assert held(summary) == set()
    assert summary.faults["launch"].closed == 1


def test_a_breaker_that_opens_by_itself_breaks_a_promise():
    summary = Summary()
    summary.add(opened("a", ""))
    summary.add(closed("a"))
    assert held(summary) == {"no breaker opens without a fault"}


def test_a_gap_in_the_journal_is_calls_lost():
    names = "good fused quiet quiet_fused bad alike struck open error seconds".split()
    ms = {"n": 10, "mean": 1.0, "p50": 1.0, "p99": 1.0, "max": 1.0}
    batch = {**dict.fromkeys(names, 0), "reasons": {}, "ms": ms}
    summary = Summary()
    summary.add({**batch, "batch": [0, 10]})
    assert held(summary) == set()
    summary.add({**batch, "batch": [11, 20]})
    assert held(summary) == {"no call lost"}


def test_a_kind_that_never_happened_breaks_a_promise():
    promises = Summary().promises(0.9, {"launch"})
    assert promises["each kind of fault happened"] == (False, "never: launch")


def test_kinds_are_those_of_the_calls_that_ran():
    entry = _soak_faults.Entry("launch", (10, 20), 5)
    options = _soak.Options(0, 0.0, (entry,), 30, None, 10, "sim")
    assert _soak.kinds_of(options, 10) == set()
    assert _soak.kinds_of(options, 11) == {"launch"}


def test_a_long_soak_keeps_no_more_points_than_a_picture_has():
    ms = {"n": 10, "mean": 2.0, "p50": 1.0, "p99": 3.0, "max": 4.0}
    line = {"good": 10, "fused": 9, "quiet": 10, "quiet_fused": 9, "bad": 0, "alike": 0}
    line |= {"struck": 1, "open": 0, "error": 0.5, "seconds": 1.0, "reasons": {}}
    summary = Summary()
    for number in range(20_000):
        summary.add({**line, "ms": ms, "batch": [10 * number, 10 * number + 10]})
    assert len(summary.points) <= 4000
    assert summary.calls == summary.points[-1]["at"] == 200_000
    assert sum(point["good"] for point in summary.points) == 200_000
    report = summary.as_data(0.9, set())
    assert report["held"] and report["ms_mean"] == pytest.approx(2.0)
