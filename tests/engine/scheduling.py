"""A scheduler with everything around it, at a pace that a test sets: no forward pass runs before it is let through."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.engines import engine_of
from engine.forward_passes import ForwardPass, watching
from engine.registries import RecordingRegistry
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.delivery import Delivery, Part
from llama_engine.engine import Engine
from llama_engine.model.loader import Checkpoint
from llama_engine.observability.stats import Meter
from llama_engine.rows import Outcome, Piece
from llama_engine.scheduler import Scheduler
from llama_engine.tickets import Ticket

SECONDS = 60.0
"""How long a test waits for another thread before it gives up; none takes nearly so long."""

STUCK_SECONDS = 3600
"""How long a step may take: they are held up by tests."""


class Pace:
    """Holds every forward pass up until it is let through, and keeps the widths of those that read prompts."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = 0
        self._reached = 0
        self.prompts: list[int] = []

    def __call__(self, one: ForwardPass) -> None:
        with self._changed:
            if one.width > 1:
                self.prompts.append(one.width)
            self._reached += 1
            number = self._reached
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: number <= self._allowed, SECONDS)

    def let(self, passes: int) -> None:
        """Let so many passes through, and wait until the one after them is about to run."""
        with self._changed:
            self._allowed += passes
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._reached > self._allowed, SECONDS), "no more passes"

    def run_free(self) -> None:
        with self._changed:
            self._allowed = 1 << 30
            self._changed.notify_all()


class Answers:
    """The way back to a client: keeps what it is sent. `refuses` names a method that a test wants to fail."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._questions = 0
        self.parts: list[Part] = []
        self.cancelled = False
        self.refuses = ""

    def send(self, parts: Sequence[Part]) -> None:
        self._check("send")
        self.parts += parts

    def is_cancelled(self) -> bool:
        with self._changed:
            self._questions += 1
            self._changed.notify_all()
        self._check("is_cancelled")
        return self.cancelled

    def cancel(self) -> None:
        """Cancel, and wait until the scheduler must know: it asks a third time only after it noted the second answer.

        The first one may have been on its way already.
        """
        with self._changed:
            self.cancelled = True
            enough = self._questions + 3
            assert self._changed.wait_for(lambda: self._questions >= enough, SECONDS), "nobody asked"

    def _check(self, method: str) -> None:
        if self.refuses == method:
            raise ConnectionError("gone")

    @property
    def outcomes(self) -> list[Outcome]:
        return [part.what for part in self.parts if not isinstance(part.what, Piece)]

    @property
    def pieces(self) -> list[Piece]:
        return [part.what for part in self.parts if isinstance(part.what, Piece)]


@dataclass
class House:
    """A running scheduler and its parts."""

    engine: Engine
    delivery: Delivery
    registry: RecordingRegistry
    meter: Meter
    scheduler: Scheduler
    pace: Pace

    def submit(self, request: GenerationRequest, **fields: float) -> Ticket:
        """Let one row in with an answer of its own. fields: stream, deadline."""
        return self.submit_all([request], **fields)[0]

    def submit_all(self, requests: Sequence[GenerationRequest], **fields: float) -> list[Ticket]:
        """Let rows in together, each with an answer of its own."""
        tickets = [Ticket(self.engine.row(one), Answers(), **fields) for one in requests]  # type: ignore[arg-type]
        self.scheduler.submit(tickets)
        return tickets

    def begin_to_stop(self, drain_seconds: float) -> threading.Thread:
        """Stop the scheduler in a thread, and return when it has heard of it: when nobody is let in any more."""
        thread = threading.Thread(target=self.scheduler.stop, args=(drain_seconds,))
        thread.start()
        probe = GenerationRequest(prompt="", prompt_tokens=(5,), max_tokens=1)
        while self.submit(probe).outcome is None:
            time.sleep(0.001)
        return thread

    def finish(self, tickets: Sequence[Ticket]) -> list[Outcome]:
        """Let everything run; return what became of the tickets once it has been sent."""
        self.pace.run_free()
        self.scheduler.wait_for_ends(tickets)
        self.scheduler.stop(SECONDS)
        assert self.delivery.close(SECONDS)
        return [outcome_of(ticket) for ticket in tickets]


def answers_of(ticket: Ticket) -> Answers:
    assert isinstance(ticket.reply, Answers)
    return ticket.reply


def outcome_of(ticket: Ticket) -> Outcome:
    """The outcome that was sent, exactly once and after everything else."""
    answers = answers_of(ticket)
    (outcome,) = answers.outcomes
    assert answers.parts[-1].what is outcome is ticket.outcome
    return outcome


def scheduler_threads() -> list[threading.Thread]:
    """The scheduler's threads that are alive."""
    return [thread for thread in threading.enumerate() if thread.name in ("engine", "cancellation")]


@contextmanager
def house(checkpoint: Checkpoint, slots: int, meter: type[Meter] = Meter, **parameters: str) -> Iterator[House]:
    """Start a scheduler on an engine, and end it."""
    engine, registry, pace, delivery = (
        engine_of(checkpoint, slots, **parameters),
        RecordingRegistry(),
        Pace(),
        Delivery(),
    )
    note = meter(registry, slots)
    with watching(checkpoint, pace):
        scheduler = Scheduler(engine, delivery, note, STUCK_SECONDS)
        try:
            yield House(engine, delivery, registry, note, scheduler, pace)
        finally:
            pace.run_free()
            scheduler.stop(0)
            delivery.close(SECONDS)
            note.close(SECONDS)
    assert scheduler_threads() == []
