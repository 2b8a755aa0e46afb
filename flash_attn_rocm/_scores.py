"""The softmax weights of a block of query rows in torch ops, with every feature.

For _chunked, which differentiates them. Shapes have the query heads of a group side
by side: (B, Hk, r, Sk) with r = rows times heads of a group, so that keys and values
of a group are never repeated.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import _ops
from ._features import KEEP_ALL, Features, keep_of
from ._philox import kept

# The kernels clamp a bias there, so that it can be added to a score.
BIAS_MIN = -(2.0**30)
_UNMASKED = (_ops.CAUSAL_NONE, _ops.CAUSAL_NONE_TOP_LEFT)


class _Layout:
    """Sizes of a call, the rows of a block, and how tables of theirs are read."""

    def __init__(
        self, features: Features, sizes: torch.Size, k: Tensor, rows: slice
    ) -> None:
        self.features, self.rows = features, rows
        self.batch, self.heads, self.seqlen_q, _ = sizes
        self.heads_k, self.seqlen_k = k.shape[1], k.shape[2]
        self.count = rows.stop - rows.start
        self.device = k.device

    def grouped(self, table: Tensor) -> Tensor:
        """(1|B, 1|H, 1|rows, n) to (1|B, Hk, r, n)."""
        batch, _, _, width = table.shape
        table = table.expand(batch, self.heads, self.count, width)
        return table.reshape(batch, self.heads_k, -1, width)

    def table(self, table: Tensor) -> Tensor:
        """Rows of a (1|B, 1|H, 1|Sq, n): (1|B, Hk, r, n)."""
        if table.size(2) != 1:
            table = table[:, :, self.rows]
        return self.grouped(table)

    def per_head(self, numbers: Tensor) -> Tensor:
        """(H) to (1, Hk, r, 1)."""
        return self.grouped(numbers.reshape(1, -1, 1, 1))


@dataclass
class Weights:
    """Weights of a block and what their derivatives need; None: factor 1, or 0."""

    layout: _Layout
    p: Tensor  # (B, Hk, r, Sk)
    seen: Tensor | None  # (1|B, 1|Hk, r, Sk), bool; None: all
    slope: Tensor | None  # f'(S), f''(S) of the softcap
    bend: Tensor | None
    dropout: Tensor | None  # factors of dropout, 0 or 65536 / keep
    sink: Tensor  # (B, Hk, r, 1): the weight of the sink; 0 without one
    scores: Tensor  # (B, Hk, r, Sk): what softmax sees; -inf where not seen

    def table(self, table: Tensor) -> Tensor:
        """A tensor like bias for the rows of the block."""
        return self.layout.table(table)

    def per_head(self, numbers: Tensor) -> Tensor:
        """A tensor like sink for the rows of the block."""
        return self.layout.per_head(numbers)


def _band(layout: _Layout) -> Tensor | None:
    """(rows, Sk): what causal mask, window or spans leave; None: all."""
    features, rows = layout.features, layout.rows
    key = torch.arange(layout.seqlen_k, device=layout.device)
    if features.span_q is not None:
        span = features.span_q[rows]
        return (span[:, :1] <= key) & (key <= span[:, 1:2])
    if (
        features.causal in _UNMASKED
        and max(features.window_left, features.window_right) < 0
    ):
        return None
    first, last = bounds(features, layout.seqlen_q, layout.seqlen_k)
    query = torch.arange(rows.start, rows.stop, device=layout.device).unsqueeze(1)
    seen = key >= query + first
    if features.sink_keys:
        seen = seen | (key < features.sink_keys)
    return seen & (key <= query + last)


def bounds(features: Features, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(a, b): a row i sees keys from i + a to i + b, and sinks before that."""
    left, right = features.window_left, features.window_right
    own = own_key(features, seqlen_q, seqlen_k)
    first = -seqlen_q if left < 0 else own - left
    if features.causal not in _UNMASKED:
        return first, own
    return first, seqlen_k if right < 0 else own + right


def own_key(features: Features, seqlen_q: int, seqlen_k: int) -> int:
    """d, where the own key of query i is i + d."""
    top_left = features.causal in (_ops.CAUSAL_TOP_LEFT, _ops.CAUSAL_NONE_TOP_LEFT)
    return 0 if top_left else seqlen_k - seqlen_q


