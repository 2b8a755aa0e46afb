"""What pip builds and installs, and what the set-up says when something is missing.

Builds run in a copy of the tree, which takes over the compiled objects of this one,
so that they cost seconds.  FA_TEST=full also compiles every kernel again, and builds
from the unpacked sdist, from nothing.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT, needs_simulator

import flash_attn_rocm as fa

COPIED = (".clang-format", "MANIFEST.in", "LICENSE", "Makefile", "README.md")
COPIED += ("pyproject.toml", "setup.py", "requirements-dev.txt", "CHANGELOG.md")
FOLDERS = ("build_support", "csrc", "flash_attn_rocm", "hipsim", "scripts", "tests")
FULL = os.environ.get("FA_TEST") == "full"
BUILT = ("*.so", "_code", "__pycache__", "*.egg-info")


@pytest.fixture
def tree(tmp_path):
    """A copy of the sources with this tree's compiled objects, without products."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in COPIED:
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, copy / name)
    for name in FOLDERS:
        ignore = shutil.ignore_patterns(*BUILT)
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    if (ROOT / "build" / "objects").exists():
        shutil.copytree(ROOT / "build" / "objects", copy / "build" / "objects")
    return copy


def run(*command, cwd, **environ):
    """stdout and stderr together, and the exit code."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.stdout, done.returncode


def build_ext(tree, **environ):
    return run(
        sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tree, **environ
    )


def pip_wheel(tree, out, **environ):
    """Builds a wheel as a user does, with build isolation; needs a package index."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", out, "."]
    output, code = run(*command, cwd=tree, **environ)
    if code and "No matching distribution found for setuptools" in output:
        pytest.skip("no package index to take setuptools from")
    assert code == 0, output
    (wheel,) = Path(out).glob("*.whl")
    return wheel


def error_lines(output):
    return [line for line in output.splitlines() if line.startswith("error:")]


@needs_simulator
def test_wheel_built_in_isolation_holds_all_parts_and_runs(tree, tmp_path):
    """The unit of float64, the smallest, is compiled; the others are those that
    `make build` left in the tree. FA_TEST=full compiles all."""
    code = tree / "flash_attn_rocm" / "_code"
    if FULL:
        code.mkdir()
    else:
        shutil.copytree(ROOT / "flash_attn_rocm" / "_code", code)
        (code / "fa_gfx906_f64.co").unlink()
    (code / "fa_gfx1100_f16.co").write_bytes(b"not asked for")
    wheel = pip_wheel(tree, tmp_path / "out", FA_ARCHS="gfx906")
    assert re.fullmatch(rf"flash_attn_rocm-{fa.__version__}-cp39-abi3-.*", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"flash_attn_rocm-{fa.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        archive.extractall(tmp_path / "site")
    assert {
        "flash_attn_rocm/_C.abi3.so",
        "flash_attn_rocm/_code/fa_gfx906_f16.co",
        "flash_attn_rocm/_code/fa_gfx906_f32.co",
        "flash_attn_rocm/_code/fa_gfx906_f64.co",
        "flash_attn_rocm/_code/manifest.json",
        "flash_attn_rocm/_commands/profile.py",
        "flash_attn_rocm/py.typed",
        "hipsim/libhipsim.so",
    } <= names
    assert not [name for name in names if "gfx1100" in name]
    folders = {name.split("/")[0] for name in names}
    assert folders == {"flash_attn_rocm", "hipsim", info}
    needs = re.findall(r"^Requires-Dist: .*", metadata, re.MULTILINE)
    # pip must not exchange a ROCm torch
    assert needs == ['Requires-Dist: prometheus_client>=0.16; extra == "metrics"']
    assert "License-Expression: BSD-3-Clause" in metadata
    assert "hipsim = hipsim.cli:main" in scripts
    assert "flash-attn-rocm = flash_attn_rocm._commands:main" in scripts

    program = (
        "import torch, flash_attn_rocm as fa, torch.nn.functional as F\n"
        "q = torch.ones(1, 1, 3, 64, dtype=torch.float16)\n"
        "with fa.patched(), fa.simulate('gfx906'):\n"
        "    assert F.scaled_dot_product_attention(q, q, q).eq(1).all()\n"
        "print(fa.last_call().backend, fa.__file__)\n"
    )
    site = str(tmp_path / "site")
    output, code = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=site)
    assert code == 0 and output.startswith(f"sim {site}"), output

    program = (
        "import sys, pytest\n"
        "sys.modules['build_support'] = None  # is not installed\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    suite = str(ROOT / "tests" / "test_gradcheck.py")
    options = ("--collect-only", "-q", "-p", "no:cacheprovider")
    output, code = run(
        *(sys.executable, "-c", program, *options, suite),
        cwd=tmp_path,
        PYTHONPATH=site,
    )
    assert code == 0 and re.search(r"^\d+ tests collected", output, re.M), output


@pytest.mark.parametrize("name", ["flash_attn_rocm/_C.abi3.so", "hipsim/libhipsim.so"])
def test_libraries_need_nothing_but_the_c_library(name):
    if not (ROOT / name).exists() or shutil.which("readelf") is None:
        pytest.skip(f"{name} is not built here, or there is no readelf")
    output, _ = run("readelf", "-d", ROOT / name, cwd=ROOT)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output)
    allowed = r"(libc|libm|libdl|libpthread|ld-linux.*|lib[atu][a-z]*san)\.so\.\d+"
    assert needed and all(re.fullmatch(allowed, library) for library in needed), needed


