"""Bad input and broken installations: a clear error from our functions, a recorded
fallback from the shim, and nothing launched or written before that.

SPDX-License-Identifier: BSD-3-Clause
"""

import logging
import math
import os
import shutil
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ARCH,
    BOTTOM_RIGHT,
    NONE,
    error_ratio,
    lse_ratio,
    needs_extension,
    needs_simulator,
    qkv,
    run_forked,
    run_python,
    stock_sdpa,
)

import flash_attn_rocm as fa
from flash_attn_rocm import FlashAttnError, Reason, _config, _eligibility, _ops

pytestmark = needs_extension


def bshd(*args, **kwargs):
    """q, k, v in flash_attn's layout (B, S, H, D)."""
    return tuple(t.transpose(1, 2).contiguous() for t in qkv(*args, **kwargs))


# -------------------------------------------------------- flash_attn_func, as it is


@needs_simulator
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_func_is_bottom_right_causal(simulated, causal):
    q, k, v = bshd(2, 4, 5, 24, heads_k=2, length_k=11)
    out, lse, probs = fa.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert fa.last_call().backend == "sim" and probs is None
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    which = BOTTOM_RIGHT if causal else NONE
    assert out.shape == q.shape and out.is_contiguous()
    assert error_ratio(out.transpose(1, 2), *heads_first, causal=which) <= 1
    assert lse_ratio(lse, *heads_first, causal=which) <= 1
    alone = fa.flash_attn_func(q, k, v, 0.0, None, causal, (-1, -1), 0.0, None, True)
    assert torch.equal(alone, out)


@needs_simulator
def test_flash_attn_func_takes_any_last_dimension(simulated):
    q, k, v = bshd(1, 2, 5, 8)
    want = fa.flash_attn_func(q, k, v, softmax_scale=0.2)
    got = fa.flash_attn_func(
        q.mT.contiguous().mT, k, v.mT.contiguous().mT, softmax_scale=0.2
    )
    assert torch.equal(got, want)


@needs_simulator
def test_flash_attn_func_without_keys_gives_zero(simulated):
    q, k, v = bshd(1, 2, 5, 8)
    out, lse, _ = fa.flash_attn_func(q, k[:, :0], v[:, :0], return_attn_probs=True)
    assert not out.any() and (lse == -math.inf).all()


@needs_simulator
def test_flash_attn_func_compiles_in_one_graph(simulated):
    torch._dynamo.reset()
    q, k, v = bshd(1, 2, 5, 8)
    compiled = torch.compile(fa.flash_attn_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        compiled(q, k, v, causal=True), fa.flash_attn_func(q, k, v, causal=True)
    )


# --------------------------------------------------------------------- refusals

GOOD = bshd(2, 4, 5, 8, heads_k=2)
WIDE = bshd(1, 1, 3, 264)


def with_arguments(**changes):
    return dict(zip("qkv", GOOD), **changes)


Q, K, V = GOOD
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "in prototype stage"
    NESTED = torch.nested.nested_tensor([Q[0], Q[1]])
