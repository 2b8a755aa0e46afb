"""The environment, read once at import. Nothing else in the package acts on it.

What `doctor` reports, and what children inherit, is the environment as it is then. A
malformed value gives one warning and the documented default:

    FLASH_ATTN_ROCM_DEVICE    auto | sim | sim:ARCH | standin | off      auto
    FLASH_ATTN_ROCM_CODE_DIR  folder of code objects     _code in this package
    FLASH_ATTN_ROCM_LOG       debug | info | warning | error        not set up
    FLASH_ATTN_ROCM_UNTESTED  1: AMD GPUs run kernels without a self-test    0
    FLASH_ATTN_ROCM_BF16      auto | strict (bfloat16 in fp32 arithmetic)   auto
    FLASH_ATTN_ROCM_FP32      auto | fast | exact (in fp64 arithmetic)      auto
    FLASH_ATTN_ROCM_GUARD     off | async | sync: see docs/degradation.md  async
    FLASH_ATTN_ROCM_DEADLINE_FACTOR    times the estimate of a call           50
    FLASH_ATTN_ROCM_DEADLINE_FLOOR_MS  and not sooner than                  2000
    FLASH_ATTN_ROCM_ON_HANG   report | abort, after a missed deadline     report
    FLASH_ATTN_ROCM_COOLDOWN_S  of a breaker that opened once                 60
    FLASH_ATTN_ROCM_SELFTEST  0: no self-test, so AMD GPUs run no kernels      1
    FLASH_ATTN_ROCM_VERIFY    1/N: check one call in N with torch ops; 0       0
    FLASH_ATTN_ROCM_CACHE_DIR folder of state    flash_attn_rocm in XDG_CACHE_HOME
        An absolute path; no folder above it is writable by all without a sticky bit.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import re
import stat
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
    fp32: str  # "auto", "fast" or "exact"
    guard: str  # "off", "async" or "sync"
    deadline_factor: float
    deadline_floor_ms: float
    on_hang: str  # "report" or "abort"
    cooldown_s: float
    selftest: bool
    verify: int  # one call in so many; 0: none
    cache_dir: str  # "" where there is no home folder: nothing is kept
    cache_dir_given: bool  # the user named it: the simulator's state goes there too
    python_ops: bool  # tests only: register the ops from Python


def _malformed(name: str, value: str, expected: str, default: str) -> None:
    logger.warning(
        "%s%s: expected %s, got %r; using %s", _PREFIX, name, expected, value, default
    )


def _switch(environ: Mapping[str, str], name: str, default: bool = False) -> bool:
    value = environ.get(_PREFIX + name, "").strip()
    if value not in _SWITCH:
        _malformed(name, value, "0 or 1", str(int(default)))
        return default
    return _SWITCH[value] if value else default


def _word(environ: Mapping[str, str], name: str, words: tuple[str, ...]) -> str:
    """One of `words`, of which the first is the default."""
    value = environ.get(_PREFIX + name, "").strip().lower()
    if value and value not in words:
        _malformed(name, value, " or ".join(words), words[0])
        return words[0]
    return value or words[0]


def _number(
    environ: Mapping[str, str], name: str, default: float, positive: bool
) -> float:
    """A finite number, above or at least 0."""
    text = environ.get(_PREFIX + name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and (value > 0 if positive else value >= 0)):
        expected = "a number above 0" if positive else "a number of at least 0"
        _malformed(name, text, expected, f"{default:g}")
        return default
    return value


def _one_in(environ: Mapping[str, str], name: str) -> int:
    """N of "1/N", or 0."""
    text = environ.get(_PREFIX + name, "").strip()
    named = re.fullmatch(r"1\s*/\s*([1-9][0-9]{0,8})", text)
    if named:
        return int(named.group(1))
    if text not in ("", "0", "1"):
        _malformed(name, text, "1/N with a whole N, or 0", "0")
    return int(text == "1")


def _cache_dir(environ: Mapping[str, str]) -> tuple[str, bool]:
    """The folder of state, "" if there is none, and whether the user named it."""
    base = environ.get("XDG_CACHE_HOME", "").strip()
    if not os.path.isabs(base):  # as the specification has it
        base = os.path.join(os.path.expanduser("~"), ".cache")
    # Without a home folder "~" stays as it is: not to be made wherever we happen to be.
    default = os.path.join(base, "flash_attn_rocm") if os.path.isabs(base) else ""

    given = environ.get(_PREFIX + "CACHE_DIR", "").strip()
    path = os.path.expanduser(given)  # "~nobody/x" stays as it is, too
    if not given:
        return default, False
    if not os.path.isabs(path):
        _malformed("CACHE_DIR", given, "an absolute path", default or "none")
        return default, False
    parent = _writable_parent(path)
    if parent is not None:
        expected = (
            "a folder that others cannot exchange (all may write to "
            f"{parent}, which has no sticky bit)"
        )
        _malformed("CACHE_DIR", given, expected, default or "none")
        return default, False
    return os.path.abspath(path), True


def _writable_parent(path: str) -> str | None:
    """The first folder above a path in which anyone may rename what is in it."""
    parent = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    while True:
        with contextlib.suppress(OSError):  # it is to be made, or not ours to see
            mode = os.stat(parent).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return parent
        above = os.path.dirname(parent)
        if above == parent:
            return None
        parent = above


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

    cache_dir, cache_dir_given = _cache_dir(environ)
    return Config(
        device=device,
        sim_arch=arch,
        device_text=text,
        code_dir=code_dir,
        log=log,
        untested=_switch(environ, "UNTESTED"),
        bf16=_word(environ, "BF16", ("auto", "strict")),
        fp32=_word(environ, "FP32", ("auto", "fast", "exact")),
        guard=_word(environ, "GUARD", ("async", "off", "sync")),
        deadline_factor=_number(environ, "DEADLINE_FACTOR", 50.0, True),
        deadline_floor_ms=_number(environ, "DEADLINE_FLOOR_MS", 2000.0, False),
        on_hang=_word(environ, "ON_HANG", ("report", "abort")),
        cooldown_s=_number(environ, "COOLDOWN_S", 60.0, False),
        selftest=_switch(environ, "SELFTEST", True),
        verify=_one_in(environ, "VERIFY"),
        cache_dir=cache_dir,
        cache_dir_given=cache_dir_given,
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
