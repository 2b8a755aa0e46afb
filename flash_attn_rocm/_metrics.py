"""serve_metrics(): status() as Prometheus metrics, read anew at each scrape.

Nothing is counted here, and nothing is done between two scrapes. What there is to see
is the table ROWS; docs/monitoring.md has it in words (scripts/metric_table.py), and
monitoring/ the dashboard and the alerts.  Needs prometheus_client, and only here.
Source: the naming rules of prometheus.io/docs/practices/naming.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from http.server import ThreadingHTTPServer
from typing import Any, Callable, NamedTuple

from . import _arguments, _status
from ._errors import FlashAttnError
from ._reason import Reason

PREFIX = "flash_attn_rocm_"
_MISSING = (
    "serve_metrics needs prometheus_client, which is not installed "
    "(pip install prometheus_client)"
)
_SUFFIXES = {"counter": "_total", "info": "_info", "gauge": ""}
_HALF_OPEN, _OPEN = "half_open", "open"

Status = Mapping[str, Any]
Samples = Iterable[tuple[tuple[str, ...], float]]  # values of the labels, and the value


class Row(NamedTuple):
    """A metric: how it is called, what it says, and where status() has it."""

    name: str  # without prefix and without the suffix of its kind
    kind: str  # counter, gauge, info, or summary
    labels: tuple[str, ...]
    text: str
    read: Callable[[Status], Samples]


def _guard(key: str) -> Callable[[Status], Samples]:
    return lambda status: [((), status["guard"][key])]


def _verify(key: str) -> Callable[[Status], Samples]:
    return lambda status: [((), status["verify"][key])]


def _build(status: Status) -> Samples:
    keys = ("version", "torch", "hip", "device", "ops")
    return [(tuple(str(status[key] or "") for key in keys), 1)]


def _guard_modes(status: Status) -> Samples:
    guard = status["guard"]
    return [((guard["mode"], guard["on_hang"]), 1)]


def _calls(status: Status) -> Samples:
    """Forward calls: a backward has kernels of its own, and would count twice."""
    counters = status["counters"]
    fused = sum(n for name, n in counters["fused"].items() if name.startswith("fa_fwd"))
    return [(("fused",), fused), (("sdpa",), sum(counters["fallback"].values()))]


def _kernels(status: Status) -> Samples:
    return [((kernel,), n) for kernel, n in status["counters"]["fused"].items()]


def _fallbacks(status: Status) -> Samples:
    """Every reason from the start: rate() does not see the step to a new series."""
    found = status["counters"]["fallback"]
    known = [reason.value for reason in Reason if reason is not Reason.FUSED]
    names = dict.fromkeys([*known, *found])
    return [((name,), found.get(name, 0)) for name in names]


def _gradients(status: Status) -> Samples:
    return [((name,), n) for name, n in status["nonfinite_gradients"].items()]


def _breakers(status: Status) -> Samples:
    states = [breaker["state"] for breaker in status["breakers"]]
    return [((state,), states.count(state)) for state in (_OPEN, _HALF_OPEN)]


def _breaker_states(status: Status) -> Samples:
    for breaker in status["breakers"]:
        for state in (_OPEN, _HALF_OPEN):
            labels = (breaker["device"], breaker["kernel"], state)
            yield labels, breaker["state"] == state


def _breaker(key: str) -> Callable[[Status], Samples]:
    return lambda status: [
        ((b["device"], b["kernel"]), b[key]) for b in status["breakers"]
    ]


def _durations(status: Status) -> Samples:
    """The samples of a summary; "sum" and "count" stand where a quantile does."""
    parts = (
        ("0.5", "p50_s"),
        ("0.99", "p99_s"),
        ("sum", "seconds"),
        ("count", "calls"),
    )
    for each in status["latency"]:
        for part, key in parts:
            yield (each["device"], each["kernel"], part), each[key]


def _flops(status: Status) -> Samples:
    return [((c["device"], c["kernel"]), c["flops"]) for c in status["latency"]]


_CLASS = ("device", "kernel")
ROWS = (
    Row("build", "info", ("version", "torch", "hip", "device", "ops"),
        "Version of this package, torch and HIP; FLASH_ATTN_ROCM_DEVICE; where the ops "
        "come from.", _build),
    Row("enabled", "gauge", (), "1, or 0 after disable().",
        lambda status: [((), status["enabled"])]),
    Row("patched", "gauge", (), "1 while patch() is in force.",
        lambda status: [((), status["patched"])]),
    Row("calls", "counter", ("backend",),
        "Attention calls (forward), by who answered: fused kernels or stock SDPA.",
        _calls),
    Row("kernel_launches", "counter", ("kernel",),
        "Launches of a kernel, forward and backward.", _kernels),
    Row("fallbacks", "counter", ("reason",),
        "Calls that stock SDPA answered, by reason.", _fallbacks),
    Row("call_duration_seconds", "summary", (*_CLASS, "quantile"),
        "Time of a call class: of a GPU by events before and behind the launches; "
        "quantiles since the start. On device sim: time of the simulator, of no GPU.",
        _durations),
    Row("call_flops", "counter", _CLASS,
        "Floating-point operations of the timed calls.", _flops),
    Row("guard", "info", ("mode", "on_hang"), "FLASH_ATTN_ROCM_GUARD and _ON_HANG.",
        _guard_modes),
    Row("guard_misses", "counter", (), "Calls past their deadline.", _guard("misses")),
    Row("guard_captured_calls", "counter", (),
        "Launches inside a graph capture, which are not watched.", _guard("captured")),
    Row("guard_unwatched_calls", "counter", (),
        "Launches that were not watched for another reason.", _guard("unwatched")),
    Row("guard_outstanding_calls", "gauge", (),
        "Launches that are watched and not known to be over.", _guard("outstanding")),
    Row("guard_quarantined_calls", "gauge", (),
        "Calls whose buffers are kept, as their kernel may still write.",
        _guard("quarantined")),
    Row("guard_deadline_factor", "gauge", (),
        "A call's deadline in units of its estimated time.", _guard("deadline_factor")),
    Row("guard_deadline_floor_seconds", "gauge", (), "The least deadline.",
        lambda status: [((), status["guard"]["deadline_floor_ms"] / 1e3)]),
    Row("guard_cooldown_seconds", "gauge", (),
        "How long a breaker stays open after a first failure.", _guard("cooldown_s")),
    Row("breakers", "gauge", ("state",), "Breakers that are not closed.", _breakers),
    Row("breaker_state", "gauge", (*_CLASS, "state"),
        "1 for the state that a breaker is in; one that is closed has no series.",
        _breaker_states),
    Row("breaker_failures", "gauge", _CLASS, "Failures in a row.",
        _breaker("failures")),
    Row("breaker_retry_seconds", "gauge", _CLASS,
        "Time until the kernel may be tried again.", _breaker("retry_in_s")),
    Row("verify_checked_calls", "counter", (),
        "Calls of which a slice was compared with the reference.", _verify("checked")),
    Row("verify_unchecked_calls", "counter", (),
        "Calls that were due and not compared: no memory, or scores too large.",
        _verify("unchecked")),
    Row("verify_mismatches", "counter", (), "Compared calls that were wrong.",
        _verify("mismatches")),
    Row("verify_nonfinite_inputs", "counter", (),
        "Calls with NaN or infinity in an input.", _verify("nonfinite_inputs")),
    Row("nonfinite_gradients", "counter", ("tensor",),
        "Non-finite numbers in fp16 gradients, as far as check_grads looked.",
        _gradients),
    Row("simulated_wave_instructions", "counter", (),
        "Wave instructions that the simulator executed.",
        lambda status: [((), status["counters"]["wave_instructions"])]),
)  # fmt: skip


def series(row: Row) -> str:
    """The name under which a row's values are found."""
    return PREFIX + row.name + _SUFFIXES.get(row.kind, "")


