"""Attention with every feature: calls of the ops, the exact results, the yardstick.

The semantics are those of docs/architecture.md, written here a second and a third time:
exact() is formulas in NumPy (float64, for float64 tensors the 80 bits of x86), without
autograd; attend() is differentiable torch, in float32 the math path to compare with.
The measure is that of helpers/exact.py.

SPDX-License-Identifier: BSD-3-Clause
"""

import contextlib
import dataclasses
import math
from typing import NamedTuple, Optional

import numpy as np
import torch

import flash_attn_rocm as fa
from flash_attn_rocm import _ops

from . import ARCH, BOTTOM_RIGHT, NONE, TOP_LEFT
from .exact import error, largest_error, noise_of_gradients, numbers, ratio
from .kernels import DEVICE, FEW_CHANNELS, HALVES, chosen, family_of
from .philox import keep_of, keep_scale, kept

NONE_TOP_LEFT = 3  # without a mask; windows and ALiBi count from the upper left corner
WANT_DQ, WANT_DK, WANT_DV, WANT_DBIAS, WANT_DSINK = 1, 2, 4, 8, 16
TENSORS = (
    *("bias", "mask", "alibi", "sink", "seed"),
    *("span_q", "span_k", "blocks", "blocks_t"),
)
# What makes a problem one for the kernels with features.
LEVEL_FULL = ("bias", "mask", "alibi", "sink", "span_q", "blocks")


class Features(NamedTuple):
    """The arguments of the ops between v and the last ones, in their order."""

    bias: Optional[torch.Tensor] = None
    mask: Optional[torch.Tensor] = None
    alibi: Optional[torch.Tensor] = None
    sink: Optional[torch.Tensor] = None
    seed: Optional[torch.Tensor] = None
    span_q: Optional[torch.Tensor] = None
    span_k: Optional[torch.Tensor] = None
    blocks: Optional[torch.Tensor] = None
    blocks_t: Optional[torch.Tensor] = None
    scale: Optional[float] = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    causal: int = NONE
    window_left: int = -1
    window_right: int = -1
    sink_keys: int = 0
    block_q: int = 0
    block_k: int = 0


NOTHING = Features()


class Results(NamedTuple):
    out: object
    lse: object
    dq: object = None
    dk: object = None
    dv: object = None
    dbias: object = None
    dsink: object = None  # (B, H, Sq): from each query


GRADIENTS = Results._fields[2:]


