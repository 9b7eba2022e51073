"""What the answers of chats and completions share: head, token counts, events, finish reasons, JSON."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from triton_llama_openai.engine_client import Delta
from triton_llama_openai.sampling_request import StreamOptions

Json = dict[str, object]


@dataclass(frozen=True)
class Head:
    """The fields that every object of an answer begins with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None

    @classmethod
    def new(cls, prefix: str, kind: str, model: str, fingerprint: str | None) -> Head:
        """Return the head of a new answer; its id begins with `prefix`."""
        return cls(f"{prefix}-{secrets.token_hex(16)}", kind, int(time.time()), model, fingerprint)

    def body(self) -> Json:
        """Return the fields."""
        return dict(vars(self))


@dataclass
class Usage:
    """Tokens of a request so far. A prompt counts once, however many completions it has."""

    completion_tokens: int = 0
    _prompts: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)

    def add(self, prompt: int, deltas: Iterable[Delta]) -> None:
        """Count the tokens of a response about the prompt of this number."""
        for delta in deltas:
            self.completion_tokens += delta.num_output_tokens
            self._prompts[prompt] = max(self._prompts.get(prompt, 0), delta.num_input_tokens)
            if delta.num_cached_tokens is not None:
                # The first choice's: the others find in the cache what it has computed.
                known = self._cached.get(prompt, delta.num_cached_tokens)
                self._cached[prompt] = min(known, delta.num_cached_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self._prompts.values())

    def body(self) -> Json:
        """Return the answer's `usage`; without details where the server doesn't say how many tokens were cached."""
        counts: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self._cached:
            counts["prompt_tokens_details"] = {"cached_tokens": sum(self._cached.values())}
        return counts


class Events(ABC):
    """Makes the events of one streamed answer: what they all have is encoded once. usage: the answer's, which grows."""

    def __init__(self, head: Head, options: StreamOptions | None, usage: Usage) -> None:
        self._head = b"data: " + dumps(head.body())[:-1] + b',"choices":['
        self._usage = usage
        self._has_last = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._tail = b'],"usage":null}\n\n' if self._has_last else b"]}\n\n"

    @abstractmethod
    def begin(self) -> bytes:
        """Return the events before the first text."""

    @abstractmethod
    def add(self, prompt: int, deltas: Iterable[Delta]) -> bytes:
        """Return the events of a response about the prompt of this number."""

    def end(self) -> bytes:
        """Return the event after the last text: the counts and no choice, where the request asks for it."""
        return self._head + self._counts() if self._has_last else b""

    def _event(
        self,
        index: int,
        content: Json,
        logprobs: Json | None,
        finish_reason: str | None = None,
        more: Json | None = None,
    ) -> bytes:
        """Return the event of a part of one choice, with the counts so far where every event has them."""
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason, **(more or {})}
        return self._head + dumps(choice) + (self._counts() if self._continuous else self._tail)

    def _counts(self) -> bytes:
        return b'],"usage":' + dumps(self._usage.body()) + b"}\n\n"


def error_event(body: Json) -> bytes:
    """Return the event of an error, which ends a stream."""
    return b"data: " + dumps(body) + b"\n\n"


def dumps(value: object) -> bytes:
    """Return JSON in UTF-8."""
    # A lone surrogate, which a call's arguments may escape, becomes an escape again.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def stop_reason(delta: Delta, stop_strings: Sequence[str]) -> str | int | None:
    """Return vLLM's stop_reason: the stop string, the stop token's id, or None for an end token or the length."""
    reason = delta.stop_reason
    if not reason or reason in stop_strings or not reason.isdecimal():
        return reason or None
    return int(reason)