class StatusCollector:
    """What prometheus_client asks at each scrape.

    Args:
        status: a function that returns what flash_attn_rocm.status() does.
    """

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def describe(self) -> Iterator[Any]:
        """The names alone, so that registering one asks for no status."""
        for row in ROWS:
            yield self._family(row)

    def collect(self) -> Iterator[Any]:
        """The metrics of one look at the status."""
        status = self._status()
        for row in ROWS:
            family = self._family(row)
            for values, value in row.read(status):
                name, labels = series(row), dict(zip(row.labels, values))
                if labels.get("quantile") in ("sum", "count"):
                    name += "_" + labels.pop("quantile")
                family.add_sample(name, labels, float(value))
            yield family

    @staticmethod
    def _family(row: Row) -> Any:
        from prometheus_client.core import Metric

        return Metric(PREFIX + row.name, row.text, row.kind)


# --------------------------------------------------------------------------
# The endpoint


class _Server(ThreadingHTTPServer):
    """One thread for each scrape; none of them keeps the interpreter alive."""

    daemon_threads = True

    def server_bind(self) -> None:
        # HTTPServer's would ask the name service for this host's name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]


class MetricsServer:
    """An open endpoint; close() ends it, and so does the end of a with-block.

    Attributes:
        port: where it listens, also if 0 was asked for.
    """

    def __init__(self, server: _Server, registry: Any, collector: Any) -> None:
        self.port: int = server.server_port
        self._server = server
        self._registry, self._collector = registry, collector
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = threading.Thread(
            target=server.serve_forever,
            args=(0.1,),  # seconds that close() waits at most
            name="flash_attn_rocm metrics",
            daemon=True,
        )
        self._thread.start()
        _open.add(self)

    def close(self) -> None:
        """Stop listening, and take the metrics out of the registry. Repeatable."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        _open.discard(self)
        self._server.shutdown()
        self._server.server_close()
        thread.join()
        self._registry.unregister(self._collector)

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forked(self) -> None:
        """In a child of a fork, which must not hold the port when its parent ends."""
        self._server.socket.close()
        self._thread = None


_open: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


def _after_fork() -> None:
    for server in list(_open):
        server._forked()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)


def serve_metrics(
    port: int = 9464,
    host: str = "127.0.0.1",
    registry: Any = None,
) -> MetricsServer:
    """Serve this process's metrics at http://host:port/metrics for Prometheus.

    Args:
        port: 0 for any that is free. Each process of a job needs one of its own.
        host: the address to listen at. There is no password; only this machine can
            ask unless you choose otherwise, "0.0.0.0" for example.
        registry: a prometheus_client registry to add the metrics to, and to serve
            as a whole: prometheus_client.REGISTRY has those of the process.
            Default: one with nothing else.

    Returns:
        An object with the number `port` and close().

    Raises:
        FlashAttnError: prometheus_client is missing, port, host or registry is no
            such thing, the address cannot be listened at, or the registry has these
            metrics already.
    """
    try:
        from prometheus_client import CollectorRegistry, MetricsHandler
    except ImportError:
        raise FlashAttnError(_MISSING) from None
    whole = isinstance(port, int) and not isinstance(port, bool)
    if not whole or not 0 <= port < 1 << 16:
        raise _arguments.refused("port", "an integer from 0 to 65535", port)
    if not _arguments.text("host", host):
        raise _arguments.refused("host", "an address to listen at", host)
    if registry is None:
        registry = CollectorRegistry()
    elif not isinstance(registry, CollectorRegistry):
        expected = "a prometheus_client.CollectorRegistry"
        raise _arguments.refused("registry", expected, registry)
    # A scrape must not wait for a GPU that hangs.
    collector = StatusCollector(functools.partial(_status.status, wait=False))
    try:
        registry.register(collector)
    except ValueError as error:
        raise FlashAttnError(
            f"registry: expected one without these metrics, got: {error}"
        ) from None
    server = None
    try:
        handler: Any = MetricsHandler.factory(registry)
        handler.timeout = 10  # seconds that a client may take to ask
        server = _Server((host, port), handler)
        return MetricsServer(server, registry, collector)
    except BaseException as error:
        registry.unregister(collector)
        if server is not None:
            server.server_close()
        # Of a name: ValueError and TypeError for what no name service is asked for.
        if not isinstance(error, (OSError, ValueError, TypeError)):
            raise
        raise FlashAttnError(
            f"host, port: expected an address to listen at, got "
            f"{repr(host)[1:-1]:.80}:{port} "
            f"({getattr(error, 'strerror', None) or error})"
        ) from None
