"""LLVM's assembler, linker and disassembler, for the instruction tests.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import hipsim

TARGET = ("-triple=amdgcn-amd-amdhsa", "-mcpu=gfx906")
VERSIONS = ("-22", "-21", "-20", "-19", "-18", "-15", "")

# A kernel: s[4:5] kernel arguments, s6 workgroup id, v0 work-item id.
HEAD = """
    .amdgcn_target "amdgcn-amd-amdhsa--gfx906:sramecc+:xnack-"
"""
KERNEL = """
    .text
    .globl {name}
    .p2align 8
    .type {name},@function
{name}:
{body}
.L{name}_end:
    .size {name}, .L{name}_end-{name}
    .rodata
    .p2align 6
    .amdhsa_kernel {name}
        .amdhsa_user_sgpr_private_segment_buffer 1
        .amdhsa_user_sgpr_kernarg_segment_ptr 1
        .amdhsa_user_sgpr_flat_scratch_init {flat_scratch}
        .amdhsa_kernarg_size {kernarg}
        .amdhsa_group_segment_fixed_size {lds}
        .amdhsa_private_segment_fixed_size {private}
        .amdhsa_system_sgpr_private_segment_wavefront_offset {uses_private}
        .amdhsa_next_free_vgpr {vgprs}
        .amdhsa_next_free_sgpr 96
        .amdhsa_float_round_mode_32 {round32}
        .amdhsa_float_round_mode_16_64 {round64}
        .amdhsa_float_denorm_mode_32 {denorm32}
        .amdhsa_float_denorm_mode_16_64 {denorm64}
        .amdhsa_ieee_mode {ieee}
    .end_amdhsa_kernel
"""


def lane_pointers(source: str, target: str) -> str:
    """v[2:3] = s[8:9] and v[4:5] = s[10:11], plus byte offsets in two VGPRs."""
    return f"""
    v_mov_b32 v2, s8
    v_mov_b32 v3, s9
    v_add_co_u32 v2, vcc, v2, {source}
    v_addc_co_u32 v3, vcc, 0, v3, vcc
    v_mov_b32 v4, s10
    v_mov_b32 v5, s11
    v_add_co_u32 v4, vcc, v4, {target}
    v_addc_co_u32 v5, vcc, 0, v5, vcc
"""


METADATA = """
    .amdgpu_metadata
---
amdhsa.version: [ 1, 1 ]
amdhsa.target: amdgcn-amd-amdhsa--gfx906:sramecc+:xnack-
amdhsa.kernels:
{kernels}
...
    .end_amdgpu_metadata
"""
KERNEL_METADATA = """  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: {kernarg}
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: {private}
    .wavefront_size: 64
    .sgpr_count: 96
    .vgpr_count: {vgprs}
    .max_flat_workgroup_size: 1024
    .args:
{args}"""
DEFAULTS = {
    "vgprs": 256,
    "lds": 0,
    "private": 0,
    "flat_scratch": 0,
    "round32": 0,
    "round64": 0,
    "denorm32": 3,
    "denorm64": 3,
    "ieee": 1,
}


@functools.cache
def tool(name: str) -> str:
    """The newest LLVM tool of this name, or the test is skipped."""
    for version in VERSIONS:
        path = shutil.which(name + version)
        if path is not None:
            return path
    pytest.skip(f"no {name}: install LLVM with the AMDGPU target")


def run(*command: str, text: str = "") -> str:
    """Standard output of a tool that must succeed."""
    result = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[:20000]
    return result.stdout


def kernels_source(
    bodies: Mapping[str, tuple[str, Mapping[str, int]]], pointers: int = 2
) -> str:
    """Assembly of kernels, name: (body, settings), with so many pointers."""
    args = "".join(
        f"      - {{ .offset: {8 * i}, .size: 8, .value_kind: global_buffer,"
        " .address_space: global }\n"
        for i in range(pointers)
    )
    text, metadata = [HEAD], []
    for name, (body, settings) in bodies.items():
        values: dict[str, object] = {**DEFAULTS, **settings, "name": name}
        values["uses_private"] = int(DEFAULTS["private"] < settings.get("private", 0))
        values |= {"body": body, "kernarg": 8 * pointers, "args": args}
        text.append(KERNEL.format(**values))
        metadata.append(KERNEL_METADATA.format(**values))
    return "".join(text) + METADATA.format(kernels="".join(metadata))


def kernel_source(body: str, pointers: int = 2, **settings: int) -> str:
    """Assembly of one kernel called `kernel`."""
    return kernels_source({"kernel": (body, settings)}, pointers)


def link(*sources: str) -> bytes:
    """The code object of these assembly files, each assembled on its own."""
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder) / f"{i}.o") for i in range(len(sources))]
        for source, target in zip(sources, objects):
            run(
                *(tool("llvm-mc"), *TARGET, "-mattr=+sramecc,-xnack"),
                *("-filetype=obj", "-o", target, "-"),
                text=source,
            )
        linked = Path(folder) / "a.co"
        run(tool("ld.lld"), "-shared", "-o", str(linked), *objects)
        return linked.read_bytes()


def assemble(body: str, pointers: int = 2, **settings: int) -> bytes:
    """The code object of one kernel with this body and so many pointers."""
    return link(kernel_source(body, pointers, **settings))


def assemble_words(words: Iterable[int]) -> bytes:
    """The code object of a kernel that consists of these dwords."""
    return assemble("\n".join(f"    .long {w:#x}" for w in words))


def normal(text: str) -> str:
    """One spelling for white space."""
    return " ".join(text.split())


def objdump(image: bytes) -> dict[str, dict[int, str]]:
    """{symbol: {offset: instruction}} as LLVM disassembles it."""
    with tempfile.NamedTemporaryFile(suffix=".co") as file:
        file.write(image)
        file.flush()
        text = run(tool("llvm-objdump"), "-d", "--mcpu=gfx906", file.name)
    listing: dict[str, dict[int, str]] = {}
    start = 0
    for line in text.splitlines():  # hundreds of thousands: no patterns
        code, mark, place = line.rpartition("// ")
        if line.endswith(">:"):  # "0000000000001000 <kernel>:"
            at, _, name = line[:-2].partition(" <")
            start = int(at, 16)
            current = listing.setdefault(name, {})
        elif mark:  # "  s_nop 0    // 000000001000: BF800000"
            current[int(place.partition(":")[0], 16) - start] = normal(code)
    return listing


def ours(image: bytes) -> dict[str, dict[int, str]]:
    """The same from the simulator's own disassembler."""
    listing: dict[str, dict[int, str]] = {}
    for line in hipsim.disassemble(image).splitlines():
        at, _, code = line.partition(":")
        if line and not code:  # "kernel:"
            current = listing.setdefault(at, {})
        elif code:  # "  1000:  s_nop 0"
            current[int(at, 16)] = normal(code)
    return listing
