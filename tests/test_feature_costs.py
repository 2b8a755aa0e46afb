"""What features cost, by the simulator's counters (benchmarks/features.py).

SPDX-License-Identifier: BSD-3-Clause
"""

import importlib

import pytest
import torch
from helpers import ROOT, TOP_LEFT, needs_simulator
from helpers.features import block_lists, forward, problem, simulating
from helpers.kernels import DEVICE

import flash_attn_rocm as fa
import hipsim

pytestmark = [
    needs_simulator,
    pytest.mark.skipif(DEVICE != "cpu", reason="the simulator counts instructions"),
]


@pytest.fixture
def features(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("features")


def test_each_feature_costs_the_forward_no_more_than_its_goal(features):
    rows = features.collect(1024, backward=False)
    assert features.failures(rows) == []
    unused = next(row for row in rows if row["name"].startswith("blocks"))
    assert unused["valu"]["forward"] <= 1.02


def test_a_feature_that_costs_too_much_is_reported(features):
    row = {"name": "slow", "goal": 1.05, "valu": {"forward": 1.06}}
    (line,) = features.failures([row, {**row, "goal": 1.07}, {**row, "goal": None}])
    assert line.startswith("slow: 1.060 times") and line.endswith("at most 1.05")


@pytest.mark.parametrize("name", ["plain", "bias", "sink", "softcap", "dropout"])
def test_the_benchmark_sees_a_wrong_result(features, name):
    case = next(c for c in features.cases(128) if c.name == name)
    tensors = features.Problem(128)
    with features.simulator(sample=0, check=0):
        out, lse, out_lo = tensors.forward(case)
    tensors.verify(case, (out, lse, out_lo))
    with pytest.raises(SystemExit, match=name):
        tensors.verify(case, (out, lse + 1e-3, out_lo))
    if name != "dropout":
        with pytest.raises(SystemExit, match=name):
            tensors.verify(case, (out * 1.01, lse, out_lo))


def make(length, **features):
    return problem(torch.float16, length, length, 64, **features)


def instructions(p):
    """Wave instructions of a forward at check level 0."""
    before = hipsim.get_option("check")
    hipsim.set_option("check", 0)
    try:
        with simulating():
            forward(p, needs_grad=False)
        return fa.last_call().counters["wave_instructions"]
    finally:
        hipsim.set_option("check", before)


def test_causal_costs_at_most_three_fifths():
    p = make(1024)
    # Observed: 0.55.
    assert instructions(p.but(causal=TOP_LEFT)) <= 0.6 * instructions(p)


@pytest.mark.parametrize("sink_keys", [0, 4])
def test_the_cost_of_a_window_grows_with_the_length_not_its_square(sink_keys):
    def cost(length):
        p = make(length, causal=TOP_LEFT, window_left=128)
        return instructions(p.but(sink_keys=sink_keys))

    short, long = cost(1024), cost(2048)
    assert 1.8 * short <= long <= 2.2 * short
    # A wider window costs what it sees more.
    plain = make(2048, causal=TOP_LEFT)
    assert long <= 0.35 * instructions(plain)


def test_blocks_that_are_not_listed_cost_nothing():
    dense = torch.eye(8, dtype=torch.bool)[None, None]
    p = make(1024, block_q=128, block_k=128)
    every = p.but(**block_lists(torch.ones_like(dense)))
    assert instructions(p.but(**block_lists(dense))) <= 0.25 * instructions(every)