REFUSED = {
    "q a list": ("q", with_arguments(q=[1.0])),
    "q 3-D": ("q", with_arguments(q=Q[0])),
    "k 5-D": ("k", with_arguments(k=K[None])),
    "q dtype": ("k", with_arguments(q=Q.float())),
    "k dtype": ("k", with_arguments(k=K.bfloat16())),
    "all integers": ("q", dict(zip("qkv", (t.int() for t in GOOD)))),
    "all complex": ("q", dict(zip("qkv", (t.to(torch.complex32) for t in GOOD)))),
    "v device": ("v", with_arguments(v=V.to("meta"))),
    "k batch": ("k", with_arguments(k=K[:1])),
    "v batch": ("v", with_arguments(v=V[:1])),
    "k head dim": ("k", with_arguments(k=K[..., :4])),
    "v head dim 0": ("v", with_arguments(v=V[..., :0])),
    "v head dim 264": ("v", with_arguments(v=V.repeat(1, 1, 1, 33))),
    "v length": ("v", with_arguments(v=V[:, :3])),
    "v heads": ("v", with_arguments(v=V[:, :, :1])),
    "heads that do not divide": ("k", with_arguments(q=Q[:, :, :3])),
    "no key heads": ("k", with_arguments(k=K[:, :, :0], v=V[:, :, :0])),
    "head dim 0": ("q", dict(zip("qkv", (t[..., :0] for t in GOOD)))),
    "head dim 264": ("q", dict(zip("qkv", WIDE))),
    "dropout of all": ("dropout_p", with_arguments(dropout_p=1.0)),
    "dropout above all": ("dropout_p", with_arguments(dropout_p=1.1)),
    "window below -1": ("window_size", with_arguments(window_size=(4, -2))),
    "softcap negative": ("softcap", with_arguments(softcap=-30.0)),
    "softcap infinite": ("softcap", with_arguments(softcap=math.inf)),
    "slopes": ("alibi_slopes", with_arguments(alibi_slopes=torch.ones(5))),
    "infinite scale": ("softmax_scale", with_arguments(softmax_scale=math.inf)),
    "nan scale": ("softmax_scale", with_arguments(softmax_scale=math.nan)),
    "scale 2^127": ("softmax_scale", with_arguments(softmax_scale=2.0**127)),
    "scale -2^127": ("softmax_scale", with_arguments(softmax_scale=-(2.0**127))),
    "scale beyond a double": ("softmax_scale", with_arguments(softmax_scale=10**400)),
    "scale a text": ("softmax_scale", with_arguments(softmax_scale="x")),
    "scale a tensor": ("softmax_scale", with_arguments(softmax_scale=torch.ones(1))),
    "q None": ("q", with_arguments(q=None)),
    "k a number": ("k", with_arguments(k=1)),
    "v an array": ("v", with_arguments(v=V.numpy())),
    "q sparse": ("q", with_arguments(q=Q.to_sparse())),
    "q nested": ("q", with_arguments(q=NESTED)),
    "all meta": ("q", dict(zip("qkv", (t.to("meta") for t in GOOD)))),
    "dropout None": ("dropout_p", with_arguments(dropout_p=None)),
    "dropout a text": ("dropout_p", with_arguments(dropout_p="0")),
    "dropout nan": ("dropout_p", with_arguments(dropout_p=math.nan)),
    "dropout negative": ("dropout_p", with_arguments(dropout_p=-0.1)),
    "window None": ("window_size", with_arguments(window_size=None)),
    "window a number": ("window_size", with_arguments(window_size=-1)),
    "window of one": ("window_size", with_arguments(window_size=(-1,))),
    "window of None": ("window_size", with_arguments(window_size=(None, None))),
    "window of tensors": ("window_size", with_arguments(window_size=(Q, Q))),
    "softcap a text": ("softcap", with_arguments(softcap="0")),
    "softcap nan": ("softcap", with_arguments(softcap=math.nan)),
    "alibi a list": ("alibi_slopes", with_arguments(alibi_slopes=[1.0] * 4)),
    "causal a text": ("causal", with_arguments(causal="yes")),
    "causal None": ("causal", with_arguments(causal=None)),
    "causal a tensor": ("causal", with_arguments(causal=torch.ones(2))),
    "deterministic None": ("deterministic", with_arguments(deterministic=None)),
    "probabilities a text": ("return_attn_probs", with_arguments(return_attn_probs="")),
}


@needs_simulator
@pytest.mark.parametrize("name", REFUSED)
def test_flash_attn_func_refuses_by_name(simulated, name):
    argument, call = REFUSED[name]
    before = fa.status()["counters"]
    with pytest.raises(FlashAttnError, match=rf"^{argument}: expected .*, got "):
        fa.flash_attn_func(**call)
    assert fa.status()["counters"] == before
    assert issubclass(FlashAttnError, ValueError)


ACCEPTED = {
    "softcap None": dict(softcap=None),
    "softcap 0": dict(softcap=0),
    "a dropout that drops nothing": dict(dropout_p=1e-30),
    "a dropout below the resolution": dict(dropout_p=7e-6),
    "dropout 0": dict(dropout_p=0),
    "dropout minus zero": dict(dropout_p=-0.0),
    "a window in a list": dict(window_size=[-1, -1]),
    "deterministic": dict(deterministic=True),
    "causal 0": dict(causal=0),
    "its own default scale": dict(softmax_scale=1 / math.sqrt(8)),
    "numpy's scale": dict(softmax_scale=np.float64(1 / math.sqrt(8))),
}


