"""Dropout: each bit of the mask of each kernel, read off and replayed on the host.

With values of an identity matrix the output is the matrix of weights; with a dout of
one the gradients of v are its column sums. Accuracy with dropout:
test_feature_gradients.py.

SPDX-License-Identifier: BSD-3-Clause
"""

import math

import pytest
import torch
from helpers import BOTTOM_RIGHT, TOP_LEFT, needs_simulator
from helpers.combinations import KINDS, every_kind, some_kinds
from helpers.features import (
    WANT_DBIAS,
    WANT_DK,
    WANT_DQ,
    WANT_DV,
    backward,
    exact,
    forward,
    lse_error,
    problem,
    run,
    seed_of,
)
from helpers.kernels import DEVICE, FULL, HALVES
from helpers.philox import keep_scale, kept

if DEVICE == "cpu":
    pytestmark = needs_simulator

SEEDS = [(0, 0), (1234567, 42), (-1, 2**32 + 7), (2**62 + 12345, 2**31)]


def make(kind, rows, keys, dim=16, *, seed=(1, 0), p=0.5, **how):
    dtype, strict = KINDS[kind]
    made = problem(dtype, rows, keys, dim, strict=strict, dropout_p=p, **how)
    return made.but(seed=seed_of(*seed))


def read_off(p):
    """Boolean (B, H, Sq, Sk): which weights the forward kept, by windows of v."""
    keys, width = p.k.size(2), p.v.size(3)
    parts = []
    for start in range(0, keys, width):
        v = torch.zeros_like(p.v)
        many = min(width, keys - start)
        v[:, :, start : start + many, :many] = torch.eye(many)
        parts.append(forward(p.but(v=v)).out[..., :many])
    return torch.cat(parts, -1) != 0


@pytest.mark.parametrize("seed", SEEDS)
@some_kinds
def test_the_forward_keeps_the_weights_of_the_replay(kind, seed):
    p = make(kind, 70, 130, 16, dim_v=130, batch=2, heads=3, heads_k=1, seed=seed)
    p = p.but(q=torch.zeros_like(p.q))
    assert torch.equal(read_off(p).cpu(), kept(seed, 0.5, p.scores))


@pytest.mark.parametrize("dim", [64, 128, 256])
@every_kind
def test_no_kernel_of_the_forward_has_a_mask_of_its_own(kind, dim):
    p = make(kind, 140, 130, dim, seed=(77, 3), p=0.3)
    p = p.but(q=torch.zeros_like(p.q))
    assert torch.equal(read_off(p).cpu(), kept((77, 3), 0.3, p.scores))


@some_kinds
def test_kept_weights_are_those_of_softmax_times_one_number(kind):
    p = make(kind, 20, 70, 16, dim_v=70, seed=(5, 5), p=0.25, causal=BOTTOM_RIGHT)
    p = p.but(v=torch.eye(70)[None, None].to(p.q))
    got = forward(p).out.double().cpu()
    want = torch.from_numpy(exact(p).out.astype("float64"))
    assert torch.equal(got != 0, want != 0)
    eps = torch.finfo(p.q.dtype).eps
    assert (got - want).abs().max() <= 8 * eps * keep_scale(0.25)


@pytest.mark.parametrize("dim", [64, 128, 256])
@every_kind
def test_the_backward_drops_what_the_forward_dropped(kind, dim):
    # dv = (P * kept)^T dout, with dout of an identity for the rows of one window.
    rows, keys = 130, 140
    p = make(kind, rows, keys, dim, seed=(31, 2), p=0.4)
    p = p.but(q=torch.zeros_like(p.q))
    saved, want = forward(p), kept((31, 2), 0.4, p.scores)
    for start in range(0, rows, dim):
        many = min(dim, rows - start)
        dout = torch.zeros_like(p.dout)
        dout[0, 0, start : start + many, :many] = torch.eye(many)
        dv = backward(p.but(dout=dout), saved, WANT_DV)[2]
        got = dv[..., :many].mT != 0
        assert torch.equal(got.cpu(), want[:, :, start : start + many])


