"""flash_attn_varlen_func: sequences of different lengths, packed one after the other.

For the kernels a packed batch is one sequence in which each query has a span of keys.
The spans are made of the offsets by torch ops on the device.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ._attention import attend
from ._check import (
    PACKED,
    check_device,
    check_device_of,
    check_flags,
    check_forms,
    check_kinds,
    check_package,
    check_sizes,
    check_strided,
    check_transforms,
    count,
    dropout_of,
    refuse,
    scale_of,
    slopes_of,
    softcap_of,
    window_of,
)
from ._features import Features
from ._torch import is_dynamo_compiling

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# Offsets whose values have been looked at: the tensor's id -> (the tensor, its version
# then, their last value).
_judged: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}


def _last_offset(name: str, offsets: Tensor) -> int:
    """The last one, after a look at all; waits for the device once per version."""
    key = id(offsets)
    version = None if offsets.is_inference() else offsets._version
    known = _judged.get(key)
    if known is not None and known[0]() is offsets and known[1] == version:
        return known[2]
    values = offsets.tolist()
    if values[0] != 0:
        raise refuse(name, "offsets that begin with 0", values[0])
    for before, after in zip(values, values[1:]):
        if after < before:
            raise refuse(name, "offsets that never decrease", f"{after} after {before}")
    if version is not None:
        known_no_more = weakref.ref(offsets, lambda _: _judged.pop(key, None))
        _judged[key] = (known_no_more, version, values[-1])
    return int(values[-1])


def _check_offsets(name: str, offsets: Any, tokens: Tensor, of: str) -> None:
    """Form of the offsets, and their values where they can be read."""
    if not isinstance(offsets, Tensor):
        raise refuse(name, "a tensor", type(offsets).__name__)
    check_strided(name, offsets)
    if offsets.dtype is not torch.int32:
        raise refuse(name, "dtype torch.int32", offsets.dtype)
    if offsets.dim() != 1 or offsets.size(0) < 1:
        given = f"shape {tuple(offsets.shape)}"
        raise refuse(name, "shape (batch + 1,)", given)
    check_device_of(name, offsets, tokens)
    # Nothing can be read while a graph is made; _ascending makes any values safe.
    if is_dynamo_compiling() or type(offsets) not in (Tensor, Parameter):
        return
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    last = _last_offset(name, offsets)
    if last > tokens.size(0):
        expected = f"offsets up to the {tokens.size(0)} tokens of {of}"
        raise refuse(name, expected, last)


def spans(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    total_q: int,
    total_k: int,
    causal: bool,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """What each query and each key sees, as the ops take it.

    Args:
        cu_seqlens_q, cu_seqlens_k: (batch + 1) int32 offsets.
        total_q, total_k: tokens of q and of k.
        causal: bottom-right of each sequence; right of the window is then 0.
        window: (left, right) keys around a query's own one, -1 is all.

    Returns:
        span_q (total_q, 4): first key, last key, its own key's distance, 0.
        span_k (total_k, 2): first query, last query.
    """
    left, right = window
    if causal:
        right = 0
    # Valid offsets stay as they are; others become something that fits the tensors.
    inside = [cu_seqlens_q.clamp(0, total_q), cu_seqlens_k.clamp(0, total_k)]
    given = torch.stack(inside).cummax(1).values
    # Behind the last offset lies a sequence of no queries and no keys.
    offsets = torch.cat(
        [torch.zeros_like(given[:, :1]), given[:, 1:], given[:, -1:]], 1
    )
    begin_q, begin_k = offsets[:, :-1].unbind()
    end_q, end_k = offsets[:, 1:].unbind()
    before_q, before_k = (offsets - 1)[:, :-1].unbind()
    last_q, last_k = (offsets - 1)[:, 1:].unbind()
    # The last query's own key is the last key: query i's is i + diagonal.
    diagonal = end_k - end_q

    def seen(
        tokens: int,
        ends: Tensor,
        table: list[Tensor],
        sign: int,
        sides: tuple[int, int],
    ) -> list[Tensor]:
        token = torch.arange(tokens, dtype=torch.int32, device=ends.device)
        of = torch.searchsorted(ends, token, right=True)
        diagonal, begin, end, before, last = torch.stack(table, 1)[of].unbind(1)
        own = torch.add(token, diagonal, alpha=sign)
        low, high = sides
        first = torch.clamp(own - low, begin, end) if low >= 0 else begin
        final = torch.clamp(own + high, before, last) if high >= 0 else last
        return [first, final, diagonal, torch.zeros_like(token)]

    keys = [diagonal, begin_k, end_k, before_k, last_k]
    span_q = seen(total_q, end_q[:-1].contiguous(), keys, 1, (left, right))
    queries = [diagonal, begin_q, end_q, before_q, last_q]
    span_k = seen(total_k, end_k[:-1].contiguous(), queries, -1, (right, left))
    return torch.stack(span_q, 1), torch.stack(span_k[:2], 1)


def _slopes_of(slopes: Any, q: Tensor, batch: int) -> Tensor:
    """Slopes of packed sequences, which all have the same."""
    if isinstance(slopes, Tensor) and slopes.dim() == 2 and batch != 1:
        expected = (
            f"shape ({q.size(1)},), the same slopes for all packed sequences (slopes "
            "by sequence: flash_attn_func with a padded batch)"
        )
        raise refuse("alibi_slopes", expected, tuple(slopes.shape))
    return slopes_of(slopes, q)


def _check_longest(name: str, given: Any) -> None:
    """A whole number; that of a tensor is not read, since a GPU would have to wait."""
    if not isinstance(given, Tensor):
        count(name, "a whole number, at least 0", given, 0)
    elif given.dim() or given.dtype not in _WHOLE:
        expected = "a whole number or a 0-d tensor of whole numbers"
        raise refuse(name, expected, f"{given.dtype} {tuple(given.shape)}")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Exact attention of sequences that are packed one after the other.

    Sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] and sees the keys
    cu_seqlens_k[b] to cu_seqlens_k[b + 1]; either may be none. The result is that of
    flash_attn_func for each sequence alone. Differentiable like it.

    Args:
        q: (total_q, nheads, headdim), float16, bfloat16, float32 or float64, headdim
            1 to 256, any strides; as for flash_attn_func.
        k: (total_k, nheads_k, headdim), like q; nheads_k divides nheads.
        v: (total_k, nheads_k, headdim_v), like k; headdim_v 1 to 256.
        cu_seqlens_q: (batch + 1) int32, on q's device: 0, then where each sequence
            ends; never decreasing, at most total_q.
        cu_seqlens_k: (batch + 1), the same for k and v, at most total_k.
        max_seqlen_q, max_seqlen_k: whole numbers, or 0-d tensors of them, which are
            not read; for flash_attn's sake, nothing depends on them.
        dropout_p, softmax_scale, softcap, deterministic: as for flash_attn_func.
        causal: keep key j for query i of a sequence only if j <= i + its keys - its
            queries.
        window_size: (left, right) around that key, both included; -1 is no limit.
        alibi_slopes: (nheads,), float32 (or float64 for float64), the same for all
            sequences. (batch, nheads) is refused for more than one sequence.
        return_attn_probs: also return the row normalisers.

    Returns:
        out: (total_q, nheads, headdim_v), dtype of q. Zero in rows that see no key,
        also behind the last offset; their gradients are zero. With return_attn_probs
        the triple (out, lse, None); lse is (nheads, total_q), as for flash_attn_func.

    Raises:
        FlashAttnError: an argument is not supported or does not fit; the message
            names it, what was expected and what was given. Or the launch failed, in
            the backward too.

    Notes:
        The values of the offsets are looked at once for each tensor and each change
        that torch knows of; on a GPU that waits. Inside of a CUDA graph's capture and
        of torch.compile they are not: there, offsets out of range are clamped.

    Source: FlashAttention-2 (arXiv 2307.08691).
    """
    check_package()
    check_flags(
        causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs
    )
    needs_grad = check_kinds(q=q, k=k, v=v)
    check_forms(q, k, v, PACKED)
    _check_offsets("cu_seqlens_q", cu_seqlens_q, q, "q")
    _check_offsets("cu_seqlens_k", cu_seqlens_k, k, "k")
    if cu_seqlens_q.size(0) != cu_seqlens_k.size(0):
        expected = f"shape ({cu_seqlens_q.size(0)},) (as cu_seqlens_q)"
        raise refuse("cu_seqlens_k", expected, tuple(cu_seqlens_k.shape))
    _check_longest("max_seqlen_q", max_seqlen_q)
    _check_longest("max_seqlen_k", max_seqlen_k)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    check_sizes(q, k, v, needs_grad)
    check_transforms(needs_grad, q=q, k=k, v=v)
    window = window_of("window_size", window_size)
    slopes = None
    if alibi_slopes is not None:
        slopes = _slopes_of(alibi_slopes, q, cu_seqlens_q.size(0) - 1)
    scale = scale_of("softmax_scale", softmax_scale, q.size(3))
    cap = 0.0 if softcap is None else softcap_of(softcap)
    probability = dropout_of(dropout_p)
    check_device(q)
    offsets = (cu_seqlens_q, cu_seqlens_k)
    span_q, span_k = spans(*offsets, q.size(2), k.size(2), bool(causal), window)
    features = Features(
        alibi=slopes,
        span_q=span_q,
        span_k=span_k,
        scale=scale,
        softcap=cap,
        dropout_p=probability,
    )
    out, lse = attend(q, k, v, features, needs_grad, bool(return_attn_probs))
    out = out.squeeze(0).transpose(0, 1)
    return out if lse is None else (out, lse.squeeze(0), None)
