"""What operators of older AMD cards report, and what to do about it.

Each symptom: what it usually is, and steps that tell causes apart, the cheapest first.
The advice is from reports and from how this package works, not from measurements on a
card.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """A report, its usual cause, and what to do."""

    title: str
    cause: str
    steps: tuple[str, ...]


_STOCK = "FLASH_ATTN_ROCM_DEVICE=off: does it stay? Then it is not from this package"

SYMPTOMS = {
    "build-hipstream": Symptom(
        "a build stops at a missing hipStream_t",
        "An extension that includes HIP's headers is compiled without them, or without "
        "__HIP_PLATFORM_AMD__. This package includes none, so the message is another "
        "package's (often a port of flash-attn).",
        (
            "is it ours? `pip install -v` names the file that did not compile",
            "for the other package: torch must be the ROCm build when it is built, "
            "with --no-build-isolation, and ROCM_PATH must lead to hip/hip_runtime.h",
            "flash_attn_rocm has flash_attn's functions, so that package may not be "
            "needed: `from flash_attn_rocm import flash_attn_func`",
        ),
    ),
    "build-launch": Symptom(
        "an undefined hipModuleLaunchKernel at link or import",
        "An extension needs libamdhip64 and the process has none: torch is its CPU or "
        "CUDA build, or another ROCm was linked. This package links no HIP library; it "
        "uses the one that torch has loaded, and says so if there is none.",
        (
            "torch.version.hip must not be None; see the lines torch and hip library",
            "two copies (torch's and /opt/rocm's) must not be mixed: unset "
            "LD_LIBRARY_PATH and LD_PRELOAD that lead to another ROCm",
            "build the other package again, against this torch",
        ),
    ),
    "utilisation": Symptom(
        "compute below 50 % busy while memory bandwidth is above 90 %",
        "Scores of size N x N go through memory: that is stock's math path, no fused "
        "kernel. Decoding (one query at a time) is bound by memory with any kernel.",
        (
            "status()['counters']: which calls fell back, and why; explain(q, k, v) of "
            "such a call says it in a sentence",
            "`flash-attn-rocm profile script.py` in the simulator: what bounds each "
            "kernel, narrow loads and LDS conflicts among it",
            "head dims between two kernels' sizes cost as much as the next wider: "
            "docs/performance.md",
            "rows that are not 16-byte aligned are read in pieces: explain() says",
        ),
    ),
    "variation": Symptom(
        "times vary by 20 % in either direction",
        "Clocks: cards with a power limit of 150 to 225 W leave their top clock under "
        "load, and heat lowers it further. Or the first calls, which load code.",
        (
            "leave out the first 10 calls, time with events, report the median",
            "record clock, power and temperature beside each time (rocm-smi)",
            "`rocm-smi --setperfdeterminism MHZ` or a fixed level takes the clock out",
            "other processes on the card: `rocm-smi --showpids`",
            "times of the simulator are its own; only its counters mean something",
        ),
    ),
    "nan-multi-gpu": Symptom(
        "the loss is NaN with several GPUs, not with one",
        "Copies between cards: wrong results on pairs of MI50 where one card was right "
        "are reported of several programs, also from missing waits between cards.",
        (
            "one GPU, same seed: right? then the kernels are not the cause",
            _STOCK,
            "NCCL_P2P_DISABLE=1 sends copies through host memory: gone? then look at "
            "the board (PCIe ACS, IOMMU: iommu=pt) and at the driver",
            "patch(check_grads='raise') names the first gradient that is not finite",
            "cards of several kinds: unset HSA_OVERRIDE_GFX_VERSION",
        ),
    ),
    "accuracy": Symptom(
        "the model's accuracy is below what it was",
        "Rarely the attention: fp16 overflow in other layers, wrong code of a ROCm "
        "compiler, or another meaning of a mask.",
        (
            _STOCK,
            "the self-test (below) must pass on the card",
            "FLASH_ATTN_ROCM_VERIFY=1/100 compares one call in 100 with a reference",
            "FLASH_ATTN_ROCM_BF16=strict computes bfloat16 in float32",
            "is_causal with different lengths is top-left in SDPA, bottom-right in "
            "flash_attn_func",
            "models made for bfloat16 may overflow fp16: keep them in bfloat16 or fp32",
        ),
    ),
    "gradient-norm": Symptom(
        "the gradient norm explodes",
        "fp16 gradients overflow, most often without GradScaler or behind a scale that "
        "is too large. Sums are kept in fp32, and under autocast gradients of fp32 "
        "tensors never pass through fp16.",
        (
            "patch(check_grads='count'), then status()['nonfinite_gradients']",
            "GradScaler must see infinities: clip after unscale_(), not before",
            _STOCK,
            "FLASH_ATTN_ROCM_VERIFY=1/100, and the self-test",
        ),
    ),
    "hang": Symptom(
        "it hangs after hours or a day",
        "ROCm has no watchdog for compute and no error code for a time-out: a hung "
        "kernel never returns, a fault aborts the process.",
        (
            "`flash-attn-rocm run -- cmd ...` with FLASH_ATTN_ROCM_ON_HANG=abort: a "
            "missed deadline ends the process, it starts again, and the kernel stays "
            "out of use",
            "`flash-attn-rocm breaker list`: which kernel missed its deadline",
            "dmesg: fence time-out, queue preemption time-out, page fault, GPU reset",
            "py-spy dump: does it wait in attention, or in RCCL for another rank?",
            "memory that grows: torch.cuda.memory_allocated() and the host's, hourly",
            _STOCK,
        ),
    ),
    "heat": Symptom(
        "the card is hot, throttles or switches off",
        "Server cards have no fan of their own and need ducted air. Memory and "
        "junction reach their limits before the edge sensor shows it.",
        (
            "rocm-smi: junction and memory temperature, not only edge",
            "a power limit (`rocm-smi --setpoweroverdrive W`) costs less speed than it "
            "saves heat",
            "pause between steps when the junction is within 10 degrees of its limit",
            "after a reset by heat all processes on the card are lost: see hang",
        ),
    ),
}
