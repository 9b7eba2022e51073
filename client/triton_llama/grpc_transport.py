"""gRPC transports on the messages and stubs that tritonclient generates.

Not on its clients: these allow one stream each and mix the responses of all requests on it. Here each request has its
own call, which ends and can be cancelled for itself; gRPC carries any number of them on one connection.
Timeouts are arguments; their defaults are in `client`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from threading import Lock
from types import ModuleType
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from triton_llama.address import ServerAddress
from triton_llama.completion import Chunk, Completion
from triton_llama.errors import from_stream_error, grpc_errors
from triton_llama.outputs import read_chunk, read_completion
from triton_llama.status import ServerStatus, read_status
from triton_llama.tensors import (
    PreparedRequest,
    decode_response,
    encode_request,
)

# Makes Triton (from 24.04 on) end a failed stream with the error's status; otherwise there is only a message.
ERRORS_WITH_STATUS = ("triton_grpc_error", "true")
_MAX_MESSAGE = 2**31 - 1


class _Transport:
    """One channel to one server; gRPC connects at the first request."""

    _library: ModuleType

    def __init__(self, server: ServerAddress, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._server = server
        # The names of gRPC's metadata must be in lower case.
        self._metadata = tuple((name.lower(), value) for name, value in headers.items())
        self._stream_metadata = (*self._metadata, ERRORS_WITH_STATUS)
        self._connect_timeout = connect_timeout
        self._lock = Lock()
        self._channel: Any = None
        self._closed = False

    def _stub(self) -> GRPCInferenceServiceStub:
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            # Not in __init__: a channel of asyncio belongs to the loop that is running when it is made.
            if self._channel is None:
                self._channel = open_channel(self._library, self._server, self._connect_timeout)
            return GRPCInferenceServiceStub(self._channel)


class GrpcTransport(_Transport):
    """The synchronous transport; threads may share it."""

    _library = grpc

    def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Complete a prompt in one exchange. timeout: seconds in all.

        Raises DecoupledModelError if the model only streams, and the other errors of `errors`.
        """
        message = encode_request(model, request.request_id, request.tensors, request.outputs)
        with grpc_errors(self._server, timeout):
            response = self._stub().ModelInfer(message, timeout=timeout, metadata=self._metadata)
        return read_completion(decode_response(response), request.request_id, request.seed)

    def status(self, model: str, timeout: float) -> ServerStatus:
        """Ask for the state of server and model."""
        with grpc_errors(self._server, timeout):
            stub, options = self._stub(), {"timeout": timeout, "metadata": self._metadata}
            responses = [
                getattr(stub, method)(message, **options) for method, message in _status_requests(model).items()
            ]
            ready = responses[-1].ready
            config = stub.ModelConfig(messages.ModelConfigRequest(name=model), **options) if ready else None
        return _read_status(self._server, model, responses, config)

    def stream(self, model: str, request: PreparedRequest, timeout: float) -> Generator[Chunk, None, None]:
        """Send one request at the first `next` and yield its chunks, `timeout` seconds for all.

        Closing the generator cancels the request on the server.
        """
        message = encode_request(model, request.request_id, request.tensors, request.outputs)
        try:
            with grpc_errors(self._server, timeout):
                call = self._stub().ModelStreamInfer(iter([message]), timeout=timeout, metadata=self._stream_metadata)
                try:
                    for number, response in enumerate(call):
                        yield _read_stream_response(response, started=number > 0)
                finally:
                    # No effect on a call that has ended.
                    call.cancel()
        except KeyboardInterrupt:
            # Ctrl-C while one of grpc's locks is being taken leaves it locked for ever: every later request on that
            # channel would hang, and so would closing it.
            self._channel = None
            raise

    def close(self) -> None:
        """Close the channel; requests in flight in other threads end with a LlamaConnectionError."""
        with self._lock:
            self._closed = True
            if self._channel is not None:
                self._channel.close()


class AsyncGrpcTransport(_Transport):
    """The asynchronous transport; its channel belongs to the event loop of the first request."""

    _library = grpc.aio

    async def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Complete a prompt in one exchange, as `GrpcTransport.infer` does."""
        message = encode_request(model, request.request_id, request.tensors, request.outputs)
        with grpc_errors(self._server, timeout):
            response = await self._stub().ModelInfer(message, timeout=timeout, metadata=self._metadata)
        return read_completion(decode_response(response), request.request_id, request.seed)

    async def status(self, model: str, timeout: float) -> ServerStatus:
        """Ask for the state of server and model."""
        with grpc_errors(self._server, timeout):
            stub, options = self._stub(), {"timeout": timeout, "metadata": self._metadata}
            responses = [
                await getattr(stub, method)(message, **options) for method, message in _status_requests(model).items()
            ]
            ready = responses[-1].ready
            config = await stub.ModelConfig(messages.ModelConfigRequest(name=model), **options) if ready else None
        return _read_status(self._server, model, responses, config)

    async def stream(self, model: str, request: PreparedRequest, timeout: float) -> AsyncGenerator[Chunk, None]:
        """Send one request at the first `anext` and yield its chunks, as `GrpcTransport.stream` does."""
        message = encode_request(model, request.request_id, request.tensors, request.outputs)
        with grpc_errors(self._server, timeout):
            call = self._stub().ModelStreamInfer(iter([message]), timeout=timeout, metadata=self._stream_metadata)
            started = False
            try:
                async for response in call:
                    yield _read_stream_response(response, started=started)
                    started = True
            finally:
                # No effect on a call that has ended.
                call.cancel()

    async def close(self) -> None:
        """Close the channel; requests in other tasks are cancelled."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()


def open_channel(
    library: ModuleType, server: ServerAddress, connect_timeout: float, more_options: Sequence[tuple[str, int]] = ()
) -> grpc.Channel | grpc.aio.Channel:
    """Return a channel of `grpc` or `grpc.aio`, which connects at its first request; `connect_timeout` in seconds.

    gRPC waits longer after each failed attempt to connect, up to two minutes by default, during which every request
    fails at once; with two seconds a client soon finds a restarted server.
    """
    options = [
        ("grpc.max_send_message_length", _MAX_MESSAGE),
        ("grpc.max_receive_message_length", _MAX_MESSAGE),
        # Despite its name, the time that one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", max(1, int(connect_timeout * 1000))),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # As over HTTP, the address given is the address used.
        ("grpc.enable_http_proxy", 0),
        *more_options,
    ]
    if server.tls:
        return library.secure_channel(server.authority, grpc.ssl_channel_credentials(), options=options)
    return library.insecure_channel(server.authority, options=options)


def _read_stream_response(response: messages.ModelStreamInferResponse, *, started: bool) -> Chunk:
    if response.error_message:
        raise from_stream_error(response.error_message, started=started)
    return read_chunk(decode_response(response.infer_response))


def _status_requests(model: str) -> dict[str, object]:
    """Return the message of each method."""
    return {
        "ServerLive": messages.ServerLiveRequest(),
        "ServerReady": messages.ServerReadyRequest(),
        "ServerMetadata": messages.ServerMetadataRequest(),
        "ModelReady": messages.ModelReadyRequest(name=model),
    }


def _read_status(
    server: ServerAddress, model: str, responses: Sequence[Any], config: messages.ModelConfigResponse | None
) -> ServerStatus:
    live, ready, answer, _ = responses
    metadata = MessageToDict(answer, preserving_proto_field_name=True)
    fields = None if config is None else MessageToDict(config.config, preserving_proto_field_name=True)
    return read_status(server, model, live.live, ready.ready, metadata, fields)
