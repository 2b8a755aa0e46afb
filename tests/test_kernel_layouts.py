"""What a tensor's strides and address do to the kernels: nothing but speed.

Every tensor of forward and backward in turn lies in another order of dimensions, in a
larger tensor full of NaN, at an odd address, without a stride or with a stride beyond
31 bits; the results have the bits of dense tensors (helpers/kernels.py).

SPDX-License-Identifier: BSD-3-Clause
"""

import math

import pytest
import torch
from helpers import TOP_LEFT, needs_simulator
from helpers.kernels import (
    DEVICE,
    FULL,
    WANT_DK,
    WANT_DQ,
    WANT_DV,
    backward,
    every_family,
    forward,
    normal,
    run,
    some_families,
)

if DEVICE == "cpu":
    pytestmark = needs_simulator

INPUTS = ("q", "k", "v", "dout")
ORDERS = [(0, 2, 1, 3), (3, 2, 1, 0), (1, 0, 2, 3), (0, 1, 3, 2), (2, 0, 1, 3)]


def permuted(tensor, order):
    """The same values with the dimensions in memory in this order."""
    back = [order.index(d) for d in range(4)]
    return tensor.permute(order).contiguous().permute(back)


def in_gaps(tensor, before, after, times=(1, 1, 1, 1)):
    """The same values in a larger tensor of NaN, with gaps around and between."""
    sizes = [b + n * t + a for n, b, a, t in zip(tensor.shape, before, after, times)]
    whole = torch.full(sizes, math.nan, dtype=tensor.dtype, device=tensor.device)
    slices = [slice(b, b + n * t, t) for n, b, t in zip(tensor.shape, before, times)]
    view = whole[tuple(slices)]
    view.copy_(tensor)
    return view


def shifted(tensor, elements=1):
    """The same values so many elements behind an aligned address."""
    storage = torch.full(
        (tensor.numel() + elements,), math.nan, dtype=tensor.dtype, device=tensor.device
    )
    return storage[elements:].view(tensor.shape).copy_(tensor)


