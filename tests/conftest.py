"""Fixtures, and the path by which tests find `helpers`.

SPDX-License-Identifier: BSD-3-Clause
"""

import atexit
import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

# Inductor keeps graphs on disk by a key that does not see what an op's fake kernel
# says, so those of another version of the package would come back. Here, because torch
# reads the variable, or sets it, as soon as a test's module imports its compiler.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")
    atexit.register(
        shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True
    )

sys.path.insert(0, str(Path(__file__).resolve().parent))

import helpers  # noqa: F401  first: the stand-in may take the place of _C

# isort: split

import flash_attn_rocm as fa
import hipsim
from flash_attn_rocm import _guard

ROOT = Path(__file__).resolve().parents[1]
BUILDS = ROOT / "build" / "tests"


# So many seconds that they come first: no process is to end alone with one.
LONGEST = {
    "test_under_each_fault_in_turn_every_promise_holds",
    "test_our_kernels_disassemble_as_llvm_says",
    "test_standin_compiles_the_same_kernels",
}


def pytest_configure():
    # Shells let what they start in the background ignore these, nohup the last one, and
    # it is inherited.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            usual = number == signal.SIGINT and signal.default_int_handler
            signal.signal(number, usual or signal.SIG_DFL)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.originalname not in LONGEST)


def pytest_collection_finish():
    # What torch and the tests' modules consist of stays: looking at its half a million
    # objects again and again took a tenth of the time, and at what each test leaves
    # behind, after 700 more of it, a twentieth.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20)


@pytest.fixture(autouse=True)
def closed_breakers():
    """A kernel that failed in one test may be launched in the next."""
    yield
    if _guard.breaker_list():
        _guard.reset()


@pytest.fixture
def kernels_by():
    """The gfx906 code objects of a compiler: its name -> (folder, manifest's entries).

    In a folder that tests and processes share, since it takes minutes. Those of the
    compiler that made what ships are the ones that ship.
    """
    # Here: who tests an installed package has none of it on the path.
    from build_support import code_objects, compilers, products

    def build(clang):
        environ = {"FA_CLANG": clang, "PATH": os.environ["PATH"]}
        try:
            compilers.find_clang(environ)
        except products.BuildError as error:
            pytest.skip(str(error).split(";")[0])
        folder = BUILDS / clang
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return folder, code_objects.build_code_objects(
                *(folder, hipsim.library_path(), print, environ),
                others=[ROOT / "flash_attn_rocm" / "_code"],
            )

    return build


@pytest.fixture
def patched():
    """scaled_dot_product_attention is ours while the test runs."""
    with fa.patched():
        yield


@pytest.fixture
def simulated():
    """CPU tensors go to the simulated gfx906 while the test runs."""
    from helpers import ARCH, why_no_simulator

    missing = why_no_simulator()
    if missing is not None:
        pytest.skip(f"no simulator: {missing}")
    with fa.simulate(ARCH):
        yield


@pytest.fixture(autouse=True)
def stock_after_each_test():
    """A test that leaves the function replaced must not disturb the next one."""
    yield
    fa.unpatch()


@pytest.fixture(autouse=True)
def sanitized(request):
    """Every kernel runs at check level 2; the simulator's own tests choose."""
    if request.path.parent.name == "sim" or not hipsim.library_path().exists():
        yield
        return
    before = hipsim.get_option("check")
    hipsim.set_option("check", 2)
    yield
    hipsim.set_option("check", before)
