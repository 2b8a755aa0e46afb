"""BlockMask: its lists, FlexAttention's, the patterns, and attention that follows them.

SPDX-License-Identifier: BSD-3-Clause
"""

import pytest
import torch
from helpers import BOTTOM_RIGHT, NONE, TOP_LEFT, qkv
from helpers.dense import assert_like, band, gradients
from helpers.dense import attention as dense
from helpers.gradients import leaves

import flash_attn_rocm as fa
from flash_attn_rocm import BlockMask, FlashAttnError
from flash_attn_rocm._features import Features
from flash_attn_rocm._visits import Geometry, tiles, without_tables

flex = pytest.importorskip("torch.nn.attention.flex_attention")


def random_blocks(*sizes, seed=0, share=0.5):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(sizes, generator=generator) < share


def of_tokens(kept, block_q, block_k, length, length_k):
    """(…, query blocks, key blocks) as (…, Sq, Sk)."""
    wide = kept.repeat_interleave(block_q, -2).repeat_interleave(block_k, -1)
    return wide[..., :length, :length_k]


# ----------------------------------------------------------------------------- lists


@pytest.mark.parametrize("sizes", [(3, 5), (4, 2, 6), (2, 1, 5, 3), (1, 1), (3, 0)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_lists_are_counts_and_ascending_indices_from_both_sides(sizes, share):
    kept = random_blocks(*sizes, share=share)
    mask = BlockMask.from_dense(kept)
    full = kept.reshape((1,) * (4 - kept.dim()) + kept.shape)
    assert mask.shape == full.shape and mask.kept == int(kept.sum())
    for lists, side in ((mask.blocks, full), (mask.blocks_t, full.mT)):
        assert lists.dtype is torch.int32 and lists.is_contiguous()
        for one, row in zip(lists.flatten(0, 2), side.flatten(0, 2)):
            count, *indices = one.tolist()
            assert indices[:count] == row.nonzero().flatten().tolist()
            assert not any(indices[count:])
    assert torch.equal(mask.dense(), full)


def test_lists_are_as_long_as_the_longest():
    kept = torch.zeros(9, 50, dtype=torch.bool)
    kept[2, [4, 7]] = kept[3, 7] = True
    mask = BlockMask.from_dense(kept, 256, 384)
    assert mask.blocks.shape == (1, 1, 9, 3) and mask.blocks_t.shape == (1, 1, 50, 3)
    assert (mask.block_q, mask.block_k) == (256, 384)
    assert "blocks" in repr(mask)


def test_lists_of_many_blocks_are_made_in_parts(monkeypatch):
    kept = random_blocks(3, 37, 20)
    whole = BlockMask.from_dense(kept)
    monkeypatch.setattr("flash_attn_rocm._blocks._CHUNK", 130)
    parts = BlockMask.from_dense(kept)
    assert torch.equal(whole.blocks, parts.blocks)
    assert torch.equal(whole.blocks_t, parts.blocks_t)


def test_without_values_lists_have_room_for_all():
    # As on a GPU, where the longest list is not known without waiting.
    mask = BlockMask.from_dense(torch.ones(3, 5, dtype=torch.bool, device="meta"))
    assert mask.blocks.shape == (1, 1, 3, 6) and mask.blocks_t.shape == (1, 1, 5, 4)
    assert mask.to("meta").blocks.is_meta


def test_lists_may_come_in_any_order():
    counts = torch.tensor([2, 0, 3])
    indices = torch.tensor([[4, 1, 9], [7, 7, 7], [2, 0, 3]], dtype=torch.int64)
    mask = BlockMask.from_lists(counts, indices, 5)
    assert mask.blocks[0, 0].tolist() == [[2, 1, 4, 0], [0, 0, 0, 0], [3, 0, 2, 3]]


LISTS = torch.tensor([[[[1, 1, 0], [2, 0, 1]]]], dtype=torch.int32)  # both ways
BAD_LISTS = {
    "an index too large": LISTS + torch.tensor([0, 0, 1]),
    "a negative index": LISTS - torch.tensor([0, 1, 0]),
    "a count too large": LISTS + torch.tensor([2, 0, 0]),
    "a negative count": LISTS - torch.tensor([2, 0, 0]),
    "twice the same": LISTS - torch.tensor([0, 0, 1]),
    "int64": LISTS.long(),
    "3-D": LISTS[0],
    "not contiguous": LISTS.mT.contiguous().mT,
    "an array": LISTS.numpy(),
}


def test_lists_that_contradict_each_other_are_refused_by_name():
    kept = random_blocks(2, 3, 7, 5)
    good = BlockMask.from_dense(kept)
    assert torch.equal(BlockMask(good.blocks, good.blocks_t).dense(), kept)
    for side in (0, 1):
        other = kept.clone()
        other[1, 2, 6, 4] = not other[1, 2, 6, 4]
        made = BlockMask.from_dense(other)
        lists = [good.blocks, good.blocks_t]
        lists[side] = (made.blocks, made.blocks_t)[side]
        only = "blocks_t" if bool(kept[1, 2, 6, 4]) == (side == 0) else "blocks"
        words = (
            rf"^blocks_t: expected .*, got query block 6 and key .* 4 only in {only}$"
        )
        with pytest.raises(FlashAttnError, match=words):
            BlockMask(*lists)
    # Not looked at where looking would mean waiting, as on a GPU.
    moved = made.to("meta")
    BlockMask(good.blocks.to("meta"), moved.blocks_t)


@pytest.mark.parametrize("number", [-1, 2.0, True, "2", None])
def test_a_number_of_key_blocks_that_is_none_is_refused_by_name(number):
    counts, indices = torch.tensor([0]), torch.tensor([[0]])
    with pytest.raises(FlashAttnError, match=r"^key_blocks: expected a whole number"):
        BlockMask.from_lists(counts, indices, number)


@pytest.mark.parametrize("size", [2**40, 2**30 + 128, 2**64])
def test_a_block_of_more_than_any_length_is_refused_by_name(size):
    kept = torch.ones(1, 1, dtype=torch.bool)
    words = rf"^block_q: expected a multiple of 128 up to 2\^30, got {size}$"
    with pytest.raises(FlashAttnError, match=words):
        BlockMask.from_dense(kept, size)


def test_numbers_of_numpy_are_whole_numbers():
    numpy = pytest.importorskip("numpy")
    for of in (numpy.int64, numpy.int32):
        size = of(256)
        mask = fa.local_global_blocks(of(1000), (of(3), of(-1)), of(5), block=size)
        want = fa.local_global_blocks(1000, (3, -1), 5, block=256)
        assert torch.equal(mask.blocks, want.blocks) and mask.block_q == 256
        assert type(mask.block_q) is int
        mask = fa.segment_tile_local_blocks(
            of(4096), segment=of(1024), tile=of(512), window=(of(3), of(0))
        )
        want = fa.segment_tile_local_blocks(4096, segment=1024, tile=512, window=(3, 0))
        assert torch.equal(mask.blocks, want.blocks)
        counts, indices = torch.tensor([1]), torch.tensor([[1]])
        assert BlockMask.from_lists(counts, indices, of(2), size, size).shape[3] == 2


@pytest.mark.parametrize("name", BAD_LISTS)
@pytest.mark.parametrize("side", ["blocks", "blocks_t"])
def test_lists_that_are_wrong_are_refused_by_name(name, side):
    good = {"blocks": LISTS, "blocks_t": LISTS}
    BlockMask(**good)
    wrong = BAD_LISTS[name]
    if isinstance(wrong, torch.Tensor) and name not in ("int64", "3-D"):
        wrong = wrong.int() if wrong.dtype is not torch.int32 else wrong
    with pytest.raises(FlashAttnError, match=rf"^{side}: expected .*, got "):
        BlockMask(**{**good, side: wrong})


def test_other_bad_arguments_are_refused_by_name():
    kept = torch.ones(2, 2, dtype=torch.bool)
    for name, call in {
        "kept": lambda: BlockMask.from_dense(kept.int()),
        "kept: expected 2 to 4": lambda: BlockMask.from_dense(kept[0]),
        "block_q": lambda: BlockMask.from_dense(kept, 64),
        "block_k": lambda: BlockMask.from_dense(kept, 128, 200),
        "blocks_t": lambda: BlockMask(LISTS, torch.cat([LISTS, LISTS])),
        "counts": lambda: BlockMask.from_lists(torch.tensor([4]), LISTS[0, 0, :1], 9),
        "counts: expected shape": lambda: BlockMask.from_lists(
            torch.tensor([1, 1, 1]), LISTS[0, 0], 9
        ),
        "indices": lambda: BlockMask.from_lists(
            torch.tensor([1]), torch.tensor([[5]]), 5
        ),
        "indices: expected whole": lambda: BlockMask.from_lists(
            torch.tensor([1]), torch.tensor([[0.5]]), 5
        ),
        "block_mask": lambda: BlockMask.from_flex(kept),
        "partial": lambda: BlockMask.from_flex(kept, partial="maybe"),
        "window": lambda: fa.local_global_blocks(256, 7),
        "global_tokens": lambda: fa.local_global_blocks(256, (1, 1), -1),
        "seqlen": lambda: fa.local_global_blocks(256.0, (1, 1)),
        "block": lambda: fa.local_global_blocks(256, (1, 1), block=100),
        "tile": lambda: fa.segment_tile_local_blocks(
            4096, segment=512, tile=100, window=(1, 1)
        ),
        "segment": lambda: fa.segment_tile_local_blocks(
            4096, segment=300, tile=256, window=(1, 1)
        ),
    }.items():
        with pytest.raises(FlashAttnError, match=rf"^{name}"):
            call()
            pytest.fail(name)


# -------------------------------------------------------------------- FlexAttention's


def test_a_flex_mask_of_whole_blocks_is_taken_over():
    def aligned(b, h, i, j):
        return i // 128 >= j // 128

    theirs = flex.create_block_mask(aligned, None, None, 512, 640, device="cpu")
    assert not int(theirs.kv_num_blocks.sum())  # all are full ones
    mask = BlockMask.from_flex(theirs)
    assert torch.equal(mask.dense()[0, 0], torch.ones(4, 5, dtype=torch.bool).tril())


def test_a_flex_mask_with_partial_blocks_is_refused_or_visited_whole():
    def causal(b, h, i, j):
        return i >= j

    theirs = flex.create_block_mask(causal, 2, 3, 300, 300, device="cpu")
    with pytest.raises(FlashAttnError, match=r"^block_mask: .*partial.*, got \d+ of"):
        BlockMask.from_flex(theirs)
    mask = BlockMask.from_flex(theirs, partial="whole")
    assert mask.shape == (2, 3, 3, 3)
    assert torch.equal(mask.dense()[1, 2], torch.ones(3, 3, dtype=torch.bool).tril())


def test_a_flex_mask_without_a_rule_has_no_partial_blocks():
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0], [1, 0]]]], dtype=torch.int32)
    theirs = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(256, 128))
    mask = BlockMask.from_flex(theirs)
    assert mask.dense()[0, 0].tolist() == [[False, True], [True, True]]
    assert (mask.block_q, mask.block_k) == (256, 128)
    small = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64)
    with pytest.raises(
        FlashAttnError, match=r"^block_mask.BLOCK_SIZE: .* 128 .*, got 64"
    ):
        BlockMask.from_flex(small)


