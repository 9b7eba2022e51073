"""Streams of chunks that run at the same time, merged to one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from triton_llama.completion import Chunk

ChunkStream = AsyncGenerator[list[Chunk], None]
"""The chunks of a request, in lists: those of one response of Triton. Closing it cancels what still runs."""

_MAX_QUEUED = 64
"""Lists of chunks that wait for a client that reads slowly; beyond them gRPC's flow control holds the server's."""


def merge(streams: Sequence[ChunkStream]) -> ChunkStream:
    """Return the chunks of streams that run at the same time; the first error of one is raised and ends all."""
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _merge(streams: Sequence[ChunkStream]) -> ChunkStream:
    queue: asyncio.Queue[list[Chunk] | Exception | None] = asyncio.Queue(_MAX_QUEUED)

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
