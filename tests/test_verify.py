"""FLASH_ATTN_ROCM_VERIFY: wrong numbers of a kernel are found and not delivered.

SPDX-License-Identifier: BSD-3-Clause
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import builtin, needs_simulator, qkv

import flash_attn_rocm as fa
import hipsim
from flash_attn_rocm import FlashAttnError, Reason, _guard, _ops, _served, _verify
from flash_attn_rocm._features import Features

pytestmark = needs_simulator

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def verified():
    with fa.patched(), fa.simulate("gfx906"):
        _verify.set_every(1)
        yield
    _verify.set_every(0)
    hipsim.set_fault(None)


def counts():
    return fa.status()["verify"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_right_results_pass(dtype, size):
    q, k, v = qkv(2, 4, 70, 40, heads_k=2, length_k=90, dtype=dtype)
    leaves = [(t * size).requires_grad_() for t in (q, k, v)]
    before = counts()
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    assert fa.last_call().reason is Reason.FUSED
    out.backward(torch.randn_like(out))
    assert fa.last_call().reason is Reason.FUSED
    after = counts()
    assert after["checked"] - before["checked"] == 2
    assert after["mismatches"] == before["mismatches"]


@pytest.mark.parametrize(
    "features",
    [
        {"window": (20, 3), "causal": "bottom_right"},
        {"softcap": 5.0, "alibi_slopes": torch.tensor([0.5, 0.1])},
        {"dropout_p": 0.4},
        {"bias": torch.randn(1, 2, 70, 1), "sink": torch.tensor([0.3, 2.0])},
    ],
    ids=lambda features: "+".join(features),
)
def test_right_results_with_features_pass(features):
    leaves = [t.requires_grad_() for t in qkv(1, 2, 70, 64, dtype=torch.float32)]
    before = counts()
    out = fa.attention(*leaves, **features)
    out.backward(torch.randn_like(out))
    assert counts()["checked"] - before["checked"] == 2
    assert counts()["mismatches"] == before["mismatches"]


def small_call_with_bias(dtype, low):
    """Row 4 has nothing but `low`, row 5 for half of its keys, the others nothing."""
    tensors = [t.requires_grad_() for t in qkv(1, 2, 9, 16, dtype=dtype)]
    bias = torch.zeros(9, 9, dtype=dtype)
    bias[4], bias[5, :5] = low, low
    return tensors, bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_results_pass_where_a_bias_is_far_larger_than_the_scores(dtype):
    """As checked, but for gradients of scores of which nothing is promised."""
    lowest = torch.finfo(dtype).min
    for low in (-1e4, -3e4, -(2.0**20), -(2.0**31), lowest):
        low = max(low, lowest)
        tensors, bias = small_call_with_bias(dtype, low)
        unchecked = int(low <= -(2.0**20))
        before = counts()
        fa.attention(*tensors, bias=bias).square().sum().backward()
        assert counts() == {
            **before,
            "checked": before["checked"] + 2 - unchecked,
            "unchecked": before["unchecked"] + unchecked,
        }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("low", [-1e4, -3e4, -(2.0**31)])
def test_wrong_results_are_found_beside_a_bias_that_is_far_larger(dtype, low):
    (q, k, v), bias = small_call_with_bias(dtype, max(low, torch.finfo(dtype).min))
    features = Features(scale=0.25, bias=bias.expand(1, 2, 9, 9))
    out = fa.attention(q, k, v, bias=bias)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    out = out.detach().clone()
    out[0, 1, 0, 3] += 0.5
    before = counts()
    with pytest.raises(_verify.Rejected, match="the output"):
        _verify.check_forward(q, k, v, features, out)
    changes = {"checked": 1, "mismatches": 1}
    grads[0][0, 1, 0, 3] += 0.5
    gradients = (q, k, v, features, dout, None, (*grads, None, None))
    if low < -(2.0**20) and dtype is not torch.float16:
        _verify.check_backward(*gradients)
        changes["unchecked"] = 1
    else:
        with pytest.raises(_verify.Rejected, match="dq"):
            _verify.check_backward(*gradients)
        changes = {"checked": 2, "mismatches": 2}
    assert counts() == {**before, **{n: before[n] + c for n, c in changes.items()}}


@pytest.mark.parametrize("seed", range(6))
def test_right_results_pass_where_weights_are_tiny(seed):
    """Far from the largest score a weight is less exact, as far as it is away."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    generator = torch.Generator().manual_seed(seed)
    for kind in ({"alibi_slopes": slopes}, {"sink": 90 * slopes}, {"softcap": 0.3}):
        tensors = [
            torch.randn(1, 4, length, 64, generator=generator).requires_grad_()
            for length in (3, 300, 300)
        ]
        before = counts()["mismatches"]
        fa.attention(*tensors, causal="bottom_right", **kind).sum().backward()
        assert counts()["mismatches"] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_which_nothing_is_promised_open_no_breaker(dtype):
    tensors = [t.requires_grad_() for t in qkv(1, 2, 70, 64, dtype=dtype)]
    huge = [tensors[0] * 1e20, tensors[1] * 1e20, tensors[2]]
    before = counts()
    fa.attention(*huge).sum().backward()
    assert counts() == {**before, "unchecked": before["unchecked"] + 2}
    assert not fa.status()["breakers"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_row_of_the_output_is_found(dtype):
    q, k, v = qkv(1, 2, 70, 64, dtype=dtype)
    out = builtin()(q, k, v).clone()
    features = Features(scale=0.125)
    _verify.check_forward(q, k, v, features, out)
    sdpa_sees(q, k, v)
    out[0, 1, 40] *= 1.5
    with pytest.raises(_verify.Rejected, match="differs from torch's math"):
        _verify.check_forward(q, k, v, features, out)


def sdpa_sees(*inputs):
    """The kernel of these has been asked for, so that its breaker can open."""
    F.scaled_dot_product_attention(*inputs)
    assert fa.last_call().reason is Reason.FUSED


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("wrong", range(3), ids=["dq", "dk", "dv"])
def test_a_wrong_gradient_is_found(wrong, causal):
    q, k, v = qkv(1, 4, 70, 64, heads_k=2)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    features = Features(scale=0.125, causal=int(causal))
    _verify.check_backward(q, k, v, features, dout, None, (*grads, None, None))
    grads[wrong][0, 0, 69, 63] += 0.5
    with pytest.raises(_verify.Rejected, match=["dq", "dk", "dv"][wrong]):
        _verify.check_backward(q, k, v, features, dout, None, (*grads, None, None))


@pytest.mark.parametrize("shape", [(1, 1, 1, 90), (2, 4, 70, 90), (1, 4, 70, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_gradient_of_bias_or_sink_is_found(shape, dtype, monkeypatch):
    """Also where blocks of rows add to it, and behind the op of compiled graphs."""
    monkeypatch.setattr(_verify, "_ELEMENTS", 16 * 8 * 90)
    q, k, v = qkv(2, 4, 70, 40, heads_k=2, length_k=90, dtype=dtype)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    features = Features(
        scale=0.2,
        bias=bias.to(dtype),
        sink=torch.tensor([0.3, 2.0, -1.0, 0.0], dtype=wide),
        softcap=3.0,
        causal=_ops.CAUSAL_BOTTOM_RIGHT,
    )
    none = torch.empty(0, dtype=dtype)
    made = _ops.op(q, k, v, *features.op_args(none), True)
    dout = torch.randn(made[0].shape, generator=torch.Generator().manual_seed(2))
    dout = dout.to(dtype)
    wanted = _ops.WANT_DBIAS | _ops.WANT_DSINK
    *_, dbias, dsink = _served.backward(
        dout, none.to(wide), q, k, v, *made, *features.op_args(none), wanted, False
    )
    for wrong, name in enumerate((None, "dbias", "dsink")):
        grads = [None, None, None, dbias.clone(), dsink.sum((0, 2))]
        if name is None:
            _verify.check_backward(q, k, v, features, dout, None, tuple(grads))
            continue
        grads[2 + wrong].view(-1)[-1] += 0.5
        with pytest.raises(_verify.Rejected, match=name):
            _verify.check_backward(q, k, v, features, dout, None, tuple(grads))


def test_of_a_large_call_one_head_is_looked_at(monkeypatch):
    """Each wrong head is found sooner or later, also where a call has too many."""
    monkeypatch.setattr(_verify, "_WHOLE", 2 * 70 * 70)
    q, k, v = qkv(2, 4, 70, 64, heads_k=2)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, enable_gqa=True)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    call = (q, k, v, Features(scale=0.125), dout, None)
    for batch, head in ((0, 1), (1, 0)):
        dv = grads[2].clone()
        dv[batch, head, 5, 7] += 0.5
        found = 0
        for _ in range(60):
            try:
                _verify.check_backward(*call, (*grads[:2], dv, None, None))
            except _verify.Rejected:
                found += 1
        assert 0 < found < 60


def test_flipped_bits_of_lds_are_found_and_not_delivered():
    """Of results that a flip changed beyond rounding, the first call finds each."""
    inputs = qkv(1, 2, 70, 64, dtype=torch.float16)
    exact = builtin()(*(t.double() for t in inputs))
    found = 0
    for seed in range(200):
        hipsim.set_fault(f"lds-flip:nth=1,bits=4,seed={seed}")
        out = F.scaled_dot_product_attention(*inputs)
        reason = fa.last_call().reason
        found += reason is Reason.VERIFY
        assert (out.double() - exact).abs().max() < 4e-3, seed
        assert reason in (Reason.FUSED, Reason.VERIFY)
        _guard.reset()
    assert found >= 5
    assert counts()["mismatches"] >= found


def test_a_mismatch_opens_the_breaker():
    inputs = qkv(1, 2, 70, 64, dtype=torch.float16)
    for seed in range(200):
        hipsim.set_fault(f"lds-flip:nth=1,bits=16,seed={seed}")
        out = F.scaled_dot_product_attention(*inputs)
        if fa.last_call().reason is Reason.VERIFY:
            break
    assert torch.equal(out, builtin()(*inputs))
    (row,) = fa.status()["breakers"]
    assert row["kernel"] == "fa_fwd_f16_d64_plain" and "torch's math" in row["cause"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", range(3))
def test_bad_input_is_stocks_and_counted(bad, which):
    inputs = [t.clone() for t in qkv(1, 2, 70, 64, dtype=torch.float32)]
    inputs[which][0, 0, 3, 5] = bad
    before = counts()["nonfinite_inputs"]
    out = F.scaled_dot_product_attention(*inputs)
    assert fa.last_call().reason is Reason.NONFINITE
    assert torch.equal(
        out,
        builtin()(*inputs),
    ) or torch.allclose(out, builtin()(*inputs), equal_nan=True, rtol=0, atol=0)
    assert counts()["nonfinite_inputs"] == before + 1
    assert not fa.status()["breakers"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["bias", "sink"])
def test_bad_features_are_counted_and_open_no_breaker(bad, name):
    tensors = qkv(1, 2, 9, 16)
    feature = torch.zeros((9, 9) if name == "bias" else (2,))
    feature[0] = bad
    before = counts()["nonfinite_inputs"]
    with pytest.raises(FlashAttnError, match="NaN or an infinity"):
        fa.attention(*tensors, **{name: feature})
    assert counts()["nonfinite_inputs"] == before + 1
    assert not fa.status()["breakers"]


def test_a_bias_that_hides_keys_is_ordinary():
    bias = torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    tensors = [t.requires_grad_() for t in qkv(1, 2, 9, 16)]
    before = counts()
    fa.attention(*tensors, bias=bias).square().sum().backward()
    assert counts() == {**before, "checked": before["checked"] + 2}


@pytest.mark.parametrize("place", ["_Block", "_are_ordinary", "_differs"])
def test_without_memory_for_a_check_the_result_passes_and_is_counted(
    monkeypatch, place
):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("made up")

    tensors = [t.requires_grad_() for t in qkv(1, 2, 9, 16)]
    before = counts()
    monkeypatch.setattr(_verify, place, full)
    F.scaled_dot_product_attention(*tensors).square().sum().backward()
    assert fa.last_call().reason is Reason.FUSED
    assert counts() == {**before, "unchecked": before["unchecked"] + 2}


def test_one_call_in_n_is_checked():
    _verify.set_every(4)
    inputs = qkv(1, 1, 8, 8, dtype=torch.float32)
    before = counts()["checked"]
    for _ in range(40):
        F.scaled_dot_product_attention(*inputs)
    assert counts()["checked"] == before + 10


def test_empty_calls_are_left_alone():
    q = torch.empty(1, 2, 0, 8)
    F.scaled_dot_product_attention(q, torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
    assert fa.last_call().reason is Reason.FUSED


@pytest.mark.parametrize("every", [-1, 1.5, True, "1"])
def test_other_than_whole_numbers_are_refused(every):
    with pytest.raises(FlashAttnError, match="every: expected a whole number"):
        _verify.set_every(every)
