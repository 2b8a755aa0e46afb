"""Rows of choices that cover every pair (or triple) of values of several dimensions.

Greedy and seeded: each row starts with a combination that no row has yet and takes, one
dimension after another, the value that covers most of what is still open. A rule says
which choices cannot stand together; it is asked about parts of a row, so it must not
object to what is missing.

DIMENSIONS are the choices of a call with features, build() makes its problem.

SPDX-License-Identifier: BSD-3-Clause
"""

import itertools
import math
import random
import zlib

import pytest
import torch

from . import BOTTOM_RIGHT, NONE, TOP_LEFT
from .features import (
    NONE_TOP_LEFT,
    block_lists,
    lse_dtype,
    problem,
    seed_of,
)
from .kernels import DEVICE, FULL

CANDIDATES = 8  # rows tried for each that is taken


def _parts(names, strength):
    return list(itertools.combinations(names, strength))


def possible(dimensions, allowed, strength=2):
    """The combinations of `strength` values that the rule lets stand, as sets of
    (name, value)."""
    return {
        frozenset(zip(names, values))
        for names in _parts(dimensions, strength)
        for values in itertools.product(*(dimensions[name] for name in names))
        if allowed(dict(zip(names, values)))
    }


def covered(row, strength=2):
    """The combinations that a row has."""
    return {
        frozenset((name, row[name]) for name in names)
        for names in _parts(sorted(row), strength)
    }


def _gain(row, name, value, missing, strength):
    """How many open combinations the row gets with this value."""
    others = itertools.combinations(row.items(), strength - 1)
    return sum(frozenset((*part, (name, value))) in missing for part in others)


def _complete(start, dimensions, allowed, missing, strength, chance):
    """A whole row with these choices, or None if this order leads nowhere."""
    row = dict(start)
    names = [name for name in dimensions if name not in row]
    chance.shuffle(names)
    for name in names:
        fits = [v for v in dimensions[name] if allowed({**row, name: v})]
        if not fits:
            return None
        chance.shuffle(fits)
        row[name] = max(fits, key=lambda v: _gain(row, name, v, missing, strength))
    return row


def covering(dimensions, allowed=lambda row: True, *, strength=2, seed=0):
    """Rows (dictionaries) that together have every possible combination.

    Args:
        dimensions: name -> values that can be hashed.
        allowed: whether a part of a row can stand.
        strength: 2 for pairs, 3 for triples.
        seed: the same rows each time.

    Raises:
        ValueError: a combination that the rule lets stand has no row.
    """
    chance = random.Random(seed)
    order = {
        (name, value): (at, number)
        for at, (name, values) in enumerate(dimensions.items())
        for number, value in enumerate(values)
    }
    # In an order that does not depend on how the process hashes text.
    todo = sorted(
        possible(dimensions, allowed, strength),
        key=lambda part: sorted(order[choice] for choice in part),
    )
    missing, rows = set(todo), []
    chance.shuffle(todo)
    for part in todo:
        if part not in missing:
            continue
        start = sorted(part, key=order.__getitem__)
        made = [
            _complete(start, dimensions, allowed, missing, strength, chance)
            for _ in range(CANDIDATES)
        ]
        whole = [row for row in made if row is not None]
        if not whole:
            raise ValueError(f"no row has {dict(start)}")
        best = max(whole, key=lambda row: len(covered(row, strength) & missing))
        missing -= covered(best, strength)
        rows.append({name: best[name] for name in dimensions})
    return rows


# ----------------------------------------------------------------- calls with features

KINDS = {  # dtype, and whether in wider arithmetic than usual
    "f16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
    "bf16_exact": (torch.bfloat16, True),
    "f32": (torch.float32, False),
    "f32_exact": (torch.float32, True),
    "f64": (torch.float64, False),
}


def every_kind(test):
    """The test runs for each of KINDS."""
    return pytest.mark.parametrize("kind", KINDS)(test)


