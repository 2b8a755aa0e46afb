"""flash_attn_func with the names, order and layout of flash_attn 2.x.

What is not supported is refused by name, before anything is launched; the
eligibility test of the shim is not used here, because a call that names this
package must not be answered by another one.

Source: FlashAttention-2 (arXiv 2307.08691).

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._autograd import absent_for, attention
from ._config import config
from ._eligibility import (
    GRID_MAX,
    HEAD_DIM_MAX,
    SCALE_MAX,
    SEQLEN_MAX,
    TRAINED_HEAD_DIM_MAX,
    gpu_reason,
    traced_cpu_serves,
    traced_gpu_serves,
)
from ._errors import FlashAttnError, LaunchFailure
from ._reason import Reason
from ._simulate import current_arch, traced_arch
from ._torch import (
    forward_ad,
    functorch_active,
    is_dynamo_compiling,
    traced_functorch_active,
)

_DEVICE_WORDS = {
    Reason.UNTESTED: (
        "no AMD GPU has run these kernels yet; set FLASH_ATTN_ROCM_UNTESTED=1 to be "
        "the first"
    ),
    Reason.CODE_OBJECT: (
        "no code object for this architecture; install again with FA_ARCHS naming it"
    ),
}


def _refuse(name: str, expected: str, given: Any) -> FlashAttnError:
    return FlashAttnError(f"{name}: expected {expected}, got {given}")


def _check_kinds(q: Any, k: Any, v: Any) -> bool:
    """Refuse what is no tensor; whether a gradient is needed."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise _refuse(name, "a tensor", type(tensor).__name__)
    requires_grad = q.requires_grad or k.requires_grad or v.requires_grad
    return torch.is_grad_enabled() and requires_grad


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, needs_grad: bool) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.is_nested or tensor.layout is not torch.strided:
            form = "nested" if tensor.is_nested else tensor.layout
            raise _refuse(name, "a strided tensor", form)
        if tensor.dim() != 4:
            layout = "4 dimensions (batch, seqlen, heads, head dim)"
            raise _refuse(name, layout, f"shape {tuple(tensor.shape)}")
        if tensor.dtype not in HEAD_DIM_MAX:
            expected = "dtype " + ", ".join(map(str, HEAD_DIM_MAX))
            raise _refuse(name, expected, tensor.dtype)
        if tensor.dtype is not q.dtype:
            raise _refuse(name, f"q's dtype {q.dtype}", tensor.dtype)
        if tensor.device != q.device:
            raise _refuse(name, f"q's device {q.device}", tensor.device)
    batch, _, heads, head_dim = q.shape
    for name, tensor in (("k", k), ("v", v)):
        if tensor.size(0) != batch:
            raise _refuse(name, f"q's batch size {batch}", tensor.size(0))
    if k.size(3) != head_dim:
        raise _refuse("k", f"q's head dim {head_dim}", k.size(3))
    for index, what in ((1, "length"), (2, "number of heads")):
        if v.size(index) != k.size(index):
            raise _refuse("v", f"k's {what} {k.size(index)}", v.size(index))
    heads_k = k.size(2)
    if (heads_k == 0 and heads != 0) or (heads_k != 0 and heads % heads_k != 0):
        raise _refuse("k", f"a number of heads that divides q's {heads}", heads_k)
    limits = TRAINED_HEAD_DIM_MAX if needs_grad else HEAD_DIM_MAX
    limit = limits.get(q.dtype, 0)
    for name, tensor in (("q", q), ("v", v)):
        if not 1 <= tensor.size(3) <= limit:
            raise _refuse(name, f"a head dim from 1 to {limit}", tensor.size(3))
    if batch > GRID_MAX or heads > GRID_MAX:
        expected = f"at most {GRID_MAX} batches and heads"
        raise _refuse("q", expected, f"shape {tuple(q.shape)}")
    for name, tensor in (("q", q), ("k", k)):
        if tensor.size(1) > SEQLEN_MAX:
            raise _refuse(name, f"a length of at most {SEQLEN_MAX}", tensor.size(1))


def _check_transforms(q: Tensor, k: Tensor, v: Tensor, needs_grad: bool) -> None:
    """Refuse what would lose a derivative or stop inside of torch."""
    if forward_ad._current_level >= 0:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if forward_ad.unpack_dual(tensor).tangent is not None:
                raise _refuse(name, "a tensor without a tangent", "a dual tensor")
    compiling = is_dynamo_compiling()
    if needs_grad and (traced_functorch_active() if compiling else functorch_active()):
        expected = "no gradient under a functorch transform (grad, vjp, vmap)"
        raise _refuse("q", expected, "a transform")


def _check_device(q: Tensor) -> None:
    compiling = is_dynamo_compiling()
    if q.is_cpu:
        arch = traced_arch() if compiling else current_arch()
        if arch is not None:
            if compiling:  # the graph keeps no error of a missing code object
                traced_cpu_serves(arch, q.dtype)
        else:
            raise _refuse(
                "q",
                "a GPU tensor (CPU tensors run only inside simulate(...) or with "
                "FLASH_ATTN_ROCM_DEVICE=sim)",
                "device cpu",
            )
        return
    if compiling and q.is_cuda and traced_gpu_serves(q.get_device(), q.dtype):
        return
    reason = gpu_reason(q.get_device()) if q.is_cuda else Reason.DEVICE
    if reason is not None:
        words = _DEVICE_WORDS.get(reason, "a device that runs our kernels")
        raise _refuse("q", words, f"device {q.device}")


def _number(name: str, expected: str, given: Any) -> float:
    """`given` if it is a number, one of numpy's too."""
    if isinstance(given, (float, int)):
        return given
    if isinstance(given, Real):
        return float(given)
    raise _refuse(name, expected, repr(given))


