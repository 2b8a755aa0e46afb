"""FLASH_ATTN_ROCM_VERIFY=1/N: one fused result in N is compared with torch's math.

A block of query rows of all heads is computed again in float64, and of a backward all
of a small call or one head of a large one; each element has to lie within a bound on
what rounding can do, a wide one. A kernel that passes its tests and still gives a wrong
number on a card is the card's fault, or the compiler's: its breaker opens, and the
stock function answers the call. Calls with a NaN or infinity in them are left to the
stock function too, and counted. So are results that pass unchecked: for want of memory,
or since scores are too large for a promise.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any, Callable

import torch
from torch import Tensor

from . import _arguments, _ops
from ._config import config
from ._errors import LaunchFailure
from ._features import TENSORS, Features
from ._guard import trip
from ._reason import Reason
from ._scores import weights_of

# Elements of scores that one check computes, and rows that it looks at however long
# they are.
_ELEMENTS = 2**20
_ROWS = 16
# Scores of a call, or of one of its heads, whose dK and dV are computed again.
_WHOLE = 2**22
_MARGIN = 8.0
# Weights and results of 16-bit types are rounded to them; scores are of float32.
_ULP = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-23,
    torch.float64: 2.0**-52,
}
# Weights below this may be 0, since the largest of a row is 1.
_LOST = {
    torch.float16: 2.0**-24,
    torch.bfloat16: 2.0**-24,
    torch.float32: 2.0**-126,
    torch.float64: 2.0**-1000,
}
# Scores of which nothing is promised: near the end of the arithmetic's range, and where
# gradients are less exact than math's (docs/accuracy.md).
_BEYOND = {
    torch.float16: 2.0**100,
    torch.bfloat16: 2.0**100,
    torch.float32: 2.0**100,
    torch.float64: 2.0**900,
}
_BEYOND_GRADIENTS = 2.0**20


class Rejected(LaunchFailure):
    """A fused result was not delivered; `reason` says why."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class _Beyond(Exception):
    """Nothing is promised of results of such scores."""


class _State:
    """How often, and what came of it."""

    def __init__(self) -> None:
        self.every = config.verify
        self.calls = itertools.count()
        self.choice = random.Random(0)  # of rows; not torch's generator, nor Python's
        self.checked = self.unchecked = self.mismatches = self.nonfinite = 0


_state = _State()


def set_every(every: int) -> None:
    """Check one call in `every` from now on; 0 none.

    Raises:
        FlashAttnError: it is no whole number of at least 0.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise _arguments.refused("every", "a whole number of at least 0", every)
    _state.every = every


def verify_status() -> dict[str, int]:
    """status()["verify"]."""
    return {
        "every": _state.every,
        "checked": _state.checked,
        "unchecked": _state.unchecked,
        "mismatches": _state.mismatches,
        "nonfinite_inputs": _state.nonfinite,
    }


def is_due(q: Tensor) -> bool:
    """Whether this call is one to be checked; never inside a graph capture."""
    every = _state.every
    due = every != 0 and next(_state.calls) % every == 0
    return due and not (q.is_cuda and torch.cuda.is_current_stream_capturing())


def _rows_of(q: Tensor, k: Tensor) -> slice:
    """A block of rows, of a size that keeps the check small."""
    batch, heads, seqlen_q, _ = q.shape
    row = max(batch * heads * k.size(2), 1)
    count = min(seqlen_q, max(_ROWS, _ELEMENTS // row))
    begin = _state.choice.randint(0, seqlen_q - count)
    return slice(begin, begin + count)


def _all_rows(q: Tensor, k: Tensor) -> list[slice] | None:
    """All rows in blocks; None if those are too many scores."""
    batch, heads, seqlen_q, _ = q.shape
    row = max(batch * heads * k.size(2), 1)
    if seqlen_q * row > _WHOLE:
        return None
    step = max(1, _ELEMENTS // row)
    return [slice(at, min(at + step, seqlen_q)) for at in range(0, seqlen_q, step)]


def _by_group(tensor: Tensor, rows: slice, heads_k: int) -> Tensor:
    """Rows of a (B, H, Sq, n) as (B, Hk, r, n), in float64."""
    block = tensor[:, :, rows].double()
    return block.reshape(block.size(0), heads_k, -1, block.size(3))


class _Block:
    """The reference for a block of rows."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, features: Features, rows: slice
    ) -> None:
        self.rows, self.heads_k = rows, k.size(1)
        self.q, self.k, self.v = self.of(q), k.double(), v.double()
        self.weights = weights_of(features, q.shape, self.q, self.k, rows)
        self.p, self.dropout = self.weights.p, self.weights.dropout
        # An error of a score is one of its weight: relative, by so many units.
        norms = self.q.norm(dim=-1, keepdim=True) * self.k.norm(dim=-1).amax(
            -1, keepdim=True
        ).unsqueeze(-1)
        # Biases, slopes and a sink may add more; a weight is exp(score - the largest).
        scores = self.weights.scores.abs()
        scores = scores.masked_fill(scores.isinf(), 0.0)
        if features.sink is not None:
            scores = scores + self.weights.per_head(features.sink.double()).abs()
        self.largest = float(scores.max()) + abs(features.scale) * float(norms.max())
        most = scores.amax(-1, keepdim=True)
        ulp = 2.0**-52 if q.dtype is torch.float64 else 2.0**-23
        # What rounding does to a weight in the arithmetic of sums, which dbias and
        # dsink are made in, to that of a sink, and to a weight of q's dtype.
        unit = ulp * (1.0 + abs(features.scale) * norms + most)
        lost = _LOST[_ops.lse_dtype(q.dtype)]
        self.of_wide_p = (unit + ulp * scores) * self.p + lost
        self.of_sink = unit * self.weights.sink + lost
        self.of_p = self.of_wide_p + _ULP[q.dtype] * self.p + _LOST[q.dtype]

    def of(self, tensor: Tensor) -> Tensor:
        return _by_group(tensor, self.rows, self.heads_k)

    def dropped(self, tensor: Tensor) -> Tensor:
        return tensor if self.dropout is None else tensor * self.dropout


