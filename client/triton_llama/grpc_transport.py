"""gRPC for the synchronous client, on tritonclient, whose unary calls any thread may make."""

from __future__ import annotations

from collections.abc import Mapping

from tritonclient.grpc import InferenceServerClient

from triton_llama import grpc_wire
from triton_llama.completion import Completion
from triton_llama.endpoint import Endpoint
from triton_llama.status import StatusAnswers
from triton_llama.tensors import PreparedRequest, read_completion
from triton_llama.translate import translated


class GrpcTransport:
    """One channel to one endpoint; gRPC connects at the first request."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._headers = grpc_wire.metadata_headers(headers)
        self._client = InferenceServerClient(
            endpoint.authority, ssl=endpoint.tls, channel_args=grpc_wire.channel_options(connect_timeout)
        )
        self._closed = False

    def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Send one request and wait for its answer, at most `timeout` seconds."""
        self._check_open()
        with translated(self._endpoint, timeout):
            outputs = self._client.infer(
                model,
                grpc_wire.infer_inputs(request),
                outputs=grpc_wire.requested_outputs(),
                request_id=request.request_id,
                headers=self._headers,
                client_timeout=timeout,
            )
        return read_completion(outputs, request)

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
        self._closed = True
        self._client.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the client is closed")
