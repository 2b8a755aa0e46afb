"""May this call run fused, and if not, why?

route() is the one test, shared by the shim (on every call, so no property of a
tensor is read twice: each costs tens of nanoseconds) and by explain().
torch.compile traces through it: only tensor metadata, constants and functions
that Dynamo knows. On any doubt it gives a reason, and the stock function answers.

The traps behind each test: tests/test_shim_traps.py.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _ops
from ._autograd import absent
from ._config import code_objects, config, logger
from ._features import KEEP_ALL, Features, keep_of
from ._guard import selftest_passed, switch
from ._reason import Reason
from ._shapes import (
    STRIDE_BYTES,
    as_four,
    can_be_four,
    leading_sizes,
    mask_as_four,
    within_strides,
)
from ._simulate import current_arch, default_missing, note_traced, traced_arch
from ._torch import (
    constant_in_traces,
    flash_enabled,
    forward_ad,
    functorch_active,
    get_autocast_dtype,
    graph_task_id,
    has_torch_function,
    is_autocast_enabled,
    is_dynamo_compiling,
    is_tracing,
    traced_exporting,
    traced_flash_enabled,
    traced_functorch_active,
)

_Result = TypeVar("_Result")

_float64 = torch.float64
_is_grad_enabled = torch.is_grad_enabled

# Limits of the kernels, as in csrc/host/check.c, which checks them again.


def _head_dims(*passes: str) -> dict[torch.dtype, int]:
    """The largest head dim that kernels serve in each of `passes`, by dtype."""
    if _ops.op is None:
        return {}
    rows = _ops.ext.variants()
    limits: dict[torch.dtype, int] = {}
    for dtype in _ops.DTYPES:
        name = _ops.dtype_name(dtype)
        limits[dtype] = min(
            max(
                (r["dim"] for r in rows if r["pass"] == wanted and name in r["reads"]),
                default=0,
            )
            for wanted in passes
        )
    return {dtype: limit for dtype, limit in limits.items() if limit > 0}


HEAD_DIM_MAX = _head_dims("forward")
TRAINED_HEAD_DIM_MAX = _head_dims("forward", "backward_kv", "backward_q")
GRID_MAX = 65535
SEQLEN_MAX = 2**30
SCALE_MAX = 2.0**127  # of its magnitude, exclusive
# enable_gqa came with torch 2.5.
HAS_GQA = _ops.version_of(str(torch.__version__)) >= (2, 5)
# Since then stock takes a float32 mask beside queries of another dtype.
HAS_FLOAT_MASKS = _ops.version_of(str(torch.__version__)) >= (2, 5)

# Nothing runs fused in this process: switched off, or no op.
_blocked: Reason | None = None
if config.device == "off":
    _blocked = Reason.OFF
elif _ops.op is None:
    _blocked = Reason.UNAVAILABLE


def is_causal_bias(mask: Any) -> bool:
    """Whether `mask` is a torch.nn.attention.bias.CausalBias."""
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


_gpu_verdicts: dict[int, Reason | None] = {}


def _judge_gpu(index: int) -> Reason | None:
    present = code_objects(config.code_dir)
    if config.device == "standin":
        if torch.version.cuda is None:
            return Reason.DEVICE
        major, minor = torch.cuda.get_device_capability(index)
        # A cubin runs on its own major version and any later minor one.
        fits = any(f"sm_{major}{m}" in present for m in range(minor + 1))
        return None if fits else Reason.CODE_OBJECT
    if config.device != "auto" or torch.version.hip is None:
        return Reason.DEVICE
    name = torch.cuda.get_device_properties(index).gcnArchName
    if name.split(":")[0] not in present:
        return Reason.CODE_OBJECT
    if config.untested:
        return None
    if not config.selftest:
        return Reason.UNTESTED
    return _judge_by_selftest(index)


def _judge_by_selftest(index: int) -> Reason | None:
    """Run or recall the self-test; kernels that did not pass are never launched."""
    try:
        return None if selftest_passed(index) else Reason.SELFTEST
    except Exception as error:
        logger.warning("self-test of GPU %d could not run: %s", index, error)
        return Reason.SELFTEST


def gpu_reason(index: int) -> Reason | None:
    """Why GPU `index` runs nothing fused, or None. Judged once per device."""
    try:
        return _gpu_verdicts[index]
    except KeyError:
        pass
    try:
        verdict = _judge_gpu(index)
    except Exception:  # a device that torch cannot describe
        verdict = Reason.DEVICE
    return _gpu_verdicts.setdefault(index, verdict)


def cpu_reason() -> Reason:
    """Why CPU tensors run nothing fused in a context that does not simulate."""
    return Reason.CODE_OBJECT if default_missing else Reason.DEVICE


def _can_load(
    device_type: int, index: int, arch: str | None, dtype: torch.dtype
) -> bool:
    """Whether what a launch needs can be loaded; one warning if not."""
    try:
        _ops.ext.load(device_type, index, arch, _ops.dtype_code(dtype))
    except RuntimeError as error:
        logger.warning("compiled calls stay with stock SDPA: %s", error)
        return False
    return True


# For traces, which keep the answer: nobody catches the error of a launch in a
# compiled graph. They are bool because Dynamo cannot keep a Reason.


def traced_cpu_serves(arch: str, dtype: torch.dtype) -> bool:
    note_traced(arch)
    return _can_load(0, 0, arch, dtype)


def traced_gpu_serves(index: int, dtype: torch.dtype) -> bool:
    return gpu_reason(index) is None and _can_load(1, index, None, dtype)


constant_in_traces(traced_cpu_serves)
constant_in_traces(traced_gpu_serves)


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is Tensor or type(tensor) is Parameter


def _kind_of(*tensors: Any) -> Reason:
    if all(isinstance(tensor, Tensor) for tensor in tensors):
        return Reason.SUBCLASS
    return Reason.ARGUMENT


def _mask_reason(
    mask: Tensor, query: Tensor, dtype: torch.dtype, autocast: bool
) -> Reason | None:
    """Why attn_mask is stock's to judge, or None.

    Args:
        dtype: the dtype of the kernels.
        autocast: stock casts it to that, if it is floating point and not float64.
    """
    if mask.is_nested or mask.layout is not torch.strided:
        return Reason.MASK
    if mask.device != query.device:
        return Reason.DEVICE
    kind = mask.dtype
    if kind is torch.bool or kind is dtype:
        return None
    if kind not in HEAD_DIM_MAX or kind is _float64:
        return Reason.MASK
    if autocast:
        return Reason.MASK if dtype is _float64 else None
    return None if kind is torch.float32 and HAS_FLOAT_MASKS else Reason.MASK


def route(
    run: Callable[..., _Result],
    attend: Callable[..., _Result],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Result | Reason:
    """run(*arguments of fwd) if the call may run fused, else the reason.

    If it needs a gradient or more than 4-D q, k and v, attend(q, k, v, features,
    origins, needs_grad, leading) instead; the origins are q, k and v before autocast's
    cast, None if there was none, and `leading` the sizes that the result has before
    its last two, None for two as in q.

    Raises whatever an argument of an unexpected kind makes it raise; reason_of()
    tells that from an error of `run` or `attend`.
    """
    # Who is asking. has_torch_function also sees function modes.
    if attn_mask is not None and is_causal_bias(attn_mask):
        return Reason.CAUSAL_BIAS
    if _blocked is not None:
        return _blocked
    # A checkpoint's recomputation must be what its forward was.
    if switch.off and (is_dynamo_compiling() or graph_task_id() == -1):
        return Reason.DISABLED
    if has_torch_function(query, key, value, attn_mask):
        return Reason.SUBCLASS
    if not type(query) is type(key) is type(value) is Tensor:
        if not (_is_plain(query) and _is_plain(key) and _is_plain(value)):
            return _kind_of(query, key, value)
    if attn_mask is not None and not _is_plain(attn_mask):
        return _kind_of(attn_mask)
    if forward_ad._current_level >= 0:
        return Reason.FORWARD_AD
    compiling = is_dynamo_compiling()
    if compiling:
        if traced_functorch_active():
            return Reason.FUNCTORCH
        if traced_exporting():  # other exports come with a function mode
            return Reason.EXPORT
        if query.is_nested or key.is_nested or value.is_nested:
            return Reason.NESTED
        if not traced_flash_enabled():
            return Reason.FLASH_DISABLED
    else:
        if functorch_active():
            return Reason.FUNCTORCH
        if is_tracing():  # make_fx comes with a function mode
            return Reason.TRACE
        if not flash_enabled():
            return Reason.FLASH_DISABLED

    # Where it would run.
    arch, index = None, 0
    if query.is_cpu and key.is_cpu and value.is_cpu:
        arch = traced_arch() if compiling else current_arch()
        if arch is None:
            return cpu_reason()
        device_type = "cpu"
    elif query.is_cuda and key.is_cuda and value.is_cuda:
        index = query.get_device()
        if key.get_device() != index or value.get_device() != index:
            return Reason.DEVICE
        if not compiling:
            reason = gpu_reason(index)
            if reason is not None:
                return reason
        device_type = "cuda"
    else:
        return Reason.DEVICE
    needs_grad = _is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )

    # What is asked for.
    if is_causal is not False and is_causal is not True:
        return Reason.ARGUMENT
    if enable_gqa is not False and (enable_gqa is not True or not HAS_GQA):
        return Reason.ARGUMENT
    if not isinstance(dropout_p, (float, int)):
        # What equals 0 without being a number for stock: 0j, Fraction(0), array(0.0).
        return Reason.DROPOUT if dropout_p != 0.0 else Reason.ARGUMENT
    if dropout_p != 0.0 and not 0.0 < dropout_p < 1.0:
        return Reason.DROPOUT
    if scale is not None:
        if not isinstance(scale, (float, int)):
            return Reason.ARGUMENT
        if not -SCALE_MAX < scale < SCALE_MAX:
            return Reason.SCALE
    dtype = query.dtype
    cast = False
    autocast = is_autocast_enabled(device_type)
    if autocast:
        # Stock casts to this dtype what is floating point and not float64.
        wanted = get_autocast_dtype(device_type)
        if not dtype is key.dtype is value.dtype or dtype not in (wanted, _float64):
            for tensor in (query, key, value):
                if not tensor.is_floating_point() or tensor.dtype is _float64:
                    return Reason.DTYPE
            dtype, cast = wanted, True
    elif not dtype is key.dtype is value.dtype:
        return Reason.DTYPE
    if dtype not in HEAD_DIM_MAX:
        return Reason.DTYPE
    if attn_mask is not None:
        if is_causal:  # newer stock refuses both, older had various meanings
            return Reason.MASK
        reason = _mask_reason(attn_mask, query, dtype, autocast)
        if reason is not None:
            return reason
        needs_grad = needs_grad or (_is_grad_enabled() and attn_mask.requires_grad)

    # Its sizes.
    given = (query, key, value)
    shape, shape_k, shape_v = query.shape, key.shape, value.shape
    regular = len(shape) == len(shape_k) == len(shape_v) == 4
    regular = regular and shape[0] == shape_k[0] == shape_v[0]
    if not regular:
        if not can_be_four(query, key, value):
            return Reason.RANK
        if enable_gqa and min(query.dim(), key.dim(), value.dim()) < 3:
            return Reason.RANK
        views = as_four(query, key, value, enable_gqa)
        if views is None:
            return Reason.SHAPE
        query, key, value = views
        shape, shape_k, shape_v = query.shape, key.shape, value.shape
    batch, heads, seqlen_q, head_dim = shape
    _, heads_k, seqlen_k, head_dim_k = shape_k
    _, heads_v, seqlen_v, head_dim_v = shape_v
    if not enable_gqa and not heads == heads_k == heads_v:
        views = as_four(query, key, value, False)
        if views is None:
            return Reason.HEADS
        regular = False
        query, key, value = views
        heads, heads_k, heads_v = query.size(1), key.size(1), value.size(1)
    limit = TRAINED_HEAD_DIM_MAX.get(dtype, 0) if needs_grad else HEAD_DIM_MAX[dtype]
    if head_dim_k != head_dim or not 1 <= head_dim <= limit:
        return Reason.HEAD_DIM
    if not 1 <= head_dim_v <= limit:
        return Reason.HEAD_DIM
    if seqlen_v != seqlen_k:
        return Reason.SHAPE
    if heads_v != heads_k:
        return Reason.HEADS
    if heads != heads_k and (heads_k == 0 or heads % heads_k != 0):
        return Reason.HEADS
    if batch > GRID_MAX or heads > GRID_MAX:
        return Reason.SIZE
    if seqlen_q > SEQLEN_MAX or seqlen_k > SEQLEN_MAX:
        return Reason.SIZE
    leading = None if regular else leading_sizes(*given, heads)
    if attn_mask is not None:
        rank = 4 if leading is None else len(leading) + 2
        sizes = (batch, heads, seqlen_q, seqlen_k)
        attn_mask = mask_as_four(attn_mask, rank, (leading or ())[:-1], sizes)
        if attn_mask is None or not within_strides(attn_mask):
            return Reason.MASK
        # The gradient of a mask lies in memory without gaps.
        if attn_mask.requires_grad and seqlen_k * 8 >= STRIDE_BYTES:
            return Reason.MASK
    if compiling:
        if arch is not None:
            if not traced_cpu_serves(arch, dtype):
                return Reason.FAILED
        elif not traced_gpu_serves(index, dtype):
            return Reason.DEVICE

    factor = 1.0 / math.sqrt(head_dim) if scale is None else scale
    causal = 1 if is_causal else 0
    origins = None
    if cast:
        origins = (query, key, value)
        query, key, value = given
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if not regular:
            views = as_four(query, key, value, enable_gqa)
            assert views is not None
            query, key, value = views
    if regular and not needs_grad and attn_mask is None and dropout_p == 0.0:
        # In a compiled graph for a GPU, a CPU tensor would rule out CUDA graphs.
        none = query.new_empty(0) if compiling else absent
        return run(
            query,
            key,
            value,
            none,
            none,
            none,
            none,
            none,
            none,
            none,
            none,
            none,
            factor,
            0.0,
            0.0,
            causal,
            -1,
            -1,
            0,
            0,
            0,
            False,
        )
    bias = mask = None
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            mask = attn_mask
        elif attn_mask.dtype is dtype:
            bias = attn_mask
        else:
            bias = attn_mask.to(_ops.lse_dtype(dtype))
    dropout = 0.0 if keep_of(dropout_p) == KEEP_ALL else float(dropout_p)
    features = Features(
        bias=bias, mask=mask, scale=factor, dropout_p=dropout, causal=causal
    )
    return attend(query, key, value, features, origins, needs_grad, leading)


def reason_of(*args: Any, **kwargs: Any) -> Reason | None:
    """The reason for a call on which route() raised; asks again, runs nothing.

    FAILED if `run` raised, None if `attend` did.
    """
    try:
        return route(lambda *_: Reason.FAILED, lambda *_: None, *args, **kwargs)
    except Exception:
        # Not lost: the stock function gets the same arguments and raises its own
        # error, or serves them. A strided nested tensor has no shape and so raises.
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        nested = any(t.is_nested for t in tensors)
        return Reason.NESTED if nested else Reason.ARGUMENT
