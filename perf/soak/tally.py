"""What a soak's users counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from triton_llama import SamplingParams

from perf.soak.workload import LONGEST_OUTPUT

MOST_MESSAGES = 50
"""Different error messages that are kept; all are counted."""

_MESSAGE_CHARACTERS = 300


class Answer(Protocol):
    """A complete answer, of any client."""

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""


@dataclass(frozen=True)
class Given:
    """A complete answer of another client than ours."""

    text: str
    finish_reason: str
    num_output_tokens: int


@dataclass
class Counts:
    """What the server must have counted too.

    completed: answers by finish_reason; output_tokens: theirs. left: abandoned requests, which the server may have
    completed all the same; left_tokens: what they had asked for. refused: invalid requests that were refused.
    """

    completed: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0
    left: int = 0
    left_tokens: int = 0
    refused: int = 0

    def plus(self, other: Counts, sign: int = 1) -> Counts:
        """Return the sums with another's, or with a sign of -1 the differences."""
        completed = Counter(self.completed)
        for reason, count in other.completed.items():
            completed[reason] += sign * count
        return Counts(
            completed,
            self.output_tokens + sign * other.output_tokens,
            self.left + sign * other.left,
            self.left_tokens + sign * other.left_tokens,
            self.refused + sign * other.refused,
        )


@dataclass
class Tally(Counts):
    """Counts since the soak began.

    done: actions by kind. same, different: texts of the fixed request. errors: unexpected ones, by message. busy: users
    that wait for an answer now.
    """

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
        self.completed[answer.finish_reason] += 1
        self.output_tokens += tokens
        self._latencies.append(seconds)

    def leave(self) -> None:
        """Count an abandoned request, a long one."""
        self.left += 1
        self.left_tokens += LONGEST_OUTPUT

    def fail(self, message: str) -> None:
        """Count an unexpected error."""
        message = " ".join(message.split())[:_MESSAGE_CHARACTERS]
        known = message in self.errors or len(self.errors) < MOST_MESSAGES
        self.errors[message if known else "other errors"] += 1

    def take_latencies(self) -> list[float]:
        """Return the seconds of the answers since the last call."""
        taken, self._latencies = self._latencies, []
        return taken

    def since(self, earlier: Counts) -> Counts:
        """Return what was counted since `earlier`, a copy from `now`."""
        return self.plus(earlier, -1)

    def now(self) -> Counts:
        """Return a copy of the counts."""
        return self.plus(Counts())
