"""A small GPT of standard blocks; its attention is PyTorch's own function.

Nothing here knows of flash_attn_rocm: the model calls
F.scaled_dot_product_attention as any model does, and patching that name is all
that changes between two runs of examples/train_gpt.py, which trains it.  Also here:
English text that ships with Python, tokenizers of characters and of whole words.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pathlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a model: vocabulary and context in tokens, width in features."""

    vocabulary: int
    context: int = 128
    layers: int = 4
    heads: int = 4
    head_dim: int = 64

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Attention(nn.Module):
    """Causal self-attention with one fused projection for q, k and v.

    With `dtype` set, attention itself runs in it and the projections stay in the
    parameters' dtype: CPUs multiply fp16 matrices very slowly (22 times slower than
    fp32, one core of an EPYC).  On a GPU one leaves it alone and uses autocast.
    """

    dtype: torch.dtype | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, S, D), a view
        if self.dtype is not None:
            q, k, v = (t.to(self.dtype) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).to(x.dtype)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Pre-LN transformer block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token and position embedding, blocks, a head tied to the embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, S) of int64 -> logits (B, S, vocabulary)."""
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(where)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


class Tokenizer:
    """Numbers for the pieces of a text.

    A piece is a character; of a text in words, it is a word with its leading space
    or any other character.
    """

    PIECES: ClassVar[dict[str, str]] = {
        "characters": r"(?s:.)",
        "words": r" ?[A-Za-z]+|[^A-Za-z]",
    }

    def __init__(self, text: str, unit: str) -> None:
        self.split = re.compile(self.PIECES[unit]).findall
        self.pieces = sorted(set(self.split(text)))
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        return [self.ids[piece] for piece in self.split(text)]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.pieces[i] for i in ids)


def english_text() -> tuple[str, str]:
    """Plain sentences from Python's own documentation, and where they lay.

    The help topics of pydoc are about 200 KB of prose; some distributions
    leave them out, then the docstrings of the standard library take over.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
        source = "pydoc_data.topics"
        documents = [topics[name] for name in sorted(topics)]
    except ImportError:
        source = "docstrings of the standard library (pydoc_data is missing)"
        documents = list(_docstrings())
    sentences = []
    for paragraph in "\n\n".join(documents).split("\n\n"):
        line = " ".join(re.sub(r"[\"*`\u201c\u201d]", "", paragraph).split())
        for sentence in re.split(r"(?<=[.:]) (?=[A-Z])", line):
            if re.fullmatch(r"[A-Z][A-Za-z ,.;:'()\u2019-]{30,}[.:]", sentence):
                sentences.append(sentence)
    return " ".join(sentences), source


def _docstrings() -> Iterator[str]:
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
            if isinstance(node, kinds) and ast.get_docstring(node):
                yield ast.get_docstring(node) or ""


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def next_token(
    logits: Tensor, temperature: float, generator: torch.Generator | None
) -> int:
    """Draws one token from logits (vocabulary,); the likeliest at 0."""
    if temperature == 0.0:
        return int(logits.argmax())
    weights = (logits / temperature).softmax(-1)
    return int(torch.multinomial(weights, 1, generator=generator))
