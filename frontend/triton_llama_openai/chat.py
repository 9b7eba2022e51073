"""/v1/chat/completions: from messages to a prompt, from chunks to an answer, whole or streamed."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from triton_llama_openai.chat_template import Turn, render_messages
from triton_llama_openai.engine_client import Chunk, TokenLogprobs
from triton_llama_openai.engine_inputs import engine_fields, engine_inputs
from triton_llama_openai.errors import ApiError
from triton_llama_openai.generation import Generation
from triton_llama_openai.limits import check_messages
from triton_llama_openai.logprobs import chat_logprobs, check_prompt_logprobs
from triton_llama_openai.models import Models, ServedModel
from triton_llama_openai.protocol import ChatRequest
from triton_llama_openai.responses import Json, dumps, response_head, stop_reason
from triton_llama_openai.settings import Settings
from triton_llama_openai.streaming import Events, check_stream, stream_answer, until_disconnect
from triton_llama_openai.tool_calls import Part, ToolCall
from triton_llama_openai.tool_choice import ToolUse, tool_use


async def answer_chat(request: Request, chat: ChatRequest, models: Models, settings: Settings) -> Response:
    """Answer a request. Raises ApiError or ClientLeftError."""
    _check(chat, settings.max_messages)
    model = models.find(chat.model)
    use = tool_use(chat, model.tool_form)
    prompt = _prompt(chat, model, use.template_tools)
    check_prompt_logprobs(chat, [prompt], chat.prompt_logprobs, model.checkpoint.context)
    inputs = engine_inputs(
        chat,
        prompt,
        max_tokens=chat.max_new_tokens,
        guide=use.guide,
        logprobs=chat.top_logprobs or 0 if chat.logprobs else None,
        prompt_logprobs=chat.prompt_logprobs,
        stream_interval_ms=settings.stream_interval_ms,
    )
    fields = engine_fields(chat, use.guide)
    if chat.max_completion_tokens is not None:
        fields["max_tokens"] = "max_completion_tokens"
    record = request.state.record
    record.prompt = prompt
    generation = Generation(model.engine, chat, [inputs], settings.request_timeout, fields, record)
    kind = "chat.completion.chunk" if chat.streamed else "chat.completion"
    head = response_head("chatcmpl", kind, model.name, await model.fingerprint())
    if chat.streamed:
        return await stream_answer(request, generation, ChatEvents(generation, head, chat, use))
    chunks = await until_disconnect(request, generation.whole())
    body = head | {"choices": [_Choice(chat, use).body(chunk) for chunk in chunks]}
    if chat.prompt_logprobs is not None:
        body["prompt_logprobs"] = chunks[0].prompt_logprobs
    return Response(dumps(body | {"usage": generation.usage.body()}), media_type="application/json")


def _check(chat: ChatRequest, max_messages: int) -> None:
    check_stream(chat)
    check_messages(chat.messages, max_messages)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
    names = chat.max_tokens, chat.max_completion_tokens
    if None not in names and names[0] != names[1]:
        message = f"max_tokens is {names[0]} and max_completion_tokens is {names[1]}; give one of them"
        raise ApiError(400, message, "max_tokens", "invalid_value")


def _prompt(chat: ChatRequest, model: ServedModel, tools: list[Turn]) -> str:
    if chat.continue_final_message and chat.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt are both true; one must be false"
        raise ApiError(400, message, "continue_final_message", "invalid_value")
    return render_messages(
        model.checkpoint.template,
        chat.messages,
        tools,
        add_generation_prompt=chat.add_generation_prompt is not False,
        continue_final_message=bool(chat.continue_final_message),
        template_kwargs=chat.chat_template_kwargs,
        documents=chat.documents,
    )


class _Choice:
    """One choice while it is generated. tokens: those whose text isn't sent yet."""

    def __init__(self, chat: ChatRequest, use: ToolUse) -> None:
        self._chat = chat
        self._use = use
        self._reader = use.reader()
        self._called = False
        self.tokens: list[TokenLogprobs] = []

    def read(self, chunk: Chunk) -> list[Part]:
        """Return the parts that a chunk adds to the choice."""
        self.tokens += chunk.logprobs
        parts = self._reader.read(chunk.text)
        if chunk.finish_reason:
            parts = [*parts, *self._reader.end()]
        self._called = self._called or any(isinstance(part, ToolCall) for part in parts)
        return parts

    def finish_reason(self, chunk: Chunk) -> str:
        """Return OpenAI's finish reason."""
        called = self._called and chunk.finish_reason == "stop"
        return self._use.finish_reason if called else chunk.finish_reason

    def logprobs(self) -> Json | None:
        """Return and remove the logprobs, None for a request without them."""
        if not self._chat.logprobs:
            return None
        tokens, self.tokens = self.tokens, []
        return {"content": chat_logprobs(tokens, self._chat.top_logprobs or 0), "refusal": None}

    def body(self, chunk: Chunk) -> Json:
        """Return the choice of an answer that isn't streamed."""
        parts = self.read(chunk)
        content = "".join(part for part in parts if isinstance(part, str))
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls := [part for part in parts if isinstance(part, ToolCall)]:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in calls]}
        return {
            "index": chunk.index,
            "message": message,
            "logprobs": self.logprobs(),
            "finish_reason": self.finish_reason(chunk),
            "stop_reason": stop_reason(chunk, self._chat.stop_strings),
        }


class ChatEvents(Events):
    """Makes the events of a streamed chat."""

    def __init__(self, generation: Generation, head: Json, chat: ChatRequest, use: ToolUse) -> None:
        super().__init__(generation, head)
        self._stop_strings = chat.stop_strings
        self._choices = [_Choice(chat, use) for _ in range(chat.choices)]

    def begin(self) -> bytes:
        """Return the first event of every choice, which has the role."""
        first: Json = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._event(index, first, None) for index in range(len(self._choices)))

    def add(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk."""
        choice = self._choices[chunk.index]
        events = [
            self._event(chunk.index, {"delta": _delta(part)}, choice.logprobs() if number == 0 else None)
            for number, part in enumerate(choice.read(chunk))
        ]
        if chunk.finish_reason:
            logprobs = choice.logprobs() if choice.tokens else None
            reason: Json = {"stop_reason": stop_reason(chunk, self._stop_strings)}
            events.append(self._event(chunk.index, {"delta": {}}, logprobs, choice.finish_reason(chunk), reason))
        return b"".join(events)


def _delta(part: Part) -> Json:
    """Return a part as OpenAI's delta; a call comes whole."""
    if isinstance(part, str):
        return {"content": part}
    return {"tool_calls": [{"index": part.index, **_call(part)}]}


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
