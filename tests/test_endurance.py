"""Many calls: nothing grows, nothing changes, and no head is left out.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json

import pytest
import torch
from helpers import BOTTOM_RIGHT, NONE, TOP_LEFT, fp64_attention, needs_simulator, qkv
from helpers import run_python as run
from helpers.gradients import fp64_gradients

import flash_attn_rocm as fa
import hipsim
from flash_attn_rocm import _autograd
from flash_attn_rocm._features import Features

pytestmark = needs_simulator

HALF, BF16, FLOAT, DOUBLE = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
DTYPES = pytest.mark.parametrize(
    "dtype", [HALF, BF16, FLOAT, DOUBLE], ids=["fp16", "bf16", "fp32", "fp64"]
)


# --------------------------------------------------------------------------
# Growth

# In a process of its own, where nobody else allocates. Calls differ in dtype, mask and
# sharing of heads, since each kind has its own kernels and workspace.
CALLS = """
import ctypes, gc, json, os, sys, threading
import torch
from torch.nn import functional as F
import flash_attn_rocm as fa
from flash_attn_rocm import _ops

mode, calls, batches, spoil = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
os.environ["KINETO_LOG_LEVEL"] = "6"
torch.set_num_threads(1)
kept = []

def kinds():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for heads_k, causal in ((2, False), (1, True)):
            shapes = [(1, 2, 5, 8), (1, heads_k, 5, 8), (1, heads_k, 5, 8)]
            q, k, v = (torch.randn(s).to(dtype).requires_grad_() for s in shapes)
            yield q, k, v, causal

inputs = list(kinds())

def call(number):
    q, k, v, causal = inputs[number % len(inputs)]
    options = {"enable_gqa": True} if k.size(1) == 1 else {}
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, **options)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    if spoil:
        kept.append((grads, open(os.devnull), b"x" * 10_000))
        threading.Thread(target=threading.Event().wait, daemon=True).start()

class Malloc(ctypes.Structure):  # struct mallinfo2 of glibc
    _fields_ = [(f"field{n}", ctypes.c_size_t) for n in range(10)]

def malloc_bytes():
    info = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if info is None:
        return 0
    info.restype = Malloc
    return info().field7  # uordblks: in use

def usage():
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {
        "malloc": malloc_bytes(),
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "objects": sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()),
    }

