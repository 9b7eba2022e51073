"""Streams of both clients as one function, and servers that stream over either protocol."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
import pytest
from client.grpc_peers import Responses, grpc_server, response
from client.peers import HOST, receive_request, send_chunk, send_head, server
from triton_llama import AsyncLlamaClient, Chunk, Completion, LlamaClient, TritonLlamaError
from triton_llama.endpoint import Protocol
from tritonclient.grpc.service_pb2 import ModelInferRequest


class Streamed(NamedTuple):
    """The texts of a stream's chunks, and its end."""

    texts: list[str]
    outcome: Completion | TritonLlamaError


OnChunk = Callable[[Chunk], object]
Stream = Callable[..., Streamed]


def stream(port: int, protocol: Protocol = "http", *, timeout: float = 20.0, on_chunk: OnChunk = str) -> Streamed:
    """Stream with the synchronous client; `on_chunk` is called with each chunk."""
    texts = []
    with LlamaClient(f"{HOST}:{port}", protocol, timeout=timeout) as client, client.stream("def") as running:
        try:
            for chunk in running:
                texts.append(str(chunk))
                on_chunk(chunk)
        except TritonLlamaError as error:
            assert running.text == "".join(texts)
            return Streamed(texts, error)
        return Streamed(texts, running.completion)


def stream_async(port: int, protocol: Protocol = "http", *, timeout: float = 20.0, on_chunk: OnChunk = str) -> Streamed:
    """Stream with the asyncio client."""

    async def run() -> Streamed:
        texts = []
        url = f"{HOST}:{port}"
        async with AsyncLlamaClient(url, protocol, timeout=timeout) as client, client.stream("def") as running:
            try:
                async for chunk in running:
                    texts.append(str(chunk))
                    on_chunk(chunk)
            except TritonLlamaError as error:
                assert running.text == "".join(texts)
                return Streamed(texts, error)
            return Streamed(texts, running.completion)

    return asyncio.run(run())


both_clients = pytest.mark.parametrize("stream", [stream, stream_async], ids=["sync", "async"])
both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


def event(text: str, reason: str = "", *, tokens: int = 1) -> bytes:
    """A chunk as Triton's event."""
    fields = {"text_output": text, "finish_reason": reason, "num_input_tokens": 3, "num_output_tokens": tokens}
    return b"data: " + json.dumps({**fields, "model_name": "llama"}, ensure_ascii=False).encode() + b"\n\n"


@dataclass
class StreamServer:
    """A server that streams. begun: it has sent its chunks. left: the client has cancelled or closed."""

    port: int = 0
    begun: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)


@contextmanager
def stream_server(
    protocol: Protocol, *texts: str, last: str | None = None, after_each: Callable[[], object] = str
) -> Iterator[StreamServer]:
    """Answer with a chunk for each text; then with `last`, which ends the stream, or with nothing until `left`."""
    state = StreamServer()

    def over_http(connection: socket.socket) -> None:
        while receive_request(connection):
            send_head(connection)
            for text in texts:
                send_chunk(connection, event(text))
                after_each()
            state.begun.set()
            if last is None:
                try:
                    connection.recv(1)
                finally:
                    # Either the end of the connection or its reset.
                    state.left.set()
                return
            send_chunk(connection, event(last, "length", tokens=2))
            send_chunk(connection, b"")

    def over_grpc(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        context.add_callback(state.left.set)
        for text in texts:
            yield response(text)
            after_each()
        state.begun.set()
        if last is None:
            assert state.left.wait(20)
        else:
            yield response(last, "length", tokens=2)

    with server(over_http) if protocol == "http" else grpc_server(over_grpc) as port:
        state.port = port
        yield state
