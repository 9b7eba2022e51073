"""Our metrics on Triton's metrics endpoint.

The instances of a model are processes that write into the same series wherever the labels are the same. For counters
and histograms that yields the sum; of a gauge the last writer would win, so each instance has gauges of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Protocol

from llama_engine.observability.metrics import METRICS, Metric

INSTANCE_LABEL = "model_instance"


class Series(Protocol):
    """One metric under its labels. Which of these methods work depends on its kind."""

    def increment(self, value: float) -> None:
        """Increase a counter."""

    def set(self, value: float) -> None:
        """Set a gauge."""

    def observe(self, value: float) -> None:
        """Observe a value in a histogram."""


class Family(Protocol):
    """The series of one metric."""

    def Metric(self, labels: dict[str, str] = ..., buckets: list[float] = ...) -> Series:  # noqa: N802 - Triton's name
        """Make a series."""


class MakeFamily(Protocol):
    """pb_utils.MetricFamily."""

    @property
    def COUNTER(self) -> int:  # noqa: N802 - Triton's name
        """The kind of a counter."""

    @property
    def GAUGE(self) -> int:  # noqa: N802 - Triton's name
        """The kind of a gauge."""

    @property
    def HISTOGRAM(self) -> int:  # noqa: N802 - Triton's name
        """The kind of a histogram."""

    def __call__(self, name: str, description: str, kind: int) -> Family:
        """Make the family of a metric."""


class TritonMetrics:
    """The metrics of one instance: a Registry."""

    def __init__(
        self, make_family: MakeFamily, labels: Mapping[str, str], instance: str, info: Mapping[str, str]
    ) -> None:
        """labels: of every series. instance: unique among the instances of the model. info: values of info labels."""
        kinds = {
            "counter": make_family.COUNTER,
            "gauge": make_family.GAUGE,
            "histogram": make_family.HISTOGRAM,
        }
        # A family must outlive its metrics.
        self._families: list[Family] = []
        self._series: dict[tuple[Metric, str], Series] = {}
        for metric in METRICS:
            family = make_family(name=metric.name, description=metric.help, kind=kinds[metric.kind])
            self._families.append(family)
            for value in metric.values:
                series_labels = {
                    **labels,
                    **({metric.label: value} if metric.label else {}),
                    **({INSTANCE_LABEL: instance} if metric.kind == "gauge" else {}),
                    **{name: info[name] for name in metric.info},
                }
                self._series[metric, value] = (
                    family.Metric(labels=series_labels, buckets=list(metric.buckets))
                    if metric.kind == "histogram"
                    else family.Metric(labels=series_labels)
                )

    def add(self, metric: Metric, amount: float, value: str = "") -> None:
        """Increase a counter."""
        self._series[metric, value].increment(amount)

    def set(self, metric: Metric, amount: float) -> None:
        """Set a gauge."""
        self._series[metric, ""].set(amount)

    def observe(self, metric: Metric, amount: float) -> None:
        """Observe a value in a histogram."""
        self._series[metric, ""].observe(amount)

    def close(self) -> None:
        """Keep series and families alive forever, even past the interpreter's end.

        Destroyed at the interpreter's end, they end the process with signal 11 on Triton 2.51: their channel to Triton
        is gone by then. Destroyed sooner, they would take the last counts of an unloaded model off the endpoint.
        """
        for referenced in [*self._series.values(), *self._families]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(referenced))
