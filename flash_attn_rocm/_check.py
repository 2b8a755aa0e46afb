"""What our own functions refuse, by name and before anything is launched.

The eligibility test of the shim is not used by them, because a call that names this
package must not be answered by another one.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from . import _ops
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
from ._errors import FlashAttnError
from ._features import KEEP_ALL, WINDOW_MAX, keep_of
from ._guard import switch
from ._reason import Reason
from ._simulate import current_arch, traced_arch
from ._torch import (
    forward_ad,
    functorch_active,
    get_unwrapped,
    is_dynamo_compiling,
    is_functorch_wrapped,
    traced_functorch_active,
)

_DEVICE_WORDS = {
    Reason.UNTESTED: (
        "a GPU that was tested (FLASH_ATTN_ROCM_SELFTEST=0 forbids it; "
        "FLASH_ATTN_ROCM_UNTESTED=1 does without)"
    ),
    Reason.SELFTEST: "a GPU that passed the self-test (flash-attn-rocm doctor)",
    Reason.CODE_OBJECT: (
        "no code object for this architecture; install again with FA_ARCHS naming it"
    ),
}

BSHD = "batch, seqlen, heads, head dim"
BHSD = "batch, heads, seqlen, head dim"
PACKED = "tokens, heads, head dim"


def refuse(name: str, expected: str, given: Any) -> FlashAttnError:
    """The error to raise."""
    return FlashAttnError(f"{name}: expected {expected}, got {given}")


def check_package() -> None:
    """Refuse every call where the package cannot work."""
    if _ops.op is None:
        raise FlashAttnError(str(_ops.unavailable))
    if config.device == "off":
        raise FlashAttnError("FLASH_ATTN_ROCM_DEVICE=off switches this package off")
    if switch.off:
        why = f": {switch.why}" if switch.why else ""
        raise FlashAttnError(f"disable() switched this package off{why}")


def check_kinds(**tensors: Any) -> bool:
    """Refuse what is no tensor; whether a gradient is needed."""
    requires_grad = False
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise refuse(name, "a tensor", type(tensor).__name__)
        requires_grad = requires_grad or tensor.requires_grad
    return torch.is_grad_enabled() and requires_grad


def check_strided(name: str, tensor: Tensor) -> None:
    if tensor.is_nested or tensor.layout is not torch.strided:
        form = "nested" if tensor.is_nested else tensor.layout
        raise refuse(name, "a strided tensor", form)


def check_device_of(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise refuse(name, f"q's device {q.device}", tensor.device)


def check_forms(q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
    """Layout, rank, dtype and device of q, k and v as they are given."""
    rank = layout.count(",") + 1
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_strided(name, tensor)
        if tensor.dim() != rank:
            expected = f"{rank} dimensions ({layout})"
            raise refuse(name, expected, f"shape {tuple(tensor.shape)}")
        if tensor.dtype not in HEAD_DIM_MAX:
            expected = "dtype " + ", ".join(map(str, HEAD_DIM_MAX))
            raise refuse(name, expected, tensor.dtype)
        if tensor.dtype is not q.dtype:
            raise refuse(name, f"q's dtype {q.dtype}", tensor.dtype)
        check_device_of(name, tensor, q)


def check_sizes(q: Tensor, k: Tensor, v: Tensor, needs_grad: bool) -> None:
    """Sizes of q, k and v in the ops' layout (B, H, S, D)."""
    batch, heads, _, head_dim = q.shape
    for name, tensor in (("k", k), ("v", v)):
        if tensor.size(0) != batch:
            raise refuse(name, f"q's batch size {batch}", tensor.size(0))
    if k.size(3) != head_dim:
        raise refuse("k", f"q's head dim {head_dim}", k.size(3))
    for index, what in ((2, "length"), (1, "number of heads")):
        if v.size(index) != k.size(index):
            raise refuse("v", f"k's {what} {k.size(index)}", v.size(index))
    heads_k = k.size(1)
    if (heads_k == 0 and heads != 0) or (heads_k != 0 and heads % heads_k != 0):
        raise refuse("k", f"a number of heads that divides q's {heads}", heads_k)
    limits = TRAINED_HEAD_DIM_MAX if needs_grad else HEAD_DIM_MAX
    limit = limits.get(q.dtype, 0)
    for name, tensor in (("q", q), ("v", v)):
        if not 1 <= tensor.size(3) <= limit:
            raise refuse(name, f"a head dim from 1 to {limit}", tensor.size(3))
    if batch > GRID_MAX or heads > GRID_MAX:
        expected = f"at most {GRID_MAX} batches and heads"
        raise refuse("q", expected, f"{batch} and {heads}")
    for name, tensor in (("q", q), ("k", k)):
        if tensor.size(2) > SEQLEN_MAX:
            raise refuse(name, f"a length of at most {SEQLEN_MAX}", tensor.size(2))


