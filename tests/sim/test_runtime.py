"""Launches: arguments, memory, faults, threads, forks, and the HIP calls.

Kernels are compiled here; expected values are computed in Python on numbers
that are exact in fp32. A kernel that waits for a flag, which the host then
sets in the same memory, makes every concurrency test deterministic.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import array
import ctypes
import mmap
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hipsim
from hipsim import Buffer

SAXPY = """
GLOBAL void saxpy(float *out, const float *in, float factor, int count)
{
    int i = index();
    if (i < count) { out[i] = factor * in[i] + out[i]; }
}
GLOBAL void spill_over(float *out) { out[index()] = 1.0f; }
"""

DYNAMIC_LDS = """
extern SHARED int tile[];
GLOBAL void turn(int *out, const int *in, int count)
{
    tile[lane()] = in[lane()];
    barrier();
    out[lane()] = tile[count - 1 - lane()];
}
"""

HIDDEN = """
extern SHARED volatile int tile[];
GLOBAL void hidden(unsigned *out)
{
    const char *p = (const char *)__builtin_amdgcn_implicitarg_ptr();
    tile[0] = 1; /* the size of dynamic LDS is there only if it is used */
    if (index() != 0 || __builtin_amdgcn_workgroup_id_y() != 0) { return; }
    for (int d = 0; d < 3; d++) {
        out[d] = *(const unsigned *)(p + 4 * d);
        out[3 + d] = *(const unsigned short *)(p + 12 + 2 * d);
        out[6 + d] = *(const unsigned short *)(p + 18 + 2 * d);
        out[9 + d] = *(const unsigned long *)(p + 40 + 8 * d);
    }
    out[12] = *(const unsigned short *)(p + 64);
    out[13] = *(const unsigned *)(p + 120);
}
GLOBAL void packet(unsigned *out)
{
    const char *p = (const char *)__builtin_amdgcn_dispatch_ptr();
    if (index() != 0 || __builtin_amdgcn_workgroup_id_y() != 0) { return; }
    for (int d = 0; d < 3; d++) {
        out[d] = *(const unsigned short *)(p + 4 + 2 * d);
        out[3 + d] = *(const unsigned *)(p + 12 + 4 * d);
    }
    out[6] = *(const unsigned *)(p + 28);
}
"""

WAIT = """
GLOBAL void wait(volatile int *flag)
{
    flag[0] = 1;
    while (flag[1] == 0) { }
    flag[2] = 7;
}
GLOBAL void forever(volatile int *flag) { for (;;) { flag[0] = 1; } }
"""

LEVELS = ["-O0", "-O3"]
ABIS = [4, 5, 6]


def floats(values) -> array.array:
    return array.array("f", values)


def run_saxpy(image: bytes, count: int, block: int = 256) -> None:
    x, y = floats(range(count)), floats(3 * i for i in range(count))
    with hipsim.Module(image) as module:
        stats = module.kernel("saxpy").launch(
            (-(-count // block), 1, 1),
            (block, 1, 1),
            [Buffer(y), Buffer(x, "r"), as_f32(0.5), as_i32(count)],
        )
    assert y == floats(3.5 * i for i in range(count))
    assert stats.workgroups == -(-count // block)
    assert stats.waves == stats.workgroups * -(-block // 64)
    assert stats.wave_instructions > stats.waves


def as_i32(value: int) -> bytes:
    return value.to_bytes(4, "little", signed=True)


def as_f32(value: float) -> bytes:
    return floats([value]).tobytes()


# ---- arguments ------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("abi", ABIS)
def test_saxpy_is_exact_with_a_partial_last_workgroup(compile_hip, abi, level):
    run_saxpy(compile_hip(SAXPY, abi=abi, level=level), 1000)


@pytest.mark.parametrize("block", [1, 63, 64, 65, 100, 1024])
def test_workgroups_of_any_size_run(compile_hip, block):
    run_saxpy(compile_hip(SAXPY), 1500, block)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("abi", ABIS)
def test_dynamic_lds_is_shared_by_the_waves(compile_hip, abi, level):
    count = 256
    out, into = array.array("i", [0] * count), array.array("i", range(count))
    with hipsim.Module(compile_hip(DYNAMIC_LDS, abi=abi, level=level)) as module:
        module.kernel("turn").launch(
            (1, 1, 1),
            (count, 1, 1),
            [Buffer(out, "w"), Buffer(into, "r"), as_i32(count)],
            lds=4 * count,
        )
    assert list(out) == list(reversed(range(count)))


def test_lds_beyond_the_launchs_size_is_a_fault(compile_hip):
    out, into = array.array("i", [0] * 256), array.array("i", range(256))
    with hipsim.Module(compile_hip(DYNAMIC_LDS)) as module:
        with pytest.raises(hipsim.HipError, match="LDS access out of range"):
            module.kernel("turn").launch(
                (1, 1, 1),
                (256, 1, 1),
                [Buffer(out, "w"), Buffer(into, "r"), as_i32(256)],
                lds=4 * 255,
            )


@pytest.mark.parametrize(
    ("grid", "block", "dims"),
    [
        ((2, 3, 4), (32, 2, 1), 3),
        ((2, 3, 1), (32, 2, 1), 2),
        ((5, 1, 1), (64, 1, 1), 1),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("abi", [5, 6])
def test_hidden_arguments_describe_the_grid(compile_hip, abi, level, grid, block, dims):
    out = array.array("I", [99] * 14)
    with hipsim.Module(compile_hip(HIDDEN, abi=abi, level=level)) as module:
        module.kernel("hidden").launch(grid, block, [Buffer(out)], lds=48)
    assert tuple(out[0:3]) == grid
    assert tuple(out[3:6]) == block
    assert tuple(out[6:12]) == (0,) * 6  # whole workgroups, no offset
    assert tuple(out[12:14]) == (dims, 48)


@pytest.mark.parametrize("abi", ABIS)
def test_dispatch_packet_describes_the_grid(compile_hip, abi):
    out = array.array("I", [99] * 7)
    with hipsim.Module(compile_hip(HIDDEN, abi=abi)) as module:
        module.kernel("packet").launch((2, 3, 4), (32, 2, 1), [Buffer(out)], lds=48)
    assert list(out) == [32, 2, 1, 64, 6, 4, 48]


@pytest.mark.parametrize("level", LEVELS)
def test_globals_are_relocated_readable_and_writable(compile_hip, level):
    source = """
    DEVICE int table[4] = {10, 20, 30, 40};
    DEVICE int *volatile entry[2] = {table + 1, table + 3};
    DEVICE int counter;
    GLOBAL void look(int *out)
    {
        out[lane()] = *entry[lane() & 1];
        if (lane() == 0) { counter += 1; out[64] = counter; }
    }
    """
    with hipsim.Module(compile_hip(source, level=level)) as module:
        for turn in (1, 2):
            out = array.array("i", [0] * 65)
            module.kernel("look").launch((1, 1, 1), (64, 1, 1), [Buffer(out)])
            assert list(out) == [20, 40] * 32 + [turn]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([b"\0" * 8], "expected 4 arguments, got 1"),
        ([b"\0" * 8] * 4, r"argument 2.*expected 4 bytes \(by_value\), got 8"),
    ],
)
def test_wrong_arguments_are_refused_by_position(compile_hip, arguments, words):
    with hipsim.Module(compile_hip(SAXPY)) as module:
        with pytest.raises(ValueError, match=f"saxpy: {words}"):
            module.kernel("saxpy").launch((1, 1, 1), (64, 1, 1), arguments)


@pytest.mark.parametrize(
    ("grid", "block", "lds", "words"),
    [
        ((0, 1, 1), (64, 1, 1), 0, r"grid \(0,1,1\)"),
        ((1, 1, 1), (64, 0, 1), 0, r"workgroups \(64,0,1\)"),
        ((2**31, 1, 1), (64, 1, 1), 0, "less than 2\\^32"),
        ((1, 1, 1), (1025, 1, 1), 0, "at most 1024"),
        ((1, 1, 1), (32, 32, 2), 0, "at most 1024"),
        ((1, 1, 1), (64, 1, 1), 65537, "65537 of dynamic LDS"),
        ((2**31 - 1, 2**31 - 1, 2**31 - 1), (1, 1, 1), 0, "too many workgroups"),
    ],
)
def test_impossible_launches_are_refused(compile_hip, grid, block, lds, words):
    out = floats([0] * 64)
    with hipsim.Module(compile_hip(SAXPY)) as module:
        with pytest.raises(hipsim.HipError, match=words) as caught:
            module.kernel("spill_over").launch(grid, block, [Buffer(out)], lds=lds)
    assert caught.value.name == "hipErrorInvalidValue"


def test_kernels_own_workgroup_limit_holds(compile_hip):
    source = """
    GLOBAL void __attribute__((amdgpu_flat_work_group_size(1, 64))) small() {}
    """
    with hipsim.Module(compile_hip(source)) as module:
        module.kernel("small").launch((1, 1, 1), (64, 1, 1), [])
        with pytest.raises(hipsim.HipError, match="at most 64 work-items"):
            module.kernel("small").launch((1, 1, 1), (65, 1, 1), [])


# ---- memory and faults -----------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_one_element_out_of_bounds_is_reported_and_survived(compile_hip, level):
    out = floats([0] * 256)
    end = Buffer(out).address + 4 * 255
    with hipsim.Module(compile_hip(SAXPY, level=level)) as module:
        kernel = module.kernel("spill_over")
        with pytest.raises(hipsim.HipError) as caught:
            kernel.launch((1, 1, 1), (256, 1, 1), [Buffer(out, size=4 * 255)])
        assert caught.value.name == "hipErrorIllegalAddress"
        report = caught.value.report
        assert report.startswith("spill_over: illegal address at pc 0x")
        assert "_store_dword" in report
        assert "workgroup (0,0,0), wave 3, lane 63" in report
        assert f"address {end:#x}, 4 bytes" in report
        assert "past the end of one of 1020" in report
        assert out[255] == 0.0
        kernel.launch((1, 1, 1), (256, 1, 1), [Buffer(out)])
    assert list(out) == [1.0] * 256


def test_access_rights_hold(compile_hip):
    x, y = floats(range(64)), floats(range(64))
    numbers = [as_f32(1.0), as_i32(64)]
    with hipsim.Module(compile_hip(SAXPY)) as module:
        saxpy = module.kernel("saxpy")
        with pytest.raises(hipsim.HipError, match="may only read"):
            saxpy.launch((1, 1, 1), (64, 1, 1), [Buffer(y, "r"), Buffer(x), *numbers])
        with pytest.raises(hipsim.HipError, match="may only write"):
            saxpy.launch((1, 1, 1), (64, 1, 1), [Buffer(y), Buffer(x, "w"), *numbers])
        # The same memory named with both rights has both.
        saxpy.launch(
            (1, 1, 1),
            (64, 1, 1),
            [Buffer(y, "r"), Buffer(x, "r"), *numbers],
            buffers=[Buffer(y, "w")],
        )
    assert y == floats(2 * i for i in range(64))


def test_an_access_may_cross_into_an_abutting_buffer(compile_hip):
    source = """
    typedef float float4 __attribute__((ext_vector_type(4)));
    GLOBAL void wide(float4 *out, const float4 *in) { *out = *in; }
    """
    data, out = floats(range(4)), floats([0] * 4)
    halves = [Buffer(data, "r", size=8), Buffer(data, "rw", offset=8)]
    with hipsim.Module(compile_hip(source)) as module:
        wide = module.kernel("wide")
        wide.launch((1, 1, 1), (1, 1, 1), [Buffer(out), halves[0]], buffers=halves)
        assert out == data
        with pytest.raises(hipsim.HipError, match="illegal address"):
            wide.launch((1, 1, 1), (1, 1, 1), [Buffer(out), halves[0]])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_lowest_faulting_workgroup_is_the_one_reported(compile_hip, option, threads):
    out = floats([0] * 64 * 20)
    option("threads", threads)
    with hipsim.Module(compile_hip(SAXPY)) as module:
        for _ in range(20):
            with pytest.raises(hipsim.HipError, match=r"workgroup \(7,0,0\)"):
                module.kernel("spill_over").launch(
                    (20, 1, 1), (64, 1, 1), [Buffer(out, size=4 * 64 * 7)]
                )


@pytest.mark.parametrize("slow", [3, 4])
def test_lower_of_two_faults_is_reported_whichever_comes_first(
    compile_hip, option, slow
):
    # Workgroups 3 and 4 run at the same time: each waits for the other's flag
    # (not for ever, should there be no second thread). Then one dawdles.
    source = """
    GLOBAL void race(volatile int *flag, int slow)
    {
        int me = group();
        if (me < 3) { return; }
        flag[me] = 1;
        for (int i = 0; i < 1000000 && me < 5 && flag[7 - me] == 0; i++) { }
        for (int i = 0; i < 20000 && me == slow; i++) { flag[0] = i; }
        flag[1000] = 1;
    }
    """
    option("threads", 2)
    with hipsim.Module(compile_hip(source)) as module:
        for _ in range(3):
            flag = array.array("i", [0] * 8)
            with pytest.raises(hipsim.HipError, match=r"workgroup \(3,0,0\)"):
                module.kernel("race").launch(
                    (8, 1, 1), (1, 1, 1), [Buffer(flag), as_i32(slow)]
                )
            assert flag[3] == flag[4] == 1


def test_no_workgroup_starts_after_a_fault(compile_hip, option):
    source = """
    GLOBAL void late(int *out, int *bad)
    {
        if (group() == 2) { bad[0] = 1; } else { out[group()] = 1; }
    }
    """
    out = array.array("i", [0] * 100)
    option("threads", 1)
    with hipsim.Module(compile_hip(source)) as module:
        with pytest.raises(hipsim.HipError, match=r"workgroup \(2,0,0\)"):
            module.kernel("late").launch(
                (100, 1, 1), (1, 1, 1), [Buffer(out), b"\0" * 8]
            )
    assert list(out) == [1, 1] + [0] * 98


def test_endless_kernel_ends_with_its_budget(compile_hip, option):
    flag = array.array("i", [0] * 4)
    option("budget", 5000)
    with hipsim.Module(compile_hip(WAIT)) as module:
        with pytest.raises(hipsim.HipError, match="instruction budget") as caught:
            module.kernel("forever").launch((1, 1, 1), (64, 1, 1), [Buffer(flag)])
    assert caught.value.name == "hipErrorLaunchFailure"
    assert flag[0] == 1


def test_lazily_committed_memory_is_used_in_place(compile_hip):
    source = """
    GLOBAL void sparse(int *out, long step) { out[lane() * step] = lane() + 1; }
    """
    size, step = 5 << 30, (5 << 30) // 4 // 8
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, size, flags=flags)
    before = resident_bytes()
    with hipsim.Module(compile_hip(source)) as module:
        module.kernel("sparse").launch(
            (1, 1, 1), (8, 1, 1), [Buffer(memory), step.to_bytes(8, "little")]
        )
    assert [memory[4 * step * i] for i in range(8)] == list(range(1, 9))
    assert resident_bytes() - before < 128 << 20  # 8 pages, perhaps huge ones


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def test_empty_buffers_have_no_memory(compile_hip):
    out = floats([0] * 64)
    nothing = [Buffer(bytearray()), Buffer(out, "r", size=0), as_f32(1), as_i32(0)]
    with hipsim.Module(compile_hip(SAXPY)) as module:
        module.kernel("saxpy").launch((1, 1, 1), (64, 1, 1), nothing)
        with pytest.raises(hipsim.HipError, match="illegal address"):
            module.kernel("spill_over").launch(
                (1, 1, 1), (64, 1, 1), [Buffer(out, size=0)]
            )


class TestTensors:
    """hipsimLaunch's tensors: what sizes and strides allow."""

    def launch(self, module, tensor) -> int:
        native = hipsim._native
        kernel = module.kernel("spill_over")
        pointer = ctypes.c_void_p(tensor.data)
        params = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
        return hipsim.load().hipsimLaunch(
            kernel._handle,
            (ctypes.c_uint32 * 3)(1, 1, 1),
            (ctypes.c_uint32 * 3)(64, 1, 1),
            0,
            params,
            ctypes.byref(tensor),
            1,
            ctypes.byref(native.NativeStats()),
        )

    def tensor(self, data, sizes, strides, element_bytes=4, access=3):
        native = hipsim._native
        return native.Tensor(
            ctypes.addressof(data),
            element_bytes,
            len(sizes),
            (ctypes.c_int64 * 6)(*sizes),
            (ctypes.c_int64 * 6)(*strides),
            access,
        )

    @pytest.mark.parametrize(
        ("sizes", "strides", "code"),
        [
            ([64], [1], 0),
            ([63], [1], 700),
            ([8, 8], [8, 1], 0),
            ([2, 4, 8], [32, 8, 1], 0),
            ([2, 2], [60, 3], 0),  # 0 to 63
            ([2, 2], [60, 2], 700),  # 0 to 62
            ([1, 64], [2**60, 1], 0),  # a stride that is never taken
            ([3, 0], [2**62, 1], 700),  # no element
            ([64, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], 0),
            ([], [], 700),  # one element
        ],
    )
    def test_extent_is_from_lowest_to_highest_element(
        self, compile_hip, sizes, strides, code
    ):
        data = (ctypes.c_float * 64)()
        with hipsim.Module(compile_hip(SAXPY)) as module:
            assert self.launch(module, self.tensor(data, sizes, strides)) == code

    def test_negative_strides_reach_below_the_pointer(self, compile_hip):
        data = (ctypes.c_float * 64)()
        tensor = self.tensor(data, [64], [-1])
        tensor.data = ctypes.addressof(data) + 4 * 63
        source = """
        GLOBAL void spill_over(float *out) { out[-index()] = 1.0f; }
        """
        with hipsim.Module(compile_hip(source)) as module:
            assert self.launch(module, tensor) == 0
        assert list(data) == [1.0] * 64

    @pytest.mark.parametrize(
        "change",
        [
            {"size": 2**62, "stride": 2**62},
            {"size": 2**62, "stride": -(2**62)},
            {"size": 2**62, "stride": 3},
            {"size": 2**62},
            {"size": 2**40, "stride": -(2**20)},
            {"ndim": 2, "size": (2, 2), "stride": (2**62, 2**62)},
            {"ndim": 3, "size": (2, 2, 2), "stride": (2**62, 2**62, 2**63 - 1)},
            {"size": -1},
            {"access": 0},
            {"access": 4},
            {"element_bytes": 0},
            {"ndim": 7},
            {"ndim": -1},
            {"data": None},
        ],
        ids=str,
    )
    def test_impossible_tensors_are_refused(self, compile_hip, change):
        data = (ctypes.c_float * 64)()
        tensor = self.tensor(data, [64], [1])
        for name, value in change.items():
            if name in ("size", "stride"):
                values = value if isinstance(value, tuple) else (value,)
                getattr(tensor, name)[: len(values)] = values
            else:
                setattr(tensor, name, value)
        with hipsim.Module(compile_hip(SAXPY)) as module:
            assert self.launch(module, tensor) == 1
            assert b"tensor 0" in hipsim.load().hipsimLastReport()


