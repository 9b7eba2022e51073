"""/v1/responses: from a request's items through a conversation to a response, whole or streamed. Nothing is stored."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from triton_llama.completion import Chunk

from triton_llama_openai.errors import ApiError, shorten
from triton_llama_openai.output.answers import dumps_with, join_array, until_disconnect
from triton_llama_openai.output.response_output import Output, new_id
from triton_llama_openai.output.streaming import AnswerEvents, stream_answer
from triton_llama_openai.prompt.conversation import PreparedChat, prepare_chat
from triton_llama_openai.prompt.response_chat import chat_request
from triton_llama_openai.protocol.responses import ResponsesRequest
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.request_body import parse_request
from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import Settings


def add_responses(router: APIRouter, models: Models, settings: Settings) -> None:
    """Add the route."""

    @router.post("/v1/responses", response_model=None)
    async def responses(request: Request) -> Response:
        """A response, streamed or not (docs/openai.md#the-responses-api)."""
        body = await parse_request(request, ResponsesRequest, settings)
        return await _answer(request, body, models, settings)


def add_stored_responses(router: APIRouter) -> None:
    """Add the routes of responses that OpenAI's servers would have stored."""

    @router.get("/v1/responses/{name:path}", response_model=None)
    @router.delete("/v1/responses/{name:path}", response_model=None)
    @router.post("/v1/responses/{name}/cancel", response_model=None)
    async def stored_response(name: str) -> Response:
        """404: answers are not stored."""
        raise ApiError(404, f"there is no response {shorten(name)}: answers are not stored", None, "response_not_found")


async def _answer(request: Request, body: ResponsesRequest, models: Models, settings: Settings) -> Response:
    model = await models.find_for("generate", body.model, request.state.record)
    chat = chat_request(body, settings.max_messages)
    prepared = await prepare_chat(chat, model, settings, request.state.record)
    generation = prepared.generation
    output = Output(prepared.new_parser(), chat.num_logprobs)
    response = ResponseObject(body, prepared, output)
    if body.stream:
        return await stream_answer(request, generation, ResponseEvents(response))
    (chunk,) = await until_disconnect(request, generation.whole())
    # In a thread: log probabilities are megabytes, and the reasoning is tokenized.
    return Response(await asyncio.to_thread(response.whole, chunk), media_type="application/json")


_TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}


class ResponseObject:
    """One response while it is generated and after. output: of the conversation's only choice."""

    def __init__(self, request: ResponsesRequest, prepared: PreparedChat, output: Output) -> None:
        self.output = output
        self._prepared = prepared
        self._fields: JsonObject = {"id": new_id("resp"), "object": "response", "created_at": int(time.time())}
        self._fields |= {"model": prepared.model.name, **_echo(request)}

    def whole(self, chunk: Chunk) -> bytes:
        """Return the object of an answer that isn't streamed, as JSON."""
        self.output.read(chunk)
        return self.body(self.output.status)

    def body(self, status: str, error: ApiError | None = None) -> bytes:
        """Return the object as JSON. status: `in_progress` has neither output nor usage. error: of `failed`.

        It tokenizes the reasoning: milliseconds for thousands of tokens.
        """
        ended = status != "in_progress"
        fields = self._fields | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else _error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": self._usage_body() if ended else None,
            **(self._prepared.generation.timings() if ended else {}),
        }
        items = self.output.items if ended else []
        return dumps_with(fields, {"output": join_array(item.body() for item in items)})

    def _usage_body(self) -> JsonObject:
        self._prepared.count_reasoning([self.output.parser])
        usage = self._prepared.generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _error(error: ApiError) -> JsonObject:
    # The response's stream has begun, so 400 is about what the model makes of the prompt.
    return {"code": "invalid_prompt" if error.status == 400 else "server_error", "message": error.message}


def _echo(request: ResponsesRequest) -> JsonObject:
    """Return the request's fields that the object repeats; null is the checkpoint's or the server's default."""
    reasoning = request.reasoning
    text: JsonObject = {"format": {"type": "text"}}
    if request.text is not None and request.text.format is not None:
        text["format"] = request.text.format.model_dump(by_alias=True)
    if request.text is not None and request.text.verbosity is not None:
        text["verbosity"] = request.text.verbosity
    choice = request.tool_choice or "auto"
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": None,
        "store": False,
        "temperature": request.temperature,
        "text": text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump(include=_TOOL_FIELDS) for tool in request.tools or []],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


class ResponseEvents(AnswerEvents):
    """Makes the events of one response, numbered from 0."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = 0

    def begin(self) -> bytes:
        """Return the events before the first text."""
        response = self._response.body("in_progress")
        created = self._event("created", {}, response=response)
        return created + self._event("in_progress", {}, response=response)

    def add(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk, none if all its text is held back."""
        events = self._response.output.read(chunk)
        return b"".join(self._event(event.kind, event.fields, **event.encoded) for event in events)

    async def end(self) -> bytes:
        """Return the last event, which has the whole response."""
        status = self._response.output.status
        response = await asyncio.to_thread(self._response.body, status)
        return self._event(status, {}, response=response)

    async def fail(self, error: ApiError) -> bytes:
        """Return the last event of a response that an error cut off."""
        self._response.output.cut_off()
        response = await asyncio.to_thread(self._response.body, "failed", error)
        return self._event("failed", {}, response=response)

    def _event(self, kind: str, fields: JsonObject, **encoded: bytes) -> bytes:
        """Return an event. kind: without `response.`. encoded: more of its fields, as JSON."""
        kind = f"response.{kind}"
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + dumps_with(event, encoded) + b"\n\n"
