"""Runs a command of ours inside the test's process.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def command(
    main: Callable[[list[str]], int], capsys: Any, *words: object
) -> tuple[Any, str, str]:
    """The exit code of main(words), and what it wrote to stdout and to stderr."""
    try:
        code: Any = main([str(word) for word in words])
    except SystemExit as stop:
        code = stop.code
    text = capsys.readouterr()
    return code, text.out, text.err
