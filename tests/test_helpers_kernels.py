"""The measures of kernel tests: each lets good results pass and fails bad ones.

SPDX-License-Identifier: BSD-3-Clause
"""

import numpy as np
import pytest
import torch
from helpers import BOTTOM_RIGHT, NONE, TOP_LEFT
from helpers.exact import GRADIENTS, Results, error, numbers_as
from helpers.gradients import fp64_gradients
from helpers.kernels import FAMILIES, family_of, guarded, normal, ratios

CASES = [(9, 9, NONE), (7, 13, TOP_LEFT), (5, 7, BOTTOM_RIGHT), (9, 3, BOTTOM_RIGHT)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("length, length_k, causal", CASES)
def test_the_exact_gradients_are_those_of_autograd(length, length_k, causal):
    p = normal(torch.float32, length, length_k, 6, heads=4, heads_k=2, causal=causal)
    p = p.but(dlse=None if length > length_k else torch.randn(p.rows))
    own = p.exact()
    grads = fp64_gradients(p.q, p.k, p.v, p.dout, None, causal, p.dlse)
    for name, grad in zip(GRADIENTS, grads):
        assert np.abs(getattr(own, name) - grad.numpy()).max() < 1e-13


def test_the_reference_of_float64_has_80_bits():
    p = normal(torch.float64, 5, 7, 4)
    own = p.exact()
    rounded = own.out.astype(np.float64).astype(np.longdouble)
    assert 0 < np.abs(own.out - rounded).max() < 2e-16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length, length_k, causal", CASES)
@pytest.mark.parametrize("times", [0.0, 1.9, 2.1])
def test_errors_count_in_units_of_twice_the_math_paths(
    dtype, length, length_k, causal, times
):
    p = normal(dtype, length, length_k, 16, heads=2, causal=causal)
    reference, usual = p.exact(), p.math_path()

    def moved(name):
        own = getattr(reference, name)
        off = numbers_as(getattr(usual, name), own) - own
        # More digits than the dtype has, as a tensor that ratio() takes.
        return torch.from_numpy((own + times * off).astype(np.float64))

    if dtype is torch.float64 and times:
        return  # the moved values cannot be held
    results = Results(moved("out"), None, *map(moved, GRADIENTS))
    for name, found in ratios(p, results).items():
        assert found == pytest.approx(times / 2, abs=0.3 if times == 0 else 1e-3), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_cancel_may_keep_what_their_terms_round(dtype):
    p = normal(dtype, 5, 1, 16)  # one key: dq = dk = 0
    usual = p.math_path()
    assert error(usual.dq, p.exact().dq) == 1 or not p.exact().dq.any()
    off = torch.zeros_like(p.q)
    assert ratios(p, Results(usual.out, None, off, off[:, :, :1], usual.dv))["dq"] <= 1
    assert ratios(p, Results(usual.out, None, off + 1e-2, usual.dk, usual.dv))["dq"] > 1


def test_results_that_are_not_finite_fail():
    p = normal(torch.float16, 5, 7, 16)
    bad = p.math_path().out.clone()
    bad[0, 0, 0, 0] = torch.inf
    with pytest.raises(AssertionError):
        ratios(p, Results(bad, None, None, None, None))


@pytest.mark.parametrize("at", [-1, 24, 4, 19])
def test_a_store_beside_a_guarded_tensor_is_seen(at):
    # Rows of 4 with gaps of 1: elements 4, 9, 14 and 19 are nobody's.
    held = guarded((1, 1, 5, 4), torch.float16, (25, 25, 5, 1))
    held.tensor.zero_()
    held.check()
    held.tensor.as_strided((1,), (1,), held.tensor.storage_offset() + at).zero_()
    with pytest.raises(AssertionError, match="written beside"):
        held.check()


@pytest.mark.skipif(not FAMILIES, reason="no extension")
def test_the_first_row_that_fits_serves_a_head_dim():
    assert family_of(torch.float64, 65).name == "f64_d128"
    assert family_of(torch.float16, 65).name == "f16_d96"
    assert "exact" in family_of(torch.bfloat16, 65, strict=True).name
