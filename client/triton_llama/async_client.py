"""The asyncio client: the names, arguments, errors and completions of `LlamaClient`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Self, Unpack, cast, overload

from triton_llama.client import BaseClient, Exchange, Prompts, Result
from triton_llama.completion import AsyncCompletionStream, Completion
from triton_llama.errors import TritonLlamaError
from triton_llama.many import ManyRequests
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
        """Complete a prompt, or each prompt of a list, as `LlamaClient.generate` does."""
        chosen, seconds = self._choose(params, **options)
        if isinstance(prompt, str):
            return await self._infer(prepare(prompt, chosen), seconds)
        many = ManyRequests(prompt, chosen, keep_errors=return_exceptions)
        await self._send(many, seconds)
        outcomes = many.outcomes()
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
        exchange: Exchange[ServerStatus] = self._transport.wire.status(self.endpoint, self.model)
        return await self._run(exchange, self._seconds(timeout))

    async def close(self) -> None:
        """Close the connections; streams in other tasks end with a LlamaConnectionError."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _infer(self, request: PreparedRequest, timeout: float) -> Completion:
        if not self._decoupled:
            exchange: Exchange[Completion] = self._transport.wire.infer(self.endpoint, self.model, request)
            try:
                return await self._run(exchange, timeout)
            except DecoupledModelError:
                self._decoupled = True
        async with AsyncCompletionStream(self._transport.stream(self.model, request, timeout), request) as stream:
            async for _ in stream:
                pass
        return stream.completion

    async def _run(self, exchange: Exchange[Result], timeout: float) -> Result:
        try:
            request = next(exchange)
            while True:
                request = exchange.send(await self._transport.send(request, timeout))
        except StopIteration as end:
            return cast(Result, end.value)

    async def _send(self, many: ManyRequests, timeout: float) -> None:
        workers = [asyncio.create_task(self._work(many, timeout)) for _ in range(min(len(many), self._concurrency))]
        try:
            await asyncio.gather(*workers)
        finally:
            # Unfinished only if this task was cancelled, or a worker raised an error of this package's own.
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, many: ManyRequests, timeout: float) -> None:
        while (next_one := many.take()) is not None:
            index, request = next_one
            try:
                many.record(index, await self._infer(request, timeout))
            except TritonLlamaError as error:
                many.record(index, error)

    def _open(self, connect_timeout: float, headers: Mapping[str, str]) -> AsyncHttpTransport | AsyncGrpcTransport:
        # Imported here: each brings a large library, and a client needs one of them.
        if self.endpoint.protocol == "grpc":
            from triton_llama.grpc_transport import AsyncGrpcTransport

            return AsyncGrpcTransport(self.endpoint, connect_timeout, headers)
        from triton_llama.http_transport import AsyncHttpTransport

        return AsyncHttpTransport(self.endpoint, connect_timeout, headers)
