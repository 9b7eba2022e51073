"""Anthropic's Messages API: from a request's blocks through a conversation to a message, whole or streamed."""

from __future__ import annotations

import asyncio
import secrets
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from triton_llama.completion import Chunk

from triton_llama_openai.errors import ApiError
from triton_llama_openai.output.answers import dumps, until_disconnect
from triton_llama_openai.output.message_content import MessageContent
from triton_llama_openai.output.streaming import AnswerEvents, stream_answer
from triton_llama_openai.prompt.conversation import PreparedChat, prepare_chat
from triton_llama_openai.prompt.message_chat import MessageChat, chat_request
from triton_llama_openai.protocol.messages import CountTokensRequest, MessagesRequest
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.request_body import parse_request
from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import Settings

B = TypeVar("B", bound=CountTokensRequest)


def add_messages(router: APIRouter, models: Models, settings: Settings) -> None:
    """Add the routes."""

    async def prepare(request: Request, schema: type[B]) -> tuple[MessageChat, PreparedChat]:
        body = await parse_request(request, schema, settings)
        if "anthropic-beta" in request.headers:
            request.state.record.ignored.append("anthropic-beta")
        chat = chat_request(body, settings.max_messages)
        model = await models.find_for("generate", body.model, request.state.record)
        return chat, await prepare_chat(chat, model, settings, request.state.record)

    @router.post("/v1/messages", response_model=None)
    async def messages(request: Request) -> Response:
        """Anthropic's: a message, streamed or not (docs/openai.md#anthropics-messages-api)."""
        chat, prepared = await prepare(request, MessagesRequest)
        message = MessageObject(chat, prepared)
        if chat.streamed:
            return await stream_answer(request, prepared.generation, MessageEvents(message))
        (chunk,) = await until_disconnect(request, prepared.generation.whole())
        return Response(dumps(await message.whole(chunk)), media_type="application/json")

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(request: Request) -> Response:
        """Anthropic's: the number of a conversation's tokens, `{"input_tokens": …}`, without an answer."""
        _, prepared = await prepare(request, CountTokensRequest)
        return JSONResponse({"input_tokens": len(await prepared.prompt_ids())})


class MessageObject:
    """An answer of the Messages API: `whole` if it isn't streamed, else `begun` and `end` around its blocks."""

    def __init__(self, chat: MessageChat, prepared: PreparedChat) -> None:
        self.content = MessageContent(prepared.new_parser())
        self.request_id = prepared.generation.record.id
        self._stop_sequences = chat.stop_strings
        self._prepared = prepared
        self._head: JsonObject = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        self._head["model"] = prepared.model.name

    def begun(self) -> JsonObject:
        """Return the message before its first block."""
        end = {"stop_reason": None, "stop_sequence": None}
        return self._head | {"content": []} | end | {"usage": self._usage() | {"output_tokens": 0}}

    async def whole(self, chunk: Chunk) -> JsonObject:
        """Return the message of an answer that isn't streamed."""
        self.content.read(chunk)
        end = await self.end()
        return self._head | {"content": self.content.blocks} | end

    async def end(self) -> JsonObject:
        """Return the reason of the end, the usage, and timings for a request with them."""
        # In a thread: the reasoning is tokenized.
        await asyncio.to_thread(self._prepared.count_reasoning, [self.content.parser])
        return self.content.stop(self._stop_sequences) | {"usage": self._usage()} | self._prepared.generation.timings()

    def _usage(self) -> JsonObject:
        usage = self._prepared.generation.usage
        cached = usage.cached_tokens or 0
        counts: JsonObject = {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }
        if usage.reasoning_tokens is not None:
            counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
        return counts


class MessageEvents(AnswerEvents):
    """Makes the events of one message."""

    def __init__(self, message: MessageObject) -> None:
        self._message = message

    def begin(self) -> bytes:
        """Return the events before the first text."""
        return _event({"type": "message_start", "message": self._message.begun()}) + _event({"type": "ping"})

    def add(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk, none if all its text is held back."""
        return b"".join(map(_event, self._message.content.read(chunk)))

    async def end(self) -> bytes:
        """Return the last events: the reason of the end and the usage."""
        delta = await self._message.end()
        beside: JsonObject = {name: delta.pop(name) for name in ("usage", "timings") if name in delta}
        return _event({"type": "message_delta", "delta": delta, **beside}) + _event({"type": "message_stop"})

    async def fail(self, error: ApiError) -> bytes:
        """Return the error."""
        return _event(error.messages_body(self._message.request_id))


def _event(event: JsonObject) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), dumps(event))
