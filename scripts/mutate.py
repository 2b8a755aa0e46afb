"""Is every wait, barrier and s_nop of the shipped kernels needed, and seen?

For each s_waitcnt, s_barrier and s_nop of a sample of the gfx906 kernels, in the
objects of each compiler at hand: leave it out and run the kernel at check level 2 over
all regimes. The sample (KERNELS) has every template in each of its forms; the head dims
that it leaves out differ in trip counts alone. --kernel judges any other.
Either a run reports it, or the instruction is shown to be redundant there:

  satisfied    a wait that never had anything to wait for but stores: to the outputs,
               which the launch may not read, or to LDS, where a wave's own accesses
               keep their order (for other waves' it is reported as a race); an s_nop
               without which every rule still holds, in any execution
  covered      a wait for what the wave waits for again before anything uses it:
               compilers wait where the ends of branches meet that exclude each other
               (loads of 16 bytes, and of one element), and for everything at barriers
  once         a barrier before the first step or after the last, in code that is
               shared: another head dim needs it, or more is asked of another tensor
  never runs   padding behind the end of the code
  no call      code that no call reaches, for a reason in NO_CALL

each over all waves, every regime (three and more steps among them, and each pair of
tensors with either kind of loads) and, for barriers, several orders of the waves, with
the same bits as the kernel as it is. A removal that changes the result without a
report, or that is none of these, fails: exit code 1.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from build_support.products import KERNELS as SOURCES  # noqa: E402
from build_support.products import variants  # noqa: E402

BUILD = ROOT / "build" / "mutate"
COMPILERS = ("clang-22", "clang-15")
SEEDS = 3  # orders of the waves for barriers; others act in one wave
SITES = re.compile(r"\s*([0-9a-f]+):\s+((s_waitcnt|s_barrier|s_nop)\b.*)")
FINDINGS = re.compile(
    r": (undefined value|missing s_waitcnt|missing wait states|race in LDS"
    r"|race between workgroups|barrier divergence|access outside|illegal address"
    r"|LDS access out of range) "
)


class Regime(NamedTuple):
    """A problem that each kernel runs, as far as it means anything to it."""

    heads: int
    heads_k: int
    queries: int
    keys: int
    causal: int  # 0 none, 1 top-left, 2 bottom-right
    # Tensors without loads of 16 bytes: "" none, "all" by their head dim, or names,
    # by their strides.
    narrow: str = ""
    special: str = ""  # see Kernel._problem and Kernel.run


# Keys and queries cover a tile of either pass and a part of the next. Tensors of both
# kinds meet because each kernel fetches the next one while it works on the last.
REGIMES = [
    Regime(2, 1, 133, 197, 0),
    Regime(1, 1, 133, 197, 1, "", "range beyond fp16"),
    Regime(1, 1, 37, 260, 2, "all", "infinite value in the last key"),
    Regime(1, 1, 128, 192, 0, "all", "negative scale, float32 gradients"),
    Regime(1, 1, 70, 200, 1, "all", "NaN value in a late key"),
    Regime(1, 1, 1, 1, 0, "", "log-sum-exp has a gradient"),
    Regime(1, 1, 150, 10, 2, "", "float32 gradients, smaller head dim"),
    Regime(1, 1, 70, 133, 1, "q dout", "huge scores, no residue"),
    Regime(2, 1, 133, 70, 1, "k v", "range beyond fp16"),
    Regime(1, 1, 133, 197, 2, "k dout"),
    Regime(2, 1, 70, 133, 0, "q v", "log-sum-exp has a gradient"),
    Regime(1, 1, 40, 70, 0, "all", "log-sum-exp has a gradient, no residue"),
    Regime(1, 1, 133, 197, 1, "", "huge scores"),
    Regime(2, 1, 133, 70, 0, "", "dK alone"),
    Regime(2, 1, 133, 70, 0, "all", "dK alone"),
    Regime(2, 1, 133, 70, 0, "", "dV alone"),
    Regime(2, 1, 133, 70, 0, "all", "dV alone"),
]
# Each template of csrc/kernels in each of its forms, by what its code depends on: the
# numbers (fp16 pairs, bfloat16 scaled to them or expanded, fp32, fp64), and whether
# owned rows stay in LDS or are streamed.
KERNELS = [
    *("fa_prepare", "fa_prepare_f64", "fa_prepare_exact32"),
    *("fa_fwd_f16_d64_plain", "fa_bwd_kv_f16_d64_plain", "fa_bwd_q_f16_d64_plain"),
    *("fa_fwd_f16_d128_plain", "fa_bwd_kv_f16_d128_plain", "fa_bwd_q_f16_d128_plain"),
    *("fa_fwd_bf16_d64_plain", "fa_bwd_kv_bf16_d64_plain", "fa_bwd_q_bf16_d64_plain"),
    *("fa_fwd_f32_d32_plain", "fa_bwd_kv_f32_d32_plain", "fa_bwd_q_f32_d32_plain"),
    *("fa_fwd_exact16_d64_plain", "fa_bwd_kv_exact16_d64_plain"),
    *("fa_bwd_q_exact16_d64_plain", "fa_bwd_kv_f32_d64_plain"),
    *("fa_fwd_f64_d32_plain", "fa_bwd_kv_f64_d32_plain", "fa_bwd_q_f64_d32_plain"),
    *("fa_fwd_exact32_d64_full", "fa_bwd_kv_exact32_d64_full"),
    "fa_bwd_q_exact32_d64_full",
]
# What else there is code for: (symbols, regular expression; how many sites at most; why
# no call reaches them).
NO_CALL: list[tuple[str, int, str]] = [
    (r"fa_fwd_exact16_\w+", 4, "O is stored in 16 bits, as q is, never in fp32"),
    (
        r"fa_bwd_(kv|q)_exact16_\w+",
        8,
        "fp16 comes here with fewer than 8 channels of q and k, so without loads and "
        "stores of 16 bytes; bfloat16 shares the code and has them",
    ),
    (r"fa_(prepare|bwd_(kv|q))\w*", 1, "around a loop over the head dim: one below 1"),
]
KNOWN = ("reported", "satisfied", "covered", "once", "no call", "never runs")


def unit_of(symbol: str) -> str:
    """The name of the code object that holds a kernel."""
    (unit,) = (row.unit for row in variants(SOURCES) if row.symbol == symbol)
    return f"fa_gfx906_{unit}.co"


@dataclasses.dataclass
class Site:
    offset: int
    text: str
    outcome: str = ""  # one of KNOWN, or a failure
    detail: str = ""


def build(compiler: str) -> Path | None:
    """The folder of this compiler's object; None if it is not installed."""
    folder = BUILD / compiler
    command = [sys.executable, "-m", "build_support.code_objects"]
    result = subprocess.run(
        [*command, "--archs", "gfx906", "--out", str(folder)],
        env={**os.environ, "FA_CLANG": compiler},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode == 2:
        print(f"{compiler}: left out: {result.stderr.strip().splitlines()[-1]}")
        return None
    if result.returncode != 0:
        raise SystemExit(f"{compiler}: {result.stderr}")
    return folder


def judge(folder: Path, kernel: str, seeds: int) -> list[dict[str, Any]]:
    """What became of each site of one kernel, found out by a process of its own."""
    worker = subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts" / "mutate_kernel.py")),
            *(str(folder), str(seeds), kernel),
        ],
        env={
            **os.environ,
            "FLASH_ATTN_ROCM_CODE_DIR": str(folder),
            "FLASH_ATTN_ROCM_DEVICE": "sim",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if worker.returncode != 0:
        raise SystemExit(f"{folder.name} {kernel}:\n{worker.stderr}")
    sites: list[dict[str, Any]] = json.loads(worker.stdout)
    return sites


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--compiler", action="append", help="default: clang-22, -15")
    parser.add_argument("--kernel", action="append", help="instead of the sample")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default {SEEDS}")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "mutation.json")
    options = parser.parse_args()
    tasks = []
    for compiler in options.compiler or COMPILERS:
        folder = build(compiler)
        if folder is not None:
            tasks += [(compiler, folder, k) for k in options.kernel or KERNELS]
    if not tasks:
        print("no compiler: nothing judged", file=sys.stderr)
        return 1
    results: dict[str, Any] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {pool.submit(judge, f, k, options.seeds): (c, k) for c, f, k in tasks}
        progress = tqdm.tqdm(as_completed(futures), total=len(tasks), disable=None)
        done = {futures[future]: future.result() for future in progress}
    for compiler, _, kernel in tasks:
        results.setdefault(compiler, {})[kernel] = done[compiler, kernel]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))
    return summarise(results)


def excused(kernel: str) -> int:
    """How many sites of a kernel may be left without any call that reaches them."""
    return sum(most for symbols, most, _ in NO_CALL if re.fullmatch(symbols, kernel))


def summarise(results: dict[str, Any]) -> int:
    """Prints the score and what is not explained; the exit code."""
    unexplained = 0
    heads = "".join(f" {word:>10}" for word in (*KNOWN, "unknown"))
    print(f"{'compiler':10} {'kernel':32} {'sites':>5}{heads}")
    for compiler, kernels in results.items():
        for kernel, sites in kernels.items():
            count = collections.Counter(site["outcome"] for site in sites)
            rest = len(sites) - sum(count[word] for word in KNOWN)
            unexplained += rest
            row = "".join(f" {n:10}" for n in (*(count[word] for word in KNOWN), rest))
            print(f"{compiler:10} {kernel:32} {len(sites):5}{row}")
            for site in sites:
                if site["outcome"] not in KNOWN:
                    print(f"  {site['offset']:#x} {site['text']}: {site['outcome']}: "
                          f"{site['detail']}")  # fmt: skip
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
