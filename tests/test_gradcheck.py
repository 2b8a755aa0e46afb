"""torch.autograd.gradcheck on the fused float64 kernels, and opcheck on the ops.

What is differentiated is the public function on simulated machine code: finite
differences of the forward kernel against the backward kernels, with no reference of
our own between them. Runs from an installed package: pytest tests/test_gradcheck.py.

SPDX-License-Identifier: BSD-3-Clause
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers import BOTTOM_RIGHT, CAUSAL, NONE, TOP_LEFT, qkv
from helpers.gradients import leaves

import flash_attn_rocm as fa
import hipsim
from flash_attn_rocm import _autograd, _ops
from flash_attn_rocm._features import Features

pytestmark = pytest.mark.usefixtures("patched", "simulated")

# (head dim, head dim of v, queries, keys): every head dim below in its own way.
SLOW = [(1, 1, 5, 7), (3, 2, 6, 4), (7, 7, 4, 9)]
FAST = [32, 40, 72, 128]

# A thousandth of what is usual: all that central differences of 1e-6 can tell.
gradcheck = functools.partial(torch.autograd.gradcheck, rtol=1e-6, atol=1e-8)


@pytest.fixture(autouse=True)
def unchecked():
    """Check level 0: some thousand runs of code that test_backward.py runs at level 2,
    in the same shapes, five times as fast."""
    before = hipsim.get_option("check")
    hipsim.set_option("check", 0)
    yield
    hipsim.set_option("check", before)


def inputs(dim, dim_v, length, length_k, *, heads=2, heads_k=1, dtype=torch.float64):
    q, k, _ = qkv(
        1, heads, length, dim, heads_k=heads_k, length_k=length_k, dtype=dtype
    )
    v = qkv(1, heads_k, length_k, dim_v, dtype=dtype, seed=1)[2]
    return leaves(q, k, v)


def attend(causal, *, with_lse=False):
    """The fused op under its autograd.Function; fails if anything else ran."""

    def call(q, k, v):
        features = Features(scale=0.5, causal=causal)
        result = _autograd.attention(q, k, v, features, with_lse=with_lse, strict=True)
        assert fa.last_call().kernel.startswith("fa_fwd_f64"), fa.last_call()
        return result

    return call


def finite_lse(causal, length, length_k):
    """A log-sum-exp of -inf has no finite difference."""
    return causal != BOTTOM_RIGHT or length <= length_k


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dim,dim_v,length,length_k", SLOW)
def test_gradcheck_element_by_element(dim, dim_v, length, length_k, causal):
    way = CAUSAL[causal]
    with_lse = finite_lse(way, length, length_k)
    tensors = inputs(dim, dim_v, length, length_k)
    assert gradcheck(attend(way, with_lse=with_lse), tensors)


def test_gradcheck_element_by_element_of_a_whole_head_dim():
    tensors = inputs(64, 64, 2, 3)
    assert gradcheck(attend(TOP_LEFT), tensors)


@pytest.mark.parametrize("heads,heads_k", [(1, 1), (2, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dim", FAST)
def test_gradcheck_along_random_directions(dim, causal, heads, heads_k):
    # Lengths that are no multiples of anything, over the edge of a tile.
    length, length_k = (65, 67) if heads == 2 else (5, 9)
    tensors = inputs(dim, dim, length, length_k, heads=heads, heads_k=heads_k)
    call = attend(CAUSAL[causal], with_lse=True)
    assert gradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("api", ["sdpa", "flash_attn_func"])
def test_gradcheck_through_the_public_names(api):
    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def flash(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return fa.flash_attn_func(q, k, v, causal=True)

    call = {"sdpa": sdpa, "flash_attn_func": flash}[api]
    tensors = inputs(5, 5, 4, 6)
    assert gradcheck(call, tensors)
    assert fa.last_call().backend == "sim"


def test_gradcheck_sees_a_wrong_gradient():
    def scaled(q, k, v):
        out = attend(TOP_LEFT)(q, k, v)
        return out + 1e-4 * (out.detach() - out)  # the same values

    assert not gradcheck(scaled, inputs(3, 3, 4, 5), raise_exception=False)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
def test_gradcheck_of_some_inputs(wanted):
    tensors = dict(zip("qkv", inputs(3, 3, 4, 5)))
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in wanted)
    assert gradcheck(attend(NONE), tuple(tensors.values()))


@pytest.mark.parametrize("causal", CAUSAL)
def test_gradgradcheck_of_a_tiny_case(causal):
    way = CAUSAL[causal]
    tensors = inputs(2, 3, 3, 4)
    assert torch.autograd.gradgradcheck(attend(way, with_lse=True), tensors)


# ---------------------------------------------------------------------- opcheck


def features(q, causal):
    return Features(scale=q.size(3) ** -0.5, causal=causal).op_args(torch.empty(0))


def samples(dtype):
    """q, k, v of several forms: grouped, ragged, transposed, with another head dim."""
    q, k, v = qkv(2, 4, 5, 16, heads_k=2, length_k=9, dtype=dtype)
    yield q, k, v
    yield q.transpose(1, 2), k[:, :1].expand(2, 1, 9, 16), v[:, :1, :, :7]
    yield (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    yield q, k[:, :, :0], v[:, :, :0]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("dtype", _ops.DTYPES)
def test_opcheck_of_the_forward(dtype, number):
    q, k, v = list(samples(dtype))[number]
    needs_grad = (number + _ops.dtype_code(dtype)) % 2 == 0
    results = torch.library.opcheck(
        _ops.op, (q, k, v, *features(q, number % 3), needs_grad)
    )
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("dtype", _ops.DTYPES)
def test_opcheck_of_the_backward(dtype, number):
    q, k, v = list(samples(dtype))[number]
    shift = _ops.dtype_code(dtype)
    wanted, fp32 = [(7, False), (7, True), (1, False), (6, True)][(number + shift) % 4]
    rest = features(q, number % 3)
    out, lse, out_lo = _ops.op(q, k, v, *rest, True)
    dout = torch.ones_like(out)
    dlse = torch.ones_like(lse) if number % 2 else torch.empty(0, dtype=lse.dtype)
    results = torch.library.opcheck(
        _ops.backward_op,
        (dout, dlse, q, k, v, out, lse, out_lo, *rest, wanted, fp32),
    )
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4
