"""When a Triton dies or drains amid a request, another one continues it: the chunks of every request, in one way.

A sequence's tokens depend on its request alone, so with the tokens that came (`resume_ids`) and its seed any Triton
continues it as the first one would have. A choice without a token is sent as it was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from triton_llama.completion import Chunk
from triton_llama.errors import (
    LOST,
    OTHER_ADAPTER,
    OTHER_MODEL,
    QUEUE_FULL,
    LlamaTimeoutError,
    RejectedInputError,
    TritonLlamaError,
    is_interruption,
)
from triton_llama.tensors import Tensor

from triton_llama_openai.record import RequestRecord
from triton_llama_openai.triton.merge import ChunkStream, merge
from triton_llama_openai.triton.triton_client import TritonClient

LOG = logging.getLogger("triton_llama_openai")
MAX_FAILURES = 3
"""Failures in a row, without a token, that a request survives: it may itself crash the model."""
_PAUSES_S = (0.1, 1.0, 2.0)
"""Seconds before each further try; the last one repeats. A Triton whose model's process has died still answers, until
its supervisor ends it within a second; a request must not use up its tries in that time."""
_READY_S = 2.0
"""Timeout of the question whether the model is ready."""


@dataclass(frozen=True, kw_only=True)
class TritonRequest:
    """A request of one prompt. outputs: names of those that are read. choices: indices of its completions.

    key: by which a proxy picks its replica. timeout: seconds for everything. resume_timeout: seconds until it goes on
    after an interruption, 0: it isn't resumed. streamed: whether its client gets a stream; any other request can be
    answered by a model that can't stream, too.
    """

    id: str
    tensors: Sequence[Tensor]
    outputs: Sequence[str]
    choices: range
    key: str
    timeout: float
    resume_timeout: float
    streamed: bool


@dataclass
class _ChoiceProgress:
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
    """Runs any request, and what is missing of it again after each interruption. record: gets the interruptions."""

    def __init__(self, request: TritonRequest, triton: TritonClient, record: RequestRecord) -> None:
        self._request = request
        self._triton = triton
        self._record = record
        self._deadline = time.monotonic() + request.timeout
        self._choices = {index: _ChoiceProgress() for index in request.choices}
        # Of the interruption that no chunk has ended yet.
        self._error: TritonLlamaError | None = None
        self._lost_at = 0.0
        """When the last Triton that ran it was lost."""
        self._failures = 0
        self._tries = 0

    async def chunks(self) -> ChunkStream:
        """Yield the chunks of each response of Triton, as `TritonClient.stream` does for an uninterrupted request.

        Raises:
            TritonLlamaError: as there, if no other try may mend it, or none could in time.
        """
        while not self._is_finished():
            try:
                async with aclosing(merge(await self._streams())) as stream:
                    async for chunks in stream:
                        self._add(chunks)
                        yield chunks
            except TritonLlamaError as error:
                if not self._is_finished():
                    self._note(error)
                    await self._wait()

    def _is_finished(self) -> bool:
        return all(choice.finished for choice in self._choices.values())

    async def _streams(self) -> list[ChunkStream]:
        """Return the streams of what is missing: each begun choice by itself, the others together."""
        request, key = self._request, self._key()
        as_stream = request.streamed or await self._triton.can_stream()
        timeout = self._deadline - time.monotonic()

        def stream(tensors: Sequence[Tensor], choices: range, skipped: Collection[int] = ()) -> ChunkStream:
            return self._triton.stream(tensors, request.outputs, request.id, choices, timeout, key, skipped)

        begun = {index: choice for index, choice in self._choices.items() if choice.ids}
        if not begun:
            return [stream(request.tensors if as_stream else _in_one_response(request.tensors), request.choices)]
        streams = [
            stream(_resumed(request.tensors, choice), range(index, index + 1))
            for index, choice in begun.items()
            if not choice.finished
        ]
        if len(begun) < len(self._choices):
            # The choices' seeds follow from the request's: its choices are the same again.
            streams.append(stream(request.tensors, request.choices, begun.keys()))
        return streams

    def _key(self) -> str:
        """Return the key of the next try; after an interruption another one: a proxy may pick another replica."""
        return self._request.key + (str(self._tries) if self._tries else "")

    def _add(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._choices[chunk.index].add(chunk)
        if chunks and self._error is not None:
            self._record.end_interruption("resumed", self._lost_at)
            self._error, self._failures, self._tries = None, 0, 0

    def _note(self, error: TritonLlamaError) -> None:
        """Note an interruption; raise any other error, and that of a request that may itself crash the model."""
        unknown_adapter = isinstance(error, RejectedInputError) and error.inputs == ["lora_name"]
        if is_interruption(error) or error.code in (OTHER_MODEL, OTHER_ADAPTER) or unknown_adapter:
            self._triton.doubt.set()
        begun = self._error is not None or any(choice.ids for choice in self._choices.values())
        if isinstance(error, LlamaTimeoutError) and not is_interruption(error):
            raise self._too_late() if self._error is None else self._give_up(self._too_late())
        # An adapter that was exchanged for another version, or unloaded, doesn't come back by itself.
        mendable = is_interruption(error) or (begun and error.code in (QUEUE_FULL, OTHER_MODEL))
        if not mendable or not self._request.resume_timeout or self._triton.closed:
            raise error if self._error is None else self._give_up(error)
        # A server that drains or is full, and another model, haven't run it.
        has_run = error.code == LOST
        if self._error is None or has_run:
            LOG.warning("request %s: interrupted at %s: %s", self._request.id, self._triton.server, error)
            self._lost_at = time.monotonic()
        self._error = error
        self._failures += has_run
        if self._failures > MAX_FAILURES:
            raise self._give_up(error)

    async def _wait(self) -> None:
        """Wait until the next try; raise the interruption's error if the model isn't ready in time."""
        assert self._error is not None
        give_up_at = self._lost_at + self._request.resume_timeout
        ready = False
        while not ready:
            pause = _PAUSES_S[min(self._tries, len(_PAUSES_S) - 1)]
            self._tries += 1
            now = time.monotonic()
            if now >= self._deadline:
                raise self._give_up(self._too_late())
            if self._triton.closed or now >= give_up_at:
                raise self._give_up(self._error)
            await asyncio.sleep(min(pause, self._deadline - now, give_up_at - now))
            with suppress(TritonLlamaError):
                ready = await self._triton.is_ready(_READY_S, self._key())

    def _too_late(self) -> LlamaTimeoutError:
        server, timeout = self._triton.server, self._request.timeout
        return LlamaTimeoutError(f"no complete answer from {server} within {timeout:g} s")

    def _give_up(self, error: TritonLlamaError) -> TritonLlamaError:
        self._record.end_interruption("given_up", self._lost_at)
        LOG.warning("request %s: given up: %s", self._request.id, error)
        return error


def _in_one_response(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs of the same request without a stream."""
    return [tensor for tensor in tensors if tensor.name not in ("stream", "stream_interval_ms")]


def _resumed(tensors: Sequence[Tensor], choice: _ChoiceProgress) -> list[Tensor]:
    """Return the inputs that continue a choice. The log probabilities of its prompt have come with its first token."""
    resumed = [tensor for tensor in tensors if tensor.name not in ("n", "prompt_logprobs")]
    if choice.seed is not None:
        resumed = [tensor for tensor in resumed if tensor.name != "seed"]
        resumed.append(Tensor("seed", "UINT64", (choice.seed,)))
    return [*resumed, Tensor("resume_ids", "INT32", tuple(choice.ids))]
