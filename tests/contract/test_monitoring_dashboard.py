"""The dashboard's panels have a name, a description and a unit, do not overlap, and use the selected data source.

tests/server/test_dashboard.py runs their queries.
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


def test_panels_have_different_ids_and_titles_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert not taken & _cells(panel), panel["title"]
        taken |= _cells(panel)


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_panel_has_description_unit_and_legends(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert len(set(legends)) == len(legends)
    assert panel["type"] == "stat" or all(legends)


def test_everything_queries_the_selected_data_source() -> None:
    querying = [*panels(), *(target for panel in panels() for target in panel["targets"])]
    querying += [variable for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    querying += DASHBOARD["annotations"]["list"]
    assert [one for one in querying if one["datasource"] != SOURCE] == []


@pytest.mark.parametrize("query", queries(), ids=str)
def test_a_query_uses_the_variables_of_the_dashboard(query: Query) -> None:
    used = {name for name in re.findall(r"\$(\w+)", query.expr) if not name.startswith("__")}
    assert used <= VARIABLES
    assert query.expr.count('instance=~"$instance"') == len(re.findall(r"\{", query.expr))
    # A query is about a model unless it is about the machine.
    assert "model" in used or all(name.startswith(("nv_gpu_", "nv_cpu_")) for name in metrics_of(query.expr))


def test_the_gpu_panels_are_those_with_gpu_metrics() -> None:
    found = {query.panel for query in queries() if metrics_of(query.expr) & GPU_METRICS}
    assert found == set(GPU_PANELS)
    for query in queries():
        if query.panel in GPU_PANELS:
            assert metrics_of(query.expr) <= GPU_METRICS


def test_the_annotation_covers_every_alert() -> None:
    (annotation,) = DASHBOARD["annotations"]["list"]
    (pattern,) = re.findall(r'alertname=~"([^"]+)"', annotation["expr"])
    assert all(re.fullmatch(pattern, rule.name) for rule in rules() if rule.alerts)


def test_grafana_and_prometheus_have_the_same_scrape_interval() -> None:
    """$__rate_interval is computed from it: if it is too short, every panel is empty."""
    provisioned = yaml.safe_load((MONITORING / "grafana/provisioning/datasources/prometheus.yml").read_text())
    (source,) = provisioned["datasources"]
    scraping = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraping["scrape_interval"] == scraping["evaluation_interval"]
