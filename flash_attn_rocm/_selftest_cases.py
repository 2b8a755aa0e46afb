"""The known answers of the self-test: families of kernels, problems, bounds.

A family is the kernels of one pass for a dtype, head-dim bucket and level. run()
computes its problem on the device under test and compares with plain attention in
float64, made by torch on the CPU. Which process does that, and what becomes of the
verdict: _selftest.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _ops, _record
from ._config import config, simulator_path
from ._features import Features
from ._simulate import launch_arch

Wrong = dict[str, str]  # kernel -> which result, and how wrong

# Two query heads share a key head; on both sides a tile of 64 and a part of one.
HEADS, ROWS, KEYS = 2, 66, 70
# The largest ||error|| / ||answer||, in eps of the dtype. Seen in the simulator: 0.32,
# 0.22, 6.9 and 12 (the last two with features, in gradients).
BOUND_EPS = {
    torch.float16: 2.0,
    torch.bfloat16: 2.0,
    torch.float32: 32.0,
    torch.float64: 64.0,
}
# float32 computed in float64 and rounded once; seen: 0.70 (dsink), 0.23 in the others.
_EXACT_EPS = 2.0
# Results that the sums of dQ's pass have a part in, beyond BOUND_EPS; of 16 bits dk.
_BY_DELTA = {torch.float32: ("dk", "dbias"), torch.float64: ()}
# So few that float16 is computed in float32 (own_arith of csrc/host/plan.c).
_FEW_CHANNELS = 4
# Which kernel is to blame for a result.
_PART_OF = {
    "out": "fwd",
    "lse": "fwd",
    "dq": "bwd_q",
    "dk": "bwd_kv",
    "dv": "bwd_kv",
    "dbias": "bwd_bias",
    "dsink": "bwd_q",
    "rotated q": "rotary",
    "rotated k": "rotary",
}


@dataclass(frozen=True)
class Family:
    """Kernels that are tested together."""

    name: str
    kernels: tuple[str, ...]  # symbols, in the order of a launch
    what: str  # "forward", "backward" or "rotary"
    dtype: torch.dtype
    dim: int
    full: bool = False  # with features
    strict: bool = False  # the kernels that compute in wider arithmetic than usual
    needs: str = ""  # the family without which this one says nothing


def families() -> list[Family]:
    """Every family of kernels in this package, the small ones first."""
    rows = {row["symbol"]: row for row in _ops.ext.variants()}
    forward = [row for row in rows.values() if row["pass"] == "forward"]
    found = []
    for row in sorted(forward, key=lambda row: (row["level"] != "plain", row["dim"])):
        kind, bucket = row["symbol"].removeprefix("fa_fwd_").split("_", 1)
        exact = kind in ("exact16", "exact32")
        smallest = row["dim"] == min(
            other["dim"] for other in forward if other["level"] == row["level"]
        )
        for reads in row["reads"]:
            dtype, dim = getattr(torch, reads), row["dim"]
            if exact and dtype is torch.float16:
                if not smallest:
                    continue  # no call leads there
                dim = _FEW_CHANNELS
            name = f"{reads} d{dim} {row['level']}" + (" strict" if exact else "")
            sums = "exact16" if dtype in _ops.HALVES else kind
            parts = ("kv", "q") if dtype is torch.float64 else ("q", "kv")
            backward = [f"fa_bwd_{part}_{kind}_{bucket}" for part in parts]
            backward.append(f"fa_bwd_bias_{sums}_{bucket}")
            full = row["level"] == "full"
            how: dict[str, Any] = {"dim": dim, "full": full, "strict": exact}
            kernels = tuple(kernel for kernel in backward if kernel in rows)
            names = (f"forward {name}", f"backward {name}")
            found += [
                Family(names[0], (row["symbol"],), "forward", dtype, **how),
                Family(names[1], kernels, "backward", dtype, **how, needs=names[0]),
            ]
    for row in rows.values():
        for reads in row["reads"] if row["pass"] == "rotary" else ():
            kind, kernels = getattr(torch, reads), (row["symbol"],)
            found.append(Family(f"rotary {reads}", kernels, "rotary", kind, 64))
    return found


# ---- problems ----------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    features: Features


def _normal(generator: torch.Generator, *sizes: int) -> Tensor:
    return torch.randn(sizes, generator=generator, dtype=torch.float64)


def _problem(family: Family, causal: int, softcap: float) -> _Problem:
    generator = torch.Generator().manual_seed(family.dim)
    queries = [_normal(generator, 1, HEADS, ROWS, family.dim) for _ in "qd"]
    keys = [_normal(generator, 1, 1, KEYS, family.dim) for _ in "kv"]
    q, dout, k, v = (x.to(family.dtype) for x in queries + keys)
    sums = _ops.lse_dtype(family.dtype)
    features = Features(scale=1 / math.sqrt(family.dim), causal=causal)
    if family.full:
        features = features._replace(
            bias=_normal(generator, 1, HEADS, ROWS, KEYS).to(family.dtype),
            alibi=torch.tensor([0.25, 0.0625], dtype=sums),
            sink=_normal(generator, HEADS).to(sums),
            softcap=softcap,
            window_left=40,
        )
    return _Problem(q, k, v, dout, features)


def _answers(p: _Problem) -> dict[str, Tensor]:
    """Plain attention and its gradients in float64."""
    f = p.features
    leaves = {"dq": p.q, "dk": p.k, "dv": p.v, "dbias": f.bias, "dsink": f.sink}
    wide = {
        name: x.double().requires_grad_() for name, x in leaves.items() if x is not None
    }
    scores = f.scale * (wide["dq"] @ wide["dk"].mT)
    if f.softcap:
        scores = f.softcap * torch.tanh(scores / f.softcap)
    own = torch.arange(ROWS).unsqueeze(1) + KEYS - ROWS
    key = torch.arange(KEYS)
    if f.alibi is not None:
        scores = scores - f.alibi.double().reshape(1, -1, 1, 1) * (own - key).abs()
    if f.bias is not None:
        scores = scores + wide["dbias"]
    seen = (key <= own) | (f.causal != _ops.CAUSAL_BOTTOM_RIGHT)
    if f.window_left >= 0:
        seen = seen & (key >= own - f.window_left)
    scores = scores.masked_fill(~seen, -math.inf)
    if f.sink is not None:
        sink = wide["dsink"].reshape(1, -1, 1, 1).expand(1, HEADS, ROWS, 1)
        scores = torch.cat([scores, sink], -1)
    out = scores.softmax(-1)[..., :KEYS] @ wide["dv"]
    grads = torch.autograd.grad(out, list(wide.values()), p.dout.double())
    made = {"out": out.detach(), "lse": scores.detach().logsumexp(-1)}
    return {**made, **dict(zip(wide, grads))}


# ---- rotary ------------------------------------------------------------------


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (batch, seqlen, heads, headdim) with its channels turned, in float64."""
    cos, sin = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    half = cos.size(-1)
    x = x.double()
    pairs = x.reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    pairs = pairs if interleaved else pairs.mT
    a, b = pairs.unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    return (turned if interleaved else turned.mT).flatten(-2)


