"""Exactness under random traffic: a text depends neither on the batch nor on clients that leave before the end.

In INT8, and in FP32 with few slots and small prefills: sequences wait, join others, and are prefilled in chunks. That
greedy texts are those of transformers is tested in tests/engine/test_greedy.py.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import pytest
from end_to_end.batches import random_request
from end_to_end.metrics import Metrics
from end_to_end.streams import STREAM_WIRES, events, sse_response
from end_to_end.wires import Answer, ask, generate
from triton_local.server import LocalTriton

CLIENTS = 20


def _send(server: LocalTriton, request: Mapping[str, object], number: int) -> Answer:
    """Send over one of the endpoints, in turn."""
    return ask(server, generate, **request) if number % 3 == 2 else STREAM_WIRES[number % 3](server, request).whole


def _leave(server: LocalTriton, request: Mapping[str, object], after: int) -> None:
    """Send a request that would still run then, and leave after some chunks."""
    with sse_response(server, {**request, "max_tokens": 600, "min_tokens": 600}) as response:
        list(islice(events(response), after))


@pytest.mark.parametrize(
    ("server", "requests"),
    [("streaming", 40), pytest.param("fp32_streaming", 150, marks=pytest.mark.long)],
    indirect=["server"],
)
def test_texts_do_not_depend_on_the_traffic(server: LocalTriton, requests: int) -> None:
    draw = random.Random(501)
    pool = [random_request(draw) for _ in range(requests // 4)]
    alone = [ask(server, generate, **request) for request in pool]
    metrics = Metrics(server)
    with ThreadPoolExecutor(CLIENTS) as clients:
        runs, leaving = [], []
        for number in range(requests):
            index = draw.randrange(len(pool))
            if number % 7 == 0:
                leaving.append(clients.submit(_leave, server, pool[index], draw.randint(0, 6)))
            else:
                runs.append((index, clients.submit(partial(_send, server, pool[index], number))))
        for index, run in runs:
            assert run.result() == alone[index], pool[index]
        for client in leaving:
            client.result()
    metrics.wait(Metrics.idle, "all slots are free")
    assert 1 <= metrics.grown("llama_cancellations_total") <= len(leaving)
    assert metrics.grown("llama_step_errors_total") == 0
