"""patch() and the replaced scaled_dot_product_attention: meaning, life cycle, records.

SPDX-License-Identifier: BSD-3-Clause
"""

import asyncio
import contextlib
import contextvars
import importlib
import inspect
import logging
import pickle
import sys
import threading
import types
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ARCH,
    CLONES,
    NONE,
    TOP_LEFT,
    HoldsTheFunction,
    builtin,
    error_ratio,
    fp64_attention,
    fused,
    needs_simulator,
    qkv,
    run_python,
    stock_sdpa,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import flash_attn_rocm as fa
from flash_attn_rocm import Reason, _record, _shim, _simulate

needs_gqa = pytest.mark.skipif(
    torch.__version__ < (2, 5), reason="enable_gqa came with torch 2.5"
)


def assert_fused(kernel="fa_fwd_f16"):
    call = fa.last_call()
    assert call is not None and call.backend == "sim", call
    assert call.kernel.startswith(kernel) and call.reason is Reason.FUSED
    return call


def assert_stock(reason):
    call = fa.last_call()
    assert call is not None and (call.backend, call.kernel) == ("sdpa", ""), call
    assert call.reason is reason, call


# ---------------------------------------------------------------- what it computes


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5, 1, -0.25, 0.0])
def test_causal_is_top_left_and_scale_is_free(patched, simulated, causal, scale):
    q, k, v = qkv(2, 2, 9, 32, length_k=21)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    assert_fused()
    which = TOP_LEFT if causal else NONE
    assert error_ratio(out, q, k, v, scale, which) <= 1  # observed up to 0.62


def test_more_queries_than_keys_keep_top_left_alignment(patched, simulated):
    q, k, v = qkv(1, 2, 20, 16, length_k=3)
    out = F.scaled_dot_product_attention(q, k, v, None, 0.0, True)
    assert_fused()
    assert error_ratio(out, q, k, v, causal=TOP_LEFT) <= 1
    assert torch.equal(out[:, :, 0], v[:, :, 0])


