"""gRPC transports on tritonclient's stubs: channels, calls, cancellation. `grpc_wire` has the messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from threading import Lock

import grpc
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from triton_llama import grpc_wire
from triton_llama.completion import Completion, Piece
from triton_llama.endpoint import Endpoint
from triton_llama.errors import LlamaConnectionError
from triton_llama.status import ServerStatus
from triton_llama.tensors import PreparedRequest
from triton_llama.translate import grpc_errors


class _Transport:
    """Settings of both transports."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._metadata = grpc_wire.metadata(headers)
        self._stream_metadata = (*self._metadata, grpc_wire.ERRORS_WITH_STATUS)
        self._options = grpc_wire.channel_options(connect_timeout)
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the client is closed")


def _refuses_decoupled(error: grpc.RpcError) -> bool:
    """Return whether this is ModelInfer's refusal of a streaming (decoupled) model; nothing was run."""
    return error.code() is grpc.StatusCode.UNIMPLEMENTED and "decoupled" in (error.details() or "")


class GrpcTransport(_Transport):
    """Channels to one endpoint, for any thread. gRPC connects at the first request.

    Streams have a channel of their own, because an interrupt may break it; both channels share one connection.
    """

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        super().__init__(endpoint, connect_timeout, headers)
        self._lock = Lock()
        self._channel: grpc.Channel | None = None
        self._stream_channel: grpc.Channel | None = None

    def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion | None:
        """Send one request and return its response, within `timeout` seconds; None if the model is decoupled."""
        message = grpc_wire.infer_request(model, request)
        with grpc_errors(self._endpoint, timeout):
            try:
                response = self._stub().ModelInfer(message, timeout=timeout, metadata=self._metadata)
            except grpc.RpcError as error:
                if _refuses_decoupled(error):
                    return None
                raise
        return grpc_wire.read_infer_response(response, request)

    def stream(self, model: str, request: PreparedRequest, timeout: float) -> Generator[Piece, None, None]:
        """Send one request at the first `next` and yield its pieces, `timeout` seconds for all.

        Closing the generator cancels the request on the server.
        """
        message = grpc_wire.infer_request(model, request)
        try:
            with grpc_errors(self._endpoint, timeout):
                stub = self._stream_stub()
                call = stub.ModelStreamInfer(iter([message]), timeout=timeout, metadata=self._stream_metadata)
                try:
                    for number, response in enumerate(call):
                        yield grpc_wire.read_stream_response(response, started=number > 0)
                finally:
                    # No effect on a call that has ended.
                    call.cancel()
        except KeyboardInterrupt:
            # Ctrl-C while one of grpc's locks is being taken leaves it locked for ever: every later stream on that
            # channel would hang, and so would closing it. The next stream gets another channel.
            with self._lock:
                self._stream_channel = None
            raise

    def status(self, model: str, timeout: float) -> ServerStatus:
        """Ask for the state of server and model, each question within `timeout` seconds."""
        options = {"timeout": timeout, "metadata": self._metadata}
        stub = self._stub()
        with grpc_errors(self._endpoint, timeout):
            model_ready = stub.ModelReady(messages.ModelReadyRequest(name=model), **options)
            config = None
            if model_ready.ready:
                config = stub.ModelConfig(messages.ModelConfigRequest(name=model), **options)
            live = stub.ServerLive(messages.ServerLiveRequest(), **options)
            ready = stub.ServerReady(messages.ServerReadyRequest(), **options)
            metadata = stub.ServerMetadata(messages.ServerMetadataRequest(), **options)
        return grpc_wire.read_status(self._endpoint, model, live, ready, metadata, model_ready, config)

    def close(self) -> None:
        """Close the channels; requests in flight in other threads end with a LlamaConnectionError."""
        with self._lock:
            self._closed = True
            for channel in (self._channel, self._stream_channel):
                if channel is not None:
                    channel.close()

    def _stub(self) -> GRPCInferenceServiceStub:
        with self._lock:
            self._check_open()
            if self._channel is None:
                self._channel = self._open_channel()
            return GRPCInferenceServiceStub(self._channel)

    def _stream_stub(self) -> GRPCInferenceServiceStub:
        with self._lock:
            self._check_open()
            if self._stream_channel is None:
                self._stream_channel = self._open_channel()
            return GRPCInferenceServiceStub(self._stream_channel)

    def _open_channel(self) -> grpc.Channel:
        target = self._endpoint.authority
        if self._endpoint.tls:
            return grpc.secure_channel(target, grpc.ssl_channel_credentials(), options=self._options)
        return grpc.insecure_channel(target, options=self._options)


class AsyncGrpcTransport(_Transport):
    """One channel to one endpoint, in the event loop of the first request."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        super().__init__(endpoint, connect_timeout, headers)
        self._channel: grpc.aio.Channel | None = None

    async def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion | None:
        """Send one request and return its response, within `timeout` seconds; None if the model is decoupled."""
        message = grpc_wire.infer_request(model, request)
        with grpc_errors(self._endpoint, timeout):
            try:
                response = await self._stub().ModelInfer(message, timeout=timeout, metadata=self._metadata)
            except grpc.RpcError as error:
                if _refuses_decoupled(error):
                    return None
                raise
        return grpc_wire.read_infer_response(response, request)

    async def stream(self, model: str, request: PreparedRequest, timeout: float) -> AsyncGenerator[Piece, None]:
        """Send one request at the first `anext` and yield its pieces, `timeout` seconds for all.

        Closing the generator cancels the request on the server.
        """
        message = grpc_wire.infer_request(model, request)
        with grpc_errors(self._endpoint, timeout):
            call = self._stub().ModelStreamInfer(iter([message]), timeout=timeout, metadata=self._stream_metadata)
            started = False
            try:
                async for response in call:
                    yield grpc_wire.read_stream_response(response, started=started)
                    started = True
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if self._closed and not (task and task.cancelling()):
                    # Not the task was cancelled: this is how grpc reports a closed channel.
                    message = f"no connection to {self._endpoint}: the client was closed"
                    raise LlamaConnectionError(message) from error
                raise
            finally:
                # No effect on a call that has ended.
                call.cancel()

    async def status(self, model: str, timeout: float) -> ServerStatus:
        """Ask for the state of server and model, each question within `timeout` seconds."""
        options = {"timeout": timeout, "metadata": self._metadata}
        stub = self._stub()
        with grpc_errors(self._endpoint, timeout):
            model_ready = await stub.ModelReady(messages.ModelReadyRequest(name=model), **options)
            config = None
            if model_ready.ready:
                config = await stub.ModelConfig(messages.ModelConfigRequest(name=model), **options)
            live = await stub.ServerLive(messages.ServerLiveRequest(), **options)
            ready = await stub.ServerReady(messages.ServerReadyRequest(), **options)
            metadata = await stub.ServerMetadata(messages.ServerMetadataRequest(), **options)
        return grpc_wire.read_status(self._endpoint, model, live, ready, metadata, model_ready, config)

    async def close(self) -> None:
        """Close the channel; streams in other tasks end with a LlamaConnectionError, other requests are cancelled."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    def _stub(self) -> GRPCInferenceServiceStub:
        self._check_open()
        # Not in __init__: a channel belongs to the loop that is running when it is made.
        if self._channel is None:
            target = self._endpoint.authority
            self._channel = (
                grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(), options=self._options)
                if self._endpoint.tls
                else grpc.aio.insecure_channel(target, options=self._options)
            )
        return GRPCInferenceServiceStub(self._channel)
