"""The rules pass their tests, alerts have runbooks, and the dashboard's queries use its variables.

promtool runs the rules' tests; tests/end_to_end/test_metrics.py runs rules and queries against a real server, which
shows that their metrics exist.
"""

from __future__ import annotations

import re

import pytest
from deploy.code_blocks import ROOT
from deploy.monitoring_files import (
    GPU_METRICS,
    MONITORING,
    OPENAI_METRICS,
    Rule,
    metrics_of,
    panel_queries,
    rules,
)
from deploy.programs import programs_or_skip, run

ALERTS = [rule for rule in rules() if rule.alerts]
# Panels that are empty on a machine without a GPU, and those that are empty without the OpenAI endpoint.
GPU_PANELS = {panel for panel, expr in panel_queries() if metrics_of(expr) & GPU_METRICS}
OPENAI_PANELS = {panel for panel, expr in panel_queries() if metrics_of(expr) & OPENAI_METRICS}


def test_promtool_accepts_the_config() -> None:
    (promtool,) = programs_or_skip("prometheus", ["promtool"])
    output = run([promtool, "check", "config", MONITORING / "prometheus.yml"], timeout=60).stdout
    assert output.count("rules found") == len(list(MONITORING.glob("rules/*.yml"))), output


def test_the_rules_pass_their_tests() -> None:
    (promtool,) = programs_or_skip("prometheus", ["promtool"])
    run([promtool, "test", "rules", *(MONITORING / "tests").glob("*.yml")], timeout=60)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_has_its_annotations(alert: Rule) -> None:
    assert alert.name.startswith("Llama")
    assert alert.labels in ({"severity": "critical"}, {"severity": "warning"})
    assert alert.annotations.keys() == {"summary", "description", "runbook_url"}
    assert all(alert.annotations.values())
    file, _, anchor = alert.annotations["runbook_url"].partition("#")
    assert anchor == alert.name.lower()
    assert re.search(rf"^#+ {alert.name}$", (ROOT / file).read_text(), re.MULTILINE)


@pytest.mark.parametrize(("panel", "expr"), panel_queries())
def test_a_query_uses_the_variables_of_the_dashboard(panel: str, expr: str) -> None:
    used = {name for name in re.findall(r"\$(\w+)", expr) if not name.startswith("__")}
    if panel in OPENAI_PANELS:
        assert (used, metrics_of(expr) - OPENAI_METRICS) == (set(), set())
        return
    assert expr.count('instance=~"$instance"') == len(re.findall(r"\{", expr))
    # A query is about a model unless it is about the machine.
    assert "model" in used or all(name.startswith(("nv_gpu_", "nv_cpu_")) for name in metrics_of(expr))
    # A panel is about GPUs as a whole, or has data without one.
    assert panel not in GPU_PANELS or metrics_of(expr) <= GPU_METRICS
