"""simulate(arch): CPU tensors of this context go to the simulator.

The truth is a context variable, so that tasks and threads do not disturb each
other. torch.compile cannot read one; it reads (and guards on) the thread-local
mirror kept beside it.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ._config import code_objects, config, logger, simulator_path
from ._errors import FlashAttnError
from ._torch import graph_task_id

# What the simulator can execute; it can read code objects of other targets.
EXECUTABLE = ("gfx906",)


def missing_for(arch: str) -> str | None:
    """Why `arch` cannot be simulated here, or None if it can."""
    if arch not in EXECUTABLE:
        known = ", ".join(EXECUTABLE)
        return f"arch: expected one that the simulator executes ({known}), got {arch!r}"
    found = code_objects(config.code_dir)
    if arch not in found:
        there = ", ".join(found) or "none"
        return (
            f"arch: no code object for {arch} in {config.code_dir} (found: {there}); "
            f"build it with `make kernels` in a source tree, or install again with "
            f"FA_ARCHS={arch}"
        )
    library = simulator_path()
    if not os.path.isfile(library):
        return f"simulator library: expected {library or 'the hipsim package'}, missing"
    return None


# With FLASH_ATTN_ROCM_DEVICE=sim every context simulates from the start.
default_missing = missing_for(config.sim_arch) if config.device == "sim" else None
if default_missing is not None:
    logger.warning(
        "FLASH_ATTN_ROCM_DEVICE=%s has no effect: %s",
        config.device_text,
        default_missing,
    )
_default: str | None = (
    config.sim_arch if config.device == "sim" and default_missing is None else None
)
_arch: ContextVar[str | None] = ContextVar("flash_attn_rocm_arch", default=_default)


# Exactly threading.local: Dynamo of torch 2.4 misreads a class derived from it.
_mirror = threading.local()


def _entries() -> list[list[str]]:
    """The simulate() contexts that this thread has entered and not left."""
    entries: list[list[str]] = _mirror.__dict__.setdefault("entries", [])
    return entries


def current_arch() -> str | None:
    """The architecture that CPU tensors of this context are simulated on."""
    return _arch.get()


def traced_arch() -> str | None:
    """current_arch() in a form that torch.compile can trace and guard."""
    arch: str | None = getattr(_mirror, "arch", _default)
    return arch


_last_traced: str | None = None


def note_traced(arch: str) -> None:
    """A call that is simulated on `arch` is being traced."""
    global _last_traced
    _last_traced = arch


def launch_arch() -> str | None:
    """What the CPU kernels of the ops ask for at each launch.

    A compiled graph may run in a context other than the one whose mirror its
    guard saw (interleaved tasks of one thread); it must still find its target.
    And the backward of a compiled graph has no frame of ours that could know the
    architecture of its forward: it takes that of the last trace.
    """
    arch = _arch.get() or traced_arch()
    if arch is None and graph_task_id() != -1:
        arch = _last_traced
    return arch


@contextmanager
def launches_on(arch: str) -> Iterator[None]:
    """Launches of this context go to `arch`, whatever it simulates."""
    token = _arch.set(arch)
    try:
        yield
    finally:
        _arch.reset(token)


@contextmanager
def simulate(arch: str = "gfx906") -> Iterator[None]:
    """Send the CPU tensors of this context to a simulated GPU.

    Args:
        arch: architecture to simulate, for example "gfx906".

    Raises:
        FlashAttnError: the simulator does not execute `arch`, or its code
            object or the simulator itself is missing.

    Notes:
        Holds for this thread or task only, nests, and must be entered outside
        of a torch.compile'd function.
    """
    missing = missing_for(arch)
    if missing is not None:
        raise FlashAttnError(missing)
    before, token = _arch.get(), _arch.set(arch)
    # Interleaved tasks leave in any order, perhaps on another thread: what is left
    # is what those that are still inside asked for.
    inside, entry = _entries(), [arch]
    inside.append(entry)
    _mirror.arch = arch
    mirror = _mirror.__dict__
    try:
        yield
    finally:
        inside[:] = [other for other in inside if other is not entry]
        mirror["arch"] = inside[-1][0] if inside else _default
        try:
            _arch.reset(token)
        except ValueError:  # left in another context than entered: a closed generator
            if _arch.get() == arch:
                _arch.set(before)
