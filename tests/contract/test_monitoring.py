"""The rules pass their tests, the dashboard is whole, and both use metrics, variables and pages that exist.

promtool runs the rules' tests; tests/server/test_dashboard.py runs rules and queries against a real server, which also
shows that the metrics of Triton's own exist.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from compose.commands import run
from contract.code_blocks import ROOT
from contract.debian_packages import prometheus_or_skip
from contract.monitoring_files import (
    DASHBOARD,
    GPU_METRICS,
    GPU_PANELS,
    GROUPS,
    MONITORING,
    OPENAI_METRICS,
    OPENAI_PANELS,
    PANELS,
    TRITON_METRICS,
    Query,
    Rule,
    metrics_of,
    queries,
    rules,
    selectors,
)
from llama_engine.observability.metrics import METRICS

ALERTS = [rule for rule in rules() if rule.alerts]
RECORDED = {rule.name for rule in rules() if not rule.alerts}
RULE_TESTS = sorted((MONITORING / "tests").glob("*.yml"))
each_alert = pytest.mark.parametrize("alert", ALERTS, ids=str)

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _tests(kind: str) -> list[dict[str, Any]]:
    tests = [test for file in RULE_TESTS for test in yaml.safe_load(file.read_text())["tests"]]
    return [case for test in tests for case in test.get(kind, [])]


def test_promtool_accepts_the_config_and_the_rules_pass_their_tests() -> None:
    promtool = prometheus_or_skip().promtool
    output = run([promtool, "check", "config", MONITORING / "prometheus.yml"], timeout=60).stdout
    assert output.count("rules found") == len(list(MONITORING.glob("rules/*.yml"))), output
    run([promtool, "test", "rules", *RULE_TESTS], timeout=60)


@each_alert
def test_an_alert_is_tested_to_fire_and_not_to_fire(alert: Rule) -> None:
    cases = [bool(case["exp_alerts"]) for case in _tests("alert_rule_test") if case["alertname"] == alert.name]
    assert set(cases) == {True, False}


def test_every_recorded_series_is_tested() -> None:
    assert {case["expr"] for case in _tests("promql_expr_test")} == RECORDED


def test_groups_have_different_names() -> None:
    # Prometheus refuses duplicates within a file; in Kubernetes both files become one.
    assert len({group["name"] for group in GROUPS}) == len(GROUPS)


@each_alert
def test_an_alert_has_severity_summary_description_and_a_runbook_section(alert: Rule) -> None:
    assert alert.name.startswith("Llama")
    assert alert.labels in ({"severity": "critical"}, {"severity": "warning"})
    assert alert.annotations.keys() == {"summary", "description", "runbook_url"}
    assert all(alert.annotations.values())
    file, _, anchor = alert.annotations["runbook_url"].partition("#")
    assert anchor == alert.name.lower()
    assert re.search(rf"^#+ {alert.name}$", (ROOT / file).read_text(), re.MULTILINE)


def test_the_alerts_select_the_job_that_is_scraped() -> None:
    scraped, _ = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    selected = {selector for alert in ALERTS for selector in selectors(alert.expr) if selector.startswith("up")}
    assert selected == {f'up{{job="{scraped["job_name"]}"}}'}


def test_every_metric_in_a_rule_or_a_query_exists() -> None:
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    own = {metric.name + part for metric in METRICS for part in parts.get(metric.kind, ("",))}
    used = [metrics_of(expr) for expr in (*(rule.expr for rule in rules()), *(query.expr for query in queries()))]
    assert all(used), "each uses a metric"
    assert set().union(*used) <= own | TRITON_METRICS | RECORDED | OPENAI_METRICS | {"up"}


def test_everything_queries_the_selected_data_source() -> None:
    querying = [*PANELS, *(target for panel in PANELS for target in panel["targets"])]
    querying += [variable for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    querying += DASHBOARD["annotations"]["list"]
    assert [one for one in querying if one["datasource"] != SOURCE] == []


@pytest.mark.parametrize("query", queries(), ids=str)
def test_a_query_uses_the_variables_of_the_dashboard(query: Query) -> None:
    used = {name for name in re.findall(r"\$(\w+)", query.expr) if not name.startswith("__")}
    if query.panel in OPENAI_PANELS:
        assert (used, metrics_of(query.expr) - OPENAI_METRICS) == (set(), set())
        return
    assert query.expr.count('instance=~"$instance"') == len(re.findall(r"\{", query.expr))
    # A query is about a model unless it is about the machine.
    assert "model" in used or all(name.startswith(("nv_gpu_", "nv_cpu_")) for name in metrics_of(query.expr))
    # A panel is about GPUs as a whole, or has data without one.
    assert query.panel not in GPU_PANELS or metrics_of(query.expr) <= GPU_METRICS


def test_the_annotation_covers_every_alert() -> None:
    (annotation,) = DASHBOARD["annotations"]["list"]
    (pattern,) = re.findall(r'alertname=~"([^"]+)"', annotation["expr"])
    assert all(re.fullmatch(pattern, alert.name) for alert in ALERTS)
