"""Forward and backward with features together, executed as machine code.

Every pair of choices (helpers/combinations.py, with FA_TEST=full every triple), every
kernel with features, and what single gradients promise: sums over broadcast dimensions,
nothing from what is not seen, the same bits again. The measure is that of
helpers/features.py.

SPDX-License-Identifier: BSD-3-Clause
"""

import itertools
import math

import pytest
import torch
from helpers import BOTTOM_RIGHT, TOP_LEFT, needs_simulator
from helpers.combinations import (
    DIMENSIONS,
    KINDS,
    allowed,
    build,
    covering,
    every_kind,
    name_of,
    some_kinds,
)
from helpers.exact import error
from helpers.features import (
    GRADIENTS,
    WANT_DBIAS,
    WANT_DK,
    WANT_DQ,
    WANT_DSINK,
    WANT_DV,
    Results,
    all_wanted,
    backward,
    block_lists,
    exact,
    forward,
    lse_dtype,
    lse_error,
    math_path,
    problem,
    ratios,
    ratios_together,
    run,
    seed_of,
    seen_by,
    spans,
)
from helpers.kernels import DEVICE, FULL, HALVES

if DEVICE == "cpu":
    pytestmark = needs_simulator

DRAWS = 20

ROWS = covering(DIMENSIONS, allowed, strength=3 if FULL else 2, seed=7)
ROWS += [dict(row, kind="f32_exact") for row in ROWS if row["kind"] == "f32"]


def make(kind, rows, keys, dim=40, **how):
    dtype, strict = KINDS[kind]
    return problem(dtype, rows, keys, dim, strict=strict, **how)


