"""flash_attn_varlen_func: each sequence as if it were alone, and nothing beside them.

SPDX-License-Identifier: BSD-3-Clause
"""

import itertools
import math

import pytest
import torch
from helpers import qkv
from helpers.dense import assert_like, band, gradients
from helpers.dense import attention as dense
from helpers.gradients import leaves

import flash_attn_rocm as fa
from flash_attn_rocm import FlashAttnError, _varlen

LENGTHS = {
    "one": ([5], [7]),
    "several": ([5, 1, 9], [7, 3, 4]),
    "nothing among them": ([0, 5, 0, 0, 4], [3, 0, 0, 6, 5]),
    "nothing at all": ([0, 0], [0, 0]),
    "no queries": ([0, 0], [3, 2]),
    "no keys": ([4, 2], [0, 0]),
    "more than a tile": ([70, 66], [65, 80]),
}


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed(lengths, lengths_k, *, extra=0, heads=4, heads_k=2, dtype=torch.float64):
    """q, k, v (tokens, heads, 6), with `extra` tokens behind the last offset."""
    q, _, _ = qkv(1, heads, sum(lengths) + extra or 1, 6, dtype=dtype)
    _, k, v = qkv(1, heads_k, sum(lengths_k) + extra or 1, 6, dtype=dtype, seed=1)
    q = q[0].transpose(0, 1)[: sum(lengths) + extra]
    k, v = (t[0].transpose(0, 1)[: sum(lengths_k) + extra] for t in (k, v))
    return leaves(q, k, v)


def one_by_one(
    tensors, lengths, lengths_k, *, causal=False, window=(-1, -1), **options
):
    """(out (total, H, D), lse (H, total)) of the oracle for each sequence."""
    q, k, v = tensors
    outs, lses = [], []
    parts = zip(q.split(lengths), k.split(lengths_k), v.split(lengths_k))
    for own in parts:
        one = [t.transpose(0, 1).unsqueeze(0) for t in own]
        left, right = window
        length, length_k = len(own[0]), len(own[1])
        right = 0 if causal else right
        seen = band(length, length_k, shift=length_k - length, left=left, right=right)
        out, lse = dense(*one, seen=seen, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def check(tensors, lengths, lengths_k, causal=False, window=(-1, -1), **options):
    q, k, v = tensors
    oracle = dict(options)
    if "alibi_slopes" in oracle:
        oracle["slopes"] = oracle.pop("alibi_slopes")
    out, lse, table = fa.flash_attn_varlen_func(
        q,
        k,
        v,
        offsets(lengths),
        offsets(lengths_k),
        max(lengths, default=0),
        max(lengths_k, default=0),
        causal=causal,
        window_size=window,
        return_attn_probs=True,
        **options,
    )
    assert table is None and out.shape == q.shape and lse.shape == q.shape[1::-1]
    used, used_k = sum(lengths), sum(lengths_k)
    assert not out[used:].any() and (lse[:, used:] == -math.inf).all()
    inner = (q[:used], k[:used_k], v[:used_k])
    want, want_lse = one_by_one(
        inner, lengths, lengths_k, causal=causal, window=window, **oracle
    )
    assert_like(out[:used], want)
    assert_like(lse[:, :used], want_lse)
    dout = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype
    )
    some = want_lse != -math.inf
    got = gradients([out, lse], [dout, torch.ones_like(lse)], tensors)
    ones = torch.ones_like(want_lse[some])
    exact = gradients([want, want_lse[some]], [dout[:used], ones], tensors)
    for one, other, end in zip(got, exact, (used, used_k, used_k)):
        assert_like(one, other, 1e-8)
        assert not one[end:].any()


# ------------------------------------------------------------------ what it computes


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_each_sequence_is_as_if_it_were_alone(name, causal):
    lengths, lengths_k = LENGTHS[name]
    check(packed(lengths, lengths_k), lengths, lengths_k, causal)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("extra", [1, 13])
@pytest.mark.parametrize("name", ["one", "several", "nothing among them"])
def test_tokens_behind_the_last_offset_are_zero_and_change_nothing(name, extra):
    lengths, lengths_k = LENGTHS[name]
    tensors = packed(lengths, lengths_k, extra=extra)
    with torch.no_grad():
        for tensor in tensors[1:]:
            tensor[sum(lengths_k) :] = math.nan
    check(tensors, lengths, lengths_k, True)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("extra", [1, 13])
