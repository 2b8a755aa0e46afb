"""The ops flash_attn_rocm::fwd, ::bwd and ::rotary: registration, fake kernels, flops.

Registered from C through libtorch's stable C ABI where this torch has it,
otherwise from Python (_python_ops) around the same C entries. Whatever goes wrong
here leaves the ops None and `unavailable` set: importing the package never fails
because torch was exchanged, and every call then uses the stock function.

The ops know nothing of autograd; _autograd wraps them.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import importlib
import os
import re
from typing import Any, Callable

import torch
from torch import Tensor

from . import _torch
from ._config import config, logger, simulator_path
from ._simulate import launch_arch
from ._version import TORCH_MIN, TORCH_MIN_TEXT, __version__

Three = tuple[Tensor, Tensor, Tensor]
Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Two = tuple[Tensor, Tensor]

_EXTENSION = "flash_attn_rocm._C"
_FEATURES = (
    "Tensor bias, Tensor mask, Tensor alibi, Tensor sink, Tensor seed, Tensor span_q, "
    "Tensor span_k, Tensor blocks, Tensor blocks_t, float scale, float softcap, "
    "float dropout_p, int causal, int window_left, int window_right, int sink_keys, "
    "int block_q, int block_k, "
)
SCHEMA = (
    f"fwd(Tensor q, Tensor k, Tensor v, {_FEATURES}bool needs_grad) -> "
    "(Tensor out, Tensor lse, Tensor out_lo)"
)
BACKWARD_SCHEMA = (
    "bwd(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, Tensor out_lo, {_FEATURES}int wanted, bool grads_fp32) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)
ROTARY_SCHEMA = (
    "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, "
    "bool inverse) -> (Tensor out_q, Tensor out_k)"
)
# The last is no mask either, but windows and ALiBi start at the top left.
CAUSAL_NONE, CAUSAL_TOP_LEFT, CAUSAL_BOTTOM_RIGHT, CAUSAL_NONE_TOP_LEFT = 0, 1, 2, 3
# The set `wanted` of bwd.
WANT_DQ, WANT_DK, WANT_DV, WANT_DBIAS, WANT_DSINK = 1, 2, 4, 8, 16

# Those of _FEATURES that are tensors, in its order.
FEATURE_TENSORS = (
    "bias",
    "mask",
    "alibi",
    "sink",
    "seed",
    "span_q",
    "span_k",
    "blocks",
    "blocks_t",
)

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

# Results of load(), which runs once, at import.
ext: Any = None  # the extension module, None if it cannot be imported
op: Callable[..., Three] | None = None
backward_op: Callable[..., Five] | None = None
rotary_op: Callable[..., Two] | None = None
source: str | None = None  # "c" or "python": who registered the ops
unavailable: str | None = None  # why there are no ops


def dtype_code(dtype: torch.dtype) -> int:
    """The number by which the extension knows a dtype."""
    return _DTYPE_CODES[dtype]


_libraries: list[Any] = []  # registrations live as long as these objects


# --------------------------------------------------------------------------
# The form of the results, for the fakes and the Python kernels. Refusals have the
# words of csrc, so that callers see one text whoever registered the ops.


def dtype_name(dtype: torch.dtype) -> str:
    """The name without "torch."."""
    return str(dtype).replace("torch.", "")


def check_strided(name: str, tensor: Tensor | None) -> None:
    """Refuse what the dispatcher hands over without strides, or as None."""
    if tensor is None or tensor.layout is not torch.strided:
        got = "None" if tensor is None else tensor.layout
        raise RuntimeError(
            f"{name}: expected a strided tensor, got something else ({got})"
        )


def check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    """Refuse a tensor on another device than q's."""
    if tensor.device != q.device:
        raise RuntimeError(
            f"{name}: expected device {q.device} (as q), got {tensor.device}"
        )


def _check_form(name: str, tensor: Tensor, axes: str, q: Tensor) -> None:
    """Rank, by the names of its axes; a dtype that kernels have; q's device."""
    dims = axes.count(",") + 1
    if tensor.dim() != dims:
        raise RuntimeError(
            f"{name}: expected {dims} dimensions ({axes}), got {tensor.dim()}"
        )
    if tensor.dtype not in _DTYPE_CODES:
        raise RuntimeError(
            f"{name}: expected dtype float16, bfloat16, float32 or float64, got "
            f"{tensor.dtype}"
        )
    check_device(name, tensor, q)


