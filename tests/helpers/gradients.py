"""Gradients of attention: the float64 reference, the yardstick, the error measure.

The measure is that of outputs (helpers.error_ratio): the error of each gradient in
the Frobenius norm, at most twice that of PyTorch's math path in the same dtype, or
2 ulp of the dtype at the largest value where the math path is exact.

SPDX-License-Identifier: BSD-3-Clause
"""

import math

import torch

from flash_attn_rocm import _ops

from . import (
    EXACT,
    NONE,
    address,
    entry_arguments,
    relative_error,
    ulp,
    visible,
)


def plain_attention(q, k, v, scale=None, causal=NONE):
    """(out, lse) by differentiable torch ops, in the dtype of q; no empty rows."""
    group = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scale = q.size(-1) ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-1, -2)) * scale
    seen = visible(q.size(2), k.size(2), causal).to(q.device)
    # A row that sees nothing keeps finite scores and counts for nothing.
    hidden = ~seen & seen.any(-1, keepdim=True)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    lse = scores.masked_fill(~seen, -math.inf).logsumexp(-1)
    return weights.masked_fill(~seen, 0.0) @ v, lse


def leaves(*tensors, dtype=None):
    """Copies that require grad, with the strides of the tensors."""
    return tuple(
        torch.empty_like(t, dtype=dtype).copy_(t.detach()).requires_grad_()
        for t in tensors
    )


def fp64_gradients(q, k, v, dout, scale=None, causal=NONE, dlse=None):
    """Exact dq, dk, dv."""
    inputs = leaves(q, k, v, dtype=torch.float64)
    out, lse = plain_attention(*inputs, scale, causal)
    results, grads = [out], [dout.double()]
    if dlse is not None:
        results, grads = [out, lse], [dout.double(), dlse.double()]
    return torch.autograd.grad(results, inputs, grads)


def math_gradients(q, k, v, dout, scale=None, causal=NONE):
    """The yardstick: as the math path, in float32 for halves and rounded once."""
    wide = torch.promote_types(q.dtype, torch.float32)
    inputs = leaves(q, k, v)
    out, _ = plain_attention(*(t.to(wide) for t in inputs), scale, causal)
    return torch.autograd.grad(out.to(q.dtype), inputs, dout)


def _rounding(q, k, v, dout, scale):
    """What the accumulators may lose of a gradient that cancels to nothing."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.size(-1) ** -0.5 if scale is None else abs(scale)
    q, k, v = (t.detach() for t in (q, k, v))
    largest = max(float(t.abs().max()) for t in (q, k))
    products = float(dout.abs().max() * v.abs().max()) * v.size(-1)
    return torch.finfo(wide).eps * products * max(1.0, scale * largest)


def gradient_ratios(grads, q, k, v, dout, scale=None, causal=NONE):
    """Error of each gradient in units of what is allowed; pass if at most 1.

    float64 has no finer reference here: it may lose what its accumulators may.
    """
    exact = fp64_gradients(q, k, v, dout, scale, causal)
    usual = math_gradients(q, k, v, dout, scale, causal)
    floor = EXACT * torch.finfo(q.dtype).eps / torch.finfo(torch.float16).eps
    ratios = []
    for got, reference, yardstick in zip(grads, exact, usual):
        assert got.shape == reference.shape and torch.isfinite(got).all()
        allowed = relative_error(yardstick, reference)
        if allowed >= floor and q.dtype is not torch.float64:
            ratios.append(relative_error(got, reference) / (2 * allowed))
            continue
        worst = float((got.double() - reference).abs().max())
        bound = 2 * ulp(float(reference.abs().max()), q.dtype)
        ratios.append(worst / max(bound, _rounding(q, k, v, dout, scale)))
    return ratios


def run_backward(
    dout, q, k, v, out, lse, grads, scale=None, causal=NONE, out_lo=None, dlse=None
):
    """The backward's C entry, into gradients that the caller owns; None: not wanted.

    Gradients of halves may be float32. CPU tensors go to the simulator, others to
    the device they lie on.
    """
    scale = q.size(-1) ** -0.5 if scale is None else scale
    wanted = sum(1 << bit for bit, grad in enumerate(grads) if grad is not None)
    fp32 = any(g is not None and g.dtype is not q.dtype for g in grads)
    device, workspace = entry_arguments(q, wanted, k, v)
    four, three = (0, 0, 0, 0), (0, 0, 0)
    tensors = (q, k, v, out, lse, out_lo, dout, dlse, *grads, workspace)
    _ops.ext.backward(
        *device,
        fp32,
        wanted,
        *map(address, tensors),
        workspace.numel(),
        *(part for t in (q, k, v) for part in (tuple(t.shape), t.stride())),
        out.stride(),
        dout.stride(),
        three if dlse is None else dlse.stride(),
        *(four if grad is None else grad.stride() for grad in grads),
        scale,
        causal,
    )