@needs_simulator
@pytest.mark.parametrize("name", ACCEPTED)
def test_flash_attn_func_takes_what_says_the_same_as_the_defaults(simulated, name):
    out = fa.flash_attn_func(*GOOD, **ACCEPTED[name])
    assert torch.equal(out, fa.flash_attn_func(*GOOD))


@needs_simulator
def test_flash_attn_func_takes_any_number_as_a_scale(simulated):
    want = fa.flash_attn_func(*GOOD, softmax_scale=2.0)
    for scale in (2, np.float32(2), np.int64(2), Fraction(2)):
        assert torch.equal(fa.flash_attn_func(*GOOD, softmax_scale=scale), want)
    zero = (torch.zeros_like(Q), K, V)
    for scale in (math.nextafter(2.0**127, 0.0), -math.nextafter(2.0**127, 0.0)):
        got = fa.flash_attn_func(*zero, softmax_scale=scale)
        assert torch.equal(got, fa.flash_attn_func(*zero))


def planned(size_q, size_k, scale=1.0, dtype=0, wanted=0):
    """C's verdict about tensors of these sizes: None, or why not."""
    stride = (0, 0, 0, 1)  # no tensor exists
    sizes = [part for size in (size_q, size_k, size_k) for part in (size, stride)]
    try:
        _ops.ext.plan(dtype, 16, 16, 16, *sizes, scale, 0, wanted)
    except _ops.ext.Error as error:
        return str(error)
    return None


def test_the_limits_here_are_those_of_the_plan():
    grid, length = _eligibility.GRID_MAX, _eligibility.SEQLEN_MAX
    scale = _eligibility.SCALE_MAX
    one = (1, 1, 1, 8)
    for limit, sizes in {
        grid: lambda n: [((n, 1, 1, 8), (n, 1, 1, 8)), ((1, n, 1, 8), one)],
        length: lambda n: [((1, 1, n, 8), one), (one, (1, 1, n, 8))],
    }.items():
        for size_q, size_k in sizes(limit):
            assert planned(size_q, size_k) is None
        for size_q, size_k in sizes(limit + 1):
            assert str(limit) in planned(size_q, size_k)
    for dtype in _ops.DTYPES:
        code = _ops.dtype_code(dtype)
        for wanted, limits in (
            (0, _eligibility.HEAD_DIM_MAX),
            (7, _eligibility.TRAINED_HEAD_DIM_MAX),
        ):
            dims = [(1, 1, 1, limits[dtype]), (1, 1, 1, limits[dtype] + 1)]
            assert planned(dims[0], dims[0], 1.0, code, wanted) is None
            assert "head dim" in planned(dims[1], dims[1], 1.0, code, wanted)
    for sign in (1, -1):
        assert planned(one, one, sign * math.nextafter(scale, 0.0)) is None
        assert "2^127" in planned(one, one, sign * scale)


@needs_simulator
def test_requires_grad_is_fine_without_grad_mode(simulated):
    q, k, v = (t.clone().requires_grad_() for t in GOOD)
    with torch.no_grad():
        assert not fa.flash_attn_func(q, k, v).requires_grad


def test_cpu_tensors_without_a_simulator_are_refused_or_stock(patched):
    with pytest.raises(FlashAttnError, match=r"^q: .*simulate\(.*device cpu"):
        fa.flash_attn_func(*GOOD)
    q, k, v = qkv(1, 2, 4, 8)
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), stock_sdpa(q, k, v))
    assert fa.last_call().reason is Reason.DEVICE


@pytest.mark.parametrize("arch", ["gfx90a", "gfx9999", "", "mi50"])
def test_simulate_refuses_what_cannot_be_simulated(arch):
    with pytest.raises(FlashAttnError, match=r"^arch: expected .*gfx906.*, got "):
        with fa.simulate(arch):
            pass
    assert fa.status()["simulated"] is None


# ------------------------------------------------------------- numbers from outside


