"""What each feature of attention costs beside a call without, on the simulated gfx906.

fp16, D = 64, forward and backward, in clocks of the vector ALU (counted) and in cycles
(estimated: docs/profiler.md).  Nothing here was measured on a card.  Every case runs
whole once, and its log-sum-exp and, without dropout, its output are compared with fp64;
then a sample of workgroups of each launch is profiled.

    python benchmarks/features.py            print the table
    python benchmarks/features.py --write    and put it into docs/performance.md

Fails if a feature costs the forward more vector ALU clocks than its goal.
SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
from bounds import (
    HEADS,
    LENGTH,
    PAGE,
    SAMPLE,
    one_workspace,
    only_first_launch,
    pass_of,
    simulator,
)
from common import options_of, relative_error, write_between, write_json
from torch import Tensor
from tqdm import tqdm

import flash_attn_rocm
import hipsim
from flash_attn_rocm import _ops, _python_ops

DIM = 64
WINDOW = 256
ERROR_BOUND, LSE_BOUND = 1e-3, 1e-4
WANTED = _ops.WANT_DQ | _ops.WANT_DK | _ops.WANT_DV
WANTED_BIAS, WANTED_SINK = 8, 16
NAMES = (
    *("bias", "mask", "alibi", "sink", "seed", "span_q", "span_k", "blocks"),
    *("blocks_t", "scale", "softcap", "dropout_p", "causal", "window_left"),
    *("window_right", "sink_keys", "block_q", "block_k"),
)
USUAL: dict[str, Any] = {
    **dict.fromkeys(NAMES[:9]),
    **dict(scale=DIM**-0.5, softcap=0.0, dropout_p=0.0, causal=0, window_left=-1),
    **dict(window_right=-1, sink_keys=0, block_q=0, block_k=0),
}
COLUMNS = ("forward", "backward_kv", "backward_q", "backward_bias")

Scores = Callable[[Tensor, Tensor], Tensor]  # of scores and distances, one head


class Case(NamedTuple):
    """A call: what it has of NAMES, what that does to scores, what it may cost."""

    name: str
    given: dict[str, Any]
    scores: Scores
    goal: float | None = None  # times the plain forward's vector ALU clocks
    sink: float | None = None  # of head 0

    @property
    def wanted(self) -> int:
        extra = WANTED_BIAS if "bias" in self.given else 0
        return WANTED | extra | (WANTED_SINK if "sink" in self.given else 0)


def block_lists(length: int) -> dict[str, Any]:
    """Lists that leave nothing out."""
    blocks = length // 128
    row = torch.tensor([blocks, *range(blocks)], dtype=torch.int32)
    every = row.expand(1, 1, blocks, blocks + 1).contiguous()
    return {"blocks": every, "blocks_t": every, "block_q": 128, "block_k": 128}


def _unchanged(x: Tensor, _away: Tensor) -> Tensor:
    return x


def cases(length: int) -> list[Case]:
    """The plain call first."""
    generator = torch.Generator().manual_seed(length)
    sizes = (1, HEADS, length, length)
    bias = torch.randn(sizes, generator=generator).half()
    keys = torch.randn((1, 1, 1, length), generator=generator).half()
    mask = torch.rand(sizes, generator=generator) < 0.9
    slopes = torch.rand(HEADS, generator=generator) / 8
    sink = torch.randn(HEADS, generator=generator)
    seed = torch.tensor([1234, 5])
    window = {"causal": _ops.CAUSAL_TOP_LEFT, "window_left": WINDOW}

    def hidden(x: Tensor, seen: Tensor) -> Tensor:
        return x.masked_fill(~seen, -math.inf)

    def near(x: Tensor, away: Tensor) -> Tensor:
        return hidden(x, (away >= 0) & (away <= WINDOW))

    def near_or_first(x: Tensor, away: Tensor) -> Tensor:
        first = torch.arange(length) < 4
        return hidden(x, (away >= 0) & ((away <= WINDOW) | first))

    def capped(x: Tensor, _away: Tensor) -> Tensor:
        return 30 * torch.tanh(x / 30)

    def all_of(x: Tensor, away: Tensor) -> Tensor:
        x = capped(x, away) - slopes[0] * away.abs() + bias[0, 0]
        return hidden(x, mask[0, 0] & (away >= 0))

    everything = {
        **dict(bias=bias, mask=mask, alibi=slopes, sink=sink, softcap=30.0),
        **dict(seed=seed, dropout_p=0.1, causal=_ops.CAUSAL_TOP_LEFT),
    }
    first_sink = float(sink[0])
    return [
        Case("plain", {}, _unchanged),
        Case("plain, causal", {"causal": 1}, lambda x, a: hidden(x, a >= 0)),
        Case(f"plain, causal, window {WINDOW}", window, near),
        Case("blocks, all listed", block_lists(length), _unchanged),
        Case("bias", {"bias": bias}, lambda x, _: x + bias[0, 0], 1.05),
        Case("bias in fp32", {"bias": bias.float()}, lambda x, _: x + bias[0, 0], 1.05),
        Case("bias (1, 1, 1, Sk)", {"bias": keys}, lambda x, _: x + keys[0, 0], 1.05),
        Case("mask", {"mask": mask}, lambda x, _: hidden(x, mask[0, 0]), 1.05),
        Case("ALiBi", {"alibi": slopes}, lambda x, a: x - slopes[0] * a.abs(), 1.05),
        Case("softcap", {"softcap": 30.0}, capped, 1.15),
        Case("dropout", {"seed": seed, "dropout_p": 0.1}, _unchanged, 1.25),
        Case("sink", {"sink": sink}, _unchanged, None, first_sink),
        Case("window, 4 first keys", {**window, "sink_keys": 4}, near_or_first),
        Case("all but blocks, causal", everything, all_of, None, first_sink),
    ]


class Problem:
    """Tensors that all cases share."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(DIM + length)
        sizes = (4, 1, HEADS, length, DIM)
        made = torch.randn(sizes, generator=generator).half()
        self.q, self.k, self.v, self.dout = made.unbind(0)

    def arguments(self, case: Case) -> tuple[Any, ...]:
        none = torch.empty(0)
        given = {**USUAL, **case.given}
        return tuple(
            none if at < 9 and given[name] is None else given[name]
            for at, name in enumerate(NAMES)
        )

    def forward(self, case: Case) -> Any:
        """The op's kernel, in the form whose workspace can be kept."""
        rest = (*self.arguments(case), True)
        return _python_ops.forward(self.q, self.k, self.v, *rest)

    def backward(self, case: Case, saved: Any) -> Any:
        """Likewise."""
        inputs = (self.dout, torch.empty(0), self.q, self.k, self.v, *saved)
        rest = (*self.arguments(case), case.wanted, False)
        return _python_ops.backward(*inputs, *rest)

    def verify(self, case: Case, saved: Any) -> None:
        """Log-sum-exp and output of the first head against fp64."""
        q, k, v = (t[0, 0].double() for t in (self.q, self.k, self.v))
        at = torch.arange(q.size(0))
        x = case.scores(q @ k.T * DIM**-0.5, (at[:, None] - at).double())
        if case.sink is not None:
            x = torch.cat([x, torch.full_like(x[:, :1], case.sink)], -1)
        out, lse, _ = saved
        off = float((lse[0, 0].double() - x.logsumexp(-1)).abs().max())
        error = 0.0
        if "seed" not in case.given:
            error = relative_error(out[0, 0], x.softmax(-1)[:, : k.size(0)] @ v)
        if not (off < LSE_BOUND and error < ERROR_BOUND):
            raise SystemExit(
                f"{case.name}: LSE is off by {off:.1e}, out by {error:.1e}"
            )


