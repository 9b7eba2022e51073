"""Connections that a client library hides: one that isn't read, one closed for sending, one with half a request."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from server.stops.outcomes import Chunk, End, Expected, Outcome, end_of_chunks
from triton_llama import LlamaConnectionError, SamplingParams, TritonLlamaError, grpc_wire
from triton_llama.endpoint import Endpoint
from triton_llama.tensors import prepare
from triton_llama.translate import grpc_errors
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

SMALL_BUFFER = 4096
"""Bytes that the kernel keeps for a client that doesn't read."""


class Connection:
    """A TCP connection to the HTTP port that reads only when it is asked to."""

    def __init__(self, own: socket.socket) -> None:
        self._socket = own

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def close_sending(self) -> None:
        """Close the client's direction (FIN); the other stays open."""
        self._socket.shutdown(socket.SHUT_WR)

    async def read(self, enough: bytes | None = None) -> bytes:
        """Return what comes until the server closes or resets the connection, or until `enough` has come."""
        received = b""
        while enough is None or enough not in received:
            try:
                more = await asyncio.get_running_loop().sock_recv(self._socket, 65536)
            except ConnectionError:
                break
            if not more:
                break
            received += more
        return received


@asynccontextmanager
async def connection(address: str, buffer: int | None = None) -> AsyncIterator[Connection]:
    """Connect to host:port. buffer: bytes that the kernel keeps unread; None is its own choice."""
    host, _, port = address.rpartition(":")
    with socket.socket() as own:
        if buffer is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, (host, int(port)))
        yield Connection(own)


def http_request(endpoint: str, prompt: str, tokens: int, chunks: bool = False) -> tuple[bytes, bytes]:
    """Return the head and the body of a POST to /generate or /generate_stream of `llama`, greedy."""
    asked = {"text_input": prompt, "max_tokens": tokens, "min_tokens": tokens, "temperature": 0.0}
    body = json.dumps({**asked, "stream": chunks}).encode()
    head = (
        f"POST /v2/models/llama/{endpoint} HTTP/1.1\r\nHost: triton\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode(), body


class Stream:
    """A gRPC stream, which the client opens, writes to, closes for writing and reads, each for itself."""

    def __init__(self, call: Any, endpoint: Endpoint) -> None:  # noqa: ANN401 - grpc.aio's call is not annotated
        self._call = call
        self._endpoint = endpoint
        self.closed = False
        """Whether the connection has closed before the stream ended."""

    async def ask(self, prompt: str, tokens: int, chunks: bool) -> None:
        """Send a request. chunks: whether it asks for chunks, which a decoupled model has only."""
        params = SamplingParams(max_tokens=tokens, min_tokens=tokens, seed=1)
        await self._call.write(grpc_wire.infer_request("llama", prepare(prompt, params, stream=chunks)))

    async def close_sending(self) -> None:
        """Close the client's direction; the responses still come."""
        await self._call.done_writing()

    async def read(self, expected: Expected, prompt: str, tokens: int) -> End:
        """Read the responses to one request; return how it has ended."""
        chunks: list[Chunk] = []
        try:
            with grpc_errors(self._endpoint, timeout=0.0):
                while (response := await self._call.read()) is not grpc.aio.EOF:
                    piece = grpc_wire.read_stream_response(response, started=bool(chunks))
                    chunks.append((piece.text, piece.finish_reason, piece.num_output_tokens))
                    if piece.finish_reason:
                        return end_of_chunks(chunks, expected, prompt, tokens)
                # Raises the error of a stream that failed.
                await self._call
        except LlamaConnectionError as error:
            self.closed = True
            return Outcome.CUT if chunks else Outcome.LOST, f"{error}, after {len(chunks)} responses"
        except TritonLlamaError as error:
            return Outcome.REFUSED, str(error)
        return Outcome.LOST, f"the stream ended after {len(chunks)} responses without a finish_reason"


@asynccontextmanager
async def grpc_streams(address: str, count: int) -> AsyncIterator[list[Stream]]:
    """Open streams on one connection of their own."""
    # Otherwise it would be shared with every channel to this address.
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        metadata = (grpc_wire.ERRORS_WITH_STATUS,)
        endpoint = Endpoint.parse(address, "grpc")
        yield [Stream(stub.ModelStreamInfer(metadata=metadata), endpoint) for _ in range(count)]
