"""From a request's job to its answer, whole or streamed, and the end of the job when its client leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from triton_llama.errors import TritonLlamaError

from triton_llama_openai.answer import Events, Head, Json, Usage, dumps, error_event
from triton_llama_openai.engine_client import Delta, EngineClient
from triton_llama_openai.errors import ApiError, from_engine
from triton_llama_openai.events import DONE, EventStream, until_disconnect
from triton_llama_openai.generation import Job, generate
from triton_llama_openai.generation import Response as EngineResponse
from triton_llama_openai.request_record import RequestRecord

_SLACK_S = 30.0
"""Seconds that a stream's client has for what it hasn't read when the request's own time is over."""


class Collector(Protocol):
    """Collects an answer that isn't streamed."""

    def add(self, prompt: int, deltas: Iterable[Delta]) -> None:
        """Take a response about the prompt of this number."""

    def body(self, head: Head, usage: Usage) -> Json:
        """Return the answer."""


@dataclass(frozen=True)
class Work:
    """A job and its surroundings. fields: the request's fields for inputs of the model, for errors."""

    job: Job
    engine: EngineClient
    fields: Mapping[str, str]
    record: RequestRecord
    usage: Usage = field(default_factory=Usage)

    async def responses(self) -> AsyncGenerator[EngineResponse, None]:
        """Yield each response of the engine, its tokens counted.

        Raises:
            ApiError: the engine's error, in this request's words.
        """
        try:
            async with aclosing(generate(self.engine, self.job)) as responses:
                async for prompt, deltas in responses:
                    self.usage.add(prompt, deltas)
                    yield prompt, deltas
        except TritonLlamaError as error:
            raise from_engine(error, self.fields) from error
        finally:
            self.record.prompt_tokens = self.usage.prompt_tokens
            self.record.completion_tokens = self.usage.completion_tokens


async def answer_whole(request: Request, work: Work, collector: Collector, head: Head) -> Response:
    """Return one object. Raises ApiError, or ClientLeftError once the request is cancelled in the engine."""

    async def collect() -> None:
        async with aclosing(work.responses()) as responses:
            async for prompt, deltas in responses:
                collector.add(prompt, deltas)

    await until_disconnect(request.receive, collect())
    return Response(dumps(collector.body(head, work.usage)), media_type="application/json")


def answer_streamed(work: Work, events: Events) -> Response:
    """Return a stream of events. Sending it raises ApiError if the engine refuses the request."""
    return EventStream(_events(work, events), work.job.timeout + _SLACK_S)


async def _events(work: Work, events: Events) -> AsyncGenerator[bytes, None]:
    """Yield the events of all responses. Raises ApiError before the first one only; a later error is an event."""
    begun = False
    try:
        async with aclosing(work.responses()) as responses:
            async for response in responses:
                event = _add(work, events, response)
                if not begun:
                    begun, event = True, events.begin() + event
                if event:
                    yield event
        yield events.end() + DONE
    except ApiError as error:
        if not begun:
            raise
        work.record.status = error.status
        yield error_event(error.body())


def _add(work: Work, events: Events, response: EngineResponse) -> bytes:
    prompt, deltas = response
    if any(delta.num_output_tokens for delta in deltas):
        work.record.saw_text()
    return events.add(prompt, deltas)
