"""attention(): every feature of the kernels in PyTorch's layout, under one name.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from . import _ops
from ._autograd import attention as _differentiable
from ._blocks import BlockMask
from ._check import (
    BHSD,
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
from ._errors import FlashAttnError, LaunchFailure
from ._features import Features
from ._record import keep_geometry
from ._torch import is_dynamo_compiling

_CAUSAL = {
    False: _ops.CAUSAL_NONE,
    "top_left": _ops.CAUSAL_TOP_LEFT,
    "bottom_right": _ops.CAUSAL_BOTTOM_RIGHT,
}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    needs_grad: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of q, k and v in the ops' layout; lse is None if nobody wants it.

    Raises:
        FlashAttnError: the launch failed. Running out of memory is passed on.
    """
    options: Any = {"needs_grad": needs_grad, "with_lse": with_lse, "strict": True}
    if is_dynamo_compiling():
        made = _differentiable(q, k, v, features, **options)
    else:
        try:
            made = _differentiable(q, k, v, features, **options)
        except LaunchFailure as failure:
            if isinstance(failure.__cause__, torch.cuda.OutOfMemoryError):
                raise failure.__cause__ from None
            raise FlashAttnError(str(failure)) from failure.__cause__
        keep_geometry(q, k, features)
    return made if with_lse else (made, None)


def _table(name: str, table: Tensor, q: Tensor, seqlen_k: int) -> Tensor:
    """A bias or mask as (1|B, 1|H, 1|Sq, 1|Sk)."""
    check_strided(name, table)
    check_device_of(name, table, q)
    sizes = (*q.shape[:3], seqlen_k)
    shape = tuple(table.shape)
    full = (1,) * (4 - len(shape)) + shape
    fits = 2 <= len(shape) <= 4 and all(
        one in (1, size) for one, size in zip(full, sizes)
    )
    if not fits:
        expected = f"2 to 4 dimensions that broadcast to {sizes}"
        raise refuse(name, expected, f"shape {shape}")
    for _ in range(4 - len(shape)):
        table = table.unsqueeze(0)
    return table


def _bias_of(bias: Tensor, q: Tensor, seqlen_k: int) -> Tensor:
    dtype = _ops.lse_dtype(q.dtype)
    if bias.dtype is not q.dtype and bias.dtype is not dtype:
        words = f"dtype {q.dtype}" + ("" if dtype is q.dtype else f" or {dtype}")
        raise refuse("bias", words, bias.dtype)
    return _table("bias", bias, q, seqlen_k)


def _mask_of(mask: Any, q: Tensor, seqlen_k: int) -> Tensor:
    if not isinstance(mask, Tensor):
        raise refuse("mask", "None or a tensor", type(mask).__name__)
    if mask.dtype is not torch.bool:
        expected = "dtype torch.bool (what is added to the scores is `bias`)"
        raise refuse("mask", expected, mask.dtype)
    return _table("mask", mask, q, seqlen_k)


def _sink_of(sink: Tensor, q: Tensor) -> Tensor:
    check_strided("sink", sink)
    check_device_of("sink", sink, q)
    if tuple(sink.shape) != (q.size(1),):
        raise refuse("sink", f"shape ({q.size(1)},)", tuple(sink.shape))
    if sink.dtype not in _ops.DTYPES:
        raise refuse("sink", "a floating-point dtype of q's kinds", sink.dtype)
    return sink.to(_ops.lse_dtype(q.dtype)).contiguous()


