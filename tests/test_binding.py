"""The extension module: op, checks, records, registration, fork.

Mode "null" runs everything but the kernel, so most tests need neither the
simulator nor code objects. What touches registration or configuration for good
happens in a fresh process.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import needs_simulator, run_forked

import flash_attn_rocm
import flash_attn_rocm._C as C
from flash_attn_rocm import _ops, _python_ops, simulate
from flash_attn_rocm._config import config, simulator_path

ROOT = Path(__file__).resolve().parent.parent
EMPTY = torch.empty(0)

FEATURES = _ops.FEATURE_TENSORS
NAMES = ["q", "k", "v", *FEATURES]
NAMES += "scale softcap dropout_p causal window_left window_right".split()
NAMES += "sink_keys block_q block_k needs_grad".split()


def arguments(q, k, v, **changed):
    """The op's positional arguments with some of them changed."""
    values = dict.fromkeys(FEATURES, EMPTY)
    values |= dict(q=q, k=k, v=v, scale=0.25, softcap=0.0, dropout_p=0.0)
    values |= dict(causal=0, window_left=-1, window_right=-1, needs_grad=False)
    values |= dict(sink_keys=0, block_q=0, block_k=0)
    values |= changed
    return [values[name] for name in NAMES]


def fwd(q, k, v, **changed):
    return torch.ops.flash_attn_rocm.fwd.default(*arguments(q, k, v, **changed))


def tensors(batch=2, heads=4, key_heads=2, seqlen_q=8, seqlen_k=6, dim=16):
    generator = torch.Generator().manual_seed(0)

    def make(*shape):
        return torch.randn(shape, generator=generator).half()

    q = make(batch, heads, seqlen_q, dim)
    return q, *(make(batch, key_heads, seqlen_k, dim) for _ in range(2))


@pytest.fixture
def null():
    """Calls launch nothing; the previous configuration comes back."""
    C.configure(config.code_dir, simulator_path(), "null", lambda: None)
    C.reset_counters()
    yield
    _ops.configure(config.device)
    C.reset_counters()


@pytest.fixture
def restore():
    yield
    _ops.configure(config.device)


@pytest.fixture
def configure(restore, monkeypatch):
    """C.configure, also for the op that is registered from Python."""

    def both(code_dir, sim_library, mode, sim_arch):
        C.configure(code_dir, sim_library, mode, sim_arch)
        monkeypatch.setattr(_python_ops, "launch_arch", sim_arch)

    return both


