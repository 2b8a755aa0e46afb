"""torch.compile and torch.export of forward and backward.

SPDX-License-Identifier: BSD-3-Clause
"""

import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import BOTTOM_RIGHT, TOP_LEFT, qkv, run_python
from helpers.gradients import gradient_ratios, leaves

import flash_attn_rocm as fa

pytestmark = pytest.mark.usefixtures("patched", "simulated", "fresh_dynamo")

BACKENDS = ["eager", "aot_eager", "inductor"]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that keeps the forward and backward graphs of AOTAutograd."""

    def __init__(self):
        self.forward, self.backward = [], []

    def __call__(self, module, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def keep(into):
            def compiler(graph, _):
                into.append([str(node.target) for node in graph.graph.nodes])
                return graph.forward

            return compiler

        compiler = aot_autograd(
            fw_compiler=keep(self.forward), bw_compiler=keep(self.backward)
        )
        return compiler(module, inputs)

    def count(self, name):
        return sum(g.count(name) for g in self.forward + self.backward)


FWD = "flash_attn_rocm.fwd_served.default"
BWD = "flash_attn_rocm.bwd_served.default"


def attend(q, k, v, **kwargs):
    return F.scaled_dot_product_attention(q, k, v, **kwargs)


def like(tensor):
    generator = torch.Generator().manual_seed(9)
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


def both(function, tensors, **kwargs):
    """(out, *gradients) of function(*tensors)."""
    out = function(*tensors, **kwargs)
    return (out, *torch.autograd.grad(out, tensors, like(out)))


def assert_compiled_like_eager(compiled, function, tensors, **kwargs):
    got = both(compiled, tensors, **kwargs)
    assert fa.last_call().backend == "sim"
    assert fa.last_call().kernel.startswith("fa_bwd")
    for one, other in zip(got, both(function, tensors, **kwargs)):
        assert torch.equal(one, other) and one.stride() == other.stride()


# ------------------------------------------------------------------------ equality


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward_compile_in_one_graph(backend, dynamic):
    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=dynamic)
    tensors = leaves(*qkv(2, 4, 9, 16, heads_k=2, length_k=13))
    options = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
    assert_compiled_like_eager(compiled, attend, tensors, **options)
    q, k, v = tensors
    q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert_compiled_like_eager(compiled, attend, (q, k, v), **options)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_every_dtype_compiles(dtype):
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, v = qkv(1, 2, 9, 16, dtype=dtype)
    assert_compiled_like_eager(compiled, attend, leaves(q, k, v))
    assert_compiled_like_eager(compiled, attend, leaves(q, k, v[..., :5]))


LAYOUTS = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize("layout", LAYOUTS[::5])
def test_every_mix_of_dense_and_transposed_operands_compiles(layout):
    *tensors, dout = (
        t.transpose(1, 2).contiguous().transpose(1, 2) if transposed else t
        for t, transposed in zip((*qkv(2, 2, 33, 32), qkv(2, 2, 33, 32)[0]), layout)
    )
    q, k, v = tensors = [t.clone().requires_grad_() for t in tensors]
    out = torch.compile(attend, fullgraph=True)(q, k, v, is_causal=True)
    assert out.stride() == q.stride()
    grads = torch.autograd.grad(out, tensors, dout)
    assert fa.last_call().backend == "sim"
    assert max(gradient_ratios(grads, q, k, v, dout, causal=TOP_LEFT)) <= 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_flash_attn_func_compiles_with_its_log_sum_exp(backend, dynamic):
    def call(q, k, v):
        out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        return out * 2 + lse.transpose(1, 2).unsqueeze(-1).to(out.dtype)

    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    tensors = leaves(*(t.transpose(1, 2) for t in qkv(1, 2, 6, 16, length_k=9)))
    got, want = both(compiled, tensors), both(call, tensors)
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16])
def test_the_same_tensor_may_come_thrice(backend, autocast):
    def thrice(x):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            return F.scaled_dot_product_attention(x, x, x)

    dtype = torch.float16 if autocast is None else torch.float32
    (x,) = leaves(qkv(1, 2, 9, 16, dtype=dtype)[0])
    compiled = torch.compile(thrice, fullgraph=True, backend=backend)
    got = both(compiled, (x,))
    assert fa.last_call().kernel.startswith("fa_bwd")
    for one, other in zip(got, both(thrice, (x,))):
        # The three gradients may be added in another order.
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_compiles_with_float32_gradients(backend, dtype):
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    tensors = leaves(*qkv(1, 2, 9, 16, dtype=torch.float32))
    with torch.autocast("cpu", dtype):
        got = both(compiled, tensors)
        want = both(attend, tensors)
    assert [t.dtype for t in got] == [dtype] + [torch.float32] * 3
    assert all(map(torch.equal, got, want))


def test_compiled_inputs_that_need_no_gradient_cost_none():
    graphs = Graphs()
    compiled = torch.compile(attend, fullgraph=True, backend=graphs)
    q, k, v = qkv(1, 2, 9, 16)
    v.requires_grad_()
    compiled(q, k, v).sum().backward()
    assert fa.last_call().kernel.startswith("fa_bwd_kv")
    assert "bwd_q" not in fa.last_call().kernel
    assert graphs.count(FWD) == graphs.count(BWD) == 1


class Block(torch.nn.Module):
    """Projections around attention, as models have them."""

    def __init__(self):
        super().__init__()
        self.into, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.into(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16])
def test_a_module_with_weights_trains_compiled(autocast):
    torch.manual_seed(0)
    module, x = torch.nn.Sequential(Block(), Block()), torch.randn(2, 7, 16)

    def step(function):
        module.zero_grad()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            out = function(x)
        out.float().square().sum().backward()
        assert fa.last_call().kernel.startswith("fa_bwd")
        return [p.grad.clone() for p in module.parameters()]

    want = step(module)
    got = step(torch.compile(module, fullgraph=True, backend="aot_eager"))
    bound = 1e-5 if autocast is None else 2e-2
    for one, other in zip(got, want):
        assert (one - other).norm() <= bound * other.norm()


# ----------------------------------------------------------------- number of graphs


def test_one_graph_serves_all_lengths_when_dynamic():
    graphs = Graphs()
    compiled = torch.compile(attend, fullgraph=True, backend=graphs, dynamic=True)
    for length, length_k in ((5, 5), (7, 9), (12, 20), (33, 40), (64, 3)):
        tensors = leaves(*qkv(2, 2, length, 16, length_k=length_k))
        assert_compiled_like_eager(compiled, attend, tensors, is_causal=True)
    # Equal lengths are one graph, unequal ones another.
    assert len(graphs.forward) == len(graphs.backward) <= 2


def test_lengths_that_change_without_a_word_cost_one_more_graph():
    graphs = Graphs()
    compiled = torch.compile(attend, fullgraph=True, backend=graphs)
    for length in (5, 6, 7, 8, 9, 16, 17, 31):
        both(compiled, leaves(*qkv(1, 2, length, 16)))
    assert len(graphs.forward) == len(graphs.backward) == 2


def test_training_and_inference_are_a_graph_each():
    graphs = Graphs()
    compiled = torch.compile(attend, fullgraph=True, backend=graphs)
    tensors = leaves(*qkv(1, 2, 9, 16))
    for _ in range(3):
        both(compiled, tensors)
        with torch.no_grad():
            compiled(*tensors)
    assert len(graphs.forward) == 2 and len(graphs.backward) == 1
    assert graphs.count(FWD) == 2 and graphs.count(BWD) == 1


# ------------------------------------------------------------------ where it runs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_backward_runs_outside_of_the_simulation(backend):
    code = f"""
