"""What several test files need: the float64 reference, the error measure, canaries.

Error measure (docs/accuracy.md): the Frobenius norm of the error over that of the
reference, at most twice the same figure of PyTorch's math path in the same dtype.
Where the math path is exact, at most 2 ulp of the dtype at the largest value.

SPDX-License-Identifier: BSD-3-Clause
"""

import copy
import io
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import forks, standin  # before the package: it may take the place of _C

# isort: split

import flash_attn_rocm as fa
from flash_attn_rocm import _ops, _simulate

ROOT = Path(__file__).resolve().parents[2]
ARCH = "gfx906"
CANARY = -12345.0  # exact in float16 to a multiple of 8; compared as bits
GUARD = 256  # canary elements on each side of an output

NONE, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2
CAUSAL = {"none": NONE, "top-left": TOP_LEFT, "bottom-right": BOTTOM_RIGHT}


# In a list, because patch() exchanges the globals that hold it.
_HELD = [torch._C._nn.scaled_dot_product_attention]


def builtin():
    """The stock function itself."""
    return _HELD[0]


def stock_sdpa(*args, **kwargs):
    """The stock function, whatever is patched."""
    return builtin()(*args, **kwargs)


def why_no_simulator():
    """Why nothing can be simulated here, or None."""
    return _ops.unavailable or _simulate.missing_for(ARCH)


needs_simulator = pytest.mark.skipif(
    why_no_simulator() is not None, reason=f"no simulator: {why_no_simulator()}"
)
needs_extension = pytest.mark.skipif(
    _ops.op is None, reason=f"no extension: {_ops.unavailable}"
)


