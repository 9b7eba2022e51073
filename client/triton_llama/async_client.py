"""The asyncio client: the names, arguments, errors and completions of `LlamaClient`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Self, Unpack, cast, overload

from triton_llama.client import BaseClient, Prompts, prepare_all
from triton_llama.completion import AsyncCompletionStream, Completion
from triton_llama.errors import RejectedInputError, TritonLlamaError
from triton_llama.sampling_params import Options, SamplingParams
from triton_llama.status import ServerStatus
from triton_llama.tensors import PreparedRequest, prepare
from triton_llama.translate import DecoupledModelError

if TYPE_CHECKING:
    from triton_llama.grpc_transport import AsyncGrpcTransport
    from triton_llama.http_transport import AsyncHttpTransport


class AsyncLlamaClient(BaseClient["AsyncHttpTransport | AsyncGrpcTransport"]):
    """A client of one model on one server, for the event loop in which it sends its first request.

        async with AsyncLlamaClient("localhost:8000") as client:
            print((await client.generate("A list comprehension", max_tokens=40)).text)

    Cancelling a task ends its request; over gRPC, and for every stream, the server cancels it too.
    """

    @overload
    async def generate(
        self, prompt: str, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Completion: ...

    @overload
    async def generate(
        self,
        prompt: Prompts,
        params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[False] = False,
        **options: Unpack[Options],
    ) -> list[Completion]: ...

    @overload
    async def generate(
        self,
        prompt: Prompts,
        params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[True],
        **options: Unpack[Options],
    ) -> list[Completion | TritonLlamaError]: ...

    async def generate(
        self,
        prompt: str | Sequence[str],
        params: SamplingParams | None = None,
        *,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> Completion | list[Completion] | list[Completion | TritonLlamaError]:
        """Complete a prompt, or each prompt of a list, as `LlamaClient.generate` does.

        Unless `return_exceptions`, the first error to come is raised, and cancels the list's other requests.
        """
        chosen, seconds = self._choose(params, **options)
        if isinstance(prompt, str):
            return await self._infer(prepare(prompt, chosen), seconds)
        requests = prepare_all(prompt, chosen, keep_errors=return_exceptions)
        outcomes = await self._send(requests, seconds, return_exceptions)
        return outcomes if return_exceptions else cast("list[Completion]", outcomes)

    def stream(
        self, prompt: str, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> AsyncCompletionStream:
        """Complete a prompt chunk by chunk, as `LlamaClient.stream` does.

        async with client.stream("A list comprehension", max_tokens=40) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
        """
        chosen, seconds = self._choose(params, **options)
        request = prepare(prompt, chosen, stream=True)
        return AsyncCompletionStream(self._transport.stream(self.model, request, seconds), request)

    async def status(self, *, timeout: float | None = None) -> ServerStatus:
        """Ask for the state of server and model, and for the live configuration, as `LlamaClient.status` does."""
        return await self._transport.status(self.model, self._seconds(timeout))

    async def close(self) -> None:
        """Close the connections; streams in other tasks end with a LlamaConnectionError."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _infer(self, request: PreparedRequest, timeout: float) -> Completion:
        if not self._decoupled:
            try:
                return await self._transport.infer(self.model, request, timeout)
            except DecoupledModelError:
                self._decoupled = True
        async with AsyncCompletionStream(self._transport.stream(self.model, request, timeout), request) as stream:
            async for _ in stream:
                pass
        return stream.completion

    async def _send(
        self, requests: Sequence[PreparedRequest | RejectedInputError], timeout: float, keep_errors: bool
    ) -> list[Completion | TritonLlamaError]:
        slots = asyncio.Semaphore(self._concurrency)

        async def outcome(index: int, request: PreparedRequest | RejectedInputError) -> Completion | TritonLlamaError:
            if isinstance(request, RejectedInputError):
                return request
            async with slots:
                try:
                    return await self._infer(request, timeout)
                except TritonLlamaError as error:
                    error.prompt_index = index
                    if keep_errors:
                        return error
                    raise

        tasks = [asyncio.create_task(outcome(index, request)) for index, request in enumerate(requests)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, connect_timeout: float, headers: Mapping[str, str]) -> AsyncHttpTransport | AsyncGrpcTransport:
        # Imported here: each brings a large library, and a client needs one of them.
        if self.endpoint.protocol == "grpc":
            from triton_llama.grpc_transport import AsyncGrpcTransport

            return AsyncGrpcTransport(self.endpoint, connect_timeout, headers)
        from triton_llama.http_transport import AsyncHttpTransport

        return AsyncHttpTransport(self.endpoint, connect_timeout, headers)
