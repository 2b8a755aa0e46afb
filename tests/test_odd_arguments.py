"""Odd arguments of guard, metrics and switches: refused by name, and nothing is done.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import itertools
import math
import signal
import threading

import numpy as np
import pytest
import torch

import flash_attn_rocm as fa
from flash_attn_rocm import _verify

NAN, INF, HUGE = math.nan, math.inf, 10**400
ARRAY = np.zeros((3, 3))
NO_TEXT = (5, True, b"x", ["x"], None, ARRAY)


class Hostile:
    """Nothing works, not even to show it."""

    def __repr__(self):
        raise RuntimeError("made up")


def serve_metrics(**arguments):
    pytest.importorskip("prometheus_client")
    return fa.serve_metrics(**arguments)


def save(path):
    fa.BreakdownReport("Model").save(path)


def plot(path):
    fa.BreakdownReport("Model").plot(path)


# Function, argument, what it says of it, and values that it refuses.
TABLE = [
    (
        *(fa.configure_guard, "mode", "off, async or sync"),
        ("often", "", "SYNC", "sync\0", 1, True, b"sync", ["sync"], ARRAY, Hostile()),
    ),
    (
        *(fa.configure_guard, "on_hang", "report or abort"),
        ("panic", "", 0, False, ["abort"], ARRAY),
    ),
    (
        *(fa.configure_guard, "deadline_factor", "a number above 0"),
        (0, -1.5, NAN, -INF, "50", True, HUGE, -HUGE, 1j, [1.0], ARRAY, Hostile()),
    ),
    *(
        (
            *(fa.configure_guard, name, "a number of at least 0"),
            (-1, -1e-300, NAN, -INF, "50", b"5", False, HUGE, 1j, [1.0], ARRAY),
        )
        for name in ("deadline_floor_ms", "cooldown_s")
    ),
    (fa.disable, "reason", "a str", NO_TEXT),
    (
        *(fa.reset_breakers, "kernel", "a symbol"),
        (5, True, b"fa", ["fa"], "", "a b", "a\0b", "../a", "\ud800", "x" * 128),
    ),
    (
        *(serve_metrics, "port", "an integer from 0 to 65535"),
        (-1, 65536, HUGE, True, 1.5, "9464", None, [1], ARRAY),
    ),
    (serve_metrics, "host", "a str", NO_TEXT),
    (serve_metrics, "host", "an address to listen at", ("",)),
    (
        *(serve_metrics, "registry", "a prometheus_client.CollectorRegistry"),
        (0, False, "REGISTRY", [], object(), Hostile()),
    ),
    *(
        (
            *(fa.watch_floor, name, "a positive number"),
            (0, -1, NAN, INF, HUGE, "2", True, None, 1j, [2.0], ARRAY),
        )
        for name in ("tflops", "seconds")
    ),
    (fa.watch_floor, "on_low", "a function", (0, "", "print", [print])),
    (fa.watch_floor, "simulated", "True or False", (0, 1, "no", None, ARRAY)),
    *(
        (function, "path", "a path", (None, 5, True, "", b"", "a\0b", ["a"], ARRAY))
        for function in (fa.disable_file, save, plot)
    ),
    (
        *(fa.disable_signal, "signum", "a signal that is no fault's"),
        (True, False, signal.SIGSEGV, signal.SIGABRT, int(signal.SIGBUS)),
    ),
    (
        *(fa.disable_signal, "signum", "a signal, and the main thread"),
        (0, -1, 9999, HUGE, 10.0, "USR1", None, [10], signal.SIGKILL, ARRAY),
    ),
    (
        *(_verify.set_every, "every", "a whole number of at least 0"),
        (-1, -HUGE, 1.0, NAN, True, "100", "1/100", None, [1], ARRAY),
    ),
    (
        *(fa.breakdown, "model", "a torch.nn.Module"),
        (None, 5, "model", [], torch.nn.Linear, torch.ones(2), Hostile()),
    ),
]
NEEDED = {fa.watch_floor: {"tflops": 2.0}}
CASES = [
    pytest.param(function, name, said, value, id=f"{function.__name__}-{name}-{number}")
    for function, name, said, values in TABLE
    for number, value in enumerate(values)
]


def state():
    """All that one of the functions could have changed."""
    status = fa.status()
    return (
        *(status["guard"], status["enabled"], status["verify"]["every"]),
        [signal.getsignal(number) for number in signal.valid_signals()],
        {thread.name for thread in threading.enumerate()},
    )


@pytest.fixture(autouse=True)
def as_before():
    yield
    fa.enable()


@pytest.mark.parametrize(("function", "name", "said", "value"), CASES)
def test_it_is_refused_by_name_and_nothing_is_done(function, name, said, value):
    before = state()
    arguments = {**NEEDED.get(function, {}), name: value}
    with pytest.raises(fa.FlashAttnError) as caught:
        function(**arguments)
    text = str(caught.value)
    assert text.startswith(f"{name}: expected {said}") and ", got " in text
    assert "\n" not in text and len(text) < 250
    assert state() == before


def test_one_bad_argument_beside_good_ones_changes_none():
    good = {"mode": "sync", "deadline_factor": 7.0, "cooldown_s": 3.0}
    bad = {"mode": 1, "deadline_factor": 0, "deadline_floor_ms": -1, "on_hang": 0}
    before = state()
    for name, value in bad.items():
        with pytest.raises(fa.FlashAttnError, match=f"^{name}: expected "):
            fa.configure_guard(**{**good, name: value})
    assert state() == before


@pytest.mark.parametrize(
    "host", ["nowhere.invalid", "a" * 70, "a..b", "a\0b", "\ud800", "256.1.1.1", "::1"]
)
def test_a_host_that_cannot_be_listened_at_leaves_the_registry_alone(host):
    client = pytest.importorskip("prometheus_client")
    registry, before = client.CollectorRegistry(), state()
    with pytest.raises(fa.FlashAttnError, match=r"^host, port: expected an address"):
        fa.serve_metrics(0, host, registry)
    assert client.generate_latest(registry) == b"" and state() == before


def no_thread(self):
    raise RuntimeError("can't start new thread")


def test_without_a_thread_metrics_are_not_half_served(monkeypatch):
    client = pytest.importorskip("prometheus_client")
    registry, before = client.CollectorRegistry(), state()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="new thread"):
        fa.serve_metrics(0, registry=registry)
    assert client.generate_latest(registry) == b"" and state() == before


def test_without_a_thread_no_signal_is_swallowed(monkeypatch):
    before = state()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="new thread"):
        fa.disable_signal()
    assert state() == before


def test_numbers_of_numpy_are_numbers():
    before = fa.status()["guard"]
    try:
        fa.configure_guard(cooldown_s=np.float32(2.5), deadline_factor=np.int64(9))
        made = fa.status()["guard"]
        assert (made["cooldown_s"], made["deadline_factor"]) == (2.5, 9.0)
    finally:
        fa.configure_guard(
            cooldown_s=before["cooldown_s"], deadline_factor=before["deadline_factor"]
        )


def test_public_functions_have_no_argument_for_tests():
    seams = {"status", "guard", "disable", "clock", "now"}
    for name, function in ((name, getattr(fa, name)) for name in fa.__all__):
        names = getattr(getattr(function, "__code__", None), "co_varnames", ())
        count = getattr(getattr(function, "__code__", None), "co_argcount", 0)
        more = getattr(getattr(function, "__code__", None), "co_kwonlyargcount", 0)
        assert not seams & set(itertools.islice(names, count + more)), name
