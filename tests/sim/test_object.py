"""The code object loader: what it reads, and what it refuses.

The oracle for numbers is the assembly that the compiler prints for the same
source: another path through the compiler, and text instead of MessagePack.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import random
import re
import struct
import sys
from pathlib import Path

import isa_tools
import pytest

import hipsim

ARCHS = [
    *("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1010"),
    *("gfx1030", "gfx1100", "gfx1151", "gfx1201", "gfx1250"),
]

SOURCE = """
GLOBAL void axpy(float *out, const float *in, float factor, int count)
{
    int i = index();
    if (i < count) { out[i] += factor * in[i]; }
}
SHARED float tile[100];
GLOBAL void __attribute__((amdgpu_flat_work_group_size(1, 128)))
turn(float *out)
{
    tile[lane()] = out[lane()];
    barrier();
    out[lane()] = tile[99 - lane()];
}
"""


def load_error(image: bytes) -> hipsim.HipError:
    with pytest.raises(hipsim.HipError) as caught:
        hipsim.Module(image)
    assert caught.value.report.count("\n") == 0
    return caught.value


def numbers_of_assembly(text: str, key: str) -> list[int]:
    return [int(n) for n in re.findall(rf"^ +{re.escape(key)}: +(\d+)$", text, re.M)]


@pytest.mark.parametrize("abi", [4, 5, 6])
@pytest.mark.parametrize("arch", ARCHS)
def test_info_agrees_with_the_compilers_assembly(compile_hip, arch, abi):
    facts = hipsim.object_info(compile_hip(SOURCE, abi=abi, arch=arch))
    assembly = compile_hip(SOURCE, "-S", abi=abi, arch=arch).decode()

    assert facts["abi"] == abi
    assert facts["arch"] == arch
    assert facts["target"].startswith(f"amdgcn-amd-amdhsa--{arch}")
    kernels = {k["name"]: k for k in facts["kernels"]}
    # The metadata in the assembly lists the kernels in source order.
    ordered = [
        kernels[n]
        for n in re.findall(r"^ +\.name: +(\w+)$", assembly, re.M)
        if n in kernels
    ]
    assert [k["name"] for k in ordered] == ["axpy", "turn"]
    for ours, theirs in {
        "vgprs": ".vgpr_count",
        "sgprs": ".sgpr_count",
        "vgpr_spills": ".vgpr_spill_count",
        "sgpr_spills": ".sgpr_spill_count",
        "lds_bytes": ".group_segment_fixed_size",
        "private_bytes": ".private_segment_fixed_size",
        "kernarg_bytes": ".kernarg_segment_size",
        "max_threads": ".max_flat_workgroup_size",
        "wave_size": ".wavefront_size",
    }.items():
        assert [k[ours] for k in ordered] == numbers_of_assembly(assembly, theirs), ours
    if arch.startswith("gfx9"):  # elsewhere the compiler prints an estimate
        sizes = re.findall(r"^; codeLenInByte = (\d+)", assembly, re.M)
        assert [str(k["code_bytes"]) for k in ordered] == sizes
    explicit = [a for a in kernels["axpy"]["args"] if "hidden" not in a["kind"]]
    assert [(a["offset"], a["size"]) for a in explicit] == [
        (0, 8),
        (8, 8),
        (16, 4),
        (20, 4),
    ]


def test_info_counts_spills(compile_hip):
    source = """
    GLOBAL void __attribute__((amdgpu_num_vgpr(16), amdgpu_num_sgpr(24)))
    spill(float *out, const float *in, int turns)
    {
        float vector[24];
        int scalar[40];
        for (int i = 0; i < 24; i++) { vector[i] = in[index() + 64 * i]; }
        for (int i = 0; i < 40; i++) { scalar[i] = ((const int *)in)[i]; }
        for (int t = 0; t < turns; t++) {
            for (int i = 0; i < 24; i++) { vector[i] *= vector[(i + 1) % 24]; }
            for (int i = 0; i < 40; i++) { scalar[i] += scalar[(i + 1) % 40] ^ t; }
        }
        for (int i = 0; i < 24; i++) { out[index() + 64 * i] = vector[i]; }
        for (int i = 0; i < 40; i++) { ((int *)out)[5000 + i] = scalar[i]; }
    }
    """
    kernel = hipsim.object_info(compile_hip(source))["kernels"][0]
    assembly = compile_hip(source, "-S").decode()
    for ours, theirs in {
        "vgpr_spills": ".vgpr_spill_count",
        "sgpr_spills": ".sgpr_spill_count",
        "private_bytes": ".private_segment_fixed_size",
    }.items():
        assert [kernel[ours]] == numbers_of_assembly(assembly, theirs)
        assert kernel[ours] > 0
    assert kernel["vgpr_spills"] != kernel["sgpr_spills"]


def test_bundle_gives_its_gfx906_entry(compile_hip):
    other = compile_hip(SOURCE, arch="gfx1100")
    general = compile_hip(SOURCE, arch="gfx906")
    exact = compile_hip(SOURCE)
    triple = "hipv4-amdgcn-amd-amdhsa--"
    bundle = make_bundle(
        [
            ("host-x86_64-unknown-linux-gnu-", b""),
            (triple + "gfx1100", other),
            (triple + "gfx906", general),
            (triple + "gfx906:sramecc+:xnack-", exact),
            (triple + "gfx906:sramecc-:xnack-", b"not this one"),
            (triple + "gfx906:sramecc+:xnack+", b"nor this one"),
        ]
    )
    assert hipsim.object_info(bundle) == hipsim.object_info(exact)
    hipsim.Module(bundle).close()
    opposite = (triple + "gfx906:sramecc-:xnack+", exact)
    general_first = make_bundle([opposite, (triple + "gfx906", general)])
    assert hipsim.object_info(general_first) == hipsim.object_info(general)
    hipsim.Module(make_bundle([("hipv4-amdgcn", other), opposite])).close()


def make_bundle(entries: list[tuple[str, bytes]]) -> bytes:
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries))
    at = len(head) + sum(24 + len(triple) for triple, _ in entries)
    body = b""
    for triple, data in entries:
        head += struct.pack("<QQQ", at + len(body), len(data), len(triple))
        head += triple.encode()
        body += data
    return head + body


def test_bundle_of_the_compiler_is_read(compile_hip):
    bundle = compile_hip(SOURCE, "--gpu-bundle-output")
    assert bundle.startswith(b"__CLANG_OFFLOAD_BUNDLE__")
    assert hipsim.object_info(bundle) == hipsim.object_info(compile_hip(SOURCE))


@pytest.mark.parametrize(
    "entry", ["gfx1100", "gfx1100:xnack-", "gfx9060", "gfx90a", "gfx90a:sramecc+"]
)
def test_bundle_without_a_fitting_entry_is_refused_by_name(compile_hip, entry):
    bundle = make_bundle([("hipv4-amdgcn-amd-amdhsa--" + entry, compile_hip(SOURCE))])
    error = load_error(bundle)
    assert error.name == "hipErrorNoBinaryForGpu"
    assert "no entry for gfx906," in error.report and entry in error.report


@pytest.mark.parametrize(
    ("arch", "named"),
    [
        ("gfx1100", "gfx1100"),
        ("gfx90a", "gfx90a"),
        ("gfx908:sramecc+:xnack-", "gfx908"),
    ],
)
def test_other_architectures_are_refused_by_name(compile_hip, arch, named):
    error = load_error(compile_hip(SOURCE, arch=arch))
    assert error.name == "hipErrorNoBinaryForGpu"
    assert named in error.report and "gfx906" in error.report


def test_code_for_every_gfx9_card_runs(compile_hip):
    image = compile_hip(SOURCE, abi=6, arch="gfx9-generic")
    out = bytearray(struct.pack("4f", 1, 2, 3, 4))
    source = bytearray(struct.pack("4f", 5, 6, 7, 8))
    with hipsim.Module(image) as module:
        module.kernel("axpy").launch(
            (1, 1, 1),
            (64, 1, 1),
            [
                *(hipsim.Buffer(out, "rw"), hipsim.Buffer(source, "r")),
                *(struct.pack("f", 2), struct.pack("i", 4)),
            ],
        )
    assert struct.unpack("4f", out) == (11, 14, 17, 20)


@pytest.mark.parametrize("features", ["", ":sramecc-", ":xnack+", ":sramecc-:xnack+"])
def test_gfx906_runs_whatever_features_it_was_built_for(compile_hip, features):
    image = compile_hip(SOURCE, arch="gfx906" + features)
    assert hipsim.object_info(image)["target"].endswith("gfx906" + features)
    data = bytearray(struct.pack("<100f", *range(100)))
    with hipsim.Module(image) as module:
        module.kernel("turn").launch((1, 1, 1), (100, 1, 1), [hipsim.Buffer(data)])
    out = struct.unpack("<100f", data)
    assert list(out) == list(range(99, -1, -1))


def test_kernels_of_all_linked_files_are_found():
    first = isa_tools.kernel_source("    s_endpgm", pointers=0)
    second = isa_tools.kernel_source("    s_endpgm", pointers=1, lds=64)
    second = re.sub(r"\bkernel\b", "second", second)
    image = isa_tools.link(first, second)  # a note from each
    facts = {k["name"]: k for k in hipsim.object_info(image)["kernels"]}
    assert sorted(facts) == ["kernel", "second"]
    assert [len(facts[k]["args"]) for k in ("kernel", "second")] == [0, 1]
    with hipsim.Module(image) as module:
        module.kernel("kernel").launch((1, 1, 1), (64, 1, 1), [])
        buffer = hipsim.Buffer(bytearray(8))
        module.kernel("second").launch((1, 1, 1), (64, 1, 1), [buffer])


def patched(image: bytes, offset: int, data: bytes) -> bytes:
    return image[:offset] + data + image[offset + len(data) :]


@pytest.mark.parametrize(
    ("offset", "data", "words"),
    [
        (0, b"\x7fELG", "ELF"),
        (4, b"\x01", "64-bit"),
        (7, b"\x03", "OS/ABI"),
        (8, b"\x01", "version byte 1"),
        (8, b"\x09", "version byte 9"),
        (18, b"\x3e\x00", "machine 0x3e"),
        (32, b"\xff" * 8, "program header"),
        (40, b"\xff" * 8, "section header"),
        (54, b"\x10\x00", "header sizes"),
        (56, b"\x00\x00", "no loadable segment"),
    ],
)
def test_corrupt_headers_are_refused_with_the_reason(compile_hip, offset, data, words):
    error = load_error(patched(compile_hip(SOURCE), offset, data))
    assert error.name == "hipErrorInvalidImage"
    assert words in error.report


@pytest.mark.parametrize(
    "field", [8, 16, 32, 40], ids=["offset", "addr", "file", "mem"]
)
def test_huge_segments_are_refused(compile_hip, field):
    image = compile_hip(SOURCE)
    headers = struct.unpack_from("<Q", image, 32)[0]
    second = headers + 2 * 56  # PHDR, then the first LOAD, then the text
    for value in (2**64 - 1, 2**63, 2**40):
        error = load_error(patched(image, second + field, struct.pack("<Q", value)))
        assert error.name == "hipErrorInvalidImage"


def test_empty_and_foreign_files_are_refused():
    for image in (b"", b"\x7fELF", b"hello, world" * 100, bytes(5000), b"CCOB" * 9):
        assert load_error(image).name == "hipErrorInvalidImage"


def test_every_truncation_is_refused_or_harmless(compile_hip):
    image = compile_hip(SOURCE)
    loaded = 0
    for size in range(0, len(image), 7):
        try:
            hipsim.object_info(image[:size])
            loaded += 1
        except hipsim.HipError as error:
            assert error.name == "hipErrorInvalidImage"
    # The section headers are at the end of the file and are needed.
    assert loaded == 0


def test_random_damage_never_crashes(compile_hip):
    random_source = random.Random(906)
    images = [compile_hip(SOURCE, abi=abi) for abi in (4, 6)]
    images.append(make_bundle([("hipv4-amdgcn-amd-amdhsa--gfx906", images[0])]))
    outcomes = set()
    for _ in range(1500):
        image = bytearray(random_source.choice(images))
        for _ in range(random_source.randrange(1, 6)):
            at = random_source.randrange(len(image))
            if random_source.random() < 0.5:
                at %= 0x240  # the headers
            width = random_source.choice((1, 1, 4, 8))
            value = random_source.choice((random_source.getrandbits(64), 2**64 - 1))
            image[at : at + width] = value.to_bytes(8, "little")[:width]
        try:
            hipsim.object_info(bytes(image))
            hipsim.Module(bytes(image)).close()
            outcomes.add("hipSuccess")
        except hipsim.HipError as error:
            outcomes.add(error.name)
    assert outcomes == {
        "hipSuccess",
        "hipErrorInvalidImage",
        "hipErrorNoBinaryForGpu",
    }


DAMAGE = """
import collections, sys
import hipsim

