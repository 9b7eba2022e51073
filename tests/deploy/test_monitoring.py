"""The rules pass their tests, and alerts have runbooks.

promtool runs the rules' tests; tests/end_to_end/test_metrics.py runs rules and queries against a real server, which
shows that their metrics exist.
"""

from __future__ import annotations

import re

import pytest
from deploy.code_blocks import ROOT
from deploy.monitoring_files import MONITORING, Rule, rules
from deploy.programs import programs_or_skip, run

ALERTS = [rule for rule in rules() if rule.alerts]


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
