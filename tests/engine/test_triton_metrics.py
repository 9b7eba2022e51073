"""Metrics that outlive their model, and log records at Triton's levels. The series are told in tests/end_to_end."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any, cast
from unittest.mock import Mock

from llama_engine.observability.log import TritonLogHandler
from llama_engine.observability.metrics import METRICS, MODEL_INFO
from llama_engine.triton.metrics import TritonMetrics


class _Family:
    """Stands for pb_utils.MetricFamily."""

    COUNTER, GAUGE, HISTOGRAM = range(3)
    made: list[weakref.ref[object]]

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.made.append(weakref.ref(self))

    def Metric(self, labels: object = None, buckets: object = None) -> Mock:  # noqa: N802 - Triton's name
        series = Mock()
        self.made.append(weakref.ref(series))
        return series


def test_series_outlive_closed_metrics() -> None:
    _Family.made = []
    metrics = TritonMetrics(cast("Any", _Family), {"model": "llama"}, "llama_0_0", dict.fromkeys(MODEL_INFO.info, ""))
    metrics.close()
    del metrics
    gc.collect()
    assert len(_Family.made) > 2 * len(METRICS)
    assert all(reference() is not None for reference in _Family.made)


def test_log_records_are_written_at_tritons_nearest_level() -> None:
    lines: list[str] = []
    log = logging.Logger("a logger of its own")
    log.addHandler(TritonLogHandler(*(lambda line, level=level: lines.append(f"{level} {line}") for level in "IWE")))
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        log.log(level, "%s", level)
    assert lines == ["I llama: 10", "I llama: 20", "W llama: 30", "E llama: 40", "E llama: 50"]