def forward_arguments(**changes):
    q, k, v = qkv(1, 1, 4, 8)
    out, lse = torch.full_like(q, 7), torch.full((1, 1, 4), 7.0)
    strides = (32, 32, 8, 1)
    values = dict(
        device_type=0,
        device_index=0,
        stream=0,
        arch=ARCH,
        dtype=0,
        q_ptr=q.data_ptr(),
        k_ptr=k.data_ptr(),
        v_ptr=v.data_ptr(),
        out_ptr=out.data_ptr(),
        lse_ptr=lse.data_ptr(),
        out_lo_ptr=0,
        workspace_ptr=0,
        workspace_bytes=0,
        q_size=(1, 1, 4, 8),
        q_stride=strides,
        k_size=(1, 1, 4, 8),
        k_stride=strides,
        v_size=(1, 1, 4, 8),
        v_stride=strides,
        out_stride=strides,
        scale=0.3,
        causal=0,
    )
    values.update(changes)
    return values, (q, k, v, out, lse)


def features(**changes):
    """The last argument of a C entry."""
    names = (*_ops.FEATURE_TENSORS, "softcap", "dropout_p", "window_left")
    names += ("window_right", "sink_keys", "block_q", "block_k")
    values = dict.fromkeys(names[:9]) | dict.fromkeys(names[9:], 0)
    values |= dict(softcap=0.0, dropout_p=0.0, window_left=-1, window_right=-1)
    assert not set(changes) - set(values)
    return dict(features=(*{**values, **changes}.values(),))


# What stands for a tensor that must not be read.
FAR = 2**40


BAD_NUMBERS = {
    "negative length": dict(q_size=(1, 1, -4, 8)),
    "negative batch": dict(q_size=(-1, 1, 4, 8)),
    "negative head dim": dict(
        q_size=(1, 1, 4, -8), k_size=(1, 1, 4, -8), v_size=(1, 1, 4, -8)
    ),
    "too many queries": dict(q_size=(1, 1, 2**30 + 1, 8)),
    "too many batches": dict(
        q_size=(65536, 1, 4, 8), k_size=(65536, 1, 4, 8), v_size=(65536, 1, 4, 8)
    ),
    "head dim 257": dict(
        q_size=(1, 1, 4, 257), k_size=(1, 1, 4, 257), v_size=(1, 1, 4, 257)
    ),
    "value dim 257": dict(v_size=(1, 1, 4, 257)),
    "misaligned out_lo": dict(out_lo_ptr=2**20 + 8),
    "dtype": dict(dtype=4),
    "architecture": dict(arch="gfx9999"),
    "causal": dict(causal=7),
    "scale": dict(scale=math.inf),
    "bias of another length": features(bias=(FAR, 0, (1, 1, 4, 5), (20, 20, 5, 1))),
    "bias of another dtype": features(bias=(FAR, 1, (1, 1, 4, 4), (16, 16, 4, 1))),
    "bias with a negative stride": features(bias=(FAR, 0, (1, 1, 4, 4), (0, 0, -1, 1))),
    "bias with a long stride": features(bias=(FAR, 0, (1, 1, 4, 4), (0, 0, 2**23, 1))),
    "mask of another length": features(mask=(FAR, 0, (1, 1, 3, 1), (3, 3, 1, 1))),
    "slopes of other heads": features(alibi=(FAR, 2, (1, 2), (2, 1))),
    "sink of other heads": features(sink=(FAR, 2, (2,), (1,))),
    "dropout without a seed": features(dropout_p=0.5),
    "dropout of all": features(dropout_p=1.0, seed=(FAR, 0, (2,), (1,))),
    "softcap": features(softcap=math.nan),
    "window": features(window_left=-2),
    "sink keys": features(sink_keys=2**40),
    "spans of other rows": features(span_q=(FAR, 0, (5, 4), (4, 1))),
    "spans of keys alone": features(span_k=(FAR, 0, (4, 2), (2, 1))),
    "spans beside a window": features(span_q=(FAR, 0, (4, 4), (4, 1)), window_right=0),
    "blocks of no size": features(blocks=(FAR, 0, (1, 1, 1, 2), (2, 2, 2, 1))),
    "too many blocks": features(
        blocks=(FAR, 0, (1, 1, 2, 2), (4, 4, 2, 1)), block_q=128, block_k=128
    ),
}


