"""The server's counters as the parts of a request, and the parts as a picture."""

import os
import subprocess
import sys

import pytest

from perf.overhead.processes import MODEL, ServerProcesses, finished_children_seconds
from perf.overhead.served import Counters, Served, processor_parts, request_parts
from perf.overhead.stopwatch import Node, flatten
from perf.report.plots import icicle


def _counters(count: int, queued: float, first: float, whole: float) -> Counters:
    sums = {"queue_time": queued, "time_to_first_token": first, "request_latency": whole}
    metrics = {f"llama_{name}_seconds_sum": value for name, value in sums.items()}
    metrics |= {f"llama_{name}_seconds_count": float(count) for name in sums}
    triton = {"queue": 2.0, "compute_input": 0.0, "compute_infer": 0.0, "compute_output": 0.0, "requests": float(count)}
    return Counters(metrics, triton)


def _served() -> Served:
    # Two requests that took 6 s each: 1 in Triton's queue, 0.5 for a slot, 1 to the first token, 3 to the last.
    return Served(10.0, 40, 2, 6.0, _counters(2, 1.0, 3.0, 9.0), {MODEL: 8.0, "tritonserver": 0.5})


def test_counters_cover_one_load_alone_and_without_observations_have_no_mean() -> None:
    grown = _counters(5, 4.0, 9.0, 20.0) - _counters(3, 1.0, 2.0, 3.0)
    assert grown.metrics["llama_request_latency_seconds_sum"] == 17.0
    assert grown.mean("llama_queue_time_seconds") == 1.5
    assert grown.triton["requests"] == 2.0
    with pytest.raises(ValueError, match="llama_queue_time_seconds has no observations"):
        _counters(0, 0.0, 0.0, 0.0).mean("llama_queue_time_seconds")


def test_a_requests_parts_add_up_to_its_latency_at_the_client() -> None:
    request = request_parts(_served(), tokenization=0.1)
    assert request.seconds == 6.0
    assert {name: round(part.seconds, 9) for name, part in request.parts.items()} == {
        "Triton's queue": 1.0,
        "tokenization, as without a server": 0.1,
        "waiting for a slot": 0.5,
        "prompt to first token": 1.0,
        "decode steps": 3.0,
    }
    (rest,) = [part for part in flatten(request, 20) if "the rest of the request: client" in part.name]
    assert rest.seconds == pytest.approx(0.4)


def test_core_seconds_are_divided_among_the_processes() -> None:
    cores = processor_parts(_served())
    assert cores.seconds == 10.0 * len(os.sched_getaffinity(0))
    assert {name: part.seconds for name, part in cores.parts.items()} == {MODEL: 8.0, "tritonserver": 0.5}


def test_a_server_without_a_model_process_is_refused() -> None:
    with pytest.raises(RuntimeError, match=f"process {os.getpid()} has no model's process among its children"):
        ServerProcesses.of(os.getpid())


def test_finished_children_count_their_processor_time() -> None:
    before = finished_children_seconds()
    subprocess.run([sys.executable, "-c", "for _ in range(3_000_000): pass"], check=True)
    assert finished_children_seconds() > before


def test_the_picture_is_deterministic_and_names_all_parts_with_room() -> None:
    parts = [*flatten(request_parts(_served(), 0.1), 20), *flatten(processor_parts(_served()), 40)]
    drawn = icicle(parts, "a made-up load")
    assert drawn == icicle(parts, "a made-up load")
    # Letters are outlines, with the text in a comment.
    shown = (
        "a made-up load",
        "mean request: 6 s of one request",
        "decode steps 50.0 %",
        "Triton's queue 16.7 %",
        MODEL,
    )
    for words in shown:
        assert f"<!-- {words}" in drawn
    # A share of 1.7 % is too narrow for a name.
    assert "<!-- tokenization" not in drawn


def test_a_negative_rest_has_no_width_and_an_account_without_parts_is_refused() -> None:
    whole = Node("all", seconds=1.0)
    whole.take("more than all", 1.25)
    parts = flatten(whole, 1)
    assert [part.seconds for part in parts] == [1.0, 1.25, -0.25]
    assert "<!-- the rest of all" not in icicle(parts, "")
    with pytest.raises(ValueError, match="an account without parts can't be drawn"):
        icicle([], "")
