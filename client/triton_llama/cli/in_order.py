"""Many prompts, a bounded number of them in flight, their outcomes in order and as early as order allows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from triton_llama.async_client import AsyncLlamaClient
from triton_llama.cli.prompts import Job
from triton_llama.completion import Completion
from triton_llama.errors import TritonLlamaError

# A slow prompt holds back the outcomes behind it, but not their requests: so many times `concurrency` of them may be
# waiting to be written.
_AHEAD = 16


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    result: Completion | TritonLlamaError


async def outcomes_in_order(
    client: AsyncLlamaClient, jobs: Sequence[Job], concurrency: int, on_done: Callable[[], object]
) -> AsyncGenerator[Outcome, None]:
    """Send the jobs, `concurrency` at a time; `on_done` is called as each one ends, in whatever order.

    Leaving the generator early cancels what is in flight.
    """
    slots = asyncio.Semaphore(concurrency)

    async def run(job: Job) -> Outcome:
        async with slots:
            try:
                return Outcome(job, await client.generate(job.prompt, job.params))
            except TritonLlamaError as error:
                return Outcome(job, error)
            finally:
                on_done()

    waiting = iter(jobs)
    running: deque[asyncio.Task[Outcome]] = deque()
    try:
        while True:
            while len(running) < _AHEAD * concurrency and (job := next(waiting, None)) is not None:
                running.append(asyncio.create_task(run(job)))
            if not running:
                return
            yield await running[0]
            running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
