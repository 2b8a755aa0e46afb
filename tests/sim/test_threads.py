"""Launches: threads, forks, the order of waves and workgroups.

A kernel that waits for a flag, which the host then sets in the same memory, makes
the tests of what happens at the same time deterministic.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import array
import os
import random
import threading

import pytest
from runtime_tools import SAXPY, WAIT, as_i32, floats, run_saxpy

import hipsim
from hipsim import Buffer

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


def test_fork_is_safe_after_and_during_launches(compile_hip, run_script, tmp_path):
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


# ---- order of the waves ----------------------------------------------------


def test_random_wave_order_gives_the_same_bits_for_a_kernel_without_races(
    compile_hip, option
):
    source = """
GLOBAL void kernel(int *out)
{
    SHARED int part[256];
    int t = lane(), sum = 0;
    for (int round = 0; round < 8; round++) {
        part[t] = t * 7 + round;
        barrier();
        sum = sum * 31 + part[(t + 67 * round) & 255];
        barrier();
    }
    out[group() * 256 + t] = sum;
}
"""
    expected = None
    with hipsim.Module(compile_hip(source)) as module:
        for seed in range(50):
            option("seed", seed)
            out = bytearray(4 * 256 * 4)
            module.kernel("kernel").launch((4, 1, 1), (256, 1, 1), [hipsim.Buffer(out)])
            expected = expected or out
            assert out == expected, f"seed {seed}"


def test_random_wave_order_shows_a_missing_barrier(compile_hip, option):
    source = """
GLOBAL void kernel(int *out)
{
    SHARED volatile int part[256];
    int t = lane();
    part[t] = t;
    out[t] = part[t ^ 64];
}
"""
    results = set()
    with hipsim.Module(compile_hip(source)) as module:
        for seed in range(20):
            option("seed", seed)
            out = bytearray(4 * 256)
            module.kernel("kernel").launch((1, 1, 1), (256, 1, 1), [hipsim.Buffer(out)])
            results.add(bytes(out))
    assert len(results) > 1


# ---- a sample of the workgroups --------------------------------------------


@pytest.mark.parametrize("sample", [1, 3, 16, 31, 32, 100])
def test_a_sample_runs_so_many_workgroups_spread_over_the_grid(
    compile_hip, option, sample
):
    source = """
GLOBAL void kernel(int *out)
{
    int g = (__builtin_amdgcn_workgroup_id_z() * 2 + __builtin_amdgcn_workgroup_id_y())
            * 8 + group();
    out[g] = g + 1;
}
"""
    option("sample", sample)
    out = bytearray(4 * 32)
    with hipsim.Module(compile_hip(source)) as module:
        stats = module.kernel("kernel").launch(
            (8, 2, 2), (1, 1, 1), [hipsim.Buffer(out)]
        )
    ran = [i for i, g in enumerate(memoryview(out).cast("i")) if g == i + 1]
    assert stats.workgroups == len(ran) == min(sample, 32)
    assert (
        max((b - a for a, b in zip([-1, *ran], [*ran, 32])), default=0)
        <= 2 * (32 // min(sample, 32)) + 1
    )
    if 8 <= sample <= 16:
        assert len({g % 8 for g in ran}) > 2


def test_bounds_of_a_sample_are_those_of_the_whole(compile_hip, option):
    source = """
GLOBAL void kernel(float *out)
{
    float x = lane();
    for (int i = 0; i < 100; i++) { x = x * 1.5f + 0.25f; }
    out[index()] = x;
}
"""
    bounds = []
    out = bytearray(4 * 64 * 2048)
    option("profile", 1)
    with hipsim.Module(compile_hip(source)) as module:
        for sample in (0, 1, 16, 59, 64):
            option("sample", sample)
            hipsim.take_profile()
            module.kernel("kernel").launch(
                (2048, 1, 1), (64, 1, 1), [hipsim.Buffer(out)]
            )
            (launch,) = hipsim.take_profile()["launches"]
            assert launch["groups_executed"] == (sample or 2048)
            assert launch["groups_total"] == 2048
            bounds.append({b["unit"]: b["cycles"] for b in launch["bounds"]})
    for unit in ("VALU", "SALU", "TA", "L1", "WAVE"):  # caches do not scale
        values = [clocks[unit] for clocks in bounds]
        assert values[1:] == pytest.approx(values[:1] * 4, rel=0.03), unit
