"""gRPC for the synchronous client, on tritonclient, whose unary calls any thread may make; streams on its stubs."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from threading import Lock

import grpc
from tritonclient.grpc import InferenceServerClient
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException

from triton_llama import grpc_stream, grpc_wire
from triton_llama.completion import Completion
from triton_llama.endpoint import Endpoint
from triton_llama.joined import joined
from triton_llama.piece import Piece
from triton_llama.status import StatusAnswers
from triton_llama.tensors import PreparedRequest, read_completion
from triton_llama.translate import translated


class GrpcTransport:
    """One channel to one endpoint, and another one for streams, because tritonclient keeps its own to itself.

    gRPC connects at the first request, once for both: channels of one process to one address share their connection.
    """

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._headers = grpc_wire.metadata_headers(headers)
        self._options = grpc_wire.channel_options(connect_timeout)
        self._client = InferenceServerClient(endpoint.authority, ssl=endpoint.tls, channel_args=self._options)
        self._lock = Lock()
        self._stream_channel: grpc.Channel | None = None
        self._closed = False
        self._decoupled = False

    def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Send one request and wait for its answer, at most `timeout` seconds."""
        self._check_open()
        with translated(self._endpoint, timeout):
            if not self._decoupled:
                try:
                    outputs = self._client.infer(
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
        return joined(self.stream(model, request, timeout), request)

    def stream(self, model: str, request: PreparedRequest, timeout: float) -> Generator[Piece, None, None]:
        """Send one request at the first `next`, and yield the pieces of its answer; `timeout` seconds for all of it.

        Closing the generator cancels the request on the server.
        """
        try:
            with translated(self._endpoint, timeout), grpc_stream.as_tritonclient_errors():
                call = GRPCInferenceServiceStub(self._streams()).ModelStreamInfer(
                    iter([grpc_stream.stream_request(model, request)]),
                    timeout=timeout,
                    metadata=grpc_stream.stream_metadata(self._headers),
                )
                try:
                    for number, response in enumerate(call):
                        yield grpc_stream.read_response(response, started=number > 0)
                finally:
                    # Has no effect on one that has ended.
                    call.cancel()
        except KeyboardInterrupt:
            # One of grpc's locks may stay locked for ever if Ctrl-C strikes while it is being taken: every later
            # stream on that channel would hang. The next one gets another channel.
            with self._lock:
                self._stream_channel = None
            raise

    def status(self, model: str, timeout: float) -> StatusAnswers:
        """Ask what there is to know about the server and the model, each question within `timeout` seconds."""
        self._check_open()
        client, headers = self._client, self._headers
        with translated(self._endpoint, timeout):
            model_ready = bool(client.is_model_ready(model, headers=headers, client_timeout=timeout))
            metadata = client.get_server_metadata(headers=headers, as_json=True, client_timeout=timeout)
            config = None
            if model_ready:
                answer = client.get_model_config(model, headers=headers, as_json=True, client_timeout=timeout)
                config = grpc_wire.read_object(grpc_wire.read_object(answer).get("config"))
            return StatusAnswers(
                live=bool(client.is_server_live(headers=headers, client_timeout=timeout)),
                ready=bool(client.is_server_ready(headers=headers, client_timeout=timeout)),
                metadata=grpc_wire.read_object(metadata),
                model_ready=model_ready,
                config=config,
            )

    def close(self) -> None:
        """Close the channel; requests in flight in other threads end with a LlamaConnectionError."""
        with self._lock:
            self._closed = True
            if self._stream_channel is not None:
                self._stream_channel.close()
        self._client.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the client is closed")

    def _streams(self) -> grpc.Channel:
        with self._lock:
            self._check_open()
            if self._stream_channel is None:
                target = self._endpoint.authority
                self._stream_channel = (
                    grpc.secure_channel(target, grpc.ssl_channel_credentials(), options=self._options)
                    if self._endpoint.tls
                    else grpc.insecure_channel(target, options=self._options)
                )
            return self._stream_channel
