"""last_call(), explain(), status(), build_info(): what ran, what would, with what.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from . import _grad_check, _guard, _ops, _record, _shim, _simulate, _verify
from ._config import code_objects, config, simulator_path
from ._eligibility import reason_of, route
from ._features import TENSORS, Features
from ._reason import Reason
from ._version import __version__
from ._visits import Geometry, tiles

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class _Plan:
    """What C plans: the kernels, joined by "+", the first one's grid, and why."""

    kernel: str
    grid: Grid
    why: str
    launched: frozenset[str]  # all kernels, of the backward too
    backward: str = ""


@dataclass(frozen=True)
class LastCall:
    """What answered the calling thread's last attention call."""

    backend: str  # "hip", "sim", "standin", "null" or "sdpa"
    kernel: str  # "" if the stock function answered, or nothing was launched
    reason: Reason
    why: str  # one sentence: why this kernel, or why the stock function
    device: str  # "cpu" or "cuda:N"; "" if the stock function answered
    # wave_instructions (counted by the simulator, otherwise 0) and workgroups.
    counters: Mapping[str, int]
    _geometry: Geometry | None = field(default=None, repr=False, compare=False)

    @property
    def tiles(self) -> int | None:
        """Tiles of 128 queries by 64 keys that causal mask, window, offsets of packed
        sequences and block_mask leave to be visited, of all batches and heads.

        Counted when asked, from what the call said; reads lists of blocks, so it
        waits for a GPU that has them. None after a backward, a compiled call, one of
        the op itself, or a plain one of scaled_dot_product_attention without gradients.
        """
        return None if self._geometry is None else tiles(self._geometry)


@dataclass(frozen=True)
class Explanation:
    """What a call would do."""

    fused: bool
    backend: str
    kernel: str
    grid: Grid | None  # workgroups in x, y, z
    reason: Reason
    why: str  # one sentence
    # The kernels of its backward, joined by "+"; "" if no gradient is needed.
    backward: str = ""

    def __str__(self) -> str:
        answer = f"fused by {self.kernel}" if self.fused else "stock"
        return f"{answer}: {self.why}"


_WHY = {
    Reason.OFF: "FLASH_ATTN_ROCM_DEVICE=off",
    Reason.DISABLED: "disable() switched fused calls off",
    Reason.FLASH_DISABLED: "flash attention is disabled (for example sdpa_kernel)",
    Reason.SUBCLASS: "an argument is a tensor subclass, or a torch function mode is on",
    Reason.NESTED: "an argument is a nested tensor",
    Reason.CAUSAL_BIAS: (
        "attn_mask is a CausalBias: torch unpacks it and calls again, which may "
        "run fused (this one is counted as a fallback too)"
    ),
    Reason.FUNCTORCH: "a functorch transform (vmap, grad, jvp) is active",
    Reason.FORWARD_AD: "forward-mode AD is active",
    Reason.TRACE: "a graph is being traced",
    Reason.EXPORT: "the call is being exported",
    Reason.ARGUMENT: "an argument has an unexpected type",
    Reason.MASK: (
        "attn_mask does not fit, comes with is_causal, or has a dtype or strides that "
        "no kernel reads"
    ),
    Reason.DROPOUT: "dropout_p is not at least 0 and below 1",
    Reason.SCALE: "scale has a magnitude not below 2^127",
    Reason.DTYPE: "query, key and value differ in dtype, or no kernel serves it",
    Reason.RANK: "query, key and value cannot be viewed as 4-D tensors",
    Reason.SHAPE: "batch sizes do not broadcast, or key and value lengths differ",
    Reason.HEADS: (
        "head counts do not broadcast, or with enable_gqa query's is no multiple of "
        "key's and value's"
    ),
    Reason.HEAD_DIM: (
        "the head dims of query and key differ, or one is 0 or above the largest "
        "kernel's"
    ),
    Reason.SIZE: "a size is above a launch limit",
    Reason.DEVICE: (
        "no kernels run on this device (CPU tensors: inside simulate(), or with "
        "FLASH_ATTN_ROCM_DEVICE=sim)"
    ),
    Reason.UNTESTED: (
        "FLASH_ATTN_ROCM_SELFTEST=0 leaves this AMD GPU untested; "
        "FLASH_ATTN_ROCM_UNTESTED=1 runs kernels on it all the same"
    ),
    Reason.CODE_OBJECT: "no code object for this architecture",
    Reason.SELFTEST: "this GPU did not pass the self-test; see flash-attn-rocm doctor",
    Reason.FAILED: "the fused call failed; the log has the error",
    Reason.LATE: "the fused call missed its deadline",
    Reason.BREAKER: "a kernel of this call failed before, and rests; see status()",
    Reason.VERIFY: "the fused result was not what torch's math gives",
    Reason.NONFINITE: "a call that was to be verified has a NaN or infinity in it",
}


