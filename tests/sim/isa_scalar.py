"""Model and cases of the scalar ALU, of program control and of scalar memory.

Written from the manual's text; shares nothing with csrc/sim.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable

import isa_numbers as n
from isa_numbers import M32, M64, sx
from oracle import Unit

# A rule: unsigned A, B, old D and the state -> D; it may change the state.
Rule = Callable[[int, int, int, "State"], int]


@dataclasses.dataclass
class State:
    """Beside the registers: what scalar instructions read and write."""

    scc: int
    exec: int
    vcc: int = 0
    m0: int = 0


@dataclasses.dataclass(frozen=True)
class Scalar:
    """bits: widths of D, A and B, 0 for none."""

    bits: tuple[int, int, int]
    rule: Rule


OPS: dict[str, Scalar] = {}


def op(name: str, bits: str, rule: Rule) -> None:
    d, a, b = (int(x) for x in (bits + " 0 0").split()[:3])
    OPS[name] = Scalar((d, a, b), rule)


def plain(name: str, bits: str, function: Callable[[int, int], int]) -> None:
    """SCC is left alone."""
    op(name, bits, lambda a, b, d, s: function(a, b))


def nonzero(name: str, bits: str, function: Callable[[int, int], int]) -> None:
    """SCC tells whether the result is not zero."""
    mask = (1 << int(bits.split()[0])) - 1

    def rule(a: int, b: int, d: int, s: State) -> int:
        result = function(a, b) & mask
        s.scc = int(result != 0)
        return result

    op(name, bits, rule)


def flagged(name: str, bits: str, function: Callable[..., tuple[int, bool]]) -> None:
    """The function of A, B and SCC gives the result and SCC."""

    def rule(a: int, b: int, d: int, s: State) -> int:
        result, s_out = function(a, b, s.scc)
        s.scc = int(s_out)
        return result

    op(name, bits, rule)


# ---- two sources -----------------------------------------------------------


def outside(x: int) -> bool:
    return not -(2**31) <= x < 2**31


def i32(x: int) -> int:
    return sx(x, 32)


THREE32 = "32 32 32"
flagged("s_add_u32", THREE32, lambda a, b, c: (a + b, a + b > M32))
flagged("s_sub_u32", THREE32, lambda a, b, c: (a - b, b > a))
flagged("s_add_i32", THREE32, lambda a, b, c: (a + b, outside(i32(a) + i32(b))))
flagged("s_sub_i32", THREE32, lambda a, b, c: (a - b, outside(i32(a) - i32(b))))
flagged("s_addc_u32", THREE32, lambda a, b, c: (a + b + c, a + b + c > M32))
flagged("s_subb_u32", THREE32, lambda a, b, c: (a - b - c, b + c > a))
flagged("s_min_i32", THREE32, lambda a, b, c: (min(i32(a), i32(b)), i32(a) < i32(b)))
flagged("s_max_i32", THREE32, lambda a, b, c: (max(i32(a), i32(b)), i32(a) > i32(b)))
flagged("s_min_u32", THREE32, lambda a, b, c: (min(a, b), a < b))
flagged("s_max_u32", THREE32, lambda a, b, c: (max(a, b), a > b))
for SHIFT in (1, 2, 3, 4):
    flagged(f"s_lshl{SHIFT}_add_u32", THREE32,
            lambda a, b, c, i=SHIFT: ((a << i) + b, (a << i) + b > M32))  # fmt: skip
for BITS in (32, 64):
    SAME, COUNT = f"{BITS} {BITS} {BITS}", f"{BITS} {BITS} 32"
    op(f"s_cselect_b{BITS}", SAME, lambda a, b, d, s: a if s.scc else b)
    for NAME, F in (
        ("and", lambda a, b: a & b), ("or", lambda a, b: a | b),
        ("xor", lambda a, b: a ^ b), ("andn2", lambda a, b: a & ~b),
        ("orn2", lambda a, b: a | ~b), ("nand", lambda a, b: ~(a & b)),
        ("nor", lambda a, b: ~(a | b)), ("xnor", lambda a, b: ~(a ^ b)),
    ):  # fmt: skip
        nonzero(f"s_{NAME}_b{BITS}", SAME, F)
    LOW = BITS - 1
    nonzero(f"s_lshl_b{BITS}", COUNT, lambda a, b, m=LOW: a << (b & m))
    nonzero(f"s_lshr_b{BITS}", COUNT, lambda a, b, m=LOW: a >> (b & m))
    nonzero(f"s_ashr_i{BITS}", COUNT, lambda a, b, k=BITS: sx(a, k) >> (b & k - 1))
    plain(f"s_bfm_b{BITS}", f"{BITS} 32 32",
          lambda a, b, m=LOW: ((1 << (a & m)) - 1) << (b & m))  # fmt: skip
    for SIGN in ("u", "i"):
        nonzero(f"s_bfe_{SIGN}{BITS}", COUNT, lambda a, b, k=BITS, g=SIGN == "i":
                n.field(a, b & k - 1, b >> 16 & 127, k, g))  # fmt: skip
plain("s_mul_i32", THREE32, lambda a, b: a * b)
plain("s_mul_hi_u32", THREE32, lambda a, b: a * b >> 32)
plain("s_mul_hi_i32", THREE32, lambda a, b: i32(a) * i32(b) >> 32)
nonzero("s_absdiff_i32", THREE32, lambda a, b: abs(i32(i32(a) - i32(b))))
plain("s_pack_ll_b32_b16", THREE32, lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16)
plain("s_pack_lh_b32_b16", THREE32, lambda a, b: a & 0xFFFF | b >> 16 << 16)
plain("s_pack_hh_b32_b16", THREE32, lambda a, b: a >> 16 | b >> 16 << 16)

# ---- one source ------------------------------------------------------------

for BITS in (32, 64):
    SAME, FULL = f"{BITS} {BITS}", (1 << BITS) - 1
    QUADS = BITS // 4
    plain(f"s_mov_b{BITS}", SAME, lambda a, b: a)
    op(f"s_cmov_b{BITS}", SAME, lambda a, b, d, s: a if s.scc else d)
    nonzero(f"s_not_b{BITS}", SAME, lambda a, b: ~a)
    nonzero(f"s_wqm_b{BITS}", SAME, lambda a, b, q=QUADS: sum(
        15 << 4 * i for i in range(q) if a >> 4 * i & 15))  # fmt: skip
    nonzero(f"s_quadmask_b{BITS}", SAME, lambda a, b, q=QUADS: sum(
        1 << i for i in range(q) if a >> 4 * i & 15))  # fmt: skip
    plain(f"s_brev_b{BITS}", SAME, lambda a, b, k=BITS: n.reverse(a, k))
    nonzero(f"s_bcnt0_i32_b{BITS}", f"32 {BITS}", lambda a, b, k=BITS: k - n.count(a))
    nonzero(f"s_bcnt1_i32_b{BITS}", f"32 {BITS}", lambda a, b: n.count(a))
    plain(f"s_ff0_i32_b{BITS}", f"32 {BITS}", lambda a, b, m=FULL: n.trailing(~a & m))
    plain(f"s_ff1_i32_b{BITS}", f"32 {BITS}", lambda a, b: n.trailing(a))
    plain(f"s_flbit_i32_b{BITS}", f"32 {BITS}", lambda a, b, k=BITS: n.leading(a, k))
    op(f"s_bitset0_b{BITS}", f"{BITS} 32",
       lambda a, b, d, s, m=BITS - 1: d & ~(1 << (a & m)))  # fmt: skip
    op(f"s_bitset1_b{BITS}", f"{BITS} 32",
       lambda a, b, d, s, m=BITS - 1: d | 1 << (a & m))  # fmt: skip
plain("s_flbit_i32", "32 32", lambda a, b: n.leading_signed(a))
plain("s_flbit_i32_i64", "32 64", lambda a, b: n.leading_signed(a, 64))
plain("s_sext_i32_i8", "32 32", lambda a, b: sx(a, 8))
plain("s_sext_i32_i16", "32 32", lambda a, b: sx(a, 16))
nonzero("s_abs_i32", "32 32", lambda a, b: abs(i32(a)))
plain("s_bitreplicate_b64_b32", "64 32", lambda a, b: sum(
    3 << 2 * i for i in range(32) if a >> i & 1))  # fmt: skip


def masks(name: str, function: Callable[[int, int], int], saves: bool) -> None:
    """EXEC from A and EXEC; D is the old EXEC, or the new one."""

    def rule(a: int, b: int, d: int, s: State) -> int:
        old, s.exec = s.exec, function(a, s.exec) & M64
        s.scc = int(s.exec != 0)
        return old if saves else s.exec

    op(name, "64 64", rule)


for NAME, F in (
    ("and", lambda a, e: a & e), ("or", lambda a, e: a | e),
    ("xor", lambda a, e: a ^ e), ("andn2", lambda a, e: a & ~e),
    ("orn2", lambda a, e: a | ~e), ("nand", lambda a, e: ~(a & e)),
    ("nor", lambda a, e: ~(a | e)), ("xnor", lambda a, e: ~(a ^ e)),
    ("andn1", lambda a, e: ~a & e), ("orn1", lambda a, e: ~a | e),
):  # fmt: skip
    masks(f"s_{NAME}_saveexec_b64", F, True)
masks("s_andn1_wrexec_b64", lambda a, e: ~a & e, False)
masks("s_andn2_wrexec_b64", lambda a, e: a & ~e, False)


def index_only(a: int, b: int, d: int, s: State) -> int:
    s.m0 = s.m0 & ~0xFF | a & 0xFF
    return d


op("s_set_gpr_idx_idx", "0 32", index_only)

# ---- compares and constants ------------------------------------------------

RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip


def compares(name: str, bits: str, relation: Callable[[int, int], bool]) -> None:
    """SCC from A and B; nothing else is written."""
    flagged(name, f"0 {bits}", lambda a, b, c: (0, relation(a, b)))


for NAME, R in RELATIONS.items():
    compares(f"s_cmp_{NAME}_i32", "32 32", lambda a, b, r=R: r(i32(a), i32(b)))
    compares(f"s_cmp_{NAME}_u32", "32 32", R)
    if NAME in ("eq", "lg"):
        compares(f"s_cmp_{NAME}_u64", "64 64", R)
for BITS in (32, 64):
    for BIT in (0, 1):
        compares(f"s_bitcmp{BIT}_b{BITS}", f"{BITS} 32",
                 lambda a, b, k=BITS, v=BIT: a >> (b & k - 1) & 1 == v)  # fmt: skip

# SOPK: B is the constant's 16 bits.
CONSTANT: dict[str, Scalar] = {}


def k16(name: str, rule: Rule) -> None:
    CONSTANT[name] = Scalar((32, 0, 16), rule)


def k_compare(relation: Callable[[int, int], bool], signed: bool) -> Rule:
    def rule(a: int, b: int, d: int, s: State) -> int:
        x, y = (i32(d), sx(b, 16)) if signed else (d, b)
        s.scc = int(relation(x, y))
        return d

    return rule


def k_add(a: int, b: int, d: int, s: State) -> int:
    total = i32(d) + sx(b, 16)
    s.scc = int(outside(total))
    return total


k16("s_movk_i32", lambda a, b, d, s: sx(b, 16))
k16("s_cmovk_i32", lambda a, b, d, s: sx(b, 16) if s.scc else d)
k16("s_addk_i32", k_add)
k16("s_mulk_i32", lambda a, b, d, s: d * sx(b, 16))
for NAME, R in RELATIONS.items():
    k16(f"s_cmpk_{NAME}_i32", k_compare(R, True))
    k16(f"s_cmpk_{NAME}_u32", k_compare(R, False))

# ---- kernels ---------------------------------------------------------------

START = """
    s_load_dwordx4 s[8:11], s[4:5], 0x0
    v_mov_b32 v1, 0
    s_waitcnt lgkmcnt(0)