def _tiny(dtype: torch.dtype) -> float:
    """What is lost below the smallest numbers of a dtype."""
    return float(torch.finfo(dtype).smallest_normal) * 2.0**-8 + 2.0**-24 * (
        dtype is torch.float16
    )


def _differs(got: Tensor, want: Tensor, size: Tensor) -> bool:
    """Whether an element is off by more than rounding can do, which is like `size`."""
    bound = _MARGIN * size + _tiny(got.dtype)
    largest = torch.finfo(got.dtype).max
    beyond = want.abs() + bound > largest  # rounding may or may not overflow
    wrong = ~((got.double() - want).abs() <= bound) & ~beyond
    return bool(wrong.any())


def _all_finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _are_ordinary(q: Tensor, k: Tensor, v: Tensor, features: Features) -> bool:
    """Whether no NaN or infinity is in them, but for a -inf that hides a key."""
    hiding = [t for t in (features.bias, features.sink) if t is not None]
    slopes = [] if features.alibi is None else [features.alibi]
    return _all_finite(q, k, v, *slopes) and not any(
        bool((torch.isnan(t) | torch.isposinf(t)).any()) for t in hiding
    )


def _refuse(what: str, q: Tensor) -> None:
    from ._record import last_record

    _state.checked += 1
    _state.mismatches += 1
    record = last_record()
    text = f"{what} of {tuple(q.shape)} differs from torch's math"
    if record is not None and record[0] != "sdpa":
        backend, kernels, index = (
            record[0],
            record[1],
            q.get_device() if q.is_cuda else 0,
        )
        device = "sim" if backend == "sim" else f"{backend}:{index}"
        for kernel in kernels.split("+"):
            trip(device, kernel, text)
    raise Rejected(Reason.VERIFY, text)


