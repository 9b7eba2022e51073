"""The engine in its host: which log lines, metrics and settings go where."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import dataclass, field

import pytest
from llama_engine.observability.metrics import LAST_STEP, METRICS, REQUESTS, SLOTS, STEP_ROWS, STEPS, Metric
from llama_engine.triton.config import gpu_of, instance_name, is_decoupled, settings_parameters
from llama_engine.triton.logger import TritonLogHandler
from llama_engine.triton.metrics import INSTANCE_LABEL, TritonMetrics

CPU = {"model_instance_name": "llama_0_0", "model_instance_kind": "CPU", "model_instance_device_id": "0"}
LABELS = {"model": "llama", "version": "1"}


@dataclass
class Series:
    """Keeps what it is told, as Triton's would."""

    labels: dict[str, str]
    buckets: list[float] | None
    told: list[tuple[str, float]] = field(default_factory=list)

    def increment(self, value: float) -> None:
        self.told.append(("increment", value))

    def set(self, value: float) -> None:
        self.told.append(("set", value))

    def observe(self, value: float) -> None:
        self.told.append(("observe", value))


class Family:
    def __init__(self) -> None:
        self.series: list[Series] = []

    def Metric(  # noqa: N802 - Triton's name
        self, labels: dict[str, str] | None = None, buckets: list[float] | None = None
    ) -> Series:
        self.series.append(Series(labels or {}, buckets))
        return self.series[-1]


@pytest.fixture
def families() -> dict[Metric, Family]:
    return {metric: Family() for metric in METRICS}


def test_levels_of_two_instances_are_one_series_or_what_they_count_is_two(families: dict[Metric, Family]) -> None:
    for instance in ("llama_0_0_gpu0", "llama_0_0_gpu1"):
        TritonMetrics(families.__getitem__, LABELS, instance)
    for metric, family in families.items():
        own = [series.labels.get(INSTANCE_LABEL) for series in family.series]
        both = ["llama_0_0_gpu0", "llama_0_0_gpu1"] if metric.kind == "gauge" else [None] * 2 * len(metric.values)
        assert own == both, metric.name
        assert all(LABELS.items() <= series.labels.items() for series in family.series)
        assert all((series.buckets is not None) == (metric.kind == "histogram") for series in family.series)


def test_a_value_goes_to_another_series(families: dict[Metric, Family]) -> None:
    metrics = TritonMetrics(families.__getitem__, LABELS, "llama_0_0")
    metrics.add(STEPS, 3)
    metrics.add(REQUESTS, 2, "stop")
    metrics.set(SLOTS, 8)
    metrics.observe(STEP_ROWS, 4)
    assert families[STEPS].series[0].told == [("increment", 3)]
    told = {series.labels["finish_reason"]: series.told for series in families[REQUESTS].series}
    assert told.pop("stop") == [("increment", 2)]
    assert not any(told.values())
    assert families[SLOTS].series[0].told == [("set", 8)]
    assert families[STEP_ROWS].series[0].told == [("observe", 4)]
    assert families[LAST_STEP].series[0].told == []


def test_series_or_families_are_destroyed_once_the_metrics_are_closed(families: dict[Metric, Family]) -> None:
    metrics = TritonMetrics(families.__getitem__, LABELS, "llama_0_0")
    kept = [weakref.ref(one) for family in families.values() for one in [family, *family.series]]
    metrics.close()
    del metrics
    for family in families.values():
        family.series.clear()
    del family
    families.clear()
    gc.collect()
    assert all(one() is not None for one in kept)


def test_a_record_is_written_at_another_level_or_not_at_all() -> None:
    lines: list[str] = []
    log = logging.Logger("a logger of its own")
    log.addHandler(TritonLogHandler(*(lambda line, level=level: lines.append(f"{level} {line}") for level in "IWE")))
    log.debug("1")
    log.info("%s", 2)
    log.warning("3")
    log.error("4")
    log.critical("5")
    assert lines == ["I llama: 1", "I llama: 2", "W llama: 3", "E llama: 4", "E llama: 5"]


def test_two_instances_have_one_name() -> None:
    """Those of one group on several GPUs have, in Triton's own words."""
    gpus = [{**CPU, "model_instance_kind": "GPU", "model_instance_device_id": str(gpu)} for gpu in range(2)]
    names = [instance_name(args) for args in (CPU, *gpus)]
    assert names == ["llama_0_0", "llama_0_0_gpu0", "llama_0_0_gpu1"]
    assert [gpu_of(args) for args in (CPU, *gpus)] == [None, 0, 1]


def test_the_backends_parameters_are_taken_for_settings() -> None:
    config = {
        "parameters": {
            "quantization": {"string_value": "int8"},
            "EXECUTION_ENV_PATH": {"string_value": "/env.tar.gz"},
            "FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": "no"},
        },
        "model_transaction_policy": {"decoupled": True},
    }
    assert settings_parameters(config) == {"quantization": "int8"}
    assert is_decoupled(config)
    assert settings_parameters({}) == {}
    assert not is_decoupled({})
