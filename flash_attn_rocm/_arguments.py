"""What a public function was given, or an error that names the argument.

Each check returns the argument in the one form that its caller wants. They come before
anything is changed, so that a call that is refused has done nothing.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import numbers
import os
import re
from typing import Any, Callable

from ._errors import FlashAttnError

_LONGEST = 80  # characters of a value in a message


def refused(name: str, expected: str, value: object) -> FlashAttnError:
    """The error, to be raised; a value of any length is one line."""
    try:
        shown = repr(value)
    except Exception:  # its own __repr__, or a whole number that is too long for one
        shown = f"a {type(value).__name__}"
    shown = " ".join(shown.split())  # of an array
    if len(shown) > _LONGEST:
        shown = shown[:_LONGEST] + "..."
    return FlashAttnError(f"{name}: expected {expected}, got {shown}")


def word(name: str, value: Any, words: tuple[str, ...]) -> str:
    """One of `words`."""
    if not isinstance(value, str) or value not in words:
        raise refused(name, " or ".join((", ".join(words[:-1]), words[-1])), value)
    return value


def number(
    name: str, value: Any, expected: str, fits: Callable[[float], bool]
) -> float:
    """A number as a float, if it fits."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            made = float(value)
        except (OverflowError, ValueError):
            raise refused(name, expected, value) from None
        if fits(made):
            return made
    raise refused(name, expected, value)


def truth(name: str, value: Any) -> bool:
    """True or False; no word that happens to be true."""
    if not isinstance(value, bool):
        raise refused(name, "True or False", value)
    return value


def text(name: str, value: Any) -> str:
    """A str."""
    if not isinstance(value, str):
        raise refused(name, "a str", value)
    return value


def symbol(name: str, value: Any) -> str:
    """The name of a kernel."""
    if not isinstance(value, str) or not re.fullmatch(r"\w{1,127}", value, re.ASCII):
        raise refused(name, "a symbol", value)
    return value


def function(name: str, value: Any) -> Callable[..., Any]:
    """Something that can be called."""
    if not callable(value):
        raise refused(name, "a function", value)
    return value  # type: ignore[no-any-return]


def path(name: str, value: Any) -> str:
    """A path that a file may have, str, bytes or os.PathLike."""
    try:
        made = os.fsdecode(value)
    except TypeError:
        raise refused(name, "a path", value) from None
    if not made or "\0" in made:
        raise refused(name, "a path", value)
    return made
