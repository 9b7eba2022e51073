"""The overhead account: the stopwatch, the tree of parts, and the server's counters as parts."""

import os

import pytest

from perf.overhead.processes import MODEL, ServerProcesses
from perf.overhead.served import Served, processor_parts, request_parts
from perf.overhead.stopwatch import Node, flatten, stopwatch


class Work:
    def outer(self) -> str:
        return self.inner() + self.inner()

    def inner(self) -> str:
        return "x"

    def failing(self) -> None:
        self.inner()
        raise ValueError("as it should")


PROBES = [(Work, "outer", "out"), (Work, "inner", "in"), (Work, "failing", "fail")]


def test_calls_are_counted_under_their_callers_until_the_device_is_done() -> None:
    before = dict(vars(Work))
    settled: list[str] = []
    with stopwatch("all", PROBES, lambda: settled.append("settled")) as whole:
        assert Work().outer() == "xx"
        with pytest.raises(ValueError, match="as it should"):
            Work().failing()
        Work().inner()
    assert dict(vars(Work)) == before
    assert {name: part.calls for name, part in whole.parts.items()} == {"out": 1, "fail": 1, "in": 1}
    assert {name: part.calls for name, part in whole.parts["out"].parts.items()} == {"in": 2}
    assert 0 < whole.parts["out"].parts["in"].seconds <= whole.parts["out"].seconds <= whole.seconds
    # Before and after the whole and each of the six calls.
    assert len(settled) == 2 * 7


def test_parts_add_up_to_their_whole() -> None:
    whole = Node("all", seconds=10.0)
    whole.take("small", 1.0)
    large = whole.take("large", 6.0)
    large.take("left", 2.0)
    large.take("right", 3.0)
    parts = flatten(whole, tokens=100)
    assert [(part.name, part.parent, part.seconds, part.share) for part in parts] == [
        ("all", "", 10.0, 1.0),
        ("all/large", "all", 6.0, 0.6),
        ("all/large/right", "all/large", 3.0, 0.3),
        ("all/large/left", "all/large", 2.0, 0.2),
        ("all/large/the rest of large", "all/large", 1.0, 0.1),
        ("all/the rest of all", "all", 3.0, 0.3),
        ("all/small", "all", 1.0, 0.1),
    ]
    assert parts[0].per_token_us == 100_000.0


def _served(observations: float = 2.0) -> Served:
    # Two requests that took 6 s each: 1 in Triton's queue, 0.5 for a slot, 1 to the first token, 3 to the last.
    sums = {"queue_time": 1.0, "time_to_first_token": 3.0, "request_latency": 9.0}
    counted = {f"llama_{name}_seconds_sum": value for name, value in sums.items()}
    counted |= {f"llama_{name}_seconds_count": observations for name in sums}
    counted |= {"nv_inference_queue_duration_us": 2e6, "nv_inference_request_success": 2.0}
    return Served(10.0, 6.0, counted, {MODEL: 8.0, "tritonserver": 0.5})


def test_a_requests_parts_add_up_to_its_latency_at_the_client() -> None:
    request = request_parts(_served(), tokenization=0.1)
    parts = {part.name.rsplit("/", 1)[-1]: round(part.seconds, 9) for part in flatten(request, 20)}
    assert parts == {
        "mean request": 6.0,
        "decode steps": 3.0,
        "Triton's queue": 1.0,
        "prompt to first token": 1.0,
        "waiting for a slot": 0.5,
        "the rest of the request: client, HTTP, JSON, Triton's IPC": 0.4,
        "tokenization, as without a server": 0.1,
    }
    with pytest.raises(ValueError, match="queue_time has no observations"):
        request_parts(_served(observations=0.0), tokenization=0.1)


def test_a_server_without_a_model_process_is_refused() -> None:
    with pytest.raises(RuntimeError, match=f"process {os.getpid()} has no model's process among its children"):
        ServerProcesses.of(os.getpid())


def test_the_cores_of_a_load_are_those_of_its_processes_and_the_rest() -> None:
    cores = processor_parts(_served())
    assert cores.seconds == 10.0 * len(os.sched_getaffinity(0))
    assert {name: part.seconds for name, part in cores.parts.items()} == {MODEL: 8.0, "tritonserver": 0.5}
