"""The shipped kernels under the simulator's sanitizer: no finding with the code of
either compiler, the same bits in any order of the waves, and what a mutated kernel
gives (all mutations: make mutate). Every test of a kernel runs at level 2; these are
the ones that only the simulator can answer.

SPDX-License-Identifier: BSD-3-Clause
"""

import collections
import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from helpers import BOTTOM_RIGHT, NONE, ROOT, TOP_LEFT, needs_simulator
from helpers.kernels import (
    FAMILIES,
    FULL,
    backward,
    every_family,
    forward,
    normal,
    run,
    some_families,
)

import flash_attn_rocm as fa
import hipsim
from flash_attn_rocm import _ops

pytestmark = needs_simulator

ORDERS = 50 if FULL else 3
FINDING = "race in LDS|undefined value|missing wait states"
CODE = ROOT / "flash_attn_rocm" / "_code"


@pytest.fixture
def seed():
    """Sets the order of the waves until the test ends."""
    yield lambda number: hipsim.set_option("seed", number)
    hipsim.set_option("seed", 0)


def problem(family, causal=TOP_LEFT):
    """More than one tile, three steps, a last one that is not whole; grouped heads."""
    length, length_k = family.rows // 2 + 5, family.rows + 2 * family.steps // 3
    return normal(
        *(family.dtype, length, length_k, family.dim),
        **dict(heads=2, heads_k=1, causal=causal),
    )


@every_family
def test_bits_do_not_depend_on_the_order_of_the_waves(family, seed):
    for causal in (NONE, TOP_LEFT, BOTTOM_RIGHT) if FULL else (TOP_LEFT,):
        p = problem(family, causal)
        first = None
        for number in range(ORDERS):
            seed(number)
            results = run(p, family)
            first = first or results
            assert all(map(torch.equal, results, first)), f"seed {number}"


@some_families
def test_bits_do_not_depend_on_the_number_of_threads(family):
    p = problem(family)
    alone = run(p, family)
    before = hipsim.get_option("threads")
    try:
        hipsim.set_option("threads", 3)
        assert all(map(torch.equal, run(p, family), alone))
    finally:
        hipsim.set_option("threads", before)


def special(family, value):
    """A problem in which NaN and Inf lie where only some rows see them."""
    p = problem(family)
    p.v[:, :, 1] = value
    p.v[:, :, -1] = value
    p.k[:, :, 40] = value
    return p


@pytest.mark.parametrize("value", [math.nan, math.inf])
@every_family
def test_special_values_give_no_finding(family, value):
    # They take paths of their own, which also must wait, and for everybody.
    run(special(family, value), family)
    few = normal(family.dtype, 63, 63, family.dim, causal=TOP_LEFT)
    few.k[:, :, 1] = few.v[:, :, 1] = value
    run(few, family)


def test_kernel_tests_run_at_level_2():
    assert hipsim.get_option("check") == 2


