"""The self-test: every family of kernels, in a process that may hang or abort.

verdicts() starts ``python -m flash_attn_rocm._selftest`` as a child and reads one line
of JSON for what it begins and one for what it found. A family that ends the child or
does not answer in time has that as its verdict, and a further child goes on behind it.
ensure() keeps the verdicts of a device in the cache folder. What the right answers are:
_selftest_cases. What follows from a verdict: the caller.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Callable

from . import _ops, _selftest_cases
from ._config import logger
from ._errors import FlashAttnError
from ._selftest_cases import Family, families
from ._selftest_store import KEPT_S, Store, Untrusted, opened
from ._simulate import simulate

TIMEOUT_S = 120.0
STALL_S = 30.0  # of one family; the first one also opens the device
_DETAIL_CHARS = 200
_VERSION = 1  # of the file
_VERDICT = re.compile(r"passed|wrong|failed|hung|died of signal \d{1,3}")
# The child tests kernels, whatever guard and breakers think of them.
_CHILD_ENVIRON = {
    "FLASH_ATTN_ROCM_GUARD": "off",
    "FLASH_ATTN_ROCM_SELFTEST": "0",
    "FLASH_ATTN_ROCM_VERIFY": "0",
    "FLASH_ATTN_ROCM_UNTESTED": "1",
}
# The package may have come from anywhere on sys.path; nothing from the current folder.
_CHILD = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; "
    "from flash_attn_rocm._selftest import main; sys.exit(main())"
)


@dataclass(frozen=True)
class Verdict:
    """What the self-test found of one family."""

    family: str
    kernels: tuple[str, ...]  # symbols; of a wrong result those that made it
    verdict: str  # "passed", "wrong", "failed", "hung" or "died of signal N"
    detail: str = ""  # one line, "" if passed
    seconds: float = 0.0
    settled: bool = True  # False: another run may say otherwise, so it is not kept

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"


def _one_line(text: str) -> str:
    """The last line that says something, without control characters."""
    lines = [line for line in text.splitlines() if line.strip()]
    line = "".join(c if c.isprintable() else " " for c in lines[-1]) if lines else ""
    return line.strip()[:_DETAIL_CHARS]


# ---- the child ---------------------------------------------------------------


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def _test(family: Family, device: str) -> str:
    """Says what it finds; returns the verdict."""
    _say(begins=family.name)
    start = time.perf_counter()
    kernels, detail = family.kernels, ""
    try:
        wrong = _selftest_cases.run(family, device)
    except Exception as error:
        verdict, detail = "failed", f"{type(error).__name__}: {error}"
    else:
        verdict = "wrong" if wrong else "passed"
        kernels = tuple(wrong) or kernels
        detail = "; ".join(wrong.values())
    found = Verdict(family.name, kernels, verdict, _one_line(detail))
    _say(found=asdict(replace(found, seconds=time.perf_counter() - start)))
    return verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """The child: says what it begins and finds, from family number --skip on."""
    parser = argparse.ArgumentParser(prog="python -m flash_attn_rocm._selftest")
    parser.add_argument("--device", default="sim", help="sim, sim:ARCH or a number")
    parser.add_argument("--skip", type=int, default=0, help="families to leave out")
    options = parser.parse_args(arguments)
    kind, _, arch = options.device.partition(":")
    simulated = kind == "sim"
    where = simulate(arch or "gfx906") if simulated else contextlib.nullcontext()
    with where:
        for family in families()[options.skip :]:
            verdict = _test(family, "cpu" if simulated else f"cuda:{int(kind)}")
            if verdict == "failed" and not simulated:
                break  # a process may not get rid of a GPU's error
    return 0


# ---- its parent --------------------------------------------------------------


class _Child:
    """A running child, and what it said so far."""

    def __init__(self, device: str, skip: int) -> None:
        environ = {**os.environ, **_CHILD_ENVIRON}
        environ.pop("FLASH_ATTN_ROCM_LOG", None)
        if device.startswith("sim"):
            environ["FLASH_ATTN_ROCM_DEVICE"] = device
        elif environ.get("FLASH_ATTN_ROCM_DEVICE") != "standin":
            environ["FLASH_ATTN_ROCM_DEVICE"] = "auto"
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        words = ["--device", device, "--skip", str(skip)]
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, folder, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environ,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._rest = b""

    def lines(self, until: float, stall_s: float) -> Iterator[dict[str, object]]:
        """What it says, until it ends.

        Raises:
            TimeoutError: after its first words it said nothing for stall_s, or it has
                not ended at `until`.
        """
        spoke = False  # starting takes as long as it takes
        while True:
            left = min(stall_s if spoke else math.inf, until - time.monotonic())
            ready = left > 0 and select.select([self._output], [], [], left)[0]
            if not ready:
                raise TimeoutError
            read = os.read(self._output.fileno(), 65536)
            if not read:
                return
            *whole, self._rest = (self._rest + read).split(b"\n")
            for line in whole:
                with contextlib.suppress(ValueError):  # what others print
                    facts = json.loads(line)
                    if isinstance(facts, dict):
                        spoke = True
                        yield facts

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        return _one_line(self._errors.read().decode(errors="replace"))

    def death(self, until: float, stall_s: float) -> int:
        """Its exit code, negative for a signal, once it has said its last word.

        Raises:
            TimeoutError: it does not end, as where the driver does not let it.
        """
        left = min(stall_s, until - time.monotonic())
        try:
            return self._process.wait(max(left, 0.0))
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def close(self) -> None:
        """Ends it. One that even SIGKILL does not end, in the driver, is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._output.close()
        self._errors.close()


