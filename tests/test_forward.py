"""Forward kernels, every row of variants.def by regime, executed as machine code.

Each case calls the C entry with outputs that lie inside larger buffers full of a canary
value. The reference is exact arithmetic, the yardstick PyTorch's math path in the same
dtype (helpers/exact.py). Layouts of the inputs: test_kernel_layouts.py.

SPDX-License-Identifier: BSD-3-Clause
"""

import math

import pytest
import torch
from helpers import (
    BOTTOM_RIGHT,
    CAUSAL,
    NONE,
    TOP_LEFT,
    lse_low,
    needs_simulator,
    out_low,
)
from helpers.exact import Results, error, math_path
from helpers.kernels import (
    DEVICE,
    DTYPES,
    FAMILIES,
    FULL,
    HALVES,
    OTHERS,
    every_family,
    family_of,
    forward,
    lse_error,
    normal,
    ratios,
    some_families,
    some_families_of,
)

from flash_attn_rocm import _ops

if DEVICE == "cpu":
    pytestmark = needs_simulator

# Relative errors on data with scores of some units. Observed: 3.6e-7 and 5.3e-16.
ABSOLUTE = {torch.float32: 1e-6, torch.float64: 1.5e-15}


def check(p, family=None, *, allowed=1.0, absolute=False):
    """Runs the kernel and holds out, LSE and out_lo against the contract."""
    saved = forward(p, family)
    reference = p.exact()
    results = Results(saved.out, saved.lse, None, None, None)
    found = ratios(p, results, reference=reference)
    double = p.q.dtype is torch.float64  # judged by `absolute`
    assert double or found["out"] <= allowed, found
    assert lse_error(p, saved.lse, reference) <= 1
    if absolute and p.q.dtype in ABSOLUTE:
        assert error(saved.out, reference.out) <= ABSOLUTE[p.q.dtype]
    blind = saved.lse == -math.inf
    assert not saved.out[blind].any()
    return saved


def lengths(family):
    """(Sq, Sk): one row, around a tile and a step, more than one of each."""
    rows, keys = family.rows, family.steps
    return [
        (1, 1),
        (1, keys + 1),
        (rows - 1, keys - 1),
        (rows, keys),
        (rows + 1, keys + 1),
        (37, 2 * keys + 5),
    ]


def test_families_are_all_kernels_that_ship():
    # Those with features have tests of their own (C: every row of the table), but for
    # float32 in float64 there are no others.
    named = {symbol for f in FAMILIES for symbol in (f.forward, f.keys, f.queries)}
    rows = [r for r in _ops.ext.variants() if r["pass"] not in OTHERS]
    exact_32 = [r for r in rows if (r["arith"], *r["reads"]) == ("float64", "float32")]
    expected = [r for r in rows if r["level"] == "plain"] + exact_32
    expected = [r for r in expected if r["pass"] != "backward_bias"]
    assert named == {r["symbol"] for r in expected}
    assert {r["level"] for r in rows} == {"plain", "full"}


@pytest.mark.parametrize("number", range(6))
@every_family
def test_lengths_around_a_tile_are_accurate(family, number):
    length, length_k = lengths(family)[number]
    ways = list(CAUSAL.values())
    for causal in ways if FULL else ways[number % 3 :: 2]:
        p = normal(
            *(family.dtype, length, length_k, family.dim),
            **dict(heads=4, heads_k=2, causal=causal),
        )
        check(p, family, absolute=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 33, 40, 61, 77, 100, 131, 160, 251])
def test_any_head_dim(dim, dtype):
    check(normal(dtype, 70, 130, dim, causal=TOP_LEFT), absolute=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dim,dim_v", [(8, 40), (40, 8), (7, 129), (64, 128), (256, 1), (3, 251), (72, 96)]
)
def test_value_head_dim_is_free(dim, dim_v, dtype):
    p = normal(dtype, 37, 70, dim, dim_v=dim_v, heads=2, causal=BOTTOM_RIGHT)
    check(p, family_of(dtype, max(dim, dim_v)), absolute=True)


@some_families
def test_rows_that_see_no_key_are_zero(family):
    # Bottom-right with more queries than keys: the first 140 rows see nothing.
    p = normal(family.dtype, 150, 10, family.dim, heads=2, causal=BOTTOM_RIGHT)
    saved = check(p, family)
    assert (saved.lse[..., :140] == -math.inf).all()
    assert not saved.out[..., :140, :].any()
    assert torch.isfinite(saved.lse[..., 140:]).all()


@pytest.mark.parametrize("times", [8, 30])
@some_families
def test_peaked_softmax(family, times):
    p = normal(family.dtype, 130, 197, family.dim, heads=2, causal=TOP_LEFT)
    check(p.but(q=p.q * times), family)


@some_families
def test_huge_scores_do_not_overflow(family):
    p = normal(family.dtype, 70, 130, family.dim)
    check(p.but(q=p.q * 100, k=p.k * 100), family)


