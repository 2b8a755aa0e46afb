"""What training programs do around attention, with gradients.

SPDX-License-Identifier: BSD-3-Clause
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import CLONES, qkv, run_script, stock_sdpa
from helpers.gradients import leaves
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash_attn_rocm as fa
from flash_attn_rocm import FlashAttnError, Reason

pytestmark = pytest.mark.usefixtures("patched", "simulated")


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flash(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return fa.flash_attn_func(q, k, v, causal=True).transpose(1, 2)


def gradients(function, tensors):
    return torch.autograd.grad(function(*tensors).float().square().sum(), tensors)


def assert_fused_backward():
    assert fa.last_call().kernel.startswith("fa_bwd"), fa.last_call()


# ---------------------------------------------------------------- torch's machinery


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("function", [attend, flash])
def test_checkpointing_repeats_the_bits(function, reentrant):
    tensors = leaves(*qkv(1, 2, 9, 16))
    before = sum(fa.status()["counters"]["fused"].values())
    want = gradients(function, tensors)
    once = sum(fa.status()["counters"]["fused"].values()) - before
    # Not torch.autograd.grad, which reentrant checkpoints refuse.
    out = checkpoint(function, *tensors, use_reentrant=reentrant)
    out.float().square().sum().backward()
    got = [t.grad for t in tensors]
    assert all(map(torch.equal, got, want))
    again = sum(fa.status()["counters"]["fused"].values()) - before - once
    assert (once, again) == (3, 4)  # the forward ran twice


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_under_autocast(reentrant):
    tensors = leaves(*qkv(1, 2, 9, 16, dtype=torch.float32))
    want = []
    for function in (
        attend,
        lambda *t: checkpoint(attend, *t, use_reentrant=reentrant),
    ):
        for tensor in tensors:
            tensor.grad = None
        with torch.autocast("cpu", torch.float16):
            out = function(*tensors)
        out.float().square().sum().backward()
        assert_fused_backward()
        want.append([t.grad for t in tensors])
    assert all(map(torch.equal, *want))


def test_retain_graph_repeats_the_bits():
    tensors = leaves(*qkv(1, 2, 9, 16))
    out = attend(*tensors)
    dout = torch.ones_like(out)
    first = torch.autograd.grad(out, tensors, dout, retain_graph=True)
    second = torch.autograd.grad(out, tensors, dout)
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, tensors, dout)


def test_gradients_accumulate():
    q, k, v = leaves(*qkv(1, 2, 9, 16))
    attend(q, k, v).sum().backward()
    once = [t.grad.clone() for t in (q, k, v)]
    attend(q, k, v).sum().backward()
    for tensor, grad in zip((q, k, v), once):
        assert torch.equal(tensor.grad, grad * 2)


def test_a_graph_with_several_attentions_adds_their_gradients():
    q, k, v = leaves(*qkv(1, 2, 9, 16, dtype=torch.float64))
    out = attend(attend(q, k, v), k, attend(v, k, q))
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))

    def plain(q, k, v):
        mask = torch.ones(9, 9, dtype=torch.bool).tril()
        scores = (q @ k.mT / 4).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v

    out = plain(plain(q, k, v), k, plain(v, k, q))
    for one, other in zip(grads, torch.autograd.grad(out.square().sum(), (q, k, v))):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_algorithms_are_satisfied(warn_only, recwarn):
    tensors = leaves(*qkv(1, 2, 33, 16))
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        results = [gradients(attend, tensors) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert_fused_backward()
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])
    assert not [w for w in recwarn if "determinis" in str(w.message)]


def test_inference_mode_saves_nothing_and_its_tensors_cannot_train():
    with torch.inference_mode():
        q, k, v = qkv(1, 2, 9, 16)
        out = attend(q, k, v)
        assert fa.last_call().backend == "sim" and out.is_inference()
    weight = torch.ones(1, 2, 9, 16, dtype=torch.float16, requires_grad=True)

    def outcome(function):
        with pytest.raises(RuntimeError) as caught:
            function(q, weight, v, is_causal=True)
        return str(caught.value)

    assert outcome(F.scaled_dot_product_attention) == outcome(stock_sdpa)


def test_hooks_see_the_gradient_and_may_replace_it():
    q, k, v = leaves(*qkv(1, 2, 9, 16))
    out = attend(q, k, v)
    out.register_hook(lambda grad: grad * 0)
    out.sum().backward()
    assert_fused_backward()
    assert not any(t.grad.any() for t in (q, k, v))


def test_saved_tensors_may_be_moved_away():
    tensors = leaves(*qkv(1, 2, 9, 16))
    want = gradients(attend, tensors)
    with torch.autograd.graph.save_on_cpu():
        out = attend(*tensors)
    got = torch.autograd.grad(out.float().square().sum(), tensors)
    assert all(map(torch.equal, got, want))


def test_anomaly_mode_finds_nothing():
    tensors = leaves(*qkv(1, 2, 9, 16))
    with torch.autograd.detect_anomaly(check_nan=True):
        gradients(attend, tensors)
    assert_fused_backward()


def test_flops_of_forward_and_backward_are_counted_like_torchs():
    tensors = leaves(*qkv(1, 4, 30, 64))
    with FlopCounterMode(display=False) as counter:
        out = F.scaled_dot_product_attention(*tensors)
        forward = counter.get_total_flops()
        out.sum().backward()
    # Two products forward; backward the scores again, dP, and three gradients.
    product = 2 * 4 * 30 * 30 * 64
    assert forward == 2 * product
    assert counter.get_total_flops() == 7 * product


# -------------------------------------------------------------------------- copies


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.attend = torch.nn.Linear(8, 48), F.scaled_dot_product_attention

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.into(x).chunk(3, -1)
        )
        return self.attend(q, k, v, is_causal=True)


@pytest.mark.parametrize("clone", CLONES)
def test_copies_of_a_model_train_to_the_same_bits(clone):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 7, 8)

    def step(module):
        module.zero_grad()
        module(x).square().sum().backward()
        assert_fused_backward()
        return module.into.weight.grad

    assert torch.equal(step(clone(model)), step(model))


def test_gradients_can_be_copied_and_pickled():
    tensors = leaves(*qkv(1, 2, 9, 16))
    for grad in gradients(attend, tensors):
        assert torch.equal(copy.deepcopy(grad), grad)
        assert torch.equal(pickle.loads(pickle.dumps(grad)), grad)


# ----------------------------------------------------------------------- functorch


def test_functorch_transforms_of_sdpa_are_stocks():
    q, k, v = qkv(1, 2, 9, 16, dtype=torch.float32)

    def loss(function):
        return lambda t: function(t, k, v, is_causal=True).square().sum()

    def everything(function):
        with sdpa_kernel(SDPBackend.MATH):
            one = torch.func.grad(loss(function))(q)
            two = torch.func.jvp(loss(function), (q,), (torch.ones_like(q),))[1]
            batched = torch.stack([q, q * 2])
            three = torch.vmap(torch.func.grad(loss(function)))(batched)
            four = torch.func.vjp(loss(function), q)[1](torch.tensor(1.0))[0]
        return one, two, three, four

    ours = everything(F.scaled_dot_product_attention)
    assert fa.last_call().reason in (Reason.FUNCTORCH, Reason.FORWARD_AD)
    assert all(map(torch.equal, ours, everything(stock_sdpa)))
    torch.func.grad(loss(F.scaled_dot_product_attention))(q)
    assert fa.last_call().reason is Reason.FUNCTORCH


def test_forward_mode_of_sdpa_is_stocks_also_for_leaves():
    import torch.autograd.forward_ad as forward_ad

    (q,) = leaves(qkv(1, 2, 9, 16, dtype=torch.float32)[0])
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        tangent = forward_ad.unpack_dual(attend(dual, q, q)).tangent
        assert fa.last_call().reason is Reason.FORWARD_AD
    assert tangent.any()


@pytest.mark.parametrize("transform", ["grad", "jvp", "dual", "vmap"])
def test_flash_attn_func_refuses_a_transform_that_it_cannot_follow(transform):
    import torch.autograd.forward_ad as forward_ad

    q, k, v = (t.transpose(1, 2) for t in qkv(1, 2, 9, 16, dtype=torch.float32))

    def loss(t):
        return fa.flash_attn_func(t, k, v).sum()

    with pytest.raises(FlashAttnError, match=r"^q: expected .*, got a "):
        if transform == "grad":
            torch.func.grad(loss)(q)
        elif transform == "jvp":
            torch.func.jvp(loss, (q,), (torch.ones_like(q),))
        elif transform == "vmap":  # whose tensors do not say what they require
            torch.vmap(loss)(torch.stack([q, q]).requires_grad_())
        else:
            with forward_ad.dual_level():
                loss(forward_ad.make_dual(q, torch.ones_like(q)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batches_of_gradients_are_those_one_by_one():
    tensors = leaves(*qkv(1, 2, 5, 8, dtype=torch.float64))
    out = attend(*tensors)
    douts = torch.randn(
        3, *out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1)
    )
    got = torch.autograd.grad(
        out, tensors, douts, retain_graph=True, is_grads_batched=True
    )
    for at, dout in enumerate(douts):
        want = torch.autograd.grad(out, tensors, dout, retain_graph=True)
        assert all(torch.equal(g[at], w) for g, w in zip(got, want))


# ------------------------------------------------------------------ other processes

DDP = """
import os, sys, torch, torch.distributed as dist, torch.nn.functional as F
import torch.multiprocessing as mp
from test_torch_world import Block

