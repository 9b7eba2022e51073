"""Exactness under random traffic: a text depends neither on the batch nor on clients that leave before the end.

In INT8, and in FP32 with few slots and small prefills: sequences wait, join others, and are prefilled in chunks. That
greedy texts are those of transformers is tested in tests/engine/test_exactness.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import pytest
from notes import Note
from server.batches import random_request
from server.clients import Answer, ask, generate
from server.metrics import Metrics
from server.streams import STREAM_WIRES, GrpcStream, events, sse_response, whole
from triton_local.server import LocalTriton

CLIENTS = 20
LEAVING = 0.15
"""Share of the clients that leave before the end."""

MAX_CHUNKS_BEFORE_LEAVING = 6


def _send(server: LocalTriton, request: Mapping[str, object], number: int, pause: float) -> Answer:
    """Send over one of the endpoints, in turn."""
    time.sleep(pause)
    return ask(server, generate, **request) if number % 3 == 2 else whole(server, STREAM_WIRES[number % 3], request)


def _leave(server: LocalTriton, request: Mapping[str, object], after: int, pause: float) -> None:
    """Send, and leave after some chunks, or at once."""
    time.sleep(pause)
    # Long enough to still run then.
    request = {**request, "max_tokens": 150, "min_tokens": 150, "stream": True}
    if after % 2:
        with sse_response(server, request) as response:
            list(islice(events(response), after))
    else:
        with GrpcStream(server) as stream:
            stream.ask(request)
            for _ in range(after):
                if stream.next().final:
                    break
            stream.cancel()


@pytest.mark.parametrize(
    ("server", "requests"),
    [("slow_streaming", 40), pytest.param("fp32_streaming", 150, marks=pytest.mark.long)],
    indirect=["server"],
)
def test_texts_do_not_depend_on_the_traffic(server: LocalTriton, requests: int, note: Note) -> None:
    draw = random.Random(501)
    pool = [random_request(draw) for _ in range(requests // 4)]
    alone = [ask(server, generate, **request) for request in pool]
    metrics = Metrics(server)
    with ThreadPoolExecutor(CLIENTS) as clients:
        runs, leaving = [], []
        for number in range(requests):
            index, pause = draw.randrange(len(pool)), draw.uniform(0, 0.1)
            if draw.random() < LEAVING:
                after = draw.randint(0, MAX_CHUNKS_BEFORE_LEAVING)
                leaving.append(clients.submit(_leave, server, pool[index], after, pause))
            else:
                runs.append((index, clients.submit(partial(_send, server, pool[index], number, pause))))
        for index, run in runs:
            assert run.result() == alone[index], pool[index]
        for client in leaving:
            client.result()
    metrics.wait(Metrics.idle, "all slots are free")
    cancelled = metrics.grown("llama_cancellations_total")
    note(f"traffic: {len(runs)} answers, {len(leaving)} clients left, {cancelled:.0f} were cancelled in time")
    assert len(runs) > 0.7 * requests
    assert 1 <= cancelled <= len(leaving)
    assert metrics.grown("llama_step_errors_total") == 0
