"""``flash-attn-rocm doctor``: is everything well, and if not, what to do.

Prints what _doctor finds of the machine, the self-test, which breakers are open, and
what explain() says of common calls. What runs in the simulator says nothing of a card.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from .. import _doctor, _doctor_facts, _ops, _selftest
from .._config import config
from .._doctor import Finding
from .._doctor_symptoms import SYMPTOMS, Symptom
from .._errors import FlashAttnError
from .._simulate import missing_for, simulate
from .._status import explain
from .._version import __version__
from . import breaker

HELP = "is everything well, and if not, what to do"
DESCRIPTION = "Looks at torch, ROCm, cards, settings and kernels."
EPILOG = """\
Exit code: 0 all is well, 1 something was found, 2 usage. Without --no-selftest the
kernels are launched, in a process of their own with a time limit: on every AMD GPU
that torch sees, otherwise in the simulator.
"""
_HEADS, _KEYS = 4, 256  # of the calls that are explained


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's options."""
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--symptom",
        choices=["list", *SYMPTOMS],
        metavar="NAME",
        help="what to do about it; list: the names",
    )
    parser.add_argument("--no-selftest", action="store_true", help="launch no kernels")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.symptom == "list":
        return _list_symptoms(options.json)
    if options.symptom is not None and not options.json:
        _print_symptom(SYMPTOMS[options.symptom])
    facts = _doctor_facts.gather()
    findings = _doctor.examine(facts)
    devices = [
        str(index)
        for index, (_, arch) in enumerate(facts.devices)
        if arch in facts.code
    ]
    if not facts.devices and missing_for("gfx906") is None:
        devices = ["sim"]
    tested = {}
    for device in [] if options.no_selftest or _ops.op is None else devices:
        tested[device] = _selftest.verdicts(device)
        findings.append(_of_selftest(device, tested[device]))
    findings.append(_of_breakers())
    calls = _explained(devices[0]) if devices else []
    if options.json:
        answer: dict[str, Any] = {
            "version": __version__,
            "healthy": _doctor.healthy(findings),
            "findings": [asdict(finding) for finding in findings],
            "selftest": {d: [asdict(v) for v in made] for d, made in tested.items()},
            "calls": calls,
        }
        if options.symptom is not None:
            answer["symptom"] = asdict(SYMPTOMS[options.symptom])
        print(json.dumps(answer, indent=1))
    else:
        _print_findings(findings)
        _print_calls(calls, devices)
    return 0 if _doctor.healthy(findings) else 1


# ---- symptoms ----------------------------------------------------------------


def _list_symptoms(as_json: bool) -> int:
    if as_json:
        print(json.dumps({n: asdict(s) for n, s in SYMPTOMS.items()}, indent=1))
    else:
        for name, symptom in SYMPTOMS.items():
            print(f"{name:16} {symptom.title}")
    return 0


def _print_symptom(symptom: Symptom) -> None:
    print(f"Symptom: {symptom.title}\n{symptom.cause}")
    for number, step in enumerate(symptom.steps, 1):
        print(f"  {number}. {step}")
    print()


# ---- what needs more than facts ----------------------------------------------


def _where(device: str) -> str:
    return "in the simulator" if device == "sim" else f"on device {device}"


def _of_selftest(device: str, verdicts: list[_selftest.Verdict]) -> Finding:
    count = Counter(verdict.verdict for verdict in verdicts)
    name, where = "self-test", _where(device)
    if count["passed"] == len(verdicts):
        return Finding(name, "ok", f"{len(verdicts)} families passed {where}")
    first = next(verdict for verdict in verdicts if not verdict.passed)
    kinds = ", ".join(f"{number} {kind}" for kind, number in count.most_common())
    return Finding(
        name,
        "bad",
        f"{where}: {kinds}; the first: {first.family} {first.verdict}: {first.detail}",
        "their calls are answered by stock SDPA; --json names the kernels",
    )


