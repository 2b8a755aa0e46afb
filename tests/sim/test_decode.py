"""The decoder and disassembler against LLVM's.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import collections
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from isa_tools import TARGET, assemble, assemble_words, objdump, ours, tool

import hipsim

SIM = Path(__file__).resolve().parents[2] / "csrc" / "sim"
NOP = 0xBF800000
CONSTANTS = [*range(128, 209), *range(235, 239), *range(240, 249), 251, 252, 253]

# Rows that LLVM decodes and the lists leave out on purpose: they must stop.
NOT_IMPLEMENTED = re.compile(
    r"s_(mov)?rels|s_movrel|s_setvskip|s_set_gpr|s_cbranch_(g|i)_fork|s_cbranch_join"
    r"|s_cbranch_cdbg|s_sendmsg|s_setkill|s_rfe|s_scratch|s_atc|s_dcache_discard|atomic"
    r"|v_cube|v_cvt_pk_u8|v_cvt_pkaccum|v_trig|v_qsad|v_mqsad|v_interp|v_screen|_format_"
    r"|ds_.*(src2|wrxchg2|wrap|condxchg|gws|addtid|consume|append|ordered)"
    r"|src_pops|src_lds_direct|null| lds$| tfe"
)

# Modifiers without a documented effect: such rows stop, too. Signs of packed
# integers, clamp of integers that cannot overflow, DPP on 64-bit results.
USELESS = re.compile(
    r"(pk_\w+[iub]16|dot\d_[iu]32).* neg_.*\.long|clamp.*\.long|f64.*dpp.*\.long"
)


def source(rng: random.Random) -> int:
    """A 9-bit source code that names something."""
    kind = rng.randrange(4)
    if kind < 2:
        return 256 + rng.randrange(240)
    if kind == 2:
        return rng.choice(CONSTANTS)
    return rng.choice((2 * rng.randrange(50), 106, 124, 126))


def vop3(rng: random.Random) -> list[int]:
    opcode = rng.randrange(0x2A1)
    bits = rng.getrandbits
    mask = opcode in (0x1E0, 0x1E1, 0x1E8, 0x1E9) or 0x119 <= opcode <= 0x11E
    low = 2 * rng.randrange(50) if opcode < 256 or opcode == 0x289 else bits(8)
    high = bits(8) << 8 if bits(2) == 0 else 0
    if mask:
        high = 2 * rng.randrange(50) << 8 | bits(1) << 15
    sources = [source(rng), source(rng), 0]
    if 0x1C0 <= opcode < 0x280:
        sources[2] = source(rng)
    elif opcode in (0x100, 0x11C, 0x11D, 0x11E):
        sources[2] = 2 * rng.randrange(50)
    if opcode in (0x289, 0x28A):
        sources[:2] = [256 + bits(7) if opcode == 0x289 else bits(6), 2 * bits(5)]
    word = sources[0] | sources[1] << 9 | sources[2] << 18
    extra = bits(5) << 27 if bits(2) == 0 else 0
    return [0xD0000000 | opcode << 16 | low | high, word | extra]


def vop3p(rng: random.Random) -> list[int]:
    opcode = rng.choice([*range(0x13), *range(0x20, 0x24), *range(0x26, 0x2C)])
    bits = rng.getrandbits
    third = source(rng) << 18 if opcode in (0, 9, 14) or opcode >= 0x20 else 0
    modifiers = bits(8) << 8 if bits(1) else 0x4000
    extra = bits(5) << 27 if bits(1) else 3 << 27
    return [
        0xD3800000 | opcode << 16 | bits(8) | modifiers,
        source(rng) | source(rng) << 9 | third | extra,
    ]


def smem(rng: random.Random) -> list[int]:
    opcode = rng.choice((0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 16, 17, 18, 32, 33, 36, 37))
    if opcode >= 32:
        return [0xC0000000 | opcode << 18 | (4 << 6 if opcode >= 36 else 0), 0]
    bits = rng.getrandbits
    data = rng.choice((0, 4, 8, 16, 3, 106))
    flags = bits(1) << 14 | bits(2) << 16
    return [
        0xC0000000 | opcode << 18 | 2 * rng.randrange(25) | data << 6 | flags,
        bits(21) | bits(7) << 25,
    ]


def dpp(rng: random.Random) -> list[int]:
    bits = rng.getrandbits
    if bits(1):
        opcode = rng.choice([i for i in range(1, 0x50) if i not in (2, 0x35, 0x37)])
        first = 0x7E000000 | bits(8) << 17 | opcode << 9
    else:
        opcode = rng.choice([i for i in range(0x3C) if i not in (23, 24, 36, 37)])
        first = opcode << 25 | bits(8) << 17 | bits(8) << 9
    signs = bits(5) << 19 if bits(1) else bits(1) << 19
    return [first | 0xFA, bits(19) | signs | bits(8) << 24]


def pick(base: int, opcodes: int, shift: int, fields: int, second: bool = True):
    """Encodings of one dword of random fields, and a literal."""

    def make(rng: random.Random) -> list[int]:
        word = base | rng.randrange(opcodes) << shift
        word |= rng.getrandbits(32) & fields
        return [word, rng.getrandbits(32)] if second else [word]

    return make


def ds(rng: random.Random) -> list[int]:
    bits = rng.getrandbits
    word = bits(8)
    for shift in (8, 16, 24):
        word |= bits(8) << shift if bits(1) else 0
    return [0xD8000000 | bits(16) | (bits(2) == 0) << 16 | bits(8) << 17, word]


def flat(rng: random.Random) -> list[int]:
    bits = rng.getrandbits
    word = bits(8) | (127 if bits(1) else 2 * bits(4)) << 16
    word |= bits(8) << 8 if bits(1) else 0
    word |= bits(8) << 24 if bits(1) else 0
    segment = rng.randrange(3) << 14
    return [0xDC000000 | bits(12) | segment | bits(2) << 16 | bits(7) << 18, word]


def mubuf(rng: random.Random) -> list[int]:
    bits = rng.getrandbits
    opcode = rng.choice((*range(0x10, 0x26), *range(0x40, 0x4D), *range(0x60, 0x6D)))
    soffset = rng.choice((*range(100), 128, 129, 193, 124))
    return [
        0xE0000000 | bits(15) | bits(1) << 17 | opcode << 18,
        bits(16) | rng.randrange(24) << 16 | soffset << 24,
    ]


FORMATS = {
    "SOP2": pick(0x80000000, 0x36, 23, 0x7FFFFF),
    "SOP1": pick(0xBE800000, 0x3A, 8, 0x7F00FF),
    "SOPC": pick(0xBF000000, 0x15, 16, 0xFFFF),
    "SOPK": pick(0xB0000000, 0x17, 23, 0x7FFFFF),
    "SOPP": pick(0xBF800000, 0x20, 16, 0xFF, False),
    "VOP1": pick(0x7E000000, 0x54, 9, 0x1FE01FF),
    "VOP2": pick(0, 0x3E, 25, 0x1FFFFFF),
    "VOPC": pick(0x7C000000, 0x100, 17, 0x1FFFF),
    "VOP3": vop3, "VOP3P": vop3p, "DPP": dpp, "SMEM": smem, "DS": ds,
    "FLAT": flat, "MUBUF": mubuf,
}  # fmt: skip


def invalid(text: str | None) -> bool:
    return text is None or ".long" in text or "/*" in text


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


@pytest.mark.parametrize("name", list(FORMATS))
def test_random_encodings_read_as_llvm_reads_them(name: str) -> None:
    rng = random.Random(name)
    slots = [FORMATS[name](rng) for _ in range(400)]
    words = [w for slot in slots for w in slot + [NOP] * (4 - len(slot))]
    image = assemble_words(words)
    theirs, mine = objdump(image)["kernel"], ours(image)["kernel"]
    left = [theirs.get(16 * i) for i in range(len(slots))]
    right = [mine.get(16 * i) for i in range(len(slots))]
    # Encodings with stray bits do not assemble back; either reading is fine.
    back = encode(["s_nop 0" if invalid(t) else t for t in left])
    ours_back = encode(["s_nop 0" if invalid(t) else t for t in right])
    wrong, same = [], 0
    for i, slot in enumerate(slots):
        raw = b"".join(w.to_bytes(4, "little") for w in slot)
        same += left[i] == right[i] and not invalid(left[i])
        if left[i] == right[i] or (invalid(left[i]) and invalid(right[i])):
            continue
        if not invalid(left[i]) and back[i] is not None and raw.startswith(back[i]):
            if not (invalid(right[i]) and NOT_IMPLEMENTED.search(left[i])):
                wrong.append(f"{left[i]} | {right[i]}")
        elif (
            not invalid(right[i])
            and ours_back[i] is not None
            and raw.startswith(ours_back[i])
        ):
            wrong.append(f"LLVM has nothing | {right[i]}")
    wrong = [w for w in wrong if not USELESS.search(w)]
    assert not wrong, "LLVM | ours:\n" + "\n".join(wrong[:20])
    assert same >= 50, f"only {same} of {len(slots)} were decoded by both"


def test_our_kernels_disassemble_as_llvm_says() -> None:
    images = list(SIM.parents[1].glob("flash_attn_rocm/_code/fa_gfx906.co"))
    if not images:
        pytest.skip("flash_attn_rocm/_code/fa_gfx906.co is not built")
    compare(images[0].read_bytes())


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


@pytest.mark.parametrize("level", ["-O0", "-O1", "-O3"])
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


def compare(image: bytes) -> None:
    theirs = objdump(image)
    count, wrong = 0, []
    for kernel, rows in ours(image).items():
        for offset, text in rows.items():
            count += 1
            if theirs[kernel].get(offset) != text:
                wrong.append(f"{offset:#x}: {theirs[kernel].get(offset)} | {text}")
    assert not wrong, "LLVM | ours:\n" + "\n".join(wrong[:20])
    assert count > 50


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


def test_opcodes_are_unique_in_each_list() -> None:
    for path in SIM.glob("*.def"):
        found = collections.Counter(
            re.findall(r"^[A-Z0-9_]+\((0x[0-9a-f]+),", path.read_text(), re.M)
        )
        twice = [n for n, count in found.items() if count > 1]
        assert not twice, f"{path.name}: {twice}"
        assert found


def test_an_unknown_instruction_stops_with_its_bits() -> None:
    image = assemble("    s_nop 0\n    s_movrels_b32 s0, s1\n    s_endpgm", pointers=0)
    with (
        hipsim.Module(image) as module,
        pytest.raises(hipsim.HipError, match=r"\.long 0xbe802a01"),
    ):
        module.kernel("kernel").launch((1, 1, 1), (64, 1, 1), [])
