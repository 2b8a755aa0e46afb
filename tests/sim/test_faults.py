"""Injected faults: each kind strikes what was asked, once, and nothing else.

The oracle is the same launch without a fault.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import array
import ctypes
import threading

import pytest

import hipsim
from hipsim import Buffer

SOURCE = """
GLOBAL void fill(int *out, int value) { out[index()] = value; }
GLOBAL void other(int *out, int value) { out[index()] = value; }
GLOBAL void twice(int *out, volatile int *in)
{
    int sum = in[index()];
    sum += in[index()];
    out[index()] = sum;
}
/* Holds a pattern in the LDS for a while, then shows all of it. */
GLOBAL void hold(int *out, int turns)
{
    static SHARED int tile[1024];
    for (int i = lane(); i < 1024; i += 64) { tile[i] = 0x0f0f0f0f; }
    barrier();
    for (volatile int i = 0; i < turns; i++) { }
    barrier();
    for (int i = lane(); i < 1024; i += 64) { out[1024 * group() + i] = tile[i]; }
}
"""
PATTERN = 0x0F0F0F0F


@pytest.fixture
def module(compile_hip):
    with hipsim.Module(compile_hip(SOURCE)) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def fault():
    """fault(spec): sets it until the test ends."""
    yield hipsim.set_fault
    hipsim.set_fault(None)


def as_i32(value: int) -> bytes:
    return value.to_bytes(4, "little", signed=True)


def launch(module, kernel="fill", groups=2, value=7):
    """(error name or "", instructions, output) of a launch."""
    out = array.array("i", [0] * 64 * groups)
    pointer, number = ctypes.c_void_p(out.buffer_info()[0]), ctypes.c_int32(value)
    params = (ctypes.c_void_p * 2)(ctypes.addressof(pointer), ctypes.addressof(number))
    stats = hipsim._native.NativeStats()
    buffer = Buffer(out)
    code = hipsim.load().hipsimLaunch(
        module.kernel(kernel)._handle,
        (ctypes.c_uint32 * 3)(groups, 1, 1),
        (ctypes.c_uint32 * 3)(64, 1, 1),
        0,
        params,
        ctypes.byref(buffer.tensor()),
        1,
        ctypes.byref(stats),
    )
    name = hipsim.load().hipGetErrorName(code).decode() if code != 0 else ""
    return name, stats.wave_instructions, list(out)


def fired(**counts: int) -> bool:
    expected = dict.fromkeys(hipsim.faults_fired(), 0)
    expected.update({kind.replace("_", "-"): n for kind, n in counts.items()})
    return hipsim.faults_fired() == expected


# ---- each kind ---------------------------------------------------------------


def test_launch_error_strikes_the_nth_launch_which_does_not_run(module, fault):
    fault("launch:nth=3")
    results = [launch(module) for _ in range(5)]
    assert [r[0] for r in results] == ["", "", "hipErrorLaunchFailure", "", ""]
    assert results[2][1:] == (0, [0] * 128)
    assert all(r[2] == [7] * 128 for r in results if not r[0])
    assert fired(launch=1)


def test_last_report_of_an_injected_launch_error_says_so(module, fault):
    fault("launch")
    with pytest.raises(hipsim.HipError, match="fill: launch failed by injection"):
        module.kernel("fill").launch((1, 1, 1), (64, 1, 1), [bytes(8), as_i32(1)])


def test_slow_kernel_costs_its_factor_and_gives_the_same_result(module, fault):
    _, usual, _ = launch(module)
    fault("slow:factor=10,nth=2")
    assert [launch(module)[1] for _ in range(3)] == [usual, 10 * usual, usual]
    assert launch(module)[2] == [7] * 128
    assert fired(slow=1)


def test_slow_kernel_reaches_its_budget_sooner(module, fault, option):
    _, usual, _ = launch(module, groups=1)
    option("budget", 10 * usual)
    fault("slow:factor=10,every=1")
    assert launch(module, groups=1) == ("", 10 * usual, [7] * 64)
    option("budget", 10 * usual - 1)
    name, cost, _ = launch(module, groups=1)
    assert name == "hipErrorLaunchFailure"
    assert "budget" in hipsim.load().hipsimLastReport().decode()
    assert 9 * usual <= cost < 10 * usual
    fault(f"slow:factor={2**64 - 1}")
    assert launch(module, groups=1)[0] == "hipErrorLaunchFailure"


def test_endless_kernel_ends_with_the_budget_and_costs_all_of_it(module, fault, option):
    option("budget", 12345)
    fault("endless:nth=2")
    assert launch(module)[0] == ""
    name, cost, out = launch(module, groups=1)
    assert (name, cost, out) == ("hipErrorLaunchFailure", 12345, [0] * 64)
    report = hipsim.load().hipsimLastReport().decode()
    assert "budget used up at pc 0x0 (s_load" in report and "injection" in report
    assert launch(module)[0] == ""
    assert fired(endless=1)


def test_endless_kernel_without_a_budget_has_the_documented_one(module, fault):
    fault("endless")
    assert launch(module, groups=1)[:2] == ("hipErrorLaunchFailure", 10**9)


def test_endless_kernel_may_do_its_work_before_it_hangs(module, fault):
    _, usual, _ = launch(module, groups=1)
    for after, out in ((usual - 1, 7), (10 * usual, 7), (3, 0)):
        fault(f"endless:after={after}")
        assert launch(module, groups=1)[::2] == (
            "hipErrorLaunchFailure",
            [out] * 64,
        )
    assert "s_load" not in hipsim.load().hipsimLastReport().decode()


@pytest.mark.parametrize("check", [0, 1, 2])
@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_memory_fault_strikes_the_nth_access_of_the_nth_launch(
    compile_hip, fault, option, level, check
):
    option("check", check)
    fault("memory:nth=2,access=2,group=1")
    into, names, reports = array.array("i", range(192)), [], []
    with hipsim.Module(compile_hip(SOURCE, level=level)) as module:
        for _ in range(3):
            out = array.array("i", [0] * 192)
            try:
                module.kernel("twice").launch(
                    (3, 1, 1), (64, 1, 1), [Buffer(out), Buffer(into)]
                )
                names.append("")
                assert list(out) == [2 * i for i in range(192)]
            except hipsim.HipError as error:
                names.append(error.name)
                reports.append(error.report)
                assert list(out)[:64] == [2 * i for i in range(64)]
                assert list(out)[64:128] == [0] * 64
    assert names == ["", "hipErrorIllegalAddress", ""]
    assert "workgroup (1,0,0)" in reports[0]
    assert reports[0].splitlines()[0].endswith("by injection")
    if level == "-O3":
        address = into.buffer_info()[0] + 4 * 64
        assert f"lane 0, address {address:#x}, 4 bytes" in reports[0]
    assert fired(memory=1)


def test_memory_fault_beyond_the_last_access_does_not_happen(module, fault):
    fault("memory:access=1000")
    assert launch(module)[0] == ""
    assert fired()


def hold(module, turns=2000, groups=3) -> list[tuple[int, int]]:
    """(word, changed bits) of every damaged word of the LDS of all groups."""
    out = array.array("I", [0] * 1024 * groups)
    module.kernel("hold").launch(
        (groups, 1, 1), (64, 1, 1), [Buffer(out), as_i32(turns)]
    )
    return [(i, word ^ PATTERN) for i, word in enumerate(out) if word != PATTERN]


@pytest.mark.parametrize("check", [0, 2])
@pytest.mark.parametrize("bits", [1, 2, 64])
def test_lds_flip_changes_so_many_bits_of_one_workgroup(
    module, fault, option, bits, check
):
    option("check", check)
    assert hold(module) == []
    fault(f"lds-flip:seed=7,nth=2,bits={bits},group=1,at=400")
    assert hold(module) == []
    damage = hold(module)
    assert sum(bin(changed).count("1") for _, changed in damage) == bits
    assert all(1024 <= word < 2048 for word, _ in damage)
    assert hold(module) == []
    assert fired(lds_flip=1)
    fault(f"lds-flip:seed=7,nth=2,bits={bits},group=1,at=400")
    assert hold(module) == []
    assert hold(module) == damage  # the seed says all


def test_lds_flips_seed_chooses_bit_workgroup_and_instruction(module, fault):
    seen = set()
    for seed in range(20):
        fault(f"lds-flip:seed={seed},within=400")
        seen.update((word, bits, word // 1024) for word, bits in hold(module))
        assert fired(lds_flip=1)
    assert len(seen) >= 8  # what is flipped before the pattern is written is lost
    assert {group for _, _, group in seen} == {0, 1, 2}


def test_lds_flip_that_comes_too_late_or_finds_no_lds_does_not_happen(module, fault):
    fault("lds-flip:at=1000000;lds-flip:nth=2,at=0,kernel=fill")
    assert hold(module) == []
    launch(module), launch(module)
    assert fired()


def test_lds_flip_leaves_the_order_of_the_waves_alone(compile_hip, fault, option):
    source = """
    GLOBAL void order(int *out)
    {
        static SHARED volatile int turn;
        static SHARED volatile int tile[4096];
        if (lane() == 0) { turn = 0; }
        barrier();
        if (lane() % 64 == 0) { out[lane() / 64] = ++turn; }
        tile[lane()] = 1;
    }
    """
    with hipsim.Module(compile_hip(source)) as module:
        for seed in (0, 1, 2, 3):
            option("seed", seed)
            results = []
            for spec in (None, "lds-flip:seed=1,at=60"):
                fault(spec)
                out = array.array("i", [0] * 8)
                module.kernel("order").launch((1, 1, 1), (512, 1, 1), [Buffer(out)])
                results.append(list(out))
            assert sum(hipsim.faults_fired().values()) == 1
            assert results[0] == results[1]


def test_nth_allocation_fails_and_those_around_it_do_not(fault):
    library, pointer = hipsim.load(), ctypes.c_void_p()
    fault("alloc:nth=4")
    codes = []
    for _ in range(6):
        codes.append(library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(64)))
        assert (pointer.value is None) == (codes[-1] != 0)
        assert library.hipFree(pointer) == 0
        nothing = library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(0))
        assert nothing == 0  # does not count
    assert codes == [0, 0, 0, 2, 0, 0]
    assert fired(alloc=1)


# ---- the list ----------------------------------------------------------------


def test_every_repeats_after_the_nth(module, fault):
    fault("launch:nth=2,every=3")
    struck = [launch(module)[0] != "" for _ in range(9)]
    assert struck == [n in (2, 5, 8) for n in range(1, 10)]
    fault("launch:every=1")
    assert all(launch(module)[0] for _ in range(4))
    assert fired(launch=4)


def test_kernel_restricts_the_count_to_its_own_launches(module, fault):
    fault("launch:nth=2,kernel=other")
    order = ["fill", "other", "fill", "fill", "other", "other"]
    struck = [launch(module, kernel)[0] != "" for kernel in order]
    assert struck == [False, False, False, False, True, False]


def test_several_faults_are_counted_apart(module, fault):
    _, usual, _ = launch(module)
    fault("launch:nth=1;slow:factor=3,nth=2;alloc:nth=1;launch:nth=4")
    results = [launch(module) for _ in range(4)]
    assert [r[0] != "" for r in results] == [True, False, False, True]
    assert [r[1] for r in results] == [0, 3 * usual, usual, 0]
    assert fired(launch=2, slow=1)


@pytest.mark.parametrize("spec", [None, ""])
def test_empty_list_clears(module, fault, spec):
    fault("launch:every=1")
    assert launch(module)[0]
    fault(spec)
    assert launch(module)[0] == ""
    assert fired()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lunch", "expected launch, slow, endless, memory, lds-flip or alloc"),
        ("launch;", "got ''"),
        ("launch:", "got ''"),
        ("launch:nth", "expected nth=NUMBER"),
        ("launch:nth=", "expected nth=NUMBER"),
        ("launch:nth=0", "from 1"),
        ("launch:nth=-1", "got 'nth=-1'"),
        ("launch:nth=1x", "got 'nth=1x'"),
        ("launch:nth=18446744073709551616", "expected nth=NUMBER"),
        ("launch:nth=1,,every=1", "expected WORD=VALUE of nth, every, kernel"),
        ("launch:factor=2", "launch: expected WORD=VALUE"),
        ("slow:after=2", "factor, nth, every, kernel"),
        ("alloc:kernel=fill", "alloc: expected WORD=VALUE of nth, every"),
        ("lds-flip:bits=65", "from 1 to 64"),
        ("launch:kernel=", "got 'kernel='"),
        ("launch:kernel=a,kernel=b", "got 'kernel=b'"),
        ("launch;" * 16 + "launch", "at most 16 faults"),
        ("launch:kernel=" + "k" * 5000, "less than 4096 characters"),
    ],
)
def test_malformed_list_is_refused_by_name_and_changes_nothing(
    module, fault, spec, words
):
    fault("launch:nth=2")
    with pytest.raises(hipsim.HipError) as caught:
        fault(spec)
    assert caught.value.name == "hipErrorInvalidValue"
    assert words in caught.value.report
    assert [launch(module)[0] != "" for _ in range(2)] == [False, True]


def test_unknown_kind_has_not_fired():
    count = ctypes.c_uint64(5)
    library = hipsim.load()
    assert library.hipsimFaultsFired(b"lunch", ctypes.byref(count)) == 1
    assert b"lds-flip" in library.hipsimLastReport()
    assert library.hipsimFaultsFired(None, None) == 1
    assert library.hipsimFaultsFired(None, ctypes.byref(count)) == count.value == 0


ALLOCATE = """
import ctypes, hipsim
library, pointer = hipsim.load(), ctypes.c_void_p()
print([library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(8)) for _ in range(3)])
hipsim.set_fault("alloc:nth=1")
print(library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(8)))
"""


def test_environment_sets_the_first_list(run_script):
    result = run_script(ALLOCATE, HIPSIM_FAULT="alloc:nth=2")
    assert (result.stdout, result.stderr) == ("[0, 2, 0]\n2\n", "")


def test_malformed_environment_costs_one_warning_and_nothing_fails(run_script):
    result = run_script(ALLOCATE, HIPSIM_FAULT="alloc:nth=x")
    assert result.stdout == "[0, 0, 0]\n2\n"
    assert result.stderr.count("\n") == 1
    assert "HIPSIM_FAULT: alloc: expected nth=NUMBER" in result.stderr


def test_each_launch_of_many_threads_is_counted_once(module, fault):
    fault("launch:nth=10,every=10;slow:nth=5,every=5")
    failed = []

    def work() -> None:
        for _ in range(50):
            out = array.array("i", [0] * 64)
            arguments = [Buffer(out), as_i32(1)]
            try:
                module.kernel("fill").launch((1, 1, 1), (64, 1, 1), arguments)
            except hipsim.HipError:
                failed.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) == 20
    assert fired(launch=20, slow=20)  # every second slow one failed instead
