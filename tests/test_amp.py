"""Mixed precision: autocast, GradScaler, infinite gradients.

SPDX-License-Identifier: BSD-3-Clause
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import TOP_LEFT, qkv, stock_sdpa
from helpers.gradients import gradient_ratios, leaves

import flash_attn_rocm as fa
from flash_attn_rocm import FlashAttnError, Reason, _grad_check

pytestmark = pytest.mark.usefixtures("patched", "simulated")

HALVES = [torch.float16, torch.bfloat16]


def assert_fused(what):
    call = fa.last_call()
    assert call.backend == "sim" and call.reason is Reason.FUSED, call
    assert call.kernel.startswith(what), call


# ------------------------------------------------------------------------ autocast


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
def test_float32_leaves_get_float32_gradients_of_the_cast_call(dtype, causal):
    q, k, v = leaves(*qkv(2, 2, 17, 16, dtype=torch.float32))
    with torch.autocast("cpu", dtype):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        stock = stock_sdpa(q, k, v, is_causal=causal)
    assert out.dtype == stock.dtype == dtype
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert_fused("fa_bwd")
    assert [g.dtype for g in grads] == [torch.float32] * 3
    halves = [t.detach().to(dtype) for t in (q, k, v)]
    which = TOP_LEFT if causal else 0
    assert max(gradient_ratios(grads, *halves, dout, causal=which)) <= 1


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gradient_never_passes_through_the_cast_dtype(dtype):
    q, k, v = leaves(*qkv(1, 2, 9, 16, dtype=torch.float32))
    with torch.autocast("cpu", dtype):
        out = F.scaled_dot_product_attention(q, k, v)
    for grad in torch.autograd.grad(out.float().square().sum(), (q, k, v)):
        assert not torch.equal(grad, grad.to(dtype).float())


def test_float32_gradients_beyond_float16_are_finite():
    q, k, v = leaves(*qkv(1, 1, 8, 16, dtype=torch.float32))
    huge = torch.full((1, 1, 8, 16), 3e4)
    with torch.autocast("cpu", torch.float16):
        out = F.scaled_dot_product_attention(q * 0, k, v)
    (grad,) = torch.autograd.grad(out, v, huge.half())
    assert grad.isfinite().all()
    # Every value gets the mean over 8 equal weights of 8 gradients.
    torch.testing.assert_close(grad, huge.half().float(), rtol=1e-3, atol=0)
    with torch.autocast("cpu", torch.float16):
        out = F.scaled_dot_product_attention(q[:, :, :8], k[:, :, :1], v[:, :, :1])
    (grad,) = torch.autograd.grad(out, v, huge.half())
    assert grad.isfinite().all() and grad[0, 0, 0].min() > 65504  # the sum of 8


@pytest.mark.parametrize("dtype", HALVES)
def test_inputs_of_mixed_dtypes_get_gradients_in_their_own(dtype):
    q, k, v = qkv(1, 2, 9, 16, dtype=torch.float32)
    tensors = leaves(q, k.half(), v.bfloat16())
    with torch.autocast("cpu", dtype):
        out = F.scaled_dot_product_attention(*tensors)
        assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().square().sum(), tensors)
    assert_fused("fa_bwd")
    assert [g.dtype for g in grads] == [torch.float32, torch.float16, torch.bfloat16]
    wide = leaves(*(t.to(dtype) for t in tensors), dtype=torch.float64)
    out = stock_sdpa(*wide)
    for one, other in zip(grads, torch.autograd.grad(out.square().sum(), wide)):
        assert (one - other).abs().max() <= 2e-2 * other.abs().max()


@pytest.mark.parametrize("dtype", HALVES)
def test_only_the_leaves_that_require_grad_get_one(dtype):
    q, k, v = qkv(1, 2, 9, 16, dtype=torch.float32)
    v.requires_grad_()
    with torch.autocast("cpu", dtype):
        out = F.scaled_dot_product_attention(q, k, v)
    out.float().sum().backward()
    assert fa.last_call().kernel.startswith("fa_bwd_kv")
    assert "fa_bwd_q" not in fa.last_call().kernel
    assert v.grad.dtype == torch.float32 and q.grad is None and k.grad is None


def test_inputs_of_the_autocast_dtype_are_not_cast():
    q, k, v = leaves(*qkv(1, 2, 9, 16))
    with torch.autocast("cpu", torch.float16):
        out = F.scaled_dot_product_attention(q, k, v)
    want = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, v)), want))


def test_float64_is_not_cast_as_in_stock():
    q, k, v = qkv(1, 2, 9, 16, dtype=torch.float64)
    with torch.autocast("cpu", torch.float16):
        out = F.scaled_dot_product_attention(q, k, v)
        assert_fused("fa_fwd_f64")
        assert out.dtype == stock_sdpa(q, k, v).dtype == torch.float64
        assert fa.explain(q, k, v.float()).reason is Reason.DTYPE


def test_the_saved_tensors_are_those_of_the_cast():
    tensors = leaves(*qkv(1, 2, 40, 16, dtype=torch.float32))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, id):
        with torch.autocast("cpu", torch.float16):
            F.scaled_dot_product_attention(*tensors)
    # q, k, v and out; what rounding took is flat.
    assert [t.dtype for t in kept if t.dim() == 4] == [torch.float16] * 4


def test_flash_attn_func_leaves_autocast_alone():
    q, k, v = (t.transpose(1, 2) for t in qkv(1, 2, 9, 16, dtype=torch.float32))
    with torch.autocast("cpu", torch.float16):
        assert fa.flash_attn_func(q, k, v).dtype == torch.float32


# ---------------------------------------------------------------------- GradScaler


class Model(torch.nn.Module):
    """Two projections around attention; float32 weights."""

    def __init__(self):
        super().__init__()
        self.into = torch.nn.Linear(16, 48)
        self.out = torch.nn.Linear(16, 1)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.into(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def train(steps, init_scale, dtype=torch.float16):
    """Losses and scales of a few steps of a GradScaler loop."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 12, 16)
    target = x.mean(-1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=100)
    losses, scales = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = F.mse_loss(model(x).float(), target)
        scaler.scale(loss).backward()
        assert_fused("fa_bwd")
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def test_early_overflows_lower_the_scale_and_training_goes_on():
    start = 2.0**24
    losses, scales = train(14, start)
    skipped = sum(b < a for a, b in zip([start, *scales], scales))
    assert 2 <= skipped <= 10  # observed: 7
    assert scales[-1] == scales[-2] == start / 2**skipped
    assert losses[: skipped + 1] == [losses[0]] * (skipped + 1)
    assert losses[-1] < losses[0]


