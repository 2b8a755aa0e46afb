"""The self-test: what it finds, how its child may end, what is kept of it.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import threading
import time

import pytest
import torch
from helpers import needs_simulator

import flash_attn_rocm as fa
import hipsim
from flash_attn_rocm import _ops, _selftest, _selftest_cases, _selftest_store
from flash_attn_rocm._selftest import Verdict, ensure, verdicts
from flash_attn_rocm._selftest_cases import families

FAMILIES = families() if _ops.op is not None else []
BY_NAME = {family.name: family for family in FAMILIES}


def family(name):
    return BY_NAME[name]


# ---- families and answers ----------------------------------------------------


def test_every_kernel_is_of_a_family_or_part_of_every_backward():
    tested = {kernel for each in FAMILIES for kernel in each.kernels}
    shipped = {row["symbol"] for row in _ops.ext.variants()}
    assert shipped - tested == {
        f"fa_prepare{kind}" for kind in ("", "_exact32", "_f64")
    }
    assert tested <= shipped


def test_families_have_names_of_their_own_and_backwards_follow_their_forwards():
    assert len(BY_NAME) == len(FAMILIES)
    for before, each in zip(FAMILIES, FAMILIES[1:]):
        assert (each.what == "backward") == (each.needs == before.name)


@needs_simulator
def test_every_family_passes_in_the_simulator(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_ROCM_DEVICE", "off")  # of the parent only
    made = verdicts("sim")
    assert [(v.family, v.kernels) for v in made] == [
        (each.name, each.kernels) for each in FAMILIES
    ]
    assert [v for v in made if not v.passed or v.detail or not v.settled] == []


@pytest.fixture
def fault():
    """fault(spec) until the test ends."""
    yield hipsim.set_fault
    hipsim.set_fault("")


@needs_simulator
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("forward float16 d64 plain", "fa_fwd_f16_d64_plain"),
        ("forward bfloat16 d64 plain strict", "fa_fwd_exact16_d64_plain"),
        ("forward float64 d64 full", "fa_fwd_f64_d64_full"),
        ("backward float32 d64 plain", "fa_bwd_kv_f32_d64_plain"),
        ("backward float32 d64 full", "fa_bwd_q_f32_d64_full"),
        ("backward float16 d64 full", "fa_bwd_bias_exact16_d64_full"),
    ],
)
def test_flipped_bits_of_lds_are_wrong_and_blamed_on_their_kernel(
    fault, simulated, name, kernel
):
    fault(f"lds-flip:kernel={kernel},bits=64,at=3000,seed=1,every=1")
    wrong = _selftest_cases.run(family(name), "cpu")
    assert list(wrong) == [kernel]
    fault("")
    assert _selftest_cases.run(family(name), "cpu") == {}


@needs_simulator
@pytest.mark.parametrize("strict", [False, True])
def test_of_float32_in_float64_a_few_roundings_are_too_many(
    simulated, monkeypatch, strict
):
    """As a kernel that lost its float64 would have."""
    stock = _ops.op

    def coarse(*given):
        out, *rest = stock(*given)
        return out * (1.0 + 4 * torch.finfo(torch.float32).eps), *rest

    monkeypatch.setattr(_ops, "op", coarse)
    name = "forward float32 d64 " + ("full strict" if strict else "plain")
    assert bool(_selftest_cases.run(family(name), "cpu")) == strict


@needs_simulator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_wrong_dsink_is_blamed_on_the_kernel_that_sums_ds(
    simulated, monkeypatch, dtype
):
    stock = _ops.backward_op

    def wrong(*given):
        dq, dk, dv, dbias, dsink = stock(*given)
        if dtype == "float32":  # all this is made of the same delta
            dk, dbias = 2 * dk, 2 * dbias
        return dq, dk, dv, dbias, 2 * dsink

    monkeypatch.setattr(_ops, "backward_op", wrong)
    (kernel,) = _selftest_cases.run(family(f"backward {dtype} d64 full"), "cpu")
    assert kernel.startswith("fa_bwd_q_")


@needs_simulator
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_wrong_dk_is_blamed_on_its_own_kernel_whatever_else_is_wrong(
    simulated, monkeypatch, dtype
):
    stock = _ops.backward_op
    twice = lambda *given: [2 * x for x in stock(*given)]  # noqa: E731
    monkeypatch.setattr(_ops, "backward_op", twice)
    wrong = _selftest_cases.run(family(f"backward {dtype} d64 full"), "cpu")
    for part in ("fa_bwd_kv", "fa_bwd_q"):
        assert any(kernel.startswith(part) for kernel in wrong)


@needs_simulator
@pytest.mark.parametrize("name", [*list(BY_NAME)[-4:], "backward float16 d64 full"])
def test_a_result_that_is_not_a_number_is_wrong(simulated, monkeypatch, name):
    for op in ("rotary_op", "backward_op"):
        stock = getattr(_ops, op)
        nothing = lambda *given, run=stock: [x + torch.nan for x in run(*given)]  # noqa: E731
        monkeypatch.setattr(_ops, op, nothing)
    wrong = _selftest_cases.run(family(name), "cpu")
    assert set(wrong) == set(family(name).kernels)
    assert all("is off by nan" in words for words in wrong.values())


@needs_simulator
def test_another_kernel_than_the_familys_is_an_error(simulated, monkeypatch):
    monkeypatch.setattr(_selftest_cases._record, "last_record", lambda: None)
    with pytest.raises(RuntimeError, match="expected fa_rotary to run, got nothing"):
        _selftest_cases.run(family("rotary float32"), "cpu")


# ---- children ----------------------------------------------------------------

# Reads like the real one from --skip on, and does as it is told at some families.
CHILD = """
import json, os, signal, sys, time
told, total, skip = {told}, {total}, int(sys.argv[sys.argv.index("--skip") + 1])
print("not ours", json.dumps(7), "[]", sep="\\n", flush=True)
if told.get("start") == "import":
    sys.exit("ImportError: no torch")
