"""A stand-in for the extension module: attention in float64 from torch ops.

For tests of the Python layer alone: with FA_TEST_STANDIN=1 in the environment it
takes the place of flash_attn_rocm._C before the package is imported, registers no
op (so the ops come from Python) and answers the C entries without kernels. Results
are rounded once, to the dtype of their tensor. Not a test of what C checks.

SPDX-License-Identifier: BSD-3-Clause
"""

import ctypes
import math
import os
import sys
import threading
import types
from collections import Counter

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAMES = ("float16", "bfloat16", "float32", "float64")
SHORT = ("f16", "bf16", "f32", "f64")
BUCKETS = (32, 64, 96, 128, 192, 256)
WANTED = os.environ.get("FA_TEST_STANDIN") == "1"


class Error(ValueError):
    """As _C.Error."""


_local = threading.local()
_lock = threading.Lock()
_fused, _fallback = Counter(), Counter()
_settings = {}


def tensor_at(pointer, dtype, sizes, strides):
    """A tensor in memory that somebody else owns."""
    if math.prod(sizes) == 0:
        return torch.empty(sizes, dtype=dtype)
    count = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)


def symbols(dtype, head_dim, wanted):
    """Names of the main kernels: of the forward if nothing is wanted."""
    bucket = min(b for b in BUCKETS if b >= head_dim)
    passes = ["fwd"] if not wanted else []
    passes += ["bwd_kv"] if wanted & 6 else []
    passes += ["bwd_q"] if wanted & 1 else []
    exact = "_exact" if dtype == 1 and _settings.get("bf16") == "strict" else ""
    return [f"fa_{name}_{SHORT[dtype]}{exact}_d{bucket}_plain" for name in passes]


