"""Worker of mutate.py: judges each site of one kernel.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import collections
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mutate import FINDINGS, REGIMES, ROOT, SITES, Regime, Site, excused, unit_of

import hipsim
from flash_attn_rocm import configure_guard

sys.path.insert(0, str(ROOT / "tests"))

from helpers.kernels import (
    FAMILIES,
    FEW_CHANNELS,
    WANT_ALL,
    WANT_DK,
    WANT_DQ,
    WANT_DV,
    Family,
    Problem,
    backward,
    forward,
    normal,
)

NOT_EXECUTED = "not executed by any regime"


def named(name: str) -> Family:
    return next(f for f in FAMILIES if f.name == name)


def families_with(symbol: str) -> tuple[list[Family], str]:
    """The families whose calls launch `symbol`, and what it does there.

    fa_prepare serves what is computed in no more than fp32, by numbers of 2 and of 4
    bytes and with more or less to find out; the head dims are such that its loop has
    several rounds. What computes 16 bits in fp32 serves strict bfloat16, what does not
    fit of bfloat16, and float16 with few channels.
    """
    if symbol == "fa_prepare":
        return [named(n) for n in ("bf16_d128", "f16_d128", "f32_d128")], "prepare"
    if symbol == "fa_prepare_f64":
        return [named("f64_d64")], "prepare"
    if symbol == "fa_prepare_exact32":
        return [named("f32_exact_d128")], "prepare"
    for family in FAMILIES:
        for role in ("forward", "keys", "queries"):
            if getattr(family, role) == symbol:
                others = ("bf16", "f16") if "exact16" in symbol else ()
                return [family, *(named(f"{n}_d{family.dim}") for n in others)], role
    raise SystemExit(f"{symbol}: not a kernel of variants.def")


def turned(t: torch.Tensor) -> torch.Tensor:
    """The same numbers with strides that allow no loads of 16 bytes."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


class Kernel:
    """One row of variants.def, with its problems and their results as shipped."""

    def __init__(self, image: bytes, name: str) -> None:
        self.name = name
        families, self.role = families_with(name)
        self.listing = hipsim.disassemble(image, name)
        self.cases = [
            (family, self._problem(family, seed, regime), regime)
            for family in families
            for seed, regime in enumerate(REGIMES)
            if "alone" not in regime.special or self.role == "keys"
        ]
        self.saved = [
            forward(p, family, with_lo="no residue" not in regime.special)
            for family, p, regime in self.cases
        ]
        self.results = [self.run(i) for i in range(len(self.cases))]
        self.executed_by = [self._executed(i) for i in range(len(self.cases))]
        self.executed = sum(self.executed_by, collections.Counter())
        # Waves, of all problems; an instruction outside of loops runs once in each.
        self.waves = sum(self.executed[end] for end in self.ends())

    def _problem(self, family: Family, seed: int, regime: Regime) -> Problem:
        _, _, length, length_k, _, narrow, special = regime
        # The bucket's own head dim with loads of 16 bytes, or one that has none.
        dim = dim_v = family.dim - 3 if narrow == "all" else family.dim
        if "smaller head dim" in special:
            dim = dim_v = family.dim - 16
        if "exact16" in self.name and family.dtype is torch.float16:
            dim = FEW_CHANNELS - 1
        form: dict[str, Any] = dict(
            heads=regime.heads,
            heads_k=regime.heads_k,
            causal=regime.causal,
            dim_v=dim_v,
            seed=seed,
        )
        if "negative scale" in special:
            form["scale"] = -(dim**-0.5)
        p = normal(family.dtype, length, length_k, dim, **form)
        if "infinite value in the last key" in special:
            p.v[:, :, -1] = torch.inf
        if "NaN value in a late key" in special:
            p.v[:, :, 150] = torch.nan
        if "log-sum-exp has a gradient" in special:
            wide = torch.promote_types(family.dtype, torch.float32)
            p.dlse = torch.ones(p.rows, dtype=wide)
        if "range beyond fp16" in special and family.dtype is not torch.float16:
            p.v[:, :, 0] *= 2.0**30  # bfloat16 goes the fp32 way
        p = p.but(q=p.q * 4)  # sharp rows: the running maximum moves
        if "huge scores" in special:
            p.q[:, :, ::3] *= 2.0**10
        names = narrow.split() if narrow != "all" else []
        return p.but(**{name: turned(getattr(p, name)) for name in names})

    def run(self, index: int) -> tuple[torch.Tensor, ...]:
        """Results of one problem; HipError or RuntimeError on a finding."""
        family, p, regime = self.cases[index]
        if self.role == "forward":
            saved = forward(p, family, with_lo="no residue" not in regime.special)
            return tuple(t for t in saved if t is not None)
        keys = (
            WANT_DK if "dK alone" in regime.special
            else WANT_DV if "dV alone" in regime.special
            else WANT_DK | WANT_DV
        )  # fmt: skip
        quick = family.dtype is not torch.bfloat16  # dQ alone needs all of it, too
        prepared = WANT_DQ if quick else WANT_ALL
        wanted = {"prepare": prepared, "keys": keys, "queries": WANT_DQ}[self.role]
        fp32 = "float32 gradients" in regime.special
        saved = self.saved[index]
        grads = backward(p, saved, family, wanted=wanted, fp32=fp32)
        return tuple(t for t in grads if t is not None)

    def same(self, index: int, result: tuple[torch.Tensor, ...]) -> bool:
        return all(
            torch.equal(
                a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
            )
            for a, b in zip(result, self.results[index])
        )

    def _executed(self, index: int) -> collections.Counter[int]:
        """How often each offset runs in one problem."""
        counts: collections.Counter[int] = collections.Counter()
        hipsim.take_profile()
        hipsim.set_option("profile", 1)
        self.run(index)
        hipsim.set_option("profile", 0)
        for launch in hipsim.take_profile()["launches"]:
            if launch["kernel"] == self.name:
                for row in launch["instructions"]:
                    counts[row["offset"]] += row["count"]
        return +counts

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


