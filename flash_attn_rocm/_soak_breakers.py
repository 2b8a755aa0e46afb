"""Which breakers a soak saw open, what opened them, and whether they closed again.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._guard import breaker_list


@dataclass
class _Open:
    """A breaker that is not closed."""

    index: int  # the call that opened it; -1: an earlier process
    failures: int


class Breakers:
    """Asked after each call."""

    def __init__(self) -> None:
        self.open: dict[tuple[str, str], _Open] = {
            (row["device"], row["kernel"]): _Open(-1, row["failures"])
            for row in breaker_list()
        }

    def look(self, index: int, cause: str) -> list[dict[str, Any]]:
        """Lines for the journal: what opened and closed with call `index`.

        Args:
            cause: the kind of fault that struck the call; "" none.
        """
        lines: list[dict[str, Any]] = []
        rows = {(row["device"], row["kernel"]): row for row in breaker_list()}
        for key, row in rows.items():
            known = self.open.get(key)
            if known is None or row["failures"] > known.failures:
                self.open[key] = _Open(index, row["failures"])
                lines.append(
                    {
                        "breaker": "opened",
                        "call": index,
                        "device": key[0],
                        "kernel": key[1],
                        "failures": row["failures"],
                        "fault": cause,
                        "cause": row["cause"],
                    }
                )
        for key in [key for key in self.open if key not in rows]:
            del self.open[key]
            lines.append(
                {
                    "breaker": "closed",
                    "call": index,
                    "device": key[0],
                    "kernel": key[1],
                }
            )
        return lines

    def next(self) -> tuple[int, float] | None:
        """A call that opened one, and in how many seconds it may be tried again."""
        waits = {
            (row["device"], row["kernel"]): row["retry_in_s"] for row in breaker_list()
        }
        ready = [
            (waits.get(key, 0.0), one.index)
            for key, one in self.open.items()
            if one.index >= 0
        ]
        return None if not ready else min(ready)[::-1]