def _block_lists(layout: _Layout) -> Tensor | None:
    """(1|B, 1|H, rows, Sk): whether the key's block is in the list of the row's."""
    features = layout.features
    if features.blocks is None:
        return None
    block_q, block_k = features.block_q, features.block_k
    first = layout.rows.start // block_q
    last = (layout.rows.stop - 1) // block_q
    lists = features.blocks[:, :, first : last + 1].long()
    count, index = lists[..., :1], lists[..., 1:]
    blocks_k = (layout.seqlen_k + block_k - 1) // block_k
    place = torch.arange(index.size(-1), device=layout.device)
    # What is behind the count goes to a column that is cut off.
    index = index.masked_fill(place >= count, blocks_k)
    listed = torch.zeros(
        (*index.shape[:3], blocks_k + 1), dtype=torch.bool, device=layout.device
    ).scatter(3, index, True)
    row = torch.arange(layout.rows.start, layout.rows.stop, device=layout.device)
    key = torch.arange(layout.seqlen_k, device=layout.device)
    return listed[:, :, row // block_q - first][..., key // block_k]


def _seen(layout: _Layout) -> Tensor | None:
    """(1|B, Hk, r, Sk): which keys a row sees; None: all."""
    features = layout.features
    found = []
    band = _band(layout)
    if band is not None:
        found.append(layout.grouped(band[None, None]))
    lists = _block_lists(layout)
    if lists is not None:
        found.append(layout.grouped(lists))
    if features.mask is not None:
        found.append(layout.table(features.mask))
    if features.bias is not None:
        found.append(layout.table(features.bias != float("-inf")))
    seen = None
    for table in found:
        seen = table if seen is None else seen & table
    if seen is not None and seen.size(-1) != layout.seqlen_k:
        seen = seen.expand(*seen.shape[:3], layout.seqlen_k)
    return seen


def _alibi(layout: _Layout, dtype: torch.dtype) -> Tensor | None:
    """(1|B, Hk, r, Sk): what ALiBi adds to a score."""
    features = layout.features
    if features.alibi is None:
        return None
    rows, device = layout.rows, layout.device
    query = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    if features.span_q is None:
        own = query + own_key(features, layout.seqlen_q, layout.seqlen_k)
    else:
        own = query + features.span_q[rows, 2:3]
    distance = (own - torch.arange(layout.seqlen_k, device=device)).abs()
    slopes = features.alibi.reshape(-1, layout.heads, 1, 1).to(dtype)
    return layout.grouped(-slopes * distance)


def _bias(layout: _Layout, dtype: torch.dtype) -> Tensor | None:
    """(1|B, Hk, r, 1|Sk): the bias, finite where it hides a key."""
    bias = layout.features.bias
    if bias is None:
        return None
    bias = layout.table(bias.to(dtype))
    return bias.masked_fill(bias == float("-inf"), 0.0).clamp(min=BIAS_MIN)


def weights_of(
    features: Features, sizes: torch.Size, q: Tensor, k: Tensor, rows: slice
) -> Weights:
    """The weights of `rows`.

    Args:
        sizes: those of all queries, (B, H, Sq, D).
        q: (B, Hk, r, D), the block's rows of each group of heads.
        k: (B, Hk, Sk, D).
    """
    layout = _Layout(features, sizes, k, rows)
    scores = (q @ k.mT) * features.scale
    slope = bend = None
    if features.softcap:
        t = torch.tanh(scores / features.softcap)
        slope = 1.0 - t * t
        bend = -2.0 / features.softcap * t * slope
        scores = features.softcap * t
    for part in (_alibi(layout, q.dtype), _bias(layout, q.dtype)):
        if part is not None:
            scores = scores + part
    seen = _seen(layout)
    if seen is not None and features.sink is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    elif seen is not None:
        # A row without a key gets finite scores: the derivative of the softmax of
        # nothing but -inf is NaN, even where it counts for 0.
        some = seen.any(-1, keepdim=True)
        scores = scores.masked_fill(~some, 0.0)
        scores = scores.masked_fill(~seen & some, float("-inf"))
    dropout = None
    if features.dropout_p:
        assert features.seed is not None
        keep = keep_of(features.dropout_p)
        chosen = kept(
            features.seed, keep, layout.batch, layout.heads, rows, layout.seqlen_k
        )
        dropout = layout.grouped(chosen).to(q.dtype) * (KEEP_ALL / keep)
    if features.sink is None:
        p = scores.softmax(-1)
        sink = p.new_zeros(())
    else:
        column = layout.per_head(features.sink.to(q.dtype)).expand(*q.shape[:3], 1)
        both = torch.cat([scores, column], -1).softmax(-1)
        p, sink = both[..., :-1], both[..., -1:]
    if seen is not None:
        p = p.masked_fill(~seen, 0.0)
    return Weights(layout, p, seen, slope, bend, dropout, sink, scores)
