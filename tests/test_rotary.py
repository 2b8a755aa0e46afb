"""apply_rotary() and the op behind it: rotary positions of q and k.

The oracle is NumPy in 80 bits with the pairs written out one by one. A result may be
off by the rounding to its dtype, and by what fp32 (fp64 for float64) rounds of one
product and of the sum.

SPDX-License-Identifier: BSD-3-Clause
"""

import os
import threading
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from helpers import ROOT, needs_simulator, run_forked
from helpers.exact import WIDE

import flash_attn_rocm as fa
from flash_attn_rocm import FlashAttnError, _ops, _simulate

pytestmark = [needs_simulator, pytest.mark.usefixtures("simulated")]

FROM_PYTHON = os.environ.get("FLASH_ATTN_ROCM_PYTHON_OPS") == "1"
F16, BF16, F32, F64 = DTYPES = _ops.DTYPES
FORMS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def normal(*shape, dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)


def tables(*shape, dtype=F32, seed=7):
    """Cosines and sines of angles of any size."""
    angle = 9 * normal(*shape, dtype=F64, seed=seed)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def numbers(tensor):
    return tensor.detach().double().numpy().astype(WIDE)


def pairs_of(rotary, interleaved):
    half = rotary // 2
    return [(2 * p, 2 * p + 1) if interleaved else (p, p + half) for p in range(half)]


def oracle(x, cos, sin, interleaved, inverse=False):
    """(rotated x, for each element what the arithmetic may lose)."""
    x, cos, sin = (numbers(t) for t in (x, cos, sin))
    if cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    sin = -sin if inverse else sin
    out, loss = x.copy(), np.zeros_like(x)
    for p, (a, b) in enumerate(pairs_of(2 * cos.shape[-1], interleaved)):
        c, s = cos[:, :, None, p], sin[:, :, None, p]
        out[..., a] = x[..., a] * c - x[..., b] * s
        out[..., b] = x[..., b] * c + x[..., a] * s
        loss[..., a] = abs(x[..., b] * s) + abs(out[..., a])
        loss[..., b] = abs(x[..., a] * s) + abs(out[..., b])
    return out, loss


def check(got, x, cos, sin, interleaved, inverse=False):
    assert got.dtype == x.dtype and got.shape == x.shape
    exact, loss = oracle(x, cos, sin, interleaved, inverse)
    unit = torch.finfo(F64 if x.dtype is F64 else F32).eps / 2
    bound = unit * loss * 1.0001
    if x.element_size() == 2:
        kind = torch.finfo(x.dtype)
        # Halves of an ulp, also of a denormal.
        bound += kind.eps / 2 * np.maximum(abs(exact), kind.tiny) * 1.001
    rotary = 2 * cos.size(-1)
    assert (abs(numbers(got) - exact) <= bound).all()
    assert torch.equal(got[..., rotary:], x[..., rotary:])


def run(q, k, cos, sin, interleaved=False):
    """apply_rotary(), checked; its results."""
    made = fa.apply_rotary(q, k, cos, sin, interleaved)
    for got, x in zip(made, (q, k)):
        check(got, x, cos, sin, interleaved)
        like = torch.empty_like(x)
        assert got.stride() == like.stride()
    return made


def why():
    call = fa.last_call()
    assert call.backend == "sim" and call.kernel.startswith("fa_rotary"), call
    return call.why


# ------------------------------------------------------------------ what it computes


