"""How fast the simulator runs the shipped forward kernel.

Wave instructions per second at check level 0, with one and with two threads, with
portable code and with the best code for this host, and at level 2; beside it per
second of CPU time, which a busy machine does not lower.  Before any timing the result
is compared with attention in fp64; after it, the outputs of all settings must be
equal bit for bit.  The settings take turns, so that ratios belong to one time.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from common import (
    attention_fp64,
    machine,
    options_of,
    qkv,
    relative_error,
    summary,
    write_json,
)
from torch.nn import functional as F

import flash_attn_rocm
import hipsim

ERROR_BOUND = 1e-3  # fp16 output; 2e-4 to 3e-4 is usual
SETTINGS = [  # name, hipsim options
    ("portable, 1 thread", {"cpu": 0, "threads": 1, "check": 0}),
    ("best, 1 thread", {"cpu": 1, "threads": 1, "check": 0}),
    ("best, 2 threads", {"cpu": 1, "threads": 2, "check": 0}),
    ("level 2, 1 thread", {"cpu": 1, "threads": 1, "check": 2}),
]
LAUNCHES = 4  # timed together


def measure(head_dim: int, heads: int, length: int, rounds: int) -> dict[str, Any]:
    q, k, v = qkv(heads, length, head_dim)
    reference = attention_fp64(q, k, v, causal=False)
    rates: dict[str, list[float]] = {name: [] for name, _ in SETTINGS}
    core_rates: dict[str, list[float]] = {name: [] for name, _ in SETTINGS}
    outputs = {}
    kernel, instructions = "", 0
    for turn in range(rounds + 1):  # the first turn verifies and warms up
        for name, options in SETTINGS:
            for option, value in options.items():
                hipsim.set_option(option, value)
            start, core_start = time.perf_counter(), time.process_time()
            for _ in range(LAUNCHES):
                out = F.scaled_dot_product_attention(q, k, v)
            seconds = (time.perf_counter() - start) / LAUNCHES
            core_seconds = (time.process_time() - core_start) / LAUNCHES
            call = flash_attn_rocm.last_call()
            if call is None or call.backend != "sim":
                raise SystemExit(f"not simulated: {call}")
            if turn == 0:
                error = relative_error(out, reference)
                if not error < ERROR_BOUND:
                    raise SystemExit(f"{name}: error {error:.1e} against fp64")
                kernel = call.kernel
                instructions = call.counters["wave_instructions"]
                outputs[name] = out
            else:
                if not torch.equal(out, outputs[name]):
                    raise SystemExit(f"{name}: the result differs between two runs")
                rates[name].append(instructions / seconds)
                core_rates[name].append(instructions / core_seconds)
    first = outputs[SETTINGS[0][0]]
    for name, out in outputs.items():
        if not torch.equal(out, first):
            raise SystemExit(f"{name}: bits differ from {SETTINGS[0][0]}")
    pairs = zip(rates["best, 1 thread"], rates["best, 2 threads"])
    return {
        "kernel": kernel,
        "shape": list(q.shape),
        "wave_instructions": instructions,
        "error_fp64": error,
        "rates": {name: summary(values) for name, values in rates.items()},
        "rates_per_core": {n: summary(values) for n, values in core_rates.items()},
        "two_threads_over_one": summary([two / one for one, two in pairs]),
    }


def main() -> int:
    options = options_of(__doc__, rounds=7, length=512).parse_args()
    # torch's own threads spin for a while after each use, on the cores measured here.
    torch.set_num_threads(1)
    results = []
    with flash_attn_rocm.patched(), flash_attn_rocm.simulate("gfx906"):
        for head_dim in (64, 128):
            rounds = max(2, options.rounds)
            results.append(measure(head_dim, 4, options.length, rounds))
    print(f"{machine()['cpu']}, {machine()['cores']} cores")
    for result in results:
        print(
            f"\n{result['kernel']}  {result['shape']}, "
            f"{result['wave_instructions'] / 1e6:.2f} million wave instructions, "
            f"error {result['error_fp64']:.1e} against fp64, all settings bit-equal"
        )
        print(
            f"  {'setting':20} {'million/s':>10} {'p10':>8} {'p90':>8} {'per core':>9}"
        )
        for name, rate in result["rates"].items():
            low, middle, high = (rate[k] / 1e6 for k in ("p10", "median", "p90"))
            core = result["rates_per_core"][name]["median"] / 1e6
            print(f"  {name:20} {middle:10.2f} {low:8.2f} {high:8.2f} {core:9.2f}")
        print(f"  two threads over one: {result['two_threads_over_one']['median']:.2f}")
    write_json(options.json, {"sim_speed": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
