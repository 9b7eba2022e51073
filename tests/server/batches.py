"""Jobs whose requests Triton puts into one batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from server.clients import Inputs, Refusal, at_once, grpc
from server.metrics import PENDING, level
from server.servers import Statistics, get_json, until
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


def in_one_batch(server: LocalTriton, jobs: Sequence[Callable[[], _Result]]) -> tuple[list[_Result], dict[int, int]]:
    """Run the jobs while the model takes no requests, so that they queue and Triton batches them.

    Returns their results, and how many batches of each size Triton executed them in.
    """
    statistics = Statistics(server)
    plugs = _plugs(server)
    slots = len(plugs[0]["text_input"])
    with ThreadPoolExecutor(2) as pool:
        plugged: list[Future[None]] = []
        for plug in plugs:
            plugged.append(pool.submit(_keep_busy, server, plug))
            if len(plugged) == 1 and _is_inflight(server):
                until(lambda: level(server, "llama_slots_in_use") == slots, lambda: "all slots are taken")
        waits = "llama_waiting_rows" if _is_inflight(server) else PENDING
        until(lambda: level(server, waits) >= 1, lambda: "a request waits for the model")
        results = at_once(jobs)
        for done in plugged:
            done.result()
    batches = Counter(statistics.batches())
    batches.subtract(len(plug["text_input"]) for plug in plugs)
    return results, {size: count for size, count in batches.items() if count}


def _plugs(server: LocalTriton) -> list[dict[str, list[list[object]]]]:
    """Return two requests that keep the model from taking others.

    In-flight, the first takes all slots and the second waits for one. With `scheduling: batch` the first is executed
    while the second waits. Their inputs differ, so that Triton never batches them together.
    """
    rows = int(level(server, "llama_slots")) if _is_inflight(server) else 1
    # Long enough to be seen: metrics may be 0.2 s old, and 60 tokens take 0.3 s on a fast machine.
    first = {"text_input": "Wait", "max_tokens": 150, "min_tokens": 150, "temperature": 0.0}
    return [
        {name: [[value]] * rows for name, value in first.items()},
        {name: [[value]] for name, value in {**first, "top_k": 0}.items()},
    ]


def _is_inflight(server: LocalTriton) -> bool:
    parameters = get_json(server, "/v2/models/llama/config")["parameters"]
    return bool(parameters["scheduling"]["string_value"] == "inflight")


def _keep_busy(server: LocalTriton, inputs: Inputs) -> None:
    answers = grpc(server, inputs)
    assert not isinstance(answers, Refusal), answers
