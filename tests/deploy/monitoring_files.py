"""Read deploy/monitoring: rules, the dashboard's panels and queries, and the metrics that they use."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import yaml
from deploy.code_blocks import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana" / "dashboards" / "triton-llama.json").read_text())
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


def panel_queries() -> list[tuple[str, str]]:
    """Return the panel's title and the query, with the dashboard's variables, of every query of every panel."""
    return [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def queries() -> list[str]:
    """Return every query of every panel, as Grafana sends it for every model and every server."""
    exprs = [expr for _, expr in panel_queries()]
    for variable, value in {"$__rate_interval": "1m", "$model": ".+", "$instance": ".+"}.items():
        exprs = [expr.replace(variable, value) for expr in exprs]
    return exprs


def selectors(expr: str) -> list[str]:
    """Return an expression's selectors with their labels: llama_requests_total{finish_reason="error"}."""
    return [name + labels for name, labels in _SELECTOR.findall(expr)]


def metrics_of(expr: str) -> set[str]:
    """Return the names of an expression's metrics."""
    return {selector.partition("{")[0] for selector in selectors(expr)}