# ---- the device under test ---------------------------------------------------


@contextmanager
def _arithmetic(strict: bool) -> Iterator[None]:
    """bfloat16 goes through fp16 or is computed in float32; float32 is computed as it
    is or in float64, whatever the size."""

    def configure(bf16: str, fp32: str) -> None:
        _ops.ext.configure(
            config.code_dir, simulator_path(), config.device, launch_arch, bf16, fp32
        )

    configure(*(("strict", "exact") if strict else ("auto", "fast")))
    try:
        yield
    finally:
        configure(config.bf16, config.fp32)


def _check_kernel(kernels: tuple[str, ...]) -> None:
    record = _record.last_record()
    ran = "nothing" if record is None else record[1]
    if ran != "+".join(kernels):
        raise RuntimeError(f"expected {'+'.join(kernels)} to run, got {ran}")


def _compare(family: Family, got: dict[str, Tensor], want: dict[str, Tensor]) -> Wrong:
    """Results that others depend on come first in `got`."""
    wrong: Wrong = {}
    exact = family.strict and family.dtype is torch.float32
    eps = torch.finfo(family.dtype).eps
    bound = (_EXACT_EPS if exact else BOUND_EPS[family.dtype]) * eps
    for name, result in got.items():
        by_delta = name in _BY_DELTA.get(family.dtype, ("dk",))
        if by_delta and any(x.startswith("fa_bwd_q") for x in wrong):
            continue  # the delta of that pass is in it
        answer = want[name]
        error = float((result.cpu().double() - answer).norm() / answer.norm())
        if not error <= bound:  # a NaN is wrong too
            part = f"fa_{_PART_OF[name]}"
            (kernel,) = (x for x in family.kernels if x.startswith(part))
            text = f"{name} is off by {error:.2g}, allowed are {bound:.2g}"
            wrong.setdefault(kernel, text)
    return wrong


