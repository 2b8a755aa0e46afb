"""Gradients through the public names: values, dtypes, layouts, what is computed.

SPDX-License-Identifier: BSD-3-Clause
"""

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import ARCH, BOTTOM_RIGHT, NONE, TOP_LEFT, qkv, stock_sdpa
from helpers.gradients import (
    fp64_gradients,
    gradient_ratios,
    leaves,
)

import flash_attn_rocm as fa
from flash_attn_rocm import FlashAttnError, Reason, _autograd, _chunked, _ops, _shim
from flash_attn_rocm._features import Features

pytestmark = pytest.mark.usefixtures("patched", "simulated")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}
# float32 of small problems
NAMES.update({torch.float32: "exact32", torch.float64: "f64"})


def assert_fused_backward():
    call = fa.last_call()
    assert call.backend == "sim" and call.reason is Reason.FUSED, call
    assert call.kernel.startswith("fa_bwd"), call


def like(tensor, seed=9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


def bshd(*tensors):
    """(B, H, S, D) in flash_attn's layout, as views."""
    return tuple(t.transpose(1, 2) for t in tensors)


# ----------------------------------------------------------------- what it computes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_sdpa_are_as_exact_as_the_math_path(dtype, causal):
    q, k, v = leaves(*qkv(2, 4, 33, 16, heads_k=2, length_k=21, dtype=dtype))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    dout = like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert_fused_backward()
    assert [g.dtype for g in grads] == [dtype] * 3
    which = TOP_LEFT if causal else NONE
    assert max(gradient_ratios(grads, q, k, v, dout, causal=which)) <= 1


@pytest.mark.parametrize(("length_k", "kind"), [(128, "exact32"), (129, "f32")])
def test_a_backward_computes_float32_as_its_forward_did(length_k, kind):
    """On both sides of 2^22 multiply-adds."""
    q, k, v = leaves(*qkv(1, 2, 128, 64, length_k=length_k, dtype=torch.float32))
    out = F.scaled_dot_product_attention(q, k, v)
    assert f"fa_fwd_{kind}_" in fa.last_call().kernel
    dout = like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    names = fa.last_call().kernel.split("+")
    assert [name.split("_")[3] for name in names] == [kind, kind], names
    assert max(gradient_ratios(grads, q, k, v, dout, causal=NONE)) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(5, 12), (12, 5), (1, 1)])
def test_gradients_of_flash_attn_func_are_bottom_right_causal(dtype, lengths):
    length, length_k = lengths
    q, k, v = leaves(*qkv(1, 2, length, 24, heads_k=1, length_k=length_k, dtype=dtype))
    out = fa.flash_attn_func(*bshd(q, k, v), causal=True).transpose(1, 2)
    dout = like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert_fused_backward()
    # Of a handful of numbers; observed: up to 1.09.
    assert max(gradient_ratios(grads, q, k, v, dout, causal=BOTTOM_RIGHT)) <= 1.5
    if length > length_k:  # the first queries see nothing
        assert not out[:, :, : length - length_k].any()
        assert not grads[0][:, :, : length - length_k].any()


@pytest.mark.parametrize("causal", [NONE, TOP_LEFT, BOTTOM_RIGHT])
def test_gradcheck_of_float64_with_other_value_dim_and_lse(causal):
    q, k, v = qkv(1, 4, 4, 6, heads_k=2, length_k=5, dtype=torch.float64)
    inputs = leaves(q, k, v[..., :3])

    def attend(*tensors):
        features = Features(scale=0.4, causal=causal)
        return _autograd.attention(*tensors, features, with_lse=True)

    # Every number by one mode; a random projection does for the others.
    assert torch.autograd.gradcheck(attend, inputs, fast_mode=causal != TOP_LEFT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, dim_v", [(8, 40), (40, 8), (7, 33)])
def test_the_value_dim_is_free(dtype, dim, dim_v):
    q, k, _ = qkv(1, 2, 70, dim, dtype=dtype)
    v = qkv(1, 2, 70, dim_v, dtype=dtype, seed=1)[2]
    q, k, v = leaves(q, k, v)
    out = F.scaled_dot_product_attention(q, k, v)
    assert out.shape == (1, 2, 70, dim_v) and out.dtype == dtype
    dout = like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert_fused_backward()
    assert max(gradient_ratios(grads, q, k, v, dout)) <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0)], ids=str)
