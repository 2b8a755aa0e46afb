"""Gradients of attention in torch ops, for blocks of query rows at a time.

What the kernels do not do: the second derivative, and the first where a launch of
the backward failed. Slower than a kernel, but memory stays O(N x block), and every
number is accumulated in float32 (float64 for float64).

For one head, with P = softmax(S), S = scale Q K^T and the gradients dO of the output
and dL of the log-sum-exp (a row that sees no key has P = 0):

    dP = dO V^T    E = dP - rowsum(P dP) + dL    dS = P E
    dQ = scale dS K    dK = scale dS^T Q    dV = P^T dO

All of it is out of place and P comes from Q and K, never from a saved log-sum-exp,
so autograd can differentiate it again, any number of times.

Source: FlashAttention-2 (arXiv 2307.08691) for the first derivative.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _ops

# Scores that are alive at a time; there are about ten tensors of this size.
BLOCK_ELEMENTS = 2**22


@dataclass
class Call:
    """A forward and the gradients of its results."""

    q: Tensor  # (B, H, Sq, D)
    k: Tensor  # (B, Hk, Sk, D)
    v: Tensor  # (B, Hk, Sk, Dv)
    dout: Tensor  # (B, H, Sq, Dv)
    dlse: Tensor | None  # (B, H, Sq)
    scale: float
    causal: int


@dataclass
class Block:
    """A block of query rows of all heads; r = rows times heads of a group."""

    rows: slice
    q: Tensor  # (B, Hk, r, D)
    dout: Tensor  # (B, Hk, r, Dv)
    p: Tensor  # (B, Hk, r, Sk), like dp and e
    dp: Tensor
    e: Tensor


class _Walk:
    """The blocks of a call, its keys and values in the accumulators' dtype."""

    def __init__(self, call: Call) -> None:
        self.call = call
        batch, heads, self.seqlen_q, _ = call.q.shape
        self.heads_k, self.seqlen_k = call.k.shape[1], call.k.shape[2]
        self.group = heads // max(self.heads_k, 1)
        self.dtype = _ops.lse_dtype(call.q.dtype)
        self.k, self.v = call.k.to(self.dtype), call.v.to(self.dtype)
        row = max(batch * heads * self.seqlen_k, 1)
        self.step = max(1, min(self.seqlen_q, BLOCK_ELEMENTS // row))

    def part(self, tensor: Tensor, rows: slice) -> Tensor:
        """Rows of a tensor of the queries: (B, H, Sq, n) to (B, Hk, r, n)."""
        block = tensor[:, :, rows].to(self.dtype)
        count, width = rows.stop - rows.start, tensor.shape[3]
        return block.reshape(-1, self.heads_k, self.group * count, width)

    def whole(self, blocks: list[Tensor], like: Tensor) -> Tensor:
        """The inverse of part() for all blocks, in the dtype of `like`."""
        batch, heads = self.call.q.shape[:2]
        rows = [b.reshape(batch, heads, -1, b.shape[3]) for b in blocks]
        return torch.cat(rows, 2).to(like.dtype)

    def _seen(self, rows: slice) -> Tensor | None:
        """(r, Sk): whether a query sees a key; None if all do."""
        if self.call.causal == _ops.CAUSAL_NONE:
            return None
        bottom_right = self.call.causal == _ops.CAUSAL_BOTTOM_RIGHT
        shift = self.seqlen_k - self.seqlen_q if bottom_right else 0
        device = self.call.q.device
        query = torch.arange(rows.start, rows.stop, device=device)
        key = torch.arange(self.seqlen_k, device=device)
        return (key <= query.unsqueeze(1) + shift).repeat(self.group, 1)

    def __iter__(self) -> Iterator[Block]:
        call = self.call
        for begin in range(0, self.seqlen_q, self.step):
            rows = slice(begin, min(begin + self.step, self.seqlen_q))
            q, dout = self.part(call.q, rows), self.part(call.dout, rows)
            scores = (q @ self.k.mT) * call.scale
            seen = self._seen(rows)
            if seen is None:
                p = scores.softmax(-1)
            else:
                # A row without a key keeps finite scores: the derivative of the
                # softmax of nothing but -inf is NaN, even where it counts for 0.
                hidden = ~seen & seen.any(-1, keepdim=True)
                p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
                p = p.masked_fill(~seen, 0.0)
            dp = dout @ self.v.mT
            e = dp - (p * dp).sum(-1, keepdim=True)
            if call.dlse is not None:
                e = e + self.part(call.dlse.unsqueeze(-1), rows)
            yield Block(rows, q, dout, p, dp, e)


def is_empty(call: Call) -> bool:
    """Whether nothing sees anything, so that all derivatives are zero."""
    return call.q.numel() == 0 or call.k.numel() == 0


def first_order(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, shaped like q, k and v; float32 (float64 for float64)."""
    dtype = _ops.lse_dtype(call.q.dtype)
    if is_empty(call):
        inputs = (call.q, call.k, call.v)
        dq, dk, dv = (torch.zeros_like(t, dtype=dtype) for t in inputs)
        return dq, dk, dv
    with torch.autocast(call.q.device.type, enabled=False):
        walk = _Walk(call)
        dk, dv = torch.zeros_like(walk.k), torch.zeros_like(walk.v)
        dq_blocks = []
        for block in walk:
            ds = block.p * block.e * call.scale
            dq_blocks.append(ds @ walk.k)
            dk = dk + ds.mT @ block.q
            dv = dv + block.p.mT @ block.dout
        return walk.whole(dq_blocks, dk), dk, dv


def second_order(
    call: Call, a: Tensor | None, b: Tensor | None, c: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of <a, dq> + <b, dk> + <c, dv> for dout, dlse, q, k and v.

    a, b, c are shaped like q, k, v; None is zero. With the names above,
    G = scale (a K^T + Q b^T), W = P G, w = rowsum(W) and U = W - w P:

        for dO   U V + P c                  for dL   w
        for V    U^T dO
        for P    X = E G - w dP + dO c^T    so for S   Y = P (X - rowsum(P X))
        for Q    scale (Y K + dS b)         for K    scale (Y^T Q + dS^T a)
    """
    q, k, v = call.q, call.k, call.v
    if is_empty(call):
        zero_lse = q.new_zeros(q.shape[:3], dtype=_ops.lse_dtype(q.dtype))
        like = (torch.zeros_like(t) for t in (call.dout, q, k, v))
        for_dout, for_q, for_k, for_v = like
        return for_dout, zero_lse, for_q, for_k, for_v
    with torch.autocast(q.device.type, enabled=False):
        walk = _Walk(call)
        for_k, for_v = torch.zeros_like(walk.k), torch.zeros_like(walk.v)
        b = None if b is None else b.to(walk.dtype)
        c = None if c is None else c.to(walk.dtype)
        dout_blocks, dlse_blocks, q_blocks = [], [], []
        for block in walk:
            p, ds = block.p, block.p * block.e
            g = torch.zeros_like(p)
            if a is not None:
                a_part = walk.part(a, block.rows)
                g = g + a_part @ walk.k.mT * call.scale
                for_k = for_k + ds.mT @ a_part * call.scale
            if b is not None:
                g = g + block.q @ b.mT * call.scale
            w = (p * g).sum(-1, keepdim=True)
            u = p * (g - w)
            x = block.e * g - w * block.dp
            for_dout = u @ walk.v
            if c is not None:
                x = x + block.dout @ c.mT
                for_dout = for_dout + p @ c
            y = p * (x - (p * x).sum(-1, keepdim=True)) * call.scale
            for_q = y @ walk.k
            if b is not None:
                for_q = for_q + ds @ b * call.scale
            for_k = for_k + y.mT @ block.q
            for_v = for_v + u.mT @ block.dout
            dout_blocks.append(for_dout)
            dlse_blocks.append(w)
            q_blocks.append(for_q)
        return (
            walk.whole(dout_blocks, call.dout),
            walk.whole(dlse_blocks, w).squeeze(-1),
            walk.whole(q_blocks, q),
            for_k.to(k.dtype),
            for_v.to(v.dtype),
        )
