"""Trains a small GPT, then lets it write twice: stock, and on gfx906 code.

The second run differs in one line: attention is patched, so that each call runs
the fused kernel's gfx906 machine code in the simulator.  Both texts, both
validation losses and the largest difference of the logits are printed, and a
picture is saved.  Exit code 0 only if every attention call of the second run was
fused and the losses agree.

    python examples/demo.py [--quick] [--seed N] [--json FILE]

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import textwrap
import time
from typing import Any

import torch
from gpt import (
    GPT,
    Config,
    Tokenizer,
    english_text,
    next_token,
    next_token_loss,
    train,
)
from torch import Tensor
from tqdm import tqdm

import flash_attn_rocm

ARCH = "gfx906"
PROMPT = "The value of the"
LOSS_TOLERANCE = 1e-3  # nats per token, between the two runs
# A progress bar; disable=None: only if stderr is a terminal.
BAR: dict[str, Any] = {"leave": False, "mininterval": 1.0, "disable": None}
ROOT = pathlib.Path(__file__).resolve().parent.parent


class Run:
    """One pass over the validation windows and one generated paragraph."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loss = math.nan
        self.forwards = 0
        self.seconds = 0.0
        self.validation: list[Tensor] = []  # logits (1, context, vocabulary)
        self.steps: list[Tensor] = []  # logits (vocabulary,) of each new token
        self.tokens: list[int] = []
        self.instructions: list[int] = []  # wave instructions of each new token


def counters() -> dict[str, Any]:
    return dict(flash_attn_rocm.status()["counters"])


@torch.inference_mode()
def perform(
    run: Run,
    model: GPT,
    windows: Tensor,
    prompt: list[int],
    options: argparse.Namespace,
) -> None:
    """Fills `run`; the whole context is computed anew for every token."""
    start = time.perf_counter()
    losses = []
    for window in tqdm(windows, desc=f"{run.name}: validation", **BAR):
        logits = model(window[None, :-1])
        losses.append(next_token_loss(logits, window[None, 1:]).item())
        run.validation.append(logits)
        run.forwards += 1
    run.loss = sum(losses) / len(losses)
    generator = torch.Generator().manual_seed(options.seed)
    run.tokens = list(prompt)
    for _ in tqdm(range(options.tokens), desc=f"{run.name}: writing", **BAR):
        before = counters()["wave_instructions"]
        context = torch.tensor([run.tokens[-model.config.context :]])
        logits = model(context)[0, -1]
        run.tokens.append(next_token(logits, options.temperature, generator))
        run.steps.append(logits)
        run.instructions.append(counters()["wave_instructions"] - before)
        run.forwards += 1
    run.seconds = time.perf_counter() - start


def first_divergence(stock: Run, fused: Run) -> int | None:
    pairs = enumerate(zip(stock.tokens, fused.tokens))
    return next((i for i, (a, b) in pairs if a != b), None)


def difference(before: dict[str, Any], after: dict[str, Any], key: str) -> dict:
    """Calls by kernel ("fused") or by reason ("fallback") between two states."""
    counts = {k: n - before[key].get(k, 0) for k, n in after[key].items()}
    return {k: n for k, n in counts.items() if n}


