"""The double-precision exp2 and log2 of csrc/kernels/number.h within their bounds.

A kernel of a few lines around each runs in the simulator, as code of either compiler,
over seeded arguments and the edges of their ranges. The references: mpmath, and long
double of 80 bits, which are first held against each other.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import hipsim

mpmath = pytest.importorskip("mpmath")

KERNELS = Path(hipsim.__file__).resolve().parents[1] / "csrc" / "kernels"
SOURCE = """
#include "number.h"
GLOBAL void exp2_f64(const double *in, double *out)
{
    out[index()] = fa_exp2(in[index()]);
}
GLOBAL void log2_f64(const double *in, double *out)
{
    out[index()] = fa_log2(in[index()]);
}
"""
WIDE = np.longdouble
needs_wide = pytest.mark.skipif(
    np.finfo(WIDE).nmant < 63, reason="long double of this machine is not 80 bits"
)


@pytest.fixture(params=[None, "clang-15"], ids=["newest", "clang-15"])
def evaluate(request, compile_hip, option):
    """evaluate(name, x): f(x) as the shipped code has it."""
    option("check", 0)  # nothing here is shared or masked
    image = compile_hip(
        *(SOURCE, f"-I{KERNELS}", "-std=c++17", "-ffp-contract=off"),
        clang=request.param,
        abi=4,
    )

    def call(name, x):
        padded = np.zeros(-(-len(x) // 256) * 256)
        padded[: len(x)] = x
        out = np.zeros_like(padded)
        with hipsim.Module(image) as module:
            module.kernel(name).launch(
                *((len(padded) // 256, 1, 1), (256, 1, 1)),
                [
                    hipsim.Buffer(padded.view(np.uint8), "r"),
                    hipsim.Buffer(out.view(np.uint8), "w"),
                ],
            )
        return out[: len(x)]

    return call


def exact(function, x):
    """mpmath's value of each x, in long double."""
    with mpmath.workprec(140):
        values = [function(mpmath.mpf(float(one))) for one in x]
        high = [float(value) for value in values]
        # A float and what it leaves: more than long double's 64 bits.
        low = [float(value - one) for value, one in zip(values, high)]
    return np.array(high, WIDE) + np.array(low, WIDE)


def ulps(got, reference):
    """Errors in the distance of the doubles next to the reference."""
    rounded = reference.astype(np.float64)
    return np.abs(got.astype(WIDE) - reference) / np.spacing(np.abs(rounded))


def exponents():
    """Arguments of exp2: all scales, the middles between integers, the ends."""
    rng = np.random.default_rng(906)
    near = np.arange(-1080, 1024)[:, None] + np.array(
        [-0.5, 0.5, 0.0, 2.0**-40, -(2.0**-40), np.nextafter(0.5, 0), -0.25]
    )
    x = np.concatenate(
        [
            rng.uniform(-1000, 0, 60000),
            rng.uniform(-1, 1, 30000),
            rng.uniform(-1100, 1023, 10000),
            rng.choice([-1, 1], 10000) * 2.0 ** rng.uniform(-60, 9, 10000),
            near.ravel(),
        ]
    )
    return x[x <= 1023]


@needs_wide
def test_exp2_is_within_1_ulp_of_long_double(evaluate):
    x = exponents()
    worst = ulps(evaluate("exp2_f64", x), np.exp2(x.astype(WIDE))).max()
    assert worst <= 1  # observed: 0.95


@needs_wide
def test_exp2_is_within_1_ulp_of_mpmath(evaluate):
    x = np.random.default_rng(1).choice(exponents(), 4000, replace=False)
    reference = exact(lambda one: mpmath.mpf(2) ** one, x)
    assert ulps(evaluate("exp2_f64", x), reference).max() <= 1
    # Long double itself, against its own 64 bits.
    x, reference = x[x > -1000], reference[x > -1000]
    assert (np.abs(np.exp2(x.astype(WIDE)) / reference - 1) < 2.0**-61).all()


def test_exp2_of_integers_is_exact_and_of_the_ends_what_it_says(evaluate):
    whole = np.arange(-1074.0, 1024)
    assert (evaluate("exp2_f64", whole) == [math.ldexp(1, int(n)) for n in whole]).all()
    ends = np.array([-math.inf, -1e300, -2000, -1100, -1075.5, 0, -0.0])
    assert evaluate("exp2_f64", ends).tolist() == [0, 0, 0, 0, 0, 1, 1]
    nan = evaluate("exp2_f64", np.array([math.nan, -math.nan]))
    assert np.isnan(nan).all()


def test_exp2_grows_with_its_argument_where_it_is_one_piece(evaluate):
    # A softmax of ties or of ordered scores must not swap them by more than rounding.
    x = np.sort(np.random.default_rng(2).uniform(-0.5, 0.5, 20000))
    y = evaluate("exp2_f64", x)
    assert (np.diff(y) >= -2 * np.spacing(y[:-1])).all()


def arguments():
    """Arguments of log2: sums of weights, powers of two, and close to 1."""
    rng = np.random.default_rng(907)
    close = 1 + rng.choice([-1, 1], 20000) * 2.0 ** rng.uniform(-52, -1, 20000)
    powers = 2.0 ** np.arange(-99, 100)
    return np.concatenate(
        [
            2.0 ** rng.uniform(-99.9, 99.9, 40000),
            rng.uniform(1, 65536, 40000),
            close,
            powers,
            np.nextafter(powers, 0),
            np.nextafter(powers, np.inf),
        ]
    )


# An ulp of 1 from exp2, whose argument is y, and the rounding of the sum.
def allowed(reference):
    return 2.0**-52 + np.spacing(np.abs(reference.astype(np.float64))) / 2


@needs_wide
@pytest.mark.parametrize("estimates", [0, 1], ids=["nearest", "adversarial"])
def test_log2_is_within_its_bound_of_long_double(evaluate, option, estimates):
    option("ulp", estimates)  # of v_log_f32, which it starts from
    x = arguments()
    reference = np.log2(x.astype(WIDE))
    error = np.abs(evaluate("log2_f64", x).astype(WIDE) - reference)
    assert (error / allowed(reference)).max() <= 1  # observed: 0.96


@needs_wide
def test_log2_is_within_its_bound_of_mpmath(evaluate):
    x = np.random.default_rng(3).choice(arguments(), 4000, replace=False)
    reference = exact(lambda one: mpmath.log(one, 2), x)
    error = np.abs(evaluate("log2_f64", x).astype(WIDE) - reference)
    assert (error / allowed(reference)).max() <= 1
    own = np.abs(np.log2(x.astype(WIDE)) - reference)
    assert (own <= 2.0**-62 * np.abs(reference)).all()
