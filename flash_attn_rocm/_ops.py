"""The op flash_attn_rocm::fwd: registration, fake kernel, and the Python form.

Registered from C through libtorch's stable C ABI where this torch has it,
otherwise from Python around the same C entry. Whatever goes wrong here leaves
`op` None and `unavailable` set: importing the package never fails because torch
was exchanged, and every call then uses the stock function.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import importlib
import re
from typing import Any, Callable

import torch
from torch import Tensor

from . import _torch
from ._config import config, logger, simulator_path
from ._simulate import launch_arch
from ._version import TORCH_MIN, TORCH_MIN_TEXT, __version__

SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor mask, Tensor alibi, "
    "Tensor sink, Tensor seed, Tensor blocks, float scale, float softcap, "
    "float dropout_p, int causal, int window_left, int window_right, "
    "bool needs_grad) -> (Tensor out, Tensor lse, Tensor out_lo)"
)
CAUSAL_NONE, CAUSAL_TOP_LEFT, CAUSAL_BOTTOM_RIGHT = 0, 1, 2

_INT_MAX = 2**31 - 1  # C's

_DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}

# Results of load(), which runs once, at import.
ext: Any = None  # the extension module, None if it cannot be imported
op: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
source: str | None = None  # "c" or "python": who registered the op
unavailable: str | None = None  # why there is no op


def dtype_code(dtype: torch.dtype) -> int:
    """The number by which the extension knows a dtype."""
    return _DTYPE_CODES[dtype]


_libraries: list[Any] = []  # registrations live as long as these objects


# The refusals have the words of csrc/python/ops.c and csrc/host/plan.c, so that
# callers see one text whoever registered the op.


def _check_supported(
    tensors: dict[str, Tensor | None],
    floats: dict[str, float],
    windows: dict[str, int],
    needs_grad: bool,
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
    if needs_grad:
        raise RuntimeError(
            "needs_grad: the backward is not available yet, expected False, got True"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor is None or tensor.layout is not torch.strided:
            got = "None" if tensor is None else tensor.layout
            raise RuntimeError(
                f"{name}: expected a strided tensor, got something else ({got})"
            )
        if tensor.dim() != 4:
            raise RuntimeError(
                f"{name}: expected 4 dimensions (batch, heads, seqlen, head dim), "
                f"got {tensor.dim()}"
            )
        if tensor.dtype not in _DTYPE_CODES:
            raise RuntimeError(f"{name}: expected dtype float16, got {tensor.dtype}")
        if tensor.device != q.device:
            raise RuntimeError(
                f"{name}: expected device {q.device} (as q), got {tensor.device}"
            )
    served = _dtype_name(q.dtype)
    if q.dtype is not torch.float16:
        raise RuntimeError(
            f"q: not supported yet, expected dtype float16, got {served}"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype is not q.dtype:
            raise RuntimeError(
                f"{name}: expected dtype {served} (as q), got "
                f"{_dtype_name(tensor.dtype)}"
            )


def _forward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The op's kernel where torch lacks the stable C ABI; C does the rest."""
    _check_supported(
        {
            "bias": bias,
            "mask": mask,
            "alibi": alibi,
            "sink": sink,
            "seed": seed,
            "blocks": blocks,
        },
        {"softcap": softcap, "dropout_p": dropout_p},
        {"window_left": window_left, "window_right": window_right},
        needs_grad,
    )
    # Clamped as in C: beyond an int it must not turn into something legal.
    causal = max(-_INT_MAX, min(causal, _INT_MAX))
    _check_inputs(q, k, v)
    out, lse, out_lo = _outputs(q)
    if q.is_cuda:
        with torch.cuda.device(q.device):
            stream = torch.cuda.current_stream(q.device).cuda_stream
            _launch(1, q.get_device(), stream, None, q, k, v, out, lse, scale, causal)
    else:
        _launch(0, 0, 0, launch_arch(), q, k, v, out, lse, scale, causal)
    return out, lse, out_lo


def _launch(
    device_type: int,
    device_index: int,
    stream: int,
    arch: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: int,
) -> None:
    ext.forward(
        device_type,
        device_index,
        stream,
        arch,
        _DTYPE_CODES[q.dtype],
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        tuple(q.shape),
        q.stride(),
        tuple(k.shape),
        k.stride(),
        tuple(v.shape),
        v.stride(),
        out.stride(),
        scale,
        causal,
    )


def _outputs(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # preserve_format: dense, dimensions in the order of q's strides.
    out = torch.empty_like(q, requires_grad=False)
    lse = q.new_empty((q.size(0), q.size(1), q.size(2)), dtype=torch.float32)
    return out, lse, q.new_empty((0,), dtype=torch.float16)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, *_rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    # torch also calls this one for real tensors of which one is on "meta".
    _check_inputs(q, k, v)
    return _outputs(q)


def _flops(q: Any, k: Any, v: Any, *_rest: Any, **_shapes: Any) -> int:
    # Two products of (Sq, D) x (D, Sk) for each head; causal not counted, as torch.
    batch, heads, seqlen_q, head_dim = q
    return int(4 * batch * heads * seqlen_q * k[2] * head_dim)


def _register_flops() -> None:
    """Let FlopCounterMode count the op, where this torch has it."""
    try:
        from torch.utils.flop_counter import register_flop_formula
    except ImportError:
        return
    register: Any = register_flop_formula
    register(torch.ops.flash_attn_rocm.fwd)(_flops)


def _register_from_python() -> None:
    make: Any = torch.library.Library  # untyped in torch
    library = make("flash_attn_rocm", "FRAGMENT")
    _libraries.append(library)
    library.define(SCHEMA)
    for key in ("CPU", "CUDA"):
        library.impl("fwd", _forward, key)


def version_of(torch_version: str) -> tuple[int, int]:
    """(major, minor) of a version text; (0, 0) if it is not one."""
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def configure(mode: str) -> None:
    """Set what the extension loads at its first launch; nothing is opened here."""
    ext.configure(config.code_dir, simulator_path(), mode, launch_arch)


def load() -> None:
    """Import the extension and register the op, or set `unavailable`."""
    global ext, op, source, unavailable
    try:
        if version_of(str(torch.__version__)) < TORCH_MIN:
            raise RuntimeError("this torch is too old")
        if _torch.missing:
            raise RuntimeError("this torch lacks " + ", ".join(_torch.missing))
        ext = importlib.import_module("flash_attn_rocm._C")
        configure(config.device)
        if not config.python_ops and ext.register_ops():
            registered = "c"
        else:
            _register_from_python()
            registered = "python"
        torch.library.register_fake("flash_attn_rocm::fwd")(_fake)
        _register_flops()
        op = torch.ops.flash_attn_rocm.fwd.default
        source = registered
    except Exception as error:  # whatever it is, the user's program must go on
        unavailable = (
            f"flash_attn_rocm {__version__} needs {TORCH_MIN_TEXT}, found torch "
            f"{torch.__version__}: {type(error).__name__}: {error}"
        )
        logger.warning(
            "%s. scaled_dot_product_attention stays the stock one.", unavailable
        )


load()