@needs_gqa
@pytest.mark.parametrize("heads, heads_k", [(4, 2), (6, 1), (3, 3)])
def test_grouped_heads_equal_repeated_heads(patched, simulated, heads, heads_k):
    q, k, v = qkv(2, heads, 7, 24, heads_k=heads_k, length_k=11)
    grouped = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_fused()
    k, v = (t.repeat_interleave(heads // heads_k, 1) for t in (k, v))
    assert torch.equal(grouped, F.scaled_dot_product_attention(q, k, v))
    assert_fused()


def test_arguments_may_come_by_name(patched, simulated):
    q, k, v = qkv(1, 1, 5, 8)
    by_name = F.scaled_dot_product_attention(
        value=v, key=k, query=q, is_causal=True, dropout_p=0.0, attn_mask=None
    )
    assert_fused()
    assert torch.equal(by_name, F.scaled_dot_product_attention(q, k, v, None, 0, True))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_output_is_dense_in_the_order_of_the_query(patched, simulated, order):
    q, k, v = qkv(2, 3, 5, 16)
    back = [order.index(d) for d in range(4)]
    q = q.permute(order).contiguous().permute(back)
    out = F.scaled_dot_product_attention(q, k, v)
    assert_fused()
    assert out.stride() == torch.empty_like(q).stride() == q.stride()
    # What models do after a transposed projection.
    if order == (0, 2, 1, 3):
        out.transpose(1, 2).view(2, 5, 48)


@pytest.mark.parametrize("which", ["q", "k", "v", "kv", "qkv"])
def test_operands_may_be_strided_in_any_way(patched, simulated, which):
    tensors = dict(zip("qkv", qkv(2, 3, 10, 16)))
    for name in which:
        wide = torch.zeros(2, 10, 3, 40, dtype=torch.float16)
        wide[..., 8:24] = tensors[name].transpose(1, 2)
        tensors[name] = wide[..., 8:24].transpose(1, 2)
    q, k, v = tensors.values()
    out = F.scaled_dot_product_attention(q, k, v)
    assert_fused()
    assert error_ratio(out, q, k, v) <= 1


def test_broadcast_strides_run_without_a_copy(patched, simulated):
    q, _, _ = qkv(2, 4, 6, 16)
    k, v = (t.expand(2, 4, 9, 16) for t in qkv(1, 1, 9, 16, seed=1)[:2])
    out = F.scaled_dot_product_attention(q, k, v)
    assert_fused()
    assert error_ratio(out, q, k, v) <= 1


def test_head_dim_of_one_needs_no_unit_stride(patched, simulated):
    q, k, v = (t[..., ::2] for t in qkv(1, 2, 6, 2))
    assert q.shape[3] == 1 and q.stride(3) == 2
    out = F.scaled_dot_product_attention(q, k, v)
    assert_fused("fa_fwd_exact16")
    assert error_ratio(out, q, k, v) <= 1


@pytest.mark.parametrize("negative", ["q", "k", "v"])
def test_lazy_negation_is_resolved(patched, simulated, negative):
    tensors = dict(zip("qkv", qkv(1, 2, 6, 16)))
    plain = F.scaled_dot_product_attention(*tensors.values())
    tensors[negative] = torch._neg_view(-tensors[negative])
    assert tensors[negative].is_neg()
    assert torch.equal(F.scaled_dot_product_attention(*tensors.values()), plain)
    assert_fused()


def test_inference_mode(patched, simulated):
    with torch.inference_mode():
        q, k, v = qkv(1, 2, 6, 16)
        out = F.scaled_dot_product_attention(q, k, v)
        assert_fused()
        assert out.is_inference()
    assert error_ratio(out.clone(), q, k, v) <= 1


def test_no_grad_runs_parameters(patched, simulated):
    q, k, v = (torch.nn.Parameter(t) for t in qkv(1, 2, 6, 16))
    with torch.no_grad():
        out = F.scaled_dot_product_attention(q, k, v)
    assert_fused()
    assert not out.requires_grad


def test_autocast_casts_like_the_stock_function(patched, simulated):
    q, k, v = qkv(1, 2, 6, 16, dtype=torch.float32)
    with torch.autocast("cpu", torch.float16):
        out = F.scaled_dot_product_attention(q, k.half(), v.bfloat16())
        assert_fused()
        stock = stock_sdpa(q, k.half(), v.bfloat16())
        halves = [t.half() for t in (q, k, v.bfloat16())]
        assert out.dtype == stock.dtype == torch.float16
        assert error_ratio(out, *halves) <= 1
        assert fa.explain(q.double(), k, v.double()).reason is Reason.DTYPE
    with torch.autocast("cpu", torch.bfloat16):
        out = F.scaled_dot_product_attention(*halves)
        assert_fused("fa_fwd")
        assert out.dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            F.scaled_dot_product_attention(*halves)
            assert_fused()


def test_kernels_on_many_threads_agree(patched, simulated):
    q, k, v = qkv(1, 2, 33, 16)
    want = F.scaled_dot_product_attention(q, k, v)
    results = []

    def work():
        with fa.simulate():
            for _ in range(3):
                out = F.scaled_dot_product_attention(q, k, v)
                results.append((out, fa.last_call().backend))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 12
    assert all(torch.equal(out, want) and b == "sim" for out, b in results)


def test_multi_head_attention_module_runs_fused(patched, simulated):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 2, batch_first=True).half()
    x = torch.randn(2, 7, 32).half()
    fa.unpatch()
    with torch.no_grad():
        want = module.train()(x, x, x, need_weights=False)[0]
        fa.patch()
        got = module(x, x, x, need_weights=False)[0]
    assert_fused()
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-2)


# ------------------------------------------------------------------- life cycle


def test_name_signature_and_documentation_are_the_stock_ones():
    with fa.patched():
        function = F.scaled_dot_product_attention
    assert function is not builtin()
    assert function.__name__ == builtin().__name__ == "scaled_dot_product_attention"
    assert function.__doc__ == builtin().__doc__
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
        *("scale", "enable_gqa"),
    ]
    assert parameters["scale"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["dropout_p"].default == 0.0


def test_many_patches_one_unpatch():
    for _ in range(2000):
        fa.patch()
    assert F.scaled_dot_product_attention is _shim.scaled_dot_product_attention
    fa.unpatch()
    assert F.scaled_dot_product_attention is builtin()
    fa.unpatch()
    assert F.scaled_dot_product_attention is builtin()


def test_the_builtin_stays_where_nested_tensors_look_for_it(patched):
    assert torch._C._nn.scaled_dot_product_attention is builtin()


def test_patched_restores_the_state_at_entry():
    with fa.patched():
        assert F.scaled_dot_product_attention is not builtin()
        with fa.patched():
            fa.unpatch()
        assert F.scaled_dot_product_attention is not builtin()
    assert F.scaled_dot_product_attention is builtin()
    with pytest.raises(KeyError), fa.patched():
        raise KeyError
    assert F.scaled_dot_product_attention is builtin()


def test_modules_that_imported_the_function_are_served_and_copies_stay(monkeypatch):
    early = types.ModuleType("imported_early")
    exec("from torch.nn.functional import scaled_dot_product_attention", vars(early))
    early.sdpa = builtin()
    early.compared_with = builtin()
    early.table = {"sdpa": builtin()}
    monkeypatch.setitem(sys.modules, "imported_early", early)
    late = types.ModuleType("imported_late")
    monkeypatch.setitem(sys.modules, "imported_late", late)
    with fa.patched():
        ours = F.scaled_dot_product_attention
        assert early.scaled_dot_product_attention is early.sdpa is ours
        assert early.compared_with is early.table["sdpa"] is builtin()
        late.sdpa = ours
    assert early.scaled_dot_product_attention is early.sdpa is late.sdpa is builtin()


def test_a_module_proxy_that_raises_does_not_stop_patch(monkeypatch):
    class Proxy:
        @property
        def __class__(self):
            raise RuntimeError("not loaded")

    monkeypatch.setitem(sys.modules, "proxy_module", Proxy())
    fa.patch()
    assert fa.status()["patched"]
    fa.unpatch()
    assert F.scaled_dot_product_attention is builtin()


def test_unpatch_removes_ours_when_another_library_puts_it_back(monkeypatch):
    fa.patch()
    ours = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: ours(*a, **k)
    )
    fa.unpatch()
    monkeypatch.undo()  # the other library restores what it found: ours
    assert F.scaled_dot_product_attention is ours
    fa.unpatch()
    assert F.scaled_dot_product_attention is builtin()