@needs_simulator
@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_the_c_entry_refuses_before_it_writes(name):
    values, (*_, out, lse) = forward_arguments(**BAD_NUMBERS[name])
    with pytest.raises((RuntimeError, ValueError), match=r"\w"):
        _ops.ext.forward(*values.values())
    assert (out == 7).all() and (lse == 7).all()


@needs_simulator
def test_the_c_entry_accepts_what_those_cases_change(simulated):
    values, (q, k, v, out, _) = forward_arguments()
    _ops.ext.forward(*values.values())
    assert error_ratio(out, q, k, v, scale=0.3) <= 1


@needs_simulator
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_offsets_beyond_two_to_the_31_elements(simulated, patched, name):
    # Address space only: what is not touched takes no memory.
    tensors = dict(zip("qkv", qkv(1, 2, 5, 8)))
    far = 2**31 + 8
    try:
        wide = torch.empty(far + 64, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"no address space for 4 GiB: {error}")
    view = wide.as_strided((1, 2, 5, 8), (0, far, 8, 1))
    view.copy_(tensors[name])
    tensors[name] = view
    q, k, v = tensors.values()
    out = F.scaled_dot_product_attention(q, k, v)
    assert fa.last_call().backend == "sim"
    assert error_ratio(out, q, k, v) <= 1


# -------------------------------------------------------- broken installations


PROGRAM = """
import torch, torch.nn.functional as F, flash_attn_rocm as fa
fa.patch()
torch.manual_seed(0)
q = torch.randn(1, 2, 9, 16).half()
out = F.scaled_dot_product_attention(q, q, q)
want = torch._C._nn.scaled_dot_product_attention(q, q, q)
assert torch.equal(out, want), (out - want).abs().max()
call = fa.last_call()
print(call.backend, call.reason)
try:
    fa.flash_attn_func(q, q, q)
except (fa.FlashAttnError, RuntimeError) as error:
    print(type(error).__name__, error)
"""


def broken(prelude="", **env):
    """The lines and the stderr of PROGRAM in a damaged process."""
    env = {f"FLASH_ATTN_ROCM_{name}": value for name, value in env.items()}
    done = run_forked(prelude + PROGRAM, env=env)
    return done.stdout.splitlines(), done.stderr


@needs_simulator
def test_a_missing_code_object(tmp_path):
    lines, stderr = broken(DEVICE="sim", CODE_DIR=str(tmp_path))
    assert lines[0] == "sdpa code_object"
    assert lines[1].startswith("FlashAttnError")
    assert stderr.count("no code object for gfx906") == 1 and str(tmp_path) in stderr


@needs_simulator
@pytest.mark.parametrize("damage", ["empty", "text", "cut", "flipped header"])
def test_a_corrupt_code_object(tmp_path, damage):
    path = tmp_path / "fa_gfx906_f16.co"
    shutil.copy(f"{_config.config.code_dir}/{path.name}", path)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "text": b"not a code object\n" * 99,
            "cut": whole[: len(whole) // 2],
            "flipped header": whole[:32] + bytes(b ^ 255 for b in whole[32:96]),
        }[damage]
    )
    lines, stderr = broken(DEVICE="sim", CODE_DIR=str(tmp_path))
    assert lines[0] == "sdpa failed"
    assert lines[1].startswith("FlashAttnError") and "fa_gfx906_f16.co" in lines[1]
    assert stderr.count("a fused call failed") == 1 and "fa_gfx906_f16.co" in stderr


@needs_simulator
def test_a_compiled_call_with_a_corrupt_code_object_is_answered_by_stock(tmp_path):
    (tmp_path / "fa_gfx906_f16.co").write_bytes(b"not a code object")
    code = """
import torch, torch.nn.functional as F
import flash_attn_rocm as fa
q = torch.randn(1, 2, 8, 16, dtype=torch.float16)
want = F.scaled_dot_product_attention(q, q, q)
fa.patch()
call = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="eager")
assert torch.equal(call(q), want)
"""
    env = {
        "FLASH_ATTN_ROCM_DEVICE": "sim",
        "FLASH_ATTN_ROCM_CODE_DIR": str(tmp_path),
    }
    stderr = run_forked(code, env=env).stderr
    assert stderr.count("compiled calls stay with stock SDPA") == 1


