"""The tests that docs/degradation.md names exist.

SPDX-License-Identifier: BSD-3-Clause
"""

import re

from helpers import ROOT

TABLE = (ROOT / "docs" / "degradation.md").read_text().split("## Failures")[1]
ROWS = [row.split("|") for row in TABLE.splitlines() if row.startswith("| ")]
CELLS = [row[5] for row in ROWS[1:]]
C_TESTS = "".join(path.read_text() for path in (ROOT / "tests" / "c").glob("test_*.c"))


def exists(name):
    file, _, test = name.partition("::")
    if not file.endswith(".py"):
        return f"RUN(run, {name});" in C_TESTS
    path = ROOT / "tests" / file
    text = path.read_text() if path.is_file() else ""
    found = re.search(rf"^ *(def|class) {test}\b", text, re.MULTILINE)
    return bool(text) and (not test or bool(found))


def test_each_failure_has_tests_that_exist():
    failures = [re.findall(r"`([^`]+)`", cell) for cell in CELLS]
    tests = [name for names in failures for name in names]
    assert len(failures) >= 20 and all(failures[1:]), failures
    assert [name for name in tests if not exists(name)] == []


def test_a_name_that_is_none_is_noticed():
    assert not exists("guard_does_the_dishes")
    assert not exists("test_guard.py::test_the_dishes")
    assert not exists("test_nothing.py")
