"""Trains a small GPT twice from one seed: stock, and with gfx906 code for attention.

The second run differs in one thing: F.scaled_dot_product_attention is patched, so
that the forward and the backward of each call execute the fused kernels' gfx906
machine code in the simulator.  Everything else is examples/train_gpt.py.  Then, with
the trained weights: the gradients of one step both ways, beside those with attention
in float32; the simulated kernels' profile, the memory that one attention call takes,
and a paragraph written both ways.  A picture is saved.

Exit code 0 only if what the demo claims holds: every attention call of the second
run was fused, losses agree, gradients are right, and memory grows with the length,
not with its square.

    python examples/demo.py [--quick] [--seed N] [--json FILE]

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import textwrap
from typing import Any

import torch
from attention_memory import attention_bytes
from gpt import GPT, next_token
from torch import Tensor
from train_gpt import (
    ARCH,
    Corpus,
    Run,
    Settings,
    attention,
    count_calls,
    counters,
    load_corpus,
    loss_of,
    positive,
    progress,
    random_windows,
    save,
    train,
    unserved,
    write_json,
)

import flash_attn_rocm

PROMPT = "The value of the"
ROOT = pathlib.Path(__file__).resolve().parent.parent

# Nats per token, the largest difference in any step of 160; seen: 5.3e-4.  With stock
# attention, without the keys' gradient 0.67, with 0.9 times the values' gradient 0.84.
LOSS_BOUND = 5e-3
# Of any parameter: norm of the error over the norm, against attention in float32.
# Seen: 2.4e-3 after 20 steps, 4e-4 after 160.  The difference to stock would not do:
# stock's own error was up to 2e-2.
GRADIENT_BOUND = 5e-3
# Bytes of the longest over those of the shortest, in units of the lengths' ratio.
GROWTH_BOUND = 1.1
LAUNCH_KEYS = ("kernel", "grid", "wave_instructions", "bounds", "estimate")
KINDS = {"fused": "sim", "sdpa": "cpu", "math": "cpu"}  # attention -> device

FULL = Settings(
    device="sim", dtype="float16", steps=160, batch=4, layers=2, lr=1e-3, unit="words"
)
QUICK = dataclasses.replace(FULL, steps=12, batch=2, seqlen=64, heads=2, embd=128)


@dataclasses.dataclass
class Text:
    """A paragraph that a model wrote."""

    tokens: list[int] = dataclasses.field(default_factory=list)  # with the prompt
    logits: list[Tensor] = dataclasses.field(default_factory=list)  # of new tokens


@dataclasses.dataclass
class Demo:
    """All that is reported; `runs` and `texts` by attention."""

    corpus: Corpus
    runs: dict[str, Run]
    extra: Run  # the fused calls after training
    gradients: dict[str, dict[str, float]]  # attention -> parameter -> error
    profile: flash_attn_rocm.Profile
    memory: dict[str, dict[int, int]]  # attention -> sequence length -> bytes
    texts: dict[str, Text]

    @property
    def gaps(self) -> list[float]:
        """Difference of the losses, step by step."""
        pairs = zip(self.runs["sdpa"].losses, self.runs["fused"].losses)
        return [abs(a - b) for a, b in pairs]

    @property
    def growth(self) -> float:
        """Growth of the fused memory over that of the length; 1 if proportional."""
        sizes = self.memory["fused"]
        short, long = min(sizes), max(sizes)
        return (sizes[long] / sizes[short]) / (long / short)

    @property
    def first_divergence(self) -> int | None:
        """Where the two paragraphs begin to differ, counted from the prompt's end."""
        stock, fused = self.texts["sdpa"], self.texts["fused"]
        prompt = len(stock.tokens) - len(stock.logits)
        pairs = enumerate(zip(stock.tokens, fused.tokens))
        return next((i - prompt for i, (a, b) in pairs if a != b), None)

    def worst_gradient(self, kind: str) -> tuple[float, str]:
        """The largest error with that attention, and of which parameter."""
        return max((error, name) for name, error in self.gradients[kind].items())

    def logit_gap(self) -> float:
        """Largest difference of logits for equal inputs."""
        last = self.first_divergence
        shared = slice(None if last is None else last + 1)
        pairs = zip(*(text.logits[shared] for text in self.texts.values()))
        return max(float((a - b).abs().max()) for a, b in pairs)

    def failures(self) -> list[str]:
        runs = {**self.runs, "after training": self.extra}
        found = [
            f"{name}: {why}" for name, run in runs.items() for why in run.failures()
        ]
        error, worst = self.worst_gradient("fused")
        for what, value, bound in (
            ("difference of the losses", max(self.gaps), LOSS_BOUND),
            (f"error of {worst}.grad", error, GRADIENT_BOUND),
            ("growth of memory over length", self.growth, GROWTH_BOUND),
        ):
            if not value <= bound:
                found.append(f"{what}: expected at most {bound}, got {value:.2e}")
        return found