def in_new_process(code: str) -> str:
    """Run code with C imported without the package; returns its output."""
    head = f"""
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location(
            "flash_attn_rocm._C", {C.__file__!r})
        C = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(C)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# -- results ------------------------------------------------------------------


def test_outputs_have_the_promised_shapes_types_and_no_grad(null):
    q, k, v = tensors()
    out, lse, out_lo = fwd(q, k, v)
    assert out.shape == q.shape and out.dtype == torch.float16
    assert lse.shape == (2, 4, 8) and lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert out_lo.shape == (0,) and out_lo.dtype == torch.float32
    assert not out.requires_grad


def random_view(rng: random.Random) -> torch.Tensor:
    """A 4-D float16 view with a unit last stride: permuted, sliced, expanded."""
    sizes = [rng.choice((1, 2, 3, 5)) for _ in range(3)] + [rng.choice((1, 8, 12))]
    order = [*rng.sample(range(3), 3), 3]
    padded = [size + rng.choice((0, 0, 3)) for size in sizes]
    base = torch.zeros([padded[d] for d in order], dtype=torch.float16)
    view = base.permute([order.index(d) for d in range(4)])
    view = view[tuple(slice(0, size) for size in sizes)]
    for d in range(3):
        if view.size(d) == 1 and rng.random() < 0.3:
            view = view.expand([-1 if e != d else 4 for e in range(4)])
    if rng.random() < 0.2:  # rows that overlap, with equal strides
        strides = [*(rng.choice((0, 12, 16, 24)) for _ in range(3)), 1]
        view = torch.zeros(1000, dtype=torch.float16).as_strided(sizes, strides)
    return view


def test_out_has_the_strides_of_empty_like_for_any_view(null):
    rng = random.Random(3)
    for _ in range(500):
        q = random_view(rng)
        kv = torch.zeros(q.size(0), 1, 2, q.size(3), dtype=torch.float16)
        out, _, _ = fwd(q, kv, kv)
        expected = torch.empty_like(q)
        assert out.stride() == expected.stride(), (q.shape, q.stride())


def test_the_fake_kernel_agrees_with_the_real_one(null):
    from torch._subclasses.fake_tensor import FakeTensorMode

    rng = random.Random(4)
    for _ in range(50):
        q = random_view(rng)
        kv = torch.zeros(q.size(0), 1, 2, q.size(3), dtype=torch.float16)
        real = fwd(q, kv, kv)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in (q, kv, EMPTY)]
            faked = fwd(*fakes[:2], fakes[1], **dict.fromkeys(FEATURES, fakes[2]))
        for a, b in zip(real, faked):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if a.numel():  # the stride of a dimension of size 1 means nothing
                counted = [d for d in range(a.dim()) if a.size(d) > 1]
                assert [a.stride(d) for d in counted] == [b.stride(d) for d in counted]


@pytest.mark.parametrize("mode", ["null", "sim"])
@pytest.mark.parametrize(
    "sizes",
    [dict(batch=0), dict(seqlen_q=0), dict(heads=0, key_heads=0), dict(heads=0)],
)
def test_empty_outputs_need_no_simulator(configure, mode, sizes):
    configure("/nowhere", "/nowhere", mode, lambda: "gfx906")
    q, k, v = tensors(**sizes)
    out, lse, _ = fwd(q, k, v)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert C.last_call()[1:3] == ("", "empty: out has no elements")


@needs_simulator
def test_without_keys_out_is_zero_and_lse_minus_infinity():
    q, k, v = tensors(seqlen_k=0)
    with simulate("gfx906"):
        out, lse, _ = fwd(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((2, 4, 8), -float("inf")))
    assert C.last_call()[4:] == (0, 0)


# -- refusals -----------------------------------------------------------------

Q, K, V = tensors()
ONE = tensors(batch=1, seqlen_q=200, seqlen_k=300)


def ints(*sizes, dtype=torch.int32):
    return torch.zeros(sizes, dtype=dtype)


def blocks(**changed):
    """Lists for ONE, each block of 128 seeing all of its row."""
    lists = dict(blocks=ints(1, 1, 2, 4), blocks_t=ints(1, 1, 3, 3))
    return {**lists, "block_q": 128, "block_k": 128, **changed}


def spans(**changed):
    return dict(span_q=ints(200, 4), span_k=ints(300, 2)) | changed


REFUSED = [
    (dict(bias=torch.zeros(3)), "bias: expected 4 dimensions (batch, heads, rows, "),
    (dict(bias=ints(1, 1, 1, 1)), "bias: expected dtype float16, bfloat16, float32 or"),
    (dict(bias=torch.zeros(1, 1, 1, 1).double()), "bias: expected dtype float16 or f"),
    (dict(bias=torch.zeros(1, 1, 8, 5)), "bias: expected size 1 or 6 in dimension 3 "),
    (dict(bias=torch.zeros(2, 2, 1, 1)), "bias: expected size 1 or 4 in dimension 1 "),
    (dict(mask=torch.ones(2, 2).bool()), "mask: expected 4 dimensions (batch, heads"),
    (dict(mask=torch.ones(1, 1, 8, 6)), "mask: expected dtype bool, got float32"),
    (dict(mask=torch.ones(1, 1, 3, 6).bool()), "mask: expected size 1 or 8 in dimens"),
    (dict(alibi=torch.zeros(3)), "alibi: expected size 4 in dimension 1, got 3"),
    (dict(alibi=torch.zeros(3, 4)), "alibi: expected size 2 in dimension 0, got 3"),
    (dict(alibi=torch.zeros(1, 1, 4)), "alibi: expected 2 dimensions (batch, heads),"),
    (dict(alibi=torch.zeros(4).half()), "alibi: expected dtype float32 (as lse), got"),
    (dict(alibi=torch.zeros(8)[::2]), "alibi: expected a contiguous tensor, got str"),
    (dict(sink=torch.zeros(1)), "sink: expected size 4 in dimension 0, got 1"),
    (dict(sink=torch.zeros(4, 1)), "sink: expected 1 dimension (heads), got 2"),
    (dict(sink=torch.zeros(4).double()), "sink: expected dtype float32 (as lse), got"),
    (dict(seed=torch.zeros(2)), "seed: expected dtype int64, got float32"),
    (dict(seed=ints(2, 1, dtype=torch.int64)), "seed: expected 1 dimension (seed and"),
    (dict(seed=ints(3, dtype=torch.int64)), "seed: expected 2 elements, got 3"),
    (dict(seed=ints(4, dtype=torch.int64)[::2]), "seed: expected a contiguous tensor"),
    (dict(dropout_p=0.1), "seed: expected 2 elements for dropout_p 0.1, got none"),
    (dict(dropout_p=float("nan")), "dropout_p: expected at least 0 and below 1, got "),
    (dict(dropout_p=1.0), "dropout_p: expected at least 0 and below 1, got 1"),
    (dict(softcap=-1.0), "softcap: expected 0 (none) or 2^-120..2^120, got -1"),
    (dict(softcap=float("inf")), "softcap: expected 0 (none) or 2^-120..2^120, got i"),
    (dict(window_left=-2), "window_left: expected -1 (open) or a number of keys, got"),
    (dict(window_right=-(2**63)), "window_right: expected -1 (open) or a number of k"),
    (dict(sink_keys=-1), "sink_keys: expected 0..1073741824, got -1"),
    (dict(sink_keys=2**62), "sink_keys: expected 0..1073741824, got 461168601842738"),
    (spans(), "span_q: expected size 8 in dimension 0, got 200"),
    (dict(span_q=ints(8, 4)), "span_q: expected a q of batch size 1 beside it, got 2"),
    (dict(span_k=ints(6, 2)), "span_q: expected one beside span_k, got none"),
    (dict(span_q=ints(8)), "span_q: expected 2 dimensions (rows, 4), got 1"),
    (dict(span_k=torch.zeros(6, 2)), "span_k: expected dtype int32, got float32"),
    (dict(blocks=ints(5)), "blocks: expected 4 dimensions (batch, heads, blocks, 1 + "),
    (dict(blocks=torch.zeros(1, 1, 1, 2)), "blocks: expected dtype int32, got float32"),
    (
        dict(blocks=ints(1, 1, 1, 2)),
        "block_q: expected a multiple of 128 up to 2^30, got 0",
    ),
    (blocks(), "blocks: expected size 1 in dimension 2, got 2"),
    (blocks(block_k=64), "block_k: expected a multiple of 128 up to 2^30, got 64"),
    (dict(blocks_t=ints(1, 1, 1, 2)), "blocks: expected one beside blocks_t, got none"),
    (dict(scale=float("inf")), "scale: expected a finite number below 2^127, got inf"),
    (dict(scale=float("nan")), "scale: expected a finite number below 2^127, got "),
    (dict(causal=4), "causal: expected 0 (none), 1 (top-left), 2 (bottom-right) or 3"),
    (dict(causal=1 + 2**32), "(none, from the top left), got 2147483647"),
    (dict(causal=-(2**40)), "(none, from the top left), got -214748364"),
    (dict(q=Q[0]), "q: expected 4 dimensions (batch, heads, seqlen, head dim), got 3"),
    (dict(k=K[None]), "k: expected 4 dimensions"),
    (dict(v=EMPTY.half()), "v: expected 4 dimensions"),
    (dict(q=Q.float()), "k: expected dtype float32 (as q), got float16"),
    (dict(k=K.float()), "k: expected dtype float16 (as q), got float32"),
    (dict(v=V.double()), "v: expected dtype float16 (as q), got float64"),
    (dict(q=Q.int()), "q: expected dtype float16, bfloat16, float32 or float64, got "),
    (dict(k=K[:1]), "k: expected size 2 in dimension 0 (batch, as in q), got 1"),
    (dict(v=V[..., :5, :]), "v: expected size 6 in dimension 2 (row, as in k), got 5"),
    (dict(k=K[..., :8]), "k: expected size 16 in dimension 3 (head dim, as in q)"),
    (dict(v=V[..., :0]), "v: expected a head dim of 1..256, got 0"),
    (dict(q=Q[:, :3]), "k: expected a number of heads that divides the 3 of q, got 2"),
    (dict(q=None), "q: expected a strided tensor, got something else"),
]


@pytest.mark.parametrize(
    "changed, message",
    REFUSED,
    ids=[f"{next(iter(case))}{i}" for i, (case, _) in enumerate(REFUSED)],
)
def test_arguments_are_refused_by_name(null, changed, message):
    q, k, v = (changed.get(name, t) for name, t in (("q", Q), ("k", K), ("v", V)))
    rest = {name: value for name, value in changed.items() if name not in "qkv"}
    with pytest.raises(RuntimeError) as caught:
        fwd(q, k, v, **rest)
    assert message in str(caught.value)
    assert C.counters()["fused"] == {}


def served(q, k, v, **changed):
    """The kernel that would run, and why."""
    fwd(q, k, v, **changed)
    return C.last_call()[1:3]


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_on_another_device_is_refused(null, name):
    made = {**spans(), **blocks(), "mask": torch.ones(1, 1, 8, 6).bool()}
    made |= dict(bias=torch.zeros(1, 1, 8, 6), alibi=torch.zeros(4))
    made |= dict(sink=torch.zeros(4), seed=ints(2, dtype=torch.int64))
    with pytest.raises(RuntimeError) as caught:
        fwd(Q, K, V, **{name: made[name].to("meta")})
    assert f"{name}: expected device cpu (as q), got meta" in str(caught.value)


SERVED = {
    "bias": dict(bias=torch.zeros(1, 4, 1, 300)),
    "mask": dict(mask=torch.ones(1, 1, 200, 300).bool()),
    "alibi": dict(alibi=torch.zeros(1, 4)),
    "sink": dict(sink=torch.zeros(4)),
    "softcap": dict(softcap=30.0),
    "dropout": dict(dropout_p=0.5, seed=ints(2, dtype=torch.int64)),
    "sink keys": dict(sink_keys=2, window_left=5),
    "spans": spans(),
    "blocks": blocks(),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_feature_takes_the_full_kernel_and_is_the_reason(null, name):
    why = f"full: {name}; wide: every load is 16 bytes"
    assert served(*ONE, **SERVED[name]) == ("fa_fwd_f16_d64_full", why)


def test_features_are_named_together(null):
    some = {k: v for name in ("bias", "mask", "sink") for k, v in SERVED[name].items()}
    why = "full: bias, mask, sink; wide: every load is 16 bytes"
    assert served(*ONE, **some)[1] == why


@pytest.mark.parametrize(
    "changed",
    [
        dict(window_left=5, window_right=0),
        dict(sink_keys=3),
        dict(causal=3),
        dict(dropout_p=1e-6),
        dict(seed=ints(2, dtype=torch.int64)),
        dict(block_q=7),
    ],
    ids=str,
)
def test_what_plain_kernels_can_do_goes_to_them(null, changed):
    assert served(*ONE, **changed)[0] == "fa_fwd_f16_d32_plain"


def test_a_bias_may_have_any_strides(null):
    one = torch.zeros(4, 200, 1, 1).permute(2, 0, 1, 3)
    for bias in (one, one.expand(-1, -1, -1, 300), one.half()[:, :, :1]):
        assert served(*ONE, bias=bias)[0] == "fa_fwd_f16_d64_full"
    for stride in (2**22 - 1, 2**22):
        far = (16, 2, (1, 1, 200, 1), (0, 0, stride, 0))
        features = (far, *[None] * 8, 0.0, 0.0, -1, -1, 0, 0, 0)
        if stride < 2**22:
            plan(*ONE, features=features)
            continue
        with pytest.raises(C.Error, match=r"bias: expected a stride below 2\^24 byt"):
            plan(*ONE, features=features)


def test_none_is_as_good_as_an_empty_tensor(null):
    fwd(Q, K, V, **dict.fromkeys(FEATURES))
    assert C.last_call()[:2] == ("null", "fa_fwd_f16_d32_plain")
    assert C.counters()["fused"] == {"fa_fwd_f16_d32_plain": 1}


def test_cpu_tensors_need_someone_who_asks_for_the_simulator(restore):
    C.configure(config.code_dir, simulator_path(), "auto", lambda: None)
    with pytest.raises(RuntimeError) as caught:
        fwd(Q, K, V)
    assert (
        "CPU tensors run on the simulator only inside simulate(...) or with "
        "FLASH_ATTN_ROCM_DEVICE=sim" in str(caught.value)
    )


def test_mode_off_refuses(restore):
    C.configure(config.code_dir, simulator_path(), "off", lambda: "gfx906")
    with pytest.raises(RuntimeError, match="mode: expected one that runs kernels"):
        fwd(Q, K, V)


@pytest.mark.skipif(_ops.source != "c", reason="only C has to ask Python")
@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda: 1 / 0, "sim_arch: expected a name or None, got an exception: div"),
        (lambda: 7, "sim_arch: expected a name or None, got an exception: "),
        (lambda: "x/y", 'arch: expected a name such as gfx906, got "x/y"'),
        (lambda: "gfx906:" * 10, 'arch: expected a name such as gfx906, got "gfx906:g'),
        (lambda: "gfx\udc80", "sim_arch: expected a name or None"),
    ],
)
def test_a_bad_answer_of_sim_arch_is_an_error_of_the_call(restore, answer, message):
    if not os.path.exists(simulator_path()):
        pytest.skip("libhipsim.so is not built")
    C.configure(config.code_dir, simulator_path(), "sim", answer)
    with pytest.raises(RuntimeError) as caught:
        fwd(Q, K, V)
    assert message in str(caught.value)


def test_a_missing_simulator_is_named(configure):
    configure(config.code_dir, "/nowhere/libhipsim.so", "sim", lambda: "gfx906")
    with pytest.raises(RuntimeError, match=r"cannot load /nowhere/libhipsim\.so"):
        fwd(Q, K, V)


@pytest.mark.skipif(not os.path.exists(simulator_path()), reason="no libhipsim.so")
def test_missing_and_corrupt_code_objects_are_named(configure, tmp_path):
    configure(str(tmp_path), simulator_path(), "sim", lambda: "gfx906")
    path = tmp_path / "fa_gfx906_f16.co"
    with pytest.raises(RuntimeError) as caught:
        fwd(Q, K, V)
    assert f"{path}: expected a code object for gfx906" in str(caught.value)
    assert "FA_ARCHS=gfx906" in str(caught.value)
    path.write_bytes(b"not an object")
    with pytest.raises(
        RuntimeError, match=r"fa_gfx906_f16\.co: .* the file is corrupt"
    ):
        fwd(Q, K, V)
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(11) + b"\xe0\x00" + bytes(44))
    with pytest.raises(
        RuntimeError, match=r"fa_gfx906_f16\.co: not a usable code object"
    ):
        fwd(Q, K, V)


@needs_simulator
def test_cut_and_foreign_code_objects_are_refused(configure, tmp_path):
    good = Path(config.code_dir, "fa_gfx906_f16.co").read_bytes()
    configure(str(tmp_path), simulator_path(), "sim", lambda: "gfx906")
    path = tmp_path / "fa_gfx906_f16.co"
    for size in (len(good) // 2, len(good) - 1, 100, 64):
        path.write_bytes(good[:size])
        with pytest.raises(RuntimeError, match=r"fa_gfx906_f16\.co: "):
            fwd(Q, K, V)
    # The architecture is the low byte of e_flags: 0x2f is gfx906, 0x30 gfx908.
    assert good[48] == 0x2F
    path.write_bytes(good[:48] + b"\x30" + good[49:])
    with pytest.raises(RuntimeError, match="built for another architecture"):
        fwd(Q, K, V)


@pytest.mark.skipif(_ops.source != "c", reason="this is the second process")
def test_refusals_have_the_same_words_when_registered_from_python():
    code = """
