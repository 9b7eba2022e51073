"""docs/metrics.md lists exactly the metrics of the code, with kind and meaning."""

from __future__ import annotations

import re

from contract.code_blocks import ROOT
from llama_engine.observability.metrics import METRICS

DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()


def test_the_table_lists_the_metrics_of_the_code() -> None:
    rows = re.findall(r"^\| `(llama_\w+)`(?: \{`(\w+)`\})? \| (\w+) \| (\w+) \| (.*) \|$", DOCUMENT, re.MULTILINE)
    assert [(name, label, kind, meaning) for name, label, kind, _, meaning in rows] == [
        (metric.name, metric.label, metric.kind, metric.help) for metric in METRICS
    ]


def test_counters_and_only_counters_end_in_total() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_the_queries_use_metrics_that_exist() -> None:
    # llama_0_0 is an instance of the model.
    used = set(re.findall(r"llama_(?!\d)\w+", DOCUMENT))
    series = {
        name + suffix for name in (metric.name for metric in METRICS) for suffix in ("", "_bucket", "_sum", "_count")
    }
    assert used <= series
