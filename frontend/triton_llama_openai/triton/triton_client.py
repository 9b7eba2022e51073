"""The connection to Triton, or a proxy of several: one gRPC stream for each request, and the chunks of its responses.

A separate stream makes a request's cancellation cheap and certain: closing it frees the request's slots after a few
steps, also for an answer that isn't streamed to the client. All streams share one HTTP/2 connection.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import grpc
from pydantic import ValidationError
from triton_llama.address import ServerAddress
from triton_llama.completion import Chunk
from triton_llama.errors import (
    LOST,
    LlamaConnectionError,
    RejectedInputError,
    ServerError,
    TritonLlamaError,
    from_stream_error,
    grpc_errors,
)
from triton_llama.grpc_transport import open_channel
from triton_llama.outputs import OUTPUT_NAMES, read_chunks
from triton_llama.tensors import Tensor, decode_response, encode_request
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from triton_llama_openai.errors import from_validation
from triton_llama_openai.record import TRACEPARENT
from triton_llama_openai.triton.description import ADAPTERS, Adapter, Description, parse_description
from triton_llama_openai.triton.shared_prefixes import REPLICA_HEADER

CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
"""A connection on which nothing arrives for 10 s is asked, and ended after 10 more: its machine may have vanished."""
CONFIG_S = 60.0
"""Seconds after which the model's config is read again."""
CONFIG_TIMEOUT_S = 2.0

OUTPUTS_OF_ONE = (*OUTPUT_NAMES, "stop_reason", "logprobs", "prompt_logprobs", "output_ids")
"""The outputs that are read of a request for one choice, whose seed the request has."""
OUTPUTS = (*OUTPUTS_OF_ONE, "sequence_index", "seed")
"""Those of a request for several choices."""


