"""One request of the engine, continued elsewhere when its Triton is lost.

A sequence's tokens depend on its request alone, so with the tokens that came (`resume_ids`) and its seed another Triton
continues it as the first one would have. A choice without a token is sent as it was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from triton_llama.completion import Chunk
from triton_llama.errors import (
    LlamaConnectionError,
    LlamaTimeoutError,
    TritonLlamaError,
    is_full_queue,
    is_interruption,
)
from triton_llama.tensors import Tensor

from triton_llama_openai.middleware import RequestRecord
from triton_llama_openai.triton.load_balancer import LoadBalancer
from triton_llama_openai.triton.replica import Replica

_QUEUED_RESPONSES = 64
"""Responses that wait for a client that reads slowly; beyond them gRPC's flow control holds the server's."""
LOG = logging.getLogger("triton_llama_openai")
MAX_FAILURES = 3
"""Failures in a row, without a token, that a request survives: it may itself crash the model."""
_RETRY_S = 0.5
"""Until an interrupted request that found all queues full is sent again."""


ChunkStream = AsyncGenerator[list[Chunk], None]
"""The responses to a request, each as a list of its chunks. Closing it cancels what still runs."""


@dataclass(frozen=True)
class EngineRequest:
    """A request of one prompt. choices: indices of its completions. prefix: key of the prompt's home.

    timeout: seconds for everything. resume_timeout: seconds to wait for a replica, 0: it isn't resumed. streamed:
    whether its client gets a stream; any other request can be answered by a model that can't stream, too. digest: of
    the description by which it was prepared.
    """

    id: str
    tensors: Sequence[Tensor]
    choices: range
    prefix: bytes
    timeout: float
    resume_timeout: float
    streamed: bool
    digest: str


@dataclass
class _Choice:
    """Progress of one choice."""

    ids: list[int] = field(default_factory=list)
    seed: int | None = None
    """None: the request's seed, of its only choice."""
    finished: bool = False

    def add(self, chunk: Chunk) -> None:
        self.ids += chunk.output_ids
        self.seed = self.seed if chunk.seed is None else chunk.seed
        self.finished = bool(chunk.finish_reason)