def test_nan_in_queries_behind_the_last_offset_changes_nothing(extra):
    lengths, lengths_k = LENGTHS["several"]
    tensors = packed(lengths, lengths_k, extra=extra)
    with torch.no_grad():
        tensors[0][sum(lengths) :] = math.nan
    check(tensors, lengths, lengths_k, True)


OPTIONS = {
    "window": dict(window=(2, 1)),
    "left": dict(window=(0, -1)),
    "right": dict(window=(-1, 2)),
    "causal window": dict(causal=True, window=(3, 9)),
    "endless": dict(window=(2**40, 2**40)),
    "cap": dict(softcap=1.5, softmax_scale=None),
    "slopes": dict(alibi_slopes=torch.tensor([0.5, 0.25, 1.0, 0.1])),
    "causal slopes": dict(
        alibi_slopes=torch.tensor([0.5, 0.25, 1.0, 0.1]), causal=True
    ),
}


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("option", OPTIONS)
def test_the_arguments_hold_in_each_sequence(option):
    lengths, lengths_k = LENGTHS["several"]
    options = {k: v for k, v in OPTIONS[option].items() if v is not None}
    check(packed(lengths, lengths_k), lengths, lengths_k, **options)


@pytest.mark.usefixtures("simulated")
def test_dropout_is_that_of_one_long_sequence_and_repeats():
    lengths, lengths_k = LENGTHS["several"]
    tensors = packed(lengths, lengths_k)
    cu = (offsets(lengths), offsets(lengths_k))

    def call(*t):
        torch.manual_seed(2)
        return fa.flash_attn_varlen_func(*t, *cu, 9, 7, dropout_p=0.4)

    assert torch.equal(call(*tensors), call(*tensors))
    assert not torch.equal(
        call(*tensors), fa.flash_attn_varlen_func(*tensors, *cu, 9, 7)
    )
    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)


@pytest.mark.usefixtures("simulated")
def test_the_second_derivative_stays_in_its_sequence():
    lengths, lengths_k = [3, 0, 2], [2, 2, 3]
    tensors = packed(lengths, lengths_k, extra=1)
    cu = (offsets(lengths), offsets(lengths_k))
    slopes = torch.tensor([0.5, 0.25, 1.0, 0.1])

    def call(*t):
        return fa.flash_attn_varlen_func(
            *t, *cu, 3, 3, causal=True, alibi_slopes=slopes
        )

    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_and_any_strides(dtype):
    lengths, lengths_k = LENGTHS["several"]
    wide = torch.randn(15, 3, 2, 8, dtype=torch.float64).to(dtype)
    q, k, v = wide.unbind(1)
    k, v = k[:14], v[:14]
    out = fa.flash_attn_varlen_func(q, k, v, offsets(lengths), offsets(lengths_k), 9, 7)
    want, _ = one_by_one((q, k, v), lengths, lengths_k)
    assert out.dtype is dtype and out.shape == q.shape
    assert_like(out, want, 20 * torch.finfo(dtype).eps)


@pytest.mark.usefixtures("simulated")
def test_one_slope_per_head_may_come_by_sequence_if_there_is_one():
    tensors, cu = packed([5], [7]), (offsets([5]), offsets([7]))
    slopes = torch.rand(1, 4)
    one = fa.flash_attn_varlen_func(*tensors, *cu, 5, 7, alibi_slopes=slopes)
    other = fa.flash_attn_varlen_func(*tensors, *cu, 5, 7, alibi_slopes=slopes[0])
    assert torch.equal(one, other)


# ----------------------------------------------------------------------------- spans


def spans_by_hand(lengths, lengths_k, totals, causal, window):
    """Which query sees which key, (total_q, total_k), by loops."""
    seen = torch.zeros(*totals, dtype=torch.bool)
    begin, begin_k = offsets(lengths).tolist(), offsets(lengths_k).tolist()
    for b, (n, m) in enumerate(zip(lengths, lengths_k)):
        for i, j in itertools.product(range(n), range(m)):
            distance = j - (i + m - n)
            left, right = window[0], 0 if causal else window[1]
            inside = (left < 0 or distance >= -left) and (
                right < 0 or distance <= right
            )
            seen[begin[b] + i, begin_k[b] + j] = inside
    return seen