def test_empty_inputs_have_zero_gradients(dtype, sizes):
    batch, length, length_k = sizes
    q = torch.ones(batch, 2, length, 8, dtype=dtype, requires_grad=True)
    k, v = (
        torch.ones(batch, 1, length_k, 8, dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    for out in (
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        fa.flash_attn_func(*bshd(q, k, v)),
    ):
        assert fa.last_call().reason is Reason.FUSED and not out.any()
        for leaf, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v))):
            assert grad.shape == leaf.shape and not grad.any()


# -------------------------------------------------------- gradients from outside

LAYOUTS = {
    "dense": lambda t: t,
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "last dim strided": lambda t: t.mT.contiguous().mT,
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "batch inside": lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "sliced": lambda t: torch.cat([t, t], 2)[:, :, : t.shape[2]],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_of_the_incoming_gradient_gives_the_same_bits(name, dtype):
    q, k, v = leaves(*qkv(2, 2, 9, 16, dtype=dtype))
    out = F.scaled_dot_product_attention(q, k, v)
    dout = like(out)
    want = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    got = torch.autograd.grad(out, (q, k, v), LAYOUTS[name](dout))
    assert_fused_backward()
    assert all(map(torch.equal, got, want))


def test_an_expanded_gradient_is_read_in_place(monkeypatch):
    q, k, v = leaves(*qkv(2, 2, 9, 16))
    out = F.scaled_dot_product_attention(q, k, v)
    want = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    seen, launch = [], _ops.backward_op

    def spy(dout, *rest):
        seen.append(dout.stride())
        return launch(dout, *rest)

    monkeypatch.setattr(_ops, "backward_op", spy)
    got = torch.autograd.grad(out.sum(), (q, k, v))
    assert seen == [(0, 0, 0, 0)]
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_of_the_inputs_gives_the_same_bits(name, which):
    tensors = dict(zip("qkv", qkv(2, 2, 9, 16)))
    want_leaves = leaves(*tensors.values())
    out = F.scaled_dot_product_attention(*want_leaves)
    dout = like(out)
    want = torch.autograd.grad(out, want_leaves, dout)
    for part in which:
        tensors[part] = LAYOUTS[name](tensors[part])
    inputs = [t.detach().requires_grad_() for t in tensors.values()]
    again = F.scaled_dot_product_attention(*inputs)
    got = torch.autograd.grad(again, inputs, dout)
    assert_fused_backward()
    assert torch.equal(again, out) and all(map(torch.equal, got, want))


def test_gradients_have_the_layout_of_their_tensors():
    q, k, v = qkv(2, 3, 5, 16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    inputs = leaves(q, k, v)
    assert inputs[0].stride() == q.stride()
    out = F.scaled_dot_product_attention(*inputs)
    for leaf, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs)):
        assert grad.stride() == leaf.stride()


# ------------------------------------------------------------ only what is wanted


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_only_gradients_that_are_wanted_are_computed(wanted):
    inputs = dict(zip("qkv", qkv(1, 2, 9, 16)))
    every = leaves(*inputs.values())
    out = F.scaled_dot_product_attention(*every)
    dout = like(out)
    want = dict(zip("qkv", torch.autograd.grad(out, every, dout)))
    some = {n: t.clone().requires_grad_(n in wanted) for n, t in inputs.items()}
    out = F.scaled_dot_product_attention(*some.values())
    out.backward(dout)
    kernels = fa.last_call().kernel.split("+")
    keys = ["fa_bwd_kv"] if wanted != "q" else []
    queries = ["fa_bwd_q"] if wanted != "v" and wanted != "qv" else []
    expected = [*queries, *keys]  # for dk, whose delta the queries' pass corrects
    if "k" not in wanted:
        expected = [*keys, *(["fa_bwd_q"] if "q" in wanted else [])]
    assert [kernel.rsplit("_f16", 1)[0] for kernel in kernels] == expected
    for name, tensor in some.items():
        if name in wanted:
            assert torch.equal(tensor.grad, want[name])
        else:
            assert tensor.grad is None


