"""scaled_dot_product_attention with masks, dropout and tensors of any rank: fused, with
stock's meaning, and in place; what stock refuses is refused by stock.

SPDX-License-Identifier: BSD-3-Clause
"""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import qkv, stock_sdpa
from helpers.dense import assert_like, gradients
from helpers.dense import attention as dense
from helpers.gradients import leaves
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import flash_attn_rocm as fa
from flash_attn_rocm import Reason, _autograd, _shim

pytestmark = pytest.mark.usefixtures("patched", "simulated")

needs_gqa = pytest.mark.skipif(
    torch.__version__ < (2, 5), reason="enable_gqa came with torch 2.5"
)
TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def inputs(length=6, length_k=9, *, batch=2, heads=4, heads_k=4, dtype=torch.float64):
    return qkv(batch, heads, length, 8, heads_k=heads_k, length_k=length_k, dtype=dtype)


def normal(*sizes, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)


def assert_fused():
    call = fa.last_call()
    assert call.reason is Reason.FUSED and call.backend == "sim", call


def math_sdpa(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return stock_sdpa(*args, **kwargs)


def compare(tensors, *, rtol=1e-8, **options):
    """The call runs fused, and out and gradients are those of the math path."""
    got = F.scaled_dot_product_attention(*tensors, **options)
    assert_fused()
    want = math_sdpa(*tensors, **options)
    assert got.dtype is want.dtype
    assert_like(got, want, rtol)
    wanted = [t for t in (*tensors, options.get("attn_mask")) if t is not None]
    wanted = [t for t in wanted if t.requires_grad]
    if wanted:
        dout = normal(*want.shape, seed=2, dtype=want.dtype)
        exact = gradients([want], [dout], wanted)
        for one, other in zip(gradients([got], [dout], wanted), exact):
            assert one.dtype is other.dtype and one.shape == other.shape
            assert_like(one, other, rtol)


# ------------------------------------------------------------------------------ masks

SIZES = [
    (6, 9),
    (1, 9),
    (6, 1),
    (1, 1),
    (4, 6, 9),
    (1, 6, 9),
    (2, 4, 6, 9),
    (2, 1, 1, 9),
]


@pytest.mark.parametrize("kind", ["bool", "float", "float that requires grad"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_mask_broadcasts_as_in_stock(sizes, kind):
    mask = normal(*sizes)
    if kind == "bool":
        mask = mask > -1
    mask.requires_grad_("grad" in kind)
    compare(leaves(*inputs()), attn_mask=mask)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mask_dtype", ["own", torch.float32, torch.bool])
def test_masks_of_every_dtype_that_stock_takes(dtype, mask_dtype):
    kind = dtype if mask_dtype == "own" else mask_dtype
    mask = normal(2, 1, 6, 9).to(kind) if kind is not torch.bool else normal(6, 9) > -1
    tensors = inputs(dtype=dtype)
    compare(tensors, attn_mask=mask, rtol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("fill", ["-inf", "lowest", False])
def test_rows_and_tiles_that_see_nothing(fill):
    q, k, v = leaves(*inputs(7, 140))
    keep = torch.ones(7, 140, dtype=torch.bool)
    keep[:, :70], keep[3] = False, False
    mask = keep
    if fill is not False:
        low = -math.inf if fill == "-inf" else torch.finfo(torch.float64).min
        mask = torch.zeros(7, 140, dtype=torch.float64).masked_fill(~keep, low)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert_fused()
    live = torch.arange(7) != 3
    want, _ = dense(q, k, v, seen=keep)
    assert_like(out[:, :, live], want[:, :, live])
    dout = normal(*out.shape, seed=2)
    got = gradients([out[:, :, live]], [dout[:, :, live]], (q, k, v))
    exact = gradients([want[:, :, live]], [dout[:, :, live]], (q, k, v))
    for one, other in zip(got, exact):
        assert_like(one, other, 1e-8)
    if fill != "lowest":
        assert not out[:, :, 3].any()


@needs_gqa
@pytest.mark.parametrize("kind", ["bool", "float", "float that requires grad"])
def test_masks_go_with_grouped_heads(kind):
    mask = normal(4, 1, 9) if kind != "bool" else normal(2, 4, 6, 9) > -1
    mask.requires_grad_("grad" in kind)
    tensors = leaves(*inputs(heads_k=2))
    compare(tensors, attn_mask=mask, enable_gqa=True)


def views():
    """Masks (6, 9) that lie in memory in every way."""
    wide = normal(2, 4, 6, 24)
    yield "rows apart", wide[..., 3:12]
    yield "keys apart", wide[..., ::2][..., :9]
    yield "transposed", normal(9, 6).mT
    yield "expanded", normal(6, 9).expand(2, 4, 6, 9)
    yield "one number", normal(1).expand(2, 4, 6, 9)
    yield "negated", torch._neg_view(normal(6, 9))


VIEWS = dict(views())


@pytest.mark.parametrize("name", VIEWS)
def test_a_mask_is_read_where_it_lies(name, monkeypatch):
    seen = []
    forward = _autograd._forward

    def spy(q, k, v, features, *rest):
        seen.append(features.bias)
        return forward(q, k, v, features, *rest)

    monkeypatch.setattr(_autograd, "_forward", spy)
    mask = VIEWS[name]
    compare(inputs(), attn_mask=mask)
    (bias,) = seen
    assert bias.dim() == 4 and bias.data_ptr() == mask.data_ptr()
    assert bias.untyped_storage().nbytes() == mask.untyped_storage().nbytes()
    assert bias.stride()[2:] == mask.stride()[-2:]


@pytest.mark.parametrize("wanted", [("mask",), ("q",), ("k", "v")], ids=str)
def test_only_wanted_gradients_are_computed(wanted, monkeypatch):
    sets = []
    launch = _autograd._launch

    def spy(*args):
        sets.append(args[-2])
        return launch(*args)

    monkeypatch.setattr(_autograd, "_launch", spy)
    tensors = dict(zip("qkv", leaves(*inputs())), mask=normal(6, 9).requires_grad_())
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in wanted)
    *qkv_, mask = tensors.values()
    F.scaled_dot_product_attention(*qkv_, attn_mask=mask).sum().backward()
    bits = {"q": 1, "k": 2, "v": 4, "mask": 8}
    assert sets == [sum(bits[name] for name in wanted)]
    for name, tensor in tensors.items():
        assert (tensor.grad is not None) == (name in wanted)


def test_the_second_derivative_of_a_mask():
    tensors = (*leaves(*inputs(3, 4)), normal(4, 1, 4).requires_grad_())

    def call(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)
    assert_fused()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", [torch.float32, torch.float16, torch.bfloat16, torch.bool]
)
def test_autocast_takes_every_mask_that_stock_casts(dtype, kind):
    q, k, v = leaves(*inputs(dtype=torch.float32))
    mask = normal(6, 9) > -1 if kind is torch.bool else normal(6, 9).to(kind)
    mask.requires_grad_(kind is not torch.bool)
    with torch.autocast("cpu", dtype):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert_fused()
        with pytest.raises(RuntimeError, match="attn_mask"):
            F.scaled_dot_product_attention(q, k, v, attn_mask=normal(6, 9))
    assert out.dtype is dtype
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    table = mask.detach() if kind is torch.bool else mask.detach().double()
    options = {"seen": table} if kind is torch.bool else {"bias": table}
    want, _ = dense(*exact, **options)
    assert_like(out, want, 10 * torch.finfo(dtype).eps)
    dout = normal(*out.shape, seed=2, dtype=dtype)
    wanted = (q, k, v, mask) if mask.requires_grad else (q, k, v)
    got = gradients([out], [dout], wanted)
    for one, other, leaf in zip(got, gradients([want], [dout.double()], exact), wanted):
        assert one.dtype is leaf.dtype
        assert_like(one, other, 20 * torch.finfo(dtype).eps)
    if mask.requires_grad:
        assert got[3].dtype is kind and got[3].any()


# ---------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("masked", [False, True])
def test_dropout_repeats_by_manual_seed_and_drops_as_often_as_it_says(masked):
    q, k, _ = inputs(64, 64, batch=1)
    v = torch.eye(64, dtype=torch.float64).expand(1, 4, 64, 64)
    mask = normal(64, 64) > -0.5 if masked else None

    def call():
        torch.manual_seed(3)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.25)

    out = call()
    assert_fused()
    assert torch.equal(out, call())
    again = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.25)
    assert not torch.equal(out, again)
    whole = F.scaled_dot_product_attention(q, k, v, mask)
    kept = (out != 0) & (whole != 0)
    share = float(kept.sum() / (whole != 0).sum())
    assert abs(share - 0.75) < 5 * (0.1875 / int((whole != 0).sum())) ** 0.5
    assert_like(out, whole.where(kept, torch.zeros(())) / 0.75, 2e-5)


