"""What the users of a soak have seen: everything that they asked for has its place here.

Two kinds of requests have an uncertain end, and are counted apart: one that its user left may have been completed
all the same, before the server noticed. Knows no server and no protocol.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MOST_MESSAGES = 50
"""Different errors that are kept; all are counted."""

_MESSAGE_CHARACTERS = 300


@dataclass
class Tally:
    """Counts since the soak began.

    done: actions by kind, whatever came of them. completed: answers by finish_reason. output_tokens: theirs.
    left: requests whose users didn't wait; left_tokens: what they had asked for. refused: bad requests, refused as
    they should be. same, different: answers to the fixed request that were what they always were, or weren't.
    errors: what nobody expects, by its message. busy: users that wait for something just now.
    """

    done: Counter[str] = field(default_factory=Counter)
    completed: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0
    left: int = 0
    left_tokens: int = 0
    refused: int = 0
    same: int = 0
    different: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    busy: int = 0
    _latencies: list[float] = field(default_factory=list)

    def complete(self, finish_reason: str, tokens: int, seconds: float) -> None:
        """Count an answer."""
        self.completed[finish_reason] += 1
        self.output_tokens += tokens
        self._latencies.append(seconds)

    def leave(self, tokens: int) -> None:
        """Count a request of so many tokens that wasn't waited for."""
        self.left += 1
        self.left_tokens += tokens

    def compare(self, is_same: bool) -> None:
        """Count an answer to the fixed request."""
        self.same += is_same
        self.different += not is_same

    def fail(self, message: str) -> None:
        """Count something that should not have happened."""
        message = " ".join(message.split())[:_MESSAGE_CHARACTERS]
        known = message in self.errors or len(self.errors) < MOST_MESSAGES
        self.errors[message if known else "other errors"] += 1

    def take_latencies(self) -> list[float]:
        """Return the seconds of the answers since this was asked last."""
        taken, self._latencies = self._latencies, []
        return taken
