"""Gradients of attention in torch ops, for blocks of query rows at a time.

What the kernels do not do: the second derivative, the first where a launch of the
backward failed, and in a compiled graph a forward whose launch failed. Slower than a
kernel, but memory stays O(N x block), and every number is accumulated in float32
(float64 for float64). _scores makes a block's P.

For one head, with S = scale Q K^T, X = f(S) + ALiBi + bias where f is the softcap,
P = softmax(X) (with a sink one key more, p_s), R the factors of dropout and the
gradients dO of the output and dL of the log-sum-exp (a row that sees no key has P = 0):

    dP = dO V^T R    m = rowsum(P dP)    E = dP - m + dL    dX = P E
    dS = f'(S) dX    dQ = scale dS K     dK = scale dS^T Q    dV = (P R)^T dO
    dbias = dX, summed where it is broadcast    dsink = p_s (dL - m), summed

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
from ._features import Features
from ._scores import Weights, weights_of

# Scores that are alive at a time; there are some ten tensors of this size.
BLOCK_ELEMENTS = 2**22

Five = tuple[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"]


@dataclass
class Call:
    """A forward and the gradients of its results."""

    q: Tensor  # (B, H, Sq, D)
    k: Tensor  # (B, Hk, Sk, D)
    v: Tensor  # (B, Hk, Sk, Dv)
    dout: Tensor  # (B, H, Sq, Dv)
    dlse: Tensor | None  # (B, H, Sq)
    features: Features


@dataclass
class Block:
    """A block of query rows of all heads; r = rows times heads of a group."""

    rows: slice
    q: Tensor  # (B, Hk, r, D)
    k: Tensor  # (B, Hk, Sk, D); zero where no row of the block sees the key
    v: Tensor  # (B, Hk, Sk, Dv), likewise
    dout: Tensor  # (B, Hk, r, Dv)
    dlse: Tensor | None  # (B, Hk, r, 1)
    weights: Weights
    p: Tensor  # (B, Hk, r, Sk), like dp, e
    dp: Tensor
    mean: Tensor  # (B, Hk, r, 1)
    e: Tensor

    def dropped(self, tensor: Tensor) -> Tensor:
        """A tensor like p times dropout's factors."""
        factors = self.weights.dropout
        return tensor if factors is None else tensor * factors

    def capped(self, tensor: Tensor) -> Tensor:
        """A gradient of X as one of S."""
        slope = self.weights.slope
        return tensor if slope is None else tensor * slope

    def of_lse(self) -> Tensor:
        """dL - m, what a key of value 0 has in the place of E."""
        return -self.mean if self.dlse is None else self.dlse - self.mean


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
        return torch.cat([self.by_head(b) for b in blocks], 2).to(like.dtype)

    def by_head(self, block: Tensor) -> Tensor:
        """(B, Hk, r, n) to (B, H, rows, n)."""
        batch, heads = self.call.q.shape[:2]
        return block.reshape(batch, heads, -1, block.shape[3])

    def __iter__(self) -> Iterator[Block]:
        call = self.call
        for begin in range(0, self.seqlen_q, self.step):
            rows = slice(begin, min(begin + self.step, self.seqlen_q))
            q, dout = self.part(call.q, rows), self.part(call.dout, rows)
            dlse = None
            if call.dlse is not None:
                dlse = self.part(call.dlse.unsqueeze(-1), rows)
            weights = weights_of(call.features, call.q.shape, q, self.k, rows)
            seen, p = weights.seen, weights.p
            k, v = self.k, self.v
            if seen is not None:
                # What no row of the block sees may be NaN.
                used = seen.any(-2).unsqueeze(-1)
                k, v = k.masked_fill(~used, 0.0), v.masked_fill(~used, 0.0)
            dp = dout @ v.mT
            if weights.dropout is not None:
                dp = dp * weights.dropout
            mean = (p * dp).sum(-1, keepdim=True)
            e = dp - mean
            if dlse is not None:
                e = e + dlse
            yield Block(rows, q, k, v, dout, dlse, weights, p, dp, mean, e)