import sys, pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
    which = "refused or empty or none or named or keys"
    env = {"FLASH_ATTN_ROCM_PYTHON_OPS": "1"}
    done = run_forked(code, __file__, "-k", which, env=env)
    assert " passed" in done.stdout and "failed" not in done.stdout


# -- plan and forward ---------------------------------------------------------


def plan(q, k, v, dtype=0, align=(16, 16, 16), scale=1.0, causal=0, **rest):
    shapes = (x for t in (q, k, v) for x in (tuple(t.shape), t.stride()))
    if "features" in rest:
        rest = dict(wanted=0, grads_fp32=False) | rest
    return C.plan(dtype, *align, *shapes, scale, causal, *rest.values())


def test_plan_names_kernel_grid_reason_and_steps():
    q, k, v = tensors(seqlen_q=300, dim=64)
    kernel, grid, why, steps, workspace = plan(q, k, v)
    assert (kernel, grid) == ("fa_fwd_f16_d64_plain", (3, 4, 2))
    assert why == "wide: every load is 16 bytes"
    assert steps == ((kernel, grid),) and workspace == 0
    empty = plan(*tensors(seqlen_k=0))
    assert empty[:3] == ("", (0, 0, 0), "empty: no keys, so out is 0 and lse -inf")
    assert empty[3:] == ((), 0)