@FORMS
@EACH_DTYPE
@pytest.mark.parametrize("rotary", [16, 32, 64])
def test_both_forms_are_exact_to_one_rounding(rotary, dtype, interleaved):
    q, k = normal(2, 67, 5, 64, dtype=dtype), normal(2, 67, 2, 64, dtype=dtype, seed=1)
    for table in {dtype, _ops.lse_dtype(dtype)}:
        run(q, k, *tables(67, rotary // 2, dtype=table), interleaved)
        assert why() == "wide: 16 bytes of q and k at a time"


@FORMS
@EACH_DTYPE
@pytest.mark.parametrize(
    "dim,columns", [(1, 0), (2, 1), (7, 3), (40, 20), (64, 0), (96, 12), (251, 125)]
)
def test_any_head_dim_and_rotary_dim(dim, columns, dtype, interleaved):
    q, k = normal(1, 9, 3, dim, dtype=dtype), normal(1, 9, 1, dim, dtype=dtype, seed=1)
    run(q, k, *tables(9, columns, dtype=_ops.lse_dtype(dtype)), interleaved)


@FORMS
@EACH_DTYPE
def test_the_widest_head(dtype, interleaved):
    q, k = normal(1, 5, 1, 256, dtype=dtype), normal(1, 5, 5, 256, dtype=dtype, seed=1)
    run(q, k, *tables(5, 128, dtype=dtype), interleaved)


@EACH_DTYPE
def test_tables_may_differ_between_batches(dtype):
    q, k = normal(3, 5, 2, 16, dtype=dtype), normal(3, 5, 1, 16, dtype=dtype, seed=1)
    cos, sin = tables(3, 5, 8, dtype=dtype)
    both = run(q, k, cos, sin)
    for b in range(3):
        one = fa.apply_rotary(q[b : b + 1], k[b : b + 1], cos[b], sin[b])
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(both, one))
    shared = run(q, k, cos[:1], sin[:1])
    assert all(map(torch.equal, shared, run(q, k, cos[0], sin[0])))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("heads", [1, 4, 5])
def test_lengths_and_heads_around_a_tile(length, heads):
    q = normal(1, length, heads, 16, dtype=F16)
    k = normal(1, length, 9 - heads, 16, dtype=F16, seed=1)
    run(q, k, *tables(length, 8))


LAYOUTS = {
    "heads outside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "channels outside": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "packed": lambda t: torch.stack([t, t], 2)[:, :, 1],
    "every other channel": lambda t: torch.stack([t, t], 4)[..., 1],
    "one element on": lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(
        t.shape
    ),
    "padded rows": lambda t: torch.nn.functional.pad(t, (0, 3))[..., : t.size(3)],
    "one head for all": lambda t: t[:, :, :1].expand(t.shape),
    "one batch for all": lambda t: t[:1].expand(t.shape),
    "batch inside": lambda t: t.movedim(0, 3).contiguous().movedim(3, 0),
}


@FORMS
@EACH_DTYPE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, dtype, interleaved):
    q = LAYOUTS[layout](normal(2, 9, 5, 32, dtype=dtype))
    k = normal(2, 9, 2, 32, dtype=dtype, seed=1)
    cos, sin = tables(9, 16, dtype=dtype)
    want = run(q.contiguous(), k, cos, sin, interleaved)
    assert all(map(torch.equal, run(q, k, cos, sin, interleaved), want))
    made = run(k, q, cos.mT.contiguous().mT, sin, interleaved)
    assert all(map(torch.equal, made, want[::-1]))


@FORMS
@EACH_DTYPE
def test_tables_of_any_strides(dtype, interleaved):
    q, k = normal(2, 9, 2, 32, dtype=dtype), normal(2, 9, 1, 32, dtype=dtype, seed=1)
    cos, sin = tables(2, 9, 16, dtype=dtype)
    want = run(q, k, cos, sin, interleaved)
    for form in (
        lambda t: t.mT.contiguous().mT,
        lambda t: torch.stack([t, t], 3)[..., 0],
        lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape),
    ):
        for one, other in ((form(cos), sin), (cos, form(sin))):
            made = run(q, k, one, other, interleaved)
            assert all(map(torch.equal, made, want))
            assert "cos" in why() or "sin" in why()
    repeated = cos[:, :1].expand(cos.shape), sin[:1].expand(sin.shape)
    run(q, k, *repeated, interleaved)


def test_what_is_narrow_is_named():
    q, k = normal(1, 4, 2, 40, dtype=F16), normal(1, 4, 1, 40, dtype=F16)
    run(q, k, *tables(4, 12))
    assert why() == "narrow: q, k rotary dim 24 is not a multiple of 16"
    run(q, k, *tables(4, 12), True)
    assert why() == "wide: 16 bytes of q and k at a time"
    run(q[..., :36], k[..., :36], *tables(4, 8))
    assert why() == "narrow: q, k head dim 36 is not a multiple of 8"
    run(LAYOUTS["one element on"](q), k, *tables(4, 8))
    assert why() == "narrow: q base is not 16-byte aligned"


