"""soak on a card: heat, clocks and errors, read from a made-up sysfs or tool.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import math
import os

import pytest
from helpers import needs_simulator
from helpers.commands import command

from flash_attn_rocm import FlashAttnError, _soak
from flash_attn_rocm._commands import main
from flash_attn_rocm._soak_report import Summary
from flash_attn_rocm._soak_telemetry import KernelLog, Sysfs, Telemetry, Tool


@pytest.fixture
def card(tmp_path):
    """Writes files of a card, by their path in its device folder."""
    folder = tmp_path / "sys" / "class" / "drm" / "card0" / "device"

    def write(**files):
        for name, text in {"vendor": "0x1002\n", **files}.items():
            path = folder / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))
        return tmp_path / "sys"

    return write


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self):
        self.now, self.slept, self.then = 0.0, [], lambda: None

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept.append(seconds)
        self.then()


def watch(root, clock, tmp_path, limit=90.0):
    log = KernelLog(tmp_path / "no-kmsg")
    times = {"clock": clock, "sleep": clock.sleep}
    return Telemetry(root, limit, 10.0, log=log, **times)


JUNCTION = {"hwmon__hwmon3__temp2_label": "junction\n"}
CLOCKS = "0: 930Mhz\n1: 1440Mhz *\n2: 1725Mhz\n"


def test_sysfs_gives_labels_degrees_clocks_and_errors(card):
    root = card(
        **JUNCTION,
        hwmon__hwmon3__temp1_input=61000,
        hwmon__hwmon3__temp2_input=83500,
        pp_dpm_sclk=CLOCKS,
        pp_dpm_mclk="0: 350Mhz\n1: 1000Mhz *\n",
        aer_dev_fatal="Undefined 0\nTOTAL_ERR_FATAL 2\n",
        ras__umc_err_count="ue: 1\nce: 7\n",
    )
    assert Sysfs(root).sample() == {
        "temperature": {"temp1": 61.0, "junction": 83.5},
        "mhz": {"sclk": 1440.0, "mclk": 1000.0},
        "errors": {"aer_fatal": 2, "ras_umc_ue": 1, "ras_umc_ce": 7},
    }


def test_cards_of_others_and_outputs_are_left_alone(card, tmp_path):
    root = card(hwmon__hwmon0__temp1_input=50000)
    drm = root / "class" / "drm"
    for name, vendor in (("card1", "0x10de"), ("card0-DP-1", "0x1002")):
        (drm / name / "device").mkdir(parents=True)
        (drm / name / "device" / "vendor").write_text(vendor)
    assert [found.parent.name for found in Sysfs(root).cards] == ["card0"]


@pytest.mark.parametrize("said", ["", "inf", "nan"])
def test_a_sensor_that_says_nothing_is_no_sensor(card, said):
    root = card(hwmon__hwmon0__temp1_input=said, pp_dpm_sclk="asleep")
    assert Sysfs(root).sample() == {"temperature": {}, "mhz": {}, "errors": {}}


def test_a_hot_card_pauses_longer_and_longer_until_it_is_cooler(card, tmp_path):
    name = "hwmon__hwmon0__temp1_input"
    root, clock = card(**{name: 96000}), Clock()
    telemetry = watch(root, clock, tmp_path)

    def cool():
        if len(clock.slept) == 3:  # below the limit is not enough
            card(**{name: 88000})
        if len(clock.slept) == 5:
            card(**{name: 84000})

    clock.then = cool
    lines = telemetry.look(math.inf)
    assert clock.slept == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert lines[-1] == {"cooling": 31.0, "limit": 90.0}
    summary = Summary()
    for line in lines:
        summary.add(line)
    assert (summary.hottest, summary.pauses, summary.cooling_s) == (96.0, 1, 31.0)


def test_a_pause_ends_with_the_time_of_the_soak(card, tmp_path):
    clock = Clock()
    root = card(hwmon__hwmon0__temp1_input=99000)
    watch(root, clock, tmp_path).look(20.0)
    assert clock.now == 20.0


def test_samples_are_taken_when_due_and_a_cool_card_does_not_pause(card, tmp_path):
    clock = Clock()
    telemetry = watch(card(hwmon__hwmon0__temp1_input=60000), clock, tmp_path)
    taken = []
    for _ in range(30):
        taken.append(len(telemetry.look(math.inf)))
        clock.now += 1.0
    assert taken == [1, *[0] * 9] * 3 and clock.slept == []


def test_errors_count_from_the_start_and_break_a_promise(card, tmp_path):
    clock = Clock()
    root = card(ras__umc_err_count="ue: 4\nce: 9\n")
    telemetry = watch(root, clock, tmp_path)
    summary = Summary()

    def look():
        for line in telemetry.look(math.inf):
            summary.add(line)
        clock.now += 10.0
        return summary.promises(0.9, set())["no error of the card"][0]

    assert look()
    card(ras__umc_err_count="ue: 5\nce: 9\n")
    assert not look()
    assert summary.errors == {"ras_umc_ue": 1}
    summary.add({"start": 0, "open": []})  # a process that starts counts anew
    for line in watch(root, clock, tmp_path).look(math.inf):
        summary.add(line)
    assert summary.errors == {"ras_umc_ue": 1}


def test_the_kernels_log_is_read_from_now_on_for_lines_of_the_gpu(tmp_path):
    path = tmp_path / "kmsg"
    path.write_text("6,1,1,-;amdgpu 0000:03:00.0: GPU reset begin!\n")
    log = KernelLog(path)
    assert log.new() == []
    with open(path, "a") as file:
        file.write("3,2,2,-;amdgpu 0000:03:00.0: ring gfx_0.0.0 timeout\n")
        file.write("6,3,3,-;usb 1-1: new device\n")
    assert log.new() == ["3,2,2,-;amdgpu 0000:03:00.0: ring gfx_0.0.0 timeout"]
    assert log.new() == []
    log.close()
    assert log.new() == []


def test_a_log_that_cannot_be_read_is_none(tmp_path):
    log = KernelLog(tmp_path)  # a folder: opened, and never read
    assert log.new() == [] and log._file is None


def test_records_that_were_lost_do_not_end_the_log(tmp_path, monkeypatch):
    path = tmp_path / "kmsg"
    path.touch()
    log = KernelLog(path)
    path.write_text("3,2,2,-;amdgpu 0000:03:00.0: GPU reset begin!\n")
    read, lost = os.read, [BrokenPipeError]

    def reads(*args):
        if lost:
            raise lost.pop()
        return read(*args)

    monkeypatch.setattr(os, "read", reads)
    assert log.new() == ["3,2,2,-;amdgpu 0000:03:00.0: GPU reset begin!"]
    log.close()


@needs_simulator
def test_a_soak_that_is_refused_leaves_no_log_open(tmp_path):
    options = _soak.Options(0, 0.0, (), 1, None, 1, "sim")
    (tmp_path / "kmsg").touch()
    clock = Clock()
    log = KernelLog(tmp_path / "kmsg")
    times = {"clock": clock, "sleep": clock.sleep}
    telemetry = Telemetry(tmp_path, 90.0, 10.0, log=log, **times)
    with pytest.raises(FlashAttnError, match="journal"):
        _soak.soak(options, tmp_path / "no" / "journal", telemetry=telemetry)
    assert log._file is None


ROCM_SMI = {
    "card0": {
        "Temperature (Sensor edge) (C)": "55.0",
        "Temperature (Sensor junction) (C)": "91.5",
        "sclk clock speed:": "(1440Mhz)",
        "sclk clock level:": "5",
    }
}
AMD_SMI = [
    {
        "gpu": 0,
        "temperature": {
            "edge": {"value": 55, "unit": "C"},
            "hotspot": {"value": 91.5, "unit": "C"},
            "mem": "N/A",
        },
        "clock": {"gfx_0": {"clk": {"value": 1440, "unit": "MHz"}}},
        "ecc": {"total_uncorrectable_count": 3},
    }
]


@pytest.mark.parametrize(
    ("name", "said"), [("rocm-smi", ROCM_SMI), ("amd-smi", AMD_SMI)]
)
def test_where_sysfs_has_nothing_a_tool_is_asked(tmp_path, monkeypatch, name, said):
    tool = tmp_path / name
    tool.write_text(f"#!/bin/sh\nexec /bin/cat <<'END'\n{json.dumps(said)}\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    clock = Clock()
    sample = watch(tmp_path, clock, tmp_path, limit=200.0).look(math.inf)[0]
    assert sample["hottest"] == 91.5
    assert list(sample["telemetry"]["mhz"].values()) == [1440.0]
    errors = Tool().sample()["errors"]
    assert list(errors.values()) == ([3] if name == "amd-smi" else [])


@pytest.mark.parametrize("body", ["exit 1", "echo no json", "exit 0"])
def test_a_tool_that_fails_says_nothing(tmp_path, monkeypatch, body):
    tool = tmp_path / "amd-smi"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Tool().sample() == {"temperature": {}, "mhz": {}, "errors": {}}


@needs_simulator
def test_a_soak_writes_telemetry_and_pauses_into_its_journal(card, tmp_path, capsys):
    root = card(hwmon__hwmon0__temp1_input=70000, pp_dpm_sclk=CLOCKS)
    journal, report = tmp_path / "journal", tmp_path / "report.json"
    words = ["--minutes", 0.02, "--faults", "none", "--sysfs", root]
    words += ["--temperature-limit", 65, "--report", report, "--journal", journal]
    code, out, _ = command(main, capsys, "soak", *words)
    data = json.loads(report.read_text())
    assert code == 0 and "hottest 70 C; 1 pauses" in out, out
    assert data["pauses"] == 1 and data["cooling_s"] >= 1.0
    kinds = [next(iter(json.loads(line))) for line in journal.read_text().splitlines()]
    assert {"telemetry", "cooling"} <= set(kinds)
