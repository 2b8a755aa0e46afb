"""Mutants that change no result: proved by the compiler, or with a reason.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from isa_mutants import Mutant

# (row, what): regular expressions, with why no test can tell the difference.
REASONS: list[tuple[str, str, str]] = [
    (
        r"s_(add_i32|addc_u32|absdiff_i32|mul_hi_[iu]32)|"
        r"v_(mul_(legacy_f32|hi_[iu]32|(hi_)?[iu]32_[iu]24)|add_i32|(addc|add)_co_u32|"
        r"(min|max)3?_f(16|32|64)|(mad|mac|madak|fma)_(legacy_)?\w+|"
        r"mad_[iu]64_[iu]32|cmpx?_[ou]_f(16|32|64)|sad_(u8|hi_u8|u16|u32)|lerp_u8|"
        r"pk_(mad|fma|min|max)_\w+|dot[248]_\w+|div_fmas_f(32|64))",
        r"A and B swapped",
        "the two are added, multiplied or compared in a way that has no order; for "
        "min, max and NaN results the rule looks at the sources, not at the statement",
    ),
    (r"v_med3_[iu](16|32)", r"B and C swapped", "the middle of three has no order"),
    (
        r"v_cmpx?_(f|t|tru)_\w+",
        r"[AB] (and B swapped|is .*|read .*)",
        "the result does not depend on the operands",
    ),
    (
        r"v_cmpx?_[ou]_f(32|64)",
        r"[AB] is u(32|64), not f(32|64)",
        "neither a sign nor a flushed denormal makes or unmakes a NaN",
    ),
    (r"v_cmpx?_class_\w+", r"B is u16, not u32", "the mask has ten bits"),
    (
        r"s_(subb|addc)_u32|s_lshl\d_add_u32",
        r"32 is one more",
        "a borrow sets all 32 upper bits",
    ),
    (r"s_bfe_u32", r"32 is one more", "32 bits of 32 are all of them"),
    (
        r"s_bfe_\w+",
        r"B read with the other sign",
        "what is shifted in is masked off",
    ),
    (
        r"[sv]_bfe_i32|s_wqm_b32|[sv]_(brev|bfrev)_b32|v_align(bit|byte)_b32",
        r"A read with the other sign",
        "the upper 32 bits are cut off again",
    ),
    (
        r"s_ff[01]_i32_b32|v_ffbl_b32",
        r"A read with the other sign",
        "if there is such a bit, it is among the lower 32",
    ),
    (
        r"s_bitcmp[01]_b(32|64)",
        r"A read with the other sign",
        "only a bit of the operand itself is looked at",
    ),
    (
        r"s_absdiff_i32",
        r"> is (>=|<)|[AB] read with the other sign",
        "the sign of the difference is dropped afterwards",
    ),
    (
        r"s_set_gpr_idx_on",
        r"[AB] read with the other sign",
        "the index is A's low byte, and B is not an operand",
    ),
    (
        r"s_movrel[sd]_b(32|64)",
        r"A read with the other sign",
        "the bits are moved as they are, or A is not used",
    ),
    (
        r"v_cvt_pk_u8_f32|v_trig_preop_f64",
        r"B is u16, not u32",
        "B's lower five bits count",
    ),
    (
        r"s_endpgm(_saved)?|s_sethalt",
        r"SCC changes too",
        "no instruction of the wave follows",
    ),
    (r"s_mem(real)?time", r"4 bytes, not 8", "a time is a pair whatever the size"),
    (
        r"v_cvt_f32_ubyte[01]|v_cvt_off_f32_i4",
        r"A is u16, not u32",
        "the bits used are among the lower 16",
    ),
    (
        r"v_cvt_f32_ubyte3",
        r"A is f32, not u32",
        "the top byte but for its sign is zero in a denormal",
    ),
    (
        r"v_(exp|exp_legacy|cos)_f32",
        r"flush is dropped \(2\)",
        "of a denormal it is one, as of zero",
    ),
    (
        r"v_(log|log_legacy|rsq|sqrt|sin|cos)_f32",
        r"flush is dropped \(1\)",
        "no normal operand gives a denormal result",
    ),
    (
        r"v_cvt_u16_f16",
        r"> is >=|65535.0f is one more",
        "no half lies between 65504 and infinity, and 65535 is the limit itself",
    ),
    (
        r"v_cvt_u16_f16|v_cvt_norm_u16_f16|v_sat_pk_u8_i16|v_lshrrev_b16|v_m(ax|in)_u16",
        r"D is u32, not u16",
        "the result has no more than 16 bits",
    ),
    (
        r"v_mul_i32_i24|v_mad_i16|v_pk_mad_[iu]16|v_mad_u16|v_dot2_[iu]32_[iu]16",
        r"u?int64_t is u?int32_t( \(2\))?",
        "the product fits, or only its lower half is used",
    ),
    (
        r"v_(lsh[lr]rev|ashrrev)_[bi](16|32|64)|v_bfm_b32|v_pk_(lsh[lr]|ashr)rev_[bi]16",
        r"A is (u16, not u32|i16, not u16|u32, not u16)",
        "a shift count or width has at most six bits",
    ),
    (
        r"v_bfe_[iu]32|v_bfm_b32|v_lshl_(add|or)_\w+|v_add_lshl_u32|v_align(bit|byte)_b32",
        r"[BC] is u16, not u32",
        "a shift count or width has at most six bits",
    ),
    (
        r"v_(pk_)?(mul_lo|lshlrev)_[bu]16|v_mad_legacy_[iu]16",
        r"[ABC] (is (i16|u32), not u16|read with the other sign)",
        "the lower 16 bits of the result depend on the operands' lower 16 only",
    ),
    (
        r"v_pack_b32_f16",
        r"B is (i16|u32), not u16",
        "B's upper bits are shifted out",
    ),
    (
        r"v_(pk_)?(add|sub|subrev|mad)_[iu](16|32)|v_mad_u32_u24|v_dot[248]_u32_u\d+",
        r"> is >=|UINT32_MAX is \(UINT32_MAX - 1\) \(1\)",
        "a result at the limit is the limit",
    ),
    (
        r"v_div_scale_f(32|64)",
        r"A is u(32|64), not f(32|64)",
        "A is B or C, and the result is NaN if that is flushed to zero",
    ),
    (
        r"v_mad[am]k_f32",
        r"C is u32, not f32",
        "the statement flushes the literal itself, which has no modifiers",
    ),
    (
        r"v_mad_[iu]32_[iu]16|v_cvt_pknorm_[iu]16_f16|v_pack_b32_f16",
        r"no op_sel",
        "the flag is about a result of 16 bits",
    ),
    (
        r"v_ldexp_f64",
        r"4200 is one more \([12]\)",
        "every number has long become zero or infinite",
    ),
    (
        r"v_mbcnt_hi_u32_b32",
        r"< is <=|32 is one more \(1\)|- is \+ \(1\)",
        "lane 32 counts no bits either way, and the host's shifts are modulo 32",
    ),
    (
        r"v_dot[48]_[iu]32_[iu][48]",
        r"[AB] is pk16, not raw",
        "op_sel_hi stands at its default, and no other can be written",
    ),
    (
        r"(swizzle|b?permute)_b32",
        r"8 bytes, not 4",
        "exchanges move a register whatever the size",
    ),
]

# ---- proofs ----------------------------------------------------------------

# What a row's operands are in C: as stored (which tells the compiler their
# range) and as the statement sees them.
TYPES = {
    "u32": ("uint32_t", "uint32_t"), "i32": ("int32_t", "int32_t"),
    "u16": ("uint16_t", "uint32_t"), "i16": ("int16_t", "int32_t"),
    "b32": ("uint32_t", "uint32_t"), "b64": ("uint64_t", "uint64_t"),
    "u64": ("uint64_t", "uint64_t"), "i64": ("int64_t", "int64_t"),
    "f16": ("float", "float"), "f32": ("float", "float"), "mix": ("float", "float"),
    "hi16": ("float", "float"), "pkf16": ("float", "float"),
    "f64": ("double", "double"),
    "pk16": ("uint16_t", "uint32_t"), "raw": ("uint32_t", "uint32_t"),
    "mask": ("_Bool", "uint32_t"), "none": ("uint32_t", "uint32_t"),
}  # fmt: skip
PRELUDE = """
#include "exec_estimates.h"
#include "exec_integer.h"
#include "exec_media.h"
typedef struct wave {
    uint32_t s[144], scc, mode;
} wave;
enum { SRC_M0 = 124, MODE_GPR_IDX = 27 };
void jump(wave *w, uint64_t address);
void branch(wave *w, int32_t dwords);
uint32_t read_hwreg(wave *w, uint32_t what);
void write_hwreg(wave *w, uint32_t what, uint32_t value);
#define VCC_BIT (vcc >> LANE & 1)
"""
FUNCTION = """
struct io{name} {{
    {a} A; {b} B; {c} C; {m} M; {d} D;
    uint32_t SCC, CARRY, LITERAL;
    uint64_t EXEC, VCC, PC, vcc;
    int16_t IMM;
    _Bool CLAMP, IEEE;
    unsigned ROUND, LANE;
}};
void {name}(struct io{name} *x, wave *w)
{{
    const {la} A = x->A; const {lb} B = x->B; const {lc} C = x->C;
    const {lm} M = x->M; {ld} D = x->D;
    uint32_t SCC = x->SCC & 1, CARRY = 0, LITERAL = x->LITERAL;
    uint64_t EXEC = x->EXEC, VCC = x->VCC, PC = x->PC, vcc = x->vcc;
    int32_t IMM = x->IMM;
    _Bool CLAMP = x->CLAMP, IEEE = x->IEEE;
    unsigned ROUND = x->ROUND & 3, LANE = x->LANE & 63;
    {{ {statement}; }}
    x->D = ({d})D; x->SCC = SCC != 0; x->CARRY = CARRY; x->EXEC = EXEC;
}}
"""


def function(name: str, mutant: Mutant, statement: str) -> str:
    """A C function that does what the row does."""
    cells = mutant.row.cells
    types = {x: cells.get(x, "none") for x in "ABCD"} | {"M": "none"}
    if "sources" in cells:
        types = dict.fromkeys("ABDM", cells["type"]) | {"C": "none"}
    if mutant.row.list == "vopc":
        types["D"] = "mask"
    values = {x.lower(): TYPES[t][0] for x, t in types.items()}
    values |= {f"l{x.lower()}": TYPES[t][1] for x, t in types.items()}
    return FUNCTION.format(name=name, statement=statement, **values)


def bodies(assembly: str) -> dict[str, str]:
    """Each function's instructions, labels and constants renamed in order."""
    constants = dict(re.findall(r"^(\.LC\d+):\n((?:\t.*\n)+)", assembly, re.M))
    found = {}
    for name, body in re.findall(
        r"^(p\w+):\n(.*?)^\t\.size\t\1", assembly, re.M | re.S
    ):
        names: dict[str, str] = {}

        def rename(match: re.Match[str], names: dict[str, str] = names) -> str:
            label = match[0]
            return constants.get(label) or names.setdefault(label, f"L{len(names)}")

        found[name] = re.sub(r"\.LC?\d+", rename, body)
    return found