def model_and_data():
    torch.manual_seed(0)
    return Block(), torch.randn(4, 7, 8)

def work(rank, path):
    import flash_attn_rocm as fa
    fa.patch()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model, x = model_and_data()
    whole = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        whole.zero_grad()
        out = whole(x[2 * rank : 2 * rank + 2])
        out.square().mean().backward()
    assert fa.last_call().kernel.startswith("fa_bwd"), fa.last_call()
    torch.save(model.into.weight.grad, f"{path}.grad{rank}")
    # Not through Python's end: gloo's threads outlive even destroy_process_group(),
    # and one that then takes Python's lock to free its last piece of work aborts the
    # process, with or without us (pytorch/pytorch#179291).
    os._exit(0)

if __name__ == "__main__":
    import flash_attn_rocm as fa
    path = sys.argv[1]
    mp.spawn(work, (path,), nprocs=2)
    fa.patch()
    model, x = model_and_data()
    model(x).square().mean().backward()
    for rank in range(2):
        got = torch.load(f"{path}.grad{rank}")
        assert torch.allclose(got, model.into.weight.grad, rtol=1e-5, atol=1e-8)
"""


def test_two_ddp_processes_get_the_gradient_of_the_whole_batch(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed")
    env = {"FLASH_ATTN_ROCM_DEVICE": "sim"}
    run_script(tmp_path / "ddp.py", DDP, str(tmp_path / "store"), env=env)


LOADER = """
import sys, torch, torch.nn.functional as F
import flash_attn_rocm as fa
fa.patch()
torch.set_num_threads(1)  # torch's own threads do not survive a fork

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(1, 2, 9, 16, generator=generator).half().requires_grad_()
        F.scaled_dot_product_attention(x, x, x).sum().backward()
        assert fa.last_call().kernel.startswith("fa_bwd"), fa.last_call()
        return x.grad

if __name__ == "__main__":
    want = torch.stack([Rows()[i] for i in range(4)])
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=2, num_workers=2, multiprocessing_context=sys.argv[1])
    assert torch.equal(torch.cat(list(loader)), want)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_compute_gradients(method, tmp_path):
    env = {"FLASH_ATTN_ROCM_DEVICE": "sim"}
    run_script(tmp_path / "loader.py", LOADER, method, env=env)


@pytest.mark.parametrize("function", [attend, flash])
def test_an_exception_of_a_saved_tensors_hook_is_the_callers(function):
    # torch.utils.checkpoint ends a recomputation that way.
    class OfTheHook(RuntimeError):
        pass

    def pack(tensor):
        raise OfTheHook("enough")

    tensors = leaves(*qkv(1, 2, 9, 16))
    fallbacks = fa.status()["counters"]["fallback"]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with pytest.raises(OfTheHook, match="enough"):
            function(*tensors)
    assert fa.status()["counters"]["fallback"] == fallbacks
