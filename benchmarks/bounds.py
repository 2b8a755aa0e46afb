"""What bounds each kernel on the simulated gfx906, and how long it might take.

Nothing here was measured on a card: the figures are those of the simulator's profile
(docs/profiler.md), with the error bar that it gives.  The results of each type and head
dim are first compared with fp64 on a small problem.  Then a sample of workgroups of a
grid that fills the card runs with inputs as in training: the backward gets the output
and the log-sum-exp of the whole forward, by torch, and the main kernels what fa_prepare
finds in all rows, since it decides which of them have something to do.

Also: what it costs the forward to keep what rounding took from its results, and what
launches cost whose workgroups find nothing to do (the exact kernels behind those that
take bfloat16 through fp16).

    python benchmarks/bounds.py            print the tables
    python benchmarks/bounds.py --write    and put them into docs/performance.md

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

import torch
from common import ROOT, options_of, planned, relative_error, write_between, write_json
from torch import Tensor
from tqdm import tqdm

import flash_attn_rocm
import hipsim
from flash_attn_rocm import _guard, _ops, _python_ops
from flash_attn_rocm._autograd import absent
from flash_attn_rocm._features import Features

PAGE = ROOT / "docs" / "performance.md"
CASES = [
    (torch.float16, 64),
    (torch.float16, 128),
    (torch.bfloat16, 64),
    (torch.float32, 64),
]
ERROR_BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}
LENGTH = 1024
# With tiles of 128 rows, two workgroups for each of 60 compute units.  The 8 that
# run have the mean length of all when the mask is causal, and of the workgroups of
# fa_prepare the usual part has work.
HEADS, SAMPLE = 15, 8
SMALLEST = 2.0**-12
CONFLICT_GOAL = 0.15  # of all LDS cycles
# N x N x D products of a pass; one does two flops per element.
PRODUCTS = {"forward": 2, "backward_kv": 4, "backward_q": 3}
EVERYTHING = _ops.WANT_DQ | _ops.WANT_DK | _ops.WANT_DV
UNITS = ("VALU", "LDS", "TA", "L2", "HBM", "WAVE")
MASKS = {False: "none", True: "causal"}

Launch = dict[str, Any]


# --------------------------------------------------------------------------
# Running


class Problem:
    """Inputs of both passes; what the forward makes, made by torch."""

    def __init__(
        self, dtype: torch.dtype, dim: int, length: int, causal: bool, heads: int
    ) -> None:
        generator = torch.Generator().manual_seed(dim + length)
        made = torch.randn(4, 1, heads, length, dim, generator=generator).to(dtype)
        # One element in millions would send its head to bfloat16's exact kernels.
        made[made.abs() < SMALLEST] = 0
        self.q, self.k, self.v, self.dout = made.unbind(0)
        self.causal = causal
        self.scale = dim**-0.5

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, in the dtype of the tensors."""
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp() @ v, lse

    def _options(self) -> tuple[Any, ...]:
        features = Features(scale=self.scale, causal=self._mask())
        return features.op_args(absent)

    def _mask(self) -> int:
        return _ops.CAUSAL_TOP_LEFT if self.causal else _ops.CAUSAL_NONE

    def planned(self, wanted: int) -> list[str]:
        return planned(self.q, self.k, self.v, self._mask(), wanted)

    def forward(self, needs_grad: bool = True) -> _ops.Three:
        """The op's kernel, in the form whose workspace can be kept."""
        options = (*self._options(), needs_grad)
        return _python_ops.forward(self.q, self.k, self.v, *options)

    def backward(self, out: Tensor, lse: Tensor, out_lo: Tensor) -> _ops.Three:
        """Likewise."""
        inputs = (self.dout, absent, self.q, self.k, self.v, out, lse, out_lo)
        options = (*self._options(), EVERYTHING, False)
        dq, dk, dv, _, _ = _python_ops.backward(*inputs, *options)
        return dq, dk, dv

    def torch_forward(self) -> _ops.Three:
        """What forward() would return."""
        exact, lse = self.attention(*(t.float() for t in (self.q, self.k, self.v)))
        out = exact.to(self.q.dtype)
        # What rounding took from both: of lse, which has only float32 here, nothing.
        out_lo = lse.new_zeros(_ops.residue_floats(self.q, self.v))
        if self.q.dtype in _ops.HALVES:
            start = -(-lse.numel() // 4) * 4
            part = out_lo[start:].view(out.dtype)[: out.numel()]
            part.copy_((exact - out.float()).flatten())
        return out, lse, out_lo


@contextmanager
def simulator(**options: int) -> Iterator[None]:
    """Settings of the simulator inside the block, on gfx906."""
    before = {name: hipsim.get_option(name) for name in options}
    for name, value in options.items():
        hipsim.set_option(name, value)
    try:
        with flash_attn_rocm.simulate("gfx906"):
            yield
    finally:
        for name, value in before.items():
            hipsim.set_option(name, value)


def verify(dtype: torch.dtype, dim: int) -> None:
    """Output and gradients of two tiles and a bit, against fp64."""
    problem = Problem(dtype, dim, 200, True, 1)
    with simulator(sample=0):
        out, lse, out_lo = problem.forward()
        grads = problem.backward(out, lse, out_lo)
    inputs = [t.double().requires_grad_() for t in (problem.q, problem.k, problem.v)]
    reference, _ = problem.attention(*inputs)
    exact = torch.autograd.grad(reference, inputs, problem.dout.double())
    for name, got, expected in zip(
        ("out", "dq", "dk", "dv"), (out, *grads), (reference.detach(), *exact)
    ):
        error = relative_error(got, expected)
        if not error < ERROR_BOUNDS[dtype]:
            raise SystemExit(f"{dtype}, D = {dim}: error of {name} is {error:.1e}")


@contextmanager
def one_workspace() -> Iterator[None]:
    """Calls inside the block share their workspace: the first one's contents stay."""
    usual = _python_ops._workspace
    kept: list[Tensor] = []

    def workspace(*arguments: Any) -> Tensor:
        if not kept:
            kept.append(usual(*arguments))
        return kept[0]

    _python_ops._workspace = workspace  # type: ignore[assignment]
    try:
        yield
    finally:
        _python_ops._workspace = usual


def only_first_launch(call: Callable[[], object]) -> None:
    """The call up to its second launch, which fails."""
    hipsim.set_fault("launch:nth=2")
    try:
        call()
    except RuntimeError:
        pass
    finally:
        fired = hipsim.faults_fired()["launch"]
        hipsim.set_fault(None)
        _guard.reset()  # the failure has opened the kernel's breaker
    assert fired == 1, "the call has one launch"


def launches(
    call: Callable[[], object], plan: list[str]
) -> tuple[list[Launch], list[Launch]]:
    """Of a call: the launches that do its work, and those of workgroups that mostly
    find nothing to do."""
    # Outputs of a sample are undefined in part, which the checks would report; and
    # what they add is no cost of a kernel.
    with one_workspace(), simulator(sample=0, check=0):
        if len(plan) > 1:
            only_first_launch(call)
        hipsim.set_option("sample", SAMPLE)
        with flash_attn_rocm.profile() as profile:
            call()
            done = flash_attn_rocm.last_call()
    made = profile.to_dict()["launches"]
    if done is None or [launch["kernel"] for launch in made] != plan:
        raise SystemExit(f"expected launches of {plan}, got {done} and {made}")
    main = {*done.kernel.split("+")}
    useful: list[Launch] = []
    idle: list[Launch] = []
    for launch in made:
        prepares = pass_of(launch) == "prepare"
        (useful if prepares or launch["kernel"] in main else idle).append(launch)
    return useful, idle


def pass_of(launch: Launch) -> str:
    passes = {row["symbol"]: row["pass"] for row in _ops.ext.variants()}
    name: str = passes[launch["kernel"]]
    return name


def instructions(launch: Launch) -> float:
    """Wave instructions of the whole grid."""
    ran, total = launch["groups_executed"], launch["groups_total"]
    count: float = launch["wave_instructions"] * total / ran
    return count


def teraflops(products: int, problem: Problem, seconds: dict[str, float]) -> Any:
    """Low, middle and high rate of so many products, from a range of times."""
    batch, heads, length, dim = problem.q.shape
    seen = length * (length + 1) / 2 if problem.causal else length**2
    flops = 2.0 * products * batch * heads * seen * dim
    low, middle, high = (seconds[key] for key in ("low", "middle", "high"))
    return {
        "low": flops / high / 1e12,
        "middle": flops / middle / 1e12,
        "high": flops / low / 1e12,
    }


def row(problem: Problem, launch: Launch, of: str) -> dict[str, Any]:
    """The figures of a launch of the forward or the backward."""
    bounds = {bound["unit"]: bound["cycles"] for bound in launch["bounds"]}
    counters, estimate = launch["counters"], launch["estimate"]
    name = pass_of(launch)
    lds = counters["SQ_LDS_IDX_ACTIVE"]
    products = PRODUCTS.get(name)
    return {
        "kernel": launch["kernel"],
        "pass": name,
        "of": of,
        "dtype": _ops.dtype_name(problem.q.dtype),
        "head_dim": problem.q.size(3),
        "causal": problem.causal,
        "grid": launch["grid"],
        "bounds": bounds,
        "cycles": estimate["cycles"],
        "seconds": estimate["seconds"],
        "error": estimate["error"],
        "tflops": products and teraflops(products, problem, estimate["seconds"]),
        "conflict_share": counters["SQ_LDS_BANK_CONFLICT"] / lds if lds else 0.0,
        "wave_instructions": instructions(launch),
        "vgprs": launch["vgprs"],
        "lds_bytes": launch["lds_bytes"],
        "waves_per_simd": launch["waves_per_simd"],
    }


def backward_rate(problem: Problem, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rate of the whole backward in the usual count: five products."""
    keys = ("low", "middle", "high")
    seconds = {key: sum(part["seconds"][key] for part in rows) for key in keys}
    return {
        "dtype": _ops.dtype_name(problem.q.dtype),
        "head_dim": problem.q.size(3),
        "causal": problem.causal,
        "seconds": seconds,
        "tflops": teraflops(5, problem, seconds),
    }


def idle_rows(
    useful: list[Launch], idle: list[Launch], causal: bool
) -> list[dict[str, Any]]:
    """Each idle launch beside the one of the same pass that does the work."""
    working = {pass_of(launch): launch for launch in useful}
    return [
        {
            "kernel": launch["kernel"],
            "beside": working[pass_of(launch)]["kernel"],
            "causal": causal,
            "instructions": instructions(launch)
            / instructions(working[pass_of(launch)]),
            "cycles": launch["estimate"]["cycles"]["middle"]
            / working[pass_of(launch)]["estimate"]["cycles"]["middle"],
        }
        for launch in idle
    ]


def measure(
    dtype: torch.dtype, dim: int, causal: bool, length: int = LENGTH
) -> dict[str, Any]:
    """Every launch of a forward and of a backward."""
    problem = Problem(dtype, dim, length, causal, HEADS)
    made_by_torch = problem.torch_forward()
    forward, idle_forward = launches(problem.forward, problem.planned(0))
    backward, idle_backward = launches(
        lambda: problem.backward(*made_by_torch), problem.planned(EVERYTHING)
    )
    made = [row(problem, launch, "backward") for launch in backward]
    return {
        "rows": [row(problem, launch, "forward") for launch in forward] + made,
        "backward": backward_rate(problem, made),
        "idle": idle_rows(forward, idle_forward, causal)
        + idle_rows(backward, idle_backward, causal),
    }


def price_of_out_lo(dtype: torch.dtype, dim: int, length: int) -> dict[str, Any]:
    """The forward that keeps what rounding took from its results, over one that does
    not."""
    problem = Problem(dtype, dim, length, False, HEADS)
    plan = problem.planned(0)
    ((kept,), _) = launches(lambda: problem.forward(True), plan)
    ((dropped,), _) = launches(lambda: problem.forward(False), plan)
    low, high = dropped["estimate"]["cycles"], kept["estimate"]["cycles"]
    return {
        "kernel": kept["kernel"],
        "cycles": high["middle"] / low["middle"],
        "instructions": instructions(kept) / instructions(dropped),
    }


# --------------------------------------------------------------------------
# Telling


def span(values: dict[str, float]) -> str:
    return f"{values['middle']:.1f} ({values['low']:.1f} to {values['high']:.1f})"


def kernel_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| kernel | mask | "
        + " | ".join(UNITS)
        + " | estimate | TFLOPS | conflicts | wave instructions |",
        "|---" * (6 + len(UNITS)) + "|",
    ]
    for made in rows:
        cycles = {key: value / 1e3 for key, value in made["cycles"].items()}
        cells = [f"`{made['kernel']}`", MASKS[made["causal"]]]
        if made["pass"] == "prepare":  # never asks for the mask
            if made["causal"]:
                continue
            step = made["of"]
            cells = [
                f"`{made['kernel']}` of the {step}, {made['dtype']}, {made['head_dim']}"
            ]
            cells.append("")
        cells += [f"{made['bounds'][unit] / 1e3:.1f}" for unit in UNITS]
        cells += [span(cycles), span(made["tflops"]) if made["tflops"] else ""]
        cells += [f"{100 * made['conflict_share']:.1f} %"]
        cells += [f"{made['wave_instructions'] / 1e6:.2f} M"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def backward_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| backward | D | mask | microseconds | TFLOPS |", "|---" * 5 + "|"]
    for made in rows:
        micro = {key: value * 1e6 for key, value in made["seconds"].items()}
        lines.append(
            f"| {made['dtype']} | {made['head_dim']} | {MASKS[made['causal']]} "
            f"| {span(micro)} | {span(made['tflops'])} |"
        )
    return lines


def report(figures: dict[str, Any], length: int) -> str:
    kernels = figures["kernels"]
    error = max(made["error"] for made in kernels)
    lines = [
        "Simulated, never measured on a card; error bar of times "
        f"+-{100 * error:.0f} %. B = 1, H = {HEADS}, N = {length}; thousands of "
        f"cycles; {SAMPLE} workgroups of each grid ran.",
        "",
        *kernel_table(kernels),
        "",
        *backward_table(figures["backward"]),
        "",
    ]
    for made in figures["out_lo"]:
        lines.append(
            f"- `{made['kernel']}` with `out_lo` over without: cycles "
            f"{made['cycles']:.3f}, wave instructions {made['instructions']:.3f}."
        )
    for made in figures["idle"]:
        lines.append(
            f"- `{made['kernel']}` with nothing to do, over `{made['beside']}`, mask "
            f"{MASKS[made['causal']]}: cycles {made['cycles']:.4f}, wave instructions "
            f"{made['instructions']:.4f}."
        )
    if not figures["idle"]:
        lines.append("- No call of this build launches kernels that may be idle.")
    return "\n".join(lines)


def failures(kernels: list[dict[str, Any]]) -> list[str]:
    return [
        f"{made['kernel']}, mask {MASKS[made['causal']]}: "
        f"{100 * made['conflict_share']:.1f} % of the LDS cycles are conflicts, "
        f"expected at most {100 * CONFLICT_GOAL:.0f} %"
        for made in kernels
        if made["conflict_share"] > CONFLICT_GOAL
    ]


def main() -> int:
    options = options_of(__doc__, PAGE, length=LENGTH).parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"kernels": [], "backward": [], "idle": [], "out_lo": []}
    for dtype, dim in tqdm(CASES, leave=False, mininterval=1.0):
        verify(dtype, dim)
        for causal in (False, True):
            made = measure(dtype, dim, causal, options.length)
            figures["kernels"] += made["rows"]
            figures["backward"].append(made["backward"])
            figures["idle"] += made["idle"]
        if dtype is torch.float16:
            figures["out_lo"].append(price_of_out_lo(dtype, dim, options.length))
    text = report(figures, options.length)
    print(text)
    if options.write:
        write_between(PAGE, Path(__file__).name, text)
    write_json(options.json, {"bounds": figures})
    bad = failures(figures["kernels"])
    for failure in bad:
        print(failure)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
