"""The clients: a prompt in, a completion or its chunks out. A transport speaks the protocol."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, Self, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from triton_llama.address import Protocol, ServerAddress
from triton_llama.completion import AsyncCompletionStream, Completion, CompletionStream
from triton_llama.errors import DecoupledModelError, ServerError
from triton_llama.grpc_transport import AsyncGrpcTransport, GrpcTransport
from triton_llama.sampling_params import Options, SamplingOptions, SamplingParams
from triton_llama.status import ServerStatus
from triton_llama.tensors import PreparedRequest, prepare, prepare_embeddings

if TYPE_CHECKING:
    from triton_llama.http_transport import AsyncHttpTransport, HttpTransport

EMBEDDINGS_AT_ONCE = 16
"""Requests of one call of `embed` that are in flight together."""
TransportT = TypeVar("TransportT")


class _Client(Generic[TransportT]):
    """The arguments of both clients."""

    def __init__(
        self,
        url: str,
        protocol: Protocol = "http",
        model: str = "llama",
        *,
        timeout: float = 60.0,
        connect_timeout: float = 5.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Check the arguments; the first request connects.

        Args:
            url: `HOST:PORT`, or with a scheme: `http://`, `https://`, `grpc://`, `grpcs://`.
            protocol: `http` or `grpc`.
            model: the model's name in the repository.
            timeout: seconds. Over gRPC for a whole request or stream, after which the server cancels it. Over HTTP for
                each wait: to connect, to send, and for the next bytes of the answer, so that a stream may take longer
                as long as it goes on. A stream over HTTP is then cancelled on the server; another request is not.
            connect_timeout: seconds of `timeout` that making a connection may take.
            headers: sent with every request (an `Authorization` for a gateway, say).

        Raises:
            ValueError: a malformed URL, an unknown protocol, a timeout that isn't positive.
        """
        self.server = ServerAddress.parse(url, protocol)
        self.model = model
        self._timeout = _check_seconds("timeout", timeout)
        self._transport = self._open(_check_seconds("connect_timeout", connect_timeout), headers or {})
        # Set at the first refusal of a streaming (decoupled) model. Streams take every model, but over HTTP they carry
        # no status for errors, so they aren't the first choice.
        self._decoupled = False

    def _open(self, connect_timeout: float, headers: Mapping[str, str]) -> TransportT:
        raise NotImplementedError

    def _prepare(
        self,
        prompt: str,
        params: SamplingParams | None,
        stream: bool,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> tuple[PreparedRequest, float]:
        """Return a request and its timeout."""
        return prepare(prompt, (params or SamplingParams()).with_options(**sampling), stream), self._seconds(timeout)

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else _check_seconds("timeout", timeout)


class LlamaClient(_Client["HttpTransport | GrpcTransport"]):
    """A client of one model on one server; threads may share it.

        with LlamaClient("localhost:8000") as client:
            print(client.generate("A list comprehension", max_tokens=40).text)

    It never retries. Create it after a fork, not before: processes can't share connections.
    """

    def generate(self, prompt: str, params: SamplingParams | None = None, **options: Unpack[Options]) -> Completion:
        """Complete a prompt.

        Args:
            prompt: the prompt.
            params: how to sample; default `SamplingParams()`.
            **options: fields of `SamplingParams`, over those of `params`; and `timeout`, seconds, in place of the
                client's.

        Raises:
            TritonLlamaError: `triton_llama.errors` lists which.
        """
        return self._complete(*self._prepare(prompt, params, stream=False, **options))

    def embed(
        self, texts: Sequence[str], *, lora_name: str = "", timeout: float | None = None
    ) -> list[NDArray[np.float32]]:
        """Return the embedding of each text, [size], of a model whose setting `pooling` is on.

        Each text is a request, EMBEDDINGS_AT_ONCE at a time. lora_name: an adapter; `timeout` is for each, in seconds.

        After an error the texts that wait are not sent.

        Raises:
            TritonLlamaError: of the first text that fails.
        """
        requests, seconds = prepare_embeddings(texts, lora_name), self._seconds(timeout)
        with ThreadPoolExecutor(EMBEDDINGS_AT_ONCE) as threads:
            return list(threads.map(lambda request: _embedding_of(self._complete(request, seconds)), requests))

    def stream(self, prompt: str, params: SamplingParams | None = None, **options: Unpack[Options]) -> CompletionStream:
        """Complete a prompt chunk by chunk, as the server generates it; it must serve the config `streaming`.

            with client.stream("A list comprehension", max_tokens=40) as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)

        The first `next` sends the request. The arguments are those of `generate`; one client can run any number of
        streams, each in its own thread. Leaving the block early cancels the request.

        Raises:
            RejectedInputError: a value no tensor can hold. The stream raises all other errors of `generate`, before its
                first chunk or after any. A stream that ends without an error is complete.
        """
        request, timeout = self._prepare(prompt, params, stream=True, **options)
        chunks = self._transport.stream(self.model, request, timeout)
        return CompletionStream(chunks, request.request_id, request.seed)

    def status(self, *, timeout: float | None = None) -> ServerStatus:
        """Ask for the state of the server, of the model, and for its live configuration.

        `timeout` is for each of the questions, in seconds. A server that is up but not ready is an answer, not an
        error.

        Raises:
            TritonLlamaError: no server answers there.
        """
        return self._transport.status(self.model, self._seconds(timeout))

    def _complete(self, request: PreparedRequest, timeout: float) -> Completion:
        if not self._decoupled:
            try:
                return self._transport.infer(self.model, request, timeout)
            except DecoupledModelError:
                self._decoupled = True
        chunks = self._transport.stream(self.model, request, timeout)
        with CompletionStream(chunks, request.request_id, request.seed) as stream:
            for _ in stream:
                pass
        return stream.completion

    def close(self) -> None:
        """Close the connections. Over gRPC, requests in flight in other threads end with a LlamaConnectionError.

        Over HTTP a thread that waits for an answer goes on waiting, its timeout at most.
        """
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, connect_timeout: float, headers: Mapping[str, str]) -> HttpTransport | GrpcTransport:
        if self.server.protocol == "grpc":
            return GrpcTransport(self.server, connect_timeout, headers)
        # The OpenAI endpoint imports this package without httpx.
        from triton_llama.http_transport import HttpTransport

        return HttpTransport(self.server, connect_timeout, headers)


