"""``flash-attn-rocm soak``: random calls, bad input, faults, held to stock's answers.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Callable

from .. import _soak, _soak_faults, _soak_plot, _soak_report
from .._config import config, logger
from .._errors import FlashAttnError
from .._soak_telemetry import Telemetry
from . import files

HELP = "random calls, bad input and faults, for hours"
DESCRIPTION = """\
Calls scaled_dot_product_attention with random shapes and some bad input, compares
each answer with stock's, and injects faults (simulator) or watches the card. Exit
code: 0 all promises held, 1 one was broken, 2 usage or files.
"""


def _number(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError
    return value


def _length(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_number.__name__ = "number above 0"
_length.__name__ = "number of at least 0"
_share.__name__ = "share from 0 to 1"
_count.__name__ = "whole number above 0"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's options."""
    length = parser.add_argument_group("how long (whichever is over first)")
    length.add_argument("--hours", type=_number, metavar="H")
    length.add_argument("--minutes", type=_number, metavar="M")
    length.add_argument("--calls", type=_count, metavar="N")
    what = parser.add_argument_group("what")
    what.add_argument("--device", default="sim", help="sim, or cuda (%(default)s)")
    what.add_argument("--seed", type=int, default=0, help="of all calls (%(default)s)")
    what.add_argument(
        "--bad-input", type=_share, default=0.01, metavar="SHARE", help="(%(default)s)"
    )
    what.add_argument(
        "--faults",
        metavar="PLAN",
        help="a JSON file, see docs/soak.md, or none; left out: each kind in turn",
    )
    what.add_argument(
        "--fused-share",
        type=_share,
        default=0.9,
        metavar="SHARE",
        help="of good calls, at least (%(default)s)",
    )
    what.add_argument(
        "--cooldown",
        type=_length,
        metavar="S",
        help="seconds that a breaker rests (60; simulated 0: the next call tries it)",
    )
    kept = parser.add_argument_group("files")
    kept.add_argument("--journal", type=Path, required=True, metavar="FILE")
    kept.add_argument("--report", type=Path, metavar="FILE", help="JSON")
    kept.add_argument("--plot", type=Path, metavar="FILE", help="a picture")
    kept.add_argument(
        "--resume", action="store_true", help="go on with the journal if it is there"
    )
    kept.add_argument(
        "--batch",
        type=_count,
        default=100,
        metavar="N",
        help="calls to a line of the journal (%(default)s)",
    )
    card = parser.add_argument_group("telemetry (a GPU, or where --sysfs is given)")
    card.add_argument(
        "--temperature-limit",
        type=_number,
        default=95.0,
        metavar="C",
        help="pause above it (%(default)s)",
    )
    card.add_argument(
        "--telemetry-every",
        type=_number,
        default=10.0,
        metavar="S",
        help="seconds (%(default)s)",
    )
    card.add_argument("--sysfs", type=Path, metavar="FOLDER", help="instead of /sys")
    parser.set_defaults(run=_run)


def _cooldown(options: argparse.Namespace) -> float:
    """As said, or: of a simulator that does thousands of calls in a second, none."""
    if options.cooldown is not None:
        return float(options.cooldown)
    return 0.0 if options.device == "sim" else config.cooldown_s


def _run(options: argparse.Namespace) -> int:
    seconds = _seconds(options)
    _refuse_early(options)
    soak = _soak.Options(
        seed=options.seed,
        bad_share=options.bad_input,
        plan=tuple(_plan(options)),
        calls=options.calls,
        seconds=seconds,
        batch=options.batch,
        device=options.device,
        cooldown_s=_cooldown(options),
    )
    with _quiet(), _progress(options.calls, seconds) as progress:
        summary, stopped = _soak.soak(
            soak,
            options.journal,
            resume=options.resume,
            telemetry=_telemetry(options),
            progress=progress,
        )
    kinds = _soak.kinds_of(soak, summary.next)
    report = summary.as_data(options.fused_share, kinds)
    print(_soak_report.text_of(report), end="")
    if stopped:
        print(f"stopped; go on with --resume --journal {options.journal}")
    if options.report is not None:
        files.write(options.report, json.dumps(report, indent=1) + "\n")
    if options.plot is not None:
        _soak_plot.draw(options.plot, summary)
        print(f"wrote {options.plot}")
    return 0 if report["held"] else 1


def _seconds(options: argparse.Namespace) -> float | None:
    spans = [
        span * unit
        for span, unit in ((options.hours, 3600.0), (options.minutes, 60.0))
        if span is not None
    ]
    if not spans and options.calls is None:
        raise FlashAttnError("soak: expected --hours, --minutes or --calls")
    return min(spans) if spans else None


def _refuse_early(options: argparse.Namespace) -> None:
    """Says before a long run what would make its files fail."""
    files.refuse(options.journal, options.report, options.plot)
    files.refuse_picture(options.plot)
    named = [p.absolute() for p in (options.journal, options.report, options.plot) if p]
    if len(set(named)) != len(named):
        raise FlashAttnError("--journal, --report, --plot: expected different files")
    if options.sysfs is not None and not options.sysfs.is_dir():
        raise FlashAttnError(f"--sysfs {options.sysfs}: expected a folder")


def _plan(options: argparse.Namespace) -> list[_soak_faults.Entry]:
    if options.faults == "none" or (options.faults is None and options.device != "sim"):
        return []
    if options.faults is None:
        return _soak_faults.default_plan(options.calls)
    return _soak_faults.read_plan(Path(options.faults))


def _telemetry(options: argparse.Namespace) -> Telemetry | None:
    if options.device == "sim" and options.sysfs is None:
        return None
    root = options.sysfs or Path("/sys")
    return Telemetry(root, options.temperature_limit, options.telemetry_every)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a warning for each injected fault; the journal has them."""
    before = logger.level
    logger.setLevel(max(before, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _progress(
    calls: int | None, seconds: float | None
) -> Iterator[Callable[[int, float], None]]:
    """A bar when somebody looks."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda index, elapsed: None
        return
    from tqdm import tqdm

    with tqdm(total=calls, unit="call", desc="soak") as bar:

        def show(index: int, elapsed: float) -> None:
            bar.update(index - bar.n)
            if seconds is not None:
                bar.set_postfix_str(f"{elapsed / seconds:.1%} of the time")

        yield show
