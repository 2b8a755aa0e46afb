"""The parts of torch that are not its documented interface, found once by name.

A torch that lacks one of them (older, newer, or exchanged after this package was
installed) is reported in `missing`; the package then leaves every call to the
stock function instead of guessing.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional

missing: list[str] = []


def never(*_args: Any) -> bool:
    """Stands for a function that this torch does not have."""
    return False


def _find(path: str, default: Any = None) -> Any:
    found: Any = torch
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is not None:
        return found
    if default is None:
        missing.append("torch." + path)
        return never
    return default


# The builtin that torch.nn.functional offers; also what nested tensors compare with.
stock_sdpa = _find("_C._nn.scaled_dot_product_attention")
flash_enabled = _find("_C._get_flash_sdp_enabled")
functorch_active = _find("_C._are_functorch_transforms_active")
is_functorch_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor", never)
get_unwrapped = _find("_C._functorch.get_unwrapped", never)
is_tracing = _find("_C._is_tracing")
is_dynamo_compiling = _find("compiler.is_dynamo_compiling")
is_autocast_enabled = _find("is_autocast_enabled")
get_autocast_dtype = _find("get_autocast_dtype")
has_torch_function = _find("overrides.has_torch_function_variadic")
register_builtin = _find("jit._builtins._register_builtin")
forward_ad = _find("autograd.forward_ad")
# -1 outside of a backward.
graph_task_id = _find("_C._current_graph_task_id", lambda: -1)
# Since 2.7; before, strict export keeps our op in its graph.
is_exporting = _find("compiler.is_exporting", never)

if not isinstance(getattr(forward_ad, "_current_level", None), int):
    missing.append("torch.autograd.forward_ad._current_level")


def traced_functorch_active() -> bool:
    """functorch_active() for a trace."""
    return bool(functorch_active())


def traced_flash_enabled() -> bool:
    """flash_enabled() for a trace; the stock function fixes its choice there too."""
    return bool(flash_enabled())


def traced_exporting() -> bool:
    """is_exporting() for a trace; Dynamo before torch 2.12 answers True in any."""
    return bool(is_exporting())


def constant_in_traces(function: Any) -> None:
    """Let torch.compile call `function` once, while tracing, and keep the result.

    Sets what torch.compiler.assume_constant_result sets; that function would
    import all of Dynamo.
    """
    function._dynamo_marked_constant = True


# Dynamo of torch 2.4 cannot trace the functions themselves.
constant_in_traces(traced_functorch_active)
constant_in_traces(traced_flash_enabled)
constant_in_traces(traced_exporting)
