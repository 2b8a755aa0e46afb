"""attention() and the arguments of flash_attn_func: meaning, gradients, refusals.

In float64, where the kernels are exact to rounding, so that a wrong meaning shows.
How exact the other types are: the tests of the kernels.

SPDX-License-Identifier: BSD-3-Clause
"""

import math

import pytest
import torch
from helpers import qkv
from helpers.dense import assert_like, band, gradients
from helpers.dense import attention as dense
from helpers.gradients import leaves
from torch.utils.checkpoint import checkpoint

import flash_attn_rocm as fa
from flash_attn_rocm import _chunked
from flash_attn_rocm._features import Features

pytestmark = pytest.mark.usefixtures("simulated")

SHIFT = {False: None, "top_left": 0, "bottom_right": None}


def inputs(length=7, length_k=10, *, batch=2, heads=4, heads_k=2, dim=6, dim_v=5):
    """q, k, v in float64 that require grad."""
    q, k, v = qkv(
        batch,
        heads,
        length,
        dim,
        heads_k=heads_k,
        length_k=length_k,
        dtype=torch.float64,
    )
    return leaves(q, k, v[..., :dim_v])


def normal(*sizes, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)


def compare(ours, oracle, tensors):
    """ours and oracle, each of (out, lse), agree, and so do their gradients."""
    (out, lse), (want, want_lse) = ours, oracle
    assert_like(out, want)
    assert_like(lse, want_lse)
    dout, dlse = normal(*out.shape, seed=2), normal(*lse.shape, seed=3)
    # A log-sum-exp of -inf has no gradient.
    some = want_lse != -math.inf
    got = gradients([out, lse], [dout, dlse], tensors)
    exact = gradients([want, want_lse[some]], [dout, dlse[some]], tensors)
    for one, other in zip(got, exact):
        assert_like(one, other, 1e-8)


def seen_by(causal, window, length, length_k, sinks=0):
    shift = 0 if causal == "top_left" else length_k - length
    left, right = window
    right = 0 if causal else right
    seen = band(length, length_k, shift=shift, right=right)
    first = band(length, length_k, shift=shift, left=left)
    return seen & (first | (torch.arange(length_k) < sinks))


# ------------------------------------------------------------------ what it computes


@pytest.mark.parametrize("lengths", [(7, 10), (10, 7), (9, 9)])
@pytest.mark.parametrize(
    "causal, window, sinks",
    [
        (False, (-1, -1), 0),
        ("top_left", (-1, -1), 0),
        ("bottom_right", (-1, -1), 0),
        (False, (2, 1), 0),
        (False, (0, 0), 0),
        (False, (-1, 3), 0),
        ("top_left", (3, 5), 0),
        ("bottom_right", (1, -1), 3),
        (False, (1, 2), 2),
        (False, (-1, 2), 2),
        (False, (2**40, 2**40), 2**20),
    ],
)
def test_causal_and_window_equal_a_mask(causal, window, sinks, lengths):
    tensors = inputs(*lengths)
    ours = fa.attention(
        *tensors, causal=causal, window=window, sink_keys=sinks, return_lse=True
    )
    seen = seen_by(causal, window, *lengths, sinks)
    compare(ours, dense(*tensors, seen=seen), tensors)


TABLES = [(2, 4, 7, 10), (1, 4, 7, 10), (2, 1, 1, 10), (4, 7, 1), (7, 10), (1, 1)]


@pytest.mark.parametrize("sizes", TABLES, ids=str)
def test_bias_and_mask_broadcast_and_the_gradient_is_summed(sizes):
    tensors = (*inputs(), normal(*sizes).requires_grad_())
    mask = normal(*sizes, seed=5) > -0.7
    *qkv, bias = tensors
    ours = fa.attention(*qkv, bias=bias, mask=mask, return_lse=True)
    compare(ours, dense(*qkv, bias=bias, seen=mask), tensors)


