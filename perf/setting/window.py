"""Over which time a closed loop's throughput is taken: while its load was what it is said to be.

A closed loop of 32 sends 32 requests at once and then one for each answer, until there are no more. Two parts of that
aren't the load of 32:

- **The beginning.** The first 32 arrive at an idle server; with a server that takes one at a time, they see a shorter
  queue than all later ones. They are the warm-up.
- **The end.** Once the last request is sent, every answer leaves a place empty. With mixed lengths the longest rows
  then decode alone for up to a request's whole time. The fewer requests a run has, the more of its time is this tail,
  and the less it says about the server.

So the window is from when the first request after the warm-up is sent, which is when an answer has come, to the first
answer after the last request was sent: in between, 32 are always underway. Both ends lie at an answer (where answers
come in batches, at the first of a batch), so the window isn't a batch too long or too short. What counts is the tokens
*generated* in it. Where a batch begins when the one before has ended, those are the tokens of the answers in the
window, its end excluded; with rows that are always underway they are not, because answers count parts that were
generated before, and leave out what is underway at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """begin, end: seconds, on the clock of the times it was made of."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.begin


def full_load(sent: Sequence[float], answered: Sequence[float], warmup: int) -> Window:
    """Return the window of a closed loop in which its concurrency holds, without the first `warmup` requests.

    sent, answered: of each request, in any order. Raises ValueError unless a request is left after the warm-up.
    """
    if not 0 <= warmup < len(sent):
        raise ValueError(f"warmup is {warmup}, must be 0 … {len(sent) - 1}: fewer than the requests")
    last = max(sent)
    return Window(sorted(sent)[warmup], min(moment for moment in answered if moment > last))
