"""Streams of chunks: several at the same time, and the errors that their clients get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from triton_llama.completion import Chunk
from triton_llama.errors import TritonLlamaError

from triton_llama_openai.errors import from_triton
from triton_llama_openai.triton.inputs import field_of_prompt

ChunkStream = AsyncGenerator[list[Chunk], None]
"""The responses to a request, each as a list of its chunks. Closing it cancels what still runs."""

_QUEUED_RESPONSES = 64
"""Responses that wait for a client that reads slowly; beyond them gRPC's flow control holds the server's."""


def merge(streams: Sequence[ChunkStream]) -> ChunkStream:
    """Return the responses of streams that run at the same time; the first error of one is raised and ends all."""
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _merge(streams: Sequence[ChunkStream]) -> ChunkStream:
    queue: asyncio.Queue[list[Chunk] | Exception | None] = asyncio.Queue(_QUEUED_RESPONSES)

    async def read(stream: ChunkStream) -> None:
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


async def with_api_errors(chunks: ChunkStream, fields: Mapping[str, str], number: int, count: int) -> ChunkStream:
    """Yield the chunks of one of a request's `count` prompts; raise the engine's errors as ApiErrors.

    fields: the request's field for each input of the model.
    """
    prompt = {name: field_of_prompt(fields[name], number, count) for name in ("text_input", "input_ids")}
    try:
        async with aclosing(chunks):
            async for response in chunks:
                yield response
    except TritonLlamaError as error:
        raise from_triton(error, {**fields, **prompt}) from error
