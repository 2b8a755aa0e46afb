"""The measures that other tests trust: each lets good results pass and fails bad ones.

SPDX-License-Identifier: BSD-3-Clause
"""

import math
import os
import signal

import pytest
import torch
from helpers import (
    BOTTOM_RIGHT,
    NONE,
    TOP_LEFT,
    error_ratio,
    fp64_attention,
    lse_ratio,
    math_attention,
    qkv,
    run_forked,
)

CASES = [(9, 9, NONE), (70, 130, TOP_LEFT), (5, 70, BOTTOM_RIGHT), (9, 3, BOTTOM_RIGHT)]


@pytest.mark.parametrize("length, length_k, causal", CASES)
@pytest.mark.parametrize("times", [1.0, 1.9, 2.1, 3.0])
def test_error_is_measured_in_units_of_twice_the_math_paths(
    length, length_k, causal, times
):
    q, k, v = qkv(1, 2, length, 64, length_k=length_k)
    reference, _ = fp64_attention(q, k, v, causal=causal)
    math_error = math_attention(q, k, v, causal=causal).double() - reference
    ratio = error_ratio(reference + times * math_error, q, k, v, causal=causal)
    assert ratio == pytest.approx(times / 2)
    assert (ratio > 1) == (times > 2)


@pytest.mark.parametrize("ulps", [0.0, 1.0, 2.0, 3.0])
def test_where_the_math_path_is_exact_error_is_measured_in_units_of_two_ulp(ulps):
    q, k, v = qkv(1, 1, 3, 16, length_k=1)
    v = v / v.abs().max() * 1.5  # an ulp is 2^-10 from 1 to 2
    assert torch.equal(math_attention(q, k, v), v.expand_as(q))
    out = v.expand_as(q).clone()
    out[0, 0, 2, 5] += ulps * 2.0**-10
    ratio = error_ratio(out.double(), q, k, v)
    assert ratio == pytest.approx(ulps / 2, abs=0.1)
    assert (ratio > 1) == (ulps > 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_result_that_is_not_finite_fails(bad):
    q, k, v = qkv(1, 1, 3, 16)
    out = math_attention(q, k, v)
    out[0, 0, 1, 1] = bad
    with pytest.raises(AssertionError):
        error_ratio(out, q, k, v)


@pytest.mark.parametrize(
    "times, added, passes",
    [
        (1.0, 0.0, True),
        (1.0, 5e-6, True),
        (1.0, 1e-4, False),
        (math.log2(math.e), 0.0, False),  # the binary logarithm
        (-1.0, 0.0, False),
        (math.nan, 0.0, False),
        (0.0, -math.inf, False),  # a row that sees keys
    ],
)
def test_a_wrong_lse_fails(times, added, passes):
    q, k, v = qkv(1, 2, 9, 64, length_k=70)
    _, lse = fp64_attention(q, k, v)
    lse[0, 1, 4] = lse[0, 1, 4] * times + added
    assert (lse_ratio(lse, q, k, v) <= 1) == passes


def test_an_lse_that_is_not_minus_infinity_for_a_row_without_keys_fails():
    q, k, v = qkv(1, 1, 9, 64, length_k=3)
    _, lse = fp64_attention(q, k, v, causal=BOTTOM_RIGHT)
    assert lse_ratio(lse, q, k, v, causal=BOTTOM_RIGHT) <= 1
    for wrong in (0.0, -1e30, math.inf, math.nan):
        lse[0, 0, 2] = wrong
        assert lse_ratio(lse, q, k, v, causal=BOTTOM_RIGHT) > 1


SAYS = """
import os, sys
print(os.environ.get("HIPSIM_X"), sys.argv[1:], "flash_attn_rocm" in sys.modules)
print("torch" in sys.modules, os.environ["PYTHONPATH"].count("tests"), os.getppid())
print("a warning", file=sys.stderr)
"""


def test_forked_programs_are_alone_and_have_what_they_were_given(monkeypatch):
    monkeypatch.setenv("HIPSIM_X", "not theirs")
    monkeypatch.setenv("ANOTHER", "one")
    first = run_forked(SAYS + "import flash_attn_rocm", "a", env={"HIPSIM_X": "1"})
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "the next one")  # as pytest does
    monkeypatch.delenv("ANOTHER")
    second = run_forked(SAYS + "assert 'ANOTHER' not in os.environ")
    assert first.stdout.splitlines()[0] == "1 ['a'] False"
    assert second.stdout.splitlines()[0] == "None [] False"
    (imported, path, server), (*_, other) = (
        done.stdout.splitlines()[1].split() for done in (first, second)
    )
    assert (imported, path, server) == ("True", "1", other)
    assert first.stderr == second.stderr == "a warning\n"
    assert int(server) != os.getpid()


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        ("raise ValueError('so')", 300, "exit 1\\n\\nTraceback.*ValueError: so"),
        ("import sys; print('out'); sys.exit(3)", 300, "exit 3\\nout"),
        ("import os; os.abort()", 300, f"exit -{int(signal.SIGABRT)}"),
        ("while True: pass", 1, f"exit -{int(signal.SIGALRM)}"),
    ],
)
def test_a_forked_program_that_fails_fails_the_test(code, seconds, said):
    with pytest.raises(AssertionError, match=f"(?s)^{said}"):
        run_forked(code, timeout=seconds)
    run_forked("")  # and the next one is served
