"""What a call may want beside q, k and v, as the ops take it.

One NamedTuple goes from the functions that users call to the ops. Whoever fills it
has checked it: see _attention, _flash_attn, _varlen and _eligibility.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

# Longer than any sequence, so a window of it is open. An int32 holds sums of two.
WINDOW_MAX = 2**30
KEEP_ALL = 65536


class Features(NamedTuple):
    """The arguments _FEATURES of the ops, in their order; None: absent.

    Sq, Sk are the lengths of queries and keys, "1|B" a dimension of size 1 or B.
    """

    bias: Tensor | None = None  # (1|B, 1|H, 1|Sq, 1|Sk), q's dtype or that of lse
    mask: Tensor | None = None  # likewise, bool; False is not seen
    alibi: Tensor | None = None  # (H) or (B, H), dtype of lse, contiguous
    sink: Tensor | None = None  # (H), dtype of lse, contiguous
    seed: Tensor | None = None  # (2) int64: dropout's seed and offset
    span_q: Tensor | None = None  # (Sq, 4) int32: from, to, diagonal, 0
    span_k: Tensor | None = None  # (Sk, 2) int32: from, to
    blocks: Tensor | None = None  # (1|B, 1|H, query blocks, 1 + n) int32
    blocks_t: Tensor | None = None  # (1|B, 1|H, key blocks, 1 + n) int32
    scale: float = 1.0
    softcap: float = 0.0  # 0: none
    dropout_p: float = 0.0
    causal: int = 0  # CAUSAL_* of _ops
    window_left: int = -1  # keys before a query's own that it sees; -1: all
    window_right: int = -1  # and behind it
    sink_keys: int = 0  # first keys that a window never hides
    block_q: int = 0  # rows of a query block; 0 without blocks
    block_k: int = 0  # keys of a key block

    def op_args(self, none: Tensor) -> tuple[Any, ...]:
        """The arguments; `none`, without elements, stands for what is absent."""
        return tuple([none if value is None else value for value in self])

    def drops(self) -> bool:
        """Whether weights are dropped."""
        return self.dropout_p != 0.0

    def seeded(self, seed: Tensor | None) -> Features:
        """The same with a seed."""
        return features_of((*self[:SEED], seed, *self[SEED + 1 : TENSORS]), self)


TENSORS, NUMBERS = 9, 9  # fields that are tensors, the first ones, and others
BIAS, SINK, SEED = 0, 3, 4  # the places of some


def features_of(tensors: Any, numbers: Any) -> Features:
    """Features of their tensors and their numbers, or of the numbers of others."""
    make: Any = Features
    made: Features = make(*tensors, *numbers[-NUMBERS:])
    return made


def keep_of(dropout_p: float) -> int:
    """How many of 65536 weights dropout keeps; KEEP_ALL: it drops nothing.

    The kernels compare 16 random bits, so p is exact to 8e-6.
    """
    return max(1, round((1.0 - dropout_p) * KEEP_ALL))