def test_plan_of_a_backward_names_the_kernels_of_what_is_wanted():
    q, k, v = tensors(seqlen_q=300, dim=64)
    of_q, of_kv = "fa_bwd_q_f16_d64_plain", "fa_bwd_kv_f16_d64_plain"
    corrected = [of_q, "fa_prepare", of_kv]  # delta, for dk
    for wanted, kernels in (
        *((n, corrected) for n in (2, 3, 6, 7)),
        *((1, [of_q]), (4, [of_kv]), (5, [of_kv, of_q])),
    ):
        kernel, _, _, steps, workspace = plan(q, k, v, wanted=wanted)
        main = [name for name in kernels if name != "fa_prepare"]
        assert kernel.split("+") == main and workspace > 0
        assert [name for name, _ in steps] == ["fa_prepare", *kernels]
        assert workspace == C.workspace(0, *(tuple(t.shape) for t in (q, k, v)), wanted)


def test_plan_with_features_names_their_kernels():
    q, k, v = tensors(seqlen_q=300, dim=64)
    bias = (16, 2, (1, 1, 300, 6), (1800, 1800, 6, 1))
    sink = (16, 2, (4,), (1,))
    features = (bias, None, None, sink, *[None] * 5, 30.0, 0.0, 4, -1, 0, 0, 0)
    kernel, _, why, steps, workspace = plan(q, k, v, wanted=31, features=features)
    of_q, of_kv = "fa_bwd_q_f16_d64_full", "fa_bwd_kv_f16_d64_full"
    of_bias = "fa_bwd_bias_exact16_d64_full"
    assert kernel.split("+") == [of_q, of_kv, of_bias]
    made = ["fa_prepare", of_q, "fa_prepare", of_kv, of_bias]  # delta, and corrected
    assert [name for name, _ in steps] == made
    assert steps[-1][1] == (3, 1, 1)  # of the bias: tiles of 128 rows and 64 keys
    assert why == "full: bias, sink, softcap; wide: every load is 16 bytes"
    shapes = [tuple(t.shape) for t in (q, k, v)]
    assert workspace == C.workspace(0, *shapes, 31, features)
    with pytest.raises(C.Error, match=r"wanted: expected no 8 \(dbias\) without"):
        plan(q, k, v, wanted=8)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_plan_and_explain_blame_the_tensor_that_is_misaligned(name):
    given = dict(zip("qkv", tensors(key_heads=4, seqlen_q=300, dim=64)))
    align = [2 if key == name else 16 for key in given]
    expected = (
        "fa_fwd_f16_d64_plain",
        (3, 4, 2),
        f"narrow: {name} base is not 16-byte aligned",
    )
    assert plan(*given.values(), align=align)[:3] == expected
    moved = torch.empty(given[name].numel() + 1, dtype=torch.float16)[1:]
    given[name] = moved.view_as(given[name])
    with simulate("gfx906"):
        told = flash_attn_rocm.explain(*given.values())
    assert (told.kernel, told.grid, told.why) == expected


