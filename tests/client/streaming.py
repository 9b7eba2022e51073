"""Streams of both clients as one function, and servers that stream over either protocol."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from client.peers import HOST, receive_request, send_chunk, send_head, server
from frontend.fake_triton_grpc import fake_triton
from triton_llama import AsyncLlamaClient, Chunk, Completion, LlamaClient, TritonLlamaError
from triton_llama.address import Protocol


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


def event(text: str, reason: str = "") -> bytes:
    """A chunk as Triton's event."""
    fields = {"text_output": text, "finish_reason": reason, "num_input_tokens": 1, "num_output_tokens": 1}
    return b"data: " + json.dumps({**fields, "model_name": "llama"}, ensure_ascii=False).encode() + b"\n\n"


@dataclass
class StreamServer:
    """A server that streams. wait_until_left: returns once the client has cancelled or closed."""

    port: int
    wait_until_left: Callable[[], object]


@contextmanager
def stream_server(protocol: Protocol, *texts: str, ends: bool) -> Iterator[StreamServer]:
    """Answer with a chunk for each text, of which the last one ends the stream, or nothing until the client leaves."""
    if protocol == "grpc":
        with fake_triton() as triton:
            triton.tokens = [*texts] if ends else [*texts, "never"]
            triton.hold_after = None if ends else len(texts)
            yield StreamServer(triton.port, lambda: triton.wait_for(lambda fake: bool(fake.cancelled)))
        return
    left = threading.Event()

    def behave(connection: socket.socket) -> None:
        receive_request(connection)
        send_head(connection)
        for number, text in enumerate(texts, 1):
            send_chunk(connection, event(text, "stop" if ends and number == len(texts) else ""))
        if ends:
            send_chunk(connection, b"")
            return
        try:
            connection.recv(1)
        finally:
            # Either the end of the connection or its reset.
            left.set()

    def wait() -> None:
        assert left.wait(20)

    with server(behave) as port:
        yield StreamServer(port, wait)
