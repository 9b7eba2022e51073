"""Jobs whose requests Triton puts into one batch, and the set of inputs that they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from end_to_end.metrics import PENDING, level
from end_to_end.servers import get_json, until
from end_to_end.wires import Refusal, at_once, grpc
from triton_local.server import LocalTriton

_Result = TypeVar("_Result")

FULL_SET = {
    "max_tokens": 16,
    "min_tokens": 0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": 0,
    "stop_words": [""],
    "bad_words": [""],
    "exclude_input_in_output": True,
}
"""Every input that has an effect: Triton batches only requests with the same set of inputs."""

# Long enough to be seen: metrics may be 0.2 s old, and a step takes a millisecond or two on a fast machine.
_PLUG = {"text_input": "Wait", "max_tokens": 480, "min_tokens": 480, "temperature": 0.0}


def in_one_batch(server: LocalTriton, jobs: Sequence[Callable[[], _Result]]) -> tuple[list[_Result], dict[int, int]]:
    """Run the jobs while the model takes no requests, so that they queue and Triton batches them.

    Two requests keep the model from taking others: in-flight, the first takes all slots and the second waits for one;
    with `scheduling: batch` the first is executed while the second waits. Their inputs differ, so that Triton never
    batches them together. jobs: each a request of one row. Returns their results, and how many batches of each size
    Triton executed them in.
    """
    before = _batches(server)
    config = get_json(server, "/v2/models/llama/config")
    inflight = config["parameters"]["scheduling"]["string_value"] == "inflight"
    # As many rows as it takes, so that the first runs for long: of one row it may end before a metric shows the second.
    rows = int(level(server, "llama_slots")) if inflight else int(config["max_batch_size"])
    plug = {name: [[value]] * rows for name, value in _PLUG.items()}
    with ThreadPoolExecutor(2) as pool:
        plugged: list[Future[object]] = [pool.submit(partial(grpc, server, plug))]
        if inflight:
            until(lambda: level(server, "llama_slots_in_use") == rows, lambda: "all slots are taken")
        plugged.append(pool.submit(partial(grpc, server, {**_PLUG, "top_k": 0})))
        waits = "llama_waiting_requests" if inflight else PENDING
        until(lambda: level(server, waits) >= 1, lambda: "a request waits for the model")
        results = at_once(jobs)
        assert [done for done in plugged if isinstance(done.result(), Refusal)] == []

    def executed() -> dict[int, int]:
        batches = _batches(server)
        batches.subtract(before + Counter([rows, 1]))
        return {size: count for size, count in batches.items() if count}

    # Triton counts a batch a moment after its answers.
    until(lambda: sum(size * count for size, count in executed().items()) >= len(jobs), lambda: "all jobs are counted")
    return results, executed()


def _batches(server: LocalTriton) -> Counter[int]:
    """Return how many batches of each size Triton has executed."""
    (statistics,) = get_json(server, "/v2/models/llama/stats")["model_stats"]
    return Counter(
        {int(batch["batch_size"]): int(batch["compute_infer"]["count"]) for batch in statistics["batch_stats"]}
    )
