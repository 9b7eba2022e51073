"""`make tune`: the config of a point, and the choice within the SLO."""

from __future__ import annotations

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf.environment import ROOT
from perf.tune import Point, best, configured, grid

CONFIG = (ROOT / "model_repository" / "llama" / "config.pbtxt").read_text()


@pytest.mark.parametrize("point", grid())
def test_triton_reads_a_points_settings_from_its_config(point: Point) -> None:
    config = text_format.Parse(configured(CONFIG, point), ModelConfig())
    batcher = config.dynamic_batching
    assert config.max_batch_size == point.slots
    assert batcher.max_queue_delay_microseconds == point.delay_us
    assert list(batcher.preferred_batch_size) == list(point.preferred)


def measurement(rate: float, p95: float, errors: int = 0) -> dict[str, object]:
    return {"tokens_per_second": rate, "latency_ms": {"p95": p95}, "errors": errors}


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (measurement(200.0, 90.0), "other"),
        # Faster, but beyond the SLO, or with errors, or not measured.
        (measurement(200.0, 110.0), "small"),
        (measurement(200.0, 90.0, errors=1), "small"),
        ({"not_run": "no time is left"}, "small"),
    ],
)
def test_the_fastest_point_within_the_slo_is_the_best(other: dict[str, object], key: str) -> None:
    assert best({"small": measurement(100.0, 50.0), "other": other}, 100.0) == key