# What is done with the trained model


def gradients(model: GPT, window: Tensor, settings: Settings) -> dict[str, Tensor]:
    """Of one step, by parameter; those of q, k and v apart."""
    model.zero_grad()
    # The loss scale of fp16 training; relative differences do not see it.
    (2.0**16 * loss_of(model, window, settings)).backward()
    result = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if name.endswith("qkv.weight"):
            for part, rows in zip("qkv", parameter.grad.chunk(3)):
                result[f"{name}[{part}]"] = rows
        else:
            result[name] = parameter.grad
    model.zero_grad()
    return result


def exact_gradients(
    model: GPT, window: Tensor, settings: Settings
) -> dict[str, Tensor]:
    """The same with attention in float32, by the math path."""
    for block in model.blocks:
        block.attention.dtype = None
    with attention("math", "cpu"):
        result = gradients(model, window, settings)
    for block in model.blocks:
        block.attention.dtype = settings.torch_dtype
    return result


def compare_gradients(
    model: GPT, corpus: Corpus, extra: Run
) -> tuple[dict[str, dict[str, float]], flash_attn_rocm.Profile]:
    """Error of each gradient both ways, and the profile of the fused step."""
    settings = extra.settings
    generator = torch.Generator().manual_seed(settings.seed)
    window = random_windows(corpus.training, settings, generator)
    exact = exact_gradients(model, window, settings)
    stock = gradients(model, window, settings)
    before = counters(settings)
    with attention("fused", "sim"), flash_attn_rocm.profile() as profile:
        fused = gradients(model, window, settings)
    extra.forwards += 1
    extra.backwards += 1
    count_calls(extra, before)
    errors = {
        kind: {
            name: float((made[name] - grad).norm() / grad.norm())
            for name, grad in exact.items()
        }
        for kind, made in (("sdpa", stock), ("fused", fused))
    }
    return errors, profile


def measure_memory(lengths: list[int]) -> dict[str, dict[int, int]]:
    """Bytes of one call with its backward, one head of 64, by attention and length."""
    memory: dict[str, dict[int, int]] = {}
    for kind, device in KINDS.items():
        with attention(kind, device):
            memory[kind] = {
                length: attention_bytes((1, 1, length, 64), torch.float16, "cpu")
                for length in lengths
            }
    return memory


@torch.inference_mode()
def write(
    model: GPT, prompt: list[int], options: argparse.Namespace, name: str
) -> Text:
    """Lets the model go on; the whole context is computed anew for every token."""
    text = Text(list(prompt))
    generator = torch.Generator().manual_seed(options.seed)
    for _ in progress(range(options.tokens), f"{name}: writing"):
        context = torch.tensor([text.tokens[-model.config.context :]])
        logits = model(context)[0, -1]
        text.tokens.append(next_token(logits, options.temperature, generator))
        text.logits.append(logits)
    return text


def write_both(
    model: GPT, corpus: Corpus, extra: Run, options: argparse.Namespace
) -> dict[str, Text]:
    prompt = corpus.tokenizer.encode(PROMPT)
    texts = {"sdpa": write(model, prompt, options, "stock")}
    before = counters(extra.settings)
    with attention("fused", "sim"):
        texts["fused"] = write(model, prompt, options, ARCH)
    extra.forwards += options.tokens
    count_calls(extra, before)
    return texts


