"""The binding when memory runs out, or torch refuses: a clean error, or the answer.

helpers/faults.c, preloaded, lets the n-th allocation of the extension fail, and calls
of torch's C functions; CPython's own test module lets the n-th of Python's fail. All
in fresh processes.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import needs_simulator, run_python

import flash_attn_rocm._C as C

SOURCE = Path(__file__).parent / "helpers" / "faults.c"

PRELUDE = """
import ctypes, sys, time
import torch, flash_attn_rocm, flash_attn_rocm._C as C
from flash_attn_rocm import _guard, _ops, simulate
from flash_attn_rocm._config import config, simulator_path
faults = ctypes.CDLL(None)
"""
# The extension alone: no guard yet, no configuration.
BARE = """
import ctypes, importlib.util, sys
def load():
    spec = importlib.util.spec_from_file_location("flash_attn_rocm._C", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
C = load()
faults = ctypes.CDLL(None)
"""
TENSORS = """
def tensors(rows=8, **like):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, rows, 16, generator=g).half().requires_grad_()
            for _ in "qkv"]
EMPTY = torch.empty(0)
def fwd(q, k, v):
    names = _ops.FEATURE_TENSORS
    return torch.ops.flash_attn_rocm.fwd.default(
        q, k, v, *[EMPTY] * len(names), 0.25, 0.0, 0.0, 0, -1, -1, 0, 0, 0, False)
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """The environment of a process with the faults."""
    if shutil.which("gcc") is None or sys.platform != "linux":
        pytest.skip("needs gcc on Linux")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    flags = "-std=c11 -O1 -shared -fPIC -fvisibility=hidden".split()
    subprocess.run(["gcc", *flags, "-o", library, SOURCE, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


def run(code, *args, env):
    return run_python(textwrap.dedent(code), *args, env=env)


def test_the_first_guard_fails_cleanly_at_each_allocation(faults, tmp_path):
    code = """
        texts = []
        for nth in range(1, 99):
            faults.faults_memory(nth)
            try:
                C.guard("async", 50.0, 2000.0, 60.0, False, sys.argv[2], sys.argv[2])
                break
            except C.Error as error:
                texts.append(str(error))
                assert C.guard_counts()["misses"] == 0
        # the guard, two folders, and the handlers of fork
        assert texts == ["guard: out of memory"] * 4, texts
        faults.faults_memory(0)
        texts.clear()
        for nth in range(1, 99):
            faults.faults_memory(nth)
            try:
                C.configure("/", "/", "null", lambda: None)
                break
            except C.Error as error:
                texts.append(str(error))
        faults.faults_memory(0)
        assert texts == ["runtime: out of memory"] * 3, texts
    """
    run(BARE + textwrap.dedent(code), C.__file__, str(tmp_path), env=faults)


def test_python_may_run_out_of_memory_in_each_function(tmp_path):
    pytest.importorskip("_testcapi")
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim").chmod(0o777)  # others could write there: a complaint
    code = """
        import _testcapi, gc, itertools, os
        with simulate("gfx906"):
            pass
        C.configure(config.code_dir, simulator_path(), "null", lambda: None)
        fwd(*tensors())
        while not C.latency():  # the watching thread counts it
            time.sleep(0.001)
        kernel = C.latency()[0][1]
        C.breaker_trip("null:0", kernel, "cause")
        assert C.complaints() and C.breakers() and C.latency()
        for _ in range(300):  # Python has the numbers below 257 for ever
            C.record_fallback("some reason")
        os.makedirs(sys.argv[1] + "/own", mode=0o700)
        store = sys.argv[1] + "/own"
        sizes = [(1, 1, 2, 8)] * 3
        shapes = [(1, 1, 2, 8), (16, 16, 8, 1)] * 3
        fresh = itertools.count()
        class Text(str):
            pass
        policy = ("async", 50.0, 2000.0, 60.0, False, store, store)
        calls = [
            C.guard_counts, C.breakers, C.latency, C.complaints, C.counters,
            C.last_call, C.build_info, C.variants, C.last_failure,
            lambda: C.guard(*policy),
            lambda: C.store_list(store), lambda: C.store_reset(store, "kernel"),
            lambda: C.breaker_trip("null:0", kernel, "cause"),
            lambda: C.breaker_reset("none"),
            lambda: C.plan(0, 16, 16, 16, *shapes, 1.0, 0),
            lambda: C.workspace(0, *sizes, 0),
            lambda: C.configure(f"/at/{next(fresh)}", "/", "null", lambda: None),
            lambda: C.record_fallback(Text("some reason")),
            load,
        ]
        failures = 0
        kept = []
        def once(call, first, last):
            # A full collection drops the objects that Python keeps for reuse, and a
            # failed call leaves some: the next would need fewer allocations, and the
            # one whose turn it is would never fail.
            gc.freeze()  # what there is; else the collection takes long
            gc.collect()
            try:
                _testcapi.set_nomemory(first, last)
                kept.append(call())
            except MemoryError:
                return True
            except C.Error as error:
                assert "out of memory" in str(error), error
                return True
            finally:
                _testcapi.remove_mem_hooks()
            return False
        for call in calls:
            for last in (0, 1):
                nth = 0  # so many succeed
                while once(call, nth, last and nth + last) and nth < 3000:
                    nth += 1
                    failures += 1
                if last:  # some later one may matter, too
                    for later in range(nth, nth + 40):
                        failures += once(call, later, later + 1)
            call()
        assert failures > 60, failures
    """
    bare = """
        import _imp, importlib.util
        spec = importlib.util.spec_from_file_location("flash_attn_rocm._C", C.__file__)
        def load():  # importlib itself tries again, and again
            _imp.exec_dynamic(_imp.create_dynamic(spec))
    """
    text = PRELUDE + TENSORS + textwrap.dedent(bare) + textwrap.dedent(code)
    run(text, str(tmp_path), env={"FLASH_ATTN_ROCM_CACHE_DIR": str(tmp_path)})


def test_a_list_of_breakers_needs_memory(faults):
    code = """
        C.configure(config.code_dir, simulator_path(), "null", lambda: None)
        fwd(*tensors())
        faults.faults_memory(1)
        try:
            C.breakers()
        except MemoryError:
            pass
        else:
            raise AssertionError
        assert C.breakers() == []
    """
    run(PRELUDE + TENSORS + textwrap.dedent(code), env=faults)


@needs_simulator
def test_any_allocation_of_a_forward_and_backward_may_fail(faults, tmp_path):
    """Each time with a runtime of its own, so that all is opened anew; the answer is
    the stock function's wherever ours has none."""
    code = """
        import os
        F = torch.nn.functional
        stock = tensors()
        F.scaled_dot_product_attention(*stock).float().sum().backward()
        happened = fused = 0
        with flash_attn_rocm.patched(), simulate("gfx906"):
            for nth in range(1, 200):
                link = os.path.join(sys.argv[1], str(nth))
                os.symlink(config.code_dir, link)
                ours = tensors()
                C.reset_counters()
                faults.faults_memory(nth)
                try:
                    C.configure(link, simulator_path(), "sim", lambda: "gfx906")
                except C.Error as error:
                    assert "out of memory" in str(error)
                    C.configure(link, simulator_path(), "sim", lambda: "gfx906")
                out = F.scaled_dot_product_attention(*ours)
                out.float().sum().backward()
                left = faults.faults_left()
                faults.faults_memory(0)
                for a, b in zip(ours, stock):
                    assert torch.allclose(a.grad, b.grad, atol=2e-3), nth
                counts = C.counters()
                assert counts["fused"] or counts["fallback"], counts
                fused += bool(counts["fused"])
                if left != 0:
                    break
                happened += 1
        assert happened > 5 and fused > 5, (happened, fused)
    """
    run(PRELUDE + TENSORS + textwrap.dedent(code), str(tmp_path), env=faults)


def test_what_torch_refuses_is_an_error_with_a_text(faults):
    code = """
        C.configure(config.code_dir, simulator_path(), "null", lambda: None)
        q, k, v = (t.detach() for t in tensors())
        def fails(text):
            try:
                fwd(q, k, v)
            except RuntimeError as error:
                assert text in str(error), error
            else:
                raise AssertionError(text)
        for name in ("get_dim", "get_sizes", "get_strides", "get_dtype",
                     "get_device_type", "get_device_index"):
            faults.faults_torch(name.encode(), 1)
            fails("torch")
        for nth, name in enumerate(("out", "lse", "out_lo"), 1):
            faults.faults_torch(b"empty_strided", nth)
            fails(f"{name}: expected memory for it, got none (")
        out, lse, _ = fwd(q, k, v)
        def bwd(lse, wanted=31):
            features = [EMPTY] * len(_ops.FEATURE_TENSORS)
            return torch.ops.flash_attn_rocm.bwd.default(
                out, EMPTY, q, k, v, out, lse, EMPTY, *features, 0.25, 0.0, 0.0, 0, -1,
                -1, 0, 0, 0, wanted & 7, False)
        bwd(lse)
        for nth in range(1, 7):
            faults.faults_torch(b"empty_strided", nth)
            try:
                bwd(lse)
            except RuntimeError as error:
                assert "expected memory for it, got none (" in str(error), error
            else:
                assert nth == 6 and faults.faults_left() == 1
        faults.faults_torch(b"", 0)
        try:
            bwd(lse[:, :, :-1])
        except RuntimeError as error:
            assert "lse: expected size 8 in dimension 2" in str(error), error
        else:
            raise AssertionError
        for nth in range(1, 9):
            faults.faults_torch(b"get_data_ptr", nth)
            try:
                fwd(q, k, v)
            except RuntimeError as error:
                assert "address" in str(error) or "torch" in str(error), error
        faults.faults_torch(b"", 0)
        faults.faults_device(1)
        fails("k: expected device cpu (as q), got ")
        faults.faults_device(2)
        C.configure(config.code_dir, simulator_path(), "sim", lambda: None)
        fails("q: expected a CPU tensor in mode sim, got a GPU tensor")
        C.configure(config.code_dir, simulator_path(), "auto", lambda: None)
        fails("q: expected a current stream on device")
        faults.faults_device(0)
        C.configure(config.code_dir, simulator_path(), "null", lambda: None)
        fwd(q, k, v)
    """
    run(PRELUDE + TENSORS + textwrap.dedent(code), env=faults)


@pytest.mark.parametrize("call", ["library_init_fragment", "library_def"])
def test_a_registration_that_torch_refuses_is_taken_back(faults, call):
    code = """
        import torch
        faults.faults_torch(sys.argv[2].encode(), 1)
        try:
            C.register_ops()
        except RuntimeError as error:
            assert "flash_attn_rocm::fwd, bwd, rotary: torch refused: " in str(error)
        else:
            raise AssertionError
        assert C.register_ops() is True
    """
    run(BARE + textwrap.dedent(code), C.__file__, call, env=faults)


def test_an_implementation_that_torch_refuses_is_taken_back(faults):
    code = """
        import torch
        faults.faults_torch(b"library_init_impl", 2)
        try:
            C.register_ops()
        except RuntimeError as error:
            assert ": torch refused: " in str(error)
        else:
            raise AssertionError
        assert C.register_ops() is True
    """
    run(BARE + textwrap.dedent(code), C.__file__, env=faults)
