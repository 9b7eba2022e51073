"""Clients that cancel, vanish or don't read: their slots become free, and other requests are not affected."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest
import tritonclient.grpc
from server.clients import Answer, ask, at_once, fill, generate
from server.metrics import PENDING, Metrics, all_slots_taken
from server.streams import STREAM_WIRES, Call, GrpcStream, Sse, whole
from triton_local.server import LocalTriton

LONG = {"text_input": "a", "max_tokens": 500, "min_tokens": 500, "temperature": 0.0}
NEIGHBOUR = {"text_input": "Return a list of the", "max_tokens": 60, "min_tokens": 60, "temperature": 1.0, "seed": 8}
FAR_FEWER = 400
"""Tokens of a request of 500 that is cancelled near its beginning."""

NINE = [
    {"text_input": f"Neighbour {index}", "max_tokens": 24, "min_tokens": 24, "temperature": 1.0, "seed": index}
    for index in range(9)
]

SSE_READER = """
import http.client, json, sys, time
host, port = sys.argv[1].split(":")
connection = http.client.HTTPConnection(host, int(port))
body = json.dumps({"text_input": "a", "max_tokens": 500, "min_tokens": 500, "stream": True})
connection.request("POST", "/v2/models/llama/generate_stream", body)
print(connection.getresponse().readline(), flush=True)
time.sleep(600)
"""

GRPC_READER = """
import sys, time
import numpy as np
import tritonclient.grpc as grpc
client = grpc.InferenceServerClient(sys.argv[2])
client.start_stream(lambda result, error: print(result, error, flush=True))
inputs = []
for name, value, kind in [("text_input", b"a", "BYTES"), ("max_tokens", 500, "INT32"), ("min_tokens", 500, "INT32"),
                          ("stream", True, "BOOL")]:
    one = grpc.InferInput(name, [1, 1], kind)
    one.set_data_from_numpy(np.array([[value]], dtype={"BYTES": object, "INT32": np.int32, "BOOL": bool}[kind]))
    inputs.append(one)
