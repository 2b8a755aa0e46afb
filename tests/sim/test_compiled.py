"""Whole kernels as compilers emit them: levels, ABI versions, two compilers.

One source is built in every configuration; expected values come from Python
integers and exact fractions.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import array
import functools
import random
from fractions import Fraction

import isa_numbers as m
import pytest

import hipsim
from hipsim import Buffer

LANES = 64
M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF

SOURCE = """
#define NOINLINE DEVICE __attribute__((noinline))
#define ADD(p, v, scope) __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, scope)
#define GROUP __HIP_MEMORY_SCOPE_WORKGROUP
#define AGENT __HIP_MEMORY_SCOPE_AGENT
typedef unsigned u32;
typedef unsigned long long u64;

#if __clang_major__ > 20 /* older ones refuse recursion and alloca */
NOINLINE u32 fibonacci(u32 n)
{
    return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}
GLOBAL void recursion(u32 *out) { out[index()] = fibonacci(lane() % 9); }
GLOBAL void variable_array(u32 *out, int n)
{
    u32 *b = (u32 *)__builtin_alloca(n * 4), sum = 0;
    for (int i = 0; i < n; i++) { b[i] = i * index(); }
    for (int i = 0; i < n; i += 3) { sum += b[n - 1 - i]; }
    out[index()] = sum;
}
#endif

NOINLINE u32 triple(u32 x) { return x * 3 + 1; }
NOINLINE u32 flip(u32 x) /* with a frame of its own */
{
    volatile u32 kept[8];
    kept[x & 7] = x ^ 0x55;
    return kept[x & 7];
}
NOINLINE u32 quarter(u32 x) { return x >> 2; }
typedef u32 (*function)(u32);
DEVICE function const table[3] = {triple, flip, quarter};
GLOBAL void pointer_per_lane(u32 *out)
{
    out[index()] = table[lane() % 3](lane());
}
GLOBAL void pointer_per_wave(u32 *out, int k)
{
    function f = k == 0 ? triple : k == 1 ? flip : quarter;
    out[index()] = f(lane());
}

typedef u32 row __attribute__((ext_vector_type(16)));
GLOBAL void vector_index(const u32 *in, u32 *out, int k, int j)
{
    row v;
    for (int i = 0; i < 16; i++) { v[i] = in[i] * lane() + i; }
    v[k & 15] = lane() + 7; /* the same element in every lane */
    u32 sum = v[j & 15] + v[(j + k) & 15];
    v[in[lane()] & 15] = lane(); /* each lane its own */
    out[index()] = sum + 3 * v[in[lane() + 1] & 15];
}

GLOBAL void spin(u32 *flag)
{
    if (lane() < 64) {
        while (__hip_atomic_load(flag, __ATOMIC_ACQUIRE, AGENT) == 0) {
            __builtin_amdgcn_s_sleep(1);
        }
        flag[1] = 7;
    } else if (lane() == 64) {
        __hip_atomic_store(flag, 1u, __ATOMIC_RELEASE, AGENT);
    }
}
GLOBAL void relay(u32 *out) /* each wave waits for the one above it */
{
    static SHARED u32 turn, sum;
    u32 wave = lane() / 64, waves = __builtin_amdgcn_workgroup_size_x() / 64;
    if (lane() == 0) { turn = waves; sum = 5; }
    barrier();
    while (__hip_atomic_load(&turn, __ATOMIC_ACQUIRE, GROUP) != wave + 1) { }
    if (lane() % 64 == 0) {
        sum = sum * 3 + wave;
        __hip_atomic_store(&turn, wave, __ATOMIC_RELEASE, GROUP);
    }
    barrier();
    out[lane()] = sum;
}

GLOBAL void divide_f32(const float *a, const float *b, float *out)
{
    out[index()] = a[index()] / b[index()];
}
GLOBAL void divide_f64(const double *a, const double *b, double *out)
{
    out[index()] = a[index()] / b[index()];
}
GLOBAL void divide_i64(const long *a, const long *b, long *out)
{
    long x = a[index()], y = b[index()], *o = out + 4 * index();
    o[0] = x / y;
    o[1] = x % y;
    o[2] = (u64)x / (u64)y;
    o[3] = (u64)x % (u64)y;
}

