"""Backward kernels, every row of variants.def by regime, executed as machine code.

Each case runs forward and backward through the C entries with outputs that lie inside
larger buffers full of a canary value. The reference is exact arithmetic, the yardstick
the autograd of PyTorch's math path in the same dtype (helpers/exact.py). Layouts:
test_kernel_layouts.py; the op's autograd: test_autograd.py, test_gradcheck.py.

SPDX-License-Identifier: BSD-3-Clause
"""

import math
from operator import attrgetter

import pytest
import torch
from helpers import (
    BOTTOM_RIGHT,
    CAUSAL,
    NONE,
    TOP_LEFT,
    needs_simulator,
    out_low,
    relative_error,
)
from helpers.exact import GRADIENTS, Results, error, ratio
from helpers.gradients import leaves, plain_attention
from helpers.kernels import (
    DEVICE,
    DTYPES,
    FAMILIES,
    FULL,
    HALVES,
    WANT_ALL,
    WANT_DK,
    WANT_DQ,
    WANT_DV,
    backward,
    every_family,
    family_of,
    forward,
    normal,
    ratios,
    run,
    some_families,
    some_families_of,
)

import flash_attn_rocm as fa

if DEVICE == "cpu":
    pytestmark = needs_simulator

HALF_FAMILIES = [family for family in FAMILIES if family.dtype in HALVES]
NAME = attrgetter("name")

# Relative errors of gradients on data with scores of some units. Observed: 8e-7 and
# 1.3e-15.
ABSOLUTE = {torch.float32: 2e-6, torch.float64: 4e-15}


def check(p, family=None, *, allowed=1.0, absolute=None, **how):
    """Runs the kernels and holds every gradient against the contract.

    float64 is judged by absolute bounds: ABSOLUTE, and more where scores are large,
    because their own rounding then moves the weights.
    """
    results = run(p, family, **how)
    reference = p.exact()
    found = ratios(p, results, reference=reference)
    bound = absolute or ABSOLUTE.get(p.q.dtype)
    for name in GRADIENTS:
        if found[name] > allowed and p.q.dtype is torch.float64:
            own = error(getattr(results, name), getattr(reference, name))
            assert own <= bound, f"{name}: {own:.1e}"
            continue
        assert found[name] <= allowed, found
    return results


def lengths(family):
    """(Sq, Sk): one row, around a tile and a step, more than one of each."""
    rows, steps = family.rows, family.steps
    return [
        (1, 1),
        (1, steps + 1),
        (steps - 1, rows - 1),
        (rows, steps),
        (rows + 1, rows + 1),
        (2 * steps + 5, 37),
    ]


@pytest.mark.parametrize("number", range(6))
@every_family
def test_lengths_around_a_tile_are_accurate(family, number):
    length, length_k = lengths(family)[number]
    ways = list(CAUSAL.values())
    for causal in ways if FULL else [ways[number % 3]]:
        p = normal(
            *(family.dtype, length, length_k, family.dim),
            **dict(heads=4, heads_k=2, causal=causal),
        )
        results = check(p, family)
        if p.q.dtype in ABSOLUTE and min(length, length_k) > 1:
            for name in GRADIENTS:
                own = error(getattr(results, name), getattr(p.exact(), name))
                assert own <= ABSOLUTE[p.q.dtype], f"{name}: {own:.1e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 33, 40, 61, 77, 100, 131, 160, 251])
def test_any_head_dim(dim, dtype):
    check(normal(dtype, 70, 75, dim, heads=2, causal=TOP_LEFT))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dim,dim_v", [(8, 40), (40, 8), (7, 129), (64, 128), (256, 1), (3, 251), (72, 96)]
)
def test_value_head_dim_is_free(dim, dim_v, dtype):
    p = normal(dtype, 37, 70, dim, dim_v=dim_v, heads=2, causal=BOTTOM_RIGHT)
    check(p, family_of(dtype, max(dim, dim_v)))