@some_families
def test_scores_near_the_largest_possible_do_not_overflow(family):
    p = normal(family.dtype, 70, 130, family.dim)
    big = torch.finfo(torch.float16).max
    saved = forward(p.but(q=p.q.sign() * big, k=p.k.sign() * big), family)
    assert torch.isfinite(saved.out).all() and torch.isfinite(saved.lse).all()
    # With powers of two every sum of fp32 is exact, so the winners are known.
    check(p.but(q=p.q.sign() * 2.0**15, k=p.k.sign() * 2.0**15), family)


@some_families
def test_equal_scores_average_the_values(family):
    p = normal(family.dtype, 70, 130, family.dim)
    saved = check(p.but(q=torch.zeros_like(p.q)), family)
    assert (saved.lse - math.log(130)).abs().max() < 1e-5


def small_weights(family):
    """One key takes nearly all the weight and has no value; 640 others, of weights
    about 2^-18 (below fp16's smallest normal number), make the output."""
    p = normal(family.dtype, 5, 641, family.dim, scale=0.18)
    p.q[..., 1:], p.q[..., 0] = 0, 4
    p.k[..., 0] *= 0.1
    p.k[:, :, 0, 0] = 12.5 * math.log(2) / 4 * 8
    p.v[:, :, 0] = 0
    return p.but(v=p.v * 1000)


@some_families
def test_small_weights_keep_their_precision(family):
    # Observed: up to 0.79; unscaled weights in fp16 give 8 to 14.
    check(small_weights(family), family)


@some_families
def test_values_of_one_give_one(family):
    p = normal(family.dtype, 70, 130, family.dim)
    saved = forward(p.but(v=torch.ones_like(p.v)), family)
    # Observed: 4.5 eps; the sum of 130 weights has its share.
    many = 1 if family.dtype in HALVES else 8
    assert (saved.out - 1).abs().max() <= torch.finfo(p.q.dtype).eps * many


@pytest.mark.parametrize("heads,heads_k", [(4, 1), (4, 2), (3, 3), (3, 1)])
@some_families
def test_grouped_heads_equal_repeated_heads(family, heads, heads_k):
    p = normal(
        *(family.dtype, 70, 65, family.dim),
        **dict(heads=heads, heads_k=heads_k, batch=2, causal=TOP_LEFT),
    )
    saved = check(p, family)
    k, v = (t.repeat_interleave(heads // heads_k, 1) for t in (p.k, p.v))
    again = forward(p.but(k=k, v=v), family)
    assert torch.equal(saved.out, again.out) and torch.equal(saved.lse, again.lse)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-30, 5.0, -1.0])
@some_families
def test_any_finite_scale(family, scale):
    p = normal(family.dtype, 70, 65, family.dim, heads=2, scale=scale, causal=TOP_LEFT)
    check(p, family)


@some_families
def test_causal_equals_the_same_keys_cut_off(family):
    # The last row of a bottom-right call sees every key, the row before one less.
    p = normal(family.dtype, 3, 130, family.dim, causal=BOTTOM_RIGHT)
    saved = forward(p, family)
    for row in range(3):
        keys = 128 + row
        alone = p.but(
            q=p.q[:, :, row : row + 1].contiguous(),
            k=p.k[:, :, :keys].contiguous(),
            v=p.v[:, :, :keys].contiguous(),
            dout=p.dout[:, :, :1],
            causal=NONE,
        )
        assert torch.equal(saved.out[:, :, row], forward(alone, family).out[:, :, 0])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@some_families
def test_what_a_row_cannot_see_does_not_reach_it(family, poison):
    p = normal(family.dtype, 130, 130, family.dim, causal=TOP_LEFT)
    saved = forward(p, family)
    for at in (1, 63, 64, 100, 129) if FULL else (1, 64, 129):
        k, v = p.k.clone(), p.v.clone()
        k[:, :, at] = poison
        v[:, :, at] = poison
        again = forward(p.but(k=k, v=v), family)
        assert torch.equal(saved.out[:, :, :at], again.out[:, :, :at])
        assert torch.equal(saved.lse[..., :at], again.lse[..., :at])
        assert not torch.isfinite(again.out[:, :, at:]).any()


@some_families
def test_nan_in_a_query_stays_in_its_row(family):
    p = normal(family.dtype, 70, 65, family.dim)
    saved = forward(p, family)
    q = p.q.clone()
    q[0, 0, 5, 0] = math.nan
    again = forward(p.but(q=q), family)
    others = torch.arange(70, device=DEVICE) != 5
    assert torch.isnan(again.out[0, 0, 5]).all() and torch.isnan(again.lse[0, 0, 5])
    assert torch.equal(saved.out[:, :, others], again.out[:, :, others])
    assert torch.equal(saved.lse[..., others], again.lse[..., others])


@some_families
def test_infinite_values_come_out_as_in_the_math_path(family):
    p = normal(family.dtype, 70, 65, family.dim)
    p.v[0, 0, 7, 0] = math.inf
    p.v[0, 0, 9, -1] = math.nan
    out = forward(p, family).out.cpu()
    expected = math_path(p.q, p.k, p.v, p.dout).out
    assert torch.equal(torch.isnan(out), torch.isnan(expected))
    assert torch.equal(out == math.inf, expected == math.inf)


