"""What the extension's functions refuse, and what they say about it.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import fcntl
import textwrap
import threading
import time

import pytest
import torch
from helpers import run_python

import flash_attn_rocm._C as C
from flash_attn_rocm import _guard, _ops
from flash_attn_rocm._config import config, simulator_path

POLICY = ("async", 50.0, 2000.0, 60.0, False, None, None)
SHAPES = [(1, 1, 2, 8), (16, 16, 8, 1)] * 3


EMPTY = torch.empty(0)


def call_fwd(q, k, v, seed=EMPTY, dropout_p=0.0):
    features = [seed if n == "seed" else EMPTY for n in _ops.FEATURE_TENSORS]
    return torch.ops.flash_attn_rocm.fwd.default(
        q, k, v, *features, 0.25, 0.0, dropout_p, 0, -1, -1, 0, 0, 0, False
    )


class Numberless:
    def __index__(self):
        raise KeyError("none")


class Truthless:
    def __bool__(self):
        raise ArithmeticError("no truth")


def policy(**changed):
    names = "mode factor floor_ms cooldown_s abort dir dir_else".split()
    return [changed.get(name, value) for name, value in zip(names, POLICY)]


@pytest.fixture(autouse=True)
def restore():
    """The policy, and a configuration that launches nothing."""
    C.configure(config.code_dir, simulator_path(), "null", lambda: None)
    yield
    _guard.configure()
    _ops.configure(config.device)


REFUSED = {
    "device's count": (C.guard_device, (1,), TypeError, "expected 3 positional"),
    "device's type": (
        C.guard_device,
        ("x", 0, None),
        TypeError,
        "device_type: expected a whole number of 32 bits, got 'x'",
    ),
    "device's index": (C.guard_device, (0, 1.5, None), TypeError, "device_index: exp"),
    "device's own error": (C.guard_device, (Numberless(), 0, None), KeyError, "none"),
    "device's arch": (C.guard_device, (0, 0, "x" * 99), RuntimeError, "arch: expected"),
    "no arguments": (C.guard, (), TypeError, "guard: expected 7 positional"),
    "mode": (C.guard, policy(mode="on"), ValueError, "async or sync, got 'on'"),
    "mode's type": (C.guard, policy(mode=1), ValueError, "mode: expected off, async"),
    "factor": (C.guard, policy(factor=0.0), ValueError, "factor: expected a number"),
    "factor nan": (C.guard, policy(factor=float("nan")), ValueError, "factor: "),
    "factor's type": (C.guard, policy(factor="x"), TypeError, "factor: expected a"),
    "floor": (
        C.guard,
        policy(floor_ms=-1.0),
        ValueError,
        "floor_ms: expected a number",
    ),
    "floor's type": (C.guard, policy(floor_ms="x"), TypeError, "floor_ms: expected"),
    "cooldown": (C.guard, policy(cooldown_s=-2.0), ValueError, "cooldown_s: expected"),
    "abort": (C.guard, policy(abort=Truthless()), ArithmeticError, "no truth"),
    "dir": (C.guard, policy(dir=1), TypeError, ""),
    "dir_else": (C.guard, policy(dir_else=1), TypeError, ""),
    "trip": (C.breaker_trip, ("sim",), TypeError, "expected 3 positional arguments"),
    "trip's type": (
        C.breaker_trip,
        ("sim", 1, ""),
        TypeError,
        "kernel: expected a str",
    ),
    "trip's text": (C.breaker_trip, ("sim", "\udcff", ""), UnicodeError, ""),
    "device": (C.breaker_trip, ("tpu:0", "k", ""), ValueError, "device: expected one"),
    "trip's count": (C.breaker_trip, ("",) * 5, TypeError, "expected 4 positional"),
    "trip's time": (C.breaker_trip, ("sim", "k", "", "x"), TypeError, "cooldown_s"),
    "wanted": (C.workspace, (0, *[(1, 1, 2, 8)] * 3, "x"), TypeError, "wanted: "),
    "kernel": (C.breaker_trip, ("sim", "k", ""), C.Error, "kernel: expected one that"),
    "reset": (C.breaker_reset, (1,), TypeError, "kernel: expected a str, got 1"),
    "list": (C.store_list, (None,), TypeError, "dir: expected a path, got None"),
    "list's type": (C.store_list, (1,), TypeError, ""),
    "list's folder": (C.store_list, ("/proc/version",), C.Error, "/proc/version"),
    "store_reset": (C.store_reset, (), TypeError, "expected 1 positional arguments"),
    "its type": (C.store_reset, (1,), TypeError, ""),
    "its folder": (C.store_reset, (None,), TypeError, "dir: expected a path, got None"),
    "its file": (C.store_reset, ("/proc/version",), C.Error, "/proc/version"),
    "its kernel": (C.store_reset, ("/tmp", 1), TypeError, "kernel: expected a str"),
    "workspace": (C.workspace, (0,), TypeError, "expected 5 positional arguments"),
    "its sizes": (C.workspace, (0, (1,), (1,), (1,), 0), TypeError, "q_size: expected"),
    "load": (C.load, (0,), TypeError, "expected 3 positional arguments"),
    "its dtype": (C.load, (0, 0, "gfx906", 9), ValueError, "dtype: expected 0..3"),
    "its dtype's type": (C.load, (0, 0, "gfx906", "x"), TypeError, "dtype: exp"),
    "its device": (C.load, (1 << 40, 0, "gfx906"), OverflowError, "of 32 bits"),
    "its huge device": (C.load, (1 << 80, 0, "x"), OverflowError, "device_type: exp"),
    "its huge size": (
        C.workspace,
        (0, (1 << 70, 1, 1, 8), *[(1, 1, 2, 8)] * 2, 1),
        OverflowError,
        "q_size: expected a whole number of 64 bits, got ",
    ),
    "scale": (C.plan, (0, 16, 16, 16, *SHAPES, "x", 0), TypeError, "scale: expected a"),
    "causal": (C.plan, (0, 16, 16, 16, *SHAPES, 1.0, "x"), TypeError, "causal: expect"),
    "its name": (C.load, (0, 0, "x" * 99), RuntimeError, "arch: expected a name such"),
    "its name's text": (C.load, (0, 0, "\udcff"), UnicodeError, ""),
    "bf16": (
        C.configure,
        ("/", "/", "null", lambda: None, "fast"),
        C.Error,
        "bf16: expected auto or strict, got fast",
    ),
    "fp32": (
        C.configure,
        ("/", "/", "null", lambda: None, "auto", "strict"),
        C.Error,
        "fp32: expected auto, fast or exact, got strict",
    ),
    "rotary": (C.rotary, (0,), TypeError, "expected 24 positional arguments"),
    "dtype": (C.plan, ("x", 16, 16, 16, *SHAPES, 1.0, 0), TypeError, "dtype: expect"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named(case):
    function, arguments, error, text = REFUSED[case]
    with pytest.raises(error) as caught:
        function(*arguments)
    assert text in str(caught.value)


TENSOR = [(1, 1, 2, 8), (16, 16, 8, 1)]
CALLS = {  # what a call on addresses takes, in order
    "forward": [0, 0, 0, None, 0, *[16] * 6, 16, 4096, *TENSOR * 3, TENSOR[1], 1.0, 0],
    "backward": [
        *(0, 0, 0, None, 0, False, 1, *[16] * 11, 16, 4096, *TENSOR * 3),
        *(TENSOR[1], TENSOR[1], (2, 2, 1), *[TENSOR[1]] * 3, 1.0, 0, None, 16, 16),
    ],
    "rotary": [
        *(0, 0, 0, None, 0, 2, *[16] * 6, *TENSOR * 2),
        *([(1, 2, 1, 4), (8, 4, 4, 1)] * 2),
        *(TENSOR[1], TENSOR[1], False, False),
    ],
}


@pytest.mark.parametrize("function", CALLS)
def test_a_call_checks_each_of_its_arguments(function):
    good = CALLS[function]
    try:
        getattr(C, function)(*good)
    except RuntimeError:
        pass  # as a problem: the types are right
    for place in range(len(good)):
        bad = [*good[:place], Truthless(), *good[place + 1 :]]
        with pytest.raises((TypeError, ArithmeticError)):
            getattr(C, function)(*bad)


def test_a_workspace_that_is_too_small_is_refused():
    bf16 = list(CALLS["forward"])
    bf16[4], bf16[12] = 1, 8
    with pytest.raises(RuntimeError, match=r"workspace: expected \d+ bytes, got 8"):
        C.forward(*bf16)


def test_an_exception_without_a_text_is_reported_as_such():
    class Silent(Exception):
        def __str__(self):
            raise ArithmeticError

    def sim_arch():
        raise Silent

    C.configure(config.code_dir, simulator_path(), "sim", sim_arch)
    q, k, v = (torch.zeros(1, 1, 4, 16).half() for _ in "qkv")
    with pytest.raises(RuntimeError, match="got an exception: without a text"):
        call_fwd(q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8])
def test_a_seed_of_another_type_is_named(dtype):
    q, k, v = (torch.zeros(1, 1, 4, 16).half() for _ in "qkv")
    with pytest.raises(RuntimeError, match="seed: expected dtype int64, got "):
        call_fwd(q, k, v, seed=torch.zeros(2, dtype=dtype), dropout_p=0.5)


def test_without_a_guard_nothing_can_be_opened():
    code = """
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("flash_attn_rocm._C", sys.argv[1])
        C = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(C)
        try:
            C.breaker_trip("sim", "kernel", "cause")
        except ValueError as error:
            assert "guard: expected one, got none yet" in str(error)
        else:
            raise AssertionError
        C.breaker_reset(None)
        C.guard_stop()
        assert C.breakers() == C.latency() == C.complaints() == []
        assert set(C.guard_counts().values()) == {0}
        C.keep(object())
        assert C.last_failure() == ""
    """
    run_python(textwrap.dedent(code), C.__file__)


def test_reason_codes_are_bounded():
    code = """
        import flash_attn_rocm, flash_attn_rocm._C as C
        try:
            for i in range(1000):
                C.record_fallback(f"reason-{i}")
        except RuntimeError as error:
            assert "reason: expected one of at most" in str(error), error
        else:
            raise AssertionError
        assert i > 20
    """
    run_python(textwrap.dedent(code))


def test_a_device_is_known_before_its_first_call(tmp_path):
    C.configure(config.code_dir, simulator_path(), "null", lambda: None)
    C.guard_device(1, 5, None)
    assert dict(C.identities())["null:5"] == "null:5"
    C.breaker_trip("null:5", "fa_prepare", "a test", 3600.0)
    rows = [row for row in C.breakers() if row[0] == "null:5"]
    assert [row[1] for row in rows] == ["fa_prepare"] and rows[0][4] > 3500
    C.breaker_reset(None)


def test_a_device_that_cannot_be_reached_is_not_known():
    C.configure(config.code_dir, "/nowhere/libhipsim.so", "sim", lambda: "gfx906")
    with pytest.raises(RuntimeError, match="cannot load /nowhere"):
        C.guard_device(0, 0, "gfx906")
    with pytest.raises(RuntimeError, match="arch: expected a name"):
        C.guard_device(0, 0, None)
    C.configure(config.code_dir, simulator_path(), "off", lambda: None)
    with pytest.raises(RuntimeError, match="mode: expected one that runs kernels"):
        C.guard_device(0, 0, "gfx906")


def test_other_threads_run_while_the_store_is_waited_for(tmp_path):
    """A lock that another thread is about to give back is no reason to fail."""
    tmp_path.chmod(0o700)
    assert C.store_reset(tmp_path) == 0  # makes nothing
    answers = []
    with open(tmp_path / "breakers.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(
            target=lambda: answers.append(C.store_reset(tmp_path))
        )
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive() and not answers
        fcntl.flock(lock, fcntl.LOCK_UN)
        thread.join()
    assert answers == [0]