GLOBAL void add_f32(const float *in, float *out) /* a compare-and-swap loop */
{
    __atomic_fetch_add(&out[index() % 7], in[index()], __ATOMIC_RELAXED);
}
GLOBAL void lds_atomics(u32 *out, u64 *wide)
{
    static SHARED u32 bins[16];
    static SHARED u64 ends[2];
    u32 t = lane();
    if (t < 16) { bins[t] = 0; }
    if (t < 2) { ends[t] = 0 - (u64)t; }
    barrier();
    ADD(&bins[t * 7 % 16], t, GROUP);
    __hip_atomic_fetch_max(&ends[0], t * 0x123456789ull, __ATOMIC_RELAXED, GROUP);
    __hip_atomic_fetch_min(&ends[1], (t + 1) * 0x987654321ull, __ATOMIC_RELAXED,
                           GROUP);
    barrier();
    if (t < 16) { ADD(&out[t], bins[t], AGENT); }
    if (t < 2) { wide[t] = ends[t]; }
}

NOINLINE u32 change(u32 *p)
{
    u32 old = *p;
    *p = old * 2;
    ((unsigned char *)p)[1] ^= 0x40;
    ((unsigned short *)p)[1] += 3;
    return old;
}
GLOBAL void flat(u32 *memory, u32 *out)
{
    static SHARED u32 tile[64];
    u32 own[64]; /* too large for compilers that move arrays to LDS */
    own[0] = lane() * 7;
    own[1] = 0;
    tile[lane()] = lane() * 5;
    barrier();
    u32 *p = lane() % 3 == 0   ? &tile[lane() ^ 1]
             : lane() % 3 == 1 ? own + (lane() & 1)
                               : &memory[lane()];
    u32 old = change(p);
    out[lane()] = old + *p + 1000 * __builtin_amdgcn_is_shared(p) +
                  2000 * __builtin_amdgcn_is_private(p);
}

GLOBAL void leave(u32 *out) /* 3 of 4 waves, and half of the lanes */
{
    static SHARED u32 tile[64];
    if (lane() >= 64 || lane() % 2 == 1) { return; }
    tile[lane()] = lane();
    barrier();
    out[lane()] = tile[62 - lane()];
}

#define DPP(x, control, rows)                                              \\
    __builtin_amdgcn_update_dpp(0, (int)(x), control, rows, 0xf, false)
GLOBAL void sums(const u32 *in, u32 *out)
{
    u32 x = in[lane()], a = x, b = x, c = x;
    for (int k = 1; k < 64; k *= 2) {
        a += __builtin_amdgcn_ds_bpermute(4 * (lane() ^ k), a);
    }
    b += __builtin_amdgcn_ds_swizzle(b, 0x041f); /* lane ^ 1, 2, ... 16 */
    b += __builtin_amdgcn_ds_swizzle(b, 0x081f);
    b += __builtin_amdgcn_ds_swizzle(b, 0x101f);
    b += __builtin_amdgcn_ds_swizzle(b, 0x201f);
    b += __builtin_amdgcn_ds_swizzle(b, 0x401f);
    b = __builtin_amdgcn_readlane(b, 0) + __builtin_amdgcn_readlane(b, 32);
    c += DPP(c, 0x111, 0xf); /* row_shr 1, 2, 4, 8: sums up to each lane */
    c += DPP(c, 0x112, 0xf);
    c += DPP(c, 0x114, 0xf);
    c += DPP(c, 0x118, 0xf);
    c += DPP(c, 0x142, 0xa); /* row_bcast 15, 31 */
    c += DPP(c, 0x143, 0xc);
    out[lane()] = a;
    out[64 + lane()] = b;
    out[128 + lane()] = c;
}

