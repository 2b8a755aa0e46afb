"""The autograd.Functions around the ops, entered only when an input requires grad.

Outside of the ops because that is the cheapest place, and in the form
forward(ctx, ...) because Dynamo of torch 2.4 traces no other. Saved are q, k, v, the
output, the log-sum-exp, what rounding took from both and the tensors of Features,
nothing of O(N^2) but what the caller made so large.

Autocast casts inside: Attention gets the tensors before and after the cast, runs on
the latter and gives the gradients of the former, in float32 straight from the
accumulators, so a gradient never passes through float16.

A backward that is itself differentiated (create_graph) runs the same kernels; only
its derivative is computed by _chunked.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _chunked, _ops, _served, _verify
from ._errors import FlashAttnError, LaunchFailure
from ._features import BIAS, NUMBERS, SINK, TENSORS, Features, features_of
from ._grad_check import check_gradients
from ._record import note, reason_of_failure
from ._simulate import launch_arch, launches_on
from ._torch import is_dynamo_compiling

# Zero elements mean "absent" to the ops; shared by all eager calls.
absent = torch.empty(0, device="cpu")

# The inputs of Attention that get gradients, in the order of the op's results.
_WANTED = (
    _ops.WANT_DQ,
    _ops.WANT_DK,
    _ops.WANT_DV,
    _ops.WANT_DBIAS,
    _ops.WANT_DSINK,
)


def absent_for(tensor: Tensor) -> Tensor:
    """A tensor without elements, for a call with `tensor`."""
    # In a compiled graph for a GPU, a CPU tensor would rule out CUDA graphs; with
    # fake tensors, a real one is refused.
    if is_dynamo_compiling() or type(tensor) not in (Tensor, Parameter):
        return tensor.new_empty(0)
    return absent


def _set(flags: tuple[bool, ...]) -> int:
    """The op's `wanted` for whether dq, dk, dv, dbias and dsink are."""
    wanted = 0
    for flag, bit in zip(flags, _WANTED):
        if flag:
            wanted |= bit
    return wanted


# Features as arguments of Attention, after bias and sink, which have gradients: one
# object, or in a trace, which knows no others, tensors and numbers.


def _flat(features: Features) -> tuple[Any, ...]:
    return (*features[BIAS + 1 : SINK], *features[SINK + 1 :])


def _of_flat(
    bias: Tensor | None, sink: Tensor | None, rest: tuple[Any, ...]
) -> Features:
    count = SINK - BIAS - 1
    return features_of((bias, *rest[:count], sink, *rest[count:-NUMBERS]), rest)


def _launch(
    arch: str | None,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
    features: Features,
    wanted: int,
    grads_fp32: bool,
) -> tuple[Tensor | None, ...]:
    """The op, on the architecture that simulated the forward; None if not wanted."""
    op: Any = _served.backward_op if is_dynamo_compiling() else _ops.backward_op
    none = absent_for(q)
    dlse = none if dlse is None else dlse
    inputs = (q, k, v, features.bias, features.sink)
    launched = wanted
    for tensor, bit in zip(inputs[3:], _WANTED[3:]):
        if tensor is not None and tensor.numel() == 0:  # absent, for the op
            launched &= ~bit
    rest = (*features.op_args(none), launched, grads_fp32)
    if arch is None:
        made = op(dout, dlse, q, k, v, *results, *rest)
    else:
        with launches_on(arch):
            made = op(dout, dlse, q, k, v, *results, *rest)
    *others, dsink = made
    if launched & _ops.WANT_DSINK:
        dsink = dsink.sum((0, 2))  # (B, H, Sq), of each query
    grads: list[Tensor | None] = []
    for grad, tensor, bit in zip((*others, dsink), inputs, _WANTED):
        if launched & bit:
            grads.append(grad)
        elif wanted & bit and tensor is not None:
            grads.append(tensor.new_zeros(tensor.shape))
        else:
            grads.append(None)
    return tuple(grads)


