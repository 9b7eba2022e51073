"""Running an engine step by step, with a record of the steps."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine, Step
from llama_engine.rows import Outcome, Row


@dataclass
class Run:
    """Rows that went through an engine, in the order in which they entered, and every step of it."""

    rows: list[Row]
    steps: list[Step] = field(default_factory=list)

    @property
    def outcomes(self) -> list[Outcome]:
        """What each row came to; every one must have come to something."""
        outcomes = [row.outcome for row in self.rows if row.outcome is not None]
        assert len(outcomes) == len(self.rows), "a row ended without an outcome"
        return outcomes

    @property
    def errors(self) -> int:
        return sum(step.errors for step in self.steps)

    @property
    def ended(self) -> list[Row]:
        """The rows in the order in which they ended."""
        return [row for step in self.steps for row in step.ended]


def run_rows(engine: Engine, rows: Sequence[Row]) -> Run:
    """Let the rows in as soon as there are slots, and step until all have ended; nobody may end twice."""
    run = Run(list(rows))
    waiting = deque(rows)
    while waiting or engine.taken:
        while waiting and engine.taken < engine.slots:
            engine.enter(waiting.popleft())
        run.steps.append(engine.step())
    assert len(run.ended) == len(set(run.ended)) == len(rows)
    return run


def run_requests(engine: Engine, requests: Sequence[GenerationRequest]) -> Run:
    return run_rows(engine, [engine.row(request) for request in requests])
