"""Trains a small GPT with fused attention, or with PyTorch's own.

    python examples/train_gpt.py --attention fused --dtype float16

The model (examples/gpt.py) calls F.scaled_dot_product_attention; --attention says
who answers:

    fused  flash_attn_rocm.patched(); calls that it cannot run fall back to sdpa
    sdpa   PyTorch's choice
    math   PyTorch's math backend, which stores the whole matrix of scores

and --device where: cuda is also the name of a ROCm GPU (whose first fused call runs the
self-test), sim executes the fused kernels' gfx906 machine code in the simulator and
everything else on the CPU.  sdpa and math do not need the package.  With the same seed
all of them start from the same weights and see the same text, so their losses can be
compared step by step.

Half precision is autocast on a GPU; on a CPU attention alone runs in it, because
CPUs multiply fp16 matrices very slowly.  float16 comes with a GradScaler.

Exit code: 0 trained, and with --attention fused every attention call ran fused;
1 one did not, or the loss is not finite; 2 the options cannot be served.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Callable

import torch
from attention_memory import attention_bytes
from gpt import GPT, Config, Tokenizer, english_text, next_token_loss
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ARCH = "gfx906"  # what --device sim simulates
VALIDATION_WINDOWS = 32


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one training run is; equal but for `attention` means comparable."""

    attention: str = "fused"
    device: str = "cpu"  # "cuda", "cpu", or "sim": CPU tensors, simulated GPU
    dtype: str = "float32"
    steps: int = 200
    batch: int = 8
    seqlen: int = 128  # tokens
    layers: int = 4
    heads: int = 4
    embd: int = 256  # features of a token
    lr: float = 1e-3  # the highest of the schedule
    seed: int = 1
    unit: str = "characters"

    @property
    def place(self) -> str:
        """The device of the tensors, in torch's words."""
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclasses.dataclass
class Corpus:
    """The text as numbers: what is trained on, and what is held out."""

    source: str
    tokenizer: Tokenizer
    training: Tensor  # (tokens,) of int64
    validation: Tensor


@dataclasses.dataclass
class Run:
    """What a training run showed."""

    settings: Settings
    losses: list[float] = dataclasses.field(default_factory=list)  # nats per token
    seconds: list[float] = dataclasses.field(default_factory=list)  # of each step
    validation_loss: float | None = None
    skipped: int = 0  # steps without an update: a gradient overflowed fp16
    forwards: int = 0  # passes through the model, validation included
    backwards: int = 0
    fused: dict[str, int] = dataclasses.field(default_factory=dict)  # by kernel
    fallback: dict[str, int] = dataclasses.field(default_factory=dict)  # by reason
    wave_instructions: int = 0
    attention_bytes: int = 0  # of one call of the model's size, see attention_memory

    @property
    def tokens_per_second(self) -> float:
        """Of the median step, without the first, which loads kernels; 0 without any."""
        if not self.seconds:
            return 0.0
        tokens = self.settings.batch * self.settings.seqlen
        return tokens / statistics.median(self.seconds[1:] or self.seconds)

    @property
    def calls(self) -> int:
        return self.settings.layers * self.forwards

    @property
    def fused_calls(self) -> int:
        return sum(n for name, n in self.fused.items() if name.startswith("fa_fwd"))

    @property
    def fused_backwards(self) -> int:
        # Each starts with the kernel for the gradients of keys and values.
        return sum(n for name, n in self.fused.items() if name.startswith("fa_bwd_kv"))

    def failures(self) -> list[str]:
        """Which promises the run broke."""
        broken = []
        if not all(map(math.isfinite, [*self.losses, self.validation_loss or 0.0])):
            broken.append("the loss is not finite")
        if self.settings.attention == "fused":
            backwards = self.settings.layers * self.backwards
            for what, got, wanted in (
                ("attention calls", self.fused_calls, self.calls),
                ("backward passes of attention", self.fused_backwards, backwards),
            ):
                if got != wanted:
                    broken.append(f"{got} of {wanted} {what} were fused")
        if self.fallback:
            broken.append(f"stock SDPA answered instead, by reason: {self.fallback}")
        return broken

    def summary(self) -> dict[str, Any]:
        """The run as plain data for --json."""
        return {
            **dataclasses.asdict(self),
            "tokens_per_second": self.tokens_per_second,
            "attention_calls": self.calls,
            "fused_calls": self.fused_calls,
            "failures": self.failures(),
        }