def last_call() -> LastCall | None:
    """The calling thread's last attention call through this package, if any."""
    record = _record.last_record()
    if record is None:
        return None
    # A reason's code if the stock function answered, else the plan's sentence.
    backend, kernel, words, device, instructions, workgroups = record
    reason = Reason(words) if backend == "sdpa" else Reason.FUSED
    return LastCall(
        backend=backend,
        kernel=kernel,
        reason=reason,
        why=words if reason is Reason.FUSED else _why(reason),
        device=device,
        counters={"wave_instructions": instructions, "workgroups": workgroups},
        _geometry=_record.last_geometry() if reason is Reason.FUSED else None,
    )


def _backend_for(query: Tensor) -> str:
    if query.is_cpu:
        return "sim"
    return "standin" if config.device == "standin" else "hip"


def _resting(backend: str, query: Tensor, kernels: frozenset[str]) -> str:
    """A sentence if the breaker of one of them is open and not due for a try."""
    device = "sim" if query.is_cpu else f"{backend}:{query.get_device()}"
    for breaker in _guard.breaker_list():
        if breaker["device"] == device and breaker["kernel"] in kernels:
            left = breaker["retry_in_s"]
            if left > 0 or breaker["state"] == "half_open":
                return (
                    f"the breaker of {breaker['kernel']} is {breaker['state']}, to be "
                    f"tried in {left:.0f} s: {breaker['cause']}"
                )
    return ""


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Explanation:
    """Say what scaled_dot_product_attention would do with these arguments.

    Runs nothing. The answer holds for the current context (simulate(), autocast,
    grad mode, sdpa_kernel()), whether or not patch() is in force.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: as
            for torch.nn.functional.scaled_dot_product_attention.

    Returns:
        An Explanation: kernel and grid, or the reason for the stock function. If an
        input requires grad, also the kernels of the backward.
    """
    call = (query, key, value, attn_mask, dropout_p, is_causal)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    try:
        answer = route(_plan, _plan_any, *call, **options)
    except Exception as error:
        answer = reason_of(*call, **options) or Reason.FAILED
        if answer is Reason.FAILED:
            return Explanation(False, "sdpa", "", None, answer, str(error))
    if isinstance(answer, Reason):
        return Explanation(False, "sdpa", "", None, answer, _why(answer))
    backend = _backend_for(query)
    resting = _resting(backend, query, answer.launched)
    if resting:
        return Explanation(False, "sdpa", "", None, Reason.BREAKER, resting)
    return Explanation(
        True,
        backend,
        answer.kernel,
        answer.grid,
        Reason.FUSED,
        answer.why,
        answer.backward,
    )


def _tensor(tensor: Any) -> tuple[Any, ...] | None:
    """A feature as C's plan takes it."""
    if tensor is None or not tensor.numel():
        return None
    code = _ops.dtype_code(tensor.dtype) if tensor.dtype in _ops.DTYPES else 0
    return tensor.data_ptr(), code, tuple(tensor.shape), tensor.stride()


