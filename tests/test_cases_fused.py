"""Faults that users of attention libraries have met in public, through the public
names, and for each call which of them ran fused.

SPDX-License-Identifier: BSD-3-Clause
"""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    CLONES,
    NONE,
    ROOT,
    TOP_LEFT,
    HoldsTheFunction,
    error_ratio,
    fp64_attention,
    qkv,
    run_forked,
    run_python,
)

import flash_attn_rocm as fa
from flash_attn_rocm import Reason

pytestmark = pytest.mark.usefixtures("patched", "simulated")


def answered_by():
    """The last call's kernel if it ran fused, otherwise the reason."""
    call = fa.last_call()
    assert call.backend in ("sim", "sdpa")
    return call.kernel if call.backend == "sim" else call.reason


@pytest.mark.parametrize("views", ["v", "k", "q", "kv", "qv"])
@pytest.mark.parametrize("length", [33, 62])
def test_some_operands_are_transposed_views(views, length):
    tensors = {}
    for name, t in zip("qkv", qkv(1, 2, length, 64)):
        view = t.transpose(1, 2).contiguous().transpose(1, 2)
        tensors[name] = view if name in views else t
    q, k, v = tensors.values()
    out = F.scaled_dot_product_attention(q, k, v)
    assert answered_by() == "fa_fwd_f16_d64_plain"
    assert error_ratio(out, q, k, v) <= 1
    F.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert answered_by().startswith("fa_fwd")


@pytest.mark.parametrize("length, dim", [(10, 8), (1, 8), (3, 4), (17, 16), (10, 24)])
@pytest.mark.parametrize("causal", [False, True])
def test_tiny_lengths_and_head_dims(length, dim, causal):
    q, k, v = qkv(5, 4, length, dim)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    arith = "exact16" if dim < 8 else "f16"
    assert answered_by() == f"fa_fwd_{arith}_d32_plain"
    assert error_ratio(out, q, k, v, causal=TOP_LEFT if causal else NONE) <= 1


@pytest.mark.parametrize("dim", [128, 129, 256, 264, 512])
@pytest.mark.parametrize("grad", [False, True])
def test_wide_heads_fall_back(dim, grad):
    q, k, v = (t.requires_grad_(grad) for t in qkv(1, 1, 17, dim))
    out = F.scaled_dot_product_attention(q, k, v)
    if dim <= 256:
        assert answered_by().startswith("fa_fwd_f16_d")
    else:
        assert answered_by() is Reason.HEAD_DIM
    if grad:
        out.sum().backward()
        assert torch.isfinite(q.grad).all()
    reference, _ = fp64_attention(q, k, v)
    assert (out.double() - reference).abs().max() < 2e-3 * reference.abs().max()


@pytest.mark.parametrize(
    "length, length_k",
    [(1, 8), (2, 5), (5, 2), (1, 1), (20, 50), (50, 20), (65, 64)],
)
def test_is_causal_is_top_left(length, length_k):
    q, k, v = qkv(2, 1, length, 64, length_k=length_k)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert answered_by() == "fa_fwd_f16_d64_plain"
    assert error_ratio(out, q, k, v, causal=TOP_LEFT) <= 1
    assert (out[:, :, 0] - v[:, :, 0]).abs().max() == 0
    F.scaled_dot_product_attention(
        q.requires_grad_(), k, v, is_causal=True
    ).sum().backward()
    assert answered_by() == "fa_bwd_q_f16_d64_plain"


def test_patch_after_an_error_can_be_undone():
    ones = torch.ones(1, 2, 8, 16, dtype=torch.float16)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(ones, ones.repeat(1, 1, 1, 2), ones)
    assert answered_by() is Reason.HEAD_DIM
    F.scaled_dot_product_attention(ones, ones, ones)
    assert answered_by() == "fa_fwd_f16_d32_plain"


def test_many_patches_leave_one_layer():
    for _ in range(2000):
        fa.patch()
    q, k, v = qkv(1, 2, 8, 16)
    before = sum(fa.status()["counters"]["fused"].values())
    F.scaled_dot_product_attention(q, k, v)
    assert sum(fa.status()["counters"]["fused"].values()) == before + 1


