"""Attention in float64 in which what a row cannot see does not reach it.

The second opinion on calls with a NaN or an infinity in them. Stock's paths differ
there among themselves: its math path multiplies weights of 0, of hidden keys too, with
what is infinite. The kernels do not (README, limits), and nor does this.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._soak_workload import Case


def _products(weights: Tensor, numbers: Tensor, seen: Tensor) -> Tensor:
    """(..., n, m) by (..., m, d), leaving out what is not seen."""
    terms = weights.unsqueeze(-1) * numbers.unsqueeze(-3)
    return terms.masked_fill(~seen.unsqueeze(-1), 0.0).sum(-2)


def attention(case: Case) -> list[Tensor]:
    """out, and with a backward dq, dk and dv."""
    heads = case.k.size(1)
    group = case.q.size(1) // heads
    q = case.q.double()
    k, v = (t.double().repeat_interleave(group, 1) for t in (case.k, case.v))
    scale = case.options.get("scale", q.size(-1) ** -0.5)
    scores = scale * (q @ k.mT)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    mask = case.options.get("attn_mask")
    if case.options.get("is_causal"):
        seen = seen.tril()
    elif mask is not None and mask.dtype is torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask.double()
    scores = scores.masked_fill(~seen, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - largest.masked_fill(largest == -torch.inf, 0.0))
    p = (p / p.sum(-1, keepdim=True)).masked_fill(~seen, 0.0)
    seen = p != 0.0
    out = _products(p, v, seen)
    if case.dout is None:
        return [out]
    dout = case.dout.double()
    delta = (dout * out).sum(-1, keepdim=True)
    ds = (p * (dout @ v.mT - delta)).masked_fill(~seen, 0.0)
    dq = scale * _products(ds, k, seen)
    dk = scale * _products(ds.mT, q, seen.mT)
    dv = _products(p.mT, dout, seen.mT)
    return [out, dq, *(g.unflatten(1, (heads, group)).sum(2) for g in (dk, dv))]