# ---- threads and processes -------------------------------------------------


def test_same_bits_with_any_number_of_threads(compile_hip, option):
    source = """
    GLOBAL void mix(float *out, const float *in, int count)
    {
        float sum = 0.0f;
        for (int i = 0; i < count; i++) { sum += in[i] * in[index() % (i + 1)]; }
        out[index()] = sum;
    }
    """
    random_source = random.Random(1)
    into = floats(random_source.uniform(-1, 1) for _ in range(50))
    results = []
    with hipsim.Module(compile_hip(source)) as module:
        for threads in (1, 2, 5):
            option("threads", threads)
            out = floats([0] * 64 * 9)
            stats = module.kernel("mix").launch(
                (9, 1, 1), (64, 1, 1), [Buffer(out), Buffer(into, "r"), as_i32(50)]
            )
            results.append((out.tobytes(), stats))
    assert results[0] == results[1] == results[2]
    assert any(results[0][0])


def wait_until(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("the kernel did not start within ten seconds")


def test_two_host_threads_launch_at_the_same_time(compile_hip):
    flags = [array.array("i", [0] * 4) for _ in range(2)]
    with hipsim.Module(compile_hip(WAIT)) as module:
        kernel = module.kernel("wait")
        threads = [
            threading.Thread(
                target=kernel.launch, args=((1, 1, 1), (1, 1, 1), [Buffer(flag)])
            )
            for flag in flags
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: all(flag[0] == 1 for flag in flags))
        for flag in flags:
            flag[1] = 1
        for thread in threads:
            thread.join()
    assert [flag[2] for flag in flags] == [7, 7]


def test_module_outlives_a_launch_that_it_was_unloaded_under(compile_hip):
    flag = array.array("i", [0] * 4)
    module = hipsim.Module(compile_hip(WAIT))
    thread = threading.Thread(
        target=module.kernel("wait").launch,
        args=((1, 1, 1), (1, 1, 1), [Buffer(flag)]),
    )
    thread.start()
    wait_until(lambda: flag[0] == 1)
    module.close()
    flag[1] = 1
    thread.join()
    assert flag[2] == 7


def test_errors_belong_to_the_calling_thread(compile_hip):
    library = hipsim.load()
    reports = []

    def fail() -> None:
        assert library.hipModuleUnload(None) == 400
        reports.append(library.hipsimLastReport())
        reports.append(library.hipPeekAtLastError())

    library.hipGetLastError()
    assert library.hipDeviceSynchronize() == 0
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert reports[0] != b"" and reports[1] == 400
    assert library.hipsimLastReport() == b""
    assert library.hipGetLastError() == 0


def test_last_error_is_kept_until_it_is_read():
    library = hipsim.load()
    library.hipGetLastError()
    assert library.hipModuleUnload(None) == 400
    assert library.hipDeviceSynchronize() == 0
    assert library.hipPeekAtLastError() == 400
    assert library.hipGetLastError() == 400
    assert library.hipGetLastError() == 0


FORK = """
import array, ctypes, os, sys, threading, time
import hipsim
from hipsim import Buffer

hipsim.set_option("threads", 2)
saxpy = hipsim.Module(sys.argv[1])
waiter = hipsim.Module(sys.argv[2])

def works():
    out = array.array("f", [0.0] * 640)
    saxpy.kernel("spill_over").launch((10, 1, 1), (64, 1, 1), [Buffer(out)])
    return list(out) == [1.0] * 640

def child_works():
    child = os.fork()
    if child == 0:
        os._exit(0 if works() else 1)
    for _ in range(500):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(child, 9)
    return False

assert works()
assert child_works(), "after a launch"
flag = array.array("i", [0] * 4)
arguments = ((1, 1, 1), (1, 1, 1), [Buffer(flag)])
thread = threading.Thread(target=waiter.kernel("wait").launch, args=arguments)
thread.start()
while flag[0] == 0:
    time.sleep(0.005)
assert child_works(), "during a launch"

# Forks while another thread holds the lock of the tables most of the time:
# each copy looks through a long list of allocations.
library, block = hipsim.load(), ctypes.c_void_p()
for _ in range(3000):
    library.hipMalloc(ctypes.byref(block), ctypes.c_size_t(1))
bytes_in, bytes_out = ctypes.c_char(), ctypes.c_char()
def churn():
    while flag[1] == 0:
        library.hipMemcpy(
            ctypes.byref(bytes_in), ctypes.byref(bytes_out), ctypes.c_size_t(1), 4
        )
churner = threading.Thread(target=churn)
churner.start()
for _ in range(10):
    assert child_works(), "during copies"
flag[1] = 1
thread.join()
churner.join()
assert flag[2] == 7 and works()
"""


def run_script(script: str, *arguments: object, **environment: str):
    root = Path(hipsim.__file__).resolve().parents[1]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        timeout=60,
        check=False,
    )