def test_a_forked_worker_runs_fused():
    code = """
import multiprocessing, sys, torch, flash_attn_rocm
flash_attn_rocm.patch()
assert not torch.cuda.is_initialized()

def work():
    x = torch.randn(1, 2, 33, 64).half()
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
    sys.exit(0 if flash_attn_rocm.last_call().backend == "sim" else 3)

child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join(120)
sys.exit(child.exitcode)
"""
    run_python(code, env={"FLASH_ATTN_ROCM_DEVICE": "sim"})


@pytest.mark.parametrize("clone", CLONES)
def test_copies_of_a_model_that_holds_the_function_run_fused(clone):
    model = HoldsTheFunction()
    x, _, _ = qkv(2, 1, 7, 32)
    want = model(x)
    assert answered_by() == "fa_fwd_f16_d32_plain"
    again = clone(model)
    assert torch.equal(again(x), want)
    assert answered_by() == "fa_fwd_f16_d32_plain"


# ----------------------------------------------------------- the cases' own files

CASES = Path(os.environ.get("FA_CASES", ROOT.parent / "shared" / "cases"))
# Forward and backward calls of each file that run fused on the simulator, and why the
# others do not. The calls of b36 and b63 are in children of their child: see above.
FILES = {
    "b01": (10, 0, set()),
    "b03": (5, 5, set()),
    "b05": (15, 0, set()),
    "b07": (6, 0, set()),
    "b09": (6, 6, set()),
    "b10": (27, 27, set()),
    "b11": (4, 0, set()),  # only the bias requires grad
    "b13": (20, 0, set()),
    "b14": (10, 10, set()),
    "b15": (0, 0, {"head_dim"}),  # 264 and more
    "b17": (4, 4, set()),
    "b19": (14, 14, set()),
    "b20": (11, 0, set()),
    "b21": (8, 8, set()),
    "b23": (8, 8, set()),
    "b25": (36, 0, set()),
    "b29": (36, 0, set()),
    "b32": (16, 16, set()),
    "b34": (4, 4, set()),
    "b36": (0, 0, set()),
    "b37": (0, 0, set()),  # launches nothing: empty
    "b51": (6, 6, set()),
    "b53": (12, 12, set()),
    "b55": (4, 8, set()),  # double backward: through two fused backwards
    "b57": (4, 4, set()),
    "b59": (17, 0, {"argument"}),
    "b60": (1, 0, {"head_dim"}),
    "b63": (0, 0, set()),
    "b67": (3, 0, set()),
    "b71": (6, 0, set()),
    "b74": (36, 0, set()),
}
GRADIENTS_OF_BIAS = {"b11": 4}
ROW_SUMS = {"b11": 4}  # passes of dQ for a bias's gradient alone


@pytest.mark.skipif(
    not CASES.exists(), reason=f"no folder {CASES.name} beside the tree"
)
@pytest.mark.parametrize("name", FILES)
def test_a_case_file_passes_with_as_many_fused_calls(name, tmp_path):
    counts = tmp_path / "counts.json"
    code = """
import os, sys, pytest
os.chdir(sys.argv[1])
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True  # the folder is not ours
options = ["-q", "-p", "no:cacheprovider", "-p", "helpers.count_fused"]
sys.exit(pytest.main([*options, sys.argv[2]]))
"""
    environ = {
        "FLASH_ATTN_ROCM_DEVICE": "sim",
        "FA_CASES_DEVICE": "cpu",
        "FA_COUNTS": str(counts),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HIPSIM_THREADS": "1",
    }
    run_forked(code, CASES, f"{name}.py", env=environ)
    counters = json.loads(counts.read_text())
    forward, backward, fallback = FILES[name]
    symbols = counters["fused"]
    assert sum(n for s, n in symbols.items() if s.startswith("fa_fwd")) == forward
    for kind, sums in (("fa_bwd_kv", 0), ("fa_bwd_q", ROW_SUMS.get(name, 0))):
        passes = sum(n for s, n in symbols.items() if s.startswith(kind))
        assert passes == backward + sums
    biases = sum(n for s, n in symbols.items() if s.startswith("fa_bwd_bias"))
    assert biases == GRADIENTS_OF_BIAS.get(name, 0)
    assert set(counters["fallback"]) == fallback
