"""The README's table of kinds of attention is that of scripts/feature_table.py.

SPDX-License-Identifier: BSD-3-Clause
"""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "feature_table.py"

needs_sources = pytest.mark.skipif(
    not SCRIPT.is_file(), reason="an installed package has no scripts"
)


@needs_sources
def test_every_row_names_tests_that_exist():
    assert runpy.run_path(str(SCRIPT))["missing"]() == []


@needs_sources
def test_the_table_in_the_readme_is_up_to_date():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(SCRIPT))["renewed"](readme) == readme


@needs_sources
def test_a_row_whose_test_is_gone_is_reported():
    script = runpy.run_path(str(SCRIPT))
    found = script["tests"]()
    found.discard(script["ROWS"][0].forward)
    script["missing"].__globals__["tests"] = lambda: found
    assert script["missing"]() == [script["ROWS"][0].forward]