def _of_breakers() -> Finding:
    name = "breakers"
    if not config.cache_dir:
        text = "not kept: there is no home folder"
        return Finding(name, "warn", text, "set FLASH_ATTN_ROCM_CACHE_DIR")
    try:
        found, unreadable = breaker.entries(config.cache_dir)
    except FlashAttnError as error:
        return Finding(name, "bad", str(error), "until then nothing of it is used")
    if unreadable:
        text = f"{unreadable} damaged files in {config.cache_dir}"
        advice = "`flash-attn-rocm breaker reset` sets them aside"
        return Finding(name, "warn", text, advice)
    if not found:
        return Finding(name, "ok", f"none is open in {config.cache_dir}")
    words = ", ".join(sorted({entry.kernel for _, entry in found}))
    return Finding(
        name,
        "warn",
        f"{len(found)} are open, stock SDPA answers instead of {words}",
        "`flash-attn-rocm breaker list` says why; they are tried again by themselves, "
        "`breaker reset` tries at once",
    )


# ---- what runs fused ---------------------------------------------------------


class _Call(NamedTuple):
    what: str
    dtype: torch.dtype
    dim: int = 64
    train: bool = False
    mask: torch.dtype | None = None
    rows: int = _KEYS
    heads_k: int = _HEADS
    options: Mapping[str, Any] = {}


_CALLS = (
    _Call("fp16, causal", torch.float16, options={"is_causal": True}),
    _Call("fp16, training, head dim 128", torch.float16, 128, True),
    _Call("bf16, training, head dim 128", torch.bfloat16, 128, True),
    _Call(
        "bf16, training, dropout", torch.bfloat16, 64, True, options={"dropout_p": 0.1}
    ),
    _Call("fp32, training", torch.float32, 64, True),
    _Call("fp64, training", torch.float64, 64, True),
    _Call("fp16, head dim 256", torch.float16, 256),
    _Call("fp16, head dim 512", torch.float16, 512),
    _Call(
        "fp16, a key head for 2 of q",
        torch.float16,
        heads_k=_HEADS // 2,
        options={"enable_gqa": True},
    ),
    _Call("fp16, one query", torch.float16, rows=1),
    _Call("fp16, boolean mask", torch.float16, mask=torch.bool),
    _Call("fp16, training, additive mask", torch.float16, 64, True, torch.float16),
    _Call(
        "fp16, mask and is_causal",
        torch.float16,
        mask=torch.bool,
        options={"is_causal": True},
    ),
)


def _explained(device: str) -> list[dict[str, Any]]:
    """What explain() says of common calls."""
    simulated = device == "sim"
    place = "cpu" if simulated else f"cuda:{device}"
    rows = []
    with simulate() if simulated else contextlib.nullcontext(), torch.enable_grad():
        for call in _CALLS:
            q, k, v = (
                torch.empty((1, heads, rows, call.dim), dtype=call.dtype, device=place)
                for heads, rows in (
                    (_HEADS, call.rows),
                    (call.heads_k, _KEYS),
                    (call.heads_k, _KEYS),
                )
            )
            for tensor in (q, k, v):
                tensor.requires_grad_(call.train)
            mask = None
            if call.mask is not None:
                mask = torch.empty((call.rows, _KEYS), dtype=call.mask, device=place)
            answer = explain(q, k, v, mask, **call.options)
            kernels = "+".join(filter(None, (answer.kernel, answer.backward)))
            rows.append(
                {
                    "call": call.what,
                    "device": device,
                    "fused": answer.fused,
                    "kernels": kernels.split("+") if kernels else [],
                    "why": "" if answer.fused else answer.why,
                }
            )
    return rows


# ---- text --------------------------------------------------------------------


def _print_findings(findings: list[Finding]) -> None:
    print(f"flash-attn-rocm {__version__}")
    for finding in findings:
        print(f"{finding.level:5} {finding.name}: {finding.text}")
        if finding.advice:
            print(f"{'':8}{finding.advice}")


def _print_calls(calls: list[dict[str, Any]], devices: list[str]) -> None:
    if not calls:
        print("\nNothing runs fused: there is neither an AMD GPU nor the simulator.")
        return
    print(f"\nscaled_dot_product_attention after patch(), {_where(devices[0])}:")
    for row in calls:
        answer = ", ".join(row["kernels"]) if row["fused"] else f"stock: {row['why']}"
        print(f"  {row['call']:30} {answer}")
    print(
        "\nWhat operators report, and what to do: flash-attn-rocm doctor --symptom list"
    )
