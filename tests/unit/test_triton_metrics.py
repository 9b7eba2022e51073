"""Metrics as Triton's series, and log records at Triton's levels."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import dataclass, field

import pytest
from llama_engine.observability.log import TritonLogHandler
from llama_engine.observability.metrics import LAST_STEP, METRICS, REQUESTS, SLOTS, STEP_ROWS, STEPS
from llama_engine.triton.metrics import INSTANCE_LABEL, TritonMetrics

LABELS = {"model": "llama", "version": "1"}


@dataclass
class _Series:
    """Keeps its updates."""

    labels: dict[str, str]
    buckets: list[float] | None
    updates: list[tuple[str, float]] = field(default_factory=list)

    def increment(self, value: float) -> None:
        self.updates.append(("increment", value))

    def set(self, value: float) -> None:
        self.updates.append(("set", value))

    def observe(self, value: float) -> None:
        self.updates.append(("observe", value))


class _Family:
    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.series: list[_Series] = []

    def Metric(  # noqa: N802 - Triton's name
        self, labels: dict[str, str] | None = None, buckets: list[float] | None = None
    ) -> _Series:
        self.series.append(_Series(labels or {}, buckets))
        return self.series[-1]


class _Triton:
    """Stands for pb_utils.MetricFamily; a family of the same name is the same one."""

    COUNTER, GAUGE, HISTOGRAM = 0, 1, 2

    def __init__(self) -> None:
        self.families: dict[str, _Family] = {}

    def __call__(self, name: str, description: str, kind: int) -> _Family:
        assert description
        return self.families.setdefault(name, _Family(kind))

    def series(self, name: str) -> list[_Series]:
        return self.families[name].series


@pytest.fixture
def triton() -> _Triton:
    return _Triton()


def test_instances_share_counters_and_histograms_and_have_gauges_of_their_own(triton: _Triton) -> None:
    instances = ["llama_0_0_gpu0", "llama_0_0_gpu1"]
    for instance in instances:
        TritonMetrics(triton, LABELS, instance)
    assert list(triton.families) == [metric.name for metric in METRICS]
    kinds = {"counter": triton.COUNTER, "gauge": triton.GAUGE, "histogram": triton.HISTOGRAM}
    for metric in METRICS:
        series = triton.series(metric.name)
        assert triton.families[metric.name].kind == kinds[metric.kind]
        own = [one.labels.get(INSTANCE_LABEL) for one in series]
        assert own == (instances if metric.kind == "gauge" else [None] * 2 * len(metric.values)), metric.name
        assert all(LABELS.items() <= one.labels.items() for one in series)
        assert all((one.buckets is not None) == (metric.kind == "histogram") for one in series)


def test_every_update_reaches_its_series_only(triton: _Triton) -> None:
    metrics = TritonMetrics(triton, LABELS, "llama_0_0")
    metrics.add(STEPS, 3)
    metrics.add(REQUESTS, 2, "stop")
    metrics.set(SLOTS, 8)
    metrics.observe(STEP_ROWS, 4)
    by_reason = {series.labels["finish_reason"]: series.updates for series in triton.series(REQUESTS.name)}
    assert by_reason.pop("stop") == [("increment", 2)]
    assert not any(by_reason.values())
    assert triton.series(STEPS.name)[0].updates == [("increment", 3)]
    assert triton.series(SLOTS.name)[0].updates == [("set", 8)]
    assert triton.series(STEP_ROWS.name)[0].updates == [("observe", 4)]
    assert triton.series(LAST_STEP.name)[0].updates == []


def test_series_and_families_outlive_closed_metrics(triton: _Triton) -> None:
    metrics = TritonMetrics(triton, LABELS, "llama_0_0")
    kept = [weakref.ref(one) for family in triton.families.values() for one in [family, *family.series]]
    metrics.close()
    del metrics
    for family in triton.families.values():
        family.series.clear()
    del family
    triton.families.clear()
    gc.collect()
    assert all(one() is not None for one in kept)


def test_log_records_are_written_at_tritons_nearest_level() -> None:
    lines: list[str] = []
    log = logging.Logger("a logger of its own")
    log.addHandler(TritonLogHandler(*(lambda line, level=level: lines.append(f"{level} {line}") for level in "IWE")))
    log.debug("1")
    log.info("%s", 2)
    log.warning("3")
    log.error("4")
    log.critical("5")
    assert lines == ["I llama: 1", "I llama: 2", "W llama: 3", "E llama: 4", "E llama: 5"]
