"""flash_attn_func with the names, order and layout of flash_attn 2.x.

What is not supported is refused by name, before anything is launched.

Source: FlashAttention-2 (arXiv 2307.08691).

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from torch import Tensor

from . import _ops
from ._attention import attend
from ._check import (
    BSHD,
    check_device,
    check_flags,
    check_forms,
    check_kinds,
    check_package,
    check_sizes,
    check_transforms,
    dropout_of,
    scale_of,
    slopes_of,
    softcap_of,
    window_of,
)
from ._features import Features


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Exact attention, softmax(scale * Q K^T) V, without storing the scores.

    Differentiable, also twice. The gradients have the dtype of their tensor and
    repeat bit by bit; a second derivative is computed by torch ops, more slowly and
    for a block of queries at a time. Bias, masks and sinks: attention().

    Args:
        q: (batch, seqlen_q, nheads, headdim), float16, bfloat16, float32 or float64,
            headdim 1 to 256, on a GPU that runs these kernels, or on the CPU inside
            simulate(). Dimensions may have any strides; nothing is copied.
        k: (batch, seqlen_k, nheads_k, headdim), like q. nheads_k divides nheads;
            query head h reads key head h // (nheads // nheads_k).
        v: (batch, seqlen_k, nheads_k, headdim_v), like k; headdim_v 1 to 256.
        dropout_p: probability, 0 <= p < 1, that a weight becomes 0; the others are
            multiplied by 1 / (1 - p). In steps of 1/65536; below 8e-6 nothing is
            dropped. Follows torch.manual_seed; the backward has the same mask.
        softmax_scale: factor on the scores before softmax, no unit, of magnitude
            below 2^127. Default 1 / sqrt(headdim).
        causal: keep key j for query i only if j <= i + seqlen_k - seqlen_q.
            For 2 queries and 4 keys the mask is 1 1 1 0 / 1 1 1 1.
        window_size: (left, right): keep key j for query i only if
            -left <= j - (i + seqlen_k - seqlen_q) <= right; -1 is no limit. A causal
            mask makes right 0.
        softcap: c from 2^-120 to 2^120 makes scores c tanh(s / c), also with dropout;
            0.0 or None is none.
        alibi_slopes: (nheads,) or (batch, nheads), float32 (or float64 for float64);
            scores get -slope * |i + seqlen_k - seqlen_q - j|, also with a causal mask.
            Slopes that require a gradient are refused, since they get none.
        deterministic: no effect; results always repeat bit by bit.
        return_attn_probs: also return the row normalisers.

    Returns:
        out: (batch, seqlen_q, nheads, headdim_v), dtype of q. A row that sees no key
        is zero, and so are its gradients. With return_attn_probs the triple
        (out, lse, None); lse is (batch, nheads, seqlen_q), float32 (float64 for
        float64), the natural log of the row sums before dropout, -inf for a row that
        sees no key. It is differentiable too, unlike that of flash_attn 2.x. The
        third is flash_attn's table for tests of dropout: always None, also with
        dropout, because no table of that size is ever made.

    Raises:
        FlashAttnError: an argument is not supported or does not fit; the message
            names it, what was expected and what was given. Or the launch failed, in
            the backward too.

    Notes:
        Autocast changes nothing, as with flash_attn 2.x.

    Source: FlashAttention-2 (arXiv 2307.08691).
    """
    check_package()
    check_flags(
        causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs
    )
    needs_grad = check_kinds(q=q, k=k, v=v)
    check_forms(q, k, v, BSHD)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    check_sizes(q, k, v, needs_grad)
    check_transforms(needs_grad, q=q, k=k, v=v)
    left, right = window_of("window_size", window_size)
    features = Features(
        alibi=None if alibi_slopes is None else slopes_of(alibi_slopes, q),
        scale=scale_of("softmax_scale", softmax_scale, q.size(3)),
        softcap=0.0 if softcap is None else softcap_of(softcap),
        dropout_p=dropout_of(dropout_p),
        causal=_ops.CAUSAL_BOTTOM_RIGHT if causal else _ops.CAUSAL_NONE,
        window_left=left,
        window_right=right,
    )
    check_device(q)
    out, lse = attend(q, k, v, features, needs_grad, bool(return_attn_probs))
    out = out.transpose(1, 2)
    return out if lse is None else (out, lse, None)
