"""Cases of program control, hardware registers, VGPR indexing and scalar memory.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable

from isa_numbers import M32, M64
from isa_scalar import START, Case, State, make_unit, state
from oracle import Unit

# ---- branches and calls ----------------------------------------------------

SKIPPED = "s_mov_b32 s16, 7"
CONDITIONS: dict[str, Callable[[State], bool]] = {
    "s_branch": lambda s: True,
    "s_cbranch_scc0": lambda s: s.scc == 0,
    "s_cbranch_scc1": lambda s: s.scc == 1,
    "s_cbranch_vccz": lambda s: s.vcc == 0,
    "s_cbranch_vccnz": lambda s: s.vcc != 0,
    "s_cbranch_execz": lambda s: s.exec == 0,
    "s_cbranch_execnz": lambda s: s.exec != 0,
}


def branch_cases(name: str) -> list[Case]:
    """Forward over one instruction, and back to one that stood before."""
    cases = []
    for turn in range(8):
        here = State(turn & 1, (turn >> 1 & 1) << 40, (turn >> 2) << 50, 5)
        taken = CONDITIONS[name](here)
        forward = Case(f"{name} 1f\n    {SKIPPED}\n1:", (0, 0, 3), here)
        forward.d = 3 if taken else 7
        back = Case(
            f"s_branch 2f\n1:  {SKIPPED}\n    s_branch 3f\n2:  {name} 1b\n3:",
            (0, 0, 3), here, 7 if taken else 3)  # fmt: skip
        cases += [forward, back]
    return cases


HERE = "s_getpc_b64 s[26:27]\n"


def pc_cases(name: str) -> list[Case]:
    """Jumps by address, and the return addresses they leave."""
    here = State(1, M64, 3, 4)
    jump = (HERE + "s_add_u32 s26, s26, 20\n s_addc_u32 s27, s27, 0\n"
            f"s_setpc_b64 s[26:27]\n {SKIPPED}\n {SKIPPED}", 3)  # fmt: skip
    texts = {
        # The address after each s_getpc; their difference is in bytes.
        "s_getpc_b64": [(HERE + "s_nop 0\n s_getpc_b64 s[28:29]\n"
                         "s_sub_u32 s16, s28, s26\n s_subb_u32 s17, s29, s27", 8),
                        jump],
        "s_setpc_b64": [jump],
        # Over two, and back by the saved address into the branch past them.
        "s_swappc_b64": [
            (HERE + "s_add_u32 s28, s26, 16\n s_addc_u32 s29, s27, 0\n"
             "s_swappc_b64 s[30:31], s[28:29]\n s_branch 1f\n"
             f"s_addk_i32 s16, 4\n s_setpc_b64 s[30:31]\n {SKIPPED}\n1:", 7),
            (HERE + "s_add_u32 s28, s26, 16\n s_addc_u32 s29, s27, 0\n"
             f"s_swappc_b64 s[30:31], s[28:29]\n {SKIPPED}\n"
             "s_sub_u32 s16, s30, s26\n s_subb_u32 s17, s31, s27", 12)],
        "s_call_b64": [
            (HERE + f"s_call_b64 s[30:31], 1f\n {SKIPPED}\n1:\n"
             "s_sub_u32 s16, s30, s26\n s_subb_u32 s17, s31, s27", 4)],
    }  # fmt: skip
    cases = []
    for text, d in texts[name]:
        # The code's own flags are no part of the test.
        wrapped = f"{text}\n    s_cmp_eq_u32 s22, 1"
        cases.append(Case(wrapped, (0, 0, 3), here, d))
    return cases


# ---- hardware registers ----------------------------------------------------

RESET = "\n    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 10), 0x3f0"


def mode_cases(name: str) -> list[Case]:
    """Fields of MODE, all widths; other registers that can be read."""
    rng = random.Random(name)
    cases = []
    for _ in range(16):
        offset = rng.randrange(10)
        size = rng.randrange(1, 11 - offset)
        mode, number = rng.getrandbits(10), rng.getrandbits(32)
        where = f"hwreg(HW_REG_MODE, {offset}, {size})"
        field = (1 << size) - 1 << offset
        setup = f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 10), {mode:#x}\n    "
        new = mode & ~field | number << offset & field
        if name == "s_getreg_b32":
            new, act = (mode & field) >> offset, f"{name} s16, {where}"
        elif name == "s_setreg_b32":
            act = f"{name} {where}, s12\n    s_getreg_b32 s16, hwreg(HW_REG_MODE)"
        else:
            act = (f"{name} {where}, {number:#x}\n"
                   "    s_getreg_b32 s16, hwreg(HW_REG_MODE)")  # fmt: skip
        cases.append(Case(setup + act + RESET, (number, 0, 0), state(rng), new))
    if name == "s_getreg_b32":
        here = State(1, 0, 3, 0)
        for text, d in (
            ("hwreg(HW_REG_STATUS, 0, 1)", 1), ("hwreg(HW_REG_STATUS, 9, 2)", 1),
            ("hwreg(HW_REG_TRAPSTS)", 0), ("hwreg(HW_REG_HW_ID, 0, 6)", 0),
            ("hwreg(HW_REG_GPR_ALLOC)", 63), ("hwreg(HW_REG_LDS_ALLOC, 12, 9)", 2),
            ("hwreg(HW_REG_SH_MEM_BASES)", 0x10002),
        ):  # fmt: skip
            cases.append(Case(f"{name} s16, {text}", (0, 0, 3), here, d))
    return cases


# ---- program control without an effect on registers ------------------------

NO_EFFECT = {
    "s_nop": "3", "s_waitcnt": "0", "s_sleep": "1", "s_setprio": "2",
    "s_sendmsg": "sendmsg(MSG_INTERRUPT)", "s_icache_inv": "", "s_incperflevel": "1",
    "s_decperflevel": "1", "s_ttracedata": "", "s_trap": "3", "s_sethalt": "0",
}  # fmt: skip
FAULTS = {
    "s_sethalt": ("s_sethalt 1", "s_sethalt 1 is not"),
    "s_trap": ("s_trap 2", "trap"),
}
ENDS = {"s_endpgm": "s_endpgm", "s_endpgm_saved": "s_endpgm_saved"}


def quiet_cases(name: str) -> list[Case]:
    rng = random.Random(name)
    cases = []
    for _ in range(4):
        here = state(rng)
        text = f"{name} {NO_EFFECT[name]}".strip()
        cases.append(Case(text, (0, 0, 3), here, 3))
    return cases


def end_unit(name: str) -> Unit:
    """What stands after the end must not run."""
    body = f"""{START}
    v_mov_b32 v2, 1
    global_store_dword v1, v2, s[10:11]
    {ENDS[name]}
    v_mov_b32 v2, 2
    global_store_dword v1, v2, s[10:11] offset:4"""
    return Unit([name], body, b"", bytes(8), struct.pack("<2I", 1, 0))


def barrier_unit(name: str) -> Unit:
    """Each of three waves reads what the next one wrote before the barrier."""
    body = """
    s_load_dwordx4 s[8:11], s[4:5], 0x0
    v_lshlrev_b32 v1, 2, v0
    v_add_u32 v2, 0x100, v1
    v_mul_u32_u24 v3, 3, v0
    s_cmp_eq_u32 s0, s0
    s_mov_b32 s12, 0x300
    v_cmp_le_u32 vcc, s12, v2
    v_subrev_u32 v4, s12, v2
    v_cndmask_b32 v2, v2, v4, vcc
    ds_write_b32 v1, v3
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v5, v2
    s_cselect_b32 s12, 1, 2
    s_waitcnt lgkmcnt(0)
    v_add_u32 v5, s12, v5
    global_store_dword v1, v5, s[10:11]"""
    want = b"".join(struct.pack("<I", (i + 64) % 192 * 3 + 1) for i in range(192))
    return Unit([name], body, b"", bytes(768), want,
                settings={"lds": 768}, threads=192)  # fmt: skip


# ---- VGPR indexing ---------------------------------------------------------

# text with the index in s12, then v[16:17] from the index i and v8 to v15.
INDEXED: dict[str, list[tuple[str, Callable[[int, list[int]], int]]]] = {
    "s_set_gpr_idx_on": [
        ("s_set_gpr_idx_on s12, gpr_idx(SRC0)\n v_mov_b32 v16, v8",
         lambda i, v: v[i]),
        ("s_set_gpr_idx_on s12, gpr_idx(SRC1)\n v_sub_u32 v16, v8, v8",
         lambda i, v: v[0] - v[i]),
        ("s_set_gpr_idx_on s12, gpr_idx(SRC0,SRC2)\n v_add3_u32 v16, v8, v9, v8",
         lambda i, v: 2 * v[i] + v[1]),
        ("s_set_gpr_idx_on s12, gpr_idx(SRC0)\n v_sub_u32 v16, s12, v8",
         lambda i, v: i - v[0]),
        ("s_set_gpr_idx_on s12, gpr_idx(DST)\n v_mov_b32 v10, v8\n"
         " s_set_gpr_idx_off\n v_mov_b32 v16, v14",
         lambda i, v: v[0] if i == 4 else v[6]),
        ("s_set_gpr_idx_on 3, gpr_idx(SRC0)\n v_mov_b32 v16, v8",
         lambda i, v: v[3]),
    ],
    "s_set_gpr_idx_off": [
        ("s_set_gpr_idx_on s12, gpr_idx(SRC0)\n s_set_gpr_idx_off\n"
         " v_mov_b32 v16, v8", lambda i, v: v[0]),
    ],
    "s_set_gpr_idx_mode": [
        ("s_set_gpr_idx_on s12, gpr_idx(DST)\n s_set_gpr_idx_mode gpr_idx(SRC0)\n"
         " v_mov_b32 v16, v8", lambda i, v: v[i]),
        ("s_set_gpr_idx_on s12, gpr_idx(SRC0)\n s_set_gpr_idx_mode gpr_idx(SRC1)\n"
         " v_sub_u32 v16, v8, v8", lambda i, v: v[0] - v[i]),
    ],
    "s_set_gpr_idx_idx": [
        ("s_set_gpr_idx_on 5, gpr_idx(SRC0)\n s_set_gpr_idx_idx s12\n"
         " v_mov_b32 v16, v8", lambda i, v: v[i]),
    ],
}  # fmt: skip
WHICH = {"SRC0": 1, "SRC1": 2, "SRC2": 4, "DST": 8}


def index_unit(name: str) -> Unit:
    """v16, M0 and SCC after each text, for several indices; lane 0."""
    rng = random.Random(name)
    values = [rng.getrandbits(32) for _ in range(8)]
    body = [START, "    s_mov_b64 exec, 1\n"]
    expected, labels = b"", []
    for text, model in INDEXED[name]:
        for i in range(8 if "DST" in text else 7):
            body += [f"    v_mov_b32 v{8 + k}, {x:#x}\n" for k, x in enumerate(values)]
            high = rng.getrandbits(24) << 8 & 0x0FFFFFFF
            body.append(
                f"    s_mov_b32 m0, {high:#x}\n    s_movk_i32 s12, {i + 0x100}\n"
                f"    s_cmp_eq_u32 s12, {0x100}\n"
                "    v_mov_b32 v16, 0\n"
                f"    {text.replace('v_sub_u32 v16, s12', 'v_sub_u32 v16, s13')}\n"
                f"    {'' if 'idx_off' in text else 's_set_gpr_idx_off'}\n"
                "    v_mov_b32 v17, m0\n"
                "    s_cselect_b32 s12, 1, 0\n    v_mov_b32 v18, s12\n"
                "    global_store_dwordx3 v1, v[16:18], s[10:11]\n"
                "    v_add_u32 v1, 12, v1\n"
            )
            body[-1] = body[-1].replace("    v_mov_b32 v16, 0\n", (
                f"    s_movk_i32 s13, {i}\n    v_mov_b32 v16, 0\n"))  # fmt: skip
            expected += struct.pack("<I", model(i, values) & M32)
            expected += struct.pack("<2I", index_m0(text, i, high), i == 0)
            labels.append((len(expected) - 12, f"{text} with index {i}"))
    return Unit([name], "".join(body), b"", bytes(len(expected)), expected, labels)


def index_m0(text: str, i: int, m0: int) -> int:
    """M0: [7:0] index, [15:12] which operands; what the last one set stays."""
    for line in text.splitlines():
        words = line.split(None, 1)
        which = sum(bit for word, bit in WHICH.items() if word in line)
        if words[0] == "s_set_gpr_idx_on":
            first = words[1].split(",")[0]
            index = i if first == "s12" else int(first)
            m0 = m0 & ~0xF0FF | index | which << 12
        elif words[0] == "s_set_gpr_idx_mode":
            m0 = m0 & ~0xF000 | which << 12
        elif words[0] == "s_set_gpr_idx_idx":
            m0 = m0 & ~0xFF | i
    return m0


# ---- scalar memory ---------------------------------------------------------

SIZES = {"": 1, "x2": 2, "x4": 4, "x8": 8, "x16": 16}


def dump(count: int, first: int) -> str:
    """Stores `count` scalar registers, one lane, and moves v1 on."""
    lines = [
        f"    v_mov_b32 v2, s{first + i}\n"
        f"    global_store_dword v1, v2, s[10:11] offset:{4 * i}\n"
        for i in range(count)
    ]
    return "".join(lines) + f"    v_add_u32 v1, {4 * count}, v1\n"


def smem_load_unit(name: str) -> Unit:
    """Immediate, register and both offsets; descriptor bounds; neighbours kept."""
    rng = random.Random(name)
    count = SIZES[name.rpartition("dword")[2]]
    data = rng.randbytes(512)
    buffer = "buffer" in name
    body = [START, "    s_mov_b64 exec, 1\n"]
    expected, labels = b"", []
    limit = 256 if buffer else 512
    places = [("0x0", 0), ("0x4c", 0x4C), ("s12", 0x40), ("s12 offset:0x8", 0x48)]
    if buffer:
        places += [("0xfc", 0xFC), ("0xf4", 0xF4), ("0x108", 0x108)]
        body.append(
            "    s_mov_b32 s20, s8\n    s_and_b32 s21, s9, 0xffff\n"
            f"    s_movk_i32 s22, {limit}\n    s_mov_b32 s23, 0x27000\n"
        )
    for n_place, (text, at) in enumerate(places):
        strided = buffer and n_place == 2
        if strided:  # records count in strides: 16 of 16 bytes
            body.append("    s_or_b32 s21, s21, 0x100000\n    s_movk_i32 s22, 16\n")
        elif buffer:
            body.append("    s_and_b32 s21, s21, 0xffff\n"
                        f"    s_movk_i32 s22, {limit}\n")  # fmt: skip
        body += [f"    s_movk_i32 s{32 + i}, {i + 100}\n" for i in range(18)]
        base = "s[20:23]" if buffer else "s[8:9]"
        to = "s32" if count == 1 else f"s[32:{31 + count}]"
        body.append(f"    s_movk_i32 s12, 0x40\n    {name} {to}, {base}, {text}\n"
                    "    s_waitcnt lgkmcnt(0)\n")  # fmt: skip
        body.append(dump(18, 32))
        labels.append((len(expected), f"{name} {to}, {base}, {text}"))
        for i in range(18):
            word = data[at + 4 * i : at + 4 * i + 4]
            inside = not buffer or at + 4 * i + 4 <= limit
            word = word if inside else bytes(4)
            expected += word if i < count else struct.pack("<I", i + 100)
    return Unit([name], "".join(body), data, bytes(len(expected)), expected, labels)


def smem_store_unit(name: str) -> Unit:
    count = SIZES[name.rpartition("dword")[2]]
    values = [0x1111 * (i + 1) for i in range(6)]
    before = bytes(range(96))
    after = bytearray(before)
    body = [START] + [f"    s_movk_i32 s{12 + i}, {x}\n" for i, x in enumerate(values)]
    body.append("    s_movk_i32 s20, 0x30\n")
    data = "s12" if count == 1 else f"s[12:{11 + count}]"
    for text, at in (("0x8", 8), ("s20", 0x30)):
        body.append(f"    {name} {data}, s[10:11], {text}\n")
        after[at : at + 4 * count] = struct.pack(f"<{count}I", *values[:count])
    body.append("    s_dcache_wb\n")
    return Unit([name], "".join(body), b"", before, bytes(after))


def time_unit(name: str) -> Unit:
    """Time goes on, by little, in both dwords' sense; nothing else changes."""
    body = f"""{START}
    s_mov_b64 exec, 1
    s_mov_b32 s20, 7
    {name} s[12:13]
    s_waitcnt lgkmcnt(0)
    s_nop 0
    {name} s[18:19]
    s_waitcnt lgkmcnt(0)
    s_sub_u32 s14, s18, s12
    s_subb_u32 s15, s19, s13
    s_cmp_lg_u32 s14, 0
    s_cselect_b32 s12, 1, 0
    s_cmp_lt_u32 s14, 1000
    s_cselect_b32 s13, 1, 0
    s_cmp_eq_u32 s15, 0
    s_cselect_b32 s14, 1, 0
    s_mov_b32 s15, s20
{dump(4, 12)}"""
    return Unit([name], body, b"", bytes(16), struct.pack("<4I", 1, 1, 1, 7))


