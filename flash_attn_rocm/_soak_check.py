"""Whether an answer is right: against stock, and against stock's math in float64.

A result may be off by twice what stock's math path is off in the same dtype, or by a
few units of the largest number where that happens to be exact, times a margin: the
rule of the tests, whose shapes are chosen, while these are random. What stock
answered has to be stock's to the bit.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ._errors import FlashAttnError
from ._soak_oracle import attention
from ._soak_workload import NONFINITE, UNREADABLE, UNSETTLED, Case
from ._status import last_call
from ._torch import stock_sdpa
from ._varlen import flash_attn_varlen_func

NAMES = ("out", "dq", "dk", "dv")
# A few rows with steep scores scatter: of 300 tensors of 6 rows in fp32 the largest
# was 3 times what the rule of the tests allows, simulated.
MARGIN = 4.0
# float64 has no reference that is better than itself.
_UNITS = {torch.float64: 256.0}


@dataclass
class Answer:
    """What came of a call by one way."""

    results: list[Tensor | None] = field(default_factory=list)  # as NAMES
    error: BaseException | None = None
    # Of the forward and the backward, as last_call() has it.
    reasons: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)

    @property
    def fused(self) -> bool:
        return bool(self.reasons) and set(self.reasons) == {"fused"}


def _placed(tensor: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """A copy, of the same strides where the dtype stays."""
    if not isinstance(tensor, Tensor):
        return tensor
    if dtype is not None and tensor.is_floating_point():
        return tensor.detach().to(device, dtype)
    if device.type == "cpu":
        return tensor.detach()
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return flat.to(device).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )


def ask(
    function: Callable[..., Tensor],
    case: Case,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    note: Callable[[str], None] | None = None,
) -> Answer:
    """Forward, and backward if the case has one; what it raises is part of the answer.

    Args:
        dtype: of all floating-point arguments instead of their own.
        note: is told "forward" and "backward" when that is over.
    """
    answer = Answer()
    q, k, v = (_placed(tensor, device, dtype) for tensor in (case.q, case.k, case.v))
    options = {
        name: _placed(value, device, dtype) for name, value in case.options.items()
    }
    if case.dout is not None:
        for tensor in (q, k, v):
            tensor.requires_grad_()
    try:
        out = function(q, k, v, **options)
        _keep(answer, note, "forward")
        answer.results.append(out.detach().cpu())
        if case.dout is not None and out.requires_grad:
            dout = _placed(case.dout, device, dtype).to(out.dtype)
            grads = torch.autograd.grad(out, (q, k, v), dout, allow_unused=True)
            _keep(answer, note, "backward")
            answer.results += [None if g is None else g.cpu() for g in grads]
        if device.type != "cpu":
            torch.cuda.synchronize(device)
    except Exception as error:
        answer.error = error
        _keep(answer, note, "error")
    return answer


def _keep(answer: Answer, note: Callable[[str], None] | None, what: str) -> None:
    if note is None:
        return
    note(what)
    call = last_call()
    if call is not None:
        answer.reasons.append(str(call.reason))
        answer.kernels.extend(call.kernel.split("+") if call.kernel else ())


def ask_ours(
    case: Case, device: torch.device, note: Callable[[str], None] | None
) -> Answer:
    """What the patched function answers, or flash_attn_varlen_func."""
    if case.offsets is None:
        ours: Callable[..., Tensor] = F.scaled_dot_product_attention
        return ask(ours, case, device, note=note)
    answer = Answer()
    q, k, v = (_placed(tensor, device, None) for tensor in (case.q, case.k, case.v))
    offsets_q, offsets_k = (tensor.to(device) for tensor in case.offsets)
    try:
        flash_attn_varlen_func(q, k, v, offsets_q, offsets_k, q.size(0), k.size(0))
    except Exception as error:
        answer.error = error
    return answer


def ask_stock(case: Case, device: torch.device) -> Answer:
    # CUDA's own fused kernels fault on masks whose rows are not aligned (torch 2.11).
    if device.type == "cuda" and torch.version.hip is None:
        return ask_math(case, device)
    return ask(stock_sdpa, case, device)


def ask_math(
    case: Case, device: torch.device, dtype: torch.dtype | None = None
) -> Answer:
    with sdpa_kernel(SDPBackend.MATH):
        return ask(stock_sdpa, case, device, dtype=dtype)


# --------------------------------------------------------------------------
# Comparing


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal, a NaN to a NaN too."""
    if one is None or other is None:
        return one is other
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _noise(case: Case, name: str, scale: float) -> float:
    """What float32 sums may be off by where the true number is 0.

    As a single key's dq, whose terms cancel.
    """
    unit = 2.0**-52 if case.dtype == "fp64" else 2.0**-23

    def row(tensor: Tensor) -> float:
        norms = tensor.double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1)
        return float(norms.max()) if norms.numel() else 0.0

    if case.dout is None or name not in ("dq", "dk"):
        return 0.0
    other = case.k if name == "dq" else case.q
    terms = abs(scale) * row(case.dout) * row(case.v) * row(other)
    return 4.0 * unit * terms * (1.0 if name == "dq" else case.q.size(2) ** 0.5)


