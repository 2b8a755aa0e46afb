"""A profile's timelines as a Chrome trace, for Perfetto or chrome://tracing.

A process is one SIMD of a compute unit in one launch, a thread is one wave, a
slice is the time for which the wave occupies a unit. Launches follow each other.
Source: the Trace Event Format (JSON object form, complete events "X").

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from typing import Any

from .profile_file import Launch, Profile
from .profile_table import error_text, simulated_text

Event = dict[str, Any]
Slice = tuple[str, float, float]  # unit, first cycle, cycle after the last


def trace(profile: Profile) -> dict[str, Any]:
    """The whole trace, ready for json.dump. Times are simulated microseconds."""
    events: list[Event] = []
    begin = 0.0  # cycles, of the current launch
    process = 0
    clock_mhz = profile["device"]["clock_mhz"] if profile["launches"] else 1
    errors = [launch["estimate"]["error"] for launch in profile["launches"]]
    for number, launch in enumerate(profile["launches"]):
        simds = sorted({track["simd"] for track in launch["timeline"]})
        for index, simd in enumerate(simds):
            name = f"one CU, SIMD {simd}: launch {number}, {launch['kernel']}"
            events.append(_name("process", process + index, 0, name))
        tid = 0
        for track in launch["timeline"]:
            pid = process + simds.index(track["simd"])
            name = f"workgroup {track['group']} wave {track['wave']}"
            for slices in _stack(track["events"]):
                events.append(_name("thread", pid, tid, name))
                events += [_slice(s, pid, tid, begin, clock_mhz) for s in slices]
                tid += 1  # so the rows of a wave stay together
        process += len(simds)
        begin += _last_cycle(launch)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "source": simulated_text(profile),
            "times": "estimates of the simulator's cycle model"
            + (f", {error_text(max(errors))}" if errors else ""),
            "shown": "the first clocks of each launch; launches one after another",
        },
    }


def _stack(events: list[list[Any]]) -> list[list[Slice]]:
    """The slices in rows, such that those of a row do not overlap.

    A load is under way while its wave goes on; viewers draw slices of one thread
    only if they are apart.
    """
    rows: list[list[Slice]] = []
    for unit, start, end in sorted(events, key=lambda event: event[1]):
        row = next((row for row in rows if row[-1][2] <= start), None)
        if row is None:
            row = []
            rows.append(row)
        row.append((unit, start, end))
    return rows


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {
        "ph": "M",
        "name": f"{what}_name",
        "pid": pid,
        "tid": tid,
        "args": {"name": name},
    }


def _slice(part: Slice, pid: int, tid: int, begin: float, clock_mhz: float) -> Event:
    unit, start, end = part
    return {
        "ph": "X",
        "name": unit,
        "cat": unit,
        "pid": pid,
        "tid": tid,
        "ts": (begin + start) / clock_mhz,  # microseconds
        "dur": (end - start) / clock_mhz,
        "args": {"cycles": end - start},
    }


def _last_cycle(launch: Launch) -> float:
    ends = [e[2] for track in launch["timeline"] for e in track["events"]]
    last: float = max(ends, default=0)
    return last
