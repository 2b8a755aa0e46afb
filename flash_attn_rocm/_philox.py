"""Which weights dropout keeps, in torch ops: the kernels' bits again, for _chunked.

The mask is a function of seed, offset and the indices of batch, head, query and key
alone, so it can be made anew for any block of queries.

Source: Philox4x32-10, J. K. Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def _words(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The four output words, in int64; counter and key hold 32 bits each."""
    w0, w1, w2, w3 = counter
    key0, key1 = key
    for _ in range(10):
        # A product of 64 bits wraps in int64 and keeps its bits.
        product0, product1 = w0 * _MULTIPLIERS[0], w2 * _MULTIPLIERS[1]
        w0, w1, w2, w3 = (
            ((product1 >> 32) & _LOW) ^ w1 ^ key0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ w3 ^ key1,
            product0 & _LOW,
        )
        key0, key1 = (key0 + _WEYL[0]) & _LOW, (key1 + _WEYL[1]) & _LOW
    return [w0, w1, w2, w3]


def kept(
    seed: Tensor, keep: int, batch: int, heads: int, rows: slice, seqlen_k: int
) -> Tensor:
    """Whether a weight is kept: (batch, heads, rows, seqlen_k), bool.

    Args:
        seed: (2) int64, seed and offset.
        keep: weights kept of 65536.
        rows: the queries, by their indices.

    One call of Philox serves the 8 keys 64 t + 8 n + c of n = 0 to 7.
    """
    device = seed.device
    tiles = (seqlen_k + 63) // 64
    head = torch.arange(batch * heads, device=device).reshape(-1, 1, 1)
    row = torch.arange(rows.start, rows.stop, device=device).reshape(-1, 1)
    call = torch.arange(tiles * 8, device=device)
    offset = seed[1] & _LOW
    counters: Any = torch.broadcast_tensors  # untyped in torch
    words = _words(
        counters(call, row, head, offset), (seed[0] & _LOW, (seed[0] >> 32) & _LOW)
    )
    halves = [words[n // 2] >> 16 * (n % 2) & 0xFFFF for n in range(8)]
    shape = (*halves[0].shape[:2], tiles, 8)
    bits = torch.stack([half.reshape(shape) for half in halves], -2)
    # As signed numbers of 16 bits.
    signed = (bits ^ 0x8000) - 0x8000
    chosen = (signed < keep - 32768).flatten(-3)[..., :seqlen_k]
    return chosen.reshape(batch, heads, -1, seqlen_k)
