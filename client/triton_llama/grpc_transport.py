"""gRPC transports on tritonclient's stubs: channels, calls, cancellation. `grpc_wire` has the messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from threading import Lock
from types import ModuleType
from typing import Any

import grpc
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from triton_llama import grpc_wire
from triton_llama.completion import Chunk, Completion
from triton_llama.endpoint import Endpoint
from triton_llama.errors import LlamaConnectionError
from triton_llama.grpc_wire import GrpcRequest
from triton_llama.status import ServerStatus
from triton_llama.tensors import PreparedRequest
from triton_llama.translate import grpc_errors


class _Transport:
    """Channels to one endpoint, by their use; gRPC connects at the first request."""

    _library: ModuleType

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._metadata = grpc_wire.metadata(headers)
        self._stream_metadata = (*self._metadata, grpc_wire.ERRORS_WITH_STATUS)
        self._options = grpc_wire.channel_options(connect_timeout)
        self._lock = Lock()
        self._channels: dict[str, Any] = {}
        self._closed = False

    def _stub(self, use: str) -> GRPCInferenceServiceStub:
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            # Not in __init__: a channel of asyncio belongs to the loop that is running when it is made.
            if use not in self._channels:
                target, tls = self._endpoint.authority, self._endpoint.tls
                self._channels[use] = (
                    self._library.secure_channel(target, grpc.ssl_channel_credentials(), options=self._options)
                    if tls
                    else self._library.insecure_channel(target, options=self._options)
                )
            return GRPCInferenceServiceStub(self._channels[use])


class GrpcTransport(_Transport):
    """For any thread. Streams have a channel of their own, as an interrupt may break it; both share a connection."""

    _library = grpc

    def send(self, request: GrpcRequest, timeout: float) -> object:
        """Send one request and return its response, within `timeout` seconds."""
        method, message = request
        with grpc_errors(self._endpoint, timeout):
            return getattr(self._stub("requests"), method)(message, timeout=timeout, metadata=self._metadata)

    def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Complete a prompt in one exchange."""
        response = self.send(("ModelInfer", grpc_wire.infer_request(model, request)), timeout)
        return grpc_wire.read_infer_response(response, request)

    def status(self, model: str, timeout: float) -> ServerStatus:
        """Ask for the state of server and model."""
        responses: list[Any] = [self.send(question, timeout) for question in grpc_wire.status_requests(model)]
        config = self.send(grpc_wire.config_request(model), timeout) if responses[-1].ready else None
        return grpc_wire.read_status_responses(self._endpoint, model, responses, config)

    def stream(self, model: str, request: PreparedRequest, timeout: float) -> Generator[Chunk, None, None]:
        """Send one request at the first `next` and yield its chunks, `timeout` seconds for all.

        Closing the generator cancels the request on the server.
        """
        message = grpc_wire.infer_request(model, request)
        try:
            with grpc_errors(self._endpoint, timeout):
                stub = self._stub("streams")
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
                self._channels.pop("streams", None)
            raise

    def close(self) -> None:
        """Close the channels; requests in flight in other threads end with a LlamaConnectionError."""
        with self._lock:
            self._closed = True
            for channel in self._channels.values():
                channel.close()


class AsyncGrpcTransport(_Transport):
    """One channel, in the event loop of the first request."""

    _library = grpc.aio

    async def send(self, request: GrpcRequest, timeout: float) -> object:
        """Send one request and return its response, within `timeout` seconds."""
        method, message = request
        with grpc_errors(self._endpoint, timeout):
            return await getattr(self._stub("all"), method)(message, timeout=timeout, metadata=self._metadata)

    async def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Complete a prompt in one exchange."""
        response = await self.send(("ModelInfer", grpc_wire.infer_request(model, request)), timeout)
        return grpc_wire.read_infer_response(response, request)

    async def status(self, model: str, timeout: float) -> ServerStatus:
        """Ask for the state of server and model."""
        responses: list[Any] = [await self.send(question, timeout) for question in grpc_wire.status_requests(model)]
        config = await self.send(grpc_wire.config_request(model), timeout) if responses[-1].ready else None
        return grpc_wire.read_status_responses(self._endpoint, model, responses, config)

    async def stream(self, model: str, request: PreparedRequest, timeout: float) -> AsyncGenerator[Chunk, None]:
        """Send one request at the first `anext` and yield its chunks, `timeout` seconds for all.

        Closing the generator cancels the request on the server.
        """
        message = grpc_wire.infer_request(model, request)
        with grpc_errors(self._endpoint, timeout):
            call = self._stub("all").ModelStreamInfer(iter([message]), timeout=timeout, metadata=self._stream_metadata)
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

    async def close(self) -> None:
        """Close the channel; streams in other tasks end with a LlamaConnectionError, other requests are cancelled."""
        self._closed = True
        for channel in self._channels.values():
            await channel.close()