def everything(kernel: Kernel, offset: int, seeds: int) -> tuple[str, str]:
    """("", "") if all problems that execute `offset` give the shipped bits in all
    orders of the waves, else ("reported" or "changed", why)."""
    for seed in range(seeds):
        hipsim.set_option("seed", seed)
        for index, (family, _, regime) in enumerate(kernel.cases):
            if offset not in kernel.executed_by[index]:
                continue
            try:
                result = kernel.run(index)
            except RuntimeError as error:
                report = str(error).splitlines()[0]
                kind = FINDINGS.search(report)
                return ("reported", kind[1]) if kind else ("other error", report)
            except AssertionError as error:  # a canary beside an output
                return "changed", str(error)
            if not kernel.same(index, result):
                return "changed", f"{family.name}, {regime}, seed {seed}"
    return "", ""


def judge(kernel: Kernel, site: Site, seeds: int) -> None:
    """Fills in the site's outcome."""
    if site.offset not in kernel.executed:
        padding = site.offset > max(kernel.ends()) and site.text.startswith("s_nop")
        site.outcome = "never runs" if padding else NOT_EXECUTED
        return
    hipsim.set_option("skip", site.offset)
    orders = seeds if site.text.startswith("s_barrier") else 1  # others act in one wave
    site.outcome, site.detail = everything(kernel, site.offset, orders)
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
    outcome, _ = everything(kernel, site.offset, 1)
    hipsim.set_option("probe", -1)
    site.outcome = "satisfied" if not outcome else "covered"


def main() -> int:
    folder, seeds, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    file = folder / unit_of(name)
    facts = {k["name"]: k for k in hipsim.object_info(file)["kernels"]}
    configure_guard("off")  # a mutant that fails must not stop the next
    hipsim.set_option("check", 2)
    hipsim.set_option("threads", 1)
    # The other kernels of a call have other instructions at these offsets.
    hipsim.set_option("mutated", facts[name]["code_bytes"])
    kernel = Kernel(file.read_bytes(), name)
    hipsim.set_option("seed", 0)
    sites = list(kernel.sites())
    for site in sites:
        judge(kernel, site, seeds)
    unreached = [site for site in sites if site.outcome == NOT_EXECUTED]
    if len(unreached) <= excused(name):
        for site in unreached:
            site.outcome = "no call"
    json.dump([dataclasses.asdict(site) for site in sites], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
