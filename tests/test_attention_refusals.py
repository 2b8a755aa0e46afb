"""What attention() refuses, by name and before anything is launched.

SPDX-License-Identifier: BSD-3-Clause
"""

import math

import pytest
import torch
from helpers import qkv

import flash_attn_rocm as fa
from flash_attn_rocm import FlashAttnError

pytestmark = pytest.mark.usefixtures("simulated")

Q, K, V = qkv(2, 4, 7, 6, heads_k=2, length_k=10, dtype=torch.float64)
REFUSED = {
    "q a list": ("q", dict(q=[1.0])),
    "q 3-D": ("q", dict(q=Q[0])),
    "k dtype": ("k", dict(k=K.float())),
    "k batch": ("k", dict(k=K[:1])),
    "v length": ("v", dict(v=V[:, :, :3])),
    "k heads": ("k", dict(q=Q[:, :3])),
    "k heads without gqa": ("k", dict(enable_gqa=False)),
    "bias a list": ("bias", dict(bias=[0.0])),
    "bias bool": ("bias", dict(bias=torch.ones(7, 10, dtype=torch.bool))),
    "bias float32 for float64": ("bias", dict(bias=torch.ones(7, 10))),
    "bias int": ("bias", dict(bias=torch.ones(7, 10, dtype=torch.int64))),
    "bias 1-D": ("bias", dict(bias=Q.new_zeros(10))),
    "bias 5-D": ("bias", dict(bias=Q.new_zeros(1, 1, 1, 7, 10))),
    "bias length": ("bias", dict(bias=Q.new_zeros(7, 9))),
    "bias heads": ("bias", dict(bias=Q.new_zeros(2, 7, 10))),
    "bias device": ("bias", dict(bias=Q.new_zeros(7, 10).to("meta"))),
    "bias sparse": ("bias", dict(bias=Q.new_zeros(7, 10).to_sparse())),
    "mask float": ("mask", dict(mask=Q.new_ones(7, 10))),
    "mask uint8": ("mask", dict(mask=torch.ones(7, 10, dtype=torch.uint8))),
    "mask a list": ("mask", dict(mask=[[True]])),
    "mask length": ("mask", dict(mask=torch.ones(6, 10, dtype=torch.bool))),
    "causal True": ("causal", dict(causal=True)),
    "causal 0": ("causal", dict(causal=0)),
    "causal a word": ("causal", dict(causal="top-left")),
    "window -2": ("window", dict(window=(-2, 0))),
    "window of three": ("window", dict(window=(1, 1, 1))),
    "window of bools": ("window", dict(window=(True, True))),
    "window of floats": ("window", dict(window=(1.0, 1.0))),
    "softcap negative": ("softcap", dict(softcap=-1.0)),
    "softcap nan": ("softcap", dict(softcap=math.nan)),
    "softcap None": ("softcap", dict(softcap=None)),
    "slopes heads": ("alibi_slopes", dict(alibi_slopes=torch.ones(5))),
    "slopes batch": ("alibi_slopes", dict(alibi_slopes=torch.ones(3, 4))),
    "slopes 3-D": ("alibi_slopes", dict(alibi_slopes=torch.ones(2, 4, 1))),
    "slopes half": ("alibi_slopes", dict(alibi_slopes=torch.ones(4).half())),
    "slopes that require grad": (
        "alibi_slopes",
        dict(alibi_slopes=torch.ones(4).requires_grad_()),
    ),
    "sink heads": ("sink", dict(sink=torch.ones(2))),
    "sink 2-D": ("sink", dict(sink=torch.ones(1, 4))),
    "sink int": ("sink", dict(sink=torch.ones(4, dtype=torch.int32))),
    "sink a number": ("sink", dict(sink=0.5)),
    "sink_keys negative": ("sink_keys", dict(sink_keys=-1)),
    "sink_keys a float": ("sink_keys", dict(sink_keys=2.0)),
    "dropout 1": ("dropout_p", dict(dropout_p=1.0)),
    "dropout negative": ("dropout_p", dict(dropout_p=-0.1)),
    "dropout a text": ("dropout_p", dict(dropout_p="0.1")),
    "block_mask a tensor": ("block_mask", dict(block_mask=torch.ones(1, 1))),
    "scale infinite": ("scale", dict(scale=math.inf)),
    "scale a text": ("scale", dict(scale="1")),
    "gqa None": ("enable_gqa", dict(enable_gqa=None)),
    "lse a text": ("return_lse", dict(return_lse="yes")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_refuses_by_name(name):
    argument, changes = REFUSED[name]
    before = fa.status()["counters"]
    with pytest.raises(FlashAttnError, match=rf"^{argument}: expected .*, got "):
        fa.attention(**{"q": Q, "k": K, "v": V, **changes})
    assert fa.status()["counters"] == before


def test_a_bias_whose_rows_lie_too_far_apart_is_refused_by_name():
    far = torch.empty(2 * 2**22, dtype=torch.float64).as_strided((2, 10), (2**22, 1))
    q = Q[:, :, :2]
    with pytest.raises(FlashAttnError, match=r"^bias: expected a stride below 2\^24"):
        fa.attention(q, K, V, bias=far)


def test_slopes_that_require_grad_are_fine_without_grad_mode():
    slopes = torch.ones(4).requires_grad_()
    with torch.no_grad():
        fa.attention(Q, K, V, alibi_slopes=slopes)


def dual_of(tensor):
    return torch.autograd.forward_ad.make_dual(tensor, torch.ones_like(tensor))


@pytest.mark.parametrize("name", ["bias", "sink", "alibi_slopes"])
def test_forward_mode_is_refused_by_name(name):
    sizes = {"bias": (7, 10), "sink": (4,), "alibi_slopes": (4,)}
    one = Q.new_zeros(sizes[name])
    refused = pytest.raises(FlashAttnError, match=rf"^{name}: expected .* tangent")
    with torch.autograd.forward_ad.dual_level(), refused:
        fa.attention(Q, K, V, **{name: dual_of(one)})
    refused = pytest.raises(FlashAttnError, match=rf"^{name}: expected .* tangent")
    with refused:
        torch.func.jvp(lambda x: fa.attention(Q, K, V, **{name: x}), (one,), (one,))


def test_the_tangent_of_slopes_is_refused_by_the_functions_of_flash_attn():
    q, k, v = (t.transpose(1, 2) for t in (Q, K, V))
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (7, 10))
    with torch.autograd.forward_ad.dual_level():
        slopes = dual_of(torch.ones(4))
        for call in (
            lambda: fa.flash_attn_func(q, k, v, alibi_slopes=slopes),
            lambda: fa.flash_attn_varlen_func(
                q[0], k[0], v[0], cu_q, cu_k, 7, 10, alibi_slopes=slopes
            ),
        ):
            with pytest.raises(FlashAttnError, match=r"^alibi_slopes: .* tangent"):
                call()


def test_slopes_that_require_grad_outside_of_vmap_are_refused():
    slopes = torch.ones(3, 4).requires_grad_()

    def call(one):
        return fa.attention(Q, K, V, alibi_slopes=one)

    with pytest.raises(FlashAttnError, match=r"^alibi_slopes: .*outside"):
        torch.vmap(call)(slopes)
