"""How much memory one attention call takes, forward and backward.

Measured is what torch's allocator hands out: the largest sum of live bytes while a
function runs, beyond what was live before.  That is all that the call allocates:
its output, what is saved for the backward, intermediate results, the workspace of a
kernel, and the three gradients.  q, k, v and the output's gradient are there before
and do not count.  On a CPU torch's profiler lists the allocations (LDS and registers
of a simulated GPU are no memory of torch's); on a GPU the caching allocator keeps
the maximum itself.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import os
from typing import Callable

import torch
from torch.nn import functional as F


def peak_bytes(work: Callable[[], object], device: str) -> int:
    """Most bytes that `work` has live at once, beyond those live before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    # Otherwise the profiler says on stderr that it starts; read at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        work()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    live = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()
        peak = max(peak, live)
    return peak


def attention_bytes(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    heads_k: int | None = None,
    backward: bool = True,
) -> int:
    """peak_bytes() of one causal self-attention over (B, H, S, D) and its backward.

    With heads_k, query heads share that many key heads (torch >= 2.5); without
    `backward`, of a forward that one could follow. Which attention, is up to the
    context: patched(), sdpa_kernel().
    """
    shape_k = (shape[0], heads_k or shape[1], *shape[2:])
    options = {} if heads_k is None else {"enable_gqa": True}
    q, k, v, dout = (
        torch.randn(size, device=device).to(dtype)
        for size in (shape, shape_k, shape_k, shape)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def work() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        if backward:
            torch.autograd.grad(out, (q, k, v), dout)

    work()  # what only a first call allocates is not the call's
    return peak_bytes(work, device)