# Set-up


def load_corpus(unit: str) -> Corpus:
    """English prose that ships with Python; the last tenth is held out."""
    text, source = english_text()
    tokenizer = Tokenizer(text, unit)
    tokens = torch.tensor(tokenizer.encode(text))
    split = int(0.9 * len(tokens))
    return Corpus(source, tokenizer, tokens[:split], tokens[split:])


def make_model(settings: Settings, corpus: Corpus) -> GPT:
    """A model whose weights depend on the sizes and the seed alone."""
    torch.manual_seed(settings.seed)
    config = Config(
        vocabulary=len(corpus.tokenizer.pieces),
        context=settings.seqlen,
        layers=settings.layers,
        heads=settings.heads,
        head_dim=settings.embd // settings.heads,
    )
    model = GPT(config).to(settings.place)
    if settings.place == "cpu" and settings.dtype != "float32":
        for block in model.blocks:
            block.attention.dtype = settings.torch_dtype
    return model


@contextlib.contextmanager
def attention(name: str, device: str) -> Iterator[None]:
    """Lets F.scaled_dot_product_attention be the one of that name."""
    with contextlib.ExitStack() as stack:
        if name == "fused":
            import flash_attn_rocm

            stack.enter_context(flash_attn_rocm.patched())
            if device == "sim":
                stack.enter_context(flash_attn_rocm.simulate(ARCH))
        elif name == "math":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def precision(settings: Settings) -> contextlib.AbstractContextManager[Any]:
    """Autocast on a GPU; on a CPU the attention modules know their dtype."""
    half = settings.place == "cuda" and settings.dtype != "float32"
    return torch.autocast(settings.place, settings.torch_dtype, enabled=half)


def counters(settings: Settings) -> dict[str, Any]:
    """status()'s counters; nothing where the package has no part."""
    if settings.attention != "fused":
        return {"fused": {}, "fallback": {}, "wave_instructions": 0}
    import flash_attn_rocm

    return dict(flash_attn_rocm.status()["counters"])


def count_calls(run: Run, before: dict[str, Any]) -> None:
    """Adds to `run` what ran since `before`."""
    after = counters(run.settings)
    for kind, counts in (("fused", run.fused), ("fallback", run.fallback)):
        for key, n in after[kind].items():
            if n > before[kind].get(key, 0):
                counts[key] = counts.get(key, 0) + n - before[kind].get(key, 0)
    run.wave_instructions += after["wave_instructions"] - before["wave_instructions"]


# Training


def fit(
    model: GPT, corpus: Corpus, run: Run, steps: Iterable[int] | None = None
) -> None:
    """Trains the model, with the attention that is in force, and fills `run`.

    Args:
        steps: the numbers from 0 to settings.steps - 1, perhaps with a progress
            bar round them, or a generator that looks at `run` in between.
    """
    settings, before = run.settings, counters(run.settings)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    scaler = torch.amp.GradScaler(settings.place, enabled=settings.dtype == "float16")
    generator = torch.Generator().manual_seed(settings.seed)
    model.train()
    for step in range(settings.steps) if steps is None else steps:
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * schedule(step / settings.steps)
        window = random_windows(corpus.training, settings, generator)
        loss = loss_of(model, window, settings)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        run.skipped += scaler.get_scale() < scale
        run.losses.append(loss.item())  # which waits for a GPU
        run.seconds.append(time.perf_counter() - start)
        run.forwards += 1
        run.backwards += 1
    model.eval()
    count_calls(run, before)


def loss_of(model: GPT, window: Tensor, settings: Settings) -> Tensor:
    """Mean loss of predicting each token of (B, S + 1) but the first."""
    with precision(settings):
        return next_token_loss(model(window[:, :-1]), window[:, 1:])


