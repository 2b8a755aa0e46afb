"""Everything that a replaced scaled_dot_product_attention can break, one by one.

Each case runs twice, stock and replaced inside simulate(): results must be the
same bits, or the same exception with the same text, and the reason is recorded.

SPDX-License-Identifier: BSD-3-Clause
"""

import math
import pickle
import threading
import warnings
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers import BOTTOM_RIGHT, TOP_LEFT, builtin, error_ratio, qkv, stock_sdpa
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._pytree import tree_map

import flash_attn_rocm as fa
from flash_attn_rocm import Reason, _torch

pytestmark = pytest.mark.usefixtures("patched", "simulated")


def outcome(function):
    """What a call gives: its result, or the class and text of its exception."""
    try:
        return function()
    except Exception as error:
        return type(error), str(error)


def assert_like_stock(call, reason, *, exact=True):
    """call(sdpa) gives the same stock and replaced; the reason is `reason`."""
    got = outcome(lambda: call(F.scaled_dot_product_attention))
    record = fa.last_call()
    fa.unpatch()
    want = outcome(lambda: call(F.scaled_dot_product_attention))
    fa.patch()
    if reason is not None:
        assert record.backend == "sdpa" and record.reason is reason, record
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), got
        assert type(got) is type(want) and got.dtype == want.dtype
        if exact and not want.is_nested:
            assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))
            assert got.stride() == want.stride()
    else:
        assert got == want
    return got


Q, K, V = qkv(2, 4, 6, 16, length_k=6)
MASK = torch.ones(6, 6, dtype=torch.bool).tril()
HAS_GQA = torch.__version__ >= (2, 5)
GQA = Reason.HEADS if HAS_GQA else Reason.ARGUMENT

FALLBACKS = {
    "complex": (lambda f: f(*(t.to(torch.complex64) for t in (Q, K, V))), None),
    "mask and causal": (
        lambda f: f(Q, K, V, MASK, is_causal=True),
        Reason.MASK,
    ),
    "dropout of all": (lambda f: f(Q, K, V, dropout_p=1.0), Reason.DROPOUT),
    "mixed ranks above 4": (lambda f: f(Q[None], K, V), Reason.RANK),
    "5-D that is no view": (
        lambda f: f(*(torch.stack([t, t]).transpose(0, 1) for t in (Q, K, V))),
        Reason.RANK,
    ),
    "wide heads": (
        lambda f: f(*(t.repeat(1, 1, 1, 17) for t in (Q, K, V))),
        Reason.HEAD_DIM,
    ),
    "wide values": (lambda f: f(Q, K, V.repeat(1, 1, 1, 17)), Reason.HEAD_DIM),
    "gqa where heads do not divide": (
        lambda f: f(Q[:, :3], K[:, :2], V[:, :2], enable_gqa=True),
        GQA,
    ),
    "gqa, unequal k and v heads": (
        lambda f: f(Q, K[:, :2], V, enable_gqa=True),
        GQA,
    ),
    "head dim 0": (lambda f: f(Q[..., :0], K[..., :0], V[..., :0]), Reason.HEAD_DIM),
    "no values": (lambda f: f(Q, K, V[..., :0]), Reason.HEAD_DIM),
    "infinite scale": (lambda f: f(Q, K, V, scale=float("inf")), Reason.SCALE),
    "nan scale": (lambda f: f(Q, K, V, scale=float("nan")), Reason.SCALE),
    "scale 2^127": (lambda f: f(Q, K, V, scale=2.0**127), Reason.SCALE),
    "scale -2^127": (lambda f: f(Q, K, V, scale=-(2.0**127)), Reason.SCALE),
    "scale a tensor": (
        lambda f: f(Q, K, V, scale=torch.tensor(0.5)),
        Reason.ARGUMENT,
    ),
    "meta": (lambda f: f(*(t.to("meta") for t in (Q, K, V))).shape, Reason.DEVICE),
    "mixed devices": (lambda f: f(Q, K.to("meta"), V), Reason.DEVICE),
    "sparse": (lambda f: f(Q.to_sparse(), K, V), None),
}