def some_kinds(test):
    """The test runs for each of KINDS with FA_TEST=full; otherwise for one of 16 bits
    and one of more, since code is shared by templates: which depends on its name."""
    if FULL:
        return every_kind(test)
    turn = zlib.crc32(test.__name__.encode())
    kinds = list(KINDS)[turn % 3], list(KINDS)[3 + turn // 3 % 3]
    return pytest.mark.parametrize("kind", kinds)(test)


SIGHTS = {
    "all": {},
    "causal": dict(causal=TOP_LEFT),
    "causal_end": dict(causal=BOTTOM_RIGHT),
    "window": dict(causal=NONE_TOP_LEFT, window_left=9, window_right=4),
    "window_end": dict(causal=NONE, window_left=40, window_right=0),
    "left": dict(causal=BOTTOM_RIGHT, window_left=5),
    "right": dict(causal=NONE, window_right=7),
}
DIMENSIONS = {
    # Float32 in float64 gets the problems of float32.
    "kind": tuple(kind for kind in KINDS if kind != "f32_exact"),
    "sight": tuple(SIGHTS),
    "bias": (
        *("none", "full", "keys", "rows_keys"),
        *("rows", "transposed", "offset", "wide"),
    ),
    "mask": ("none", "full", "keys", "transposed", "blind"),
    "alibi": ("none", "heads", "batch"),
    "softcap": (0.0, 2.0),
    "sink": (False, True),
    "sink_keys": (0, 3),
    "dropout": (0.0, 0.1, 0.5),
    "blocks": ("none", "heads", "shared"),
    "heads": ((1, 2, 2), (2, 2, 1), (1, 3, 1)),  # batch, heads, heads of k
    "dims": ((40, 40), (7, 33), (64, 24), (72, 72)),
    "lengths": ((70, 130), (130, 70), (1, 65), (140, 190)),
    "scale": (None, -0.3),
    "dlse": (False, True),
}


def allowed(row):
    """A window's first keys need a window, float32 beside other types these."""
    if (
        row.get("sink_keys")
        and SIGHTS[row.get("sight", "left")].get("window_left") is None
    ):
        return False
    return not (row.get("bias") == "wide" and row.get("kind") in ("f32", "f64"))


def _bias(form, dtype, sizes, generator):
    batch, heads, rows, keys = sizes
    own = {
        "keys": (1, heads, 1, keys),
        "rows_keys": (batch, 1, rows, keys),
        "rows": (1, 1, rows, 1),
        "transposed": (batch, heads, keys, rows),
        "offset": (batch, heads, rows, keys + 5),
    }.get(form, sizes)
    made = torch.randn(own, generator=generator, dtype=torch.float64)
    if form == "full":
        made[torch.rand(own, generator=generator) < 0.1] = -math.inf
    made = made.to(torch.float32 if form == "wide" else dtype).to(DEVICE)
    if form == "offset":
        return made[..., 3:-2]
    return made.mT if form == "transposed" else made


def _mask(form, sizes, generator):
    batch, _heads, rows, keys = sizes
    if form == "keys":
        seen = torch.arange(keys) < torch.tensor([[keys // 2 + 1], [keys]])
        return seen[:batch, None, None].to(DEVICE)
    own = (1, 1, keys, rows) if form == "transposed" else sizes
    made = torch.rand(own, generator=generator) < 0.7
    if form == "blind":  # rows that see nothing, or nothing in the first tile
        made[:, :, ::3] = False
        made[:, :, 1::3, :64] = False
    return (made.mT if form == "transposed" else made).to(DEVICE)


def _blocks(form, sizes, generator):
    batch, heads, rows, keys = sizes
    many = (batch, heads) if form == "heads" else (1, 1)
    dense = torch.rand(*many, -(-rows // 128), -(-keys // 128), generator=generator)
    dense[0, 0, 0, 0] = 0  # so that something is seen
    return dict(block_lists(dense < 0.6), block_q=128, block_k=128)


def build(row, seed=0):
    """The problem that a row of choices is about."""
    generator = torch.Generator().manual_seed(seed + 1)
    dtype, strict = KINDS[row["kind"]]
    batch, heads, heads_k = row["heads"]
    sizes = (batch, heads, *row["lengths"])
    given = dict(SIGHTS[row["sight"]], sink_keys=row["sink_keys"])
    if row["bias"] != "none":
        given["bias"] = _bias(row["bias"], dtype, sizes, generator)
    if row["mask"] != "none":
        given["mask"] = _mask(row["mask"], sizes, generator)
    if row["alibi"] != "none":
        own = (batch, heads) if row["alibi"] == "batch" else (heads,)
        given["alibi"] = torch.rand(own, generator=generator).to(lse_dtype(dtype))
    if row["sink"]:
        given["sink"] = torch.randn(heads, generator=generator).to(lse_dtype(dtype))
    if row["dropout"]:
        given.update(dropout_p=row["dropout"], seed=seed_of(1234 + seed, seed))
    if row["blocks"] != "none":
        given.update(_blocks(row["blocks"], sizes, generator))
    for name in ("alibi", "sink"):
        if name in given:
            given[name] = given[name].to(DEVICE)
    return problem(
        *(dtype, *row["lengths"], row["dims"][0]),
        **dict(dim_v=row["dims"][1], batch=batch, heads=heads, heads_k=heads_k),
        **dict(draw=seed, strict=strict, dlse=row["dlse"]),
        **dict(given, scale=row["scale"], softcap=row["softcap"]),
    )


def name_of(row):
    """Of a row, for a test's id: what is not usual."""
    usual = {name: values[0] for name, values in DIMENSIONS.items()}
    usual["kind"] = None
    words = []
    for name, value in row.items():
        if value != usual[name]:
            text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words.append(text if name in ("kind", "sight") else f"{name}={text}")
    return ",".join(words)
