"""The ops' kernels where torch lacks the stable C ABI: checks, memory, one C entry.

Does what csrc/python/ops.c does, with the same words. Shapes and values are left to
the C entries, which check them for both.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from . import _ops
from ._ops import (
    Five,
    Three,
    Two,
    check_inputs,
    check_rotary,
    dtype_code,
    dtype_name,
    gradients,
    outputs,
    rotary_outputs,
)
from ._simulate import launch_arch

_INT_MAX = 2**31 - 1  # C's
_AXES = ("batch", "head", "row", "head dim")
# Address, dtype, sizes, strides.
_Feature = tuple[int, int, tuple[int, ...], tuple[int, ...]]


# Dimensions and dtype of the tensors that are no scores; None: any of ours.
_FORMS: dict[str, tuple[str, torch.dtype | None]] = {
    "bias": ("batch, heads, rows, keys", None),
    "mask": ("batch, heads, rows, keys", torch.bool),
    "alibi": ("batch, heads", None),
    "sink": ("heads", None),
    "seed": ("seed and offset", torch.int64),
    "span_q": ("rows, 4", torch.int32),
    "span_k": ("keys, 2", torch.int32),
    "blocks": ("batch, heads, blocks, 1 + indices", torch.int32),
    "blocks_t": ("batch, heads, blocks, 1 + indices", torch.int32),
}


def _check_feature(name: str, tensor: Tensor, q: Tensor) -> None:
    """What C cannot see of a feature."""
    axes, dtype = _FORMS[name]
    _ops.check_strided(name, tensor)
    if name == "alibi" and tensor.dim() == 1:
        axes = "heads"
    dims = axes.count(",") + 1
    if tensor.dim() != dims:
        raise RuntimeError(
            f"{name}: expected {dims} dimension{'s' * (dims > 1)} ({axes}), got "
            f"{tensor.dim()}"
        )
    _ops.check_device(name, tensor, q)
    if dtype is None and tensor.dtype not in _ops.DTYPES:
        raise RuntimeError(
            f"{name}: expected dtype float16, bfloat16, float32 or float64, got "
            f"{tensor.dtype}"
        )
    if dtype is not None and tensor.dtype is not dtype:
        raise RuntimeError(
            f"{name}: expected dtype {dtype_name(dtype)}, got "
            f"{dtype_name(tensor.dtype)}"
        )
    if name == "seed":
        if tensor.numel() != 2:
            raise RuntimeError(f"seed: expected 2 elements, got {tensor.numel()}")
        if tensor.stride(0) != 1:
            raise RuntimeError(
                f"seed: expected a contiguous tensor, got stride {tensor.stride(0)}"
            )


def _feature(name: str, tensor: Tensor | None, q: Tensor) -> _Feature | None:
    """As the C entries take it; the dispatcher hands an undefined one over as None."""
    if tensor is None or not tensor.numel():
        return None
    _check_feature(name, tensor, q)
    if name == "alibi" and tensor.dim() == 1:
        tensor = tensor[None]
    code = dtype_code(tensor.dtype) if tensor.dtype in _ops.DTYPES else 0
    return tensor.data_ptr(), code, tuple(tensor.shape), tensor.stride()


class _Options:
    """What follows the tensors of an op, in the form of the C entries."""

    def __init__(self, q: Tensor, options: tuple[Any, ...]) -> None:
        count = len(_ops.FEATURE_TENSORS)
        named = zip(_ops.FEATURE_TENSORS, options[:count])
        self.scale, softcap, dropout_p, causal, *rest = options[count:]
        self.causal = _clamp(causal)
        tensors = (_feature(name, tensor, q) for name, tensor in named)
        self.features = (*tensors, softcap, dropout_p, *rest)


def _clamp(number: int) -> int:
    """As in C: beyond an int it must not turn into something legal."""
    return max(-_INT_MAX, min(number, _INT_MAX))


def _launch(
    entry: Callable[..., None], q: Tensor, used: tuple[Any, ...], *rest: Any
) -> None:
    """entry(device type, device index, stream, architecture, ...).

    `used` is all the memory of the call: a kernel that misses its deadline goes on
    with it.
    """
    try:
        if q.is_cuda:
            with torch.cuda.device(q.device):
                stream = torch.cuda.current_stream(q.device).cuda_stream
                entry(1, q.get_device(), stream, None, *rest)
        else:
            entry(0, 0, 0, launch_arch(), *rest)
    except RuntimeError:
        _ops.ext.keep((q, *used))
        raise


def _workspace(
    q: Tensor, k: Tensor, v: Tensor, wanted: int, features: tuple[Any, ...]
) -> Tensor:
    shapes = (tuple(t.shape) for t in (q, k, v))
    size = _ops.ext.workspace(dtype_code(q.dtype), *shapes, wanted, features)
    return torch.empty(size, dtype=torch.uint8, device=q.device)


def _pointers(*tensors: Tensor) -> tuple[int, ...]:
    """Addresses; 0 for a tensor without elements."""
    return tuple(t.data_ptr() if t.numel() else 0 for t in tensors)


def _sizes_and_strides(*tensors: Tensor) -> list[tuple[int, ...]]:
    return [part for t in tensors for part in (tuple(t.shape), t.stride())]


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Three:
    """The kernel of fwd."""
    *given, needs_grad = rest
    check_inputs(q, k, v)
    options = _Options(q, tuple(given))
    workspace = _workspace(q, k, v, 0, options.features)
    out, lse, out_lo = outputs(q, v, needs_grad)
    _launch(
        _ops.ext.forward,
        q,
        (k, v, *given, out, lse, out_lo, workspace),
        dtype_code(q.dtype),
        *_pointers(q, k, v, out, lse, out_lo, workspace),
        workspace.numel(),
        *_sizes_and_strides(q, k, v),
        out.stride(),
        options.scale,
        options.causal,
        options.features,
    )
    return out, lse, out_lo


def _check_form(
    name: str,
    tensor: Tensor,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    q: Tensor,
    dtype_of: str = "",
) -> None:
    """`tensor` has these sizes, this dtype and q's device."""
    _ops.check_strided(name, tensor)
    if tensor.dim() != len(sizes):
        axes = ", head dim" if len(sizes) == 4 else ""
        raise RuntimeError(
            f"{name}: expected {len(sizes)} dimensions (batch, heads, seqlen{axes}), "
            f"got {tensor.dim()}"
        )
    if tensor.dtype is not dtype:
        raise RuntimeError(
            f"{name}: expected dtype {dtype_name(dtype)}{dtype_of}, got "
            f"{dtype_name(tensor.dtype)}"
        )
    _ops.check_device(name, tensor, q)
    for axis, size in enumerate(sizes):
        if tensor.size(axis) != size:
            owner = "v" if axis == 3 else "q"
            raise RuntimeError(
                f"{name}: expected size {size} in dimension {axis} "
                f"({_AXES[axis]}, as in {owner}), got {tensor.size(axis)}"
            )