def qkv(
    batch,
    heads,
    length,
    dim,
    *,
    heads_k=None,
    length_k=None,
    dtype=torch.float16,
    seed=0,
):
    """Seeded normal q, k, v of shape (B, H, S, D)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length, dim)
    shape_k = (batch, heads_k or heads, length_k or length, dim)
    shapes = (shape, shape_k, shape_k)
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes)


def visible(length, length_k, causal):
    """Boolean (Sq, Sk): whether query i sees key j."""
    if causal == NONE:
        return torch.ones(length, length_k, dtype=torch.bool)
    shift = length_k - length if causal == BOTTOM_RIGHT else 0
    return torch.ones(length, length_k, dtype=torch.bool).tril(shift)


def fp64_attention(q, k, v, scale=None, causal=NONE):
    """(out, lse) in float64; a row that sees no key is 0 with lse -inf."""
    q, k, v = (t.detach().double() for t in (q, k, v))
    group = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scale = q.size(-1) ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(
        ~visible(q.size(2), k.size(2), causal).to(q.device), -math.inf
    )
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    weights = torch.where(lse.unsqueeze(-1) == -math.inf, 0.0, weights)
    return weights @ v, lse


def math_attention(q, k, v, scale=None, causal=NONE):
    """PyTorch's math path in the inputs' dtype: the yardstick."""
    group = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    mask = None
    if causal != NONE:
        mask = visible(q.size(2), k.size(2), causal).to(q.device)
    with sdpa_kernel(SDPBackend.MATH):
        out = stock_sdpa(q, k, v, attn_mask=mask, scale=scale)
    if mask is not None:  # rows without a key were NaN before torch 2.5
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return out


def relative_error(x, reference):
    """||x - reference|| / ||reference||; the absolute norm for a zero reference."""
    error = (x.double() - reference).norm()
    size = reference.norm()
    return float(error / size) if size > 0 else float(error)


# Below this relative error the math path has not even rounded its result: one key,
# or one that takes all the weight. Rounding to float16 alone gives 2e-4.
EXACT = 2.0**-13


def ulp(x, dtype=torch.float16):
    """The distance of neighbouring numbers of `dtype` at x."""
    facts = torch.finfo(dtype)
    return facts.eps * 2.0 ** math.floor(math.log2(max(abs(x), facts.tiny)))


def error_ratio(out, q, k, v, scale=None, causal=NONE):
    """Error of `out` in units of what is allowed; pass if at most 1."""
    assert torch.isfinite(out).all()
    reference, _ = fp64_attention(q, k, v, scale, causal)
    yardstick = relative_error(math_attention(q, k, v, scale, causal), reference)
    if not yardstick >= EXACT:  # also NaN, where the math path overflows
        worst = float((out.double() - reference).abs().max())
        return worst / (2 * ulp(float(reference.abs().max()), q.dtype))
    return relative_error(out, reference) / (2 * yardstick)


def lse_bound(q, k, lse, scale=None):
    """Per-element bound on the error of the log-sum-exp (B, H, Sq)."""
    group = q.size(1) // k.size(1)
    scale = q.size(-1) ** -0.5 if scale is None else scale
    k = k.double().abs().repeat_interleave(group, 1)
    products = (q.double().abs() @ k.transpose(-1, -2)).amax(-1) * abs(scale)
    finite = torch.where(torch.isfinite(lse), lse.abs(), 0.0)
    return 1e-5 + 5e-7 * torch.maximum(finite, products)


def lse_ratio(lse, q, k, v, scale=None, causal=NONE):
    """Error of `lse` in units of lse_bound(); pass if at most 1.

    Infinite if it is not -inf exactly where a row sees no key.
    """
    _, reference = fp64_attention(q, k, v, scale, causal)
    empty = reference == -math.inf
    if not torch.equal(lse == -math.inf, empty):
        return math.inf
    error = (lse.double() - reference).abs() / lse_bound(q, k, reference, scale)
    return max(error[~empty].nan_to_num(math.inf).tolist(), default=0.0)


def entry_arguments(q, wanted, k, v):
    """(device arguments of a C entry, workspace) for these tensors."""
    on_gpu = q.is_cuda
    device = (
        int(on_gpu),
        q.device.index if on_gpu else 0,
        torch.cuda.current_stream(q.device).cuda_stream if on_gpu else 0,
        None if on_gpu else ARCH,
        _ops.dtype_code(q.dtype),
    )
    shapes = (tuple(t.shape) for t in (q, k, v))
    size = _ops.ext.workspace(_ops.dtype_code(q.dtype), *shapes, wanted)
    return device, torch.empty(size, dtype=torch.uint8, device=q.device)


def address(tensor):
    """Of its data; 0 for None and for a tensor without elements."""
    return tensor.data_ptr() if tensor is not None and tensor.numel() else 0


def lse_low(saved):
    """What rounding took from the log-sum-exp, out of (out, lse, out_lo); or None."""
    _, lse, residue = saved
    if residue is None or not residue.numel():
        return None
    return residue[: lse.numel()].view(lse.shape)


def out_low(saved):
    """What it took from the output, as it is kept: of fp16 times 2^11; None also where
    nothing is kept of that."""
    out, lse, residue = saved
    if residue is None or not residue.numel() or out.element_size() != 2:
        return None
    start = -(-lse.numel() // 4) * 4
    return residue[start:].view(out.dtype)[: out.numel()].view(out.shape)


def run_forward(q, k, v, out, lse, scale=None, causal=NONE, out_lo=None):
    """The forward's C entry, into outputs that the caller owns.

    CPU tensors go to the simulator, others to the device they lie on.
    """
    scale = q.size(-1) ** -0.5 if scale is None else scale
    device, workspace = entry_arguments(q, 0, k, v)
    _ops.ext.forward(
        *device,
        *map(address, (q, k, v, out, lse, out_lo, workspace)),
        workspace.numel(),
        *(part for t in (q, k, v) for part in (tuple(t.shape), t.stride())),
        out.stride(),
        scale,
        causal,
    )


def fused(function, *args, **kwargs):
    """function(...) on the simulator; fails unless the call ran fused."""
    with fa.simulate(ARCH):
        result = function(*args, **kwargs)
    call = fa.last_call()
    assert call is not None and call.backend == "sim", call
    return result


class HoldsTheFunction(torch.nn.Module):
    """A model that keeps the function it found when it was made, as some do."""

    def __init__(self):
        super().__init__()
        self.attend = F.scaled_dot_product_attention

    def forward(self, x):
        return self.attend(x, x, x, is_causal=True)


def _through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def _through_file(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


# The ways in which programs copy a model.
CLONES = [copy.deepcopy, _through_pickle, _through_file]


def _environ():
    """This one's without our settings but for the threads of the simulator, which say
    how many cores a test has; with the path to package and helpers."""
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FLASH_ATTN_ROCM_", "HIPSIM_"))
        or key == "HIPSIM_THREADS"
    }
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return environ


def _must_succeed(done):
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def _run(*command, env, timeout):
    done = subprocess.run(
        [sys.executable, *command],
        env={**_environ(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return _must_succeed(done)


def run_python(code, *args, env=None, timeout=300):
    """A fresh interpreter running `code`; fails with its stderr if it fails."""
    if standin.WANTED:
        code = "import helpers.standin\n" + code
    return _run("-c", code, *args, env=env, timeout=timeout)


def run_forked(code, *args, env=None, timeout=300, check=True):
    """run_python() for code to which it is all the same that torch is imported before
    its environment is set."""
    if standin.WANTED:
        code = "import helpers.standin\n" + code
    done = forks.run_fork(code, args, _environ(), env or {}, timeout)
    return _must_succeed(done) if check else done


def run_script(path, code, *args, env=None, timeout=300):
    """run_python() for code that starts processes, which import it from `path`."""
    if standin.WANTED:
        code = "import helpers.standin\n" + code
    path.write_text(code)
    return _run(str(path), *args, env=env, timeout=timeout)
