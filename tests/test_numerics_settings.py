"""The kernels keep their bounds whatever the float unit does inside.

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
from helpers.kernels import FAMILIES, forward, normal
from test_backward import check as check_backward
from test_forward import check, small_weights

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
CHOSEN = SETTINGS if FULL else random.Random(907).sample(SETTINGS, 4)
# Those with dot2 differ most; the others use its neighbours exp, log and rcp.
QUICK = ("f16_d64", "f16_d128", "bf16_d64", "f32_d32", "f64_d32")
SAMPLE = [f for f in FAMILIES if FULL or f.name in QUICK]
HALF = [f for f in SAMPLE if FULL or f.name in ("f16_d64", "bf16_d64")]


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


def over(families):
    return pytest.mark.parametrize("family", families, ids=lambda f: f.name)


def test_every_setting_is_one_of_the_24():
    assert len(set(SETTINGS)) == 24 and set(CHOSEN) <= set(SETTINGS)
    words = {word for setting in CHOSEN for word in setting}
    assert words >= {"lohi", "hilo", "fused", "keep32", "flush16", 0, 1}


@over(SAMPLE)
def test_usual_inputs_keep_their_bounds(family, setting):
    p = normal(family.dtype, 129, 65, family.dim, heads=2, heads_k=1, causal=TOP_LEFT)
    check(p, family)
    check_backward(p, family)
    for length, length_k in [(1, 65), (127, 63), (128, 64), (37, 133)] if FULL else []:
        p = normal(family.dtype, length, length_k, family.dim, heads=2, heads_k=1)
        check(p, family)
        check_backward(p, family)


@over(HALF)
def test_peaked_softmax_keeps_its_bounds(family, setting):
    p = normal(family.dtype, 70, 130, family.dim, heads=2, causal=TOP_LEFT)
    check_backward(p.but(q=p.q * 30), family, absolute=1e-13)


@over(HALF)
def test_hard_inputs_keep_their_bounds(family, setting):
    p = normal(family.dtype, 70, 130, family.dim)
    check(p.but(q=p.q * 100, k=p.k * 100), family)
    check_backward(p.but(scale=-0.3), family)
    # Half denormals in the scores' operands, in the values and in what comes in.
    check_backward(p.but(k=p.k * 2.0**-18), family)
    check_backward(p.but(v=p.v * 2.0**-10, dout=p.dout * 2.0**-6), family)
    saved = check(p.but(q=torch.zeros_like(p.q)), family)
    assert (saved.lse - math.log(130)).abs().max() < 1e-5
    ones = forward(p.but(v=torch.ones_like(p.v)), family)
    assert (ones.out - 1).abs().max() <= torch.finfo(family.dtype).eps


@over(HALF)
def test_small_weights_keep_their_precision(family, setting):
    check(small_weights(family), family)


@pytest.mark.skipif(not FULL, reason="every setting: FA_TEST=full")
@over(SAMPLE)
def test_largest_scores_keep_their_bound(family, setting):
    p = normal(family.dtype, 70, 130, family.dim)
    p = p.but(q=p.q.sign() * 2.0**15, k=p.k.sign() * 2.0**15, causal=NONE)
    check(p, family)