def _check_out_lo(out_lo: Tensor, q: Tensor, v: Tensor) -> None:
    """out_lo has the form that the forward gives it."""
    if q.dtype is torch.float64:
        raise RuntimeError(
            "out_lo: expected a tensor without elements for float64, got one with "
            "elements"
        )
    if out_lo.dim() != 1:
        raise RuntimeError(
            f"out_lo: expected 1 dimension (elements), got {out_lo.dim()}"
        )
    _ops.check_device("out_lo", out_lo, q)
    if out_lo.dtype is not torch.float32:
        raise RuntimeError(
            f"out_lo: expected dtype float32, got {dtype_name(out_lo.dtype)}"
        )
    count = _ops.residue_floats(q, v)
    if out_lo.numel() != count:
        raise RuntimeError(f"out_lo: expected {count} elements, got {out_lo.numel()}")
    if count > 1 and out_lo.stride(0) != 1:
        raise RuntimeError(
            f"out_lo: expected a contiguous tensor, got stride {out_lo.stride(0)}"
        )


def _check_results(
    q: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor,
    out: Tensor,
    lse: Tensor,
    out_lo: Tensor,
) -> None:
    """What C cannot see of the forward's results and their gradients."""
    rows = tuple(q.shape[:3])
    sizes = (*rows, v.size(3))
    _check_form("dout", dout, sizes, q.dtype, q, " (as q)")
    _check_form("out", out, sizes, q.dtype, q, " (as q)")
    _check_form("lse", lse, rows, _ops.lse_dtype(q.dtype), q)
    if dlse.numel():
        _check_form("dlse", dlse, rows, lse.dtype, q, " (as lse)")
    expected = 1
    for axis in (2, 1, 0):
        if lse.size(axis) > 1 and lse.stride(axis) != expected and lse.numel():
            raise RuntimeError(
                f"lse: expected a contiguous tensor, got stride {lse.stride(axis)} in "
                f"dimension {axis}"
            )
        expected *= lse.size(axis)
    if out_lo.numel():
        _check_out_lo(out_lo, q, v)


def backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    out_lo: Tensor,
    *rest: Any,
) -> Five:
    """The kernel of bwd."""
    *given, wanted, grads_fp32 = rest
    check_inputs(q, k, v)
    options = _Options(q, tuple(given))
    _check_results(q, v, dout, dlse, out, lse, out_lo)
    if not 0 <= wanted < 2 * _ops.WANT_DSINK:
        raise RuntimeError(
            "wanted: expected a set of 1 (dq), 2 (dk), 4 (dv), 8 (dbias) and 16 "
            f"(dsink), got {wanted}"
        )
    workspace = _workspace(q, k, v, wanted, options.features)
    results = gradients(q, k, v, given[0], wanted, grads_fp32)
    dq, dk, dv, dbias, dsink = results
    four, three = (0, 0, 0, 0), (0, 0, 0)  # strides of what is not there
    _launch(
        _ops.ext.backward,
        q,
        (k, v, dout, dlse, out, lse, out_lo, *given, *results, workspace),
        dtype_code(q.dtype),
        grads_fp32,
        wanted,
        *_pointers(q, k, v, out, lse, out_lo, dout, dlse, dq, dk, dv, workspace),
        workspace.numel(),
        *_sizes_and_strides(q, k, v),
        out.stride(),
        dout.stride(),
        dlse.stride() if dlse.numel() else three,
        *(t.stride() if t.dim() == 4 else four for t in (dq, dk, dv)),
        options.scale,
        options.causal,
        options.features,
        *_pointers(dbias, dsink),
    )
    return results


def _table(table: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides as (batch or 1, seqlen, 1, columns)."""
    batched = table if table.dim() == 3 else table[None]
    four = batched[:, :, None]
    return tuple(four.shape), four.stride()


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> Two:
    """The kernel of rotary."""
    check_rotary(q, k, cos, sin)
    out_q, out_k = rotary_outputs(q, k)
    _launch(
        _ops.ext.rotary,
        q,
        (k, cos, sin, out_q, out_k),
        dtype_code(q.dtype),
        dtype_code(cos.dtype),
        *_pointers(q, k, cos, sin, out_q, out_k),
        *_sizes_and_strides(q, k),
        *_table(cos),
        *_table(sin),
        out_q.stride(),
        out_k.stride(),
        interleaved,
        inverse,
    )
    return out_q, out_k
