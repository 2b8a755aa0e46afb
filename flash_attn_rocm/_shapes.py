"""What PyTorch's attention accepts beside 4-D tensors, as views that the ops take.

Only sizes and strides are looked at, and nothing is copied; torch.compile traces it.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from torch import Tensor

Tensors = tuple[Tensor, Tensor, Tensor]

# Kernels hold offsets inside a tile of bias or mask in 32 bits.
STRIDE_BYTES = 2**24


def _flattens(tensor: Tensor, dims: int) -> bool:
    """Whether the first `dims` dimensions are one in memory too."""
    expected = None
    for d in range(dims - 1, -1, -1):
        if tensor.size(d) == 1:
            continue
        if expected is not None and tensor.stride(d) != expected:
            return False
        expected = tensor.stride(d) * tensor.size(d)
    return True


def can_be_four(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether as_four() can do it without a copy."""
    least = min(query.dim(), key.dim(), value.dim())
    most = max(query.dim(), key.dim(), value.dim())
    if least < 2:
        return False
    if most <= 4:
        return True
    leading = most - 3
    return (
        least == most
        and query.shape[:leading] == key.shape[:leading] == value.shape[:leading]
        and _flattens(query, leading)
        and _flattens(key, leading)
        and _flattens(value, leading)
    )


def _four(tensor: Tensor) -> Tensor:
    if tensor.dim() > 4:
        return tensor.flatten(0, tensor.dim() - 4)
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    return tensor


def _expanded(tensor: Tensor, batch: int, heads: int) -> Tensor:
    if tensor.size(0) == batch and tensor.size(1) == heads:
        return tensor
    return tensor.expand(batch, heads, -1, -1)


def _common(*sizes: int) -> int | None:
    """The size that all broadcast to, or None."""
    common = 1
    for size in sizes:
        if size != 1:
            if common not in (1, size):
                return None
            common = size
    return common


def as_four(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> Tensors | None:
    """Views (B, H, Sq, D), (B, Hk, Sk, D) and (B, Hk, Sk, Dv), or None.

    Batches broadcast, and without `grouped` (enable_gqa) heads do too; one head of
    keys and values for all is left alone, as a group.
    """
    query, key, value = _four(query), _four(key), _four(value)
    batch = _common(query.size(0), key.size(0), value.size(0))
    if batch is None:
        return None
    heads, heads_k, heads_v = query.size(1), key.size(1), value.size(1)
    if not grouped:
        common = _common(heads, heads_k, heads_v)
        if common is None:
            return None
        heads = common
        if heads_k != 1 or heads_v != 1:
            heads_k = heads_v = common
    return (
        _expanded(query, batch, heads),
        _expanded(key, batch, heads_k),
        _expanded(value, batch, heads_v),
    )


def leading_sizes(
    query: Tensor, key: Tensor, value: Tensor, heads: int
) -> tuple[int, ...] | None:
    """What the result has before its last two dimensions; None: batch and heads."""
    most = max(query.dim(), key.dim(), value.dim())
    if most == 4:
        return None
    return (*query.shape[:-3], heads) if most > 4 else (heads,) * (most - 2)


def mask_as_four(
    mask: Tensor, rank: int, leading: tuple[int, ...], sizes: tuple[int, int, int, int]
) -> Tensor | None:
    """A view (1|B, 1|H, 1|Sq, 1|Sk) of attn_mask, or None.

    Args:
        rank: dimensions of the result; more of the mask are not broadcast.
        leading: sizes of the result's dimensions before the last three, if rank > 4.
        sizes: (B, H, Sq, Sk).
    """
    if not 2 <= mask.dim() <= rank:
        return None
    extra = mask.dim() - 3
    if extra > 1:
        own = tuple(mask.shape[:extra])
        whole = extra == len(leading) and own == leading
        if not (whole or all(size == 1 for size in own)) or not _flattens(mask, extra):
            return None
    mask = _four(mask)
    for size, full in zip(mask.shape, sizes):
        if size != 1 and size != full:
            return None
    return mask


def within_strides(mask: Tensor) -> bool:
    """Whether kernels can reach a tile of this bias or mask."""
    limit = STRIDE_BYTES // mask.element_size()
    for d in (2, 3):
        if mask.size(d) != 1 and mask.stride(d) >= limit:
            return False
    return True
