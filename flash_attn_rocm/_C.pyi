"""Types of the extension module; csrc/python says what each function does.

SPDX-License-Identifier: BSD-3-Clause
"""

from typing import Any, Callable

class Error(ValueError): ...

_Four = tuple[int, ...]

# See csrc/python/calls.c.
_Features = tuple[Any, ...] | None

_Plan = tuple[
    str, tuple[int, int, int], str, tuple[tuple[str, tuple[int, int, int]], ...], int
]

def configure(
    code_dir: str,
    sim_library: str,
    mode: str,
    sim_arch: Callable[[], str | None],
    bf16: str = "auto",
    fp32: str = "auto",
) -> None: ...
def register_ops() -> bool: ...
def workspace(
    dtype: int,
    q_size: _Four,
    k_size: _Four,
    v_size: _Four,
    wanted: int,
    features: _Features = None,
) -> int: ...
def forward(
    device_type: int,
    device_index: int,
    stream: int,
    arch: str | None,
    dtype: int,
    q_ptr: int,
    k_ptr: int,
    v_ptr: int,
    out_ptr: int,
    lse_ptr: int,
    out_lo_ptr: int,
    workspace_ptr: int,
    workspace_bytes: int,
    q_size: _Four,
    q_stride: _Four,
    k_size: _Four,
    k_stride: _Four,
    v_size: _Four,
    v_stride: _Four,
    out_stride: _Four,
    scale: float,
    causal: int,
    features: _Features = None,
) -> None: ...
def backward(
    device_type: int,
    device_index: int,
    stream: int,
    arch: str | None,
    dtype: int,
    grads_fp32: bool,
    wanted: int,
    q_ptr: int,
    k_ptr: int,
    v_ptr: int,
    out_ptr: int,
    lse_ptr: int,
    out_lo_ptr: int,
    dout_ptr: int,
    dlse_ptr: int,
    dq_ptr: int,
    dk_ptr: int,
    dv_ptr: int,
    workspace_ptr: int,
    workspace_bytes: int,
    q_size: _Four,
    q_stride: _Four,
    k_size: _Four,
    k_stride: _Four,
    v_size: _Four,
    v_stride: _Four,
    out_stride: _Four,
    dout_stride: _Four,
    dlse_stride: _Four,
    dq_stride: _Four,
    dk_stride: _Four,
    dv_stride: _Four,
    scale: float,
    causal: int,
    features: _Features = None,
    dbias_ptr: int = 0,
    dsink_ptr: int = 0,
) -> None: ...
def rotary(
    device_type: int,
    device_index: int,
    stream: int,
    arch: str | None,
    dtype: int,
    table_dtype: int,
    q_ptr: int,
    k_ptr: int,
    cos_ptr: int,
    sin_ptr: int,
    out_q_ptr: int,
    out_k_ptr: int,
    q_size: _Four,
    q_stride: _Four,
    k_size: _Four,
    k_stride: _Four,
    cos_size: _Four,
    cos_stride: _Four,
    sin_size: _Four,
    sin_stride: _Four,
    out_q_stride: _Four,
    out_k_stride: _Four,
    interleaved: bool,
    inverse: bool,
) -> None: ...
def load(
    device_type: int, device_index: int, arch: str | None, dtype: int | None = None
) -> None: ...
def plan(
    dtype: int,
    q_align: int,
    k_align: int,
    v_align: int,
    q_size: _Four,
    q_stride: _Four,
    k_size: _Four,
    k_stride: _Four,
    v_size: _Four,
    v_stride: _Four,
    scale: float,
    causal: int,
    wanted: int = 0,
    grads_fp32: bool = False,
    features: _Features = None,
) -> _Plan: ...
def last_call() -> tuple[str, str, str, str, int, int] | None: ...
def record_fallback(reason: str) -> None: ...
def counters() -> dict[str, Any]: ...
def reset_counters() -> None: ...
def build_info() -> dict[str, Any]: ...
def variants() -> list[dict[str, Any]]: ...
def guard(
    mode: str,
    factor: float,
    floor_ms: float,
    cooldown_s: float,
    abort_on_hang: bool,
    dir: str | None,
    dir_else: str | None,
) -> None: ...
def guard_stop() -> None: ...
def guard_counts() -> dict[str, int]: ...
def keep(things: Any) -> None: ...
def last_failure() -> str: ...
def breakers() -> list[tuple[str, str, bool, int, float, str]]: ...
def guard_device(device_type: int, device_index: int, arch: str | None) -> None: ...
def breaker_trip(
    device: str, kernel: str, cause: str, cooldown_s: float | None = None
) -> None: ...
def breaker_reset(kernel: str | None) -> None: ...
def latency() -> list[tuple[str, str, int, float, float, float, float]]: ...
def identities() -> list[tuple[str, str]]: ...
def complaints() -> list[tuple[str, str]]: ...
def store_list(
    dir: str,
) -> tuple[list[tuple[str, str, int, int, int, int, str]], int]: ...
def store_reset(dir: str, kernel: str | None = None) -> int: ...
