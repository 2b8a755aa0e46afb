"""Every kernel that ships, called through the C entries on problems of any form.

The expectations come from variants.def by the rule that it states: the first row that
fits wins. Outputs lie inside larger buffers full of a canary value, so that a stray
store near them is seen.

FA_TEST_DEVICE=cuda runs on a GPU instead of the simulated gfx906, with
FLASH_ATTN_ROCM_DEVICE=standin on an NVIDIA card.

SPDX-License-Identifier: BSD-3-Clause
"""

import contextlib
import dataclasses
import math
import os
import zlib
from typing import NamedTuple, Optional

import pytest
import torch

import flash_attn_rocm as fa
from flash_attn_rocm import _ops
from flash_attn_rocm._config import config

from . import CANARY, GUARD, NONE, run_forward
from .exact import GRADIENTS, Results, exact, math_path, noise_of_gradients, ratio
from .gradients import run_backward

DEVICE = os.environ.get("FA_TEST_DEVICE", "cpu")
FULL = os.environ.get("FA_TEST") == "full"
HALVES = (torch.float16, torch.bfloat16)
SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
DTYPES = [getattr(torch, name) for name in SHORT]
OTHERS = ("prepare", "rotary")  # passes that are no attention
WANT_DQ, WANT_DK, WANT_DV, WANT_ALL = 1, 2, 4, 7


class Family(NamedTuple):
    """The kernels that serve one dtype up to one head dim."""

    name: str
    dtype: torch.dtype
    dim: int
    strict: bool  # in wider arithmetic: FLASH_ATTN_ROCM_BF16=strict or _FP32=exact
    forward: str  # symbols
    keys: str
    queries: str
    rows: int  # the largest tile: rows that a workgroup owns
    steps: int  # rows of a step through the others


def _rows():
    return [] if _ops.ext is None else _ops.ext.variants()


def _first(rows, kind, dim):
    return next(r for r in rows if r["pass"] == kind and r["dim"] >= dim)


def _families():
    found = []
    for dtype, short in SHORT.items():
        rows = [r for r in _rows() if dtype in r["reads"] and r["pass"] not in OTHERS]
        for arith in ("float16", "float32", "float64"):
            own = [r for r in rows if r["arith"] == arith]
            other = any(r["arith"] != arith for r in rows)
            wider = {"bfloat16": "float32", "float32": "float64"}
            strict = wider.get(dtype) == arith and other
            half = dtype in ("float16", "bfloat16")
            exact_rows = "_exact" if strict or (half and arith == "float32") else ""
            for dim in sorted({r["dim"] for r in own}):
                three = [
                    _first(own, kind, dim)
                    for kind in ("forward", "backward_kv", "backward_q")
                ]
                found.append(
                    Family(
                        f"{short}{exact_rows}_d{dim}",
                        getattr(torch, dtype),
                        dim,
                        strict,
                        *(r["symbol"] for r in three),
                        max(r["rows"] for r in three),
                        three[0]["steps"],
                    )
                )
    return found


FEW_CHANNELS = 8  # with fewer, float16 is computed in float32
_ALL = _families()
_FEW = {f.dim: f for f in _ALL if f.name.startswith("f16_exact")}
FAMILIES = [f for f in _ALL if f not in _FEW.values()]


def _over(families):
    return pytest.mark.parametrize("family", families, ids=lambda f: f.name)


def every_family(test):
    """The test runs for each of FAMILIES."""
    return _over(FAMILIES)(test)


def some_families_of(*dtypes):
    """The test runs for each of FAMILIES of these dtypes with FA_TEST=full; otherwise
    for one of each kind of numbers, since code is shared by templates over the head
    dim: which one depends on the test's name, so that together the tests cover them
    all up to 128."""

    def decorate(test):
        families = [f for f in FAMILIES if f.dtype in dtypes]
        if FULL:
            return _over(families)(test)
        kinds = {}
        for family in families:
            if family.dim <= 128 or family.dtype is torch.float16:  # others take long
                kinds.setdefault(family.name.rsplit("_", 1)[0], []).append(family)
        turn = zlib.crc32(test.__name__.encode())
        return _over([own[turn % len(own)] for own in kinds.values()])(test)

    return decorate


some_families = some_families_of(*DTYPES)


