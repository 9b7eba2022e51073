"""Answers of /v1/chat/completions: one object, or events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from triton_llama_openai.answer import EventWriter, Head, Json, stop_reason
from triton_llama_openai.chat_request import ChatRequest
from triton_llama_openai.engine_client import Delta, TokenLogprobs
from triton_llama_openai.logprobs import chat_logprobs
from triton_llama_openai.tool_calls import ArgumentsDelta, CallStart, ContentDelta, Part, TextReader
from triton_llama_openai.tools import ToolUse
from triton_llama_openai.usage import Usage


@dataclass
class _Choice:
    """One choice while it is generated. logprobs: of tokens whose text isn't sent yet."""

    reader: TextReader
    called: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    last: Delta | None = None

    def read(self, delta: Delta) -> list[Part]:
        """Return what a response adds to the choice."""
        self.logprobs += delta.logprobs
        parts = self.reader.read(delta.text)
        if delta.finish_reason:
            parts = [*parts, *self.reader.end()]
            self.last = delta
        self.called = self.called or any(isinstance(part, CallStart) for part in parts)
        return parts


class _Choices:
    """The choices of one answer."""

    def __init__(self, request: ChatRequest, use: ToolUse) -> None:
        self._request = request
        self._use = use
        self.choices = [_Choice(use.reader()) for _ in range(request.choices)]

    def finish_reason(self, choice: _Choice, delta: Delta) -> str:
        """Return OpenAI's finish reason."""
        called = choice.called and delta.finish_reason == "stop"
        return self._use.finish_reason if called else delta.finish_reason

    def logprobs(self, choice: _Choice) -> Json | None:
        """Return and remove the choice's logprobs, None if they weren't asked for."""
        if not self._request.logprobs:
            return None
        tokens, choice.logprobs = choice.logprobs, []
        return {"content": chat_logprobs(tokens, self._request.top_logprobs or 0), "refusal": None}


class ChatAnswer(_Choices):
    """Collects the deltas of an answer that isn't streamed."""

    def __init__(self, request: ChatRequest, use: ToolUse) -> None:
        super().__init__(request, use)
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, prompt: int, deltas: Iterable[Delta]) -> None:
        """Take what a response says; a chat has one prompt."""
        for delta in deltas:
            choice = self.choices[delta.index]
            choice.parts += choice.read(delta)
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs = delta.prompt_logprobs

    def body(self, head: Head, usage: Usage) -> Json:
        """Return the answer."""
        body = {**head.body(), "choices": [self._choice(index) for index in range(len(self.choices))]}
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs
        return {**body, "usage": usage.body()}

    def _choice(self, index: int) -> Json:
        choice = self.choices[index]
        assert choice.last is not None, "the engine's stream is complete"
        content = "".join(part.text for part in choice.parts if isinstance(part, ContentDelta))
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls := [part for part in choice.parts if isinstance(part, CallStart)]:
            message |= {"content": content or None, "tool_calls": [self._call(choice, call) for call in calls]}
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(choice),
            "finish_reason": self.finish_reason(choice, choice.last),
            "stop_reason": stop_reason(choice.last, self._request.stop_strings),
        }

    def _call(self, choice: _Choice, call: CallStart) -> Json:
        texts = [part.text for part in choice.parts if isinstance(part, ArgumentsDelta) and part.index == call.index]
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(texts)}}


class ChatEvents(_Choices):
    """Turns the deltas of a streamed answer into events."""

    def __init__(self, request: ChatRequest, use: ToolUse, head: Head, usage: Usage) -> None:
        super().__init__(request, use)
        self._writer = EventWriter(head, request.stream_options, usage)

    def begin(self) -> bytes:
        """Return the first event of every choice, which has the role."""
        return b"".join(
            self._event(index, {"role": "assistant", "content": ""}, None) for index in range(len(self.choices))
        )

    def add(self, prompt: int, deltas: Iterable[Delta]) -> bytes:
        """Return the events of a response, none if all its text is held back; a chat has one prompt."""
        return b"".join(event for delta in deltas for event in self._events(delta))

    def end(self) -> bytes:
        """Return the event with the counts, where the request asks for it."""
        return self._writer.end()

    def _events(self, delta: Delta) -> list[bytes]:
        choice = self.choices[delta.index]
        events = [
            self._event(delta.index, _delta(part), self.logprobs(choice) if index == 0 else None)
            for index, part in enumerate(choice.read(delta))
        ]
        if delta.finish_reason:
            logprobs = self.logprobs(choice) if choice.logprobs else None
            reason = self.finish_reason(choice, delta)
            more: Json = {"stop_reason": stop_reason(delta, self._request.stop_strings)}
            events.append(self._event(delta.index, {}, logprobs, reason, more))
        return events

    def _event(
        self, index: int, delta: Json, logprobs: Json | None, finish_reason: str | None = None, more: Json | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **(more or {})}
        return self._writer.choice(choice)


def _delta(part: Part) -> Json:
    match part:
        case ContentDelta(text):
            return {"content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