def _gradients(
    strict: bool,
    arch: str | None,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
    features: Features,
    wanted: int,
    grads_fp32: bool,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dbias and dsink, None where not wanted."""
    inputs = (dout, dlse, q, k, v)
    rest = (results, features, wanted, grads_fp32)
    if is_dynamo_compiling():  # nothing can be caught or counted while tracing
        return _launch(None, *inputs, *rest)
    try:
        grads = _launch(arch, *inputs, *rest)
        if _verify.is_due(q):
            _verify.check_backward(q, k, v, features, dout, dlse, grads)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if strict:
            raise FlashAttnError(str(error)) from error
        note(reason_of_failure(error), str(error))
        grads = _gradients_by_torch(*inputs, features, wanted, grads_fp32)
    check_gradients(grads)
    return grads


def _gradients_by_torch(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    wanted: int,
    grads_fp32: bool,
) -> tuple[Tensor | None, ...]:
    """What _gradients() gives, without a kernel."""
    made = _served.gradients_by_torch(dout, dlse, q, k, v, features)
    like = (q, k, v, features.bias, features.sink)
    return tuple(
        None
        if grad is None or tensor is None or not wanted & bit
        else grad.to(torch.float32 if grads_fp32 and at < 3 else tensor.dtype)
        for at, (grad, tensor, bit) in enumerate(zip(made, like, _WANTED))
    )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    needs_grad: bool,
    answer: bool = False,
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """The op; with `answer` torch ops do what a kernel that fails does not.

    Returns:
        out, lse, out_lo, and whether torch ops made them.
    """
    op: Any = _served.forward_op if is_dynamo_compiling() else _ops.op
    args = features.op_args(absent_for(q))
    made: tuple[Tensor, Tensor, Tensor]
    if is_dynamo_compiling():
        made = op(q, k, v, *args, needs_grad)
        return (*made, False)
    try:
        made = op(q, k, v, *args, needs_grad)
        if _verify.is_due(q):
            _verify.check_forward(q, k, v, features, made[0])
    except Exception as error:
        if answer and _served.may_answer(error):
            return (*_served.by_torch(q, k, v, features, needs_grad), True)
        if isinstance(error, LaunchFailure):
            raise
        raise LaunchFailure(str(error)) from error
    return (*made, False)


class _Backward(torch.autograd.Function):
    """The backward as a differentiable function of dout, dlse, q, k, v, bias, sink."""

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
        bias: Tensor | None,
        sink: Tensor | None,
        out: Tensor,
        lse: Tensor,
        out_lo: Tensor,
        features: Features,
        wanted: int,
        grads_fp32: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dout, dlse, q, k, v, *features[:TENSORS])
        ctx.numbers = features[TENSORS:]
        results = (out, lse, out_lo)
        inputs = (dout, dlse, q, k, v)
        return _gradients(strict, arch, *inputs, results, features, wanted, grads_fp32)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        dout, dlse, q, k, v, *tensors = ctx.saved_tensors
        features = features_of(tensors, ctx.numbers)
        call = _chunked.Call(q, k, v, dout, dlse, features)
        made: list[Any] = list(_chunked.second_order(call, *cotangents))
        for at, needed in enumerate(ctx.needs_input_grad[2:9]):
            if not needed:
                made[at] = None
        return (None, None, *made, *(None,) * 6)


def _spread(given: list[Tensor], there: list[bool]) -> list[Tensor | None]:
    """The tensors in the places that are True, None in the others."""
    tensors: list[Tensor | None] = []
    at = 0
    for one in there:
        tensors.append(given[at] if one else None)
        at += 1 if one else 0
    return tensors


class Attention(torch.autograd.Function):
    """fwd with its gradient; see attention()."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        origin_q: Tensor | None,
        origin_k: Tensor | None,
        origin_v: Tensor | None,
        with_lse: bool,
        strict: bool,
        *rest: Any,
    ) -> Any:
        features = rest[0] if len(rest) == 1 else _of_flat(bias, sink, rest)
        out, lse, out_lo, by_torch = _forward(q, k, v, features, True, not strict)
        given, ctx.there = features[:TENSORS], None
        if is_dynamo_compiling():  # that of old torch saves no None
            ctx.there = [tensor is not None for tensor in given]
            given = tuple([tensor for tensor in given if tensor is not None])
        ctx.save_for_backward(q, k, v, out, lse, out_lo, *given)
        ctx.numbers, ctx.strict = features[TENSORS:], strict
        ctx.by_torch = by_torch
        ctx.inputs = 10 + len(rest)
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
        q, k, v, out, lse, out_lo, *given = ctx.saved_tensors
        if ctx.there is not None:
            given = _spread(given, ctx.there)
        features = features_of(given, ctx.numbers)
        nothing: tuple[Any, ...] = (None,) * (ctx.inputs - 5)
        if dout is None and dlse is None:
            return (None,) * 5 + nothing
        if dout is None:
            dout = out.new_zeros(()).expand_as(out)
        cast_inside = ctx.origins is not None
        needed = ctx.needs_input_grad
        leaves = needed[5:8] if cast_inside else needed[:3]
        wanted = _set((*leaves, *needed[3:5]))
        if torch.is_grad_enabled():
            differentiable: Any = _Backward.apply
            grads = differentiable(
                ctx.strict,
                ctx.arch,
                dout,
                dlse,
                q,
                k,
                v,
                features.bias,
                features.sink,
                out,
                lse,
                out_lo,
                features,
                wanted,
                cast_inside,
            )
        elif ctx.by_torch:  # so that both are of one arithmetic
            inputs = (dout, dlse, q, k, v)
            grads = _gradients_by_torch(*inputs, features, wanted, cast_inside)
        else:
            results = (out, lse, out_lo)
            inputs = (dout, dlse, q, k, v)
            rest = (results, features, wanted, cast_inside)
            grads = _gradients(ctx.strict, ctx.arch, *inputs, *rest)
        if not cast_inside:
            return (*grads, *nothing)
        cast = [
            None if grad is None else grad.to(dtype)
            for grad, dtype in zip(grads, ctx.origins)
        ]
        return (None, None, None, *grads[3:], *cast, *nothing[3:])


