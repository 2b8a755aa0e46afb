"""Every row of variants.def, by regime, executed as machine code.

Each case calls the C entry with outputs that lie inside larger buffers full of a
canary value, so that a stray store near them is seen. The reference is attention in
float64, the yardstick PyTorch's math path in float16 (docs/accuracy.md allows twice
its error; most cases here must keep to 1.4 times).

FA_TEST_DEVICE=cuda runs the same cases on a GPU, with FLASH_ATTN_ROCM_DEVICE=standin
on an NVIDIA card; without it they run on the simulated gfx906.

SPDX-License-Identifier: BSD-3-Clause
"""

import math
import os

import pytest
import torch
from helpers import (
    BOTTOM_RIGHT,
    NONE,
    TOP_LEFT,
    error_ratio,
    fp64_attention,
    guarded,
    lse_ratio,
    math_attention,
    needs_simulator,
    relative_error,
    run_forward,
)

import flash_attn_rocm as fa
from flash_attn_rocm import _ops

DEVICE = os.environ.get("FA_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    pytestmark = needs_simulator

ROWS, KEYS = 128, 64  # query rows of a workgroup, keys of a step
CAUSAL = {"none": NONE, "top-left": TOP_LEFT, "bottom-right": BOTTOM_RIGHT}

# (head dim, whether loads can be wide) for each row of variants.def; the first is
# the bucket's own head dim, or for narrow loads one that is not a multiple of 8.
VARIANTS = {
    "fa_fwd_f16_d64_plain": (64, True),
    "fa_fwd_f16_d64_plain_narrow": (61, False),
    "fa_fwd_f16_d128_plain": (128, True),
    "fa_fwd_f16_d128_plain_narrow": (127, False),
}
LENGTHS = [
    (1, 1),
    (1, KEYS + 1),
    (ROWS - 1, KEYS - 1),
    (ROWS, KEYS),
    (ROWS + 1, KEYS + 1),
    (37, 2 * KEYS + 5),
]


def inputs(heads, heads_k, length, length_k, dim, *, batch=1, seed=0):
    """Normal q, k, v on the test's device."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, h, s, dim, generator=generator).half().to(DEVICE)
        for h, s in ((heads, length), (heads_k, length_k), (heads_k, length_k))
    )


def forward(q, k, v, symbol, scale=None, causal=NONE):
    """(out, lse) of the kernel `symbol`, with canaries checked around both."""
    out, check_out = guarded(q.shape, q.dtype, device=DEVICE)
    lse, check_lse = guarded(q.shape[:3], torch.float32, device=DEVICE)
    run_forward(q, k, v, out, lse, scale, causal)
    assert fa.last_call().kernel == symbol
    check_out()
    check_lse()
    return out, lse


def check(q, k, v, symbol, scale=None, causal=NONE, *, allowed=0.7):
    """Runs the kernel and holds out and LSE against float64."""
    out, lse = forward(q, k, v, symbol, scale, causal)
    # Observed: up to 0.69, and up to 0.44 for the LSE.
    ratio = error_ratio(out, q, k, v, scale, causal)
    assert ratio <= allowed, f"{ratio:.2f} of what docs/accuracy.md allows"
    assert lse_ratio(lse, q, k, v, scale, causal) <= 1
    blind = lse == -math.inf
    assert torch.equal(out[blind], torch.zeros_like(out[blind]))
    return out, lse


def test_variants_here_are_all_that_ship():
    assert [row["symbol"] for row in _ops.ext.variants()] == list(VARIANTS)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("length,length_k", LENGTHS)
@pytest.mark.parametrize("symbol", VARIANTS)
def test_lengths_around_a_tile_are_accurate(symbol, length, length_k, causal):
    dim = VARIANTS[symbol][0]
    q, k, v = inputs(2, 1, length, length_k, dim)
    check(q, k, v, symbol, causal=CAUSAL[causal])


@pytest.mark.parametrize("dim", [8, 16, 24, 40, 56])
def test_wide_loads_serve_every_multiple_of_8_below_64(dim):
    q, k, v = inputs(1, 1, 70, 130, dim)
    check(q, k, v, "fa_fwd_f16_d64_plain", causal=TOP_LEFT)


@pytest.mark.parametrize("dim", [72, 80, 96, 120])
def test_wide_loads_serve_every_multiple_of_8_below_128(dim):
    q, k, v = inputs(1, 1, 70, 130, dim)
    check(q, k, v, "fa_fwd_f16_d128_plain", causal=TOP_LEFT)


@pytest.mark.parametrize("dim", [1, 2, 5, 7, 33, 63, 65, 77, 100, 127])
def test_narrow_loads_serve_every_other_head_dim(dim):
    q, k, v = inputs(1, 1, 70, 130, dim)
    bucket = 64 if dim <= 64 else 128
    check(q, k, v, f"fa_fwd_f16_d{bucket}_plain_narrow", causal=TOP_LEFT)


@pytest.mark.parametrize("symbol", VARIANTS)
def test_rows_that_see_no_key_are_zero(symbol):
    # Bottom-right with more queries than keys: the first 140 rows see nothing.
    q, k, v = inputs(1, 1, 150, 10, VARIANTS[symbol][0])
    out, lse = check(q, k, v, symbol, causal=BOTTOM_RIGHT)
    assert (lse[..., :140] == -math.inf).all() and (out[..., :140, :] == 0).all()
    assert torch.isfinite(lse[..., 140:]).all()


@pytest.mark.parametrize("symbol", VARIANTS)
def test_huge_scores_do_not_overflow(symbol):
    q, k, v = inputs(1, 1, 70, 130, VARIANTS[symbol][0])
    check(q * 100, k * 100, v, symbol)


@pytest.mark.parametrize("symbol", VARIANTS)
def test_scores_near_the_largest_possible_do_not_overflow(symbol):
    q, k, v = inputs(1, 1, 70, 130, VARIANTS[symbol][0])
    big = torch.finfo(torch.float16).max
    out, lse = forward(q.sign() * big, k.sign() * big, v, symbol)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    # With powers of two every sum of fp32 is exact, so the winners are known.
    q, k = q.sign() * 2.0**15, k.sign() * 2.0**15
    check(q, k, v, symbol)


@pytest.mark.parametrize("symbol", VARIANTS)
def test_equal_scores_average_the_values(symbol):
    q, k, v = inputs(1, 1, 70, 130, VARIANTS[symbol][0])
    _, lse = check(torch.zeros_like(q), k, v, symbol)
    assert (lse - math.log(130)).abs().max() < 1e-5


def check_small_weights(symbol):
    """One key takes nearly all the weight and has no value; 640 others, of weights
    about 2^-18 (below fp16's smallest normal number), make the output."""
    q, k, v = inputs(1, 1, 5, 641, VARIANTS[symbol][0])
    q[..., 1:], q[..., 0] = 0, 4
    k[..., 0] *= 0.1
    k[:, :, 0, 0] = 12.5 * math.log(2) / 4 * 8
    v[:, :, 0] = 0
    # Observed: 0.69 to 0.79; unscaled weights give 8 to 14.
    check(q, k, v * 1000, symbol, scale=0.18, allowed=1)


@pytest.mark.parametrize("symbol", VARIANTS)
def test_small_weights_keep_their_precision(symbol):
    check_small_weights(symbol)


@pytest.mark.parametrize("symbol", VARIANTS)
def test_values_of_one_give_one(symbol):
    q, k, v = inputs(1, 1, 70, 130, VARIANTS[symbol][0])
    out, _ = forward(q, k, torch.ones_like(v), symbol)
    assert (out - 1).abs().max() <= 2**-10


@pytest.mark.parametrize("symbol", VARIANTS)
@pytest.mark.parametrize("heads,heads_k", [(4, 1), (4, 2), (3, 3)])
def test_grouped_heads_equal_repeated_heads(symbol, heads, heads_k):
    q, k, v = inputs(heads, heads_k, 70, 65, VARIANTS[symbol][0], batch=2)
    out, lse = check(q, k, v, symbol, causal=TOP_LEFT)
    k, v = (t.repeat_interleave(heads // heads_k, 1) for t in (k, v))
    again, again_lse = forward(q, k, v, symbol, causal=TOP_LEFT)
    assert torch.equal(out, again) and torch.equal(lse, again_lse)


@pytest.mark.parametrize("symbol", VARIANTS)
def test_layout_does_not_change_the_answer(symbol):
    q, k, v = inputs(2, 2, 70, 65, VARIANTS[symbol][0], batch=2)
    out, lse = forward(q, k, v, symbol)
    for order in [(0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)]:
        back = [order.index(d) for d in range(4)]
        for which in range(3):
            mixed = [q, k, v]
            mixed[which] = mixed[which].permute(order).contiguous().permute(back)
            assert mixed[which].stride() != q.stride()
            again, again_lse = forward(*mixed, symbol)
            assert torch.equal(out, again) and torch.equal(lse, again_lse)


@pytest.mark.parametrize("dim", [64, 128])
def test_misaligned_storage_takes_narrow_loads_with_the_same_bits(dim):
    q, k, v = inputs(1, 1, 70, 65, dim)
    out, lse = forward(q, k, v, f"fa_fwd_f16_d{dim}_plain")
    for which in range(3):
        shifted = [q, k, v]
        storage = torch.zeros(shifted[which].numel() + 1, dtype=q.dtype, device=DEVICE)
        view = storage[1:].view(shifted[which].shape)
        shifted[which] = view.copy_(shifted[which])
        again, again_lse = forward(*shifted, f"fa_fwd_f16_d{dim}_plain_narrow")
        assert torch.equal(out, again) and torch.equal(lse, again_lse)


@pytest.mark.parametrize("symbol", VARIANTS)
def test_expanded_keys_and_values_need_no_copy(symbol):
    q, k, v = inputs(2, 1, 70, 65, VARIANTS[symbol][0], batch=2)
    shape = (2, 2, 65, q.size(3))
    check(q, k[:1].expand(shape), v[:1].expand(shape), symbol)


@pytest.mark.parametrize("symbol", VARIANTS)
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-30, 5.0, -1.0])
def test_any_finite_scale(symbol, scale):
    q, k, v = inputs(1, 1, 70, 65, VARIANTS[symbol][0])
    check(q, k, v, symbol, scale=scale, causal=TOP_LEFT)


@pytest.mark.parametrize("symbol", VARIANTS)
def test_causal_equals_the_same_keys_cut_off(symbol):
    # The last row of a bottom-right call sees every key, the row before one less.
    q, k, v = inputs(1, 1, 3, 130, VARIANTS[symbol][0])
    out, _ = forward(q, k, v, symbol, causal=BOTTOM_RIGHT)
    for row in range(3):
        keys = 128 + row
        alone, _ = forward(
            q[:, :, row : row + 1].contiguous(),
            k[:, :, :keys].contiguous(),
            v[:, :, :keys].contiguous(),
            symbol,
        )
        assert torch.equal(out[:, :, row], alone[:, :, 0])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("symbol", VARIANTS)
def test_what_a_row_cannot_see_does_not_reach_it(symbol, poison):
    q, k, v = inputs(1, 1, 130, 130, VARIANTS[symbol][0])
    out, lse = forward(q, k, v, symbol, causal=TOP_LEFT)
    for at in (1, 63, 64, 100, 129):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, :, at] = poison
        bad_v[:, :, at] = poison
        again, again_lse = forward(q, bad_k, bad_v, symbol, causal=TOP_LEFT)
        assert torch.equal(out[:, :, :at], again[:, :, :at])
        assert torch.equal(lse[..., :at], again_lse[..., :at])
        assert not torch.isfinite(again[:, :, at:]).any()


@pytest.mark.parametrize("symbol", VARIANTS)
def test_nan_in_a_query_stays_in_its_row(symbol):
    q, k, v = inputs(1, 1, 70, 65, VARIANTS[symbol][0])
    out, lse = forward(q, k, v, symbol)
    q[0, 0, 5, 0] = math.nan
    again, again_lse = forward(q, k, v, symbol)
    others = torch.arange(70, device=DEVICE) != 5
    assert torch.isnan(again[0, 0, 5]).all() and torch.isnan(again_lse[0, 0, 5])
    assert torch.equal(out[:, :, others], again[:, :, others])
    assert torch.equal(lse[..., others], again_lse[..., others])


@pytest.mark.parametrize("symbol", VARIANTS)
def test_infinite_values_come_out_as_in_the_math_path(symbol):
    q, k, v = inputs(1, 1, 70, 65, VARIANTS[symbol][0])
    v[0, 0, 7, 0] = math.inf
    v[0, 0, 9, -1] = math.nan
    out, _ = forward(q, k, v, symbol)
    expected = math_attention(q, k, v)
    assert torch.equal(torch.isnan(out), torch.isnan(expected))
    assert torch.equal(out == math.inf, expected == math.inf)


@pytest.mark.parametrize("symbol", VARIANTS)
def test_infinite_scores_give_nan_or_nothing_as_softmax_does(symbol):
    q, k, v = inputs(1, 1, 4, 65, VARIANTS[symbol][0])
    q[:] = q.abs() + 0.1
    k[0, 0, 3] = -math.inf  # a score of -inf: no weight
    out, lse = forward(q, k, v, symbol)
    keep = torch.arange(65, device=DEVICE) != 3
    expected, expected_lse = fp64_attention(q, k[:, :, keep], v[:, :, keep])
    assert relative_error(out, expected) < 1e-3
    assert (lse.double() - expected_lse).abs().max() < 1e-4
    k[0, 0, 3] = math.inf  # a score of +inf: inf - inf
    out, lse = forward(q, k, v, symbol)
    assert torch.isnan(out).all() and torch.isnan(lse).all()


@pytest.mark.parametrize("symbol", VARIANTS)
def test_results_repeat_bit_for_bit(symbol):
    q, k, v = inputs(2, 1, 130, 130, VARIANTS[symbol][0], batch=2)
    first = forward(q, k, v, symbol, causal=TOP_LEFT)
    second = forward(q, k, v, symbol, causal=TOP_LEFT)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.skipif(DEVICE != "cpu", reason="address space of the host")
@pytest.mark.parametrize("dim", [64, 61])
def test_strides_beyond_2_to_31_elements_are_used_in_place(dim):
    # 12 GB of address space per tensor, of which a few pages are ever touched.
    stride = 3 * 2**30
    symbol = "fa_fwd_f16_d64_plain" + ("" if dim == 64 else "_narrow")
    q, k, v = inputs(2, 2, 20, 33, dim)
    far = []
    for tensor in (q, k, v):
        storage = torch.empty(stride + tensor[0, 0].numel(), dtype=torch.float16)
        view = storage.as_strided(tensor.shape, (2 * stride, stride, dim, 1))
        far.append(view.copy_(tensor))
    out, lse = forward(q, k, v, symbol, causal=TOP_LEFT)
    again, again_lse = forward(*far, symbol, causal=TOP_LEFT)
    assert torch.equal(out, again) and torch.equal(lse, again_lse)
