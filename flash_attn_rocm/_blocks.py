"""BlockMask: which blocks of keys a block of queries visits, and patterns of blocks.

The kernels walk lists, so what is not listed costs nothing. Everything here is about
blocks of at least 128 x 128 scores; nothing of the size of the scores is made.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ._errors import FlashAttnError

GRAIN = 128  # block sizes are multiples of it
SIZE_MAX = 2**30  # as many as queries and keys
# Rows of blocks whose lists are made at a time, times their length.
_CHUNK = 2**22


def _refuse(name: str, expected: str, given: Any) -> FlashAttnError:
    return FlashAttnError(f"{name}: expected {expected}, got {given}")


def _whole(name: str, expected: str, given: Any, least: int) -> int:
    """`given` if it is a whole number, one of numpy's too, and at least `least`."""
    whole = isinstance(given, Integral) and not isinstance(given, bool)
    if not whole or given < least:
        raise _refuse(name, expected, repr(given))
    return int(given)


def _check_size(name: str, size: Any) -> int:
    expected = f"a multiple of {GRAIN} up to 2^30"
    whole = _whole(name, expected, size, 1)
    if whole % GRAIN or whole > SIZE_MAX:
        raise _refuse(name, expected, whole)
    return whole


def _check_form(name: str, lists: Any) -> None:
    if not isinstance(lists, Tensor):
        raise _refuse(name, "a tensor", type(lists).__name__)
    if lists.dtype is not torch.int32 or lists.dim() != 4 or not lists.size(3):
        expected = "int32 of 4 dimensions (batch, heads, blocks, 1 + indices)"
        raise _refuse(name, expected, f"{lists.dtype} {tuple(lists.shape)}")
    if not lists.is_contiguous():
        raise _refuse(name, "a contiguous tensor", f"strides {lists.stride()}")


def _check_content(name: str, lists: Tensor, blocks: int) -> None:
    """Lists of indices below `blocks`, ascending; on a GPU nobody waits to look."""
    if not lists.is_cpu or not lists.numel():
        return
    counts, indices = lists[..., :1], lists[..., 1:]
    if int(counts.min()) < 0 or int(counts.max()) > indices.size(3):
        given = f"{int(counts.min())} to {int(counts.max())}"
        raise _refuse(name, f"counts from 0 to {indices.size(3)}", given)
    used = torch.arange(indices.size(3)) < counts
    wrong = used & ((indices < 0) | (indices >= blocks))
    if bool(wrong.any()):
        raise _refuse(name, f"indices from 0 to {blocks - 1}", int(indices[wrong][0]))
    rising = indices[..., 1:] > indices[..., :-1]
    if not bool((rising | ~used[..., 1:]).all()):
        raise _refuse(name, "indices that ascend in each list", "others")


