"""A scheduler with everything around it. A test controls its pace: no forward pass runs before the test allows it."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from engine.engines import engine_of
from engine.forward_passes import ForwardPass, watching
from engine.metrics import RecordingRegistry
from llama_engine.engine.dispatcher import ResponseDispatcher
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Chunk, Event, RequestContext, Result
from llama_engine.engine.scheduler import Scheduler
from llama_engine.engine.sequence import Sequence
from llama_engine.model.loader import LoadedModel
from llama_engine.observability.stats import Stats
from llama_engine.request.generation_request import GenerationRequest

SECONDS = 60.0
"""How long a test waits for another thread before it fails."""

STUCK_SECONDS = 3600
"""How long a step may take: tests hold steps."""


class Pace:
    """Holds every forward pass until it is allowed. prompts: the longest chunks of the prefill passes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = 0
        self._reached = 0
        self.prompts: list[int] = []

    def __call__(self, forward: ForwardPass) -> None:
        with self._changed:
            if not forward.decodes:
                self.prompts.append(forward.longest)
            self._reached += 1
            number = self._reached
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: number <= self._allowed, SECONDS)

    def let(self, passes: int) -> None:
        """Allow this many passes, and wait until the next one is about to run."""
        with self._changed:
            self._allowed += passes
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._reached > self._allowed, SECONDS), "no more passes"

    def run_free(self) -> None:
        with self._changed:
            self._allowed = 1 << 30
            self._changed.notify_all()


class Client:
    """A response sink that keeps what it receives. lost: whether it can't be polled."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._polls = 0
        self.events: list[Event] = []
        self.cancelled = False
        self.lost = False

    def send(self, events: list[Event]) -> None:
        self.events += events

    def is_cancelled(self) -> bool:
        with self._changed:
            self._polls += 1
            self._changed.notify_all()
        if self.lost:
            raise ConnectionError("gone")
        return self.cancelled

    def cancel(self) -> None:
        """Cancel, and wait until the scheduler must know: it polls a third time only after it recorded the second
        answer; the first one may have been on its way already.
        """
        with self._changed:
            self.cancelled = True
            enough = self._polls + 3
            assert self._changed.wait_for(lambda: self._polls >= enough, SECONDS), "the scheduler doesn't poll"

    @property
    def chunks(self) -> list[Chunk]:
        return [event for event in self.events if isinstance(event, Chunk)]


@dataclass
class Running:
    """A running scheduler and its parts."""

    engine: Engine
    dispatcher: ResponseDispatcher
    registry: RecordingRegistry
    stats: Stats
    scheduler: Scheduler
    pace: Pace

    def add(self, *requests: GenerationRequest, stream: bool = False, deadline: float = math.inf) -> list[Sequence]:
        """Add sequences together, each with a client of its own."""
        context = partial(RequestContext, stream=stream, deadline=deadline)
        sequences = [self.engine.builder.build(request, context(Client())) for request in requests]
        self.scheduler.add(sequences)
        return sequences

    def finish(self, sequences: list[Sequence]) -> list[Result]:
        """Let everything run; return the results once they have been sent."""
        self.pace.run_free()
        self.scheduler.wait_until_finished(sequences)
        self.scheduler.stop(SECONDS)
        assert self.dispatcher.close(SECONDS)
        return [sent_result(sequence) for sequence in sequences]


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def client_of(sequence: Sequence) -> Client:
    assert isinstance(sequence.context.sink, Client)
    return sequence.context.sink


def sent_result(sequence: Sequence) -> Result:
    """The result that was sent, exactly once and after everything else."""
    (result,) = (event for event in client_of(sequence).events if not isinstance(event, Chunk))
    assert client_of(sequence).events[-1] is result is sequence.result
    return result


def scheduler_threads() -> list[threading.Thread]:
    """The scheduler's threads that are alive."""
    return [thread for thread in threading.enumerate() if thread.name in ("engine", "cancellation")]


@contextmanager
def running(checkpoint: LoadedModel, slots: int, **parameters: str) -> Iterator[Running]:
    """Start a scheduler on an engine, and end it."""
    engine, registry, pace = engine_of(checkpoint, slots, **parameters), RecordingRegistry(), Pace()
    dispatcher, recorder = ResponseDispatcher(), Stats(registry, slots)
    with watching(pace):
        scheduler = Scheduler(engine, dispatcher, recorder, STUCK_SECONDS)
        try:
            yield Running(engine, dispatcher, registry, recorder, scheduler, pace)
        finally:
            pace.run_free()
            scheduler.stop(0)
            dispatcher.close(SECONDS)
            recorder.close(SECONDS)
    assert scheduler_threads() == []