def _needs_grad_inside(tensor: Tensor | None) -> bool:
    """Whether what a functorch transform wraps requires grad; vmap's does not say."""
    while tensor is not None and is_functorch_wrapped(tensor):
        tensor = get_unwrapped(tensor)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def check_transforms(needs_grad: bool, **tensors: Tensor | None) -> None:
    """Refuse what would lose a derivative or stop inside of torch."""
    if forward_ad._current_level >= 0:
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if forward_ad.unpack_dual(tensor).tangent is not None:
                raise refuse(name, "a tensor without a tangent", "a dual tensor")
    compiling = is_dynamo_compiling()
    if needs_grad and (traced_functorch_active() if compiling else functorch_active()):
        expected = "no gradient under a functorch transform (grad, vjp, vmap)"
        raise refuse("q", expected, "a transform")
    if not compiling and functorch_active() and torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if _needs_grad_inside(tensor):
                expected = "no gradient under a functorch transform (grad, vjp, vmap)"
                raise refuse(name, expected, "a tensor that requires grad outside")


def check_device(q: Tensor) -> None:
    """Refuse a device that runs no kernels."""
    compiling = is_dynamo_compiling()
    if q.is_cpu:
        arch = traced_arch() if compiling else current_arch()
        if arch is not None:
            if compiling:  # the graph keeps no error of a missing code object
                traced_cpu_serves(arch, q.dtype)
        else:
            raise refuse(
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
        raise refuse("q", words, f"device {q.device}")


def number(name: str, expected: str, given: Any) -> float:
    """`given` if it is a number, one of numpy's too."""
    if isinstance(given, (float, int)):
        return given
    if isinstance(given, Real):
        return float(given)
    raise refuse(name, expected, repr(given))


def count(name: str, expected: str, given: Any, least: int) -> int:
    """`given` if it is a whole number and not less than `least`."""
    if isinstance(given, Integral) and not isinstance(given, (int, bool)):
        given = int(given)  # one of numpy's
    if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)):
        raise refuse(name, expected, repr(given))
    if given < least:
        raise refuse(name, expected, given)
    return given  # type: ignore[return-value]


def check_flags(**flags: Any) -> None:
    for name, given in flags.items():
        if not isinstance(given, int) or given not in (0, 1):
            raise refuse(name, "True or False", repr(given))


def scale_of(name: str, scale: Any, head_dim: int) -> float:
    """The factor on scores; None is 1 / sqrt(head dim)."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    expected = "None or a number of magnitude below 2^127"
    factor = number(name, expected, scale)
    if not -SCALE_MAX < factor < SCALE_MAX:
        raise refuse(name, expected, scale)
    return factor


def dropout_of(dropout_p: Any) -> float:
    """The probability; 0.0 where it is too small to drop anything."""
    expected = "a probability, at least 0 and below 1"
    probability = number("dropout_p", expected, dropout_p)
    if not 0.0 <= probability < 1.0:
        raise refuse("dropout_p", expected, dropout_p)
    return 0.0 if keep_of(probability) == KEEP_ALL else float(probability)


def softcap_of(softcap: Any) -> float:
    """The cap; 0.0 is none."""
    expected = "0.0 (no cap) or a number from 2^-120 to 2^120"
    cap = number("softcap", expected, softcap)
    if cap != 0.0 and not 2.0**-120 <= cap <= 2.0**120:
        raise refuse("softcap", expected, softcap)
    return float(cap)


def window_of(name: str, window: Any) -> tuple[int, int]:
    """Keys before and behind the own one; -1 is all."""
    expected = "two whole numbers (left, right), each at least -1"
    sides = window if isinstance(window, (tuple, list)) else ()
    if len(sides) != 2:
        raise refuse(name, expected, repr(window))
    left, right = (count(name, expected, side, -1) for side in sides)
    return min(left, WINDOW_MAX), min(right, WINDOW_MAX)


def slopes_of(slopes: Any, q: Tensor) -> Tensor:
    """ALiBi's slopes as the op takes them; q is (B, H, S, D)."""
    if not isinstance(slopes, Tensor):
        raise refuse("alibi_slopes", "None or a tensor", type(slopes).__name__)
    check_strided("alibi_slopes", slopes)
    check_transforms(False, alibi_slopes=slopes)
    batch, heads = q.size(0), q.size(1)
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        expected = f"shape ({heads},) or ({batch}, {heads})"
        raise refuse("alibi_slopes", expected, tuple(slopes.shape))
    dtype = _ops.lse_dtype(q.dtype)
    if slopes.dtype is not torch.float32 and slopes.dtype is not dtype:
        raise refuse("alibi_slopes", f"dtype {dtype}", slopes.dtype)
    check_device_of("alibi_slopes", slopes, q)
    if slopes.requires_grad and torch.is_grad_enabled():
        expected = "slopes that need no gradient (a learned bias goes through `bias`)"
        raise refuse("alibi_slopes", expected, "a tensor that requires grad")
    return slopes.to(dtype).contiguous()
