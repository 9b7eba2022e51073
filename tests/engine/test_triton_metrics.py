"""Metrics as Triton's series, and log records at Triton's levels."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any, cast

import pytest
from engine.backend_utils import MetricFamilies
from llama_engine.observability.log import TritonLogHandler
from llama_engine.observability.metrics import METRICS, MODEL_INFO
from llama_engine.triton.metrics import INSTANCE_LABEL, TritonMetrics

LABELS = {"model": "llama", "version": "1"}
INFO = {name: f"the {name}" for name in MODEL_INFO.info}


@pytest.fixture
def triton() -> MetricFamilies:
    return MetricFamilies()


def _metrics(triton: MetricFamilies, instance: str) -> TritonMetrics:
    return TritonMetrics(cast("Any", triton), LABELS, instance, INFO)


def test_an_instance_shares_all_series_but_gauges(triton: MetricFamilies) -> None:
    instances = ["llama_0_0_gpu0", "llama_0_0_gpu1"]
    for instance in instances:
        _metrics(triton, instance)
    assert list(triton.families) == [metric.name for metric in METRICS]
    for metric in METRICS:
        family = triton.families[metric.name]
        assert family.kind == metric.kind
        labels = [series.labels.get(INSTANCE_LABEL) for series in family.series]
        of_gauge = [instance for instance in instances for _ in metric.values]
        assert labels == (of_gauge if metric.kind == "gauge" else [None] * 2 * len(metric.values)), metric.name
        assert all(LABELS.items() <= series.labels.items() for series in family.series)
        assert all((series.buckets is not None) == (metric.kind == "histogram") for series in family.series)


def test_series_outlive_closed_metrics(triton: MetricFamilies) -> None:
    metrics = _metrics(triton, "llama_0_0")
    references = [weakref.ref(series) for family in triton.families.values() for series in [family, *family.series]]
    metrics.close()
    del metrics
    for family in triton.families.values():
        family.series.clear()
    del family
    triton.families.clear()
    gc.collect()
    assert all(reference() is not None for reference in references)


def test_log_records_are_written_at_tritons_nearest_level() -> None:
    lines: list[str] = []
    log = logging.Logger("a logger of its own")
    log.addHandler(TritonLogHandler(*(lambda line, level=level: lines.append(f"{level} {line}") for level in "IWE")))
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        log.log(level, "%s", level)
    assert lines == ["I llama: 10", "I llama: 20", "W llama: 30", "E llama: 40", "E llama: 50"]
