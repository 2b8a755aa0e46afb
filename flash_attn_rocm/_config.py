"""The environment, read once at import. Nothing else in the package reads it.

A malformed value gives one warning and the documented default:

    FLASH_ATTN_ROCM_DEVICE    auto | sim | sim:ARCH | standin | off      auto
    FLASH_ATTN_ROCM_CODE_DIR  folder of code objects     _code in this package
    FLASH_ATTN_ROCM_LOG       debug | info | warning | error        not set up
    FLASH_ATTN_ROCM_UNTESTED  1 lets kernels run on a real AMD GPU           0
    FLASH_ATTN_ROCM_BF16      auto | strict (bfloat16 in fp32 arithmetic)   auto

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

logger = logging.getLogger("flash_attn_rocm")

DEFAULT_ARCH = "gfx906"
_PREFIX = "FLASH_ATTN_ROCM_"
_LEVELS = ("debug", "info", "warning", "error")
_SWITCH = {"": False, "0": False, "1": True}


@dataclass(frozen=True)
class Config:
    """What the environment asked for."""

    device: str  # "auto", "sim", "standin" or "off"
    sim_arch: str  # what device "sim" simulates
    device_text: str  # FLASH_ATTN_ROCM_DEVICE as it was set, for messages
    code_dir: str
    log: str | None
    untested: bool
    bf16: str  # "auto" or "strict"
    python_ops: bool  # tests only: register the ops from Python


def _malformed(name: str, value: str, expected: str, default: str) -> None:
    logger.warning(
        "%s%s: expected %s, got %r; using %s", _PREFIX, name, expected, value, default
    )


def _switch(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(_PREFIX + name, "").strip()
    if value not in _SWITCH:
        _malformed(name, value, "0 or 1", "0")
        return False
    return _SWITCH[value]


def read(environ: Mapping[str, str]) -> Config:
    """Parse the variables of this package out of `environ`."""
    device, arch = "auto", DEFAULT_ARCH
    text = environ.get(_PREFIX + "DEVICE", "").strip()
    value = text.lower()
    named = re.fullmatch(r"sim:(gfx[0-9a-f]{3,4})", value)
    if named:
        device, arch = "sim", named.group(1)
    elif value in ("auto", "sim", "standin", "off"):
        device = value
    elif value:
        expected = "auto, sim, sim:ARCH, standin or off"
        _malformed("DEVICE", text, expected, "auto")
        text = ""

    packaged = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_code")
    code_dir = environ.get(_PREFIX + "CODE_DIR", "").strip() or packaged
    if code_dir != packaged and not os.path.isdir(code_dir):
        _malformed("CODE_DIR", code_dir, "an existing folder", "the packaged one")
        code_dir = packaged

    code_dir = os.path.abspath(code_dir)  # the program may change its folder

    log: str | None = environ.get(_PREFIX + "LOG", "").strip().lower() or None
    if log is not None and log not in _LEVELS:
        _malformed("LOG", log, "one of " + ", ".join(_LEVELS), "no set-up of logging")
        log = None

    bf16 = environ.get(_PREFIX + "BF16", "").strip().lower() or "auto"
    if bf16 not in ("auto", "strict"):
        _malformed("BF16", bf16, "auto or strict", "auto")
        bf16 = "auto"

    return Config(
        device=device,
        sim_arch=arch,
        device_text=text,
        code_dir=code_dir,
        log=log,
        untested=_switch(environ, "UNTESTED"),
        bf16=bf16,
        python_ops=_switch(environ, "PYTHON_OPS"),
    )


def simulator_path() -> str:
    """Where libhipsim.so should be; "" if the hipsim package is not installed."""
    try:
        spec = importlib.util.find_spec("hipsim")
    except (ImportError, ValueError):
        return ""
    if spec is None or not spec.submodule_search_locations:
        return ""
    return os.path.join(next(iter(spec.submodule_search_locations)), "libhipsim.so")


def code_objects(code_dir: str) -> dict[str, list[str]]:
    """Architecture -> names of its code objects, one for each arithmetic."""
    try:
        names = sorted(os.listdir(code_dir))
    except OSError:
        return {}
    found: dict[str, list[str]] = {}
    for name in names:
        match = re.fullmatch(r"fa_(gfx\w+|sm_\d+)_f\d+\.(co|cubin)", name)
        if match:
            found.setdefault(match.group(1), []).append(name)
    return found


def _set_up_logging(level: str | None) -> None:
    """A handler of our own, only when the user asked for a level."""
    if level is None:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("flash_attn_rocm: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


config = read(os.environ)
_set_up_logging(config.log)
