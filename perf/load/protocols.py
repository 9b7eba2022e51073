"""The protocols of the servers under test: how a request is worded and how its answer is read.

Requests are greedy and ask for an exact number of tokens where the protocol allows it, unless their own fields say
otherwise. Answers are read from (time, bytes) chunks after the run, so that parsing does not compete with receiving. An
error in an answer goes into its record; it is never skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from perf.load.records import Record

Protocol = Literal["triton_generate", "triton_stream", "openai_completions", "openai_chat"]
"""triton_generate: /v2/models/MODEL/generate, one response. triton_stream: .../generate_stream, server-sent events.
openai_completions: /v1/completions, openai_chat: /v1/chat/completions, both server-sent events."""

_PATHS: Mapping[Protocol, str] = {
    "triton_generate": "/v2/models/{}/generate",
    "triton_stream": "/v2/models/{}/generate_stream",
    "openai_completions": "/v1/completions",
    "openai_chat": "/v1/chat/completions",
}
_EVENT_END = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True)
class Target:
    """A server. url: http://host:port. fields: added to every request's JSON, such as vLLM's `ignore_eos`.

    keep_answers: whether records have the answers' JSON objects.
    """

    name: str
    protocol: Protocol
    url: str
    model: str
    fields: Mapping[str, object] = field(default_factory=dict)
    keep_answers: bool = False


@dataclass(frozen=True)
class Request:
    """One request of a load. output_tokens: the exact number to generate, greedily; 0: its fields decide.

    fields: added to its JSON, over the target's. turn: of a chat, from 1. From 2 on the same user sends it once the
    request before it in the load is answered, after the prompts and answers of the turns before. adapter: the LoRA
    adapter's name; "" for none.
    """

    prompt: str
    output_tokens: int
    turn: int = 1
    fields: Mapping[str, object] = field(default_factory=dict, hash=False)
    adapter: str = ""


class AnswerError(Exception):
    """The answer is an error, incomplete, or not what the protocol says; `str()` is one line."""


def path(target: Target) -> str:
    """Return the path of the request's URL."""
    return _PATHS[target.protocol].format(target.model)


def streams(target: Target, request: Request) -> bool:
    """Return whether the answer is a stream of server-sent events."""
    return bool(request.fields.get("stream", target.protocol in _READ_EVENT))


def body(target: Target, request: Request, history: Sequence[str] = ()) -> bytes:
    """Return the request's JSON; the target's fields override the protocol's, and the request's both.

    history: the prompts and answers of a chat's turns before, in turn.
    """
    texts, tokens = [*history, request.prompt], request.output_tokens
    fields: dict[str, object]
    if target.protocol in _OPENAI:
        messages = [
            {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)
        ]
        fields = {"messages": messages} if target.protocol == "openai_chat" else {"prompt": "".join(texts)}
        model = request.adapter or target.model
        fields |= {"model": model, "max_tokens": tokens, "temperature": 0.0, "stream": True}
        if streams(target, request):
            fields["stream_options"] = {"include_usage": True}
    else:
        fields = {"text_input": "".join(texts), "max_tokens": tokens, "min_tokens": tokens, "temperature": 0.0}
        # Overrides the checkpoint's generation config.
        fields |= {"repetition_penalty": 1.0, "stream": target.protocol == "triton_stream"}
        if request.adapter:
            fields["lora_name"] = request.adapter
    return json.dumps({**fields, **target.fields, **request.fields}).encode()


def read_answer(
    target: Target, request: Request, chunks: Sequence[tuple[float, bytes]], whole: bool, record: Record
) -> None:
    """Read an answer from its chunks and their times into its record, also what came before a fault.

    whole: whether the answer was received until its end, `record.ended`.
    """
    objects: list[Mapping[str, Any]] = []
    try:
        if streams(target, request):
            objects = _read_stream(_READ_EVENT[target.protocol], chunks, whole, record)
        elif whole:
            objects = [_object(b"".join(chunk for _, chunk in chunks))]
            if target.protocol in _OPENAI:
                _read_usage(record, objects[0])
            else:
                record.output_tokens = _count(objects[0], "num_output_tokens")
                record.prompt_tokens = _count(objects[0], "num_input_tokens")
    except AnswerError as error:
        record.error = str(error)
    record.answer = objects if target.keep_answers else ()