@needs_simulator
def test_a_relative_code_dir_survives_a_change_of_folder(tmp_path):
    shutil.copytree(_config.config.code_dir, tmp_path / "code")
    code = """
import os, sys, torch, torch.nn.functional as F
os.chdir(sys.argv[1])
import flash_attn_rocm as fa
os.chdir("/")
q = torch.randn(1, 2, 8, 16, dtype=torch.float16)
with fa.patched():
    F.scaled_dot_product_attention(q, q, q)
assert fa.last_call().backend == "sim", fa.last_call()
"""
    env = {"FLASH_ATTN_ROCM_DEVICE": "sim", "FLASH_ATTN_ROCM_CODE_DIR": "code"}
    run_python(code, str(tmp_path), env=env)


@needs_simulator
def test_a_code_object_of_another_architecture(tmp_path):
    # The machine field of the ELF flags: 0x2f is gfx906, 0x3f gfx90a.
    whole = bytearray(open(f"{_config.config.code_dir}/fa_gfx906_f16.co", "rb").read())
    assert whole[48] == 0x2F
    whole[48] = 0x3F
    (tmp_path / "fa_gfx906_f16.co").write_bytes(whole)
    lines, stderr = broken(DEVICE="sim", CODE_DIR=str(tmp_path))
    assert lines[0] == "sdpa failed" and stderr.count("a fused call failed") == 1


def test_an_architecture_that_is_not_simulated(tmp_path):
    lines, stderr = broken(DEVICE="sim:gfx90a")
    assert lines[0] == "sdpa code_object" and "gfx90a" in stderr


def test_switched_off():
    lines, stderr = broken(DEVICE="off")
    assert lines[0] == "sdpa off" and lines[1].startswith("FlashAttnError")
    assert stderr == ""


@pytest.mark.parametrize("device", ["auto", "standin"])
def test_no_device(device):
    lines, stderr = broken(DEVICE=device)
    assert lines[0] == "sdpa device" and lines[1].startswith("FlashAttnError q:")
    assert stderr == ""


def test_torch_too_old():
    lines, stderr = broken("import torch\ntorch.__version__ = '2.3.1'\n")
    assert lines[0] == "sdpa unavailable" and lines[1].startswith("FlashAttnError")
    warned = [line for line in stderr.splitlines() if "torch" in line]
    assert len(warned) == 1
    assert "torch 2.4 or later, found torch 2.3.1" in warned[0]


@pytest.mark.parametrize(
    "damage",
    [
        "torch.library.register_fake = None",
        "del torch._C._are_functorch_transforms_active",
        "del torch.autograd.forward_ad._current_level",
        "del torch.jit._builtins._register_builtin",
        "other = torch.library.Library('flash_attn_rocm', 'DEF')\n"
        "other.define('fwd() -> ()')",
    ],
)
def test_torch_exchanged_after_the_installation(damage):
    prelude = (
        f"import torch, torch.autograd.forward_ad\nkeep = {damage.startswith('t')}"
    )
    prelude += f"\nlib = {damage}\n" if "Library" in damage else f"\n{damage}\n"
    lines, stderr = broken(prelude)
    assert lines[0] == "sdpa unavailable" and lines[1].startswith("FlashAttnError")
    warned = [line for line in stderr.splitlines() if "needs torch" in line]
    assert len(warned) == 1 and torch.__version__ in warned[0]
    assert "torch 2.4 or later" in warned[0]


def test_a_missing_extension():
    prelude = "import sys\nsys.modules['flash_attn_rocm._C'] = None\n"
    lines, stderr = broken(prelude)
    assert lines[0] == "sdpa unavailable" and "no extension _C" in lines[1]
    assert stderr.count("start Python outside of the source tree") == 1
    assert "needs torch" not in stderr  # nothing is wrong with torch


def test_without_torch_the_import_says_what_to_install():
    code = """
import sys
sys.modules["torch"] = None
try:
    import flash_attn_rocm
except ModuleNotFoundError as error:
    assert "needs torch 2.4 or later" in str(error), error
else:
    raise SystemExit("imported")
"""
    run_python(code)


