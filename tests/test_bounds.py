"""What the kernels cost by the simulator's counters (benchmarks/bounds.py).

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import importlib

import pytest
import torch
from helpers import ROOT, needs_simulator

import flash_attn_rocm as fa
from flash_attn_rocm import _ops

pytestmark = needs_simulator

PASSES = ["forward", "prepare", "backward_q", "prepare", "backward_kv"]


@pytest.fixture
def bounds(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bounds")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_bank_conflicts_take_at_most_15_percent_of_lds_cycles(bounds, dim, causal):
    made = bounds.measure(torch.float16, dim, causal, length=512)
    rows = made["rows"]
    assert [row["pass"] for row in rows] == PASSES
    assert bounds.failures(rows) == []  # seen: 2.1 % at most
    for at, row in enumerate(rows):
        counts = PASSES.index("backward_q") + 1 != at  # delta is corrected without
        assert (row["bounds"]["LDS"] > 0) == counts, "LDS cycles of another number"
        low, middle, high = (row["cycles"][key] for key in ("low", "middle", "high"))
        assert max(row["bounds"].values()) <= low <= middle <= high


def test_too_many_bank_conflicts_are_reported(bounds):
    made = {"kernel": "fa_slow", "causal": True, "conflict_share": 0.2}
    (line,) = bounds.failures([made, {**made, "conflict_share": 0.15}])
    assert line.startswith("fa_slow, mask causal: 20.0 %")


@pytest.mark.parametrize("dim", [64, 128])
def test_keeping_the_exact_output_costs_the_forward_at_most_3_percent(bounds, dim):
    price = bounds.price_of_out_lo(torch.float16, dim, 1024)
    assert 1 < price["cycles"] < 1.03  # seen: 1.004
    assert 1 < price["instructions"] < 1.03  # seen: 1.006


def test_sample_of_a_causal_grid_stands_for_the_whole(bounds):
    problem = bounds.Problem(torch.float16, 64, bounds.LENGTH, True, bounds.HEADS)
    ((launch,), _) = bounds.launches(problem.forward, problem.planned(0))
    with bounds.simulator(sample=0, check=0):
        problem.forward()
    counted = fa.last_call().counters["wave_instructions"]
    assert bounds.instructions(launch) == pytest.approx(counted, rel=0.01)


def test_exact_kernels_behind_bfloat16_leave_at_once(bounds):
    idle = bounds.measure(torch.bfloat16, 64, False, length=512)["idle"]
    fast = [
        row
        for row in _ops.ext.variants()
        if row["arith"] == "float16" and "bfloat16" in row["reads"]
    ]
    assert bool(idle) == bool(fast)
    if not fast:
        pytest.skip("no row of variants.def takes bfloat16 through fp16")
    assert [row["beside"].split("_bf16")[0] for row in idle] == [
        "fa_fwd",
        "fa_bwd_q",
        "fa_bwd_kv",
    ]
    for row in idle:
        assert row["instructions"] < 0.02, row  # seen: 0.016 at 512 rows


def test_idle_launches_are_told_apart_by_pass(bounds):
    def launch(kernel, count):
        return {
            "kernel": kernel,
            "wave_instructions": count,
            "groups_executed": 2,
            "groups_total": 4,
            "estimate": {"cycles": {"middle": count}},
        }

    useful = [launch("fa_prepare", 1), launch("fa_fwd_f16_d64_plain", 1000)]
    idle = [launch("fa_fwd_f32_d64_plain", 5)]
    (row,) = bounds.idle_rows(useful, idle, False)
    assert row["beside"] == "fa_fwd_f16_d64_plain"
    assert row["instructions"] == row["cycles"] == 0.005


def test_results_are_verified_before_anything_is_counted(bounds, monkeypatch):
    bounds.verify(torch.float16, 64)
    monkeypatch.setitem(bounds.ERROR_BOUNDS, torch.float16, 1e-6)
    with pytest.raises(SystemExit, match="error of out"):
        bounds.verify(torch.float16, 64)
