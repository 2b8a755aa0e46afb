"""Reason codes: why a call ran fused or went to the stock function.

The values are what counters, last_call() and the log show; they stay stable.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from enum import Enum


class Reason(str, Enum):
    """Why an attention call was answered the way it was."""

    FUSED = "fused"
    # Switched off, or not usable at all.
    OFF = "off"  # FLASH_ATTN_ROCM_DEVICE=off
    DISABLED = "disabled"  # disable()
    UNAVAILABLE = "unavailable"  # torch or the extension does not fit
    FLASH_DISABLED = "flash_disabled"  # sdpa_kernel(), enable_flash_sdp(False)
    # Who is asking.
    SUBCLASS = "subclass"  # tensor subclass, torch function mode, fx proxy
    NESTED = "nested"
    CAUSAL_BIAS = "causal_bias"
    FUNCTORCH = "functorch"  # vmap, grad, jvp
    FORWARD_AD = "forward_ad"
    TRACE = "trace"  # torch.jit.trace
    EXPORT = "export"
    # What is asked for.
    ARGUMENT = "argument"  # not understood; the stock function judges it
    MASK = "mask"  # with is_causal, or of a form or dtype that no kernel reads
    DROPOUT = "dropout"  # not a probability below 1
    SCALE = "scale"  # magnitude not below 2^127
    DTYPE = "dtype"
    RANK = "rank"  # not 4-D, and not by views
    SHAPE = "shape"  # batches do not broadcast, or lengths differ
    HEADS = "heads"  # do not broadcast without, or do not divide with, enable_gqa
    HEAD_DIM = "head_dim"  # query's and key's differ, 0, or above the largest kernel
    SIZE = "size"  # above a launch limit
    # Where it should run.
    DEVICE = "device"  # no kernels for this device, or tensors on several
    UNTESTED = "untested"  # an AMD GPU with FLASH_ATTN_ROCM_SELFTEST=0
    CODE_OBJECT = "code_object"  # none for this architecture
    SELFTEST = "selftest"  # an AMD GPU whose self-test did not pass
    # It was tried, now or earlier.
    FAILED = "failed"
    LATE = "late"  # it missed its deadline
    BREAKER = "breaker"  # a kernel of it failed, and rests
    VERIFY = "verify"  # the result was not what torch's math gives
    NONFINITE = "nonfinite"  # NaN or Inf in a call that was to be verified

    def __str__(self) -> str:
        return str(self.value)