def test_kernels_of_the_oldest_compiler_give_no_finding(kernels_by):
    """Each runs with more than one tile and with special values; one head dim of each
    kind with all lengths, since the branches for them are in code that all share.
    FA_TEST=full: all of them, layouts, and rows that see no key."""
    folder, _ = kernels_by("clang-15")
    chosen = "lengths_around or special or see_no_key or one_element"
    if not FULL:
        chosen = "lengths_around and (4] or _d64-) or special_values and nan"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("tests/test_forward.py", "tests/test_backward.py"),
            *("tests/test_kernel_layouts.py", "tests/test_sanitized.py"),
            *("-k", chosen),
        ],
        env={**os.environ, "FLASH_ATTN_ROCM_CODE_DIR": str(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    (passed,) = re.findall(r"(\d+) passed", result.stdout)
    assert int(passed) >= 3 * len(FAMILIES)


# ------------------------------------------------------------------ mutated kernels


def unit_of(symbol):
    """The code object that holds a kernel."""
    arith = next(r["arith"] for r in _ops.ext.variants() if r["symbol"] == symbol)
    return CODE / f"fa_gfx906_f{arith[len('float') :]}.co"


def barriers(symbol):
    """Offsets of a shipped kernel's barriers."""
    listing = hipsim.disassemble(unit_of(symbol).read_bytes(), symbol)
    return [
        int(line.split(":")[0], 16)
        for line in listing.splitlines()
        if "s_barrier" in line
    ]


def executions(symbol, run_all):
    """Offset of each instruction -> how many waves ran it, as often as they did, and
    how many waves there were."""
    hipsim.take_profile()
    hipsim.set_option("profile", 1)
    try:
        run_all()
    finally:
        hipsim.set_option("profile", 0)
    counts, waves = collections.Counter(), 0
    for launch in hipsim.take_profile()["launches"]:
        if launch["kernel"] == symbol:
            waves += launch["counters"]["SQ_WAVES"]
            for row in launch["instructions"]:
                counts[row["offset"]] += row["count"]
    return counts, waves


@pytest.fixture
def leave_out():
    """leave_out(symbol, offset): that kernel's instruction, until the test ends."""

    def call(symbol, offset):
        facts = hipsim.object_info(unit_of(symbol))["kernels"]
        size = next(k["code_bytes"] for k in facts if k["name"] == symbol)
        hipsim.set_option("mutated", size)
        hipsim.set_option("skip", offset)

    fa.configure_guard("off")  # one launch that fails must not stop the next
    yield call
    fa.configure_guard("async")
    hipsim.set_option("skip", -1)
    hipsim.set_option("mutated", 0)


# Their barriers are those of the templates, whatever the numbers and the head dim:
# one with Q, or A and B, in LDS for good and one that streams them.
MUTATED = [f for f in FAMILIES if f.name in ("f16_d64", "f16_d192", "f64_d32")]


@pytest.mark.parametrize("which", ["forward", "keys", "queries"])
@pytest.mark.parametrize("family", MUTATED, ids=lambda f: f.name)
def test_leaving_out_any_barrier_of_a_loop_is_reported(family, which, leave_out):
    symbol = getattr(family, which)
    wanted = {"keys": 6, "queries": 1}
    # Infinite: also the barrier that only such values reach. And an odd head dim, for
    # those that only rows without loads and stores of 16 bytes reach.
    size = family.rows + 5
    form = dict(heads=2, heads_k=1)
    many = normal(family.dtype, size, size + 64, family.dim, **form)
    few = problem(family, BOTTOM_RIGHT)
    few.v[:, :, -1] = math.inf
    cut = {name: getattr(many, name)[..., :-1] for name in ("q", "k", "v", "dout")}
    problems = [few, many, many.but(**cut)]
    saved = [forward(p, family) for p in problems]

    def launch(p, results):
        if which == "forward":
            forward(p, family)
        else:
            backward(p, results, family, wanted=wanted[which])

    def is_reported(offset):
        leave_out(symbol, offset)
        for p, results in zip(problems, saved):
            try:
                launch(p, results)
            except RuntimeError as error:
                assert re.search(FINDING, str(error)), error
                return True
        return False

    offsets = barriers(symbol)
    assert len(offsets) >= 4
    missed = [offset for offset in offsets if not is_reported(offset)]
    leave_out(symbol, -1)
    # Before the first step and after the last, code that all head dims share has
    # barriers that not each of them needs; they run once.
    counts, waves = executions(symbol, lambda: [*map(launch, problems, saved)])
    assert not [hex(offset) for offset in missed if counts[offset] > waves]
    assert len(missed) <= 3


@pytest.mark.skipif(not FULL, reason="every site of a sample of kernels: FA_TEST=full")
def test_every_wait_barrier_and_nop_is_needed_or_redundant(tmp_path):
    file = tmp_path / "mutation.json"
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts/mutate.py"), "--json", file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert json.loads(file.read_text())
