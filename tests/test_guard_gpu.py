"""The guard on a real GPU's streams and events: the stand-in, or a card.

A deadline of nothing makes any kernel late, which is all that a test can ask of a
healthy GPU.

SPDX-License-Identifier: BSD-3-Clause
"""

import gc
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from helpers import builtin, relative_error

import flash_attn_rocm as fa
from flash_attn_rocm import FlashAttnError, Reason, _guard
from flash_attn_rocm._config import config

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or config.device not in ("auto", "standin"),
    reason="no GPU that runs kernels",
)


@pytest.fixture(autouse=True)
def guarded():
    with fa.patched():
        yield
    wait_until_over()
    fa.configure_guard("async", deadline_factor=50.0, deadline_floor_ms=2000.0)


def counts():
    return fa.status()["guard"]


def wait_until_over():
    torch.cuda.synchronize()
    deadline = time.monotonic() + 10
    while counts()["outstanding"] or counts()["quarantined"]:
        assert time.monotonic() < deadline, counts()
        time.sleep(0.005)


def never_in_time(mode):
    fa.configure_guard(mode, deadline_factor=1e-12, deadline_floor_ms=0)


def inputs(length=2048, heads=8, requires_grad=False):
    shape = (2, heads, length, 64)
    made = [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3)]
    return [t.requires_grad_(requires_grad) for t in made]


def is_right(out, tensors):
    exact = builtin()(*(t.detach().float() for t in tensors))
    return relative_error(out.float(), exact) < 2e-3


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_calls_in_time_are_fused_right_and_counted(mode):
    fa.configure_guard(mode)
    before = counts()
    tensors = inputs(requires_grad=True)
    for _ in range(20):
        out = F.scaled_dot_product_attention(*tensors)
        assert fa.last_call().reason is Reason.FUSED
        out.sum().backward()
    assert is_right(out, tensors)
    wait_until_over()
    after = counts()
    for name in ("misses", "unwatched", "captured"):
        assert after[name] == before[name], name
    assert not fa.status()["breakers"]
    rows = [r for r in fa.status()["latency"] if r["device"] != "sim"]
    assert rows and all(0 < r["p50_s"] <= r["p99_s"] < 2 for r in rows)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_latency_is_what_the_devices_clock_says(mode):
    fa.configure_guard(mode)
    tensors = inputs(length=4096)

    def known():
        wait_until_over()
        rows = [r for r in fa.status()["latency"] if "fwd_f16_d64" in r["kernel"]]
        return sum(r["calls"] for r in rows), sum(r["seconds"] for r in rows)

    F.scaled_dot_product_attention(*tensors)
    calls, seconds = known()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    marks[0].record()
    for mark in marks[1:]:
        F.scaled_dot_product_attention(*tensors)
        mark.record()
    after_calls, after_seconds = known()
    assert after_calls == calls + 20
    spent = sum(a.elapsed_time(b) for a, b in zip(marks, marks[1:])) * 1e-3
    assert 0.3 * spent < after_seconds - seconds < 1.1 * spent


def test_sync_waits_for_what_comes_before_and_is_waited_for():
    fa.configure_guard("sync")
    tensors = inputs(length=512)
    exact = builtin()(*(t.float() for t in tensors))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            late = [torch.zeros_like(t) for t in tensors]
            torch.cuda._sleep(2_000_000)
            for to, of in zip(late, tensors):
                to.copy_(of)
            out = F.scaled_dot_product_attention(*late)
            for t in late:
                t.zero_()  # in the order of the stream: behind the call
            doubled = out * 2
            del out
    stream.synchronize()
    assert relative_error(doubled.float(), 2 * exact) < 2e-3


def test_work_before_the_call_does_not_count_against_its_deadline():
    fa.configure_guard("sync", deadline_factor=1e-12, deadline_floor_ms=200)
    tensors = inputs(length=256)
    F.scaled_dot_product_attention(*tensors)
    torch.cuda._sleep(1_500_000_000)  # most of a second
    F.scaled_dot_product_attention(*tensors)
    assert fa.last_call().reason is Reason.FUSED


def test_a_late_call_is_answered_by_stock_and_its_memory_kept_until_it_is_over():
    never_in_time("sync")
    gc.collect()
    earlier = torch.cuda.memory_allocated()  # other tests' tensors
    tensors = inputs(length=4096)
    stock = builtin()(*tensors)
    for _ in range(5):
        before = counts()["misses"]
        out = F.scaled_dot_product_attention(*tensors)
        assert fa.last_call().reason is Reason.LATE
        assert counts()["misses"] == before + 1
        assert counts()["quarantined"] >= 0
        # Memory of the same sizes, which the late kernel must not write to.
        others = [torch.full_like(out, 7.0) for _ in range(8)]
        torch.cuda.synchronize()
        assert all(bool((t == 7.0).all()) for t in others)
        assert relative_error(out.float(), stock.float()) < 1e-3
        del others, out
        _guard.reset()
    wait_until_over()
    gc.collect()
    held = torch.cuda.memory_allocated() - earlier
    sizes = sum(t.numel() * t.element_size() for t in (*tensors, stock))
    assert held <= sizes + 2**20, "something of the late calls is still held"


