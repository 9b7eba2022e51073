"""One request in the engine: the chunks of its prompts, which run at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from triton_llama.errors import ServerError, TritonLlamaError
from triton_llama.tensors import Tensor

from triton_llama_openai.engine_client import Chunk, EngineClient
from triton_llama_openai.errors import from_engine
from triton_llama_openai.metrics import RequestRecord
from triton_llama_openai.protocol import SamplingRequest
from triton_llama_openai.responses import Usage

_QUEUED_RESPONSES = 64
"""Responses that wait for a client that reads slowly; beyond them gRPC's flow control holds the server's."""


@dataclass
class Generation:
    """One request's work in the engine.

    prompts: the inputs of each. timeout: seconds for all. fields: the request's field for each input of the model, for
    errors. record: of the request; it gets the token counts.
    """

    engine: EngineClient
    request: SamplingRequest
    prompts: Sequence[Sequence[Tensor]]
    timeout: float
    fields: Mapping[str, str]
    record: RequestRecord

    def __post_init__(self) -> None:
        self.usage = Usage(self.request.choices)
        self.record.ignored = self.request.ignored()

    async def chunks(self) -> AsyncGenerator[list[Chunk], None]:
        """Yield each response's chunks, counted. Closing the generator cancels what still runs.

        Raises:
            ApiError: the engine's error, in this request's words; one prompt's error ends all.
        """
        streams = [self._stream(number) for number in range(len(self.prompts))]
        try:
            async with aclosing(streams[0] if len(streams) == 1 else _merge(streams)) as responses:
                async for chunks in responses:
                    self.usage.add(chunks)
                    if self.request.streamed and any(chunk.num_output_tokens for chunk in chunks):
                        self.record.saw_text()
                    yield chunks
        except TritonLlamaError as error:
            raise from_engine(error, self.fields) from error
        finally:
            self.record.prompt_tokens = self.usage.prompt_tokens
            self.record.completion_tokens = self.usage.completion_tokens

    async def whole(self) -> list[Chunk]:
        """Return the only chunk of each choice of a request that isn't streamed, in order; raises as `chunks`."""
        async with aclosing(self.chunks()) as responses:
            chunks = [chunk async for response in responses for chunk in response]
        if len(chunks) != len(self.prompts) * self.request.choices:
            raise from_engine(ServerError(f"the server sent {len(chunks)} chunks of an answer without stream"), {})
        return sorted(chunks, key=lambda chunk: chunk.index)

    def _stream(self, number: int) -> AsyncGenerator[list[Chunk], None]:
        request_id = self.record.id if len(self.prompts) == 1 else f"{self.record.id}-{number}"
        first = number * self.request.choices
        choices = range(first, first + self.request.choices)
        return self.engine.stream(self.prompts[number], request_id, choices, self.timeout)


async def _merge(streams: Sequence[AsyncGenerator[list[Chunk], None]]) -> AsyncGenerator[list[Chunk], None]:
    """Yield the responses of streams that run at the same time; raise the first error of one."""
    queue: asyncio.Queue[list[Chunk] | Exception | None] = asyncio.Queue(_QUEUED_RESPONSES)

    async def read(stream: AsyncGenerator[list[Chunk], None]) -> None:
        try:
            async with aclosing(stream):
                async for chunks in stream:
                    await queue.put(chunks)
            await queue.put(None)
        except Exception as error:  # noqa: BLE001  raised again below
            await queue.put(error)

    readers = [asyncio.create_task(read(stream)) for stream in streams]
    try:
        unfinished = len(readers)
        while unfinished:
            match await queue.get():
                case None:
                    unfinished -= 1
                case Exception() as error:
                    raise error
                case chunks:
                    yield chunks
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
