"""Exact fused attention for AMD GPUs under PyTorch, first of all gfx906.

Importing touches no device and replaces nothing; see patch().

SPDX-License-Identifier: BSD-3-Clause
"""

from ._version import TORCH_MIN_TEXT, __version__

try:
    import torch as _torch_package  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        f"flash_attn_rocm needs {TORCH_MIN_TEXT}; install the build that fits your GPU "
        "(for the simulator the CPU build will do)",
        name="torch",
    ) from None

from ._attention import attention
from ._blocks import BlockMask, local_global_blocks, segment_tile_local_blocks
from ._breakdown import breakdown
from ._breakdown_report import BreakdownReport
from ._errors import FlashAttnError
from ._flash_attn import flash_attn_func
from ._guard import configure as configure_guard
from ._guard import disable, enable
from ._guard import reset as reset_breakers
from ._metrics import MetricsServer, serve_metrics
from ._profile import Profile, profile
from ._reason import Reason
from ._rotary import apply_rotary
from ._shim import patch, patched, unpatch
from ._simulate import simulate
from ._status import build_info, explain, last_call, status
from ._switch import Watch, disable_file, disable_signal, watch_floor
from ._varlen import flash_attn_varlen_func

__all__ = [
    "BlockMask",
    "BreakdownReport",
    "FlashAttnError",
    "MetricsServer",
    "Profile",
    "Reason",
    "Watch",
    "__version__",
    "apply_rotary",
    "attention",
    "breakdown",
    "build_info",
    "configure_guard",
    "disable",
    "disable_file",
    "disable_signal",
    "enable",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "last_call",
    "local_global_blocks",
    "patch",
    "patched",
    "profile",
    "reset_breakers",
    "segment_tile_local_blocks",
    "serve_metrics",
    "simulate",
    "status",
    "unpatch",
    "watch_floor",
]
