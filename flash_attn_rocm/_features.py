"""What attention may have beside q, k and v, as one value.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Features(NamedTuple):
    """The arguments that every op has after its own tensors, in their order.

    None is an absent tensor. Shapes and meanings are in csrc/fa.h.
    """

    bias: Tensor | None
    mask: Tensor | None
    alibi: Tensor | None
    sink: Tensor | None
    seed: Tensor | None
    span_q: Tensor | None
    span_k: Tensor | None
    blocks: Tensor | None
    blocks_t: Tensor | None
    scale: float
    softcap: float = 0.0
    dropout_p: float = 0.0
    causal: int = 0
    window_left: int = -1
    window_right: int = -1
    sink_keys: int = 0
    block_q: int = 0
    block_k: int = 0

    def op_args(self, none: Tensor) -> tuple[Any, ...]:
        """For the ops; `none`, without elements, stands for what is absent."""
        return tuple(none if value is None else value for value in self)
