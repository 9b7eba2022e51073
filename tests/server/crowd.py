"""Many requests at once: all in flight together, and, behind a long one, in one batch of Triton's."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from server.metrics import PENDING, level
from server.polling import until
from server.servers import Statistics, get_json
from server.wires import WIRES, Answer, Inputs, Refusal, ask, grpc
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
"""Every input that has an effect: Triton batches only requests that bring the same ones."""


def at_once(jobs: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Run the jobs in a thread each, let go together, and return their results in order."""
    gate = threading.Barrier(len(jobs))

    def run(job: Callable[[], _Result]) -> _Result:
        gate.wait(timeout=60)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


def in_one_batch(server: LocalTriton, jobs: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Run the jobs while the model takes no more requests, so that they queue and Triton batches them."""
    slots = len(_plugs(server)[0]["text_input"])
    with ThreadPoolExecutor(2) as pool:
        plugs: list[Future[None]] = []
        for plug in _plugs(server):
            plugs.append(pool.submit(_keep_busy, server, plug))
            if len(plugs) == 1 and _is_inflight(server):
                until(lambda: level(server, "llama_slots_in_use") == slots, lambda: "all slots are taken")
        waits = "llama_waiting_rows" if _is_inflight(server) else PENDING
        until(lambda: level(server, waits) >= 1, lambda: "a request waits for the model")
        results = at_once(jobs)
        for done in plugs:
            done.result()
    return results


def batches_of(server: LocalTriton, statistics: Statistics) -> dict[int, int]:
    """Return how many batches of each size the jobs of one call of `in_one_batch` were executed in."""
    batches = Counter(statistics.batches())
    batches.subtract(len(plug["text_input"]) for plug in _plugs(server))
    return {size: count for size, count in batches.items() if count}


def _plugs(server: LocalTriton) -> list[dict[str, list[list[object]]]]:
    """Return the two requests that keep the model from taking others.

    In-flight, it takes requests while there are slots: one request takes them all, and another one waits for them.
    Otherwise it takes a batch at a time: while one is executed, the other one waits. The two bring different inputs,
    so that they are never one batch.
    """
    rows = int(level(server, "llama_slots")) if _is_inflight(server) else 1
    first = {"text_input": "Wait", "max_tokens": 60, "min_tokens": 60, "temperature": 0.0}
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


def everywhere(server: LocalTriton, **inputs: object) -> Answer:
    """Ask the same in all four ways at once; the answers must be equal, so the inputs have to determine the text."""
    answers = at_once([partial(ask, server, wire, **inputs) for wire in WIRES])
    assert answers == [answers[0]] * len(WIRES), answers
    return answers[0]