def test_plan_refuses_with_its_own_error():
    assert issubclass(C.Error, ValueError)
    with pytest.raises(C.Error, match="head dim"):
        plan(*tensors(dim=257))
    with pytest.raises(C.Error, match=r"wanted: expected .*, got 32"):
        plan(Q, K, V, wanted=32)
    with pytest.raises(C.Error, match="batch"):
        C.plan(0, 16, 16, 16, *([(-1, 2, 3, 4), (1, 1, 1, 1)] * 3), 1.0, 0)
    with pytest.raises(C.Error, match="2\\^59"):
        huge = (65535, 65535, 2**30, 128), (0, 0, 0, 1)
        rest = [(65535, 1, 1, 128), (0, 0, 0, 1)] * 2
        C.plan(0, 16, 16, 16, *huge, *rest, 1.0, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: C.plan(0),
        lambda: C.plan(0, 16, 16, 16, *([(1, 2, 3)] * 6), 1.0, 0),
        lambda: C.plan(0, 16, 16, 16, *([[1, 2, 3, 4]] * 6), 1.0, 0),
        lambda: C.plan(0, 16, 16, 16, *([(1, 2, 3, "4")] * 6), 1.0, 0),
        lambda: C.plan(0, 16, 16, 16, *([(1, 2, 3, 4)] * 6), "1.0", 0),
        lambda: plan(Q, K, V, features=5),
        lambda: plan(Q, K, V, features=(None,) * 15),
        lambda: plan(Q, K, V, features=(5, *[None] * 15)),
        lambda: plan(Q, K, V, features=((16, 0, (1,) * 5, (1,) * 5), *[None] * 15)),
        lambda: plan(Q, K, V, features=((16, 0, (1, 2), (1,)), *[None] * 15)),
        lambda: plan(Q, K, V, features=(*[None] * 9, "0", 0.0, -1, -1, 0, 0, 0)),
        lambda: plan(Q, K, V, features=(*[None] * 9, 0.0, 0.0, -1, None, 0, 0, 0)),
        lambda: C.forward(0),
        lambda: C.configure("a", "b", 5, None),
        lambda: C.record_fallback(5),
    ],
)
def test_wrong_python_types_are_type_errors(call):
    with pytest.raises(TypeError):
        call()


