"""Forward with features: each alone and its limits, executed as machine code.

Combinations are in test_feature_gradients.py, other ways to the same result in
test_equal_routes.py, dropout in test_dropout.py. The reference is exact arithmetic, the
yardstick PyTorch's math path in the same dtype (helpers/features.py).

SPDX-License-Identifier: BSD-3-Clause
"""

import math

import pytest
import torch
from helpers import BOTTOM_RIGHT, NONE, TOP_LEFT, needs_simulator
from helpers.combinations import KINDS, every_kind, some_kinds
from helpers.exact import error
from helpers.exact import math_path as plain_math_path
from helpers.features import (
    NONE_TOP_LEFT,
    Results,
    block_lists,
    exact,
    forward,
    lse_dtype,
    lse_error,
    problem,
    ratios,
    run,
    seed_of,
    seen_by,
    spans,
)
from helpers.kernels import DEVICE, FULL

from flash_attn_rocm import _ops

if DEVICE == "cpu":
    pytestmark = needs_simulator


def make(kind, rows, keys, dim=40, **how):
    dtype, strict = KINDS[kind]
    return problem(dtype, rows, keys, dim, strict=strict, **how)


def check(p, *, allowed=1.0):
    """Runs the kernel and holds out and LSE against the contract."""
    saved, reference = forward(p), exact(p)
    found = ratios(p, Results(saved.out, saved.lse), reference=reference)
    assert found["out"] <= allowed, found
    assert lse_error(p, saved.lse, reference) <= 1
    blind = saved.lse == -math.inf
    assert not saved.out[blind].any()
    return saved