def test_a_bias_of_minus_infinity_hides_and_hidden_rows_are_zero():
    tensors = (*inputs(), normal(4, 7, 10))
    tensors[3][:, 2] = -math.inf
    tensors[3][1, :, 4] = -math.inf
    *qkv, bias = tensors[0], tensors[1], tensors[2], tensors[3].requires_grad_()
    ours = fa.attention(*qkv, bias=bias, return_lse=True)
    assert not ours[0][:, :, 2].any() and (ours[1][:, :, 2] == -math.inf).all()
    compare(ours, dense(*qkv, bias=bias), (*qkv, bias))
    (grad,) = torch.autograd.grad(ours[0].sum(), bias)
    assert not grad[:, 2].any() and not grad[1, :, 4].any()


@pytest.mark.parametrize("sizes", [(4,), (2, 4)])
@pytest.mark.parametrize("causal", list(SHIFT))
def test_slopes_count_from_the_own_key(sizes, causal):
    tensors = inputs()
    slopes = normal(*sizes).abs().float()
    ours = fa.attention(*tensors, alibi_slopes=slopes, causal=causal, return_lse=True)
    seen = seen_by(causal, (-1, -1), 7, 10)
    oracle = dense(*tensors, slopes=slopes, shift=SHIFT[causal], seen=seen)
    compare(ours, oracle, tensors)


@pytest.mark.parametrize("causal", [False, "bottom_right"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sink_is_one_more_key_and_its_gradient_is_summed(causal, dtype):
    *qkv, sink = (*inputs(10, 7), normal(4, dtype=dtype).requires_grad_())
    ours = fa.attention(*qkv, sink=sink, causal=causal, return_lse=True)
    exact = sink.detach().double().requires_grad_()
    seen = seen_by(causal, (-1, -1), 10, 7)
    oracle = dense(*qkv, sink=exact, seen=seen)
    compare(ours, oracle, qkv)
    assert ours[1].isfinite().all()  # also where no key is seen
    (got,) = torch.autograd.grad(ours[0].square().sum() + ours[1].sum(), sink)
    (want,) = torch.autograd.grad(oracle[0].square().sum() + oracle[1].sum(), exact)
    assert got.dtype is dtype
    assert_like(got, want, 1e-8 if dtype is torch.float64 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0, None])
@pytest.mark.parametrize("cap", [0.0, 0.5, 50.0])
def test_the_cap_comes_after_the_scale(scale, cap):
    tensors = inputs()
    ours = fa.attention(*tensors, softcap=cap, scale=scale, return_lse=True)
    compare(ours, dense(*tensors, softcap=cap, scale=scale), tensors)


def test_everything_at_once_and_without_a_gradient_the_same():
    *qkv, bias, sink = (
        *inputs(),
        normal(4, 1, 10).requires_grad_(),
        normal(4).requires_grad_(),
    )
    mask, slopes = normal(2, 1, 7, 10, seed=5) > -1, normal(2, 4).abs().float()
    options = {
        "mask": mask,
        "causal": "bottom_right",
        "window": (4, -1),
        "sink_keys": 2,
        "softcap": 2.0,
        "scale": 0.9,
    }
    ours = fa.attention(
        *qkv, bias=bias, sink=sink, alibi_slopes=slopes, return_lse=True, **options
    )
    seen = seen_by("bottom_right", (4, -1), 7, 10, 2) & mask
    oracle = dense(
        *qkv, bias=bias, sink=sink, slopes=slopes, seen=seen, softcap=2.0, scale=0.9
    )
    compare(ours, oracle, (*qkv, bias, sink))
    with torch.no_grad():
        alone = fa.attention(*qkv, bias=bias, sink=sink, alibi_slopes=slopes, **options)
    assert torch.equal(alone, ours[0]) and not alone.requires_grad


def test_without_keys_there_are_zeros_and_the_sink():
    q, k, v = inputs(length_k=1)
    sink, bias = normal(4).requires_grad_(), normal(4, 7, 0).requires_grad_()
    out, lse = fa.attention(
        q, k[:, :, :0], v[:, :, :0], bias=bias, sink=sink, return_lse=True
    )
    assert not out.any()
    assert_like(lse, sink.reshape(1, 4, 1).expand(2, 4, 7), 1e-13)
    dsink, dbias = torch.autograd.grad(lse.sum(), [sink, bias])
    assert_like(dsink, torch.full((4,), 14.0))
    assert dbias.shape == bias.shape
    out, lse = fa.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias_dtype", ["own", torch.float32])
def test_the_gradient_of_a_bias_has_its_dtype_and_shape(dtype, bias_dtype):
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in inputs())
    kind = dtype if bias_dtype == "own" else bias_dtype
    bias = normal(1, 4, 1, 10, dtype=kind).requires_grad_()
    out = fa.attention(q, k, v, bias=bias)
    got = torch.autograd.grad(out.float().square().sum(), [q, bias])
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v, bias)]
    want, _ = dense(*doubles[:3], bias=doubles[3])
    want = torch.autograd.grad(want.square().sum(), [doubles[0], doubles[3]])
    for one, exact, like in zip(got, want, (q, bias)):
        assert one.dtype is like.dtype and one.shape == like.shape
        assert_like(one, exact, 30 * torch.finfo(dtype).eps)


