"""Attention's memory grows with the length, and holds nothing that it does not need.

Bytes are those that torch's allocator hands out while the code runs, see
examples/attention_memory.py.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import importlib

import pytest
import torch
from helpers import ROOT, needs_simulator

import flash_attn_rocm as fa

pytestmark = needs_simulator

HEADS = 8


@pytest.fixture
def memory(monkeypatch):
    """benchmarks/memory.py, with few channels so that long sequences stay cheap."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    module = importlib.import_module("memory")
    monkeypatch.setattr(module, "HEAD_DIM", 16)
    return module


@pytest.mark.parametrize("heads_k", [HEADS, 2, 1])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_memory_is_what_results_and_gradients_take(memory, dtype, heads_k):
    series = memory.Series(dtype, getattr(torch, dtype), heads_k)
    assert memory.check(series, [256, 512, 1024], HEADS)[1] == []


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_memory_is_linear_in_the_length_to_65536(memory, dtype):
    series = memory.Series(dtype, getattr(torch, dtype), 2)
    lengths = [2048, 4096, 32768, 65536]
    assert memory.check(series, lengths, HEADS)[1] == []


def test_kernels_that_run_take_the_memory_that_is_counted_without_them(memory):
    series = memory.Series("fp16", torch.float16, 2)
    with fa.patched(), fa.simulate("gfx906"):
        simulated = memory.measure(series, 192, HEADS)
        assert fa.last_call().backend == "sim"
    assert simulated == memory.measure_fused(series, 192, HEADS)


def test_math_path_is_found_to_be_quadratic(memory):
    peaks = memory.measure_math(4096)
    limits = {n: memory.allowed(memory.MATH, n) for n in peaks}
    assert len(memory.failures("math", peaks, limits)) == len(peaks) + 1
    # What is computed beyond the measured lengths agrees with a measured one.
    known = {n: peak for n, peak in peaks.items() if n < 4096}
    with memory.sdpa_kernel(memory.SDPBackend.MATH):
        known[1024] = memory.measure(memory.MATH, 1024)
    computed = memory.quadratic(known, 4096)
    assert computed == pytest.approx(peaks[4096], rel=0.02)  # seen: 1e-4


def wrap(monkeypatch, name, wrapper):
    """An op of the package goes through wrapper(op, *its arguments)."""
    from flash_attn_rocm import _ops

    op = getattr(_ops, name)
    monkeypatch.setattr(_ops, name, lambda *given: wrapper(op, *given))


def expanded(q, *tensors):
    return (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in tensors)


def expand_forward(op, q, k, v, *rest):
    return op(q, *expanded(q, k, v), *rest)


def expand_backward(op, dout, dlse, q, k, v, *rest):
    dq, dk, dv, *others = op(dout, dlse, q, *expanded(q, k, v), *rest)
    dk, dv = (t.unflatten(1, (k.size(1), -1)).sum(2) for t in (dk, dv))
    return dq, dk, dv, *others


def scores_in_forward(op, q, k, *rest):
    held = q.new_empty(*q.shape[:3], k.size(2))
    results = op(q, k, *rest)
    del held
    return results


@pytest.mark.parametrize(
    ("name", "wrapper"), [("op", expand_forward), ("backward_op", expand_backward)]
)
def test_expanded_key_heads_are_noticed(memory, monkeypatch, name, wrapper):
    wrap(monkeypatch, name, wrapper)
    series = memory.Series("fp16", torch.float16, 1)
    found = memory.check(series, [256, 512], HEADS)[1]
    assert len(found) >= 2 and all("expected at most" in line for line in found)


def test_scores_that_are_held_in_the_forward_are_noticed(memory, monkeypatch):
    wrap(monkeypatch, "op", scores_in_forward)
    series = memory.Series("fp16", torch.float16, 1)
    found = memory.check(series, [512, 1024], HEADS)[1]
    assert any("expected at most twice" in line for line in found)