"""
# s[12:13] A, s[14:15] B, s[16:17] D, s[18:19] EXEC, s[20:21] VCC, s22 SCC, s23 M0
BLOCK = """
    s_load_dwordx8 s[12:19], s[8:9], {offset:#x}
    s_load_dwordx4 s[20:23], s[8:9], {offset:#x}+32
    s_waitcnt lgkmcnt(0)
    s_mov_b64 vcc, s[20:21]
    s_mov_b32 m0, s23
    s_mov_b64 exec, s[18:19]
    s_cmp_eq_u32 s22, 1
    {text}
    s_cselect_b32 s22, 1, 0
    s_mov_b64 s[24:25], exec
    s_mov_b64 exec, 1
    s_set_gpr_idx_off
    v_mov_b32 v2, s16
    v_mov_b32 v3, s17
    v_mov_b32 v4, s22
    v_mov_b32 v5, m0
    v_mov_b32 v6, s24
    v_mov_b32 v7, s25
    v_mov_b32 v8, vcc_lo
    v_mov_b32 v9, vcc_hi
    global_store_dwordx4 v1, v[2:5], s[10:11]
    global_store_dwordx4 v1, v[6:9], s[10:11] offset:16
    v_add_u32 v1, 32, v1
"""


@dataclasses.dataclass
class Case:
    text: str
    before: tuple[int, int, int]  # A, B, D
    state: State
    d: int = 0  # afterwards
    after: State | None = None


def make_unit(name: str, cases: list[Case]) -> Unit:
    body, source, expected, labels = [START], b"", b"", []
    for i, case in enumerate(cases):
        state, after = case.state, case.after or case.state
        body.append(BLOCK.format(offset=48 * i, text=case.text))
        source += struct.pack("<5Q2I", *case.before, state.exec, state.vcc, state.scc,
                              state.m0)  # fmt: skip
        expected += struct.pack("<QIIQQ", case.d, after.scc, after.m0, after.exec,
                                after.vcc)  # fmt: skip
        labels.append((32 * i, f"{case.text} of A, B, D {case.before}, {state}"))
    return Unit([name], "".join(body), source, bytes(len(expected)), expected, labels)


def registers(first: int, bits: int) -> str:
    return f"s[{first}:{first + 1}]" if bits == 64 else f"s{first}"


def value(rng: random.Random) -> int:
    return rng.choice((
        rng.getrandbits(64), rng.randrange(70), M64 - rng.randrange(70),
        1 << rng.randrange(64), rng.getrandbits(7) << 16 | rng.getrandbits(6),
        rng.getrandbits(29), 64 << 16 | rng.getrandbits(6), M64,
        0, 0x80000000, 0x7FFFFFFF, rng.getrandbits(64) & ~M32 | rng.randrange(3),
    ))  # fmt: skip


def state(rng: random.Random) -> State:
    exec_mask = rng.choice((M64, rng.getrandbits(64), 0))
    return State(rng.getrandbits(1), exec_mask, rng.getrandbits(64),
                 rng.getrandbits(32))  # fmt: skip


def apply(case: Case, scalar: Scalar, a: int, b: int) -> Case:
    """Fills in what the case leaves behind."""
    after = dataclasses.replace(case.state)
    width, wide_a, wide_b = scalar.bits
    mask = (1 << width) - 1
    d = case.before[2]
    result = scalar.rule(a & (1 << wide_a) - 1, b & (1 << wide_b) - 1, d & mask, after)
    case.d, case.after = d & ~mask | result & mask, after
    return case


def constant(rng: random.Random, bits: int) -> tuple[str, int]:
    """Text and value of a constant for an operand of 32 or 64 bits."""
    which = rng.randrange(4)
    if which == 0:
        number = rng.choice((0, 1, 63, 64, -1, -16))
        return str(number), number
    if which == 1:
        return ("0.5", 0x3FE << 52) if bits == 64 else ("0.5", 0x3F000000)
    if which == 2:
        return "-4.0", 0xC0800000 if bits == 32 else 0xC01 << 52
    number = rng.getrandbits(31) | 0x10000
    return f"{number:#x}", number


def alu_cases(name: str) -> list[Case]:
    """Registers, constants, destination = source."""
    rng = random.Random(name)
    scalar = OPS[name]
    wide_d, wide_a, wide_b = scalar.bits
    cases = []
    for turn in range(48):
        a, b, d = value(rng), value(rng), value(rng)
        if turn >= 40:  # where the result can be zero
            a, b = M64 * (turn & 1), M64 * (turn >> 1 & 1)
        b = {1: a, 2: a ^ M64, 3: a + 1 & M64}.get(turn % 8 if turn < 40 else 0, b)
        texts = [registers(16, wide_d)] if wide_d else []
        first, second = registers(12, wide_a), registers(14, wide_b)
        x, y = a, b
        if turn >= 40:
            pass
        elif turn % 8 == 4 and name != "s_set_gpr_idx_idx":
            first, x = constant(rng, wide_a)
        elif turn % 8 == 5 and wide_b:
            second, y = constant(rng, wide_b)
        elif turn % 8 == 6 and wide_a == wide_d:
            first, x = registers(16, wide_a), d
        elif turn % 8 == 7:
            first, x = registers(20, wide_a), 0
        texts.append(first)
        texts += [second] if wide_b else []
        case = Case(f"{name} {', '.join(texts)}", (a, b, d), state(rng))
        x = case.state.vcc if turn % 8 == 7 and turn < 40 else x
        if turn >= 40:
            case.state.exec = (0, M64, a, a ^ M64)[turn % 4 if turn < 44 else 1]
        cases.append(apply(case, scalar, x, y))
    return cases


def k_cases(name: str) -> list[Case]:
    rng = random.Random(name)
    cases = []
    for turn in range(48):
        k = rng.choice((0, 1, 0x7FFF, 0x8000, 0xFFFF, rng.getrandbits(16)))
        d = value(rng)
        d = {
            1: sx(k, 16) & M64,
            2: k,
            3: k + 1,
            4: 0x7FFFFFF0,
            5: M64,
            6: 0x80000003,
            7: 3,
        }.get(turn % 8, d)
        case = Case(f"{name} s16, {k:#x}", (0, 0, d), state(rng))
        cases.append(apply(case, CONSTANT[name], 0, k))
    return cases


# Operands that are no registers: s_mov_b32 and s_mov_b64 read them.
def source_cases() -> list[Case]:
    cases = []
    for turn in range(8):
        vcc, mask, scc = turn & 1, turn >> 1 & 1, turn >> 2
        here = State(scc, mask << 40, vcc << 33, turn * 257)
        reads = {"src_vccz": 1 - vcc, "src_execz": 1 - mask, "src_scc": scc,
                 "m0": turn * 257, "exec_hi": mask << 8, "vcc_hi": vcc << 1,
                 "vcc_lo": 0, "exec_lo": 0}  # fmt: skip
        for name, number in reads.items():
            case = Case(f"s_mov_b32 s16, {name}", (0, 0, M64), here)
            cases.append(apply(case, OPS["s_mov_b32"], number, 0))
    return cases


def wide_source_cases() -> list[Case]:
    here = State(0, 3 << 40, 5 << 33, 9)
    reads = {"exec": here.exec, "vcc": here.vcc, "src_shared_base": 1 << 48,
             "src_shared_limit": (1 << 48) + M32, "src_private_base": 2 << 48,
             "src_private_limit": (2 << 48) + M32}  # fmt: skip
    cases = []
    for name, number in reads.items():
        case = Case(f"s_mov_b64 s[16:17], {name}", (0, 0, M64), here)
        cases.append(apply(case, OPS["s_mov_b64"], number, 0))
    for name in ("exec", "vcc"):
        case = Case(f"s_mov_b64 {name}, s[12:13]", (6 << 40 | 5, 0, 1), here, 1)
        case.after = dataclasses.replace(here, **{name: 6 << 40 | 5})
        cases.append(case)
    return cases


def alu_unit(name: str) -> Unit:
    """The kernel that tests a scalar ALU instruction."""
    if name in CONSTANT:
        return make_unit(name, k_cases(name))
    cases = alu_cases(name)
    if name == "s_mov_b32":
        cases += source_cases()
    elif name == "s_mov_b64":
        cases += wide_source_cases()
    elif name == "s_and_saveexec_b64":
        # EXEC is both read and written; the destination EXEC wins.
        here = State(1, 0xF0F0, 0, 0)
        case = Case(f"{name} exec, s[12:13]", (0xFF, 0, 7), here, 7)
        case.after = dataclasses.replace(here, scc=1)
        cases.append(case)
    return make_unit(name, cases)
