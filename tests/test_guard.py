"""Deadlines, breakers, the switch, and what callers get when a kernel fails.

Faults are the simulator's; the paths of a real GPU's streams and events are in
tests/c/test_guard.c and, on the stand-in, in tests/test_guard_gpu.py.

SPDX-License-Identifier: BSD-3-Clause
"""

import threading
import time

import pytest
import torch
import torch.nn.functional as F
from helpers import builtin, needs_simulator, qkv, relative_error
from torch.utils.checkpoint import checkpoint

import flash_attn_rocm as fa
import hipsim
from flash_attn_rocm import FlashAttnError, Reason, _guard

pytestmark = needs_simulator

FORWARD = "fa_fwd_f16_d64_plain"


@pytest.fixture(autouse=True)
def guarded():
    """Patched, on the simulator, with a policy of its own and no fault left behind."""
    with fa.patched(), fa.simulate("gfx906"):
        yield
    hipsim.set_fault(None)
    fa.configure_guard(
        "async",
        deadline_factor=50.0,
        deadline_floor_ms=2000.0,
        cooldown_s=60.0,
        on_hang="report",
    )


@pytest.fixture
def inputs():
    return qkv(1, 2, 70, 64, dtype=torch.float16)


def sdpa(inputs):
    """The call's result and its reason."""
    out = F.scaled_dot_product_attention(*inputs)
    return out, fa.last_call().reason


def misses():
    return fa.status()["guard"]["misses"]


def breaker():
    """The one breaker that is not closed, or None."""
    rows = fa.status()["breakers"]
    assert len(rows) <= 1
    return rows[0] if rows else None


# A factor that takes the smallest kernel beyond a deadline of two seconds.
FAULTS = {
    "launch:nth=1": Reason.FAILED,
    "memory:nth=1": Reason.FAILED,
    "endless:nth=1": Reason.LATE,
    "endless:nth=1,after=500": Reason.LATE,
    "slow:nth=1,factor=10000000": Reason.LATE,
}


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_call_that_meets_a_fault_gets_stocks_result(inputs, fault, mode):
    fa.configure_guard(mode)
    before = misses()
    hipsim.set_fault(fault)
    out, reason = sdpa(inputs)
    assert torch.equal(out, builtin()(*inputs))
    assert reason is FAULTS[fault]
    assert misses() - before == (reason is Reason.LATE)
    assert (breaker()["kernel"], breaker()["state"]) == (FORWARD, "open")


def test_a_slow_kernel_within_its_deadline_runs_fused(inputs):
    hipsim.set_fault("slow:nth=1,factor=10")
    assert sdpa(inputs)[1] is Reason.FUSED and breaker() is None


def test_the_deadline_follows_the_policy(inputs):
    fa.configure_guard(deadline_factor=1e-9, deadline_floor_ms=0)
    assert sdpa(inputs)[1] is Reason.LATE
    _guard.reset()
    fa.configure_guard(deadline_factor=1e-9, deadline_floor_ms=2000)
    assert sdpa(inputs)[1] is Reason.FUSED


def test_the_deadline_grows_with_the_work():
    # One that the estimate alone makes: the same factor lets small and large run,
    # and a small call as slow as the large one is late.
    fa.configure_guard(deadline_factor=20.0, deadline_floor_ms=0)
    small = qkv(1, 1, 64, 64, dtype=torch.float16)
    large = qkv(1, 1, 640, 64, dtype=torch.float16)
    assert sdpa(small)[1] is Reason.FUSED and sdpa(large)[1] is Reason.FUSED


def test_off_neither_waits_nor_remembers(inputs):
    fa.configure_guard("off", deadline_factor=1e-9, deadline_floor_ms=0)
    assert sdpa(inputs)[1] is Reason.FUSED
    hipsim.set_fault("launch:nth=1")
    assert sdpa(inputs)[1] is Reason.FAILED
    assert breaker() is None and sdpa(inputs)[1] is Reason.FUSED


def test_an_open_breaker_sends_calls_to_stock_and_others_run_fused(inputs):
    hipsim.set_fault("launch:nth=1")
    sdpa(inputs)
    out, reason = sdpa(inputs)
    assert reason is Reason.BREAKER and torch.equal(out, builtin()(*inputs))
    others = qkv(1, 2, 70, 64, dtype=torch.float32)
    assert sdpa(others)[1] is Reason.FUSED
    told = fa.explain(*inputs)
    assert (told.fused, told.reason) == (False, Reason.BREAKER)
    assert FORWARD in told.why and fa.explain(*others).fused


def test_after_the_cool_down_one_call_tries_and_closes(inputs):
    fa.configure_guard(cooldown_s=0)
    hipsim.set_fault("launch:nth=1")
    sdpa(inputs)
    assert breaker()["failures"] == 1 and breaker()["retry_in_s"] == 0
    assert sdpa(inputs)[1] is Reason.FUSED and breaker() is None