client.async_stream_infer("llama", inputs)
time.sleep(600)
"""


def test_a_cancelled_request_frees_its_slot(narrow: LocalTriton, metrics: Metrics) -> None:
    alone = ask(narrow, generate, **NEIGHBOUR)
    metrics.wait_for(1, "llama_requests_total", finish_reason="length")
    # Several times, so that a slot with remains of the request before would show.
    for count in range(1, 5):
        with Call(narrow, LONG) as call, Call(narrow, NEIGHBOUR) as neighbour:
            metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "both run")
            call.cancel()
            assert neighbour.outcome() == alone
            metrics.wait(Metrics.idle, "the slot is free")
        metrics.wait_for(count, "llama_cancellations_total")
    metrics.wait_for(4, "llama_requests_total", finish_reason="cancelled")
    metrics.wait_for(5, "llama_requests_total", finish_reason="length")
    assert metrics.grown("llama_generated_tokens_total") - 5 * 60 < 4 * FAR_FEWER


def test_a_request_cancelled_while_it_waits_is_never_computed(narrow: LocalTriton, metrics: Metrics) -> None:
    with ExitStack() as calls:
        with all_slots_taken(narrow, metrics, slots=2) as running:
            in_model = calls.enter_context(Call(narrow, NEIGHBOUR))
            metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "one waits in the model")
            queued = calls.enter_context(Call(narrow, NEIGHBOUR))
            metrics.wait(lambda now: now.now(PENDING) == 1, "one waits in Triton's queue")
            queued.cancel()
            in_model.cancel()
            metrics.wait(lambda now: now.now("llama_waiting_rows") + now.now(PENDING) == 0, "none waits")
            assert metrics.now("llama_slots_in_use") == 2
            assert not any(call.done() for call in running)
        metrics.wait(Metrics.idle, "all have ended")
    tokens = ask(narrow, generate, **LONG | {"max_tokens": 1, "min_tokens": 1}).num_input_tokens
    metrics.wait_for(3 * tokens, "llama_prompt_tokens_total")
    # The one in Triton's queue is cancelled by Triton or by the model.
    assert 3 <= metrics.grown("llama_cancellations_total") <= 4
    assert metrics.grown("llama_generated_tokens_total") < 2 * FAR_FEWER


def test_a_cancellation_after_the_answer_is_not_counted(narrow: LocalTriton, metrics: Metrics) -> None:
    with Call(narrow, NEIGHBOUR) as call:
        assert isinstance(call.outcome(), Answer)
        call.cancel()
    metrics.wait_for(1, "llama_requests_total", finish_reason="length")
    assert metrics.grown("llama_cancellations_total") == 0


def _close_sse(server: LocalTriton) -> None:
    with Sse(server, LONG) as stream:
        stream.next()


def _reset_sse(server: LocalTriton) -> None:
    stream = Sse(server, LONG)
    stream.next()
    stream.reset()


def _cancel_grpc_stream(server: LocalTriton, requests: int = 1) -> None:
    with GrpcStream(server) as stream:
        for number in range(requests):
            stream.ask({**LONG, "stream": True}, request_id=str(number))
        # Triton has to have read all of them.
        begun: set[str] = set()
        while len(begun) < requests:
            begun.add(stream.next().request_id)
        stream.cancel()


def _kill_reader(program: str, server: LocalTriton) -> None:
    command = [sys.executable, "-c", program, server.http_url, server.grpc_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline(), "the stream has begun"
        os.kill(reader.pid, signal.SIGKILL)


LEAVING: dict[str, tuple[Callable[[LocalTriton], None], int]] = {
    "closed SSE": (_close_sse, 1),
    "reset SSE": (_reset_sse, 1),
    "cancelled gRPC stream": (_cancel_grpc_stream, 1),
    "cancelled gRPC stream of three": (partial(_cancel_grpc_stream, requests=3), 3),
    "killed SSE reader": (partial(_kill_reader, SSE_READER), 1),
    "killed gRPC reader": (partial(_kill_reader, GRPC_READER), 1),
}


@pytest.mark.parametrize(("leave", "requests"), LEAVING.values(), ids=LEAVING)
def test_a_stream_whose_client_leaves_frees_its_slot(
    streaming: LocalTriton, leave: Callable[[LocalTriton], None], requests: int
) -> None:
    alone = ask(streaming, generate, **NEIGHBOUR)
    metrics = Metrics(streaming)
    with Call(streaming, NEIGHBOUR) as neighbour:
        leave(streaming)
        assert neighbour.outcome() == alone
    metrics.wait(Metrics.idle, "the slots are free")
    metrics.wait_for(requests, "llama_cancellations_total")
    metrics.wait_for(1, "llama_requests_total", finish_reason="length")
    assert metrics.grown("llama_generated_tokens_total") - 60 < requests * FAR_FEWER


def _unread_sockets(server: LocalTriton, resources: ExitStack) -> None:
    host, port = server.http_url.split(":")
    body = b'{"text_input": "a", "max_tokens": 500, "min_tokens": 500, "stream": true}'
    head = b"POST /v2/models/llama/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    for _ in range(4):
        one = resources.enter_context(socket.socket())
        # The smallest window that the kernel gives.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        one.connect((host, int(port)))
        one.sendall(head + body)


def _unread_grpc_stream(server: LocalTriton, resources: ExitStack) -> None:
    read_on = threading.Event()
    client = resources.enter_context(tritonclient.grpc.InferenceServerClient(server.grpc_url))
    resources.callback(read_on.set)
    client.start_stream(lambda result, error: read_on.wait())
    tensors = [fill(tritonclient.grpc.InferInput, *item) for item in {**LONG, "stream": True}.items()]
    for _ in range(4):
        client.async_stream_infer("llama", tensors)


@pytest.mark.parametrize("open_unread", [_unread_sockets, _unread_grpc_stream])
def test_streams_that_are_never_read_do_not_block_others(
    streaming: LocalTriton, open_unread: Callable[[LocalTriton, ExitStack], None]
) -> None:
    alone = [ask(streaming, generate, **one) for one in NINE]
    metrics = Metrics(streaming)
    with ExitStack() as resources:
        open_unread(streaming, resources)
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 4, "the unread streams run")
        jobs = [partial(whole, streaming, STREAM_WIRES[index % 3], one) for index, one in enumerate(NINE)]
        assert at_once(jobs) == alone
        metrics.wait(Metrics.idle, "all have ended")
    metrics.wait_for(4 + len(alone), "llama_requests_total", finish_reason="length")