def test_fork_is_safe_after_and_during_launches(compile_hip, tmp_path):
    paths = []
    for name, source in (("saxpy.co", SAXPY), ("wait.co", WAIT)):
        paths.append(tmp_path / name)
        paths[-1].write_bytes(compile_hip(source))
    result = run_script(FORK, *paths)
    assert (result.returncode, result.stderr) == (0, "")


def test_no_thread_outlives_a_launch(compile_hip, option):
    option("threads", 8)
    before = len(os.listdir("/proc/self/task"))
    run_saxpy(compile_hip(SAXPY), 10000, 64)
    assert len(os.listdir("/proc/self/task")) == before


# ---- options ---------------------------------------------------------------


def test_options_come_from_the_environment_and_by_call():
    script = """
import hipsim
names = ("check", "threads", "cpu", "budget")
hipsim.set_option("threads", 3)
print([hipsim.get_option(n) for n in names])
"""
    result = run_script(
        script,
        HIPSIM_CHECK="1",
        HIPSIM_THREADS="2",
        HIPSIM_CPU="0",
        HIPSIM_BUDGET="123",
    )
    assert (result.stdout, result.stderr) == ("[1, 3, 0, 123]\n", "")


@pytest.mark.parametrize("value", ["2", "-1", "x", "1x", "99999999999999999999"])
def test_malformed_option_gives_one_warning_and_the_default(value):
    script = """
import hipsim
print([hipsim.get_option("check") for _ in range(3)])
"""
    result = run_script(script, HIPSIM_CHECK=value)
    assert result.stdout == "[0, 0, 0]\n"
    assert result.stderr.count("\n") == 1 and "HIPSIM_CHECK" in result.stderr


