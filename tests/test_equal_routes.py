"""Two ways to say one thing give one result: out, LSE and every gradient.

Where both ways do the same arithmetic the bits are the same; otherwise both are within
what the contract allows, so their difference is within twice that.

SPDX-License-Identifier: BSD-3-Clause
"""

import math

import pytest
import torch
from helpers import BOTTOM_RIGHT, NONE, TOP_LEFT, needs_simulator
from helpers.combinations import KINDS, some_kinds
from helpers.exact import error, largest_error, norm
from helpers.features import (
    NONE_TOP_LEFT,
    Results,
    block_lists,
    distances,
    drop,
    exact,
    lse_dtype,
    lse_error,
    math_path,
    noise,
    problem,
    ratios,
    run,
    seed_of,
    seen_by,
    spans,
)
from helpers.kernels import DEVICE

if DEVICE == "cpu":
    pytestmark = needs_simulator

CALM = ("out", "dq", "dk", "dv")


def make(kind, rows, keys, dim=40, **how):
    dtype, strict = KINDS[kind]
    return problem(dtype, rows, keys, dim, strict=strict, **how)


def drawn(*sizes, seed=5):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def chance(*sizes, seed=6):
    return torch.rand(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def same(one, other, names=CALM, *, p):
    """Both results are within the contract of the same problem, so of each other."""
    reference, usual = exact(p), math_path(p)
    for results in (one, other):
        kept_names = {name: getattr(results, name) for name in names}
        part = Results(**{"out": results.out, "lse": results.lse, **kept_names})
        found = ratios(p, part, reference=reference, yardstick=usual)
        assert max(found.values()) <= 1, found
        assert lse_error(p, results.lse, reference) <= 1


def identical(one, other, names=("out", "lse", "dq", "dk", "dv")):
    for name in names:
        first, second = getattr(one, name), getattr(other, name)
        assert torch.equal(first, second), f"{name}: {largest(first, second)}"


def largest(first, second):
    return float((first.double() - second.double()).abs().max())


# ----------------------------------------------------------------------------- masks


@pytest.mark.parametrize("causal", [NONE, TOP_LEFT, BOTTOM_RIGHT, NONE_TOP_LEFT])
@some_kinds
def test_a_window_equals_its_mask(kind, causal):
    p = make(kind, 130, 140, causal=causal, window_left=40, window_right=9)
    mask = seen_by(p)[:1, :1].to(DEVICE)
    calm = p.but(causal=NONE, window_left=-1, window_right=-1, mask=mask)
    same(run(p), run(calm), p=p)


@pytest.mark.parametrize("causal", [TOP_LEFT, BOTTOM_RIGHT])
@some_kinds
def test_causal_equals_its_mask(kind, causal):
    p = make(kind, 130, 140, causal=causal)
    mask = seen_by(p)[:1, :1].to(DEVICE)
    same(run(p), run(p.but(causal=NONE, mask=mask)), p=p)


@some_kinds
def test_a_causal_window_with_features_has_the_bits_of_its_mask(kind):
    # Both run the kernels with features, on the same tiles.
    p = make(kind, 100, 120, heads=2, softcap=5.0)
    one = p.but(causal=BOTTOM_RIGHT, window_left=90)
    other = p.but(mask=seen_by(one)[:1, :1].to(DEVICE))
    identical(run(one), run(other))


@some_kinds
def test_first_keys_equal_their_mask(kind):
    p = make(kind, 130, 140, causal=TOP_LEFT, window_left=20, sink_keys=4)
    mask = seen_by(p)[:1, :1].to(DEVICE)
    calm = p.but(causal=NONE, window_left=-1, sink_keys=0, mask=mask)
    same(run(p), run(calm), p=p)


@some_kinds
def test_a_boolean_mask_equals_a_bias_of_minus_infinity(kind):
    p = make(kind, 70, 130, heads=2, heads_k=1)
    mask = chance(1, 2, 70, 130) < 0.6
    mask[:, :, 7] = False
    bias = torch.zeros(1, 2, 70, 130, device=DEVICE).masked_fill(~mask, -math.inf)
    identical(run(p.but(mask=mask)), run(p.but(bias=bias.to(p.q.dtype))))


@some_kinds
def test_a_mask_of_one_row_equals_shorter_keys(kind):
    p = make(kind, 70, 130, heads=2)
    mask = (torch.arange(130, device=DEVICE) < 70)[None, None, None]
    short = p.but(k=p.k[:, :, :70], v=p.v[:, :, :70])
    one, other = run(p.but(mask=mask)), run(short)
    assert not one.dk[:, :, 70:].any() and not one.dv[:, :, 70:].any()
    cut = one._replace(dk=one.dk[:, :, :70], dv=one.dv[:, :, :70])
    same(cut, other, p=short)


@pytest.mark.parametrize("own", ["heads", "shared"])
@some_kinds
def test_blocks_equal_their_mask(kind, own):
    p = make(kind, 140, 270, heads=2, heads_k=1)
    sizes = (1, 2) if own == "heads" else (1, 1)
    dense = chance(*sizes, 2, 3).cpu() < 0.6
    dense[0, 0, 0] = False
    one = p.but(**block_lists(dense), block_q=128, block_k=128)
    other = p.but(mask=seen_by(one).to(DEVICE))
    first, second = run(one), run(other)
    # Not dq: what the dS of a row lack is given to keys of the first tile that is
    # visited, and to the heaviest ones.
    identical(first, second, ("out", "lse", "dk", "dv"))
    same(first, second, p=one)


@pytest.mark.parametrize("block_q, block_k", [(128, 256), (256, 128), (384, 128)])
def test_blocks_of_any_multiple_of_128_equal_their_mask(block_q, block_k):
    p = make("f16", 300, 300, block_q=block_q, block_k=block_k)
    dense = chance(1, 1, -(-300 // block_q), -(-300 // block_k)).cpu() < 0.7
    dense[..., 0] = True
    one = p.but(**block_lists(dense))
    other = p.but(mask=seen_by(one).to(DEVICE), block_q=0, block_k=0)
    identical(run(one), run(other), ("out", "lse", "dk", "dv"))


@some_kinds
def test_blocks_with_causal_and_a_window_equal_their_mask(kind):
    p = make(kind, 260, 260, causal=TOP_LEFT, window_left=100, block_q=128, block_k=128)
    dense = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 1, 1]])[None, None] > 0
    one = p.but(**block_lists(dense))
    other = p.but(
        mask=seen_by(one).to(DEVICE),
        **dict(causal=NONE, window_left=-1, block_q=0, block_k=0),
    )
    same(run(one), run(other), p=other)