def _read_stream(
    read_event: Callable[[Record, Mapping[str, Any]], tuple[bool, bool]],
    chunks: Sequence[tuple[float, bytes]],
    whole: bool,
    record: Record,
) -> list[Mapping[str, Any]]:
    """Read a stream, and return its objects. read_event: returns whether an event has a token, and a finish reason."""
    finished, times, objects = False, list[float](), list[Mapping[str, Any]]()
    record.token_times = times
    for moment, data in _events(chunks):
        objects.append(_object(data))
        has_token, last = read_event(record, objects[-1])
        finished |= last
        times += [moment] if has_token else []
    if whole and not finished:
        raise AnswerError(f"the stream ended without a finish_reason, after {len(times)} events")
    if whole and record.prompt_tokens is None:
        raise AnswerError("the stream ended without a usage: its tokens can't be counted")
    if whole and not times:
        # Tokens without text, such as special ones, may never be sent; they exist when the stream ends. That request's
        # time to its first token is its latency.
        times.append(record.ended)
    return objects


def _events(chunks: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the time at which each server-sent event was whole, and its data."""
    buffer = b""
    for moment, chunk in chunks:
        *events, buffer = _EVENT_END.split(buffer + chunk)
        for event in events:
            data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
            if data and data != b"[DONE]":
                yield moment, data


def _triton_event(record: Record, fields: Mapping[str, Any]) -> tuple[bool, bool]:
    """Read one of our chunks: each counts its own tokens, and has the prompt's."""
    tokens = _count(fields, "num_output_tokens")
    record.output_tokens += tokens
    record.text += str(fields.get("text_output", ""))
    last = bool(fields.get("finish_reason"))
    if last:
        record.prompt_tokens = _count(fields, "num_input_tokens")
        if "num_cached_tokens" in fields:
            record.cached_tokens = _count(fields, "num_cached_tokens")
    return tokens > 0, last


def _completion_event(record: Record, fields: Mapping[str, Any]) -> tuple[bool, bool]:
    """Read an OpenAI chunk. It does not count its tokens; `usage`, near the end, has the total."""
    if fields.get("usage") is not None:
        _read_usage(record, fields)
    timings = fields.get("timings", {})
    if "draft_n" in timings:  # llama.cpp
        record.accepted_tokens = _count(timings, "draft_n_accepted")
        record.rejected_tokens = _count(timings, "draft_n") - record.accepted_tokens
    choices = [(_text(choice), choice.get("finish_reason") is not None) for choice in fields.get("choices", [])]
    record.text += "".join(text for text, _ in choices)
    # A chunk without text holds a token that is not text yet; some servers send a last chunk without a token.
    return any(text or not ends for text, ends in choices), any(ends for _, ends in choices)


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta", {})
    calls = (call.get("function", {}).get("arguments") for call in delta.get("tool_calls") or ())
    return "".join(filter(None, [delta.get("content"), choice.get("text"), *calls]))


def _read_usage(record: Record, fields: Mapping[str, Any]) -> None:
    usage = fields.get("usage")
    if not isinstance(usage, dict):
        raise AnswerError(f"the server's usage is {str(usage)[:80]}, must be an object")
    record.output_tokens = _count(usage, "completion_tokens")
    record.prompt_tokens = _count(usage, "prompt_tokens")
    if details := usage.get("prompt_tokens_details"):
        record.cached_tokens = _count(details, "cached_tokens")
    details = usage.get("completion_tokens_details") or {}
    if "accepted_prediction_tokens" in details:
        record.accepted_tokens = _count(details, "accepted_prediction_tokens")
        record.rejected_tokens = _count(details, "rejected_prediction_tokens")


_OPENAI = ("openai_completions", "openai_chat")
_READ_EVENT = {
    "triton_stream": _triton_event,
    "openai_completions": _completion_event,
    "openai_chat": _completion_event,
}


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
