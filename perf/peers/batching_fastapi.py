"""The article's batching server: FastAPI, an asyncio queue, and `generate()` on what has gathered.

Collects up to `--batch` requests for at most `--delay-ms`, pads their prompts on the left, generates as many tokens as
the longest of them wants, and gives each its own part. Faithful, and so are its faults: everyone waits for the longest
of the batch, and whoever comes meanwhile for the whole batch to end; rows that are done are computed on; one request
that fails takes its batch with it; who has left is served all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from fastapi import FastAPI

from perf.peers.fastapi_server import Completion, Pretrained, Question, loaded, options, serve


@dataclass(frozen=True)
class _Waiting:
    prompt: list[int]
    max_tokens: int
    answer: asyncio.Future[Completion]


class Batcher:
    """Gathers requests and computes them together."""

    def __init__(self, pretrained: Pretrained, largest: int, delay_s: float) -> None:
        self._pretrained = pretrained
        self._largest = largest
        self._delay_s = delay_s
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()

    async def ask(self, question: Question) -> Completion:
        """Wait in the queue, then for the whole batch."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        await self._queue.put(_Waiting(self._pretrained.tokens(question), question.max_tokens, answer))
        return await answer

    async def run(self) -> None:
        """Serve one batch after the other, for ever."""
        while True:
            batch = await self._gather()
            try:
                completions = await asyncio.to_thread(self._generate, batch)
            except Exception as error:  # noqa: BLE001  whatever it is, it is everyone's answer, and the loop goes on
                for waiting in batch:
                    waiting.answer.set_exception(error)
            else:
                for waiting, completion in zip(batch, completions, strict=True):
                    waiting.answer.set_result(completion)

    def _generate(self, batch: Sequence[_Waiting]) -> list[Completion]:
        """Generate for all as many tokens as the longest wants; return each one's own."""
        longest = max(waiting.max_tokens for waiting in batch)
        rows = self._pretrained.generate([waiting.prompt for waiting in batch], longest)
        own = zip(rows, batch, strict=True)
        return [self._pretrained.completion(row[: waiting.max_tokens]) for row, waiting in own]

    async def _gather(self) -> list[_Waiting]:
        batch = [await self._queue.get()]
        with suppress(TimeoutError):  # a smaller batch, then
            async with asyncio.timeout(self._delay_s):
                while len(batch) < self._largest:
                    batch.append(await self._queue.get())
        return batch


def application(pretrained: Pretrained, largest: int, delay_s: float) -> FastAPI:
    """Return the server of this model."""
    batcher = Batcher(pretrained, largest, delay_s)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(batcher.run())
        yield
        running.cancel()

    server = FastAPI(lifespan=lifespan)

    @server.post("/generate")
    async def generate(question: Question) -> Completion:
        return await batcher.ask(question)

    return server


def main() -> None:
    """Load the model and serve it."""
    parser = options("The article's batching server.")
    parser.add_argument("--batch", type=int, required=True, help="requests at most")
    parser.add_argument("--delay-ms", type=float, required=True, help="to wait for them at most")
    chosen = parser.parse_args()
    serve(application(loaded(chosen), chosen.batch, chosen.delay_ms / 1e3), chosen)


if __name__ == "__main__":
    main()
