"""The autograd.Functions around the ops, entered only when an input requires grad.

Outside of the ops because that is the cheapest place, and in the form
forward(ctx, ...) because Dynamo of torch 2.4 traces no other. Saved are q, k, v, the
output, the log-sum-exp and what rounding took from both, nothing of O(N^2).

Autocast casts inside: Attention gets the tensors before and after the cast, runs on
the latter and gives the gradients of the former, in float32 straight from the
accumulators, so a gradient never passes through float16.

A backward that is itself differentiated (create_graph) runs the same kernels; only
its derivative is computed by _chunked.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _chunked, _ops
from ._errors import FlashAttnError, LaunchFailure
from ._grad_check import check_gradients
from ._reason import Reason
from ._record import note
from ._simulate import launch_arch, launches_on
from ._torch import is_dynamo_compiling

# Zero elements mean "absent" to the ops; shared by all eager calls.
absent = torch.empty(0, device="cpu")


def absent_for(tensor: Tensor) -> Tensor:
    """A tensor without elements, for a call with `tensor`."""
    # In a compiled graph for a GPU, a CPU tensor would rule out CUDA graphs; with
    # fake tensors, a real one is refused.
    if is_dynamo_compiling() or type(tensor) not in (Tensor, Parameter):
        return tensor.new_empty(0)
    return absent


def _set(flags: tuple[bool, ...]) -> int:
    """The op's `wanted` for whether dq, dk and dv are."""
    dq, dk, dv = flags
    wanted = _ops.WANT_DQ if dq else 0
    wanted |= _ops.WANT_DK if dk else 0
    return wanted | (_ops.WANT_DV if dv else 0)


def _launch(
    arch: str | None,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    out_lo: Tensor,
    scale: float,
    causal: int,
    wanted: int,
    grads_fp32: bool,
) -> _ops.Three:
    """The op, on the architecture that simulated the forward."""
    op: Any = _ops.backward_op
    none = absent_for(q)
    features = _ops.features(none, scale, causal)
    results = (q, k, v, out, lse, out_lo)
    dlse = none if dlse is None else dlse
    call = (dout, dlse, *results, *features, wanted, grads_fp32)
    if arch is None:
        return cast(_ops.Three, op(*call))
    with launches_on(arch):
        return cast(_ops.Three, op(*call))


def _gradients(
    strict: bool,
    arch: str | None,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    out_lo: Tensor,
    scale: float,
    causal: int,
    wanted: int,
    grads_fp32: bool,
) -> tuple[Tensor | None, ...]:
    """dq, dk and dv, None where not wanted."""
    bits = (_ops.WANT_DQ, _ops.WANT_DK, _ops.WANT_DV)
    rest = (scale, causal, wanted, grads_fp32)
    if is_dynamo_compiling():  # nothing can be caught or counted while tracing
        made = _launch(None, dout, dlse, q, k, v, out, lse, out_lo, *rest)
        return tuple(grad if wanted & bit else None for grad, bit in zip(made, bits))
    try:
        made = _launch(arch, dout, dlse, q, k, v, out, lse, out_lo, *rest)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if strict:
            raise FlashAttnError(str(error)) from error
        note(Reason.FAILED, str(error))
        call = _chunked.Call(q, k, v, dout, dlse, scale, causal)
        made = _chunked.first_order(call)
        if not grads_fp32:
            dq, dk, dv = made
            made = (dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))
    grads = tuple(grad if wanted & bit else None for grad, bit in zip(made, bits))
    check_gradients(grads)
    return grads


class _Backward(torch.autograd.Function):
    """The backward as a differentiable function of dout, dlse, q, k and v."""

    @staticmethod
    def forward(
        ctx: Any,
        strict: bool,
        arch: str | None,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *rest: Any,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dout, dlse, q, k, v)
        ctx.scale, ctx.causal = rest[3], rest[4]
        return _gradients(strict, arch, dout, dlse, q, k, v, *rest)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        dout, dlse, q, k, v = ctx.saved_tensors
        call = _chunked.Call(q, k, v, dout, dlse, ctx.scale, ctx.causal)
        made: list[Any] = list(_chunked.second_order(call, *cotangents))
        for at, needed in enumerate(ctx.needs_input_grad[2:7]):
            if not needed:
                made[at] = None
        return (None, None, *made, *(None,) * 7)


