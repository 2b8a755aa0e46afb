"""What tests of features trust: the replay of dropout, the covering rows, the exact
results and the measures, held against published numbers, loops and other libraries.

SPDX-License-Identifier: BSD-3-Clause
"""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import BOTTOM_RIGHT, NONE, TOP_LEFT, stock_sdpa
from helpers.combinations import DIMENSIONS, allowed, build, covered, covering, name_of
from helpers.exact import error
from helpers.features import (
    GRADIENTS,
    NONE_TOP_LEFT,
    Features,
    Results,
    attend,
    block_lists,
    differentiated,
    exact,
    lse_error,
    math_path,
    problem,
    ratios,
    seed_of,
    seen_by,
    spans,
)
from helpers.philox import halves, keep_of, keep_scale, kept, philox
from torch.nn.attention import SDPBackend, sdpa_kernel

ROWS = covering(DIMENSIONS, allowed, seed=7)

# ------------------------------------------------------------------------- dropout

# Random123, tests/kat_vectors: counter, key, words.
VECTORS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, words", VECTORS)
def test_philox_gives_the_published_words(counter, key, words):
    assert tuple(int(x) for x in philox(counter, key)) == words
    together = philox(*([np.full((2, 3), x) for x in counter],), key)
    assert all((x == word).all() for x, word in zip(together, words))


@pytest.mark.parametrize("seed", [(0, 0), (-3, 2**40 + 5), (2**63 - 1, -1)])
def test_each_weight_has_the_half_word_of_its_indices(seed):
    _, heads, _, keys = sizes = 2, 3, 5, 200
    made = halves(seed, sizes)
    for b, h, q, k in itertools.product((0, 1), (0, 2), (0, 4), range(0, keys, 7)):
        counter = ((k >> 6) * 8 + (k & 7), q, b * heads + h, seed[1] % 2**32)
        words = philox(counter, (seed[0] % 2**32, (seed[0] >> 32) % 2**32))
        n = (k >> 3) & 7
        half = int(words[n // 2]) >> 16 * (n % 2) & 0xFFFF
        assert int(made[b, h, q, k]) == half - 65536 * (half >> 15)


@pytest.mark.parametrize("dropout_p", [0.0, 1e-6, 0.1, 0.5, 0.999, 1 - 1e-9])
def test_the_kept_part_is_that_of_p(dropout_p):
    share = kept((11, 3), dropout_p, (2, 2, 100, 640)).double().mean()
    want = keep_of(dropout_p) / 65536
    assert abs(want - (1 - dropout_p)) <= 1 / 65536
    assert abs(share - want) <= 4 * math.sqrt(want * (1 - want) / 256000)
    assert keep_scale(dropout_p) * want == 1


def test_another_seed_offset_or_head_gives_another_mask():
    sizes = 1, 2, 20, 64
    masks = [
        kept(seed, 0.5, sizes) for seed in ((1, 0), (2, 0), (1, 1), (2**32 + 1, 0))
    ]
    masks += [masks[0].flip(1)]
    for one, other in itertools.combinations(masks, 2):
        assert 0.4 < (one == other).double().mean() < 0.6


# ------------------------------------------------------------------- covering rows


@pytest.mark.parametrize("strength", [2, 3])
def test_rows_cover_every_combination_that_the_rule_lets_stand(strength):
    names = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1), "d": (0, 1, 2, 3)}

    def rule(row):
        return not (row.get("a") == 2 and row.get("c") == 1)

    rows = covering(names, rule, strength=strength)
    assert all(map(rule, rows)) and all(set(row) == set(names) for row in rows)
    have = set().union(*(covered(row, strength) for row in rows))
    for chosen in itertools.combinations(names, strength):
        for values in itertools.product(*map(names.get, chosen)):
            part = dict(zip(chosen, values))
            assert (frozenset(part.items()) in have) == rule(part)
    assert rows == covering(names, rule, strength=strength)
    every = math.prod(map(len, names.values()))
    assert len(rows) < every / 2 if strength == 2 else len(rows) < every


def test_a_combination_without_a_row_is_an_error():
    def rule(row):  # a = 0 asks for c = 0, b = 0 for c = 1
        return (row.get("a"), row.get("c")) != (0, 1) and (
            row.get("b"),
            row.get("c"),
        ) != (0, 0)

    with pytest.raises(ValueError, match="no row has"):
        covering({"a": (0, 1), "b": (0, 1), "c": (0, 1)}, rule)


def test_the_rows_of_features_are_few_and_have_names_of_their_own():
    assert len(ROWS) <= 90  # 8 x 7 pairs of the two largest dimensions
    assert len({name_of(row) for row in ROWS}) == len(ROWS)


# ------------------------------------------------------------------------- the exact