def _error_of(case: Case, name: str, got: Tensor, true: Tensor, math: Tensor) -> float:
    """How many times what the rule allows, before the margin; inf: not even alike."""
    if got.shape != math.shape or got.dtype is not math.dtype:
        return float("inf")
    # Where stock has a NaN that the second opinion has not, either will do.
    finite = true.isfinite() & math.isfinite()
    if case.kind in NONFINITE:
        finite &= got.isfinite()
    elif not bool(got[finite].isfinite().all()):
        return float("inf")
    if not finite.any():
        return 0.0
    got64, true, math = (
        got[finite].double(),
        true[finite].double(),
        math[finite].double(),
    )
    difference = got64 - true
    units = _UNITS.get(got.dtype, 2.0)
    scale = case.options.get("scale", case.q.size(-1) ** -0.5)
    scale = scale if abs(scale) < 2.0**127 else 0.0
    size = units * torch.finfo(got.dtype).eps * float(true.abs().max())
    size += _noise(case, name, scale) + float(torch.finfo(got.dtype).tiny)
    by_units = float(difference.abs().max()) / size
    allowed = 2.0 * float((math - true).norm())
    by_math = float(difference.norm()) / allowed if allowed else float("inf")
    return min(by_units, by_math)


def _like_one(got: Tensor, others: list[Tensor]) -> bool:
    """A NaN where one of the others is not finite, an infinity where one is that."""
    broken = torch.zeros_like(got, dtype=torch.bool)
    alike = torch.zeros_like(broken)
    for other in others:
        broken |= ~other.isfinite()
        alike |= other.to(got.dtype) == got
    return bool((got.isfinite() | (got.isnan() & broken) | alike).all())


@dataclass
class Verdict:
    """Of one answer."""

    wrong: list[str] = field(default_factory=list)  # names of NAMES, or "error"
    lost: bool = False  # raised, where stock answers
    error: float = 0.0  # the largest, see _error_of
    text: str = ""  # what was expected


def judge(case: Case, ours: Answer, device: torch.device) -> Verdict:
    """Compare with stock's answer to the same call."""
    if case.offsets is not None:
        return _judge_error(FlashAttnError, ours)
    stock = ask_stock(case, device)
    if stock.error is not None and case.kind in UNREADABLE and ours.error is None:
        stock = ask_math(case, device, torch.float64)
        stock.results = [_as(case.q.dtype, result) for result in stock.results]
    if stock.error is not None:
        return _judge_error(type(stock.error), ours)
    if ours.error is not None:
        return Verdict(lost=True, text=f"stock answers; {_described(ours)}")
    return _judge_results(case, ours, stock, device)


def _as(dtype: torch.dtype, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _described(answer: Answer) -> str:
    if answer.error is None:
        return "got a result"
    return f"got {type(answer.error).__name__}: {str(answer.error)[:200]}"


def _judge_error(expected: type[BaseException], ours: Answer) -> Verdict:
    if type(ours.error) is expected:
        return Verdict()
    text = f"expected {expected.__name__}, {_described(ours)}"
    return Verdict(wrong=["error"], text=text)


_BY_TORCH = ("failed", "late", "breaker", "verify", "nonfinite")


def _judge_results(
    case: Case, ours: Answer, stock: Answer, device: torch.device
) -> Verdict:
    if len(ours.results) != len(stock.results):
        return Verdict(["error"], text=f"expected {len(stock.results)} results")
    # With gradients a kernel that fails is answered by torch ops, not by stock.
    by_torch = (
        case.dout is not None and ours.reasons[:1] and ours.reasons[0] in _BY_TORCH
    )
    if "fused" not in ours.reasons and device.type == "cpu" and not by_torch:
        return _judge_stocks(case, ours, stock)
    verdict = Verdict()
    math = ask_math(case, device)
    true = ask_math(case, device, torch.float64)
    if math.error is not None:
        math = stock
    if true.error is not None:
        true = math
    second = attention(case) if case.kind in NONFINITE else []
    for at, (got, theirs) in enumerate(zip(ours.results, stock.results)):
        if got is None or theirs is None or not theirs.is_floating_point():
            good = _same_bits(got, theirs)
        else:
            exact, dense = true.results[at], math.results[at]
            assert exact is not None and dense is not None
            others = [exact, dense, theirs]
            if second:
                others.append(second[at])
                exact = torch.where(exact.isfinite(), exact, second[at])
                dense = torch.where(dense.isfinite(), dense, exact.to(dense.dtype))
            error = _error_of(case, NAMES[at], got, exact, dense)
            verdict.error = max(verdict.error, error)
            good = error <= MARGIN and _like_one(got, others)
        if not good:
            verdict.wrong.append(NAMES[at])
    if verdict.wrong:
        verdict.text = f"{verdict.error:.3g} times what is allowed"
    return verdict


def _judge_stocks(case: Case, ours: Answer, stock: Answer) -> Verdict:
    """Stock's answer through us has to be stock's to the bit."""
    wrong = []
    for name, got, theirs in zip(NAMES, ours.results, stock.results):
        if case.kind in UNSETTLED and got is not None and theirs is not None:
            alike = got.shape == theirs.shape and got.dtype is theirs.dtype
        else:
            alike = _same_bits(got, theirs)
        if not alike:
            wrong.append(name)
    return Verdict(wrong, text="stock answered, and otherwise" if wrong else "")
