"""The rules pass their tests, alerts have runbooks, and the dashboard's queries use its variables.

promtool runs the rules' tests; tests/end_to_end/test_dashboard.py runs rules and queries against a real server, which
shows that their metrics exist.
"""

from __future__ import annotations

import re

import pytest
from deploy.code_blocks import ROOT
from deploy.commands import run
from deploy.debian_packages import prometheus_or_skip
from deploy.monitoring_files import (
    GPU_METRICS,
    GPU_PANELS,
    MONITORING,
    OPENAI_METRICS,
    OPENAI_PANELS,
    Query,
    Rule,
    metrics_of,
    queries,
    rules,
)

ALERTS = [rule for rule in rules() if rule.alerts]
RULE_TESTS = sorted((MONITORING / "tests").glob("*.yml"))
each_alert = pytest.mark.parametrize("alert", ALERTS, ids=str)


def test_promtool_accepts_the_config() -> None:
    promtool = prometheus_or_skip().promtool
    output = run([promtool, "check", "config", MONITORING / "prometheus.yml"], timeout=60).stdout
    assert output.count("rules found") == len(list(MONITORING.glob("rules/*.yml"))), output


def test_the_rules_pass_their_tests() -> None:
    promtool = prometheus_or_skip().promtool
    run([promtool, "test", "rules", *RULE_TESTS], timeout=60)


@each_alert
def test_an_alert_has_its_annotations(alert: Rule) -> None:
    assert alert.name.startswith("Llama")
    assert alert.labels in ({"severity": "critical"}, {"severity": "warning"})
    assert alert.annotations.keys() == {"summary", "description", "runbook_url"}
    assert all(alert.annotations.values())
    file, _, anchor = alert.annotations["runbook_url"].partition("#")
    assert anchor == alert.name.lower()
    assert re.search(rf"^#+ {alert.name}$", (ROOT / file).read_text(), re.MULTILINE)


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
