"""What compilers emit for builtins, atomics of every kind, long branches, flat
scratch and OpenCL, run and compared with Python.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import array
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import test_compiled
from conftest import find_clang
from test_exec_rare import sad

import hipsim
from hipsim import Buffer

LANES = 64
M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def run(image: bytes, name: str, *arguments: object, lds: int = 0) -> None:
    packed = [
        a.to_bytes(4, "little") if isinstance(a, int) else Buffer(a) for a in arguments
    ]
    with hipsim.Module(image) as module:
        module.kernel(name).launch((1, 1, 1), (LANES, 1, 1), packed, lds=lds)


# ---- builtins -----------------------------------------------------------------

MEDIA = """
typedef unsigned u32; typedef unsigned long long u64;
typedef u32 u32x4 __attribute__((ext_vector_type(4)));
GLOBAL void media(const u64 *a, const u32 *b, const u64 *c, u64 *o)
{
    int i = index();
    o[5 * i] = __builtin_amdgcn_qsad_pk_u16_u8(a[i], b[i], c[i]);
    o[5 * i + 1] = __builtin_amdgcn_mqsad_pk_u16_u8(a[i], b[i], c[i]);
    u32x4 start = {(u32)c[i], b[i], (u32)a[i], 7};
    u32x4 sums = __builtin_amdgcn_mqsad_u32_u8(a[i], b[i], start);
    o[5 * i + 2] = sums.x | (u64)sums.y << 32;
    o[5 * i + 3] = sums.z | (u64)sums.w << 32;
    u32 bytes = 0;
    for (int k = 0; k < 4; k++) {
        bytes = __builtin_amdgcn_cvt_pk_u8_f32((b[i] >> 8 * k & 255) + 0.25f, k, bytes);
    }
    o[5 * i + 4] = bytes;
}
"""


@pytest.mark.parametrize("clang,level", [(None, "-O0"), (None, "-O3"),
                                         ("clang-15", "-O2")])  # fmt: skip
def test_media_builtins_sum_and_pack_bytes(clang, level, compile_hip) -> None:
    rng = random.Random(1)
    a, c = (array.array("Q", [rng.getrandbits(64) for _ in range(LANES)])
            for _ in range(2))  # fmt: skip
    b = array.array("I", [rng.getrandbits(32) & rng.choice((M32, 0xFF00FF))
                          for _ in range(LANES)])  # fmt: skip
    out = array.array("Q", [0] * (5 * LANES))
    abi = 4 if clang else 6
    run(compile_hip(MEDIA, level=level, abi=abi, clang=clang), "media", a, b, c, out)
    for i in range(LANES):
        windows = [a[i] >> 8 * k for k in range(4)]
        for at, masked in ((0, False), (1, True)):
            assert out[5 * i + at] == sum(
                (sad(w, b[i], masked) + (c[i] >> 16 * k) & 0xFFFF) << 16 * k
                for k, w in enumerate(windows)
            )
        start = [c[i] & M32, b[i], a[i] & M32, 7]
        sums = [s + sad(w, b[i], True) & M32 for s, w in zip(start, windows)]
        assert out[5 * i + 2] == sums[0] | sums[1] << 32
        assert out[5 * i + 3] == sums[2] | sums[3] << 32
        assert out[5 * i + 4] == b[i]


COUNT = """
typedef unsigned u32;
typedef __attribute__((address_space(3))) int *lds_pointer;
GLOBAL void count(const u32 *in, u32 *o)
{
    static SHARED int taken, left;
    if (lane() == 0) { taken = 0; left = 1000; }
    barrier();
    if (in[lane()] & 1) {
        o[lane()] = __builtin_amdgcn_ds_append((lds_pointer)&taken);
    } else {
        o[lane()] = __builtin_amdgcn_ds_consume((lds_pointer)&left);
    }
    barrier();
    o[64 + lane()] = taken * 10000 + left;
}
"""


@pytest.mark.parametrize("clang,level", [(None, "-O0"), (None, "-O3"),
                                         ("clang-15", "-O1")])  # fmt: skip
def test_append_and_consume_count_lanes(clang, level, compile_hip) -> None:
    rng = random.Random(2)
    source = array.array("I", [rng.getrandbits(8) for _ in range(LANES)])
    out = array.array("I", [0] * (2 * LANES))
    abi = 4 if clang else 5
    run(compile_hip(COUNT, level=level, abi=abi, clang=clang), "count", source, out)
    odd = sum(x & 1 for x in source)
    assert list(out[:LANES]) == [0 if x & 1 else 1000 for x in source]
    assert list(out[LANES:]) == [odd * 10000 + 1000 - (LANES - odd)] * LANES


BUFFERS = """
typedef unsigned u32;
GLOBAL void buffers(void *p, u32 *o, int bytes, int at)
{
    __amdgpu_buffer_rsrc_t r = __builtin_amdgcn_make_buffer_rsrc(p, 0, bytes, 0x27000);
    int i = lane() * 16;
    u32 one = __builtin_amdgcn_raw_buffer_load_b32(r, i, at, 0);
    u32 half = (unsigned short)__builtin_amdgcn_raw_buffer_load_b16(r, i + 2, at, 0);
    u32 byte = (unsigned char)__builtin_amdgcn_raw_buffer_load_b8(r, i + 5, at, 0);
    auto four = __builtin_amdgcn_raw_buffer_load_b128(r, i, at, 0);
    o[8 * lane()] = one;
    o[8 * lane() + 1] = half;
    o[8 * lane() + 2] = byte;
    for (int k = 0; k < 4; k++) { o[8 * lane() + 3 + k] = four[k]; }
    __builtin_amdgcn_raw_buffer_store_b32(one + 1, r, i + 8, at, 0);
    o[8 * lane() + 7] =
        __builtin_amdgcn_raw_ptr_buffer_atomic_add_i32(5, r, i + 12, at, 0);
}
typedef __attribute__((address_space(3))) void *lds_pointer;
typedef __attribute__((address_space(1))) void *global_pointer;
GLOBAL void to_lds(u32 *p, u32 *o)
{
    static SHARED u32 tile[192];
    for (int k = 0; k < 3; k++) { tile[64 * k + lane()] = 9; }
    barrier();
    __amdgpu_buffer_rsrc_t r = __builtin_amdgcn_make_buffer_rsrc(p, 0, 200, 0x27000);
    __builtin_amdgcn_raw_ptr_buffer_load_lds(r, (lds_pointer)tile, 4, lane() * 4, 0, 0,
                                             0);
    __builtin_amdgcn_global_load_lds((global_pointer)(p + (lane() ^ 1)),
                                     (lds_pointer)(tile + 64), 4, 0, 0);
    __builtin_amdgcn_s_waitcnt(0);
    barrier();
    for (int k = 0; k < 3; k++) { o[64 * k + lane()] = tile[64 * k + lane()]; }
}
"""


@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_buffers_read_zero_and_drop_stores_beyond_their_end(level, compile_hip) -> None:
    rng = random.Random(3)
    data = bytearray(rng.randbytes(1200))
    before, size, at = bytes(data), 600, 4
    out = array.array("I", [1] * (8 * LANES))
    run(compile_hip(BUFFERS, level=level, clang="clang-22"), "buffers", data, out,
        size, at)  # fmt: skip

    def read(offset: int, count: int) -> int:
        return int.from_bytes(before[offset : offset + count], "little") * (
            offset + count <= size
        )

    after = bytearray(before)
    for n in range(LANES):
        base = 16 * n + at
        one = read(base, 4)
        want = [one, read(base + 2, 2), read(base + 5, 1)]
        want += [read(base + 4 * k, 4) for k in range(4)]
        want.append(read(base + 12, 4))
        assert list(out[8 * n : 8 * n + 8]) == want, f"lane {n}"
        if base + 12 <= size:
            struct.pack_into("<I", after, base + 8, one + 1 & M32)
        if base + 16 <= size:
            struct.pack_into("<I", after, base + 12, want[7] + 5 & M32)
    assert data == after


@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_loads_to_lds_land_lane_by_lane(level, compile_hip) -> None:
    source = array.array("I", [100 + i for i in range(LANES)])
    out = array.array("I", [0] * (3 * LANES))
    run(compile_hip(BUFFERS, level=level, clang="clang-22"), "to_lds", source, out)
    wanted = [100 + i if 4 * i < 200 else 0 for i in range(LANES)]
    wanted += [100 + (i ^ 1) for i in range(LANES)] + [9] * LANES
    assert list(out) == wanted


# ---- atomics ------------------------------------------------------------------

# Each operation on the lane's own word: in global memory, in LDS, and through a
# pointer that leads to global memory, LDS or private memory by lane.
ATOMICS = """
typedef unsigned u32; typedef int i32; typedef unsigned long long u64;
typedef long long i64; typedef float f32; typedef double f64;
#define DO(f) r = __hip_atomic_fetch_##f(p, x, __ATOMIC_SEQ_CST, SCOPE); *o++ = r;
#define BASIC DO(add) DO(min) DO(max)                                           \\
    r = __hip_atomic_exchange(p, x, __ATOMIC_ACQ_REL, SCOPE); *o++ = r;         \\
    e = x;                                                                      \\
    __hip_atomic_compare_exchange_strong(p, &e, (x + 3), __ATOMIC_SEQ_CST,      \\
                                         __ATOMIC_RELAXED, SCOPE); *o++ = e;    \\
    e = x;                                                                      \\
    __hip_atomic_compare_exchange_strong(p, &e, x, __ATOMIC_SEQ_CST,            \\
                                         __ATOMIC_RELAXED, SCOPE); *o++ = e;    \\
    *o++ = __hip_atomic_load(p, __ATOMIC_ACQUIRE, SCOPE);