class TritonClient:
    """One channel to one Triton, for one event loop. gRPC connects at the first request and again after a failure."""

    def __init__(self, server: ServerAddress, model: str) -> None:
        self.server = server
        self.model = model
        self.doubt = asyncio.Event()
        """Set when another model may be served: after an interruption, and when the model says so."""
        self.adapters: Mapping[str, Adapter] = {}
        """The loaded ones by name: of the last description, or of the last answer to a load or an unload."""
        self.closed = False
        self._channel: grpc.aio.Channel | None = None
        self._calls: GRPCInferenceServiceStub | None = None
        self._decoupled = True
        self._config_time = -math.inf

    async def stream(
        self,
        tensors: Sequence[Tensor],
        outputs: Sequence[str],
        request_id: str,
        choices: range,
        timeout: float,
        key: str,
        skipped: Collection[int] = (),
    ) -> AsyncGenerator[list[Chunk], None]:
        """Send one request and yield each response as a list of its chunks; `timeout` seconds for all of it.

        outputs: names of those that are read. choices: the indices of its choices. key: by which a proxy picks its
        replica. skipped: choices that aren't wanted. Closing the stream cancels the request on the server. A stream
        that ends without an error is complete; one with skipped choices ends when all others are.

        Raises:
            TritonLlamaError: the connection, Triton or the model failed, or a response violates the contract.
        """
        unfinished = set(choices).difference(skipped)
        with self.errors(timeout):
            request = encode_request(self.model, request_id, tensors, outputs)
            if traceparent := TRACEPARENT.get():
                request.parameters["traceparent"].string_param = traceparent
            # Without ERRORS_WITH_STATUS: Triton 2.51 logs an internal error for each call that it ends with a status.
            metadata = ((REPLICA_HEADER, key),)
            call = self.stub().ModelStreamInfer(iter([request]), timeout=timeout, metadata=metadata)
        responses = aiter(call)
        try:
            with self.errors(timeout):
                while (unfinished or not skipped) and (response := await anext(responses, None)) is not None:
                    if response.error_message:
                        raise from_stream_error(response.error_message, started=True)
                    values = decode_response(response.infer_response)
                    # A response without outputs is only the end of the stream.
                    chunks = read_chunks(values, choices) if values else []
                    unfinished.difference_update([chunk.index for chunk in chunks if chunk.finish_reason])
                    yield [chunk for chunk in chunks if chunk.index not in skipped] if skipped else chunks
        finally:
            # No effect on a call that has ended.
            call.cancel()
        if unfinished:
            message = f"the server's stream ended without the finish_reason of choice {min(unfinished)}"
            raise ServerError(message, LOST)

    async def is_ready(self, timeout: float, key: str = "") -> bool:
        """Return whether the model can answer; raises TritonLlamaError without an answer. key: see `stream`."""
        with self.errors(timeout):
            request = messages.ModelReadyRequest(name=self.model)
            metadata = ((REPLICA_HEADER, key),) if key else ()
            return bool((await self.stub().ModelReady(request, timeout=timeout, metadata=metadata)).ready)

    async def description(self, known_digest: str, timeout: float) -> Description | None:
        """Return the description of the served model, None if it has the known digest; note the adapters beside it.

        Raises:
            TritonLlamaError: the connection, Triton or the model failed, or the model doesn't describe itself.
        """
        adapters_before = self.adapters
        try:
            text = await self._command([Tensor("description_digest", "BYTES", (known_digest,))], timeout)
            # In a thread: a large vocabulary takes long.
            description, adapters = await asyncio.to_thread(parse_description, text, known_digest)
        except RejectedInputError as error:
            raise self._other_version(error) from error
        except ValidationError as violation:
            raise self._other_version(from_validation(violation)) from violation
        # A load or an unload that was answered meanwhile has the newer list.
        if self.adapters is adapters_before:
            self.adapters = _by_name(adapters)
        return description

    async def load_adapter(self, name: str, path: str, number: int | None, timeout: float) -> None:
        """Load the adapter in a folder of the server; note the adapters of the answer.

        number: the adapter's `lora_task_id`. Raises TritonLlamaError.
        """
        tensors = [Tensor("lora_name", "BYTES", (name,)), Tensor("lora_path", "BYTES", (path,))]
        if number is not None:
            tensors.append(Tensor("lora_task_id", "UINT64", (number,)))
        await self._update_adapters(tensors, timeout)

    async def unload_adapter(self, name: str, timeout: float) -> None:
        """Unload an adapter once its requests have ended; note the adapters of the answer. Raises TritonLlamaError."""
        await self._update_adapters(
            [Tensor("lora_name", "BYTES", (name,)), Tensor("lora_path", "BYTES", ("",))], timeout
        )

    async def _update_adapters(self, tensors: Sequence[Tensor], timeout: float) -> None:
        text = await self._command(tensors, timeout)
        try:
            self.adapters = _by_name(ADAPTERS.validate_json(text))
        except ValidationError as violation:
            reason = from_validation(violation)
            raise ServerError(f"the answer of {self.server} is no list of adapters: {reason}") from violation

    async def _command(self, tensors: Sequence[Tensor], timeout: float) -> str:
        """Send a request without a prompt; return its text."""
        request = encode_request(self.model, "command", tensors, ["text_output"])
        text = "{}"
        with self.errors(timeout):
            async for response in self.stub().ModelStreamInfer(iter([request]), timeout=timeout):
                if response.error_message:
                    raise from_stream_error(response.error_message, started=False)
                # The end of a stream has no output.
                text = str(decode_response(response.infer_response).get("text_output", [text])[0])
        return text

    def _other_version(self, error: Exception) -> ServerError:
        model = f"the model {self.model} of {self.server}"
        return ServerError(f"{model} has no description for this endpoint: its server is of another version ({error})")

    async def can_stream(self) -> bool:
        """Return whether the model can stream: its config says so, or couldn't be read yet."""
        if time.monotonic() - self._config_time >= CONFIG_S:
            with suppress(TritonLlamaError), self.errors(CONFIG_TIMEOUT_S):
                request = messages.ModelConfigRequest(name=self.model)
                response = await self.stub().ModelConfig(request, timeout=CONFIG_TIMEOUT_S)
                self._decoupled = response.config.model_transaction_policy.decoupled
                self._config_time = time.monotonic()
        return self._decoupled

    async def close(self) -> None:
        """Close the channel for good; streams that still run end with a LlamaConnectionError."""
        self.closed = True
        if self._channel is not None:
            await self._channel.close()

    @contextmanager
    def errors(self, timeout: float) -> Iterator[None]:
        """Raise gRPC's exceptions in the block as TritonLlamaErrors. timeout: for the message."""
        try:
            with grpc_errors(self.server, timeout):
                yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The task wasn't cancelled: this is how grpc reports a closed channel.
            raise self._stopping() from error

    def stub(self) -> GRPCInferenceServiceStub:
        """Return the calls of an open channel."""
        if self.closed:
            raise self._stopping()
        # Not in __init__: a channel belongs to the loop that is running when it is made.
        if self._channel is None or self._calls is None:
            self._channel = open_channel(grpc.aio, self.server, CONNECT_TIMEOUT_S, _KEEPALIVE)
            self._calls = GRPCInferenceServiceStub(self._channel)
        return self._calls

    def _stopping(self) -> LlamaConnectionError:
        return LlamaConnectionError(f"no connection to {self.server}: the endpoint is stopping")


def _by_name(adapters: Sequence[Adapter]) -> dict[str, Adapter]:
    return {adapter.name: adapter for adapter in adapters}