if told.get("start") in ("slow", "late"):
    time.sleep(60 if told["start"] == "slow" else 1.5)
for number in range(skip, total):
    print(json.dumps(dict(begins=str(number))), flush=True)
    what = told.get(number, "passed")
    if what == "hang":
        time.sleep(60)
    elif what == "mute":  # as a process that the driver does not let end
        os.close(1)
        time.sleep(60)
    elif what == "abort":
        print("first line\\n\\x1b[1mMemory access fault", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    elif what == "exit":
        sys.exit(3)
    found = dict(kernels=["fa_rotary", "x"], verdict=what, detail="", seconds=0.5)
    print(json.dumps(dict(found=found)), flush=True)
    if what == "failed":
        sys.exit(0)
"""


@pytest.fixture
def child(monkeypatch, tmp_path):
    """child(told) puts a child in the real one's place, with few families."""
    few = FAMILIES[:6]
    monkeypatch.setattr(_selftest, "families", lambda: few)

    def install(**told):
        told = {int(k[1:]) if k[0] == "n" else k: what for k, what in told.items()}
        code = CHILD.format(told=told, total=len(few))
        monkeypatch.setattr(_selftest, "_CHILD", code)

    return install


def words(made):
    return [v.verdict for v in made]


def test_a_child_that_dies_is_a_verdict_and_another_goes_on(child):
    child(n1="abort")
    made = verdicts("sim")
    assert words(made) == ["passed", "died of signal 6", *["passed"] * 4]
    assert made[1].kernels == FAMILIES[1].kernels
    assert made[1].detail == "[1mMemory access fault" and made[1].settled


def test_a_backward_is_not_run_after_its_forward_died(child):
    child(n2="abort")
    made = verdicts("sim")
    assert (
        words(made) == ["passed"] * 2 + ["died of signal 6", "failed"] + ["passed"] * 2
    )
    assert made[3].detail == f"not run: {FAMILIES[2].name} died of signal 6"


def test_a_family_that_does_not_answer_is_hung_and_another_child_goes_on(child):
    child(n1="hang")
    start = time.monotonic()
    made = verdicts("sim", stall_s=1.0)
    assert words(made) == ["passed", "hung", *["passed"] * 4]
    assert made[1].settled and time.monotonic() - start < 10


def test_a_child_that_says_its_last_word_and_does_not_end_is_hung(child):
    child(n1="mute")
    start = time.monotonic()
    made = verdicts("sim", stall_s=1.0)
    assert words(made) == ["passed", "hung", *["passed"] * 4]
    assert made[1].settled and time.monotonic() - start < 10


def test_the_whole_has_a_limit_and_what_it_cut_off_is_not_settled(child):
    child(n3="hang")
    start = time.monotonic()
    made = verdicts("sim", timeout_s=1.5)
    assert words(made) == ["passed"] * 3 + ["hung", "failed", "failed"]
    assert [v.settled for v in made] == [True] * 3 + [False] * 3
    assert {v.detail for v in made[4:]} == {"not reached within the time of the whole"}
    assert time.monotonic() - start < 10


def test_each_family_has_one_verdict_where_the_end_comes_in_a_forward(child):
    child(n2="hang")
    made = verdicts("sim", timeout_s=1.0)
    assert [v.family for v in made] == [each.name for each in FAMILIES[:6]]
    assert words(made) == ["passed"] * 2 + ["hung"] + ["failed"] * 3


@pytest.mark.parametrize(
    ("start", "detail"),
    [
        ("import", "the test's process: ImportError: no torch"),
        ("slow", "the test's process: it did not start in time"),
    ],
)
def test_a_child_that_does_not_start_says_nothing_of_kernels(child, start, detail):
    child(start=start)
    made = verdicts("sim", timeout_s=3.0 if start == "import" else 1.0)
    assert words(made) == ["failed"] * 6
    assert {(v.detail, v.settled) for v in made} == {(detail, False)}


def test_a_child_that_ends_after_a_failure_is_followed_by_another(child):
    child(n1="failed", n3="failed", n5="failed")
    assert words(verdicts("0")) == ["passed", "failed"] * 3


@needs_simulator
@pytest.mark.parametrize(("device", "count"), [("0", 1), ("sim", len(FAMILIES))])
def test_on_a_gpu_a_failure_ends_the_child_since_its_error_may_stay(
    monkeypatch, capfd, device, count
):
    def fails(family, device):
        raise RuntimeError("illegal address")

    monkeypatch.setattr(_selftest_cases, "run", fails)
    assert _selftest.main(["--device", device]) == 0
    assert capfd.readouterr().out.count('"found"') == count


def test_starting_may_take_longer_than_a_family(child):
    child(start="late")
    assert words(verdicts("sim", stall_s=0.5)) == ["passed"] * 6


def test_an_exit_in_the_middle_of_a_family_is_its_failure(child):
    child(n5="exit")
    made = verdicts("sim")
    assert words(made) == ["passed"] * 5 + ["failed"]
    assert made[5].detail == "the process ended with 3"


def test_a_child_speaks_of_its_familys_own_kernels_only(child):
    child(n0="wrong")
    made = verdicts("sim")
    assert made[0] == Verdict(FAMILIES[0].name, (), "wrong", "", 0.5)


@pytest.mark.parametrize("told", ["hang", "passed"])
def test_nothing_of_a_child_is_left(child, monkeypatch, told):
    started = []
    popen = _selftest.subprocess.Popen

    def note(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(_selftest.subprocess, "Popen", note)
    child(n4=told)
    before = set(os.listdir("/proc/self/fd"))
    verdicts("sim", timeout_s=1.0)
    assert [process.poll() is None for process in started] == [False]
    started.clear()
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_child_tests_kernels_whatever_the_guard_thinks_of_them(child, monkeypatch):
    seen = {}
    popen = _selftest.subprocess.Popen

    def note(*args, **kwargs):
        seen.update(kwargs["env"])
        return popen(*args, **kwargs)

    monkeypatch.setattr(_selftest.subprocess, "Popen", note)
    monkeypatch.setenv("FLASH_ATTN_ROCM_GUARD", "sync")
    monkeypatch.setenv("FLASH_ATTN_ROCM_DEVICE", "off")
    child()
    for device, mode in (("0", "auto"), ("sim:gfx906", "sim:gfx906")):
        verdicts(device)
        got = {n[16:]: v for n, v in seen.items() if n.startswith("FLASH_ATTN_ROCM_")}
        want = {"GUARD": "off", "SELFTEST": "0", "VERIFY": "0", "UNTESTED": "1"}
        assert got == {**want, "DEVICE": mode}


def test_without_kernels_there_is_an_error_and_no_child(monkeypatch):
    monkeypatch.setattr(_ops, "op", None)
    monkeypatch.setattr(_ops, "unavailable", "too old a torch")
    with pytest.raises(fa.FlashAttnError, match="too old a torch"):
        verdicts("sim")


@needs_simulator
def test_an_error_of_a_launch_is_a_failure_with_its_text(fault, simulated, capfd):
    fault("launch:kernel=fa_rotary,every=1")
    _selftest._test(family("rotary float16"), "cpu")
    begins, found = map(json.loads, capfd.readouterr().out.splitlines())
    assert begins == {"begins": "rotary float16"}
    assert found["found"]["verdict"] == "failed"
    assert found["found"]["detail"].startswith("RuntimeError: ")


# ---- kept --------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "new" / "cache"


class Runs:
    """run() for ensure(): how often, and what it answers."""

    def __init__(self, **bad):
        self.count = 0
        self.bad = bad

    def __call__(self):
        self.count += 1
        made = [Verdict(each.name, each.kernels, "passed") for each in FAMILIES]
        if self.bad:
            first = FAMILIES[0]
            made[0] = Verdict(first.name, first.kernels, **self.bad)
        return made


def ask(folder, run, device="gfx906 driver 1", code="c1"):
    return ensure(device, code, folder, run=run)


def content_of(folder):
    """What is in it; of what is no file only the kind."""
    return {
        path.name: path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in folder.iterdir()
    }


def file_in(folder):
    (found,) = folder.glob("selftest-*.json")
    return found


def test_the_second_to_ask_gets_what_the_first_found(folder):
    run = Runs(verdict="wrong", detail="out is off")
    assert ask(folder, run) == ask(folder, run) == run()
    assert run.count == 2  # one of them is this test's own
    assert folder.stat().st_mode & 0o777 == 0o700
    assert file_in(folder).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name[:9] for path in folder.iterdir()) == ["selftest-"] * 2


def test_another_device_or_code_is_tested_anew(folder):
    run = Runs()
    for number, (device, code) in enumerate([("a", "1"), ("b", "1"), ("a", "2")], 1):
        for _ in range(2):
            ask(folder, run, device, code)
            assert run.count == number


def test_without_a_folder_nothing_is_kept():
    run = Runs()
    ask(None, run)
    ask(None, run)
    assert run.count == 2


def test_what_is_not_settled_is_not_kept(folder):
    run = Runs(verdict="failed", detail="not reached", settled=False)
    ask(folder, run)
    assert list(folder.glob("*.json")) == []
    ask(folder, run)
    assert run.count == 2


@pytest.mark.parametrize(("verdict", "again"), [("hung", 2), ("passed", 1)])
@pytest.mark.parametrize("shift", [-2 * 86400, 2 * 86400])
def test_bad_verdicts_are_kept_for_a_day(folder, verdict, again, shift):
    run = Runs(verdict=verdict)
    ask(folder, run)
    then = time.time() + shift
    os.utime(file_in(folder), (then, then))
    ask(folder, run)
    assert run.count == again


def changed(**values):
    return lambda content: json.dumps({**json.loads(content), **values})


def with_first(**values):
    def change(content):
        content = json.loads(content)
        content["verdicts"][0].update(values)
        return json.dumps(content)

    return change


MALFORMED = {
    "empty": lambda content: "",
    "cut": lambda content: content[:-20],
    "binary": lambda content: "\x00\xff" * 50,
    "list": lambda content: "[]",
    "deep": lambda content: "[" * 100_000,
    "large": lambda content: content + " " * (1 << 20),
    "version": changed(version=2),
    "no verdicts": changed(verdicts=None),
    "few verdicts": changed(verdicts=[]),
    "other things": changed(verdicts=[1] * len(FAMILIES)),
    "other family": with_first(family="x"),
    "other verdict": with_first(verdict="died of signal 6; rm -rf"),
    "verdict of another kind": with_first(verdict=["passed"]),
    "other kernels": with_first(kernels=["fa_rotary"]),
    "kernels of another kind": with_first(kernels={"fa_fwd_f16_d32_plain": 1}),
    "kernels unhashable": with_first(kernels=[[]]),
}


@pytest.mark.parametrize("how", MALFORMED)
def test_a_malformed_file_is_set_aside_with_one_warning(folder, caplog, how):
    run = Runs()
    ask(folder, run)
    file = file_in(folder)
    bad = MALFORMED[how](file.read_text())
    file.write_text(bad, encoding="latin-1")
    assert [v.verdict for v in ask(folder, run)] == ["passed"] * len(FAMILIES)
    assert run.count == 2 and len(caplog.records) == 1
    assert file.with_name(file.name + ".bad").read_text(encoding="latin-1") == bad
    ask(folder, run)
    assert run.count == 2, "the new file is not in its place"


def _symlinked_folder(folder):
    folder.rename(folder.with_name("real"))
    folder.symlink_to("real")


def _symlinked_file(folder):
    file = file_in(folder)
    file.rename(folder / "other")
    file.symlink_to("other")


def in_its_place(make, lock=False):
    """Something else under the name of the file, or of the lock."""

    def change(folder):
        path = folder / "selftest-lock" if lock else file_in(folder)
        path.unlink()
        make(path)

    return change


UNTRUSTED = {
    "folder of the group": lambda folder: folder.chmod(0o770),
    "folder of all": lambda folder: folder.chmod(0o707),
    "link to a folder": _symlinked_folder,
    "file of the group": lambda folder: file_in(folder).chmod(0o660),
    "file of all": lambda folder: file_in(folder).chmod(0o606),
    "link to a file": _symlinked_file,
    "pipe": in_its_place(os.mkfifo),
    "folder": in_its_place(os.mkdir),
    "pipe as the lock": in_its_place(os.mkfifo, True),
    "folder as the lock": in_its_place(os.mkdir, True),
    "link as the lock": in_its_place(lambda path: path.symlink_to("none"), True),
    "lock of all": lambda folder: (folder / "selftest-lock").chmod(0o606),
}


@pytest.mark.parametrize("how", UNTRUSTED)
def test_what_others_may_write_is_neither_read_nor_written(folder, caplog, how):
    ask(folder, Runs())
    UNTRUSTED[how](folder)
    before = content_of(folder)
    run = Runs(verdict="wrong")
    assert ask(folder, run)[0].verdict == "wrong"
    assert run.count == 1 and len(caplog.records) == 1
    assert ("symbolic link" in caplog.text) == how.startswith("link")
    assert content_of(folder) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_another_users_files_are_not_trusted(folder, what):
    ask(folder, Runs())
    os.chown(folder if what == "folder" else file_in(folder), 12345, -1)
    run = Runs()
    ask(folder, run)
    assert run.count == 1


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    run = Runs()
    ask(tmp_path / "file" / "cache", run)
    assert run.count == 1 and len(caplog.records) == 1


def test_a_full_disk_costs_one_warning_and_leaves_nothing(folder, caplog, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_selftest_store.os, "fsync", full)
    run = Runs()
    ask(folder, run)
    assert run.count == 1 and len(caplog.records) == 1
    assert [path.name for path in folder.iterdir()] == ["selftest-lock"]


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", [1, 2])
def test_a_write_that_fails_anywhere_leaves_the_old_file_or_the_new(
    folder, monkeypatch, error, call
):
    """The first fsync is the file's, the second its folder's."""
    ask(folder, Runs(), code="old")
    real, calls = os.fsync, []

    def failing(descriptor):
        calls.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        if len(calls) == call:
            raise error
        real(descriptor)

    monkeypatch.setattr(_selftest_store.os, "fsync", failing)
    with contextlib.suppress(KeyboardInterrupt):
        ask(folder, Runs(), code="new")
    assert calls == [False, True][:call]
    found = json.loads(file_in(folder).read_text())
    assert found["code_hash"] == ("old" if call == 1 else "new")
    assert len(list(folder.iterdir())) == 2


def test_what_a_killed_writer_left_is_removed_by_the_next(folder):
    ask(folder, Runs())
    (folder / "selftest-replacement.tmp").write_text("half of a fi")
    ask(folder, Runs(), code="c2")
    assert len(list(folder.iterdir())) == 2


def test_who_does_not_get_the_lock_reads_and_does_not_write(folder, monkeypatch):
    ask(folder, Runs(), code="c1")
    before = content_of(folder)
    monkeypatch.setattr(_selftest, "TIMEOUT_S", -30)
    with open(folder / "selftest-lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old, new = Runs(), Runs()
        ask(folder, old, code="c1")
        ask(folder, new, code="c2")
    assert (old.count, new.count) == (0, 1) and content_of(folder) == before


def test_a_file_system_without_locks_costs_one_warning_and_no_time(
    folder, caplog, monkeypatch
):
    def none(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(_selftest_store.fcntl, "flock", none)
    started, run = time.monotonic(), Runs()
    ask(folder, run)
    assert run.count == 1 and len(caplog.records) == 1
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("how", UNTRUSTED)
def test_after_forget_what_is_ours_to_repair_is_repaired(folder, caplog, how):
    ask(folder, Runs())
    UNTRUSTED[how](folder)
    if how in ("folder of the group", "folder of all", "link to a folder"):
        with pytest.raises(_selftest_store.Untrusted):
            _selftest_store.forget(folder)
        return
    (folder / "selftest-lock.bad").write_text("an earlier one")
    (folder / "selftest-0123.json.bad").mkdir()
    _selftest_store.forget(folder)
    run = Runs()
    ask(folder, run)
    ask(folder, run)
    kept = how != "lock of all"  # somebody may hold it: not to be taken away
    assert (run.count, len(caplog.records)) == ((1, 0) if kept else (2, 2))


def test_of_several_that_ask_at_once_one_runs_the_test(folder):
    run, answers = Runs(verdict="wrong"), []
    slow = threading.Event()

    def once():
        slow.wait(0.3)
        return run()

    threads = [
        threading.Thread(target=lambda: answers.append(ask(folder, once)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.count == 1 and answers == [answers[0]] * 4
