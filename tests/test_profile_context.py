"""profile(): who gets which launch of a process, and why there may be none.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import re
import threading

import pytest
import torch.nn.functional as F
from helpers import ARCH, needs_simulator, qkv
from helpers.profile_sample import launch, png_size, sample
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_rocm as fa
import hipsim
from flash_attn_rocm import _profile
from hipsim.profile_file import read_profile
from hipsim.profile_table import table
from hipsim.profile_trace import trace


class FakeSimulator:
    """hipsim with launches that the test makes up."""

    def __init__(self):
        self.option = 0
        self.waiting = []

    def get_option(self, name):
        assert name == "profile"
        return self.option

    def set_option(self, name, value):
        assert name == "profile"
        self.option = value

    def run(self, kernel):
        if self.option:
            self.waiting.append(launch(kernel))

    def take_profile(self):
        taken, self.waiting = self.waiting, []
        return {**sample(), "launches": taken}


@pytest.fixture
def fake(monkeypatch):
    simulator = FakeSimulator()
    monkeypatch.setattr(_profile, "_simulator", lambda: simulator)
    return simulator


def kernels(profile):
    return [row["kernel"] for row in profile.to_dict()["launches"]]


def test_a_launch_belongs_to_each_block_that_is_open(fake):
    fake.run("before")
    with fa.profile() as outer:
        fake.run("a")
        with fa.profile() as inner:
            fake.run("b")
            assert kernels(inner) == ["b"]
            fake.run("c")
        fake.run("d")
    fake.run("after")
    assert kernels(outer) == ["a", "b", "c", "d"]
    assert kernels(inner) == ["b", "c"]


def test_blocks_of_threads_may_overlap_and_the_last_restores_the_option(fake):
    entered, leave = threading.Event(), threading.Event()
    seen = []

    def other():
        with fa.profile() as mine:
            entered.set()
            leave.wait(10)
        seen.append(kernels(mine))

    thread = threading.Thread(target=other)
    with fa.profile() as outer:
        fake.run("a")
        thread.start()
        assert entered.wait(10)
        fake.run("b")
    assert fake.option == 1, "the other thread is still inside"
    fake.run("c")
    leave.set()
    thread.join()
    assert kernels(outer) == ["a", "b"] and seen == [["b", "c"]]
    assert fake.option == 0


@pytest.mark.parametrize("before", [0, 1])
def test_the_option_comes_back_also_after_an_exception(fake, before):
    fake.option = before
    fake.run("not ours")
    with pytest.raises(KeyError), fa.profile() as p:
        assert fake.option == 1
        fake.run("a")
        raise KeyError
    assert fake.option == before
    assert kernels(p) == ["a"]


def test_methods_agree_with_each_other(fake, tmp_path):
    pytest.importorskip("matplotlib", reason="no matplotlib")
    with fa.profile() as p:
        fake.run("a")
    assert json.loads(p.json()) == p.to_dict()
    p.save(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == p.to_dict()
    p.trace(str(tmp_path / "t.json"))
    assert json.loads((tmp_path / "t.json").read_text()) == trace(p.to_dict())
    p.plot(str(tmp_path / "p.png"))
    png_size(tmp_path / "p.png")
    assert p.table() == table(p.to_dict())
    for write in (p.save, p.trace, p.plot):
        with pytest.raises(fa.FlashAttnError, match="No such file"):
            write(tmp_path / "none" / "file.png")


def test_without_calls_the_table_says_that_nothing_was_simulated(fake, tmp_path):
    with fa.profile() as p:
        pass
    lines = p.table().splitlines()
    assert lines[0] == "Nothing was simulated."
    assert lines[1:] == [
        "no attention call was made through this package",
        "patch() was not in force",
        "simulate() was not in force",
    ]
    for write in (p.save, p.trace, p.plot):
        name = write.__name__
        with pytest.raises(fa.FlashAttnError, match=f"{name}: Nothing was simulated"):
            write(tmp_path / "p.png")
        assert not list(tmp_path.iterdir()), "an empty file was written"
    assert json.loads(p.json()) == p.to_dict()
    assert p.to_dict()["launches"] == []


def test_fallbacks_are_named_with_their_reasons(fake, patched):
    q, k, v = qkv(1, 1, 4, 8)
    F.scaled_dot_product_attention(q, k, v)  # before the block: not counted
    with fa.profile() as p:
        for _ in range(2):
            F.scaled_dot_product_attention(q, k, v)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, k, v)
    text = p.table()
    assert text.startswith("Nothing was simulated.\n")
    assert re.search(r"answered 2 times: no kernels run on this device.*device", text)
    assert "answered once: flash attention is disabled" in text
    assert "patch() was not" not in text
    assert p.to_dict()["calls"]["fallback"] == {"device": 2, "flash_disabled": 1}


def test_without_a_simulator_the_table_says_so(monkeypatch):
    monkeypatch.setattr(_profile, "simulator_path", lambda: "")
    with fa.profile() as p:
        pass
    assert "no simulator here: expected the hipsim package" in p.table()
    assert p.to_dict()["launches"] == []


@needs_simulator
def test_profile_sees_the_simulated_calls_of_its_block(patched, simulated):
    q, k, v = qkv(1, 2, 70, 64)
    before = hipsim.get_option("profile")
    F.scaled_dot_product_attention(q, k, v)
    with fa.profile() as p:
        out = F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v, scale=2.0**130)
    assert hipsim.get_option("profile") == before
    (row,) = p.to_dict()["launches"]
    assert row["kernel"] == "fa_fwd_f16_d64_plain"
    assert row["counters"]["SQ_WAVES"] == 2 * 4  # two workgroups of four waves
    shown = [e for e in trace(p.to_dict())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in shown} == {0, 1, 2, 3}  # the SIMDs of one CU
    assert {"valu", "lds", "vmem", "wait"} <= {e["name"] for e in shown}
    text = p.table()
    assert ARCH in text.splitlines()[0] and "error bar" in text
    assert "answered once: scale has a magnitude" in text
    assert out.equal(F.scaled_dot_product_attention(q, k, v))


@needs_simulator
def test_many_calls_keep_their_count_and_times(patched, simulated):
    q, k, v = qkv(1, 1, 2, 8)
    with fa.profile() as p:
        for _ in range(70):
            F.scaled_dot_product_attention(q, k, v)
    data = p.to_dict()
    (row,) = data["kernels"]
    kept = data["launches"]
    assert row["launches"] == 70 == len(kept) + data["launches_dropped"]
    each = kept[0]["estimate"]["seconds"]["middle"]
    assert row["seconds"]["middle"] == pytest.approx(70 * each, rel=1e-9)
    assert re.search(r"^fa_fwd_f16_d32_plain +70 ", p.table(), re.M)