@pytest.mark.parametrize("seed", range(60))
def test_spans_say_who_sees_whom_and_never_go_back(seed):
    generator = torch.Generator().manual_seed(seed)

    def number(high):
        return int(torch.randint(high, (), generator=generator))

    batch = number(5)
    lengths, lengths_k = ([number(7) for _ in range(batch)] for _ in range(2))
    totals = (sum(lengths) + number(4), sum(lengths_k) + number(4))
    window, causal = (number(6) - 1, number(6) - 1), bool(number(2))
    cu = (offsets(lengths), offsets(lengths_k))
    span_q, span_k = _varlen.spans(*cu, *totals, causal, window)
    assert span_q.dtype is span_k.dtype is torch.int32
    assert span_q.shape == (totals[0], 4) and span_k.shape == (totals[1], 2)
    seen = spans_by_hand(lengths, lengths_k, totals, causal, window)
    query, key = torch.arange(totals[0]), torch.arange(totals[1])
    assert torch.equal((span_q[:, :1] <= key) & (key <= span_q[:, 1:2]), seen)
    assert torch.equal((span_k[:, :1] <= query) & (query <= span_k[:, 1:2]), seen.T)
    for span, other in ((span_q, totals[1]), (span_k, totals[0])):
        first, last = span[:, 0], span[:, 1]
        assert (first.diff() >= 0).all() and (last.diff() >= 0).all()
        assert (last >= first - 1).all() and not span_q[:, 3].any()
        assert (first >= 0).all() and (first <= other).all() and (last < other).all()
    for b, (n, m) in enumerate(zip(lengths, lengths_k)):
        rows = slice(int(cu[0][b]), int(cu[0][b + 1]))
        own = torch.arange(rows.start, rows.stop) + span_q[rows, 2]
        assert torch.equal(own - cu[1][b], torch.arange(n) + m - n)


@pytest.mark.parametrize(
    "bad", [[0, 9, 4, 12], [3, 5], [0, 100, 200], [-5, 4], [2**31 - 1, -(2**31)], [7]]
)
def test_spans_of_nonsense_stay_inside_of_the_tensors(bad):
    # A captured graph may meet any offsets, and nobody looks at them there.
    wrong = torch.tensor(bad, dtype=torch.int32)
    right = torch.zeros_like(wrong)
    for cu in ((wrong, right), (right, wrong), (wrong, wrong)):
        span_q, span_k = _varlen.spans(*cu, 10, 12, True, (2, 0))
        for span, other in ((span_q, 12), (span_k, 10)):
            first, last = span[:, 0], span[:, 1]
            assert (first.diff() >= 0).all() and (last.diff() >= 0).all()
            assert (last >= first - 1).all()
            assert (first >= 0).all() and (last < other).all()


# -------------------------------------------------------------------------- refusals

Q, K, V = (t.detach() for t in packed([5, 4], [6, 3]))
CU, CU_K = offsets([5, 4]), offsets([6, 3])
REFUSED = {
    "q 4-D": ("q", dict(q=Q[None])),
    "k dtype": ("k", dict(k=K.float())),
    "k heads": ("k", dict(q=Q[:, :3])),
    "v length": ("v", dict(v=V[:5])),
    "offsets a list": ("cu_seqlens_q", dict(cu_seqlens_q=[0, 5, 9])),
    "offsets None": ("cu_seqlens_k", dict(cu_seqlens_k=None)),
    "offsets int64": ("cu_seqlens_q", dict(cu_seqlens_q=CU.long())),
    "offsets float": ("cu_seqlens_k", dict(cu_seqlens_k=CU_K.float())),
    "offsets 2-D": ("cu_seqlens_q", dict(cu_seqlens_q=CU[None])),
    "no offsets": ("cu_seqlens_q", dict(cu_seqlens_q=CU[:0])),
    "offsets on meta": ("cu_seqlens_k", dict(cu_seqlens_k=CU_K.to("meta"))),
    "unequal numbers": ("cu_seqlens_k", dict(cu_seqlens_k=offsets([9]))),
    "offsets that decrease": ("cu_seqlens_q", dict(cu_seqlens_q=offsets([9, -4]))),
    "negative offsets": ("cu_seqlens_k", dict(cu_seqlens_k=offsets([-2, 3]))),
    "offsets that begin late": ("cu_seqlens_q", dict(cu_seqlens_q=CU + 1)),
    "offsets beyond q": ("cu_seqlens_q", dict(cu_seqlens_q=offsets([5, 5]))),
    "offsets beyond k": ("cu_seqlens_k", dict(cu_seqlens_k=offsets([6, 4]))),
    "max a float": ("max_seqlen_q", dict(max_seqlen_q=5.0)),
    "max negative": ("max_seqlen_k", dict(max_seqlen_k=-1)),
    "max a float tensor": ("max_seqlen_q", dict(max_seqlen_q=torch.tensor(5.0))),
    "max a 1-D tensor": ("max_seqlen_k", dict(max_seqlen_k=CU_K[1:2])),
    "max a bool tensor": ("max_seqlen_k", dict(max_seqlen_k=torch.tensor(True))),
    "slopes by sequence": ("alibi_slopes", dict(alibi_slopes=torch.ones(2, 4))),
    "slopes heads": ("alibi_slopes", dict(alibi_slopes=torch.ones(3))),
    "window": ("window_size", dict(window_size=(1, -3))),
    "dropout": ("dropout_p", dict(dropout_p=1.0)),
    "softcap": ("softcap", dict(softcap=-1.0)),
    "scale": ("softmax_scale", dict(softmax_scale=math.nan)),
    "causal": ("causal", dict(causal="yes")),
}
GOOD = dict(
    q=Q, k=K, v=V, cu_seqlens_q=CU, cu_seqlens_k=CU_K, max_seqlen_q=5, max_seqlen_k=6
)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses_by_name(name):
    argument, changes = REFUSED[name]
    before = fa.status()["counters"]
    with pytest.raises(FlashAttnError, match=rf"^{argument}: expected .*, got "):
        fa.flash_attn_varlen_func(**{**GOOD, **changes})
    assert fa.status()["counters"] == before


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_the_longest_may_be_tensors_and_are_not_read(kind):
    longest = (CU[1:] - CU[:-1]).max().to(kind)
    # One on "meta" has nothing to read.
    changes = dict(max_seqlen_q=longest, max_seqlen_k=longest.to("meta"))
    out = fa.flash_attn_varlen_func(**{**GOOD, **changes})
    assert torch.equal(out, fa.flash_attn_varlen_func(**GOOD))