# ---------------------------------------------------------------- expanded biases


class Tripled(torch.autograd.Function):
    """A view whose gradient is three times what it would be."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def table_of(between):
    """A leaf, and the (1, 4, 7, 10) of it that is expanded."""
    if between == "a leaf that is a view":
        leaf = normal(3, 1, 4, 7, 10)[2].requires_grad_()
        return leaf, leaf
    leaf = normal(1, 4, 7, 10).requires_grad_()
    if between == "a leaf":
        return leaf, leaf
    if between == "a custom function":
        return leaf, Tripled.apply(leaf)
    if between == "a negative view":
        return leaf, torch._neg_view(leaf)
    return leaf, leaf.view(4, 7, 10)[None]


VIEWS = ("a leaf", "a leaf that is a view", "a custom function", "a negative view")


@pytest.mark.parametrize("entry", ["attention", "sdpa"])
@pytest.mark.parametrize("between", [*VIEWS, "views"])
def test_the_gradient_of_an_expanded_bias_goes_through_all_that_made_it(
    between, entry, request
):
    if entry == "sdpa":
        request.getfixturevalue("patched")
    qkv = inputs(heads_k=4)
    leaf, table = table_of(between)
    asked, seen = table, []
    if not table.is_leaf:
        asked.retain_grad()
        asked.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    wide = table.expand(2, 4, 7, 10)
    if entry == "sdpa":
        call = torch.nn.functional.scaled_dot_product_attention
        out = call(*qkv, attn_mask=wide)
        assert fa.last_call().reason is fa.Reason.FUSED
    else:
        out = fa.attention(*qkv, bias=wide)
    same = table.detach().clone().resolve_neg().expand(2, 4, 7, 10).requires_grad_()
    want, _ = dense(*qkv, bias=same)
    assert_like(out, want)
    (of_wide,) = torch.autograd.grad(want.square().sum(), same)
    (got,) = torch.autograd.grad(out.square().sum(), wide, retain_graph=True)
    assert got.shape == wide.shape
    assert_like(got, of_wide, 1e-8)
    out.square().sum().backward()
    summed = of_wide.sum(0, keepdim=True)
    if table.is_leaf:
        assert_like(leaf.grad, summed, 1e-8)
        return
    assert_like(seen[0], summed, 1e-8)
    assert_like(asked.grad, 2 * summed, 1e-8)
    factor = {"a custom function": 6, "a negative view": -2}.get(between, 2)
    assert_like(leaf.grad, factor * summed, 1e-8)


@pytest.mark.parametrize("asked", ["leaf", "retain_grad", "hook"])
def test_an_expanded_bias_whose_own_gradient_is_asked_for_gets_that(asked):
    *qkv, table = (*inputs(), normal(4, 7, 10).requires_grad_())
    wide = table.unsqueeze(0).expand(2, 4, 7, 10)
    found = []
    if asked == "leaf":
        wide = wide.detach().requires_grad_()
    elif asked == "hook":
        wide.register_hook(found.append)
    out = fa.attention(*qkv, bias=wide)
    if asked == "retain_grad":
        wide.retain_grad()  # after the call, which cannot know of it
    out.square().sum().backward()
    full = wide.detach().clone().requires_grad_()
    want, _ = dense(*(t.detach() for t in qkv), bias=full)
    want.square().sum().backward()
    assert_like(found[0] if asked == "hook" else wide.grad, full.grad, 1e-8)


# ------------------------------------------------------------------ negative views

NEGATED = ("q", "k", "v", "bias", "sink", "alibi_slopes", "dout", "dlse")


@pytest.mark.parametrize("name", NEGATED)
def test_a_tensor_with_the_negative_bit_counts_as_what_it_says(name):
    q, k, v = (t.detach() for t in inputs())
    plain = dict(q=q, k=k, v=v, bias=normal(1, 4, 7, 10), sink=normal(4))
    plain.update(alibi_slopes=normal(4), dout=normal(2, 4, 7, 5), dlse=normal(2, 4, 7))

    def results(tensors):
        given = dict(tensors)
        cotangents = [given.pop("dout"), given.pop("dlse")]
        learned = ("q", "k", "v", "bias", "sink")
        without = fa.attention(**given, return_lse=True)
        for one in learned:
            given[one] = given[one].detach().requires_grad_()
        made = fa.attention(**given, return_lse=True)
        wanted = [given[one] for one in learned]
        return (*without, *made, *torch.autograd.grad(made, wanted, cotangents))

    negative = torch._neg_view(-plain[name])
    assert negative.is_neg() and torch.equal(negative, plain[name])
    for one, other in zip(results({**plain, name: negative}), results(plain)):
        assert torch.equal(one, other)


# ------------------------------------------------------------------------ dropout


def dropped(seed, tensors, p=0.4, **options):
    torch.manual_seed(seed)
    return fa.attention(*tensors, dropout_p=p, **options)


def test_dropout_follows_manual_seed_and_is_fresh_at_each_call():
    tensors = inputs()
    first, again, other = (dropped(seed, tensors) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(fa.attention(*tensors, dropout_p=0.4), other)


def test_dropout_is_unbiased_and_leaves_the_log_sum_exp():
    q, k, _ = inputs(64, 64, batch=1, heads=2, heads_k=2)
    v = torch.eye(64, dtype=torch.float64).expand(1, 2, 64, 64)
    torch.manual_seed(0)
    out, lse = fa.attention(q, k, v, dropout_p=0.3, return_lse=True)
    weights, want = fa.attention(q, k, v, return_lse=True)
    assert_like(lse, want, 1e-13)
    kept = out != 0
    assert abs(float(kept.double().mean()) - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    # 65536 / keep is within 1e-5 of 1 / 0.7.
    assert_like(out, torch.where(kept, weights / 0.7, 0.0), 2e-5)


def test_the_backward_has_the_mask_of_its_forward():
    tensors = inputs()
    torch.autograd.gradcheck(lambda *t: dropped(5, t), tensors, fast_mode=True)
    first, second = dropped(5, tensors), dropped(6, tensors)
    one = torch.autograd.grad(second.sum(), tensors)
    torch.autograd.grad(first.sum(), tensors)
    same = torch.autograd.grad(dropped(6, tensors).sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(one, same))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_call_drops_the_same_again(reentrant):
    tensors = inputs()

    def call(*t):
        return fa.attention(*t, dropout_p=0.5).square()

    torch.manual_seed(3)
    want = torch.autograd.grad(call(*tensors).sum(), tensors)
    torch.manual_seed(3)
    out = checkpoint(call, *tensors, use_reentrant=reentrant)
    torch.rand(7)  # the generator has gone on until the backward
    if reentrant:
        out.sum().backward()
        got = [t.grad for t in tensors]
    else:
        got = torch.autograd.grad(out.sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("p", [0.0, 1e-30, 7e-6])
def test_what_drops_nothing_draws_no_random_numbers(p):
    tensors = inputs()
    state = torch.get_rng_state()
    out = fa.attention(*tensors, dropout_p=p)
    assert torch.equal(out, fa.attention(*tensors))
    assert torch.equal(torch.get_rng_state(), state)


# -------------------------------------------------------------- second derivative

SECOND = {
    "bias": dict(),
    "softcap": dict(softcap=1.5),
    "window": dict(window=(2, 1), sink_keys=1),
    "mask": dict(mask=normal(1, 1, 4, 5, seed=5) > -0.5),
    "slopes": dict(alibi_slopes=torch.rand(4), causal="bottom_right"),
    "dropout": dict(dropout_p=0.3),
    "all": dict(
        softcap=2.0,
        window=(3, 2),
        mask=normal(1, 4, 1, 5, seed=5) > -0.5,
        alibi_slopes=torch.rand(1, 4),
        dropout_p=0.2,
    ),
}


@pytest.mark.parametrize("elements", [2**22, 40])
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_of_all_inputs(name, elements, monkeypatch):
    if elements < 2**22 and name not in ("mask", "all"):
        pytest.skip("blocks of rows are read alike in all")
    monkeypatch.setattr("flash_attn_rocm._chunked.BLOCK_ELEMENTS", elements)
    tensors = (
        *inputs(4, 5, batch=1, heads_k=2, dim=3, dim_v=2),
        normal(4, 4, 1).requires_grad_(),
        normal(4).requires_grad_(),
    )

    def call(q, k, v, bias, sink):
        torch.manual_seed(7)
        return fa.attention(
            q, k, v, bias=bias, sink=sink, return_lse=True, **SECOND[name]
        )

    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("lowest", [-(2.0**31), -(2.0**40), -1e300])
def test_torch_ops_count_a_bias_below_the_limit_as_the_limit_like_kernels(lowest):
    bias = torch.zeros(7, 10, dtype=torch.float64)
    bias[2], bias[3, :4], bias[4] = lowest, lowest, lowest
    bias[4, ::2] *= 2  # as low as the others for the kernels
    bias[5] = -(2.0**29)
    tensors = inputs()
    want, _ = dense(*tensors, bias=bias.clamp(min=-(2.0**30)))
    dout = normal(*want.shape, seed=2)
    exact = torch.autograd.grad(want, tensors, dout)
    # 2^30 leaves 22 bits of a score. Observed: 9e-8.
    assert_like(fa.attention(*tensors, bias=bias), want, 1e-6)
    options = Features(bias=bias[None, None], scale=tensors[0].size(3) ** -0.5)
    given = (t.detach() for t in tensors)
    got = _chunked.first_order(_chunked.Call(*given, dout, None, options))
    for one, other in zip(got, exact):
        assert_like(one, other, 1e-6)


def test_a_second_derivative_does_not_see_nan_in_keys_that_no_row_sees():
    q, k, v = inputs()
    mask = torch.arange(10) < 6
    clean = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    with torch.no_grad():
        k[:, :, 6:], v[:, :, 7:] = math.nan, math.inf

    def second(*tensors):
        out = fa.attention(*tensors, mask=mask.expand(7, 10))
        (dq,) = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
        return torch.autograd.grad(dq.square().sum(), tensors)

    for one, other in zip(second(q, k, v), second(*clean)):
        assert torch.equal(one, other)


# ------------------------------------------------------------------ flash_attn_func


@pytest.mark.parametrize("lengths", [(7, 10), (10, 7)])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_func_is_attention_in_its_own_layout(lengths, causal):
    tensors = inputs(*lengths)
    slopes = torch.rand(2, 4)
    torch.manual_seed(4)
    out, lse, table = fa.flash_attn_func(
        *(t.transpose(1, 2) for t in tensors),
        dropout_p=0.2,
        softmax_scale=0.6,
        causal=causal,
        window_size=(3, 2),
        softcap=5.0,
        alibi_slopes=slopes,
        return_attn_probs=True,
    )
    torch.manual_seed(4)
    want, want_lse = fa.attention(
        *tensors,
        dropout_p=0.2,
        scale=0.6,
        causal="bottom_right" if causal else False,
        window=(3, 2),
        softcap=5.0,
        alibi_slopes=slopes,
        return_lse=True,
    )
    assert table is None
    assert torch.equal(out.transpose(1, 2), want) and torch.equal(lse, want_lse)
    one = torch.autograd.grad(out.sum(), tensors)
    other = torch.autograd.grad(want.sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize(
    "left, right, causal", [(0, 0, True), (3, 5, False), (5, 5, 1)]
)
def test_a_window_of_w_sees_w_and_the_own_key(left, right, causal):
    zeros = torch.zeros(1, 16, 1, 16, dtype=torch.float64)
    eye = torch.eye(16, dtype=torch.float64)[None, :, None]
    out = fa.flash_attn_func(
        zeros, zeros, eye, causal=causal, window_size=(left, right)
    )[0, :, 0]
    seen = band(16, 16, left=left, right=0 if causal else right)
    assert torch.equal(out != 0, seen)


# ------------------------------------------------------------------------ compiled


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_everything_compiles_in_one_graph(backend):
    torch._dynamo.reset()
    *qkv, bias, sink = (
        *inputs(),
        normal(4, 7, 1).requires_grad_(),
        normal(4).requires_grad_(),
    )
    mask, slopes = normal(7, 10, seed=5) > -1, torch.rand(4)

    def call(q, k, v, bias, sink):
        return fa.attention(
            q,
            k,
            v,
            bias=bias,
            mask=mask,
            causal="top_left",
            window=(6, -1),
            softcap=3.0,
            alibi_slopes=slopes,
            sink=sink,
            sink_keys=1,
        )

    tensors = (*qkv, bias, sink)
    got = torch.compile(call, fullgraph=True, backend=backend)(*tensors)
    grads = torch.autograd.grad(got.square().sum(), tensors)
    want = call(*tensors)
    assert torch.equal(got, want)
    exact = torch.autograd.grad(want.square().sum(), tensors)
    for one, other in zip(grads, exact):
        assert_like(one, other, 1e-12)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_dropout_has_one_mask_for_both_passes(backend):
    torch._dynamo.reset()
    q, k, _ = inputs()
    eye = torch.eye(10, dtype=torch.float64).expand(2, 2, 10, 10)
    eye = eye.contiguous().requires_grad_()

    def call(q, k, v):
        return fa.attention(q, k, v, dropout_p=0.5)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    out = compiled(q, k, eye)
    kept = out.detach() != 0
    assert 0 < kept.double().mean() < 1
    tensors = (q, k, eye)
    dout = normal(*out.shape, seed=2)
    want, _ = dense(q, k, eye, factors=kept * 2.0)
    got = torch.autograd.grad(out, tensors, dout)
    for one, other in zip(got, torch.autograd.grad(want, tensors, dout)):
        assert_like(one, other, 1e-8)
    assert not torch.equal(compiled(q, k, eye), out)  # fresh each time
    torch.manual_seed(1)
    first = compiled(q, k, eye)
    torch.manual_seed(1)
    assert torch.equal(first, compiled(q, k, eye))