def proved(mutants: Sequence[Mutant], folder: Path, compiler: str) -> list[bool]:
    """Whether the compiler makes the same code of mutant and row, each."""
    text = [PRELUDE]
    for i, mutant in enumerate(mutants):
        if (
            mutant.statement
            and mutant.row.list != "sopp"
            and "row->" not in (mutant.statement)
        ):
            text.append(function(f"p{i}a", mutant, mutant.row.cells["meaning"]))
            text.append(function(f"p{i}b", mutant, mutant.statement))
    with tempfile.TemporaryDirectory() as work:
        source = Path(work, "proof.c")
        source.write_text("".join(text))
        flags = (
            *("-std=c11", "-w", "-O2", "-ffp-contract=off", "-fno-ipa-icf"),
            *("-fno-asynchronous-unwind-tables", "-fcf-protection=none"),
        )
        command = [compiler, *flags, f"-I{folder}", "-S", str(source), "-o", "-"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr[:4000])
    found = bodies(done.stdout)
    return [
        f"p{i}a" in found and found[f"p{i}a"] == found.get(f"p{i}b")
        for i in range(len(mutants))
    ]


def reason(mutant: Mutant) -> str:
    """Why a mutant that is not proved is equivalent, or empty."""
    for row, what, why in REASONS:
        if re.fullmatch(row, mutant.row.name) and re.fullmatch(what, mutant.what):
            return why
    return ""