def test_a_try_that_fails_doubles_the_cool_down(inputs):
    fa.configure_guard(cooldown_s=0)
    hipsim.set_fault("launch:nth=1,every=1")
    sdpa(inputs)
    fa.configure_guard(cooldown_s=10)
    seen = []
    for _ in range(4):
        sdpa(inputs)
        seen.append((breaker()["failures"], breaker()["retry_in_s"]))
        if breaker()["retry_in_s"]:
            break
    # The second failure in a row: twice ten seconds at least.
    assert seen[-1][0] == 2 and 19 <= seen[-1][1] <= 21


def test_the_rest_of_a_cool_down_is_told_by_the_clock_that_began_it(inputs):
    # C's time() is some milliseconds late: at the start of a second it says the last.
    assert sdpa(inputs)[1] is Reason.FUSED
    now = time.clock_gettime(time.CLOCK_REALTIME)
    while time.clock_gettime(time.CLOCK_REALTIME) < int(now) + 1:
        pass
    _guard.trip("sim", FORWARD, "by hand", 10)
    assert 10 <= _guard.breaker_list()[0]["retry_in_s"] <= 11


def test_only_one_of_many_threads_tries(inputs):
    fa.configure_guard(cooldown_s=0)
    hipsim.set_fault("launch:nth=1")
    sdpa(inputs)
    reasons = []
    start = threading.Barrier(8)

    def call():
        with fa.simulate("gfx906"):
            start.wait()
            reasons.append(sdpa(inputs)[1])

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reasons) == 8 and set(reasons) <= {Reason.FUSED, Reason.BREAKER}
    assert Reason.FUSED in reasons and breaker() is None


def test_a_backward_that_fails_is_answered_with_the_right_gradients(inputs):
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = F.scaled_dot_product_attention(*leaves)
    assert fa.last_call().reason is Reason.FUSED
    hipsim.set_fault("endless:nth=2")
    out.float().sum().backward()
    assert fa.last_call().reason is Reason.LATE
    exact = [t.detach().double().requires_grad_() for t in inputs]
    builtin()(*exact).sum().backward()
    for got, want in zip(leaves, exact):
        assert relative_error(got.grad, want.grad) < 2e-3


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fault", ["first", "second", "breaker", "disable"])
def test_a_checkpoint_recomputes_what_its_forward_was(fault, reentrant, dropout_p):
    """The output is linear in v, so its sum is the inner product of v and dv."""

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)

    torch.manual_seed(0)
    leaves = [t.requires_grad_() for t in qkv(1, 2, 70, 64, dtype=torch.float32)]
    attend(*leaves)
    symbol = fa.last_call().kernel
    try:
        if fault == "first":
            hipsim.set_fault("launch:nth=1")
        out = checkpoint(attend, *leaves, use_reentrant=reentrant)
        if fault == "first":
            _guard.reset()
        elif fault == "second":
            hipsim.set_fault("launch:nth=1")
        elif fault == "breaker":
            _guard.trip("sim", symbol, "a test")
        else:
            fa.disable("a test")
        out.sum().backward()
    finally:
        fa.enable()
    v = leaves[2]
    assert (v.grad * v).sum().item() == pytest.approx(out.sum().item(), rel=1e-4)


def test_a_forward_that_failed_can_be_differentiated_twice():
    leaves = [t.requires_grad_() for t in qkv(1, 1, 20, 16, dtype=torch.float64)]

    def penalty(attend):
        out = attend(*leaves)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    want = penalty(F.scaled_dot_product_attention)
    hipsim.set_fault("launch:nth=1")
    got = penalty(F.scaled_dot_product_attention)
    assert hipsim.faults_fired()["launch"] == 1
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_functions_without_a_stock_function_raise(inputs):
    q, k, v = (t.transpose(1, 2) for t in inputs)
    hipsim.set_fault("endless:nth=1")
    with pytest.raises(FlashAttnError, match=f"{FORWARD}.*LaunchTimeOut"):
        fa.flash_attn_func(q, k, v)
    with pytest.raises(FlashAttnError, match="breaker open after 1 failure"):
        fa.flash_attn_func(q, k, v)


def test_rotary_is_guarded_too():
    x = torch.randn(1, 4, 1, 8)
    table = torch.randn(4, 4)
    hipsim.set_fault("endless:nth=1")
    with pytest.raises(FlashAttnError, match="LaunchTimeOut"):
        fa.apply_rotary(x, x, table, table)
    assert breaker()["kernel"].startswith("fa_rotary")