@pytest.mark.parametrize(
    "name, value",
    [
        ("DEVICE", "gpu"),
        ("DEVICE", "sim:gfx90600"),
        ("CODE_DIR", "/nowhere"),
        ("UNTESTED", "yes"),
        ("BF16", "fast"),
        ("FP32", "strict"),
        ("GUARD", "maybe"),
        ("DEADLINE_FACTOR", "0"),
        ("DEADLINE_FACTOR", "nan"),
        ("DEADLINE_FLOOR_MS", "soon"),
        ("DEADLINE_FLOOR_MS", "-1"),
        ("ON_HANG", "panic"),
        ("COOLDOWN_S", "inf"),
        ("SELFTEST", "yes"),
        ("VERIFY", "2"),
        ("VERIFY", "1/0"),
        ("VERIFY", "1/x"),
        ("CACHE_DIR", "~nosuch/x"),
        ("CACHE_DIR", "relative"),
        ("CACHE_DIR", "./relative"),
        ("CACHE_DIR", "$HOME/x"),
    ],
)
def test_a_malformed_setting_gives_one_warning_and_the_default(caplog, name, value):
    with caplog.at_level(logging.WARNING, "flash_attn_rocm"):
        read = _config.read({"FLASH_ATTN_ROCM_" + name: value})
    assert read == _config.read({})
    assert len(caplog.records) == 1
    assert "FLASH_ATTN_ROCM_" + name in caplog.text and repr(value) in caplog.text


@pytest.mark.parametrize("value", ["auto", "strict", " STRICT ", ""])
def test_bf16_settings(value):
    read = _config.read({"FLASH_ATTN_ROCM_BF16": value})
    assert read.bf16 == (value.strip().lower() or "auto")


@pytest.mark.parametrize("value", ["auto", "fast", "exact", " Exact ", ""])
def test_fp32_settings(value):
    read = _config.read({"FLASH_ATTN_ROCM_FP32": value})
    assert read.fp32 == (value.strip().lower() or "auto")


@pytest.mark.parametrize(
    ("value", "every"), [("1/100", 100), ("1 / 7", 7), ("1", 1), ("0", 0), ("", 0)]
)
def test_verify_takes_one_in_n(value, every):
    assert _config.read({"FLASH_ATTN_ROCM_VERIFY": value}).verify == every


@pytest.mark.parametrize(
    ("environ", "folder", "given"),
    [
        ({"FLASH_ATTN_ROCM_CACHE_DIR": "/a/b"}, "/a/b", True),
        ({"XDG_CACHE_HOME": "/x"}, "/x/flash_attn_rocm", False),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/flash_attn_rocm", False),
        ({}, "~/.cache/flash_attn_rocm", False),
    ],
)
def test_state_lies_in_the_users_cache_or_where_it_was_said(environ, folder, given):
    read = _config.read(environ)
    assert read.cache_dir == os.path.expanduser(folder)
    assert read.cache_dir_given is given


@pytest.mark.parametrize("value", ["", " ", "\t"])
def test_an_empty_folder_of_state_is_as_if_not_set(caplog, value):
    assert _config.read({"FLASH_ATTN_ROCM_CACHE_DIR": value}) == _config.read({})
    assert not caplog.records


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o755])
@pytest.mark.parametrize("below", ["state", "new/state", "link/state"])
def test_a_folder_that_all_may_exchange_is_not_used(tmp_path, caplog, mode, below):
    parent = tmp_path / "parent"
    parent.mkdir()
    (tmp_path / "link").symlink_to(parent)
    parent.chmod(mode)
    path = tmp_path / below if below[0] == "l" else parent / below
    read = _config.read({"FLASH_ATTN_ROCM_CACHE_DIR": str(path)})
    if mode == 0o777:
        assert read == _config.read({}) and not read.cache_dir_given
        (record,) = caplog.records
        assert f"all may write to {parent}, " in record.getMessage()
    else:
        assert (read.cache_dir, read.cache_dir_given) == (str(path), True)
        assert not caplog.records


def test_without_a_home_nothing_is_kept(tmp_path, monkeypatch):
    """In a container whose user has no entry: "~" is not made in the current folder."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert _config.read({}).cache_dir == ""
    assert _config.read({"FLASH_ATTN_ROCM_CACHE_DIR": "~/x"}).cache_dir == ""
    assert _config.read({"XDG_CACHE_HOME": "/x"}).cache_dir == "/x/flash_attn_rocm"


@needs_simulator
def test_strict_bfloat16_reaches_the_plan():
    code = """