def _lists_of(dense: Tensor) -> Tensor:
    """(…, rows, columns) bool as lists (…, rows, 1 + n) of the True columns.

    On a GPU n is all columns, because the longest list is not known without waiting.
    """
    rows, columns = dense.shape[-2:]
    counts = dense.sum(-1, dtype=torch.int32)
    width = columns
    if dense.is_cpu:
        width = int(counts.max()) if counts.numel() else 0
    lists = torch.zeros(
        (*dense.shape[:-1], 1 + width), dtype=torch.int32, device=dense.device
    )
    lists[..., 0] = counts
    index = torch.arange(columns, dtype=torch.int32, device=dense.device)
    other = dense.numel() // max(rows, 1)
    step = max(1, _CHUNK // max(other, 1))
    for begin in range(0, rows, step):
        part = dense[..., begin : begin + step, :]
        # Those that are kept in front, in their order; 0 behind them.
        found = torch.where(part, index, columns).sort(-1).values[..., :width]
        found = found.masked_fill(found == columns, 0)
        lists[..., begin : begin + step, 1:] = found
    return lists


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Lists of the blocks that attention() visits; see from_dense and from_flex.

    A block is visited whole: inside of it a query sees every key that nothing else
    (causal, window, mask, ...) hides from it.

    Lists that are wrong are refused on the CPU. On a GPU, where looking would mean
    waiting, they are not looked at: with lists that contradict each other dk and dv
    are not those of the output.
    """

    # (1|B, 1|H, query blocks, 1 + n) int32: for each block of queries how many blocks
    # of keys, and their indices, ascending.
    blocks: Tensor
    # (1|B, 1|H, key blocks, 1 + n) int32: the same from the side of the keys.
    blocks_t: Tensor
    block_q: int = GRAIN  # queries of a block, a multiple of 128
    block_k: int = GRAIN  # keys of a block, likewise

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            size = _check_size(name, getattr(self, name))
            object.__setattr__(self, name, size)  # the class is frozen
        _check_form("blocks", self.blocks)
        _check_form("blocks_t", self.blocks_t)
        _check_content("blocks", self.blocks, self.blocks_t.size(2))
        _check_content("blocks_t", self.blocks_t, self.blocks.size(2))
        first, second = self.blocks.shape[:2], self.blocks_t.shape[:2]
        if first != second or self.blocks.device != self.blocks_t.device:
            expected = f"{tuple(first)} batches and heads on {self.blocks.device}"
            given = f"{tuple(second)} on {self.blocks_t.device}"
            raise _refuse("blocks_t", expected, given)
        self._check_sides()

    def _check_sides(self) -> None:
        """Both list the same pairs of blocks; on a GPU nobody waits to look."""
        if not self.blocks.is_cpu:
            return
        lists, rows = self.blocks_t, self.blocks.size(2)
        other = _dense_of(lists[..., 0], lists[..., 1:], rows).mT
        wrong = self.dense() != other
        if bool(wrong.any()):
            *_, row, column = wrong.nonzero()[0].tolist()
            one = f"query block {row} and key block {column}"
            side = "blocks_t" if bool(other[wrong][0]) else "blocks"
            raise _refuse("blocks_t", "the pairs of blocks", f"{one} only in {side}")

    @property
    def kept(self) -> int:
        """Blocks in the lists of all batches and heads there; waits for the device."""
        return int(self.blocks[..., 0].sum())

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(1|B, 1|H, query blocks, key blocks)."""
        batch, heads, blocks_q, _ = self.blocks.shape
        return batch, heads, blocks_q, self.blocks_t.size(2)

    def to(self, device: torch.device | str) -> BlockMask:
        """The same on another device."""
        lists = (self.blocks.to(device), self.blocks_t.to(device))
        return BlockMask(*lists, self.block_q, self.block_k)

    def dense(self) -> Tensor:
        """(1|B, 1|H, query blocks, key blocks), bool."""
        return _dense_of(self.blocks[..., 0], self.blocks[..., 1:], self.shape[3])

    @classmethod
    def from_dense(
        cls, kept: Tensor, block_q: int = GRAIN, block_k: int = GRAIN
    ) -> BlockMask:
        """A BlockMask of the blocks where `kept` is True.

        Args:
            kept: bool, (query blocks, key blocks), (H, ...) or (B, H, ...), where B
                and H may be 1.
            block_q, block_k: queries and keys of a block, multiples of 128.

        Raises:
            FlashAttnError: an argument does not fit; the message names it.

        Notes:
            The lists take up to 4 bytes for each block of `kept` and each direction;
            on the CPU, as many as the longest list needs. On a GPU nothing waits.
        """
        if not isinstance(kept, Tensor) or kept.dtype is not torch.bool:
            given = kept.dtype if isinstance(kept, Tensor) else type(kept).__name__
            raise _refuse("kept", "a tensor of dtype torch.bool", given)
        if not 2 <= kept.dim() <= 4:
            expected = "2 to 4 dimensions (batch, heads, query blocks, key blocks)"
            raise _refuse("kept", expected, f"shape {tuple(kept.shape)}")
        kept = kept.reshape((1,) * (4 - kept.dim()) + tuple(kept.shape))
        return cls(_lists_of(kept), _lists_of(kept.mT), block_q, block_k)

    @classmethod
    def from_lists(
        cls,
        counts: Tensor,
        indices: Tensor,
        key_blocks: int,
        block_q: int = GRAIN,
        block_k: int = GRAIN,
    ) -> BlockMask:
        """A BlockMask of lists as FlexAttention keeps them.

        Args:
            counts: (..., query blocks), whole numbers: how many indices count.
            indices: (..., query blocks, n), whole numbers below key_blocks.
            key_blocks: the number of blocks of keys.
            block_q, block_k: queries and keys of a block, multiples of 128.

        Raises:
            FlashAttnError: counts or indices are out of range (CPU), or do not fit.

        Notes:
            On a GPU, where looking would mean waiting, indices that are out of range
            are left out.
        """
        expected = "a whole number, at least 0"
        key_blocks = _whole("key_blocks", expected, key_blocks, 0)
        counts, indices = _four(counts, 3), _four(indices, 4)
        if counts.shape != indices.shape[:3]:
            expected = f"shape {tuple(indices.shape[:3])} (as indices)"
            raise _refuse("counts", expected, tuple(counts.shape))
        place = torch.arange(indices.size(3), device=indices.device)
        used = place < counts.unsqueeze(-1)
        wrong = used & ((indices < 0) | (indices >= key_blocks))
        if indices.is_cpu and indices.numel():
            width = indices.size(3)
            if int(counts.min()) < 0 or int(counts.max()) > width:
                given = f"{int(counts.min())} to {int(counts.max())}"
                raise _refuse("counts", f"numbers from 0 to {width}", given)
            if bool(wrong.any()):
                expected = f"numbers from 0 to {key_blocks - 1}"
                raise _refuse("indices", expected, int(indices[wrong][0]))
        indices = indices.masked_fill(wrong, key_blocks)
        return cls.from_dense(_dense_of(counts, indices, key_blocks), block_q, block_k)

    @classmethod
    def from_flex(cls, block_mask: Any, *, partial: str = "refuse") -> BlockMask:
        """The blocks of a torch.nn.attention.flex_attention.BlockMask.

        Only the blocks are taken over: FlexAttention also asks its mask_mod inside of
        the blocks that it lists as partial (kv_indices), which no kernel here does.

        Args:
            block_mask: FlexAttention's BlockMask, with block sizes that are multiples
                of 128.
            partial: "refuse": there must be no partial blocks, unless the mask_mod is
                the one that hides nothing. "whole": a partial block is visited whole;
                for callers who give the rule inside of it in another way, such as
                causal="top_left", window or mask.

        Raises:
            FlashAttnError: there are partial blocks, or something does not fit.

        Notes:
            Reads counts, so it waits for a GPU; make it once, not for each call.
        """
        if partial not in ("refuse", "whole"):
            raise _refuse("partial", '"refuse" or "whole"', repr(partial))
        try:
            sizes, lengths = block_mask.BLOCK_SIZE, block_mask.seq_lengths
            counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
            full = (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
            mask_mod = block_mask.mask_mod
        except AttributeError as error:
            expected = "a BlockMask of torch.nn.attention.flex_attention"
            given = f"{type(block_mask).__name__} ({error})"
            raise _refuse("block_mask", expected, given) from None
        for size in sizes:
            _check_size("block_mask.BLOCK_SIZE", size)
        some = int(counts.sum())
        if some and partial == "refuse" and not _hides_nothing(mask_mod):
            raise _refuse(
                "block_mask",
                'no partial blocks, whose mask_mod is not asked (partial="whole" '
                "visits them whole)",
                f"{some} of them",
            )
        key_blocks = -(-lengths[1] // sizes[1])
        made = cls.from_lists(counts, indices, key_blocks, *sizes)
        if full[0] is None or full[1] is None:
            return made
        whole = cls.from_lists(full[0], full[1], key_blocks, *sizes)
        return cls.from_dense(made.dense() | whole.dense(), *sizes)


def _four(tensor: Any, dims: int) -> Tensor:
    """A tensor of lists with leading dimensions of 1 where there are less."""
    if not isinstance(tensor, Tensor) or tensor.is_floating_point():
        given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise _refuse("counts" if dims == 3 else "indices", "whole numbers", given)
    if not dims - 2 <= tensor.dim() <= dims:
        given = f"shape {tuple(tensor.shape)}"
        name = "counts" if dims == 3 else "indices"
        raise _refuse(name, f"{dims - 2} to {dims} dimensions", given)
    return tensor.reshape((1,) * (dims - tensor.dim()) + tuple(tensor.shape))


def _dense_of(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """The inverse of _lists_of; indices of `columns` and more count as none."""
    place = torch.arange(indices.size(3), device=indices.device)
    used = (place < counts.unsqueeze(-1)) & (indices < columns)
    index = indices.long().masked_fill(~used, columns)
    dense = torch.zeros(
        (*indices.shape[:3], columns + 1), dtype=torch.bool, device=indices.device
    )
    return dense.scatter_(3, index, True)[..., :columns]


def _hides_nothing(mask_mod: Any) -> bool:
    name = getattr(mask_mod, "__name__", "")
    module = getattr(mask_mod, "__module__", None) or ""
    return name == "noop_mask" and module.startswith("torch.")


# --------------------------------------------------------------------------
# Patterns for long sequences


def _check_tokens(name: str, tokens: Any, least: int = 0) -> int:
    return _whole(name, f"a whole number, at least {least}", tokens, least)


def _band(
    blocks: int, block: int, window: tuple[int, int], causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Query blocks (n, 1), key blocks (n), and which hold a pair inside the window."""
    sides = window if isinstance(window, (tuple, list)) else ()
    if len(sides) != 2:
        raise _refuse("window", "two whole numbers (left, right)", repr(window))
    left, right = (_check_tokens("window", side, -1) for side in sides)
    query, key = torch.arange(blocks).unsqueeze(1), torch.arange(blocks)
    # Between the nearest key and query of two blocks lie so many tokens.
    gap = ((query - key).abs() - 1).clamp(min=0) * block + (query != key).int()
    seen = torch.ones(blocks, blocks, dtype=torch.bool)
    if left >= 0:
        seen &= (key > query) | (gap <= left)
    if causal:
        right = 0
    if right >= 0:
        seen &= (key < query) | (gap <= right)
    return query, key, seen


def local_global_blocks(
    seqlen: int,
    window: tuple[int, int],
    global_tokens: int = 0,
    *,
    causal: bool = False,
    block: int = GRAIN,
    device: torch.device | str | None = None,
) -> BlockMask:
    """A local window, and first tokens that see and are seen by all.

    Kept are the blocks with at least one pair of a query and a key that belongs to
    the pattern; visited are blocks, so up to a block more is seen. For a causal
    pattern that is exact to the token give attention() also causal="bottom_right",
    window=window and sink_keys=global_tokens.

    Args:
        seqlen: queries and keys, tokens.
        window: (left, right), tokens before and behind the own one; -1 is all.
        global_tokens: the first tokens, seen by every query. Without `causal` they
            also see every key.
        causal: leave out what lies behind the query.
        block: tokens of a block, a multiple of 128.
        device: where the lists shall be; the CPU if None.

    Returns:
        A BlockMask, of (seqlen / block) x (kept blocks of a row) indices.

    Raises:
        FlashAttnError: an argument does not fit; the message names it.

    Source: Longformer (arXiv 2004.05150).
    """
    block = _check_size("block", block)
    blocks = -(-_check_tokens("seqlen", seqlen) // block)
    first = -(-_check_tokens("global_tokens", global_tokens) // block)
    query, key, seen = _band(blocks, block, window, causal)
    seen |= (key < first) & ((key <= query) | (not causal))
    if not causal:
        seen |= query < first
    mask = BlockMask.from_dense(seen, block, block)
    return mask if device is None else mask.to(device)


def segment_tile_local_blocks(
    seqlen: int,
    *,
    segment: int,
    tile: int,
    window: tuple[int, int],
    causal: bool = True,
    block: int = GRAIN,
    device: torch.device | str | None = None,
) -> BlockMask:
    """Three levels of a long sequence: segments, tiles in them, a local window.

    A query sees the keys in its window; of the other tiles of its own segment the
    first block; and of the other segments the first block. For a sequence of 65536
    with segments of 8192, tiles of 1024 and a window of (1023, 0) a row of blocks
    keeps about 22 of 512. Visited are whole blocks, as in local_global_blocks().

    Args:
        seqlen: queries and keys, tokens.
        segment: tokens of a segment, a multiple of `tile`.
        tile: tokens of a tile, a multiple of `block`.
        window: (left, right), tokens before and behind the own one; -1 is all.
        causal: leave out what lies behind the query.
        block: tokens of a block, a multiple of 128.
        device: where the lists shall be; the CPU if None.

    Returns:
        A BlockMask.

    Raises:
        FlashAttnError: an argument does not fit; the message names it.

    Source: the fixed pattern of Sparse Transformers (arXiv 1904.10509), on two levels.
    """
    block = _check_size("block", block)
    blocks = -(-_check_tokens("seqlen", seqlen) // block)
    tile, segment = _check_tokens("tile", tile, 1), _check_tokens("segment", segment, 1)
    for name, size, unit in (("tile", tile, block), ("segment", segment, tile)):
        if size % unit:
            raise _refuse(name, f"a multiple of {unit}", size)
    query, key, seen = _band(blocks, block, window, causal)
    per_tile, per_segment = tile // block, segment // block
    same = query // per_segment == key // per_segment
    heads = (same & (key % per_tile == 0)) | (key % per_segment == 0)
    seen |= heads & ((key <= query) | (not causal))
    mask = BlockMask.from_dense(seen, block, block)
    return mask if device is None else mask.to(device)
