"""The shipped kernels under the simulator's sanitizer: no finding with the code of
either compiler, the same bits in any order of the waves, and what a mutated kernel
gives (all mutations: make mutate).

SPDX-License-Identifier: BSD-3-Clause
"""

import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import BOTTOM_RIGHT, ROOT, needs_simulator, run_forward

import flash_attn_rocm as fa
import hipsim

pytestmark = needs_simulator

FULL = os.environ.get("FA_TEST") == "full"
ORDERS = 50
KERNELS = {
    "fa_fwd_f16_d64_plain": 64,
    "fa_fwd_f16_d64_plain_narrow": 61,
    "fa_fwd_f16_d128_plain": 128,
    "fa_fwd_f16_d128_plain_narrow": 127,
}


@pytest.fixture
def seed():
    """Sets the order of the waves until the test ends."""
    yield lambda number: hipsim.set_option("seed", number)
    hipsim.set_option("seed", 0)


@pytest.mark.parametrize("symbol", KERNELS)
def test_bits_do_not_depend_on_the_order_of_the_waves(symbol, seed):
    q, k, v = (torch.randn(1, 1, n, KERNELS[symbol]).half() for n in (133, 197, 197))
    first = None
    for number in range(ORDERS):
        seed(number)
        out, lse = torch.full_like(q, 7.0), torch.full((1, 1, 133), 7.0)
        run_forward(q, k, v, out, lse, causal=number % 3)
        assert fa.last_call().kernel == symbol
        if number < 3:
            first = [*(first or []), (out, lse)]
        assert torch.equal(out, first[number % 3][0]), f"seed {number}"
        assert torch.equal(lse, first[number % 3][1]), f"seed {number}"


def test_kernel_tests_run_at_level_2():
    assert hipsim.get_option("check") == 2


def test_kernels_of_the_oldest_compiler_give_no_finding(tmp_path):
    if shutil.which("clang-15") is None:
        pytest.skip("no clang-15")
    build = [sys.executable, "-m", "build_support.code_objects", "--archs", "gfx906"]
    subprocess.run(
        [*build, "--out", str(tmp_path)],
        env={**os.environ, "FA_CLANG": "clang-15"},
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("tests/test_forward.py", "-k", "lengths_around or see_no_key or special"),
        ],
        env={**os.environ, "FLASH_ATTN_ROCM_CODE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout


def barriers(symbol):
    """Offsets of a shipped kernel's barriers."""
    image = (ROOT / "flash_attn_rocm" / "_code" / "fa_gfx906.co").read_bytes()
    listing = hipsim.disassemble(image, symbol)
    return [int(line.split(":")[0], 16) for line in listing.splitlines()
            if "s_barrier" in line]  # fmt: skip


@pytest.mark.parametrize("symbol", KERNELS)
def test_leaving_out_any_barrier_is_reported(symbol):
    q, k, v = (torch.randn(1, 1, n, KERNELS[symbol]).half() for n in (133, 197, 197))
    v[:, :, -1] = math.inf  # also the barrier that only such values reach
    offsets = barriers(symbol)
    assert len(offsets) >= 4
    for offset in offsets:
        hipsim.set_option("skip", offset)
        try:
            with pytest.raises(RuntimeError, match=r"race in LDS|undefined value"):
                out, lse = torch.empty_like(q), torch.empty(1, 1, 133)
                run_forward(q, k, v, out, lse, causal=BOTTOM_RIGHT)
        finally:
            hipsim.set_option("skip", -1)


@pytest.mark.skipif(not FULL, reason="every site of every kernel: FA_TEST=full")
def test_every_wait_barrier_and_nop_is_needed_or_redundant(tmp_path):
    file = tmp_path / "mutation.json"
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts/mutate.py"), "--json", file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert file.exists()
