"""What requests leave in memory: nothing in Python, and in the tokenizer a cache that ends."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from typing import Any, cast

import numpy as np
from engine.backend_utils import Request, decoding
from engine.engines import engine_of
from engine.metrics import RecordingRegistry
from engine.scheduling import SECONDS, STUCK_SECONDS
from llama_engine.model.loader import Checkpoint
from llama_engine.observability.metrics import Metric
from llama_engine.observability.stats import Stats
from llama_engine.scheduler import Scheduler

SLOTS = 16
WARM_UP, MEASURED = 20, 40
"""Batches of SLOTS requests."""
BYTES_A_REQUEST = 100
"""What grows and shrinks by chance is up to 50 KiB in all, however many requests there are, so a leak of one int, float
or short tuple for each request (24 to 64 bytes) goes unnoticed: to notice 50 bytes takes four times the requests."""


class _ForgetfulRegistry(RecordingRegistry):
    """Keeps no observation, as Triton's histograms."""

    def observe(self, metric: Metric, amount: float) -> None:
        pass


def _request(randomness: random.Random) -> Request:
    """Return a request of one of every sort: streamed or not, greedy or sampled, complete or refused."""
    inputs = {
        "text_input": np.array([[f"Return a list of {randomness.random()}".encode()]], np.object_),
        "max_tokens": np.array([[randomness.choice([0, 1, 2, 2, 2])]], np.int32),
        "stream": np.array([[randomness.random() < 0.5]]),
        "temperature": np.array([[randomness.choice([0.0, 0.9])]], np.float32),
        "stop_words": np.array([[randomness.choice([b"a", b"the"])]], np.object_),
    }
    return Request(**inputs)


def test_the_bytes_in_use_are_the_same_after_hundreds_of_requests(fp32: Checkpoint) -> None:
    def answer(randomness: random.Random, batches: int) -> None:
        for _ in range(batches):
            requests = [_request(randomness) for _ in range(SLOTS)]
            sequences = [one for request in requests for one in decoder.decode(cast(Any, request)).sequences]
            scheduler.add(sequences)
            scheduler.wait_until_finished(sequences)
            deadline = time.monotonic() + SECONDS
            while not all(request.sent and request.sent[-1][1] for request in requests):
                assert time.monotonic() < deadline, "a request isn't answered"
                time.sleep(0.001)

    def in_use() -> int:
        # The same requests last: the engine refers to the sequences of its last step.
        answer(random.Random(2), 1)
        # And the stats to what isn't passed on yet.
        deadline = time.monotonic() + SECONDS
        while decoder.stats._observations:
            assert time.monotonic() < deadline, "the stats aren't passed on"
            time.sleep(0.01)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    engine, stats = engine_of(fp32, SLOTS), Stats(_ForgetfulRegistry(), SLOTS)
    with decoding(engine, stats, "summary") as decoder:
        scheduler = Scheduler(engine, decoder.dispatcher, stats, STUCK_SECONDS)
        randomness = random.Random(1)
        tracemalloc.start()
        try:
            answer(randomness, WARM_UP)
            before = in_use()
            answer(randomness, MEASURED)
            grown = in_use() - before
        finally:
            tracemalloc.stop()
            scheduler.stop(SECONDS)
    assert grown < BYTES_A_REQUEST * MEASURED * SLOTS, f"{grown / MEASURED / SLOTS:.0f} bytes a request"