def test_a_call_that_is_refused_opens_no_breaker(inputs):
    with pytest.raises(FlashAttnError):
        fa.attention(*inputs, softcap=-1.0)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(inputs[0], inputs[1][..., :3], inputs[2])
    assert breaker() is None


def test_latency_counts_calls_by_kernel(inputs):
    def known():
        rows = fa.status()["latency"]
        rows = {row["kernel"]: row for row in rows if row["device"] == "sim"}
        return rows.get(FORWARD, {"calls": 0, "flops": 0.0})

    before = known()
    start = time.perf_counter()
    for _ in range(3):
        sdpa(inputs)
    spent = time.perf_counter() - start
    after = known()
    assert after["device"] == "sim" and after["calls"] - before["calls"] == 3
    # Two products of 70 x 70 x 64 for each of two heads, two flops each.
    assert after["flops"] - before["flops"] == pytest.approx(
        3 * 2 * 2 * 2 * 70 * 70 * 64, rel=1e-2
    )
    assert 0 < after["p50_s"] <= after["p99_s"]
    assert after["seconds"] - before.get("seconds", 0.0) <= spent


class TestSwitch:
    @pytest.fixture(autouse=True)
    def enabled(self):
        yield
        fa.enable()

    def test_disable_sends_every_call_to_stock_until_enable(self, inputs):
        fa.disable("a test")
        out, reason = sdpa(inputs)
        assert reason is Reason.DISABLED and torch.equal(out, builtin()(*inputs))
        assert not fa.status()["enabled"] and not fa.explain(*inputs).fused
        fa.enable()
        assert sdpa(inputs)[1] is Reason.FUSED and fa.status()["enabled"]

    def test_our_own_functions_refuse(self, inputs):
        fa.disable("too hot")
        with pytest.raises(FlashAttnError, match=r"disable.*too hot"):
            fa.attention(*inputs)

    def test_a_compiled_function_follows_the_switch(self, inputs):
        compiled = torch.compile(
            lambda *t: F.scaled_dot_product_attention(*t), backend="aot_eager"
        )
        counters = fa.status()["counters"]["fused"]
        compiled(*inputs)
        after = fa.status()["counters"]["fused"]
        assert after[FORWARD] == counters.get(FORWARD, 0) + 1
        fa.disable()
        assert torch.equal(compiled(*inputs), builtin()(*inputs))
        assert fa.status()["counters"]["fused"][FORWARD] == after[FORWARD]

    def test_a_backward_whose_forward_ran_stays_fused(self, inputs):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = F.scaled_dot_product_attention(*leaves)
        fa.disable()
        out.sum().backward()
        assert fa.last_call().reason is Reason.FUSED


class TestPolicy:
    @pytest.mark.parametrize(
        ("policy", "said"),
        [
            ({"mode": "often"}, "mode: expected off, async or sync"),
            ({"deadline_factor": 0}, "factor: expected a number above 0, got 0"),
            ({"deadline_factor": float("nan")}, "factor: expected a number above 0"),
            ({"deadline_floor_ms": -1}, "floor_ms: expected a number of at least 0"),
            ({"cooldown_s": float("nan")}, "cooldown_s: expected"),
            (
                {"cooldown_s": "long"},
                "cooldown_s: expected a number of at least 0, got",
            ),
            ({"on_hang": "panic"}, "on_hang: expected report or abort, got 'panic'"),
        ],
    )
    def test_a_malformed_policy_is_refused_and_changes_nothing(self, policy, said):
        before = fa.status()["guard"]
        with pytest.raises(FlashAttnError, match=said):
            fa.configure_guard(**policy)
        assert fa.status()["guard"] == before

    def test_times_beyond_all_bounds_are_as_good_as_never(self, inputs):
        fa.configure_guard(deadline_floor_ms=1e300, deadline_factor=1e300)
        assert sdpa(inputs)[1] is Reason.FUSED

    def test_a_breaker_can_be_opened_by_hand(self, inputs):
        sdpa(inputs)
        _guard.trip("sim", FORWARD, "by hand")
        assert sdpa(inputs)[1] is Reason.BREAKER and breaker()["cause"] == "by hand"
        _guard.reset(FORWARD)
        assert sdpa(inputs)[1] is Reason.FUSED

    @pytest.mark.parametrize(
        ("device", "kernel", "said"),
        [
            ("moon", FORWARD, "device: expected one such as sim or hip:0, got moon"),
            ("hip:0", FORWARD, "kernel: expected one that hip:0 has been asked for"),
            ("sim", "fa_none", "kernel: expected one that sim:0 has been asked for"),
        ],
    )
    def test_what_does_not_exist_cannot_be_opened(self, inputs, device, kernel, said):
        sdpa(inputs)
        with pytest.raises(FlashAttnError, match=said):
            _guard.trip(device, kernel, "x")