FORMS = {
    "rows apart": lambda t: in_gaps(t, (0, 0, 0, 0), (0, 0, 0, 8)),
    "rows an odd number apart": lambda t: in_gaps(t, (0, 0, 0, 0), (0, 0, 0, 3)),
    "heads and batches apart": lambda t: in_gaps(t, (1, 2, 3, 0), (1, 1, 2, 0)),
    "every third element": lambda t: in_gaps(t, (0,) * 4, (0,) * 4, (1, 1, 1, 3)),
    "every second row": lambda t: in_gaps(t, (0,) * 4, (0,) * 4, (1, 1, 2, 1)),
    "misaligned": shifted,
    "misaligned by 8 bytes": lambda t: shifted(t, max(8 // t.element_size(), 1)),
    "head dim outermost": lambda t: permuted(t, (3, 2, 1, 0)),
    "rows innermost": lambda t: permuted(t, (0, 1, 3, 2)),
    "batch, row, head": lambda t: permuted(t, (0, 2, 1, 3)),
    "row, batch, head": lambda t: permuted(t, (2, 0, 1, 3)),
}


def problem(family, **changes):
    form = dict(heads=2, heads_k=1, batch=2, causal=TOP_LEFT, **changes)
    return normal(family.dtype, 37, 70, family.dim, **form)


def same(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", FORMS)
@some_families
def test_layouts_of_inputs_do_not_change_a_bit(family, name):
    p = problem(family)
    want = run(p, family)
    every = {which: FORMS[name](getattr(p, which)) for which in INPUTS}
    assert same(run(p.but(**every), family), want)
    for which in INPUTS if FULL else ():
        assert same(run(p.but(**{which: every[which]}), family), want), which


@every_family
def test_loads_of_one_element_give_the_bits_of_loads_of_16_bytes(family):
    p = problem(family)
    want = run(p, family)
    assert same(run(p.but(**{w: shifted(getattr(p, w)) for w in INPUTS}), family), want)


# With those of all four alike, each pair of tensors in each of its states: a kernel
# fetches the next tensor while it works on another.
MIXED = [("q", "dout"), ("k", "v"), ("k", "dout"), ("q", "v")]


@pytest.mark.parametrize("narrow", MIXED, ids="_".join)
@some_families
def test_loads_of_either_kind_meet(family, narrow):
    p = problem(family)
    mixed = p.but(**{w: shifted(getattr(p, w)) for w in narrow})
    assert same(run(mixed, family), run(p, family))


@some_families
def test_loads_of_one_element_with_less_to_compute(family):
    p = problem(family)
    narrow = p.but(**{w: shifted(getattr(p, w)) for w in INPUTS})
    for with_lo in (True, False):
        saved = forward(p, family, with_lo=with_lo)
        for wanted in (WANT_DQ, WANT_DK, WANT_DV):
            want = backward(p, saved, family, wanted=wanted)
            got = backward(narrow, saved, family, wanted=wanted)
            assert same(*([t for t in ts if t is not None] for ts in (got, want))), (
                wanted
            )


@pytest.mark.parametrize("order", ORDERS if FULL else ORDERS[:2], ids=str)
@some_families
def test_layouts_of_outputs_do_not_change_a_bit(family, order):
    p = problem(family)
    want_saved = forward(p, family)
    want = backward(p, want_saved, family)
    outer = permuted(torch.empty_like(p.dout), order).stride()
    # Gaps too, of 5 elements, which must stay as they are.
    gaps = tuple(s * 2 if s != 1 else 1 for s in outer)
    for strides in (outer, gaps):
        saved = forward(p, family, strides=strides)
        assert torch.equal(saved.out, want_saved.out)
        assert torch.equal(saved.lse, want_saved.lse)
        if saved.out_lo is not None:
            assert torch.equal(saved.out_lo, want_saved.out_lo)
        forms = [permuted(torch.empty_like(t), order).stride() for t in (p.q, p.k, p.v)]
        forms = [tuple(s * 2 if s != 1 else 1 for s in f) for f in forms]
        assert same(backward(p, saved, family, strides=forms), want)


@some_families
def test_expanded_inputs_need_no_copy(family):
    p = problem(family)
    parts = {
        "k": p.k[:1, :, :1].expand(p.k.shape),
        "v": p.v[:1].expand(p.v.shape),
        "dout": p.dout[:, :1, :1, :1].expand(p.dout.shape),  # as sum() gives it
    }
    dense = {name: t.contiguous() for name, t in parts.items()}
    assert 0 in parts["dout"].stride()
    assert same(run(p.but(**parts), family), run(p.but(**dense), family))


@some_families
def test_gradients_of_a_sum_come_with_strides_of_zero(family):
    p = problem(family)
    one = torch.ones((), dtype=p.q.dtype, device=DEVICE).expand(p.dout.shape)
    want = run(p.but(dout=one.contiguous()), family)
    assert same(run(p.but(dout=one), family), want)


@pytest.mark.parametrize("form", ["transposed", "expanded", "gaps"])
@some_families
def test_layouts_of_dlse_do_not_change_a_bit(family, form):
    p = problem(family)
    wide = torch.float64 if family.dtype is torch.float64 else torch.float32
    dlse = normal(wide, 37, 1, 1, heads=2, batch=2, seed=5).q[..., 0].contiguous()
    if form == "transposed":
        other = dlse.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    elif form == "expanded":
        dlse = dlse[:, :, :1].expand(2, 2, 37)
        dlse, other = dlse.contiguous(), dlse
    else:
        other = in_gaps(dlse[..., None], (0,) * 4, (0,) * 4, (1, 2, 3, 1))[..., 0]
    want = run(p.but(dlse=dlse), family)
    assert same(run(p.but(dlse=other), family), want)


@pytest.mark.skipif(DEVICE != "cpu", reason="address space of the host")
@pytest.mark.parametrize("dim_less", [0, 3])
@some_families
def test_strides_beyond_2_to_31_elements_are_used_in_place(family, dim_less):
    # Gigabytes of address space per tensor, of which a few pages are ever touched.
    stride = 2**31 + 2**20
    dim = family.dim - dim_less
    p = normal(family.dtype, 20, 33, dim, heads=2, heads_k=2, batch=2, causal=TOP_LEFT)
    far = {}
    for name in INPUTS:
        tensor = getattr(p, name)
        count = stride + 4 * tensor[0, 0].numel()
        storage = torch.empty(count, dtype=tensor.dtype)
        strides = (stride, 2 * tensor[0, 0].numel(), dim, 1)
        far[name] = storage.as_strided(tensor.shape, strides).copy_(tensor)
    assert same(run(p.but(**far), family), run(p, family))
