"""Many requests at once: all in flight together, and, behind a long one, in one batch of Triton's."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from server.wires import WIRES, Answer, ask
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
    """Run the jobs while the model is busy with other requests, so that they queue and Triton batches them."""
    with ThreadPoolExecutor(2) as pool:
        # The two bring different inputs, so that they are never one batch: while one is executed the other one waits.
        plugs = [pool.submit(_keep_busy, server, **extra) for extra in ({}, {"top_k": 0})]
        while _waiting(server) == 0 and not all(plug.done() for plug in plugs):
            time.sleep(0.01)
        results = at_once(jobs)
        for plug in plugs:
            plug.result()
    return results


def _keep_busy(server: LocalTriton, **extra: object) -> None:
    ask(server, text_input="Wait", max_tokens=40, min_tokens=40, temperature=0.0, **extra)


def _waiting(server: LocalTriton) -> int:
    """Return how many requests are in Triton's queue."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=30) as response:
        metrics: str = response.read().decode()
    pending = re.search(
        r'^nv_inference_pending_request_count\{model="llama",version="1"\} (\d+)', metrics, re.MULTILINE
    )
    assert pending is not None, "Triton doesn't report its queue"
    return int(pending[1])


def everywhere(server: LocalTriton, **inputs: object) -> Answer:
    """Ask the same in all four ways at once; the answers must be equal, so the inputs have to determine the text."""
    answers = at_once([partial(ask, server, wire, **inputs) for wire in WIRES])
    assert answers == [answers[0]] * len(WIRES), answers
    return answers[0]
