"""docs/metrics.md has every metric there is, with its kind and its meaning, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from llama_engine.observability.metrics import METRICS

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()


def test_the_table_and_the_metrics_are_the_same() -> None:
    rows = re.findall(r"^\| `(llama_\w+)`(?: \{`(\w+)`\})? \| (\w+) \| (\w+) \| (.*) \|$", DOCUMENT, re.MULTILINE)
    assert [(name, label, kind, meaning) for name, label, kind, _, meaning in rows] == [
        (metric.name, metric.label, metric.kind, metric.help) for metric in METRICS
    ]


def test_a_counter_ends_in_total_and_nothing_else_does() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_the_queries_ask_for_metrics_that_exist() -> None:
    # llama_0_0 is an instance of the model.
    asked = set(re.findall(r"llama_(?!\d)\w+", DOCUMENT))
    series = {
        name + suffix for name in (metric.name for metric in METRICS) for suffix in ("", "_bucket", "_sum", "_count")
    }
    assert asked <= series