image = open(sys.argv[1], "rb").read()
hipsim.set_option("budget", 1000)
hipsim.set_option("threads", 1)
memory = hipsim.Buffer(bytearray(4096))
outcomes = collections.Counter()

def use(data):
    try:
        hipsim.disassemble(data, lines=True)
        with hipsim.Module(data) as module:
            for name, facts in module._facts.items():
                sizes = [a["size"] for a in facts["args"]
                         if not a["kind"].startswith("hidden_")]
                arguments = [memory if n == 8 else bytes(n) for n in sizes]
                module.kernel(name).launch((2, 1, 1), (64, 1, 1), arguments)
        return "fine"
    except hipsim.HipError as error:
        assert error.report and error.report.count("\\n") == 0, error.report
        return error.name

if sys.argv[2] == "truncate":
    for size in range(len(image)):
        outcomes[use(image[:size])] += 1
else:
    for bit in range(8 * len(image)):
        data = bytearray(image)
        data[bit // 8] ^= 1 << bit % 8
        outcomes[use(bytes(data))] += 1
print(sorted(outcomes))
print(sum(outcomes.values()))
"""


@pytest.fixture(scope="module")
def small_object(tmp_path_factory):
    """A kernel that loads, adds and stores, with lines; as small as can be."""
    body = """
    .file 1 "k.s"
    .loc 1 1
    s_load_dwordx2 s[0:1], s[4:5], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    .loc 1 2
    global_load_dword v2, v1, s[0:1]
    s_waitcnt vmcnt(0)
    ds_write_b32 v1, v2
    global_store_dword v1, v2, s[0:1]
    s_endpgm"""
    path = tmp_path_factory.mktemp("small") / "small.co"
    path.write_bytes(isa_tools.assemble(body, pointers=1, lds=256, vgprs=4))
    return path


def test_every_single_truncation_is_refused(run_script, small_object):
    result = run_script(DAMAGE, small_object, "truncate")
    assert result.returncode == 0, result.stderr
    size = small_object.stat().st_size
    assert result.stdout == f"['hipErrorInvalidImage']\n{size}\n"


def test_every_single_bit_flip_is_harmless_or_an_error(run_script, small_object):
    result = run_script(DAMAGE, small_object, "flip", timeout=300)
    assert result.returncode == 0, result.stderr
    names, count = result.stdout.splitlines()
    assert count == str(8 * small_object.stat().st_size)
    for name in ("fine", "InvalidImage", "NoBinaryForGpu", "IllegalAddress"):
        assert name in names
    assert "Unknown" not in names


def test_two_kernels_of_one_name_are_refused():
    sources = [isa_tools.kernel_source("    s_endpgm", pointers=0) for _ in range(2)]
    image = isa_tools.link(sources[0], re.sub(r"\bkernel\b", "kernal", sources[1]))
    error = load_error(patched(image, image.index(b"kernal.kd\0"), b"kernel.kd"))
    assert error.name == "hipErrorInvalidImage"
    assert "kernel is there twice" in error.report


def test_programs_of_the_host_are_refused_by_their_machine():
    for path in (sys.executable, hipsim.library_path()):
        error = load_error(Path(path).read_bytes())
        assert error.name == "hipErrorInvalidImage"
        assert "expected 0xe0 (AMDGPU)" in error.report


def test_unknown_kernel_is_not_found(compile_hip):
    with hipsim.Module(compile_hip(SOURCE)) as module:
        with pytest.raises(hipsim.HipError, match="axpi") as caught:
            module.kernel("axpi")
    assert caught.value.name == "hipErrorNotFound"