class _Broadcast:
    """Adds up blocks of a (B, H, Sq, Sk) tensor over the dimensions where bias is 1."""

    def __init__(self, walk: _Walk, bias: Tensor | None) -> None:
        self.walk, self.bias = walk, bias
        self.blocks: list[Tensor] = []

    def add(self, block: Tensor) -> None:
        if self.bias is None:
            return
        block = self.walk.by_head(block)
        sizes = self.bias.shape
        dims = [d for d in range(4) if sizes[d] == 1 and block.shape[d] != 1]
        if dims:
            block = block.sum(dims, keepdim=True)
        if sizes[2] == 1 and self.blocks:
            block = self.blocks.pop() + block
        self.blocks.append(block)

    def whole(self) -> Tensor | None:
        """The sum, in the accumulators' dtype."""
        return torch.cat(self.blocks, 2) if self.blocks else None


def is_empty(call: Call) -> bool:
    """Whether nothing sees anything, so that all derivatives are zero."""
    no_keys = call.k.numel() == 0 and call.features.sink is None
    return call.q.numel() == 0 or no_keys


def _zeros(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor, dtype=dtype)


def _like(tensor: Tensor | None, other: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or other is None else tensor.to(other.dtype)


def forward(
    q: Tensor, k: Tensor, v: Tensor, features: Features
) -> tuple[Tensor, Tensor]:
    """The output (B, H, Sq, Dv) and the log-sum-exp (B, H, Sq).

    In float32 (float64 for float64).
    """
    dtype = _ops.lse_dtype(q.dtype)
    batch, heads, seqlen_q, _ = q.shape
    heads_k, seqlen_k = k.shape[1], k.shape[2]
    out = q.new_zeros((batch, heads, seqlen_q, v.shape[3]), dtype=dtype)
    lse = q.new_full((batch, heads, seqlen_q), float("-inf"), dtype=dtype)
    if q.numel() == 0 or seqlen_k == 0:
        if features.sink is not None:
            lse.copy_(features.sink.to(dtype).reshape(1, -1, 1).expand_as(lse))
        return out, lse
    step = max(1, BLOCK_ELEMENTS // (batch * heads * seqlen_k))
    with torch.autocast(q.device.type, enabled=False):
        k, v = k.to(dtype), v.to(dtype)
        for begin in range(0, seqlen_q, step):
            rows = slice(begin, min(begin + step, seqlen_q))
            block = q[:, :, rows].to(dtype)
            grouped = block.reshape(batch, heads_k, -1, block.shape[3])
            weights = weights_of(features, q.shape, grouped, k, rows)
            p, scores, seen = weights.p, weights.scores, weights.seen
            values = v
            if seen is not None:
                # What no row of the block sees may be NaN.
                values = v.masked_fill(~seen.any(-2).unsqueeze(-1), 0.0)
                scores = scores.masked_fill(~seen, float("-inf"))
            if features.sink is not None:
                column = weights.per_head(features.sink.to(dtype))
                column = column.expand(*scores.shape[:3], 1)
                scores = torch.cat([scores, column], -1)
            if weights.dropout is not None:
                p = p * weights.dropout
            shape = (batch, heads, rows.stop - rows.start)
            out[:, :, rows] = (p @ values).reshape(*shape, -1)
            lse[:, :, rows] = scores.logsumexp(-1).reshape(shape)
    return out, lse


def first_order(call: Call) -> Five:
    """dq, dk, dv, dbias and dsink, shaped like their tensors, None without them.

    In float32 (float64 for float64).
    """
    dtype, features = _ops.lse_dtype(call.q.dtype), call.features
    if is_empty(call):
        inputs = (call.q, call.k, call.v)
        dq, dk, dv = (torch.zeros_like(t, dtype=dtype) for t in inputs)
        return dq, dk, dv, _zeros(features.bias, dtype), _zeros(features.sink)
    with torch.autocast(call.q.device.type, enabled=False):
        walk = _Walk(call)
        dk, dv = torch.zeros_like(walk.k), torch.zeros_like(walk.v)
        dq_blocks, dbias = [], _Broadcast(walk, features.bias)
        dsink = _zeros(features.sink, dtype)
        for block in walk:
            dx = block.p * block.e
            ds = block.capped(dx) * features.scale
            dq_blocks.append(ds @ block.k)
            dk = dk + ds.mT @ block.q
            dv = dv + block.dropped(block.p).mT @ block.dout
            dbias.add(dx)
            if dsink is not None:
                dsink = dsink + _by_sink(walk, block.weights.sink * block.of_lse())
        return walk.whole(dq_blocks, dk), dk, dv, dbias.whole(), dsink


def _by_sink(walk: _Walk, column: Tensor) -> Tensor:
    """(B, Hk, r, 1) added up for each head: (H)."""
    return walk.by_head(column).sum((0, 2, 3))


def second_order(
    call: Call,
    a: Tensor | None,
    b: Tensor | None,
    c: Tensor | None,
    d: Tensor | None = None,
    e: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of <a, dq> + <b, dk> + <c, dv> + <d, dbias> + <e, dsink>.

    a to e are shaped like q, k, v, bias and sink; None is zero. Returns those for
    dout, dlse, q, k, v, bias and sink, None for what is not there.

    With the names above and G = scale (a K^T + Q b^T), H = f'(S) G + d, W = P H,
    w = rowsum(W) + p_s e and U = W - w P:

        for dO   U R V + P R c              for dL   w
        for V    (U R)^T dO
        for P    Z = E H - w dP + R dO c^T    for p_s   z = (dL - m) e
        for X    Y = P (Z - t) with t = rowsum(P Z) + p_s z, which is for bias
        for S    T = f'(S) Y + f''(S) dX G    for sink   p_s (z - t), summed
        for Q    scale (T K + dS b)           for K      scale (T^T Q + dS^T a)
    """
    q, k, v, features = call.q, call.k, call.v, call.features
    if is_empty(call):
        zero_lse = q.new_zeros(q.shape[:3], dtype=_ops.lse_dtype(q.dtype))
        others = (_zeros(t) for t in (q, k, v, features.bias, features.sink))
        return (_zeros(call.dout), zero_lse, *others)
    with torch.autocast(q.device.type, enabled=False):
        walk = _Walk(call)
        scale = features.scale
        for_k, for_v = torch.zeros_like(walk.k), torch.zeros_like(walk.v)
        b, c, d = (None if t is None else t.to(walk.dtype) for t in (b, c, d))
        for_bias = _Broadcast(walk, features.bias)
        for_sink = _zeros(features.sink, walk.dtype)
        dout_blocks, dlse_blocks, q_blocks = [], [], []
        for block in walk:
            p, dx, weights = block.p, block.p * block.e, block.weights
            ds = block.capped(dx)
            g = torch.zeros_like(p)
            if a is not None:
                a_part = walk.part(a, block.rows)
                g = g + a_part @ block.k.mT * scale
                for_k = for_k + ds.mT @ a_part * scale
            if b is not None:
                g = g + block.q @ b.mT * scale
            h = block.capped(g)
            if d is not None:
                h = h + weights.table(d)
            w = (p * h).sum(-1, keepdim=True)
            z = block.e * h
            if e is not None:
                e_part = weights.per_head(e.to(walk.dtype))
                w = w + weights.sink * e_part
            u = block.dropped(p * (h - w))
            z = z - w * block.dp
            for_dout = u @ block.v
            if c is not None:
                z = z + block.dropped(block.dout @ c.mT)
                for_dout = for_dout + block.dropped(p) @ c
            t = (p * z).sum(-1, keepdim=True)
            if for_sink is not None:
                z_sink = torch.zeros_like(t)
                if e is not None:
                    z_sink = block.of_lse() * e_part
                t = t + weights.sink * z_sink
                for_sink = for_sink + _by_sink(walk, weights.sink * (z_sink - t))
            y = p * (z - t)
            for_bias.add(y)
            y = block.capped(y)
            if weights.bend is not None:
                y = y + weights.bend * dx * g
            y = y * scale
            for_q = y @ block.k
            if b is not None:
                for_q = for_q + ds @ b * scale
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
            _like(for_bias.whole(), features.bias),
            for_sink,
        )
