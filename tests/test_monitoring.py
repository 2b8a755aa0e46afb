"""monitoring/ with a real Prometheus: rules, example configuration, dashboard.

promtool judges the files; a server scrapes serve_metrics() and answers every
expression that the dashboard has.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from helpers import ROOT
from helpers.metrics import STATUS, growing, serve

from flash_attn_rocm._metrics import ROWS, series

MONITORING = ROOT / "monitoring"
if not MONITORING.is_dir():
    pytest.skip("an installed package has no monitoring/", allow_module_level=True)
pytest.importorskip("prometheus_client")
# scripts/bootstrap.py puts both beside the Python of its environment.
PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
DASHBOARD = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
EXPRESSIONS = [
    target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]
]


def tool(name):
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"no {name} here (Debian package prometheus)")
    return found


def promtool(*words, text=None, cwd=MONITORING):
    """(output, exit code)"""
    done = subprocess.run(
        [tool("promtool"), *words],
        cwd=cwd,
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.stdout, done.returncode


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()


def test_the_rules_and_the_example_are_valid():
    for what, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        output, code = promtool("check", what, name)
        assert code == 0 and "SUCCESS" in output, output


def test_alerts_fire_when_they_should_and_not_otherwise():
    output, code = promtool("test", "rules", "alerts_test.yml")
    assert code == 0, output


@pytest.mark.parametrize(
    "old, new",
    [
        ("< 2e12", "< 9e11"),  # never
        ("< 2e12", "< 4e12"),  # too soon
        ("for: 5m", "for: 1m"),
        ('device!~"sim|null:.*"', 'device!=""'),
        ("> 0.01", "> 0.03"),
        ("> 0.01", "> 0.004"),
        ('backend="sdpa"', 'backend="fused"'),
        ('state="open"} == 1', 'state="open"} == 2'),
        ('{state="open"} == 1', " == 1"),
        ("guard_misses_total[15m]", "guard_misses_total[1m]"),
        ("increase(flash_attn_rocm_guard_misses_total[15m])", "vector(1)"),
        ("increase(flash_attn_rocm_verify_mismatches_total[15m]) > 0", "vector(0) > 0"),
    ],
)  # fmt: skip
def test_the_tests_of_the_alerts_notice_a_changed_rule(tmp_path, old, new):
    rules = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
    assert old in rules
    (tmp_path / "alerts.yml").write_text(rules.replace(old, new), encoding="utf-8")
    shutil.copy(MONITORING / "alerts_test.yml", tmp_path)
    output, code = promtool("test", "rules", "alerts_test.yml", cwd=tmp_path)
    assert code == 1 and "FAILED" in output, output


def test_the_metrics_follow_the_conventions():
    with serve(lambda: STATUS) as server:
        text = get(f"http://127.0.0.1:{server.port}/metrics")
    output, code = promtool("check", "metrics", text=text)
    assert (output, code) == ("", 0)
    output, code = promtool("check", "metrics", text=text.replace("_total", ""))
    assert code != 0, "promtool finds nothing at all"


def test_every_rule_and_panel_asks_for_metrics_that_exist():
    known = {series(row) for row in ROWS}
    known |= {
        name + part
        for row, name in ((row, series(row)) for row in ROWS)
        if row.kind == "summary"
        for part in ("_sum", "_count")
    }
    rules = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
    asked = set(re.findall(r"\bflash_attn_rocm_\w+", " ".join([rules, *EXPRESSIONS])))
    assert asked - known == set()


def test_panels_have_numbers_of_their_own_and_do_not_overlap():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(p["x"] + p["w"] <= 24 for p in places)
    for a, b in itertools.combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or apart, (a, b)


def test_the_dashboard_is_bound_to_no_server():
    """It imports anywhere: every panel and target asks the chosen data source."""
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in DASHBOARD["panels"]:
        sources = [panel["datasource"], *(t["datasource"] for t in panel["targets"])]
        assert all(source == chosen for source in sources), panel["title"]
    assert "id" not in DASHBOARD


# --------------------------------------------------------------------------
# A server


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def configuration(targets):
    """The example, asking these targets each second."""
    text = (MONITORING / "prometheus.yml").read_text(encoding="utf-8")
    text, n = re.subn(r"targets: \[.*\]", f"targets: {json.dumps(targets)}", text)
    text, m = re.subn(r"interval: 15s", "interval: 1s", text)
    assert (n, m) == (1, 2)
    return text


class Server:
    """A Prometheus of the test's own."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, expression):
        query = urllib.parse.urlencode({"query": expression})
        answer = json.loads(get(f"{self.url}/api/v1/query?{query}"))
        assert answer["status"] == "success", (expression, answer)
        return answer["data"]["result"]

    def wait_for(self, expression, seconds=40):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if self.ask(expression):
                    return
            except (urllib.error.URLError, ConnectionError, ValueError):
                pass  # not listening, or not ready
            time.sleep(0.2)
        pytest.fail(f"Prometheus has no answer to {expression} after {seconds} s")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    program = tool("prometheus")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    shutil.copy(MONITORING / "alerts.yml", folder)
    with serve(growing()) as metrics:
        text = configuration([f"127.0.0.1:{metrics.port}"])
        (folder / "prometheus.yml").write_text(text, encoding="utf-8")
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ],
            stdin=subprocess.DEVNULL,
        )
        try:
            server = Server(port)
            server.wait_for("count_over_time(flash_attn_rocm_enabled[1m]) > 4")
            yield server
        finally:
            process.terminate()
            process.wait(30)


def filled(expression):
    """An expression of the dashboard as Grafana sends it."""
    for name, value in (
        ("$__rate_interval", "1m"),
        ("$__range", "1m"),
        ("$job", ".*"),
        ("$instance", ".*"),
    ):
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_the_server_has_every_metric_of_the_table(prometheus):
    for row in ROWS:
        assert prometheus.ask(series(row)), row.name
    assert prometheus.ask('up{job="flash_attn_rocm"} == 1')


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_of_the_dashboard_is_answered(prometheus, expression):
    assert prometheus.ask(filled(expression))


def test_the_variables_of_the_dashboard_find_their_metric(prometheus):
    queries = [
        v["query"]["query"]
        for v in DASHBOARD["templating"]["list"]
        if v["type"] == "query"
    ]
    assert len(queries) == 2
    for query in queries:
        selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
        (found,) = prometheus.ask(filled(selector))
        assert found["metric"][label]


def test_a_misspelt_metric_is_seen_as_such(prometheus):
    assert prometheus.ask("flash_attn_rocm_enable") == []
    with pytest.raises(AssertionError, match="parse error"):
        prometheus.ask("sum(")


def test_the_server_evaluates_the_rules_and_raises_the_alert(prometheus):
    """One breaker of the status is open, and nothing else is wrong for long enough."""
    prometheus.wait_for('ALERTS{alertname="FlashAttnRocmBreakerOpen"}')
    firing = prometheus.ask('ALERTS{alertstate="firing"}')
    names = {alert["metric"]["alertname"] for alert in firing}
    assert "FlashAttnRocmBreakerOpen" in names
    assert names <= {"FlashAttnRocmBreakerOpen", "FlashAttnRocmGuardMiss"}
    groups = json.loads(get(prometheus.url + "/api/v1/rules"))["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 7
    assert {
        rule["name"]: rule.get("lastError") for rule in rules if rule.get("lastError")
    } == {}
    (row,) = prometheus.ask("flash_attn_rocm:achieved_flops:rate2m")
    assert row["metric"]["device"] == "hip:0"
    assert float(row["value"][1]) == pytest.approx(4e12)