@some_families
def test_infinite_scores_give_nan_or_nothing_as_softmax_does(family):
    p = normal(family.dtype, 4, 65, family.dim)
    p = p.but(q=p.q.abs() + 0.1)
    p.k[0, 0, 3] = -math.inf  # a score of -inf: no weight
    saved = forward(p, family)
    keep = torch.arange(65, device=DEVICE) != 3
    want = p.but(k=p.k[:, :, keep], v=p.v[:, :, keep]).exact()
    assert error(saved.out, want.out) < 8 * torch.finfo(p.q.dtype).eps
    assert error(saved.lse, want.lse) < 1e-6
    p.k[0, 0, 3] = math.inf  # a score of +inf: inf - inf
    saved = forward(p, family)
    assert torch.isnan(saved.out).all() and torch.isnan(saved.lse).all()


@some_families
def test_results_repeat_bit_for_bit(family):
    p = normal(family.dtype, 130, 130, family.dim, heads=2, batch=2, causal=TOP_LEFT)
    for one, other in zip(forward(p, family), forward(p, family)):
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("times", [1, 30])
@some_families_of(*HALVES)
def test_out_lo_is_what_rounding_took_from_out(family, times):
    p = normal(family.dtype, 70, 130, family.dim, causal=TOP_LEFT)
    p = p.but(q=p.q * times)
    saved = forward(p, family)
    assert torch.equal(saved.out, forward(p, family, with_lo=False).out)
    out, low = saved.out.double(), out_low(saved).double()
    if family.dtype is torch.float16:
        low = low / 2**11  # or it would be lost below the smallest number
    # Half the distance of neighbours; below the normal numbers it no longer shrinks.
    facts = torch.finfo(family.dtype)
    half_ulp = 2.0 ** (torch.frexp(out.abs().clamp(min=facts.tiny))[1] - 2) * facts.eps
    assert (low.abs() <= half_ulp).all()
    # Observed: 1.3e-4 for fp16 weights, which have 11 bits, and 2.5e-6.
    bound = 2e-4 if "bf16_exact" not in family.name else 4e-6
    assert error(out + low, p.exact().out) < bound


@pytest.mark.parametrize("times", [1, 30, 1000])
@some_families_of(*HALVES, torch.float32)
def test_out_lo_is_what_rounding_took_from_the_lse(family, times):
    p = normal(family.dtype, 70, 130, family.dim, causal=TOP_LEFT)
    # Multiples of 1/4, so that the sums of products are exact in float32.
    p = p.but(q=(p.q * 4).round() / 4 * times, k=(p.k * 4).round() / 4)
    saved = forward(p, family)
    plain = forward(p, family, with_lo=False)
    assert torch.equal(saved.out, plain.out) and torch.equal(saved.lse, plain.lse)
    lse, low = saved.lse.double(), lse_low(saved).double()
    # The logarithm of the sum rounds too; for halves that is of 2^12 times the weights.
    size = lse.abs() + math.log(130 * (2**12 if family.dtype in HALVES else 1))
    assert (low.abs() <= torch.finfo(torch.float32).eps * size).all()
    # The weights that it gives sum to one, with the factor that the kernel has.
    log2_e = 1 / math.log(2)
    in_float64 = "f32_exact" in family.name
    kind = torch.float64 if in_float64 else torch.float32
    factor = float(torch.tensor(p.factor * log2_e, dtype=kind)) / log2_e
    scores = (p.q.double() @ p.k.double().mT) * factor
    seen = torch.ones(70, 130, dtype=torch.bool, device=DEVICE).tril()
    total = (scores - (lse + low)[..., None]).exp().masked_fill(~seen, 0).sum(-1)
    # Observed: up to 4.1e-7, of float32 1.7e-7, in float64 9e-12.
    assert (total - 1).abs().max() <= (1e-10 if in_float64 else 5e-7)


@some_families_of(torch.float32)
def test_the_lse_of_a_thousand_keys_and_its_residue_have_more_than_float32(family):
    # The maximum is small here beside the logarithm of the sum.
    p = normal(family.dtype, 70, 1024, family.dim)
    p = p.but(q=p.q * 0.2)
    saved = forward(p, family)
    got = saved.lse.double() + lse_low(saved).double()
    off = (got - torch.from_numpy(p.exact().lse.astype("float64")).to(got)).abs()
    # Observed: 4e-8, at most 1.3e-7 (on a GPU with other exponentials 1e-7, 2.2e-7);
    # half an ulp of such an LSE is 2.4e-7.
    assert off.mean() <= 1.5e-7 and off.max() <= 3e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0)], ids=str)
def test_empty_inputs_launch_nothing_and_give_zero(dtype, sizes):
    batch, length, length_k = sizes
    p = normal(dtype, length, length_k, 8, batch=batch)
    family = family_of(dtype, 8)._replace(forward="")
    saved = forward(p, family)
    assert not saved.out.any() and (saved.lse == -math.inf).all()
