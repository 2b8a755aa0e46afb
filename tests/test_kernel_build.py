"""The kernel build: which architectures, which compiler, what it refuses.

Compiles real kernels where a clang is installed; the compiler search itself is
tested with small scripts that pretend to be clang.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from build_support import code_objects, compilers, products, standin

ROOT = products.KERNELS.parent.parent
LIBRARY = ROOT / "hipsim" / "libhipsim.so"
PATH = os.environ["PATH"]
FULL = os.environ.get("FA_TEST") == "full"

needs_library = pytest.mark.skipif(
    not LIBRARY.exists(), reason="hipsim/libhipsim.so is not built"
)


def installed(name: str) -> str:
    """The name, if it is a clang that will do; skips the test otherwise."""
    try:
        compilers.find_clang({"FA_CLANG": name, "PATH": PATH})
    except products.BuildError as error:
        pytest.skip(str(error).split(";")[0])
    return name


@pytest.fixture
def any_clang() -> compilers.Clang:
    try:
        return compilers.find_clang({"PATH": PATH})
    except products.BuildError as error:
        pytest.skip(str(error))


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def pretend_clang(
    path: Path, version: str = "22.1.0", targets: str = "amdgcn", works: str = "true"
) -> Path:
    """A program that answers what the search asks; `works` makes an object."""
    return script(
        path,
        f"""case "$*" in
        *--version*) echo "some clang version {version}";;
        *-print-targets*) echo "    {targets} - a target";;
        *gfx942*) echo "error: invalid target ID 'gfx942'" >&2; exit 1;;
        *) {works};;
        esac""",
    )


def search(folder: Path, **environ: str) -> compilers.Clang:
    """find_clang that sees nothing but `folder`."""
    return compilers.find_clang({"PATH": str(folder), **environ}, folder / "opt")


# ---- architectures ----------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["gfx906"]),
        ({"FA_ARCHS": ""}, ["gfx906"]),
        ({"PYTORCH_ROCM_ARCH": "gfx1100"}, ["gfx1100"]),
        ({"FA_ARCHS": "gfx90a", "PYTORCH_ROCM_ARCH": "gfx1100"}, ["gfx90a"]),
        ({"FA_ARCHS": "gfx906;gfx1100, gfx90a gfx900"}, None),
        ({"FA_ARCHS": "gfx906:sramecc+:xnack-;gfx906"}, ["gfx906"]),
        ({"FA_ARCHS": "none", "PYTORCH_ROCM_ARCH": "gfx1100"}, []),
    ],
)
def test_fa_archs_is_over_pytorch_rocm_arch_is_over_gfx906(environ, expected):
    if expected is None:
        expected = ["gfx906", "gfx1100", "gfx90a", "gfx900"]
    assert compilers.wanted_archs(environ) == (expected, False)


def test_all_is_every_row_once_and_may_skip():
    archs, may_skip = compilers.wanted_archs({"FA_ARCHS": "all"})
    assert archs[1] == "gfx906" and "gfx1201" in archs and may_skip
    assert len(set(archs)) == len(archs)


@pytest.mark.parametrize("bad", ["mi50", "gfx906;all", "sm_80", "gfx9-generic"])
def test_a_name_that_is_no_architecture_is_named(bad):
    with pytest.raises(products.BuildError, match="is no architecture") as error:
        compilers.wanted_archs({"FA_ARCHS": bad})
    assert "FA_ARCHS" in str(error.value)


def test_a_missing_architecture_is_skipped_only_from_all(tmp_path):
    clang = compilers.Clang(pretend_clang(tmp_path / "clang"), "clang version 22")
    said: list[str] = []
    archs = ["gfx906", "gfx942"]
    assert compilers.usable_archs(clang, archs, True, said.append) == ["gfx906"]
    assert len(said) == 1 and "gfx942 skipped: clang version 22" in said[0]
    with pytest.raises(products.BuildError, match=r"gfx942.*does not know it"):
        compilers.usable_archs(clang, archs, False, said.append)


# ---- compiler ---------------------------------------------------------------


def test_rocm_comes_first_then_clang_then_the_newest_number(tmp_path):
    for name in ("clang-9", "clang-16", "clang-22", "clang-cpp-22"):
        pretend_clang(tmp_path / name)
    assert search(tmp_path).path.name == "clang-22"
    pretend_clang(tmp_path / "clang")
    assert search(tmp_path).path == tmp_path / "clang"
    pretend_clang(tmp_path / "opt/rocm-5.7/llvm/bin/clang")
    pretend_clang(tmp_path / "opt/rocm-6.2/llvm/bin/clang")
    assert "rocm-6.2" in str(search(tmp_path).path)
    pretend_clang(tmp_path / "mine/llvm/bin/clang")
    chosen = search(tmp_path, ROCM_PATH=str(tmp_path / "mine"))
    assert "mine" in str(chosen.path)


def test_a_clang_that_will_not_do_is_passed_over(tmp_path):
    pretend_clang(tmp_path / "clang", targets="x86-64")
    pretend_clang(tmp_path / "clang-99", works="exit 1")
    pretend_clang(tmp_path / "clang-18")
    assert search(tmp_path).path.name == "clang-18"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"targets": "x86-64"}, "without the AMDGPU target"),
        ({"version": "14.0.6"}, "clang 14, older than 15"),
        ({"version": "16.0.6", "works": "exit 1"}, "lld-16"),
    ],
)
def test_a_named_clang_is_refused_with_the_reason(tmp_path, options, why):
    pretend_clang(tmp_path / "clang")
    bad = pretend_clang(tmp_path / "mine", **options)
    with pytest.raises(products.BuildError, match=why) as error:
        search(tmp_path, FA_CLANG=str(bad))
    assert "FA_CLANG" in str(error.value) and "\n" not in str(error.value)
    assert search(tmp_path, FA_CLANG="clang").path.name == "clang"


@pytest.mark.parametrize("named", ["", "no-such-clang"])
def test_without_a_compiler_one_sentence_says_what_to_install(tmp_path, named):
    with pytest.raises(products.BuildError) as error:
        search(tmp_path, FA_CLANG=named)
    message = str(error.value)
    assert "apt-get install clang-15 lld-15" in message
    assert "FA_ARCHS=none" in message and "\n" not in message


def test_none_needs_no_compiler_and_no_simulator(tmp_path):
    environ = {"PATH": str(tmp_path), "FA_ARCHS": "none"}
    out = tmp_path / "code"
    missing = tmp_path / "libhipsim.so"
    assert code_objects.build_code_objects(out, missing, print, environ) == {}
    assert [path.name for path in out.iterdir()] == ["manifest.json"]


# ---- what is built ----------------------------------------------------------


@pytest.mark.parametrize("name", ["clang-15", "clang-22"])
@needs_library
def test_gfx906_kernels_spill_nothing(name, kernels_by):
    _, made = kernels_by(name)
    rows = products.variants(products.KERNELS)
    for target, entry in made.items():
        kernels = entry["kernels"]
        unit = target.removeprefix("gfx906_")
        assert {k["name"] for k in kernels} == {
            row.symbol for row in rows if row.unit == unit
        }
        plain = {row.symbol for row in rows if row.plain}
        for kernel in kernels:
            assert kernel["vgpr_spills"] == kernel["private_bytes"] == 0
            assert kernel["sgpr_spills"] == 0 or kernel["name"] not in plain
            assert kernel["waves_per_simd"] >= 1
    assert list(made) == [f"gfx906_{unit}" for unit in products.units(rows)]


ROW = (
    "FA_VARIANT({}, FA_FORWARD, FA_{}, FA_READS_F16 | FA_READS_BF16, 64, FA_PLAIN, "
    "128, 64, 256, 0)\n"
)
SMALL = """#include "value.h"
extern "C" __attribute__((global, amdgpu_flat_work_group_size(256, 256)))
void NAME(int *p) { *p = VALUE; }
"""


def small_sources(folder: Path) -> Path:
    """Kernels of two units that take no time to compile."""
    folder.mkdir()
    for unit in ("f16", "f64"):
        text = f"#define NAME small_{unit}\n{SMALL}"
        (folder / f"fa_{unit}.hip").write_text(text, encoding="utf-8")
    (folder / "value.h").write_text("#define VALUE 1\n", encoding="utf-8")
    rows = ROW.format("small_f16", "F16") + ROW.format("small_f64", "F64")
    (folder / "variants.def").write_text(rows, encoding="utf-8")
    return folder


def objects(out: Path) -> set[str]:
    return {path.name for path in out.glob("*.co")}


@needs_library
def test_an_unchanged_kernel_is_not_built_again(tmp_path, any_clang):
    sources, out = small_sources(tmp_path / "kernels"), tmp_path / "code"
    environ = {"FA_CLANG": str(any_clang.path), "PATH": PATH}

    def build(**more: str) -> list[str]:
        said: list[str] = []
        code_objects.build_code_objects(
            out, LIBRARY, said.append, {**environ, **more}, sources
        )
        return [line.split(":")[0] for line in said]

    def states(f16: str, f64: str, arch: str = "gfx906") -> list[str]:
        return [f"fa_{arch}_f16.co {f16}", f"fa_{arch}_f64.co {f64}"]

    assert build() == states("built", "built")
    stamp = (out / "fa_gfx906_f16.co").stat().st_mtime_ns
    assert build() == states("unchanged", "unchanged")
    assert (out / "fa_gfx906_f16.co").stat().st_mtime_ns == stamp
    # damage and a changed source both count
    (out / "fa_gfx906_f16.co").write_bytes(b"damaged")
    assert build() == states("built", "unchanged")
    (out / "manifest.json").write_text("{", encoding="utf-8")
    assert build() == states("built", "built")
    assert build(FA_ARCHS="gfx90a") == states("built", "built", "gfx90a")
    assert len(objects(out)) == 4
    (sources / "value.h").write_text("#define VALUE 2\n", encoding="utf-8")
    assert build() == states("built", "built")
    # the other ones belonged to sources that are gone
    assert objects(out) == {"fa_gfx906_f16.co", "fa_gfx906_f64.co"}
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest.keys() == {"gfx906_f16", "gfx906_f64"}
    assert manifest["gfx906_f64"]["arch"] == "gfx906"
    assert "clang version" in manifest["gfx906_f16"]["compiler"]


@needs_library
def test_a_build_leaves_no_temporary_files_behind(tmp_path, any_clang, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    environ = {"FA_CLANG": str(any_clang.path), "PATH": PATH}
    sources = small_sources(tmp_path / "kernels")
    code_objects.build_code_objects(tmp_path / "code", LIBRARY, print, environ, sources)
    assert list(temporary.iterdir()) == []


@needs_library
def test_objects_of_another_folder_are_copied_if_they_would_be_the_same(
    tmp_path, any_clang
):
    sources, first = small_sources(tmp_path / "kernels"), tmp_path / "first"
    environ = {"FA_CLANG": str(any_clang.path), "PATH": PATH}

    def build(out: Path, *others: Path, **more: str) -> list[str]:
        said: list[str] = []
        code_objects.build_code_objects(
            *(out, LIBRARY, said.append, {**environ, **more}, sources), others=others
        )
        return [line.split(":")[0].split("_", 2)[2] for line in said]

    made = code_objects.build_code_objects(first, LIBRARY, print, environ, sources)
    empty = tmp_path / "none"
    assert build(tmp_path / "a", empty, first) == ["f16.co copied", "f64.co copied"]
    for name in ("manifest.json", "fa_gfx906_f16.co", "fa_gfx906_f64.co"):
        assert (tmp_path / "a" / name).read_bytes() == (first / name).read_bytes()
    assert build(tmp_path / "a", first) == ["f16.co unchanged", "f64.co unchanged"]
    assert json.loads((tmp_path / "a/manifest.json").read_text()).keys() == made.keys()
    # neither damaged ones nor those for another card or of other sources
    (first / "fa_gfx906_f16.co").write_bytes(b"damaged")
    assert build(tmp_path / "b", first) == ["f16.co built", "f64.co copied"]
    other = build(tmp_path / "c", first, FA_ARCHS="gfx90a")
    assert other == ["f16.co built", "f64.co built"]
    (sources / "value.h").write_text("#define VALUE 2\n", encoding="utf-8")
    assert build(tmp_path / "d", first) == ["f16.co built", "f64.co built"]


@needs_library
def test_each_unit_must_hold_its_own_kernels(tmp_path, any_clang):
    sources = small_sources(tmp_path / "kernels")
    swapped = ROW.format("small_f16", "F64") + ROW.format("small_f64", "F16")
    (sources / "variants.def").write_text(swapped, encoding="utf-8")
    environ = {"FA_CLANG": str(any_clang.path), "PATH": PATH}
    with pytest.raises(code_objects.GateError, match=r"small_f\d\d: not in the object"):
        code_objects.build_code_objects(
            tmp_path / "code", LIBRARY, print, environ, sources
        )


# Keeps 300 values alive at once, in 256 registers.
SPILLS = """
extern "C" __attribute__((global{bounds})) void greedy(float *p)
{{
    float x[300];
#pragma unroll
    for (int i = 0; i < 300; i++) {{ x[i] = p[i * 256]; }}
    __builtin_amdgcn_s_barrier();
#pragma unroll
    for (int i = 0; i < 300; i++) {{ p[i * 256] = x[i] * x[299 - i] + x[i / 2]; }}
}}
"""


def greedy(folder: Path, bounds: str) -> Path:
    folder.mkdir()
    (folder / "fa_f32.hip").write_text(SPILLS.format(bounds=bounds), encoding="utf-8")
    (folder / "variants.def").write_text(ROW.format("greedy", "F32"), encoding="utf-8")
    return folder


@needs_library
def test_the_gate_names_a_kernel_that_spills_and_keeps_it_out(tmp_path, any_clang):
    sources = greedy(tmp_path / "kernels", ", amdgpu_flat_work_group_size(256, 256)")
    out = tmp_path / "code"
    environ = {"FA_CLANG": str(any_clang.path), "PATH": PATH}
    with pytest.raises(code_objects.GateError, match=r"greedy: \d+ spilled vector"):
        code_objects.build_code_objects(out, LIBRARY, print, environ, sources)
    assert not out.exists() or not list(out.glob("*.co"))
    # reported, not refused, elsewhere
    environ["FA_ARCHS"] = "gfx908"
    made = code_objects.build_code_objects(out, LIBRARY, print, environ, sources)
    assert "greedy" in code_objects.table(made)


@needs_library
def test_the_gate_names_a_kernel_without_launch_bounds(tmp_path, any_clang):
    sources = greedy(tmp_path / "kernels", "")
    environ = {"FA_CLANG": str(any_clang.path), "PATH": PATH}
    with pytest.raises(code_objects.GateError, match="greedy: bounded to 1024 threads"):
        code_objects.build_code_objects(tmp_path, LIBRARY, print, environ, sources)


GOOD = {
    "name": "k",
    "vgprs": 100,
    "vgpr_spills": 0,
    "sgpr_spills": 0,
    "private_bytes": 0,
    "lds_bytes": 32768,
    "max_threads": 256,
}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"sgpr_spills": 3}, "k: 3 spilled scalar registers"),
        ({"private_bytes": 16}, "k: 16 bytes of scratch"),
        ({"lds_bytes": 16384}, "k: 16384 bytes of LDS, expected 32768"),
        ({"name": "other"}, "k: not in the object"),
    ],
)
def test_the_gate_checks_each_resource(change, fault):
    rows = [products.Variant("k", "f16", 256, 32768)]
    faults = code_objects.gate([{**GOOD, **change}], rows)
    assert [f.startswith(fault) for f in faults] == ([True] if fault else [])


def test_the_gate_lets_kernels_with_features_keep_scalars_in_vector_registers():
    row = products.Variant("k", "f16", 256, 32768, plain=False)
    assert not code_objects.gate([{**GOOD, "sgpr_spills": 3}], [row])
    assert code_objects.gate([{**GOOD, "sgpr_spills": 3, "private_bytes": 4}], [row])
    assert code_objects.gate([{**GOOD, "vgpr_spills": 1}], [row])


def test_the_gate_refuses_more_lds_than_a_compute_unit_has():
    kernel = {**GOOD, "lds_bytes": 65537}
    assert code_objects.gate([kernel], [products.Variant("k", "f16", 256, 65537)])


@pytest.mark.parametrize(
    ("arch", "vgprs", "lds", "waves"),
    [
        ("gfx906", 128, 32768, 2),
        ("gfx906", 129, 32768, 1),
        ("gfx906", 128, 32769, 1),
        ("gfx906", 24, 0, 10),
        ("gfx906", 25, 0, 9),
        ("gfx90a", 129, 0, 3),
        ("gfx1100", 64, 0, None),
    ],
)
def test_waves_per_simd_follow_registers_and_lds(arch, vgprs, lds, waves):
    kernel = {"vgprs": vgprs, "lds_bytes": lds, "max_threads": 256}
    assert code_objects.waves_per_simd(arch, kernel) == waves


def test_variants_are_read_from_the_table():
    rows = products.variants(products.KERNELS)
    assert len(rows) >= 4 and all(row.threads == 256 for row in rows)
    assert all(row.symbol.startswith("fa_") for row in rows)
    assert sorted(products.units(rows)) == ["f16", "f32", "f64"]
    (prepare,) = [row.unit for row in rows if row.symbol == "fa_prepare"]
    assert prepare == "f32"  # what it computes in, whatever it reads


# ---- the command ------------------------------------------------------------


def command(
    *arguments: str, cwd: Path = ROOT, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "build_support.code_objects", *arguments],
        cwd=cwd,
        env={"PATH": PATH, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@needs_library
def test_the_command_prints_the_table_or_json(tmp_path, any_clang):
    """The kernels that ship are those of `make build`, which the command finds done;
    that it compiles what is not, kernels show that take no time. FA_TEST=full: all."""
    clang, out = {"FA_CLANG": str(any_clang.path)}, tmp_path / "code"
    if not FULL:
        shutil.copytree(ROOT / "flash_attn_rocm" / "_code", out)
    words = ("--archs", "gfx906", "--out", str(out))
    done = command(*words, **clang)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split()[:4] == ["arch", "kernel", "VGPR", "SGPR"]
    assert rows_of(done.stdout) == {
        row.symbol for row in products.variants(products.KERNELS)
    }
    done = command("--json", *words, **clang)
    assert "gfx906_f16" in json.loads(done.stdout)

    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "build_support", tree / "build_support")
    (tree / "csrc").mkdir()
    small_sources(tree / "csrc" / "kernels")
    words = ("--archs", "gfx906", "--library", str(LIBRARY))
    done = command(*words, cwd=tree, **clang)
    assert done.returncode == 0, done.stderr
    code = tree / "flash_attn_rocm" / "_code"
    (code / "fa_gfx906_f64.co").unlink()
    done = command(*words, cwd=tree, **clang)
    assert "fa_gfx906_f64.co built" in done.stderr
    assert "fa_gfx906_f16.co built" not in done.stderr
    assert rows_of(done.stdout) == {"small_f16", "small_f64"}


def rows_of(table: str) -> set[str]:
    """The kernels of a table that the command has printed."""
    return {line.split()[1] for line in table.splitlines()[1:]}


def test_exit_codes_of_the_command(tmp_path):
    out = str(tmp_path)
    assert command("--help").returncode == 0
    assert command("--no-such-option").returncode == 2
    assert command("--archs", "mi50", "--out", out).returncode == 2
    done = command("--archs", "gfx906", "--out", out, FA_CLANG="no-such-clang")
    assert done.returncode == 2 and done.stderr.startswith("error: FA_CLANG=")


def test_the_simulator_library_is_asked_for_by_name(tmp_path):
    """And before minutes of compiling, which a pretended clang would notice."""
    missing, compiled = str(tmp_path / "none.so"), tmp_path / "compiled"
    works = f'case "$*" in *fa_f*) touch {compiled};; esac'
    clang = pretend_clang(tmp_path / "clang", works=works)
    out = ("--out", str(tmp_path), "--archs", "gfx906")
    done = command("--library", missing, *out, FA_CLANG=str(clang))
    assert done.returncode == 2
    assert missing in done.stderr and "make build" in done.stderr
    assert not compiled.exists()


# ---- the stand-in -----------------------------------------------------------


def test_standin_without_nvcc_says_so(tmp_path):
    with pytest.raises(products.BuildError, match="no nvcc"):
        standin.build_standin(tmp_path, print, {"PATH": str(tmp_path)})
    done = command("--standin", "--out", str(tmp_path), PATH=str(tmp_path))
    assert done.returncode == 2 and "no nvcc" in done.stderr


def some_of_each_kind(folder: Path) -> Path:
    """The kernels' sources with the rows of the smallest head dim of each kind (pass,
    arithmetic, types, level), and of the largest of each forward."""
    shutil.copytree(products.KERNELS, folder)
    file = folder / "variants.def"
    kinds: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for row in re.findall(
        r"^FA_VARIANT\(.*\)\n", file.read_text(encoding="utf-8"), re.M
    ):
        _, *kind, dim, level = (cell.strip() for cell in row.split(",")[:6])
        kinds.setdefault((*kind, level), []).append((int(dim), row))
    chosen = {min(own) for own in kinds.values()}
    chosen |= {max(own) for kind, own in kinds.items() if kind[0] == "FA_FORWARD"}
    file.write_text("".join(row for _, row in sorted(chosen)), encoding="utf-8")
    return folder


def test_standin_compiles_the_same_kernels(tmp_path, monkeypatch):
    """For one card some kernels of each kind: what nvcc may refuse is the source of
    their templates, which is the same for all head dims but for sums of long rows; with
    little optimisation. FA_TEST=full: all kernels, all cards, as they are built."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    sources = products.KERNELS
    if not FULL:
        monkeypatch.setattr(standin, "ARCHS", standin.ARCHS[-1:])
        quick = ("-Xcicc", "-O1", "-Xptxas", "-O0")
        flags = (*(flag for flag in standin.FLAGS if flag != "-O3"), *quick)
        monkeypatch.setattr(standin, "FLAGS", flags)
        sources = some_of_each_kind(tmp_path / "kernels")
    rows = products.variants(sources)
    made = standin.build_standin(tmp_path, print, sources=sources)
    for arch in standin.ARCHS:
        for unit in products.units(rows):
            kernels = made[f"{arch}_{unit}"]["kernels"]
            symbols = {row.symbol for row in rows if row.unit == unit}
            assert {kernel["name"] for kernel in kernels} == symbols
            # reported, not gated: some kernels need one register more than the 255
            # of an NVIDIA lane
            assert all(kernel["spill_bytes"] >= 0 for kernel in kernels)
            assert (tmp_path / f"fa_{arch}_{unit}.cubin").exists()
