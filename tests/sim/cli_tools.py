"""Kernels and files for the tests of the ``hipsim`` command.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import struct
from pathlib import Path

SOURCE = """
GLOBAL void scale(float *out, const float *in, float factor, int count)
{
    int i = index();
    if (i < count) { out[i] = factor * in[i]; }
}
struct job { float *out; const float *in; long count; };
GLOBAL void move(job j)
{
    for (long i = 0; i < j.count; i++) { j.out[i] = j.in[i] + 1.0f; }
}
GLOBAL void idle() {}
GLOBAL void forever(volatile int *out) { for (;;) { *out = 1; } }
typedef int __attribute__((aligned(1))) any_int;
GLOBAL void odd(int *out, const char *in) { *out = *(const any_int *)(in + 1); }
GLOBAL void add(long *out, long first, int second) { *out = first + second; }
GLOBAL void shift(float *out, const float *in) { out[lane()] = in[lane() + 1]; }
"""


def npy(values: bytes, dtype: str, shape: str, version: int = 1, fortran="False"):
    """An .npy file, written by hand: header padded with spaces to 64 bytes."""
    text = f"{{'descr': {dtype}, 'fortran_order': {fortran}, 'shape': {shape}, }}"
    width = 2 if version == 1 else 4
    total = -(-(8 + width + len(text) + 1) // 64) * 64
    text = text.ljust(total - 8 - width - 1) + "\n"
    head = b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(width, "little")
    return head + text.encode() + values


def float_bytes(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def make_folder(compile_hip, path: Path) -> Path:
    """Fills a folder with k.co, a.npy (1 2 3 4) and o.npy (zeros)."""
    (path / "k.co").write_bytes(compile_hip(SOURCE))
    (path / "a.npy").write_bytes(npy(float_bytes(1, 2, 3, 4), "'<f4'", "(4,)"))
    (path / "o.npy").write_bytes(npy(bytes(16), "'<f4'", "(2, 2)", 2))
    return path
