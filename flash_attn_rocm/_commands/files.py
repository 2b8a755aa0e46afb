"""Files that a command writes: refused before a long run, not after it.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .._errors import FlashAttnError

# What matplotlib writes without further programs. It is not asked: importing it
# before a script that is profiled would fix settings that the script may want to make.
_PICTURES = "png pdf svg svgz ps eps raw rgba jpg jpeg tif tiff webp".split()


def refuse(*paths: Path | None) -> None:
    """Says what would make them fail; None is no file.

    Raises:
        FlashAttnError: one is a folder, or in none.
    """
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise FlashAttnError(f"{path}: expected a file to write, is a folder")
        if not path.absolute().parent.is_dir():
            raise FlashAttnError(f"{path}: expected an existing folder to write to")


def refuse_picture(path: Path | None) -> None:
    """The same of --plot's file, whose suffix says its kind.

    Raises:
        FlashAttnError: there is no such kind, or no matplotlib.
    """
    if path is None:
        return
    kind = path.suffix[1:].lower()
    if kind and kind not in _PICTURES:
        raise FlashAttnError(
            f"--plot {path}: expected a suffix of {', '.join(_PICTURES)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise FlashAttnError(
            "--plot needs matplotlib, which is not installed (pip install matplotlib)"
        )


def write(path: Path, text: str) -> None:
    """Writes a text, and says so.

    Raises:
        FlashAttnError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FlashAttnError(f"{path}: {error.strerror or error}") from error
    print(f"wrote {path}")