@FORMS
def test_strides_beyond_2_to_31_elements(interleaved):
    # Gigabytes of address space, of which a few pages are ever touched.
    stride = 2**31 + 2**20
    memory = torch.empty(stride + 96, dtype=F16)
    for sizes, strides in (
        ((2, 3, 2, 16), (stride, 32, 16, 1)),
        ((1, 2, 2, 16), (32, stride, 16, 1)),
        ((1, 2, 2, 16), (32, 16, stride, 1)),
        ((1, 3, 1, 2), (3, 1, 1, stride)),
    ):
        q = memory.as_strided(sizes, strides).copy_(normal(*sizes))
        k = normal(*sizes[:2], 1, sizes[3], dtype=F16)
        run(q, k, *tables(sizes[1], sizes[3] // 2), interleaved)


@EACH_DTYPE
def test_nan_and_infinities_stay_in_their_pair(dtype):
    q, k = normal(1, 3, 2, 24, dtype=dtype), normal(1, 3, 1, 24, dtype=dtype, seed=1)
    cos, sin = tables(3, 8, dtype=dtype)
    clean, _ = fa.apply_rotary(q, k, cos, sin)
    dirty = q.clone()
    dirty[0, 1, 0, 2], dirty[0, 1, 0, 20] = torch.inf, torch.nan
    out, _ = fa.apply_rotary(dirty, k, cos, sin)
    changed = out != clean
    assert changed.nonzero()[:, 3].tolist() == [2, 10, 20]
    assert out[0, 1, 0, 20].isnan() and not out[0, 1, 0, 2].isfinite()


def test_denormals_and_the_largest_numbers():
    cos, sin = tables(8, 8)
    for dtype in (F16, BF16, F32, F64):
        facts = torch.finfo(dtype)
        for factor in (facts.tiny / 16, facts.max / 8):
            if dtype is not BF16 or factor > 1:  # whose denormals are fp32's too
                x = (normal(1, 8, 1, 16, dtype=F64) * factor).to(dtype)
                wide = _ops.lse_dtype(dtype)
                made = fa.apply_rotary(x, x, cos.to(wide), sin.to(wide))
                exact, loss = oracle(x, cos.to(wide), sin.to(wide), False)
                unit = max(facts.eps, torch.finfo(wide).eps)
                least = facts.tiny * facts.eps
                bound = unit * loss + least
                assert (abs(numbers(made[0]) - exact) <= bound).all(), (dtype, factor)


@pytest.mark.parametrize("empty", ["batch", "tokens", "heads", "key heads"])
def test_empty_tensors(empty):
    batch, tokens = int(empty != "batch"), 3 * (empty != "tokens")
    q = normal(batch, tokens, 2 * (empty != "heads"), 16, dtype=F16)
    k = normal(batch, tokens, 2 * (empty != "key heads"), 16, dtype=F16)
    run(q, k, *tables(tokens, 8))
    leaf_q, leaf_k = q.requires_grad_(), k.requires_grad_()
    made = fa.apply_rotary(leaf_q, leaf_k, *tables(tokens, 8))
    grads = torch.autograd.grad(made, (q, k), [t.detach() for t in made])
    assert [g.shape for g in grads] == [q.shape, k.shape]


# ------------------------------------------------------------------------- gradients


def leaves(dtype, dim=12, tokens=3):
    shapes = (2, tokens, 2, dim), (2, tokens, 1, dim)
    return tuple(
        normal(*shape, dtype=dtype, seed=seed).requires_grad_()
        for seed, shape in enumerate(shapes)
    )


@FORMS
@pytest.mark.parametrize("columns", [2, 1])
def test_gradcheck_of_first_and_second_order(columns, interleaved):
    cos, sin = tables(2, 2, columns, dtype=F64)

    def call(q, k):
        return fa.apply_rotary(q, k, cos, sin, interleaved)

    assert torch.autograd.gradcheck(call, leaves(F64, 4, 2))
    assert torch.autograd.gradgradcheck(call, leaves(F64, 4, 2), fast_mode=True)


@FORMS
@EACH_DTYPE
def test_the_gradient_is_the_rotation_back(dtype, interleaved):
    q, k = leaves(dtype)
    cos, sin = tables(3, 4, dtype=dtype)
    made = fa.apply_rotary(q, k, cos, sin, interleaved)
    dout = normal(*q.shape, dtype=dtype, seed=3), normal(*k.shape, dtype=dtype, seed=4)
    grads = torch.autograd.grad(made, (q, k), dout)
    assert fa.last_call().kernel.startswith("fa_rotary")
    for grad, cotangent in zip(grads, dout):
        check(grad, cotangent, cos, sin, interleaved, inverse=True)


@FORMS
def test_the_inverse_undoes_it(interleaved):
    q, k = normal(2, 9, 3, 24, dtype=F64), normal(2, 9, 1, 24, dtype=F64, seed=1)
    cos, sin = tables(9, 8, dtype=F64)
    turned = _ops.rotary_op(q, k, cos, sin, interleaved, False)
    for x, back in zip((q, k), _ops.rotary_op(*turned, cos, sin, interleaved, True)):
        assert torch.allclose(back, x, rtol=0, atol=1e-15)


def test_scores_depend_on_the_distance_of_tokens_alone():
    """What the embedding is for; RoFormer, equation 16."""
    angle = torch.arange(40, dtype=F64)[:, None] * 10.0 ** -torch.arange(4, dtype=F64)
    q, k = (normal(1, 1, 1, 8, dtype=F64, seed=s).expand(1, 40, 1, 8) for s in (0, 1))
    q, k = fa.apply_rotary(q, k, angle.cos(), angle.sin())
    scores = q[0, :, 0] @ k[0, :, 0].T
    for distance in range(-39, 40):
        line = scores.diagonal(distance)
        assert torch.allclose(line, line[:1].expand_as(line), rtol=0, atol=1e-13)


def test_only_what_needs_a_gradient_is_turned_back():
    q, k = leaves(F32)
    cos, sin = tables(3, 6)
    groups = []
    for wanted in ((q,), (k,), (q, k)):
        made = fa.apply_rotary(
            q if any(t is q for t in wanted) else q.detach(),
            k if any(t is k for t in wanted) else k.detach(),
            *(cos, sin),
        )
        sum(t.sum() for t in made).backward()
        groups.append(fa.last_call().counters["workgroups"])
    assert groups == [2, 2, 4]  # a tile of tokens for each batch and tensor


def test_one_output_alone_has_gradients_too():
    q, k = leaves(F32)
    cos, sin = tables(3, 6)
    _, out_k = fa.apply_rotary(q, k, cos, sin)
    grads = torch.autograd.grad(out_k.sum(), (q, k), allow_unused=True)
    assert grads[0] is None
    check(grads[1], torch.ones_like(k), cos, sin, False, inverse=True)


def test_a_backward_runs_where_its_forward_was_simulated(monkeypatch):
    monkeypatch.setattr(_simulate, "_last_traced", None)
    q, k = leaves(F32)
    cos, sin = tables(3, 6)
    made = fa.apply_rotary(q, k, cos, sin)
    found = []

    def elsewhere():  # a thread that simulates nothing
        dout = [t.detach() for t in made]
        for order in (1, 2):
            grads = torch.autograd.grad(made, (q, k), dout, create_graph=order == 1)
            found.append(grads)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(found) == 2 and torch.equal(found[0][0], found[1][0])


# ------------------------------------------------------------------- torch's machinery


@EACH_DTYPE
def test_the_op_keeps_torchs_rules(dtype):
    q, k = normal(2, 3, 2, 16, dtype=dtype), normal(2, 3, 1, 16, dtype=dtype)
    torch.library.opcheck(_ops.rotary_op, (q, k, *tables(3, 8, dtype=dtype), 0, 0))
    batched = tables(2, 3, 4, dtype=_ops.lse_dtype(dtype))
    narrow = LAYOUTS["channels outside"](q)
    torch.library.opcheck(_ops.rotary_op, (narrow, k, *batched, True, True))


def test_the_schema_is_the_same_from_c_and_python():
    assert str(_ops.rotary_op._schema) == "flash_attn_rocm::" + _ops.ROTARY_SCHEMA


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_graph_break(backend):
    torch._dynamo.reset()
    q, k = leaves(F32)
    cos, sin = tables(3, 6)
    compiled = torch.compile(fa.apply_rotary, fullgraph=True, backend=backend)
    made, want = compiled(q, k, cos, sin), fa.apply_rotary(q, k, cos, sin)
    assert all(map(torch.equal, made, want))
    grads = (
        torch.autograd.grad(x, (q, k), [t.detach() for t in x]) for x in (made, want)
    )
    assert all(map(torch.equal, *grads))
    with torch.no_grad():
        assert all(map(torch.equal, compiled(q, q, cos, cos), run(q, q, cos, cos)))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_without_gradients_is_a_batch():
    q, k = normal(3, 2, 4, 2, 8, dtype=F16), normal(3, 2, 4, 1, 8, dtype=F16)
    cos, sin = tables(4, 4)
    made = torch.vmap(fa.apply_rotary, in_dims=(0, 0, None, None))(q, k, cos, sin)
    for b in range(3):
        want = fa.apply_rotary(q[b], k[b], cos, sin)
        assert all(torch.equal(x[b], y) for x, y in zip(made, want))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batches_of_gradients_are_those_one_by_one():
    q, k = leaves(F32)
    made = fa.apply_rotary(q, k, *tables(3, 6))
    douts = [normal(3, *t.shape, seed=4) for t in made]
    options = dict(retain_graph=True)
    got = torch.autograd.grad(made, (q, k), douts, is_grads_batched=True, **options)
    for at in range(3):
        want = torch.autograd.grad(made, (q, k), [t[at] for t in douts], **options)
        assert all(torch.equal(g[at], w) for g, w in zip(got, want))


def test_gradients_under_a_transform_are_refused():
    q, k = normal(1, 2, 1, 4), normal(1, 2, 1, 4)
    cos, sin = tables(2, 2)

    def loss(x):
        return fa.apply_rotary(x, k, cos, sin)[0].sum()

    with pytest.raises(FlashAttnError, match=r"^q: .*functorch transform"):
        torch.func.grad(loss)(q)
    with pytest.raises(FlashAttnError, match=r"^q: .*tangent"):
        torch.func.jvp(loss, (q,), (q,))
    # Inside of vmap such a tensor says that it requires none.
    batch = torch.stack([q, q])
    for wanted in (0, 1):
        leaf = batch.clone().requires_grad_()
        tensors = (leaf, batch) if wanted == 0 else (batch, leaf)
        with pytest.raises(FlashAttnError, match=r"^[qk]: .*requires grad outside"):
            torch.vmap(fa.apply_rotary, (0, 0, None, None))(*tensors, cos, sin)
        with torch.no_grad():
            torch.vmap(fa.apply_rotary, (0, 0, None, None))(*tensors, cos, sin)


def test_autocast_changes_nothing():
    q, k = normal(1, 3, 1, 8), normal(1, 3, 1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        made = fa.apply_rotary(q, k, *tables(3, 4))
    assert all(map(torch.equal, made, run(q, k, *tables(3, 4))))


# -------------------------------------------------------------------------- refusals

GOOD = dict(
    q=normal(2, 3, 4, 8, dtype=F16),
    k=normal(2, 3, 1, 8, dtype=F16),
    cos=tables(3, 4)[0],
    sin=tables(3, 4)[1],
)

REFUSED = {
    "no tensor": (dict(cos=1.0), "cos: expected a tensor, got float"),
    "rank": (dict(q=GOOD["q"][0]), r"q: expected 4 dimensions .*, got shape \(3, 4, 8"),
    "dtype": (dict(q=GOOD["q"].int()), "q: expected dtype .*, got torch.int32"),
    "two dtypes": (dict(k=GOOD["k"].float()), "k: expected q's dtype torch.float16"),
    "sparse": (dict(sin=GOOD["sin"].to_sparse()), "sin: expected a strided tensor"),
    "device": (dict(k=GOOD["k"].to("meta")), "k: expected q's device cpu, got meta"),
    "table elsewhere": (
        dict(sin=GOOD["sin"].to("meta")),
        "sin: expected q's device cpu, got meta",
    ),
    "batches": (dict(k=GOOD["k"][:1]), "k: expected q's batch size 2, got 1"),
    "lengths": (dict(k=GOOD["k"][:, :2]), "k: expected q's length 3, got 2"),
    "head dims": (dict(k=GOOD["k"][..., :6]), "k: expected q's head dim 8, got 6"),
    "no channels": (
        dict(q=GOOD["q"][..., :0], k=GOOD["k"][..., :0]),
        "q: expected a head dim from 1 to 256, got 0",
    ),
    "wide head": (
        dict(q=normal(1, 1, 1, 257), k=normal(1, 1, 1, 257)),
        "q: expected a head dim from 1 to 256, got 257",
    ),
    "table dtype": (
        dict(cos=GOOD["cos"].double()),
        "cos: expected dtype torch.float16 or torch.float32, got torch.float64",
    ),
    "table rank": (dict(cos=GOOD["cos"][0]), r"cos: expected shape \(3, columns\) or"),
    "table rows": (dict(cos=GOOD["cos"][:2]), r"cos: .* of q, got \(2, 4\)"),
    "table batch": (
        dict(cos=GOOD["cos"].expand(3, 3, 4)),
        r"cos: expected shape .*\(2, 3, columns\).*, got \(3, 3, 4\)",
    ),
    "odd rotary dim": (
        dict(q=GOOD["q"][..., :7], k=GOOD["k"][..., :7]),
        "cos: expected at most 3 columns, one for each pair of q's 7 channels, got 4",
    ),
    "full columns": (
        dict(zip(("cos", "sin"), tables(3, 8))),
        "cos: expected at most 4 columns, .*, got 8",
    ),
    "two table dtypes": (
        dict(sin=GOOD["sin"].half()),
        "sin: expected cos's dtype torch.float32, got torch.float16",
    ),
    "two table shapes": (
        dict(sin=GOOD["sin"][None]),
        r"sin: expected cos's shape \(3, 4\), got \(1, 3, 4\)",
    ),
    "gradient of cos": (
        dict(cos=GOOD["cos"].clone().requires_grad_()),
        "cos: expected a table that needs no gradient",
    ),
    "gradient of sin": (
        dict(sin=GOOD["sin"].clone().requires_grad_()),
        "sin: expected a table that needs no gradient",
    ),
    "form": (dict(interleaved="yes"), "interleaved: expected True or False, got 'yes'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_by_name(name):
    changes, message = REFUSED[name]
    assert fa.apply_rotary(**GOOD)
    with pytest.raises(FlashAttnError, match="^" + message):
        fa.apply_rotary(**{**GOOD, **changes})


def test_tables_that_require_a_gradient_are_fine_without_grad_mode():
    cos = GOOD["cos"].clone().requires_grad_()
    with torch.no_grad():
        fa.apply_rotary(**{**GOOD, "cos": cos})


# To the op itself; the same words from C and from Python.
OP_REFUSED = {
    "rank": (dict(q=GOOD["q"][0]), r"q: expected 4 dimensions \(batch, seqlen, heads"),
    "table rank": (dict(cos=GOOD["cos"][0]), "cos: expected 2 dimensions .*, got 1"),
    "table of 4": (
        dict(sin=GOOD["sin"][None, None]),
        "sin: expected 2 dimensions .*, got 4",
    ),
    "dtype": (dict(q=GOOD["q"].int()), "q: expected dtype float16, bfloat16, float32"),
    "two dtypes": (
        dict(k=GOOD["k"].float()),
        "k: expected dtype float16 .as q., got f",
    ),
    "heads": (
        dict(k=GOOD["k"][:, :2]),
        r"k: expected size 3 in dimension 1 \(seqlen, as in q\), got 2",
    ),
    "no channels": (
        dict(q=GOOD["q"][..., :0], k=GOOD["k"][..., :0]),
        r"q: expected a size of 1..256 in dimension 3 \(head dim\), got 0",
    ),
    "table dtype": (
        dict(cos=GOOD["cos"].double(), sin=GOOD["sin"].double()),
        "cos: expected dtype float16 or float32, got float64",
    ),
    "table rows": (dict(cos=GOOD["cos"][:2]), "cos: expected 3 rows .*, got 2"),
    "table batch": (
        dict(cos=GOOD["cos"].expand(3, 3, 4)),
        r"cos: expected batch size 1 or 2 \(as in q\), got 3",
    ),
    "columns": (
        dict(cos=tables(3, 5)[0]),
        "cos: expected at most 4 columns .*head dim 8 of q.*, got 5",
    ),
    "two table dtypes": (dict(sin=GOOD["sin"].half()), "sin: expected dtype float32 "),
    "two shapes": (
        dict(sin=GOOD["sin"][:, :3]),
        r"sin: expected 4 columns \(as cos\), got 3",
    ),
}


@pytest.mark.parametrize("name", OP_REFUSED)
def test_the_op_refuses_by_name_too(name):
    changes, message = OP_REFUSED[name]
    with pytest.raises(RuntimeError, match=message):
        _ops.rotary_op(*{**GOOD, **changes}.values(), False, False)


def test_without_a_device_that_runs_it(monkeypatch):
    monkeypatch.setattr(_simulate, "_arch", ContextVar("none", default=None))
    with pytest.raises(FlashAttnError, match=r"^q: expected a GPU tensor"):
        fa.apply_rotary(**GOOD)


@pytest.mark.skipif(FROM_PYTHON, reason="this is the second process")
def test_all_this_holds_when_registered_from_python():
    code = """
import sys, pytest
chosen = "refuses or refused or schema or inverse or differ or empty or rules"
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", chosen, sys.argv[1]]))
"""
    path = str(ROOT / "tests" / "test_rotary.py")
    done = run_forked(code, path, env={"FLASH_ATTN_ROCM_PYTHON_OPS": "1"})
    assert " passed" in done.stdout and "failed" not in done.stdout
