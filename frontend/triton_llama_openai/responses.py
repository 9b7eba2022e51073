"""The fields that the answers of chats and completions share, and their JSON."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from triton_llama_openai.engine_client import Chunk

Json = dict[str, object]


def response_head(prefix: str, kind: str, model: str, fingerprint: str | None) -> Json:
    """Return the fields that every object of one answer begins with; its id begins with `prefix`."""
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }


@dataclass
class Usage:
    """Tokens of a request so far. A prompt counts once, however many completions (`choices_per_prompt`) it has."""

    choices_per_prompt: int
    completion_tokens: int = 0
    _prompts: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Count the tokens of a response."""
        for chunk in chunks:
            prompt = chunk.index // self.choices_per_prompt
            self.completion_tokens += chunk.num_output_tokens
            self._prompts[prompt] = max(self._prompts.get(prompt, 0), chunk.num_input_tokens)
            if chunk.num_cached_tokens is not None:
                # The first choice's: the others find in the cache what it has computed.
                cached = self._cached.get(prompt, chunk.num_cached_tokens)
                self._cached[prompt] = min(cached, chunk.num_cached_tokens)

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


def stop_reason(chunk: Chunk, stop_strings: Sequence[str]) -> str | int | None:
    """Return vLLM's stop_reason: the stop string, the stop token's id, or None for an end token or the length."""
    reason = chunk.stop_reason
    if not reason or reason in stop_strings or not reason.isdecimal():
        return reason or None
    return int(reason)


def dumps(value: object) -> bytes:
    """Return JSON in UTF-8."""
    # A lone surrogate, which a call's arguments may escape, becomes an escape again.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")
