"""The model's metrics on Triton's metrics endpoint.

Each instance of a model is a process, and series with equal labels are shared by all instances. Shared counters and
histograms add up, but a shared gauge would show the last writer's value, so gauges have a label with the instance.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llama_engine.observability.metrics import METRICS, Metric

if TYPE_CHECKING:
    import triton_python_backend_utils as pb_utils

INSTANCE_LABEL = "model_instance"


class TritonMetrics:
    """The metrics of one instance on Triton's endpoint; implements `Registry`."""

    def __init__(
        self,
        make_family: type[pb_utils.MetricFamily],
        labels: Mapping[str, str],
        instance: str,
        info: Mapping[str, str],
    ) -> None:
        """Create all series. labels: common to every series. instance: a unique name. info: values of `Metric.info`."""
        kinds = {
            "counter": make_family.COUNTER,
            "gauge": make_family.GAUGE,
            "histogram": make_family.HISTOGRAM,
        }
        # A family must outlive its metrics.
        self._families: list[pb_utils.MetricFamily] = []
        self._series: dict[tuple[Metric, str], pb_utils.Metric] = {}
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