def test_a_loop_without_overflow_follows_the_stock_one():
    ours, _ = train(6, 2.0**8)
    fa.unpatch()
    record = fa.last_call()
    torch.manual_seed(0)
    stock = []
    model, x = Model(), torch.randn(2, 12, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x).float(), x.mean(-1, keepdim=True))
        loss.backward()
        optimizer.step()
        stock.append(loss.item())
    assert fa.last_call() == record
    assert ours == pytest.approx(stock, rel=5e-3)


# --------------------------------------------------------------------- check_grads


def overflow(dtype=torch.float16, api=F):
    """Leaves whose dv overflows float16 and whose dq and dk do not."""
    q, k, v = leaves(*qkv(1, 1, 8, 16, dtype=dtype))
    out = F.scaled_dot_product_attention(q * 0, k[:, :, :1], v[:, :, :1])
    out.backward(torch.full_like(out, 3e4))
    return q, k, v


@pytest.fixture
def counted():
    _grad_check.reset()
    yield
    _grad_check.set_mode("off")
    _grad_check.reset()


def bad_gradients(**counts):
    """What status() tells: none but these."""
    return {"q": 0, "k": 0, "v": 0, "bias": 0, **counts}


def test_a_float16_leaf_keeps_its_infinity_and_nothing_is_counted(counted):
    _, _, v = overflow()
    assert v.grad[0, 0, 0].isinf().all()
    assert fa.status()["check_grads"] == "off"
    assert fa.status()["nonfinite_gradients"] == bad_gradients()


def test_counting_tells_how_many_numbers_of_which_tensor(counted):
    fa.patch(check_grads="count")
    for times in (1, 2):
        _, _, v = overflow()
        assert v.grad[0, 0, 0].isinf().all()
        assert fa.status()["nonfinite_gradients"] == bad_gradients(v=16 * times)
    assert fa.status()["check_grads"] == "count"


def test_raising_names_the_tensor(counted):
    fa.patch(check_grads="raise")
    with pytest.raises(FlashAttnError, match=r"^v: expected a finite gradient, got 16"):
        overflow()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_float16_gradients_are_looked_at(counted, dtype):
    fa.patch(check_grads="raise")
    overflow(dtype)
    q, k, v = leaves(*qkv(1, 1, 8, 16, dtype=torch.float32))
    with torch.autocast("cpu", torch.float16):
        out = F.scaled_dot_product_attention(q, k, v)
    out.backward(torch.full_like(out, float("inf")))
    assert fa.status()["nonfinite_gradients"] == bad_gradients()


def test_check_grads_is_kept_until_it_is_changed_or_unpatched():
    fa.patch(check_grads="count")
    fa.patch()
    assert fa.status()["check_grads"] == "count"
    with fa.patched(check_grads="raise"):
        assert fa.status()["check_grads"] == "raise"
    assert fa.status()["check_grads"] == "count"
    fa.unpatch()
    assert fa.status()["check_grads"] == "off"


@pytest.mark.parametrize("value", ["on", True, 0])
def test_an_unknown_check_is_refused_by_name(value):
    with pytest.raises(FlashAttnError, match=r"^check_grads: expected one of 'off'"):
        fa.patch(check_grads=value)
    assert fa.status()["check_grads"] == "off"
