"""/v1/responses: from a request's items through a conversation to a response, whole or streamed. Nothing is stored.

The events of a streamed response are each step of its output, between its beginning and its end.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from triton_llama.completion import Chunk

from triton_llama_openai.errors import ApiError
from triton_llama_openai.output.streaming import Events, Json, dumps_with, join_array, stream_answer, until_disconnect
from triton_llama_openai.prompt.conversation import prepare_chat
from triton_llama_openai.protocol.responses import ResponsesRequest
from triton_llama_openai.routes.models import Models
from triton_llama_openai.routes.response_input import chat_request
from triton_llama_openai.routes.response_object import ResponseObject
from triton_llama_openai.routes.response_output import (
    Added,
    CallItem,
    Delta,
    Done,
    EncodedLogprobs,
    Output,
    OutputItem,
    Step,
    TextItem,
    TextKind,
)
from triton_llama_openai.settings import Settings


async def answer_response(
    request: Request, body: ResponsesRequest, models: Models, settings: Settings, cache_salt: str | None
) -> Response:
    """Answer a request. cache_salt: the model's input. Raises ApiError or ClientLeftError."""
    model = models.find(body.model)
    chat = chat_request(body, settings.max_messages)
    prepared = prepare_chat(chat, model, settings, request.state.record, cache_salt)
    request.state.record.ignored += prepared.use.ignored
    generation = prepared.generation
    output = Output(prepared, chat.num_logprobs)
    response = ResponseObject(body, prepared, output)
    if body.stream:
        return await stream_answer(request, generation, ResponseEvents(response))
    (chunk,) = await until_disconnect(request, generation.whole())
    # In a thread: log probabilities are megabytes, and the reasoning is tokenized.
    return Response(await asyncio.to_thread(response.whole, chunk), media_type="application/json")


class ResponseEvents(Events):
    """Makes the events of one response, numbered from 0."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = 0

    def begin(self) -> bytes:
        """Return the events before the first text."""
        response = self._response.body("in_progress")
        created = self._event("response.created", {}, response=response)
        return created + self._event("response.in_progress", {}, response=response)

    def add(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk, none if all its text is held back."""
        return b"".join(map(self._step, self._response.output.read(chunk)))

    async def end(self) -> bytes:
        """Return the last event, which has the whole response."""
        status = self._response.output.status
        response = await asyncio.to_thread(self._response.body, status)
        return self._event(f"response.{status}", {}, response=response)

    async def fail(self, error: ApiError) -> bytes:
        """Return the last event of a response that an error cut off."""
        self._response.output.cut_off()
        response = await asyncio.to_thread(self._response.body, "failed", error)
        return self._event("response.failed", {}, response=response)

    def _step(self, step: Step) -> bytes:
        match step:
            case Added(index, item_id, body, part):
                added = self._event("response.output_item.added", {"output_index": index}, item=body)
                if part is None:
                    return added
                return added + self._event("response.content_part.added", _place(index, item_id), part=part)
            case Delta(index, item_id, kind, text, logprobs):
                fields = _place(index, item_id) | {"delta": text}
                return self._event(f"response.{kind}.delta", fields, **_logprobs(kind, logprobs))
            case Done(index, TextItem() as item):
                place = _place(index, item.id)
                text_done = self._event(
                    f"response.{item.kind}.done", place | {"text": item.text}, **_logprobs(item.kind, item.logprobs)
                )
                part_done = self._event("response.content_part.done", place, part=item.part())
                return text_done + part_done + self._item_done(index, item)
            case Done(index, CallItem() as item):
                call: Json = {"item_id": item.id, "output_index": index}
                arguments = item.call.arguments
                delta = self._event("response.function_call_arguments.delta", {**call, "delta": arguments})
                done = self._event("response.function_call_arguments.done", {**call, "arguments": arguments})
                return delta + done + self._item_done(index, item)
        raise AssertionError(step)

    def _item_done(self, index: int, item: OutputItem) -> bytes:
        return self._event("response.output_item.done", {"output_index": index}, item=item.body())

    def _event(self, kind: str, fields: Json, **encoded: bytes) -> bytes:
        """Return an event. encoded: more of its fields, as JSON."""
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + dumps_with(event, encoded) + b"\n\n"


def _place(index: int, item_id: str) -> Json:
    """Return the place of an item's only part."""
    return {"item_id": item_id, "output_index": index, "content_index": 0}


def _logprobs(kind: TextKind, logprobs: list[EncodedLogprobs]) -> dict[str, bytes]:
    """Return the field of log probabilities, which a message's events have."""
    return {"logprobs": join_array(token.event for token in logprobs)} if kind == "output_text" else {}