import flash_attn_rocm as fa, torch
q = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16)
print(fa.status()["bf16"], fa.explain(q, q, q).kernel)
"""
    seen = {}
    for value in ("auto", "strict"):
        env = {"FLASH_ATTN_ROCM_DEVICE": "sim", "FLASH_ATTN_ROCM_BF16": value}
        said, seen[value] = run_forked(code, env=env).stdout.split()
        assert said == value
    assert "_bf16_" in seen["auto"] and "_exact16_" in seen["strict"]


@needs_simulator
def test_how_float32_is_computed_reaches_the_plan():
    code = """
import flash_attn_rocm as fa, torch
sizes = (1, 1, 128, 64), (1, 2, 130, 64)
kernels = [fa.explain(*[torch.ones(size)] * 3).kernel for size in sizes]
print(fa.status()["fp32"], *kernels)
"""
    seen = {}
    for value in ("auto", "fast", "exact"):
        env = {"FLASH_ATTN_ROCM_DEVICE": "sim", "FLASH_ATTN_ROCM_FP32": value}
        said, *kernels = run_forked(code, env=env).stdout.split()
        assert said == value
        seen[value] = ["_exact32_" in kernel for kernel in kernels]
    assert seen == {"auto": [True, False], "fast": [False] * 2, "exact": [True] * 2}


@pytest.mark.parametrize(
    "value, device, arch",
    [
        ("auto", "auto", "gfx906"),
        ("SIM", "sim", "gfx906"),
        ("sim:gfx90a", "sim", "gfx90a"),
        ("sim:gfx1201", "sim", "gfx1201"),
        ("standin", "standin", "gfx906"),
        (" off ", "off", "gfx906"),
        ("", "auto", "gfx906"),
    ],
)
def test_device_settings(value, device, arch):
    read = _config.read({"FLASH_ATTN_ROCM_DEVICE": value})
    assert (read.device, read.sim_arch) == (device, arch)


def test_a_log_level_sets_up_the_logger():
    _, stderr = broken(LOG="info")
    assert stderr.count("\n") == 1
    assert stderr.startswith(
        "flash_attn_rocm: stock SDPA answers calls with reason 'device': no kernels "
        "run on this device"
    )


def test_a_device_without_effect_is_quoted_as_it_was_set():
    _, stderr = broken(DEVICE="sim:gfx1100")
    assert "FLASH_ATTN_ROCM_DEVICE=sim:gfx1100 has no effect: arch: " in stderr


# --------------------------------------------------------------------------- fork

FORK = """
import multiprocessing, sys, torch, torch.nn.functional as F
import flash_attn_rocm as fa
fa.patch()
assert not torch.cuda.is_initialized()
torch.set_num_threads(1)  # torch's own threads do not survive a fork

def work(result):
    q = torch.randn(1, 4, 200, 64, generator=torch.Generator().manual_seed(1)).half()
    out = F.scaled_dot_product_attention(q, q, q)
    x = q.double()
    want = (x @ x.mT / 8.0).softmax(-1) @ x
    fine = (out.double() - want).abs().max() < 2e-3
    call = fa.last_call()
    result.put((bool(fine), call.backend, str(call.reason)))

context = multiprocessing.get_context("fork")
if sys.argv[1] == "after":
    here = context.SimpleQueue()
    work(here)
    print(here.get())
for _ in range(2):
    there = context.SimpleQueue()
    child = context.Process(target=work, args=(there,))
    child.start()
    child.join(120)
    assert child.exitcode == 0, child.exitcode
    print(there.get())
"""


@needs_simulator
@pytest.mark.parametrize("when", ["before", "after"])
def test_fork_before_and_after_the_simulator_has_run(when):
    env = {"FLASH_ATTN_ROCM_DEVICE": "sim", "HIPSIM_THREADS": "4"}
    done = run_python(FORK, when, env=env)
    lines = done.stdout.splitlines()
    assert lines == ["(True, 'sim', 'fused')"] * (3 if when == "after" else 2)
