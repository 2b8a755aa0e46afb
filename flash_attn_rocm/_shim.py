"""patch(): our function in the place of F.scaled_dot_product_attention.

The replacement answers what _eligibility.route() lets through and hands every
other call, arguments untouched, to the stock builtin, so that errors and results
are stock's. `torch._C._nn` keeps its attribute: nested tensors know the builtin
by identity.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _grad_check, _ops, _served, _verify
from ._autograd import attention
from ._config import logger
from ._eligibility import reason_of, route
from ._errors import LaunchFailure
from ._features import TENSORS, Features
from ._reason import Reason
from ._record import forget_geometry, keep_geometry, note, reason_of_failure
from ._torch import is_dynamo_compiling, register_builtin, stock_sdpa

NAME = "scaled_dot_product_attention"

original: Callable[..., Tensor] = stock_sdpa

_op: Callable[..., tuple[Tensor, ...]] = _ops.op  # type: ignore[assignment]
_served_op: Callable[..., tuple[Tensor, ...]] = _served.forward_op


def _run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The op, and its result verified if it is this call's turn."""
    made = _op(q, k, v, *rest)
    if _verify.is_due(q):
        features = Features(scale=rest[TENSORS], causal=rest[TENSORS + 3])
        _verify.check_forward(q, k, v, features, made[0])
    return made


class _State:
    """What the process knows; torch.compile guards on `patched`."""

    patched = False
    before = False  # what `patched` was when the first patched() was entered
    inside: list[int]  # threads of the patched() that are entered and not left

    def __init__(self) -> None:
        self.inside = []


_state = _State()
# route()'s without `run` and `attend`, so the stock function's.
_signature = inspect.signature(route)
_signature = _signature.replace(
    parameters=list(_signature.parameters.values())[2:], return_annotation=Tensor
)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    origins: tuple[Tensor, Tensor, Tensor] | None,
    needs_grad: bool,
    leading: tuple[int, ...] | None,
) -> tuple[Tensor]:
    out = attention(q, k, v, features, origins=origins, needs_grad=needs_grad)
    if not is_dynamo_compiling():
        keep_geometry(q, k, features)
    return (out if leading is None else out.view((*leading, *out.shape[2:])),)


def _causal_bias(*args: Any, **kwargs: Any) -> Tensor:
    """Do what CausalBias.__torch_function__ does for the stock function.

    It compares the function with F.scaled_dot_product_attention, which is ours
    now, so the stock function must not be called with such a mask.
    """
    bias_type = sys.modules["torch.nn.attention.bias"].CausalBias
    tensors = _signature.bind(*args, **kwargs).arguments
    others = [tensors[name] for name in ("query", "key", "value")]
    if torch.overrides.has_torch_function(others):
        everyone = (*others, tensors["attn_mask"])
        result: Tensor = torch.overrides.handle_torch_function(
            scaled_dot_product_attention, everyone, *args, **kwargs
        )
        return result
    dispatched: Tensor = bias_type._dispatch(*args, **kwargs)
    return dispatched


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
    if not _state.patched:
        return original(*args, **kwargs)
    if is_dynamo_compiling():  # nothing can be recorded or caught while tracing
        result = route(_served_op, _attend, *args, **kwargs)
        if isinstance(result, Reason):
            return original(*args, **kwargs)
        return result[0]

    forget_geometry()
    detail = ""
    try:
        result = route(_run, _attend, *args, **kwargs)
        if not isinstance(result, Reason):
            return result[0]
        reason = result
    except Exception as error:
        found = reason_of(*args, **kwargs)
        if found is None and not isinstance(error, LaunchFailure):
            raise
        reason = found or Reason.FAILED
        if reason is Reason.FAILED:
            reason, detail = reason_of_failure(error), str(error)
    note(reason, detail)
    if reason is Reason.CAUSAL_BIAS:
        return _causal_bias(*args, **kwargs)
    return original(*args, **kwargs)


scaled_dot_product_attention.__doc__ = original.__doc__
scaled_dot_product_attention.__signature__ = _signature  # type: ignore[attr-defined]

# --------------------------------------------------------------------------
# Installing and removing it

_lock = threading.RLock()


def _is_scannable(name: str, module: Any) -> bool:
    """Whether a module's globals may be exchanged: not torch._C's, not ours."""
    return (
        # Not isinstance: it asks for __class__, which lazy proxies answer.
        issubclass(type(module), ModuleType)
        and not name.startswith("torch._C")
        and not name.startswith("flash_attn_rocm")
    )