def test_dropout_has_gradients_of_its_own_mask_also_when_checkpointed():
    tensors = leaves(*inputs())

    def call(*t):
        return F.scaled_dot_product_attention(*t, dropout_p=0.5)

    def seeded(*t):
        torch.manual_seed(4)
        return call(*t)

    assert torch.autograd.gradcheck(seeded, tensors, fast_mode=True)
    want = torch.autograd.grad(seeded(*tensors).square().sum(), tensors)
    torch.manual_seed(4)
    out = checkpoint(call, *tensors, use_reentrant=False)
    got = torch.autograd.grad(out.square().sum(), tensors)
    assert all(torch.equal(one, other) for one, other in zip(got, want))


def test_explaining_draws_no_random_numbers():
    q, k, v = inputs()
    state = torch.get_rng_state()
    told = fa.explain(q, k, v, dropout_p=0.5)
    assert told.fused and torch.equal(torch.get_rng_state(), state)
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert fa.last_call().kernel == told.kernel and told.kernel.endswith("_full")
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mask", [(6, 9), (4, 1, 9)])
def test_explain_names_the_backward_of_a_mask(mask):
    q, k, v = inputs()
    table = normal(*mask).requires_grad_()
    told = fa.explain(q, k, v, table)
    F.scaled_dot_product_attention(q, k, v, table).sum().backward()
    assert "bias" in told.why and told.backward == fa.last_call().kernel
    assert "_bwd_bias_" in told.backward