def test_configure_refuses_unknown_modes(restore):
    with pytest.raises(C.Error, match="mode: expected auto, sim, standin, null or off"):
        C.configure("a", "b", "fast", lambda: None)
    with pytest.raises(C.Error, match="sim_arch: expected a callable"):
        C.configure("a", "b", "auto", None)


def raw_forward(q, k, v, out, lse, arch, scale=0.25, causal=0, device_type=0):
    pointers = [t.data_ptr() for t in (q, k, v, out, lse)]
    shapes = [x for t in (q, k, v) for x in (tuple(t.shape), t.stride())]
    numbers = (out.stride(), scale, causal)
    # No out_lo and no workspace, which float16 needs for neither.
    C.forward(device_type, 0, 0, arch, 0, *pointers, 0, 0, 0, *shapes, *numbers)


def test_forward_checks_like_the_op(null):
    out, lse = torch.empty_like(Q), torch.empty(2, 4, 8)
    raw_forward(Q, K, V, out, lse, None)
    assert C.last_call()[:2] == ("null", "fa_fwd_f16_d32_plain")
    with pytest.raises(RuntimeError, match="k: expected size 2 in dimension 0"):
        raw_forward(Q, K[:1], V, out, lse, None)
    with pytest.raises(
        RuntimeError, match="out: expected elements that do not overlap"
    ):
        raw_forward(Q, K, V, out[:, :1].expand(-1, 4, -1, -1), lse, None)
    with pytest.raises(RuntimeError, match=r"device_type: expected 0 .CPU. or 1"):
        raw_forward(Q, K, V, out, lse, None, device_type=9)


@needs_simulator
def test_load_finds_what_a_launch_would_and_launches_nothing(restore, tmp_path):
    before = C.counters()
    C.load(0, 0, "gfx906")
    C.configure(str(tmp_path), simulator_path(), "auto", lambda: "gfx906")
    # A backward in fp16 is prepared in fp32.
    for dtype, unit in ((0, "f(16|32)"), (2, "f32"), (3, "f64")):
        with pytest.raises(RuntimeError, match=rf"fa_gfx906_{unit}\.co"):
            C.load(0, 0, "gfx906", dtype)
    with pytest.raises(RuntimeError, match="arch: expected a name"):
        C.load(0, 0, None)
    assert C.counters() == before


def test_forward_without_an_architecture_is_refused(restore):
    C.configure(config.code_dir, simulator_path(), "auto", lambda: "gfx906")
    with pytest.raises(RuntimeError, match=r"only inside simulate\(\.\.\.\)"):
        raw_forward(Q, K, V, torch.empty_like(Q), torch.empty(2, 4, 8), None)


# -- in the simulator ---------------------------------------------------------


