"""gRPC for the asyncio client, on tritonclient's asyncio half. A cancelled task cancels its request on the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

import grpc
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException

from triton_llama import grpc_stream, grpc_wire
from triton_llama.completion import Completion
from triton_llama.endpoint import Endpoint
from triton_llama.errors import LlamaConnectionError
from triton_llama.joined import joined_async
from triton_llama.piece import Piece
from triton_llama.status import StatusAnswers
from triton_llama.tensors import PreparedRequest, read_completion
from triton_llama.translate import translated


class AsyncGrpcTransport:
    """One channel to one endpoint, and another one for streams (see `GrpcTransport`), in the first request's loop."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._headers = grpc_wire.metadata_headers(headers)
        self._options = grpc_wire.channel_options(connect_timeout)
        self._client: InferenceServerClient | None = None
        self._stream_channel: grpc.aio.Channel | None = None
        self._closed = False
        self._decoupled = False

    async def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Send one request and wait for its answer, at most `timeout` seconds."""
        client = self._open_client()
        with translated(self._endpoint, timeout):
            if not self._decoupled:
                try:
                    outputs = await client.infer(
                        model,
                        grpc_wire.infer_inputs(request),
                        outputs=grpc_wire.requested_outputs(),
                        request_id=request.request_id,
                        headers=self._headers,
                        client_timeout=timeout,
                    )
                    return read_completion(outputs, request)
                except InferenceServerException as error:
                    if not grpc_stream.refuses_decoupled(error):
                        raise
                    # From now on, the way that takes every model.
                    self._decoupled = True
        return await joined_async(self.stream(model, request, timeout), request)

    async def stream(self, model: str, request: PreparedRequest, timeout: float) -> AsyncGenerator[Piece, None]:
        """Send one request at the first `anext`, and yield the pieces of its answer; `timeout` seconds for all of it.

        Closing the generator cancels the request on the server.
        """
        with translated(self._endpoint, timeout), grpc_stream.as_tritonclient_errors():
            call = GRPCInferenceServiceStub(self._streams()).ModelStreamInfer(
                iter([grpc_stream.stream_request(model, request)]),
                timeout=timeout,
                metadata=grpc_stream.stream_metadata(self._headers),
            )
            started = False
            try:
                async for response in call:
                    yield grpc_stream.read_response(response, started=started)
                    started = True
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if self._closed and not (task and task.cancelling()):
                    # Nobody cancelled the task: this is how grpc says that the channel was closed.
                    message = f"no connection to {self._endpoint}: the client was closed"
                    raise LlamaConnectionError(message) from error
                raise
            finally:
                # Has no effect on one that has ended.
                call.cancel()

    async def status(self, model: str, timeout: float) -> StatusAnswers:
        """Ask what there is to know about the server and the model, each question within `timeout` seconds."""
        client, headers = self._open_client(), self._headers
        with translated(self._endpoint, timeout):
            model_ready = bool(await client.is_model_ready(model, headers=headers, client_timeout=timeout))
            metadata = await client.get_server_metadata(headers=headers, as_json=True, client_timeout=timeout)
            config = None
            if model_ready:
                answer = await client.get_model_config(model, headers=headers, as_json=True, client_timeout=timeout)
                config = grpc_wire.read_object(grpc_wire.read_object(answer).get("config"))
            return StatusAnswers(
                live=bool(await client.is_server_live(headers=headers, client_timeout=timeout)),
                ready=bool(await client.is_server_ready(headers=headers, client_timeout=timeout)),
                metadata=grpc_wire.read_object(metadata),
                model_ready=model_ready,
                config=config,
            )

    async def close(self) -> None:
        """Close the channels; streams in other tasks end with a LlamaConnectionError, other requests are cancelled."""
        self._closed = True
        if self._stream_channel is not None:
            await self._stream_channel.close()
        if self._client is not None:
            await self._client.close()

    def _open_client(self) -> InferenceServerClient:
        if self._closed:
            raise RuntimeError("the client is closed")
        # Not in __init__: a channel belongs to the loop that is running when it is made.
        if self._client is None:
            self._client = InferenceServerClient(
                self._endpoint.authority, ssl=self._endpoint.tls, channel_args=self._options
            )
        return self._client

    def _streams(self) -> grpc.aio.Channel:
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._stream_channel is None:
            target = self._endpoint.authority
            self._stream_channel = (
                grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(), options=self._options)
                if self._endpoint.tls
                else grpc.aio.insecure_channel(target, options=self._options)
            )
        return self._stream_channel
