"""Raw clients of the three streaming endpoints: /generate_stream, a gRPC stream, and one over asyncio.

They take the contract's inputs as plain Python values and return the responses as they come. `Sse` and `GrpcStream`
stay open, for tests that act on a running stream; `Call` is one request that can be cancelled.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from server.clients import OUTPUTS, TIMEOUT_S, Answer, Inputs, answers, ask, fill, generate
from server.servers import is_decoupled
from triton_local.server import LocalTriton


@dataclass(frozen=True)
class Streamed:
    """The responses of a stream, one Answer each, and the error that ended it.

    finals: indexes of responses with the final flag, empty responses included; None where the endpoint shows none.
    empty: number of responses without outputs.
    """

    chunks: list[Answer]
    error: str | None = None
    finals: list[int] | None = None
    empty: int = 0

    @property
    def whole(self) -> Answer:
        """The chunks joined."""
        assert self.error is None, self.error
        return Answer(
            "".join(chunk.text for chunk in self.chunks),
            self.chunks[-1].finish_reason,
            sum(chunk.num_input_tokens for chunk in self.chunks),
            sum(chunk.num_output_tokens for chunk in self.chunks),
        )


class StreamWire(Protocol):
    """A client of one streaming endpoint."""

    def __call__(self, server: LocalTriton, inputs: Inputs) -> Streamed: ...


class _Closing:
    """A context manager that closes the client."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class Sse(_Closing):
    """An open request to /generate_stream."""

    def __init__(self, server: LocalTriton, inputs: Inputs) -> None:
        """Send the request without reading the response's head."""
        host, port = server.http_url.split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
        body = json.dumps({"stream": True, **inputs})
        self._connection.request("POST", "/v2/models/llama/generate_stream", body)
        self._response: http.client.HTTPResponse | None = None

    @property
    def status(self) -> int:
        """The HTTP status, once it has come."""
        return self._head().status

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield each event as it comes."""
        for line in self._head():
            if line.strip():
                # A refusal by Triton itself is plain JSON.
                assert line.startswith(b"data: ") or self.status != 200, line
                yield json.loads(line.removeprefix(b"data: "))

    def next(self) -> dict[str, Any]:
        """Return the next event."""
        return next(self.events())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def reset(self) -> None:
        """Reset the connection, as when a process is killed or a cable cut."""
        sock = self._connection.sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self._response is not None:
            self._response.close()
        sock.close()

    def _head(self) -> http.client.HTTPResponse:
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response


class GrpcStream(_Closing):
    """An open gRPC stream; several requests may go through it."""

    def __init__(self, server: LocalTriton) -> None:
        self._client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        self._came: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._came.put((result, error)))

    def ask(self, inputs: Inputs, request_id: str = "", empty_final: bool = True, **options: object) -> None:
        """Send a request. empty_final: whether Triton shall also send a final flag that comes without a response."""
        tensors = [fill(tritonclient.grpc.InferInput, name, value) for name, value in inputs.items()]
        self._client.async_stream_infer(
            "llama", tensors, request_id=request_id, enable_empty_final_response=empty_final, **options
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def next(self) -> Response:
        """Return the next response."""
        result, error = self._came.get(timeout=TIMEOUT_S)
        return _response(result, error)

    def none_left(self) -> bool:
        """Return whether no received response is left."""
        return self._came.empty()

    def end(self) -> None:
        """Close the client's direction, and wait until the server has closed its own."""
        self._client.stop_stream()

    def cancel(self) -> None:
        """Cancel every request of the stream."""
        self._client.stop_stream(cancel_requests=True)


@dataclass(frozen=True)
class Response:
    """One response of a gRPC stream. rows: none, one, or one for each row of the request."""

    rows: list[Answer]
    final: bool
    request_id: str = ""
    error: str | None = None


def sse(server: LocalTriton, inputs: Inputs) -> Streamed:
    """Stream over /generate_stream."""
    chunks: list[Answer] = []
    with Sse(server, inputs) as stream:
        for event in stream.events():
            if "error" in event:
                return Streamed(chunks, str(event["error"]))
            chunks.append(Answer(event["text_output"], *(event[name] for name in OUTPUTS[1:])))
    return Streamed(chunks)


def grpc_stream(server: LocalTriton, inputs: Inputs, empty_final: bool = True) -> Streamed:
    """Stream over gRPC until the final flag; a response after it fails the test."""
    with GrpcStream(server) as stream:
        stream.ask({"stream": True, **inputs}, empty_final=empty_final)
        came = [stream.next()]
        while not came[-1].final and came[-1].error is None:
            came.append(stream.next())
        stream.end()
        assert stream.none_left(), "a response follows the final flag"
    return _streamed(came)