def bar(run: Run) -> Any:
    name = ARCH if run.settings.attention == "fused" else "stock"
    return progress(range(run.settings.steps), f"{name}: training")


def perform(settings: Settings, options: argparse.Namespace, corpus: Corpus) -> Demo:
    stock = dataclasses.replace(settings, attention="sdpa", device="cpu")
    runs = {}
    _, runs["sdpa"] = train(stock, corpus, bar)
    model, runs["fused"] = train(settings, corpus, bar)
    extra = Run(settings)
    errors, profile = compare_gradients(model, corpus, extra)
    lengths = [64, 128, 256] if options.quick else [256, 512, 1024, 2048]
    return Demo(
        corpus=corpus,
        runs=runs,
        extra=extra,
        gradients=errors,
        profile=profile,
        memory=measure_memory(lengths),
        texts=write_both(model, corpus, extra, options),
    )


# Reports


def introduction(settings: Settings, corpus: Corpus) -> str:
    return (
        f"Text: {corpus.source}, {len(corpus.training)} {settings.unit} to train on, "
        f"{len(corpus.tokenizer.pieces)} different ones.\n"
        f"Model: {settings.layers} layers of {settings.heads} heads of "
        f"{settings.embd // settings.heads}. {settings.steps} steps of "
        f"{settings.batch} sequences of {settings.seqlen} tokens,\n"
        f"twice: attention of stock PyTorch, and of {ARCH} machine code.\n"
    )


def report(demo: Demo) -> str:
    parts = [report_training(demo), report_kernels(demo), report_memory(demo)]
    return "\n\n".join([*parts, report_texts(demo)])


def report_training(demo: Demo) -> str:
    lines = ["attention   loss: first      last  validation   tokens/s"]
    for name, run in (("stock", demo.runs["sdpa"]), (ARCH, demo.runs["fused"])):
        lines.append(
            f"{name:9s} {run.losses[0]:13.5f} {run.losses[-1]:9.5f} "
            f"{run.validation_loss:11.5f} {run.tokens_per_second:10,.0f}"
        )
    fused = demo.runs["fused"]
    (error, worst), (stock_error, stock_worst) = map(
        demo.worst_gradient, ("fused", "sdpa")
    )
    lines += [
        f"Largest difference of the losses in {len(demo.gaps)} steps: "
        f"{max(demo.gaps):.1e} nats per token (claim: at most {LOSS_BOUND}).",
        "Gradients of one step, trained weights, against attention in float32: off by",
        f"at most {error:.1e} of their norm (claim: at most {GRADIENT_BOUND}),",
        f"{worst};",
        f"with stock attention by {stock_error:.1e}, {stock_worst}.",
        f"Fused: {fused.fused_calls} of {fused.calls} attention calls and "
        f"{fused.fused_backwards} backward passes; "
        f"{fused.wave_instructions / 1e6:,.0f} million wave instructions.",
    ]
    if fused.skipped:
        lines.append(f"{fused.skipped} steps were skipped: a gradient overflowed fp16.")
    return "\n".join(lines)


def report_kernels(demo: Demo) -> str:
    """The summary of the profile; the counters are for `flash-attn-rocm profile`."""
    # The first two paragraphs: what was simulated, and a line for each kernel.
    summary = "\n\n".join(demo.profile.table().split("\n\n")[:2])
    lines = ["Kernels of one training step.", summary.rstrip(), ""]
    launches = demo.profile.to_dict()["launches"]
    for kernel in dict.fromkeys(launch["kernel"] for launch in launches):
        counts = [x["wave_instructions"] for x in launches if x["kernel"] == kernel]
        lines.append(
            f"{kernel}: {sum(counts):,} wave instructions in {len(counts)} launches"
        )
    return "\n".join(lines)


