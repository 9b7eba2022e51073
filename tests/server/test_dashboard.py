"""Every query of the dashboard and every rule has data when a real Prometheus scrapes a server under load."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from contract.debian_packages import prometheus_or_skip
from contract.monitoring_files import (
    DASHBOARD,
    GPU_METRICS,
    GPU_PANELS,
    Query,
    Rule,
    metrics_of,
    queries,
    rules,
    selectors,
)
from server.clients import Refusal, generate
from server.prometheus import ScrapingPrometheus
from server.servers import until
from triton_local.server import LocalTriton

CLIENTS = 3
REQUESTS = 500
"""Of each client at most; the load ends with the tests."""

QUERIES = [query for query in queries() if query.panel not in GPU_PANELS]
RECORDED = [rule for rule in rules() if not rule.alerts]
ALERTS = [rule for rule in rules() if rule.alerts]


@pytest.fixture(scope="module")
def prometheus(triton: LocalTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScrapingPrometheus]:
    """Scrapes the server while clients send requests."""
    program = prometheus_or_skip()
    with _load(triton), ScrapingPrometheus(program, tmp_path_factory.mktemp("prometheus"), triton.metrics_url) as one:
        yield one


@contextmanager
def _load(server: LocalTriton) -> Iterator[None]:
    """Run clients that send requests, one in five of them invalid."""
    enough = threading.Event()

    def ask() -> None:
        for number in range(REQUESTS):
            if enough.is_set():
                return
            request = {"text_input": "Return a list of", "max_tokens": 12, "min_tokens": 12, "temperature": 0.0}
            answer = generate(server, request if number % 5 else request | {"temperature": 9.0})
            assert isinstance(answer, Refusal) == (number % 5 == 0), answer

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            enough.set()
        for one in asking:
            one.result()


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_every_panel_has_data(prometheus: ScrapingPrometheus, query: Query) -> None:
    until(lambda: bool(prometheus.finite(query.resolved)), lambda: f"{query.resolved} has data: {prometheus.log()}")


@pytest.mark.parametrize("rule", RECORDED, ids=str)
def test_every_recording_rule_has_data(prometheus: ScrapingPrometheus, rule: Rule) -> None:
    labels = ", ".join(f'{name}="{value}"' for name, value in rule.labels.items())
    series = f"{rule.name}{{{labels}}}"
    until(lambda: bool(prometheus.finite(series)), lambda: f"{series} has data: {prometheus.log()}")


@pytest.mark.parametrize("alert", ALERTS, ids=str)
def test_every_alert_queries_series_that_exist(prometheus: ScrapingPrometheus, alert: Rule) -> None:
    """Series of a GPU are left out."""
    prometheus.values(alert.expr)
    asked = [selector for selector in selectors(alert.expr) if not metrics_of(selector) <= GPU_METRICS]
    until(lambda: all(map(prometheus.values, asked)), lambda: f"there are {asked}")


def test_rules_evaluate_and_no_alert_is_active_under_normal_load(prometheus: ScrapingPrometheus) -> None:
    until(lambda: bool(prometheus.finite("rate(llama_steps_total[1m]) > 0")), lambda: "there is a load to be seen")
    before = {rule["name"]: rule["lastEvaluation"] for rule in prometheus.rules()}
    until(
        lambda: all(rule["lastEvaluation"] != before[rule["name"]] for rule in prometheus.rules()),
        lambda: "every rule was evaluated since",
    )
    states = {rule["name"]: rule for rule in prometheus.rules()}
    assert set(states) == {rule.name for rule in rules()}
    assert {name: rule.get("lastError") for name, rule in states.items() if rule["health"] != "ok"} == {}

    def not_inactive() -> dict[str, str]:
        alerts = {rule["name"]: rule["state"] for rule in prometheus.rules() if rule["type"] == "alerting"}
        assert set(alerts) == {alert.name for alert in ALERTS}
        return {name: state for name, state in alerts.items() if state != "inactive"}

    # Pending counts as firing: the test does not wait for an alert's `for`. The first scrapes may be incomplete.
    until(lambda: not_inactive() == {}, lambda: f"no alert is pending or fires, but {not_inactive()}")


def test_queries_of_annotations_and_variables_are_valid(prometheus: ScrapingPrometheus) -> None:
    (annotation,) = DASHBOARD["annotations"]["list"]
    assert prometheus.values(annotation["expr"]) == []
    choices = [one["definition"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    assert choices == ["label_values(llama_slots, model)", 'label_values(llama_slots{model=~"$model"}, instance)']
    until(lambda: bool(prometheus.values('count by (model, instance) (llama_slots{model=~".+"})')), lambda: "slots")


def test_the_metrics_content_type_is_one_that_prometheus_3_accepts(triton: LocalTriton) -> None:
    """Prometheus 2 accepts any Content-Type."""
    with urllib.request.urlopen(f"http://{triton.metrics_url}/metrics", timeout=30) as response:
        assert response.headers.get_content_type() == "text/plain"


def test_queries_of_gpu_panels_are_valid(prometheus: ScrapingPrometheus) -> None:
    """Without a GPU only their syntax is tested; contract tests check the names of the series."""
    for query in queries():
        if query.panel in GPU_PANELS:
            values = prometheus.values(query.resolved)
            assert all(value >= 0 for value in values), json.dumps(values)