def test_patch_serves_again_when_ours_was_put_back_after_unpatch(monkeypatch):
    early = types.ModuleType("imported_early")
    early.sdpa = builtin()
    monkeypatch.setitem(sys.modules, "imported_early", early)
    fa.patch()
    ours = F.scaled_dot_product_attention
    fa.unpatch()
    F.scaled_dot_product_attention = ours
    fa.patch()
    assert early.sdpa is ours and ours.__module__ == "torch.nn.functional"


def test_patched_blocks_of_two_threads_may_overlap():
    first_left, second_inside = threading.Event(), threading.Event()
    seen = []

    def second():
        with fa.patched():
            second_inside.set()
            assert first_left.wait(30)
            seen.append(F.scaled_dot_product_attention is builtin())

    thread = threading.Thread(target=second)
    with fa.patched():
        thread.start()
        assert second_inside.wait(30)
    first_left.set()
    thread.join()
    assert seen == [False]
    assert F.scaled_dot_product_attention is builtin()


def test_patched_restores_the_state_at_entry_inside_another_block():
    with fa.patched():
        fa.unpatch()
        with fa.patched():
            assert F.scaled_dot_product_attention is not builtin()
        assert F.scaled_dot_product_attention is builtin()


@needs_simulator
def test_interleaved_tasks_do_not_leave_a_thread_simulating():
    async def both():
        a, b, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def first():
            with fa.simulate(ARCH):
                a.set()
                await b.wait()
            done.set()

        async def second():
            await a.wait()
            with fa.simulate(ARCH):
                b.set()
                await done.wait()

        await asyncio.gather(first(), second())

    asyncio.run(both())
    assert _simulate.current_arch() is None and _simulate.traced_arch() is None


@needs_simulator
def test_a_generator_that_simulates_may_be_closed_in_another_context():
    def held():
        with fa.simulate(ARCH):
            yield

    generator = held()
    contextvars.copy_context().run(next, generator)
    generator.close()
    assert _simulate.current_arch() is None and _simulate.traced_arch() is None


@needs_simulator
def test_flop_counter_counts_a_fused_call_like_the_math_path():
    q, k, v = qkv(1, 4, 30, 64, heads_k=2, length_k=20)
    with FlopCounterMode(display=False) as ours, fa.patched():
        fused(F.scaled_dot_product_attention, q, k, v, enable_gqa=True)
    with FlopCounterMode(display=False) as stock, sdpa_kernel(SDPBackend.MATH):
        stock_sdpa(q, k, v, enable_gqa=True)
    assert ours.get_total_flops() == stock.get_total_flops() > 0


@pytest.mark.parametrize(
    "nothing", [0j, Fraction(0), Decimal(0), torch.tensor([0.0])], ids=repr
)
def test_a_dropout_of_zero_that_stock_refuses_is_refused(simulated, patched, nothing):
    q, k, v = qkv(1, 1, 4, 8)
    with pytest.raises(TypeError):
        F.scaled_dot_product_attention(q, k, v, dropout_p=nothing)
    assert fa.last_call().reason is not fa.Reason.FUSED


def test_lazy_modules_are_not_loaded_by_patch(monkeypatch):
    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"loaded by reading {name}")

    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    with fa.patched():
        pass