def test_sdist_holds_every_source(tree, tmp_path):
    output, code = run(
        sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path, cwd=tree
    )
    assert code == 0, output
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    wanted = {
        str(path.relative_to(tree))
        for folder in FOLDERS
        for path in (tree / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted | {"setup.py", "pyproject.toml", "Makefile", "LICENSE"} <= names
    assert not [name for name in names if name.endswith((".so", ".co", ".o"))]
    if FULL:
        with tarfile.open(archive) as file:
            file.extractall(tmp_path / "unpacked")
        (unpacked,) = (tmp_path / "unpacked").iterdir()
        pip_wheel(unpacked, tmp_path / "out", FA_WERROR="1", FA_ARCHS="gfx906")


def test_no_architectures_needs_no_kernel_compiler(tree):
    output, code = build_ext(tree, FA_ARCHS="none", FA_CLANG="/no/such/clang")
    assert code == 0, output
    assert (tree / "hipsim" / "libhipsim.so").exists()
    assert not list((tree / "flash_attn_rocm").rglob("*.co"))


def test_wheel_holds_no_code_object_of_an_earlier_build(tree):
    stale = tree / "out" / "flash_attn_rocm" / "_code" / "fa_gfx1100_f16.co"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"old")
    command = [sys.executable, "setup.py", "-q", "build_ext", "-b", "out"]
    output, code = run(*command, cwd=tree, FA_ARCHS="none")
    assert code == 0, output
    assert not stale.exists()


def test_a_build_with_other_flags_replaces_the_libraries(tree):
    ask = "from flash_attn_rocm import _C; print(_C.build_info()['debug'])"
    answers = []
    for debug in ("1", "0"):  # the objects of the second are older than the first's
        build = ("setup.py", "-q", "build_ext", "--inplace")
        text, code = run(
            sys.executable, *build, cwd=tree, FA_ARCHS="none", FA_DEBUG=debug
        )
        assert code == 0, text
        text, code = run(sys.executable, "-c", ask, cwd=tree, PYTHONPATH=str(tree))
        assert code == 0, text
        answers.append(text.split()[-1])
    assert answers == ["True", "False"]


def test_missing_kernel_compiler_is_one_sentence(tree):
    output, code = build_ext(tree, FA_ARCHS="gfx906", FA_CLANG="/no/such/clang")
    assert code == 1 and "Traceback" not in output
    (line,) = error_lines(output)
    assert "FA_CLANG=/no/such/clang" in line and "apt-get install clang-15" in line
    assert not (tree / "hipsim" / "libhipsim.so").exists(), "found out too late"


def test_unknown_architecture_is_one_sentence(tree):
    output, code = build_ext(tree, FA_ARCHS="mi50")
    assert code == 1 and "Traceback" not in output
    (line,) = error_lines(output)
    assert "mi50" in line and "gfx906" in line


def test_missing_c_compiler_is_one_sentence(tree):
    output, code = build_ext(tree, FA_ARCHS="none", CC="/no/such/cc")
    assert code == 1 and "Traceback" not in output
    (line,) = error_lines(output)
    assert "/no/such/cc" in line and "apt-get install gcc" in line


def test_c_and_python_have_one_version():
    extension = fa.build_info()["extension"]
    if extension is None:
        pytest.skip("the extension is not built here")
    assert extension["version"] == fa.__version__


@pytest.fixture
def bootstrap(monkeypatch):
    """scripts/bootstrap.py as a module, on a machine without the right to install."""
    path = ROOT / "scripts" / "bootstrap.py"
    spec = importlib.util.spec_from_file_location("bootstrap", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(module, "works", lambda *command: False)
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    return module


def candidates(*offered):
    """An apt-cache that offers these versions of clang, lld and llvm."""

    def output_of(*command):
        versions = [name.rsplit("-", 1)[1] for name in command[2:]]
        return "".join(
            f"Candidate: {'1:1.0' if int(v) in offered else '(none)'}\n"
            for v in versions
        )

    return output_of


def test_setup_prints_the_command_where_it_may_not_install(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap, "missing_packages", lambda: {"clang": []})
    monkeypatch.setattr(bootstrap, "output_of", candidates(14, 15, 16))
    with pytest.raises(bootstrap.Stop) as stop:
        bootstrap.install_packages()
    assert (
        "sudo apt-get install -y --no-install-recommends "
        "clang-16 clang-tools-16 lld-16 llvm-16"
    ) in str(stop.value)


def test_setup_names_every_missing_package_at_once(bootstrap, monkeypatch):
    lacks = {"a C compiler": ["gcc", "libc6-dev"], "clang": []}
    monkeypatch.setattr(bootstrap, "missing_packages", lambda: lacks)
    monkeypatch.setattr(bootstrap, "output_of", candidates(22))
    with pytest.raises(bootstrap.Stop, match=r"gcc libc6-dev clang-22 .* llvm-22"):
        bootstrap.install_packages()


def test_setup_says_so_if_no_clang_is_new_enough(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap, "output_of", candidates(13, 14))
    with pytest.raises(bootstrap.Stop, match="FA_CLANG="):
        bootstrap.newest_clang()


def test_setup_installs_nothing_where_nothing_is_missing(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap, "missing_packages", dict)
    monkeypatch.setattr(bootstrap.subprocess, "run", None)  # calling it would fail
    bootstrap.install_packages()


def unpacked(name, folder):
    """A package that has been unpacked."""
    programs = folder / "usr" / "bin"
    programs.mkdir(parents=True)
    for program in ("prometheus", "promtool"):
        (programs / program).write_text(name)
    return True


def test_setup_puts_prometheus_beside_python_and_installs_none(
    bootstrap, monkeypatch, tmp_path
):
    asked = []
    monkeypatch.setattr(
        bootstrap.shutil, "which", lambda name, path: asked.append(path)
    )
    monkeypatch.setattr(bootstrap, "unpack_package", unpacked)
    monkeypatch.setattr(bootstrap.subprocess, "run", None)  # calling it would fail
    bootstrap.add_monitors(str(tmp_path / "python"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prometheus", "promtool"]
    assert asked[0].split(os.pathsep)[0] == str(tmp_path), "a second run finds them"


def test_setup_goes_on_without_prometheus(bootstrap, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name, path: None)

    def run(command, **options):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    bootstrap.add_monitors(str(tmp_path / "python"))
    assert "will skip" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


def test_setup_asks_for_torch_by_a_name_that_no_cuda_wheel_has(bootstrap, monkeypatch):
    asked = []
    monkeypatch.setattr(bootstrap, "torch_of", lambda python: None)
    monkeypatch.setattr(
        bootstrap, "pip_install", lambda *arguments: bool(asked.append(arguments))
    )
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    with pytest.raises(bootstrap.Stop, match="TORCH_INDEX_URL=URL"):
        bootstrap.install_torch("python3")
    assert len(asked) == 2  # the configured sources, then PyTorch's CPU index
    assert all(f"torch=={bootstrap.TORCH}+cpu" in arguments for arguments in asked)
    assert bootstrap.TORCH_INDEX_URL in asked[1]


def test_setup_takes_torch_from_the_index_that_the_user_names(bootstrap, monkeypatch):
    asked = []
    monkeypatch.setattr(bootstrap, "torch_of", lambda python: None)
    monkeypatch.setattr(
        bootstrap, "pip_install", lambda *arguments: not asked.append(arguments)
    )
    monkeypatch.setenv("TORCH_INDEX_URL", "https://example.org/cpu")
    bootstrap.install_torch("python3")
    assert "https://example.org/cpu" in asked[0]
