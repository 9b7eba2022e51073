"""gRPC for the asyncio client, on tritonclient's asyncio half. A cancelled task cancels its request on the server."""

from __future__ import annotations

from collections.abc import Mapping

from tritonclient.grpc.aio import InferenceServerClient

from triton_llama import grpc_wire
from triton_llama.completion import Completion
from triton_llama.endpoint import Endpoint
from triton_llama.status import StatusAnswers
from triton_llama.tensors import PreparedRequest, read_completion
from triton_llama.translate import translated


class AsyncGrpcTransport:
    """One channel to one endpoint, in the event loop of the first request."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._headers = grpc_wire.metadata_headers(headers)
        self._client: InferenceServerClient | None = None
        self._closed = False

    async def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Send one request and wait for its answer, at most `timeout` seconds."""
        client = self._open_client()
        with translated(self._endpoint, timeout):
            outputs = await client.infer(
                model,
                grpc_wire.infer_inputs(request),
                outputs=grpc_wire.requested_outputs(),
                request_id=request.request_id,
                headers=self._headers,
                client_timeout=timeout,
            )
        return read_completion(outputs, request)

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
        """Close the channel; requests in flight are cancelled."""
        self._closed = True
        if self._client is not None:
            await self._client.close()

    def _open_client(self) -> InferenceServerClient:
        if self._closed:
            raise RuntimeError("the client is closed")
        # Not in __init__: a channel belongs to the loop that is running when it is made.
        if self._client is None:
            self._client = InferenceServerClient(
                self._endpoint.authority,
                ssl=self._endpoint.tls,
                channel_args=grpc_wire.channel_options(self._connect_timeout),
            )
        return self._client
