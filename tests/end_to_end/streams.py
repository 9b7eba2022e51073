"""Raw clients of the two streaming endpoints, /generate_stream and a gRPC stream.

They take the contract's inputs as plain Python values and return the responses as they come. `sse_response` and
`GrpcStream` stay open, for tests that act on a running stream; `Call` is one request that can be cancelled.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import httpx
import tritonclient.grpc
from end_to_end.servers import HTTP, TIMEOUT_S, is_decoupled
from end_to_end.wires import MODEL, OUTPUTS, Answer, Inputs, answers, model_url, tensors
from httpx_sse import EventSource
from numpy.typing import NDArray
from triton_local.server import LocalTriton


@dataclass(frozen=True)
class Streamed:
    """The chunks of a stream, and the error that ended it."""

    chunks: list[Answer]
    error: str | None = None

    @property
    def whole(self) -> Answer:
        """The chunks joined; an error fails the test."""
        assert self.error is None, self.error
        return Answer(
            "".join(chunk.text for chunk in self.chunks),
            self.chunks[-1].finish_reason,
            self.chunks[-1].num_input_tokens,
            sum(chunk.num_output_tokens for chunk in self.chunks),
        )


@dataclass(frozen=True)
class Response:
    """One response of a gRPC stream. rows: none, one, or one for each row of the request."""

    rows: list[Answer]
    final: bool
    error: str | None = None


StreamWire = Callable[[LocalTriton, Inputs], Streamed]
"""A client of one streaming endpoint."""


@contextmanager
def sse_response(server: LocalTriton, inputs: Inputs) -> Iterator[httpx.Response]:
    """Open a request to /generate_stream; its head has come, and leaving the block closes the connection."""
    body = json.dumps({"stream": True, **inputs})
    with HTTP.stream("POST", model_url(server, "generate_stream"), content=body) as response:
        yield response


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield each event as it comes."""
    if response.is_success:
        for event in EventSource(response).iter_sse():
            yield event.json()
    else:
        # A refusal by Triton itself is plain JSON, one by the model an event.
        yield json.loads(response.read().removeprefix(b"data: "))


class _GrpcConnection:
    """A gRPC connection of its own; results and errors that have come are queued."""

    def __init__(self, server: LocalTriton) -> None:
        # Otherwise gRPC gives all channels of a process to one address the same connection.
        alone = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._client = tritonclient.grpc.InferenceServerClient(server.grpc_address, channel_args=alone)
        self._came: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _take(self, result: Any, error: Exception | None) -> None:  # noqa: ANN401 - tritonclient is not annotated
        self._came.put((result, error))


class GrpcStream(_GrpcConnection):
    """An open gRPC stream; several requests may go through it."""

    def __init__(self, server: LocalTriton) -> None:
        super().__init__(server)
        self._client.start_stream(self._take)

    def ask(self, inputs: Inputs, request_id: str = "", model: str = MODEL, **options: object) -> None:
        """Send a request. options: of `async_stream_infer`."""
        request = tensors(tritonclient.grpc.InferInput, inputs)
        # Triton shall also send a final flag that comes without a response, for `end` to find.
        options["enable_empty_final_response"] = True
        self._client.async_stream_infer(model, request, request_id=request_id, **options)

    def next(self) -> Response:
        """Return the next response."""
        try:
            result, final = self._next()
        except tritonclient.utils.InferenceServerException as error:
            return Response([], final=False, error=str(error))
        raw = result.get_response()
        return Response(answers(result) if raw.outputs else [], final)

    def outputs(self) -> list[dict[str, NDArray[Any]]]:
        """Return the outputs by name of each response until the final flag; an error is raised."""
        came, final = [], False
        while not final:
            result, final = self._next()
            if names := [output.name for output in result.get_response().outputs]:
                came.append({name: result.as_numpy(name) for name in names})
        return came

    def _next(self) -> tuple[Any, bool]:
        """Return a result, and whether it is the request's last one."""
        result, error = self._came.get(timeout=TIMEOUT_S)
        if error is not None:
            raise error
        return result, result.get_response().parameters["triton_final_response"].bool_param

    def end(self) -> None:
        """Close the client's direction, and wait until the server has closed its own; a response fails the test."""
        self._client.stop_stream()
        assert self._came.empty(), "a response follows the final flag"

    def cancel(self) -> None:
        """Cancel every request of the stream."""
        self._client.stop_stream(cancel_requests=True)


class Call(_GrpcConnection):
    """One running request over gRPC: ModelInfer, or a gRPC stream under a decoupled config."""

    def __init__(self, server: LocalTriton, inputs: Inputs, timeout_us: int | None = None, model: str = MODEL) -> None:
        """Send the request. timeout_us: its Triton timeout, the time it may wait for a slot."""
        super().__init__(server)
        request = tensors(tritonclient.grpc.InferInput, inputs)
        self._call: Any = None
        if model == MODEL and is_decoupled(server):
            self._client.start_stream(self._take)
            self._client.async_stream_infer(model, request, timeout=timeout_us)
        else:
            self._call = self._client.async_infer(
                model, request, self._take, timeout=timeout_us, client_timeout=TIMEOUT_S
            )

    def cancel(self) -> None:
        """Cancel the request."""
        if self._call is None:
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


def sse(server: LocalTriton, inputs: Inputs) -> Streamed:
    """Stream over /generate_stream."""
    chunks: list[Answer] = []
    with sse_response(server, inputs) as response:
        for event in events(response):
            if "error" in event:
                return Streamed(chunks, str(event["error"]))
            chunks.append(Answer(*(event[name] for name in OUTPUTS)))
    return Streamed(chunks)


def grpc_stream(server: LocalTriton, inputs: Inputs) -> Streamed:
    """Stream over gRPC; a response without a chunk, or one after that with the final flag, fails the test."""
    chunks: list[Answer] = []
    with GrpcStream(server) as stream:
        stream.ask({"stream": True, **inputs})
        while (response := stream.next()).error is None:
            chunks += response.rows
            assert len(response.rows) == 1, "only one chunk a response"
            if response.final:
                break
        stream.end()
    return Streamed(chunks, response.error)


STREAM_WIRES: tuple[StreamWire, ...] = (sse, grpc_stream)