ERRORS = {
    "no arguments": (lambda f: f(), Reason.ARGUMENT),
    "one argument": (lambda f: f(Q), Reason.ARGUMENT),
    "unknown name": (lambda f: f(Q, K, V, mask=None), Reason.ARGUMENT),
    "scale by position": (
        lambda f: f(Q, K, V, None, 0.0, False, 0.5),
        Reason.ARGUMENT,
    ),
    "twice": (lambda f: f(Q, K, V, query=Q), Reason.ARGUMENT),
    "not a tensor": (lambda f: f(Q.tolist(), K, V), Reason.ARGUMENT),
    "None": (lambda f: f(Q, None, V), Reason.ARGUMENT),
    "causal as a number": (lambda f: f(Q, K, V, is_causal=1), Reason.ARGUMENT),
    "causal as text": (lambda f: f(Q, K, V, is_causal="yes"), Reason.ARGUMENT),
    "dropout as text": (lambda f: f(Q, K, V, dropout_p="0"), Reason.DROPOUT),
    "dropout None": (lambda f: f(Q, K, V, dropout_p=None), Reason.DROPOUT),
    "negative dropout": (lambda f: f(Q, K, V, dropout_p=-0.5), Reason.DROPOUT),
    "dropout above one": (lambda f: f(Q, K, V, dropout_p=1.5), Reason.DROPOUT),
    "scale as text": (lambda f: f(Q, K, V, scale="1"), Reason.ARGUMENT),
    "gqa as text": (lambda f: f(Q, K, V, enable_gqa="yes"), Reason.ARGUMENT),
    "mask as text": (lambda f: f(Q, K, V, "mask"), None),
    "mixed dtypes": (lambda f: f(Q, K.float(), V), Reason.DTYPE),
    "mixed dtypes of v": (lambda f: f(Q, K, V.bfloat16()), Reason.DTYPE),
    "key dim": (lambda f: f(Q, K[..., :8], V), Reason.HEAD_DIM),
    "batches": (lambda f: f(Q, K[:1].expand(3, 4, 6, 16), V), Reason.SHAPE),
    "heads": (lambda f: f(Q, K[:, :3], V[:, :3]), Reason.HEADS),
    "heads that do not divide": (
        lambda f: f(Q, K[:, :3], V[:, :3], enable_gqa=True),
        GQA,
    ),
    "1-D": (lambda f: f(Q[0, 0, 0], K[0, 0, 0], V[0, 0, 0]), Reason.RANK),
    "0-D": (lambda f: f(*[torch.tensor(1.0).half()] * 3), Reason.RANK),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_we_do_not_serve_is_answered_by_stock(name):
    call, reason = FALLBACKS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_like_stock(call, reason)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_stock(name):
    call, reason = ERRORS[name]
    got = assert_like_stock(call, reason)
    assert isinstance(got, tuple) and issubclass(got[0], Exception)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_scale_below_the_limit_is_ours(sign):
    scale = sign * math.nextafter(2.0**127, 0.0)
    out = F.scaled_dot_product_attention(torch.zeros_like(Q), K, V, scale=scale)
    assert fa.last_call().backend == "sim"
    assert error_ratio(out, torch.zeros_like(Q), K, V) <= 1


def test_other_value_lengths_are_not_ours():
    # Not run: the stock CPU kernel reads past the end of such a value tensor.
    assert fa.explain(Q, K, V[:, :, :3]).reason is Reason.SHAPE


def test_gradients_of_a_forced_backend_are_stocks():
    def call(f):
        q = Q.float().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            out = f(q, K.float(), V.float())
            (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
            return torch.autograd.grad(first.square().sum(), q)[0]

    assert_like_stock(call, Reason.FLASH_DISABLED)


# ----------------------------------------------------------- subclasses and modes


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(6, 6), (3, 6)])
def test_causal_bias_keeps_its_meaning(make, lengths):
    rows, keys = lengths
    q, k, v = Q[:, :, :rows], K[:, :, :keys], V[:, :, :keys]
    out = F.scaled_dot_product_attention(q, k, v, make(rows, keys))
    which = TOP_LEFT if make is causal_upper_left else BOTTOM_RIGHT
    assert error_ratio(out, q, k, v, causal=which) <= 1
    by_name = F.scaled_dot_product_attention(q, k, v, attn_mask=make(rows, keys))
    assert torch.equal(by_name, out)


def test_causal_bias_with_equal_lengths_runs_fused():
    F.scaled_dot_product_attention(Q, K, V, causal_lower_right(6, 6))
    assert fa.last_call().backend == "sim"