#define INTEGER BASIC DO(and) DO(or) DO(xor) __hip_atomic_store(p, x,           \\
    __ATOMIC_RELEASE, SCOPE); *o++ = *p;
#define KERNEL(T, OPERATIONS)                                                   \\
    GLOBAL void atomics_##T(T *g, const T *in, T *o)                            \\
    {                                                                           \\
        static SHARED T tile[64];                                               \\
        T own[66], x = in[lane()], r, e;                                        \\
        tile[lane()] = x * 3;                                                   \\
        own[lane()] = x * 3;                                                    \\
        own[65 - lane()] = 1;                                                   \\
        own[lane()] = x * 3;                                                    \\
        o += lane() * 64;                                                       \\
        { T *p = g + lane(); OPERATIONS }                                       \\
        { T *p = tile + lane(); OPERATIONS }                                    \\
        g[lane()] = tile[lane()] = x + x;                                       \\
        own[lane()] = x + x;                                                    \\
        T *p = lane() % 3 == 0 ? g + lane() : lane() % 3 == 1 ? tile + lane()   \\
                                                              : own + lane();   \\
        OPERATIONS                                                              \\
    }
#define SCOPE __HIP_MEMORY_SCOPE_AGENT
KERNEL(u32, INTEGER) KERNEL(i32, INTEGER) KERNEL(u64, INTEGER) KERNEL(i64, INTEGER)
KERNEL(f32, BASIC) KERNEL(f64, BASIC)
"""


def operate(p, x, wrap, integer):
    """The values that OPERATIONS writes, and the last content of p."""
    out = [p]
    p = wrap(p + x)
    out.append(p)
    p = min(p, x)
    out.append(p)
    p = max(p, x)
    out.append(p)
    p = x
    out.append(p)  # equal: exchanged
    p = wrap(x + 3)
    out += [p, p]  # not equal: stays
    if integer:
        out.append(p)
        p &= x
        out.append(p)
        p |= x
        out.append(p)
        p = wrap(p ^ x)
        out.append(x)
        p = x
    return out, p


@pytest.mark.parametrize("clang,level", [(None, "-O0"), (None, "-O3"),
                                         ("clang-15", "-O2")])  # fmt: skip
def test_every_atomic_in_every_address_space(clang, level, compile_hip) -> None:
    abi = 4 if clang else 6
    image = compile_hip(ATOMICS, level=level, abi=abi, clang=clang)
    rng = random.Random(4)
    for kind, code in (("u32", "I"), ("i32", "i"), ("u64", "Q"), ("i64", "q"),
                       ("f32", "f"), ("f64", "d")):  # fmt: skip
        bits, integer = int(kind[1:]), kind[0] != "f"

        def wrap(n, kind=kind, bits=bits):
            if kind[0] == "f":
                return n
            n &= (1 << bits) - 1
            return n - (1 << bits) if kind[0] == "i" and n >> bits - 1 else n

        # clang 15 compares floats as integers here.
        least = 0 if clang else -999

        def draw(wrap=wrap, bits=bits, integer=integer, least=least):
            return wrap(rng.getrandbits(bits)) if integer else rng.randrange(least, 999)

        inputs = [draw() for _ in range(LANES)]
        memory = array.array(code, [draw() for _ in range(LANES)])
        before = list(memory)
        out = array.array(code, [0] * (64 * LANES))
        run(image, f"atomics_{kind}", memory, array.array(code, inputs), out)
        for n, x in enumerate(inputs):
            want, last = [], None
            for start in (before[n], wrap(x * 3), wrap(x + x)):
                values, last = operate(start, x, wrap, integer)
                want += values
            got = list(out[64 * n : 64 * n + len(want)])
            assert got == want, f"{kind}, lane {n}"
            assert memory[n] == (last if n % 3 == 0 else wrap(x + x))


# ---- forms of code ------------------------------------------------------------

SWITCH = """
typedef unsigned u32;
GLOBAL void choose(const u32 *in, u32 *o)
{
    u32 x = in[lane()], r = 1;
    for (u32 k = 0; k < (x & 7); k++) {
        switch ((x + k) % 9) {
        case 0: r = r * 3 + x; break;
        case 1: r ^= x / 7; break;
        case 2: r += o[lane()] % 11; break;
        case 3: if (r & 1) { continue; } r <<= 2; break;
        case 5: r = ~r; break;
        case 8: return;
        default: r += k;
        }
        o[lane()] = r;
    }
}
"""


def choose(x: int, memory: int) -> int:
    r = 1
    for k in range(x & 7):
        case = (x + k & M32) % 9
        if case == 0:
            r = r * 3 + x
        elif case == 1:
            r ^= x // 7
        elif case == 2:
            r += memory % 11
        elif case == 3:
            if r & 1:
                continue
            r <<= 2
        elif case == 5:
            r = ~r
        elif case == 8:
            return memory
        else:
            r += k
        r &= M32
        memory = r
    return memory


LONG = ("-mllvm", "-amdgpu-s-branch-bits=4")
SCRATCH = ("-Xclang", "-target-feature", "-Xclang", "+enable-flat-scratch")


@pytest.mark.parametrize("options", [(), LONG, SCRATCH], ids=["", "long", "scratch"])
@pytest.mark.parametrize("level", ["-O0", "-O3"])
@pytest.mark.parametrize("clang", [None, "clang-15"])
def test_branches_near_and_far_lead_the_same_way(
    clang, level, options, compile_hip
) -> None:
    rng = random.Random(5)
    source = array.array("I", [rng.getrandbits(32) for _ in range(LANES)])
    out = array.array("I", [rng.getrandbits(32) for _ in range(LANES)])
    want = [choose(x, m) for x, m in zip(source, out)]
    image = compile_hip(SWITCH, *options, level=level, abi=4, clang=clang)
    if options == LONG:
        assert "s_setpc_b64" in hipsim.disassemble(image)
    run(image, "choose", source, out)
    assert list(out) == want


@pytest.mark.parametrize("clang", [None, "clang-15"])
def test_calls_and_stacks_work_through_scratch_instructions(clang, compile_hip) -> None:
    image = compile_hip(test_compiled.SOURCE, *SCRATCH, level="-O0", abi=4, clang=clang)
    assert "scratch_store_dword" in hipsim.disassemble(image)
    out = array.array("I", [0] * LANES)
    functions = [lambda x: x * 3 + 1, lambda x: x ^ 0x55, lambda x: x >> 2]
    run(image, "pointer_per_lane", out)
    assert list(out) == [functions[i % 3](i) for i in range(LANES)]


OPENCL = """
kernel void mixed(global float4 *o, global const float4 *a, global const uchar4 *b,
                  local float *tile, constant float *c, double k, short2 s)
{
    size_t i = __builtin_amdgcn_workitem_id_x();
    tile[i] = a[i].y * (float)k;
    __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
    __builtin_amdgcn_s_barrier();
    private int own[8];
    for (int n = 0; n < 8; n++) { own[n] = n * (int)b[i].x; }
    generic int *p = own + (b[i].y & 7);
    *p += s.x * s.y;
    float4 r = __builtin_convertvector(b[i], float4) + a[i].wzyx;
    o[i] = r * c[i & 3] + (float4)(tile[63 - i], own[3], (float)(half)a[i].x, 1.0f);
}
"""


@pytest.mark.parametrize("level", ["-O0", "-O3"])
@pytest.mark.parametrize("name", [None, "clang-15"])
def test_opencl_kernels_run(name, level, tmp_path: Path) -> None:
    clang = name or find_clang()
    if clang is None or shutil.which(clang) is None:
        pytest.skip(f"no {name or 'clang with the AMDGPU target'}")
    code, target = tmp_path / "k.cl", tmp_path / "k.co"
    code.write_text("#pragma OPENCL EXTENSION cl_khr_fp16 : enable\n" + OPENCL)
    built = subprocess.run(
        [clang, "-x", "cl", "-cl-std=CL2.0", "-nogpulib", "-Xclang",
         "-finclude-default-header", "-target", "amdgcn-amd-amdhsa", "-mcpu=gfx906",
         "-ffp-contract=off", "-mcode-object-version=4", level, "-o", target, code],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    rng = random.Random(6)
    a = array.array("f", [rng.randrange(-64, 64) / 4 for _ in range(4 * LANES)])
    b = array.array("B", [rng.randrange(64) for _ in range(4 * LANES)])
    c, out = array.array("f", [2, 4, 8, 0.5]), array.array("f", [0] * 4 * LANES)
    with hipsim.Module(target.read_bytes()) as module:
        module.kernel("mixed").launch(
            (1, 1, 1), (LANES, 1, 1),
            [Buffer(out), Buffer(a), Buffer(b), bytes(4), Buffer(c),
             struct.pack("<d", 3.0), struct.pack("<2h", 5, -7)],
            lds=4 * LANES,
        )  # fmt: skip
    for i in range(LANES):
        x, bytes_ = a[4 * i : 4 * i + 4], b[4 * i : 4 * i + 4]
        own = [n * bytes_[0] - 35 * (n == bytes_[1] & 7) for n in range(8)]
        add = [a[4 * (63 - i) + 1] * 3, own[3], x[0], 1.0]
        scaled = [(bytes_[k] + x[3 - k]) * c[i & 3] for k in range(4)]
        assert list(out[4 * i : 4 * i + 4]) == [s + t for s, t in zip(scaled, add)]