def cache_unit(name: str) -> Unit:
    """Nothing that a program sees; register 0 of either kind is looked at."""
    scalar = (f"s_mov_b64 s[26:27], s[0:1]\n    {name}\n"
              "    s_xor_b64 s[16:17], s[0:1], s[26:27]\n"
              "    s_cmp_eq_u32 s22, 1")  # fmt: skip
    vector = f"{name}\n    v_readlane_b32 s16, v0, 5"
    here = State(1, M64, 5, 6)
    cases = [Case(scalar, (0, 0, 3), here), Case(vector, (0, 0, 3), here, 5)]
    return make_unit(name, cases)


SMEM_LOADS = [f"s_{b}load_dword{x}" for b in ("", "buffer_") for x in SIZES]
SMEM_STORES = [f"s_store_dword{x}" for x in ("", "x2", "x4")]
CACHES = ["s_dcache_inv", "s_dcache_wb", "s_dcache_inv_vol", "s_dcache_wb_vol",
          "buffer_wbinvl1", "buffer_wbinvl1_vol"]  # fmt: skip


def fault_unit(name: str) -> Unit:
    text, report = FAULTS[name]
    return Unit([name], f"    {text}", b"", bytes(4), bytes(4), fault=report)


def mode_unit(name: str) -> Unit:
    unit = make_unit(name, mode_cases(name))
    return dataclasses.replace(unit, settings={"lds": 1024})


# (instruction, what makes its unit); an instruction may have several.
BUILDERS: list[tuple[str, Callable[[str], Unit]]] = [
    *((name, lambda x: make_unit(x, branch_cases(x))) for name in CONDITIONS),
    *((f"s_{name}_b64", lambda x: make_unit(x, pc_cases(x)))
      for name in ("getpc", "setpc", "swappc", "call")),
    *((name, mode_unit) for name in ("s_getreg_b32", "s_setreg_b32",
                                     "s_setreg_imm32_b32")),
    *((name, lambda x: make_unit(x, quiet_cases(x))) for name in NO_EFFECT),
    *((name, end_unit) for name in ENDS),
    *((name, fault_unit) for name in FAULTS),
    *((name, index_unit) for name in INDEXED),
    *((name, smem_load_unit) for name in SMEM_LOADS),
    *((name, smem_store_unit) for name in SMEM_STORES),
    *((name, time_unit) for name in ("s_memtime", "s_memrealtime")),
    *((name, cache_unit) for name in CACHES),
    ("s_barrier", barrier_unit),
]  # fmt: skip
