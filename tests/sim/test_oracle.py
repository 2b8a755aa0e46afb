"""Every instruction of the lists against the independent model, bit for bit.

The model is isa_model.py (vector), isa_scalar.py, isa_control.py and
isa_memory.py; the coverage test reads csrc/sim/*.def and wants a unit for each
instruction in each encoding.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import re

import isa_cases
import isa_lists
import isa_numbers as n
import pytest
from isa_units import BUILDERS, LANE_ACCESS
from oracle import Oracle

# Instructions without a unit, with the reason.
UNTESTED: dict[str, str] = {}


@pytest.mark.parametrize("family", BUILDERS)
def test_every_instruction_equals_the_model(family: str) -> None:
    units = [build(name) for name, build in BUILDERS[family]]
    assert [u.names for u in units] == [[name] for name, _ in BUILDERS[family]]
    with Oracle(units) as oracle:
        found = oracle.failures()
    assert not found, f"{len(found)} fail:\n" + "\n".join(found[:20])


def test_no_instruction_of_the_lists_lacks_a_unit() -> None:
    listed = {name for row in isa_lists.all_rows() for name in row.instructions()}
    tested = {name for builders in BUILDERS.values() for name, _ in builders}
    for name, reason in UNTESTED.items():
        print(f"{name}: not tested: {reason}")
    missing = listed - tested - set(UNTESTED)
    assert not missing, f"no unit for {sorted(missing)}"
    assert not tested - listed, f"not in the lists: {sorted(tested - listed)}"
    assert not set(UNTESTED) & tested


def encodings(row: isa_lists.Row) -> set[str]:
    """Suffixes that the instruction must be tested with."""
    types = [row.cells.get(c, "none") for c in ("D", "A", "B", "C")]
    if row.list not in ("vop1", "vop2", "vopc") or row.name in LANE_ACCESS:
        return set()
    if re.match(r"v_mad[mak]k_", row.name):
        return {"v_mad"}
    wanted = {"_e32", "_e64"}
    if not any(t.endswith("64") for t in types):
        wanted |= {"_sdwa"} if row.name not in isa_cases.NO_SDWA else set()
        wanted |= {"_dpp"} if row.list != "vopc" else set()
    return wanted


def test_each_encoding_of_a_vector_instruction_is_among_its_cases() -> None:
    for row in isa_lists.all_rows():
        if wanted := encodings(row):
            texts = [case.text for case in isa_cases.cases_of(row.name)]
            for suffix in wanted:
                assert any(suffix in text for text in texts), row.name + suffix


def test_the_cases_hold_what_makes_numbers_hard() -> None:
    rows = [r for c in isa_cases.cases_of("v_fma_f32") for r in c.rows]
    values = {x & n.M32 for row in rows for x in row}
    for special in (0, 1 << 31, 0x7F800000, 0xFF800000, 1, 0x807FFFFF):
        assert special in values
    assert any(n.is_signalling(x, "f32") for x in values)
    modes = {case.mode for case in isa_cases.cases_of("v_fma_f32")}
    assert {mode & 3 for mode in modes} == {0, 1, 2, 3}
    assert {mode >> 4 & 3 for mode in modes} == {0, 1, 2, 3}
    assert any(c.exec != n.M64 for c in isa_cases.cases_of("v_fma_f32"))


def test_the_oracle_notices_a_wrong_dword() -> None:
    unit = isa_cases.unit("v_add_u32")
    wrong = bytearray(unit.expected)
    wrong[0x804] ^= 1
    unit.expected = bytes(wrong)
    with Oracle([unit]) as oracle:
        found = oracle.failures()
    assert len(found) == 2 and "offset 0x804" in found[0]
