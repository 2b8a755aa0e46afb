"""scaled_dot_product_attention with masks, dropout and any rank under torch.compile.

SPDX-License-Identifier: BSD-3-Clause
"""

import pytest
import torch
import torch.nn.functional as F
from helpers.dense import gradients
from helpers.gradients import leaves
from test_shim_features import SHAPES, assert_fused, inputs, normal

pytestmark = pytest.mark.usefixtures("patched", "simulated", "fresh_dynamo")


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attend(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


COMPILED = {
    "bool": dict(attn_mask=normal(6, 9) > -1),
    "float": dict(attn_mask=normal(4, 1, 9)),
    "causal": dict(is_causal=True),
}


@pytest.mark.parametrize(
    "name, option, backend",
    [
        ("2-D", "bool", "aot_eager"),
        ("2-D", "causal", "eager"),
        ("3-D", "float", "aot_eager"),
        ("3-D", "causal", "aot_eager"),
        ("5-D of a split", "bool", "aot_eager"),
        ("5-D of a split", "float", "inductor"),
        ("one batch of keys", "float", "eager"),
        ("one batch of keys", "bool", "inductor"),
    ],
)
def test_masks_and_ranks_compile_in_one_graph(name, option, backend):
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    tensors = SHAPES[name](*(t.detach() for t in inputs()))
    tensors = leaves(*tensors)
    options = COMPILED[option]
    got = compiled(*tensors, **options)
    assert_fused()
    want = attend(*tensors, **options)
    assert torch.equal(got, want)
    dout = normal(*got.shape, seed=2)
    one, other = (gradients([x], [dout], tensors) for x in (got, want))
    assert all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_mask_that_requires_grad_compiles_in_one_graph(backend):
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    tensors = (*leaves(*inputs()), normal(4, 1, 9).requires_grad_())
    for dout in (normal(2, 4, 6, 8, seed=2), normal(2, 4, 6, 8, seed=3)):
        got = compiled(*tensors[:3], attn_mask=tensors[3])
        want = attend(*tensors[:3], attn_mask=tensors[3])
        one, other = (gradients([x], [dout], tensors) for x in (got, want))
        assert all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_dropout_repeats_by_manual_seed_and_is_fresh(backend):
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    tensors = leaves(*inputs())
    torch.manual_seed(1)
    first = compiled(*tensors, dropout_p=0.5)
    assert not torch.equal(first, compiled(*tensors, dropout_p=0.5))
    torch.manual_seed(1)
    assert torch.equal(first, compiled(*tensors, dropout_p=0.5))
