"""A status with every field that the guard adds, and counters that grow.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest

from flash_attn_rocm import _metrics

STATUS = {
    "version": "0.1.0",
    "torch": "2.13.0",
    "hip": None,
    "patched": True,
    "device": "auto",
    "ops": "c",
    "enabled": True,
    "guard": {
        "mode": "async",
        "deadline_factor": 50.0,
        "deadline_floor_ms": 2000.0,
        "on_hang": "report",
        "cooldown_s": 60.0,
        "misses": 2,
        "captured": 3,
        "unwatched": 1,
        "outstanding": 4,
        "quarantined": 5,
        "state_dir": None,
        "complaints": [],
    },
    "breakers": [
        {
            "device": "hip:0",
            "kernel": "fa_bwd_q_f16_d64_plain",
            "state": "open",
            "failures": 2,
            "retry_in_s": 61.5,
            "cause": 'deadline "2 s" missed\n',
        },
        {
            "device": "hip:1",
            "kernel": "fa_fwd_f16_d64_plain",
            "state": "half_open",
            "failures": 1,
            "retry_in_s": 0.0,
            "cause": "",
        },
    ],
    "latency": [
        {
            "device": "hip:0",
            "kernel": "fa_fwd_f16_d64_plain",
            "calls": 100,
            "seconds": 0.5,
            "flops": 2e12,
            "p50_s": 0.004,
            "p99_s": 0.02,
        },
        {
            "device": "sim",
            "kernel": "fa_fwd_f16_d64_plain",
            "calls": 7,
            "seconds": 70.0,
            "flops": 1e9,
            "p50_s": 9.0,
            "p99_s": 11.0,
        },
    ],
    "verify": {
        "every": 100,
        "checked": 9,
        "unchecked": 2,
        "mismatches": 1,
        "nonfinite_inputs": 6,
    },
    "nonfinite_gradients": {"q": 1, "k": 0, "v": 0, "bias": 0},
    "counters": {
        "fused": {"fa_fwd_f16_d64_plain": 100, "fa_bwd_q_f16_d64_plain": 90},
        "fallback": {"head_dim": 8, "made_up": 1},
        "wave_instructions": 422794,
    },
}


def growing():
    """A status function: each look finds another 50 fused calls and one fallback."""
    looks = itertools.count(1)

    def status():
        found, n = copy.deepcopy(STATUS), next(looks)
        for kernel in found["counters"]["fused"]:
            found["counters"]["fused"][kernel] += 50 * n
        found["counters"]["fallback"]["head_dim"] += n
        for each in found["latency"]:
            each["calls"] += 50 * n
            each["seconds"] += 0.25 * n
            each["flops"] += 1e12 * n
        found["guard"]["misses"] += n
        found["verify"]["checked"] += n
        return found

    return status


def serve(status, port=0, registry=None):
    """serve_metrics() of what a function returns, instead of this process's status."""
    stand_in = SimpleNamespace(status=lambda wait: status())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_metrics, "_status", stand_in)
        return _metrics.serve_metrics(port, registry=registry)
