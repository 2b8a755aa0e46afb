"""serve_metrics(): each field of the status, under a name that Prometheus accepts.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import builtins
import copy
import os
import re
import runpy
import socket
import threading
import urllib.error
import urllib.request

import pytest
from helpers import ROOT
from helpers.metrics import STATUS, growing, serve

import flash_attn_rocm as fa
from flash_attn_rocm import FlashAttnError
from flash_attn_rocm._metrics import ROWS, series, serve_metrics
from flash_attn_rocm._reason import Reason

client = pytest.importorskip("prometheus_client")


def scrape(server, accept="text/plain"):
    """{series with its labels: value} as a scraper reads it."""
    url = f"http://127.0.0.1:{server.port}/metrics"
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines)}


def labels(name):
    return set(re.findall(r'(\w+)="', name))


@pytest.mark.parametrize("part", ["guard", "verify"])
def test_the_made_up_status_has_what_the_real_one_has(part):
    assert STATUS[part].keys() == fa.status()[part].keys()


def test_each_row_of_the_table_is_served_with_its_labels():
    with serve(lambda: STATUS) as server:
        found = scrape(server)
    for row in ROWS:
        mine = [name for name in found if name.split("{")[0] == series(row)]
        assert mine and all(labels(name) == set(row.labels) for name in mine), row.name


@pytest.mark.parametrize(
    "name, value",
    [
        ('calls_total{backend="fused"}', 100),  # the 90 backwards are no more calls
        ('calls_total{backend="sdpa"}', 9),
        ('kernel_launches_total{kernel="fa_bwd_q_f16_d64_plain"}', 90),
        ('fallbacks_total{reason="head_dim"}', 8),
        ('fallbacks_total{reason="mask"}', 0),
        ('fallbacks_total{reason="made_up"}', 1),
        ('call_flops_total{device="sim",kernel="fa_fwd_f16_d64_plain"}', 1e9),
        ('breakers{state="half_open"}', 1),
        ("guard_misses_total", 2),
        ("guard_deadline_floor_seconds", 2),
        ("guard_quarantined_calls", 5),
        ("verify_unchecked_calls_total", 2),
        ("verify_mismatches_total", 1),
        ('nonfinite_gradients_total{tensor="q"}', 1),
        ("enabled", 1),
        ("simulated_wave_instructions_total", 422794),
    ],
)
def test_a_value_is_that_of_the_status(name, value):
    with serve(lambda: STATUS) as server:
        assert scrape(server)["flash_attn_rocm_" + name] == value


def test_a_call_class_has_two_quantiles_a_sum_and_a_count():
    with serve(lambda: STATUS) as server:
        found = scrape(server)
    name = "flash_attn_rocm_call_duration_seconds"
    of = 'device="hip:0",kernel="fa_fwd_f16_d64_plain"'
    assert found[f'{name}{{{of},quantile="0.5"}}'] == 0.004
    assert found[f'{name}{{{of},quantile="0.99"}}'] == 0.02
    assert found[f"{name}_sum{{{of}}}"] == 0.5
    assert found[f"{name}_count{{{of}}}"] == 100


def test_every_scrape_reads_the_status_anew_and_nothing_else_does():
    looks = []

    def status():
        looks.append(threading.current_thread())
        return {**STATUS, "enabled": len(looks) == 1}

    with serve(status) as server:
        assert looks == []
        assert scrape(server)["flash_attn_rocm_enabled"] == 1
        assert scrape(server)["flash_attn_rocm_enabled"] == 0
    assert len(looks) == 2


def test_every_fallback_reason_is_there_before_it_happens():
    empty = copy.deepcopy(STATUS)
    empty["counters"]["fallback"] = {}
    with serve(lambda: empty) as server:
        found = scrape(server)
    reasons = {reason.value for reason in Reason} - {"fused"}
    names = {f'flash_attn_rocm_fallbacks_total{{reason="{r}"}}' for r in reasons}
    assert names <= found.keys()


def test_samples_of_one_label_set_stand_together_for_openmetrics():
    with serve(growing()) as server:
        found = list(scrape(server, "application/openmetrics-text; version=1.0.0"))
    mine = [name for name in found if "call_duration_seconds" in name]
    devices = [re.search('device="(.*?)"', name)[1] for name in mine]
    assert devices == ["hip:0"] * 4 + ["sim"] * 4


def test_a_given_registry_is_served_as_a_whole_and_left_as_it_was():
    registry = client.CollectorRegistry()
    client.Gauge("mine", "of the user", registry=registry).set(3)
    with serve(lambda: STATUS, 0, registry=registry) as server:
        found = scrape(server)
        with pytest.raises(FlashAttnError, match=r"^registry: expected .* Duplicated"):
            serve(lambda: STATUS, 0, registry=registry)
    assert found["mine"] == 3 and "flash_attn_rocm_enabled" in found
    assert b"flash_attn_rocm" not in client.generate_latest(registry)


def test_close_frees_the_port_and_may_be_repeated():
    server = serve(lambda: STATUS)
    scrape(server)
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        scrape(server)
    with serve(lambda: STATUS, server.port) as again:
        assert again.port == server.port


def test_only_this_machine_is_served_unless_asked():
    with serve(lambda: STATUS) as server:
        assert server._server.server_address[0] == "127.0.0.1"


def test_a_taken_port_is_refused_by_name_and_leaves_the_registry_alone():
    registry = client.CollectorRegistry()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FlashAttnError, match=rf"127.0.0.1:{port} \(.*in use"):
            serve(lambda: STATUS, port, registry=registry)
    assert client.generate_latest(registry) == b""


@pytest.mark.parametrize("port", [-1, 65536, "9464", None, 1.5])
def test_what_is_no_port_is_refused_by_name(port):
    with pytest.raises(FlashAttnError, match=r"^port: expected an integer from 0"):
        serve(lambda: STATUS, port)


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FlashAttnError, match="pip install prometheus_client"):
        serve(lambda: STATUS)


def test_a_forked_child_does_not_hold_the_port():
    server = serve(lambda: STATUS)
    wait, leave = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(leave)
        os.read(wait, 1)
        os._exit(0)
    try:
        server.close()
        with serve(lambda: STATUS, server.port) as again:
            scrape(again)
    finally:
        os.write(leave, b"x")
        os.waitpid(child, 0)


def test_the_status_of_this_process_is_served_unless_told_otherwise():
    with serve_metrics(0) as server:
        found = scrape(server)
    served = {name.split("{")[0] for name in found}
    there = {series(row) for row in ROWS if row.name.startswith(("guard", "verify"))}
    assert there <= served and found["flash_attn_rocm_enabled"] == 1
    assert f'version="{fa.__version__}"' in "".join(found)


def test_the_table_in_the_document_is_up_to_date():
    script = ROOT / "scripts" / "metric_table.py"
    if not script.is_file():
        pytest.skip("an installed package has no scripts")
    document = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(script))["renewed"](document) == document
