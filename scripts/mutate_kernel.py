"""Worker of mutate.py: judges each site of one kernel.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from mutate import FINDINGS, HEAD_DIMS, REGIMES, SITES, Site

import hipsim
from flash_attn_rocm import _ops


class Kernel:
    """One row of variants.def, with its problems and their results as shipped."""

    def __init__(self, image: bytes, name: str) -> None:
        self.name = name
        self.dims = HEAD_DIMS[name.removeprefix("fa_fwd_f16_")]
        self.listing = hipsim.disassemble(image, name)
        self.problems = [self._problem(i, *r) for i, r in enumerate(REGIMES)]
        self.results = [self.run(i) for i in range(len(self.problems))]
        self.executed = self._executed()

    def _problem(self, seed, heads, heads_k, length, length_k, causal, dim, data):
        generator = torch.Generator().manual_seed(seed)
        shapes = ((heads, length), (heads_k, length_k), (heads_k, length_k))
        q, k, v = (
            torch.randn(1, h, s, self.dims[dim], generator=generator).half()
            for h, s in shapes
        )
        scale = self.dims[dim] ** -0.5
        if data == "negative scale":
            scale = -scale
        elif data == "infinite value in the last key":
            v[:, :, -1] = torch.inf
        elif data == "NaN value in a late key":
            v[:, :, 150] = torch.nan
        else:
            assert not data, data
        return q * 4, k, v, scale, causal  # sharp rows: the running maximum moves

    def run(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of one problem; HipError or RuntimeError on a finding."""
        q, k, v, scale, causal = self.problems[index]
        out = torch.full_like(q, 7.0)
        lse = torch.full(q.shape[:3], 7.0)
        sizes = [part for t in (q, k, v) for part in (tuple(t.shape), t.stride())]
        _ops.ext.forward(
            *(0, 0, 0, "gfx906", _ops.dtype_code(q.dtype)),
            *(t.data_ptr() for t in (q, k, v, out, lse)),
            *sizes,
            out.stride(),
            scale,
            causal,
        )
        return out, lse

    def same(self, index: int, result: tuple[torch.Tensor, torch.Tensor]) -> bool:
        return all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(result, self.results[index])
        )

    def _executed(self) -> dict[int, int]:
        """How often each offset runs over all problems."""
        counts: dict[int, int] = {}
        hipsim.take_profile()
        hipsim.set_option("profile", 1)
        for index in range(len(self.problems)):
            self.run(index)
        hipsim.set_option("profile", 0)
        for launch in hipsim.take_profile()["launches"]:
            assert launch["kernel"] == self.name, launch["kernel"]
            for row in launch["instructions"]:
                counts[row["offset"]] = counts.get(row["offset"], 0) + row["count"]
        return counts

    def sites(self) -> Iterator[Site]:
        for line in self.listing.splitlines():
            match = SITES.match(line)
            if match:
                yield Site(int(match[1], 16), match[2].strip())


def everything(kernel: Kernel, seeds: int) -> tuple[str, str]:
    """("", "") if all problems give the shipped bits in all orders of the waves, else
    ("reported" or "changed", why)."""
    for seed in range(seeds):
        hipsim.set_option("seed", seed)
        for index in range(len(kernel.problems)):
            try:
                result = kernel.run(index)
            except RuntimeError as error:
                report = str(error).splitlines()[0]
                kind = FINDINGS.search(report)
                return ("reported", kind[1]) if kind else ("other error", report)
            if not kernel.same(index, result):
                return "changed", f"regime {REGIMES[index]}, seed {seed}"
    return "", ""


def judge(kernel: Kernel, site: Site, seeds: int) -> None:
    """Fills in the site's outcome."""
    if site.offset not in kernel.executed:
        ends = [
            int(line.split(":")[0], 16)
            for line in kernel.listing.splitlines()
            if "s_endpgm" in line
        ]
        padding = site.offset > max(ends) and site.text.startswith("s_nop")
        site.outcome = "never runs" if padding else "not executed by any regime"
        return
    hipsim.set_option("skip", site.offset)
    site.outcome, site.detail = everything(kernel, seeds)
    hipsim.set_option("skip", -1)
    if site.outcome or site.text.startswith("s_barrier"):
        site.outcome = site.outcome or "barrier that nothing needs"
        return
    if site.text.startswith("s_nop"):
        site.outcome = "satisfied"
        return
    hipsim.set_option("probe", site.offset)
    outcome, _ = everything(kernel, seeds)
    hipsim.set_option("probe", -1)
    site.outcome = "satisfied" if not outcome else "has an effect, not reported"


def main() -> int:
    folder, seeds, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    image = (folder / "fa_gfx906.co").read_bytes()
    hipsim.set_option("check", 2)
    hipsim.set_option("threads", 1)
    kernel = Kernel(image, name)
    hipsim.set_option("seed", 0)
    sites = list(kernel.sites())
    for site in sites:
        judge(kernel, site, seeds)
    json.dump([dataclasses.asdict(site) for site in sites], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
