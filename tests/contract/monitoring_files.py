"""Read deploy/monitoring: rules, their tests, the dashboard's panels and queries, and the metrics that they use."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import yaml
from contract.code_blocks import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
RULE_FILES = sorted((MONITORING / "rules").glob("*.yml"))
RULE_TESTS = sorted((MONITORING / "tests").glob("*.yml"))
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana" / "dashboards" / "triton-llama.json").read_text())

GPU_PANELS = {
    "GPU utilisation": "Triton has the nv_gpu_ metrics only where there is an NVIDIA GPU",
    "GPU memory": "Triton has the nv_gpu_ metrics only where there is an NVIDIA GPU",
}
"""Panels that are empty on a machine without a GPU, and why."""

GPU_METRICS = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"}
SUMMARY_METRICS = {"nv_inference_queue_summary_us", "nv_inference_request_summary_us"}
TRITON_METRICS = {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_pending_request_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_cpu_utilization",
    "nv_cpu_memory_used_bytes",
    "nv_cpu_memory_total_bytes",
    *GPU_METRICS,
    *SUMMARY_METRICS,
}
"""Names of Triton's own metrics, from docs/user_guide/metrics.md of triton-inference-server/server."""

_SELECTOR = re.compile(r"(?<![\w:])((?:model:)?(?:llama|nv)_\w+(?::\w+)?|up)(\{[^}]*\})?(?![\w:(])")


@dataclass(frozen=True)
class Rule:
    """One rule. name: the alert's or the recorded series'."""

    name: str
    expr: str
    alerts: bool
    labels: dict[str, str]
    annotations: dict[str, str]

    def __str__(self) -> str:
        return "-".join([self.name, *(self.labels.values() if not self.alerts else ())])


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    panel: str
    ref: str
    expr: str

    @property
    def resolved(self) -> str:
        """The query as Grafana sends it for every model and every server."""
        values = {"$__rate_interval": "1m", "$model": ".+", "$instance": ".+"}
        expr = self.expr
        for variable, value in values.items():
            expr = expr.replace(variable, value)
        assert "$" not in expr, f"{self}: {expr} has an unknown variable"
        return expr

    def __str__(self) -> str:
        return f"{self.panel}-{self.ref}"


def groups() -> list[dict[str, Any]]:
    """Return the rule groups of every file."""
    return [group for file in RULE_FILES for group in yaml.safe_load(file.read_text())["groups"]]


def rules() -> list[Rule]:
    """Return the rules of every file, in order."""
    return [
        Rule(
            name=rule.get("alert") or rule["record"],
            expr=rule["expr"],
            alerts="alert" in rule,
            labels=rule.get("labels", {}),
            annotations=rule.get("annotations", {}),
        )
        for group in groups()
        for rule in group["rules"]
    ]


def panels() -> list[dict[str, Any]]:
    """Return the dashboard's panels without its row headings."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[Query]:
    """Return every query of every panel."""
    return [Query(panel["title"], target["refId"], target["expr"]) for panel in panels() for target in panel["targets"]]


def selectors(expr: str) -> list[str]:
    """Return an expression's selectors with their labels: llama_requests_total{finish_reason="error"}."""
    return [name + labels for name, labels in _SELECTOR.findall(expr)]


def metrics_of(expr: str) -> set[str]:
    """Return the names of an expression's metrics."""
    return {selector.partition("{")[0] for selector in selectors(expr)}
