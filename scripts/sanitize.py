"""Runs the C tests and the simulator's tests under ASan, UBSan and TSan.

    python scripts/sanitize.py [--only address,undefined | thread] [-n WORKERS]

For each of the two: the C tests of the host layer on a simulator that is built
with it, then the simulator's Python tests on the same library, loaded into an
uninstrumented Python by LD_PRELOAD. The library lies, with a copy of the package
`hipsim`, in build/sanitize-*; nothing else is touched. Left out are the oracles of
single instructions, whose cases say nothing about memory or threads.

Leaks are looked for in the C tests only: Python keeps memory on purpose. Under TSan
launches use four threads. Exit code 1 if anything was found.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_REPORTS = 5  # printed; all lie in build/sanitize-*/report.*
SETS = {"address,undefined": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
FLAGS = (
    "-std=c11 -O1 -g -ffp-contract=off -fvisibility=hidden -fPIC -pthread "
    "-fno-omit-frame-pointer -fno-sanitize-recover=all"
).split()

# Everything that loads, launches, checks, counts or reports; of the oracles of single
# instructions those about memory. Threads matter to launches alone.
TESTS = {
    "address,undefined": [
        *("test_object.py", "test_runtime.py", "test_threads.py", "test_hip_calls.py"),
        *("test_faults.py", "test_lines.py", "test_fuzz_corpus.py"),
        *("test_exec_memory.py", "test_exec_forms.py", "test_compiled.py"),
        "test_profile.py",
        *("test_check_races.py", "test_check_undefined.py", "test_check_waits.py"),
    ],
    "thread": [
        *("test_runtime.py", "test_threads.py", "test_hip_calls.py", "test_faults.py"),
        *("test_exec_memory.py", "test_compiled.py", "test_profile.py"),
        *("test_check_races.py", "test_check_waits.py"),
    ],
}
# LSan would report Python's own.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": f"die_after_fork=0:suppressions={ROOT}/scripts/tsan.supp",
}


def build(sanitizers: str, compiler: list[str]) -> Path:
    """The folder that holds the package `hipsim` with the library in it."""
    folder = ROOT / "build" / ("sanitize-" + sanitizers.replace(",", "-"))
    package, objects = folder / "hipsim", folder / "objects"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(
        ROOT / "hipsim", package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    objects.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, f"-fsanitize={sanitizers}"]
    sources = sorted((ROOT / "csrc/sim").glob("*.c"))
    headers = [p for kind in ("*.h", "*.def") for p in (ROOT / "csrc/sim").glob(kind)]
    newest = max(path.stat().st_mtime for path in [*headers, Path(__file__)])

    def compile_one(source: Path) -> Path:
        target = objects / f"{source.stem}.o"
        changed = max(newest, source.stat().st_mtime)
        if not target.exists() or target.stat().st_mtime < changed:
            subprocess.run(
                [*compiler, *flags, "-c", str(source), "-o", str(target)], check=True
            )
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [str(path) for path in pool.map(compile_one, sources)]
    library = package / "libhipsim.so"
    command = [*compiler, *flags, "-shared", "-Wl,-Bsymbolic", "-o", str(library)]
    subprocess.run([*command, *made, "-lm"], check=True)
    return folder


def runtime_libraries(sanitizers: str, compiler: list[str]) -> str:
    """What LD_PRELOAD needs, since Python does not link it."""
    paths = []
    for name in SETS[sanitizers]:
        answer = subprocess.run(
            [*compiler, f"-print-file-name={name}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        if not Path(answer).is_file():
            raise SystemExit(
                f"{shlex.join(compiler)} has no {name}; Debian, Ubuntu: "
                "apt-get install gcc (its libgcc-*-dev brings the sanitizers)"
            )
        paths.append(str(Path(answer).resolve()))
    return ":".join(paths)


def reports_of(folder: Path) -> list[Path]:
    """Files that a sanitizer wrote: pytest does not show what a worker prints."""
    return sorted(folder.glob("report.*"))


def run(title: str, folder: Path, command: list[str], **environment: str) -> bool:
    """Runs it, prints its verdict; true if it found nothing."""
    start = time.monotonic()
    for path in reports_of(folder):
        path.unlink()
    result = subprocess.run(command, cwd=folder, env={**os.environ, **environment})
    reports = reports_of(folder)
    for path in reports[:MAX_REPORTS]:
        print(f"---- {path}\n{path.read_text(errors='replace')[:4000]}")
    clean = result.returncode == 0 and not reports
    verdict = f"exit code {result.returncode}, {len(reports)} reports"
    verdict = "clean" if clean else verdict
    print(f"{title}: {verdict}, {time.monotonic() - start:.0f} s", flush=True)
    return clean


def check(sanitizers: str, workers: int) -> bool:
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    folder = build(sanitizers, compiler)
    preload = runtime_libraries(sanitizers, compiler)
    threads = "4" if sanitizers == "thread" else "2"
    c_options = {**OPTIONS, "ASAN_OPTIONS": "detect_leaks=1"}
    clean = run(
        f"C tests, {sanitizers}",
        ROOT,
        [
            *("make", "--no-print-directory", "-C", "tests/c"),
            *(f"FA_SANITIZE={sanitizers}", f"SIM={folder}/hipsim/libhipsim.so"),
        ],
        HIPSIM_THREADS=threads,
        **c_options,
    )
    tests = [str(ROOT / "tests" / "sim" / name) for name in TESTS[sanitizers]]
    clean &= run(
        f"simulator, {sanitizers}",
        folder,  # so that the copy of hipsim there is the one imported
        [
            *(sys.executable, "-m", "pytest", "-q", "-n", str(workers)),
            *(
                f"--rootdir={ROOT}",
                f"--confcutdir={ROOT}/tests/sim",
                "-c",
                str(ROOT / "pyproject.toml"),
                *tests,
            ),
        ],
        LD_PRELOAD=preload,
        PYTHONPATH=str(folder),
        HIPSIM_THREADS=threads,
        FA_TEST="quick",
        **{name: f"{text}:log_path={folder}/report" for name, text in OPTIONS.items()},
    )
    return clean


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=list(SETS), help="one set of sanitizers")
    parser.add_argument("-n", type=int, default=os.cpu_count() or 1, metavar="WORKERS")
    options = parser.parse_args()
    chosen = [options.only] if options.only else list(SETS)
    results = [check(sanitizers, options.n) for sanitizers in chosen]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