def _attention(family: Family, device: str, causal: int, softcap: float) -> Wrong:
    p = _problem(family, causal, softcap)
    q, k, v, dout = (x.to(device) for x in (p.q, p.k, p.v, p.dout))
    none = torch.empty(0, device=device)
    options = [
        x.to(device) if isinstance(x, Tensor) else x for x in p.features.op_args(none)
    ]
    assert _ops.op is not None and _ops.backward_op is not None
    saved = _ops.op(q, k, v, *options, True)
    if family.what == "forward":
        _check_kernel(family.kernels)
        return _compare(family, dict(zip(("out", "lse"), saved)), _answers(p))
    wanted = _ops.WANT_DQ | _ops.WANT_DK | _ops.WANT_DV
    if family.full:
        wanted |= _ops.WANT_DBIAS | _ops.WANT_DSINK
    made = _ops.backward_op(dout, none, q, k, v, *saved, *options, wanted, False)
    _check_kernel(family.kernels)
    dq, dk, dv, dbias, dsink = made
    got = {"dq": dq}
    if family.full:
        got["dsink"] = dsink.double().sum((0, 2))
    got.update(dk=dk, dv=dv)
    if family.full:
        got["dbias"] = dbias
    return _compare(family, got, _answers(p))


def _rotary(family: Family, device: str, interleaved: bool) -> Wrong:
    generator = torch.Generator().manual_seed(family.dim)
    q, k = (_normal(generator, 1, ROWS, h, family.dim).to(family.dtype) for h in (2, 1))
    angles = _normal(generator, ROWS, family.dim // 2)
    sums = _ops.lse_dtype(family.dtype)
    cos, sin = angles.cos().to(sums), angles.sin().to(sums)
    assert _ops.rotary_op is not None
    moved = [x.to(device) for x in (q, k, cos, sin)]
    made = _ops.rotary_op(*moved, interleaved, False)
    _check_kernel(family.kernels)
    want = [_rotated(x, cos, sin, interleaved) for x in (q, k)]
    names = ("rotated q", "rotated k")
    return _compare(family, dict(zip(names, made)), dict(zip(names, want)))


def run(family: Family, device: str) -> Wrong:
    """What is wrong with the family's kernels; empty if nothing is.

    Args:
        device: where the tensors lie: "cpu" inside simulate(), or "cuda:N".

    Raises:
        Exception: whatever kept the kernels from running.
    """
    wrong: Wrong = {}
    if family.what == "rotary":
        for interleaved in (False, True):
            wrong.update(_rotary(family, device, interleaved))
        return wrong
    softcap = 5.0 if family.full else 0.0
    with _arithmetic(family.strict):
        for causal in (_ops.CAUSAL_NONE, _ops.CAUSAL_BOTTOM_RIGHT):
            wrong.update(_attention(family, device, causal, softcap))
    return wrong
