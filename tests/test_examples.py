"""The demo and the benchmarks run, and they notice when something is wrong.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, needs_simulator


@pytest.fixture
def gpt(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("gpt")


def run(*command, **environ):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_demo(folder, **environ):
    figures = folder / "figures.json"
    picture = folder / "demo.png"
    demo = [ROOT / "examples" / "demo.py", "--quick", "--steps", 4, "--tokens", 6]
    done = run(*demo, "--picture", picture, "--json", figures, **environ)
    return done, json.loads(figures.read_text()), picture


@needs_simulator
def test_demo_runs_every_attention_call_fused(tmp_path):
    done, figures, picture = run_demo(tmp_path)
    assert done.returncode == 0, done.stderr
    assert figures["expected_calls"] == 2 * (2 + 6)  # layers, windows and tokens
    assert sum(figures["fused_calls"].values()) == figures["expected_calls"]
    assert figures["fallback_calls"] == {} and figures["failures"] == []
    assert figures["wave_instructions"] > 1000 * figures["expected_calls"]
    losses = figures["validation_loss"]
    assert figures["largest_logit_difference"] > 0, "the second run was stock too"
    assert losses["stock"] == pytest.approx(losses["gfx906"], rel=0, abs=1e-3)
    assert "All 6 generated tokens are the same." in done.stdout
    assert "training:" not in done.stderr  # no progress bar without a terminal
    assert "gfx906" in done.stdout and "fa_fwd_f16_d64_plain" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs_simulator
def test_demo_fails_if_a_call_was_not_fused(tmp_path):
    # sitecustomize is imported by every interpreter: nothing gets patched
    hook = "import flash_attn_rocm, contextlib\n"
    hook += "flash_attn_rocm.patched = contextlib.nullcontext\n"
    (tmp_path / "sitecustomize.py").write_text(hook, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done, figures, _ = run_demo(tmp_path, PYTHONPATH=path)
    assert done.returncode == 1
    assert "0 of 16 attention calls were fused" in done.stderr
    assert figures["failures"]


def test_demo_text_is_english_and_survives_the_tokenizer(gpt):
    text, source = gpt.english_text()
    assert source.startswith(("pydoc_data", "docstrings"))
    tokenizer = gpt.Tokenizer(text)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) > 20_000 and len(tokenizer.pieces) < 10_000


def test_demo_finds_text_where_pydoc_has_no_topics(gpt, monkeypatch):
    def no_topics(name, *arguments):
        if name.startswith("pydoc_data"):
            raise ImportError(name)
        return importlib.import_module(name)

    monkeypatch.setattr(gpt.importlib, "import_module", no_topics)
    text, source = gpt.english_text()
    assert "pydoc_data is missing" in source
    assert len(gpt.Tokenizer(text).encode(text)) > 20_000


def test_gpt_is_causal_and_seeded(gpt):
    config = gpt.Config(vocabulary=50, context=16, layers=2, heads=2)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(gpt.GPT(config).eval())
    tokens = torch.arange(16)[None]
    later = tokens.clone()
    later[0, 10:] = 7
    with torch.no_grad():
        first, second = (model(tokens) for model in models)
        changed = models[0](later)
    assert torch.equal(first, second)
    assert torch.allclose(first[:, :10], changed[:, :10], atol=1e-5)
    assert not torch.allclose(first[:, 10:], changed[:, 10:], atol=1e-5)


BENCHMARKS = {
    "sim_speed": ("--rounds", 2),
    "overhead": ("--batches", 3, "--calls", 20),
    "accuracy": (),
}


@needs_simulator
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_verifies_and_writes_json(name, tmp_path):
    figures = tmp_path / "figures.json"
    script = ROOT / "benchmarks" / f"{name}.py"
    done = run(script, *BENCHMARKS[name], "--json", figures)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(figures.read_text())
    assert results["machine"]["torch"] == str(torch.__version__)
    assert results[name]
