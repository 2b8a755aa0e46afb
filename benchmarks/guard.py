"""What guarding a call costs the host: modes off, async and sync in one run.

Tiny tensors and a driver that launches nothing and whose events are over at once, so
what is left is the host's own time: Python, dispatcher, checks, plan, allocation, and
the guard. State is kept on disk, in a folder made for the run, as it is on a GPU.
Before the timing the same call is verified on the simulator. Modes take turns in short
batches; the ratio is the median over pairs of neighbouring batches, in the caller's
processor time. The watching thread's own share is told beside it.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from typing import Any, Callable

# Read at import.
_STATE = tempfile.mkdtemp(prefix="guard-")
os.environ["FLASH_ATTN_ROCM_CACHE_DIR"] = _STATE

import torch  # noqa: E402
from common import (  # noqa: E402
    launching_nothing,
    options_of,
    print_machine,
    qkv,
    summary,
    write_json,
)
from overhead import backward_of, batch_us, verify  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import flash_attn_rocm  # noqa: E402
from flash_attn_rocm import _guard  # noqa: E402

GOALS = {"async": 1.1, "sync": 3.0}  # over off


def timed(mode: str, call: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Microseconds per call in a mode: of this thread, and of all others."""
    _guard.configure(mode)
    for _ in range(10):
        call()
    start, mine = time.process_time(), time.thread_time()
    us = batch_us(call, calls)
    spent = time.thread_time() - mine
    others = (time.process_time() - start - spent) / calls * 1e6
    return us, others


def compare(
    mode: str, call: Callable[[], Any], batches: int, calls: int
) -> dict[str, dict[str, float]]:
    """Both modes' microseconds, and the ratio."""
    pairs = [
        (timed("off", call, calls), timed(mode, call, calls)) for _ in range(batches)
    ]
    return {
        "off_us": summary([off[0] for off, _ in pairs]),
        "guarded_us": summary([on[0] for _, on in pairs]),
        "watching_us": summary([on[1] for _, on in pairs]),
        "ratio": summary([on[0] / off[0] for off, on in pairs]),
    }


def check_guarded() -> None:
    """The calls were seen by the guard, and none of them got lost."""
    deadline = time.monotonic() + 5.0
    while flash_attn_rocm.status()["guard"]["outstanding"]:
        if time.monotonic() > deadline:
            raise SystemExit("calls are still outstanding after 5 seconds")
        time.sleep(0.01)
    guard = flash_attn_rocm.status()["guard"]
    if guard["unwatched"] or guard["misses"] or guard["complaints"]:
        raise SystemExit(f"not all calls were guarded: {guard}")
    calls = sum(row["calls"] for row in flash_attn_rocm.status()["latency"])
    if calls == 0:
        raise SystemExit("the guard has seen no call")


def measure(batches: int, calls: int) -> list[dict[str, Any]]:
    half = tuple(t.clone().requires_grad_() for t in qkv(1, 2, 64))
    plain = tuple(t.detach() for t in half)
    results = []
    with flash_attn_rocm.patched(), flash_attn_rocm.simulate("gfx906"):
        verify(half)
        fused = F.scaled_dot_product_attention
        with launching_nothing():
            out = fused(*half, is_causal=True)
            named = {
                "forward": lambda: fused(*plain, is_causal=True),
                "backward": backward_of(out, half),
            }
            for name, call in named.items():
                for mode in GOALS:
                    figures = compare(mode, call, batches, calls)
                    results.append({"call": name, "mode": mode, **figures})
            check_guarded()
    return results


def main() -> int:
    options = options_of(__doc__, batches=40, calls=200).parse_args()
    torch.set_num_threads(1)
    try:
        results = measure(max(2, options.batches), options.calls)
    finally:
        shutil.rmtree(_STATE, ignore_errors=True)
    print_machine()
    print(
        f"{'call':9} {'mode':6} {'off us':>8} {'guarded':>8} {'ratio':>6} {'p10':>5} "
        f"{'p90':>5} {'goal':>5} {'watching us':>12}"
    )
    missed = 0
    for result in results:
        ratio, goal = result["ratio"], GOALS[result["mode"]]
        missed += ratio["median"] > goal
        print(
            f"{result['call']:9} {result['mode']:6} {result['off_us']['median']:8.2f} "
            f"{result['guarded_us']['median']:8.2f} {ratio['median']:6.3f} "
            f"{ratio['p10']:5.2f} {ratio['p90']:5.2f} {goal:5.2f} "
            f"{result['watching_us']['median']:12.2f}"
        )
    write_json(options.json, {"guard": results})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