with fa.patched(), fa.simulate("gfx906"):
    if mode == "null":
        _ops.configure("null")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    for number in range(2 * len(inputs)):
        call(number)
    assert fa.last_call().backend == mode, fa.last_call()
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        for number in range(2 * len(inputs)):
            call(number)
        gc.collect()
    events = profile.profiler.kineto_results.events()
    changes = [e.nbytes() for e in events if e.name() == "[memory]"]
    assert len(changes) > 100
    del profile, events
    for number in range(calls // 2):
        call(number)
    usage()
    told = [usage()]
    for _ in range(batches):
        for number in range(calls // batches):
            call(number)
        told.append(usage())
growth = {key: told[-1][key] - told[0][key] for key in told[0]}
# A leak grows in every batch of calls; what malloc has from the system grows now and
# then, by fragments: what grew in each batch did so that many times.
resident = [at["resident"] for at in told]
steps = [after - before for before, after in zip(resident, resident[1:])]
growth["resident"] = batches * min(steps)
growth["allocated"] = sum(changes)
counters = fa.status()["counters"]
print(json.dumps({"growth": growth, "counters": counters}))
"""
BATCHES = 5
# What is freed and lies in glibc's caches counts as in use: 24 KB in one process, and
# in the next 1 KB. Without those caches it was 7 KB in the worst of 20.
NO_CACHES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
# Bytes that a process may grow by, whatever it calls: of malloc in use, stock attention
# has 1 a call more (the interpreter's); what malloc has from the system grows by
# fragments, stock or fused, 1.2 to 2.4 MB in the first of the batches and then no more.
ALLOWED = {"malloc": 16 * 1024, "resident": 2 * 1024 * 1024}


def growth(mode, calls, spoil=""):
    """What a process has more of after so many calls, beyond ALLOWED."""
    env = {"HIPSIM_CHECK": "2", "OMP_NUM_THREADS": "1", "HIPSIM_THREADS": "1"}
    env["GLIBC_TUNABLES"] = NO_CACHES
    done = run(CALLS, mode, str(calls), str(BATCHES), spoil, env=env)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["counters"]["fallback"] == {}
    assert calls % (8 * BATCHES) == 0  # each batch has calls of each kind
    # The passes of a call: forward, dK and dV, dQ.
    made = calls + calls // 2 + 32
    assert sum(told["counters"]["fused"].values()) == 3 * made
    grown = told["growth"].items()
    return {key: value for key, value in grown if value > ALLOWED.get(key, 0)}


@pytest.mark.parametrize(("mode", "calls"), [("null", 1000), ("sim", 80)])
def test_calls_leave_no_memory_files_or_threads_behind(mode, calls):
    assert growth(mode, calls) == {}


def test_what_calls_leave_behind_is_noticed():
    grown = growth("null", 320, "spoil")
    kinds = {"objects", "allocated", "files", "threads", "malloc", "resident"}
    assert grown.keys() == kinds


# --------------------------------------------------------------------------
# Heads


def attention(q, k, v, causal=NONE):
    scale = q.size(-1) ** -0.5
    with fa.simulate("gfx906"):
        features = Features(scale=scale, causal=causal)
        out = _autograd.attention(q, k, v, features, strict=True)
    assert fa.last_call().backend == "sim"
    return out


def passes(q, k, v, dout, causal=NONE):
    """out, dq, dk, dv of the kernels."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attention(*inputs, causal)
    with fa.simulate("gfx906"):
        return out.detach(), *torch.autograd.grad(out, inputs, dout)


def head_sizes(x):
    """Mean square of each head, (B, H)."""
    return x.double().square().mean((2, 3))


# A head that is skipped has the size of another head, or of what the memory held; the
# heads differ by more than a tenth.
@DTYPES
@pytest.mark.parametrize(
    ("batch", "heads", "heads_k", "causal"),
    [(2, 6, 6, TOP_LEFT), (2, 6, 2, BOTTOM_RIGHT), (1, 66, 6, NONE)],
)
def test_each_head_has_the_variance_of_fp64(dtype, batch, heads, heads_k, causal):
    sizes = dict(heads_k=heads_k, length_k=40)
    q, k, v = qkv(batch, heads, 33, 16, **sizes, dtype=dtype, seed=7)
    dout = qkv(batch, heads, 33, 16, dtype=dtype, seed=8)[0]
    for tensor in (v, dout):
        count = tensor.size(0) * tensor.size(1)
        scales = 1.15 ** torch.arange(count).remainder(24)
        tensor *= scales.view(*tensor.shape[:2], 1, 1).to(dtype)
    got = passes(q, k, v, dout, causal)
    exact = (
        fp64_attention(q, k, v, causal=causal)[0],
        *fp64_gradients(q, k, v, dout, causal=causal),
    )
    allowed = {HALF: 1e-3, BF16: 4e-3, FLOAT: 2e-6, DOUBLE: 1e-14}[dtype]
    # seen:         3.3e-4      1.4e-3        4.3e-7          8.9e-16
    for name, ours, reference in zip(("out", "dq", "dk", "dv"), got, exact):
        ratio = head_sizes(ours) / head_sizes(reference)
        assert (ratio - 1).abs().max() < allowed, name


# --------------------------------------------------------------------------
# Repeats


def bits(tensors):
    return [t.contiguous().view(torch.uint8) for t in tensors]


@DTYPES
@pytest.mark.parametrize(
    ("dim", "length", "causal"), [(64, 150, TOP_LEFT), (100, 70, NONE)]
)
def test_results_repeat_bit_for_bit(dtype, dim, length, causal):
    q, k, v = qkv(1, 2, length, dim, heads_k=1, length_k=90, dtype=dtype)
    dout = qkv(1, 2, length, dim, dtype=dtype, seed=1)[0]
    before = {name: hipsim.get_option(name) for name in ("seed", "threads")}
    runs = []
    try:
        # As they come, twice, then with the waves in another order on two threads.
        for seed, threads in ((0, 1), (0, 1), (9, 2)):
            hipsim.set_option("seed", seed)
            hipsim.set_option("threads", threads)
            runs.append(bits(passes(q, k, v, dout, causal)))
    finally:
        for name, value in before.items():
            hipsim.set_option(name, value)
    first, *others = runs
    assert all(part.any() for part in first)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other))
