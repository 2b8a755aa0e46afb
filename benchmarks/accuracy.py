"""How exact every kernel is, beside PyTorch's math path in the same dtype.

Each row of variants.def runs on the simulated gfx906 over the regimes below, on
seeded normal data.  Output: relative error in the Frobenius norm against fp64, in
units of the math path's error (the contract allows 2), and the largest single
error.  LSE: error in units of its bound.

    python benchmarks/accuracy.py            print the table
    python benchmarks/accuracy.py --write    and put it into docs/accuracy.md

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import ROOT, machine, relative_error, write_json
from tqdm import tqdm

sys.path.insert(0, str(ROOT / "tests"))

from helpers import (
    BOTTOM_RIGHT,
    NONE,
    TOP_LEFT,
    fp64_attention,
    lse_bound,
    math_attention,
    run_forward,
)

from flash_attn_rocm import last_call
from flash_attn_rocm._ops import ext

PAGE = ROOT / "docs" / "accuracy.md"
BEGIN = "<!-- begin: benchmarks/accuracy.py --write -->"
END = "<!-- end -->"


class Regime(NamedTuple):
    name: str
    length: int
    length_k: int
    causal: int = NONE
    spread: float = 1.0  # standard deviation of q: 8 makes scores huge


REGIMES = [
    Regime("two tiles and more", 200, 333),
    Regime("causal, top left", 192, 192, TOP_LEFT),
    Regime("causal, bottom right", 100, 260, BOTTOM_RIGHT),
    Regime("huge scores", 128, 256, NONE, 8.0),
    Regime("one query", 1, 300),
]


def measure(variant: dict[str, Any], regime: Regime) -> dict[str, Any]:
    """One kernel in one regime; two query heads share a key head."""
    dim = variant["dim"]
    if "narrow" in variant["symbol"]:
        dim -= 3  # rows that 16-byte loads cannot serve
    generator = torch.Generator().manual_seed(dim + regime.length)
    q = torch.randn(1, 2, regime.length, dim, generator=generator)
    k, v = torch.randn(2, 1, 1, regime.length_k, dim, generator=generator)
    q, k, v = (q * regime.spread).half(), k.half(), v.half()
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32)
    run_forward(q, k, v, out, lse, causal=regime.causal)
    call = last_call()
    if call is None or call.kernel != variant["symbol"]:
        raise SystemExit(f"expected {variant['symbol']} to run, got {call}")
    reference, reference_lse = fp64_attention(q, k, v, causal=regime.causal)
    stock = math_attention(q, k, v, causal=regime.causal)
    bound = lse_bound(q, k, reference_lse)
    ours, math_path = (relative_error(x, reference) for x in (out, stock))
    return {
        "kernel": variant["symbol"],
        "regime": regime.name,
        "error": ours,
        "math_error": math_path,
        "ratio": ours / math_path,
        "largest": float((out.double() - reference).abs().max()),
        "lse_over_bound": float(((lse.double() - reference_lse).abs() / bound).max()),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| kernel | regime | error | math path | ratio | largest | LSE / bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| `{row['kernel']}` | {row['regime']} | {row['error']:.2e} "
            f"| {row['math_error']:.2e} | {row['ratio']:.2f} | {row['largest']:.1e} "
            f"| {row['lse_over_bound']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    cases = [(variant, regime) for variant in ext.variants() for regime in REGIMES]
    rows = [measure(*case) for case in tqdm(cases, leave=False, mininterval=1.0)]
    text = table(rows)
    print(text)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        after = rest.split(END, 1)[1]
        note = f"Simulated gfx906, torch {machine()['torch']}."
        PAGE.write_text(
            f"{before}{BEGIN}\n{text}\n\n{note}\n{END}{after}", encoding="utf-8"
        )
    write_json(options.json, {"accuracy": rows})
    bad = [row for row in rows if row["ratio"] > 2 or row["lse_over_bound"] > 1]
    for row in bad:
        print(f"outside the contract: {row['kernel']}, {row['regime']}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