def test_causal_bias_refuses_is_causal_like_stock():
    bias = causal_upper_left(6, 6)
    assert_like_stock(lambda f: f(Q, K, V, bias, is_causal=True), Reason.CAUSAL_BIAS)


def test_causal_bias_under_a_function_mode():
    class Mode(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Mode.calls += 1
            return func(*args, **(kwargs or {}))

    with Mode():
        out = F.scaled_dot_product_attention(Q, K, V, causal_lower_right(6, 6))
    assert Mode.calls and error_ratio(out, Q, K, V, causal=BOTTOM_RIGHT) <= 1


def test_jagged_nested_tensors_reach_the_builtin():
    def call(f):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.nested_tensor(
                [torch.ones(n, 4, 16) for n in (3, 5)], layout=torch.jagged
            ).transpose(1, 2)
            return f(nested, nested, nested).shape[0]

    assert_like_stock(call, Reason.SUBCLASS)


def test_strided_nested_tensors_reach_the_builtin():
    def call(f):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.nested_tensor(
                [torch.ones(4, n, 16, dtype=torch.float16) for n in (3, 5)]
            )
        with torch.no_grad():
            out = f(nested, nested, nested)
        return torch.cat([t.flatten() for t in out.unbind()])

    assert_like_stock(call, Reason.NESTED)


class Logged(torch.Tensor):
    """A subclass that notes which function it was asked for, and how."""

    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append((func, len(args), dict(kwargs or {})))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_subclasses_see_the_builtin_and_the_call_as_it_was(place):
    tensors = [Q, K, V, MASK]
    tensors[place] = tensors[place].as_subclass(Logged)
    Logged.seen.clear()
    F.scaled_dot_product_attention(*tensors[:3], attn_mask=tensors[3], dropout_p=0.0)
    assert fa.last_call().reason is Reason.SUBCLASS
    func, count, kwargs = Logged.seen[0]
    assert func is builtin() and count == 3
    assert list(kwargs) == ["attn_mask", "dropout_p"]


def test_function_modes_see_the_builtin():
    class Mode(torch.overrides.TorchFunctionMode):
        seen: ClassVar[list] = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        F.scaled_dot_product_attention(Q, K, V)
    assert builtin() in mode.seen


class Wrapped(torch.Tensor):
    """A __torch_dispatch__ wrapper without a __torch_function__, like DTensor's."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func.namespace == "aten", f"foreign op {func}"

        def unwrap(x):
            return x.inner if isinstance(x, cls) else x

        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, out)


def test_dispatch_subclasses_meet_only_aten_ops():
    def call(f):
        with torch.no_grad():
            return f(Wrapped(Q), Wrapped(K), Wrapped(V)).inner

    assert_like_stock(call, Reason.SUBCLASS)


def test_dtensor_is_stocks():
    import torch.distributed as dist

    if not dist.is_available():
        pytest.skip("this torch has no distributed")
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import Shard, distribute_tensor
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import Shard, distribute_tensor

    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def call(f):
            parts = [distribute_tensor(t, mesh, [Shard(1)]) for t in (Q, K, V)]
            # The CPU flash kernel has no sharding rule; torch looks for one for a
            # minute.
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                return f(*parts).full_tensor()

        assert_like_stock(call, Reason.SUBCLASS)
    finally:
        dist.destroy_process_group()


def test_fake_tensors_are_stocks():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (Q, K, V)]
        assert F.scaled_dot_product_attention(*fakes).shape == Q.shape
    assert fa.last_call().reason is Reason.SUBCLASS


def test_fx_symbolic_trace_records_the_builtin():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    graph = torch.fx.symbolic_trace(Model()).graph
    assert builtin() in [node.target for node in graph.nodes]


def test_make_fx_records_aten_ops():
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))(Q, K, V)
    assert fa.last_call().backend == "sdpa"
    assert "flash_attn_rocm" not in traced.code


# ------------------------------------------------------ functorch and forward AD


def test_vmap_is_stocks():
    assert_like_stock(
        lambda f: torch.vmap(f)(Q[None], K[None], V[None]), Reason.FUNCTORCH
    )


def test_func_grad_is_stocks():
    def call(f):
        return torch.func.grad(lambda q: f(q, K, V).float().sum())(Q)

    assert_like_stock(call, Reason.FUNCTORCH)


def test_func_jvp_is_stocks():
    def call(f):
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.jvp(lambda q: f(q, K, V), (Q,), (torch.ones_like(Q),))[1]

    assert_like_stock(call, None)


def test_forward_ad_is_stocks():
    import torch.autograd.forward_ad as forward_ad

    def call(f):
        with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
            dual = forward_ad.make_dual(Q, torch.ones_like(Q))
            return forward_ad.unpack_dual(f(dual, K, V)).tangent

    assert_like_stock(call, Reason.FORWARD_AD)


# ------------------------------------------------------------ scripts and exports


def scripted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_script_holds_the_aten_op():
    script = torch.jit.script(scripted)
    assert "scaled_dot_product_attention" in str(script.graph)
    assert "aten::scaled_dot_product_attention" in str(script.inlined_graph)
    assert torch.equal(script(Q, K, V), stock_sdpa(Q, K, V, is_causal=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_script_of_multi_head_attention():
    module = torch.jit.script(torch.nn.MultiheadAttention(16, 2).eval())
    x = torch.ones(3, 1, 16)
    assert module(x, x, x)[0].shape == x.shape


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
def test_jit_trace_holds_the_aten_op():
    with torch.no_grad():
        traced = torch.jit.trace(scripted, (Q, K, V))
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert "aten::scaled_dot_product_attention" in kinds
    assert not [kind for kind in kinds if kind.startswith("flash_attn_rocm")]


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_no_foreign_op(strict):
    if strict and not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("this torch cannot tell a strict export from a compilation")
    with torch.no_grad():
        program = torch.export.export(Attention(), (Q, K, V), strict=strict)
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert targets and all("flash_attn_rocm" not in target for target in targets)
    assert torch.equal(program.module()(Q, K, V), stock_sdpa(Q, K, V, is_causal=True))


# --------------------------------------------------------------- the user's choice


def test_a_forced_backend_is_obeyed():
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend):
            assert fa.explain(Q, K, V).reason is Reason.FLASH_DISABLED
    with sdpa_kernel(SDPBackend.MATH):
        assert_like_stock(lambda f: f(Q, K, V), Reason.FLASH_DISABLED)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(Q, K, V)
        assert fa.last_call().backend == "sim"


def test_a_context_parallel_wrapper_can_stand_on_ours(monkeypatch):
    # What torch.distributed's context parallel does with the function.
    ours = F.scaled_dot_product_attention

    def wrapper(*args, **kwargs):
        return ours(*args, **kwargs)

    monkeypatch.setattr(F, ours.__name__, wrapper)
    F.scaled_dot_product_attention(Q, K, V)
    assert fa.last_call().backend == "sim"


def test_the_function_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(F.scaled_dot_product_attention)) is (
        F.scaled_dot_product_attention
    )


# ------------------------------------------------------------------ torch.compile


class Counter:
    """A backend that counts graphs and keeps their op names."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, inputs):
        self.graphs.append([str(node.target) for node in module.graph.nodes])
        return module

    @property
    def fused(self):
        return [any("flash_attn_rocm.fwd" in n for n in g) for g in self.graphs]


def attend(q, k, v, **kwargs):
    return F.scaled_dot_product_attention(q, k, v, **kwargs)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
class TestCompile:
    @pytest.mark.parametrize("dynamic", [False, True])
    @pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
    def test_fullgraph_equals_eager(self, backend, dynamic):
        q, k, v = qkv(2, 4, 9, 16, heads_k=2 if HAS_GQA else 4, length_k=13)
        compiled = torch.compile(
            attend, fullgraph=True, backend=backend, dynamic=dynamic
        )
        options = {"is_causal": True, "scale": 0.3}
        if HAS_GQA:
            options["enable_gqa"] = True
        out = compiled(q, k, v, **options)
        assert fa.last_call().backend == "sim"
        assert torch.equal(out, attend(q, k, v, **options))
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        out = compiled(q, k, v, **options)
        assert out.stride() == q.stride()
        assert torch.equal(out, attend(q, k, v, **options))

    def test_one_graph_serves_all_lengths_when_dynamic(self):
        counter = Counter()
        compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=True)
        for length, length_k in ((5, 5), (7, 9), (12, 20), (33, 40), (64, 3)):
            q, k, v = qkv(2, 2, length, 16, length_k=length_k)
            compiled(q, k, v, is_causal=True)
        assert all(counter.fused)
        # Equal lengths are one graph, unequal ones another. Torch 2.4 cannot
        # evaluate its own guard on the scale ("FloatTrueDiv is not defined").
        if torch.__version__ >= (2, 5):
            assert len(counter.graphs) <= 2

    def test_repeated_calls_do_not_recompile(self):
        counter = Counter()
        compiled = torch.compile(attend, fullgraph=True, backend=counter)
        for _ in range(5):
            compiled(Q, K, V)
            attend(Q, K, V)
            attend(Q, K, V, dropout_p=0.5)
        assert counter.fused == [True]

    def test_the_same_tensor_may_come_thrice(self):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(Q, Q, Q), attend(Q, Q, Q))
        assert fa.last_call().backend == "sim"

    def test_fallbacks_compile_in_one_graph(self):
        counter = Counter()
        compiled = torch.compile(attend, fullgraph=True, backend=counter)
        compiled(Q, K, V, attn_mask=MASK, is_causal=True)
        compiled(Q[None], K, V)
        compiled(*(t.repeat(1, 1, 1, 17) for t in (Q, K, V)))
        assert counter.fused == [False] * 3

    def test_a_forced_backend_is_obeyed(self):
        counter = Counter()
        compiled = torch.compile(attend, fullgraph=True, backend=counter)
        with sdpa_kernel(SDPBackend.MATH):
            compiled(Q, K, V)
        assert counter.fused == [False]

    def test_patch_and_simulate_are_guarded(self):
        counter = Counter()
        compiled = torch.compile(attend, fullgraph=True, backend=counter)
        compiled(Q, K, V)
        fa.unpatch()
        compiled(Q, K, V)
        fa.patch()
        compiled(Q, K, V)
        assert counter.fused == [True, False]

    def test_a_compiled_function_leaves_the_simulator_with_its_context(self):
        compiled = torch.compile(attend, fullgraph=True, backend="eager")
        seen = []

        def work():  # a thread, because the fixture simulates in this one
            for _ in range(2):
                with fa.simulate():
                    compiled(Q, K, V)
                seen.append(fa.status()["counters"]["fused"])
                out = compiled(Q, K, V)
                seen.append(fa.status()["counters"]["fused"])
                seen.append(torch.equal(out, stock_sdpa(Q, K, V)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        first, second = seen[:3], seen[3:]
        assert first[0] == first[1] != second[0] == second[1]
        assert first[2] and second[2]

    def test_autocast_compiles(self):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        with torch.autocast("cpu", torch.float16):
            out = compiled(Q.float(), K.float(), V.float())
        assert fa.last_call().backend == "sim"
        assert torch.equal(out, attend(Q, K, V))

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_trace_that_claims_to_export_runs_fused(self, backend, monkeypatch):
        # Dynamo before torch 2.12 answers is_exporting() with True in every trace.
        # This function does the same with any torch: True traced, False called.
        lying = torch.compiler.is_dynamo_compiling
        traced = torch.compile(lambda: lying(), backend="eager")
        assert traced() is True and lying() is False
        monkeypatch.setattr(_torch, "is_exporting", lying)
        compiled = torch.compile(attend, fullgraph=True, backend=backend)
        out = compiled(Q, K, V)
        assert fa.last_call().backend == "sim"
        assert torch.equal(out, attend(Q, K, V))

    def test_vmap_inside_compile_is_stocks(self):
        counter = Counter()
        compiled = torch.compile(torch.vmap(attend), fullgraph=True, backend=counter)
        out = compiled(Q[None], K[None], V[None])
        assert counter.fused == [False]
        assert torch.equal(out, torch.vmap(builtin())(Q[None], K[None], V[None]))

    def test_inference_mode_compiles(self):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        with torch.inference_mode():
            assert torch.equal(compiled(Q, K, V), attend(Q, K, V))

    def test_a_changing_scale_costs_no_more_graphs_than_stock(self):
        graphs = []
        for function in (builtin(), F.scaled_dot_product_attention):
            torch._dynamo.reset()
            graphs.append(Counter())
            compiled = torch.compile(
                lambda q, k, v, scale, f=function: f(q, k, v, scale=scale),
                fullgraph=True,
                backend=graphs[-1],
            )
            for scale in (0.1, 0.2, 0.3, 0.4, 0.5):
                compiled(Q, K, V, scale)
        stock, ours = graphs
        assert all(ours.fused)
        assert len(ours.graphs) <= len(stock.graphs)