def loops(p, b, h, i):
    """Scores that softmax sees of one row, by the definition: key -> score."""
    f, (rows, keys) = p.features, p.scores[2:]
    own = i if f.causal in (TOP_LEFT, NONE_TOP_LEFT) else i + keys - rows
    group = p.q.size(1) // p.k.size(1)
    found = {}
    for j in range(keys):
        if f.causal in (TOP_LEFT, BOTTOM_RIGHT) and j > own:
            continue
        if f.causal in (NONE, NONE_TOP_LEFT) and 0 <= f.window_right < j - own:
            continue
        if 0 <= f.window_left < own - j and j >= f.sink_keys:
            continue
        x = float(p.q[b, h, i].double() @ p.k[b, h // group, j].double()) * p.factor
        if f.softcap:
            x = f.softcap * math.tanh(x / f.softcap)
        if f.alibi is not None:
            slope = f.alibi[h] if f.alibi.dim() == 1 else f.alibi[b, h]
            x -= float(slope) * abs(own - j)
        if f.bias is not None:
            x += float(f.bias.expand(p.scores)[b, h, i, j])
        if f.mask is not None and not f.mask.expand(p.scores)[b, h, i, j]:
            continue
        if f.blocks is not None:
            lists = f.blocks[b % f.blocks.size(0), h % f.blocks.size(1)]
            count, *blocks = lists[i // f.block_q].tolist()
            if j // f.block_k not in blocks[:count]:
                continue
        if x > -math.inf:
            found[j] = x
    return found


@pytest.mark.parametrize("row", ROWS[::3], ids=name_of)
def test_exact_rows_are_those_of_loops(row):
    p = build(dict(row, kind="f64"))
    f, own = p.features, exact(p)
    group = p.q.size(1) // p.k.size(1)
    factor = None
    if p.drops:
        factor = kept(f.seed, f.dropout_p, p.scores)
    b, h = p.scores[0] - 1, p.scores[1] - 1
    for i in {0, p.scores[2] // 2, p.scores[2] - 1}:
        scores = loops(p, b, h, i)
        assert seen_by(p)[b, h, i].nonzero().flatten().tolist() == sorted(scores)
        total = sum(map(math.exp, scores.values()))
        if f.sink is not None:
            total += math.exp(f.sink[h])
        out = torch.zeros(p.v.size(3), dtype=torch.float64)
        for j, x in scores.items():
            times = 1.0
            if factor is not None:
                times = float(factor[b, h, i, j]) * keep_scale(f.dropout_p)
            out += math.exp(x) / total * times * p.v[b, h // group, j].double()
        assert np.abs(out.numpy() - own.out[b, h, i]).max() < 1e-13
        lse = math.log(total) if total else -math.inf
        assert own.lse[b, h, i] == pytest.approx(lse, abs=1e-12)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_exact_gradients_are_those_of_autograd(row):
    p = build(row)
    own, found = exact(p), differentiated(p, torch.float64, torch.float64)
    for name in ("out", *GRADIENTS):
        want, got = getattr(own, name), getattr(found, name)
        assert (want is None) == (got is None), name
        if want is not None:
            assert tuple(got.shape) == want.shape
            assert np.abs(got.numpy() - want).max(initial=0) < 1e-11, name
    blind = own.lse == -math.inf
    assert np.array_equal(found.lse.numpy() == -math.inf, blind)
    assert np.abs(found.lse.numpy()[~blind] - own.lse[~blind]).max(initial=0) < 1e-12


def own_inputs(p):
    return p.q, p.k, p.v, p.features.bias, p.features.sink


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_attend_is_stock_attention(kind, causal):
    p = problem(torch.float64, 9, 13, 8, heads=4, heads_k=2, batch=2)
    generator = torch.Generator().manual_seed(1)
    given = {"causal": TOP_LEFT} if causal else {}
    seen = torch.ones(9, 13, dtype=torch.bool).tril() if causal else None
    mask = seen
    if kind == "bool":
        own = torch.rand(2, 1, 9, 13, generator=generator) < 0.7
        own[..., 0] = True
        given["mask"], mask = own, own if seen is None else own & seen
    if kind == "float":
        own = torch.randn(1, 4, 9, 13, generator=generator, dtype=torch.float64)
        given["bias"] = own
        mask = own if seen is None else own.masked_fill(~seen, -math.inf)
    p = p.but(**given)
    with sdpa_kernel(SDPBackend.MATH):
        want = stock_sdpa(p.q, p.k, p.v, attn_mask=mask, enable_gqa=True)
    assert (attend(p, *own_inputs(p))[0] - want).abs().max() < 1e-14


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_attend_is_flex_attention():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    p = problem(torch.float64, 12, 16, 8, heads=4, batch=2, heads_k=4)
    generator = torch.Generator().manual_seed(2)
    slopes = torch.rand(4, generator=generator, dtype=torch.float64)
    bias = torch.randn(2, 1, 12, 16, generator=generator, dtype=torch.float64)
    p = p.but(
        **dict(alibi=slopes, bias=bias, softcap=1.5, causal=BOTTOM_RIGHT),
        **dict(window_left=5),
    )

    def score(x, b, h, i, j):
        x = 1.5 * torch.tanh(x / 1.5) + bias[b, 0, i, j]
        return x - slopes[h] * (i + 4 - j).abs()

    def mask(b, h, i, j):
        return (j <= i + 4) & (j >= i + 4 - 5)

    block = flex.create_block_mask(mask, None, None, 12, 16, device="cpu")
    want = flex.flex_attention(p.q, p.k, p.v, score_mod=score, block_mask=block)
    assert (attend(p, *own_inputs(p))[0] - want).abs().max() < 1e-13


def test_block_lists_have_what_the_table_has():
    generator = torch.Generator().manual_seed(3)
    dense = torch.rand(2, 3, 4, 5, generator=generator) < 0.4
    made = block_lists(dense)
    assert made["blocks"].shape == (2, 3, 4, 6) and made["blocks_t"].shape == (
        2,
        3,
        5,
        5,
    )
    for b, h, i in itertools.product(range(2), range(3), range(4)):
        count, *rest = made["blocks"][b, h, i].tolist()
        assert rest[:count] == dense[b, h, i].nonzero().flatten().tolist()
    for b, h, j in itertools.product(range(2), range(3), range(5)):
        count, *rest = made["blocks_t"][b, h, j].tolist()
        assert rest[:count] == dense[b, h, :, j].nonzero().flatten().tolist()


@pytest.mark.parametrize("left, right", [(-1, -1), (3, 1), (0, 0), (2, -1), (-1, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_spans_see_what_each_sequence_sees(causal, left, right):
    lengths_q, lengths_k = (5, 0, 7, 1, 9), (8, 3, 4, 0, 9)
    rows, keys = sum(lengths_q) + 2, sum(lengths_k) + 3
    made = spans(
        *(lengths_q, lengths_k),
        **dict(causal=causal, left=left, right=right, rows=rows, keys=keys),
    )
    p = problem(torch.float64, rows, keys, 2, **made)
    seen, start_q, start_k = torch.zeros(rows, keys, dtype=torch.bool), 0, 0
    for n_q, n_k in zip(lengths_q, lengths_k):
        one = Features(
            causal=BOTTOM_RIGHT if causal else NONE,
            window_left=left,
            window_right=right,
        )
        alone = seen_by(problem(torch.float64, n_q, n_k, 2).but(**one._asdict()))
        seen[start_q : start_q + n_q, start_k : start_k + n_k] = alone[0, 0]
        start_q, start_k = start_q + n_q, start_k + n_k
    assert torch.equal(seen_by(p)[0, 0], seen)
    span_q, span_k = made["span_q"].long(), made["span_k"].long()
    i = torch.arange(rows)[:, None]
    assert torch.equal((span_k[:, 0] <= i) & (i <= span_k[:, 1]), seen)
    for span in (span_q[:, :2], span_k):
        assert (span[1:] >= span[:-1]).all()
        assert (span[:, 1] >= span[:, 0] - 1).all()


# ------------------------------------------------------------------------- measures


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
def test_the_yardstick_passes_and_three_times_its_error_fails(kind):
    row = dict(ROWS[0], kind=kind, bias="full", sink=True, dlse=True, blocks="none")
    p = build(row)
    own, usual = exact(p), math_path(p)
    results = Results(*usual[:2], *usual[2:])
    passed = ratios(p, results)
    assert max(passed.values()) <= 0.51
    for name in ("out", *GRADIENTS):
        want = torch.from_numpy(getattr(own, name))
        # Of few numbers the math path's error may be far below the floor.
        times = 3 * max(1.0, 0.5 / passed[name])
        off = want + times * (getattr(usual, name).double() - want)
        found = ratios(p, results._replace(**{name: off}))
        assert found[name] > 1 and max(found.values()) == found[name]


def test_the_measure_of_the_lse_sees_a_wrong_one():
    p = build(dict(ROWS[0], kind="f32", mask="blind", sink=False, lengths=(70, 130)))
    own = exact(p)
    lse = torch.from_numpy(own.lse.astype(np.float32))
    assert lse_error(p, lse, own) < 1
    assert lse_error(p, lse + 3e-4, own) > 1
    assert lse_error(p, lse.nan_to_num(neginf=-1e30), own) == math.inf


def test_math_path_of_float64_is_exact_to_its_eps():
    p = build(dict(ROWS[0], kind="f64"))
    assert error(math_path(p).out, exact(p).out) < 1e-15


def test_a_problem_says_which_kernels_serve_it():
    p = problem(torch.float16, 9, 9, 40)
    assert not p.full and not p.but(window_left=3, causal=TOP_LEFT).full
    assert not p.but(sink_keys=2).full
    assert p.but(sink_keys=2, window_left=3).full
    assert p.but(softcap=1.0).full
    assert not p.but(dropout_p=1e-6, seed=seed_of(1)).full
    assert p.but(dropout_p=0.1, seed=seed_of(1)).full
