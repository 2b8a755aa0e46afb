"""Source lines of objects built with -g, in reports and disassembly.

The oracle is llvm-symbolizer, another reader of the same tables.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import array
import json
import random
import re
import struct

import isa_tools
import pytest

import hipsim
from hipsim import Buffer

SOURCE = """
#line 10 "inc/helper.h"
DEVICE inline float helper(float x, int n)
{
    for (int i = 0; i < n; i++) {
        x = x * 2.0f +
            __builtin_sqrtf(x);
    }
    return x;
}
#line 100 "dir.d/kernel.hip"
GLOBAL void first(float *out, const float *in, int n)
{
    int i = index();
    float x = in[i];
    if (n > 3) {
        x = helper(x, n);
    }
#line 5000 "/abs/other.inc"
    out[i] =
        x;
}
GLOBAL void second(float *out)
{
    out[index()] = 1.0f;
}
"""
VARIANTS = [
    (clang, version, level)
    for clang in ("clang-15", "clang-22")
    for version in (2, 4, 5)
    for level in ("-O0", "-O3")
]


def build(compile_hip, clang=None, version=5, level="-O3") -> bytes:
    return compile_hip(SOURCE, "-g", f"-gdwarf-{version}", level=level, clang=clang)


def lines_of(image: bytes) -> list[tuple[int, str]]:
    """(offset in its kernel, "file:line" or "") of each instruction."""
    rows, where = [], ""
    for text in hipsim.disassemble(image, lines=True).splitlines():
        if text.startswith("; "):
            where = "" if text == "; no line" else text[2:]
        elif text.endswith(":"):
            where = ""
        else:
            rows.append((int(text.split(":")[0], 16), where))
    return rows


@pytest.mark.parametrize(("clang", "version", "level"), VARIANTS)
def test_every_instruction_has_the_line_that_llvm_symbolizer_gives(
    compile_hip, tmp_path, clang, version, level
):
    image = build(compile_hip, clang, version, level)
    path = tmp_path / "a.co"
    path.write_bytes(image)
    symbols = isa_tools.run(isa_tools.tool("llvm-nm"), str(path))
    starts = {name: int(at, 16) for at, name in re.findall(r"(\w+) T (\w+)", symbols)}
    kernels = [k["name"] for k in hipsim.object_info(image)["kernels"]]
    addresses, ours, kernel = [], [], ""
    order = iter(kernels)
    for offset, where in lines_of(image):
        kernel = next(order) if offset == 0 else kernel
        addresses.append(starts[kernel] + offset)
        ours.append(where)
    answer = isa_tools.run(
        *(isa_tools.tool("llvm-symbolizer"), "--output-style=JSON", "--obj"),
        *(str(path), "--relativenames"),
        text="\n".join(map(hex, addresses)),
    )
    frames = [json.loads(line)["Symbol"][0] for line in answer.splitlines()]
    theirs = [f"{f['FileName']}:{f['Line']}" if f["Line"] else "" for f in frames]
    assert ours == theirs
    names = {"dir.d/kernel.hip", "/abs/other.inc"}
    if level == "-O3":  # else the helper is a function of its own, not shown
        names.add("inc/helper.h")
    assert names <= {w.rsplit(":")[0] for w in ours}


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("clang", ["clang-15", "clang-22"])
def test_report_of_a_fault_names_file_and_line(compile_hip, clang, version):
    with hipsim.Module(build(compile_hip, clang, version)) as module:
        with pytest.raises(hipsim.HipError) as caught:
            module.kernel("second").launch((1, 1, 1), (64, 1, 1), [bytes(8)])
    report = caught.value.report
    assert re.search(r"\(global_store_dword [^)]*\) at other\.inc:5005, work", report)


def test_without_debug_information_nothing_changes(compile_hip):
    plain, debug = compile_hip(SOURCE), build(compile_hip)
    assert hipsim.disassemble(plain, lines=True) == hipsim.disassemble(plain)
    assert "; " not in hipsim.disassemble(debug)
    with hipsim.Module(plain) as module:
        with pytest.raises(
            hipsim.HipError, match=r"\(global_store_dword [^)]*\), workgroup"
        ):
            module.kernel("second").launch((1, 1, 1), (64, 1, 1), [bytes(8)])


def sections(image: bytes) -> dict[str, tuple[int, int]]:
    """{name: (offset, bytes)} of an ELF file."""
    headers = struct.unpack_from("<Q", image, 40)[0]
    count, names = struct.unpack_from("<HH", image, 60)
    rows = [
        struct.unpack_from("<II8x8xQQ", image, headers + 64 * i) for i in range(count)
    ]
    table = rows[names][2]
    found = {}
    for name, _, offset, size in rows:
        end = image.index(b"\0", table + name)
        found[image[table + name : end].decode()] = (offset, size)
    return found


@pytest.mark.parametrize("version", [4, 5])
def test_damaged_lines_cost_the_lines_and_nothing_else(compile_hip, version):
    image = build(compile_hip, version=version)
    plain = hipsim.disassemble(image)
    random_source, found = random.Random(version), sections(image)
    outcomes = set()
    for _ in range(400):
        damaged = bytearray(image)
        name = random_source.choice([n for n in found if n.startswith(".debug_line")])
        offset, size = found[name]
        for _ in range(random_source.randrange(1, 4)):
            at = offset + random_source.randrange(size)
            damaged[at] = random_source.choice((0, 0x7F, 0x80, 0xFF, damaged[at] ^ 1))
        text = hipsim.disassemble(bytes(damaged), lines=True)
        outcomes.add(text)
        rest = [row for row in text.split("\n") if not row.startswith("; ")]
        assert "\n".join(rest) == plain
    assert len(outcomes) > 50 and plain in outcomes


def test_faults_at_different_lines_are_told_apart(compile_hip):
    source = """
#line 1 "a.hip"
GLOBAL void pick(int *good, int *bad, int which)
{
    if (which == 0) { bad[0] = 1; }
    good[0] = 2;
    if (which == 1) {
        bad[1] = 3;
    }
}
"""
    good, lines = array.array("i", [0]), []
    with hipsim.Module(compile_hip(source, "-g", level="-O0")) as module:
        for which in range(2):
            arguments = [Buffer(good), bytes(8), which.to_bytes(4, "little")]
            with pytest.raises(hipsim.HipError) as caught:
                module.kernel("pick").launch((1, 1, 1), (1, 1, 1), arguments)
            lines.append(re.search(r"at a\.hip:(\d+)", caught.value.report)[1])
    assert lines == ["3", "6"]