def _planned(
    q: Tensor, k: Tensor, v: Tensor, features: Features, *wanted: Any
) -> tuple[str, Grid, str, frozenset[str]]:
    aligns = [math.gcd(t.data_ptr(), 16) for t in (q, k, v)]
    sizes = [part for t in (q, k, v) for part in (tuple(t.shape), t.stride())]
    code = _ops.dtype_code(q.dtype)
    if features.drops():  # explaining draws no seed; nothing reads this one
        features = features.seeded(torch.zeros(2, dtype=torch.int64))
    tensors = [_tensor(tensor) for tensor in features[:TENSORS]]
    scale, softcap, dropout_p, causal, *rest = features[TENSORS:]
    more = (*tensors, softcap, dropout_p, *rest)
    wanted = wanted or (0, False)
    plan = _ops.ext.plan(code, *aligns, *sizes, scale, causal, *wanted, more)
    kernel, grid, why, steps = plan[:4]
    return kernel, grid, why, frozenset(symbol for symbol, _ in steps)


def _plan(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> _Plan:
    """What fwd would launch for these arguments of it."""
    features = Features(scale=rest[TENSORS], causal=rest[TENSORS + 3])
    return _Plan(*_planned(q, k, v, features))


def _plan_any(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    origins: Any,
    needs_grad: bool,
    leading: Any,
) -> _Plan:
    """What fwd, and bwd where gradients are needed, would launch."""
    forward = _planned(q, k, v, features)
    if not needs_grad:
        return _Plan(*forward)
    leaves = [*((q, k, v) if origins is None else origins), features.bias]
    bits = [1 << bit for bit, leaf in enumerate(leaves) if _requires_grad(leaf)]
    backward, _, _, more = _planned(q, k, v, features, sum(bits), origins is not None)
    return _Plan(*forward[:3], forward[3] | more, backward)


def _requires_grad(leaf: Tensor | None) -> bool:
    return leaf is not None and leaf.requires_grad


def _why(reason: Reason) -> str:
    if reason is Reason.UNAVAILABLE and _ops.unavailable:
        return _ops.unavailable
    if reason is Reason.CODE_OBJECT and _simulate.default_missing:
        return _simulate.default_missing
    return _WHY[reason]


def status(*, wait: bool = True) -> dict[str, Any]:
    """What is in force and what ran so far, as plain data.

    Args:
        wait: False leaves out nonfinite_gradients, for which a GPU that counts them
            has to be waited for; the answer then comes even if it hangs.

    Returns:
        A dictionary: version, torch, hip, patched, device (the mode),
        simulated (architecture of this context or None), ops ("c", "python" or
        None), unavailable (why there are no ops, or None), code_dir,
        code_objects, simulator (path or None), bf16 ("auto" or "strict"),
        fp32 ("auto", "fast" or "exact"),
        check_grads (see patch()), nonfinite_gradients (their number by tensor, as
        far as check_grads looked; waits for the device), counters (fused calls by
        kernel, fallbacks by reason, wave instructions), enabled (see disable()),
        guard, breakers, latency and verify (docs/degradation.md).
    """
    simulator = simulator_path()
    return {
        "version": __version__,
        "torch": str(torch.__version__),
        "hip": torch.version.hip,
        "patched": _shim.is_patched(),
        "device": config.device,
        "simulated": _simulate.current_arch(),
        "ops": _ops.source,
        "unavailable": _ops.unavailable,
        "code_dir": config.code_dir,
        "code_objects": sorted(chain(*code_objects(config.code_dir).values())),
        "simulator": simulator if os.path.isfile(simulator) else None,
        "bf16": config.bf16,
        "fp32": config.fp32,
        "check_grads": _grad_check.mode(),
        "nonfinite_gradients": _grad_check.counts() if wait else {},
        "counters": _record.counters(),
        "enabled": not _guard.switch.off,
        "guard": _guard.guard_status(),
        "breakers": _guard.breaker_list(),
        "latency": _guard.latency_list(),
        "verify": _verify.verify_status(),
    }


def build_info() -> dict[str, Any]:
    """How the package was built.

    Returns:
        A dictionary: version, extension (what csrc/python says of itself, None
        if it cannot be imported) and kernels (the kernel build's manifest:
        compiler, source hash and resources by architecture).
    """
    try:
        with open(
            os.path.join(config.code_dir, "manifest.json"), encoding="utf-8"
        ) as file:
            kernels = json.load(file)
    except (OSError, ValueError):
        kernels = {}
    extension = _ops.ext.build_info() if _ops.ext is not None else None
    return {"version": __version__, "extension": extension, "kernels": kernels}