def drawn(*sizes, seed=5):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def chance(*sizes, seed=6):
    return torch.rand(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check_rest(p, results, reference):
    """What the contract says of single problems, beside errors relative to math's."""
    assert lse_error(p, results.lse, reference) <= 1
    blind = ~seen_by(p).any(-1).to(DEVICE)
    assert not results.out[blind].any() and not results.dq[blind].any()


def check(p):
    """Runs forward and backward and holds everything against the contract."""
    results, reference = run(p), exact(p)
    found = ratios(p, results, reference=reference)
    assert max(found.values()) <= 1, found
    check_rest(p, results, reference)
    return results


def check_draws(draw):
    """The same for draw(0), draw(1), ... together, in float32 arithmetic. With one row
    or one channel the errors of a single draw, math's too, are a handful of roundings
    of float32 that may all be small by luck. So small problems are computed in float64,
    where the first of these, alone, keeps the contract, too."""
    problems = [draw(seed) for seed in range(DRAWS)]
    results, references = [run(p) for p in problems], [exact(p) for p in problems]
    found = ratios_together(problems, results, references)
    assert max(found.values()) <= 1, found
    check(problems[0].but(strict=True))
    for each in zip(problems, results, references):
        check_rest(*each)


def is_small(kind, rows, dim):
    return kind == "f32" and (rows == 1 or dim == 1)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_pair_of_features_is_accurate(row):
    if is_small(row["kind"], row["lengths"][0], row["dims"][0]):
        check_draws(lambda seed: build(row, seed))
    else:
        check(build(row))


def everything(p):
    """All features in one call."""
    batch, heads, rows, keys = p.scores
    dtype, wide = p.q.dtype, lse_dtype(p.q.dtype)
    return p.but(
        **dict(bias=drawn(batch, heads, rows, keys).to(dtype), softcap=4.0),
        **dict(mask=chance(1, 1, rows, keys) < 0.8, alibi=chance(heads).to(wide)),
        **dict(sink=drawn(heads).to(wide), dropout_p=0.2, seed=seed_of(3, 1)),
        **dict(causal=BOTTOM_RIGHT, window_left=keys // 2, sink_keys=2),
        **block_lists(torch.ones(1, 1, -(-rows // 128), -(-keys // 128)) > 0),
        **dict(block_q=128, block_k=128),
    )


@pytest.mark.parametrize("dim", [64, 128, 256])
@every_kind
def test_every_kernel_with_features_is_accurate(kind, dim):
    rows, keys = (70, 130) if dim < 256 else (20, 70)
    check(everything(make(kind, rows, keys, dim, dlse=True)))


@pytest.mark.parametrize("dim, dim_v", [(1, 1), (2, 9), (9, 2), (65, 3), (8, 130)])
@some_kinds
def test_any_head_dims_with_features(kind, dim, dim_v):
    def draw(seed):
        return everything(make(kind, 20, 70, dim, dim_v=dim_v, heads=2, draw=seed))

    if is_small(kind, 20, dim):
        check_draws(draw)
    else:
        check(draw(0))


@pytest.mark.parametrize("softcap", [0.5, 20.0])
@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_softcap_of_rows_that_look_everywhere_is_accurate(kind, softcap):
    # What is due to delta is not made up for at a few keys that stand for all.
    p = make(kind, 16, 1024, 64, softcap=softcap)
    for other in (p.but(v=p.v + 1), p.but(q=p.q * 0.2, v=p.v + 1)):
        found = ratios(other, run(other))
        assert max(found.values()) <= 1, found


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_single_queries_of_float32_are_accurate(softcap):
    # PyTorch's math path sums the products of one query in parts.
    def draw(seed):
        p = make("f32", 1, 300, 64, heads=2, draw=seed, softcap=softcap)
        return p.but(q=p.q * 10) if softcap else p

    problems = [draw(seed) for seed in range(DRAWS // 2)]
    results, references = [run(p) for p in problems], [exact(p) for p in problems]
    found = ratios_together(problems, results, references)
    # Observed: 0.67; with all products in one sum, and the LSE's residue of a
    # difference taken in the wrong order, 1.0 and 0.83.
    assert max(found.values()) <= 0.8, found


@pytest.mark.parametrize("rows, keys, dim, dim_v", [(1, 65, 72, 72), (20, 70, 1, 1)])
def test_small_problems_of_float32_have_the_error_of_one_rounding(
    rows, keys, dim, dim_v
):
    # With fp32 arithmetic single draws of such had up to 5 times math's error.
    for seed in range(5):
        p = make("f32_exact", rows, keys, dim, dim_v=dim_v, heads=2, draw=seed)
        p = everything(p.but(q=p.q * 3))
        results, reference = run(p), exact(p)
        for name in ("out", *GRADIENTS):
            own = getattr(reference, name)
            if own is not None:
                once = torch.from_numpy(own.astype("float32"))
                # Observed: 1.00.
                assert error(getattr(results, name), own) <= 1.01 * error(once, own)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_dsink_of_single_queries_of_16_bits_is_accurate(kind):
    # It is a number per head, in float32: of single draws math's may be exact by luck.
    def draw(seed):
        p = make(kind, 1, 65, 64, dim_v=24, heads=3, draw=seed, softcap=2.0, dlse=True)
        return p.but(sink=drawn(3, seed=seed))

    problems = [draw(seed) for seed in range(DRAWS)]
    results, references = [run(p) for p in problems], [exact(p) for p in problems]
    found = ratios_together(problems, results, references)
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("dim_v", [40, 33])
def test_float32_sums_that_are_put_away_come_back(dim_v):
    # More than 16 tiles of queries, over heads that share keys; dv element by element.
    p = make("f32", 600, 20, dim_v=dim_v, heads=2)
    check(p.but(mask=chance(1, 2, 600, 20) < 0.8, softcap=5.0, dout=p.dout + 1))


# --------------------------------------------------------------------------- bias


@pytest.mark.parametrize("sizes", itertools.product((0, 1), repeat=4), ids=str)
def test_the_gradient_of_a_bias_is_summed_over_what_it_is_broadcast_over(sizes):
    whole = 2, 3, 70, 130
    own = tuple(n if full else 1 for n, full in zip(whole, sizes))
    kind = list(KINDS)[sum(b << at for at, b in enumerate(sizes)) % len(KINDS)]
    p = make(kind, 70, 130, 16, heads=3, heads_k=1, batch=2, dlse=True)
    p = p.but(bias=drawn(*own).to(p.q.dtype), causal=TOP_LEFT)
    results = check(p)
    assert results.dbias.shape == own and results.dbias.dtype is p.q.dtype
    assert results.dbias.is_contiguous()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_the_gradient_of_a_float32_bias_is_float32(kind):
    p = make(kind, 70, 130, heads=2)
    p = p.but(bias=drawn(1, 2, 70, 130))
    grad = check(p).dbias
    assert grad.dtype is torch.float32
    assert not torch.equal(grad, grad.to(p.q.dtype).float())
    # Observed: 2.6e-7; 4e-5 with the delta of rounded weights.
    assert error(grad, exact(p).dbias) < 1e-6


@some_kinds
def test_the_gradient_of_a_bias_that_is_the_same_for_all_keys_vanishes(kind):
    p = make(kind, 70, 130, heads=2)
    bias = drawn(1, 1, 70, 1).to(p.q.dtype)
    check(p.but(bias=bias))


@some_kinds
def test_biases_that_hide_get_no_gradient(kind):
    p = make(kind, 40, 130, heads=2)
    bias = drawn(1, 2, 40, 130).to(p.q.dtype)
    hidden = chance(1, 2, 40, 130) < 0.3
    hidden[:, :, 5] = True
    p = p.but(bias=bias.masked_fill(hidden, -math.inf), causal=TOP_LEFT)
    grad = check(p).dbias
    assert not grad[hidden].any() and not grad[..., 40:].any()


# --------------------------------------------------------------------------- sinks


@some_kinds
def test_the_gradient_of_a_sink_is_there_for_each_query(kind):
    p = make(kind, 70, 130, heads=3, batch=2, dlse=True)
    p = p.but(sink=drawn(3).to(lse_dtype(p.q.dtype)), causal=TOP_LEFT, window_left=20)
    p = p.but(sink_keys=1)
    results = check(p)
    assert results.dsink.shape == (2, 3, 70)
    assert results.dsink.dtype is lse_dtype(p.q.dtype)
    want = exact(p).dsink.sum((0, 2))
    # Observed: 2e-6; of 16-bit types 5e-4 with the delta of rounded weights.
    close = 1e-13 if p.q.dtype is torch.float64 else 1e-5
    assert error(results.dsink.double().sum((0, 2)), want) <= close


@some_kinds
def test_the_lse_of_a_row_without_keys_gives_its_gradient_to_the_sink(kind):
    p = make(kind, 40, 70, heads=2, dlse=True)
    mask = torch.ones(1, 1, 40, 1, dtype=torch.bool, device=DEVICE)
    mask[:, :, ::2] = False
    sink = drawn(2).to(lse_dtype(p.q.dtype))
    results = check(p.but(sink=sink, mask=mask))
    off = (results.dsink[:, :, ::2] - p.dlse[:, :, ::2]).abs().max()
    assert off <= 1e-6


# ------------------------------------------------------------- the gradient of the LSE


@pytest.mark.parametrize("feature", ["softcap", "bias", "dropout", "sink", "window"])
@some_kinds
def test_gradient_of_the_log_sum_exp_alone(kind, feature):
    p = make(kind, 40, 130, heads=2, heads_k=1, dlse=True)
    given = {
        "softcap": dict(softcap=2.0),
        "bias": dict(bias=drawn(1, 2, 40, 130).to(p.q.dtype)),
        "dropout": dict(dropout_p=0.5, seed=seed_of(3)),
        "sink": dict(sink=drawn(2).to(lse_dtype(p.q.dtype))),
        "window": dict(causal=BOTTOM_RIGHT, window_left=30),
    }[feature]
    results = check(p.but(**given, dout=torch.zeros_like(p.dout)))
    assert not results.dv.any()


def test_any_strides_of_the_gradient_of_the_log_sum_exp():
    p = make("f32", 40, 70, heads=2, softcap=3.0)
    for view in (
        drawn(1, 2, 40, 3)[..., 1],
        drawn(1, 2, 1).expand(1, 2, 40),
        drawn(1, 40, 2).mT,
    ):
        check(p.but(dlse=view))


# ------------------------------------------------------------- what is not seen


@some_kinds
def test_rows_and_keys_that_nobody_sees_get_zero(kind):
    p = make(kind, 140, 150, heads=2, dlse=True)
    mask = torch.ones(1, 1, 140, 150, dtype=torch.bool, device=DEVICE)
    mask[:, :, ::3] = False
    mask[:, :, :, 40:60] = False
    mask[:, :, 70:, :64] = False  # a first tile that is not seen
    results = check(p.but(mask=mask, bias=drawn(1, 2, 140, 150).to(p.q.dtype)))
    assert not results.dk[:, :, 40:60].any() and not results.dv[:, :, 40:60].any()
    assert not results.dq[:, :, ::3].any()
    assert not results.dbias[~mask.expand_as(results.dbias)].any()


@pytest.mark.parametrize(
    "way, softcap",
    [(way, 0.0) for way in ("mask", "bias", "window", "spans", "blocks")]
    + [(way, 2.0) for way in ("mask", "bias", "window", "spans")],
)
@some_kinds
def test_a_key_that_a_row_cannot_see_does_not_reach_its_gradients(kind, way, softcap):
    p = make(kind, 140, 270, softcap=softcap)
    hides = torch.ones(140, 270, dtype=torch.bool, device=DEVICE)
    hides[20:, 201] = False
    bias = torch.zeros(140, 270, device=DEVICE).masked_fill(~hides, -math.inf)
    ways = {
        "mask": dict(mask=hides[None, None]),
        "bias": dict(bias=bias[None, None].to(p.q.dtype)),
        "window": dict(causal=TOP_LEFT, window_left=30),
        "spans": spans((100, 40), (200, 70)),
        "blocks": dict(
            block_lists(torch.tensor([[1, 0, 1], [0, 1, 0]])[None, None] > 0),
            **dict(block_q=128, block_k=128),
        ),
    }
    p = p.but(**ways[way])
    at = {"window": 130}.get(way, 201)
    sees = seen_by(p)[0, 0, :, at].to(DEVICE)
    # The same in both: the scale of fp16's dS follows from norms.
    want = run(p)
    k, v = p.k.clone(), p.v.clone()
    v[:, :, at] = math.inf
    if way != "bias":  # minus infinity is added, as in the math path
        k[:, :, at] = math.nan
    got = run(p.but(k=k, v=v))
    names = ("dq", "dbias") if way == "bias" else ("dq",)
    for name in names:
        one, other = (getattr(r, name)[0, 0] for r in (got, want))
        if p.q.dtype in HALVES:
            torch.testing.assert_close(
                *(x[~sees].float() for x in (one, other)), rtol=1e-2, atol=1e-3
            )
        else:
            assert torch.equal(one[~sees], other[~sees])
    assert not torch.isfinite(got.dq[0, 0][sees]).any()


@some_kinds
def test_a_sequence_does_not_reach_the_gradients_of_another(kind):
    # Both share tiles; behind the last one there may be anything.
    p = make(kind, 90, 100, dlse=True)
    p = p.but(**spans((50, 37), (40, 55), causal=True, rows=90, keys=100))
    want = run(p)
    q, k, v, dout = (t.clone() for t in (p.q, p.k, p.v, p.dout))
    for tensor, end in ((q, 87), (dout, 87), (k, 95), (v, 95)):
        tensor[:, :, end - 30] = math.nan
        tensor[:, :, end:] = math.inf
    got = run(p.but(q=q, k=k, v=v, dout=dout))
    for name in ("out", "dq", "dk", "dv"):
        rows = 50 if name in ("out", "dq") else 40
        one, other = (getattr(r, name) for r in (got, want))
        first, second = one[:, :, :rows], other[:, :, :rows]
        if p.q.dtype in HALVES and name != "out":
            torch.testing.assert_close(
                first.float(), second.float(), rtol=1e-2, atol=1e-3
            )
        else:
            assert torch.equal(first, second), name
        end = 87 if rows == 50 else 95
        assert not one[:, :, end:].any(), name
        assert not torch.isfinite(one[:, :, rows:end]).all(), name


@some_kinds
def test_blocks_that_are_not_listed_keep_queries_from_gradients(kind):
    p = make(kind, 140, 150, block_q=128, block_k=128)
    p = p.but(**block_lists(torch.eye(2)[None, None] > 0))
    want = run(p)
    q, dout = p.q.clone(), p.dout.clone()
    q[:, :, 130], dout[:, :, 130] = math.nan, math.inf
    got = run(p.but(q=q, dout=dout))
    for name in ("dk", "dv"):
        one, other = (getattr(r, name)[:, :, :128] for r in (got, want))
        if p.q.dtype in HALVES:
            torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=1e-3)
        else:
            assert torch.equal(one, other)
        assert not torch.isfinite(getattr(got, name)[:, :, 128:]).any()


# --------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_what_is_not_wanted_is_not_computed_and_the_rest_has_the_same_bits(kind):
    p = everything(make(kind, 40, 70, 16, heads=2, heads_k=1, dlse=True))
    saved, every = forward(p), run(p)
    one_by_one = [WANT_DQ, WANT_DK, WANT_DV, WANT_DBIAS, WANT_DSINK]
    pairs = [a | b for a, b in itertools.combinations(one_by_one, 2)]
    for wanted in one_by_one + (pairs if FULL else pairs[::3]):
        some = backward(p, saved, wanted)  # also looks at the kernels' names
        for name, one in zip(GRADIENTS, some):
            assert one is None or torch.equal(one, getattr(every, name)), name


@pytest.mark.parametrize("kind", ["f16", "bf16", "bf16_exact"])
def test_float32_gradients_are_the_halves_before_rounding(kind):
    p = everything(make(kind, 40, 70, 16, heads=2, heads_k=1))
    saved = forward(p)
    wide = backward(p, saved, fp32=True)
    for name, one, other in zip(GRADIENTS, wide, backward(p, saved)):
        if name == "dbias":  # has the type of bias
            assert torch.equal(one, other)
            continue
        assert one.dtype is torch.float32
        assert torch.equal(one.to(other.dtype), other)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
def test_a_peaked_softmax_with_features_keeps_its_gradients(kind):
    p = make(kind, 70, 130, heads=2, causal=TOP_LEFT)
    p = p.but(q=p.q * 30, sink=drawn(2), bias=drawn(1, 2, 1, 130).to(p.q.dtype))
    check(p)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_backward_without_out_lo_uses_the_rounded_output(kind):
    p = make(kind, 70, 130, heads=2, causal=TOP_LEFT, softcap=20.0)
    p = p.but(bias=drawn(1, 2, 1, 130).to(p.q.dtype), sink=drawn(2))
    saved = forward(p)
    without = saved._replace(out_lo=torch.empty(0, device=DEVICE))
    grads = backward(p, without, all_wanted(p) & ~WANT_DSINK & ~WANT_DBIAS)
    found = ratios(p, Results(saved.out, saved.lse, *grads), yardstick=math_path(p))
    assert max(found.values()) <= 1, found


@every_kind
@pytest.mark.parametrize("zeros", ["all", "every other row"])
@pytest.mark.parametrize(
    "scale, cap",
    [
        (128.0, 2.0**-120),
        (2.0**64, 2.0**-64),
        (-(2.0**100), 2.0**-28),
        (2.0**126.9, 0.25),
    ],
)
def test_a_softcap_far_below_the_scale(kind, scale, cap, zeros):
    # 2 / cap times the scale is no finite float; and 0 times infinity is NaN.
    p = make(kind, 40, 70, heads=2, softcap=cap, scale=scale)
    p.q[:, :, :: 1 if zeros == "all" else 2] = 0
    results, reference = run(p), exact(p)
    eps = torch.finfo(p.q.dtype).eps
    for name in ("out", "lse", "dq", "dk", "dv"):
        want = torch.from_numpy(getattr(reference, name).astype("float64"))
        got = getattr(results, name).cpu()
        want = want.to(got.dtype)  # halves may overflow
        finite = want.isfinite()
        assert torch.equal(got.isfinite(), finite), name
        assert torch.equal(got[~finite], want[~finite]), name
        wrong = (got - want)[finite].double().abs().max() if finite.any() else 0.0
        # Observed: 6.8 of the 16 eps. fp32 arithmetic and fp64 keep a slope of 2^-58
        # where tanh is 1, so dk is not 0 there. Observed: 2^-56 |scale|.
        least = abs(scale) * 2.0**-52 if name == "dk" else 1e-9 * eps
        size = want[finite].double().abs().max() if finite.any() else 0.0
        assert wrong <= max(16 * eps * size, least), name


@pytest.mark.parametrize("dim", [24, 40])
@pytest.mark.parametrize("keys", [1, 70])
@pytest.mark.parametrize("kind", ["f32", "f32_exact"])
def test_rows_of_one_key_have_no_gradients_of_scores_without_a_residue(kind, keys, dim):
    """Delta is then added up just as dP is, in kernels of every head dim."""
    p = make(kind, 67, keys, dim)
    if keys > 1:
        own = torch.arange(67, device=DEVICE).unsqueeze(1) % keys
        p = p.but(mask=torch.arange(keys, device=DEVICE).eq(own)[None, None])
    saved = forward(p, needs_grad=False)
    assert saved.out_lo.numel() == 0
    dq, dk, *_ = backward(p, saved)
    assert not dq.any() and not dk.any()