def test_unknown_or_out_of_range_options_are_refused():
    with pytest.raises(hipsim.HipError, match="expected check, threads"):
        hipsim.set_option("chek", 1)
    with pytest.raises(hipsim.HipError, match="expected 0 to 1, got 2"):
        hipsim.set_option("check", 2)


# ---- the HIP calls ---------------------------------------------------------


@pytest.fixture
def hip():
    """The library; plain ctypes, so pointers need c_void_p at each call."""
    library = hipsim.load()
    library.hipGetErrorString.restype = ctypes.c_char_p
    library.hipGetLastError()
    return library


class Allocation:
    """hipMalloc, for tests."""

    def __init__(self, hip, size: int) -> None:
        pointer = ctypes.c_void_p()
        assert hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
        self.address = pointer.value

    def at(self, offset: int = 0) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.address + offset)


def launch_hip(hip, function, pointer, block=64, extra=None, stream=None) -> int:
    params = None
    if extra is None:
        params = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    shape = [ctypes.c_uint(n) for n in (1, 1, 1, block, 1, 1, 0)]
    return hip.hipModuleLaunchKernel(function, *shape, stream, params, extra)


def get_function(hip, module: hipsim.Module, name: bytes) -> ctypes.c_void_p:
    function = ctypes.c_void_p()
    assert hip.hipModuleGetFunction(ctypes.byref(function), module._handle, name) == 0
    return function


