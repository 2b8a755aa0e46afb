"""The ``hipsim`` command: info, disasm, run.

Exit codes: 0 ok, 1 the kernel faulted (report on stderr), 2 usage or file
error (one line on stderr).

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from . import _native
from .arguments import ArgumentList
from .files import FileError
from .module import Module, disassemble, object_info

_ILLEGAL_ADDRESS = 700
_LAUNCH_FAILURE = 719

_COLUMNS = (
    ("vgprs", "VGPR"),
    ("sgprs", "SGPR"),
    ("lds_bytes", "LDS"),
    ("private_bytes", "scratch"),
    ("vgpr_spills", "vspill"),
    ("sgpr_spills", "sspill"),
    ("code_bytes", "code"),
    ("kernarg_bytes", "kernarg"),
    ("max_threads", "threads"),
    ("wave_size", "wave"),
)


class _Parser(argparse.ArgumentParser):
    """argparse, with errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _triple(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(p.isascii() and p.isdigit() for p in parts):
        raise argparse.ArgumentTypeError(f"expected X,Y,Z, got {text!r}")
    x, y, z = (int(p) for p in parts)
    return x, y, z


def _lds_bytes(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a number of bytes, got {text!r}")
    return int(text)


def _check_level(text: str) -> int:
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"expected 0 or 1, got {text!r}")
    return int(text)


_ARGUMENTS_HELP = """\
A.json lists the kernel's arguments in their order:
  [{"buffer": "y.npy", "access": "rw"}, {"buffer": "x.npy", "access": "r"},
   {"f32": 2.0}, {"i32": 100}]
Also {"i64": 5}, {"bytes": "00ff"} and, for a struct by value with pointers in it,
{"struct": "00..", "pointers": [{"offset": 0, "buffer": "a.npy", "access": "rw"}]}.
Paths are relative to A.json.
"""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hipsim", description="Inspects AMD code objects; runs gfx906 ones."
    )
    commands = parser.add_subparsers(
        dest="command", metavar="{info,disasm,run}", required=True
    )

    info = commands.add_parser("info", help="what is in a code object")
    info.add_argument("object", type=Path, metavar="OBJ")
    info.add_argument("--json", action="store_true")
    info.set_defaults(run=_info)

    disasm = commands.add_parser("disasm", help="instructions (gfx906)")
    disasm.add_argument("object", type=Path, metavar="OBJ")
    disasm.add_argument("--kernel", metavar="NAME")
    disasm.add_argument(
        "--counts", action="store_true", help="how often each mnemonic occurs"
    )
    disasm.set_defaults(run=_disasm)

    run = commands.add_parser(
        "run",
        help="run a kernel on files (gfx906)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_ARGUMENTS_HELP,
    )
    run.add_argument("object", type=Path, metavar="OBJ")
    run.add_argument("kernel", metavar="KERNEL")
    run.add_argument(
        "--grid", type=_triple, required=True, metavar="X,Y,Z", help="in workgroups"
    )
    run.add_argument(
        "--block", type=_triple, required=True, metavar="X,Y,Z", help="in work-items"
    )
    run.add_argument(
        "--lds", type=_lds_bytes, default=0, metavar="N", help="dynamic LDS bytes"
    )
    run.add_argument("--args", type=Path, metavar="A.json", help="kernel arguments")
    run.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for written buffers; needed if a buffer is writable",
    )
    run.add_argument(
        "--check", type=_check_level, metavar="0/1", help="check level (HIPSIM_CHECK)"
    )
    run.set_defaults(run=_run)
    return parser


def _info(options: argparse.Namespace) -> int:
    facts = object_info(options.object)
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    target = facts["target"] or facts["arch"]
    count = len(facts["kernels"])
    noun = "kernel" if count == 1 else "kernels"
    print(f"{target}, code object v{facts['abi']}, {count} {noun}")
    width = max([6, *(len(k["name"]) for k in facts["kernels"])])
    print(f"{'kernel':{width}}" + "".join(f"{title:>9}" for _, title in _COLUMNS))
    for kernel in facts["kernels"]:
        cells = "".join(f"{kernel[key]:>9}" for key, _ in _COLUMNS)
        print(f"{kernel['name']:{width}}{cells}")
    return 0


def _disasm(options: argparse.Namespace) -> int:
    text = disassemble(options.object, options.kernel)
    if not options.counts:
        sys.stdout.write(text)
        return 0
    counts: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        if line.startswith(" "):  # "  1a4:  v_add_f32 v0, v1, v2"
            counts[line.split(None, 2)[1]] += 1
    for mnemonic, count in sorted(counts.items(), key=lambda c: (-c[1], c[0])):
        print(f"{count:8} {mnemonic}")
    return 0


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process inside; Python would wait for the kernel."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or the caller's
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run(options: argparse.Namespace) -> int:
    with Module(options.object) as module:
        kernel = module.kernel(options.kernel)
        arguments = ArgumentList(options.args)
        if arguments.written and options.out is None:
            names = ", ".join(file.path.name for file in arguments.written)
            raise FileError(f"--out: expected a folder for the written {names}")
        if options.check is not None:
            _native.set_option("check", options.check)
        with _interruptible():
            stats = kernel.launch(
                options.grid, options.block, arguments.values, lds=options.lds
            )
    for file in arguments.written:
        print(f"wrote {file.write(options.out)}")
    misaligned = f", {stats.misaligned} misaligned accesses" * bool(stats.misaligned)
    print(
        f"{options.kernel}: {stats.wave_instructions} wave instructions, "
        f"{stats.waves} waves, {stats.workgroups} workgroups{misaligned}"
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except _native.HipError as error:
        print(f"hipsim: {error.report}", file=sys.stderr)
        return 1 if error.code in (_ILLEGAL_ADDRESS, _LAUNCH_FAILURE) else 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; say nothing at exit
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"hipsim: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"hipsim: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
