"""/v1/chat/completions: from a conversation's chunks to an answer, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from triton_llama.completion import Chunk

from triton_llama_openai.errors import invalid
from triton_llama_openai.output.answers import dumps, response_head, stop_reason, until_disconnect
from triton_llama_openai.output.logprobs import logprobs_content
from triton_llama_openai.output.output_parser import OutputPart, Reasoning
from triton_llama_openai.output.streaming import ChoiceEvents, stream_answer
from triton_llama_openai.output.tool_calls import ToolCall
from triton_llama_openai.prompt.conversation import PreparedChat, prepare_chat
from triton_llama_openai.protocol.chat import ChatRequest
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.request_body import parse_request
from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import Settings


def add_chat(router: APIRouter, models: Models, settings: Settings) -> None:
    """Add the routes."""

    async def prepare(request: Request) -> tuple[ChatRequest, PreparedChat]:
        chat = await parse_request(request, ChatRequest, settings)
        if len(chat.messages) > settings.max_messages:
            raise invalid("messages", f"{len(chat.messages)} messages", f"at most {settings.max_messages}")
        model = await models.find_for("generate", chat.model, request.state.record)
        return chat, await prepare_chat(chat, model, settings, request.state.record)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        """A chat, streamed or not."""
        return await _answer(request, *await prepare(request))

    @router.post("/v1/chat/completions/render", response_model=None)
    async def render(request: Request) -> Response:
        """vLLM's: a chat's prompt as tokens, `{"model": …, "token_ids": […]}`, without an answer."""
        _, prepared = await prepare(request)
        return JSONResponse({"model": prepared.model.name, "token_ids": await prepared.prompt_ids()})


async def _answer(request: Request, chat: ChatRequest, prepared: PreparedChat) -> Response:
    model = prepared.model
    generation = prepared.generation
    kind = "chat.completion.chunk" if chat.streamed else "chat.completion"
    head = response_head("chatcmpl", kind, model.name, model.fingerprint)
    ids: JsonObject = {}
    if chat.return_token_ids:
        ids = {"prompt_token_ids": await prepared.prompt_ids()}
    if chat.streamed:
        return await stream_answer(request, generation, ChatEvents(prepared, head, ids, chat))
    chunks = await until_disconnect(request, generation.whole())
    choices = [ChatChoice(chat, prepared) for _ in chunks]
    bodies = [choice.body(chunk) for choice, chunk in zip(choices, chunks, strict=True)]
    await _count_reasoning(prepared, choices)
    prompt_logprobs = None if chat.prompt_logprobs is None else chunks[0].prompt_logprobs
    answer = {"choices": bodies, "prompt_logprobs": prompt_logprobs, **generation.counts()}
    return Response(dumps(head | ids | answer), media_type="application/json")


async def _count_reasoning(prepared: PreparedChat, choices: Sequence[ChatChoice]) -> None:
    """Count the tokens of the choices' reasoning in the usage, for a model that reasons."""
    if prepared.model.markers is not None:
        await asyncio.to_thread(prepared.count_reasoning, [choice.parser for choice in choices])


class ChatChoice:
    """One choice while it is generated."""

    def __init__(self, chat: ChatRequest, prepared: PreparedChat) -> None:
        self._chat = chat
        self._use = prepared.use
        self.parser = prepared.new_parser()

    def finish_reason(self, chunk: Chunk) -> str:
        """Return OpenAI's finish reason."""
        called = self.parser.called and chunk.finish_reason == "stop"
        return self._use.finish_reason if called else chunk.finish_reason

    def logprobs(self) -> JsonObject | None:
        """Return and remove the logprobs, None for a request without them."""
        if not self._chat.logprobs:
            return None
        tokens, as_ids = self.parser.take_tokens(), bool(self._chat.return_tokens_as_token_ids)
        return {"content": logprobs_content(tokens, self._chat.top_logprobs or 0, as_ids=as_ids), "refusal": None}

    def token_ids(self) -> JsonObject:
        """Return and remove the ids, for a request with them."""
        ids = self.parser.take_ids()
        return {"token_ids": ids} if self._chat.return_token_ids else {}

    def body(self, chunk: Chunk) -> JsonObject:
        """Return the choice of an answer that isn't streamed."""
        parts = self.parser.parse(chunk)
        content = "".join(part for part in parts if isinstance(part, str))
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := "".join(part.text for part in parts if isinstance(part, Reasoning)):
            message |= _reasoning(reasoning)
        if calls := [part for part in parts if isinstance(part, ToolCall)]:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in calls]}
        return {
            "index": chunk.index,
            "message": message,
            "logprobs": self.logprobs(),
            "finish_reason": self.finish_reason(chunk),
            "stop_reason": stop_reason(chunk, self._chat.stop_strings),
            **self.token_ids(),
        }


class ChatEvents(ChoiceEvents):
    """Makes the events of a streamed chat. ids: those of the prompt, for a request with them."""

    def __init__(self, prepared: PreparedChat, head: JsonObject, ids: JsonObject, chat: ChatRequest) -> None:
        super().__init__(prepared.generation, head)
        self._first_head = head | ids
        self._stop_strings = chat.stop_strings
        self._prepared = prepared
        self._choices = [ChatChoice(chat, prepared) for _ in range(chat.choices)]

    def begin(self) -> bytes:
        """Return the first event of every choice, which has the role."""
        first: JsonObject = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._event(index, first, None, head=self._first_head) for index in range(len(self._choices)))

    def add(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk."""
        self._begun = True
        choice = self._choices[chunk.index]
        events = [
            self._event(
                chunk.index,
                {"delta": _delta(part)},
                choice.logprobs() if number == 0 else None,
                additions=choice.token_ids(),
            )
            for number, part in enumerate(choice.parser.parse(chunk))
        ]
        if chunk.finish_reason:
            logprobs = choice.logprobs() if choice.parser.tokens else None
            reason: JsonObject = {"stop_reason": stop_reason(chunk, self._stop_strings), **choice.token_ids()}
            events.append(self._event(chunk.index, {"delta": {}}, logprobs, choice.finish_reason(chunk), reason))
        return b"".join(events)

    async def end(self) -> bytes:
        """Return the events after the last text."""
        if self._ends_with_usage:
            await _count_reasoning(self._prepared, self._choices)
        return await super().end()


def _delta(part: OutputPart) -> JsonObject:
    """Return a part as OpenAI's delta; a call comes whole."""
    if isinstance(part, Reasoning):
        return _reasoning(part.text)
    if isinstance(part, str):
        return {"content": part}
    return {"tool_calls": [{"index": part.index, **_call(part)}]}


def _reasoning(text: str) -> JsonObject:
    """Return reasoning as clients read it: DeepSeek's and SGLang's name, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: ToolCall) -> JsonObject:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
