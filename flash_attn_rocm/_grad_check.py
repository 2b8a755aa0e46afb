"""patch(check_grads=...): are the float16 gradients of fused backwards finite?

Nothing is changed: an infinite gradient of a float16 leaf stays, because GradScaler
must see it.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from ._errors import FlashAttnError
from ._torch import functorch_active

MODES = ("off", "count", "raise")
NAMES = ("q", "k", "v", "bias")


class _State:
    """The mode, and counts that stay on their device until somebody asks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.mode = "off"
        self.counts: dict[tuple[str, torch.device], Tensor] = {}


_state = _State()


def mode() -> str:
    """What is in force: "off", "count" or "raise"."""
    return _state.mode


def set_mode(wanted: str) -> None:
    """Put `wanted` in force, or raise FlashAttnError."""
    if wanted not in MODES:
        expected = ", ".join(map(repr, MODES))
        raise FlashAttnError(f"check_grads: expected one of {expected}, got {wanted!r}")
    _state.mode = wanted


def counts() -> dict[str, int]:
    """Non-finite gradients so far, by tensor; waits for the devices."""
    with _state.lock:
        found = [(name, count) for (name, _), count in _state.counts.items()]
    made = dict.fromkeys(NAMES, 0)
    for name, count in found:
        made[name] += int(count)
    return made


def reset() -> None:
    """Start counting at zero."""
    with _state.lock:
        _state.counts.clear()


def check_gradients(gradients: Iterable[Tensor | None]) -> None:
    """Count or refuse the non-finite float16 numbers in dq, dk, dv and dbias."""
    if _state.mode == "off":
        return
    for name, gradient in zip(NAMES, gradients):
        if gradient is None or gradient.dtype is not torch.float16:
            continue
        # A batch of gradients (vmap) has no number that could be read, and a
        # graph that is being captured none that could be kept.
        if functorch_active() or (
            gradient.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            continue
        bad = gradient.numel() - gradient.isfinite().sum()
        with _state.lock:
            key = (name, gradient.device)
            before = _state.counts.get(key)
            _state.counts[key] = bad if before is None else before + bad
        if _state.mode == "raise" and int(bad):
            raise FlashAttnError(
                f"{name}: expected a finite gradient, got {int(bad)} of "
                f"{gradient.numel()} numbers that are infinite or NaN"
            )
