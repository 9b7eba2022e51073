"""A row's way through the scheduler: whose it is, how long it may wait, and when what happened to it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from llama_engine.delivery import Reply
from llama_engine.rows import Outcome, Row


@dataclass(eq=False)
class Ticket:
    """A row with its reply.

    index: of the row in its request. stream: its text goes out in pieces. deadline: by when it must have got a slot.
    arrived, entered, started, ended: when it was made, got its slot, had its first token and its outcome. All on the
    monotonic clock, in seconds; NaN until then.
    """

    row: Row
    reply: Reply
    index: int = 0
    stream: bool = False
    deadline: float = math.inf
    arrived: float = field(default_factory=time.monotonic)
    entered: float = math.nan
    started: float = math.nan
    ended: float = math.nan
    outcome: Outcome | None = None

    @property
    def left_the_queue(self) -> bool:
        """Whether it waits for a slot no more."""
        return self.outcome is not None or not math.isnan(self.entered)