def _is_served(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return bool(q.numel() and k.numel() and v.numel())


def _as_far_as_possible(check: Callable[..., None]) -> Callable[..., None]:
    """A check that cannot compare, for its scores or memory, lets pass and counts."""

    @functools.wraps(check)
    def checked(*args: Any) -> None:
        try:
            with torch.no_grad():
                check(*args)
        except (_Beyond, torch.cuda.OutOfMemoryError):
            _state.unchecked += 1

    return checked


@_as_far_as_possible
def check_forward(
    q: Tensor, k: Tensor, v: Tensor, features: Features, out: Tensor
) -> None:
    """Compare a block of rows of `out`.

    Raises:
        Rejected: it is wrong, or the inputs are not finite.
    """
    if not _is_served(q, k, v):
        return
    if not _are_ordinary(q, k, v, features):
        _state.nonfinite += 1
        raise Rejected(Reason.NONFINITE, "an input has a NaN or an infinity")
    block = _Block(q, k, v, features, _rows_of(q, k))
    if block.largest > _BEYOND[q.dtype]:
        raise _Beyond
    p = block.dropped(block.p)
    got = block.of(out).to(out.dtype)
    if _differs(got, p @ block.v, block.dropped(block.of_p) @ block.v.abs()):
        _refuse("the output", q)
    _state.checked += 1


def _one_head(
    tensors: list[Tensor | None], heads_k: int, features: Features
) -> list[Tensor | None]:
    """The same of one batch and head of keys, where features allow to cut them out."""
    if any(t is not None for t in features[:TENSORS]) or features.dropout_p:
        return tensors
    first = next(t for t in tensors if t is not None)
    batch, head = (_state.choice.randrange(n) for n in (first.size(0), heads_k))
    cut: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is not None:
            group = tensor.size(1) // heads_k
            heads = slice(head * group, (head + 1) * group)
            tensor = tensor[batch : batch + 1, heads]
        cut.append(tensor)
    return cut


@_as_far_as_possible
def check_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    dout: Tensor,
    dlse: Tensor | None,
    grads: tuple[Tensor | None, ...],
) -> None:
    """Compare dQ, dK, dV, dbias and dsink, as far as they are there.

    All of a call of at most 4 million scores; else of one head, if that has no more
    and nothing but causal mask and window; else a block of rows of dQ.

    Raises:
        Rejected: one is wrong.
    """
    if not _is_served(q, k, v) or not _are_ordinary(q, k, v, features):
        return
    if not _all_finite(dout) or (dlse is not None and not _all_finite(dlse)):
        return
    parts: list[Any] = [q, k, v, dout, dlse, *grads[:3]]
    if _all_rows(q, k) is None:
        parts = _one_head(parts, k.size(1), features)
    q, k, v, dout, dlse, dq, dk, dv = parts
    rows = _all_rows(q, k)
    sums = [
        _Sum("dk", dk, k),
        _Sum("dv", dv, v),
        _Sum("dbias", grads[3], features.bias),
        _Sum("dsink", grads[4], features.sink),
    ]
    of_k, of_v, of_bias, of_sink = sums
    scale = features.scale
    for some in [_rows_of(q, k)] if rows is None else rows:
        block = _Block(q, k, v, features, some)
        if block.largest > _BEYOND_GRADIENTS:
            raise _Beyond
        do = block.of(dout)
        of_scores = _score_gradients(block, do, dlse, q.dtype in _ops.HALVES)
        ds, size = scale * of_scores.ds, abs(scale) * of_scores.of_ds
        if dq is not None and _differs(
            block.of(dq).to(dq.dtype), ds @ block.k, size @ block.k.abs()
        ):
            _refuse("dq", q)
        of_k.add(ds.mT @ block.q, size.mT @ block.q.abs())
        of_v.add(
            block.dropped(block.p).mT @ do, block.dropped(block.of_p).mT @ do.abs()
        )
        by_query = (q.size(0), q.size(1), some.stop - some.start, -1)
        of_bias.add(
            of_scores.dx.reshape(by_query), of_scores.of_dx.reshape(by_query), some
        )
        of_sink.add(
            of_scores.dsink.reshape(by_query).sum((0, 2, 3)),
            of_scores.of_dsink.reshape(by_query).sum((0, 2, 3)),
        )
    for result in sums if rows is not None else ():
        if result.differs():
            _refuse(result.name, q)
    _state.checked += 1


class _Sum:
    """A gradient that every block of rows adds to; None is not looked at."""

    def __init__(self, name: str, got: Tensor | None, like: Tensor | None) -> None:
        self.name, self.got = name, got
        if got is not None:
            assert like is not None
            self.want = torch.zeros_like(like, dtype=torch.float64)
            self.size = torch.zeros_like(self.want)

    def add(self, want: Tensor, size: Tensor, rows: slice | None = None) -> None:
        """Add a block, of some rows, and what its rounding is relative to."""
        if self.got is None:
            return
        for total, block in ((self.want, want), (self.size, size)):
            if rows is not None and total.size(2) != 1:
                total = total[:, :, rows]
            total += block.sum_to_size(total.shape)

    def differs(self) -> bool:
        if self.got is None:
            return False
        size = self.size + _ULP[self.got.dtype] * self.want.abs()  # its own rounding
        return _differs(self.got, self.want, size)


@dataclasses.dataclass
class _ScoreGradients:
    """Of a block; of_...: what the rounding of each is relative to."""

    dx: Tensor  # (B, Hk, r, Sk), of scores behind softcap and bias
    of_dx: Tensor
    ds: Tensor  # (B, Hk, r, Sk), before the softcap
    of_ds: Tensor
    dsink: Tensor  # (B, Hk, r, 1), or of a sink that is not there
    of_dsink: Tensor


def _score_gradients(
    block: _Block, do: Tensor, dlse: Tensor | None, halves: bool
) -> _ScoreGradients:
    p, sink = block.p, block.weights.sink
    dp = block.dropped(do @ block.v.mT)
    size = block.dropped(do.abs() @ block.v.abs().mT)
    of_sum = -(p * dp).sum(-1, keepdim=True)
    of_sum_size = (p * size).sum(-1, keepdim=True)
    of_sum_error = (block.of_wide_p * size).sum(-1, keepdim=True)
    if dlse is not None:
        of_lse = block.of(dlse.unsqueeze(-1))
        of_sum, of_sum_size = of_sum + of_lse, of_sum_size + of_lse.abs()
    dx = p * (dp + of_sum)
    size = size + of_sum_size
    of_dx, ds, of_ds = block.of_wide_p * size, dx, block.of_p * size
    if block.weights.slope is not None:
        # 1 - t^2 of the softcap cancels where it is saturated.
        of_ds = of_ds + dx.abs() * 2.0**-20
        ds = dx * block.weights.slope
    if halves:
        # dS goes through fp16, scaled to the largest of its tile.
        of_ds = of_ds + 2.0**-22 * ds.abs().amax((-2, -1), keepdim=True)
    of_dsink = block.of_sink * of_sum_size + sink * of_sum_error
    return _ScoreGradients(dx, of_dx, ds, of_ds, sink * of_sum, of_dsink)