def schedule(done: float) -> float:
    """Factor on the learning rate: a tenth of the steps up, then down to 5 %."""
    return min(1.0, (done + 0.01) / 0.1) * (1 - 0.95 * done)


def random_windows(
    tokens: Tensor, settings: Settings, generator: torch.Generator
) -> Tensor:
    """(batch, seqlen + 1) tokens from random places of the text."""
    highest = len(tokens) - settings.seqlen
    starts = torch.randint(highest, (settings.batch,), generator=generator).tolist()
    windows = [tokens[i : i + settings.seqlen + 1] for i in starts]
    return torch.stack(windows).to(settings.place)


def validation_windows(corpus: Corpus, settings: Settings) -> Tensor:
    """(windows, seqlen + 1) tokens of the held-out text, without overlap."""
    length = settings.seqlen + 1
    return corpus.validation.unfold(0, length, length)[:VALIDATION_WINDOWS]


@torch.no_grad()
def validate(model: GPT, corpus: Corpus, run: Run) -> None:
    """Mean loss on the held-out text, with the attention that is in force."""
    before = counters(run.settings)
    total = tokens = 0.0
    for window in validation_windows(corpus, run.settings).split(run.settings.batch):
        window = window.to(run.settings.place)
        loss = loss_of(model, window, run.settings)
        total += loss.item() * len(window)
        tokens += len(window)
        run.forwards += 1
    run.validation_loss = total / tokens
    count_calls(run, before)


def train(
    settings: Settings,
    corpus: Corpus,
    steps: Callable[[Run], Iterable[int]] | None = None,
) -> tuple[GPT, Run]:
    """One whole run: weights from the seed, training, validation, memory.

    Args:
        steps: makes the step numbers of fit() for a run.
    """
    model, run = make_model(settings, corpus), Run(settings)
    with attention(settings.attention, settings.device):
        fit(model, corpus, run, steps(run) if steps else None)
        validate(model, corpus, run)
        run.attention_bytes = attention_bytes(
            (settings.batch, settings.heads, settings.seqlen, model.config.head_dim),
            settings.torch_dtype,
            settings.place,
        )
    return model, run


# Command line


def progress(steps: Iterable[int], name: str) -> Iterable[int]:
    """A progress bar, if stderr is a terminal and tqdm is installed."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return steps
    return tqdm(steps, desc=name, leave=False, mininterval=1.0, disable=None)


def spoken(run: Run) -> Iterator[int]:
    """The step numbers; in between says about ten times where the loss is."""
    every = max(1, run.settings.steps // 10)
    for step in progress(range(run.settings.steps), run.settings.attention):
        yield step
        if (step + 1) % every == 0 or step == 0:
            print(f"step {step + 1:5d}: loss {run.losses[-1]:.4f}", flush=True)
        if step == 0:
            warn_of_fallbacks(run)


def warn_of_fallbacks(run: Run) -> None:
    """Says early what would make the whole run fail at its end."""
    reasons = counters(run.settings)["fallback"]
    if reasons:
        print(
            f"warning: stock SDPA answers attention calls, by reason: {reasons}",
            file=sys.stderr,
        )


def report(run: Run) -> str:
    """The run in words."""
    settings = run.settings
    lines = [
        f"Loss {run.losses[0]:.4f} to {run.losses[-1]:.4f}, "
        f"validation {run.validation_loss:.4f} nats per token.",
        f"{run.tokens_per_second:,.0f} tokens/s (median step).",
        f"One attention call and its backward: {run.attention_bytes:,} bytes at peak.",
    ]
    if run.skipped:
        lines.append(f"{run.skipped} steps skipped: a gradient overflowed float16.")
    if settings.attention == "fused":
        share = 100 * run.fused_calls / run.calls
        lines.append(f"{share:.0f} % of {run.calls} attention calls were fused.")
        lines += [f"  {kernel}: {n}" for kernel, n in sorted(run.fused.items())]
        for reason, n in run.fallback.items():
            lines.append(f"  stock SDPA answered {n} (reason: {reason})")
        if run.wave_instructions:
            lines.append(f"{run.wave_instructions / 1e6:,.1f} M wave instructions.")
    return "\n".join(lines)


def draw(path: pathlib.Path, run: Run) -> None:
    """The loss of each step, and the held-out text's at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.6))
    axis.plot(range(1, len(run.losses) + 1), run.losses, linewidth=0.8)
    axis.plot(len(run.losses), run.validation_loss, "o", label="validation")
    axis.set(
        title=f"{run.settings.attention}, {run.settings.dtype}",
        xlabel="step",
        ylabel="nats per token",
    )
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save(path, figure)


