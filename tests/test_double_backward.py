"""Second and third derivatives: right, or refused in words; never cut.

SPDX-License-Identifier: BSD-3-Clause
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import BOTTOM_RIGHT, NONE, TOP_LEFT, qkv, stock_sdpa
from helpers.gradients import leaves, plain_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_rocm as fa
from flash_attn_rocm import _autograd, _chunked
from flash_attn_rocm._features import Features

pytestmark = pytest.mark.usefixtures("patched", "simulated")

CAUSAL = [NONE, TOP_LEFT, BOTTOM_RIGHT]


def attend(causal, scale=0.4, with_lse=False):
    def call(*tensors):
        features = Features(scale=scale, causal=causal)
        return _autograd.attention(*tensors, features, with_lse=with_lse)

    return call


def inputs(dtype=torch.float64, length=4, length_k=5, dim_v=3):
    q, k, v = qkv(1, 4, length, 6, heads_k=2, length_k=length_k, dtype=dtype)
    return leaves(q, k, v[..., :dim_v])


def penalty(function, tensors):
    """The gradient of the squared norm of the gradient."""
    out = function(*tensors)
    first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("lengths", [(4, 5), (5, 3)])
def test_gradgradcheck_with_grouped_heads_and_the_log_sum_exp(causal, lengths):
    tensors = inputs(length=lengths[0], length_k=lengths[1])
    # A log-sum-exp of -inf has no finite difference.
    with_lse = causal != BOTTOM_RIGHT or lengths[0] <= lengths[1]
    assert torch.autograd.gradgradcheck(
        attend(causal, with_lse=with_lse), tensors, fast_mode=True
    )


@pytest.mark.parametrize("elements", [1, 7, 60, 2**22])
def test_the_size_of_a_block_does_not_change_the_second_derivative(
    elements, monkeypatch
):
    tensors = inputs(length=9, length_k=7)
    want = penalty(lambda *t: plain_attention(*t, 0.4, TOP_LEFT)[0], tensors)
    monkeypatch.setattr(_chunked, "BLOCK_ELEMENTS", elements)
    got = penalty(attend(TOP_LEFT), tensors)
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_block_holds_as_many_scores_as_it_says(monkeypatch):
    monkeypatch.setattr(_chunked, "BLOCK_ELEMENTS", 4 * 7 * 2)
    q, k, v = (t.detach() for t in inputs(length=9, length_k=7))
    dout = torch.ones_like(q[..., :3])
    call = _chunked.Call(q, k, v, dout, None, Features(scale=0.4, causal=TOP_LEFT))
    shapes = [block.p.shape for block in _chunked._Walk(call)]
    assert shapes == [(1, 2, 4, 7)] * 4 + [(1, 2, 2, 7)]


@pytest.mark.parametrize("causal", CAUSAL)
def test_the_third_derivative_is_right(causal):
    tensors = inputs(length=3, length_k=2)

    def second(*t):
        out = attend(causal)(*t)
        return torch.autograd.grad(out.square().sum(), t, create_graph=True)

    assert torch.autograd.gradgradcheck(second, tensors, fast_mode=True)


@pytest.mark.parametrize("api", ["sdpa", "flash"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_gradient_penalty_through_the_public_names(api, dtype):
    tensors = leaves(*qkv(1, 2, 17, 32, dtype=dtype))
    if api == "sdpa":
        function = F.scaled_dot_product_attention
    else:

        def function(*t):
            t = (x.transpose(1, 2) for x in t)
            return fa.flash_attn_func(*t).transpose(1, 2)

    got = penalty(function, tensors)
    assert fa.last_call().backend == "sim"
    want = penalty(
        lambda *t: plain_attention(*t)[0], leaves(*tensors, dtype=torch.float64)
    )
    bound = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float32: 1e-5}[dtype]
    for leaf, one, other in zip(tensors, got, want):
        assert one.dtype == leaf.dtype
        # Observed: 2e-3, 1e-2 and 4e-7.
        assert (one - other).abs().max() <= bound * other.abs().max()


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
def test_only_some_inputs_require_grad(wanted):
    tensors = dict(zip("qkv", (t.detach() for t in inputs())))
    for name in wanted:
        tensors[name].requires_grad_()
    some = [tensors[name] for name in wanted]

    def twice(function):
        out = function(*tensors.values())
        first = torch.autograd.grad(out.square().sum(), some, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), some)

    want = twice(lambda *t: plain_attention(*t, 0.4, NONE)[0])
    for one, other in zip(twice(attend(NONE)), want):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_term_of_another_path_is_not_dropped():
    # A cut graph would leave the derivative of the other path alone, without a word.
    tensors = inputs()

    def twice(function):
        q, k, v = tensors
        out = function(q, k, v) * q.sum()
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    want = twice(lambda *t: plain_attention(*t, 0.4, NONE)[0])
    torch.testing.assert_close(twice(attend(NONE)), want, rtol=1e-10, atol=1e-12)


def test_create_graph_gives_the_bits_of_a_plain_backward():
    q, k, v = leaves(*qkv(1, 2, 17, 16))
    out = F.scaled_dot_product_attention(q, k, v)
    dout = torch.ones_like(out)
    plain = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    differentiable = torch.autograd.grad(out, (q, k, v), dout, create_graph=True)
    assert all(map(torch.equal, plain, differentiable))
    assert all(grad.requires_grad for grad in differentiable)


def test_the_second_derivative_for_the_incoming_gradient():
    # A Hessian-vector product by the double-backward trick.
    q, k, v = inputs()
    out = attend(TOP_LEFT)(q, k, v)
    dout = torch.zeros_like(out, requires_grad=True)
    first = torch.autograd.grad(out, q, dout, create_graph=True)[0]
    tangent = torch.randn(
        q.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype
    )
    got = torch.autograd.grad(first, dout, tangent)[0]
    want = torch.autograd.functional.jvp(
        lambda t: plain_attention(t, k.detach(), v.detach(), 0.4, TOP_LEFT)[0],
        q.detach(),
        tangent,
    )[1]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_an_autocast_region_does_not_lower_the_precision():
    tensors = leaves(*qkv(1, 2, 9, 16, dtype=torch.float32))
    want = penalty(
        lambda *t: plain_attention(*t)[0], leaves(*tensors, dtype=torch.float64)
    )
    with torch.autocast("cpu", torch.bfloat16):
        out = fa.flash_attn_func(*(t.transpose(1, 2) for t in tensors))
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        got = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
    for one, other in zip(got, want):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_second_derivative_under_autocast_reaches_the_float32_leaves(dtype):
    tensors = leaves(*qkv(1, 2, 9, 16, dtype=torch.float32))
    with torch.autocast("cpu", dtype):
        out = F.scaled_dot_product_attention(*tensors)
    first = torch.autograd.grad(out.float().square().sum(), tensors, create_graph=True)
    assert [g.dtype for g in first] == [torch.float32] * 3
    got = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
    want = penalty(
        lambda *t: plain_attention(*t)[0], leaves(*tensors, dtype=torch.float64)
    )
    for one, other in zip(got, want):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() <= 6e-2 * other.abs().max()


def test_hessians_of_torch_are_those_of_the_math_path():
    q, k, v = (t.detach() for t in inputs(length=2, length_k=2))

    def hessian(function):
        return torch.autograd.functional.hessian(
            lambda t: function(t, k, v).square().sum(), q
        )

    want = hessian(lambda *t: plain_attention(*t, 0.4, NONE)[0])
    torch.testing.assert_close(hessian(attend(NONE)), want, rtol=1e-9, atol=1e-12)


def test_empty_inputs_have_a_second_derivative_of_zero():
    q, k, v = inputs(length=4, length_k=5)
    for tensors in ((q[:0], k[:0], v[:0]), (q, k[:, :, :0], v[:, :, :0])):
        tensors = leaves(*tensors)
        for grad in penalty(attend(NONE), tensors):
            assert not grad.any()


def test_a_compiled_second_derivative_is_refused_by_torch():
    tensors = leaves(*qkv(1, 2, 5, 16, dtype=torch.float32))
    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager")
    with pytest.raises(RuntimeError, match="does not currently support double backw"):
        penalty(compiled, tensors)
    torch._dynamo.reset()


def test_second_derivatives_equal_those_of_stock_where_stock_has_them():
    tensors = leaves(*qkv(1, 2, 7, 8, dtype=torch.float32))
    got = penalty(F.scaled_dot_product_attention, tensors)
    with sdpa_kernel(SDPBackend.MATH):
        want = penalty(stock_sdpa, tensors)
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