def _check_dtype(name: str, tensor: Tensor, whose: str, like: Tensor) -> None:
    """Refuse another dtype than `like`'s."""
    if tensor.dtype is not like.dtype:
        raise RuntimeError(
            f"{name}: expected dtype {dtype_name(like.dtype)} (as {whose}), got "
            f"{dtype_name(tensor.dtype)}"
        )


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What C cannot see of q, k and v: layout, rank, dtype, device."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_strided(name, tensor)
        _check_form(name, tensor, "batch, heads, seqlen, head dim", q)
    for name, tensor in (("k", k), ("v", v)):
        _check_dtype(name, tensor, "q", q)


def check_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """What C cannot see of the tensors of rotary: layout, rank, dtype, device."""
    inputs, tables = "batch, seqlen, heads, head dim", "seqlen, columns"
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_strided(name, tensor)
        axes = inputs if name in ("q", "k") else tables
        if axes is tables and tensor.dim() == 3:
            axes = f"batch, {tables}"
        _check_form(name, tensor, axes, q)
    for name, tensor, whose, like in (("k", k, "q", q), ("sin", sin, "cos", cos)):
        _check_dtype(name, tensor, whose, like)


def rotary_outputs(q: Tensor, k: Tensor) -> Two:
    """Uninitialised out_q and out_k."""
    like = torch.empty_like
    return like(q, requires_grad=False), like(k, requires_grad=False)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the log-sum-exp for inputs of `dtype`."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def residue_floats(q: Tensor, v: Tensor) -> int:
    """Elements of out_lo: what rounding took from the results, see csrc/fa.h."""
    if q.dtype is torch.float64:
        return 0
    rows = q.size(0) * q.size(1) * q.size(2)
    if q.dtype is torch.float32:
        return rows
    # No more than arithmetic, so that sizes may stay symbols.
    return (rows + 3) // 4 * 4 + (rows * v.size(3) + 1) // 2


def outputs(q: Tensor, v: Tensor, needs_grad: bool) -> Three:
    """Uninitialised out, lse and out_lo."""
    if v.size(3) == q.size(3):
        # preserve_format: dense, dimensions in the order of q's strides.
        out = torch.empty_like(q, requires_grad=False)
    else:
        # The same order. Gaps let torch sort the strides instead of keeping them,
        # and on "meta" the gaps cost no memory.
        sizes = (q.size(0), q.size(1), q.size(2), v.size(3))
        gaps = [stride * 2 * v.size(3) for stride in q.stride()]
        if q.stride(3) == 1:
            gaps[3] = 1  # innermost, also where a head dim of 1 shares its stride
        form = torch.empty_strided(sizes, gaps, dtype=q.dtype, device="meta")
        out = torch.empty_like(form, device=q.device)
    sizes_lse = (q.size(0), q.size(1), q.size(2))
    lse = q.new_empty(sizes_lse, dtype=lse_dtype(q.dtype))
    size_lo = residue_floats(q, v) if needs_grad else 0
    return out, lse, lse.new_empty((size_lo,))


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    wanted: int,
    grads_fp32: bool,
) -> Five:
    """Uninitialised results of bwd; without elements where not wanted."""
    dtype = torch.float32 if grads_fp32 and q.dtype in HALVES else q.dtype
    dq, dk, dv = (
        torch.empty_like(tensor, dtype=dtype, requires_grad=False)
        if wanted & bit
        else tensor.new_empty((0,), dtype=dtype)
        for tensor, bit in ((q, WANT_DQ), (k, WANT_DK), (v, WANT_DV))
    )
    sums = lse_dtype(q.dtype)
    if wanted & WANT_DBIAS and bias is not None:
        dbias = bias.new_empty(bias.shape)
    else:
        dbias = q.new_empty((0,), dtype=sums)
    rows = (q.size(0), q.size(1), q.size(2)) if wanted & WANT_DSINK else (0,)
    return dq, dk, dv, dbias, q.new_empty(rows, dtype=sums)


# torch also calls the fakes for real tensors of which one is on "meta".


