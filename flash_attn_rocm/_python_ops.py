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
from ._ops import Three, check_inputs, dtype_code, dtype_name, gradients, outputs
from ._simulate import launch_arch

_INT_MAX = 2**31 - 1  # C's
_AXES = ("batch", "head", "row", "head dim")


def _check_supported(
    tensors: dict[str, Tensor | None],
    floats: dict[str, float],
    windows: dict[str, int],
) -> None:
    for name, tensor in tensors.items():
        # The dispatcher hands an undefined tensor over as None.
        if tensor is not None and tensor.numel():
            raise RuntimeError(
                f"{name}: not supported yet, expected a tensor without elements, got "
                f"{tensor.numel()} elements"
            )
    for name, number in floats.items():
        if number != 0.0:
            raise RuntimeError(f"{name}: not supported yet, expected 0.0, got {number}")
    for name, window in windows.items():
        if window != -1:
            raise RuntimeError(
                f"{name}: not supported yet, expected -1 (open), got {window}"
            )


def _clamp(number: int) -> int:
    """As in C: beyond an int it must not turn into something legal."""
    return max(-_INT_MAX, min(number, _INT_MAX))


def _launch(entry: Callable[..., None], q: Tensor, *rest: Any) -> None:
    """entry(device type, device index, stream, architecture, ...)."""
    if q.is_cuda:
        with torch.cuda.device(q.device):
            stream = torch.cuda.current_stream(q.device).cuda_stream
            entry(1, q.get_device(), stream, None, *rest)
    else:
        entry(0, 0, 0, launch_arch(), *rest)


def _workspace(q: Tensor, k: Tensor, v: Tensor, wanted: int) -> Tensor:
    shapes = (tuple(t.shape) for t in (q, k, v))
    size = _ops.ext.workspace(dtype_code(q.dtype), *shapes, wanted)
    return torch.empty(size, dtype=torch.uint8, device=q.device)


def _pointers(*tensors: Tensor) -> tuple[int, ...]:
    """Addresses; 0 for a tensor without elements."""
    return tuple(t.data_ptr() if t.numel() else 0 for t in tensors)


def _sizes_and_strides(*tensors: Tensor) -> list[tuple[int, ...]]:
    return [part for t in tensors for part in (tuple(t.shape), t.stride())]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor,
    alibi: Tensor,
    sink: Tensor,
    seed: Tensor,
    blocks: Tensor,
    scale: float,
    softcap: float,
    dropout_p: float,
    causal: int,
    window_left: int,
    window_right: int,
    needs_grad: bool,
) -> Three:
    """The kernel of fwd."""
    _check_supported(
        dict(bias=bias, mask=mask, alibi=alibi, sink=sink, seed=seed, blocks=blocks),
        dict(softcap=softcap, dropout_p=dropout_p),
        dict(window_left=window_left, window_right=window_right),
    )
    check_inputs(q, k, v)
    workspace = _workspace(q, k, v, 0)
    out, lse, out_lo = outputs(q, v, needs_grad)
    _launch(
        _ops.ext.forward,
        q,
        dtype_code(q.dtype),
        *_pointers(q, k, v, out, lse, out_lo, workspace),
        workspace.numel(),
        *_sizes_and_strides(q, k, v),
        out.stride(),
        scale,
        _clamp(causal),
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
    bias: Tensor,
    mask: Tensor,
    alibi: Tensor,
    sink: Tensor,
    seed: Tensor,
    blocks: Tensor,
    scale: float,
    softcap: float,
    dropout_p: float,
    causal: int,
    window_left: int,
    window_right: int,
    wanted: int,
    grads_fp32: bool,
) -> Three:
    """The kernel of bwd."""
    _check_supported(
        dict(bias=bias, mask=mask, alibi=alibi, sink=sink, seed=seed, blocks=blocks),
        dict(softcap=softcap, dropout_p=dropout_p),
        dict(window_left=window_left, window_right=window_right),
    )
    check_inputs(q, k, v)
    _check_results(q, v, dout, dlse, out, lse, out_lo)
    if not 0 <= wanted <= 7:
        raise RuntimeError(
            f"wanted: expected a set of 1 (dq), 2 (dk) and 4 (dv), got {wanted}"
        )
    workspace = _workspace(q, k, v, wanted)
    dq, dk, dv = gradients(q, k, v, wanted, grads_fp32)
    four, three = (0, 0, 0, 0), (0, 0, 0)  # strides of what is not there
    _launch(
        _ops.ext.backward,
        q,
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
        scale,
        _clamp(causal),
    )
    return dq, dk, dv
