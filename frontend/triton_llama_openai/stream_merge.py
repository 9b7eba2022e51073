"""Several streams of chunks as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from triton_llama.completion import Chunk

_QUEUED_RESPONSES = 64
"""Responses that wait for a client that reads slowly; beyond them gRPC's flow control holds the server's."""

ChunkStream = AsyncGenerator[list[Chunk], None]


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
