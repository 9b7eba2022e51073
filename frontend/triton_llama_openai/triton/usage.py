"""The token counts of a request and the times of its choices: an answer's `usage` and `timings`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from triton_llama.completion import Chunk, Times


@dataclass
class Usage:
    """Tokens of a request so far. A prompt counts once, however many completions (`choices_per_prompt`) it has.

    reasoning_tokens: those of all choices' reasoning, None as long as they aren't counted. accepted_prediction_tokens,
    rejected_prediction_tokens: those of all choices' drafts, None as long as the server doesn't say.
    """

    choices_per_prompt: int
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    _prompts: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)
    _times: list[Times | None] = field(default_factory=list)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Count the tokens of chunks."""
        for chunk in chunks:
            prompt = chunk.index // self.choices_per_prompt
            self.completion_tokens += chunk.num_output_tokens
            self._prompts[prompt] = max(self._prompts.get(prompt, 0), chunk.num_input_tokens)
            if chunk.num_cached_tokens is not None:
                # That of the choice which found least: the others also find what it has computed.
                cached = self._cached.get(prompt, chunk.num_cached_tokens)
                self._cached[prompt] = min(cached, chunk.num_cached_tokens)
            if (accepted := chunk.num_accepted_draft_tokens) is not None:
                self.accepted_prediction_tokens = accepted + (self.accepted_prediction_tokens or 0)
            if (rejected := chunk.num_rejected_draft_tokens) is not None:
                self.rejected_prediction_tokens = rejected + (self.rejected_prediction_tokens or 0)
            if chunk.finish_reason:
                self._times.append(chunk.times)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self._prompts.values())

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of all prompts that were cached, None as long as the server doesn't say."""
        return sum(self._cached.values()) if self._cached else None

    def body(self, *, before_text: bool = False) -> dict[str, object]:
        """Return the answer's `usage`; without details that the server doesn't say or that aren't counted.

        before_text: True for events sent before the first token; reports 0 completion tokens.
        """
        completion_tokens = 0 if before_text else self.completion_tokens
        counts: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }
        if self.cached_tokens is not None:
            counts["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        details = {
            "reasoning_tokens": self.reasoning_tokens,
            "accepted_prediction_tokens": self.accepted_prediction_tokens,
            "rejected_prediction_tokens": self.rejected_prediction_tokens,
        }
        if known := {name: count for name, count in details.items() if count is not None}:
            counts["completion_tokens_details"] = known
        return counts

    def timings(self, elapsed_ms: float) -> dict[str, object] | None:
        """Return the answer's `timings`, under llama.cpp's names, at its end; None without the times of every choice.

        Prefill lasts from the first choice's slot to the last choice's first token, decoding from the first choice's
        first token to the last choice's last one. elapsed_ms: since the request's arrival here.
        """
        times = [choice for choice in self._times if choice is not None]
        if not times or len(times) < len(self._times):
            return None
        begin, end = min(choice.first_scheduled for choice in times), max(choice.last_token for choice in times)
        prompt_ms = (max(choice.first_token for choice in times) - begin) / 1e6
        predicted_ms = (end - min(choice.first_token for choice in times)) / 1e6
        cached = self.cached_tokens or 0
        timings: dict[str, object] = {
            "queue_ms": round(elapsed_ms - (end - begin) / 1e6, 3),
            "cache_n": cached,
            "prompt_n": self.prompt_tokens - cached,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_second": _per_second(self.prompt_tokens - cached, prompt_ms),
            "predicted_n": self.completion_tokens,
            "predicted_ms": round(predicted_ms, 3),
            # The first token is prefill's.
            "predicted_per_second": _per_second(self.completion_tokens - 1, predicted_ms),
        }
        if self.accepted_prediction_tokens is not None and self.rejected_prediction_tokens is not None:
            timings["draft_n"] = self.accepted_prediction_tokens + self.rejected_prediction_tokens
            timings["draft_n_accepted"] = self.accepted_prediction_tokens
        return timings


def _per_second(tokens: int, milliseconds: float) -> float | None:
    return round(tokens / milliseconds * 1000, 3) if tokens > 0 and milliseconds > 0 else None
