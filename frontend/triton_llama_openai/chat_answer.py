"""Answers of /v1/chat/completions: one object, or events."""

from __future__ import annotations

from collections.abc import Iterable

from triton_llama_openai.answer import Events, Head, Json, Usage, stop_reason
from triton_llama_openai.chat_request import ChatRequest
from triton_llama_openai.engine_client import Delta, TokenLogprobs
from triton_llama_openai.logprobs import chat_logprobs
from triton_llama_openai.tool_calls import ArgumentsDelta, CallStart, ContentDelta, Part
from triton_llama_openai.tools import ToolUse


class _Choice:
    """One choice while it is generated. tokens: those whose text isn't sent yet. parts: of an unstreamed answer."""

    def __init__(self, request: ChatRequest, use: ToolUse) -> None:
        self._request = request
        self._use = use
        self._reader = use.reader()
        self._called = False
        self.tokens: list[TokenLogprobs] = []
        self.parts: list[Part] = []
        self.last: Delta | None = None

    def read(self, delta: Delta) -> list[Part]:
        """Return what a response adds to the choice."""
        self.tokens += delta.logprobs
        parts = self._reader.read(delta.text)
        if delta.finish_reason:
            parts = [*parts, *self._reader.end()]
            self.last = delta
        self._called = self._called or any(isinstance(part, CallStart) for part in parts)
        return parts

    def finish_reason(self, delta: Delta) -> str:
        """Return OpenAI's finish reason."""
        called = self._called and delta.finish_reason == "stop"
        return self._use.finish_reason if called else delta.finish_reason

    def logprobs(self) -> Json | None:
        """Return and remove the logprobs, None if they weren't asked for."""
        if not self._request.logprobs:
            return None
        tokens, self.tokens = self.tokens, []
        return {"content": chat_logprobs(tokens, self._request.top_logprobs or 0), "refusal": None}


class ChatAnswer:
    """Collects the deltas of an answer that isn't streamed."""

    def __init__(self, request: ChatRequest, use: ToolUse) -> None:
        self._request = request
        self._choices = [_Choice(request, use) for _ in range(request.choices)]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, prompt: int, deltas: Iterable[Delta]) -> None:
        """Take what a response says; a chat has one prompt."""
        for delta in deltas:
            choice = self._choices[delta.index]
            choice.parts += choice.read(delta)
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs = delta.prompt_logprobs

    def body(self, head: Head, usage: Usage) -> Json:
        """Return the answer."""
        body = {**head.body(), "choices": [self._choice(index, one) for index, one in enumerate(self._choices)]}
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs
        return {**body, "usage": usage.body()}

    def _choice(self, index: int, choice: _Choice) -> Json:
        assert choice.last is not None, "the engine's stream is complete"
        content = "".join(part.text for part in choice.parts if isinstance(part, ContentDelta))
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls := [part for part in choice.parts if isinstance(part, CallStart)]:
            message |= {"content": content or None, "tool_calls": [self._call(choice, call) for call in calls]}
        return {
            "index": index,
            "message": message,
            "logprobs": choice.logprobs(),
            "finish_reason": choice.finish_reason(choice.last),
            "stop_reason": stop_reason(choice.last, self._request.stop_strings),
        }

    def _call(self, choice: _Choice, call: CallStart) -> Json:
        texts = [part.text for part in choice.parts if isinstance(part, ArgumentsDelta) and part.index == call.index]
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(texts)}}


class ChatEvents(Events):
    """Turns the deltas of a streamed answer into events."""

    def __init__(self, request: ChatRequest, use: ToolUse, head: Head, usage: Usage) -> None:
        super().__init__(head, request.stream_options, usage)
        self._request = request
        self._choices = [_Choice(request, use) for _ in range(request.choices)]

    def begin(self) -> bytes:
        """Return the first event of every choice, which has the role."""
        first: Json = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._event(index, first, None) for index in range(self._request.choices))

    def add(self, prompt: int, deltas: Iterable[Delta]) -> bytes:
        """Return the events of a response, none if all its text is held back; a chat has one prompt."""
        return b"".join(event for delta in deltas for event in self._events(delta))

    def _events(self, delta: Delta) -> list[bytes]:
        choice = self._choices[delta.index]
        events = [
            self._event(delta.index, {"delta": _delta(part)}, choice.logprobs() if index == 0 else None)
            for index, part in enumerate(choice.read(delta))
        ]
        if delta.finish_reason:
            logprobs = choice.logprobs() if choice.tokens else None
            more: Json = {"stop_reason": stop_reason(delta, self._request.stop_strings)}
            events.append(self._event(delta.index, {"delta": {}}, logprobs, choice.finish_reason(delta), more))
        return events


def _delta(part: Part) -> Json:
    match part:
        case ContentDelta(text):
            return {"content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
