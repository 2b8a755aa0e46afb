"""breakdown(): where the time of a model's attention layers goes, part by part.

Here is what is measured: which modules are attention layers, the hooks that mark when
their parts begin and end, and the two functions that are exchanged for the time of the
block. What is made of the times is _breakdown_report.py's.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from typing import Any, Callable, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _record, _shim
from ._breakdown_report import ATTENTION, OUTPUT, WHOLE, BreakdownReport, Layer
from ._eligibility import is_causal_bias
from ._errors import FlashAttnError
from ._torch import is_dynamo_compiling

# What children of an attention layer are called, by the part that they compute.
_NAMES = {
    "q": ("q_proj", "query", "q_lin", "to_q", "wq", "q"),
    "k": ("k_proj", "key", "k_lin", "to_k", "wk", "k"),
    "v": ("v_proj", "value", "v_lin", "to_v", "wv", "v"),
    "kv": ("kv_proj", "to_kv", "Wkv", "kv"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "to_qkv", "qkv"),
    OUTPUT: (
        *("o_proj", "out_proj", "c_proj", "out_lin", "to_out", "wo", "dense"),
        *("proj", "out", "o"),
    ),
}
_PART = {name: part for part, names in _NAMES.items() for name in names}
_ENOUGH = ({"qkv"}, {"q", "kv"}, {"q", "k", "v"})
_EXPECTED = "torch.nn.MultiheadAttention, or modules with q_proj, k_proj, v_proj or qkv"

# A time: perf_counter()'s seconds, or an event on the tensor's stream. None: inside of
# a graph capture, where an event would become part of the graph.
Mark = Union[float, "torch.cuda.Event", None]


def _mark(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """The projections of an attention layer by part; {} if it is none."""
    found = {_PART[n]: child for n, child in module.named_children() if n in _PART}
    return found if any(need <= found.keys() for need in _ENOUGH) else {}


class _Frame:
    """One forward of an attention layer that has begun."""

    def __init__(self, module: nn.Module, layer: Layer, device: torch.device) -> None:
        self.module, self.layer, self.device = module, layer, device
        self.start = self.mark()
        self.attends = False
        self.begun: dict[str, Mark] = {}
        self.parts: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)

    def mark(self) -> Mark:
        return _mark(self.device)

    def between(self) -> tuple[Mark, Mark] | None:
        """From the last projection of the inputs to that of the output."""
        inputs = [p for p in self.parts if p != OUTPUT]
        if not inputs or OUTPUT not in self.parts:
            return None
        # Parts are kept in the order in which they first ended.
        return self.parts[inputs[-1]][-1][1], self.parts[OUTPUT][0][0]


class Breakdown:
    """The block of breakdown(model)."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise FlashAttnError(
                f"model: expected a torch.nn.Module, got {type(model).__name__}"
            )
        if hasattr(model, "_orig_mod") or any(
            getattr(module, "_compiled_call_impl", None) for module in model.modules()
        ):
            raise FlashAttnError(
                "model: expected one that is not compiled, as the parts of a compiled "
                f"one cannot be told apart, got {type(model).__name__}"
            )
        self._model = model
        self._report = BreakdownReport(type(model).__name__)
        self._undo: list[Callable[[], object]] = []
        self._used = False
        self._local = threading.local()

    def __enter__(self) -> BreakdownReport:
        if self._used:
            raise FlashAttnError(
                "breakdown: expected a block of its own for each entry, got one that "
                f"was entered before ({self._report.model})"
            )
        with _state.lock:
            if _state.open is not None:
                raise FlashAttnError(
                    "breakdown: expected no other block to be open, got one of "
                    f"{_state.open._report.model} inside of which "
                    f"{self._report.model} would be timed"
                )
            _state.open, self._used = self, True
        try:
            self._install()
        except BaseException:
            self._remove()
            raise
        return self._report

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._remove()
        if error is None:  # otherwise the device may answer nothing but errors
            self._report._settle()

    def _remove(self) -> None:
        while self._undo:
            self._undo.pop()()
        _state.open = None

    # ---- what is installed ---------------------------------------------------

    def _install(self) -> None:
        fast = torch.backends.mha.get_fastpath_enabled()
        stock = False  # whether a layer is torch's own
        for name, module in self._model.named_modules():
            is_mha = isinstance(module, nn.MultiheadAttention)
            children = {} if is_mha else parts_of(module)
            if not is_mha and not children:
                continue
            kind = type(module).__name__
            layer = self._report._add_layer(name or kind, kind)
            if is_mha:
                stock = True
                layer.fast_path = fast and not module.training
            begin = functools.partial(self._begin, layer)
            self._hook(module.register_forward_pre_hook(begin, with_kwargs=True))
            for part, child in children.items():
                start = functools.partial(self._start, module, part)
                end = functools.partial(self._stop, module, part)
                self._hook(child.register_forward_pre_hook(start, with_kwargs=True))
                self._hook(child.register_forward_hook(end))
            self._hook(module.register_forward_hook(self._end))
        if not self._report._layers:
            raise FlashAttnError(
                f"model: expected attention layers ({_EXPECTED}), found none in "
                f"{self._report.model}"
            )
        if stock:
            torch.backends.mha.set_fastpath_enabled(False)
            self._undo.append(lambda: torch.backends.mha.set_fastpath_enabled(fast))
            linear = F.linear
            F.linear = functools.partial(self._linear, linear)
            self._undo.append(lambda: setattr(F, "linear", linear))
        self._exchange_sdpa()

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _exchange_sdpa(self) -> None:
        """Puts the timed function where patch() would put its own."""
        with _shim._lock:
            inner = F.scaled_dot_product_attention
            ours = _shim.scaled_dot_product_attention
            foreign = inner is not ours and inner is not _shim.original
            # Ours also knows whether patch() is in force at the time of a call.
            called = inner if foreign else ours

            def timed(*args: Any, **kwargs: Any) -> Tensor:
                if is_dynamo_compiling():
                    return called(*args, **kwargs)
                return self._sdpa(called, *args, **kwargs)

            timed.__doc__ = _shim.original.__doc__

            def restore() -> None:
                with _shim._lock:
                    _shim._exchange(timed, inner if foreign else _shim.original)
                    if not foreign and _shim.is_patched():
                        _shim.patch()  # again: what it found was the timed function

            self._undo.append(restore)
            _shim._exchange(inner, timed)

    # ---- what happens in a forward -------------------------------------------

    def _stack(self) -> list[_Frame]:
        try:
            stack: list[_Frame] = self._local.stack
        except AttributeError:
            stack = self._local.stack = []
        return stack

    def _frame(self, module: nn.Module | None = None) -> _Frame | None:
        """The innermost layer that runs in this thread, if it is `module`."""
        stack = self._stack()
        if not stack or module not in (None, stack[-1].module):
            return None
        return stack[-1]

    def _begin(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            return
        stack = self._stack()
        for place, frame in enumerate(stack):
            if frame.module is module:  # an exception has ended that one
                del stack[place:]
                break
        tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        first = next(tensors, None)
        device = torch.device("cpu") if first is None else first.device
        stack.append(_Frame(module, layer, device))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        frame = self._frame(module)
        if frame is None:
            return
        self._stack().pop()
        between = None if ATTENTION in frame.parts else frame.between()
        if between is not None:
            frame.parts[ATTENTION].append(between)
            frame.layer.between = True
        frame.parts[WHOLE].append((frame.start, frame.mark()))
        self._report._add(frame.layer, frame.parts)

    def _start(self, owner: nn.Module, part: str, *_: object) -> None:
        frame = self._frame(owner)
        if frame is not None:
            frame.begun[part] = frame.mark()

    def _stop(self, owner: nn.Module, part: str, *_: object) -> None:
        frame = self._frame(owner)
        if frame is not None and part in frame.begun:
            frame.parts[part].append((frame.begun.pop(part), frame.mark()))

    def _sdpa(self, called: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        frame = self._frame()
        if called is _shim.scaled_dot_product_attention and not _shim.is_patched():
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            if is_causal_bias(mask):  # which asks whether F's function is the stock one
                called = _shim._causal_bias
        if frame is None or frame.attends:  # a CausalBias calls the function again
            return called(*args, **kwargs)
        frame.attends = True
        start = frame.mark()
        try:
            out = called(*args, **kwargs)
        finally:
            frame.attends = False
        frame.parts[ATTENTION].append((start, frame.mark()))
        frame.layer.answered[_who_answered()] += 1
        return out

    def _linear(
        self, linear: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        """F.linear; the projections of torch's own layer are calls of it."""
        frame = None if is_dynamo_compiling() else self._frame()
        if frame is None or not isinstance(frame.module, nn.MultiheadAttention):
            return linear(*args, **kwargs)
        weight = kwargs["weight"] if "weight" in kwargs else args[1]
        start = frame.mark()
        out = linear(*args, **kwargs)
        part = _part_of_mha(frame.module, weight)
        frame.parts[part].append((start, frame.mark()))
        return out


def _part_of_mha(module: nn.MultiheadAttention, weight: Tensor) -> str:
    """Which projection has `weight`, a parameter or rows of in_proj_weight."""
    if weight is module.out_proj.weight:
        return OUTPUT
    for part in "qkv":
        if weight is getattr(module, f"{part}_proj_weight"):
            return part
    packed, width = module.in_proj_weight, module.embed_dim
    rows = weight.shape[0] // width
    if rows > 1:
        return "qkv" if rows == 3 else "kv"
    offset = weight.storage_offset() - packed.storage_offset()
    return "qkv"[offset // (width * width) % 3]


def _who_answered() -> str:
    """The backend of the call that was just made, or why it was the stock function."""
    record = _record.last_record() if _shim.is_patched() else None
    if record is None:
        return "stock"
    backend, _, words, *_ = record
    return f"stock ({words})" if backend == "sdpa" else backend


class _State:
    """The block that is open: one for the process, as what is exchanged is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: Breakdown | None = None


_state = _State()


def breakdown(model: nn.Module) -> Breakdown:
    """Time the parts of a model's attention layers inside a with-block.

    Args:
        model: any module with attention layers in it: torch.nn.MultiheadAttention
            (so torch.nn.TransformerEncoderLayer, too), or modules with projections
            named as in Hugging Face's models: q_proj, k_proj, v_proj, or qkv,
            c_attn, ..., and o_proj, out_proj, c_proj, ...

    Returns:
        The BreakdownReport as the block's value: table(), json(), save(), plot().

    Raises:
        FlashAttnError: model is no such module, is compiled, or a block is open
            already; also if a block is entered for a second time.

    Notes:
        Only forwards are timed. On a GPU by events on the current stream, which
        nothing waits for until the report is read; on a CPU by the clock on the wall.
        Attention is F.scaled_dot_product_attention, patched or not, or, in layers
        that do not call it, the time between the projections. torch's inference fast
        path, which does everything in one operation, is off inside the block.
    """
    return Breakdown(model)