class AsyncLlamaClient(_Client["AsyncHttpTransport | AsyncGrpcTransport"]):
    """`LlamaClient` in asyncio, for the event loop in which it sends its first request.

        async with AsyncLlamaClient("localhost:8000") as client:
            print((await client.generate("A list comprehension", max_tokens=40)).text)

    Cancelling a task ends its request; over gRPC, and for every stream, the server cancels it too.
    """

    async def generate(
        self, prompt: str, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Complete a prompt, as `LlamaClient.generate` does."""
        return await self._complete(*self._prepare(prompt, params, stream=False, **options))

    async def embed(
        self, texts: Sequence[str], *, lora_name: str = "", timeout: float | None = None
    ) -> list[NDArray[np.float32]]:
        """Return the embedding of each text, [size], as `LlamaClient.embed` does."""
        requests, seconds = prepare_embeddings(texts, lora_name), self._seconds(timeout)
        free = asyncio.Semaphore(EMBEDDINGS_AT_ONCE)

        async def embed(request: PreparedRequest) -> NDArray[np.float32]:
            async with free:
                return _embedding_of(await self._complete(request, seconds))

        tasks = [asyncio.create_task(embed(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # After an error the others' answers have no reader.
            for task in tasks:
                task.cancel()

    def stream(
        self, prompt: str, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> AsyncCompletionStream:
        """Complete a prompt chunk by chunk, as `LlamaClient.stream` does:

            async with client.stream("A list comprehension", max_tokens=40) as stream:
                async for chunk in stream:
                    print(chunk.text, end="", flush=True)

        Leaving the block early cancels the request.
        """
        request, timeout = self._prepare(prompt, params, stream=True, **options)
        chunks = self._transport.stream(self.model, request, timeout)
        return AsyncCompletionStream(chunks, request.request_id, request.seed)

    async def status(self, *, timeout: float | None = None) -> ServerStatus:
        """Ask for the state of server and model, and for the live configuration, as `LlamaClient.status` does."""
        return await self._transport.status(self.model, self._seconds(timeout))

    async def _complete(self, request: PreparedRequest, timeout: float) -> Completion:
        if not self._decoupled:
            try:
                return await self._transport.infer(self.model, request, timeout)
            except DecoupledModelError:
                self._decoupled = True
        chunks = self._transport.stream(self.model, request, timeout)
        async with AsyncCompletionStream(chunks, request.request_id, request.seed) as stream:
            async for _ in stream:
                pass
        return stream.completion

    async def close(self) -> None:
        """Close the connections; finish or cancel the requests in other tasks before."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _open(self, connect_timeout: float, headers: Mapping[str, str]) -> AsyncHttpTransport | AsyncGrpcTransport:
        if self.server.protocol == "grpc":
            return AsyncGrpcTransport(self.server, connect_timeout, headers)
        from triton_llama.http_transport import AsyncHttpTransport

        return AsyncHttpTransport(self.server, connect_timeout, headers)


def _embedding_of(completion: Completion) -> NDArray[np.float32]:
    if completion.embedding is None:
        raise ServerError("the server's answer lacks the output embedding")
    return completion.embedding


def _check_seconds(name: str, seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{name} is {seconds}, must be a positive number of seconds")
    return seconds