def test_a_held_function_is_the_stock_one_after_unpatch(simulated):
    with fa.patched():
        held = F.scaled_dot_product_attention
    q, k, v = qkv(1, 1, 4, 8)
    before = fa.status()["counters"]
    assert torch.equal(held(q, k, v), stock_sdpa(q, k, v))
    assert fa.status()["counters"] == before


def test_a_later_replacement_survives_unpatch(monkeypatch, caplog):
    fa.patch()
    ours = F.scaled_dot_product_attention

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with caplog.at_level(logging.WARNING, "flash_attn_rocm"):
        fa.unpatch()
    assert F.scaled_dot_product_attention is theirs
    assert "theirs" in caplog.text
    q, k, v = qkv(1, 1, 4, 8)
    assert torch.equal(theirs(q, k, v), stock_sdpa(q, k, v))
    monkeypatch.undo()
    F.scaled_dot_product_attention = builtin()


def test_an_earlier_replacement_is_left_in_place(monkeypatch, caplog):
    def theirs(*args, **kwargs):
        return stock_sdpa(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with caplog.at_level(logging.WARNING, "flash_attn_rocm"):
        fa.patch()
    assert F.scaled_dot_product_attention is theirs
    assert "theirs" in caplog.text
    monkeypatch.undo()
    fa.patch()  # now there is something to replace
    assert F.scaled_dot_product_attention is _shim.scaled_dot_product_attention
    fa.unpatch()
    assert F.scaled_dot_product_attention is builtin()


def test_patch_from_many_threads_ends_in_one_state():
    def work():
        for _ in range(5):
            fa.patch()
            fa.unpatch()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert F.scaled_dot_product_attention is builtin()
    assert not fa.status()["patched"]


def test_autopatch_patches():
    importlib.import_module("flash_attn_rocm.autopatch")
    importlib.reload(sys.modules["flash_attn_rocm.autopatch"])
    assert fa.status()["patched"]


@pytest.mark.parametrize("clone", CLONES)
def test_models_that_hold_the_function_can_be_copied(clone):
    x = torch.randn(1, 2, 5, 8)
    with fa.patched():
        model = HoldsTheFunction()
        assert torch.equal(clone(model)(x), model(x))
    assert torch.equal(clone(model)(x), model(x))  # also while unpatched


def test_a_model_pickled_while_patched_loads_without_the_package(tmp_path):
    with fa.patched():
        (tmp_path / "f.pickle").write_bytes(
            pickle.dumps(F.scaled_dot_product_attention)
        )
    code = """
import pickle, sys, torch
f = pickle.load(open(sys.argv[1], "rb"))
assert f is torch.nn.functional.scaled_dot_product_attention
assert "flash_attn_rocm" not in sys.modules
"""
    run_python(code, str(tmp_path / "f.pickle"))


def test_import_and_patch_initialise_no_device():
    code = """
import torch, flash_attn_rocm
stock, F = torch._C._nn, torch.nn.functional
same = F.scaled_dot_product_attention is stock.scaled_dot_product_attention
assert same, "the import replaces the function"
flash_attn_rocm.patch()
same = F.scaled_dot_product_attention is stock.scaled_dot_product_attention
assert not same, "patch() does not"
assert not torch.cuda.is_initialized()
import sys
assert "torch._dynamo" not in sys.modules, "the import became slow"
"""
    run_python(code)


# ------------------------------------------------------------- records and words


def test_last_call_is_kept_by_thread(patched, simulated):
    q, k, v = qkv(1, 2, 4, 8)
    F.scaled_dot_product_attention(q, k, v)
    call = assert_fused()
    assert call.counters["wave_instructions"] > 0 and call.counters["workgroups"] == 2
    with pytest.raises(AttributeError):
        call.kernel = "other"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(fa.last_call()))
    thread.start()
    thread.join()
    assert seen == [None]


def test_counters_add_up(patched, simulated):
    before = fa.status()["counters"]
    q, k, v = qkv(1, 1, 4, 8)
    for _ in range(3):
        F.scaled_dot_product_attention(q, k, v)
    kernel = fa.last_call().kernel
    for _ in range(2):
        F.scaled_dot_product_attention(q, k, v, dropout_p=1.0)
    after = fa.status()["counters"]
    assert after["fused"][kernel] - before["fused"].get(kernel, 0) == 3
    assert after["fallback"]["dropout"] - before["fallback"].get("dropout", 0) == 2
    assert after["wave_instructions"] > before["wave_instructions"]