def drawn(*sizes, seed=5):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def chance(*sizes, seed=6):
    return torch.rand(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# ------------------------------------------------------------------- each alone


def alone(name, p):
    """The problem with one feature."""
    _batch, heads, rows, keys = p.scores
    dtype, wide = p.q.dtype, lse_dtype(p.q.dtype)
    features = {
        "bias": lambda: dict(bias=drawn(*p.scores).to(dtype)),
        "mask": lambda: dict(mask=chance(*p.scores) < 0.6),
        "alibi": lambda: dict(alibi=chance(heads).to(wide)),
        "softcap": lambda: dict(softcap=3.0),
        "sink": lambda: dict(sink=drawn(heads).to(wide)),
        "sink_keys": lambda: dict(
            causal=BOTTOM_RIGHT, window_left=10, window_right=0, sink_keys=5
        ),
        "dropout": lambda: dict(dropout_p=0.3, seed=seed_of(9, 2)),
        "spans": lambda: spans((rows - 30, 0, 30), (keys - 20, 5, 15), causal=True),
        "blocks": lambda: dict(
            block_lists(torch.eye(-(-rows // 128), -(-keys // 128))[None, None] > 0),
            **dict(block_q=128, block_k=128),
        ),
    }
    return p.but(**features[name]())


ALONE = (
    *("bias", "mask", "alibi", "softcap", "sink", "sink_keys"),
    *("dropout", "spans", "blocks"),
)


@pytest.mark.parametrize("name", ALONE)
@every_kind
def test_a_feature_alone_is_accurate(kind, name):
    batch = 1 if name == "spans" else 2
    check(alone(name, make(kind, 140, 150, batch=batch, heads=2, heads_k=1)))


@pytest.mark.parametrize("causal", [NONE, TOP_LEFT, BOTTOM_RIGHT, NONE_TOP_LEFT])
@pytest.mark.parametrize("rows, keys", [(130, 70), (70, 200)])
@pytest.mark.parametrize("left, right", [(0, 0), (9, 5), (-1, 3), (64, -1), (300, 300)])
def test_windows_are_served_by_the_plain_kernels(left, right, causal, rows, keys):
    kind = list(KINDS)[(left + right + causal) % len(KINDS)]
    p = make(kind, rows, keys, causal=causal, window_left=left, window_right=right)
    assert not p.full  # forward() looks at the kernel's name
    check(p)


@some_kinds
def test_dropout_of_nothing_and_first_keys_without_a_window_are_plain(kind):
    p = make(kind, 9, 70, seed=seed_of(1), dropout_p=1e-6, sink_keys=3)
    assert not p.full
    check(p)


@pytest.mark.parametrize("causal", [NONE, TOP_LEFT, BOTTOM_RIGHT, NONE_TOP_LEFT])
@pytest.mark.parametrize("sink_keys", [0, 2, 70])
@pytest.mark.parametrize("left, right", [(0, 0), (1, 0), (7, 3), (63, 1), (64, 64)])
def test_a_window_has_exactly_its_keys(left, right, sink_keys, causal):
    # Equal scores and values of one show which keys have weight.
    p = make("f16", 80, 100, 128, causal=causal)
    p = p.but(window_left=left, window_right=right, sink_keys=sink_keys)
    p = p.but(q=torch.zeros_like(p.q), v=torch.eye(100, 128)[None, None].to(p.q))
    out = forward(p).out[0, 0, :, :100].cpu()
    assert torch.equal(out > 0, seen_by(p)[0, 0])


@pytest.mark.parametrize("window", [2**31 - 1, 2**40])
def test_a_window_beyond_the_lengths_is_no_window(window):
    p = make("f16", 70, 90, causal=NONE)
    q = p.but(window_left=window, window_right=window)
    assert torch.equal(forward(p).out, forward(q).out)


# ------------------------------------------------------------------- bias and mask

FORMS = {
    "one key": lambda b, h, s, t: drawn(b, h, s, 1).expand(b, h, s, t),
    "stride 0 in rows": lambda b, h, s, t: drawn(b, h, 1, t).expand(b, h, s, t),
    "stride 0 in all": lambda b, h, s, t: drawn(1, 1, 1, 1).expand(b, h, s, t),
    "sizes of one": lambda b, h, s, t: drawn(1, 1, 1, 1),
    "key padding": lambda b, h, s, t: drawn(b, 1, 1, t),
    "heads last": lambda b, h, s, t: drawn(b, s, t, h).permute(0, 3, 1, 2),
    "transposed": lambda b, h, s, t: drawn(b, h, t, s).mT,
    "slice of rows": lambda b, h, s, t: drawn(b, h, s, t + 5)[..., :t],
    "odd offset": lambda b, h, s, t: drawn(b, 1, s, t + 7)[..., 3 : t + 3],
    "every third key": lambda b, h, s, t: drawn(b, h, s, 3 * t)[..., 1::3],
}


def as_type(view, dtype):
    """The same strides and offset in another type."""
    base = view.as_strided((view.untyped_storage().nbytes() // 4,), (1,), 0)
    if dtype is torch.bool:
        base = base > -0.5
    return base.to(dtype).as_strided(view.shape, view.stride(), view.storage_offset())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of", ["mask", "bias", "float32"])
def test_any_strides_of_bias_and_mask(of, form):
    halves = [kind for kind, (dtype, _) in KINDS.items() if dtype.itemsize == 2]
    kinds = halves if of == "float32" else list(KINDS)
    kind = kinds[(len(form) + len(of)) % len(kinds)]
    p = make(kind, 35, 77, batch=2, heads=2)
    view = FORMS[form](*p.scores)
    if of == "mask":
        p = p.but(mask=as_type(view, torch.bool))
    else:
        dtype = torch.float32 if of == "float32" else p.q.dtype
        p = p.but(bias=as_type(view, dtype))
    check(p)


@pytest.mark.skipif(DEVICE != "cpu", reason="address space of the host")
@pytest.mark.parametrize("of", ["bias", "mask"])
@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_strides_beyond_2_to_31_elements_are_used_in_place(kind, of):
    # Gigabytes of address space, of which a few pages are ever touched.
    p = make(kind, 35, 77, batch=2, heads=2)
    near = drawn(2, 2, 35, 77)
    near = near > -0.5 if of == "mask" else near.to(p.q.dtype)
    stride = 2**31 + 2**20
    storage = torch.empty(stride + near[0].numel(), dtype=near.dtype)
    far = storage.as_strided(near.shape, (stride, *near.stride()[1:])).copy_(near)
    assert torch.equal(
        forward(p.but(**{of: far})).out, forward(p.but(**{of: near})).out
    )


@pytest.mark.parametrize("keys", [1, 43, 64, 77, 129])
@some_kinds
def test_mask_and_bias_with_any_number_of_keys(kind, keys):
    p = make(kind, 9, keys, 16, heads=2)
    mask = chance(1, 2, 9, keys) < 0.7
    bias = drawn(1, 1, 1, keys).to(p.q.dtype)
    check(p.but(mask=mask, bias=bias, causal=BOTTOM_RIGHT))


@pytest.mark.parametrize("way", ["mask", "bias", "blocks", "window", "spans"])
@some_kinds
def test_rows_that_see_nothing_are_zero(kind, way):
    p = make(kind, 140, 150, heads=2)
    seen = torch.ones(140, 150, dtype=torch.bool, device=DEVICE)
    seen[::3] = False
    if way == "mask":
        p = p.but(mask=seen[None, None])
    elif way == "bias":
        bias = torch.zeros(140, 150, device=DEVICE).masked_fill(~seen, -math.inf)
        p = p.but(bias=bias[None, None].to(p.q.dtype))
    elif way == "blocks":
        dense = torch.tensor([[True, False], [False, False]])[None, None]
        p = p.but(**block_lists(dense), block_q=128, block_k=128)
    elif way == "window":
        p = make(kind, 150, 40, causal=TOP_LEFT, window_left=20)
    else:
        p = p.but(**spans((60, 50, 30), (100, 0, 20), causal=True, keys=150))
    saved = check(p)
    blind = ~seen_by(p).any(-1).to(DEVICE)
    assert blind.any() and not blind.all()
    assert torch.equal(saved.lse == -math.inf, blind)


@pytest.mark.parametrize("way", ["mask", "bias"])
@some_kinds
def test_a_call_that_sees_nothing_is_zero(kind, way):
    p = make(kind, 70, 130)
    if way == "mask":
        p = p.but(mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=DEVICE))
    else:
        p = p.but(bias=torch.full((1, 1, 1, 130), -math.inf).to(p.q))
    saved = check(p)
    assert not saved.out.any() and (saved.lse == -math.inf).all()


@pytest.mark.parametrize("way", ["mask", "bias", "blocks"])
@some_kinds
def test_first_tiles_that_are_not_seen_leave_no_nan(kind, way):
    p = make(kind, 70, 300)
    if way == "mask":
        mask = torch.arange(300, device=DEVICE) >= 290
        p = p.but(mask=mask[None, None, None])
    elif way == "bias":
        bias = torch.zeros(1, 1, 1, 300).to(p.q)
        bias[..., :290] = -math.inf
        p = p.but(bias=bias)
    else:
        dense = torch.tensor([[False, False, True]])[None, None]
        p = p.but(**block_lists(dense), block_q=128, block_k=128)
    check(p)


@pytest.mark.parametrize("value", [-1e4, -1e9, "min"])
@pytest.mark.parametrize(
    "kind, of",
    [*((kind, "own") for kind in KINDS), ("f16", "float32"), ("bf16", "float32")],
)
def test_large_negative_biases_hide_as_in_the_math_path(kind, of, value):
    # As models write padding: the last keys, and whole rows of which nothing is left.
    p = make(kind, 40, 130, heads=2)
    dtype = torch.float32 if of == "float32" else p.q.dtype
    least = torch.finfo(dtype).min
    value = least if value == "min" else max(value, least)
    bias = torch.zeros(1, 1, 40, 130, dtype=dtype, device=DEVICE)
    bias[..., 100:] = value
    bias[:, :, 7:12] = value
    p = p.but(bias=bias)
    saved = forward(p)
    wide = p.q.double() if dtype is torch.float64 else p.q.float()
    scores = (wide @ p.k.to(wide).mT) * p.factor + bias.to(wide)
    want = (scores.softmax(-1) @ p.v.to(wide)).double()
    calm = torch.ones(40, dtype=torch.bool)
    calm[7:12] = False
    own = exact(p).out
    usual = plain_math_path(p.q, p.k[:, :, :100], p.v[:, :, :100], p.dout).out
    # Keys of -1e4 and less have no weight beside others.
    allowed = 2 * error(usual[:, :, calm], own[:, :, calm.numpy()])
    assert error(saved.out[:, :, calm], own[:, :, calm.numpy()]) <= allowed
    # Rows of nothing else: what stays of the scores beside so much is rounded.
    rows = saved.out[:, :, 7:12].double().cpu()
    assert torch.isfinite(rows).all()
    if kind == "f64" and value == least:  # in float64 the clamp leaves the scores
        calm_rows = exact(p.but(bias=None)).out[:, :, 7:12]
        assert error(rows, calm_rows) <= 1e-6
    elif abs(value) * torch.finfo(wide.dtype).eps > 32:  # nothing stays
        mean = p.v.double().mean(2, keepdim=True).cpu()
        close = max(2 * torch.finfo(p.q.dtype).eps, 1e-14)
        assert (rows - mean).norm() <= close * mean.norm() * 5**0.5
    else:
        off = error(want[:, :, 7:12], own[:, :, 7:12])
        eps = torch.finfo(p.q.dtype).eps
        assert error(rows, own[:, :, 7:12]) <= 2 * max(off, eps)


@pytest.mark.parametrize("way", ["mask", "window", "causal", "spans"])
@pytest.mark.parametrize("value", [-(2.0**31), -1e30, "min"])
@pytest.mark.parametrize(
    "kind, of", [("f16", "float32"), ("bf16", "float32"), ("bf16", "own")]
)
def test_large_negative_biases_are_bounded_beside_higher_ones_that_are_hidden(
    kind, of, value, way
):
    # Of whole tiles, whose biases are looked at together: each lane has both.
    p = make(kind, 128, 128, 64, heads=2)
    ways = {
        "mask": dict(mask=(torch.arange(128, device=DEVICE) >= 72)[None, None, None]),
        "window": dict(causal=TOP_LEFT, window_left=30),
        "causal": dict(causal=TOP_LEFT),
        "spans": spans((128,), (72,), rows=128, keys=128),
    }
    p = p.but(**ways[way])
    dtype = torch.float32 if of == "float32" else p.q.dtype
    value = torch.finfo(dtype).min if value == "min" else value
    bias = torch.zeros(p.scores, dtype=dtype, device=DEVICE)
    bias = bias.masked_fill(seen_by(p).to(DEVICE), value)
    results = run(p.but(bias=bias))
    bounded = run(p.but(bias=bias.clamp(min=-(2.0**30))))
    for name, one, other in zip(Results._fields, results, bounded):
        assert one is None or torch.equal(one, other), name
    assert (results.lse == -(2.0**30)).all()
    mean = seen_by(p).double()
    mean = mean / mean.sum(-1, keepdim=True)
    want = mean @ p.v.double().cpu()
    # Observed: 2.1e-4 of fp16 and 1.7e-3 of bf16.
    assert error(results.out, want.numpy()) <= torch.finfo(p.q.dtype).eps


@some_kinds
def test_a_large_bias_of_all_keys_changes_nothing(kind):
    p = make(kind, 40, 130)
    bias = torch.full((1, 1, 1, 1), 128.0).to(p.q)
    # float64 has no yardstick: scores of 128 have roundings of their own.
    saved = check(p.but(bias=bias), allowed=4 if kind == "f64" else 1)
    plain = forward(p)
    assert (saved.lse - plain.lse - 128).abs().max() <= 2e-4
    assert error(saved.out, plain.out.double().cpu().numpy()) <= 1e-3


@some_kinds
def test_infinite_biases_give_nan_as_softmax_does(kind):
    p = make(kind, 40, 130)
    bias = torch.zeros(1, 1, 40, 130).to(p.q)
    bias[:, :, 3, 5] = math.inf
    bias[:, :, 8, 70] = math.nan
    saved = forward(p.but(bias=bias))
    bad = torch.zeros(40, dtype=torch.bool, device=DEVICE)
    bad[[3, 8]] = True
    assert torch.isnan(saved.out[:, :, bad]).all()
    plain = forward(p.but(bias=torch.zeros_like(bias)))
    assert torch.equal(saved.out[:, :, ~bad], plain.out[:, :, ~bad])


def hidden_by(way, p, at):
    """The problem in which rows from 20 do not see the key `at`, others do."""
    rows, keys = p.scores[2:]
    seen = torch.ones(rows, keys, dtype=torch.bool, device=DEVICE)
    seen[20:, at] = False
    if way == "mask":
        return p.but(mask=seen[None, None])
    bias = torch.zeros(1, 1, rows, keys).to(p.q)
    return p.but(bias=bias.masked_fill(~seen, -math.inf))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("way", ["mask", "bias"])
@some_kinds
def test_what_mask_and_bias_hide_does_not_reach_a_row(kind, way, poison):
    p = make(kind, 40, 130)
    for at in (3, 64, 129) if FULL else (64,):
        calm = hidden_by(way, p, at)
        k, v = p.k.clone(), p.v.clone()
        v[:, :, at] = poison
        if way == "mask":
            k[:, :, at] = poison
        want, got = forward(calm), forward(calm.but(k=k, v=v))
        assert torch.equal(got.out[:, :, 20:], want.out[:, :, 20:])
        assert torch.equal(got.lse[..., 20:], want.lse[..., 20:])
        assert not torch.isfinite(got.out[:, :, :20]).any()


@some_kinds
def test_a_bias_of_minus_infinity_is_added_to_a_score_as_in_the_math_path(kind):
    # NaN - inf and inf - inf are NaN; a mask or a bound would not have looked.
    p = hidden_by("bias", make(kind, 40, 130), 64)
    p = p.but(q=p.q.abs() + 0.1)
    for poison in (math.nan, math.inf):
        k = p.k.clone()
        k[:, :, 64] = poison
        assert torch.isnan(forward(p.but(k=k)).out).all()


@pytest.mark.parametrize("way", ["window", "spans", "blocks", "sink_keys"])
@some_kinds
def test_what_lies_outside_of_a_pattern_does_not_reach_a_row(kind, way):
    p = make(kind, 140, 270)
    ways = {
        "window": dict(causal=TOP_LEFT, window_left=30),
        "sink_keys": dict(causal=TOP_LEFT, window_left=30, sink_keys=2),
        "spans": spans((100, 40), (200, 70)),
        "blocks": dict(
            block_lists(torch.tensor([[1, 0, 1], [0, 1, 0]])[None, None] > 0),
            **dict(block_q=128, block_k=128),
        ),
    }
    p = p.but(**ways[way])
    seen = seen_by(p)[0, 0].to(DEVICE)
    want = forward(p)
    for at in (0, 1, 50, 130, 201, 269) if FULL else (1, 130, 201):
        k, v = p.k.clone(), p.v.clone()
        k[:, :, at], v[:, :, at] = math.nan, math.inf
        got = forward(p.but(k=k, v=v))
        assert torch.equal(got.out[:, :, ~seen[:, at]], want.out[:, :, ~seen[:, at]])
        assert not torch.isfinite(got.out[:, :, seen[:, at]]).any()


# -------------------------------------------------------- softcap, ALiBi, sinks, scale


@pytest.mark.parametrize("cap", [0.01, 1.0, 30.0, 1000.0])
@every_kind
def test_softcap_of_any_size(kind, cap):
    p = make(kind, 70, 130, causal=TOP_LEFT)
    check(p.but(softcap=cap))
    check(p.but(softcap=cap, q=p.q * 30))


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("kind", KINDS if FULL else ["bf16", "f32"])
def test_zero_rows_of_any_tensor(kind, name):
    # What brings a bfloat16 row into the range of fp16 is a power of two of its largest
    # element.
    p = alone(name, make(kind, 140, 150, heads=2, heads_k=1))
    for tensor in (p.q, p.k, p.v):
        tensor[:, :, 3] = 0
        tensor[:, :, 129:] = 0
    check(p)
    check(p.but(q=torch.zeros_like(p.q), k=torch.zeros_like(p.k)))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e3, 1e25])
@pytest.mark.parametrize("name", ["bias", "softcap", "alibi", "sink"])
@pytest.mark.parametrize("kind", ["bf16", "bf16_exact", "f32"])
def test_features_of_scores_from_rows_of_any_size(kind, name, size):
    p = alone(name, make(kind, 40, 70, heads=2))
    big = torch.full((40, 1), size, device=DEVICE)
    big[::2] *= 1e-3
    dtype = p.q.dtype
    check(p.but(q=(p.q * big).to(dtype), scale=p.factor / size))
    check(p.but(q=(p.q * size).to(dtype), k=(p.k / size).to(dtype)))


@some_kinds
def test_softcap_of_huge_scores_saturates(kind):
    p = make(kind, 20, 70)
    p = p.but(q=p.q * 100, k=p.k * 100, softcap=5.0)
    saved = check(p)
    assert (saved.lse <= 5 + math.log(70) + 1e-4).all()


@pytest.mark.parametrize("slope", [-0.5, 0.0, 1e-3, 1.0, 1e4])
@some_kinds
def test_alibi_of_any_slope(kind, slope):
    p = make(kind, 70, 200, heads=2, causal=BOTTOM_RIGHT)
    slopes = torch.tensor([slope, slope / 2], dtype=lse_dtype(p.q.dtype), device=DEVICE)
    check(p.but(alibi=slopes))


@pytest.mark.parametrize("causal", [NONE, TOP_LEFT, BOTTOM_RIGHT, NONE_TOP_LEFT])
def test_alibi_counts_from_the_rows_own_key(causal):
    # Slopes that leave weight on the nearest key alone.
    p = make("f16", 50, 80, 80, causal=causal)
    p = p.but(
        q=torch.zeros_like(p.q),
        v=torch.eye(80)[None, None].to(p.q),
        alibi=torch.tensor([100.0], device=DEVICE),
    )
    out = forward(p).out[0, 0].cpu()
    own = torch.arange(50) + (0 if causal in (TOP_LEFT, NONE_TOP_LEFT) else 30)
    assert torch.equal(out, torch.eye(80)[own].half())


@pytest.mark.parametrize("value", [-1e30, -math.inf, -50.0, 20.0, 1e4])
@some_kinds
def test_a_sink_of_any_size(kind, value):
    p = make(kind, 40, 130, heads=2, causal=TOP_LEFT)
    sink = torch.tensor([value, 0.0], dtype=lse_dtype(p.q.dtype), device=DEVICE)
    saved = check(p.but(sink=sink))
    if value < -100:
        plain = forward(p.but(mask=torch.ones(1, 1, 1, 1, device=DEVICE) > 0))
        assert torch.equal(saved.out[:, 0], plain.out[:, 0])
    if value == 1e4:
        assert not saved.out[:, 0].any()


@some_kinds
def test_a_row_that_sees_only_the_sink_has_its_score(kind):
    p = make(kind, 40, 130, heads=2)
    sink = torch.tensor([0.5, -3.0], dtype=lse_dtype(p.q.dtype), device=DEVICE)
    mask = torch.ones(1, 1, 40, 130, dtype=torch.bool, device=DEVICE)
    mask[:, :, 10:20] = False
    saved = check(p.but(sink=sink, mask=mask))
    assert not saved.out[:, :, 10:20].any()
    close = (saved.lse[:, :, 10:20] - sink[:, None]).abs().max()
    assert close <= 1e-6


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-30, 3.0])
@some_kinds
def test_any_scale_with_features(kind, scale):
    p = make(kind, 40, 130, heads=2, scale=scale)
    bias, slopes = drawn(1, 2, 40, 130).to(p.q.dtype), chance(2)
    check(p.but(bias=bias, softcap=4.0, alibi=slopes.to(lse_dtype(p.q.dtype))))


@some_kinds
def test_infinite_scores_with_features_are_as_in_softmax(kind):
    p = make(kind, 4, 65, mask=torch.ones(1, 1, 1, 1, device=DEVICE) > 0)
    p = p.but(q=p.q.abs() + 0.1)
    p.k[0, 0, 3] = -math.inf  # a score of -inf: no weight
    saved = forward(p)
    keep = torch.arange(65, device=DEVICE) != 3
    want = exact(p.but(k=p.k[:, :, keep], v=p.v[:, :, keep]))
    assert error(saved.out, want.out) < 8 * torch.finfo(p.q.dtype).eps
    p.k[0, 0, 3] = math.inf  # a score of +inf: inf - inf
    saved = forward(p)
    assert torch.isnan(saved.out).all() and torch.isnan(saved.lse).all()
    p.k[0, 0, 3] = math.nan
    assert torch.isnan(forward(p).out).all()
    p.k[0, 0, 3], p.q[0, 0, 2] = 0, math.nan
    out = forward(p).out
    assert torch.isnan(out[0, 0, 2]).all() and torch.isfinite(out[0, 0, :2]).all()


# ------------------------------------------------------------------------ the rest


@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0)], ids=str)
@some_kinds
def test_empty_inputs_with_features_give_zero(kind, sizes):
    batch, rows, keys = sizes
    p = make(kind, rows, keys, 8, batch=batch, heads=2)
    wide = lse_dtype(p.q.dtype)
    p = p.but(
        bias=drawn(1, 2, 1, 1).to(p.q.dtype),
        mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE),
        **dict(alibi=chance(2).to(wide), dropout_p=0.2, seed=seed_of(1)),
        **dict(softcap=2.0, causal=TOP_LEFT, window_left=3, sink_keys=1),
    )
    results = run(p)
    assert results.out.shape == (batch, 2, rows, 8) and not results.out.any()
    assert (results.lse == -math.inf).all()
    for grad in (results.dq, results.dk, results.dv, results.dbias):
        assert not grad.any()