def draw(path: pathlib.Path, losses: list[float], stock: Run, fused: Run) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.6))
    left.plot(losses, linewidth=0.8, label="training")
    left.axhline(stock.loss, color="black", linewidth=0.8, label="validation, stock")
    left.plot(
        len(losses), fused.loss, "o", color="tab:red", label=f"validation, {ARCH}"
    )
    left.set(title="loss", xlabel="step", ylabel="nats per token")
    left.legend(frameon=False)
    gaps = torch.cat([(a - b).abs().flatten() for a, b in logit_pairs(stock, fused)])
    exponents = gaps.clamp_min(1e-9).log10()
    middle.hist(exponents.numpy(), bins=60, color="tab:blue")
    middle.set(
        title=f"logits, stock and {ARCH}",
        xlabel="log10 of the difference (equal logits: -9)",
        yticks=[],
    )
    right.plot([n / 1e3 for n in fused.instructions], color="tab:green")
    right.set(
        title="attention of one new token",
        xlabel="token",
        ylabel="thousand wave instructions",
    )
    right.set_ylim(0, 1.1 * max(fused.instructions) / 1e3)
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def logit_pairs(stock: Run, fused: Run) -> list[tuple[Tensor, Tensor]]:
    """Logits of both runs for equal inputs: up to the first different token."""
    shared = first_divergence(stock, fused)
    steps = len(stock.steps)
    if shared is not None:
        steps = shared - (len(stock.tokens) - len(stock.steps)) + 1
    return [
        *zip(stock.validation, fused.validation),
        *zip(stock.steps[:steps], fused.steps[:steps]),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=f"The model's attention runs as {ARCH} code in the simulator.",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, seconds")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--steps", type=int, help="training steps, default 240")
    parser.add_argument("--tokens", type=int, help="tokens to write, default 120")
    parser.add_argument(
        "--temperature", type=float, default=0.5, help="0 is greedy, default 0.5"
    )
    parser.add_argument(
        "--picture",
        type=pathlib.Path,
        default=ROOT / "build" / "demo.png",
        help="default build/demo.png",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    options = parser.parse_args()
    if options.steps is None:
        options.steps = 20 if options.quick else 240
    if options.tokens is None:
        options.tokens = 12 if options.quick else 120
    for name in ("steps", "tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1")
    return options


def main() -> int:
    options = parse_arguments()
    torch.manual_seed(options.seed)

    text, source = english_text()
    tokenizer = Tokenizer(text)
    tokens = torch.tensor(tokenizer.encode(text))
    config = Config(
        vocabulary=len(tokenizer.pieces),
        layers=2 if options.quick else 4,
        heads=2 if options.quick else 4,
    )
    model = GPT(config)
    split = int(0.9 * len(tokens))
    length = config.context + 1
    windows = tokens[split:].unfold(0, length, length)[: 2 if options.quick else 16]
    parameters = sum(p.numel() for p in model.parameters())
    print(f"Text: {source}, {len(tokens)} tokens, {config.vocabulary} different ones.")
    print(
        f"Model: {config.layers} layers of {config.heads} heads of "
        f"{config.head_dim}, context {config.context}, {parameters / 1e6:.1f} M "
        "parameters, trained with stock attention."
    )

    losses: list[float] = []
    bar = tqdm(total=options.steps, desc="training", **BAR)
    for loss in train(model, tokens[:split], range(options.steps), options.steps):
        losses.append(loss)
        bar.set_postfix(loss=f"{loss:.2f}", refresh=False)
        bar.update()
    bar.close()
    for block in model.blocks:
        block.attention.in_fp16 = True  # both runs: attention in fp16

    prompt = tokenizer.encode(PROMPT)
    stock, fused = Run("stock"), Run(ARCH)
    before = counters()
    perform(stock, model, windows, prompt, options)
    with flash_attn_rocm.patched(), flash_attn_rocm.simulate(ARCH):
        perform(fused, model, windows, prompt, options)
    after = counters()

    kernels = difference(before, after, "fused")
    fallbacks = difference(before, after, "fallback")
    expected = config.layers * fused.forwards
    instructions = after["wave_instructions"] - before["wave_instructions"]
    diverging = first_divergence(stock, fused)
    gap = max(float((a - b).abs().max()) for a, b in logit_pairs(stock, fused))
    for run in (stock, fused):
        print(f"\n{run.name} ({run.seconds:.1f} s, validation loss {run.loss:.5f}):")
        print(textwrap.indent(textwrap.fill(tokenizer.decode(run.tokens), 76), "  "))
    print()
    if diverging is None:
        print(f"All {len(fused.steps)} generated tokens are the same.")
    else:
        pair = [tokenizer.pieces[run.tokens[diverging]] for run in (stock, fused)]
        print(
            f"First different token: number {diverging - len(prompt) + 1} of those "
            f"generated, {pair[0]!r} and {pair[1]!r}."
        )
    print(f"Largest difference of a logit: {gap:.2e}.")
    print(f"Validation losses differ by {abs(stock.loss - fused.loss):.1e}.")
    for kernel, calls in kernels.items():
        print(f"Kernel {kernel}: {calls} of {expected} attention calls.")
    print(f"Wave instructions of {ARCH}: {instructions / 1e6:.1f} million.")
    draw(options.picture, losses, stock, fused)
    print(f"Picture: {options.picture}")

    failures = []
    if sum(kernels.values()) != expected or fallbacks:
        failures.append(
            f"{sum(kernels.values())} of {expected} attention calls were fused; "
            f"fallbacks: {fallbacks or 'none'}"
        )
    if not abs(stock.loss - fused.loss) <= LOSS_TOLERANCE:
        failures.append(f"validation losses differ by more than {LOSS_TOLERANCE}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if options.json:
        figures = {
            "seed": options.seed,
            "validation_loss": {"stock": stock.loss, ARCH: fused.loss},
            "seconds": {"stock": stock.seconds, ARCH: fused.seconds},
            "text": {run.name: tokenizer.decode(run.tokens) for run in (stock, fused)},
            "first_different_token": diverging,
            "largest_logit_difference": gap,
            "fused_calls": kernels,
            "fallback_calls": fallbacks,
            "expected_calls": expected,
            "wave_instructions": instructions,
            "failures": failures,
        }
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
