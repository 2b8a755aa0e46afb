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
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from . import _native, take_profile
from .arguments import ArgumentList
from .bundle import bundle_entries
from .files import FileError
from .module import Module, Stats, disassemble, object_info
from .profile_file import Profile, read_profile, write_json
from .profile_listing import annotate
from .profile_table import table

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
    if len(parts) not in (1, 3) or not all(p.isascii() and p.isdigit() for p in parts):
        raise argparse.ArgumentTypeError(f"expected X,Y,Z or X, got {text!r}")
    x, y, z = (int(p) for p in (*parts, "1", "1")[:3])
    return x, y, z


def _file_to_write(text: str) -> Path:
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file to write, got {text!r}")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text}: expected an existing folder to write to"
        )
    return path


def _lds_bytes(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a number of bytes, got {text!r}")
    return int(text)


def _check_level(text: str) -> int:
    if text not in ("0", "1", "2"):
        raise argparse.ArgumentTypeError(f"expected 0, 1 or 2, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(
            f"expected a number from 0 to 2**63 - 1, got {text!r}"
        )
    return int(text)


_NO_PROFILE = Path()  # --counts without a file

_ARGUMENTS_HELP = """\
A.json lists the kernel's arguments in their order:
  [{"buffer": "y.npy", "access": "rw"}, {"buffer": "x.npy", "access": "r"},
   {"f32": 2.0}, {"i32": 100}]
Also {"i64": 5}, {"bytes": "00ff"} and, for a struct by value with pointers in it,
{"struct": "00..", "pointers": [{"offset": 0, "buffer": "a.npy", "access": "rw"}]}.
Paths are relative to A.json.

Exit code: 0 it ran and nothing was found, 1 a fault or a finding (the report is on
stderr), 2 usage or files.
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
    disasm.add_argument("object", type=Path, nargs="?", metavar="OBJ")
    disasm.add_argument("--kernel", metavar="NAME")
    annotation = disasm.add_mutually_exclusive_group()
    annotation.add_argument(
        "--counts",
        type=Path,
        nargs="?",
        const=_NO_PROFILE,
        metavar="PROFILE.json",
        help="beside each instruction its executions, LDS conflicts and stalls, from "
        "the file of `hipsim run --profile` or flash_attn_rocm.profile(); without a "
        "file the same as --mnemonics",
    )
    annotation.add_argument(
        "--mnemonics", action="store_true", help="how often each mnemonic occurs"
    )
    disasm.set_defaults(run=_disasm, usage=disasm.error)

    run = commands.add_parser(
        "run",
        help="run a kernel on files (gfx906)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_ARGUMENTS_HELP,
    )
    run.add_argument("object", type=Path, metavar="OBJ")
    run.add_argument("kernel", metavar="KERNEL")
    run.add_argument(
        "--grid",
        type=_triple,
        required=True,
        metavar="X,Y,Z",
        help="in workgroups; X alone: X,1,1",
    )
    run.add_argument(
        "--block",
        type=_triple,
        required=True,
        metavar="X,Y,Z",
        help="in work-items; X alone: X,1,1",
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
        "--check", type=_check_level, metavar="0/1/2", help="check level (HIPSIM_CHECK)"
    )
    run.add_argument(
        "--seed",
        type=_seed,
        metavar="N",
        help="order of the waves: 0 in turn, else random from N (HIPSIM_SEED)",
    )
    run.add_argument(
        "--profile",
        type=_file_to_write,
        metavar="FILE",
        help="write counters, bounds and instruction counts as JSON; print the table",
    )
    run.set_defaults(run=_run)
    return parser


def _info(options: argparse.Namespace) -> int:
    facts = object_info(options.object)
    entries = bundle_entries(options.object.read_bytes())
    if entries:
        facts["bundle"] = entries
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    target = facts["target"] or facts["arch"]
    kernels = _number_of(len(facts["kernels"]), "kernel")
    print(f"{target}, code object v{facts['abi']}, {kernels}")
    if entries:
        print(f"chosen from a bundle of {len(entries)}: {', '.join(entries)}")
    width = max([6, *(len(k["name"]) for k in facts["kernels"])])
    print(f"{'kernel':{width}}" + "".join(f"{title:>9}" for _, title in _COLUMNS))
    for kernel in facts["kernels"]:
        cells = "".join(f"{kernel[key]:>9}" for key, _ in _COLUMNS)
        print(f"{kernel['name']:{width}}{cells}")
    return 0


def _disasm(options: argparse.Namespace) -> int:
    image, source = options.object, options.counts
    if image is None and source is not None:  # disasm --counts OBJ
        image, source = source, _NO_PROFILE
        if image.suffix == ".json":
            options.usage(f"expected OBJ, a code object, besides --counts {image}")
    if image is None or image == _NO_PROFILE:
        options.usage("expected OBJ, a code object")
    profile = None
    if source is not None and source != _NO_PROFILE:
        profile = read_profile(source)
    text = disassemble(image, options.kernel)
    if profile is not None:
        kernels = object_info(image)["kernels"]
        hashes = {kernel["name"]: kernel["code_hash"] for kernel in kernels}
        text = annotate(text, profile, source, hashes)
    elif source is not None or options.mnemonics:
        text = _mnemonics(text)
    sys.stdout.write(text)
    return 0


def _mnemonics(text: str) -> str:
    """How often each mnemonic occurs in a disassembly, the most frequent first."""
    counts: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        if line.startswith(" "):  # "  1a4:  v_add_f32 v0, v1, v2"
            counts[line.split(None, 2)[1]] += 1
    ordered = sorted(counts.items(), key=lambda c: (-c[1], c[0]))
    return "".join(f"{count:8} {mnemonic}\n" for mnemonic, count in ordered)


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


@contextlib.contextmanager
def _profiled(path: Path | None) -> Iterator[list[Profile]]:
    """Profiles the launch inside if there is a path; then the list has its profile."""
    profiles: list[Profile] = []
    before = _native.get_option("profile")
    if path is None and before:
        print("hipsim: HIPSIM_PROFILE is ignored, use --profile FILE", file=sys.stderr)
    _native.set_option("profile", int(path is not None))
    try:
        yield profiles
        if path is not None:
            profiles.append(take_profile())
    finally:
        _native.set_option("profile", before)


def _number_of(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _summary(options: argparse.Namespace, stats: Stats) -> str:
    misaligned = f", {_number_of(stats.misaligned, 'misaligned access')}"
    if stats.misaligned != 1:
        misaligned = f", {stats.misaligned} misaligned accesses"
    return (
        f"{options.kernel}: {_number_of(stats.wave_instructions, 'wave instruction')}, "
        f"{_number_of(stats.waves, 'wave')}, "
        f"{_number_of(stats.workgroups, 'workgroup')}"
        f"{misaligned * bool(stats.misaligned)}"
    )


def _warn_of_a_sample(options: argparse.Namespace, stats: Stats) -> None:
    """Results are those of the workgroups that ran."""
    total = math.prod(options.grid)
    if stats.workgroups < total:
        print(
            f"hipsim: HIPSIM_SAMPLE={_native.get_option('sample')}: only "
            f"{stats.workgroups} of {total} workgroups ran, results are incomplete",
            file=sys.stderr,
        )


def _run(options: argparse.Namespace) -> int:
    with Module(options.object) as module:
        kernel = module.kernel(options.kernel)
        arguments = ArgumentList(options.args)
        if arguments.written and options.out is None:
            names = ", ".join(file.path.name for file in arguments.written)
            raise FileError(f"--out: expected a folder for the written {names}")
        for name in ("check", "seed"):
            if getattr(options, name) is not None:
                _native.set_option(name, getattr(options, name))
        with _interruptible(), _profiled(options.profile) as profiles:
            try:
                stats = kernel.launch(
                    options.grid, options.block, arguments.values, lds=options.lds
                )
            except _native.HipError as error:
                report = arguments.locate(error.report)
                raise _native.HipError(error.code, error.name, report) from error
    for file in arguments.written:
        print(f"wrote {file.write(options.out)}")
    print(_summary(options, stats))
    if _native.get_option("check") == 2:
        print("check level 2: no finding")
    _warn_of_a_sample(options, stats)
    for profile in profiles:
        write_json(profile, options.profile)
        print(f"wrote {options.profile}\n\n{table(profile)}", end="")
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
