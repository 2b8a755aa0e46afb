"""The ops with features of attention: bias, sink and what else _ops.FEATURE_TENSORS and
numbers say. What they compute is left to the tests of the kernels; here it is the
form of the results, and what the ops add to the kernels.

SPDX-License-Identifier: BSD-3-Clause
"""

import pytest
import torch
from helpers import BOTTOM_RIGHT, ROOT, needs_extension, qkv, run_forked
from test_ops import FROM_PYTHON, arguments, backward_arguments, bwd, fwd

import flash_attn_rocm as fa
from flash_attn_rocm import _ops

pytestmark = [needs_extension, pytest.mark.usefixtures("simulated")]


def scores_and_sink(q, k, v, *, bias, sink):
    """Attention in float64 with a bias and a sink; scale as in arguments()."""
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    column = sink[:, None, None].expand(*scores.shape[:2], scores.shape[2], 1)
    lse = torch.cat([scores, column], -1).logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


BIASES = {
    "full": lambda t: t,
    "of one row": lambda t: t[:, :, :1],
    "of one key": lambda t: t[..., :1],
    "of one head": lambda t: t[:, :1],
    "of one batch": lambda t: t[:1],
    "expanded": lambda t: t[:1, :, :1].expand(t.shape),
    "transposed": lambda t: t.mT.contiguous().mT,
    "of one number": lambda t: t[:1, :1, :1, :1],
}


@pytest.mark.parametrize("dtype", _ops.DTYPES)
@pytest.mark.parametrize("name", BIASES)
def test_gradients_of_bias_and_sink_against_float64(name, dtype):
    q, k, v = qkv(2, 4, 9, 24, length_k=70, dtype=dtype)
    wide = _ops.lse_dtype(dtype)
    bias = BIASES[name](torch.linspace(-1, 1, 2 * 4 * 9 * 70).view(2, 4, 9, 70))
    bias = bias.to(wide if name == "full" else dtype)
    sink = torch.linspace(-2, 3, 4, dtype=wide)
    dout = qkv(2, 4, 9, 24, dtype=dtype, seed=1)[0]
    dlse = qkv(2, 4, 9, 1, dtype=wide, seed=2)[0][..., 0].contiguous()
    options = dict(bias=bias, sink=sink)
    out, lse, _ = fwd(q, k, v, **options)
    inputs = [t.detach().double().requires_grad_() for t in (q, k, v, bias, sink)]
    want = scores_and_sink(*inputs[:3], bias=inputs[3], sink=inputs[4])
    eps = max(torch.finfo(dtype).eps, 1e-7 if wide is torch.float32 else 0)
    for got, exact in zip((out, lse), want):
        assert (got - exact).norm() <= 4 * eps * exact.norm()
    *_, dbias, dsink = bwd(q, k, v, dout=dout, dlse=dlse, wanted=24, **options)
    assert dbias.shape == bias.shape and dbias.is_contiguous()
    assert dbias.dtype == bias.dtype and dsink.shape == lse.shape
    exact = torch.autograd.grad(want, inputs[3:], (dout.double(), dlse.double()))
    for got, grad in zip((dbias, dsink.sum((0, 2))), exact):
        assert (got - grad).norm() <= 8 * eps * grad.norm()


@pytest.mark.parametrize("dtype", _ops.DTYPES)
def test_without_keys_a_sink_is_all_there_is(dtype):
    q, k, v = qkv(2, 3, 5, 8, dtype=dtype)
    k, v = k[:, :, :0], v[:, :, :0]
    wide = _ops.lse_dtype(dtype)
    sink = torch.tensor([-1.0, 0.5, 40.0], dtype=wide)
    out, lse, _ = fwd(q, k, v, sink=sink, needs_grad=True)
    assert not out.any()
    assert torch.allclose(lse, sink[:, None].expand(lse.shape), rtol=1e-6)
    dlse = qkv(2, 3, 5, 1, dtype=wide, seed=2)[0][..., 0].contiguous()
    dq, dk, dv, _, dsink = bwd(q, k, v, dlse=dlse, wanted=1 + 2 + 4 + 16, sink=sink)
    assert not dq.any() and dk.shape == k.shape and dv.shape == v.shape
    assert torch.allclose(dsink, dlse, rtol=1e-6)
    assert not bwd(q, k, v, sink=sink)[0].any()


def feature_samples(q, k):
    """Some that can be combined, in forms of all kinds."""
    wide = _ops.lse_dtype(q.dtype)
    batch, heads, rows, keys = *q.shape[:3], k.size(2)
    full = torch.zeros(batch, heads, rows, keys)
    yield dict(bias=full.to(q.dtype), softcap=30.0, window_left=4, sink_keys=2)
    yield dict(bias=full[:1, :, :1].to(wide).expand(full.shape), causal=BOTTOM_RIGHT)
    yield dict(
        bias=full.mT.contiguous().mT[:, :1].to(wide),
        mask=torch.ones(1, 1, 1, keys, dtype=torch.bool),
        sink=torch.zeros(heads, dtype=wide),
    )
    yield dict(
        alibi=torch.rand(batch, heads, dtype=wide),
        dropout_p=0.5,
        seed=torch.tensor([3, 4]),
        blocks=torch.tensor([1, 0], dtype=torch.int32).view(1, 1, 1, 2),
        blocks_t=torch.tensor([1, 0], dtype=torch.int32).view(1, 1, 1, 2),
        block_q=128,
        block_k=128,
    )


def wanted_with(options):
    return 7 + 8 * ("bias" in options) + 16 * ("sink" in options)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("dtype", _ops.DTYPES)
def test_the_ops_keep_torchs_rules_with_features(number, dtype):
    q, k, v = qkv(2, 4, 5, 8, heads_k=2, length_k=7, dtype=dtype)
    options = list(feature_samples(q, k))[number]
    torch.library.opcheck(_ops.op, arguments(q, k, v, needs_grad=True, **options))
    call = backward_arguments(q, k, v, wanted=wanted_with(options), **options)
    torch.library.opcheck(_ops.backward_op, call)


@pytest.mark.parametrize("number", range(4))
def test_fake_and_real_gradients_of_features_have_the_same_form(number):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = qkv(2, 4, 5, 8, length_k=7)
    options = list(feature_samples(q, k))[number]
    call = backward_arguments(q, k, v, wanted=wanted_with(options), **options)
    reals = _ops.backward_op(*call)
    assert len(reals) == 5 and "_full" in fa.last_call().kernel
    with FakeTensorMode() as mode:
        fakes = _ops.backward_op(
            *(mode.from_tensor(x) if torch.is_tensor(x) else x for x in call)
        )
    for fake, real in zip(fakes, reals):
        assert fake.shape == real.shape and fake.dtype == real.dtype
        assert fake.stride() == real.stride()


def test_the_kernel_of_dbias_is_reported():
    q, k, v = qkv(1, 2, 5, 8)
    bwd(q, k, v, bias=torch.zeros(1, 1, 5, 5), wanted=15)
    call = fa.last_call()
    assert [name.split("_")[2] for name in call.kernel.split("+")] == [
        "q",
        "kv",
        "bias",
    ]
    assert call.why.startswith("full: bias; ")


@pytest.mark.skipif(FROM_PYTHON, reason="this is the second process")
def test_all_this_holds_when_registered_from_python():
    code = """
import sys, pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", sys.argv[1]]))
"""
    path = str(ROOT / "tests" / "test_ops_features.py")
    done = run_forked(code, path, env={"FLASH_ATTN_ROCM_PYTHON_OPS": "1"})
    assert " passed" in done.stdout and "failed" not in done.stdout
