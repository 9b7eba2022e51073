"""gRPC transport on tritonclient's stubs: channel, calls, messages, cancellation.

On the messages and stubs that tritonclient generates, not on its clients: these allow one stream each and mix the
responses of all requests on it. Here each request has its own call, which ends and can be cancelled for itself; gRPC
carries any number of them on one connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

import grpc
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from triton_llama.completion import Completion, Piece
from triton_llama.endpoint import Endpoint
from triton_llama.errors import LlamaConnectionError
from triton_llama.status import ServerStatus, read_status
from triton_llama.tensors import OUTPUT_NAMES, PreparedRequest, decode, read_completion, read_piece
from triton_llama.translate import from_stream_error, grpc_errors

# Makes Triton (from 24.04 on) end a failed stream with the error's status; otherwise there is only a message.
_ERRORS_WITH_STATUS = ("triton_grpc_error", "true")
_LARGEST_MESSAGE = 2**31 - 1


class GrpcTransport:
    """One channel to one endpoint, in the event loop of the first request."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._metadata = tuple((name.lower(), value) for name, value in headers.items())
        self._options = _channel_options(connect_timeout)
        self._closed = False
        self._channel: grpc.aio.Channel | None = None

    async def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion | None:
        """Send one request and return its response, within `timeout` seconds; None if the model is decoupled."""
        message = _infer_request(model, request)
        with grpc_errors(self._endpoint, timeout):
            try:
                response = await self._stub().ModelInfer(message, timeout=timeout, metadata=self._metadata)
            except grpc.RpcError as error:
                # ModelInfer's refusal of a streaming (decoupled) model, for which nothing was run.
                if error.code() is grpc.StatusCode.UNIMPLEMENTED and "decoupled" in (error.details() or ""):
                    return None
                raise
        return read_completion(_outputs(response), request)

    async def stream(self, model: str, request: PreparedRequest, timeout: float) -> AsyncGenerator[Piece, None]:
        """Send one request at the first `anext` and yield its pieces, `timeout` seconds for all.

        Closing the generator cancels the request on the server.
        """
        message, metadata = _infer_request(model, request), (*self._metadata, _ERRORS_WITH_STATUS)
        with grpc_errors(self._endpoint, timeout):
            call = self._stub().ModelStreamInfer(iter([message]), timeout=timeout, metadata=metadata)
            started = False
            try:
                async for response in call:
                    if response.error_message:
                        raise from_stream_error(response.error_message, started=started)
                    yield read_piece(_outputs(response.infer_response))
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
        facts = MessageToDict(metadata, preserving_proto_field_name=True)
        settings = None if config is None else MessageToDict(config.config, preserving_proto_field_name=True)
        return read_status(self._endpoint, model, live.live, ready.ready, facts, model_ready.ready, settings)

    async def close(self) -> None:
        """Close the channel; streams in other tasks end with a LlamaConnectionError, other requests are cancelled."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    def _stub(self) -> GRPCInferenceServiceStub:
        if self._closed:
            raise RuntimeError("the client is closed")
        # Not in __init__: a channel belongs to the loop that is running when it is made.
        if self._channel is None:
            target = self._endpoint.authority
            self._channel = (
                grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(), options=self._options)
                if self._endpoint.tls
                else grpc.aio.insecure_channel(target, options=self._options)
            )
        return GRPCInferenceServiceStub(self._channel)


def _infer_request(model: str, request: PreparedRequest) -> messages.ModelInferRequest:
    """Encode a request; `ModelInfer` and `ModelStreamInfer` take the same message."""
    message = messages.ModelInferRequest(model_name=model, id=request.request_id)
    for tensor in request.tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.encode())
    for name in OUTPUT_NAMES:
        message.outputs.add(name=name)
    return message


def _outputs(response: messages.ModelInferResponse) -> dict[str, object]:
    # An output without content is missing.
    pairs = zip(response.outputs, response.raw_output_contents, strict=False)
    return {output.name: decode(output.name, output.datatype, output.shape, content) for output, content in pairs}


def _channel_options(connect_timeout: float) -> list[tuple[str, int]]:
    """Return a channel's options; `connect_timeout` in seconds.

    gRPC waits longer after each failed attempt to connect, up to two minutes by default, during which every request
    fails at once; with two seconds a client soon finds a restarted server.
    """
    return [
        ("grpc.max_send_message_length", _LARGEST_MESSAGE),
        ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
        # Despite its name, the time that one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", max(1, int(connect_timeout * 1000))),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # As over HTTP, the address given is the address used.
        ("grpc.enable_http_proxy", 0),
    ]
