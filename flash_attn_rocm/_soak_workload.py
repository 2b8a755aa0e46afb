"""The calls of a soak: number `index` of `seed` is always the same call.

So a soak that was killed goes on where it was, and any line of a journal can be run
again by its number. Good calls vary what callers vary; bad ones are what stock either
refuses or answers in its own way.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch import Tensor

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
GOOD = "good"
# Kinds of bad input of which stock's answer is not all there is to know:
NONFINITE = ("nan", "inf", "-inf")  # its paths differ among themselves
# A value longer than its key, and in bf16 views whose rows overlap: not the same each
# time, with NaNs where its own math path has none.
UNSETTLED = ("lengths", "overlapping")
UNREADABLE = ("overlapping", "strided")  # oneDNN refuses some that kernels read


@dataclass(frozen=True)
class Sizes:
    """What shapes are drawn from."""

    batches: tuple[int, ...]
    heads: tuple[int, ...]  # of key and value
    groups: tuple[int, ...]  # query heads to one of those
    lengths: tuple[int, int]
    dims: tuple[int, ...]


# A simulated wave instruction costs what a million of a card's do.
TINY = Sizes((1, 1, 2), (1, 2), (1, 1, 2), (1, 24), (4, 8, 8, 16, 16, 24, 32, 32, 64))
CARD = Sizes(
    (1, 2, 4), (1, 2, 8), (1, 2, 4), (1, 2048), (16, 32, 40, 64, 64, 80, 96, 128)
)


@dataclass
class Case:
    """One call: tensors on the CPU, to be placed where it runs."""

    index: int
    kind: str  # GOOD, or of BAD
    dtype: str
    q: Any
    k: Any
    v: Any
    dout: Tensor | None  # None: no backward
    options: dict[str, Any] = field(default_factory=dict)
    offsets: list[Tensor] | None = None  # a call of flash_attn_varlen_func

    @property
    def shape(self) -> list[list[int]]:
        """Of q, k and v."""
        tensors = (self.q, self.k, self.v)
        return [list(t.shape) if isinstance(t, Tensor) else [] for t in tensors]

    def words(self) -> str:
        """The options, for the journal."""
        shown = []
        for name, value in self.options.items():
            if isinstance(value, Tensor):
                kind = str(value.dtype).replace("torch.", "")
                value = f"{kind}{list(value.shape)}"
            shown.append(f"{name}={value}")
        return " ".join(shown)


class _Draw:
    """One call's choices."""

    def __init__(self, seed: int, index: int, sizes: Sizes) -> None:
        self.choice = random.Random(f"{seed}:{index}")
        self.numbers = torch.Generator()
        self.numbers.manual_seed(self.choice.getrandbits(62))
        self.sizes = sizes

    def chance(self, share: float) -> bool:
        return self.choice.random() < share

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.numbers)

    def length(self) -> int:
        low, high = self.sizes.lengths
        return self.choice.randint(low, high)

    def laid_out(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The same numbers in one of the layouts that models make."""
        tensor = tensor.to(dtype)
        how = self.choice.choice(("as is", "as is", "transposed", "part", "shifted"))
        if how == "transposed":  # (batch, length, heads, head dim) in memory
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if how == "part":  # of a packed projection
            packed = torch.cat([tensor, torch.ones_like(tensor)], -1)
            return packed[..., : tensor.size(-1)]
        if how == "shifted":  # not aligned to 16 bytes
            flat = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])
            return flat[1:].view(tensor.shape)
        return tensor.contiguous()


def make(seed: int, index: int, bad_share: float, sizes: Sizes) -> Case:
    """Call number `index`; about `bad_share` of all are bad."""
    draw = _Draw(seed, index, sizes)
    bad = draw.chance(bad_share)
    case = _good(draw, index)
    if bad:
        case.kind = draw.choice.choice(tuple(BAD))
        BAD[case.kind](draw, case)
    return case


def make_too_large(seed: int, index: int, sizes: Sizes) -> Case:
    """Call number `index`, with an output that no memory holds."""
    draw = _Draw(seed, index, sizes)
    case = _good(draw, index)
    case.kind = "too large"
    _too_large(draw, case)
    return case


def _good(draw: _Draw, index: int) -> Case:
    choice, sizes = draw.choice, draw.sizes
    name = choice.choice(tuple(DTYPES))
    dtype = DTYPES[name]
    batch, heads = choice.choice(sizes.batches), choice.choice(sizes.heads)
    group, dim = choice.choice(sizes.groups), choice.choice(sizes.dims)
    len_q, len_k = draw.length(), draw.length()
    if draw.chance(0.5):
        len_k = len_q
    dim_v = choice.choice(sizes.dims) if draw.chance(0.1) else dim
    shapes = [
        (batch, heads * group, len_q, dim),
        (batch, heads, len_k, dim),
        (batch, heads, len_k, dim_v),
    ]
    q, k, v = (draw.laid_out(draw.randn(*shape), dtype) for shape in shapes)
    options: dict[str, Any] = {}
    if group > 1:
        options["enable_gqa"] = True
    if draw.chance(0.4):
        options["is_causal"] = True
    elif draw.chance(0.3):
        options["attn_mask"] = _mask(draw, shapes[0], len_k, dtype)
    if draw.chance(0.2):
        options["scale"] = choice.uniform(0.02, 1.0)
    dout = None
    if draw.chance(0.3):
        dout = draw.randn(*shapes[0][:3], dim_v).to(dtype)
    return Case(index, GOOD, name, q, k, v, dout, options)


def _mask(
    draw: _Draw, shape: tuple[int, ...], len_k: int, dtype: torch.dtype
) -> Tensor:
    """Boolean with a key for every query, or added to the scores."""
    batch, heads, len_q, _ = shape
    lead = draw.choice.choice(((1, 1), (batch, 1), (batch, heads)))
    numbers = draw.randn(*lead, len_q, len_k)
    if draw.chance(0.5):
        return numbers.to(dtype)
    mask = numbers > -0.5
    mask[..., 0] = True
    return mask


# --------------------------------------------------------------------------
# Bad input: each changes a good call


def _put(value: float) -> Callable[[_Draw, Case], None]:
    def change(draw: _Draw, case: Case) -> None:
        name = draw.choice.choice("qkv")
        tensor = getattr(case, name).clone()
        tensor[tuple(draw.choice.randrange(size) for size in tensor.shape)] = value
        setattr(case, name, tensor)

    return change


def _overlapping(draw: _Draw, case: Case) -> None:
    """Rows that share elements; torch has no smaller step than 0."""
    for name in "qkv":
        tensor = getattr(case, name)
        step = draw.choice.randint(0, 3)
        batch, heads, length, dim = tensor.shape
        base = draw.randn(batch * heads + length * step + dim + 4).to(tensor.dtype)
        strides = (heads, draw.choice.randint(0, 1), step, 1)
        view = base.as_strided(tensor.shape, strides, draw.choice.randint(0, 3))
        setattr(case, name, view)


def _strided(draw: _Draw, case: Case) -> None:
    """Head dims that are not contiguous, and batches that are repeated."""
    case.q = case.q.mT.contiguous().mT
    case.k = case.k[:1].expand(case.k.shape)
    case.v = torch.stack([case.v, case.v], -1)[..., 0]


def _cast(*names: str) -> Callable[[_Draw, Case], None]:
    def change(draw: _Draw, case: Case) -> None:
        others = (torch.int32, torch.complex64, torch.bool, torch.float32, torch.half)
        dtype = draw.choice.choice([o for o in others if o is not DTYPES[case.dtype]])
        for name in names:
            setattr(case, name, getattr(case, name).to(dtype))
        case.dout = None

    return change


def _shortened(name: str, dim: int) -> Callable[[_Draw, Case], None]:
    def change(draw: _Draw, case: Case) -> None:
        tensor = getattr(case, name)
        # One element more is as wrong as one less, and there may be only one.
        setattr(case, name, torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim))
        case.dout = None

    return change


def _of_rank(rank: int) -> Callable[[_Draw, Case], None]:
    def change(draw: _Draw, case: Case) -> None:
        for name in "qkv":
            tensor = getattr(case, name)
            while tensor.dim() > rank:
                tensor = tensor[0]
            setattr(case, name, tensor)
        case.dout = None

    return change


def _empty(*names: str) -> Callable[[_Draw, Case], None]:
    def change(draw: _Draw, case: Case) -> None:
        for name in names:
            setattr(case, name, getattr(case, name)[:, :, :0])
        case.options.pop("attn_mask", None)
        case.dout = None

    return change


def _option(name: str, *values: Any) -> Callable[[_Draw, Case], None]:
    def change(draw: _Draw, case: Case) -> None:
        case.options[name] = draw.choice.choice(values)

    return change


def _mask_shape(draw: _Draw, case: Case) -> None:
    case.options.pop("is_causal", None)
    mask = draw.randn(case.q.size(2) + 1, case.k.size(2) + 2)
    case.options["attn_mask"] = mask.to(case.q.dtype)
    case.dout = None


def _mask_dtype(draw: _Draw, case: Case) -> None:
    case.options.pop("is_causal", None)
    mask = draw.randn(case.q.size(2), case.k.size(2))
    others = (torch.int32, torch.uint8, torch.complex64, torch.float64, torch.half)
    case.options["attn_mask"] = mask.abs().to(draw.choice.choice(others))


def _mask_and_causal(draw: _Draw, case: Case) -> None:
    case.options["is_causal"] = True
    case.options["attn_mask"] = torch.ones(
        case.q.size(2), case.k.size(2), dtype=torch.bool
    )


def _masked_rows(draw: _Draw, case: Case) -> None:
    """Queries that may look at no key."""
    case.options.pop("is_causal", None)
    mask = draw.randn(case.q.size(2), case.k.size(2)) > 0
    mask[draw.choice.randrange(case.q.size(2))] = False
    case.options["attn_mask"] = mask


def _no_tensor(draw: _Draw, case: Case) -> None:
    setattr(case, draw.choice.choice("qkv"), draw.choice.choice((None, 3, "q", [1.0])))
    case.dout = None


def _too_large(draw: _Draw, case: Case) -> None:
    """An output of 2^49 bytes or more, of a few that are repeated."""
    q, k = (draw.randn(1, 1, 1, 128).to(DTYPES[case.dtype]) for _ in range(2))
    case.q = q.expand(64, 64, 2**29, 128)
    case.k = case.v = k.expand(64, 64, 8, 128)
    case.options, case.dout = {}, None


def _offsets(draw: _Draw, case: Case) -> None:
    """flash_attn_varlen_func refuses these; stock has no such function."""
    tokens = case.q.size(2)
    spoilt = (
        torch.tensor([1, tokens], dtype=torch.int32),
        torch.tensor([0, tokens, tokens - 1], dtype=torch.int32),
        torch.tensor([0, tokens + 1], dtype=torch.int32),
        torch.tensor([0, 2**31 - 1], dtype=torch.int32),
        torch.tensor([0, -1], dtype=torch.int32),
        torch.tensor([0, tokens], dtype=torch.int64),
        torch.tensor([[0, tokens]], dtype=torch.int32),
    )
    bad = draw.choice.choice(spoilt)
    good = torch.tensor([0, tokens], dtype=torch.int32)
    case.q = case.q[0].transpose(0, 1)  # (tokens, heads, head dim)
    case.k = case.v = case.q
    case.offsets = [bad, good] if draw.chance(0.5) else [good, bad]
    case.options, case.dout = {}, None


BAD: dict[str, Callable[[_Draw, Case], None]] = {
    "nan": _put(math.nan),
    "inf": _put(math.inf),
    "-inf": _put(-math.inf),
    "overlapping": _overlapping,
    "strided": _strided,
    "dtype": _cast("q"),
    "dtypes": _cast("q", "k", "v"),
    "lengths": _shortened("v", 2),
    "heads": _shortened("k", 1),
    "head dim": _shortened("k", 3),
    "batch": _shortened("q", 0),
    "rank 3": _of_rank(3),
    "rank 1": _of_rank(1),
    "no queries": _empty("q"),
    "no keys": _empty("k", "v"),
    "mask shape": _mask_shape,
    "mask dtype": _mask_dtype,
    "mask and causal": _mask_and_causal,
    "masked rows": _masked_rows,
    "dropout": _option("dropout_p", -0.5, 1.5, math.nan),
    "scale": _option("scale", math.nan, math.inf, 1e39, 0.0),
    "unknown": _option("no_such_option", 1),
    "no tensor": _no_tensor,
    "too large": _too_large,
    "offsets": _offsets,
}