@pytest.mark.parametrize("check", [0, 1])
def test_red_zones_round_allocations_are_out_of_bounds(compile_hip, hip, option, check):
    source = """
    GLOBAL void poke(char *at) { at[lane()] = 5; }
    """
    option("check", check)
    blocks = [Allocation(hip, 1000), Allocation(hip, 1000)]
    with hipsim.Module(compile_hip(source)) as module:
        poke = get_function(hip, module, b"poke")
        for block in blocks:
            assert launch_hip(hip, poke, block.at(), 1000) == 0
            assert launch_hip(hip, poke, block.at(999), 1) == 0
            for outside in (-1, 1000, -4096, 1000 + 4000):
                assert launch_hip(hip, poke, block.at(outside), 1) == 700
            assert b"1000" in hip.hipsimLastReport()
    data = bytes(1000)
    assert hip.hipMemcpy(data, blocks[0].at(), ctypes.c_size_t(1000), 2) == 0
    assert data == b"\x05" * 1000
    for block in blocks:
        assert hip.hipFree(block.at()) == 0
        assert hip.hipFree(block.at()) == 1


@pytest.mark.parametrize("offset", [-1, 1000, 1000 + 4095])
def test_host_writes_into_a_red_zone_are_found_at_level_1(hip, option, offset):
    option("check", 1)
    block = Allocation(hip, 1000)
    ctypes.memset(block.at(offset), 0, 1)
    assert hip.hipFree(block.at()) == 700
    assert f"byte {offset} ".encode() in hip.hipsimLastReport()