def family_of(dtype, dim, *, strict=False):
    """The kernels that run for a dtype and the larger of both head dims."""
    fits = [
        f
        for f in FAMILIES
        if f.dtype is dtype and f.dim >= dim and (f.strict or not strict)
    ]
    return min(fits, key=lambda f: (f.strict and not strict, f.dim))


def serving(p, family=None):
    """The kernels that run a problem, which `family` would with many channels."""
    family = family or family_of(p.q.dtype, max(p.q.size(3), p.v.size(3)))
    few = p.q.dtype is torch.float16 and p.q.size(3) < FEW_CHANNELS
    return _FEW[family.dim] if few else family


@contextlib.contextmanager
def chosen(family):
    """bf16 and fp32 go the way of the family, however small the problem is."""
    if not family.strict and family.dtype is not torch.float32:
        yield
        return
    with configured(*(("strict", "exact") if family.strict else ("auto", "fast"))):
        yield


@contextlib.contextmanager
def configured(bf16, fp32):
    """The settings of FLASH_ATTN_ROCM_BF16 and FLASH_ATTN_ROCM_FP32."""
    before = config.bf16, config.fp32

    def configure(own):
        object.__setattr__(config, "bf16", own[0])
        object.__setattr__(config, "fp32", own[1])
        _ops.configure(config.device)

    try:
        configure((bf16, fp32))
        yield
    finally:
        configure(before)


@dataclasses.dataclass(repr=False)
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    scale: Optional[float] = None
    causal: int = NONE
    dlse: Optional[torch.Tensor] = None

    def __repr__(self):  # in reports of failures
        sizes = "x".join(map(str, (*self.q.shape, *self.k.shape[1:3], self.v.size(3))))
        return f"Problem({self.q.dtype}, {sizes}, {self.scale}, {self.causal})"

    @property
    def factor(self):
        return self.q.size(-1) ** -0.5 if self.scale is None else self.scale

    def but(self, **changes):
        return dataclasses.replace(self, **changes)

    @property
    def rows(self):
        return tuple(self.q.shape[:3])

    @property
    def sizes_out(self):
        return (*self.rows, self.v.size(3))

    def exact(self):
        return exact(*self._inputs(), self.scale, self.causal, self.dlse)

    def math_path(self):
        return math_path(*self._inputs(), self.scale, self.causal)

    def _inputs(self):
        return self.q, self.k, self.v, self.dout


def normal(
    dtype,
    length,
    length_k,
    dim,
    *,
    dim_v=None,
    heads=1,
    heads_k=1,
    batch=1,
    seed=0,
    scale=None,
    causal=NONE,
):
    """A problem of seeded normal tensors on the test's device."""
    generator = torch.Generator().manual_seed(seed)
    dim_v = dim if dim_v is None else dim_v

    def make(h, s, d):
        x = torch.randn(batch, h, s, d, generator=generator, dtype=torch.float64)
        return x.to(dtype).to(DEVICE)

    q, k = make(heads, length, dim), make(heads_k, length_k, dim)
    v, dout = make(heads_k, length_k, dim_v), make(heads, length, dim_v)
    return Problem(q, k, v, dout, scale, causal)


class Guarded(NamedTuple):
    tensor: torch.Tensor
    check: object


def guarded(shape, dtype, strides=None):
    """A tensor of canaries inside a larger buffer of them.

    check() fails if anything was written but the tensor's elements, so also between
    them where the strides leave gaps.
    """
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    count = (
        1 + sum((n - 1) * s for n, s in zip(shape, strides)) if 0 not in shape else 0
    )
    buffer = torch.full((count + 2 * GUARD,), CANARY, dtype=dtype, device=DEVICE)
    tensor = buffer.as_strided(shape, strides, GUARD)

    def check():
        rest = buffer.clone()
        rest.as_strided(shape, strides, GUARD).fill_(CANARY)
        assert (rest == CANARY).all(), "written beside an output"

    return Guarded(tensor, check)


def _form(like, sizes, dtype):
    """Strides of a dense tensor in the order of `like`'s dimensions."""
    if tuple(like.shape) == tuple(sizes):
        return torch.empty_like(like, device="meta").stride()
    gaps = [stride * 2 * sizes[3] for stride in like.stride()]
    form = torch.empty_strided(sizes, gaps, device="meta", dtype=dtype)
    return torch.empty_like(form).stride()


