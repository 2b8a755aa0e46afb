"""The HIP calls by their own names, error codes, and options.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import threading

import pytest

import hipsim

FILL = """
GLOBAL void fill(float *out) { out[index()] = 1.0f; }
"""


def test_errors_belong_to_the_calling_thread():
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


# ---- options ---------------------------------------------------------------


def test_options_come_from_the_environment_and_by_call(run_script):
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


@pytest.mark.parametrize(
    "value", ["3", "-1", "x", "1x", "+1", " 1", "- 1", "-", "99999999999999999999"]
)
def test_malformed_option_gives_one_warning_and_the_default(run_script, value):
    script = """
import hipsim
print([hipsim.get_option("check") for _ in range(3)])
"""
    result = run_script(script, HIPSIM_CHECK=value)
    assert result.stdout == "[0, 0, 0]\n"
    assert result.stderr.count("\n") == 1 and "HIPSIM_CHECK" in result.stderr


def test_unknown_or_out_of_range_options_are_refused():
    with pytest.raises(hipsim.HipError, match="no option is called"):
        hipsim.set_option("chek", 1)
    with pytest.raises(hipsim.HipError, match="expected a number from 0 to 2, got 3"):
        hipsim.set_option("check", 3)
    for value in (2**64 + 1, 2**63, -(2**63) - 1):  # what ctypes would cut off
        with pytest.raises(hipsim.HipError, match="check: expected a number of 64"):
            hipsim.set_option("check", value)


def test_a_doubled_word_of_a_fault_is_refused():
    with pytest.raises(hipsim.HipError, match="launch: expected nth once"):
        hipsim.set_fault("launch:nth=1,nth=2")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("dot2", "hilo,keep32", 5),
        ("dot2", "fused,keep32,flush16", 14),
        ("dot2", "8", 8),
        ("ulp", "adversarial", 1),
        ("seed", "77", 77),
    ],
)
def test_environment_takes_words_and_numbers(run_script, name, text, value):
    script = f"import hipsim; print(hipsim.get_option({name!r}))"
    result = run_script(script, **{f"HIPSIM_{name.upper()}": text})
    assert (result.stdout, result.stderr) == (f"{value}\n", "")


@pytest.mark.parametrize(
    "text", ["hilo,fused", "lohi,hilo", "keep32,keep32", "lo", "3", "hilo,", "16"]
)
def test_words_that_say_nothing_give_one_warning_and_the_default(run_script, text):
    script = "import hipsim; print(hipsim.get_option('dot2'))"
    result = run_script(script, HIPSIM_DOT2=text)
    assert result.stdout == "0\n"
    assert result.stderr.count("\n") == 1 and "lohi, hilo or fused" in result.stderr


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


def test_copies_refuse_freed_blocks_and_wild_pointers(hip):
    size, data = ctypes.c_size_t, ctypes.create_string_buffer(64)
    block = Allocation(hip, 5000)
    assert hip.hipFree(block.at()) == 0
    for pointer in (block.at(), block.at(4999), ctypes.c_void_p(8)):
        assert hip.hipMemset(pointer, 0, size(1)) == 1
        assert hip.hipMemcpy(pointer, data, size(1), 1) == 1
        assert hip.hipMemcpy(data, pointer, size(1), 2) == 1
        freed = b"that was freed" in hip.hipsimLastReport()
        assert freed == (pointer.value != 8)
    again = [Allocation(hip, 5000) for _ in range(3)]
    assert all(other.address != block.address for other in again)
    for other in again:
        assert hip.hipFree(other.at()) == 0
    for _ in range(200):  # more than are remembered
        assert hip.hipFree(Allocation(hip, 100).at()) == 0


def test_host_memory_is_copied_as_its_protection_allows(hip):
    page, size = mmap.PAGESIZE, ctypes.c_size_t
    memory = mmap.mmap(-1, 3 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    last = ctypes.c_void_p(address + 2 * page)
    assert libc.mprotect(last, size(page), mmap.PROT_READ) == 0
    data = ctypes.create_string_buffer(2 * page)
    inside, across = (ctypes.c_void_p(address + n) for n in (page, page + 1))
    assert hip.hipMemcpy(inside, data, size(page), 0) == 0
    assert hip.hipMemcpy(data, across, size(page), 0) == 0
    assert hip.hipMemcpy(across, data, size(page), 0) == 1
    assert b"can be written" in hip.hipsimLastReport()


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
    with hipsim.Module(compile_hip(FILL)) as module:
        function = get_function(hip, module, b"fill")
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
    image = compile_hip(FILL)
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
    image = compile_hip(FILL + "DEVICE __attribute__((used)) char more[9000] = {1};")
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
    with hipsim.Module(compile_hip(FILL)) as module:
        function = get_function(hip, module, b"fill")
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
    hipsimLaunch hipsimLaunchWithin hipsimLastReport hipsimModuleLoad hipsimSetOption
    hipsimGetOption
    hipsimObjectInfo hipsimDisassemble hipsimDisassembleLines hipsimFree
    hipsimSetFault hipsimFaultsFired hipsimTakeProfile
    """
    assert names == set(header.split())
