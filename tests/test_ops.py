"""The op flash_attn_rocm::fwd, registered from C and (in a second process) from Python.

SPDX-License-Identifier: BSD-3-Clause
"""

import contextvars
import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import (
    BOTTOM_RIGHT,
    NONE,
    ROOT,
    TOP_LEFT,
    error_ratio,
    lse_low,
    lse_ratio,
    needs_extension,
    out_low,
    qkv,
    run_forked,
)
from helpers.gradients import gradient_ratios
from torch._dynamo.testing import CompileCounter

import flash_attn_rocm as fa
from flash_attn_rocm import _ops

pytestmark = [needs_extension, pytest.mark.usefixtures("simulated")]

FULL = os.environ.get("FA_TEST") == "full"
FROM_PYTHON = os.environ.get("FLASH_ATTN_ROCM_PYTHON_OPS") == "1"
NAMES = _ops.FEATURE_TENSORS


def arguments(q, k, v, *, scale=None, causal=NONE, **changes):
    """The op's positional arguments; `changes` by the names of the schema."""
    values = {name: torch.empty(0) for name in NAMES}
    values.update(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=0.0,
        dropout_p=0.0,
        causal=causal,
        window_left=-1,
        window_right=-1,
        sink_keys=0,
        block_q=0,
        block_k=0,
        needs_grad=False,
    )
    assert not set(changes) - set(values)
    values.update(changes)
    return (q, k, v, *values.values())


def fwd(*args, **kwargs):
    return _ops.op(*arguments(*args, **kwargs))


def test_the_registration_is_the_one_asked_for():
    has_abi = fa.build_info()["extension"]["torch_abi"]
    assert fa.status()["ops"] == ("python" if FROM_PYTHON or not has_abi else "c")
    assert str(_ops.op._schema) == "flash_attn_rocm::" + _ops.SCHEMA
    schema = "flash_attn_rocm::" + _ops.BACKWARD_SCHEMA
    assert str(_ops.backward_op._schema) == schema


@pytest.mark.parametrize("causal", [NONE, TOP_LEFT, BOTTOM_RIGHT])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 9), (9, 3)])
def test_output_and_lse_against_float64(causal, lengths):
    q, k, v = qkv(2, 4, lengths[0], 24, heads_k=2, length_k=lengths[1])
    out, lse, out_lo = fwd(q, k, v, causal=causal)
    assert fa.last_call().backend == "sim"
    assert error_ratio(out, q, k, v, causal=causal) <= 1  # observed up to 0.61
    assert lse_ratio(lse, q, k, v, causal=causal) <= 1
    assert not out[lse == -math.inf].any()  # rows that see no key
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    assert out_lo.shape == (0,)


