"""Server-sent events of a streamed answer; the modules of `routes` build the deltas."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from triton_llama.completion import Chunk

from triton_llama_openai.errors import ApiError
from triton_llama_openai.metrics import CLIENT_LEFT
from triton_llama_openai.output.answers import dumps, until_disconnect
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.triton.generation import Generation

_READING_S = 5.0
"""Seconds that a stream's client has for what it hasn't read when the request's own time is over."""


def _encode_head(head: JsonObject) -> bytes:
    return b"data: " + dumps(head)[:-1] + b',"choices":['


class AnswerEvents(ABC):
    """Makes the events of one streamed answer."""

    @abstractmethod
    def begin(self) -> bytes:
        """Return the events before the first text."""

    @abstractmethod
    def add(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk, none if all its text is held back."""

    @abstractmethod
    async def end(self) -> bytes:
        """Return the events after the last text."""

    @abstractmethod
    async def fail(self, error: ApiError) -> bytes:
        """Return the last event of an answer that an error cuts off."""


class ChoiceEvents(AnswerEvents):
    """Makes events of choices. Their common fields, `head`, are encoded once."""

    def __init__(self, generation: Generation, head: JsonObject) -> None:
        options = generation.request.stream_options
        self._head = _encode_head(head)
        self._usage = generation.usage
        self._timings = generation.timings
        self._ends_with_usage = bool(options and options.include_usage)
        # As under vLLM, include_usage false excludes the usage of each chunk, too.
        self._continuous_usage = bool(options and options.continuous_usage_stats and options.include_usage is not False)
        self._begun = False
        """False until the first chunk is written."""
        self._tail = b'],"usage":null}\n\n' if self._ends_with_usage else b"]}\n\n"

    async def end(self) -> bytes:
        """Return the events after the last text: the token counts and timings, where the request asks for them."""
        usage: JsonObject = {"usage": self._usage_so_far()} if self._ends_with_usage else {}
        fields = usage | self._timings()
        return (self._head + b"]," + dumps(fields)[1:] + b"\n\n" if fields else b"") + b"data: [DONE]\n\n"

    async def fail(self, error: ApiError) -> bytes:
        """Return the error."""
        return b"data: " + dumps(error.body()) + b"\n\n"

    def _event(
        self,
        index: int,
        content: JsonObject,
        logprobs: Mapping[str, object] | None,
        finish_reason: str | None = None,
        additions: JsonObject | None = None,
        head: JsonObject | None = None,
    ) -> bytes:
        """Return the event of a part of one choice, with the counts so far where every event has them.

        additions: other fields of the choice. head: in place of the common fields.
        """
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason, **(additions or {})}
        start = self._head if head is None else _encode_head(head)
        counts = b'],"usage":' + dumps(self._usage_so_far()) + b"}\n\n" if self._continuous_usage else self._tail
        return start + dumps(choice) + counts

    def _usage_so_far(self) -> JsonObject:
        return self._usage.body(before_text=not self._begun)


async def stream_answer(request: Request, generation: Generation, events: AnswerEvents) -> EventStream:
    """Return a stream of events; its status is certain, for the first chunk has come.

    Raises:
        ApiError: the model refuses the request.
        ClientLeftError: the client has left before the first chunk; the request is cancelled in Triton.
    """
    encoded = _encode(generation, events)
    # An error or a cancellation within the generator ends it, and with it the request in Triton.
    first = await until_disconnect(request, anext(encoded))
    return EventStream(first, encoded, generation)


async def _encode(generation: Generation, events: AnswerEvents) -> AsyncGenerator[bytes, None]:
    """Count all chunks and yield their events; an error of the model after the first chunk is the last one."""
    begun = False
    try:
        async with aclosing(generation.stream()) as stream:
            async for chunks in stream:
                generation.count(chunks)
                beginning = b"" if begun else events.begin()
                encoded = beginning + b"".join(map(events.add, chunks))
                if encoded or not begun:
                    begun = True
                    yield encoded
        yield await events.end()
    except ApiError as error:
        if not begun:
            raise
        generation.record.status = error.status
        yield await events.fail(error)


class EventStream(StreamingResponse):
    """A stream of events. Its end, whatever the reason, cancels what still runs in Triton."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], generation: Generation) -> None:
        self._first = first
        self._events = events
        self._record = generation.record
        self._timeout = generation.timeout + _READING_S
        self._sent = False
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        """Send the first events, then the others as they come."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        event: bytes | None = self._first
        while event is not None:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            event = await anext(self._events, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._sent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last one, or until the client leaves or has not read them in time."""
        async with aclosing(self._events):
            # A client that doesn't read can hold back an answer after its last token.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeout):
                    await super().__call__(scope, receive, send)
        if not self._sent:
            self._record.status = CLIENT_LEFT
