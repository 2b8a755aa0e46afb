"""``flash-attn-rocm profile script.py``: a script with its attention simulated.

The script runs as ``python script.py`` would run it, inside patched(), simulate()
and profile(); then the report is printed.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import builtins
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from .. import _profile, _shim, _simulate
from .._config import DEFAULT_ARCH
from .._errors import FlashAttnError
from . import files
from .leftover import Leftover

_INTERRUPTED = 130  # 128 + SIGINT

HELP = "what bounds the kernels of a script, simulated"
DESCRIPTION = """\
Runs a Python script with scaled_dot_product_attention patched and CPU tensors on
a simulated GPU, and prints what bounds each kernel. Nothing is measured on a card.
"""
EPILOG = """\
Options of this command go before the script; what follows it is the script's.
The exit code is the script's: 1 after an exception, with the report so far.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's options."""
    wanted = parser.add_argument_group("files to write after the run")
    wanted.add_argument("--json", type=Path, metavar="FILE", help="the whole profile")
    wanted.add_argument(
        "--trace", type=Path, metavar="FILE", help="waves, for Perfetto or Chrome"
    )
    wanted.add_argument(
        "--plot", type=Path, metavar="FILE", help="roofline and bounds, as a picture"
    )
    parser.add_argument(
        "--arch", default=DEFAULT_ARCH, help="what to simulate (%(default)s)"
    )
    parser.add_argument(
        "--no-patch", action="store_true", help="leave it to the script to patch"
    )
    parser.add_argument("script", type=Path, metavar="script.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    code = _compile(options.script)
    files.refuse(options.json, options.trace, options.plot)
    files.refuse_picture(options.plot)
    with ExitStack() as stack:
        stack.enter_context(_simulate.simulate(options.arch))
        if not options.no_patch:
            stack.enter_context(_shim.patched())
        report = stack.enter_context(_profile.profile())
        stack.enter_context(_as_main(options.script, options.arguments))
        status = _execute(code)
    sys.stdout.flush()
    print(f"\n{report.table()}", end="")
    for path, write in (
        (options.json, report.save),
        (options.trace, report.trace),
        (options.plot, report.plot),
    ):
        if path is not None:
            write(path)
            print(f"wrote {path}")
    return status


def _compile(script: Path) -> CodeType | Exception:
    """The script's code, or the error that running it will raise."""
    try:
        with io.open_code(os.path.abspath(script)) as file:
            source = file.read()
    except OSError as error:
        raise FlashAttnError(f"{script}: {error.strerror or error}") from error
    try:
        return compile(source, os.path.abspath(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return error.with_traceback(None)  # our frames are not the script's


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Lets sys be as ``python script.py`` has it: argv, path[0] and __main__."""
    module = ModuleType("__main__")
    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    facts = {"__file__": path, "__loader__": loader, "__builtins__": builtins}
    vars(module).update(facts, __cached__=None)
    before = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv = [str(script), *arguments]
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11: python -P
        sys.path = [os.path.dirname(os.path.realpath(script)), *sys.path[1:]]
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.argv, sys.path, sys.modules["__main__"] = before


def _execute(code: CodeType | Exception) -> int:
    """Runs the script to its end; returns the exit code that python would give."""
    status = 0
    leftover = Leftover()
    try:
        if isinstance(code, Exception):
            raise code
        exec(code, vars(sys.modules["__main__"]))
    except SystemExit as stop:
        status = _exit_code(stop.code)
    except KeyboardInterrupt as error:
        _print_traceback(error)
        return _INTERRUPTED
    except BaseException as error:
        _print_traceback(error)
        status = 1
    try:
        leftover.wait()  # they may still launch
    except KeyboardInterrupt as error:
        _print_traceback(error)
        return _INTERRUPTED
    return status


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    """By the script's own sys.excepthook, without the frame of this file."""
    trace: TracebackType | None = error.__traceback__
    inner = trace.tb_next if trace is not None else None
    sys.stdout.flush()
    sys.excepthook(type(error), error.with_traceback(inner), inner)
