"""torch.autograd.gradcheck on the fused float64 kernels with features.

Finite differences of the forward kernel against the backward kernels, with no reference
of our own between them: each feature element by element, every pair of choices along
random directions, of q, k, v, bias and sink, and of the log-sum-exp as of the output.

SPDX-License-Identifier: BSD-3-Clause
"""

import functools

import pytest
import torch
from helpers import BOTTOM_RIGHT, TOP_LEFT, needs_simulator
from helpers.combinations import (
    DIMENSIONS,
    allowed,
    build,
    covering,
    name_of,
)
from helpers.features import block_lists, fused, problem, seed_of, seen_by, spans
from helpers.kernels import DEVICE

import hipsim

pytestmark = needs_simulator

# A thousandth of what is usual: all that central differences of 1e-6 can tell.
gradcheck = functools.partial(torch.autograd.gradcheck, rtol=1e-6, atol=1e-8)

# Smaller sizes than elsewhere; without rows that see nothing, whose log-sum-exp has no
# finite difference.
CHOICES = {
    **{name: values for name, values in DIMENSIONS.items() if name != "kind"},
    "mask": ("none", "full", "transposed"),
    "blocks": ("none", "shared"),
    "heads": ((2, 2, 1), (1, 3, 1), (1, 1, 1)),
    "dims": ((3, 5), (8, 8), (40, 24)),
    "lengths": ((5, 9), (9, 5), (65, 67)),
    "bias": ("none", "full", "keys", "rows_keys", "rows", "transposed"),
}


def fits(row):
    """Long ones with one head."""
    if row.get("lengths") == (65, 67) and row.get("heads", (1, 1, 1)) != (1, 1, 1):
        return False
    return allowed({"kind": "f64", **row})


ROWS = covering(CHOICES, fits, seed=3)


@pytest.fixture(autouse=True)
def unchecked():
    """Check level 0: the same code in the same shapes runs at level 2 elsewhere."""
    before = hipsim.get_option("check")
    hipsim.set_option("check", 0)
    yield
    hipsim.set_option("check", before)


def drawn(*sizes, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(DEVICE)


def check(p, **how):
    """gradcheck of out and of the log-sum-exp of rows that see something."""
    f = p.features
    calm = p.but(dlse=None)
    live = seen_by(p).any(-1) if f.sink is None else torch.ones(p.scores[:3]) > 0
    live = live.to(DEVICE)

    def call(*tensors):
        out, lse = fused(calm, *tensors)
        return out, torch.where(live, lse, 0.0)

    inputs = []
    for tensor in (p.q, p.k, p.v, f.bias, f.sink):
        if tensor is None:
            inputs.append(None)
            continue
        copy = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE
        )
        inputs.append(copy.copy_(tensor.detach()).requires_grad_())
    return gradcheck(call, tuple(inputs), **how)


FEATURES = {
    "plain": {},
    "bias": dict(bias=drawn(1, 2, 3, 5)),
    "bias of keys": dict(bias=drawn(1, 2, 1, 5)),
    "bias of rows": dict(bias=drawn(1, 1, 3, 1)),
    "bias of heads": dict(bias=drawn(1, 2, 1, 1)),
    "mask": dict(mask=drawn(1, 1, 3, 5) > -0.5),
    "alibi": dict(alibi=torch.tensor([0.5, 0.125], dtype=torch.float64, device=DEVICE)),
    "softcap": dict(softcap=0.8),
    "sink": dict(sink=drawn(2)),
    "window": dict(causal=TOP_LEFT, window_left=2),
    "first keys": dict(causal=BOTTOM_RIGHT, window_left=1, sink_keys=2),
    "dropout": dict(dropout_p=0.4, seed=seed_of(3)),
    "scale": dict(scale=-0.7),
    "blocks": dict(
        block_lists(torch.ones(1, 1, 1, 1) > 0), **dict(block_q=128, block_k=128)
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_gradcheck_of_each_feature_element_by_element(name):
    p = problem(torch.float64, 3, 5, 3, dim_v=2, heads=2, heads_k=1)
    assert check(p.but(**FEATURES[name]))


def test_gradcheck_of_packed_sequences_element_by_element():
    p = problem(torch.float64, 7, 9, 3, dim_v=2, heads=2, heads_k=1)
    assert check(p.but(**spans((3, 0, 4), (4, 1, 4), causal=True, left=2)))


def test_gradcheck_of_all_features_element_by_element():
    p = problem(torch.float64, 4, 5, 3, dim_v=2, heads=2, heads_k=1)
    names = "bias", "softcap", "sink", "dropout", "first keys", "scale", "alibi"
    for name in names:
        p = p.but(**FEATURES[name])
    assert check(p.but(bias=drawn(1, 2, 4, 5)))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_gradcheck_of_every_pair_along_random_directions(row):
    assert check(build(dict(row, kind="f64", dlse=False)), fast_mode=True)


@pytest.mark.parametrize("which", range(5), ids=["q", "k", "v", "bias", "sink"])
def test_gradcheck_sees_a_wrong_gradient(which):
    p = problem(torch.float64, 4, 5, 3, heads=2).but(sink=drawn(2))
    tensors = [p.q, p.k, p.v, drawn(1, 2, 4, 5), p.features.sink]
    inputs = [t.detach().clone().requires_grad_() for t in tensors]

    def scaled(*given):
        given = list(given)
        held = given[which].detach()
        given[which] = held + (1 + 1e-4) * (given[which] - held)
        return fused(p, *given)

    assert not gradcheck(scaled, tuple(inputs), raise_exception=False)