def _check_meta(q: Tensor, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        # Absent ones may lie anywhere.
        if tensor is not None and tensor.is_meta:
            check_device(name, tensor, q)


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Three:
    check_inputs(q, k, v)
    _check_meta(q, dict(zip(FEATURE_TENSORS, rest)))
    return outputs(q, v, rest[-1])


def _fake_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> Five:
    check_inputs(q, k, v)
    names = ("out", "lse", "out_lo", *FEATURE_TENSORS)
    _check_meta(q, {"dout": dout, "dlse": dlse, **dict(zip(names, rest))})
    return gradients(q, k, v, rest[3], rest[-2], rest[-1])


def _fake_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> Two:
    check_rotary(q, k, cos, sin)
    return rotary_outputs(q, k)


# --------------------------------------------------------------------------
# Flops, for FlopCounterMode; causal is not counted, as in torch.


def _products(q: Any, k: Any) -> int:
    """Flops of (Sq, n) x (n, Sk) for all heads, for n = 1."""
    batch, heads, seqlen_q, _ = q
    return int(2 * batch * heads * seqlen_q * k[2])


def _flops(q: Any, k: Any, v: Any, *_rest: Any, **_shapes: Any) -> int:
    return int(_products(q, k) * (q[3] + v[3]))


def _backward_flops(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, *rest: Any, **_shapes: Any
) -> int:
    # Scores again and dout V^T, then a product for each gradient.
    wanted = rest[-2]
    widths = q[3] + v[3]
    for bit, width in ((WANT_DQ, q[3]), (WANT_DK, k[3]), (WANT_DV, v[3])):
        if wanted & bit:
            widths += width
    return int(_products(q, k) * widths)


def describe(forward: Any, backward: Any) -> None:
    """Give an op like fwd and one like bwd their fake kernels and their flops."""
    for packet, fake in ((forward, _fake), (backward, _fake_backward)):
        torch.library.register_fake(packet.default._name)(fake)
    try:
        from torch.utils.flop_counter import register_flop_formula
    except ImportError:
        return
    register: Any = register_flop_formula
    register(forward)(_flops)
    register(backward)(_backward_flops)


# --------------------------------------------------------------------------
# Registration


def fragment() -> Any:
    """A torch.library.Library for more ops of this package, which lives for good."""
    make: Any = torch.library.Library  # untyped in torch
    library = make("flash_attn_rocm", "FRAGMENT")
    _libraries.append(library)
    return library


def _register_from_python() -> None:
    from ._python_ops import backward, forward, rotary

    library = fragment()
    library.define(SCHEMA)
    library.define(BACKWARD_SCHEMA)
    library.define(ROTARY_SCHEMA)
    for key in ("CPU", "CUDA"):
        library.impl("fwd", forward, key)
        library.impl("bwd", backward, key)
        library.impl("rotary", rotary, key)


def version_of(torch_version: str) -> tuple[int, int]:
    """(major, minor) of a version text; (0, 0) if it is not one."""
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def configure(mode: str) -> None:
    """Set what the extension loads at its first launch; nothing is opened here."""
    own = config.bf16, config.fp32
    ext.configure(config.code_dir, simulator_path(), mode, launch_arch, *own)


def load() -> None:
    """Import the extension and register the ops, or set `unavailable`."""
    global ext, op, backward_op, rotary_op, source, unavailable
    try:
        if version_of(str(torch.__version__)) < TORCH_MIN:
            raise RuntimeError("this torch is too old")
        if _torch.missing:
            raise RuntimeError("this torch lacks " + ", ".join(_torch.missing))
        ext = importlib.import_module(_EXTENSION)
        configure(config.device)
        if not config.python_ops and ext.register_ops():
            registered = "c"
        else:
            _register_from_python()
            registered = "python"
        describe(torch.ops.flash_attn_rocm.fwd, torch.ops.flash_attn_rocm.bwd)
        torch.library.register_fake("flash_attn_rocm::rotary")(_fake_rotary)
        rotary_op = torch.ops.flash_attn_rocm.rotary.default
        backward_op = torch.ops.flash_attn_rocm.bwd.default
        op = torch.ops.flash_attn_rocm.fwd.default
        source = registered
    except Exception as error:  # whatever it is, the user's program must go on
        if isinstance(error, ModuleNotFoundError) and error.name == _EXTENSION:
            # Most often Python was started among the sources of an installed package.
            unavailable = (
                f"flash_attn_rocm {__version__} in {os.path.dirname(__file__)} has no "
                "extension _C: `make build` builds it in a source tree; where pip "
                "installed the package, start Python outside of the source tree"
            )
        else:
            unavailable = (
                f"flash_attn_rocm {__version__} needs {TORCH_MIN_TEXT}, found torch "
                f"{torch.__version__}: {type(error).__name__}: {error}"
            )
        logger.warning(
            "%s. scaled_dot_product_attention stays the stock one.", unavailable
        )


load()
