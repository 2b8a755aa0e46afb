"""Which error exits of the host layer and of the binding does no test reach?

    python scripts/coverage.py [--only c | python] [-n WORKERS] [PYTEST_ARGUMENT ...]

Builds csrc/host and csrc/python with counters into build/coverage, at -O0, so that
each line has its own; runs the C tests and those Python tests that exercise the
binding; and prints each line that ends a function in an error, or sets one, and has a
part that never ran. Nothing is left out but csrc/host/reference.c, which is the oracle
of the C tests and no part of the product. Exit code 1 if there is such a line.

What ran only in a process that was killed, or ended by a signal or _exit(), is not
counted: the counters are written at an orderly end.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "coverage"
SITE = FOLDER / "site"
COUNTERS = "--coverage -O0 -g -fprofile-update=atomic".split()
FLAGS = [
    *("-std=c11", "-ffp-contract=off", "-fvisibility=hidden", "-fexceptions"),
    *("-w", "-fPIC", "-pthread", "-DPy_LIMITED_API=0x03090000"),
    *('-DFA_VERSION="coverage"', '-DFA_SANITIZE=""'),
]
TESTS = [
    *("test_binding.py", "test_binding_guard.py", "test_binding_memory.py"),
    *("test_ops.py", "test_ops_features.py", "test_bad_input.py", "test_rotary.py"),
    *("test_guard.py", "test_verify.py", "test_torch_world.py"),
]
# A line that makes an error, or leaves because of one.
EXIT = re.compile(
    r"\bfa_fail\(|\bfa_file_fail\(|\bPyErr_(Set|Format|NoMemory)|\bfa_raise"
    r"|\bgoto (fail|done)\b|\breturn (NULL|-1|false|status);|\breturn FA_E"
    r"|\bfailed = -1;"
)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def run(command: list[str], **options: Any) -> int:
    print("+", shlex.join(command), flush=True)
    return subprocess.run(command, check=False, **options).returncode


def build_extension(compiler: list[str]) -> None:
    """A copy of the package, by links, with an extension that counts."""
    package, objects = SITE / "flash_attn_rocm", FOLDER / "objects"
    shutil.rmtree(SITE, ignore_errors=True)
    package.mkdir(parents=True)
    objects.mkdir(exist_ok=True)
    for path in (ROOT / "flash_attn_rocm").iterdir():
        if not path.name.startswith("_C.") and path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for name in ("hipsim", "build_support"):
        (SITE / name).symlink_to(ROOT / name)
    include = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_path('include')}"]
    sources = [
        path
        for part in ("host", "python")
        for path in sorted((ROOT / "csrc" / part).glob("*.c"))
        if path.name != "reference.c"
    ]

    def compile_one(source: Path) -> str:
        target = objects / f"{source.parent.name}-{source.stem}.o"
        command = [*compiler, *COUNTERS, *FLAGS, *include, "-c", str(source)]
        subprocess.run([*command, "-o", str(target)], check=True)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compile_one, sources))
    target = str(package / "_C.abi3.so")
    link = [*compiler, "--coverage", "-shared", "-pthread", "-o", target, *made]
    subprocess.run([*link, "-lm", "-ldl"], check=True)


def run_c_tests(compiler: list[str]) -> bool:
    make = ["make", "--no-print-directory", "-C", str(ROOT / "tests/c")]
    counting = shlex.join([*compiler, *COUNTERS])
    return run([*make, f"CC={counting}", f"BUILD={FOLDER / 'ctest'}", "OPT=-O0"]) == 0


def run_python_tests(workers: int, arguments: list[str]) -> bool:
    names = [n for n in TESTS if (ROOT / "tests" / n).exists()]
    tests = [
        str(ROOT / word) if (ROOT / word.split("::")[0]).exists() else word
        for word in arguments or [f"tests/{name}" for name in names]
    ]  # pytest starts elsewhere, where the package is the one that counts
    parallel = ["-n", str(workers)] if workers > 1 else []
    environ = {
        **os.environ,
        **{"PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1", "HIPSIM_THREADS": "1"},
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--rootdir={ROOT}", *parallel, *tests]
    return run(command, cwd=SITE, env=environ) == 0


def read_counters() -> dict[Path, dict[int, list[dict[str, int]]]]:
    """For each source and line what gcov says of it, once for each build."""
    found: dict[Path, dict[int, list[dict[str, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for path in sorted(
        [*FOLDER.glob("objects/*.gcda"), *FOLDER.rglob("ctest/**/*.gcda")]
    ):
        command = ["gcov", "--json-format", "--stdout", path.name]
        out = subprocess.run(command, cwd=path.parent, capture_output=True, check=True)
        for text in out.stdout.decode().splitlines():
            unit = json.loads(text)
            for of_file in unit["files"]:
                source = Path(unit["current_working_directory"], of_file["file"])
                for line in of_file["lines"]:
                    found[source.resolve()][line["line_number"]].append(line)
    return found


def exits_of(source: Path) -> dict[int, str]:
    """The lines that are error exits, without comments."""
    text = source.read_text(encoding="utf-8")
    text = COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    lines = enumerate(text.splitlines(), 1)
    return {n: line.strip() for n, line in lines if EXIT.search(line)}


def report() -> int:
    """Prints what was not reached; returns how many lines."""
    counters = read_counters()
    exits = missing = 0
    for part in ("host", "python"):
        for source in sorted((ROOT / "csrc" / part).glob("*.c")):
            if source.name == "reference.c":
                continue
            lines = counters.get(source, {})
            for number, text in exits_of(source).items():
                seen = lines.get(number)
                if seen is None and lines:
                    continue  # a declaration, or the rest of a statement
                exits += 1
                # Reached in full by one of the builds.
                if seen and any(
                    s["count"] > 0 and not s["unexecuted_block"] for s in seen
                ):
                    continue
                missing += 1
                kind = "in part" if seen and any(s["count"] for s in seen) else "never"
                print(f"{source.relative_to(ROOT)}:{number}: {kind}: {text}")
    reached = exits - missing
    print(f"{reached} of {exits} lines with an error exit were reached")
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("c", "python", "report"))
    parser.add_argument("-n", type=int, default=1, help="processes of pytest")
    options, arguments = parser.parse_known_args()
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    FOLDER.mkdir(parents=True, exist_ok=True)
    passed = True
    if options.only is None:
        for path in FOLDER.rglob("*.gcda"):
            path.unlink()
    if options.only in (None, "c"):
        passed = run_c_tests(compiler) and passed
    if options.only in (None, "python"):
        build_extension(compiler)
        passed = run_python_tests(options.n, arguments) and passed
    missing = report()
    return 0 if passed and missing == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