def _verdict_of(facts: object, family: Family) -> Verdict:
    """What the child found; it is believed about its own family only."""
    assert isinstance(facts, dict)
    return Verdict(
        family.name,
        tuple(k for k in family.kernels if k in facts["kernels"]),
        str(facts["verdict"]),
        _one_line(str(facts["detail"])),
        float(facts["seconds"]),
    )


def verdicts(
    device: str, timeout_s: float = TIMEOUT_S, stall_s: float = STALL_S
) -> list[Verdict]:
    """A verdict of every family of kernels on a device.

    Args:
        device: "sim", "sim:ARCH", or the number of a GPU.
        timeout_s: wall-clock limit of the whole.
        stall_s: that of one family.

    Raises:
        FlashAttnError: there are no kernels to test in this process.
    """
    if _ops.op is None:
        raise FlashAttnError(_ops.unavailable or "no ops")
    until = time.monotonic() + timeout_s
    todo = families()
    made: list[Verdict] = []
    while len(made) < len(todo):
        _one_child(str(device), todo, made, until, stall_s)
    return made


def _one_child(
    device: str, todo: list[Family], made: list[Verdict], until: float, stall_s: float
) -> None:
    """Adds to `made` what one child finds, and what becomes of it."""
    before = len(made)
    child = _Child(device, before)
    begun = time.monotonic()
    running = False
    try:
        for facts in child.lines(until, stall_s):
            if "begins" in facts:
                begun, running = time.monotonic(), True
            elif "found" in facts:
                running = False
                made.append(_verdict_of(facts["found"], todo[len(made)]))
        code = child.death(until, stall_s)
        verdict = f"died of signal {-code}" if code < 0 else "failed"
        detail = child.last_words() or f"the process ended with {code}"
    except TimeoutError:
        verdict, detail = "hung", f"no answer in {time.monotonic() - begun:.0f} s"
    finally:
        child.close()
    rest = todo[len(made) :]
    if not rest:
        return
    if not running:
        if len(made) == before:  # it did not even begin; another one will not either
            detail = "it did not start in time" if verdict == "hung" else detail
            made += _unsettled(rest, f"the test's process: {detail}")
        return
    first, *others = rest
    took = time.monotonic() - begun
    late = verdict == "hung" and took < stall_s  # the whole was late, not the family
    made.append(Verdict(first.name, first.kernels, verdict, detail, took, not late))
    if others and others[0].needs == first.name:
        second = others.pop(0)
        detail = f"not run: {first.name} {verdict}"
        made.append(Verdict(second.name, second.kernels, "failed", detail))
    if time.monotonic() >= until:
        made += _unsettled(others, "not reached within the time of the whole")


def _unsettled(missing: list[Family], detail: str) -> list[Verdict]:
    return [Verdict(f.name, f.kernels, "failed", detail, 0.0, False) for f in missing]


# ---- kept --------------------------------------------------------------------


def _kept(store: Store, code_hash: str) -> list[Verdict] | None:
    """What the file says, if it is there, of these kernels and not too old."""
    try:
        found = store.read(code_hash)
        if found is None:
            return None
        content, age_s = found
        made = _verdicts_in(content)
    except ValueError as error:
        logger.warning("%s: %s; set aside, testing again", store.path, error)
        store.set_aside()
        return None
    # Perhaps the driver was not well that day.
    stale = not 0 <= age_s < KEPT_S and not all(verdict.passed for verdict in made)
    return None if stale else made


def _verdicts_in(content: dict[str, Any]) -> list[Verdict]:
    """The verdicts, each of them checked.

    Raises:
        ValueError: it is not what ensure() writes.
    """
    rows, todo = content.get("verdicts"), families()
    if content.get("version") != _VERSION or not isinstance(rows, list):
        raise ValueError(f"expected verdicts of version {_VERSION}")
    if len(rows) != len(todo):
        raise ValueError(f"expected {len(todo)} verdicts, got {len(rows)}")
    made = []
    for row, family in zip(rows, todo):
        row = row if isinstance(row, dict) else {}
        verdict, kernels = row.get("verdict"), row.get("kernels")
        if row.get("family") != family.name:
            raise ValueError(f"expected a verdict of {family.name}")
        if not isinstance(verdict, str) or not _VERDICT.fullmatch(verdict):
            raise ValueError(f"{family.name}: expected a verdict, got {verdict!r:.80}")
        if not isinstance(kernels, list) or any(
            k not in family.kernels for k in kernels
        ):
            raise ValueError(f"{family.name}: expected kernels of its own")
        detail = _one_line(str(row.get("detail", "")))
        made.append(Verdict(family.name, tuple(kernels), verdict, detail))
    return made


def ensure(
    device_identity: str,
    code_hash: str,
    cache_dir: str | None,
    run: Callable[[], list[Verdict]],
) -> list[Verdict]:
    """The verdicts of a device, from the cache folder or from run().

    Of several processes that ask at the same time, one runs the test and the others
    wait for its result. What is not settled is not kept; verdicts that are not all
    "passed" are kept for a day.

    Args:
        device_identity: one line: device, driver and runtime version.
        code_hash: of the code objects.
        cache_dir: where to keep the verdicts; None: nowhere.
        run: makes them, for example ``lambda: verdicts("0")``.
    """
    if cache_dir is None:
        return run()
    made: list[Verdict] | None = None
    try:
        with opened(cache_dir, device_identity, TIMEOUT_S + 30) as store:
            made = _kept(store, code_hash)
            if made is None:
                made = run()
                if all(verdict.settled for verdict in made):
                    rows = [asdict(verdict) for verdict in made]
                    store.write(code_hash, {"version": _VERSION, "verdicts": rows})
    except Untrusted as error:
        logger.warning("self-test: nothing is kept: %s", error)
    return run() if made is None else made


if __name__ == "__main__":
    sys.exit(main())