# ---------------------------------------------------------------------------- scores


@pytest.mark.parametrize("own", ["heads", "batch"])
@some_kinds
def test_alibi_equals_its_bias(kind, own):
    wide = lse_dtype(KINDS[kind][0])
    p = make(kind, 40, 70, heads=2, batch=2, causal=BOTTOM_RIGHT)
    # Multiples of 1/8, exact in every type.
    slopes = (chance(2, 2) * 8).ceil() / 8
    slopes = slopes if own == "batch" else slopes[0]
    one = p.but(alibi=slopes.to(wide))
    bias = -slopes.reshape(-1, 2, 1, 1) * distances(p).to(DEVICE)
    other = p.but(bias=bias.to(wide))
    same(run(one), run(other), p=one)


@some_kinds
def test_softcap_of_a_huge_cap_is_no_softcap(kind):
    p = make(kind, 70, 130, heads=2, causal=TOP_LEFT)
    one, calm = run(p.but(softcap=1e4)), run(p)
    for name in CALM:
        first, second = (getattr(r, name).double() for r in (one, calm))
        eps = max(torch.finfo(p.q.dtype).eps, 1e-4 if kind != "f64" else 1e-7)
        assert (first - second).norm() <= 4 * eps * second.norm(), name


@some_kinds
def test_grouped_heads_equal_repeated_heads(kind):
    p = make(kind, 40, 70, heads=4, heads_k=2, batch=2, causal=TOP_LEFT)
    wide = lse_dtype(p.q.dtype)
    p = p.but(
        **dict(bias=drawn(2, 4, 40, 70).to(p.q.dtype), alibi=chance(4).to(wide)),
        **dict(mask=chance(1, 4, 40, 70) < 0.8, sink=drawn(4).to(wide)),
        **dict(dropout_p=0.3, seed=seed_of(5), softcap=5.0),
    )
    many = p.but(**{n: getattr(p, n).repeat_interleave(2, 1) for n in ("k", "v")})
    one, other = run(p), run(many)
    identical(one, other, ("out", "lse"))
    reference = exact(p)
    for name in ("dk", "dv"):
        grad = getattr(other, name).double().unflatten(1, (2, 2)).sum(2)
        off = error(grad, getattr(reference, name))
        assert off <= 4 * torch.finfo(p.q.dtype).eps + (1e-14 if kind == "f64" else 0)
    same(one, one, ("out", "dq", "dk", "dv", "dbias"), p=p)


@some_kinds
def test_a_sink_equals_one_more_key_without_a_value(kind):
    # One more channel, which only the further key has, makes its score.
    p = make(kind, 70, 130, 40, heads=2, batch=2, scale=0.25, dlse=True)
    score = torch.tensor([1.5, -0.75], device=DEVICE)
    one = run(p.but(sink=score.to(lse_dtype(p.q.dtype))))
    q = torch.cat([p.q, torch.full_like(p.q[..., :1], 4.0)], -1)
    k = torch.cat(
        [
            p.k.repeat_interleave(2, 1),
            torch.zeros_like(p.k[:, :1])[..., :1].expand(2, 2, 130, 1),
        ],
        -1,
    )
    extra = torch.zeros(2, 2, 1, 41).to(p.q)
    extra[..., 40] = score[:, None]
    v = torch.cat([p.v.repeat_interleave(2, 1), torch.zeros(2, 2, 1, 40).to(p.q)], 2)
    other = run(p.but(q=q, k=torch.cat([k, extra], 2), v=v))
    eps = torch.finfo(p.q.dtype).eps
    allowed = 4 * eps if kind != "f64" else 1e-13
    pairs = [
        (one.out, other.out),
        (one.dq, other.dq[..., :40]),
        (one.dk, other.dk[:, :, :130, :40].sum(1, keepdim=True)),
        (one.dv, other.dv[:, :, :130].sum(1, keepdim=True)),
        # scale * q is 1 in the channel of the score
        (one.dsink.sum(-1), other.dk[:, :, 130, 40]),
    ]
    for first, second in pairs:
        assert error(first, second.double().cpu().numpy()) <= allowed
    assert largest(one.lse, other.lse) <= (1e-5 if kind != "f64" else 1e-13)