# -------------------------------------------------------------------------- patterns


def has_a_pair(tokens, block):
    """(S, S) as blocks that hold a True."""
    length = tokens.size(0)
    blocks = -(-length // block)
    pad = blocks * block - length
    wide = torch.nn.functional.pad(tokens, (0, pad, 0, pad))
    return wide.reshape(blocks, block, blocks, block).any(3).any(1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "length, block", [(1000, 128), (1025, 256), (100, 128), (0, 128)]
)
@pytest.mark.parametrize(
    "window, tokens", [((130, 0), 0), ((127, 1), 5), ((0, 0), 129), ((-1, 300), 1)]
)
def test_local_and_global_blocks_hold_the_pairs_of_the_pattern(
    length, block, window, tokens, causal
):
    mask = fa.local_global_blocks(length, window, tokens, causal=causal, block=block)
    left, right = window
    pairs = band(length, length, left=left, right=right)
    index = torch.arange(length)
    pairs = pairs | (index < tokens)
    if not causal:
        pairs = pairs | (index < tokens).unsqueeze(1)
    else:
        pairs = pairs & (index <= index.unsqueeze(1))
    assert torch.equal(mask.dense()[0, 0], has_a_pair(pairs, block))


@pytest.mark.parametrize("causal", [False, True])
def test_segments_tiles_and_the_window_are_three_levels(causal):
    length, segment, tile, block = 3000, 1024, 256, 128
    mask = fa.segment_tile_local_blocks(
        length, segment=segment, tile=tile, window=(100, 60), causal=causal
    )
    i, j = torch.arange(length).unsqueeze(1), torch.arange(length)
    pairs = band(length, length, left=100, right=60)
    pairs = pairs | ((i // segment == j // segment) & (j % tile < block))
    pairs = pairs | (j % segment < block)
    if causal:
        pairs = pairs & (j <= i)
    assert torch.equal(mask.dense()[0, 0], has_a_pair(pairs, block))


def test_the_lists_of_a_long_sequence_are_short():
    mask = fa.segment_tile_local_blocks(
        65536, segment=8192, tile=1024, window=(1023, 0)
    )
    assert mask.shape == (1, 1, 512, 512)
    assert mask.blocks.size(3) - 1 <= 24 and mask.kept < 512 * 24
    local = fa.local_global_blocks(65536, (1023, 0), 64, causal=True)
    assert local.blocks.size(3) - 1 == 10


# ------------------------------------------------------------------------- attention


def case(length=300, length_k=400, heads=2, heads_k=1, batch=1):
    q, k, v = qkv(
        batch, heads, length, 4, heads_k=heads_k, length_k=length_k, dtype=torch.float64
    )
    return leaves(q, k, v)


def compare(tensors, block_mask, seen, **options):
    out, lse = fa.attention(*tensors, block_mask=block_mask, return_lse=True, **options)
    want, want_lse = dense(*tensors, seen=seen)
    assert_like(out, want)
    assert_like(lse, want_lse)
    dout = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype
    )
    got, exact = (gradients([x], [dout], tensors) for x in (out, want))
    for one, other in zip(got, exact):
        assert_like(one, other, 1e-8)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    "sizes, share", [((3, 4), 0.0), ((3, 4), 1.0), ((2, 3, 4), 0.4)]
)
def test_a_block_mask_equals_its_mask(sizes, share):
    kept = random_blocks(*sizes, share=share)
    seen = of_tokens(kept, 128, 128, 300, 400)
    compare(case(), BlockMask.from_dense(kept), seen)


@pytest.mark.usefixtures("simulated")
def test_blocks_of_other_sizes_and_by_batch():
    kept = random_blocks(2, 1, 2, 4)
    seen = of_tokens(kept, 256, 128, 300, 400)
    compare(case(batch=2), BlockMask.from_dense(kept, 256, 128), seen)


@pytest.mark.usefixtures("simulated")
def test_inside_of_a_block_everything_else_still_hides():
    kept = random_blocks(3, 4, share=0.7)
    mask = torch.rand(300, 1, generator=torch.Generator().manual_seed(1)) > 0.2
    seen = of_tokens(kept, 128, 128, 300, 400) & mask
    seen = seen & band(300, 400, shift=100, right=0)
    first = band(300, 400, shift=100, left=150) | (torch.arange(400) < 20)
    options = {"causal": "bottom_right", "window": (150, -1), "sink_keys": 20}
    block_mask = BlockMask.from_dense(kept)
    compare(case(), block_mask, seen & first, mask=mask, **options)


@pytest.mark.usefixtures("simulated")
def test_a_causal_local_pattern_is_exact_with_the_window_beside_it():
    q, k, v = case(500, 500)
    mask = fa.local_global_blocks(500, (140, 0), 30, causal=True)
    seen = band(500, 500, left=140, right=0)
    seen = seen | ((torch.arange(500) < 30) & band(500, 500, right=0))
    options = {"causal": "bottom_right", "window": (140, 0), "sink_keys": 30}
    compare((q, k, v), mask, seen, **options)


@pytest.mark.usefixtures("simulated")
def test_the_second_derivative_follows_the_blocks():
    kept = torch.tensor([[True, False], [False, True]])
    mask = BlockMask.from_dense(kept)
    tensors = leaves(*qkv(1, 1, 130, 2, dtype=torch.float64))

    def call(*t):
        return fa.attention(*t, block_mask=mask)

    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    "kept, sizes",
    [
        (torch.ones(2, 4, dtype=torch.bool), (128, 128)),
        (torch.ones(3, 3, dtype=torch.bool), (128, 128)),
        (torch.ones(3, 2, dtype=torch.bool), (128, 128)),
        (torch.ones(3, 3, 4, dtype=torch.bool), (128, 128)),
        (torch.ones(2, 1, 3, 4, dtype=torch.bool), (128, 128)),
        (torch.ones(3, 4, dtype=torch.bool), (256, 128)),
    ],
)
def test_a_block_mask_of_another_size_is_refused_by_name(kept, sizes):
    mask = BlockMask.from_dense(kept, *sizes)
    with pytest.raises(FlashAttnError, match=r"^block_mask: expected .*, got "):
        fa.attention(*case(), block_mask=mask)