@some_families
def test_rows_that_see_no_key_have_no_part_in_any_gradient(family):
    # Bottom-right with more queries than keys: the first 140 rows see nothing.
    p = normal(family.dtype, 150, 10, family.dim, heads=2, causal=BOTTOM_RIGHT)
    results = check(p, family)
    assert not results.dq[:, :, :140].any()
    few = p.but(q=p.q[:, :, 140:], dout=p.dout[:, :, 140:])
    check(few, family)
    dout = p.dout.clone()
    dout[:, :, :140] = 1000  # as good as anything else
    again = run(p.but(dout=dout), family)
    if family.dtype not in HALVES:  # there the scale of dS follows from dout's norms
        assert torch.equal(again.dk, results.dk) and torch.equal(again.dv, results.dv)
    assert not again.dq[:, :, :140].any()


@some_families
def test_only_the_last_row_sees_every_key(family):
    p = normal(family.dtype, 3, 130, family.dim, heads=2, causal=BOTTOM_RIGHT)
    results = check(p, family)
    alone = p.but(
        q=p.q[:, :, 2:].contiguous(), dout=p.dout[:, :, 2:].contiguous(), causal=NONE
    )
    # The last key is seen by the last row alone.
    for name in ("dk", "dv"):
        one, other = getattr(results, name), getattr(run(alone, family), name)
        torch.testing.assert_close(one[:, :, -1], other[:, :, -1])


@pytest.mark.parametrize("times", [8, 30])
@some_families
def test_peaked_softmax(family, times):
    p = normal(family.dtype, 130, 197, family.dim, heads=2, causal=TOP_LEFT)
    check(p.but(q=p.q * times), family, absolute=1e-13)


@some_families
def test_huge_scores(family):
    # The LSE is near 1e4, and its rounding, 5e-4, as large as a half's.
    p = normal(family.dtype, 70, 130, family.dim)
    check(p.but(q=p.q * 100, k=p.k * 100), family, absolute=1e-8)


@pytest.mark.parametrize("seed", [166, 167, 168])
@pytest.mark.parametrize("family", [f for f in HALF_FAMILIES if f.dim == 96], ids=NAME)
def test_keys_that_rows_look_at_alone_have_accurate_dk(family, seed):
    # Their dS is next to nothing, what delta lacks of their dP. With the first seed all
    # other rows cancel as well; bf16 had 2.2 to 2.5 times math's error.
    p = normal(family.dtype, 70, 200, family.dim, heads=2, seed=seed)
    check(p.but(q=p.q * 100, k=p.k * 100), family)


