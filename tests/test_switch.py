"""Who calls disable() without a person: a floor of TFLOPS, a watched file, a signal.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import ARCH, needs_simulator

import flash_attn_rocm as fa
from flash_attn_rocm import FlashAttnError, _switch
from flash_attn_rocm._switch import Floor, disable_file, disable_signal, watch_floor

TICK = 15.0  # seconds between two looks, as Prometheus has between two scrapes


class Device:
    """A call class whose counters run at a rate, per second of wall-clock time."""

    def __init__(self, name="hip:0"):
        self.row = {"device": name, "kernel": "k", "seconds": 0.0, "flops": 0.0}

    def run(self, tflops, busy=0.1):
        self.row["seconds"] += busy * TICK
        self.row["flops"] += tflops * 1e12 * busy * TICK


def first_fire(floor, devices, rates, start=0.0):
    """When `floor` first tells something (seconds), or None.

    Args:
        rates: for each look a number of TFLOPS, None for no call.
    """
    for step, rate in enumerate(rates):
        now = start + step * TICK
        for device in devices:
            if rate is not None:
                device.run(rate)
        if floor.look([device.row for device in devices], now):
            return now - start
    return None


def test_below_the_floor_fires_after_its_seconds_and_not_before():
    # The first look has no rate yet: low from the second on.
    assert first_fire(Floor(2.0, 300), [Device()], [1.0] * 60) == 300 + TICK


@pytest.mark.parametrize("tflops", [2.1, 26.0])
def test_above_the_floor_never_fires(tflops):
    assert first_fire(Floor(2.0, 300), [Device()], [tflops] * 60) is None


def test_a_dip_of_three_minutes_does_not_fire_and_one_of_eight_does():
    short = [3.0] * 20 + [0.1] * 12 + [3.0] * 40
    long = [3.0] * 20 + [0.1] * 32 + [3.0] * 40
    assert first_fire(Floor(2.0, 300), [Device()], short) is None
    assert first_fire(Floor(2.0, 300), [Device()], long) is not None


def test_two_short_dips_are_not_a_long_one():
    rates = ([3.0] * 20 + [0.1] * 12) * 3
    assert first_fire(Floor(2.0, 300), [Device()], rates) is None


def test_an_idle_device_is_not_slow():
    device = Device()
    assert first_fire(Floor(2.0, 300), [device], [1.0] * 8 + [None] * 60) is None


def test_seldom_calls_count_as_long_as_the_window_has_one():
    rates = [1.0, None, None, None] * 30  # one a minute
    assert first_fire(Floor(2.0, 300), [Device()], rates) is not None


def test_kernels_of_a_device_are_added_up_and_devices_are_not():
    slow, fast, other = Device(), Device(), Device("hip:1")
    floor = Floor(2.0, 300)
    for step in range(60):
        slow.run(1.0)
        fast.run(5.0)  # 3 together
        other.run(1.5)
        found = floor.look([d.row for d in (slow, fast, other)], step * TICK)
        if found:
            break
    assert found == ["hip:1 at 1.5 TFLOPS"]


@pytest.mark.parametrize("name", ["sim", "null:0"])
def test_what_is_no_gpu_is_looked_at_only_if_asked(name):
    assert first_fire(Floor(2.0, 300), [Device(name)], [1e-6] * 60) is None
    assert first_fire(Floor(2.0, 300, True), [Device(name)], [1e-6] * 60) is not None


def test_after_firing_the_time_starts_anew():
    floor, device = Floor(2.0, 300), Device()
    first = first_fire(floor, [device], [1.0] * 60)
    assert first_fire(floor, [device], [1.0] * 60, start=first + TICK) == 300


def test_counters_that_were_reset_are_a_new_start_and_no_rate():
    floor, device = Floor(2.0, 300), Device()
    assert first_fire(floor, [device], [3.0] * 20) is None
    device.row.update(seconds=0.0, flops=0.0)
    assert first_fire(floor, [device], [3.0] * 20, start=300) is None
    device.row.update(seconds=0.0, flops=0.0)
    assert first_fire(floor, [device], [1.0] * 60, start=600) == 300 + TICK


def test_the_window_forgets_what_was_two_minutes_ago():
    """A rate that collapses is seen at once, however fast the hours before were."""
    floor, device = Floor(2.0, 300), Device()
    assert first_fire(floor, [device], [20.0] * 500) is None
    after = first_fire(floor, [device], [0.1] * 60, start=500 * TICK)
    assert after is not None and after <= 120 + 300


# --------------------------------------------------------------------------
# Threads


def soon(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "nothing has happened in 20 s"
        time.sleep(0.005)


@pytest.fixture
def status_is(monkeypatch):
    """status_is(function): what status() returns from now on."""

    def put(function):
        stand_in = SimpleNamespace(status=lambda wait: function())
        monkeypatch.setattr(_switch, "_status", stand_in)

    return put


def falling():
    """A status whose device makes half a TFLOPS."""
    device = Device()

    def status():
        device.run(0.5)
        return {"latency": [device.row]}

    return status


def test_watch_floor_calls_what_it_was_given_and_says_why(status_is):
    said = queue.SimpleQueue()
    status_is(falling())
    with watch_floor(2.0, 0.1, said.put):
        sentence = said.get(timeout=20)
    assert sentence == "hip:0 at 0.5 TFLOPS for 0.1 s, below the floor of 2"


def test_watch_floor_disables_unless_told_otherwise(guard, status_is):
    status_is(falling())
    with watch_floor(2.0, 0.1):
        soon(lambda: guard.switch.off)
    assert "below the floor" in guard.switch.why


def test_a_look_that_fails_is_logged_and_the_next_one_is_made(caplog, status_is):
    working = falling()
    said = queue.SimpleQueue()
    looks = []

    def status():
        looks.append(1)
        if len(looks) < 3:
            raise RuntimeError("made up")
        return working()

    status_is(status)
    with watch_floor(2.0, 0.1, said.put):
        said.get(timeout=20)
    assert "made up" in caplog.text


def test_a_closed_watch_has_no_thread_and_looks_no_more(status_is):
    looks = []
    status_is(lambda: looks.append(1) or {"latency": []})
    watch = watch_floor(1.0, 0.02, print)
    soon(lambda: looks)
    watch.close()
    watch.close()
    before = len(looks)
    time.sleep(0.05)
    assert len(looks) == before and not watch._thread.is_alive()


def test_on_low_may_close_the_watch_itself(status_is):
    closed = threading.Event()

    def on_low(_):
        watch.close()
        closed.set()

    status_is(falling())
    watch = watch_floor(2.0, 0.1, on_low)
    assert closed.wait(20)
    soon(lambda: not watch._thread.is_alive())


@pytest.mark.parametrize(
    "value", [0, -1.0, float("nan"), float("inf"), "2", None, True]
)
def test_a_floor_that_is_no_positive_number_is_refused_by_name(value):
    with pytest.raises(FlashAttnError, match=r"^tflops: expected a positive number"):
        watch_floor(value)
    with pytest.raises(FlashAttnError, match=r"^seconds: expected a positive number"):
        watch_floor(1.0, value)


class Guard:
    """The part of _guard that is used: disable(), enable(), and what is in force."""

    class Switch:
        off = False
        why = ""

    def __init__(self):
        self.switch = self.Switch()
        self.calls = []

    def disable(self, reason=""):
        self.calls.append(reason)
        self.switch.why, self.switch.off = reason, True

    def enable(self):
        self.switch.why, self.switch.off = "", False


@pytest.fixture
def guard(monkeypatch):
    monkeypatch.setattr(_switch, "_PERIOD_S", 0.01)
    stand_in = Guard()
    monkeypatch.setattr(_switch, "_guard", stand_in)
    return stand_in


def some_looks():
    time.sleep(0.1)


def test_calls_are_stock_while_the_file_exists(guard, tmp_path):
    path = tmp_path / "stock"
    with disable_file(path):
        assert not guard.switch.off
        for _ in range(2):
            path.touch()
            soon(lambda: guard.switch.off)
            assert guard.switch.why == f"the file {path} exists"
            path.unlink()
            soon(lambda: not guard.switch.off)


def test_a_file_that_stays_disables_once(guard, tmp_path):
    (tmp_path / "stock").touch()
    with disable_file(tmp_path / "stock"):
        some_looks()
    assert len(guard.calls) == 1


@pytest.mark.parametrize("kind", [str, os.fsencode])
def test_a_file_that_is_there_already_is_seen_at_once(guard, tmp_path, kind):
    (tmp_path / "stock").touch()
    with disable_file(kind(str(tmp_path / "stock"))):
        assert guard.switch.off


def test_enable_does_not_outlast_the_file(guard, tmp_path):
    path = tmp_path / "stock"
    path.touch()
    with disable_file(path):
        guard.enable()
        soon(lambda: guard.switch.off)


@pytest.mark.parametrize("first", [True, False])
def test_the_file_undoes_no_disable_of_somebody_else(guard, tmp_path, first):
    path = tmp_path / "stock"
    if first:
        guard.disable("by hand")
    path.touch()
    with disable_file(path):
        guard.disable("by hand")
        path.unlink()
        some_looks()
    assert guard.switch.off and guard.switch.why == "by hand"


def test_a_file_is_never_opened_so_a_pipe_or_a_dangling_link_will_do(guard, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("pipe", "link"):
        guard.enable()
        with disable_file(tmp_path / name):
            assert guard.switch.off


def test_closing_leaves_the_state_as_it_is(guard, tmp_path):
    (tmp_path / "stock").touch()
    disable_file(tmp_path / "stock").close()
    (tmp_path / "stock").unlink()
    some_looks()
    assert guard.switch.off


def test_a_path_that_is_none_is_refused_by_name(guard):
    with pytest.raises(FlashAttnError, match=r"^path: expected a path, got None"):
        disable_file(None)


@pytest.fixture
def usr1():
    before = signal.getsignal(signal.SIGUSR1)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_disables_in_another_thread(usr1, guard):
    """A handler runs inside of whatever the main thread does: no lock is safe there."""
    said = queue.SimpleQueue()
    guard.disable = lambda r: said.put((r, threading.current_thread()))
    disable_signal(usr1)
    for _ in range(3):
        os.kill(os.getpid(), usr1)
        reason, thread = said.get(timeout=20)
        assert reason == f"signal: {signal.strsignal(usr1)}"
        assert thread is not threading.main_thread()


def test_a_handler_that_was_there_is_called_too(usr1, guard):
    seen, said = [], queue.SimpleQueue()
    signal.signal(usr1, lambda number, frame: seen.append(number))
    guard.disable = said.put
    disable_signal(usr1)
    os.kill(os.getpid(), usr1)
    said.get(timeout=20)
    assert seen == [usr1]


def test_a_signal_that_cannot_be_handled_is_refused_by_name():
    for number in (signal.SIGKILL, 9999, "USR1"):
        with pytest.raises(FlashAttnError, match=r"^signum: expected a signal, and"):
            disable_signal(number)


def test_another_thread_than_the_main_one_is_refused(usr1):
    errors = []

    def other():
        try:
            disable_signal(usr1)
        except FlashAttnError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


# --------------------------------------------------------------------------
# This package's own disable()


@pytest.fixture
def process():
    """Enabled afterwards, whatever happens."""
    yield
    _switch._guard.enable()


def call():
    """Why stock SDPA answered a call, or that it did not."""
    q = torch.ones(1, 1, 3, 64, dtype=torch.float16)
    with fa.patched(), fa.simulate(ARCH):
        F.scaled_dot_product_attention(q, q, q)
    return fa.last_call().reason.value


@needs_simulator
def test_real_calls_are_stock_while_the_file_exists(process, tmp_path, monkeypatch):
    monkeypatch.setattr(_switch, "_PERIOD_S", 0.01)
    path = tmp_path / "stock"
    path.touch()
    with disable_file(path):
        assert call() == "disabled"
        path.unlink()
        soon(lambda: fa.status()["enabled"])
        assert call() == "fused"


@needs_simulator
def test_real_calls_are_stock_after_the_signal(process, usr1):
    disable_signal(usr1)
    assert call() == "fused"
    os.kill(os.getpid(), usr1)
    soon(lambda: not fa.status()["enabled"])
    assert call() == "disabled"


@needs_simulator
def test_real_calls_are_stock_after_the_floor(process):
    """No simulator reaches a TFLOPS."""
    with watch_floor(1.0, 0.1, simulated=True):
        soon(lambda: call() == "disabled")
