"""The decoder and disassembler against LLVM's.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import collections
import itertools
import os
import random
import re
import shutil
import struct
import subprocess
from pathlib import Path

import isa_tools
import pytest
from encodings_gfx906 import FORMATS
from isa_tools import TARGET, assemble, assemble_words, objdump, ours, tool

import hipsim

SIM = Path(__file__).resolve().parents[2] / "csrc" / "sim"
NOP = 0xBF800000
FULL = os.environ.get("FA_TEST") == "full"

# Instructions that LLVM decodes and the lists leave out, and why. They must
# stop. A pattern matches whole mnemonics, and none that the lists have.
NOT_IMPLEMENTED = {
    r"image_\w+|exp|v_interp_\w+|v_screen_\w+|s_setkill|s_endpgm_ordered_ps_done":
        "pictures and pixels: no compute kernel of ours or of HIP without textures",
    r"t?buffer_(load|store)_format_\w+":
        "conversions by the descriptor's format: no HIP or OpenCL builtin leads there",
    r"s_(buffer_)?atomic_\w+|s_buffer_store_\w+|s_scratch_\w+":
        "scalar writes: compilers never emit them",
    r"s_atc_probe\w*|s_dcache_discard\w*": "cache hints of drivers",
    r"s_cbranch_(g_fork|i_fork|join)|s_setvskip": "old ways to diverge, not emitted",
    r"s_cbranch_cdbg\w+|s_rfe_\w*b64|s_sendmsghalt": "traps and debuggers",
    r"ds_\w+_src2_\w+|ds_wrap_\w+|ds_condxchg32_\w+|ds_\w+_addtid_\w+":
        "LDS forms that compilers do not emit",
    r"ds_gws_\w+|ds_ordered_count": "the global data share, which is not simulated",
    r"v_cvt_pkaccum_u8_f32": "not emitted",
}  # fmt: skip

# Forms of implemented instructions that stop, too, as whole lines.
STOPPING_FORMS = {
    r"s_sendmsg (?!sendmsg\(MSG_INTERRUPT\)$).*": "messages of graphics and drivers",
    r".*\bsrc_(lds_direct|pops_exiting_wave_id)\b.*": "for pixel shaders",
    r"s_movrels_b(32|64) \S+, src_\w+": "a register relative to a constant",
    r"v_((add|sub|subrev|subbrev)[cb]?_co_u32_e64|cmpx?_\w+_e64|cndmask_b32_e64)"
    r" (.*, )?src_\w+(, .*| clamp)?":
        "masks that are no pair of scalar registers",
    r"buffer_load_\w+ .* tfe( lds)?": "a word of status besides the data",
    r"buffer_(store|atomic)_\w+ .* tfe( lds)?": "the same",
    r"(v_pk_(mad|mul_lo|add|sub|lshlrev|lshrrev|ashrrev|max|min)_[iub]+16|v_dot[248]_[iu]32"
    r"_[iu]\d+) .* neg_(lo|hi):.*": "signs of integers",
    r"v_align(bit|byte)_b32 .*( op_sel:.*| clamp)": "no half to select, no sum",
    r"v_cvt_pkrtz_f16_f32 .* (mul|div):\d": "output modifiers of a pair",
    r"v_pk_(mul_lo|lshlrev|lshrrev|ashrrev|max|min)_[iub]+16 .* clamp":
        "integers that cannot overflow, or wrap",
    r"v_(and|or|xor|xnor|ashrrev|lshlrev|lshrrev|max|min|mul_lo|cndmask|mov|not"
    r"|mul_(hi_)?[iu]32)_\w+_sdwa .* clamp .*": "integers that cannot overflow",
    r"v_(bfrev_b32|ff[a-z]+_[iub]32|cvt_(norm_)?[iu]\w+|cvt_(rpi|flr)_i32_f32"
    r"|frexp_exp_\w+|sat_pk_u8_i16)_sdwa .* clamp .*": "the same",
    r"v_(min3|max3|med3)_[iu]16 .* clamp": "the same",
    r"v_(cvt_pk\w*_[iu](8|16)\w*|pack_b32_f16) .*clamp.*":
        "clamp of a pair or of bytes: not documented",
    r"v_(m?sad_\w+|m?q?sad_\w+|mad_[iu]32_[iu]16|mad_[iu]64_[iu]32|mad_legacy_[iu]16"
    r"|mqsad_\w+) .* clamp": "sums whose saturation is not documented",
}  # fmt: skip

# Words per format: 200,000 in all. Formats without any instruction of ours
# get few.
FEW = ("SEGMENT3", "RESERVED", "MIMG", "VINTRP", "EXP", "MTBUF")
WORDS = {name: 1000 if name in FEW else 7900 for name in FORMATS}


def invalid(text: str) -> bool:
    return ".long" in text or "/*" in text


def encode(lines: list[str]) -> list[bytes | None]:
    """What LLVM's assembler makes of each line; None where it refuses."""
    command = [tool("llvm-mc"), *TARGET, "-mattr=+sramecc,-xnack", "-show-encoding"]
    result = subprocess.run(
        command, input="\n".join(lines) + "\n", capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    refused = {int(n) for n in re.findall(r"<stdin>:(\d+):\d+: error", result.stderr)}
    found = iter(re.findall(r"encoding: \[(.*)\]", result.stdout))
    return [
        None if i in refused else bytes(int(x, 16) for x in next(found).split(","))
        for i in range(1, len(lines) + 1)
    ]


def matches(table: dict[str, str], text: str) -> bool:
    return any(re.fullmatch(pattern, text) for pattern in table)


@pytest.mark.parametrize("name", list(FORMATS))
def test_random_encodings_read_as_llvm_reads_them(name: str) -> None:
    """Equal text and size; both refuse; or ours refuses a form named above, or
    words that LLVM's own reading of them does not assemble to."""
    rng = random.Random(name)
    slots = [FORMATS[name].word(rng) for _ in range(WORDS[name] * (5 if FULL else 1))]
    image = assemble_words(w for slot in slots for w in (*slot, NOP))
    theirs, mine = objdump(image)["kernel"], ours(image)["kernel"]
    refused: list[tuple[int, str]] = []
    wrong, same, printed = [], 0, set()
    for i, slot in enumerate(slots):
        left, right = theirs[12 * i], mine[12 * i]
        if not invalid(right):
            printed.add(right.split()[0])
        if invalid(left) and invalid(right):
            continue
        sizes = [12 * i + 4 in listing for listing in (theirs, mine)]
        if left == right and sizes[0] == sizes[1]:
            same += 1
        elif invalid(right) and not invalid(left):
            refused.append((i, left))
        else:
            wrong.append(f"{slot[0]:08x} {slot[1]:08x}: {left} | {right}")
    back = encode([text for _, text in refused])
    for (i, text), code in zip(refused, back):
        raw = b"".join(word.to_bytes(4, "little") for word in slots[i])
        if code is None or not raw.startswith(code):
            continue
        if not matches(NOT_IMPLEMENTED, text.split()[0]) and not matches(
            STOPPING_FORMS, text
        ):
            wrong.append(f"{raw.hex(' ', 4)}: {text} | not decoded")
    assert not wrong, f"{len(wrong)}, LLVM | ours:\n" + "\n".join(wrong[:20])
    assert same >= len(slots) * 0.03 or name in FEW, f"only {same} read by both"
    loose = [n for n in printed if matches(NOT_IMPLEMENTED, n)]
    assert not loose, f"implemented, yet excluded: {loose}"


def test_reserved_selects_and_misplaced_literals_do_not_decode() -> None:
    """What the random words leave out, since LLVM 22 can crash on it."""
    selects = [
        (0x7E0802F9, 0x00060008 | field)
        for field in (7 << 8, 6 << 8 | 3 << 11, 6 << 8 | 7 << 16)
    ]
    selects.append((0x020804F9, 0x07060608))  # v_add_f32_sdwa, src1_sel 7
    literals = [
        (0xD1010004, 255 | 0x104 << 9),  # v_add_f32_e64
        (0xD1CB0004, 0x104 | 0x104 << 9 | 255 << 18),  # v_fma_f32
        (0xD38F4004, 0x104 | 255 << 9 | 3 << 27),  # v_pk_add_f16
        (0xE0500000, 255 << 24 | 1 << 16),  # buffer_load_dword
    ]
    slots = selects + literals
    mine = ours(assemble_words(w for slot in slots for w in (*slot, NOP)))["kernel"]
    assert [mine[12 * i][:5] for i in range(len(slots))] == [".long"] * len(slots)


@pytest.mark.parametrize("clang", ["clang-22", "clang-15"])
def test_our_kernels_disassemble_as_llvm_says(clang: str, kernels_by) -> None:
    folder, _ = kernels_by(clang)
    for unit in ("f16", "f32", "f64"):
        compare((folder / f"fa_gfx906_{unit}.co").read_bytes())


ATOMIC_ADD = "__hip_atomic_fetch_add(&out[n], 1.0f, __ATOMIC_RELAXED, 4);"
SOURCE = """
typedef _Float16 half2 __attribute__((ext_vector_type(2)));
GLOBAL void mixed(float *out, const half2 *a, const half2 *b, const double *d,
                  const unsigned *u, int n)
{
    SHARED float tile[256];
    int i = index();
    float sum = 0;
    for (int k = 0; k < n; k++) {
        sum = __builtin_amdgcn_fdot2(a[i + k], b[i ^ k], sum, false);
    }
    tile[lane()] = __builtin_sqrtf(sum) / (1.0f + tile[lane() ^ 1]);
    barrier();
    double x = d[i] * d[i + 1] / (d[i + 2] + 1.0);
    unsigned long long wide = (unsigned long long)u[i] * u[i + 1];
    wide += wide << (u[2] & 63);
    int spread = __builtin_amdgcn_ds_bpermute(4 * (i ^ 5), (int)(wide >> 7));
    float down = (float)(unsigned char)u[i + 3] + (float)(short)u[i + 4];
    ATOMIC_ADD
    out[i] = tile[255 - lane()] + (float)x + spread % (n + 3) + down / 3.0f
             + __builtin_exp2f(sum) + (float)(a[i] * b[i] + a[1]).x;
}
"""


@pytest.mark.parametrize("level", ["-O0", "-O1", "-O2", "-O3"])
@pytest.mark.parametrize("clang", ["clang-22", "clang-15"])
def test_compiled_code_disassembles_as_llvm_says(
    clang: str, level: str, tmp_path: Path
) -> None:
    from conftest import PRELUDE

    if shutil.which(clang) is None:
        pytest.skip(f"no {clang}")
    code, out = tmp_path / "k.hip", tmp_path / "k.co"
    # clang-15 does not know the builtin.
    text = SOURCE.replace("ATOMIC_ADD", "" if clang == "clang-15" else ATOMIC_ADD)
    code.write_text(PRELUDE + text)
    abi = 4 if clang == "clang-15" else 5
    result = subprocess.run(
        [clang, "-x", "hip", "-nogpulib", "-nogpuinc", "--cuda-device-only",
         "--no-gpu-bundle-output", "--offload-arch=gfx906:sramecc+:xnack-", level,
         f"-mcode-object-version={abi}", "-o", out, code],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[:2000]
    compare(out.read_bytes())


def text_of(image: bytes) -> bytes:
    """Section .text of a code object: kernels and the functions they call."""
    table, size, count, names = (
        *struct.unpack_from("<Q", image, 40), *struct.unpack_from("<3H", image, 58)
    )  # fmt: skip
    sections = [struct.unpack_from("<IIQQQQ", image, table + i * size)
                for i in range(count)]  # fmt: skip
    for name, _, _, _, offset, length in sections:
        at = sections[names][4] + name
        if image[at : image.index(b"\0", at)] == b".text":
            return image[offset : offset + length]
    raise AssertionError("no .text")


def compare(image: bytes) -> None:
    text = text_of(image)
    whole = assemble_words(struct.unpack(f"<{len(text) // 4}I", text))
    theirs, mine = objdump(whole)["kernel"], {}
    # Half a megabyte at a time: a kernel of more is not one that we print.
    edges = [0, *(next(o for o in sorted(theirs) if o >= at)
                  for at in range(1 << 19, len(text), 1 << 19)), len(text)]  # fmt: skip
    for start, end in itertools.pairwise(edges):
        words = struct.unpack(f"<{(end - start) // 4}I", text[start:end])
        part = ours(assemble_words(words))["kernel"]
        mine.update({start + offset: line for offset, line in part.items()})
    wrong = [
        f"{offset:#x}: {theirs.get(offset)} | {mine.get(offset)}"
        for offset in sorted(theirs.keys() | mine.keys())
        if theirs.get(offset) != mine.get(offset)
    ]
    assert not wrong, "LLVM | ours:\n" + "\n".join(wrong[:20])
    assert len(mine) > 50


BUILDS = [(None, 6, "-O0"), (None, 4, "-O2"), ("clang-15", 4, "-O3")]
if FULL:
    BUILDS = [
        (clang, abi, level)
        for clang, abi in ((None, 6), (None, 4), ("clang-15", 4))
        for level in ("-O0", "-O1", "-O2", "-O3")
    ]


@pytest.mark.parametrize(("clang", "abi", "level"), BUILDS)
def test_test_kernels_disassemble_as_llvm_says(
    clang: str | None, abi: int, level: str, compile_hip
) -> None:
    """Calls, stacks, atomics, divisions; and the expressions of every type."""
    import test_compiled
    import test_compiled_ops

    old = clang == "clang-15"
    rows = test_compiled_ops.expressions("integers", old)
    rows += test_compiled_ops.expressions("floats", old)
    for source in (test_compiled.SOURCE, test_compiled_ops.source(rows, device=True)):
        flags = (*test_compiled_ops.FLAGS, "-w")
        compare(compile_hip(source, *flags, level=level, abi=abi, clang=clang))


def test_index_instructions_and_traps_read_as_llvm_reads_them() -> None:
    image = assemble("""
    s_set_gpr_idx_on s20, gpr_idx(SRC0)
    s_set_gpr_idx_on 63, gpr_idx(SRC0,SRC1,SRC2,DST)
    s_set_gpr_idx_on 0, gpr_idx()
    s_set_gpr_idx_idx vcc_hi
    s_set_gpr_idx_mode gpr_idx(SRC1,DST)
    .long 0xbf9d0013
    s_set_gpr_idx_off
    s_trap 3
    s_endpgm""")
    theirs = objdump(image)["kernel"]
    got = ours(image)["kernel"]
    assert len(got) >= 9 and all(theirs[at] == text for at, text in got.items())


def test_each_opcode_of_a_format_has_one_instruction() -> None:
    """The tables as the C compiler sees them, after all macros."""
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang", "clang-22")), None)
    if compiler is None:
        pytest.skip("no C compiler to expand the lists")
    text = isa_tools.run(
        compiler, "-std=c11", "-E", "-P", f"-I{SIM}", str(SIM / "isa_lists.c")
    )
    tables = re.findall(r"uint16_t (\w+)_table\[(\d+)\] = \{(.*?)\};", text, re.S)
    assert len(tables) == 16
    for name, size, rows in tables:
        entries = re.findall(r"\[([^]]*)\]\s*=\s*(ISA_\w+)", rows)
        assert len(entries) == rows.count("="), f"{name}: a row was not understood"
        # Sums of hexadecimal numbers in parentheses.
        opcodes = [
            sum(int(n, 16) for n in re.findall(r"0x[0-9a-f]+", opcode))
            for opcode, _ in entries
        ]
        twice = [hex(n) for n, k in collections.Counter(opcodes).items() if k > 1]
        assert not twice, f"{name}: {twice}"
        assert len({op for _, op in entries}) == len(entries), f"{name}: a name twice"
        assert 0 < len(opcodes) and max(opcodes) < int(size)


def test_an_unknown_instruction_stops_with_its_bits() -> None:
    image = assemble("    s_nop 0\n    s_cbranch_join s1\n    s_endpgm", pointers=0)
    with (
        hipsim.Module(image) as module,
        pytest.raises(hipsim.HipError, match=r"\.long 0xbe802e01"),
    ):
        module.kernel("kernel").launch((1, 1, 1), (64, 1, 1), [])


@pytest.mark.parametrize(
    ("word", "reason"),
    [(0xC4000000, "exports"), (0xD4000000, "interpolation"), (0xE8000000, "MTBUF"),
     (0xF0000100, "images"), (0xC2020202, "scalar memory"), (0xD8680000, "DS"),
     (0xDC000000, "FLAT"), (0xE0000000, "buffer"),
     (0xBF8B0000, "not an instruction")],
)  # fmt: skip
def test_what_is_left_out_stops_and_says_what_it_is(word: int, reason: str) -> None:
    with (
        hipsim.Module(assemble(f"    .long {word:#x}, 0", pointers=0)) as module,
        pytest.raises(
            hipsim.HipError, match=rf"pc 0x0 \(.long {word:#010x}\).*{reason}"
        ),
    ):
        module.kernel("kernel").launch((1, 1, 1), (64, 1, 1), [])