def draw_seed(device: torch.device) -> Tensor:
    """Seed and offset of a call's dropout, from torch's generator of the device.

    Drawn on the device: torch.manual_seed repeats it, activation checkpointing draws
    the same again, and each replay of a CUDA graph draws anew.
    """
    return torch.randint(2**62, (2,), dtype=torch.int64, device=device)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    *,
    origins: tuple[Tensor, Tensor, Tensor] | None = None,
    needs_grad: bool = True,
    with_lse: bool = False,
    strict: bool = False,
) -> Any:
    """Attention: out, or (out, lse) with `with_lse`; differentiable.

    Args:
        q, k, v: as for the op.
        features: as for the op; where weights are dropped and there is no seed, one
            is drawn.
        origins: q, k and v before a cast; they get the gradients, in their dtype.
        needs_grad: False: nothing is kept for a backward.
        with_lse: also return the log-sum-exp, differentiable like the output.
        strict: a failing launch raises; otherwise it is recorded, and where gradients
            are needed torch ops compute the result, or the gradient.

    Raises:
        LaunchFailure: the launch failed.
    """
    if features.drops() and features.seed is None:
        features = features.seeded(draw_seed(q.device))
    if not needs_grad:
        # Stock would drop others than the recomputation of a checkpoint, whose first
        # forward needs no gradients.
        answer = not strict and features.drops()
        out, lse, _, _ = _forward(q, k, v, features, False, answer)
        return (out, lse) if with_lse else out
    learned = (features.bias, features.sink)
    tensors = (q, k, v, *learned, *(origins or (None, None, None)))
    rest: tuple[Any, ...] = (features,)
    if is_dynamo_compiling():
        count = len(tensors)
        distinct = _distinct((*tensors, *_flat(features)))
        tensors, rest = distinct[:count], distinct[count:]
    return Attention.apply(  # type: ignore[no-untyped-call]
        *tensors, with_lse, strict, *rest
    )


def _distinct(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with tensors that are different objects.

    For Dynamo, which refuses one tensor in two places.
    """
    made: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor) and any(argument is one for one in made):
            argument = argument.view(argument.shape)
        made.append(argument)
    return tuple(made)