@pytest.mark.parametrize("size", [7e4, 1e6, 1e10, 1e15])
def test_double_gradients_hold_for_large_log_sum_exps(size):
    """Two equal keys: each has half of the weight, whatever the score."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.full((1, 1, 2, 1), size, dtype=torch.float64)
    v = torch.ones(1, 1, 2, 1, dtype=torch.float64, requires_grad=True)
    with fa.simulate("gfx906"):
        (dv,) = torch.autograd.grad(fa.attention(q, k, v, scale=1.0).sum(), v)
    # The log-sum-exp itself is rounded, by half a unit in its last place.
    bound = 1e-14 + size * 2.0**-52
    assert ((dv - 0.5).abs() <= bound).all()


@some_families
def test_scores_near_the_largest_possible_give_finite_gradients(family):
    # The LSE is near 1e10: weights are 0 or 1, and float16 could not hold a sum of
    # weights that do not add up to one.
    p = normal(family.dtype, 70, 130, family.dim)
    results = run(p.but(q=p.q.sign() * 2.0**15, k=p.k.sign() * 2.0**15), family)
    for name in ("dv", "dk", "dq"):
        grad = getattr(results, name)
        assert torch.isfinite(grad).all(), name
    # A weight is at most 1, or 2 after rounding of the LSE.
    largest = results.dv.float().abs().max() / p.dout.float().abs().max()
    assert largest <= 2 * 70


@pytest.mark.parametrize("common", [1, 16, -100])
@pytest.mark.parametrize("causal", CAUSAL.values(), ids=CAUSAL)
@some_families
def test_what_keys_have_in_common_does_not_magnify_roundings(family, causal, common):
    # The dS of a query cancel for it; so must what rounding and delta add to them.
    p = normal(family.dtype, 130, 150, family.dim, heads=2, causal=causal)
    check(p.but(k=p.k + common), family, absolute=1e-11)
    check(p.but(v=p.v + common), family, absolute=1e-11)


@pytest.mark.parametrize("groups", [2, 4])
@some_families_of(torch.bfloat16, torch.float32)
def test_what_groups_of_keys_have_in_common_does_not_magnify_roundings(family, groups):
    # Nearly every row looks at one of them, which may lie anywhere. (float16 has up to
    # 1.2 times what the contract allows: docs/accuracy.md.)
    p = normal(family.dtype, 256, 256, family.dim)
    group = torch.arange(256) * groups // 256
    scattered = group[torch.arange(256) * 77 % 256]  # over all tiles
    for each in (group, scattered):
        check(p.but(k=p.k + 16 * each[:, None].to(p.k)), family)


@pytest.mark.parametrize("narrow", [False, True])
@some_families_of(torch.float32)
def test_sums_of_queries_that_are_put_away_come_back(family, narrow):
    # More than 16 tiles, over heads that share keys; elements are stored one by one.
    p = normal(family.dtype, 600, 20, family.dim - narrow, heads=2)
    check(p.but(dout=p.dout + 1), family)


def test_sums_over_thousands_of_queries_lose_nothing_to_rounding():
    # As of a loss that is a sum: what all queries add has one sign.
    p = normal(torch.float32, 4096, 20, 40)
    check(p.but(dout=p.dout + 1, q=p.q + 0.5))


@pytest.mark.parametrize("common, times", [(1, 0.2), (-100, 1.0)])
@some_families_of(torch.float32)
def test_thousands_of_keys_with_common_values_are_accurate(family, common, times):
    p = normal(family.dtype, 5, 4096, family.dim)
    p = p.but(q=p.q * times, v=p.v + common)
    results, reference = run(p, family), p.exact()
    found = ratios(p, results, reference=reference)
    assert max(found.values()) <= 1, found


@some_families_of(torch.float32)
def test_first_keys_that_are_like_no_others_do_not_stand_for_all(family):
    p = normal(family.dtype, 130, 1100, family.dim)
    k = p.k.clone()
    k[:, :, :64] += 4
    # Observed: 0.7; with the first tile in their place, 5 to 9.
    check(p.but(k=k, q=p.q * 0.1, v=p.v + 1), family)


@pytest.mark.parametrize("way", ["nearly alike", "few queries"])
@some_families_of(torch.float32)
def test_few_queries_that_look_at_a_thousand_keys_are_accurate(family, way):
    # The difference of a score and an LSE of many keys is larger than either.
    p = normal(family.dtype, 8, 1024, family.dim)
    check(p.but(q=p.q * 0.2) if way == "nearly alike" else p, family)


@pytest.mark.parametrize("causal", [NONE, BOTTOM_RIGHT])
@some_families
def test_gradients_of_parts_of_the_keys_add_up(family, causal):
    # As ring attention does it: the LSE and the output are of all keys, each backward
    # sees some of them, and there is no residue.
    p = normal(family.dtype, 70, 150, family.dim, heads=2, causal=causal)
    p = p.but(k=p.k + 2)  # a row's dS of one part do not cancel
    saved = forward(p, family)._replace(out_lo=None)
    parts = []
    for keys in (slice(0, 80), slice(80, 150)):
        part = p.but(k=p.k[:, :, keys], v=p.v[:, :, keys])
        if causal != NONE and keys.start == 0:
            part = part.but(causal=NONE)  # the last 70 keys are on the diagonal
        parts.append(backward(part, saved, family, fp32=True))
    (dq, dk, dv), (dq_2, dk_2, dv_2) = parts
    grads = dq + dq_2, torch.cat([dk, dk_2], 2), torch.cat([dv, dv_2], 2)
    grads = (grad.to(p.q.dtype) for grad in grads)
    found = ratios(p, Results(saved.out, saved.lse, *grads))
    # A delta from the rounded output, as in the test without out_lo; with common keys
    # its error counts.
    assert max(found.values()) <= (3 if family.dtype in HALVES else 1), found


@some_families
def test_equal_scores_average_the_values(family):
    p = normal(family.dtype, 70, 130, family.dim)
    p = p.but(q=torch.zeros_like(p.q))
    assert not check(p, family).dk.any()


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-30, 5.0, -1.0])
@some_families
def test_any_finite_scale(family, scale):
    p = normal(family.dtype, 70, 65, family.dim, heads=2, scale=scale, causal=TOP_LEFT)
    results = check(p, family, absolute=1e-13)
    if scale == 0.0:
        assert not results.dq.any() and not results.dk.any()


@pytest.mark.parametrize("heads,heads_k", [(4, 1), (4, 2), (3, 3), (3, 1)])
@some_families
def test_grouped_heads_equal_repeated_heads(family, heads, heads_k):
    p = normal(
        *(family.dtype, 70, 65, family.dim),
        **dict(heads=heads, heads_k=heads_k, batch=2, causal=TOP_LEFT),
    )
    results = check(p, family)
    k, v = (t.repeat_interleave(heads // heads_k, 1) for t in (p.k, p.v))
    many = p.but(k=k, v=v)
    saved = forward(many, family)
    dq, dk, dv = backward(many, saved, family, fp32=True)
    assert torch.equal(dq.to(p.q.dtype), results.dq)
    for whole, parts in ((results.dk, dk), (results.dv, dv)):
        total = parts.unflatten(1, (heads_k, -1)).sum(2)
        # Rounding of the stored dtype, and of sums in another order.
        ulps = 4 if family.dtype in HALVES else 32
        bound = ulps * torch.finfo(p.q.dtype).eps * total.abs().max()
        assert (whole - total).abs().max() <= bound


# ------------------------------------------------------ the size of what comes in


def tiny(x):
    return x * 2.0**-14


def one_row_large(x):
    return torch.cat([x[:, :, :1], x[:, :, 1:] * 2.0**-12], 2)


SIZES = {
    "dout large": lambda p: p.but(dout=p.dout * 1000),
    "dout tiny": lambda p: p.but(dout=tiny(p.dout)),
    "v large": lambda p: p.but(v=p.v * 1000),
    "v tiny": lambda p: p.but(v=tiny(p.v)),
    "k tiny": lambda p: p.but(k=tiny(p.k)),
    "a row of dout large": lambda p: p.but(dout=one_row_large(p.dout)),
    "a row of v large": lambda p: p.but(v=one_row_large(p.v)),
    "dout zero": lambda p: p.but(dout=torch.zeros_like(p.dout)),
    "v zero": lambda p: p.but(v=torch.zeros_like(p.v)),
    "dout constant": lambda p: p.but(dout=torch.ones_like(p.dout)),
}


@pytest.mark.parametrize("name", SIZES)
@some_families
def test_the_size_of_the_inputs_does_not_change_the_precision(family, name):
    check(SIZES[name](normal(family.dtype, 70, 200, family.dim, heads=2)), family)


@some_families
def test_a_large_value_of_another_tile_does_not_overflow(family):
    # Keys 0 and 200 share the weight of every query; key 0 alone has a value, which
    # is what delta of the other's tile consists of.
    p = normal(family.dtype, 70, 300, family.dim)
    p.k[:, :, 200] = p.k[:, :, 0]
    p.v[:, :, 1:] *= 2.0**-12
    p.q[:], p.dout[:] = p.k[:, :, :1], p.v[:, :, :1]
    results = run(p, family)
    reference = p.exact()
    for name in ("dk", "dv"):
        got, want = getattr(results, name), getattr(reference, name)
        assert torch.isfinite(got).all(), name
        # Observed: 0.4 eps for the halves, 8 for the others.
        many = 1 if family.dtype in HALVES else 16
        assert error(got, want) <= many * torch.finfo(family.dtype).eps


# ----------------------------------------------------------------- what is computed


@some_families
def test_what_is_not_wanted_is_not_computed_and_the_rest_has_the_same_bits(family):
    p = normal(family.dtype, 70, 75, family.dim, heads=2, heads_k=1, causal=TOP_LEFT)
    saved = forward(p, family)
    every = backward(p, saved, family)
    for wanted in range(1, WANT_ALL):
        some = backward(p, saved, family, wanted=wanted)  # also checks the symbols
        for bit, one, other in zip((WANT_DQ, WANT_DK, WANT_DV), some, every):
            assert (one is not None) == bool(wanted & bit)
            assert one is None or torch.equal(one, other)


@some_families_of(*HALVES)  # the flag says nothing elsewhere
def test_fp32_gradients_are_the_halves_before_rounding(family):
    p = normal(family.dtype, 70, 75, family.dim, heads=2, heads_k=1, causal=TOP_LEFT)
    saved = forward(p, family)
    wide = backward(p, saved, family, fp32=True)
    for one, other in zip(wide, backward(p, saved, family)):
        assert one.dtype is torch.float32
        assert torch.equal(one.to(family.dtype), other)
    reference = p.exact()
    for name, grad in zip(GRADIENTS, wide):
        # Observed: 2.6e-4 with weights and dS of 11 bits, 5e-6 with bf16_exact.
        bound = 1e-5 if "bf16_exact" in family.name else 4e-4
        assert error(grad, getattr(reference, name)) <= bound


@some_families_of(torch.float16)  # the others' range is that of float32
def test_fp32_gradients_beyond_fp16_are_finite_and_halves_become_infinite(family):
    p = normal(family.dtype, 130, 75, family.dim)
    p = p.but(dout=p.dout * 2000 + 3000)  # dv sums 130 rows
    p = p.but(v=p.v * 200)  # dq then exceeds it, too
    saved = forward(p, family)
    wide = backward(p, saved, family, fp32=True)
    reference = p.exact()
    for name, grad in zip(GRADIENTS, wide):
        assert torch.isfinite(grad).all()
        assert error(grad, getattr(reference, name)) <= 4e-4
    assert wide[0].abs().max() > 65504
    halves = backward(p, saved, family)
    assert torch.isinf(halves[0]).any()
    for one, other in zip(wide, halves):
        assert torch.equal(one.half(), other)


@pytest.mark.parametrize("with_dout", [True, False])
@some_families
def test_gradient_of_the_log_sum_exp(family, with_dout):
    p = normal(family.dtype, 70, 75, family.dim, heads=2, heads_k=1, causal=TOP_LEFT)
    wide = torch.float64 if family.dtype is torch.float64 else torch.float32
    dlse = normal(wide, 70, 1, 2, heads=2, seed=4).q[..., 0]  # stride 2 in rows
    dout = p.dout if with_dout else torch.zeros_like(p.dout)
    p = p.but(dlse=dlse, dout=dout)
    results = run(p, family)
    inputs = leaves(p.q, p.k, p.v)
    upcast = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in inputs]
    out, lse = plain_attention(*upcast, causal=p.causal)
    usual = torch.autograd.grad([out.to(p.q.dtype), lse], inputs, [dout, dlse])
    reference = p.exact()
    for name, own in zip(GRADIENTS, usual):
        got, want = getattr(results, name), getattr(reference, name)
        if family.dtype is torch.float64:
            assert error(got, want) <= ABSOLUTE[family.dtype]
        else:
            assert ratio(got, want, own) <= 1


@some_families_of(*HALVES)
def test_a_backward_without_out_lo_uses_the_rounded_output(family):
    # On usual data that costs nothing; what it costs with a peaked softmax is in
    # docs/accuracy.md.
    p = normal(family.dtype, 70, 130, family.dim, heads=2, causal=TOP_LEFT)
    saved = forward(p, family)
    grads = backward(p, saved._replace(out_lo=None), family)
    found = ratios(p, Results(saved.out, saved.lse, *grads))
    assert max(found.values()) <= 1, found
    # Of the two parts, dv needs what rounding took from the log-sum-exp: no delta. That
    # of dk is corrected by sums of dP, so it hardly matters what it was.
    without = saved._replace(out_lo=saved.out_lo.clone())
    out_low(without).zero_()
    one, other = backward(p, saved, family), backward(p, without, family)
    eps = torch.finfo(family.dtype).eps
    assert torch.equal(one[2], other[2])
    assert not torch.equal(one[0], other[0])
    assert relative_error(other[1], one[1].double()) <= eps / 8


@pytest.mark.parametrize("causal", [NONE, TOP_LEFT])
@some_families
def test_a_huge_key_without_weight_does_not_reach_dq(family, causal):
    """What the dS of a row lack goes to keys by their weight."""
    if family.dtype is torch.float64:
        return  # nothing is added
    p = normal(family.dtype, 100, 100, family.dim, causal=causal)
    q, k = p.q.clone(), p.k.clone()
    q[..., 0] = q[..., 0].abs() + 3
    k[:, :, 5] = 0
    k[:, :, 5, 0] = -30000
    p = p.but(q=q, k=k)
    assert ratios(p, run(p, family))["dq"] <= 1


@some_families
def test_gradients_near_the_largest_float(family):
    if family.dtype is torch.float16 or family.dtype is torch.float64:
        return
    p = normal(family.dtype, 70, 70, family.dim)
    p = p.but(q=p.q * 1e-7, k=p.k * 1e7, v=p.v * 1e10, dout=p.dout * 1e20)
    found = ratios(p, run(p, family))
    assert max(found.values()) <= 1, found


def test_small_fp16_values_keep_delta():
    """out_lo is not lost below the smallest fp16."""
    p = normal(torch.float16, 100, 100, 64, causal=TOP_LEFT)
    p = p.but(q=p.q * 30, v=p.v * 1e-4, dout=p.dout * 100)
    found = ratios(p, run(p))
    assert max(found.values()) <= 1, found


# ------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@some_families
def test_a_key_that_a_row_cannot_see_does_not_reach_its_dq(family, poison):
    p = normal(family.dtype, 130, 130, family.dim, causal=TOP_LEFT)
    for at in (1, 64, 129):
        # The same keys, but for the one: the scale of fp16's dS follows from norms.
        calm, bad = p, p.but(k=p.k.clone(), v=p.v.clone())
        bad.k[:, :, at] = poison
        bad.v[:, :, at] = poison
        want, got = run(calm, family), run(bad, family)
        if family.dtype in HALVES:
            torch.testing.assert_close(
                *(r.dq[:, :, :at].float() for r in (got, want)), rtol=1e-2, atol=1e-3
            )
        else:
            assert torch.equal(got.dq[:, :, :at], want.dq[:, :, :at])
        assert not torch.isfinite(got.dq[:, :, at:]).any()


@some_families
def test_nan_in_a_query_stays_in_its_dq(family):
    p = normal(family.dtype, 70, 65, family.dim)
    want = run(p, family)
    q = p.q.clone()
    q[0, 0, 5, 0] = math.nan
    got = run(p.but(q=q), family)
    others = torch.arange(70, device=DEVICE) != 5
    assert torch.isnan(got.dq[0, 0, 5]).all()
    assert torch.equal(got.dq[:, :, others], want.dq[:, :, others])
    assert torch.isnan(got.dk).all() and torch.isnan(got.dv).all()


@some_families
def test_results_repeat_bit_for_bit(family):
    p = normal(
        *(family.dtype, 130, 130, family.dim),
        **dict(heads=2, heads_k=1, batch=2, causal=TOP_LEFT),
    )
    for one, other in zip(run(p, family), run(p, family)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0)], ids=str)
def test_empty_inputs_launch_nothing_and_give_zero(dtype, sizes):
    batch, length, length_k = sizes
    p = normal(dtype, length, length_k, 8, batch=batch)
    family = family_of(dtype, 8)._replace(forward="", keys="", queries="")
    for grad in backward(p, forward(p, family), family):
        assert not grad.any()
