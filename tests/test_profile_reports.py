"""Profiles as tables, files, traces and pictures.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

import pytest
from helpers import ROOT
from helpers.profile_sample import launch, png_size, sample

from hipsim import profile_plot
from hipsim.files import FileError
from hipsim.profile_file import join, read_profile, write_json
from hipsim.profile_plot import Point, new_figure, plot, roof, roofline_points
from hipsim.profile_summary import summarise
from hipsim.profile_table import table
from hipsim.profile_trace import trace

# ---- the table ---------------------------------------------------------------


def test_table_says_simulated_first_and_names_the_bound_before_the_estimate():
    lines = table(sample()).splitlines()
    assert lines[0].startswith("Simulated gfx906") and "no figure" in lines[0]
    row = next(line for line in lines if line.startswith("large "))
    assert re.search(
        r" 1 +VALU 100 %, LDS 40 % +100 us +200 us, 100 us to 400 us ", row
    )


def test_table_has_one_row_per_kernel_the_longest_first_with_means_of_a_call():
    rows = [s for s in table(sample()).splitlines() if "error bar +-60 %)" in s]
    assert [row.split()[:3] for row in rows] == [
        ["large", "1", "VALU"],
        ["small", "2", "VALU"],
    ]
    assert "2.00 us" in rows[1]  # at least: (1 + 3) / 2
    assert "4.00 us, 2.00 us to 8.00 us" in rows[1]


def test_every_estimate_in_a_table_carries_the_largest_error_bar():
    wide = launch("small")
    wide["estimate"]["error"] = 0.85
    text = table(sample(launch("small"), wide))
    assert text.count("to 4.00 us") == text.count("(error bar +-85 %)") == 1
    assert "60 %" not in text


def test_table_lists_bounds_by_size_with_their_share_of_the_longest():
    swapped = launch("kernel")
    swapped["bounds"].reverse()
    text = table(sample(swapped))
    assert "bounds    VALU 1.00 us (100 %), LDS 400 ns (40 %)" in text


def test_table_states_the_sampling():
    text = table(sample(launch("kernel", groups_traced=1), launch("kernel")))
    assert "traced 2.5 of 4 workgroups" in text
    assert "executed" not in text and "incomplete" not in text
    text = table(sample(launch("kernel", groups_executed=1, incomplete=True)))
    assert "executed 1 of them" in text and "counters incomplete" in text


def test_table_shows_means_of_several_calls_as_such():
    three = [launch("kernel") for _ in range(3)]
    three[0]["counters"]["SQ_WAVES"] = 17
    lines = table(sample(*three)).splitlines()
    assert "kernel, per call, averaged over 3 calls" in lines
    text = "\n".join(lines)
    assert "traced 4 of 4 workgroups" in text
    assert "SQ_WAVES 16.3," in text and "SQ_INSTS_VALU 1,600," in text
    assert "averaged" not in table(sample(launch("kernel")))


def test_table_says_where_a_range_ends_at_the_bound():
    clipped = launch("kernel")
    clipped["estimate"]["seconds"]["low"] = 1.9e-6  # 2.00 / 1.6 were 1.25
    text = table(sample(clipped))
    assert "2.00 us, 1.90 us to 4.00 us (error bar +60 %, low end: bound)" in text
    clipped["estimate"]["seconds"]["low"] = 2e-6 / 1.6
    assert "1.25 us to 4.00 us (error bar +-60 %)" in table(sample(clipped))


def test_table_marks_estimated_counters_and_gives_their_error_bar():
    part = launch("kernel", estimated=["SQ_INSTS_VALU"])
    text = table(sample(part))
    assert "SQ_INSTS_VALU ~1,600" in text and "SQ_WAVES 16" in text
    assert "VALUBusy ~50 %" in text and "FETCH_SIZE 1.00 KB" in text
    assert text.endswith("~ follows from the estimate, error bar +-60 %\n")
    assert "~" not in table(sample(launch("kernel", derived={})))


def test_percentages_of_several_launches_weigh_by_time():
    slow = launch("kernel", scale=3)
    slow["derived"]["VALUBusy"] = 90.0
    (summary,) = summarise(sample(launch("kernel"), slow))
    assert summary.derived["VALUBusy"] == pytest.approx((50 + 3 * 90) / 4)


def test_calls_whose_details_were_dropped_still_count():
    data = sample(launch("kernel"))
    data["kernels"] = [
        {"kernel": "kernel", "launches": 10, "counters": {"SQ_WAVES": 160}}
        | {"error": 0.6}
        | {"seconds": {"bound": 2e-5, "low": 2e-5, "middle": 3e-5, "high": 5e-5}},
        {"kernel": "gone", "launches": 1, "counters": {}, "error": 0.6}
        | {"seconds": {"bound": 1e-6, "low": 1e-6, "middle": 2e-6, "high": 3e-6}},
    ]
    text = table(data)
    rows = {s.split()[0]: s for s in text.splitlines() if "(error bar" in s}
    assert re.search(r"kernel +10 .* 2\.00 us  3\.00 us, 2\.00 us to 5", rows["kernel"])
    assert re.search(r"gone +1  unknown +1\.00 us  2\.00 us", rows["gone"])
    assert "kernel, the last 1 of 10 calls\n" in text
    data["launches_dropped"] = 10
    twice = join([data, data])
    assert twice["launches_dropped"] == 20
    assert [s.total.calls for s in summarise(twice)] == [20, 2]
    assert summarise(twice)[0].total.middle == pytest.approx(6e-5)


def test_a_profile_of_sums_alone_is_simulated_and_has_its_error_bar(tmp_path):
    """All launches were dropped, for example since memory ran out."""
    seconds = {"bound": 1e-6, "low": 1e-6, "middle": 2e-6, "high": 3e-6}
    row = {"kernel": "gone", "launches": 2, "counters": {}, "seconds": seconds}
    data = {**sample(), "launches": [], "kernels": [{**row, "error": 0.6}]}
    for profile in (data, join([data, data])):
        text = table(profile)
        assert text.startswith("Simulated gfx906")
        assert "gone " in text and "(error bar +-60 %)" in text
    write_json(data, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == data
    assert roofline_points(data) == [] and not trace(data)["traceEvents"]


# ---- files -------------------------------------------------------------------


def test_a_saved_profile_reads_back_equal(tmp_path):
    write_json(sample(), tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == sample()


def without(profile, *path):
    place = profile
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return profile


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "not a profile"),
        ({"launches": []}, "version: expected 1, got None"),
        ({"version": 1, "launches": 5}, "launches: unexpected value 5"),
        (without(sample(), "device"), "device is missing"),
        ({"version": 1, "launches": [], "kernels": [{}]}, "device is missing"),
        (without(sample(), "device", "hbm_gbs"), "hbm_gbs is missing"),
        (without(sample(), "launches", 1, "bounds"), "launch 1: bounds is missing"),
        (without(sample(), "launches", 0, "instructions", 1, "count"), "count"),
        (without(sample(), "launches", 0, "estimate", "error"), "error is missing"),
        (sample(5), "launch 0: expected an object, got 5"),
        (sample(launch("k", counters={"SQ_WAVES": "x"})), "SQ_WAVES: unexpected"),
        (sample(launch("k", counters={"SQ_WAVES": True})), "SQ_WAVES: unexpected"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_profile_is_refused_in_one_line(tmp_path, data, words):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FileError) as caught:
        read_profile(path)
    assert "p.json: " in str(caught.value) and words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("traced", value) for value in (None, "x", [], {}, 1.5, -1, True)),
        *(("lanes", value) for value in (None, "x", [], {}, -1, math.nan, math.inf)),
        *(("count", value) for value in (None, 1.5, -1)),
        *(("offset", value) for value in (None, 1.5, math.nan)),
        ("stall_cycles", -1),
        ("lds_conflict_cycles", -1),
    ],
)
def test_instructions_with_impossible_counts_are_refused(tmp_path, key, value):
    bad = launch("kernel")
    bad["instructions"][1][key] = value
    (tmp_path / "p.json").write_text(json.dumps(sample(bad)))
    with pytest.raises(FileError, match=f"launch 0: instruction: {key}: unexpected"):
        read_profile(tmp_path / "p.json")


def test_joined_profiles_keep_every_launch_in_order():
    parts = [sample(launch("a"), launch("b")), sample(launch("c"))]
    assert [x["kernel"] for x in join(parts)["launches"]] == ["a", "b", "c"]
    assert join(parts)["device"] == parts[0]["device"]
    assert len(parts[0]["launches"]) == 2, "the parts were changed"
    assert join([]) == {"version": 1, "launches": []}


# ---- the trace ---------------------------------------------------------------


def slices(data):
    return [event for event in data["traceEvents"] if event["ph"] == "X"]


def test_trace_has_a_process_per_simd_and_a_slice_per_event():
    data = trace(sample(launch("kernel")))
    names = {
        event["pid"]: event["args"]["name"]
        for event in data["traceEvents"]
        if event["name"] == "process_name"
    }
    assert sorted(names.values()) == [
        "one CU, SIMD 0: launch 0, kernel",
        "one CU, SIMD 1: launch 0, kernel",
    ]
    got = sorted(
        (s["name"], names[s["pid"]][13], s["ts"], s["dur"]) for s in slices(data)
    )
    assert got == [
        ("lds", "1", 0.002, 0.008),  # cycles 2 to 10 at 1000 MHz, in microseconds
        ("valu", "0", 0.0, 0.004),
        ("valu", "0", 0.008, 0.004),
        ("vmem", "0", 0.004, 0.296),
    ]


def test_trace_slices_of_one_thread_never_overlap():
    data = trace(sample(launch("kernel"), launch("kernel")))
    threads: dict[tuple, list] = {}
    for part in slices(data):
        key = part["pid"], part["tid"]
        threads.setdefault(key, []).append((part["ts"], part["ts"] + part["dur"]))
    assert len(threads) == 6  # a load under way is beside its wave: 2 launches x 3
    for parts in threads.values():
        parts.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(parts, parts[1:]))
    named = {
        (event["pid"], event["tid"])
        for event in data["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert named == set(threads)


def test_trace_puts_launches_after_each_other_and_states_the_error_bar():
    data = trace(sample(launch("first"), launch("second")))
    first = [s for s in slices(data) if s["pid"] < 2]
    second = [s for s in slices(data) if s["pid"] >= 2]
    end = max(s["ts"] + s["dur"] for s in first)
    assert min(s["ts"] for s in second) >= end == pytest.approx(0.3)
    assert "Simulated" in data["otherData"]["source"]
    assert "error bar +-60 %" in data["otherData"]["times"]


# ---- the plot ----------------------------------------------------------------


def test_roofline_points_come_from_counted_operations_bytes_and_estimates():
    large, small = roofline_points(sample())
    assert small == Point(
        kernel="small",
        intensity=pytest.approx(4 * 64000 / 4096),  # two calls, 2 KB each
        low=pytest.approx(4 * 64000 / 16e-6 / 1e12),
        middle=pytest.approx(4 * 64000 / 8e-6 / 1e12),
        high=pytest.approx(4 * 64000 / 4e-6 / 1e12),
        bound=pytest.approx(4 * 64000 / 4e-6 / 1e12),
        unit="VALU",
        error=0.6,
    )
    assert large.kernel == "large" and large.bound > large.middle


def test_operations_of_some_workgroups_count_for_the_grid_that_the_times_are_of():
    (all_,) = roofline_points(sample(launch("kernel")))
    (some,) = roofline_points(sample(launch("kernel", groups_executed=1)))
    assert some.middle == pytest.approx(4 * all_.middle)
    assert some.intensity == all_.intensity


def test_a_kernel_without_operations_or_traffic_has_no_point():
    idle, quiet = launch("idle"), launch("quiet")
    idle["flops"] = 0
    quiet["derived"] = {}
    assert roofline_points(sample(idle, quiet)) == []


def test_roof_is_the_slope_up_to_the_peak():
    top = roof(sample())
    assert (top.dot2, top.fp32) == (26.5, 13.25)
    assert top.at(2) == 2.0 and top.at(1e6) == 26.5


def test_plot_is_a_picture_of_sensible_size(tmp_path):
    pytest.importorskip("matplotlib", reason="no matplotlib")
    idle = launch("idle", flops=0)
    for name, data in (("a.png", sample()), ("b.png", sample(idle))):
        plot(data, tmp_path / name)
        width, height = png_size(tmp_path / name)
        assert 1000 < width < 4000 and 400 < height < 4000
        assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize("kernels", [1, 3])
def test_plot_keeps_captions_inside_and_markers_beside_error_bars(
    tmp_path, monkeypatch, kernels
):
    pytest.importorskip("matplotlib", reason="no matplotlib")
    figures = []

    def figure(*size):
        figures.append(new_figure(*size))
        return figures[-1]

    monkeypatch.setattr(profile_plot, "new_figure", figure)
    rows = [launch(f"kernel_{i}", scale=i + 1) for i in range(kernels)]
    plot(sample(*rows), tmp_path / "p.png")
    left, right = figures[0].axes
    box = right.get_window_extent()
    captions = [text.get_window_extent() for text in right.texts]
    assert len(captions) == kernels
    for caption in captions:
        assert caption.x0 > box.x0 + 2, "crosses the axis"
        assert box.y0 < caption.y0 and caption.y1 < box.y1, "sticks out"
    bars = [line.get_window_extent() for line in left.lines if line.get_marker() == "_"]
    assert bars and len(left.texts) == kernels
    for triangle in (text.get_window_extent() for text in left.texts):
        assert not any(triangle.overlaps(bar) for bar in bars)
    assert "\N{PLUS-MINUS SIGN}60 %" in figures[0].get_suptitle()


def test_plot_leaves_the_programs_backend_alone(tmp_path):
    pytest.importorskip("matplotlib", reason="no matplotlib")
    script = """
import sys
from pathlib import Path
from hipsim.profile_file import read_profile
from hipsim.profile_plot import plot
plot(read_profile(Path(sys.argv[1])), Path(sys.argv[2]))
sys.exit("matplotlib.pyplot" in sys.modules)
"""
    files = tmp_path / "p.json", tmp_path / "p.png"
    write_json(sample(), files[0])
    subprocess.run([sys.executable, "-c", script, *files], cwd=ROOT, check=True)


def test_plot_says_what_is_wrong_in_one_line(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="no matplotlib")
    for data, path, words in (
        (sample(), "p.xyz", "xyz"),
        (sample(), "none/p.png", "No such file"),
        ({"version": 1, "launches": []}, "p.png", "nothing was simulated"),
    ):
        with pytest.raises(FileError, match=words):
            plot(data, tmp_path / path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FileError, match="matplotlib, which is not installed"):
        plot(sample(), tmp_path / "p.png")