def _check_blocks(mask: Any, q: Tensor, seqlen_k: int) -> None:
    if not isinstance(mask, BlockMask):
        expected = "None or a BlockMask (of FlexAttention's: BlockMask.from_flex)"
        raise refuse("block_mask", expected, type(mask).__name__)
    check_device_of("block_mask", mask.blocks, q)
    batch, heads, blocks_q, _ = mask.blocks.shape
    blocks_k = mask.blocks_t.size(2)
    if batch not in (1, q.size(0)) or heads not in (1, q.size(1)):
        expected = f"lists for {q.size(0)} batches and {q.size(1)} heads, or 1"
        raise refuse("block_mask", expected, f"{batch} and {heads}")
    for what, length, size, blocks in (
        ("queries", q.size(2), mask.block_q, blocks_q),
        ("keys", seqlen_k, mask.block_k, blocks_k),
    ):
        if (length + size - 1) // size != blocks:
            needed = (length + size - 1) // size
            expected = f"{needed} blocks of {size} for {length} {what}"
            raise refuse("block_mask", expected, blocks)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: Literal[False, "top_left", "bottom_right"] = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    sink_keys: int = 0,
    dropout_p: float = 0.0,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention with everything that the kernels can do, in any combination.

    The score of query i and key j is, in this order, x = scale * q.k; softcap *
    tanh(x / softcap); minus slope * |i + d - j|; plus bias. What the query does not
    see gets -inf. Then softmax over the keys, and with `sink` over one key more;
    dropout of the weights; the sum of their values. The own key of query i is i + d,
    with d = 0 for causal="top_left" and d = Sk - Sq otherwise.

    Differentiable in q, k, v, bias and sink, also twice. Gradients have the dtype and
    the shape of their tensor and repeat bit by bit; a second derivative is computed
    by torch ops, more slowly and for a block of queries at a time. Nothing of size
    Sq x Sk is allocated but the gradient of a bias of that size.

    Args:
        q: (B, H, Sq, D), float16, bfloat16, float32 or float64, D 1 to 256, on a GPU
            that runs these kernels, or on the CPU inside simulate(). Any strides.
        k: (B, Hk, Sk, D), like q. Query head h reads key head h // (H / Hk).
        v: (B, Hk, Sk, Dv), like k; Dv 1 to 256.
        bias: added to the scores; 2 to 4 dimensions that broadcast to (B, H, Sq, Sk),
            q's dtype or float32 (float64 for float64), any strides. -inf hides a key.
            Its gradient is summed where it is broadcast. That of an expanded bias
            has the expanded size: leave a dimension at size 1 instead.
        mask: bool, of such a shape too; False hides a key.
        causal: False; "top_left": query i sees keys j <= i, as in torch's
            scaled_dot_product_attention; "bottom_right": j <= i + Sk - Sq, as in
            flash_attn. They differ unless Sq = Sk, so True is refused.
        window: (left, right): keys from i + d - left to i + d + right, both included,
            -1 is all. With a causal mask none behind the own key.
        softcap: c from 2^-120 to 2^120 makes scores c tanh(x / c); 0.0 is none.
        alibi_slopes: (H,) or (B, H), float32 (or float64 for float64), per unit of
            distance. No gradient, so slopes that require one are refused.
        sink: (H,), floating point: the score of one more key, whose value is 0, for
            each query head; no unit. The log-sum-exp includes it.
        sink_keys: the first keys that the left end of the window never hides.
        dropout_p: probability, 0 <= p < 1, that a weight becomes 0; the others are
            multiplied by 1 / (1 - p). In steps of 1/65536; below 8e-6 nothing is
            dropped. Follows torch.manual_seed; the backward has the same mask.
        block_mask: a BlockMask: only the listed blocks of keys are visited at all.
        scale: factor on the scores, no unit, of magnitude below 2^127, of any sign.
            Default 1 / sqrt(D).
        enable_gqa: False refuses k and v with fewer heads than q.
        return_lse: also return the log-sum-exp.

    Returns:
        out: (B, H, Sq, Dv), dtype of q, dense in the order of q's dimensions. A row
        that sees no key is zero, and so are its gradients. With return_lse (out, lse);
        lse is (B, H, Sq), float32 (float64 for float64), the natural log of the row
        sums before dropout, -inf for a row that sees nothing; differentiable.

    Raises:
        FlashAttnError: an argument is not supported or does not fit; the message
            names it, what was expected and what was given. Or the launch failed, in
            the backward too.

    Notes:
        Autocast changes nothing. A NaN or infinity in a key or value reaches only
        rows that see it; a bias of -inf is arithmetic, as in torch, and hides that of
        a value only. Another bias below -2^30 counts as -2^30.

    Source: FlashAttention-2 (arXiv 2307.08691); ALiBi (arXiv 2108.12409); softcap:
    Gemma 2 (arXiv 2408.00118); sinks: StreamingLLM (arXiv 2309.17453).
    """
    check_package()
    if not (causal is False or (isinstance(causal, str) and causal in _CAUSAL)):
        raise refuse("causal", 'False, "top_left" or "bottom_right"', repr(causal))
    check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    learned = {name: t for name, t in (("bias", bias), ("sink", sink)) if t is not None}
    needs_grad = check_kinds(q=q, k=k, v=v, **learned)
    check_forms(q, k, v, BHSD)
    check_sizes(q, k, v, needs_grad)
    if not enable_gqa and k.size(1) != q.size(1):
        raise refuse("k", f"q's {q.size(1)} heads without enable_gqa", k.size(1))
    check_transforms(needs_grad, q=q, k=k, v=v, bias=bias, sink=sink)
    seqlen_k = k.size(2)
    left, right = window_of("window", window)
    expected = "a whole number of keys, at least 0"
    first = count("sink_keys", expected, sink_keys, 0)
    if block_mask is not None:
        _check_blocks(block_mask, q, seqlen_k)
    features = Features(
        bias=None if bias is None else _bias_of(bias, q, seqlen_k),
        mask=None if mask is None else _mask_of(mask, q, seqlen_k),
        alibi=None if alibi_slopes is None else slopes_of(alibi_slopes, q),
        sink=None if sink is None else _sink_of(sink, q),
        blocks=None if block_mask is None else block_mask.blocks,
        blocks_t=None if block_mask is None else block_mask.blocks_t,
        scale=scale_of("scale", scale, q.size(3)),
        softcap=softcap_of(softcap),
        dropout_p=dropout_of(dropout_p),
        causal=_CAUSAL[causal],
        window_left=left,
        window_right=right,
        sink_keys=min(first, seqlen_k) if left >= 0 else 0,
        block_q=0 if block_mask is None else block_mask.block_q,
        block_k=0 if block_mask is None else block_mask.block_k,
    )
    check_device(q)
    out, lse = attend(q, k, v, features, needs_grad, bool(return_lse))
    return out if lse is None else (out, lse)
