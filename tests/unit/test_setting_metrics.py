"""A metrics endpoint's text as numbers by name."""

from __future__ import annotations

from perf.metrics import parse

TEXT = """\
# HELP llama_requests_total Rows answered
# TYPE llama_requests_total counter
llama_requests_total{finish_reason="length",model="llama",version="1"} 3
llama_requests_total{finish_reason="stop",model="llama",version="1"} 2
llama_queue_time_seconds_sum{model="llama",version="1"} 1.5e-1
nv_inference_count{model="llama",version="1"} 5
nv_inference_count{model="another",version="1"} 70
nv_inference_count{model="llama2",version="1"} 700
nv_cpu_memory_total_bytes 25

"""


def test_series_of_one_name_are_not_added_up_or_another_models_are() -> None:
    assert parse(TEXT) == {
        "llama_requests_total": 5.0,
        "llama_queue_time_seconds_sum": 0.15,
        "nv_inference_count": 5.0,
        "nv_cpu_memory_total_bytes": 25.0,
    }
