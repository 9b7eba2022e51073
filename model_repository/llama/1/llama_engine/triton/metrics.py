"""Our metrics on the metrics endpoint of the program that the engine runs in (Triton's).

Instances of one model are processes that write into the same series wherever the labels are the same. Of counters and
histograms that is the sum, as it should be; of a gauge the last one to write would win, so each has gauges of its own.
Knows families and series as Triton's Python backend has them; who makes the families is handed in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Protocol

from llama_engine.observability.metrics import METRICS, Metric

INSTANCE_LABEL = "model_instance"


class Series(Protocol):
    """One metric under its labels. Which of these it takes depends on its kind."""

    def increment(self, value: float) -> None:
        """Increase a counter."""

    def set(self, value: float) -> None:
        """Set a gauge."""

    def observe(self, value: float) -> None:
        """Put a value into a histogram."""


class Family(Protocol):
    """What the series of one metric have in common."""

    def Metric(self, labels: dict[str, str] = ..., buckets: list[float] = ...) -> Series:  # noqa: N802 - Triton's name
        """Make a series."""


class TritonMetrics:
    """The metrics of one instance: a Registry."""

    def __init__(self, make_family: Callable[[Metric], Family], labels: Mapping[str, str], instance: str) -> None:
        """labels: of every series. instance: the name of this process among those of the model."""
        # A family must outlive its metrics.
        self._families: list[Family] = []
        self._series: dict[tuple[Metric, str], Series] = {}
        for metric in METRICS:
            family = make_family(metric)
            self._families.append(family)
            for value in metric.values:
                own = {
                    **labels,
                    **({metric.label: value} if metric.label else {}),
                    **({INSTANCE_LABEL: instance} if metric.kind == "gauge" else {}),
                }
                self._series[metric, value] = (
                    family.Metric(labels=own, buckets=list(metric.buckets))
                    if metric.kind == "histogram"
                    else family.Metric(labels=own)
                )

    def add(self, metric: Metric, amount: float, value: str = "") -> None:
        """Increase a counter."""
        self._series[metric, value].increment(amount)

    def set(self, metric: Metric, amount: float) -> None:
        """Set a gauge."""
        self._series[metric, ""].set(amount)

    def observe(self, metric: Metric, amount: float) -> None:
        """Put a value into a histogram."""
        self._series[metric, ""].observe(amount)

    def close(self) -> None:
        """Leave series and families to Triton: never destroy them, not even with the interpreter.

        Destroyed at the interpreter's end they end the process in signal 11 on Triton 2.51: what they talk to Triton by
        is gone by then. Destroyed sooner they would take the last counts of an unloaded model off the endpoint.
        """
        for one in [*self._series.values(), *self._families]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