@every_kind
def test_dq_dk_and_dbias_drop_what_the_forward_dropped(kind):
    # dS = P (dP kept - delta): with delta taken out by an output of zero, its zeros are
    # the dropped weights. dbias shows them all, dq with k of an identity, and dk.
    rows, keys = 40, 70
    p = make(kind, rows, keys, 70, dim_v=70, seed=(8, 1), p=0.4)
    p = p.but(
        q=torch.zeros_like(p.q),
        v=torch.ones_like(p.v),
        dout=torch.ones_like(p.dout),
        bias=torch.zeros(1, 1, rows, keys).to(p.q),
        k=torch.eye(70)[None, None].to(p.q),
    )
    saved = forward(p)
    none = saved._replace(
        out=torch.zeros_like(saved.out), out_lo=torch.empty(0, device=DEVICE)
    )
    dq, _, _, dbias, _ = backward(p, none, WANT_DQ | WANT_DBIAS)
    want = kept((8, 1), 0.4, p.scores)
    for got in (dq, dbias):
        large = got.abs() > got.abs().max() / 2
        assert torch.equal(large.cpu(), want)
    p = make(kind, rows, keys, 40, dim_v=70, seed=(8, 1), p=0.4).but(
        **{name: getattr(p, name) for name in ("v", "dout")}
    )
    p = p.but(k=torch.zeros_like(p.k), q=torch.eye(40)[None, None].to(p.q))
    saved = forward(p)
    none = saved._replace(
        out=torch.zeros_like(saved.out), out_lo=torch.empty(0, device=DEVICE)
    )
    dk = backward(p, none, WANT_DK)[1].mT
    assert torch.equal((dk.abs() > dk.abs().max() / 2).cpu(), want)


@some_kinds
def test_the_log_sum_exp_is_that_without_dropout(kind):
    p = make(kind, 70, 130, heads=2, p=0.9)
    saved = forward(p)
    assert lse_error(p, saved.lse, exact(p)) <= 1
    calm = p.but(seed=None, dropout_p=0.0, mask=torch.ones(1, 1, 1, 1).to(DEVICE) > 0)
    assert torch.equal(saved.lse, forward(calm).lse)


@pytest.mark.parametrize("dropout_p", [2.0**-16, 0.001, 0.999, 1 - 2.0**-16, 1 - 1e-9])
@pytest.mark.parametrize("kind", ["f16", "f32", "f64"] if FULL else ["f16"])
def test_small_and_large_parts(kind, dropout_p):
    # Of 600 000 weights, so that 2^-16 drops or keeps some.
    rows, heads = (1500, 2) if FULL else (100, 1)
    p = make(kind, rows, 200, 200, seed=(3, 3), p=dropout_p, heads=heads)
    p = p.but(q=torch.zeros_like(p.q))
    got = read_off(p).cpu()
    assert torch.equal(got, kept((3, 3), dropout_p, p.scores))
    if dropout_p == 0.999:
        assert got.any()


@some_kinds
def test_a_nan_that_is_dropped_is_as_in_the_math_path(kind):
    # 0 * NaN is NaN: a dropped weight is no mask.
    p = make(kind, 20, 70)
    v = p.v.clone()
    v[:, :, 5] = math.nan
    assert torch.isnan(forward(p.but(v=v)).out).all()


@some_kinds
def test_each_offset_draws_anew_and_the_same_one_again_the_same(kind):
    p = make(kind, 40, 70)
    first, again = forward(p).out, forward(p.but(seed=seed_of(1, 0))).out
    assert torch.equal(first, again)
    assert not torch.equal(first, forward(p.but(seed=seed_of(1, 1))).out)
    assert not torch.equal(first, forward(p.but(seed=seed_of(2, 0))).out)
    # Only the low 32 bits of the offset count.
    assert torch.equal(first, forward(p.but(seed=seed_of(1, 2**32))).out)


def test_the_mask_of_a_row_does_not_depend_on_the_lengths():
    p = make("f16", 140, 200, 200)
    p = p.but(q=torch.zeros_like(p.q))
    long = read_off(p)
    short = read_off(
        p.but(
            q=p.q[:, :, :30], k=p.k[:, :, :90], v=p.v[:, :, :90], dout=p.dout[:, :, :30]
        )
    )
    assert torch.equal(long[:, :, :30, :90], short)


@pytest.mark.parametrize("kind", ["f16", "f32"] if FULL else ["f32"])
def test_the_mean_over_many_masks_is_the_result_without_dropout(kind):
    p = make(kind, 8, 70, 16, p=0.5, causal=TOP_LEFT)
    total, many = 0, 200 if FULL else 30
    for n in range(many):
        results = run(p.but(seed=seed_of(100 + n)))
        total = total + torch.cat([results.out, results.dq], -1).double()
    calm = run(p.but(seed=None, dropout_p=0.0))
    want = torch.cat([calm.out, calm.dq], -1).double()
    # Standard errors are about 1 / sqrt(many).
    off = float((total / many - want).norm() / want.norm())
    assert off <= 3 / math.sqrt(many)
    assert p.q.dtype in HALVES or off > 0.01