def grpc_stream_aio(server: LocalTriton, inputs: Inputs) -> Streamed:
    """Stream over gRPC with the asyncio client until the server ends the stream."""

    async def ask() -> AsyncIterator[dict[str, object]]:
        yield {
            "model_name": "llama",
            "inputs": [fill(tritonclient.grpc.InferInput, *item) for item in {"stream": True, **inputs}.items()],
            "enable_empty_final_response": True,
        }

    async def run() -> Streamed:
        async with tritonclient.grpc.aio.InferenceServerClient(server.grpc_url) as client:
            came = client.stream_infer(ask(), stream_timeout=TIMEOUT_S)
            return _streamed([_response(result, error) async for result, error in came])

    return asyncio.run(run())


STREAM_WIRES: tuple[StreamWire, ...] = (sse, grpc_stream, grpc_stream_aio)


def stream(server: LocalTriton, wire: StreamWire = grpc_stream, /, **inputs: object) -> Streamed:
    """Stream; an error fails the test."""
    streamed = wire(server, inputs)
    assert streamed.error is None, streamed.error
    return streamed


def whole(server: LocalTriton, wire: StreamWire, inputs: Inputs) -> Answer:
    """Stream, and return the chunks joined."""
    return wire(server, inputs).whole


def _response(result: Any, error: Exception | None) -> Response:  # noqa: ANN401 - tritonclient is not annotated
    if error is not None:
        return Response([], final=False, error=str(error))
    raw = result.get_response()
    final = raw.parameters["triton_final_response"].bool_param
    return Response(answers(result) if raw.outputs else [], final, raw.id)


def _streamed(came: list[Response]) -> Streamed:
    assert all(len(response.rows) <= 1 for response in came)
    return Streamed(
        [row for response in came for row in response.rows],
        next((response.error for response in came if response.error is not None), None),
        [index for index, response in enumerate(came) if response.final],
        sum(not response.rows and response.error is None for response in came),
    )


class Call(_Closing):
    """One running request over gRPC: ModelInfer, or a gRPC stream under a decoupled config."""

    def __init__(
        self, server: LocalTriton, inputs: Inputs, timeout_us: int | None = None, request_id: str = ""
    ) -> None:
        """Send the request. timeout_us: its Triton timeout, the time it may wait for a slot."""
        self._client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        self._came: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        self._streams = is_decoupled(server)
        tensors = [fill(tritonclient.grpc.InferInput, name, value) for name, value in inputs.items()]
        if self._streams:
            self._client.start_stream(self._take)
            self._client.async_stream_infer("llama", tensors, request_id=request_id, timeout=timeout_us)
        else:
            self._call = self._client.async_infer(
                "llama", tensors, self._take, request_id=request_id, timeout=timeout_us, client_timeout=TIMEOUT_S
            )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def cancel(self) -> None:
        """Cancel the request."""
        if self._streams:
            self._client.stop_stream(cancel_requests=True)
        else:
            self._call.cancel()

    def done(self) -> bool:
        """Return whether the response has come."""
        return not self._came.empty()

    def outcome(self) -> Answer | str:
        """Wait for the response; return its one row, or the error's text."""
        result, error = self._came.get(timeout=TIMEOUT_S)
        if error is not None:
            return str(error)
        (answer,) = answers(result)
        return answer

    def _take(self, result: Any, error: Exception | None) -> None:  # noqa: ANN401 - tritonclient is not annotated
        self._came.put((result, error))


every_wire = pytest.mark.parametrize("wire", STREAM_WIRES, ids=lambda wire: wire.__name__)


def check_shape(streamed: Streamed) -> None:
    """Check the invariants of a complete stream."""
    *before, last = streamed.chunks
    assert all(chunk.text for chunk in before), "only the last chunk may be empty"
    assert {chunk.finish_reason for chunk in before} <= {""}
    assert {chunk.num_input_tokens for chunk in before} <= {0}
    assert all(chunk.num_output_tokens >= 1 for chunk in streamed.chunks)
    assert last.finish_reason in ("stop", "length")
    assert last.num_input_tokens >= 1
    if streamed.finals is not None:
        assert streamed.finals == [len(streamed.chunks) - 1], "the final flag comes once, with the last chunk"
        assert streamed.empty == 0


def both(server: LocalTriton, wire: StreamWire, **inputs: object) -> tuple[Answer, Streamed]:
    """Request one response and a stream, which must be equal; return both."""
    whole = ask(server, generate, **inputs)
    streamed = stream(server, wire, **inputs)
    check_shape(streamed)
    assert streamed.whole == whole
    return whole, streamed
