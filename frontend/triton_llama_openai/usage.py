"""Counts of a request's tokens, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from triton_llama_openai.engine_client import Delta


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

    def body(self) -> dict[str, object]:
        """Return the answer's `usage`; without details where the server doesn't say how many tokens were cached."""
        counts: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self._cached:
            counts["prompt_tokens_details"] = {"cached_tokens": sum(self._cached.values())}
        return counts
