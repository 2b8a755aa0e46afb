"""The forward kernels keep their bounds whatever the float unit does inside.

No document says in which order v_dot2_f32_f16 adds, how it treats denormals, or
which bits the estimates (exp, log, rcp, ...) have on the card. The simulator has a
setting for each possibility; the kernels must not depend on any. The quick suite
takes a seeded sample, FA_TEST=full all of them and more problems.

SPDX-License-Identifier: BSD-3-Clause
"""

import itertools
import math
import os
import random

import pytest
import torch
from helpers import NONE, TOP_LEFT, needs_simulator
from test_forward import VARIANTS, check, check_small_weights, forward, inputs

import hipsim

pytestmark = needs_simulator

FULL = os.environ.get("FA_TEST") == "full"
SETTINGS = [
    (order, keep32, flush16, ulp)
    for order, keep32, flush16, ulp in itertools.product(
        ("lohi", "hilo", "fused"), ("", "keep32"), ("", "flush16"), (0, 1)
    )
]
BITS = {"lohi": 0, "hilo": 1, "fused": 2, "keep32": 4, "flush16": 8, "": 0}
CHOSEN = SETTINGS if FULL else random.Random(906).sample(SETTINGS, 5)


@pytest.fixture(params=CHOSEN, ids=lambda s: "-".join(filter(None, map(str, s))))
def setting(request):
    """The simulated card has this setting while the test runs."""
    before = {name: hipsim.get_option(name) for name in ("dot2", "ulp")}
    *dot2, ulp = request.param
    hipsim.set_option("dot2", sum(BITS[word] for word in dot2))
    hipsim.set_option("ulp", ulp)
    yield request.param
    for name, value in before.items():
        hipsim.set_option(name, value)


def test_every_setting_is_one_of_the_24():
    assert len(set(SETTINGS)) == 24 and set(CHOSEN) <= set(SETTINGS)


@pytest.mark.parametrize("symbol", VARIANTS)
def test_usual_inputs_keep_their_bound(symbol, setting):
    q, k, v = inputs(2, 1, 129, 65, VARIANTS[symbol][0])
    check(q, k, v, symbol, causal=TOP_LEFT)
    if FULL:
        for length, length_k in ((1, 1), (1, 65), (127, 63), (128, 64), (37, 133)):
            q, k, v = inputs(2, 1, length, length_k, VARIANTS[symbol][0])
            check(q, k, v, symbol)


@pytest.mark.parametrize("symbol", VARIANTS if FULL else [next(iter(VARIANTS))])
def test_hard_inputs_keep_their_bound(symbol, setting):
    q, k, v = inputs(1, 1, 70, 130, VARIANTS[symbol][0])
    check(q * 100, k * 100, v, symbol)
    check(q, k, v, symbol, scale=-0.3)
    # Half denormals in the scores' operands and in the values.
    check(q, k * 2.0**-18, v, symbol)
    _, lse = check(torch.zeros_like(q), k, v, symbol)
    assert (lse - math.log(130)).abs().max() < 1e-5
    out, _ = forward(q, k, torch.ones_like(v), symbol)
    assert (out - 1).abs().max() <= 2**-10


@pytest.mark.parametrize("symbol", VARIANTS if FULL else [next(iter(VARIANTS))])
def test_small_weights_keep_their_precision(symbol, setting):
    check_small_weights(symbol)


@pytest.mark.skipif(not FULL, reason="every setting: FA_TEST=full")
@pytest.mark.parametrize("symbol", VARIANTS)
def test_largest_scores_keep_their_bound(symbol, setting):
    q, k, v = inputs(1, 1, 70, 130, VARIANTS[symbol][0])
    q, k = q.sign() * 2.0**15, k.sign() * 2.0**15
    check(q, k, v, symbol, causal=NONE)