def _check_unsupported(
    q: Any, dropout_p: Any, window_size: Any, softcap: Any, alibi_slopes: Any
) -> None:
    expected = "0.0 (dropout is not supported yet)"
    dropout = _number("dropout_p", expected, dropout_p)
    # A probability such as 1e-30 drops nothing; with flash_attn 2.x it is the way
    # to get an LSE. Of no elements nothing is dropped whatever the probability.
    drops_nothing = 1.0 - dropout == 1.0 or (isinstance(q, Tensor) and not q.numel())
    if not (0.0 <= dropout < 1.0 and drops_nothing):
        raise _refuse("dropout_p", expected, dropout_p)
    sides = window_size if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or any(type(n) is not int or n != -1 for n in sides):
        expected = "(-1, -1) (windows are not supported yet)"
        raise _refuse("window_size", expected, repr(window_size))
    expected = "0.0 (softcap is not supported yet)"
    if softcap is not None and _number("softcap", expected, softcap) != 0.0:
        raise _refuse("softcap", expected, softcap)
    if alibi_slopes is not None:
        given = type(alibi_slopes).__name__
        raise _refuse("alibi_slopes", "None (ALiBi is not supported yet)", given)


def _check_flags(**flags: Any) -> None:
    for name, given in flags.items():
        if not isinstance(given, int) or given not in (0, 1):
            raise _refuse(name, "True or False", repr(given))


def _scale_of(q: Tensor, softmax_scale: Any) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(q.size(3))
    expected = "None or a number of magnitude below 2^127"
    scale = _number("softmax_scale", expected, softmax_scale)
    if not -SCALE_MAX < scale < SCALE_MAX:
        raise _refuse("softmax_scale", expected, softmax_scale)
    return scale


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: int,
    needs_grad: bool,
    with_lse: bool,
) -> Any:
    """(out, lse) of q, k and v in the ops' layout; lse is None if nobody wants it."""
    if needs_grad:
        made = attention(q, k, v, scale, causal, with_lse=with_lse, strict=True)
        return made if with_lse else (made, None)
    op: Any = _ops.op
    features = _ops.features(absent_for(q), scale, causal)
    out, lse, _ = op(q, k, v, *features, False)
    return out, lse


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
    for a block of queries at a time.

    Args:
        q: (batch, seqlen_q, nheads, headdim), float16, bfloat16, float32 or float64,
            headdim 1 to 256, on a GPU that runs these kernels, or on the CPU inside
            simulate(). Dimensions may have any strides; nothing is copied.
        k: (batch, seqlen_k, nheads_k, headdim), like q. nheads_k divides nheads;
            query head h reads key head h // (nheads // nheads_k).
        v: (batch, seqlen_k, nheads_k, headdim_v), like k; headdim_v 1 to 256.
        dropout_p: only 0.0 yet, or so little that 1 - dropout_p is 1.
        softmax_scale: factor on the scores before softmax, no unit, of magnitude
            below 2^127. Default 1 / sqrt(headdim).
        causal: keep key j for query i only if j <= i + seqlen_k - seqlen_q.
            For 2 queries and 4 keys the mask is 1 1 1 0 / 1 1 1 1.
        window_size: only (-1, -1), no window, yet.
        softcap: only 0.0, or None for it, yet.
        alibi_slopes: only None yet.
        deterministic: no effect; results always repeat bit by bit.
        return_attn_probs: also return the row normalisers.

    Returns:
        out: (batch, seqlen_q, nheads, headdim_v), dtype of q. A row that sees no key
        is zero, and so are its gradients. With return_attn_probs the triple
        (out, lse, None); lse is (batch, nheads, seqlen_q), float32 (float64 for
        float64), the natural log of the row sums, -inf for a row that sees no key.
        It is differentiable too, unlike that of flash_attn 2.x. The third is
        flash_attn's table for tests of dropout.

    Raises:
        FlashAttnError: an argument is not supported or does not fit; the message
            names it, what was expected and what was given. Or the launch failed, in
            the backward too.

    Notes:
        Autocast changes nothing, as with flash_attn 2.x.

    Source: FlashAttention-2 (arXiv 2307.08691).
    """
    if _ops.op is None:
        raise FlashAttnError(str(_ops.unavailable))
    if config.device == "off":
        raise FlashAttnError("FLASH_ATTN_ROCM_DEVICE=off switches this package off")
    _check_unsupported(q, dropout_p, window_size, softcap, alibi_slopes)
    _check_flags(
        causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs
    )
    needs_grad = _check_kinds(q, k, v)
    _check_tensors(q, k, v, needs_grad)
    _check_transforms(q, k, v, needs_grad)
    _check_device(q)
    scale = _scale_of(q, softmax_scale)
    call = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale)
    alignment = _ops.CAUSAL_BOTTOM_RIGHT if causal else _ops.CAUSAL_NONE
    with_lse = bool(return_attn_probs)
    if is_dynamo_compiling():
        out, lse = _attend(*call, alignment, needs_grad, with_lse)
    else:
        try:
            out, lse = _attend(*call, alignment, needs_grad, with_lse)
        except torch.cuda.OutOfMemoryError:
            raise
        except LaunchFailure as failure:
            if isinstance(failure.__cause__, torch.cuda.OutOfMemoryError):
                raise failure.__cause__ from None
            raise FlashAttnError(str(failure)) from failure.__cause__
        except RuntimeError as error:
            if needs_grad:  # of a hook of saved tensors, say
                raise
            raise FlashAttnError(str(error)) from error
    out = out.transpose(1, 2)
    return (out, lse, None) if with_lse else out