@dataclasses.dataclass(repr=False)
class Problem:
    """Tensors of a call; `features` say what is wanted beside."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    features: Features = NOTHING
    dlse: Optional[torch.Tensor] = None
    strict: bool = False  # in wider arithmetic: _BF16=strict, _FP32=exact

    def __repr__(self):  # in reports of failures
        f = self.features
        there = [
            f"{name}={tuple(x.shape) if isinstance(x, torch.Tensor) else x}"
            for name, x in zip(f._fields, f)
            if x is not None and x != Features._field_defaults[name]
        ]
        sizes = "x".join(map(str, (*self.q.shape, *self.k.shape[1:3], self.v.size(3))))
        return f"Problem({self.q.dtype}, {sizes}, {', '.join(there)})"

    def but(self, **changes):
        """The same with other tensors or features."""
        own = {name for name in changes if name in Features._fields}
        features = self.features._replace(**{name: changes[name] for name in own})
        rest = {name: x for name, x in changes.items() if name not in own}
        return dataclasses.replace(self, features=features, **rest)

    @property
    def factor(self):
        scale = self.features.scale
        return self.q.size(-1) ** -0.5 if scale is None else scale

    @property
    def scores(self):
        """Sizes of the matrix of scores."""
        return (*self.q.shape[:3], self.k.size(2))

    @property
    def drops(self):
        f = self.features
        return f.seed is not None and keep_of(f.dropout_p) < 65536

    @property
    def full(self):
        """Whether the kernels with features must serve it."""
        f = self.features
        return (
            any(getattr(f, name) is not None for name in LEVEL_FULL)
            or f.softcap > 0
            or self.drops
            or (f.sink_keys > 0 and f.window_left >= 0)
        )


def lse_dtype(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


# ------------------------------------------------------------------- what a row sees


def own_key(f, rows, keys):
    """The key at distance 0 from row 0."""
    return 0 if f.causal in (TOP_LEFT, NONE_TOP_LEFT) else keys - rows


def band(f, rows, keys):
    """Boolean (Sq, Sk): what causal, the window and the first keys let rows see."""
    i = torch.arange(rows)[:, None] + own_key(f, rows, keys)
    j = torch.arange(keys)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if f.window_left >= 0:
        seen &= (j >= i - f.window_left) | (j < f.sink_keys)
    if f.causal in (TOP_LEFT, BOTTOM_RIGHT):
        seen &= j <= i
    elif f.window_right >= 0:
        seen &= j <= i + f.window_right
    return seen


def listed(f, rows, keys):
    """Boolean (B or 1, H or 1, Sq, Sk): what the lists of blocks have."""
    lists = f.blocks.cpu()
    count = lists[..., :1]
    at = torch.arange(lists.size(-1) - 1)
    columns = -(-keys // f.block_k)
    dense = torch.zeros(*lists.shape[:3], columns + 1, dtype=torch.bool)
    index = torch.where(at < count, lists[..., 1:].long(), columns)
    dense.scatter_(3, index, True)
    dense = dense[..., :columns]
    dense = dense.repeat_interleave(f.block_q, 2).repeat_interleave(f.block_k, 3)
    return dense[:, :, :rows, :keys]


def seen_by(p):
    """Boolean (B, H, Sq, Sk) on the CPU: whether query i sees key j."""
    f, (rows, keys) = p.features, p.scores[2:]
    seen = band(f, rows, keys).expand(p.scores)
    if f.mask is not None:
        seen = seen & f.mask.cpu()
    if f.bias is not None:
        seen = seen & (f.bias.detach().cpu() != -math.inf)
    if f.span_q is not None:
        spans, j = f.span_q.cpu(), torch.arange(keys)
        seen = seen & (spans[:, :1] <= j) & (j <= spans[:, 1:2])
    if f.blocks is not None:
        seen = seen & listed(f, rows, keys)
    return seen


def distances(p):
    """(Sq, Sk): how far a key is from the row's own, for ALiBi."""
    f, (rows, keys) = p.features, p.scores[2:]
    own = own_key(f, rows, keys)
    if f.span_q is not None:
        own = f.span_q[:, 2:3].cpu()
    return (torch.arange(rows)[:, None] + own - torch.arange(keys)).abs()


def slopes(p):
    """(B or 1, H, 1, 1)."""
    alibi = p.features.alibi.detach().cpu()
    return alibi.reshape(-1, alibi.size(-1), 1, 1)


def drop(p):
    """Factor of each weight (B, H, Sq, Sk), float64; None without dropout."""
    f = p.features
    if not p.drops:
        return None
    stays = kept(f.seed.cpu(), f.dropout_p, p.scores)
    return stays.double() * keep_scale(f.dropout_p)


# ------------------------------------------------------------------- exact results


def _t(x):
    return np.swapaxes(x, -1, -2)


def _sum_to(x, sizes):
    """Sums over what is broadcast."""
    axes = tuple(at for at, (n, m) in enumerate(zip(x.shape, sizes)) if n != m)
    return x.sum(axes, keepdims=True)


def _sum_groups(x, heads_k):
    batch, heads, rows, dim = x.shape
    return x.reshape(batch, heads_k, heads // heads_k, rows, dim).sum(2)


def _scores(p, q, k, seen):
    """Scores without what is not seen, and their derivative by q.k times scale."""
    f, kind = p.features, q.dtype.type
    x, slope = (q @ _t(k)) * kind(p.factor), None
    if f.softcap > 0:
        turn = np.tanh(x / kind(f.softcap))
        x, slope = kind(f.softcap) * turn, 1 - turn * turn
    if f.alibi is not None:
        x = x - slopes(p).numpy().astype(q.dtype) * distances(p).numpy()
    if f.bias is not None:
        wide = f.bias.detach().cpu().double().numpy().astype(q.dtype)
        x = x + np.where(seen, wide, 0)
    return np.where(seen, x, -kind(math.inf)), slope


def exact(p):
    """Results by the formulas; a row that sees nothing is 0 with -inf."""
    f, heads_k, group = p.features, p.k.size(1), p.q.size(1) // p.k.size(1)
    seen = seen_by(p).numpy()
    q, k, v, dout = (numbers(t) for t in (p.q, p.k, p.v, p.dout))
    many_k, many_v = (np.repeat(t, group, 1) for t in (k, v))
    x, slope = _scores(p, q, many_k, seen)
    most, sink = x.max(-1, keepdims=True, initial=-math.inf), None
    if f.sink is not None:
        sink = numbers(f.sink).astype(q.dtype)[:, None, None]
        most = np.maximum(most, sink)
    blind = most == -math.inf
    weights = np.exp(x - np.where(blind, 0, most))
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - most)
    weights = weights / np.where(blind, 1, total)
    with np.errstate(divide="ignore"):
        lse = most + np.log(total)
    kept_part = 1 if drop(p) is None else drop(p).numpy().astype(q.dtype)
    out = (weights * kept_part) @ many_v
    delta = (dout * out).sum(-1, keepdims=True)
    if p.dlse is not None:
        delta = delta - numbers(p.dlse)[..., None]
    ds = np.where(seen, weights * ((dout @ _t(many_v)) * kept_part - delta), 0)
    raw = ds * q.dtype.type(p.factor)
    raw = raw if slope is None else raw * slope
    return Results(
        out,
        lse[..., 0],
        raw @ many_k,
        _sum_groups(_t(raw) @ q, heads_k),
        _sum_groups(_t(weights * kept_part) @ dout, heads_k),
        None if f.bias is None else _sum_to(ds, f.bias.shape),
        None if sink is None else (-np.exp(sink - lse) * delta)[..., 0],
    )