import torch, torch.nn.functional as F, flash_attn_rocm as fa
fa.patch()
call = torch.compile(F.scaled_dot_product_attention, fullgraph=True,
                     backend="{backend}")
q, k, v = (torch.randn(1, 2, 9, 16).half().requires_grad_() for _ in range(3))
with fa.simulate("gfx906"):
    out = call(q, k, v)
    assert fa.last_call().backend == "sim"
assert fa.status()["simulated"] is None
out.sum().backward()
assert fa.last_call().kernel.startswith("fa_bwd"), fa.last_call()
try:
    torch.ops.flash_attn_rocm.fwd(q, k, v, *[torch.empty(0)] * 9, 0.5, 0.0, 0.0, 0,
                                  -1, -1, 0, 0, 0, False)
except RuntimeError as error:
    assert "simulate(" in str(error)
else:
    raise SystemExit("an op outside of any backward was simulated")
"""
    run_python(code)


# -------------------------------------------------------------------------- export


class Flash(torch.nn.Module):
    def forward(self, q, k, v):
        return fa.flash_attn_func(q, k, v, causal=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_flash_attn_func_is_exported_as_its_op_for_all_lengths(strict, grad):
    q, k, v = (t.transpose(1, 2) for t in qkv(2, 2, 7, 16))
    example = leaves(q, k, v) if grad else (q, k, v)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        Flash(), example, strict=strict, dynamic_shapes=({1: length},) * 3
    )
    assert "flash_attn_rocm.fwd" in str(program.graph_module.print_readable(False))
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    module = torch.export.load(saved).module()
    for other in (7, 20):
        q, k, v = (t.transpose(1, 2) for t in qkv(2, 2, other, 16))
        with torch.no_grad():
            got = module(q, k, v)
            assert torch.equal(got, fa.flash_attn_func(q, k, v, causal=True))


class Shimmed(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_in_training_holds_no_foreign_op(strict):
    if strict and not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("this torch cannot tell a strict export from a compilation")
    program = torch.export.export(Shimmed(), leaves(*qkv(1, 2, 7, 16)), strict=strict)
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert "aten.scaled_dot_product_attention.default" in targets
    assert all("flash_attn_rocm" not in target for target in targets)


def test_aot_export_of_a_joint_graph_holds_both_ops():
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call(q, k, v):
        return (fa.flash_attn_func(q, k, v, causal=True).contiguous(),)

    tensors = leaves(*(t.transpose(1, 2) for t in qkv(1, 2, 7, 16)))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
    graph = aot_export_joint_simple(call, fakes, trace_joint=True)
    # Nobody compiles here: the ops are those of eager calls.
    assert FWD.replace("_served", "") in graph.code.replace("torch.ops.", "")
    assert BWD.replace("_served", "") in graph.code.replace("torch.ops.", "")


@pytest.mark.parametrize("causal", [0, TOP_LEFT, BOTTOM_RIGHT])
def test_checkpoints_inside_a_compiled_function_recompute(causal):
    from torch.utils.checkpoint import checkpoint

    def block(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal == TOP_LEFT)

    def saved(q, k, v):
        return checkpoint(block, q, k, v, use_reentrant=False)

    compiled = torch.compile(saved, fullgraph=True, backend="aot_eager")
    assert_compiled_like_eager(compiled, block, leaves(*qkv(1, 2, 9, 16)))
