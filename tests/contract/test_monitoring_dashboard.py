"""The dashboard can be read: panels with a name, a meaning and a unit, side by side, fed by the chosen data source.

That its queries return data is tests/server/test_dashboard.py's business.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import yaml
from contract.monitoring_files import (
    DASHBOARD,
    GPU_METRICS,
    GPU_PANELS,
    MONITORING,
    Query,
    metrics_of,
    panels,
    queries,
    rules,
)

COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
VARIABLES = {variable["name"] for variable in DASHBOARD["templating"]["list"]}


def _cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    at = panel["gridPos"]
    assert at["x"] + at["w"] <= COLUMNS, panel["title"]
    return set(product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))


def test_two_panels_have_one_number_or_one_title() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_a_panel_lies_on_another_or_beside_the_page() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert not taken & _cells(panel), panel["title"]
        taken |= _cells(panel)


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_panel_does_not_say_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert len(set(legends)) == len(legends)
    assert panel["type"] == "stat" or all(legends)


def test_a_panel_asks_another_source_than_the_chosen_one() -> None:
    asking = [*panels(), *(target for panel in panels() for target in panel["targets"])]
    asking += [variable for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    asking += DASHBOARD["annotations"]["list"]
    assert [one for one in asking if one["datasource"] != SOURCE] == []


@pytest.mark.parametrize("query", queries(), ids=str)
def test_a_query_does_not_heed_what_was_chosen_above(query: Query) -> None:
    used = {name for name in re.findall(r"\$(\w+)", query.expr) if not name.startswith("__")}
    assert used <= VARIABLES
    assert query.expr.count('instance=~"$instance"') == len(re.findall(r"\{", query.expr))
    # Whatever isn't about the machine is about a model.
    assert "model" in used or all(name.startswith(("nv_gpu_", "nv_cpu_")) for name in metrics_of(query.expr))


def test_a_panel_that_a_gpu_is_needed_for_is_not_listed_or_another_one_is() -> None:
    asking = {query.panel for query in queries() if metrics_of(query.expr) & GPU_METRICS}
    assert asking == set(GPU_PANELS)
    for query in queries():
        if query.panel in GPU_PANELS:
            assert metrics_of(query.expr) <= GPU_METRICS


def test_an_annotation_is_about_alerts_that_do_not_exist() -> None:
    (annotation,) = DASHBOARD["annotations"]["list"]
    (pattern,) = re.findall(r'alertname=~"([^"]+)"', annotation["expr"])
    assert all(re.fullmatch(pattern, rule.name) for rule in rules() if rule.alerts)


def test_grafana_takes_another_pause_between_two_scrapes_than_prometheus_makes() -> None:
    """$__rate_interval is made of it: too short, and every panel is empty."""
    provisioned = yaml.safe_load((MONITORING / "grafana/provisioning/datasources/prometheus.yml").read_text())
    (source,) = provisioned["datasources"]
    scraping = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraping["scrape_interval"] == scraping["evaluation_interval"]
