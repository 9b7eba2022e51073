"""The model's metrics on Triton's metrics endpoint.

Each instance of a model is a process, and series with equal labels are shared by all instances. Shared counters and
histograms add up, but a shared gauge would show the last writer's value, so gauges have a label with the instance.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Protocol

from llama_engine.observability.metrics import METRICS, Metric

INSTANCE_LABEL = "model_instance"


class Series(Protocol):
    """pb_utils.Metric: one metric with its label values. The metric's kind determines which method is supported."""

    def increment(self, value: float) -> None:
        """Increase a counter."""

    def set(self, value: float) -> None:
        """Set a gauge."""

    def observe(self, value: float) -> None:
        """Observe a value in a histogram."""


class Family(Protocol):
    """pb_utils.MetricFamily, as an instance: the series of one metric."""

    def Metric(self, labels: dict[str, str] = ..., buckets: list[float] = ...) -> Series:  # noqa: N802 - Triton's name
        """Create the series with these label values. buckets: upper bounds, of a histogram only."""


class MakeFamily(Protocol):
    """pb_utils.MetricFamily, as a class: creates the family of a metric."""

    @property
    def COUNTER(self) -> int:  # noqa: N802 - Triton's name
        """The constant for a counter."""

    @property
    def GAUGE(self) -> int:  # noqa: N802 - Triton's name
        """The constant for a gauge."""

    @property
    def HISTOGRAM(self) -> int:  # noqa: N802 - Triton's name
        """The constant for a histogram."""

    def __call__(self, name: str, description: str, kind: int) -> Family:
        """Create the family of a metric. kind: one of the constants."""


class TritonMetrics:
    """The metrics of one instance on Triton's endpoint; implements `Registry`."""

    def __init__(
        self, make_family: MakeFamily, labels: Mapping[str, str], instance: str, info: Mapping[str, str]
    ) -> None:
        """Create all series. labels: common to every series. instance: a unique name. info: values of `Metric.info`."""
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

    def set(self, metric: Metric, amount: float, value: str = "") -> None:
        """Set a gauge."""
        self._series[metric, value].set(amount)

    def observe(self, metric: Metric, amount: float) -> None:
        """Observe a value in a histogram."""
        self._series[metric, ""].observe(amount)

    def close(self) -> None:
        """Increment the reference counts of series and families so that Python never destroys them.

        Destroying them at interpreter shutdown crashes the process (signal 11, Triton 2.51), because their channel to
        Triton is already closed. Destroying them earlier would remove the model's last counts from the endpoint.
        """
        for referenced in [*self._series.values(), *self._families]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(referenced))
