"""Readers of streams that vanish or do not read: their slots come back, and nobody else notices."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from functools import partial

import pytest
import tritonclient.grpc
from server.clients import Answer, ask, at_once, fill, generate
from server.metrics import Metrics
from server.streams import STREAM_WIRES, stream
from triton_local.server import LocalTriton

LONG = {"text_input": "a", "max_tokens": 500, "min_tokens": 500, "temperature": 0.0}
FAR_FEWER = 250

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


def _neighbours() -> list[dict[str, object]]:
    return [
        {"text_input": f"Neighbour {index}", "max_tokens": 24, "min_tokens": 24, "temperature": 1.0, "seed": index}
        for index in range(9)
    ]


@pytest.fixture(scope="module")
def alone(streaming: LocalTriton) -> list[Answer]:
    return [ask(streaming, generate, **one) for one in _neighbours()]


def _streamed(streaming: LocalTriton) -> list[Answer]:
    jobs = [partial(stream, streaming, STREAM_WIRES[index % 3], **one) for index, one in enumerate(_neighbours())]
    return [streamed.whole for streamed in at_once(jobs)]


@pytest.mark.parametrize("program", [SSE_READER, GRPC_READER], ids=["sse", "grpc"])
def test_a_killed_reader_keeps_its_slot_or_disturbs_others(
    streaming: LocalTriton, alone: list[Answer], program: str
) -> None:
    metrics = Metrics(streaming)
    command = [sys.executable, "-c", program, streaming.http_url, streaming.grpc_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline(), "it has begun to read"
        os.kill(reader.pid, signal.SIGKILL)
    assert _streamed(streaming) == alone
    metrics.wait(Metrics.idle, "the slot is given back")
    metrics.wait_for(1, "llama_cancellations_total")
    metrics.wait_for(len(alone), "llama_requests_total", finish_reason="length")
    assert metrics.grown("llama_generated_tokens_total") - 24 * len(alone) < FAR_FEWER


def test_a_socket_that_is_never_read_holds_others_up(streaming: LocalTriton, alone: list[Answer]) -> None:
    metrics = Metrics(streaming)
    host, port = streaming.http_url.split(":")
    body = b'{"text_input": "a", "max_tokens": 500, "min_tokens": 500, "stream": true}'
    head = b"POST /v2/models/llama/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    sockets = [socket.socket() for _ in range(4)]
    for one in sockets:
        # The smallest window that the kernel gives.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        one.connect((host, int(port)))
        one.sendall(head + body)
    metrics.wait(lambda now: now.now("llama_slots_in_use") == 4, "the streams that nobody reads run")
    assert _streamed(streaming) == alone
    metrics.wait(Metrics.idle, "all have ended")
    for one in sockets:
        one.close()
    metrics.wait_for(4 + len(alone), "llama_requests_total", finish_reason="length")


def test_a_grpc_stream_that_is_never_read_holds_others_up(streaming: LocalTriton, alone: list[Answer]) -> None:
    metrics = Metrics(streaming)
    blocked = threading.Event()
    with tritonclient.grpc.InferenceServerClient(streaming.grpc_url) as client:
        client.start_stream(lambda result, error: blocked.wait())
        tensors = [fill(tritonclient.grpc.InferInput, *item) for item in {**LONG, "stream": True}.items()]
        for _ in range(4):
            client.async_stream_infer("llama", tensors)
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 4, "the streams that nobody reads run")
        assert _streamed(streaming) == alone
        metrics.wait(Metrics.idle, "all have ended")
        blocked.set()
    metrics.wait_for(4 + len(alone), "llama_requests_total", finish_reason="length")