@pytest.mark.usefixtures("simulated")
def test_a_block_mask_compiles_in_one_graph():
    torch._dynamo.reset()
    mask = BlockMask.from_dense(random_blocks(3, 4))
    tensors = case()

    def call(q, k, v):
        return fa.attention(q, k, v, block_mask=mask)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, want = compiled(*tensors), call(*tensors)
    assert torch.equal(got, want)
    one, other = (torch.autograd.grad(x.sum(), tensors) for x in (got, want))
    assert all(torch.equal(a, b) for a, b in zip(one, other))


# ----------------------------------------------------------------------------- tiles


def counted(seen):
    """Tiles of 128 x 64 with a True, of (…, Sq, Sk)."""
    length, length_k = seen.shape[-2:]
    pad = (0, -length_k % 64, 0, -length % 128)
    wide = torch.nn.functional.pad(seen, pad).flatten(0, -3)
    wide = wide.unflatten(1, (-1, 128)).unflatten(3, (-1, 64))
    return int(wide.any(4).any(2).sum())


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    "causal, window, sinks",
    [
        (False, (-1, -1), 0),
        ("top_left", (-1, -1), 0),
        ("bottom_right", (-1, -1), 0),
        (False, (70, 30), 0),
        ("bottom_right", (64, -1), 65),
        ("top_left", (10, 0), 200),
    ],
)
@pytest.mark.parametrize("lengths", [(300, 400), (400, 300), (65, 513)])
def test_tiles_are_those_that_are_left(lengths, causal, window, sinks, blocks):
    length, length_k = lengths
    shift = 0 if causal == "top_left" else length_k - length
    left, right = window[0], 0 if causal else window[1]
    seen = band(length, length_k, shift=shift, left=left)
    seen = seen | (torch.arange(length_k) < sinks) if left >= 0 else seen
    seen = seen & band(length, length_k, shift=shift, right=right)
    seen = seen.expand(2, 4, length, length_k)
    mask = BlockMask(LISTS, LISTS)
    if blocks:
        kept = random_blocks(4, -(-length // 128), -(-length_k // 128))
        mask = BlockMask.from_dense(kept)
        seen = seen & of_tokens(kept, 128, 128, length, length_k)
    features = Features(
        causal={False: NONE, "top_left": TOP_LEFT, "bottom_right": BOTTOM_RIGHT}[
            causal
        ],
        window_left=left,
        window_right=right,
        sink_keys=sinks,
        blocks=mask.blocks if blocks else None,
        block_q=mask.block_q,
        block_k=mask.block_k,
    )
    sizes = ((2, 4, length, 8), (2, 2, length_k, 8))
    assert tiles(Geometry(*sizes, *without_tables(features))) == counted(seen)


@pytest.mark.usefixtures("simulated")
def test_tiles_of_a_call_are_those_of_its_blocks_and_window():
    q, k, v = (t.detach() for t in case())
    kept = torch.tensor([[True, False, False, True]] * 3)
    mask = BlockMask.from_dense(kept)
    fa.attention(q, k, v, block_mask=mask)
    assert fa.last_call().tiles == 2 * 3 * 3  # 400 keys: a tile of the last block
    fa.attention(q, k, v, block_mask=mask, window=(0, 0))
    # Own keys: 100 to 227, 228 to 355, 356 to 399.
    assert fa.last_call().tiles == 2 * (1 + 0 + 1)


@pytest.mark.usefixtures("simulated")
def test_tiles_are_unknown_where_only_a_record_is_left():
    q, k, v = case()
    out = fa.attention(q, k, v)
    assert fa.last_call().tiles == 2 * 3 * 7
    out.sum().backward()
    assert fa.last_call().tiles is None
    with fa.patched(), torch.no_grad():
        fa.attention(q, k, v)
        torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert fa.last_call().tiles is None