# --------------------------------------------------- differentiable, and the yardstick


def attend(p, q, k, v, bias=None, sink=None):
    """(out, lse) by torch ops in the dtype of q, from tensors in the place of p's.

    Everything else (masks, slopes, which weights are dropped) is p's. `sink` may be
    (H) or (B, H, Sq).
    """
    f, dtype = p.features, q.dtype
    group = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    seen = seen_by(p)
    x = (q @ k.transpose(-1, -2)) * p.factor
    if f.softcap > 0:
        x = f.softcap * torch.tanh(x / f.softcap)
    if f.alibi is not None:
        x = x - slopes(p).to(dtype) * distances(p).to(dtype)
    if bias is not None:
        x = x + torch.where(seen, bias.to(dtype), 0.0)
    # A row that sees nothing keeps finite scores and counts for nothing.
    blind = ~seen.any(-1, keepdim=True)
    if sink is not None:
        sink = sink.to(dtype)
        if sink.dim() == 1:
            sink = sink[:, None].expand(q.shape[:3])
        blind = torch.zeros_like(blind)
        x = torch.cat([x.masked_fill(~seen, -math.inf), sink.unsqueeze(-1)], -1)
    else:
        x = x.masked_fill(~(seen | blind), -math.inf)
    lse = x.logsumexp(-1).masked_fill(blind[..., 0], -math.inf)
    weights = x.softmax(-1)[..., : k.size(2)].masked_fill(~seen, 0.0)
    factor = drop(p)
    if factor is not None:
        weights = weights * factor.to(dtype)
    return weights @ v, lse


def _leaf(tensor, dtype=None):
    if tensor is None:
        return None
    made = tensor.detach().cpu().to(dtype or tensor.dtype)
    return made.clone(memory_format=torch.contiguous_format).requires_grad_()


def differentiated(p, wide, narrow):
    """Results of attend() computed in `wide`; out and gradients rounded to `narrow`,
    those of a bias or sink in a wider type to that."""
    f = p.features
    q, k, v = (_leaf(t, narrow) for t in (p.q, p.k, p.v))
    bias, sink = None, None
    if f.bias is not None:
        bias = _leaf(f.bias, torch.promote_types(f.bias.dtype, narrow))
    if f.sink is not None:
        sink = _leaf(f.sink.detach().cpu()[:, None].expand(p.q.shape[:3]), wide)
    given = (t if t is None else t.to(wide) for t in (q, k, v, bias, sink))
    out, lse = attend(p, *given)
    results, grads = [out.to(narrow)], [p.dout.detach().cpu().to(narrow)]
    if p.dlse is not None:
        results.append(lse)
        grads.append(p.dlse.detach().cpu().to(wide))
    leaves = {
        name: leaf
        for name, leaf in zip(GRADIENTS, (q, k, v, bias, sink))
        if leaf is not None
    }
    found = torch.autograd.grad(results, list(leaves.values()), grads)
    return Results(results[0].detach(), lse.detach(), **dict(zip(leaves, found)))


def math_path(p):
    """The yardstick: as PyTorch's math path, for halves in float32 and rounded once."""
    wide = torch.promote_types(p.q.dtype, torch.float32)
    return differentiated(p, wide, p.q.dtype)


