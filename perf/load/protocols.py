"""The protocols of the servers under test: how a request is worded and how its answer is read.

Requests are greedy and ask for an exact number of tokens where the protocol allows it. Every request to a target has
the same set of fields, because Triton batches only those together. Answers are read from (time, bytes) chunks after
the run, so that parsing does not compete with receiving. An error in an answer is raised, never skipped.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Protocol = Literal["triton_generate", "triton_stream", "openai_completions", "fastapi"]
"""triton_generate: /v2/models/MODEL/generate, one response. triton_stream: .../generate_stream, server-sent events.
openai_completions: /v1/completions, server-sent events. fastapi: /generate, one response: the article's servers."""

_EVENT_END = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True)
class Target:
    """A server. url: http://host:port. fields: added to every request's JSON, such as vLLM's `ignore_eos`."""

    name: str
    protocol: Protocol
    url: str
    model: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One request of a load. output_tokens: the exact number to generate, greedily."""

    prompt: str
    output_tokens: int


class AnswerError(Exception):
    """The answer is an error, incomplete, or not what the protocol says; `str()` is one line."""


def path(target: Target) -> str:
    """Return the path of the request's URL. Raises ValueError for an unknown protocol."""
    match target.protocol:
        case "triton_generate":
            return f"/v2/models/{target.model}/generate"
        case "triton_stream":
            return f"/v2/models/{target.model}/generate_stream"
        case "openai_completions":
            return "/v1/completions"
        case "fastapi":
            return "/generate"
    raise ValueError(f"unknown protocol {target.protocol!r}")


def body(target: Target, request: Request) -> bytes:
    """Return the request's JSON; the target's own fields override the protocol's."""
    match target.protocol:
        case "triton_generate" | "triton_stream":
            fields: dict[str, object] = {
                "text_input": request.prompt,
                "max_tokens": request.output_tokens,
                "min_tokens": request.output_tokens,
                "temperature": 0.0,
                # Overrides the checkpoint's generation config.
                "repetition_penalty": 1.0,
                "stream": target.protocol == "triton_stream",
            }
        case "openai_completions":
            fields = {
                "model": target.model,
                "prompt": request.prompt,
                "max_tokens": request.output_tokens,
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        case "fastapi":
            fields = {"prompt": request.prompt, "max_tokens": request.output_tokens}
    return json.dumps({**fields, **target.fields}).encode()


class Answer(ABC):
    """One request's answer; times are those of its chunks."""

    def __init__(self) -> None:
        self.token_times: list[float] = []
        self.last_token: float | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens = 0

    @abstractmethod
    def feed(self, chunk: bytes, now: float) -> None:
        """Read the next bytes of the body, received at `now`; raises AnswerError."""

    @abstractmethod
    def end(self, now: float) -> None:
        """Mark the body as complete; raises AnswerError if the answer is not."""


def answer_of(protocol: Protocol) -> Answer:
    """Return a reader for one answer."""
    match protocol:
        case "triton_generate":
            return _Unary("num_output_tokens", "num_input_tokens")
        case "fastapi":
            return _Unary("tokens", None)
        case "triton_stream":
            return _TritonChunks()
        case "openai_completions":
            return _Completions()


class _Unary(Answer):
    """One JSON object."""

    def __init__(self, output_count: str, prompt_count: str | None) -> None:
        super().__init__()
        self._names = (output_count, prompt_count)
        self._body = bytearray()

    def feed(self, chunk: bytes, now: float) -> None:
        self._body += chunk

    def end(self, now: float) -> None:
        fields = _object(bytes(self._body))
        output_count, prompt_count = self._names
        self.output_tokens = _count(fields, output_count)
        self.prompt_tokens = None if prompt_count is None else _count(fields, prompt_count)
        self.last_token = now


class _Events(Answer):
    """Server-sent events."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = b""
        self._ended = False

    def feed(self, chunk: bytes, now: float) -> None:
        *events, self._buffer = _EVENT_END.split(self._buffer + chunk)
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
            data = b"\n".join(lines)
            if lines and data.strip() != b"[DONE]" and self._has_token(_object(data)):
                self._note(now)

    def end(self, now: float) -> None:
        if not self._ended:
            raise AnswerError(f"the stream ended without a finish_reason, after {len(self.token_times)} events")
        if not self.token_times:
            # Tokens without text, such as special ones, may never be sent; they exist when the stream ends.
            self._note(now)

    @abstractmethod
    def _has_token(self, fields: Mapping[str, Any]) -> bool:
        """Read an event; return whether it contains a token."""

    def _note(self, now: float) -> None:
        self.token_times.append(now)
        self.last_token = now


class _TritonChunks(_Events):
    """Our chunks: each counts its own tokens, the last one the prompt's."""

    def _has_token(self, fields: Mapping[str, Any]) -> bool:
        tokens = _count(fields, "num_output_tokens")
        self.output_tokens += tokens
        if fields.get("finish_reason"):
            self._ended = True
            self.prompt_tokens = _count(fields, "num_input_tokens")
        return tokens > 0


class _Completions(_Events):
    """OpenAI's completion chunks. They do not count their tokens; `usage`, near the end, has the total."""

    def __init__(self) -> None:
        super().__init__()
        self._counted = False

    def end(self, now: float) -> None:
        super().end(now)
        if not self._counted:
            raise AnswerError("the stream ended without a usage: its tokens can't be counted")

    def _has_token(self, fields: Mapping[str, Any]) -> bool:
        usage = fields.get("usage")
        if isinstance(usage, dict):
            self._counted = True
            self.output_tokens = _count(usage, "completion_tokens")
            self.prompt_tokens = _count(usage, "prompt_tokens")
        has_token = False
        for choice in fields.get("choices", []):
            ends = choice.get("finish_reason") is not None
            self._ended = self._ended or ends
            # A chunk without text holds a token that is not text yet; some servers send a last chunk without a token.
            has_token = has_token or bool(choice.get("text")) or not ends
        return has_token


def _object(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise AnswerError(f"the server sent invalid JSON: {data[:80]!r}") from error
    if not isinstance(fields, dict):
        raise AnswerError(f"the server sent {data[:80]!r}, must be a JSON object")
    if "error" in fields:
        raise AnswerError(f"the server answered with an error: {str(fields['error'])[:200]}")
    return fields


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise AnswerError(f"the server's {name} is {str(value)[:80]}, must be an integer")
    return value
