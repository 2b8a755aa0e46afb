"""How much of the scores a call visits, counted in tiles of 128 queries by 64 keys.

Computed from what the call asked for and only when somebody asks, not measured: the
tiles that its causal mask, window, spans and lists of blocks leave, whatever tiles the
kernel that ran has. Masks and biases leave out nothing, since kernels must read them.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._features import TENSORS, Features, features_of
from ._scores import bounds

ROWS, KEYS = 128, 64


class Geometry(NamedTuple):
    """What of a call decides it."""

    sizes_q: tuple[int, ...]  # (B, H, Sq, D)
    sizes_k: tuple[int, ...]  # (B, Hk, Sk, D)
    span_q: Tensor | None
    blocks: Tensor | None
    numbers: tuple[Any, ...]  # those of Features


def without_tables(
    features: Features,
) -> tuple[Tensor | None, Tensor | None, tuple[Any, ...]]:
    """The last fields of a Geometry; they keep no mask and no bias alive."""
    return features.span_q, features.blocks, features[TENSORS:]


def _ranges(features: Features, length: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """First and last key that some row of each tile of rows sees, without sinks."""
    first_row = torch.arange(0, length, ROWS)
    last_row = (first_row + ROWS - 1).clamp(max=length - 1)
    if features.span_q is not None:
        span = features.span_q.cpu().long()
        return span[first_row, 0], span[last_row, 1]
    first, last = bounds(features, length, seqlen_k)
    return (first_row + first).clamp(min=0), last_row + last


def tiles(geometry: Geometry) -> int:
    """Tiles of all batches and heads; waits for the device where lists lie on one."""
    sizes_q, sizes_k, span_q, blocks, numbers = geometry
    none = (None,) * (TENSORS - 4)
    features = features_of((*none, span_q, None, blocks, None), numbers)
    batch, heads, length, _ = sizes_q
    seqlen_k = sizes_k[2]
    if not batch * heads * length * seqlen_k:
        return 0
    first, last = _ranges(features, length, seqlen_k)
    last = last.clamp(max=seqlen_k - 1)
    some = first <= last
    begin, end = first // KEYS, last // KEYS
    sinks = -(-min(features.sink_keys, seqlen_k) // KEYS)
    if features.blocks is None:
        count = torch.where(some, end - begin + 1, 0)
        # Those of sinks that are not among them; a row sees no sink behind `last`.
        front = torch.where(some, begin, end + 1).clamp(min=0)
        count = count + front.clamp(max=sinks)
        return int(count.sum()) * batch * heads
    lists = features.blocks.cpu().long()
    tile = torch.arange(first.numel()).unsqueeze(1)
    rows = lists[:, :, torch.arange(first.numel()) * ROWS // features.block_q]
    place = torch.arange(lists.size(3) - 1)
    used = place < rows[..., :1]
    per_block = features.block_k // KEYS
    left = rows[..., 1:] * per_block
    right = (left + per_block - 1).clamp(max=(seqlen_k - 1) // KEYS)
    seen = _overlap(left, right, begin[tile], end[tile]) * some[tile]
    if sinks:
        stop = torch.where(some, begin - 1, end)[tile].clamp(max=sinks - 1)
        seen = seen + _overlap(left, right, torch.zeros_like(stop), stop)
    copies = (batch // lists.size(0)) * (heads // lists.size(1))
    return int((seen * used).sum()) * copies


def _overlap(left: Tensor, right: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Whole numbers in both [left, right] and [begin, end]."""
    common = torch.minimum(right, end) - torch.maximum(left, begin) + 1
    return common.clamp(min=0)
