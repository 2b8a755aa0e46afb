"""apply_rotary(): rotary positions of q and k in one launch, with gradients.

The gradient of a rotation is the rotation by the negative angle, so the backward is
the op again and can be differentiated any number of times.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._autograd import _distinct
from ._check import (
    BSHD,
    check_device,
    check_device_of,
    check_flags,
    check_forms,
    check_kinds,
    check_package,
    check_strided,
    check_transforms,
    refuse,
)
from ._eligibility import GRID_MAX, HEAD_DIM_MAX, SEQLEN_MAX
from ._errors import FlashAttnError
from ._simulate import launch_arch, launches_on
from ._torch import is_dynamo_compiling

_Two = tuple[Tensor, Tensor]


def _launch(arch: str | None, *arguments: Any) -> _Two:
    """The op; on the simulated architecture `arch`, if there is one."""
    op: Any = _ops.rotary_op
    made: _Two
    if is_dynamo_compiling():  # nothing can be caught while tracing
        made = op(*arguments)
        return made
    try:
        if arch is None:
            made = op(*arguments)
        else:
            with launches_on(arch):
                made = op(*arguments)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise FlashAttnError(str(error)) from error
    return made


class Rotary(torch.autograd.Function):
    """The op with its gradient; see apply_rotary()."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        inverse: bool,
        arch: str | None,
    ) -> _Two:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.inverse, ctx.arch = interleaved, inverse, arch
        if not is_dynamo_compiling():
            ctx.set_materialize_grads(False)
            if arch is None and q.is_cpu:
                ctx.arch = launch_arch()
        return _launch(arch, q, k, cos, sin, interleaved, inverse)

    @staticmethod
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        nothing = (None,) * 5
        wanted_q = ctx.needs_input_grad[0] and dq is not None
        wanted_k = ctx.needs_input_grad[1] and dk is not None
        if not wanted_q and not wanted_k:
            return (None, None, *nothing)
        # Without heads nothing is done for it.
        given_q = dq if wanted_q else (dk if dq is None else dq)[:, :, :0]  # type: ignore[index]
        given_k = dk if wanted_k else (dq if dk is None else dk)[:, :, :0]  # type: ignore[index]
        arguments = (given_q, given_k, cos, sin, ctx.interleaved, not ctx.inverse)
        if torch.is_grad_enabled():
            differentiable: Any = Rotary.apply
            made = differentiable(*arguments, ctx.arch)
        else:
            made = _launch(ctx.arch, *arguments)
        return (
            made[0] if wanted_q else None,
            made[1] if wanted_k else None,
            *nothing,
        )


def _check_inputs(q: Tensor, k: Tensor) -> None:
    check_forms(q, k, k, BSHD)
    batch, seqlen, heads, head_dim = q.shape
    for index, what in ((0, "batch size"), (1, "length"), (3, "head dim")):
        if k.size(index) != q.size(index):
            raise refuse("k", f"q's {what} {q.size(index)}", k.size(index))
    limit = HEAD_DIM_MAX.get(q.dtype, 0)
    if not 1 <= head_dim <= limit:
        raise refuse("q", f"a head dim from 1 to {limit}", head_dim)
    if seqlen > SEQLEN_MAX:
        raise refuse("q", f"a length of at most {SEQLEN_MAX}", seqlen)
    if batch > GRID_MAX or heads > GRID_MAX:
        expected = f"at most {GRID_MAX} batches and heads"
        raise refuse("q", expected, f"{batch} and {heads}")
    if k.size(2) > GRID_MAX:
        raise refuse("k", f"at most {GRID_MAX} heads", k.size(2))


def _check_tables(cos: Tensor, sin: Tensor, q: Tensor) -> None:
    batch, seqlen, _, head_dim = q.shape
    wider = _ops.lse_dtype(q.dtype)
    for name, table in (("cos", cos), ("sin", sin)):
        check_strided(name, table)
        check_device_of(name, table, q)
        if table.requires_grad and torch.is_grad_enabled():
            expected = "a table that needs no gradient (it gets none)"
            raise refuse(name, expected, "a tensor that requires grad")
    if cos.dtype is not q.dtype and cos.dtype is not wider:
        words = f"dtype {q.dtype}" + ("" if wider is q.dtype else f" or {wider}")
        raise refuse("cos", words, cos.dtype)
    rank = cos.dim()
    if (
        rank not in (2, 3)
        or cos.size(rank - 2) != seqlen
        or (rank == 3 and cos.size(0) != 1 and cos.size(0) != batch)
    ):
        expected = (
            f"shape ({seqlen}, columns) or ({batch}, {seqlen}, columns), a row for "
            "each token of q"
        )
        raise refuse("cos", expected, tuple(cos.shape))
    if cos.size(rank - 1) > head_dim // 2:
        expected = (
            f"at most {head_dim // 2} columns, one for each pair of q's {head_dim} "
            "channels"
        )
        raise refuse("cos", expected, cos.size(rank - 1))
    if sin.dtype is not cos.dtype:
        raise refuse("sin", f"cos's dtype {cos.dtype}", sin.dtype)
    if sin.shape != cos.shape:
        raise refuse("sin", f"cos's shape {tuple(cos.shape)}", tuple(sin.shape))


def apply_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys, both in one launch.

    Of each head the first R = 2 * cos.size(-1) channels are taken in pairs (x1, x2),
    and pair p of token s becomes (x1 cos - x2 sin, x2 cos + x1 sin) with cos[s, p] and
    sin[s, p]. The channels from R on stay as they are.

    Differentiable in q and k any number of times: the gradient is the rotation by the
    negative angle, which the same kernel does.

    Args:
        q: (batch, seqlen, nheads, headdim), float16, bfloat16, float32 or float64,
            headdim 1 to 256, on a GPU that runs these kernels, or on the CPU inside
            simulate(). Any strides; nothing is copied.
        k: (batch, seqlen, nheads_k, headdim), like q; any number of heads, also 0.
        cos: (seqlen, R / 2), or (batch, seqlen, R / 2) for positions that differ
            between the batches; R at most headdim, and 0 turns nothing. q's dtype or
            float32 (float64 for float64), any strides. No gradient, so one that
            requires it is refused.
        sin: like cos.
        interleaved: False: pairs are (p, p + R / 2), as in GPT-NeoX and Llama;
            True: (2p, 2p + 1), as in GPT-J and RoFormer.

    Returns:
        (q, k) with rotated channels: the shapes and dtypes of q and k, in memory as
        torch.empty_like(). The inputs stay as they are. Computed in float32 (float64
        for float64) and rounded once. NaN and infinities stay in their pair.

    Raises:
        FlashAttnError: an argument is not supported or does not fit; the message
            names it, what was expected and what was given. Or the launch failed, in
            the backward too.

    Notes:
        Autocast changes nothing. torch.vmap works where no gradient is needed;
        gradients under a functorch transform are refused.

    Source: RoFormer (arXiv 2104.09864).
    """
    check_package()
    check_flags(interleaved=interleaved)
    needs_grad = check_kinds(q=q, k=k)
    check_kinds(cos=cos, sin=sin)
    _check_inputs(q, k)
    _check_tables(cos, sin, q)
    check_transforms(needs_grad, q=q, k=k, cos=cos, sin=sin)
    check_device(q)
    if not needs_grad:
        return _launch(None, q, k, cos, sin, bool(interleaved), False)
    tensors = (q, k, cos, sin)
    if is_dynamo_compiling():
        tensors = _distinct(tensors)
    made: _Two = Rotary.apply(  # type: ignore[no-untyped-call]
        *tensors, bool(interleaved), False, None
    )
    return made