def test_a_backward_that_cannot_be_launched_is_computed_by_torch(monkeypatch):
    tensors = (*leaves(*inputs()), normal(4, 1, 9).requires_grad_())
    torch.manual_seed(1)
    out = F.scaled_dot_product_attention(*tensors, dropout_p=0.3)
    want = torch.autograd.grad(out.square().sum(), tensors, retain_graph=True)

    def broken(*args):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(_autograd, "_launch", broken)
    got = torch.autograd.grad(out.square().sum(), tensors)
    assert fa.last_call().reason is Reason.FAILED
    for one, other in zip(got, want):
        assert_like(one, other, 1e-10)


def test_a_forward_that_cannot_be_launched_is_answered_by_stock(monkeypatch):
    def broken(*args):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(_autograd._ops, "op", broken)
    monkeypatch.setattr(_shim, "_op", broken)
    q, k, v = inputs()
    for grad in (False, True):
        out = F.scaled_dot_product_attention(
            q.requires_grad_(grad), k, v, attn_mask=normal(6, 9)
        )
        assert fa.last_call().reason is Reason.FAILED
        assert torch.equal(out, stock_sdpa(q, k, v, attn_mask=normal(6, 9)))


# ------------------------------------------------------------------ ranks and batches

Q, K, V = inputs()
SHAPES = {
    "2-D": lambda q, k, v: (q[0, 0], k[0, 0], v[0, 0]),
    "3-D": lambda q, k, v: (q[0], k[0], v[0]),
    "5-D": lambda q, k, v: (q[None], k[None], v[None]),
    "6-D": lambda q, k, v: (q[None, :, None], k[None, :, None], v[None, :, None]),
    "5-D of a split": lambda q, k, v: tuple(
        torch.cat([t, t, t]).unflatten(0, (3, 2)) for t in (q, k, v)
    ),
    "keys without batch": lambda q, k, v: (q, k[0], v[0]),
    "queries without batch": lambda q, k, v: (q[0], k, v),
    "one batch of keys": lambda q, k, v: (q, k[:1], v[:1]),
    "one batch of queries": lambda q, k, v: (q[:1], k, v),
    "one batch of values": lambda q, k, v: (q, k, v[:1]),
    "one head of keys": lambda q, k, v: (q, k[:, :1], v[:, :1]),
    "one head of values": lambda q, k, v: (q, k, v[:, :1]),
    "one head of queries": lambda q, k, v: (q[:, :1], k, v),
    "3-D, one for all": lambda q, k, v: (q[0], k[0, :1], v[0, :1]),
    "2-D and 3-D": lambda q, k, v: (q[0, 0], k[0], v[0]),
    "another order": lambda q, k, v: tuple(
        t.transpose(1, 2).contiguous().transpose(1, 2)[None] for t in (q, k, v)
    ),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_other_ranks_and_broadcast_batches_run_fused(name, causal):
    tensors = leaves(*inputs())
    shaped = SHAPES[name](*tensors)
    got = F.scaled_dot_product_attention(*shaped, is_causal=causal)
    assert_fused()
    want = math_sdpa(*shaped, is_causal=causal)
    assert_like(got, want)
    dout = normal(*want.shape, seed=2)
    exact = gradients([want], [dout], tensors)
    for one, other in zip(gradients([got], [dout], tensors), exact):
        assert_like(one, other, 1e-8)
    with torch.no_grad():
        assert torch.equal(
            F.scaled_dot_product_attention(*shaped, is_causal=causal), got
        )


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("2-D", (6, 9)),
        ("2-D", (1, 9)),
        ("3-D", (6, 9)),
        ("3-D", (4, 6, 9)),
        ("3-D", (4, 1, 1)),
        ("5-D", (1, 2, 4, 6, 9)),
        ("5-D", (2, 4, 6, 9)),
        ("5-D of a split", (3, 2, 1, 6, 9)),
        ("5-D of a split", (1, 1, 4, 6, 9)),
        ("5-D of a split", (4, 6, 9)),
        ("5-D of a split", (6, 9)),
        ("one batch of keys", (2, 1, 6, 9)),
        ("one head of queries", (4, 6, 1)),
    ],
)
def test_masks_fit_other_ranks(name, sizes):
    mask = normal(*sizes).requires_grad_()
    compare(SHAPES[name](*inputs()), attn_mask=mask)
    compare(SHAPES[name](*inputs()), attn_mask=mask.detach() > -1)