def test_copies_stay_within_their_block(hip):
    block = Allocation(hip, 100)
    data = ctypes.create_string_buffer(b"\x11" * 200, 200)
    size = ctypes.c_size_t
    assert hip.hipMemset(block.at(), 0x22, size(100)) == 0
    assert hip.hipMemcpy(block.at(50), data, size(50), 1) == 0
    assert hip.hipMemcpyAsync(data, block.at(), size(100), 2, None) == 0
    assert data.raw == b"\x22" * 50 + b"\x11" * 150
    for offset, count in ((0, 101), (100, 1), (-1, 1), (-9000, 9999), (50, 51)):
        assert hip.hipMemcpy(block.at(offset), data, size(count), 1) == 1
        assert hip.hipMemset(block.at(offset), 0, size(count)) == 1
        assert hip.hipMemcpy(data, block.at(offset), size(count), 2) == 1
    assert hip.hipMemcpy(None, data, size(1), 1) == 1
    assert hip.hipMemcpy(block.at(), data, size(1), 9) == 1
    assert hip.hipMemcpy(None, None, size(0), 1) == 0
    assert hip.hipFree(block.at()) == 0


def test_device_memory_ends(hip):
    pointer = ctypes.c_void_p(1)
    assert hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(2**40)) == 2
    assert hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(2**64 - 1)) == 2
    assert pointer.value is None
    first = Allocation(hip, 20 << 30)  # never touched
    assert hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(20 << 30)) == 2
    assert b"in use" in hip.hipsimLastReport()
    assert hip.hipFree(first.at()) == 0
    second = Allocation(hip, 20 << 30)
    assert hip.hipFree(second.at()) == 0
    assert hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(0)) == 0
    assert pointer.value is None and hip.hipFree(None) == 0