@pytest.mark.parametrize("lengths", [(4, 0), (0, 4), (0, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_inputs_launch_nothing(batch, lengths):
    q, k, v = (
        torch.ones(batch, 2, length, 16, dtype=torch.float16)
        for length in (lengths[0], lengths[1], lengths[1])
    )
    before = fa.status()["counters"]["wave_instructions"]
    out, lse, _ = fwd(q, k, v)
    assert fa.status()["counters"]["wave_instructions"] == before
    assert out.shape == q.shape and not out.any()
    assert lse.shape == q.shape[:3] and (lse == -math.inf).all()


ORDERS = {
    "dense": lambda t: t,
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "batch inside": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "sliced": lambda t: t.repeat(1, 1, 2, 2)[:, :, ::2, : t.shape[3]],
    "expanded": lambda t: t[:1, :1].expand(t.shape),
    "last dim outside": lambda t: t.permute(3, 0, 1, 2)
    .contiguous()
    .permute(1, 2, 3, 0),
}


@pytest.mark.parametrize("name", ORDERS)
def test_fake_and_real_outputs_have_the_same_form(name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = qkv(2, 3, 6, 16)
    q = ORDERS[name](q)
    for needs_grad in (False, True):
        reals = fwd(q, k, v, needs_grad=needs_grad)
        with FakeTensorMode() as mode:
            fakes = fwd(*map(mode.from_tensor, (q, k, v)), needs_grad=needs_grad)
        metas = fwd(*(t.to("meta") for t in (q, k, v)), needs_grad=needs_grad)
        for fake, meta, real in zip(fakes, metas, reals):
            assert fake.shape == meta.shape == real.shape
            assert fake.dtype == meta.dtype == real.dtype
            assert fake.stride() == real.stride()


@pytest.mark.parametrize("dtype", _ops.DTYPES)
def test_what_rounding_took_is_one_flat_tensor(dtype):
    q, k, v = qkv(1, 3, 5, 8, dtype=dtype)
    v = v[..., :7]
    out, lse, out_lo = fwd(q, k, v, needs_grad=True)
    # 15 rows, for halves filled up to 16 and with 105 numbers, two to a float.
    size = {torch.float32: 15, torch.float64: 0}.get(dtype, 16 + 53)
    assert out_lo.shape == (size,) and out_lo.is_contiguous()
    assert out_lo.dtype is lse.dtype and out_lo.data_ptr() % 16 == 0
    absent = fwd(q, k, v)[2]
    assert absent.shape == (0,) and absent.dtype is lse.dtype
    if dtype is not torch.float64:
        assert lse_low((out, lse, out_lo)).any()
    if dtype in _ops.HALVES:
        assert out_low((out, lse, out_lo)).any()
        assert out_lo[15] == 0 and out_lo.view(dtype)[-1] == 0  # nobody's


@pytest.mark.parametrize("dtype", _ops.DTYPES)
def test_without_keys_rounding_took_nothing(dtype):
    q, k, v = qkv(1, 3, 5, 8, dtype=dtype)
    out, lse, out_lo = fwd(q, k[:, :, :0], v[:, :, :0], needs_grad=True)
    assert not out.any() and (lse == -math.inf).all() and not out_lo.any()


def test_float64_keeps_nothing_that_rounding_took():
    q, k, v = qkv(1, 2, 5, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"^out_lo: .*without elements for float64"):
        bwd(q, k, v, out_lo=torch.zeros(10))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sizes_that_are_symbols_compile_once(dtype):
    graphs = CompileCounter()
    torch._dynamo.reset()
    rest = arguments(*qkv(1, 2, 5, 16, dtype=dtype), needs_grad=True)[3:]

    def saved(q, k, v):
        return _ops.op(q, k, v, *rest)

    compiled = torch.compile(saved, backend=graphs, dynamic=True, fullgraph=True)
    # Numbers of rows with each remainder by 4, and odd and even numbers of elements.
    for batch, heads, length, dim in (
        (2, 3, 5, 16),
        (3, 3, 5, 9),
        (4, 3, 9, 7),
        (3, 5, 13, 11),
    ):
        q, k, v = qkv(batch, heads, length, dim, dtype=dtype)
        got, want = compiled(q, k, v), saved(q, k, v)
        assert all(map(torch.equal, got, want))
    assert graphs.frame_count == 1


@pytest.mark.parametrize("causal", [NONE, TOP_LEFT, BOTTOM_RIGHT])
def test_the_op_keeps_torchs_rules_for_custom_ops(causal):
    q, k, v = qkv(1, 2, 5, 8, length_k=7)
    torch.library.opcheck(_ops.op, arguments(q, k, v, causal=causal))


def test_the_op_keeps_torchs_rules_for_grouped_heads_and_strides():
    q, k, v = qkv(2, 4, 6, 16, heads_k=2)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(_ops.op, arguments(q, k, v))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_op_compiles_without_a_break(backend, dynamic):
    torch._dynamo.reset()

    rest = arguments(*qkv(1, 2, 5, 16), causal=BOTTOM_RIGHT)[3:]

    def twice(q, k, v):
        out, lse, _ = _ops.op(q * 2, k, v, *rest)
        return out + 1, lse

    compiled = torch.compile(twice, backend=backend, dynamic=dynamic, fullgraph=True)
    for length in (5, 9):
        q, k, v = qkv(1, 2, length, 16)
        for got, want in zip(compiled(q, k, v), twice(q, k, v)):
            assert torch.equal(got, want)


def test_results_repeat_bit_by_bit():
    q, k, v = qkv(2, 2, 40, 64, length_k=150)
    first = fwd(q, k, v)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, fwd(q, k, v)))


def test_a_negative_scale_flips_the_scores():
    q, k, v = qkv(1, 2, 6, 16)
    out, lse, _ = fwd(q, k, v, scale=-0.25)
    again, lse_again, _ = fwd(-q, k, v, scale=0.25)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


def test_values_of_one_give_one():
    q, k, _ = qkv(1, 2, 70, 40)
    out, _, _ = fwd(q, k, torch.ones_like(k))
    assert (out == 1).all()


def test_the_same_tensor_may_come_thrice():
    q, _, _ = qkv(1, 2, 9, 16)
    out, _, _ = fwd(q, q, q)
    assert torch.equal(out, fwd(q, q.clone(), q.clone())[0])


REFUSED = {
    "bias": torch.ones(1),
    "mask": torch.ones(1, 1, 5, 5),
    "alibi": torch.ones(3),
    "sink": torch.ones(3),
    "seed": torch.ones(1, dtype=torch.int64),
    "span_q": torch.ones(5, 3, dtype=torch.int32),
    "span_k": torch.ones(5, 2),
    "blocks": torch.ones(1, dtype=torch.int32),
    "blocks_t": torch.ones(1, 1, 1, 2),
    "softcap": -1.0,
    "dropout_p": 1.0,
    "window_left": -2,
    "window_right": -3,
    "sink_keys": -1,
    "causal": 4,
    "scale": float("nan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_serves_is_refused_by_name(name):
    q, k, v = qkv(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match=rf"^{name}: .*expected"):
        fwd(q, k, v, **{name: REFUSED[name]})


BAD = {
    "k: .*dtype": lambda q, k, v: (q, k.float(), v),
    "v: .*dtype": lambda q, k, v: (q, k, v.bfloat16()),
    "q: .*float64": lambda q, k, v: (q.int(), k.int(), v.int()),
    "k: .*device": lambda q, k, v: (q, k.to("meta"), v),
    "q: .*4": lambda q, k, v: (q[0], k, v),
    "v: .*4": lambda q, k, v: (q, k, v[None]),
    "k: .*batch": lambda q, k, v: (q, k[:1], v),
    "k: .*head dim": lambda q, k, v: (q, k[..., :4], v),
    "v: .*head dim": lambda q, k, v: (q, k, v[..., :0]),
    "v: .*row": lambda q, k, v: (q, k, v[:, :, :2]),
    "k: .*heads": lambda q, k, v: (q, k[:, :3], v[:, :3]),
    "v: .*dimension 1 .head": lambda q, k, v: (q, k, v[:, :2]),
    "q: .*head dim": lambda q, k, v: tuple(t.repeat(1, 1, 1, 33) for t in (q, k, v)),
}


@pytest.mark.parametrize("message", BAD)
def test_input_that_does_not_fit_is_refused_by_name(message):
    q, k, v = BAD[message](*qkv(2, 4, 5, 8))
    before = fa.status()["counters"]
    with pytest.raises(RuntimeError, match="^" + message):
        _ops.op(*arguments(q, k, v, scale=0.3))
    assert fa.status()["counters"]["fused"] == before["fused"]


# ------------------------------------------------------------------------- bwd


def backward_arguments(q, k, v, *, wanted=7, grads_fp32=False, **changes):
    """The positional arguments of bwd; `changes` by the names of the schema."""
    names = ("dout", "dlse", "out", "lse", "out_lo")
    given = {name: changes.pop(name) for name in names if name in changes}
    *call, _ = arguments(q, k, v, **changes)
    out, lse, out_lo = _ops.op(*call, True)
    made = (torch.ones_like(out), torch.empty(0), out, lse, out_lo)
    dout, dlse, *results = {**dict(zip(names, made)), **given}.values()
    return (dout, dlse, q, k, v, *results, *call[3:], wanted, grads_fp32)


def bwd(*args, **kwargs):
    return _ops.backward_op(*backward_arguments(*args, **kwargs))


@pytest.mark.parametrize("dtype", _ops.DTYPES)
@pytest.mark.parametrize("causal", [NONE, BOTTOM_RIGHT])
def test_gradients_against_float64(causal, dtype):
    q, k, v = qkv(1, 4, 9, 24, heads_k=2, length_k=13, dtype=dtype)
    dout = qkv(1, 4, 9, 24, dtype=dtype, seed=1)[0]
    grads = bwd(q, k, v, dout=dout, causal=causal)[:3]
    assert fa.last_call().kernel.startswith("fa_bwd")
    assert max(gradient_ratios(grads, q, k, v, dout, causal=causal)) <= 1


@pytest.mark.parametrize("wanted", range(8))
@pytest.mark.parametrize("grads_fp32", [False, True])
@pytest.mark.parametrize("dtype", _ops.DTYPES)
def test_a_gradient_that_is_not_wanted_has_no_elements(wanted, grads_fp32, dtype):
    q, k, v = qkv(1, 2, 5, 8, dtype=dtype)
    wide = grads_fp32 and dtype in _ops.HALVES
    *grads, dbias, dsink = bwd(q, k, v, wanted=wanted, grads_fp32=grads_fp32)
    for bit, (leaf, grad) in enumerate(zip((q, k, v), grads)):
        assert grad.dtype == (torch.float32 if wide else dtype)
        assert grad.shape == (leaf.shape if wanted >> bit & 1 else (0,))
    assert dbias.shape == dsink.shape == (0,)
    assert dbias.dtype == dsink.dtype == _ops.lse_dtype(dtype)


def test_a_rounded_output_makes_delta_where_out_lo_is_absent():
    q, k, v = qkv(1, 2, 40, 32)
    dout = qkv(1, 2, 40, 32, seed=1)[0]
    exact = bwd(q * 16, k, v, dout=dout)
    rounded = bwd(q * 16, k, v, dout=dout, out_lo=torch.empty(0))
    # A peaked softmax: the rounding of out is most of the error of dq and dk.
    ratios = [
        gradient_ratios(grads[:3], q * 16, k, v, dout)[:2] for grads in (exact, rounded)
    ]
    assert max(ratios[0]) <= 1 < max(ratios[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ORDERS)
def test_fake_and_real_gradients_have_the_same_form(name, dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = qkv(2, 3, 6, 16, dtype=dtype)
    v = ORDERS[name](v[..., :8])
    for wanted, grads_fp32 in ((7, False), (5, True), (2, False)):
        call = backward_arguments(q, k, v, wanted=wanted, grads_fp32=grads_fp32)
        reals = _ops.backward_op(*call)
        with FakeTensorMode() as mode:
            fakes = _ops.backward_op(
                *(mode.from_tensor(x) if torch.is_tensor(x) else x for x in call)
            )
        for fake, real in zip(fakes, reals):
            assert fake.shape == real.shape and fake.dtype == real.dtype
            assert fake.stride() == real.stride()


MASKS = (NONE, TOP_LEFT, BOTTOM_RIGHT)
MASKS_OF_DTYPES = [
    (causal, dtype)
    for turn, dtype in enumerate(_ops.DTYPES)
    for causal in (MASKS if FULL else MASKS[turn % 3 : turn % 3 + 1])
]


@pytest.mark.parametrize(("causal", "dtype"), MASKS_OF_DTYPES)
def test_bwd_keeps_torchs_rules_for_custom_ops(causal, dtype):
    """Each type with one mask: a mask is a number to the op, which its form does not
    depend on. FA_TEST=full: with each."""
    q, k, v = qkv(1, 4, 5, 8, heads_k=2, length_k=7, dtype=dtype)
    v = v[..., :6].transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(_ops.op, arguments(q, k, v, causal=causal, needs_grad=True))
    for wanted, grads_fp32 in ((7, False), (7, True), (4, False)):
        call = backward_arguments(
            q, k, v, causal=causal, wanted=wanted, grads_fp32=grads_fp32
        )
        torch.library.opcheck(_ops.backward_op, call)


BAD_RESULTS = {
    **{
        f"{name}: .*device cpu .as q.*meta": lambda a, n=name: {n: a[n].to("meta")}
        for name in ("dout", "dlse", "out", "lse", "out_lo")
    },
    "dout: .*dtype float16 .as q": lambda a: dict(dout=a["dout"].float()),
    "dout: .*dimension 2 .row": lambda a: dict(dout=a["dout"][:, :, :3]),
    "dout: .*head dim, as in v": lambda a: dict(dout=a["dout"][..., :4]),
    "dout: .*4 dimensions": lambda a: dict(dout=a["dout"][0]),
    "dlse: .*float32": lambda a: dict(dlse=a["lse"].half()),
    "dlse: .*dimension 2 .row": lambda a: dict(dlse=a["lse"][..., :3]),
    "lse: .*float32": lambda a: dict(lse=a["lse"].half()),
    "lse: .*3 dimensions": lambda a: dict(lse=a["lse"][..., None]),
    "lse: .*contiguous": lambda a: dict(
        lse=a["lse"][..., None].repeat(1, 1, 1, 2)[..., 0]
    ),
    "out_lo: .*1 dimension .elements., got 2": lambda a: dict(out_lo=a["out_lo"][None]),
    "out_lo: expected 200 elements, got 199": lambda a: dict(out_lo=a["out_lo"][1:]),
    "out_lo: .*dtype float32, got float16": lambda a: dict(out_lo=a["out_lo"].half()),
    "out_lo: .*contiguous tensor, got stride 2": lambda a: dict(
        out_lo=a["out_lo"].repeat(2)[::2]
    ),
    "out_lo: .*aligned to 16 bytes": lambda a: dict(
        out_lo=torch.cat([a["out_lo"][:1], a["out_lo"]])[1:]
    ),
    "wanted: .*got 32": lambda a: dict(wanted=32),
    "wanted: expected no 8 .dbias. without bias, got 9": lambda a: dict(wanted=9),
    "wanted: expected no 16 .dsink. without sink, got 16": lambda a: dict(wanted=16),
    "softcap: ": lambda a: dict(softcap=-1.0),
    "bias: ": lambda a: dict(bias=torch.ones(1)),
    "span_k: expected one beside span_q": lambda a: dict(
        **{n: a[n][:1] for n in ("q", "k", "v", "out", "lse", "dout")},
        out_lo=torch.empty(0),
        span_q=torch.zeros(5, 4, dtype=torch.int32),
    ),
    "blocks_t: expected one beside blocks": lambda a: dict(
        blocks=torch.zeros(1, 1, 1, 2, dtype=torch.int32), block_q=128, block_k=128
    ),
}


@pytest.mark.parametrize("message", BAD_RESULTS)
def test_results_that_do_not_fit_are_refused_by_name(message):
    q, k, v = qkv(2, 4, 5, 8)
    names = ("dout", "dlse", "q", "k", "v", "out", "lse", "out_lo", *NAMES)
    names += ("scale", "softcap", "dropout_p", "causal", "window_left", "window_right")
    names += ("sink_keys", "block_q", "block_k")
    good = dict(zip((*names, "wanted", "grads_fp32"), backward_arguments(q, k, v)))
    call = {**good, **BAD_RESULTS[message](good)}
    before = fa.status()["counters"]["fused"]
    with pytest.raises(RuntimeError, match="^" + message):
        _ops.backward_op(*call.values())
    assert fa.status()["counters"]["fused"] == before


def test_gradients_repeat_bit_by_bit():
    q, k, v = qkv(2, 4, 33, 16, heads_k=2)
    assert all(map(torch.equal, bwd(q, k, v), bwd(q, k, v)))


def test_cpu_tensors_need_a_simulator_in_this_context():
    q, k, v = qkv(1, 1, 4, 8)
    # A new thread has a context of its own, where nothing is simulated.
    with ThreadPoolExecutor(1) as elsewhere:
        with pytest.raises(RuntimeError, match=r"simulate\("):
            elsewhere.submit(fwd, q, k, v).result()
        inherited = contextvars.copy_context().run
        out, _, _ = elsewhere.submit(inherited, fwd, q, k, v).result()
    assert torch.equal(out, fwd(q, k, v)[0])


@pytest.mark.skipif(FROM_PYTHON, reason="this is the second process")
def test_all_this_holds_when_registered_from_python():
    """But for inductor, which calls the op like aot_eager, whoever registered it;
    FA_TEST=full with it, too."""
    code = """
import sys, pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
    chosen = [str(ROOT / "tests" / "test_ops.py")]
    if not FULL:
        chosen += ["-k", "not inductor"]
    done = run_forked(code, *chosen, env={"FLASH_ATTN_ROCM_PYTHON_OPS": "1"})
    assert " passed" in done.stdout and "failed" not in done.stdout