def scores_of(q, k, scale, causal):
    """(scores, seen) with the key heads repeated."""
    k = k.repeat_interleave(q.size(1) // max(k.size(1), 1), 1)
    scores = q @ k.transpose(-1, -2) * scale
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal:
        seen = seen.tril(0 if causal == 1 else k.size(2) - q.size(2))
    return scores.masked_fill(~seen, -math.inf), seen


def _target(device_type, arch):
    if device_type == 0 and arch is None:
        raise RuntimeError(
            "q: CPU tensors run on the simulator only inside simulate(...) or with "
            "FLASH_ATTN_ROCM_DEVICE=sim"
        )


def _record(names):
    with _lock:
        _fused.update(names)
    why = "wide: every load is 16 bytes"
    _local.record = ("sim", "+".join(names), why, "cpu", 1, 1)


def _inputs(dtype, pointers, shapes):
    sizes = zip(shapes[::2], shapes[1::2])
    return [
        tensor_at(at, dtype, size, stride)
        for at, (size, stride) in zip(pointers, sizes)
    ]


def _clear_residue(at, code, rows, out_size):
    """All of it: gaps stay 0."""
    floats = math.prod(rows)
    if code < 2:
        floats = -(-floats // 4) * 4 + -(-math.prod(out_size) // 2)
    if at and code < 3:
        tensor_at(at, torch.float32, (floats,), (1,)).zero_()


def _residue(at, code, rows, out_size):
    """What rounding took from LSE and output; zeros where it is not kept."""
    lse_lo, out_lo = torch.zeros(rows), torch.zeros(out_size, dtype=DTYPES[code])
    if at and code < 3:
        lse_lo = tensor_at(at, torch.float32, rows, lse_lo.stride())
    if at and code < 2:
        start = -(-math.prod(rows) // 4) * 16  # bytes
        out_lo = tensor_at(at + start, DTYPES[code], out_size, out_lo.stride())
    return lse_lo, out_lo


def forward(device_type, device_index, stream, arch, code, *rest):
    _target(device_type, arch)
    q_at, k_at, v_at, out_at, lse_at, out_lo_at, _, _, *shapes = rest
    *shapes, out_stride, scale, causal = shapes
    dtype = DTYPES[code]
    q, k, v = _inputs(dtype, (q_at, k_at, v_at), shapes)
    out_size = (*q.shape[:3], v.size(3))
    out = tensor_at(out_at, dtype, out_size, out_stride)
    rows = tuple(q.shape[:3])
    lse_dtype = torch.float64 if code == 3 else torch.float32
    lse = tensor_at(lse_at, lse_dtype, rows, torch.empty(rows, device="meta").stride())
    if not out.numel():
        return
    _clear_residue(out_lo_at, code, rows, out_size)
    if not k.numel():
        out.zero_(), lse.fill_(-math.inf)
        return
    lse_lo, out_lo = _residue(out_lo_at, code, rows, out_size)
    scores, seen = scores_of(q.double(), k.double(), scale, causal)
    exact_lse = scores.logsumexp(-1)
    p = torch.where(seen, scores.softmax(-1).nan_to_num(0.0), 0.0)
    exact = p @ v.double().repeat_interleave(q.size(1) // k.size(1), 1)
    lse.copy_(exact_lse)
    out.copy_(exact)
    # A row that sees nothing has an LSE of -inf, of which rounding took nothing.
    lse_lo.copy_((exact_lse - lse.double()).nan_to_num(0.0))
    out_lo.copy_(exact - out.double())
    _record(symbols(code, max(q.size(3), v.size(3)), 0))


def _grouped(gradient, heads_k):
    """Sums over the query heads that share a key head."""
    batch, _, rows, dim = gradient.shape
    return gradient.reshape(batch, heads_k, -1, rows, dim).sum(2)


def backward(device_type, device_index, stream, arch, code, fp32, wanted, *rest):
    _target(device_type, arch)
    pointers, (*shapes, scale, causal) = rest[:13], rest[13:]
    q_at, k_at, v_at, out_at, lse_at, out_lo_at, dout_at, dlse_at = pointers[:8]
    out_stride, dout_stride, dlse_stride = shapes[6:9]
    dtype, lse_dtype = DTYPES[code], torch.float64 if code == 3 else torch.float32
    q, k, v = _inputs(dtype, (q_at, k_at, v_at), shapes[:6])
    out_size, rows = (*q.shape[:3], v.size(3)), tuple(q.shape[:3])
    grad_dtype = torch.float32 if fp32 and code < 2 else dtype
    results = [
        tensor_at(at, grad_dtype, like.shape, stride) if wanted & bit else None
        for at, like, stride, bit in zip(
            pointers[8:11], (q, k, v), shapes[9:12], (1, 2, 4)
        )
    ]
    if not (q.numel() and k.numel()):
        for result in results:
            if result is not None:
                result.zero_()
        return
    lse_lo, out_lo = _residue(out_lo_at, code, rows, out_size)
    out = tensor_at(out_at, dtype, out_size, out_stride).double() + out_lo
    dout = tensor_at(dout_at, dtype, out_size, dout_stride).double()
    lse = tensor_at(lse_at, lse_dtype, rows, torch.empty(rows, device="meta").stride())
    delta = (dout * out).sum(-1)
    if dlse_at:
        delta = delta - tensor_at(dlse_at, lse_dtype, rows, dlse_stride)
    heads_k, group = k.size(1), q.size(1) // k.size(1)
    q, k, v = q.double(), k.double(), v.double()
    scores, seen = scores_of(q, k, scale, causal)
    lse = lse.double() + lse_lo
    p = torch.where(seen, (scores - lse[..., None]).exp(), 0.0)
    dp = dout @ v.repeat_interleave(group, 1).transpose(-1, -2)
    ds = torch.where(seen, p * (dp - delta[..., None]), 0.0) * scale
    exact = (
        ds @ k.repeat_interleave(group, 1),
        _grouped(ds.transpose(-1, -2) @ q, heads_k),
        _grouped(p.transpose(-1, -2) @ dout, heads_k),
    )
    for result, value in zip(results, exact):
        if result is not None:
            result.copy_(value)
    _record(symbols(code, max(q.size(3), v.size(3)), wanted))


def workspace(dtype, q_size, k_size, v_size, wanted):
    return 16 if wanted else 0


def plan(dtype, q_align, k_align, v_align, *rest):
    q_size, _, _, _, v_size, _, _, _, *wanted = rest
    names = symbols(dtype, max(q_size[3], v_size[3]), wanted[0] if wanted else 0)
    grid = (-(-q_size[2] // 128), q_size[1], q_size[0])
    steps = tuple((name, grid) for name in names)
    return "+".join(names), grid, "wide: every load is 16 bytes", steps, 16


def variants():
    rows = []
    for kind, short in (("forward", "fwd"), ("backward_kv", "bwd_kv")):
        rows += _rows(kind, short)
    return rows + _rows("backward_q", "bwd_q")


def _rows(kind, short):
    return [
        dict(
            symbol=f"fa_{short}_{SHORT[code]}_d{bucket}_plain",
            arith="float64" if code == 3 else "float32",
            reads=[NAMES[code]],
            dim=bucket,
            level="plain",
            rows=128,
            steps=64,
            threads=256,
            lds_bytes=0,
            **{"pass": kind},
        )
        for code in range(4)
        for bucket in BUCKETS
    ]


def configure(code_dir, sim_library, mode, sim_arch, bf16="auto", fp32="auto"):
    if bf16 not in ("auto", "strict"):
        raise Error(f"bf16: expected auto or strict, got {bf16}")
    if fp32 not in ("auto", "fast", "exact"):
        raise Error(f"fp32: expected auto, fast or exact, got {fp32}")
    # fp32 changes nothing: exact32 is not served here.
    _settings.update(mode=mode, bf16=bf16)


def load(device_type, device_index, arch, dtype=None):
    _target(device_type, arch)


def register_ops():
    return False


def last_call():
    return getattr(_local, "record", None)


def record_fallback(reason):
    _local.record = ("sdpa", "", reason, "", 0, 0)
    with _lock:
        _fallback[reason] += 1


def counters():
    with _lock:
        count = sum(_fused.values())
        fused, fallback = dict(_fused), dict(_fallback)
    return {"fused": fused, "fallback": fallback, "wave_instructions": count}


def reset_counters():
    with _lock:
        _fused.clear()
        _fallback.clear()


def build_info():
    return {
        "variants": [row["symbol"] for row in variants()],
        "torch_abi": False,
        "standin": True,
    }


def install():
    """Take the place of the extension; before flash_attn_rocm is imported."""
    assert "flash_attn_rocm" not in sys.modules, "too late"
    module = types.ModuleType("flash_attn_rocm._C")
    for name, value in globals().items():
        if not name.startswith("_"):
            setattr(module, name, value)
    sys.modules["flash_attn_rocm._C"] = module


if WANTED:
    install()