class Saved(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    out_lo: Optional[torch.Tensor]  # see lse_low and out_low; with float64, none


def forward(p, family=None, *, with_lo=True, strides=None):
    """Saved of one call, with canaries checked around every output."""
    dtype = p.q.dtype
    family = serving(p, family)
    strides = strides or _form(p.q, p.sizes_out, dtype)
    out = guarded(p.sizes_out, dtype, strides)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    lse = guarded(p.rows, wide)
    lo = None
    if with_lo and dtype is not torch.float64:
        lo = guarded((_ops.residue_floats(p.q, p.v),), torch.float32)
    low = lo and lo.tensor
    with chosen(family):
        run_forward(
            *(p.q, p.k, p.v, out.tensor, lse.tensor, p.scale, p.causal), out_lo=low
        )
    assert fa.last_call().kernel == family.forward, fa.last_call()
    for output in (out, lse, lo):
        if output is not None:
            output.check()
    return Saved(out.tensor, lse.tensor, low)


def symbols(family, wanted):
    """What last_call() says of a backward."""
    # dK takes the delta that the pass of dQ corrects, and float32 in float64
    # arithmetic dQ, too.
    exact_32 = family.strict and family.dtype is torch.float32
    corrected = WANT_DK | WANT_DQ if exact_32 else WANT_DK
    first = family.dtype is not torch.float64 and wanted & corrected
    keys = family.keys if wanted & (WANT_DK | WANT_DV) else ""
    queries = family.queries if first or wanted & WANT_DQ else ""
    return "+".join(filter(None, (queries, keys) if first else (keys, queries)))


def backward(p, saved, family=None, *, wanted=WANT_ALL, fp32=False, strides=None):
    """(dq, dk, dv), None where not wanted, with canaries checked around them."""
    dtype = p.q.dtype
    family = serving(p, family)
    kind = torch.float32 if fp32 and dtype in HALVES else dtype
    grads = []
    for bit, like in ((WANT_DQ, p.q), (WANT_DK, p.k), (WANT_DV, p.v)):
        form = strides[len(grads)] if strides else _form(like, like.shape, dtype)
        grads.append(guarded(like.shape, kind, form) if wanted & bit else None)
    results = tuple(g and g.tensor for g in grads)
    with chosen(family):
        run_backward(
            *(p.dout, p.q, p.k, p.v, saved.out, saved.lse, results, p.scale, p.causal),
            out_lo=saved.out_lo,
            dlse=p.dlse,
        )
    assert fa.last_call().kernel == symbols(family, wanted), fa.last_call()
    for grad in grads:
        if grad is not None:
            grad.check()
    return results


def run(p, family=None, **how):
    """Results of forward and backward together."""
    saved = forward(p, family)
    return Results(saved.out, saved.lse, *backward(p, saved, family, **how))


def ratios(p, results, *, reference=None, yardstick=None):
    """name -> error in units of what is allowed, for out and the gradients that are
    there; pass if all are at most 1."""
    reference = reference or p.exact()
    yardstick = yardstick or p.math_path()
    noise = noise_of_gradients(p.q, p.k, p.v, p.dout, p.scale)
    return {
        name: ratio(got, own, usual, noise if name in GRADIENTS else 0.0)
        for name, got, own, usual in zip(Results._fields, results, reference, yardstick)
        if got is not None and usual is not None
    }


def lse_error(p, lse, reference):
    """Error of the LSE in units of what is allowed; infinite if it is not -inf exactly
    where a row sees no key."""
    got = torch.as_tensor(lse).double().cpu()
    own = torch.from_numpy(reference.lse.astype("float64"))
    blind = own == -math.inf
    if not torch.equal(got == -math.inf, blind):
        return math.inf
    group = p.q.size(1) // p.k.size(1)
    many = p.k.detach().cpu().double().abs().repeat_interleave(group, 1)
    reach = p.q.detach().cpu().double().abs() @ many.transpose(-1, -2)
    size = torch.maximum(own.abs(), reach.amax(-1) * abs(p.factor))
    double = p.q.dtype is torch.float64
    bound = 4e-15 + 4e-15 * size if double else 1e-5 + 5e-7 * size
    worst = ((got - own).abs() / bound)[~blind]
    return max(worst.nan_to_num(math.inf).tolist(), default=0.0)