# --------------------------------------------------------------------------- dropout


@some_kinds
def test_dropout_equals_weights_times_the_replayed_mask(kind):
    p = make(kind, 70, 130, heads=2, batch=2, dropout_p=0.3, seed=seed_of(6, 6))
    results, usual = run(p), math_path(p)
    # The mask is outside of the tested code: weights of a call without dropout.
    calm = p.but(seed=None, dropout_p=0.0)
    q, k, v = (t.double().cpu() for t in (p.q, p.k, p.v))
    weights = ((q @ k.mT.expand(2, 2, 40, 130)) * p.factor).softmax(-1)
    out = (weights * drop(p)) @ v
    assert error(results.out, out.numpy()) <= 2 * max(
        error(usual.out, out.numpy()), 1e-14
    )
    assert lse_error(calm, results.lse, exact(calm)) <= 1


# --------------------------------------------------------------------------- varlen


@pytest.mark.parametrize(
    "way", ["all", "causal", "window", "features"], ids=lambda way: way
)
@some_kinds
def test_packed_sequences_equal_a_call_for_each(kind, way):
    lengths_q, lengths_k = (33, 0, 70, 1, 40), (50, 7, 30, 0, 40)
    rows, keys = sum(lengths_q), sum(lengths_k)
    given = {
        "all": {},
        "causal": dict(causal=True),
        "window": dict(left=9, right=3),
        "features": dict(causal=True, left=20),
    }[way]
    wide = lse_dtype(KINDS[kind][0])
    extra = {}
    if way == "features":
        extra = dict(
            **dict(softcap=4.0, alibi=chance(2).to(wide), sink=drawn(2).to(wide)),
        )
    p = make(kind, rows + 3, keys + 2, heads=2, dlse=True, **extra)
    packed = p.but(**spans(lengths_q, lengths_k, rows=rows + 3, keys=keys + 2, **given))
    got = run(packed)
    start_q = start_k = 0
    for n_q, n_k in zip(lengths_q, lengths_k):
        at_q, at_k = slice(start_q, start_q + n_q), slice(start_k, start_k + n_k)
        alone = p.but(
            **{n: getattr(p, n)[:, :, at_q] for n in ("q", "dout", "dlse")},
            **{n: getattr(p, n)[:, :, at_k] for n in ("k", "v")},
            **dict(causal=BOTTOM_RIGHT if given.get("causal") else NONE),
            window_left=given.get("left", -1),
            window_right=given.get("right", -1),
        )
        start_q, start_k = at_q.stop, at_k.stop
        part = Results(
            *(getattr(got, n)[:, :, at_q] for n in ("out", "lse", "dq")),
            *(getattr(got, n)[:, :, at_k] for n in ("dk", "dv")),
        )
        if n_q and n_k:
            same(part, run(alone), p=alone)
        else:
            assert not part.dk.any() and not part.dv.any() and not part.out.any()
    assert not got.out[:, :, rows:].any() and not got.dq[:, :, rows:].any()
    assert not got.dk[:, :, keys:].any() and not got.dv[:, :, keys:].any()


# -------------------------------------------------------------------- plain and full


@some_kinds
def test_features_that_change_nothing_give_the_plain_result(kind):
    p = make(
        kind, 130, 150, 64, heads=2, causal=BOTTOM_RIGHT, window_left=80, dlse=True
    )
    plain = run(p)
    wide = lse_dtype(p.q.dtype)
    nothing = {
        "bias": dict(bias=torch.zeros(1, 1, 1, 1).to(p.q)),
        "mask": dict(mask=torch.ones(1, 1, 1, 1, device=DEVICE) > 0),
        "alibi": dict(alibi=torch.zeros(2, dtype=wide, device=DEVICE)),
        "blocks": dict(
            block_lists(torch.ones(1, 1, 2, 2) > 0), **dict(block_q=128, block_k=128)
        ),
    }
    first = None
    for features in nothing.values():
        found = run(p.but(**features))
        same(found, plain, p=p)
        first = first or found
        identical(found, first)


def test_noise_is_far_below_the_gradients():
    # What same() and ratios() let pass where terms cancel says nothing elsewhere.
    for kind in KINDS:
        p = make(kind, 70, 130, bias=drawn(1, 1, 70, 130).to(KINDS[kind][0]))
        own = exact(p)
        for name in ("dq", "dk", "dbias"):
            values = getattr(own, name)
            assert noise(p, name) < norm(values) / values.size**0.5
            assert largest_error(torch.from_numpy(values.astype("float64")), values) < 1
