"""The table of kinds of attention in README.md, made from the tests that prove it.

    python scripts/feature_table.py [--write]

prints the table, or renews it between its markers. A row names, for the forward and for
the backward, a test that has to exist; dtypes are those that these tests run. Exit code
0: done; 1: a test that a row names is gone.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MARKERS = ("<!-- feature table: scripts/feature_table.py -->", "<!-- end -->")
DTYPES = "fp16, bf16, fp32, fp64"
EACH = "test_every_pair_of_features_is_accurate"  # both directions, all dtypes
# Of the rows that `flash_attn_varlen_func` serves, both directions too.
PACKED = (
    "test_the_arguments_hold_in_each_sequence",
    "test_dropout_is_that_of_one_long_sequence_and_repeats",
)


class Row(NamedTuple):
    """A kind of attention, where it is asked for, and the tests that prove it."""

    kind: str
    where: str
    forward: str
    backward: str = EACH


_OWN = "`attention`, `flash_attn_func`, `flash_attn_varlen_func`"
_ALL = f"SDPA, {_OWN}"
_MASKED = "SDPA (without `is_causal`), `attention`"
ROWS = (
    Row(
        "causal, top-left or bottom-right",
        "SDPA (top-left), `attention` (either), `flash_attn_func` and "
        "`flash_attn_varlen_func` (bottom-right)",
        "test_causal_equals_its_mask",
    ),
    Row("sliding window (left, right)", _OWN, "test_a_window_equals_its_mask"),
    Row(
        "bool mask, any broadcast",
        _MASKED,
        "test_mask_and_bias_with_any_number_of_keys",
    ),
    Row(
        "additive bias, any broadcast, with its gradient",
        _MASKED,
        "test_any_strides_of_bias_and_mask",
        "test_the_gradient_of_a_bias_is_summed_over_what_it_is_broadcast_over",
    ),
    Row(
        "ALiBi, slopes (H) or (B, H)",
        f"{_OWN} (H alone)",
        "test_alibi_equals_its_bias",
    ),
    Row("softcap", _OWN, "test_softcap_of_any_size"),
    Row(
        "dropout, Philox",
        _ALL,
        "test_the_forward_keeps_the_weights_of_the_replay",
        "test_dq_dk_and_dbias_drop_what_the_forward_dropped",
    ),
    Row(
        "first keys that a window never hides",
        "`attention`",
        "test_first_keys_equal_their_mask",
    ),
    Row(
        "a learnable sink per head, with its gradient",
        "`attention`",
        "test_a_sink_equals_one_more_key_without_a_value",
        "test_the_gradient_of_a_sink_is_there_for_each_query",
    ),
    Row(
        "block masks, local and global patterns",
        "`attention`",
        "test_blocks_equal_their_mask",
        "test_blocks_that_are_not_listed_keep_queries_from_gradients",
    ),
    Row(
        "packed sequences",
        "`flash_attn_varlen_func`",
        "test_packed_sequences_equal_a_call_for_each",
        "test_a_sequence_does_not_reach_the_gradients_of_another",
    ),
    Row("GQA and MQA", _ALL, "test_grouped_heads_equal_repeated_heads"),
    Row(
        "gradient of the log-sum-exp",
        _OWN,
        "test_gradient_of_the_log_sum_exp_alone",
        "test_gradient_of_the_log_sum_exp_alone",
    ),
)


def tests() -> set[str]:
    """The names of all tests."""
    names = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return names


def missing() -> list[str]:
    """Tests that rows name and that are not there."""
    named = {name for row in ROWS for name in (row.forward, row.backward)}
    return sorted(named.union(PACKED) - tests())


def table() -> str:
    """The table as Markdown."""
    lines = [
        "| kind of attention | asked for by | forward | backward | dtypes |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {r.kind} | {r.where} | fused | fused | {DTYPES} |" for r in ROWS]
    return "\n".join(lines)


def renewed(text: str) -> str:
    """README's text with the table as it should be."""
    begin, end = MARKERS
    head, rest = text.split(begin)
    return f"{head}{begin}\n{table()}\n{end}{rest.split(end, 1)[1]}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into README.md")
    write = parser.parse_args().write
    gone = missing()
    if gone:
        print("tests that are named and not there: " + ", ".join(gone), file=sys.stderr)
        return 1
    readme = ROOT / "README.md"
    if write:
        readme.write_text(renewed(readme.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