@pytest.mark.usefixtures("simulated")
def test_offsets_are_looked_at_once_until_they_change(monkeypatch):
    looked = []
    cu = CU.clone()
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda t: looked.append(t) or t.numpy().tolist()
    )
    for _ in range(3):
        fa.flash_attn_varlen_func(**{**GOOD, "cu_seqlens_q": cu, "cu_seqlens_k": cu})
    assert len(looked) == 1
    cu[2] = 4
    with pytest.raises(FlashAttnError, match=r"^cu_seqlens_q: .* decrease, got 4"):
        fa.flash_attn_varlen_func(**{**GOOD, "cu_seqlens_q": cu})
    assert len(looked) == 2


@pytest.mark.usefixtures("simulated")
def test_offsets_that_die_leave_nothing_behind():
    before = len(_varlen._judged)
    for _ in range(5):
        cu = CU.clone()
        fa.flash_attn_varlen_func(**{**GOOD, "cu_seqlens_q": cu})
        del cu
    assert len(_varlen._judged) <= before + 1  # CU_K


@pytest.mark.usefixtures("simulated")
def test_offsets_of_inference_mode_are_looked_at():
    with torch.inference_mode():
        good, bad = CU.clone(), CU.clone() + 1
        out = fa.flash_attn_varlen_func(**{**GOOD, "cu_seqlens_q": good})
        with pytest.raises(FlashAttnError, match=r"^cu_seqlens_q"):
            fa.flash_attn_varlen_func(**{**GOOD, "cu_seqlens_q": bad})
    assert torch.equal(out.clone(), fa.flash_attn_varlen_func(**GOOD))


# -------------------------------------------------------------------------- compiled


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_compiles_in_one_graph(backend):
    torch._dynamo.reset()
    tensors = packed([5, 4], [6, 3], extra=2)

    def call(q, k, v, cu_q, cu_k):
        return fa.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 5, 6, causal=True, window_size=(3, 0)
        )

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for lengths, lengths_k in (([5, 4], [6, 3]), ([2, 6], [0, 7])):
        cu = (offsets(lengths), offsets(lengths_k))
        got, want = compiled(*tensors, *cu), call(*tensors, *cu)
        assert torch.equal(got, want)
        one = torch.autograd.grad(got.square().sum(), tensors)
        other = torch.autograd.grad(want.square().sum(), tensors)
        assert all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.usefixtures("simulated")
def test_tiles_are_those_of_the_sequences():
    lengths = [200, 0, 300]
    q, k, v = (t.detach() for t in packed(lengths, lengths, heads=2, heads_k=2))
    cu = offsets(lengths)
    fa.flash_attn_varlen_func(q, k, v, cu, cu, 300, 300)
    # 4 tiles of 128 rows: within the first sequence, across, within the second. Keys
    # 0 to 199 lie in 4 tiles of 64, 200 to 499 in 5, all in 8.
    assert fa.last_call().tiles == 2 * (4 + 8 + 5 + 5)
