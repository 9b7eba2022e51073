"""The asyncio client: `LlamaClient`'s twin, with the same names, arguments, errors and completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, cast, overload

from triton_llama import endpoint
from triton_llama.completion import Completion
from triton_llama.completion_stream import AsyncCompletionStream
from triton_llama.endpoint import Endpoint
from triton_llama.errors import TritonLlamaError
from triton_llama.limits import Limits
from triton_llama.many import ManyRequests
from triton_llama.piece import Piece
from triton_llama.sampling_params import SamplingOptions, SamplingParams
from triton_llama.status import ServerStatus, StatusAnswers, read_status
from triton_llama.tensors import PreparedRequest, prepare

if TYPE_CHECKING:
    from typing import Self, Unpack


class AsyncTransport(Protocol):
    """What the client needs of a protocol."""

    async def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Send one request and wait for its answer, at most `timeout` seconds."""

    def stream(self, model: str, request: PreparedRequest, timeout: float) -> AsyncGenerator[Piece, None]:
        """Send one request at the first `anext` and yield its pieces, `timeout` seconds for all; closing cancels it."""

    async def status(self, model: str, timeout: float) -> StatusAnswers:
        """Ask what there is to know about the server and the model, each question within `timeout` seconds."""

    async def close(self) -> None:
        """Close every connection."""


class AsyncLlamaClient:
    """A client of one model on one server, for the event loop in which it sends its first request.

        async with AsyncLlamaClient("localhost:8000") as client:
            print((await client.generate("A list comprehension", max_tokens=40)).text)

    Cancelling a task gives up its request; over gRPC, and of any stream, the server is told.
    """

    def __init__(
        self,
        url: str,
        protocol: endpoint.Protocol = "http",
        model: str = "llama",
        *,
        timeout: float = 60.0,
        connect_timeout: float = 5.0,
        concurrency: int = 32,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """See `LlamaClient`: the arguments are the same."""
        self.endpoint = Endpoint.parse(url, protocol)
        self.model = model
        self._limits = Limits(timeout, connect_timeout, concurrency)
        self._transport = _open_transport(self.endpoint, connect_timeout, headers or {})

    @overload
    async def generate(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion: ...

    @overload
    async def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[False] = False,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion]: ...

    @overload
    async def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[True],
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion | TritonLlamaError]: ...

    async def generate(
        self,
        prompt: str | Sequence[str],
        params: SamplingParams | None = None,
        *,
        return_exceptions: bool = False,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion | list[Completion] | list[Completion | TritonLlamaError]:
        """Complete a prompt, or each prompt of a list; see `LlamaClient.generate`, which this repeats."""
        chosen = (params or SamplingParams()).with_options(**sampling)
        seconds = self._limits.request_timeout(timeout)
        if isinstance(prompt, str):
            return await self._transport.infer(self.model, prepare(prompt, chosen), seconds)
        many = ManyRequests(prompt, chosen, keep_errors=return_exceptions)
        await self._run(many, seconds)
        outcomes = many.outcomes()
        return outcomes if return_exceptions else cast("list[Completion]", outcomes)

    def stream(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncCompletionStream:
        """Complete a prompt piece by piece; see `LlamaClient.stream`.

        async with client.stream("A list comprehension", max_tokens=40) as stream:
            async for piece in stream:
                print(piece.text, end="", flush=True)
        """
        chosen = (params or SamplingParams()).with_options(**sampling)
        seconds = self._limits.request_timeout(timeout)
        request = prepare(prompt, chosen, stream=True)
        return AsyncCompletionStream(self._transport.stream(self.model, request, seconds), request)

    async def status(self, *, timeout: float | None = None) -> ServerStatus:
        """Ask the server for its state, the model's and its live configuration; see `LlamaClient.status`."""
        answers = await self._transport.status(self.model, self._limits.request_timeout(timeout))
        return read_status(self.endpoint, self.model, answers)

    async def close(self) -> None:
        """Close the connections; streams in other tasks end with a LlamaConnectionError."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, many: ManyRequests, timeout: float) -> None:
        workers = [
            asyncio.create_task(self._work(many, timeout)) for _ in range(min(len(many), self._limits.concurrency))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            # They are only unfinished if this task was cancelled, or if one of them met an error of this package's own.
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, many: ManyRequests, timeout: float) -> None:
        while (next_one := many.take()) is not None:
            index, request = next_one
            try:
                many.record(index, await self._transport.infer(self.model, request, timeout))
            except TritonLlamaError as error:
                many.record(index, error)


def _open_transport(server: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> AsyncTransport:
    # Imported when needed: each brings a large library, and nobody needs both.
    if server.protocol == "grpc":
        from triton_llama.grpc_transport_async import AsyncGrpcTransport

        return AsyncGrpcTransport(server, connect_timeout, headers)
    from triton_llama.http_transport_async import AsyncHttpTransport

    return AsyncHttpTransport(server, connect_timeout, headers)
