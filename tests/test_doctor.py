"""``flash-attn-rocm doctor``: what it finds, advises and exits with.

Machines are made up: every check is a function of facts, and gather() reads a folder in
the place of the root.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from helpers import needs_simulator
from helpers.commands import command

import flash_attn_rocm as fa
from flash_attn_rocm import _doctor, _doctor_facts, _selftest
from flash_attn_rocm._commands import breaker, doctor, main
from flash_attn_rocm._doctor import CHECKS, RELEASES, examine, healthy, numbers
from flash_attn_rocm._doctor_facts import Facts, Sensor, arch_of, gather
from flash_attn_rocm._doctor_symptoms import SYMPTOMS
from flash_attn_rocm._selftest import Verdict

CODE = {"gfx906": ["fa_gfx906_f16.co"]}
CARD = Facts(
    torch="2.9.0+rocm6.3",
    hip="6.3.42131",
    ops="c",
    rocm="6.3.0",
    driver="6.10.5",
    cards=("gfx906",),
    kfd=True,
    devices=(("AMD Instinct MI50", "gfx906"),),
    blas=True,
    amdhip=("libamdhip64.so",),
    compilers=("/usr/bin/clang-15",),
    code=CODE,
    simulator=True,
    environ={},
    sensors=(Sensor("junction", 60.0, 100.0),),
    kernel_log=(),
)
LAPTOP = Facts(torch="2.9.0+cpu", ops="c", code=CODE, simulator=True)


def but(facts, environ=None, **changes):
    """The facts with changes; environment variables are added."""
    more = {**facts.environ, **(environ or {})}
    return dataclasses.replace(facts, environ=more, **changes)


def raised(facts):
    """The names of what is not well."""
    return {f.name for f in examine(facts) if f.level in ("warn", "bad")}


# ---- checks ------------------------------------------------------------------


@pytest.mark.parametrize("facts", [CARD, LAPTOP], ids=["card", "laptop"])
def test_nothing_is_raised_where_all_is_well(facts):
    assert raised(facts) == set() and healthy(examine(facts))


def test_nothing_is_claimed_of_a_card():
    (untested,) = (
        f
        for f in examine(dataclasses.replace(CARD, environ={}))
        if f.name == "untested"
    )
    assert "no kernel of this package has run on an AMD card" in untested.text


@pytest.mark.parametrize(
    ("changes", "name", "level", "words"),
    [
        ({"unavailable": "torch 2.0 is too old"}, "torch", "bad", "torch 2.0"),
        ({"unavailable": "it has no extension _C"}, "extension", "bad", "_C"),
        ({"hip": None, "devices": ()}, "torch", "bad", "only the simulator"),
        ({"hip": "6.4.1", "blas": False}, "rocblas", "bad", "#4625"),
        ({"hip": "7.0.2", "blas": None}, "rocblas", "warn", "was not found"),
        ({"amdhip": ()}, "hip library", "warn", "libamdhip64"),
        ({"kfd": False}, "driver access", "bad", "/dev/kfd"),
        ({"devices": ()}, "driver access", "bad", "torch none"),
        (
            {"code": {}, "devices": (), "cards": ()},
            *("code objects", "bad", "nothing runs fused"),
        ),
        ({"code": {"gfx1030": ["x"]}}, "device", "bad", "no code object"),
        ({"sensors": (Sensor("mem", 91.0, 100.0),)}, "heat", "warn", "mem 91"),
        ({"kernel_log": ("a", "GPU reset")}, "kernel log", "warn", "2 faults"),
        (
            {"environ": {"HSA_OVERRIDE_GFX_VERSION": "9.0.6"}},
            *("override", "warn", "passes for another"),
        ),
        (
            {
                "environ": {"HSA_OVERRIDE_GFX_VERSION": "9.0.6"},
                "cards": ("gfx906", "gfx1030"),
            },
            *("override", "bad", "several kinds (gfx906, gfx1030)"),
        ),
        (
            {"environ": {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}},
            *("visible devices", "warn", "reads both"),
        ),
        (
            {"environ": {"AMD_SERIALIZE_KERNEL": "3"}},
            *("debugging", "warn", "AMD_SERIALIZE_KERNEL"),
        ),
        (
            {
                "environ": {
                    "FLASH_ATTN_ROCM_DEVICE": "OFF",
                    "FLASH_ATTN_ROCM_RESTARTS": "3",
                }
            },
            *("device", "warn", "after 3 restarts"),
        ),
        (
            {"environ": {"FLASH_ATTN_ROCM_UNTESTED": "1"}},
            "untested",
            "warn",
            "without their self-test",
        ),
        (
            {"environ": {"FLASH_ATTN_ROCM_SELFTEST": "0"}},
            "untested",
            "warn",
            "untested",
        ),
    ],
)
def test_each_trouble_is_found_alone_and_with_advice(changes, name, level, words):
    facts = but(CARD, **changes)
    assert raised(facts) == {name} and not healthy(examine(facts))
    (found,) = (f for f in examine(facts) if f.level == level and f.name == name)
    assert words in found.text and found.advice


@pytest.mark.parametrize(
    "changes",
    [
        {"hip": "6.3.9", "blas": False},  # its own torch has them elsewhere
        {"sensors": (Sensor("mem", 89.0, 100.0), Sensor("edge", 99.0, None))},
        {"environ": {"AMD_SERIALIZE_KERNEL": "0", "HIP_LAUNCH_BLOCKING": ""}},
        {"environ": {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}},
        {"kernel_log": None, "compilers": (), "simulator": False},
    ],
    ids=str,
)
def test_what_is_no_trouble_is_not_raised(changes):
    assert raised(but(CARD, **changes)) == set()


@pytest.mark.parametrize("known", RELEASES, ids=lambda known: known.source)
def test_a_known_release_is_found_from_its_first_to_its_last_on_its_arch(known):
    def found(version, arch):
        facts = but(
            CARD, hip=version, devices=(("card", arch),), cards=(arch,), code={}
        )
        return any(known.source in f.text for f in examine(facts))

    first = ".".join(map(str, known.first))
    major, minor = known.end if len(known.end) > 1 else (known.end[0], 0)
    assert found(f"{first}.0", known.arch) and found(f"{first}.43482-abc", known.arch)
    assert not found(f"{major}.{minor}.0", known.arch)
    assert not found(f"{first}.0", "gfx1030")
    before = (known.first[0], known.first[1] - 1) if known.first[1] else (4, 9)
    assert not found(".".join(map(str, before)), known.arch)


def test_rocm_5_6_is_called_slow_and_nothing_else():
    (found,) = (
        f for f in examine(but(CARD, hip="5.6.31061")) if f.name == "rocm release"
    )
    assert found.level == "warn" and "known to be slow" in found.text
    assert "gpuowl #268" in found.text
    assert not re.search("time-?out|hang|wrong", found.text)
    assert "rocm release" not in {f.name for f in examine(but(CARD, hip="5.7.31921"))}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6.4.43482-abc", (6, 4, 43482)),
        ("5.7", (5, 7, 0)),
        ("", ()),
        ("rocm", ()),
        (None, ()),
    ],
)
def test_versions_are_read(text, expected):
    assert numbers(text) == expected


def test_a_check_of_a_bare_machine_raises_code_objects_only():
    assert raised(Facts()) == {"code objects"}


def test_every_check_is_in_the_table_once():
    assert len(set(CHECKS)) == len(CHECKS)
    written = {
        value
        for name, value in vars(_doctor).items()
        if getattr(value, "__annotations__", {}).get("return") == "Iterator[Finding]"
    }
    assert written == set(CHECKS)


# ---- facts -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (90006, "gfx906"),
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (100300, "gfx1030"),
        (110501, "gfx1151"),
    ],
)
def test_architectures_are_named_as_compilers_do(number, name):
    assert arch_of(number) == name


@pytest.fixture
def root(tmp_path):
    """A machine with a processor, an MI50 and its sensors."""
    files = {
        "sys/module/amdgpu/version": "6.10.5\n",
        "sys/class/kfd/kfd/topology/nodes/0/properties": "gfx_target_version 0\n",
        "sys/class/kfd/kfd/topology/nodes/1/properties": (
            "simd_count 240\ngfx_target_version 90006\n"
        ),
        "sys/class/hwmon/hwmon0/name": "coretemp\n",
        "sys/class/hwmon/hwmon0/temp1_input": "99000\n",
        "sys/class/hwmon/hwmon1/name": "amdgpu\n",
        "sys/class/hwmon/hwmon1/temp2_input": "61000\n",
        "sys/class/hwmon/hwmon1/temp2_label": "junction\n",
        "sys/class/hwmon/hwmon1/temp2_crit": "100000\n",
        "sys/class/hwmon/hwmon1/temp3_input": "junk\n",
        "opt/rocm/.info/version": "6.3.0-39\n",
        "opt/rocm/lib/libamdhip64.so.6": "",
        "opt/rocm/lib/rocblas/library/Kernels_gfx906.hsaco": "",
        "opt/rocm/llvm/bin/clang": "",
        "bin/clang-15": "",
        "bin/clang-format-15": "",
        "bin/hipcc": "",
        "dev/kfd": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("opt/rocm/llvm/bin/clang", "bin/clang-15", "bin/clang-format-15"):
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_facts_are_read_from_the_machine(root):
    environ = {
        "PATH": f"{root}/bin:{root}/bin:{root}/none",
        "HSA_OVERRIDE_GFX_VERSION": "9.0.6",
        "FLASH_ATTN_ROCM_DEVICE": "sim",
        "SECRET": "x",
    }
    facts = gather(environ, str(root))
    assert (facts.driver, facts.rocm) == ("6.10.5", "6.3.0-39")
    assert facts.cards == ("gfx906",) and facts.kfd is True
    assert facts.sensors == (Sensor("junction", 61.0, 100.0),)
    assert facts.compilers == (
        f"{root}/opt/rocm/llvm/bin/clang",
        f"{root}/bin/clang-15",
    )
    assert f"{root}/opt/rocm/lib/libamdhip64.so.6" in facts.amdhip
    if torch.version.hip is None:  # otherwise torch's own comes first
        assert facts.blas is True
    assert set(facts.environ) == set(environ) - {"PATH", "SECRET"}


def test_a_machine_without_anything_has_facts_too(tmp_path):
    facts = gather({}, str(tmp_path))
    assert (facts.driver, facts.cards, facts.kfd, facts.sensors) == (None, (), None, ())
    assert facts.compilers == () and dict(facts.environ) == {}


def test_of_the_kernel_log_faults_and_resets_are_kept(tmp_path, monkeypatch):
    lines = [
        "[1] amdgpu 0000:03:00.0: amdgpu: Fetched VBIOS",
        "[2] amdgpu: qcm fence wait loop timeout expired",
        "[3] amdgpu: Queue preemption failed, Queue preemption time out",
        "[4] amdgpu 0000:03:00.0: GPU reset begin!",
        "[5] amdgpu 0000:03:00.0: [gfxhub0] no-retry page fault",
        "[6] usb 1-1: reset high-speed USB device",
    ]
    program = tmp_path / "dmesg"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _doctor_facts._kernel_log() == tuple(lines[1:5])
    program.write_text("#!/bin/sh\nexit 1\n")
    assert _doctor_facts._kernel_log() is None
    program.unlink()
    assert _doctor_facts._kernel_log() is None


# ---- the command -------------------------------------------------------------

PASSED = [Verdict("rotary float16", ("fa_rotary",), "passed")]
HUNG = Verdict("rotary float64", ("fa_rotary_f64",), "hung", "no answer in 30 s")


@pytest.fixture
def call(capsys, monkeypatch):
    """call(*words, facts, verdicts, breakers) -> (code, out, err)."""
    asked = []

    def run(*words, facts=LAPTOP, verdicts=PASSED, breakers=([], 0)):
        def of(device):
            asked.append(device)
            return verdicts

        def entries(folder):
            if isinstance(breakers, Exception):
                raise breakers
            return breakers

        monkeypatch.setattr(_doctor_facts, "gather", lambda: facts)
        monkeypatch.setattr(_selftest, "verdicts", of)
        monkeypatch.setattr(breaker, "entries", entries)
        return command(main, capsys, "doctor", *words)

    run.asked = asked
    return run


@needs_simulator
def test_exit_code_0_and_a_line_for_each_finding_where_all_is_well(call):
    code, out, err = call()
    assert (code, err) == (0, "")
    assert "ok    self-test: 1 families passed in the simulator" in out
    assert "ok    breakers: none is open" in out
    assert call.asked == ["sim"]


@needs_simulator
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"facts": but(LAPTOP, code={})}, "bad   code objects"),
        (
            {"verdicts": [*PASSED, HUNG]},
            "bad   self-test: in the simulator: 1 passed, 1",
        ),
        ({"breakers": ([], 2)}, "warn  breakers: 2 damaged files"),
        ({"breakers": fa.FlashAttnError("mode 0777")}, "bad   breakers: mode 0777"),
        (
            {
                "breakers": (
                    [("d", breaker.Entry("sim", "fa_rotary", 1, 1, 1, 2, "late"))],
                    0,
                )
            },
            "warn  breakers: 1 are open, stock SDPA answers instead of fa_rotary",
        ),
    ],
    ids=str,
)
def test_exit_code_1_where_something_is_found(call, how, words):
    code, out, err = call(**how)
    assert (code, err) == (1, "") and words in out


@needs_simulator
def test_a_bad_self_test_says_which_family_and_why(call):
    _, out, _ = call(verdicts=[*PASSED, HUNG])
    assert "1 hung; the first: rotary float64 hung: no answer in 30 s" in out


def test_every_gpu_is_tested_and_not_the_simulator(call, monkeypatch):
    monkeypatch.setattr(doctor, "_explained", lambda device: [])
    code, out, _ = call(facts=but(CARD, devices=(("MI50", "gfx906"),) * 2))
    assert code == 0 and call.asked == ["0", "1"]
    assert "on device 1" in out and "in the simulator" not in out


def test_a_gpu_without_code_objects_is_not_tested(call, monkeypatch):
    monkeypatch.setattr(doctor, "_explained", lambda device: [])
    code, _, _ = call(facts=but(CARD, devices=(("x", "gfx1030"), ("MI50", "gfx906"))))
    assert code == 1 and call.asked == ["1"]


def test_no_selftest_launches_nothing(call):
    code, out, _ = call("--no-selftest")
    assert (code, call.asked) == (0, []) and "self-test" not in out.replace(
        "--no-selftest", ""
    )


@needs_simulator
def test_it_says_of_common_calls_what_runs_fused_and_why_not(call):
    _, out, _ = call("--json", "--no-selftest")
    rows = {row["call"]: row for row in json.loads(out)["calls"]}
    assert {row["device"] for row in rows.values()} == {"sim"}
    assert rows["fp16, training, head dim 128"]["kernels"] == [
        f"fa_{part}_f16_d128_plain" for part in ("fwd", "bwd_q", "bwd_kv")
    ]
    stock = {name: row["why"] for name, row in rows.items() if not row["fused"]}
    assert set(stock) == {"fp16, head dim 512", "fp16, mask and is_causal"}
    assert all(stock.values())


@needs_simulator
def test_json_has_all_that_the_text_says(call):
    code, out, _ = call("--json", "--symptom", "heat", verdicts=[*PASSED, HUNG])
    answer = json.loads(out)
    assert code == 1 and answer["healthy"] is False
    assert answer["version"] == fa.__version__
    assert {f["name"] for f in answer["findings"]} >= {"torch", "self-test", "breakers"}
    assert all(f["level"] in _doctor.LEVELS for f in answer["findings"])
    assert answer["selftest"]["sim"][1]["kernels"] == ["fa_rotary_f64"]
    assert answer["symptom"]["title"] == SYMPTOMS["heat"].title


# ---- symptoms ----------------------------------------------------------------


def test_the_list_of_symptoms_names_each_and_runs_nothing(call, monkeypatch):
    code, out, _ = call("--symptom", "list")
    assert code == 0 and call.asked == []
    assert [line.split()[0] for line in out.splitlines()] == list(SYMPTOMS)
    code, out, _ = call("--symptom", "list", "--json")
    assert code == 0 and list(json.loads(out)) == list(SYMPTOMS)


@pytest.mark.parametrize("name", SYMPTOMS)
def test_each_symptom_has_advice_before_the_findings(call, name):
    _, out, _ = call("--symptom", name, "--no-selftest")
    assert out.startswith(f"Symptom: {SYMPTOMS[name].title}\n")
    assert out.count("\n  ") >= len(SYMPTOMS[name].steps) >= 3
    assert out.index("  3. ") < out.index("flash-attn-rocm 0.")


def test_the_symptoms_are_those_that_operators_report():
    titles = " ".join(symptom.title for symptom in SYMPTOMS.values())
    for words in (
        "missing hipStream_t",
        "undefined hipModuleLaunchKernel",
        "below 50 % busy while memory bandwidth is above 90 %",
        "20 % in either direction",
        "NaN with several GPUs",
        "accuracy",
        "gradient norm",
        "a day",
        "hot",
    ):
        assert words in titles


def test_advice_names_commands_that_exist(capsys):
    text = json.dumps([dataclasses.asdict(symptom) for symptom in SYMPTOMS.values()])
    named = set(re.findall(r"flash-attn-rocm (\w+)", text))
    assert named == {"run", "breaker", "profile"}
    for name in named:
        assert command(main, capsys, name, "--help")[0] == 0


@pytest.mark.parametrize(
    "words", [["--symptom", "cold"], ["--symptom"], ["more"], ["--nonsense"]], ids=str
)
def test_bad_usage_gives_one_line_and_exit_code_2(call, words):
    code, out, err = call(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