@some_kinds
def test_zero_keys_and_a_sink_give_its_score(kind):
    p = make(kind, 4, 0, 8, batch=2, heads=2)
    sink = torch.tensor([0.5, -2.0], dtype=lse_dtype(p.q.dtype), device=DEVICE)
    saved = forward(p.but(sink=sink))
    assert not saved.out.any()
    assert (saved.lse - sink[:, None]).abs().max() <= 1e-6


@some_kinds
def test_results_with_features_repeat_bit_for_bit(kind):
    p = make(kind, 130, 70, heads=2, heads_k=1)
    wide = lse_dtype(p.q.dtype)
    p = p.but(
        bias=drawn(1, 2, 130, 70).to(p.q.dtype),
        **dict(alibi=chance(2).to(wide), sink=drawn(2).to(wide), softcap=5.0),
        **dict(dropout_p=0.2, seed=seed_of(4), causal=BOTTOM_RIGHT, window_left=70),
    )
    for one, other in zip(run(p), run(p)):
        assert torch.equal(one, other)


def test_variants_have_a_row_of_features_for_each_type_and_head_dim():
    rows = [r for r in _ops.ext.variants() if r["symbol"].endswith("_full")]
    have = {(r["pass"], t, r["dim"]) for r in rows for t in r["reads"]}
    passes = "forward", "backward_kv", "backward_q", "backward_bias"
    types = "float16", "bfloat16", "float32", "float64"
    assert have == {(p, t, d) for p in passes for t in types for d in (64, 128, 256)}