def test_packed_arguments_are_accepted(compile_hip, hip):
    block = Allocation(hip, 256)
    packed = ctypes.c_void_p(block.address)
    with hipsim.Module(compile_hip(SAXPY)) as module:
        function = get_function(hip, module, b"spill_over")
        for size, expected in ((8, 0), (7, 1)):
            count = ctypes.c_size_t(size)
            pointer, length = ctypes.addressof(packed), ctypes.addressof(count)
            for entries in ((1, pointer, 2, length, 3), (2, length, 1, pointer, 3)):
                extra = (ctypes.c_void_p * 5)(*entries)
                assert launch_hip(hip, function, None, extra=extra) == expected
        bad = (ctypes.c_void_p * 3)(7, None, 3)
        assert launch_hip(hip, function, None, extra=bad) == 1
        assert launch_hip(hip, function, None, extra=(ctypes.c_void_p * 1)(3)) == 1
        assert b"argument 0" in hip.hipsimLastReport()
    assert hip.hipFree(block.at()) == 0


def test_modules_load_from_a_path_and_from_a_bare_pointer(compile_hip, hip, tmp_path):
    image = compile_hip(SAXPY)
    path = tmp_path / "a.co"
    path.write_bytes(image)
    module = ctypes.c_void_p()
    assert hip.hipModuleLoad(ctypes.byref(module), str(path).encode()) == 0
    assert hip.hipModuleUnload(module) == 0
    assert hip.hipModuleUnload(module) == 400
    assert hip.hipModuleLoadData(ctypes.byref(module), image) == 0
    assert hip.hipModuleUnload(module) == 0
    path.write_bytes(image[: len(image) // 2])
    assert hip.hipModuleLoad(ctypes.byref(module), str(path).encode()) == 200
    for missing in (tmp_path / "b.co", tmp_path):
        assert hip.hipModuleLoad(ctypes.byref(module), str(missing).encode()) == 301
        assert str(missing).encode() in hip.hipsimLastReport()
    assert module.value is None


def test_bare_pointer_to_a_truncated_file_is_refused(compile_hip, hip):
    image = compile_hip(SAXPY)
    page = mmap.PAGESIZE
    assert len(image) > page
    # The last page of the mapping is given back, so that memory ends there.
    memory = mmap.mmap(-1, 4 * page)
    memory[:page] = image[:page]
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    libc.munmap(ctypes.c_void_p(address + page), ctypes.c_size_t(3 * page))
    module = ctypes.c_void_p()
    status = hip.hipModuleLoadData(ctypes.byref(module), ctypes.c_void_p(address))
    report = hip.hipsimLastReport()
    assert (status, b"truncated" in report) == (200, True)


def test_bad_handles_are_refused(compile_hip, hip):
    wrong = ctypes.c_void_p(0x1234)
    out = ctypes.c_void_p()
    flag, ms = ctypes.c_int(), ctypes.c_float()
    with hipsim.Module(compile_hip(SAXPY)) as module:
        function = get_function(hip, module, b"spill_over")
        assert launch_hip(hip, function, out, stream=wrong) == 400
    calls = [
        hip.hipModuleUnload(wrong),
        hip.hipModuleGetFunction(ctypes.byref(out), wrong, b"saxpy"),
        launch_hip(hip, wrong, out),
        launch_hip(hip, function, out),  # its module is gone
        hip.hipStreamDestroy(wrong),
        hip.hipStreamSynchronize(wrong),
        hip.hipStreamQuery(wrong),
        hip.hipStreamIsCapturing(wrong, ctypes.byref(flag)),
        hip.hipEventDestroy(wrong),
        hip.hipEventRecord(wrong, None),
        hip.hipEventQuery(wrong),
        hip.hipEventSynchronize(wrong),
        hip.hipStreamWaitEvent(None, wrong, 0),
        hip.hipEventElapsedTime(ctypes.byref(ms), wrong, wrong),
    ]
    assert calls == [400] * len(calls)
    assert hip.hipSetDevice(1) == 101
    assert hip.hipGetErrorString(101) == b"invalid device ordinal"


def test_streams_and_events_keep_time(hip):
    stream, start, stop = (ctypes.c_void_p() for _ in range(3))
    flag, ms = ctypes.c_int(5), ctypes.c_float()
    assert hip.hipStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
    assert hip.hipEventCreate(ctypes.byref(start)) == 0
    assert hip.hipEventCreateWithFlags(ctypes.byref(stop), 2) == 0
    assert hip.hipEventRecord(start, stream) == 0
    assert hip.hipEventElapsedTime(ctypes.byref(ms), start, stop) == 400
    threading.Event().wait(0.02)
    assert hip.hipEventRecord(stop, stream) == 0
    assert hip.hipEventElapsedTime(ctypes.byref(ms), start, stop) == 0
    assert 19 <= ms.value < 10000
    for call in (hip.hipEventQuery, hip.hipEventSynchronize):
        assert call(start) == 0
    assert hip.hipStreamWaitEvent(stream, start, 0) == 0
    assert hip.hipStreamIsCapturing(stream, ctypes.byref(flag)) == 0
    assert flag.value == 0
    for call in (hip.hipStreamQuery, hip.hipStreamSynchronize):
        assert call(stream) == call(None) == 0
    assert hip.hipEventDestroy(start) == hip.hipEventDestroy(stop) == 0
    assert hip.hipStreamDestroy(stream) == 0
    assert hip.hipStreamDestroy(stream) == 400


@pytest.mark.parametrize(
    ("call", "size", "arch_at", "total_at", "wave_at", "units_at"),
    [
        ("hipGetDevicePropertiesR0600", 1472, 1160, 288, 308, 388),
        ("hipGetDeviceProperties", 792, 396, 256, 276, 336),
    ],
)
def test_properties_are_at_their_offsets(
    hip, call, size, arch_at, total_at, wave_at, units_at
):
    raw = ctypes.create_string_buffer(b"\xee" * 4096, 4096)
    assert getattr(hip, call)(raw, 0) == 0
    data = raw.raw
    assert data[size:] == b"\xee" * (4096 - size)  # nothing beyond the struct
    assert data[:26] == b"hipsim gfx906 (simulated)\0"
    assert data[arch_at : arch_at + 23] == b"gfx906:sramecc+:xnack-\0"
    number = int.from_bytes
    assert number(data[total_at : total_at + 8], "little") == 32 << 30
    assert number(data[total_at + 8 : total_at + 16], "little") == 65536  # LDS
    assert number(data[wave_at : wave_at + 4], "little") == 64
    assert number(data[units_at : units_at + 4], "little") == 60
    assert getattr(hip, call)(raw, 1) == 101
    assert getattr(hip, call)(None, 0) == 1


def test_one_device_of_api_5_4(hip):
    value = ctypes.c_int(9)
    assert hip.hipInit(0) == 0
    for call, expected in (
        (hip.hipGetDeviceCount, 1),
        (hip.hipGetDevice, 0),
        (hip.hipRuntimeGetVersion, 50400000),
        (hip.hipDriverGetVersion, 50400000),
    ):
        assert call(ctypes.byref(value)) == 0
        assert value.value == expected
    assert hip.hipSetDevice(0) == 0


def test_only_the_documented_names_are_exported():
    nm = subprocess.run(
        ["nm", "-D", "--defined-only", hipsim.library_path()],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.split()[-1] for line in nm.stdout.splitlines()}
    header = """
    hipInit hipGetDeviceCount hipSetDevice hipGetDevice hipGetDeviceProperties
    hipGetDevicePropertiesR0600 hipDriverGetVersion hipRuntimeGetVersion hipMalloc
    hipFree hipMemcpy hipMemcpyAsync hipMemset hipMemsetAsync hipModuleLoad
    hipModuleLoadData hipModuleUnload hipModuleGetFunction hipModuleLaunchKernel
    hipStreamCreate hipStreamCreateWithFlags hipStreamDestroy hipStreamSynchronize
    hipStreamQuery hipStreamWaitEvent hipStreamIsCapturing hipEventCreate
    hipEventCreateWithFlags hipEventRecord hipEventQuery hipEventSynchronize
    hipEventElapsedTime hipEventDestroy hipDeviceSynchronize hipGetLastError
    hipPeekAtLastError hipGetErrorName hipGetErrorString
    hipsimLaunch hipsimLastReport hipsimModuleLoad hipsimSetOption hipsimGetOption
    hipsimObjectInfo hipsimDisassemble hipsimFree
    """
    assert names == set(header.split())
