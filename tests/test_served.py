"""Compiled graphs go on when a kernel fails: fwd_served and bwd_served.

SPDX-License-Identifier: BSD-3-Clause
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import builtin, needs_simulator, qkv, relative_error

import flash_attn_rocm as fa
import hipsim
from flash_attn_rocm import Reason, _chunked, _guard, _ops, _served, _verify
from flash_attn_rocm._features import Features

pytestmark = needs_simulator

FORWARD = "fa_fwd_f16_d64_plain"


@pytest.fixture(autouse=True)
def guarded():
    torch._dynamo.reset()
    with fa.patched(), fa.simulate("gfx906"):
        yield
    hipsim.set_fault(None)
    _verify.set_every(0)


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def inputs():
    return [t.requires_grad_() for t in qkv(1, 2, 70, 64)]


def step(tensors):
    """Loss and gradients of a compiled training step, and its fallbacks by reason."""
    before = dict(fa.status()["counters"]["fallback"])
    attend = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    out = attend(*tensors)
    grads = torch.autograd.grad(out.float().square().sum(), tensors)
    after = fa.status()["counters"]["fallback"]
    new = {r: n - before.get(r, 0) for r, n in after.items() if n != before.get(r, 0)}
    return (out.detach(), *grads), new


def is_right(results, tensors):
    exact = [t.detach().double().requires_grad_() for t in tensors]
    out = builtin()(*exact)
    want = (out.detach(), *torch.autograd.grad(out.square().sum(), exact))
    return all(relative_error(got, w) < 3e-3 for got, w in zip(results, want))


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        (None, {}),
        ("launch:nth=1", {"failed": 1}),
        ("endless:nth=1", {"late": 1}),
        ("launch:nth=2", {"failed": 1}),  # of the backward
        ("endless:nth=3", {"late": 1}),
        ("memory:nth=1,every=1", {"failed": 2}),
    ],
)
def test_a_fault_in_a_compiled_step_leaves_right_results(fault, reasons):
    tensors = inputs()
    hipsim.set_fault(fault)
    results, new = step(tensors)
    assert new == reasons and is_right(results, tensors)


def test_an_open_breaker_in_a_compiled_step_leaves_right_results():
    tensors = inputs()
    step(tensors)
    _guard.trip("sim", FORWARD, "by a test")
    results, new = step(tensors)
    assert new == {"breaker": 1} and is_right(results, tensors)


def test_a_compiled_result_is_verified_too():
    tensors = inputs()
    _verify.set_every(1)
    found = 0
    for seed in range(60):
        hipsim.set_fault(f"lds-flip:nth=1,bits=64,seed={seed}")
        results, new = step(tensors)
        found += new.get("verify", 0)
        assert is_right(results, tensors), seed
        _guard.reset()
    assert found > 0


def test_what_is_not_a_kernels_fault_is_raised():
    q, k, v = inputs()
    args = [torch.empty(0)] * 9 + [float("inf"), 0.0, 0.0, 0, -1, -1, 0, 0, 0, False]
    with pytest.raises(RuntimeError, match="scale: expected"):
        torch.ops.flash_attn_rocm.fwd_served(q, k, v, *args)


def test_the_raw_op_raises_all_the_same():
    q, k, v = inputs()
    args = [torch.empty(0)] * 9 + [0.125, 0.0, 0.0, 0, -1, -1, 0, 0, 0, False]
    hipsim.set_fault("launch:nth=1")
    with pytest.raises(RuntimeError, match="hipErrorLaunchFailure"):
        torch.ops.flash_attn_rocm.fwd(q, k, v, *args)


@pytest.mark.parametrize("times", [1, 30])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_behind_torch_ops_are_as_exact_as_behind_the_kernel(dtype, times):
    q, k, v = qkv(1, 2, 70, 64, length_k=90, dtype=dtype)
    leaves = [t.requires_grad_() for t in (q * times, k, v)]
    dout = torch.randn(1, 2, 70, 64, generator=torch.Generator().manual_seed(1))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.autograd.grad(builtin()(*exact), exact, dout.to(dtype).double())

    def errors(fault):
        hipsim.set_fault(fault)
        out = F.scaled_dot_product_attention(*leaves)
        assert (fa.last_call().backend == "sdpa") == bool(fault)
        hipsim.set_fault(None)
        _guard.reset()
        grads = torch.autograd.grad(out, leaves, dout.to(dtype))
        return [relative_error(got, w) for got, w in zip(grads, want)]

    for by_torch, by_kernel in zip(errors("launch:nth=1"), errors(None)):
        assert by_torch <= 2 * by_kernel + 1e-6


FEATURES = {
    "causal": Features(scale=0.3, causal=_ops.CAUSAL_BOTTOM_RIGHT),
    "window": Features(scale=0.3, window_left=5, window_right=2, sink_keys=3),
    "softcap": Features(scale=0.3, softcap=2.0, alibi=torch.tensor([0.5, 0.1])),
    "bias": Features(scale=0.3, bias=torch.randn(1, 2, 1, 90)),
    "mask": Features(scale=0.3, mask=torch.rand(1, 1, 70, 90) > 0.7),
    "sink": Features(scale=0.3, sink=torch.tensor([0.5, -1.0])),
    "dropout": Features(scale=0.3, dropout_p=0.4, seed=torch.tensor([3, 4])),
}


@pytest.mark.parametrize("name", FEATURES)
def test_torch_ops_give_the_kernels_output_and_log_sum_exp(name):
    features = FEATURES[name]
    q, k, v = qkv(1, 2, 70, 16, length_k=90, dtype=torch.float32)
    want_out, want_lse, _ = _ops.op(q, k, v, *features.op_args(torch.empty(0)), False)
    out, lse = _chunked.forward(q, k, v, features)
    torch.testing.assert_close(out, want_out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_gradients_of_float32_behind_torch_ops_are_rounded_once():
    tensors = qkv(1, 2, 70, 64, dtype=torch.float32)
    none, features = torch.empty(0), Features(scale=0.125)
    saved = _ops.op(*tensors, *features.op_args(none), True)
    dout = torch.randn(saved[0].shape, generator=torch.Generator().manual_seed(1))
    wanted = _ops.WANT_DQ | _ops.WANT_DK | _ops.WANT_DV
    hipsim.set_fault("launch:nth=1")
    options = (*features.op_args(none), wanted, False)
    grads = _served.backward(dout, none, *tensors, *saved, *options)
    assert fa.last_call().reason is Reason.FAILED
    exact = [t.double().requires_grad_() for t in tensors]
    want = torch.autograd.grad(builtin()(*exact), exact, dout.double())
    for got, grad in zip(grads, want):
        assert relative_error(got, grad) <= 2.0**-24


def test_rows_without_keys_and_empty_inputs():
    mask = torch.ones(1, 1, 4, 6, dtype=torch.bool)
    mask[0, 0, 2] = False
    q, k, v = qkv(1, 2, 4, 8, length_k=6, dtype=torch.float32)
    out, lse = _chunked.forward(q, k, v, Features(mask=mask))
    assert bool((out[:, :, 2] == 0).all()) and bool((lse[:, :, 2] == -torch.inf).all())
    assert bool(torch.isfinite(lse[:, :, :2]).all())
    out, lse = _chunked.forward(q, k[:, :, :0], v[:, :, :0], Features())
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())
    sink = torch.tensor([1.0, 2.0])
    _, lse = _chunked.forward(q, k[:, :, :0], v[:, :, :0], Features(sink=sink))
    assert torch.equal(lse[0, :, 3], sink)
    out, _ = _chunked.forward(q[:, :, :0], k, v, Features())
    assert out.shape == (1, 2, 0, 8)


def test_reasons_of_compiled_calls_are_kept_by_the_last_call():
    tensors = [t.detach() for t in inputs()]
    hipsim.set_fault("endless:nth=1")
    compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))(*tensors)
    assert fa.last_call().reason is Reason.LATE