def test_each_reason_is_logged_once(patched, simulated, caplog, monkeypatch):
    monkeypatch.setattr(_record, "_noted", set())
    q, k, v = qkv(1, 1, 4, 8)
    with caplog.at_level(logging.INFO, "flash_attn_rocm"):
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v, dropout_p=1.0)
            F.scaled_dot_product_attention(q[None], k, v)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "dropout" in lines[0] and "rank" in lines[1]


def test_a_failing_launch_is_answered_by_stock(patched, simulated, caplog, monkeypatch):
    def broken(*args):
        raise RuntimeError("launch failed: no such luck")

    monkeypatch.setattr(_record, "_noted", set())
    monkeypatch.setattr(_shim, "_op", broken)
    q, k, v = qkv(1, 1, 4, 8)
    with caplog.at_level(logging.INFO, "flash_attn_rocm"):
        for _ in range(2):
            out = F.scaled_dot_product_attention(q, k, v)
    assert_stock(Reason.FAILED)
    assert torch.equal(out, stock_sdpa(q, k, v))
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "no such luck" in caplog.text


def test_explain_names_kernel_and_grid_and_runs_nothing(simulated):
    q, k, v = qkv(2, 3, 130, 40)
    before = fa.last_call()
    told = fa.explain(q, k, v, is_causal=True)
    assert fa.last_call() == before
    assert told.fused and told.backend == "sim" and told.reason is Reason.FUSED
    assert sorted(told.grid) == [2, 2, 3]  # tiles of 128 rows, batches, heads
    with fa.patched():
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    last = fa.last_call()
    assert (last.kernel, last.why) == (told.kernel, told.why)
    assert str(told) == f"fused by {told.kernel}: {told.why}"


def test_explain_gives_the_reason_that_a_call_would_record(patched, simulated):
    q, k, v = qkv(1, 2, 4, 8)
    calls = [
        ((q.float(), k, v), {}, Reason.DTYPE),
        ((q, k, v.float()), {}, Reason.DTYPE),
        ((q, k, v, torch.ones(4, 4).double()), {}, Reason.MASK),
        ((q, k, v), {"dropout_p": 1.0}, Reason.DROPOUT),
        ((q[None], k, v), {}, Reason.RANK),
        ((q[..., :0], k[..., :0], v), {}, Reason.HEAD_DIM),
        ((None, k, v), {}, Reason.ARGUMENT),
    ]
    for args, kwargs, reason in calls:
        told = fa.explain(*args, **kwargs)
        assert not told.fused and told.backend == "sdpa" and told.reason is reason
        assert told.why
        with contextlib.suppress(Exception):
            F.scaled_dot_product_attention(*args, **kwargs)
        last = fa.last_call()
        assert (last.reason, last.why) == (reason, told.why)


def test_status_and_build_info_are_plain_data():
    status = fa.status()
    assert status["version"] == fa.__version__ == fa.build_info()["version"]
    assert status["torch"] == torch.__version__
    assert status["ops"] in ("c", "python")
    assert set(status["counters"]) == {"fused", "fallback", "wave_instructions"}
    assert status["bf16"] == "auto" and status["check_grads"] == "off"
    assert set(status["nonfinite_gradients"]) == {"q", "k", "v", "bias"}
    variants = fa.build_info()["extension"]["variants"]
    assert "fa_fwd_f16_d64_plain" in variants


def test_every_reason_has_a_sentence():
    from flash_attn_rocm._status import _why

    for reason in Reason:
        if reason not in (Reason.FUSED, Reason.UNAVAILABLE):
            assert _why(reason)
        assert str(reason) == reason.value


def test_simulate_is_for_this_context_only(simulated):
    q, k, v = qkv(1, 1, 4, 8)
    assert fa.explain(q, k, v).fused
    seen = []
    thread = threading.Thread(target=lambda: seen.append(fa.explain(q, k, v).reason))
    thread.start()
    thread.join()
    assert seen == [Reason.DEVICE]


def test_simulate_nests_and_restores():
    from helpers import needs_simulator

    if needs_simulator.args[0]:
        pytest.skip(needs_simulator.kwargs["reason"])
    assert fa.status()["simulated"] is None
    with fa.simulate("gfx906"):
        with fa.simulate("gfx906"):
            assert fa.status()["simulated"] == "gfx906"
        assert fa.status()["simulated"] == "gfx906"
    assert fa.status()["simulated"] is None


def test_equal_scores_give_the_mean_of_the_values(patched, simulated):
    q = torch.zeros(1, 1, 3, 16, dtype=torch.float16)
    _, k, v = qkv(1, 1, 70, 16)
    out = F.scaled_dot_product_attention(q, k, v)
    assert_fused()
    want, _ = fp64_attention(q, k, v)
    assert (out.double() - want).abs().max() < 2e-4  # observed 6e-5