class Resumption:
    """Runs a request, on one replica after the other if need be. record: gets the interruptions."""

    def __init__(self, request: EngineRequest, balancer: LoadBalancer, record: RequestRecord) -> None:
        self._request = request
        self._balancer = balancer
        self._record = record
        self._deadline = time.monotonic() + request.timeout
        self._choices = {index: _Choice() for index in request.choices}
        self._refused: set[Replica] = set()
        """Replicas whose queue was full."""
        # Of the interruption that no chunk has ended yet.
        self._error: TritonLlamaError | None = None
        self._lost_at = time.monotonic()
        """When its last replica was lost, or there was none."""
        self._failures = 0
        self._waited = False

    async def chunks(self) -> ChunkStream:
        """Yield each response's chunks, as `EngineClient.stream` does for an uninterrupted request.

        Raises:
            TritonLlamaError: as there, if no other try may mend it, or none could in time.
        """
        while not self._is_finished():
            replica = await self._replica()
            if self._request.digest != self._balancer.digest:
                since = "since the request was prepared" if self._error is None else f"{self._error}; since then"
                raise self._give_up(LlamaConnectionError(f"{since} another model is served"))
            try:
                with replica.request():
                    async with aclosing(merge(await self._streams(replica))) as responses:
                        async for chunks in responses:
                            self._add(chunks)
                            yield chunks
            except TritonLlamaError as error:
                if not self._is_finished():
                    self._fail(replica, error)

    def _is_finished(self) -> bool:
        return all(choice.finished for choice in self._choices.values())

    async def _streams(self, replica: Replica) -> list[ChunkStream]:
        """Return the streams of what is missing: each begun choice by itself, the others together."""
        request, stream = self._request, replica.engine.stream
        as_stream = request.streamed or await replica.engine.can_stream()
        timeout = self._deadline - time.monotonic()
        begun = {index: choice for index, choice in self._choices.items() if choice.ids}
        streams = [
            stream(_resumed(request.tensors, choice), request.id, range(index, index + 1), timeout)
            for index, choice in begun.items()
            if not choice.finished
        ]
        if not begun:
            tensors = request.tensors if as_stream else _in_one_response(request.tensors)
            return [stream(tensors, request.id, request.choices, timeout)]
        if len(begun) < len(self._choices):
            # The choices' seeds follow from the request's: its choices are the same again.
            streams.append(stream(request.tensors, request.id, request.choices, timeout, begun.keys()))
        return streams

    def _add(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._choices[chunk.index].add(chunk)
        if not chunks:
            return
        self._refused.clear()
        if self._error is not None:
            self._record.end_interruption("waited" if self._waited else "resumed", self._lost_at)
            self._error, self._failures, self._waited = None, 0, False

    def _fail(self, replica: Replica, error: TritonLlamaError) -> None:
        """Prepare the next try, or raise the error if none may mend it."""
        if is_full_queue(error):
            self._refused.add(replica)
            begun = self._error is not None or any(choice.ids for choice in self._choices.values())
            if not begun and self._balancer.pick(self._request.prefix, self._refused) is None:
                raise error
            if begun and self._error is None:
                self._interrupt(error)
            return
        if isinstance(error, LlamaTimeoutError):
            late = self._too_late(replica)
            raise late if self._error is None else self._give_up(late)
        if not is_interruption(error) or self._balancer.closed:
            raise error
        replica.fail(error)
        self._balancer.doubt.set()
        if not self._request.resume_timeout:
            raise error
        LOG.warning("request %s: interrupted at %s: %s", self._request.id, replica.engine.endpoint, error)
        self._interrupt(error)
        self._failures += 1
        if self._failures > MAX_FAILURES:
            raise self._give_up(error)

    def _interrupt(self, error: TritonLlamaError) -> None:
        """Note an interruption; `resume_timeout` counts from it."""
        self._error, self._lost_at = error, time.monotonic()

    async def _replica(self) -> Replica:
        """Return the replica of the next try; raises the interruption's error if none takes requests in time."""
        prefix, resume_timeout = self._request.prefix, self._request.resume_timeout
        while (replica := self._balancer.pick(prefix, self._refused)) is None:
            first = self._balancer.replicas[0]
            if not resume_timeout:
                return first
            error = self._error
            if error is None:
                # Its error may be a probe's.
                error = LlamaConnectionError(f"no connection to {first.engine.endpoint}: {first.error or 'full'}")
                self._interrupt(error)
            self._waited = True
            if time.monotonic() >= self._deadline:
                raise self._give_up(self._too_late(first))
            if self._balancer.closed or time.monotonic() >= self._lost_at + resume_timeout:
                raise self._give_up(error)
            await self._balancer.wait(_RETRY_S)
            self._refused.clear()
        return replica

    def _too_late(self, replica: Replica) -> LlamaTimeoutError:
        endpoint, timeout = replica.engine.endpoint, self._request.timeout
        return LlamaTimeoutError(f"no complete answer from {endpoint} within {timeout:g} s")

    def _give_up(self, error: TritonLlamaError) -> TritonLlamaError:
        self._record.end_interruption("given_up", self._lost_at)
        LOG.warning("request %s: given up: %s", self._request.id, error)
        return error


def _in_one_response(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs of the same request without a stream."""
    return [tensor for tensor in tensors if tensor.name not in ("stream", "stream_interval_ms")]


def _resumed(tensors: Sequence[Tensor], choice: _Choice) -> list[Tensor]:
    """Return the inputs that continue a choice. The log probabilities of its prompt have come with its first token."""
    resumed = [tensor for tensor in tensors if tensor.name not in ("n", "prompt_logprobs")]
    if choice.seed is not None:
        resumed = [tensor for tensor in resumed if tensor.name != "seed"]
        resumed.append(Tensor("seed", "UINT64", (choice.seed,)))
    return [*resumed, Tensor("resume_ids", "INT32", tuple(choice.ids))]


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