GLOBAL void breakpoint(u32 *out)
{
    out[index()] = 1;
    __builtin_debugtrap();
    out[index()] = 2;
}
"""

CONFIGURATIONS = [
    *((None, level, abi) for level in ("-O0", "-O1", "-O3") for abi in (4, 5, 6)),
    *(("clang-15", level, 4) for level in ("-O0", "-O1", "-O3")),
]


@pytest.fixture(
    params=CONFIGURATIONS, ids=lambda c: f"{c[0] or 'newest'}{c[1]}-v{c[2]}"
)
def launch(request, compile_hip, option):
    """launch(kernel, grid, block, arguments); integers are passed as int.

    At check level 2: compilers' code must give no finding.
    """
    clang, level, abi = request.param
    option("check", 2)
    image = compile_hip(SOURCE, level=level, abi=abi, clang=clang)
    option("budget", 20_000_000)
    with hipsim.Module(image) as module:

        def call(name: str, grid: int, block: int, *arguments) -> None:
            if name not in [k["name"] for k in hipsim.object_info(image)["kernels"]]:
                pytest.skip("this compiler cannot build it")
            packed = [
                a.to_bytes(4, "little") if isinstance(a, int) else Buffer(a)
                for a in arguments
            ]
            module.kernel(name).launch((grid, 1, 1), (block, 1, 1), packed)

        yield call


def words(values) -> array.array:
    return array.array("I", values)


def zeros(count: int) -> array.array:
    return words([0] * count)


# ---- calls, stacks, indices ---------------------------------------------------


def test_recursion_has_a_stack(launch):
    out = zeros(2 * LANES)
    launch("recursion", 2, LANES, out)
    fibonacci = [0, 1, 1, 2, 3, 5, 8, 13, 21]
    assert list(out) == [fibonacci[i % 9] for i in range(LANES)] * 2


def test_alloca_has_a_stack(launch):
    out = zeros(LANES)
    launch("variable_array", 1, LANES, out, 100)
    assert list(out) == [g * sum(range(0, 100, 3)) for g in range(LANES)]


def test_function_pointers_are_called_lane_by_lane_and_together(launch):
    functions = [lambda x: x * 3 + 1, lambda x: x ^ 0x55, lambda x: x >> 2]
    out = zeros(LANES)
    launch("pointer_per_lane", 1, LANES, out)
    assert list(out) == [functions[i % 3](i) for i in range(LANES)]
    for k, function in enumerate(functions):
        launch("pointer_per_wave", 1, LANES, out, k)
        assert list(out) == [function(i) for i in range(LANES)]


@pytest.mark.parametrize(("k", "j"), [(0, 0), (3, 5), (15, 15), (7, 12)])
def test_vector_elements_are_found_by_a_variable_index(launch, k, j):
    rng = random.Random(k)
    source = words(rng.randrange(99) for _ in range(LANES + 1))
    out = zeros(LANES)
    launch("vector_index", 1, LANES, source, out, k, j)
    for g in range(LANES):
        v = [source[i] * g + i for i in range(16)]
        v[k] = g + 7
        want = v[j] + v[(j + k) & 15]
        v[source[g] & 15] = g
        assert out[g] == want + 3 * v[source[g + 1] & 15], f"lane {g}"


# ---- waves and memory ---------------------------------------------------------


def test_a_wave_may_spin_on_a_flag_of_a_later_wave(launch):
    flag = zeros(2)
    launch("spin", 1, 128, flag)
    assert list(flag) == [1, 7]


def test_waves_hand_a_turn_down_between_barriers(launch, option):
    option("check", 1)  # a flag in LDS looks like a race
    out = zeros(256)
    launch("relay", 1, 256, out)
    want = (((5 * 3 + 3) * 3 + 2) * 3 + 1) * 3
    assert list(out) == [want] * 256


def test_lanes_and_waves_may_leave_before_a_barrier(launch):
    out = words([9] * LANES)
    launch("leave", 1, 256, out)
    assert list(out) == [62 - i if i % 2 == 0 else 9 for i in range(LANES)]


def test_float_adds_by_compare_and_swap_all_arrive(launch):
    rng = random.Random(3)
    source = array.array("f", [rng.randrange(100) for _ in range(4 * LANES)])
    out = array.array("f", [0.5] * 7)
    launch("add_f32", 2, 128, source, out)
    assert list(out) == [0.5 + sum(source[i::7]) for i in range(7)]


def test_lds_atomics_meet_in_one_place(launch):
    out, wide = zeros(16), array.array("Q", [0, 0])
    launch("lds_atomics", 1, 192, out, wide)
    bins = [sum(t for t in range(192) if t * 7 % 16 == i) for i in range(16)]
    assert list(out) == bins
    assert list(wide) == [191 * 0x123456789, 0x987654321]


def test_one_pointer_reaches_lds_scratch_and_global_memory(launch):
    rng = random.Random(4)
    memory = words(rng.getrandbits(32) for _ in range(LANES))
    before, out = list(memory), zeros(LANES)
    launch("flat", 1, LANES, memory, out)
    for i in range(LANES):
        place = i % 3
        old = ((i ^ 1) * 5, (i * 7, 0)[i & 1], before[i])[place]
        new = (2 * old & M32) ^ 0x4000
        new = new & 0xFFFF | ((new >> 16) + 3 & 0xFFFF) << 16
        assert out[i] == (old + new + (1000, 2000, 0)[place]) & M32, f"lane {i}"
        assert memory[i] == (new if place == 2 else before[i])


def test_reductions_over_the_wave_sum_all_lanes(launch):
    rng = random.Random(5)
    source = words(rng.getrandbits(32) for _ in range(LANES))
    out = zeros(3 * LANES)
    launch("sums", 1, LANES, source, out)
    total = sum(source) & M32
    assert list(out[:LANES]) == [total] * LANES  # ds_bpermute
    assert list(out[LANES : 2 * LANES]) == [total] * LANES  # ds_swizzle
    prefix = [sum(source[: i + 1]) & M32 for i in range(LANES)]
    assert list(out[2 * LANES :]) == prefix  # DPP


def test_debugtrap_without_a_debugger_does_nothing(launch):
    out = zeros(LANES)
    launch("breakpoint", 1, LANES, out)
    assert list(out) == [2] * LANES


# ---- division -----------------------------------------------------------------


@functools.cache
def quotients(kind: str) -> list[tuple[int, int, int]]:
    """(a, b, a / b) as bits: every pair of specials, random, and denormal
    quotients next to the middle of two numbers, where rounding twice shows."""
    _, _, bits, mantissa, bias = m.FORMATS[kind]
    rng = random.Random(kind)
    one, top = bias << mantissa, m.infinity(kind, False)
    special = [0, 1, (1 << mantissa) - 1, 1 << mantissa, one - 1, one, 3 * one // 2]
    special += [top - 1, top, top + 1]
    special += [x | 1 << (bits - 1) for x in special]
    pairs = [(a, b) for a in special for b in special]
    pairs += [(rng.getrandbits(bits), rng.getrandbits(bits)) for _ in range(256)]
    for _ in range(256 + -len(pairs) % LANES):
        steps = 2 * rng.getrandbits(rng.randrange(1, mantissa + 1)) + 1
        middle = Fraction(steps, 1 << (bias + mantissa))
        field = rng.randrange(bias + bias // 2, 2 * bias)
        b = field << mantissa | rng.getrandbits(mantissa)
        a = m.round_fraction(middle * Fraction(m.to_float(b, kind)), kind)
        pairs.append((a + rng.choice((-1, 0, 0, 1)), b))
    return [(a, b, m.divide(a, b, kind)) for a, b in pairs]


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_quotients_are_rounded_once_from_the_exact_value(launch, kind):
    rows = quotients(kind)
    code = {"f32": "I", "f64": "Q"}[kind]
    a, b = (array.array(code, [row[i] for row in rows]) for i in range(2))
    out = array.array(code, [0] * len(rows))
    launch(f"divide_{kind}", len(rows) // LANES, LANES, a, b, out)
    for (x, y, want), got in zip(rows, out):
        if m.is_nan(want, kind):
            assert m.is_nan(got, kind), f"{x:#x} / {y:#x}: {got:#x}"
        else:
            assert got == want, f"{x:#x} / {y:#x}: expected {want:#x}, got {got:#x}"


def test_64_bit_division_is_exact(launch):
    rng = random.Random(6)
    special = [1, -1, 7, -7, 2**32, 2**32 - 1, -(2**32), 2**63 - 1, -(2**63) + 1]
    pairs = [(x, y) for x in special for y in special]
    while len(pairs) < 192:
        x, y = (rng.getrandbits(64) - 2**63 >> rng.randrange(63) for _ in range(2))
        pairs.append((x, y or 1))
    a, b = (array.array("q", [p[i] for p in pairs]) for i in range(2))
    out = array.array("q", [0] * (4 * len(pairs)))
    launch("divide_i64", 3, LANES, a, b, out)
    for i, (x, y) in enumerate(pairs):
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        wants = [quotient, x - quotient * y, (x & M64) // (y & M64)]
        wants.append((x & M64) % (y & M64))
        got = [n & M64 for n in out[4 * i : 4 * i + 4]]
        assert got == [n & M64 for n in wants], f"{x} / {y}"
