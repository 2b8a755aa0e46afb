"""Scalar loads that compilers make wider than what the program reads.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import numpy as np
import pytest
from check_tools import findings

import hipsim

SOURCE = """
typedef unsigned u32;
typedef u32 v3 __attribute__((ext_vector_type(3)));
typedef const unsigned char *bytes4 __attribute__((align_value(4)));
GLOBAL void row3(const u32 *__restrict in, u32 *__restrict out)
{
    const v3 *rows = (const v3 *)in; /* 16 bytes apart */
    v3 x = rows[group()];
    out[index()] = x.x + x.y * x.z;
}
GLOBAL void bytes3(bytes4 __restrict in, u32 *__restrict out)
{
    out[index()] = in[0] + in[1] + in[2];
}
"""


@pytest.mark.parametrize("check", [0, 1, 2])
@pytest.mark.parametrize("level", ["-O1", "-O3"])
@pytest.mark.parametrize("clang", [None, "clang-15"])
def test_a_load_wider_than_its_element_is_no_finding(
    compile_hip, option, clang, level, check
):
    option("check", check)
    rows = np.arange(1, 17, dtype=np.uint32)
    small = np.array([5, 6, 7], np.uint8)
    out = np.zeros(64 * 4, np.uint32)
    image = compile_hip(SOURCE, level=level, clang=clang, abi=4)

    def run(kernel, data, groups):
        out[:] = 0
        target = hipsim.Buffer(out.view(np.uint8), "w")
        kernel = module.kernel(kernel)
        kernel.launch((groups, 1, 1), (64, 1, 1), [data, target])

    with hipsim.Module(image) as module:
        # The last row's fourth dword is nobody's.
        data = hipsim.Buffer(rows.view(np.uint8), "r", size=60)
        run("row3", data, 4)
        assert out[::64].tolist() == [4 * g + 1 + (4 * g + 2) * (4 * g + 3)
                                      for g in range(4)]  # fmt: skip
        padded = np.zeros(16, np.uint8)
        padded[:3] = small
        run("bytes3", hipsim.Buffer(padded, "r", size=3), 1)
        assert out[0] == 18


def test_what_it_brings_along_is_undefined():
    buffers = [hipsim.Buffer(bytearray(64), "rw", size=n) for n in (64, 8)]
    load = "s_load_dwordx4 s[20:23], s[10:11], 0x0\ns_waitcnt lgkmcnt(0)\n"
    store = "v_mov_b32 v3, s{}\nv_mov_b32 v4, 0\nglobal_store_dword v4, v3, s[8:9]"
    assert findings(load + store.format(21), buffers=buffers) == ""
    report = findings(load + store.format(22), buffers=buffers)
    assert "beyond a tensor's element, never written" in report


def test_a_load_of_nobodys_memory_is_still_a_fault():
    body = "s_load_dwordx4 s[20:23], s[10:11], 0x10\ns_waitcnt lgkmcnt(0)\n"
    buffers = [hipsim.Buffer(bytearray(64), "rw", size=16) for _ in range(2)]
    assert "illegal address" in findings(body, buffers=buffers)


def test_a_scalar_buffer_load_beyond_the_records_reads_defined_zeros():
    body = (
        "s_mov_b32 s12, s8\ns_mov_b32 s13, s9\ns_mov_b32 s14, 0\n"
        "s_mov_b32 s15, 0x20000\ns_buffer_load_dwordx2 s[20:21], s[12:15], 0x0\n"
        "s_waitcnt lgkmcnt(0)\nv_mov_b32 v3, s20\nv_mov_b32 v4, 0\n"
        "global_store_dword v4, v3, s[10:11]\n"
    )
    assert findings(body) == ""
