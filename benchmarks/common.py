"""What the benchmarks share: options, attention in fp64, medians, the machine's name.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flash_attn_rocm
from flash_attn_rocm import _ops

ROOT = Path(__file__).resolve().parent.parent


def options_of(
    doc: str | None, page: Path | None = None, **numbers: int
) -> argparse.ArgumentParser:
    """A benchmark's options: whole numbers with their defaults, and what it writes.

    Args:
        doc: of the benchmark, whose first line is the description.
        page: what --write writes into; None: there is no such option.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    for name, default in numbers.items():
        text = f"default {default}"
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    if page is not None:
        parser.add_argument("--write", action="store_true", help=f"into {page.name}")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def qkv(
    heads: int, length: int, head_dim: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k, v of shape (1, heads, length, head_dim) in fp16."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 1, heads, length, head_dim)
    q, k, v = torch.randn(shape, generator=generator).half().unbind(0)
    return q, k, v


def planned(q: Tensor, k: Tensor, v: Tensor, causal: int, wanted: int) -> list[str]:
    """Kernels that the forward (nothing wanted) or the backward launches, in order."""
    sizes = [part for t in (q, k, v) for part in (tuple(t.shape), t.stride())]
    code, scale = _ops.dtype_code(q.dtype), q.size(-1) ** -0.5
    plan = _ops.ext.plan(code, 16, 16, 16, *sizes, scale, causal, wanted)
    return [symbol for symbol, _grid in plan[3]]


def attention_fp64(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v.double()


def relative_error(x: Tensor, reference: Tensor) -> float:
    """||x - reference|| / ||reference|| over the whole tensor."""
    return float((x.double() - reference).norm() / reference.norm())


def summary(values: list[float]) -> dict[str, float]:
    """Median, and the 10th and 90th percentile as the spread."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "flash_attn_rocm": flash_attn_rocm.__version__,
    }


@contextmanager
def launching_nothing() -> Iterator[None]:
    """With a driver that launches nothing: what is left of a call is the host's."""
    _ops.configure("null")
    try:
        yield
    finally:
        _ops.configure(_ops.config.device)


def print_machine() -> str:
    """The line above a table of times; returns where the ops come from."""
    source = str(flash_attn_rocm.status()["ops"])
    print(f"{machine()['cpu']}, torch {machine()['torch']}, op from {source}")
    return source


def write_between(page: Path, script: str, text: str) -> None:
    """Puts `text` between the markers of benchmarks/<script> in a page."""
    begin = f"<!-- begin: benchmarks/{script} --write -->"
    end = "<!-- end -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    after = rest.split(end, 1)[1]
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        text = json.dumps({"machine": machine(), **figures}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
