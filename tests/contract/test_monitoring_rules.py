"""The rules pass their tests, use metrics that exist, and every alert has a description and a runbook section.

promtool runs the rules' tests; tests/server/test_dashboard.py runs the rules against a real server.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import yaml
from contract.code_blocks import ROOT
from contract.monitoring_files import (
    MONITORING,
    RULE_FILES,
    RULE_TESTS,
    TRITON_METRICS,
    Rule,
    groups,
    metrics_of,
    queries,
    rules,
    selectors,
)
from contract.prometheus_package import Prometheus, prometheus_or_skip
from llama_engine.observability.metrics import METRICS

ALERTS = [rule for rule in rules() if rule.alerts]
RECORDED = {rule.name for rule in rules() if not rule.alerts}


@pytest.fixture(scope="module")
def prometheus() -> Prometheus:
    return prometheus_or_skip()


def _own_series() -> set[str]:
    """Return the names of the model's series, with the three of each histogram."""
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    return {metric.name + part for metric in METRICS for part in parts.get(metric.kind, ("",))}


def _tests(kind: str) -> list[dict[str, Any]]:
    tests = [test for file in RULE_TESTS for test in yaml.safe_load(file.read_text())["tests"]]
    return [case for test in tests for case in test.get(kind, [])]


def test_promtool_accepts_the_config_and_the_rules_pass_their_tests(prometheus: Prometheus) -> None:
    output = prometheus.check("check", "config", MONITORING / "prometheus.yml")
    assert output.count("rules found") == len(RULE_FILES), output
    prometheus.check("test", "rules", *RULE_TESTS)


@pytest.mark.parametrize("alert", ALERTS, ids=str)
def test_an_alert_is_tested_to_fire_and_not_to_fire(alert: Rule) -> None:
    cases = [bool(case["exp_alerts"]) for case in _tests("alert_rule_test") if case["alertname"] == alert.name]
    assert set(cases) == {True, False}


def test_every_recorded_series_is_tested() -> None:
    assert {case["expr"] for case in _tests("promql_expr_test")} == RECORDED


def test_groups_have_different_names() -> None:
    # Prometheus refuses duplicates within a file; in Kubernetes both files become one.
    assert Counter(group["name"] for group in groups()).most_common(1)[0][1] == 1


@pytest.mark.parametrize("alert", ALERTS, ids=str)
def test_an_alert_has_severity_summary_description_and_a_runbook_section(alert: Rule) -> None:
    assert alert.name.startswith("Llama")
    assert alert.labels.keys() == {"severity"}
    assert alert.labels["severity"] in ("critical", "warning")
    assert alert.annotations.keys() == {"summary", "description", "runbook_url"}
    assert all(alert.annotations.values())
    file, _, anchor = alert.annotations["runbook_url"].partition("#")
    assert anchor == alert.name.lower()
    assert re.search(rf"^#+ {alert.name}$", (ROOT / file).read_text(), re.MULTILINE)


def test_the_alerts_select_the_job_that_is_scraped() -> None:
    (scraped,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    selected = {selector for alert in ALERTS for selector in selectors(alert.expr) if selector.startswith("up")}
    assert selected == {f'up{{job="{scraped["job_name"]}"}}'}


def test_the_selectors_of_an_expression_are_found() -> None:
    expr = 'sum by (le) (rate(llama_x_bucket{a="b"}[5m])) / nv_y > up{c="d"} and on (model) model:nv_z:mean5m'
    assert selectors(expr) == ['llama_x_bucket{a="b"}', "nv_y", 'up{c="d"}', "model:nv_z:mean5m"]
    assert metrics_of(expr) == {"llama_x_bucket", "nv_y", "up", "model:nv_z:mean5m"}


def test_every_metric_in_a_rule_or_a_query_exists() -> None:
    used = [metrics_of(expr) for expr in (*(rule.expr for rule in rules()), *(query.expr for query in queries()))]
    assert all(used), "each uses a metric"
    assert set().union(*used) <= {*_own_series(), *TRITON_METRICS, *RECORDED, "up"}