# Names under which modules import the function. Under any other name somebody keeps
# it on purpose, to compare with it or to restore it.
_IMPORTED_AS = (NAME, "sdpa")


def _exchange(old: Any, new: Any) -> None:
    """Let the function be `new` in every module that imported it as `old`."""
    for name, module in list(sys.modules.items()):
        if _is_scannable(name, module):
            # Not vars(module): that would make lazy modules load themselves.
            names = object.__getattribute__(module, "__dict__")
            for key in _IMPORTED_AS:
                if names.get(key) is old:
                    names[key] = new


def _describe(function: Any) -> str:
    where = getattr(function, "__module__", "?")
    return f"{where}.{getattr(function, '__qualname__', type(function).__name__)}"


def _set_home(module: str) -> None:
    """Where pickle looks the function up.

    While patched that is torch's own name, so that a pickled model loads in a
    process without this package too; otherwise the name that always exists.
    """
    scaled_dot_product_attention.__module__ = module


def patch(*, check_grads: str | None = None) -> None:
    """Let torch.nn.functional.scaled_dot_product_attention run fused where it can.

    Modules that imported the function earlier are served too. May be repeated;
    one unpatch() undoes any number. Initialises no device.

    Args:
        check_grads: what happens to infinities and NaNs in the float16 gradients of
            fused backwards. "off": nothing; "count": status() tells their number,
            and no backward waits for it; "raise": the backward waits, and raises
            FlashAttnError with the name of the tensor. None keeps what is in force,
            which is "off" until somebody asks. The numbers themselves stay, as
            GradScaler has to see them. Calls inside torch.compile are not checked.

    Raises:
        FlashAttnError: check_grads is something else.

    Notes:
        In every module the global `scaled_dot_product_attention`, or `sdpa`, is
        exchanged if it holds the stock function; copies under other names stay.
        Another library's replacement is left in place, with a warning: calls
        that it passes on are not ours to judge.
    """
    with _lock:
        if check_grads is not None:
            _grad_check.set_mode(check_grads)
        if not hasattr(F, NAME):  # before torch 2.0
            logger.warning("patch: this torch has no F.%s; nothing to replace", NAME)
            return
        current = F.scaled_dot_product_attention
        if _state.patched and current is not original:
            return
        if current is original or current is scaled_dot_product_attention:
            # torch.jit.script knows builtins by identity; make it know this one.
            register_builtin(scaled_dot_product_attention, "aten::" + NAME)
            _exchange(original, scaled_dot_product_attention)
            _set_home(F.__name__)
        else:
            logger.warning(
                "patch: F.%s is already replaced by %s; it is left in place, and "
                "calls reach this package only if it passes them on",
                NAME,
                _describe(current),
            )
        _state.patched = True


def unpatch() -> None:
    """Undo patch(): the same builtin object is back in every place. Repeatable.

    check_grads is "off" again.

    Notes:
        If another library replaced the function after patch(), its replacement
        stays, with a warning; a call that it passes on to us goes to the stock
        function.
    """
    with _lock:
        current = getattr(F, NAME, None)
        if not _state.patched and current is not scaled_dot_product_attention:
            return
        # Without _state.patched: somebody put ours back after an earlier unpatch().
        _state.patched = False
        _grad_check.set_mode("off")
        if current is not scaled_dot_product_attention and current is not original:
            logger.warning(
                "unpatch: F.%s was replaced by %s after patch(); it is left in place",
                NAME,
                _describe(current),
            )
        # Also those that imported our function while it was installed.
        _exchange(scaled_dot_product_attention, original)
        _set_home(__name__)


def is_patched() -> bool:
    """Whether patch() is in force."""
    return _state.patched


@contextmanager
def patched(*, check_grads: str | None = None) -> Iterator[None]:
    """patch() for a with-block; afterwards the state at entry is back.

    Args:
        check_grads: as for patch().

    The function is one for all threads: while another thread is inside such a block
    it stays patched, and the last to leave restores what was before all of them.
    """
    me = threading.get_ident()

    def others_inside() -> bool:
        return any(thread != me for thread in _state.inside)

    with _lock:
        before = _state.before if others_inside() else _state.patched
        if not _state.inside:
            _state.before = before
        _state.inside.append(me)
        mode = _grad_check.mode()
        patch(check_grads=check_grads)
    try:
        yield
    finally:
        with _lock:
            _state.inside.remove(me)
            if before or others_inside():
                patch(check_grads=mode)
            else:
                unpatch()
