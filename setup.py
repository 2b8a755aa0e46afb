"""Builds what pyproject.toml cannot describe; needs no torch, ROCm or CUDA.

Three products, in this order:
  flash_attn_rocm/_C.abi3.so   CPython extension    csrc/host, csrc/python
  hipsim/libhipsim.so          simulator, plain C   csrc/sim
  flash_attn_rocm/_code/       code objects         csrc/kernels, by build_support

Switches, all from the environment:
  FA_ARCHS     gfx906;gfx1100, all or none (over PYTORCH_ROCM_ARCH over gfx906)
  FA_CLANG     the compiler for the kernels
  FA_DEBUG     1: -O0 -g with asserts
  FA_SANITIZE  address,undefined or another list that the C compiler knows
  FA_WERROR    1: warnings of the C compiler are errors

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # an isolated build does not look here by itself

from build_support.code_objects import build_code_objects  # noqa: E402
from build_support.compilers import find_clang, wanted_archs  # noqa: E402
from build_support.products import BuildError  # noqa: E402

SIMULATOR = "hipsim.libhipsim"
LIMITED_API = "0x03090000"  # Python 3.9, the lowest that is served


def version() -> str:
    text = (ROOT / "flash_attn_rocm/_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert match, "flash_attn_rocm/_version.py has no __version__ line"
    return match[1]


def compile_flags() -> list[str]:
    # -fexceptions: torch's errors are thrown through our frames (torch_args.c).
    flags = ["-std=c11", "-ffp-contract=off", "-fvisibility=hidden", "-fexceptions"]
    flags += "-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wvla".split()
    if os.environ.get("FA_DEBUG") == "1":
        flags += ["-O0", "-g", "-UNDEBUG"]
    else:
        # Aligned functions: without, the simulator's speed depended by 15 % on what
        # unrelated code lay before its hot loops.
        flags += ["-O3", "-g0", "-DNDEBUG", "-falign-functions=64"]
    if os.environ.get("FA_WERROR") == "1":
        flags.append("-Werror")
    return flags + sanitizer_flags()


def sanitizer_flags() -> list[str]:
    names = os.environ.get("FA_SANITIZE")
    return [f"-fsanitize={names}", "-fno-omit-frame-pointer"] if names else []


def sources(*folders: str, without: str = "") -> list[str]:
    found = (path for folder in folders for path in (ROOT / folder).glob("*.c"))
    names = sorted(str(path.relative_to(ROOT)) for path in found)
    return [name for name in names if name != without]


def extensions() -> list[Extension]:
    headers = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.def")]
    common = {
        "include_dirs": ["csrc"],
        "depends": sorted(str(path.relative_to(ROOT)) for path in headers),
        "extra_compile_args": compile_flags(),
        "libraries": ["m", "dl"],
    }
    link = ["-pthread", *sanitizer_flags()]
    # The simulator's hip* functions must reach each other and never those of a
    # HIP runtime that is loaded beside it.
    alone = ["-Wl,-Bsymbolic"] if sanitizer_flags() else ["-Wl,-Bsymbolic,-z,defs"]
    name, sanitize = version(), os.environ.get("FA_SANITIZE", "")
    return [
        Extension(
            "flash_attn_rocm._C",
            # reference.c is the oracle of the C tests and no part of the product
            sources("csrc/host", "csrc/python", without="csrc/host/reference.c"),
            define_macros=[
                ("Py_LIMITED_API", LIMITED_API),
                ("FA_VERSION", f'"{name}"'),
                ("FA_SANITIZE", f'"{sanitize}"'),
            ],
            py_limited_api=True,
            extra_link_args=link,
            **common,
        ),
        Extension(
            SIMULATOR,
            sources("csrc/sim"),
            extra_link_args=[*link, *alone],
            **common,
        ),
    ]


class BuildAll(build_ext):
    """build_ext that also makes the simulator and the code objects."""

    def get_ext_filename(self, fullname: str) -> str:
        name = super().get_ext_filename(fullname)
        if fullname.split(".")[-1] == SIMULATOR.split(".")[-1]:
            # a plain shared library: no ABI in its name, no init function
            return str(Path(name).with_name("libhipsim.so"))
        return name

    def run(self) -> None:
        try:
            if wanted_archs(os.environ)[0]:
                find_clang(os.environ)  # before minutes of C: is there a compiler?
        except BuildError as error:
            raise PlatformError(str(error)) from None
        super().run()
        root = ROOT if self.inplace else Path(self.build_lib)
        code = root / "flash_attn_rocm" / "_code"
        others = []
        if not self.inplace:  # a wheel holds what FA_ARCHS says, not what it once said
            shutil.rmtree(code, ignore_errors=True)
            others = [ROOT / "flash_attn_rocm" / "_code"]  # of `make build`
        library = root / "hipsim" / "libhipsim.so"
        try:
            build_code_objects(code, library, report_news, others=others)
        except BuildError as error:
            raise PlatformError(str(error)) from None

    def build_extensions(self) -> None:
        check_toolchain(self.compiler.compiler_so[0])
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Compiles what changed, one object per source, on all cores.

        Objects lie in build/, by their flags, whatever command builds: an
        editable installation would otherwise compile in a new folder each time.
        """
        key = repr((self.compiler.compiler_so, self.compiler.include_dirs))
        key += repr((ext.extra_compile_args, ext.define_macros))
        folder = Path("build/objects", hashlib.sha256(key.encode()).hexdigest()[:12])
        newest = max(Path(path).stat().st_mtime for path in ext.depends)

        def compile_one(source: str) -> str:
            target = (folder / source).with_suffix(".o")
            changed = max(newest, Path(source).stat().st_mtime)
            if self.force or not target.exists() or target.stat().st_mtime < changed:
                self.compiler.compile(
                    [source],
                    output_dir=str(folder),
                    macros=ext.define_macros,
                    include_dirs=ext.include_dirs,
                    extra_postargs=ext.extra_compile_args,
                )
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, ext.sources))
        # By dates alone, objects of other flags that are older than the library that
        # lies there would not be linked again.
        self.compiler.force = True
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=ext.libraries,
            extra_postargs=ext.extra_link_args,
            build_temp=self.build_temp,
        )


def report_news(line: str) -> None:
    if " unchanged: " not in line:
        print(line)


def check_toolchain(compiler: str) -> None:
    """One clear sentence instead of a compiler's first error."""
    if shutil.which(compiler) is None:
        raise PlatformError(
            f"no C compiler: '{compiler}' was not found; install one "
            "(Debian, Ubuntu: apt-get install gcc libc6-dev) or name it in CC"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise PlatformError(
            f"no Python headers: {header} does not exist; install them "
            "(Debian, Ubuntu: apt-get install python3-dev)"
        )


setup(
    version=version(),
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildAll},
    options={"bdist_wheel": {"py_limited_api": "cp39"}},
)