def save(path: pathlib.Path, figure: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def write_json(path: pathlib.Path, figures: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def choose_device(name: str, attention: str) -> str:
    """What `auto` is: a GPU; without one the simulator, if it has a part."""
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "sim" if attention == "fused" else "cpu"


def unserved(settings: Settings) -> str | None:
    """Why these settings cannot be served here, or None."""
    if settings.embd % settings.heads:
        return f"--embd: expected a multiple of --heads, got {settings.embd}"
    if settings.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: this torch sees no GPU"
    if settings.device == "sim" and settings.attention != "fused":
        return "--device sim: executes fused kernels only; use --device cpu"
    if settings.attention == "fused":
        if importlib.util.find_spec("flash_attn_rocm") is None:
            return "--attention fused: flash_attn_rocm is not installed"
        if settings.device == "sim":
            return why_not_simulated()
    return None


def why_not_simulated() -> str | None:
    import flash_attn_rocm

    try:
        with flash_attn_rocm.simulate(ARCH):
            return None
    except flash_attn_rocm.FlashAttnError as error:
        return f"--device sim: {error}"


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def make_parser() -> argparse.ArgumentParser:
    what, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=what,
        epilog=rest.partition("SPDX")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Settings()

    def add(name: str, text: str, **options: Any) -> None:
        value = options.setdefault("default", getattr(default, name, None))
        shown = "" if value is None else f", default {value}"
        parser.add_argument(f"--{name}", help=text + shown, **options)

    kinds = ("fused", "sdpa", "math")
    add("attention", "who computes attention", choices=kinds)
    add(
        "device",
        "auto: a GPU; else sim for fused attention, cpu for the others",
        choices=("auto", "cpu", "cuda", "sim"),
        default="auto",
    )
    add("dtype", "precision", choices=("float32", "float16", "bfloat16"))
    add("steps", "training steps", type=positive)
    add("batch", "sequences of a step", type=positive)
    add("seqlen", "tokens of a sequence", type=positive)
    add("layers", "transformer blocks", type=positive)
    add(
        "heads", "heads of a block; --embd divided by it is the head dim", type=positive
    )
    add("embd", "features of a token", type=positive)
    add("lr", "highest learning rate", type=float)
    add("seed", "of the weights and the order of the text", type=int)
    add("unit", "what a token is", choices=tuple(Tokenizer.PIECES))
    add("json", "write settings and results here", type=pathlib.Path, metavar="FILE")
    add("plot", "draw the losses here", type=pathlib.Path, metavar="FILE")
    return parser


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    options.device = choose_device(options.device, options.attention)
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(options, name) for name in names})
    reason = unserved(settings)
    corpus = load_corpus(settings.unit)
    shortest = min(len(corpus.training), len(corpus.validation))
    if settings.seqlen >= shortest:
        reason = reason or f"--seqlen: expected less than {shortest} tokens"
    if reason:
        parser.error(reason)

    print(f"Text: {corpus.source}, {len(corpus.training)} {settings.unit} to train on.")
    print(f"Attention: {settings.attention} on {settings.device}, {settings.dtype}.")
    _, run = train(settings, corpus, spoken)
    print(report(run))
    if options.plot:
        draw(options.plot, run)
    if options.json:
        write_json(options.json, run.summary())
    failures = run.failures()
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
