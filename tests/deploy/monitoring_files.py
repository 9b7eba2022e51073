"""Read deploy/monitoring: rules, the dashboard's panels and queries, and the metrics that they use."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import yaml
from deploy.code_blocks import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana" / "dashboards" / "triton-llama.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
GROUPS: list[dict[str, Any]] = [
    group for file in sorted(MONITORING.glob("rules/*.yml")) for group in yaml.safe_load(file.read_text())["groups"]
]

GPU_METRICS = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"}
"""Triton has them only where there is an NVIDIA GPU; from docs/user_guide/metrics.md of triton-inference-server."""

OPENAI_METRICS = {"llama_openai_requests_total", "llama_openai_time_to_first_token_seconds_bucket"}
"""Of the OpenAI endpoint, a process of its own; they have neither the server's model nor its instance."""

_SELECTOR = re.compile(r"(?<![\w:])((?:model:)?(?:llama|nv)_\w+(?::\w+)?|up)(\{[^}]*\})?(?![\w:(])")


class Rule(NamedTuple):
    """One rule. name: the alert's or the recorded series'."""

    name: str
    expr: str
    alerts: bool
    labels: dict[str, str]
    annotations: dict[str, str]

    def __str__(self) -> str:
        return "-".join([self.name, *(self.labels.values() if not self.alerts else ())])


class Query(NamedTuple):
    """One query of a panel."""

    panel: str
    ref: str
    expr: str

    @property
    def resolved(self) -> str:
        """The query as Grafana sends it for every model and every server."""
        expr = self.expr.replace("$__rate_interval", "1m").replace("$model", ".+").replace("$instance", ".+")
        assert "$" not in expr, f"{self}: {expr} has an unknown variable"
        return expr

    def __str__(self) -> str:
        return f"{self.panel}-{self.ref}"


def rules() -> list[Rule]:
    """Return the rules of every file, in order."""
    entries = [entry for group in GROUPS for entry in group["rules"]]
    return [
        Rule(
            entry.get("alert") or entry["record"],
            entry["expr"],
            "alert" in entry,
            entry.get("labels", {}),
            entry.get("annotations", {}),
        )
        for entry in entries
    ]


def queries() -> list[Query]:
    """Return every query of every panel."""
    return [Query(panel["title"], target["refId"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def selectors(expr: str) -> list[str]:
    """Return an expression's selectors with their labels: llama_requests_total{finish_reason="error"}."""
    return [name + labels for name, labels in _SELECTOR.findall(expr)]


def metrics_of(expr: str) -> set[str]:
    """Return the names of an expression's metrics."""
    return {selector.partition("{")[0] for selector in selectors(expr)}


GPU_PANELS = {query.panel for query in queries() if metrics_of(query.expr) & GPU_METRICS}
"""Panels that are empty on a machine without a GPU."""
OPENAI_PANELS = {query.panel for query in queries() if metrics_of(query.expr) & OPENAI_METRICS}
"""Panels that are empty without the OpenAI endpoint."""
