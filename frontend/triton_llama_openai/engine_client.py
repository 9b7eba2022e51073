"""The connection to Triton: one gRPC stream for each request, and the chunks of its responses.

A separate stream makes a request's cancellation cheap and certain: closing it frees the request's slots after a few
steps, also for an answer that isn't streamed to the client. All streams share one HTTP/2 connection.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import struct
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import grpc
from triton_llama.endpoint import Endpoint
from triton_llama.errors import (
    LlamaConnectionError,
    RejectedInputError,
    ServerError,
    TritonLlamaError,
    from_stream_error,
    grpc_errors,
    one_line,
)
from triton_llama.grpc_transport import open_channel
from triton_llama.sampling_params import INPUTS
from triton_llama.tensors import Tensor
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from triton_llama_openai.logprobs import TokenLogprobs

CONNECT_TIMEOUT_S = 10.0
CONFIG_S = 60.0
"""Seconds after which the model's config is read again."""
CONFIG_TIMEOUT_S = 2.0

OUTPUTS = (
    "text_output",
    "finish_reason",
    "num_input_tokens",
    "num_output_tokens",
    "stop_reason",
    "sequence_index",
    "logprobs",
    "prompt_logprobs",
    "num_cached_tokens",
    "output_ids",
    "seed",
)
"""The outputs that are read: the first four of every response, the others of those that have them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of one choice. An answer that isn't streamed to the client is joined to one chunk a choice."""

    index: int
    """Index of the choice, counted over all prompts of the request."""
    text: str
    finish_reason: str
    """stop, length, or empty while the choice goes on."""
    num_input_tokens: int
    num_output_tokens: int
    """The chunk's own."""
    stop_reason: str = ""
    """The stop string, the decimal id of the stop token, or empty."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    """Tokens of the prompt that were cached; only in the choice's last chunk."""
    output_ids: tuple[int, ...] = ()
    """The chunk's own tokens."""
    seed: int | None = None
    """The choice's own."""


