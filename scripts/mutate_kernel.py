"""Worker of mutate.py: judges each site of one kernel.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mutate import FINDINGS, REGIMES, ROOT, SITES, Site, unit_of

import hipsim

sys.path.insert(0, str(ROOT / "tests"))

from helpers.kernels import (
    FAMILIES,
    WANT_ALL,
    WANT_DQ,
    Family,
    Problem,
    backward,
    forward,
    normal,
)

WANT_KV = WANT_ALL - WANT_DQ


def family_with(symbol: str) -> tuple[Family, str]:
    """The kernels that `symbol` is one of, and what it does there.

    Of the families that share fa_prepare the one whose plan asks most of it: bfloat16
    in fp16's range, with scales and blocks of all four tensors.
    """
    if symbol == "fa_prepare":
        return next(f for f in FAMILIES if f.name == "bf16_d64"), "prepare"
    if symbol == "fa_prepare_f64":
        return next(f for f in FAMILIES if f.name == "f64_d32"), "prepare"
    for family in FAMILIES:
        for role in ("forward", "keys", "queries"):
            if getattr(family, role) == symbol:
                return family, role
    raise SystemExit(f"{symbol}: not a kernel of variants.def")


class Kernel:
    """One row of variants.def, with its problems and their results as shipped."""

    def __init__(self, image: bytes, name: str) -> None:
        self.name = name
        self.family, self.role = family_with(name)
        self.listing = hipsim.disassemble(image, name)
        self.problems = [self._problem(i, *r) for i, r in enumerate(REGIMES)]
        self.saved = [forward(p, self.family) for p in self.problems]
        self.results = [self.run(i) for i in range(len(self.problems))]
        self.executed = self._executed()
        # Waves, of all problems; an instruction outside of loops runs once in each.
        self.waves = sum(self.executed.get(end, 0) for end in self.ends())

    def _problem(
        self,
        seed: int,
        heads: int,
        heads_k: int,
        length: int,
        length_k: int,
        causal: int,
        aligned: int,
        data: str,
    ) -> Problem:
        # The bucket's own head dim with loads of 16 bytes, or one that has none.
        dim = self.family.dim if aligned else self.family.dim - 3
        form: dict[str, Any] = dict(heads=heads, heads_k=heads_k, causal=causal)
        if "negative scale" in data:
            form["scale"] = -(dim**-0.5)
        p = normal(self.family.dtype, length, length_k, dim, seed=seed, **form)
        if data == "infinite value in the last key":
            p.v[:, :, -1] = torch.inf
        elif data == "NaN value in a late key":
            p.v[:, :, 150] = torch.nan
        elif data == "log-sum-exp has a gradient":
            wide = torch.promote_types(self.family.dtype, torch.float32)
            p.dlse = torch.ones(p.rows, dtype=wide)
        elif data == "range beyond fp16":
            p.v[:, :, 0] *= 2.0**30  # bfloat16 goes the fp32 way
        else:
            assert not data or "float32 gradients" in data, data
        return p.but(q=p.q * 4)  # sharp rows: the running maximum moves

    def run(self, index: int) -> tuple[torch.Tensor, ...]:
        """Results of one problem; HipError or RuntimeError on a finding."""
        p = self.problems[index]
        if self.role == "forward":
            saved = forward(p, self.family)
            return tuple(t for t in saved if t is not None)
        wanted = {"prepare": WANT_ALL, "keys": WANT_KV, "queries": WANT_DQ}[self.role]
        fp32 = "float32 gradients" in REGIMES[index][-1]
        saved = self.saved[index]
        grads = backward(p, saved, self.family, wanted=wanted, fp32=fp32)
        return tuple(t for t in grads if t is not None)

    def same(self, index: int, result: tuple[torch.Tensor, ...]) -> bool:
        return all(
            torch.equal(
                a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
            )
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
            if launch["kernel"] == self.name:
                for row in launch["instructions"]:
                    counts[row["offset"]] = counts.get(row["offset"], 0) + row["count"]
        return counts

    def ends(self) -> list[int]:
        """Offsets of the instructions that end a wave."""
        return [
            int(line.split(":")[0], 16)
            for line in self.listing.splitlines()
            if "s_endpgm" in line
        ]

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
            except AssertionError as error:  # a canary beside an output
                return "changed", str(error)
            if not kernel.same(index, result):
                return "changed", f"regime {REGIMES[index]}, seed {seed}"
    return "", ""


def judge(kernel: Kernel, site: Site, seeds: int) -> None:
    """Fills in the site's outcome."""
    if site.offset not in kernel.executed:
        padding = site.offset > max(kernel.ends()) and site.text.startswith("s_nop")
        site.outcome = "never runs" if padding else "not executed by any regime"
        return
    hipsim.set_option("skip", site.offset)
    site.outcome, site.detail = everything(kernel, seeds)
    hipsim.set_option("skip", -1)
    if site.outcome:
        return
    if site.text.startswith("s_barrier"):
        once = kernel.executed[site.offset] <= kernel.waves
        site.outcome = "once" if once else "barrier that nothing needs"
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
    file = folder / unit_of(name)
    facts = {k["name"]: k for k in hipsim.object_info(file)["kernels"]}
    hipsim.set_option("check", 2)
    hipsim.set_option("threads", 1)
    # The other kernels of a call have other instructions at these offsets.
    hipsim.set_option("mutated", facts[name]["code_bytes"])
    kernel = Kernel(file.read_bytes(), name)
    hipsim.set_option("seed", 0)
    sites = list(kernel.sites())
    for site in sites:
        judge(kernel, site, seeds)
    json.dump([dataclasses.asdict(site) for site in sites], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
