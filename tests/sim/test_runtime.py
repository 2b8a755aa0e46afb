"""Launches: arguments, memory, faults.

Kernels are compiled here; expected values are computed in Python on numbers
that are exact in fp32.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import array
import ctypes
import mmap
from pathlib import Path

import pytest
from runtime_tools import SAXPY, WAIT, as_f32, as_i32, floats, run_saxpy

import hipsim
from hipsim import Buffer

DYNAMIC_LDS = """
extern SHARED int tile[];
GLOBAL void turn(int *out, const int *in, int count)
{
    tile[lane()] = in[lane()];
    barrier();
    out[lane()] = tile[count - 1 - lane()];
}
"""

EARLY = """
GLOBAL void early(int *out)
{
    static SHARED int tile[64];
    if (lane() >= 64) { return; }
    tile[lane()] = lane();
    barrier();
    out[lane()] = tile[63 - lane()];
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

LEVELS = ["-O0", "-O3"]
ABIS = [4, 5, 6]


# ---- barriers -------------------------------------------------------------


@pytest.mark.parametrize("check", [0, 1])
def test_waves_that_ended_do_not_hold_a_barrier(compile_hip, option, check):
    option("check", check)
    out = array.array("i", [-1] * 64)
    with hipsim.Module(compile_hip(EARLY)) as module:
        module.kernel("early").launch((1, 1, 1), (256, 1, 1), [Buffer(out)])
    assert list(out) == list(range(63, -1, -1))


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
    GLOBAL void wide(float4 *out, const float4 *in) { out[lane()] = in[lane()]; }
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