def test_nothing_of_the_forward_is_saved_without_need():
    q, k, v = leaves(*qkv(1, 2, 9, 16))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = F.scaled_dot_product_attention(q, k, v)
        assert out.grad_fn is None and not out.requires_grad
        assert fa.last_call().kernel.startswith("fa_fwd")
    out = F.scaled_dot_product_attention(*(t.detach() for t in (q, k, v)))
    assert out.grad_fn is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_graph_keeps_tensors_of_order_n_only(dtype):
    inputs = leaves(*qkv(1, 2, 40, 8, dtype=dtype))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, id):
        out = F.scaled_dot_product_attention(*inputs)
    # q, k, v, out, the log-sum-exp, and what rounding took from that and, of halves,
    # from out, two numbers to a float.
    low = {torch.float32: 2 * 40, torch.float64: 0}
    low = low.get(dtype, 2 * 40 + out.numel() // 2)
    assert sum(t.numel() for t in kept) == 4 * out.numel() + 2 * 40 + low


# --------------------------------------------------------------------- log-sum-exp


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_log_sum_exp_is_differentiable_when_it_is_asked_for(dtype):
    q, k, v = leaves(*qkv(1, 4, 7, 16, heads_k=2, dtype=dtype))
    out, lse, third = fa.flash_attn_func(*bshd(q, k, v), return_attn_probs=True)
    assert third is None and lse.requires_grad
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    dout, dlse = like(out), like(lse)
    results, grads = (out, lse), (dout, dlse)
    got = torch.autograd.grad(results, (q, k, v), grads, retain_graph=True)
    exact = fp64_gradients(q, k, v, dout.transpose(1, 2), dlse=dlse)
    for one, other in zip(got, exact):
        # Observed: 2e-3 for bfloat16, its rounding.
        size = other.abs().max()
        assert (one - other).abs().max() <= 4 * torch.finfo(dtype).eps * size
    alone = torch.autograd.grad(lse, (q, k, v), dlse)  # none for out
    exact = fp64_gradients(q, k, v, torch.zeros_like(dout).transpose(1, 2), dlse=dlse)
    for one, other in zip(alone, exact):
        size = other.abs().max()
        assert (one - other).abs().max() <= 4 * torch.finfo(dtype).eps * size


def test_a_log_sum_exp_that_nobody_used_has_no_gradient_to_read(monkeypatch):
    q, k, v = leaves(*qkv(1, 2, 7, 16))
    out, _, _ = fa.flash_attn_func(*bshd(q, k, v), return_attn_probs=True)
    seen, launch = [], _ops.backward_op

    def spy(dout, dlse, *rest):
        seen.append(dlse.numel())
        return launch(dout, dlse, *rest)

    monkeypatch.setattr(_ops, "backward_op", spy)
    out.sum().backward()
    assert seen == [0]


def test_rows_that_see_nothing_get_no_gradient_from_their_log_sum_exp():
    q, k, v = leaves(*qkv(1, 1, 6, 8, length_k=2))
    _, lse, _ = fa.flash_attn_func(*bshd(q, k, v), causal=True, return_attn_probs=True)
    assert (lse[..., :4] == -math.inf).all()
    dq, dk = torch.autograd.grad(lse[..., 4:].sum(), (q, k))
    assert dq.isfinite().all() and dk.isfinite().all()
    assert not dq[:, :, :4].any() and dq[:, :, 4:].any()


# ----------------------------------------------------- where and when it is computed


def test_the_backward_runs_where_its_forward_was_simulated():
    q, k, v = leaves(*qkv(1, 2, 9, 16))
    out = F.scaled_dot_product_attention(q, k, v)
    seen = []

    def work():  # in a thread that simulates nothing
        assert fa.status()["simulated"] is None
        seen.append(torch.autograd.grad(out, (q, k, v), like(out), retain_graph=True))
        seen.append(fa.last_call().kernel)
        assert fa.status()["simulated"] is None

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[1].startswith("fa_bwd")
    assert all(
        map(torch.equal, seen[0], torch.autograd.grad(out, (q, k, v), like(out)))
    )


def test_backwards_on_many_threads_agree():
    q, k, v = leaves(*qkv(1, 2, 20, 16))
    out = F.scaled_dot_product_attention(q, k, v)
    want = torch.autograd.grad(out, (q, k, v), like(out), retain_graph=True)
    results = []

    def work():
        grads = torch.autograd.grad(out, (q, k, v), like(out), retain_graph=True)
        results.append(all(map(torch.equal, grads, want)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_a_failing_backward_of_sdpa_is_answered_by_torch_ops(monkeypatch, caplog):
    from flash_attn_rocm import _record

    monkeypatch.setattr(_record, "_noted", set())
    q, k, v = leaves(*qkv(1, 4, 9, 16, heads_k=2, length_k=11))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    dout = like(out)

    def broken(*args):
        raise RuntimeError("launch failed: no such luck")

    monkeypatch.setattr(_ops, "backward_op", broken)
    monkeypatch.setattr(_chunked, "BLOCK_ELEMENTS", 100)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert fa.last_call().reason is Reason.FAILED and "no such luck" in caplog.text
    assert [g.dtype for g in grads] == [torch.float16] * 3
    assert max(gradient_ratios(grads, q, k, v, dout, causal=TOP_LEFT)) <= 1


def test_a_failing_backward_of_flash_attn_func_is_an_error(monkeypatch):
    q, k, v = leaves(*qkv(1, 2, 9, 16))
    out = fa.flash_attn_func(*bshd(q, k, v))

    def broken(*args):
        raise RuntimeError("launch failed: no such luck")

    monkeypatch.setattr(_ops, "backward_op", broken)
    with pytest.raises(FlashAttnError, match="no such luck"):
        out.sum().backward()


def test_a_failing_forward_with_gradients_is_answered_by_stock(monkeypatch):
    def broken(*args):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(_ops, "op", broken)
    monkeypatch.setattr(_shim, "_op", broken)
    q, k, v = leaves(*qkv(1, 2, 9, 16))
    out = F.scaled_dot_product_attention(q, k, v)
    assert fa.last_call().reason is Reason.FAILED
    assert torch.equal(out, stock_sdpa(q, k, v))
    out.sum().backward()
    assert torch.isfinite(q.grad).all()


def test_changing_a_saved_tensor_in_place_is_noticed():
    q, k, v = leaves(*qkv(1, 2, 9, 16))
    for change in ("input", "output"):
        x = q * 1
        out = F.scaled_dot_product_attention(x, k, v)
        with torch.no_grad():
            (x if change == "input" else out).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


# --------------------------------------------------------------------- what is told


@pytest.mark.parametrize("dtype", DTYPES)
def test_explain_and_last_call_name_the_kernels_of_the_backward(dtype):
    q, k, v = leaves(*qkv(1, 2, 9, 40, dtype=dtype))
    v = v.detach()
    told = fa.explain(q, k, v, is_causal=True)
    assert told.fused and told.kernel.startswith(f"fa_fwd_{NAMES[dtype]}_")
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert fa.last_call().kernel == told.kernel
    before = fa.status()["counters"]["fused"]
    out.sum().backward()
    assert fa.last_call().kernel == told.backward
    for kernel in told.backward.split("+"):
        assert f"_{NAMES[dtype]}_" in kernel
        after = fa.status()["counters"]["fused"]
        assert after[kernel] == before.get(kernel, 0) + 1
    with torch.no_grad():
        assert fa.explain(q, k, v).backward == ""


def test_profile_holds_the_backward_of_its_calls():
    q, k, v = leaves(*qkv(1, 1, 9, 16))
    with fa.profile() as profile:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    fused = profile.to_dict()["calls"]["fused"]
    assert sorted(name[:8] for name in fused) == ["fa_bwd_k", "fa_bwd_q", "fa_fwd_f"]


def test_simulations_of_other_contexts_are_not_touched_by_a_backward():
    q, k, v = leaves(*qkv(1, 1, 5, 8))
    F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert fa.status()["simulated"] == ARCH