class EngineClient:
    """One channel to one Triton, for one event loop. gRPC connects at the first request and again after a failure."""

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        self.endpoint = endpoint
        self.model = model
        self.last_heard = 0.0
        """Monotonic time of Triton's last response to a stream or a probe."""
        self.last_response = 0.0
        """Monotonic time of the model's last response without an error."""
        self._channel: grpc.aio.Channel | None = None
        self._calls: GRPCInferenceServiceStub | None = None
        self._closed = False
        self._decoupled = True
        self._config_time = -math.inf
        self._end_reason = "the endpoint is stopping"
        # For each stream that has begun and is being read: the time since when its next response is awaited.
        self._awaited: dict[grpc.aio.Call, float] = {}

    async def stream(
        self, tensors: Sequence[Tensor], request_id: str, choices: range, timeout: float
    ) -> AsyncGenerator[list[Chunk], None]:
        """Send one request at the first `anext` and yield each response's chunks, `timeout` seconds for all.

        choices: the indices of its choices. Closing the generator cancels the request on the server. A stream that ends
        without an error is complete.

        Raises:
            TritonLlamaError: the connection, Triton or the model failed, or a response violates the contract.
        """
        unfinished = set(choices)
        with self._errors(timeout):
            message = _request(self.model, tensors, request_id)
            # Without ERRORS_WITH_STATUS: Triton 2.51 logs an internal error for each call that it ends with a status.
            call = self._stub().ModelStreamInfer(iter([message]), timeout=timeout)
            try:
                async for response in call:
                    self.last_heard = time.monotonic()
                    # A reader that takes its time isn't waiting for Triton.
                    self._awaited.pop(call, None)
                    if response.error_message:
                        raise _error(response.error_message)
                    self.last_response = self.last_heard
                    chunks = read_chunks(response.infer_response, choices)
                    unfinished.difference_update(chunk.index for chunk in chunks if chunk.finish_reason)
                    yield chunks
                    self._awaited[call] = time.monotonic()
            finally:
                self._awaited.pop(call, None)
                # No effect on a call that has ended.
                call.cancel()
        if unfinished:
            raise ServerError(f"the server's stream ended without the finish_reason of choice {min(unfinished)}")

    def silence(self) -> float:
        """Return the seconds without a response to any stream; 0 unless one that has begun waits for its next."""
        if not self._awaited:
            return 0.0
        return time.monotonic() - max(self.last_response, min(self._awaited.values()))

    async def is_ready(self, timeout: float) -> bool:
        """Return whether the model can answer; raises TritonLlamaError if Triton can't be reached."""
        with self._errors(timeout):
            request = messages.ModelReadyRequest(name=self.model)
            ready = bool((await self._stub().ModelReady(request, timeout=timeout)).ready)
        self.last_heard = time.monotonic()
        return ready

    async def config(self, timeout: float) -> bytes:
        """Return the model's live configuration, serialized the same way each time."""
        with self._errors(timeout):
            request = messages.ModelConfigRequest(name=self.model)
            response = await self._stub().ModelConfig(request, timeout=timeout)
        self._decoupled = response.config.model_transaction_policy.decoupled
        self._config_time = time.monotonic()
        return bytes(response.config.SerializeToString(deterministic=True))

    async def can_stream(self) -> bool:
        """Return whether the model can stream: its config says so, or couldn't be read yet."""
        if time.monotonic() - self._config_time >= CONFIG_S:
            with suppress(TritonLlamaError):
                await self.config(CONFIG_TIMEOUT_S)
        return self._decoupled

    async def disconnect(self, reason: str) -> None:
        """Close the channel; streams that run end with a LlamaConnectionError. The next request connects again."""
        self._end_reason = reason
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Close the channel for good; streams that still run end with a LlamaConnectionError."""
        self._closed = True
        await self.disconnect("the endpoint is stopping")

    @contextmanager
    def _errors(self, timeout: float) -> Iterator[None]:
        try:
            with grpc_errors(self.endpoint, timeout):
                yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The task wasn't cancelled: this is how grpc reports a closed channel.
            raise LlamaConnectionError(f"no connection to {self.endpoint}: {self._end_reason}") from error

    def _stub(self) -> GRPCInferenceServiceStub:
        if self._closed:
            raise LlamaConnectionError(f"no connection to {self.endpoint}: {self._end_reason}")
        # Not in __init__: a channel belongs to the loop that is running when it is made.
        if self._channel is None or self._calls is None:
            self._channel = open_channel(grpc.aio, self.endpoint, CONNECT_TIMEOUT_S)
            self._calls = GRPCInferenceServiceStub(self._channel)
        return self._calls


def _error(message: str) -> TritonLlamaError:
    """Return the error of a stream's message, which has no status.

    A refusal may quote user text that looks like a connection error, so the first word decides: one of the model's
    inputs, also one that the request leaves to the checkpoint.
    """
    begin = _WORD.match(message)
    if begin is not None and begin[0] in _INPUTS:
        return RejectedInputError(one_line(message))
    return from_stream_error(message, started=True)


_WORD = re.compile(r"\w+")
_INPUTS = {"text_input", "input_ids", "resume_ids", "stream", *INPUTS}


def _request(model: str, tensors: Sequence[Tensor], request_id: str) -> messages.ModelInferRequest:
    message = messages.ModelInferRequest(model_name=model, id=request_id)
    for tensor in tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.encode())
    for name in OUTPUTS:
        message.outputs.add(name=name)
    return message


_INTEGERS = {"INT32": "<i", "INT64": "<q", "UINT64": "<Q"}


def read_chunks(response: messages.ModelInferResponse, choices: range) -> list[Chunk]:
    """Return a response's chunks: one of a stream has one choice's, any other all choices'.

    Raises:
        ServerError: an output is missing or isn't what the contract says.
    """
    outputs = {
        output.name: _decode(output.name, output.datatype, raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=False)
    }
    if not outputs:
        # Only the end of the stream.
        return []
    try:
        rows = range(len(outputs["text_output"]))
        indices = [int(index) for index in outputs.get("sequence_index", rows)]
        if not all(0 <= index < len(choices) for index in indices):
            raise ServerError(f"the server answered about choices {indices} of {len(choices)}")
        return [_chunk(outputs, row, choices[indices[row]]) for row in rows]
    except KeyError as error:
        raise ServerError(f"the server's answer lacks the output {error.args[0]}") from None
    except (IndexError, TypeError, ValueError) as error:
        raise ServerError(f"the server's answer violates the contract: {error}") from error


def _chunk(outputs: dict[str, list[str] | list[int]], row: int, index: int) -> Chunk:
    # [rows, tokens], with -1 beyond a shorter row's end.
    ids = outputs.get("output_ids", [])
    width = len(ids) // len(outputs["text_output"])
    return Chunk(
        index=index,
        text=str(outputs["text_output"][row]),
        finish_reason=str(outputs["finish_reason"][row]),
        num_input_tokens=int(outputs["num_input_tokens"][row]),
        num_output_tokens=int(outputs["num_output_tokens"][row]),
        stop_reason=str(outputs["stop_reason"][row]) if "stop_reason" in outputs else "",
        logprobs=json.loads(str(outputs["logprobs"][row]) or "[]") if "logprobs" in outputs else [],
        prompt_logprobs=json.loads(str(outputs["prompt_logprobs"][row]) or "null")
        if "prompt_logprobs" in outputs
        else None,
        num_cached_tokens=int(outputs["num_cached_tokens"][row]) if "num_cached_tokens" in outputs else None,
        output_ids=tuple(int(token) for token in ids[row * width : (row + 1) * width] if int(token) >= 0),
        seed=int(outputs["seed"][row]) if "seed" in outputs else None,
    )


def _decode(name: str, datatype: str, content: bytes) -> list[str] | list[int]:
    """Return an output's values; Triton's binary form has each string's length."""
    try:
        if datatype == "BYTES":
            return _strings(content)
        if datatype in _INTEGERS:
            return [value for (value,) in struct.iter_unpack(_INTEGERS[datatype], content)]
    except (struct.error, UnicodeDecodeError) as error:
        raise ServerError(f"the server's output {name} of type {datatype} can't be decoded: {error}") from error
    raise ServerError(f"the server's output {name} has the type {datatype}")


def _strings(content: bytes) -> list[str]:
    texts, start = [], 0
    while start < len(content):
        (size,) = struct.unpack_from("<I", content, start)
        (text,) = struct.unpack_from(f"{size}s", content, start + 4)
        texts.append(text.decode())
        start += 4 + size
    return texts