@pytest.mark.parametrize("name", ["one batch of keys", "3-D", "5-D of a split"])
def test_autocast_of_other_ranks(name):
    tensors = leaves(*inputs(dtype=torch.float32))
    shaped = SHAPES[name](*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        got = F.scaled_dot_product_attention(*shaped)
        assert_fused()
    want = math_sdpa(*(t.double() for t in shaped))
    assert_like(got, want, 10 * torch.finfo(torch.bfloat16).eps)
    dout = normal(*want.shape, seed=2).bfloat16()
    got = gradients([got], [dout], tensors)
    for one, other in zip(got, gradients([want], [dout.double()], tensors)):
        assert one.dtype is torch.float32
        assert_like(one, other, 10 * torch.finfo(torch.bfloat16).eps)


@needs_gqa
@pytest.mark.parametrize("name", ["3-D", "5-D", "one batch of keys"])
def test_grouped_heads_of_other_ranks(name):
    compare(SHAPES[name](*inputs(heads_k=2)), enable_gqa=True)


# -------------------------------------------------------------------- stock's to judge

STOCKS = {
    "mask and causal": (
        lambda f: f(Q, K, V, attn_mask=normal(6, 9), is_causal=True),
        Reason.MASK,
    ),
    "1-D mask": (lambda f: f(Q, K, V, attn_mask=normal(9)), Reason.MASK),
    "5-D mask": (lambda f: f(Q, K, V, attn_mask=normal(1, 2, 4, 6, 9)), Reason.MASK),
    "mask of other heads": (
        lambda f: f(Q, K, V, attn_mask=normal(3, 6, 9)),
        Reason.MASK,
    ),
    "mask of other keys": (lambda f: f(Q, K, V, attn_mask=normal(6, 8)), Reason.MASK),
    "mask of more batches": (
        lambda f: f(Q[:1], K[:1], V[:1], attn_mask=normal(3, 1, 6, 9)),
        Reason.MASK,
    ),
    "mask of a half": (
        lambda f: f(Q, K, V, attn_mask=normal(6, 9, dtype=torch.float16)),
        Reason.MASK,
    ),
    "mask of a double": (
        lambda f: f(Q.float(), K.float(), V.float(), attn_mask=normal(6, 9)),
        Reason.MASK,
    ),
    "mask of whole numbers": (
        lambda f: f(Q, K, V, attn_mask=torch.ones(6, 9, dtype=torch.int32)),
        Reason.MASK,
    ),
    "mask of bytes": (
        lambda f: f(Q, K, V, attn_mask=torch.ones(6, 9, dtype=torch.uint8)),
        Reason.MASK,
    ),
    "mask of a 3-D call by 4-D": (
        lambda f: f(Q[0], K[0], V[0], attn_mask=normal(1, 4, 6, 9)),
        Reason.MASK,
    ),
    "grouped 2-D": (
        lambda f: f(Q[0, 0], K[0, 0], V[0, 0], enable_gqa=True),
        Reason.RANK if torch.__version__ >= (2, 5) else Reason.ARGUMENT,
    ),
    "batches that do not broadcast": (
        lambda f: f(torch.cat([Q, Q[:1]]), K, V),
        Reason.SHAPE,
    ),
    "dropout above 1": (lambda f: f(Q, K, V, dropout_p=1.5), Reason.DROPOUT),
    "dropout below 0": (lambda f: f(Q, K, V, dropout_p=-0.5), Reason.DROPOUT),
}


@pytest.mark.parametrize("name", STOCKS)
def test_what_stock_refuses_is_refused_by_stock(name):
    call, reason = STOCKS[name]

    def outcome(function):
        try:
            return function()
        except Exception as error:
            return type(error), str(error)

    got = outcome(lambda: call(F.scaled_dot_product_attention))
    assert fa.last_call().reason is reason, fa.last_call()
    want = outcome(lambda: call(stock_sdpa))
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want)
    else:
        assert got == want


def test_a_mask_whose_rows_lie_too_far_apart_is_stocks():
    far = torch.empty(2 * 2**21, dtype=torch.float64).as_strided((2, 9), (2**21, 1))
    far.copy_(normal(2, 9))
    q = Q[:, :, :2]
    out = F.scaled_dot_product_attention(q, K, V, attn_mask=far)
    assert fa.last_call().reason is Reason.MASK
    assert torch.equal(out, stock_sdpa(q, K, V, attn_mask=far))


@pytest.mark.parametrize("level", ["vmap", "grad"])
def test_functorch_with_a_mask_is_stocks(level):
    mask = normal(6, 9)

    def call(q):
        return F.scaled_dot_product_attention(q, K[0], V[0], attn_mask=mask)

    if level == "vmap":
        got = torch.vmap(call)(Q)
    else:
        got = torch.func.grad(lambda q: call(q).sum())(Q[0])
    assert fa.last_call().reason is Reason.FUNCTORCH and got.isfinite().all()
