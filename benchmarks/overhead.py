"""What a fused call costs the host: stock attention and the shim in one run.

Tiny tensors and a driver that launches nothing: what is left is Python, the
dispatcher, checks, plan and allocation.  Before the timing the same call is
verified on the simulator.  The two take turns in short batches; the ratio is the
median over pairs of neighbouring batches.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, Callable

import torch
from common import attention_fp64, machine, qkv, relative_error, summary, write_json
from torch.nn import functional as F

import flash_attn_rocm
from flash_attn_rocm import _ops

ERROR_BOUND = 1e-3
GOAL = 1.5  # fused over stock


def batch_us(call: Callable[[], Any], calls: int) -> float:
    """Microseconds of this thread per call; other programs do not count."""
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls * 1e6


def measure(head_dim: int, batches: int, calls: int) -> dict[str, Any]:
    q, k, v = qkv(1, 2, head_dim)
    stock_function = F.scaled_dot_product_attention

    def stock() -> None:
        stock_function(q, k, v, is_causal=True)

    def fused() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with flash_attn_rocm.patched(), flash_attn_rocm.simulate("gfx906"):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        error = relative_error(out, attention_fp64(q, k, v, causal=True))
        call = flash_attn_rocm.last_call()
        if call is None or call.backend != "sim" or not error < ERROR_BOUND:
            raise SystemExit(f"the call does not run fused or is wrong: {call} {error}")
        _ops.configure("null")
        try:
            fused()
            call = flash_attn_rocm.last_call()
            if call is None or call.backend != "null":
                raise SystemExit(
                    f"the driver that launches nothing is not used: {call}"
                )
            for function in (stock, fused):
                batch_us(function, calls)
            times = [
                (batch_us(stock, calls), batch_us(fused, calls)) for _ in range(batches)
            ]
        finally:
            _ops.configure(_ops.config.device)
    return {
        "shape": list(q.shape),
        "ops": flash_attn_rocm.status()["ops"],
        "stock_us": summary([s for s, _ in times]),
        "fused_us": summary([f for _, f in times]),
        "ratio": summary([f / s for s, f in times]),
        "goal": GOAL,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batches", type=int, default=60, help="default 60")
    parser.add_argument("--calls", type=int, default=500, help="a batch, default 500")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(d, max(2, options.batches), options.calls) for d in (8, 64)]
    print(
        f"{machine()['cpu']}, torch {machine()['torch']}, op from {results[0]['ops']}"
    )
    print(f"{'shape':16} {'':8} {'median':>8} {'p10':>8} {'p90':>8}")
    for result in results:
        for key, unit in (("stock_us", "us"), ("fused_us", "us"), ("ratio", "")):
            row = result[key]
            print(
                f"{result['shape']!s:16} {key.split('_')[0]:8} {row['median']:8.2f} "
                f"{row['p10']:8.2f} {row['p90']:8.2f} {unit}"
            )
    print(f"goal: a ratio of at most {GOAL}")
    write_json(options.json, {"overhead": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