def report_memory(demo: Demo) -> str:
    lines = [
        "Bytes that torch's allocator has out at the peak of one attention call and",
        "its backward (fp16, one head of 64, causal): output, saved tensors, workspace",
        "and gradients; q, k, v and the output's gradient not counted.",
        "length" + "".join(f"{kind:>14s}" for kind in demo.memory),
    ]
    for length in demo.memory["fused"]:
        sizes = (demo.memory[kind][length] for kind in demo.memory)
        lines.append(f"{length:6d}" + "".join(f"{size:14,d}" for size in sizes))
    return "\n".join(lines)


def report_texts(demo: Demo) -> str:
    decode = demo.corpus.tokenizer.decode
    lines = []
    for name, text in (("stock", demo.texts["sdpa"]), (ARCH, demo.texts["fused"])):
        lines.append(f"Written by the trained model, {name}:")
        lines.append(textwrap.indent(textwrap.fill(decode(text.tokens), 76), "  "))
    where = demo.first_divergence
    if where is None:
        count = len(demo.texts["fused"].logits)
        lines.append(f"All {count} generated tokens are the same.")
    else:
        lines.append(f"First different token: number {where + 1} of those generated.")
    lines.append(f"Largest difference of a logit: {demo.logit_gap():.2e}.")
    return "\n".join(lines)


def figures(demo: Demo) -> dict[str, Any]:
    """What --json writes."""
    decode = demo.corpus.tokenizer.decode
    return {
        "runs": {name: run.summary() for name, run in demo.runs.items()},
        "after_training": demo.extra.summary(),
        "largest_loss_difference": max(demo.gaps),
        "gradient_errors": demo.gradients,
        "attention_bytes": demo.memory,
        "launches": [
            {key: launch[key] for key in LAUNCH_KEYS}
            for launch in demo.profile.to_dict()["launches"]
        ],
        "text": {name: decode(text.tokens) for name, text in demo.texts.items()},
        "first_different_token": demo.first_divergence,
        "largest_logit_difference": demo.logit_gap(),
        "failures": demo.failures(),
    }


def draw(path: pathlib.Path, demo: Demo) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.6))
    steps = range(1, len(demo.gaps) + 1)
    left.plot(steps, demo.runs["sdpa"].losses, linewidth=3, alpha=0.4, label="stock")
    left.plot(steps, demo.runs["fused"].losses, linewidth=0.8, label=f"fused, {ARCH}")
    left.set(title="training loss", xlabel="step", ylabel="nats per token")
    # A step with equal losses has no place on a logarithmic axis: drawn at 1e-7.
    middle.semilogy(steps, [max(gap, 1e-7) for gap in demo.gaps], linewidth=0.8)
    middle.axhline(LOSS_BOUND, color="black", linewidth=0.8, label="claim")
    middle.set(title="difference of the two", xlabel="step", ylabel="nats per token")
    for kind, sizes in demo.memory.items():
        megabytes = [size / 1e6 for size in sizes.values()]
        right.loglog(list(sizes), megabytes, "o-", label=kind)
    right.set_xticks(list(demo.memory["fused"]), list(map(str, demo.memory["fused"])))
    right.minorticks_off()
    right.set(
        title="memory of one attention call and its backward",
        xlabel="sequence length, tokens",
        ylabel="MB",
    )
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.tight_layout()
    save(path, figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=f"The fused run's attention is {ARCH} code in the simulator.",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, seconds")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument(
        "--steps",
        type=positive,
        help=f"training steps, default {FULL.steps}, quick {QUICK.steps}",
    )
    parser.add_argument(
        "--tokens", type=positive, help="tokens to write, default 60, quick 6"
    )
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
    options.tokens = options.tokens or (6 if options.quick else 60)
    return options


def main() -> int:
    options = parse_arguments()
    settings = QUICK if options.quick else FULL
    settings = dataclasses.replace(
        settings, seed=options.seed, steps=options.steps or settings.steps
    )
    reason = unserved(settings)
    if reason:
        sys.exit(reason)
    corpus = load_corpus(settings.unit)
    print(introduction(settings, corpus), flush=True)
    demo = perform(settings, options, corpus)
    print(report(demo))
    draw(options.picture, demo)
    print(f"Picture: {options.picture}")
    if options.json:
        write_json(options.json, figures(demo))
    failures = demo.failures()
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