def exact(q, k, v, scale, causal):
    """Attention in float64, with the key heads repeated."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        diagonal = 0 if causal == 1 else k.size(2) - q.size(2)
        scores = scores.masked_fill(~seen.tril(diagonal), -float("inf"))
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().nan_to_num(0.0) @ v, lse


@needs_simulator
@pytest.mark.parametrize("causal", [0, 1, 2])
@pytest.mark.parametrize("dim, scale", [(16, 0.25), (77, -0.1), (128, 0.088)])
def test_op_and_forward_agree_with_float64_and_bit_for_bit(causal, dim, scale):
    q, k, v = tensors(batch=1, seqlen_q=20, seqlen_k=70, dim=dim)
    C.reset_counters()
    with simulate("gfx906"):
        out, lse, _ = fwd(q, k, v, scale=scale, causal=causal)
    backend, symbol, why, device, instructions, groups = C.last_call()
    assert (backend, device, groups) == ("sim", "cpu", 4)
    assert (symbol, why) == (plan(q, k, v)[0], plan(q, k, v)[2])
    assert C.counters() == {
        "fused": {symbol: 1},
        "fallback": {},
        "wave_instructions": instructions,
    }
    expected, expected_lse = exact(q, k, v, scale, causal)
    # seen: 3e-4, of which 2e-4 are the rounding of out to float16
    assert (out - expected).norm() / expected.norm() < 6e-4
    assert (lse - expected_lse).abs().max() < 1e-5
    again, lse_again = torch.empty_like(out), torch.empty_like(lse)
    raw_forward(q, k, v, again, lse_again, "gfx906", scale, causal)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


@needs_simulator
@pytest.mark.parametrize("route", ["op", "forward"])
def test_python_runs_on_while_a_kernel_does(route):
    q, k, v = tensors(batch=1, seqlen_q=512, seqlen_k=512, dim=64)

    def work():
        if route == "op":
            with simulate("gfx906"):
                fwd(q, k, v)
        else:
            lse = torch.empty(1, 4, 512)
            raw_forward(q, k, v, torch.empty_like(q), lse, "gfx906")

    thread = threading.Thread(target=work)
    thread.start()
    ticks = 0
    while thread.is_alive():
        ticks += 1
        time.sleep(0.001)
    assert ticks > 10  # seen: 120; a kernel that kept the GIL: 2


@needs_simulator
def test_torchs_opcheck_finds_no_fault():
    q, k, v = tensors(batch=1, heads=2, key_heads=1)
    with simulate("gfx906"):
        torch.library.opcheck(
            torch.ops.flash_attn_rocm.fwd.default, tuple(arguments(q, k, v))
        )


# -- records ------------------------------------------------------------------


def test_records_belong_to_their_thread(null):
    C.record_fallback("mask")
    seen = []

    def other():
        seen.append(C.last_call())
        fwd(Q, K, V)
        seen.append(C.last_call())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen[0] is None
    symbol = "fa_fwd_f16_d32_plain"
    why = "wide: every load is 16 bytes"
    assert seen[1] == ("null", symbol, why, "cpu", 0, 8)
    assert C.last_call() == ("sdpa", "", "mask", "", 0, 0)
    counters = C.counters()
    assert counters["fused"] == {symbol: 1} and counters["fallback"] == {"mask": 1}
    C.reset_counters()
    empty = {"fused": {}, "fallback": {}, "wave_instructions": 0}
    assert C.counters() == empty
    assert C.last_call() == ("sdpa", "", "mask", "", 0, 0)


def test_equal_reasons_count_together_whatever_object_they_are(null):
    import enum

    class Reason(str, enum.Enum):
        DTYPE = "dtype of a test"

    C.record_fallback(Reason.DTYPE)
    C.record_fallback("dtype of a test")
    C.record_fallback("".join(["dtype ", "of a test"]))
    assert C.counters()["fallback"] == {"dtype of a test": 3}
    assert type(C.last_call()[2]) is str


def test_counting_loses_nothing_between_threads(null):
    def work():
        for _ in range(500):
            fwd(Q, K, V)
            C.record_fallback("grad")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert C.counters()["fused"] == {"fa_fwd_f16_d32_plain": 2000}
    assert C.counters()["fallback"] == {"grad": 2000}


def test_facts_about_the_build():
    info = C.build_info()
    rows = C.variants()
    assert info["variants"] == [row["symbol"] for row in rows]
    assert info["torch_abi"] in (True, False)
    assert set(rows[0]) == set(
        "symbol pass arith reads dim level rows steps threads lds_bytes".split()
    )
    table = (ROOT / "csrc/kernels/variants.def").read_text(encoding="utf-8")
    assert table.count("\nFA_VARIANT(") == len(rows)


# -- registration -------------------------------------------------------------

needs_abi = pytest.mark.skipif(
    not C.build_info()["torch_abi"], reason="this torch lacks the stable C ABI"
)

FRESH = """
    import json, os, torch
    seen = dict(registered=[C.register_ops(), C.register_ops()])
    dump = torch._C._dispatch_dump("flash_attn_rocm::fwd")
    seen.update(cpu="CPU:" in dump, cuda="CUDA:" in dump)
    op = torch.ops.flash_attn_rocm.fwd.default
    seen["schema"] = str(op._schema)
    a, e = torch.zeros(1, 1, 1, 8).half(), torch.empty(0)
    def call():
        rest = [1.0, 0.0, 0.0, 0, -1, -1, 0, 0, 0, False]
        return len(op(a, a, a, *[e] * 9, *rest))
    try:
        call()
    except RuntimeError as error:
        seen["early"] = str(error)
    C.configure("/nowhere", "/nowhere", "null", lambda: None)
    def child():
        pid = os.fork()
        if pid == 0:
            os._exit(call())
        return os.WEXITSTATUS(os.waitpid(pid, 0)[1])
    seen["calls"] = [child(), call(), child()]
    print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def fresh():
    """What a process saw that registered the op for the first time."""
    return json.loads(in_new_process(FRESH))


