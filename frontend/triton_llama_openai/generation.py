"""All prompts of one request, generated at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from triton_llama.tensors import Tensor

from triton_llama_openai.engine_client import Delta, EngineClient

_AHEAD = 64
"""Responses that wait for a client that reads slowly; beyond them gRPC's flow control holds the server's."""


@dataclass(frozen=True)
class Job:
    """What a request asks of the model: the inputs of each prompt. timeout: seconds for all."""

    prompts: Sequence[Sequence[Tensor]]
    request_id: str
    choices: int
    timeout: float


Response = tuple[int, list[Delta]]
"""A prompt's number, and what a response says about its choices."""


async def generate(engine: EngineClient, job: Job) -> AsyncGenerator[Response, None]:
    """Yield each response. Closing the generator cancels what still runs; one prompt's error ends all.

    Raises:
        TritonLlamaError: of the first prompt that failed.
    """
    if len(job.prompts) > 1:
        async with aclosing(_merged(engine, job)) as responses:
            async for response in responses:
                yield response
        return
    async with aclosing(engine.stream(job.prompts[0], job.request_id, job.choices, job.timeout)) as stream:
        async for deltas in stream:
            yield 0, deltas


async def _merged(engine: EngineClient, job: Job) -> AsyncGenerator[Response, None]:
    queue: asyncio.Queue[Response | None] = asyncio.Queue(_AHEAD)

    async def read(number: int) -> None:
        request_id = f"{job.request_id}-{number}"
        async with aclosing(engine.stream(job.prompts[number], request_id, job.choices, job.timeout)) as stream:
            async for deltas in stream:
                await queue.put((number, deltas))

    async def read_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(len(job.prompts)):
                    group.create_task(read(number))
        finally:
            # Without waiting for room: the reader may be gone.
            ended.set()
            if queue.empty():
                queue.put_nowait(None)

    ended = asyncio.Event()
    reading = asyncio.create_task(read_all())
    try:
        while not (ended.is_set() and queue.empty()):
            response = await queue.get()
            if response is not None:
                yield response
        try:
            await reading
        except* Exception as failures:  # noqa: BLE001  the first one is raised again
            raise _first(failures) from None
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
