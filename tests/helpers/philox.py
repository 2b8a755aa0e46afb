"""Replay of dropout on the host: Philox4x32-10 and the weights that are kept.

Written from the definition (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011) and from the formula in docs/architecture.md that says which bits belong to
which weight. Shares nothing with the kernels.

SPDX-License-Identifier: BSD-3-Clause
"""

import numpy as np
import torch

ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter, key):
    """The four words for four words of counter and two of key; arrays broadcast."""
    c = [np.asarray(word, dtype=np.uint64) & _LOW for word in counter]
    k = [int(word) & 0xFFFFFFFF for word in key]
    for _ in range(ROUNDS):
        first = c[0] * np.uint64(_MULTIPLIERS[0])
        second = c[2] * np.uint64(_MULTIPLIERS[1])
        c = [
            (second >> _HALF) ^ c[1] ^ np.uint64(k[0]),
            second & _LOW,
            (first >> _HALF) ^ c[3] ^ np.uint64(k[1]),
            first & _LOW,
        ]
        k = [(word + step) & 0xFFFFFFFF for word, step in zip(k, _WEYL)]
    return c


def keep_of(dropout_p):
    """Of 65536 values of a half word, so many keep their weight."""
    return max(1, round((1 - dropout_p) * 65536))


def halves(seed, sizes):
    """The 16 bits of each weight as a signed number, int64 (B, H, Sq, Sk).

    Args:
        seed: seed and offset, two integers of 64 bits.
        sizes: (B, H, Sq, Sk).
    """
    batch, heads, rows, keys = sizes
    number, offset = (int(x) for x in seed)
    b_h = np.arange(batch * heads, dtype=np.uint64)[:, None, None]
    q = np.arange(rows, dtype=np.uint64)[:, None]
    k = np.arange(keys, dtype=np.uint64)
    groups = (k >> np.uint64(6)) * np.uint64(8) + (k & np.uint64(7))
    words = philox((groups, q, b_h, offset & 0xFFFFFFFF), (number, number >> 32))
    own = (k >> np.uint64(3)) & np.uint64(7)  # which of eight halves
    word = np.choose((own >> np.uint64(1)).astype(np.int64), words)
    half = (word >> (np.uint64(16) * (own & np.uint64(1)))) & np.uint64(0xFFFF)
    signed = half.astype(np.uint16).view(np.int16).astype(np.int64)
    return torch.from_numpy(signed.reshape(batch, heads, rows, keys))


def kept(seed, dropout_p, sizes):
    """Boolean (B, H, Sq, Sk): whether a weight is kept."""
    return halves(seed, sizes) < keep_of(dropout_p) - 32768


def keep_scale(dropout_p):
    """What a kept weight is multiplied by, so that the mean stays."""
    return 65536 / keep_of(dropout_p)