def test_without_torch_nothing_is_registered():
    assert in_new_process("print(C.register_ops(), C.build_info()['torch_abi'])") == (
        "False False\n"
    )


@needs_abi
def test_registering_twice_changes_nothing(fresh):
    assert fresh["registered"] == [True, True]
    assert fresh["cpu"] and fresh["cuda"]


@needs_abi
def test_the_schema_is_the_one_of_the_python_route(fresh):
    assert fresh["schema"] == "flash_attn_rocm::" + _ops.SCHEMA


@needs_abi
def test_a_call_before_configure_is_refused(fresh):
    assert fresh["early"].startswith("configure: expected a call of it")


@needs_abi
def test_a_forked_child_can_call_the_op_before_and_after_the_first_use(fresh):
    assert fresh["calls"] == [3, 3, 3]


@needs_abi
def test_an_op_that_exists_already_is_reported_and_keeps_working():
    code = f"""
        import torch
        library = torch.library.Library("flash_attn_rocm", "FRAGMENT")
        library.define({_ops.SCHEMA!r})
        library.impl("fwd", lambda q, k, v, *rest: (q, k, v), "CPU")
        try:
            C.register_ops()
        except RuntimeError as error:
            print("multiple times" in str(error) or "no reason" in str(error))
        a = torch.empty(0)
        op = torch.ops.flash_attn_rocm.fwd
        print(len(op(*[a] * 12, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, 0, False)))
        print("CUDA:" in torch._C._dispatch_dump("flash_attn_rocm::fwd"))
    """
    assert in_new_process(code).split() == ["True", "3", "False"]


def test_the_extension_links_to_nothing_but_the_c_library():
    """Read from the file itself: DT_NEEDED names are strings of .dynstr."""
    data = Path(C.__file__).read_bytes()
    for library in (b"libtorch", b"libc10", b"libcuda.so.1", b"libpython"):
        assert library + b".so\0" not in data and library + b"\0" not in data
    assert C.__file__.endswith("_C.abi3.so")


# -- memory and processes -----------------------------------------------------


def resident_kb() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def fresh_arguments():
    """Each tensor with 64 KiB of its own, also those without elements."""
    base = [torch.zeros(1, 8, 64, 64, dtype=torch.float16) for _ in range(12)]
    return base[:3] + [t[:0] for t in base[3:]]


@pytest.mark.skipif(bool(C.build_info()["sanitize"]), reason="sanitizers keep memory")
@pytest.mark.parametrize(
    "causal, mode",
    [(0, "null"), (9, "null"), (0, "off"), (0, "sim")],
    ids=["served", "refused", "off", "refused after the outputs were allocated"],
)
def test_calls_leak_nothing(restore, causal, mode):
    C.configure("/nowhere", "/nowhere", mode, lambda: "gfx906")
    op = torch.ops.flash_attn_rocm.fwd.default
    rest = arguments(Q, K, V, causal=causal)[12:]
    served = mode == "null" and causal == 0

    def call(times, make):
        for _ in range(times):
            try:
                op(*make(), *rest)
            except RuntimeError:
                assert not served

    kept = fresh_arguments()
    call(1000, fresh_arguments)
    call(1000, lambda: kept)
    before = resident_kb()
    # One lost reference a call: 64 KiB each here, ...
    call(1000, fresh_arguments)
    # ... an output's 64 KiB or some 16 bytes of a handle here.
    call(100_000 if served else 10_000, lambda: kept)
    assert resident_kb() - before < 3000


FORK = """
    import ctypes, os
    C.configure({code_dir!r}, {sim!r}, {mode!r}, lambda: None)
    one, size, stride = 0x3c00, (1, 1, 4, 8), (32, 32, 8, 1)
    q = (ctypes.c_uint16 * 32)(*[one] * 32)
    def call():
        out, lse = (ctypes.c_uint16 * 32)(), (ctypes.c_float * 4)()
        addresses = [ctypes.addressof(x) for x in (q, q, q, out, lse)]
        sizes = [size, stride] * 3
        C.forward(
            0, 0, 0, "gfx906", 0, *addresses, 0, 0, 0, *sizes, stride, 1.0, 0)
        return {mode!r} == "null" or list(out) == list(q)
    def child():
        pid = os.fork()
        if pid == 0:
            os._exit(0 if call() and C.last_call()[0] == {mode!r} else 1)
        return os.waitpid(pid, 0)[1]
    print(child(), call(), child())
"""


@pytest.mark.parametrize("mode", ["null", pytest.param("sim", marks=needs_simulator)])
def test_a_forked_child_can_launch_before_and_after_the_first_use(mode):
    code = FORK.format(code_dir=config.code_dir, sim=simulator_path(), mode=mode)
    assert in_new_process(code) == "0 True 0\n"
