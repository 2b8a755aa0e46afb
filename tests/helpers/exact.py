"""Attention and its gradients in exact arithmetic, and the measure of errors.

The formulas are written out in NumPy, so that they share nothing with the kernels, with
torch's math path or with autograd: in float64, and for float64 tensors in the 80 bits
of x86's long double. The yardstick is PyTorch's own math path under autograd, in the
dtype of the inputs.

Error measure (docs/accuracy.md): the Frobenius norm of the error over that of the
reference, at most twice that of the yardstick; where that is exact, at most 2 ulp of
the dtype at the largest value. float64 is held to absolute bounds.

SPDX-License-Identifier: BSD-3-Clause
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import NONE, stock_sdpa, ulp, visible

WIDE = np.longdouble
if np.finfo(WIDE).nmant < 63:  # as on Arm and with MSVC
    raise ImportError("the reference of float64 needs a long double of 80 bits")


class Results(NamedTuple):
    out: object
    lse: object
    dq: object
    dk: object
    dv: object


GRADIENTS = ("dq", "dk", "dv")


def numbers(tensor):
    """The tensor's values for NumPy: float64, or 80 bits for float64."""
    wide = WIDE if tensor.dtype is torch.float64 else np.float64
    return tensor.detach().cpu().double().numpy().astype(wide)


def _sum_groups(x, heads_k):
    """Sums over the query heads that share a key head."""
    batch, heads, rows, dim = x.shape
    return x.reshape(batch, heads_k, heads // heads_k, rows, dim).sum(2)


def _t(x):
    return np.swapaxes(x, -1, -2)


def exact(q, k, v, dout, scale=None, causal=NONE, dlse=None):
    """Results of NumPy arrays; a row that sees no key has 0, -inf and no part."""
    scale = q.size(-1) ** -0.5 if scale is None else scale
    seen = visible(q.size(2), k.size(2), causal).numpy()
    heads_k, group = k.size(1), q.size(1) // k.size(1)
    q, k, v, dout = (numbers(t) for t in (q, k, v, dout))
    many_k, many_v = (np.repeat(t, group, 1) for t in (k, v))
    kind = q.dtype.type
    s = np.where(seen, (q @ _t(many_k)) * kind(scale), -kind(math.inf))
    most = s.max(-1, keepdims=True)
    blind = most == -math.inf
    p = np.exp(s - np.where(blind, 0, most))
    total = p.sum(-1, keepdims=True)
    p = p / np.where(blind, 1, total)
    with np.errstate(divide="ignore"):
        lse = (most + np.log(total))[..., 0]
    out = p @ many_v
    delta = (dout * out).sum(-1, keepdims=True)
    if dlse is not None:
        delta = delta - numbers(dlse)[..., None]
    ds = np.where(seen, p * (dout @ _t(many_v) - delta), 0) * kind(scale)
    dk, dv = (_sum_groups(_t(x) @ y, heads_k) for x, y in ((ds, q), (p, dout)))
    return Results(out, lse, ds @ many_k, dk, dv)


def math_path(q, k, v, dout, scale=None, causal=NONE):
    """Results of tensors (lse None): PyTorch's math path and its autograd."""
    q, k, v, dout = (t.detach().cpu() for t in (q, k, v, dout))
    leaves = tuple(t.contiguous().requires_grad_() for t in (q, k, v))
    mask = None if causal == NONE else visible(q.size(2), k.size(2), causal)
    grouped = {"enable_gqa": True} if q.size(1) != k.size(1) else {}
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        out = stock_sdpa(*leaves, attn_mask=mask, scale=scale, **grouped)
        grads = torch.autograd.grad(out, leaves, dout)
    if mask is not None:  # rows without a key were NaN before torch 2.5
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return Results(out.detach(), None, *grads)


def norm(x):
    """Frobenius norm that neither overflows nor loses small numbers."""
    largest = np.abs(x).max(initial=0)
    if not 0 < largest < math.inf:
        return largest
    return largest * np.sqrt(np.square(x / largest).sum())


def error(got, reference):
    """||got - reference|| / ||reference||; the absolute norm for a zero reference."""
    size = norm(reference)
    return float(norm(numbers_as(got, reference) - reference) / (size or 1))


def numbers_as(got, reference):
    return got.detach().cpu().double().numpy().astype(reference.dtype)


def largest_error(got, reference):
    """The largest single error."""
    return float(np.abs(numbers_as(got, reference) - reference).max(initial=0))


def is_exact(yardstick, dtype):
    """Whether the math path has not even rounded its result (rounding to nearest alone
    gives about a fifth of an eps): one key, or one that takes all the weight."""
    return yardstick < torch.finfo(dtype).eps / 8


def ratio(got, reference, yardstick, noise=0.0):
    """Error of `got` in units of what is allowed, pass if at most 1.

    A reference that is nowhere above `noise`, what the accumulators may lose of terms
    that cancel, says nothing about relative errors: `noise` is then allowed.
    """
    assert tuple(got.shape) == reference.shape and torch.isfinite(got).all()
    dtype = yardstick.dtype
    largest = float(np.abs(reference).max(initial=0))
    usual = error(yardstick, reference)
    if largest > noise and not is_exact(usual, dtype):
        return error(got, reference) / (2 * usual)
    return largest_error(got, reference) / max(2 * ulp(largest, dtype), noise)


def noise_of_gradients(q, k, v, dout, scale=None):
    """What may stay of a gradient whose terms cancel: with one key dP = delta, both
    of which are sums of the accumulators' type over the head dim."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.size(-1) ** -0.5 if scale is None else abs(scale)
    dp = dout.detach().float().abs().max() * v.detach().float().abs().max() * v.size(-1)
    reach = max(float(t.detach().abs().max()) for t in (q, k))
    return torch.finfo(wide).eps * float(dp) * scale * reach
