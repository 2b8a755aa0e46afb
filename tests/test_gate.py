"""A real AMD GPU runs what passed its self-test; GPU and self-test are fakes here.

SPDX-License-Identifier: BSD-3-Clause
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from flash_attn_rocm import Reason, _eligibility, _guard, _ops, _selftest
from flash_attn_rocm._selftest import Verdict

PASSED = Verdict("fp16 forward", ("fa_one",), "passed")
WRONG = Verdict("fp32 backward", ("fa_two", "fa_three"), "wrong", "dk by 7")
HUNG = Verdict("fp64 forward", ("fa_four",), "hung", "after 30 s")


class FakeExtension:
    """What the guard asks of the extension."""

    def __init__(self):
        self.known, self.tripped = [], []

    def guard_device(self, *where):
        self.known.append(where)

    def identities(self):
        return [("sim", "sim"), ("hip:1", "hip gfx906 at 0000:03:00.0")]

    def breaker_trip(self, *rest):
        self.tripped.append(rest)


@pytest.fixture
def gpu(monkeypatch):
    """GPU 1, a gfx906; returns a function that judges it."""
    extension = FakeExtension()
    monkeypatch.setattr(_ops, "ext", extension)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(gcnArchName="gfx906:sramecc+:xnack-"),
    )
    monkeypatch.setattr(_eligibility, "_gpu_verdicts", {})

    def judge(verdicts, **config):
        asked = []

        def ensure(identity, code_hash, folder, run):
            asked.append((identity, folder))
            assert len(code_hash) == 64
            if isinstance(verdicts, Exception):
                raise verdicts
            return verdicts

        monkeypatch.setattr(_selftest, "ensure", ensure)
        for module in (_eligibility, _guard):
            with_words = dataclasses.replace(module.config, device="auto", **config)
            monkeypatch.setattr(module, "config", with_words)
        monkeypatch.setattr(_eligibility, "code_objects", lambda _: {"gfx906": ["x"]})
        monkeypatch.setattr(_guard, "code_objects", lambda _: {})
        return _eligibility.gpu_reason(1), asked, extension

    return judge


def test_one_that_passed_runs(gpu):
    reason, asked, extension = gpu([PASSED])
    assert reason is None and not extension.tripped
    assert [identity for identity, _ in asked] == ["hip gfx906 at 0000:03:00.0"]
    assert extension.known == [(1, 1, None)]
    _eligibility.gpu_reason(1)
    assert len(asked) == 1  # judged once


def test_kernels_that_did_not_pass_are_never_launched(gpu, caplog):
    reason, _, extension = gpu([PASSED, WRONG, HUNG])
    assert reason is None
    assert [row[:2] for row in extension.tripped] == [
        ("hip:1", "fa_two"),
        ("hip:1", "fa_three"),
        ("hip:1", "fa_four"),
    ]
    assert all(row[3] >= 365 * 24 * 3600 for row in extension.tripped)
    assert "self-test: wrong dk by 7" in extension.tripped[0][2]
    assert "fp32 backward" in caplog.text and "hung after 30 s" in caplog.text


@pytest.mark.parametrize("verdicts", [[WRONG, HUNG], [], OSError("no such luck")])
def test_one_of_which_nothing_passed_stays_on_stock(gpu, verdicts):
    assert gpu(verdicts)[0] is Reason.SELFTEST


def test_without_a_self_test_nothing_runs(gpu):
    reason, asked, _ = gpu([PASSED], selftest=False)
    assert reason is Reason.UNTESTED and not asked


def test_who_says_untested_gets_no_self_test(gpu):
    reason, asked, _ = gpu([WRONG], untested=True)
    assert reason is None and not asked