def test_a_late_backward_gives_the_right_gradients():
    tensors = inputs(length=256, heads=2, requires_grad=True)
    out = F.scaled_dot_product_attention(*tensors)
    never_in_time("sync")
    before = fa.status()["counters"]["fallback"].get("late", 0)
    out.sum().backward()  # on a thread of autograd's
    assert fa.status()["counters"]["fallback"]["late"] == before + 1
    exact = [t.detach().double().requires_grad_() for t in tensors]
    builtin()(*exact).sum().backward()
    for got, want in zip(tensors, exact):
        assert relative_error(got.grad, want.grad) < 5e-3


def test_a_late_call_of_our_own_function_raises():
    never_in_time("sync")
    q, k, v = (t.transpose(1, 2) for t in inputs())
    with pytest.raises(FlashAttnError, match="missed its deadline"):
        fa.flash_attn_func(q, k, v)


def test_async_notices_later_and_the_result_is_right(capfd):
    never_in_time("async")
    before = counts()["misses"]
    tensors = inputs(length=4096)
    # Long enough for the watching thread to look while it runs.
    outs = [F.scaled_dot_product_attention(*tensors) for _ in range(30)]
    fa.configure_guard("async", deadline_factor=50.0, deadline_floor_ms=2000.0)
    wait_until_over()
    assert counts()["misses"] > before
    assert "missed its deadline" in capfd.readouterr().err
    assert is_right(outs[0], tensors)
    F.scaled_dot_product_attention(*tensors)
    assert fa.last_call().reason is Reason.BREAKER


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_captured_call_is_recorded_and_not_waited_for(mode):
    fa.configure_guard(mode)
    tensors = inputs(length=512)
    F.scaled_dot_product_attention(*tensors)  # loads the kernels
    wait_until_over()
    before = counts()["captured"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(*tensors)
    assert counts()["captured"] == before + 1
    for t in tensors:
        t.copy_(torch.randn_like(t))
    graph.replay()
    torch.cuda.synchronize()
    assert is_right(out, tensors)


def test_the_watching_thread_disturbs_no_capture_of_another():
    fa.configure_guard("async")
    tensors = inputs(length=2048)
    for _ in range(10):
        graph = torch.cuda.CUDAGraph()
        for _ in range(20):  # in flight while the graph is captured
            F.scaled_dot_product_attention(*tensors)
        with torch.cuda.graph(graph, capture_error_mode="global"):
            y = tensors[0] * 2
            time.sleep(0.01)
            y = y + 1
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, tensors[0] * 2 + 1)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_many_threads_and_streams_at_once(mode):
    fa.configure_guard(mode)
    failures = []

    def work(seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(25):
                shape = (1, 2, 64 * (1 + (seed + i) % 7), 64)
                tensors = [
                    torch.randn(
                        shape, device="cuda", dtype=torch.float16, generator=generator
                    ).requires_grad_()
                    for _ in range(3)
                ]
                out = F.scaled_dot_product_attention(*tensors)
                out.sum().backward()
                if not is_right(out, tensors):
                    failures.append((seed, i))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not fa.status()["breakers"]


def test_late_calls_of_many_threads_give_all_their_memory_back():
    never_in_time("sync")
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()

    def work():
        for _ in range(10):
            F.scaled_dot_product_attention(*inputs(length=1024))
            _guard.reset()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until_over()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_a_capture_on_another_thread_survives_calls_in_sync_mode():
    fa.configure_guard("sync")
    tensors = inputs(length=512)
    F.scaled_dot_product_attention(*tensors)
    go, stop = threading.Event(), threading.Event()

    def calls():
        stream = torch.cuda.Stream()
        go.set()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                F.scaled_dot_product_attention(*tensors)

    thread = threading.Thread(target=calls)
    thread.start()
    go.wait()
    try:
        for _ in range(10):
            graph = torch.cuda.CUDAGraph()
            # The other thread allocates, which a global capture forbids to torch.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = tensors[0] * 2
                time.sleep(0.01)
            graph.replay()
            torch.cuda.current_stream().synchronize()
    finally:
        stop.set()
        thread.join()
    assert torch.equal(y, tensors[0] * 2) and not fa.status()["breakers"]
