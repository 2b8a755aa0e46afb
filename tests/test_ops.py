"""The op flash_attn_rocm::fwd, registered from C and (in a second process) from Python.

SPDX-License-Identifier: BSD-3-Clause
"""

import math
import os

import pytest
import torch
from helpers import (
    BOTTOM_RIGHT,
    NONE,
    ROOT,
    TOP_LEFT,
    error_ratio,
    lse_ratio,
    needs_extension,
    qkv,
    run_python,
)

import flash_attn_rocm as fa
from flash_attn_rocm import _ops

pytestmark = [needs_extension, pytest.mark.usefixtures("simulated")]

FROM_PYTHON = os.environ.get("FLASH_ATTN_ROCM_PYTHON_OPS") == "1"
NAMES = ("bias", "mask", "alibi", "sink", "seed", "blocks")


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
    "mask": torch.ones(1, dtype=torch.bool),
    "alibi": torch.ones(2),
    "sink": torch.ones(2),
    "seed": torch.ones(2, dtype=torch.int64),
    "blocks": torch.ones(1, dtype=torch.int32),
    "softcap": 30.0,
    "dropout_p": 0.1,
    "window_left": 4,
    "window_right": 0,
    "causal": 3,
    "scale": float("nan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_yet_is_refused_by_name(name):
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


def test_cpu_tensors_need_a_simulator_in_this_context():
    import contextvars

    q, k, v = qkv(1, 1, 4, 8)
    code = """
import torch
from test_ops import fwd, qkv
try:
    fwd(*qkv(1, 1, 4, 8))
except RuntimeError as error:
    assert "simulate(" in str(error), error
else:
    raise SystemExit("it ran")
"""
    run_python(code, env={"FLASH_ATTN_ROCM_PYTHON_OPS": str(int(FROM_PYTHON))})
    assert contextvars.copy_context().run(fwd, q, k, v)[0].shape == q.shape


@pytest.mark.skipif(FROM_PYTHON, reason="this is the second process")
def test_all_this_holds_when_registered_from_python():
    code = """
import sys, pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", sys.argv[1]]))
"""
    path = str(ROOT / "tests" / "test_ops.py")
    done = run_python(code, path, env={"FLASH_ATTN_ROCM_PYTHON_OPS": "1"})
    assert " passed" in done.stdout and "failed" not in done.stdout
