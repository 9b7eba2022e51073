"""`make tune`: the config of a point, and the choice within the SLO."""

from __future__ import annotations

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf.environment import ROOT
from perf.tune import Figures, Point, best, configured, grid

CONFIG = (ROOT / "model_repository" / "llama" / "config.pbtxt").read_text()
SMALL, LARGE = Point(8, 0, ()), Point(64, 10_000, (4, 8))


@pytest.mark.parametrize("point", grid())
def test_triton_reads_a_points_settings_from_its_config(point: Point) -> None:
    config = text_format.Parse(configured(CONFIG, point), ModelConfig())
    batcher = config.dynamic_batching
    assert config.max_batch_size == point.slots
    assert batcher.max_queue_delay_microseconds == point.delay_us
    assert list(batcher.preferred_batch_size) == list(point.preferred or (point.slots,))


def test_the_fastest_point_within_the_slo_is_the_best() -> None:
    assert best([(SMALL, Figures(100.0, 50.0, 0)), (LARGE, Figures(200.0, 90.0, 0))], 100.0) == LARGE


def test_a_faster_point_beyond_the_slo_is_not_the_best() -> None:
    assert best([(SMALL, Figures(100.0, 50.0, 0)), (LARGE, Figures(200.0, 110.0, 0))], 100.0) == SMALL