# ------------------------------------------------------------------- calls of the ops


def simulating():
    """CPU tensors go to the simulator inside the block; others where they lie."""
    return fa.simulate(ARCH) if DEVICE == "cpu" else contextlib.nullcontext()


def arguments(p):
    """What lies between v and the last arguments of the ops."""
    f, none = p.features, torch.empty(0, device=p.q.device)
    values = f._replace(scale=p.factor)
    return tuple(
        none if x is None and name in TENSORS else x
        for name, x in zip(f._fields, values)
    )


def symbol(p, kind):
    """The kernel that serves a problem: "fwd", "bwd_kv", "bwd_q" or "bwd_bias"."""
    dim, dtype = max(p.q.size(3), p.v.size(3)), p.q.dtype
    few = dtype is torch.float16 and p.q.size(3) < FEW_CHANNELS
    if p.strict and dtype is torch.float32:
        bucket = next(b for b in (64, 128, 256) if b >= dim)
        return f"fa_{kind}_exact32_d{bucket}_full"
    if not p.full:
        if few:
            return f"fa_{kind}_exact16_d{family_of(dtype, dim).dim}_plain"
        found = family_of(dtype, dim, strict=p.strict)
        names = {"fwd": found.forward, "bwd_kv": found.keys, "bwd_q": found.queries}
        return names[kind]
    bucket = next(b for b in (64, 128, 256) if b >= dim)
    short = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16"}
    unit = short.get(dtype, "bf16")
    if dtype in HALVES and (few or p.strict or kind == "bwd_bias"):
        unit = "exact16"
    return f"fa_{kind}_{unit}_d{bucket}_full"


def as_chosen(p):
    """bf16 and fp32 go the way that the problem says."""
    return chosen(family_of(p.q.dtype, 8, strict=p.strict))


