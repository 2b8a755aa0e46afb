"""Calls that fail, answered by torch ops: with gradients, and in compiled graphs.

A call without gradients goes to stock SDPA when its kernel fails. One with gradients
must stay what it was for the backward and for the recomputation of a checkpoint, which
may find the kernel well again: the same tensors saved, the same mask of dropout. So
by_torch() takes the kernel's place inside of our autograd.Function.

In a compiled graph nobody stands around the op, and a kernel whose breaker is open must
not end a training run. So graphs hold fwd_served and bwd_served, which have the
arguments and results of fwd and bwd, call those, and compute the same with torch ops if
a launch fails, is late or is refused by a breaker. All other errors are the caller's.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _chunked, _ops, _verify
from ._features import TENSORS, Features, features_of
from ._guard import last_failure
from ._record import note

# What last_failure() says of calls that something else can still answer.
_ANSWERABLE = ("breaker", "late", "device")


def _features(arguments: tuple[Any, ...]) -> Features:
    """Of the ops' arguments, in which a tensor without elements is absent."""
    tensors = [t if t is not None and t.numel() else None for t in arguments[:TENSORS]]
    return features_of(tensors, arguments)


def may_answer(error: Exception) -> bool:
    """Whether to go on without the kernel; then it is noted why."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, _verify.Rejected):
        note(error.reason, str(error))
        return True
    word, reason = last_failure()
    if word in _ANSWERABLE:
        note(reason, str(error))
    return word in _ANSWERABLE


def by_torch(
    q: Tensor, k: Tensor, v: Tensor, features: Features, needs_grad: bool
) -> _ops.Three:
    """What fwd gives, in float64 until it is rounded."""
    out, lse, out_lo = _ops.outputs(q, v, needs_grad)
    exact = _chunked.forward(q.double(), k.double(), v.double(), features)
    out.copy_(exact[0])
    lse.copy_(exact[1])
    out_lo.zero_()
    if out_lo.numel():
        _set_residue(out_lo, out, lse, *exact)
    return out, lse, out_lo


def gradients_by_torch(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
) -> _chunked.Five:
    """What bwd gives, in float64: to be rounded."""
    call = _chunked.Call(
        q.double(),
        k.double(),
        v.double(),
        dout.double(),
        None if dlse is None else dlse.double(),
        features,
    )
    return _chunked.first_order(call)


def _set_residue(
    out_lo: Tensor, out: Tensor, lse: Tensor, exact_out: Tensor, exact_lse: Tensor
) -> None:
    """What rounding took from lse and, of 16-bit types, from out: csrc/fa.h."""

    def lost(exact: Tensor, rounded: Tensor) -> Tensor:
        return (exact - rounded.double()).nan_to_num(0.0, 0.0, 0.0)

    rows = lse.numel()
    out_lo[:rows] = lost(exact_lse, lse).flatten()
    if out.dtype in _ops.HALVES:
        scale = 2.0**11 if out.dtype is torch.float16 else 1.0
        low = out_lo[(rows + 3) // 4 * 4 :].view(out.dtype)
        low[: out.numel()] = (lost(exact_out, out) * scale).flatten()


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> _ops.Three:
    """fwd_served: out, lse and out_lo of fwd."""
    op: Any = _ops.op
    made: _ops.Three
    try:
        made = op(q, k, v, *rest)
        if _verify.is_due(q):
            _verify.check_forward(q, k, v, _features(rest[:-1]), made[0])
        return made
    except RuntimeError as error:
        if not may_answer(error):
            raise
    return by_torch(q, k, v, _features(rest[:-1]), rest[-1])


def backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> _ops.Five:
    """bwd_served: the gradients of bwd."""
    op: Any = _ops.backward_op
    *options, wanted, grads_fp32 = rest[3:]  # behind out, lse and out_lo
    features = _features(tuple(options))
    given = dlse if dlse.numel() else None
    made: _ops.Five
    try:
        made = op(dout, dlse, q, k, v, *rest)
        if _verify.is_due(q):
            grads = [t if t.numel() else None for t in made]
            if grads[4] is not None:
                grads[4] = grads[4].sum((0, 2))  # (B, H, Sq), of each query
            _verify.check_backward(q, k, v, features, dout, given, tuple(grads))
        return made
    except RuntimeError as error:
        if not may_answer(error):
            raise
    results = _ops.gradients(q, k, v, features.bias, wanted, grads_fp32)
    exact = gradients_by_torch(dout, given, q, k, v, features)
    for result, grad in zip(results[:4], exact):
        if result.numel() and grad is not None:
            result.copy_(grad)
    dsink = results[4].zero_()
    if dsink.numel() and exact[4] is not None:
        dsink[0, :, 0] = exact[4]  # whoever asked adds up the queries
    return results


def _register() -> tuple[Any, Any]:
    """Define both beside fwd and bwd, whose fake kernels and flops are theirs."""
    if _ops.op is None:
        return None, None
    library: Any = _ops.fragment()
    for schema, kernel in ((_ops.SCHEMA, forward), (_ops.BACKWARD_SCHEMA, backward)):
        name, _, arguments = schema.partition("(")
        library.define(f"{name}_served({arguments}")
        for key in ("CPU", "CUDA"):
            library.impl(f"{name}_served", kernel, key)
    ops = torch.ops.flash_attn_rocm
    _ops.describe(ops.fwd_served, ops.bwd_served)
    return ops.fwd_served.default, ops.bwd_served.default


forward_op, backward_op = _register()
