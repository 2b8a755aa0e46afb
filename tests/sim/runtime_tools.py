"""Kernels and values that the tests of launches share.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import array

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

WAIT = """
GLOBAL void wait(volatile int *flag)
{
    flag[0] = 1;
    while (flag[1] == 0) { }
    flag[2] = 7;
}
GLOBAL void forever(volatile int *flag) { for (;;) { flag[0] = 1; } }
"""


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
