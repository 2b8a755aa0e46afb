"""What a fused call costs the host: stock attention and the shim in one run.

Tiny tensors and a driver that launches nothing: what is left is Python, the
dispatcher, autograd, checks, plan and allocation.  Forward alone, forward that
remembers what a backward needs, and backward.  Before the timing the same call is
verified on the simulator.  Two functions take turns in short batches; the ratio is the
median over pairs of neighbouring batches.

Then what more launches cost, of fused calls: a backward for dK and dV beside one for dQ
too (a launch and an output more), and bfloat16 beside float16, where bfloat16 that goes
through fp16 has launches more (fa_prepare, and exact kernels that find nothing to do).

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import sys
import time
from typing import Any, Callable, NamedTuple

import torch
from common import (
    attention_fp64,
    launching_nothing,
    options_of,
    planned,
    print_machine,
    qkv,
    relative_error,
    summary,
    write_json,
)
from torch import Tensor
from torch.nn import functional as F

import flash_attn_rocm
from flash_attn_rocm import _ops

ERROR_BOUND = 1e-3
GOAL = 1.5  # fused over stock, forward alone

Tensors = tuple[Tensor, ...]


class Pair(NamedTuple):
    """Two functions, what they are and which call they make."""

    functions: str
    call: str
    first: Callable[[], Any]
    second: Callable[[], Any]


def batch_us(call: Callable[[], Any], calls: int) -> float:
    """Microseconds of this thread per call; other programs do not count."""
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls * 1e6


def turns(
    first: Callable[[], Any], second: Callable[[], Any], batches: int, calls: int
) -> dict[str, dict[str, float]]:
    """Microseconds of both per call, and the second over the first."""
    for function in (first, second):
        batch_us(function, calls)
    times = [(batch_us(first, calls), batch_us(second, calls)) for _ in range(batches)]
    return {
        "first_us": summary([one for one, _ in times]),
        "second_us": summary([two for _, two in times]),
        "ratio": summary([two / one for one, two in times]),
    }


def backward_of(out: Tensor, inputs: Tensors) -> Callable[[], Any]:
    """Gradients of `out`, as often as it is called."""
    dout = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def verify(inputs: Tensors) -> None:
    """Output and gradients on the simulator, against fp64."""
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    got = [out.detach(), *backward_of(out, inputs)()]
    call = flash_attn_rocm.last_call()
    reference = attention_fp64(exact[0], exact[1], exact[2], causal=True)
    wanted = [reference.detach(), *backward_of(reference, exact)()]
    errors = [relative_error(one, other) for one, other in zip(got, wanted)]
    if call is None or call.backend != "sim" or not max(errors) < ERROR_BOUND:
        raise SystemExit(f"the calls do not run fused or are wrong: {call} {errors}")


def pairs(stock: Any, plain: Tensors, half: Tensors, bfloat: Tensors) -> list[Pair]:
    """What is compared: stock and fused, then fp16 and bf16, both fused."""
    fused = F.scaled_dot_product_attention

    def forward(attend: Any, inputs: Tensors) -> Callable[[], Any]:
        return lambda: attend(*inputs, is_causal=True)

    def backward(attend: Any, inputs: Tensors) -> Callable[[], Any]:
        return backward_of(attend(*inputs, is_causal=True), inputs)

    def launches(inputs: Tensors, wanted: int) -> int:
        q, k, v = inputs
        return len(planned(q, k, v, _ops.CAUSAL_TOP_LEFT, wanted))

    def counts(wanted: int) -> str:
        return f"{launches(half, wanted)} and {launches(bfloat, wanted)} launches"

    everything = _ops.WANT_DQ | _ops.WANT_DK | _ops.WANT_DV
    keys = _ops.WANT_DK | _ops.WANT_DV
    beside_stock, beside_half = "stock, fused", "fused fp16, bf16"
    out = fused(*half, is_causal=True)
    backward_half = backward_of(out, half)
    return [
        Pair(beside_stock, "forward", forward(stock, plain), forward(fused, plain)),
        Pair(
            beside_stock,
            "forward with grad",
            forward(stock, half),
            forward(fused, half),
        ),
        Pair(beside_stock, "backward", backward(stock, half), backward_half),
        Pair(
            "fused, and dQ",
            f"backward, {launches(half, keys)} and "
            f"{launches(half, everything)} launches",
            backward_of(out, half[1:]),
            backward_half,
        ),
        Pair(
            beside_half,
            f"forward, {counts(0)}",
            forward(fused, half),
            forward(fused, bfloat),
        ),
        Pair(
            beside_half,
            f"backward, {counts(everything)}",
            backward_half,
            backward(fused, bfloat),
        ),
    ]


def measure(head_dim: int, batches: int, calls: int) -> list[dict[str, Any]]:
    stock = F.scaled_dot_product_attention
    plain = qkv(1, 2, head_dim)
    half = tuple(t.clone().requires_grad_() for t in plain)
    bfloat = tuple(t.bfloat16().requires_grad_() for t in plain)
    results = []
    with flash_attn_rocm.patched(), flash_attn_rocm.simulate("gfx906"):
        verify(half)
        with launching_nothing():
            for pair in pairs(stock, plain, half, bfloat):
                pair.second()
                call = flash_attn_rocm.last_call()
                if call is None or call.backend != "null":
                    raise SystemExit(
                        f"the driver that launches nothing is not used: {call}"
                    )
                results.append(
                    {
                        "shape": list(plain[0].shape),
                        "functions": pair.functions,
                        "call": pair.call,
                        **turns(pair.first, pair.second, batches, calls),
                    }
                )
    return results


def main() -> int:
    options = options_of(__doc__, batches=40, calls=200).parse_args()
    torch.set_num_threads(1)
    results = [
        result
        for head_dim in (8, 64)
        for result in measure(head_dim, max(2, options.batches), options.calls)
    ]
    source = print_machine()
    print(
        f"{'shape':14} {'microseconds of':19} {'call':29} "
        f"{'first':>7} {'second':>7} {'ratio':>6} {'p10':>5} {'p90':>5}"
    )
    for result in results:
        first, second = (result[key]["median"] for key in ("first_us", "second_us"))
        ratio = result["ratio"]
        print(
            f"{result['shape']!s:14} {result['functions']:19} {result['call']:29} "
            f"{first:7.2f} {second:7.2f} {ratio['median']:6.2f} {ratio['p10']:5.2f} "
            f"{ratio['p90']:5.2f}"
        )
    print(f"goal: a ratio of at most {GOAL} for the forward alone")
    write_json(options.json, {"overhead": results, "ops": source, "goal": GOAL})
    return 0


if __name__ == "__main__":
    sys.exit(main())