def profiled(call: Callable[[], object], several: bool) -> list[dict[str, Any]]:
    """The launches of a call, of which a sample ran; what the first of several finds
    in all rows is there."""
    with one_workspace(), simulator(sample=0, check=0):
        if several:
            only_first_launch(call)
        hipsim.set_option("sample", SAMPLE)
        with flash_attn_rocm.profile() as profile:
            call()
    launches: list[dict[str, Any]] = profile.to_dict()["launches"]
    return launches


def figures(launch: dict[str, Any]) -> dict[str, Any]:
    bounds = {bound["unit"]: bound["cycles"] for bound in launch["bounds"]}
    return {
        "kernel": launch["kernel"],
        "valu": bounds["VALU"],
        "cycles": launch["estimate"]["cycles"]["middle"],
    }


def measure(case: Case, length: int, backward: bool = True) -> dict[str, Any]:
    """pass -> figures; with the backward, of a case whose results are right."""
    problem = Problem(length)
    launches = profiled(lambda: problem.forward(case), False)
    if backward:
        with simulator(sample=0, check=0):
            saved = problem.forward(case)
        problem.verify(case, saved)
        launches += profiled(lambda: problem.backward(case, saved), True)
    return {pass_of(launch): figures(launch) for launch in launches}


def collect(length: int, backward: bool = True) -> list[dict[str, Any]]:
    """Figures of every case, and what each costs of the plain one."""
    rows: list[dict[str, Any]] = []
    for case in tqdm(cases(length), leave=False, mininterval=1.0):
        made = measure(case, length, backward)
        plain = rows[0]["passes"] if rows else made
        rows.append(
            {
                "name": case.name,
                "goal": case.goal,
                "passes": made,
                "valu": {k: made[k]["valu"] / plain[k]["valu"] for k in plain},
                "cycles": {k: made[k]["cycles"] / plain[k]["cycles"] for k in plain},
            }
        )
    return rows


def _cell(row: dict[str, Any], of: str) -> str:
    made = row["passes"].get(of)
    if made is None:
        return ""
    thousands = f"{made['valu'] / 1e3:.0f}, {made['cycles'] / 1e3:.0f}"
    if of not in row["valu"]:
        return thousands
    return f"{row['valu'][of]:.3f}, {row['cycles'][of]:.2f} ({thousands})"


def report(rows: list[dict[str, Any]], length: int) -> str:
    lines = [
        "Simulated, never measured on a card. fp16, D = 64, B = 1, H = "
        f"{HEADS}, N = {length}; {SAMPLE} workgroups of each grid ran. VALU clocks and "
        "estimated cycles over those of the plain kernel, in brackets thousands.",
        "",
        "| | forward | dK, dV | dQ | dBias | goal |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        goal = "" if row["goal"] is None else f"{row['goal']:.2f}"
        cells = [row["name"], *(_cell(row, of) for of in COLUMNS), goal]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{row['name']}: {row['valu']['forward']:.3f} times the vector ALU clocks of "
        f"the plain forward, expected at most {row['goal']:.2f}"
        for row in rows
        if row["goal"] is not None and row["valu"]["forward"] > row["goal"]
    ]


def main() -> int:
    options = options_of(__doc__, PAGE, length=LENGTH).parse_args()
    torch.set_num_threads(1)
    rows = collect(options.length)
    text = report(rows, options.length)
    print(text)
    if options.write:
        write_between(PAGE, Path(__file__).name, text)
    write_json(options.json, {"features": rows})
    # In short calls what a kernel does once weighs more than the scores.
    bad = failures(rows) if options.length >= LENGTH else []
    for failure in bad:
        print(failure)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
