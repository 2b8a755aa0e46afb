"""Attention with features, dense and in float64: what the Python layers are held to.

Written from the words of attention()'s docstring, and shares nothing with the package.

SPDX-License-Identifier: BSD-3-Clause
"""

import math

import torch

_LOW = 0xFFFFFFFF


def band(length, length_k, *, shift=0, left=-1, right=-1):
    """(Sq, Sk): keys from i + shift - left to i + shift + right; -1 is no end."""
    own = torch.arange(length).unsqueeze(1) + shift
    key = torch.arange(length_k)
    seen = torch.ones(length, length_k, dtype=torch.bool)
    if left >= 0:
        seen &= key >= own - left
    if right >= 0:
        seen &= key <= own + right
    return seen


def attention(
    q,
    k,
    v,
    *,
    seen=None,
    bias=None,
    slopes=None,
    shift=None,
    softcap=0.0,
    sink=None,
    scale=None,
    factors=None,
):
    """(out, lse), differentiable; a row that sees nothing gives 0 and -inf, or sink.

    seen, bias and factors (of dropout) broadcast to (B, H, Sq, Sk); slopes (H) or
    (B, H) with the own key of query i at i + shift, Sk - Sq by default.
    """
    q, k, v = (t.double() for t in (q, k, v))
    group = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    length, length_k = q.size(2), k.size(2)
    scale = q.size(3) ** -0.5 if scale is None else scale
    scores = scale * (q @ k.mT)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        shift = length_k - length if shift is None else shift
        own = torch.arange(length).unsqueeze(1) + shift
        distance = (own - torch.arange(length_k)).abs()
        scores = scores - slopes.double().reshape(-1, q.size(1), 1, 1) * distance
    visible = torch.ones(scores.shape, dtype=torch.bool)
    if bias is not None:
        visible = visible & (bias != -math.inf)
        scores = scores + bias.double().masked_fill(bias == -math.inf, 0.0)
    if seen is not None:
        visible = visible & seen
    if sink is not None:
        column = sink.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
        visible = torch.cat([visible, torch.ones_like(column, dtype=torch.bool)], -1)
    some = visible.any(-1, keepdim=True)
    # Finite where nothing is seen, so that no gradient is NaN.
    scores = scores.masked_fill(~visible & some, -math.inf).masked_fill(~some, 0.0)
    lse = scores.logsumexp(-1).masked_fill(~some.squeeze(-1), -math.inf)
    weights = (scores.softmax(-1) * visible)[..., :length_k]
    if factors is not None:
        weights = weights * factors
    return weights @ v, lse


def gradients(results, cotangents, tensors):
    """Of all tensors; zeros where nothing depends on one."""
    made = torch.autograd.grad(
        results, tensors, cotangents, allow_unused=True, retain_graph=True
    )
    return [torch.zeros_like(t) if g is None else g for g, t in zip(made, tensors)]


def assert_like(got, want, rtol=1e-9):
    """got is want within rtol of the largest, or of 1e-5 where that is nothing but what
    rounding left; -inf in the same places."""
    got, want = got.detach(), want.detach().double()
    assert got.shape == want.shape
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    if finite.any():
        size = max(float(want[finite].abs().max()), 1e-5)
        error = (got.double() - want)[finite].abs().max()
        assert float(error) <= rtol * size, (float(error), size)