class Attention(torch.autograd.Function):
    """fwd with its gradient; see attention()."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        origin_q: Tensor | None,
        origin_k: Tensor | None,
        origin_v: Tensor | None,
        scale: float,
        causal: int,
        with_lse: bool,
        strict: bool,
    ) -> Any:
        op: Any = _ops.op
        features = _ops.features(absent_for(q), scale, causal)
        if is_dynamo_compiling():
            out, lse, out_lo = op(q, k, v, *features, True)
        else:
            try:
                out, lse, out_lo = op(q, k, v, *features, True)
            except Exception as error:
                raise LaunchFailure(str(error)) from error
        ctx.save_for_backward(q, k, v, out, lse, out_lo)
        ctx.scale, ctx.causal, ctx.strict = scale, causal, strict
        ctx.origins = None
        if origin_q is not None and origin_k is not None and origin_v is not None:
            ctx.origins = (origin_q.dtype, origin_k.dtype, origin_v.dtype)
        ctx.arch = None
        if not is_dynamo_compiling():
            ctx.set_materialize_grads(False)
            ctx.arch = launch_arch() if q.is_cpu else None
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Any, ...]:
        q, k, v, out, lse, out_lo = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 10
        if dout is None:
            dout = out.new_zeros(()).expand_as(out)
        cast_inside = ctx.origins is not None
        needed = ctx.needs_input_grad[3:6] if cast_inside else ctx.needs_input_grad[:3]
        wanted = _set(needed)
        rest = (out, lse, out_lo, ctx.scale, ctx.causal, wanted, cast_inside)
        if torch.is_grad_enabled():
            differentiable: Any = _Backward.apply
            made = differentiable(ctx.strict, ctx.arch, dout, dlse, q, k, v, *rest)
        else:
            made = _gradients(ctx.strict, ctx.arch, dout, dlse, q, k, v, *rest)
        if not cast_inside:
            return (*made, *(None,) * 7)
        grads = (
            None if grad is None else grad.to(dtype)
            for grad, dtype in zip(made, ctx.origins)
        )
        return (None, None, None, *grads, None, None, None, None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: int,
    *,
    origins: tuple[Tensor, Tensor, Tensor] | None = None,
    with_lse: bool = False,
    strict: bool = False,
) -> Any:
    """Differentiable attention: out, or (out, lse) with `with_lse`.

    Args:
        q, k, v: as for the op.
        scale, causal: as for the op.
        origins: q, k and v before a cast; they get the gradients, in their dtype.
        with_lse: also return the log-sum-exp, differentiable like the output.
        strict: a failing launch of the backward raises FlashAttnError; otherwise it
            is recorded, and torch ops compute the gradient.

    Raises:
        LaunchFailure: the launch failed.
    """
    if is_dynamo_compiling():
        q, k, v = _distinct((), q, k, v)
        if origins is not None:
            origins = _distinct((q, k, v), *origins)
    origin_q, origin_k, origin_v = origins or (None, None, None)
    return Attention.apply(  # type: ignore[no-untyped-call]
        q, k, v, origin_q, origin_k, origin_v, scale, causal, with_lse, strict
    )


def _distinct(
    taken: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same tensors as objects that differ from each other and from `taken`.

    For Dynamo, which refuses one tensor in two places.
    """
    if any(q is other for other in taken):
        q = q.view(q.shape)
    if any(k is other for other in (*taken, q)):
        k = k.view(k.shape)
    if any(v is other for other in (*taken, q, k)):
        v = v.view(v.shape)
    return q, k, v