class Saved(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    out_lo: torch.Tensor


def forward(p, needs_grad=True):
    """Saved of the op, which ran on the kernel that the problem asks for."""
    with simulating(), as_chosen(p):
        saved = Saved(*_ops.op(p.q, p.k, p.v, *arguments(p), needs_grad))
    call = fa.last_call()
    if min(p.scores) > 0:
        assert call.kernel == symbol(p, "fwd"), call
    return saved


def all_wanted(p):
    f = p.features
    wanted = WANT_DQ | WANT_DK | WANT_DV
    wanted |= WANT_DBIAS if f.bias is not None else 0
    return wanted | (WANT_DSINK if f.sink is not None else 0)


def symbols(p, wanted):
    """What last_call() says of a backward."""
    # Delta is corrected by what dS add up to in the pass of dQ, which for dK comes
    # first.
    exact_32 = p.strict and p.q.dtype is torch.float32
    corrected = WANT_DK | WANT_DQ if exact_32 else WANT_DK
    keys_too = p.q.dtype is not torch.float64 and wanted & corrected
    wide = p.q.dtype is not torch.float64 and wanted & (WANT_DBIAS | WANT_DSINK)
    kinds = []
    if wanted & (WANT_DK | WANT_DV):
        kinds.append("bwd_kv")
    if wanted & WANT_DQ or keys_too or wide:
        kinds.insert(0 if keys_too else 1, "bwd_q")
    if wanted & WANT_DBIAS:
        kinds.append("bwd_bias")
    return "+".join(symbol(p, kind) for kind in kinds)


def backward(p, saved, wanted=None, fp32=False):
    """(dq, dk, dv, dbias, dsink), None where not wanted."""
    wanted = all_wanted(p) if wanted is None else wanted
    none = torch.empty(0, device=p.q.device)
    dlse = none if p.dlse is None else p.dlse
    with simulating(), as_chosen(p):
        made = _ops.backward_op(
            *(p.dout, dlse, p.q, p.k, p.v, *saved),
            *arguments(p),
            *(wanted, fp32),
        )
    if min(p.scores) > 0 and symbols(p, wanted):
        assert fa.last_call().kernel == symbols(p, wanted), fa.last_call()
    for bit, grad in enumerate(made):
        assert wanted >> bit & 1 or grad.numel() == 0
    return tuple(g if wanted >> bit & 1 else None for bit, g in enumerate(made))


def run(p, **how):
    """Results of forward and backward together."""
    saved = forward(p)
    return Results(saved.out, saved.lse, *backward(p, saved, **how))


class _Fused(torch.autograd.Function):
    """The ops under autograd, for gradcheck."""

    @staticmethod
    def forward(ctx, p, q, k, v, bias, sink):
        p = p.but(q=q, k=k, v=v, bias=bias, sink=sink)
        saved = forward(p)
        ctx.p = p
        ctx.save_for_backward(*saved)
        return saved.out, saved.lse

    @staticmethod
    def backward(ctx, dout, dlse):
        p = ctx.p.but(dout=dout, dlse=dlse.contiguous())
        saved = Saved(*ctx.saved_tensors)
        wanted = sum(1 << at for at, x in enumerate(ctx.needs_input_grad[1:]) if x)
        grads = list(backward(p, saved, wanted))
        if grads[4] is not None:
            grads[4] = grads[4].sum((0, 2))
        return (None, *grads)


def fused(p, q, k, v, bias=None, sink=None):
    """(out, lse) of the ops, differentiable; tensors in the place of p's."""
    return _Fused.apply(p, q, k, v, bias, sink)


# ------------------------------------------------------------------------- measures

# float64: errors relative to the largest value that may stay, for data with scores of
# some units. Observed: see tests/test_feature_gradients.py.
ABSOLUTE = 1e-14


def _row_norm(tensor):
    """Of the longest row."""
    return float(tensor.detach().double().norm(dim=-1).max())


def noise(p, name):
    """What may stay of a gradient whose terms cancel.

    The dS of a row add up to nothing (without dlse and sink), so a bias that is the
    same for all keys has no gradient but roundings.
    """
    eps = torch.finfo(torch.promote_types(p.q.dtype, torch.float32)).eps
    many = keep_scale(p.features.dropout_p) if p.drops else 1.0
    if name in ("dq", "dk"):
        return many * noise_of_gradients(p.q, p.k, p.v, p.dout, p.factor)
    if name == "dbias" and p.features.bias.size(3) == 1 < p.k.size(2):
        summed = p.scores[0] * p.scores[1] * p.scores[2] / p.features.bias.numel()
        return eps * many * _row_norm(p.dout) * _row_norm(p.v) * summed**0.5
    return eps * _row_norm(p.dout) * _row_norm(p.v) * many if name == "dbias" else 0.0


def ratios(p, results, *, reference=None, yardstick=None):
    """name -> error in units of what is allowed, for out and the gradients that are
    there; pass if all are at most 1."""
    reference = reference or exact(p)
    return _ratios([p], results, reference, yardstick or math_path(p))


def ratios_together(problems, results, references):
    """The same of several draws of a problem, as if their results were one tensor."""
    yardsticks = [math_path(p) for p in problems]
    parts = (_side_by_side(x) for x in (results, references, yardsticks))
    return _ratios(problems, *parts)


def _side_by_side(draws):
    """Results with the elements of all draws."""

    def join(tensors):
        if tensors[0] is None:
            return None
        flat = [x.reshape(-1) for x in tensors]
        return torch.cat(flat) if isinstance(flat[0], torch.Tensor) else np.hstack(flat)

    return Results(*map(join, zip(*draws)))


def _ratios(problems, results, reference, yardstick):
    found = {}
    for name in ("out", *GRADIENTS):
        got, own = getattr(results, name), getattr(reference, name)
        if got is None:
            continue
        assert tuple(got.shape) == own.shape and torch.isfinite(got).all()
        stays = max(noise(p, name) for p in problems)
        if problems[0].q.dtype is not torch.float64:
            found[name] = ratio(got, own, getattr(yardstick, name), stays)
        elif np.abs(own).max(initial=0) > stays:
            found[name] = error(got, own) / ABSOLUTE
        else:
            found[name] = largest_error(got, own) / max(stays, 1e-300)
        if name == "dbias":
            spare = largest_error(got, own) / max(stays, 1e-300)
            found[name] = min(found[name], spare)
        if name == "dsink":
            # Its weight is 2 to the power of what the log-sum-exp is off.
            finite = np.abs(reference.lse[np.isfinite(reference.lse)])
            eps = torch.finfo(got.dtype).eps
            spare = error(got, own) / (eps * (1 + float(finite.max(initial=0))))
            found[name] = min(found[name], spare)
    return found


def lse_bound(p, reference):
    """Bound on the error of each log-sum-exp; infinite ones do not count."""
    f, group = p.features, p.q.size(1) // p.k.size(1)
    seen = seen_by(p)
    many = p.k.detach().cpu().double().abs().repeat_interleave(group, 1)
    parts = (p.q.detach().cpu().double().abs() @ many.mT) * abs(p.factor)
    if f.alibi is not None:
        parts = parts + slopes(p).double().abs() * distances(p)
    if f.bias is not None:
        parts = parts + torch.where(seen, f.bias.detach().cpu().double().abs(), 0.0)
    reach = torch.where(seen, parts, 0.0).amax(-1) if parts.numel() else 0.0
    own = torch.from_numpy(reference.lse.astype("float64"))
    size = torch.maximum(
        torch.where(own.isfinite(), own.abs(), 0.0), torch.as_tensor(reach)
    )
    if p.q.dtype is torch.float64:
        return 4e-15 + 4e-15 * size + 1e-15 * f.softcap
    of_cap = 1e-7 if p.q.dtype in HALVES else 4e-8
    return 1e-5 + 5e-7 * size + of_cap * f.softcap


def lse_error(p, lse, reference):
    """Error of the LSE in units of what is allowed; infinite if it is not -inf exactly
    where a row sees nothing."""
    got = lse.detach().double().cpu()
    own = torch.from_numpy(reference.lse.astype("float64"))
    blind = own == -math.inf
    if not torch.equal(got == -math.inf, blind):
        return math.inf
    worst = ((got - own).abs() / lse_bound(p, reference))[~blind]
    return max(worst.nan_to_num(math.inf).tolist(), default=0.0)


# ------------------------------------------------------------------- making problems


def problem(
    dtype,
    rows,
    keys,
    dim,
    *,
    dim_v=None,
    heads=1,
    heads_k=1,
    batch=1,
    draw=0,
    strict=False,
    dlse=False,
    **features,
):
    """A problem of seeded normal tensors on the test's device; `draw` is their seed."""
    generator = torch.Generator().manual_seed(draw)
    dim_v = dim if dim_v is None else dim_v

    def make(*sizes, kind=dtype):
        x = torch.randn(sizes, generator=generator, dtype=torch.float64)
        return x.to(kind).to(DEVICE)

    q, k = make(batch, heads, rows, dim), make(batch, heads_k, keys, dim)
    v, dout = make(batch, heads_k, keys, dim_v), make(batch, heads, rows, dim_v)
    given = Features(**features)
    grad = make(batch, heads, rows, kind=lse_dtype(dtype)) if dlse else None
    return Problem(q, k, v, dout, given, grad, strict)


def seed_of(number, offset=0):
    """The tensor from which dropout draws."""
    return torch.tensor([number, offset], dtype=torch.int64, device=DEVICE)


def block_lists(dense):
    """Features of blocks for a boolean (B or 1, H or 1, QB, KB): lists both ways."""

    def lists(table):
        count = table.sum(-1, keepdim=True)
        order = (~table).to(torch.int8).argsort(dim=-1, stable=True)
        order = torch.where(torch.arange(table.size(-1)) < count, order, 0)
        return torch.cat([count, order], -1).to(torch.int32).to(DEVICE)

    return dict(blocks=lists(dense), blocks_t=lists(dense.mT.contiguous()))


def spans(lengths_q, lengths_k, *, causal=False, left=-1, right=-1, rows=0, keys=0):
    """Features of packed sequences, bottom-right aligned each; `rows` and `keys` are
    the lengths of the tensors where they are longer."""
    span_q, span_k = [], []
    start_q = start_k = 0
    for n_q, n_k in zip(lengths_q, lengths_k):
        own = n_k - n_q
        before = left if left >= 0 else n_q + n_k
        after = 0 if causal else right if right >= 0 else n_q + n_k
        for i in range(n_q):
            first = min(max(i + own - before, 0), n_k)
            last = min(max(i + own + after, first - 1), n_k - 1)
            diagonal = start_k - start_q + own
            span_q.append([start_k + first, start_k + last, diagonal, 0])
        for j in range(n_k):
            first = min(max(j - own - after, 0), n_q)
            last = min(max(j - own + before, first - 1), n_q - 1)
            span_k.append([start_q + first, start_q + last])
        start_q, start_k = start_q + n_q, start_k + n_k
    span_q += [[start_k, start_k - 1, 0, 0]] * (rows - len(span_q))
    span_k += [[start_q, start_q - 1]] * (keys - len(span_k))
    made = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (span_q, span_k))
    return dict(zip(("span_q", "span_k"), made))
