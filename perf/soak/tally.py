"""What a soak's users counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from triton_llama import Completion, SamplingParams

from perf.soak.workload import LONGEST_OUTPUT

MOST_MESSAGES = 50
"""Different error messages that are kept; all are counted."""

_MESSAGE_CHARACTERS = 300


class Given(NamedTuple):
    """A complete answer of another client than ours."""

    text: str
    finish_reason: str
    num_output_tokens: int


Answer = Completion | Given


@dataclass
class Tally:
    """Counts since the soak began.

    counts: what the server must have counted too: answers by finish_reason ("stop", "length") and their
    "output_tokens"; "left", abandoned requests, which the server may have completed all the same, and "left_tokens",
    what they had asked for; "refused", invalid requests that were refused. done: actions by kind. same, different:
    texts of the fixed request. errors: unexpected ones, by message. busy: users that wait for an answer now.
    """

    counts: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    same: int = 0
    different: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    busy: int = 0
    _latencies: list[float] = field(default_factory=list)

    def complete(self, answer: Answer, asked: SamplingParams, seconds: float) -> None:
        """Count an answer, and check its length."""
        tokens = answer.num_output_tokens
        assert asked.max_tokens is not None
        assert asked.min_tokens is not None
        if not asked.min_tokens <= tokens <= asked.max_tokens:
            self.fail(f"{tokens} tokens came, {asked.min_tokens} to {asked.max_tokens} were asked for")
        self.counts += Counter({answer.finish_reason: 1, "output_tokens": tokens})
        self._latencies.append(seconds)

    def leave(self) -> None:
        """Count an abandoned request, a long one."""
        self.counts += Counter(left=1, left_tokens=LONGEST_OUTPUT)

    def fail(self, message: str) -> None:
        """Count an unexpected error."""
        message = " ".join(message.split())[:_MESSAGE_CHARACTERS]
        known = message in self.errors or len(self.errors) < MOST_MESSAGES
        self.errors[message if known else "other errors"] += 1

    def take_latencies(self) -> list[float]:
        """Return the seconds of the answers since the last call."""
        taken, self._latencies = self._latencies, []
        return taken
